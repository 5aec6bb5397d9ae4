"""Whole models with packed weights against the same models with those weights unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import config_values, load, refusal, tensors_of, write_folder

from conftest import assert_close
from subten.bench.quality import evaluate_kv
from subten.cache.pool import PagePool
from subten.core import ConfigError
from subten.engine.llm import LLM
from subten.kernels.step import make_step
from subten.kernels.weight_formats import Weight, packed_bytes
from subten.models import MODELS
from subten.models.decoder import Decoder
from subten.weights import LoadedModel, load_model

QUANTIZED = ["fp8", "int4"]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "vocab_size": 40,
}
"""int4 groups of 128 (qkv, gate_up, head) and of 64 (output, down)."""
SIZES_OF_PARTS = [17, 1]
"""More tokens than one launch takes, then one."""


def folder_of(
    architecture: str, generator: torch.Generator, path: Path, **changes: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    values = config_values(architecture, **SIZES, **changes)
    tensors = tensors_of(values, generator)
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and "embed" not in name:
            tensor *= tensor.shape[-1] ** -0.5
    return write_folder(path / "model", values, tensors), tensors


def unpacked(model: Decoder) -> Decoder:
    """The same model, every packed matrix replaced by the numbers that it stands for."""
    plain = Decoder(model.config, model.ops, model.fmt, device=model.device, dtype=model.dtype)
    packed = {name: m for name, m in model.named_modules() if isinstance(m, Weight)}
    state = {name: value for name, value in model.state_dict().items() if "codes" not in name}
    state = {name: value for name, value in state.items() if not name.endswith(".scale")}
    state |= {f"{name}.codes": weight.dequantize() for name, weight in packed.items()}
    plain.load_state_dict(state)
    return plain


@torch.inference_mode()
def logits_of(model: Decoder, sizes: list[int]) -> torch.Tensor:
    """Logits of every token of a prompt read in parts of `sizes`."""
    config = model.config
    pool = PagePool(config.num_layers, 1, config.num_kv_heads, model.fmt, model.device)
    parts, start = [], 0
    for size in sizes:
        token_ids = [(7 * i + 3) % config.vocab_size for i in range(start, start + size)]
        step = make_step(token_ids=[token_ids], starts=[start], page_ids=[[0]], device=model.device)
        parts.append(model(step, pool.pages_LPGB, all_rows=True))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("architecture", "quantization", "backend"),
    [
        *((architecture, name, "torch") for architecture in MODELS for name in QUANTIZED),
        # Under the interpreter: both formats, a dense and a routed network.
        pytest.param("LlamaForCausalLM", "fp8", "triton", marks=pytest.mark.triton),
        pytest.param("MixtralForCausalLM", "int4", "triton", marks=pytest.mark.triton),
    ],
)
def test_packed_weights_are_the_numbers_they_stand_for(
    architecture: str,
    quantization: str,
    backend: str,
    generator: torch.Generator,
    tmp_path: Path,
    device: torch.device,
) -> None:
    folder, _ = folder_of(architecture, generator, tmp_path)
    settings: dict[str, Any] = {"quantization": quantization, "device": device}
    actual = logits_of(load(folder, **settings, backend=backend).model, SIZES_OF_PARTS)
    expected = logits_of(unpacked(load(folder, **settings).model), SIZES_OF_PARTS)
    # Float32 on both sides: sums of at most 128 products of size 1, through two layers, of the
    # same numbers taken in another order: some 1e-6 each of logits of size 1.
    assert_close(actual, expected, 1e-4, 2e-5, f"{architecture} {quantization}")


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quantize_head", [False, True])
def test_what_is_packed_and_what_is_not(
    quantization: str,
    is_tied: bool,
    quantize_head: bool,
    generator: torch.Generator,
    tmp_path: Path,
) -> None:
    folder, tensors = folder_of(
        "MixtralForCausalLM", generator, tmp_path, tie_word_embeddings=is_tied
    )
    loaded = load(folder, quantization=quantization, quantize_head=quantize_head)
    model = loaded.model
    is_head_packed = quantize_head and not is_tied
    packed = {
        name: m.format
        for name, m in model.named_modules()
        if isinstance(m, Weight) and m.format != "none"
    }
    layer = ("attention.qkv.weight", "attention.output.weight", "ffn.gate_up_EFD", "ffn.down_EDF")
    names = [f"layers.{i}.{part}" for i in range(2) for part in layer]
    assert packed == dict.fromkeys([*names, *(["head_VD"] if is_head_packed else [])], quantization)
    num_bytes = 0
    for name, tensor in tensors.items():
        is_plain = tensor.dim() == 1 or "embed" in name or ".gate." in name
        is_plain |= name == "lm_head.weight" and not is_head_packed
        rows, num_in = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
        kept = "none" if is_plain else quantization
        num_bytes += packed_bytes(kept, rows, num_in, itemsize=4)
    assert loaded.weight_bytes == num_bytes
    assert loaded.quantization == quantization
    expert = tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    stored = model.layers[1].ffn.gate_up_EFD.dequantize((2, slice(64, 128)))
    # A step of int4 is an eighth of the largest weight of a group, and the search may widen it.
    assert (stored - expert).abs().max() < 0.3 * expert.abs().max()
    assert torch.equal(Weight.of(expert, quantization).dequantize(), stored)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_nan_is_refused_by_the_tensor_s_name(
    quantization: str, generator: torch.Generator, tmp_path: Path
) -> None:
    folder, tensors = folder_of("LlamaForCausalLM", generator, tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][3, 5] = torch.nan
    write_folder(folder, config_values("LlamaForCausalLM", **SIZES), tensors)
    message = refusal(folder, quantization=quantization)
    assert message.endswith(
        f"model.safetensors: {name}: got a NaN or an infinity; allowed: finite weights where they "
        "are quantised"
    )


def test_inputs_that_int4_cannot_take_are_refused(
    generator: torch.Generator, tmp_path: Path
) -> None:
    values = config_values("LlamaForCausalLM", **{**SIZES, "intermediate_size": 40})
    folder = write_folder(tmp_path / "model", values, tensors_of(values, generator))
    message = refusal(folder, ConfigError, quantization="int4")
    assert message.startswith("quantization: got int4 for down of 40 inputs; allowed: none, fp8,")
    load(folder, quantization="fp8")
    message = refusal(folder, ConfigError, quantization="int3")
    assert message == "quantization: got 'int3'; allowed: none, fp8, int4"


def of_engine(folder: Path, quantization: str) -> LoadedModel:
    return load_model(
        str(folder),
        device=torch.device("cpu"),
        dtype="float32",
        backend="torch",
        kv_cache_dtype="bf16",
        quantization=quantization,
    )


def test_the_engine_passes_it_on(generator: torch.Generator, tmp_path: Path) -> None:
    folder, _ = folder_of("MixtralForCausalLM", generator, tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_kv_cache_bytes": 2**20}
    plain = LLM(folder, **settings)
    llm = LLM(folder, **settings, quantization="int4", quantize_head=False)
    assert llm.loaded.quantization == "int4"
    assert llm.loaded.model.head_VD.format == "none"
    assert llm.loaded.weight_bytes < 0.6 * plain.loaded.weight_bytes
    assert len(llm.generate([1, 2, 3])[0].token_ids) > 0
    with pytest.raises(ConfigError, match="quantization: got 'none'; allowed: int4, for which"):
        LLM(llm.loaded, **settings)
    with pytest.raises(ConfigError, match="quantization: got 'int8'; allowed: none, fp8, int4"):
        LLM(folder, quantization="int8")


def test_quality_is_of_the_packed_against_the_plain_weights(
    generator: torch.Generator, tmp_path: Path
) -> None:
    folder, _ = folder_of("MixtralForCausalLM", generator, tmp_path)
    plain, packed = (of_engine(folder, name).model for name in ("none", "int4"))
    token_ids = torch.randint(40, (40,), generator=generator).tolist()
    settings: dict[str, Any] = {"codecs": ["bf16", "int4"], "window": 40}
    both = evaluate_kv(packed, token_ids, reference=plain, **settings)
    alone = evaluate_kv(packed, token_ids, **settings)
    unquantised = evaluate_kv(plain, token_ids, **settings)
    assert [row.kv_cache_dtype for row in both] == ["bf16", "int4"]
    # The same model reads the same text: perplexity does not depend on what it is compared with.
    assert [row.perplexity for row in both] == [row.perplexity for row in alone]
    assert alone[0].kld_mean == 0.0 < both[0].kld_mean
    ratio = both[0].perplexity / unquantised[0].perplexity
    assert both[0].perplexity_ratio == pytest.approx(ratio, rel=1e-9)
