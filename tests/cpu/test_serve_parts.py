"""Parts of the server that need no process: settings, keys, calls, templates, token texts."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scripted import byte_tokenizer
from tiny_llama import vocabulary

from subten.config import EngineConfig
from subten.core import ConfigError, FinishReason, SamplingParams
from subten.serve import grammar, ipc, streams, template_process
from subten.serve.auth import HostList, KeyRing, is_loopback
from subten.serve.errors import ApiError
from subten.serve.generation import Generation, Generator, Job
from subten.serve.logprobs import TokenTexts
from subten.serve.metrics import Metrics
from subten.serve.protocol import ChatBody, parse
from subten.serve.settings import ServeConfig
from subten.serve.strict_json import MAX_DEPTH, parse_object
from subten.serve.supervisor import EngineState


def config(**fields: Any) -> ServeConfig:
    return ServeConfig(model="demo", engine=EngineConfig(), **fields)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "127.0.0.1.x"])
def test_other_addresses_need_a_key(host):
    with pytest.raises(ConfigError, match="host"):
        config(host=host)
    assert config(host=host, api_key=("0123456789",)).hosts == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "[::1]"])
def test_the_loopback_needs_none(host):
    assert is_loopback(host)
    assert host in config(host=host).hosts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("api_key", ("short",)),
        ("api_key", ("with space in it",)),
        ("api_key", ("k\u00e9y-0123456789",)),
        ("max_queued_requests", -1),
        ("drain_timeout", -1.0),
        ("drain_timeout", float("nan")),
        ("tool_call_parser", "other"),
        ("served_model_name", ("",)),
    ],
)
def test_settings_are_checked(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        config(**{field: value})
    assert field != "api_key" or str(value[0]) not in str(caught.value)


def connection(*headers: tuple[str, str]) -> Any:
    scope = {"headers": [(k.encode(), v.encode("latin-1")) for k, v in headers]}
    return SimpleNamespace(scope=scope)


def test_keys():
    ring = KeyRing(["first-key", "second-key"])
    tenants = {
        ring.check(connection(("authorization", f"Bearer {key}")))
        for key in ("first-key", "second-key")
    }
    assert len(tenants) == 2
    assert ring.check(connection(("authorization", "bearer first-key"))) in tenants
    assert not any("key" in tenant for tenant in tenants)
    for value in ("", "Bearer", "Bearer ", "Bearer first", "first-key", "Bearer first-key2"):
        with pytest.raises(ApiError) as caught:
            ring.check(connection(("authorization", value)))
        assert caught.value.status == 401
    assert KeyRing([]).check(connection()) == ""


def test_hosts():
    hosts = HostList(["localhost", "::1", "Example.org"])
    for name in ("localhost", "LOCALHOST:1", "[::1]", "[::1]:80", "example.org"):
        hosts.check(connection(("host", name)))
    bad = ["", "other", "a/?", "localhost/", "localhost:", "x@localhost", "localhost:1:2", "::1"]
    for name in bad:
        with pytest.raises(ApiError):
            hosts.check(connection(("host", name)))
    for headers in ([], [("host", "localhost")] * 2):
        with pytest.raises(ApiError):
            hosts.check(connection(*headers))
    HostList([]).check(connection(("host", "anything.example")))


def test_json_within_its_depth():
    nested = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(nested)
    with pytest.raises(ApiError, match="nested"):
        parse_object(nested.replace(b"[", b"[[", 1).replace(b"]", b"]]", 1))
    with pytest.raises(ApiError, match="twice"):
        parse_object(b'{"a": [{"b": 1, "b": 2}]}')
    for text in (b'["\\ud800"]', b'{"\\udc00": 1}', b'{"x": "\\ud800\\ud800"}'):
        with pytest.raises(ApiError, match="surrogate"):
            parse_object(b'{"a": ' + text + b"}")
    assert parse_object(b'{"a": "\\ud83e\\uddec"}') == {"a": "\U0001f9ec"}


def render(template: str, **variables: Any) -> dict[str, Any]:
    request = {"template": template, "variables": {"messages": []} | variables, "max_chars": 1000}
    return template_process.render(request)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{{ self.__init__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ '%s'.format(messages).__class__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends 'x' %}",
        "{{ joiner.__class__.__mro__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'a' * 2000 }}",
        "{% for i in range(2000) %}a{% endfor %}",
        "{{ [1, 2]|sum(attribute='__class__') }}",
        "{{ 1 / 0 }}",
        "{% if",
        "{{ '\\ud800' }}",
    ],
)
def test_templates_reach_nothing(template):
    answer = render(template)
    text = answer.get("text", "")
    # Either refused, or an undefined value that prints nothing.
    assert "error" in answer or text in ("", "{0.__class__}"), answer


def test_templates_see_what_they_are_given():
    given = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"a": 1}], "mood": "glad"}
    template = "{{ messages[0].content }} {{ tools|tojson }} {{ mood }}"
    assert render(template, **given)["text"] == 'hi [{"a": 1}] glad'
    request = {"template": template, "variables": {}, "max_chars": 10, "names": True}
    assert template_process.render(request)["names"] == ["messages", "mood", "tools"]


def test_schemas_that_are_never_the_same_take_no_more_memory(monkeypatch):
    monkeypatch.setattr(grammar, "CACHE_CHARS", 1000)
    checker = grammar.GrammarChecker()
    asked = 0

    class Helper:
        async def ask(self, _request: Any) -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return {}

    monkeypatch.setattr(checker, "_helpers", Helper())

    async def check(number: int) -> str:
        asked_for = grammar.Grammar(kind="json_schema", value={"const": number}, param="x")
        return await checker.check(asked_for)

    async def run() -> None:
        for number in range(10_000):
            assert json.loads(await check(number)) == {"json_schema": {"const": number}}
            # One that is used goes on being known.
            await check(0)
        kept = sum(map(len, checker._good))
        assert kept == checker._num_chars <= 1000
        assert len(checker._good) > 10

    asyncio.run(run())
    assert asked == 10_000


def test_token_bytes_of_a_byte_fallback_vocabulary():
    texts = TokenTexts(byte_tokenizer())
    assert texts.bytes_of(0xF0) == b"\xf0"
    assert texts.text_of(0xF0) == "bytes:\\xf0"
    assert texts.text_of(ord("a")) == "a"
    assert texts.text_of(257) == " the"
    assert texts.text_of(256) == "</s>"


def test_token_bytes_of_a_byte_level_vocabulary():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from subten.tokenizer import Tokenizer

    spelled = {token: i for i, token in enumerate(vocabulary())}
    backend = Backend(models.BPE(vocab=spelled, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    tokenizer = Tokenizer(backend, eos_token_ids=[2])
    texts = TokenTexts(tokenizer)
    text = "caf\u00e9 \U0001f9ec\n\u65e5"
    ids = tokenizer.encode(text)
    assert b"".join(texts.bytes_of(token_id) for token_id in ids).decode() == text
    assert texts.text_of(spelled["<|im_end|>"]) == "<|im_end|>"


def busy_supervisor() -> Any:
    """The supervisor of an engine with all that it can tell, its names as odd as they may be."""
    load = ipc.ExpertLoadOut(
        by_rank=[1.5] * 128, max_violation=0.5, worst_violation=1e-9, experts_a_step=8.0
    )
    status = ipc.Status(
        num_running=1,
        num_waiting=2,
        num_pages_free=3,
        num_pages_cached=4,
        num_pages_used=5,
        kv_bytes=2**40,
        kv_true_bits=None,
        kv_pages_by_kind={"v4": 1, 'o"d\\d\n': 2},
        num_preemptions=0,
        num_steps=10**12,
        num_computed_tokens=1,
        num_prefix_queries=1,
        num_prefix_hits=1,
        step_s=1.4e-3,
        roof_fraction=0.5,
        expert_load=load,
    )
    info = SimpleNamespace(num_pages=12, kv_full_page_bits=4.5, kv_cache_dtype="int4")
    return SimpleNamespace(
        state=EngineState.READY,
        num_restarts=0,
        status=status,
        ready=SimpleNamespace(info=info),
    )


def test_the_text_of_metrics_is_prometheus_own():
    metrics = Metrics('m"\\\n', busy_supervisor())
    for value in (1e-5, 0.1, 1e9):
        metrics.itl.observe(value)
        metrics.request_output.observe(value)
    metrics.accepted.inc(3)
    text = asyncio.run(metrics.render()).decode()
    assert text == generate_latest(metrics._registry).decode()
    assert list(text_string_to_metric_families(text))


def test_a_scrape_is_quick():
    metrics = Metrics("m", busy_supervisor())
    times = []
    for _ in range(5):
        metrics.itl.observe(random.random())
        began_s = time.process_time()
        text = asyncio.run(metrics.render())
        times.append(time.process_time() - began_s)
    assert min(times) < 0.05
    assert b'subten:inter_token_latency_seconds_bucket{le="0.0001",model_name="m"}' in text
    assert asyncio.run(Metrics("m", busy_supervisor()).render())  # a registry each


def test_a_scrape_lets_others_run():
    metrics = Metrics("m", busy_supervisor())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scrape() -> int:
        task = asyncio.create_task(others())
        text = await metrics.render()
        task.cancel()
        return text.count(b"# TYPE")

    assert asyncio.run(scrape()) <= turns + 1


@pytest.fixture
def config_file(tmp_path) -> Iterator[Any]:
    def write(text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def run_cli(monkeypatch: pytest.MonkeyPatch, *args: str) -> Any:
    """The ServeConfig that a command line leads to, or the one line that it is refused with."""
    from typer.testing import CliRunner

    from subten.cli import app

    found: list[ServeConfig] = []
    monkeypatch.setattr("subten.serve.server.run", found.append)
    monkeypatch.delenv("SUBTEN_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", *args], prog_name="subten")
    if result.exit_code == 0:
        return found[0]
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_a_config_file_gives_what_the_command_line_does_not(monkeypatch, config_file):
    path = config_file(
        "model: demo-dense\nport: 9000\nkv-cache-dtype: int4\napi_key: [0123456789]\n"
        "max_num_seqs: 8\nallowed-host: [a.example, b.example]\nenforce-eager: true\n".replace(
            "0123456789", "key-0123456789"
        )
    )
    found = run_cli(monkeypatch, "--config", path, "--port", "9001")
    assert found.port == 9001
    assert found.model == "demo-dense"
    assert found.engine.kv_cache_dtype == "int4"
    assert found.engine.max_num_seqs == 8
    assert found.engine.enforce_eager
    assert found.api_key == ("key-0123456789",)
    assert found.allowed_host == ("a.example", "b.example")
    assert run_cli(monkeypatch, "demo", "--config", path).model == "demo"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 1", "prot"),
        ("- 1", "mapping"),
        ("a: [", "YAML"),
        ("port: many", "port"),
        ("!!python/object/apply:os.system ['true']", "YAML"),
        ("host: 0.0.0.0", "host"),
        ("config: other.yaml", "config"),
    ],
)
def test_bad_config_files_are_refused_in_one_line(monkeypatch, config_file, text, named):
    assert named in run_cli(monkeypatch, "--config", config_file(text))


def test_the_command_line(monkeypatch):
    found = run_cli(monkeypatch, "demo", "--api-key", "key-0123456789", "--host", "0.0.0.0")
    assert found.host == "0.0.0.0"
    assert run_cli(monkeypatch).host == "127.0.0.1"
    assert "host" in run_cli(monkeypatch, "--host", "0.0.0.0")
    assert "config" in run_cli(monkeypatch, "--config", "no-such-file.yaml")
    assert "max_num_seqs" in run_cli(monkeypatch, "--max-num-seqs", "0")
    for seed in (-4, 2**63):
        error = run_cli(monkeypatch, "--seed", str(seed))
        assert f"seed: got {seed}; allowed: an integer from 0 to 2**63 - 1" in error
    assert run_cli(monkeypatch, "--seed", str(2**63 - 1)).engine.seed == 2**63 - 1


def test_the_server_itself_loads_no_torch():
    code = (
        "import sys, subten.serve.server\n"
        "assert not {'torch', 'numpy', 'llguidance'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_key_may_come_from_the_environment(monkeypatch):
    from subten.config import env_api_key

    monkeypatch.setenv("SUBTEN_API_KEY", "key-0123456789")
    assert env_api_key() == ("key-0123456789",)
    monkeypatch.setenv("SUBTEN_API_KEY", "")
    with pytest.raises(ConfigError, match="SUBTEN_API_KEY"):
        env_api_key()
    monkeypatch.delenv("SUBTEN_API_KEY")
    assert env_api_key() == ()


class OwnHands:
    """A supervisor whose engine is the test."""

    state, num_live = EngineState.READY, 0

    def __init__(self) -> None:
        self.sinks: list[Any] = []

    def submit(self, _request: ipc.Submit, sink: Any, *, is_held: bool) -> None:
        assert not is_held
        self.sinks.append(sink)

    def cancel(self, request_ids: Any) -> None:
        """The test does not go on with them."""


def test_an_end_waits_for_the_tokens_that_others_got_with_it():
    supervisor: Any = OwnHands()
    metrics = Metrics("m", busy_supervisor())
    seen: list[str] = []

    async def read(name: str, generation: Generation) -> None:
        async for piece in generation.pieces():
            seen.append(f"{name} {piece.finish_reason}")
        seen.append(f"{name} is over")

    async def run() -> None:
        generator = Generator(supervisor, None, metrics, max_live=9)
        job = Job(prompts=[[1]], sampling=SamplingParams(max_tokens=2))
        tasks = [asyncio.create_task(read(name, generator.start(job))) for name in "abc"]
        for reasons in ((None, None, None), (FinishReason.LENGTH, None, FinishReason.LENGTH)):
            await asyncio.sleep(0.01)
            for sink, reason in zip(supervisor.sinks, reasons, strict=True):
                sink(ipc.TokenOut(request_id="", token_id=5, finish_reason=reason))
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()

    asyncio.run(run())
    assert seen[:3] == ["a None", "b None", "c None"]
    assert seen[3:] == ["a length", "b None", "c length", "a is over", "c is over"]


class SlowSend:
    """A client whose connection takes nothing from the `num`-th message on."""

    def __init__(self, num: int) -> None:
        self._num = num
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)
        if len(self.messages) > self._num:
            await asyncio.sleep(100)


@pytest.mark.parametrize("is_stalled", [True, False])
def test_a_client_that_takes_nothing_is_given_up(monkeypatch, is_stalled):
    monkeypatch.setattr(streams, "STALL_S", 0.08)
    closed = []

    async def events() -> AsyncIterator[bytes]:
        for number in range(10):
            # Waiting for the engine is no stall, however long.
            await asyncio.sleep(0.2 if number == 1 else 0.0)
            yield b"data: %d\n\n" % number

    async def receive() -> Any:
        await asyncio.sleep(100)

    async def run() -> SlowSend:
        generation: Any = SimpleNamespace(close=lambda: closed.append(True))
        stream = streams.EventStream(generation, events())
        await stream.prepare(SimpleNamespace(receive=receive))  # type: ignore[arg-type]
        send = SlowSend(5 if is_stalled else 100)
        await asyncio.wait_for(stream({}, receive, send), 10)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return send

    send = asyncio.run(run())
    assert closed
    # A start, ten events and an end; or the start, four events and the one that was not taken.
    assert len(send.messages) == (6 if is_stalled else 12)


def test_a_stream_that_is_cancelled_from_outside_is_cancelled():
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 0\n\n"
        await asyncio.sleep(100)

    async def receive() -> Any:
        await asyncio.sleep(100)

    async def run() -> None:
        generation: Any = SimpleNamespace(close=lambda: None)
        stream = streams.EventStream(generation, events())
        await stream.prepare(SimpleNamespace(receive=receive))  # type: ignore[arg-type]
        task = asyncio.create_task(stream({}, receive, SlowSend(100)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_frames_of_a_stream_are_whole_json():
    head = {"id": "a", "created": 1, "model": 'b"\n'}
    for has_usage in (False, True):
        frame = streams.ChoiceFrame(head, has_usage=has_usage)
        choice = {"index": 0, "text": '"]}\n\n', "finish_reason": None}
        data = frame.event(choice)
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        assert data.count(b"\n") == 2
        extra = {"usage": None} if has_usage else {}
        assert json.loads(data[6:]) == head | {"choices": [choice]} | extra


@pytest.mark.parametrize(
    ("field", "value", "came"),
    [
        ("temperature", -1, "-1"),
        ("top_p", True, "true"),
        ("n", 99, "99"),
        ("tool_choice", "sometimes", '"sometimes"'),
        ("stop", ["a"] * 20, "a list of 20"),
        ("tools", {"a": 1, "b": 2}, "an object of 2"),
        ("n", -(10**400), "an integer of 401 digits"),
        ("messages", "x" * 1000, "1000 characters"),
    ],
)
def test_a_refused_field_is_told_with_what_came(field, value, came):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], field: value}
    with pytest.raises(ApiError, match=f"^{field}: .*; got {re.escape(came)}$"):
        parse(ChatBody, body)
