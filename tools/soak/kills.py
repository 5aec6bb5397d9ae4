"""Goals R4, R5, R6 and R15: engines and servers that are killed, frozen or told to stop.

    python tools/soak/kills.py --goal R4 --repeats 1000 --jobs 16

Each repeat has streams under way. A job is a process of its own with its own server, so that many
repeats may run beside each other; times are of this machine, and its load counts.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from records import Progress, add_progress, numbers, parse, parser, report

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cpu"))

from serving import MODEL, Server, children, is_running

NUM_STREAMS = 32
LONG, SHORT = 900, 40
"""Tokens of a stream that is still under way at any kill, and of one that may end in a drain."""

SETTINGS: dict[str, Any] = {"drain_timeout": 1.0}
ENGINE = {"step_s": 0.02, "settings": {"num_pages": 600, "max_num_seqs": NUM_STREAMS}}
REQUEST = {"model": MODEL, "ignore_eos": True, "stream": True}


class Stream(threading.Thread):
    """Reads one stream to its end, whatever that is."""

    def __init__(self, server: Server, number: int, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        fields = {"prompt": f"long{number}", "max_tokens": max_tokens}
        self._body = json.dumps(REQUEST | fields)
        self.ending = ""
        self.num_events = 0
        self.ended_s = 0.0

    def run(self) -> None:
        """Read."""
        try:
            self._connection.request("POST", "/v1/completions", self._body)
            for line in self._connection.getresponse():
                self.num_events += 1
                if b'"error"' in line:
                    self.ending = "error"
                elif line.startswith(b"data: [DONE]"):
                    self.ending = "done"
        except (OSError, http.client.HTTPException):
            self.ending = self.ending or "cut"
        self.ended_s = time.monotonic()


def start_streams(server: Server, max_tokens: tuple[int, ...] = (LONG,)) -> list[Stream]:
    """Streams that have all begun; their lengths take turns."""
    streams = [
        Stream(server, number, max_tokens[number % len(max_tokens)])
        for number in range(NUM_STREAMS)
    ]
    for stream in streams:
        stream.start()
    server.until(lambda: all(stream.num_events for stream in streams), timeout_s=60)
    return streams


def join(streams: list[Stream], endings: tuple[str, ...]) -> float:
    """When the last stream ended, each in one of these ways."""
    for stream in streams:
        stream.join(60)
    found = [stream.ending for stream in streams]
    assert set(found) <= set(endings), found
    return max(stream.ended_s for stream in streams)


def is_ready(server: Server) -> bool:
    """What the probe says; a port that nobody listens on is not ready."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.request("GET", "/health/ready")[0] == 200
    return False


def processes(server: Server) -> list[int]:
    """The engine and the helpers."""
    return [pid for word in ("engine", "-m") for pid in children(server.process.pid, word)]


def kill_engine(server: Server, rng: random.Random) -> dict[str, float]:
    """R4: kill -9 of the engine under load."""
    streams = start_streams(server)
    time.sleep(rng.random() * 0.2)
    pid = server.engine_pid()
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: not is_ready(server), timeout_s=10)
    unready_s = time.monotonic() - began_s
    status, _ = server.post("/v1/completions", {"model": MODEL, "prompt": "fox", "max_tokens": 1})
    assert status == 503, status
    ends_s = join(streams, ("error",)) - began_s
    server.until(lambda: children(server.process.pid, "engine"), timeout_s=60, every_s=0.1)
    load_began_s = time.monotonic()
    server.until(lambda: is_ready(server), timeout_s=120, every_s=0.1)
    load_s = time.monotonic() - load_began_s
    server.complete("fox", max_tokens=5)
    again_s = time.monotonic() - began_s - load_s
    assert not is_running(pid)
    engines = children(server.process.pid, "engine")
    assert len(engines) == 1, engines
    return {"error_s": ends_s, "unready_s": unready_s, "again_s": again_s, "load_s": load_s}


def freeze_engine(server: Server, rng: random.Random) -> dict[str, float]:
    """R6: an engine that stands still, and goes on."""
    time.sleep(rng.random() * 0.2)
    pid = server.engine_pid()
    began_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        server.until(lambda: not is_ready(server), timeout_s=20)
        unready_s = time.monotonic() - began_s
        assert server.request("GET", "/health/live")[0] == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    server.until(lambda: is_ready(server), timeout_s=20)
    assert server.engine_pid() == pid
    return {"unready_s": unready_s}


def kill_server(server: Server, rng: random.Random) -> dict[str, float]:
    """R5: kill -9 of the server, a quarter of the times under load."""
    if rng.random() < 0.25:
        start_streams(server)
    pids = processes(server)
    assert len(pids) == 4, pids
    began_s = time.monotonic()
    server.process.kill()
    server.process.wait(10)
    server.until(lambda: not any(is_running(pid) for pid in pids), timeout_s=30)
    return {"gone_s": time.monotonic() - began_s}


