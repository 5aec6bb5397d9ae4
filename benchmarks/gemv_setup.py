"""What the benchmarks of the small-batch CUDA kernels share: weights, plans, compiling, timing."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from subten.config import ModelConfig
from subten.kernels.cuda import linear_route, runtime
from subten.kernels.cuda.experts import MEASURED_DOWN, UP_TILE, plan_down, up_ahead_name
from subten.kernels.cuda.gemv import (
    FORMATS,
    KEPT_UNITS,
    MEASURED,
    MEASURED_AHEAD,
    NUM_SMS,
    TILE_ROWS,
    GemvPlan,
    is_one_token,
    kernel_name,
    plan_ahead,
    plan_gemv,
    units_of_thread,
)
from subten.kernels.cuda.route import keys_of_lane
from subten.kernels.weight_formats import Weight

DEVICE = torch.device("cuda", 0)

PLANNED = ("qkv", "output", "up", "down")
"""Launches of a layer that have a plan."""

Job = tuple[str, str]
"""A .cu file and the name of a kernel in it."""


def random_weight(*shape: int, weight_format: str) -> Weight:
    """Random codes, so that the bytes are as incompressible as a model's; small finite scales."""
    weight = Weight(shape, quantization=weight_format, device=DEVICE, dtype=torch.bfloat16)
    if weight.scale is None:
        weight.codes.normal_(std=0.02)
    else:
        weight.codes.view(torch.int32).random_()
        weight.scale.fill_(1e-3)
    return weight


