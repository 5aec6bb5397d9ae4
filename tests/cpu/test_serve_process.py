"""Processes that die, freeze or are told to stop, and clients that go away."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

import serving
from serving import MODEL, TEXTS, Server, children, is_running
from tiny_checkpoint import config_values, tensors_of, write_folder
from tiny_llama import TinyShape, hf_tensors, write_gguf

from subten.core import ConfigError
from subten.serve import listener

LONG = {"model": MODEL, "prompt": "long", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


def start() -> Server:
    """A server whose steps take 20 ms: answers last as long as a test needs."""
    settings = {"max_queued_requests": 3, "drain_timeout": 2.0, "silence_s": 4.0}
    return Server(engine={"step_s": 0.02}, **settings)


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    server = start()
    yield server
    server.close()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that a test may end."""
    server = start()
    yield server
    server.close()


class Growth:
    """How far samples have grown since now."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = server.metrics()

    def __getitem__(self, name: str) -> float:
        name = f"subten:{name}"
        return self._server.metrics()[name] - self._before.get(name, 0.0)

    def ends(self, reason: str) -> float:
        return self[f'request_success_total{{finished_reason="{reason}"}}']


class Stream:
    """One streaming request, read in the background; its socket can be cut."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps(LONG | {"stream": True} | fields)
        self._connection.request("POST", "/v1/completions", body)
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.events: list[Any] = []
        self.is_done = False
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        self.is_done = True
                    else:
                        self.events.append(json.loads(data))
        except (OSError, ValueError, http.client.HTTPException):
            pass
        self.ended_s = time.monotonic()

    @property
    def text(self) -> str:
        return "".join(e["choices"][0]["text"] for e in self.events if "choices" in e)

    def cut(self) -> None:
        sock = self._connection.sock or self._answer.fp.raw._sock
        sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float = 30.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream does not end"


def raw_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def is_ready(server: Server) -> bool:
    return server.request("GET", "/health/ready")[0] == 200


def test_clients_that_go_away_free_their_pages(slow_server):
    server = slow_server
    growth = Growth(server)
    asked = {"stream_options": {"include_usage": True}}
    running = [Stream(server, prompt=f"long{i}", **(asked if i < 2 else {})) for i in range(4)]
    server.until(lambda: all(stream.events for stream in running))
    # Four run; the next two wait, one of them not streaming.
    queued = socket.create_connection(("127.0.0.1", server.port))
    waiting = socket.create_connection(("127.0.0.1", server.port))
    for sock, is_stream in ((queued, True), (waiting, False)):
        data = json.dumps(LONG | {"stream": is_stream}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        )
        sock.sendall(head.encode() + b"\r\n" + data)
    server.until(lambda: server.metrics()["subten:num_requests_waiting"] == 2)
    queued.close()
    waiting.close()
    server.until(lambda: server.metrics()["subten:num_requests_waiting"] == 0)
    assert server.metrics()["subten:num_requests_running"] == 4
    for stream in running:
        stream.cut()
    server.until(lambda: server.metrics()['subten:kv_pages{state="used"}'] == 0)
    assert growth.ends("cancelled") == 6
    # Case A11: what was sent is counted, and no stream has a usage that it did not ask for or that
    # it does not end with.
    sent = sum(len(stream.events) for stream in running)
    assert sent <= growth["generation_tokens_total"] < 6 * 900
    assert not any(event.get("usage") for stream in running for event in stream.events)
    # None of them was computed to its end, which takes 900 steps.
    assert growth["engine_steps_total"] < 890
    whole = server.complete("fox", max_tokens=99)
    assert whole["choices"][0]["text"] == TEXTS["fox"]


