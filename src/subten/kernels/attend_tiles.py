"""What attention over pages does besides decoding them: tiles, the running softmax, the merge.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, S sequences, Q query tiles, N
key positions, M rows of a tile (query tokens x heads of one KV head), Z splits, C columns of
a table that adds to scores, P its positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from subten.core import PAGE_SIZE
from subten.device import detect
from subten.kernels.attend_plan import AttendPlan, plan_attend
from subten.kernels.kv_append import rotate_rows, rotation_stages
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import tl, triton, triton_jit


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device."""
    return detect(str(device)).num_sms


def plan_for(
    q_THD: torch.Tensor,
    num_kv_heads: int,
    step: StepTensors,
    num_sms: int,
    max_rows: int | None = None,
) -> AttendPlan:
    """`plan_attend` for these queries and this step."""
    num_tokens, num_heads, head_dim = q_THD.shape
    return plan_attend(
        num_sms=num_sms,
        num_tiles=len(step.tile_seq_Q),
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        out_bytes=num_tokens * num_heads * head_dim * 4,
        is_float32=q_THD.dtype == torch.float32,
        max_query_len=step.max_query_len,
        max_kv_len=step.max_kv_len,
        max_rows=max_rows,
    )


def check_queries(q_THD: torch.Tensor, num_kv_heads: int, head_dim: int, step: StepTensors) -> None:
    """Assert that queries and step fit one another and `num_kv_heads` of `head_dim`."""
    num_tokens, num_heads, query_dim = q_THD.shape
    assert query_dim == head_dim, (query_dim, head_dim)
    assert q_THD.dtype in (torch.bfloat16, torch.float32), q_THD.dtype
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert step.position_T.shape == (num_tokens,), (step.position_T.shape, num_tokens)
    assert step.max_kv_len <= step.page_table_SP.shape[1] * PAGE_SIZE, (
        step.max_kv_len,
        step.page_table_SP.shape,
    )
    assert step.page_table_SP.stride(1) == 1, step.page_table_SP.stride()
    for name in ("page_table_SP", "kv_len_S", "query_start_S1", "tile_seq_Q", "tile_start_Q"):
        index = getattr(step, name)
        assert index.dtype == torch.int32, (name, index.dtype)
        assert index.device == q_THD.device, (name, index.device, q_THD.device)
        assert index.dim() > 1 or index.is_contiguous(), (name, index.stride())
    assert step.position_T.dtype == torch.int64, step.position_T.dtype


def check_table(
    q_THD: torch.Tensor,
    step: StepTensors,
    coef_THC: torch.Tensor | None,
    table_PC: torch.Tensor | None,
) -> None:
    """Assert that a table and its coefficients come together and cover heads and positions."""
    if coef_THC is None or table_PC is None:
        assert coef_THC is None, "coef_THC without table_PC"
        assert table_PC is None, "table_PC without coef_THC"
        return
    width = table_PC.shape[1]
    assert coef_THC.shape == (*q_THD.shape[:2], width), (coef_THC.shape, q_THD.shape, width)
    # Graphs are captured for whole pages, but no key lies past the table.
    assert len(table_PC) > step.max_kv_len - PAGE_SIZE, (len(table_PC), step.max_kv_len)
    for tensor in (coef_THC, table_PC):
        assert tensor.dtype == torch.float32, tensor.dtype
        assert tensor.device == q_THD.device, (tensor.device, q_THD.device)
        assert tensor.is_contiguous(), tensor.stride()


def tile_args(step: StepTensors, plan: AttendPlan) -> tuple[Any, ...]:
    """The first arguments of every kernel that walks over query tiles."""
    return (
        step.position_T,
        step.kv_len_S,
        step.query_start_S1,
        step.tile_seq_Q,
        step.tile_start_Q,
        plan.num_splits,
    )


def tile_constants(
    q_THD: torch.Tensor, plan: AttendPlan, rotation_DD: torch.Tensor | None
) -> dict[str, int]:
    """The constants that the attention kernels and `merge_kernel` share."""
    _, num_heads, head_dim = q_THD.shape
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "TILE_TOKENS": plan.tile_tokens,
        "MIN_PAGES": plan.min_pages,
        "PAGE": PAGE_SIZE,
        "STAGES": rotation_stages(rotation_DD),
    }


@dataclass(frozen=True, slots=True)
class Partials:
    """Where the splits of a step leave their results: float32 [T, H, Z, D] and [T, H, Z]."""

    out_THZD: torch.Tensor
    lse_THZ: torch.Tensor


def make_partials(q_THD: torch.Tensor, plan: AttendPlan) -> Partials:
    """New memory for the partial results of one call."""
    num_tokens, num_heads, head_dim = q_THD.shape
    shape_THZ = (num_tokens, num_heads, plan.num_splits)
    return Partials(
        q_THD.new_empty(*shape_THZ, head_dim, dtype=torch.float32),
        q_THD.new_empty(shape_THZ, dtype=torch.float32),
    )


