"""The CUDA kernels of a layer as one chain: each reads what the one before wrote.

x -> qkv -> heads as if attended -> output -> route -> up -> down -> x of the next layer

or without `route`, whose work the output product then does. `attend_chain.py` puts attention in
its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gemv_setup import DEVICE, PLANNED, Sizes, graph_us, random_weight
from subten.kernels.cuda.experts import launch_down, launch_up
from subten.kernels.cuda.gemv import GemvPlan, linear
from subten.kernels.cuda.linear_route import linear_route
from subten.kernels.cuda.route import route
from subten.kernels.linear_route import Router, fold_router
from subten.kernels.route import Routing
from subten.kernels.weight_formats import Weight

MIN_LAYERS = 8

Plans = Mapping[str, GemvPlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Weights of one layer, and what stands for a stage that is left out."""

    qkv: Weight
    output: Weight
    router: Router
    gate_up: Weight
    down: Weight
    routing: Routing
    pages_PGB: torch.Tensor | None = None


class Chain:
    """Enough layers that their weights are cold in every round."""

    def __init__(self, sizes: Sizes, *, cold_mb: float) -> None:
        config, tokens = sizes.config, sizes.num_tokens
        self.sizes, dim = sizes, config.d_model
        self.has_fold = tokens == 1
        self.attention: Callable[[Layer, torch.Tensor], torch.Tensor] = self._as_if_attended
        self.norm_D = torch.ones(dim, dtype=torch.bfloat16, device=DEVICE)
        self.x_TD = torch.randn(tokens, dim, device=DEVICE)
        self.qkv_TN = torch.randn(tokens, sizes.qkv, device=DEVICE).bfloat16()
        self.act_AF = torch.randn(tokens * config.top_k, config.d_ffn, device=DEVICE).bfloat16()
        layers = [self._layer()]
        first = layers[0]
        share = min(1.0, tokens * config.top_k / config.num_experts)
        self.num_bytes = round(
            first.qkv.nbytes
            + first.output.nbytes
            + first.router.gate_ED.nbytes
            + share * (first.gate_up.nbytes + first.down.nbytes)
        )
        num_layers = max(MIN_LAYERS, math.ceil(cold_mb * 1e6 / self.num_bytes))
        self.layers = layers + [self._layer() for _ in range(num_layers - 1)]

    def _layer(self) -> Layer:
        config, name, tokens = self.sizes.config, self.sizes.weight_format, self.sizes.num_tokens
        num_experts, dim, hidden = config.num_experts, config.d_model, config.d_ffn
        ids = [torch.randperm(num_experts, device=DEVICE)[: config.top_k] for _ in range(tokens)]
        shape = (tokens, config.top_k)
        output = random_weight(dim, self.sizes.heads, weight_format=name)
        gate_ED = torch.randn(num_experts, dim, device=DEVICE) * dim**-0.5
        folded_EM = fold_router(gate_ED, self.norm_D, output) if self.has_fold else None
        return Layer(
            qkv=random_weight(self.sizes.qkv, dim, weight_format=name),
            output=output,
            router=Router(
                norm_weight_D=self.norm_D,
                gate_ED=gate_ED,
                eps=1e-6,
                top_k=config.top_k,
                renormalize=True,
                folded_EM=folded_EM,
            ),
            gate_up=random_weight(num_experts, 2 * hidden, dim, weight_format=name),
            down=random_weight(num_experts, dim, hidden, weight_format=name),
            routing=Routing(
                h_TD=torch.randn(tokens, dim, device=DEVICE).bfloat16(),
                topk_id_TK=torch.stack(ids).int(),
                topk_weight_TK=torch.full(shape, 1 / config.top_k, device=DEVICE),
            ),
        )

    def set_pages(self, make_pages: Callable[[], torch.Tensor]) -> None:
        """Give each layer pages of its own, for an `attention` that reads them."""
        self.layers = [replace(layer, pages_PGB=make_pages()) for layer in self.layers]

    def _as_if_attended(self, _layer: Layer, qkv_TN: torch.Tensor) -> torch.Tensor:
        return qkv_TN[:, : self.sizes.heads]

    def run(
        self, plans: Plans, *, pdl: bool, without: str | None = None, late: Collection[str] = ()
    ) -> torch.Tensor:
        """Launch every layer, or all but one stage: what reads its result reads a constant.

        Stages in `late` wait for the launch ahead even with `pdl`.
        """
        x_TD = self.x_TD
        late_plans = {
            name: replace(plans[name], starts_early=False) for name in late if name in plans
        }
        plans = {**plans, **late_plans}
        for layer in self.layers:
            x_TD = self._run_layer(layer, x_TD, plans, pdl, without, late)
        return x_TD

    def warm(self, plans: Plans) -> None:
        """Load the kernels, which a capture does not allow."""
        self._run_layer(self.layers[0], self.x_TD, plans, pdl=True, without=None)

    def _run_layer(
        self,
        layer: Layer,
        x_TD: torch.Tensor,
        plans: Plans,
        pdl: bool,
        without: str | None,
        late: Collection[str] = (),
    ) -> torch.Tensor:
        qkv_TN, routing, act_AF = self.qkv_TN, layer.routing, self.act_AF
        if without != "qkv":
            qkv_TN = linear(
                x_TD, layer.qkv, norm_weight_K=self.norm_D, eps=1e-6, plan=plans["qkv"], pdl=pdl
            )
        if without != "output":
            heads_TN = self.attention(layer, qkv_TN)
            options = {"plan": plans["output"], "pdl": pdl}
            if self.sizes.is_ahead:
                x_TD, routing = linear_route(
                    heads_TN, layer.output, layer.router, residual_TD=x_TD, **options
                )
                assert routing.ahead is not None, plans["output"]
            else:
                x_TD = linear(heads_TN, layer.output, residual_TN=x_TD, **options)
        if without != "route" and not self.sizes.is_ahead:
            routing = route(
                x_TD,
                self.norm_D,
                layer.router.gate_ED,
                eps=1e-6,
                top_k=self.sizes.config.top_k,
                renormalize=True,
                pdl=pdl and "route" not in late,
            )
        if without == "up":
            # `down` reads the ids before it waits, which `route` just before it does not allow.
            routing = layer.routing
        else:
            act_AF = launch_up(routing, layer.gate_up, plan=plans["up"], pdl=pdl)
        if without == "down":
            return x_TD
        return launch_down(
            routing, act_AF, layer.down, residual_TD=x_TD, plan=plans["down"], pdl=pdl
        )

    def layer_us(
        self,
        plans: Plans,
        *,
        pdl: bool = True,
        without: str | None = None,
        late: Collection[str] = (),
        num_replays: int,
    ) -> float:
        """Microseconds of one layer."""
        total = graph_us(
            lambda: self.run(plans, pdl=pdl, without=without, late=late), num_replays=num_replays
        )
        return total / len(self.layers)


