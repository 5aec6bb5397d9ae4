"""Slow and many connections: each is given up in its time, and leaves room for others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

import uvicorn

from subten.serve import http_limits, strict_json
from subten.serve.errors import ApiError
from subten.serve.http_limits import LimitedProtocol

LIMIT_S = 0.3
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


async def answer_ok(_scope: Any, _receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


async def answer_slowly(_scope: Any, _receive: Any, send: Any) -> None:
    """An answer that takes longer than headers may."""
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"o", "more_body": True})
    await asyncio.sleep(2 * LIMIT_S)
    await send({"type": "http.response.body", "body": b"k"})


def with_server(use: Callable[[int], Coroutine[Any, Any, None]], app: Any = answer_ok) -> None:
    """Run a server of our protocol and `use` with its port."""

    async def run() -> None:
        settings = {"http": LimitedProtocol, "lifespan": "off", "log_config": None, "ws": "none"}
        server = uvicorn.Server(uvicorn.Config(app, port=0, **settings))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(use(server.servers[0].sockets[0].getsockname()[1]), 20)
        finally:
            server.should_exit = server.force_exit = True
            await task

    asyncio.run(run())


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("sent", [b"", b"GET /", HEAD, HEAD + b"\r\n" + HEAD])
def test_headers_that_do_not_come_end_the_connection(monkeypatch, sent):
    monkeypatch.setattr(http_limits, "HEADER_TIMEOUT_S", LIMIT_S)

    async def use(port: int) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        reader, writer = await connect(port)
        writer.write(sent)
        data = await reader.read()
        writer.close()
        assert loop.time() - began_s > 0.9 * LIMIT_S
        if sent.endswith(b"\r\n\r\n" + HEAD):
            assert data.startswith(b"HTTP/1.1 200")
            data = data[data.index(b"HTTP/1.1 408") :]
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}

    with_server(use)


def test_headers_a_byte_at_a_time_have_no_more_time(monkeypatch):
    monkeypatch.setattr(http_limits, "HEADER_TIMEOUT_S", LIMIT_S)

    async def use(port: int) -> None:
        reader, writer = await connect(port)
        answer = asyncio.create_task(reader.read())
        writer.write(HEAD)
        for _ in range(2000):
            writer.write(b"X")
            await asyncio.sleep(LIMIT_S / 10)
            if answer.done():
                break
        writer.close()
        assert (await answer).startswith(b"HTTP/1.1 408")

    with_server(use)


@pytest.mark.parametrize("sent", [b"\r\n", b"GET /", HEAD, HEAD + b"\r\n" + HEAD])
@pytest.mark.parametrize("is_together", [True, False])
def test_what_comes_while_an_answer_runs_does_not_cut_it(monkeypatch, sent, is_together):
    monkeypatch.setattr(http_limits, "HEADER_TIMEOUT_S", LIMIT_S)
    whole = b"\r\n\r\nok"

    async def use(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(HEAD + b"\r\n" + (sent if is_together else b""))
        data = await reader.readuntil(b"\r\n\r\no")
        if not is_together:
            writer.write(sent)
        data += await reader.readexactly(1)
        if sent.startswith(HEAD + b"\r\n"):
            assert (await reader.readuntil(whole)).startswith(b"HTTP/1.1 200")
        assert data.startswith(b"HTTP/1.1 200")
        assert data.endswith(whole)
        if sent == b"\r\n":
            # An empty line between requests is nothing that has to end.
            await asyncio.sleep(2 * LIMIT_S)
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(whole)).startswith(b"HTTP/1.1 200")
        else:
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()

    with_server(use, answer_slowly)


def test_a_connection_too_many_is_closed_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(http_limits, "MAX_CONNECTIONS", 3)

    async def use(port: int) -> None:
        held = [await connect(port) for _ in range(3)]
        for reader, writer in held:
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        reader, writer = await connect(port)
        assert await reader.read() == b""
        writer.close()
        held.pop()[1].close()
        for _ in range(100):
            # The server hears of the end a moment later.
            reader, writer = await connect(port)
            writer.write(HEAD + b"\r\n")
            data = await reader.read(12)
            if data:
                break
            await asyncio.sleep(0.02)
        assert data == b"HTTP/1.1 200"

    with_server(use)


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(strict_json, "BODY_TIMEOUT_S", 0.1)

    async def stream() -> Any:
        while True:
            # Each part in time, the whole never.
            yield b" "
            await asyncio.sleep(0.02)

    request: Any = SimpleNamespace(headers={}, stream=stream)
    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(strict_json.read_bytes(request), 10))
    assert caught.value.status == 408
