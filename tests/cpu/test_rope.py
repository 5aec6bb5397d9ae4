"""The rotary table against the transformers library's own, for every kind and spelling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from subten.config import RopeConfig
from subten.layers.rope import cos_sin_table
from subten.models import read_config

CPU = torch.device("cpu")
FREQUENCIES = 10  # half of head_dim 20

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    # The corrections of 31 and 32 turns lie on either side of channel 1 here.
    "yarn-default-betas": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 580,
    },
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.25,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 128,
        "short_factor": [1.0 + 0.01 * i for i in range(FREQUENCIES)],
        "long_factor": [1.0 + 0.5 * i for i in range(FREQUENCIES)],
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * FREQUENCIES,
        "long_factor": [2.0 + i for i in range(FREQUENCIES)],
    },
}
THETA = 50000.0
MAX_POSITIONS = 1024


def config_values(section: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": 100,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": THETA,
        "rope_scaling": copy.deepcopy(section),
    }


def our_rope(section: dict[str, Any]) -> RopeConfig:
    values = {"architectures": ["LlamaForCausalLM"], **config_values(section)}
    return read_config(values, source="config.json")[1].rope


@pytest.mark.parametrize("kind", KINDS)
def test_table_equals_transformers(kind: str) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = pytest.importorskip("transformers.models.llama.configuration_llama")
    section = KINDS[kind]
    reference = modeling.LlamaRotaryEmbedding(configuration.LlamaConfig(**config_values(section)))
    original = section.get("original_max_position_embeddings", MAX_POSITIONS)
    position_T = torch.tensor([0, 1, original - 1, min(original, MAX_POSITIONS - 1), 1023])
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), position_T[None])
    table = cos_sin_table(our_rope(section), head_dim=20, max_len=MAX_POSITIONS, device=CPU)
    assert table.shape == (MAX_POSITIONS, 20) and table.dtype == torch.float32
    # The same float32 operations in the same order: 1e-6 allows one for a different libm.
    assert (table[position_T, :10] - cos[0, :, :10]).abs().max() <= 1e-6
    assert (table[position_T, 10:] - sin[0, :, 10:]).abs().max() <= 1e-6


def test_longrope_takes_its_short_factors_within_the_original_context() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = pytest.importorskip("transformers.models.llama.configuration_llama")
    section = KINDS["longrope"]
    reference = modeling.LlamaRotaryEmbedding(configuration.LlamaConfig(**config_values(section)))
    position_T = torch.arange(128)
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), position_T[None])
    table = cos_sin_table(our_rope(section), head_dim=20, max_len=128, device=CPU)
    assert (table[:, :10] - cos[0, :, :10]).abs().max() <= 1e-6
    assert (table[:, 10:] - sin[0, :, 10:]).abs().max() <= 1e-6
    longer = cos_sin_table(our_rope(section), head_dim=20, max_len=129, device=CPU)
    assert (longer[:128] - table).abs().max() > 0.1


def test_rows_turn_by_their_position() -> None:
    """Position p is p turns of position 1, by the addition theorem, in float64."""
    table = cos_sin_table(RopeConfig(theta=100.0), head_dim=6, max_len=9, device=CPU).double()
    turn = torch.complex(table[:, :3], table[:, 3:])
    expected = turn[1] ** torch.arange(9)[:, None]
    # 8 turns of float32 values, each exact to 6e-8.
    assert (turn - expected).abs().max() <= 1e-6
    assert torch.equal(turn[0], torch.ones(3, dtype=torch.complex128))
