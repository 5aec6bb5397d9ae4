"""Times the small-batch CUDA kernels with cold caches, over plans; one JSON line a measurement.

    python benchmarks/gemv_bench.py --shape qwen3-30b-a3b --kernel down --plans all > down.jsonl

A measurement is a CUDA graph of launches that go round over enough layers, or sets of experts,
that their weights pass `--cold-mb`: several times the L2. Times are medians of replays, divided by
the launches. The chain of equal kernels lets each fetch weights while the one before it ends, as a
layer does; `"pdl": false` is the same chain without. `roof_fraction` is of the read-only bandwidth
measured in the same run. Weights are random; bytes count codes and scales, not activations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch

from subten.bench.roof import measure_roof
from subten.bench.shapes import SHAPES
from subten.config import ModelConfig
from subten.kernels.cuda import is_available
from subten.kernels.cuda.experts import launch_down, launch_up, plan_down, plan_up
from subten.kernels.cuda.gemv import FORMATS, TILE_ROWS, GemvPlan, linear, plan_gemv
from subten.kernels.cuda.route import route
from subten.kernels.route import Routing
from subten.kernels.weight_formats import Weight

KERNELS = ("qkv", "output", "head", "up", "down", "route")
DEVICE = torch.device("cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Launches that go round over cold weights: `run(i, plan, pdl)` is the i-th of them."""

    run: Callable[[int, GemvPlan | None, bool], object]
    num_copies: int
    num_bytes: int
    plan: GemvPlan | None = None
    plans: tuple[GemvPlan, ...] = ()


def random_weight(*shape: int, weight_format: str) -> Weight:
    """Random codes, so that the bytes are as incompressible as a model's; small finite scales."""
    weight = Weight(shape, quantization=weight_format, device=DEVICE, dtype=torch.bfloat16)
    if weight_format == "none":
        weight.codes.normal_(std=0.02)
    else:
        weight.codes.view(torch.int32).random_()
        weight.scale.fill_(1e-3)
    return weight


