"""Pages of mixed fidelity in memory: the four pools of planes, and where each page id lies.

Letters: L layers, G KV heads, P page ids; H hot, B base, F fine, C cold and X sink planes, each
with ids of its own; the last letter of a pool is bytes. D head_dim, N rows (of `page_N`: pages).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from subten.codecs import KVFormat
from subten.codecs.nested import (
    BASE,
    COLD,
    HOT,
    MixedFormat,
    decode_nested,
    device_load_nested,
)
from subten.core import PAGE_SIZE
from subten.kernels.kv_append import check_pages, page_planes
from subten.kernels.triton_shim import tl, triton_jit


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPages:
    """One layer's planes, uint8, and the records of all page ids, int32 [P, 4], on one device.

    A record is (kind, first, fine_k, fine_v): HOT, BASE, COLD or EMPTY, the plane's id in that
    pool, and for BASE the ids of fine planes of K and V, or -1. Bytes of a plane are adjacent;
    other strides are free, so that a layer of a pool [planes, L, G, bytes] fits as it is.

    `sink_XGB`, planes of | K S x 2D bytes | V S x 2D bytes |, has the first S rows of a sequence as
    a hot page has them: where the first page of a sequence is not HOT and `sink_P`, int32, has a
    plane for it, not -1, they are read in place of the page's own. Both or none.
    """

    hot_HGB: torch.Tensor
    base_BGB: torch.Tensor
    fine_FGB: torch.Tensor
    cold_CGB: torch.Tensor
    place_P4: torch.Tensor
    sink_XGB: torch.Tensor | None = None
    sink_P: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        """G."""
        return self.hot_HGB.shape[1]

    def num_sinks(self, fmt: MixedFormat) -> int:
        """S, rows of a sink plane; 0 without sink planes."""
        return 0 if self.sink_XGB is None else self.sink_XGB.shape[2] // (2 * fmt.hot.row.codes)

    def check(self, fmt: MixedFormat) -> None:
        """Assert widths, dtypes, strides and one device."""
        for pool, pool_fmt in (
            (self.hot_HGB, fmt.hot),
            (self.base_BGB, fmt.base),
            (self.cold_CGB, fmt.cold),
        ):
            check_pages(pool, self.num_kv_heads, pool_fmt)
        assert self.fine_FGB.dtype == torch.uint8, self.fine_FGB.dtype
        fine_shape = (self.num_kv_heads, fmt.fine_bytes)
        assert self.fine_FGB.shape[1:] == fine_shape, (self.fine_FGB.shape, fine_shape)
        assert self.fine_FGB.stride(2) == 1, self.fine_FGB.stride()
        assert self.place_P4.dtype == torch.int32, self.place_P4.dtype
        assert self.place_P4.shape[1:] == (4,), self.place_P4.shape
        assert self.place_P4.is_contiguous(), self.place_P4.stride()
        pools = (self.hot_HGB, self.base_BGB, self.fine_FGB, self.cold_CGB, self.place_P4)
        assert len({pool.device for pool in pools}) == 1, [pool.device for pool in pools]
        self._check_sinks(fmt)

    def _check_sinks(self, fmt: MixedFormat) -> None:
        sink_XGB, sink_P = self.sink_XGB, self.sink_P
        if sink_XGB is None or sink_P is None:
            assert sink_XGB is None, "sink_XGB without sink_P"
            assert sink_P is None, "sink_P without sink_XGB"
            return
        num_sinks = self.num_sinks(fmt)
        assert 1 <= num_sinks <= PAGE_SIZE, num_sinks
        shape = (self.num_kv_heads, num_sinks * 2 * fmt.hot.row.codes)
        assert sink_XGB.shape[1:] == shape, (sink_XGB.shape, shape)
        assert sink_XGB.dtype == torch.uint8, sink_XGB.dtype
        assert sink_XGB.stride(2) == 1, sink_XGB.stride()
        assert sink_P.dtype == torch.int32, sink_P.dtype
        assert sink_P.shape == self.place_P4.shape[:1], (sink_P.shape, self.place_P4.shape)
        assert sink_P.is_contiguous(), sink_P.stride()
        devices = {tensor.device for tensor in (sink_XGB, sink_P, self.place_P4)}
        assert len(devices) == 1, devices


def read_sequence(
    pages: MixedPages, fmt: MixedFormat, page_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`read_mixed` of a sequence's pages, given their ids in order, with its sink rows in place."""
    place_N4 = pages.place_P4.index_select(0, page_N)
    k_GND, v_GND = read_mixed(pages, fmt, place_N4)
    if pages.sink_XGB is None or pages.sink_P is None or len(page_N) == 0:
        return k_GND, v_GND
    sink = int(pages.sink_P[page_N[0]])
    if sink >= 0 and int(place_N4[0, 0]) != HOT:
        rows_GB = pages.sink_XGB[sink].contiguous()
        rows_G2ND = rows_GB.view(torch.bfloat16).unflatten(1, (2, -1, fmt.head_dim))
        for half, x_GND in enumerate((k_GND, v_GND)):
            x_GND[:, : rows_G2ND.shape[2]] = rows_G2ND[:, half]
    return k_GND, v_GND


