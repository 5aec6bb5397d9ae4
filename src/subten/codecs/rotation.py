"""The Hadamard rotation of rows before a coarse codec: it spreads an outlier over its block.

Letters: D head_dim.
"""

from __future__ import annotations

import functools

import torch

from subten.codecs.bits import check_head_dim
from subten.core import ConfigError, refuse

MIN_BLOCK = 16
"""Smallest useful block: below this the rotation spreads an outlier over too few channels."""


def check_rotatable(codec_name: str, head_dim: int) -> None:
    """Refuse, with ConfigError, a head_dim that no Hadamard block of at least 16 divides."""
    check_head_dim(codec_name, head_dim)
    if head_dim % MIN_BLOCK:
        raise refuse(
            ConfigError,
            f"head_dim of kv_cache_dtype {codec_name}",
            head_dim,
            f"a multiple of {MIN_BLOCK}, which its Hadamard rotation needs; "
            "kv_cache_dtype int4_g32 takes this head_dim",
        )


@functools.cache
def hadamard(head_dim: int, device: torch.device) -> torch.Tensor:
    """The rotation [D, D], float32, orthogonal and symmetric; a row turns as `x @ rotation`.

    Block diagonal: normalised Sylvester-Hadamard blocks of the largest power of two that divides
    head_dim. The tensor is shared by its callers, who must not write to it. Rotation before
    low-bit quantization: QuaRot (Ashkboos et al., 2024), section 4.
    """
    check_rotatable("int4", head_dim)
    block = head_dim & -head_dim
    # A first call under inference mode would else leave later callers a tensor without autograd.
    with torch.inference_mode(False):
        sign = torch.ones(1, 1, dtype=torch.float64)
        while sign.shape[0] < block:
            sign = torch.cat([torch.cat([sign, sign], 1), torch.cat([sign, -sign], 1)], 0)
        blocks = torch.eye(head_dim // block, dtype=torch.float64)
        rotation_DD = torch.kron(blocks, sign / block**0.5)
        return rotation_DD.to(device=device, dtype=torch.float32)
