"""What a captured step needs: fixed inputs that the host fills, and the capture itself.

Letters: S sequences of the step, T its tokens, V vocabulary.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from subten.cache.fidelity import Span
from subten.core import PAGE_SIZE, BatchItem, Sequence
from subten.device import free_memory_bytes
from subten.kernels.sample import SamplingTensors

logger = logging.getLogger(__name__)

Step = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Runs a step on what the fixed inputs hold: logits_SV float32, and token_S int64."""


class CaptureError(Exception):
    """A step could not be captured; that says nothing against running it."""


def replay_or_step(step: Step, capture: Callable[[Step], Step], *, what: str) -> Step:
    """The replay of `what`; `step` itself where it cannot be captured, and one warning says why."""
    try:
        return capture(step)
    except CaptureError as error:
        logger.warning("%s: launched one by one, without a CUDA graph: %s", what, error)
        return step


def capture_cuda_graph(
    step: Step, *, cuts: Iterable[nn.Module] = (), reserve_bytes: int = 0
) -> Step:
    """Record `step` as CUDA graphs; the result replays them and returns the same tensors.

    One graph, or one more for each of `cuts`, modules of which each begins another: the device is
    at the first while the host launches the next. Runs `step` before, as kernels compile and
    workspaces come to be at their first launch. CaptureError where memory does not suffice, or less
    than `reserve_bytes` would be left of it, and where CUDA refuses to record.
    """
    # Before what a step puts beside itself on streams of no priority (`Beside`).
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
    except torch.OutOfMemoryError as error:
        raise CaptureError(_reason(error)) from error
    finally:
        # After a step that failed, too: kernels of one device share counters.
        torch.cuda.current_stream().wait_stream(stream)
    graphs = [torch.cuda.CUDAGraph()]

    def begin_another(*_: Any) -> None:
        graphs[-1].capture_end()
        # What lies in memory from here on comes after all of the graph before, as in one graph.
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=graphs[0].pool())

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    hooks = [module.register_forward_pre_hook(begin_another) for module in cuts]
    try:
        _check_memory(stream.device, reserve_bytes)
        with torch.cuda.stream(stream):
            graphs[0].capture_begin()
            try:
                outputs = step()
            finally:
                graphs[-1].capture_end()
        # What a graph takes is known once it is there.
        _check_memory(stream.device, reserve_bytes)
    except RuntimeError as error:
        # Out of memory, an error of CUDA (`torch.AcceleratorError`) or of a kernel's launch. One of
        # the step itself comes again where it runs by itself.
        raise CaptureError(_reason(error)) from error
    finally:
        for hook in hooks:
            hook.remove()

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        for graph in graphs:
            graph.replay()
        return outputs

    return replay


def _check_memory(device: torch.device, reserve_bytes: int) -> None:
    free_bytes = free_memory_bytes(device)
    if free_bytes < reserve_bytes:
        raise CaptureError(
            f"{free_bytes / 2**20:.0f} MiB of memory are free, and {reserve_bytes / 2**20:.0f} are "
            "kept for steps without a graph"
        )


