"""`demote_values`: cold planes stand for what base and fine planes stood for; nothing else moves.

Letters: M moves, N rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiled import compile_sm90, run_compiler
from mixed_pages import make_values

from subten.codecs.mixed import decode_cold, encode_cold
from subten.codecs.nested import decode_nested
from subten.core import PAGE_SIZE
from subten.kernels import demote as demote_module
from subten.kernels.demote import DemotePlan, ValuePools, demote_values, demote_values_torch

OPS = [pytest.param(demote_values, marks=pytest.mark.triton), demote_values_torch]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter pays for each program, not for its rows."""
    if device.type == "cpu":
        monkeypatch.setattr(demote_module, "DEMOTE_PLAN", DemotePlan(block_rows=64, num_warps=4))


def copied(pools: ValuePools) -> ValuePools:
    names = [field.name for field in dataclasses.fields(ValuePools)]
    return ValuePools(**{name: getattr(pools, name).clone() for name in names})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("head_dim", [16, 48])
def test_cold_planes_are_written_and_nothing_else(
    op: Callable[..., None], generator: torch.Generator, device: torch.device, head_dim: int
) -> None:
    fmt, pools = make_values(generator, device, head_dim, num_planes=3)
    expected = copied(pools)
    moves = [(2, 1, 0), (-1, -1, -1), (0, -1, 2)]
    for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for base, fine, cold in (moves[0], moves[2]):
            plane_B = pools.vbase_LXGB[layer, base, head]
            codes_NB = plane_B[:-PAGE_SIZE].view(PAGE_SIZE, -1)
            fine_NB = pools.vfine_LYGB[layer, fine, head].view(PAGE_SIZE, -1)
            x_ND = decode_nested(codes_NB, fine_NB if fine >= 0 else None, plane_B[-PAGE_SIZE:])
            codes_NB, norm_N = encode_cold(x_ND)
            expected.vcold_LZGB[layer, cold, head] = torch.cat([codes_NB.flatten(), norm_N])
            error = (decode_cold(codes_NB, norm_N) - x_ND).square().sum() / x_ND.square().sum()
            # vq1.5 loses .21 of Gaussian rows (docs/kv-cache.md); codes at random are less like
            # them at 4 bits and exactly two levels at 2.
            assert error.item() < 0.5
    op(pools, fmt, torch.tensor(moves, dtype=torch.int32, device=device))
    for field in dataclasses.fields(ValuePools):
        left, right = getattr(pools, field.name), getattr(expected, field.name)
        assert torch.equal(left, right), (field.name, int((left != right).sum()))


@pytest.mark.parametrize("op", OPS)
def test_no_moves_and_wrong_ones(
    op: Callable[..., None], generator: torch.Generator, device: torch.device
) -> None:
    fmt, pools = make_values(generator, device, 16, num_planes=1)
    before = copied(pools)
    moves_M3 = torch.full((1, 3), -1, dtype=torch.int32, device=device)
    op(pools, fmt, moves_M3[:0])
    op(pools, fmt, moves_M3)
    assert torch.equal(pools.vcold_LZGB, before.vcold_LZGB)
    narrow = dataclasses.replace(pools, vfine_LYGB=pools.vfine_LYGB[..., 1:])
    for broken, moves in ((pools, moves_M3.long()), (pools, moves_M3[:, :2]), (narrow, moves_M3)):
        with pytest.raises(AssertionError):
            op(broken, fmt, moves)


def compile_for_sm90() -> None:
    """The kernel as it is launched; run with the interpreter off."""
    names = ("base_ptr", "fine_ptr", "cold_ptr")
    pointers = {"moves_ptr": "*i32", "tables_ptr": "*fp16"} | dict.fromkeys(names, "*u8")
    for head_dim in (16, 48):
        block_d = 16 if head_dim == 16 else 64
        block_n = demote_module.DEMOTE_PLAN.block_rows
        sizes = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": block_n, "PAGE": PAGE_SIZE}
        compile_sm90(demote_module._demote_kernel, pointers, sizes)


@pytest.mark.triton
def test_compiles_for_sm90(tmp_path: Path) -> None:
    """Products must be as deep as the compiler lays them out."""
    run_compiler("import test_demote as t; t.compile_for_sm90()", Path(__file__).parent, tmp_path)
