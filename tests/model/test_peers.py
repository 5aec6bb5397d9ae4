"""The scripts that measure other engines run at a tiny shape."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


def load_script(name: str = "transformers_decode") -> Any:
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    path = ROOT / "benchmarks" / "peers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shape", ["tiny-mixtral", "tiny-qwen3"])
def test_a_record_of_transformers(shape, device, tmp_path, monkeypatch):
    script, out = load_script(), tmp_path / "peers.json"
    monkeypatch.setattr("subten.engine.roof.CPU_BYTES", 2**20)
    options = ["--shape", shape, "--context-len", "20", "--num-steps", "3", "--compile", "none"]
    script.main([*options, "--device", str(device), "--json", str(out)])
    (found,) = json.loads(out.read_text(encoding="utf-8"))
    assert found["engine"] == "transformers"
    assert (found["kind"], found["shape"], found["context_len"]) == ("peer_latency", shape, 20)
    assert found["version"]
    assert 0 < found["tpot_ms_p50"] <= found["tpot_ms_p99"]
    assert found["roof_fraction"] == found["floor_ms"] / found["tpot_ms_p50"]
    assert all(found[key] for key in ("date", "gpu", "torch", "command", "settings"))


def test_a_step_is_the_whole_forward_pass(device):
    """After three steps over an empty cache, the next token is that of the library's own pass."""
    script = load_script()
    model = script.build("tiny-qwen3", device=device, dtype=torch.float32, experts="eager")
    cache = script.full_cache(model, 8)
    script.set_length(cache, 0)
    step = script.make_step(model, cache, "none")
    prompt = [5, 300, 41]
    with torch.no_grad():
        for position, token in enumerate(prompt):
            token_11 = torch.tensor([[token]], device=device)
            got = step(token_11, torch.tensor([[position]], device=device))
        logits = model(input_ids=torch.tensor([prompt], device=device)).logits[0, -1]
    assert int(got) == int(logits.argmax())


@pytest.mark.parametrize("weights", ["q4_0", "q8_0", "bf16", "f16"])
@pytest.mark.parametrize("shape", ["tiny-mixtral", "tiny-qwen3"])
def test_a_file_for_llama_cpp(shape, weights, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    script, path = load_script("llama_cpp"), tmp_path / "tiny.gguf"
    monkeypatch.setattr(script, "RANDOM_BYTES", 2**14)
    config = script.SHAPES[shape]
    read_bytes = script.write_model(path, config, weights)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    asked = list(script.tensors(config, weights))
    assert len(found) == len(asked)
    total = 0.0
    for name, rows_first, kind in asked:
        tensor = found[name]
        assert tuple(tensor.shape) == rows_first[::-1]
        assert tensor.tensor_type.name == kind.upper()
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        assert 0 < np.abs(values).mean() < 0.1
        share = config.top_k / config.num_experts if "_exps" in name else 1.0
        total += tensor.n_bytes * (1 / rows_first[0] if name.startswith("token_embd") else share)
    assert read_bytes == pytest.approx(total)


def test_a_record_of_llama_cpp(tmp_path, monkeypatch):
    """The library is one that takes a file and tells the times it was made with."""
    script, out = load_script("llama_cpp"), tmp_path / "peers.json"
    monkeypatch.setattr("subten.engine.roof.CPU_BYTES", 2**20)
    monkeypatch.setattr(script, "RANDOM_BYTES", 2**14)
    asked = []

    class Model:
        def decode_times_ms(self, **kwargs):
            asked.append(kwargs)
            return [2.0, 3.0, 2.5]

        def close(self):
            asked.append("closed")

    class Library:
        def __init__(self, folder):
            assert folder == tmp_path

        def load(self, path):
            assert path.read_bytes()[:4] == b"GGUF"
            return Model()

    monkeypatch.setattr(script, "Library", Library)
    options = ["--libraries", str(tmp_path), "--shape", "tiny-qwen3", "--num-steps", "2"]
    options += ["--context-len", "20,40", "--kv-cache", "q4_0", "--folder", str(tmp_path)]
    script.main([*options, "--version", "abc", "--device", "cpu", "--json", str(out)])
    records = json.loads(out.read_text(encoding="utf-8"))
    assert [record["context_len"] for record in records] == [20, 40]
    assert [record["tpot_ms_p50"] for record in records] == [2.5, 2.5]
    assert all(record["version"] == "abc" for record in records)
    assert [call["kv_type"] for call in asked[:-1]] == [2, 2]
    assert asked[-1] == "closed"
    # 20 more tokens of 3 layers, 2 KV heads of 64 channels, K and V, 18 bytes for 32 values.
    more = records[1]["bytes_per_step"] - records[0]["bytes_per_step"]
    assert more == pytest.approx(20 * 3 * 2 * 64 * 2 * 18 / 32)
    assert [path.name for path in tmp_path.iterdir()] == ["peers.json"]


def test_a_folder_without_llama_cpp_is_refused(tmp_path):
    script = load_script("llama_cpp")
    with pytest.raises(SystemExit, match="libllama"):
        script.Library(tmp_path)
