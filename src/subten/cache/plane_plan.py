"""How many planes of each kind fit a memory and a budget of bits; no torch.

    bits = 8 * bytes of a page / elements of a page,  of a whole cache: bytes over elements cached

A sequence of n tokens has its sinks and its window in BF16 and the rest on the ladder, so that its
bits are (windows * hot + routine * x) / pages, for routine pages of x bits in the mean. A budget of
B bits is one of x: that with which a sequence of `max_model_len` tokens comes out at B. A shorter
sequence has more bits, as its windows weigh more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from subten.cache.planes import PlaneNumbers
from subten.core import PAGE_SIZE, ConfigError, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneAsk:
    """What is asked of an adaptive cache.

    `page_elements` are the elements of one page id over all layers and heads, K and V.
    `memory_bytes` None is no limit, and takes `num_pages`. Pages go to COLD only with
    `has_cold`.
    """

    plane_bytes: PlaneNumbers
    page_elements: int
    memory_bytes: int | None
    memory_name: str
    num_pages: int | None
    bits_budget: float | None
    has_cold: bool
    sink_pages: int
    window_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def pages_of_one(self) -> int:
        """Pages of a sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // PAGE_SIZE)

    @property
    def hot_of_one(self) -> int:
        """Those of its pages that end in BF16."""
        first = max(0, self.max_model_len - self.window_tokens) // PAGE_SIZE
        return min(self.pages_of_one, self.pages_of_one - first + min(self.sink_pages, first))

    def bits(self, page_bytes: float) -> float:
        """Bits an element of a page that takes `page_bytes`."""
        return page_bytes * 8 / self.page_elements


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanePlan:
    """Page ids, planes and sequences that an adaptive cache is made for.

    `routine_bytes` is what a routine page may take in the mean; None where only the pools limit it.
    """

    num_pages: int
    counts: PlaneNumbers
    max_num_seqs: int
    routine_bytes: float | None


def plan_planes(ask: PlaneAsk) -> PlanePlan:
    """Size the pools; ConfigError, with both numbers, for a budget that cannot be met.

    Windows take at most half of the memory, for fewer sequences at a time if need be. With a
    budget of bits, as many pages as fit with so many bits each. Without, all pages in 4 bits if
    that holds a sequence of `max_model_len`; else as fine as holds one, or, on the coarsest rung,
    what the memory holds.
    """
    assert ask.memory_bytes is not None or ask.num_pages is not None
    if ask.has_cold and ask.plane_bytes.cold >= ask.plane_bytes.base:
        allowed = "False at this head_dim, whose cold pages are no smaller than 2-bit ones"
        raise refuse(ConfigError, "kv_cold_pages", True, allowed)
    routine_bytes = None if ask.bits_budget is None else _routine_bytes(ask)
    max_num_seqs = _affordable_seqs(ask)
    hot = _hot_planes(ask, max_num_seqs)
    if ask.num_pages is not None:
        hot = min(hot, ask.num_pages)
    # One a sequence, one that is on its way, and as many for the beginnings that nobody holds.
    sinks = 2 * max_num_seqs + 1 if ask.plane_bytes.sink else 0
    room = None
    if ask.memory_bytes is not None:
        taken = hot * ask.plane_bytes.hot + sinks * ask.plane_bytes.sink
        room = ask.memory_bytes - taken
        least = ask.plane_bytes.cold if ask.has_cold else ask.plane_bytes.base
        need = least * (ask.num_pages or 1)
        if room < need:
            windows = f"windows and a step, {hot} pages in BF16, take {taken}"
            allowed = f"at least {taken + need} bytes: {windows}"
            raise refuse(ConfigError, ask.memory_name, ask.memory_bytes, allowed)
    if routine_bytes is not None:
        num_pages, base, fine, cold = _planes_of_bits(ask, routine_bytes, room, max_num_seqs)
    else:
        num_pages, base, fine, cold = _planes_of_memory(ask, room, max_num_seqs)
    counts = PlaneNumbers(hot=min(hot, num_pages), base=base, fine=fine, cold=cold, sink=sinks)
    assert ask.memory_bytes is None or counts.dot(ask.plane_bytes) <= ask.memory_bytes, (
        counts,
        ask,
    )
    assert base + cold >= num_pages, counts
    return PlanePlan(
        num_pages=num_pages,
        counts=counts,
        max_num_seqs=max_num_seqs,
        routine_bytes=routine_bytes,
    )


