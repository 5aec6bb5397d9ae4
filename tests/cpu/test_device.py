"""What the machine is asked, and the one thing that it is told."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from subten.bench import kernels, kv_lab, quality, random_model, recording
from subten.bench.random_model import random_decoder
from subten.bench.shapes import get_shape
from subten.cache.pool import PagePool
from subten.calibration import keys_at_load
from subten.core import ConfigError
from subten.device import detect
from subten.engine import roof
from subten.kernels import Ops
from subten.kernels.step import make_step
from subten.layers import block
from subten.models.decoder import Decoder


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:99", "", "cpu:0"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"device: got .*allowed: auto, cpu"):
        detect(name)


def test_cpu_is_what_torch_calls_cpu() -> None:
    assert detect("cpu").torch_device == torch.device("cpu")
    assert detect("cpu").memory_bytes > 0


def test_freed_memory_is_kept_where_glibc_is() -> None:
    # In a process of its own: the setting stays until the process ends.
    code = "from subten.device import keep_freed_memory; print(keep_freed_memory())"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, check=True, text=True)
    is_glibc = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"
    assert answer.stdout.strip() == str(is_glibc)


def make_pool(model: Decoder) -> PagePool:
    config = model.config
    return PagePool(config.num_layers, 1, config.num_kv_heads, model.fmt, model.device)


def run_kernels(model: Decoder) -> None:
    found = roof.Roof(bytes_per_s=1e9, num_bytes=1, how="test")
    kernels.measure_kernels(model, context_len=3, batch_size=1, roof=found, num_replays=1)


def run_block(model: Decoder) -> None:
    sizes = {"d_model": 32, "num_heads": 2, "num_kv_heads": 1, "num_experts": 2, "top_k": 1}
    module = block.FusedMoEQuantizedAttention(**sizes, d_ffn=16, head_dim=32, max_len=64)
    for part in module.modules():
        if hasattr(part, "ops"):
            part.ops = model.ops
    x_BTD = torch.zeros(1, 2, 32, dtype=torch.bfloat16)
    module(x_BTD, module.new_cache(1))


def run_step(model: Decoder) -> None:
    step = make_step(token_ids=[[1, 2]], starts=[0], page_ids=[[0]], device=model.device)
    recording.record_step(model, step, make_pool(model).pages_LPGB)


ENTRIES: dict[str, tuple[ModuleType, Callable[[Decoder], object]]] = {
    "measure_roof": (roof, lambda model: roof.measure_roof(model.device, num_bytes=2**20)),
    "calibrate_keys": (
        keys_at_load,
        lambda model: keys_at_load.calibrate_keys(model, list(range(256)), folder=None),
    ),
    "block": (block, run_block),
    "evaluate_kv": (
        quality,
        lambda model: quality.evaluate_kv(model, [1, 2, 3], codecs=["int4"], window=3),
    ),
    "hidden_states": (
        kv_lab,
        lambda model: kv_lab.hidden_states(model, torch.tensor([1, 2, 3]), kv_lab.EXACT),
    ),
    "logits": (kv_lab, lambda model: kv_lab.logits(model, torch.zeros(1, model.config.d_model))),
    "fill_pool": (random_model, lambda model: random_model.fill_pool(model, make_pool(model))),
    "record_step": (recording, run_step),
    "measure_kernels": (kernels, run_kernels),
}
"""Where kernels are launched outside of an engine's step, by name."""


@pytest.mark.parametrize("name", ENTRIES)
@torch.inference_mode()
def test_kernels_are_launched_on_their_own_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is not torch's runs on the current GPU, wherever its tensors are."""
    current: list[torch.device] = []
    launched_on: list[torch.device | None] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        try:
            yield
        finally:
            current.pop()

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            launched_on.append(current[-1] if current else None)
            return run(*args, **kwargs)

        return launch

    module, run = ENTRIES[name]
    model = random_decoder(get_shape("tiny-qwen3"), device=torch.device("cpu"))
    found = {f.name: getattr(model.ops, f.name) for f in fields(Ops)}
    ops = replace(model.ops, **{op: watched(each) for op, each in found.items() if callable(each)})
    for part in model.modules():
        if hasattr(part, "ops"):
            part.ops = ops
    monkeypatch.setattr(roof, "_time", watched(roof._time))
    for each in {random_model, module}:  # `fill_pool` is a part of others
        monkeypatch.setattr(each, "on_device", on_device, raising=False)
    run(model)
    assert set(launched_on) == {model.device}
