"""`attend_mixed` on CUDA for decode steps: one query token a sequence, split pages, one launch.

Letters: T tokens, H query heads, G KV heads, D head_dim, S sequences, P pages (positions in
`table_PC`), C columns of the table, Z splits. `attend_mixed.cu` draws the work.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from subten.codecs.mixed import MixedFormat
from subten.codecs.vq import FIRST, SECOND, VECTOR, codebook
from subten.core import PAGE_SIZE
from subten.kernels import attend_mixed as triton_mixed
from subten.kernels.attend_plan import AttendPlan
from subten.kernels.attend_tiles import check_table, num_sms
from subten.kernels.cuda import runtime
from subten.kernels.cuda.attend import (
    HEAD_DIMS,
    MAX_GROUP,
    MAX_ROWS,
    MAX_SPLITS,
    DecodePlan,
    SliceBytes,
    has_bulk_copies,
    launch_splits,
)
from subten.kernels.kv_append import rotation_stages
from subten.kernels.mixed_pages import MixedPages, Window
from subten.kernels.page_mass import add_tiles, make_shares
from subten.kernels.step import StepTensors

MAX_WARPS = 8
"""Of a block: what a thread's registers leave."""

ARENA_BYTES = 256 * 256 + MAX_WARPS * 512
"""Beside the rings: levels of values and angles of positions; norms of each warp's page."""

MAX_WINDOW = 448
"""Recent rows that a query reads: the arena holds scores of 512 exact keys, 64 of them sinks."""


