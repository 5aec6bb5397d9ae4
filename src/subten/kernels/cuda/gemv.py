"""Matrix-vector products for 1 to 8 tokens on CUDA: plans, the launch of `linear`, shared memory.

Letters: T tokens, N output features, K inputs. `gemv.cuh` says how weights become fragments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from subten.kernels import linear as triton_linear
from subten.kernels.cuda import runtime
from subten.kernels.weight_formats import Weight

MAX_TOKENS = 8
"""Columns of the tensor cores' B operand."""

TILE_ROWS = 16

BLOCK_BYTES = 64
"""Of a block of a row's codes, in every format."""

NUM_SMS = 132
"""Of an H100 or H200; plans aim at it. Any other number works."""

KEPT_UNITS = 2
"""Units of 8 inputs of x that a thread keeps in registers: `KEPT` of gemv.cuh."""

MAX_SHARED_BYTES = 226 * 1024
"""Dynamic shared memory of a block on sm_90: 227 KiB, less what kernels declare."""

FLOAT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFormat:
    """A weight format in `gemv.cuh`: its struct, inputs of a block, and the ring depths without
    spills at 128 registers (`nvcc -Xptxas -v`, 13.0)."""

    struct: str
    block: int
    depths: tuple[int, ...]
    has_groups: bool = False


