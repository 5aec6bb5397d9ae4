"""The ops of a decode step, one file each, and which backend serves each of them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from subten.core import ConfigError, refuse
from subten.device import MIN_CAPABILITY, detect
from subten.kernels.cuda import runtime
from subten.kernels.triton_shim import HAS_TRITON

logger = logging.getLogger(__name__)

BACKENDS = ("cuda", "triton", "torch")
"""From the fastest to the one that runs everywhere; an op without a kernel in one takes the next.

`cuda` is CUDA C++ for steps of few tokens; what such a kernel does not take, it hands to Triton.
"""

_TABLE: Mapping[str, tuple[str, str | None]] = {
    "embed": ("embed", None),
    "rms_norm": ("norm_rope", None),
    "norm_rope": ("norm_rope", None),
    "linear": ("linear", "linear"),
    "route": ("route", "route"),
    "linear_route": ("linear_route", "linear_route"),
    "experts": ("experts", "experts"),
    "kv_append": ("kv_append", "kv_append"),
    "attend": ("attend", "attend"),
    "append_attend": ("append_attend", "append_attend"),
    "append_mixed": ("append_mixed", None),
    "attend_mixed": ("attend_mixed", "attend_mixed"),
    "demote_values": ("demote", None),
    "sample": ("sample", None),
    "advance": ("advance", None),
}

OPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    name: {
        "torch": (f"subten.kernels.{module}", f"{name}_torch"),
        "triton": (f"subten.kernels.{module}", name),
        **({"cuda": (f"subten.kernels.cuda.{cuda_module}", name)} if cuda_module else {}),
    }
    for name, (module, cuda_module) in _TABLE.items()
}
"""Op name to backend to (module, attribute)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """One implementation of every op, chosen once; `backend` says which serves which op.

    For more than `max_gather_tokens` tokens `experts` wants a routing with an order.
    """

    embed: Callable[..., Any]
    rms_norm: Callable[..., Any]
    norm_rope: Callable[..., Any]
    linear: Callable[..., Any]
    route: Callable[..., Any]
    linear_route: Callable[..., Any]
    experts: Callable[..., Any]
    kv_append: Callable[..., Any]
    attend: Callable[..., Any]
    append_attend: Callable[..., Any]
    append_mixed: Callable[..., Any]
    attend_mixed: Callable[..., Any]
    demote_values: Callable[..., Any]
    sample: Callable[..., Any]
    advance: Callable[..., Any]
    max_gather_tokens: int
    backend: Mapping[str, str]


def select_ops(backend: str, device: torch.device) -> Ops:
    """Pick each op's implementation: `auto` is the first of BACKENDS that `device` can run.

    A backend that the caller names and this machine cannot serve raises ConfigError. That `auto`
    passes over Triton for an old GPU is logged.
    """
    if backend not in ("auto", *BACKENDS):
        raise refuse(ConfigError, "backend", backend, ", ".join(("auto", *BACKENDS)))
    old_gpu = _old_gpu(device)
    can_run = {
        "cuda": HAS_TRITON and runtime.is_available(device),
        "triton": HAS_TRITON and not old_gpu,
    }
    if not can_run.get(backend, True):
        needs = {"triton": "Triton", "cuda": "a CUDA GPU, Triton and the extra subten[cuda]"}
        allowed = ", ".join(name for name in ("auto", *BACKENDS) if can_run.get(name, True))
        raise ConfigError(
            f"backend: got {backend!r}, which needs {old_gpu or needs[backend]}; allowed: {allowed}"
        )
    if backend == "auto":
        is_gpu = device.type == "cuda"
        backend = next(name for name in BACKENDS if name == "torch" or (is_gpu and can_run[name]))
        if old_gpu:
            logger.warning("backend torch, as Triton needs %s", old_gpu)
    chosen: dict[str, Callable[..., Any]] = {}
    served: dict[str, str] = {}
    for name, table in OPS.items():
        served[name] = next(b for b in BACKENDS[BACKENDS.index(backend) :] if b in table)
        module, attribute = table[served[name]]
        chosen[name] = getattr(importlib.import_module(module), attribute)
    others = {"max_gather_tokens", "backend"}
    assert set(chosen) == {f.name for f in fields(Ops)} - others, chosen.keys()
    module, _ = OPS["experts"][served["experts"]]
    limit = importlib.import_module(module).MAX_GATHER_TOKENS
    return Ops(**chosen, max_gather_tokens=limit, backend=served)


def _old_gpu(device: torch.device) -> str:
    """What kernels need that this GPU lacks; empty for others, and for a CPU."""
    found = detect(str(device)) if device.type == "cuda" else None
    if found is None or found.capability >= MIN_CAPABILITY:
        return ""
    least, has = (".".join(map(str, number)) for number in (MIN_CAPABILITY, found.capability))
    return f"compute capability {least} or above ({found.name} has {has})"
