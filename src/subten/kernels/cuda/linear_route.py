"""`linear_route` on CUDA: the output product, then the router.

Letters: T tokens, N features of all heads, D model width.
"""

from __future__ import annotations

import torch

from subten.kernels.cuda.linear import linear
from subten.kernels.cuda.route import route
from subten.kernels.linear_route import Router
from subten.kernels.route import Routing
from subten.kernels.weight_formats import Weight


def can_route_ahead(output: Weight, router: Router, gate_up: Weight, down: Weight) -> bool:  # noqa: ARG001
    """Whether a layer of these weights has a kernel that takes `router.folded_EM`: none has."""
    return False


def linear_route(
    heads_TN: torch.Tensor,
    output: Weight,
    router: Router,
    *,
    residual_TD: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    with_order: bool = False,
) -> tuple[torch.Tensor, Routing]:
    """`subten.kernels.linear_route.linear_route` by `linear` and `route` of this package."""
    x_TD = linear(heads_TN, output, bias_N=bias_D, residual_TN=residual_TD)
    routing = route(
        x_TD,
        router.norm_weight_D,
        router.gate_ED,
        eps=router.eps,
        top_k=router.top_k,
        renormalize=router.renormalize,
        scaling_factor=router.scaling_factor,
        with_order=with_order,
    )
    return x_TD, routing
