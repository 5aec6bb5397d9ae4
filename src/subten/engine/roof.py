"""The roof: how fast this device reads memory when nothing else is asked of it.

A decode step reads each weight once and writes almost nothing, so what bounds it is a pure read,
not a copy: a copy turns the bus around between reads and writes and comes out lower.

Letters: N words of 4 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from subten.device import on_device
from subten.kernels.read_sum import MAX_PROGRAM_WORDS, READ_LAUNCHES, ReadLaunch, read_sum
from subten.kernels.triton_shim import HAS_TRITON

GPU_BYTES = 4 * 2**30
"""Some 70 times the L2 of an H200, and 0.9 ms to read: launch and tail are below half a percent."""

CPU_BYTES = 2**27
"""Several times the last-level cache that one core of most processors fills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """Read-only bandwidth: the best median over several ways to read, and which way that was."""

    bytes_per_s: float
    num_bytes: int
    how: str

    @property
    def tb_s(self) -> float:
        """In 1e12 bytes a second."""
        return self.bytes_per_s / 1e12


def measure_roof(device: torch.device, *, num_bytes: int | None = None, num_reads: int = 9) -> Roof:
    """Read `num_bytes` of random data `num_reads` times in each of several ways.

    Every read's sum is compared with torch's, so that no way wins by leaving something out. The
    buffer is freed again. On a GPU a Triton kernel with loads of 16 bytes a thread reads; on a
    CPU, or without Triton, torch's own sums do.
    """
    if num_bytes is None:
        num_bytes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    assert num_bytes % (4 * MAX_PROGRAM_WORDS) == 0, (num_bytes, 4 * MAX_PROGRAM_WORDS)
    # Random, never zeros: zeros cost less power, and so may run at a higher clock.
    words_N = torch.empty(num_bytes // 8, dtype=torch.int64, device=device).random_()
    words_N = words_N.view(torch.int32)
    is_triton = device.type == "cuda" and HAS_TRITON
    best = Roof(bytes_per_s=0.0, num_bytes=num_bytes, how="none")
    with on_device(device):
        for name, read in (_triton_reads(words_N) if is_triton else _torch_reads(words_N)).items():
            seconds = median(_time(read, device) for _ in range(num_reads))
            if num_bytes / seconds > best.bytes_per_s:
                best = Roof(bytes_per_s=num_bytes / seconds, num_bytes=num_bytes, how=name)
    return best


def _triton_reads(words_N: torch.Tensor) -> dict[str, Callable[[], None]]:
    """A way for each launch, compiled and checked."""
    expected = int(words_N.sum(dtype=torch.int64)) % 2**32
    reads: dict[str, Callable[[], None]] = {}
    for launch in READ_LAUNCHES:
        got = int(read_sum(words_N, launch).sum(dtype=torch.int64)) % 2**32
        assert got == expected, (str(launch), got, expected)

        def read(launch: ReadLaunch = launch) -> None:
            read_sum(words_N, launch)

        reads[f"triton, {launch}"] = read
    return reads


def _torch_reads(words_N: torch.Tensor) -> dict[str, Callable[[], None]]:
    floats_N = (words_N & 0x3F7FFFFF).view(torch.float32)  # no NaN, nothing large
    longs_N = words_N.view(torch.int64)
    return {
        "torch, int64 sum": lambda: _discard(longs_N.sum()),
        "torch, float32 sum": lambda: _discard(floats_N.sum()),
        "torch, float32 max": lambda: _discard(floats_N.max()),
    }


def _discard(_result: torch.Tensor) -> None:
    """Nothing is kept of a read but its time."""


def _time(read: Callable[[], None], device: torch.device) -> float:
    """Seconds of one read."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        read()
        return time.perf_counter() - start_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    read()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
