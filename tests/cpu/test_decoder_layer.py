"""Layers whose experts are chosen beside the output product: when, of which weights, and the same.

The op that chooses stands in for the CUDA kernel (`routed_ahead`); all else is torch.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeStream
from routed_ahead import Ahead, ahead_ops
from tiny_checkpoint import config_values, tensors_of, write_folder

from conftest import assert_close
from subten.bench.quality import with_format
from subten.bench.random_model import random_decoder
from subten.bench.shapes import get_shape
from subten.cache.pool import PagePool
from subten.codecs import kv_format
from subten.codecs.adaptive import cache_format
from subten.config import ModelConfig
from subten.core import SamplingParams
from subten.engine.graph_inputs import CaptureError, capture_cuda_graph
from subten.engine.llm import LLM
from subten.kernels import beside as beside_module
from subten.kernels import select_ops
from subten.kernels.beside import Beside
from subten.kernels.cuda.linear_route import can_route_ahead
from subten.kernels.linear_route import fold_router
from subten.kernels.step import make_step
from subten.kernels.weight_formats import Weight
from subten.layers import block as block_module
from subten.layers import decoder_layer
from subten.layers.block import FusedMoEQuantizedAttention
from subten.models import read_config
from subten.models.decoder import Decoder
from subten.weights import load
from subten.weights.load import LoadedModel

CPU = torch.device("cpu")
VALUES = config_values(
    "MixtralForCausalLM",
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=20,
    num_local_experts=5,
    vocab_size=37,
)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    return ahead_ops(monkeypatch, CPU)


def fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        scale = 2 * parameter.shape[-1] ** -0.5
        parameter.data.copy_(1 + 0.3 * fresh if parameter.dim() == 1 else fresh * scale)


def make_decoder(
    ops: Any, generator: torch.Generator, codec: str = "fp32", **changes: Any
) -> Decoder:
    """Over exact pages, where a difference of 1e-7 does not grow to one of a BF16 key."""
    config: ModelConfig = replace(read_config(VALUES, source="test")[1], **changes)
    fmt = cache_format(codec, config.head_dim)
    model = Decoder(config, ops, fmt, device=CPU, dtype=torch.float32)
    fill(model, generator)
    model.fold_routers()
    return model


def plain_twin(model: Decoder) -> Decoder:
    """The same weights, no router folded."""
    twin = Decoder(model.config, select_ops("torch", CPU), model.fmt, device=CPU, dtype=model.dtype)
    twin.load_state_dict(model.state_dict())
    twin.fold_routers()
    assert all(layer.router is None for layer in layers(twin))
    return twin


def layers(model: Decoder) -> list[Any]:
    return list(model.layers)


@torch.inference_mode()
def logits(model: Decoder, sizes: list[int]) -> torch.Tensor:
    """Of every token of a text that comes in parts of `sizes`, over pages of NaN bytes."""
    config = model.config
    pool = PagePool(config.num_layers, 2, config.num_kv_heads, model.fmt, model.device)
    pool.pages_LPGB.fill_(0xFF)
    parts, start = [], 0
    for size in sizes:
        ids = [(7 * i + 3) % config.vocab_size for i in range(start, start + size)]
        step = make_step(token_ids=[ids], starts=[start], page_ids=[[1]], device=model.device)
        parts.append(model(step, pool.pages_LPGB, all_rows=True))
        start += size
    return torch.cat(parts)


def assert_folded_of_its_weights(layer: Any) -> None:
    wanted_EM = fold_router(layer.ffn.gate_ED, layer.ffn_norm_D, layer.attention.output.weight)
    assert torch.equal(layer.router.folded_EM, wanted_EM)
    assert layer.router.gate_ED.data_ptr() == layer.ffn.gate_ED.data_ptr()
    assert layer.router.norm_weight_D.data_ptr() == layer.ffn_norm_D.data_ptr()


def test_single_tokens_are_routed_ahead_and_nothing_else_changes(
    ahead: Ahead, generator: torch.Generator
) -> None:
    model = make_decoder(ahead.ops, generator)
    plain = plain_twin(model)
    # Several tokens at a time: the very same ops, so the very same bits.
    assert torch.equal(logits(model, [9, 2]), logits(plain, [9, 2]))
    assert ahead.routers == []
    got, wanted = logits(model, [6, 1, 1, 3, 1]), logits(plain, [6, 1, 1, 3, 1])
    assert len(ahead.routers) == 3 * len(layers(model))
    # float32 sums in another order: near 1e-6 of logits of about 1, through two layers.
    assert_close(got, wanted, max_error=1e-4, rms_error=2e-5)
    for layer, router in zip(layers(model), ahead.routers[-2:], strict=True):
        assert layer.router is router
        assert layer.ffn.topk_id_TK.shape == (1, 2)


def test_another_fold_would_show(ahead: Ahead, generator: torch.Generator) -> None:
    """What the test above compares depends on the folded router."""
    model = make_decoder(ahead.ops, generator)
    plain = plain_twin(model)
    for layer in layers(model):
        layer.router = replace(layer.router, folded_EM=layer.router.folded_EM.flip(0))
    assert (logits(model, [6, 1]) - logits(plain, [6, 1]))[-1].abs().max() > 1e-2


def test_routing_ahead_keeps_ids_for_who_counts_experts(
    ahead: Ahead, generator: torch.Generator
) -> None:
    model = make_decoder(ahead.ops, generator)
    plain = plain_twin(model)
    logits(model, [5, 1])
    logits(plain, [5, 1])
    for layer, other in zip(layers(model), layers(plain), strict=True):
        assert torch.equal(layer.ffn.topk_id_TK, other.ffn.topk_id_TK)


def test_adaptive_attention_is_routed_ahead_too(ahead: Ahead, generator: torch.Generator) -> None:
    model = make_decoder(ahead.ops, generator, codec="adaptive")
    seen: list[torch.Tensor] = []

    def sampled(logits_SV: torch.Tensor, *args: Any) -> Any:
        seen.append(logits_SV.clone())
        return model.ops.sample(logits_SV, *args)

    for decoder in (model, plain_twin(model)):
        loaded = LoadedModel(
            model=decoder,
            config=decoder.config,
            tokenizer=None,
            name="tiny",
            weight_bytes=0,
            dtype=torch.float32,
        )
        with LLM(loaded, kv_cache_dtype="adaptive", max_num_seqs=2, device="cpu") as llm:
            llm.engine.runner._sampler._sample = sampled
            # The prompt is read alike, and its token is the same; the next comes from one step.
            llm.generate([[3, 1, 4, 1, 5, 9]], SamplingParams(temperature=0.0, max_tokens=2))
    assert len(ahead.routers) == len(layers(model))
    first, second, plain_first, plain_second = seen
    assert torch.equal(first, plain_first)
    # A key or value of the second layer may round to the next BF16 number.
    assert_close(second, plain_second, max_error=2e-2, rms_error=5e-3)


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_layers_of_large_shapes_have_the_kernel(name: str, quantization: str) -> None:
    """All but those whose experts are so large that it does not pay."""
    config = replace(get_shape(name), num_layers=1, max_model_len=64)
    meta, dtype = torch.device("meta"), torch.bfloat16
    fmt, ops = kv_format("bf16", config.head_dim), select_ops("torch", CPU)
    (layer,) = layers(
        Decoder(config, ops, fmt, device=meta, dtype=dtype, quantization=quantization)
    )
    has_kernel = can_route_ahead(
        layer.attention.output.weight,
        layer.ffn.router(layer.ffn_norm_D),
        layer.ffn.gate_up_EFD,
        layer.ffn.down_EDF,
    )
    assert has_kernel == (name == "qwen3-30b-a3b" or quantization == "int4")


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-qwen3"])
def test_the_kernel_routes_single_tokens_ahead(
    name: str, quantization: str, device: torch.device
) -> None:
    model = random_decoder(get_shape(name), device=device, quantization=quantization)
    plain = with_format(model, model.fmt)
    for layer in layers(plain):
        assert layer.router is not None
        layer.router = None
    sizes = [6, 1, 1, 4, 1]
    got, wanted = logits(model, sizes), logits(plain, sizes)
    assert torch.equal(got, logits(model, sizes))
    assert torch.equal(got[:6], wanted[:6])
    for layer, other in zip(layers(model), layers(plain), strict=True):
        assert torch.equal(layer.ffn.topk_id_TK, other.ffn.topk_id_TK)
    # The experts' input is rounded to BF16 before the norm's factor instead of after it, 2^-9 of
    # each number in every layer; another expert would move logits by as much as they are.
    scale = float(wanted.std())
    assert_close(got, wanted, max_error=0.1 * scale, rms_error=0.03 * scale)


def test_what_has_no_such_kernel_is_not_folded(
    ahead: Ahead, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = make_decoder(ahead.ops, generator, num_experts=0, top_k=0)
    biased = make_decoder(ahead.ops, generator, has_qkv_bias=True)
    other_backend = make_decoder(select_ops("torch", CPU), generator)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(decoder_layer, "can_route_ahead", lambda *args: asked.append(args))
    unsuited = make_decoder(ahead.ops, generator)
    for model in (dense, biased, other_backend, unsuited):
        assert all(layer.router is None for layer in layers(model))
        assert logits(model, [3, 1]).isfinite().all()
        assert model.weight_bytes == sum(4 * p.numel() for p in model.parameters())
    assert ahead.routers == []
    output, router, gate_up, down = asked[0]
    layer = layers(unsuited)[0]
    assert (gate_up, down) == (layer.ffn.gate_up_EFD, layer.ffn.down_EDF)
    assert output is layer.attention.output.weight
    assert router == layer.ffn.router(layer.ffn_norm_D)
    assert (router.top_k, router.renormalize, router.eps) == (2, True, 1e-5)


@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_state_that_is_loaded_is_folded(
    is_assigned: bool, ahead: Ahead, generator: torch.Generator
) -> None:
    model, other = (make_decoder(ahead.ops, generator) for _ in range(2))
    before = [layer.router.folded_EM.clone() for layer in layers(model)]
    model.load_state_dict(other.state_dict(), assign=is_assigned)
    for layer, old_EM in zip(layers(model), before, strict=True):
        assert_folded_of_its_weights(layer)
        assert not torch.equal(layer.router.folded_EM, old_EM)
    assert torch.equal(logits(model, [4, 1]), logits(other, [4, 1]))
    # The fold follows from the weights, so it is no part of a state.
    assert not [name for name in model.state_dict() if "fold" in name or "router" in name]


def test_copies_have_their_own_or_share_it(ahead: Ahead, generator: torch.Generator) -> None:
    model = make_decoder(ahead.ops, generator)
    shared = with_format(model, kv_format("int4", model.config.head_dim))
    for layer, theirs in zip(layers(shared), layers(model), strict=True):
        assert layer.router is theirs.router
        assert_folded_of_its_weights(layer)
    separate = copy.deepcopy(model)
    layers(separate)[0].load_state_dict(layers(separate)[1].state_dict())
    assert_folded_of_its_weights(layers(separate)[0])
    assert_folded_of_its_weights(layers(model)[0])


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_a_random_model_is_folded_and_its_bytes_counted(
    quantization: str, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subten.bench.random_model.select_ops", lambda *_: ahead.ops)
    model = random_decoder(get_shape("tiny-qwen3"), device=CPU, quantization=quantization)
    for layer in layers(model):
        assert_folded_of_its_weights(layer)
    # 8 experts; 4 heads of 64 and a width of 128, in float32, for each of 3 layers.
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert model.weight_bytes == weights + 3 * 8 * (4 * 64 + 128) * 4


def test_a_loaded_model_is_folded(
    ahead: Ahead, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(load, "select_ops", lambda *_: ahead.ops)
    folder = write_folder(tmp_path / "tiny", VALUES, tensors_of(VALUES, generator))
    loaded = load.load_model(
        str(folder), device=CPU, dtype="float32", backend="torch", kv_cache_dtype="bf16"
    )
    for layer in layers(loaded.model):
        assert_folded_of_its_weights(layer)
    weights = sum(4 * p.numel() for p in loaded.model.parameters())
    assert loaded.weight_bytes == weights + 2 * 5 * (4 * 32 + 48) * 4


def test_a_block_follows_its_weights(
    ahead: Ahead, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "select_ops", lambda *_: ahead.ops)
    sizes = {"d_model": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "d_ffn": 20}
    shape = {**sizes, "num_experts": 5, "top_k": 2, "max_len": 64, "dtype": torch.float32}
    block = FusedMoEQuantizedAttention(**shape)
    assert block.layer.router is None

    def step() -> None:
        cache = block.new_cache(1)
        assert block(torch.randn(1, 1, 48, generator=generator), cache).isfinite().all()
        assert_folded_of_its_weights(block.layer)

    step()
    folded = block.layer.router
    step()
    assert block.layer.router is folded
    for parameter in (block.layer.ffn.gate_ED, block.layer.ffn_norm_D):
        parameter.mul_(1.5)
        step()
    block.layer.attention.output.weight.codes.neg_()
    step()
    other = FusedMoEQuantizedAttention(**shape)
    block.load_state_dict(other.state_dict())
    assert_folded_of_its_weights(block.layer)
    block.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    step()
    block.reset_parameters()
    step()


@pytest.mark.parametrize("where", ["experts", "unpack"])
@torch.inference_mode()
def test_a_layer_that_fails_leaves_no_other_stream_in_its_capture(
    where: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA could not end the capture, nor say why it failed."""
    cuda = FakeCuda(monkeypatch)
    side = FakeStream(cuda)
    error = torch.OutOfMemoryError("CUDA out of memory.")

    def fail(*_: Any, **__: Any) -> Any:
        if cuda.capturing is not None:
            raise error

    monkeypatch.setattr(beside_module, "_side_stream", lambda _: side)
    monkeypatch.setattr(beside_module, "num_sms", lambda _: 1)
    monkeypatch.setattr(
        beside_module, "unpack_rows", fail if where == "unpack" else lambda *_, **__: None
    )
    model = make_decoder(select_ops("torch", CPU), generator)
    layer = layers(model)[0]
    if where == "experts":
        monkeypatch.setattr(layer.ffn, "forward", fail)
    config = model.config
    pool = PagePool(1, 1, config.num_kv_heads, model.fmt, CPU)
    step = make_step(token_ids=[[1, 2, 3]], starts=[0], page_ids=[[0]], device=CPU)
    x_TD = torch.randn(3, config.d_model, generator=generator)
    weight = Weight.of(torch.randn(8, 64, generator=generator), "int4", search=False)

    def run() -> Any:
        return layer(
            x_TD,
            step,
            pages_PGB=pool.pages_LPGB[0],
            cos_sin_PD=model.cos_sin_PD,
            rotation_DD=model.rotation_DD,
            following=Beside([weight]) if cuda.capturing is not None else None,
        )

    with pytest.raises(CaptureError) as raised:
        capture_cuda_graph(run)
    assert raised.value.__cause__ is error
    assert cuda.capturing is None
    assert cuda.streams[0] in side.waited_for and side in cuda.streams[0].waited_for
