"""`kv_append`: turn, encode and store the keys and values of a step's tokens, once and for good.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages of the pool (in
`pages_PGB`) or positions of the rotary table (in `cos_sin_PD`), B bytes of a page, N rows of a tile
or a page (tokens).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from subten.codecs import KVCodec, KVFormat
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels.norm_rope import norm_rope_torch
from subten.kernels.triton_shim import tl, triton, triton_jit


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
) -> torch.Tensor | None:
    """Write each token's K and V into its page row, encoded; one launch, in place, deterministic.

    K: optional RMSNorm per head (`norm_weight_D`, `eps`), then rotary embedding (half-split pairs
    (i, i + D/2)) with row `position_T` of `cos_sin_PD` float32 [positions, D], cos then sin. Both:
    times `rotation_DD` if given, then `fmt.codec`. All of it in FP32.

    With `q_THD` the same launch turns the queries: the result is `norm_rope` of them with
    `q_norm_weight_D`, else None. Tokens that write nothing have their queries turned too.

    `k_TGD`, `v_TGD`, `q_THD` of one dtype, bf16 or float32, any strides; `pages_PGB` uint8
    [pages, G, fmt.page_bytes]; `position_T` int64; `slot_T` int64 page id * 64 + row, distinct, -1
    writes nothing.
    `rotation_DD` must be `codecs.rotation.hadamard(D)`: the kernel runs its butterfly instead of
    reading it. Wrong dtypes, devices, shapes or strides fail an assert.
    """
    check_append(k_TGD, v_TGD, pages_PGB, fmt, cos_sin_PD, position_T, slot_T, q_THD)
    check_rotation(rotation_DD, fmt)
    num_tokens, num_kv_heads, head_dim = k_TGD.shape
    for weight_D in (norm_weight_D, q_norm_weight_D):
        if weight_D is not None:
            assert weight_D.shape == (head_dim,), (weight_D.shape, head_dim)
            assert weight_D.is_contiguous(), weight_D.stride()
    out_THD, num_heads = None, 0
    if q_THD is not None:
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        num_heads = q_THD.shape[1]
    if num_tokens == 0:
        return out_THD
    plan = APPEND_PLAN
    some = cos_sin_PD  # in place of a pointer that is not used
    q_args = (some, 0, 0, 0, some) if q_THD is None else (q_THD, *q_THD.stride(), out_THD)
    _kv_append_kernel[(-(-num_tokens // plan.block_tokens), 2 * num_kv_heads + num_heads)](
        *q_args,
        k_TGD,
        *k_TGD.stride(),
        v_TGD,
        *v_TGD.stride(),
        pages_PGB,
        pages_PGB.stride(0),
        pages_PGB.stride(1),
        cos_sin_PD,
        cos_sin_PD.stride(0),
        position_T,
        slot_T,
        codec_tables(fmt.codec, pages_PGB),
        some if norm_weight_D is None else norm_weight_D,
        some if q_norm_weight_D is None else q_norm_weight_D,
        eps,
        num_tokens,
        ENCODE=fmt.codec.device_encode,
        K_CODES=fmt.k_codes,
        K_SCALE=fmt.k_scale,
        K_ZERO=fmt.k_zero,
        V_CODES=fmt.v_codes,
        V_SCALE=fmt.v_scale,
        V_ZERO=fmt.v_zero,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_N=plan.block_tokens,
        PAGE=PAGE_SIZE,
        HAS_NORM=norm_weight_D is not None,
        HAS_Q_NORM=q_norm_weight_D is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        STAGES=rotation_stages(rotation_DD),
        num_warps=plan.num_warps,
    )
    return out_THD


def kv_append_torch(
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
) -> torch.Tensor | None:
    """Twin of `kv_append`, and the CPU backend; any orthogonal `rotation_DD`."""
    check_append(k_TGD, v_TGD, pages_PGB, fmt, cos_sin_PD, position_T, slot_T, q_THD)
    check_rotation(rotation_DD, fmt)
    out_THD = None
    if q_THD is not None and norm_weight_D is None and q_norm_weight_D is None:
        # Both at once: on a CPU the calls cost more than the work.
        both = norm_rope_torch(torch.cat([q_THD, k_TGD], dim=1).float(), cos_sin_PD, position_T)
        out_THD, k_TGD = both.split([q_THD.shape[1], k_TGD.shape[1]], dim=1)
        out_THD = out_THD.to(q_THD.dtype).contiguous()
    else:
        k_TGD = norm_rope_torch(
            k_TGD.float(), cos_sin_PD, position_T, norm_weight_D=norm_weight_D, eps=eps
        )
        if q_THD is not None:
            out_THD = norm_rope_torch(
                q_THD, cos_sin_PD, position_T, norm_weight_D=q_norm_weight_D, eps=eps
            )
    x_T2GD = torch.stack([k_TGD, v_TGD.float()], dim=1)
    page: int | torch.Tensor
    row: int | torch.Tensor
    if len(slot_T) == 1 and slot_T.device.type == "cpu":
        # A slice with integers is several times as fast as an index with tensors.
        if int(slot_T) < 0:
            return out_THD
        page, row = divmod(int(slot_T), PAGE_SIZE)
    else:
        is_kept_T = slot_T >= 0
        x_T2GD, slot_T = x_T2GD[is_kept_T], slot_T[is_kept_T]
        page, row = slot_T // PAGE_SIZE, slot_T % PAGE_SIZE
    if rotation_DD is not None:
        x_T2GD = x_T2GD @ rotation_DD
    parts = fmt.codec.encode(x_T2GD.flatten(0, 2))
    for part_NB, plane_P2GNB in zip(parts, page_planes(pages_PGB, fmt), strict=True):
        if part_NB.shape[-1]:
            plane_P2GNB[page, :, :, row] = part_NB.view(*x_T2GD.shape[:3], part_NB.shape[-1])
    return out_THD


def page_planes(
    pages_PGB: torch.Tensor, fmt: KVFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of codes, scale and zero, each uint8 [pages, 2 (K, V), G, 64, row bytes]."""
    num_pages, num_kv_heads, _ = pages_PGB.shape
    page_stride, head_stride, _ = pages_PGB.stride()

    def plane(k_offset: int, v_offset: int, row_bytes: int) -> torch.Tensor:
        return pages_PGB.as_strided(
            (num_pages, 2, num_kv_heads, PAGE_SIZE, row_bytes),
            (page_stride, v_offset - k_offset, head_stride, row_bytes, 1),
            pages_PGB.storage_offset() + k_offset,
        )

    return (
        plane(fmt.k_codes, fmt.v_codes, fmt.row.codes),
        plane(fmt.k_scale, fmt.v_scale, fmt.row.scale),
        plane(fmt.k_zero, fmt.v_zero, fmt.row.zero),
    )


