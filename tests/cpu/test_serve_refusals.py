"""Refused requests: they take no memory, need no assertions, and come in their order."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError
from serving import KEY, MODEL, TEXTS, Server, children, raw
from test_serve_limits import BIG, CHAT_NUMBERS, NUMBERS, check_alive, check_error

from subten.serve import admin, protocol
from subten.serve.errors import ApiError
from subten.serve.protocol import ChatBody, parse
from subten.serve.strict_json import OFF_LOOP_BYTES

MAX_GROWTH_MB = 50


def peak_mb(server: Server) -> float:
    """The most memory that the server and each of its processes ever had (Linux)."""
    pids = [server.process.pid, *children(server.process.pid, "engine")]
    total_kb = 0
    for pid in [*pids, *children(server.process.pid, "-m")]:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        total_kb += int(status.partition("VmHWM:")[2].split()[0])
    return total_kb / 1024


def huge() -> list[tuple[str, dict[str, Any]]]:
    """Each number at, above and far above its limit, alone and with another."""
    numbers = [17, 21, 129, 1025, 2**20, *BIG, -1, -(2**63)]
    names = ("n", "logprobs", "top_k", "min_tokens", "seed", "best_of", "prompt_logprobs")
    found = []
    for name in names:
        for number in numbers:
            found.append(("/v1/completions", {"prompt": ["a"] * 16, name: number, "max_tokens": 1}))
    message = [{"role": "user", "content": "a"}]
    for name in ("n", "top_logprobs", "max_tokens", "max_completion_tokens"):
        for number in (n for n in numbers if n not in BIG or name not in ("max_tokens",)):
            found.append(("/v1/chat/completions", {"messages": message, name: -abs(number)}))
    for size in (17, 257, 1025, 20_000):
        found += [
            ("/v1/completions", {"prompt": "a", "stop": ["a"] * size}),
            ("/v1/completions", {"prompt": "a", "stop": "a" * 257 * size}),
            ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1] * size}),
            ("/v1/completions", {"prompt": "a", "logit_bias": {str(-i): 1 for i in range(size)}}),
            ("/v1/completions", {"prompt": ["a"] * 8 * size}),
            ("/v1/completions", {"prompt": [[-1]] * size}),
            ("/v1/chat/completions", {"messages": message * 2 * size, "colour": 1}),
            ("/v1/chat/completions", {"messages": message, "tools": [{}] * size}),
        ]
    return found


def test_what_is_refused_takes_no_memory(server):
    # Threat T7.
    check_alive(server)
    for path, body in huge()[:20]:
        server.post(path, {"model": MODEL} | body)
    before = peak_mb(server)
    for path, body in huge():
        status, value = server.post(path, {"model": MODEL} | body)
        # A few of these mean something: a top_k beyond the vocabulary, a negative seed.
        if status == 200:
            assert set(body) & {"top_k", "seed", "n", "logprobs", "min_tokens"}, body
            continue
        assert status in (400, 413), (status, str(body)[:200])
        check_error(value)
    assert peak_mb(server) - before < MAX_GROWTH_MB


def test_pipelined_requests_are_answered_in_their_order(server):
    # Threat T17: three requests in one piece, a wrong one between two.
    def one(body: dict[str, Any], last: bool) -> bytes:
        data = json.dumps({"model": MODEL, "temperature": 0} | body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        )
        head += f"Content-Length: {len(data)}\r\n" + "Connection: close\r\n" * last
        return head.encode() + b"\r\n" + data

    bodies = [{"prompt": "fox"}, {"prompt": "fox", "n": 17}, {"prompt": "gene"}]
    texts = [one(body | {"max_tokens": 99}, body is bodies[-1]) for body in bodies]
    said = raw(server.port, b"".join(texts)).decode()
    parts = said.split("HTTP/1.1 ")[1:]
    assert [part[:3] for part in parts] == ["200", "400", "200"]
    values = [json.loads(part.partition("\r\n\r\n")[2]) for part in parts]
    assert values[0]["choices"][0]["text"] == TEXTS["fox"]
    assert values[1]["error"]["param"] == "n"
    assert values[2]["choices"][0]["text"] == TEXTS["gene"]


def test_python_without_assertions_refuses_as_much(monkeypatch):
    # Threat T3: with -O no assertion is left to lean on.
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    server = Server(api_key=[KEY])
    try:
        for field, values in NUMBERS.items():
            body = {"model": MODEL, "prompt": "a", field: random.choice(values)}
            status, value = server.post("/v1/completions", body)
            assert status == 400, (body, value)
            check_error(value)
        messages = [{"role": "user", "content": "a"}]
        for field, values in CHAT_NUMBERS.items():
            body = {"model": MODEL, "messages": messages, field: random.choice(values)}
            body |= {"logprobs": True} if field == "top_logprobs" else {}
            status, value = server.post("/v1/chat/completions", body)
            assert status == 400, (body, value)
            check_error(value)
        for prompt in ([-1], [320], [2**40], "a" * 2000, ""):
            assert server.post("/v1/completions", {"model": MODEL, "prompt": prompt})[0] == 400
        assert server.request("POST", "/v1/completions", b"{}")[0] == 401
        check_alive(server)
    finally:
        assert server.close() == 0


MANY = 20_000
MESSAGE = {"role": "user", "content": "a"}
UNKNOWN = {f"k{i}": 1 for i in range(MANY)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [1] * 600}] * 600}, "messages.0.content.0"),
        ({"messages": [MESSAGE, *[MESSAGE | UNKNOWN] * 100]}, "messages.1.k0"),
        ({"messages": [{"role": "wizard"}] * 2048}, "messages.0.role"),
        ({"messages": [MESSAGE | {"tool_calls": [1] * 128}] * 100}, "messages.0.tool_calls.0"),
        ({"tools": [{"type": "function", "function": {"name": "a"} | UNKNOWN}] * 99}, "tools.0"),
        ({"tools": [{"type": "other"}] * 128}, "tools.0.type"),
        ({"logit_bias": UNKNOWN}, "logit_bias"),
        ({"logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
        ({"metadata": UNKNOWN}, "metadata"),
        ({"chat_template_kwargs": UNKNOWN}, "chat_template_kwargs"),
        ({"stop_token_ids": ["a"] * 256}, "stop_token_ids.0"),
        ({"structured_outputs": {"choice": [""] * 1024}}, "structured_outputs.choice.0"),
        ({"stream_options": UNKNOWN}, "stream_options.k0"),
        (UNKNOWN, "k0"),
    ],
)
def test_of_a_flood_of_errors_few_are_made(fields, param):
    body = {"model": MODEL, "messages": [MESSAGE]} | fields
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, body)
    assert caught.value.param.startswith(param)
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate(body)
    assert refused.value.error_count() <= 4


def test_large_bodies_are_checked_beside_the_event_loop(monkeypatch):
    threads = []

    def parse_here(*_args: Any) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr(protocol, "parse", parse_here)

    async def read(size: int) -> None:
        async def stream() -> Any:
            yield b'{"a": "' + b"a" * size + b'"}'

        request: Any = SimpleNamespace(headers={}, stream=stream)
        await protocol.read_body(ChatBody, request)

    for size in (10, OFF_LOOP_BYTES):
        asyncio.run(read(size))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_many_tokens_are_spelled_beside_the_event_loop():
    threads = set()

    def id_to_token(_token_id: int) -> str:
        threads.add(threading.current_thread())
        return "a"

    async def encode(*_args: Any, **_kwargs: Any) -> list[int]:
        return [1, 2]

    async def stream() -> Any:
        yield b'{"prompt": "ab", "return_token_strs": true}'

    tokenizer = SimpleNamespace(backend=SimpleNamespace(id_to_token=id_to_token))
    context: Any = SimpleNamespace(
        check_model=lambda _name: None,
        encode=encode,
        info=SimpleNamespace(max_model_len=9),
        need_tokenizer=lambda _param: tokenizer,
    )
    request: Any = SimpleNamespace(headers={}, stream=stream)
    answer = asyncio.run(admin.tokenize(context, request))
    assert json.loads(answer.body)["token_strs"] == ["a", "a"]
    assert threading.main_thread() not in threads
