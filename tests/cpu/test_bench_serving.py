"""`bench serve` against a scripted server: what is a gap, who counts tokens, what is a failure."""

from __future__ import annotations

import json
import math
import random
import statistics
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("httpx2")

from subten import cli
from subten.bench import serving
from subten.bench.serving import (
    WORDS,
    Load,
    Outcome,
    details,
    measure_serving,
    parse_goodput,
    percentile,
    summarise,
)
from subten.core import ConfigError

LATE_MS = 200.0
"""How late a piece may be on a busy machine; each is sent on time or later, never sooner."""


class Server(ThreadingHTTPServer):
    """All requests of a test may come at once."""

    request_queue_size = 128


class FakeServer:
    """Streams what `script` says: (seconds to wait, data of one event)."""

    def __init__(
        self, script: Any, *, status: int = 200, models: Any = (200, {"data": [{"id": "m"}]})
    ) -> None:
        fake = self
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.num_live = self.most_live = 0
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.keys.append(self.headers["Authorization"])
                self.send_response(models[0] if self.path == "/v1/models" else 404)
                self.end_headers()
                self.wfile.write(json.dumps(models[1]).encode())

            def do_POST(self) -> None:
                with fake._lock:
                    fake.paths.append(self.path)
                    fake.num_live += 1
                    fake.most_live = max(fake.most_live, fake.num_live)
                    size = int(self.headers["Content-Length"])
                    fake.bodies.append(json.loads(self.rfile.read(size)))
                    fake.keys.append(self.headers["Authorization"])
                self.send_response(status)
                self.end_headers()
                for wait_s, data in script(fake.bodies[-1]):
                    time.sleep(wait_s)
                    self.wfile.write(f"data: {data}\n\n".encode())
                    self.wfile.flush()
                with fake._lock:
                    fake.num_live -= 1

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def piece(text: str = "a", finish: str | None = None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish}]})


def usage(num_output: int, num_prompt: int = 7) -> str:
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return json.dumps({"choices": [], "usage": counts})


def answer(first_s: float, gap_s: float, num_gaps: int) -> Any:
    """A stream of one token at `first_s` and `num_gaps` more."""
    return lambda _body: [
        (first_s, piece()),
        *[(gap_s, piece()) for _ in range(num_gaps)],
        (0.0, usage(num_gaps + 1)),
        (0.0, "[DONE]"),
    ]


def measure(server: FakeServer, **fields: Any) -> tuple[Load, list[Outcome], float]:
    settings = {"num_prompts": 1, "random_input_len": 8, "random_output_len": 11}
    load = Load(base_url=server.url, model="m", **(settings | fields))
    return load, *measure_serving(load)


def test_the_wait_for_the_first_token_is_no_gap():
    # Case P01.
    with FakeServer(answer(0.5, 0.005, 10)) as server:
        load, outcomes, duration_s = measure(server)
    result = summarise(load, outcomes, duration_s, goodput={})
    assert result["completed"] == 1, result["errors"]
    assert len(outcomes[0].itl_ms) == 10
    assert 500 <= result["median_ttft_ms"] < 500 + LATE_MS
    assert max(outcomes[0].itl_ms) < 500 - LATE_MS
    assert result["mean_tpot_ms"] == pytest.approx(statistics.fmean(outcomes[0].itl_ms))
    assert result["mean_e2el_ms"] == pytest.approx(result["mean_ttft_ms"] + sum(outcomes[0].itl_ms))
    assert result["total_input_tokens"] == 7
    assert result["total_output_tokens"] == 11
    assert result["requests_of_other_output_len"] == result["requests_of_merged_pieces"] == 0


