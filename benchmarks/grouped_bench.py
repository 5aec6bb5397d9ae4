"""Times router, grouped experts (over plans) and projections of prompts with cold weights.

    grouped_bench.py                           every shape, format and number of tokens, all plans
    grouped_bench.py --plans table --triton    the plans that the ops take, and Triton beside them
    grouped_bench.py --mode crossover          4 to 32 tokens: gathered experts against grouped ones
    grouped_bench.py --json FILE               the records, with where they are from

Prints one JSON line a measurement, and at the end the fastest plans, for `grouped.SHARES`. A
measurement is a CUDA graph of launches that go round over enough copies of the weights to pass
`--cold-mb`; a time is the median of replays, divided by the launches. Bytes are the weights of the
experts that have tokens, codes and scales, once. `roof_fraction` is of the read-only bandwidth
measured in the same run. Tokens choose distinct experts at random.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gemv_setup import DEVICE, Job, compile_all, graph_us, random_weight
from subten.bench.records import origin
from subten.bench.report import write_json
from subten.bench.shapes import SHAPES
from subten.config import ModelConfig
from subten.device import detect
from subten.engine.roof import measure_roof
from subten.kernels import experts as triton_experts
from subten.kernels.cuda import experts as cuda_experts
from subten.kernels.cuda import is_available
from subten.kernels.cuda.grouped import (
    FORMATS,
    GroupedPlan,
    both_kernel_name,
    grouped,
    kernel_name,
    launch_combine,
    launch_down,
    launch_up,
    plan_grouped,
)
from subten.kernels.cuda.route import route
from subten.kernels.linear import linear
from subten.kernels.route import Routing
from subten.kernels.route_many import order_by_expert
from subten.kernels.weight_formats import Weight

TOKENS = (32, 128, 512, 2048)
CROSSOVER_TOKENS = (4, 8, 12, 16, 24, 32)
KERNELS = ("up", "down")
"""Of several tiles. Of one, both products are a launch, timed with the one that follows."""

MAX_SM_BYTES = 226 * 1024

SHARES_TRIED = (
    (8, 2, 2),
    (8, 3, 1),
    (8, 4, 1),
    (4, 2, 4),
    (4, 4, 3),
    (4, 2, 3),
    (4, 3, 3),
    (6, 2, 2),
    (12, 2, 1),
)
"""(warps, depth, blocks): 8 to 16 warps an SM, 32 to 128 KiB of weights in flight."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Copies of a layer's experts in one format, more than the L2 holds by far."""

    config: ModelConfig
    weight_format: str
    gate_up: list[Weight]
    down: list[Weight]

    @classmethod
    def make(cls, config: ModelConfig, weight_format: str, *, cold_mb: float) -> Layers:
        """Random weights; at least one layer."""
        num_experts, dim, hidden = config.num_experts, config.d_model, config.d_ffn
        down = [random_weight(num_experts, dim, hidden, weight_format=weight_format)]
        num_copies = max(1, math.ceil(cold_mb * 1e6 / down[0].nbytes))
        down += [
            random_weight(num_experts, dim, hidden, weight_format=weight_format)
            for _ in range(num_copies - 1)
        ]
        gate_up = [
            random_weight(num_experts, 2 * hidden, dim, weight_format=weight_format) for _ in down
        ]
        return cls(config=config, weight_format=weight_format, gate_up=gate_up, down=down)

    def routing(self, num_tokens: int, *, with_order: bool = True) -> Routing:
        """Distinct random experts for each token."""
        config = self.config
        num_experts, top_k = config.num_experts, config.top_k
        id_TK = torch.rand(num_tokens, num_experts, device=DEVICE).topk(top_k).indices.int()
        start_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=DEVICE)
        order_A = torch.empty(num_tokens * top_k, dtype=torch.int32, device=DEVICE)
        order_by_expert(id_TK, start_E1, order_A)
        return Routing(
            h_TD=torch.randn(num_tokens, config.d_model, device=DEVICE).bfloat16(),
            topk_id_TK=id_TK,
            topk_weight_TK=torch.full((num_tokens, top_k), 1 / top_k, device=DEVICE),
            expert_start_E1=start_E1 if with_order else None,
            order_A=order_A if with_order else None,
        )

    def bytes_read(self, kernel: str, routing: Routing) -> int:
        """Bytes of the weights of the experts that have tokens."""
        weights = {"up": self.gate_up[0], "down": self.down[0]}
        chosen = [weights[kernel]] if kernel in weights else weights.values()
        num_touched = int(routing.topk_id_TK.unique().numel())
        return sum(weight.nbytes for weight in chosen) // self.config.num_experts * num_touched


