"""What serving adds to a token: one engine asked directly, and through the server around it.

    python benchmarks/serve_overhead.py --model demo --kv-cache-dtype int4
    python benchmarks/serve_overhead.py --device cuda --shape qwen3-30b-a3b --quantization fp8 \\
        --record benchmarks/results/h200-serve-overhead.json
    python benchmarks/serve_overhead.py --device cpu --tokens 8 --prompt-len 4 --rounds 32 \\
        --streams 1 --stream-rounds 0

The two take turns, request by request, and each goes first in turn, so that whatever else the
machine does meets both alike. It is one process that computes both, so that where its memory lies
is no difference. Each request continues a prompt of its own by `--tokens` tokens, greedily. TPOT is
(last - first) / (tokens - 1): the engine's by its own clock at the end of each step, the server's
by when a client's socket, in this process, has the bytes. `added_ms_interval` has the median of the
pairs' differences with a probability of 95 %.

Where steps are long and a machine is busy, that interval is wider than what is looked for. What the
server does is then seen beside the steps: `between_steps_ms_p50` is the engine's time from the end
of a step to the beginning of the next, alone and behind a server; `added_between_steps_cpu_ms` the
part of their difference that its thread computes, where the rest is others' having its core; and
`delivery_ms` the time from the end of a step to the client's having its token, which moves a stream
as a whole and adds nothing to the gaps in it.

After that `--streams` requests run together, in turns as well, for the spread of the gaps between
tokens while all of them decode.

With `--shape` the weights are random, and each token's text is a word of its own, so that each
makes an event. `--shape tiny` is a model whose steps cost next to nothing: what serving adds shows
best beside it, and on a busy machine beside it alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import select
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from subten.bench.random_model import random_decoder
from subten.bench.records import add_records, origin
from subten.bench.serving import percentile
from subten.bench.shapes import get_shape
from subten.config import EngineConfig, ModelConfig, RopeConfig, cache_dir
from subten.core import SamplingParams
from subten.device import detect, keep_freed_memory
from subten.engine.llm import LLM
from subten.serve.channel import Channel
from subten.tokenizer import Tokenizer
from subten.weights.load import LoadedModel
from subten.weights.upcycled import demo_model

TINY = ModelConfig(
    architecture="MixtralForCausalLM",
    num_layers=2,
    d_model=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    d_ffn=64,
    num_experts=8,
    top_k=2,
    vocab_size=512,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_model_len=4096,
    tie_word_embeddings=False,
)
BOUND_MS = 0.15
"""What the server may add to a token at batch 1 (issue 5)."""
BOUND_SPREAD = 1.3
"""ITL p99 over p50 with several streams on a GPU."""


@dataclass(kw_only=True)
class Answer:
    """One streamed request and when its events came, seconds of one clock."""

    sock: socket.socket
    times_s: list[float] = field(default_factory=list)
    tail: bytes = b""
    is_done: bool = False

    @property
    def gaps_ms(self) -> list[float]:
        """Between events; several that came at once are gaps of 0."""
        return [(b - a) * 1e3 for a, b in pairwise(self.times_s)]


def build(options: argparse.Namespace) -> LLM:
    """The model in an engine."""
    keep_freed_memory()
    device = detect(options.device)
    settings: dict[str, Any] = {
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.streams,
        "quantization": options.quantization,
    }
    if options.shape is None:
        source = options.model
        if source == "demo":
            source = str(demo_model(cache_dir(), lambda _what, _share: None))
        return LLM(source, device=options.device, **settings)
    config = TINY
    if options.shape != "tiny":
        config = get_shape(options.shape, min_model_len=options.max_model_len)
    model = random_decoder(
        config,
        device=device.torch_device,
        dtype=torch.bfloat16,
        quantization=options.quantization,
    )
    from subten.bench.quality import with_format
    from subten.codecs import kv_format

    model = with_format(model, kv_format(options.kv_cache_dtype, config.head_dim))
    loaded = LoadedModel(
        model=model,
        config=config,
        tokenizer=word_tokenizer(config.vocab_size),
        name=options.shape,
        weight_bytes=model.weight_bytes,
        dtype=model.dtype,
        quantization=model.quantization,
    )
    return LLM(loaded, **settings)


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """A word for each id."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    vocab = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    backend = Backend(models.WordLevel(vocab=vocab, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, eos_token_ids=[])


def run_engine(options: argparse.Namespace) -> None:
    """The server's engine process, as `subten.serve.engine_process` is."""
    from subten.serve.engine_process import channel_from_arguments, first_message, serve

    channel = channel_from_arguments()
    first_message(channel)
    llm = build(options)
    take_turns(channel, llm, options.control)
    serve(channel, llm)


