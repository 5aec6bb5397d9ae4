"""Sizes of an adaptive cache: what a budget of bits and a memory give, and what they cannot."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from subten.cache.fidelity import Fidelity, FidelityPolicy, Span
from subten.cache.plane_plan import PlaneAsk, PlanePlan, plan_planes
from subten.cache.planes import PlaneNumbers, Rung
from subten.core import PAGE_SIZE, ConfigError

# head_dim 128, one layer and KV head: 16, 2.125 + 1 + 1 and 1.625 bits; four sink rows.
BYTES = PlaneNumbers(hot=32768, base=4352, fine=2048, cold=3328, sink=2048)
ELEMENTS = 64 * 2 * 128
ASK = PlaneAsk(
    plane_bytes=BYTES,
    page_elements=ELEMENTS,
    memory_bytes=64 * 2**20,
    memory_name="kv_memory_bytes",
    num_pages=None,
    bits_budget=None,
    has_cold=False,
    sink_pages=0,
    window_tokens=0,
    max_num_seqs=4,
    max_num_batched_tokens=256,
    max_model_len=8192,
)


def refusal(ask: PlaneAsk) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_planes(ask)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def decode(ask: PlaneAsk, plan: PlanePlan, rng: random.Random) -> tuple[Fidelity, list[int]]:
    """One sequence that grows token by token to `max_model_len`; masses come at random."""
    policy = FidelityPolicy(
        sink_pages=ask.sink_pages,
        window_tokens=ask.window_tokens,
        routine_bytes=plan.routine_bytes,
    )
    fidelity = Fidelity(
        policy, counts=plan.counts, plane_bytes=ask.plane_bytes, num_pages=plan.num_pages
    )
    pages: list[int] = []
    total_P = np.zeros(plan.num_pages, dtype=np.int64)
    for start in range(ask.max_model_len):
        if start % PAGE_SIZE == 0:
            pages.append(len(pages))
            fidelity.page_held(pages[-1])
        span = Span("a", pages, start, start + 1)
        fidelity.prepare([span])
        if start % 16 == 0:
            for page in pages:
                total_P[page] += rng.randrange(1000)
            fidelity.count_mass(total_P)
        fidelity.settle([span])
        num_hot = sum(fidelity.rung(page) is Rung.HOT for page in pages[-40:])
        # Case K16: what is in BF16 does not grow: the window's pages and the one being written.
        assert num_hot <= ask.sink_pages + -(-ask.window_tokens // PAGE_SIZE) + 1
    fidelity.check_integrity()
    return fidelity, pages


# Case K16: bits tend to what was asked, windows and sinks included, and do not pass it.
@pytest.mark.parametrize(
    ("bits", "changes"),
    [
        (2.7, {}),
        (3.3, {"window_tokens": 64}),
        (4.1, {"sink_pages": 1, "window_tokens": 128}),
        (2.3, {"has_cold": True, "window_tokens": 65}),
    ],
)
def test_a_full_sequence_has_the_bits_that_were_asked_for(bits: float, changes: dict) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    ask = replace(ASK, bits_budget=bits, max_model_len=6400, **changes)
    fidelity, pages = decode(ask, plan_planes(ask), random.Random(seed))
    got = fidelity.bytes_of(pages) * 8 / (len(pages) * ELEMENTS)
    assert fidelity.held_tokens == ask.max_model_len
    assert 0.98 * bits <= got <= bits, got


def test_pools_fit_the_memory_whatever_is_asked() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_plans = 0
    for _ in range(2000):
        ask = replace(
            ASK,
            plane_bytes=replace(BYTES, sink=rng.choice([0, 2048])),
            memory_bytes=rng.choice([10**5, 10**6, 10**7, 10**9]) * rng.randint(1, 9),
            num_pages=rng.choice([None, None, 1, 37, 300]),
            bits_budget=rng.choice([None, rng.uniform(1.5, 17)]),
            has_cold=rng.random() < 0.5,
            sink_pages=rng.randint(0, 2),
            window_tokens=rng.choice([0, 1, 64, 300]),
            max_num_seqs=rng.choice([1, 2, 64]),
            max_num_batched_tokens=rng.choice([64, 2048]),
            max_model_len=rng.choice([1, 64, 65, 5000, 131072]),
        )
        try:
            plan = plan_planes(ask)
        except ConfigError:
            continue
        num_plans += 1
        counts = plan.counts
        assert counts.dot(ask.plane_bytes) <= ask.memory_bytes, (ask, plan)
        assert counts.base + counts.cold >= plan.num_pages, (ask, plan)
        assert counts.fine <= 2 * plan.num_pages + 1, (ask, plan)
        assert 1 <= plan.max_num_seqs <= ask.max_num_seqs
        assert ask.has_cold or counts.cold == 0
    assert num_plans > 500


def test_memory_alone_is_spent_on_bits_once_a_sequence_fits() -> None:
    rich = plan_planes(ASK)
    assert rich.counts.fine == 2 * rich.num_pages
    assert rich.num_pages >= ASK.pages_of_one
    one = replace(ASK, max_num_seqs=1)
    counts = plan_planes(one).counts
    hot_bytes = counts.hot * BYTES.hot + counts.sink * BYTES.sink
    for bits in (4.0, 2.2):
        room = int(ASK.pages_of_one * ELEMENTS * bits / 8)
        scarce = plan_planes(replace(one, memory_bytes=hot_bytes + room))
        assert scarce.num_pages == ASK.pages_of_one
        assert scarce.counts.fine == (room - ASK.pages_of_one * BYTES.base) // BYTES.fine
    poor = plan_planes(replace(one, memory_bytes=hot_bytes + 17 * BYTES.base))
    assert (poor.num_pages, poor.counts.fine) == (17, 0)
    cold = plan_planes(replace(one, memory_bytes=hot_bytes + 100 * BYTES.base, has_cold=True))
    assert cold.num_pages == ASK.pages_of_one
    assert cold.counts.base * BYTES.base + cold.counts.cold * BYTES.cold <= 100 * BYTES.base


def test_refusals_name_both_numbers() -> None:
    windows = replace(ASK, bits_budget=3.0, window_tokens=640, max_model_len=1280)
    # 10 of 20 pages and 4 rows in BF16: 8.05 bits; the others at 2.125.
    assert refusal(windows) == (
        "kv_bits_budget: got 3.0; allowed: at least 9.113 at max_model_len 1280, of which sinks "
        "and window take 8.05 and 2-bit pages the others"
    )
    assert plan_planes(replace(windows, bits_budget=9.113)).routine_bytes >= BYTES.base
    low = refusal(replace(ASK, bits_budget=2.0))
    assert "at least 2.133" in low
    assert "at least 1.633" in refusal(replace(ASK, bits_budget=1.6, has_cold=True))
    assert plan_planes(replace(ASK, bits_budget=2.0, has_cold=True)).counts.cold > 0
    assert "nan" in refusal(replace(ASK, bits_budget=float("nan")))
    small = refusal(replace(ASK, memory_bytes=10**5))
    assert small.startswith("kv_memory_bytes: got 100000; allowed: at least ")
    assert "num_pages: got 14000" in refusal(replace(ASK, num_pages=14000, bits_budget=3.0))
    same = PlaneNumbers(hot=32768, base=4352, fine=2048, cold=4352)
    assert "kv_cold_pages" in refusal(replace(ASK, plane_bytes=same, has_cold=True))
