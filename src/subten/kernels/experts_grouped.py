"""The grouped path of `experts`: matrix products over tokens sorted by expert.

Letters: T tokens, K experts a token, A = T * K assignments, E experts, D features, F hidden
features of an expert (`gate_up` [E, 2 * F, D] holds gate rows first, `down` is [E, D, F]).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.kernels.route import Routing
from subten.kernels.triton_shim import launcher, tl, triton, triton_jit
from subten.kernels.weight_formats import WEIGHT_FORMATS, Weight, load_scale, row_offset


def grouped(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    residual_TD: torch.Tensor,
    act_AF: torch.Tensor,
    out_TD: torch.Tensor,
) -> None:
    """Write `out`; the same parameters as `experts` besides its work buffer `act` [A, F].

    Needs `routing.order_A`. Three launches, sized from the number of assignments alone: how many
    tiles each expert has is found on the device.
    """
    num_tokens, dim = residual_TD.shape
    num_assignments, hidden = act_AF.shape
    num_experts = gate_up.shape[0]
    top_k = num_assignments // num_tokens
    assert routing.order_A is not None and routing.expert_start_E1 is not None
    assert routing.order_A.shape == (num_assignments,), (routing.order_A.shape, num_assignments)
    launch = _choose_group(num_assignments, num_experts, dim, act_AF.dtype)
    up_codes, down_codes = gate_up.storage, down.storage
    constants = {
        "DIM": dim,
        "HIDDEN": hidden,
        "NUM_EXPERTS": num_experts,
        "LOAD_CODES": WEIGHT_FORMATS[gate_up.format].loader(residual_TD.device),
        # The interpreter, the only one to run these on a CPU, multiplies the bits of bfloat16.
        "WIDEN": residual_TD.device.type == "cpu",
        "EXPERTS_PAD": triton.next_power_of_2(num_experts),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }
    grid = (launch.max_tiles, triton.cdiv(hidden, launch.block_n))
    launcher(_group_up_kernel, grid, "experts", gate_up.format)(
        routing.h_TD,
        routing.expert_start_E1,
        routing.order_A,
        up_codes,
        up_codes if gate_up.scale is None else gate_up.scale,
        act_AF,
        *up_codes.stride(),
        TOP_K=top_k,
        GROUP=gate_up.group,
        **constants,
    )
    y_AD = torch.empty(num_assignments, dim, dtype=torch.float32, device=out_TD.device)
    grid = (launch.max_tiles, triton.cdiv(dim, launch.block_n))
    launcher(_group_down_kernel, grid, "experts", down.format)(
        act_AF,
        routing.expert_start_E1,
        routing.order_A,
        down_codes,
        down_codes if down.scale is None else down.scale,
        y_AD,
        *down_codes.stride(),
        GROUP=down.group,
        **constants,
    )
    _combine_kernel[(num_tokens, triton.cdiv(dim, launch.combine_block_d))](
        y_AD,
        routing.topk_weight_TK,
        residual_TD,
        out_TD,
        *residual_TD.stride(),
        DIM=dim,
        TOP_K=top_k,
        BLOCK_D=launch.combine_block_d,
        num_warps=4,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupLaunch:
    block_m: int
    block_n: int
    block_k: int
    combine_block_d: int
    max_tiles: int
    num_warps: int
    num_stages: int


def _choose_group(
    num_assignments: int, num_experts: int, dim: int, dtype: torch.dtype
) -> _GroupLaunch:
    """Tiles of the grouped path.

    Rows in a tile: room for the load of most experts, half as much again as the mean, so that
    their weights are read and unpacked once; within what the tensor cores take (16) and what the
    two accumulators of gate and up leave registers for (64). Of 17 choices on an H200 this was the
    fastest at 512 tokens of qwen3-30b-a3b for BF16 and FP8 (339 and 397 us against 358 and 521 with
    tiles for the mean), and 7 % from the fastest for INT4
    (benchmarks/plans/h200-grouped-tiles.json); codes took twice as many instructions then, so
    that packed formats want another search. FP32 runs without tensor cores and needs room for
    its unpacked operands.
    """
    is_narrow = dtype == torch.float32
    room = triton.next_power_of_2(triton.cdiv(3 * num_assignments, 2 * num_experts))
    block_m = max(16, min(room, 16 if is_narrow else 64))
    return _GroupLaunch(
        block_m=block_m,
        block_n=32 if is_narrow else 64,
        block_k=32 if is_narrow else 64,
        combine_block_d=min(triton.next_power_of_2(dim), 1024),
        # Full tiles, and for each expert with tokens at most one that is not full.
        max_tiles=num_assignments // block_m + min(num_experts, num_assignments),
        num_warps=4,
        num_stages=2 if is_narrow else 3,
    )


@triton_jit
def _find_tile(
    tile: tl.tensor,
    start_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """Expert of a tile and the span of sorted assignments it owns; expert E past the last tile.

    Each expert's assignments are cut into tiles of its own; every program counts them again from
    the E + 1 offsets, so that no host ever has to know them.
    """
    e = tl.arange(0, EXPERTS_PAD)
    is_expert = e < NUM_EXPERTS
    start_E = tl.load(start_ptr + e, mask=is_expert, other=0)
    end_E = tl.load(start_ptr + e + 1, mask=is_expert, other=0)
    num_tiles_E = tl.cdiv(end_E - start_E, BLOCK_M)
    last_E = tl.cumsum(num_tiles_E, axis=0)
    expert = tl.sum((is_expert & (last_E <= tile)).to(tl.int32), axis=0)
    is_own_E = e == expert
    start = tl.sum(tl.where(is_own_E, start_E, 0), axis=0)
    end = tl.sum(tl.where(is_own_E, end_E, 0), axis=0)
    first_tile = tl.sum(tl.where(is_own_E, last_E - num_tiles_E, 0), axis=0)
    return expert, start + (tile - first_tile) * BLOCK_M, end


# act[p] = silu(gate_e h[order[p] // K]) * up_e h[order[p] // K] for sorted positions p.
#
#   order [A]:  | e0: p p p p | e1: p p | e3: p p p p p p |   cut into tiles of BLOCK_M rows
#   tile (M, N): h rows gathered [BLOCK_M, D] x gate rows [BLOCK_N, D] and up rows [BLOCK_N, D]
#
# Codes go to the tensor cores as they are, exact in bfloat16; their scales meet the sums.
#
# Bytes: those of 2 * F rows of weights once for each expert with tokens (tiles of an expert are
# neighbours in the grid and meet in L2), A * (D + F) * itemsize of activations.
@triton_jit
def _group_up_kernel(
    h_ptr: tl.tensor,
    start_ptr: tl.tensor,
    order_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    act_ptr: tl.tensor,
    stride_e: tl.tensor,
    stride_f: tl.tensor,
    stride_d: tl.tensor,
    TOP_K: tl.constexpr,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    LOAD_CODES: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    expert, first_row, end = _find_tile(
        tl.program_id(0), start_ptr, NUM_EXPERTS, EXPERTS_PAD, BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    p = first_row + tl.arange(0, BLOCK_M)
    inside_p = p < end
    token = tl.load(order_ptr + p, mask=inside_p, other=0) // TOP_K
    h_row = (h_ptr + row_offset(token, DIM))[:, None]
    f = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_f = f < HIDDEN
    gate_row = row_offset(expert, stride_e) + row_offset(f, stride_f)
    up_row = gate_row + tl.full([], HIDDEN, tl.int64) * stride_f
    gate_at = row_offset(expert, 2 * HIDDEN) + f
    gate_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, DIM, BLOCK_K):
        d = (first + tl.arange(0, BLOCK_K))[None, :]
        h = tl.load(h_row + d, mask=inside_p[:, None] & (d < DIM), other=0.0)
        gate = LOAD_CODES(gate_up_ptr, gate_row, first, inside_f, stride_d, DIM, BLOCK_K)
        up = LOAD_CODES(gate_up_ptr, up_row, first, inside_f, stride_d, DIM, BLOCK_K)
        if WIDEN:
            h = h.to(tl.float32)
        gate, up = tl.trans(gate.to(h.dtype)), tl.trans(up.to(h.dtype))
        if GROUP > 0 and GROUP < DIM:
            scale = load_scale(scale_ptr, gate_at, first, inside_f, DIM, GROUP)
            gate_MN += tl.dot(h, gate, input_precision="ieee") * scale[None, :]
            scale = load_scale(scale_ptr, gate_at + HIDDEN, first, inside_f, DIM, GROUP)
            up_MN += tl.dot(h, up, input_precision="ieee") * scale[None, :]
        else:
            gate_MN = tl.dot(h, gate, acc=gate_MN, input_precision="ieee")
            up_MN = tl.dot(h, up, acc=up_MN, input_precision="ieee")
    if GROUP == DIM:
        gate_MN *= load_scale(scale_ptr, gate_at, 0, inside_f, DIM, GROUP)[None, :]
        up_MN *= load_scale(scale_ptr, gate_at + HIDDEN, 0, inside_f, DIM, GROUP)[None, :]
    act_MN = gate_MN / (1.0 + tl.exp(-gate_MN)) * up_MN
    act_at = act_ptr + row_offset(p, HIDDEN)[:, None] + f[None, :]
    inside = inside_p[:, None] & inside_f[None, :]
    tl.store(act_at, act_MN.to(act_ptr.dtype.element_ty), mask=inside)


# y[order[p]] = down_e act[p], in FP32, back at the place of the assignment: rows t * K .. t * K
# + K - 1 of y belong to token t. Bytes: D rows of weights for each expert with tokens, A * F *
# itemsize and 4 * A * D.
@triton_jit
def _group_down_kernel(
    act_ptr: tl.tensor,
    start_ptr: tl.tensor,
    order_ptr: tl.tensor,
    down_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_e: tl.tensor,
    stride_d: tl.tensor,
    stride_f: tl.tensor,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    LOAD_CODES: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    expert, first_row, end = _find_tile(
        tl.program_id(0), start_ptr, NUM_EXPERTS, EXPERTS_PAD, BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    p = first_row + tl.arange(0, BLOCK_M)
    inside_p = p < end
    act_row = (act_ptr + row_offset(p, HIDDEN))[:, None]
    d = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_d = d < DIM
    down_row = row_offset(expert, stride_e) + row_offset(d, stride_d)
    down_at = row_offset(expert, DIM) + d
    y_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, HIDDEN, BLOCK_K):
        f = (first + tl.arange(0, BLOCK_K))[None, :]
        act = tl.load(act_row + f, mask=inside_p[:, None] & (f < HIDDEN), other=0.0)
        down = LOAD_CODES(down_ptr, down_row, first, inside_d, stride_f, HIDDEN, BLOCK_K)
        if WIDEN:
            act = act.to(tl.float32)
        down = tl.trans(down.to(act.dtype))
        if GROUP > 0 and GROUP < HIDDEN:
            scale = load_scale(scale_ptr, down_at, first, inside_d, HIDDEN, GROUP)
            y_MN += tl.dot(act, down, input_precision="ieee") * scale[None, :]
        else:
            y_MN = tl.dot(act, down, acc=y_MN, input_precision="ieee")
    if GROUP == HIDDEN:
        y_MN *= load_scale(scale_ptr, down_at, 0, inside_d, HIDDEN, GROUP)[None, :]
    a = tl.load(order_ptr + p, mask=inside_p, other=0)
    y_at = y_ptr + row_offset(a, DIM)[:, None] + d[None, :]
    tl.store(y_at, y_MN, mask=inside_p[:, None] & inside_d[None, :])


# out_d = residual_d + sum_k weight_k y[t * K + k]_d, k in order. Bytes: 4 * A * D + 2 * T * D *
# itemsize.
@triton_jit
def _combine_kernel(
    y_ptr: tl.tensor,
    topk_weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_rt: tl.tensor,
    stride_rd: tl.tensor,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    t = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < DIM
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for k in range(TOP_K):
        a = row_offset(t, TOP_K) + k
        y_D = tl.load(y_ptr + row_offset(a, DIM) + d, mask=inside, other=0.0)
        sum_D += tl.load(topk_weight_ptr + a) * y_D
    residual_at = residual_ptr + row_offset(t, stride_rt) + row_offset(d, stride_rd)
    out_D = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32) + sum_D
    out_at = out_ptr + row_offset(t, DIM) + d
    tl.store(out_at, out_D.to(out_ptr.dtype.element_ty), mask=inside)
