"""`attend` on CUDA for decode steps: one query token a sequence, split pages, one launch.

Letters: T tokens, H query heads, G KV heads, D head_dim, P pages of the pool, B bytes of a page,
Z splits. `attend.cu` draws the tiles.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from subten.codecs import KVFormat
from subten.core import PAGE_SIZE
from subten.device import detect
from subten.kernels import attend as triton_attend
from subten.kernels.cuda import runtime
from subten.kernels.kv_append import check_rotation, rotation_stages
from subten.kernels.step import StepTensors

STRUCTS: Mapping[str, str] = {
    "bf16": "KvBf16",
    "fp8": "KvFp8",
    "int8": "KvInt8",
    "int4": "KvInt4",
    "int2": "KvInt2",
    "fp4": "KvFp4",
    "fp4_mx": "KvFp4Mx",
}
"""Codec to its struct in `attend_codecs.cuh`; other codecs go to Triton."""

HEAD_DIMS = (64, 128)

MAX_GROUP = 8
"""Query heads of a KV head. The kernel is written for 16, but with 16, bf16 pages of head dimension
128 and 4097 keys it gave a NaN on an H200, for a reason not found: more than 8 go to Triton."""

MAX_SPLITS = 64
"""The merge keeps the weights of two splits in each lane."""

MAX_ROWS = 65535
"""Pairs of a sequence and a query head that have a counter; more go to Triton."""

MAX_SHARED_BYTES = 216 * 1024
"""Dynamic shared memory of a block on sm_90: 227 KiB, less what the kernels declare (10.8 KiB)."""

MAX_POLLED = 2**20
"""Numbers that splits which poll may leave for their merge; where there are more, they count."""

UNSET_BITS = -1
"""Of a number that is not there yet: `UNSET` of attend_merge.cuh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceBytes:
    """A slice, the keys that a warp takes at once, as `Part` of `attend_codecs.cuh` lays it out,
    and a block's dynamic shared memory beside its rings."""

    keys: int
    stage_bytes: int
    beside: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """Launch choices of one call.

    A sequence of n slices is cut into ceil(n / max(min_slices, ceil(n / num_splits))) splits, each
    a block of `num_warps` warps per KV head; a warp has `num_stages` stages, each K or V of one
    slice, of int2 and of adaptive pages both. The first three decide the order of sums.

    With `polls` the splits merge a head each, and wait for the numbers of the others, instead of
    whichever arrives last at a counter; only where all blocks are on an SM at once.

    With `fills` a single sequence's launch has a block for each SM, some of which have no work and
    end with the launch ahead. Where two blocks fit an SM, those of the next launch then find the
    same room on all of them; else the SMs without a block get two, and it takes twice as long.
    """

    num_splits: int
    min_slices: int
    num_warps: int = 8
    num_stages: int = 4
    polls: bool = False
    fills: bool = False

    def check(self, group: int, slice_bytes: SliceBytes) -> None:
        """Assert what the kernel relies on."""
        assert 1 <= self.num_splits <= MAX_SPLITS and self.min_slices >= 1, self
        assert 1 <= self.num_warps <= (16 if group <= 8 else 8), (self, group)
        # Two stages are the least that the warps' sums fit into at the end.
        assert self.num_stages >= 2, self
        assert self.shared_bytes(slice_bytes) <= MAX_SHARED_BYTES, (self, slice_bytes)

    def shared_bytes(self, slice_bytes: SliceBytes) -> int:
        """Dynamic shared memory of a block: the rings of its warps, and what lies beside them."""
        num_bytes = self.num_warps * self.num_stages * slice_bytes.stage_bytes + slice_bytes.beside
        # Where splits poll, 16 rows of sums lie there at the end.
        num_bytes = max(num_bytes, 8 * 1024)
        # Above 48 KiB, declared memory included, a kernel must be allowed to: the launch asks for
        # that where the dynamic part alone is above.
        return num_bytes if num_bytes <= 31 * 1024 else max(num_bytes, 48 * 1024 + 16)


FULL_BLOCKS: Mapping[str, tuple[int, int, int, bool]] = {
    "bf16": (4, 12, 2, True),
    "int4": (4, 12, 2, True),
    "int2": (4, 12, 2, True),
    "fp4": (4, 16, 2, True),
    "fp4_mx": (4, 16, 2, True),
}
"""Codec to (min_slices, warps, stages, fills) of blocks that have an SM each; others take
(8, 12, 2, False)."""


