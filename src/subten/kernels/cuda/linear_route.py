"""`linear_route` on CUDA: for one token the output product and the choice of experts in one launch.

Letters: T tokens, N features of all heads, D model width, E experts, K experts a token, F hidden
features of an expert, M = N + D columns of the folded router, P parts of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from subten.kernels.cuda import linear as cuda_linear
from subten.kernels.cuda import route as cuda_route
from subten.kernels.cuda import runtime
from subten.kernels.cuda.experts import suits_one_token
from subten.kernels.cuda.gemv import (
    FORMATS,
    KEPT_UNITS,
    TILE_ROWS,
    GemvPlan,
    has_rows,
    is_plain,
    linear_shared,
    plan_ahead,
    suits_weight,
    units_of_thread,
)
from subten.kernels.linear_route import Router, one_after_other
from subten.kernels.route import RoutedAhead, Routing
from subten.kernels.weight_formats import Weight

KEPT_QUADS = (1, 3, 6)
"""Fours of its block's part of a folded row that a thread may keep in registers."""

MAX_CHOSEN_BYTES = 256 * 2**20
"""Of the experts of a token. Where they are more, the choice is a small part of a layer, and whole
steps are slower by 1 % (mixtral-8x7b in FP8) to 1.5 % (in BF16): `h200-route-ahead.json`."""


def can_route_ahead(output: Weight, router: Router, gate_up: Weight, down: Weight) -> bool:
    """Whether a layer of these weights has kernels that take `router.folded_EM` and gains by it."""
    num_experts = router.gate_ED.shape[0]
    chosen_bytes = (gate_up.nbytes + down.nbytes) * router.top_k // num_experts
    return (
        chosen_bytes <= MAX_CHOSEN_BYTES
        and _suits_weights(output, router)
        and gate_up.shape[0] == num_experts
        and suits_one_token(gate_up, down, router.top_k)
    )


