"""FP4: E2M1 codes with an E4M3 scale per 16 channels (fp4) or a power of two per 32 (fp4_mx).

E2M1 holds 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign; nearest, ties to the even code; bit 3 is the sign,
bits 2..0 the magnitude. Codes are packed in nibbles (bits.pack_nibbles).

fp4, after NVFP4 (NVIDIA, "Introducing NVFP4", 2025): x ~ code * E4M3 scale of 16 channels * 2^e.
NVFP4's second level is one FP32 scale a tensor; tokens that are written one by one have no tensor,
so the second level is a power of two a row: E8M0 (a byte, 2^(byte - 127)) in the zero plane, the
least under which no E4M3 scale exceeds 448. Scales round to nearest, as NVFP4's do: the largest
value may lie up to 6.375 times its scale and is stored as 6, nearer than half of the step below. In
E4M3's subnormal range, where nearest could halve a scale, they round up.

fp4_mx, after MXFP4 (OCP Microscaling Formats v1.0, 2023, sections 5.3 and 6.3): x ~ code * E8M0
scale of 32 channels. The specification's conversion divides the largest power of two <= absmax by
that of E2M1 (4), so that values between 6 and 8 scales saturate; here the exponent is one higher
where that would happen. The bytes are valid MXFP4 either way.

A last group may be ragged, and has its own scale. A row (fp4) or group (fp4_mx) with a NaN or an
infinity has the E8M0 byte 255, which is NaN: it decodes to NaN as a whole. Magnitudes above 2.97e38
count as 2.97e38, which is within half of the step there.

Letters: N rows, D head_dim, G groups of a row, C channels of a group, B bytes of one row in one
plane.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs import KVCodec, RowBytes
from subten.codecs.bits import (
    are_finite,
    check_head_dim,
    check_planes,
    check_rows,
    divide,
    load_nibbles,
    magnitude_bits,
    nan_where,
    pack_nibbles,
    split_groups,
    store_nibbles,
    unpack_nibbles,
)
from subten.codecs.fp8 import e4m3_bits, e4m3_over_256
from subten.kernels.triton_shim import tl, triton_jit

E2M1_MAX = 6.0
GROUP, GROUP_MX = 16, 32
LIMIT = 2.97e38
"""Larger magnitudes are taken as this: the value 6 times a scale rounded up must not overflow."""

MIN_NORMAL_E4M3, STEPS_BELOW_E4M3 = 2.0**-6, 512.0
E8M0_NAN = 255


def _row_bytes(head_dim: int) -> RowBytes:
    check_head_dim("fp4", head_dim)
    return RowBytes(codes=head_dim // 2, scale=-(-head_dim // GROUP), zero=1)


def _row_bytes_mx(head_dim: int) -> RowBytes:
    check_head_dim("fp4_mx", head_dim)
    return RowBytes(codes=head_dim // 2, scale=-(-head_dim // GROUP_MX), zero=0)


def _encode(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(x_ND)
    head_dim = x_ND.shape[-1]
    is_finite_N1 = are_finite(x_ND)
    x_ND = torch.where(is_finite_N1, x_ND, 0.0).clamp(-LIMIT, LIMIT)
    # 6 * 448 * 2^exponent is the largest value: 1.3125 * 2^11, so a mantissa above .3125 carries.
    exponent_N1 = _exponent(x_ND.abs().amax(dim=-1, keepdim=True), carry=0x57FFFF, emax=11)
    x_NGC = split_groups(x_ND * _power_of_two(254 - exponent_N1), GROUP)
    scale_NG1 = _round_e4m3(divide(x_NGC.abs().amax(dim=-1, keepdim=True), E2M1_MAX))
    value_NG1 = scale_NG1.float()
    code_NGC = _round_e2m1(x_NGC / torch.where(value_NG1 > 0, value_NG1, 1.0))
    return (
        pack_nibbles(code_NGC.flatten(-2)[..., :head_dim]),
        scale_NG1.squeeze(-1).contiguous().view(torch.uint8),
        torch.where(is_finite_N1, exponent_N1, E8M0_NAN).to(torch.uint8),
    )


def _decode(
    codes_NB: torch.Tensor, scale_NB: torch.Tensor, zero_NB: torch.Tensor, head_dim: int
) -> torch.Tensor:
    check_planes((codes_NB, scale_NB, zero_NB), _row_bytes(head_dim))
    value_NGC = split_groups(_e2m1_values(unpack_nibbles(codes_NB)), GROUP)
    scale_NG1 = scale_NB.contiguous().view(torch.float8_e4m3fn).float().unsqueeze(-1)
    return (value_NGC * scale_NG1).flatten(-2)[..., :head_dim] * _e8m0_values(zero_NB)


def _encode_mx(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(x_ND)
    head_dim = x_ND.shape[-1]
    x_NGC = split_groups(x_ND, GROUP_MX)
    is_finite_NG1 = are_finite(x_NGC)
    x_NGC = torch.where(is_finite_NG1, x_NGC, 0.0).clamp(-LIMIT, LIMIT)
    # 6 * 2^exponent is the largest value: 1.5 * 2^2, so a mantissa above .5 carries.
    exponent_NG1 = _exponent(x_NGC.abs().amax(dim=-1, keepdim=True), carry=0x3FFFFF, emax=2)
    code_NGC = _round_e2m1(x_NGC * _power_of_two(254 - exponent_NG1))
    scale_NG1 = torch.where(is_finite_NG1, exponent_NG1, E8M0_NAN).to(torch.uint8)
    codes_NB = pack_nibbles(code_NGC.flatten(-2)[..., :head_dim])
    return codes_NB, scale_NG1.squeeze(-1), codes_NB[..., :0]


def _decode_mx(
    codes_NB: torch.Tensor, scale_NB: torch.Tensor, zero_NB: torch.Tensor, head_dim: int
) -> torch.Tensor:
    check_planes((codes_NB, scale_NB, zero_NB), _row_bytes_mx(head_dim))
    value_NGC = split_groups(_e2m1_values(unpack_nibbles(codes_NB)), GROUP_MX)
    return (value_NGC * _e8m0_values(scale_NB).unsqueeze(-1)).flatten(-2)[..., :head_dim]


def _exponent(absmax: torch.Tensor, *, carry: int, emax: int) -> torch.Tensor:
    """Biased exponent (1..253) of the least power of two under which nothing saturates; int32."""
    return (((absmax.view(torch.int32) + carry) >> 23) - emax).clamp(min=1)


def _power_of_two(biased_exponent: torch.Tensor) -> torch.Tensor:
    """2 ** (biased_exponent - 127) in float32, for 1..254."""
    return (biased_exponent << 23).view(torch.float32)


def _e8m0_values(scale_NG: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (1..254, or 255 for NaN) as float32."""
    value_NG = _power_of_two(scale_NG.to(torch.int32))
    return torch.where(scale_NG == E8M0_NAN, float("nan"), value_NG)


