"""`subten eval`: what a KV cache costs in quality."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subten.cli_bench import codec_list, integer_list
from subten.cli_options import (
    DEMO,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonFileOption,
    ModelOption,
    QuantizationOption,
    QuantizeHeadOption,
    check_json_file,
    print_json,
    progress,
    report,
    resolve_model,
)
from subten.core import ConfigError, reason, refuse

if TYPE_CHECKING:
    from subten.bench.kv_menu import Menu
    from subten.calibration.keys_at_load import KeyCalibration
    from subten.device import Device
    from subten.weights.load import LoadedModel

CODECS_SHOWN = "bf16,fp8,int8,int4,fp4"

TASKS = ("quality", "needles", "generation", "engine")


def eval_kv(
    text: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, readable=True, help="UTF-8 text file.")
    ],
    model: ModelOption = DEMO,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-dtype",
            metavar="CODEC,...",
            help=f"KV cache formats, through the model's own kernels; default: {CODECS_SHOWN}.",
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Instead: ways to keep a cache, ours and others', by what rows decode to: all, "
            "main, or names (a wrong one lists them).",
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="With --scheme: quality, needles (facts found again in a long text), generation "
            "(greedy) or engine (perplexity); the last two by the engine, its own formats alone."
        ),
    ] = "quality",
    window: Annotated[
        str,
        typer.Option(metavar="N", help="Tokens read together, windows are apart; needles: N,N,..."),
    ] = "1024",
    max_windows: Annotated[
        int | None, typer.Option(help="Take the first N windows of the text; default: all.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Take the first N tokens of the text; default: all.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Text that adaptive schemes learn from; default: the package's.",
        ),
    ] = None,
    num: Annotated[
        int | None,
        typer.Option(help="needles: at each depth, default 8; generation: tokens, default 2048."),
    ] = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    quantize_head: QuantizeHeadOption = True,
    json: JsonFileOption = None,
) -> None:
    """Perplexity and KL divergence of KV formats on a text, against a bf16 cache.

    The same weights read the same windows once per format; prompt and continuation alike see
    encoded keys and values only. With --quantization every format is of the model so quantised,
    still against the unquantised weights over a bf16 cache; both are then in memory.

    With --scheme each position meets the cache as it would stand in decoding, windows and demoted
    pages included, and with --json FILE records join those in the file as they come.

    \b
    Examples:
      subten eval kv --text wiki.txt --kv-cache-dtype int4,fp4 --max-tokens 8192
      subten eval kv --model demo-dense --text wiki.txt --json quality.json
      subten eval kv --text wiki.txt --window 2048 --scheme main --json kv.json
      subten eval kv --text book.txt --scheme main --task needles --window 512,2048
      subten eval kv --text book.txt --scheme adaptive-2.7 --task engine --window 8192
    """
    from subten.device import detect

    if task not in TASKS:
        raise refuse(ConfigError, "task", task, ", ".join(TASKS))
    if max_tokens is not None and max_tokens < 2:
        raise refuse(ConfigError, "max_tokens", max_tokens, "an integer of at least 2")
    for name, value in (("max_windows", max_windows), ("num", num)):
        if value is not None and value < 1:
            raise refuse(ConfigError, name, value, "an integer of at least 1")
    asked = Asked(
        model=model,
        text=text,
        windows=integer_list("window", window),
        max_windows=max_windows,
        max_tokens=max_tokens,
        num=num,
    )
    if task != "needles" and len(asked.windows) > 1:
        raise refuse(ConfigError, "window", window, "one number, or --task needles")
    load = functools.partial(_load, model, device=device, backend=backend, dtype=dtype)
    if scheme is None:
        if task != "quality" or calibration is not None:
            raise ConfigError("scheme: got none; allowed: names, with --task or --calibration")
        check_json_file(json)
        codecs = codec_list(CODECS_SHOWN if kv_cache_dtype is None else kv_cache_dtype)
        _codec_quality(asked, codecs, load, detect(device), quantization, quantize_head, json)
        return
    if kv_cache_dtype is not None or quantization != "none":
        raise refuse(ConfigError, "scheme", scheme, "none with --kv-cache-dtype or --quantization")
    check_json_file(json, is_list=True)
    loaded = load()
    if task in ("generation", "engine"):
        run_engine = _generation if task == "generation" else _engine_quality
        rows = run_engine(asked, scheme, loaded)
    else:
        learned = _calibrate(loaded, calibration)
        run = _needles if task == "needles" else _scheme_quality
        rows = run(asked, scheme, loaded, learned)
    _report_records(rows, asked, detect(device), json)


def eval_keys(json: JsonFileOption = None) -> None:
    """How much of synthetic keys is lost, with and without stripping what they share.

    Keys with outlier channels as in Llama, with the large bias of Qwen2.5, and under a norm as in
    Qwen3: the squared error over the energy of what differs between keys. With --json FILE records
    join those in the file.

    \b
    Example:
      subten eval keys --json kv-quality.json
    """
    from subten.bench.kv_synthetic import measure_keys
    from subten.bench.records import add_records, origin
    from subten.bench.report import text_table
    from subten.device import detect

    check_json_file(json, is_list=True)
    where = origin(detect("cpu"))
    records = [{"kind": "kv_synthetic", **row, **where} for row in measure_keys()]
    if json == Path("-"):
        for record in records:
            print_json(record)
        return
    header = ["keys", "codec", "true bits", "relative error"]
    keys = ("model", "scheme", "true_bits", "relative_key_error")
    typer.echo(text_table(header, [[_cell(r[key]) for key in keys] for r in records]))
    if json is not None:
        add_records(json, records)


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is read, and how much of it."""

    model: str
    text: Path
    windows: list[int]
    max_windows: int | None
    max_tokens: int | None
    num: int | None

    def token_ids(self, loaded: LoadedModel) -> list[int]:
        """The text's tokens within the limits."""
        assert loaded.tokenizer is not None
        ids = loaded.tokenizer.encode(_read("text", self.text))[: self.max_tokens]
        return ids if self.max_windows is None else ids[: self.max_windows * max(self.windows)]


