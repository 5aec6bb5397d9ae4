"""What stands for CUDA's streams and captures on a CPU: all runs at once, and rules are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class FakeStream:
    """A stream that notes whom it waits for; waiting for a capture makes it a part of that."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.device = torch.device("cuda", 0)
        self.waited_for: list[FakeStream] = []
        self._cuda = cuda

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)
        if self._cuda.capturing is None:
            return
        if other is self._cuda.capturing:
            self._cuda.forked.append(self)
        elif other in self._cuda.forked:
            self._cuda.forked.remove(other)


class FakeGraph:
    """A graph whose replay only counts; a capture that is not as CUDA wants it raises."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.num_replays = 0
        self._cuda = cuda

    def capture_begin(self, pool: object = None) -> None:  # noqa: ARG002
        assert self._cuda.capturing is None, "captures must not nest"
        self._cuda.graphs.append(self)
        self._cuda.capturing = self._cuda.current

    def capture_end(self) -> None:
        if self._cuda.capturing is None:
            raise torch.AcceleratorError("CUDA error: no capture is under way")
        self._cuda.capturing = None
        forked, self._cuda.forked = self._cuda.forked, []
        if forked:
            raise torch.AcceleratorError("CUDA error: capture has unjoined work")

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        self.num_replays += 1


class FakeCuda:
    """What captures did: `graphs` were begun. `free_bytes` is what asking for free memory gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = FakeStream(self)
        self.current = self.main
        self.streams: list[FakeStream] = []
        self.graphs: list[FakeGraph] = []
        self.capturing: FakeStream | None = None
        self.forked: list[FakeStream] = []
        self.free_bytes = [2**40]
        for name, value in {
            "Stream": lambda *_, **__: self._new_stream(),
            "CUDAGraph": lambda: FakeGraph(self),
            "stream": self._within,
            "current_stream": lambda *_: self.current,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (self._free_bytes(), 2**41),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def _free_bytes(self) -> int:
        return self.free_bytes.pop(0) if len(self.free_bytes) > 1 else self.free_bytes[0]

    @contextmanager
    def _within(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
