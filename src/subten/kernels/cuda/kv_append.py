"""`kv_append` on CUDA for steps of 1 to 64 tokens: a warp a row, keys, values and queries at once.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages of the pool (in
`pages_PGB`) or positions of the rotary table (in `cos_sin_PD`), B bytes of a page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from subten.codecs import KVFormat
from subten.kernels import kv_append as triton_append
from subten.kernels.cuda import runtime
from subten.kernels.kv_append import check_rotation, rotation_stages

ENCODERS: Mapping[str, str] = {
    "bf16": "Bf16Encoder",
    "fp8": "Fp8Encoder",
    "int8": "IntEncoder<8>",
    "int4": "IntEncoder<4>",
    "int2": "Int2Encoder",
    "fp4": "Fp4Encoder",
    "fp4_mx": "Fp4MxEncoder",
}
"""Codec to its struct in `kv_encoders.cuh`; other codecs go to Triton."""

HEAD_DIMS = (64, 128, 256)

MAX_TOKENS = 64

VALUE_TYPES: Mapping[torch.dtype, str] = {torch.bfloat16: "u16", torch.float32: "float"}


def kv_append(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    cos_sin_PD: torch.Tensor,
    position_T: torch.Tensor,
    slot_T: torch.Tensor,
    *,
    rotation_DD: torch.Tensor | None = None,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    q_THD: torch.Tensor | None = None,
    q_norm_weight_D: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor | None:
    """`subten.kernels.kv_append.kv_append` in one CUDA launch, for 1 to 64 tokens.

    Codecs, head dims, dtypes and strides that the kernel does not take go to Triton. With `pdl`
    (programmatic dependent launch) the kernel reads `cos_sin_PD`, `position_T`, `slot_T` and the
    norm weights before earlier kernels of the stream have ended: they must be in place since
    before the last launch without it. Bytes do not depend on which tokens share the step.
    """
    if not suits(k_TGD, v_TGD, pages_PGB, fmt, norm_weight_D, q_THD, q_norm_weight_D):
        return triton_append.kv_append(
            k_TGD,
            v_TGD,
            pages_PGB,
            fmt,
            cos_sin_PD,
            position_T,
            slot_T,
            rotation_DD=rotation_DD,
            norm_weight_D=norm_weight_D,
            eps=eps,
            q_THD=q_THD,
            q_norm_weight_D=q_norm_weight_D,
        )
    triton_append.check_append(k_TGD, v_TGD, pages_PGB, fmt, cos_sin_PD, position_T, slot_T, q_THD)
    check_rotation(rotation_DD, fmt)
    rotation_stages(rotation_DD)
    k_planes = (fmt.k_codes, fmt.k_scale, fmt.k_zero)
    v_planes = (fmt.v_codes, fmt.v_scale, fmt.v_zero)
    assert v_planes == tuple(at + fmt.v_codes for at in k_planes), (k_planes, v_planes)
    num_tokens, num_kv_heads, head_dim = k_TGD.shape
    for weight_D in (norm_weight_D, q_norm_weight_D):
        if weight_D is not None:
            assert weight_D.shape == (head_dim,), (weight_D.shape, head_dim)
    out_THD, num_heads = None, 0
    if q_THD is not None:
        num_heads = q_THD.shape[1]
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    runtime.launch(
        "kv_append.cu",
        f"kv_append_kernel<{ENCODERS[fmt.codec.name]}, {head_dim}, {VALUE_TYPES[k_TGD.dtype]}>",
        (2 * num_kv_heads + num_heads, num_tokens),
        32,
        (
            q_THD,
            *_token_and_head_stride(k_TGD if q_THD is None else q_THD),
            out_THD,
            k_TGD,
            *_token_and_head_stride(k_TGD),
            v_TGD,
            *_token_and_head_stride(v_TGD),
            pages_PGB,
            *_token_and_head_stride(pages_PGB),
            cos_sin_PD,
            ctypes.c_int64(cos_sin_PD.stride(0)),
            position_T,
            slot_T,
            norm_weight_D,
            q_norm_weight_D,
            int(torch.bfloat16 in _norm_dtypes(norm_weight_D, q_norm_weight_D)),
            float(eps),
            num_heads,
            num_kv_heads,
            fmt.v_codes,
            fmt.k_scale,
            fmt.k_zero,
        ),
        device=k_TGD.device,
        pdl=pdl,
    )
    return out_THD


def suits(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    norm_weight_D: torch.Tensor | None,
    q_THD: torch.Tensor | None,
    q_norm_weight_D: torch.Tensor | None,
) -> bool:
    """Whether the kernel takes this call."""
    rows = [x_THD for x_THD in (k_TGD, v_TGD, q_THD) if x_THD is not None]
    norm_dtypes = _norm_dtypes(norm_weight_D, q_norm_weight_D)
    return (
        1 <= k_TGD.shape[0] <= MAX_TOKENS
        and fmt.codec.name in ENCODERS
        and fmt.head_dim in HEAD_DIMS
        and k_TGD.dtype in VALUE_TYPES
        and all(_has_pairs(x_THD) for x_THD in rows)
        and len(norm_dtypes) <= 1
        and norm_dtypes <= VALUE_TYPES.keys()
        and all(
            weight_D is None or (weight_D.stride(0) == 1 and weight_D.data_ptr() % 4 == 0)
            for weight_D in (norm_weight_D, q_norm_weight_D)
        )
        # Of a page, the codes of one lane are stored as one word.
        and pages_PGB.data_ptr() % 4 == 0
        and pages_PGB.stride(0) % 4 == 0
        and pages_PGB.stride(1) % 4 == 0
    )


def _has_pairs(x_THD: torch.Tensor) -> bool:
    """Whether the kernel reads the heads: channels adjacent, two bfloat16 as one word."""
    strides = [x_THD.stride(i) * x_THD.element_size() for i in range(2)]
    return (
        x_THD.stride(2) == 1
        and x_THD.data_ptr() % 4 == 0
        and all(stride % 4 == 0 for stride in strides)
    )


def _norm_dtypes(*weights: torch.Tensor | None) -> set[torch.dtype]:
    return {weight_D.dtype for weight_D in weights if weight_D is not None}


def _token_and_head_stride(tensor: torch.Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(tensor.stride(0)), ctypes.c_int64(tensor.stride(1))
