"""Times decode attention of whole models, op by op: CUDA and Triton, every codec, on one GPU.

    python benchmarks/attend_bench.py
    python benchmarks/attend_bench.py --ops cuda --try-plans
    python benchmarks/attend_bench.py --ops cuda --batch 1 --context 32768 131072 --ratios
    python benchmarks/attend_bench.py --chain --json attend-chain.json
    python benchmarks/attend_bench.py --shape qwen3-30b-a3b --codec int4 --context 32768 \
        --ops cuda --plan 32,4,8,3 --plan 32,4,16,2

A case is one CUDA graph of a call per layer, each layer with pages of its own, shuffled. L2 is
overwritten before each replay, and the time is between two events around it, so the launch of the
graph is inside. One JSON line a case:

    us_per_layer, ms          median over replays of the whole graph, per layer and in all
    kv_bytes                  bytes of pages that all layers together must read
    tb_s, roof_share          kv_bytes / time, and its share of the read-only roof of this run
    error                     largest difference between the op and Triton's, on the last layer

`--ratios` ends with a table of the chosen plans: us a layer, share of the roof, and how many times
as fast as int4 each codec is.

`--chain` times what attention adds to a chain of all of a layer's kernels, for several plans:
`append_attend`, and `kv_append` with `attend`. It prints a table; `attend_chain.py` says more.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attend_chain import CHAIN_CODECS, CHAIN_CONTEXTS, measure_chains, table
from gemv_setup import FORMATS
from subten.codecs import KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.device import detect
from subten.engine.roof import measure_roof
from subten.kernels import attend as triton_attend
from subten.kernels.cuda import attend as cuda_attend
from subten.kernels.cuda import runtime
from subten.kernels.cuda.attend import (
    MAX_SHARED_BYTES,
    MAX_SPLITS,
    STRUCTS,
    DecodePlan,
    kernel_name,
    plan_decode,
    slice_bytes,
)
from subten.kernels.step import StepTensors, make_step

HEAD_DIM = 128
FLUSH_BYTES = 2**28
"""Five times the L2 of an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What attention sees of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int


SHAPES = {
    "mixtral-8x7b": Shape(num_layers=32, num_heads=32, num_kv_heads=8),
    "qwen3-30b-a3b": Shape(num_layers=48, num_heads=32, num_kv_heads=4),
}

WORKLOADS = ((1, 1024), (1, 8192), (1, 32768), (1, 131072), (32, 8192))
"""Batch size and tokens in the cache of each sequence."""


