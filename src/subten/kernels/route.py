"""Which experts each token goes to: norm, router product, softmax, top-k and order, in FP32.

Letters: T tokens, D features, E experts, K experts a token, A = T * K assignments; assignment
t * K + k is the k-th expert of token t.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from subten.kernels.triton_shim import tl, triton, triton_jit


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Where the tokens of one layer go, best expert first.

    `h_TD` the normed input of the experts, in the norm weight's dtype; `topk_id_TK` int32,
    distinct in each row and within [0, E) whatever the input; `topk_weight_TK` float32, NaN in a
    row whose scores hold a NaN or +inf or nothing finite, so that the row's request fails where
    its logits are read. With order: `order_A` int32, assignments sorted by expert, by number
    within an expert; `expert_start_E1` int32 [E + 1], expert e owns
    order[expert_start[e] : expert_start[e + 1]].
    """

    h_TD: torch.Tensor
    topk_id_TK: torch.Tensor
    topk_weight_TK: torch.Tensor
    expert_start_E1: torch.Tensor | None = None
    order_A: torch.Tensor | None = None


def route(
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
    """RMSNorm, router product, softmax over all experts and top-k, in one launch.

    x [T, D], norm_weight [D] and gate [E, D] each in bfloat16 or float32, any strides; h comes
    out in norm_weight's dtype; 1 <= top_k <= E <= 1024. Scores come from the FP32 norm, before it
    is rounded to h; ties go to the lowest id. `renormalize` divides the k weights by their sum;
    `scaling_factor` multiplies them in either case. `with_order` adds the order of the grouped
    `experts` path. A NaN score counts as the lowest, so that the ids of a bad row stay distinct
    and in range. Launches on one device must follow one another (they share counters, which
    return to zero); the first one, outside of any graph capture, allocates them.
    """
    num_tokens, dim = x_TD.shape
    num_experts = gate_ED.shape[0]
    assert gate_ED.shape == (num_experts, dim), (tuple(gate_ED.shape), dim)
    assert norm_weight_D.shape == (dim,), (tuple(norm_weight_D.shape), dim)
    assert 1 <= top_k <= num_experts <= 1024, (top_k, num_experts)
    assert num_tokens * top_k < 2**31, (num_tokens, top_k)
    assert x_TD.device == gate_ED.device == norm_weight_D.device, (x_TD.device, gate_ED.device)
    new = functools.partial(torch.empty, device=x_TD.device)
    routing = Routing(
        h_TD=new(num_tokens, dim, dtype=norm_weight_D.dtype),
        topk_id_TK=new(num_tokens, top_k, dtype=torch.int32),
        topk_weight_TK=new(num_tokens, top_k, dtype=torch.float32),
        expert_start_E1=new(num_experts + 1, dtype=torch.int32) if with_order else None,
        order_A=new(num_tokens * top_k, dtype=torch.int32) if with_order else None,
    )
    if num_tokens == 0:
        if routing.expert_start_E1 is not None:
            routing.expert_start_E1.zero_()
        return routing
    launch = _choose_launch(num_tokens, num_experts, dim)
    tensors = (
        x_TD,
        norm_weight_D,
        gate_ED,
        routing.h_TD,
        routing.topk_id_TK,
        routing.topk_weight_TK,
        routing.expert_start_E1,
        routing.order_A,
        _counters(x_TD.device),
    )
    numbers = (num_tokens, eps, scaling_factor)
    strides = (*x_TD.stride(), norm_weight_D.stride(0), *gate_ED.stride())
    constants = {
        "DIM": dim,
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "RENORMALIZE": renormalize,
        "WITH_ORDER": with_order,
        "EXPERTS_PAD": launch.experts_pad,
        "K_PAD": triton.next_power_of_2(top_k),
        "BLOCK_D": launch.block_d,
        "BLOCK_A": launch.block_a,
        "num_warps": launch.num_warps,
    }
    if num_tokens <= FEW_TOKENS:
        score_TE = new(num_tokens, num_experts, dtype=torch.float32)
        _route_few_kernel[launch.grid](
            score_TE, *tensors, *numbers, *strides, BLOCK_E=launch.block_e, **constants
        )
    else:
        _route_many_kernel[launch.grid](
            *tensors, *numbers, *strides, BLOCK_T=launch.block_t, **constants
        )
    return routing


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
        h_TD=h_TD.to(norm_weight_D.dtype),
        topk_id_TK=topk_id_TK.int(),
        topk_weight_TK=weight_TK * scaling_factor,
        expert_start_E1=start_E1,
        order_A=order_A,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    grid: tuple[int, int]
    block_t: int
    block_d: int
    block_e: int
    experts_pad: int
    block_a: int
    num_warps: int


FEW_TOKENS = 16
"""Up to here a token's experts are split over programs, so that many SMs read the gate."""

TARGET_PROGRAMS = 132
"""Programs to aim at with few tokens: one for each SM of an H100 or H200."""


def _choose_launch(num_tokens: int, num_experts: int, dim: int) -> _Launch:
    """Tiles of one call; every number here is a first guess, to be measured."""
    experts_pad = max(16, triton.next_power_of_2(num_experts))
    # The ordering program holds [block_a, experts_pad] counters: 32 a thread at 4 warps.
    block_a = max(16, 4096 // experts_pad)
    if num_tokens > FEW_TOKENS:
        # Its passes over the assignments are most of a long prompt's time: few and wide, 64
        # counters a thread at 8 warps, which ptxas still holds in registers (Triton 3.6).
        block_a = max(16, min(256, 16384 // experts_pad))
        return _Launch(
            grid=(triton.cdiv(num_tokens, 16), 1),
            block_t=16,
            # A tile of the gate is 32 KiB, so that two stages fit any recent GPU's shared memory.
            block_d=max(16, min(64, 8192 // experts_pad)),
            block_e=experts_pad,
            experts_pad=experts_pad,
            block_a=block_a,
            num_warps=8,
        )
    block_d = triton.next_power_of_2(dim)
    # 4096 gate values at once: 32 a thread, four loads of 16 bytes in bfloat16.
    block_e = max(1, min(4096 // block_d, triton.next_power_of_2(num_experts)))
    num_splits = max(1, min(triton.cdiv(num_experts, block_e), TARGET_PROGRAMS // num_tokens))
    return _Launch(
        grid=(num_tokens, num_splits),
        block_t=1,
        block_d=block_d,
        block_e=block_e,
        experts_pad=experts_pad,
        block_a=block_a,
        num_warps=8 if block_d > 4096 else 4,
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Arrivals: [0] of finished tokens or tiles, [1 + t] of the programs of token t."""
    return torch.zeros(1 + FEW_TOKENS, dtype=torch.int32, device=device)


@triton_jit
def _select(
    score_TE: tl.tensor,
    scaling_factor: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
) -> tl.tensor:
    """The k best experts of each row and their weights, by k passes of find and mask.

    Keys are the floats' bits made to sort as integers (the bits of negative ones flipped), so
    that -inf and NaN stay above `TAKEN` and a pass can never find an expert twice.
    """
    # Key of an expert that is chosen already or does not exist: below the key of every float.
    TAKEN: tl.constexpr = -0x80000000
    e_1E = tl.arange(0, EXPERTS_PAD)[None, :]
    k_1K = tl.arange(0, K_PAD)[None, :]
    is_expert = e_1E < NUM_EXPERTS
    score_TE = tl.where(is_expert, score_TE, float("-inf"))
    clean_TE = tl.where(score_TE == score_TE, score_TE, float("-inf"))
    clean_TE = tl.where(clean_TE == 0.0, 0.0, clean_TE)  # -0.0 and 0.0 tie
    bits_TE = clean_TE.to(tl.int32, bitcast=True)
    key_TE = tl.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE)
    key_TE = tl.where(is_expert, key_TE, TAKEN)
    portion_TE = tl.exp(score_TE - tl.max(clean_TE, axis=1)[:, None])
    portion_TE = portion_TE / tl.sum(portion_TE, axis=1)[:, None]
    id_TK = tl.zeros([score_TE.shape[0], K_PAD], tl.int32)
    weight_TK = tl.zeros([score_TE.shape[0], K_PAD], tl.float32)
    for k in range(TOP_K):
        best_T1 = tl.argmax(key_TE, axis=1, tie_break_left=True)[:, None]
        is_best_TE = e_1E == best_T1
        weight_T1 = tl.sum(tl.where(is_best_TE, portion_TE, 0.0), axis=1)[:, None]
        id_TK = tl.where(k_1K == k, best_T1, id_TK)
        weight_TK = tl.where(k_1K == k, weight_T1, weight_TK)
        key_TE = tl.where(is_best_TE, TAKEN, key_TE)
    if RENORMALIZE:
        weight_TK = weight_TK / tl.sum(weight_TK, axis=1)[:, None]
    return id_TK, weight_TK * scaling_factor


@triton_jit
def _write_order(
    topk_id_ptr: tl.tensor,
    start_ptr: tl.tensor,
    order_ptr: tl.tensor,
    num_assignments: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_A: tl.constexpr,
) -> None:
    """Stable counting sort of the assignments by expert, by one program.

    Loads go past L1 (.cg): the ids were written by other SMs during this launch.
    """
    e_1E = tl.arange(0, EXPERTS_PAD)[None, :]
    count_E = tl.zeros([EXPERTS_PAD], tl.int32)
    for first in range(0, num_assignments, BLOCK_A):
        a = first + tl.arange(0, BLOCK_A)
        inside = a < num_assignments
        id_A = tl.load(topk_id_ptr + a, mask=inside, other=EXPERTS_PAD, cache_modifier=".cg")
        count_E += tl.sum((id_A[:, None] == e_1E).to(tl.int32), axis=0)
    next_E = tl.cumsum(count_E, axis=0) - count_E
    e = tl.arange(0, EXPERTS_PAD)
    tl.store(start_ptr + e, next_E, mask=e < NUM_EXPERTS)
    tl.store(start_ptr + NUM_EXPERTS, num_assignments)
    for first in range(0, num_assignments, BLOCK_A):
        a = first + tl.arange(0, BLOCK_A)
        inside = a < num_assignments
        id_A = tl.load(topk_id_ptr + a, mask=inside, other=EXPERTS_PAD, cache_modifier=".cg")
        is_own_AE = (id_A[:, None] == e_1E).to(tl.int32)
        rank_AE = tl.cumsum(is_own_AE, axis=0) - 1
        position_A = tl.sum(is_own_AE * (rank_AE + next_E[None, :]), axis=1)
        tl.store(order_ptr + position_A, a, mask=inside)
        next_E += tl.sum(is_own_AE, axis=0)


# Few tokens. Program (t, s) norms token t (again for each s: a row is small) and computes the
# scores of its share of the experts:
#
#   h_d = x_d / sqrt(mean(x^2) + eps) * w_d        score_e = sum_d gate_ed h_d
#
#   gate [E, D]:  | e0 ......... D | e1 ......... D | ...   split s owns experts s, s + S, ...
#                 (in blocks of BLOCK_E rows)
#
# The program that arrives last for its token selects; the one that arrives last of all orders.
# Bytes: E * D * gate itemsize per token (from L2 after the first), 2 * T * D * itemsize.
# Why split: one SM reads roughly 0.1 TB/s, and the gate of the Qwen3 shape has 0.5 MB.
@triton_jit
def _route_few_kernel(
    score_ptr: tl.tensor,
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    h_ptr: tl.tensor,
    topk_id_ptr: tl.tensor,
    topk_weight_ptr: tl.tensor,
    start_ptr: tl.tensor,
    order_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    scaling_factor: tl.tensor,
    stride_xt: tl.tensor,
    stride_xd: tl.tensor,
    stride_w: tl.tensor,
    stride_ge: tl.tensor,
    stride_gd: tl.tensor,
    DIM: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WITH_ORDER: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    t = tl.program_id(0)
    t_64 = t.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_64 = d.to(tl.int64)
    inside_d = d < DIM
    x = tl.load(x_ptr + t_64 * stride_xt + d_64 * stride_xd, mask=inside_d, other=0.0)
    x = x.to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + d_64 * stride_w, mask=inside_d, other=0.0)
    h = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / DIM + eps)) * norm_weight.to(tl.float32)
    if tl.program_id(1) == 0:
        tl.store(h_ptr + t_64 * DIM + d, h.to(h_ptr.dtype.element_ty), mask=inside_d)
    for block in range(tl.program_id(1), tl.cdiv(NUM_EXPERTS, BLOCK_E), tl.num_programs(1)):
        e = block * BLOCK_E + tl.arange(0, BLOCK_E)
        inside = (e < NUM_EXPERTS)[:, None] & inside_d[None, :]
        row = gate_ptr + e.to(tl.int64)[:, None] * stride_ge
        gate_ED = tl.load(row + d_64[None, :] * stride_gd, mask=inside, other=0.0)
        score_E = tl.sum(gate_ED.to(tl.float32) * h[None, :], axis=1)
        tl.store(score_ptr + t_64 * NUM_EXPERTS + e, score_E, mask=e < NUM_EXPERTS)
    # Every thread's scores lie before the one release that thread 0 does in the atomic.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + 1 + t, 1) == tl.num_programs(1) - 1:
        tl.store(counter_ptr + 1 + t, 0)
        e = tl.arange(0, EXPERTS_PAD)
        score_E = tl.load(
            score_ptr + t_64 * NUM_EXPERTS + e,
            mask=e < NUM_EXPERTS,
            other=0.0,
            cache_modifier=".cg",
        )
        id_TK, weight_TK = _select(
            score_E[None, :], scaling_factor, NUM_EXPERTS, EXPERTS_PAD, TOP_K, K_PAD, RENORMALIZE
        )
        k_1K = tl.arange(0, K_PAD)[None, :]
        tl.store(topk_id_ptr + t_64 * TOP_K + k_1K, id_TK, mask=k_1K < TOP_K)
        tl.store(topk_weight_ptr + t_64 * TOP_K + k_1K, weight_TK, mask=k_1K < TOP_K)
        if WITH_ORDER:
            tl.debug_barrier()
            if tl.atomic_add(counter_ptr, 1) == num_tokens - 1:
                tl.store(counter_ptr, 0)
                _write_order(
                    topk_id_ptr,
                    start_ptr,
                    order_ptr,
                    num_tokens * TOP_K,
                    NUM_EXPERTS,
                    EXPERTS_PAD,
                    BLOCK_A,
                )


# Many tokens: the same mathematics for tiles of BLOCK_T tokens, all experts in one program, as a
# matrix product in full FP32 (no TF32: it has 10 bits, and ranks would change).
#
#   x [T, D] tile   | BLOCK_T rows |  read twice: once for the mean square, once for the product
#   gate [E, D]     | all rows     |  read once a tile, from L2
#
# Bytes: 2 * T * D * itemsize + (T / BLOCK_T) * E * D * gate itemsize (L2).
@triton_jit
def _route_many_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    h_ptr: tl.tensor,
    topk_id_ptr: tl.tensor,
    topk_weight_ptr: tl.tensor,
    start_ptr: tl.tensor,
    order_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    scaling_factor: tl.tensor,
    stride_xt: tl.tensor,
    stride_xd: tl.tensor,
    stride_w: tl.tensor,
    stride_ge: tl.tensor,
    stride_gd: tl.tensor,
    DIM: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WITH_ORDER: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_t = t < num_tokens
    t_64 = t.to(tl.int64)[:, None]
    e = tl.arange(0, EXPERTS_PAD)
    gate_row = gate_ptr + e.to(tl.int64)[:, None] * stride_ge
    square_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for first in range(0, DIM, BLOCK_D):
        d = (first + tl.arange(0, BLOCK_D))[None, :]
        inside = inside_t[:, None] & (d < DIM)
        x = tl.load(x_ptr + t_64 * stride_xt + d.to(tl.int64) * stride_xd, mask=inside, other=0.0)
        x = x.to(tl.float32)
        square_TD += x * x
    inverse_T1 = (1.0 / tl.sqrt_rn(tl.sum(square_TD, axis=1) / DIM + eps))[:, None]
    score_TE = tl.zeros([BLOCK_T, EXPERTS_PAD], tl.float32)
    for first in range(0, DIM, BLOCK_D):
        d = (first + tl.arange(0, BLOCK_D))[None, :]
        d_64 = d.to(tl.int64)
        inside = inside_t[:, None] & (d < DIM)
        x = tl.load(x_ptr + t_64 * stride_xt + d_64 * stride_xd, mask=inside, other=0.0)
        norm_weight = tl.load(norm_weight_ptr + d_64 * stride_w, mask=d < DIM, other=0.0)
        h = x.to(tl.float32) * inverse_T1 * norm_weight.to(tl.float32)
        tl.store(h_ptr + t_64 * DIM + d, h.to(h_ptr.dtype.element_ty), mask=inside)
        inside_gate = (e < NUM_EXPERTS)[:, None] & (d < DIM)
        gate_ED = tl.load(gate_row + d_64 * stride_gd, mask=inside_gate, other=0.0)
        # Three TF32 products on the tensor cores: each product within 3 * 2**-22 of FP32's.
        score_TE = tl.dot(
            h, tl.trans(gate_ED.to(tl.float32)), acc=score_TE, input_precision="tf32x3"
        )
    id_TK, weight_TK = _select(
        score_TE, scaling_factor, NUM_EXPERTS, EXPERTS_PAD, TOP_K, K_PAD, RENORMALIZE
    )
    k_1K = tl.arange(0, K_PAD)[None, :]
    inside = inside_t[:, None] & (k_1K < TOP_K)
    tl.store(topk_id_ptr + t_64 * TOP_K + k_1K, id_TK, mask=inside)
    tl.store(topk_weight_ptr + t_64 * TOP_K + k_1K, weight_TK, mask=inside)
    if WITH_ORDER:
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr, 1) == tl.num_programs(0) - 1:
            tl.store(counter_ptr, 0)
            _write_order(
                topk_id_ptr,
                start_ptr,
                order_ptr,
                num_tokens * TOP_K,
                NUM_EXPERTS,
                EXPERTS_PAD,
                BLOCK_A,
            )
