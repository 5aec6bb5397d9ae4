"""`append_mixed`: kernel and twin leave the same bytes; exact rows; flags; nothing else touched.

Letters: T tokens, G KV heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixed_pages import int32, make_pages

from subten.codecs.mixed import MixedFormat
from subten.codecs.rotation import hadamard
from subten.kernels import append_mixed as append_module
from subten.kernels.append_mixed import AppendMixedPlan, append_mixed, append_mixed_torch
from subten.kernels.mixed_pages import MixedPages, Window, by_channels, read_levels
from subten.kernels.step import StepTensors, make_step

Randn = Callable[..., torch.Tensor]
OPS = [pytest.param(append_mixed, marks=pytest.mark.triton), append_mixed_torch]
POOLS = ("k_PGB", "vbase_XGB", "vfine_YGB", "vcold_ZGB", "recent_NGE", "sink_XGB", "k_out_PGB")
PLACES = [(0, 1, -1), (2, -1, -1), (1, 0, -1), (-1, -1, 0)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter pays for each program, not for its rows."""
    if device.type == "cpu":
        plan = AppendMixedPlan(block_tokens=8, num_warps=1)
        monkeypatch.setattr(append_module, "APPEND_MIXED_PLANS", (plan, plan))


def copied(pages: MixedPages) -> MixedPages:
    values = {name: getattr(pages, name) for name in POOLS}
    return dataclasses.replace(
        pages, **{name: x.clone() for name, x in values.items() if x is not None}
    )


def read_rows(
    pages: MixedPages, fmt: MixedFormat, page_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of whole pages, [G, N, D]."""
    k_GND, k_norm_GN, v_GND, v_norm_GN = read_levels(pages, fmt, page_N)
    return by_channels(k_GND * k_norm_GN[..., None]), by_channels(v_GND * v_norm_GN[..., None])


def whole_rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Values whose rotation is exact in any order, at a head_dim whose block is a power of 4."""
    return torch.randint(-20, 21, shape, generator=generator).float()


def make_case(
    generator: torch.Generator, device: torch.device, head_dim: int, num_outliers: int, bits: int
) -> tuple[Any, MixedPages, StepTensors, Window, torch.Tensor, torch.Tensor]:
    """Seven tokens: five at the start of a sequence, two that end a page of another."""
    fmt, pages = make_pages(
        generator,
        device,
        head_dim,
        places=PLACES,
        bits=bits,
        num_sinks=3,
        sinks=[-1, -1, 1, 0],
        num_outliers=num_outliers,
    )
    step = make_step(
        token_ids=[[0] * 5, [0] * 2], starts=[0, 62], page_ids=[[2], [1]], device=device
    )
    step.slot_T[4] = -1
    row_T = int32(5, -1, 0, 7, 2, -1, 1, device=device)
    zero_S = torch.zeros(2, dtype=torch.int32, device=device)
    window = Window(size=4, row_T=row_T, base_S=zero_S, cap_S=zero_S + 4, from_S=zero_S)
    k_TGD = torch.randn(7, 2, head_dim, generator=generator)
    k_TGD[2, 0] = 0.0
    v_TGD = whole_rows(generator, 7, 2, head_dim)
    return fmt, pages, step, window, k_TGD.to(device), v_TGD.to(device)


@pytest.mark.triton
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("head_dim", "num_outliers", "has_feedback"), [(16, 0, True), (48, 1, True), (64, 2, False)]
)
def test_kernel_writes_the_bytes_of_the_twin(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    bits: int,
    head_dim: int,
    num_outliers: int,
    has_feedback: bool,
) -> None:
    fmt, pages, step, window, k_TGD, v_TGD = make_case(
        generator, device, head_dim, num_outliers, bits
    )
    feedback_GDD = (randn(2, head_dim, head_dim) * 0.2) if has_feedback else None
    done = []
    for op in (append_mixed, append_mixed_torch):
        copy, bad_T = copied(pages), torch.zeros(7, dtype=torch.int32, device=device)
        keywords = {"rotation_DD": hadamard(head_dim, device), "bad_T": bad_T}
        op(k_TGD, v_TGD, copy, fmt, step, window, feedback_GDD=feedback_GDD, **keywords)
        assert not bool(bad_T.any())
        done.append(copy)
    for name in POOLS:
        left, right = (getattr(copy, name) for copy in done)
        if left is not None:
            left, right = left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
            assert torch.equal(left, right), (name, int((left != right).sum()))


