"""Which pages of an adaptive cache keep fine values, step by step; no torch.

- A page that is opened gets 4-bit values, if there is a plane for them.
- A sequence whose values take more than `value_bytes` lowers pages, one rung at a time, until they
  do not: those whose lower rung costs the least, but none of its `newest_pages` if others can.
- Where a page needs a plane and none is free, pages that nobody holds give theirs first, then the
  cheapest of those that are old. A page that gets no fine plane has 2-bit values from the start.
- Pages that nobody holds keep what they have until another page needs it.

The cost of a rung is importance / bytes saved. Importance is the softmax mass that queries put on
the page, with earlier steps counting less and less. It is noisy: among pages within `hysteresis` of
the cheapest the oldest goes.

Nothing is ever promoted. So the allowance is one of bytes, that of a sequence of full length: were
it one of bits at any length, short sequences would lose what they cannot get back as they grow.

Letters: P pages, N candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from subten.cache.planes import Place, PlaneLedger, PlaneNumbers, Rung
from subten.core import PAGE_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityPolicy:
    """How far values may go down.

    `value_bytes` is what the values of one sequence may take, None for no limit but the pools.
    `newest_pages` of a sequence go last; of pages at large those opened less than as many pages of
    tokens ago. `decay` is what importance keeps from one reading of the masses to the next.
    """

    value_bytes: float | None = None
    newest_pages: int = 8
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
class Recent:
    """The ring of a sequence, and the first token whose rows it has ever held."""

    ring: int
    first: int


class Fidelity:
    """Decides, and keeps the ledger; whoever calls it moves the bytes, in the order of the calls.

    It listens to a `PageAllocator` (`page_held`, `page_idle`, `page_freed`). A step is `prepare`,
    the forward pass, `settle`; a sequence that lets go of its pages is told by `leave`, before the
    allocator is. `prepare` and `settle` return moves, (base, fine or -1, cold): values of the first
    two planes are to be encoded again into the third.
    """

    def __init__(
        self, policy: FidelityPolicy, *, counts: PlaneNumbers, plane_bytes: PlaneNumbers
    ) -> None:
        self.policy = policy
        self.ledger = PlaneLedger(counts, plane_bytes)
        num_pages = counts.key
        self.importance_P = np.zeros(num_pages)
        self._rung_P = np.full(num_pages, Rung.EMPTY, dtype=np.int8)
        self._is_held_P = np.zeros(num_pages, dtype=bool)
        self._is_full_P = np.zeros(num_pages, dtype=bool)
        self._born_P = np.zeros(num_pages, dtype=np.int64)
        self._total_P = np.zeros(num_pages, dtype=np.int64)
        self._clock = 0
        self._first: dict[str, int] = {}
        self._num_settled: dict[str, int] = {}
        self._changed: set[int] = set()
        self._origin: dict[int, Place] = {}
        values = plane_bytes.base + plane_bytes.fine, plane_bytes.base, plane_bytes.cold, 0
        self._value_bytes = np.array(values, dtype=np.int64)
        # Cost of the next rung down for an importance of 1: relative errors grow alike.
        self._cost = np.full(len(Rung), np.inf)
        self._cost[Rung.V4] = 1 / plane_bytes.fine
        if counts.cold > 0:
            self._cost[Rung.V2] = 1 / (plane_bytes.base - plane_bytes.cold)

    # What the allocator tells.

    def page_held(self, page_id: int) -> None:
        """A page that nobody held got its first holder."""
        self._is_held_P[page_id] = True
        self._born_P[page_id] = self._clock

    def page_idle(self, page_id: int) -> None:
        """A page lost its last holder and keeps its content."""
        self._is_held_P[page_id] = False

    def page_freed(self, page_id: int) -> None:
        """A page lost its content: its planes are free at once."""
        self.ledger.clear(page_id)
        self._is_held_P[page_id] = self._is_full_P[page_id] = False
        self._rung_P[page_id] = Rung.EMPTY
        self.importance_P[page_id] = 0.0
        self._changed.add(page_id)

    # What a step tells.

    def prepare(self, spans: Sequence[Span]) -> list[tuple[int, int, int]]:
        """Give planes to every page that the step writes, and rings to its sequences."""
        places = self.ledger.places
        for span in spans:
            if self.ledger.counts.ring:
                self.ledger.enter(span.request_id)
            self._first.setdefault(span.request_id, span.start)
            for index in range(span.start // PAGE_SIZE, _num_pages(span.end)):
                page_id = span.page_ids[index]
                if places[page_id].rung is Rung.EMPTY:
                    self._open(page_id, is_first=index == 0)
                # Cold planes are written whole, from what others hold.
                assert places[page_id].rung < Rung.COLD, (page_id, places[page_id])
        return self._take_moves()

    def settle(self, spans: Sequence[Span]) -> list[tuple[int, int, int]]:
        """The step is computed: meet the allowance of its sequences."""
        for span in spans:
            self._is_full_P[span.page_ids[span.start // PAGE_SIZE : span.end // PAGE_SIZE]] = True
        self._clock += max((span.end - span.start for span in spans), default=0)
        for span in spans:
            num_pages = _num_pages(span.end)
            if self._num_settled.get(span.request_id) != num_pages:
                self._num_settled[span.request_id] = num_pages
                self._meet_allowance(np.array(span.page_ids[:num_pages]))
        return self._take_moves()

    def leave(self, request_id: str) -> None:
        """A sequence is about to let go of all its pages, and of its ring."""
        self.ledger.leave(request_id)
        self._first.pop(request_id, None)
        self._num_settled.pop(request_id, None)

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

    def recent(self, request_id: str) -> Recent:
        """Where recent rows of a sequence go that `prepare` has seen."""
        return Recent(self.ledger.ring_of[request_id], self._first[request_id])

    def rung(self, page_id: int) -> Rung:
        """The fidelity of a page's values."""
        return Rung(int(self._rung_P[page_id]))

    def bytes_of(self, page_ids: Iterable[int]) -> int:
        """Bytes of the planes of these pages."""
        return sum(self.ledger.page_bytes(page_id) for page_id in page_ids)

    def num_by_rung(self, page_ids: Iterable[int]) -> Counter[Rung]:
        """How many of these pages stand on each rung."""
        return Counter(self.rung(page_id) for page_id in page_ids)

    def check_integrity(self) -> None:
        """Assert that ledger and arrays agree."""
        self.ledger.check_integrity()
        assert not self._origin, self._origin
        for page_id, place in enumerate(self.ledger.places):
            assert place.rung == self._rung_P[page_id], (page_id, place, self._rung_P[page_id])
            assert place.rung is not Rung.COLD or self._is_full_P[page_id], page_id
        assert set(self.ledger.ring_of) <= set(self._first), (self.ledger.ring_of, self._first)

    def _open(self, page_id: int, *, is_first: bool) -> None:
        ledger = self.ledger
        if ledger.fine.num_free == 0:
            victim = self._cheapest_idle(Rung.V4, Rung.V4)
            if victim is None:
                victim = self._cheapest(np.flatnonzero(self._is_old(Rung.V4, Rung.V4)))
            if victim is not None:
                self._lower(victim)
        if ledger.base.num_free == 0:
            self._free_base()
        ledger.open(page_id)
        self._rung_P[page_id] = ledger.places[page_id].rung
        self._born_P[page_id] = self._clock
        self._changed.add(page_id)
        if is_first and ledger.counts.sink > 0:
            self._keep_sink(page_id)

    def _free_base(self) -> None:
        """Write the values of some full page again, in a cold plane."""
        victim = self._cheapest_idle(Rung.V4, Rung.V2)
        if victim is None:
            victim = self._cheapest(np.flatnonzero(self._is_old(Rung.V4, Rung.V2)))
        if victim is None:
            # The plan has more base planes than pages that are written at a time.
            is_full_P = self._is_held_P & self._is_full_P
            victim = self._cheapest(np.flatnonzero(is_full_P & self._is_between(Rung.V4, Rung.V2)))
        assert victim is not None, (self.ledger.used, self.ledger.counts)
        while self.rung(victim) < Rung.COLD:
            self._lower(victim)

    def _keep_sink(self, page_id: int) -> None:
        ledger = self.ledger
        if ledger.sink.num_free == 0:
            # Every sequence has one first page, and there are more planes than sequences.
            idle = [page for page in ledger.sink_of if not self._is_held_P[page]]
            victim = min(idle, key=lambda page: (self.importance_P[page], page))
            ledger.drop_sink(victim)
            self._changed.add(victim)
        ledger.keep_sink(page_id)

    def _meet_allowance(self, page_N: np.ndarray[Any, Any]) -> None:
        """Lower pages of one sequence, given in order."""
        allowed = self.policy.value_bytes
        if allowed is None:
            return
        num_old = max(0, len(page_N) - self.policy.newest_pages)
        while self._value_bytes[self._rung_P[page_N]].sum() > allowed:
            victim = self._cheapest(page_N[:num_old])
            if victim is None:
                victim = self._cheapest(page_N[num_old:])
            if victim is None:
                return
            self._lower(victim)

    def _is_between(self, first: Rung, last: Rung) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return (self._rung_P >= first) & (self._rung_P <= last)

    def _is_old(self, first: Rung, last: Rung) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Held, full pages on these rungs that were not opened just now."""
        age_P = self._clock - self._born_P
        is_old_P = self._is_held_P & self._is_full_P
        is_old_P &= age_P >= self.policy.newest_pages * PAGE_SIZE
        return is_old_P & self._is_between(first, last)

    def _cheapest(self, page_N: np.ndarray[Any, Any]) -> int | None:
        """The page that goes down a rung next, of those that can; the oldest come first."""
        cost_N = self._cost[self._rung_P[page_N]]
        can_N = np.isfinite(cost_N)
        if self.ledger.cold.num_free == 0:
            can_N &= self._rung_P[page_N] != Rung.V2
        # Values on their way into a page go to its base plane.
        can_N &= self._is_full_P[page_N] | (self._rung_P[page_N] != Rung.V2)
        page_N, cost_N = page_N[can_N], cost_N[can_N]
        if len(page_N) == 0:
            return None
        cost_N = cost_N * self.importance_P[page_N]
        page_N = page_N[cost_N <= cost_N.min() * self.policy.hysteresis]
        return int(page_N[self._born_P[page_N].argmin()])

    def _cheapest_idle(self, first: Rung, last: Rung) -> int | None:
        page_N = np.flatnonzero(~self._is_held_P & self._is_between(first, last))
        return int(page_N[self.importance_P[page_N].argmin()]) if len(page_N) else None

    def _lower(self, page_id: int) -> None:
        self._origin.setdefault(page_id, self.ledger.places[page_id])
        self.ledger.lower(page_id)
        self._rung_P[page_id] += 1
        self._changed.add(page_id)

    def _take_moves(self) -> list[tuple[int, int, int]]:
        """Of pages that went cold: where their values are, and where they go."""
        places = self.ledger.places
        moves = [
            (source.base, source.fine, places[page_id].cold)
            for page_id, source in self._origin.items()
            if places[page_id].rung is Rung.COLD
        ]
        self._origin.clear()
        return moves


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
