"""x @ weight.T where bfloat16 on a CPU without matrix instructions is not a disaster.

Letters: T rows of x, D input features, N output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW_ROWS = 8
"""Rows that go one by one through the matrix-vector product.

A row's bits then do not depend on how many rows share the call, so that up to 8 sequences decode
alike alone and together. The weight is then read once for each row: from a few rows on the float32
way below, which reads it once, is faster. That is the price of equal bits.
"""

CHUNK_ROWS = 512
"""Weight rows converted at a time, so that the float32 copy stays in cache.

Converted whole, the head of a small model alone is a temporary of some 100 MB, whose page faults
take far longer than the product.
"""


def cpu_linear(
    x_TD: torch.Tensor, weight_ND: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear(x, weight, bias)`; x [..., D], weight [N, D], bias [N] -> [..., N], x's dtype.

    On a GPU, and in float32, it is `F.linear`. In bfloat16 on a CPU torch's own product of more
    than a few rows is far slower than its memory where AVX512-BF16 is missing: there up to
    `FEW_ROWS` rows go one by one, and more rows as a float32 product of the weight converted in
    chunks. Sums are in float32 either way. Differentiable.
    """
    if x_TD.device.type != "cpu" or x_TD.dtype != torch.bfloat16:
        return F.linear(x_TD, weight_ND, bias)
    flat_TD = x_TD.reshape(-1, x_TD.shape[-1])
    num_rows, num_out = flat_TD.shape[0], weight_ND.shape[0]
    if num_rows <= 1:
        out_TN = F.linear(flat_TD, weight_ND, bias)
    elif num_rows <= FEW_ROWS:
        out_TN = torch.cat([F.linear(row_D[None], weight_ND, bias) for row_D in flat_TD])
    else:
        out_TN = _wide_product(flat_TD, weight_ND)
        out_TN = (out_TN if bias is None else out_TN + bias.float()).to(x_TD.dtype)
    return out_TN.reshape(*x_TD.shape[:-1], num_out)


EXACT_TOKENS = 256
"""Likeliest tokens whose logits `head_logits` makes exact where it cannot afford to for all."""


def head_logits(x_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """x @ weight.T as float32 logits; x [T, D], weight [V, D] -> [T, V].

    From 16 to 32 bfloat16 numbers are 1/8 apart, which would make ties of the likeliest tokens: so
    on a GPU, and for more than `FEW_ROWS` rows, the product never is bfloat16. For fewer rows on a
    CPU that would add much to the reading of the weights: there a row's `EXACT_TOKENS` likeliest
    are computed once more in float32, and the others stay rounded.
    """
    if x_TD.dtype == torch.float32:
        return F.linear(x_TD, weight_VD)
    if x_TD.is_cuda:
        return torch.mm(x_TD, weight_VD.T, out_dtype=torch.float32)
    if x_TD.shape[0] > FEW_ROWS:
        return _wide_product(x_TD, weight_VD)
    logits_TV = cpu_linear(x_TD, weight_VD).float()
    num_exact = min(EXACT_TOKENS, logits_TV.shape[1])
    for x_D, logits_V in zip(x_TD.float(), logits_TV, strict=True):
        token_K = logits_V.topk(num_exact).indices
        logits_V[token_K] = weight_VD[token_K].float() @ x_D
    return logits_TV


def _wide_product(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32, the weight converted CHUNK_ROWS rows at a time."""
    wide_TD = x_TD.float()
    starts = range(0, weight_ND.shape[0], CHUNK_ROWS)
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_ND.requires_grad):
        parts = [F.linear(wide_TD, weight_ND[i : i + CHUNK_ROWS].float()) for i in starts]
        return torch.cat(parts, dim=-1)
    # One buffer for all chunks: a fresh one each time costs its page faults, chunk after chunk.
    wide_CD = torch.empty(min(CHUNK_ROWS, weight_ND.shape[0]), weight_ND.shape[1])
    out_TN = torch.empty(x_TD.shape[0], weight_ND.shape[0])
    for i in starts:
        part_ND = weight_ND[i : i + CHUNK_ROWS]
        wide_ND = wide_CD[: part_ND.shape[0]].copy_(part_ND)
        torch.mm(wide_TD, wide_ND.T, out=out_TN[:, i : i + CHUNK_ROWS])
    return out_TN
