"""The bytes of the KV cache, and what they cost for each cached token.

Letters: L layers, P pages, G KV heads, B bytes of one page of one KV head.
"""

from __future__ import annotations

import torch

from subten.codecs import KVFormat
from subten.core import PAGE_SIZE


class PagePool:
    """All pages of all layers in one uint8 tensor `pages_LPGB`; a page id means a row of P.

    The memory is not cleared, neither at the start nor when a page is taken up again: rows beyond
    the length of a sequence are never read (`attend` masks the load, not the product), so what a
    former holder left, a NaN included, cannot reach the next one.
    """

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

    def true_bits(self, *, num_pages: int, num_tokens: int) -> float | None:
        """Bits per cached element when `num_tokens` tokens lie in `num_pages` pages.

        Every byte of the pages counts, the rows that no token fills yet included, so that it tends
        to `fmt.true_bits` from above as sequences grow. None without tokens.
        """
        if num_tokens == 0:
            return None
        num_elements = num_tokens * self.num_layers * self.num_kv_heads * 2 * self.fmt.head_dim
        return self.bytes_used(num_pages) * 8 / num_elements


def bytes_per_page(num_layers: int, num_kv_heads: int, fmt: KVFormat) -> int:
    """Bytes that one page id takes over all layers and KV heads."""
    return num_layers * num_kv_heads * fmt.page_bytes
