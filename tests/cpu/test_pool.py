"""Bytes of the page pool: what is allocated is what is reported."""

from __future__ import annotations

import pytest
import torch

from subten.cache.pool import PagePool
from subten.codecs import CODECS, kv_format
from subten.core import PAGE_SIZE


# Cases K16 and K18: measured bytes of a growing cache against the stated bits.
@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_a_token_tend_to_the_stated_bits(codec: str, head_dim: int) -> None:
    fmt = kv_format(codec, head_dim)
    pool = PagePool(3, 4, 2, fmt, torch.device("cpu"))
    assert pool.pages_LPGB.shape == (3, 4, 2, fmt.page_bytes)
    assert pool.total_bytes == pool.pages_LPGB.numel()
    assert pool.bytes_per_page * 4 == pool.total_bytes
    assert pool.capacity == 4 * PAGE_SIZE
    # Whole pages: nothing but codes, scales and zero-points, as long as planes fill 128 bytes.
    row_bits = fmt.row.total * 8 / head_dim
    assert pool.true_bits(num_pages=4, num_tokens=256) == fmt.true_bits <= 1.05 * row_bits
    assert pool.bytes_per_token == pytest.approx(fmt.true_bits / 8 * head_dim * 2 * 2 * 3)
    # 16 tokens of prompt and 200 decoded ones: the ragged fourth page costs 256 / 216.
    grown = pool.true_bits(num_pages=4, num_tokens=216)
    assert grown == pytest.approx(fmt.true_bits * 256 / 216)
    assert pool.true_bits(num_pages=0, num_tokens=0) is None


def test_int4_takes_at_most_three_tenths_of_bf16() -> None:
    assert kv_format("int4", 64).page_bytes <= 0.30 * kv_format("bf16", 64).page_bytes
