"""Sizes of an adaptive cache: what a budget of bits and a memory give, and what they cannot."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from subten.cache.fidelity import Fidelity, FidelityPolicy, Span
from subten.cache.plane_plan import PlaneAsk, PlanePlan, plan_planes
from subten.core import PAGE_SIZE, ConfigError

# head_dim 128, four layers, one KV head; four sink rows and 32 recent ones.
LAYERS = 4
ELEMENTS = 64 * 2 * 128 * LAYERS
ASK = PlaneAsk(
    key_bytes={2: 2112, 3: 3136, 4: 4160},
    sensitivity=(0.5, 0.1, 0.9, 0.2),
    base_bytes=2112 * LAYERS,
    fine_bytes=2048 * LAYERS,
    cold_bytes=1600 * LAYERS,
    sink_bytes=2048 * LAYERS,
    ring_bytes=16384 * LAYERS,
    codebook_bytes=4352,
    fixed_bytes=1000,
    page_elements=ELEMENTS,
    memory_bytes=256 * 2**20,
    memory_name="kv_memory_bytes",
    num_pages=None,
    bits_budget=None,
    has_cold=False,
    max_num_seqs=4,
    max_num_batched_tokens=256,
    max_model_len=8192,
)


def refusal(ask: PlaneAsk) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_planes(ask)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def decode(ask: PlaneAsk, plan: PlanePlan, rng: random.Random) -> tuple[Fidelity, int]:
    """One sequence that grows to `max_model_len`; masses come at random. Its bytes, all counted."""
    policy = FidelityPolicy(value_bytes=plan.value_bytes, newest_pages=plan.newest_pages)
    planes = ask.plane_bytes(plan.widths)
    fidelity = Fidelity(policy, counts=plan.counts, plane_bytes=planes)
    pages: list[int] = []
    total_P = np.zeros(plan.num_pages, dtype=np.int64)
    for start in range(0, ask.max_model_len, 16):
        if start % PAGE_SIZE == 0:
            pages.append(len(pages))
            fidelity.page_held(pages[-1])
        span = Span("a", pages, start, start + 16)
        fidelity.prepare([span])
        for page in pages:
            total_P[page] += rng.randrange(1000)
        fidelity.count_mass(total_P)
        fidelity.settle([span])
    fidelity.check_integrity()
    extra = ask.codebook_bytes if ask.has_cold else 0
    return fidelity, fidelity.ledger.bytes_used + extra


# Case K16: bits tend to what was asked, rings and sinks included, and do not pass it.
@pytest.mark.parametrize(
    ("bits", "changes"),
    [(2.7, {}), (3.3, {}), (4.05, {}), (2.3, {"has_cold": True}), (2.4, {"has_cold": True})],
)
def test_a_full_sequence_has_the_bits_that_were_asked_for(bits: float, changes: dict) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    ask = replace(ASK, bits_budget=bits, max_model_len=6400, **changes)
    _, num_bytes = decode(ask, plan_planes(ask), random.Random(seed))
    got = num_bytes * 8 / (ask.pages_of_one * ELEMENTS)
    assert 0.98 * bits <= got <= bits, got


@pytest.mark.parametrize(
    ("bits", "widths"),
    [
        (9.0, (4, 4, 4, 4)),
        (4.4, (4, 4, 4, 4)),
        (2.85, (3, 3, 3, 3)),
        # The layers that feel it least have 2 bits.
        (2.4, (3, 2, 3, 2)),
        (2.15, (2, 2, 2, 2)),
    ],
)
def test_widths_follow_budget_and_sensitivity(bits: float, widths: tuple[int, ...]) -> None:
    ask = replace(ASK, bits_budget=bits, max_model_len=131072, max_num_seqs=1)
    assert plan_planes(ask).widths == widths
    assert (plan_planes(ask).value_bytes is None) == (bits > 4.2)


def test_pools_fit_the_memory_whatever_is_asked() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_plans = 0
    for _ in range(1500):
        ask = replace(
            ASK,
            sink_bytes=rng.choice([0, 8192]),
            ring_bytes=rng.choice([0, 65536]),
            memory_bytes=rng.choice([10**5, 10**6, 10**7, 10**9]) * rng.randint(1, 9),
            num_pages=rng.choice([None, None, 1, 37, 300]),
            bits_budget=rng.choice([None, rng.uniform(1.5, 17)]),
            has_cold=rng.random() < 0.5,
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
        taken = counts.dot(ask.plane_bytes(plan.widths)) + ask.fixed_bytes
        assert taken <= ask.memory_bytes, (ask, plan)
        assert counts.base + counts.cold >= plan.num_pages, (ask, plan)
        assert 0 <= counts.fine <= plan.num_pages, (ask, plan)
        assert 1 <= plan.max_num_seqs <= ask.max_num_seqs
        assert counts.ring == (plan.max_num_seqs if ask.ring_bytes else 0)
        assert ask.has_cold or counts.cold == 0
    assert num_plans > 400


def test_memory_alone_is_spent_on_bits_once_a_sequence_fits() -> None:
    rich = plan_planes(ASK)
    assert rich.widths == (4,) * LAYERS
    assert rich.value_bytes is None
    assert rich.counts.fine == rich.num_pages >= ASK.pages_of_one
    one = replace(ASK, max_num_seqs=1)
    taken = one.fixed_bytes + one.ring_bytes + 3 * one.sink_bytes
    for bits, width in ((4.0, 4), (2.9, 3), (2.09, 2)):
        room = int(one.pages_of_one * ELEMENTS * bits / 8)
        scarce = plan_planes(replace(one, memory_bytes=taken + room))
        assert scarce.num_pages == one.pages_of_one, bits
        assert set(scarce.widths) == {width}
    poor = plan_planes(replace(one, memory_bytes=taken + 17 * 4 * 2112 * 2))
    assert (poor.num_pages, set(poor.widths)) == (17, {2})


def test_refusals_name_both_numbers() -> None:
    short = replace(ASK, bits_budget=2.9, max_model_len=640)
    # 32 and 4 rows of 16 bits beside 640: 0.9 bits; the others at 2.0625.
    assert refusal(short) == (
        "kv_bits_budget: got 2.9; allowed: at least 2.963 at max_model_len 640, of which sinks and "
        "recent rows take 0.9 and 2-bit pages the others"
    )
    assert plan_planes(replace(short, bits_budget=2.963)).widths == (2,) * LAYERS
    assert "at least 2.133" in refusal(replace(ASK, bits_budget=2.0))
    assert "cold pages" in refusal(replace(ASK, bits_budget=1.6, has_cold=True))
    assert plan_planes(replace(ASK, bits_budget=2.0, has_cold=True)).counts.cold > 0
    assert "nan" in refusal(replace(ASK, bits_budget=float("nan")))
    small = refusal(replace(ASK, memory_bytes=10**5, max_num_seqs=1))
    assert small.startswith("kv_memory_bytes: got 100000; allowed: at least ")
    many = refusal(replace(ASK, num_pages=14000, bits_budget=3.0))
    assert "num_pages: got 14000" in many or "kv_memory_bytes" in many
    assert "kv_cold_pages" in refusal(replace(ASK, cold_bytes=ASK.base_bytes, has_cold=True))
