"""Exact bit-level steps that several codecs share: directed rounding to BF16, nibbles, groups.

Letters: N rows, D head_dim, H D / 2, G groups of a row, C channels of a group.
Every device function computes bit for bit what its torch twin does: integer arithmetic on the
pattern of a float32, and `div_rn` where a quotient is needed, since a plain `/` may be approximate
on a GPU and `a * b + c` may be contracted to one rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs import RowBytes
from subten.core import ConfigError, refuse
from subten.kernels.triton_shim import tl, triton_jit

FLOAT_LIMIT = 3.3e38
"""Codecs with a scale take larger magnitudes as this: rounding the scale up must not overflow."""

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def check_head_dim(codec_name: str, head_dim: int) -> None:
    """Refuse, with ConfigError, a head_dim that no codec takes: odd, or outside 16..256."""
    is_integer = isinstance(head_dim, int) and not isinstance(head_dim, bool)
    if not is_integer or head_dim % 2 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise refuse(
            ConfigError,
            f"head_dim of kv_cache_dtype {codec_name}",
            head_dim,
            f"an even number from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}",
        )


def check_rows(x_ND: torch.Tensor) -> None:
    """Assert what every `encode` takes: float32 rows."""
    assert x_ND.dtype == torch.float32, (x_ND.dtype, torch.float32)


def check_planes(planes: tuple[torch.Tensor, torch.Tensor, torch.Tensor], row: RowBytes) -> None:
    """Assert what every `decode` takes: codes, scale and zero bytes of the widths of `row`."""
    widths = tuple(plane_NB.shape[-1] for plane_NB in planes)
    assert widths == (row.codes, row.scale, row.zero), (widths, row)
    assert all(plane_NB.dtype == torch.uint8 for plane_NB in planes), planes[0].dtype


def are_finite(x_NC: torch.Tensor) -> torch.Tensor:
    """[..., C] float32 -> [..., 1] bool: no NaN and no infinity among the C values."""
    # A maximum propagates NaN, and NaN is not below anything.
    return x_NC.abs().amax(dim=-1, keepdim=True) < float("inf")


def split_groups(x_ND: torch.Tensor, group: int) -> torch.Tensor:
    """[N, D] -> [N, G, C]; a ragged last group repeats the row's last value (same min and max)."""
    head_dim = x_ND.shape[-1]
    missing = -head_dim % group
    if missing:
        x_ND = torch.cat([x_ND, x_ND[..., -1:].expand(*x_ND.shape[:-1], missing)], dim=-1)
    return x_ND.reshape(*x_ND.shape[:-1], -(-head_dim // group), group)


def divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, rounded once, on every device.

    On a GPU torch multiplies by the reciprocal of a Python number instead; a scale one ulp off may
    then round to the next BF16 value. A tensor as divisor is divided by.
    """
    return x / (torch.full((), divisor, dtype=x.dtype, device=x.device) if x.is_cuda else divisor)


def round_bf16_up(x: torch.Tensor) -> torch.Tensor:
    """The least BF16 value >= x, for x >= 0 whose result is finite; float32 in and out."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def round_bf16_down(x: torch.Tensor) -> torch.Tensor:
    """The largest BF16 value <= x, of either sign, whose result is finite; float32 in and out."""
    bits = x.view(torch.int32)
    # A float is sign and magnitude: down is towards zero above zero and away from it below.
    return (torch.add(bits, bits >> 31, alpha=-0xFFFF) & -0x10000).view(torch.float32)


def bf16_to_bytes(x_NG: torch.Tensor) -> torch.Tensor:
    """[N, G] float32 that BF16 holds exactly, or NaN -> [N, 2G] uint8, little endian."""
    # The upper half of the pattern: a cast would choose its own NaN, by vector width.
    return x_NG.unsqueeze(-1).view(torch.int16)[..., 1:].view(torch.uint8).flatten(-2)


def bytes_to_bf16(bytes_NB: torch.Tensor) -> torch.Tensor:
    """[N, 2G] uint8 -> [N, G] float32; inverse of `bf16_to_bytes`."""
    return bytes_NB.view(torch.bfloat16).float()


def pack_nibbles(code_ND: torch.Tensor) -> torch.Tensor:
    """[N, D] uint8 below 16 -> [N, H]: channel i in the low nibble, i + H in the high nibble."""
    low_NH, high_NH = code_ND.chunk(2, dim=-1)
    return torch.add(low_NH, high_NH, alpha=16)


def unpack_nibbles(byte_NH: torch.Tensor) -> torch.Tensor:
    """[N, H] uint8 -> [N, D] uint8 below 16; inverse of `pack_nibbles`."""
    return torch.stack([byte_NH & 0xF, byte_NH >> 4], dim=-2).flatten(-2)


@triton_jit
def magnitude_bits(x: tl.tensor) -> Any:
    """float32 -> int32 pattern without its sign; 0x7F800000 and above are infinity and NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton_jit
def nan_where(is_bad: tl.tensor, x: tl.tensor) -> Any:
    """`x` (float32) with NaN where `is_bad`."""
    return tl.where(is_bad, float("nan"), x)


@triton_jit
def round_bf16_up_device(x: tl.tensor) -> Any:
    """Device twin of `round_bf16_up`."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton_jit
def round_bf16_down_device(x: tl.tensor) -> Any:
    """Device twin of `round_bf16_down`."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + ((bits >> 31) & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)


@triton_jit
def store_bf16(plane_ptr: tl.tensor, index: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    """Store float32 that BF16 holds exactly, or NaN, as BF16 number `index` of a plane of bytes."""
    half = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
    # Cast before indexing: the compiler then sees neighbours and widens the access.
    tl.store(plane_ptr.to(tl.pointer_type(tl.uint16)) + index, half, mask=mask)


@triton_jit
def load_bf16(plane_ptr: tl.tensor, index: tl.tensor, mask: tl.tensor) -> Any:
    """BF16 number `index` of a plane of bytes, as float32; 0 where masked."""
    half = tl.load(plane_ptr.to(tl.pointer_type(tl.uint16)) + index, mask=mask, other=0)
    return (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton_jit
def store_nibbles(
    row_ptr_N: tl.tensor,
    code_ND: tl.tensor,
    mask_N: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Device twin of `pack_nibbles`: int32 codes below 16 to the H bytes at `row_ptr_N`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROWS: tl.constexpr = code_ND.shape[0]
    byte_H = tl.arange(0, BLOCK_D // 2)
    if HEAD_DIM == BLOCK_D:
        shift = (4 * tl.arange(0, 2))[None, :, None]
        byte_NH = tl.sum(tl.reshape(code_ND, (NUM_ROWS, 2, BLOCK_D // 2)) << shift, axis=1)
    else:
        index_NH = tl.broadcast_to(byte_H[None, :], (NUM_ROWS, BLOCK_D // 2))
        low_NH = tl.gather(code_ND, index_NH, axis=1)
        # Bytes past H are not stored; their index only has to be inside the tile.
        high_NH = tl.gather(code_ND, tl.minimum(index_NH + HALF, BLOCK_D - 1), axis=1)
        byte_NH = low_NH | (high_NH << 4)
    mask_NH = mask_N[:, None] & (byte_H < HALF)[None, :]
    tl.store(row_ptr_N[:, None] + byte_H[None, :], byte_NH.to(tl.uint8), mask=mask_NH)


@triton_jit
def load_nibbles(
    row_ptr_N: tl.tensor, mask_N: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> Any:
    """Device twin of `unpack_nibbles`: int32 [N, BLOCK_D], 0 where masked or past HEAD_DIM."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
    # Both halves of a row read the same bytes: the second read hits L1, and no value has to move
    # between threads, whatever HEAD_DIM is.
    byte_ND = tl.load(row_ptr_N[:, None] + (d % HALF)[None, :], mask=mask_ND, other=0)
    return (byte_ND.to(tl.int32) >> tl.where(d < HALF, 0, 4)[None, :]) & 0xF
