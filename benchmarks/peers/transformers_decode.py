"""Measures batch-1 decoding by `transformers`: static cache, compiled forward pass, random weights.

    python benchmarks/peers/transformers_decode.py --shape qwen3-30b-a3b \
        --context-len 1024,8192 --experts batched_mm,grouped_mm \
        --json benchmarks/results/h200-peers.json

The model is the library's own class at a shape of `subten.bench.shapes`, with weights that its own
initialisation draws on the device. The cache is filled with random keys and values up to the
context, so that no prefill is needed. A step is a forward pass under `torch.compile` (in its mode
reduce-overhead, which replays CUDA graphs), the argmax, and the copy of the token to the host, as
`generate` needs it to find the end. Positions move around the context as in `subten bench latency
--shape`; a first round does not count. Works with transformers 5.17 and 5.24.
"""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from subten.bench.decode import DecodeWorkload
from subten.bench.latency import peak_memory_bytes
from subten.bench.records import add_records, origin, weights_dtype
from subten.bench.shapes import CONFIGS
from subten.device import detect
from subten.engine.roof import Roof, measure_roof
from subten.engine.stats import Percentiles

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Measure every context with every implementation of the experts; the fastest is kept."""
    args = parse(arguments)
    device = detect(args.device)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]
    roof = measure_roof(device.torch_device)
    fastest: dict[int, dict[str, Any]] = {}
    for experts in args.experts.split(","):
        model = build(args.shape, device=device.torch_device, dtype=dtype, experts=experts)
        for context in (int(text) for text in args.context_len.split(",")):
            workload = DecodeWorkload(context_len=context, num_steps=args.num_steps)
            torch.compiler.reset()
            found = measure(model, workload, roof=roof, mode=args.compile)
            found["settings"] = f"experts {experts}, {found['settings']}"
            print(f"{args.shape}, context {context}, {found['settings']}:", end=" ")
            print(f"TPOT {found['tpot_ms_p50']:.3f} ms, p99 {found['tpot_ms_p99']:.3f}", flush=True)
            if context in fastest and fastest[context]["tpot_ms_p50"] <= found["tpot_ms_p50"]:
                continue
            fastest[context] = {
                "kind": "peer_latency",
                "engine": "transformers",
                "version": transformers.__version__,
                "shape": args.shape,
                "weights_dtype": weights_dtype("none", args.dtype),
                "kv_cache_dtype": weights_dtype("none", args.dtype),
                "batch_size": 1,
                "context_len": context,
                **found,
                **origin(device),
                "command": shlex.join(["python", *(arguments or sys.argv)]),
            }
            if args.json is not None:
                add_records(args.json, [fastest[context]])
        del model


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", required=True, choices=sorted(CONFIGS))
    parser.add_argument("--context-len", default="1024", help="tokens in the cache, by commas")
    parser.add_argument("--num-steps", type=int, default=256, help="decode steps that count")
    parser.add_argument(
        "--experts", default="batched_mm,grouped_mm", help="experts_implementation, by commas"
    )
    parser.add_argument(
        "--compile", default="reduce-overhead", help="mode of torch.compile, or none"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", type=Path, help="list of records to add to")
    return parser.parse_args(arguments)


def build(shape: str, *, device: torch.device, dtype: torch.dtype, experts: str) -> Any:
    """The library's model of this shape, its weights drawn on the device by its own rules."""
    values = dict(CONFIGS[shape])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.max_position_embeddings = max(config.max_position_embeddings, 2**17 + 2**9)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation=experts
        )
    num_weights = sum(p.numel() for p in model.parameters())
    assert {p.device.type for p in model.parameters()} == {device.type}, device
    print(f"{type(model).__name__}: {num_weights / 1e9:.3f} B weights, {dtype}", flush=True)
    return model.eval()


@torch.no_grad()
def measure(model: Any, workload: DecodeWorkload, *, roof: Roof, mode: str) -> dict[str, Any]:
    """TPOT over rounds of steps whose positions move around the context."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cache = full_cache(model, workload.start_len + workload.steps_per_round)
    step = make_step(model, cache, mode)
    samples_ms: list[float] = []
    num_rounds = -(-workload.num_steps // workload.steps_per_round)
    for number in range(1 + num_rounds):
        set_length(cache, workload.start_len)
        times_ms = run_round(step, workload, device)
        samples_ms += times_ms if number else []
    tpot = Percentiles.of(samples_ms[: workload.num_steps])
    assert tpot is not None
    floor_ms = floor(model, cache, workload, roof)
    return {
        "tpot_ms_p50": tpot.p50,
        "tpot_ms_p99": tpot.p99,
        "tpot_num_samples": tpot.num_samples,
        "roof_tb_s": roof.tb_s,
        "floor_ms": floor_ms,
        "roof_fraction": floor_ms / tpot.p50,
        "peak_memory_bytes": peak_memory_bytes(device),
        "settings": f"StaticCache, sdpa, torch.compile {mode}",
    }


def make_step(model: Any, cache: StaticCache, mode: str) -> Step:
    """token [1, 1], position [1, 1] -> the next token [1, 1]; appends to the cache."""
    # The argument is called `cache` in 5.24 and was `past_key_values` in 5.17.
    names = inspect.signature(model.forward).parameters
    cache_argument = {"cache" if "cache" in names else "past_key_values": cache}

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=token, position_ids=position, use_cache=True, **cache_argument)
        logits = output.logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)

    return step if mode == "none" else torch.compile(step, mode=mode)


def run_round(step: Step, workload: DecodeWorkload, device: torch.device) -> list[float]:
    """Milliseconds of each step, from the token on the host to the next one there."""
    times_ms = []
    token = 1
    for i in range(workload.steps_per_round):
        start_s = time.perf_counter()
        token_11 = torch.tensor([[token]], device=device)
        position_11 = torch.tensor([[workload.start_len + i]], device=device)
        token = int(step(token_11, position_11).item())
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms


def full_cache(model: Any, max_len: int) -> StaticCache:
    """A static cache of random keys and values for one sequence of up to `max_len` tokens."""
    config = model.config
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    cache = StaticCache(config=config, max_cache_len=max_len)
    for layer in cache.layers:
        shape = (1, config.num_key_value_heads, 1, head_dim)
        empty = torch.zeros(shape, dtype=model.dtype, device=model.device)
        layer.lazy_initialization(empty, empty)
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def set_length(cache: StaticCache, num_tokens: int) -> None:
    """Take the first tokens of the cache for what came before."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(num_tokens)


def floor(model: Any, cache: StaticCache, workload: DecodeWorkload, roof: Roof) -> float:
    """Milliseconds to read what a step needs: chosen experts, all else, live keys and values."""
    shape = model.config
    total = 0.0
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * parameter.element_size()
        if "embed_tokens" in name:
            total += num_bytes / parameter.shape[0]
        elif ".experts." in name:
            num_experts = parameter.shape[0]
            total += num_bytes * shape.num_experts_per_tok / num_experts
        else:
            total += num_bytes
    for layer in cache.layers:
        row_bytes = 2 * layer.keys[:, :, 0].numel() * layer.keys.element_size()
        total += workload.mean_kv_len * row_bytes
    return total / roof.bytes_per_s * 1e3


if __name__ == "__main__":
    main()
