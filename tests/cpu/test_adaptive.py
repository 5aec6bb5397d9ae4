"""An engine with an adaptive cache, from prompt to last plane: torch twins on a tiny model."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from tiny_checkpoint import config_values

from subten.cache.adaptive_pool import AdaptivePool
from subten.cache.planes import Rung
from subten.codecs.adaptive import AdaptiveFormat, adaptive_format
from subten.config import EngineConfig
from subten.core import PAGE_SIZE, ConfigError, FinishReason, SamplingParams
from subten.engine.graphs import DecodeGraphs
from subten.engine.llm import LLM
from subten.engine.prefill_graphs import PrefillGraphs
from subten.kernels import select_ops
from subten.kernels.adaptive_pages import MASS_UNIT
from subten.kernels.kv_append import page_planes
from subten.models import read_config
from subten.models.decoder import Decoder
from subten.weights.load import LoadedModel

CPU = torch.device("cpu")
VOCAB = 53
VALUES = config_values(
    "LlamaForCausalLM",
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=24,
    vocab_size=VOCAB,
    max_position_embeddings=2048,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)


def make_model(generator: torch.Generator, backend: str = "torch") -> LoadedModel:
    config = read_config(VALUES, source="test")[1]
    ops, fmt = select_ops(backend, CPU), adaptive_format(config.head_dim)
    model = Decoder(config, ops, fmt, device=CPU, dtype=torch.float32)
    for parameter in model.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        scale = 2.0 * parameter.shape[-1] ** -0.5
        parameter.data.copy_(1 + 0.3 * fresh if parameter.dim() == 1 else fresh * scale)
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=None,
        name="tiny",
        weight_bytes=0,
        dtype=torch.float32,
    )


def make_llm(loaded: LoadedModel, *, has_graphs: bool = False, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "max_model_len": 640,
        "device": "cpu",
    }
    llm = LLM(loaded, kv_cache_dtype="adaptive", **(defaults | settings))
    poison(llm, everything=True)
    if has_graphs:
        graph_settings: dict[str, Any] = {
            "sample": loaded.model.ops.sample,
            "max_model_len": llm.max_model_len,
            "device": CPU,
            "capture": lambda step: step,
        }
        model, most = loaded.model, llm.max_num_seqs
        runner: Any = llm.engine.runner
        runner._graphs = DecodeGraphs(model, llm.pool, max_batch=most, **graph_settings)
        runner._prefill_graphs = PrefillGraphs(model, llm.pool, **graph_settings)
    return llm


def pool_of(llm: LLM) -> AdaptivePool:
    assert isinstance(llm.pool, AdaptivePool)
    return llm.pool


def poison(llm: LLM, *, everything: bool = False) -> None:
    """Fill every plane that nobody has with NaN bytes."""
    pool = pool_of(llm)
    ledger, pools = pool.fidelity.ledger, pool.pages.pools
    for planes, tensor in (
        (ledger.hot, pools.hot_LHGB),
        (ledger.base, pools.base_LBGB),
        (ledger.fine, pools.fine_LFGB),
        (ledger.cold, pools.cold_LCGB),
        (ledger.sink, pool.pages.sink_LXGB),
    ):
        tensor[:, list(planes._free)] = 0xFF
        assert not everything or planes.num_used == 0


def run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY, *, is_poisoned: bool = True
) -> list[Any]:
    """Completions; planes are poisoned as soon as they are free, and the ledger is checked."""
    step = llm.engine.step

    def checked() -> Any:
        events = step()
        if is_poisoned:
            poison(llm)
        pool_of(llm).check_integrity()
        llm.engine.scheduler.check_integrity()
        return events

    llm.engine.step = checked  # type: ignore[method-assign]
    try:
        return llm.generate(prompts, params)
    finally:
        llm.engine.step = step  # type: ignore[method-assign]


def prompt_of(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture
def loaded(generator: torch.Generator) -> LoadedModel:
    return make_model(generator)


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return random.Random(seed)


# Case K03: the window is what the last tokens are, not what they were after quantising.
@pytest.mark.parametrize(("length", "first"), [(40, 0), (100, 36), (300, 236)])
def test_the_window_holds_the_rows_themselves(
    loaded: LoadedModel, rng: random.Random, length: int, first: int
) -> None:
    llm = make_llm(loaded, kv_window_tokens=64, kv_sink_tokens=0)
    # Kept by the pages of a request that has not ended.
    stream = llm.stream(prompt_of(length, rng), GREEDY)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    append = loaded.model.ops.kv_append

    def recording(k_TGD: torch.Tensor, v_TGD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((k_TGD, v_TGD))
        return append(k_TGD, v_TGD, *args, **kwargs)

    layer: Any = loaded.model.layers[0]
    layer.attention.ops = dataclasses.replace(loaded.model.ops, kv_append=recording)
    next(stream)
    (sequence,) = llm.engine.scheduler.running.values()
    pool = pool_of(llm)
    fmt = loaded.model.fmt
    assert isinstance(fmt, AdaptiveFormat)
    v_TGD = torch.cat([v for _, v in seen])[:length]
    wanted_TGD = (v_TGD @ loaded.model.rotation_DD).to(torch.bfloat16)
    for position in range(first, length):
        place = pool.fidelity.ledger.places[sequence.page_ids[position // PAGE_SIZE]]
        assert place.rung is Rung.HOT, (position, place)
        page_GB = pool.pages.pools.hot_LHGB[0, place.first][None]
        codes = page_planes(page_GB, fmt)[0][0, 1, :, position % PAGE_SIZE]
        assert torch.equal(codes.view(torch.bfloat16), wanted_TGD[position])
    older = {pool.fidelity.rung(page) for page in sequence.page_ids[: first // PAGE_SIZE]}
    assert older <= {Rung.K4V4}
    if first == 0:
        assert pool.use(sequence.page_ids).pages_by_kind == {"hot": 1}
    stream.close()


@pytest.mark.parametrize("budget", [None, 4.5])
def test_a_decode_graph_that_runs_ahead_reads_what_an_eager_step_reads(
    loaded: LoadedModel, rng: random.Random, budget: float | None
) -> None:
    prompts = [prompt_of(n, rng) for n in (1, 63, 200)]
    settings: dict[str, Any] = {"kv_bits_budget": budget, "kv_sink_tokens": 0}
    settings["kv_window_tokens"] = 33
    eager = run(make_llm(loaded, **settings), prompts)
    ahead = run(make_llm(loaded, **settings, has_graphs=True), prompts)
    for one, other in zip(eager, ahead, strict=True):
        assert one.token_ids == other.token_ids
        assert one.kv_bytes == other.kv_bytes
        assert one.kv_pages == other.kv_pages


def test_a_step_ahead_leaves_the_bytes_that_an_eager_step_leaves(
    loaded: LoadedModel, rng: random.Random
) -> None:
    # One sequence: matrix products of several rows round otherwise than those of one.
    prompt, pools = prompt_of(100, rng), []
    for has_graphs in (False, True):
        # No step is started ahead where a page ends: with this window pages leave half-way.
        settings: dict[str, Any] = {"kv_bits_budget": 4.5, "kv_window_tokens": 33}
        llm = make_llm(loaded, has_graphs=has_graphs, kv_sink_tokens=0, **settings)
        run(llm, [prompt], SamplingParams(max_tokens=100, temperature=0.0), is_poisoned=False)
        pools.append(pool_of(llm).pages.pools)
    for name in ("hot_LHGB", "base_LBGB", "fine_LFGB"):
        # What attention reads decides the rows of the next layer: a page that was encoded one step
        # too late or too early shows in them.
        assert torch.equal(getattr(pools[0], name), getattr(pools[1], name)), name


@pytest.mark.parametrize("sinks", [0, 4])
def test_recycled_planes_are_never_read(
    loaded: LoadedModel, rng: random.Random, sinks: int
) -> None:
    prompts = [prompt_of(n, rng) for n in (70, 150)]
    settings: dict[str, Any] = {"kv_bits_budget": 3.2, "kv_cold_pages": True}
    settings["kv_sink_tokens"] = sinks
    llm = make_llm(loaded, **settings)
    first = run(llm, prompts)
    clean = run(make_llm(loaded, **settings), prompts, is_poisoned=False)
    assert [c.finish_reason for c in first] == [FinishReason.LENGTH] * 2
    assert [c.token_ids for c in first] == [c.token_ids for c in clean]


def test_sinks_are_the_rows_themselves_and_are_read(
    loaded: LoadedModel, rng: random.Random
) -> None:
    llm = make_llm(loaded, kv_bits_budget=3.2)
    stream = llm.stream(prompt_of(200, rng), GREEDY)
    seen: list[torch.Tensor] = []
    append = loaded.model.ops.kv_append

    def recording(k_TGD: torch.Tensor, v_TGD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(v_TGD)
        return append(k_TGD, v_TGD, *args, **kwargs)

    layer: Any = loaded.model.layers[0]
    layer.attention.ops = dataclasses.replace(loaded.model.ops, kv_append=recording)
    next(stream)
    (sequence,) = llm.engine.scheduler.running.values()
    pool = pool_of(llm)
    assert pool.fidelity.ledger.places[sequence.page_ids[0]].rung is not Rung.HOT
    sink = pool.fidelity.ledger.sink_of[sequence.page_ids[0]]
    sink_GB = pool.pages.sink_LXGB[0, sink]
    rows_G2SD = sink_GB.contiguous().view(torch.bfloat16).unflatten(1, (2, 4, -1))
    wanted_SGD = (seen[0][:4] @ loaded.model.rotation_DD).to(torch.bfloat16)
    assert torch.equal(rows_G2SD[:, 1].transpose(0, 1), wanted_SGD)
    pool.pages.sink_LXGB[0, sink] = 0xFF
    assert list(stream)[-1].finish_reason is FinishReason.ERROR


# Case K20.
def test_nan_ends_its_request_alone(loaded: LoadedModel, rng: random.Random) -> None:
    bad = VOCAB - 1
    prompts = [[rng.randrange(bad) for _ in range(n)] for n in (70, 130, 90, 40)]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=70,
        ignore_eos=True,
        allowed_token_ids=tuple(range(bad)),
    )
    # One step takes all prompts, so that the end of one does not cut the others into other chunks.
    clean = run(make_llm(loaded, max_num_batched_tokens=512), prompts, params)
    loaded.model.embedding_VD.data[bad] = torch.nan
    poisoned = [list(prompt) for prompt in prompts]
    poisoned[1][100] = bad
    llm = make_llm(loaded, max_num_batched_tokens=512)
    found = run(llm, poisoned, params)
    assert found[1].finish_reason is FinishReason.ERROR
    again = run(llm, prompts[1:2], params)
    assert again[0].usage.cached_tokens == 0
    for index in (0, 2, 3):
        assert found[index].token_ids == clean[index].token_ids, index
    assert again[0].token_ids == clean[1].token_ids


def test_preempted_and_cancelled_requests_leave_no_plane_behind(
    loaded: LoadedModel, rng: random.Random
) -> None:
    llm = make_llm(loaded, num_pages=4, max_model_len=256, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=72)
    found = run(llm, [prompt_of(60, rng) for _ in range(3)], params)
    assert llm.engine.scheduler.num_preemptions > 0
    assert all(c.finish_reason is FinishReason.LENGTH for c in found)
    stream = llm.stream(prompt_of(200, rng), GREEDY)
    next(stream)
    assert pool_of(llm).bytes_used > 0
    assert llm.cache_use.num_bytes == pool_of(llm).bytes_used
    stream.close()
    assert pool_of(llm).bytes_used == 0
    pool_of(llm).check_integrity()


def test_a_shared_beginning_is_held_once(loaded: LoadedModel, rng: random.Random) -> None:
    prompt = prompt_of(200, rng)
    llm = make_llm(loaded, kv_sink_tokens=0)
    run(llm, [prompt])
    first, second = llm.stream([*prompt, 1], GREEDY), llm.stream([*prompt, 2], GREEDY)
    next(first), next(second)
    one, other = llm.engine.scheduler.running.values()
    assert one.page_ids[:3] == other.page_ids[:3]
    pool = pool_of(llm)
    assert llm.cache_use.pages_by_kind == {"hot": 2, "k4v4": 3}
    idle = [p for p in range(pool.num_pages) if llm.engine.scheduler.allocator.num_holders(p) == 0]
    assert llm.cache_use.num_bytes == pool.bytes_used - pool.use(idle).num_bytes
    first.close(), second.close()
    llm.engine.scheduler.allocator.flush()
    assert pool.bytes_used == 0


def test_masses_are_shares_of_every_query(loaded: LoadedModel, rng: random.Random) -> None:
    llm = make_llm(loaded, kv_bits_budget=3.6, kv_sink_tokens=0)
    lengths = (30, 100)
    run(llm, [prompt_of(n, rng) for n in lengths], SamplingParams(max_tokens=1))
    total = int(pool_of(llm).pages.total_P.sum())
    queries = sum(lengths) * 2 * 4  # layers, heads
    # Each page of each step is rounded down to a unit, and softmax sums are right to 1e-6.
    slack = 8 + queries * MASS_UNIT * 1e-6
    assert abs(total - queries * MASS_UNIT) <= slack, (total, queries * MASS_UNIT)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_bits_budget": 2.9, "kv_window_tokens": 128}, ("got 2.9", "at least", "window take")),
        ({"kv_bits_budget": 1.0, "kv_cold_pages": True}, ("got 1.0", "cold pages")),
        ({"kv_memory_bytes": 9999}, ("kv_memory_bytes: got 9999", "at least", "in BF16, take")),
    ],
)
def test_budgets_that_cannot_be_met_are_refused_with_both_numbers(
    loaded: LoadedModel, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(loaded, **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_bits_budget", 3.0),
        ("kv_memory_bytes", 10**6),
        ("kv_cold_pages", True),
        ("kv_sink_tokens", 4),
        ("kv_window_tokens", 0),
    ],
)
def test_other_formats_take_no_such_setting(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got .* kv_cache_dtype is not adaptive"):
        EngineConfig(kv_cache_dtype="int4", **{field: value})
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="kv_bits_budget"):
            EngineConfig(kv_cache_dtype="adaptive", kv_bits_budget=bad)


def test_memory_is_what_was_given(loaded: LoadedModel) -> None:
    for kv_memory_bytes in (250_000, 1_000_000):
        pool = pool_of(make_llm(loaded, kv_memory_bytes=kv_memory_bytes))
        assert pool.total_bytes <= kv_memory_bytes
        pools = pool.pages.pools
        each = (pools.hot_LHGB, pools.base_LBGB, pools.fine_LFGB, pools.cold_LCGB)
        every = (*each, pool.pages.sink_LXGB)
        assert pool.total_bytes == sum(tensor.nbytes for tensor in every)


@pytest.mark.triton
def test_triton_kernels_give_the_same_text(rng: random.Random, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the models of these tests are on the CPU")
    prompts, found = [prompt_of(70, rng)], []
    seed = rng.randrange(2**31)
    for backend in ("torch", "triton"):
        model = make_model(torch.Generator().manual_seed(seed), backend)
        settings: dict[str, Any] = {"kv_bits_budget": 3.2, "kv_cold_pages": True}
        llm = make_llm(model, **settings)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        found.append(run(llm, prompts, params))
    for one, other in zip(*found, strict=True):
        assert one.kv_pages == other.kv_pages
        assert one.token_ids == other.token_ids


@pytest.mark.parametrize("has_mean", [False, True])
def test_calibration_changes_what_is_stored_and_not_what_is_computed(
    loaded: LoadedModel, rng: random.Random, generator: torch.Generator, has_mean: bool
) -> None:
    prompt, found = prompt_of(100, rng), []
    for is_calibrated in (False, True):
        # All pages stay hot: what differs are BF16 roundings of other rows, 2^-9 of each value.
        llm = make_llm(loaded, kv_window_tokens=640)
        if is_calibrated:
            for layer in loaded.model.layers:
                calibrate(layer, generator, has_mean=has_mean)
        logits: list[torch.Tensor] = []
        sample = llm.engine.runner._sampler._sample  # type: ignore[attr-defined]

        def recording(
            logits_SV: torch.Tensor, *args: Any, kept: Any = logits, op: Any = sample
        ) -> Any:
            kept.append(logits_SV.clone())
            return op(logits_SV, *args)

        llm.engine.runner._sampler._sample = recording  # type: ignore[attr-defined]
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        found.append(logits[-1])
    # Rows differ by 2^-9 * 2 (the condition of the matrix), over 2 layers; a wrong sign or
    # transpose gives an error of the size of the logits.
    error = (found[0] - found[1]).abs().max() / found[0].abs().max()
    assert 0 < error < 0.05, error


def calibrate(layer: Any, generator: torch.Generator, *, has_mean: bool) -> None:
    attention = layer.attention
    shape = (attention.num_kv_heads, attention.head_dim, attention.head_dim)
    turn_GDD = torch.linalg.qr(torch.randn(shape, generator=generator)).Q
    stretch_GD = 0.7 + 0.7 * torch.rand(shape[:2], generator=generator)
    mean_GD = torch.randn(shape[:2], generator=generator) * 3 if has_mean else None
    attention.calibrate(turn_GDD * stretch_GD[:, None], mean_GD)
