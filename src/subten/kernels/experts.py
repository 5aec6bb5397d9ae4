"""The feed-forward of the chosen experts, weighted and added to the residual.

Letters: T tokens, K experts a token, A = T * K assignments, E experts, D features, F hidden
features of an expert (`gate_up` [E, 2 * F, D] holds gate rows first, `down` is [E, D, F]).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from subten.kernels.experts_grouped import grouped
from subten.kernels.linear import product_torch
from subten.kernels.route import Routing
from subten.kernels.triton_shim import tl, triton, triton_jit
from subten.kernels.weight_formats import WEIGHT_FORMATS, Weight, load_scale, row_offset

MAX_GATHER_TOKENS = 8
"""Tokens up to which `experts` gathers the weights of each token's experts; for more, `route` is to
be called `with_order`.

Experts are then shared by enough tokens that reading each once, on the tensor cores, wins. On a
CPU it is the number of tokens up to which a row's bits are its own (`cpu_linear.FEW_ROWS`).
"""


def experts(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    *,
    residual_TD: torch.Tensor,
) -> torch.Tensor:
    """residual + sum_k weight_k * down_e(k)(silu(gate_e(k) h) * up_e(k) h).

    gate_up [E, 2 * F, D] and down [E, D, F] in any format, for h of their dtype, bfloat16 or
    float32; residual [T, D] in either, any strides; returns a new contiguous [T, D] of the
    residual's dtype. Without
    `routing.order_A` each token gathers its experts (two launches); with it, tokens are grouped
    by expert (three launches). Sums are in FP32 and in a fixed order, with no atomics: equal
    inputs give equal bits. The hidden activation is stored in the weights' dtype.
    """
    num_tokens, dim = residual_TD.shape
    num_experts, double_hidden, _ = gate_up.shape
    hidden = double_hidden // 2
    top_k = routing.topk_id_TK.shape[1]
    assert gate_up.shape == (num_experts, 2 * hidden, dim), (gate_up.shape, dim)
    assert down.shape == (num_experts, dim, hidden), (down.shape, hidden)
    assert routing.h_TD.shape == residual_TD.shape, (routing.h_TD.shape, residual_TD.shape)
    assert gate_up.format == down.format, (gate_up.format, down.format)
    dtypes = {x.dtype for x in (routing.h_TD, gate_up, down)}
    assert dtypes in ({torch.bfloat16}, {torch.float32}), dtypes
    assert residual_TD.dtype in (torch.bfloat16, torch.float32), residual_TD.dtype
    for tensor in (routing.h_TD, routing.topk_id_TK, routing.topk_weight_TK):
        assert tensor.is_contiguous(), tensor.stride()
    new = functools.partial(torch.empty, device=residual_TD.device)
    out_TD = new(num_tokens, dim, dtype=residual_TD.dtype)
    if num_tokens == 0:
        return out_TD
    act_AF = new(num_tokens * top_k, hidden, dtype=routing.h_TD.dtype)
    if routing.order_A is None:
        _gather(routing, gate_up, down, residual_TD, act_AF, out_TD)
    else:
        grouped(routing, gate_up, down, residual_TD, act_AF, out_TD)
    return out_TD


def experts_torch(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    *,
    residual_TD: torch.Tensor,
) -> torch.Tensor:
    """Twin of `experts`; reads the weights of the chosen experts alone."""
    num_tokens, top_k = routing.topk_id_TK.shape
    if num_tokens == 1:
        return _experts_of_one(routing, gate_up, down, residual_1D=residual_TD)
    # By expert, in whole tensors: lists of a text's assignments would take longer than its sums.
    id_A = routing.topk_id_TK.flatten()
    order_A = id_A.argsort(stable=True)
    h_AD = routing.h_TD[order_A // top_k]
    parts, start = [], 0
    for expert, count in enumerate(torch.bincount(id_A).tolist()):
        if count == 0:
            continue
        h_RD, start = h_AD[start : start + count], start + count
        gate_RF, up_RF = product_torch(h_RD, gate_up, (expert,)).chunk(2, dim=-1)
        act_RF = (F.silu(gate_RF) * up_RF).to(h_RD.dtype)
        parts.append(product_torch(act_RF, down, (expert,)))
    if not parts:
        return residual_TD.clone()
    y_TKD = torch.cat(parts)[order_A.argsort()].view(num_tokens, top_k, -1)
    sum_TD = (y_TKD.float() * routing.topk_weight_TK.unsqueeze(-1)).sum(dim=1)
    return (residual_TD.float() + sum_TD).to(residual_TD.dtype)


def _experts_of_one(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    *,
    residual_1D: torch.Tensor,
) -> torch.Tensor:
    """One token has nothing to group: on a CPU that bookkeeping took as long as its experts."""
    sum_1D = residual_1D.float()
    for k, expert in enumerate(routing.topk_id_TK[0].tolist()):
        gate_1F, up_1F = product_torch(routing.h_TD, gate_up, (expert,)).chunk(2, dim=-1)
        act_1F = (F.silu(gate_1F) * up_1F).to(routing.h_TD.dtype)
        y_1D = product_torch(act_1F, down, (expert,))
        sum_1D = sum_1D + routing.topk_weight_TK[:, k, None] * y_1D
    return sum_1D.to(residual_1D.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _GatherLaunch:
    block_f: int
    block_d: int
    down_block_d: int
    down_block_f: int
    k_pad: int
    num_warps: int


def _choose_gather(gate_up: Weight, down: Weight, top_k: int) -> _GatherLaunch:
    """Tiles of the gather path; every number here is a first guess, to be measured.

    A program holds about 4096 weights of each matrix at once: at 4 warps 32 a thread, so four
    loads of 16 bytes in flight in bfloat16. A tile of int4 never spans two scales of a row, and
    has half as many of gate and up, whose unpacking takes registers.
    """
    dim, hidden = gate_up.in_features, down.in_features
    is_int4 = gate_up.format == "int4"
    block_d = min(triton.next_power_of_2(dim), gate_up.group if is_int4 else 1024)
    k_pad = triton.next_power_of_2(top_k)
    longest = down.group if is_int4 else max(64, 1024 // k_pad)
    down_block_f = min(triton.next_power_of_2(hidden), longest)
    return _GatherLaunch(
        block_f=max(1, min((2048 if is_int4 else 4096) // block_d, triton.next_power_of_2(hidden))),
        block_d=block_d,
        down_block_d=max(1, min(4096 // (k_pad * down_block_f), triton.next_power_of_2(dim))),
        down_block_f=down_block_f,
        k_pad=k_pad,
        num_warps=4,
    )


def _gather(
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    residual_TD: torch.Tensor,
    act_AF: torch.Tensor,
    out_TD: torch.Tensor,
) -> None:
    num_tokens, dim = residual_TD.shape
    num_assignments, hidden = act_AF.shape
    top_k = num_assignments // num_tokens
    launch = _choose_gather(gate_up, down, top_k)
    up_codes, down_codes = gate_up.storage, down.storage
    load_codes = WEIGHT_FORMATS[gate_up.format].loader(residual_TD.device)
    _gather_up_kernel[(num_assignments, triton.cdiv(hidden, launch.block_f))](
        routing.h_TD,
        routing.topk_id_TK,
        up_codes,
        up_codes if gate_up.scale is None else gate_up.scale,
        act_AF,
        *up_codes.stride(),
        DIM=dim,
        HIDDEN=hidden,
        TOP_K=top_k,
        GROUP=gate_up.group,
        LOAD_CODES=load_codes,
        BLOCK_F=launch.block_f,
        BLOCK_D=launch.block_d,
        num_warps=launch.num_warps,
    )
    _gather_down_kernel[(num_tokens, triton.cdiv(dim, launch.down_block_d))](
        act_AF,
        routing.topk_id_TK,
        routing.topk_weight_TK,
        down_codes,
        down_codes if down.scale is None else down.scale,
        residual_TD,
        out_TD,
        *down_codes.stride(),
        *residual_TD.stride(),
        DIM=dim,
        HIDDEN=hidden,
        TOP_K=top_k,
        GROUP=down.group,
        LOAD_CODES=load_codes,
        K_PAD=launch.k_pad,
        BLOCK_D=launch.down_block_d,
        BLOCK_F=launch.down_block_f,
        num_warps=launch.num_warps,
    )


# act_f = silu(sum_d gate_fd h_d) * sum_d up_fd h_d  for assignment a and its expert e.
#
#   gate_up [E, 2F, D]:  | expert e: gate rows 0 .. F-1 | up rows 0 .. F-1 | expert e + 1 ...
#                            BLOCK_F rows of D values       the same rows
#
# Codes are decoded in registers (weight_formats.py); the one scale of a row waits for the end of
# its sum, that of a group of inputs goes onto the weights.
#
# Bytes: those of A * 2 * F rows of weights (less where assignments share an expert: assignments
# run fastest in the grid, so that their programs meet in L2), A * F activations. Rows are read
# along D, 16 bytes a thread; the sum over D stays in registers until the end of the row.
@triton_jit
def _gather_up_kernel(
    h_ptr: tl.tensor,
    topk_id_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    act_ptr: tl.tensor,
    stride_e: tl.tensor,
    stride_f: tl.tensor,
    stride_d: tl.tensor,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    LOAD_CODES: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    a = tl.program_id(0)
    expert = tl.load(topk_id_ptr + a)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_f = f < HIDDEN
    gate_row = row_offset(expert, stride_e) + row_offset(f, stride_f)
    up_row = gate_row + tl.full([], HIDDEN, tl.int64) * stride_f
    gate_at = row_offset(expert, 2 * HIDDEN) + f
    h_row = h_ptr + row_offset(a // TOP_K, DIM)
    gate_FD = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    up_FD = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    for first in range(0, DIM, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        gate = LOAD_CODES(gate_up_ptr, gate_row, first, inside_f, stride_d, DIM, BLOCK_D)
        up = LOAD_CODES(gate_up_ptr, up_row, first, inside_f, stride_d, DIM, BLOCK_D)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if GROUP > 0 and GROUP < DIM:
            gate *= load_scale(scale_ptr, gate_at, first, inside_f, DIM, GROUP)[:, None]
            up *= load_scale(scale_ptr, gate_at + HIDDEN, first, inside_f, DIM, GROUP)[:, None]
        h = tl.load(h_row + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        gate_FD += gate * h
        up_FD += up * h
    gate_F, up_F = tl.sum(gate_FD, axis=1), tl.sum(up_FD, axis=1)
    if GROUP == DIM:
        gate_F *= load_scale(scale_ptr, gate_at, 0, inside_f, DIM, GROUP)
        up_F *= load_scale(scale_ptr, gate_at + HIDDEN, 0, inside_f, DIM, GROUP)
    act_F = gate_F / (1.0 + tl.exp(-gate_F)) * up_F
    act = act_F.to(act_ptr.dtype.element_ty)
    tl.store(act_ptr + row_offset(a, HIDDEN) + f, act, mask=inside_f)


# out_d = residual_d + sum_k weight_k sum_f down_edf act_kf  for one token.
#
#   down [E, D, F]:  | expert e: row d = F values | ...      act [A, F]: row t * K + k
#
# Bytes: those of A * D rows of weights, 2 * T * D * itemsize. A program takes BLOCK_D outputs
# with all K experts side by side, so that the loads of every expert are in flight together and
# the sum over k stays inside: no atomics, one order.
@triton_jit
def _gather_down_kernel(
    act_ptr: tl.tensor,
    topk_id_ptr: tl.tensor,
    topk_weight_ptr: tl.tensor,
    down_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_e: tl.tensor,
    stride_d: tl.tensor,
    stride_f: tl.tensor,
    stride_rt: tl.tensor,
    stride_rd: tl.tensor,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    LOAD_CODES: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    t = tl.program_id(0)
    # Row r of the tile is expert r // BLOCK_D of the token, output r % BLOCK_D of the block.
    r = tl.arange(0, K_PAD * BLOCK_D)
    k = r // BLOCK_D
    d_R = tl.program_id(1) * BLOCK_D + r % BLOCK_D
    inside_R = (k < TOP_K) & (d_R < DIM)
    a_R = row_offset(t, TOP_K) + k
    expert_R = tl.load(topk_id_ptr + a_R, mask=k < TOP_K, other=0)
    weight_R = tl.load(topk_weight_ptr + a_R, mask=k < TOP_K, other=0.0)
    down_row = row_offset(expert_R, stride_e) + row_offset(d_R, stride_d)
    down_at = row_offset(expert_R, DIM) + d_R
    act_row = (act_ptr + row_offset(a_R, HIDDEN))[:, None]
    sum_RF = tl.zeros([K_PAD * BLOCK_D, BLOCK_F], tl.float32)
    for first in range(0, HIDDEN, BLOCK_F):
        f = (first + tl.arange(0, BLOCK_F))[None, :]
        down = LOAD_CODES(down_ptr, down_row, first, inside_R, stride_f, HIDDEN, BLOCK_F)
        down = down.to(tl.float32)
        if GROUP > 0 and GROUP < HIDDEN:
            down *= load_scale(scale_ptr, down_at, first, inside_R, HIDDEN, GROUP)[:, None]
        act = tl.load(act_row + f, mask=inside_R[:, None] & (f < HIDDEN), other=0.0)
        sum_RF += down * act.to(tl.float32)
    if GROUP == HIDDEN:
        weight_R *= load_scale(scale_ptr, down_at, 0, inside_R, HIDDEN, GROUP)
    y_KD = tl.reshape(tl.sum(sum_RF, axis=1) * weight_R, (K_PAD, BLOCK_D))
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_d = d < DIM
    residual_at = residual_ptr + row_offset(t, stride_rt) + row_offset(d, stride_rd)
    out_D = tl.load(residual_at, mask=inside_d, other=0.0).to(tl.float32) + tl.sum(y_KD, axis=0)
    out_at = out_ptr + row_offset(t, DIM) + d
    tl.store(out_at, out_D.to(out_ptr.dtype.element_ty), mask=inside_d)
