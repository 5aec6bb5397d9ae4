"""`plan_attend`: every page of every sequence has a program, and the batch changes little."""

from __future__ import annotations

from typing import Any

import pytest

from subten.core import PAGE_SIZE
from subten.kernels.attend_plan import MAX_PARTIAL_BYTES, AttendPlan, plan_attend


def plan(**changes: Any) -> AttendPlan:
    defaults: dict[str, Any] = {
        "num_sms": 132,
        "num_tiles": 1,
        "num_kv_heads": 8,
        "group": 4,
        "head_dim": 128,
        "out_bytes": 4 * 32 * 128,
        "is_float32": False,
        "max_query_len": 1,
        "max_kv_len": 32_768,
    }
    return plan_attend(**(defaults | changes))


@pytest.mark.parametrize("max_query_len", [1, 2, 500])
@pytest.mark.parametrize("max_kv_len", [1, 64, 65, 4097, 1_000_000])
@pytest.mark.parametrize("num_tiles", [1, 5, 17, 64, 1000])
def test_plan_covers_every_sequence(max_query_len: int, max_kv_len: int, num_tiles: int) -> None:
    for group in (1, 3, 5, 7, 8, 12, 24, 71):
        for head_dim, is_float32 in ((64, False), (128, True), (256, False)):
            chosen = plan(
                max_query_len=max_query_len,
                max_kv_len=max_kv_len,
                num_tiles=num_tiles,
                group=group,
                head_dim=head_dim,
                is_float32=is_float32,
            )
            assert chosen.block_heads * chosen.head_blocks >= group
            assert chosen.block_rows >= chosen.tile_tokens * chosen.block_heads
            assert (chosen.block_rows & (chosen.block_rows - 1)) == 0
            most = -(-max_kv_len // PAGE_SIZE)
            for num_pages in {1, most // 3 + 1, max(1, most - 1), most}:
                each = max(chosen.min_pages, -(-num_pages // chosen.num_splits))
                assert -(-num_pages // each) <= chosen.grid_splits, (num_pages, chosen)
            assert chosen.grid_splits <= chosen.num_splits


def test_plan_of_decode_depends_on_the_batch_in_tiers_only() -> None:
    splits = [plan(num_tiles=n).num_splits for n in range(1, 100)]
    assert splits[:16] == [33] * 16, splits
    assert set(splits) == {33, 4, 1}
    assert splits == sorted(splits, reverse=True)
    assert {plan(max_kv_len=n).num_splits for n in (1, 64, 65, 9999)} == {33}


def test_plan_bounds_partial_results() -> None:
    out_bytes = 2048 * 32 * 128 * 4
    chosen = plan(max_query_len=2048, num_tiles=128, max_kv_len=131_072, out_bytes=out_bytes)
    assert chosen.num_splits * out_bytes <= MAX_PARTIAL_BYTES
