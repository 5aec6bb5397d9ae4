"""The routed experts for many tokens on CUDA: plans and launches of `grouped.cu`.

Letters: T tokens, K experts a token, A = T * K assignments, E experts, D features, F hidden
features.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from subten.device import detect
from subten.kernels.cuda import runtime
from subten.kernels.cuda.gemv import FLOAT_DTYPES, NUM_SMS, has_rows, is_plain
from subten.kernels.route import Routing
from subten.kernels.weight_formats import Weight

UP_ROWS = 16
"""Features of a warp of `up`: that many gate rows and as many up rows."""

DOWN_ROWS = 32
"""Rows of a warp of `down`."""

MAX_EARLY_BYTES = 28 * 10**6
"""Of weights that `launch_both` asks L2 for before it knows the experts: 2 us a layer of a batch of
32 of qwen3-30b-a3b in FP8, where 40 MB bring 1 (benchmarks/plans/h200-grouped-both.json)."""

MAX_PROGRESS = 2**14
"""Numbers by which the blocks of `launch_both` see how far it is: one, and one for each tile."""

NUM_STAGES = 3
"""Stages of tokens in shared memory: `NUM_STAGES` of grouped.cu."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedFormat:
    """A weight format in `grouped.cu`: its struct, and the codes in 16 bytes."""

    struct: str
    codes: int

    @property
    def block(self) -> int:
        """Inputs of a block: 64 bytes of a row."""
        return 4 * self.codes


