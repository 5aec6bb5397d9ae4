"""`attend_mixed`: attention over pages of mixed fidelity, and how much of it each page drew.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages (ids in `place_P4`, of
one sequence in `page_table_SP` and `mass_SP`, positions in `table_PC`), S sequences, Q query tiles,
N key positions, M rows of a tile (tokens x heads of one KV head), Z splits, C columns of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from subten.codecs.nested import MixedFormat
from subten.core import PAGE_SIZE
from subten.kernels.attend import check_queries
from subten.kernels.attend_plan import AttendPlan
from subten.kernels.attend_tiles import (
    Partials,
    check_table,
    load_queries,
    make_partials,
    merge,
    num_sms,
    plan_for,
    softmax_step,
    split_pages,
    tile_args,
    tile_constants,
    tile_rows,
    tile_span,
)
from subten.kernels.kv_append import check_rotation, codec_tables, rotate_rows
from subten.kernels.mixed_pages import MixedPages, load_mixed, read_sequence
from subten.kernels.page_mass import add_sequences, add_tiles, make_shares
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import tl, triton, triton_jit


def attend_mixed(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None = None,
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend` where each page lies as its record says; returns `out_THD` in q's dtype.

    As `kernels.attend.attend` in all that is not said here: causal, prefill and decode in any mix,
    splits, padding, rounding, determinism. `step.page_table_SP` holds page ids, rows of
    `pages.place_P4`; the records of pages that are read must be HOT, BASE or COLD. Rows in every
    kind of plane are rotated: `rotation_DD` is `codecs.rotation.hadamard(D)`.

    `coef_THC` and `table_PC`, float32 and contiguous, both or none, add
    scale * sum_c coef[t, h, c] * table[n, c] to the score of every key n, whatever plane it lies
    in: what keys have lost that were stored less a part that their position tells. The table has a
    row for each position up to `step.max_kv_len`. Products are FP32 under FP32 queries and TF32
    otherwise.

    `mass_SP` float32, shaped as `page_table_SP`: to each page of each sequence is added the softmax
    weight that it got, summed over the step's queries and heads; a sequence's row grows by its
    queries times H in all. Two launches more, three for steps that are not single tokens; the sums
    have a fixed order.
    """
    check_mixed(q_THD, pages, fmt, step, rotation_DD, mass_SP)
    check_table(q_THD, step, coef_THC, table_PC)
    keywords: dict[str, Any] = {"scale": scale, "rotation_DD": rotation_DD, "mass_SP": mass_SP}
    keywords |= {"coef_THC": coef_THC, "table_PC": table_PC}
    if q_THD.device.type == "cpu" and q_THD.dtype != torch.float32:
        # Triton's interpreter multiplies the bit patterns of bf16 dots and truncates bf16 casts.
        return attend_mixed(q_THD.float(), pages, fmt, step, **keywords).to(q_THD.dtype)
    num_tiles = len(step.tile_seq_Q)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if num_tiles == 0 or len(q_THD) == 0:
        return out_THD
    plan = plan_for(q_THD, pages.num_kv_heads, step, num_sms(q_THD.device))
    partials = Partials(out_THD, out_THD)
    if plan.grid_splits > 1:
        partials = make_partials(q_THD, plan)
    elif mass_SP is not None:
        shape_THZ = (*q_THD.shape[:2], plan.num_splits)
        partials = Partials(out_THD, q_THD.new_empty(shape_THZ, dtype=torch.float32))
    call = _Call(q_THD, pages, fmt, plan, partials, scale, rotation_DD, coef_THC, table_PC)
    if mass_SP is None:
        _launch(call, step, None)
    else:
        num_blocks, group = pages.num_kv_heads * plan.head_blocks, call.group
        shares = make_shares(q_THD, num_blocks, step, plan)
        for first_tile, part in shares.parts(step):
            _launch(call, part, shares.share_QBPM)
            add_tiles(shares, first_tile, part, partials.lse_THZ, mass_SP, plan, group)
        add_sequences(shares, step, mass_SP)
    if plan.grid_splits > 1:
        merge(partials, out_THD, step, plan, tile_constants(q_THD, plan, rotation_DD))
    return out_THD


