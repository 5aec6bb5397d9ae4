"""Times attention over an adaptive cache beside fixed formats: whole models, one GPU, batch 1.

    python benchmarks/adaptive_bench.py
    python benchmarks/adaptive_bench.py --json benchmarks/results/h200-adaptive-attend.json
    python benchmarks/adaptive_bench.py --try-plans --context 131072

As attend_bench.py does it: a case is one CUDA graph of a call per layer, each layer with planes of
its own, L2 overwritten before each replay. Masses are counted in as many layers as an engine has
them counted in, and window and sinks are an engine's. Fixed formats are read by the kernel that an
engine has read them, CUDA or Triton.

One JSON line a case:

    format, k_bits, v4, cold  keys, and the shares of pages with values at 4 bits and at 1.5
    is_calibrated             whether keys lack a mean, whose score a table adds again
    kv_bytes, true_bits       what one step must read, and that an element
    us_per_layer              median over replays of the whole graph
    append_us                 writing one token's rows, per layer

`--try-plans` times adaptive formats with other stages and warps; `--prefill` a chunk of 512 tokens
at the end of 8,192, with tiles of 32 rows and of 128.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from attend_bench import FLUSH_BYTES, HEAD_DIM, SHAPES, Shape, make_case, num_sms, time_graph
from subten.codecs import CODECS, kv_format
from subten.codecs.mixed import mixed_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.engine.resolve_adaptive import SINK_TOKENS, WINDOW_TOKENS
from subten.kernels import attend as triton_attend
from subten.kernels import attend_mixed as mixed_attend
from subten.kernels.adaptive_pages import MASS_LAYERS
from subten.kernels.append_mixed import append_mixed
from subten.kernels.cuda import attend as cuda_attend
from subten.kernels.cuda import attend_mixed as cuda_mixed
from subten.kernels.cuda.attend import DecodePlan
from subten.kernels.mixed_pages import MixedPages, Window
from subten.kernels.step import StepTensors, make_step

CONTEXTS = (32768, 131072)

Op = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What pages of an adaptive cache are like: bits of keys, shares of pages by their values."""

    k_bits: int
    v4: float
    cold: float = 0.0
    is_calibrated: bool = True

    @property
    def name(self) -> str:
        """As it stands in records."""
        parts = [f"K{self.k_bits}", f"V4 {self.v4:.0%}"]
        parts += [f"cold {self.cold:.0%}"] if self.cold else []
        return " ".join(parts) + ("" if self.is_calibrated else " plain")


