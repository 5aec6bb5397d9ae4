"""Times the small-batch CUDA kernels with cold caches, over plans; one JSON line a measurement.

    gemv_bench.py --chain                              a layer's kernels together
    gemv_bench.py --chain --plans all > plans.jsonl    plans, judged by the time of the layer
    gemv_bench.py --chain --attention int4 1024 ...    with attention in its place, as in a step
    gemv_bench.py --chain --early                      which launches should start early
    gemv_bench.py --kernel head --plans all > head.jsonl
    gemv_bench.py --table plans.jsonl head.jsonl       the tables of gemv.py and experts.py

A measurement is a CUDA graph of launches that go round over enough layers, or sets of experts,
that their weights pass `--cold-mb`: several times the L2. Times are medians of replays, divided by
the launches. The chain of equal kernels lets each fetch weights while the one before it ends, as a
layer does; `"pdl": false` is the same chain without. `--chain` times the layer itself, and with
each of its kernels left out. `roof_fraction` is of the read-only bandwidth measured in the same
run. Weights are random; bytes count codes and scales, not activations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attend_bench import fill
from attend_chain import Step
from gemv_chain import STAGES, Chain, chain_records, early_records, search_records
from gemv_setup import DEVICE, Sizes, compile_all, graph_us, print_tables, random_weight
from subten.bench.shapes import SHAPES
from subten.config import ModelConfig
from subten.engine.roof import measure_roof
from subten.kernels.cuda import is_available
from subten.kernels.cuda.experts import launch_down, launch_up
from subten.kernels.cuda.gemv import FORMATS, GemvPlan, linear
from subten.kernels.cuda.route import route
from subten.kernels.route import Routing

KERNELS = ("qkv", "output", "head", "up", "down", "route")

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Launches that go round over cold weights: `run(i, plan, pdl)` is the i-th of them."""

    run: Callable[[int, GemvPlan | None, bool], object]
    num_copies: int
    num_bytes: int


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
    return Case(run=run, num_copies=num_copies, num_bytes=first.nbytes)


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

    return Case(run=run, num_copies=sets * num_layers, num_bytes=num_bytes)


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
    return max(2, min(2048, math.ceil(float(args.cold_mb) * 1e6 / num_bytes)))


def time_us(case: Case, plan: GemvPlan | None, *, pdl: bool, num_replays: int) -> float:
    """Microseconds of one launch within a graph that goes round over all copies."""
    num_launches = max(case.num_copies, 16)
    case.run(0, plan, pdl)
    torch.cuda.synchronize()
    us = graph_us(
        lambda: [case.run(i, plan, pdl) for i in range(num_launches)], num_replays=num_replays
    )
    return us / num_launches


def make_case(kernel: str, sizes: Sizes, args: argparse.Namespace) -> Case:
    """The launches of one kernel of a shape."""
    config, weight_format = sizes.config, sizes.weight_format
    if kernel == "qkv":
        return make_linear(sizes.qkv, config.d_model, args, weight_format, is_normed=True)
    if kernel == "output":
        return make_linear(config.d_model, sizes.heads, args, weight_format, is_normed=False)
    if kernel == "head":
        return make_linear(config.vocab_size, config.d_model, args, weight_format, is_normed=True)
    if kernel == "route":
        return make_route(config, args)
    return make_experts(config, args, weight_format, is_up=kernel == "up")


def kernel_records(kernel: str, sizes: Sizes, args: argparse.Namespace) -> Iterator[Record]:
    """The table's plan with PDL and without, or every plan with PDL: the best, and the table's."""
    case = make_case(kernel, sizes, args)
    has_plan = kernel != "route"
    table = sizes.table_plan(kernel) if has_plan else None
    times = [(pdl, table) for pdl in (True, False)]
    if args.plans == "all" and has_plan:
        plans = sizes.all_plans(kernel)
        quick = {plan: time_us(case, plan, pdl=True, num_replays=2) for plan in plans}
        best = sorted(plans, key=lambda plan: quick[plan])[: args.best]
        times = [(True, plan) for plan in dict.fromkeys([*best, plans[0]])]
    for pdl, plan in times:
        us = time_us(case, plan, pdl=pdl, num_replays=args.replays)
        yield {
            "kernel": kernel,
            "pdl": pdl,
            "us": round(us, 3),
            "bytes": case.num_bytes,
            "is_table": plan == table,
            "key": sizes.key(kernel) if has_plan else None,
            "plan": None if plan is None else asdict(plan),
        }


