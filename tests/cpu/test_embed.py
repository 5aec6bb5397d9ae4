"""Embeddings of a step's tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from subten.kernels.embed import embed, embed_torch

EMBED = [embed_torch, pytest.param(embed, marks=pytest.mark.triton)]


@pytest.mark.parametrize("op", EMBED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "dim"), [(0, 8), (1, 1), (1, 576), (3, 1025), (17, 2048), (2, 1024)]
)
def test_each_row_is_its_tokens(
    op: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    num_tokens: int,
    dim: int,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    vocab = 37
    embedding_VD = torch.randn(vocab, dim, generator=generator).to(device, dtype)
    token_id_T = torch.randint(vocab, (num_tokens,), generator=generator)
    token_id_T[-1:] = vocab - 1
    x_TD = op(token_id_T.to(device), embedding_VD)
    assert x_TD.dtype == torch.float32 and x_TD.shape == (num_tokens, dim)
    for row, token_id in zip(x_TD, token_id_T.tolist(), strict=True):
        assert torch.equal(row, embedding_VD[token_id].float())
