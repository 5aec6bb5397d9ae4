"""INT8 and INT4: x ~ code * scale + min, per row or per group of channels.

Letters: N rows, D head_dim, G groups of a row, C channels of a group, B bytes of one row in one
plane.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from subten.codecs import KVCodec, RowBytes
from subten.codecs.bits import (
    FLOAT_LIMIT,
    bf16_to_bytes,
    bytes_to_bf16,
    check_head_dim,
    check_rows,
    load_bf16,
    load_nibbles,
    magnitude_bits,
    nan_where,
    pack_nibbles,
    round_bf16_down,
    round_bf16_down_device,
    round_bf16_up,
    round_bf16_up_device,
    split_groups,
    store_bf16,
    store_nibbles,
    unpack_nibbles,
)
from subten.codecs.rotation import check_rotatable
from subten.kernels.triton_shim import tl, triton_jit


def _row_bytes_int8(head_dim: int) -> RowBytes:
    check_head_dim("int8", head_dim)
    return RowBytes(codes=head_dim, scale=2, zero=2)


def _row_bytes_int4(head_dim: int) -> RowBytes:
    check_rotatable("int4", head_dim)
    return RowBytes(codes=head_dim // 2, scale=2, zero=2)


def _row_bytes_grouped(head_dim: int, *, group: int) -> RowBytes:
    check_head_dim(f"int4_g{group}", head_dim)
    num_groups = -(-head_dim // group)
    return RowBytes(codes=head_dim // 2, scale=2 * num_groups, zero=2 * num_groups)


def _encode(
    x_ND: torch.Tensor, *, bits: int, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(x_ND)
    head_dim, levels = x_ND.shape[-1], 2**bits - 1
    x_NGC = split_groups(x_ND, group or head_dim)
    is_finite_NG1 = x_NGC.isfinite().all(dim=-1, keepdim=True)
    x_NGC = torch.where(is_finite_NG1, x_NGC, 0.0).clamp(-FLOAT_LIMIT, FLOAT_LIMIT)
    low_NG1 = round_bf16_down(x_NGC.amin(dim=-1, keepdim=True))
    # Halves: the range of two finite numbers may exceed the largest one.
    half_range_NG1 = x_NGC.amax(dim=-1, keepdim=True) / 2 - low_NG1 / 2
    scale_NG1 = round_bf16_up(half_range_NG1 / (levels / 2))
    divisor_NG1 = torch.where(scale_NG1 > 0, scale_NG1, 1.0) / 2
    code_NGC = ((x_NGC / 2 - low_NG1 / 2) / divisor_NG1).round().to(torch.uint8)
    code_ND = code_NGC.flatten(-2)[..., :head_dim]
    scale_NG1, low_NG1 = (
        torch.where(is_finite_NG1, t, float("nan")) for t in (scale_NG1, low_NG1)
    )
    return (
        pack_nibbles(code_ND) if bits == 4 else code_ND.contiguous(),
        bf16_to_bytes(scale_NG1.squeeze(-1)),
        bf16_to_bytes(low_NG1.squeeze(-1)),
    )


def _decode(
    codes_NB: torch.Tensor,
    scale_NB: torch.Tensor,
    zero_NB: torch.Tensor,
    head_dim: int,
    *,
    bits: int,
    group: int | None = None,
) -> torch.Tensor:
    code_ND = unpack_nibbles(codes_NB) if bits == 4 else codes_NB
    code_NGC = split_groups(code_ND.float(), group or head_dim)
    scale_NG1, low_NG1 = (bytes_to_bf16(t).unsqueeze(-1) for t in (scale_NB, zero_NB))
    # Counted from the middle level: the largest code times the largest scale would overflow.
    middle = (2**bits - 1) / 2
    x_NGC = torch.addcmul(low_NG1 + middle * scale_NG1, code_NGC - middle, scale_NG1)
    return x_NGC.flatten(-2)[..., :head_dim]


@triton_jit
def _device_encode(
    x_ND: Any,
    page_N: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    LEVELS: tl.constexpr = (1 << BITS) - 1
    NUM_ROWS: tl.constexpr = x_ND.shape[0]
    CHANNELS: tl.constexpr = min(GROUP, BLOCK_D)
    BLOCK_G: tl.constexpr = BLOCK_D // CHANNELS
    NUM_GROUPS: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    d, g = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    is_inside_1GC = tl.reshape(d < HEAD_DIM, (1, BLOCK_G, CHANNELS))
    x_NGC = tl.reshape(x_ND, (NUM_ROWS, BLOCK_G, CHANNELS))
    x_NGC = tl.where(is_inside_1GC, x_NGC, 0.0)
    is_bad_NG = tl.max(magnitude_bits(x_NGC), axis=2) >= 0x7F800000
    x_NGC = tl.where(is_bad_NG[:, :, None], 0.0, x_NGC)
    x_NGC = tl.minimum(tl.maximum(x_NGC, -3.3e38), 3.3e38)
    low_NG = tl.min(tl.where(is_inside_1GC, x_NGC, 3.3e38), axis=2)
    high_NG = tl.max(tl.where(is_inside_1GC, x_NGC, -3.3e38), axis=2)
    low_NG = round_bf16_down_device(low_NG)
    scale_NG = tl.div_rn(high_NG * 0.5 - low_NG * 0.5, LEVELS / 2)
    scale_NG = round_bf16_up_device(scale_NG)
    divisor_NG = tl.where(scale_NG > 0, scale_NG, 1.0) * 0.5
    step_NGC = tl.div_rn(x_NGC * 0.5 - (low_NG * 0.5)[:, :, None], divisor_NG[:, :, None])
    # The last bit of 2^23 is 1: adding it rounds to the nearest integer, ties to even.
    code_NGC = (step_NGC + 8388608.0).to(tl.int32, bitcast=True) & LEVELS
    code_ND = tl.reshape(code_NGC, (NUM_ROWS, BLOCK_D))
    if BITS == 4:
        row_ptr_N = page_N + CODES + row_N * (HEAD_DIM // 2)
        store_nibbles(row_ptr_N, code_ND, mask_N, HEAD_DIM, BLOCK_D)
    else:
        code_ptr = (page_N + CODES + row_N * HEAD_DIM)[:, None] + d[None, :]
        tl.store(code_ptr, code_ND.to(tl.uint8), mask=mask_N[:, None] & (d < HEAD_DIM)[None, :])
    mask_NG = mask_N[:, None] & (g < NUM_GROUPS)[None, :]
    group_NG = (row_N * (2 * NUM_GROUPS))[:, None] + (2 * g)[None, :]
    store_bf16(page_N[:, None] + SCALE + group_NG, nan_where(is_bad_NG, scale_NG), mask_NG)
    store_bf16(page_N[:, None] + ZERO + group_NG, nan_where(is_bad_NG, low_NG), mask_NG)


@triton_jit
def _device_decode_row(
    page: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
) -> Any:
    d = tl.arange(0, BLOCK_D)
    if BITS == 4:
        row_ptr_N = page + CODES + row_N * (HEAD_DIM // 2)
        code_ND = load_nibbles(row_ptr_N, mask_N, HEAD_DIM, BLOCK_D)
    else:
        code_ptr = page + CODES + row_N[:, None] * HEAD_DIM + d[None, :]
        mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
        code_ND = tl.load(code_ptr, mask=mask_ND, other=0).to(tl.int32)
    # The code as the low bits of 2^23, less 2^23: cheaper than an integer conversion.
    code_ND = (code_ND | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    scale_N = load_bf16(page + SCALE + row_N * 2, mask_N)
    return code_ND, scale_N, load_bf16(page + ZERO + row_N * 2, mask_N)


@triton_jit
def _device_decode_groups(
    page: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    NUM_ROWS: tl.constexpr = row_N.shape[0]
    CHANNELS: tl.constexpr = min(GROUP, BLOCK_D)
    BLOCK_G: tl.constexpr = BLOCK_D // CHANNELS
    NUM_GROUPS: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    row_ptr_N = page + CODES + row_N * (HEAD_DIM // 2)
    code_ND = load_nibbles(row_ptr_N, mask_N, HEAD_DIM, BLOCK_D)
    # The code as bits 4..7 of 2^19, less 2^19 + 7.5: counted from the middle level, as in `_decode`.
    code_ND = ((code_ND << 4) | 0x49000000).to(tl.float32, bitcast=True) - 524295.5
    g = tl.arange(0, BLOCK_G)
    mask_NG = mask_N[:, None] & (g < NUM_GROUPS)[None, :]
    group_ptr = page + row_N[:, None] * (2 * NUM_GROUPS) + (2 * g)[None, :]
    scale_NG = load_bf16(group_ptr + SCALE, mask_NG)
    middle_NG = load_bf16(group_ptr + ZERO, mask_NG) + 7.5 * scale_NG
    code_NGC = tl.reshape(code_ND, (NUM_ROWS, BLOCK_G, CHANNELS))
    value_NGC = code_NGC * scale_NG[:, :, None] + middle_NG[:, :, None]
    value_ND = tl.reshape(value_NGC, (NUM_ROWS, BLOCK_D))
    value_ND = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], value_ND, 0.0)
    return value_ND, mask_N.to(tl.float32), tl.zeros_like(mask_N.to(tl.float32))


@triton_jit
def _device_encode_int8(
    x_ND: Any,
    page_N: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    _device_encode(
        x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 8, BLOCK_D
    )


@triton_jit
def _device_decode_int8(
    page: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    return _device_decode_row(
        page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 8
    )


@triton_jit
def _device_encode_int4(
    x_ND: Any,
    page_N: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    _device_encode(
        x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4, BLOCK_D
    )


@triton_jit
def _device_decode_int4(
    page: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    return _device_decode_row(
        page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4
    )


@triton_jit
def _device_encode_int4_g32(
    x_ND: Any,
    page_N: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    _device_encode(
        x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4, 32
    )


@triton_jit
def _device_decode_int4_g32(
    page: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    return _device_decode_groups(
        page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 32
    )


@triton_jit
def _device_encode_int4_g64(
    x_ND: Any,
    page_N: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    _device_encode(
        x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4, 64
    )


@triton_jit
def _device_decode_int4_g64(
    page: Any,
    row_N: Any,
    mask_N: Any,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    return _device_decode_groups(
        page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 64
    )


INT8 = KVCodec(
    name="int8",
    summary="asymmetric INT8, one BF16 scale and minimum a token and head",
    is_rotated=False,
    row_bytes=_row_bytes_int8,
    encode=functools.partial(_encode, bits=8),
    decode=functools.partial(_decode, bits=8),
    device_encode=_device_encode_int8,
    device_decode=_device_decode_int8,
)

INT4 = KVCodec(
    name="int4",
    summary="asymmetric INT4 after a Hadamard rotation, one BF16 scale and minimum a token and head",
    is_rotated=True,
    row_bytes=_row_bytes_int4,
    encode=functools.partial(_encode, bits=4),
    decode=functools.partial(_decode, bits=4),
    device_encode=_device_encode_int4,
    device_decode=_device_decode_int4,
)

INT4_G32 = KVCodec(
    name="int4_g32",
    summary="asymmetric INT4, a BF16 scale and minimum per 32 channels",
    is_rotated=False,
    row_bytes=functools.partial(_row_bytes_grouped, group=32),
    encode=functools.partial(_encode, bits=4, group=32),
    decode=functools.partial(_decode, bits=4, group=32),
    device_encode=_device_encode_int4_g32,
    device_decode=_device_decode_int4_g32,
)

INT4_G64 = KVCodec(
    name="int4_g64",
    summary="asymmetric INT4, a BF16 scale and minimum per 64 channels",
    is_rotated=False,
    row_bytes=functools.partial(_row_bytes_grouped, group=64),
    encode=functools.partial(_encode, bits=4, group=64),
    decode=functools.partial(_decode, bits=4, group=64),
    device_encode=_device_encode_int4_g64,
    device_decode=_device_decode_int4_g64,
)
