"""The traffic formula against numbers worked out by hand for public shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from subten.bench import plan
from subten.bench.shapes import SHAPES, get_shape
from subten.codecs import kv_format
from subten.core import ConfigError
from subten.kernels import select_ops
from subten.kernels.weight_formats import WEIGHT_FORMATS
from subten.models.decoder import Decoder

MIXTRAL, QWEN3 = SHAPES["mixtral-8x7b"], SHAPES["qwen3-30b-a3b"]


def plan_of(config, bits=16.0, **workload):
    return plan.make_plan(
        config, plan.Workload(**workload), kv_cache_dtype="test", kv_true_bits=bits
    )


@pytest.mark.parametrize(
    ("config", "quantization", "gigabytes"),
    [
        (MIXTRAL, "none", 25.50),
        (MIXTRAL, "fp8", 12.76),
        (MIXTRAL, "int4", 6.58),
        (QWEN3, "none", 6.11),
        (QWEN3, "fp8", 3.09),
        (QWEN3, "int4", 1.61),
    ],
)
def test_weights_of_one_token(config, quantization, gigabytes):
    read = plan.weight_bytes_read(config, 1, quantization) / 1e9
    # The table is rounded to 0.01 GB and leaves the norms out (at most 0.6 MB).
    assert abs(read - gigabytes) <= 0.005 + 0.001


@pytest.mark.parametrize(
    ("config", "bits", "num_bytes"),
    [
        (MIXTRAL, 16, 131072),
        (MIXTRAL, 4.5, 36864),
        (MIXTRAL, 2.5, 20480),
        (QWEN3, 16, 98304),
        (QWEN3, 4.5, 27648),
        (QWEN3, 2.5, 15360),
        # The 70B example: FP16, 10 GiB at 32k, not 1.2 GB.
        (SHAPES["llama-3-70b"], 16, 327680),
    ],
)
def test_kv_bytes_of_one_token(config, bits, num_bytes):
    assert plan.kv_bytes_per_token(config, bits) == num_bytes


def test_the_70b_example_takes_ten_gibibytes_at_32k():
    result = plan_of(SHAPES["llama-3-70b"], context_len=32768)
    assert result.kv_bytes_per_context == 10 * 2**30


@pytest.mark.parametrize(
    ("config", "quantization", "bits", "floors_ms"),
    [
        (MIXTRAL, "none", 16, (5.96, 6.18, 6.93, 9.93)),
        (MIXTRAL, "fp8", 4.5, (2.98, 3.04, 3.25, 4.09)),
        (MIXTRAL, "int4", 2.5, (1.53, 1.57, 1.69, 2.15)),
        (QWEN3, "none", 16, (1.44, 1.60, 2.16, 4.41)),
        (QWEN3, "fp8", 4.5, (0.72, 0.76, 0.92, 1.55)),
        (QWEN3, "int4", 2.5, (0.37, 0.40, 0.49, 0.84)),
    ],
)
def test_floor_of_one_token(config, quantization, bits, floors_ms):
    for context, floor in zip((1024, 8192, 32768, 131072), floors_ms, strict=True):
        got = plan_of(
            config, bits, context_len=context, quantization=quantization, bandwidth_tbps=4.3
        ).floor_ms
        # Each entry is rounded to 0.01 ms, and so are the two parts that some are the sum of.
        assert abs(got - floor) <= 0.011, (context, got, floor)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "expected"),
    [
        (128, 8, {1: 8, 2: 15.5, 4: 29, 8: 52, 16: 82, 32: 112, 64: 126}),
        (8, 2, {1: 2, 2: 3.5, 4: 5.5, 8: 7.2, 16: 7.9, 32: 8, 64: 8}),
    ],
)
def test_experts_touched_by_a_batch(num_experts, top_k, expected):
    for batch_size, touched in expected.items():
        got = plan.experts_touched(num_experts, top_k, batch_size)
        # Written with two or three figures: half a unit of the last one.
        assert abs(got - touched) <= (0.5 if touched > 20 else 0.05), (batch_size, got)


def test_a_dense_model_reads_its_ffn_once_whatever_the_batch():
    dense = SHAPES["llama-3-70b"]
    one, many = plan.weight_bytes_read(dense, 1), plan.weight_bytes_read(dense, 64)
    assert many - one == 63 * dense.d_model * 2  # one embedding row for each further token
    # 70.6 B parameters less the embedding, 2 bytes each.
    assert math.isclose(one, (70.55e9 - dense.d_model * dense.vocab_size) * 2, rel_tol=1e-3)


def test_tied_embedding_is_held_once_and_still_read_as_the_head():
    tied = replace(QWEN3, tie_word_embeddings=True)
    table_bytes = QWEN3.d_model * QWEN3.vocab_size * 2
    assert plan.weight_bytes_held(QWEN3) - plan.weight_bytes_held(tied) == table_bytes
    assert plan.weight_bytes_read(QWEN3, 1) == plan.weight_bytes_read(tied, 1)


def test_held_parameters_are_the_published_ones():
    assert math.isclose(plan.weight_bytes_held(MIXTRAL) / 2, 46.70e9, rel_tol=1e-3)
    assert math.isclose(plan.weight_bytes_held(QWEN3) / 2, 30.53e9, rel_tol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_held_bytes_are_those_of_the_model(shape, quantization, is_tied):
    config = replace(SHAPES[shape], tie_word_embeddings=is_tied, max_model_len=64)
    meta = torch.device("meta")
    ops, fmt = select_ops("torch", torch.device("cpu")), kv_format("bf16", config.head_dim)
    model = Decoder(config, ops, fmt, device=meta, dtype=torch.bfloat16, quantization=quantization)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.weight_bytes_held(config, quantization) == held


def test_int4_of_inputs_that_it_cannot_take_is_refused():
    odd = replace(MIXTRAL, d_ffn=1000)
    with pytest.raises(ConfigError, match="quantization: got int4 for down of 1000 inputs"):
        plan_of(odd, context_len=1, quantization="int4")


def test_the_cache_is_held_in_whole_pages_and_decides_what_fits():
    one, page, past = (plan_of(QWEN3, context_len=n) for n in (1, 64, 65))
    assert one.kv_bytes == page.kv_bytes == 64 * 98304
    assert past.kv_bytes == 128 * 98304
    needed = page.weight_bytes + page.kv_bytes
    assert plan_of(QWEN3, context_len=64, memory_bytes=needed / 0.9 + 1).is_fitting
    assert not plan_of(QWEN3, context_len=65, memory_bytes=needed / 0.9 + 1).is_fitting


def test_a_batch_shares_weights_and_not_cache():
    one, four = (plan_of(MIXTRAL, context_len=8192, batch_size=n) for n in (1, 4))
    assert four.kv_bytes_per_step == 4 * one.kv_bytes_per_step
    assert one.weight_bytes_per_step < four.weight_bytes_per_step < 4 * one.weight_bytes_per_step
    assert four.bytes_per_token < one.bytes_per_token


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_len", 0),
        ("batch_size", -1),
        ("quantization", "int3"),
        ("bandwidth_tbps", 0.0),
        ("bandwidth_tbps", math.nan),
        ("memory_bytes", math.inf),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"{field}: got {value!r}; allowed: "):
        plan.Workload(**{"context_len": 1, field: value})


def test_an_unknown_shape_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"shape: got 'gpt-9'; allowed: mixtral-8x7b, qwen3"):
        get_shape("gpt-9")
