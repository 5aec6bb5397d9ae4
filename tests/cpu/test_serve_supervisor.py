"""Engines that die, cannot be started again or never load: one of them at a time, and none left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import is_running

from subten.config import EngineConfig
from subten.core import ConfigError
from subten.serve import ipc
from subten.serve.supervisor import EngineState, Supervisor, WatchLimits

ENGINE = """
import os, socket, sys, time
from subten.serve import ipc
from subten.serve.lifetime import die_with_parent

die_with_parent()
with open(sys.argv[1], "a+") as log:
    log.write(f"{os.getpid()}\\n")
    log.seek(0)
    number = len(log.readlines()) - 1
lives = sys.argv[2].split(",")
life = lives[number] if number < len(lives) else "serves"
server = socket.socket(fileno=int(sys.argv[-1]))
if life == "hangs":
    time.sleep(100)
if life.startswith("fails"):
    server.sendall(ipc.pack(ipc.Failed(message="no memory", is_user_error=False)))
    time.sleep(100 if life == "fails and hangs" else 0.2)
    sys.exit(2)
time.sleep(0.4)
info = ipc.EngineInfo(
    name="x", vocab_size=9, max_model_len=9, max_num_seqs=1, eos_token_ids=[],
    kv_cache_dtype="bf16", kv_full_page_bits=16.0, num_pages=1, device="cpu",
)
server.sendall(ipc.pack(ipc.Ready(info=info, tokenizer=None)))
if life == "dies":
    os._exit(9)
while server.recv(4096):
    pass
"""
LIMITS = {"restart_s": 0.05, "max_restart_s": 0.2, "stop_s": 1.0}


class Lives:
    """A supervisor whose engines live as told, the first ones each in its way, and their ids."""

    def __init__(self, folder: Path, *lives: str, **limits: float) -> None:
        program, self._log = folder / "engine.py", folder / "log"
        program.write_text(ENGINE)
        command = [sys.executable, str(program), str(self._log), ",".join(lives)]
        start = ipc.Start(model="x", config=EngineConfig())
        self.supervisor = Supervisor(
            start, command=command, limits=WatchLimits(**(LIMITS | limits))
        )

    @property
    def started(self) -> list[int]:
        return [int(line) for line in self._log.read_text().splitlines()]

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.started if is_running(pid)]

    async def until(self, condition: Callable[[], Any]) -> None:
        end_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end_s, (self.supervisor.state, self.started, self.alive)
            await asyncio.sleep(0.01)

    async def until_ready(self, num_started: int) -> None:
        await self.until(
            lambda: len(self.started) >= num_started and self.supervisor.state is EngineState.READY
        )


@pytest.fixture(autouse=True)
def _engines_find_subten(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def run(lives: Lives, test: Callable[[], Awaitable[None]]) -> None:
    """Start, test and stop; afterwards no engine is left."""

    async def all_of_it() -> None:
        await lives.supervisor.start()
        try:
            await test()
        finally:
            await lives.supervisor.stop()
        assert lives.alive == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(all_of_it())


@pytest.mark.parametrize("life", ["fails", "fails and hangs", "dies"])
def test_restarts_that_fail_leave_one_engine(tmp_path, life):
    lives = Lives(tmp_path, "dies", life, life)

    async def test() -> None:
        await lives.until_ready(4)
        # Nothing that an earlier engine still says, or its end, starts another or harms this one.
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert lives.supervisor.state is EngineState.READY
        assert len(lives.started) == 4
        assert lives.alive == [lives.supervisor.pid] == lives.started[-1:]
        assert lives.supervisor.num_restarts == 3

    run(lives, test)


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    lives = Lives(tmp_path, "dies")
    popen, num_calls = subprocess.Popen, 0

    def short_of_processes(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (2, 3):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", short_of_processes)

    async def test() -> None:
        await lives.until_ready(2)
        assert num_calls == 4
        assert lives.supervisor.num_restarts == 3

    run(lives, test)


def test_an_engine_that_never_loads_again_is_given_up(tmp_path):
    lives = Lives(tmp_path, "dies", "hangs", load_s=2.0, stop_s=0.2)

    async def test() -> None:
        await lives.until_ready(3)
        assert lives.alive == [lives.supervisor.pid]

    run(lives, test)


@pytest.mark.parametrize("life", ["hangs", "fails and hangs"])
def test_a_stop_during_a_restart_leaves_nothing(tmp_path, life):
    lives = Lives(tmp_path, "dies", life, stop_s=0.2)

    async def test() -> None:
        await lives.until(lambda: len(lives.started) == 2)

    run(lives, test)


def test_a_first_engine_that_fails_says_why_and_ends(tmp_path):
    lives = Lives(tmp_path, "fails and hangs", stop_s=0.2)

    async def test() -> None:
        with pytest.raises(ConfigError, match="no memory"):
            await lives.supervisor.start()
        await lives.supervisor.stop()

    asyncio.run(test())
    assert lives.started
    assert lives.alive == []
