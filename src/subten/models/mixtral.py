"""The Mixtral family: every FFN is routed, weights of the chosen experts renormalised."""

from __future__ import annotations

from dataclasses import replace

from subten.config import ModelConfig
from subten.models.config_reader import ConfigReader
from subten.models.family import (
    Family,
    FamilyRules,
    WeightSlot,
    all_slots,
    expert_slots,
    read_decoder_config,
    read_routing,
)

_RULES = FamilyRules(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    ffn_key="intermediate_size",
    default_rope_theta=1e6,
)


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read a Mixtral config; the architecture has no `norm_topk_prob`: it always renormalises."""
    shared = read_decoder_config(reader, _RULES)
    reader.require("attention_bias", False, "Mixtral has no attention biases")
    reader.require("norm_topk_prob", True, "Mixtral always renormalises")
    num_experts, top_k, factor = read_routing(reader)
    return replace(
        shared,
        num_experts=num_experts,
        top_k=top_k,
        norm_topk_prob=True,
        routed_scaling_factor=factor,
    )


def weight_map(config: ModelConfig) -> dict[str, WeightSlot]:
    """Slots of all tensors of a Mixtral checkpoint; w1 is gate, w3 up, w2 down."""

    def ffn_slots(config: ModelConfig, layer: int) -> dict[str, WeightSlot]:
        return expert_slots(
            config, layer, block="block_sparse_moe", gate_up_down=("w1", "w3", "w2")
        )

    return all_slots(config, ffn_slots)


MIXTRAL = Family(architecture=_RULES.architecture, read_config=read_config, weight_map=weight_map)
