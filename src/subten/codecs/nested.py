"""Pages of mixed fidelity: a 2-bit plane that stands alone, and a plane that refines it to 4 bits.

The base of a row is what codec `int2` stores, byte for byte: codes and norm. The fine plane has the
two bits that tell which quarter of its cell a value lies in; with it a row has 4 bits a channel.
Dropping the fine plane takes no arithmetic, and no value is ever rounded twice.

    hot   | K 64 x 2D | V 64 x 2D |                                       BF16, rotated
    base  | K codes 64 x D/4 | K norm 64 x 2 | V codes | V norm |         int2
    fine  | 64 x D/4 |                                                    of K or of V
    cold  | K codes 64 x 3D/16 | K norm 64 x 2 | V codes | V norm |       vq1.5

Letters: N rows, D head_dim, Q D / 4, L layers, G KV heads, P page ids, H hot, B base, F fine and C
cold planes (ids of their own), the last dimension bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from subten.codecs import KVCodec, KVFormat, kv_format, layout
from subten.codecs.bits import bf16_to_bytes, bytes_to_bf16, load_bf16, store_bf16
from subten.codecs.lloyd_max import (
    FINE_LEVELS,
    level_2bit,
    level_4bit,
    load_pairs,
    magnitude_codes,
    magnitude_codes_device,
    norm_of,
    norm_of_device,
    pack_pairs,
    store_pairs,
    unpack_pairs,
)
from subten.codecs.plain import BF16
from subten.core import PAGE_SIZE
from subten.kernels.triton_shim import tl, triton_jit

EMPTY, HOT, BASE, COLD = -1, 0, 1, 2
"""What a page is, the first number of its record (kind, first, fine_k, fine_v) in `place_P4`.

`first` is the id of its plane of that kind; `fine_k` and `fine_v` are ids of fine planes or -1.
"""

BF16_ROTATED: KVCodec = dataclasses.replace(
    BF16, name="bf16_rotated", summary="BF16 of rotated rows, for hot pages", is_rotated=True
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedFormat:
    """The planes that pages of one head dimension may lie in; `fine_bytes` of K or of V alone."""

    head_dim: int
    hot: KVFormat
    base: KVFormat
    cold: KVFormat
    fine_bytes: int


def mixed_format(head_dim: int) -> MixedFormat:
    """Formats of hot, base, fine and cold planes; ConfigError where int2 refuses `head_dim`."""
    base, cold = kv_format("int2", head_dim), kv_format("vq1.5", head_dim)
    plane_bytes = base.row.codes * PAGE_SIZE
    return MixedFormat(
        head_dim=head_dim,
        hot=layout(BF16_ROTATED, head_dim),
        base=base,
        cold=cold,
        fine_bytes=plane_bytes,
    )


def encode_nested(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 rows -> `(codes_NQ, fine_NQ, norm_N2)`, uint8; codes and norm are those of `int2`."""
    x_ND, norm_N1, is_outer_ND = norm_of(x_ND)
    code_ND = magnitude_codes(x_ND, norm_N1, is_outer_ND)
    fine_NQ = pack_pairs(code_ND & 3)
    codes_NQ = pack_pairs(code_ND >> 2 | (x_ND < 0) << 1)
    return codes_NQ, fine_NQ, bf16_to_bytes(norm_N1)


def decode_nested(
    codes_NQ: torch.Tensor, fine_NQ: torch.Tensor, norm_N2: torch.Tensor
) -> torch.Tensor:
    """Rows at 4 bits, float32 [N, D]; without the fine plane it is `int2`'s decode."""
    # A code is is_outer + 2 * is_negative: with the fine code below, the sign is the top bit.
    positive_8 = torch.tensor(FINE_LEVELS, device=codes_NQ.device)
    level_16 = torch.cat([positive_8, -positive_8])
    code_ND = unpack_pairs(codes_NQ) * 4 + unpack_pairs(fine_NQ)
    return level_16[code_ND.long()] * bytes_to_bf16(norm_N2)


@triton_jit
def device_store_nested(
    x_ND: tl.tensor,
    page: tl.tensor,
    fine: tl.tensor,
    has_fine: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Device twin of `encode_nested`: into a base plane, and a fine plane where there is one."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    x_ND, norm_N, is_outer_ND = norm_of_device(x_ND, HEAD_DIM, BLOCK_D)
    code_ND = magnitude_codes_device(x_ND, norm_N, is_outer_ND)
    base_ND = (code_ND >> 2) | ((x_ND < 0).to(tl.int32) << 1)
    store_pairs(page + CODES + row_N * QUARTER, base_ND, mask_N, HEAD_DIM, BLOCK_D)
    store_bf16(page + SCALE, row_N, norm_N, mask_N)
    if has_fine:
        store_pairs(fine + row_N * QUARTER, code_ND & 3, mask_N, HEAD_DIM, BLOCK_D)


@triton_jit
def device_load_nested(
    page: tl.tensor,
    fine: tl.tensor,
    has_fine: tl.tensor,
    row_N: tl.tensor,
    mask_N: tl.tensor,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """`(level_ND, norm_N)` float32 with value = level * norm, at 4 bits or, without fine, at 2.

    Level 0 past HEAD_DIM, both 0 in masked rows. `has_fine` is one bool, the same for all rows.
    """
    QUARTER: tl.constexpr = HEAD_DIM // 4
    code_ND = load_pairs(page + CODES + row_N * QUARTER, mask_N, HEAD_DIM, BLOCK_D)
    if has_fine:
        fine_ND = load_pairs(fine + row_N * QUARTER, mask_N, HEAD_DIM, BLOCK_D)
        level_ND = level_4bit(code_ND, fine_ND)
    else:
        level_ND = level_2bit(code_ND)
    mask_ND = mask_N[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    return tl.where(mask_ND, level_ND, 0.0), load_bf16(page + SCALE, row_N, mask_N)
