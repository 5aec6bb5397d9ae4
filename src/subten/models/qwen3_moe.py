"""The Qwen3-MoE family: RMSNorm of each query and key head, every FFN routed."""

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
    read_norm_topk_prob,
    read_routing,
)

_RULES = FamilyRules(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    ffn_key="moe_intermediate_size",
    # The transformers class falls back to 10000, the published checkpoints have 1e6: no default.
    default_rope_theta=None,
)

_DEFAULT_NORM_TOPK_PROB = True
"""All published Qwen3-MoE checkpoints renormalise; the transformers class falls back to false."""


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read a Qwen3-MoE config whose layers are all sparse."""
    shared = read_decoder_config(reader, _RULES)
    reader.require("decoder_sparse_step", 1, "every layer must be routed")
    if reader.has("mlp_only_layers"):
        layers = reader.raw("mlp_only_layers", "allowed: a list")
        if not isinstance(layers, list) or layers:
            raise reader.error("mlp_only_layers", layers, "allowed: [] (every layer is routed)")
    num_experts, top_k, factor = read_routing(reader)
    return replace(
        shared,
        has_qk_norm=True,
        num_experts=num_experts,
        top_k=top_k,
        norm_topk_prob=read_norm_topk_prob(reader, default=_DEFAULT_NORM_TOPK_PROB),
        routed_scaling_factor=factor,
    )


def weight_map(config: ModelConfig) -> dict[str, WeightSlot]:
    """Slots of all tensors of a Qwen3-MoE checkpoint."""

    def ffn_slots(config: ModelConfig, layer: int) -> dict[str, WeightSlot]:
        return expert_slots(
            config, layer, block="mlp", gate_up_down=("gate_proj", "up_proj", "down_proj")
        )

    return all_slots(config, ffn_slots)


QWEN3_MOE = Family(architecture=_RULES.architecture, read_config=read_config, weight_map=weight_map)
