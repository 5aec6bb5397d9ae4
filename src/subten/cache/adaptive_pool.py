"""The bytes of an adaptive cache: pools of planes, and the moves between them.

Everything here is queued on one stream in the order of the calls: a step, then the moves that
`settle` decided, then the places that changed, then the next step. So a plane that the host has
freed is still whole for whatever was queued before, a step that was started ahead included, and
whoever gets it next writes to it later. The device is never waited for in a decode step.

Letters: L layers, P page ids, G KV heads, H hot, B base, F fine, C cold planes (the last letter of
a pool is the bytes of a plane), S sequences of a step, N pages whose place changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from subten.cache.fidelity import Fidelity, FidelityPolicy, Move, Span
from subten.cache.plane_plan import PlanePlan
from subten.cache.planes import KIND_COLD, KIND_HOT, PlaneNumbers, Rung
from subten.cache.use import CacheUse
from subten.codecs.adaptive import AdaptiveFormat
from subten.core import PAGE_SIZE
from subten.kernels.adaptive_pages import AdaptivePages
from subten.kernels.demote import MixedPools

MASS_PERIOD = 16
"""Decode steps from one reading of the masses to the next."""

MASS_LAG = 2
"""Steps after which a reading is sure to have come: the tokens of a later step are known."""


class AdaptivePool:
    """Pages of mixed fidelity, sized by a plan; what `PagePool` is to a cache of one format.

    `demote` is the op that encodes hot pages. `max_rows` sequences of `max_model_len` tokens are
    the most that a step has. The first `num_sinks` rows of a sequence are kept in sink planes.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        fmt: AdaptiveFormat,
        plan: PlanePlan,
        policy: FidelityPolicy,
        device: torch.device,
        demote: Callable[..., None],
        max_rows: int,
        max_model_len: int,
        num_sinks: int = 0,
    ) -> None:
        self.fmt = fmt
        self.num_pages = plan.num_pages
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self._demote = demote
        self._device = device
        self.plane_bytes = plane_bytes(num_layers, num_kv_heads, fmt, num_sinks)
        self.fidelity = Fidelity(
            policy, counts=plan.counts, plane_bytes=self.plane_bytes, num_pages=plan.num_pages
        )
        mixed, counts = fmt.mixed, plan.counts
        shapes = [
            (counts.hot, mixed.hot.page_bytes),
            (counts.base, mixed.base.page_bytes),
            (counts.fine, mixed.fine_bytes),
            (counts.cold, mixed.cold.page_bytes),
            (counts.sink, num_sinks * 2 * mixed.hot.row.codes),
        ]
        hot, base, fine, cold, sink = (
            torch.empty(num_layers, num, num_kv_heads, size, dtype=torch.uint8, device=device)
            for num, size in shapes
        )
        pools = MixedPools(hot_LHGB=hot, base_LBGB=base, fine_LFGB=fine, cold_LCGB=cold)
        may_go_down = policy.routine_bytes is not None or counts.fine < 2 * plan.num_pages
        mass_shape = (max_rows, _num_pages(max_model_len)) if may_go_down else None
        self.pages = AdaptivePages(pools, sink, plan.num_pages, mass_shape)
        self._masses = _MassReader(self.pages.total_P) if may_go_down else None

    @property
    def capacity(self) -> int:
        """Tokens that fit, over all sequences."""
        return self.num_pages * PAGE_SIZE

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools."""
        pools = self.pages.pools
        each = (pools.hot_LHGB, pools.base_LBGB, pools.fine_LFGB, pools.cold_LCGB)
        return sum(pool.numel() for pool in (*each, self.pages.sink_LXGB))

    @property
    def bytes_used(self) -> int:
        """Bytes of the planes that pages have, those of pages that nobody holds included."""
        return self.fidelity.ledger.bytes_used

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token of a routine page: what the budget gives it, or else 4 bits."""
        routine = self.fidelity.policy.routine_bytes
        finest = self.plane_bytes.by_rung[Rung.K4V4]
        return min(finest, finest if routine is None else routine) / PAGE_SIZE

    @property
    def full_page_bits(self) -> float:
        """Bits an element of a routine page, as `bytes_per_token` has it."""
        return self.bytes_per_token * 8 / self._elements_per_token

    def bits(self, num_bytes: int, num_tokens: int) -> float | None:
        """Bits per cached element of so many bytes; None without tokens."""
        if num_tokens == 0:
            return None
        return num_bytes * 8 / (num_tokens * self._elements_per_token)

    def use(self, page_ids: Sequence[int]) -> CacheUse:
        """What these pages take, and how many of them stand on each rung."""
        fidelity = self.fidelity
        num_bytes = fidelity.bytes_of(page_ids)
        places = sorted((fidelity.ledger.places[p] for p in page_ids), key=lambda p: p.rung)
        kinds = dict(Counter(place.name for place in places))
        return CacheUse(num_bytes=num_bytes, pages_by_kind=kinds)

    def write_page(self, page_id: int) -> int:
        """The hot plane that tokens of a page are written to."""
        place = self.fidelity.ledger.places[page_id]
        assert place.kind == KIND_HOT, (page_id, place)
        return place.first

    def prepare(self, spans: Sequence[Span]) -> None:
        """Before a step: every page that it writes has a hot plane."""
        self._apply(self.fidelity.prepare(spans))

    def settle(self, spans: Sequence[Span], *, is_decode: bool) -> None:
        """After a step was queued: encode what left its windows, and meet the budget.

        With `is_decode` nothing waits for the device; else the step must have been waited for.
        """
        if self._masses is not None:
            for total_P in self._masses.step(is_decode=is_decode):
                self.fidelity.count_mass(total_P)
        self._apply(self.fidelity.settle(spans))

    def check_integrity(self) -> None:
        """Assert that ledger, device and pools agree; waits for the device."""
        self.fidelity.check_integrity()
        places, sinks = self.fidelity.ledger.places, self.fidelity.ledger.sink_of
        live = [page_id for page_id, place in enumerate(places) if place.rung >= Rung.HOT]
        wanted = [(*places[page_id].record, sinks.get(page_id, -1)) for page_id in live]
        record_P5 = torch.cat([self.pages.place_P4, self.pages.sink_P[:, None]], dim=1)
        got = record_P5.tolist()
        assert all(tuple(got[page]) == row for page, row in zip(live, wanted, strict=True)), wanted
        assert self.total_bytes == self.fidelity.ledger.counts.dot(self.plane_bytes)

    @property
    def _elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.fmt.head_dim

    def _apply(self, moves: list[Move]) -> None:
        """Queue moves, one launch for each run of a kind, then the places that changed."""
        for kind, run in groupby(moves, lambda move: move.source.kind):
            records = [
                move.source.record + move.target.record
                for move in run
                if kind == KIND_HOT or move.target.kind == KIND_COLD
            ]
            if records:
                self._demote(self.pages.pools, self.fmt.mixed, self._upload(records))
        sinks = [(move.source.first, move.sink) for move in moves if move.sink >= 0]
        if sinks:
            self.pages.copy_sinks(self._upload(sinks).long(), self.fmt)
        changed = self.fidelity.take_changed()
        if changed:
            record_N6 = self._upload([(page, *place.record, sink) for page, place, sink in changed])
            page_N = record_N6[:, 0].long()
            self.pages.place_P4.index_copy_(0, page_N, record_N6[:, 1:5])
            self.pages.sink_P.index_copy_(0, page_N, record_N6[:, 5])

    def _upload(self, rows: list[Any]) -> torch.Tensor:
        """Integers, queued without waiting: pinned memory is kept until its copy is done."""
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return host.to(self._device, non_blocking=True)


