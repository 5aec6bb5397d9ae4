"""Runs what only a GPU can: the tests, compute-sanitizer, and what the documents quote.

    python tools/gpu_runs.py --list
    python tools/gpu_runs.py                          all of it
    python tools/gpu_runs.py --only tests sanitizer   in the order of the table
    python tools/gpu_runs.py --seconds 540            as far as that goes

One after another, as each has the GPU and the cores to itself. What a job prints goes to a file of
its name under `--logs`, its records to `--results`, in place of older ones of the same kind. One
that fails, or outlasts its limit, stops none after it. Afterwards: `make tables`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command of Python, from the root of the checkout."""

    name: str
    command: str
    """After `python`; `{workers}`, `{results}`, `{logs}` and `{gpu}` are filled in."""

    limit_s: int
    """Seconds after which it is cut."""


def _latency(shape: str, rest: str) -> str:
    return f"-m subten bench latency --shape {shape} {rest} --json {{results}}/{{gpu}}-latency.json"


def _kernels(shape: str, rest: str) -> str:
    return f"-m subten bench kernels --shape {shape} {rest} --json {{results}}/{{gpu}}-kernels.json"


ALONE = (
    "--quantization fp8,int4,none --kv-cache-dtype bf16,int4 --context-len 1024,32768 "
    "--prompt-len 512 --num-steps 256"
)
MANY = "--quantization fp8 --kv-cache-dtype int4 --context-len 8192 --batch-size 8,16,32"

JOBS = (
    Job(
        name="tests",
        command="-m pytest tests --device cuda -n {workers} --dist worksteal --tb=short "
        "-p no:cacheprovider --failures {logs}/failures.txt",
        limit_s=600,
    ),
    Job(
        name="sanitizer",
        command="tools/sanitize.py --jobs {workers} --timeout 150 "
        "--json {results}/{gpu}-sanitizer.json",
        limit_s=600,
    ),
    Job(
        name="latency-many",
        command=_latency("qwen3-30b-a3b", f"{MANY} --prompt-len 512 --num-steps 128"),
        limit_s=200,
    ),
    Job(name="kernels-many", command=_kernels("qwen3-30b-a3b", MANY), limit_s=200),
    Job(name="latency-qwen3", command=_latency("qwen3-30b-a3b", ALONE), limit_s=300),
    Job(name="latency-mixtral", command=_latency("mixtral-8x7b", ALONE), limit_s=400),
    Job(
        name="latency-p99",
        command=_latency(
            "qwen3-30b-a3b",
            "--quantization fp8 --kv-cache-dtype int4 --context-len 1024 --prompt-len 512 "
            "--num-steps 2000",
        ),
        limit_s=100,
    ),
    Job(
        name="adaptive",
        command="benchmarks/adaptive_bench.py --json {results}/{gpu}-adaptive-attend.json",
        limit_s=200,
    ),
    Job(
        name="steps",
        command="benchmarks/step_bench.py --without-ops --json {logs}/steps.json",
        limit_s=150,
    ),
    Job(
        name="differences",
        command="benchmarks/batch_differences.py --device cuda --kv-cache-dtype int4 --repeats 3 "
        "--record {results}/{gpu}-batch-differences.json",
        limit_s=100,
    ),
    Job(
        name="logits",
        command="benchmarks/logit_differences.py --device cuda "
        "--record {results}/{gpu}-logit-differences.json",
        limit_s=200,
    ),
)


def run(job: Job, options: argparse.Namespace, left_s: float) -> str:
    """Run it within its limit and what is left -> how it ended, for a line of the report."""
    filled = job.command.format(
        workers=options.workers, results=options.results, logs=options.logs, gpu=options.gpu
    )
    limit_s = min(job.limit_s, left_s)
    with (options.logs / f"{job.name}.log").open("wb") as log:
        # A session of its own: a limit ends what the job has started as well.
        process = subprocess.Popen(
            [sys.executable, *shlex.split(filled)],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"cut after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "done" if status == 0 else f"failed, exit status {status}"


def main(arguments: list[str] | None = None, jobs: tuple[Job, ...] = JOBS) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="What only a GPU can run.")
    names = [job.name for job in jobs]
    parser.add_argument("--list", action="store_true", help="the jobs, and nothing run")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="JOB")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all jobs")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--gpu", default="h200", help="how the names of result files begin")
    options = parser.parse_args(arguments)
    if options.list:
        for job in jobs:
            sys.stdout.write(f"{job.name:16}{job.limit_s:4} s  {job.command}\n")
        return 0
    options.logs.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    is_clean = True
    for job in jobs:
        if job.name not in options.only:
            continue
        job_s = time.monotonic()
        left_s = options.seconds - (job_s - began_s)
        outcome = run(job, options, left_s) if left_s > 0 else "no time left"
        is_clean &= outcome == "done"
        seconds = time.monotonic() - job_s
        sys.stdout.write(f"{job.name:16}{seconds:6.0f} s  {outcome}\n")
        sys.stdout.flush()
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