def chain_records(chain: Chain, *, num_replays: int) -> Iterator[dict[str, Any]]:
    """One layer with PDL and without, then with each stage left out and what that saves."""
    plans = chain.sizes.table_plans(PLANNED)
    for pdl in (True, False):
        chain.run(plans, pdl=pdl)
        torch.cuda.synchronize()
        whole_us = chain.layer_us(plans, pdl=pdl, num_replays=num_replays)
        yield {"kernel": "layer", "pdl": pdl, "us": round(whole_us, 3), "bytes": chain.num_bytes}
        for stage in chain.sizes.stages():
            if chain.sizes.is_ahead and stage == "output":
                continue  # `up` needs what it chooses
            us = chain.layer_us(plans, pdl=pdl, without=stage, num_replays=num_replays)
            yield {"kernel": f"layer without {stage}", "pdl": pdl, "us": round(us, 3)} | {
                "saved_us": round(whole_us - us, 3)
            }


def early_records(chain: Chain, *, num_replays: int) -> Iterator[dict[str, Any]]:
    """One layer with all launches early, with none, and with each one late; then with those late
    that gain, added one by one, best first, for as long as the layer gets faster."""
    plans = {
        name: replace(p, starts_early=True) for name, p in chain.sizes.table_plans(PLANNED).items()
    }
    chain.warm(plans)
    torch.cuda.synchronize()
    times: dict[tuple[str, ...], float] = {}

    def measure(late: tuple[str, ...]) -> dict[str, Any]:
        times[late] = chain.layer_us(plans, late=late, num_replays=num_replays)
        return {
            "kernel": "layer",
            "pdl": True,
            "late": list(late),
            "us": round(times[late], 3),
            "bytes": chain.num_bytes,
        }

    stages = chain.sizes.stages()
    for late in ((), stages, *((stage,) for stage in stages)):
        yield measure(late)
    best: tuple[str, ...] = ()
    for stage in sorted(stages, key=lambda stage: times[stage,]):
        longer = (*best, stage)
        if longer not in times:
            yield measure(longer)
        if times[longer] < times[best]:
            best = longer
    yield {"kernel": "layer, best late", "late": list(best), "us": round(times[best], 3)}


