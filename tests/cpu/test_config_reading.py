"""config.json: what is read, and that every missing, unknown or contradictory key is named."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from subten.config import RopeConfig
from subten.core import CheckpointError
from subten.models import MODELS, read_config

BASE: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**BASE, "model_type": "llama"},
    "MixtralForCausalLM": {
        **BASE,
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "Qwen3MoeForCausalLM": {
        **BASE,
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "sliding_window": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
REMOVED = object()


def read(architecture: str, **changes: Any) -> Any:
    values = {"architectures": [architecture], **CONFIGS[architecture], **changes}
    values = {key: value for key, value in values.items() if value is not REMOVED}
    return read_config(values, source="config.json")[1]


def refusal(architecture: str, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(architecture, **changes)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("config.json: ")
    return message


def test_every_family_has_a_config_here() -> None:
    assert CONFIGS.keys() == MODELS.keys()


@pytest.mark.parametrize("architecture", MODELS)
def test_what_is_read(architecture: str) -> None:
    config = read(architecture)
    assert (config.num_layers, config.d_model, config.vocab_size) == (3, 80, 131)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (5, 5, 16)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert config.rope == RopeConfig(theta=10000.0)
    expected = {
        "LlamaForCausalLM": (0, 0, 48, False),
        "MixtralForCausalLM": (5, 2, 48, False),
        "Qwen3MoeForCausalLM": (6, 3, 24, True),
    }[architecture]
    actual = (config.num_experts, config.top_k, config.d_ffn, config.has_qk_norm)
    assert actual == expected


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "hidden_act",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "vocab_size",
    ],
)
@pytest.mark.parametrize("missing", [REMOVED, None], ids=["absent", "null"])
def test_missing_key_is_named(architecture: str, key: str, missing: Any) -> None:
    assert f": {key}: missing" in refusal(architecture, **{key: missing})


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("LlamaForCausalLM", "intermediate_size"),
        ("MixtralForCausalLM", "num_key_value_heads"),
        ("MixtralForCausalLM", "num_local_experts"),
        ("MixtralForCausalLM", "num_experts_per_tok"),
        ("Qwen3MoeForCausalLM", "moe_intermediate_size"),
        ("Qwen3MoeForCausalLM", "num_experts_per_tok"),
        ("Qwen3MoeForCausalLM", "rope_theta"),
    ],
)
def test_missing_family_key_is_named(architecture: str, key: str) -> None:
    assert f": {key}: missing" in refusal(architecture, **{key: REMOVED})


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -80),
        ("hidden_size", 80.0),
        ("hidden_size", "80"),
        ("hidden_size", True),
        ("num_hidden_layers", 2**31),
        ("vocab_size", 10**30),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", "1e-5"),
        ("hidden_act", "gelu"),
        ("hidden_act", ["silu"]),
        ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", 0),
        ("eos_token_id", 131),
        ("eos_token_id", [2, -1]),
        ("bos_token_id", 1.5),
        ("rope_theta", 0),
        ("head_dim", 15),
        ("num_attention_heads", 7),
        ("num_key_value_heads", 2),
        ("model_type", "gemma"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_bad_value_is_named_with_what_is_allowed(architecture: str, key: str, value: Any) -> None:
    message = refusal(architecture, **{key: value})
    assert f": {key}: got " in message and "allowed: " in message


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("LlamaForCausalLM", "mlp_bias", True),
        ("MixtralForCausalLM", "sliding_window", 511),
        ("MixtralForCausalLM", "num_experts_per_tok", 6),
        ("MixtralForCausalLM", "norm_topk_prob", False),
        ("MixtralForCausalLM", "attention_bias", True),
        ("MixtralForCausalLM", "num_local_experts", 0),
        ("MixtralForCausalLM", "num_local_experts", 1025),
        ("Qwen3MoeForCausalLM", "use_sliding_window", True),
        ("Qwen3MoeForCausalLM", "decoder_sparse_step", 2),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", [0]),
        ("Qwen3MoeForCausalLM", "num_experts_per_tok", 7),
        ("Qwen3MoeForCausalLM", "norm_topk_prob", "true"),
        ("Qwen3MoeForCausalLM", "num_local_experts", 5),
        ("Qwen3MoeForCausalLM", "routed_scaling_factor", -1.0),
    ],
)
def test_bad_family_value_is_named(architecture: str, key: str, value: Any) -> None:
    message = refusal(architecture, **{key: value})
    if key == "use_sliding_window":
        key = "sliding_window"
    elif key == "num_local_experts" and architecture.startswith("Qwen"):
        key = "num_experts"
    assert f": {key}: got " in message


@pytest.mark.parametrize(
    "names", [REMOVED, [], None, "LlamaForCausalLM", ["GPT2LMHeadModel"], ["A", "B"], [["x"]]]
)
def test_unknown_architecture_lists_the_known(names: Any) -> None:
    message = refusal("LlamaForCausalLM", architectures=names)
    assert "architectures" in message and all(name in message for name in MODELS)


@pytest.mark.parametrize("architecture", MODELS)
def test_foreign_keys_that_do_not_matter_are_fine(architecture: str) -> None:
    config = read(architecture, transformers_version="5.0", use_cache=True, pad_token_id=None)
    assert config == read(architecture)


@pytest.mark.parametrize("architecture", MODELS)
def test_code_in_a_config_is_ignored_with_a_warning(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True}
    with caplog.at_level(logging.WARNING):
        assert read(architecture, **changes) == read(architecture)
    assert "auto_map is ignored" in caplog.text


@pytest.mark.parametrize(
    ("architecture", "expected"), [("MixtralForCausalLM", True), ("Qwen3MoeForCausalLM", True)]
)
def test_absent_norm_topk_prob_has_a_default_for_each_architecture(
    architecture: str, expected: bool
) -> None:
    assert read(architecture, norm_topk_prob=REMOVED).norm_topk_prob is expected


def test_absent_norm_topk_prob_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read("Qwen3MoeForCausalLM", norm_topk_prob=REMOVED)
    assert "norm_topk_prob is missing: taking true" in caplog.text


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_norm_and_scaling_factor_are_independent(flag: bool, factor: float) -> None:
    config = read("Qwen3MoeForCausalLM", norm_topk_prob=flag, routed_scaling_factor=factor)
    assert (config.norm_topk_prob, config.routed_scaling_factor) == (flag, factor)


def test_both_spellings_of_the_expert_count() -> None:
    config = read("Qwen3MoeForCausalLM", num_experts=REMOVED, num_local_experts=6)
    assert config == read("Qwen3MoeForCausalLM") == read("Qwen3MoeForCausalLM", num_local_experts=6)


def test_llama_defaults_of_its_first_generations() -> None:
    config = read("LlamaForCausalLM", num_key_value_heads=REMOVED, rope_theta=REMOVED)
    assert (config.num_kv_heads, config.rope.theta) == (5, 10000.0)


def test_given_head_dim_need_not_divide_the_width() -> None:
    config = read("Qwen3MoeForCausalLM", head_dim=32, num_attention_heads=6, num_key_value_heads=3)
    assert (config.head_dim, config.num_heads, config.d_model) == (32, 6, 80)


def test_window_that_covers_the_context_is_no_window() -> None:
    assert read("MixtralForCausalLM", sliding_window=512) == read("MixtralForCausalLM")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
ROPES = [{"rope_type": "linear", "factor": 2.0}, YARN, LLAMA3, LONGROPE]


def rope_of(section: dict[str, Any], key: str = "rope_scaling", **changes: Any) -> RopeConfig:
    config = read("LlamaForCausalLM", **{key: section}, **changes)
    assert isinstance(config.rope, RopeConfig)
    return config.rope


@pytest.mark.parametrize("section", ROPES, ids=lambda section: section["rope_type"])
def test_all_spellings_of_a_rope_mean_the_same(section: dict[str, Any]) -> None:
    old = {"type" if key == "rope_type" else key: value for key, value in section.items()}
    both = {**section, "type": section["rope_type"]}
    expected = rope_of(section)
    assert expected.kind == section["rope_type"]
    assert rope_of(old) == rope_of(both) == expected
    new = {**section, "rope_theta": 10000.0}
    assert rope_of(new, "rope_parameters", rope_theta=REMOVED) == expected
    assert rope_of(new, "rope_parameters") == expected


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "type"),
        ({"rope_type": "spiral", "factor": 2.0}, "rope_type"),
        ({"rope_type": ["linear"], "factor": 2.0}, "rope_type"),
        ({"factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({key: value for key, value in YARN.items() if key != "factor"}, "factor"),
        ({**YARN, "truncate": False}, "truncate"),
        ({**YARN, "mrope_section": [1, 2]}, "mrope_section"),
        ({key: value for key, value in LLAMA3.items() if key != "factor"}, "factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({key: v for key, v in LLAMA3.items() if key != "low_freq_factor"}, "low_freq_factor"),
        ({**LONGROPE, "long_factor": [2.0] * 7}, "long_factor"),
        ({**LONGROPE, "short_factor": [1.0] * 7 + [0.0]}, "short_factor"),
        ({key: v for key, v in LONGROPE.items() if key != "long_factor"}, "long_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}, "partial_rotary"),
    ],
)
def test_bad_rope_is_named(section: dict[str, Any], named: str) -> None:
    assert f"rope_scaling.{named}" in refusal("LlamaForCausalLM", rope_scaling=section)


def test_rope_that_is_no_object_is_refused() -> None:
    assert "rope_scaling: got 'linear'" in refusal("LlamaForCausalLM", rope_scaling="linear")


def test_bases_that_disagree_are_refused() -> None:
    section = {"rope_type": "default", "rope_theta": 5e5}
    assert "rope_theta: got 10000.0" in refusal("LlamaForCausalLM", rope_parameters=section)


def test_sections_that_disagree_are_refused() -> None:
    message = refusal(
        "LlamaForCausalLM",
        rope_parameters={"rope_type": "linear", "factor": 2.0},
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    assert "rope_scaling: got" in message and "contradicts rope_parameters" in message


def test_original_lengths_that_disagree_are_refused() -> None:
    message = refusal("LlamaForCausalLM", rope_scaling=YARN, original_max_position_embeddings=128)
    assert "original_max_position_embeddings: got 128" in message


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (YARN, 1024),
        ({**YARN, "factor": 1.5}, 512),
        (LLAMA3, 512),
        (LONGROPE, 512),
    ],
)
def test_context_that_a_rope_reaches(section: dict[str, Any], expected: int) -> None:
    assert read("LlamaForCausalLM", rope_scaling=section).max_model_len == expected
