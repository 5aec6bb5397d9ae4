"""Tiny checkpoints of every family, written by hand: what the tests of loading share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from subten.core import CheckpointError
from subten.models import read_config
from subten.weights import LoadedModel, load_model

CPU = torch.device("cpu")
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.float64: "F64",
}

Tiny = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""config.json and tensors."""

BASE: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 7,
    "moe_intermediate_size": 7,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 13,
    "head_dim": 18,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def config_values(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **BASE, **changes}


def tensors_of(values: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    family, config = read_config(values, source="test")
    return {
        name: torch.randn(slot.shape, generator=generator)
        for name, slot in family.weight_map(config).items()
    }


def encode(tensors: dict[str, torch.Tensor], **extra_fields: Any) -> bytes:
    """A safetensors file, written by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        data += raw
    return frame(json.dumps(header | extra_fields).encode(), data)


def frame(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def write_folder(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(encode(tensors))
    return folder


def write_shards(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        (folder / file).write_bytes(encode({name: tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return dict(index["weight_map"])


def load(folder: Path | str, **changes: Any) -> LoadedModel:
    settings: dict[str, Any] = {
        "device": CPU,
        "dtype": "float32",
        "backend": "torch",
        "kv_cache_dtype": "fp32",
    }
    return load_model(str(folder), **(settings | changes))


def refusal(folder: Path | str, kind: type[Exception] = CheckpointError, **changes: Any) -> str:
    with pytest.raises(kind) as caught:
        load(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def llama_checkpoint(generator: torch.Generator) -> Tiny:
    """A Llama checkpoint with a head of its own."""
    values = config_values("LlamaForCausalLM")
    return values, tensors_of(values, generator)


def pickled_canary(path: Path) -> bytes:
    """A pickle, in its text protocol, that creates the file `path` when it is opened."""
    return f"cbuiltins\nopen\n(V{path}\nVw\ntR.".encode()
