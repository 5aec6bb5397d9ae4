"""Which page of an adaptive cache stands on which rung, step by step; no torch.

- Pages of a window are HOT: the first `sink_pages` of a sequence, every page with one of its last
  `window_tokens` tokens, and the page that is being written. A page that several sequences share
  is HOT as long as it lies in a window of one of them.
- A page that leaves its last window is routine: encoded, at first to 4 bits. From then on it only
  goes down the ladder, one rung at a time: where the mean bytes of the routine pages that are held
  exceed the budget, or where another page needs a plane, the page whose lower rung costs the least
  goes down.
- Pages that nobody holds keep what they have until another page needs it. They count for the
  ledger, not for the budget.

The cost of a rung is importance * damage / bytes saved. Importance is the softmax mass that queries
put on the page, with earlier steps counting less and less. Costs are noisy: among pages within
`hysteresis` of the cheapest the oldest goes, a page displaces only those whose cost is lower by
this factor, and pages younger than `min_age` go last.

The budget is one of routine pages, since nothing is ever promoted: were windows part of it, all
pages of a short sequence would go down to pay for them, and stay down however long it becomes.

Letters: P pages.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from subten.cache.planes import (
    KIND_EMPTY,
    KIND_HOT,
    NOWHERE,
    Place,
    PlaneLedger,
    PlaneNumbers,
    Rung,
)
from subten.core import PAGE_SIZE

KEY_WEIGHT = 7.0
"""Harm of an error in keys over that of an equal relative error in values, of rotated rows as they
are. An estimate from one small model; what matters is that it is above 1."""


MIN_AGE = 8 * PAGE_SIZE
"""Tokens for which a page keeps what it has if others can give: errors of values in the newest
pages cost SmolLM2-135M nine times as much as those in older ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityPolicy:
    """What is kept in BF16, and how far the rest may go.

    `key_weight` is the harm of an error in keys over that of one in values; the lighter of the two
    loses its refinement first. `routine_bytes` is what a routine page may take in the mean over
    those held, None for no limit but the pools. `min_age` counts tokens since the page left its
    window; `decay` is what importance keeps from one reading of the masses to the next.
    """

    sink_pages: int
    window_tokens: int
    routine_bytes: float | None = None
    key_weight: float = KEY_WEIGHT
    min_age: int = MIN_AGE
    hysteresis: float = 1.5
    decay: float = 0.8


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a sequence, which a step computes, and all of its pages."""

    request_id: str
    page_ids: list[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Move:
    """A page whose content goes from the planes of `source` to those of `target`.

    Its first rows also go to the plane `sink`, unless that is -1.
    """

    page_id: int
    source: Place
    target: Place
    sink: int = -1


@dataclass(slots=True)
class _Window:
    """Pages [first, end) of a sequence, and the sinks among those before, are in its window."""

    page_ids: list[int]
    first: int
    end: int


class Fidelity:
    """Decides, and keeps the ledger; whoever calls it moves the bytes, in the order of the calls.

    It listens to a `PageAllocator` (`page_held`, `page_idle`, `page_freed`). A step is `prepare`,
    the forward pass, `settle`; a sequence that lets go of its pages is told by `leave`, before the
    allocator is.
    """

    def __init__(
        self,
        policy: FidelityPolicy,
        *,
        counts: PlaneNumbers,
        plane_bytes: PlaneNumbers,
        num_pages: int,
    ) -> None:
        self.policy = policy
        self.ledger = PlaneLedger(
            counts, plane_bytes, num_pages, frees_v_first=policy.key_weight >= 1.0
        )
        self.held_bytes = 0
        self.held_tokens = 0
        self._routine_bytes = 0
        self._num_routine = 0
        self.importance_P = np.zeros(num_pages)
        self._rung_P = np.full(num_pages, Rung.EMPTY, dtype=np.int8)
        self._is_held_P = np.zeros(num_pages, dtype=bool)
        self._fill = [0] * num_pages
        self._born_P = np.zeros(num_pages, dtype=np.int64)
        self._num_windows = [0] * num_pages
        self._windows: dict[str, _Window] = {}
        self._total_P = np.zeros(num_pages, dtype=np.int64)
        self._clock = 0
        # Hot pages that may have lost their last window, looked at by the next `_tidy`.
        self._loose: set[int] = set()
        self._firsts: set[int] = set()
        self._idle_hot: OrderedDict[int, None] = OrderedDict()
        self._origin: dict[int, Place] = {}
        self._changed: set[int] = set()
        # Cost of the next rung down for an importance of 1, by rung; the last rung has none.
        self._cost = np.full(len(Rung), np.inf)
        self._by_rung = by_rung = plane_bytes.by_rung
        # The relative error grows by about .11 both from 4 bits to 2 and from there to COLD.
        light, heavy = sorted((policy.key_weight, 1.0))
        damages = {Rung.MIDDLE: light, Rung.K2V2: heavy, Rung.COLD: light + heavy}
        for rung, damage in damages.items():
            if rung is not Rung.COLD or counts.cold > 0:
                self._cost[rung - 1] = damage / (by_rung[rung - 1] - by_rung[rung])

    # What the allocator tells.

    def page_held(self, page_id: int) -> None:
        """A page that nobody held got its first holder."""
        self._is_held_P[page_id] = True
        self._account(page_id, +1)
        self._born_P[page_id] = self._clock
        if page_id in self._idle_hot:
            del self._idle_hot[page_id]
            self._loose.add(page_id)

    def page_idle(self, page_id: int) -> None:
        """A page lost its last holder and keeps its content."""
        assert self._num_windows[page_id] == 0, (page_id, self._num_windows[page_id])
        self._account(page_id, -1)
        self._is_held_P[page_id] = False
        if self._rung_P[page_id] == Rung.HOT:
            self._idle_hot[page_id] = None

    def page_freed(self, page_id: int) -> None:
        """A page lost its content: its planes are free at once."""
        assert self._num_windows[page_id] == 0, (page_id, self._num_windows[page_id])
        if self._is_held_P[page_id]:
            self._account(page_id, -1)
            self._is_held_P[page_id] = False
        self.ledger.clear(page_id)
        self._rung_P[page_id] = Rung.EMPTY
        self._fill[page_id] = 0
        self.importance_P[page_id] = 0.0
        self._idle_hot.pop(page_id, None)
        self._loose.discard(page_id)
        self._firsts.discard(page_id)
        self._changed.add(page_id)

    # What a step tells.

    def prepare(self, spans: Sequence[Span]) -> list[Move]:
        """Make every page HOT that the step writes; the moves to be made before it."""
        places = self.ledger.places
        self._tidy()
        for span in spans:
            self._extend_window(span)
        for span in spans:
            for index in range(span.start // PAGE_SIZE, _num_pages(span.end)):
                page_id = span.page_ids[index]
                if places[page_id].kind == KIND_EMPTY:
                    self._open(page_id)
                    if index == 0:
                        self._firsts.add(page_id)
                assert places[page_id].kind == KIND_HOT, (page_id, places[page_id])
        return self._take_moves()

    def settle(self, spans: Sequence[Span]) -> list[Move]:
        """The step is computed: encode what left the windows, and meet the budget; the moves."""
        for span in spans:
            for index in range(span.start // PAGE_SIZE, _num_pages(span.end)):
                page_id = span.page_ids[index]
                num_rows = min(PAGE_SIZE, span.end - index * PAGE_SIZE)
                self.held_tokens += num_rows - self._fill[page_id]
                self._fill[page_id] = num_rows
            self._advance_window(span)
        self._clock += max((span.end - span.start for span in spans), default=0)
        self._tidy()
        self._meet_budget()
        return self._take_moves()

    def leave(self, request_id: str) -> None:
        """A sequence is about to let go of all its pages; one that has no window is ignored."""
        window = self._windows.pop(request_id, None)
        if window is None:
            return
        sinks = range(min(self.policy.sink_pages, window.end))
        for index in (*sinks, *range(max(self.policy.sink_pages, window.first), window.end)):
            self._leave_window(window.page_ids[index])

    def count_mass(self, total_P: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Softmax mass that each page got since the start, in any fixed unit."""
        self.importance_P *= self.policy.decay
        self.importance_P += total_P - self._total_P
        self._total_P = total_P.copy()

    def take_changed(self) -> list[tuple[int, Place, int]]:
        """Pages whose planes changed since the last call, their place, and sink plane or -1."""
        places, sinks = self.ledger.places, self.ledger.sink_of
        changed = [(page, places[page], sinks.get(page, -1)) for page in sorted(self._changed)]
        self._changed.clear()
        return changed

    # What others ask.

    def rung(self, page_id: int) -> Rung:
        """The fidelity of a page."""
        return Rung(int(self._rung_P[page_id]))

    def bytes_of(self, page_ids: Iterable[int]) -> int:
        """Bytes of the planes of these pages."""
        return sum(self.ledger.page_bytes(page_id) for page_id in page_ids)

    def num_by_rung(self, page_ids: Iterable[int] | None = None) -> Counter[Rung]:
        """How many of these pages, or of all held ones, stand on each rung."""
        if page_ids is None:
            page_ids = np.flatnonzero(self._is_held_P).tolist()
        return Counter(self.rung(page_id) for page_id in page_ids)

    def check_integrity(self) -> None:
        """Assert that ledger, arrays, windows and sums agree."""
        self.ledger.check_integrity()
        counted: Counter[int] = Counter()
        for window in self._windows.values():
            sinks = range(min(self.policy.sink_pages, window.end))
            recent = range(max(self.policy.sink_pages, window.first), window.end)
            counted.update(window.page_ids[index] for index in (*sinks, *recent))
        held_bytes = held_tokens = routine_bytes = num_routine = 0
        for page_id, place in enumerate(self.ledger.places):
            rung, is_held = place.rung, bool(self._is_held_P[page_id])
            assert rung == self._rung_P[page_id], (page_id, place, self._rung_P[page_id])
            assert self._num_windows[page_id] == counted[page_id], (page_id, counted[page_id])
            assert is_held or not counted[page_id], page_id
            is_idle_hot = rung is Rung.HOT and not is_held
            assert is_idle_hot == (page_id in self._idle_hot), (page_id, place, is_held)
            if is_held:
                held_bytes += self.ledger.page_bytes(page_id)
                held_tokens += self._fill[page_id]
            if is_held and rung > Rung.HOT:
                routine_bytes += self._by_rung[rung]
                num_routine += 1
        assert held_bytes == self.held_bytes, (held_bytes, self.held_bytes)
        assert held_tokens == self.held_tokens, (held_tokens, self.held_tokens)
        assert routine_bytes == self._routine_bytes, (routine_bytes, self._routine_bytes)
        assert num_routine == self._num_routine, (num_routine, self._num_routine)

    def _account(self, page_id: int, sign: int) -> None:
        """Add a held page to the sums, or take it out of them around a change."""
        if self._is_held_P[page_id]:
            self.held_bytes += sign * self.ledger.page_bytes(page_id)
            self.held_tokens += sign * self._fill[page_id]
            if self._rung_P[page_id] > Rung.HOT:
                self._routine_bytes += sign * self._by_rung[self._rung_P[page_id]]
                self._num_routine += sign

    def _extend_window(self, span: Span) -> None:
        window = self._windows.get(span.request_id)
        if window is None:
            first = max(0, span.start - self.policy.window_tokens) // PAGE_SIZE
            window = self._windows[span.request_id] = _Window(span.page_ids, first, first)
            for index in range(min(self.policy.sink_pages, first)):
                self._num_windows[span.page_ids[index]] += 1
        window.page_ids = span.page_ids
        for index in range(window.end, _num_pages(span.end)):
            self._num_windows[span.page_ids[index]] += 1
        window.end = max(window.end, _num_pages(span.end))

    def _advance_window(self, span: Span) -> None:
        window = self._windows[span.request_id]
        first = max(0, span.end - self.policy.window_tokens) // PAGE_SIZE
        for index in range(window.first, min(first, window.end)):
            if index >= self.policy.sink_pages:
                self._leave_window(window.page_ids[index])
        window.first = max(window.first, min(first, window.end))

    def _leave_window(self, page_id: int) -> None:
        self._num_windows[page_id] -= 1
        assert self._num_windows[page_id] >= 0, page_id
        if self._num_windows[page_id] == 0 and self._rung_P[page_id] == Rung.HOT:
            self._loose.add(page_id)

    def _tidy(self) -> None:
        """Encode hot pages that are held and lie in no window."""
        for page_id in sorted(self._loose):
            if self._is_held_P[page_id] and self._num_windows[page_id] == 0:
                self._encode(page_id)
        self._loose.clear()

    def _open(self, page_id: int) -> None:
        if self.ledger.hot.num_free == 0:
            assert self._idle_hot, (self.ledger.used, self.ledger.counts)
            oldest = next(iter(self._idle_hot))
            self._encode(oldest)
        self._account(page_id, -1)
        self.ledger.open(page_id)
        self._rung_P[page_id] = Rung.HOT
        self._account(page_id, +1)
        self._born_P[page_id] = self._clock
        self._changed.add(page_id)

    def _encode(self, page_id: int) -> None:
        """Bring a hot page, which is full, to the best rung that it can get planes for."""
        assert self._fill[page_id] == PAGE_SIZE, (page_id, self._fill[page_id])
        for rung in (Rung.K4V4, Rung.MIDDLE, Rung.K2V2):
            if self._make_room(page_id, rung):
                break
        else:
            rung = Rung.COLD
        self._idle_hot.pop(page_id, None)
        self._lower(page_id, rung)
        self._born_P[page_id] = self._clock
        if page_id in self._firsts and self.ledger.counts.sink > 0:
            self._keep_sink(page_id)

    def _keep_sink(self, page_id: int) -> None:
        if self.ledger.sink.num_free == 0:
            # Every sequence has one first page, and there are more planes than sequences.
            idle = [page for page in self.ledger.sink_of if not self._is_held_P[page]]
            victim = min(idle, key=lambda page: (self.importance_P[page], page))
            self.ledger.drop_sink(victim)
            self._changed.add(victim)
        self._account(page_id, -1)
        self.ledger.keep_sink(page_id)
        self._account(page_id, +1)

    def _make_room(self, page_id: int, rung: Rung) -> bool:
        """Free the planes that a hot page needs for `rung`, at the cost of cheaper pages."""
        ledger, importance = self.ledger, self.importance_P[page_id]
        while ledger.fine.num_free < Rung.K2V2 - rung:
            cost = importance * self._cost[rung] / self.policy.hysteresis
            victim = self._cheapest_idle(Rung.K4V4, Rung.MIDDLE)
            if victim is None and self._is_held_P[page_id]:
                victim = self._cheapest(Rung.K4V4, Rung.MIDDLE, below=cost)
            if victim is None:
                return False
            self._lower(victim, Rung(self.rung(victim) + 1))
        if ledger.base.num_free == 0:
            if ledger.cold.num_free == 0:
                return False
            cost = importance * self._cost[Rung.K2V2] / self.policy.hysteresis
            victim = self._cheapest_idle(Rung.K4V4, Rung.K2V2)
            for first in (Rung.K2V2, Rung.K4V4):
                if victim is None and self._is_held_P[page_id]:
                    victim = self._cheapest(first, Rung.K2V2, below=cost)
            if victim is None:
                return False
            self._lower(victim, Rung.COLD)
        return True

    def _meet_budget(self) -> None:
        if self.policy.routine_bytes is None:
            return
        while self._routine_bytes > self.policy.routine_bytes * self._num_routine:
            last = Rung.K2V2 if self.ledger.cold.num_free > 0 else Rung.MIDDLE
            victim = self._cheapest(Rung.K4V4, last)
            if victim is None:
                return
            self._lower(victim, Rung(self.rung(victim) + 1))

    def _cheapest(self, first: Rung, last: Rung, *, below: float = np.inf) -> int | None:
        """The held page on rungs `first` to `last` that goes down next, at a cost under `below`."""
        page_N = np.flatnonzero(self._is_held_P & (self._rung_P >= first) & (self._rung_P <= last))
        if len(page_N) == 0:
            return None
        is_old_N = self._clock - self._born_P[page_N] >= self.policy.min_age
        if is_old_N.any():
            page_N = page_N[is_old_N]
        cost_N = self.importance_P[page_N] * self._cost[self._rung_P[page_N]]
        least = cost_N.min()
        if least >= below:
            return None
        page_N = page_N[cost_N <= min(least * self.policy.hysteresis, below)]
        return int(page_N[self._born_P[page_N].argmin()])

    def _cheapest_idle(self, first: Rung, last: Rung) -> int | None:
        page_N = np.flatnonzero(~self._is_held_P & (self._rung_P >= first) & (self._rung_P <= last))
        return int(page_N[self.importance_P[page_N].argmin()]) if len(page_N) else None

    def _lower(self, page_id: int, rung: Rung) -> None:
        self._origin.setdefault(page_id, self.ledger.places[page_id])
        self._account(page_id, -1)
        self.ledger.lower(page_id, rung)
        self._rung_P[page_id] = rung
        self._account(page_id, +1)
        self._changed.add(page_id)

    def _take_moves(self) -> list[Move]:
        """One move a page, from where its bytes are to where they go.

        Planes of different targets are different, as no plane has two pages. A plane that one move
        reads and another writes is a base plane that went from a cold page to a hot one, and fine
        planes that went with it: so the cold ones come first.
        """
        places, sinks = self.ledger.places, self.ledger.sink_of
        moves = []
        for page_id, source in self._origin.items():
            sink = sinks.get(page_id, -1) if source.rung is Rung.HOT else -1
            moves.append(Move(page_id, source, places[page_id], sink))
        self._origin.clear()
        assert all(move.target != NOWHERE for move in moves), moves
        return sorted(moves, key=lambda move: (-move.source.kind, -move.target.kind))


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
