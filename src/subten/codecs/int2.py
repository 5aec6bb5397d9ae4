"""INT2: the four Lloyd-Max levels of a rotated row, and one BF16 norm (lloyd_max.py).

After the Hadamard rotation the values of a row are near to Gaussian, whatever they were: four
levels that fit a Gaussian lose half as much as four equal steps do. No zero-point, as rows have no
offset that a head's channels share.

A row of zeros has norm 0. A row with a NaN or an infinity has norm NaN and decodes to NaN as a
whole. Magnitudes above 1e38 count as 1e38, and rows below 2^-120 as zeros.

Letters: N rows, D head_dim, Q D / 4, B bytes of one row in one plane.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs import KVCodec, RowBytes
from subten.codecs.bits import (
    bf16_to_bytes,
    bytes_to_bf16,
    check_planes,
    load_bf16,
    nan_where,
    store_bf16,
)
from subten.codecs.fixed_point import round_bf16, round_bf16_device
from subten.codecs.lloyd_max import (
    INNER,
    OUTER,
    level_2bit,
    load_pairs,
    norm_of,
    norm_of_device,
    pack_pairs,
    store_pairs,
    unpack_pairs,
)
from subten.codecs.rotation import check_rotatable
from subten.kernels.triton_shim import tl, triton_jit


def _row_bytes(head_dim: int) -> RowBytes:
    check_rotatable("int2", head_dim)
    return RowBytes(codes=head_dim // 4, scale=2, zero=0)


def _encode(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_ND, norm_N1, is_outer_ND, is_finite_N1 = norm_of(x_ND)
    codes_NQ = pack_pairs(is_outer_ND | (x_ND < 0) << 1)
    norm_N2 = bf16_to_bytes(torch.where(is_finite_N1, round_bf16(norm_N1), float("nan")))
    return codes_NQ, norm_N2, norm_N2[..., :0]


def _decode(
    codes_NQ: torch.Tensor, norm_N2: torch.Tensor, zero_N0: torch.Tensor, head_dim: int
) -> torch.Tensor:
    check_planes((codes_NQ, norm_N2, zero_N0), _row_bytes(head_dim))
    level_4 = torch.tensor([INNER, OUTER, -INNER, -OUTER], device=codes_NQ.device)
    return level_4[unpack_pairs(codes_NQ).int()] * bytes_to_bf16(norm_N2)


# One program encodes the rows of its tile, each on its own: eight sums over D, then one pass over
# the codes. Writes D / 4 + 2 bytes a row.
@triton_jit
def _device_encode(
    x_ND: tl.tensor,
    page_N: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    _tables: tl.tensor,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    tl.static_assert(CODES < SCALE and SCALE < ZERO)
    x_ND, norm_N, is_outer_ND, is_bad_N = norm_of_device(x_ND, HEAD_DIM, BLOCK_D)
    norm_N = nan_where(is_bad_N, round_bf16_device(norm_N))
    code_ND = is_outer_ND.to(tl.int32) | ((x_ND < 0).to(tl.int32) << 1)
    row_ptr_N = page_N + CODES + row_N * (HEAD_DIM // 4)
    store_pairs(row_ptr_N, code_ND, mask_N, HEAD_DIM, BLOCK_D)
    store_bf16(page_N + SCALE, row_N, norm_N, mask_N)


# Levels are exact in FP16, BF16 and E4M3, so that a dot product of codes loses nothing; the norm
# acts on scores and on P, once a row. Reads D / 4 + 2 bytes a row.
@triton_jit
def _device_decode(
    page: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    _tables: tl.tensor,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    tl.static_assert(CODES < SCALE and SCALE < ZERO)
    code_ND = load_pairs(page + CODES + row_N * (HEAD_DIM // 4), mask_N, HEAD_DIM, BLOCK_D)
    mask_ND = mask_N[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    norm_N = load_bf16(page + SCALE, row_N, mask_N)
    return tl.where(mask_ND, level_2bit(code_ND), 0.0), norm_N, tl.zeros_like(norm_N)


INT2 = KVCodec(
    name="int2",
    summary="four Lloyd-Max levels after a Hadamard rotation, one BF16 norm a token and head",
    is_rotated=True,
    row_bytes=_row_bytes,
    encode=_encode,
    decode=_decode,
    device_encode=_device_encode,
    device_decode=_device_decode,
)
