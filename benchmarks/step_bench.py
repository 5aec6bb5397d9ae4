"""Times a whole decode step and a whole prompt as CUDA graphs, and what each op adds to one.

    step_bench.py                                    32 sequences of 8k, and a prompt of 512 tokens
    step_bench.py --batch 64 --context 4096 --codec fp8
    step_bench.py --attend-plan 4,8,8,3 --attend-plan 1,1,12,2
    step_bench.py --without-ops --early-mb 0 24 --up-plan 1,4,3,3
    step_bench.py --batch 2 4 8 --crossover          few tokens, as those of a batch
    step_bench.py --batch 1 --context 1024           one token, the router's launch apart as well
    step_bench.py --json FILE                        the records, with where they are from

`bench kernels` times the calls of one op after one another, where each early start finds a kernel
of its own kind ahead. Within a step it finds another, with another split of L1 and shared memory.
An op is left out by one that launches nothing and gives what the true one gave first; what it adds
is the difference. A single token's experts are chosen within the output product's launch; a step
with a launch for that is timed too. Prints one JSON line a measurement: microseconds of a step,
median of replays.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gemv_setup import DEVICE, graph_us
from subten.bench.random_model import fill_pool, in_format, random_decoder
from subten.bench.records import origin
from subten.bench.report import write_json
from subten.bench.shapes import SHAPES, get_shape
from subten.cache.pool import PagePool
from subten.codecs import kv_format
from subten.core import PAGE_SIZE
from subten.device import detect
from subten.kernels.cuda import gemv, grouped, is_available, linear_tiles
from subten.kernels.cuda.attend import DecodePlan
from subten.kernels.linear_route import Router
from subten.kernels.step import StepTensors, make_step
from subten.models.decoder import Decoder

MANY_ROWS = 2**16
"""Rows of a matrix from which it is the head."""

Run = Callable[..., Any]
Record = dict[str, Any]


def kept(run: Run) -> Run:
    """`run` the first time, for each shape of a weight; then its result again, and no launch."""
    results: dict[Any, Any] = {}

    def again(*args: Any, **kwargs: Any) -> Any:
        key = tuple(args[1].shape) if len(args) == 2 else None
        if key not in results:
            results[key] = run(*args, **kwargs)
        return results[key]

    return again


def linear_without(run: Run, is_left_out: Callable[[int, bool], bool]) -> Run:
    """`linear` less the matrices that `is_left_out(rows, has_residual)` names."""
    stub = kept(run)

    def some(x_TK: torch.Tensor, weight: Any, **kwargs: Any) -> Any:
        has_residual = kwargs.get("residual_TN") is not None
        use = stub if is_left_out(weight.shape[0], has_residual) else run
        return use(x_TK, weight, **kwargs)

    return some


def unfolded(run: Run) -> Run:
    """`linear_route` as two launches, the router's after the product's."""

    def apart(heads_TN: torch.Tensor, output: Any, router: Router, **kwargs: Any) -> Any:
        return run(heads_TN, output, replace(router, folded_EM=None), **kwargs)

    return apart


def without_ops(model: Decoder, *, is_routed_ahead: bool) -> dict[str, dict[str, Run]]:
    """What replaces which op where a part of a layer is left out."""
    ops = model.ops
    parts = {
        "attention": {"append_attend": kept(ops.append_attend)},
        "experts": {"experts": lambda *_args, residual_TD: residual_TD},
        "route": {"route": kept(ops.route)},
        "qkv": {
            "linear": linear_without(
                ops.linear, lambda rows, has_residual: not has_residual and rows < MANY_ROWS
            )
        },
        "output": {"linear": linear_without(ops.linear, lambda _, has_residual: has_residual)},
        "head": {"linear": linear_without(ops.linear, lambda rows, _: rows >= MANY_ROWS)},
    }
    if is_routed_ahead:
        del parts["route"], parts["output"]
        parts["output and route"] = {"linear_route": kept(ops.linear_route)}
    return parts


@contextmanager
def with_ops(model: Decoder, **changes: Any) -> Iterator[None]:
    """Within the block the model calls these in place of its own."""
    ops = model.ops
    changed = replace(ops, **changes)
    modules: list[Any] = [m for m in model.modules() if getattr(m, "ops", None) is ops]
    for module in modules:
        module.ops = changed
    try:
        yield
    finally:
        for module in modules:
            module.ops = ops


def random_step(model: Decoder, num_sequences: int, num_new: int, context_len: int) -> StepTensors:
    """The last `num_new` tokens of each of `num_sequences` contexts."""
    width = math.ceil(context_len / PAGE_SIZE)
    return make_step(
        token_ids=torch.randint(model.config.vocab_size, (num_sequences, num_new)).tolist(),
        starts=[context_len - num_new] * num_sequences,
        page_ids=[list(range(s * width, (s + 1) * width)) for s in range(num_sequences)],
        device=DEVICE,
    )


def tiled(run: Run, is_tiled: Callable[[int, bool], bool]) -> Run:
    """`linear` with `linear_tiles` for the matrices that `is_tiled(rows, has_residual)` names."""

    def some(x_TK: torch.Tensor, weight: Any, **kwargs: Any) -> Any:
        has_residual = kwargs.get("residual_TN") is not None
        use = linear_tiles.linear if is_tiled(weight.shape[0], has_residual) else run
        return use(x_TK, weight, **kwargs)

    return some


def crossover_cases() -> Iterator[Record]:
    """A step of few tokens with experts grouped or gathered, and matrices in tiles or not."""
    matrices = {
        "qkv": lambda rows, has_residual: not has_residual and rows < MANY_ROWS,
        "output": lambda _, has_residual: has_residual,
        "head": lambda rows, _: rows >= MANY_ROWS,
        "all": lambda *_: True,
    }
    all_grouped: dict[str, Any] = {"max_gather_tokens": 0}
    yield {"case": "gathered", "ops": {"linear": gemv.linear, "max_gather_tokens": gemv.MAX_TOKENS}}
    yield {"case": "grouped", "ops": {"linear": gemv.linear, **all_grouped}}
    for name, is_tiled in matrices.items():
        ops = {"linear": tiled(gemv.linear, is_tiled), **all_grouped}
        yield {"case": f"grouped, tiles: {name}", "ops": ops}


def cases(
    model: Decoder, args: argparse.Namespace, num_sequences: int, *, is_decode: bool
) -> Iterator[Record]:
    """Names of what is measured, and the ops that differ."""
    yield {"case": "as it is", "ops": {}}
    layers: list[Any] = list(model.layers)
    is_routed_ahead = is_decode and num_sequences == 1 and layers[0].router is not None
    if is_routed_ahead:
        changes = {"linear_route": unfolded(model.ops.linear_route)}
        yield {"case": "router after the output product", "ops": changes}
    if args.without_ops:
        for name, changes in without_ops(model, is_routed_ahead=is_routed_ahead).items():
            yield {"case": f"without {name}", "ops": changes}
    if not is_decode:
        return
    if args.crossover:
        yield from crossover_cases()
    for numbers in args.attend_plan:
        names = ("num_splits", "min_slices", "num_warps", "num_stages")
        plan = DecodePlan(**dict(zip(names, numbers, strict=True)))
        run = partial(model.ops.append_attend, plan=plan)
        yield {"case": f"attend plan {numbers}", "ops": {"append_attend": run}}
    for numbers in args.up_plan:
        names = ("tiles", "warps", "depth", "blocks")
        plan = grouped.GroupedPlan(**dict(zip(names, numbers, strict=True)))
        run = partial(grouped.grouped, up_plan=plan, down_plan=plan)
        yield {"case": f"experts plan {numbers}", "ops": {"experts": run}}
    usual = grouped.MAX_EARLY_BYTES
    for num_mb in args.early_mb:
        grouped.MAX_EARLY_BYTES = num_mb * 10**6
        yield {"case": f"{num_mb} MB of experts early", "ops": {}}
    grouped.MAX_EARLY_BYTES = usual


def time_us(model: Decoder, step: StepTensors, pages: torch.Tensor, changes: Any, n: int) -> float:
    """Microseconds of a forward pass."""
    with with_ops(model, **changes):
        for _ in range(2):  # kernels compile
            model(step, pages)
        torch.cuda.synchronize()
        return graph_us(lambda: model(step, pages), num_replays=n)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=("none", "fp8", "int4"), default="fp8")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=512, help="tokens; 0: none")
    parser.add_argument("--without-ops", action="store_true")
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--attend-plan", type=_numbers, action="append", default=[])
    parser.add_argument("--up-plan", type=_numbers, action="append", default=[])
    parser.add_argument("--early-mb", type=int, nargs="+", default=[])
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the records here")
    return parser, parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Print one JSON line for each measurement."""
    parser, args = parse()
    if not is_available():
        parser.error("needs an NVIDIA GPU, cuda-bindings and NVRTC")
    config = get_shape(args.shape, min_model_len=max(args.context, args.prompt))
    model = random_decoder(config, device=DEVICE, quantization=args.format)
    model = in_format(model, kv_format(args.codec, config.head_dim))
    num_pages = max(args.batch) * math.ceil(args.context / PAGE_SIZE)
    pool = PagePool(
        num_layers=config.num_layers,
        num_pages=max(num_pages, math.ceil(args.prompt / PAGE_SIZE)),
        num_kv_heads=config.num_kv_heads,
        fmt=model.fmt,
        device=DEVICE,
    )
    fill_pool(model, pool)
    steps = [("decode", n, random_step(model, n, 1, args.context)) for n in args.batch]
    if args.prompt:
        steps.append(("prompt", 1, random_step(model, 1, args.prompt, args.prompt)))
    records = []
    for name, num_sequences, step in steps:
        for case in cases(model, args, num_sequences, is_decode=name == "decode"):
            us = time_us(model, step, pool.pages_LPGB, case["ops"], args.replays)
            record = {"step": name, "batch": num_sequences, "case": case["case"]}
            records.append(record | {"us": round(us, 1)})
            print(json.dumps(records[-1]), flush=True)
    if args.json is not None:
        command = " ".join(["benchmarks/step_bench.py", *sys.argv[1:]])
        run = origin(detect("cuda:0")) | {"command": command}
        write_json(args.json, {"kind": "steps", **run, "records": records})


if __name__ == "__main__":
    main()