def attention_step(sizes: Sizes, args: argparse.Namespace) -> Step:
    """The decode step whose attention stands in the chain."""
    codec, context = args.attention
    return Step.of(sizes, codec, int(context))


def sizes_records(sizes: Sizes, args: argparse.Namespace) -> Iterator[Record]:
    """What the command line asks for of one shape and format."""
    if not args.chain:
        for kernel in args.kernel:
            if kernel != "route" or sizes.weight_format == args.format[0]:
                yield from kernel_records(kernel, sizes, args)
        return
    chain = Chain(sizes, cold_mb=args.cold_mb)
    if args.attention:
        step = attention_step(sizes, args)
        chain.set_pages(lambda: step.make_pages(fill))
        chain.attention = step.one_launch(step.chosen_plan())
    if args.early:
        yield from early_records(chain, num_replays=args.replays)
    elif args.plans == "all":
        yield from search_records(chain, num_best=args.best, num_replays=args.replays)
    else:
        yield from chain_records(chain, num_replays=args.replays)


def measure(args: argparse.Namespace) -> Iterator[Record]:
    """Every record that the command line asks for."""
    cases = [
        (shape, Sizes(config=SHAPES[shape], weight_format=name, num_tokens=args.tokens))
        for shape, name in itertools.product(args.shape, args.format)
    ]
    kernels = STAGES if args.chain else args.kernel
    with_all_plans = args.plans == "all"
    jobs = {job for _, s in cases for job in s.jobs(kernels, with_all_plans=with_all_plans)}
    if args.attention:
        jobs |= {job for _, sizes in cases for job in attention_step(sizes, args).jobs()}
    compile_all(jobs)
    for shape, sizes in cases:
        for record in sizes_records(sizes, args):
            yield {
                "mode": "chain" if args.chain else "alone",
                "shape": shape,
                "format": "float32" if record["kernel"] == "route" else sizes.weight_format,
                "num_tokens": args.tokens,
                **record,
            }
        torch.cuda.empty_cache()


def main() -> None:
    """Print one JSON line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ("qwen3-30b-a3b", "mixtral-8x7b")
    parser.add_argument("--shape", choices=shapes, nargs="+", default=list(shapes))
    parser.add_argument("--format", choices=tuple(FORMATS), nargs="+", default=list(FORMATS))
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", default=list(KERNELS))
    parser.add_argument("--chain", action="store_true", help="a layer's kernels together")
    parser.add_argument(
        "--attention", nargs=2, metavar=("CODEC", "CONTEXT"), help="with --chain: as in a layer"
    )
    parser.add_argument("--early", action="store_true", help="with --chain: each launch late")
    parser.add_argument("--plans", choices=("table", "all"), default="table")
    parser.add_argument("--best", type=int, default=5, help="with --plans all: print so many")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--cold-mb", type=float, default=300.0)
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument(
        "--table", type=Path, nargs="+", help="only print the plan tables of these records"
    )
    args = parser.parse_args()
    if args.early and not args.chain:
        parser.error("--early needs --chain")
    if args.attention and not args.chain:
        parser.error("--attention needs --chain")
    if args.table is not None:
        lines = [line for path in args.table for line in path.read_text().splitlines()]
        print_tables([json.loads(line) for line in lines])
        return
    if not is_available():
        parser.error("needs an NVIDIA GPU, cuda-bindings and NVRTC")
    roof = measure_roof(DEVICE)
    gpu = torch.cuda.get_device_name()
    print(json.dumps({"kernel": "roof", "gpu": gpu, "tb_s": round(roof.tb_s, 3), "how": roof.how}))
    for record in measure(args):
        if "bytes" in record:
            tb_s = record["bytes"] / record["us"] / 1e6
            record |= {"tb_s": round(tb_s, 3), "roof_fraction": round(tb_s / roof.tb_s, 3)}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
