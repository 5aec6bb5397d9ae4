"""One layer of a decoder: attention and a feed-forward network on one residual stream.

Letters: T tokens of the step, D model width (head dimension in `rotation_DD`), P pages (positions
in `cos_sin_PD`), G key-value heads, B bytes of a page.
"""

from __future__ import annotations

import torch
from torch import nn

from subten.codecs import KVFormat
from subten.codecs.adaptive import AdaptiveFormat
from subten.config import ModelConfig
from subten.kernels import Ops
from subten.kernels.adaptive_pages import LayerPages
from subten.kernels.step import StepTensors
from subten.layers.adaptive_attention import AdaptiveAttention
from subten.layers.attention import Attention
from subten.layers.linear import WeightSpec
from subten.layers.mlp import MLP
from subten.layers.moe import MoE


class DecoderLayer(nn.Module):
    """Attention, then a dense or routed feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, ops: Ops, fmt: KVFormat, spec: WeightSpec) -> None:
        super().__init__()
        self.attention_norm_D = spec.empty(config.d_model)
        self.ffn_norm_D = spec.empty(config.d_model)
        kind = AdaptiveAttention if isinstance(fmt, AdaptiveFormat) else Attention
        self.attention = kind(config, ops=ops, fmt=fmt, spec=spec)
        self.ffn: MoE | MLP
        if config.is_moe:
            self.ffn = MoE(config, ops=ops, spec=spec)
        else:
            self.ffn = MLP(config, ops=ops, spec=spec)

    def forward(
        self,
        x_TD: torch.Tensor,
        step: StepTensors,
        *,
        pages_PGB: torch.Tensor | LayerPages,
        cos_sin_PD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
    ) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> the same after this layer; appends to its pages."""
        x_TD = self.attention(
            x_TD,
            self.attention_norm_D,
            step,
            pages_PGB=pages_PGB,
            cos_sin_PD=cos_sin_PD,
            rotation_DD=rotation_DD,
        )
        return self.ffn(x_TD, self.ffn_norm_D)  # type: ignore[no-any-return]
