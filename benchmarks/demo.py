"""Measures the demo as a person meets it, and whether a batch changes any answer.

    python benchmarks/demo.py --out benchmarks/results/demo-cpu.json

Each run is a fresh process: seconds from its start to the first text on stdout, its peak memory,
and the time per token that it reports. Then five prompts are answered alone and together, greedily,
with a bf16 cache, and their tokens compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from subten.bench.report import environment, write_json
from subten.cli_options import resolve_model
from subten.core import SamplingParams
from subten.engine.llm import LLM

PROMPTS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain what a computer is to a child, in three sentences.",
    "Name three animals that live in the forest and say what each of them eats.",
)


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--kv-cache-dtype", default="int4", help="format of the timed runs")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of each timed answer")
    parser.add_argument("--runs", type=int, default=3, help="timed processes")
    args = parser.parse_args()
    source = resolve_model("demo")
    runs = [timed_run(args) for _ in range(args.runs)]
    with LLM(source, kv_cache_dtype="bf16", device=args.device) as llm:
        command = " ".join(["python", "benchmarks/demo.py", *sys.argv[1:]])
        record = environment(llm.device) | {"command": command}
        batch = compare_batch(llm, min(64, args.max_tokens))
    result = {
        "kind": "demo",
        "environment": record,
        "kv_cache_dtype": args.kv_cache_dtype,
        "runs": runs,
        "first_text_s": median(run["first_text_s"] for run in runs),
        "ttft_ms": median(run["ttft_ms"] for run in runs),
        "tpot_ms": median(run["tpot_ms"] for run in runs),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
        "prompt": PROMPTS[0],
        "shown": runs[-1]["shown"],
        "batch_of_5": batch,
    }
    write_json(args.out, result)
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}))


def timed_run(args: argparse.Namespace) -> dict[str, Any]:
    """One answer by a fresh process, streamed; a second process tells its own timings as JSON."""
    command = [sys.executable, "-m", "subten", "generate", PROMPTS[0]]
    command += ["--device", args.device, "--kv-cache-dtype", args.kv_cache_dtype]
    command += ["--max-tokens", str(args.max_tokens)]
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        shown = os.read(process.stdout.fileno(), 1)
        first_text_s = time.perf_counter() - start_s
        shown += process.stdout.read()
    assert process.returncode == 0, process.returncode
    told = subprocess.run(
        [*command, "--json"], capture_output=True, check=True, stdin=subprocess.DEVNULL
    )
    answer = json.loads(told.stdout)
    kept = ("ttft_ms", "tpot_ms", "kv_bytes", "kv_true_bits", "usage")
    return {
        "first_text_s": first_text_s,
        "peak_memory_bytes": peak_of_children_bytes(),
        "shown": shown.decode(),
        **{key: answer[key] for key in kept},
    }


def peak_of_children_bytes() -> int:
    """Most resident memory of any process started so far."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compare_batch(llm: LLM, max_tokens: int) -> dict[str, Any]:
    """Answer every prompt alone and all in one batch; tokens equal or not."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    assert llm.tokenizer is not None
    prompts = [
        llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS
    ]
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    together = [completion.token_ids for completion in llm.generate(prompts, params)]
    return {
        "is_equal": alone == together,
        "num_equal": sum(a == b for a, b in zip(alone, together, strict=True)),
        "num_tokens": sum(map(len, alone)),
    }


if __name__ == "__main__":
    main()
