"""`append_attend` and its twin: the two ops one after the other, for prompts and decode steps.

Letters as in test_attend.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attend import POISON, make_scene, tolerances
from test_kv_append import make_rope

from conftest import assert_close
from subten.core import PAGE_SIZE
from subten.kernels.append_attend import append_attend, append_attend_torch
from subten.kernels.attend import attend_torch
from subten.kernels.kv_append import kv_append_torch, page_planes
from subten.kernels.norm_rope import norm_rope_torch

Randn = Callable[..., torch.Tensor]
OPS = [pytest.param(append_attend, marks=pytest.mark.triton), append_attend_torch]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", ["bf16", "int4"])
@pytest.mark.parametrize("num_new", [[1, 1, 1], [1, 5, 33]], ids=["decode", "mixed"])
def test_appends_then_attends(
    randn: Randn, op: Callable[..., torch.Tensor], codec: str, num_new: list[int]
) -> None:
    """Rows of this step are NaN in the pages before; their queries, turned once, see them after."""
    scene = make_scene(randn, codec, 64, num_kv_heads=2, lengths=[1, 65, 100])
    step = scene.step(num_new)
    for plane in page_planes(scene.pages_PGB, scene.fmt):
        plane[step.slot_T // PAGE_SIZE, :, :, step.slot_T % PAGE_SIZE] = POISON
    q_THD, k_TGD, v_TGD = randn(sum(num_new), 10, 64).split((6, 2, 2), dim=1)
    cos_sin_PD = make_rope(200, 64, q_THD.device)
    weights = [1 + randn(64, scale=0.2) for _ in range(2)]
    norms: dict[str, Any] = {
        "q_norm_weight_D": weights[0],
        "k_norm_weight_D": weights[1],
        "eps": 1e-6,
    }
    expected_PGB = scene.pages_PGB.clone()
    kv_append_torch(
        k_TGD,
        v_TGD,
        expected_PGB,
        scene.fmt,
        cos_sin_PD,
        step.position_T,
        step.slot_T,
        rotation_DD=scene.rotation_DD,
        norm_weight_D=weights[1],
        eps=1e-6,
    )
    turned_THD = norm_rope_torch(
        q_THD, cos_sin_PD, step.position_T, norm_weight_D=weights[0], eps=1e-6
    )

    def attended(pages_PGB: torch.Tensor) -> torch.Tensor:
        return attend_torch(
            turned_THD,
            pages_PGB,
            scene.fmt,
            step,
            scale=scene.scale,
            rotation_DD=scene.rotation_DD,
        )

    out_THD = op(
        q_THD,
        k_TGD,
        v_TGD,
        scene.pages_PGB,
        scene.fmt,
        cos_sin_PD,
        step,
        scale=scene.scale,
        rotation_DD=scene.rotation_DD,
        **norms,
    )
    # The twin on the pages as the op has left them: a code may fall to its other side in FP32.
    assert_close(out_THD, attended(scene.pages_PGB), *tolerances(scene, turned_THD), codec)
    if op is append_attend_torch:
        assert torch.equal(scene.pages_PGB, expected_PGB)
        assert torch.equal(out_THD, attended(expected_PGB))
