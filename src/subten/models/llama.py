"""The dense Llama family."""

from __future__ import annotations

from subten.config import ModelConfig
from subten.models.config_reader import ConfigReader
from subten.models.family import (
    Family,
    FamilyRules,
    WeightSlot,
    all_slots,
    dense_slots,
    read_decoder_config,
)

_RULES = FamilyRules(
    architecture="LlamaForCausalLM",
    model_type="llama",
    ffn_key="intermediate_size",
    # Files of the first two Llama generations name neither; both had base 10000 and no GQA but at
    # sizes whose files do say so.
    default_rope_theta=10000.0,
    default_kv_heads_is_heads=True,
)


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read a Llama config; `attention_bias` means biases of q, k, v and o."""
    reader.require("mlp_bias", False, "biases in the FFN are not implemented")
    return read_decoder_config(reader, _RULES)


def weight_map(config: ModelConfig) -> dict[str, WeightSlot]:
    """Slots of all tensors of a Llama checkpoint."""
    return all_slots(config, dense_slots)


LLAMA = Family(architecture=_RULES.architecture, read_config=read_config, weight_map=weight_map)
