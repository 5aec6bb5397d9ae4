"""The bytes of the KV cache, and what they cost for each cached token.

Letters: L layers, P pages, G KV heads, B bytes of one page of one KV head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from subten.cache.adaptive_pool import AdaptivePool
from subten.cache.fidelity import Fidelity, Span
from subten.cache.use import CacheUse
from subten.codecs import KVFormat
from subten.core import PAGE_SIZE


class PagePool:
    """All pages of all layers in one uint8 tensor `pages_LPGB`; a page id means a row of P.

    The memory is not cleared, neither at the start nor when a page is taken up again: rows beyond
    the length of a sequence are never read (`attend` masks the load, not the product), so what a
    former holder left, a NaN included, cannot reach the next one.
    """

    fidelity: Fidelity | None = None

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        fmt: KVFormat,
        device: torch.device,
    ) -> None:
        self.fmt = fmt
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        shape = (num_layers, num_pages, num_kv_heads, fmt.page_bytes)
        self.pages_LPGB = torch.empty(shape, dtype=torch.uint8, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that fit, over all sequences."""
        return self.num_pages * PAGE_SIZE

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page id: all layers and KV heads, K and V, padding included."""
        return bytes_per_page(self.num_layers, self.num_kv_heads, self.fmt)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in a full page: codes, scales, zero-points, padding."""
        return self.bytes_per_page / PAGE_SIZE

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.bytes_per_page

    def bytes_used(self, num_pages: int) -> int:
        """Bytes of `num_pages` pages."""
        return num_pages * self.bytes_per_page

    @property
    def full_page_bits(self) -> float:
        """Bits an element in a full page."""
        return self.fmt.true_bits

    def bits(self, num_bytes: int, num_tokens: int) -> float | None:
        """Bits per cached element of so many bytes; None without tokens."""
        num_elements = num_tokens * self.num_layers * self.num_kv_heads * 2 * self.fmt.head_dim
        return num_bytes * 8 / num_elements if num_tokens else None

    def use(self, page_ids: Sequence[int], *, num_seqs: int = 1) -> CacheUse:  # noqa: ARG002
        """What these pages take; a sequence has nothing else."""
        num_bytes = self.bytes_used(len(page_ids))
        return CacheUse(num_bytes=num_bytes, pages_by_kind={self.fmt.codec.name: len(page_ids)})

    def eager_step(self, spans: Sequence[Span]) -> torch.Tensor:  # noqa: ARG002
        """What the model gets for a step: `pages_LPGB`."""
        return self.pages_LPGB

    def decode_step(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """What the model gets for a captured step of one token a sequence."""
        return self.pages_LPGB

    chunk_step = decode_step

    def decode_layout(self, num_rows: int) -> dict[str, Any]:  # noqa: ARG002
        """Arrays besides the step's own that a captured step needs: none."""
        return {}

    chunk_layout = decode_layout

    def fill_decode(self, host: Mapping[str, Any], spans: Sequence[Span]) -> None:
        """Nothing to fill."""

    def fill_chunk(self, host: Mapping[str, Any], span: Span | None) -> None:
        """Nothing to fill."""

    def prepare(self, spans: Sequence[Span]) -> None:
        """Before a step: nothing to do, a page lies where it lies."""

    def settle(self, spans: Sequence[Span], *, is_decode: bool) -> None:
        """After a step was queued: nothing to do."""

    def true_bits(self, *, num_pages: int, num_tokens: int) -> float | None:
        """Bits per cached element when `num_tokens` tokens lie in `num_pages` pages.

        Every byte of the pages counts, the rows that no token fills yet included, so that it tends
        to `fmt.true_bits` from above as sequences grow. None without tokens.
        """
        return self.bits(self.bytes_used(num_pages), num_tokens)


KVPool = PagePool | AdaptivePool
"""What an engine keeps keys and values in."""


def bytes_per_page(num_layers: int, num_kv_heads: int, fmt: KVFormat) -> int:
    """Bytes that one page id takes over all layers and KV heads."""
    return num_layers * num_kv_heads * fmt.page_bytes