def take_turns(channel: Channel, llm: LLM, control: str) -> None:
    """Let whoever listens at `control` run requests while the server has none: see `Alone`."""
    steps: list[Step] = []
    step, receive = llm.engine.step, channel.receive

    def timed_step() -> Any:
        began = (time.perf_counter(), time.thread_time())
        events = step()
        steps.append((*began, time.perf_counter(), time.thread_time(), len(events)))
        return events

    sock = socket.socket(socket.AF_UNIX)
    sock.connect(control)
    lines = sock.makefile("rw", encoding="ascii")

    def answer() -> None:
        asked = json.loads(lines.readline() or "null")
        if asked is None:
            sock.close()
            return
        params = SamplingParams(max_tokens=asked["num_tokens"], temperature=0.0, ignore_eos=True)
        found = llm.generate(asked["prompts"], params) if asked["prompts"] else []
        answer = {
            "times_s": [completion.timings.token_times_s for completion in found],
            "tpot_ms": [completion.tpot_ms for completion in found],
            "steps": steps,
        }
        lines.write(json.dumps(answer) + "\n")
        lines.flush()
        steps.clear()

    def receive_or_answer(timeout_s: float) -> Any:
        # The engine's loop has nothing to do when it is ready to wait.
        if timeout_s > 0:
            timeout_s = min(timeout_s, 0.02)
            if sock.fileno() >= 0 and select.select([sock], [], [], 0)[0]:
                answer()
        return receive(timeout_s)

    llm.engine.step = timed_step  # type: ignore[method-assign]
    channel.receive = receive_or_answer  # type: ignore[method-assign]


class Alone:
    """The server's engine, asked directly."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(60)
        sock, _ = listener.accept()
        sock.settimeout(600)
        self._lines = sock.makefile("rw", encoding="ascii")

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, Any]:
        """Continue the prompts: "times_s" of each one's tokens, "tpot_ms", and what `steps` has."""
        self._lines.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._lines.flush()
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found

    def steps(self) -> list[Step]:
        """The steps since the last answer."""
        found: list[Step] = self.generate([], 1)["steps"]
        return found


Step = tuple[float, float, float, float, int]
"""Time and the thread's processor seconds at the beginning, both at the end; number of events."""


def between_ms(steps: Sequence[Step]) -> list[float]:
    """From the end of each step of one request to the beginning of the next."""
    return [(after[0] - before[2]) * 1e3 for before, after in pairwise(steps)]


def between_cpu_ms(steps: Sequence[Step]) -> list[float]:
    """What the engine's thread itself computes between steps, however busy the machine is."""
    return [(after[1] - before[3]) * 1e3 for before, after in pairwise(steps)]


def delivery_ms(steps: Sequence[Step], times_s: Sequence[float]) -> list[float]:
    """From the end of each step of one request to its token's coming; [] where events merged."""
    ends_s = [step[2] for step in steps if step[-1]]
    if len(ends_s) != len(times_s):
        return []
    return [(came_s - end_s) * 1e3 for end_s, came_s in zip(ends_s, times_s, strict=True)]


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Where the median is with 95 %, whatever the distribution: order statistics (sign test)."""
    ordered, num = sorted(samples), len(samples)
    below, tail = 0.0, 0
    while below + math.comb(num, tail) / 2**num <= 0.025 and tail < num // 2:
        below += math.comb(num, tail) / 2**num
        tail += 1
    # As many samples as `tail` may lie on one side of it; below 6 none may be left out.
    return ordered[max(tail - 1, 0)], ordered[num - max(tail, 1)]


def run_server(options: argparse.Namespace, own: Sequence[str]) -> None:
    """`subten serve` around that engine."""
    from subten.serve.server import run
    from subten.serve.settings import ServeConfig

    command = [sys.executable, __file__, "--part", "engine", *own]
    run(
        ServeConfig(model="measured", port=0, engine=EngineConfig(max_num_seqs=options.streams)),
        command=command,
    )


def start_server(
    own: Sequence[str], *, script: str = __file__
) -> tuple[subprocess.Popen[bytes], int]:
    """The server of a benchmark and its port, once it listens."""
    process = subprocess.Popen(
        [sys.executable, script, "--part", "server", *own], stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b'"listening"' in line:
            # A pipe that nobody empties would hold the server in the end.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, int(json.loads(line)["url"].rpartition(":")[2])
        sys.stderr.buffer.write(line)
    raise SystemExit("the server does not start")


Times = Sequence[Sequence[float]]
"""When the tokens of each of several requests came, seconds of one clock."""


def gaps_of_all(times_s: Times) -> list[float]:
    """Milliseconds between tokens while all decode; the first ones wait for others' prompts."""
    began_s = max(times[0] for times in times_s)
    return [(b - a) * 1e3 for times in times_s for a, b in pairwise(times) if a >= began_s]


