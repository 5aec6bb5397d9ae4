"""Rows as integers times a power of two: their sums are exact, so no order of adding shows.

Codecs with a least-squares norm need sums over a row, and a GPU adds in another order than a CPU.

Letters: N rows, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs.bits import magnitude_bits
from subten.kernels.triton_shim import tl, triton_jit

WHOLE_BITS = 19
"""Magnitudes are at most 2^19: 256 of them, times 10, stay below 2^31."""

_MIN_EXPONENT = -100
"""Rows below 2^-100 keep the steps of 2^-100: the power of two that scales them must be finite."""


def to_whole(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite float32 rows -> `(whole_ND int32, unit_N1 float32)` with x ~ whole * unit.

    `unit` is a power of two by which the row's largest |whole| lies in 2^18..2^19, or below where
    that value is less than 2^-100; rounding is to nearest, ties to even.
    """
    largest_N1 = x_ND.abs().amax(dim=-1, keepdim=True)
    exponent_N1 = (largest_N1.view(torch.int32) >> 23).clamp(min=_MIN_EXPONENT + 127)
    scale_N1 = ((WHOLE_BITS - 1 + 2 * 127 - exponent_N1) << 23).view(torch.float32)
    # Reciprocals of powers of two are exact.
    return (x_ND * scale_N1).round().to(torch.int32), scale_N1.reciprocal()


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """The nearest BF16 value, ties to even, of finite x >= 0; float32 in and out."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


@triton_jit
def to_whole_device(x_ND: tl.tensor) -> Any:
    """Device twin of `to_whole`; `unit` comes as [N]."""
    bits_N = tl.max(magnitude_bits(x_ND), axis=1)
    shift_N = 18 - tl.maximum((bits_N >> 23) - 127, -100)
    scaled_ND = x_ND * ((shift_N + 127) << 23).to(tl.float32, bitcast=True)[:, None]
    # The last bit of 1.5 * 2^23 is 1: adding it rounds to the nearest integer, of either sign.
    whole_ND = (scaled_ND + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return whole_ND, ((127 - shift_N) << 23).to(tl.float32, bitcast=True)


@triton_jit
def round_bf16_device(x: tl.tensor) -> Any:
    """Device twin of `round_bf16`."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
