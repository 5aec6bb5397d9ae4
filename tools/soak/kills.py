"""Goals R4, R5, R6 and R15: engines and servers that are killed, frozen or told to stop.

    python tools/soak/kills.py --goal R4 --repeats 1000

Each repeat has streams under way. Times are of this machine, and its load counts.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from records import Progress, add_progress, parse, parser, report

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cpu"))

from serving import MODEL, Server, children, is_running

NUM_STREAMS = 32
LONG = {"model": MODEL, "max_tokens": 900, "ignore_eos": True, "stream": True}
SETTINGS: dict[str, Any] = {"drain_timeout": 1.0}
ENGINE = {"step_s": 0.005, "settings": {"num_pages": 600, "max_num_seqs": NUM_STREAMS}}


class Stream(threading.Thread):
    """Reads one stream to its end, whatever that is."""

    def __init__(self, server: Server, number: int) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._body = json.dumps(LONG | {"prompt": f"long{number}"})
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


def start_streams(server: Server) -> list[Stream]:
    """Streams that have all begun."""
    streams = [Stream(server, number) for number in range(NUM_STREAMS)]
    for stream in streams:
        stream.start()
    server.until(lambda: all(stream.num_events for stream in streams), timeout_s=60)
    return streams


def is_ready(server: Server) -> bool:
    """What the probe says."""
    return server.request("GET", "/health/ready")[0] == 200


def kill_engine(server: Server, rng: random.Random) -> dict[str, float]:
    """R4: kill -9 of the engine under load."""
    streams = start_streams(server)
    time.sleep(rng.random() * 0.2)
    began_s = time.monotonic()
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: not is_ready(server), timeout_s=10)
    unready_s = time.monotonic() - began_s
    for stream in streams:
        stream.join(30)
    ends_s = max(stream.ended_s for stream in streams) - began_s
    assert all(stream.ending == "error" for stream in streams), [s.ending for s in streams]
    server.until(lambda: is_ready(server), timeout_s=120)
    server.complete("fox", max_tokens=5)
    assert len(children(server.process.pid, "engine")) == 1
    return {"error_s": ends_s, "unready_s": unready_s, "again_s": time.monotonic() - began_s}


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
    pids = [pid for word in ("engine", "-m") for pid in children(server.process.pid, word)]
    assert len(pids) == 4, pids
    began_s = time.monotonic()
    server.process.kill()
    server.process.wait(10)
    server.until(lambda: not any(is_running(pid) for pid in pids), timeout_s=30)
    return {"gone_s": time.monotonic() - began_s}


def stop_server(server: Server, rng: random.Random) -> dict[str, float]:
    """R15: SIGTERM under load."""
    streams = start_streams(server)
    time.sleep(rng.random() * 0.2)
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(60)
    assert code == 0, code
    for stream in streams:
        stream.join(30)
    assert all(stream.ending in ("done", "error") for stream in streams)
    return {"exit_s": time.monotonic() - began_s}


GOALS: dict[str, tuple[Any, bool, dict[str, float]]] = {
    "R4": (kill_engine, False, {"error_s": 2.0, "unready_s": 2.0}),
    "R5": (kill_server, True, {"gone_s": 5.0}),
    "R6": (freeze_engine, False, {"unready_s": 10.0}),
    "R15": (stop_server, True, {"exit_s": 30.0}),
}
"""What is done, whether it ends the server, and the bounds."""


def main() -> int:
    """Run, and report."""
    arguments = parser("Processes that die, freeze or stop under load.")
    arguments.add_argument("--goal", choices=sorted(GOALS), default="R4")
    arguments.add_argument("--repeats", type=int, default=20)
    add_progress(arguments)
    options = parse(arguments)
    act, is_end, bounds = GOALS[options.goal]
    progress = Progress(options, options.repeats, {"worst": {}, "faults": []})
    worst, faults = progress.values["worst"], progress.values["faults"]
    server = Server(engine=ENGINE, **SETTINGS)
    try:
        while progress.has_more:
            is_over = is_end
            try:
                found = act(server, progress.random())
            except AssertionError as error:
                faults.append(f"repeat {progress.done}: {error}")
                found, is_over = {}, True
            worst |= {name: max(worst.get(name, 0.0), value) for name, value in found.items()}
            progress.keep(1)
            if is_over:
                server.close()
                server = Server(engine=ENGINE, **SETTINGS)
    finally:
        server.close()
    for fault in faults[:20]:
        sys.stderr.write(f"{fault}\n")
    seen = {"repeats": progress.done, "faults": len(faults), **progress.seen}
    seen |= {f"worst_{name}": round(value, 3) for name, value in worst.items()}
    passed = not faults and all(worst[name] <= bound for name, bound in bounds.items())
    limits = ", ".join(f"{name} <= {bound:.0f}" for name, bound in bounds.items())
    number = f"{progress.done} repeats: {limits}"
    return report(options.goal, number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
