"""RMSNorm of a row, and the per-head norm plus rotary embedding of queries; one launch each.

Letters: T tokens, D features of the row (a head's features in `norm_rope`), H heads, P positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subten.kernels.triton_shim import tl, triton, triton_jit


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019, eq. 4), in FP32: x / sqrt(mean(x^2) + eps) * weight.

    x [T, D] of any strides, weight [D]; returns a new contiguous [T, D] of the weight's dtype, so
    that a float32 residual stream enters a bfloat16 layer in one launch.
    """
    num_tokens, dim = x_TD.shape
    assert weight_D.shape == (dim,), (tuple(weight_D.shape), dim)
    assert weight_D.device == x_TD.device, (weight_D.device, x_TD.device)
    y_TD = torch.empty(num_tokens, dim, dtype=weight_D.dtype, device=x_TD.device)
    if num_tokens == 0:
        return y_TD
    block_d = triton.next_power_of_2(dim)
    _rms_norm_kernel[(num_tokens,)](
        x_TD,
        weight_D,
        y_TD,
        eps,
        x_TD.stride(0),
        x_TD.stride(1),
        weight_D.stride(0),
        DIM=dim,
        BLOCK_D=block_d,
        num_warps=_num_warps(block_d),
    )
    return y_TD


def norm_rope(
    q_THD: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    position_T: torch.Tensor,
    *,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Per-head RMSNorm where a weight is given, then rotary embedding, half-split, in FP32.

    Channel i < D/2 pairs with i + D/2 (Su et al. 2021, eq. 34, in the order of the Hugging Face
    checkpoints). q [T, H, D] of any strides, D even; cos_sin float32 [P, D], cosines of the D/2
    frequencies first, then their sines; position int64 [T], each below P (not checked: no host
    sync). Returns a new contiguous [T, H, D] of q's dtype.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    assert head_dim % 2 == 0, head_dim
    assert cos_sin_PD.shape[1] == head_dim, (tuple(cos_sin_PD.shape), head_dim)
    assert cos_sin_PD.dtype == torch.float32, cos_sin_PD.dtype
    assert cos_sin_PD.is_contiguous(), cos_sin_PD.stride()
    assert position_T.shape == (num_tokens,), (tuple(position_T.shape), num_tokens)
    assert norm_weight_D is None or norm_weight_D.is_contiguous(), "norm_weight_D"
    out_THD = torch.empty(num_tokens, num_heads, head_dim, dtype=q_THD.dtype, device=q_THD.device)
    if out_THD.numel() == 0:
        return out_THD
    block_half = triton.next_power_of_2(head_dim // 2)
    # About 1024 elements a program: enough bytes in flight, and few programs to launch.
    block_h = max(1, min(triton.next_power_of_2(num_heads), 512 // block_half))
    _norm_rope_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        q_THD,
        cos_sin_PD,
        position_T,
        q_THD if norm_weight_D is None else norm_weight_D,
        out_THD,
        eps,
        *q_THD.stride(),
        position_T.stride(0),
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        HAS_NORM=norm_weight_D is not None,
        BLOCK_H=block_h,
        BLOCK_HALF=block_half,
        num_warps=_num_warps(2 * block_h * block_half),
    )
    return out_THD


def rms_norm_torch(x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Twin of `rms_norm`."""
    return F.rms_norm(x_TD.float(), weight_D.shape, weight_D.float(), eps).to(weight_D.dtype)


def norm_rope_torch(
    q_THD: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    position_T: torch.Tensor,
    *,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Twin of `norm_rope`."""
    q32_THD = q_THD.float()
    if norm_weight_D is not None:
        q32_THD = F.rms_norm(q32_THD, norm_weight_D.shape, norm_weight_D.float(), eps)
    first_THC, second_THC = q32_THD.chunk(2, dim=-1)
    cos_T1C, sin_T1C = cos_sin_PD[position_T].unsqueeze(1).chunk(2, dim=-1)
    rotated = (
        first_THC * cos_T1C - second_THC * sin_T1C,
        second_THC * cos_T1C + first_THC * sin_T1C,
    )
    return torch.cat(rotated, dim=-1).to(q_THD.dtype)


def _num_warps(num_elements: int) -> int:
    """Warps for rows of so many elements: 8 a thread are 16 bytes of bfloat16."""
    return max(1, min(8, num_elements // 256))


# y = x / sqrt(mean(x^2) + eps) * w. One program a row; the row stays in registers.
#
#   x [T, D]:  | row t: D values |  read once, y written once: 2 * T * D * itemsize + D bytes.
#
# One pass: a row of up to 16384 features is at most 64 values a thread at 8 warps.
@triton_jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    eps: tl.tensor,
    stride_xt: tl.tensor,
    stride_xd: tl.tensor,
    stride_w: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    x = tl.load(x_ptr + t * stride_xt + d.to(tl.int64) * stride_xd, mask=inside, other=0.0)
    x = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / DIM + eps)
    weight = tl.load(weight_ptr + d * stride_w, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * DIM + d, (x * inverse * weight).to(y_ptr.dtype.element_ty), mask=inside)


# (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of each head, after the norm.
#
#   q [T, H, D]:  | head 0: a0 .. aC-1  b0 .. bC-1 | head 1 ... |   C = D / 2
#   cos_sin [P, D]:  | c0 .. cC-1  s0 .. sC-1 |  one row a token, shared by its heads
#
# Bytes: 2 * T * H * D * itemsize + 4 * T * D. A program takes some heads of one token, so that
# the row of cosines is loaded once for all of them.
@triton_jit
def _norm_rope_kernel(
    q_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    position_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_qd: tl.tensor,
    stride_p: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_HALF)
    inside_c = c < HALF
    inside = (h < NUM_HEADS)[:, None] & inside_c[None, :]
    base = q_ptr + t * stride_qt + h.to(tl.int64)[:, None] * stride_qh
    c_64 = c.to(tl.int64)[None, :]
    a = tl.load(base + c_64 * stride_qd, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + (c_64 + HALF) * stride_qd, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
        inverse = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        weight_a = tl.load(weight_ptr + c, mask=inside_c, other=0.0).to(tl.float32)
        weight_b = tl.load(weight_ptr + HALF + c, mask=inside_c, other=0.0).to(tl.float32)
        a = a * inverse * weight_a[None, :]
        b = b * inverse * weight_b[None, :]
    position = tl.load(position_ptr + t * stride_p).to(tl.int64)
    row = cos_sin_ptr + position * (2 * HALF) + c
    cos = tl.load(row, mask=inside_c, other=0.0)[None, :]
    sin = tl.load(row + HALF, mask=inside_c, other=0.0)[None, :]
    out = out_ptr + (t * NUM_HEADS + h.to(tl.int64)[:, None]) * (2 * HALF) + c[None, :]
    tl.store(out, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=inside)
