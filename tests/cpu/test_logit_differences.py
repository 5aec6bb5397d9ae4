"""The measurement of logits against float32: near where nothing differs, and a fault is seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import TinyShape, hf_tensors, write_gguf

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import logit_differences

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are clearly likelier than the next."""
    shape = TinyShape()
    path = tmp_path_factory.mktemp("logits") / "tiny.gguf"
    return str(write_gguf(path, shape, hf_tensors(shape)))


def measure(model: str) -> dict[tuple[str, str], dict[str, Any]]:
    cases = logit_differences.measure(model, "cpu", NUM_TOKENS)
    return {(case["dtype"], case["path"]): case for case in cases}


def test_a_case_has_each_token_by_both_paths(model: str) -> None:
    cases = measure(model)
    assert set(cases) == {(d, p) for d in ("bfloat16", "float32") for p in ("prompt", "steps")}
    assert all(case["is_close"] for case in cases.values()), cases
    assert len({case["num_positions"] for case in cases.values()}) == 1
    # The same steps, the same sums; at once, in another order; in bfloat16, rounded.
    assert cases["float32", "steps"]["logit_difference_max"] == 0
    assert 0 <= cases["float32", "prompt"]["kld_mean"] < 1e-9
    assert 1e-9 < cases["bfloat16", "steps"]["kld_mean"] < 0.1


def test_weights_a_little_off_are_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = logit_differences.load

    def load_other(source: str, device: str, backend: str, dtype: str) -> Any:
        found = load(source, device, backend, dtype)
        if backend == "auto":
            found.model.norm_D.data.mul_(1.001)
        return found

    monkeypatch.setattr(logit_differences, "load", load_other)
    cases = measure(model)
    for path in ("prompt", "steps"):
        assert not cases["float32", path]["is_close"], cases
