"""Perplexity and KLD of KV formats against the same sums done the plain way, on a tiny model."""

from __future__ import annotations

import math

import pytest
import torch

from subten.bench import quality
from subten.cache.pool import PagePool
from subten.codecs import kv_format
from subten.config import ModelConfig, RopeConfig
from subten.core import PAGE_SIZE, ConfigError, RequestError
from subten.kernels import select_ops
from subten.kernels.step import make_step
from subten.models.decoder import Decoder

CONFIG = ModelConfig(
    architecture="MixtralForCausalLM",
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    d_ffn=24,
    vocab_size=97,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_model_len=160,
    tie_word_embeddings=False,
    num_experts=4,
    top_k=2,
)


def tiny_decoder(codec: str, seed: int, device: torch.device | str = "cpu") -> Decoder:
    device = torch.device(device)
    decoder = Decoder(
        CONFIG,
        select_ops("torch", device),
        kv_format(codec, CONFIG.head_dim),
        device=device,
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        # Wide enough that attention is far from uniform and the cache matters.
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return decoder


@torch.inference_mode()
def window_log_probs(seed: int, codec: str, tokens: list[int]) -> torch.Tensor:
    """float64 log-probabilities of one window read in a single step by a model of its own."""
    decoder = tiny_decoder(codec, seed)
    num_pages = math.ceil(len(tokens) / PAGE_SIZE)
    pool = PagePool(
        num_layers=CONFIG.num_layers,
        num_pages=num_pages,
        num_kv_heads=CONFIG.num_kv_heads,
        fmt=decoder.fmt,
        device=decoder.device,
    )
    step = make_step(
        token_ids=[tokens], starts=[0], page_ids=[list(range(num_pages))], device=decoder.device
    )
    return decoder(step, pool.pages_LPGB, all_rows=True).double().log_softmax(-1)


def plain_figures(seed: int, codec: str, tokens: list[int], window: int) -> tuple[float, float]:
    """Perplexity and mean KLD from bf16, window by window."""
    nll, kld, count = 0.0, 0.0, 0
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        reference, tested = (window_log_probs(seed, name, part)[:-1] for name in ("bf16", codec))
        for row, target in enumerate(part[1:]):
            nll -= float(tested[row, target])
            kld += float((reference[row].exp() * (reference[row] - tested[row])).sum())
            count += 1
    return math.exp(nll / count), kld / count


def random_tokens(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(CONFIG.vocab_size, (count,), generator=generator).tolist()


@pytest.mark.parametrize(
    ("num_tokens", "window", "rows"),
    [
        (2, 160, 10_000),  # one scored token
        (131, 37, 10_000),  # a prime window, several in a batch, a short last one
        (129, 64, 7),  # whole pages, chunks of 7, a last window of one token: nothing to score
        (150, 65, 100),  # one past a page
    ],
)
def test_figures_equal_the_plain_sums(generator, monkeypatch, num_tokens, window, rows):
    monkeypatch.setitem(quality.LOGIT_BYTES, "cpu", rows * 4 * CONFIG.vocab_size)
    seed = int(torch.randint(2**31, (), generator=generator))
    tokens = random_tokens(generator, num_tokens)
    results = quality.evaluate_kv(
        tiny_decoder("bf16", seed), tokens, codecs=["int4", "bf16", "fp8"], window=window
    )
    assert [row.kv_cache_dtype for row in results] == ["int4", "bf16", "fp8"]
    num_windows = math.ceil(num_tokens / window)
    for row in results:
        perplexity, kld = plain_figures(seed, row.kv_cache_dtype, tokens, window)
        assert row.num_tokens == num_tokens - num_windows
        # The same float32 model; chunks and batches change the order of float32 sums only, here
        # over at most 96 terms, and then 1e-5 of a logit of size 10.
        assert math.isclose(row.perplexity, perplexity, rel_tol=1e-3)
        assert math.isclose(row.kld_mean, kld, rel_tol=1e-2, abs_tol=1e-5)
        assert row.perplexity_ratio == pytest.approx(row.perplexity / results[1].perplexity)


def test_the_reference_differs_from_itself_by_nothing(generator):
    tokens = random_tokens(generator, 100)
    (row,) = quality.evaluate_kv(tiny_decoder("fp8", 1), tokens, codecs=["bf16"], window=50)
    assert (row.kld_mean, row.kld_p999, row.perplexity_ratio, row.top1_agreement) == (0, 0, 1, 1)


def test_fewer_bits_differ_more(generator):
    tokens = random_tokens(generator, 150)
    rows = quality.evaluate_kv(tiny_decoder("bf16", 2), tokens, codecs=["int8", "int4"], window=150)
    assert 0 < rows[0].kld_mean < rows[1].kld_mean
    assert rows[0].kld_p50 <= rows[0].kld_mean <= rows[0].kld_p999


@pytest.mark.parametrize("window", [1 * PAGE_SIZE, PAGE_SIZE + 1, 160])
def test_true_bits_count_the_pages_of_a_window(generator, window):
    tokens = random_tokens(generator, 5)
    (row,) = quality.evaluate_kv(tiny_decoder("bf16", 3), tokens, codecs=["int4"], window=window)
    fmt = kv_format("int4", CONFIG.head_dim)
    pages = math.ceil(window / PAGE_SIZE)
    assert row.kv_true_bits == pytest.approx(fmt.true_bits * pages * PAGE_SIZE / window)
    per_token = CONFIG.num_layers * CONFIG.num_kv_heads * fmt.page_bytes / PAGE_SIZE
    assert row.kv_bytes_per_token == per_token


def test_formats_share_the_weights():
    model = tiny_decoder("bf16", 4)
    twin = quality.with_format(model, kv_format("int4", CONFIG.head_dim))
    assert twin.embedding_VD.data_ptr() == model.embedding_VD.data_ptr()
    assert (model.fmt.codec.name, twin.fmt.codec.name) == ("bf16", "int4")


def test_progress_ends_at_one(generator):
    seen: list[float] = []
    tokens = random_tokens(generator, 90)
    quality.evaluate_kv(
        tiny_decoder("bf16", 5), tokens, codecs=["bf16"], window=40, progress=seen.append
    )
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_the_quantile_interpolates_like_torch(generator):
    for count in (1, 2, 7, 1000, 1001):
        values = torch.randn(count, generator=generator, dtype=torch.float64)
        for share in (0.0, 0.5, 0.999, 1.0):
            expected = float(values.quantile(share))
            assert math.isclose(quality._quantile(values, share), expected, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([1, 2, 3], {"window": 1}, ConfigError, "window: got 1; allowed: 2 to the model's"),
        ([1, 2, 3], {"window": 161}, ConfigError, "window: got 161"),
        ([1], {}, RequestError, "text: got '1 tokens'; allowed: at least 2"),
        ([1, 2], {"codecs": []}, ConfigError, "kv_cache_dtype"),
        ([1, 2], {"codecs": ["int3"]}, ConfigError, "kv_cache_dtype: got 'int3'"),
    ],
)
def test_what_cannot_be_measured_is_refused(tokens, options, error, message):
    settings = {"codecs": ["int4"], "window": 8, **options}
    with pytest.raises(error, match=message):
        quality.evaluate_kv(tiny_decoder("bf16", 6), tokens, **settings)
