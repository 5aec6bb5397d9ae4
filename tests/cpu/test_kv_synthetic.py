"""Synthetic keys have the habits that they are made for, and stripping saves biased ones."""

from __future__ import annotations

import pytest
import torch

from subten.bench.kv_synthetic import BIAS_NORM, ROPE_THETA, key_bits, key_error, synthetic_head
from subten.core import ConfigError


@pytest.mark.parametrize("codec", ["int4", "adaptive"])
@pytest.mark.parametrize("family", ROPE_THETA)
def test_stripped_keys_of_every_family_keep_within_two_percent_at_4_bits(generator, family, codec):
    head = synthetic_head(family, num_tokens=1024, generator=generator)
    # 16 equal steps over the range of 128 Gaussians (5.2 deviations, give or take 0.6) err by
    # (5.2 / 15)^2 / 12 = 0.010 of their variance; metadata of 8 bits widen that by 2 %. Rows of
    # outlier channels stay within the bar as the rotation spreads them. 16 levels for a Gaussian
    # err by 0.0097, and norms of a byte add a third of (2.2 %)^2.
    assert key_error(head, codec, is_stripped=True) < 0.02
    assert key_bits(codec, 128) <= 4.25


def test_without_stripping_a_large_bias_ruins_its_keys(generator):
    head = synthetic_head("qwen2.5", num_tokens=512, generator=generator)
    assert abs(float(head.mean_key_D.norm()) - BIAS_NORM) < 30
    assert key_error(head, "int4", is_stripped=False) > 1.0
    # Exact rows are exact either way; in BF16 a constant of 600 costs what 2^-9 of it does.
    assert key_error(head, "fp32", is_stripped=True) < 1e-6


def test_lloyd_max_with_stripping_at_2_bits(generator):
    head = synthetic_head("qwen2.5", num_tokens=512, generator=generator)
    # A Gaussian loses D = 0.1175 (Max, 1960) under the norm of least squares, D / (1 - D) = 0.133
    # under the one that keeps scores unbiased. A norm and codes of each row's own take some 2 % of
    # that away, and the mean over 65,536 values moves by less than 0.002.
    assert key_error(head, "int2", is_stripped=True) == pytest.approx(0.131, abs=0.006)


def test_sinks_are_short_rows_that_the_mean_query_points_at(generator):
    head = synthetic_head("llama", num_tokens=64, num_sinks=1, generator=generator)
    # At position 0 nothing is turned; 2 sqrt(D) is made, and 0.1 of a random score comes on top.
    score = head.key_TD[0] @ _mean_query(head)
    assert float(score) == pytest.approx(2 * 128**0.5, rel=0.5)
    assert head.key_TD[0].norm() < head.key_TD[1:].norm(dim=-1).min()
    assert head.value_TD[0].norm() < head.value_TD[1:].norm(dim=-1).min()


def _mean_query(head):
    """The mean query before rotary embedding."""
    cos, sin = head.cos_sin_TD.chunk(2, dim=-1)
    first, second = head.query_TD.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).mean(dim=0)


def test_rotary_embedding_keeps_norms(generator):
    head = synthetic_head("qk_norm", num_tokens=100, head_dim=64, generator=generator)
    turned = head.turned_mean_TD.norm(dim=-1)
    assert torch.allclose(turned, head.mean_key_D.norm().expand(100), rtol=1e-5)


def test_families_are_listed():
    with pytest.raises(ConfigError, match=r"family: got 'gpt'; allowed: llama, qwen2\.5, qk_norm"):
        synthetic_head("gpt", num_tokens=4)
