"""The kernel of `attend_mixed` (attend_mixed.py).

Letters: M rows of a tile (query tokens x heads of one KV head), N keys of a page, J columns of a
quarter of a row, O outlier channels, C columns of the score's table, D head_dim.
"""

from __future__ import annotations

from subten.kernels.attend_mixed_page import attend_page, without
from subten.kernels.attend_tiles import split_pages, tile_rows, tile_span
from subten.kernels.kv_append import rotate_rows
from subten.kernels.triton_shim import tl, triton_jit


# `attend`'s loop (attend.py), in two: first the pages of which no row is read exactly, all of whose
# keys every query of the tile sees, without a mask or a branch (but for cold pages, if there are
# any); then page 0, if there are sinks, and the newest pages, where a pair of query and key reads
# the plane or the exact row:
#
#   s_mn = exact_mn ? q_m . e_n : norm_n q_m . level_n
#   out += sum_n (exact_mn ? 0 : p_mn norm_n) level_n + (exact_mn ? p_mn : 0) e_n
#
#   page_table[s] -> page id -> keys at k + id
#                            -> place (base, fine, cold) -> values at base and fine, or at cold
#
# Rows come in quarters (mixed_tiles.py). Planes hold no NaN and no infinity, whatever their bytes
# are, so that rows past the end of a sequence need no mask of their own: their weight is 0. The
# share of a page, for its mass, is log2 of the sum of its weights in each row.
#
# Bytes of a page and KV head: 8 w D + 64 of K at w bits, 16 D + 64 of V and 16 D more with a fine
# plane, or 12 D + 64 cold; 4 D a row that is read exactly; with mass 4 a row and page; with a table
# 256 C a page, the same for all heads. Not yet measured on a GPU.
@triton_jit
def attend_mixed_kernel(
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
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    place_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_stride: tl.tensor,
    k_stride_g: tl.tensor,
    base_ptr: tl.tensor,
    base_stride: tl.tensor,
    base_stride_g: tl.tensor,
    fine_ptr: tl.tensor,
    fine_stride: tl.tensor,
    fine_stride_g: tl.tensor,
    cold_ptr: tl.tensor,
    cold_stride: tl.tensor,
    cold_stride_g: tl.tensor,
    recent_ptr: tl.tensor,
    recent_stride: tl.tensor,
    recent_stride_g: tl.tensor,
    sink_ptr: tl.tensor,
    sink_stride: tl.tensor,
    sink_stride_g: tl.tensor,
    k_out_ptr: tl.tensor,
    k_out_stride: tl.tensor,
    k_out_stride_g: tl.tensor,
    sink_of_ptr: tl.tensor,
    outlier_ptr: tl.tensor,
    window: tl.tensor,
    recent_base_ptr: tl.tensor,
    recent_cap_ptr: tl.tensor,
    recent_from_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    coef_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    share_ptr: tl.tensor,
    share_pages: tl.tensor,
    scale_log2: tl.tensor,
    BITS: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_OUTLIERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HAS_COLD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TABLE_PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_MASS: tl.constexpr,
) -> None:
    tl.static_assert(BLOCK_M >= 16 and BLOCK_M >= TILE_TOKENS * BLOCK_H and PAGE == 64)
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    QUARTER: tl.constexpr = HEAD_DIM // 4
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
    last_page = tl.minimum(first_page + pages_per_split, num_pages)

    token_M, head_M, mask_M = tile_rows(block, tile_start, tile_end, GROUP, BLOCK_H, BLOCK_M)
    position_M = tl.load(position_ptr + token_M, mask=mask_M, other=-1).to(tl.int32)
    j = tl.arange(0, BLOCK_J)
    q_M = q_ptr + token_M.to(tl.int64) * q_stride_t + head_M * q_stride_h
    q_MJ = q_M[:, None] + j[None, :] * q_stride_d
    mask_MJ = mask_M[:, None] & (j < QUARTER)[None, :]
    q_part = QUARTER * q_stride_d
    q0 = tl.load(q_MJ, mask=mask_MJ, other=0.0)
    q1 = tl.load(q_MJ + q_part, mask=mask_MJ, other=0.0)
    q2 = tl.load(q_MJ + 2 * q_part, mask=mask_MJ, other=0.0)
    q3 = tl.load(q_MJ + 3 * q_part, mask=mask_MJ, other=0.0)

    kv_head = (block // HEAD_BLOCKS).to(tl.int64)
    page_table_ptr += seq.to(tl.int64) * page_table_stride
    k_ptr += kv_head * k_stride_g
    base_ptr += kv_head * base_stride_g
    fine_ptr += kv_head * fine_stride_g
    cold_ptr += kv_head * cold_stride_g
    recent_ptr += kv_head * recent_stride_g
    sink_ptr += kv_head * sink_stride_g
    k_out_ptr += kv_head * k_out_stride_g
    recent_base = tl.load(recent_base_ptr + seq).to(tl.int64)
    recent_cap = tl.maximum(tl.load(recent_cap_ptr + seq), 1)
    recent_from = tl.load(recent_from_ptr + seq)
    # The tile's first query reads farthest back.
    first_near = tl.load(position_ptr + tile_start).to(tl.int32) - window + 1
    c = tl.arange(0, BLOCK_C)
    coef_MC = coef_ptr + (token_M.to(tl.int64) * NUM_HEADS + head_M)[:, None] * WIDTH + c[None, :]
    coef_mask_MC = mask_M[:, None] & (c < WIDTH)[None, :]
    share_ptr += (tile.to(tl.int64) * tl.num_programs(1) + block) * share_pages * BLOCK_M

    # Of keys: parts of queries without outlier channels, which have a product of their own.
    k0, k1, k2, k3, q_MO = q0, q1, q2, q3, q0
    if NUM_OUTLIERS > 0:
        outlier_ptr += kv_head * NUM_OUTLIERS
        k0 = without(q0, outlier_ptr, 0, NUM_OUTLIERS, QUARTER)
        k1 = without(q1, outlier_ptr, 1, NUM_OUTLIERS, QUARTER)
        k2 = without(q2, outlier_ptr, 2, NUM_OUTLIERS, QUARTER)
        k3 = without(q3, outlier_ptr, 3, NUM_OUTLIERS, QUARTER)
        o = tl.arange(0, BLOCK_O)
        channel_O = tl.load(outlier_ptr + o, mask=o < NUM_OUTLIERS, other=0)
        mask_MO = mask_M[:, None] & (o < NUM_OUTLIERS)[None, :]
        q_MO = tl.load(q_M[:, None] + channel_O[None, :] * q_stride_d, mask=mask_MO, other=0.0)

    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    a0 = tl.zeros([BLOCK_M, BLOCK_J], tl.float32)
    a1, a2, a3 = a0, a0, a0
    FIRST_PLAIN: tl.constexpr = 1 if NUM_SINKS > 0 else 0
    near_page = tl.minimum(tl.maximum(first_near, 0), num_keys) // PAGE
    for index in range(tl.maximum(first_page, FIRST_PLAIN), tl.minimum(last_page, near_page)):
        max_M, sum_M, a0, a1, a2, a3 = attend_page(
            index,
            max_M,
            sum_M,
            a0,
            a1,
            a2,
            a3,
            q0,
            q1,
            q2,
            q3,
            k0,
            k1,
            k2,
            k3,
            q_MO,
            position_M,
            num_keys,
            page_table_ptr,
            place_ptr,
            k_ptr,
            k_stride,
            base_ptr,
            base_stride,
            fine_ptr,
            fine_stride,
            cold_ptr,
            cold_stride,
            recent_ptr,
            recent_stride,
            recent_base,
            recent_cap,
            recent_from,
            first_near,
            window,
            sink_ptr,
            sink_stride,
            sink_of_ptr,
            k_out_ptr,
            k_out_stride,
            tables_ptr,
            coef_MC,
            coef_mask_MC,
            table_ptr,
            share_ptr,
            scale_log2,
            BITS,
            NUM_SINKS,
            NUM_OUTLIERS,
            BLOCK_O,
            HAS_COLD,
            WIDTH,
            BLOCK_C,
            TABLE_PRECISION,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_J,
            PAGE,
            HAS_MASS,
            False,
        )
    has_first = (FIRST_PLAIN == 1) & (first_page == 0) & (near_page > 0)
    num_first = has_first.to(tl.int32)
    near_page = tl.maximum(near_page, first_page)
    for step in range(num_first + tl.maximum(last_page - near_page, 0)):
        index = tl.where(step < num_first, 0, near_page + step - num_first)
        max_M, sum_M, a0, a1, a2, a3 = attend_page(
            index,
            max_M,
            sum_M,
            a0,
            a1,
            a2,
            a3,
            q0,
            q1,
            q2,
            q3,
            k0,
            k1,
            k2,
            k3,
            q_MO,
            position_M,
            num_keys,
            page_table_ptr,
            place_ptr,
            k_ptr,
            k_stride,
            base_ptr,
            base_stride,
            fine_ptr,
            fine_stride,
            cold_ptr,
            cold_stride,
            recent_ptr,
            recent_stride,
            recent_base,
            recent_cap,
            recent_from,
            first_near,
            window,
            sink_ptr,
            sink_stride,
            sink_of_ptr,
            k_out_ptr,
            k_out_stride,
            tables_ptr,
            coef_MC,
            coef_mask_MC,
            table_ptr,
            share_ptr,
            scale_log2,
            BITS,
            NUM_SINKS,
            NUM_OUTLIERS,
            BLOCK_O,
            HAS_COLD,
            WIDTH,
            BLOCK_C,
            TABLE_PRECISION,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_J,
            PAGE,
            HAS_MASS,
            True,
        )

    # A row that saw nothing becomes 0; NaN is not 0, so a poisoned sequence stays NaN.
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    out_row_M = token_M.to(tl.int64) * NUM_HEADS + head_M
    if IS_SPLIT or HAS_MASS:
        lse_M = max_M + tl.log2(sum_M)
        tl.store(lse_ptr + out_row_M * num_splits + split, lse_M, mask=mask_M)
    inverse_M1 = (1.0 / sum_M)[:, None]
    a0, a1, a2, a3 = a0 * inverse_M1, a1 * inverse_M1, a2 * inverse_M1, a3 * inverse_M1
    if IS_SPLIT:
        out_row_M = out_row_M * num_splits + split
        out = out_ptr + out_row_M[:, None] * HEAD_DIM + j[None, :]
        tl.store(out, a0, mask=mask_MJ)
        tl.store(out + QUARTER, a1, mask=mask_MJ)
        tl.store(out + 2 * QUARTER, a2, mask=mask_MJ)
        tl.store(out + 3 * QUARTER, a3, mask=mask_MJ)
    else:
        tl.static_assert(BLOCK_J == QUARTER)
        # [M, J, 2, 2] to [M, 4 J], quarters in order.
        a_MJ22 = tl.join(tl.join(a0, a1), tl.join(a2, a3))
        a_M4J = tl.reshape(tl.permute(a_MJ22, (0, 3, 2, 1)), (BLOCK_M, BLOCK_D))
        d = tl.arange(0, BLOCK_D)
        out_MD = rotate_rows(a_M4J, STAGES).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row_M[:, None] * HEAD_DIM + d[None, :], out_MD, mask=mask_M[:, None])