def codec_tables(codec: KVCodec, unused: torch.Tensor) -> torch.Tensor:
    """The codec's tables on the device of `unused`, which stands in where it has none."""
    return unused if codec.tables is None else codec.tables(unused.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendPlan:
    """Launch choice of `kv_append`."""

    block_tokens: int
    num_warps: int


APPEND_PLAN = AppendPlan(block_tokens=4, num_warps=4)
"""One choice for every batch: the norm's sum then has one shape, so that a token's bytes do not
depend on which tokens share the step (case K18). One warp a row at head_dim 128."""


def check_pages(pages_PGB: torch.Tensor, num_kv_heads: int, fmt: KVFormat) -> None:
    """Assert that `pages_PGB` is a pool of `fmt` pages for `num_kv_heads`, its bytes adjacent."""
    assert pages_PGB.dtype == torch.uint8, pages_PGB.dtype
    assert pages_PGB.shape[1:] == (num_kv_heads, fmt.page_bytes), (
        tuple(pages_PGB.shape),
        (num_kv_heads, fmt.page_bytes),
    )
    assert pages_PGB.stride(2) == 1, pages_PGB.stride()
    assert pages_PGB.stride(0) * pages_PGB.shape[0] < 2**63, pages_PGB.shape


def check_rotation(rotation_DD: torch.Tensor | None, fmt: KVFormat) -> None:
    """Assert that a rotation is given exactly where the codec wants one, and fits head_dim."""
    assert (rotation_DD is not None) == fmt.codec.is_rotated, (fmt.codec.name, rotation_DD is None)
    if rotation_DD is not None:
        assert rotation_DD.shape == (fmt.head_dim, fmt.head_dim), rotation_DD.shape
        assert rotation_DD.dtype == torch.float32, rotation_DD.dtype


def rotation_stages(rotation_DD: torch.Tensor | None) -> int:
    """Butterfly stages of the Hadamard rotation, log2 of its block; 0 without rotation.

    The block is the largest power of two that divides head_dim, as `codecs.rotation.hadamard` has.
    """
    if rotation_DD is None:
        return 0
    assert _is_hadamard(rotation_DD), "rotation_DD is not codecs.rotation.hadamard(head_dim)"
    head_dim = rotation_DD.shape[0]
    return (head_dim & -head_dim).bit_length() - 1


@functools.lru_cache(maxsize=64)
def _is_hadamard(rotation_DD: torch.Tensor) -> bool:
    # Keyed by the tensor itself: only its first use reads values back from the device.
    expected_DD = hadamard(rotation_DD.shape[0], rotation_DD.device)
    return rotation_DD is expected_DD or torch.allclose(rotation_DD, expected_DD, atol=1e-6)


def check_append(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    cos_sin_PD: torch.Tensor,
    position_T: torch.Tensor,
    slot_T: torch.Tensor,
    q_THD: torch.Tensor | None,
) -> None:
    """Assert what every backend of `kv_append` takes."""
    num_tokens, num_kv_heads, head_dim = k_TGD.shape
    if q_THD is not None:
        assert q_THD.shape[::2] == (num_tokens, head_dim), (q_THD.shape, k_TGD.shape)
        assert q_THD.dtype == k_TGD.dtype, (q_THD.dtype, k_TGD.dtype)
        assert q_THD.device == k_TGD.device, (q_THD.device, k_TGD.device)
    assert v_TGD.shape == k_TGD.shape, (v_TGD.shape, k_TGD.shape)
    assert head_dim == fmt.head_dim, (head_dim, fmt.head_dim)
    assert k_TGD.dtype == v_TGD.dtype, (k_TGD.dtype, v_TGD.dtype)
    assert k_TGD.dtype in (torch.bfloat16, torch.float32), k_TGD.dtype
    check_pages(pages_PGB, num_kv_heads, fmt)
    assert cos_sin_PD.dtype == torch.float32, cos_sin_PD.dtype
    assert cos_sin_PD.shape[1] == head_dim, (cos_sin_PD.shape, head_dim)
    assert cos_sin_PD.stride(1) == 1, cos_sin_PD.stride()
    for name, index_T in (("position_T", position_T), ("slot_T", slot_T)):
        assert index_T.dtype == torch.int64, (name, index_T.dtype)
        assert index_T.shape == (num_tokens,), (name, index_T.shape, num_tokens)
        assert index_T.is_contiguous(), (name, index_T.stride())
    devices = {t.device for t in (k_TGD, v_TGD, pages_PGB, cos_sin_PD, position_T, slot_T)}
    assert len(devices) == 1, devices


@triton_jit
def rotate_rows(x_ND: tl.tensor, STAGES: tl.constexpr) -> Any:
    """`x_ND` times the symmetric block-diagonal normalised Hadamard of blocks of 2 ** STAGES.

    Each stage takes the sums and differences of neighbours and puts that index bit on top; after
    all stages every bit has moved once around, so that the order is the old one (the fast
    Walsh-Hadamard transform in constant geometry). STAGES 0 returns `x_ND`.
    """
    if STAGES == 0:
        return x_ND
    NUM_ROWS: tl.constexpr = x_ND.shape[0]
    WIDTH: tl.constexpr = x_ND.shape[1]
    BLOCK: tl.constexpr = 1 << STAGES
    for _ in tl.static_range(STAGES):
        pairs = tl.reshape(x_ND, (NUM_ROWS, WIDTH // BLOCK, BLOCK // 2, 2))
        left, right = tl.split(pairs)
        turned = tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2))
        x_ND = tl.reshape(turned, (NUM_ROWS, WIDTH))
    return x_ND * (BLOCK**-0.5)


@triton_jit
def _turned_rows(
    x_ptr_N: tl.tensor,
    stride_d: tl.tensor,
    mask_N: tl.tensor,
    angle_ptr_N: tl.tensor,
    norm_weight_ptr: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """rope(norm(x)) of rows of one head, float32; `angle_ptr_N` at each row's cosines."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    partner_d = tl.where(d < HALF, d + HALF, d - HALF)
    mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
    x_ND = tl.load(x_ptr_N[:, None] + d[None, :] * stride_d, mask=mask_ND, other=0.0)
    partner_ND = tl.load(x_ptr_N[:, None] + partner_d[None, :] * stride_d, mask=mask_ND, other=0.0)
    x_ND, partner_ND = x_ND.to(tl.float32), partner_ND.to(tl.float32)
    if HAS_NORM:
        inverse_rms_N = 1.0 / tl.sqrt_rn(tl.sum(x_ND * x_ND, axis=1) / HEAD_DIM + eps)
        weight_D = tl.load(norm_weight_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        partner_weight_D = tl.load(norm_weight_ptr + partner_d, mask=d < HEAD_DIM, other=0.0)
        x_ND = x_ND * inverse_rms_N[:, None] * weight_D[None, :]
        partner_ND = partner_ND * inverse_rms_N[:, None] * partner_weight_D.to(tl.float32)[None, :]
    angle_ptr = angle_ptr_N[:, None] + (d % HALF)[None, :]
    cos_ND = tl.load(angle_ptr, mask=mask_ND, other=0.0)
    sin_ND = tl.load(angle_ptr + HALF, mask=mask_ND, other=0.0)
    return x_ND * cos_ND + tl.where((d < HALF)[None, :], -partner_ND, partner_ND) * sin_ND


# Per token t and KV head g, in FP32:
#   k = rope(norm(k)) R,  v = v R,  then codec.encode -> codes, scale, zero.
# R is the Hadamard rotation, or the identity. A program takes BLOCK_N tokens of one head: K or V of
# a KV head, or, where there are queries, one query head, out = rope(norm(q)).
#
#   k_TGD, v_TGD            page of (slot // 64, g): | K codes | K scale | K zero | V codes | ... |
#     [t, g, 0..D/2 | D/2..D]      row slot % 64 of each plane, written once, never read here
#
# Bytes: reads 2 * T * G * D elements and T * D angles (in L2 after the first head), writes
# T * G * 2 * row bytes; reads and writes queries once. The two halves of a row that is turned are
# loaded twice (x and its rotary partner); the second load hits L1. Launch-bound at decode (a few
# hundred bytes a program), so the tiling only keeps one shape for all batches.
@triton_jit
def _kv_append_kernel(
    q_ptr: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    q_stride_d: tl.tensor,
    out_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_g: tl.tensor,
    k_stride_d: tl.tensor,
    v_ptr: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_g: tl.tensor,
    v_stride_d: tl.tensor,
    pages_ptr: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    cos_sin_ptr: tl.tensor,
    cos_sin_stride: tl.tensor,
    position_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    eps: tl.tensor,
    num_tokens: tl.tensor,
    ENCODE: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    tl.static_assert(HEAD_DIM % 2 == 0 and BLOCK_D >= HEAD_DIM)
    token_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token_N = token_N < num_tokens
    position_N = tl.load(position_ptr + token_N, mask=is_token_N, other=0)
    angle_N = cos_sin_ptr + position_N * cos_sin_stride
    d = tl.arange(0, BLOCK_D)
    head = tl.program_id(1).to(tl.int64)
    if head < 2 * NUM_KV_HEADS:
        slot_N = tl.load(slot_ptr + token_N, mask=is_token_N, other=-1)
        mask_N = slot_N >= 0
        row_N = (slot_N % PAGE).to(tl.int32)
        kv_head = head % NUM_KV_HEADS
        page_N = pages_ptr + (slot_N // PAGE) * page_stride + kv_head * head_stride
        if head < NUM_KV_HEADS:
            k_N = k_ptr + token_N * k_stride_t + kv_head * k_stride_g
            k_ND = _turned_rows(
                k_N, k_stride_d, mask_N, angle_N, norm_weight_ptr, eps, HAS_NORM, HEAD_DIM, BLOCK_D
            )
            k_ND = rotate_rows(k_ND, STAGES)
            ENCODE(
                k_ND, page_N, row_N, mask_N, tables_ptr, K_CODES, K_SCALE, K_ZERO, HEAD_DIM, BLOCK_D
            )
        else:
            v_N = v_ptr + token_N * v_stride_t + kv_head * v_stride_g
            mask_ND = mask_N[:, None] & (d < HEAD_DIM)[None, :]
            v_ND = tl.load(v_N[:, None] + d[None, :] * v_stride_d, mask=mask_ND, other=0.0)
            v_ND = rotate_rows(v_ND.to(tl.float32), STAGES)
            ENCODE(
                v_ND, page_N, row_N, mask_N, tables_ptr, V_CODES, V_SCALE, V_ZERO, HEAD_DIM, BLOCK_D
            )
    else:
        head -= 2 * NUM_KV_HEADS
        q_N = q_ptr + token_N * q_stride_t + head * q_stride_h
        q_ND = _turned_rows(
            q_N, q_stride_d, is_token_N, angle_N, q_norm_ptr, eps, HAS_Q_NORM, HEAD_DIM, BLOCK_D
        )
        out_N = out_ptr + (token_N * NUM_HEADS + head) * HEAD_DIM
        out_mask_ND = is_token_N[:, None] & (d < HEAD_DIM)[None, :]
        q_ND = q_ND.to(out_ptr.dtype.element_ty)
        tl.store(out_N[:, None] + d[None, :], q_ND, mask=out_mask_ND)
