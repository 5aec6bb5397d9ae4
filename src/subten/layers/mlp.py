"""The dense SwiGLU feed-forward network.

Letters: T tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from subten.config import ModelConfig
from subten.kernels import Ops
from subten.layers.linear import Linear, WeightSpec


class MLP(nn.Module):
    """x + down(silu(gate h) * up h) with h = RMSNorm(x); gate and up are rows of one matrix."""

    def __init__(self, config: ModelConfig, *, ops: Ops, spec: WeightSpec) -> None:
        super().__init__()
        d_model, d_ffn = config.d_model, config.d_ffn
        self.norm_eps = config.norm_eps
        self.gate_up = Linear(d_model, 2 * d_ffn, ops=ops, spec=spec, name="gate_up")
        self.down = Linear(d_ffn, d_model, ops=ops, spec=spec, name="down")

    def forward(self, x_TD: torch.Tensor, norm_weight_D: torch.Tensor) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> the same, this network's output added."""
        gate_up_TF = self.gate_up(x_TD, norm_weight_K=norm_weight_D, eps=self.norm_eps)
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        return self.down(F.silu(gate_TF) * up_TF, residual_TN=x_TD)  # type: ignore[no-any-return]
