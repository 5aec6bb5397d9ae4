"""Attention within a layer's chain of kernels: `append_attend`, or `kv_append` and `attend`.

x -> qkv -> append, attend -> output -> route -> up -> down -> x of the next layer

So the kernels around take SMs, memory and L2 as in a step, and all start early. Layers have weights
and pages of their own, enough that all are cold in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from gemv_chain import Chain, Layer
from gemv_setup import DEVICE, PLANNED, Job, Sizes, compile_all
from subten.bench.shapes import SHAPES
from subten.codecs import KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels.cuda import append_attend as cuda_append_attend
from subten.kernels.cuda import attend as cuda_attend
from subten.kernels.cuda.append_attend import append_attend
from subten.kernels.cuda.attend import DecodePlan, plan_decode, slice_bytes
from subten.kernels.cuda.kv_append import ENCODERS, kv_append
from subten.kernels.step import StepTensors, make_step
from subten.layers.rope import cos_sin_table

Record = dict[str, Any]
Attention = Callable[[Layer, torch.Tensor], torch.Tensor]

CHAIN_CONTEXTS = (1024, 4096, 32768)
CHAIN_CODECS = ("bf16", "fp8", "int4")

CHAIN_PLANS = {
    "int4": ((4, 8, 3), (4, 12, 2), (4, 16, 2), (8, 12, 2), (8, 16, 2), (16, 16, 2), (16, 16, 3)),
    "fp4": ((4, 12, 2), (4, 16, 2), (8, 12, 2), (8, 16, 2), (16, 16, 2)),
    "fp4_mx": ((4, 12, 2), (4, 16, 2), (8, 12, 2), (8, 16, 2), (16, 16, 2)),
    "int2": ((4, 16, 2), (8, 8, 2), (8, 12, 2), (8, 16, 2), (16, 16, 2), (16, 16, 3)),
    "fp8": ((8, 12, 2), (4, 8, 4), (8, 8, 4), (4, 12, 3), (8, 12, 3), (8, 16, 2), (16, 16, 2)),
    "int8": ((8, 12, 2), (4, 8, 4), (8, 8, 4), (4, 12, 3), (8, 12, 3), (8, 16, 2), (16, 16, 2)),
    "bf16": ((4, 12, 2), (8, 8, 5), (8, 12, 3), (16, 12, 3), (16, 16, 2), (32, 16, 3), (64, 16, 3)),
}
"""Codec to (min_slices, warps, stages); the last one of each leaves 1024 tokens in one block, which
merges nothing. More than 9 warps turn 8 queries, a key and a value in one round."""

WAYS = ("two", "one", "polls", "fills")
"""`kv_append` and `attend`; `append_attend`; the same, with splits that poll; and with a block for
every SM besides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A decode step of one shape at one context; `fill` makes pages of random rows."""

    sizes: Sizes
    fmt: KVFormat
    context: int
    tensors: StepTensors
    cos_sin_PD: torch.Tensor
    norms: tuple[torch.Tensor | None, torch.Tensor | None]

    @classmethod
    def of(cls, sizes: Sizes, codec: str, context: int) -> Step:
        """`sizes.num_tokens` sequences that each attend to `context` tokens, the last one new."""
        config, batch = sizes.config, sizes.num_tokens
        pages_each = -(-context // PAGE_SIZE)
        tensors = make_step(
            token_ids=[[0]] * batch,
            starts=[context - 1] * batch,
            page_ids=torch.randperm(batch * pages_each).view(batch, pages_each).tolist(),
            device=DEVICE,
        )
        norm_D = torch.ones(config.head_dim, dtype=torch.bfloat16, device=DEVICE)
        return cls(
            sizes=sizes,
            fmt=kv_format(codec, config.head_dim),
            context=context,
            tensors=tensors,
            cos_sin_PD=cos_sin_table(
                config.rope, head_dim=config.head_dim, max_len=context, device=DEVICE
            ),
            norms=(norm_D, norm_D) if config.has_qk_norm else (None, None),
        )

    def make_pages(self, fill: Callable[[torch.Tensor, KVFormat], None]) -> torch.Tensor:
        """Pages of one layer."""
        num_pages = self.tensors.page_table_SP.numel()
        shape = (num_pages, self.sizes.config.num_kv_heads, self.fmt.page_bytes)
        pages_PGB = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
        fill(pages_PGB, self.fmt)
        return pages_PGB

    def one_launch(self, plan: DecodePlan) -> Attention:
        """Attention by `append_attend`."""

        def run(layer: Layer, qkv_TN: torch.Tensor) -> torch.Tensor:
            q_norm_D, k_norm_D = self.norms
            q_THD, k_TGD, v_TGD = self._rows(qkv_TN)
            out_THD = append_attend(
                q_THD,
                k_TGD,
                v_TGD,
                layer.pages_PGB,
                self.fmt,
                self.cos_sin_PD,
                self.tensors,
                scale=self.fmt.head_dim**-0.5,
                rotation_DD=self._rotation(),
                q_norm_weight_D=q_norm_D,
                k_norm_weight_D=k_norm_D,
                eps=1e-6,
                plan=plan,
            )
            return out_THD.view(len(qkv_TN), -1)

        return run

    def two_launches(self, plan: DecodePlan) -> Attention:
        """Attention by `kv_append` and `attend`."""

        def run(layer: Layer, qkv_TN: torch.Tensor) -> torch.Tensor:
            q_norm_D, k_norm_D = self.norms
            q_THD, k_TGD, v_TGD = self._rows(qkv_TN)
            turned_THD = kv_append(
                k_TGD,
                v_TGD,
                layer.pages_PGB,
                self.fmt,
                self.cos_sin_PD,
                self.tensors.position_T,
                self.tensors.slot_T,
                rotation_DD=self._rotation(),
                norm_weight_D=k_norm_D,
                eps=1e-6,
                q_THD=q_THD,
                q_norm_weight_D=q_norm_D,
            )
            out_THD = cuda_attend.attend(
                turned_THD,
                layer.pages_PGB,
                self.fmt,
                self.tensors,
                scale=self.fmt.head_dim**-0.5,
                rotation_DD=self._rotation(),
                plan=plan,
            )
            return out_THD.view(len(qkv_TN), -1)

        return run

    def chosen_plan(self) -> DecodePlan:
        """The plan that the ops take."""
        return plan_decode(
            self.fmt,
            num_sms=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
            num_sequences=self.sizes.num_tokens,
            num_kv_heads=self.sizes.config.num_kv_heads,
        )

    def plans(self) -> list[DecodePlan]:
        """The chosen plan, then those of CHAIN_PLANS with as many splits."""
        chosen = self.chosen_plan()
        tried = [
            DecodePlan(
                num_splits=chosen.num_splits,
                min_slices=min_slices,
                num_warps=num_warps,
                num_stages=num_stages,
                polls=chosen.polls,
                fills=chosen.fills,
            )
            for min_slices, num_warps, num_stages in CHAIN_PLANS[self.fmt.codec.name]
        ]
        config = self.sizes.config
        for plan in tried:
            plan.check(config.num_heads // config.num_kv_heads, slice_bytes(self.fmt))
        return list(dict.fromkeys([chosen, *tried]))

    def jobs(self) -> set[Job]:
        """The kernels of attention."""
        codec, head_dim = self.fmt.codec.name, self.fmt.head_dim
        config = self.sizes.config
        group = config.num_heads // config.num_kv_heads
        return {
            *(
                job
                for polls in (False, True)
                for job in (
                    ("append_attend.cu", cuda_append_attend.kernel_name(self.fmt, polls=polls)),
                    ("attend.cu", cuda_attend.kernel_name(self.fmt, head_dim, group, polls=polls)),
                )
            ),
            ("kv_append.cu", f"kv_append_kernel<{ENCODERS[codec]}, {head_dim}, u16>"),
        }

    def _rows(self, qkv_TN: torch.Tensor) -> tuple[torch.Tensor, ...]:
        config = self.sizes.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        return qkv_TN.view(len(qkv_TN), -1, config.head_dim).split(heads, dim=1)

    def _rotation(self) -> torch.Tensor | None:
        return hadamard(self.fmt.head_dim, DEVICE) if self.fmt.codec.is_rotated else None


def step_records(chain: Chain, step: Step, *, num_replays: int) -> Iterator[Record]:
    """A layer without attention; then, for each plan, with it in two launches, in one, and in one
    whose splits poll, without and with a block for every SM.

    `attention_us` is what attention adds to the layer; `is_equal`: the bits are those of two.
    """
    gemv_plans = chain.sizes.table_plans(PLANNED)

    def layer_us(attention: Attention) -> tuple[float, torch.Tensor]:
        chain.attention = attention
        x_TD = chain.run(gemv_plans, pdl=True)
        torch.cuda.synchronize()
        # Clocks and neighbours wander: the middle one of three.
        times = [chain.layer_us(gemv_plans, num_replays=num_replays) for _ in range(3)]
        return float(median(times)), x_TD

    base_us, _ = layer_us(lambda _layer, qkv_TN: qkv_TN[:, : chain.sizes.heads])
    yield {"attention": "none", "us": round(base_us, 3)}
    chosen = step.chosen_plan()
    for plan in step.plans():
        ways = {
            "two": step.two_launches(replace(plan, polls=False, fills=False)),
            "one": step.one_launch(replace(plan, polls=False, fills=False)),
            "polls": step.one_launch(replace(plan, polls=True, fills=False)),
            "fills": step.one_launch(replace(plan, polls=True, fills=True)),
        }
        measured = {name: layer_us(attention) for name, attention in ways.items()}
        for name, (us, x_TD) in measured.items():
            yield {
                "attention": name,
                "plan": asdict(plan),
                "is_chosen": plan == chosen,
                "us": round(us, 3),
                "attention_us": round(us - base_us, 3),
                "is_equal": torch.equal(x_TD, measured["two"][1]),
            }


def measure_chains(
    *,
    shapes: Sequence[str],
    weight_format: str,
    codecs: Sequence[str],
    contexts: Sequence[int],
    num_replays: int,
    cold_mb: float,
    fill: Callable[[torch.Tensor, KVFormat], None],
) -> Iterator[Record]:
    """Every shape, codec and context."""
    cases = []
    for shape in shapes:
        sizes = Sizes(config=SHAPES[shape], weight_format=weight_format, num_tokens=1)
        cases += [
            (shape, Step.of(sizes, codec, context)) for codec in codecs for context in contexts
        ]
    jobs = {job for _, step in cases for job in step.jobs()}
    for _, step in cases:
        jobs |= step.sizes.jobs(step.sizes.stages(), with_all_plans=False)
    compile_all(jobs)
    chain: Chain | None = None
    for shape, step in cases:
        if chain is None or chain.sizes != step.sizes:
            chain = None
            torch.cuda.empty_cache()
            chain = Chain(step.sizes, cold_mb=cold_mb)
        chain.set_pages(lambda step=step: step.make_pages(fill))
        for record in step_records(chain, step, num_replays=num_replays):
            yield {
                "shape": shape,
                "weights": weight_format,
                "codec": step.fmt.codec.name,
                "context": step.context,
                "num_layers": len(chain.layers),
                **record,
            }


def table(records: Sequence[Record]) -> str:
    """A row a plan: microseconds that attention adds to a layer, each way."""
    rows = [
        f"{'shape':14} {'codec':5} {'context':>7} {'splits,min,warps,stages':>24}"
        + "".join(f" {way:>7}" for way in WAYS)
    ]
    found = {(*_key(r), r["attention"]): r for r in records if "plan" in r}
    for record in records:
        case = f"{record['shape']:14} {record['codec']:5} {record['context']:7}"
        if record["attention"] == "none":
            rows.append(f"{case} {'rest of the layer':>24} {record['us']:7.2f}")
        if record["attention"] != WAYS[0]:
            continue
        plan = ",".join(map(str, list(record["plan"].values())[:4]))
        mark = "*" if record["is_chosen"] else " "
        ways = [found[*_key(record), way] for way in WAYS]
        row = f"{case} {mark + plan:>24}" + "".join(f" {w['attention_us']:7.2f}" for w in ways)
        rows.append(row + ("" if all(w["is_equal"] for w in ways) else "  BITS DIFFER"))
    return "\n".join(rows)


def _key(record: Record) -> tuple[Any, ...]:
    return (record["shape"], record["codec"], record["context"], *record["plan"].values())
