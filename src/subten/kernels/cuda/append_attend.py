"""`append_attend` on CUDA: one launch for decode steps of single tokens.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages of the pool (in
`pages_PGB`) or positions of the rotary table (in `cos_sin_PD`), B bytes of a page.
"""

from __future__ import annotations

import ctypes

import torch

from subten.codecs import KVFormat
from subten.kernels.attend import check_attend
from subten.kernels.cuda import attend as cuda_attend
from subten.kernels.cuda import kv_append as cuda_append
from subten.kernels.cuda import runtime
from subten.kernels.cuda.attend import STRUCTS, DecodePlan, decode_launch
from subten.kernels.cuda.kv_append import ENCODERS
from subten.kernels.kv_append import check_append, check_rotation, rotation_stages
from subten.kernels.step import StepTensors


def append_attend(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    cos_sin_PD: torch.Tensor,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor | None = None,
    q_norm_weight_D: torch.Tensor | None = None,
    k_norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    key_bias_GD: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """`subten.kernels.append_attend.append_attend` in one CUDA launch, for steps of single tokens.

    It takes what `kv_append` and `attend` of this package both take, without a key bias; the rest
    goes to those, each of which may hand it on to Triton. Pages and result are those of the two,
    bit for bit. `plan` and `pdl` are for measuring; their conditions, and that on counters, are
    those of `attend`.

    With `pdl` only q, k and v may come from kernels that still run when this one starts: the step's
    integers, `cos_sin_PD`, the norm weights and all rows of pages but each sequence's newest must
    be in place since before the last launch without it.
    """
    norm_weights = (k_norm_weight_D, q_norm_weight_D)
    is_one = key_bias_GD is None and suits(q_THD, k_TGD, v_TGD, pages_PGB, fmt, step, norm_weights)
    if not is_one:
        turned_THD = cuda_append.kv_append(
            k_TGD,
            v_TGD,
            pages_PGB,
            fmt,
            cos_sin_PD,
            step.position_T,
            step.slot_T,
            rotation_DD=rotation_DD,
            norm_weight_D=k_norm_weight_D,
            eps=eps,
            q_THD=q_THD,
            q_norm_weight_D=q_norm_weight_D,
            pdl=pdl,
        )
        assert turned_THD is not None
        return cuda_attend.attend(
            turned_THD,
            pages_PGB,
            fmt,
            step,
            scale=scale,
            rotation_DD=rotation_DD,
            key_bias_GD=key_bias_GD,
            cos_sin_PD=cos_sin_PD,
            plan=plan,
            pdl=pdl,
        )
    check_append(k_TGD, v_TGD, pages_PGB, fmt, cos_sin_PD, step.position_T, step.slot_T, q_THD)
    num_kv_heads = check_attend(q_THD, pages_PGB, fmt, step)
    check_rotation(rotation_DD, fmt)
    rotation_stages(rotation_DD)
    for weight_D in (q_norm_weight_D, k_norm_weight_D):
        if weight_D is not None:
            assert weight_D.shape == (fmt.head_dim,), (weight_D.shape, fmt.head_dim)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    launch = decode_launch(q_THD, num_kv_heads, fmt, step, scale=scale, plan=plan)
    is_bf16 = any(
        weight_D is not None and weight_D.dtype == torch.bfloat16
        for weight_D in (q_norm_weight_D, k_norm_weight_D)
    )
    runtime.launch(
        "append_attend.cu",
        kernel_name(fmt, polls=launch.polls),
        launch.grid,
        launch.num_threads,
        (
            *_rows(q_THD),
            *_rows(k_TGD),
            *_rows(v_TGD),
            *_rows(pages_PGB),
            step.page_table_SP,
            ctypes.c_int64(step.page_table_SP.stride(0)),
            step.position_T,
            step.slot_T,
            step.kv_len_S,
            step.tile_seq_Q,
            step.tile_start_Q,
            cos_sin_PD,
            ctypes.c_int64(cos_sin_PD.stride(0)),
            q_norm_weight_D,
            k_norm_weight_D,
            int(is_bf16),
            float(eps),
            out_THD,
            *launch.last_arguments,
        ),
        device=q_THD.device,
        shared_bytes=launch.shared_bytes,
        pdl=pdl,
    )
    return out_THD


def kernel_name(fmt: KVFormat, *, polls: bool) -> str:
    """The kernel of append_attend.cu for a format, and how its splits merge."""
    arguments = (
        STRUCTS[fmt.codec.name],
        ENCODERS[fmt.codec.name],
        fmt.head_dim,
        str(polls).lower(),
    )
    return f"append_attend_kernel<{', '.join(map(str, arguments))}>"


def suits(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    step: StepTensors,
    norm_weights: tuple[torch.Tensor | None, torch.Tensor | None],
) -> bool:
    """Whether one launch does it; every token then has a tile of its own."""
    return (
        len(step.tile_seq_Q) == len(q_THD)
        and cuda_attend.suits(q_THD, pages_PGB, fmt, step)
        and cuda_append.suits(k_TGD, v_TGD, pages_PGB, fmt, norm_weights[0], q_THD, norm_weights[1])
    )


def _rows(tensor: torch.Tensor) -> tuple[torch.Tensor, ctypes.c_int64, ctypes.c_int64]:
    """A tensor and the strides of its first two dimensions."""
    return tensor, ctypes.c_int64(tensor.stride(0)), ctypes.c_int64(tensor.stride(1))