def test_tokens_are_those_of_usage_and_a_mismatch_is_told():
    # Case P03.
    def script(_body: Any) -> Any:
        # 100 spaces, in four pieces; a tokenizer would make seven tokens of them.
        return [(0.0, piece(" " * 25)) for _ in range(4)] + [(0.0, usage(100)), (0.0, "[DONE]")]

    with FakeServer(script) as server:
        load, outcomes, duration_s = measure(server, num_prompts=3)
    result = summarise(load, outcomes, duration_s, goodput={})
    assert result["total_output_tokens"] == 300
    assert result["output_throughput"] == pytest.approx(300 / duration_s)
    assert result["requests_of_merged_pieces"] == result["requests_of_other_output_len"] == 3
    span_ms = (outcomes[0].piece_times_s[-1] - outcomes[0].piece_times_s[0]) * 1e3
    assert outcomes[0].latency_ms("tpot") == pytest.approx(span_ms / 99)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([piece()], "without [DONE]"),
        ([piece(), "[DONE]"], "no usage"),
        ([usage(0), "[DONE]"], "empty"),
        ([piece(), '{"error": {"message": "engine died"}}'], "engine died"),
        ([piece(), "{"], "JSONDecodeError"),
        ([piece(), "[1]"], "the server sent"),
        ([piece(), '{"usage": {"completion_tokens": 1}}'], "the server sent"),
        ([piece(), '{"choices": [7]}'], "the server sent"),
    ],
)
def test_what_does_not_end_well_is_a_failure(script, message):
    with FakeServer(lambda _body: [(0.0, data) for data in script]) as server:
        load, outcomes, duration_s = measure(server)
    result = summarise(load, outcomes, duration_s, goodput={"ttft": 1e9})
    assert (result["completed"], result["failed"]) == (0, 1)
    assert message in result["errors"][0]
    assert result["mean_ttft_ms"] is None
    assert result["request_goodput"] == 0
    json.dumps(result, allow_nan=False)


def test_refusals_and_dead_servers_are_failures():
    with FakeServer(lambda _body: [(0.0, "busy")], status=429) as server:
        outcomes = measure(server)[1]
    assert outcomes[0].error.startswith("429: ")
    load = Load(base_url="http://127.0.0.1:9", model="m", num_prompts=2)
    outcomes, _ = measure_serving(load)
    assert all("ConnectError" in outcome.error for outcome in outcomes)


def test_concurrency_has_its_limit_and_the_key_is_sent():
    with FakeServer(answer(0.02, 0.0, 2)) as server:
        measure(server, num_prompts=12, max_concurrency=3, api_key="secret-key")
    assert server.most_live <= 3
    assert len(server.bodies) == 12
    assert set(server.keys) == {"Bearer secret-key"}
    assert set(server.paths) == {"/v1/completions"}


def test_conversations_are_asked_and_read_as_such():
    def delta(finish: str | None = None, **fields: str) -> str:
        return json.dumps({"choices": [{"delta": fields, "finish_reason": finish}]})

    def script(_body: Any) -> Any:
        # A role is no text; a thought and the end, which may have none, are tokens.
        pieces = [delta(role="assistant", content=""), delta(reasoning_content="hm")]
        pieces += [delta(content="a"), delta("length")]
        return [(0.05, data) for data in (*pieces, usage(3), "[DONE]")]

    with FakeServer(script) as server:
        load, outcomes, duration_s = measure(server, backend="openai-chat", random_output_len=3)
    result = summarise(load, outcomes, duration_s, goodput={})
    assert result["completed"] == 1, result["errors"]
    assert result["backend"] == "openai-chat"
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies[0]["messages"][0]["content"].count(" ") == 7
    assert server.bodies[0]["max_completion_tokens"] == 3
    assert not {"prompt", "max_tokens"} & server.bodies[0].keys()
    assert len(outcomes[0].piece_times_s) == 3
    assert result["requests_of_other_output_len"] == result["requests_of_merged_pieces"] == 0
    assert result["median_ttft_ms"] >= 100


def test_requests_come_at_their_rate():
    with FakeServer(answer(0.0, 0.0, 1)) as server:
        seed = random.randrange(2**32)
        load, outcomes, _ = measure(server, num_prompts=20, request_rate=20.0, seed=seed)
        sent_s = [outcome.sent_s for outcome in outcomes]
        again = measure(server, num_prompts=20, seed=seed)[1]
    assert not [outcome.error for outcome in (*outcomes, *again) if outcome.error]
    # Prompts come first from the generator, then the gaps.
    rng = random.Random(seed)
    for _ in range(20):
        rng.choices(WORDS, k=8)
    due_s = [0.0]
    for _ in range(19):
        due_s.append(due_s[-1] + rng.expovariate(load.request_rate))
    lates_ms = [(s - sent_s[0] - due) * 1e3 for s, due in zip(sent_s, due_s, strict=True)]
    assert statistics.median(map(abs, lates_ms)) < LATE_MS
    assert again[-1].sent_s - again[0].sent_s < due_s[-1] + LATE_MS / 1e3
    prompts = [body["prompt"] for body in server.bodies]
    assert sorted(prompts[:20]) == sorted(prompts[20:])


