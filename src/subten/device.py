"""What this machine can do; no other file asks."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from subten.core import ConfigError, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device as the engine sees it; memory in bytes."""

    kind: str
    index: int
    name: str
    memory_bytes: int
    num_sms: int
    capability: tuple[int, int]

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")


def detect(name: str = "auto") -> Device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N` to a device; refuse one that is not there."""
    if name == "auto":
        name = "cuda" if has_gpu() else "cpu"
    if name == "cpu":
        return Device(
            kind="cpu",
            index=0,
            name=_cpu_name(),
            memory_bytes=_ram_bytes(),
            num_sms=os.cpu_count() or 1,
            capability=(0, 0),
        )
    kind, _, index_text = name.partition(":")
    num_gpus = torch.cuda.device_count() if has_gpu() else 0
    allowed = ", ".join(["auto", "cpu", *(f"cuda:{i}" for i in range(num_gpus))])
    if kind != "cuda" or not (index_text or "0").isdecimal():
        raise refuse(ConfigError, "device", name, allowed)
    index = int(index_text or "0")
    if index >= num_gpus:
        raise refuse(ConfigError, "device", name, allowed)
    properties = torch.cuda.get_device_properties(index)
    return Device(
        kind="cuda",
        index=index,
        name=properties.name,
        memory_bytes=properties.total_memory,
        num_sms=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
    )


MIN_CAPABILITY = (8, 0)
"""Compute capability from which a GPU multiplies BF16, which every kernel here takes for given."""

BLOCK_SHARED_KIB: Mapping[tuple[int, int], int] = {
    (8, 0): 163,
    (8, 7): 163,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
}
"""Shared memory that a block may have, by compute capability; 99 on all others from 8.0 on (CUDA
C++ Programming Guide, Technical Specifications per Compute Capability)."""


@functools.cache
def block_shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of `device` may have; a CPU stands in for sm_90."""
    is_gpu = device.type == "cuda"
    capability: tuple[int, int] = detect(str(device)).capability if is_gpu else (9, 0)
    return 1024 * BLOCK_SHARED_KIB.get(capability, 99)


def has_gpu() -> bool:
    """Whether torch sees a GPU that it can use."""
    return torch.cuda.is_available()


def gpu_name(device: torch.device) -> str:
    """The GPU `device` as its driver names it."""
    assert device.type == "cuda", device
    return torch.cuda.get_device_name(device)


def use_gpu(device: torch.device) -> None:
    """Make `device` the GPU of this process: NCCL, and what names no GPU, then take it."""
    assert device.type == "cuda", device
    torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, kernels and streams that name no GPU take `device`; nothing changes for a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that nobody on the GPU `device` has taken now, other processes included."""
    assert device.type == "cuda", device
    return int(torch.cuda.mem_get_info(device)[0])


def is_lost(device: torch.device) -> bool:
    """Whether `device` fails at everything, as CUDA does from a kernel's fault to a process's end.

    Other errors, want of memory above all, leave it as it was. Waits for what the GPU computes.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _ram_bytes() -> int:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, where the C library is glibc; True if so.

    A decode step on a CPU makes and frees temporaries of some 100 kB all the time. glibc gives such
    memory back to the system, and each step would fault its pages in again. Costs up to 256 MiB
    that stay with the process. Option numbers are those of glibc's malloc.h.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    sizes = {trim_threshold: 256 * 2**20, top_pad: 64 * 2**20, mmap_threshold: 32 * 2**20}
    return all(mallopt(option, size) == 1 for option, size in sizes.items())
