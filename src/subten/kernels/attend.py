"""`attend`: attention over paged keys and values that stay encoded in memory.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages (of the pool in
`pages_PGB`, of one sequence in `page_table_SP`), B bytes of a page, S sequences, Q query tiles,
N key positions, M rows of a tile (query tokens x heads of one KV head), Z splits.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from subten.codecs import KVFormat
from subten.core import PAGE_SIZE
from subten.device import block_shared_bytes
from subten.kernels.attend_plan import BlockRoom
from subten.kernels.attend_tiles import (
    Partials,
    check_queries,
    load_queries,
    make_partials,
    merge,
    plan_for,
    softmax_step,
    split_pages,
    tile_args,
    tile_constants,
    tile_rows,
    tile_span,
    turn_results,
)
from subten.kernels.attend_tiles import num_sms as _num_sms
from subten.kernels.key_bias import bias_factors, bias_scores, check_key_bias, turned_bias
from subten.kernels.kv_append import check_pages, check_rotation, codec_tables, page_planes
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import launcher, tl, triton_jit
from subten.kernels.unpack_pages import is_worth_unpacking, unpack_pages


def attend(
    q_THD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor | None = None,
    key_bias_GD: torch.Tensor | None = None,
    cos_sin_PD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each token over its sequence's pages; returns `out_THD` in q's dtype.

    A query at position p sees positions 0..p below `step.kv_len_S`. Query head h reads KV head
    h * G // H. Decode and prefill, in any mix; one launch, a merge where pages are split, and one
    before where a query is long: it decodes the pages, and attention reads values.
    A sequence with kv_len 0 (padding) gets zeros; a tile with `tile_seq_Q` -1 is skipped and its
    tokens, like tokens of no tile, are left unwritten.

    `q_THD` bf16 or float32, RoPE done, not rotated, any strides; its dtype is that of the dots.
    `pages_PGB` uint8 [pages, G, fmt.page_bytes]; `rotation_DD` must be
    `codecs.rotation.hadamard(D)` where the codec is rotated, else None: q and the output are
    turned by its butterfly. `key_bias_GD` float32 [G, D] is what keys lack as they are stored
    (key_bias.py): each counts as if it had been added before rotary embedding by `cos_sin_PD`
    float32 [positions, D]. Wrong dtypes, devices, shapes or strides fail an assert.

    With bf16 q, what is rounded besides the codes: rotated q, decoded values of codecs whose codes
    are not small integers, and softmax weight times V scale, each by at most 2**-8 relative. The
    last one costs an output at most 2**-8 * sum_n(p_n * scale_n * |code_n|): 2**-8 of the largest
    scale * |code| of V, and less by sqrt(sum_n p_n**2) where rounding errors are independent.

    Deterministic. In a step of single tokens a sequence's result does not depend on the others,
    bit for bit, as long as `plan_attend` stays in one tier.
    """
    num_kv_heads = check_attend(q_THD, pages_PGB, fmt, step)
    check_rotation(rotation_DD, fmt)
    check_key_bias(key_bias_GD, cos_sin_PD, pages_PGB, fmt.head_dim, step)
    if q_THD.device.type == "cpu" and q_THD.dtype != torch.float32:
        # Triton's interpreter multiplies the bit patterns of bf16 dots and truncates bf16 casts.
        keywords: dict[str, Any] = {"scale": scale, "rotation_DD": rotation_DD}
        keywords |= {"key_bias_GD": key_bias_GD, "cos_sin_PD": cos_sin_PD}
        return attend(q_THD.float(), pages_PGB, fmt, step, **keywords).to(q_THD.dtype)
    num_tokens, num_heads, _ = q_THD.shape
    num_tiles = len(step.tile_seq_Q)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if num_tiles == 0 or num_tokens == 0:
        return out_THD
    table_SP = step.page_table_SP
    if is_worth_unpacking(fmt, q_THD.dtype, num_kv_heads, step):
        pages_PGB, fmt, table_SP = unpack_pages(pages_PGB, fmt, step, q_THD.dtype, rotation_DD)
        rotation_DD = None
    shared_bytes = block_shared_bytes(q_THD.device)
    room = BlockRoom(fmt=fmt, has_bias=key_bias_GD is not None, shared_bytes=shared_bytes)
    plan = plan_for(q_THD, num_kv_heads, step, _num_sms(q_THD.device), room.max_rows)
    is_split = plan.grid_splits > 1
    partials = make_partials(q_THD, plan) if is_split else Partials(out_THD, out_THD)
    constants = tile_constants(q_THD, plan, rotation_DD)
    # What is looked up in a table is not fetched ahead: each stage would read the table again. Nor
    # is it in two loops: Triton 3.6 would fetch pages for one that has none. Where it turns queries
    # too (a codec that is rotated), it gets two loops wrong with one stage as well.
    is_looked_up = fmt.codec.tables is not None and step.max_query_len == 1
    has_whole = step.max_query_len > 1 and rotation_DD is None
    num_stages = 1 if is_looked_up or has_whole else room.num_stages(plan)
    grid = (num_tiles, num_kv_heads * plan.head_blocks, plan.grid_splits)
    launcher(_attend_kernel, grid, "attend", fmt.codec.name)(
        *tile_args(step, plan),
        q_THD,
        *q_THD.stride(),
        pages_PGB,
        pages_PGB.stride(0),
        pages_PGB.stride(1),
        table_SP,
        table_SP.stride(0),
        codec_tables(fmt.codec, pages_PGB),
        partials.lse_THZ if key_bias_GD is None else key_bias_GD,
        partials.lse_THZ if cos_sin_PD is None else cos_sin_PD,
        partials.out_THZD,
        partials.lse_THZ,
        scale * math.log2(math.e),
        DECODE=fmt.codec.device_decode,
        K_CODES=fmt.k_codes,
        K_SCALE=fmt.k_scale,
        K_ZERO=fmt.k_zero,
        V_CODES=fmt.v_codes,
        V_SCALE=fmt.v_scale,
        V_ZERO=fmt.v_zero,
        GROUP=num_heads // num_kv_heads,
        BLOCK_H=plan.block_heads,
        BLOCK_M=plan.block_rows,
        BY_SIGNS=q_THD.dtype == torch.bfloat16 and room.has_signs(plan),
        IS_SPLIT=is_split,
        HAS_WHOLE=has_whole,
        LOOP_STAGES=num_stages,
        HAS_BIAS=key_bias_GD is not None,
        BLOCK_F=max(16, constants["BLOCK_D"] // 2),
        BIAS_PRECISION="ieee" if q_THD.dtype == torch.float32 else "bf16x3",
        **constants,
        num_warps=plan.num_warps,
        num_stages=num_stages,
    )
    if is_split:
        merge(partials, out_THD, step, plan, constants)
    return out_THD


def attend_torch(
    q_THD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor | None = None,
    key_bias_GD: torch.Tensor | None = None,
    cos_sin_PD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `attend`, and the CPU backend; FP32 throughout, any orthogonal `rotation_DD`.

    Differentiable in q. Tokens of no tile come out as zeros.
    """
    check_attend(q_THD, pages_PGB, fmt, step)
    check_rotation(rotation_DD, fmt)
    check_key_bias(key_bias_GD, cos_sin_PD, pages_PGB, fmt.head_dim, step)
    num_tokens, num_heads, head_dim = q_THD.shape
    query_start, kv_lens = step.query_start_S1.tolist(), step.kv_len_S.tolist()
    rows = []
    for s, kv_len in enumerate(kv_lens):
        first, end = query_start[s], query_start[s + 1]
        if first == end or kv_len == 0:
            rows.append(q_THD.new_zeros(end - first, num_heads, head_dim))
            continue
        k_NGD, v_NGD = read_pages(pages_PGB, fmt, step.page_table_SP[s], kv_len)
        if key_bias_GD is not None and cos_sin_PD is not None:
            bias_NGD = turned_bias(key_bias_GD, cos_sin_PD, kv_len)
            k_NGD = k_NGD + (bias_NGD if rotation_DD is None else bias_NGD @ rotation_DD)
        for start in range(first, end, _TORCH_CHUNK):
            stop = min(start + _TORCH_CHUNK, end)
            q = q_THD[start:stop].float()
            q = q if rotation_DD is None else q @ rotation_DD
            out = _attend_dense(q, k_NGD, v_NGD, step.position_T[start:stop], scale)
            out = out if rotation_DD is None else out @ rotation_DD.T
            rows.append(out.to(q_THD.dtype))
    rows.append(q_THD.new_zeros(num_tokens - query_start[-1], num_heads, head_dim))
    return torch.cat(rows)


_TORCH_CHUNK = 128
"""Query tokens that `attend_torch` scores at once: bounds its memory to chunk x H x kv_len."""


def read_pages(
    pages_PGB: torch.Tensor, fmt: KVFormat, page_ids: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the first `num_tokens` rows of `page_ids` (integers, in order, extra ones ignored).

    Returns `(k_NGD, v_NGD)` float32 as stored: K with RoPE, both still rotated. Rows past
    `num_tokens` are dropped, so that garbage there cannot matter.
    """
    num_pages = -(-num_tokens // PAGE_SIZE)
    assert num_pages <= len(page_ids), (num_pages, len(page_ids))
    read_PGB = pages_PGB.index_select(0, page_ids[:num_pages])
    # Views in the order that attention wants: the codec reads the bytes once, where they lie.
    codes, scale, zero = (plane.permute(1, 2, 0, 3, 4) for plane in page_planes(read_PGB, fmt))
    x_2GPND = fmt.codec.decode(codes, scale, zero, fmt.head_dim)
    k_NGD, v_NGD = x_2GPND.flatten(2, 3)[:, :, :num_tokens].transpose(1, 2)
    return k_NGD, v_NGD


def _attend_dense(
    q_THD: torch.Tensor,
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    position_T: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    num_tokens, _, head_dim = q_THD.shape
    num_keys = min(int(position_T[-1]) + 1, k_NGD.shape[0])
    k_GDN, v_GND = k_NGD[:num_keys].permute(1, 2, 0), v_NGD[:num_keys].transpose(0, 1)
    num_kv_heads = k_GDN.shape[0]
    q_GMD = q_THD.view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1)
    score_GMN = (q_GMD.reshape(num_kv_heads, -1, head_dim) * scale) @ k_GDN
    score_GTMN = score_GMN.view(num_kv_heads, num_tokens, -1, num_keys)
    if num_tokens > 1:
        is_hidden_TN = torch.arange(num_keys, device=q_THD.device) > position_T[:, None]
        score_GTMN = score_GTMN.masked_fill(is_hidden_TN[:, None], -math.inf)
    out_GMD = score_GTMN.softmax(-1).view_as(score_GMN) @ v_GND
    return out_GMD.view(num_kv_heads, num_tokens, -1, head_dim).transpose(0, 1).reshape_as(q_THD)


def check_attend(
    q_THD: torch.Tensor, pages_PGB: torch.Tensor, fmt: KVFormat, step: StepTensors
) -> int:
    """Assert what every backend of `attend` takes; the number of KV heads."""
    num_kv_heads = pages_PGB.shape[1]
    check_pages(pages_PGB, num_kv_heads, fmt)
    assert q_THD.device == pages_PGB.device, (q_THD.device, pages_PGB.device)
    check_queries(q_THD, num_kv_heads, fmt.head_dim, step)
    return num_kv_heads


# Per query row m (token t, head h of the KV head's group) over the keys n that it sees:
#   s_mn = scale * log2(e) * (scale_n * sum_d q_md code_nd + zero_n * sum_d q_md)    scores, base 2
#   p_mn = 2 ** (s_mn - max_n s_mn)
#   out_m = (sum_n p_mn vscale_n vcode_n + sum_n p_mn vzero_n) / sum_n p_mn
# with the running maximum of FlashAttention (Dao et al. 2022, algorithm 1) from page to page. No
# decoded tile ever lies in memory: scales act on score columns and on P, and zero-points cost one
# sum a row. Rotated codecs: q R . k R = q . k and (sum p v R) R = sum p v, as R is symmetric and
# orthogonal, so q is turned once before the loop and the output once after the last sum. Where keys
# lack a bias b (key_bias.py), scores have scale * log2(e) * q_m . R_n b more.
#
#   page_table[s] -> page of 64 tokens x 1 KV head, planes apart, each from a 128-byte line:
#     | K codes 64 x row | K scale | K zero | V codes 64 x row | V scale | V zero |
#   q tile M x D:  rows 0..BLOCK_H-1 the heads of token 0, then those of token 1, ...
#   splits Z:      pages |0 1 2|3 4 5|6 7|  each a program; partial out and log2-sum-exp per split
#
# Bytes: every tile of a sequence reads kv_len * G * row.total bytes (decode: once in all), plus q
# and out; with Z splits, 8 * Z * T * H * (D + 1) bytes of partial results written and read.
# Tiling: one iteration is one page, so one page-table read per 64 keys, and planes are read whole
# and in order. All heads of a group, and up to 16 tokens, share a decoded page as rows of one dot:
# one decode per key, not one per head. Splits give a lone sequence enough programs for the GPU.
#
# Pages that all rows see whole have a loop without masks: for bf16 (SASS, 128 rows of 8 warps) 615
# instructions a page and warp instead of 942.
#
# Why NaN stays in its sequence: a tile reads pages of its own sequence alone; rows at or past
# num_keys decode to 0, and hidden scores and weights are replaced (tl.where), never multiplied.
@triton_jit
def _attend_kernel(
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
    pages_ptr: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    tables_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale_log2: tl.tensor,
    DECODE: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
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
    BY_SIGNS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BIAS_PRECISION: tl.constexpr,
) -> None:
    tl.static_assert(BLOCK_M >= 16 and BLOCK_M >= TILE_TOKENS * BLOCK_H and BLOCK_D >= HEAD_DIM)
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    tile, split = tl.program_id(0), tl.program_id(2)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
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

    token_M, head_M, mask_M = tile_rows(
        tl.program_id(1), tile_start, tile_end, GROUP, BLOCK_H, BLOCK_M
    )
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
        BY_SIGNS,
    )
    d = tl.arange(0, BLOCK_D)
    mask_MD = mask_M[:, None] & (d < HEAD_DIM)[None, :]
    q_sum_M = tl.sum(q_MD.to(tl.float32), axis=1)
    cos_MF, sin_MF = q_sum_M, q_sum_M
    if HAS_BIAS:
        cos_MF, sin_MF = bias_factors(
            q_ptr,
            q_stride_t,
            q_stride_h,
            q_stride_d,
            token_M,
            head_M,
            mask_M,
            bias_ptr + kv_head * HEAD_DIM,
            HEAD_DIM // 2,
            BLOCK_F,
        )

    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    zero_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = page_table_ptr + seq.to(tl.int64) * page_table_stride
    last_page = tl.minimum(first_page + pages_per_split, num_pages)
    whole_page = first_page
    if HAS_WHOLE:
        # Pages that every row of the tile sees whole come first, and need no mask.
        least_keys = tl.minimum(tl.load(position_ptr + tile_start).to(tl.int32) + 1, num_keys)
        whole_page = tl.maximum(first_page, tl.minimum(least_keys // PAGE, last_page))
    for is_rest in tl.static_range(0 if HAS_WHOLE else 1, 2):
        for index in tl.range(
            whole_page if is_rest else first_page,
            last_page if is_rest else whole_page,
            num_stages=LOOP_STAGES,
        ):
            max_M, sum_M, zero_M, acc_MD = _attend_page(
                q_MD,
                q_sum_M,
                cos_MF,
                sin_MF,
                position_M,
                num_keys,
                index,
                pages_ptr + kv_head.to(tl.int64) * head_stride,
                page_stride,
                table_ptr,
                tables_ptr,
                cos_sin_ptr,
                scale_log2,
                max_M,
                sum_M,
                zero_M,
                acc_MD,
                DECODE,
                K_CODES,
                K_SCALE,
                K_ZERO,
                V_CODES,
                V_SCALE,
                V_ZERO,
                HEAD_DIM,
                PAGE,
                is_rest == 0,
                HAS_BIAS,
                BIAS_PRECISION,
            )

    # A row that saw nothing becomes 0; NaN is not 0, so a poisoned sequence stays NaN.
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    out_MD = (acc_MD + zero_M[:, None]) / sum_M[:, None]
    out_row_M = token_M.to(tl.int64) * NUM_HEADS + head_M
    if IS_SPLIT:
        out_row_M = out_row_M * num_splits + split
        tl.store(lse_ptr + out_row_M, max_M + tl.log2(sum_M), mask=mask_M)
    else:
        out_MD = turn_results(out_MD, STAGES, BY_SIGNS)
    out = out_ptr + out_row_M[:, None] * HEAD_DIM + d[None, :]
    tl.store(out, out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


@triton_jit
def _attend_page(
    q_MD: tl.tensor,
    q_sum_M: tl.tensor,
    cos_MF: tl.tensor,
    sin_MF: tl.tensor,
    position_M: tl.tensor,
    num_keys: tl.tensor,
    index: tl.tensor,
    head_ptr: tl.tensor,
    page_stride: tl.tensor,
    table_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    scale_log2: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    zero_M: tl.tensor,
    acc_MD: tl.tensor,
    DECODE: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_PRECISION: tl.constexpr,
) -> Any:
    """Maximum, sums and output with page `index` added; all rows see all of it if IS_WHOLE."""
    BLOCK_M: tl.constexpr = acc_MD.shape[0]
    BLOCK_D: tl.constexpr = acc_MD.shape[1]
    dtype = q_MD.dtype
    row_N = tl.arange(0, PAGE)
    page = head_ptr + tl.load(table_ptr + index).to(tl.int64) * page_stride
    key_N = index * PAGE + row_N
    if IS_WHOLE:
        mask_N = tl.full([PAGE], True, tl.int1)
        is_seen_MN = tl.full([BLOCK_M, PAGE], True, tl.int1)
    else:
        mask_N = key_N < num_keys
        is_seen_MN = (key_N[None, :] <= position_M[:, None]) & mask_N[None, :]
    k_ND, k_scale_N, k_zero_N = DECODE(
        page, row_N, mask_N, tables_ptr, K_CODES, K_SCALE, K_ZERO, HEAD_DIM, BLOCK_D
    )
    score_MN = tl.dot(q_MD, tl.trans(k_ND.to(dtype)), input_precision="ieee")
    score_MN = score_MN * k_scale_N[None, :] + q_sum_M[:, None] * k_zero_N[None, :]
    if HAS_BIAS:
        score_MN += bias_scores(
            cos_MF, sin_MF, cos_sin_ptr, key_N, mask_N, HEAD_DIM // 2, BIAS_PRECISION
        )
    score_MN = tl.where(is_seen_MN, score_MN * scale_log2, float("-inf"))
    p_MN, decay_M, _, next_max_M = softmax_step(score_MN, is_seen_MN, max_M)
    v_ND, v_scale_N, v_zero_N = DECODE(
        page, row_N, mask_N, tables_ptr, V_CODES, V_SCALE, V_ZERO, HEAD_DIM, BLOCK_D
    )
    # Scaled in FP32 and rounded once, to the dtype of the dot.
    scaled_MN = (p_MN * v_scale_N[None, :]).to(dtype)
    acc_MD = acc_MD * decay_M[:, None]
    acc_MD = tl.dot(scaled_MN, v_ND.to(dtype), acc_MD, input_precision="ieee")
    zero_M = zero_M * decay_M + tl.sum(p_MN * v_zero_N[None, :], axis=1)
    sum_M = sum_M * decay_M + tl.sum(p_MN, axis=1)
    return next_max_M, sum_M, zero_M, acc_MD
