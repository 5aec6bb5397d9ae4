"""One page of `attend_mixed`'s kernel (attend_mixed_device.py), as its loops read it.

Letters as there.
"""

from __future__ import annotations

from typing import Any

from subten.codecs.bits import load_bf16
from subten.codecs.norm_byte import decode_norm_device
from subten.codecs.shaped import level_unit
from subten.kernels.attend_tiles import softmax_step
from subten.kernels.mixed_tiles import (
    cold_tile,
    exact_tile,
    key_tile,
    load_codes,
    load_fine,
    load_high,
    value_tile,
)
from subten.kernels.triton_shim import tl, triton_jit


@triton_jit
def without(
    q_MJ: tl.tensor,
    outlier_ptr: tl.tensor,
    PART: tl.constexpr,
    NUM_OUTLIERS: tl.constexpr,
    QUARTER: tl.constexpr,
) -> Any:
    """One quarter of the channels of queries, 0 in those that are outliers of keys."""
    channel_J = PART * QUARTER + tl.arange(0, q_MJ.shape[1])
    for which in tl.static_range(NUM_OUTLIERS):
        is_out_J = channel_J == tl.load(outlier_ptr + which)
        q_MJ = tl.where(is_out_J[None, :], 0.0, q_MJ).to(q_MJ.dtype)
    return q_MJ


