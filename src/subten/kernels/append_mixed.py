"""`append_mixed`: encode and store keys and values of a step, in planes and as exact rows.

Letters: T tokens of the step, G KV heads, D head_dim, E 2D, S sequences, B bytes of a row, O
outlier channels, N rows of a tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from subten.codecs.bits import nan_where, store_bf16
from subten.codecs.fixed_point import round_bf16_device
from subten.codecs.mixed import MixedFormat
from subten.codecs.nested import device_store_nested, encode_nested
from subten.codecs.norm_byte import norm_table
from subten.codecs.shaped import device_store_shaped, encode_shaped, outliers_of
from subten.core import PAGE_SIZE
from subten.kernels.kv_append import rotate_rows, rotation_stages
from subten.kernels.mixed_pages import MixedPages, Window
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import tl, triton, triton_jit


def append_mixed(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    *,
    rotation_DD: torch.Tensor,
    feedback_GDD: torch.Tensor | None = None,
    bad_T: torch.Tensor | None = None,
) -> None:
    """Write each token's K and V; one launch, in place, deterministic.

    `k_TGD` float32 are keys in the basis in which they are stored, `v_TGD` float32 or bf16 values
    that are still to be rotated; any strides. Where `step.slot_T` (page id * 64 + row, distinct) is
    not -1: keys are encoded with `feedback_GDD` float32 (codecs/shaped.py) into the page's plane,
    outlier channels beside them, values into its base and fine planes (codecs/nested.py), not into
    those of id -1; and rows of positions below S into the page's sink plane, if it has one. Where
    `window.row_T` is not -1: both rows go to that row of `pages.recent_NGE`.

    A token whose rows are not finite, or have a norm above the range of a byte, gets 1 in `bad_T`
    int32: what is then in planes means nothing. Others are left as they are.

    `rotation_DD` must be `codecs.rotation.hadamard(D)`: the kernel runs its butterfly. All in FP32.
    Wrong dtypes, devices, shapes or strides fail an assert.
    """
    check_append_mixed(k_TGD, v_TGD, pages, fmt, step, window, rotation_DD, feedback_GDD, bad_T)
    num_tokens, num_kv_heads, head_dim = k_TGD.shape
    if num_tokens == 0:
        return
    plan = APPEND_MIXED_PLANS[num_tokens > FEW_TOKENS]
    some = k_TGD  # in place of a pointer that is not used
    sink_XGB = pages.k_PGB if pages.sink_XGB is None else pages.sink_XGB
    k_out_PGB = pages.k_PGB if pages.k_out_PGB is None else pages.k_out_PGB
    _append_mixed_kernel[(triton.cdiv(num_tokens, plan.block_tokens), 2 * num_kv_heads)](
        k_TGD,
        *k_TGD.stride(),
        v_TGD,
        *v_TGD.stride(),
        num_tokens,
        step.position_T,
        step.slot_T,
        window.row_T,
        pages.place_P3,
        pages.k_PGB,
        *pages.k_PGB.stride()[:2],
        pages.vbase_XGB,
        *pages.vbase_XGB.stride()[:2],
        pages.vfine_YGB,
        *pages.vfine_YGB.stride()[:2],
        pages.recent_NGE,
        *pages.recent_NGE.stride()[:2],
        sink_XGB,
        *sink_XGB.stride()[:2],
        some if pages.sink_P is None else pages.sink_P,
        k_out_PGB,
        *k_out_PGB.stride()[:2],
        some if pages.outlier_GO is None else pages.outlier_GO,
        some if feedback_GDD is None else feedback_GDD,
        some if bad_T is None else bad_T,
        norm_table(k_TGD.device),
        NUM_KV_HEADS=num_kv_heads,
        BITS=pages.k_bits,
        NUM_SINKS=pages.num_sinks(fmt),
        NUM_OUTLIERS=pages.num_outliers,
        HAS_FEEDBACK=feedback_GDD is not None,
        HAS_BAD=bad_T is not None,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_N=plan.block_tokens,
        PAGE=PAGE_SIZE,
        STAGES=rotation_stages(rotation_DD),
        num_warps=plan.num_warps,
        enable_fp_fusion=False,
    )


def append_mixed_torch(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    *,
    rotation_DD: torch.Tensor,
    feedback_GDD: torch.Tensor | None = None,
    bad_T: torch.Tensor | None = None,
) -> None:
    """Twin of `append_mixed`, and the CPU backend; any orthogonal `rotation_DD`."""
    check_append_mixed(k_TGD, v_TGD, pages, fmt, step, window, rotation_DD, feedback_GDD, bad_T)
    x_TGE = torch.cat([k_TGD, v_TGD.float() @ rotation_DD], dim=-1)
    exact_TGE = x_TGE.bfloat16()
    row_T, (kept_TGE,) = _kept(window.row_T, exact_TGE)
    pages.recent_NGE[row_T] = kept_TGE
    slot_T, (x_TGE, exact_TGE, position_T) = _kept(step.slot_T, x_TGE, exact_TGE, step.position_T)
    page_T, row_T = slot_T // PAGE_SIZE, slot_T % PAGE_SIZE
    base_T, fine_T, _ = pages.place_P3[page_T].unbind(1)
    k_TGD, v_TGD = (x_TGD.contiguous() for x_TGD in x_TGE.chunk(2, dim=-1))

    low, high, norm, is_bad_TG = encode_shaped(
        k_TGD, bits=pages.k_bits, feedback_GDD=feedback_GDD, outlier_GO=pages.outlier_GO
    )
    _put(pages.k_PGB, page_T, row_T, low, high, norm[..., None])
    if pages.k_out_PGB is not None and pages.outlier_GO is not None:
        out_TGO = outliers_of(k_TGD, pages.outlier_GO).bfloat16()
        _put(pages.k_out_PGB, page_T, row_T, out_TGO.view(torch.uint8))
    codes, fine, norm, is_bad_v_TG = encode_nested(v_TGD)
    _put(pages.vbase_XGB, base_T, row_T, codes, norm[..., None])
    _put(pages.vfine_YGB, fine_T, row_T, fine)
    if bad_T is not None:
        is_bad_T = (is_bad_TG | is_bad_v_TG).any(1).to(bad_T.dtype)
        bad_T |= torch.zeros_like(bad_T).masked_scatter_(step.slot_T >= 0, is_bad_T)
    num_sinks = pages.num_sinks(fmt)
    if pages.sink_XGB is not None and pages.sink_P is not None:
        first_T = torch.where(position_T < num_sinks, position_T, -1)
        first_T, (exact_TGE, page_T) = _kept(first_T, exact_TGE, page_T)
        if len(first_T):
            k_TGB, v_TGB = exact_TGE.view(torch.uint8).chunk(2, dim=-1)
            _put(pages.sink_XGB, pages.sink_P[page_T], first_T, k_TGB, v_TGB, num_rows=num_sinks)


def _kept(
    index_T: torch.Tensor, *rows: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Indices of at least 0, int64, and the rows that go with them."""
    is_kept_T = index_T >= 0
    if not is_kept_T.all():
        index_T, rows = index_T[is_kept_T], tuple(x_T[is_kept_T] for x_T in rows)
    return index_T.long(), rows


