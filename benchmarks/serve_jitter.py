"""How evenly a server passes tokens on: behind it an engine that keeps time and computes nothing.

    python benchmarks/serve_jitter.py --streams 8 --step-ms 1.4

Every `--step-ms` the engine sends one token for each stream. What gaps have beyond that, p99 over
p50, is what the server, the sockets and the client add: the last is this process, and the engine
waits in a loop, so that neither shares a core with the server where there are three. With
`--scrape-s` its metrics, those of a model with 128 experts, are asked for that often. For models'
own steps see `serve_overhead.py`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from serve_overhead import ask, cpu_s, gaps_of_all, run_part, start_server, word_tokenizer
from subten.bench.records import origin
from subten.bench.serving import percentile
from subten.config import EngineConfig
from subten.core import FinishReason
from subten.device import detect
from subten.serve import ipc
from subten.serve.channel import Channel, ServerGoneError
from subten.serve.engine_process import channel_from_arguments, first_message

VOCAB_SIZE = 512
SPIN_S = 3e-4
"""A sleep that long is not to be trusted: the rest of a step is waited for in a loop."""
BEAT_STEPS = 70


def run_engine(options: argparse.Namespace) -> None:
    """An engine that says a token a step for whoever asked."""
    channel = channel_from_arguments()
    first_message(channel)
    tokenizer = word_tokenizer(VOCAB_SIZE)
    info = ipc.EngineInfo(
        name="clock",
        vocab_size=VOCAB_SIZE,
        max_model_len=2**20,
        max_num_seqs=options.streams,
        eos_token_ids=[],
        kv_cache_dtype="none",
        kv_full_page_bits=0.0,
        num_pages=1,
        device="clock",
    )
    file = ipc.TokenizerFile(
        tokenizer_json=tokenizer.backend.to_str(),
        config={},
        eos_token_ids=[],
        bos_token_id=None,
        chat_template=None,
    )
    channel.send(ipc.Ready(info=info, tokenizer=file))
    channel.send(_status())
    gc.collect()
    gc.freeze()
    try:
        _keep_time(channel, options.step_ms / 1e3)
    except ServerGoneError:
        return


def _status() -> ipc.Status:
    """All that an engine can tell."""
    load = ipc.ExpertLoadOut(
        by_rank=[1.0] * 128, max_violation=0.0, worst_violation=0.0, experts_a_step=8.0
    )
    counts = ("running", "waiting", "pages_free", "pages_cached", "pages_used", "preemptions")
    counts += ("steps", "computed_tokens", "prefix_queries", "prefix_hits")
    return ipc.Status(
        **{f"num_{name}": 0 for name in counts},
        kv_bytes=0,
        kv_true_bits=None,
        kv_pages_by_kind={"int4": 0},
        expert_load=load,
    )


def _keep_time(channel: Channel, step_s: float) -> None:
    left: dict[str, int] = {}
    due_s = time.perf_counter()
    number = 0
    while True:
        for message in channel.receive(0.0 if left else 0.5):
            if isinstance(message, ipc.Submit):
                left[message.request_id] = message.sampling.max_tokens
            elif isinstance(message, ipc.Cancel):
                for request_id in message.request_ids:
                    left.pop(request_id, None)
        if not left or number % BEAT_STEPS == 0:
            channel.send(ipc.Beat(busy_s=0.0))
        if not left:
            continue
        now_s = time.perf_counter()
        due_s = max(due_s + step_s, now_s)
        if due_s - now_s > SPIN_S:
            time.sleep(due_s - now_s - SPIN_S)
        while time.perf_counter() < due_s:
            pass
        number += 1
        items = []
        for request_id in list(left):
            left[request_id] -= 1
            is_last = left[request_id] == 0
            items.append(
                ipc.TokenOut(
                    request_id=request_id,
                    token_id=number % VOCAB_SIZE,
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
            )
            if is_last:
                del left[request_id]
        channel.send(ipc.Tokens(num_computed=len(items), items=items))


def run_server(options: argparse.Namespace, own: Sequence[str]) -> None:
    """`subten serve` around that engine."""
    from subten.serve.server import run
    from subten.serve.settings import ServeConfig

    command = [sys.executable, __file__, "--part", "engine", *own]
    run(
        ServeConfig(model="measured", port=0, engine=EngineConfig(max_num_seqs=options.streams)),
        command=command,
    )


def scrape(port: int, every_s: float, times_ms: list[float]) -> None:
    """Ask for the metrics again and again; how long each answer took."""
    while True:
        time.sleep(every_s)
        began_s = time.perf_counter()
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        times_ms.append((time.perf_counter() - began_s) * 1e3)


def measure(options: argparse.Namespace, own: Sequence[str]) -> dict[str, Any]:
    """Gaps between events as clients see them."""
    process, port = start_server(own, script=__file__)
    gc.collect()
    gc.freeze()
    prompts = [[1, 2, 3]] * options.streams
    gaps_ms: list[float] = []
    scrapes_ms: list[float] = []
    num_events, num_tokens = 0, options.rounds * options.streams * options.tokens
    try:
        ask(port, prompts, 200)
        if options.scrape_s:
            arguments = (port, options.scrape_s, scrapes_ms)
            threading.Thread(target=scrape, args=arguments, daemon=True).start()
        before_s = cpu_s(process.pid)
        for _ in range(options.rounds):
            answers = ask(port, prompts, options.tokens)
            num_events += sum(len(answer.times_s) for answer in answers)
            gaps_ms += gaps_of_all([answer.times_s for answer in answers])
        spent_ms = (cpu_s(process.pid) - before_s) * 1e3
    finally:
        process.terminate()
        process.wait(60)
    gaps_ms.sort()
    p50, p99 = percentile(gaps_ms, 50), percentile(gaps_ms, 99)
    return {
        "kind": "serve_jitter",
        "step_ms": options.step_ms,
        "num_streams": options.streams,
        "num_tokens": options.tokens,
        "num_gaps": len(gaps_ms),
        # A server that is late sends several tokens as one event.
        "events_per_token": num_events / num_tokens,
        "itl_ms_p50": p50,
        "itl_ms_p90": percentile(gaps_ms, 90),
        "itl_ms_p99": p99,
        "itl_ms_max": gaps_ms[-1],
        "itl_spread": p99 / p50,
        "scrape_s": options.scrape_s,
        "num_scrapes": len(scrapes_ms),
        "scrape_ms_p50": percentile(sorted(scrapes_ms), 50) if scrapes_ms else None,
        "server_cpu_ms_per_token": spent_ms / num_tokens,
        **origin(detect("cpu")),
    }


def main() -> None:
    """Measure, print, and keep the record where one asks for it."""
    parser = argparse.ArgumentParser(description="How evenly a server passes tokens on.")
    parser.add_argument("--step-ms", type=float, default=1.4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--scrape-s", type=float, default=0.0, help="0: no scrapes")
    run_part(parser, run_engine, run_server, measure)


if __name__ == "__main__":
    main()
