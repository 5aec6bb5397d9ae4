"""`attend_mixed` on CUDA against dense FP64 attention: mixes of pages, exact rows, tables, masses.

On a CPU the kernel's own source runs in the emulator of test_cuda_attend.py.

Letters as in test_attend_mixed.py; F frequencies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_launcher import use_kernels
from test_attend_mixed import check, make_scene
from test_cuda_attend import emulated_launch, no_counter_is_left  # noqa: F401

from subten.kernels import attend_mixed as triton_mixed
from subten.kernels.cuda import runtime
from subten.kernels.cuda.attend import DecodePlan
from subten.kernels.cuda.attend_mixed import attend_mixed

Randn = Callable[..., torch.Tensor]
SMALL = DecodePlan(num_splits=3, min_slices=1, num_warps=2, num_stages=2)
POLLS = dataclasses.replace(SMALL, polls=True)
PLACES = [(0, -1, -1), (1, 1, -1), (3, 0, -1), (4, -1, -1), (2, 2, -1), (6, 3, -1), (5, -1, -1)]
"""Pages at 2 and at 4 bits of V; none cold."""
LONG: dict[str, Any] = {
    "page_ids": [[1, 6, 2, 5, 3, 4, 0], [2, 0], [5]],
    "lengths": [443, 65, 64],
    "num_new": [1, 1, 1],
}
SHORT: dict[str, Any] = {"page_ids": [[2], [4, 1]], "lengths": [2, 127], "num_new": [1, 1]}


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on the GPU, or emulated; Triton's own must not step in."""
    use_kernels(device, monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(runtime, "launch", emulated_launch)
    monkeypatch.setattr(triton_mixed, "attend_mixed", None)


def on_cuda(**choices: Any) -> Callable[..., torch.Tensor]:
    return functools.partial(attend_mixed, plan=SMALL, **choices)


def rotary(randn: Randn, num: int, head_dim: int, factor: float = 1.25) -> torch.Tensor:
    """Cosines and sines of angles of all sizes, times a factor."""
    frequency_F = 10000.0 ** -torch.rand(head_dim // 2, device=randn(1).device)
    angle_PF = torch.arange(num, device=frequency_F.device)[:, None] * frequency_F
    return torch.cat([angle_PF.cos(), angle_PF.sin()], dim=1).float() * factor


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("head_dim", "group", "layout", "options"),
    [
        (128, 8, SHORT, {"num_kv_heads": 2}),
        (128, 3, LONG, {"size": 70, "num_sinks": 5}),
        (64, 5, LONG, {"num_sinks": 0}),
        (64, 1, SHORT, {"size": 1, "num_kv_heads": 2}),
    ],
    ids=["128 short", "128", "64", "64 short"],
)
def test_matches_dense(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    bits: int,
    head_dim: int,
    group: int,
    layout: dict[str, Any],
    options: dict[str, Any],
) -> None:
    scene = make_scene(
        randn, generator, device, head_dim, **layout, **options, bits=bits, places=PLACES
    )
    num_heads = group * scene.pages.num_kv_heads
    q_THD = randn(len(scene.lengths), num_heads, head_dim, dtype=torch.bfloat16)
    check(scene, on_cuda(), q_THD)
    longest = max(scene.lengths)
    table_PC = rotary(randn, longest + 3, head_dim)
    table_PC[longest:] = math.nan
    check(scene, on_cuda(), q_THD, coef_THC=3 * randn(*q_THD.shape), table_PC=table_PC)
