"""Goal R17: no connection outwards, one listener.

    python tools/soak/sockets.py --requests 2000

A server and all its processes run with an audit hook that writes down every connect, bind and name
look-up of Python, while /proc is asked again and again which sockets they hold. Requests are odd
ones, and ones whose texts hold addresses.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from api_fuzz import odd_request
from records import parse, parser, report

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cpu"))

from serving import KEY, MODEL, Server, children, net_sockets

HOOK = """
import os, sys
_log = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(_log, b"process\\n")
def _hook(event, args):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"):
        os.write(_log, f"{{event}} {{args[1:]!r}}\\n".encode())
sys.addaudithook(_hook)
"""
ADDRESSES = ("http://169.254.169.254/latest", "https://example.org/a.png", "file:///etc/passwd")
NUM_PROCESSES = 5
"""The server, its engine, and its three helpers."""


def watch(server: Server, end: threading.Event, found: set[tuple[str, int, bool]]) -> int:
    """Collect protocol, local port and whether it listens, of every socket, until `end`."""
    num_looks = 0
    while not end.wait(0.01):
        pid = server.process.pid
        found |= net_sockets([pid, *children(pid, "-m"), *children(pid, "engine")])
        num_looks += 1
    return num_looks


def main() -> int:
    """Serve, watch, and report."""
    arguments = parser("R17: sockets")
    arguments.add_argument("--requests", type=int, default=2000)
    options = parse(arguments)
    rng = random.Random(options.seed)
    found: set[tuple[str, int, bool]] = set()
    end = threading.Event()
    looks: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        (Path(folder) / "sitecustomize.py").write_text(HOOK.format(path=str(log)))
        sys.path.insert(0, folder)
        server = Server(api_key=[KEY])
        sys.path.remove(folder)
        watcher = threading.Thread(target=lambda: looks.append(watch(server, end, found)))
        watcher.start()
        try:
            for number in range(options.requests):
                path, data = odd_request(rng)
                server.request("POST", path, data, server.auth)
                if number % 20 == 0:
                    text = f"see {rng.choice(ADDRESSES)}"
                    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
                    server.post("/v1/chat/completions", body | {"max_tokens": 2})
                    server.request("GET", "/", headers={"X-Request-Id": "a"})
            time.sleep(0.1)
        finally:
            end.set()
            watcher.join()
            server.close()
        lines = log.read_text().splitlines()
    num_processes = lines.count("process")
    events = [line for line in lines if line != "process"]
    # The one bind is the listener's own.
    outward = [e for e in events if not e.startswith(f"socket.bind (('127.0.0.1', {0})")]
    others = sorted(s for s in found if s[1] != server.port)
    listeners = sorted(s for s in found if s[2])
    seen: dict[str, object] = {
        "requests": options.requests,
        "processes_with_the_hook": num_processes,
        "looks_at_proc": looks[0],
        "connects_and_lookups": outward,
        "listeners": len(listeners),
        "other_sockets": others,
    }
    passed = not outward and not others and len(listeners) == 1 and num_processes >= NUM_PROCESSES
    number = "0 outbound connects, exactly 1 TCP listener"
    return report("R17", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