def linear_route(
    heads_TN: torch.Tensor,
    output: Weight,
    router: Router,
    *,
    residual_TD: torch.Tensor,
    plan: GemvPlan | None = None,
    pdl: bool = True,
) -> tuple[torch.Tensor, Routing]:
    """`subten.kernels.linear_route.linear_route`: one launch for one token with `folded_EM`
    and a float32 residual.

    Then the routing says `ahead` and `experts` must be the next launch. Ids come from FP32 sums of
    the folded router, in an order of their own: those of `route` but where scores are as close as
    the rounding of such sums. All else is `linear` and `route` of this package. With `pdl`
    (programmatic dependent launch), weights and router must be in place since before the previous
    launch. `plan` and `pdl` are for measuring. Launches on one device must follow one another: they
    share scores with `route`; the first one, outside of any graph capture, allocates them.
    """
    folded_EM = router.folded_EM
    if (
        folded_EM is None
        or not _suits_weights(output, router)
        or not _suits(heads_TN, folded_EM, residual_TD)
    ):
        return one_after_other(
            cuda_linear.linear, cuda_route.route, heads_TN, output, router, residual_TD
        )
    (dim, num_inputs), device = output.shape, heads_TN.device
    num_experts, top_k = router.gate_ED.shape[0], router.top_k
    plan = plan or plan_output(output)
    plan.check(num_inputs, FORMATS[output.format])
    num_blocks, num_parts = blocks_and_parts(plan, output.shape, num_experts)
    x_TD = torch.empty(1, dim, dtype=torch.float32, device=device)
    score_TE = torch.empty(1, num_experts, dtype=torch.float32, device=device)
    routing = Routing(
        h_TD=torch.empty(0, dim, dtype=torch.bfloat16, device=device),
        topk_id_TK=torch.empty(1, top_k, dtype=torch.int32, device=device),
        topk_weight_TK=torch.empty(1, top_k, dtype=torch.float32, device=device),
        ahead=RoutedAhead(
            x_TD=x_TD,
            norm_weight_D=router.norm_weight_D,
            score_TE=score_TE,
            eps=router.eps,
            renormalize=router.renormalize,
            scaling_factor=router.scaling_factor,
        ),
    )
    # Keys up to a multiple of 4, and the parts.
    pick_bytes = 4 * (-(-num_experts // 4) * 4 + num_experts * num_parts)
    runtime.launch(
        "linear_route.cu",
        kernel_name(output.format, plan, output.shape, num_experts),
        (num_blocks + 1,),
        plan.num_threads,
        (
            output.codes,
            output.scale,
            heads_TN,
            residual_TD,
            x_TD,
            dim,
            num_inputs,
            plan.warps_k,
            plan.tiles,
            folded_EM,
            cuda_route.unset_scores(device),
            score_TE,
            routing.topk_id_TK,
            num_experts,
            num_parts,
            top_k,
        ),
        device=device,
        shared_bytes=max(linear_shared(output.format, 1, num_inputs, plan), pick_bytes),
        pdl=pdl and plan.starts_early,
    )
    return x_TD, routing


def plan_output(output: Weight) -> GemvPlan:
    """Plan of the output product beside the choice of experts."""
    dim, num_inputs = output.shape
    return plan_ahead(dim // TILE_ROWS, num_inputs, output.format)


def blocks_and_parts(plan: GemvPlan, shape: Sequence[int], num_experts: int) -> tuple[int, int]:
    """Blocks that have rows of an output matrix [D, N], and parts of a folded row, each a block's.

    Parts until a thread has one four, as far as there are blocks for them.
    """
    dim, num_inputs = shape
    num_blocks = -(-dim // (TILE_ROWS * plan.warps_n * plan.tiles))
    most = -(-(num_inputs + dim) // (4 * plan.num_threads))
    return num_blocks, max(1, min(num_blocks // num_experts, most))


def kernel_name(weight_format: str, plan: GemvPlan, shape: Sequence[int], num_experts: int) -> str:
    """The kernel's instance in C++ for an output matrix [D, N]."""
    num_blocks, num_parts = blocks_and_parts(plan, shape, num_experts)
    # Parts differ by one four at most.
    fours = -(-sum(shape) // (4 * num_parts))
    needed = -(-fours // plan.num_threads)
    quads = next((q for q in KEPT_QUADS if q >= needed), 0)
    if num_experts * num_parts > num_blocks:
        quads = 0
    # With a shallow ring the registers are for the next launch's blocks, which fetch meanwhile.
    blocks = 512 // plan.num_threads * (2 if plan.depth == 2 and quads <= 3 else 1)
    arguments = (
        FORMATS[weight_format].struct,
        plan.depth,
        units_of_thread(shape[1], plan),
        quads,
        plan.num_threads,
        blocks,
    )
    return f"linear_route_kernel<{', '.join(map(str, arguments))}>"


def _suits_weights(output: Weight, router: Router) -> bool:
    num_inputs = output.shape[1]
    if not suits_weight(output, TILE_ROWS):
        return False
    plan = plan_output(output)
    return (
        router.gate_ED.shape[0] <= cuda_route.MAX_EXPERTS
        and router.top_k <= cuda_route.MAX_TOP_K
        and router.norm_weight_D.dtype == torch.bfloat16
        and is_plain(router.norm_weight_D)
        and units_of_thread(num_inputs, plan) <= KEPT_UNITS
        and linear_shared(output.format, 1, num_inputs, plan)
        <= runtime.max_shared_bytes(output.codes.device)
    )


def _suits(heads_TN: torch.Tensor, folded_EM: torch.Tensor, residual_TD: torch.Tensor) -> bool:
    return (
        heads_TN.shape[0] == 1
        and heads_TN.dtype == torch.bfloat16
        and has_rows(heads_TN)
        and folded_EM.dtype == torch.float32
        and is_plain(folded_EM)
        and residual_TD.dtype == torch.float32
        and is_plain(residual_TD)
    )
