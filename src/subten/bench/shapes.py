"""Public model shapes by name, for plans and speed measurements without a checkpoint.

Each is the part of a config.json that shapes the model, read and checked by the reader that reads
checkpoints. Sources: the published config.json of Mixtral-8x7B-v0.1, Qwen3-30B-A3B and
Meta-Llama-3-70B. The `tiny-*` pair has their structure in sizes that a CPU runs in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from subten.config import ModelConfig
from subten.core import ConfigError, refuse
from subten.models import read_config

_MIXTRAL: Mapping[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mixtral-8x7b": _MIXTRAL,
    "qwen3-30b-a3b": _QWEN3,
    "llama-3-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "tiny-mixtral": {
        **_MIXTRAL,
        "hidden_size": 128,
        "intermediate_size": 192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 320,
    },
    "tiny-qwen3": {
        **_QWEN3,
        "head_dim": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "vocab_size": 333,
    },
}
"""Shape name to what its config.json says."""

SHAPES: Mapping[str, ModelConfig] = {
    name: read_config(values, source=f"shape {name}")[1] for name, values in CONFIGS.items()
}


def get_shape(name: str, *, min_model_len: int = 0) -> ModelConfig:
    """The shape called `name`; ConfigError lists the known ones.

    `min_model_len` stretches its context, and the rotary table with it: a speed measurement with
    random weights may look past what the published weights were trained for.
    """
    if name not in SHAPES:
        raise refuse(ConfigError, "shape", name, ", ".join(SHAPES))
    config = SHAPES[name]
    return replace(config, max_model_len=max(config.max_model_len, min_model_len))
