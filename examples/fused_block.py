"""One block of a sparse MoE model in your own PyTorch code: routed experts, quantised KV cache.

Run it with `python examples/fused_block.py`; it takes a few seconds on a CPU.

Letters: B sequences, T new tokens of each, D model width.
"""

from __future__ import annotations

import torch

from subten.layers.block import BlockCache, FusedMoEQuantizedAttention

BATCH, PROMPT, NEW_TOKENS, WIDTH = 2, 100, 28, 256


def make_block(kv_cache_dtype: str) -> FusedMoEQuantizedAttention:
    """A block of 8 experts, top-2; the same weights whatever its cache."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = FusedMoEQuantizedAttention(
        d_model=WIDTH,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        num_experts=8,
        top_k=2,
        d_ffn=512,
        kv_cache_dtype=kv_cache_dtype,
        max_len=1024,
        device=device,
    )
    block.reset_parameters(torch.Generator(device).manual_seed(1))
    return block


def decode(block: FusedMoEQuantizedAttention) -> tuple[torch.Tensor, BlockCache]:
    """One prompt in a single call, then tokens one by one; the last output and the cache."""
    generator = torch.Generator().manual_seed(0)
    cache = block.new_cache(batch_size=BATCH, max_len=512)
    x_BTD = torch.randn(BATCH, PROMPT, WIDTH, generator=generator)
    y_BTD = block(x_BTD.to(block.device, block.dtype), cache)
    for _ in range(NEW_TOKENS):
        # In a model the next input comes from the head and the embedding; here it is noise.
        x_BTD = torch.randn(BATCH, 1, WIDTH, generator=generator)
        y_BTD = block(x_BTD.to(block.device, block.dtype), cache)
    return y_BTD.float().cpu(), cache


def main() -> None:
    """Compare the block's output and the cache's bytes over three formats."""
    exact, _ = decode(make_block("bf16"))
    for kv_cache_dtype in ("bf16", "int8", "int4"):
        y_BTD, cache = decode(make_block(kv_cache_dtype))
        error = ((y_BTD - exact).norm() / exact.norm()).item()
        print(
            f"{kv_cache_dtype}: {cache.lengths} tokens in {cache.bytes_used} bytes, "
            f"{cache.true_bits:.3f} bits a value, output off by {error:.4f} of its size"
        )


if __name__ == "__main__":
    main()
