"""The commands that measure and reckon: plan, eval kv, bench latency."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subten.cli_bench import SHAPES_HELP, bench_kernels, codec_list, integer_list, latency_of_shape
from subten.cli_bench_serve import bench_serve
from subten.cli_eval import eval_keys, eval_kv
from subten.cli_options import (
    DEMO,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonFileOption,
    JsonOption,
    KVBitsOption,
    KVCacheOption,
    KVCachesOption,
    MaxModelLenOption,
    ModelOption,
    check_json_file,
    new_app,
    print_json,
    progress,
    report,
    resolve_model,
)
from subten.core import ConfigError, refuse

if TYPE_CHECKING:
    from subten.bench.plan import Plan
    from subten.config import ModelConfig

eval_app = new_app()
bench_app = new_app()


def register(app: typer.Typer) -> None:
    """Add these commands to the `subten` command."""
    app.command()(plan)
    eval_app.command("kv")(eval_kv)
    eval_app.command("keys")(eval_keys)
    app.add_typer(eval_app, name="eval")
    bench_app.command("kernels")(bench_kernels)
    bench_app.command("serve")(bench_serve)
    app.add_typer(bench_app, name="bench")


@eval_app.callback()
def eval_group() -> None:
    """Measure quality.

    \b
    Example:
      subten eval kv --text wiki.txt --kv-cache-dtype bf16,int4
    """


@bench_app.callback()
def bench_group() -> None:
    """Measure speed.

    \b
    Examples:
      subten bench latency --kv-cache-dtype bf16,int4
      subten bench kernels --shape qwen3-30b-a3b --quantization int4
    """


def plan(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder, .gguf file, hub name, demo or demo-dense."),
    ] = None,
    shape: Annotated[str | None, typer.Option(help=SHAPES_HELP)] = None,
    kv_cache_dtype: KVCacheOption = "bf16",
    kv_bits_budget: KVBitsOption = None,
    context_len: Annotated[
        int | None,
        typer.Option(help="Tokens in one sequence's cache; default: 8192, or the model's context."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    quantization: Annotated[
        str, typer.Option(help="Weights: none (16 bits), fp8 or int4.")
    ] = "none",
    bandwidth: Annotated[
        float | None, typer.Option(help="Memory bandwidth, 1e12 bytes/s; default: an H200's.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory, 1e9 bytes; default: this GPU's or an H200's.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Bytes that one token costs, the time floor that follows, and whether it all fits.

    \b
    Examples:
      subten plan --shape qwen3-30b-a3b --kv-cache-dtype int4 --context-len 32768
      subten plan --shape mixtral-8x7b --quantization fp8 --batch-size 8 --json
    """
    from subten.bench.plan import H200_BANDWIDTH_TBPS, Workload, make_plan

    for field, given in (("bandwidth", bandwidth), ("memory", memory)):
        if given is not None and not 0 < given < math.inf:
            raise refuse(ConfigError, field, given, "a finite number above 0")
    config = _planned_config(model, shape)
    longest = config.max_model_len
    if context_len is None:
        context_len = min(8192, longest)
    if context_len > longest and shape is None:
        allowed = f"1 to {longest}, the model's own context"
        raise refuse(ConfigError, "context_len", context_len, allowed)
    memory_bytes, memory_of = _default_memory()
    if memory is not None:
        memory_bytes, memory_of = memory * 1e9, "as given"
    result = make_plan(
        config,
        Workload(
            context_len=context_len,
            batch_size=batch_size,
            quantization=quantization,
            bandwidth_tbps=H200_BANDWIDTH_TBPS if bandwidth is None else bandwidth,
            memory_bytes=memory_bytes,
        ),
        kv_cache_dtype=kv_cache_dtype,
        kv_true_bits=_planned_bits(kv_cache_dtype, kv_bits_budget, config.head_dim),
    )
    name = model or shape or ""
    if json:
        print_json({"model": name, "max_model_len": longest, **result.as_dict()})
    else:
        bandwidth_of = "an H200's; --bandwidth" if bandwidth is None else "as given"
        typer.echo(plan_text(name, config, result, memory_of=memory_of, bandwidth_of=bandwidth_of))