@triton_jit
def attend_page(
    index: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    q0: tl.tensor,
    q1: tl.tensor,
    q2: tl.tensor,
    q3: tl.tensor,
    k0: tl.tensor,
    k1: tl.tensor,
    k2: tl.tensor,
    k3: tl.tensor,
    q_MO: tl.tensor,
    position_M: tl.tensor,
    num_keys: tl.tensor,
    page_table_ptr: tl.tensor,
    place_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_stride: tl.tensor,
    base_ptr: tl.tensor,
    base_stride: tl.tensor,
    fine_ptr: tl.tensor,
    fine_stride: tl.tensor,
    cold_ptr: tl.tensor,
    cold_stride: tl.tensor,
    recent_ptr: tl.tensor,
    recent_stride: tl.tensor,
    recent_base: tl.tensor,
    recent_cap: tl.tensor,
    recent_from: tl.tensor,
    first_near: tl.tensor,
    window: tl.tensor,
    sink_ptr: tl.tensor,
    sink_stride: tl.tensor,
    sink_of_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    k_out_stride: tl.tensor,
    tables_ptr: tl.tensor,
    coef_MC: tl.tensor,
    coef_mask_MC: tl.tensor,
    table_ptr: tl.tensor,
    share_ptr: tl.tensor,
    scale_log2: tl.tensor,
    BITS: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_OUTLIERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HAS_COLD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TABLE_PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_MASS: tl.constexpr,
    EXACT: tl.constexpr,
) -> Any:
    """The running softmax and output after one more page; EXACT reads exact rows where it may."""
    dtype = q0.dtype
    LOW_BYTES: tl.constexpr = PAGE * (HEAD_DIM // 4)
    row_N = tl.arange(0, PAGE)
    key_N = index * PAGE + row_N
    page = tl.load(page_table_ptr + index).to(tl.int64)
    base_id = tl.load(place_ptr + page * 3).to(tl.int64)
    fine_id = tl.load(place_ptr + page * 3 + 1).to(tl.int64)
    has_fine = fine_id >= 0
    k_plane = k_ptr + page * k_stride
    low_NJ = load_codes(k_plane, HEAD_DIM, BLOCK_J)
    high_NJ = low_NJ
    if BITS > 2:
        high_NJ = load_high(k_plane + LOW_BYTES, BITS, HEAD_DIM, BLOCK_J)
    k_norm_N = tl.load(k_plane + PAGE * (HEAD_DIM * BITS // 8) + row_N).to(tl.int32)
    k_norm_N = decode_norm_device(k_norm_N, 128) * level_unit(BITS)
    score_MN = tl.dot(
        k0, tl.trans(key_tile(low_NJ, high_NJ, 0, BITS, dtype)), input_precision="ieee"
    )
    score_MN = tl.dot(
        k1, tl.trans(key_tile(low_NJ, high_NJ, 1, BITS, dtype)), score_MN, input_precision="ieee"
    )
    score_MN = tl.dot(
        k2, tl.trans(key_tile(low_NJ, high_NJ, 2, BITS, dtype)), score_MN, input_precision="ieee"
    )
    score_MN = tl.dot(
        k3, tl.trans(key_tile(low_NJ, high_NJ, 3, BITS, dtype)), score_MN, input_precision="ieee"
    )
    score_MN = score_MN * k_norm_N[None, :]
    if NUM_OUTLIERS > 0:
        o = tl.arange(0, BLOCK_O)
        out_mask_NO = (row_N >= 0)[:, None] & (o < NUM_OUTLIERS)[None, :]
        out_index_NO = row_N[:, None] * NUM_OUTLIERS + o[None, :]
        k_out = k_out_ptr + page * k_out_stride
        k_NO = load_bf16(k_out, out_index_NO, out_mask_NO).to(dtype)
        score_MN = tl.dot(q_MO, tl.trans(k_NO), score_MN, input_precision="ieee")

    is_sink_N = row_N < 0
    is_exact_MN = (position_M < -1)[:, None] & is_sink_N[None, :]
    recent_N, sink_N, is_recent_N = recent_ptr + row_N, sink_ptr + row_N, is_sink_N
    if EXACT:
        is_recent_N = (key_N >= first_near) & (key_N >= recent_from)
        is_recent_N = is_recent_N & (key_N < tl.where(window > 0, num_keys, 0))
        recent_N = recent_ptr + (recent_base + key_N % recent_cap) * recent_stride
        if NUM_SINKS > 0:
            is_first = index == 0
            sink_id = tl.load(sink_of_ptr + page, mask=is_first, other=-1).to(tl.int64)
            is_sink_N = (row_N < tl.where(sink_id >= 0, NUM_SINKS, 0)) & (key_N < num_keys)
            sink_N = sink_ptr + tl.maximum(sink_id, 0) * sink_stride + row_N * (2 * HEAD_DIM)
        is_near_MN = position_M[:, None] - key_N[None, :] < window
        is_exact_MN = (is_near_MN & is_recent_N[None, :]) | is_sink_N[None, :]
        e_NJ = exact_tile(
            recent_N, is_recent_N, sink_N, is_sink_N, 0, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        exact_MN = tl.dot(q0, tl.trans(e_NJ), input_precision="ieee")
        e_NJ = exact_tile(
            recent_N, is_recent_N, sink_N, is_sink_N, 1, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        exact_MN = tl.dot(q1, tl.trans(e_NJ), exact_MN, input_precision="ieee")
        e_NJ = exact_tile(
            recent_N, is_recent_N, sink_N, is_sink_N, 2, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        exact_MN = tl.dot(q2, tl.trans(e_NJ), exact_MN, input_precision="ieee")
        e_NJ = exact_tile(
            recent_N, is_recent_N, sink_N, is_sink_N, 3, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        exact_MN = tl.dot(q3, tl.trans(e_NJ), exact_MN, input_precision="ieee")
        score_MN = tl.where(is_exact_MN, exact_MN, score_MN)
    if WIDTH > 0:
        c = tl.arange(0, BLOCK_C)
        coef = tl.load(coef_MC, mask=coef_mask_MC, other=0.0)
        table_NC = table_ptr + key_N[:, None] * WIDTH + c[None, :]
        table_mask_NC = (key_N < num_keys)[:, None] & (c < WIDTH)[None, :]
        table_CN = tl.trans(tl.load(table_NC, mask=table_mask_NC, other=0.0))
        score_MN += tl.dot(coef, table_CN, input_precision=TABLE_PRECISION)
    score_MN = score_MN * scale_log2
    if EXACT:
        is_seen_MN = (key_N[None, :] <= position_M[:, None]) & (key_N < num_keys)[None, :]
        score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
        p_MN, decay_M, shift_M, max_M = softmax_step(score_MN, is_seen_MN, max_M)
    else:
        shift_M = tl.maximum(max_M, tl.max(score_MN, axis=1))
        p_MN = tl.exp2(score_MN - shift_M[:, None])
        decay_M = tl.exp2(max_M - shift_M)
        max_M = shift_M
    weight_M = tl.sum(p_MN, axis=1)
    if HAS_MASS:
        # The logarithm of no weight at all, without taking it.
        share_M = shift_M + tl.log2(tl.where(weight_M == 0.0, 1.0, weight_M))
        share_M = tl.where(weight_M == 0.0, float("-inf"), share_M)
        tl.store(share_ptr + index * BLOCK_M + tl.arange(0, BLOCK_M), share_M)

    decay_M1 = decay_M[:, None]
    a0, a1, a2, a3 = a0 * decay_M1, a1 * decay_M1, a2 * decay_M1, a3 * decay_M1
    if EXACT:
        near_MN = tl.where(is_exact_MN, p_MN, 0.0).to(dtype)
        p_MN = tl.where(is_exact_MN, 0.0, p_MN)
        v_recent_N = recent_N + HEAD_DIM
        v_sink_N = sink_N + NUM_SINKS * 2 * HEAD_DIM
        e_NJ = exact_tile(
            v_recent_N, is_recent_N, v_sink_N, is_sink_N, 0, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        a0 = tl.dot(near_MN, e_NJ, a0, input_precision="ieee")
        e_NJ = exact_tile(
            v_recent_N, is_recent_N, v_sink_N, is_sink_N, 1, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        a1 = tl.dot(near_MN, e_NJ, a1, input_precision="ieee")
        e_NJ = exact_tile(
            v_recent_N, is_recent_N, v_sink_N, is_sink_N, 2, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        a2 = tl.dot(near_MN, e_NJ, a2, input_precision="ieee")
        e_NJ = exact_tile(
            v_recent_N, is_recent_N, v_sink_N, is_sink_N, 3, NUM_SINKS, HEAD_DIM, BLOCK_J, dtype
        )
        a3 = tl.dot(near_MN, e_NJ, a3, input_precision="ieee")
    base = base_ptr + base_id * base_stride
    fine = fine_ptr + tl.maximum(fine_id, 0) * fine_stride
    if HAS_COLD:
        cold_id = tl.load(place_ptr + page * 3 + 2).to(tl.int64)
        if cold_id >= 0:
            cold = cold_ptr + cold_id * cold_stride
            a0, a1, a2, a3 = _add_cold(
                p_MN, cold, tables_ptr, a0, a1, a2, a3, HEAD_DIM, BLOCK_J, PAGE, dtype
            )
        else:
            a0, a1, a2, a3 = _add_base(
                p_MN, base, fine, has_fine, a0, a1, a2, a3, HEAD_DIM, BLOCK_J, PAGE, dtype
            )
    else:
        a0, a1, a2, a3 = _add_base(
            p_MN, base, fine, has_fine, a0, a1, a2, a3, HEAD_DIM, BLOCK_J, PAGE, dtype
        )
    return max_M, sum_M * decay_M + weight_M, a0, a1, a2, a3


@triton_jit
def _add_base(
    p_MN: tl.tensor,
    base: tl.tensor,
    fine: tl.tensor,
    has_fine: tl.tensor,
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PAGE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Any:
    """The output with the values of one page more, at 4 bits or at 2."""
    base_NJ = load_codes(base, HEAD_DIM, BLOCK_J)
    fine_NJ = load_fine(fine, has_fine, HEAD_DIM, BLOCK_J)
    norm_N = tl.load(base + PAGE * (HEAD_DIM // 4) + tl.arange(0, PAGE)).to(tl.int32)
    # Scaled in FP32 and rounded once, to the dtype of the dot.
    scaled_MN = (p_MN * decode_norm_device(norm_N, 208)[None, :]).to(DTYPE)
    v_NJ = value_tile(base_NJ, fine_NJ, has_fine, 0, DTYPE)
    a0 = tl.dot(scaled_MN, v_NJ, a0, input_precision="ieee")
    v_NJ = value_tile(base_NJ, fine_NJ, has_fine, 1, DTYPE)
    a1 = tl.dot(scaled_MN, v_NJ, a1, input_precision="ieee")
    v_NJ = value_tile(base_NJ, fine_NJ, has_fine, 2, DTYPE)
    a2 = tl.dot(scaled_MN, v_NJ, a2, input_precision="ieee")
    v_NJ = value_tile(base_NJ, fine_NJ, has_fine, 3, DTYPE)
    a3 = tl.dot(scaled_MN, v_NJ, a3, input_precision="ieee")
    return a0, a1, a2, a3


@triton_jit
def _add_cold(
    p_MN: tl.tensor,
    cold: tl.tensor,
    tables_ptr: tl.tensor,
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PAGE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Any:
    """The same of a cold page."""
    norm_N = tl.load(cold + PAGE * (HEAD_DIM * 3 // 16) + tl.arange(0, PAGE)).to(tl.int32)
    scaled_MN = (p_MN * decode_norm_device(norm_N, 240)[None, :]).to(DTYPE)
    v_NJ = cold_tile(cold, tables_ptr, 0, HEAD_DIM, BLOCK_J, DTYPE)
    a0 = tl.dot(scaled_MN, v_NJ, a0, input_precision="ieee")
    v_NJ = cold_tile(cold, tables_ptr, 1, HEAD_DIM, BLOCK_J, DTYPE)
    a1 = tl.dot(scaled_MN, v_NJ, a1, input_precision="ieee")
    v_NJ = cold_tile(cold, tables_ptr, 2, HEAD_DIM, BLOCK_J, DTYPE)
    a2 = tl.dot(scaled_MN, v_NJ, a2, input_precision="ieee")
    v_NJ = cold_tile(cold, tables_ptr, 3, HEAD_DIM, BLOCK_J, DTYPE)
    a3 = tl.dot(scaled_MN, v_NJ, a3, input_precision="ieee")
    return a0, a1, a2, a3
