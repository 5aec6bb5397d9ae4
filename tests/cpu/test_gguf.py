"""Reading Llama-type GGUF files: config, tensors in Hugging Face order, refusals by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tiny_llama import (
    ROPE_THETA,
    TinyShape,
    dense_model,
    gguf_name,
    hf_model,
    hf_tensors,
    write_gguf,
)

from subten.core import CheckpointError
from subten.train.evaluate import dense_state, logits
from subten.weights.gguf import read_gguf

SHAPES = [
    TinyShape(),
    TinyShape(layers=1, width=24, heads=3, kv_heads=1, head_dim=16, ffn=17),
    TinyShape(heads=2, kv_heads=2, head_dim=18, is_tied=False),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_come_back_in_hugging_face_order(tmp_path: Path, shape: TinyShape) -> None:
    tensors = hf_tensors(shape, seed=torch.seed() % 2**31)
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf", shape, tensors))
    found = dict(checkpoint.tensors())
    assert set(found) == set(tensors) == set(checkpoint.names)
    for name, expected in tensors.items():
        assert torch.equal(found[name], expected), name
        assert checkpoint.shape(name) == tuple(expected.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_the_transformers_library(tmp_path: Path, shape: TinyShape) -> None:
    tensors = hf_tensors(shape, seed=torch.seed() % 2**31)
    model = dense_model(write_gguf(tmp_path / "m.gguf", shape, tensors))
    id_BS = torch.randint(0, model.config.vocab_size, (3, 37))
    with torch.no_grad():
        expected = hf_model(shape, tensors)(id_BS).logits
        got = logits(model, dense_state(model)(id_BS).flatten(0, 1)).view_as(expected)
    # fp32 with other summation orders through 2 layers: about 1e-6 of the largest logit; rows of
    # q and k in the file's order differ by more than 0.1 here.
    assert (got - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [(gguf.GGMLQuantizationType.Q4_1, 4), (gguf.GGMLQuantizationType.Q8_0, 8)],
)
def test_packed_types_are_dequantised(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, bits: int
) -> None:
    shape = TinyShape(width=64, heads=2, kv_heads=1, head_dim=32, ffn=96)
    tensors = hf_tensors(shape, seed=torch.seed() % 2**31)
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf", shape, tensors, quantize=kind))
    for name, expected in tensors.items():
        blocks = expected.view(-1, 32) if expected.ndim == 2 else expected.view(1, -1)
        # Half a step of the block's range, and a little for scale and minimum in float16.
        step = (blocks.amax(-1) - blocks.amin(-1)).clamp(min=2 * blocks.abs().amax(-1)) / (
            2**bits - 2
        )
        bound = (0.5 * step + 2e-3 * blocks.abs().amax(-1))[:, None].expand_as(blocks)
        error = (checkpoint.tensor(name) - expected).abs().view_as(blocks)
        assert (error <= bound).all(), name


def test_config_has_the_keys_of_llama(tmp_path: Path) -> None:
    shape = TinyShape(is_tied=False)
    config = read_gguf(write_gguf(tmp_path / "m.gguf", shape, hf_tensors(shape))).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["head_dim"], config["hidden_size"], config["intermediate_size"]) == (16, 32, 48)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == ROPE_THETA
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == 2


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    shape = TinyShape()
    path = write_gguf(tmp_path / "m.gguf", shape, hf_tensors(shape), drop=name)
    with pytest.raises(CheckpointError, match=gguf_name(name).replace(".", r"\.")):
        read_gguf(path)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    shape = TinyShape()
    path = write_gguf(tmp_path / "m.gguf", shape, hf_tensors(shape), extra="rope_freqs.weight")
    with pytest.raises(CheckpointError, match=r"unknown tensors: rope_freqs\.weight"):
        read_gguf(path)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    shape, name = TinyShape(), "model.layers.0.mlp.up_proj.weight"
    tensors = hf_tensors(shape)
    tensors[name] = tensors[name][:-1].contiguous()
    path = write_gguf(tmp_path / "m.gguf", shape, tensors)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight.*\[47, 32\].*\[48, 32\]"):
        read_gguf(path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    shape = TinyShape()
    path = write_gguf(tmp_path / "m.gguf", shape, hf_tensors(shape), arch="qwen2")
    with pytest.raises(CheckpointError, match="qwen2"):
        read_gguf(path)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    shape = TinyShape()
    whole = write_gguf(tmp_path / "m.gguf", shape, hf_tensors(shape)).read_bytes()
    cuts = [0, 3, 20, 500, len(whole) // 2, len(whole) - 100]
    for cut in cuts:
        path = tmp_path / f"cut{cut}.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=path.name):
            read_gguf(path)
    path = tmp_path / "text.gguf"
    path.write_text("this is no model" * 100)
    with pytest.raises(CheckpointError, match=r"text\.gguf"):
        read_gguf(path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_gguf(tmp_path / "absent.gguf")
