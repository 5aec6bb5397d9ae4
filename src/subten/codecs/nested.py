"""Values at 2 bits, and a plane that refines them to 4: rows, rotated, with a norm of one byte.

Base codes are those of `int2` (lloyd_max.py). The fine plane has the two bits that tell which
quarter of its cell a value lies in; with it a row has 4 bits a channel. Dropping the fine plane
takes no arithmetic, and no value is ever rounded twice.

Rows are finite: a row with a NaN or an infinity, or with a norm above the range of the byte, comes
with a flag, for the caller to refuse, and what is stored of it means nothing.

Letters: N rows, D head_dim, Q D / 4.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from subten.codecs.lloyd_max import (
    FINE_LEVELS,
    INNER,
    OUTER,
    level_2bit,
    level_4bit,
    levels_by_bytes,
    magnitude_codes,
    magnitude_codes_device,
    norm_of,
    norm_of_device,
    pack_pairs,
    pair_table,
    store_pairs,
)
from subten.codecs.norm_byte import (
    decode_norm,
    encode_norm,
    encode_norm_device,
    exact_norm_device,
)
from subten.kernels.triton_shim import tl, triton_jit

BIAS = 208
"""Norms from 2^-13 to 2^2.9, deviations of a row from 2^-10.4 to 2^5.4."""


def encode_nested(
    x_ND: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 rows -> `(codes_NQ, fine_NQ, norm_N, is_bad_N)`, uint8 but for the flags."""
    x_ND, norm_N1, is_outer_ND, is_finite_N1 = norm_of(x_ND)
    byte_N, is_over_N = encode_norm(norm_N1[..., 0], BIAS)
    code_ND = magnitude_codes(x_ND, decode_norm(byte_N, BIAS)[..., None], is_outer_ND)
    fine_NQ = pack_pairs(code_ND & 3)
    codes_NQ = pack_pairs(code_ND >> 2 | (x_ND < 0) << 1)
    return codes_NQ, fine_NQ, byte_N, is_over_N | ~is_finite_N1[..., 0]


def decode_nested(
    codes_NQ: torch.Tensor, fine_NQ: torch.Tensor | None, norm_N: torch.Tensor
) -> torch.Tensor:
    """Rows at 4 bits, or without the fine plane at 2: float32 [N, D]."""
    return nested_levels(codes_NQ, fine_NQ).mT.flatten(-2) * decode_norm(norm_N, BIAS)[..., None]


def nested_levels(codes_NQ: torch.Tensor, fine_NQ: torch.Tensor | None) -> torch.Tensor:
    """Rows over their norms as `levels_by_bytes` has them."""
    return levels_by_bytes(codes_NQ, fine_NQ, _level_pairs(fine_NQ is not None, codes_NQ.device))


@functools.cache
def _level_pairs(is_fine: bool, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        if not is_fine:
            return pair_table(torch.tensor([INNER, OUTER, -INNER, -OUTER], device=device))
        # By fine code, then by base code: is_outer, four levels later, + 2 * is_negative.
        positive_24 = torch.tensor(FINE_LEVELS, device=device).view(2, 4)
        return pair_table(torch.cat([positive_24, -positive_24]).T.flatten())


@triton_jit
def device_store_nested(
    x_ND: tl.tensor,
    base_N: tl.tensor,
    fine_N: tl.tensor,
    norm_N: tl.tensor,
    mask_N: tl.tensor,
    fine_mask_N: tl.tensor,
    table_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """Device twin of `encode_nested`, into the rows at these pointers; returns `is_bad_N`.

    `table_ptr` leads to `norm_byte.norm_table`.
    """
    x_ND, size_N, is_outer_ND, is_bad_N = norm_of_device(x_ND, HEAD_DIM, BLOCK_D)
    byte_N, is_over_N = encode_norm_device(size_N, 208)
    code_ND = magnitude_codes_device(x_ND, exact_norm_device(byte_N, table_ptr, 208), is_outer_ND)
    base_ND = (code_ND >> 2) | ((x_ND < 0).to(tl.int32) << 1)
    store_pairs(base_N, base_ND, mask_N, HEAD_DIM, BLOCK_D)
    store_pairs(fine_N, code_ND & 3, fine_mask_N, HEAD_DIM, BLOCK_D)
    tl.store(norm_N, byte_N.to(tl.uint8), mask=mask_N)
    return is_bad_N | is_over_N


@triton_jit
def nested_level(base: tl.tensor, fine: tl.tensor, has_fine: tl.tensor) -> Any:
    """Levels of base codes (int32), refined by codes of a fine plane where there is one."""
    return tl.where(has_fine, level_4bit(base, fine), level_2bit(base))
