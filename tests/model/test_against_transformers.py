"""Logits of every family against the transformers library's own models, from its own files.

Each row of CASES is built by transformers with random weights, saved by it, loaded by load_model
in float32 with an fp32 cache, and compared in one prefill, in chunks and token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from subten.kernels.step import make_step
from subten.weights import LoadedModel, load_model

transformers = pytest.importorskip("transformers")

MAX_ERROR = 1e-4
"""Largest difference allowed between float32 logits.

Logits here have a spread of about 1 to 10, sums of some hundred products in float32 with an error
of about 1e-7 each relative to the largest term: a few 1e-6 after 5 layers. A wrong rotary pair,
norm, mask or expert moves logits by 0.1 and more.
"""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 5}),
    "llama-gqa-tied": (
        "Llama",
        {"hidden_size": 84, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
        | {"tie_word_embeddings": True},
    ),
    "llama-bias": ("Llama", {"attention_bias": True, "head_dim": 20}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN_ROPE, "max_position_embeddings": 128}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "mixtral-5-top-2": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-8-top-3-tied": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True}
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "mixtral-1-top-1": ("Mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen3-norm": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 20},
    ),
    "qwen3-raw": (
        "Qwen3Moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": False}
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3-bias": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": False}
        | {"attention_bias": True, "head_dim": 32},
    ),
}

TRITON_CASES = ("llama-gqa-tied", "mixtral-8-top-3-tied", "qwen3-raw")


def build_reference(name: str, seed: int) -> Any:
    """A transformers model of the case with weights that make every part matter."""
    family, changes = CASES[name]
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 131,
            "hidden_size": 80,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "max_position_embeddings": 256,
            "attn_implementation": "eager",
        }
        | changes
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # transformers starts biases at 0 and norms at 1, which would hide a dropped one.
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def run(loaded: LoadedModel, chunks: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Logits of every token when one sequence arrives in `chunks`; pages start as NaN bytes."""
    config, model = loaded.config, loaded.model
    num_pages = 4
    pages_LPGB = torch.full(
        (config.num_layers, num_pages, config.num_kv_heads, model.fmt.page_bytes),
        0xFF,
        dtype=torch.uint8,
        device=device,
    )
    logits, start = [], 0
    with torch.inference_mode():
        for chunk in chunks:
            step = make_step(
                token_ids=[list(chunk)], starts=[start], page_ids=[[3, 0, 2]], device=device
            )
            logits.append(model(step, pages_LPGB, all_rows=True))
            start += len(chunk)
    return torch.cat(logits).cpu()


def expected_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0].float()


def load(folder: Path, device: torch.device, backend: str) -> LoadedModel:
    return load_model(
        str(folder), device=device, dtype="float32", backend=backend, kv_cache_dtype="fp32"
    )


def random_tokens(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(0, 131, (count,), generator=generator).tolist()


def split(token_ids: list[int], sizes: Sequence[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == len(token_ids)
    return [token_ids[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def assert_logits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == torch.float32
    assert expected.std() > 0.3, "logits too small for the bound to mean anything"
    error = (actual - expected).abs().max()
    assert error <= MAX_ERROR, f"{what}: max error {error:.3e} (allowed {MAX_ERROR:.0e})"


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(
    name: str, generator: torch.Generator, device: torch.device, tmp_path: Path
) -> None:
    reference = build_reference(name, seed=int(generator.initial_seed()))
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path, device, "torch")
    token_ids = random_tokens(generator, 67)
    expected = expected_logits(reference, token_ids)
    assert_logits(run(loaded, [token_ids], device), expected, "prefill")
    chunks = split(token_ids, (1, 16, 17, 31, 2))
    assert_logits(run(loaded, chunks, device), expected, "prefill in chunks")
    one_by_one = [[token] for token in token_ids]
    assert_logits(run(loaded, one_by_one, device), expected, "token by token")


@pytest.mark.triton
@pytest.mark.parametrize("name", TRITON_CASES)
def test_triton_logits_equal_transformers(
    name: str, generator: torch.Generator, device: torch.device, tmp_path: Path
) -> None:
    reference = build_reference(name, seed=int(generator.initial_seed()))
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path, device, "triton")
    token_ids = random_tokens(generator, 22)
    expected = expected_logits(reference, token_ids)
    assert_logits(run(loaded, split(token_ids, (18, 1, 1, 2)), device), expected, "in chunks")


@pytest.mark.parametrize("name", ["llama", "mixtral-5-top-2"])
def test_sequences_of_one_step_do_not_mix(
    name: str, generator: torch.Generator, device: torch.device, tmp_path: Path
) -> None:
    reference = build_reference(name, seed=int(generator.initial_seed()))
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path, device, "torch")
    config = loaded.config
    prompts = [random_tokens(generator, length) for length in (1, 65, 7)]
    pages_LPGB = torch.full(
        (config.num_layers, 4, config.num_kv_heads, loaded.model.fmt.page_bytes),
        0xFF,
        dtype=torch.uint8,
        device=device,
    )
    step = make_step(
        token_ids=prompts, starts=[0, 0, 0], page_ids=[[2], [0, 3], [1]], device=device
    )
    with torch.inference_mode():
        logits_SV = loaded.model(step, pages_LPGB).cpu()
    expected_SV = torch.stack([expected_logits(reference, prompt)[-1] for prompt in prompts])
    assert_logits(logits_SV, expected_SV, "last rows")


@pytest.mark.parametrize("name", ["llama", "qwen3-norm"])
def test_sharded_equals_single(
    name: str, generator: torch.Generator, device: torch.device, tmp_path: Path
) -> None:
    reference = build_reference(name, seed=int(generator.initial_seed()))
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    token_ids = random_tokens(generator, 5)
    actual = run(load(tmp_path, device, "torch"), [token_ids], device)
    assert_logits(actual, expected_logits(reference, token_ids), "sharded")
