"""How wide keys are, and how many planes of each kind fit a memory and a budget; no torch.

    bits = 8 * bytes of a page / elements of a page,  of a whole cache: bytes over elements cached

Everything that a sequence takes counts: keys, values, its ring of recent rows, its sink rows. A
budget of B bits is met by a sequence of `max_model_len` tokens. What is left of its bytes once the
rest is paid is what its values may take; a shorter sequence may take as many, in fewer pages.

Keys are never encoded again, so that their widths are chosen here: the same for all layers, the
most with which the newest pages of a full sequence keep 4-bit values and the others have their
coarsest. Below 3 bits, layers that feel it least have 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from subten.cache.planes import PlaneNumbers
from subten.core import PAGE_SIZE, ConfigError, refuse

NEWEST_PAGES = 8
"""Pages of a sequence whose values keep 4 bits as long as older ones can give theirs, at most an
eighth of a full sequence: errors of values in newer pages cost SmolLM2-135M nine times as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneAsk:
    """What is asked of an adaptive cache.

    `key_bytes` are those of a page of keys in one layer, by width; `sensitivity` says how much each
    layer suffers from coarse keys. The other bytes are of one plane over all layers. `fixed_bytes`
    are taken whatever comes, `codebook_bytes` where pages go cold. `page_elements` are the elements
    of one page id, K and V. `memory_bytes` None is no limit, and takes `num_pages`. Pages go to
    COLD only with `has_cold`.
    """

    key_bytes: dict[int, int]
    sensitivity: Sequence[float]
    base_bytes: int
    fine_bytes: int
    cold_bytes: int
    sink_bytes: int
    ring_bytes: int
    codebook_bytes: int
    fixed_bytes: int
    page_elements: int
    memory_bytes: int | None
    memory_name: str
    num_pages: int | None
    bits_budget: float | None
    has_cold: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def pages_of_one(self) -> int:
        """Pages of a sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // PAGE_SIZE)

    @property
    def newest_pages(self) -> int:
        """Of those, pages that go down last."""
        return min(NEWEST_PAGES, -(-self.pages_of_one // 8))

    @property
    def finest(self) -> int:
        """Bytes of a page's values at 4 bits."""
        return self.base_bytes + self.fine_bytes

    @property
    def coarsest(self) -> int:
        """Bytes of a page's values on the last rung."""
        return self.cold_bytes if self.has_cold else self.base_bytes

    @property
    def extra_bytes(self) -> int:
        """What a sequence takes besides pages."""
        return self.ring_bytes + self.sink_bytes + (self.codebook_bytes if self.has_cold else 0)

    def keys(self, widths: Sequence[int]) -> int:
        """Bytes of a page of keys over all layers."""
        return sum(self.key_bytes[width] for width in widths)

    def plane_bytes(self, widths: Sequence[int]) -> PlaneNumbers:
        """Bytes of one plane of each kind."""
        return PlaneNumbers(
            key=self.keys(widths),
            base=self.base_bytes,
            fine=self.fine_bytes,
            cold=self.cold_bytes,
            sink=self.sink_bytes,
            ring=self.ring_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanePlan:
    """Widths of keys by layer, planes and sequences that an adaptive cache is made for.

    `counts.key` is the number of page ids. `value_bytes` is what the values of one sequence may
    take; None where only the pools limit it.
    """

    widths: tuple[int, ...]
    counts: PlaneNumbers
    max_num_seqs: int
    value_bytes: float | None
    newest_pages: int

    @property
    def num_pages(self) -> int:
        """Page ids."""
        return self.counts.key


def plan_planes(ask: PlaneAsk) -> PlanePlan:
    """Size the pools; ConfigError, with both numbers, for a budget that cannot be met.

    Rings take at most half of the memory, for fewer sequences at a time if need be. With a budget
    of bits, as many pages as fit with so many bits each. Without, all pages in 4 bits if that holds
    a sequence of `max_model_len`; else as fine as holds one, or, at the coarsest, what the memory
    holds.
    """
    assert ask.memory_bytes is not None or ask.num_pages is not None
    if ask.has_cold and ask.cold_bytes >= ask.base_bytes:
        allowed = "False at this head_dim, whose cold pages are no smaller than 2-bit ones"
        raise refuse(ConfigError, "kv_cold_pages", True, allowed)
    max_num_seqs = _affordable_seqs(ask)
    # One a sequence, one that is on its way, and as many for the beginnings that nobody holds.
    num_sinks = 2 * max_num_seqs + 1 if ask.sink_bytes else 0
    num_rings = max_num_seqs if ask.ring_bytes else 0
    room = None if ask.memory_bytes is None else _room(ask, num_sinks, num_rings)
    budget = None if ask.bits_budget is None else _budget_bytes(ask)
    if room is not None and (budget is None or room < budget):
        # One sequence may have all of it, but no more.
        budget = room
    widths, value_bytes = _share(ask, budget)
    num_pages, base, fine, cold = _count_planes(ask, widths, value_bytes, room, max_num_seqs)
    counts = PlaneNumbers(
        key=num_pages, base=base, fine=fine, cold=cold, sink=num_sinks, ring=num_rings
    )
    taken = counts.dot(ask.plane_bytes(widths)) + ask.fixed_bytes
    assert ask.memory_bytes is None or taken <= ask.memory_bytes, (taken, ask)
    assert base + cold >= num_pages, counts
    return PlanePlan(
        widths=widths,
        counts=counts,
        max_num_seqs=max_num_seqs,
        value_bytes=value_bytes,
        newest_pages=ask.newest_pages,
    )


def _room(ask: PlaneAsk, num_sinks: int, num_rings: int) -> int:
    """Bytes that the memory leaves for pages."""
    assert ask.memory_bytes is not None
    taken = ask.fixed_bytes + num_sinks * ask.sink_bytes + num_rings * ask.ring_bytes
    least = ask.keys([2] * len(ask.sensitivity)) + ask.coarsest
    need = taken + least * (ask.num_pages or 1)
    if ask.memory_bytes < need:
        allowed = f"at least {need} bytes: recent rows, sinks and a step take {taken}"
        raise refuse(ConfigError, ask.memory_name, ask.memory_bytes, allowed)
    return ask.memory_bytes - taken


def _budget_bytes(ask: PlaneAsk) -> int:
    """What the pages of a sequence of `max_model_len` tokens may take of the budget of bits."""
    assert ask.bits_budget is not None
    # The last page may be ragged: elements are those of tokens, bytes those of pages.
    elements = ask.page_elements * ask.max_model_len / PAGE_SIZE
    least = ask.pages_of_one * (ask.keys([2] * len(ask.sensitivity)) + ask.coarsest)
    least_bits = (least + ask.extra_bytes) * 8 / elements
    if not ask.bits_budget >= least_bits * (1 - _SLACK):
        raise ConfigError(
            f"kv_bits_budget: got {ask.bits_budget}; allowed: at least {_up(least_bits)} at "
            f"max_model_len {ask.max_model_len}, of which sinks and recent rows take "
            f"{_up(ask.extra_bytes * 8 / elements)} and "
            f"{'cold' if ask.has_cold else '2-bit'} pages the others"
        )
    budget = ask.bits_budget * elements / 8 * (1 + _SLACK) - ask.extra_bytes
    return max(least, math.floor(budget))


def _share(ask: PlaneAsk, budget: int | None) -> tuple[tuple[int, ...], float | None]:
    """Widths of keys, and what values may take, for a sequence whose pages take `budget` bytes."""
    num_layers, one = len(ask.sensitivity), ask.pages_of_one
    finest = one * ask.finest
    if budget is None:
        return (4,) * num_layers, None
    least = one * ask.coarsest + ask.newest_pages * (ask.finest - ask.coarsest)
    by_need = sorted(range(num_layers), key=lambda layer: (ask.sensitivity[layer], layer))
    choices = [[4] * num_layers]
    for num_coarse in range(num_layers + 1):
        coarse = set(by_need[:num_coarse])
        choices.append([2 if layer in coarse else 3 for layer in range(num_layers)])
    for widths in choices:
        if one * ask.keys(widths) + least <= budget:
            break
    value_bytes = float(budget - one * ask.keys(widths))
    return tuple(widths), None if value_bytes >= finest else value_bytes


def _count_planes(
    ask: PlaneAsk,
    widths: Sequence[int],
    value_bytes: float | None,
    room: int | None,
    max_num_seqs: int,
) -> tuple[int, int, int, int]:
    """Page ids, base, fine and cold planes, for pages as a full sequence has them in the mean."""
    one = ask.pages_of_one
    value = ask.finest if value_bytes is None else value_bytes / one
    newest_share = ask.newest_pages / one if ask.has_cold else 0.0
    fine_share = min(1.0, max(newest_share, (value - ask.base_bytes) / ask.fine_bytes))
    cold_share = 0.0
    if ask.has_cold:
        short = ask.base_bytes + fine_share * ask.fine_bytes - value
        # An eighth at least, so that a light page can pay for a heavy one.
        cold_share = min(1.0, max(0.125, short / (ask.base_bytes - ask.cold_bytes)))
    saved = ask.base_bytes - ask.cold_bytes
    each = ask.keys(widths) + ask.base_bytes + fine_share * ask.fine_bytes - cold_share * saved
    most = max_num_seqs * one
    num_pages = ask.num_pages
    if num_pages is None:
        assert room is not None
        num_pages = max(1, min(math.floor(room / each * (1 + _SLACK)), most))
    # Pages that a step writes have base planes, and so has the one before each of them.
    written = 2 * max_num_seqs + -(-ask.max_num_batched_tokens // PAGE_SIZE)
    while True:
        cold = math.ceil(cold_share * num_pages)
        base = min(num_pages, max(num_pages - math.floor(cold_share * num_pages), written))
        fine = math.floor(fine_share * num_pages * (1 + _SLACK))
        if room is None:
            return num_pages, base, num_pages, cold
        rest = room - num_pages * ask.keys(widths) - base * ask.base_bytes - cold * ask.cold_bytes
        if rest >= fine * ask.fine_bytes or (rest >= 0 and num_pages == 1):
            # What is left over is for sequences shorter than a full one.
            return num_pages, base, min(num_pages, rest // ask.fine_bytes), cold
        if ask.num_pages is None and num_pages > 1:
            num_pages -= 1
            continue
        if rest >= 0 and ask.bits_budget is None:
            return num_pages, base, rest // ask.fine_bytes, cold
        raise refuse(
            ConfigError,
            "num_pages" if ask.num_pages else ask.memory_name,
            ask.num_pages or ask.memory_bytes,
            f"at most {max(1, int(room / each))} pages, which {ask.memory_name} holds"
            + (f" at kv_bits_budget {ask.bits_budget}" if ask.bits_budget else ""),
        )


def _affordable_seqs(ask: PlaneAsk) -> int:
    if ask.memory_bytes is None or not ask.ring_bytes:
        return ask.max_num_seqs
    return max(1, min(ask.max_num_seqs, ask.memory_bytes // (2 * ask.ring_bytes)))


_SLACK = 1e-9
"""Relative error of sums of floats, far below the digits that are shown."""


def _up(bits: float) -> float:
    """Bits rounded up to what can be typed back as they are."""
    return math.ceil(bits * 1000 * (1 - _SLACK)) / 1000
