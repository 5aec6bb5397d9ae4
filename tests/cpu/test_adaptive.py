"""An engine with an adaptive cache, from prompt to last plane: torch twins on a tiny model."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from exact_products import ExactProducts
from tiny_checkpoint import config_values

from subten.cache.adaptive_pool import AdaptivePool
from subten.cache.fidelity import Span
from subten.cache.planes import NOWHERE
from subten.codecs.adaptive import adaptive_format
from subten.config import EngineConfig
from subten.core import PAGE_SIZE, ConfigError, FinishReason, SamplingParams
from subten.engine.graphs import DecodeGraphs
from subten.engine.llm import LLM
from subten.engine.prefill_graphs import PrefillGraphs
from subten.kernels import select_ops
from subten.kernels.adaptive_pages import MASS_UNIT
from subten.kernels.step import make_step
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
        runner._graphs = DecodeGraphs(
            model, llm.pool, advance=model.ops.advance, max_batch=most, **graph_settings
        )
        runner._prefill_graphs = PrefillGraphs(model, llm.pool, **graph_settings)
    return llm


def pool_of(llm: LLM) -> AdaptivePool:
    assert isinstance(llm.pool, AdaptivePool)
    return llm.pool


def poison(llm: LLM, *, everything: bool = False) -> None:
    """Fill every plane and ring that nobody has with NaN bytes."""
    pool = pool_of(llm)
    ledger, pages = pool.fidelity.ledger, pool.pages
    values = pages.values
    for planes, tensor in (
        (ledger.base, values.vbase_LXGB),
        (ledger.fine, values.vfine_LYGB),
        (ledger.cold, values.vcold_LZGB),
        (ledger.sink, pages.sink_LXGB),
    ):
        tensor[:, list(planes.free_ids)] = 0xFF
        assert not everything or planes.num_used == 0
    empty = [page for page, place in enumerate(ledger.places) if place == NOWHERE]
    for keys in pages.keys:
        keys.k_PGB[empty] = 0xFF
    for ring in ledger.ring.free_ids if pool.window else ():
        pages.ring_LNGE[:, ring * pool.window : (ring + 1) * pool.window] = torch.nan
    pool._staging_NGE.fill_(torch.nan)


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


def record_rows(loaded: LoadedModel) -> list[torch.Tensor]:
    """Rows of the first layer as `append_mixed` gets them, in the stored basis, [T, G, 2D]."""
    seen: list[torch.Tensor] = []
    append = loaded.model.ops.append_mixed

    def recording(k_TGD: torch.Tensor, v_TGD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch.cat([k_TGD, v_TGD.float() @ kwargs["rotation_DD"]], dim=-1))
        return append(k_TGD, v_TGD, *args, **kwargs)

    layer: Any = loaded.model.layers[0]
    layer.attention.ops = dataclasses.replace(loaded.model.ops, append_mixed=recording)
    return seen


# Case K03: the window is what the last tokens are, not what they were after quantising.
@pytest.mark.parametrize("length", [1, 32, 33, 300])
@pytest.mark.parametrize("num_batched", [4, 31, 512])
def test_the_ring_holds_the_last_rows_themselves(
    loaded: LoadedModel, rng: random.Random, length: int, num_batched: int
) -> None:
    llm = make_llm(loaded, max_num_batched_tokens=num_batched)
    seen = record_rows(loaded)
    stream = llm.stream(prompt_of(length, rng), GREEDY)
    for _ in range(3):
        next(stream)
    (sequence,) = llm.engine.scheduler.running.values()
    pool = pool_of(llm)
    recent = pool.fidelity.recent(sequence.request.request_id)
    assert recent.first == 0
    rows_TGE = torch.cat(seen).bfloat16()
    assert len(rows_TGE) == sequence.num_computed == length + 2
    for position in range(max(0, length + 2 - 32), length + 2):
        row = pool.pages.ring_LNGE[0, recent.ring * 32 + position % 32]
        assert torch.equal(row, rows_TGE[position]), position
    stream.close()


@torch.inference_mode()
def read_logits(llm: LLM, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of every token, read in chunks that end at `cuts`."""
    pool, model = pool_of(llm), llm.loaded.model
    allocator = llm.engine.scheduler.allocator
    pages = allocator.allocate(-(-len(tokens) // PAGE_SIZE))
    assert pages is not None
    found, start = [], 0
    for end in (*cuts, len(tokens)):
        spans = [Span("a", pages, start, end)]
        pool.prepare(spans)
        step = make_step(
            token_ids=[tokens[start:end]], starts=[start], page_ids=[pages], device=CPU
        )
        found.append(model(step, pool.eager_step(spans), all_rows=True))
        pool.settle(spans, is_decode=False)
        poison(llm)
        pool.check_integrity()
        start = end
    pool.fidelity.leave("a")
    allocator.release(pages)
    return torch.cat(found)


@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (1, 4), (32, 4), (100, 1), (640, 0)])
def test_a_prompt_is_read_alike_however_it_is_cut(
    loaded: LoadedModel, rng: random.Random, window: int, sinks: int
) -> None:
    settings: dict[str, Any] = {"kv_window_tokens": window, "kv_sink_tokens": sinks}
    # Without a budget pages keep their values: what goes down depends on when it is looked at.
    llm = make_llm(loaded, max_num_batched_tokens=512, **settings)
    tokens = prompt_of(150, rng)
    whole = read_logits(llm, tokens, [])
    settings["kv_window_tokens"] = 0 if window else 32
    harm = rms(read_logits(make_llm(loaded, **settings), tokens, []) - whole)
    for cuts in (sorted(rng.sample(range(1, 150), 5)), list(range(1, 150))):
        error = rms(read_logits(llm, tokens, cuts) - whole)
        # Float32 sums in another order move a few codes across an edge: each is one of thousands
        # that another window would move.
        assert error < 0.2 * harm, (error, harm)


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_a_window_over_everything_is_an_exact_cache(
    loaded: LoadedModel, rng: random.Random, generator: torch.Generator
) -> None:
    """Whatever the basis in which keys are stored, and the mean that they lack."""
    tokens = prompt_of(150, rng)
    plain = read_logits(make_llm(loaded, kv_window_tokens=640), tokens, [70])
    for layer in loaded.model.layers:
        attention: Any = layer.attention
        shape = (attention.num_kv_heads, attention.head_dim, attention.head_dim)
        matrix = torch.randn(shape, generator=generator) * 0.1 + torch.eye(shape[-1])
        attention.calibrate(
            matrix,
            torch.linalg.inv(matrix),
            mean_GD=torch.randn(shape[:2], generator=generator),
            feedback_GDD=torch.randn(shape, generator=generator).triu(1) * 0.1,
        )
    turned = read_logits(make_llm(loaded, kv_window_tokens=640), tokens, [70])
    coarse = read_logits(make_llm(loaded, kv_window_tokens=0), tokens, [70])
    # Rows are rounded to BF16, 2^-9 of each number, in another basis of condition about 4.
    error, harm = rms(turned - plain), rms(coarse - plain)
    assert error < 0.25 * harm, (error, harm)


