"""VQ1.5: vectors of 8 channels in 12 bits, and one BF16 norm a row, after a Hadamard rotation.

    x_8 ~ norm * (first[a] + second[b]),    a < 256, b < 16

Both codewords are chosen together, the nearest of all 4096 sums, not one after the other: 10 % less
error at the same decode. Codewords are whole numbers of steps of 1/32 deviation (vq_codebook.py),
sums of two below 2^8, so exact in FP16 and BF16. Rows are compared with them in steps of 1/128 of a
deviation: every product and sum is a whole number below 2^24, exact in FP32 in any order.

The norm is |x|^2 / <x, sum of codewords>, rounded to BF16, so that rows are read as long as they
were; at most twice that of least squares (as in lloyd_max.py, which says why).

A row's codes: D/8 bytes of first-stage indices, then D/16 bytes of second-stage ones, vector i in
the low nibble of byte i and vector i + D/16 in its high nibble.

A row of zeros has norm 0. A row with a NaN or an infinity has norm NaN and decodes to NaN as a
whole. Magnitudes above 1e37 count as 1e37, and rows below 2^-120 as zeros.

Letters: N rows (or vectors), D head_dim, V vectors of a row, C codewords of both stages, B bytes of
one row in one plane.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from subten.codecs import KVCodec, RowBytes
from subten.codecs.bits import (
    are_finite,
    bf16_to_bytes,
    bytes_to_bf16,
    check_planes,
    check_rows,
    load_bf16,
    load_nibbles,
    magnitude_bits,
    nan_where,
    pack_nibbles,
    store_bf16,
    store_nibbles,
    unpack_nibbles,
)
from subten.codecs.fixed_point import (
    round_bf16,
    round_bf16_device,
    to_whole,
    to_whole_device,
)
from subten.codecs.rotation import check_rotatable
from subten.codecs.vq_codebook import ROWS
from subten.kernels.triton_shim import tl, triton_jit

FIRST, SECOND, VECTOR, STEPS = 256, 16, 8, 32
"""Codewords of the two stages, channels of a codeword, and its steps in one deviation."""

SEARCH_LIMIT = 1500
"""Rows are searched with at most this many 128ths of a deviation: less any codeword of the second
stage, four steps each, FP16 still holds them."""

_LIMIT = 1e37
"""A value may decode to 2 sqrt(D) times the largest of its row, which must not overflow."""

_MEAN_SIZE = 0.79788
"""Mean |x| of a unit Gaussian, sqrt(2 / pi)."""


def _row_bytes(head_dim: int) -> RowBytes:
    check_rotatable("vq1.5", head_dim)
    return RowBytes(codes=head_dim * 3 // 16, scale=2, zero=0)


@functools.cache
def codebook(device: torch.device) -> torch.Tensor:
    """The codewords [C, 8], float16 whole numbers of 1/32 deviation, 256 and then 16 rows."""
    # A first call under inference mode must not leave later callers a tensor without autograd.
    with torch.inference_mode(False):
        steps_C8 = torch.frombuffer(bytearray(ROWS), dtype=torch.int8).view(-1, VECTOR)
        assert len(steps_C8) == FIRST + SECOND, len(steps_C8)
        return steps_C8.to(device=device, dtype=torch.float16)


def nearest_pair(x_N8: torch.Tensor, rows_C8: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each vector the codewords of both stages with the nearest sum, int64 [N] and [N].

    Ties go to the lowest second codeword, then to the lowest first one.
    """
    first_F8, second_S8 = rows_C8[:FIRST], rows_C8[FIRST:]
    half_square_F = first_F8.square().sum(1) / 2
    best_N = torch.full_like(x_N8[:, 0], -float("inf"))
    found_2N = torch.zeros(2, len(x_N8), dtype=torch.int64, device=x_N8.device)
    for index, second_8 in enumerate(second_S8):
        # x . s - |s|^2 / 2 for s = first + second; the largest is the nearest.
        score_NF = torch.addmm(-half_square_F, x_N8 - second_8, first_F8.t())
        score_N, first_N = score_NF.max(dim=1)
        score_N += x_N8 @ second_8 - second_8.square().sum() / 2
        is_better_N = score_N > best_N
        best_N = torch.where(is_better_N, score_N, best_N)
        found_2N[0] = torch.where(is_better_N, first_N, found_2N[0])
        found_2N[1].masked_fill_(is_better_N, index)
    return found_2N[0], found_2N[1]


