"""The feed-forward of the chosen experts for 1 to 8 tokens on CUDA, in two launches.

Letters: T tokens, K experts a token, A = T * K assignments, E experts, D features, F hidden
features of an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from subten.kernels import experts as triton_experts
from subten.kernels.cuda import grouped, runtime
from subten.kernels.cuda.gemv import (
    FLOAT_DTYPES,
    FORMATS,
    KEPT_UNITS,
    MAX_TOKENS,
    TILE_ROWS,
    GemvPlan,
    is_one_token,
    is_plain,
    kernel_name,
    linear_shared,
    plan_ahead,
    plan_gemv,
    shared_bytes,
    suits_weight,
    units_of_thread,
)
from subten.kernels.route import RoutedAhead, Routing
from subten.kernels.weight_formats import Weight

UP_TILE = 8
"""Hidden features of a tile of `up`: 8 gate rows and the 8 up rows that go with them."""

MAX_GATHER_TOKENS = 5
"""Tokens up to which weights are gathered for each, two launches; for more, `grouped` reads each
expert once, in one. A step of qwen3-30b-a3b, 8 tokens: FP8 6.14 ms gathered and 5.00 grouped, INT4
4.70 and 3.96, BF16 8.37 and 8.06; 6 tokens, FP8: 5.00 and 4.35; 4 tokens: 3.75 and 3.73, 2.87 and
3.05, 5.15 and 5.61. mixtral-8x7b likewise (benchmarks/plans/h200-few-tokens.json)."""

MAX_WARPS = 16
"""Warps of a block, so experts a token of `down` at most."""


def plan_up(top_k: int, hidden: int, dim: int, weight_format: str) -> GemvPlan:
    """Plan of gate and up: the tiles of one token's experts, however many tokens there are."""
    return plan_gemv(top_k * hidden // UP_TILE, dim, weight_format)


def plan_up_ahead(top_k: int, hidden: int, dim: int, weight_format: str) -> GemvPlan:
    """Plan of gate and up that wait for ids only."""
    return plan_ahead(top_k * hidden // UP_TILE, dim, weight_format)


MEASURED_DOWN: Mapping[tuple[int, int, str], tuple[int, int]] = {
    (8, 768, "none"): (2, 6),
    (8, 768, "fp8"): (2, 4),
    (8, 768, "int4"): (1, 4),
    (2, 14336, "none"): (8, 8),
    (2, 14336, "fp8"): (8, 2),
    (2, 14336, "int4"): (8, 2),
}
"""(experts a token, F, format) to the fastest (warps_k, depth), as `gemv.MEASURED`."""


def plan_down(top_k: int, hidden: int, weight_format: str) -> GemvPlan:
    """Plan of down: `warps_n` is the experts of a token, side by side in a block.

    As measured, or else as many warps as a block may have, with 2 KiB in flight each.
    """
    widest = max(1, min(MAX_WARPS // top_k, hidden // FORMATS[weight_format].block))
    warps_k, depth = MEASURED_DOWN.get((top_k, hidden, weight_format), (widest, 2))
    return GemvPlan(warps_k=warps_k, warps_n=top_k, depth=depth)


def experts(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    *,
    residual_TD: torch.Tensor,
    up_plan: GemvPlan | None = None,
    down_plan: GemvPlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """`subten.kernels.experts.experts` in two CUDA launches, for 1 to 8 tokens without an order.

    With an order, `grouped.py` serves any number. What no kernel takes goes to Triton. `up_plan`,
    `down_plan` and `pdl` (programmatic dependent launch) are for measuring. Weights must be in
    place as for `linear` of this package.
    Quantised weights take |h| and |act| below 2^63. Where the routing is `ahead`, the launch before
    must be that of `linear_route`; it takes |x norm_weight| below 2^63, and writes topk_weight.
    """
    if routing.ahead is not None:
        assert suits_one_token(gate_up, down, routing.topk_id_TK.shape[1]), (gate_up, down)
    elif grouped.suits(routing, gate_up, down, residual_TD):
        return grouped.grouped(routing, gate_up, down, residual_TD=residual_TD, pdl=pdl)
    elif not _suits(routing, gate_up, down, residual_TD):
        return triton_experts.experts(routing, gate_up, down, residual_TD=residual_TD)
    act_AF = launch_up(routing, gate_up, plan=up_plan, pdl=pdl)
    return launch_down(routing, act_AF, down, residual_TD=residual_TD, plan=down_plan, pdl=pdl)


def launch_up(
    routing: Routing, gate_up: Weight, *, plan: GemvPlan | None = None, pdl: bool = True
) -> torch.Tensor:
    """silu(gate h) * (up h) of each assignment: bfloat16 [A, F]; one launch."""
    if routing.ahead is not None:
        return _launch_up_ahead(routing, routing.ahead, gate_up, plan, pdl)
    num_tokens, top_k = routing.topk_id_TK.shape
    _, double_hidden, dim = gate_up.shape
    hidden = double_hidden // 2
    plan = plan or plan_up(top_k, hidden, dim, gate_up.format)
    plan.check(dim, FORMATS[gate_up.format])
    device = routing.h_TD.device
    act_AF = torch.empty(num_tokens * top_k, hidden, dtype=torch.bfloat16, device=device)
    runtime.launch(
        "experts.cu",
        kernel_name("up_kernel", gate_up.format, plan, is_one_token(num_tokens, dim, plan)),
        (num_tokens * top_k, -(-hidden // (UP_TILE * plan.warps_n * plan.tiles))),
        plan.num_threads,
        (
            gate_up.codes,
            gate_up.scale,
            routing.h_TD,
            routing.topk_id_TK,
            act_AF,
            num_tokens * top_k,
            top_k,
            dim,
            hidden,
            plan.warps_k,
            plan.tiles,
        ),
        device=device,
        shared_bytes=linear_shared(gate_up.format, num_tokens, dim, plan),
        pdl=pdl and plan.starts_early,
    )
    return act_AF


def _launch_up_ahead(
    routing: Routing,
    ahead: RoutedAhead,
    gate_up: Weight,
    plan: GemvPlan | None,
    pdl: bool,
) -> torch.Tensor:
    top_k, num_experts = routing.topk_id_TK.shape[1], ahead.score_TE.shape[1]
    _, double_hidden, dim = gate_up.shape
    hidden = double_hidden // 2
    plan = plan or plan_up_ahead(top_k, hidden, dim, gate_up.format)
    plan.check(dim, FORMATS[gate_up.format])
    device = ahead.x_TD.device
    act_AF = torch.empty(top_k, hidden, dtype=torch.bfloat16, device=device)
    runtime.launch(
        "up_ahead.cu",
        up_ahead_name(gate_up.format, plan, dim),
        (top_k, -(-hidden // (UP_TILE * plan.warps_n * plan.tiles))),
        plan.num_threads,
        (
            gate_up.codes,
            gate_up.scale,
            ahead.x_TD,
            ahead.norm_weight_D,
            float(ahead.eps),
            ahead.score_TE,
            routing.topk_id_TK,
            routing.topk_weight_TK,
            act_AF,
            num_experts,
            top_k,
            dim,
            hidden,
            plan.warps_k,
            plan.tiles,
            int(ahead.renormalize),
            float(ahead.scaling_factor),
        ),
        device=device,
        shared_bytes=linear_shared(gate_up.format, 1, dim, plan) + 4 * num_experts,
        pdl=pdl and plan.starts_early,
    )
    return act_AF


UP_AHEAD_REGISTERS = {2: 64, 4: 80, 6: 112, 8: 128}
"""Ring depth to registers of a thread, spills of int4 aside none (`nvcc -Xptxas -v`, 13.0)."""


def up_ahead_name(weight_format: str, plan: GemvPlan, dim: int) -> str:
    """The instance in C++ of gate and up after `linear_route`."""
    blocks = max(1, 65536 // (plan.num_threads * UP_AHEAD_REGISTERS[plan.depth]))
    struct, units = FORMATS[weight_format].struct, units_of_thread(dim, plan)
    return f"up_ahead_kernel<{struct}, {plan.depth}, {units}, {plan.num_threads}, {blocks}>"


def launch_down(
    routing: Routing,
    act_AF: torch.Tensor,
    weight: Weight,
    *,
    residual_TD: torch.Tensor,
    plan: GemvPlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """residual + sum_k weight_k * (down_e(k) act_k): [T, D] of the residual's dtype; one launch.

    With `pdl` the launch before it must be `up` of this module, or routing older than that: the
    kernel reads the expert ids before it waits.
    """
    num_tokens, top_k = routing.topk_id_TK.shape
    _, dim, hidden = weight.shape
    plan = plan or plan_down(top_k, hidden, weight.format)
    pdl = pdl and plan.starts_early
    plan.check(hidden, FORMATS[weight.format])
    assert plan.warps_n == top_k and plan.tiles == 1, (plan, top_k)
    out_TD = torch.empty(num_tokens, dim, dtype=residual_TD.dtype, device=residual_TD.device)
    runtime.launch(
        "experts.cu",
        kernel_name("down_kernel", weight.format, plan),
        (num_tokens, dim // TILE_ROWS),
        plan.num_threads,
        (
            weight.codes,
            weight.scale,
            act_AF,
            routing.topk_id_TK,
            routing.topk_weight_TK,
            residual_TD,
            ctypes.c_int64(residual_TD.stride(0)),
            out_TD,
            int(residual_TD.dtype == torch.bfloat16),
            top_k,
            dim,
            hidden,
            plan.warps_k,
            int(pdl),
        ),
        device=residual_TD.device,
        shared_bytes=_down_shared(weight.format, top_k, hidden, plan),
        pdl=pdl,
    )
    return out_TD


def _down_shared(weight_format: str, top_k: int, hidden: int, plan: GemvPlan) -> int:
    num_partials = top_k * plan.warps_k * TILE_ROWS
    return shared_bytes(weight_format, top_k, hidden, num_partials, zero_columns=2 * top_k)


def suits_one_token(gate_up: Weight, down: Weight, top_k: int) -> bool:
    """Whether the kernels take these experts for one token whose routing is `ahead`."""
    _, double_hidden, dim = gate_up.shape
    if not _suits_weights(gate_up, down, top_k, 1):
        return False
    plan = plan_up_ahead(top_k, double_hidden // 2, dim, gate_up.format)
    up_bytes = linear_shared(gate_up.format, 1, dim, plan) + 4 * gate_up.shape[0]
    most_bytes = runtime.max_shared_bytes(gate_up.codes.device)
    return units_of_thread(dim, plan) <= KEPT_UNITS and up_bytes <= most_bytes


def _suits(routing: Routing, gate_up: Weight, down: Weight, residual_TD: torch.Tensor) -> bool:
    num_tokens, top_k = routing.topk_id_TK.shape
    tensors = (routing.h_TD, routing.topk_id_TK, routing.topk_weight_TK)
    return (
        1 <= num_tokens <= MAX_TOKENS
        and routing.order_A is None
        and routing.h_TD.dtype == torch.bfloat16
        and all(is_plain(tensor) for tensor in tensors)
        and residual_TD.dtype in FLOAT_DTYPES
        and residual_TD.stride(1) == 1
        and _suits_weights(gate_up, down, top_k, num_tokens)
    )


def _suits_weights(gate_up: Weight, down: Weight, top_k: int, num_tokens: int) -> bool:
    _, double_hidden, dim = gate_up.shape
    hidden = double_hidden // 2
    if not (
        top_k <= MAX_WARPS
        and hidden % UP_TILE == 0
        and suits_weight(gate_up, TILE_ROWS)
        and suits_weight(down, TILE_ROWS)
        # From a gate row to its up row is a 32-bit distance; where an expert begins is 64-bit.
        and hidden * dim * 2 < 2**31
    ):
        return False
    up_bytes = linear_shared(
        gate_up.format, num_tokens, dim, plan_up(top_k, hidden, dim, gate_up.format)
    )
    down_plan = plan_down(top_k, hidden, down.format)
    down_bytes = _down_shared(down.format, top_k, hidden, down_plan)
    return max(up_bytes, down_bytes) <= runtime.max_shared_bytes(gate_up.codes.device)
