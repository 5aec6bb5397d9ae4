"""Planes of an adaptive cache: what a page of one KV head takes in each of its pools.

    K          | low 2 bits 64 x D/4 | high bits 64 x (0, D/8 or D/4) | norms 64 |    shaped.py
    V base     | codes 64 x D/4 | norms 64 |                                         nested.py
    V fine     | 64 x D/4 |
    V cold     | codes 64 x 3D/16 | norms 64 |                                       vq.py
    K outliers | 64 x O x 2 |                                                        BF16
    sinks      | K S x 2D | V S x 2D |                                               BF16

Every part starts at a multiple of 16 bytes. Norms are bytes (norm_byte.py).

Letters: D head_dim, N rows, O outlier channels, S sink rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.codecs.norm_byte import decode_norm, encode_norm
from subten.codecs.rotation import check_rotatable
from subten.codecs.shaped import WIDTHS
from subten.codecs.vq import decode_vectors, encode_vectors
from subten.core import PAGE_SIZE

COLD_BIAS = 240
"""Of norms of `vq1.5`, 1/32 deviation and less: deviations from 2^-10 to 2^5.9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedFormat:
    """Bytes of planes, one page and KV head each, at one head dimension."""

    head_dim: int

    def k_bytes(self, bits: int) -> int:
        """A page of keys at 2, 3 or 4 bits a channel."""
        assert bits in WIDTHS, bits
        return PAGE_SIZE * (self.head_dim * bits // 8 + 1)

    @property
    def base_bytes(self) -> int:
        """Values at 2 bits."""
        return PAGE_SIZE * (self.head_dim // 4 + 1)

    @property
    def fine_bytes(self) -> int:
        """The 2 bits that values have more."""
        return PAGE_SIZE * self.head_dim // 4

    @property
    def cold_bytes(self) -> int:
        """Values at 1.5 bits, in place of both."""
        return PAGE_SIZE * (self.head_dim * 3 // 16 + 1)

    def outlier_bytes(self, num_outliers: int) -> int:
        """Outlier channels of a page of keys."""
        return PAGE_SIZE * num_outliers * 2

    def exact_bytes(self, num_rows: int) -> int:
        """BF16 rows of keys and values: of sinks, or of recent tokens."""
        return num_rows * 4 * self.head_dim


def mixed_format(head_dim: int) -> MixedFormat:
    """The format for `head_dim`; ConfigError for one that is not a multiple of 16, or above 256."""
    check_rotatable("adaptive", head_dim)
    return MixedFormat(head_dim=head_dim)


def encode_cold(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 rows -> `(codes_NB, norm_N)` uint8 of a cold plane; finite rows within the range."""
    codes_NB, norm_N1, _ = encode_vectors(x_ND)
    return codes_NB, encode_norm(norm_N1[..., 0], COLD_BIAS)[0]


def decode_cold(codes_NB: torch.Tensor, norm_N: torch.Tensor) -> torch.Tensor:
    """Inverse of `encode_cold`: float32 [N, D]."""
    return decode_vectors(codes_NB) * decode_norm(norm_N, COLD_BIAS)[..., None]