# Plans worth trying at batch 1 beside the chosen one, for short and for long contexts: factor on
# the number of splits that gives every SM a block, then min_slices, warps, stages.
SHORT_PLANS = {
    "int2": ((1, 1, 8, 2), (1, 4, 8, 2), (1, 16, 16, 2)),
    "int4": ((1, 1, 8, 2), (1, 2, 8, 2), (1, 4, 8, 2), (1, 8, 8, 2), (1, 16, 16, 2)),
    "fp4": ((1, 4, 8, 2), (1, 8, 12, 2), (1, 16, 16, 2)),
    "fp8": ((1, 4, 8, 3), (1, 8, 8, 3), (1, 16, 16, 2)),
    "bf16": ((1, 8, 8, 3), (1, 16, 8, 3), (1, 16, 16, 2)),
}
LONG_PLANS = {
    "int2": ((1, 16, 16, 2), (1, 16, 12, 2), (1, 16, 12, 3), (1, 16, 8, 2), (1, 16, 8, 3)),
    "int4": ((1, 4, 16, 2), (1, 4, 12, 3), (1, 4, 8, 2), (1, 4, 8, 3), (1, 4, 8, 4)),
    "fp4": ((1, 4, 16, 2), (1, 4, 12, 2), (1, 4, 12, 3), (1, 4, 8, 3), (1, 8, 16, 2)),
    "fp8": ((1, 4, 8, 3), (1, 4, 16, 2)),
    "bf16": ((1, 8, 8, 3), (1, 8, 16, 2)),
}
LONG_CONTEXT = 32768


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """All layers of one shape at one workload, in one codec; pages are filled with values."""

    fmt: KVFormat
    layers: list[torch.Tensor]
    step: StepTensors
    queries: list[torch.Tensor]

    @property
    def kv_bytes(self) -> int:
        """Bytes that one step must read."""
        num_rows = int(self.step.kv_len_S.sum()) * self.layers[0].shape[1] * len(self.layers)
        return 2 * num_rows * self.fmt.row.total

    def calls(self, op: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """One call a layer."""
        device = self.queries[0].device
        rotation_DD = hadamard(HEAD_DIM, device) if self.fmt.codec.is_rotated else None
        return [
            op(q, pages, self.fmt, self.step, scale=HEAD_DIM**-0.5, rotation_DD=rotation_DD)
            for q, pages in zip(self.queries, self.layers, strict=True)
        ]


def make_case(
    memory: torch.Tensor, shape: Shape, codec: str, *, batch_size: int, context: int
) -> Case:
    """Lay out and fill the pages of a case in `memory`."""
    fmt = kv_format(codec, HEAD_DIM)
    pages_each = -(-context // PAGE_SIZE)
    num_pages = batch_size * pages_each
    layer_shape = (shape.num_layers, num_pages, shape.num_kv_heads, fmt.page_bytes)
    pool = memory[: math.prod(layer_shape)].view(layer_shape)
    fill(pool, fmt)
    ids = torch.randperm(num_pages).view(batch_size, pages_each).tolist()
    step = make_step(
        token_ids=[[0]] * batch_size,
        starts=[context - 1] * batch_size,
        page_ids=ids,
        device=memory.device,
    )
    q_shape = (batch_size, shape.num_heads, HEAD_DIM)
    queries = [
        torch.randn(q_shape, device=memory.device).bfloat16() for _ in range(shape.num_layers)
    ]
    return Case(fmt=fmt, layers=list(pool), step=step, queries=queries)


def fill(pool: torch.Tensor, fmt: KVFormat) -> None:
    """Random rows of unit size: BF16 values, or random codes with a scale to match.

    Codecs that the CUDA kernel does not read get random bytes: any are as fast as others.
    """
    if fmt.codec.name == "bf16":
        pool.view(torch.bfloat16).normal_()
        return
    pool.view(torch.int64).random_()
    if fmt.codec.name not in STRUCTS:
        return
    if fmt.codec.name in ("fp4", "fp4_mx"):
        # Codes reach 6: E4M3 scales of 1 times powers of two of 1/4.
        one = {"fp4": 0x38, "fp4_mx": 125}[fmt.codec.name]
        for at, row_bytes, value in (
            (fmt.k_scale, fmt.row.scale, one),
            (fmt.v_scale, fmt.row.scale, one),
            (fmt.k_zero, fmt.row.zero, 125),
            (fmt.v_zero, fmt.row.zero, 125),
        ):
            pool[..., at : at + PAGE_SIZE * row_bytes].fill_(value)
        return
    step_size = {"fp8": 1.0, "int8": 1 / 64, "int4": 1 / 4, "int2": 1 / 8}[fmt.codec.name]
    zero = {"fp8": 0.0, "int8": -2.0, "int4": -2.0, "int2": 0.0}[fmt.codec.name]
    for at, value in (
        (fmt.k_scale, step_size),
        (fmt.v_scale, step_size),
        (fmt.k_zero, zero),
        (fmt.v_zero, zero),
    ):
        row_bytes = fmt.row.scale if at in (fmt.k_scale, fmt.v_scale) else fmt.row.zero
        pool[..., at : at + PAGE_SIZE * row_bytes].view(torch.bfloat16).fill_(value)
    if fmt.codec.name == "fp8":
        for at in (fmt.k_codes, fmt.v_codes):
            # Bit 6 off: no NaN, and values below 2.
            pool[..., at : at + PAGE_SIZE * fmt.row.codes].bitwise_and_(0xBF)


def time_graph(run: Callable[[], Any], flush: torch.Tensor, num_replays: int) -> float:
    """Median seconds of a replay of `run`, captured, with L2 overwritten before each."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(num_replays + 2):
        flush.fill_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return float(median(times[2:]))


def measure(
    args: argparse.Namespace, memory: torch.Tensor, flush: torch.Tensor, roof: float
) -> Iterator[dict[str, Any]]:
    """Every case that the arguments ask for."""
    given: list[DecodePlan | None] = [parse_plan(text) for text in args.plan] or [None]
    for name in args.shape:
        shape = SHAPES[name]
        for batch_size, context in WORKLOADS:
            if context not in args.context or batch_size not in args.batch:
                continue
            for codec in args.codec:
                case = make_case(memory, shape, codec, batch_size=batch_size, context=context)
                plans = [*given]
                if args.try_plans and batch_size == 1 and context != 8192:
                    plans += plans_to_try(shape, case.fmt, context)
                expected = case.calls(triton_attend.attend)[-1] if "triton" in args.ops else None
                for op_name, plan in [(op, plan) for op in args.ops for plan in plans]:
                    if op_name == "triton" and plan is not plans[0]:
                        continue
                    op: Callable[..., torch.Tensor] = triton_attend.attend
                    is_chosen = plan is None
                    if op_name == "cuda":
                        group = shape.num_heads // shape.num_kv_heads
                        plan = plan or plan_decode(
                            case.fmt,
                            num_sms=num_sms(),
                            num_sequences=batch_size,
                            num_kv_heads=shape.num_kv_heads,
                        )
                        plan.check(group, slice_bytes(case.fmt))
                        op = functools.partial(cuda_attend.attend, plan=plan, pdl=args.pdl)
                    error = None
                    if expected is not None and op_name == "cuda":
                        error = float((case.calls(op)[-1] - expected).abs().max())
                    run = functools.partial(case.calls, op)
                    seconds = time_graph(run, flush, args.num_replays)
                    yield {
                        "shape": name,
                        "op": op_name,
                        "codec": codec,
                        "batch": batch_size,
                        "context": context,
                        "us_per_layer": round(seconds * 1e6 / shape.num_layers, 2),
                        "ms": round(seconds * 1e3, 4),
                        "kv_bytes": case.kv_bytes,
                        "tb_s": round(case.kv_bytes / seconds / 1e12, 3),
                        "roof_share": round(case.kv_bytes / seconds / roof, 3),
                        "error": error,
                        "plan": asdict(plan) if op_name == "cuda" and plan else None,
                        "is_chosen": is_chosen,
                        "pdl": args.pdl and op_name == "cuda",
                    }


def compile_all(args: argparse.Namespace, device: torch.device) -> None:
    """Compile the kernels at once, each in a thread."""
    arch = runtime.architecture(detect(str(device)).capability)
    groups = {SHAPES[name].num_heads // SHAPES[name].num_kv_heads for name in args.shape}
    names = {
        kernel_name(kv_format(codec, HEAD_DIM), HEAD_DIM, group, polls=polls)
        for codec in args.codec
        for group in groups
        for polls in (False, True)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: runtime.cached_compile("attend.cu", name, arch), names))


def num_sms() -> int:
    """SMs of the GPU."""
    return torch.cuda.get_device_properties(0).multi_processor_count


def plans_to_try(shape: Shape, fmt: KVFormat, context: int) -> list[DecodePlan | None]:
    """The chosen plan with splits that count, then the rows of SHORT_PLANS or LONG_PLANS with those
    that poll; with a block for every SM too where two fit one."""
    table = SHORT_PLANS if context < LONG_CONTEXT else LONG_PLANS
    one_wave = num_sms() // shape.num_kv_heads // 2 * 2
    chosen = plan_decode(fmt, num_sms=num_sms(), num_sequences=1, num_kv_heads=shape.num_kv_heads)
    plans: list[DecodePlan | None] = [replace(chosen, polls=not chosen.polls)]
    for factor, min_slices, num_warps, num_stages in table.get(fmt.codec.name, ()):
        plan = DecodePlan(
            num_splits=min(MAX_SPLITS, factor * one_wave),
            min_slices=min_slices,
            num_warps=num_warps,
            num_stages=num_stages,
            polls=True,
        )
        plans.append(plan)
        if num_warps <= 8 and 2 * plan.shared_bytes(slice_bytes(fmt)) <= MAX_SHARED_BYTES:
            plans.append(replace(plan, fills=True))
    return plans


def parse_plan(text: str) -> DecodePlan:
    """`splits,min_slices,warps,stages`, perhaps `,p`: splits that poll, or `,pf`: a block for every
    SM too."""
    *numbers, ways = text.split(",") if text[-1] in "pf" else [*text.split(","), ""]
    num_splits, min_slices, num_warps, num_stages = map(int, numbers)
    return DecodePlan(
        num_splits=num_splits,
        min_slices=min_slices,
        num_warps=num_warps,
        num_stages=num_stages,
        polls="p" in ways,
        fills="f" in ways,
    )


def ratio_table(records: list[dict[str, Any]]) -> str:
    """Chosen plans of the CUDA kernel beside int4's."""
    chosen = [r for r in records if r["op"] == "cuda" and r["is_chosen"]]
    where = {(r["shape"], r["batch"], r["context"], r["codec"]): r for r in chosen}
    lines = [f"{'shape':14} batch context codec  us/layer  roof  times int4"]
    for (shape, batch, context, codec), record in where.items():
        int4 = where.get((shape, batch, context, "int4"))
        ratio = f"{int4['us_per_layer'] / record['us_per_layer']:.2f}" if int4 else "-"
        lines.append(
            f"{shape:14} {batch:5} {context:7} {codec:5} {record['us_per_layer']:9.2f}"
            f" {record['roof_share']:5.2f}  {ratio}"
        )
    return "\n".join(lines)


def run_chains(args: argparse.Namespace) -> None:
    """Measure attention within layers, print the table, write the records."""
    started = time.perf_counter()
    records = list(
        measure_chains(
            shapes=args.shape,
            weight_format=args.weights,
            codecs=args.codec or CHAIN_CODECS,
            contexts=args.context or CHAIN_CONTEXTS,
            num_replays=args.num_replays,
            cold_mb=300.0,
            fill=fill,
        )
    )
    print(table(records))
    print(f"{len(records)} records in {time.perf_counter() - started:.0f} s")
    if args.json is not None:
        about = {
            "kind": "attend_chain",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": datetime.now(UTC).date().isoformat(),
            "command": f"benchmarks/attend_bench.py {' '.join(sys.argv[1:])}",
        }
        args.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")


def main() -> None:
    """Measure the roof, then the cases, each printed as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--codec", nargs="+", choices=STRUCTS)
    parser.add_argument("--context", nargs="+", type=int)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--ops", nargs="+", choices=("cuda", "triton"), default=["cuda", "triton"])
    parser.add_argument(
        "--plan", action="append", default=[], help="splits,min_slices,warps,stages[,p[f]]"
    )
    parser.add_argument("--try-plans", action="store_true", help="beside the chosen plans")
    parser.add_argument("--pdl", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ratios", action="store_true", help="end with a table beside int4")
    parser.add_argument("--num-replays", type=int, default=9)
    parser.add_argument("--chain", action="store_true", help="within a layer's chain of kernels")
    parser.add_argument("--weights", choices=FORMATS, default="fp8", help="with --chain")
    parser.add_argument("--json", type=Path, help="with --chain: where the records go")
    args = parser.parse_args()
    if args.chain:
        run_chains(args)
        return
    args.codec = args.codec or list(STRUCTS)
    args.context = args.context or [n for _, n in WORKLOADS]
    device = torch.device("cuda", 0)
    if "cuda" in args.ops:
        compile_all(args, device)
    roof = measure_roof(device)
    print(json.dumps({"roof_tb_s": round(roof.tb_s, 3), "how": roof.how}), flush=True)
    # The largest case that is asked for, in its widest codec.
    tokens = max(b * n for b, n in WORKLOADS if b in args.batch and n in args.context)
    num_rows = max(SHAPES[s].num_layers * SHAPES[s].num_kv_heads for s in args.shape) * tokens
    widest = max(kv_format(codec, HEAD_DIM).page_bytes for codec in args.codec)
    memory = torch.empty(num_rows // PAGE_SIZE * widest, dtype=torch.uint8, device=device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    records = []
    for record in measure(args, memory, flush, roof.bytes_per_s):
        records.append(record)
        print(json.dumps(record), flush=True)
    if args.ratios:
        print(ratio_table(records))


if __name__ == "__main__":
    main()
