"""The calls that one decode step makes of its ops, kept to be looked at or run again.

What a step reads, and how long each of its ops takes, follows from the calls themselves: whatever
the layers fuse or split, they say it through `Ops`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from subten.device import on_device
from subten.kernels import Ops
from subten.kernels.route import Routing
from subten.kernels.step import StepTensors
from subten.kernels.weight_formats import Weight
from subten.models.decoder import Decoder

HEAD = "head_logits"
"""The product with a head of full precision, which is not among `Ops`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of an op; `weight` names the first matrix among its arguments, without its layer."""

    op: str
    weight: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def label(self) -> str:
        """The op, and which of several matrices where the op is a linear layer."""
        if self.op not in ("linear", HEAD):
            return self.op
        name = self.weight.removesuffix(".weight").rpartition(".")[2]
        return f"linear {name.partition('_')[0]}"

    @property
    def routing(self) -> Routing | None:
        """What a call that chose experts gave."""
        if self.op == "linear_route":
            return self.result[1]  # type: ignore[no-any-return]
        return self.result if self.op == "route" else None

    def again(self) -> Any:
        """Run it once more on the same inputs."""
        return self.run(*self.args, **self.kwargs)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of its arguments, those in records and weights included."""
        yield from tensors_in((self.args, dict(self.kwargs)))


@contextmanager
def recorded(model: Decoder) -> Iterator[list[Call]]:
    """Within the block every op that `model` calls is written down, in order."""
    calls: list[Call] = []
    names = _weight_names(model)
    ops = model.ops
    wrapped: dict[str, Any] = {
        field.name: _watch(field.name, getattr(ops, field.name), names, calls)
        for field in fields(Ops)
        if callable(getattr(ops, field.name))
    }
    watched = replace(ops, **wrapped)
    modules: list[Any] = [m for m in model.modules() if getattr(m, "ops", None) is ops]
    for module in modules:
        module.ops = watched
    try:
        yield calls
    finally:
        for module in modules:
            module.ops = ops


@torch.inference_mode()
def record_step(model: Decoder, step: StepTensors, pages_LPGB: torch.Tensor) -> list[Call]:
    """The calls of one forward pass, which it runs without a graph."""
    with on_device(model.device), recorded(model) as calls:
        model(step, pages_LPGB)
    return calls


def experts_read(calls: list[Call]) -> float:
    """Distinct experts that a layer's tokens chose, mean over the routed layers; 1 without any."""
    routings = [call.routing for call in calls]
    counts = [r.topk_id_TK.unique().numel() for r in routings if r is not None]
    return sum(counts) / len(counts) if counts else 1.0


def _watch(
    name: str, run: Callable[..., Any], names: Mapping[int, str], calls: list[Call]
) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        found = [names[id(arg)] for arg in (*args, *kwargs.values()) if id(arg) in names]
        weight = re.sub(r"^layers\.\d+\.", "", found[0]) if found else ""
        calls.append(Call(op=name, weight=weight, run=run, args=args, kwargs=kwargs, result=result))
        return result

    return watched


def _weight_names(model: Decoder) -> dict[int, str]:
    """Names of matrices by identity; vectors, such as norms, are not what an op is told by."""
    names = {id(p): name for name, p in model.named_parameters() if p.dim() > 1}
    names |= {id(m): name for name, m in model.named_modules() if isinstance(m, Weight)}
    return names


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor within tuples, lists, dicts, records and weights."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Weight):
        yield from value.parameters()
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
