"""TTFT and TPOT of a model at a fixed prompt and output length, with percentiles and memory.

Every run has fresh random prompts (prefix caching would otherwise answer from the pages of the
run before) and generates exactly `output_len` tokens. Warm-up runs are not counted. TTFT is from
the request's acceptance to its first token, TPOT is (last - first) / (tokens - 1): one sample of
each for every request of every run.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from subten.core import PAGE_SIZE, ConfigError, SamplingParams, refuse
from subten.engine.completion import Completion
from subten.engine.llm import LLM
from subten.engine.stats import LatencySummary


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyShape:
    """What one measurement asks of the engine."""

    prompt_len: int
    output_len: int
    batch_size: int = 1
    num_iters: int = 10
    num_warmup: int = 2

    def __post_init__(self) -> None:
        for name, low in (("prompt_len", 1), ("output_len", 2), ("batch_size", 1)):
            if getattr(self, name) < low:
                raise refuse(
                    ConfigError, name, getattr(self, name), f"an integer of at least {low}"
                )
        if self.num_iters < 1:
            raise refuse(ConfigError, "num_iters", self.num_iters, "an integer of at least 1")
        if self.num_warmup < 0:
            raise refuse(ConfigError, "num_warmup", self.num_warmup, "an integer of at least 0")


def measure_latency(
    llm: LLM, shape: LatencyShape, *, progress: Callable[[float], None] = lambda _share: None
) -> dict[str, Any]:
    """Run `shape` on `llm` and report milliseconds, tokens a second, bytes and sample counts.

    `output_tokens_per_s` counts generated tokens over the time of all runs, prefill included.
    """
    _check(llm, shape)
    rng = random.Random(0)
    total = shape.num_warmup + shape.num_iters
    completions: list[Completion] = []
    elapsed_s = 0.0
    for run in range(total):
        prompts = [_random_prompt(rng, llm, shape.prompt_len) for _ in range(shape.batch_size)]
        if run == shape.num_warmup:
            _reset_peak(llm)
        start_s = time.perf_counter()
        done = llm.generate(prompts, _params(shape))
        if run >= shape.num_warmup:
            elapsed_s += time.perf_counter() - start_s
            completions += done
        progress((run + 1) / total)
    for completion in completions:
        assert len(completion.token_ids) == shape.output_len, completion.finish_detail
    return _result(llm, shape, completions, elapsed_s)


def _check(llm: LLM, shape: LatencyShape) -> None:
    """Refuse what would end early or queue, and so measure something else."""
    length = shape.prompt_len + shape.output_len
    if length > llm.max_model_len:
        raise refuse(
            ConfigError,
            "prompt_len, output_len",
            f"{shape.prompt_len} + {shape.output_len} tokens",
            f"together at most max_model_len = {llm.max_model_len}",
        )
    most = min(llm.config.max_num_seqs, llm.pool.num_pages // -(-length // PAGE_SIZE))
    if shape.batch_size > most:
        raise refuse(
            ConfigError,
            "batch_size",
            shape.batch_size,
            f"1 to {most}, all that the page pool and max_num_seqs let run at a time",
        )


def _result(
    llm: LLM, shape: LatencyShape, completions: list[Completion], elapsed_s: float
) -> dict[str, Any]:
    summary = LatencySummary.of(completion.timings for completion in completions)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "kv_cache_dtype": llm.config.kv_cache_dtype,
        "kv_true_bits": llm.pool.full_page_bits,
        "kv_bytes_per_token": llm.pool.bytes_per_token,
        **asdict(shape),
        "ttft_ms": asdict(summary.ttft_ms) if summary.ttft_ms else None,
        "tpot_ms": asdict(summary.tpot_ms) if summary.tpot_ms else None,
        "itl_ms": asdict(summary.itl_ms) if summary.itl_ms else None,
        "output_tokens_per_s": num_tokens / elapsed_s,
        "peak_memory_bytes": peak_memory_bytes(llm.device.torch_device),
        "quantization": llm.loaded.quantization,
        "weight_bytes": llm.loaded.weight_bytes,
        "dtype": str(llm.loaded.dtype).removeprefix("torch."),
        "backends": dict(llm.loaded.model.ops.backend),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory so far: of the GPU since the last reset, or resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak(llm: LLM) -> None:
    if llm.device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(llm.device.torch_device)


def _random_prompt(rng: random.Random, llm: LLM, prompt_len: int) -> list[int]:
    vocab_size = llm.model_config.vocab_size
    return [rng.randrange(vocab_size) for _ in range(prompt_len)]


def _params(shape: LatencyShape) -> SamplingParams:
    return SamplingParams(max_tokens=shape.output_len, temperature=0.0, ignore_eos=True)
