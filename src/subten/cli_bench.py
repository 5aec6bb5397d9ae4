"""`bench` at a model shape: decode steps and single kernels, with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subten.cli_options import (
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonFileOption,
    KVCachesOption,
    check_json_file,
    print_json,
    progress,
)
from subten.core import ConfigError, refuse

if TYPE_CHECKING:
    from subten.device import Device
    from subten.engine.roof import Roof
    from subten.models.decoder import Decoder

SHAPES_HELP = "mixtral-8x7b, qwen3-30b-a3b, llama-3-70b, tiny-mixtral or tiny-qwen3."

ShapesOption = Annotated[str, typer.Option(help=SHAPES_HELP)]
QuantizationsOption = Annotated[
    str, typer.Option(metavar="FORMAT,...", help="Weights: none, fp8, int4, separated by commas.")
]
ContextLensOption = Annotated[
    str, typer.Option(metavar="N,...", help="Tokens in the cache, separated by commas.")
]
BatchSizesOption = Annotated[
    str, typer.Option(metavar="N,...", help="Sequences at a time, separated by commas.")
]


def latency_of_shape(
    *,
    shape: str,
    quantization: str,
    kv_cache_dtype: str,
    batch_size: str,
    context_len: str,
    prompt_len: int,
    num_steps: int,
    device: str,
    backend: str,
    dtype: str,
    json: Path | None,
) -> None:
    """`bench latency --shape`: one build of the weights for every cache, batch and context."""
    from subten.bench.decode import DecodeWorkload, measure_decode
    from subten.bench.random_model import in_format
    from subten.codecs import kv_format

    workloads = [
        DecodeWorkload(
            context_len=context, batch_size=batch, prompt_len=prompt_len, num_steps=num_steps
        )
        for batch, context in _pairs(batch_size, context_len)
    ]
    longest = max(workload.max_len for workload in workloads)
    check_json_file(json, is_list=True)
    records: list[dict[str, Any]] = []
    for built in _builds(shape, quantization, kv_cache_dtype, longest, device, backend, dtype):
        for codec, workload in itertools.product(built.codecs, workloads):
            model = in_format(built.model, kv_format(codec, built.model.config.head_dim))
            title = f"{built.weights_dtype} weights, {codec} cache, context {workload.context_len}"
            with progress(f"Measuring {title}") as update:
                found = measure_decode(model, workload, roof=built.roof, progress=update)
            record = built.record("decode_latency", codec, found)
            del model
            records.append(record)
            if json != Path("-"):
                typer.echo(_latency_text(record))
            _keep([record], json)
    if json == Path("-"):
        print_json({"records": records})
    else:
        typer.echo("\n" + latency_table(records))


def bench_kernels(
    shape: ShapesOption,
    quantization: QuantizationsOption = "none",
    kv_cache_dtype: KVCachesOption = "bf16",
    context_len: ContextLensOption = "1024",
    batch_size: BatchSizesOption = "1",
    num_replays: Annotated[int, typer.Option(help="Timed runs of each op over all layers.")] = 200,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    dtype: DtypeOption = "auto",
    json: JsonFileOption = None,
) -> None:
    """Each op of a decode step at a model's shape: time, bytes and share of the memory's roof.

    Weights are random. With --json FILE records join those in the file, or replace their like.

    \b
    Examples:
      subten bench kernels --shape qwen3-30b-a3b --quantization int4 --kv-cache-dtype int4
      subten bench kernels --shape mixtral-8x7b --context-len 1024,32768 --json kernels.json
    """
    from subten.bench.kernels import measure_kernels
    from subten.bench.random_model import in_format
    from subten.codecs import kv_format

    if num_replays < 1:
        raise refuse(ConfigError, "num_replays", num_replays, "an integer of at least 1")
    pairs = _pairs(batch_size, context_len)
    longest = max(context for _, context in pairs) + 1
    check_json_file(json, is_list=True)
    records: list[dict[str, Any]] = []
    for built in _builds(shape, quantization, kv_cache_dtype, longest, device, backend, dtype):
        for codec, (batch, context) in itertools.product(built.codecs, pairs):
            model = in_format(built.model, kv_format(codec, built.model.config.head_dim))
            title = f"{built.weights_dtype} weights, {codec} cache, context {context}"
            with progress(f"Measuring {title}") as update:
                found = measure_kernels(
                    model,
                    context_len=context,
                    batch_size=batch,
                    roof=built.roof,
                    num_replays=num_replays,
                    progress=update,
                )
            rows = [built.record("decode_kernels", codec, row) for row in found]
            del model
            records += rows
            if json != Path("-"):
                typer.echo(f"\n{shape}, {title}, batch {batch}\n\n{kernels_table(rows)}")
            _keep(rows, json)
    if json == Path("-"):
        print_json({"records": records})


class _Built:
    """A model of random weights, and what its records have in common."""

    def __init__(
        self,
        *,
        shape: str,
        quantization: str,
        codecs: Sequence[str],
        model: Decoder,
        roof: Roof,
        device: Device,
    ) -> None:
        from subten.bench.records import origin, weights_dtype

        self.shape = shape
        self.codecs = codecs
        self.model = model
        self.roof = roof
        self.weights_dtype = weights_dtype(quantization, str(model.dtype).removeprefix("torch."))
        self._origin = origin(device)

    def record(self, kind: str, codec: str, found: dict[str, Any]) -> dict[str, Any]:
        """A flat record of what was found with a cache format."""
        return {
            "kind": kind,
            "shape": self.shape,
            "weights_dtype": self.weights_dtype,
            "kv_cache_dtype": codec,
            **found,
            **self._origin,
        }


def _builds(
    shape: str,
    quantization: str,
    kv_cache_dtype: str,
    longest: int,
    device: str,
    backend: str,
    dtype: str,
) -> Iterator[_Built]:
    """The model of the shape in each weight format, one after the other."""
    from subten.bench.random_model import check_memory, free_memory, random_decoder
    from subten.bench.records import weights_dtype
    from subten.bench.shapes import get_shape
    from subten.device import detect, keep_freed_memory
    from subten.engine.roof import measure_roof
    from subten.kernels.weight_formats import check_format
    from subten.weights.load import DTYPES

    keep_freed_memory()
    config = get_shape(shape, min_model_len=longest)
    codecs, formats = codec_list(kv_cache_dtype), _unique("quantization", quantization)
    if dtype not in ("auto", *DTYPES):
        raise refuse(ConfigError, "dtype", dtype, f"auto, {', '.join(DTYPES)}")
    found, torch_dtype = detect(device), DTYPES["bfloat16" if dtype == "auto" else dtype]
    for name in formats:
        check_format(name)
        check_memory(config, name, torch_dtype, found)
    roof = measure_roof(found.torch_device)
    typer.echo(f"roof: {roof.tb_s:.3f} TB/s on {found.name} ({roof.how})", err=True)
    for name in formats:
        title = weights_dtype(name, str(torch_dtype).removeprefix("torch."))
        with progress(f"Making {title} weights") as update:
            model = random_decoder(
                config,
                device=found.torch_device,
                dtype=torch_dtype,
                backend=backend,
                quantization=name,
                progress=update,
            )
        built = _Built(
            shape=shape, quantization=name, codecs=codecs, model=model, roof=roof, device=found
        )
        # Two models need not fit at a time: the next one is made when no one holds this one.
        del model
        yield built
        del built.model
        free_memory(found.torch_device)


def latency_table(records: Sequence[dict[str, Any]]) -> str:
    """Latency records for people."""
    from subten.bench.report import human_bytes, text_table

    rows = [
        [
            row["weights_dtype"],
            row["kv_cache_dtype"],
            str(row["batch_size"]),
            str(row["context_len"]),
            f"{row['tpot_ms_p50']:.3f}",
            f"{row['tpot_ms_p99']:.3f}",
            f"{row['floor_ms']:.3f}",
            f"{row['roof_fraction'] * 100:.1f} %",
            f"{row['ttft_ms_p50']:.2f}",
            human_bytes(row["peak_memory_bytes"]),
        ]
        for row in records
    ]
    header = ["weights", "KV cache", "batch", "context", "TPOT p50, ms", "p99", "floor, ms", "roof"]
    return text_table([*header, f"TTFT({records[0]['prompt_len']})", "peak memory"], rows)


def kernels_table(records: Sequence[dict[str, Any]]) -> str:
    """Kernel records of one step for people, and their sum."""
    from subten.bench.report import human_bytes, text_table

    rows = [
        [
            row["kernel"],
            row["backend"],
            str(row["calls_per_step"]),
            f"{row['us_p50']:.2f}",
            human_bytes(row["bytes"]),
            f"{row['tb_s']:.3f}",
            f"{row['roof_fraction'] * 100:.1f} %",
        ]
        for row in records
    ]
    total_us = sum(row["us_p50"] * row["calls_per_step"] for row in records)
    num_bytes = sum(row["bytes"] * row["calls_per_step"] for row in records)
    tb_s = num_bytes / total_us / 1e6
    share = f"{tb_s / records[0]['roof_tb_s'] * 100:.1f} %"
    num_calls = sum(row["calls_per_step"] for row in records)
    total = ["a step", "", str(num_calls), f"{total_us:.1f}", human_bytes(num_bytes)]
    header = ["op", "backend", "calls", "us", "bytes", "TB/s", "roof"]
    return text_table(header, [*rows, [*total, f"{tb_s:.3f}", share]])


def _latency_text(record: dict[str, Any]) -> str:
    """One line as soon as it is measured: a run may be cut off."""
    return (
        f"{record['shape']}, {record['weights_dtype']} weights, {record['kv_cache_dtype']} cache, "
        f"batch {record['batch_size']}, context {record['context_len']}: "
        f"TPOT {record['tpot_ms_p50']:.3f} ms, {record['roof_fraction'] * 100:.1f} % of the roof"
    )


def _keep(records: list[dict[str, Any]], json: Path | None) -> None:
    from subten.bench.records import add_records

    if json is not None and json != Path("-"):
        add_records(json, records)


def _pairs(batch_size: str, context_len: str) -> list[tuple[int, int]]:
    batches = integer_list("batch_size", batch_size)
    return list(itertools.product(batches, integer_list("context_len", context_len)))


def codec_list(text: str) -> list[str]:
    """The codecs of a comma-separated list; unknown and repeated ones are refused."""
    from subten.codecs import CODECS

    names = _unique("kv_cache_dtype", text, "each codec once")
    for name in names:
        if name not in CODECS:
            raise refuse(ConfigError, "kv_cache_dtype", name, ", ".join(CODECS))
    return names


def integer_list(name: str, text: str) -> list[int]:
    """Positive integers of a comma-separated list; ConfigError for anything else."""
    values = []
    for part in _unique(name, text):
        if not part.isdecimal() or int(part) < 1:
            raise refuse(ConfigError, name, part, "integers of at least 1, separated by commas")
        values.append(int(part))
    return values


def _unique(name: str, text: str, allowed: str = "each value once") -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(set(parts)) != len(parts):
        raise refuse(ConfigError, name, text, allowed)
    return parts
