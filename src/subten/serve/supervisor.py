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
    the shortest and longest wait before a restart, that it may take to load again, and until a
    stopped engine is killed."""

    silence_s: float = 5.0
    step_s: float = 120.0
    restart_s: float = 0.5
    max_restart_s: float = 30.0
    load_s: float = 3600.0
    stop_s: float = 4.0


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Why a request ended without the engine's word."""

    message: str


StreamEvent = ipc.TokenOut | ipc.Refused | EngineFault
Sink = Callable[[StreamEvent], None]


class _Engine(asyncio.Protocol):
    """One engine process and the server's end of the socket to it; once closed it is not heard."""

    def __init__(
        self, process: subprocess.Popen[bytes], take: Callable[[ipc.FromEngine], None]
    ) -> None:
        self.process = process
        self.transport: asyncio.WriteTransport | None = None
        self.started: asyncio.Future[ipc.Ready] = asyncio.get_running_loop().create_future()
        self.has_ended = asyncio.Event()
        self._is_closed = False
        self._frames = ipc.FrameReader(ipc.FROM_ENGINE_BYTES)
        self._take = take

    def data_received(self, data: bytes) -> None:
        """Cut what the engine sends into messages."""
        for frame in self._frames.feed(data):
            try:
                if isinstance(frame, ipc.IpcError):
                    raise frame
                message = ipc.read_from_engine(frame)
            except ipc.IpcError as error:
                logger.error("a message of the engine that cannot be read was dropped: %s", error)
                continue
            if self._is_closed:
                return
            if isinstance(message, ipc.Failed):
                self._fail(message.message)
            elif not isinstance(message, ipc.Ready):
                self._take(message)
            elif not self.started.done():
                self.started.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The engine ended, or this end was closed."""
        if not self._is_closed:
            self._fail("engine: it ended while it was loading")
        self.has_ended.set()

    def send(self, message: ipc.ToEngine) -> None:
        """Send, unless nobody is there."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(ipc.pack(message))

    async def close(self, stop_s: float) -> None:
        """Close the socket and wait for the process to end; after `stop_s` it is killed."""
        self._is_closed = True
        if self.transport is not None:
            self.transport.close()
        end_s = time.monotonic() + stop_s
        while self.process.poll() is None:
            if time.monotonic() >= end_s:
                self.process.kill()
            await asyncio.sleep(0.01)

    def _fail(self, message: str) -> None:
        if not self.started.done():
            self.started.set_exception(ConfigError(message))


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
        self._engine: _Engine | None = None
        self._tasks: list[asyncio.Task[None]] = []
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
        return None if self._engine is None else self._engine.process.pid

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks)

    async def start(self) -> ipc.Ready:
        """Start the engine and wait until it serves; ConfigError with its reason if it cannot."""
        engine = await self._launch()
        self._tasks = [
            asyncio.create_task(self._keep(engine)),
            asyncio.create_task(self._watch()),
        ]
        assert self.ready is not None
        return self.ready

    async def stop(self) -> None:
        """End the engine and whatever it still serves."""
        self.state = EngineState.STOPPED
        for task in self._tasks:
            task.cancel()
        self.fail_all("the server is stopping")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close_engine()

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
        if self._engine is not None:
            self._engine.send(message)

    async def _launch(self) -> _Engine:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        try:
            # From the loop's thread: the kernel ends the engine with the thread that started it.
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        engine = self._engine = _Engine(process, self._take)
        self._heard_s, self._busy_s = time.monotonic(), 0.0
        loop = asyncio.get_running_loop()
        engine.transport, _ = await loop.create_unix_connection(lambda: engine, sock=ours)
        engine.send(self._start_message)
        self.ready = await engine.started
        self.state = EngineState.READY
        self._heard_s = time.monotonic()
        return engine

    async def _close_engine(self) -> None:
        if self._engine is not None:
            await self._engine.close(self._limits.stop_s)

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

    def _pass_on(self, request_id: str, event: StreamEvent, *, is_last: bool) -> None:
        sink = self._sinks.get(request_id)
        # A cancelled request has tokens under way.
        if sink is None:
            return
        if is_last:
            del self._sinks[request_id]
        sink(event)

    async def _keep(self, engine: _Engine) -> None:
        """Start the engine again whenever it ends."""
        while True:
            await engine.has_ended.wait()
            logger.error("the engine ended")
            self.state = EngineState.DEAD
            self.status = None
            self.fail_all("the engine ended")
            engine = await self._restart()

    async def _restart(self) -> _Engine:
        wait_s = self._limits.restart_s
        while True:
            await self._close_engine()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._limits.max_restart_s)
            self.num_restarts += 1
            try:
                async with asyncio.timeout(self._limits.load_s):
                    engine = await self._launch()
            except TimeoutError:
                logger.error("the engine has not loaded in %g s", self._limits.load_s)
            # Memory, processes or files that are short now may not be so later.
            except Exception as error:  # noqa: BLE001
                kind = type(error).__name__
                logger.error("the engine could not be started again: %s: %s", kind, error)
            else:
                logger.warning("the engine was started again")
                return engine

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