class _MassReader:
    """Brings the masses to the host some steps late, so that nobody has to wait for them."""

    def __init__(self, total_P: torch.Tensor) -> None:
        self._total_P = total_P
        self._host_P = torch.zeros(
            total_P.shape, dtype=torch.int64, pin_memory=total_P.device.type == "cuda"
        )
        self._num_steps = 0
        self._due: int | None = None

    def step(self, *, is_decode: bool) -> list[np.ndarray[Any, Any]]:
        """Masses that came with this step; after a step that was waited for, its own."""
        self._num_steps += 1
        if not is_decode:
            self._due = None
            self._host_P.copy_(self._total_P)
            return [self._host_P.numpy().copy()]
        came = []
        if self._due is not None and self._num_steps >= self._due:
            self._due = None
            came.append(self._host_P.numpy().copy())
        if self._num_steps % MASS_PERIOD == 0:
            self._host_P.copy_(self._total_P, non_blocking=True)
            self._due = self._num_steps + MASS_LAG
        return came


def plane_bytes(
    num_layers: int, num_kv_heads: int, fmt: AdaptiveFormat, num_sinks: int = 0
) -> PlaneNumbers:
    """Bytes of one plane of each kind, over all layers and KV heads."""
    mixed, num = fmt.mixed, num_layers * num_kv_heads
    return PlaneNumbers(
        hot=num * mixed.hot.page_bytes,
        base=num * mixed.base.page_bytes,
        fine=num * mixed.fine_bytes,
        cold=num * mixed.cold.page_bytes,
        sink=num * num_sinks * 2 * mixed.hot.row.codes,
    )


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
