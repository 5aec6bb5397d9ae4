"""`append_attend`: a step's keys and values into their pages, then its queries' attention.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages of the pool (in
`pages_PGB`) or positions of the rotary table (in `cos_sin_PD`), B bytes of a page.
"""

from __future__ import annotations

import torch

from subten.codecs import KVFormat
from subten.kernels.attend import attend, attend_torch
from subten.kernels.kv_append import kv_append, kv_append_torch
from subten.kernels.step import StepTensors


def append_attend(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    cos_sin_PD: torch.Tensor,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor | None = None,
    q_norm_weight_D: torch.Tensor | None = None,
    k_norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    key_bias_GD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kv_append` of the step's rows, then `attend` of its queries: `out_THD` in q's dtype.

    Rows are as a projection leaves them, without norm and rotary embedding. Writes keys and values
    into `pages_PGB` at `step.slot_T`: the row of the token's position in its sequence's pages, or
    -1, which writes nothing. Tokens of a skipped tile (`tile_seq_Q` -1) must have slot -1.

    Shapes, dtypes, strides and rounding are those of the two ops; two launches and a merge.
    `key_bias_GD` is that of `attend`: what `k_TGD` lacks, which has no norm then.
    """
    turned_THD = kv_append(
        k_TGD,
        v_TGD,
        pages_PGB,
        fmt,
        cos_sin_PD,
        step.position_T,
        step.slot_T,
        rotation_DD=rotation_DD,
        norm_weight_D=k_norm_weight_D,
        eps=eps,
        q_THD=q_THD,
        q_norm_weight_D=q_norm_weight_D,
    )
    assert turned_THD is not None
    return attend(
        turned_THD,
        pages_PGB,
        fmt,
        step,
        scale=scale,
        rotation_DD=rotation_DD,
        key_bias_GD=key_bias_GD,
        cos_sin_PD=cos_sin_PD,
    )


def append_attend_torch(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    cos_sin_PD: torch.Tensor,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor | None = None,
    q_norm_weight_D: torch.Tensor | None = None,
    k_norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    key_bias_GD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `append_attend`, and the CPU backend."""
    turned_THD = kv_append_torch(
        k_TGD,
        v_TGD,
        pages_PGB,
        fmt,
        cos_sin_PD,
        step.position_T,
        step.slot_T,
        rotation_DD=rotation_DD,
        norm_weight_D=k_norm_weight_D,
        eps=eps,
        q_THD=q_THD,
        q_norm_weight_D=q_norm_weight_D,
    )
    assert turned_THD is not None
    return attend_torch(
        turned_THD,
        pages_PGB,
        fmt,
        step,
        scale=scale,
        rotation_DD=rotation_DD,
        key_bias_GD=key_bias_GD,
        cos_sin_PD=cos_sin_PD,
    )