def read_mixed(
    pages: MixedPages, fmt: MixedFormat, place_N4: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode whole pages, given their records; `(k_GND, v_GND)` float32, rotated, 64 rows a page.

    A record of another kind than HOT, BASE or COLD is our bug.
    """
    x_2GPND = pages.hot_HGB.new_empty(
        (2, pages.num_kv_heads, len(place_N4), PAGE_SIZE, fmt.head_dim), dtype=torch.float32
    )
    kinds = place_N4[:, 0]
    assert bool(((kinds >= HOT) & (kinds <= COLD)).all()), place_N4
    for kind, pool, pool_fmt in (
        (HOT, pages.hot_HGB, fmt.hot),
        (BASE, pages.base_BGB, fmt.base),
        (COLD, pages.cold_CGB, fmt.cold),
    ):
        (index_N,) = (kinds == kind).nonzero(as_tuple=True)
        if len(index_N) == 0:
            continue
        codes, scale, zero = _planes(pool, pool_fmt, place_N4[index_N, 1])
        x_2GPND[:, :, index_N] = pool_fmt.codec.decode(codes, scale, zero, fmt.head_dim)
        for half in (0, 1) if kind == BASE else ():
            fine_N = place_N4[index_N, 2 + half]
            (is_fine_N,) = (fine_N >= 0).nonzero(as_tuple=True)
            if len(is_fine_N):
                fine = pages.fine_FGB[fine_N[is_fine_N].long()].transpose(0, 1)
                fine = fine.unflatten(-1, (PAGE_SIZE, -1))
                base = (plane[half, :, is_fine_N] for plane in (codes, scale))
                codes_GNQ, norm_GN2 = base
                x_2GPND[half][:, index_N[is_fine_N]] = decode_nested(codes_GNQ, fine, norm_GN2)
    k_GND, v_GND = x_2GPND.flatten(2, 3)
    return k_GND, v_GND


def _planes(
    pool: torch.Tensor, fmt: KVFormat, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero bytes [2 (K, V), G, pages, 64, row bytes] of some planes of a pool."""
    codes, scale, zero = (
        plane.permute(1, 2, 0, 3, 4) for plane in page_planes(pool.index_select(0, ids), fmt)
    )
    return codes, scale, zero


# One branch for a page: its kind is the same for all threads. Every kind gives codes that are exact
# in BF16 and one scale a row, and no zero-point.
@triton_jit
def load_mixed(
    kind: tl.tensor,
    hot: tl.tensor,
    base: tl.tensor,
    fine: tl.tensor,
    has_fine: tl.tensor,
    cold: tl.tensor,
    sink: tl.tensor,
    has_sinks: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    tables_ptr: tl.tensor,
    DECODE_HOT: tl.constexpr,
    DECODE_COLD: tl.constexpr,
    HOT_V: tl.constexpr,
    BASE_SCALE: tl.constexpr,
    COLD_SCALE: tl.constexpr,
    COLD_ZERO: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """K of one page, float32 `(code_ND, scale_N)` with value = code * scale; 0 where masked.

    V, where all planes are given from their V on.
    """
    if kind == 0:
        code_ND, scale_N, _ = DECODE_HOT(
            hot, row_N, mask_N, tables_ptr, 0, HOT_V, HOT_V, HEAD_DIM, BLOCK_D
        )
    elif kind == 1:
        code_ND, scale_N = device_load_nested(
            base, fine, has_fine, row_N, mask_N, 0, BASE_SCALE, HEAD_DIM, BLOCK_D
        )
    else:
        code_ND, scale_N, _ = DECODE_COLD(
            cold, row_N, mask_N, tables_ptr, 0, COLD_SCALE, COLD_ZERO, HEAD_DIM, BLOCK_D
        )
    if NUM_SINKS > 0:
        is_sink_N = mask_N & (row_N < NUM_SINKS)
        if has_sinks:
            sink_ND, _, _ = DECODE_HOT(
                sink, row_N, is_sink_N, tables_ptr, 0, HOT_V, HOT_V, HEAD_DIM, BLOCK_D
            )
            code_ND = tl.where(is_sink_N[:, None], sink_ND, code_ND)
            scale_N = tl.where(is_sink_N, 1.0, scale_N)
    return code_ND, scale_N
