"""Goal R3: odd requests by the thousand; nobody dies, and every error has its shape.

    python tools/soak/api_fuzz.py --requests 100000

A valid body gets one to five edits: fields deleted, repeated, of another type, extreme, deeply
nested, of broken text. After each hundred requests a canary must answer as before.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from records import Progress, add_progress, parse, parser, report

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cpu"))

from serving import KEY, MODEL, TEXTS, Server

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 0.5, 1e308, -1e308, 2**31, 2**63, 10**30, "", "\0", "\u2028"),
    *([], {}, [[]], [None], "a" * 1000, "fox", [102, 111, 120], [-1], [320], {"a": {"a": {}}}),
]
RAW = [
    *(b"NaN", b"Infinity", b"1e999", b'"\\ud800"'),
    *(b"[" * 70 + b"]" * 70, b'"' + b"x" * 10**5 + b'"'),
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": MODEL,
        "prompt": "fox",
        "max_tokens": 2,
        "n": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 1,
        "logprobs": 1,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "stream": False,
        "echo": False,
        "structured_outputs": {"regex": "[a-z]+"},
    },
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "fox"}],
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {"model": MODEL, "input": "fox", "max_output_tokens": 2, "stream": False},
    "/tokenize": {"model": MODEL, "prompt": "fox"},
    "/detokenize": {"model": MODEL, "tokens": [102, 111, 120]},
}
BATCH = 100
ALLOWED = {200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 503}


def odd_request(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body with one to five edits."""
    path = rng.choice(list(BODIES))
    body = json.loads(json.dumps(BODIES[path]))
    marks: list[bytes] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        place: Any = body
        key: Any = rng.choice([*body, "unknown"])
        while isinstance(place.get(key), dict) and place[key] and rng.random() < 0.5:
            place = place[key]
            key = rng.choice(list(place))
        edit = rng.randrange(5)
        if edit == 0:
            place.pop(key, None)
        elif edit == 1:
            place[key] = f"@{len(marks)}@"
            marks.append(rng.choice(RAW))
        elif edit == 2:
            value = place.get(key)
            place[key] = [value] * rng.choice([1, 2] if isinstance(value, list) else [1, 20, 3000])
        else:
            place[key] = copy.deepcopy(rng.choice(ODD))
    data = json.dumps(body).encode()
    for number, mark in enumerate(marks):
        data = data.replace(b'"@%d@"' % number, mark, 20)
    if rng.random() < 0.1:
        data = data.replace(b'{"', b'{"model": "scripted", "', 1)
    if rng.random() < 0.1 and data:
        spoiled = bytearray(data)
        spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        data = bytes(spoiled)
    return path, data


def fault_of(status: int, text: bytes) -> str | None:
    """What is wrong with an answer, or None."""
    if status not in ALLOWED:
        return f"status {status}"
    if status == 200:
        return None
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return f"an error of another shape: {text[:200]!r}"
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"an error of another shape: {text[:200]!r}"
    if any(word in text for word in (b"Traceback", b".py", KEY.encode())):
        return f"an error that tells too much: {text[:200]!r}"
    return None


def ask(server: Server, rng: random.Random, values: dict[str, Any]) -> None:
    """A hundred odd requests and a canary; what they came to goes to `values`."""
    for _ in range(BATCH):
        path, data = odd_request(rng)
        began_s = time.monotonic()
        status, _, text = server.request("POST", path, data, server.auth)
        took_s = time.monotonic() - began_s
        values["slowest_s"] = max(values["slowest_s"], round(took_s, 3))
        statuses = values["statuses"]
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        fault = fault_of(status, text)
        if fault is not None:
            values["faults"].append(f"to {path}: {fault}: {data[:500]!r}")
    shown = server.complete("fox", max_tokens=99)["choices"][0]["text"]
    if shown != TEXTS["fox"]:
        values["faults"].append(f"the canary says {shown!r}")


def main() -> int:
    """Run, and report."""
    arguments = parser("Odd requests to a real server with the scripted model.")
    arguments.add_argument("--requests", type=int, default=2000)
    add_progress(arguments)
    options = parse(arguments)
    empty = {"statuses": {}, "faults": [], "slowest_s": 0.0}
    progress = Progress(options, options.requests, empty)
    values = progress.values
    server = Server(api_key=[KEY])
    try:
        engine = server.engine_pid()
        while progress.has_more:
            ask(server, progress.random(), values)
            if server.process.poll() is not None or server.engine_pid() != engine:
                values["faults"].append("a process died")
                break
            progress.keep(BATCH)
    finally:
        server.close()
    for fault in values["faults"][:20]:
        sys.stderr.write(f"{fault}\n")
    seen = {
        "requests": progress.done,
        "statuses": dict(sorted(values["statuses"].items())),
        "faults": len(values["faults"]),
        "slowest_s": values["slowest_s"],
        **progress.seen,
    }
    passed = not values["faults"] and values["slowest_s"] < 30
    number = f"{progress.done} odd requests: 0 deaths, 0 other 5xx, 0 hangs, 0 bad shapes"
    return report("R3", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
