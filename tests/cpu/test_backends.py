"""Greedy text of the kernels is that of the torch path on the CPU, token by token, in FP32."""

from __future__ import annotations

import random

import pytest
import torch
from scripted import fake_config

from subten.codecs import kv_format
from subten.core import SamplingParams
from subten.engine.llm import LLM
from subten.kernels import select_ops
from subten.models.decoder import Decoder
from subten.weights.load import LoadedModel

CPU = torch.device("cpu")
PROMPTS = [[7], list(range(1, 20))]

TOLERANCE = 1e-3
"""Logits have a deviation of about 2; two layers of float32 sums in another order move them by some
1e-5, and the worst of 200 steps whose keys and values moved as well by ten times that."""


def make(seed: int, device: torch.device, backend: str) -> LLM:
    """Two layers of eight experts, weights that depend on the seed alone, a cache in FP32."""
    config = fake_config(
        max_model_len=512,
        architecture="Qwen3MoeForCausalLM",
        num_layers=2,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        d_ffn=48,
        num_experts=8,
        top_k=2,
        has_qk_norm=True,
        tie_word_embeddings=False,
        eos_token_ids=(),
        vocab_size=97,
    )
    ops = select_ops(backend, device)
    fmt = kv_format("fp32", config.head_dim)
    model = Decoder(config, ops, fmt, device=device, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1
        scaled = 1 + 0.1 * fresh if is_norm else 2 * fresh * parameter.shape[-1] ** -0.5
        parameter.data.copy_(scaled)
    loaded = LoadedModel(
        model=model,
        config=config,
        tokenizer=None,
        name="tiny",
        weight_bytes=0,
        dtype=torch.float32,
    )
    return LLM(loaded, kv_cache_dtype="fp32", num_pages=16)


def lead(llm: LLM, token_ids: list[int]) -> float:
    """How far the likeliest next token is ahead of the second."""
    found: list[torch.Tensor] = []
    sample = llm.engine.runner._sample

    def record(logits_SV: torch.Tensor, params: object) -> object:
        found.append(logits_SV)
        return sample(logits_SV, params)

    llm.engine.runner._sample = record
    llm.generate([token_ids], SamplingParams(temperature=0.0, max_tokens=1))
    llm.engine.runner._sample = sample
    best = found[0][0].topk(2).values
    return float(best[0] - best[1])


@pytest.mark.triton
@pytest.mark.parametrize("prompt", PROMPTS, ids=["1", "19"])
def test_greedy_text_is_the_torch_path_s(prompt: list[int], device: torch.device) -> None:
    """200 tokens on a GPU, three under the interpreter, which takes seconds for each.

    Where two logits are closer than the arithmetic can tell apart, the kernels may take the other;
    from there on they are given the torch path's text again.
    """
    num_tokens = 200 if device.type == "cuda" else 3
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed of the weights: {seed}")
    reference, kernels = make(seed, CPU, "torch"), make(seed, device, "triton")
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    expected = list(reference.generate([prompt], greedy)[0].token_ids)
    assert len(expected) == num_tokens
    num_same = num_ties = 0
    while num_same < num_tokens:
        start = [*prompt, *expected[:num_same]]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens - num_same)
        got = list(kernels.generate([start], params)[0].token_ids)
        wanted = expected[num_same:]
        same = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), None)
        if same is None:
            break
        ahead = lead(reference, [*start, *wanted[:same]])
        assert ahead < TOLERANCE, (num_same + same, ahead)
        num_ties += 1
        num_same += same + 1
    assert num_ties <= 3, num_ties