@pytest.mark.parametrize("budget", [None, 3.9])
def test_a_decode_graph_that_runs_ahead_reads_what_an_eager_step_reads(
    loaded: LoadedModel, rng: random.Random, budget: float | None
) -> None:
    prompts = [prompt_of(n, rng) for n in (1, 63, 200)]
    settings: dict[str, Any] = {"kv_bits_budget": budget, "kv_window_tokens": 33}
    with ExactProducts():
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
        settings: dict[str, Any] = {"kv_bits_budget": 3.9, "kv_window_tokens": 33}
        llm = make_llm(loaded, has_graphs=has_graphs, **settings)
        run(llm, [prompt], SamplingParams(max_tokens=100, temperature=0.0), is_poisoned=False)
        pools.append(pool_of(llm).pages)
    # What attention reads decides the rows of the next layer: a page that went down one step too
    # late or too early shows in them.
    for keys, other in zip(pools[0].keys, pools[1].keys, strict=True):
        assert torch.equal(keys.k_PGB, other.k_PGB)
    for name in ("vbase_LXGB", "vfine_LYGB"):
        one, other = (getattr(pages.values, name) for pages in pools)
        assert torch.equal(one, other), name
    # The last row is nobody's.
    one, other = (pages.ring_LNGE[:, :-1].view(torch.int16) for pages in pools)
    assert torch.equal(one, other)


