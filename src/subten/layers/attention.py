"""Grouped-query attention over the paged, encoded KV cache.

Letters: T tokens of the step, D model width, H query heads, G key-value heads, P pages, B bytes of
a page; the head dimension is also D where a name says THD or TGD.
"""

from __future__ import annotations

import torch
from torch import nn

from subten.codecs import KVFormat
from subten.config import ModelConfig
from subten.kernels import Ops
from subten.kernels.step import StepTensors
from subten.layers.linear import Linear, empty_parameter


class Attention(nn.Module):
    """Project, rotate, append to the pages, attend, project back.

    q, k and v are rows of one matrix, in that order. `q_norm_D` and `k_norm_D` are the per-head
    RMSNorm weights of models that have them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        ops: Ops,
        fmt: KVFormat,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert fmt.head_dim == config.head_dim, (fmt.head_dim, config.head_dim)
        self.ops = ops
        self.fmt = fmt
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.norm_eps = config.norm_eps
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(
            config.d_model, num_rows, has_bias=config.has_qkv_bias, device=device, dtype=dtype
        )
        self.output = Linear(
            config.num_heads * config.head_dim,
            config.d_model,
            has_bias=config.has_qkv_bias,
            device=device,
            dtype=dtype,
        )
        self.q_norm_D: nn.Parameter | None = None
        self.k_norm_D: nn.Parameter | None = None
        if config.has_qk_norm:
            self.q_norm_D = empty_parameter(config.head_dim, device=device, dtype=dtype)
            self.k_norm_D = empty_parameter(config.head_dim, device=device, dtype=dtype)

    def forward(
        self,
        h_TD: torch.Tensor,
        step: StepTensors,
        *,
        pages_PGB: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of the normed tokens h_TD [T, d_model] -> [T, d_model], without residual.

        Writes this step's keys and values, encoded, into this layer's `pages_PGB`.
        """
        num_tokens = h_TD.shape[0]
        qkv_THD = self.qkv(h_TD).view(num_tokens, -1, self.head_dim)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_THD, k_TGD, v_TGD = qkv_THD.split(heads, dim=1)
        q_THD = self.ops.norm_rope(
            q_THD, cos_sin_PD, step.position_T, norm_weight_D=self.q_norm_D, eps=self.norm_eps
        )
        self.ops.kv_append(
            k_TGD,
            v_TGD,
            pages_PGB,
            self.fmt,
            cos_sin_PD,
            step.position_T,
            step.slot_T,
            rotation_DD=rotation_DD,
            norm_weight_D=self.k_norm_D,
            eps=self.norm_eps,
        )
        out_THD = self.ops.attend(
            q_THD, pages_PGB, self.fmt, step, scale=self.scale, rotation_DD=rotation_DD
        )
        return self.output(out_THD.reshape(num_tokens, -1))  # type: ignore[no-any-return]