def test_a_full_queue_says_so_at_once(slow_server):
    server = slow_server
    growth = Growth(server)
    streams = [Stream(server, prompt=f"long{i}") for i in range(4)]
    more = [threading.Thread(target=server.complete, args=("fox",)) for _ in range(3)]
    for thread in more:
        thread.start()
    server.until(lambda: server.metrics()["subten:num_requests_waiting"] == 3)
    began_s = time.monotonic()
    status, headers, text = server.request("POST", "/v1/completions", LONG)
    assert time.monotonic() - began_s < 1
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert json.loads(text)["error"]["type"] == "rate_limit_error"
    for stream in streams:
        stream.cut()
    for thread in more:
        thread.join(30)
    assert growth.ends("rejected") == 1
    assert growth["request_accepted_total"] == 4 + 3 + 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 8}, "n"), ({"prompt": ["a"] * 4, "n": 2}, "n"), ({"prompt": ["a"] * 8}, "prompt")],
)
def test_more_answers_than_there_is_ever_room_for(slow_server, fields, param):
    growth = Growth(slow_server)
    body = LONG | {"max_tokens": 2} | fields
    status, headers, text = slow_server.request("POST", "/v1/completions", body)
    assert status == 400
    assert "retry-after" not in headers
    error = json.loads(text)["error"]
    assert error["param"] == param
    assert "got 8 answers" in error["message"] and "at most 7" in error["message"]
    assert growth["request_accepted_total"] == 0
    # As many as there is room for, though four run at a time.
    slow_server.complete(["a"] * 7, max_tokens=2)


def test_a_killed_engine(slow_server):
    # Case A14.
    server = slow_server
    growth = Growth(server)
    streams = [Stream(server, prompt=f"long{i}") for i in range(4)]
    server.until(lambda: all(len(stream.events) > 2 for stream in streams))
    pid = server.engine_pid()
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: not is_ready(server), timeout_s=2)
    for stream in streams:
        stream.join(2)
        assert stream.ended_s - began_s < 2
        assert stream.events[-1]["error"]["code"] == "engine_failed"
        assert not stream.is_done
    assert server.request("GET", "/health/live")[0] == 200
    status, headers, _ = server.request("POST", "/v1/completions", LONG)
    assert status == 503
    assert "retry-after" in headers
    server.until(lambda: is_ready(server), timeout_s=60)
    assert server.engine_pid() != pid
    assert server.complete("fox", max_tokens=99)["choices"][0]["text"] == TEXTS["fox"]
    assert growth.ends("error") == 4
    assert growth["engine_restarts_total"] == 1


def test_a_killed_server_leaves_nothing_behind(own_server):
    server = own_server
    stream = Stream(server)
    server.until(lambda: stream.events)
    pids = children(server.process.pid, "engine")
    pids += children(server.process.pid, "subten.serve.template_process")
    assert len(pids) == 3
    server.process.kill()
    server.process.wait(10)
    server.until(lambda: not any(is_running(pid) for pid in pids), timeout_s=5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_a_frozen_engine(slow_server):
    # Case A14.
    server = slow_server
    stream = Stream(server)
    server.until(lambda: stream.events)
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        server.until(lambda: not is_ready(server), timeout_s=10)
        assert server.request("GET", "/health/live")[0] == 200
        assert server.request("POST", "/v1/completions", LONG)[0] == 503
        stream.join(10)
        assert "error" in stream.events[-1]
    finally:
        os.kill(pid, signal.SIGCONT)
    server.until(lambda: is_ready(server), timeout_s=10)
    assert server.engine_pid() == pid
    assert server.complete("fox", max_tokens=99)["choices"][0]["text"] == TEXTS["fox"]


def test_sigterm_lets_answers_end(own_server):
    server = own_server
    short = Stream(server, max_tokens=30)
    long = Stream(server, prompt="longer")
    server.until(lambda: short.events and long.events)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: not is_ready(server), timeout_s=2)
    status, headers, text = server.request("POST", "/v1/completions", LONG)
    assert status == 503
    assert "retry-after" in headers
    assert json.loads(text)["error"]["code"] == "draining"
    short.join()
    assert short.is_done
    assert len(short.text) == 30
    long.join()
    assert long.events[-1]["error"]["type"] == "service_unavailable_error"
    assert not long.is_done
    assert server.process.wait(10) == 0
    assert not children(server.process.pid, "engine")