def attend_mixed(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    *,
    scale: float,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None = None,
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """`subten.kernels.attend_mixed.attend_mixed` in one CUDA launch, for steps of single tokens.

    Outlier channels, windows above 448 tokens, what `attend` on CUDA does not take either, and
    steps of more than one token of a sequence go to Triton. `plan` and `pdl` are for measuring.
    Counters and what must be in memory before the kernels ahead have ended are as there: only q,
    coefficients, the newest row of each sequence, and exact rows may come from those.

    A step that adds to `mass_SP` has one launch more.
    """
    if not suits(q_THD, pages, fmt, step, window, table_PC):
        return triton_mixed.attend_mixed(
            q_THD,
            pages,
            fmt,
            step,
            window,
            scale=scale,
            rotation_DD=rotation_DD,
            mass_SP=mass_SP,
            coef_THC=coef_THC,
            table_PC=table_PC,
        )
    triton_mixed.check_mixed(q_THD, pages, fmt, step, window, rotation_DD, mass_SP)
    check_table(q_THD, step, coef_THC, table_PC)
    rotation_stages(rotation_DD)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    num_tiles, num_kv_heads = len(step.tile_seq_Q), pages.num_kv_heads
    if num_tiles == 0 or len(q_THD) == 0:
        return out_THD
    if plan is None:
        plan = plan_mixed(
            num_sms=num_sms(q_THD.device), num_sequences=num_tiles, num_kv_heads=num_kv_heads
        )
    assert plan.num_warps <= MAX_WARPS, plan
    layout = page_bytes(pages, fmt)
    choice = launch_splits(q_THD, num_kv_heads, layout, step, scale=scale, plan=plan)

    def run(part: StepTensors, shares: torch.Tensor | None, lse_THZ: torch.Tensor | None) -> None:
        grid = choice.grid
        if len(part.tile_seq_Q) != num_tiles:
            grid = (grid[0], len(part.tile_seq_Q), grid[2])
        runtime.launch(
            "attend_mixed.cu",
            kernel_name(pages, fmt, has_table=table_PC is not None, polls=choice.polls),
            grid,
            choice.num_threads,
            (
                *_own_arguments(q_THD, pages, fmt, window, coef_THC, table_PC, shares, lse_THZ),
                part.page_table_SP,
                ctypes.c_int64(part.page_table_SP.stride(0)),
                part.position_T,
                part.kv_len_S,
                part.tile_seq_Q,
                part.tile_start_Q,
                out_THD,
                *choice.last_arguments,
            ),
            device=q_THD.device,
            shared_bytes=choice.shared_bytes,
            pdl=pdl,
        )

    if mass_SP is None:
        run(step, None, None)
        return out_THD
    tiles = _tiles()
    lse_THZ = q_THD.new_empty((*q_THD.shape[:2], 1), dtype=torch.float32)
    shares = make_shares(q_THD, num_kv_heads, step, tiles)
    for first_tile, part in shares.parts(step):
        run(part, shares.share_QBPM, lse_THZ)
        add_tiles(shares, first_tile, part, lse_THZ, mass_SP, tiles, choice.group)
    return out_THD


def suits(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    table_PC: torch.Tensor | None,
) -> bool:
    """Whether the kernel takes this call."""
    num_heads, head_dim = q_THD.shape[1:]
    values = (pages.vbase_XGB, pages.vfine_YGB, pages.vcold_ZGB)
    copied = (pages.k_PGB, *values, pages.recent_NGE)
    optional = (pages.sink_XGB, table_PC)
    return (
        step.max_query_len == 1
        and q_THD.dtype == torch.bfloat16
        and head_dim == fmt.head_dim
        and head_dim in HEAD_DIMS
        and num_heads <= MAX_GROUP * pages.num_kv_heads
        and len(step.tile_seq_Q) * num_heads <= MAX_ROWS
        and window.size <= MAX_WINDOW
        and pages.outlier_GO is None
        and (table_PC is None or table_PC.shape[1] == head_dim)
        and all(_is_aligned(t) for t in (*copied, *optional) if t is not None)
        and has_bulk_copies(q_THD.device)
    )


def _is_aligned(t: torch.Tensor) -> bool:
    """Rows lie where bulk copies and loads of 16 bytes may read, at most 2 GiB apart."""
    strides = (stride * t.element_size() for stride in t.stride()[:-1])
    return t.data_ptr() % 16 == 0 and all(s % 16 == 0 and s < 2**31 for s in strides)


START_SHARE = 0.15
"""What the start of a block costs, of the time of a sequence's pages in one block: 9 us of 58 at 8k
(benchmarks/plans/h200-adaptive-batch.json)."""


def plan_mixed(*, num_sms: int, num_sequences: int, num_kv_heads: int) -> DecodePlan:
    """A block has an SM to itself. Up to half as many pairs of a sequence and a KV head as SMs,
    splits give each SM one; then as many of 1 to 4 as make an SM's blocks, one after the other,
    take least."""
    pairs = num_sequences * num_kv_heads
    if pairs <= num_sms // 2:
        num_splits = num_sms // pairs
        num_splits = min(MAX_SPLITS, num_splits // 2 * 2 if num_splits > 8 else num_splits)
        return DecodePlan(
            num_splits=num_splits, min_slices=4, num_warps=8, num_stages=2, polls=True
        )

    def time_of(num_splits: int) -> float:
        return -(-pairs * num_splits // num_sms) * (1 / num_splits + START_SHARE)

    num_splits = min(range(1, 5), key=time_of)
    return DecodePlan(num_splits=num_splits, min_slices=8, num_warps=8, num_stages=2)


def page_bytes(pages: MixedPages, fmt: MixedFormat) -> SliceBytes:
    """A page with what comes along, as `MixedPart` of mixed_slice.cuh lays it out."""
    stage_bytes = (
        fmt.k_bytes(pages.k_bits) + 4 * fmt.head_dim + fmt.base_bytes + fmt.fine_bytes + 16
    )
    beside = ARENA_BYTES + (book_bytes(pages.k_bits, fmt) if has_cold(pages) else 0)
    return SliceBytes(keys=PAGE_SIZE, stage_bytes=stage_bytes, beside=beside)


def has_cold(pages: MixedPages) -> bool:
    """Whether any page may be cold."""
    return len(pages.vcold_ZGB) > 0


def book_bytes(k_bits: int, fmt: MixedFormat) -> int:
    """Of the codewords in shared memory: `MixedPart::BOOK`."""
    copies = 8 if fmt.head_dim == 64 else {2: 8, 3: 4, 4: 2}[k_bits]
    return (FIRST + SECOND) * VECTOR * 2 * copies


@functools.cache
def _codewords(device: torch.device) -> torch.Tensor:
    """The codewords in units of 256 of their steps, in which the kernel counts values."""
    with torch.inference_mode(False):
        return (codebook(device).float() / 256).bfloat16()


def kernel_name(pages: MixedPages, fmt: MixedFormat, *, has_table: bool, polls: bool) -> str:
    """The kernel of attend_mixed.cu for bits of keys, D, a table or none, cold pages or none, and
    how splits merge."""
    flags = (pages.k_bits, fmt.head_dim, has_table, has_cold(pages), polls)
    return f"attend_mixed_kernel<{', '.join(str(flag).lower() for flag in flags)}>"


def _tiles() -> AttendPlan:
    """The launch as kernels of page_mass.py see it: 8 rows a tile, whose splits are merged."""
    return AttendPlan(
        tile_tokens=1,
        block_heads=8,
        head_blocks=1,
        block_rows=8,
        num_splits=1,
        min_pages=1,
        grid_splits=1,
        num_warps=1,
        num_stages=1,
        merge_heads=1,
        merge_warps=1,
    )


def _own_arguments(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    window: Window,
    coef_THC: torch.Tensor | None,
    table_PC: torch.Tensor | None,
    share_QBPM: torch.Tensor | None,
    lse_THZ: torch.Tensor | None,
) -> tuple[runtime.Argument, ...]:
    """What comes before those that the kernel has in common with attend.cu's."""
    values = (pages.vbase_XGB, pages.vfine_YGB, pages.vcold_ZGB)
    rows = (pages.k_PGB, *values, pages.sink_XGB, pages.recent_NGE)
    planes: list[runtime.Argument] = []
    for pool in rows:
        planes.append(pool)
        strides = (0, 0) if pool is None else pool.stride()[:2]
        planes.extend(ctypes.c_int64(stride) for stride in strides)
    return (
        q_THD,
        *(ctypes.c_int64(stride) for stride in q_THD.stride()),
        *planes,
        pages.place_P3,
        pages.sink_P,
        window.base_S,
        window.cap_S,
        window.from_S,
        coef_THC,
        table_PC,
        _codewords(q_THD.device) if has_cold(pages) else None,
        share_QBPM,
        lse_THZ,
        pages.num_sinks(fmt),
        window.size,
        0 if table_PC is None else len(table_PC),
        0 if share_QBPM is None else share_QBPM.shape[2],
        int(len(pages.vfine_YGB) > 0),
    )