def make_linear(
    num_rows: int, dim: int, args: argparse.Namespace, weight_format: str, *, is_normed: bool
) -> Case:
    """A projection with its norm before (float32 x), or with its residual after (bfloat16 x)."""
    first = random_weight(num_rows, dim, weight_format=weight_format)
    num_copies = copies_for(first.nbytes, args)
    weights = [first]
    weights += [
        random_weight(num_rows, dim, weight_format=weight_format) for _ in range(num_copies - 1)
    ]
    x_TK = torch.randn(args.tokens, dim, device=DEVICE)
    norm_K = torch.ones(dim, dtype=torch.bfloat16, device=DEVICE)
    residual_TN = torch.randn(args.tokens, num_rows, device=DEVICE)

    def run(i: int, plan: GemvPlan | None, pdl: bool) -> object:
        weight = weights[i % num_copies]
        if is_normed:
            return linear(x_TK, weight, norm_weight_K=norm_K, eps=1e-6, plan=plan, pdl=pdl)
        return linear(h_TK, weight, residual_TN=residual_TN, plan=plan, pdl=pdl)

    h_TK = x_TK.bfloat16()
    plan = plan_gemv(num_rows // TILE_ROWS, dim, weight_format)
    return Case(
        run=run,
        num_copies=num_copies,
        num_bytes=first.nbytes,
        plan=plan,
        plans=tuple(linear_plans(plan, dim, weight_format)),
    )


def make_experts(
    config: ModelConfig, args: argparse.Namespace, weight_format: str, *, is_up: bool
) -> Case:
    """Up or down, where every launch takes other experts until all layers have been read."""
    num_experts, top_k, dim = config.num_experts, config.top_k, config.d_model
    hidden, num_tokens = config.d_ffn, args.tokens
    shape = (num_experts, 2 * hidden, dim) if is_up else (num_experts, dim, hidden)
    first = random_weight(*shape, weight_format=weight_format)
    num_chosen = min(num_experts, num_tokens * top_k)
    sets = num_experts // num_chosen
    num_bytes = first.nbytes // num_experts * num_chosen
    num_layers = max(1, math.ceil(copies_for(num_bytes, args) / sets))
    weights = [first]
    weights += [random_weight(*shape, weight_format=weight_format) for _ in range(num_layers - 1)]
    h_TD = torch.randn(num_tokens, dim, device=DEVICE).bfloat16()
    residual_TD = torch.randn(num_tokens, dim, device=DEVICE)
    act_AF = torch.randn(num_tokens * top_k, hidden, device=DEVICE).bfloat16()
    assignment_A = torch.arange(num_tokens * top_k, device=DEVICE) % num_chosen
    routings = [
        Routing(
            h_TD=h_TD,
            topk_id_TK=(assignment_A + s * num_chosen).int().view(num_tokens, top_k),
            topk_weight_TK=torch.full((num_tokens, top_k), 1 / top_k, device=DEVICE),
        )
        for s in range(sets)
    ]

    def run(i: int, plan: GemvPlan | None, pdl: bool) -> object:
        routing, weight = routings[i % sets], weights[i // sets % num_layers]
        if is_up:
            return launch_up(routing, weight, plan=plan, pdl=pdl)
        return launch_down(routing, act_AF, weight, residual_TD=residual_TD, plan=plan, pdl=pdl)

    if is_up:
        plan = plan_up(top_k, hidden, dim, weight_format)
        plans = tuple(linear_plans(plan, dim, weight_format))
    else:
        plan = plan_down(top_k, hidden, weight_format)
        plans = tuple(down_plans(top_k, hidden, weight_format))
    return Case(run=run, num_copies=sets * num_layers, num_bytes=num_bytes, plan=plan, plans=plans)


def make_route(config: ModelConfig, args: argparse.Namespace) -> Case:
    """The router; its float32 matrix whatever the format of the others."""
    num_bytes = 4 * config.num_experts * config.d_model
    num_copies = copies_for(num_bytes, args)
    gates = [
        torch.randn(config.num_experts, config.d_model, device=DEVICE) for _ in range(num_copies)
    ]
    x_TD = torch.randn(args.tokens, config.d_model, device=DEVICE)
    norm_D = torch.ones(config.d_model, dtype=torch.bfloat16, device=DEVICE)

    def run(i: int, plan: GemvPlan | None, pdl: bool) -> object:
        assert plan is None, plan
        gate_ED = gates[i % num_copies]
        return route(x_TD, norm_D, gate_ED, eps=1e-6, top_k=config.top_k, renormalize=True, pdl=pdl)

    return Case(run=run, num_copies=num_copies, num_bytes=num_bytes)


def copies_for(num_bytes: int, args: argparse.Namespace) -> int:
    """Copies until a round passes the L2 by far, at least two."""
    return max(2, min(2048, math.ceil(args.cold_mb * 1e6 / num_bytes)))


def linear_plans(best: GemvPlan, dim: int, weight_format: str) -> Iterator[GemvPlan]:
    """Every plan near the one of the table; the table's first."""
    yield best
    num_blocks = dim // FORMATS[weight_format].block
    for warps_k, warps_n, tiles, depth in itertools.product(
        (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4), FORMATS[weight_format].depths
    ):
        plan = GemvPlan(warps_k=warps_k, warps_n=warps_n, tiles=tiles, depth=depth)
        is_legal = warps_k <= num_blocks and tiles <= 2 * warps_k
        if is_legal and plan != best and 2 <= warps_k * warps_n <= 16:
            yield plan


def down_plans(top_k: int, hidden: int, weight_format: str) -> Iterator[GemvPlan]:
    """Every number of warps an expert, and every depth."""
    for warps_k, depth in itertools.product((1, 2, 3, 4, 6, 8), FORMATS[weight_format].depths):
        if warps_k * top_k <= 16 and warps_k <= hidden // FORMATS[weight_format].block:
            yield GemvPlan(warps_k=warps_k, warps_n=top_k, depth=depth)


def time_us(case: Case, plan: GemvPlan | None, *, pdl: bool, num_replays: int) -> float:
    """Median microseconds of one launch within a graph that goes round over all copies."""
    num_launches = max(case.num_copies, 32)
    case.run(0, plan, pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_launches):
            case.run(i, plan, pdl)
    times_ms = []
    for _ in range(num_replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return median(times_ms[2:]) / num_launches * 1e3


def make_case(kernel: str, shape: str, weight_format: str, args: argparse.Namespace) -> Case:
    """The launches of one kernel of a shape."""
    config = SHAPES[shape]
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    if kernel == "qkv":
        return make_linear(qkv, config.d_model, args, weight_format, is_normed=True)
    if kernel == "output":
        return make_linear(config.d_model, heads, args, weight_format, is_normed=False)
    if kernel == "head":
        return make_linear(config.vocab_size, config.d_model, args, weight_format, is_normed=True)
    if kernel == "route":
        return make_route(config, args)
    return make_experts(config, args, weight_format, is_up=kernel == "up")


def main() -> None:
    """Print one JSON line for each kernel, format, plan and PDL setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ("qwen3-30b-a3b", "mixtral-8x7b")
    parser.add_argument("--shape", choices=shapes, nargs="+", default=list(shapes))
    parser.add_argument("--format", choices=tuple(FORMATS), nargs="+", default=list(FORMATS))
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", default=list(KERNELS))
    parser.add_argument("--plans", choices=("table", "all"), default="table")
    parser.add_argument("--best", type=int, default=5, help="with --plans all: print so many")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--cold-mb", type=float, default=400.0)
    parser.add_argument("--replays", type=int, default=15)
    args = parser.parse_args()
    if not is_available():
        parser.error("needs an NVIDIA GPU, cuda-bindings and NVRTC")
    roof = measure_roof(DEVICE)
    gpu = torch.cuda.get_device_name()
    print(json.dumps({"kernel": "roof", "gpu": gpu, "tb_s": round(roof.tb_s, 3), "how": roof.how}))
    for shape, kernel, weight_format in itertools.product(args.shape, args.kernel, args.format):
        if kernel == "route" and weight_format != args.format[0]:
            continue
        case = make_case(kernel, shape, weight_format, args)
        plans: tuple[GemvPlan | None, ...] = (case.plan,)
        settings = [True, False]
        if args.plans == "all" and case.plans:
            plans, settings = case.plans, [True]
        records = []
        for plan, pdl in itertools.product(plans, settings):
            us = time_us(case, plan, pdl=pdl, num_replays=args.replays)
            tb_s = case.num_bytes / us / 1e6
            records.append(
                {
                    "shape": shape,
                    "kernel": kernel,
                    "format": "float32" if kernel == "route" else weight_format,
                    "num_tokens": args.tokens,
                    "pdl": pdl,
                    "us": round(us, 3),
                    "bytes": case.num_bytes,
                    "tb_s": round(tb_s, 3),
                    "roof_fraction": round(tb_s / roof.tb_s, 3),
                    "is_table": plan == case.plan,
                    "plan": None if plan is None else asdict(plan),
                }
            )
        if args.plans == "all":
            ranked = sorted(records, key=lambda record: record["us"])
            tables = [record for record in records if record["is_table"]]
            records = ranked[: args.best] + [r for r in tables if r not in ranked[: args.best]]
        for record in records:
            print(json.dumps(record), flush=True)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
