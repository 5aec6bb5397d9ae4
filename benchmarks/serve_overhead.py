"""What serving adds to a token: one model in an engine of this process and behind a server.

    python benchmarks/serve_overhead.py --model demo --kv-cache-dtype int4
    python benchmarks/serve_overhead.py --device cuda --shape qwen3-30b-a3b --quantization fp8 \\
        --record benchmarks/results/h200-serve-overhead.json

The two take turns, request by request, so that whatever else the machine does meets both alike.
Each request continues a prompt of its own by `--tokens` tokens, greedily. TPOT is (last - first) /
(tokens - 1): the engine's by its own clock at the end of each step, the server's by when a client's
socket, in this process, has the bytes. After that `--streams` requests run together, in turns as
well, for the spread of the gaps between tokens while all of them decode.

With `--shape` the weights are random, and each token's text is a word of its own, so that each
makes an event. `--shape tiny` is a model whose steps cost next to nothing: what serving adds shows
best beside it, and on a busy machine beside it alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import selectors
import socket
import subprocess
import sys
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
    """The model in an engine of this process."""
    keep_freed_memory()
    device = detect(options.device)
    settings: dict[str, Any] = {
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.streams,
        # Two engines share the device.
        "gpu_memory_utilization": 0.45,
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
    serve(channel, build(options))


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


def engine_tpot_ms(llm: LLM, prompt: list[int], num_tokens: int) -> float:
    """TPOT of one request by the engine's clock."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tpot_ms = llm.generate(prompt, params)[0].tpot_ms
    assert tpot_ms is not None
    return tpot_ms


Times = Sequence[Sequence[float]]
"""When the tokens of each of several requests came, seconds of one clock."""


def engine_times_s(llm: LLM, prompts: list[list[int]], num_tokens: int) -> Times:
    """Requests that run together, by the engine's clock."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    found = llm.generate(prompts, params)
    return [completion.timings.token_times_s for completion in found]


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
    llm = build(options)
    process, port = start_server(own)
    # What is there stays: a collection between steps would look at all of it.
    gc.collect()
    gc.freeze()
    rng = random.Random(options.seed)
    vocab = llm.model_config.vocab_size

    def prompt() -> list[int]:
        return [rng.randrange(vocab) for _ in range(options.prompt_len)]

    try:
        engine_ms, server_ms, gaps_ms = [], [], []
        for number in range(-2, options.rounds):
            of_engine = engine_tpot_ms(llm, prompt(), options.tokens)
            answer = ask(port, [prompt()], options.tokens)[0]
            if number >= 0:
                engine_ms.append(of_engine)
                server_ms.append(server_tpot_ms(answer, options.tokens))
                gaps_ms += answer.gaps_ms
        ask(port, [prompt() for _ in range(options.streams)], options.tokens)
        engine_times_s(llm, [prompt() for _ in range(options.streams)], options.tokens)
        spent_ms = 0.0
        of_server: list[Times] = []
        of_engine_alone: list[Times] = []
        for _ in range(options.stream_rounds):
            prompts = [prompt() for _ in range(options.streams)]
            of_engine_alone.append(engine_times_s(llm, prompts, options.tokens))
            before_s = cpu_s(process.pid)
            answers = ask(port, [prompt() for _ in range(options.streams)], options.tokens)
            spent_ms += (cpu_s(process.pid) - before_s) * 1e3
            of_server.append([answer.times_s for answer in answers])
    finally:
        process.terminate()
        process.wait(60)
    num_tokens = options.stream_rounds * options.streams * options.tokens
    gaps_ms.sort()
    added_ms = median(server_ms) - median(engine_ms)
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
        "added_ms_per_token": added_ms,
        "added_ms_per_token_of_pairs": median(
            b - a for a, b in zip(engine_ms, server_ms, strict=True)
        ),
        "bound_ms": BOUND_MS,
        "itl_ms_p50": percentile(gaps_ms, 50),
        "itl_ms_p99": percentile(gaps_ms, 99),
        "num_streams": options.streams,
        **spread("engine_streams", of_engine_alone),
        **spread("streams", of_server),
        "bound_spread": BOUND_SPREAD,
        # A server that is late, or a token that is part of a character, makes fewer events.
        "events_per_token": sum(len(t) for times in of_server for t in times) / num_tokens,
        "server_cpu_ms_per_token": spent_ms / num_tokens,
        **origin(detect(options.device)),
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
    parser.add_argument("--seed", type=int, default=0)
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