FORMATS: Mapping[str, GroupedFormat] = {
    "none": GroupedFormat(struct="Bf16Codes", codes=8),
    "fp8": GroupedFormat(struct="Fp8Codes", codes=16),
    "int4": GroupedFormat(struct="Int4Codes", codes=32),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedPlan:
    """How one launch shares the work out.

    A block takes up to 8 * `tiles` tokens of an expert and 32 rows of weights for each of its
    `warps`; a warp keeps 2 * `depth` KiB of weights in flight; `blocks` of them fit an SM, by
    registers, and `launch_both` launches so many an SM, each taking one item after another. With
    `wide` tensor cores read the tokens from shared memory by themselves, for four warps at once.
    """

    tiles: int
    warps: int
    depth: int
    blocks: int
    wide: bool = False

    @property
    def columns(self) -> int:
        """Tokens of a block at most."""
        return 8 * self.tiles

    def shared_bytes(self, weight_format: GroupedFormat, num_experts: int) -> int:
        """Of a block: stages of rows that are an odd number of 64 bytes, experts' starts, for each
        of two items the assignments of its tile and the scales of its rows, and the next item."""
        row_bytes = -(-self.depth * 2 * weight_format.block // 128) * 128
        row_bytes += 0 if self.wide else 64
        aside = 2 * (self.columns + 32 * self.warps)
        return NUM_STAGES * self.columns * row_bytes + 4 * (num_experts + 2 + aside)


SHARES: Mapping[tuple[str, str], tuple[int, int, int]] = {
    ("one tile", "none"): (4, 2, 3),
    ("one tile", "fp8"): (4, 4, 3),
    ("one tile", "int4"): (4, 2, 3),
    ("two tiles", "none"): (8, 2, 2),
    ("two tiles", "fp8"): (8, 2, 2),
    ("two tiles", "int4"): (6, 2, 2),
    ("two tiles, very long rows", "none"): (8, 3, 1),
    ("two tiles, very long rows", "fp8"): (8, 3, 1),
    ("two tiles, very long rows", "int4"): (8, 3, 1),
    ("more", "none"): (4, 2, 3),
    ("more", "fp8"): (8, 2, 2),
    ("more", "int4"): (12, 2, 1),
    ("more, long rows", "none"): (8, 4, 1),
    ("more, long rows", "fp8"): (12, 2, 1),
    ("more, long rows", "int4"): (8, 3, 1),
}
"""(case, format) to (warps, depth, blocks): about the fastest of eight for 32, 512 and 2048 tokens
of qwen3-30b-a3b and mixtral-8x7b, whose rows are 768 and 2048, and 4096 and 14336 inputs
(benchmarks/plans/h200-grouped-plans.json, by `benchmarks/grouped_bench.py`); one tile of FP8 within
a step of 32 tokens of qwen3-30b-a3b, of five, and alone (h200-grouped-both.json)."""

LONG_ROW = 4096
VERY_LONG_ROW = 8192


WIDE_SHARES = (6, 8, 2, 2)
"""(tiles, warps, depth, blocks) of wide products, FP8: about the fastest of ten for up and of nine
for down of 512 tokens of qwen3-30b-a3b, within the prompt (h200-prompt.json)."""


def plan_grouped(
    dim: int, num_assignments: int, num_experts: int, weight_format: str, *, has_wide: bool = False
) -> GroupedPlan:
    """Plan for rows of `dim` inputs and a mean load: tiles with room for half as much again.

    48 tokens hold 99 % of the tiles of 512 tokens of qwen3-30b-a3b, whose load is 32 on average;
    long rows gain by 64. `has_wide`: whether the device has wide products.
    """
    room = -(-3 * num_assignments // (2 * num_experts))
    # Of long rows wide products have not been measured.
    if has_wide and weight_format == "fp8" and room > 16 and dim < LONG_ROW:
        tiles, warps, depth, blocks = WIDE_SHARES
        return GroupedPlan(tiles=tiles, warps=warps, depth=depth, blocks=blocks, wide=True)
    most = 8 if dim >= LONG_ROW else 6
    tiles = next((t for t in (1, 2, 4) if 8 * t >= room), most)
    if tiles == 1:
        case = "one tile"
    elif tiles == 2:
        case = "two tiles, very long rows" if dim >= VERY_LONG_ROW else "two tiles"
    else:
        case = "more, long rows" if dim >= LONG_ROW else "more"
    warps, depth, blocks = SHARES[case, weight_format]
    return GroupedPlan(tiles=tiles, warps=warps, depth=depth, blocks=blocks)


def grouped(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    *,
    residual_TD: torch.Tensor,
    up_plan: GroupedPlan | None = None,
    down_plan: GroupedPlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """`experts` for a routing with its order: [T, D] of the residual's dtype.

    At one tile in two launches, else in three. The output of each expert is rounded to bfloat16, as
    its hidden activation is; sums are FP32 in a fixed order. `suits` says what it takes. Launches
    on one device must follow one another: they share counters, which return to zero; the first one,
    outside of any graph capture, allocates them.
    """
    num_assignments, num_experts = routing.topk_id_TK.numel(), gate_up.shape[0]
    up_plan = up_plan or _plan(routing, gate_up)
    down_plan = down_plan or _plan(routing, down)
    num_progress = 1 + _max_tiles(num_assignments, num_experts, up_plan)
    if up_plan.tiles > 1 or up_plan != down_plan or num_progress > MAX_PROGRESS:
        act_AF = launch_up(routing, gate_up, plan=up_plan, is_act_wide=down_plan.wide, pdl=pdl)
        y_AD = launch_down(routing, act_AF, down, plan=down_plan, pdl=pdl)
        return launch_combine(routing, y_AD, residual_TD=residual_TD, pdl=pdl)
    progress = _all_progress(residual_TD.device)[:num_progress]
    try:
        y_AD = launch_both(routing, gate_up, down, progress=progress, plan=up_plan, pdl=pdl)
        return launch_combine(routing, y_AD, residual_TD=residual_TD, progress=progress, pdl=pdl)
    except BaseException:
        # Memory may run out between the two, and the process go on after the step that failed.
        progress.zero_()
        raise


def launch_both(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    *,
    progress: torch.Tensor,
    plan: GroupedPlan,
    pdl: bool = True,
) -> torch.Tensor:
    """down silu(gate h) * (up h) of each assignment, at its own place: bfloat16 [A, D]; one launch.

    progress: int32 zeros, one and one for each tile there may be. Afterwards they are not;
    `launch_combine`, which must follow, makes them zeros again.
    """
    num_experts, double_hidden, dim = gate_up.shape
    hidden, (num_tokens, top_k) = double_hidden // 2, routing.topk_id_TK.shape
    num_assignments, device = num_tokens * top_k, routing.h_TD.device
    new = functools.partial(torch.empty, dtype=torch.bfloat16, device=device)
    act_AF, y_AD = new(num_assignments, hidden), new(num_assignments, dim)
    parts = -(-hidden // (UP_ROWS * plan.warps)) + -(-dim // (DOWN_ROWS * plan.warps))
    max_items = _max_tiles(num_assignments, num_experts, plan) * parts
    num_blocks = min(max_items, NUM_SMS * plan.blocks)
    early_bytes = 0
    # From a token an expert on, some two thirds of the experts have one.
    if pdl and num_assignments >= num_experts:
        early_bytes = MAX_EARLY_BYTES // (num_blocks * 32 * plan.warps) // 64 * 64
    runtime.launch(
        "grouped.cu",
        both_kernel_name(gate_up.format, plan),
        (num_blocks,),
        32 * plan.warps,
        (
            gate_up.codes,
            gate_up.scale,
            down.codes,
            down.scale,
            routing.h_TD,
            routing.expert_start_E1,
            routing.order_A,
            act_AF,
            y_AD,
            progress,
            num_experts,
            top_k,
            dim,
            hidden,
            early_bytes,
        ),
        device=device,
        shared_bytes=plan.shared_bytes(FORMATS[gate_up.format], num_experts),
        pdl=pdl,
    )
    return y_AD


def launch_up(
    routing: Routing,
    gate_up: Weight,
    *,
    plan: GroupedPlan,
    is_act_wide: bool = False,
    pdl: bool = True,
) -> torch.Tensor:
    """silu(gate h) * (up h) by position in the order: bfloat16 [A, F]; one launch.

    With `is_act_wide` every 64 features are in the order that wide products of `launch_down` take.
    """
    num_experts, double_hidden, dim = gate_up.shape
    hidden, (num_tokens, top_k) = double_hidden // 2, routing.topk_id_TK.shape
    num_assignments, device = num_tokens * top_k, routing.h_TD.device
    act_AF = torch.empty(num_assignments, hidden, dtype=torch.bfloat16, device=device)
    runtime.launch(
        "grouped.cu",
        kernel_name("grouped_up_kernel", gate_up.format, plan),
        (_num_blocks(num_assignments, num_experts, hidden, UP_ROWS, plan),),
        32 * plan.warps,
        (
            gate_up.codes,
            gate_up.scale,
            routing.h_TD,
            routing.expert_start_E1,
            routing.order_A,
            act_AF,
            num_experts,
            top_k,
            dim,
            hidden,
            int(is_act_wide),
        ),
        device=device,
        shared_bytes=plan.shared_bytes(FORMATS[gate_up.format], num_experts),
        pdl=pdl,
    )
    return act_AF


def launch_down(
    routing: Routing,
    act_AF: torch.Tensor,
    down: Weight,
    *,
    plan: GroupedPlan,
    pdl: bool = True,
) -> torch.Tensor:
    """down act of each assignment, at its own place: bfloat16 [A, D]; one launch.

    With `pdl` the launch before it must be `launch_up`, or an order older than that: the kernel
    reads where experts begin before it waits.
    """
    num_experts, dim, hidden = down.shape
    num_assignments = act_AF.shape[0]
    y_AD = torch.empty(num_assignments, dim, dtype=torch.bfloat16, device=act_AF.device)
    runtime.launch(
        "grouped.cu",
        kernel_name("grouped_down_kernel", down.format, plan),
        (_num_blocks(num_assignments, num_experts, dim, DOWN_ROWS, plan),),
        32 * plan.warps,
        (
            down.codes,
            down.scale,
            act_AF,
            routing.expert_start_E1,
            routing.order_A,
            y_AD,
            num_experts,
            dim,
            hidden,
            int(pdl),
        ),
        device=act_AF.device,
        shared_bytes=plan.shared_bytes(FORMATS[down.format], num_experts),
        pdl=pdl,
    )
    return y_AD


def launch_combine(
    routing: Routing,
    y_AD: torch.Tensor,
    *,
    residual_TD: torch.Tensor,
    progress: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """residual + sum_k weight_k y_k: [T, D] of the residual's dtype; one launch.

    progress: that of the `launch_both` before it, if any.
    """
    num_tokens, dim = residual_TD.shape
    out_TD = torch.empty(num_tokens, dim, dtype=residual_TD.dtype, device=residual_TD.device)
    runtime.launch(
        "grouped.cu",
        "combine_kernel",
        (num_tokens,),
        min(256, -(-dim // 256) * 32),
        (
            y_AD,
            routing.topk_weight_TK,
            residual_TD,
            ctypes.c_int64(residual_TD.stride(0)),
            out_TD,
            int(residual_TD.dtype == torch.bfloat16),
            routing.topk_id_TK.shape[1],
            dim,
            progress,
            0 if progress is None else len(progress),
        ),
        device=residual_TD.device,
        pdl=pdl,
    )
    return out_TD


def _plan(routing: Routing, weight: Weight) -> GroupedPlan:
    num_experts, _, dim = weight.shape
    has_wide = _has_wide(weight.codes.device)
    return plan_grouped(
        dim, routing.topk_id_TK.numel(), num_experts, weight.format, has_wide=has_wide
    )


def suits(routing: Routing, gate_up: Weight, down: Weight, residual_TD: torch.Tensor) -> bool:
    """Whether the kernels take these tensors: an order, bfloat16, whole blocks, warps of rows."""
    dim, hidden = gate_up.shape[2], down.shape[2]
    starts = routing.expert_start_E1
    if routing.order_A is None or starts is None or gate_up.format not in FORMATS:
        return False
    block = FORMATS[gate_up.format].block
    tensors = (
        routing.h_TD,
        routing.topk_weight_TK,
        routing.order_A,
        starts,
        gate_up.codes,
        down.codes,
        *(weight.scale for weight in (gate_up, down) if weight.scale is not None),
    )
    return (
        residual_TD.shape[0] > 0
        and gate_up.dtype == torch.bfloat16
        and routing.h_TD.dtype == torch.bfloat16
        and dim % block == 0
        and hidden % block == 0
        and hidden % UP_ROWS == 0
        and dim % DOWN_ROWS == 0
        # From a gate row to its up row is a 32-bit distance; where an expert begins is 64-bit.
        and hidden * dim * 2 < 2**31
        # Rows of tokens are found by 32-bit numbers of 16 bytes.
        and residual_TD.shape[0] * dim // 8 < 2**31
        and routing.order_A.shape[0] * hidden // 8 < 2**31
        and all(is_plain(tensor) for tensor in tensors)
        and residual_TD.dtype in FLOAT_DTYPES
        and has_rows(residual_TD)
        and all(
            _plan(routing, weight).shared_bytes(FORMATS[weight.format], len(starts) - 1)
            <= runtime.max_shared_bytes(residual_TD.device)
            for weight in (gate_up, down)
        )
    )


def _has_wide(device: torch.device) -> bool:
    """Whether four warps can multiply together: Hopper alone, before and after it others can."""
    return device.type == "cuda" and detect(str(device)).capability == (9, 0)


@functools.cache
def _all_progress(device: torch.device) -> torch.Tensor:
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "the first experts of a batch must run outside of graph capture"
    # Of inference mode nothing outside it could set them back.
    with torch.inference_mode(False):
        return torch.zeros(MAX_PROGRESS, dtype=torch.int32, device=device)


def _max_tiles(num_assignments: int, num_experts: int, plan: GroupedPlan) -> int:
    """Full tiles, and for each expert with tokens one that is not full."""
    return num_assignments // plan.columns + min(num_experts, num_assignments)


def _num_blocks(
    num_assignments: int, num_experts: int, num_rows: int, rows_warp: int, plan: GroupedPlan
) -> int:
    """One for each item there may be: a tile and a part of the rows.

    Items of several tiles differ by their tokens, and a step of 512 tokens is 4 % faster if
    whichever SM is free takes the next than if as many blocks as the SMs hold walk over them.
    """
    parts = -(-num_rows // (rows_warp * plan.warps))
    return _max_tiles(num_assignments, num_experts, plan) * parts


def both_kernel_name(weight_format: str, plan: GroupedPlan) -> str:
    struct = FORMATS[weight_format].struct
    parameters = (struct, plan.tiles, plan.warps, plan.depth, plan.blocks)
    return f"grouped_both_kernel<{', '.join(map(str, parameters))}>"


def kernel_name(kernel: str, weight_format: str, plan: GroupedPlan) -> str:
    struct = FORMATS[weight_format].struct
    parameters = (struct, plan.tiles, plan.warps, plan.depth, plan.blocks, str(plan.wide).lower())
    return f"{kernel}<{', '.join(map(str, parameters))}>"
