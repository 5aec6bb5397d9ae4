"""Loading: incomplete and contradictory checkpoints are refused by name before they run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import (
    CPU,
    DTYPE_NAMES,
    Tiny,
    config_values,
    llama_checkpoint,
    load,
    refusal,
    tensors_of,
    write_folder,
    write_shards,
)
from tiny_llama import TinyShape, hf_tensors, write_gguf

from subten.codecs import kv_format
from subten.core import ConfigError
from subten.kernels import select_ops
from subten.models import MODELS, read_config
from subten.models.decoder import Decoder
from subten.weights import hub
from subten.weights.gguf import read_gguf


@pytest.fixture
def llama(generator: torch.Generator) -> Tiny:
    return llama_checkpoint(generator)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_slots_cover_every_weight_once(architecture: str, is_tied: bool) -> None:
    has_bias = architecture != "MixtralForCausalLM"
    changes = {"tie_word_embeddings": is_tied, "attention_bias": has_bias}
    family, config = read_config(config_values(architecture, **changes), source="test")
    decoder = Decoder(
        config, select_ops("torch", CPU), kv_format("fp32", 18), device=CPU, dtype=torch.float32
    )
    parameters = {
        name.removesuffix(".codes"): parameter for name, parameter in decoder.named_parameters()
    }
    for parameter in parameters.values():
        parameter.zero_()
    for slot in family.weight_map(config).values():
        target = parameters[slot.parameter]
        if slot.expert is not None:
            target = target[slot.expert]
        if slot.rows is not None:
            target = target[slot.rows[0] : slot.rows[1]]
        assert target.shape == slot.shape
        target += 1
    for name, parameter in parameters.items():
        assert bool((parameter == 1).all()), name


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("write", [write_folder, write_shards])
def test_weights_arrive_bit_for_bit(
    architecture: str,
    write: Callable[[Path, dict[str, Any], dict[str, torch.Tensor]], Path],
    generator: torch.Generator,
    tmp_path: Path,
) -> None:
    values = config_values(architecture)
    tensors = tensors_of(values, generator)
    loaded = load(write(tmp_path / "m", values, tensors))
    layer = loaded.model.layers[1]
    attention = layer.attention
    name = "model.layers.1.self_attn"
    qkv = [tensors[f"{name}.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(attention.qkv.weight.codes, torch.cat(qkv))
    assert torch.equal(attention.output.weight.codes, tensors[f"{name}.o_proj.weight"])
    assert torch.equal(loaded.model.embedding_VD, tensors["model.embed_tokens.weight"])
    assert torch.equal(loaded.model.head_VD.codes, tensors["lm_head.weight"])
    if architecture == "MixtralForCausalLM":
        expert = "model.layers.1.block_sparse_moe.experts.2"
        gate_up = [tensors[f"{expert}.{part}.weight"] for part in ("w1", "w3")]
        assert torch.equal(layer.ffn.gate_up_EFD.codes[2], torch.cat(gate_up))
        assert torch.equal(layer.ffn.down_EDF.codes[2], tensors[f"{expert}.w2.weight"])
    num_bytes = sum(tensor.numel() for tensor in tensors.values()) * 4
    assert loaded.weight_bytes == num_bytes


def test_progress_ends_at_the_number_of_weights(llama: Tiny, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = write_folder(tmp_path / "m", *llama)
    load(folder, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.numel() for tensor in llama[1].values())
    assert calls[-1] == (total, total) and len(calls) == len(llama[1])
    assert calls == sorted(calls)


# Names, shapes and dtypes.


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlamaForCausalLM", "model.norm.weight"),
        ("LlamaForCausalLM", "model.layers.1.self_attn.v_proj.weight"),
        ("MixtralForCausalLM", "model.layers.0.block_sparse_moe.experts.2.w3.weight"),
        ("Qwen3MoeForCausalLM", "model.layers.1.self_attn.k_norm.weight"),
        ("Qwen3MoeForCausalLM", "model.layers.1.mlp.gate.weight"),
    ],
)
def test_missing_tensor_is_named(
    architecture: str, name: str, generator: torch.Generator, tmp_path: Path
) -> None:
    values = config_values(architecture)
    tensors = tensors_of(values, generator)
    del tensors[name]
    message = refusal(write_folder(tmp_path / "m", values, tensors))
    assert f"1 of {len(tensors) + 1} tensors are missing: {name}" in message


def test_many_missing_tensors_are_counted(llama: Tiny, tmp_path: Path) -> None:
    values, tensors = llama
    kept = {name: tensor for name, tensor in tensors.items() if "layers" not in name}
    assert "18 of 21 tensors are missing" in refusal(write_folder(tmp_path / "m", values, kept))


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "lm_head.bias", "model.layers.0.self_attn.sinks"]
)
def test_extra_tensor_is_named(name: str, llama: Tiny, tmp_path: Path) -> None:
    values, tensors = llama
    folder = write_folder(tmp_path / "m", values, tensors | {name: torch.zeros(13)})
    message = refusal(folder)
    assert name in message and "does not have" in message


def test_rotary_buffers_of_old_checkpoints_are_harmless(llama: Tiny, tmp_path: Path) -> None:
    values, tensors = llama
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    load(write_folder(tmp_path / "m", values, tensors | old))


def test_wrong_shape_is_named(llama: Tiny, tmp_path: Path) -> None:
    values, tensors = llama
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    message = refusal(write_folder(tmp_path / "m", values, tensors))
    assert f"{name}: shape: got [7, 20], wanted [20, 7]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_wrong_dtype_is_named(dtype: torch.dtype, llama: Tiny, tmp_path: Path) -> None:
    values, tensors = llama
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    message = refusal(write_folder(tmp_path / "m", values, tensors))
    assert f"model.norm.weight: dtype: got {DTYPE_NAMES[dtype]}, wanted" in message


# Heads, dtypes, end tokens, settings.


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tie_flag_and_head(
    is_tied: bool,
    head: str,
    llama: Tiny,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values, tensors = llama
    values["tie_word_embeddings"] = is_tied
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = write_folder(tmp_path / "m", values, tensors)
    if head == "absent" and not is_tied:
        message = refusal(folder)
        assert "tie_word_embeddings" in message and "lm_head.weight" in message
        return
    with caplog.at_level(logging.WARNING):
        loaded = load(folder)
    has_own_head = not is_tied or head == "different"
    assert loaded.config.tie_word_embeddings is not has_own_head
    assert (loaded.model.head_VD is not None) is has_own_head
    if has_own_head:
        assert torch.equal(loaded.model.head_VD.codes, tensors["lm_head.weight"])
    assert ("differs from the embedding" in caplog.text) is (is_tied and head == "different")


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.float32),
    ],
)
def test_no_dtype_narrows_the_exponent_range(
    source: torch.dtype,
    dtype: str,
    expected: torch.dtype,
    llama: Tiny,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values, tensors = llama
    scale = 1e5 if source != torch.float16 else 6e4
    tensors["model.norm.weight"] = torch.linspace(-scale, 1e-6, 20)
    tensors = {name: tensor.to(source) for name, tensor in tensors.items()}
    with caplog.at_level(logging.INFO):
        loaded = load(write_folder(tmp_path / "m", values, tensors), dtype=dtype)
    norm_D = loaded.model.norm_D
    assert loaded.dtype == norm_D.dtype == expected
    assert torch.equal(norm_D, tensors["model.norm.weight"].to(expected))
    assert bool(norm_D.isfinite().all()) and float(norm_D.abs().max()) > 0.99 * scale
    assert caplog.text.count(f"of weights in {str(expected)[6:]}") == 1


def test_router_stays_float32(generator: torch.Generator, tmp_path: Path) -> None:
    values = config_values("MixtralForCausalLM")
    tensors = tensors_of(values, generator)
    loaded = load(write_folder(tmp_path / "m", values, tensors), dtype="bfloat16")
    gate = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    assert torch.equal(loaded.model.layers[0].ffn.gate_ED, gate)


def test_end_tokens_unite_both_configs(llama: Tiny, tmp_path: Path) -> None:
    values, tensors = llama
    folder = write_folder(tmp_path / "m", values | {"eos_token_id": 3}, tensors)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert load(folder).config.eos_token_ids == (3, 5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 13}')
    message = refusal(folder)
    assert "generation_config.json: eos_token_id: got 13" in message


@pytest.mark.parametrize(
    ("setting", "value", "kind"),
    [
        ("dtype", "float16", ConfigError),
        ("backend", "tritonn", ConfigError),
        ("kv_cache_dtype", "int5", ConfigError),
        ("kv_cache_dtype", "int4", ConfigError),  # rotation needs a head_dim that 16 divides
        ("max_model_len", 129, ConfigError),
        ("max_model_len", 0, ConfigError),
    ],
)
def test_bad_setting_is_named(
    setting: str,
    value: Any,
    kind: type[Exception],
    llama: Tiny,
    tmp_path: Path,
) -> None:
    message = refusal(write_folder(tmp_path / "m", *llama), kind, **{setting: value})
    assert setting in message and str(value) in message


def test_max_model_len_shortens_the_rotary_table(llama: Tiny, tmp_path: Path) -> None:
    loaded = load(write_folder(tmp_path / "m", *llama), max_model_len=65)
    assert loaded.config.max_model_len == 65
    assert loaded.model.cos_sin_PD.shape == (65, 18)


# Where models come from.


@pytest.mark.parametrize(
    "name",
    [
        "x" * 5000,
        "~no-such-user/m",
        "a\0b",
        "no-such-model",
        "./no/such",
        "/no/such",
        "~/no-such",
        "a/b/c",
        "a/..",
        "",
        "x.safetensors",
    ],
)
def test_unknown_model_is_named_with_what_is_allowed(name: str) -> None:
    message = refusal(name)
    assert repr(name) in message and "allowed: a folder" in message


def test_gguf_and_folder_of_the_same_model_load_alike(tmp_path: Path) -> None:
    shape = TinyShape(is_tied=False)
    tensors = hf_tensors(shape)
    from_gguf = load(write_gguf(tmp_path / "m.gguf", shape, tensors))
    values = read_gguf(tmp_path / "m.gguf").config | {"eos_token_id": 2}
    from_folder = load(write_folder(tmp_path / "m", values, tensors))
    assert from_gguf.config == from_folder.config
    assert from_gguf.tokenizer is not None
    assert from_gguf.tokenizer.eos_token_ids == from_gguf.config.eos_token_ids == (2,)
    other = from_folder.model.state_dict()
    for name, weight in from_gguf.model.state_dict().items():
        assert torch.equal(weight, other[name]), name


def test_missing_gguf_is_named() -> None:
    assert "no-such.gguf" in refusal("no-such.gguf")


def test_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    assert "allowed: a .gguf file" in refusal(tmp_path / "weights.bin")


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HFValidationError", "refused it: reason"),
        ("OSError", "refused it: reason"),
    ],
)
def test_hub_failure_is_one_line(failure: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_module = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")
    error = OSError if failure == "OSError" else getattr(errors, failure)

    def fail(*_args: Any, **_kwargs: Any) -> str:
        raise error("reason\nmore")

    monkeypatch.setattr(hub_module, "snapshot_download", fail)
    message = refusal("owner/name")
    assert "'owner/name'" in message and text in message


def test_hub_name_loads_from_the_downloaded_folder(
    llama: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_folder(tmp_path / "m", *llama)
    monkeypatch.setattr(hub, "download", lambda _: folder)
    assert load("owner/name").name == "owner/name"
