"""`LLM` with a tiny random MoE: batching, chunks, preemption and shared pages change nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from scripted import VOCAB_SIZE, byte_tokenizer, fake_config

from subten.codecs import CODECS, kv_format
from subten.core import FinishReason, SamplingParams
from subten.engine.completion import Completion
from subten.engine.llm import LLM
from subten.kernels import select_ops
from subten.kernels.sample import SamplingTensors, sample_torch
from subten.models.decoder import Decoder
from subten.weights.load import LoadedModel

PROMPTS = ["a", "The quick brown fox", "x" * 64, "Hello, world! " * 5, "0123456789" * 13]


@pytest.fixture
def seed() -> int:
    fresh = random.SystemRandom().randrange(2**31)
    print(f"seed of the weights: {fresh}")
    return fresh


def tiny_moe(codec: str, seed: int, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Two layers, eight experts, random weights that depend on the seed alone."""
    config = fake_config(
        max_model_len=512,
        architecture="MixtralForCausalLM",
        num_layers=2,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        d_ffn=48,
        num_experts=8,
        top_k=2,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )
    cpu = torch.device("cpu")
    fmt = kv_format(codec, config.head_dim)
    model = Decoder(config, select_ops("torch", cpu), fmt, device=cpu, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data.copy_(1 + 0.1 * fresh)
        else:
            # Twice the usual scale: attention must matter, or a wrong cache would not show.
            parameter.data.copy_(2 * fresh * parameter.shape[-1] ** -0.5)
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=byte_tokenizer(),
        name="tiny",
        weight_bytes=0,
        dtype=dtype,
    )


def tiny_llm(
    codec: str,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    num_pages: int = 32,
    **settings: Any,
) -> LLM:
    llm = LLM(tiny_moe(codec, seed, dtype), kv_cache_dtype=codec, num_pages=num_pages, **settings)
    # As a used pool looks: what no token has written must never be read.
    llm.pool.pages_LPGB.fill_(0xFF)
    return llm


def greedy(num_tokens: int, num_prompts: int = len(PROMPTS)) -> list[SamplingParams]:
    """Greedy parameters; the seed is unused but names the prompt to `TieRecorder`."""
    return [
        SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=i) for i in range(num_prompts)
    ]


class TieRecorder:
    """Stands between an LLM and its sampler; notes how far ahead each token is of the next."""

    def __init__(self, llm: LLM) -> None:
        self.lead: dict[tuple[int, int], float] = {}
        llm.engine.runner._sampler._sample = self

    def __call__(
        self, logits_SV: torch.Tensor, params: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        top_S2 = logits_SV.topk(2).values
        leads = (top_S2[:, 0] - top_S2[:, 1]).tolist()
        keys = zip(params.seed_S.tolist(), params.index_S.tolist(), strict=True)
        self.lead.update(zip(keys, leads, strict=True))
        return sample_torch(logits_SV, params)


def assert_same_but_for_ties(
    plain: list[Completion], other: list[Completion], ties: TieRecorder, tolerance: float
) -> None:
    """Equal tokens, up to a place where two logits of `plain` are closer than `tolerance`."""
    num_compared = 0
    for i, (left, right) in enumerate(zip(plain, other, strict=True)):
        assert left.usage.completion_tokens == right.usage.completion_tokens
        for index, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=True)):
            num_compared += 1
            if a != b:
                assert ties.lead[i, index] < tolerance, (i, index, ties.lead[i, index])
                break
    total = sum(completion.usage.completion_tokens for completion in plain)
    assert num_compared > total / 4, f"ties left {num_compared} of {total} tokens to compare"


# Logits have a deviation of about 2. Another order of float32 sums moves them by about 1e-5; in a
# 4-bit cache that now and then moves a code by one step, a fifteenth of its row's range, which
# moves logits by up to a few hundredths.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, "int4": 0.3}


# On a CPU the runner keeps sequences apart, so that equality is exact for any weights.
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("int4", torch.bfloat16),
        ("fp32", torch.float32),
        ("int4", torch.float32),
    ],
)
def test_batch_of_five_is_each_alone(codec: str, dtype: torch.dtype, seed: int) -> None:
    params = greedy(12)
    together = tiny_llm(codec, seed, dtype=dtype).generate(PROMPTS, params)
    for i, completion in enumerate(together):
        (alone,) = tiny_llm(codec, seed, dtype=dtype).generate(PROMPTS[i], params[i])
        assert completion.token_ids == alone.token_ids, PROMPTS[i]
        assert completion.usage.completion_tokens == 12
    assert len({completion.token_ids for completion in together}) == 5


def test_more_decoders_than_go_alone_share_a_pass(seed: int) -> None:
    prompts = [f"{i} " for i in range(11)]
    llm = tiny_llm("fp32", seed)
    ties = TieRecorder(llm)
    together = llm.generate(prompts, greedy(8, 11))
    alone = [tiny_llm("fp32", seed).generate(p, greedy(8, 1))[0] for p in prompts]
    assert_same_but_for_ties(together, alone, ties, TOLERANCE["fp32"])