def launches_us(run: Callable[[int], object], num_copies: int, num_replays: int) -> float:
    """Microseconds of `run(i)`, i going round over the copies."""
    num_launches = max(num_copies, 4)
    run(0)
    torch.cuda.synchronize()
    all_us = graph_us(
        lambda: [run(i % num_copies) for i in range(num_launches)], num_replays=num_replays
    )
    return all_us / num_launches


def table_plan(kernel: str, layers: Layers, num_tokens: int) -> GroupedPlan:
    """The plan that the op takes."""
    config = layers.config
    dim = config.d_ffn if kernel == "down" else config.d_model
    return plan_grouped(dim, num_tokens * config.top_k, config.num_experts, layers.weight_format)


def kernels_of(layers: Layers, num_tokens: int) -> tuple[str, ...]:
    """What the plans are of."""
    return ("both",) if table_plan("up", layers, num_tokens).tiles == 1 else KERNELS


def plans_of(kernel: str, layers: Layers, num_tokens: int) -> list[GroupedPlan]:
    """The plan that the op takes, then others that fit an SM, for tiles of about the load."""
    config, weight_format = layers.config, layers.weight_format
    table = table_plan(kernel, layers, num_tokens)
    nearby = {t for t in (1, 2, 4, 6, 8) if table.tiles / 2 <= t <= table.tiles * 2}
    nearby = {1} if kernel == "both" else nearby
    plans = [table]
    for tiles, (warps, depth, blocks) in itertools.product(sorted(nearby), SHARES_TRIED):
        plan = GroupedPlan(tiles=tiles, warps=warps, depth=depth, blocks=blocks)
        has_registers = 16 * tiles // 2 + 16 * depth + 40 <= 65536 // (32 * warps * blocks)
        shared = plan.shared_bytes(FORMATS[weight_format], config.num_experts)
        if plan != table and has_registers and shared * blocks <= MAX_SM_BYTES:
            plans.append(plan)
    return plans


def plan_records(layers: Layers, num_tokens: int, args: argparse.Namespace) -> Iterator[Record]:
    """Each kernel with the plan of the table, and with `--plans all` the best of the others."""
    routing = layers.routing(num_tokens)
    num_copies, hidden = len(layers.down), layers.config.d_ffn
    act_AF = torch.randn(num_tokens * layers.config.top_k, hidden, device=DEVICE).bfloat16()
    residual_TD = torch.randn(num_tokens, layers.config.d_model, device=DEVICE)

    def run(kernel: str, plan: GroupedPlan, i: int) -> object:
        if kernel == "both":
            both = {"up_plan": plan, "down_plan": plan, "residual_TD": residual_TD}
            return grouped(routing, layers.gate_up[i], layers.down[i], **both)
        if kernel == "up":
            return launch_up(routing, layers.gate_up[i], plan=plan)
        return launch_down(routing, act_AF, layers.down[i], plan=plan)

    for kernel in kernels_of(layers, num_tokens):
        plans = plans_of(kernel, layers, num_tokens)
        table = plans[0]
        quick = {table: 0.0}
        if args.plans == "all":
            for plan in plans:
                quick[plan] = launches_us(partial(run, kernel, plan), num_copies, 2)
        best = sorted(quick, key=lambda plan: quick[plan])[: args.best]
        for plan in dict.fromkeys([*best, table]):
            us = launches_us(partial(run, kernel, plan), num_copies, args.replays)
            yield {
                "kernel": kernel,
                "us": round(us, 2),
                "bytes": layers.bytes_read(kernel, routing),
                "is_table": plan == table,
                "plan": asdict(plan),
            }


