"""INT8 and INT4: x ~ code * scale + min, per row or per group of channels.

    min   = min(x) rounded down to BF16,   scale = (max(x) - min) / (2^b - 1) rounded up to BF16,
    code  = (x - min) / scale to the nearest integer, ties to even.

Rounded outwards, so that nothing clips: the error is at most scale / 2. Codes are made with the
rounded metadata. BF16, since a scale or minimum in FP16 overflows at 65504 and vanishes at 6e-8;
its coarser steps cost little, as the codes absorb them.

int8 and int4 have one group: the whole row (int4 after a Hadamard rotation). int4_g32 and int4_g64
have groups of 32 or 64 neighbouring channels; the last may be ragged, with metadata of its own.
The scale plane holds the G scales of each row, the zero plane its G minima. INT4 codes are packed
in nibbles (bits.pack_nibbles).

The scale of a constant group only bridges the rounding of its minimum. A group with a NaN or an
infinity has scale and minimum NaN and codes 0: it decodes to NaN as a whole. Magnitudes above
3.3e38 count as 3.3e38.

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
    are_finite,
    bf16_to_bytes,
    bytes_to_bf16,
    check_head_dim,
    check_planes,
    check_rows,
    divide,
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


def _widths(head_dim: int, bits: int, group: int | None) -> RowBytes:
    num_groups = -(-head_dim // (group or head_dim))
    return RowBytes(codes=head_dim * bits // 8, scale=2 * num_groups, zero=2 * num_groups)


def _row_bytes_int8(head_dim: int) -> RowBytes:
    check_head_dim("int8", head_dim)
    return _widths(head_dim, 8, None)


def _row_bytes_int4(head_dim: int) -> RowBytes:
    check_rotatable("int4", head_dim)
    return _widths(head_dim, 4, None)


def _row_bytes_grouped(head_dim: int, *, group: int) -> RowBytes:
    check_head_dim(f"int4_g{group}", head_dim)
    return _widths(head_dim, 4, group)


def _encode(
    x_ND: torch.Tensor, *, bits: int, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows(x_ND)
    head_dim, levels = x_ND.shape[-1], 2**bits - 1
    x_NGC = split_groups(x_ND, group or head_dim)
    is_finite_NG1 = are_finite(x_NGC)
    x_NGC = torch.where(is_finite_NG1, x_NGC, 0.0).clamp_(-FLOAT_LIMIT, FLOAT_LIMIT)
    # Adding 0.0 makes -0.0 the 0.0 that it equals: which of them is an extreme is left to chance.
    low_NG1, high_NG1 = torch.aminmax(x_NGC.add_(0.0), dim=-1, keepdim=True)
    low_NG1 = round_bf16_down(low_NG1)
    # Halves: the range of two finite numbers may exceed the largest one.
    half_low_NG1 = low_NG1 / 2
    scale_NG1 = round_bf16_up(divide(high_NG1 / 2 - half_low_NG1, levels / 2))
    # A scale of 0 has x = min: any divisor but 0 gives code 0. BF16's least scale is far above.
    divisor_NG1 = (scale_NG1 / 2).clamp_(min=1e-44)
    code_NGC = (x_NGC / 2).sub_(half_low_NG1).div_(divisor_NG1).round_().to(torch.uint8)
    code_ND = code_NGC.flatten(-2)[..., :head_dim]
    metadata_2NG1 = torch.stack([scale_NG1, low_NG1]).masked_fill_(~is_finite_NG1, float("nan"))
    scale_NB, low_NB = bf16_to_bytes(metadata_2NG1.squeeze(-1))
    return (
        pack_nibbles(code_ND) if bits == 4 else code_ND.contiguous(),
        scale_NB,
        low_NB,
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
    check_planes((codes_NB, scale_NB, zero_NB), _widths(head_dim, bits, group))
    code_ND = unpack_nibbles(codes_NB) if bits == 4 else codes_NB
    x_NGC = split_groups(code_ND.float(), group or head_dim)
    scale_NG1, low_NG1 = (bytes_to_bf16(t).unsqueeze(-1) for t in (scale_NB, zero_NB))
    # Counted from the middle level: the largest code times the largest scale would overflow.
    middle = (2**bits - 1) / 2
    x_NGC.sub_(middle).mul_(scale_NG1).add_(low_NG1 + middle * scale_NG1)
    return x_NGC.flatten(-2)[..., :head_dim]


# One program encodes the rows of its tile, each on its own: the tile as [N, G, C], two reductions
# over C, then one pass over the codes. Writes b * D / 8 + 4 * G bytes a row.
@triton_jit
def _device_encode(
    x_ND: tl.tensor,
    page_N: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
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
    low_NG = tl.min(tl.where(is_inside_1GC, x_NGC, 3.3e38), axis=2) + 0.0
    high_NG = tl.max(tl.where(is_inside_1GC, x_NGC, -3.3e38), axis=2) + 0.0
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
    index_NG = row_N[:, None] * NUM_GROUPS + g[None, :]
    page_N1 = page_N[:, None]
    store_bf16(page_N1 + SCALE, index_NG, nan_where(is_bad_NG, scale_NG), mask_NG)
    store_bf16(page_N1 + ZERO, index_NG, nan_where(is_bad_NG, low_NG), mask_NG)


# Codes are the integers 0..255 or 0..15, exact in FP16 and BF16 too, so that a dot product of codes
# loses nothing; scale and minimum act on scores and on P, once a row. Reads b * D / 8 + 4 bytes a
# row, in 16-byte loads where the bytes of a row are a multiple of 16.
@triton_jit
def _device_decode_row(
    page: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
) -> Any:
    d = tl.arange(0, BLOCK_D)
    mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
    if BITS == 4:
        row_ptr_N = page + CODES + row_N * (HEAD_DIM // 2)
        code_ND = load_nibbles(row_ptr_N, mask_N, HEAD_DIM, BLOCK_D)
    else:
        code_ptr = page + CODES + row_N[:, None] * HEAD_DIM + d[None, :]
        code_ND = tl.load(code_ptr, mask=mask_ND, other=0).to(tl.int32)
    # The code as the low bits of 2^23, less 2^23: cheaper than an integer conversion. Counted from
    # the middle level: attention rounds P * scale to q's dtype, and what that loses grows with the
    # size of the codes.
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)
    code_ND = (code_ND | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)
    scale_N = load_bf16(page + SCALE, row_N, mask_N)
    # Halved, since MIDDLE * scale alone may overflow.
    zero_N = 2.0 * (0.5 * load_bf16(page + ZERO, row_N, mask_N) + (MIDDLE // 2) * scale_N)
    return tl.where(mask_ND, code_ND, 0.0), scale_N, zero_N


# Values, not codes: scales along the head dimension cannot act on a whole row.
@triton_jit
def _device_decode_groups(
    page: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
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
    # The code as bits 4..7 of 2^19, less 2^19 + 7.5: from the middle level, as in `_decode`.
    code_ND = ((code_ND << 4) | 0x49000000).to(tl.float32, bitcast=True) - 524295.5
    g = tl.arange(0, BLOCK_G)
    mask_NG = mask_N[:, None] & (g < NUM_GROUPS)[None, :]
    index_NG = row_N[:, None] * NUM_GROUPS + g[None, :]
    scale_NG = load_bf16(page + SCALE, index_NG, mask_NG)
    middle_NG = load_bf16(page + ZERO, index_NG, mask_NG) + 7.5 * scale_NG
    code_NGC = tl.reshape(code_ND, (NUM_ROWS, BLOCK_G, CHANNELS))
    value_NGC = code_NGC * scale_NG[:, :, None] + middle_NG[:, :, None]
    value_ND = tl.reshape(value_NGC, (NUM_ROWS, BLOCK_D))
    value_ND = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], value_ND, 0.0)
    return value_ND, mask_N.to(tl.float32), tl.zeros_like(mask_N.to(tl.float32))


@triton_jit
def _device_encode_int8(
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
    _device_encode(x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 8, BLOCK_D)


@triton_jit
def _device_decode_int8(
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
    return _device_decode_row(page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 8)


@triton_jit
def _device_encode_int4(
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
    _device_encode(x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4, BLOCK_D)


@triton_jit
def _device_decode_int4(
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
    return _device_decode_row(page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4)


@triton_jit
def _device_encode_int4_g32(
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
    _device_encode(x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4, 32)


@triton_jit
def _device_decode_int4_g32(
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
    return _device_decode_groups(page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 32)


@triton_jit
def _device_encode_int4_g64(
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
    _device_encode(x_ND, page_N, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 4, 64)


@triton_jit
def _device_decode_int4_g64(
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
    return _device_decode_groups(page, row_N, mask_N, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D, 64)


INT8 = KVCodec(
    name="int8",
    summary="asymmetric INT8, BF16 scale and minimum a token and head",
    is_rotated=False,
    row_bytes=_row_bytes_int8,
    encode=functools.partial(_encode, bits=8),
    decode=functools.partial(_decode, bits=8),
    device_encode=_device_encode_int8,
    device_decode=_device_decode_int8,
)

INT4 = KVCodec(
    name="int4",
    summary="asymmetric INT4 after a Hadamard rotation, BF16 scale and minimum a token and head",
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
