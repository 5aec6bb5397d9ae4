"""Goal R21: every answer asked for is counted under exactly one end, and a scrape is quick.

    python tools/soak/counts.py --requests 2000    # chrt -f 10 python ...: on a busy machine

Clients ask for answers that stop, that run out of tokens, that fail, that nobody waits for and that
are one too many. What the clients saw is compared with what the server counted.
"""

from __future__ import annotations

import http.client
import json
import os
import random
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

NUM_CLIENTS = 8
MAX_SCRAPE_MS = 50
ENDS = ("stop", "length", "cancelled", "error", "rejected")
LONG = {"prompt": "long", "max_tokens": 500, "ignore_eos": True, "stream": True}
KINDS: dict[str, dict[str, Any]] = {
    "stop": {"prompt": "fox", "max_tokens": 99},
    "stop string": {"prompt": "fox", "max_tokens": 99, "stop": ["brown"], "stream": True},
    "length": {"prompt": "fox", "max_tokens": 3, "n": 2},
    "error": {"prompt": "bad"},
    "cancelled": LONG,
    "refused": {"prompt": "fox", "max_tokens": -1},
}


class Clients:
    """Threads that ask in turn; what each answer came to, as its client sees it."""

    def __init__(self, server: Server, seed: int, num_requests: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._left = num_requests
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self) -> None:
        """All of them to their ends."""
        threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask(self) -> None:
        while True:
            with self._lock:
                if self._left <= 0:
                    return
                self._left -= 1
                kind = self._rng.choice(list(KINDS))
            try:
                ends = self._one(kind)
            except (OSError, ValueError, http.client.HTTPException) as error:
                with self._lock:
                    self.faults.append(f"{kind}: {error!r}")
                continue
            with self._lock:
                self.seen.update(ends)

    def _one(self, kind: str) -> list[str]:
        """One request; how each of its answers ended. One that nobody accepted has none."""
        body = {"model": MODEL, "temperature": 0} | KINDS[kind]
        num = int(body.get("n", 1))
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            if answer.status == 429:
                time.sleep(0.05)
                return ["rejected"] * num
            if answer.status == 400 and kind == "refused":
                return []
            if answer.status == 500 and kind == "error":
                return ["error"]
            assert answer.status == 200, answer.status
            if kind == "cancelled":
                answer.readline()
                return ["cancelled"]
            text = answer.read()
        finally:
            connection.close()
        return ["length" if kind == "length" else "stop"] * num if text else []


def scrape(server: Server, end: threading.Event) -> None:
    """Ask for the metrics until `end`, ten times a second."""
    while not end.wait(0.1):
        status = server.request("GET", "/metrics")[0]
        assert status == 200, status


def scrape_times_ms(server: Server) -> list[float]:
    """How long scrapes took by the server's log: its clients, in one Python, are slower than it."""
    lines = server.logged("request")
    return sorted(line["duration_ms"] for line in lines if line["path"] == "/metrics")


def main() -> int:
    """Ask, scrape, compare, and report."""
    arguments = parser("R21: counts")
    arguments.add_argument("--requests", type=int, default=2000)
    options = parse(arguments)
    # Fewer places than clients, so that some are one too many.
    server = Server(engine={"step_s": 0.001}, max_queued_requests=5)
    end = threading.Event()
    scraper = threading.Thread(target=scrape, args=(server, end))
    try:
        clients = Clients(server, options.seed, options.requests)
        scraper.start()
        clients.run()

        def counts() -> dict[str, float]:
            found = server.metrics()
            name = "subten:request_success_total"
            return {e: found[f'{name}{{finished_reason="{e}"}}'] for e in ENDS} | {
                "accepted": found["subten:request_accepted_total"]
            }

        def are_settled() -> bool:
            found = counts()
            return sum(found[e] for e in ENDS) == found["accepted"]

        try:
            server.until(are_settled, timeout_s=20)
        except AssertionError:
            clients.faults.append("the ends do not add up to what was accepted")
        counted = counts()
    finally:
        end.set()
        scraper.join()
        server.close()
    times_ms = scrape_times_ms(server)
    seen: dict[str, object] = {
        "requests": options.requests,
        "counted": counted,
        "seen_by_clients": dict(clients.seen),
        "faults": clients.faults[:20],
        "scrapes": len(times_ms),
        "scrape_ms_p50": round(percentile(times_ms, 50), 2),
        "scrape_ms_p99": round(percentile(times_ms, 99), 2),
    }
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        seen["priority"] = "real-time, above whatever else the machine did"
    is_equal = all(clients.seen[e] == counted[e] for e in ENDS)
    passed = is_equal and not clients.faults and percentile(times_ms, 99) < MAX_SCRAPE_MS
    number = "each end counted once, sums equal accepted; a scrape under load < 50 ms (p99)"
    return report("R21", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
