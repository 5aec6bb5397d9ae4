"""The engine's process seen from the server: started, watched, restarted, and talked to."""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from subten.core import ConfigError
from subten.serve import ipc

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "subten.serve.engine_process")


class EngineState(enum.StrEnum):
    """What the server may expect of its engine."""

    STARTING = "starting"
    READY = "ready"
    FROZEN = "frozen"
    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchLimits:
    """Seconds: without a word until the engine counts as frozen, of one step until it does, of
    the shortest and longest wait before a restart, and until a stopped engine is killed."""

    silence_s: float = 5.0
    step_s: float = 120.0
    restart_s: float = 0.5
    max_restart_s: float = 30.0
    stop_s: float = 4.0


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Why a request ended without the engine's word."""

    message: str


StreamEvent = ipc.TokenOut | ipc.Refused | EngineFault
Sink = Callable[[StreamEvent], None]


class _Connection(asyncio.Protocol):
    """Cuts what the engine sends into messages."""

    def __init__(self, take: Callable[[ipc.FromEngine], None], lost: Callable[[], None]) -> None:
        self._frames = ipc.FrameReader(ipc.FROM_ENGINE_BYTES)
        self._take = take
        self._lost = lost

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            try:
                if isinstance(frame, ipc.IpcError):
                    raise frame
                message = ipc.read_from_engine(frame)
            except ipc.IpcError as error:
                logger.error("a message of the engine that cannot be read was dropped: %s", error)
                continue
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._lost()


class Supervisor:
    """One engine process at a time, from `start` to `stop`; call it from one event loop.

    Each request has a sink, which gets all its events in order; the last one has a finish reason,
    or is a refusal or a fault.
    """

    def __init__(
        self,
        start: ipc.Start,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        limits: WatchLimits | None = None,
    ) -> None:
        self._start_message = start
        self._command = command
        self._limits = limits or WatchLimits()
        self._sinks: dict[str, Sink] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._started: asyncio.Future[ipc.Ready] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._restarter: asyncio.Task[None] | None = None
        self._heard_s = 0.0
        self._busy_s = 0.0
        self.state = EngineState.STARTING
        self.ready: ipc.Ready | None = None
        self.status: ipc.Status | None = None
        self.num_restarts = 0
        self.on_step: Callable[[int], None] = lambda _num_computed: None

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks)

    async def start(self) -> ipc.Ready:
        """Start the engine and wait until it serves; ConfigError with its reason if it cannot."""
        ready = await self._launch()
        self._watcher = asyncio.create_task(self._watch())
        return ready

    async def stop(self) -> None:
        """End the engine and whatever it still serves."""
        self.state = EngineState.STOPPED
        for task in (self._watcher, self._restarter):
            if task is not None:
                task.cancel()
        self.fail_all("the server is stopping")
        if self._transport is not None:
            self._transport.close()
        await self._reap()

    def submit(self, request: ipc.Submit, sink: Sink, *, is_held: bool = False) -> None:
        """Send a request to the engine, or hold it until `release`; only while `state` is READY."""
        assert self.state is EngineState.READY, self.state
        assert request.request_id not in self._sinks, request.request_id
        self._sinks[request.request_id] = sink
        if not is_held:
            self._send(request)

    def release(self, request: ipc.Submit) -> None:
        """Send a request that was held, if it has not ended since."""
        if request.request_id in self._sinks:
            self._send(request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """End requests; their sinks hear nothing more. Those that have ended are left alone."""
        live = [request_id for request_id in request_ids if self._sinks.pop(request_id, None)]
        if live:
            self._send(ipc.Cancel(request_ids=live))

    def _send(self, message: ipc.ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(ipc.pack(message))

    async def _launch(self) -> ipc.Ready:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            # From the loop's thread: the kernel ends the engine with the thread that started it.
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        started = self._started = loop.create_future()
        self._heard_s, self._busy_s = time.monotonic(), 0.0
        self._transport, _ = await loop.create_unix_connection(
            lambda: _Connection(self._take, self._lost), sock=ours
        )
        self._send(self._start_message)
        self.ready = await started
        self.state = EngineState.READY
        self._heard_s = time.monotonic()
        return self.ready

    def _take(self, message: ipc.FromEngine) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, ipc.Tokens):
            self.on_step(message.num_computed)
            for item in message.items:
                self._pass_on(item.request_id, item, is_last=item.finish_reason is not None)
        elif isinstance(message, ipc.Beat):
            self._busy_s = message.busy_s
        elif isinstance(message, ipc.Status):
            self.status = message
        elif isinstance(message, ipc.Refused):
            self._pass_on(message.request_id, message, is_last=True)
        elif self._started is not None and not self._started.done():
            if isinstance(message, ipc.Ready):
                self._started.set_result(message)
            else:
                self._started.set_exception(ConfigError(message.message))

    def _pass_on(self, request_id: str, event: StreamEvent, *, is_last: bool) -> None:
        sink = self._sinks.get(request_id)
        # A cancelled request has tokens under way.
        if sink is None:
            return
        if is_last:
            del self._sinks[request_id]
        sink(event)

    def _lost(self) -> None:
        if self.state is EngineState.STOPPED:
            return
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError("engine: it ended while it was loading"))
            return
        logger.error("the engine ended")
        self.state = EngineState.DEAD
        self.status = None
        self.fail_all("the engine ended")
        self._restarter = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        wait_s = self._limits.restart_s
        while True:
            await self._reap()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._limits.max_restart_s)
            self.num_restarts += 1
            try:
                await self._launch()
            except ConfigError as error:
                logger.error("the engine could not be started again: %s", error)
                continue
            logger.warning("the engine was started again")
            return

    async def _watch(self) -> None:
        """Notice an engine that stands still, and one that moves again."""
        limits = self._limits
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(limits.silence_s / 10)
            now_s = time.monotonic()
            if now_s - before_s > limits.silence_s / 2:
                # It was this process that stood still; the engine's words are still to be read.
                self._heard_s = max(self._heard_s, before_s)
                continue
            is_frozen = now_s - self._heard_s > limits.silence_s or self._busy_s > limits.step_s
            if self.state is EngineState.READY and is_frozen:
                logger.error("the engine does not answer")
                self.state = EngineState.FROZEN
                live = list(self._sinks)
                self.fail_all("the engine does not answer")
                self._send(ipc.Cancel(request_ids=live))
            elif self.state is EngineState.FROZEN and not is_frozen:
                logger.warning("the engine answers again")
                self.state = EngineState.READY

    def fail_all(self, message: str) -> None:
        """End every request with a fault."""
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(EngineFault(message))

    async def _reap(self) -> None:
        """Wait for the process to end, and kill it if it does not."""
        process = self._process
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, self._limits.stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
