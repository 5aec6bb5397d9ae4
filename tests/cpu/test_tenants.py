"""What one client has sent cannot be timed by another (threat T14)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "soak"))

from serving import KEY, OTHER_KEY, Server
from tenants import TOKEN_S, ks_p, sample
from test_scheduler import make_scheduler, run_step

from subten.core import Request, SamplingParams
from subten.engine.scheduler import Scheduler


def steps_to_first_token(
    scheduler: Scheduler, tenant: str, token_ids: tuple[int, ...]
) -> list[int]:
    """Tokens that each step until the request's end computes: its time, on a clock of tokens."""
    sampling = SamplingParams(max_tokens=1)
    scheduler.add(
        Request(
            request_id="one", prompt_token_ids=token_ids, sampling=sampling, seed=0, tenant=tenant
        )
    )
    found = []
    while scheduler.has_work:
        found.append(sum(item.num_tokens for item in run_step(scheduler).items))
    return found


@pytest.mark.parametrize("num_pages", [8, 64])
def test_another_tenants_prompts_take_each_step_that_new_ones_take(num_pages):
    # No distribution is needed here: 2,000 times the same steps compute the same numbers of tokens.
    rng = random.Random()
    scheduler, own_are_shorter = make_scheduler(num_pages, max_num_batched_tokens=100), 0
    for _ in range(2000):
        length = rng.randrange(1, 400)
        shared = rng.randrange(length + 1)
        sent = tuple(rng.choices(range(1000), k=length))
        # Another's prompt, or one that begins as it does.
        asked = sent[:shared] + tuple(rng.choices(range(1000), k=length - shared))
        new = tuple(rng.choices(range(1000), k=length))
        steps_to_first_token(scheduler, "a", sent)
        expected = [100] * (length // 100) + [length % 100] * (length % 100 > 0)
        assert steps_to_first_token(scheduler, "b", asked) == expected
        assert steps_to_first_token(scheduler, "b", new) == expected
        own_are_shorter += sum(steps_to_first_token(scheduler, "b", asked)) < length
    # The clock does see pages that are shared.
    assert own_are_shorter > 1000


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    # With few samples the difference that has to be seen is made larger.
    server = Server(engine={"token_s": 3 * TOKEN_S}, api_key=[KEY, OTHER_KEY])
    yield server
    assert server.close() == 0


def test_the_time_to_a_first_token_tells_nothing_of_other_keys(served):
    # By chance p is below 1e-6 once in a million runs; tools/soak/tenants.py has more samples.
    found = sample(served, 60, random.Random())
    assert ks_p(found["new"], found["others"]) > 1e-6
    # The same number of samples does show the prompts that the key has sent itself.
    assert ks_p(found["new"], found["own"]) < 1e-6


def test_kolmogorov_smirnov():
    rng = random.Random()
    same = [
        ks_p([rng.random() for _ in range(80)], [rng.random() for _ in range(90)])
        for _ in range(300)
    ]
    # Uniform where nothing differs: 300 values, 5 standard deviations around each share.
    for share in (0.1, 0.5):
        count = sum(p < share for p in same)
        assert abs(count - 300 * share) < 5 * (300 * share * (1 - share)) ** 0.5 + 0.02 * 300
    assert ks_p([rng.random() for _ in range(200)], [0.3 + rng.random() for _ in range(200)]) < 1e-3
    assert ks_p([1.0, 1.0], [1.0, 1.0]) == 1.0
