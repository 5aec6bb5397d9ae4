"""Loads of experts, counted behind the steps: numbers of known routings, and of real steps."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_decoder import make_decoder
from test_graphs import MAX_MODEL_LEN, last_tokens, make_graphs, make_pool, make_sequences, prefill
from test_llm_moe import tiny_moe

from subten.core import PAGE_SIZE, SamplingParams
from subten.engine.expert_load import NUM_SAMPLES, SAMPLE_S, ExpertLoad
from subten.engine.llm import LLM


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def layers(*topk_ids: torch.Tensor | None, num_experts: int) -> list[Any]:
    """What stands for MoE layers that routed so."""
    gate_ED = torch.zeros(num_experts, 1)
    return [SimpleNamespace(gate_ED=gate_ED, topk_id_TK=ids) for ids in topk_ids]


def test_the_numbers_are_those_of_the_definition(device: torch.device) -> None:
    # Layer 0: experts get 3, 1, 0, 0 of 4; layer 1: one each. The third row is padding.
    first = torch.tensor([[0, 1], [0, 0], [3, 3]], dtype=torch.int32, device=device)
    second = torch.tensor([[2, 1], [0, 3], [3, 3]], dtype=torch.int32, device=device)
    load = ExpertLoad(layers(first, second, num_experts=4))
    assert load.summary() is None
    assert load.is_due
    load.take(load.routed(), 2)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found = load.summary()
    assert found is not None
    assert found.by_rank == ((3 + 1) / 2, (1 + 1) / 2, 0.5, 0.5)
    assert (found.max_violation, found.worst_violation) == (1.0, 2.0)
    assert found.experts_a_step == (2 + 4) / 2


def test_steps_are_sampled_and_old_ones_forgotten() -> None:
    clock = Clock()
    routed = layers(torch.tensor([[0]], dtype=torch.int32), num_experts=2)
    load = ExpertLoad(routed, clock=clock)
    load.take(load.routed(), 1)
    assert not load.is_due
    clock.now_s += SAMPLE_S
    assert load.is_due
    routed[0].topk_id_TK = torch.tensor([[1]], dtype=torch.int32)
    for _ in range(NUM_SAMPLES):
        load.take(load.routed(), 1)
    found = load.summary()
    assert found is not None
    assert found.by_rank == (2.0, 0.0)


def test_a_model_without_experts_has_no_load() -> None:
    assert ExpertLoad.of(torch.nn.Linear(1, 1)) is None
    assert ExpertLoad.of(lambda: None) is None


@pytest.mark.parametrize("count", [1, 3, 9])
@torch.inference_mode()
def test_graphs_show_the_routing_of_their_own_rows(
    count: int, device: torch.device, generator: torch.Generator
) -> None:
    # 9 sequences run as 16 rows; another size runs in between and leaves its own routing behind.
    decoder = make_decoder("fp32", "torch", device, generator)
    rng = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    pool = make_pool(decoder, 10 * MAX_MODEL_LEN // PAGE_SIZE)
    sequences = make_sequences(rng, 10, decoder.config.vocab_size)
    prefill(decoder, pool, sequences)
    load = ExpertLoad.of(decoder)
    assert load is not None
    taken: list[tuple[list[torch.Tensor], int]] = []
    load.take = lambda ids, rows: taken.append(([i.clone() for i in ids], rows))  # type: ignore[method-assign]
    graphs = make_graphs(decoder, pool, lambda step: step, 10, expert_load=load)
    graphs.run(last_tokens(sequences[:count]), has_more=True)
    graphs.run(last_tokens(sequences[: count + 1]), has_more=True)
    assert [rows for _, rows in taken] == [count, count + 1]
    config = decoder.config
    for ids, rows in taken:
        assert len(ids) == config.num_layers
        assert all(i.shape[1] == config.top_k and i.shape[0] >= rows for i in ids)
    # The same sequences go to the same experts in both.
    for a, b in zip(taken[0][0], taken[1][0], strict=True):
        assert a[:count].tolist() == b[:count].tolist()


def test_the_roof_fraction_is_bytes_over_time(generator: torch.Generator) -> None:
    pytest.importorskip("msgspec")
    from subten.serve.step_meter import StepMeter

    seed = int(torch.randint(2**31, (1,), generator=generator))
    with LLM(tiny_moe("fp32", seed), dtype="float32", kv_cache_dtype="fp32") as llm:
        meter = StepMeter(llm, roof_bytes_per_s=1e9)
        assert meter.load() is None
        assert meter.roof_fraction(None) is None
        chunks = llm.stream([5] * 40, SamplingParams(max_tokens=4, ignore_eos=True))
        meter.stepped(0.0, 0, 40)
        for number in range(3):
            next(chunks)
            meter.stepped(1.0 + 0.5 * number, 1, 1)
        assert meter.step_s == 0.5
        load = meter.load()
        assert load is not None
        assert sum(load.by_rank) == pytest.approx(llm.model_config.num_experts)
        # One token, or a prompt's: each layer touched its top-k at least, and not all for a token.
        assert llm.model_config.top_k <= load.experts_a_step <= llm.model_config.num_experts
        found = meter.roof_fraction(load)
        experts = everything = 0
        for name, parameter in llm.loaded.model.named_parameters():
            num_bytes = parameter.numel() * parameter.element_size()
            if "gate_up" in name or "down" in name:
                experts += num_bytes
            elif name.startswith("embedding"):
                everything += num_bytes // parameter.shape[0]
            else:
                everything += num_bytes
        sequence = next(iter(llm.engine.scheduler.running.values()))
        cache = sequence.num_computed * llm.pool.bytes_per_token
        share = load.experts_a_step / llm.model_config.num_experts
        assert found == pytest.approx((everything + share * experts + cache) / 1e9 / 0.5)
        # Another batch begins anew, and so does what follows a pause.
        meter.stepped(9.0, 2, 2)
        assert meter.step_s is None
        meter.stepped(9.5, 2, 2)
        meter.idle()
        meter.stepped(20.0, 2, 2)
        assert meter.step_s == 0.5
