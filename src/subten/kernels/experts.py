"""The feed-forward of the chosen experts, weighted and added to the residual.

Letters: T tokens, K experts a token, A = T * K assignments, E experts, D features, F hidden
features of an expert (`gate_up_EFD` holds 2 * F rows, gate first).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subten.kernels.cpu_linear import cpu_linear
from subten.kernels.route import Routing


def experts_torch(
    routing: Routing,
    gate_up_EFD: torch.Tensor,
    down_EDF: torch.Tensor,
    *,
    residual_TD: torch.Tensor,
) -> torch.Tensor:
    """Twin of `experts`; reads the weights of the chosen experts alone."""
    num_tokens, top_k = routing.topk_id_TK.shape
    assignments: dict[int, list[int]] = {}
    for assignment, expert in enumerate(routing.topk_id_TK.flatten().tolist()):
        assignments.setdefault(expert, []).append(assignment)
    if not assignments:
        return residual_TD.clone()
    parts = []
    for expert, rows in assignments.items():
        h_RD = routing.h_TD[[row // top_k for row in rows]]
        gate_RF, up_RF = cpu_linear(h_RD, gate_up_EFD[expert]).chunk(2, dim=-1)
        parts.append(cpu_linear(F.silu(gate_RF) * up_RF, down_EDF[expert]))
    order = torch.tensor([row for rows in assignments.values() for row in rows])
    y_TKD = torch.cat(parts)[order.argsort().to(parts[0].device)].view(num_tokens, top_k, -1)
    sum_TD = (y_TKD.float() * routing.topk_weight_TK.unsqueeze(-1)).sum(dim=1)
    return (residual_TD.float() + sum_TD).to(residual_TD.dtype)
