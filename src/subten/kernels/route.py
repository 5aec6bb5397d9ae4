"""Which experts each token goes to: norm, router product, softmax, top-k and order, in FP32.

Letters: T tokens, D features, E experts, K experts a token, A = T * K assignments; assignment
t * K + k is the k-th expert of token t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Where the tokens of one layer go, best expert first.

    `h_TD` the normed input of the experts, in x's dtype; `topk_id_TK` int32, distinct in each row
    and within [0, E) whatever the input; `topk_weight_TK` float32, NaN in a row whose scores hold
    a NaN or +inf or nothing finite, so that the row's request fails where its logits are read.
    With order: `order_A` int32, assignments sorted by expert, by number within an expert;
    `expert_start_E1` int32 [E + 1], expert e owns order[expert_start[e] : expert_start[e + 1]].
    """

    h_TD: torch.Tensor
    topk_id_TK: torch.Tensor
    topk_weight_TK: torch.Tensor
    expert_start_E1: torch.Tensor | None = None
    order_A: torch.Tensor | None = None


def route_torch(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    gate_ED: torch.Tensor,
    *,
    eps: float,
    top_k: int,
    renormalize: bool,
    scaling_factor: float = 1.0,
    with_order: bool = False,
) -> Routing:
    """Twin of `route`."""
    h_TD = F.rms_norm(x_TD.float(), norm_weight_D.shape, norm_weight_D.float(), eps)
    score_TE = F.linear(h_TD, gate_ED.float())
    key_TE = score_TE.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # A stable sort sends ties to the lowest id; topk leaves their order open.
    topk_id_TK = key_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight_TK = score_TE.softmax(dim=-1).gather(1, topk_id_TK)
    if renormalize:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
    start_E1 = order_A = None
    if with_order:
        id_A, order_A = topk_id_TK.flatten().sort(stable=True)
        edge_E1 = torch.arange(gate_ED.shape[0] + 1, device=id_A.device)
        start_E1 = torch.searchsorted(id_A, edge_E1).int()
        order_A = order_A.int()
    return Routing(
        h_TD=h_TD.to(x_TD.dtype),
        topk_id_TK=topk_id_TK.int(),
        topk_weight_TK=weight_TK * scaling_factor,
        expert_start_E1=start_E1,
        order_A=order_A,
    )
