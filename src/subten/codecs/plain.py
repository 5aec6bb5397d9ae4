"""Plain rows: FP32 and BF16 values, little endian, without metadata; the yardstick.

FP32 keeps every bit. BF16 rounds to nearest, ties to even, except that a finite value above BF16's
largest becomes the largest, not infinity. NaN and infinities stay what they are, each in its place.

Letters: N rows, D head_dim, B bytes of one row in one plane.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs import KVCodec, RowBytes
from subten.codecs.bits import check_head_dim, check_planes, check_rows, load_bf16, magnitude_bits
from subten.kernels.triton_shim import tl, triton_jit

BF16_MAX = torch.finfo(torch.bfloat16).max


def _no_metadata(codes_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return codes_NB, codes_NB[..., :0], codes_NB[..., :0]


def _row_bytes_fp32(head_dim: int) -> RowBytes:
    check_head_dim("fp32", head_dim)
    return RowBytes(codes=4 * head_dim, scale=0, zero=0)


def _row_bytes_bf16(head_dim: int) -> RowBytes:
    check_head_dim("bf16", head_dim)
    return RowBytes(codes=2 * head_dim, scale=0, zero=0)


def _encode_fp32(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(x_ND)
    return _no_metadata(x_ND.contiguous().view(torch.uint8))


def _decode_fp32(
    codes_NB: torch.Tensor, scale_NB: torch.Tensor, zero_NB: torch.Tensor, head_dim: int
) -> torch.Tensor:
    check_planes((codes_NB, scale_NB, zero_NB), _row_bytes_fp32(head_dim))
    return codes_NB.view(torch.float32)


def _encode_bf16(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(x_ND)
    # Above BF16's largest value nearest rounding alone would give infinity.
    x_ND = torch.where(x_ND.isinf(), x_ND, x_ND.clamp(-BF16_MAX, BF16_MAX))
    return _no_metadata(x_ND.to(torch.bfloat16).contiguous().view(torch.uint8))


def _decode_bf16(
    codes_NB: torch.Tensor, scale_NB: torch.Tensor, zero_NB: torch.Tensor, head_dim: int
) -> torch.Tensor:
    check_planes((codes_NB, scale_NB, zero_NB), _row_bytes_bf16(head_dim))
    return codes_NB.view(torch.bfloat16).float()


@triton_jit
def _device_encode_fp32(
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
    tl.static_assert(CODES < SCALE and SCALE <= ZERO)
    d = tl.arange(0, BLOCK_D)
    value_ptr = (page_N + CODES).to(tl.pointer_type(tl.float32))[:, None]
    value_ptr += row_N[:, None] * HEAD_DIM + d[None, :]
    tl.store(value_ptr, x_ND, mask=mask_N[:, None] & (d < HEAD_DIM)[None, :])


@triton_jit
def _device_decode_fp32(
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
    tl.static_assert(CODES < SCALE and SCALE <= ZERO)
    d = tl.arange(0, BLOCK_D)
    value_ptr = (page + CODES).to(tl.pointer_type(tl.float32))
    mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
    code_ND = tl.load(value_ptr + row_N[:, None] * HEAD_DIM + d[None, :], mask=mask_ND, other=0.0)
    return code_ND, mask_N.to(tl.float32), tl.zeros_like(mask_N.to(tl.float32))


@triton_jit
def _device_encode_bf16(
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
    tl.static_assert(CODES < SCALE and SCALE <= ZERO)
    d = tl.arange(0, BLOCK_D)
    size_ND = magnitude_bits(x_ND)
    half_ND = (size_ND + 0x7FFF + ((size_ND >> 16) & 1)) >> 16
    half_ND = tl.where(size_ND < 0x7F800000, tl.minimum(half_ND, 0x7F7F), 0x7F80)
    half_ND = tl.where(size_ND > 0x7F800000, 0x7FC0, half_ND)
    half_ND = half_ND | ((x_ND.to(tl.int32, bitcast=True) >> 16) & 0x8000)
    value_ptr = (page_N + CODES).to(tl.pointer_type(tl.uint16))[:, None]
    value_ptr += row_N[:, None] * HEAD_DIM + d[None, :]
    tl.store(value_ptr, half_ND.to(tl.uint16), mask=mask_N[:, None] & (d < HEAD_DIM)[None, :])


@triton_jit
def _device_decode_bf16(
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
    tl.static_assert(CODES < SCALE and SCALE <= ZERO)
    d = tl.arange(0, BLOCK_D)
    mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
    code_ND = load_bf16(page + CODES, row_N[:, None] * HEAD_DIM + d[None, :], mask_ND)
    return code_ND, mask_N.to(tl.float32), tl.zeros_like(mask_N.to(tl.float32))


FP32 = KVCodec(
    name="fp32",
    summary="float32 as it is, for tests and references",
    is_rotated=False,
    row_bytes=_row_bytes_fp32,
    encode=_encode_fp32,
    decode=_decode_fp32,
    device_encode=_device_encode_fp32,
    device_decode=_device_decode_fp32,
)

BF16 = KVCodec(
    name="bf16",
    summary="BF16, the yardstick",
    is_rotated=False,
    row_bytes=_row_bytes_bf16,
    encode=_encode_bf16,
    decode=_decode_bf16,
    device_encode=_device_encode_bf16,
    device_decode=_device_decode_bf16,
)