def test_a_real_model_from_the_command_line(tmp_path):
    from openai import OpenAI

    shape = TinyShape()
    path = write_gguf(tmp_path / "tiny.gguf", shape, hf_tensors(shape))
    options = ["--port", "0", "--device", "cpu", "--kv-cache-dtype", "int4", "--max-num-seqs", "2"]
    server = Server(command=["-m", "subten", "serve", str(path), *options])
    try:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == ["tiny"]
            settings = {"model": "tiny", "messages": [{"role": "user", "content": "hat"}]}
            settings |= {"max_tokens": 8, "temperature": 0, "logprobs": True}
            whole = client.chat.completions.create(**settings)
            chunks = list(client.chat.completions.create(**settings, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    finally:
        assert server.close() == 0


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0)])
def test_a_server_that_is_ended_while_it_loads_leaves_nothing_behind(sent, code):
    # Case A15, its other half. A container's first process hears only of signals that it handles.
    options = json.dumps({"engine": {"load_s": 300}, "config": {}})
    process = subprocess.Popen(
        [sys.executable, serving.__file__, "serve", options],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    with process.stderr:
        assert any(b'"loading"' in line for line in process.stderr)
        pids = children(process.pid, "engine")
        assert len(pids) == 1
        process.send_signal(sent)
        assert process.wait(10) == code
        end_s = time.monotonic() + 5
        while is_running(pids[0]):
            assert time.monotonic() < end_s, "the engine outlives its server"
            time.sleep(0.02)


def test_a_model_of_experts_without_a_tokenizer(tmp_path, generator):
    values = config_values("MixtralForCausalLM", max_position_embeddings=1024)
    folder = write_folder(tmp_path / "moe", values, tensors_of(values, generator))
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32"]
    server = Server(command=["-m", "subten", "serve", str(folder), *options])
    try:
        body = {"model": "moe", "prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True}
        status, value = server.post("/v1/completions", body)
        assert status == 200, value
        assert value["usage"]["completion_tokens"] == 40
        # Case A16: what needs a tokenizer or a template says so, and completions work.
        chat = {"model": "moe", "messages": [{"role": "user", "content": "hi"}]}
        status, value = server.post("/v1/chat/completions", chat)
        assert status == 400
        assert "tokenizer" in value["error"]["message"]
        assert server.post("/v1/completions", body | {"prompt": "text"})[0] == 400

        def metrics() -> dict[str, float]:
            text = server.request("GET", "/metrics")[2].decode()
            rows = [line.rpartition(" ") for line in text.splitlines() if line[:1] != "#"]
            return {name: float(value) for name, _, value in rows}

        found = metrics()
        num_experts = values["num_local_experts"]
        loads = [v for name, v in found.items() if name.startswith("subten:expert_load{")]
        assert len(loads) == num_experts
        assert loads == sorted(loads, reverse=True)
        assert sum(loads) == pytest.approx(num_experts)
        worst = found['subten:expert_max_violation{layers="worst",model_name="moe"}']
        mean = found['subten:expert_max_violation{layers="mean",model_name="moe"}']
        assert 0 <= mean <= worst <= num_experts - 1
        assert mean == pytest.approx(loads[0] - 1)
        # Of a step that runs; these are tiny, and far from any roof.
        name = 'subten:roof_fraction{model_name="moe"}'
        assert found[name] == 0.0
        stream = threading.Thread(
            target=server.post,
            args=("/v1/completions", body | {"max_tokens": values["max_position_embeddings"]}),
        )
        stream.start()
        seen = []
        while stream.is_alive():
            seen.append(metrics()[name])
        assert all(0 <= value < 10 for value in seen)
        assert any(value > 0 for value in seen), seen
    finally:
        assert server.close() == 0


def refused(*args: str) -> tuple[str, str]:
    """The line that `subten serve` is refused with, and all that it logged before."""
    done = subprocess.run(
        [sys.executable, "-m", "subten", "serve", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 2, done.stderr
    *logs, last = done.stderr.splitlines()
    assert last.startswith("subten: error: ")
    return last.removeprefix("subten: error: "), "\n".join(logs)


def test_settings_are_refused_before_anything_is_measured(tmp_path):
    shape = TinyShape()
    path = str(write_gguf(tmp_path / "tiny.gguf", shape, hf_tensors(shape)))
    adaptive = ["--kv-cache-dtype", "adaptive", "--kv-calibration"]
    for args, message in (
        ([str(tmp_path / "none.gguf")], "none.gguf"),
        ([path, "--kv-cache-dtype", "foo"], "kv_cache_dtype: got 'foo'; allowed: "),
        ([path, "--max-model-len", "1000000"], "max_model_len: got 1000000; allowed: 1 to 256"),
        ([path, *adaptive, "no-file"], "kv_calibration: got 'no-file'; allowed: "),
    ):
        error, logs = refused(*args, "--port", "0", "--device", "cpu")
        assert message in error
        assert "memory reads" not in logs
        assert "listening" not in logs


def test_an_address_that_cannot_be_had_is_refused_before_a_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error, logs = refused(str(tmp_path / "none.gguf"), "--port", str(port))
    assert error == f"port: got {port}; allowed: a free one (Address already in use)"
    assert not logs
    key = ["--api-key", "key-0123456789"]
    error, logs = refused(str(tmp_path / "none.gguf"), "--host", "a..b", *key)
    assert error.startswith("host: got 'a..b'; allowed: an address of this machine, or a name")
    assert not logs
    error, logs = refused(str(tmp_path / "none.gguf"), "--host", "203.0.113.1", *key)
    assert error == "host: got '203.0.113.1'; allowed: an address of this machine"
    assert not logs


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_an_address_is_held_while_a_model_loads(host):
    try:
        held = listener.bind(host, 0)
    except ConfigError:
        assert ":" in host
        pytest.skip("no IPv6 here")
    with held:
        address = held.getsockname()[:2]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        with pytest.raises(ConfigError, match=f"port: got {address[1]}; allowed: a free one"):
            listener.bind(host, address[1])
        listener.listen(held)
        with socket.create_connection(address, timeout=5), held.accept()[0]:
            pass
    # The server closed first: its side of that connection is kept a while.
    with listener.bind(host, address[1]) as again:
        listener.listen(again)


def test_an_address_is_no_name_to_look_up(monkeypatch):
    monkeypatch.delattr(socket, "getaddrinfo")
    with listener.bind("127.0.0.1", 0) as held:
        assert held.getsockname()[0] == "127.0.0.1"
    with pytest.raises(AttributeError):
        listener.bind("localhost", 0)


def test_one_request_that_fails_leaves_the_others(slow_server):
    server = slow_server
    stream = Stream(server, max_tokens=60)
    server.until(lambda: stream.events)
    status, value = server.post("/v1/completions", {"model": MODEL, "prompt": "bad"})
    assert status == 500
    assert value["error"]["code"] == "engine_error"
    stream.join()
    assert stream.is_done
    assert len(stream.text) == 60


ODD_SCHEMAS: list[Any] = [
    *({"type": "wizard"}, {"$ref": "#"}, {"$ref": "#/nowhere"}, {"type": []}, {"enum": []}),
    *({"type": "string", "pattern": text} for text in ("[", "(", "(?=a)b", r"(a)\1", "a{2,1}")),
    *(7, [], "schema", None, {"enum": ["x" * 70_000]}),
    json.loads('{"items":' * 40 + "{}" + "}" * 40),
]
WIDE_SCHEMAS: list[Any] = [
    *({}, {"abc": "def"}, {"type": "array", "minItems": 10**9}),
    *({"type": "string", "minLength": 10**9}, {"type": "string", "pattern": "(a+)+$"}),
    {"type": "string", "pattern": "a{1,100000}"},
]
"""They say little or ask for much, and a grammar without backtracking follows them."""
SLOW_SCHEMA = {"allOf": [{"type": "string", "pattern": f"(a|b|c){{{i}}}x.*"} for i in range(40)]}


def test_odd_schemas_leave_the_streams_of_others(slow_server):
    # Case A13. The scripted model says the same to a prompt, whoever else asks for what.
    server = slow_server

    def ask(schema: Any) -> tuple[int, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": "fox"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 3, "response_format": form}
        return server.post("/v1/chat/completions", body)

    calm = server.complete(LONG["prompt"], max_tokens=400, ignore_eos=True)["choices"][0]["text"]
    stream = Stream(server, max_tokens=400)
    server.until(lambda: stream.events)
    num_before = len(stream.events)
    status, value = ask(SLOW_SCHEMA)
    # While the two seconds of that one went by, the stream had some hundred steps.
    assert status == 400 and "it takes more than 2 s" in value["error"]["message"], value
    assert len(stream.events) > num_before + 10
    for schema in ODD_SCHEMAS:
        status, value = ask(schema)
        assert status == 400, (schema, value)
        assert value["error"]["param"].startswith("response_format"), value
    deep = b'{"items":' * 10_000 + b"{}" + b"}" * 10_000
    body = b'{"model": "%b", "messages": [], "response_format": %b}' % (MODEL.encode(), deep)
    assert server.request("POST", "/v1/chat/completions", body)[0] == 400
    for schema in WIDE_SCHEMAS:
        status, value = ask(schema)
        assert status == 200, (schema, value)
    stream.join(60)
    assert stream.is_done
    assert stream.text == calm


WRITE_HOOK = """
import os, sys
_log = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def _hook(event, args):
    if event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.truncate"):
        os.write(_log, f"{{event}} {{args!r}}\\n".encode())
    elif event == "open" and isinstance(args[2], int) and args[2] & _writes:
        if "__pycache__" not in str(args[0]):
            os.write(_log, f"open {{args!r}}\\n".encode())
sys.addaudithook(_hook)
os.write(_log, b"process\\n")
"""


def test_requests_write_no_file(monkeypatch, tmp_path):
    log = tmp_path / "log"
    (tmp_path / "sitecustomize.py").write_text(WRITE_HOOK.format(path=str(log)))
    monkeypatch.syspath_prepend(str(tmp_path))
    server = Server()
    try:
        # The server, its engine, two template processes and one for grammars.
        assert log.read_text().count("process\n") == 5
        num_before = len(log.read_bytes())
        text = "../../etc/passwd file:///x"
        talk = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        plain = {"model": MODEL, "prompt": text, "max_tokens": 2, "logprobs": 1}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [text]}}}
        asked: list[tuple[str, Any, int]] = [
            ("/v1/completions", plain, 200),
            ("/v1/completions", plain | {"stream": True, "n": 2}, 200),
            ("/v1/completions", plain | {"max_tokens": -1}, 400),
            ("/v1/completions", plain | {"prompt": "bad"}, 500),
            ("/v1/chat/completions", talk, 200),
            ("/v1/chat/completions", talk | {"response_format": form}, 200),
            ("/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 2}, 200),
            ("/v1/responses", {"model": MODEL, "input": text, "store": True}, 400),
            ("/tokenize", {"prompt": text}, 200),
            ("/detokenize", {"tokens": [65]}, 200),
            (f"/v1/models/{text}".replace(" ", "%20"), None, 405),
        ]
        for path, body, wanted in asked:
            status, _, answer = server.request("POST", path, body)
            assert status == wanted, (path, answer)
        for path in ("/", "/metrics", "/openapi.json", "/v1/models"):
            assert server.request("GET", path)[0] == 200
        assert log.read_bytes()[num_before:] == b""
    finally:
        assert server.close() == 0


def test_a_reader_that_stalls_delays_nobody(slow_server):
    server = slow_server
    growth = Growth(server)
    stalled = socket.create_connection(("127.0.0.1", server.port))
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    data = json.dumps(LONG | {"stream": True, "max_tokens": 200}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    stalled.sendall(head.encode() + data)
    assert server.complete("fox", max_tokens=99)["choices"][0]["text"] == TEXTS["fox"]
    server.until(lambda: growth.ends("length") == 1)
    received = b""
    while b"[DONE]" not in received:
        received += stalled.recv(4096)
    stalled.close()
