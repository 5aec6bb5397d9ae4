"""The ops of a decode step, one file each, and which backend serves each of them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from subten.core import ConfigError, refuse
from subten.kernels.triton_shim import HAS_TRITON

logger = logging.getLogger(__name__)

OPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    name: {
        "torch": (f"subten.kernels.{module}", f"{name}_torch"),
        "triton": (f"subten.kernels.{module}", name),
    }
    for name, module in {
        "rms_norm": "norm_rope",
        "norm_rope": "norm_rope",
        "route": "route",
        "experts": "experts",
        "kv_append": "kv_append",
        "attend": "attend",
        "sample": "sample",
    }.items()
}
"""Op name to backend to (module, attribute); an absent backend falls to torch, logged once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """One implementation of every op, chosen once; `backend` says which serves which op."""

    rms_norm: Callable[..., Any]
    norm_rope: Callable[..., Any]
    route: Callable[..., Any]
    experts: Callable[..., Any]
    kv_append: Callable[..., Any]
    attend: Callable[..., Any]
    sample: Callable[..., Any]
    backend: Mapping[str, str]


def select_ops(backend: str, device: torch.device) -> Ops:
    """Pick each op's implementation: `auto` is Triton on a GPU and torch elsewhere.

    A backend that the caller names and this machine cannot serve raises ConfigError.
    """
    if backend not in ("auto", "torch", "triton"):
        raise refuse(ConfigError, "backend", backend, "auto, torch, triton")
    if backend == "triton" and not HAS_TRITON:
        raise ConfigError(
            "backend: got 'triton', but Triton is not installed; allowed: auto, torch"
        )
    if backend == "auto":
        backend = "triton" if device.type == "cuda" and HAS_TRITON else "torch"
    chosen: dict[str, Callable[..., Any]] = {}
    served: dict[str, str] = {}
    for name, table in OPS.items():
        served[name] = backend if backend in table else "torch"
        if served[name] != backend:
            logger.warning("op %s has no %s kernel: torch serves it", name, backend)
        module, attribute = table[served[name]]
        chosen[name] = getattr(importlib.import_module(module), attribute)
    assert set(chosen) == {f.name for f in fields(Ops)} - {"backend"}, chosen.keys()
    return Ops(**chosen, backend=served)
