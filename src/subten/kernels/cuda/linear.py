"""`linear` on CUDA: which kernel takes how many tokens.

Letters: T tokens, N output features, K inputs.
"""

from __future__ import annotations

import torch

from subten.kernels.cuda import gemv, linear_tiles
from subten.kernels.weight_formats import Weight

MAX_GEMV_TOKENS = 5
"""Tokens up to which `gemv` serves, which takes up to `gemv.MAX_TOKENS`. With tiles for all
matrices a step of qwen3-30b-a3b is faster from 6 tokens on (FP8: 4.35 ms to 4.32), of 8 by 2 to
6 %, and of 4 slower by 2 to 3 %, but in BF16 (benchmarks/plans/h200-few-tokens.json)."""


def linear(
    x_TK: torch.Tensor,
    weight: Weight,
    *,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`subten.kernels.linear.linear`: `gemv` for a few tokens, `linear_tiles` for a batch's.

    More tokens, and what those do not take, go to Triton.
    """
    is_batch = MAX_GEMV_TOKENS < x_TK.shape[0] <= linear_tiles.MAX_TOKENS
    is_tiled = is_batch and linear_tiles.suits(
        x_TK, weight, bias_N, norm_weight_K, residual_TN, out_dtype
    )
    run = linear_tiles.linear if is_tiled else gemv.linear
    return run(
        x_TK,
        weight,
        bias_N=bias_N,
        norm_weight_K=norm_weight_K,
        eps=eps,
        residual_TN=residual_TN,
        out_dtype=out_dtype,
    )
