"""uvicorn's HTTP protocol with limits on headers, connections and the time to send headers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from subten.serve.errors import ApiError

MAX_HEADERS = 100
MAX_HEADER_BYTES = 2**14
MAX_URL_BYTES = 2**12
HEADER_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 1024
MAX_OVERHEAD_BYTES = MAX_URL_BYTES + MAX_HEADER_BYTES + 2**16
"""Bytes of a request that are not its body: target, headers, and what chunks add."""


class LimitedProtocol(HttpToolsProtocol):
    """Refuses with 431 what is too large, and closes a connection that asks for nothing."""

    _header_timer: asyncio.TimerHandle | None = None
    _num_raw_bytes = 0
    _num_body_bytes = 0
    _is_refused = False
    _is_in_head = True
    _has_begun_head = False

    def connection_made(self, transport: Any) -> None:
        """Take a connection, if there are not too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, unless the connection was refused."""
        if self._is_refused or self.parser is None:
            return
        if self._is_in_head:
            self._await_head()
        # A header or a chunk extension that never ends is in no callback: all bytes are counted.
        self._num_raw_bytes += len(data)
        super().data_received(data)
        if self._num_raw_bytes - self._num_body_bytes > MAX_OVERHEAD_BYTES:
            what = "headers are too large" if self._is_in_head else "body's chunks are too small"
            self._refuse(f"the {what}")

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        if not self._is_refused:
            self._write_and_close(ApiError(400, msg.rstrip(".")))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = self._has_begun_head = True
        # Its first bytes may have come together with the request before it.
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse("the request target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if self._is_refused:
            return
        super().on_header(name, value)
        size = sum(len(key) + len(held) for key, held in self.headers)
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse("the headers are too large")

    def on_headers_complete(self) -> None:
        """Pass the request on."""
        self._is_in_head = self._has_begun_head = False
        self._cancel_timer()
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_body_bytes += len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come whole."""
        self._is_in_head = True
        self._num_raw_bytes = self._num_body_bytes = 0
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer has ended; of the next request a part may be there."""
        super().on_response_complete()
        if self._has_begun_head:
            self._await_head()

    def _await_head(self) -> None:
        # While an answer runs the next request has time, and an empty line is none (RFC 9112, 2.2).
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self._header_timer is not None or self.transport.is_closing():
            return
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._time_out)

    def _time_out(self) -> None:
        if self._is_in_head and not self.transport.is_closing():
            self._refuse("the headers did not come in time", status=408)

    def _cancel_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, message: str, *, status: int = 431) -> None:
        if not self._is_refused:
            self._is_refused = True
            self._write_and_close(ApiError(status, message))

    def _write_and_close(self, error: ApiError) -> None:
        response = error.response()
        reason = {400: b"Bad Request", 408: b"Request Timeout"}.get(
            error.status, b"Request Header Fields Too Large"
        )
        head = b"HTTP/1.1 %d %b\r\n" % (error.status, reason)
        headers = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
        # A response that is under way cannot be followed by another one.
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(head + headers + b"connection: close\r\n\r\n" + response.body)
        self.transport.close()
