"""The router for the tokens of a batch on CUDA: norm, scores, picks and order in one launch.

Letters: T tokens, D features, E experts, K experts a token, A = T * K assignments.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from subten.kernels.cuda import runtime
from subten.kernels.cuda.gemv import FLOAT_DTYPES, has_rows, is_plain
from subten.kernels.route import Routing

NUM_THREADS = 256
SLICES = 8
"""Blocks of a cluster, each with a slice of the features: `SLICES` of route_batch.cu."""

MAX_TOKENS = 96
"""Tokens of one wave of clusters. With an order 32 tokens of qwen3-30b-a3b take 11.6 us, and 16.2
in three Triton launches; 512 took 59 us, in clusters of 32 tokens and two waves, and 24."""

MAX_EXPERTS = 256
MAX_TOP_K = 32
"""A lane of a warp keeps one pick."""

TOKENS = (4, 8)
"""Tokens that a cluster may have."""

CLUSTERS = 12
"""That an H200 holds at once, a block an SM: 16 take two waves."""


def tokens_of_cluster(num_tokens: int) -> int:
    """The fewest that leave no second wave of clusters."""
    return next((t for t in TOKENS if t * CLUSTERS >= num_tokens), TOKENS[-1])


def keys_of_lane(num_experts: int) -> int:
    """Experts that a lane of a picking warp holds: a power of two."""
    return 1 << max(0, (num_experts - 1).bit_length() - 5)


def shared_bytes(num_tokens: int, dim: int, num_experts: int, top_k: int) -> int:
    """The larger of what scores and the order need, as laid out in route_batch.cu."""
    tokens, width = tokens_of_cluster(num_tokens), dim // SLICES
    experts = 32 * keys_of_lane(num_experts)
    scores = tokens * width + tokens * NUM_THREADS + 2 * tokens + num_experts * (width + 4)
    order = num_tokens * top_k + (NUM_THREADS // 32 + 1) * experts
    return 4 * max(scores, order)


def route(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    gate_ED: torch.Tensor,
    *,
    eps: float,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    with_order: bool,
    pdl: bool = True,
) -> Routing:
    """`subten.kernels.route.route` in one launch; `suits` says what it takes.

    With `pdl` (programmatic dependent launch) the gate is read before earlier kernels of the stream
    have ended. Launches on one device must follow one another: they share a counter, which returns
    to zero; the first one, outside of any graph capture, allocates it.
    """
    (num_tokens, dim), num_experts, device = x_TD.shape, gate_ED.shape[0], x_TD.device
    new = functools.partial(torch.empty, device=device)
    routing = Routing(
        h_TD=new(num_tokens, dim, dtype=norm_weight_D.dtype),
        topk_id_TK=new(num_tokens, top_k, dtype=torch.int32),
        topk_weight_TK=new(num_tokens, top_k, dtype=torch.float32),
        expert_start_E1=new(num_experts + 1, dtype=torch.int32) if with_order else None,
        order_A=new(num_tokens * top_k, dtype=torch.int32) if with_order else None,
    )
    tokens = tokens_of_cluster(num_tokens)
    runtime.launch(
        "route_batch.cu",
        f"route_batch_kernel<{keys_of_lane(num_experts)}, {tokens}>",
        (SLICES, -(-num_tokens // tokens)),
        NUM_THREADS,
        (
            x_TD,
            ctypes.c_int64(x_TD.stride(0) * x_TD.element_size()),
            int(x_TD.dtype == torch.bfloat16),
            norm_weight_D,
            gate_ED,
            routing.h_TD,
            routing.topk_id_TK,
            routing.topk_weight_TK,
            routing.expert_start_E1,
            routing.order_A,
            _arrivals(device),
            num_tokens,
            num_experts,
            dim,
            top_k,
            int(renormalize),
            float(eps),
            float(scaling_factor),
        ),
        device=device,
        shared_bytes=shared_bytes(num_tokens, dim, num_experts, top_k),
        pdl=pdl,
        cluster=SLICES,
    )
    return routing


def suits(
    x_TD: torch.Tensor, norm_weight_D: torch.Tensor, gate_ED: torch.Tensor, top_k: int
) -> bool:
    """Whether the kernel takes these tensors: dtypes, whole units of features, a gate that fits."""
    (num_tokens, dim), num_experts = x_TD.shape, gate_ED.shape[0]
    return (
        1 <= num_tokens <= MAX_TOKENS
        and dim % (8 * SLICES) == 0
        and num_experts <= MAX_EXPERTS
        and top_k <= min(MAX_TOP_K, num_experts)
        and x_TD.dtype in FLOAT_DTYPES
        and has_rows(x_TD)
        and norm_weight_D.dtype == torch.bfloat16
        and is_plain(norm_weight_D)
        and gate_ED.dtype == torch.float32
        and is_plain(gate_ED)
        and shared_bytes(num_tokens, dim, num_experts, top_k)
        <= runtime.max_shared_bytes(x_TD.device)
        and (x_TD.device.type == "cpu" or runtime.has_clusters(x_TD.device))
    )


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Blocks of a launch that have picked."""
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "the first router of a batch must run outside of graph capture"
    return torch.zeros(1, dtype=torch.int32, device=device)