@pytest.mark.parametrize("op", OPS)
def test_rows_go_where_they_belong(
    generator: torch.Generator, device: torch.device, op: Callable[..., None]
) -> None:
    """Exact rows to the bit; planes decode to rows close by; all other bytes stay."""
    fmt, pages, step, window, k_TGD, v_TGD = make_case(generator, device, 64, 2, 4)
    before = copied(pages)
    op(k_TGD, v_TGD, pages, fmt, step, window, rotation_DD=hadamard(64, device))
    exact_TGE = torch.cat([k_TGD, v_TGD @ hadamard(64, device)], dim=-1).bfloat16()
    for token, row in enumerate(window.row_T.tolist()):
        if row >= 0:
            assert torch.equal(pages.recent_NGE[row], exact_TGE[token])
    assert bool(pages.recent_NGE[[3, 4, 6]].isnan().all())
    assert pages.sink_XGB is not None
    assert pages.k_out_PGB is not None
    assert before.k_out_PGB is not None
    # Page 2 has sink plane 1, of three rows; page 1 none, and no fine plane.
    rows_G2SD = pages.sink_XGB[1].contiguous().view(torch.bfloat16).view(2, 2, 3, 64)
    expected_SGE = rows_G2SD.permute(2, 0, 1, 3).flatten(2)
    assert torch.equal(expected_SGE, exact_TGE[:3])
    assert bool((pages.sink_XGB[0] == 0xFF).all())
    k_GND, v_GND = read_rows(pages, fmt, int32(2, 1, device=device))
    written = [0, 1, 2, 3, 64 + 62, 64 + 63]
    tokens = [0, 1, 2, 3, 5, 6]
    for x_GND, columns, limit in ((k_GND, slice(0, 64), 0.02), (v_GND, slice(64, 128), 0.3)):
        want_GND = exact_TGE[tokens, :, columns].transpose(0, 1).float()
        error_GND = (x_GND[:, written] - want_GND).square().sum() / want_GND.square().sum()
        assert error_GND.item() < limit
    rest = [row for row in range(128) if row not in written]
    old_k_GND, old_v_GND = read_rows(before, fmt, int32(2, 1, device=device))
    assert torch.equal(k_GND[:, rest], old_k_GND[:, rest])
    assert torch.equal(v_GND[:, rest], old_v_GND[:, rest])
    for name, others in (("k_PGB", [0, 3]), ("vbase_XGB", [0]), ("vfine_YGB", [1])):
        assert torch.equal(getattr(pages, name)[others], getattr(before, name)[others]), name


@pytest.mark.parametrize("op", OPS)
def test_bad_tokens_are_flagged_and_no_others(
    generator: torch.Generator, device: torch.device, op: Callable[..., None]
) -> None:
    """Case K20: NaN, infinity, and norms above the range of a byte, in keys and in values."""
    fmt, pages, step, window, k_TGD, v_TGD = make_case(generator, device, 16, 0, 3)
    k_TGD[0, 1, 3], v_TGD[1, 0, 15], k_TGD[3, 0], v_TGD[6] = math.nan, math.inf, 1e3, 1e4
    k_TGD[4] = math.nan  # writes nothing
    bad_T = torch.zeros(7, dtype=torch.int32, device=device)
    bad_T[5] = 7
    op(k_TGD, v_TGD, pages, fmt, step, window, rotation_DD=hadamard(16, device), bad_T=bad_T)
    assert (bad_T != 0).tolist() == [True, True, False, True, False, True, True]
    assert bad_T[5].item() == 7
    assert bool(pages.recent_NGE[5, 1, 3].isnan())


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_and_wrong_inputs(
    generator: torch.Generator, device: torch.device, op: Callable[..., None]
) -> None:
    fmt, pages, step, window, k_TGD, v_TGD = make_case(generator, device, 16, 0, 3)
    keywords: dict[str, Any] = {"rotation_DD": hadamard(16, device)}
    none = {"slot_T": step.slot_T[:0], "position_T": step.position_T[:0]}
    empty = dataclasses.replace(window, row_T=window.row_T[:0])
    before = copied(pages)
    op(k_TGD[:0], v_TGD[:0], pages, fmt, dataclasses.replace(step, **none), empty, **keywords)
    assert torch.equal(pages.k_PGB, before.k_PGB)
    wide = dataclasses.replace(pages, k_bits=4)
    for args in (
        (k_TGD.bfloat16(), v_TGD, pages, fmt, step, window),
        (k_TGD, v_TGD[:, :1], pages, fmt, step, window),
        (k_TGD, v_TGD, wide, fmt, step, window),
        (k_TGD, v_TGD, pages, fmt, step, empty),
    ):
        with pytest.raises(AssertionError):
            op(*args, **keywords)
