"""The score of a constant that stored keys lack: the bias of their projection, at each position.

Rotary embedding is linear: R_n (x + b) = R_n x + R_n b. Where rows hold R_n x alone, attention adds
q . R_n b, which takes no byte of the cache.

Letters: G KV heads, D head_dim, P positions of the rotary table, N keys, M rows of a tile of
queries, F = D / 2 frequencies.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.core import PAGE_SIZE
from subten.kernels.norm_rope import norm_rope_torch
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import tl, triton_jit


def check_key_bias(
    key_bias_GD: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    pages_PGB: torch.Tensor,
    head_dim: int,
    step: StepTensors,
) -> None:
    """Assert that a bias comes with the rotary table, and fits heads and positions."""
    if key_bias_GD is None:
        return
    assert cos_sin_PD is not None, "key_bias_GD without cos_sin_PD"
    assert key_bias_GD.shape == (pages_PGB.shape[1], head_dim), (key_bias_GD.shape, head_dim)
    assert cos_sin_PD.shape[1] == head_dim, (cos_sin_PD.shape, head_dim)
    # Graphs are captured for whole pages, but no key lies past the table.
    assert len(cos_sin_PD) > step.max_kv_len - PAGE_SIZE, (len(cos_sin_PD), step.max_kv_len)
    for tensor in (key_bias_GD, cos_sin_PD):
        assert tensor.dtype == torch.float32, tensor.dtype
        assert tensor.device == pages_PGB.device, (tensor.device, pages_PGB.device)
        assert tensor.is_contiguous(), tensor.stride()


def turned_bias(key_bias_GD: torch.Tensor, cos_sin_PD: torch.Tensor, num_keys: int) -> torch.Tensor:
    """R_n b of positions 0, 1, ...: float32 [num_keys, G, D]."""
    position_N = torch.arange(num_keys, device=key_bias_GD.device)
    return norm_rope_torch(key_bias_GD.expand(num_keys, -1, -1), cos_sin_PD, position_N)


# q . R_n b = sum_i cos_ni (q_i b_i + q_j b_j) + sin_ni (q_j b_i - q_i b_j), j = i + D / 2: products
# of a tile of queries with rows of the rotary table as it lies, whatever the codec.
#
# Precision: biases of norm 600 make scores of some hundred, sums of few large terms, and softmax
# feels the absolute error of their differences. An operand is off by up to 2^-9 of itself in BF16,
# 2^-11 in TF32, and a term by 2^-17 in three products of BF16 parts: of a score of 400 that is 0.8,
# 0.2 and 0.003. TF32 parts take 2.5 times as long over a prompt (benchmarks/plans/
# h200-key-bias.json).
#
# Bytes: 4 D a key and program, from L2: the table is the same for all heads and layers.
@triton_jit
def bias_factors(
    q_ptr: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    q_stride_d: tl.tensor,
    token_M: tl.tensor,
    head_M: tl.tensor,
    mask_M: tl.tensor,
    bias_ptr: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> Any:
    """What multiplies a key's cosines and its sines, float32 [M, F]; `bias_ptr` of the KV head."""
    f = tl.arange(0, BLOCK_F)
    mask_MF = mask_M[:, None] & (f < HALF)[None, :]
    q_row_M = token_M.to(tl.int64) * q_stride_t + head_M * q_stride_h
    q_MF = q_ptr + q_row_M[:, None] + f[None, :] * q_stride_d
    first_MF = tl.load(q_MF, mask=mask_MF, other=0.0).to(tl.float32)
    second_MF = tl.load(q_MF + HALF * q_stride_d, mask=mask_MF, other=0.0).to(tl.float32)
    first_1F = tl.load(bias_ptr + f, mask=f < HALF, other=0.0)[None, :]
    second_1F = tl.load(bias_ptr + HALF + f, mask=f < HALF, other=0.0)[None, :]
    return (
        first_MF * first_1F + second_MF * second_1F,
        second_MF * first_1F - first_MF * second_1F,
    )


@triton_jit
def bias_scores(
    cos_MF: tl.tensor,
    sin_MF: tl.tensor,
    table_ptr: tl.tensor,
    key_N: tl.tensor,
    mask_N: tl.tensor,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """q . R_n b of keys at positions `key_N`, [M, N]; 0 where masked."""
    f = tl.arange(0, cos_MF.shape[1])
    mask_NF = mask_N[:, None] & (f < HALF)[None, :]
    row_NF = table_ptr + key_N[:, None] * (2 * HALF) + f[None, :]
    cos_NF = tl.load(row_NF, mask=mask_NF, other=0.0)
    sin_NF = tl.load(row_NF + HALF, mask=mask_NF, other=0.0)
    score_MN = tl.dot(cos_MF, tl.trans(cos_NF), input_precision=PRECISION)
    return tl.dot(sin_MF, tl.trans(sin_NF), score_MN, input_precision=PRECISION)
