"""Which device a process of torchrun takes, with GPUs that the test makes up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from subten.core import ConfigError
from subten.device import Device, detect
from subten.train import world


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Process 1 of 2 on a machine with GPUs; the list takes what is set and joined, in order."""
    found: list[Any] = []

    def made_up(name: str) -> Device:
        kind, _, index = name.partition(":")
        return replace(detect("cpu"), kind=kind, index=int(index or "0"))

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(world, "has_gpu", lambda: True)
    monkeypatch.setattr(world, "detect", made_up)
    monkeypatch.setattr(world, "use_gpu", found.append)
    monkeypatch.setattr(world.dist, "init_process_group", lambda name, **_: found.append(name))
    monkeypatch.setattr(world.dist, "get_rank", lambda: 1)
    return found


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_process_takes_the_gpu_of_its_rank_and_then_joins(
    device: str, calls: list[Any]
) -> None:
    joined = world.join_world(device)
    gpu = torch.device("cuda", 1)
    assert (joined.rank, joined.size, joined.device) == (1, 2, gpu)
    assert calls == [gpu, "nccl"]


def test_processes_without_a_gpu_share_the_cpu(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.join_world("cpu").device == torch.device("cpu")
    monkeypatch.setattr(world, "has_gpu", lambda: False)
    assert world.join_world("auto").device == torch.device("cpu")
    assert calls == ["gloo", "gloo"]


def test_one_gpu_for_all_processes_is_refused(calls: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"device: got 'cuda:0'; allowed under torchrun: auto"):
        world.join_world("cuda:0")
    assert calls == []


def test_a_process_alone_takes_what_it_is_told(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    alone = world.join_world("cuda:3")
    assert (alone.rank, alone.size, alone.device) == (0, 1, torch.device("cuda", 3))
    assert calls == []
