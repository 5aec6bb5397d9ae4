"""Ten greedy tokens of a tiny model of each family are what they were when they were recorded.

A change that moves them says why, in the commit that records them anew:

    PYTHONPATH=src python tests/cpu/test_golden.py

writes tests/golden/traces.json. Weights come from the raw stream of PCG64 alone, so that they, and
with them the traces, depend on no version of torch or NumPy.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoint import config_values, load, write_folder

from subten.cache.pool import PagePool
from subten.kernels.step import make_step
from subten.models import MODELS, read_config

TRACES = Path(__file__).parents[1] / "golden" / "traces.json"
PROMPT = [3, 61, 7, 88, 20, 5, 42]
NUM_STEPS = 10
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts": 5,
    "vocab_size": 97,
}
CLEAR = 0.01
"""How far the likeliest token of a recorded step leads the next, at least: a hundred times what
another order of sums does to a logit, so that ids are exact."""
TOLERANCE = 4e-5
"""A float32 sum of up to 64 terms, taken in another order, moves by some sqrt(64) * 2^-24 = 5e-7 of
its size. 13 products follow one another (six in each of two layers, and the head), and their errors
add as squares: 2e-6 of logits of deviation 2, so 4e-6. The worst of 30 may be some three times as
far, and as much again for the tokens whose keys and values it reads: 2.4e-5, rounded up. Torch's
plain kernels (ATEN_CPU_CAPABILITY=default) in place of its AVX2 ones move them by 1e-5."""


def weights(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Uniform float32 weights of the deviation 2 / sqrt(inputs), or 1 +- 0.2 for a norm."""
    raw = np.random.PCG64(seed).random_raw(math.prod(shape))
    # The upper 24 bits: exact in float32.
    unit = torch.from_numpy((raw >> 40).astype(np.int64)).double().reshape(shape) / 2**23 - 1
    if len(shape) == 1:
        return (1 + 0.2 * unit).float()
    return (unit * 2 * (3 / shape[-1]) ** 0.5).float()


def trace(architecture: str, folder: Path) -> dict[str, Any]:
    """Greedy ids after PROMPT, the logit of each, and the least lead over the second."""
    values = config_values(architecture, **SIZES)
    family, config = read_config(values, source="test")
    slots = family.weight_map(config)
    tensors = {name: weights(slots[name].shape, seed) for seed, name in enumerate(sorted(slots))}
    model = load(write_folder(folder / architecture, values, tensors)).model
    pool = PagePool(config.num_layers, 1, config.num_kv_heads, model.fmt, model.device)
    pool.pages_LPGB.fill_(0xFF)
    ids, logits, leads = list(PROMPT), [], []
    start = 0
    for _ in range(NUM_STEPS):
        step = make_step(
            token_ids=[ids[start:]], starts=[start], page_ids=[[0]], device=model.device
        )
        best = model(step, pool.pages_LPGB)[0].topk(2)
        start = len(ids)
        ids.append(int(best.indices[0]))
        logits.append(float(best.values[0]))
        leads.append(float(best.values[0] - best.values[1]))
    return {"ids": ids[len(PROMPT) :], "logits": logits, "least_lead": min(leads)}


@pytest.mark.parametrize("architecture", MODELS)
def test_greedy_tokens_are_those_of_the_record(architecture: str, tmp_path: Path) -> None:
    recorded = json.loads(TRACES.read_text(encoding="utf-8"))
    assert list(recorded) == list(MODELS)
    expected, actual = recorded[architecture], trace(architecture, tmp_path)
    assert actual["ids"] == expected["ids"]
    for step, (logit, wanted) in enumerate(zip(actual["logits"], expected["logits"], strict=True)):
        assert abs(logit - wanted) <= TOLERANCE, (step, logit, wanted)


def record() -> None:
    """Write the traces of all families."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: trace(name, Path(folder)) for name in MODELS}
    for name, one in found.items():
        assert one.pop("least_lead") > CLEAR, name
        assert len(set(one["ids"])) >= NUM_STEPS // 2, (name, one["ids"])
        one["logits"] = [round(logit, 6) for logit in one["logits"]]
    TRACES.parent.mkdir(exist_ok=True)
    TRACES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
