"""FP8: E4M3 codes (Micikevicius et al., 2022, table 1) and one BF16 scale a row.

    scale = absmax / 448 rounded up to BF16,   code = E4M3(x / scale) to nearest, ties to even,
    x ~ code * scale.

Rounded up, so that no code lies above 448: E4M3 has no infinity, and past 464 there is only NaN.
A row of zeros has scale 0. A row with a NaN or an infinity has scale NaN and codes 0: it decodes to
NaN as a whole, never to plausible numbers. Magnitudes above 3.3e38 count as 3.3e38.

Letters: N rows, D head_dim, B bytes of one row in one plane.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs import KVCodec, RowBytes
from subten.codecs.bits import (
    FLOAT_LIMIT,
    are_finite,
    bf16_to_bytes,
    bytes_to_bf16,
    check_head_dim,
    check_planes,
    check_rows,
    divide,
    load_bf16,
    magnitude_bits,
    nan_where,
    round_bf16_up,
    round_bf16_up_device,
    store_bf16,
)
from subten.kernels.triton_shim import tl, triton_jit

E4M3_MAX = 448.0


def _row_bytes(head_dim: int) -> RowBytes:
    check_head_dim("fp8", head_dim)
    return RowBytes(codes=head_dim, scale=2, zero=0)


def _encode(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(x_ND)
    is_finite_N1 = are_finite(x_ND)
    x_ND = torch.where(is_finite_N1, x_ND, 0.0).clamp(-FLOAT_LIMIT, FLOAT_LIMIT)
    scale_N1 = round_bf16_up(divide(x_ND.abs().amax(dim=-1, keepdim=True), E4M3_MAX))
    # |x| / scale <= 448 but for the last bit of a quotient, far from the 464 where E4M3 rounds up.
    code_ND = (x_ND / torch.where(scale_N1 > 0, scale_N1, 1.0)).to(torch.float8_e4m3fn)
    scale_NB = bf16_to_bytes(torch.where(is_finite_N1, scale_N1, float("nan")))
    return code_ND.contiguous().view(torch.uint8), scale_NB, scale_NB[..., :0]


def _decode(
    codes_NB: torch.Tensor, scale_NB: torch.Tensor, zero_NB: torch.Tensor, head_dim: int
) -> torch.Tensor:
    check_planes((codes_NB, scale_NB, zero_NB), _row_bytes(head_dim))
    # E4M3 and FP16 differ in the width of the mantissa and, by 8, in the bias of the exponent. An
    # int8 widens with its sign on every upper bit; of these, bit 14 is not FP16's sign.
    half_ND = (codes_NB.contiguous().view(torch.int8).to(torch.int16) << 7) & ~0x4000
    # 256 in the scale, not in the values: one multiplication, exact.
    return half_ND.view(torch.float16).float().mul_(bytes_to_bf16(scale_NB) * 256.0)


@triton_jit
def e4m3_bits(x: tl.tensor) -> Any:
    """|x| <= 448 (float32) as the nearest E4M3 magnitude, ties to even; int32."""
    bits = magnitude_bits(x)
    # FP32 keeps 20 more mantissa bits, and its exponent bias is larger by 120.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are 2^-9, which is the last bit of 2^14: adding it rounds to a step.
    size = bits.to(tl.float32, bitcast=True)
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(size < 0.015625, small, normal)


@triton_jit
def e4m3_over_256(byte: tl.tensor) -> Any:
    """E4M3 bytes (uint8, never NaN) as float32 divided by 256, exactly.

    E4M3 and FP16 differ in the width of the mantissa and, by 8, in the bias of the exponent.
    """
    bits = byte.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


# One program encodes the rows of its tile, each on its own: a reduction over D for the scale, then
# one pass over the codes. Writes D + 2 bytes a row.
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
    d = tl.arange(0, BLOCK_D)
    x_ND = tl.where((d < HEAD_DIM)[None, :], x_ND, 0.0)
    is_bad_N = tl.max(magnitude_bits(x_ND), axis=1) >= 0x7F800000
    x_ND = tl.where(is_bad_N[:, None], 0.0, x_ND)
    x_ND = tl.minimum(tl.maximum(x_ND, -3.3e38), 3.3e38)
    scale_N = round_bf16_up_device(tl.div_rn(tl.max(tl.abs(x_ND), axis=1), 448.0))
    y_ND = tl.div_rn(x_ND, tl.where(scale_N > 0, scale_N, 1.0)[:, None])
    code_ND = e4m3_bits(y_ND) | ((y_ND.to(tl.int32, bitcast=True) >> 24) & 0x80)
    code_ptr = (page_N + CODES + row_N * HEAD_DIM)[:, None] + d[None, :]
    tl.store(code_ptr, code_ND.to(tl.uint8), mask=mask_N[:, None] & (d < HEAD_DIM)[None, :])
    store_bf16(page_N + SCALE, row_N, nan_where(is_bad_N, scale_N), mask_N)


# Codes in FP32 are exact in FP16 and BF16 too: 4 significant bits, 2^-17 to 1.75. Reads D + 2 bytes
# a row, in 16-byte loads where D is a multiple of 16.
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
    d = tl.arange(0, BLOCK_D)
    mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
    byte_ND = tl.load(page + CODES + row_N[:, None] * HEAD_DIM + d[None, :], mask=mask_ND, other=0)
    # The 256 that the codes lack is a power of two: exact in the scale, and free there.
    scale_N = load_bf16(page + SCALE, row_N, mask_N) * 256.0
    return e4m3_over_256(byte_ND), scale_N, tl.zeros_like(scale_N)


FP8 = KVCodec(
    name="fp8",
    summary="E4M3 codes, one BF16 scale a token and head",
    is_rotated=False,
    row_bytes=_row_bytes,
    encode=_encode,
    decode=_decode,
    device_encode=_device_encode,
    device_decode=_device_decode,
)