FORMATS: Mapping[str, DeviceFormat] = {
    "none": DeviceFormat(struct="Bf16", block=32, depths=(2, 4, 6, 8)),
    "fp8": DeviceFormat(struct="Fp8", block=64, depths=(2, 4, 6, 8)),
    "int4": DeviceFormat(struct="Int4", block=128, depths=(2, 4, 6), has_groups=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvPlan:
    """How one launch shares the work out.

    A block has `warps_k` warps along K for each of `warps_n` lanes of tiles, each lane doing
    `tiles` tiles of 16 rows in turn; a warp keeps `depth` KiB of weights in flight. `warps_k`
    decides the order of sums, so it must not depend on the number of tokens: a token's bits are
    the same alone and among others. With `starts_early` the launch may begin, and fetch weights,
    while the one ahead still runs (programmatic dependent launch).
    """

    warps_k: int
    warps_n: int = 1
    tiles: int = 1
    depth: int = 4
    starts_early: bool = True

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_k * self.warps_n

    def check(self, dim: int, weight_format: DeviceFormat) -> None:
        """Assert what the kernels rely on."""
        assert 1 <= self.warps_k * self.warps_n <= 16, self
        assert self.warps_k <= dim // weight_format.block, (self, dim)
        # One thread finishes one row.
        assert 1 <= self.tiles <= 2 * self.warps_k, self
        assert self.depth in weight_format.depths, (self, weight_format)


MEASURED: Mapping[tuple[int, int, str], tuple[int, int, int, int]] = {
    (320, 2048, "none"): (4, 3, 1, 6),
    (320, 2048, "fp8"): (4, 3, 1, 4),
    (320, 2048, "int4"): (4, 3, 1, 4),
    (128, 4096, "none"): (16, 1, 1, 2),
    (128, 4096, "fp8"): (16, 1, 1, 4),
    (128, 4096, "int4"): (16, 1, 1, 2),
    (9496, 2048, "none"): (4, 2, 1, 8),
    (9496, 2048, "fp8"): (2, 4, 2, 6),
    (9496, 2048, "int4"): (1, 4, 2, 2),
    (768, 2048, "none"): (4, 2, 1, 4),
    (768, 2048, "fp8"): (4, 3, 1, 2),
    (768, 2048, "int4"): (4, 3, 1, 2),
    (384, 4096, "none"): (4, 3, 1, 8),
    (384, 4096, "fp8"): (4, 3, 1, 2),
    (384, 4096, "int4"): (4, 2, 1, 4),
    (256, 4096, "none"): (8, 2, 1, 6),
    (256, 4096, "fp8"): (8, 1, 1, 2),
    (256, 4096, "int4"): (8, 1, 1, 4),
    (2000, 4096, "none"): (4, 2, 4, 6),
    (2000, 4096, "fp8"): (4, 2, 4, 4),
    (2000, 4096, "int4"): (1, 8, 1, 6),
    (3584, 4096, "none"): (8, 1, 1, 4),
    (3584, 4096, "fp8"): (2, 8, 4, 4),
    (3584, 4096, "int4"): (1, 8, 2, 6),
}
"""(tiles of 16 rows, K, format) to the fastest (warps_k, warps_n, tiles, depth) of some 100.

The matrices of qwen3-30b-a3b and mixtral-8x7b: qkv, output, head, and gate and up of the chosen
experts, within a chain of a layer's kernels, cold L2, on an H200:
`benchmarks/gemv_bench.py --chain --plans all`, benchmarks/plans/h200-gemv-plans.json; the output
of qwen3-30b-a3b with attention in the chain too, benchmarks/plans/h200-layer-plans.json.
"""


def plan_gemv(num_tiles: int, dim: int, weight_format: str) -> GemvPlan:
    """Plan of a matrix of `num_tiles` tiles of 16 rows: as measured, or else by a rule.

    The rule is a guess. Few tiles: more warps along K until 9 warps an SM share the work, so that
    all of it is in flight at once. Many tiles: 8 warps a block on neighbouring tiles, so that x is
    prepared less often, and short enough blocks for an even end.
    """
    measured = MEASURED.get((num_tiles, dim, weight_format))
    if measured is not None:
        warps_k, warps_n, tiles, depth = measured
        return GemvPlan(warps_k=warps_k, warps_n=warps_n, tiles=tiles, depth=depth)
    device_format = FORMATS[weight_format]
    num_blocks = dim // device_format.block
    is_large = num_tiles >= 16 * NUM_SMS
    warps_k = 4 if is_large else 1
    while warps_k < 16 and num_tiles * warps_k < 9 * NUM_SMS:
        warps_k *= 2
    while warps_k > num_blocks:
        warps_k //= 2
    warps_n = max(1, (8 if is_large else 4) // warps_k)
    tiles = max(1, min(4, 2 * warps_k, num_tiles // (warps_n * 8 * NUM_SMS)))
    warps_sm = min(16, -(-num_tiles * warps_k // NUM_SMS))
    return GemvPlan(
        warps_k=warps_k,
        warps_n=warps_n,
        tiles=tiles,
        depth=choose_depth(device_format, tiles * num_blocks // warps_k, warps_sm),
    )


MEASURED_AHEAD: Mapping[tuple[int, int, str], tuple[int, int, int, int]] = {
    (128, 4096, "none"): (16, 1, 1, 6),
    (128, 4096, "fp8"): (8, 1, 1, 2),
    (128, 4096, "int4"): (16, 1, 1, 4),
    (256, 4096, "fp8"): (8, 2, 1, 4),
    (3584, 4096, "fp8"): (2, 4, 4, 6),
}
"""As MEASURED, of the output product and of gate and up where experts are chosen ahead.

`benchmarks/gemv_bench.py --chain --ways ahead --plans joint --attention int4 1024`, then with a
bfloat16 cache too: benchmarks/plans/h200-route-ahead.json and h200-route-ahead-plans.json.
"""


def plan_ahead(num_tiles: int, dim: int, weight_format: str) -> GemvPlan:
    """Plan of a matrix of `linear_route`, or of gate and up after it."""
    measured = MEASURED_AHEAD.get((num_tiles, dim, weight_format))
    if measured is None:
        plan = plan_gemv(num_tiles, dim, weight_format)
        # Threads enough to have all of x in registers.
        while units_of_thread(dim, plan) > KEPT_UNITS and plan.num_threads <= 256:
            plan = replace(plan, warps_n=2 * plan.warps_n)
        return plan
    warps_k, warps_n, tiles, depth = measured
    return GemvPlan(warps_k=warps_k, warps_n=warps_n, tiles=tiles, depth=depth)


def choose_depth(device_format: DeviceFormat, blocks_of_warp: int, warps_sm: int) -> int:
    """The least depth with 48 KiB in flight an SM (4.5 TB/s take about 26 at 800 ns), or all."""
    for depth in device_format.depths:
        if depth >= blocks_of_warp or depth * warps_sm >= 48:
            return depth
    return device_format.depths[-1]


def shared_bytes(
    weight_format: str, num_columns: int, dim: int, num_partials: int, *, zero_columns: int
) -> int:
    """Bytes that `Shared` of gemv.cuh lays out, and floats of partial sums after them."""
    device_format = FORMATS[weight_format]
    x_bytes = num_columns * (-(-2 * dim // 128) * 128 + 64)
    groups = dim // device_format.block if device_format.has_groups else 0
    return x_bytes + 4 * (-(-groups * zero_columns // 4) * 4 + num_partials)


def suits_weight(weight: Weight, tile_rows: int) -> bool:
    """Whether the kernels take a weight's dtype, shape and memory."""
    device_format = FORMATS.get(weight.format)
    num_rows, dim = weight.shape[-2:]
    return (
        device_format is not None
        and weight.dtype == torch.bfloat16
        and num_rows % tile_rows == 0
        and dim % device_format.block == 0
        and is_plain(weight.codes)
        and (weight.scale is None or is_plain(weight.scale))
    )


def kernel_name(kernel: str, weight_format: str, plan: GemvPlan, *flags: bool) -> str:
    """A kernel's instance in C++: format, ring depth, and its flags."""
    arguments = [FORMATS[weight_format].struct, str(plan.depth)]
    arguments += [str(flag).lower() for flag in flags]
    return f"{kernel}<{', '.join(arguments)}>"


def units_of_thread(dim: int, plan: GemvPlan) -> int:
    """Units of 8 inputs that a thread prepares of one token's x."""
    return -(-dim // (8 * plan.num_threads))


def is_one_token(num_tokens: int, dim: int, plan: GemvPlan) -> bool:
    """Whether the threads of a block hold all of x in registers."""
    return num_tokens == 1 and units_of_thread(dim, plan) <= KEPT_UNITS


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether 16-byte loads may read the tensor as one run of memory."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def has_rows(x_TK: torch.Tensor) -> bool:
    """Whether 16-byte loads may read each row."""
    row_bytes = x_TK.stride(0) * x_TK.element_size()
    return x_TK.stride(1) == 1 and row_bytes % 16 == 0 and x_TK.data_ptr() % 16 == 0


def linear(
    x_TK: torch.Tensor,
    weight: Weight,
    *,
    bias_N: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: GemvPlan | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """`subten.kernels.linear.linear` in one CUDA launch, for 1 to 8 tokens.

    Other numbers of tokens, and dtypes or shapes that the kernel does not take, go to Triton.
    `plan` and `pdl` (programmatic dependent launch, if the plan starts early) are for measuring.
    With `pdl` the kernel reads weights, norm and bias before earlier kernels of the stream have
    ended: they must be in place since before the previous launch. Quantised weights take |h| below
    2^63.
    """
    if not _suits_linear(x_TK, weight, bias_N, norm_weight_K, residual_TN, out_dtype):
        return triton_linear.linear(
            x_TK,
            weight,
            bias_N=bias_N,
            norm_weight_K=norm_weight_K,
            eps=eps,
            residual_TN=residual_TN,
            out_dtype=out_dtype,
        )
    num_tokens, dim = x_TK.shape
    num_rows = weight.shape[0]
    if out_dtype is None:
        out_dtype = weight.dtype if residual_TN is None else residual_TN.dtype
    out_TN = torch.empty(num_tokens, num_rows, dtype=out_dtype, device=x_TK.device)
    plan = plan or plan_gemv(num_rows // TILE_ROWS, dim, weight.format)
    plan.check(dim, FORMATS[weight.format])
    lanes = plan.warps_n * plan.tiles
    runtime.launch(
        "linear.cu",
        kernel_name(
            "linear_kernel",
            weight.format,
            plan,
            x_TK.dtype == torch.bfloat16,
            is_one_token(num_tokens, dim, plan),
        ),
        (-(-num_rows // (TILE_ROWS * lanes)),),
        plan.num_threads,
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
            plan.tiles,
        ),
        device=x_TK.device,
        shared_bytes=linear_shared(weight.format, num_tokens, dim, plan),
        pdl=pdl and plan.starts_early,
    )
    return out_TN


def linear_shared(weight_format: str, num_tokens: int, dim: int, plan: GemvPlan) -> int:
    """Dynamic shared memory of `linear` and of gate and up, bytes."""
    num_partials = plan.warps_n * plan.tiles * plan.warps_k * TILE_ROWS * MAX_TOKENS
    return shared_bytes(weight_format, num_tokens, dim, num_partials, zero_columns=MAX_TOKENS)


def _suits_linear(
    x_TK: torch.Tensor,
    weight: Weight,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> bool:
    num_tokens, dim = x_TK.shape
    if not 1 <= num_tokens <= MAX_TOKENS or not suits_weight(weight, TILE_ROWS):
        return False
    plan = plan_gemv(weight.shape[0] // TILE_ROWS, dim, weight.format)
    vectors = [v for v in (bias_N, norm_weight_K) if v is not None]
    return (
        (
            x_TK.dtype == torch.bfloat16
            or (x_TK.dtype == torch.float32 and norm_weight_K is not None)
        )
        and has_rows(x_TK)
        and all(v.dtype == torch.bfloat16 and is_plain(v) for v in vectors)
        and (residual_TN is None or residual_TN.dtype in FLOAT_DTYPES)
        and (residual_TN is None or residual_TN.stride(1) == 1)
        and (out_dtype is None or out_dtype in FLOAT_DTYPES)
        and linear_shared(weight.format, num_tokens, dim, plan)
        <= runtime.max_shared_bytes(x_TK.device)
    )
