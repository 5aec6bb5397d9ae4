"""Pools of mixed pages for tests: random rows, planes that hold them, poison everywhere else.

Letters: L layers, G KV heads, D head_dim, P page ids, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from subten.codecs.nested import (
    BASE,
    COLD,
    HOT,
    MixedFormat,
    decode_nested,
    encode_nested,
    mixed_format,
)
from subten.codecs.plain import BF16
from subten.core import PAGE_SIZE
from subten.kernels.demote import MixedPools
from subten.kernels.kv_append import page_planes

POISON = 0xFF
"""NaN in BF16 rows and in norms."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Planes of `num_layers` layers, of which each pool has `num_planes`, all poison at first."""

    fmt: MixedFormat
    pools: MixedPools


def make_pools(
    head_dim: int, *, num_layers: int, num_kv_heads: int, num_planes: int, device: torch.device
) -> Pools:
    """Layers are slices of one tensor [planes, L, G, bytes]: planes are not adjacent."""
    fmt = mixed_format(head_dim)

    def pool(num_bytes: int) -> torch.Tensor:
        shape = (num_planes, num_layers, num_kv_heads, num_bytes)
        return torch.full(shape, POISON, dtype=torch.uint8, device=device).transpose(0, 1)

    widths = (fmt.hot.page_bytes, fmt.base.page_bytes, fmt.fine_bytes, fmt.cold.page_bytes)
    hot, base, fine, cold = (pool(width) for width in widths)
    return Pools(
        fmt=fmt,
        pools=MixedPools(hot_LHGB=hot, base_LBGB=base, fine_LFGB=fine, cold_LCGB=cold),
    )


def put(
    made: Pools, layer: int, record: list[int], x_2GND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a page's K and V rows as `record` says, row by row; what they then stand for.

    Written apart from `demote`: each plane's bytes are put where the layout says.
    """
    fmt, pools = made.fmt, made.pools
    kind, first, *fine_ids = record
    if kind == HOT:
        page_planes(pools.hot_LHGB[layer], fmt.hot)[0][first] = BF16.encode(x_2GND)[0]
        stored_2GND = x_2GND.to(torch.bfloat16).float()
    elif kind == BASE:
        codes, fine, norm = encode_nested(x_2GND)
        for plane, values in zip(
            page_planes(pools.base_LBGB[layer], fmt.base), (codes, norm), strict=False
        ):
            plane[first] = values
        stored = []
        for half, fine_id in enumerate(fine_ids):
            coarse = fmt.base.codec.decode(
                codes[half], norm[half], norm[half][..., :0], fmt.head_dim
            )
            if fine_id >= 0:
                pools.fine_LFGB[layer][fine_id] = fine[half].flatten(1)
                coarse = decode_nested(codes[half], fine[half], norm[half])
            stored.append(coarse)
        stored_2GND = torch.stack(stored)
    else:
        assert kind == COLD, kind
        planes = fmt.cold.codec.encode(x_2GND)
        for plane, values in zip(
            page_planes(pools.cold_LCGB[layer], fmt.cold), planes, strict=True
        ):
            plane[first] = values
        stored_2GND = fmt.cold.codec.decode(*planes, fmt.head_dim)
    return stored_2GND[0], stored_2GND[1]


def random_rows(
    randn: Callable[..., torch.Tensor], num_kv_heads: int, head_dim: int
) -> torch.Tensor:
    """Rows of one page, K and V: [2, G, 64, D]."""
    return randn(2, num_kv_heads, PAGE_SIZE, head_dim)
