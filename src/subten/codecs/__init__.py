"""KV formats: the table of codecs and the page that they fill.

Letters: N rows (one row = one token of one KV head), D head_dim, B bytes of one row in one plane.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from subten.core import PAGE_SIZE, ConfigError, refuse

PLANE_ALIGN_BYTES = 128
"""Every plane of a page starts at, and fills, a multiple of this: one line of a GPU's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBytes:
    """Bytes that one row (one token, one KV head, K or V) takes in each of its three planes."""

    codes: int
    scale: int
    zero: int

    @property
    def total(self) -> int:
        """Bytes of one row, planes together, before page padding."""
        return self.codes + self.scale + self.zero


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCodec:
    """One KV format: how a row of D values becomes bytes, in torch and on the device.

    `encode(x_ND float32) -> (codes_NB, scale_NB, zero_NB)`, all uint8, widths as `row_bytes(D)`.
    `decode(codes_NB, scale_NB, zero_NB, head_dim) -> x_ND float32`.
    `row_bytes(head_dim)` raises ConfigError, naming codec, head_dim and what it takes.
    `is_rotated`: rows are Hadamard-rotated before encode; queries and outputs turn with them.

    Device side, Triton functions that kernels receive as constexpr arguments:
    `device_encode(x_ND, page_N, row_N, mask_N, tables, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D)`
    stores rows `row_N` (token in page, 0..63) of the float32 tile `x_ND` into pages that start at
    the uint8 pointers `page_N`; CODES, SCALE, ZERO are the byte offsets of the planes in the page.
    `device_decode(page, row_N, mask_N, tables, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D)` returns
    `(code_ND, scale_N, zero_N)` in float32 with value = code * scale[:, None] + zero[:, None] for
    d < HEAD_DIM and code 0 beyond, so that scales act on score columns and on P; rows with mask
    False give code 0, scale 0, zero 0. `page` is one uint8 pointer.
    `tables(device)` is the tensor of constants, the same one at every call, that the pointer
    `tables` leads to; None where a codec has none, and the pointer is then not to be read.
    """

    name: str
    summary: str
    is_rotated: bool
    row_bytes: Callable[[int], RowBytes]
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    decode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
    device_encode: Any
    device_decode: Any
    tables: Callable[[torch.device], torch.Tensor] | None = None

    def __deepcopy__(self, _memo: object) -> KVCodec:
        """Itself: there is one of each, and Triton's functions cannot be copied."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class KVFormat:
    """A codec bound to a head dimension: where each plane lies in a page of 64 tokens x 1 KV head.

    Page: | K codes | K scale | K zero | V codes | V scale | V zero |, every plane padded to a
    multiple of 128 bytes; offsets and sizes in bytes. Within a plane rows follow one another.
    """

    codec: KVCodec
    head_dim: int
    row: RowBytes
    k_codes: int
    k_scale: int
    k_zero: int
    v_codes: int
    v_scale: int
    v_zero: int
    page_bytes: int

    @property
    def true_bits(self) -> float:
        """Bits per cached element in a full page, scales, zero-points and padding included."""
        return self.page_bytes * 8 / (2 * PAGE_SIZE * self.head_dim)


def kv_format(codec_name: str, head_dim: int) -> KVFormat:
    """Lay out the pages of `codec_name` for `head_dim`; ConfigError if either cannot be."""
    return layout(get_codec(codec_name), head_dim)


def layout(codec: KVCodec, head_dim: int) -> KVFormat:
    """Lay out the pages of `codec` for `head_dim`; ConfigError if it does not take that."""
    row = codec.row_bytes(head_dim)
    offsets, end = [], 0
    for _ in ("K", "V"):
        for row_plane_bytes in (row.codes, row.scale, row.zero):
            offsets.append(end)
            plane_bytes = row_plane_bytes * PAGE_SIZE
            end += -(-plane_bytes // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES
    return KVFormat(
        codec=codec,
        head_dim=head_dim,
        row=row,
        k_codes=offsets[0],
        k_scale=offsets[1],
        k_zero=offsets[2],
        v_codes=offsets[3],
        v_scale=offsets[4],
        v_zero=offsets[5],
        page_bytes=end,
    )


CODECS: Mapping[str, tuple[str, str]] = {
    "fp32": ("subten.codecs.plain", "FP32"),
    "bf16": ("subten.codecs.plain", "BF16"),
    "fp8": ("subten.codecs.fp8", "FP8"),
    "int8": ("subten.codecs.affine", "INT8"),
    "int4": ("subten.codecs.affine", "INT4"),
    "int4_g32": ("subten.codecs.affine", "INT4_G32"),
    "int4_g64": ("subten.codecs.affine", "INT4_G64"),
    "fp4": ("subten.codecs.fp4", "FP4"),
    "fp4_mx": ("subten.codecs.fp4", "FP4_MX"),
    "int2": ("subten.codecs.int2", "INT2"),
    "vq1.5": ("subten.codecs.vq", "VQ1_5"),
}
"""Codec name, as `--kv-cache-dtype` takes it, to (module, attribute)."""


def get_codec(name: str) -> KVCodec:
    """The codec called `name`; ConfigError lists the known ones."""
    if name not in CODECS:
        raise refuse(ConfigError, "kv_cache_dtype", name, ", ".join(CODECS))
    module, attribute = CODECS[name]
    codec = getattr(importlib.import_module(module), attribute)
    assert isinstance(codec, KVCodec), type(codec)
    return codec
