"""`demote`: write pages again at a lower fidelity, once they have left the window.

Letters: M moves, L layers, G KV heads, N rows, D head_dim; H hot, B base, F fine and C cold planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.codecs.nested import (
    BASE,
    COLD,
    MixedFormat,
    device_load_nested,
    device_store_nested,
    encode_nested,
)
from subten.core import PAGE_SIZE
from subten.kernels.kv_append import codec_tables, page_planes
from subten.kernels.mixed_pages import MixedPages, read_mixed
from subten.kernels.triton_shim import tl, triton, triton_jit


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPools:
    """The planes of all layers, uint8: [L, planes, G, bytes], or views with those dimensions."""

    hot_LHGB: torch.Tensor
    base_LBGB: torch.Tensor
    fine_LFGB: torch.Tensor
    cold_LCGB: torch.Tensor

    def layer(self, index: int, place_P4: torch.Tensor) -> MixedPages:
        """The planes of one layer as `attend_mixed` takes them."""
        return MixedPages(
            hot_HGB=self.hot_LHGB[index],
            base_BGB=self.base_LBGB[index],
            fine_FGB=self.fine_LFGB[index],
            cold_CGB=self.cold_LCGB[index],
            place_P4=place_P4,
        )


def demote(pools: MixedPools, fmt: MixedFormat, moves_M8: torch.Tensor) -> None:
    """Write whole pages to lower planes, all layers and heads; one launch, in place, deterministic.

    `moves_M8` int32 [M, 8]: the record (kind, first, fine_k, fine_v) of each page as it lies, and
    the one that it is to have. HOT or BASE to BASE or COLD; a fine plane of a BASE target is
    written where its id is not -1, those of a BASE source are read where they are there. Moves of
    kind -1 are skipped: padding. No plane may be both read and written. Records in `place_P4` are
    the caller's to change, and planes that a page leaves are his to free.

    Wrong dtypes, devices, shapes or strides fail an assert; ids are not looked at.
    """
    _check_moves(pools, fmt, moves_M8)
    if len(moves_M8) == 0:
        return
    num_layers, _, num_kv_heads, _ = pools.hot_LHGB.shape
    tensors = (pools.hot_LHGB, pools.base_LBGB, pools.fine_LFGB, pools.cold_LCGB)
    pool_args = [part for pool in tensors for part in (pool, *pool.stride()[:3])]
    plan = DEMOTE_PLAN
    grid = (len(moves_M8), num_layers * num_kv_heads, 2 * PAGE_SIZE // plan.block_rows)
    _demote_kernel[grid](
        moves_M8,
        num_kv_heads,
        *pool_args,
        codec_tables(fmt.cold.codec, pools.cold_LCGB),
        DECODE_HOT=fmt.hot.codec.device_decode,
        ENCODE_COLD=fmt.cold.codec.device_encode,
        HOT_V=fmt.hot.v_codes,
        BASE_SCALE=fmt.base.k_scale,
        BASE_V=fmt.base.v_codes,
        COLD_SCALE=fmt.cold.k_scale,
        COLD_ZERO=fmt.cold.k_zero,
        COLD_V=fmt.cold.v_codes,
        HEAD_DIM=fmt.head_dim,
        BLOCK_D=triton.next_power_of_2(fmt.head_dim),
        BLOCK_N=plan.block_rows,
        PAGE=PAGE_SIZE,
        num_warps=plan.num_warps,
    )


def demote_torch(pools: MixedPools, fmt: MixedFormat, moves_M8: torch.Tensor) -> None:
    """Twin of `demote`, and the CPU backend."""
    _check_moves(pools, fmt, moves_M8)
    moves_M8 = moves_M8[moves_M8[:, 0] >= 0]
    source_M4, target_M4 = moves_M8.split(4, dim=1)
    kind_M = target_M4[:, 0]
    for index in range(len(pools.hot_LHGB) if len(moves_M8) else 0):
        pages = pools.layer(index, source_M4)
        k_GND, v_GND = read_mixed(pages, fmt, source_M4)
        x_2GMND = torch.stack([k_GND, v_GND]).unflatten(2, (len(moves_M8), PAGE_SIZE))
        (is_base,) = (kind_M == BASE).nonzero(as_tuple=True)
        codes, fine, norm = encode_nested(x_2GMND[:, :, is_base])
        first = target_M4[is_base, 1].long()
        to_codes, to_norm, _ = page_planes(pages.base_BGB, fmt.base)
        to_codes[first] = codes.permute(2, 0, 1, 3, 4)
        to_norm[first] = norm.permute(2, 0, 1, 3, 4)
        for half in (0, 1):
            fine_id = target_M4[is_base, 2 + half]
            (has_fine,) = (fine_id >= 0).nonzero(as_tuple=True)
            rows_GMB = fine[half][:, has_fine].flatten(2)
            pages.fine_FGB[fine_id[has_fine].long()] = rows_GMB.transpose(0, 1)
        (is_cold,) = (kind_M == COLD).nonzero(as_tuple=True)
        first = target_M4[is_cold, 1].long()
        encoded = fmt.cold.codec.encode(x_2GMND[:, :, is_cold])
        for to_plane, plane in zip(page_planes(pages.cold_CGB, fmt.cold), encoded, strict=True):
            to_plane[first] = plane.permute(2, 0, 1, 3, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemotePlan:
    """Launch choice of `demote`."""

    block_rows: int
    num_warps: int


DEMOTE_PLAN = DemotePlan(block_rows=4, num_warps=8)
"""Four rows: vq1.5 compares all their vectors with 256 codewords at once, in registers."""


def _check_moves(pools: MixedPools, fmt: MixedFormat, moves_M8: torch.Tensor) -> None:
    assert moves_M8.dtype == torch.int32, moves_M8.dtype
    assert moves_M8.shape[1:] == (8,), moves_M8.shape
    assert moves_M8.is_contiguous(), moves_M8.stride()
    num_layers = {len(pool) for pool in (pools.hot_LHGB, pools.base_LBGB)}
    num_layers |= {len(pool) for pool in (pools.fine_LFGB, pools.cold_LCGB)}
    assert len(num_layers) == 1, num_layers
    pools.layer(0, moves_M8[:, :4].contiguous()).check(fmt)


# A program takes BLOCK_N rows of K or of V of one page, layer and head: it decodes them from the
# plane where they lie, and encodes them for the plane where they are to go. Both are branches on a
# number that is the same for the whole program.
#
#   moves [M, 8]: | kind first fine_k fine_v | kind first fine_k fine_v |    from, to
#
# Bytes: a hot page of one layer and head is read once, 256 D, and written as 32 D + 256 for its
# base, 16 D a fine plane, or 24 D + 256 for cold. Not yet measured on a GPU.
@triton_jit
def _demote_kernel(
    moves_ptr: tl.tensor,
    num_kv_heads: tl.tensor,
    hot_ptr: tl.tensor,
    hot_stride_l: tl.tensor,
    hot_stride: tl.tensor,
    hot_stride_g: tl.tensor,
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
    DECODE_HOT: tl.constexpr,
    ENCODE_COLD: tl.constexpr,
    HOT_V: tl.constexpr,
    BASE_SCALE: tl.constexpr,
    BASE_V: tl.constexpr,
    COLD_SCALE: tl.constexpr,
    COLD_ZERO: tl.constexpr,
    COLD_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    moves_ptr += tl.program_id(0).to(tl.int64) * 8
    layer = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    half = tl.program_id(2) // (PAGE // BLOCK_N)
    row_N = (tl.program_id(2) % (PAGE // BLOCK_N)) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_N = row_N >= 0
    hot = hot_ptr + layer * hot_stride_l + head * hot_stride_g + half * HOT_V
    base = base_ptr + layer * base_stride_l + head * base_stride_g + half * BASE_V
    fine = fine_ptr + layer * fine_stride_l + head * fine_stride_g
    cold = cold_ptr + layer * cold_stride_l + head * cold_stride_g + half * COLD_V

    kind = tl.load(moves_ptr)
    if kind < 0:
        return
    first = tl.load(moves_ptr + 1).to(tl.int64)
    fine_id = tl.load(moves_ptr + 2 + half).to(tl.int64)
    if kind == 0:
        code_ND, scale_N, _ = DECODE_HOT(
            hot + first * hot_stride, row_N, mask_N, tables_ptr, 0, HOT_V, HOT_V, HEAD_DIM, BLOCK_D
        )
    else:
        code_ND, scale_N = device_load_nested(
            base + first * base_stride,
            fine + tl.maximum(fine_id, 0) * fine_stride,
            fine_id >= 0,
            row_N,
            mask_N,
            0,
            BASE_SCALE,
            HEAD_DIM,
            BLOCK_D,
        )
    x_ND = code_ND * scale_N[:, None]

    first = tl.load(moves_ptr + 5).to(tl.int64)
    fine_id = tl.load(moves_ptr + 6 + half).to(tl.int64)
    if tl.load(moves_ptr + 4) == 1:
        device_store_nested(
            x_ND,
            base + first * base_stride,
            fine + tl.maximum(fine_id, 0) * fine_stride,
            fine_id >= 0,
            row_N,
            mask_N,
            0,
            BASE_SCALE,
            HEAD_DIM,
            BLOCK_D,
        )
    else:
        # A pointer for each row, as codecs take them.
        page_N = cold + first * cold_stride + tl.zeros([BLOCK_N], tl.int64)
        ENCODE_COLD(
            x_ND, page_N, row_N, mask_N, tables_ptr, 0, COLD_SCALE, COLD_ZERO, HEAD_DIM, BLOCK_D
        )
