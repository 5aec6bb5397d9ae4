"""One layer of a decoder: attention and a feed-forward network on one residual stream.

Letters: T tokens of the step, D model width (head dimension in `rotation_DD`), P pages (positions
in `cos_sin_PD`), G key-value heads, B bytes of a page.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from subten.codecs import KVFormat
from subten.codecs.adaptive import AdaptiveFormat
from subten.config import ModelConfig
from subten.kernels import Ops
from subten.kernels.adaptive_pages import LayerPages
from subten.kernels.beside import Beside
from subten.kernels.cuda.linear_route import can_route_ahead
from subten.kernels.linear_route import Router, fold_router
from subten.kernels.step import StepTensors
from subten.layers.adaptive_attention import AdaptiveAttention
from subten.layers.attention import Attention
from subten.layers.linear import WeightSpec
from subten.layers.mlp import MLP
from subten.layers.moe import MoE


class DecoderLayer(nn.Module):
    """Attention, then a dense or routed feed-forward network, each added to the residual stream.

    `router` is None until `fold_router` finds that a kernel of the layer's backend chooses the
    experts of a single token beside the output product.
    """

    def __init__(self, config: ModelConfig, *, ops: Ops, fmt: KVFormat, spec: WeightSpec) -> None:
        super().__init__()
        self.ops = ops
        self.attention_norm_D = spec.empty(config.d_model)
        self.ffn_norm_D = spec.empty(config.d_model)
        kind = AdaptiveAttention if isinstance(fmt, AdaptiveFormat) else Attention
        self.attention = kind(config, ops=ops, fmt=fmt, spec=spec)
        self.ffn: MoE | MLP
        if config.is_moe:
            self.ffn = MoE(config, ops=ops, spec=spec)
        else:
            self.ffn = MLP(config, ops=ops, spec=spec)
        self.router: Router | None = None
        self.register_load_state_dict_post_hook(_fold_again)  # type: ignore[no-untyped-call]

    def fold_router(self) -> None:
        """Make `router` of the weights as they are, where the layer can use it.

        Weights that `load_state_dict` changes are folded again by themselves; after any other
        change call this, or a single token's experts are chosen by the old ones.
        """
        self.router = None
        ffn, output = self.ffn, self.attention.output
        if self.ops.backend.get("linear_route") != "cuda" or not isinstance(ffn, MoE):
            return
        router = ffn.router(self.ffn_norm_D)
        if output.bias is None and can_route_ahead(
            output.weight, router, ffn.gate_up_EFD, ffn.down_EDF
        ):
            folded_EM = fold_router(router.gate_ED, router.norm_weight_D, output.weight)
            self.router = replace(router, folded_EM=folded_EM)

    def forward(
        self,
        x_TD: torch.Tensor,
        step: StepTensors,
        *,
        pages_PGB: torch.Tensor | LayerPages,
        cos_sin_PD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
        beside: Beside | None = None,
        following: Beside | None = None,
    ) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> the same after this layer; appends to its pages.

        `beside` may hold weights that are unpacked already; those of `following` are unpacked while
        experts are chosen, which leaves the memory idle.
        """
        heads_TN = self.attention(
            x_TD,
            self.attention_norm_D,
            step,
            pages_PGB=pages_PGB,
            cos_sin_PD=cos_sin_PD,
            rotation_DD=rotation_DD,
            beside=beside,
        )
        output = self.attention.output
        if self.router is not None and x_TD.shape[0] == 1:
            assert isinstance(self.ffn, MoE), type(self.ffn)
            x_TD, routing = self.ops.linear_route(
                heads_TN, output.weight, self.router, residual_TD=x_TD
            )
            return self.ffn.routed(x_TD, routing)
        x_TD = output(heads_TN, residual_TN=x_TD, beside=beside)
        with nullcontext() if following is None else following.unpacking():
            x_TD = self.ffn(x_TD, self.ffn_norm_D)
        return x_TD


def _fold_again(layer: nn.Module, _keys: Any) -> None:
    """After `load_state_dict`: parameters may be others, or have other values."""
    assert isinstance(layer, DecoderLayer), type(layer)
    if layer.router is not None:
        layer.fold_router()
