"""Keys at 2, 3 or 4 bits, each channel's error fed into the channels after it.

    u_i = y_i + sum_{j<i} e_j M_ji,    code_i the level nearest to u_i,    e_j = y_j - level_j

with y the row over its root mean square, which is stored in a byte (norm_byte.py). M, of each layer
and KV head, is the Cholesky factor of what queries feel, as in GPTQ (Frantar et al., 2023) for
weights: the error that is left falls where they do not look. Decoding knows nothing of it, and
without M codes are simply the nearest.

Levels are odd cubics, t (a + b t^2) of t = code - (2^w - 1) / 2, fitted to a unit Gaussian: they
lose 2 % more than the best 16 levels (Max, 1960), .2 % more than the best 8, and take three
operations instead of a table. They are those of least squares over 1 - D, D their error: read so,
<x, decoded> is |x|^2 in the mean. Thresholds are half-way between levels of least squares. Levels
are BF16 numbers, so that a dot product of levels loses nothing.

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

import torch

from subten.codecs.bits import are_finite, check_rows
from subten.codecs.fixed_point import round_bf16, to_whole
from subten.codecs.lloyd_max import LIMIT, pack_pairs, unpack_pairs
from subten.codecs.norm_byte import decode_norm, encode_norm

WIDTHS = (2, 3, 4)
"""Bits of a channel."""

BIAS = 128
"""Norms from 2^-8 to 2^7.9."""

COEFFICIENTS = {2: (1.01175, 0.0574407), 3: (0.48836, 0.0120003), 4: (0.24286, 0.002118)}
"""a and b of the levels of each width, before they are rounded to BF16."""

THRESHOLDS = {
    2: (0.9816,),
    3: (0.4917, 1.053, 1.7532),
    4: (0.2442, 0.5009, 0.7829, 1.1026, 1.4726, 1.9055, 2.414),
}
"""Magnitudes from which on the next level is the nearest."""


@functools.cache
def levels(bits: int, device: torch.device) -> torch.Tensor:
    """Levels of a width, float32 [K], ascending, BF16 numbers."""
    with torch.inference_mode(False):
        a, b = COEFFICIENTS[bits]
        t_K = torch.arange(2**bits, dtype=torch.float32) - (2**bits - 1) / 2
        return round_bf16(t_K * (a + b * t_K * t_K)).to(device)


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
    code_ND = unpack_pairs(low_NQ)
    if bits > 2:
        code_ND = code_ND + 4 * (unpack_bits(high_NB) if bits == 3 else unpack_pairs(high_NB))
    return levels(bits, low_NQ.device)[code_ND.int()] * decode_norm(norm_N, BIAS)[..., None]


def outliers_of(y_TGD: torch.Tensor, outlier_GO: torch.Tensor) -> torch.Tensor:
    """The chosen channels of rows, [T, G, O]."""
    return y_TGD.gather(-1, outlier_GO.long().expand(len(y_TGD), -1, -1))


def pack_bits(code_ND: torch.Tensor) -> torch.Tensor:
    """[N, D] integers below 2 -> [N, E] uint8: channel i + b D/8 in bit b of byte i."""
    code_N8E = code_ND.to(torch.uint8).unflatten(-1, (8, -1))
    shift_81 = torch.arange(8, dtype=torch.uint8, device=code_ND.device)[:, None]
    return (code_N8E << shift_81).sum(dim=-2, dtype=torch.uint8)


def unpack_bits(byte_NE: torch.Tensor) -> torch.Tensor:
    """[N, E] uint8 -> [N, D] uint8 below 2; inverse of `pack_bits`."""
    shift_81 = torch.arange(8, dtype=torch.uint8, device=byte_NE.device)[:, None]
    return (byte_NE[..., None, :] >> shift_81 & 1).flatten(-2)


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
    edge_K = torch.tensor(THRESHOLDS[bits], device=y_TGD.device)
    if feedback_GDD is None:
        return _nearest(y_TGD, edge_K)
    level_K = levels(bits, y_TGD.device)
    y_DTG, feedback_DDG = y_TGD.movedim(-1, 0).contiguous(), feedback_GDD.movedim(0, -1)
    want_DTG = y_DTG.clone()
    code_DTG = torch.empty_like(y_DTG, dtype=torch.uint8)
    for i in range(len(y_DTG)):
        code_DTG[i] = _nearest(want_DTG[i], edge_K)
        read_TG = level_K[code_DTG[i].int()]
        if exact_TGD is not None:
            read_TG = torch.where(exact_TGD[..., i].isnan(), read_TG, exact_TGD[..., i])
        want_DTG[i + 1 :] += (y_DTG[i] - read_TG) * feedback_DDG[i, i + 1 :, None]
    return code_DTG.movedim(0, -1)


def _nearest(u: torch.Tensor, edge_K: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest levels: magnitudes on an edge go inwards, 0 is positive."""
    half = len(edge_K) + 1
    size = torch.bucketize(u.abs(), edge_K, out_int32=True)
    return torch.where(u < 0, half - 1 - size, half + size).to(torch.uint8)
