"""Lloyd-Max codes of 2 bits, and the 2 more bits that refine them (Max, 1960).

    2 bits: magnitude 3 or 10, and a sign;     x ~ norm * level
    4 bits: each of the two cells of a sign cut in four at its own best levels.

3 : 10 is the optimal pair of a Gaussian, to 1e-6 of the error (.11748), and codes are the nearest
levels under the least-squares norm s = <|x|, level> / |level|^2. Read with s, every row comes out
shorter by its relative error, scores with it, for all tokens alike. The norm that is stored is the
unbiased one,

    norm = |x|^2 / <|x|, level>,     so that <x, norm * level> = |x|^2,

0.171 deviations of a Gaussian where s is 0.151; but 2 s at most, past which the error would exceed
that of a row of zeros: a row so unlike a Gaussian keeps some bias. Fine levels are the means of
their cells, again longer by their error (.0098), so that the same norm serves both readings; in
sixteenths of it, at thresholds that leave 0.3 % of bias. Levels are exact in FP16 and BF16, so that
a dot product of codes loses nothing.

A 2-bit code is `is_outer + 2 * is_negative`; a fine code counts the levels of its cell from zero
on. Both are packed alike: byte i of a row holds channels i, i + D/4, i + 2D/4 and i + 3D/4, from
the lowest bits up.

Sums are those of integers (fixed_point.py).

Letters: N rows, D head_dim, Q D / 4.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs.bits import are_finite, check_rows, magnitude_bits
from subten.codecs.fixed_point import to_whole, to_whole_device
from subten.kernels.triton_shim import tl, triton_jit

INNER, OUTER, THRESHOLD = 3.0, 10.0, 6.5

FINE_LEVELS = (0.6875, 2.125, 3.4375, 5.0, 6.8125, 9.0, 11.6875, 15.6875)
"""Magnitudes of the 4-bit code: four of the inner cell, four of the outer one."""

FINE_THRESHOLDS = ((1.375, 2.75, 4.1875), (7.8125, 10.25, 13.5625))
"""Half-way between the means of neighbours within the inner and the outer cell."""

LIMIT = 1e38
"""Larger magnitudes count as this: an outer value, of more than 6.5 s, becomes at most 20 s."""

_FIRST_NORM = 0.18917
"""Norm over mean |x| of a Gaussian, 1 / (0.151 * 0.79788): where the least squares start."""

_ROUNDS = 2
"""Rounds of codes and norm in turn; a third would take 0.3 % off the error of Gaussian rows."""


def norm_of(
    x_ND: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 rows -> `(x_ND, norm_N1, is_outer_ND, is_finite_N1)`.

    Rows limited, and 0 where they are not finite; their norms, not yet rounded; their 2-bit codes.
    """
    check_rows(x_ND)
    is_finite_N1 = are_finite(x_ND)
    x_ND = torch.where(is_finite_N1, x_ND, 0.0).clamp(-LIMIT, LIMIT)
    head_dim = x_ND.shape[-1]
    whole_ND, unit_N1 = to_whole(x_ND)
    size_ND = whole_ND.abs_()
    total_N1 = size_ND.sum(dim=-1, keepdim=True)
    fit_N1 = total_N1.float() * (_FIRST_NORM / head_dim)
    is_outer_ND, product_N1, square_N1 = _levels_under(fit_N1, size_ND, total_N1)
    for _ in range(_ROUNDS):
        fit_N1 = product_N1 / square_N1
        is_outer_ND, product_N1, square_N1 = _levels_under(fit_N1, size_ND, total_N1)
    length_N1 = size_ND.long().square().sum(dim=-1, keepdim=True).float()
    norm_N1 = torch.minimum(length_N1 / product_N1.clamp(min=1.0), 2 * (product_N1 / square_N1))
    return x_ND, norm_N1 * unit_N1, is_outer_ND, is_finite_N1


