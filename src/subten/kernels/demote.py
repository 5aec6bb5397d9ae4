"""`demote_values`: write the values of pages again at 1.5 bits, once few look at them.

Letters: M moves, L layers, G KV heads, N rows, D head_dim; X base, Y fine and Z cold planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.codecs.lloyd_max import load_pairs
from subten.codecs.mixed import MixedFormat, encode_cold
from subten.codecs.nested import decode_nested, nested_level
from subten.codecs.norm_byte import encode_norm_device, exact_norm_device, norm_table
from subten.codecs.vq import codebook, store_vectors
from subten.core import PAGE_SIZE
from subten.kernels.mixed_pages import rows_of
from subten.kernels.triton_shim import tl, triton, triton_jit


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuePools:
    """Planes of values of all layers, uint8: [L, planes, G, bytes], or views of that shape."""

    vbase_LXGB: torch.Tensor
    vfine_LYGB: torch.Tensor
    vcold_LZGB: torch.Tensor

    def check(self, fmt: MixedFormat) -> None:
        """Assert widths, dtypes, strides and one device."""
        num_layers, _, num_kv_heads, _ = self.vbase_LXGB.shape
        for name, pool, num_bytes in (
            ("vbase_LXGB", self.vbase_LXGB, fmt.base_bytes),
            ("vfine_LYGB", self.vfine_LYGB, fmt.fine_bytes),
            ("vcold_LZGB", self.vcold_LZGB, fmt.cold_bytes),
        ):
            shape = (num_layers, num_kv_heads, num_bytes)
            assert (len(pool), *pool.shape[2:]) == shape, (name, tuple(pool.shape), shape)
            assert pool.dtype == torch.uint8, (name, pool.dtype)
            assert pool.stride(3) == 1, (name, pool.stride())
            assert pool.device == self.vbase_LXGB.device, (name, pool.device)


def demote_values(pools: ValuePools, fmt: MixedFormat, moves_M3: torch.Tensor) -> None:
    """Encode values of whole pages anew, all layers and heads; one launch, in place, deterministic.

    `moves_M3` int32 [M, 3]: the base plane that is read, the fine plane that refines it or -1, and
    the cold plane that is written. Moves of base -1 are skipped: padding. Places are the caller's
    to change, and planes that a page leaves are his to free.

    Wrong dtypes, devices, shapes or strides fail an assert; ids are not looked at.
    """
    check_moves(pools, fmt, moves_M3)
    if len(moves_M3) == 0:
        return
    num_layers, _, num_kv_heads, _ = pools.vbase_LXGB.shape
    tensors = (pools.vbase_LXGB, pools.vfine_LYGB, pools.vcold_LZGB)
    plan, device = DEMOTE_PLAN, moves_M3.device
    grid = (len(moves_M3), num_layers * num_kv_heads, PAGE_SIZE // plan.block_rows)
    _demote_kernel[grid](
        moves_M3,
        num_kv_heads,
        *(part for pool in tensors for part in (pool, *pool.stride()[:3])),
        codebook(device),
        norm_table(device),
        HEAD_DIM=fmt.head_dim,
        BLOCK_D=triton.next_power_of_2(fmt.head_dim),
        BLOCK_N=plan.block_rows,
        PAGE=PAGE_SIZE,
        num_warps=plan.num_warps,
    )


def demote_values_torch(pools: ValuePools, fmt: MixedFormat, moves_M3: torch.Tensor) -> None:
    """Twin of `demote_values`, and the CPU backend."""
    check_moves(pools, fmt, moves_M3)
    for base, fine, cold in moves_M3.tolist():
        if base < 0:
            continue
        # A row after the other of each layer and head.
        plane_LGB = pools.vbase_LXGB[:, base]
        codes_LGNB = rows_of(plane_LGB[..., :-PAGE_SIZE], each_page=True)
        fine_LGNB = None
        if fine >= 0:
            fine_LGNB = rows_of(pools.vfine_LYGB[:, fine], each_page=True)
        codes_LGNB, norm_LGN = encode_cold(
            decode_nested(codes_LGNB, fine_LGNB, plane_LGB[..., -PAGE_SIZE:])
        )
        pools.vcold_LZGB[:, cold] = torch.cat([codes_LGNB.flatten(2), norm_LGN], dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemotePlan:
    """Launch choice of `demote_values`."""

    block_rows: int
    num_warps: int


DEMOTE_PLAN = DemotePlan(block_rows=4, num_warps=8)
"""Four rows: vq1.5 compares all their vectors with 256 codewords at once, in registers."""


def check_moves(pools: ValuePools, fmt: MixedFormat, moves_M3: torch.Tensor) -> None:
    """Assert what every backend of `demote_values` takes."""
    pools.check(fmt)
    assert moves_M3.dtype == torch.int32, moves_M3.dtype
    assert moves_M3.shape[1:] == (3,), moves_M3.shape
    assert moves_M3.is_contiguous(), moves_M3.stride()
    assert moves_M3.device == pools.vbase_LXGB.device, moves_M3.device


# A program takes BLOCK_N rows of one page, layer and head. Bytes of a page, layer and head: 16 D +
# 64 read, 16 D more with a fine plane, 12 D + 64 written. Not yet measured on a GPU.
@triton_jit
def _demote_kernel(
    moves_ptr: tl.tensor,
    num_kv_heads: tl.tensor,
    base_ptr: tl.tensor,
    base_stride_l: tl.tensor,
    base_stride: tl.tensor,
    base_stride_g: tl.tensor,
    fine_ptr: tl.tensor,
    fine_stride_l: tl.tensor,
    fine_stride: tl.tensor,
    fine_stride_g: tl.tensor,
    cold_ptr: tl.tensor,
    cold_stride_l: tl.tensor,
    cold_stride: tl.tensor,
    cold_stride_g: tl.tensor,
    tables_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    QUARTER: tl.constexpr = HEAD_DIM // 4
    moves_ptr += tl.program_id(0).to(tl.int64) * 3
    layer = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    row_N = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_N = row_N >= 0
    base_id = tl.load(moves_ptr).to(tl.int64)
    if base_id < 0:
        return
    fine_id, cold_id = tl.load(moves_ptr + 1).to(tl.int64), tl.load(moves_ptr + 2).to(tl.int64)
    base = base_ptr + layer * base_stride_l + base_id * base_stride + head * base_stride_g
    fine = fine_ptr + layer * fine_stride_l + fine_id * fine_stride + head * fine_stride_g
    cold = cold_ptr + layer * cold_stride_l + cold_id * cold_stride + head * cold_stride_g
    code_ND = load_pairs(base + row_N * QUARTER, mask_N, HEAD_DIM, BLOCK_D)
    fine_mask_N = row_N < tl.where(fine_id >= 0, PAGE, 0)
    fine_ND = load_pairs(fine + row_N * QUARTER, fine_mask_N, HEAD_DIM, BLOCK_D)
    norm_N = tl.load(base + PAGE * QUARTER + row_N).to(tl.int32)
    norm_N = exact_norm_device(norm_N, norms_ptr, 208)
    x_ND = nested_level(code_ND, fine_ND, fine_id >= 0) * norm_N[:, None]
    row_ptr_N = cold + row_N * (HEAD_DIM * 3 // 16)
    size_N, _ = store_vectors(row_ptr_N, x_ND, mask_N, tables_ptr, HEAD_DIM, BLOCK_D)
    byte_N, _ = encode_norm_device(size_N, 240)
    tl.store(cold + PAGE * (HEAD_DIM * 3 // 16) + row_N, byte_N.to(tl.uint8))
