"""Keys at 2, 3 or 4 bits, each channel's error fed into the channels after it.

    u_i = y_i + sum_{j<i} e_j M_ji,    code_i the level nearest to u_i,    e_j = y_j - level_j

with y the row over its root mean square, which is stored in a byte (norm_byte.py). M, of each layer
and KV head, is the Cholesky factor of what queries feel, as in GPTQ (Frantar et al., 2023) for
weights: the error that is left falls where they do not look. Decoding knows nothing of it, and
without M codes are simply the nearest.

Levels are whole numbers below 64 times a unit, for a unit Gaussian: at 2 bits those of int2, at 3
and 4 they lose .04 % and 1.6 % more than the best 8 and 16 (Max, 1960), and products of them are
exact in one byte. Units are those of least squares over 1 - D, D their error: read so,
<x, decoded> is |x|^2 in the mean. Thresholds are half-way between levels of least squares. A
device has the whole numbers from odd cubics of the code less the middle one, rounded.

Planes of a row: the low two bits of all codes (`pack_pairs`), and at 4 bits the high two likewise,
at 3 bits the high one: byte i of D/8 has channels i, i + D/8, ..., i + 7 D/8, from bit 0 up.

**Outliers.** Chosen channels may be kept as BF16 beside the codes. They count nothing in the norm,
and their error is that of BF16.

A row that is not finite, or whose root mean square is above the byte's range, comes with a flag,
for the caller to refuse, and what is stored of it means nothing.

Letters: T tokens, G KV heads, D head_dim, Q D / 4, E D / 8, O outlier channels, K levels, N rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from subten.codecs.bits import are_finite, check_rows, magnitude_bits, nan_where
from subten.codecs.fixed_point import (
    round_bf16_device,
    to_whole,
    to_whole_device,
)
from subten.codecs.lloyd_max import LIMIT, levels_by_bytes, pack_pairs, pair_table, store_pairs
from subten.codecs.norm_byte import (
    decode_norm,
    encode_norm,
    encode_norm_device,
    exact_norm_device,
)
from subten.kernels.triton_shim import tl, triton_jit

WIDTHS = (2, 3, 4)
"""Bits of a channel."""

BIAS = 128
"""Norms from 2^-8 to 2^7.9."""

LEVELS = {2: (3, 10), 3: (7, 22, 39, 62), 4: (3, 9, 15, 22, 30, 39, 50, 63)}
"""Magnitudes of each width, in units."""

UNITS = {2: 0.171141, 3: 0.0358764, 4: 0.0430917}

THRESHOLDS = {
    2: (0.9817,),
    3: (0.5022, 1.0564, 1.7491),
    4: (0.2561, 0.5121, 0.7895, 1.1096, 1.4723, 1.8991, 2.4112),
}
"""Magnitudes from which on the next level is the nearest."""


@functools.cache
def levels(bits: int, device: torch.device) -> torch.Tensor:
    """Levels of a width, float32 [K], ascending."""
    with torch.inference_mode(False):
        size_K = torch.tensor(LEVELS[bits], dtype=torch.float32)
        return (torch.cat([-size_K.flip(0), size_K]) * UNITS[bits]).to(device)


def encode_shaped(
    y_TGD: torch.Tensor,
    *,
    bits: int,
    feedback_GDD: torch.Tensor | None = None,
    outlier_GO: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 rows -> `(low_TGQ, high_TGB, norm_TG, is_bad_TG)`, uint8 but for the flags.

    `feedback_GDD[g, j, i]` is M_ji, and counts for i > j alone. `high_TGB` has Q bytes at 4 bits,
    E at 3 and none at 2. `outlier_GO` int32 names channels that are kept elsewhere (`outliers_of`).
    """
    check_rows(y_TGD)
    is_finite_TG1 = are_finite(y_TGD)
    y_TGD = torch.where(is_finite_TG1, y_TGD, 0.0).clamp(-LIMIT, LIMIT)
    is_out_GD = _outlier_mask(outlier_GO, y_TGD)
    byte_TG, is_over_TG = encode_norm(_size(y_TGD, is_out_GD), BIAS)
    norm_TG1 = decode_norm(byte_TG, BIAS)[..., None]
    norm_TG1 = torch.where(norm_TG1 > 0, norm_TG1, 1.0)
    exact_TGD = None
    if is_out_GD is not None:
        exact_TGD = torch.where(is_out_GD, y_TGD.bfloat16().float() / norm_TG1, float("nan"))
    code_TGD = _codes(y_TGD / norm_TG1, bits, feedback_GDD, exact_TGD)
    low_TGQ, high_TGD = pack_pairs(code_TGD & 3), code_TGD >> 2
    high_TGB = (low_TGQ[..., :0], pack_bits(high_TGD), pack_pairs(high_TGD))[bits - 2]
    return low_TGQ, high_TGB, byte_TG, is_over_TG | ~is_finite_TG1[..., 0]


