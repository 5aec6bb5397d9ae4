"""The bytes of an adaptive cache: planes, rings of recent rows, and the moves between planes.

Everything here is queued on one stream in the order of the calls: a step, then the moves that
`settle` decided, then the places that changed, then the next step. So a plane that the host has
freed is still whole for whatever was queued before, a step that was started ahead included, and
whoever gets it next writes to it later. The device is never waited for in a decode step.

Letters: L layers, P page ids, G KV heads, X base and sink, Y fine and Z cold planes, B bytes,
N recent rows, E 2D, S sequences of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from subten.cache.fidelity import Fidelity, FidelityPolicy, Span
from subten.cache.plane_plan import PlanePlan
from subten.cache.planes import NOWHERE, PlaneNumbers
from subten.cache.use import CacheUse
from subten.codecs.adaptive import AdaptiveFormat
from subten.core import PAGE_SIZE
from subten.kernels.adaptive_pages import AdaptivePages, KeyPool
from subten.kernels.adaptive_step import AdaptiveStep, Staging
from subten.kernels.demote import ValuePools
from subten.kernels.mixed_pages import Window

MASS_PERIOD = 16
"""Decode steps from one reading of the masses to the next."""

MASS_LAG = 2
"""Steps after which a reading is sure to have come: the tokens of a later step are known."""


class AdaptivePool:
    """Pages of mixed fidelity, sized by a plan; what `PagePool` is to a cache of one format.

    `demote` is the op that writes values in cold planes. At most `max_rows` sequences of
    `max_model_len` tokens are in a step, and `max_step_tokens` tokens. A query sees the last
    `window` tokens, its own included, and the first `num_sinks` of a sequence as they are. Channels
    `outlier_LGO` int32 of keys stay in BF16.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        fmt: AdaptiveFormat,
        plan: PlanePlan,
        device: torch.device,
        demote: Callable[..., None],
        max_rows: int,
        max_model_len: int,
        max_step_tokens: int,
        num_sinks: int = 0,
        outlier_LGO: torch.Tensor | None = None,
        window: int = 0,
    ) -> None:
        self.fmt = fmt
        self.num_pages = plan.num_pages
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.widths = plan.widths
        self.window = window
        self._demote = demote
        self._device = device
        num_outliers = 0 if outlier_LGO is None else outlier_LGO.shape[2]
        self.plane_bytes = plane_bytes(
            plan.widths,
            num_kv_heads,
            fmt,
            num_sinks=num_sinks,
            num_outliers=num_outliers,
            window=window,
        )
        policy = FidelityPolicy(value_bytes=plan.value_bytes, newest_pages=plan.newest_pages)
        counts, mixed = plan.counts, fmt.mixed
        self.fidelity = Fidelity(policy, counts=counts, plane_bytes=self.plane_bytes)

        def planes(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=device)

        keys = []
        for layer, width in enumerate(plan.widths):
            outliers: dict[str, torch.Tensor] = {}
            if outlier_LGO is not None:
                outlier_bytes = mixed.outlier_bytes(num_outliers)
                outliers["k_out_PGB"] = planes(plan.num_pages, num_kv_heads, outlier_bytes)
                outliers["outlier_GO"] = outlier_LGO[layer].contiguous()
            k_PGB = planes(plan.num_pages, num_kv_heads, mixed.k_bytes(width))
            keys.append(KeyPool(bits=width, k_PGB=k_PGB, **outliers))
        values = ValuePools(
            vbase_LXGB=planes(num_layers, counts.base, num_kv_heads, mixed.base_bytes),
            vfine_LYGB=planes(num_layers, counts.fine, num_kv_heads, mixed.fine_bytes),
            vcold_LZGB=planes(num_layers, counts.cold, num_kv_heads, mixed.cold_bytes),
        )
        sink_LXGB = planes(num_layers, counts.sink, num_kv_heads, mixed.exact_bytes(num_sinks))
        row = (num_kv_heads, 2 * fmt.head_dim)
        # The last row of each is for copies that stand for none.
        num_ring_rows = counts.ring * window + 1 if window else 0
        num_staging_rows = staging_rows(max_step_tokens, plan.max_num_seqs, window)
        ring_LNGE = torch.empty(
            num_layers, num_ring_rows, *row, dtype=torch.bfloat16, device=device
        )
        self._staging_NGE = torch.empty(num_staging_rows, *row, dtype=torch.bfloat16, device=device)
        may_go_down = plan.value_bytes is not None or counts.fine < plan.num_pages
        mass_shape = (max_rows, _num_pages(max_model_len)) if may_go_down else None
        self.pages = AdaptivePages(
            keys=keys,
            values=values,
            ring_LNGE=ring_LNGE,
            sink_LXGB=sink_LXGB,
            mass_shape=mass_shape,
        )
        self._masses = _MassReader(self.pages.total_P) if may_go_down else None

    @property
    def capacity(self) -> int:
        """Tokens that fit, over all sequences."""
        return self.num_pages * PAGE_SIZE

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools and of the buffer that a step stages its rows in."""
        pages = self.pages
        values = pages.values
        each = (
            *(keys.k_PGB for keys in pages.keys),
            *(keys.k_out_PGB for keys in pages.keys if keys.k_out_PGB is not None),
            *(values.vbase_LXGB, values.vfine_LYGB, values.vcold_LZGB),
            *(pages.sink_LXGB, pages.ring_LNGE, self._staging_NGE),
        )
        return sum(tensor.nbytes for tensor in each)

    @property
    def bytes_used(self) -> int:
        """Bytes of what pages and sequences have, pages that nobody holds included."""
        return self.fidelity.ledger.bytes_used

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token of a page with 4-bit values, or with what the budget gives it."""
        return self.plane_bytes.by_rung[0] / PAGE_SIZE

    @property
    def full_page_bits(self) -> float:
        """Bits an element of a page, as `bytes_per_token` has it."""
        return self.bytes_per_token * 8 / self._elements_per_token

    def bits(self, num_bytes: int, num_tokens: int) -> float | None:
        """Bits per cached element of so many bytes; None without tokens."""
        if num_tokens == 0:
            return None
        return num_bytes * 8 / (num_tokens * self._elements_per_token)

    def use(self, page_ids: Sequence[int], *, num_seqs: int = 1) -> CacheUse:
        """What these pages of `num_seqs` sequences take, rings included, and how many stand where.

        Without pages there is no sequence either.
        """
        fidelity = self.fidelity
        num_rings = num_seqs if page_ids else 0
        num_bytes = fidelity.bytes_of(page_ids) + num_rings * self.plane_bytes.ring
        rungs = Counter(fidelity.ledger.places[page_id].rung for page_id in page_ids)
        kinds = {rung.name.lower(): rungs[rung] for rung in sorted(rungs)}
        return CacheUse(num_bytes=num_bytes, pages_by_kind=kinds)

    def prepare(self, spans: Sequence[Span]) -> None:
        """Before a step: every page that it writes has planes, every sequence a ring."""
        self._apply(self.fidelity.prepare(spans))

    def settle(self, spans: Sequence[Span], *, is_decode: bool) -> None:
        """After a step was queued: meet the budget.

        With `is_decode` nothing waits for the device; else the step must have been waited for.
        """
        if self._masses is not None:
            for total_P in self._masses.step(is_decode=is_decode):
                self.fidelity.count_mass(total_P)
        self._apply(self.fidelity.settle(spans))

    def eager_step(self, spans: Sequence[Span]) -> AdaptiveStep:
        """What the model gets for a step that no graph serves; sequences in the step's order."""
        if all(span.end - span.start == 1 for span in spans):
            return self.decode_step(self._uploads(_decode_rows(self, spans)))
        return self.chunk_step(self._uploads(_chunk_rows(self, spans)))

    def decode_step(self, rows: Mapping[str, torch.Tensor]) -> AdaptiveStep:
        """What the model gets for one token a sequence; rows as `decode_layout` names them."""
        return AdaptiveStep(pages=self.pages, window=self._window(rows))

    def chunk_step(self, rows: Mapping[str, torch.Tensor]) -> AdaptiveStep:
        """What the model gets for chunks; rows as `chunk_layout` names them."""
        if not self.window:
            return self.decode_step(rows)
        copies = {name: rows[name] for name in _COPIES}
        staging = Staging(rows_NGE=self._staging_NGE, **copies)
        return AdaptiveStep(pages=self.pages, window=self._window(rows), staging=staging)

    def decode_layout(self, num_rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Arrays that `fill_decode` fills, their dtypes and shapes."""
        return dict.fromkeys(_WINDOW, ("int32", (num_rows,)))

    def fill_decode(self, host: Mapping[str, np.ndarray[Any, Any]], spans: Sequence[Span]) -> None:
        """Where each sequence's token goes; rows beyond them stand for none."""
        rows = _decode_rows(self, spans)
        for name in _WINDOW:
            host[name][: len(spans)] = rows[name]
            host[name][len(spans) :] = _PADDING.get(name, 0)

    def chunk_layout(self, num_tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Arrays that `fill_chunk` fills, their dtypes and shapes."""
        return {
            **dict.fromkeys(_WINDOW, ("int32", (1,))),
            "row_T": ("int32", (num_tokens,)),
            **dict.fromkeys(_COPIES, ("int64", (self.window,))),
        }

    def fill_chunk(self, host: Mapping[str, np.ndarray[Any, Any]], span: Span | None) -> None:
        """Where one sequence's tokens go; None: no tokens."""
        found = {} if span is None else _chunk_rows(self, [span])
        padding = _PADDING | {
            **{name: len(self._staging_NGE) - 1 for name in ("in_row", "out_row")},
            **dict.fromkeys(("in_ring", "out_ring"), self.pages.ring_LNGE.shape[1] - 1),
        }
        for name in (*_WINDOW, *_COPIES):
            values = found.get(name, [])
            host[name][: len(values)] = values
            host[name][len(values) :] = padding.get(name, 0)

    def check_integrity(self) -> None:
        """Assert that ledger, device and pools agree; waits for the device."""
        self.fidelity.check_integrity()
        ledger = self.fidelity.ledger
        record_P4 = torch.cat([self.pages.place_P3, self.pages.sink_P[:, None]], dim=1).tolist()
        for page, place in enumerate(ledger.places):
            # Of pages that were freed the device is told with the next step.
            if place != NOWHERE:
                wanted = [*place.record, ledger.sink_of.get(page, -1)]
                assert record_P4[page] == wanted, (page, record_P4[page], wanted)
        spare_rows = len(self._staging_NGE) + (self.num_layers if self.window else 0)
        spare = spare_rows * self.num_kv_heads * self.fmt.mixed.exact_bytes(1)
        assert self.total_bytes == ledger.counts.dot(self.plane_bytes) + spare

    @property
    def _elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.fmt.head_dim

    def _window(self, rows: Mapping[str, torch.Tensor]) -> Window:
        return Window(size=self.window, **{name: rows[name] for name in _WINDOW})

    def _apply(self, moves: list[tuple[int, int, int]]) -> None:
        """Queue moves, then the places that changed."""
        if moves:
            self._demote(self.pages.values, self.fmt.mixed, self._upload(moves))
        changed = self.fidelity.take_changed()
        if changed:
            record_N5 = self._upload([(page, *place.record, sink) for page, place, sink in changed])
            page_N = record_N5[:, 0].long()
            self.pages.place_P3.index_copy_(0, page_N, record_N5[:, 1:4])
            self.pages.sink_P.index_copy_(0, page_N, record_N5[:, 4])

    def _upload(self, rows: list[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers, queued without waiting: pinned memory is kept until its copy is done."""
        host = torch.tensor(rows, dtype=dtype, pin_memory=self._device.type == "cuda")
        return host.to(self._device, non_blocking=True)

    def _uploads(self, rows: Mapping[str, list[int]]) -> dict[str, torch.Tensor]:
        return {
            name: self._upload(values, torch.int64 if name in _COPIES else torch.int32)
            for name, values in rows.items()
        }


_WINDOW = ("row_T", "base_S", "cap_S", "from_S")
_COPIES = ("in_ring", "in_row", "out_row", "out_ring")
_PADDING = {"row_T": -1, "cap_S": 1}


def _decode_rows(pool: AdaptivePool, spans: Sequence[Span]) -> dict[str, list[int]]:
    """Rows of the ring itself: position n of a sequence is row n % window of its ring."""
    size = pool.window
    if not size:
        return _no_rows(spans)
    recent = [pool.fidelity.recent(span.request_id) for span in spans]
    return {
        "row_T": [r.ring * size + span.start % size for r, span in zip(recent, spans, strict=True)],
        "base_S": [r.ring * size for r in recent],
        "cap_S": [size] * len(spans),
        "from_S": [r.first for r in recent],
    }


def _chunk_rows(pool: AdaptivePool, spans: Sequence[Span]) -> dict[str, list[int]]:
    """Rows of the buffer: a sequence has room for a window before its tokens and for those."""
    size = pool.window
    if not size:
        return _no_rows(spans)
    rows: dict[str, list[int]] = {name: [] for name in (*_WINDOW, *_COPIES)}
    base = 0
    for span in spans:
        recent = pool.fidelity.recent(span.request_id)
        ring, cap = recent.ring * size, size + span.end - span.start
        before = range(max(recent.first, span.start - size), span.start)
        kept = range(max(span.start, span.end - size), span.end)
        rows["row_T"] += [base + n % cap for n in range(span.start, span.end)]
        rows["base_S"].append(base)
        rows["cap_S"].append(cap)
        rows["from_S"].append(recent.first)
        rows["in_ring"] += [ring + n % size for n in before]
        rows["in_row"] += [base + n % cap for n in before]
        rows["out_row"] += [base + n % cap for n in kept]
        rows["out_ring"] += [ring + n % size for n in kept]
        base += cap
    assert base < len(pool._staging_NGE), (base, pool._staging_NGE.shape)
    return rows


def _no_rows(spans: Sequence[Span]) -> dict[str, list[int]]:
    nothing = {"base_S": 0, "cap_S": 1, "from_S": 0}
    rows = {name: [value] * len(spans) for name, value in nothing.items()}
    num_tokens = sum(span.end - span.start for span in spans)
    return {"row_T": [-1] * num_tokens, **rows, **{name: [] for name in _COPIES}}


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
    widths: Sequence[int],
    num_kv_heads: int,
    fmt: AdaptiveFormat,
    *,
    num_sinks: int,
    num_outliers: int,
    window: int,
) -> PlaneNumbers:
    """Bytes of one plane of each kind, over all layers and KV heads; of one sequence's ring."""
    mixed, num = fmt.mixed, len(widths) * num_kv_heads
    code_bytes = num_kv_heads * sum(mixed.k_bytes(width) for width in widths)
    return PlaneNumbers(
        key=code_bytes + num * mixed.outlier_bytes(num_outliers),
        base=num * mixed.base_bytes,
        fine=num * mixed.fine_bytes,
        cold=num * mixed.cold_bytes,
        sink=num * mixed.exact_bytes(num_sinks),
        ring=num * mixed.exact_bytes(window),
    )


def staging_rows(max_step_tokens: int, max_num_seqs: int, window: int) -> int:
    """Rows of the buffer that steps of several tokens a sequence stage recent rows in."""
    return max_step_tokens + max_num_seqs * window + 1 if window else 0


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
