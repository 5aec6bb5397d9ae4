"""The first row of the residual stream: a token's embedding.

Letters: T tokens of the step, V vocabulary, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subten.kernels.triton_shim import tl, triton, triton_jit

BLOCK_D = 1024


def embed(token_id_T: torch.Tensor, embedding_VD: torch.Tensor) -> torch.Tensor:
    """x_TD float32 = embedding[token id]; ids int64 in [0, V), embedding of any float dtype.

    One launch.
    """
    (num_tokens,), dim = token_id_T.shape, embedding_VD.shape[1]
    assert embedding_VD.is_contiguous(), embedding_VD.stride()
    x_TD = torch.empty(num_tokens, dim, dtype=torch.float32, device=embedding_VD.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(dim, BLOCK_D))
        _embed_kernel[grid](token_id_T, embedding_VD, x_TD, dim, BLOCK=BLOCK_D)
    return x_TD


def embed_torch(token_id_T: torch.Tensor, embedding_VD: torch.Tensor) -> torch.Tensor:
    """The twin of `embed`."""
    assert token_id_T.dim() == 1, token_id_T.shape
    return F.embedding(token_id_T, embedding_VD).float()


@triton_jit
def _embed_kernel(
    TOKEN_ID: tl.tensor, EMBEDDING: tl.tensor, X: tl.tensor, dim: tl.int32, BLOCK: tl.constexpr
) -> None:
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(TOKEN_ID + t)
    row = tl.load(EMBEDDING + token_id * dim + d, mask=d < dim)
    tl.store(X + t * dim + d, row.to(tl.float32), mask=d < dim)
