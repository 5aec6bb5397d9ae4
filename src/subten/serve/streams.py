"""Answers over HTTP: server-sent events, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from subten.serve.errors import ApiError
from subten.serve.generation import Generation, Piece

STALL_S = 60.0
"""A client that takes nothing for so long, or a quarter longer, is given up."""
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


def event(value: Any, *, name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + _encode(value) + b"\n\n"


class ChoiceFrame:
    """The events of one stream, which differ in their choice alone: the rest is encoded once."""

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        self._begin = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._end = b"]" + (b',"usage":null' if has_usage else b"") + b"}\n\n"

    def event(self, choice: dict[str, Any]) -> bytes:
        """The event of one choice."""
        return self._begin + _encode(choice) + self._end


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which ends with ApiError 499 if the client goes away before."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone")
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


async def collect(request: Request, generation: Generation) -> list[Piece]:
    """All of every answer, as one piece each; ApiError 499 if the client goes away."""
    pieces: dict[int, Piece] = {}
    watcher = asyncio.create_task(_close_when_gone(request.receive, generation))
    try:
        async for piece in generation.pieces():
            whole = pieces.setdefault(piece.index, Piece(index=piece.index))
            whole.text += piece.text
            whole.logprobs += piece.logprobs
            whole.prompt_logprobs = whole.prompt_logprobs or piece.prompt_logprobs
            whole.finish_reason = piece.finish_reason
    finally:
        watcher.cancel()
    if "cancelled" in generation.finish_reasons():
        raise ApiError(499, "the client has gone")
    return [pieces[index] for index in sorted(pieces)]


class EventStream(Response):
    """A stream of events made from a generation's pieces.

    `events` are ready to send. A failure before the first one is an ordinary error answer; a later
    one becomes an event, made by `failed`, and ends the stream without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        events: AsyncIterator[bytes],
        *,
        failed: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._first = b""
        self._watcher: asyncio.Task[None] | None = None
        self._stall = _StallWatch(STALL_S)
        self._failed = failed or (lambda error: event(error.body()))

    async def prepare(self, request: Request) -> EventStream:
        """Wait for the first event; ApiError if there is none."""
        self._watcher = asyncio.create_task(_close_when_gone(request.receive, self._generation))
        try:
            self._first = await anext(self._events)
        except BaseException:
            self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the client's going away cancels the generation."""
        del scope, receive
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        self._stall.begin()
        try:
            await send(start)
            await self._send(send, self._first)
            try:
                async for data in self._events:
                    await self._send(send, data)
            except ApiError as error:
                await self._send(send, self._failed(error))
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            # The generation is cancelled below; the connection ends with this request.
            if not self._stall.is_mine():
                raise
        finally:
            self._stall.end()
            self._close()

    async def _send(self, send: Send, data: bytes) -> None:
        self._stall.since_s = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._stall.since_s = None

    def _close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._generation.close()


class _StallWatch:
    """Cancels a task that has been sending for `limit_s`, or a quarter longer.

    It looks from time to time: a timer of its own for each token would cost more than the token.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_cancelled = False
        self.since_s: float | None = None

    def begin(self) -> None:
        """Watch the task that calls this."""
        self._task = asyncio.current_task()
        self._look_later()

    def end(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def is_mine(self) -> bool:
        """Whether the task was cancelled from here; the cancellation ends with this call."""
        if self._has_cancelled and self._task is not None:
            self._task.uncancel()
        return self._has_cancelled

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limit_s / 4, self._look)

    def _look(self) -> None:
        assert self._task is not None
        if self.since_s is not None and time.monotonic() - self.since_s >= self._limit_s:
            self._has_cancelled = True
            self._task.cancel()
        else:
            self._look_later()


async def _close_when_gone(receive: Receive, generation: Generation) -> None:
    await _until_gone(receive)
    generation.close()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