@pytest.mark.parametrize("sinks", [0, 4])
def test_recycled_planes_are_never_read(
    loaded: LoadedModel, rng: random.Random, sinks: int
) -> None:
    prompts = [prompt_of(n, rng) for n in (70, 150)]
    settings: dict[str, Any] = {"kv_bits_budget": 3.3, "kv_cold_pages": True}
    settings["kv_sink_tokens"] = sinks
    llm = make_llm(loaded, **settings)
    first = run(llm, prompts)
    clean = run(make_llm(loaded, **settings), prompts, is_poisoned=False)
    assert [c.finish_reason for c in first] == [FinishReason.LENGTH] * 2
    assert [c.token_ids for c in first] == [c.token_ids for c in clean]


def test_sinks_are_the_rows_themselves_and_are_read(
    loaded: LoadedModel, rng: random.Random
) -> None:
    llm = make_llm(loaded)
    seen = record_rows(loaded)
    stream = llm.stream(prompt_of(200, rng), GREEDY)
    next(stream)
    (sequence,) = llm.engine.scheduler.running.values()
    pool = pool_of(llm)
    sink = pool.fidelity.ledger.sink_of[sequence.page_ids[0]]
    sink_GB = pool.pages.sink_LXGB[0, sink]
    rows_G2SD = sink_GB.contiguous().view(torch.bfloat16).unflatten(1, (2, 4, -1))
    wanted_SGE = torch.cat(seen)[:4].bfloat16()
    assert torch.equal(rows_G2SD.permute(2, 0, 1, 3).flatten(2), wanted_SGE)
    pool.pages.sink_LXGB[0, sink] = 0xFF
    assert list(stream)[-1].finish_reason is FinishReason.ERROR