def long_gaps(times_s: Times, limit_ms: float) -> Counter[str]:
    """Where gaps over a limit lie: first of all, at the end of another request, or between."""
    began_s = max(times[0] for times in times_s)
    found: Counter[str] = Counter()
    for index, times in enumerate(times_s):
        ends = [other[-1] for i, other in enumerate(times_s) if i != index]
        gaps = [(a, b) for a, b in pairwise(times) if a >= began_s]
        for number, (a, b) in enumerate(gaps):
            if (b - a) * 1e3 > limit_ms:
                is_end = any(a <= end + 1e-3 and end <= b for end in ends)
                found["first" if number == 0 else "end" if is_end else "between"] += 1
    return found


def spread(name: str, rounds: Sequence[Times]) -> dict[str, Any]:
    """Fields of a record: percentiles of all gaps, and where the long ones were."""
    gaps_ms = sorted(gap for times_s in rounds for gap in gaps_of_all(times_s))
    p50, p99 = percentile(gaps_ms, 50), percentile(gaps_ms, 99)
    where: Counter[str] = Counter()
    for times_s in rounds:
        where += long_gaps(times_s, BOUND_SPREAD * p50)
    return {
        f"{name}_itl_ms_p50": p50,
        f"{name}_itl_ms_p99": p99,
        f"{name}_itl_spread": p99 / p50,
        f"{name}_long_gaps": dict(where) | {"of": len(gaps_ms)},
    }


