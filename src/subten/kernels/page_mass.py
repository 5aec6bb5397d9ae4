"""How much softmax weight each page drew: from the pages' own sums to one number a page.

`attend_mixed` leaves log2 of the sum of weights of each row and page, its share, and log2 of the
row's sum over each split. Two short launches make of them

    mass[s, p] += sum over tiles of s, rows m  2 ** (share[m, p] - lse[m])

Letters: T tokens, H query heads, S sequences, P pages of one sequence, Q query tiles, B blocks of
heads of all KV heads, M rows of a tile and block, Z splits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from subten.core import PAGE_SIZE
from subten.kernels.attend_plan import AttendPlan
from subten.kernels.attend_tiles import split_pages, tile_args, tile_rows, tile_span
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import tl, triton, triton_jit

MAX_SHARE_BYTES = 64 * 2**20
"""Memory for the shares; a long prompt's tiles are taken in parts that fit."""

_BLOCK_P = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PageShares:
    """Memory of one call: shares of some tiles, [Q, B, P, M], and the mass of every tile.

    `mass_QP` is None in steps of single tokens, where a tile is a sequence.
    """

    share_QBPM: torch.Tensor
    mass_QP: torch.Tensor | None

    @property
    def num_pages(self) -> int:
        """P."""
        return self.share_QBPM.shape[2]

    def parts(self, step: StepTensors) -> Iterator[tuple[int, StepTensors]]:
        """The step's tiles in parts that the shares hold: first tile, and the step of the part."""
        num_tiles = len(self.share_QBPM)
        for first in range(0, len(step.tile_seq_Q), num_tiles):
            tiles = slice(first, first + num_tiles)
            yield (
                first,
                dataclasses.replace(
                    step,
                    tile_seq_Q=step.tile_seq_Q[tiles],
                    tile_start_Q=step.tile_start_Q[tiles],
                ),
            )