# Case K20: planes cannot hold a NaN, nor a row past the range of their norms.
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 1e6])
@pytest.mark.parametrize("window", [0, 32])
def test_a_row_that_cannot_be_stored_ends_its_request(
    loaded: LoadedModel, rng: random.Random, scale: float, window: int
) -> None:
    bad = 40
    append = loaded.model.ops.append_mixed

    def spoiling(k_TGD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        k_TGD = k_TGD.clone()
        if len(k_TGD) > 1:
            k_TGD[bad] *= scale
        return append(k_TGD, *args, **kwargs)

    llm = make_llm(loaded, max_num_batched_tokens=512, kv_window_tokens=window)
    layer: Any = loaded.model.layers[1]
    layer.attention.ops = dataclasses.replace(loaded.model.ops, append_mixed=spoiling)
    prompt = prompt_of(130, rng)
    (found,) = run(llm, [prompt])
    assert found.finish_reason is FinishReason.ERROR
    layer.attention.ops = loaded.model.ops
    (found,) = run(llm, [prompt])
    assert found.finish_reason is FinishReason.LENGTH
    assert found.usage.cached_tokens == 0


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
    llm = make_llm(loaded)
    run(llm, [prompt])
    first, second = llm.stream([*prompt, 1], GREEDY), llm.stream([*prompt, 2], GREEDY)
    next(first), next(second)
    one, other = llm.engine.scheduler.running.values()
    assert one.page_ids[:3] == other.page_ids[:3]
    pool = pool_of(llm)
    # Rows of the pages that came are not in their rings.
    recents = [pool.fidelity.recent(s.request.request_id) for s in (one, other)]
    assert [recent.first for recent in recents] == [192, 192]
    assert recents[0].ring != recents[1].ring
    assert llm.cache_use.pages_by_kind == {"v4": 5}
    idle = [p for p in range(pool.num_pages) if llm.engine.scheduler.allocator.num_holders(p) == 0]
    assert llm.cache_use.num_bytes == pool.bytes_used - pool.fidelity.bytes_of(idle)
    first.close(), second.close()
    llm.engine.scheduler.allocator.flush()
    assert pool.bytes_used == 0


def test_what_a_prefix_brings_is_read_from_its_pages(
    loaded: LoadedModel, rng: random.Random
) -> None:
    llm = make_llm(loaded, kv_window_tokens=100)
    prompt = prompt_of(150, rng)
    run(llm, [prompt], SamplingParams(max_tokens=1))
    # Poison is in every free ring: rows that are not the sequence's own would end it.
    (again,) = run(llm, [[*prompt[:140], 1, 2, 3]])
    assert again.usage.cached_tokens == 128
    assert again.finish_reason is FinishReason.LENGTH


def test_masses_are_shares_of_every_query(loaded: LoadedModel, rng: random.Random) -> None:
    llm = make_llm(loaded, kv_bits_budget=3.6)
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
        ({"kv_bits_budget": 2.9}, ("got 2.9", "at least", "recent rows take")),
        ({"kv_bits_budget": 1.0, "kv_cold_pages": True}, ("got 1.0", "cold pages")),
        ({"kv_memory_bytes": 9999}, ("kv_memory_bytes: got 9999", "at least", "a step take")),
        ({"kv_sink_tokens": 65}, ("kv_sink_tokens: got 65", "0 to 64")),
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
        ("kv_outlier_channels", 1.0),
        ("kv_sink_tokens", 4),
        ("kv_window_tokens", 0),
        ("kv_calibration", "none"),
    ],
)
def test_other_formats_take_no_such_setting(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got .* kv_cache_dtype is not adaptive"):
        EngineConfig(kv_cache_dtype="int4", **{field: value})
    for bad in (-1.0, 10.1, float("nan")):
        with pytest.raises(ConfigError, match=r"kv_outlier_channels: got .* 0 to 10"):
            EngineConfig(kv_cache_dtype="adaptive", kv_outlier_channels=bad)
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="kv_bits_budget"):
            EngineConfig(kv_cache_dtype="adaptive", kv_bits_budget=bad)


def test_memory_is_what_was_given(loaded: LoadedModel) -> None:
    for kv_memory_bytes in (400_000, 1_000_000):
        pool = pool_of(make_llm(loaded, kv_memory_bytes=kv_memory_bytes))
        assert pool.total_bytes <= kv_memory_bytes
        pages, values = pool.pages, pool.pages.values
        each = [keys.k_PGB for keys in pages.keys]
        each += [values.vbase_LXGB, values.vfine_LYGB, values.vcold_LZGB]
        each += [pages.sink_LXGB, pages.ring_LNGE, pool._staging_NGE]
        assert pool.total_bytes == sum(tensor.nbytes for tensor in each)


@pytest.mark.triton
def test_triton_kernels_give_the_same_text(rng: random.Random, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the models of these tests are on the CPU")
    prompts, found = [prompt_of(70, rng)], []
    seed = rng.randrange(2**31)
    for backend in ("torch", "triton"):
        model = make_model(torch.Generator().manual_seed(seed), backend)
        settings: dict[str, Any] = {"kv_bits_budget": 3.3, "kv_cold_pages": True}
        llm = make_llm(model, **settings)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        found.append(run(llm, prompts, params))
    for one, other in zip(*found, strict=True):
        assert one.kv_pages == other.kv_pages
        assert one.token_ids == other.token_ids
