"""Answers over HTTP: server-sent events, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from subten.serve.errors import ApiError
from subten.serve.generation import Generation, Piece

STALL_S = 60.0
"""A client that takes nothing for so long is given up."""
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(value: Any, *, name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + _encode(value) + b"\n\n"


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
        try:
            await send(start)
            await _send_body(send, self._first)
            try:
                async for data in self._events:
                    await _send_body(send, data)
            except ApiError as error:
                await _send_body(send, self._failed(error))
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            pass  # The generation is cancelled below; the connection ends with this request.
        finally:
            self._close()

    def _close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._generation.close()


async def _send_body(send: Callable[[Any], Awaitable[None]], data: bytes) -> None:
    async with asyncio.timeout(STALL_S):
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _close_when_gone(receive: Receive, generation: Generation) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            generation.close()
            return
