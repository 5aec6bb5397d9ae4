"""Each op of a decode step by itself: microseconds, bytes, share of the roof.

One step is recorded; then the calls of one op, over all layers, are run after one another in a
CUDA graph, and the time of a replay is divided by their number. Layers have weights and pages of
their own, so the L2 cache is cold where it is cold in a step; where all layers together are less
than COLD_BYTES (the routers, a short cache) further copies of what is read join the round.
Activations stay warm, as in a step. On a CPU the calls run in a loop.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

import torch

from subten.bench.random_model import fill_pool, free_memory
from subten.bench.recording import HEAD, Call, experts_read, recorded, tensors_in
from subten.cache.pool import PagePool
from subten.core import PAGE_SIZE, ConfigError, refuse
from subten.device import on_device
from subten.engine.roof import Roof
from subten.kernels.cpu_linear import head_logits
from subten.kernels.linear_route import Router
from subten.kernels.sample import SamplingTensors
from subten.kernels.step import StepTensors, make_step
from subten.kernels.weight_formats import Weight
from subten.models.decoder import Decoder

COLD_BYTES = 2**28
"""What must be read between two reads of one byte: four times the L2 of an H200."""

COLD_OPS = ("linear", HEAD, "route", "linear_route", "experts", "attend", "append_attend")
"""Ops that read weights or pages."""

STATIC_BYTES = 2**18
"""A tensor argument of at least this is a weight or a cache, not an activation."""

MIN_CALLS = 16
"""Calls in a graph, so that the launch of the graph itself does not count."""


@torch.inference_mode()
def measure_kernels(
    model: Decoder,
    *,
    context_len: int,
    batch_size: int,
    roof: Roof,
    num_replays: int = 200,
    progress: Callable[[float], None] = lambda _share: None,
) -> list[dict[str, Any]]:
    """One entry an op, in the order of the step; `us_p50` and `bytes` are those of one call."""
    for name, value in (("context_len", context_len), ("batch_size", batch_size)):
        if value < 1:
            raise refuse(ConfigError, name, value, "an integer of at least 1")
    free_memory(model.device)
    pool = PagePool(
        num_layers=model.config.num_layers,
        num_pages=batch_size * math.ceil(context_len / PAGE_SIZE),
        num_kv_heads=model.config.num_kv_heads,
        fmt=model.fmt,
        device=model.device,
    )
    fill_pool(model, pool)
    step = _decode_step(model, pool, context_len=context_len, batch_size=batch_size)
    with on_device(model.device), recorded(model) as calls:
        logits_SV = model(step, pool.pages_LPGB)
        calls += _plain_head(model, calls)
        model.ops.sample(logits_SV, _sampling(batch_size, model.device))
    touched = experts_read(calls)
    groups: dict[str, list[Call]] = {}
    for call in calls:
        if call.op != "embed":  # a row of a table: launched, and hardly any bytes
            groups.setdefault(call.label, []).append(call)
    rows = []
    for done, (label, group) in enumerate(groups.items()):
        progress(done / len(groups))
        num_bytes = sum(_bytes_of(call, model, pool, step) for call in group) / len(group)
        with on_device(model.device):
            seconds = _seconds_a_call(group, num_bytes, model, num_replays)
        rows.append(
            {
                "kernel": label,
                "batch_size": batch_size,
                "context_len": context_len,
                "us_p50": seconds * 1e6,
                "bytes": round(num_bytes),
                "tb_s": num_bytes / seconds / 1e12,
                "roof_tb_s": roof.tb_s,
                "roof_fraction": num_bytes / seconds / roof.bytes_per_s,
                "calls_per_step": len(group),
                "experts_per_layer": touched,
                "num_replays": num_replays,
                "backend": model.ops.backend.get(group[0].op, "torch"),
            }
        )
    progress(1.0)
    return rows


def _decode_step(
    model: Decoder, pool: PagePool, *, context_len: int, batch_size: int
) -> StepTensors:
    """A token of each sequence at the end of `context_len` tokens."""
    width = pool.num_pages // batch_size
    tokens = torch.randint(model.config.vocab_size, (batch_size, 1)).tolist()
    return make_step(
        token_ids=tokens,
        starts=[context_len - 1] * batch_size,
        page_ids=[list(range(s * width, (s + 1) * width)) for s in range(batch_size)],
        device=model.device,
    )


def _plain_head(model: Decoder, calls: Sequence[Call]) -> list[Call]:
    """The call of a head that is not quantised, which the recorded ops do not show."""
    if model.head_VD is not None and model.head_VD.format != "none":
        return []
    head_VD = model.embedding_VD if model.head_VD is None else model.head_VD.codes
    h_SD = [call.result for call in calls if call.op == "rms_norm"][-1]
    return [
        Call(
            op=HEAD,
            weight="head",
            run=head_logits,
            args=(h_SD, head_VD),
            kwargs={},
            result=head_logits(h_SD, head_VD),
        )
    ]


def _sampling(batch_size: int, device: torch.device) -> SamplingTensors:
    """What `SamplingParams()` means."""

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch_size,), value, dtype=dtype, device=device)

    return SamplingTensors(
        temperature_S=full(1.0, torch.float32),
        top_k_S=full(0, torch.int32),
        top_p_S=full(1.0, torch.float32),
        min_p_S=full(0.0, torch.float32),
        seed_S=torch.arange(batch_size, device=device),
        index_S=full(0, torch.int64),
    )


def _bytes_of(call: Call, model: Decoder, pool: PagePool, step: StepTensors) -> float:
    """Bytes that the call must read and write: arguments and results once, each.

    Of pages what attention reads or the new tokens fill, of stacked experts the chosen ones, of
    the tables of angles and rotation nothing, of a router either what is folded or what is not.
    """
    seen = _tables(model) | _unread_of_router(call)
    row_bytes = pool.num_kv_heads * pool.fmt.page_bytes / PAGE_SIZE
    share = 1.0
    if call.op == "experts":
        share = _share_of_experts(call, model.config.num_experts)
    total, has_pages = 0.0, False
    for tensor in [*call.tensors(), *tensors_in(call.result)]:
        if _is_within(tensor, pool.pages_LPGB):
            has_pages = True
        elif tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            is_expert = tensor.dim() == 3 and tensor.shape[0] == model.config.num_experts
            size = tensor.numel() * tensor.element_size()
            total += size * share if is_expert else size
    if call.op in ("attend", "append_attend"):
        return total + int(step.kv_len_S.sum()) * row_bytes
    return total + (len(step.token_id_T) * row_bytes if has_pages else 0.0)


def _unread_of_router(call: Call) -> set[int]:
    """Where that lies which a `linear_route` is given and leaves alone."""
    unread: list[torch.Tensor | None] = []
    for router in (arg for arg in call.args if isinstance(arg, Router)):
        assert call.routing is not None, call.op
        if call.routing.ahead is None:
            unread.append(router.folded_EM)
        else:
            unread += [router.gate_ED, router.norm_weight_D]
    return {t.data_ptr() for t in unread if t is not None}


def _tables(model: Decoder) -> set[int]:
    """Where the tables of angles and rotation lie, which all layers read a row of, or nothing."""
    return {t.data_ptr() for t in (model.cos_sin_PD, model.rotation_DD) if t is not None}


def _share_of_experts(call: Call, num_experts: int) -> float:
    chosen = next(arg.topk_id_TK for arg in call.args if hasattr(arg, "topk_id_TK"))
    return int(chosen.unique().numel()) / num_experts


def _is_within(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _seconds_a_call(
    calls: Sequence[Call], num_bytes: float, model: Decoder, num_replays: int
) -> float:
    """Median over replays of the time of one call."""
    device = model.device
    if device.type != "cuda":
        return median(_loop_s(calls) for _ in range(num_replays)) / len(calls)
    turns = list(calls)
    if calls[0].op in COLD_OPS:
        num_copies = min(math.ceil(COLD_BYTES / (num_bytes * len(calls))), 32) - 1
        shared = _tables(model)
        turns += [_with_own_memory(call, shared) for _ in range(num_copies) for call in calls]
    turns *= math.ceil(MIN_CALLS / len(turns))
    for call in turns:
        call.again()  # kernels compile and workspaces come to be before the capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in turns:
            call.again()
    return median(_replays_s(graph, num_replays)) / len(turns)


def _loop_s(calls: Sequence[Call]) -> float:
    start_s = time.perf_counter()
    for call in calls:
        call.again()
    return time.perf_counter() - start_s


def _replays_s(graph: torch.cuda.CUDAGraph, num_replays: int) -> list[float]:
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    pairs = itertools.pairwise(marks)
    return [float(start.elapsed_time(end)) / 1e3 for start, end in pairs]


def _with_own_memory(call: Call, shared: set[int]) -> Call:
    """The same call on copies of its weights and pages."""
    return replace(
        call,
        args=tuple(_own(arg, shared) for arg in call.args),
        kwargs={name: _own(arg, shared) for name, arg in call.kwargs.items()},
    )


def _own(value: Any, shared: set[int]) -> Any:
    if isinstance(value, Weight):
        return copy.deepcopy(value)
    if isinstance(value, torch.Tensor) and value.data_ptr() not in shared:
        return value.clone() if value.numel() * value.element_size() >= STATIC_BYTES else value
    if isinstance(value, Router):
        return replace(
            value, **{f.name: _own(getattr(value, f.name), shared) for f in fields(value)}
        )
    return value