def test_lengths_like_those_of_chats_vary_and_follow_the_seed():
    with FakeServer(answer(0.0, 0.0, 1)) as server:
        for seed in (1, 1, 2):
            measure(server, num_prompts=8, max_concurrency=1, dataset="sharegpt", seed=seed)
    asked = [(body["prompt"], body["max_tokens"]) for body in server.bodies]
    assert asked[:8] == asked[8:16] != asked[16:]
    assert len({num_output for _, num_output in asked}) > 4
    assert all(4 <= len(prompt.split()) <= 1024 for prompt, _ in asked)


def outcome(ttft_s: float, num_gaps: int, gap_s: float) -> Outcome:
    times = [10 + ttft_s + gap_s * i for i in range(num_gaps + 1)]
    made = Outcome(num_asked=num_gaps + 1, sent_s=10.0, piece_times_s=times)
    made.num_prompt, made.num_output = 3, num_gaps + 1
    return made


def test_goodput_counts_those_that_keep_all_limits():
    load = Load(base_url="http://x", model="m", num_prompts=4)
    outcomes = [
        outcome(0.1, 9, 0.01),
        outcome(0.3, 9, 0.01),
        outcome(0.1, 9, 0.03),
        outcome(0.1, 0, 0.0),
    ]
    limits = parse_goodput(["ttft:200", "tpot:20"])
    result = summarise(load, outcomes, 2.0, goodput=limits)
    # The second is late, the third slow; one token has no TPOT to be too long.
    assert result["request_goodput"] == 2 / 2.0
    assert summarise(load, outcomes, 2.0, goodput={})["request_goodput"] is None
    assert summarise(load, outcomes, 2.0, goodput={"e2el": 150})["request_goodput"] == 1 / 2.0


def test_peaks_are_of_the_busiest_moment():
    load = Load(base_url="http://x", model="m", num_prompts=3)
    # Sent at 10 s: pieces at 10.1 to 10.5 s, at 11.2 and 11.7 s; sent at 12 s: one at 12.1 s.
    outcomes = [outcome(0.1, 4, 0.1), outcome(1.2, 1, 0.5), outcome(0.1, 0, 0.0)]
    outcomes[2].sent_s, outcomes[2].piece_times_s = 12.0, [12.1]
    result = summarise(load, outcomes, 3.0, goodput={})
    assert result["max_output_tokens_per_s"] == 5
    assert result["max_concurrent_requests"] == 2
    # Twelve tokens in two pieces are six each.
    outcomes[1].num_output = 12
    assert summarise(load, outcomes, 3.0, goodput={})["max_output_tokens_per_s"] == 12
    outcomes[2].error = "503: busy"
    outcomes[2].piece_times_s = []
    found = details(outcomes)
    assert found["ttfts"] == [pytest.approx(0.1), pytest.approx(1.2), None]
    assert found["itls"][1] == [pytest.approx(0.5)]
    assert found["errors"] == ["", "", "503: busy"]
    assert {len(values) for values in found.values()} == {3}
    nothing = summarise(load, outcomes[2:], 3.0, goodput={})
    assert nothing["max_output_tokens_per_s"] is None
    assert nothing["max_concurrent_requests"] == 0


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:nan", "itl:5", "ttft:-1", ""])
def test_odd_goodput_is_refused(text):
    with pytest.raises(ConfigError, match="goodput: got"):
        parse_goodput([text])