def _read(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(ConfigError, field, str(path), f"UTF-8 text ({reason(error)})") from error


def _load(model: str, *, device: str, backend: str, dtype: str, **options: Any) -> LoadedModel:
    from subten.device import detect
    from subten.weights.load import load_model

    loaded = load_model(
        resolve_model(model),
        device=detect(device).torch_device,
        dtype=dtype,
        backend=backend,
        kv_cache_dtype="bf16",
        **options,
    )
    if loaded.tokenizer is None:
        raise refuse(ConfigError, "model", model, "a model with a tokenizer")
    return loaded


def _codec_quality(
    asked: Asked,
    codecs: list[str],
    load: Callable[..., LoadedModel],
    device: Device,
    quantization: str,
    quantize_head: bool,
    json: Path | None,
) -> None:
    from subten.bench.quality import evaluate_kv
    from subten.bench.report import environment

    loaded = load(quantization=quantization, quantize_head=quantize_head)
    reference = loaded if quantization == "none" else load()
    token_ids = asked.token_ids(loaded)
    with progress(f"Reading {len(token_ids)} tokens") as update:
        rows = evaluate_kv(
            loaded.model,
            token_ids,
            codecs=codecs,
            window=asked.windows[0],
            reference=reference.model,
            progress=update,
        )
    result = {
        "kind": "kv_quality",
        "model": asked.model,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "quantization": quantization,
        "quantize_head": quantize_head,
        "weight_bytes": loaded.weight_bytes,
        "reference_weight_bytes": reference.weight_bytes,
        "text": asked.text.name,
        "window": asked.windows[0],
        "num_tokens": len(token_ids),
        "environment": environment(device),
        "results": [row.as_dict() for row in rows],
    }
    report(result, quality_text(result), json)


def _calibrate(loaded: LoadedModel, path: Path | None) -> KeyCalibration:
    """As an engine does it at load."""
    from subten.calibration.keys_at_load import calibrate_keys, shipped_text
    from subten.config import cache_dir

    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(shipped_text() if path is None else _read("calibration", path))
    with progress("Calibrating") as update:
        return calibrate_keys(loaded.model, ids, folder=cache_dir(), progress=update)


def _menu(loaded: LoadedModel, window: int, learned: KeyCalibration) -> Menu:
    from subten.bench.kv_menu import Menu

    return Menu(loaded.config, window=window, calibration=learned)


def _scheme_quality(
    asked: Asked, names: str, loaded: LoadedModel, learned: Any
) -> Iterable[dict[str, Any]]:
    from subten.bench.kv_lab import evaluate_schemes

    (window,) = asked.windows
    schemes = _menu(loaded, window, learned).pick(names)
    token_ids = asked.token_ids(loaded)
    with progress(f"Reading {len(token_ids)} tokens") as update:
        for row in evaluate_schemes(
            loaded.model, token_ids, schemes, window=window, progress=update
        ):
            yield {"kind": "kv_scheme_quality", **row.as_dict()}


def _needles(
    asked: Asked, names: str, loaded: LoadedModel, learned: Any
) -> Iterable[dict[str, Any]]:
    from subten.bench.kv_needles import evaluate_needles, make_needles

    assert loaded.tokenizer is not None
    token_ids = asked.token_ids(loaded)
    for window in asked.windows:
        needles = make_needles(
            loaded.tokenizer.encode,
            token_ids,
            window=window,
            each=8 if asked.num is None else asked.num,
        )
        schemes = _menu(loaded, window, learned).pick(names)
        with progress(f"Needles in {window} tokens") as update:
            for row in evaluate_needles(loaded.model, needles, schemes, progress=update):
                yield {"kind": "kv_needles", **row.as_dict()}


def _generation(asked: Asked, names: str, loaded: LoadedModel) -> Iterable[dict[str, Any]]:
    from subten.bench.kv_generation import evaluate_generation

    with progress("Writing") as update:
        for row in evaluate_generation(
            loaded,
            names.split(","),
            prompt_ids=asked.token_ids(loaded)[: asked.windows[0]],
            num_tokens=2048 if asked.num is None else asked.num,
            progress=update,
        ):
            yield {"kind": "kv_generation", **row.as_dict()}


def _engine_quality(asked: Asked, names: str, loaded: LoadedModel) -> Iterable[dict[str, Any]]:
    from subten.bench.kv_engine import evaluate_engine

    (window,) = asked.windows
    token_ids = asked.token_ids(loaded)
    with progress(f"Serving {len(token_ids)} tokens") as update:
        for row in evaluate_engine(
            loaded, names.split(","), token_ids, window=window, progress=update
        ):
            yield {"kind": "kv_engine_quality", **row.as_dict()}


def _report_records(
    rows: Iterable[Mapping[str, Any]], asked: Asked, device: Device, json: Path | None
) -> None:
    """A line for each as it comes, and its record into the file."""
    from subten.bench.records import add_records, origin

    named = {"model": asked.model, "text": asked.text.name}
    where = origin(device)
    for row in rows:
        record = {"kind": row["kind"], **named, **row, **where}
        if json == Path("-"):
            print_json(record)
            continue
        typer.echo(record_text(record))
        if json is not None:
            add_records(json, [record])


def record_text(record: Mapping[str, Any]) -> str:
    """One record of a scheme in a line."""
    head = f"{record['scheme']:<22} {record['true_bits']:6.3f} bits"
    if record["kind"] == "kv_scheme_quality":
        return (
            f"{head}  ppl {record['ppl']:.3f} ({(record['ppl_ratio'] - 1) * 100:+.2f} %)  "
            f"KLD {record['kld_mean']:.5f}, 99.9 % {record['kld_p999']:.3f}  "
            f"top-1 {record['top1_agreement'] * 100:.2f} %"
        )
    if record["kind"] == "kv_engine_quality":
        return (
            f"{head}  ppl {record['ppl']:.3f} ({(record['ppl_ratio'] - 1) * 100:+.2f} %)  "
            f"top-1 {record['top1_agreement'] * 100:.2f} %"
        )
    if record["kind"] == "kv_needles":
        found, reference = (
            " ".join(f"{share:.2f}" for share in record[key])
            for key in ("found", "found_reference")
        )
        return f"{head}  window {record['window']}: found {found} (reference {reference})"
    return (
        f"{head}  {record['num_tokens']} tokens: repeated 4-grams {record['repeated_4']:.2f}, "
        f"distinct-2 {record['distinct_2']:.2f}, ppl under the reference {record['ppl']:.2f}"
    )


def quality_text(result: dict[str, Any]) -> str:
    """A quality table for people."""
    from subten.bench.report import text_table

    rows = [
        [
            row["kv_cache_dtype"],
            f"{row['kv_true_bits']:.3f}",
            f"{row['perplexity']:.3f}",
            f"{(row['perplexity_ratio'] - 1) * 100:+.2f} %",
            f"{row['kld_mean']:.5f}",
            f"{row['kld_p999']:.4f}",
            f"{row['top1_agreement'] * 100:.2f} %",
        ]
        for row in result["results"]
    ]
    header = ["KV cache", "true bits", "perplexity", "change", "KLD mean", "KLD 99.9 %", "top-1"]
    weights = f"{result['dtype']} weights"
    if result["quantization"] != "none":
        weights = f"{result['quantization']} weights against {weights}"
    return (
        f"{result['model']} on {result['text']}: {result['num_tokens']} tokens in windows of "
        f"{result['window']}, {weights}\n\n{text_table(header, rows)}"
    )