def _put(
    pool_PGB: torch.Tensor,
    plane_T: torch.Tensor,
    row_T: torch.Tensor,
    *parts: torch.Tensor,
    num_rows: int = PAGE_SIZE,
) -> None:
    """Put rows [T, G, bytes] into planes that have these parts one after another; none into -1."""
    widths = tuple(part_TGB.shape[-1] for part_TGB in parts)
    part_TGB = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    plane_T, (row_T, part_TGB) = _kept(plane_T, row_T, part_TGB)
    start_B, width_B = _byte_places(widths, num_rows, row_T.device)
    byte_TB = start_B + row_T[:, None] * width_B
    pool_PGB[plane_T[:, None], :, byte_TB] = part_TGB.transpose(1, 2)


@functools.cache
def _byte_places(
    widths: tuple[int, ...], num_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each byte of row 0 is, and how far on that of the next row; int64 [bytes of a row]."""
    with torch.inference_mode(False):
        start, starts, steps = 0, [], []
        for width in widths:
            starts += list(range(start, start + width))
            steps += [width] * width
            start += num_rows * width
        return torch.tensor(starts, device=device), torch.tensor(steps, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendMixedPlan:
    """Launch choice of `append_mixed`."""

    block_tokens: int
    num_warps: int


FEW_TOKENS = 64
"""Up to so many tokens each row has a warp for itself."""

APPEND_MIXED_PLANS = (
    AppendMixedPlan(block_tokens=1, num_warps=1),
    AppendMixedPlan(block_tokens=4, num_warps=1),
)
"""For few tokens and for many. Bytes of a row do not depend on it: its sums are exact or ordered.
One warp: the chain over channels is a warp's, and no step of it waits for another."""


def check_append_mixed(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    rotation_DD: torch.Tensor,
    feedback_GDD: torch.Tensor | None,
    bad_T: torch.Tensor | None,
) -> None:
    """Assert what every backend of `append_mixed` takes."""
    num_tokens, num_kv_heads, head_dim = k_TGD.shape
    pages.check(fmt)
    window.check(num_tokens, len(step.kv_len_S), k_TGD.device)
    assert (num_kv_heads, head_dim) == (pages.num_kv_heads, fmt.head_dim), k_TGD.shape
    assert v_TGD.shape == k_TGD.shape, (v_TGD.shape, k_TGD.shape)
    assert k_TGD.dtype == torch.float32, k_TGD.dtype
    assert v_TGD.dtype in (torch.bfloat16, torch.float32), v_TGD.dtype
    assert rotation_DD.shape == (head_dim, head_dim), rotation_DD.shape
    assert rotation_DD.dtype == torch.float32, rotation_DD.dtype
    for name, index_T in (("position_T", step.position_T), ("slot_T", step.slot_T)):
        assert index_T.dtype == torch.int64, (name, index_T.dtype)
        assert index_T.shape == (num_tokens,), (name, index_T.shape, num_tokens)
        assert index_T.is_contiguous(), (name, index_T.stride())
    if feedback_GDD is not None:
        shape = (num_kv_heads, head_dim, head_dim)
        assert feedback_GDD.shape == shape, (feedback_GDD.shape, shape)
        assert feedback_GDD.dtype == torch.float32, feedback_GDD.dtype
        assert feedback_GDD.is_contiguous(), feedback_GDD.stride()
    if bad_T is not None:
        assert bad_T.shape == (num_tokens,), (bad_T.shape, num_tokens)
        assert bad_T.dtype == torch.int32, bad_T.dtype
        assert bad_T.is_contiguous(), bad_T.stride()
    optional = (feedback_GDD, bad_T)
    tensors = (k_TGD, v_TGD, pages.k_PGB, rotation_DD, step.slot_T, *optional)
    devices = {tensor.device for tensor in tensors if tensor is not None}
    assert len(devices) == 1, devices


# A program takes BLOCK_N tokens of one head, K in the first half of the grid and V in the second.
# Bytes: 4 (K) + 2 or 4 (V) a channel read, 4 D^2 of feedback a program; written are the bytes of
# the planes and 4 D of exact rows. The chain over D channels makes the time of a decode step
# (shaped.py). Not yet measured on a GPU.
@triton_jit
def _append_mixed_kernel(
    k_ptr: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_g: tl.tensor,
    k_stride_d: tl.tensor,
    v_ptr: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_g: tl.tensor,
    v_stride_d: tl.tensor,
    num_tokens: tl.tensor,
    position_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    row_ptr: tl.tensor,
    place_ptr: tl.tensor,
    k_plane_ptr: tl.tensor,
    k_plane_stride: tl.tensor,
    k_plane_stride_g: tl.tensor,
    base_ptr: tl.tensor,
    base_stride: tl.tensor,
    base_stride_g: tl.tensor,
    fine_ptr: tl.tensor,
    fine_stride: tl.tensor,
    fine_stride_g: tl.tensor,
    recent_ptr: tl.tensor,
    recent_stride: tl.tensor,
    recent_stride_g: tl.tensor,
    sink_ptr: tl.tensor,
    sink_stride: tl.tensor,
    sink_stride_g: tl.tensor,
    sink_of_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    out_stride_g: tl.tensor,
    outlier_ptr: tl.tensor,
    feedback_ptr: tl.tensor,
    bad_ptr: tl.tensor,
    table_ptr: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_OUTLIERS: tl.constexpr,
    HAS_FEEDBACK: tl.constexpr,
    HAS_BAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    tl.static_assert(HEAD_DIM % 16 == 0 and BLOCK_D >= HEAD_DIM)
    QUARTER: tl.constexpr = HEAD_DIM // 4
    token_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token_N = token_N < num_tokens
    half = tl.program_id(1) // NUM_KV_HEADS
    head = (tl.program_id(1) % NUM_KV_HEADS).to(tl.int64)
    slot_N = tl.load(slot_ptr + token_N, mask=is_token_N, other=-1)
    recent_row_N = tl.load(row_ptr + token_N, mask=is_token_N, other=-1).to(tl.int64)
    mask_N, page_N, row_N = slot_N >= 0, slot_N // PAGE, (slot_N % PAGE).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    mask_ND = is_token_N[:, None] & (d < HEAD_DIM)[None, :]
    if half == 0:
        k_N = k_ptr + token_N * k_stride_t + head * k_stride_g
        x_ND = tl.load(k_N[:, None] + d[None, :] * k_stride_d, mask=mask_ND, other=0.0)
    else:
        v_N = v_ptr + token_N * v_stride_t + head * v_stride_g
        v_ND = tl.load(v_N[:, None] + d[None, :] * v_stride_d, mask=mask_ND, other=0.0)
        x_ND = rotate_rows(v_ND.to(tl.float32), STAGES)

    # As BF16 numbers: a cast would choose its own NaN.
    exact_ND = nan_where(x_ND != x_ND, round_bf16_device(x_ND))
    recent_N = recent_ptr.to(tl.pointer_type(tl.uint8)) + 2 * (
        recent_row_N * recent_stride + head * recent_stride_g + half * HEAD_DIM
    )
    exact_mask_ND = mask_ND & (recent_row_N >= 0)[:, None]
    store_bf16(recent_N[:, None], d[None, :], exact_ND, exact_mask_ND)
    if NUM_SINKS > 0:
        position_N = tl.load(position_ptr + token_N, mask=mask_N, other=NUM_SINKS)
        is_first_N = mask_N & (position_N < NUM_SINKS)
        plane_N = tl.load(sink_of_ptr + page_N, mask=is_first_N, other=-1).to(tl.int64)
        sink_N = sink_ptr + plane_N * sink_stride + head * sink_stride_g
        sink_N += (half * NUM_SINKS + position_N) * (2 * HEAD_DIM)
        store_bf16(sink_N[:, None], d[None, :], exact_ND, mask_ND & (plane_N >= 0)[:, None])

    if half == 0:
        is_out_D = d < 0
        if NUM_OUTLIERS > 0:
            out_N = out_ptr + page_N * out_stride + head * out_stride_g
            out_N += row_N * (2 * NUM_OUTLIERS)
            for which in tl.static_range(NUM_OUTLIERS):
                channel = tl.load(outlier_ptr + head * NUM_OUTLIERS + which)
                is_out_D = is_out_D | (d == channel)
                value_N = tl.sum(tl.where((d == channel)[None, :], exact_ND, 0.0), axis=1)
                store_bf16(out_N, which, value_N, mask_N)
        k_plane_N = k_plane_ptr + page_N * k_plane_stride + head * k_plane_stride_g
        is_bad_N = device_store_shaped(
            x_ND,
            k_plane_N + row_N * QUARTER,
            k_plane_N + PAGE * QUARTER + row_N * (HEAD_DIM * (BITS - 2) // 8),
            k_plane_N + PAGE * (HEAD_DIM * BITS // 8) + row_N,
            mask_N,
            is_out_D,
            tl.full([], HEAD_DIM - NUM_OUTLIERS, tl.int32),
            feedback_ptr + head * (HEAD_DIM * HEAD_DIM),
            table_ptr,
            BITS,
            HAS_FEEDBACK,
            NUM_OUTLIERS > 0,
            HEAD_DIM,
            BLOCK_D,
        )
    else:
        base_id_N = tl.load(place_ptr + page_N * 3, mask=mask_N, other=-1).to(tl.int64)
        fine_id_N = tl.load(place_ptr + page_N * 3 + 1, mask=mask_N, other=-1).to(tl.int64)
        base_N = base_ptr + base_id_N * base_stride + head * base_stride_g
        fine_N = fine_ptr + fine_id_N * fine_stride + head * fine_stride_g
        is_bad_N = device_store_nested(
            x_ND,
            base_N + row_N * QUARTER,
            fine_N + row_N * QUARTER,
            base_N + PAGE * QUARTER + row_N,
            base_id_N >= 0,
            fine_id_N >= 0,
            table_ptr,
            HEAD_DIM,
            BLOCK_D,
        )
    if HAS_BAD:
        # Programs of other heads may write the same 1.
        tl.store(bad_ptr + token_N, 1, mask=mask_N & is_bad_N)
