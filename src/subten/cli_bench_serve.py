"""`bench serve`: load on a server of OpenAI's API, ours or another."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from subten.cli_options import check_json_file, progress, report
from subten.config import API_KEY_VARIABLE, env_api_key
from subten.core import ConfigError, refuse

INSTALL = f"{sys.executable} -m pip install 'subten[serve]'"


def bench_serve(
    model: Annotated[str, typer.Option("--model", help="As GET /v1/models names it.")],
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="URL", help="With or without /v1.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option("--api-key", help=f"Default: {API_KEY_VARIABLE}, if set.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="openai: /v1/completions; openai-chat: conversations.")
    ] = "openai",
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            "--dataset-name",
            help="random, or sharegpt: lengths as those of people's chats.",
        ),
    ] = "random",
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests.")] = 100,
    request_rate: Annotated[
        float, typer.Option("--request-rate", help="Poisson arrivals a second; inf: all at once.")
    ] = math.inf,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", help="Most requests at a time.")
    ] = None,
    random_input_len: Annotated[
        int, typer.Option("--random-input-len", help="Words of a random prompt.")
    ] = 512,
    random_output_len: Annotated[
        int, typer.Option("--random-output-len", help="Tokens of an answer.")
    ] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--no-ignore-eos", help="Send ignore_eos, which not all take."),
    ] = True,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput", metavar="METRIC:MS", help="Limit on ttft, tpot or e2el; repeatable."
        ),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option("--percentile-metrics", metavar="METRIC,...", help="What to report.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option("--metric-percentiles", metavar="N,...", help="Which percentiles.")
    ] = "50,90,99",
    seed: Annotated[int, typer.Option("--seed", help="Of prompts, lengths and arrivals.")] = 0,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            "--save-result",
            metavar="FILE",
            help="Also write the result as JSON; - prints that alone.",
        ),
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Each request too, in the JSON.")
    ] = False,
) -> None:
    """Latency and throughput of any OpenAI-compatible server, as clients see them.

    Names and JSON fields are those of `vllm bench serve`. Tokens are counted by the server's usage.

    \b
    Examples:
      subten bench serve --model demo --num-prompts 20 --random-input-len 64 --max-concurrency 2
      subten bench serve --model demo --request-rate 4 --goodput ttft:500 --goodput tpot:50
    """
    from subten.bench.serving import (
        Load,
        check_server,
        details,
        measure_serving,
        parse_goodput,
        summarise,
    )

    metrics = _metrics(percentile_metrics)
    percentiles = _percentiles(metric_percentiles)
    limits = parse_goodput(goodput or ())
    load = Load(
        base_url=base_url,
        model=model,
        api_key=api_key or next(iter(env_api_key()), ""),
        backend=backend,
        dataset=dataset,
        num_prompts=num_prompts,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    _check_client()
    check_json_file(json)
    check_server(load)
    with progress(f"Asking {base_url}") as update:
        outcomes, duration_s = measure_serving(load, progress=update)
    found = summarise(
        load, outcomes, duration_s, goodput=limits, percentiles=percentiles, metrics=metrics
    )
    result = {"date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), **found}
    saved = result | details(outcomes) if save_detailed else result
    text = "No request was answered."
    if result["completed"]:
        text = serving_text(result, metrics, percentiles)
    report(saved, text, json)
    for error in result["errors"]:
        typer.echo(f"subten: failed: {error}", err=True)
    if not result["completed"]:
        raise typer.Exit(1)


def serving_text(result: dict[str, Any], metrics: list[str], percentiles: list[float]) -> str:
    """The block that users of `vllm bench serve` know."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Request goodput (req/s)", result["request_goodput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
        ("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests", result["max_concurrent_requests"]),
    ]
    for metric in metrics:
        name = metric.upper()
        rows += [(f"Mean {name} (ms)", result[f"mean_{metric}_ms"])]
        rows += [(f"Median {name} (ms)", result[f"median_{metric}_ms"])]
        rows += [
            (f"P{share:g} {name} (ms)", result[f"p{share:g}_{metric}_ms"])
            for share in percentiles
            if share != 50
        ]
    lines = [" Serving Benchmark Result ".center(54, "=")]
    for name, value in rows:
        if value is not None:
            shown = f"{value:.2f}" if isinstance(value, float) else str(value)
            lines.append(f"{name + ':':<40}{shown:>14}")
    lines.append("=" * 54)
    other, merged = result["requests_of_other_output_len"], result["requests_of_merged_pieces"]
    if other:
        lines.append(f"{other} answers have other lengths than were asked for.")
    if merged:
        lines.append(
            f"{merged} answers came in another number of pieces than usage has tokens: their ITL "
            "is that of pieces."
        )
    return "\n".join(lines)


def _metrics(text: str) -> list[str]:
    from subten.bench.serving import METRICS

    names = [part.strip() for part in text.split(",")]
    if len(set(names)) != len(names) or not set(names) <= set(METRICS):
        allowed = f"{', '.join(METRICS)}, each once"
        raise refuse(ConfigError, "percentile_metrics", text, allowed)
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise refuse(ConfigError, "metric_percentiles", text, "numbers from 0 to 100")
    return values


def _check_client() -> None:
    try:
        import httpx2  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"bench serve: httpx2 is not installed; install it with: {INSTALL}"
        ) from error