def _planned_bits(kv_cache_dtype: str, kv_bits_budget: float | None, head_dim: int) -> float:
    """True bits of a cache: those of its format, or for an adaptive one the budget."""
    from subten.codecs.adaptive import ADAPTIVE, cache_format

    fmt = cache_format(kv_cache_dtype, head_dim)
    if kv_bits_budget is None:
        if kv_cache_dtype == ADAPTIVE:
            raise ConfigError("kv_bits_budget: got none; allowed: a number of bits, for adaptive")
        return fmt.true_bits
    if kv_cache_dtype != ADAPTIVE:
        allowed = "none, as kv_cache_dtype is not adaptive"
        raise refuse(ConfigError, "kv_bits_budget", kv_bits_budget, allowed)
    if not 0.0 < kv_bits_budget <= fmt.true_bits:
        raise refuse(ConfigError, "kv_bits_budget", kv_bits_budget, f"up to {fmt.true_bits:g}")
    return kv_bits_budget


def plan_text(
    name: str, config: ModelConfig, plan: Plan, *, memory_of: str, bandwidth_of: str
) -> str:
    """A plan for people, with whose memory and bandwidth it reckons."""
    from subten.bench.report import human_bytes

    touched = ""
    if config.is_moe:
        touched = f"about {plan.experts_per_layer:.3g} of {config.num_experts} experts a layer"
    kv_share = plan.kv_bytes_per_step / (plan.kv_bytes_per_step + plan.weight_bytes_per_step)
    floor = f"floor at {plan.bandwidth_tbps:g} TB/s ({bandwidth_of}): {plan.floor_ms:.2f} ms a step"
    if plan.batch_size > 1:
        floor += f", {plan.floor_ms / plan.batch_size:.3g} ms for each of its tokens"
    usable = f"the {human_bytes(plan.usable_bytes)} usable of {human_bytes(plan.memory_bytes)}"
    verdict = "fits" if plan.is_fitting else "DOES NOT FIT"
    rows = [
        ("read by one decode step", None, ""),
        ("weights", plan.weight_bytes_per_step, touched),
        ("KV cache", plan.kv_bytes_per_step, f"{kv_share:.0%} of what is read"),
        ("for each token", plan.bytes_per_token, ""),
        (floor, None, ""),
        ("held in memory", None, ""),
        ("weights", plan.weight_bytes, ""),
        ("KV cache", plan.kv_bytes, f"{plan.kv_bytes_per_token:,.0f} bytes a token"),
        (
            "together",
            plan.weight_bytes + plan.kv_bytes,
            f"{verdict} in {usable} ({memory_of})",
        ),
    ]
    title = (
        f"{name}: batch {plan.batch_size}, context {plan.context_len}, weights "
        f"{plan.quantization}, KV cache {plan.kv_cache_dtype} ({plan.kv_true_bits:.3f} true bits)"
    )
    lines = [title]
    if plan.context_len > config.max_model_len:
        lines.append(
            f"The published model's own context is {config.max_model_len}: a longer one is planned "
            "with a longer rotary table."
        )
    for label, num_bytes, note in rows:
        if num_bytes is None:
            lines += ["", label]
        else:
            lines.append(f"  {label:<15}{human_bytes(num_bytes):>10}   {note}".rstrip())
    return "\n".join(lines)


def _planned_config(model: str | None, shape: str | None) -> ModelConfig:
    if (model is None) == (shape is None):
        given = "neither" if model is None else "both"
        raise ConfigError(f"model, shape: got {given}; allowed: one of --model and --shape")
    if shape is not None:
        from subten.bench.shapes import get_shape

        return get_shape(shape)
    from subten.models import read_config
    from subten.weights.load import open_checkpoint

    assert model is not None
    checkpoint, source = open_checkpoint(resolve_model(model))
    return read_config(checkpoint.config, source=source)[1]


def _default_memory() -> tuple[float, str]:
    """Bytes of this GPU's memory or an H200's, and whose they are."""
    from subten.bench.plan import H200_MEMORY_BYTES
    from subten.device import detect

    found = detect()
    if found.kind == "cuda":
        return float(found.memory_bytes), f"this {found.name}'s; --memory"
    return float(H200_MEMORY_BYTES), "an H200's; --memory"


