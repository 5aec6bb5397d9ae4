"""The dense SwiGLU feed-forward network.

Letters: T tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from subten.config import ModelConfig
from subten.kernels import Ops
from subten.layers.linear import Linear


class MLP(nn.Module):
    """x + down(silu(gate h) * up h) with h = RMSNorm(x); gate and up are rows of one matrix."""

    def __init__(
        self, config: ModelConfig, *, ops: Ops, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ops = ops
        self.norm_eps = config.norm_eps
        self.gate_up = Linear(config.d_model, 2 * config.d_ffn, device=device, dtype=dtype)
        self.down = Linear(config.d_ffn, config.d_model, device=device, dtype=dtype)

    def forward(self, x_TD: torch.Tensor, norm_weight_D: torch.Tensor) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> the same, this network's output added."""
        h_TD = self.ops.rms_norm(x_TD, norm_weight_D, eps=self.norm_eps)
        gate_TF, up_TF = self.gate_up(h_TD).chunk(2, dim=-1)
        return x_TD + self.down(F.silu(gate_TF) * up_TF)  # type: ignore[no-any-return]
