"""The router on CUDA: who serves how many tokens, and the launch for 1 to 8 of them.

Letters: T tokens, D features, E experts, K experts a token.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from subten.kernels import route as triton_route
from subten.kernels.cuda import route_batch, runtime
from subten.kernels.cuda.gemv import FLOAT_DTYPES, MAX_TOKENS, has_rows, is_plain
from subten.kernels.route import Routing

NUM_THREADS = 256
MAX_EXPERTS = 1024
MAX_TOP_K = 32
"""A lane of a warp keeps one pick."""

UNSET_BITS = -1
"""Of a score that is not there yet: `UNSET` of route.cu."""


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
    pdl: bool = True,
) -> Routing:
    """`subten.kernels.route.route` in one CUDA launch: this file's for 1 to 8 tokens without an
    order, `route_batch`'s for more, up to `route_batch.MAX_TOKENS`, and with one.

    What the kernels do not take (a gate that is not float32, a norm weight that is not bfloat16)
    goes to Triton. With `pdl` (programmatic dependent launch) gate and norm weight are read before
    earlier kernels of the stream have ended. Launches on one device must follow one another: they
    share the scores, which each leaves unset; the first one, outside of any graph capture,
    allocates them.
    """
    is_few = not with_order and x_TD.shape[0] <= MAX_TOKENS
    if not is_few and route_batch.suits(x_TD, norm_weight_D, gate_ED, top_k):
        return route_batch.route(
            x_TD,
            norm_weight_D,
            gate_ED,
            eps=eps,
            top_k=top_k,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
            with_order=with_order,
            pdl=pdl,
        )
    if not is_few or not _suits(x_TD, norm_weight_D, gate_ED, top_k):
        return triton_route.route(
            x_TD,
            norm_weight_D,
            gate_ED,
            eps=eps,
            top_k=top_k,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
            with_order=with_order,
        )
    num_tokens, dim = x_TD.shape
    num_experts, device = gate_ED.shape[0], x_TD.device
    routing = Routing(
        h_TD=torch.empty(num_tokens, dim, dtype=norm_weight_D.dtype, device=device),
        topk_id_TK=torch.empty(num_tokens, top_k, dtype=torch.int32, device=device),
        topk_weight_TK=torch.empty(num_tokens, top_k, dtype=torch.float32, device=device),
    )
    runtime.launch(
        "route.cu",
        f"route_kernel<{keys_of_lane(num_experts)}>",
        (num_experts,),
        NUM_THREADS,
        (
            x_TD,
            ctypes.c_int64(x_TD.stride(0) * x_TD.element_size()),
            int(x_TD.dtype == torch.bfloat16),
            norm_weight_D,
            gate_ED,
            unset_scores(device),
            routing.h_TD,
            routing.topk_id_TK,
            routing.topk_weight_TK,
            num_tokens,
            num_experts,
            dim,
            top_k,
            int(renormalize),
            float(eps),
            float(scaling_factor),
        ),
        device=device,
        pdl=pdl,
    )
    return routing


def keys_of_lane(num_experts: int) -> int:
    """Experts that a lane of the selecting warp holds: a power of two."""
    return 1 << max(0, (num_experts - 1).bit_length() - 5)


def _suits(
    x_TD: torch.Tensor, norm_weight_D: torch.Tensor, gate_ED: torch.Tensor, top_k: int
) -> bool:
    return (
        1 <= x_TD.shape[0] <= MAX_TOKENS
        and x_TD.shape[1] % 8 == 0
        and top_k <= min(MAX_TOP_K, gate_ED.shape[0])
        and gate_ED.shape[0] <= MAX_EXPERTS
        and x_TD.dtype in FLOAT_DTYPES
        and has_rows(x_TD)
        and norm_weight_D.dtype == torch.bfloat16
        and is_plain(norm_weight_D)
        and gate_ED.dtype == torch.float32
        and is_plain(gate_ED)
    )


@functools.cache
def unset_scores(device: torch.device) -> torch.Tensor:
    """Scores that the blocks of one launch hand to the one that picks."""
    bits = torch.full((MAX_TOKENS * MAX_EXPERTS,), UNSET_BITS, dtype=torch.int32, device=device)
    return bits.view(torch.float32)
