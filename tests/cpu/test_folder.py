"""Folders of shards: what is missing, too many or outside is named; nothing in them runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import (
    Tiny,
    config_values,
    encode,
    llama_checkpoint,
    load,
    pickled_canary,
    read_index,
    refusal,
    write_folder,
    write_index,
    write_shards,
)


@pytest.fixture
def llama(generator: torch.Generator) -> Tiny:
    return llama_checkpoint(generator)


@pytest.fixture
def shards(llama: Tiny, tmp_path: Path) -> Path:
    return write_shards(tmp_path / "m", *llama)


def test_missing_shard_is_named(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    message = refusal(shards)
    assert "missing shards: model-00002-of-00002.safetensors (1 of 2)" in message


def test_tensor_missing_from_its_shard_is_named(shards: Path, llama: Tiny) -> None:
    file = "model-00002-of-00002.safetensors"
    names = [name for name, shard in read_index(shards).items() if shard == file]
    (shards / file).write_bytes(encode({name: llama[1][name] for name in names[1:]}))
    message = refusal(shards)
    assert file in message and f"missing tensors that the index puts there: {names[0]}" in message


def test_index_that_names_a_tensor_too_many(shards: Path) -> None:
    extra = {"model.extra": "model-00001-of-00002.safetensors"}
    write_index(shards, read_index(shards) | extra)
    assert "the index puts there: model.extra" in refusal(shards)


def test_tensor_that_the_index_does_not_name(shards: Path) -> None:
    index = read_index(shards)
    del index["model.norm.weight"]
    write_index(shards, index)
    assert "does not put there: model.norm.weight" in refusal(shards)


@pytest.mark.parametrize(
    "file",
    [
        "../m/model-00001-of-00002.safetensors",
        "/etc/passwd",
        "..",
        "a\\b.safetensors",
        "pytorch_model.bin",
        "a\0.safetensors",
        7,
        None,
    ],
)
def test_index_stays_in_its_folder(shards: Path, file: Any) -> None:
    write_index(shards, read_index(shards) | {"model.norm.weight": file})
    assert "model.norm.weight: got file " in refusal(shards)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(shards: Path, weight_map: Any) -> None:
    write_index(shards, weight_map)
    assert "weight_map" in refusal(shards)


def test_shards_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    assert "but no index; wanted model.safetensors" in refusal(shards)


def test_single_file_beside_an_index(shards: Path) -> None:
    (shards / "model.safetensors").write_bytes(encode({}))
    assert "holds both" in refusal(shards)


def test_folder_without_a_model(tmp_path: Path) -> None:
    assert "config.json: no such file" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json: file: got a list" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: file is not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_values("LlamaForCausalLM")))
    assert "found no weights" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "m.pkl"])
def test_pickled_weights_are_refused_by_name(file: str, llama: Tiny, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", *llama)
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(pickled_canary(tmp_path / "ran"))
    message = refusal(folder)
    assert file in message and "never opened" in message
    assert not (tmp_path / "ran").exists()


def test_code_beside_the_weights_never_runs(llama: Tiny, tmp_path: Path) -> None:
    values, tensors = llama
    values |= {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "trust_remote_code": True}
    folder = write_folder(tmp_path / "m", values, tensors)
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    load(folder)
    assert not (tmp_path / "ran").exists()
    files = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
    assert not any(file.startswith(str(folder)) for file in files)
