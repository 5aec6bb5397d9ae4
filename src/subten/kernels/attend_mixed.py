"""`attend_mixed`: attention over the planes of an adaptive cache, and how much each page drew.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages (of one sequence in
`page_table_SP` and `mass_SP`, positions in `table_PC`), S sequences, Q query tiles, N key
positions, M rows of a tile (tokens x heads of one KV head), Z splits, C columns of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from subten.codecs.mixed import MixedFormat
from subten.codecs.vq import codebook
from subten.core import PAGE_SIZE
from subten.device import block_shared_bytes
from subten.kernels.attend_mixed_device import attend_mixed_kernel
from subten.kernels.attend_plan import AttendPlan
from subten.kernels.attend_tiles import (
    Partials,
    check_queries,
    check_table,
    make_partials,
    merge,
    num_sms,
    plan_for,
    tile_args,
    tile_constants,
)
from subten.kernels.mixed_pages import (
    MixedPages,
    Window,
    by_bytes,
    by_channels,
    read_exact,
    read_levels,
    read_sinks,
)
from subten.kernels.page_mass import add_sequences, add_tiles, make_shares
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import launcher, triton

MAX_ROWS = 32
"""Rows of a tile: products of so few run on mma.sync, whose operands stay in registers."""

MAX_TABLE_BYTES = 2**17
"""Shared memory that tiles of a table and its coefficients may take, of the 227 KiB of an H200."""

CHANNEL_BYTES = 768
"""Shared memory of all else for a channel of a head, in two stages: at most 47 KiB at head_dim 64,
91 KiB at 128, 183 KiB at 256 (Triton 3.9, compute capability 8.9, 32 rows); a quarter of it in
one stage."""


def attend_mixed(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    *,
    scale: float,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None = None,
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend` over planes and exact rows; returns `out_THD` in q's dtype.

    As `kernels.attend.attend` in all that is not said here: causal, prefill and decode in any mix,
    splits, padding, rounding, determinism. A query at position p reads key n of its sequence
    exactly if p - n < `window.size` and n >= `window.from_S`, from `pages.recent_NGE`; or if n is
    below S and the sequence's first page has a sink plane; else from the planes of its page. So a
    prompt reads what its tokens one by one would. Pages that are read must have a plane of values.

    `q_THD` is turned as keys are (q A^-T where those are k A), and not turned here; `rotation_DD`,
    by which the output is turned back, must be `codecs.rotation.hadamard(D)`.

    `coef_THC` and `table_PC`, float32 and contiguous, both or none, add
    scale * sum_c coef[t, h, c] * table[n, c] to the score of every key n, exact ones too: what keys
    have lost that were stored less a part that their position tells. The table has a row for each
    position up to `step.max_kv_len`, cosines and then sines of angles in proportion to it, times a
    factor, as `layers.rope.cos_sin_table` makes it: backends may add angles. Products are FP32
    under FP32 queries and TF32 otherwise.

    `mass_SP` float32, shaped as `page_table_SP`: to each page of each sequence is added the softmax
    weight that it got, summed over the step's queries and heads; a sequence's row grows by its
    queries times H in all. Two launches more, three for steps that are not single tokens; the sums
    have a fixed order.
    """
    check_mixed(q_THD, pages, fmt, step, window, rotation_DD, mass_SP)
    check_table(q_THD, step, coef_THC, table_PC)
    keywords: dict[str, Any] = {"scale": scale, "rotation_DD": rotation_DD, "mass_SP": mass_SP}
    keywords |= {"coef_THC": coef_THC, "table_PC": table_PC}
    if q_THD.device.type == "cpu" and q_THD.dtype != torch.float32:
        # Triton's interpreter multiplies the bit patterns of bf16 dots and truncates bf16 casts.
        return attend_mixed(q_THD.float(), pages, fmt, step, window, **keywords).to(q_THD.dtype)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if len(step.tile_seq_Q) == 0 or len(q_THD) == 0:
        return out_THD
    max_rows = _max_rows(table_PC, block_shared_bytes(q_THD.device))
    plan = plan_for(q_THD, pages.num_kv_heads, step, num_sms(q_THD.device), max_rows)
    # Quarters of other sizes do not make a row to turn: `merge` does that.
    has_parts = plan.grid_splits > 1 or fmt.head_dim not in (64, 128, 256)
    partials = Partials(out_THD, out_THD)
    if has_parts:
        partials = make_partials(q_THD, plan)
    elif mass_SP is not None:
        shape_THZ = (*q_THD.shape[:2], plan.num_splits)
        partials = Partials(out_THD, q_THD.new_empty(shape_THZ, dtype=torch.float32))
    call = _Call(q_THD, pages, fmt, window, plan, partials, scale, rotation_DD, coef_THC, table_PC)
    if mass_SP is None:
        _launch(call, step, None)
    else:
        num_blocks, group = pages.num_kv_heads * plan.head_blocks, call.group
        shares = make_shares(q_THD, num_blocks, step, plan)
        for first_tile, part in shares.parts(step):
            _launch(call, part, shares.share_QBPM)
            add_tiles(shares, first_tile, part, partials.lse_THZ, mass_SP, plan, group)
        add_sequences(shares, step, mass_SP)
    if has_parts:
        merge(partials, out_THD, step, plan, tile_constants(q_THD, plan, rotation_DD))
    return out_THD


