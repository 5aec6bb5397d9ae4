"""`demote_values`: write the values of pages again at 1.5 bits, once few look at them.

Letters: M moves, L layers, G KV heads, N rows, D head_dim; X base, Y fine and Z cold planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.codecs.mixed import MixedFormat, encode_cold
from subten.codecs.nested import decode_nested
from subten.core import PAGE_SIZE
from subten.kernels.mixed_pages import rows_of


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


def check_moves(pools: ValuePools, fmt: MixedFormat, moves_M3: torch.Tensor) -> None:
    """Assert what every backend of `demote_values` takes."""
    pools.check(fmt)
    assert moves_M3.dtype == torch.int32, moves_M3.dtype
    assert moves_M3.shape[1:] == (3,), moves_M3.shape
    assert moves_M3.is_contiguous(), moves_M3.stride()
    assert moves_M3.device == pools.vbase_LXGB.device, moves_M3.device
