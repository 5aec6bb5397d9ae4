"""Times projections and head of a batch or a prompt with cold weights: tiles against cuBLAS.

    linear_bench.py                    every matrix, format and number of tokens, the ops' plans
    linear_bench.py --plans all        and at --plan-tokens every other plan, and the best
    linear_bench.py --json FILE        the records, with where they are from

Prints one JSON line a measurement. `way` is `tiles` (kernels/cuda/linear_tiles.py) or `unpacked`
(kernels/linear.py: Triton for 16 tokens and fewer, else weights unpacked for cuBLAS). A measurement
is a CUDA graph of launches that go round over enough copies of the weights to pass `--cold-mb`; a
time is the median of replays, divided by the launches. Bytes are the weights, codes and scales.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gemv_setup import DEVICE, Job, compile_all, graph_us, random_weight
from subten.bench.records import origin
from subten.bench.report import write_json
from subten.bench.shapes import SHAPES
from subten.device import detect
from subten.engine.roof import measure_roof
from subten.kernels.cuda import is_available, linear_tiles
from subten.kernels.cuda.grouped import FORMATS
from subten.kernels.cuda.linear_tiles import TilePlan, kernel_name, launch_shape, plan_tiles
from subten.kernels.linear import linear as unpacked_linear
from subten.kernels.weight_formats import Weight

TOKENS = (9, 16, 32, 64, 128, 256, 512)
MATRICES = ("qkv", "output", "head")
MAX_HEAD_TOKENS = 64
"""A step has a row of logits a sequence."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A matrix, and what stands around its product."""

    matrix: str
    num_rows: int
    dim: int
    weight_format: str

    @classmethod
    def of(cls, shape: str, matrix: str, weight_format: str) -> Case:
        """A matrix of a model."""
        config = SHAPES[shape]
        heads = config.num_heads * config.head_dim
        num_qkv = heads + 2 * config.num_kv_heads * config.head_dim
        sizes = {
            "qkv": (num_qkv, config.d_model),
            "output": (config.d_model, heads),
            "head": (config.vocab_size, config.d_model),
        }
        num_rows, dim = sizes[matrix]
        return cls(matrix=matrix, num_rows=num_rows, dim=dim, weight_format=weight_format)

    @property
    def is_normed(self) -> bool:
        """Whether x is float32 before the norm; else bfloat16, with a residual after."""
        return self.matrix != "output"

    def weights(self, cold_mb: float) -> list[Weight]:
        """Random copies, more than `cold_mb` together."""
        first = random_weight(self.num_rows, self.dim, weight_format=self.weight_format)
        num_copies = math.ceil(cold_mb * 1e6 / first.nbytes)
        return [first] + [
            random_weight(self.num_rows, self.dim, weight_format=self.weight_format)
            for _ in range(num_copies - 1)
        ]

    def inputs(self, num_tokens: int) -> dict[str, Any]:
        """Arguments of `linear` beside the weight."""
        if not self.is_normed:
            return {
                "x_TK": torch.randn(num_tokens, self.dim, device=DEVICE).bfloat16(),
                "residual_TN": torch.randn(num_tokens, self.num_rows, device=DEVICE),
            }
        dtype = torch.float32 if self.matrix == "head" else torch.bfloat16
        return {
            "x_TK": torch.randn(num_tokens, self.dim, device=DEVICE),
            "norm_weight_K": torch.ones(self.dim, dtype=torch.bfloat16, device=DEVICE),
            "eps": 1e-6,
            "out_dtype": dtype,
        }

    def plans(self) -> list[TilePlan]:
        """The op's plan, then others with one wave of blocks, or with lanes that walk."""
        table = plan_tiles(self.num_rows, self.dim, self.weight_format)
        plans = [table]
        num_blocks = self.dim // FORMATS[self.weight_format].block
        choices = itertools.product((1, 2, 3, 4, 8), range(1, 17), range(1, 9), (2, 4))
        for slices, warps_n, warps_k, depth in choices:
            plan = TilePlan(slices=slices, warps_n=warps_n, warps_k=warps_k, depth=depth)
            parts = slices * warps_k
            groups = -(-self.num_rows // plan.rows)
            # All warps of a launch together, or an SM's, for a matrix that fills it many times.
            is_large = groups * slices > 8 * linear_tiles.SLOTS[1]
            is_wave = 90 <= groups * slices <= 132 or (is_large and warps_n in (2, 4, 8))
            has_work = parts <= num_blocks and (depth == 2 or num_blocks > 2 * parts)
            has_registers = plan.warps <= 12 or depth == 2
            if (
                plan != table
                and plan.warps in (8, 10, 12, 16)
                and is_wave
                and has_work
                and has_registers
            ):
                plans.append(plan)
        return plans

    def job(self, plan: TilePlan, num_tokens: int) -> Job:
        """The kernel that a plan launches."""
        is_normed = self.is_normed and plan.norms(self.dim, self.weight_format)
        shape = launch_shape(
            num_tokens, self.num_rows, self.dim, self.weight_format, plan, is_normed=is_normed
        )
        name = kernel_name(self.weight_format, shape.tiles, plan, is_normed=is_normed)
        return "linear_tiles.cu", name


def time_us(way: partial[object], weights: list[Weight], num_replays: int) -> float:
    """Microseconds of a launch, the weights going round."""
    num_launches = max(len(weights), 4)
    way(weight=weights[0])
    torch.cuda.synchronize()
    all_us = graph_us(
        lambda: [way(weight=weights[i % len(weights)]) for i in range(num_launches)],
        num_replays=num_replays,
    )
    return all_us / num_launches


def case_records(case: Case, args: argparse.Namespace) -> Iterator[Record]:
    """Both ways at every number of tokens, and plans."""
    weights = case.weights(args.cold_mb)
    common = {"matrix": case.matrix, "bytes": weights[0].nbytes}
    for num_tokens in args.tokens:
        if case.matrix == "head" and num_tokens > MAX_HEAD_TOKENS:
            continue
        inputs = case.inputs(num_tokens)
        for name, op in (("tiles", linear_tiles.linear), ("unpacked", unpacked_linear)):
            us = time_us(partial(op, **inputs), weights, args.replays)
            yield common | {"num_tokens": num_tokens, "way": name, "us": round(us, 2)}
    if args.plans == "all":
        for num_tokens in args.plan_tokens:
            inputs = case.inputs(num_tokens)
            for plan in case.plans():
                way = partial(linear_tiles.linear, plan=plan, **inputs)
                us = time_us(way, weights, args.replays)
                record = {"num_tokens": num_tokens, "way": "tiles", "us": round(us, 2)}
                yield common | record | {"plan": asdict(plan)}


def jobs(cases: list[Case], args: argparse.Namespace) -> set[Job]:
    """Every kernel that the measurements need."""
    found = set()
    for case in cases:
        plans = case.plans()
        found |= {case.job(plans[0], num_tokens) for num_tokens in args.tokens}
        if args.plans == "all":
            found |= {case.job(p, t) for p, t in itertools.product(plans, args.plan_tokens)}
    return found


def print_best(records: list[Record]) -> None:
    """The fastest plan of each matrix, format and number of tokens."""
    ranked = sorted((r for r in records if "plan" in r), key=lambda r: r["us"])
    seen = set()
    for r in ranked:
        key = (r["shape"], r["matrix"], r["format"], r["num_tokens"])
        if key not in seen:
            print(f"# {' '.join(map(str, key))}: {tuple(r['plan'].values())}, {r['us']} us")
        seen.add(key)


def main() -> None:
    """Print one JSON line for each measurement, then the best plans."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ("qwen3-30b-a3b", "mixtral-8x7b")
    parser.add_argument("--shape", choices=shapes, nargs="+", default=list(shapes))
    parser.add_argument("--format", choices=tuple(FORMATS), nargs="+", default=list(FORMATS))
    parser.add_argument("--matrix", choices=MATRICES, nargs="+", default=list(MATRICES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--plans", choices=("table", "all"), default="table")
    parser.add_argument("--plan-tokens", type=int, nargs="+", default=[32])
    parser.add_argument("--cold-mb", type=float, default=200.0)
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the records here")
    args = parser.parse_args()
    if not is_available():
        parser.error("needs an NVIDIA GPU, cuda-bindings and NVRTC")
    roof = measure_roof(DEVICE)
    records: list[Record] = [{"kernel": "roof", "tb_s": round(roof.tb_s, 3), "how": roof.how}]
    print(json.dumps(records[0]), flush=True)
    choices = list(itertools.product(args.shape, args.format, args.matrix))
    compile_all(jobs([Case.of(shape, m, name) for shape, name, m in choices], args))
    for shape, weight_format, matrix in choices:
        case = Case.of(shape, matrix, weight_format)
        for record in case_records(case, args):
            record = {"shape": shape, "format": weight_format} | record
            record["tb_s"] = round(record["bytes"] / record["us"] / 1e6, 3)
            records.append(record)
            print(json.dumps(record), flush=True)
        torch.cuda.empty_cache()
    print_best(records)
    if args.json is not None:
        command = " ".join(["benchmarks/linear_bench.py", *sys.argv[1:]])
        run = origin(detect("cuda:0")) | {"command": command}
        write_json(args.json, {"kind": "linear_plans", **run, "records": records})


if __name__ == "__main__":
    main()