def attend_mixed_torch(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    *,
    scale: float,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None = None,
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `attend_mixed`, and the CPU backend; any orthogonal `rotation_DD`."""
    check_mixed(q_THD, pages, fmt, step, window, rotation_DD, mass_SP)
    check_table(q_THD, step, coef_THC, table_PC)
    num_tokens, num_heads, head_dim = q_THD.shape
    query_start, kv_lens = step.query_start_S1.tolist(), step.kv_len_S.tolist()
    rows = []
    for s, kv_len in enumerate(kv_lens):
        first, end = query_start[s], query_start[s + 1]
        if first == end or kv_len == 0:
            rows.append(q_THD.new_zeros(end - first, num_heads, head_dim))
            continue
        page_N = step.page_table_SP[s, : -(-kv_len // PAGE_SIZE)]
        planes = tuple(x_GN[:, :kv_len] for x_GN in read_levels(pages, fmt, page_N))
        sink_GSE = read_sinks(pages, fmt, int(page_N[0]), kv_len)
        for start in range(first, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            position_T = step.position_T[start:stop]
            seen_GSE = sink_GSE[:, : int(position_T[-1]) + 1]
            key_K, is_exact_TK = _exact_pairs(window, s, position_T, seen_GSE.shape[1])
            added_THN = None
            if coef_THC is not None and table_PC is not None:
                added_THN = coef_THC[start:stop] * scale @ table_PC[:kv_len].T
            out_THD, weight_GTMN = _dense(
                q_THD[start:stop].float() * scale,
                planes,
                read_exact(pages, window, s, key_K, seen_GSE),
                key_K,
                is_exact_TK,
                position_T,
                added_THN,
            )
            rows.append((out_THD @ rotation_DD.T).to(q_THD.dtype))
            if mass_SP is not None:
                mass_N = weight_GTMN.detach().sum(dim=(0, 1, 2))
                padded_N = F.pad(mass_N, (0, -len(mass_N) % PAGE_SIZE))
                mass_P = padded_N.view(-1, PAGE_SIZE).sum(1)
                mass_SP[s, : len(mass_P)] += mass_P
    rows.append(q_THD.new_zeros(num_tokens - query_start[-1], num_heads, head_dim))
    return torch.cat(rows)


_CHUNK = 128
"""Query tokens scored at once: bounds memory to chunk x H x kv_len."""


def _exact_pairs(
    window: Window, s: int, position_T: torch.Tensor, num_sinks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that any of these queries reads exactly, [K], sinks first; and who does, [T, K]."""
    first, last = int(position_T[0]), int(position_T[-1])
    start = max(first - window.size + 1, int(window.from_S[s]), num_sinks)
    end = last + 1 if window.size else 0
    keys = [*range(num_sinks), *range(start, end)]
    key_K = torch.tensor(keys, dtype=torch.int64, device=position_T.device)
    is_near_TK = position_T[:, None] - key_K < window.size
    return key_K, is_near_TK | (key_K < num_sinks)


def _dense(
    q_THD: torch.Tensor,
    planes: tuple[torch.Tensor, ...],
    exact: tuple[torch.Tensor, torch.Tensor],
    key_K: torch.Tensor,
    is_exact_TK: torch.Tensor,
    position_T: torch.Tensor,
    added_THN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of scaled queries; and all weights, [G, T, M, N].

    `planes` are those of `read_levels`, `exact` K and V [G, K, D]; a pair of query and key reads
    one or the other.
    """
    num_tokens, num_keys = len(q_THD), int(position_T[-1]) + 1
    k_GND, k_norm_GN, v_GND, v_norm_GN = (x_GN[:, :num_keys] for x_GN in planes)
    exact_k_GKD, exact_v_GKD = exact
    q_GMD = q_THD.unflatten(1, (len(k_GND), -1)).transpose(0, 1).flatten(1, 2)
    score_GMN = by_bytes(q_GMD) @ k_GND.mT * k_norm_GN[:, None]
    score_GTMN = score_GMN.unflatten(1, (num_tokens, -1))
    exact_GTMK = (q_GMD @ exact_k_GKD.mT).unflatten(1, (num_tokens, -1))
    is_exact_TMK = is_exact_TK[:, None]
    near_GTMK = torch.where(is_exact_TMK, exact_GTMK, score_GTMN[..., key_K])
    score_GTMN = score_GTMN.index_copy(3, key_K, near_GTMK)
    if added_THN is not None:
        added_TGMN = added_THN[..., :num_keys].unflatten(1, (len(k_GND), -1))
        score_GTMN = score_GTMN + added_TGMN.transpose(0, 1)
    if num_tokens > 1:
        is_seen_TN = torch.arange(num_keys, device=q_THD.device) <= position_T[:, None]
        score_GTMN = score_GTMN.masked_fill(~is_seen_TN[:, None], -math.inf)
    weight_GTMN = score_GTMN.softmax(-1)
    near_GTMK = weight_GTMN[..., key_K]
    far_GTMK = near_GTMK.masked_fill(is_exact_TMK, 0.0)
    plane_GTMN = weight_GTMN.index_copy(3, key_K, far_GTMK)
    out_GMD = by_channels((plane_GTMN.flatten(1, 2) * v_norm_GN[:, None]) @ v_GND)
    near_GTMK = near_GTMK.masked_fill(~is_exact_TMK, 0.0)
    out_GMD = out_GMD + near_GTMK.flatten(1, 2) @ exact_v_GKD
    out_THD = out_GMD.unflatten(1, (num_tokens, -1)).transpose(0, 1).flatten(1, 2)
    return out_THD, weight_GTMN


def check_mixed(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None,
) -> None:
    """Assert what every backend of `attend_mixed` takes."""
    pages.check(fmt)
    assert q_THD.device == pages.place_P3.device, (q_THD.device, pages.place_P3.device)
    check_queries(q_THD, pages.num_kv_heads, fmt.head_dim, step)
    window.check(len(window.row_T), len(step.kv_len_S), q_THD.device)
    assert rotation_DD.shape == (fmt.head_dim, fmt.head_dim), rotation_DD.shape
    assert rotation_DD.dtype == torch.float32, rotation_DD.dtype
    if mass_SP is not None:
        assert mass_SP.dtype == torch.float32, mass_SP.dtype
        assert mass_SP.shape == step.page_table_SP.shape, (
            tuple(mass_SP.shape),
            tuple(step.page_table_SP.shape),
        )
        assert mass_SP.device == q_THD.device, (mass_SP.device, q_THD.device)
        assert mass_SP.stride(1) == 1, mass_SP.stride()


@dataclass(frozen=True, slots=True)
class _Call:
    """What the launches of one call share."""

    q_THD: torch.Tensor
    pages: MixedPages
    fmt: MixedFormat
    window: Window
    plan: AttendPlan
    partials: Partials
    scale: float
    rotation_DD: torch.Tensor
    coef_THC: torch.Tensor | None
    table_PC: torch.Tensor | None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_THD.shape[1] // self.pages.num_kv_heads


def _max_rows(table_PC: torch.Tensor | None, shared_bytes: int) -> int:
    """MAX_ROWS, or half, where a table's tile and twice the coefficients would not fit a block."""
    if table_PC is None:
        return MAX_ROWS
    block_c = triton.next_power_of_2(table_PC.shape[1])
    fits = 4 * block_c * (PAGE_SIZE + 2 * MAX_ROWS) < shared_bytes
    return MAX_ROWS if fits else MAX_ROWS // 2


def _num_stages(plan: AttendPlan, block_d: int, table_bytes: int, shared_bytes: int) -> int:
    """The plan's stages, or one where a block has no room for pages in flight.

    The loop holds the tiles of as many pages as it has stages, or one fewer.
    """
    in_flight = CHANNEL_BYTES * block_d + (plan.num_stages - 1) * table_bytes
    fits = in_flight <= shared_bytes and plan.num_stages * table_bytes <= MAX_TABLE_BYTES
    return plan.num_stages if fits else 1


def _launch(call: _Call, step: StepTensors, share_QBPM: torch.Tensor | None) -> None:
    """Attend for the tiles of `step`; their shares go to `share_QBPM`, if there is one."""
    pages, fmt, plan, window = call.pages, call.fmt, call.plan, call.window
    some = call.partials.lse_THZ  # in place of a pointer that is not used
    sink_XGB = pages.k_PGB if pages.sink_XGB is None else pages.sink_XGB
    k_out_PGB = pages.k_PGB if pages.k_out_PGB is None else pages.k_out_PGB
    values = (pages.vbase_XGB, pages.vfine_YGB, pages.vcold_ZGB)
    pools = (pages.k_PGB, *values, pages.recent_NGE, sink_XGB, k_out_PGB)
    width = 0 if call.table_PC is None else call.table_PC.shape[1]
    has_cold = len(pages.vcold_ZGB) > 0
    block_c = max(16, triton.next_power_of_2(width))
    block_j = max(16, triton.next_power_of_2(fmt.head_dim // 4))
    table_bytes = 4 * block_c * (plan.block_rows + PAGE_SIZE) if width else 0
    shared_bytes = block_shared_bytes(call.q_THD.device)
    grid = (len(step.tile_seq_Q), pages.num_kv_heads * plan.head_blocks, plan.grid_splits)
    launcher(attend_mixed_kernel, grid, "attend_mixed", "adaptive")(
        *tile_args(step, plan),
        call.q_THD,
        *call.q_THD.stride(),
        step.page_table_SP,
        step.page_table_SP.stride(0),
        pages.place_P3,
        *(part for pool in pools for part in (pool, *pool.stride()[:2])),
        some if pages.sink_P is None else pages.sink_P,
        some if pages.outlier_GO is None else pages.outlier_GO,
        window.size,
        window.base_S,
        window.cap_S,
        window.from_S,
        codebook(call.q_THD.device) if has_cold else some,
        some if call.coef_THC is None else call.coef_THC,
        some if call.table_PC is None else call.table_PC,
        call.partials.out_THZD,
        call.partials.lse_THZ,
        some if share_QBPM is None else share_QBPM,
        0 if share_QBPM is None else share_QBPM.shape[2],
        call.scale * math.log2(math.e),
        BITS=pages.k_bits,
        NUM_SINKS=pages.num_sinks(fmt),
        NUM_OUTLIERS=pages.num_outliers,
        BLOCK_O=max(16, triton.next_power_of_2(pages.num_outliers)),
        HAS_COLD=has_cold,
        WIDTH=width,
        BLOCK_C=block_c,
        TABLE_PRECISION="ieee" if call.q_THD.dtype == torch.float32 else "tf32",
        GROUP=call.group,
        BLOCK_H=plan.block_heads,
        BLOCK_M=plan.block_rows,
        BLOCK_J=block_j,
        IS_SPLIT=call.partials.out_THZD.dim() == 4,
        HAS_MASS=share_QBPM is not None,
        **tile_constants(call.q_THD, plan, call.rotation_DD),
        num_warps=plan.num_warps,
        num_stages=_num_stages(plan, 4 * block_j, table_bytes, shared_bytes),
    )
