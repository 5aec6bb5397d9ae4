"""A stand-in for the CUDA op that chooses a token's experts from attention's heads, in torch.

It does what the kernel does, and leaves nothing undone: its `Routing` is whole, so that torch's
`experts` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from subten.kernels import Ops, select_ops
from subten.kernels.linear import linear_torch
from subten.kernels.linear_route import Router
from subten.kernels.route import RoutedAhead, Routing
from subten.kernels.weight_formats import Weight
from subten.layers import decoder_layer


def linear_route_folded(
    heads_TN: torch.Tensor, output: Weight, router: Router, *, residual_TD: torch.Tensor
) -> tuple[torch.Tensor, Routing]:
    """x as ever; ids from the folded router, before the norm; weights once its factor is known."""
    assert router.folded_EM is not None
    x_TD = linear_torch(heads_TN, output, residual_TN=residual_TD)
    both_TM = torch.cat([heads_TN.float(), residual_TD.float()], dim=1)
    score_TE = both_TM @ router.folded_EM.T
    order_TE = score_TE.sort(dim=-1, descending=True, stable=True).indices
    topk_id_TK = order_TE[:, : router.top_k]
    inverse_T1 = (x_TD.float().square().mean(dim=-1, keepdim=True) + router.eps).rsqrt()
    weight_TK = (score_TE * inverse_T1).softmax(dim=-1).gather(1, topk_id_TK)
    if router.renormalize:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
    h_TD = x_TD.float() * inverse_T1 * router.norm_weight_D.float()
    return x_TD, Routing(
        h_TD=h_TD.to(router.norm_weight_D.dtype),
        topk_id_TK=topk_id_TK.int(),
        topk_weight_TK=weight_TK * router.scaling_factor,
        ahead=RoutedAhead(
            x_TD=x_TD,
            norm_weight_D=router.norm_weight_D,
            score_TE=score_TE,
            eps=router.eps,
            renormalize=router.renormalize,
            scaling_factor=router.scaling_factor,
        ),
    )


@dataclass
class Ahead:
    """Ops whose `linear_route` counts as CUDA's, and what it was called with."""

    ops: Ops
    routers: list[Router] = field(default_factory=list)


def ahead_ops(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Ahead:
    """Torch ops but for `linear_route`, for layers of any weights."""
    monkeypatch.setattr(decoder_layer, "can_route_ahead", lambda *_: True)
    plain = select_ops("torch", device)

    def watched(*args: Any, **kwargs: Any) -> Any:
        found.routers.append(args[2])
        return linear_route_folded(*args, **kwargs)

    served = {**plain.backend, "linear_route": "cuda"}
    found = Ahead(ops=replace(plain, linear_route=watched, backend=served))
    return found
