"""`demote`: each plane gets the bytes that its codec gives, and nothing else is touched.

Letters: L layers, G KV heads, M moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from mixed_pages import Pools, make_pools, put, random_rows

from subten.codecs.nested import BASE, COLD, HOT
from subten.kernels import demote as demote_module
from subten.kernels.demote import DemotePlan, MixedPools, demote, demote_torch

Randn = Callable[..., torch.Tensor]
OPS = [pytest.param(demote, marks=pytest.mark.triton), demote_torch]
PADDING = [-1] * 8


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter pays for each program, not for its rows."""
    if device.type == "cpu":
        monkeypatch.setattr(demote_module, "DEMOTE_PLAN", DemotePlan(block_rows=64, num_warps=4))


def copy(made: Pools) -> Pools:
    values = {
        field.name: getattr(made.pools, field.name).clone()
        for field in dataclasses.fields(MixedPools)
    }
    return dataclasses.replace(made, pools=MixedPools(**values))


def assert_same(found: Pools, expected: Pools) -> None:
    for field in dataclasses.fields(MixedPools):
        left, right = (getattr(made.pools, field.name) for made in (found, expected))
        assert torch.equal(left, right), (field.name, int((left != right).sum()))


def check(
    op: Callable[..., None],
    made: Pools,
    randn: Randn,
    moves: list[tuple[list[int], list[int]]],
    *,
    bad_row: bool = False,
) -> None:
    """Pages at their sources; after `op` targets are as `put` writes them, and no byte else."""
    device = made.pools.hot_LHGB.device
    expected_from = []
    for layer in range(len(made.pools.hot_LHGB)):
        for source, target in moves:
            num_kv_heads = made.pools.hot_LHGB.shape[2]
            x_2GND = random_rows(randn, num_kv_heads, made.fmt.head_dim)
            if bad_row:
                x_2GND[0, 0, 5, 3], x_2GND[1, 0, 63, 0] = float("nan"), float("inf")
            stored = put(made, layer, source, x_2GND)
            expected_from.append((layer, target, torch.stack(stored)))
    expected = copy(made)
    for layer, target, stored_2GND in expected_from:
        put(expected, layer, target, stored_2GND)
    rows = [source + target for source, target in moves]
    rows.insert(1, PADDING)
    moves_M8 = torch.tensor(rows, dtype=torch.int32, device=device)
    before_M8 = moves_M8.clone()
    op(made.pools, made.fmt, moves_M8)
    assert_same(made, expected)
    assert torch.equal(moves_M8, before_M8)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("head_dim", [48, 64])
def test_hot_pages_get_base_and_fine_planes(
    op: Callable[..., None], randn: Randn, device: torch.device, head_dim: int
) -> None:
    made = make_pools(head_dim, num_layers=2, num_kv_heads=2, num_planes=4, device=device)
    moves = [
        ([HOT, 0, -1, -1], [BASE, 3, 2, 0]),
        ([HOT, 3, -1, -1], [BASE, 1, 1, -1]),
        ([HOT, 1, -1, -1], [BASE, 0, -1, -1]),
    ]
    check(op, made, randn, moves)


@pytest.mark.parametrize("op", OPS)
def test_pages_become_cold_from_wherever_they_lie(
    op: Callable[..., None], randn: Randn, device: torch.device
) -> None:
    made = make_pools(16, num_layers=1, num_kv_heads=1, num_planes=4, device=device)
    moves = [
        ([HOT, 2, -1, -1], [COLD, 0, -1, -1]),
        ([BASE, 1, 3, -1], [COLD, 2, -1, -1]),
        ([BASE, 2, -1, -1], [COLD, 3, -1, -1]),
    ]
    check(op, made, randn, moves)


@pytest.mark.parametrize("op", OPS)
def test_rows_that_are_not_finite_stay_visible(
    op: Callable[..., None], randn: Randn, device: torch.device
) -> None:
    made = make_pools(16, num_layers=1, num_kv_heads=1, num_planes=3, device=device)
    moves = [
        ([HOT, 0, -1, -1], [BASE, 0, 0, 1]),
        ([HOT, 1, -1, -1], [COLD, 1, -1, -1]),
    ]
    check(op, made, randn, moves, bad_row=True)


@pytest.mark.parametrize("op", OPS)
def test_no_moves(op: Callable[..., None], device: torch.device) -> None:
    made = make_pools(16, num_layers=1, num_kv_heads=1, num_planes=1, device=device)
    before = copy(made)
    for rows in ([], [PADDING]):
        moves_M8 = torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 8)
        op(made.pools, made.fmt, moves_M8)
    assert_same(made, before)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_kind_on_a_gpu(randn: Randn, device: torch.device, head_dim: int) -> None:
    made = make_pools(head_dim, num_layers=3, num_kv_heads=4, num_planes=5, device=device)
    moves = [
        ([HOT, 0, -1, -1], [BASE, 3, 2, 0]),
        ([HOT, 3, -1, -1], [BASE, 1, 1, -1]),
        ([HOT, 1, -1, -1], [COLD, 2, -1, -1]),
        ([BASE, 4, 4, 3], [COLD, 0, -1, -1]),
    ]
    check(demote, made, randn, moves)


@pytest.mark.parametrize("op", OPS)
def test_wrong_inputs_fail_loudly(op: Callable[..., None], device: torch.device) -> None:
    made = make_pools(16, num_layers=2, num_kv_heads=1, num_planes=1, device=device)
    moves_M8 = torch.tensor([PADDING], dtype=torch.int32, device=device)
    one_layer = dataclasses.replace(made.pools, cold_LCGB=made.pools.cold_LCGB[:1])
    narrow = dataclasses.replace(made.pools, fine_LFGB=made.pools.fine_LFGB[..., 1:])
    for pools, moves in (
        (made.pools, moves_M8.long()),
        (made.pools, moves_M8[:, :7]),
        (made.pools, torch.cat([moves_M8, moves_M8], 1)[:, ::2]),
        (one_layer, moves_M8),
        (narrow, moves_M8),
    ):
        with pytest.raises(AssertionError):
            op(pools, made.fmt, moves)