def gemv_plans(best: GemvPlan, num_tiles: int, dim: int, weight_format: str) -> Iterator[GemvPlan]:
    """The table's plan, then every other with 64 blocks, and 16 KiB in flight an SM."""
    yield best
    depths = FORMATS[weight_format].depths
    num_blocks = dim // FORMATS[weight_format].block
    for warps_k, warps_n, tiles in itertools.product(
        (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4)
    ):
        warps, grid = warps_k * warps_n, -(-num_tiles // (warps_n * tiles))
        is_legal = warps_k <= num_blocks and tiles <= 2 * warps_k and 4 <= warps <= 16
        if not is_legal or grid < 64:
            continue
        blocks_of_warp = -(-num_blocks // warps_k) * tiles
        warps_sm = min(16, grid * warps / NUM_SMS)
        for i, depth in enumerate(depths):
            plan = GemvPlan(warps_k=warps_k, warps_n=warps_n, tiles=tiles, depth=depth)
            is_more_than_all = i > 0 and depths[i - 1] >= blocks_of_warp
            is_enough = min(depth, blocks_of_warp) * warps_sm >= 16 or depth >= blocks_of_warp
            if plan != best and is_enough and not is_more_than_all:
                yield plan


def down_plans(best: GemvPlan, top_k: int, hidden: int, weight_format: str) -> Iterator[GemvPlan]:
    """The table's plan, then every other number of warps an expert, and every depth."""
    yield best
    for warps_k, depth in itertools.product((1, 2, 3, 4, 6, 8), FORMATS[weight_format].depths):
        plan = GemvPlan(warps_k=warps_k, warps_n=top_k, depth=depth)
        is_legal = warps_k * top_k <= 16 and warps_k <= hidden // FORMATS[weight_format].block
        if is_legal and plan != best:
            yield plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The matrices of a model in one format: their plans, and the kernels that run them.

    `is_ahead`: the output product chooses the experts, and there is no launch for the router.
    """

    config: ModelConfig
    weight_format: str
    num_tokens: int
    is_ahead: bool = False

    def stages(self) -> tuple[str, ...]:
        """The launches of a layer around attention; the router's has no plan."""
        return PLANNED if self.is_ahead else (*PLANNED, "route")

    def _is_ahead(self, name: str) -> bool:
        return self.is_ahead and name in ("output", "up")

    @property
    def heads(self) -> int:
        """Features that attention gives."""
        return self.config.num_heads * self.config.head_dim

    @property
    def qkv(self) -> int:
        """Rows of query, key and value."""
        return self.heads + 2 * self.config.num_kv_heads * self.config.head_dim

    def key(self, name: str) -> tuple[int, int, str]:
        """Key of a matrix in the table of plans."""
        config = self.config
        sizes = {
            "qkv": (self.qkv // TILE_ROWS, config.d_model),
            "output": (config.d_model // TILE_ROWS, self.heads),
            "head": (config.vocab_size // TILE_ROWS, config.d_model),
            "up": (config.top_k * config.d_ffn // UP_TILE, config.d_model),
            "down": (config.top_k, config.d_ffn),
        }[name]
        return (*sizes, self.weight_format)

    def table_plan(self, name: str) -> GemvPlan:
        """The plan that the op takes."""
        if name == "down":
            return plan_down(*self.key(name))
        if self._is_ahead(name):
            return plan_ahead(*self.key(name))
        return plan_gemv(*self.key(name))

    def table_plans(self, names: Iterable[str]) -> dict[str, GemvPlan]:
        """The plans that the ops take."""
        return {name: self.table_plan(name) for name in names}

    def all_plans(self, name: str) -> list[GemvPlan]:
        """Plans that are worth a try, the table's first."""
        best, key = self.table_plan(name), self.key(name)
        plans = list(down_plans(best, *key) if name == "down" else gemv_plans(best, *key))
        if self._is_ahead(name):
            plans = [plan for plan in plans if units_of_thread(key[1], plan) <= KEPT_UNITS]
        return plans

    def job(self, name: str, plan: GemvPlan | None) -> Job:
        """The kernel of a matrix or of the router."""
        if plan is None:
            return "route.cu", f"route_kernel<{keys_of_lane(self.config.num_experts)}>"
        if self._is_ahead(name):
            return self._job_ahead(name, plan)
        flags = []
        if name != "down":
            flags = [is_one_token(self.num_tokens, self.key(name)[1], plan)]
        if name in ("up", "down"):
            return "experts.cu", kernel_name(f"{name}_kernel", self.weight_format, plan, *flags)
        flags = [name == "output", *flags]
        return "linear.cu", kernel_name("linear_kernel", self.weight_format, plan, *flags)

    def _job_ahead(self, name: str, plan: GemvPlan) -> Job:
        config = self.config
        if name == "up":
            return "up_ahead.cu", up_ahead_name(self.weight_format, plan, config.d_model)
        shape = (config.d_model, self.heads)
        name = linear_route.kernel_name(self.weight_format, plan, shape, config.num_experts)
        return "linear_route.cu", name

    def jobs(self, names: Iterable[str], *, with_all_plans: bool) -> set[Job]:
        """Every kernel that plans of those matrices need."""
        jobs = set()
        for name in names:
            if name == "route":
                jobs.add(self.job(name, None))
                continue
            plans = self.all_plans(name) if with_all_plans else [self.table_plan(name)]
            jobs |= {self.job(name, plan) for plan in plans}
        return jobs


def compile_all(jobs: set[Job]) -> None:
    """Fill the disk cache with those kernels, on all cores."""
    arch = runtime.architecture(torch.cuda.get_device_capability(DEVICE))
    sources, names = zip(*sorted(jobs), strict=True)
    num_workers = min(len(jobs), os.cpu_count() or 1, 16)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        list(pool.map(_compile, sources, names, [arch] * len(jobs)))


def _compile(source: str, name: str, arch: str) -> None:
    runtime.cached_compile(source, name, arch)


def graph_us(launch_all: Callable[[], object], *, num_replays: int) -> float:
    """Median microseconds of a CUDA graph of what `launch_all` launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = launch_all()
    times_ms = []
    for _ in range(num_replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    del kept
    return float(median(times_ms[1:])) * 1e3


def plan_row(plan: GemvPlan) -> tuple[int, int, int, int]:
    """A plan as the tables write it."""
    return (plan.warps_k, plan.warps_n, plan.tiles, plan.depth)


def print_tables(records: Iterable[dict[str, Any]]) -> None:
    """The tables of plans, gemv.py's and `experts.MEASURED_DOWN`, with the fastest of some records.

    A record of a chain is preferred to one of a kernel alone, and what was not measured stays.
    """
    gemv: dict[tuple[int, int, str], tuple[int, ...]] = dict(MEASURED)
    ahead: dict[tuple[int, int, str], tuple[int, ...]] = dict(MEASURED_AHEAD)
    down: dict[tuple[int, int, str], tuple[int, ...]] = dict(MEASURED_DOWN)
    ranked = [r for r in records if r.get("plan") and r.get("pdl") and r.get("key")]
    ranked.sort(key=lambda r: (r["mode"] == "chain", -r["us"]))
    for record in ranked:
        key, plan = tuple(record["key"]), GemvPlan(**record["plan"])
        if record["kernel"] == "down":
            down[key] = (plan.warps_k, plan.depth)
        elif record.get("is_ahead") and record["kernel"] in ("output", "up"):
            ahead[key] = plan_row(plan)
        else:
            gemv[key] = plan_row(plan)
    for name, table in (("MEASURED", gemv), ("MEASURED_AHEAD", ahead), ("MEASURED_DOWN", down)):
        print(f"{name} = {{")
        for (first, second, weight_format), row in table.items():
            print(f'    ({first}, {second}, "{weight_format}"): {row},')
        print("}")