def layer_records(layers: Layers, num_tokens: int, args: argparse.Namespace) -> Iterator[Record]:
    """The whole op on CUDA, with `--triton` in Triton too, and its last launch."""
    routing, num_copies = layers.routing(num_tokens), len(layers.down)
    residual_TD = torch.randn(num_tokens, layers.config.d_model, device=DEVICE)
    y_AD = torch.randn(len(routing.order_A), layers.config.d_model, device=DEVICE).bfloat16()

    def run(op: Callable[..., object], i: int) -> object:
        return op(routing, layers.gate_up[i], layers.down[i], residual_TD=residual_TD)

    experts = {"cuda": cuda_experts.experts}
    if args.triton:
        experts["triton"] = triton_experts.experts
    for backend, op in experts.items():
        us = launches_us(partial(run, op), num_copies, args.replays)
        num_bytes = layers.bytes_read("experts", routing)
        yield {"kernel": "experts", "backend": backend, "us": round(us, 2), "bytes": num_bytes}
    us = launches_us(
        lambda _: launch_combine(routing, y_AD, residual_TD=residual_TD), 1, args.replays
    )
    yield {"kernel": "combine", "us": round(us, 2)}


def linear_records(
    config: ModelConfig, weight_format: str, num_tokens: int, args: argparse.Namespace
) -> Iterator[Record]:
    """Projections of many tokens: norm and product, product and residual; cold weights."""
    heads = config.num_heads * config.head_dim
    num_qkv = heads + 2 * config.num_kv_heads * config.head_dim
    norm_D = torch.ones(config.d_model, dtype=torch.bfloat16, device=DEVICE)
    x_TD = torch.randn(num_tokens, config.d_model, device=DEVICE)
    out_TN = torch.randn(num_tokens, heads, device=DEVICE).bfloat16()
    shapes = {"qkv": (num_qkv, config.d_model), "output": (config.d_model, heads)}
    for kernel, shape in shapes.items():
        weights = [random_weight(*shape, weight_format=weight_format)]
        num_copies = math.ceil(args.cold_mb * 1e6 / weights[0].nbytes)
        weights += [
            random_weight(*shape, weight_format=weight_format) for _ in range(num_copies - 1)
        ]
        ways: dict[str, Callable[[Weight], object]] = {
            "qkv": lambda weight: linear(x_TD, weight, norm_weight_K=norm_D, eps=1e-6),
            "output": lambda weight: linear(out_TN, weight, residual_TN=x_TD),
        }
        us = launches_us(partial(_call, ways[kernel], weights), num_copies, args.replays)
        yield {"kernel": kernel, "us": round(us, 2), "bytes": weights[0].nbytes}


def _call(way: Callable[[Weight], object], weights: list[Weight], i: int) -> object:
    return way(weights[i])


def route_records(
    config: ModelConfig, num_tokens: int, args: argparse.Namespace
) -> Iterator[Record]:
    """The router with its order, without, and the order alone; weights are warm, as x is."""
    x_TD = torch.randn(num_tokens, config.d_model, device=DEVICE)
    norm_D = torch.ones(config.d_model, dtype=torch.bfloat16, device=DEVICE)
    gate_ED = torch.randn(config.num_experts, config.d_model, device=DEVICE)

    def run(*, with_order: bool) -> Routing:
        return route(
            x_TD,
            norm_D,
            gate_ED,
            eps=1e-6,
            top_k=config.top_k,
            renormalize=True,
            with_order=with_order,
        )

    routing = run(with_order=True)
    ways: dict[str, Callable[[int], object]] = {
        "route": lambda _: run(with_order=False),
        "route with order": lambda _: run(with_order=True),
        "order": lambda _: order_by_expert(
            routing.topk_id_TK, routing.expert_start_E1, routing.order_A
        ),
    }
    for kernel, way in ways.items():
        yield {"kernel": kernel, "us": round(launches_us(way, 1, args.replays), 2)}


def crossover_records(layers: Layers, args: argparse.Namespace) -> Iterator[Record]:
    """`experts` for few tokens, gathered and grouped, and what the order costs beside it."""
    for num_tokens in CROSSOVER_TOKENS:
        residual_TD = torch.randn(num_tokens, layers.config.d_model, device=DEVICE)

        def run(routing: Routing, residual_TD: torch.Tensor, i: int) -> object:
            gate_up, down = layers.gate_up[i], layers.down[i]
            return cuda_experts.experts(routing, gate_up, down, residual_TD=residual_TD)

        for way in ("gathered", "grouped"):
            routing = layers.routing(num_tokens, with_order=way == "grouped")
            us = launches_us(partial(run, routing, residual_TD), len(layers.down), args.replays)
            num_bytes = layers.bytes_read("experts", routing)
            yield {
                "kernel": "experts",
                "way": way,
                "num_tokens": num_tokens,
                "us": round(us, 2),
                "bytes": num_bytes,
            }
        yield from (
            record | {"num_tokens": num_tokens}
            for record in route_records(layers.config, num_tokens, args)
        )