def _reason(error: BaseException) -> str:
    """The first of the errors that led to `error`, a line: later ones come of a broken capture."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".partition("\n")[0]


MIN_KV_BUCKET = 1024
"""Tokens of the shortest bucket of KV lengths; each further one is four times as long."""


def kv_bucket(kv_len: int, max_model_len: int) -> int:
    """The KV length that a graph for `kv_len` is captured for, in whole pages."""
    bucket = MIN_KV_BUCKET
    while bucket < kv_len:
        bucket *= 4
    return min(bucket, math.ceil(max_model_len / PAGE_SIZE) * PAGE_SIZE)


SAMPLING_LAYOUT = {
    "temperature_S": "float32",
    "top_k_S": "int32",
    "top_p_S": "float32",
    "min_p_S": "float32",
    "seed_S": "int64",
    "index_S": "int64",
}
"""Inputs of `sample` without penalties, by the names of `SamplingTensors`."""


def fill_sampling(
    host: Mapping[str, np.ndarray[Any, Any]], row: int, sequence: Sequence, index: int
) -> None:
    """Say how `row` is sampled: as output token `index` of `sequence`."""
    params = sequence.request.sampling
    host["temperature_S"][row] = params.temperature
    host["top_k_S"][row] = params.top_k
    host["top_p_S"][row] = params.top_p
    host["min_p_S"][row] = params.min_p
    host["seed_S"][row] = sequence.request.seed
    host["index_S"][row] = index


def sampling_of(inputs: Mapping[str, torch.Tensor]) -> SamplingTensors:
    """How the rows of a step are sampled."""
    return SamplingTensors(**{name: inputs[name] for name in SAMPLING_LAYOUT})


def span_of(item: BatchItem) -> Span:
    """What a step computes of a sequence, as pools are told of it."""
    return span(item.sequence, item.start, item.start + item.num_tokens)


def span(sequence: Sequence, start: int, end: int) -> Span:
    """Tokens [start, end) of a sequence."""
    return Span(sequence.request.request_id, sequence.page_ids, start, end)


class Event:
    """A point in the device's queue of work; on a CPU, where nothing is queued, no point at all."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_done(self) -> bool:
        """Whether the device is past the point that was recorded last."""
        return self._event is None or self._event.query()


Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Array name to dtype and shape."""


class Inputs:
    """Named arrays on the device that one copy fills from the host.

    The host's memory is pinned, so that a copy is queued without waiting, and there are two blocks
    of it: one is filled while the copy of the other may still be on its way. With `num_blocks` 1
    the copy can be a part of the step itself (`copy`).
    """

    def __init__(self, layout: Layout, device: torch.device, *, num_blocks: int = 2) -> None:
        num_bytes = sum(_array_bytes(*kind) for kind in layout.values())
        self._blocks = []
        for _ in range(num_blocks):
            block = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            views = _views(block, layout)
            arrays = {name: view.numpy() for name, view in views.items()}
            self._blocks.append((block, arrays, Event(device)))
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.device = _views(self._device, layout)

    def next_host(self) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays that no copy reads any more, for the next `upload`."""
        self._blocks.reverse()
        _, arrays, copied = self._blocks[0]
        copied.wait()
        return arrays

    def upload(self) -> None:
        """Queue the copy of what `next_host` gave."""
        block, _, copied = self._blocks[0]
        self._device.copy_(block, non_blocking=True)
        copied.record()

    def copy(self) -> None:
        """Queue the copy within a step that is captured.

        Who fills the block again must know the step before to have ended.
        """
        ((block, _, _),) = self._blocks
        self._device.copy_(block, non_blocking=True)


class PageTable:
    """The page table on the device; a row is copied only when its pages have changed."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(num_rows, max_pages, dtype=torch.int32, pin_memory=is_cuda)
        self._array = self._host.numpy()
        self._copied = Event(device)
        self._pages: list[list[int]] = [[] for _ in range(num_rows)]
        self.device = self._host.to(device, copy=True)

    def set_row(self, row: int, page_ids: list[int]) -> bool:
        """Make `row` list `page_ids`, and say whether it did not before.

        What lies beyond them is left as it was, and never read.
        """
        if self._pages[row] == page_ids:
            return False
        self._copied.wait()
        self._pages[row] = list(page_ids)
        self._array[row, : len(page_ids)] = page_ids
        self.device[row].copy_(self._host[row], non_blocking=True)
        self._copied.record()
        return True


def _views(block: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """The arrays of `layout`, one after another in `block` uint8."""
    views, start = {}, 0
    for name, (dtype, shape) in layout.items():
        size = np.dtype(dtype).itemsize * math.prod(shape)
        views[name] = block[start : start + size].view(getattr(torch, dtype)).view(shape)
        start += _array_bytes(dtype, shape)
    return views


def _array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, up to the next multiple of 128: each starts at a line of its own."""
    return -(-np.dtype(dtype).itemsize * math.prod(shape) // 128) * 128
