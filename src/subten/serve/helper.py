"""Helper processes that may be killed: each answers one JSON line with another, or not in time.

What they do on a request's behalf cannot take more time than they have, nor, where the system says
what a process has mapped, more memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from subten.core import ConfigError
from subten.serve.lifetime import die_with_parent

logger = logging.getLogger(__name__)

START_S = 60.0
NICE = 10
"""Where requests make helpers work hard, or start anew, the engine and the server go first."""
_LINE_BYTES = 64 * 2**20
HELLO: dict[str, Any] = {"hello": True}
"""Answered by every helper with itself."""


class Helper:
    """One process that runs a module; started when it is first needed, and after each kill."""

    def __init__(self, module: str, *, limit_s: float) -> None:
        self._module = module
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or None where the process was killed or died over it."""
        process = await self.start()
        answer = b""
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await _exchange(process, request)
        except (TimeoutError, ConnectionError, ValueError):
            logger.warning("%s was stopped", self._module)
        finally:
            # A process that is left in the middle would give its answer to the next request.
            if not answer.endswith(b"\n"):
                await self.close()
        return json.loads(answer) if answer.endswith(b"\n") else None

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process, unless it runs, and wait until it answers; else ConfigError."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            _make_nice(self._process.pid)
            await self._greet(self._process)
        return self._process

    async def _greet(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the first answer; a process that gives none, or that nobody waits for, ends."""
        answer = b""
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(START_S):
                    answer = await _exchange(process, HELLO)
        finally:
            if not answer:
                await self.close()
        if not answer:
            raise ConfigError(
                f"{self._module}: the process ended, or said nothing in {START_S:g} s; "
                "its stderr says why"
            )

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def _make_nice(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, pid, min(own + NICE, 19))


async def _exchange(process: asyncio.subprocess.Process, request: dict[str, Any]) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    return await process.stdout.readline()


def answer_lines(answer: Callable[[dict[str, Any]], dict[str, Any]], *, memory_bytes: int) -> None:
    """In a helper: serve requests on stdin until it closes, within `memory_bytes` more memory."""
    die_with_parent()
    _limit_memory(memory_bytes)
    for line in sys.stdin.buffer:
        request: dict[str, Any] = json.loads(line)
        found = request if request == HELLO else answer(request)
        sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
        sys.stdout.buffer.flush()


def mapped_bytes() -> int | None:
    """Memory that this process has mapped; None where the system has no /proc, as macOS."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _limit_memory(memory_bytes: int) -> None:
    mapped = mapped_bytes()
    if mapped is not None:
        limit = mapped + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