@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"max_num_batched_tokens": 61, "max_num_seqs": 2},
    ],
    ids=["chunks of 8", "chunks of 61"],
)
def test_chunked_prefill_is_unchunked(codec: str, settings: dict[str, int], seed: int) -> None:
    llm = tiny_llm(codec, seed)
    ties = TieRecorder(llm)
    plain = llm.generate(PROMPTS, greedy(12))
    chunked = tiny_llm(codec, seed, **settings).generate(PROMPTS, greedy(12))
    assert_same_but_for_ties(plain, chunked, ties, TOLERANCE[codec])


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_preemption_loses_nothing(codec: str, seed: int) -> None:
    prompts = ["a" * 50, "b" * 55, "c" * 60]
    llm = tiny_llm(codec, seed)
    ties = TieRecorder(llm)
    calm = llm.generate(prompts, greedy(30, 3))
    narrow = tiny_llm(codec, seed, num_pages=3)
    tight = narrow.generate(prompts, greedy(30, 3))
    assert narrow.engine.scheduler.num_preemptions > 0
    assert_same_but_for_ties(calm, tight, ties, TOLERANCE[codec])


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_shared_pages_continue_as_computed_ones(codec: str, seed: int) -> None:
    llm = tiny_llm(codec, seed)
    ties = TieRecorder(llm)
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    first = llm.generate(prompt, greedy(24, 1))
    second = llm.generate(prompt, greedy(24, 1))
    assert (first[0].usage.cached_tokens, second[0].usage.cached_tokens) == (0, 128)
    assert_same_but_for_ties(first, second, ties, TOLERANCE[codec])


# Case K20 with real keys and values: stream two gets a NaN, its pages go to stream five.
def test_nan_stays_with_its_request(seed: int) -> None:
    clean = tiny_llm("fp32", seed).generate(PROMPTS, greedy(12))
    llm = tiny_llm("fp32", seed, max_num_seqs=4, enable_prefix_caching=False)
    unused = next(i for i in range(VOCAB_SIZE) if not any(i in c.token_ids for c in clean))
    llm.loaded.model.embedding_VD.data[unused] = torch.nan
    prompts: list[Any] = [PROMPTS[0], [1, unused, 2] * 30, *PROMPTS[1:]]
    first, bad, *others = llm.generate(prompts, greedy(12, 6))
    assert bad.finish_reason is FinishReason.ERROR
    assert [c.token_ids for c in (first, *others)] == [c.token_ids for c in clean]


# Case K18: a request does not see what others hold, and its bytes are those that are stated.
@pytest.mark.parametrize("codec", sorted(CODECS.keys() - {"int4_g64"}))
def test_bytes_of_full_pages_are_the_codec_s(codec: str, seed: int) -> None:
    (completion,) = tiny_llm(codec, seed).generate(
        "x" * 253, SamplingParams(temperature=0.0, max_tokens=4)
    )
    # 256 cached tokens fill four pages to the last row: 2 layers, 2 KV heads.
    fmt = kv_format(codec, 32)
    assert completion.kv_bytes == 4 * 2 * 2 * fmt.page_bytes
    assert completion.kv_true_bits == pytest.approx(fmt.true_bits)


# Case S11: up to eight sequences on a CPU, what is told is the same to the bit whoever is beside.
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_logprobs_are_bit_equal_in_any_batch(codec: str, seed: int) -> None:
    rng = random.Random(seed)
    own = [rng.randrange(VOCAB_SIZE) for _ in range(70)]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5)
    (alone,) = tiny_llm(codec, seed).generate(own, params)
    assert alone.logprobs is not None
    assert [told.token_id for told in alone.logprobs] == list(alone.token_ids)
    assert all(told.rank == 1 and told.top[0][0] == told.token_id for told in alone.logprobs)
    for num_seqs in (2, 7, 8):
        prompts = [[rng.randrange(VOCAB_SIZE)] * rng.randint(1, 90) for _ in range(num_seqs - 1)]
        place = rng.randrange(num_seqs)
        prompts.insert(place, own)
        completions = tiny_llm(codec, seed).generate(prompts, params)
        assert completions[place].logprobs == alone.logprobs, num_seqs


def test_prompt_logprobs_are_those_of_the_same_tokens_as_output(seed: int) -> None:
    prompt = list(range(100))
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=60, logprobs=3)
    (first,) = tiny_llm("fp32", seed).generate(prompt, params)
    assert first.logprobs is not None and first.prompt_logprobs is None
    params = SamplingParams(max_tokens=1, prompt_logprobs=3)
    (second,) = tiny_llm("fp32", seed).generate([*prompt, *first.token_ids], params)
    assert second.logprobs is None and second.prompt_logprobs is not None
    assert len(second.prompt_logprobs) == 159
    told = second.prompt_logprobs[99:]
    assert [t.token_id for t in told] == list(first.token_ids)
    for a, b in zip(first.logprobs, told, strict=True):
        # float32 sums of up to 64 products in another order, through two layers of random weights
        # twice the usual scale: of twelve seeds the worst was 4.4e-5.
        assert abs(a.logprob - b.logprob) < 1e-3, (a, b)