def jobs(cases: list[tuple[str, str]], args: argparse.Namespace) -> set[Job]:
    """Every kernel that the measurements need."""
    found: set[Job] = {("grouped.cu", "combine_kernel")}
    tokens = CROSSOVER_TOKENS if args.mode == "crossover" else args.tokens
    for (shape, weight_format), num_tokens in itertools.product(cases, tokens):
        layers = Layers(config=SHAPES[shape], weight_format=weight_format, gate_up=[], down=[])
        for kernel in kernels_of(layers, num_tokens):
            plans = plans_of(kernel, layers, num_tokens)
            for plan in plans if args.plans == "all" and args.mode == "plans" else plans[:1]:
                name = both_kernel_name(weight_format, plan)
                if kernel != "both":
                    name = kernel_name(f"grouped_{kernel}_kernel", weight_format, plan)
                found.add(("grouped.cu", name))
    return found


def measure(args: argparse.Namespace) -> Iterator[Record]:
    """Every record that the command line asks for."""
    cases = list(itertools.product(args.shape, args.format))
    compile_all(jobs(cases, args))
    for shape, weight_format in cases:
        layers = Layers.make(SHAPES[shape], weight_format, cold_mb=args.cold_mb)
        common = {"shape": shape, "format": weight_format}
        if args.mode == "crossover":
            yield from (common | record for record in crossover_records(layers, args))
        else:
            for num_tokens in args.tokens:
                common["num_tokens"] = num_tokens
                records = [plan_records(layers, num_tokens, args)]
                records.append(layer_records(layers, num_tokens, args))
                records.append(linear_records(SHAPES[shape], weight_format, num_tokens, args))
                if weight_format == args.format[0]:
                    records.append(route_records(SHAPES[shape], num_tokens, args))
                yield from (common | record for record in itertools.chain(*records))
        del layers
        torch.cuda.empty_cache()


def print_best(records: list[Record]) -> None:
    """The fastest plan of each kernel, format and number of tokens, as in `grouped.SHARES`."""
    ranked = sorted((r for r in records if "plan" in r), key=lambda r: r["us"])
    seen = set()
    for r in ranked:
        key = (r["shape"], r["format"], r["num_tokens"], r["kernel"])
        if key in seen:
            continue
        seen.add(key)
        plan = GroupedPlan(**r["plan"])
        share = (plan.warps, plan.depth, plan.blocks)
        mark = " (the op's)" if r["is_table"] else ""
        print(f"# {' '.join(map(str, key))}: {share}, {plan.tiles} tiles, {r['us']} us{mark}")


def main() -> None:
    """Print one JSON line for each measurement, then the best plans."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ("qwen3-30b-a3b", "mixtral-8x7b")
    parser.add_argument("--shape", choices=shapes, nargs="+", default=list(shapes))
    parser.add_argument("--format", choices=tuple(FORMATS), nargs="+", default=list(FORMATS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--mode", choices=("plans", "crossover"), default="plans")
    parser.add_argument("--plans", choices=("table", "all"), default="all")
    parser.add_argument("--triton", action="store_true", help="time the Triton experts, too")
    parser.add_argument("--best", type=int, default=2, help="print so many of all plans")
    parser.add_argument("--cold-mb", type=float, default=200.0)
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the records here")
    args = parser.parse_args()
    if not is_available():
        parser.error("needs an NVIDIA GPU, cuda-bindings and NVRTC")
    roof = measure_roof(DEVICE)
    records: list[Record] = [{"kernel": "roof", "tb_s": round(roof.tb_s, 3), "how": roof.how}]
    print(json.dumps(records[0]), flush=True)
    for record in measure(args):
        if "bytes" in record:
            tb_s = record["bytes"] / record["us"] / 1e6
            record |= {"tb_s": round(tb_s, 3), "roof_fraction": round(tb_s / roof.tb_s, 3)}
        records.append(record)
        print(json.dumps(record), flush=True)
    print_best(records)
    if args.json is not None:
        command = " ".join(["benchmarks/grouped_bench.py", *sys.argv[1:]])
        run = origin(detect("cuda:0")) | {"command": command}
        write_json(args.json, {"kind": "grouped_plans", **run, "records": records})


if __name__ == "__main__":
    main()
