"""The engine's end of the socket to its server; nothing here waits for the server to read."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading

from subten.serve import ipc

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 256 * 2**20
"""A server that leaves this much unread is not coming back."""


class ServerGoneError(Exception):
    """The other end of the socket is closed."""


class Channel:
    """Messages over a non-blocking socket; `send` may be called from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = ipc.FrameReader(ipc.TO_ENGINE_BYTES)
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._wakes = socket.socketpair()
        for end in self._wakes:
            end.setblocking(False)

    def wake(self) -> None:
        """End a `receive` that waits; from any thread."""
        with contextlib.suppress(BlockingIOError):
            self._wakes[1].send(b"!")

    def send(self, message: ipc.FromEngine) -> None:
        """Send, or keep for later what the socket does not take."""
        with self._lock:
            frame = ipc.pack(message)
            if self._unsent:
                self._unsent += frame
                self._flush()
                return
            try:
                num_sent = self._sock.send(frame)
            except BlockingIOError:
                num_sent = 0
            except OSError as error:
                raise ServerGoneError from error
            if num_sent < len(frame):
                self._unsent += memoryview(frame)[num_sent:]

    def receive(self, timeout_s: float) -> list[ipc.ToEngine]:
        """Messages that are there, waiting for the first up to `timeout_s`."""
        if timeout_s > 0:
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poll = select.poll()
            poll.register(self._sock, wanted)
            poll.register(self._wakes[0], select.POLLIN)
            poll.poll(timeout_s * 1e3)
            with contextlib.suppress(BlockingIOError):
                self._wakes[0].recv(4096)
        if self._unsent:
            with self._lock:
                self._flush()
        # Between two steps there is seldom anything, and this is the cheapest way to know.
        if not self._poll.poll(0):
            return []
        messages: list[ipc.ToEngine] = []
        while True:
            try:
                data = self._sock.recv(2**18)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ServerGoneError from error
            if not data:
                raise ServerGoneError
            for frame in self._frames.feed(data):
                try:
                    if isinstance(frame, ipc.IpcError):
                        raise frame
                    messages.append(ipc.read_to_engine(frame))
                except ipc.IpcError as error:
                    logger.error("a message that cannot be read was dropped: %s", error)

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether the other end is closed; waits for that up to `timeout_s`."""
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(timeout_s * 1e3))

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(memoryview(self._unsent)[: 2**18])]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise ServerGoneError from None
        except OSError as error:
            raise ServerGoneError from error
