"""Which experts each token goes to: norm, router product, softmax, top-k and order, in FP32.

Letters: T tokens, D features, E experts, K experts a token, A = T * K assignments; assignment
t * K + k is the k-th expert of token t.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from subten.kernels.route_many import order_by_expert, route_many
from subten.kernels.route_pick import pick_experts
from subten.kernels.triton_shim import tl, triton, triton_jit


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedAhead:
    """What is left to do where one token's experts were chosen before its norm was known.

    `x_TD` [1, D] the experts' input before RMSNorm with `norm_weight_D` and `eps`; `score_TE`
    float32 [1, E] the router's product without the norm's factor, so that softmax(score * factor)
    are the probabilities of all experts, from which `experts` writes `topk_weight_TK`:
    `renormalize` and `scaling_factor` are as for `route`.
    """

    x_TD: torch.Tensor
    norm_weight_D: torch.Tensor
    score_TE: torch.Tensor
    eps: float
    renormalize: bool
    scaling_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Where the tokens of one layer go, best expert first.

    `h_TD` the normed input of the experts, in the norm weight's dtype; `topk_id_TK` int32,
    distinct in each row and within [0, E) whatever the input; `topk_weight_TK` float32, NaN in a
    row whose scores hold a NaN or +inf or nothing finite, so that the row's request fails where
    its logits are read. With order: `order_A` int32, assignments sorted by expert, by number
    within an expert; `expert_start_E1` int32 [E + 1], expert e owns
    order[expert_start[e] : expert_start[e + 1]]. With `ahead`, which only the CUDA op
    `linear_route` gives and only CUDA `experts` takes, h has no rows and `topk_weight_TK` is
    memory that `experts` fills.
    """

    h_TD: torch.Tensor
    topk_id_TK: torch.Tensor
    topk_weight_TK: torch.Tensor
    expert_start_E1: torch.Tensor | None = None
    order_A: torch.Tensor | None = None
    ahead: RoutedAhead | None = None


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
    """RMSNorm, router product, softmax over all experts and top-k.

    One launch for up to FEW_TOKENS tokens, two for more, and one for the order.

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
    if num_tokens <= FEW_TOKENS:
        _route_few(x_TD, norm_weight_D, gate_ED, routing, eps, renormalize, scaling_factor)
    else:
        route_many(
            x_TD,
            norm_weight_D,
            gate_ED,
            routing.h_TD,
            routing.topk_id_TK,
            routing.topk_weight_TK,
            eps=eps,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
        )
    if routing.expert_start_E1 is not None and routing.order_A is not None:
        order_by_expert(routing.topk_id_TK, routing.expert_start_E1, routing.order_A)
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


FEW_TOKENS = 16
"""Up to here a token's experts are split over programs, so that many SMs read the gate."""

TARGET_PROGRAMS = 132
"""Programs to aim at with few tokens: one for each SM of an H100 or H200."""


def _route_few(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    gate_ED: torch.Tensor,
    routing: Routing,
    eps: float,
    renormalize: bool,
    scaling_factor: float,
) -> None:
    (num_tokens, dim), num_experts = x_TD.shape, gate_ED.shape[0]
    top_k = routing.topk_id_TK.shape[1]
    block_d = triton.next_power_of_2(dim)
    # 4096 gate values at once: 32 a thread, four loads of 16 bytes in bfloat16.
    block_e = max(1, min(4096 // block_d, triton.next_power_of_2(num_experts)))
    num_splits = max(1, min(triton.cdiv(num_experts, block_e), TARGET_PROGRAMS // num_tokens))
    _route_few_kernel[(num_tokens, num_splits)](
        torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x_TD.device),
        x_TD,
        norm_weight_D,
        gate_ED,
        routing.h_TD,
        routing.topk_id_TK,
        routing.topk_weight_TK,
        _counters(x_TD.device),
        eps,
        scaling_factor,
        *x_TD.stride(),
        norm_weight_D.stride(0),
        *gate_ED.stride(),
        DIM=dim,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        EXPERTS_PAD=max(16, triton.next_power_of_2(num_experts)),
        K_PAD=triton.next_power_of_2(top_k),
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        num_warps=8 if block_d > 4096 else 4,
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Arrivals of the programs of each token."""
    return torch.zeros(FEW_TOKENS, dtype=torch.int32, device=device)


# Few tokens. Program (t, s) norms token t (again for each s: a row is small) and computes the
# scores of its share of the experts:
#
#   h_d = x_d / sqrt(mean(x^2) + eps) * w_d        score_e = sum_d gate_ed h_d
#
#   gate [E, D]:  | e0 ......... D | e1 ......... D | ...   split s owns experts s, s + S, ...
#                 (in blocks of BLOCK_E rows)
#
# The program that arrives last for its token selects.
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
    counter_ptr: tl.tensor,
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
    EXPERTS_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    if tl.atomic_add(counter_ptr + t, 1) == tl.num_programs(1) - 1:
        tl.store(counter_ptr + t, 0)
        e = tl.arange(0, EXPERTS_PAD)
        score_E = tl.load(
            score_ptr + t_64 * NUM_EXPERTS + e,
            mask=e < NUM_EXPERTS,
            other=0.0,
            cache_modifier=".cg",
        )
        id_TK, weight_TK = pick_experts(
            score_E[None, :], scaling_factor, NUM_EXPERTS, EXPERTS_PAD, TOP_K, K_PAD, RENORMALIZE
        )
        k_1K = tl.arange(0, K_PAD)[None, :]
        tl.store(topk_id_ptr + t_64 * TOP_K + k_1K, id_TK, mask=k_1K < TOP_K)
        tl.store(topk_weight_ptr + t_64 * TOP_K + k_1K, weight_TK, mask=k_1K < TOP_K)
