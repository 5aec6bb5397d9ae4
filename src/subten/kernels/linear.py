"""x @ W.T with what stands around it in a layer: norm before, bias and residual after.

Letters: T tokens, N output features, K inputs, R rows of a chunk of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.device import block_shared_bytes
from subten.kernels.cpu_linear import cpu_linear
from subten.kernels.norm_rope import rms_norm, rms_norm_torch
from subten.kernels.triton_shim import launcher, tl, triton, triton_jit
from subten.kernels.weight_formats import (
    WEIGHT_FORMATS,
    Index,
    Weight,
    chunk_rows,
    load_scale,
    row_offset,
)

MAX_ONE_LAUNCH = 16
"""Tokens up to which `linear` is one launch: the rows that a tensor core takes anyway. The same
tiles serve 1 and 16, so that a token's bits do not depend on how many others there are."""


def linear(
    x_TK: torch.Tensor,
    weight: Weight,
    *,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """residual + bias + h @ W.T with h = RMSNorm(x) * norm_weight, or x where no weight is given.

    x [T, K] of `weight.dtype`, or bfloat16 or float32 where it is normed; h is rounded to
    `weight.dtype`, sums are FP32; residual [T, N] bfloat16 or float32. Returns a new contiguous
    [T, N] of `out_dtype`: by default the residual's, else `weight.dtype`. One launch for up to
    MAX_ONE_LAUNCH tokens; for more, the norm, and products with chunks of the weight in its dtype.
    """
    num_tokens, num_in = x_TK.shape
    num_out = weight.shape[0]
    assert weight.shape == (num_out, num_in), (weight.shape, num_in)
    assert norm_weight_K is not None or x_TK.dtype == weight.dtype, (x_TK.dtype, weight.dtype)
    assert weight.dtype in (torch.bfloat16, torch.float32), weight.dtype
    assert norm_weight_K is None or norm_weight_K.shape == (num_in,), norm_weight_K
    assert bias_N is None or (bias_N.shape == (num_out,) and bias_N.is_contiguous()), bias_N
    if residual_TN is not None:
        assert residual_TN.shape == (num_tokens, num_out), (residual_TN.shape, num_tokens, num_out)
    if out_dtype is None:
        out_dtype = weight.dtype if residual_TN is None else residual_TN.dtype
    out_TN = torch.empty(num_tokens, num_out, dtype=out_dtype, device=x_TK.device)
    if num_tokens == 0:
        return out_TN
    if num_tokens <= MAX_ONE_LAUNCH:
        _one_launch(x_TK, weight, out_TN, bias_N, norm_weight_K, eps, residual_TN)
        return out_TN
    h_TK = x_TK if norm_weight_K is None else rms_norm(x_TK, norm_weight_K, eps=eps)
    step = num_out if weight.scale is None else chunk_rows(num_in, x_TK.device)
    for first in range(0, num_out, step):
        rows = slice(first, min(first + step, num_out))
        y_TR = _product(h_TK, _unpacked(weight, rows), out_dtype)
        for part in (bias_N, residual_TN):
            if part is not None:
                # In place where that is no other rounding: each copy costs what the norm does.
                add = y_TR.add_ if y_TR.dtype == out_dtype else y_TR.add
                y_TR = add(part[..., rows])
        if step >= num_out and y_TR.dtype == out_dtype:
            return y_TR
        out_TN[:, rows] = y_TR
    return out_TN


def linear_torch(
    x_TK: torch.Tensor,
    weight: Weight,
    *,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `linear`; `none` follows the CPU policy of `cpu_linear`, rounding y to its dtype."""
    h_TK = x_TK if norm_weight_K is None else rms_norm_torch(x_TK, norm_weight_K, eps=eps)
    y_TN = product_torch(h_TK, weight, bias_N=bias_N)
    if residual_TN is not None:
        y_TN = residual_TN + y_TN
        out_dtype = residual_TN.dtype if out_dtype is None else out_dtype
    return y_TN.to(weight.dtype if out_dtype is None else out_dtype)


def product_torch(
    h_TK: torch.Tensor, weight: Weight, index: Index = (), *, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """h @ W[index].T + bias, `index` choosing one matrix: h's dtype for `none`, else float32.

    A quantised weight is unpacked to float32 a chunk of rows at a time, so that it stays in cache.
    """
    if weight.scale is None:
        return cpu_linear(h_TK, weight.codes[index] if index else weight.codes, bias_N)
    num_out, num_in = weight.shape[-2:]
    wide_TK = h_TK.float()
    y_TN = torch.empty(h_TK.shape[0], num_out, dtype=torch.float32, device=h_TK.device)
    step = chunk_rows(num_in, h_TK.device)
    for first in range(0, num_out, step):
        rows = slice(first, min(first + step, num_out))
        torch.mm(wide_TK, weight.dequantize((*index, rows)).T, out=y_TN[:, rows])
    return y_TN if bias_N is None else y_TN + bias_N.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class _LinearLaunch:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _choose_linear(weight: Weight, x_itemsize: int, shared_bytes: int) -> _LinearLaunch:
    """Tiles of the one launch; every number here is a first guess, to be measured.

    Few rows a program, so that small matrices still have a program for each multiprocessor; a tile
    of inputs never spans two scales. Of the stages one is being used, not fetched: the room that
    this leaves in `shared_bytes` holds the normed tile.
    """
    num_out, num_in = weight.shape
    block_n = 16 if num_out <= 8192 else 32
    longest = 256 if weight.dtype == torch.bfloat16 else 64
    block_k = min(longest, max(16, triton.next_power_of_2(num_in)))
    if weight.format == "int4":
        block_k = min(block_k, weight.group)
    row_bytes = weight.codes.shape[-1] * weight.codes.itemsize * block_k // num_in
    stage_bytes = MAX_ONE_LAUNCH * block_k * x_itemsize + block_n * row_bytes
    num_stages = max(1, min(4, shared_bytes // stage_bytes))
    return _LinearLaunch(block_n=block_n, block_k=block_k, num_warps=4, num_stages=num_stages)


def _one_launch(
    x_TK: torch.Tensor,
    weight: Weight,
    out_TN: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TN: torch.Tensor | None,
) -> None:
    num_out, num_in = weight.shape
    launch = _choose_linear(weight, x_TK.itemsize, block_shared_bytes(x_TK.device))
    codes = weight.storage
    grid = (triton.cdiv(num_out, launch.block_n),)
    launcher(_linear_kernel, grid, "linear", weight.format)(
        x_TK,
        x_TK if norm_weight_K is None else norm_weight_K,
        codes,
        codes if weight.scale is None else weight.scale,
        x_TK if bias_N is None else bias_N,
        x_TK if residual_TN is None else residual_TN,
        out_TN,
        eps,
        x_TK.shape[0],
        *x_TK.stride(),
        1 if norm_weight_K is None else norm_weight_K.stride(0),
        *codes.stride(),
        *((0, 0) if residual_TN is None else residual_TN.stride()),
        N=num_out,
        K=num_in,
        GROUP=weight.group,
        LOAD_CODES=WEIGHT_FORMATS[weight.format].loader(x_TK.device),
        HAS_NORM=norm_weight_K is not None,
        HAS_BIAS=bias_N is not None,
        HAS_RESIDUAL=residual_TN is not None,
        IS_NARROW=weight.dtype == torch.float32,
        # The interpreter, the only one to run this on a CPU, multiplies the bits of bfloat16.
        WIDEN=x_TK.device.type == "cpu",
        BLOCK_T=MAX_ONE_LAUNCH,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _product(h_TK: torch.Tensor, w_RK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """h @ w.T of one dtype; FP32 sums leave as they are where FP32 is what will be stored."""
    if h_TK.is_cuda and h_TK.dtype == torch.bfloat16 and out_dtype == torch.float32:
        return torch.mm(h_TK, w_RK.T, out_dtype=torch.float32)
    return cpu_linear(h_TK, w_RK)


def _unpacked(weight: Weight, rows: slice) -> torch.Tensor:
    """Rows of the weight in its dtype: a view for `none`, else one launch into a new tensor."""
    if weight.scale is None:
        return weight.codes[rows]
    shape = (rows.stop - rows.start, weight.in_features)
    w_RK = torch.empty(shape, dtype=weight.dtype, device=weight.codes.device)
    unpack_rows(weight, rows, w_RK)
    return w_RK


def unpack_rows(
    weight: Weight,
    rows: slice,
    w_RK: torch.Tensor,
    *,
    block_r: int = 16,
    most_programs: int | None = None,
) -> None:
    """Write rows of a quantised weight, in its dtype, to `w_RK`; one launch.

    A program takes tiles of `block_r` rows; of `most_programs` at most each takes several.
    """
    assert weight.scale is not None, weight.format
    codes_RB, scale_RG = weight.storage[rows], weight.scale[rows]
    num_rows, num_in = w_RK.shape
    # 16 bytes a thread for 16 rows; a tile of int4 lies within a group.
    block_k = 128 if weight.format == "fp8" else weight.group
    num_tiles = triton.cdiv(num_rows, block_r) * triton.cdiv(num_in, block_k)
    _unpack_kernel[(min(num_tiles, most_programs or num_tiles),)](
        codes_RB,
        scale_RG,
        w_RK,
        num_rows,
        *codes_RB.stride(),
        K=num_in,
        GROUP=weight.group,
        LOAD_CODES=WEIGHT_FORMATS[weight.format].loader(codes_RB.device),
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
    )


# out = residual + bias + h @ W.T for up to BLOCK_T tokens, h = x * norm / rms(x) rounded to the
# dtype of the layer.
#
#   W [N, K]:  | row n: K codes |  a program takes BLOCK_N rows, BLOCK_K inputs at a time, decodes
#   them in registers and gives them to the tensor cores; x is small and comes from L2.
#
# Bytes: those of W and its scales once, T * K of x for each program (twice where it is normed),
# T * N out. BLOCK_T is 16 whatever T is: the tensor cores take no fewer, and a token's sums are the
# same in any company. Scales meet the sums of their group, not each weight: codes are exact in
# bfloat16, and a tile has far fewer sums than weights.
@triton_jit
def _linear_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    num_tokens: tl.tensor,
    stride_xt: tl.tensor,
    stride_xk: tl.tensor,
    stride_w: tl.tensor,
    stride_n: tl.tensor,
    stride_k: tl.tensor,
    stride_rt: tl.tensor,
    stride_rn: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    LOAD_CODES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_NARROW: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tl.static_assert(GROUP == 0 or GROUP == K or GROUP % BLOCK_K == 0)
    t = tl.arange(0, BLOCK_T)
    inside_t = t < num_tokens
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < N
    x_row = x_ptr + row_offset(t, stride_xt)[:, None]
    codes_row = row_offset(n, stride_n)
    inverse_T = tl.full([BLOCK_T], 1.0, tl.float32)
    if HAS_NORM:
        square_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            inside = inside_t[:, None] & (k < K)[None, :]
            x = tl.load(x_row + row_offset(k, stride_xk)[None, :], mask=inside, other=0.0)
            square_TK += x.to(tl.float32) * x.to(tl.float32)
        inverse_T = 1.0 / tl.sqrt_rn(tl.sum(square_TK, axis=1) / K + eps)
    y_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = inside_t[:, None] & (k < K)[None, :]
        h = tl.load(x_row + row_offset(k, stride_xk)[None, :], mask=inside, other=0.0)
        if HAS_NORM:
            norm = tl.load(norm_ptr + row_offset(k, stride_w), mask=k < K, other=0.0)
            h = h.to(tl.float32) * inverse_T[:, None] * norm.to(tl.float32)[None, :]
        if not IS_NARROW:
            h = h.to(tl.bfloat16)
        codes_NK = LOAD_CODES(codes_ptr, codes_row, first, inside_n, stride_k, K, BLOCK_K)
        if WIDEN:
            h, codes_NK = h.to(tl.float32), codes_NK.to(tl.float32)
        codes_KN = tl.trans(codes_NK.to(h.dtype))
        if GROUP > 0 and GROUP < K:
            scale_N = load_scale(scale_ptr, n, first, inside_n, K, GROUP)
            y_TN += tl.dot(h, codes_KN, input_precision="ieee") * scale_N[None, :]
        else:
            y_TN = tl.dot(h, codes_KN, acc=y_TN, input_precision="ieee")
    if GROUP == K:
        y_TN *= load_scale(scale_ptr, n, 0, inside_n, K, GROUP)[None, :]
    if HAS_BIAS:
        y_TN += tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    inside = inside_t[:, None] & inside_n[None, :]
    if HAS_RESIDUAL:
        at = row_offset(t, stride_rt)[:, None] + row_offset(n, stride_rn)[None, :]
        y_TN += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + row_offset(t, N)[:, None] + n[None, :]
    tl.store(out_at, y_TN.to(out_ptr.dtype.element_ty), mask=inside)


# w = code * scale, rounded to the dtype of the layer. Reads the packed bytes, writes R * K numbers;
# a program takes one tile after another.
@triton_jit
def _unpack_kernel(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    num_rows: tl.tensor,
    stride_r: tl.tensor,
    stride_k: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    LOAD_CODES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tiles_k = tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_R) * tiles_k, tl.num_programs(0)):
        r = tile // tiles_k * BLOCK_R + tl.arange(0, BLOCK_R)
        first = tile % tiles_k * BLOCK_K
        inside = r < num_rows
        row = row_offset(r, stride_r)
        codes_RK = LOAD_CODES(codes_ptr, row, first, inside, stride_k, K, BLOCK_K)
        w_RK = codes_RK * load_scale(scale_ptr, r, first, inside, K, GROUP)[:, None]
        k = first + tl.arange(0, BLOCK_K)
        at = w_ptr + row_offset(r, K)[:, None] + k[None, :]
        tl.store(at, w_RK.to(w_ptr.dtype.element_ty), mask=inside[:, None] & (k < K)[None, :])