def _round_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3; below its normal range up, where nearest could halve a scale and saturate."""
    is_small = scale < MIN_NORMAL_E4M3
    up = (scale * STEPS_BELOW_E4M3).ceil() / STEPS_BELOW_E4M3
    return torch.where(is_small, up, scale).to(torch.float8_e4m3fn)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 (ties to the even code) as a nibble: bit 3 sign, bits 2..0 magnitude; uint8."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for reaches in (
        size >= 0.75,
        size > 1.25,
        size >= 1.75,
        size > 2.5,
        size >= 3.5,
        size > 5.0,
    ):
        code = code + reaches
    return code | ((x < 0).to(torch.uint8) << 3)


def _e2m1_values(code: torch.Tensor) -> torch.Tensor:
    """Nibbles (uint8) as float32."""
    # E2M1 and FP16 differ in the width of the mantissa and, by 14, in the bias of the exponent;
    # a table of 16 values, gathered, takes six times as long on a CPU.
    half = code.to(torch.int16)
    half = ((half & 7) << 9) | ((half << 12) & -0x8000)
    return half.view(torch.float16).float().mul_(2.0**14)


@triton_jit
def _exponent_device(absmax: tl.tensor, CARRY: tl.constexpr, EMAX: tl.constexpr) -> Any:
    """Device twin of `_exponent`."""
    return tl.maximum(((absmax.to(tl.int32, bitcast=True) + CARRY) >> 23) - EMAX, 1)


@triton_jit
def _power_of_two_device(biased_exponent: tl.tensor) -> Any:
    """Device twin of `_power_of_two`; 0 for 0."""
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton_jit
def _e2m1_bits(x: tl.tensor) -> Any:
    """Device twin of `_round_e2m1`; int32."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x < 0).to(tl.int32) << 3)