def _levels_under(
    fit_N1: torch.Tensor, size_ND: torch.Tensor, total_N1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which of 3 and 10 is nearest under a norm; <|x|, level> and <level, level>, float32."""
    is_outer_ND = size_ND > fit_N1 * THRESHOLD
    outer_N1 = torch.where(is_outer_ND, size_ND, 0).sum(dim=-1, keepdim=True)
    square_N1 = 9 * size_ND.shape[-1] + 91 * is_outer_ND.sum(dim=-1, keepdim=True)
    return is_outer_ND, (3 * total_N1 + 7 * outer_N1).float(), square_N1.float()


def magnitude_codes(
    x_ND: torch.Tensor, norm_N1: torch.Tensor, is_outer_ND: torch.Tensor
) -> torch.Tensor:
    """[N, D] int32 0..7: which of FINE_LEVELS stands for x; 4 and more are the outer cell."""
    size_ND = x_ND.abs()
    code_ND = is_outer_ND.int() * 4
    for inner, outer in zip(*FINE_THRESHOLDS, strict=True):
        code_ND += size_ND > norm_N1 * torch.where(is_outer_ND, outer, inner)
    return code_ND


def pack_pairs(code_ND: torch.Tensor) -> torch.Tensor:
    """[N, D] integers below 4 -> [N, Q] uint8: channel i + kD/4 in bits 2k and 2k + 1."""
    code_N4Q = code_ND.to(torch.uint8).unflatten(-1, (4, -1))
    a, b, c, d = code_N4Q.unbind(dim=-2)
    byte_NQ: torch.Tensor = a | b << 2 | c << 4 | d << 6
    return byte_NQ


def unpack_pairs(byte_NQ: torch.Tensor) -> torch.Tensor:
    """[N, Q] uint8 -> [N, D] uint8 below 4; inverse of `pack_pairs`."""
    parts = [byte_NQ & 3, byte_NQ >> 2 & 3, byte_NQ >> 4 & 3, byte_NQ >> 6]
    return torch.cat(parts, dim=-1)


def levels_by_bytes(
    low_NQ: torch.Tensor, high_NQ: torch.Tensor | None, table_K2: torch.Tensor
) -> torch.Tensor:
    """Levels of rows of codes, float32 [N, Q, 4]: channel p D/4 + j at [j, p].

    Both tensors are packed as `pack_pairs` does it, of a code its low two bits and its high two
    bits. `table_K2` is `pair_table` of their levels.
    """
    index_NQ2 = torch.stack([low_NQ & 15, low_NQ >> 4], dim=-1)
    if high_NQ is not None:
        index_NQ2 |= torch.stack([high_NQ << 4, high_NQ & 0xF0], dim=-1)
    # Two levels at once, as one number, from a table that stays in a CPU's first cache.
    pair_K = table_K2.view(torch.complex64).flatten()
    pair_N = pair_K.index_select(0, index_NQ2.flatten().int())
    return pair_N.view(torch.float32).view(*low_NQ.shape, 4)


def pair_table(level_K: torch.Tensor) -> torch.Tensor:
    """Levels [4] or [16] of two channels by their low bits, two each, and above them the high."""
    byte_K1 = torch.arange(len(level_K) ** 2, device=level_K.device)[:, None]
    shift_2 = 2 * torch.arange(2, device=level_K.device)
    return level_K[(byte_K1 >> shift_2 & 3) + 4 * (byte_K1 >> 4 >> shift_2 & 3)]


@triton_jit
def norm_of_device(x_ND: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr) -> Any:
    """Device twin of `norm_of`, but `is_bad_N` last; channels past HEAD_DIM are 0."""
    x_ND = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], x_ND, 0.0)
    is_bad_N = tl.max(magnitude_bits(x_ND), axis=1) >= 0x7F800000
    x_ND = tl.where(is_bad_N[:, None], 0.0, x_ND)
    x_ND = tl.minimum(tl.maximum(x_ND, -1e38), 1e38)
    whole_ND, unit_N = to_whole_device(x_ND)
    size_ND = tl.abs(whole_ND)
    total_N = tl.sum(size_ND, axis=1)
    fit_N = total_N.to(tl.float32) * (0.18917 / HEAD_DIM)
    is_outer_ND, product_N, square_N = _levels_under_device(fit_N, size_ND, total_N, HEAD_DIM)
    for _ in tl.static_range(2):
        fit_N = tl.div_rn(product_N, square_N)
        is_outer_ND, product_N, square_N = _levels_under_device(fit_N, size_ND, total_N, HEAD_DIM)
    length_N = tl.sum(size_ND.to(tl.int64) * size_ND, axis=1).to(tl.float32)
    norm_N = tl.div_rn(length_N, tl.maximum(product_N, 1.0))
    norm_N = tl.minimum(norm_N, 2 * tl.div_rn(product_N, square_N))
    return x_ND, norm_N * unit_N, is_outer_ND, is_bad_N


@triton_jit
def _levels_under_device(
    fit_N: tl.tensor, size_ND: tl.tensor, total_N: tl.tensor, HEAD_DIM: tl.constexpr
) -> Any:
    """Device twin of `_levels_under`."""
    is_outer_ND = size_ND.to(tl.float32) > (fit_N * 6.5)[:, None]
    outer_N = tl.sum(tl.where(is_outer_ND, size_ND, 0), axis=1)
    square_N = 9 * HEAD_DIM + 91 * tl.sum(is_outer_ND.to(tl.int32), axis=1)
    return is_outer_ND, (3 * total_N + 7 * outer_N).to(tl.float32), square_N.to(tl.float32)


@triton_jit
def magnitude_codes_device(x_ND: tl.tensor, norm_N: tl.tensor, is_outer_ND: tl.tensor) -> Any:
    """Device twin of `magnitude_codes`."""
    size_ND, norm_N1 = tl.abs(x_ND), norm_N[:, None]
    code_ND = is_outer_ND.to(tl.int32) * 4
    code_ND += (size_ND > norm_N1 * tl.where(is_outer_ND, 7.8125, 1.375)).to(tl.int32)
    code_ND += (size_ND > norm_N1 * tl.where(is_outer_ND, 10.25, 2.75)).to(tl.int32)
    code_ND += (size_ND > norm_N1 * tl.where(is_outer_ND, 13.5625, 4.1875)).to(tl.int32)
    return code_ND


@triton_jit
def store_pairs(
    row_ptr_N: tl.tensor,
    code_ND: tl.tensor,
    mask_N: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Device twin of `pack_pairs`: int32 codes below 4 to the Q bytes at `row_ptr_N`."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    NUM_ROWS: tl.constexpr = code_ND.shape[0]
    byte_Q = tl.arange(0, BLOCK_D // 4)
    if HEAD_DIM == BLOCK_D:
        shift = (2 * tl.arange(0, 4))[None, :, None]
        byte_NQ = tl.sum(tl.reshape(code_ND, (NUM_ROWS, 4, BLOCK_D // 4)) << shift, axis=1)
    else:
        index_NQ = tl.broadcast_to(byte_Q[None, :], (NUM_ROWS, BLOCK_D // 4))
        byte_NQ = tl.gather(code_ND, index_NQ, axis=1)
        for part in tl.static_range(1, 4):
            # Bytes past Q are not stored; their index only has to be inside the tile.
            part_NQ = tl.minimum(index_NQ + part * QUARTER, BLOCK_D - 1)
            byte_NQ |= tl.gather(code_ND, part_NQ, axis=1) << (2 * part)
    mask_NQ = mask_N[:, None] & (byte_Q < QUARTER)[None, :]
    tl.store(row_ptr_N[:, None] + byte_Q[None, :], byte_NQ.to(tl.uint8), mask=mask_NQ)


@triton_jit
def load_pairs(
    row_ptr_N: tl.tensor, mask_N: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> Any:
    """Device twin of `unpack_pairs`: int32 [N, BLOCK_D]; 0 where masked or past HEAD_DIM."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    d = tl.arange(0, BLOCK_D)
    mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
    # The four parts of a row read the same bytes: after the first, from L1, and no value moves
    # between threads.
    byte_ND = tl.load(row_ptr_N[:, None] + (d % QUARTER)[None, :], mask=mask_ND, other=0)
    return (byte_ND.to(tl.int32) >> (2 * (d // QUARTER))[None, :]) & 3


@triton_jit
def level_2bit(code_ND: tl.tensor) -> Any:
    """2-bit codes (int32) -> 3, 10, -3 or -10 in float32, by their bits."""
    # 10 is 3 plus 0xE00000 in the pattern of a float; the sign is the top bit.
    bits_ND = (0x40400000 + (code_ND & 1) * 0x00E00000) | ((code_ND & 2) << 30)
    return bits_ND.to(tl.float32, bitcast=True)


@triton_jit
def level_4bit(code_ND: tl.tensor, fine_ND: tl.tensor) -> Any:
    """2-bit codes and the codes that refine them (int32) -> the signed FINE_LEVELS, float32."""
    is_low_ND, is_even_ND = fine_ND < 2, (fine_ND & 1) == 0
    inner_ND = tl.where(
        is_low_ND, tl.where(is_even_ND, 0.6875, 2.125), tl.where(is_even_ND, 3.4375, 5.0)
    )
    outer_ND = tl.where(
        is_low_ND, tl.where(is_even_ND, 6.8125, 9.0), tl.where(is_even_ND, 11.6875, 15.6875)
    )
    size_ND = tl.where((code_ND & 1) == 0, inner_ND, outer_ND)
    bits_ND = size_ND.to(tl.int32, bitcast=True) | ((code_ND & 2) << 30)
    return bits_ND.to(tl.float32, bitcast=True)