def plan_decode(
    fmt: KVFormat, *, num_sms: int, num_sequences: int, num_kv_heads: int
) -> DecodePlan:
    """Choose splits by the number of pairs of a sequence and a KV head.

    Up to as many pairs as SMs, splits that give each SM one block; up to twice as many, none, and
    two blocks an SM; then 4 a pair, as long as a pair has not four SMs to wait for. So the split of
    a sequence depends on its own length and on how many there are. Where less than two thirds of
    the SMs would have a large block, as many smaller ones as fit two an SM are faster.

    Two stages everywhere: an SM that has given its shared memory to attention has little L1 left,
    through which the kernels around, which start early, fetch their weights. With three, a layer
    of 32 sequences of qwen3-30b-a3b takes 44 us longer, and one of a single sequence with an fp8
    cache at 128k 23 us (docs/performance.md). Plans of one sequence are those with which a whole
    layer is fastest, or nearly, at 1k, 32k and 128k tokens (benchmarks/plans/
    h200-attend-layer.json), those of several with which a step is (h200-attend-batch.json); by
    itself attention would rather have deeper rings (h200-attend-fills.json). Polling saves 0.5 to
    2.2 us wherever there is something to merge.

    A single split, which merges nothing, is not the fastest even at 1k: a merge of four costs what
    their parallel work saves.
    """
    pairs = num_sequences * num_kv_heads
    min_slices, num_warps, num_stages, fills = FULL_BLOCKS.get(fmt.codec.name, (8, 12, 2, False))
    if 3 * pairs > 2 * num_sms:
        num_splits = 1 if pairs <= 2 * num_sms or pairs >= 4 * num_sms else 4
        num_warps = num_warps if pairs <= num_sms else 8
        return DecodePlan(num_splits=num_splits, min_slices=8, num_warps=num_warps, num_stages=2)
    if 2 * pairs > num_sms:
        num_splits = 2 * num_sms // pairs
        return DecodePlan(num_splits=num_splits, min_slices=8, num_warps=8, num_stages=2)
    # Even: lengths that are powers of two then divide as evenly as they can.
    num_splits = num_sms // pairs
    num_splits = min(MAX_SPLITS, num_splits // 2 * 2 if num_splits > 8 else num_splits)
    return DecodePlan(
        num_splits=num_splits,
        min_slices=min_slices,
        num_warps=num_warps,
        num_stages=num_stages,
        polls=True,
        fills=fills,
    )


def kernel_name(fmt: KVFormat, head_dim: int, group: int, *, polls: bool) -> str:
    """The kernel of attend.cu for a codec, D, query heads of a KV head, and how splits merge."""
    arguments = (STRUCTS[fmt.codec.name], head_dim, 1 if group <= 8 else 2, str(polls).lower())
    return f"attend_kernel<{', '.join(map(str, arguments))}>"


def slice_bytes(fmt: KVFormat) -> SliceBytes:
    """Keys of a slice and bytes of a stage: codes, padding between quarters, metadata, barrier; of
    int2 those of K and V."""
    keys = min(PAGE_SIZE, 4096 // fmt.row.codes)
    padding = 0 if fmt.row.codes < fmt.head_dim else 4 * 32
    num_parts = 2 if fmt.codec.name == "int2" else 1
    part_bytes = num_parts * fmt.page_bytes // 2 * keys // PAGE_SIZE
    barrier_at = -(-(part_bytes + padding) // 8) * 8
    return SliceBytes(keys=keys, stage_bytes=-(-(barrier_at + 8) // 16) * 16)


def attend(
    q_THD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    step: StepTensors,
    *,
    scale: float,
    rotation_DD: torch.Tensor | None = None,
    key_bias_GD: torch.Tensor | None = None,
    cos_sin_PD: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """`subten.kernels.attend.attend` in one CUDA launch, for steps of single tokens.

    Codecs, head dims, groups and dtypes that the kernel does not take, keys that lack a bias, and
    steps with more than one token of a sequence, go to Triton. `plan` and `pdl` (programmatic
    dependent launch) are for measuring. Launches on one device must follow one another: they share
    counters, which return to zero; the first one, outside of any graph capture, allocates them.

    With `pdl` only q and the newest row of each sequence may come from kernels that still run when
    this one starts. The integers of `step`, and all rows before the newest, are read at once: a
    copy, or a kernel ahead of one that was launched without `pdl`, must have written them.

    Rounding is as there: rotated q and P * V scale to bfloat16, and codes not at all.
    """
    if key_bias_GD is not None or not suits(q_THD, pages_PGB, fmt, step):
        return triton_attend.attend(
            q_THD,
            pages_PGB,
            fmt,
            step,
            scale=scale,
            rotation_DD=rotation_DD,
            key_bias_GD=key_bias_GD,
            cos_sin_PD=cos_sin_PD,
        )
    num_kv_heads = triton_attend.check_attend(q_THD, pages_PGB, fmt, step)
    check_rotation(rotation_DD, fmt)
    rotation_stages(rotation_DD)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if len(step.tile_seq_Q) == 0 or len(q_THD) == 0:
        return out_THD
    launch = decode_launch(q_THD, num_kv_heads, fmt, step, scale=scale, plan=plan)
    runtime.launch(
        "attend.cu",
        kernel_name(fmt, fmt.head_dim, launch.group, polls=launch.polls),
        launch.grid,
        launch.num_threads,
        (
            q_THD,
            *(ctypes.c_int64(stride) for stride in q_THD.stride()),
            pages_PGB,
            ctypes.c_int64(pages_PGB.stride(0)),
            ctypes.c_int64(pages_PGB.stride(1)),
            step.page_table_SP,
            ctypes.c_int64(step.page_table_SP.stride(0)),
            step.position_T,
            step.kv_len_S,
            step.tile_seq_Q,
            step.tile_start_Q,
            out_THD,
            *launch.last_arguments,
        ),
        device=q_THD.device,
        shared_bytes=launch.shared_bytes,
        pdl=pdl,
    )
    return out_THD


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLaunch:
    """Grid, memory and last arguments of a launch; `attend` and `append_attend` have the same."""

    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    group: int
    polls: bool
    last_arguments: tuple[runtime.Argument, ...]


def decode_launch(
    q_THD: torch.Tensor,
    num_kv_heads: int,
    fmt: KVFormat,
    step: StepTensors,
    *,
    scale: float,
    plan: DecodePlan | None,
) -> DecodeLaunch:
    """`launch_splits` of a codec's slices; chooses a plan if none is given."""
    if plan is None:
        plan = plan_decode(
            fmt,
            num_sms=_num_sms(q_THD.device),
            num_sequences=len(step.tile_seq_Q),
            num_kv_heads=num_kv_heads,
        )
    return launch_splits(q_THD, num_kv_heads, slice_bytes(fmt), step, scale=scale, plan=plan)


def launch_splits(
    q_THD: torch.Tensor,
    num_kv_heads: int,
    layout: SliceBytes,
    step: StepTensors,
    *,
    scale: float,
    plan: DecodePlan,
) -> DecodeLaunch:
    """Allocate what the splits leave for their merge, and say how to launch them."""
    device, num_tiles = q_THD.device, len(step.tile_seq_Q)
    num_heads, head_dim = q_THD.shape[1:]
    group = num_heads // num_kv_heads
    plan.check(group, layout)
    assert scale > 0, scale
    max_slices = -(-step.max_kv_len // layout.keys)
    grid_splits = max(1, min(plan.num_splits, -(-max_slices // plan.min_slices)))
    part, part_stats = None, None
    num_parts = num_tiles * num_heads * plan.num_splits
    num_blocks = num_kv_heads * num_tiles * grid_splits
    polls = (
        plan.polls
        and grid_splits > 1
        and num_parts * (head_dim + 2) <= MAX_POLLED
        and (device.type != "cuda" or num_blocks <= _num_sms(device))
    )
    if polls:
        parts = _unset_parts(device)
        part, part_stats = parts, parts[num_parts * head_dim :]
    elif grid_splits > 1:
        part = torch.empty(num_parts, head_dim, dtype=torch.float32, device=device)
        part_stats = torch.empty(num_parts, 2, dtype=torch.float32, device=device)
    grid = (num_kv_heads, num_tiles, grid_splits)
    if plan.fills and num_tiles == 1 and num_blocks < _num_sms(device):
        grid = (_num_sms(device), 1, 1)
    return DecodeLaunch(
        grid=grid,
        num_threads=32 * plan.num_warps,
        shared_bytes=plan.shared_bytes(layout),
        group=group,
        polls=polls,
        last_arguments=(
            part,
            part_stats,
            _counters(device),
            scale * math.log2(math.e),
            num_kv_heads,
            group,
            plan.num_splits,
            plan.min_slices,
            plan.num_stages,
        ),
    )


def suits(q_THD: torch.Tensor, pages_PGB: torch.Tensor, fmt: KVFormat, step: StepTensors) -> bool:
    """Whether the kernel takes this call."""
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = pages_PGB.shape[1]
    return (
        step.max_query_len == 1
        and q_THD.dtype == torch.bfloat16
        and fmt.codec.name in STRUCTS
        and head_dim in HEAD_DIMS
        and num_heads <= MAX_GROUP * num_kv_heads
        and len(step.tile_seq_Q) * num_heads <= MAX_ROWS
        # Bulk copies move multiples of 16 bytes between multiples of 16.
        and pages_PGB.data_ptr() % 16 == 0
        and pages_PGB.stride(0) % 16 == 0
        and pages_PGB.stride(1) % 16 == 0
        and has_bulk_copies(q_THD.device)
    )


@functools.cache
def has_bulk_copies(device: torch.device) -> bool:
    """Whether the device copies in bulk, from compute capability 9.0 on, and a block of it has the
    shared memory that plans want: consumers' GPUs of 12.0 have less than half."""
    is_new = device.type != "cuda" or detect(str(device)).capability >= (9, 0)
    return is_new and runtime.max_shared_bytes(device) >= MAX_SHARED_BYTES


@functools.cache
def _num_sms(device: torch.device) -> int:
    return detect(str(device)).num_sms


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """How many splits of each query head have arrived; zero between launches."""
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "the first attend on a device must run outside of graph capture"
    return torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)


@functools.cache
def _unset_parts(device: torch.device) -> torch.Tensor:
    """What splits that poll leave for their merge; unset between launches."""
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "the first attend on a device must run outside of graph capture"
    bits = torch.full((MAX_POLLED,), UNSET_BITS, dtype=torch.int32, device=device)
    return bits.view(torch.float32)
