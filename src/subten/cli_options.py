"""What the commands share: their options, the demo models, progress, errors in one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from subten.core import UserError

DEMO = "demo"
DEMO_DENSE = "demo-dense"
"""Names that `--model` takes besides a folder, a .gguf file and a Hugging Face repository: the
demo MoE, and the dense model that it was made from."""

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Folder, .gguf file, Hugging Face repository, 'demo' or 'demo-dense'.",
    ),
]
KVCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="CODEC",
        help="KV cache format: bf16, fp8, int8, int4, int2, adaptive and more (see `subten info`).",
    ),
]
KVBitsOption = Annotated[
    float | None,
    typer.Option(
        "--kv-bits-budget",
        metavar="BITS",
        help="adaptive: true bits an element at the longest context; default: what memory holds.",
    ),
]
KVMemoryOption = Annotated[
    int | None,
    typer.Option(
        "--kv-memory-bytes",
        metavar="BYTES",
        help="adaptive: memory of the whole KV cache; default: sized like any other.",
    ),
]
KVColdOption = Annotated[
    bool,
    typer.Option(
        "--kv-cold-pages/--no-kv-cold-pages",
        help="adaptive: the least important values may go down to 1.5 bits.",
    ),
]
KVOutlierOption = Annotated[
    float | None,
    typer.Option(
        "--kv-outlier-channels",
        metavar="PERCENT",
        help="adaptive: channels of keys that stay in BF16, at least one a head; default: none.",
    ),
]
KVSinkOption = Annotated[
    int | None,
    typer.Option("--kv-sink-tokens", help="adaptive: first tokens that are read in BF16."),
]
KVWindowOption = Annotated[
    int | None,
    typer.Option("--kv-window-tokens", help="adaptive: last tokens that are read in BF16."),
]
KVCalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--kv-calibration",
        metavar="FILE",
        help="adaptive: text to learn from how to store keys, or none; default: one of its own.",
    ),
]
KVKeyBiasOption = Annotated[
    str,
    typer.Option(
        "--kv-key-bias",
        metavar="HOW",
        help="strip: store keys without their projection's bias; keep: with it; auto: by its size.",
    ),
]
KVCachesOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="CODEC,...",
        help="KV cache formats, separated by commas (see `subten info`).",
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="BACKEND",
        help="auto, cuda, triton or torch; auto: the fastest that the device runs.",
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="auto, bfloat16 or float32.")
]
QuantizationOption = Annotated[
    str,
    typer.Option(
        "--quantization", metavar="FORMAT", help="Weights: none (as --dtype), fp8 or int4."
    ),
]
QuantizeHeadOption = Annotated[
    bool,
    typer.Option(
        "--quantize-head/--no-quantize-head",
        help="Quantise the output matrix too, unless it is the embedding.",
    ),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Longest prompt plus answer; default: the model's, or what the KV cache holds.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text for people.")
]
JsonFileOption = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write the result as JSON; - prints that alone."
    ),
]


UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""An unknown option or word, or a value of another type. Older typer takes the class from click,
newer has its own: this is the one that typer raises."""


class ErrorGroup(TyperGroup):
    """Commands whose errors end in one line on stderr and exit code 2, without traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse this group's own options."""
        with _one_line_errors():
            return super().make_context(*args, **kwargs)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the whole first sentence of each, over as many lines as it takes.

        The library would cut it off where the line ends.
        """
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(limit=1000)) for name in names]
            )

    def invoke(self, ctx: Any) -> Any:
        """Run the command, its options parsed."""
        with _one_line_errors():
            return super().invoke(ctx)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        message = str(error)
    except UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if "\n" in message:
            raise  # the help, for want of a command
        path = error.ctx.command_path if error.ctx else "subten"  # type: ignore[attr-defined]
        message = _wrong_type(error) or f"{message.rstrip('.')}; allowed: see"
        message += f" `{path} --help`"
    else:
        return
    typer.echo(f"subten: error: {message}", err=True)
    raise typer.Exit(2)


_KINDS = {"integer": "an integer", "number": "a number", "float": "a number"}


def _wrong_type(error: Exception) -> str | None:
    """What came and what is allowed, where the error is a value that is no number; else None."""
    kind = re.search(f"valid ({'|'.join(_KINDS)})", str(error))
    option = getattr(error, "param", None)
    if kind is None or option is None:
        return None
    # Older typer quotes the value in its message; newer has it in the cause, an error of pydantic.
    if isinstance(error.__cause__, ValueError) and hasattr(error.__cause__, "errors"):
        value = repr(error.__cause__.errors()[0]["input"])
    else:
        value = str(error).partition(" is not a valid ")[0]
    return f"{option.opts[0]}: got {value}; allowed: {_KINDS[kind[1]]}, see"


def new_app() -> typer.Typer:
    """A group of commands with the errors and the plain help of this command line.

    Its help is the docstring of its callback.
    """
    return typer.Typer(
        cls=ErrorGroup,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line; never NaN."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def check_json_file(json_file: Path | None, *, is_list: bool = False) -> None:
    """Refuse a file of --json that a result could not go to, or join if `is_list`."""
    from subten.bench.records import check_records
    from subten.bench.report import check_writable

    if json_file is not None and json_file != Path("-"):
        (check_records if is_list else check_writable)(json_file)


def report(result: Mapping[str, Any], text: str, json_file: Path | None) -> None:
    """Print a measurement for people, and write it as JSON where that was asked for."""
    from subten.bench.report import write_json

    if json_file == Path("-"):
        print_json(result)
        return
    typer.echo(text)
    if json_file is not None:
        write_json(json_file, result)


def resolve_model(name: str) -> str:
    """What the loader takes for `--model`; builds the demo MoE on first use, with progress."""
    from subten.config import cache_dir
    from subten.weights.upcycled import demo_model, find_demo_gguf

    if name == DEMO_DENSE:
        return str(find_demo_gguf())
    if name != DEMO:
        return name
    with progress("Building the demo model, once") as update:
        return str(demo_model(cache_dir(), lambda _what, share: update(share)))


Update = Callable[[float], None]
"""Tells a progress bar the share done, 0 to 1."""


@contextmanager
def progress(title: str, *, terminal_only: bool = False) -> Iterator[Update]:
    """A progress bar on stderr from its first update to the end of the block.

    Without a terminal it is one line at the start, or nothing with `terminal_only`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=1.0)
    is_started = False

    def update(share: float) -> None:
        nonlocal is_started
        if not is_started and console.is_terminal:
            bar.start()
        elif not is_started and not terminal_only:
            typer.echo(f"{title} ...", err=True)
        is_started = True
        bar.update(task, completed=share)

    try:
        yield update
    finally:
        if is_started and console.is_terminal:
            bar.stop()
