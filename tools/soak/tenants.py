"""Threat T14: the time to a first token does not tell what another key has sent.

    python tools/soak/tenants.py --samples 2000

The engine takes its time by the tokens that it computes. In random order a key asks for a prompt
that another key has just sent, and for one that nobody has: Kolmogorov-Smirnov's test of the two
sets of times finds no difference. A prompt that the key itself has sent is much faster: the same
test finds that.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from records import parse, parser, report

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cpu"))

from serving import KEY, MODEL, OTHER_KEY, Server

MIN_P = 0.01
TOKEN_S = 2e-5
"""A step's time for each of its tokens: 300 of them are well above a machine's noise."""
PROMPT_LEN = 300


def ks_p(a: Sequence[float], b: Sequence[float]) -> float:
    """How likely two sets from one distribution differ so much (Kolmogorov, Smirnov; asymptotic).

    Formula: Numerical Recipes, 3rd edition, section 14.3.3.
    """
    ordered = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    counts, most = [0, 0], 0.0
    for index, (value, which) in enumerate(ordered):
        counts[which] += 1
        # Equal values count together.
        if index + 1 == len(ordered) or ordered[index + 1][0] != value:
            most = max(most, abs(counts[0] / len(a) - counts[1] / len(b)))
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (root + 0.12 + 0.11 / root) * most
    if x < 0.2:
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * sum(terms)))


def first_token_s(server: Server, key: str, prompt: str) -> float:
    """From asking to the answer of one token."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began_s = time.perf_counter()
    status, _, text = server.request(
        "POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"}
    )
    assert status == 200, text
    return time.perf_counter() - began_s


def sample(server: Server, num: int, rng: random.Random) -> dict[str, list[float]]:
    """Times of prompts that are new, that another key has sent, and that the key itself has."""
    found: dict[str, list[float]] = {"new": [], "others": [], "own": []}
    while any(len(times) < num for times in found.values()):
        for kind in rng.sample(sorted(found), 3):
            prompt, other = ("".join(rng.choices("stuvwxyz", k=PROMPT_LEN)) for _ in range(2))
            # Someone asks for something before each of them: the machine is as warm for all.
            first_token_s(
                server, OTHER_KEY if kind != "own" else KEY, other if kind == "new" else prompt
            )
            found[kind].append(first_token_s(server, KEY, prompt))
    return found


def main() -> int:
    """Ask, compare, and report."""
    arguments = parser("T14: times of prompts that others have sent")
    arguments.add_argument("--samples", type=int, default=2000)
    options = parse(arguments)
    server = Server(engine={"token_s": TOKEN_S}, api_key=[KEY, OTHER_KEY])
    try:
        found = sample(server, options.samples, random.Random(options.seed))
    finally:
        server.close()
    p_others, p_own = ks_p(found["new"], found["others"]), ks_p(found["new"], found["own"])
    seen: dict[str, object] = {
        "samples_of_each": options.samples,
        **{
            f"{kind}_ms_p50": round(sorted(times)[len(times) // 2] * 1e3, 3)
            for kind, times in found.items()
        },
        "p_of_others": p_others,
        "p_of_own": p_own,
    }
    number = f"new prompts and those of another key: Kolmogorov-Smirnov p > {MIN_P}; own ones: not"
    passed = p_others > MIN_P and p_own < 1e-6
    return report("T14", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
