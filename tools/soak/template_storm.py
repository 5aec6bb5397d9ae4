"""Threat T5: templates that take all the time they may leave the gaps of others' tokens alone.

    python tools/soak/template_storm.py --rounds 10

A stream is read while nobody else asks, and while clients send conversations over which the chat
template does not end, or writes too much, and settings of the server that are not theirs, in turns.
Each of those gets its 400; the p99 of the stream's gaps moves less than a fifth.
"""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from records import parse, parser, report

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cpu"))


from serving import MODEL, Server

from subten.bench.serving import percentile

MAX_RATIO = 1.2
STEP_S = 0.02
TEMPLATE = (
    "{% set said = messages[0].content %}"
    "{% if said == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if said == 'long' %}{% for i in range(99999) %}aaaaaaaaaa{% endfor %}{% endif %}"
)
ATTACKS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "slow"}]},
    {"messages": [{"role": "user", "content": "long"}]},
    {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"tokenize": True, "chat_template": "x"},
    },
)


def make_server() -> Server:
    """A server whose template does what a conversation says."""
    return Server(engine={"step_s": STEP_S, "more_template": TEMPLATE})


def gaps_ms(server: Server, num_tokens: int) -> list[float]:
    """Times between the tokens of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"model": MODEL, "prompt": "long", "max_tokens": num_tokens, "ignore_eos": True}
    body |= {"stream": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body))
    times_s = []
    for line in connection.getresponse():
        if line.startswith(b'data: {"id"'):
            times_s.append(time.perf_counter())
    connection.close()
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times_s)]


class Storm:
    """Another process that sends what takes long, again and again, until the end of a `with`."""

    def __init__(self, server: Server) -> None:
        self._port = server.port
        self.statuses: Counter[int] = Counter()

    def __enter__(self) -> Storm:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--attack", str(self._port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        said, _none = self._process.communicate(timeout=60)
        self.statuses.update({int(status): n for status, n in json.loads(said).items()})


def attack(port: int) -> None:
    """Send attacks beside each other until stdin closes, then say what was answered."""
    end = threading.Event()
    statuses: Counter[int] = Counter()

    def send(body: bytes) -> None:
        while not end.wait(0.05):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/chat/completions", body)
            statuses[connection.getresponse().status] += 1
            connection.close()

    threads = [
        threading.Thread(target=send, args=(json.dumps({"model": MODEL} | body).encode(),))
        for body in ATTACKS
    ]
    for thread in threads:
        thread.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    end.set()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(statuses))


def main() -> int:
    """Take turns, compare, and report."""
    arguments = parser("T5: templates that take long")
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--tokens", type=int, default=150)
    arguments.add_argument("--attack", type=int, default=None, help="a port: be the attackers")
    options = parse(arguments)
    if options.attack is not None:
        attack(options.attack)
        return 0
    server = make_server()
    calm: list[float] = []
    stormy: list[float] = []
    statuses: Counter[int] = Counter()
    try:
        gaps_ms(server, 20)
        for _ in range(options.rounds):
            calm += gaps_ms(server, options.tokens)
            with Storm(server) as storm:
                stormy += gaps_ms(server, options.tokens)
            statuses += storm.statuses
    finally:
        server.close()
    calm.sort()
    stormy.sort()
    ratio = percentile(stormy, 99) / percentile(calm, 99)
    seen: dict[str, object] = {
        "gaps_of_each": len(calm),
        "attacks": {str(status): count for status, count in sorted(statuses.items())},
        "calm_ms_p50": round(percentile(calm, 50), 3),
        "stormy_ms_p50": round(percentile(stormy, 50), 3),
        "calm_ms_p99": round(percentile(calm, 99), 3),
        "stormy_ms_p99": round(percentile(stormy, 99), 3),
        "ratio_p99": round(ratio, 4),
    }
    number = f"every attack gets a 400; p99 of the gaps of others < {MAX_RATIO} of a calm server's"
    passed = ratio < MAX_RATIO and set(statuses) == {400} and statuses[400] >= 3 * options.rounds
    return report("T5", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