@bench_app.command("latency")
def bench_latency(
    model: ModelOption = DEMO,
    shape: Annotated[
        str | None,
        typer.Option(help=f"Random weights of this shape instead: {SHAPES_HELP}"),
    ] = None,
    prompt_len: Annotated[
        int | None,
        typer.Option(help="Tokens of each random prompt; default: 128, with --shape 512."),
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens generated for each; default: 64. Not with --shape.")
    ] = None,
    batch_size: Annotated[
        str, typer.Option(metavar="N", help="Requests at a time; with --shape also N,N,...")
    ] = "1",
    kv_cache_dtype: KVCachesOption = "bf16,int4",
    num_iters: Annotated[
        int | None, typer.Option(help="Runs that count; default: 10. Not with --shape.")
    ] = None,
    num_warmup: Annotated[
        int | None, typer.Option(help="Runs before that do not; default: 2. Not with --shape.")
    ] = None,
    max_model_len: MaxModelLenOption = None,
    context_len: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Tokens in the cache; default: 1024. With --shape."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="Weights: none, fp8 or int4; with --shape also a list."
        ),
    ] = None,
    num_steps: Annotated[
        int | None, typer.Option(help="Decode steps that count; default: 512. With --shape.")
    ] = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    dtype: DtypeOption = "auto",
    json: JsonFileOption = None,
) -> None:
    """Time to first token and time per output token, with percentiles and sample counts.

    With --shape the weights are random, the cache is full up to --context-len, and what a step
    must read is compared with the memory's roof; with --json FILE records join those in the file.

    \b
    Examples:
      subten bench latency --prompt-len 512 --output-len 128
      subten bench latency --kv-cache-dtype bf16,int4 --batch-size 8 --json latency.json
      subten bench latency --shape qwen3-30b-a3b --quantization int4 --context-len 1024,32768
    """
    runs = {"output_len": output_len, "num_iters": num_iters, "num_warmup": num_warmup}
    steps = {"context_len": context_len, "num_steps": num_steps}
    if shape is not None:
        _refuse_given({**runs, "max_model_len": max_model_len}, "no value with --shape")
        if model != DEMO:
            raise ConfigError("model, shape: got both; allowed: one of --model and --shape")
        latency_of_shape(
            shape=shape,
            quantization=quantization or "none",
            kv_cache_dtype=kv_cache_dtype,
            batch_size=batch_size,
            context_len=context_len or "1024",
            prompt_len=512 if prompt_len is None else prompt_len,
            num_steps=512 if num_steps is None else num_steps,
            device=device,
            backend=backend,
            dtype=dtype,
            json=json,
        )
        return
    _refuse_given(steps, "a value with --shape alone")
    from subten.bench.latency import LatencyShape, measure_latency
    from subten.bench.report import environment
    from subten.device import keep_freed_memory
    from subten.engine.llm import LLM

    keep_freed_memory()
    batches = integer_list("batch_size", batch_size)
    if len(batches) > 1:
        raise refuse(ConfigError, "batch_size", batch_size, "one integer, or --shape")
    asked = LatencyShape(
        prompt_len=128 if prompt_len is None else prompt_len,
        output_len=64 if output_len is None else output_len,
        batch_size=batches[0],
        num_iters=10 if num_iters is None else num_iters,
        num_warmup=2 if num_warmup is None else num_warmup,
    )
    check_json_file(json)
    source = resolve_model(model)
    results, record = [], {}
    for codec in codec_list(kv_cache_dtype):
        with (
            LLM(
                source,
                kv_cache_dtype=codec,
                device=device,
                backend=backend,
                dtype=dtype,
                quantization=quantization or "none",
                max_model_len=max_model_len,
            ) as llm,
            progress(f"Measuring {codec}") as update,
        ):
            record = environment(llm.device)
            results.append(measure_latency(llm, asked, progress=update))
    result = {"kind": "latency", "model": model, "environment": record, "results": results}
    report(result, latency_text(result), json)


def _refuse_given(options: dict[str, Any], allowed: str) -> None:
    """Refuse the first option that was given a value."""
    for name, value in options.items():
        if value is not None:
            raise refuse(ConfigError, name, value, allowed)


def latency_text(result: dict[str, Any]) -> str:
    """A latency table for people."""
    from subten.bench.report import human_bytes, text_table

    def cells(row: dict[str, Any], name: str) -> list[str]:
        return [f"{row[name][p]:.2f}" for p in ("p50", "p90", "p99")]

    rows = [
        [
            row["kv_cache_dtype"],
            *cells(row, "ttft_ms"),
            *cells(row, "tpot_ms"),
            f"{row['output_tokens_per_s']:.1f}",
            human_bytes(row["peak_memory_bytes"]),
            str(row["tpot_ms"]["num_samples"]),
        ]
        for row in result["results"]
    ]
    header = ["KV cache", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99"]
    header += ["tokens/s", "peak memory", "samples"]
    first = result["results"][0]
    return (
        f"{result['model']} on {result['environment']['device_name']}: prompt "
        f"{first['prompt_len']}, output {first['output_len']}, batch {first['batch_size']}; "
        f"milliseconds\n\n{text_table(header, rows)}"
    )