def ask(port: int, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
    """Send one streamed request for each prompt, all at once, and read them to their ends."""
    selector = selectors.DefaultSelector()
    answers = []
    for prompt in prompts:
        body = {"model": "measured", "prompt": prompt, "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        sock = socket.create_connection(("127.0.0.1", port), timeout=600)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = Answer(sock=sock)
        selector.register(sock, selectors.EVENT_READ, answer)
        answers.append(answer)
    while selector.get_map():
        for key, _ in selector.select():
            answer = key.data
            data = answer.sock.recv(2**16)
            now_s = time.perf_counter()
            both = answer.tail + data
            answer.times_s += [now_s] * both.count(b'data: {"id"')
            answer.is_done = answer.is_done or b"data: [DONE]" in both
            # A mark may be cut anywhere; what is kept holds no whole one.
            answer.tail = both[-10:]
            if not data:
                selector.unregister(answer.sock)
                answer.sock.close()
                assert answer.is_done, both[-300:]
    return answers


def server_tpot_ms(answer: Answer, num_tokens: int) -> float:
    """TPOT of one request as its client sees it."""
    return (answer.times_s[-1] - answer.times_s[0]) * 1e3 / (num_tokens - 1)


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(options: argparse.Namespace, own: Sequence[str]) -> dict[str, Any]:
    """Take turns, then run all streams together."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/control"
        listener.bind(path)
        listener.listen()
        process, port = start_server([*own, "--control", path])
        try:
            alone = Alone(listener)
            # What is there stays: a collection between tokens would look at all of it.
            gc.collect()
            gc.freeze()
            return measure_both(options, alone, process.pid, port)
        finally:
            process.terminate()
            process.wait(60)


def measure_both(
    options: argparse.Namespace, alone: Alone, server_pid: int, port: int
) -> dict[str, Any]:
    """The record of an engine and the server around it."""
    rng = random.Random(options.seed)

    def prompt() -> list[int]:
        return [rng.randrange(options.vocab) for _ in range(options.prompt_len)]

    engine_ms: list[float] = []
    server_ms: list[float] = []
    gaps_ms: list[float] = []
    came_ms: list[float] = []
    between: dict[str, list[float]] = {"engine": [], "server": []}
    between_cpu: dict[str, list[float]] = {"engine": [], "server": []}

    def of_engine() -> None:
        found = alone.generate([prompt()], options.tokens)
        engine_ms.append(found["tpot_ms"][0])
        between["engine"] += between_ms(found["steps"])
        between_cpu["engine"] += between_cpu_ms(found["steps"])

    def of_server() -> None:
        answer = ask(port, [prompt()], options.tokens)[0]
        steps = alone.steps()
        server_ms.append(server_tpot_ms(answer, options.tokens))
        gaps_ms.extend(answer.gaps_ms)
        between["server"] += between_ms(steps)
        between_cpu["server"] += between_cpu_ms(steps)
        came_ms.extend(delivery_ms(steps, answer.times_s))

    of_engine(), of_server()
    for samples in (
        engine_ms,
        server_ms,
        gaps_ms,
        came_ms,
        *between.values(),
        *between_cpu.values(),
    ):
        samples.clear()
    for number in range(options.rounds):
        for turn in (of_engine, of_server) if number % 2 else (of_server, of_engine):
            turn()
    added_ms = [b - a for a, b in zip(engine_ms, server_ms, strict=True)]
    gaps_ms.sort()
    came_ms.sort()
    between_p50 = {name: median(samples) for name, samples in between.items()}
    cpu_p50 = {name: median(samples) for name, samples in between_cpu.items()}
    return {
        "kind": "serve_overhead",
        "shape": options.shape or options.model,
        "weights_dtype": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "prompt_len": options.prompt_len,
        "num_tokens": options.tokens,
        "num_requests": options.rounds,
        "engine_tpot_ms_p50": median(engine_ms),
        "server_tpot_ms_p50": median(server_ms),
        "added_ms_per_token": median(server_ms) - median(engine_ms),
        "added_ms_per_token_of_pairs": median(added_ms),
        "added_ms_interval": median_interval(added_ms),
        "between_steps_ms_p50": between_p50,
        "added_between_steps_ms": between_p50["server"] - between_p50["engine"],
        "added_between_steps_cpu_ms": cpu_p50["server"] - cpu_p50["engine"],
        "delivery_ms_p50": percentile(came_ms, 50) if came_ms else None,
        "delivery_ms_p99": percentile(came_ms, 99) if came_ms else None,
        "bound_ms": BOUND_MS,
        "itl_ms_p50": percentile(gaps_ms, 50),
        "itl_ms_p99": percentile(gaps_ms, 99),
        **of_streams(options, alone, server_pid, port, prompt),
        **origin(detect(options.device)),
    }


def of_streams(
    options: argparse.Namespace,
    alone: Alone,
    server_pid: int,
    port: int,
    prompt: Callable[[], list[int]],
) -> dict[str, Any]:
    """Fields of a record about requests that run together; {} for no rounds."""
    if not options.stream_rounds:
        return {}
    of_server: list[Times] = []
    of_engine: list[Times] = []
    spent_ms = 0.0
    for number in range(-1, options.stream_rounds):
        prompts = [prompt() for _ in range(options.streams)]
        engine_times_s = alone.generate(prompts, options.tokens)["times_s"]
        before_s = cpu_s(server_pid)
        answers = ask(port, [prompt() for _ in range(options.streams)], options.tokens)
        if number >= 0:
            spent_ms += (cpu_s(server_pid) - before_s) * 1e3
            of_engine.append(engine_times_s)
            of_server.append([answer.times_s for answer in answers])
    num_tokens = options.stream_rounds * options.streams * options.tokens
    return {
        "num_streams": options.streams,
        **spread("engine_streams", of_engine),
        **spread("streams", of_server),
        "bound_spread": BOUND_SPREAD,
        # A server that is late, or a token that is part of a character, makes fewer events.
        "events_per_token": sum(len(t) for times in of_server for t in times) / num_tokens,
        "server_cpu_ms_per_token": spent_ms / num_tokens,
    }


def main() -> None:
    """Measure, print, and keep the record where one asks for it."""
    parser = argparse.ArgumentParser(description="What serving adds to a token.")
    parser.add_argument("--model", default="demo", help="demo, a folder or a .gguf file")
    parser.add_argument("--shape", default=None, help="a reference shape with random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-dtype", default="int4")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=512, help="prompts are of ids below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", default=None, help=argparse.SUPPRESS)
    run_part(parser, run_engine, run_server, measure)


def run_part(
    parser: argparse.ArgumentParser,
    run_engine: Callable[[argparse.Namespace], None],
    run_server: Callable[[argparse.Namespace, Sequence[str]], None],
    measure: Callable[[argparse.Namespace, Sequence[str]], dict[str, Any]],
) -> None:
    """Be the engine, the server, or who measures both, prints, and keeps the record if asked to.

    The server and the engine are this script again, with the same arguments and `--part`.
    """
    parser.add_argument("--record", type=Path, default=None, help="JSON list of records to update")
    parser.add_argument(
        "--part", choices=("engine", "server"), default=None, help=argparse.SUPPRESS
    )
    # The engine's process gets its socket as one more argument.
    options, _ = parser.parse_known_args()
    own = [arg for arg in sys.argv[1:] if arg not in ("--part", "engine", "server")]
    if options.part == "engine":
        return run_engine(options)
    if options.part == "server":
        return run_server(options, own)
    record = measure(options, own)
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    record["command"] = " ".join(["python", script, *sys.argv[1:]])
    print(json.dumps(record, indent=1))
    if options.record is not None:
        add_records(options.record, [record])
    return None


if __name__ == "__main__":
    main()
