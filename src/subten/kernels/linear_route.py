"""Attention's output product and, from the same input, the router's choice of experts.

Letters: T tokens, N features of all heads, D model width, E experts, M = N + D columns of the
folded router, R rows of a chunk of the weight.

With heads a, output matrix W, residual x, norm weight w and router matrix g,

    x' = x + W a
    score_e = sum_d g_ed w_d x'_d / rms(x') = (sum_n G_en a_n + sum_d g_ed w_d x_d) / rms(x')
    G = (g * w) W

The one factor 1 / rms(x') is positive and the same for all experts, so that which of them score
highest follows from a and x alone: from the input of the output product, not from its result.
`fold_router` makes [G, g * w]; the CUDA kernel chooses by it while the product is still running.
In exact arithmetic that is the choice of `route`; rounded, scores differ as sums of another order
do, and a residual in bfloat16 is taken before it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from subten.kernels.linear import linear, linear_torch
from subten.kernels.route import Routing, route, route_torch
from subten.kernels.weight_formats import Weight, chunk_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """The norm and the router of a layer, as `route` takes them.

    `folded_EM` is None, or float32 [E, N + D] of `fold_router`: heads' columns, then the
    residual's.
    """

    norm_weight_D: torch.Tensor
    gate_ED: torch.Tensor
    eps: float
    top_k: int
    renormalize: bool
    scaling_factor: float = 1.0
    folded_EM: torch.Tensor | None = None


def linear_route(
    heads_TN: torch.Tensor, output: Weight, router: Router, *, residual_TD: torch.Tensor
) -> tuple[torch.Tensor, Routing]:
    """(x, routing): `linear` of heads [T, N] by output [D, N] with residual, then `route` of x.

    x is new, [T, D] in the residual's dtype. `router.folded_EM` is not read here: scores are those
    of x as it is rounded.
    """
    return one_after_other(linear, route, heads_TN, output, router, residual_TD)


def linear_route_torch(
    heads_TN: torch.Tensor, output: Weight, router: Router, *, residual_TD: torch.Tensor
) -> tuple[torch.Tensor, Routing]:
    """Twin of `linear_route`."""
    return one_after_other(linear_torch, route_torch, heads_TN, output, router, residual_TD)


def one_after_other(
    linear: Callable[..., torch.Tensor],
    route: Callable[..., Routing],
    heads_TN: torch.Tensor,
    output: Weight,
    router: Router,
    residual_TD: torch.Tensor,
) -> tuple[torch.Tensor, Routing]:
    """`linear_route` by a backend's two ops."""
    x_TD = linear(heads_TN, output, residual_TN=residual_TD)
    routing = route(
        x_TD,
        router.norm_weight_D,
        router.gate_ED,
        eps=router.eps,
        top_k=router.top_k,
        renormalize=router.renormalize,
        scaling_factor=router.scaling_factor,
    )
    return x_TD, routing


@torch.no_grad()
def fold_router(gate_ED: torch.Tensor, norm_weight_D: torch.Tensor, output: Weight) -> torch.Tensor:
    """[(gate * norm_weight) @ output, gate * norm_weight]: float32 [E, N + D], summed in float64.

    gate [E, D], norm_weight [D]; `output` [D, N] counts as its format unpacks it.
    """
    num_experts, dim = gate_ED.shape
    assert norm_weight_D.shape == (dim,), (tuple(norm_weight_D.shape), dim)
    assert len(output.shape) == 2 and output.shape[0] == dim, (output.shape, dim)
    normed_ED = gate_ED.double() * norm_weight_D.double()
    heads_EN = normed_ED.new_zeros(num_experts, output.in_features)
    step = chunk_rows(output.in_features, gate_ED.device)
    for first in range(0, dim, step):
        rows = slice(first, min(first + step, dim))
        heads_EN.addmm_(normed_ED[:, rows], output.dequantize((rows,)).double())
    return torch.cat([heads_EN, normed_ED], dim=1).float()
