"""`linear` on CUDA: which kernel takes how many tokens.

Letters: T tokens, N output features, K inputs.
"""

from __future__ import annotations

import torch

from subten.kernels.cuda import gemv, linear_tiles
from subten.kernels.weight_formats import Weight

MAX_GEMV_TOKENS = 8
"""Tokens up to which `gemv` serves; it takes no more than `gemv.MAX_TOKENS`."""


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
    """`subten.kernels.linear.linear`: `gemv` for 1 to 8 tokens, `linear_tiles` for a batch's.

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