def _routine_bytes(ask: PlaneAsk) -> float:
    """Mean bytes of a routine page with which `max_model_len` tokens take the budget of bits."""
    assert ask.bits_budget is not None
    one, hot, planes = ask.pages_of_one, ask.hot_of_one, ask.plane_bytes
    window_bytes = hot * planes.hot + (planes.sink if one > hot else 0)
    least = planes.cold if ask.has_cold else planes.base
    # The last page may be ragged: elements are those of tokens, bytes those of pages.
    elements = ask.page_elements * ask.max_model_len / PAGE_SIZE
    windows_bits = window_bytes * 8 / elements
    least_bits = windows_bits + (one - hot) * least * 8 / elements
    if not ask.bits_budget >= least_bits * (1 - _SLACK):
        rest = "cold pages" if ask.has_cold else "2-bit pages"
        raise ConfigError(
            f"kv_bits_budget: got {ask.bits_budget}; allowed: at least {_up(least_bits)} at "
            f"max_model_len {ask.max_model_len}, of which sinks and window take "
            f"{_up(windows_bits)} and {rest} the others"
        )
    if one == hot:
        return float(planes.base + 2 * planes.fine)
    return max(least, (ask.bits_budget * elements / 8 - window_bytes) / (one - hot))


def _hot_planes(ask: PlaneAsk, num_seqs: int) -> int:
    """Pages that can be hot at a time.

    Of a sequence: its sinks; at most ceil(window / 64) + 1 that its window touches, and one more
    that it goes on to; of a step of several tokens also their own.
    """
    recent = -(-ask.window_tokens // PAGE_SIZE) + 2
    step = -(-ask.max_num_batched_tokens // PAGE_SIZE)
    return min(num_seqs * (ask.sink_pages + recent) + step, num_seqs * ask.pages_of_one)


def _affordable_seqs(ask: PlaneAsk) -> int:
    if ask.memory_bytes is None:
        return ask.max_num_seqs
    low, high = 1, ask.max_num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if 2 * _hot_planes(ask, middle) * ask.plane_bytes.hot <= ask.memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _planes_of_bits(
    ask: PlaneAsk, routine_bytes: float, room: int | None, max_num_seqs: int
) -> tuple[int, int, int, int]:
    """Page ids, base, fine and cold planes for routine pages of `routine_bytes` in the mean."""
    planes = ask.plane_bytes
    fine_share = min(2.0, max(0.0, (routine_bytes - planes.base) / planes.fine))
    cold_share = 0.0
    if ask.has_cold:
        # An eighth at least, so that a light page can pay for a heavy one.
        short = (planes.base - routine_bytes) / (planes.base - planes.cold)
        cold_share = min(1.0, max(0.125, short))
    each = planes.base + fine_share * planes.fine - cold_share * (planes.base - planes.cold)
    most = max_num_seqs * ask.pages_of_one
    num_pages = ask.num_pages
    if num_pages is None:
        assert room is not None
        # One plane more of each kind than the shares say, for what rounding up takes.
        spare = planes.base + planes.fine + planes.cold
        num_pages = max(1, min(int((room - spare) / each), most))
    cold = math.ceil(cold_share * num_pages)
    fine = math.ceil(fine_share * num_pages)
    base = num_pages - math.floor(cold_share * num_pages)
    if room is not None and base * planes.base + fine * planes.fine + cold * planes.cold > room:
        raise refuse(
            ConfigError,
            "num_pages",
            num_pages,
            f"at most {max(1, int(room / each))}, which {ask.memory_name} holds at "
            f"kv_bits_budget {ask.bits_budget}",
        )
    return num_pages, base, fine, cold


def _planes_of_memory(
    ask: PlaneAsk, room: int | None, max_num_seqs: int
) -> tuple[int, int, int, int]:
    """Page ids, base, fine and cold planes where memory alone is the limit."""
    planes = ask.plane_bytes
    if room is None:
        assert ask.num_pages is not None
        return ask.num_pages, ask.num_pages, 2 * ask.num_pages, 0
    num_pages = ask.num_pages
    if num_pages is None:
        finest = room // (planes.base + 2 * planes.fine)
        least = planes.cold if ask.has_cold else planes.base
        num_pages = min(max(finest, ask.pages_of_one), max_num_seqs * ask.pages_of_one)
        num_pages = max(1, min(num_pages, room // least))
    short = num_pages * planes.base - room
    if short > 0:
        assert ask.has_cold, (num_pages, room)
        cold = min(num_pages, -(-short // (planes.base - planes.cold)))
        return num_pages, num_pages - cold, 0, cold
    return num_pages, num_pages, min(2 * num_pages, -short // planes.fine), 0


_SLACK = 1e-9
"""Relative error of sums of floats, far below the digits that are shown."""


def _up(bits: float) -> float:
    """Bits rounded up to what can be typed back as they are."""
    return math.ceil(bits * 1000 * (1 - _SLACK)) / 1000
