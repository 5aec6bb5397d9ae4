"""Which backend serves a GPU that has no products of BF16, and what is said about it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from subten import kernels
from subten.core import ConfigError
from subten.kernels import OPS, select_ops
from subten.kernels.cuda import runtime

GPU = torch.device("cuda", 0)


def set_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """Let `kernels` find that GPU, with Triton but without the extra for CUDA C++."""
    found = SimpleNamespace(name=name, capability=capability)
    monkeypatch.setattr(kernels, "detect", lambda _name: found, raising=False)
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(runtime, "is_available", lambda _device: False)


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (8, 0), (8, 9), (12, 0)])
def test_auto_is_torch_on_a_gpu_without_products_of_bf16(
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_gpu(monkeypatch, "Tesla T4", capability)
    with caplog.at_level(logging.INFO, logger="subten.kernels"):
        served = set(select_ops("auto", GPU).backend.values())
    is_old = capability < (8, 0)
    assert served == ({"torch"} if is_old else {"triton"})
    expected = (
        "backend torch, as Triton needs compute capability 8.0 or above "
        f"(Tesla T4 has {capability[0]}.{capability[1]})"
    )
    assert caplog.messages == ([expected] if is_old else [])


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_kernels_asked_for_on_such_a_gpu_are_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpu(monkeypatch, "Tesla T4", (7, 5))
    with pytest.raises(ConfigError) as caught:
        select_ops(backend, GPU)
    assert str(caught.value) == (
        f"backend: got '{backend}', which needs compute capability 8.0 or above "
        "(Tesla T4 has 7.5); allowed: auto, torch"
    )


def test_torch_asked_for_on_such_a_gpu_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_gpu(monkeypatch, "Tesla T4", (7, 5))
    assert select_ops("torch", GPU).backend == dict.fromkeys(OPS, "torch")
    assert caplog.messages == []
