"""What `attend_mixed` reads of a page, in quarters: tiles that dot products take as they come.

A byte of a plane has one channel of each quarter of a row, so that the bytes of 64 rows, read once
in whole lines, give four tiles [N, J] by shifts alone: channel p D/4 + j in tile p, column j.
Columns past D/4 hold anything finite; where queries are 0 there, they do not count.

Letters: N rows (64), J columns of a tile, at least D/4.
"""

from __future__ import annotations

from typing import Any

from subten.codecs.bits import load_bf16
from subten.codecs.nested import nested_level
from subten.codecs.shaped import shaped_level
from subten.kernels.triton_shim import tl, triton_jit


@triton_jit
def load_codes(plane: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_J: tl.constexpr) -> Any:
    """Bytes of 64 rows of D/4, int32 [64, J]."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    row_N, j = tl.arange(0, 64), tl.arange(0, BLOCK_J)
    byte_NJ = plane + row_N[:, None] * QUARTER + j[None, :]
    if BLOCK_J == QUARTER:
        code_NJ = tl.load(byte_NJ)
    else:
        code_NJ = tl.load(byte_NJ, mask=(row_N >= 0)[:, None] & (j < QUARTER)[None, :], other=0)
    return code_NJ.to(tl.int32)


@triton_jit
def load_fine(
    plane: tl.tensor, has_fine: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_J: tl.constexpr
) -> Any:
    """As `load_codes` where there is such a plane, else 0: a mask, not a branch."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    row_N, j = tl.arange(0, 64), tl.arange(0, BLOCK_J)
    byte_NJ = plane + row_N[:, None] * QUARTER + j[None, :]
    mask_NJ = (row_N >= 0)[:, None] & (j < tl.where(has_fine, QUARTER, 0))[None, :]
    return tl.load(byte_NJ, mask=mask_NJ, other=0).to(tl.int32)


@triton_jit
def load_high(
    plane: tl.tensor, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_J: tl.constexpr
) -> Any:
    """Bytes with the high bits of 64 rows of keys, int32 [64, J], as `key_tile` shifts them."""
    if BITS == 4:
        high_NJ = load_codes(plane, HEAD_DIM, BLOCK_J)
    else:
        tl.static_assert(BITS == 3)
        EIGHTH: tl.constexpr = HEAD_DIM // 8
        row_N, j = tl.arange(0, 64), tl.arange(0, BLOCK_J)
        byte_NJ = tl.load(plane + row_N[:, None] * EIGHTH + (j % EIGHTH)[None, :])
        # Both halves of a quarter lie in neighbouring bits: that of this column first.
        high_NJ = byte_NJ.to(tl.int32) >> ((j // EIGHTH) & 1)[None, :]
    return high_NJ


@triton_jit
def key_tile(
    low_NJ: tl.tensor,
    high_NJ: tl.tensor,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Any:
    """Levels of one quarter of the channels, whole numbers of units, as DTYPE."""
    code_NJ = (low_NJ >> (2 * PART)) & 3
    if BITS == 3:
        code_NJ |= ((high_NJ >> (2 * PART)) & 1) << 2
    if BITS == 4:
        code_NJ |= ((high_NJ >> (2 * PART)) & 3) << 2
    return shaped_level(code_NJ, BITS).to(DTYPE)


@triton_jit
def value_tile(
    base_NJ: tl.tensor,
    fine_NJ: tl.tensor,
    has_fine: tl.tensor,
    PART: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Any:
    """Levels of one quarter of the channels, at 4 bits or at 2, as DTYPE."""
    base_NJ = (base_NJ >> (2 * PART)) & 3
    return nested_level(base_NJ, (fine_NJ >> (2 * PART)) & 3, has_fine).to(DTYPE)


@triton_jit
def cold_tile(
    plane: tl.tensor,
    tables: tl.tensor,
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Any:
    """Sums of codewords for one quarter of the channels of 64 rows, as DTYPE."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    SIXTEENTH: tl.constexpr = HEAD_DIM // 16
    row_N, j = tl.arange(0, 64), tl.arange(0, BLOCK_J)
    channel_J = tl.minimum(PART * QUARTER + j, HEAD_DIM - 1)
    vector_J, element_J = channel_J // 8, channel_J % 8
    row_ptr_N = plane + row_N * (3 * SIXTEENTH)
    first_NJ = tl.load(row_ptr_N[:, None] + vector_J[None, :]).to(tl.int32)
    pair_NJ = row_ptr_N[:, None] + (2 * SIXTEENTH + vector_J % SIXTEENTH)[None, :]
    second_NJ = tl.load(pair_NJ).to(tl.int32)
    second_NJ = (second_NJ >> (4 * (vector_J // SIXTEENTH))[None, :]) & 15
    level_NJ = tl.load(tables + first_NJ * 8 + element_J[None, :]).to(tl.float32)
    level_NJ += tl.load(tables + (256 + second_NJ) * 8 + element_J[None, :]).to(tl.float32)
    return level_NJ.to(DTYPE)


@triton_jit
def exact_tile(
    recent_N: tl.tensor,
    is_recent_N: tl.tensor,
    sink_N: tl.tensor,
    is_sink_N: tl.tensor,
    PART: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Any:
    """BF16 rows at these pointers, one quarter of the channels; 0 where masked."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    j = tl.arange(0, BLOCK_J)
    index_1J, mask_1J = (PART * QUARTER + j)[None, :], (j < QUARTER)[None, :]
    is_recent_N = is_recent_N & (is_sink_N == 0)
    exact_NJ = load_bf16(recent_N[:, None], index_1J, is_recent_N[:, None] & mask_1J)
    if NUM_SINKS > 0:
        sink_NJ = load_bf16(sink_N[:, None], index_1J, is_sink_N[:, None] & mask_1J)
        exact_NJ = tl.where(is_sink_N[:, None], sink_NJ, exact_NJ)
    return exact_NJ.to(DTYPE)
