"""`linear` for the tokens of a batch on CUDA: plans and launches of `linear_tiles.cu`.

Letters: T tokens, N output features, K inputs.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from subten.kernels.cuda import runtime
from subten.kernels.cuda.gemv import (
    FLOAT_DTYPES,
    MAX_SHARED_BYTES,
    has_rows,
    is_plain,
)
from subten.kernels.cuda.grouped import FORMATS
from subten.kernels.norm_rope import rms_norm
from subten.kernels.weight_formats import Weight

TILE_ROWS = 32
"""Rows of a warp."""

MAX_TOKENS = 48
"""Tokens up to which weights are decoded for each tile of tokens; above, once, for cuBLAS. At 32,
qkv and output of qwen3-30b-a3b in FP8 take 11.8 and 10.1 us against 15.7 and 15.2; at 64 cuBLAS
takes 16.1 and 16.1 (benchmarks/plans/h200-linear-plans.json)."""

TILES = (1, 2, 4, 6)
"""Tiles of 8 tokens that a block may hold."""

MAX_SLICE = 2048
"""Inputs of a block, as far as a rule goes: so many of 32 tokens leave room for sums."""

MAX_NORMED_SLICE = 1024
"""Inputs of a block up to which it norms them itself, from float32 in shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePlan:
    """How one launch shares a matrix out.

    K is cut into `slices`, one for each block of a cluster, and these into `warps_k` parts; a block
    has `warps_n` warps of 32 rows for each part, each with 2 * `depth` KiB of weights in flight.
    Parts decide the order of sums, so none of this depends on the number of tokens but `depth`,
    which is at most what many tokens leave registers for.
    """

    slices: int
    warps_n: int
    warps_k: int
    depth: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.warps_n * self.warps_k

    @property
    def rows(self) -> int:
        """Rows of a block at a time."""
        return TILE_ROWS * self.warps_n

    def slice_inputs(self, dim: int, block: int) -> int:
        """Inputs of the longest slice."""
        num_blocks, parts = dim // block, self.slices * self.warps_k
        edges = [num_blocks * i * self.warps_k // parts for i in range(self.slices + 1)]
        return block * max(b - a for a, b in itertools.pairwise(edges))

    def norms(self, dim: int, weight_format: str) -> bool:
        """Whether the kernel norms float32 inputs; otherwise a launch before it does."""
        return self.slice_inputs(dim, FORMATS[weight_format].block) <= MAX_NORMED_SLICE

    def check(self, dim: int, weight_format: str) -> None:
        """Assert what the kernel relies on."""
        assert 1 <= self.slices <= 8, self
        assert self.slices * self.warps_k <= dim // FORMATS[weight_format].block, (self, dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchShape:
    """A launch for so many tokens: tiles of 8 a block, tiles of that size, lanes, bytes."""

    tiles: int
    num_tiles: int
    lanes: int
    row_bytes: int
    buffer_floats: int
    region_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Tokens, the region of raw tokens or sums, and two numbers a token."""
        return 8 * self.tiles * (self.row_bytes + 8) + self.region_bytes


MEASURED: Mapping[tuple[int, int, str], tuple[int, int, int, int]] = {
    (5120, 2048, "fp8"): (4, 6, 2, 2),
    (2048, 4096, "fp8"): (8, 5, 2, 2),
    (151936, 2048, "fp8"): (2, 8, 1, 4),
}
"""(N, K, format) to the fastest (slices, warps_n, warps_k, depth) for 32 tokens of qwen3-30b-a3b on
an H200 (benchmarks/plans/h200-linear-plans.json, by `benchmarks/linear_bench.py --plans all`)."""

SLOTS: Mapping[int, int] = {1: 132, 2: 132, 4: 108, 8: 104}
"""Blocks that run at once in clusters of a size: those of 4 and 8 leave some SMs of a GPC idle.
With 120 or 128 blocks of such clusters a launch took two waves, twice as long."""


def plan_tiles(num_rows: int, dim: int, weight_format: str) -> TilePlan:
    """As measured, or else by a rule: a small matrix in one wave, a large one in 8 warps an SM.

    Of the ways to give each SM one block, the one that reads least on the busiest SM, 32 tokens of
    float32 included.
    """
    measured = MEASURED.get((num_rows, dim, weight_format))
    if measured is not None:
        slices, warps_n, warps_k, depth = measured
        return TilePlan(slices=slices, warps_n=warps_n, warps_k=warps_k, depth=depth)
    num_blocks, strips = dim // FORMATS[weight_format].block, num_rows // TILE_ROWS
    row_bytes = 64 * num_blocks
    best, least = None, 0.0
    for slices, slots in SLOTS.items():
        warps_n = -(-strips // (slots // slices))
        if warps_n > 12 or slices > num_blocks or dim > MAX_SLICE * slices:
            continue
        busiest = (warps_n * TILE_ROWS * row_bytes + 32 * 4 * dim) / slices
        if best is None or busiest < least:
            best, least = (slices, warps_n), busiest
    if best is None:
        best = (2 if dim <= 2 * MAX_SLICE else min(8, num_blocks, -(-dim // MAX_SLICE)), 8)
        best = (min(best[0], num_blocks), best[1])
    slices, warps_n = best
    warps_k = next(
        k for k in (8, 4, 2, 1) if k == 1 or k <= min(12 // warps_n, num_blocks // slices)
    )
    return TilePlan(slices=slices, warps_n=warps_n, warps_k=warps_k, depth=4)


def linear(
    x_TK: torch.Tensor,
    weight: Weight,
    *,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: TilePlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """`subten.kernels.linear.linear` in one CUDA launch, and one before it for the norm of a
    matrix so large that its blocks keep whole rows of tokens.

    `suits` says what it takes; `plan` and `pdl` (programmatic dependent launch) are for measuring.
    Weights, scales and bias are read before earlier kernels of the stream have ended.
    """
    (num_tokens, dim), num_rows = x_TK.shape, weight.shape[0]
    if out_dtype is None:
        out_dtype = weight.dtype if residual_TN is None else residual_TN.dtype
    out_TN = torch.empty(num_tokens, num_rows, dtype=out_dtype, device=x_TK.device)
    plan = plan or plan_tiles(num_rows, dim, weight.format)
    plan.check(dim, weight.format)
    if norm_weight_K is not None and not (
        x_TK.dtype == torch.float32 and plan.norms(dim, weight.format)
    ):
        x_TK, norm_weight_K = rms_norm(x_TK, norm_weight_K, eps=eps), None
    is_normed = norm_weight_K is not None
    shape = launch_shape(num_tokens, num_rows, dim, weight.format, plan, is_normed=is_normed)
    runtime.launch(
        "linear_tiles.cu",
        kernel_name(weight.format, shape.tiles, plan, is_normed=is_normed),
        (plan.slices, shape.num_tiles, shape.lanes),
        32 * plan.warps,
        (
            weight.codes,
            weight.scale,
            x_TK,
            ctypes.c_int64(x_TK.stride(0) * x_TK.element_size()),
            norm_weight_K,
            float(eps),
            bias_N,
            residual_TN,
            ctypes.c_int64(0 if residual_TN is None else residual_TN.stride(0)),
            int(residual_TN is not None and residual_TN.dtype == torch.bfloat16),
            out_TN,
            int(out_dtype == torch.bfloat16),
            num_tokens,
            num_rows,
            dim,
            plan.warps_k,
            shape.row_bytes,
            shape.buffer_floats,
            shape.region_bytes,
        ),
        device=x_TK.device,
        shared_bytes=shape.shared_bytes,
        pdl=pdl,
        cluster=plan.slices,
    )
    return out_TN


def kernel_name(weight_format: str, tiles: int, plan: TilePlan, *, is_normed: bool) -> str:
    """The kernel's instance in C++."""
    # Sums of 48 tokens, or of groups of many warps, leave registers for less of a ring.
    is_short = tiles == TILES[-1] or (weight_format == "int4" and plan.warps > 8)
    depth = min(plan.depth, 2) if is_short else plan.depth
    struct = FORMATS[weight_format].struct
    parameters = (struct, tiles, plan.warps, depth, str(is_normed).lower())
    return f"linear_tiles_kernel<{', '.join(map(str, parameters))}>"


def suits(
    x_TK: torch.Tensor,
    weight: Weight,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> bool:
    """Whether the kernel takes these tensors, however many tokens: dtypes, whole tiles, memory."""
    num_rows, dim = weight.shape
    vectors = [v for v in (bias_N, norm_weight_K) if v is not None]
    tensors = [weight.codes, *vectors] + ([] if weight.scale is None else [weight.scale])
    return (
        x_TK.shape[0] > 0
        and weight.format in FORMATS
        and weight.dtype == torch.bfloat16
        and num_rows % TILE_ROWS == 0
        and dim % FORMATS[weight.format].block == 0
        # Between rows of a warp lies a 32-bit distance.
        and 2 * dim * TILE_ROWS < 2**31
        and x_TK.dtype in (FLOAT_DTYPES if norm_weight_K is not None else (torch.bfloat16,))
        and has_rows(x_TK)
        and all(v.dtype == torch.bfloat16 for v in vectors)
        and all(is_plain(t) for t in tensors)
        and (residual_TN is None or residual_TN.dtype in FLOAT_DTYPES)
        and (residual_TN is None or residual_TN.stride(1) == 1)
        and (out_dtype is None or out_dtype in FLOAT_DTYPES)
        and (x_TK.device.type == "cpu" or runtime.has_clusters(x_TK.device))
        and runtime.max_shared_bytes(x_TK.device) >= MAX_SHARED_BYTES
    )


def launch_shape(
    num_tokens: int, num_rows: int, dim: int, weight_format: str, plan: TilePlan, *, is_normed: bool
) -> LaunchShape:
    """The smallest tile of tokens that holds them all, or the largest that fits an SM."""
    block = FORMATS[weight_format].block
    slice_inputs, num_groups = plan.slice_inputs(dim, block), -(-num_rows // plan.rows)
    slots = next(SLOTS[size] for size in SLOTS if size >= plan.slices)
    fitting = None
    # Sums of 48 tokens, twice for groups, are too many for 168 registers.
    has_room = weight_format != "int4" or plan.warps <= 8
    for tiles in TILES if has_room else TILES[:-1]:
        num_tiles = -(-num_tokens // (8 * tiles))
        lanes = num_groups
        if num_groups * plan.slices > slots:
            lanes = min(num_groups, max(1, slots // (plan.slices * num_tiles)))
        buffer_floats = plan.warps_k * 8 * tiles * (plan.rows + 4)
        if lanes == num_groups:
            buffer_floats, sum_floats = 0, buffer_floats
        else:
            sum_floats = 2 * buffer_floats
        raw_floats = min(num_tokens, 8 * tiles) * slice_inputs if is_normed else 0
        shape = LaunchShape(
            tiles=tiles,
            num_tiles=num_tiles,
            lanes=lanes,
            # An odd number of 64 bytes.
            row_bytes=-(-2 * slice_inputs // 128) * 128 + 64,
            buffer_floats=buffer_floats,
            region_bytes=4 * max(sum_floats, raw_floats),
        )
        if shape.shared_bytes > MAX_SHARED_BYTES:
            break
        fitting = shape
        if num_tiles == 1:
            break
    assert fitting is not None, (dim, plan)
    return fitting
