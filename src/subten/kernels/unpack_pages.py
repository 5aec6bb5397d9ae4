"""Pages decoded once for a step of many query tiles, each of which would decode them again.

Letters: S sequences, P pages of a sequence, G KV heads, D head_dim, B bytes of a page, Q query
tiles, N key positions.
"""

from __future__ import annotations

import functools

import torch

from subten.codecs import KVFormat, kv_format
from subten.core import PAGE_SIZE
from subten.kernels.kv_append import codec_tables, rotate_rows, rotation_stages
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import tl, triton_jit

MIN_QUERIES = 128
"""Tokens of the longest query from which a step decodes first: so many tiles read each page."""

MAX_BYTES = 16 * 2**20
"""Memory that the decoded pages of one step may take, so that L2 holds them; above, each tile
decodes for itself."""

PLAIN = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Queries' dtype to the codec of decoded pages: what the products take."""

BLOCK_ROWS = 16
"""Rows of a program: four for each K and V of a page, so that a short prompt has enough."""


def is_worth_unpacking(
    fmt: KVFormat, dtype: torch.dtype, num_kv_heads: int, step: StepTensors
) -> bool:
    """Whether decoding costs, many tiles share it, and its result is small."""
    num_pages = step.page_table_SP.shape[0] * -(-step.max_kv_len // PAGE_SIZE)
    page_bytes = kv_format(PLAIN[dtype], fmt.head_dim).page_bytes
    return (
        fmt.codec.name not in PLAIN.values()
        and step.max_query_len >= MIN_QUERIES
        and num_pages * num_kv_heads * page_bytes <= MAX_BYTES
    )


def unpack_pages(
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    step: StepTensors,
    dtype: torch.dtype,
    rotation_DD: torch.Tensor | None,
) -> tuple[torch.Tensor, KVFormat, torch.Tensor]:
    """The sequences' pages in order as `dtype`, turned back, and their format; one launch.

    Also the page table that goes with them, [S, P]. Rows past a sequence's keys are zero as far as
    its last page; pages after that are not written.
    """
    plain = kv_format(PLAIN[dtype], fmt.head_dim)
    num_sequences, num_kv_heads = step.page_table_SP.shape[0], pages_PGB.shape[1]
    width = -(-step.max_kv_len // PAGE_SIZE)
    shape = (num_sequences * width, num_kv_heads, plain.page_bytes)
    plain_PGB = torch.empty(shape, dtype=torch.uint8, device=pages_PGB.device)
    values = plain_PGB.view(dtype)
    parts = PAGE_SIZE // BLOCK_ROWS
    _unpack_pages_kernel[(num_sequences * width * parts, num_kv_heads, 2)](
        step.kv_len_S,
        step.page_table_SP,
        step.page_table_SP.stride(0),
        pages_PGB,
        pages_PGB.stride(0),
        pages_PGB.stride(1),
        codec_tables(fmt.codec, pages_PGB),
        values,
        values.stride(0),
        values.stride(1),
        width,
        DECODE=fmt.codec.device_decode,
        K_CODES=fmt.k_codes,
        K_SCALE=fmt.k_scale,
        K_ZERO=fmt.k_zero,
        V_CODES=fmt.v_codes,
        V_SCALE=fmt.v_scale,
        V_ZERO=fmt.v_zero,
        TO_K=plain.k_codes // dtype.itemsize,
        TO_V=plain.v_codes // dtype.itemsize,
        HEAD_DIM=fmt.head_dim,
        BLOCK_D=1 << (fmt.head_dim - 1).bit_length(),
        BLOCK_N=BLOCK_ROWS,
        PAGE=PAGE_SIZE,
        STAGES=rotation_stages(rotation_DD),
        num_warps=4,
    )
    table = _numbers(pages_PGB.device)[: len(plain_PGB)]
    return plain_PGB, plain, table.view(num_sequences, width)


@functools.cache
def _numbers(device: torch.device) -> torch.Tensor:
    """0, 1, ... for as many pages as MAX_BYTES may have; lasts, as captured steps read it."""
    return torch.arange(MAX_BYTES // (PAGE_SIZE * 2 * 2), dtype=torch.int32, device=device)


# x = (code * scale + zero) R of each row of each page, rounded to the dtype of the products; R is
# its own inverse.
#
#   page of (sequence, index), KV head:  | K codes | scale | zero | V ... |  ->  | K | V |
#
# A program takes BLOCK_N rows of K or V. Bytes: the pages once, and 2 * D * itemsize a row written:
# 2 MB at 512 tokens, 4 KV heads of 128 and bf16, which L2 holds for the tiles that read it.
@triton_jit
def _unpack_pages_kernel(
    kv_len_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    pages_ptr: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    tables_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_page_stride: tl.tensor,
    out_head_stride: tl.tensor,
    width: tl.tensor,
    DECODE: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    TO_K: tl.constexpr,
    TO_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    PARTS: tl.constexpr = PAGE // BLOCK_N
    at = tl.program_id(0) // PARTS
    seq, index = at // width, at % width
    first_row = (tl.program_id(0) % PARTS) * BLOCK_N
    num_keys = tl.load(kv_len_ptr + seq)
    if index * PAGE >= num_keys:
        return
    row_N = first_row + tl.arange(0, BLOCK_N)
    mask_N = index * PAGE + row_N < num_keys
    page_id = tl.load(page_table_ptr + seq.to(tl.int64) * page_table_stride + index).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    page = pages_ptr + page_id * page_stride + head * head_stride
    to = out_ptr + at.to(tl.int64) * out_page_stride + head * out_head_stride
    if tl.program_id(2) == 0:
        code_ND, scale_N, zero_N = DECODE(
            page, row_N, mask_N, tables_ptr, K_CODES, K_SCALE, K_ZERO, HEAD_DIM, BLOCK_D
        )
        to += TO_K
    else:
        code_ND, scale_N, zero_N = DECODE(
            page, row_N, mask_N, tables_ptr, V_CODES, V_SCALE, V_ZERO, HEAD_DIM, BLOCK_D
        )
        to += TO_V
    x_ND = rotate_rows(code_ND * scale_N[:, None] + zero_N[:, None], STAGES)
    d = tl.arange(0, BLOCK_D)
    mask_ND = (row_N >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    to_ND = to + row_N[:, None] * HEAD_DIM + d[None, :]
    tl.store(to_ND, x_ND.to(out_ptr.dtype.element_ty), mask=mask_ND)