def decode_shaped(
    low_NQ: torch.Tensor, high_NB: torch.Tensor, norm_N: torch.Tensor, *, bits: int
) -> torch.Tensor:
    """Planes as `encode_shaped` made them -> rows, float32 [N, D]; outliers stay to be put in."""
    level_NQ4 = shaped_levels(low_NQ, high_NB, bits=bits)
    return level_NQ4.mT.flatten(-2) * decode_norm(norm_N, BIAS)[..., None]


def shaped_levels(low_NQ: torch.Tensor, high_NB: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Rows over their norms as `levels_by_bytes` has them."""
    high_NQ = None
    if bits == 3:
        # Of both halves of a quarter the bits as 4-bit codes would have them.
        high_NQ = torch.cat([high_NB & 0x55, high_NB >> 1 & 0x55], dim=-1)
    if bits == 4:
        high_NQ = high_NB
    return levels_by_bytes(low_NQ, high_NQ, _level_pairs(bits, low_NQ.device))


@functools.cache
def _level_pairs(bits: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        # Codes of 3 bits have the fourth 0.
        return pair_table(F.pad(levels(bits, device), (0, 8 * (bits == 3))))


def outliers_of(y_TGD: torch.Tensor, outlier_GO: torch.Tensor) -> torch.Tensor:
    """The chosen channels of rows, [T, G, O]."""
    return y_TGD.gather(-1, outlier_GO.long().expand(len(y_TGD), -1, -1))


def pack_bits(code_ND: torch.Tensor) -> torch.Tensor:
    """[N, D] integers below 2 -> [N, E] uint8: channel i + b D/8 in bit b of byte i."""
    code_N8E = code_ND.to(torch.uint8).unflatten(-1, (8, -1))
    shift_81 = torch.arange(8, dtype=torch.uint8, device=code_ND.device)[:, None]
    packed_NE: torch.Tensor = (code_N8E << shift_81).sum(dim=-2, dtype=torch.uint8)
    return packed_NE


def _outlier_mask(outlier_GO: torch.Tensor | None, y_TGD: torch.Tensor) -> torch.Tensor | None:
    if outlier_GO is None:
        return None
    is_out_GD = torch.zeros(y_TGD.shape[1:], dtype=torch.bool, device=y_TGD.device)
    return is_out_GD.scatter_(1, outlier_GO.long(), True)


def _size(y_TGD: torch.Tensor, is_out_GD: torch.Tensor | None) -> torch.Tensor:
    """Root mean square of the channels that are coded, float32 [T, G]; sums are exact."""
    count = torch.full((1,), float(y_TGD.shape[-1]), device=y_TGD.device)
    if is_out_GD is not None:
        y_TGD, count = torch.where(is_out_GD, 0.0, y_TGD), (~is_out_GD).sum(-1).float()
    whole_TGD, unit_TG1 = to_whole(y_TGD)
    square_TG = whole_TGD.long().square().sum(dim=-1).float()
    return (square_TG / count).sqrt() * unit_TG1[..., 0]


def _codes(
    y_TGD: torch.Tensor,
    bits: int,
    feedback_GDD: torch.Tensor | None,
    exact_TGD: torch.Tensor | None,
) -> torch.Tensor:
    """Codes of rows over their norms, uint8; `exact_TGD` is NaN but where something else is read.

    Products and sums are rounded each by itself, in the order of channels, as on a device.
    """
    if feedback_GDD is None:
        return _nearest(y_TGD, bits)
    if y_TGD.device.type == "cpu":
        return _chained_codes_numpy(y_TGD, bits, feedback_GDD, exact_TGD)
    level_K = levels(bits, y_TGD.device)
    y_DTG, feedback_DDG = y_TGD.movedim(-1, 0).contiguous(), feedback_GDD.movedim(0, -1)
    want_DTG = y_DTG.clone()
    code_DTG = torch.empty_like(y_DTG, dtype=torch.uint8)
    for i in range(len(y_DTG)):
        code_DTG[i] = _nearest(want_DTG[i], bits)
        read_TG = level_K[code_DTG[i].int()]
        if exact_TGD is not None:
            read_TG = torch.where(exact_TGD[..., i].isnan(), read_TG, exact_TGD[..., i])
        want_DTG[i + 1 :] += (y_DTG[i] - read_TG) * feedback_DDG[i, i + 1 :, None]
    return code_DTG.movedim(0, -1)


def _chained_codes_numpy(
    y_TGD: torch.Tensor,
    bits: int,
    feedback_GDD: torch.Tensor,
    exact_TGD: torch.Tensor | None,
) -> torch.Tensor:
    """The same chain with NumPy: of a decode step's few rows a call takes a fifth of torch's."""
    edge_E, level_K = _signed_edges(bits).numpy(), levels(bits, y_TGD.device).numpy()
    y_DTG = y_TGD.movedim(-1, 0).contiguous().numpy()
    feedback_DDG = feedback_GDD.movedim(0, -1).numpy()[:, :, None]
    exact_DTG = None if exact_TGD is None else exact_TGD.movedim(-1, 0).numpy()
    want_DTG, code_DTG = y_DTG.copy(), np.empty(y_DTG.shape, dtype=np.uint8)
    for i, (y_TG, want_TG) in enumerate(zip(y_DTG, want_DTG, strict=True)):
        code_TG = edge_E.searchsorted(want_TG, "right")
        code_DTG[i] = code_TG
        read_TG = level_K.take(code_TG)
        if exact_DTG is not None:
            read_TG = np.where(np.isnan(exact_DTG[i]), read_TG, exact_DTG[i])
        want_DTG[i + 1 :] += (y_TG - read_TG) * feedback_DDG[i, i + 1 :]
    return torch.from_numpy(code_DTG).movedim(0, -1)


@functools.cache
def _signed_edges(bits: int) -> torch.Tensor:
    """The least numbers of code 1, of code 2 and so on, float32: edges go inwards, 0 upwards."""
    with torch.inference_mode(False):
        edge_K = torch.tensor(THRESHOLDS[bits])
        outer_K = edge_K.nextafter(torch.tensor(float("inf")))
        return torch.cat([-edge_K.flip(0), torch.zeros(1), outer_K])


def _nearest(u: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of the nearest levels: magnitudes on an edge go inwards, 0 is positive."""
    return torch.bucketize(u, _signed_edges(bits).to(u.device), right=True).to(torch.uint8)


# Rows of a tile each on their own; sums over a row are exact, and those of feedback are made in the
# order of channels, so that the bytes are those of the twin (launch without fused multiply-add).
# Channels go in blocks of eight: a block's are taken out of the tile once and then live as one
# number a row, so that no step of the chain waits for other threads; its errors are added to the
# channels after it as eight outer products. Reads 4 D^2 bytes of M, from L2 for all but the first.
@triton_jit
def device_store_shaped(
    y_ND: tl.tensor,
    low_N: tl.tensor,
    high_N: tl.tensor,
    norm_N: tl.tensor,
    mask_N: tl.tensor,
    is_out_D: tl.tensor,
    num_coded: tl.tensor,
    feedback_ptr: tl.tensor,
    table_ptr: tl.tensor,
    BITS: tl.constexpr,
    HAS_FEEDBACK: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """Device twin of `encode_shaped`, into the rows at these pointers; returns `is_bad_N`.

    `is_out_D` says which channels are outliers and `num_coded` how many are not, where there are
    any; `feedback_ptr` leads to M of the head, `table_ptr` to `norm_byte.norm_table`.
    """
    d = tl.arange(0, BLOCK_D)
    y_ND = tl.where((d < HEAD_DIM)[None, :], y_ND, 0.0)
    is_bad_N = tl.max(magnitude_bits(y_ND), axis=1) >= 0x7F800000
    y_ND = tl.where(is_bad_N[:, None], 0.0, y_ND)
    y_ND = tl.minimum(tl.maximum(y_ND, -1e38), 1e38)
    coded_ND = y_ND
    if HAS_OUTLIERS:
        coded_ND = tl.where(is_out_D[None, :], 0.0, y_ND)
    whole_ND, unit_N = to_whole_device(coded_ND)
    square_N = tl.sum(whole_ND.to(tl.int64) * whole_ND, axis=1).to(tl.float32)
    size_N = tl.sqrt_rn(tl.div_rn(square_N, num_coded.to(tl.float32))) * unit_N
    byte_N, is_over_N = encode_norm_device(size_N, 128)
    tl.store(norm_N, byte_N.to(tl.uint8), mask=mask_N)
    divisor_N = exact_norm_device(byte_N, table_ptr, 128)
    divisor_N1 = tl.where(divisor_N > 0, divisor_N, 1.0)[:, None]
    exact_ND = y_ND
    if HAS_OUTLIERS:
        exact_ND = tl.div_rn(round_bf16_device(y_ND), tl.broadcast_to(divisor_N1, y_ND.shape))
        exact_ND = nan_where(~tl.broadcast_to(is_out_D[None, :], y_ND.shape), exact_ND)
    y_ND = tl.div_rn(y_ND, tl.broadcast_to(divisor_N1, y_ND.shape))
    if HAS_FEEDBACK:
        code_ND = _chained_codes(
            y_ND, exact_ND, feedback_ptr, BITS, HAS_OUTLIERS, HEAD_DIM, BLOCK_D
        )
    else:
        code_ND = _nearest_device(y_ND, BITS)
    store_pairs(low_N, code_ND & 3, mask_N, HEAD_DIM, BLOCK_D)
    if BITS == 3:
        store_bits(high_N, code_ND >> 2, mask_N, HEAD_DIM, BLOCK_D)
    if BITS == 4:
        store_pairs(high_N, code_ND >> 2, mask_N, HEAD_DIM, BLOCK_D)
    return is_bad_N | is_over_N


@triton_jit
def _chained_codes(
    y_ND: tl.tensor,
    exact_ND: tl.tensor,
    feedback_ptr: tl.tensor,
    BITS: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """Device twin of `_codes` with feedback: int32 [N, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    want_ND, code_ND = y_ND, tl.zeros_like(y_ND).to(tl.int32)
    for block in range(HEAD_DIM // 8):
        u0, u1, u2, u3, u4, u5, u6, u7 = _eight(want_ND, block)
        y0, y1, y2, y3, y4, y5, y6, y7 = _eight(y_ND, block)
        x0, x1, x2, x3, x4, x5, x6, x7 = y0, y1, y2, y3, y4, y5, y6, y7
        if HAS_OUTLIERS:
            x0, x1, x2, x3, x4, x5, x6, x7 = _eight(exact_ND, block)
        row = feedback_ptr + block * 8 * HEAD_DIM
        m = row + block * 8
        c0, e0 = _pick(u0, y0, x0, BITS, HAS_OUTLIERS)
        u1 += e0 * tl.load(m + 1)
        c1, e1 = _pick(u1, y1, x1, BITS, HAS_OUTLIERS)
        u2 += e0 * tl.load(m + 2)
        u2 += e1 * tl.load(m + HEAD_DIM + 2)
        c2, e2 = _pick(u2, y2, x2, BITS, HAS_OUTLIERS)
        u3 += e0 * tl.load(m + 3)
        u3 += e1 * tl.load(m + HEAD_DIM + 3)
        u3 += e2 * tl.load(m + 2 * HEAD_DIM + 3)
        c3, e3 = _pick(u3, y3, x3, BITS, HAS_OUTLIERS)
        u4 += e0 * tl.load(m + 4)
        u4 += e1 * tl.load(m + HEAD_DIM + 4)
        u4 += e2 * tl.load(m + 2 * HEAD_DIM + 4)
        u4 += e3 * tl.load(m + 3 * HEAD_DIM + 4)
        c4, e4 = _pick(u4, y4, x4, BITS, HAS_OUTLIERS)
        u5 += e0 * tl.load(m + 5)
        u5 += e1 * tl.load(m + HEAD_DIM + 5)
        u5 += e2 * tl.load(m + 2 * HEAD_DIM + 5)
        u5 += e3 * tl.load(m + 3 * HEAD_DIM + 5)
        u5 += e4 * tl.load(m + 4 * HEAD_DIM + 5)
        c5, e5 = _pick(u5, y5, x5, BITS, HAS_OUTLIERS)
        u6 += e0 * tl.load(m + 6)
        u6 += e1 * tl.load(m + HEAD_DIM + 6)
        u6 += e2 * tl.load(m + 2 * HEAD_DIM + 6)
        u6 += e3 * tl.load(m + 3 * HEAD_DIM + 6)
        u6 += e4 * tl.load(m + 4 * HEAD_DIM + 6)
        u6 += e5 * tl.load(m + 5 * HEAD_DIM + 6)
        c6, e6 = _pick(u6, y6, x6, BITS, HAS_OUTLIERS)
        u7 += e0 * tl.load(m + 7)
        u7 += e1 * tl.load(m + HEAD_DIM + 7)
        u7 += e2 * tl.load(m + 2 * HEAD_DIM + 7)
        u7 += e3 * tl.load(m + 3 * HEAD_DIM + 7)
        u7 += e4 * tl.load(m + 4 * HEAD_DIM + 7)
        u7 += e5 * tl.load(m + 5 * HEAD_DIM + 7)
        u7 += e6 * tl.load(m + 6 * HEAD_DIM + 7)
        c7, e7 = _pick(u7, y7, x7, BITS, HAS_OUTLIERS)
        mask_D = d < HEAD_DIM
        want_ND, code_ND = _spread(want_ND, code_ND, e0, c0, row, block * 8, mask_D)
        want_ND, code_ND = _spread(want_ND, code_ND, e1, c1, row + HEAD_DIM, block * 8 + 1, mask_D)
        want_ND, code_ND = _spread(
            want_ND, code_ND, e2, c2, row + 2 * HEAD_DIM, block * 8 + 2, mask_D
        )
        want_ND, code_ND = _spread(
            want_ND, code_ND, e3, c3, row + 3 * HEAD_DIM, block * 8 + 3, mask_D
        )
        want_ND, code_ND = _spread(
            want_ND, code_ND, e4, c4, row + 4 * HEAD_DIM, block * 8 + 4, mask_D
        )
        want_ND, code_ND = _spread(
            want_ND, code_ND, e5, c5, row + 5 * HEAD_DIM, block * 8 + 5, mask_D
        )
        want_ND, code_ND = _spread(
            want_ND, code_ND, e6, c6, row + 6 * HEAD_DIM, block * 8 + 6, mask_D
        )
        want_ND, code_ND = _spread(
            want_ND, code_ND, e7, c7, row + 7 * HEAD_DIM, block * 8 + 7, mask_D
        )
    return code_ND


@triton_jit
def _spread(
    want_ND: tl.tensor,
    code_ND: tl.tensor,
    error_N: tl.tensor,
    code_N: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    mask_D: tl.tensor,
) -> Any:
    """Add a channel's error to the channels after it, and put its code in place."""
    d = tl.arange(0, want_ND.shape[1])
    feedback_D = tl.load(row + d, mask=mask_D & (d > channel), other=0.0)
    want_ND += error_N[:, None] * feedback_D[None, :]
    return want_ND, tl.where((d == channel)[None, :], code_N[:, None], code_ND)


@triton_jit
def _eight(x_ND: tl.tensor, block: tl.tensor) -> Any:
    """Channels 8 block to 8 block + 7 of all rows, one [N] each."""
    NUM_ROWS: tl.constexpr = x_ND.shape[0]
    NUM_BLOCKS: tl.constexpr = x_ND.shape[1] // 8
    x_NB8 = tl.reshape(x_ND, (NUM_ROWS, NUM_BLOCKS, 8))
    is_block_B = tl.arange(0, NUM_BLOCKS) == block
    x_N8 = tl.sum(tl.where(is_block_B[None, :, None], x_NB8, 0.0), axis=1)
    x_0246, x_1357 = tl.split(tl.reshape(x_N8, (NUM_ROWS, 4, 2)))
    x_04, x_26 = tl.split(tl.reshape(x_0246, (NUM_ROWS, 2, 2)))
    x_15, x_37 = tl.split(tl.reshape(x_1357, (NUM_ROWS, 2, 2)))
    x0, x4 = tl.split(x_04)
    x1, x5 = tl.split(x_15)
    x2, x6 = tl.split(x_26)
    x3, x7 = tl.split(x_37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton_jit
def _pick(
    u_N: tl.tensor,
    y_N: tl.tensor,
    exact_N: tl.tensor,
    BITS: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
) -> Any:
    """Code of a channel, and its error."""
    code_N = _nearest_device(u_N, BITS)
    read_N = shaped_level(code_N, BITS) * level_unit(BITS)
    if HAS_OUTLIERS:
        read_N = tl.where(exact_N != exact_N, read_N, exact_N)
    return code_N, y_N - read_N


@triton_jit
def _nearest_device(u: tl.tensor, BITS: tl.constexpr) -> Any:
    """Device twin of `_nearest`: int32."""
    size = tl.abs(u)
    if BITS == 2:
        count = (size > 0.9817).to(tl.int32)
    elif BITS == 3:
        count = (size > 0.5022).to(tl.int32) + (size > 1.0564).to(tl.int32)
        count += (size > 1.7491).to(tl.int32)
    else:
        tl.static_assert(BITS == 4)
        count = (size > 0.2561).to(tl.int32) + (size > 0.5121).to(tl.int32)
        count += (size > 0.7895).to(tl.int32) + (size > 1.1096).to(tl.int32)
        count += (size > 1.4723).to(tl.int32) + (size > 1.8991).to(tl.int32)
        count += (size > 2.4112).to(tl.int32)
    HALF: tl.constexpr = 1 << (BITS - 1)
    return tl.where(u < 0, HALF - 1 - count, HALF + count)


@triton_jit
def level_unit(BITS: tl.constexpr) -> Any:
    """UNITS of a width."""
    UNIT: tl.constexpr = 0.171141 if BITS == 2 else 0.0358764 if BITS == 3 else 0.0430917
    return UNIT


@triton_jit
def shaped_level(code: tl.tensor, BITS: tl.constexpr) -> Any:
    """Levels of codes (int32) in units: whole numbers, float32."""
    # The code as the low bits of 2^23, less 2^23: no conversion of integers.
    t = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    if BITS == 2:
        t -= 1.5
        level = t * (5.9156 + 0.33381 * (t * t))
    elif BITS == 3:
        t -= 3.5
        level = t * (13.725 + 0.32 * (t * t))
    else:
        tl.static_assert(BITS == 4)
        t -= 7.5
        level = t * (5.71094 + 0.0472214 * (t * t))
    # Adding 1.5 * 2^23 rounds to the nearest integer.
    return (level + 12582912.0) - 12582912.0


@triton_jit
def store_bits(
    row_ptr_N: tl.tensor,
    code_ND: tl.tensor,
    mask_N: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Device twin of `pack_bits`: int32 codes below 2 to the D/8 bytes at `row_ptr_N`."""
    EIGHTH: tl.constexpr = HEAD_DIM // 8
    NUM_ROWS: tl.constexpr = code_ND.shape[0]
    byte_E = tl.arange(0, BLOCK_D // 8)
    if HEAD_DIM == BLOCK_D:
        shift = tl.arange(0, 8)[None, :, None]
        byte_NE = tl.sum(tl.reshape(code_ND, (NUM_ROWS, 8, BLOCK_D // 8)) << shift, axis=1)
    else:
        index_NE = tl.broadcast_to(byte_E[None, :], (NUM_ROWS, BLOCK_D // 8))
        byte_NE = tl.gather(code_ND, index_NE, axis=1)
        for part in tl.static_range(1, 8):
            # Bytes past E are not stored; their index only has to be inside the tile.
            part_NE = tl.minimum(index_NE + part * EIGHTH, BLOCK_D - 1)
            byte_NE |= tl.gather(code_ND, part_NE, axis=1) << part
    mask_NE = mask_N[:, None] & (byte_E < EIGHTH)[None, :]
    tl.store(row_ptr_N[:, None] + byte_E[None, :], byte_NE.to(tl.uint8), mask=mask_NE)
