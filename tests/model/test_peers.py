"""The script that measures transformers runs at a tiny shape, without compiling."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def load_script() -> Any:
    pytest.importorskip("transformers")
    path = ROOT / "benchmarks" / "peers" / "transformers_decode.py"
    spec = importlib.util.spec_from_file_location("transformers_decode", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shape", ["tiny-mixtral", "tiny-qwen3"])
def test_a_record_of_transformers(shape, device, tmp_path, monkeypatch):
    script, out = load_script(), tmp_path / "peers.json"
    monkeypatch.setattr("subten.bench.roof.CPU_BYTES", 2**20)
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