def attend_mixed_torch(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None = None,
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `attend_mixed`, and the CPU backend; FP32 throughout, any orthogonal `rotation_DD`.

    Differentiable in q. Tokens of no tile come out as zeros.
    """
    check_mixed(q_THD, pages, fmt, step, rotation_DD, mass_SP)
    check_table(q_THD, step, coef_THC, table_PC)
    num_tokens, num_heads, head_dim = q_THD.shape
    query_start, kv_lens = step.query_start_S1.tolist(), step.kv_len_S.tolist()
    rows = []
    for s, kv_len in enumerate(kv_lens):
        first, end = query_start[s], query_start[s + 1]
        if first == end or kv_len == 0:
            rows.append(q_THD.new_zeros(end - first, num_heads, head_dim))
            continue
        num_pages = -(-kv_len // PAGE_SIZE)
        page_N = step.page_table_SP[s, :num_pages]
        k_GND, v_GND = (x_GND[:, :kv_len] for x_GND in read_sequence(pages, fmt, page_N))
        for start in range(first, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            q = q_THD[start:stop].float() @ rotation_DD * scale
            added_THN = None
            if coef_THC is not None and table_PC is not None:
                added_THN = coef_THC[start:stop] * scale @ table_PC[:kv_len].T
            out, mass_N = _dense(q, k_GND, v_GND, step.position_T[start:stop], added_THN)
            rows.append((out @ rotation_DD.T).to(q_THD.dtype))
            if mass_SP is not None:
                padded_N = F.pad(mass_N.detach(), (0, -len(mass_N) % PAGE_SIZE))
                mass_P = padded_N.view(-1, PAGE_SIZE).sum(1)
                mass_SP[s, : len(mass_P)] += mass_P
    rows.append(q_THD.new_zeros(num_tokens - query_start[-1], num_heads, head_dim))
    return torch.cat(rows)


_CHUNK = 128
"""Query tokens scored at once: bounds memory to chunk x H x kv_len."""


def _dense(
    q_THD: torch.Tensor,
    k_GND: torch.Tensor,
    v_GND: torch.Tensor,
    position_T: torch.Tensor,
    added_THN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of turned and scaled queries; and the sum of weights of each key, [N]."""
    num_tokens, num_kv_heads = len(q_THD), len(k_GND)
    num_keys = min(int(position_T[-1]) + 1, k_GND.shape[1])
    k_GND, v_GND = k_GND[:, :num_keys], v_GND[:, :num_keys]
    q_GMD = q_THD.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    score_GMN = q_GMD @ k_GND.transpose(1, 2)
    is_hidden_TN = torch.arange(num_keys, device=q_THD.device) > position_T[:, None]
    score_GTMN = score_GMN.unflatten(1, (num_tokens, -1))
    if added_THN is not None:
        added_TGMN = added_THN[..., :num_keys].unflatten(1, (num_kv_heads, -1))
        score_GTMN = score_GTMN + added_TGMN.transpose(0, 1)
    weight_GTMN = score_GTMN.masked_fill(is_hidden_TN[:, None], -math.inf).softmax(-1)
    out_GMD = weight_GTMN.flatten(1, 2) @ v_GND
    out_THD = out_GMD.unflatten(1, (num_tokens, -1)).transpose(0, 1).flatten(1, 2)
    return out_THD, weight_GTMN.sum(dim=(0, 1, 2))


def check_mixed(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None,
) -> None:
    """Assert what every backend of `attend_mixed` takes."""
    pages.check(fmt)
    assert q_THD.device == pages.place_P4.device, (q_THD.device, pages.place_P4.device)
    check_queries(q_THD, pages.num_kv_heads, fmt.head_dim, step)
    check_rotation(rotation_DD, fmt.hot)
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


def _launch(call: _Call, step: StepTensors, share_QBPM: torch.Tensor | None) -> None:
    """Attend for the tiles of `step`; their shares go to `share_QBPM`, if there is one."""
    pages, fmt, plan = call.pages, call.fmt, call.plan
    pools = (pages.hot_HGB, pages.base_BGB, pages.fine_FGB, pages.cold_CGB)
    num_blocks = pages.num_kv_heads * plan.head_blocks
    # Where there is no such thing any pointer does: it is not read.
    sink_XGB = pages.hot_HGB if pages.sink_XGB is None else pages.sink_XGB
    width = 0 if call.table_PC is None else call.table_PC.shape[1]
    _attend_mixed_kernel[(len(step.tile_seq_Q), num_blocks, plan.grid_splits)](
        *tile_args(step, plan),
        call.q_THD,
        *call.q_THD.stride(),
        pages.place_P4,
        step.page_table_SP,
        step.page_table_SP.stride(0),
        *(part for pool in pools for part in (pool, *pool.stride()[:2])),
        codec_tables(fmt.cold.codec, pages.cold_CGB),
        sink_XGB,
        *sink_XGB.stride()[:2],
        pages.place_P4 if pages.sink_P is None else pages.sink_P,
        call.partials.lse_THZ if call.coef_THC is None else call.coef_THC,
        call.partials.lse_THZ if call.table_PC is None else call.table_PC,
        call.partials.out_THZD,
        call.partials.lse_THZ,
        call.partials.lse_THZ if share_QBPM is None else share_QBPM,
        0 if share_QBPM is None else share_QBPM.shape[2],
        call.scale * math.log2(math.e),
        DECODE_HOT=fmt.hot.codec.device_decode,
        DECODE_COLD=fmt.cold.codec.device_decode,
        HOT_V=fmt.hot.v_codes,
        BASE_SCALE=fmt.base.k_scale,
        BASE_V=fmt.base.v_codes,
        COLD_SCALE=fmt.cold.k_scale,
        COLD_ZERO=fmt.cold.k_zero,
        COLD_V=fmt.cold.v_codes,
        NUM_SINKS=pages.num_sinks(fmt),
        WIDTH=width,
        BLOCK_C=max(16, triton.next_power_of_2(width)),
        TABLE_PRECISION="ieee" if call.q_THD.dtype == torch.float32 else "tf32",
        GROUP=call.group,
        BLOCK_H=plan.block_heads,
        BLOCK_M=plan.block_rows,
        IS_SPLIT=plan.grid_splits > 1,
        HAS_MASS=share_QBPM is not None,
        **tile_constants(call.q_THD, plan, call.rotation_DD),
        num_warps=plan.num_warps,
        num_stages=1,
    )


# `attend`'s loop (attend.py), but for the pages, which lie where their records say:
#
#   page_table[s] -> page id -> (kind, first, fine_k, fine_v)
#     HOT   hot + first:   BF16 rows
#     BASE  base + first:  2-bit codes and norms, and bits that refine them at fine + fine_k, fine_v
#     COLD  cold + first:  indices into the codebook, and norms
#
# K and V differ by one offset in every plane. The share of a page, for its mass, is log2 of the sum
# of its weights in each row.
#
# The first rows of a sequence come from its sink plane, if its first page has gone down. The part
# that a table has in scores is a product of its own, coef [M, C] by 64 of its rows; coefficients
# are loaded again for each page: kept, they would take as many registers as the output.
#
# Bytes of a page and KV head: 256 D hot, 32 D + 256 base and 16 D more for each fine plane, 24 D +
# 256 cold; with mass 4 a row and page; with a table 256 C a page, the same for all heads. Loads are
# not pipelined over the branches (num_stages 1): latency is hidden by programs alone. Not yet
# measured on a GPU.
@triton_jit
def _attend_mixed_kernel(
    position_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    tile_seq_ptr: tl.tensor,
    tile_start_ptr: tl.tensor,
    num_splits: tl.tensor,
    q_ptr: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    q_stride_d: tl.tensor,
    place_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    hot_ptr: tl.tensor,
    hot_stride: tl.tensor,
    hot_stride_g: tl.tensor,
    base_ptr: tl.tensor,
    base_stride: tl.tensor,
    base_stride_g: tl.tensor,
    fine_ptr: tl.tensor,
    fine_stride: tl.tensor,
    fine_stride_g: tl.tensor,
    cold_ptr: tl.tensor,
    cold_stride: tl.tensor,
    cold_stride_g: tl.tensor,
    tables_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    sink_stride: tl.tensor,
    sink_stride_g: tl.tensor,
    sink_of_ptr: tl.tensor,
    coef_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    share_ptr: tl.tensor,
    share_pages: tl.tensor,
    scale_log2: tl.tensor,
    DECODE_HOT: tl.constexpr,
    DECODE_COLD: tl.constexpr,
    HOT_V: tl.constexpr,
    BASE_SCALE: tl.constexpr,
    BASE_V: tl.constexpr,
    COLD_SCALE: tl.constexpr,
    COLD_ZERO: tl.constexpr,
    COLD_V: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TABLE_PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_MASS: tl.constexpr,
) -> None:
    tl.static_assert(BLOCK_M >= 16 and BLOCK_M >= TILE_TOKENS * BLOCK_H and BLOCK_D >= HEAD_DIM)
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(tile_seq_ptr + tile)
    if seq < 0:
        return
    tile_start = tl.load(tile_start_ptr + tile)
    tile_end, num_keys = tile_span(
        position_ptr, kv_len_ptr, query_start_ptr, seq, tile_start, TILE_TOKENS
    )
    num_pages, pages_per_split = split_pages(num_keys, num_splits, MIN_PAGES, PAGE)
    first_page = split * pages_per_split
    if IS_SPLIT and first_page >= num_pages:
        return

    token_M, head_M, mask_M = tile_rows(block, tile_start, tile_end, GROUP, BLOCK_H, BLOCK_M)
    position_M = tl.load(position_ptr + token_M, mask=mask_M, other=-1).to(tl.int32)
    q_MD = load_queries(
        q_ptr,
        q_stride_t,
        q_stride_h,
        q_stride_d,
        token_M,
        head_M,
        mask_M,
        HEAD_DIM,
        BLOCK_D,
        STAGES,
    )
    dtype = q_MD.dtype

    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_N = tl.arange(0, PAGE)
    page_table_ptr += seq.to(tl.int64) * page_table_stride
    kv_head = (block // HEAD_BLOCKS).to(tl.int64)
    hot_ptr += kv_head * hot_stride_g
    base_ptr += kv_head * base_stride_g
    fine_ptr += kv_head * fine_stride_g
    cold_ptr += kv_head * cold_stride_g
    sink_ptr += kv_head * sink_stride_g
    c = tl.arange(0, BLOCK_C)
    coef_MC = coef_ptr + (token_M.to(tl.int64) * NUM_HEADS + head_M)[:, None] * WIDTH + c[None, :]
    coef_mask_MC = mask_M[:, None] & (c < WIDTH)[None, :]
    share_ptr += (tile.to(tl.int64) * tl.num_programs(1) + block) * share_pages * BLOCK_M
    for index in range(first_page, tl.minimum(first_page + pages_per_split, num_pages)):
        page = tl.load(page_table_ptr + index).to(tl.int64)
        record_ptr = place_ptr + page * 4
        kind, first = tl.load(record_ptr), tl.load(record_ptr + 1).to(tl.int64)
        hot = hot_ptr + first * hot_stride
        base = base_ptr + first * base_stride
        cold = cold_ptr + first * cold_stride
        key_N = index * PAGE + row_N
        mask_N = key_N < num_keys

        has_sinks = False
        sink = sink_ptr
        if NUM_SINKS > 0:
            sink_id = tl.load(sink_of_ptr + page, mask=index == 0, other=-1).to(tl.int64)
            has_sinks = (sink_id >= 0) & (kind != 0)
            sink += tl.maximum(sink_id, 0) * sink_stride
        fine_id = tl.load(record_ptr + 2).to(tl.int64)
        code_ND, scale_N = load_mixed(
            kind,
            hot,
            base,
            fine_ptr + tl.maximum(fine_id, 0) * fine_stride,
            fine_id >= 0,
            cold,
            sink,
            has_sinks,
            row_N,
            mask_N,
            tables_ptr,
            DECODE_HOT,
            DECODE_COLD,
            HOT_V,
            BASE_SCALE,
            COLD_SCALE,
            COLD_ZERO,
            NUM_SINKS,
            HEAD_DIM,
            BLOCK_D,
        )
        score_MN = tl.dot(q_MD, tl.trans(code_ND.to(dtype)), input_precision="ieee")
        score_MN = score_MN * scale_N[None, :]
        if WIDTH > 0:
            coef = tl.load(coef_MC, mask=coef_mask_MC, other=0.0)
            table_NC = table_ptr + key_N[:, None] * WIDTH + c[None, :]
            mask_NC = mask_N[:, None] & (c < WIDTH)[None, :]
            table_CN = tl.trans(tl.load(table_NC, mask=mask_NC, other=0.0))
            score_MN += tl.dot(coef, table_CN, input_precision=TABLE_PRECISION)
        is_seen_MN = (key_N[None, :] <= position_M[:, None]) & mask_N[None, :]
        score_MN = tl.where(is_seen_MN, score_MN * scale_log2, float("-inf"))
        p_MN, decay_M, shift_M, max_M = softmax_step(score_MN, is_seen_MN, max_M)
        weight_M = tl.sum(p_MN, axis=1)
        if HAS_MASS:
            # The logarithm of no weight at all, without taking it.
            share_M = shift_M + tl.log2(tl.where(weight_M == 0.0, 1.0, weight_M))
            share_M = tl.where(weight_M == 0.0, float("-inf"), share_M)
            tl.store(share_ptr + index * BLOCK_M + tl.arange(0, BLOCK_M), share_M)

        fine_id = tl.load(record_ptr + 3).to(tl.int64)
        code_ND, scale_N = load_mixed(
            kind,
            hot + HOT_V,
            base + BASE_V,
            fine_ptr + tl.maximum(fine_id, 0) * fine_stride,
            fine_id >= 0,
            cold + COLD_V,
            sink + NUM_SINKS * 2 * HEAD_DIM,
            has_sinks,
            row_N,
            mask_N,
            tables_ptr,
            DECODE_HOT,
            DECODE_COLD,
            HOT_V,
            BASE_SCALE,
            COLD_SCALE,
            COLD_ZERO,
            NUM_SINKS,
            HEAD_DIM,
            BLOCK_D,
        )
        # Scaled in FP32 and rounded once, to the dtype of the dot.
        scaled_MN = (p_MN * scale_N[None, :]).to(dtype)
        acc_MD = acc_MD * decay_M[:, None]
        acc_MD = tl.dot(scaled_MN, code_ND.to(dtype), acc_MD, input_precision="ieee")
        sum_M = sum_M * decay_M + weight_M

    # A row that saw nothing becomes 0; NaN is not 0, so a poisoned sequence stays NaN.
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    out_MD = acc_MD / sum_M[:, None]
    out_row_M = token_M.to(tl.int64) * NUM_HEADS + head_M
    if IS_SPLIT or HAS_MASS:
        lse_M = max_M + tl.log2(sum_M)
        tl.store(lse_ptr + out_row_M * num_splits + split, lse_M, mask=mask_M)
    if IS_SPLIT:
        out_row_M = out_row_M * num_splits + split
    else:
        out_MD = rotate_rows(out_MD, STAGES)
    d = tl.arange(0, BLOCK_D)
    out = out_ptr + out_row_M[:, None] * HEAD_DIM + d[None, :]
    mask_MD = mask_M[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out, out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)