@triton_jit
def _e2m1_over_2_to_14(code: tl.tensor) -> Any:
    """Nibbles (int32) as float32 divided by 2^14, exactly.

    E2M1 and FP16 differ in the width of the mantissa and, by 14, in the bias of the exponent.
    """
    half = ((code & 8) << 12) | ((code & 7) << 9)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


# One program encodes the rows of its tile, each on its own: absmax of a row, absmax of the groups
# of the tile as [N, G, 16], then one pass over the codes. Writes D / 2 + G + 1 bytes a row.
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
    NUM_ROWS: tl.constexpr = x_ND.shape[0]
    BLOCK_G: tl.constexpr = BLOCK_D // 16
    NUM_GROUPS: tl.constexpr = (HEAD_DIM + 15) // 16
    x_ND = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], x_ND, 0.0)
    is_bad_N = tl.max(magnitude_bits(x_ND), axis=1) >= 0x7F800000
    x_ND = tl.where(is_bad_N[:, None], 0.0, x_ND)
    x_ND = tl.minimum(tl.maximum(x_ND, -2.97e38), 2.97e38)
    exponent_N = _exponent_device(tl.max(tl.abs(x_ND), axis=1), 0x57FFFF, 11)
    x_ND = x_ND * _power_of_two_device(254 - exponent_N)[:, None]
    x_NGC = tl.reshape(x_ND, (NUM_ROWS, BLOCK_G, 16))
    scale_NG = tl.div_rn(tl.max(tl.abs(x_NGC), axis=2), 6.0)
    byte_NG = e4m3_bits(scale_NG)
    is_short_NG = e4m3_over_256(byte_NG) * 256.0 < scale_NG
    byte_NG += (is_short_NG & (scale_NG < 0.015625)).to(tl.int32)
    value_NG = e4m3_over_256(byte_NG) * 256.0
    y_NGC = tl.div_rn(x_NGC, tl.where(value_NG > 0, value_NG, 1.0)[:, :, None])
    code_ND = tl.reshape(_e2m1_bits(y_NGC), (NUM_ROWS, BLOCK_D))
    store_nibbles(page_N + CODES + row_N * (HEAD_DIM // 2), code_ND, mask_N, HEAD_DIM, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    scale_ptr = (page_N + SCALE + row_N * NUM_GROUPS)[:, None] + g[None, :]
    tl.store(scale_ptr, byte_NG.to(tl.uint8), mask=mask_N[:, None] & (g < NUM_GROUPS)[None, :])
    exponent_N = tl.where(is_bad_N, 255, exponent_N)
    tl.store(page_N + ZERO + row_N, exponent_N.to(tl.uint8), mask=mask_N)


# Codes are E2M1 times E4M3: 6 significant bits, 2^-10 to 2688, exact in FP16 and BF16 too; the
# row's power of two acts on scores and on P. Reads D / 2 + G + 1 bytes a row.
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
    NUM_ROWS: tl.constexpr = row_N.shape[0]
    BLOCK_G: tl.constexpr = BLOCK_D // 16
    NUM_GROUPS: tl.constexpr = (HEAD_DIM + 15) // 16
    code_ND = load_nibbles(page + CODES + row_N * (HEAD_DIM // 2), mask_N, HEAD_DIM, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    scale_ptr = page + SCALE + row_N[:, None] * NUM_GROUPS + g[None, :]
    mask_NG = mask_N[:, None] & (g < NUM_GROUPS)[None, :]
    # 2^22: what E2M1 over 2^14 and E4M3 over 2^8 lack.
    scale_NG = e4m3_over_256(tl.load(scale_ptr, mask=mask_NG, other=0)) * 4194304.0
    value_NGC = tl.reshape(_e2m1_over_2_to_14(code_ND), (NUM_ROWS, BLOCK_G, 16))
    value_ND = tl.reshape(value_NGC * scale_NG[:, :, None], (NUM_ROWS, BLOCK_D))
    exponent_N = tl.load(page + ZERO + row_N, mask=mask_N, other=0).to(tl.int32)
    scale_N = nan_where(exponent_N == 255, _power_of_two_device(exponent_N))
    return value_ND, scale_N, tl.zeros_like(scale_N)


# As `_device_encode`, without the level of the row, and without a division.
@triton_jit
def _device_encode_mx(
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
    NUM_ROWS: tl.constexpr = x_ND.shape[0]
    CHANNELS: tl.constexpr = min(32, BLOCK_D)
    BLOCK_G: tl.constexpr = BLOCK_D // CHANNELS
    NUM_GROUPS: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    x_ND = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], x_ND, 0.0)
    x_NGC = tl.reshape(x_ND, (NUM_ROWS, BLOCK_G, CHANNELS))
    is_bad_NG = tl.max(magnitude_bits(x_NGC), axis=2) >= 0x7F800000
    x_NGC = tl.where(is_bad_NG[:, :, None], 0.0, x_NGC)
    x_NGC = tl.minimum(tl.maximum(x_NGC, -2.97e38), 2.97e38)
    exponent_NG = _exponent_device(tl.max(tl.abs(x_NGC), axis=2), 0x3FFFFF, 2)
    y_NGC = x_NGC * _power_of_two_device(254 - exponent_NG)[:, :, None]
    code_ND = tl.reshape(_e2m1_bits(y_NGC), (NUM_ROWS, BLOCK_D))
    store_nibbles(page_N + CODES + row_N * (HEAD_DIM // 2), code_ND, mask_N, HEAD_DIM, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    scale_ptr = (page_N + SCALE + row_N * NUM_GROUPS)[:, None] + g[None, :]
    exponent_NG = tl.where(is_bad_NG, 255, exponent_NG)
    tl.store(scale_ptr, exponent_NG.to(tl.uint8), mask=mask_N[:, None] & (g < NUM_GROUPS)[None, :])


# Values, not codes: scales along the head dimension cannot act on a whole row.
@triton_jit
def _device_decode_mx(
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
    NUM_ROWS: tl.constexpr = row_N.shape[0]
    CHANNELS: tl.constexpr = min(32, BLOCK_D)
    BLOCK_G: tl.constexpr = BLOCK_D // CHANNELS
    NUM_GROUPS: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    code_ND = load_nibbles(page + CODES + row_N * (HEAD_DIM // 2), mask_N, HEAD_DIM, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    scale_ptr = page + SCALE + row_N[:, None] * NUM_GROUPS + g[None, :]
    mask_NG = mask_N[:, None] & (g < NUM_GROUPS)[None, :]
    exponent_NG = tl.load(scale_ptr, mask=mask_NG, other=0).to(tl.int32)
    scale_NG = nan_where(exponent_NG == 255, _power_of_two_device(exponent_NG))
    # 2^14 apart: with the largest scales their product would overflow.
    value_NGC = tl.reshape(_e2m1_over_2_to_14(code_ND) * 16384.0, (NUM_ROWS, BLOCK_G, CHANNELS))
    value_ND = tl.reshape(value_NGC * scale_NG[:, :, None], (NUM_ROWS, BLOCK_D))
    value_ND = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], value_ND, 0.0)
    return value_ND, mask_N.to(tl.float32), tl.zeros_like(mask_N.to(tl.float32))


FP4 = KVCodec(
    name="fp4",
    summary="E2M1, an E4M3 scale per 16 channels and a power of two a token and head",
    is_rotated=False,
    row_bytes=_row_bytes,
    encode=_encode,
    decode=_decode,
    device_encode=_device_encode,
    device_decode=_device_decode,
)

FP4_MX = KVCodec(
    name="fp4_mx",
    summary="E2M1, a power of two per 32 channels (OCP MXFP4)",
    is_rotated=False,
    row_bytes=_row_bytes_mx,
    encode=_encode_mx,
    decode=_decode_mx,
    device_encode=_device_encode_mx,
    device_decode=_device_decode_mx,
)