def make_shares(
    like: torch.Tensor, num_blocks: int, step: StepTensors, plan: AttendPlan
) -> PageShares:
    """New memory on the device of `like`."""
    num_pages = -(-step.max_kv_len // PAGE_SIZE)
    tile_bytes = 4 * num_blocks * num_pages * plan.block_rows
    num_tiles = max(1, min(len(step.tile_seq_Q), MAX_SHARE_BYTES // tile_bytes))
    shape = (num_tiles, num_blocks, num_pages, plan.block_rows)
    shares = like.new_empty(shape, dtype=torch.float32)
    if step.max_query_len == 1:
        return PageShares(share_QBPM=shares, mass_QP=None)
    mass_QP = like.new_empty((len(step.tile_seq_Q), num_pages), dtype=torch.float32)
    return PageShares(share_QBPM=shares, mass_QP=mass_QP)


def add_tiles(
    shares: PageShares,
    first_tile: int,
    part: StepTensors,
    lse_THZ: torch.Tensor,
    mass_SP: torch.Tensor,
    plan: AttendPlan,
    group: int,
) -> None:
    """Sum the rows of each tile of `part`: into `mass_SP`, or `mass_QP` where that comes first."""
    _, num_heads, _ = lse_THZ.shape
    _, num_blocks, num_pages, block_rows = shares.share_QBPM.shape
    is_final = shares.mass_QP is None
    target = mass_SP if shares.mass_QP is None else shares.mass_QP[first_tile:]
    _tile_mass_kernel[(len(part.tile_seq_Q), triton.cdiv(num_pages, _BLOCK_P))](
        *tile_args(part, plan),
        shares.share_QBPM,
        num_blocks,
        num_pages,
        lse_THZ,
        target,
        target.stride(0),
        GROUP=group,
        NUM_HEADS=num_heads,
        BLOCK_H=plan.block_heads,
        BLOCK_M=block_rows,
        BLOCK_P=_BLOCK_P,
        TILE_TOKENS=plan.tile_tokens,
        MIN_PAGES=plan.min_pages,
        PAGE=PAGE_SIZE,
        IS_FINAL=is_final,
        num_warps=4,
    )


def add_sequences(shares: PageShares, step: StepTensors, mass_SP: torch.Tensor) -> None:
    """Add the mass of each sequence's tiles to its row of `mass_SP`."""
    if shares.mass_QP is None:
        return
    num_tiles, num_pages = shares.mass_QP.shape
    _sequence_mass_kernel[(len(mass_SP), triton.cdiv(num_pages, _BLOCK_P))](
        step.tile_seq_Q,
        num_tiles,
        shares.mass_QP,
        num_pages,
        mass_SP,
        mass_SP.stride(0),
        BLOCK_Q=16,
        BLOCK_P=_BLOCK_P,
        num_warps=1,
    )


# A program takes BLOCK_P pages of one tile and goes over its blocks of heads in order; the sum of a
# row over the splits z is merged anew, lse = log2 sum_z 2 ** lse_z.
#
# Bytes: 4 T H P read once, and 4 T H Z for each BLOCK_P pages. Not yet measured on a GPU.
@triton_jit
def _tile_mass_kernel(
    position_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    tile_seq_ptr: tl.tensor,
    tile_start_ptr: tl.tensor,
    num_splits: tl.tensor,
    share_ptr: tl.tensor,
    num_blocks: tl.tensor,
    share_pages: tl.tensor,
    lse_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    mass_stride: tl.tensor,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    IS_FINAL: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    seq = tl.load(tile_seq_ptr + tile)
    if seq < 0:
        return
    tile_start = tl.load(tile_start_ptr + tile)
    tile_end, num_keys = tile_span(
        position_ptr, kv_len_ptr, query_start_ptr, seq, tile_start, TILE_TOKENS
    )
    num_pages, pages_per_split = split_pages(num_keys, num_splits, MIN_PAGES, PAGE)
    page_P = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    mass_P = tl.zeros([BLOCK_P], tl.float32)
    for block in range(num_blocks):
        token_M, head_M, mask_M = tile_rows(block, tile_start, tile_end, GROUP, BLOCK_H, BLOCK_M)
        lse_row_M = (token_M.to(tl.int64) * NUM_HEADS + head_M) * num_splits
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        for split in range(tl.cdiv(num_pages, pages_per_split)):
            lse_M = tl.load(lse_ptr + lse_row_M + split, mask=mask_M, other=float("-inf"))
            next_max_M = tl.maximum(max_M, lse_M)
            shift_M = tl.where(next_max_M == float("-inf"), 0.0, next_max_M)
            sum_M = sum_M * tl.exp2(max_M - shift_M) + tl.exp2(lse_M - shift_M)
            max_M = next_max_M
        # Rows that saw nothing have no share either: any finite number will do.
        is_empty_M = sum_M == 0.0
        lse_M = tl.where(is_empty_M, 0.0, max_M) + tl.log2(tl.where(is_empty_M, 1.0, sum_M))
        share_row = (tile.to(tl.int64) * num_blocks + block) * share_pages
        share_PM = share_ptr + (share_row + page_P)[:, None] * BLOCK_M
        mask_PM = (page_P < num_pages)[:, None] & mask_M[None, :]
        share_PM = tl.load(
            share_PM + tl.arange(0, BLOCK_M)[None, :], mask=mask_PM, other=float("-inf")
        )
        mass_P += tl.sum(tl.exp2(share_PM - lse_M[None, :]), axis=1)
    if IS_FINAL:
        target_P = mass_ptr + seq.to(tl.int64) * mass_stride + page_P
        old_P = tl.load(target_P, mask=page_P < num_pages, other=0.0)
        tl.store(target_P, old_P + mass_P, mask=page_P < num_pages)
    else:
        target_P = mass_ptr + tile.to(tl.int64) * mass_stride + page_P
        tl.store(target_P, mass_P, mask=page_P < share_pages)


# A program takes BLOCK_P pages of one sequence and goes over all tiles of the step in order; loads
# of the tiles of others are masked out.
@triton_jit
def _sequence_mass_kernel(
    tile_seq_ptr: tl.tensor,
    num_tiles: tl.tensor,
    tile_mass_ptr: tl.tensor,
    num_pages: tl.tensor,
    mass_ptr: tl.tensor,
    mass_stride: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    seq = tl.program_id(0)
    page_P = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    mass_P = tl.zeros([BLOCK_P], tl.float32)
    for first in range(0, num_tiles, BLOCK_Q):
        tile_Q = first + tl.arange(0, BLOCK_Q)
        is_own_Q = tl.load(tile_seq_ptr + tile_Q, mask=tile_Q < num_tiles, other=-1) == seq
        part_QP = tile_mass_ptr + tile_Q.to(tl.int64)[:, None] * num_pages + page_P[None, :]
        mask_QP = is_own_Q[:, None] & (page_P < num_pages)[None, :]
        mass_P += tl.sum(tl.load(part_QP, mask=mask_QP, other=0.0), axis=0)
    target_P = mass_ptr + seq.to(tl.int64) * mass_stride + page_P
    old_P = tl.load(target_P, mask=page_P < num_pages, other=0.0)
    tl.store(target_P, old_P + mass_P, mask=page_P < num_pages)