MIXES = (
    Mix(k_bits=4, v4=1.0, is_calibrated=False),
    Mix(k_bits=4, v4=1.0),
    Mix(k_bits=4, v4=0.0),
    Mix(k_bits=3, v4=0.2),
    Mix(k_bits=3, v4=0.0),
    Mix(k_bits=2, v4=0.0),
    Mix(k_bits=2, v4=0.0, cold=0.9),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """All layers of one shape in one mix."""

    layers: list[MixedPages]
    step: StepTensors
    window: Window
    queries: list[torch.Tensor]
    coef_THC: torch.Tensor
    rows: torch.Tensor
    feedback_GDD: torch.Tensor | None
    table_PC: torch.Tensor | None
    mass_SP: torch.Tensor
    kv_bytes: int

    def attend(self, op: Op = cuda_mixed.attend_mixed) -> None:
        """One call a layer."""
        device, stride = self.rows.device, max(1, len(self.layers) // MASS_LAYERS)
        for index, (q_THD, pages) in enumerate(zip(self.queries, self.layers, strict=True)):
            added = {}
            if self.table_PC is not None:
                added = {"coef_THC": self.coef_THC, "table_PC": self.table_PC}
            op(
                q_THD,
                pages,
                mixed_format(HEAD_DIM),
                self.step,
                self.window,
                scale=HEAD_DIM**-0.5,
                rotation_DD=hadamard(HEAD_DIM, device),
                mass_SP=self.mass_SP if index % stride == stride // 2 else None,
                **added,
            )

    def append(self) -> None:
        """Write the step's tokens, a call a layer."""
        for pages in self.layers:
            append_mixed(
                self.rows,
                self.rows,
                pages,
                mixed_format(HEAD_DIM),
                self.step,
                self.window,
                rotation_DD=hadamard(HEAD_DIM, self.rows.device),
                feedback_GDD=self.feedback_GDD,
            )


def make_mixed(shape: Shape, mix: Mix, context: int, num_new: int = 1) -> Case:
    """Planes of random bytes, all of them codes and norms of something, in a random order."""
    device, fmt, groups = torch.device("cuda", 0), mixed_format(HEAD_DIM), shape.num_kv_heads
    num_pages, num_recent = -(-context // PAGE_SIZE), WINDOW_TOKENS + num_new
    num_fine, num_cold = round(mix.v4 * num_pages), round(mix.cold * num_pages)
    num_base = num_pages - num_cold

    def planes(num_planes: int, num_bytes: int) -> torch.Tensor:
        pool = torch.empty((num_planes, groups, num_bytes), dtype=torch.uint8, device=device)
        pool.view(torch.int64).random_()
        return pool

    def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    place_P3 = torch.full((num_pages, 3), -1)
    order_P = torch.randperm(num_pages)
    place_P3[order_P[:num_base], 0] = torch.randperm(num_base)
    place_P3[order_P[:num_fine], 1] = torch.randperm(num_fine)
    place_P3[order_P[num_base:], 2] = torch.randperm(num_cold)
    ids = torch.randperm(num_pages).tolist()
    sink_P = torch.full((num_pages,), -1)
    sink_P[ids[0]] = 0
    layers = []
    for _ in range(shape.num_layers):
        recent_NGE = torch.randn(num_recent, groups, 2 * HEAD_DIM, device=device).bfloat16()
        sink_XGB = recent_NGE[:SINK_TOKENS].transpose(0, 1).reshape(1, groups, -1)
        layers.append(
            MixedPages(
                k_PGB=planes(num_pages, fmt.k_bytes(mix.k_bits)),
                k_bits=mix.k_bits,
                vbase_XGB=planes(num_base, fmt.base_bytes),
                vfine_YGB=planes(num_fine, fmt.fine_bytes),
                vcold_ZGB=planes(num_cold, fmt.cold_bytes),
                place_P3=place_P3.int().to(device),
                recent_NGE=recent_NGE,
                sink_XGB=sink_XGB.contiguous().view(torch.uint8),
                sink_P=sink_P.int().to(device),
            )
        )
    step = make_step(
        token_ids=[[0] * num_new], starts=[context - num_new], page_ids=[ids], device=device
    )
    window = Window(
        size=WINDOW_TOKENS,
        row_T=int32([n % num_recent for n in range(context - num_new, context)]),
        base_S=int32([0]),
        cap_S=int32([num_recent]),
        from_S=int32([0]),
    )
    page_bytes = fmt.k_bytes(mix.k_bits) * num_pages + fmt.base_bytes * num_base
    page_bytes += fmt.fine_bytes * num_fine + fmt.cold_bytes * num_cold
    exact_bytes = fmt.exact_bytes(WINDOW_TOKENS + SINK_TOKENS)
    q_shape = (num_new, shape.num_heads, HEAD_DIM)
    return Case(
        layers=layers,
        step=step,
        window=window,
        queries=[torch.randn(q_shape, device=device).bfloat16() for _ in layers],
        coef_THC=torch.randn(q_shape, device=device),
        rows=torch.randn(num_new, groups, HEAD_DIM, device=device),
        feedback_GDD=torch.randn(groups, HEAD_DIM, HEAD_DIM, device=device) / 16,
        table_PC=_angles(context) if mix.is_calibrated else None,
        mass_SP=torch.zeros(step.page_table_SP.shape, device=device),
        kv_bytes=(page_bytes + exact_bytes) * groups * shape.num_layers,
    )


def _angles(context: int) -> torch.Tensor:
    frequency_F = 1e6 ** -torch.linspace(0, 1, HEAD_DIM // 2, device="cuda")
    angle_PF = torch.arange(context, device="cuda")[:, None] * frequency_F
    return torch.cat((angle_PF.cos(), angle_PF.sin()), dim=1)


def measure_mixed(
    shape: Shape, mix: Mix, context: int, timed: Callable[[Callable[[], Any]], float]
) -> dict[str, Any]:
    """One record."""
    case = make_mixed(shape, mix, context)
    each = 1e6 / shape.num_layers
    return {
        "format": f"adaptive {mix.name}",
        "k_bits": mix.k_bits,
        "v4": mix.v4,
        "cold": mix.cold,
        "is_calibrated": mix.is_calibrated,
        "op": "cuda",
        **_sizes(shape, context, case.kv_bytes),
        "us_per_layer": round(timed(case.attend) * each, 2),
        "append_us": round(timed(case.append) * each, 2),
    }


def measure_fixed(
    shape: Shape, codec: str, context: int, timed: Callable[[Callable[[], Any]], float]
) -> dict[str, Any]:
    """One record of a fixed format."""
    page_bytes = kv_format(codec, HEAD_DIM).page_bytes
    num_bytes = shape.num_layers * shape.num_kv_heads * (-(-context // PAGE_SIZE)) * page_bytes
    memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    case = make_case(memory, shape, codec, batch_size=1, context=context)
    seconds = timed(functools.partial(case.calls, _op(codec)))
    return {
        "format": codec,
        "op": "cuda" if codec in cuda_attend.STRUCTS else "triton",
        **_sizes(shape, context, case.kv_bytes),
        "us_per_layer": round(seconds * 1e6 / shape.num_layers, 2),
    }


def _op(codec: str) -> Callable[..., torch.Tensor]:
    has_cuda = codec in cuda_attend.STRUCTS
    op: Callable[..., torch.Tensor] = cuda_attend.attend if has_cuda else triton_attend.attend
    return op


def _sizes(shape: Shape, context: int, num_bytes: int) -> dict[str, Any]:
    elements = 2 * shape.num_layers * shape.num_kv_heads * HEAD_DIM * context
    return {
        "context": context,
        "kv_bytes": num_bytes,
        "true_bits": round(num_bytes * 8 / elements, 3),
    }


def plans_to_try() -> Iterator[DecodePlan]:
    """Those of batch 1 at four KV heads."""
    for num_warps, num_stages in ((4, 3), (4, 4), (6, 2), (8, 2)):
        yield DecodePlan(
            num_splits=32, min_slices=4, num_warps=num_warps, num_stages=num_stages, polls=True
        )


_UNFIT = (triton.runtime.errors.OutOfResources, RuntimeError, AssertionError)
"""What a plan that does not fit ends in: an answer too."""


def try_plans(
    shape: Shape, mix: Mix, context: int, timed: Callable[[Callable[[], Any]], float]
) -> Iterator[dict[str, Any]]:
    """A line a plan."""
    case = make_mixed(shape, mix, context)
    for plan in plans_to_try():
        line = {"mix": mix.name, "context": context}
        line |= {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
        run = functools.partial(case.attend, functools.partial(cuda_mixed.attend_mixed, plan=plan))
        try:
            line["us_per_layer"] = round(timed(run) * 1e6 / shape.num_layers, 2)
        except _UNFIT as error:
            line["error"] = str(error)[:80]
        yield line


def try_rows(shape: Shape, mix: Mix, timed: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    """Tiles of prefill: 512 tokens at the end of 8,192."""
    case, chosen = make_mixed(shape, mix, 8192, num_new=512), mixed_attend.MAX_ROWS
    result: dict[str, Any] = {"prefill": mix.name}
    for mixed_attend.MAX_ROWS in (32, 64, 128):
        us = timed(functools.partial(case.attend, mixed_attend.attend_mixed)) * 1e6
        us /= shape.num_layers
        result[f"{mixed_attend.MAX_ROWS} rows, us_per_layer"] = round(us, 1)
    mixed_attend.MAX_ROWS = chosen
    return result


def compile_one(args: tuple[str, Mix | str, bool]) -> None:
    """Compile what a case launches, by a short one, for other processes to find."""
    shape_name, mix, is_prefill = args
    shape = replace(SHAPES[shape_name], num_layers=5)
    if isinstance(mix, str):
        measure_fixed(shape, mix, 4096, lambda run: 0.0 * (run() is None))
        return
    if is_prefill:
        try_rows(shape, mix, lambda run: run() or 0.0)
        return
    case = make_mixed(shape, mix, 4096)
    case.attend()
    case.append()


def main() -> None:
    """Print each case as it comes; write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--context", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--codecs", nargs="*", choices=CODECS, default=list(CODECS))
    parser.add_argument("--num-mixes", type=int, default=len(MIXES), help="the first of MIXES")
    parser.add_argument("--num-replays", type=int, default=9)
    parser.add_argument("--num-compilers", type=int, default=12, help="processes")
    parser.add_argument("--try-plans", action="store_true", help="instead of the cases")
    parser.add_argument("--prefill", action="store_true", help="instead of the cases")
    parser.add_argument("--json", type=Path, help="where the records go")
    args = parser.parse_args()
    middle = Mix(k_bits=3, v4=0.2)
    # Shares of 4-bit values take no kernels of their own.
    kernels = {
        (mix.k_bits, mix.cold > 0, mix.is_calibrated): mix for mix in MIXES[: args.num_mixes]
    }
    names = [] if args.try_plans else args.codecs
    jobs: list[tuple[str, Mix | str, bool]]
    jobs = [(args.shape, mix, False) for mix in (*kernels.values(), *names)]
    if args.prefill:
        jobs = [(args.shape, middle, True)]
    with multiprocessing.get_context("spawn").Pool(args.num_compilers) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    shape, records = SHAPES[args.shape], []
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    timed = functools.partial(time_graph, flush=flush, num_replays=args.num_replays)

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)

    for context in args.context if not args.prefill else ():
        if args.try_plans:
            for mix in MIXES[: args.num_mixes]:
                for line in try_plans(shape, mix, context, timed):
                    keep(line)
                torch.cuda.empty_cache()
            continue
        for codec in args.codecs:
            keep(measure_fixed(shape, codec, context, timed))
        for mix in MIXES[: args.num_mixes]:
            keep(measure_mixed(shape, mix, context, timed))
            torch.cuda.empty_cache()
    if args.prefill:
        keep(try_rows(shape, middle, timed))
    if args.json is not None:
        about = {
            "kind": "adaptive_attend",
            "shape": args.shape,
            "gpu": torch.cuda.get_device_name(),
            "num_sms": num_sms(),
            "torch": torch.__version__,
            "date": datetime.now(UTC).date().isoformat(),
            "command": f"benchmarks/adaptive_bench.py {' '.join(sys.argv[1:])}",
        }
        args.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