@pytest.mark.parametrize("size", [1, 2, 7, 64, 65])
def test_percentiles_are_numpys(size):
    samples = sorted(random.random() for _ in range(size))
    for share in (0, 50, 90, 99, 100):
        # Two roundings of numbers below 1.
        assert percentile(samples, share) == pytest.approx(np.percentile(samples, share), abs=1e-15)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_url", "localhost:8000"),
        ("backend", "tgi"),
        ("dataset", "sonnet"),
        ("num_prompts", 0),
        ("random_input_len", 0),
        ("max_concurrency", 0),
        ("request_rate", 0.0),
        ("request_rate", math.nan),
    ],
)
def test_odd_loads_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}: got"):
        Load(**{"base_url": "http://x", "model": "m", field: value})


def test_the_command_prints_and_saves(tmp_path):
    out = tmp_path / "result.json"
    args = ["--num-prompts", "3", "--random-input-len", "4", "--random-output-len", "5"]
    args += ["--goodput", "ttft:60000", "--percentile-metrics", "ttft,itl"]
    with FakeServer(answer(0.0, 0.001, 4)) as server:
        args = ["bench", "serve", "--model", "m", "--base-url", server.url + "/v1/", *args]
        args += ["--dataset-name", "random", "--save-detailed"]
        result = CliRunner().invoke(cli.app, [*args, "--save-result", str(out)])
    assert result.exit_code == 0, result.output
    assert "Serving Benchmark Result" in result.output
    assert "P99 ITL (ms)" in result.output
    assert "TPOT" not in result.output
    saved = json.loads(out.read_text())
    assert saved["completed"] == 3
    assert saved["request_goodput"] == saved["request_throughput"]
    assert saved["total_output_tokens"] == 15
    assert {"mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms"} <= saved.keys()
    assert saved["output_lens"] == [5, 5, 5]


def test_the_command_refuses_and_fails_in_one_line():
    base = ["bench", "serve", "--model", "m", "--base-url", "http://127.0.0.1:9"]
    for option, value in (
        ("--percentile-metrics", "ttft,ttft"),
        ("--percentile-metrics", "x"),
        ("--metric-percentiles", "101"),
        ("--goodput", "x:1"),
    ):
        result = CliRunner().invoke(cli.app, [*base, option, value])
        assert result.exit_code == 2
        assert option[2:].replace("-", "_") in result.output


BUSY = {"error": {"message": "come\nback later", "type": "overloaded"}}


@pytest.mark.parametrize(
    ("url", "models", "message"),
    [
        ("http://127.0.0.1:9", None, "base_url: got 'http://127.0.0.1:9'; allowed: a server of "),
        ("http://x:y", None, "base_url: got 'http://x:y'; allowed: a server of "),
        (None, (200, {"data": [{"id": "a"}, {"id": "b"}]}), "model: got 'm'; allowed: a, b\n"),
        (None, (200, {"data": []}), "model: got 'm'; allowed: none"),
        (None, (401, {}), "api_key: got one that the server refuses; allowed: "),
        (None, (503, BUSY), "answers 503: come back later)\n"),
        (None, (200, ["x"]), "answers 200: "),
    ],
)
def test_a_server_of_no_use_is_told_in_one_line_before_any_load(url, models, message):
    with FakeServer(answer(0.0, 0.0, 1), models=models) as server:
        args = ["--base-url", url or server.url, "--api-key", "secret-key", "--num-prompts", "1"]
        result = CliRunner().invoke(cli.app, ["bench", "serve", "--model", "m", *args])
    assert result.exit_code == 2, result.exception
    assert not result.stdout
    assert result.stderr.startswith("subten: error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert "secret-key" not in result.stderr
    assert not server.bodies


def test_where_all_fails_there_are_no_numbers():
    with FakeServer(lambda _body: [(0.0, "busy")], status=429) as server:
        args = ["--model", "m", "--base-url", server.url, "--num-prompts", "2"]
        result = CliRunner().invoke(cli.app, ["bench", "serve", *args])
    assert result.exit_code == 1
    assert result.stdout == "No request was answered.\n"
    assert "subten: failed: 429: data: busy" in result.stderr


def test_a_refusal_is_its_message():
    assert serving._refusal(429, json.dumps(BUSY)) == "429: come back later"
    assert serving._refusal(502, "<html>\n") == "502: <html>"
