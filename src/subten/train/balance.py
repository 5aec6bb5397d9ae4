"""Load balance of experts: the losses that make it and the number that judges it."""

# Letters: L layers, E experts

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(count_LE: Tensor, prob_LE: Tensor) -> Tensor:
    """Switch loss E * sum_e f_e * P_e of each layer (L), 1 for even load.

    f is the share of routed slots and P the mean router probability (Fedus et al. 2021, equation
    4, with f over all K slots of a token). `count_LE` (tokens an expert got) should be of the whole
    batch, over all micro-batches and GPUs: balance within a single small batch forbids experts to
    specialise (Qiu et al. 2025). The gradient reaches the router through P alone.
    """
    share_LE = count_LE / count_LE.sum(-1, keepdim=True)
    return count_LE.shape[-1] * (share_LE.detach() * prob_LE).sum(-1)


def router_z_loss(score_TE: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(scores) squared (Zoph et al. 2022, ST-MoE, equation 5)."""
    return torch.logsumexp(score_TE.float(), dim=-1).square().mean()


def max_violation(count_LE: Tensor) -> Tensor:
    """MaxVio (L): largest load of a layer over its mean load, minus 1 (Wang et al. 2024)."""
    load = count_LE.double()
    return load.max(-1).values / load.mean(-1) - 1