def stop_server(server: Server, rng: random.Random) -> dict[str, float]:
    """R15: SIGTERM under load, of which some may end in time."""
    streams = start_streams(server, (LONG, SHORT))
    pids = processes(server)
    time.sleep(rng.random() * 0.2)
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: not is_ready(server), timeout_s=10)
    unready_s = time.monotonic() - began_s
    code = server.process.wait(60)
    exit_s = time.monotonic() - began_s
    assert code == 0, code
    join(streams, ("done", "error"))
    running = [pid for pid in pids if is_running(pid)]
    assert not running, running
    return {"exit_s": exit_s, "unready_s": unready_s}


GOALS: dict[str, tuple[Any, bool, dict[str, float]]] = {
    "R4": (kill_engine, False, {"error_s": 2.0, "unready_s": 2.0, "again_s": 10.0}),
    "R5": (kill_server, True, {"gone_s": 5.0}),
    "R6": (freeze_engine, False, {"unready_s": 10.0}),
    "R15": (stop_server, True, {"exit_s": 30.0, "unready_s": 1.0}),
}
"""What is done, whether it ends the server, and the bounds; again_s is without load_s."""


def work(options: argparse.Namespace) -> int:
    """A job: for each repeat's number that comes in, a line of what was found goes out."""
    act, is_end, _ = GOALS[options.goal]
    server = None
    for line in sys.stdin:
        found: dict[str, Any]
        try:
            server = server or Server(engine=ENGINE, **SETTINGS)
            found, is_over = act(server, numbers(options.seed, int(line))), is_end
        except Exception as error:  # noqa: BLE001 - whatever it is, this repeat failed
            found, is_over = {"fault": f"repeat {line.strip()}: {error!r}"}, True
        if is_over and server is not None:
            server.close()
            server = None
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    if server is not None:
        server.close()
    return 0


class Job(threading.Thread):
    """One of the processes that do repeats, and what it is asked and answers."""

    def __init__(self, command: list[str], answers: queue.Queue[Any]) -> None:
        super().__init__(daemon=True)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers = answers
        self.start()

    def run(self) -> None:
        """Pass on what the process says, and that it ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put((self, json.loads(line)))
        self._answers.put((self, None))

    def ask(self, repeat: int) -> None:
        """Have this repeat done."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{repeat}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def run_repeats(progress: Progress, *, num_jobs: int, command: list[str]) -> None:
    """Hand out repeats to jobs until there are enough, or no time is left."""
    worst, faults = progress.values["worst"], progress.values["faults"]
    answers: queue.Queue[Any] = queue.Queue()
    idle = [Job(command, answers) for _ in range(num_jobs)]
    jobs, num_asked = list(idle), 0
    while True:
        while idle and progress.has_more_after(num_asked):
            idle.pop().ask(progress.done + num_asked)
            num_asked += 1
        if num_asked == 0:
            break
        job, found = answers.get()
        num_asked -= 1
        if found is None:
            found = {"fault": "a job ended"}
        else:
            idle.append(job)
        if "fault" in found:
            faults.append(found.pop("fault"))
        worst |= {name: max(worst.get(name, 0.0), value) for name, value in found.items()}
        progress.keep(1)
    for job in jobs:
        job.close()


def main() -> int:
    """Run, and report."""
    arguments = parser("Processes that die, freeze or stop under load.")
    arguments.add_argument("--goal", choices=sorted(GOALS), default="R4")
    arguments.add_argument("--repeats", type=int, default=20)
    arguments.add_argument("--jobs", type=int, default=1, help="repeats beside each other")
    arguments.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    add_progress(arguments)
    options = parse(arguments)
    if options.job:
        return work(options)
    progress = Progress(options, options.repeats, {"worst": {}, "faults": []})
    command = [sys.executable, __file__, "--job", "--goal", options.goal, "--seed"]
    run_repeats(progress, num_jobs=options.jobs, command=[*command, str(options.seed)])
    worst, faults = progress.values["worst"], progress.values["faults"]
    for fault in faults[:20]:
        sys.stderr.write(f"{fault}\n")
    seen = {"repeats": progress.done, "faults": len(faults), **progress.seen}
    seen |= {"jobs": options.jobs, "cores": len(os.sched_getaffinity(0))}
    seen |= {f"worst_{name}": round(value, 3) for name, value in worst.items()}
    bounds = GOALS[options.goal][2]
    passed = not faults and all(worst[name] <= bound for name, bound in bounds.items())
    limits = ", ".join(f"{name} <= {bound:.0f}" for name, bound in bounds.items())
    number = f"{progress.done} repeats: {limits}"
    return report(options.goal, number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
