"""How much of a bfloat16 model's error comes from rounding the residual stream.

    python science/bf16_residual.py TEXT [--tokens 192]

Reads TEXT with the dense demo model in float32, in bfloat16 with its float32 residual stream, and
in bfloat16 with the stream rounded to bfloat16 after every layer; prints KL(float32 || bfloat16).
The cache is float32 throughout, so that nothing but the arithmetic differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from subten.cache.pool import PagePool
from subten.core import PAGE_SIZE
from subten.kernels.step import make_step
from subten.models.decoder import Decoder
from subten.weights.load import load_model
from subten.weights.upcycled import find_demo_gguf


def logits(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Log probabilities of every next token, [T, V]."""
    pool = PagePool(
        num_layers=model.config.num_layers,
        num_pages=-(-len(token_ids) // PAGE_SIZE),
        num_kv_heads=model.config.num_kv_heads,
        fmt=model.fmt,
        device=model.device,
    )
    step = make_step(
        token_ids=[token_ids],
        starts=[0],
        page_ids=[list(range(pool.num_pages))],
        device=model.device,
    )
    with torch.inference_mode():
        return model(step, pool.pages_LPGB, all_rows=True).log_softmax(-1)


def main() -> None:
    """Print the three lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=192)
    args = parser.parse_args()
    reference = None
    for dtype, rounded in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        loaded = load_model(
            str(find_demo_gguf()),
            device=torch.device("cpu"),
            dtype=dtype,
            backend="torch",
            kv_cache_dtype="fp32",
        )
        assert loaded.tokenizer is not None
        if rounded:
            for layer in loaded.model.layers:
                layer.register_forward_hook(lambda _m, _i, out: out.bfloat16().float())
        text = args.text.read_text(encoding="utf-8")[: 8 * args.tokens]
        found = logits(loaded.model, loaded.tokenizer.encode(text)[: args.tokens])
        reference = found if reference is None else reference
        kl = (reference.exp() * (reference - found)).sum(-1)
        stream = "bfloat16" if rounded else "float32"
        print(f"{dtype:9} residual {stream:9} KL mean {kl.mean():.5f}  max {kl.max():.4f}")


if __name__ == "__main__":
    main()
