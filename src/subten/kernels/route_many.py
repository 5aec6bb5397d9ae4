"""The router for more tokens than one can split over programs each: scores, picks, and order.

Letters: T tokens, D features, E experts, K experts a token, S slices of D, A = T * K assignments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from subten.kernels.route_pick import pick_experts
from subten.kernels.triton_shim import tl, triton, triton_jit


def route_many(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    gate_ED: torch.Tensor,
    h_TD: torch.Tensor,
    topk_id_TK: torch.Tensor,
    topk_weight_TK: torch.Tensor,
    *,
    eps: float,
    renormalize: bool,
    scaling_factor: float,
) -> None:
    """Write h, the chosen ids and their weights in two launches; parameters as of `route`."""
    (num_tokens, dim), num_experts = x_TD.shape, gate_ED.shape[0]
    top_k = topk_id_TK.shape[1]
    launch = choose_many(num_tokens, num_experts, dim)
    new = functools.partial(torch.empty, dtype=torch.float32, device=x_TD.device)
    score_STE = new(launch.num_slices, num_tokens, num_experts)
    square_ST = new(launch.num_slices, num_tokens)
    _score_kernel[
        (
            triton.cdiv(num_tokens, launch.block_t),
            triton.cdiv(num_experts, launch.block_e),
            launch.num_slices,
        )
    ](
        x_TD,
        norm_weight_D,
        gate_ED,
        score_STE,
        square_ST,
        num_tokens,
        *x_TD.stride(),
        norm_weight_D.stride(0),
        *gate_ED.stride(),
        DIM=dim,
        NUM_EXPERTS=num_experts,
        SLICE=launch.slice,
        BLOCK_T=launch.block_t,
        BLOCK_E=launch.block_e,
        BLOCK_D=launch.block_d,
        num_warps=launch.num_warps,
        num_stages=3,
    )
    _pick_kernel[(triton.cdiv(num_tokens, launch.pick_block_t),)](
        x_TD,
        norm_weight_D,
        score_STE,
        square_ST,
        h_TD,
        topk_id_TK,
        topk_weight_TK,
        num_tokens,
        eps,
        scaling_factor,
        *x_TD.stride(),
        norm_weight_D.stride(0),
        DIM=dim,
        NUM_EXPERTS=num_experts,
        NUM_SLICES=launch.num_slices,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        EXPERTS_PAD=max(16, triton.next_power_of_2(num_experts)),
        K_PAD=triton.next_power_of_2(top_k),
        BLOCK_T=launch.pick_block_t,
        BLOCK_D=min(1024, triton.next_power_of_2(dim)),
        num_warps=4,
    )


def order_by_expert(
    topk_id_TK: torch.Tensor, expert_start_E1: torch.Tensor, order_A: torch.Tensor
) -> None:
    """Write the stable order of the assignments by expert, and where each expert's begin."""
    num_experts, num_assignments = expert_start_E1.shape[0] - 1, order_A.shape[0]
    block_a = max(16, min(4096, triton.next_power_of_2(num_assignments)))
    _order_kernel[(num_experts,)](
        topk_id_TK,
        expert_start_E1,
        order_A,
        num_assignments,
        NUM_EXPERTS=num_experts,
        BLOCK_A=block_a,
        num_warps=8 if block_a >= 2048 else 4,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyLaunch:
    """Tiles of the scores, each a slice of D, and of the picks."""

    block_t: int
    block_e: int
    block_d: int
    slice: int
    num_slices: int
    pick_block_t: int
    num_warps: int


TARGET_PROGRAMS = 132
"""One for each SM of an H100 or H200."""

MIN_SLICE = 128
"""Features of a program at least: below, its sums to write and read again cost what it saves."""


def choose_many(num_tokens: int, num_experts: int, dim: int) -> ManyLaunch:
    """32 tokens share a tile of the gate; slices of D make up for few tiles.

    At 512 tokens of qwen3-30b-a3b 4 us a layer less than in tiles of 64 tokens by half as many
    features (benchmarks/plans/h200-prompt.json).
    """
    block_t = max(16, min(32, triton.next_power_of_2(num_tokens)))
    block_e = max(16, min(128, triton.next_power_of_2(num_experts)))
    block_d = min(32, max(16, triton.next_power_of_2(dim)))
    num_tiles = triton.cdiv(num_tokens, block_t) * triton.cdiv(num_experts, block_e)
    wanted = max(1, min(TARGET_PROGRAMS // num_tiles, dim // MIN_SLICE))
    slice_d = triton.cdiv(triton.cdiv(dim, wanted), block_d) * block_d
    return ManyLaunch(
        block_t=block_t,
        block_e=block_e,
        block_d=block_d,
        slice=slice_d,
        num_slices=triton.cdiv(dim, slice_d),
        # A warp holds a row, so that a pick needs no other warp.
        pick_block_t=4,
        num_warps=4,
    )


# score[s, t, e] = sum over d of slice s of (x_td * w_d) * gate_ed;  square[s, t] = sum x_td^2
#
#   x [T, D]:     | BLOCK_T rows | x slice s |      programs (tile of tokens, tile of experts, s);
#   gate [E, D]:  | BLOCK_E rows | x slice s |      the norm, one number a row, waits for the sums
#
# The product is three TF32 products on the tensor cores (one has 10 bits, and ranks would change):
# each within 3 * 2**-22 of FP32's. Slices, because 512 tokens by 128 experts are 8 tiles for 132
# SMs; the sum over slices has one order, in the next launch.
# Bytes at 512 tokens, 128 experts, D 2048, in FP32: x 4 MB and gate 1 MB from memory, the gate once
# a tile of tokens (8 MB) and 4 MB of sums through L2; a program has 4 steps of 24 KB. Predicted:
# 5 us.
@triton_jit
def _score_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    score_ptr: tl.tensor,
    square_ptr: tl.tensor,
    num_tokens: tl.tensor,
    stride_xt: tl.tensor,
    stride_xd: tl.tensor,
    stride_w: tl.tensor,
    stride_ge: tl.tensor,
    stride_gd: tl.tensor,
    DIM: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    tl.static_assert(SLICE % BLOCK_D == 0)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    s = tl.program_id(2)
    inside_t, inside_e = t < num_tokens, e < NUM_EXPERTS
    x_row = x_ptr + t.to(tl.int64)[:, None] * stride_xt
    gate_row = gate_ptr + e.to(tl.int64)[:, None] * stride_ge
    score_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    square_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for step in range(0, SLICE, BLOCK_D):
        d = (s * SLICE + step + tl.arange(0, BLOCK_D))[None, :]
        d_64 = d.to(tl.int64)
        x = tl.load(x_row + d_64 * stride_xd, mask=inside_t[:, None] & (d < DIM), other=0.0)
        x = x.to(tl.float32)
        square_TD += x * x
        norm_weight = tl.load(norm_weight_ptr + d_64 * stride_w, mask=d < DIM, other=0.0)
        gate = tl.load(gate_row + d_64 * stride_gd, mask=inside_e[:, None] & (d < DIM), other=0.0)
        score_TE = tl.dot(
            x * norm_weight.to(tl.float32),
            tl.trans(gate.to(tl.float32)),
            acc=score_TE,
            input_precision="tf32x3",
        )
    row = s.to(tl.int64) * num_tokens + t
    if tl.program_id(1) == 0:
        tl.store(square_ptr + row, tl.sum(square_TD, axis=1), mask=inside_t)
    score_at = score_ptr + row[:, None] * NUM_EXPERTS + e[None, :]
    tl.store(score_at, score_TE, mask=inside_t[:, None] & inside_e[None, :])


# The rest of the router for BLOCK_T tokens: sums over slices, the norm, h, and the picks.
#
# Bytes: 4 * S * T * E of sums, x once more and h: at 512 tokens of the shape above 4 + 4 + 2 MB,
# most of it from L2. All loads of a program are in flight together; the K picks follow one another,
# each a few shuffles within a warp. Predicted: 5 us.
@triton_jit
def _pick_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    score_ptr: tl.tensor,
    square_ptr: tl.tensor,
    h_ptr: tl.tensor,
    topk_id_ptr: tl.tensor,
    topk_weight_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    scaling_factor: tl.tensor,
    stride_xt: tl.tensor,
    stride_xd: tl.tensor,
    stride_w: tl.tensor,
    DIM: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_t = t < num_tokens
    t_64 = t.to(tl.int64)
    e = tl.arange(0, EXPERTS_PAD)
    inside_TE = inside_t[:, None] & (e < NUM_EXPERTS)[None, :]
    score_TE = tl.zeros([BLOCK_T, EXPERTS_PAD], tl.float32)
    square_T = tl.zeros([BLOCK_T], tl.float32)
    for s in tl.static_range(NUM_SLICES):
        row = t_64 + tl.full([], s, tl.int64) * num_tokens
        square_T += tl.load(square_ptr + row, mask=inside_t, other=0.0)
        score_at = score_ptr + row[:, None] * NUM_EXPERTS + e[None, :]
        score_TE += tl.load(score_at, mask=inside_TE, other=0.0)
    inverse_T1 = (1.0 / tl.sqrt_rn(square_T / DIM + eps))[:, None]
    for first in tl.static_range(0, DIM, BLOCK_D):
        d = (first + tl.arange(0, BLOCK_D))[None, :]
        d_64 = d.to(tl.int64)
        inside = inside_t[:, None] & (d < DIM)
        x_at = x_ptr + t_64[:, None] * stride_xt + d_64 * stride_xd
        norm_weight = tl.load(norm_weight_ptr + d_64 * stride_w, mask=d < DIM, other=0.0)
        x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        h = x * inverse_T1 * norm_weight.to(tl.float32)
        tl.store(h_ptr + t_64[:, None] * DIM + d, h.to(h_ptr.dtype.element_ty), mask=inside)
    id_TK, weight_TK = pick_experts(
        score_TE * inverse_T1,
        scaling_factor,
        NUM_EXPERTS,
        EXPERTS_PAD,
        TOP_K,
        K_PAD,
        RENORMALIZE,
    )
    k_1K = tl.arange(0, K_PAD)[None, :]
    inside = inside_t[:, None] & (k_1K < TOP_K)
    tl.store(topk_id_ptr + t_64[:, None] * TOP_K + k_1K, id_TK, mask=inside)
    tl.store(topk_weight_ptr + t_64[:, None] * TOP_K + k_1K, weight_TK, mask=inside)


# Stable counting sort by expert, without atomics: program e reads all ids to count the smaller
# ones, which is where its part begins, and once more to write its own assignments there in order.
#
#   ids [A]:    | 3 0 3 1 ... |  BLOCK_A at a time, by every program
#   order [A]:  | those of expert 0 | of 1 | ...   program e writes its own part
#
# Bytes: 8 * A a program from L2, 4 * (A + E) written. 512 tokens of 8 experts are one block of 16
# KB: two loads, a sum and a scan, predicted 3 us; 8,192 tokens are 16 blocks twice, some 25 us.
@triton_jit
def _order_kernel(
    topk_id_ptr: tl.tensor,
    start_ptr: tl.tensor,
    order_ptr: tl.tensor,
    num_assignments: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_A: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    smaller_A = tl.zeros([BLOCK_A], tl.int32)
    for first in range(0, num_assignments, BLOCK_A):
        a = first + tl.arange(0, BLOCK_A)
        id_A = tl.load(topk_id_ptr + a, mask=a < num_assignments, other=NUM_EXPERTS)
        smaller_A += (id_A < expert).to(tl.int32)
    start = tl.sum(smaller_A, axis=0)
    tl.store(start_ptr + expert, start)
    if expert == NUM_EXPERTS - 1:
        tl.store(start_ptr + NUM_EXPERTS, num_assignments)
    for first in range(0, num_assignments, BLOCK_A):
        a = first + tl.arange(0, BLOCK_A)
        id_A = tl.load(topk_id_ptr + a, mask=a < num_assignments, other=NUM_EXPERTS)
        is_own_A = (id_A == expert).to(tl.int32)
        rank_A = tl.cumsum(is_own_A, axis=0) - 1
        tl.store(order_ptr + start + rank_A, a, mask=is_own_A != 0)
        start += tl.sum(is_own_A, axis=0)
