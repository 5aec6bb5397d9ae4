"""Decode steps of a model in memory at a given context: time, bytes and share of the roof.

The steps are those of a user's request: `Engine.step` on the clock of the host, so scheduling, the
step's inputs, its graph replay or launches, sampling, the copy of the token back and the event are
all inside. One thing is left out: the context is not computed but put there. The pool is full of
encoded random keys and values, and a prompt takes its pages without a forward pass. That changes no
byte that a decode step reads, and spares minutes of prefill.

Positions move: a round of steps starts below `context_len` and ends above it, so that its mean is
`context_len`; the first round does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from subten.bench.latency import peak_memory_bytes
from subten.bench.random_model import fill_pool, free_memory
from subten.bench.recording import experts_read, record_step
from subten.cache.allocator import PageAllocator
from subten.cache.pool import PagePool
from subten.core import (
    PAGE_SIZE,
    Batch,
    ConfigError,
    Request,
    SamplingParams,
    Sequence,
    refuse,
)
from subten.engine.engine import BatchRunner, Engine
from subten.engine.llm import LLM
from subten.engine.roof import Roof
from subten.engine.scheduler import Scheduler
from subten.engine.stats import Percentiles
from subten.engine.traffic import step_traffic
from subten.kernels.step import make_step
from subten.models.decoder import Decoder
from subten.weights.load import LoadedModel

MAX_ROUND = 256
"""Steps of a round: four pages of positions around `context_len`."""

NUM_WARMUP_PROMPTS = 2

TIMING = "wall clock of Engine.step, host included"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWorkload:
    """What is measured: `num_steps` decode steps, and the first token of `num_prompts` prompts.

    The prompts, fresh and random, come one at a time to an idle engine.
    """

    context_len: int
    batch_size: int = 1
    prompt_len: int = 512
    num_steps: int = 512
    num_prompts: int = 10

    def __post_init__(self) -> None:
        for name, low in (
            ("context_len", 2),
            ("batch_size", 1),
            ("prompt_len", 1),
            ("num_steps", 1),
            ("num_prompts", 1),
        ):
            if getattr(self, name) < low:
                raise refuse(
                    ConfigError, name, getattr(self, name), f"an integer of at least {low}"
                )

    @property
    def steps_per_round(self) -> int:
        """Steps between two fresh starts."""
        return min(self.num_steps, MAX_ROUND, 2 * self.context_len - 3)

    @property
    def start_len(self) -> int:
        """Tokens in the cache before the first step of a round."""
        return self.context_len - 1 - (self.steps_per_round - 1) // 2

    @property
    def mean_kv_len(self) -> float:
        """Tokens that a step attends to, its own included; mean over a round."""
        return self.start_len + 1 + (self.steps_per_round - 1) / 2

    @property
    def max_len(self) -> int:
        """Longest that a sequence gets, with one token to spare so that none ends by itself."""
        return max(self.start_len + self.steps_per_round, self.prompt_len) + 2

    @property
    def num_pages(self) -> int:
        """Pages that all this takes, and the one for each sequence that admission keeps free."""
        return self.batch_size * (math.ceil(self.max_len / PAGE_SIZE) + 1)


@torch.inference_mode()
def measure_decode(
    model: Decoder,
    workload: DecodeWorkload,
    *,
    roof: Roof,
    progress: Callable[[float], None] = lambda _share: None,
) -> dict[str, Any]:
    """The fields of a latency record that the measurement itself gives.

    Makes a page pool of the model's format and, on a GPU, resets the peak of its allocator.
    """
    device = model.device
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with LLM(
        _loaded(model),
        kv_cache_dtype=model.fmt.codec.name,
        quantization=model.quantization,
        quantize_head=model.quantize_head,
        max_num_seqs=workload.batch_size,
        max_model_len=workload.max_len,
        num_pages=workload.num_pages,
    ) as llm:
        fill_pool(model, _pool(llm))
        progress(0.1)
        rounds = _Rounds(llm, workload)
        samples_ms = rounds.run(lambda share: progress(0.1 + 0.8 * share))
        ttft = Percentiles.of(_first_tokens_ms(llm, workload))
        progress(1.0)
        tpot = Percentiles.of(samples_ms)
        assert tpot is not None and ttft is not None
        traffic = step_traffic(
            model,
            _pool(llm),
            batch_size=workload.batch_size,
            mean_kv_len=workload.mean_kv_len,
            experts_per_layer=rounds.experts_per_layer,
        )
    floor_ms = traffic.floor_ms(roof.bytes_per_s)
    return {
        **{name: value for name, value in asdict(workload).items() if name != "num_prompts"},
        "tpot_ms_p50": tpot.p50,
        "tpot_ms_p99": tpot.p99,
        "tpot_num_samples": tpot.num_samples,
        "ttft_ms_p50": ttft.p50,
        "ttft_num_samples": ttft.num_samples,
        "bytes_per_step": round(traffic.total_bytes),
        "weight_bytes_per_step": round(traffic.weight_bytes),
        "kv_bytes_per_step": round(traffic.kv_bytes),
        "experts_per_layer": traffic.experts_per_layer,
        "roof_tb_s": roof.tb_s,
        "roof_how": roof.how,
        "floor_ms": floor_ms,
        "roof_fraction": floor_ms / tpot.p50,
        "peak_memory_bytes": peak_memory_bytes(device),
        "timing": TIMING,
        "backends": dict(model.ops.backend),
    }


class _Rounds:
    """Rounds of decode steps over pages that are full already."""

    def __init__(self, llm: LLM, workload: DecodeWorkload) -> None:
        self.experts_per_layer = float(max(llm.model_config.top_k, 1))
        self._llm = llm
        self._workload = workload
        self._num_rounds = 0
        # The runner is the engine's own, graphs and all; only its scheduler is another, with a
        # budget that admits all prompts in one step.
        scheduler = Scheduler(
            PageAllocator(llm.pool.num_pages, llm.config.enable_prefix_caching),
            max_num_seqs=workload.batch_size,
            max_num_batched_tokens=workload.batch_size * workload.start_len,
            max_model_len=llm.max_model_len,
        )
        self._engine = Engine(scheduler, _WithoutPrefill(llm.engine.runner))

    def run(self, progress: Callable[[float], None]) -> list[float]:
        """Milliseconds of each counted step."""
        workload = self._workload
        num_counted = math.ceil(workload.num_steps / workload.steps_per_round)
        self._round()
        samples_ms: list[float] = []
        for done in range(num_counted):
            progress(done / num_counted)
            samples_ms += self._round()
        return samples_ms[: workload.num_steps]

    def _round(self) -> list[float]:
        """Start every sequence anew, decode, and end it."""
        self._start()
        samples_ms = []
        for _ in range(self._workload.steps_per_round):
            start_s = time.perf_counter()
            events = self._engine.step()
            samples_ms.append((time.perf_counter() - start_s) * 1e3)
            assert len(events) == self._workload.batch_size, (len(events), self._workload)
            assert all(event.finish_reason is None for event in events), events[0]
        running = list(self._engine.scheduler.running.values())
        if self._workload.batch_size > 1 and self._llm.model_config.is_moe:
            self.experts_per_layer = self._count_experts(running)
        for sequence in running:
            self._engine.cancel(sequence.request.request_id)
        self._engine.step()
        assert not self._engine.has_work
        return samples_ms

    def _start(self) -> None:
        shape = (self._workload.batch_size, self._workload.start_len)
        prompts = torch.randint(self._llm.model_config.vocab_size, shape).tolist()
        for row, prompt in enumerate(prompts):
            self._engine.add(
                Request(
                    request_id=f"round-{self._num_rounds}-{row}",
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(max_tokens=2**31 - 1, ignore_eos=True),
                    seed=(self._num_rounds << 32) + row,
                )
            )
        self._num_rounds += 1
        events = self._engine.step()
        assert len(events) == self._workload.batch_size, (len(events), self._workload)

    def _count_experts(self, sequences: list[Sequence]) -> float:
        """Distinct experts of the step before, run again without a graph."""
        model = self._llm.loaded.model
        step = make_step(
            token_ids=[sequence.token_ids[-2:-1] for sequence in sequences],
            starts=[len(sequence.token_ids) - 2 for sequence in sequences],
            page_ids=[sequence.page_ids for sequence in sequences],
            device=model.device,
        )
        return experts_read(record_step(model, step, _pool(self._llm).pages_LPGB))


def _pool(llm: LLM) -> PagePool:
    assert isinstance(llm.pool, PagePool), type(llm.pool)
    return llm.pool


class _WithoutPrefill:
    """A runner whose prompts cost nothing: their pages hold keys and values already."""

    def __init__(self, runner: BatchRunner) -> None:
        self.runner = runner

    def run(self, batch: Batch) -> list[int | None]:
        """The true tokens of a decode step; token 0 for prompts, which come all at once."""
        if all(item.num_tokens == 1 and item.start > 0 for item in batch.items):
            return self.runner.run(batch)
        assert all(item.start == 0 and item.needs_token for item in batch.items), batch
        return [0] * len(batch.items)

    def forget(self, request_id: str) -> None:
        """Nothing is kept here."""
        self.runner.forget(request_id)


def _first_tokens_ms(llm: LLM, workload: DecodeWorkload) -> list[float]:
    """Milliseconds from the arrival of each prompt to its first token, on an idle engine."""
    samples_ms = []
    for number in range(NUM_WARMUP_PROMPTS + workload.num_prompts):
        prompt = torch.randint(llm.model_config.vocab_size, (workload.prompt_len,)).tolist()
        request = Request(
            request_id=f"prompt-{number}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            seed=number,
        )
        llm.engine.add(request)
        start_s = time.perf_counter()
        events = llm.engine.step()
        while not events:
            events = llm.engine.step()
        samples_ms.append((time.perf_counter() - start_s) * 1e3)
        assert events[0].token_id is not None, events[0]
    return samples_ms[NUM_WARMUP_PROMPTS:]


def _loaded(model: Decoder) -> LoadedModel:
    return LoadedModel(
        model=model,
        config=model.config,
        tokenizer=None,
        name="random",
        weight_bytes=model.weight_bytes,
        dtype=model.dtype,
        quantization=model.quantization,
    )
