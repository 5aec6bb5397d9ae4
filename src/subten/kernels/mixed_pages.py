"""Pages of mixed fidelity in memory: the four pools of planes, and where each page id lies.

Letters: L layers, G KV heads, P page ids; H hot, B base, F fine and C cold planes, each with ids of
its own; the last letter of a pool is bytes. D head_dim, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.codecs import KVFormat
from subten.codecs.nested import BASE, COLD, HOT, MixedFormat, decode_nested
from subten.core import PAGE_SIZE
from subten.kernels.kv_append import check_pages, page_planes


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPages:
    """One layer's planes, uint8, and the records of all page ids, int32 [P, 4], on one device.

    A record is (kind, first, fine_k, fine_v): HOT, BASE, COLD or EMPTY, the plane's id in that
    pool, and for BASE the ids of fine planes of K and V, or -1. Bytes of a plane are adjacent;
    other strides are free, so that a layer of a pool [planes, L, G, bytes] fits as it is.
    """

    hot_HGB: torch.Tensor
    base_BGB: torch.Tensor
    fine_FGB: torch.Tensor
    cold_CGB: torch.Tensor
    place_P4: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        """G."""
        return self.hot_HGB.shape[1]

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
