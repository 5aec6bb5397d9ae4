"""The routed feed-forward network: k of E experts for each token.

Letters: T tokens, D model width, E experts, F width of one expert.
"""

from __future__ import annotations

import torch
from torch import nn

from subten.config import ModelConfig
from subten.kernels import Ops
from subten.kernels.linear_route import Router
from subten.kernels.route import Routing
from subten.layers.linear import WeightSpec, empty_parameter


class MoE(nn.Module):
    """x + sum of the chosen experts, weighted; norm and routing in one op, residual in the other.

    The router's matrix is float32 whatever the model's dtype: two experts whose scores differ in
    the third digit must not become a tie.
    """

    def __init__(self, config: ModelConfig, *, ops: Ops, spec: WeightSpec) -> None:
        super().__init__()
        self.ops = ops
        self.norm_eps = config.norm_eps
        self.top_k = config.top_k
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        num_experts, d_model, d_ffn = config.num_experts, config.d_model, config.d_ffn
        self.gate_ED = empty_parameter(
            num_experts, d_model, device=spec.device, dtype=torch.float32
        )
        self.gate_up_EFD = spec.weight(num_experts, 2 * d_ffn, d_model, name="gate_up of experts")
        self.down_EDF = spec.weight(num_experts, d_model, d_ffn, name="down of experts")
        self.topk_id_TK: torch.Tensor | None = None

    def forward(self, x_TD: torch.Tensor, norm_weight_D: torch.Tensor) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> the same, the routed sum added."""
        routing = self.ops.route(
            x_TD,
            norm_weight_D,
            self.gate_ED,
            eps=self.norm_eps,
            top_k=self.top_k,
            renormalize=self.norm_topk_prob,
            scaling_factor=self.routed_scaling_factor,
            with_order=x_TD.shape[0] > self.ops.max_gather_tokens,
        )
        return self.routed(x_TD, routing)

    def router(self, norm_weight_D: torch.Tensor) -> Router:
        """Norm and router as `linear_route` takes them, not folded."""
        return Router(
            norm_weight_D=norm_weight_D,
            gate_ED=self.gate_ED,
            eps=self.norm_eps,
            top_k=self.top_k,
            renormalize=self.norm_topk_prob,
            scaling_factor=self.routed_scaling_factor,
        )

    def routed(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> the same, the sum of `routing`'s experts added."""
        # For whoever counts loads. Kept, it also stays what it is in a captured graph's memory.
        self.topk_id_TK = routing.topk_id_TK
        return self.ops.experts(  # type: ignore[no-any-return]
            routing, self.gate_up_EFD, self.down_EDF, residual_TD=x_TD
        )
