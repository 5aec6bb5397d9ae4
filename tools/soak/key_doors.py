"""Goal R16: no door opens without the key, and the time that a wrong key takes tells nothing.

    python tools/soak/key_doors.py --samples 200000

Every route, and odd spellings of routes, meets every way to have no valid key: each answer is 401.
Then wrong keys that begin as the right one does are timed against random ones: Welch's t.
"""

from __future__ import annotations

import contextlib
import math
import random
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from records import parse, parser, report

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cpu"))

from serving import KEY, MODEL, Server, raw

from subten.serve.auth import KeyRing
from subten.serve.errors import ApiError

MAX_T = 4.5
"""Beyond this |t| two distributions are taken to differ; by chance it happens once in 150,000."""
CROPPED = 0.1
"""Share of the slowest samples that is left out: interrupts, not keys."""

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/version"),
    ("GET", "/docs"),
    ("POST", "/"),
    ("GET", "//"),
    ("GET", "/nothing"),
    ("OPTIONS", "/v1/completions"),
    ("HEAD", "/v1/models"),
    ("DELETE", "/v1/models"),
    ("GET", "//v1/models"),
    ("GET", "/v1/../v1/models"),
    ("GET", "/%2fv1/models"),
    ("GET", "/v1%2fmodels"),
    ("GET", "/health/live/../../v1/models"),
    ("GET", "/health/ready/v1/models"),
    ("GET", "http://localhost/v1/models"),
]


def requests_without_key(method: str, path: str, key: str = KEY) -> list[bytes]:
    """Requests for a route that have no valid key, each in its own way."""
    odd = [
        "",
        "Authorization: Bearer wrong-key-000\r\n",
        f"Authorization: Bearer {key.upper()}\r\n",
        f"Authorization: Basic {key}\r\n",
        f"Authorization: {key}\r\n",
        f"Authorization: Bearer {key}x\r\n",
        f"Authorization: Bearer {key}\r\nAuthorization: Bearer wrong\r\n",
        f"X-Api-Key: {key}\r\n",
        "Authorization: Bearer \xff\xfe\r\n",
    ]
    forms = [(header, "localhost", "HTTP/1.1") for header in odd]
    forms += [("", "a/?", "HTTP/1.1"), ("", "evil.example", "HTTP/1.1"), ("", "x", "HTTP/1.0")]
    return [
        f"{method} {path} {version}\r\nHost: {host}\r\n{header}Connection: close\r\n\r\n".encode(
            "latin-1"
        )
        for header, host, version in forms
    ]


def connection(key: str) -> Any:
    """What `KeyRing.check` looks at."""
    header = (b"authorization", f"Bearer {key}".encode())
    return SimpleNamespace(scope={"headers": [header]})


def wrong_keys(rng: random.Random, key: str, num: int, *, num_equal: int) -> list[str]:
    """Keys as long as the right one, whose first `num_equal` characters are its own."""
    letters = string.ascii_letters + string.digits
    rest = len(key) - num_equal
    found = [key[:num_equal] + "".join(rng.choices(letters, k=rest)) for _ in range(num)]
    return [wrong for wrong in found if wrong != key]


def timing_t(check: Callable[[Any], Any], key: str, num_samples: int, rng: random.Random) -> float:
    """Welch's t between the times of near misses and of random keys, about `num_samples` each."""
    drawn = [(0, k) for k in wrong_keys(rng, key, 2048, num_equal=len(key) - 4)]
    drawn += [(1, k) for k in wrong_keys(rng, key, 2048, num_equal=0)]
    # In one random order: the two kinds must not lie in different places of memory.
    rng.shuffle(drawn)
    pool = [(kind, connection(wrong)) for kind, wrong in drawn]
    times: tuple[list[int], list[int]] = ([], [])
    clock = time.perf_counter_ns
    for _ in range(2 * num_samples):
        kind, sent = rng.choice(pool)
        began = clock()
        with contextlib.suppress(ApiError):
            check(sent)
        times[kind].append(clock() - began)
    ordered = sorted(times[0] + times[1])
    limit = ordered[int(len(ordered) * (1 - CROPPED)) - 1]
    return _welch(*([t for t in part if t <= limit] for part in times))


def _welch(a: list[int], b: list[int]) -> float:
    means = [sum(part) / len(part) for part in (a, b)]
    errors = [
        sum((t - mean) ** 2 for t in part) / (len(part) - 1) / len(part)
        for part, mean in zip((a, b), means, strict=True)
    ]
    return (means[0] - means[1]) / math.sqrt(max(sum(errors), 1e-12))


def main() -> int:
    """Try every door, time the lock, and report."""
    arguments = parser("R16: keys")
    arguments.add_argument("--samples", type=int, default=200_000, help="of each class")
    options = parse(arguments)
    rng = random.Random(options.seed)
    answers: dict[str, int] = {}
    server = Server(api_key=[KEY])
    try:
        for method, path in ROUTES:
            for data in requests_without_key(method, path):
                words = raw(server.port, data).split(b" ")
                status = words[1].decode() if len(words) > 1 else "none"
                answers[status] = answers.get(status, 0) + 1
    finally:
        server.close()
    key = "".join(rng.choices(string.ascii_letters, k=32))
    t = timing_t(KeyRing([key]).check, key, options.samples, rng)
    seen: dict[str, object] = {
        "answers": answers,
        "samples_of_each_class": options.samples,
        "t": round(t, 2),
    }
    passed = set(answers) == {"401"} and abs(t) < MAX_T
    number = "0 answers but 401 over all routes and ways to lack a key; timing |t| < 4.5"
    return report("R16", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