def merge(
    partials: Partials,
    out_THD: torch.Tensor,
    step: StepTensors,
    plan: AttendPlan,
    constants: dict[str, int],
) -> None:
    """Launch `merge_kernel`: the partial results of all splits into `out_THD`."""
    head_blocks = -(-out_THD.shape[1] // plan.merge_heads)
    merge_kernel[(len(step.tile_seq_Q), plan.tile_tokens * head_blocks)](
        *tile_args(step, plan),
        partials.out_THZD,
        partials.lse_THZ,
        out_THD,
        BLOCK_H=plan.merge_heads,
        **constants,
        num_warps=plan.merge_warps,
    )


@triton_jit
def tile_span(
    position_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq: tl.tensor,
    tile_start: tl.tensor,
    TILE_TOKENS: tl.constexpr,
) -> Any:
    """One past the tile's last token, and the number of keys that this token sees."""
    tile_end = tl.minimum(tl.load(query_start_ptr + seq + 1), tile_start + TILE_TOKENS)
    last_position = tl.load(position_ptr + tile_end - 1).to(tl.int32)
    return tile_end, tl.minimum(tl.load(kv_len_ptr + seq), last_position + 1)


@triton_jit
def split_pages(
    num_keys: tl.tensor, num_splits: tl.tensor, MIN_PAGES: tl.constexpr, PAGE: tl.constexpr
) -> Any:
    """Pages in all, and pages of each split but the last, for a tile that sees `num_keys`."""
    num_pages = tl.cdiv(num_keys, PAGE)
    return num_pages, tl.maximum(tl.cdiv(num_pages, num_splits), MIN_PAGES)


@triton_jit
def tile_rows(
    block: tl.tensor,
    tile_start: tl.tensor,
    tile_end: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Token, head and mask of each row; `block` counts the head blocks of all KV heads."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    row_M = tl.arange(0, BLOCK_M)
    token_M = tile_start + row_M // BLOCK_H
    group_head_M = (block % HEAD_BLOCKS) * BLOCK_H + row_M % BLOCK_H
    head_M = (block // HEAD_BLOCKS) * GROUP + group_head_M
    return token_M, head_M, (token_M < tile_end) & (group_head_M < GROUP)


@triton_jit
def load_queries(
    q_ptr: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    q_stride_d: tl.tensor,
    token_M: tl.tensor,
    head_M: tl.tensor,
    mask_M: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    BY_SIGNS: tl.constexpr,
) -> Any:
    """Queries of a tile of at least 16 rows, turned, in their own dtype; 0 where masked.

    With BY_SIGNS, of bfloat16 alone, by a product; the matrix takes 2 * BLOCK_D ** 2 bytes of
    shared memory.
    """
    d = tl.arange(0, BLOCK_D)
    mask_MD = mask_M[:, None] & (d < HEAD_DIM)[None, :]
    q_row_M = token_M.to(tl.int64) * q_stride_t + head_M * q_stride_h
    q_MD = tl.load(q_ptr + q_row_M[:, None] + d[None, :] * q_stride_d, mask=mask_MD, other=0.0)
    if STAGES > 0 and BY_SIGNS:
        BLOCK: tl.constexpr = 1 << STAGES
        turned_MD = tl.dot(q_MD, _signs(BLOCK_D, STAGES)) * (BLOCK**-0.5)
        return turned_MD.to(q_MD.dtype)
    return rotate_rows(q_MD.to(tl.float32), STAGES).to(q_MD.dtype)


@triton_jit
def turn_results(x_MD: tl.tensor, STAGES: tl.constexpr, BY_SIGNS: tl.constexpr) -> Any:
    """`rotate_rows` of a tile of at least 16 rows, by products on tensor cores with BY_SIGNS.

    A tile of 128 rows would pass through shared memory once for each stage. Three bfloat16 terms
    hold the 24 bits of a float32, and their products with signs are exact.
    """
    if STAGES > 0 and BY_SIGNS:
        BLOCK: tl.constexpr = 1 << STAGES
        sign_DD = _signs(x_MD.shape[1], STAGES)
        high_MD = x_MD.to(tl.bfloat16)
        rest_MD = x_MD - high_MD.to(tl.float32)
        middle_MD = rest_MD.to(tl.bfloat16)
        low_MD = (rest_MD - middle_MD.to(tl.float32)).to(tl.bfloat16)
        turned_MD = tl.dot(low_MD, sign_DD)
        turned_MD = tl.dot(middle_MD, sign_DD, acc=turned_MD)
        turned_MD = tl.dot(high_MD, sign_DD, acc=turned_MD)
        return turned_MD * (BLOCK**-0.5)
    return rotate_rows(x_MD, STAGES)


@triton_jit
def _signs(WIDTH: tl.constexpr, STAGES: tl.constexpr) -> Any:
    """The Hadamard matrix of `rotate_rows` without its factor, bfloat16 [WIDTH, WIDTH]: element
    (i, j) of a block is -1 to the number of bits that i and j share."""
    tl.static_assert(STAGES <= 8)
    i_D1, j_1D = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    shared_DD = i_D1 & j_1D & ((1 << STAGES) - 1)
    shared_DD ^= shared_DD >> 4
    shared_DD ^= shared_DD >> 2
    shared_DD ^= shared_DD >> 1
    is_block_DD = (i_D1 >> STAGES) == (j_1D >> STAGES)
    return tl.where(is_block_DD, 1.0 - 2.0 * (shared_DD & 1).to(tl.float32), 0.0).to(tl.bfloat16)


@triton_jit
def softmax_step(score_MN: tl.tensor, is_seen_MN: tl.tensor, max_M: tl.tensor) -> Any:
    """Weights of one page against the running maximum, and what that does to earlier sums.

    Scores in base 2, -inf where not seen. Returns `(p_MN, decay_M, shift_M, next_max_M)`: p is
    2 ** (score - shift), earlier sums are to be multiplied by decay.
    """
    next_max_M = tl.maximum(max_M, tl.max(score_MN, axis=1))
    # A row that has seen nothing yet would subtract -inf from -inf.
    shift_M = tl.where(next_max_M == float("-inf"), 0.0, next_max_M)
    p_MN = tl.where(is_seen_MN, tl.exp2(score_MN - shift_M[:, None]), 0.0)
    return p_MN, tl.exp2(max_M - shift_M), shift_M, next_max_M


# Partial results of the splits z of one row (Dao et al. 2022, section 3.1; base-2 logarithms):
#   lse = log2 sum_z 2 ** lse_z,   out = sum_z 2 ** (lse_z - lse) out_z,   then out R.
#
#   part [T, H, Z, D], lse [T, H, Z]: a program takes BLOCK_H heads of one token, z = 0, 1, ... in
#   order, and only the splits that the row's tile really has, so that neither padding of the grid
#   nor other sequences can change a bit.
#
# Bytes: 4 * Z * (D + 1) read a row, D elements written. Small next to the pages; not yet measured.
@triton_jit
def merge_kernel(
    position_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    tile_seq_ptr: tl.tensor,
    tile_start_ptr: tl.tensor,
    num_splits: tl.tensor,
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    seq = tl.load(tile_seq_ptr + tile)
    if seq < 0:
        return
    tile_start = tl.load(tile_start_ptr + tile)
    tile_end, num_keys = tile_span(
        position_ptr, kv_len_ptr, query_start_ptr, seq, tile_start, TILE_TOKENS
    )
    token = tile_start + tl.program_id(1) % TILE_TOKENS
    if token >= tile_end:
        return
    num_pages, pages_per_split = split_pages(num_keys, num_splits, MIN_PAGES, PAGE)
    head_H = (tl.program_id(1) // TILE_TOKENS) * BLOCK_H + tl.arange(0, BLOCK_H)
    row_H = token.to(tl.int64) * NUM_HEADS + head_H
    d = tl.arange(0, BLOCK_D)
    mask_H = head_H < NUM_HEADS
    mask_HD = mask_H[:, None] & (d < HEAD_DIM)[None, :]
    max_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    acc_HD = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in range(tl.cdiv(num_pages, pages_per_split)):
        part_row_H = row_H * num_splits + split
        lse_H = tl.load(lse_ptr + part_row_H, mask=mask_H, other=float("-inf"))
        part = part_ptr + part_row_H[:, None] * HEAD_DIM + d[None, :]
        part_HD = tl.load(part, mask=mask_HD, other=0.0)
        next_max_H = tl.maximum(max_H, lse_H)
        shift_H = tl.where(next_max_H == float("-inf"), 0.0, next_max_H)
        decay_H, weight_H = tl.exp2(max_H - shift_H), tl.exp2(lse_H - shift_H)
        acc_HD = acc_HD * decay_H[:, None] + part_HD * weight_H[:, None]
        sum_H = sum_H * decay_H + weight_H
        max_H = next_max_H
    sum_H = tl.where(sum_H == 0.0, 1.0, sum_H)
    out_HD = rotate_rows(acc_HD / sum_H[:, None], STAGES)
    out = out_ptr + row_H[:, None] * HEAD_DIM + d[None, :]
    tl.store(out, out_HD.to(out_ptr.dtype.element_ty), mask=mask_HD)