def search_records(chain: Chain, *, num_best: int, num_replays: int) -> Iterator[dict[str, Any]]:
    """Stage after stage takes the plan with which the whole layer is fastest; two rounds."""
    plans = chain.sizes.table_plans(PLANNED)
    for _ in range(2):
        for stage in plans:
            tried = chain.sizes.all_plans(stage)
            for plan in tried:
                chain.warm(plans | {stage: plan})
            quick = {plan: chain.layer_us(plans | {stage: plan}, num_replays=3) for plan in tried}
            best = sorted(tried, key=lambda plan: quick[plan])[:num_best]
            times = {
                plan: chain.layer_us(plans | {stage: plan}, num_replays=num_replays)
                for plan in dict.fromkeys([*best, tried[0]])
            }
            plans[stage] = min(times, key=lambda plan: times[plan])
            for plan, us in times.items():
                yield {
                    "kernel": stage,
                    "pdl": True,
                    "us": round(us, 3),
                    "is_table": plan == tried[0],
                    "key": chain.sizes.key(stage),
                    "plan": asdict(plan),
                }


def joint_records(chain: Chain, *, num_best: int, num_replays: int) -> Iterator[dict[str, Any]]:
    """Plans of output and up sought together, then those of qkv and down, by the layer's time.

    Registers of one launch decide how many blocks of the next are there before it ends, so that
    neither is best by itself.
    """
    table = chain.sizes.table_plans(PLANNED)
    plans: dict[str, GemvPlan] = dict(table)
    quick: dict[tuple[GemvPlan, ...], float] = {}

    def quick_us(given: Plans) -> float:
        key = tuple(given[name] for name in PLANNED)
        if key not in quick:
            chain.warm(given)
            quick[key] = chain.layer_us(given, num_replays=2)
        return quick[key]

    def ranked(stage: str, given: Plans) -> list[GemvPlan]:
        tried = chain.sizes.all_plans(stage)
        return sorted(tried, key=lambda plan: quick_us({**given, stage: plan}))

    def pairs(outputs: Iterable[GemvPlan], ups: Sequence[GemvPlan]) -> list[dict[str, GemvPlan]]:
        return [{**plans, "output": output, "up": up} for output in outputs for up in ups]

    ups = ranked("up", plans)[:8]
    outputs = [plan for up in ups[:2] for plan in ranked("output", {**plans, "up": up})[:5]]
    first = sorted(pairs(dict.fromkeys(outputs), ups), key=quick_us)
    # The best outputs again, with every plan of up.
    for output in list(dict.fromkeys(given["output"] for given in first))[:2]:
        given = {**plans, "output": output}
        first += [{**given, "up": up} for up in ranked("up", given)[:3]]
    plans = min(first, key=quick_us)
    for stage in ("down", "qkv"):
        plans[stage] = ranked(stage, plans)[0]
    names = list(quick)
    best = sorted(names, key=lambda key: quick[key])[:num_best]
    for key in dict.fromkeys([*best, tuple(table[name] for name in PLANNED)]):
        given = dict(zip(PLANNED, key, strict=True))
        us = chain.layer_us(given, num_replays=num_replays)
        yield {
            "kernel": "layer",
            "pdl": True,
            "us": round(us, 3),
            "bytes": chain.num_bytes,
            "is_table": given == table,
            "tried": len(quick),
            "plans": {name: asdict(plan) for name, plan in given.items()},
        }
