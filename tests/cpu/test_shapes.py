"""Shapes by name: sizes as published, read by the reader of checkpoints."""

from __future__ import annotations

import math

import pytest

from subten.bench import shapes
from subten.bench.plan import weight_bytes_held
from subten.core import ConfigError


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "kv_heads", "experts", "top_k", "d_ffn", "vocabulary"),
    [
        ("mixtral-8x7b", 32, 4096, 32, 8, 8, 2, 14336, 32000),
        ("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 8, 768, 151936),
        ("llama-3-70b", 80, 8192, 64, 8, 0, 0, 28672, 128256),
    ],
)
def test_published_sizes(name, layers, width, heads, kv_heads, experts, top_k, d_ffn, vocabulary):
    found = shapes.get_shape(name)
    assert (found.num_layers, found.d_model, found.head_dim) == (layers, width, 128)
    assert (found.num_heads, found.num_kv_heads) == (heads, kv_heads)
    assert (found.num_experts, found.top_k, found.d_ffn) == (experts, top_k, d_ffn)
    assert (found.vocab_size, found.tie_word_embeddings) == (vocabulary, False)
    assert found.has_qk_norm == name.startswith("qwen3")
    assert found.norm_topk_prob


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 46.70), ("qwen3-30b-a3b", 30.53), ("llama-3-70b", 70.55)],
)
def test_parameters_are_as_many_as_published(name, billions):
    assert math.isclose(weight_bytes_held(shapes.get_shape(name)) / 2e9, billions, rel_tol=1e-3)


def test_the_tiny_pair_has_the_structure_of_the_large_one():
    for tiny, large in (("tiny-mixtral", "mixtral-8x7b"), ("tiny-qwen3", "qwen3-30b-a3b")):
        a, b = shapes.get_shape(tiny), shapes.get_shape(large)
        assert a.architecture == b.architecture
        assert a.has_qk_norm == b.has_qk_norm
        assert a.num_heads > a.num_kv_heads > 1
        assert 1 < a.top_k < a.num_experts
        # int4 weights have groups of 64 inputs.
        assert a.d_model % 64 == a.d_ffn % 64 == a.num_heads * a.head_dim % 64 == 0


def test_a_context_is_stretched_and_never_cut():
    own = shapes.get_shape("mixtral-8x7b").max_model_len
    assert shapes.get_shape("mixtral-8x7b", min_model_len=131072).max_model_len == 131072
    assert shapes.get_shape("mixtral-8x7b", min_model_len=5).max_model_len == own == 32768


def test_an_unknown_shape_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"shape: got 'gpt-9'; allowed: mixtral-8x7b, qwen3"):
        shapes.get_shape("gpt-9")
