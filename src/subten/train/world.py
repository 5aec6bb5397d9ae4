"""The processes of one run: one alone, or those that torchrun starts."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from subten.core import ConfigError
from subten.device import detect, has_gpu, use_gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among those of a run: its rank, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and the log."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def agree(self, share: float, is_over: bool) -> tuple[float, bool]:
        """The first process's values: clocks differ, and all must stop at the same step."""
        if self.size == 1:
            return share, is_over
        told = torch.tensor([share, float(is_over)], dtype=torch.float64, device=self.device)
        dist.broadcast(told, src=0)
        return float(told[0]), bool(told[1] > 0)

    def leave(self) -> None:
        """End the communication."""
        if self.size > 1:
            dist.destroy_process_group()


def join_world(device: str) -> World:
    """Join the processes of a torchrun, if this is one; each GPU serves the process of its rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(rank=0, size=1, device=detect(device).torch_device)
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: got {device!r}; allowed under torchrun: auto, cpu, cuda")
    is_gpu = device == "cuda" or (device == "auto" and has_gpu())
    name = f"cuda:{os.environ['LOCAL_RANK']}" if is_gpu else "cpu"
    place = detect(name).torch_device
    if is_gpu:
        use_gpu(place)
    # The first process tokenises and writes conversations while the others wait.
    timeout = datetime.timedelta(minutes=60)
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=timeout)
    return World(rank=dist.get_rank(), size=size, device=place)
