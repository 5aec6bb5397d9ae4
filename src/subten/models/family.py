"""What a model family is: how its config.json is read and where its tensors go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from subten.config import ModelConfig
from subten.models.config_reader import ConfigReader
from subten.models.rope_config import context_reach, read_rope

logger = logging.getLogger(__name__)

MAX_EXPERTS = 1024
"""One program of the `route` kernel holds the scores of all experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes: a parameter, or one expert and some rows of it.

    `shape` is that of the checkpoint's tensor; `expert` indexes the first dimension of stacked
    experts; `rows` [start, stop) are rows of the (expert's) matrix, None for all of them.
    """

    parameter: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    expert: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One Hugging Face architecture.

    `read_config` checks every key that matters and raises CheckpointError for one that is missing,
    unknown or contradictory; `weight_map` gives the slot of every tensor that the checkpoint must
    have, by its Hugging Face name.
    """

    architecture: str
    read_config: Callable[[ConfigReader], ModelConfig]
    weight_map: Callable[[ModelConfig], dict[str, WeightSlot]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRules:
    """What differs between families in reading a config; a default of None means required."""

    architecture: str
    model_type: str
    ffn_key: str
    default_rope_theta: float | None
    default_kv_heads_is_heads: bool = False


def read_decoder_config(reader: ConfigReader, rules: FamilyRules) -> ModelConfig:
    """Read and check what all families share, as a dense model; MoE families add to it."""
    _refuse_foreign(reader, rules)
    num_heads = reader.integer("num_attention_heads")
    d_model = reader.integer("hidden_size")
    head_dim = _read_head_dim(reader, d_model, num_heads)
    num_kv_heads = num_heads
    if reader.has("num_key_value_heads") or not rules.default_kv_heads_is_heads:
        num_kv_heads = reader.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise reader.error(
            "num_key_value_heads",
            num_kv_heads,
            f"allowed: a divisor of num_attention_heads = {num_heads}",
        )
    max_len = reader.integer("max_position_embeddings")
    _check_attention_window(reader, max_len)
    vocab_size = reader.integer("vocab_size")
    bos = reader.token_ids("bos_token_id", vocab_size)
    rope = read_rope(
        reader, head_dim=head_dim, max_len=max_len, default_theta=rules.default_rope_theta
    )
    return ModelConfig(
        architecture=rules.architecture,
        num_layers=reader.integer("num_hidden_layers"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_ffn=reader.integer(rules.ffn_key),
        vocab_size=vocab_size,
        norm_eps=reader.number("rms_norm_eps"),
        rope=rope,
        max_model_len=context_reach(rope, max_len),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        has_qkv_bias=reader.boolean("attention_bias", default=False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size),
    )


def read_routing(reader: ConfigReader) -> tuple[int, int, float]:
    """Number of experts, experts a token, and the factor on the routed sum (1 where absent)."""
    key = reader.spelling("num_local_experts", "num_experts")
    num_experts = reader.integer(key, high=MAX_EXPERTS)
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error(
            "num_experts_per_tok", top_k, f"allowed: 1 to the number of experts, {num_experts}"
        )
    factor = 1.0
    if reader.has("routed_scaling_factor"):
        factor = reader.number("routed_scaling_factor")
    return num_experts, top_k, factor


def read_norm_topk_prob(reader: ConfigReader, *, default: bool) -> bool:
    """Whether the k weights are divided by their sum; an absent flag is logged, never guessed."""
    if not reader.has("norm_topk_prob"):
        logger.warning(
            "%s: norm_topk_prob is missing: taking %s, as the published checkpoints of this "
            "architecture have it",
            reader.source,
            str(default).lower(),
        )
    return reader.boolean("norm_topk_prob", default=default)


def shared_slots(config: ModelConfig) -> dict[str, WeightSlot]:
    """Embedding, final norm and, where it is its own, the head."""
    vocabulary = (config.vocab_size, config.d_model)
    slots = {
        "model.embed_tokens.weight": WeightSlot(parameter="embedding_VD", shape=vocabulary),
        "model.norm.weight": WeightSlot(parameter="norm_D", shape=(config.d_model,)),
    }
    if not config.tie_word_embeddings:
        slots["lm_head.weight"] = WeightSlot(parameter="head_VD", shape=vocabulary)
    return slots


def attention_slots(config: ModelConfig, layer: int) -> dict[str, WeightSlot]:
    """Both norms and the attention of one layer: q, k and v are rows of one matrix."""
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    slots = {
        f"{source}.input_layernorm.weight": WeightSlot(
            parameter=f"{target}.attention_norm_D", shape=(config.d_model,)
        ),
        f"{source}.post_attention_layernorm.weight": WeightSlot(
            parameter=f"{target}.ffn_norm_D", shape=(config.d_model,)
        ),
        f"{source}.self_attn.o_proj.weight": WeightSlot(
            parameter=f"{target}.attention.output.weight", shape=(config.d_model, q_rows)
        ),
    }
    start = 0
    for name, num_rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        rows = (start, start + num_rows)
        slots[f"{source}.self_attn.{name}.weight"] = WeightSlot(
            parameter=f"{target}.attention.qkv.weight",
            shape=(num_rows, config.d_model),
            rows=rows,
        )
        if config.has_qkv_bias:
            slots[f"{source}.self_attn.{name}.bias"] = WeightSlot(
                parameter=f"{target}.attention.qkv.bias", shape=(num_rows,), rows=rows
            )
        start += num_rows
    if config.has_qkv_bias:
        slots[f"{source}.self_attn.o_proj.bias"] = WeightSlot(
            parameter=f"{target}.attention.output.bias", shape=(config.d_model,)
        )
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            slots[f"{source}.self_attn.{name}.weight"] = WeightSlot(
                parameter=f"{target}.attention.{name}_D", shape=(config.head_dim,)
            )
    return slots


def dense_slots(config: ModelConfig, layer: int) -> dict[str, WeightSlot]:
    """The dense FFN of one layer: gate and up are rows of one matrix, gate first."""
    source, target = f"model.layers.{layer}.mlp", f"layers.{layer}.ffn"
    d_ffn, d_model = config.d_ffn, config.d_model
    return {
        f"{source}.gate_proj.weight": WeightSlot(
            parameter=f"{target}.gate_up.weight", shape=(d_ffn, d_model), rows=(0, d_ffn)
        ),
        f"{source}.up_proj.weight": WeightSlot(
            parameter=f"{target}.gate_up.weight", shape=(d_ffn, d_model), rows=(d_ffn, 2 * d_ffn)
        ),
        f"{source}.down_proj.weight": WeightSlot(
            parameter=f"{target}.down.weight", shape=(d_model, d_ffn)
        ),
    }


def expert_slots(
    config: ModelConfig, layer: int, *, block: str, gate_up_down: tuple[str, str, str]
) -> dict[str, WeightSlot]:
    """Router and experts of one layer, which the checkpoint calls `block`.gate and `block`.experts.

    `gate_up_down` are its names of an expert's three matrices.
    """
    source, target = f"model.layers.{layer}.{block}", f"layers.{layer}.ffn"
    d_ffn, d_model = config.d_ffn, config.d_model
    gate, up, down = gate_up_down
    slots = {
        f"{source}.gate.weight": WeightSlot(
            parameter=f"{target}.gate_ED", shape=(config.num_experts, d_model)
        )
    }
    for expert in range(config.num_experts):
        prefix = f"{source}.experts.{expert}"
        for name, rows in ((gate, (0, d_ffn)), (up, (d_ffn, 2 * d_ffn))):
            slots[f"{prefix}.{name}.weight"] = WeightSlot(
                parameter=f"{target}.gate_up_EFD",
                shape=(d_ffn, d_model),
                rows=rows,
                expert=expert,
            )
        slots[f"{prefix}.{down}.weight"] = WeightSlot(
            parameter=f"{target}.down_EDF", shape=(d_model, d_ffn), expert=expert
        )
    return slots


def all_slots(
    config: ModelConfig, ffn_slots: Callable[[ModelConfig, int], Mapping[str, WeightSlot]]
) -> dict[str, WeightSlot]:
    """The whole map of a model whose layers differ from other families in their FFN alone."""
    slots = shared_slots(config)
    for layer in range(config.num_layers):
        slots.update(attention_slots(config, layer))
        slots.update(ffn_slots(config, layer))
    return slots


def _refuse_foreign(reader: ConfigReader, rules: FamilyRules) -> None:
    """Refuse what would change the arithmetic and is not implemented here."""
    reader.require("model_type", rules.model_type, f"architecture {rules.architecture}")
    act = reader.raw("hidden_act", "allowed: 'silu'")
    if act != "silu":
        raise reader.error("hidden_act", act, "allowed: 'silu'")
    quantization = reader.section("quantization_config")
    if quantization is not None:
        method = quantization.values.get("quant_method", "unnamed")
        raise reader.error(
            "quantization_config",
            method,
            "allowed: none; use the checkpoint's BF16, FP16 or FP32 version",
        )
    if reader.has("auto_map"):
        logger.warning(
            "%s: auto_map is ignored: code that comes with a checkpoint never runs here",
            reader.source,
        )


def _read_head_dim(reader: ConfigReader, d_model: int, num_heads: int) -> int:
    if reader.has("head_dim"):
        head_dim = reader.integer("head_dim")
    elif d_model % num_heads:
        raise reader.error(
            "num_attention_heads",
            num_heads,
            f"allowed: a divisor of hidden_size = {d_model} where head_dim is not given",
        )
    else:
        head_dim = d_model // num_heads
    if head_dim % 2:
        raise reader.error(
            "head_dim", head_dim, "allowed: an even number (rotary embedding turns pairs)"
        )
    return head_dim


def _check_attention_window(reader: ConfigReader, max_len: int) -> None:
    """Every layer must see the whole context."""
    if reader.boolean("use_sliding_window", default=True) and reader.has("sliding_window"):
        window = reader.integer("sliding_window")
        if window < max_len:
            raise reader.error(
                "sliding_window",
                window,
                f"allowed: null, or at least max_position_embeddings = {max_len} (attention over "
                "a window is not implemented)",
            )
    if reader.has("layer_types"):
        kinds = reader.raw("layer_types", "allowed: a list")
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise reader.error("layer_types", kinds, "allowed: 'full_attention' for every layer")