def _encode(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes_NB, norm_N1, is_finite_N1 = encode_vectors(x_ND)
    norm_N2 = bf16_to_bytes(torch.where(is_finite_N1, round_bf16(norm_N1), float("nan")))
    return codes_NB, norm_N2, norm_N2[..., :0]


def encode_vectors(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 rows -> `(codes_NB, norm_N1, is_finite_N1)`: norms not yet rounded, bad rows 0."""
    check_rows(x_ND)
    head_dim = x_ND.shape[-1]
    is_finite_N1 = are_finite(x_ND)
    whole_ND, unit_N1 = to_whole(torch.where(is_finite_N1, x_ND, 0.0).clamp(-_LIMIT, _LIMIT))
    total_N1 = whole_ND.abs().sum(dim=-1, keepdim=True).float()
    deviation_N1 = total_N1 * (1 / (_MEAN_SIZE * head_dim))
    y_ND = whole_ND.float() / torch.where(deviation_N1 > 0, deviation_N1, 1.0)
    y_ND = (y_ND * (4 * STEPS)).round().clamp(-SEARCH_LIMIT, SEARCH_LIMIT)
    # In units of 1/128: scores are whole numbers, and halved squares even ones.
    rows_C8 = codebook(x_ND.device).float()
    found = _chunked_pairs(y_ND.reshape(-1, VECTOR), rows_C8 * 4)
    shape_NV = (*x_ND.shape[:-1], head_dim // VECTOR)
    first_NV, second_NV = (index_N.view(shape_NV) for index_N in found)
    level_ND = (rows_C8[first_NV] + rows_C8[second_NV + FIRST]).flatten(-2).long()
    product_N1 = (whole_ND * level_ND).sum(dim=-1, keepdim=True).clamp(min=0).float()
    square_N1 = level_ND.square().sum(dim=-1, keepdim=True).clamp(min=1).float()
    length_N1 = whole_ND.long().square().sum(dim=-1, keepdim=True).float()
    norm_N1 = torch.minimum(length_N1 / product_N1.clamp(min=1.0), 2 * (product_N1 / square_N1))
    parts = (first_NV.to(torch.uint8), pack_nibbles(second_NV.to(torch.uint8)))
    return torch.cat(parts, dim=-1), norm_N1 * unit_N1, is_finite_N1


_CHUNK = {"cpu": 2**12, "cuda": 2**18}
"""Vectors searched at once: bounds the scores, on a CPU to 4 MiB, which stay in cache, on a GPU to
256 MiB, which keep it busy."""


def _chunked_pairs(y_N8: torch.Tensor, rows_C8: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = [nearest_pair(part_N8, rows_C8) for part_N8 in y_N8.split(_CHUNK[y_N8.device.type])]
    return torch.cat([first for first, _ in found]), torch.cat([second for _, second in found])


def _decode(
    codes_NB: torch.Tensor, norm_N2: torch.Tensor, zero_N0: torch.Tensor, head_dim: int
) -> torch.Tensor:
    check_planes((codes_NB, norm_N2, zero_N0), _row_bytes(head_dim))
    # Rows of an odd number of bytes, cut out of one tensor, leave norms at odd addresses: a copy.
    return decode_vectors(codes_NB) * bytes_to_bf16(norm_N2.clone())


def decode_vectors(codes_NB: torch.Tensor) -> torch.Tensor:
    """Codes [N, 3D/16] -> rows of norm 1, float32 [N, D]."""
    num_vectors = codes_NB.shape[-1] * 2 // 3
    first_NV = codes_NB[..., :num_vectors].int()
    second_NV = unpack_nibbles(codes_NB[..., num_vectors:]).int()
    rows_C8 = codebook(codes_NB.device).float()
    level_NV8 = rows_C8[first_NV] + rows_C8[second_NV + FIRST]
    return level_NV8.flatten(-2)


# Per vector y of 8 channels, in whole steps:  the largest of y . (a + b) - 2 |a + b|^2 over first a
# and second b, which is that of (y - 4b) . a - 2 |a|^2 plus y . b - 2 |b|^2: for each b a product
# with all a, in FP16 with exact FP32 sums. Ties go to the lowest b, then a. Writes 3 D / 16 + 2
# bytes a row; the codebook, 4.3 KB, stays in L1.
#
#   tile of vectors [N * D/8, 16]: y0 y0 y1 y1 ... y7 y7, times codewords a0 0 a1 0 ... a7 0, as a
#   product of matrices takes at least 16
@triton_jit
def _device_encode(
    x_ND: tl.tensor,
    page_N: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    tables: tl.tensor,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    tl.static_assert(CODES < SCALE and SCALE < ZERO)
    row_ptr_N = page_N + CODES + row_N * (HEAD_DIM * 3 // 16)
    norm_N, is_bad_N = store_vectors(row_ptr_N, x_ND, mask_N, tables, HEAD_DIM, BLOCK_D)
    store_bf16(page_N + SCALE, row_N, nan_where(is_bad_N, round_bf16_device(norm_N)), mask_N)


@triton_jit
def store_vectors(
    row_ptr_N: tl.tensor,
    x_ND: tl.tensor,
    mask_N: tl.tensor,
    tables: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """Store codes of rows at `row_ptr_N`; `(norm_N, is_bad_N)`, as `encode_vectors` has them."""
    NUM_ROWS: tl.constexpr = x_ND.shape[0]
    BLOCK_V: tl.constexpr = BLOCK_D // 8
    is_inside_1D = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    x_ND = tl.where(is_inside_1D, x_ND, 0.0)
    is_bad_N = tl.max(magnitude_bits(x_ND), axis=1) >= 0x7F800000
    x_ND = tl.where(is_bad_N[:, None], 0.0, x_ND)
    x_ND = tl.minimum(tl.maximum(x_ND, -1e37), 1e37)
    whole_ND, unit_N = to_whole_device(x_ND)
    deviation_N = tl.sum(tl.abs(whole_ND), axis=1).to(tl.float32) * (1 / (0.79788 * HEAD_DIM))
    deviation_N = tl.where(deviation_N > 0, deviation_N, 1.0)
    y_ND = tl.div_rn(whole_ND.to(tl.float32), deviation_N[:, None]) * 128.0
    # The last bit of 1.5 * 2^23 is 1: adding it rounds to the nearest integer, of either sign.
    step_ND = (y_ND + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    y_ND = tl.minimum(tl.maximum(step_ND, -1500), 1500).to(tl.float32)

    first_N, second_N = _nearest_pair(tl.reshape(y_ND, (NUM_ROWS * BLOCK_V, 8)), tables)
    level_ND = tl.reshape(_levels(first_N, second_N, tables), (NUM_ROWS, BLOCK_D))
    level_ND = tl.where(is_inside_1D, level_ND, 0.0).to(tl.int32)
    product_N = tl.maximum(tl.sum(whole_ND.to(tl.int64) * level_ND, axis=1), 0).to(tl.float32)
    square_N = tl.maximum(tl.sum(level_ND * level_ND, axis=1), 1).to(tl.float32)
    length_N = tl.sum(whole_ND.to(tl.int64) * whole_ND, axis=1).to(tl.float32)
    norm_N = tl.div_rn(length_N, tl.maximum(product_N, 1.0))
    norm_N = tl.minimum(norm_N, 2 * tl.div_rn(product_N, square_N))
    v = tl.arange(0, BLOCK_V)
    first_NV = tl.reshape(first_N, (NUM_ROWS, BLOCK_V)).to(tl.uint8)
    mask_NV = mask_N[:, None] & (v < HEAD_DIM // 8)[None, :]
    tl.store(row_ptr_N[:, None] + v[None, :], first_NV, mask=mask_NV)
    second_NV = tl.reshape(second_N, (NUM_ROWS, BLOCK_V))
    store_nibbles(row_ptr_N + HEAD_DIM // 8, second_NV, mask_N, HEAD_DIM // 8, BLOCK_V)
    return norm_N * unit_N, is_bad_N


@triton_jit
def _nearest_pair(y_N8: tl.tensor, tables: tl.tensor) -> Any:
    """Device twin of `nearest_pair`, for whole steps `y_N8` in float32; int32 [N] and [N]."""
    NUM_VECTORS: tl.constexpr = y_N8.shape[0]
    k, f, c = tl.arange(0, 16), tl.arange(0, 256), tl.arange(0, 8)
    first_ptr = tables + f[None, :] * 8 + (k // 2)[:, None]
    first_KF = tl.load(first_ptr, mask=(k % 2 == 0)[:, None], other=0.0)
    wide_KF = first_KF.to(tl.float32)
    square_F = tl.sum(wide_KF * wide_KF, axis=0)
    best_N = tl.full([NUM_VECTORS], float("-inf"), tl.float32)
    first_N = tl.zeros([NUM_VECTORS], tl.int32)
    second_N = tl.zeros([NUM_VECTORS], tl.int32)
    for index in range(16):
        second_18 = tl.load(tables + (256 + index) * 8 + c).to(tl.float32)[None, :]
        rest_N8 = y_N8 - 4.0 * second_18
        # By broadcasting: Triton 3.6 takes a `join` of what was loaded in bytes for half a byte a
        # value, lays the product out for 32 of them, and of 16 it then makes wrong sums.
        twice_N82 = tl.broadcast_to(rest_N8[:, :, None], (NUM_VECTORS, 8, 2))
        rest_NK = tl.reshape(twice_N82, (NUM_VECTORS, 16))
        score_NF = tl.dot(rest_NK.to(tl.float16), first_KF) - 2.0 * square_F[None, :]
        score_N, found_N = tl.max(
            score_NF, axis=1, return_indices=True, return_indices_tie_break_left=True
        )
        score_N += tl.sum((y_N8 - 2.0 * second_18) * second_18, axis=1)
        is_better_N = score_N > best_N
        best_N = tl.where(is_better_N, score_N, best_N)
        first_N = tl.where(is_better_N, found_N, first_N)
        second_N = tl.where(is_better_N, index, second_N)
    return first_N, second_N


@triton_jit
def _levels(first_N: tl.tensor, second_N: tl.tensor, tables: tl.tensor) -> Any:
    """Sums of two codewords each, float32 with 8 channels as a last dimension; rows of 16 bytes."""
    c = tl.arange(0, 8)
    if len(first_N.shape) == 1:
        first_N8 = tl.load(tables + first_N[:, None] * 8 + c[None, :])
        second_N8 = tl.load(tables + (second_N[:, None] + 256) * 8 + c[None, :])
    else:
        first_N8 = tl.load(tables + first_N[:, :, None] * 8 + c[None, None, :])
        second_N8 = tl.load(tables + (second_N[:, :, None] + 256) * 8 + c[None, None, :])
    return first_N8.to(tl.float32) + second_N8.to(tl.float32)


# Levels are whole numbers below 2^8, exact in FP16 and BF16; the norm acts on scores and on P, once
# a row. Reads 3 D / 16 + 2 bytes a row, and codewords as rows of 16 bytes from L1.
@triton_jit
def _device_decode(
    page: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    tables: tl.tensor,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    tl.static_assert(CODES < SCALE and SCALE < ZERO)
    row_ptr_N = page + CODES + row_N * (HEAD_DIM * 3 // 16)
    level_ND = load_vectors(row_ptr_N, mask_N, tables, HEAD_DIM, BLOCK_D)
    norm_N = load_bf16(page + SCALE, row_N, mask_N)
    return level_ND, norm_N, tl.zeros_like(norm_N)


@triton_jit
def load_vectors(
    row_ptr_N: tl.tensor,
    mask_N: tl.tensor,
    tables: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """Device twin of `decode_vectors`; 0 where masked or past HEAD_DIM."""
    NUM_ROWS: tl.constexpr = row_ptr_N.shape[0]
    BLOCK_V: tl.constexpr = BLOCK_D // 8
    v = tl.arange(0, BLOCK_V)
    mask_NV = mask_N[:, None] & (v < HEAD_DIM // 8)[None, :]
    first_NV = tl.load(row_ptr_N[:, None] + v[None, :], mask=mask_NV, other=0).to(tl.int32)
    second_NV = load_nibbles(row_ptr_N + HEAD_DIM // 8, mask_N, HEAD_DIM // 8, BLOCK_V)
    level_ND = tl.reshape(_levels(first_NV, second_NV, tables), (NUM_ROWS, BLOCK_D))
    mask_ND = mask_N[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    return tl.where(mask_ND, level_ND, 0.0)


VQ1_5 = KVCodec(
    name="vq1.5",
    summary="8 channels in 12 bits, two-stage codebook after a Hadamard rotation, one BF16 norm",
    is_rotated=True,
    row_bytes=_row_bytes,
    encode=_encode,
    decode=_decode,
    device_encode=_device_encode,
    device_decode=_device_decode,
    tables=codebook,
)
