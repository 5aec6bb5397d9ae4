"""`python -m subten.train`: every field of TrainConfig is a flag."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from subten.core import UserError
from subten.train.config import TrainConfig


def make_command() -> Callable[..., None]:
    """The typer command: `--config FILE` and a flag for each field of TrainConfig."""

    def train(**flags: Any) -> None:
        path = flags.pop("config")
        given = {name: value for name, value in flags.items() if value is not None and value != []}
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        try:
            settings = TrainConfig.load(path, given)
            # The trainer imports torch; the help text and the tokenising processes need none of it.
            from subten.train.trainer import main

            report = main(settings)
        except UserError as error:
            typer.echo(f"subten: error: {error}", err=True)
            raise typer.Exit(2) from None
        typer.echo(json.dumps(report, indent=2))

    parameters = [
        _parameter("config", Path | None, "TOML file with these settings; flags win over it.")
    ]
    kinds = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        kind = kinds[field.name]
        if kind == tuple[Path, ...]:
            flag: Any = list[Path] | None
        else:
            plain = [t for t in get_args(kind) if t is not type(None)] or [kind]
            flag = plain[0] | None
        help_text = field.metadata["help"]
        if field.default is not dataclasses.MISSING and field.default not in (None, (), ""):
            help_text += f" [default: {field.default}]"
        parameters.append(_parameter(field.name, flag, help_text))
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    train.__doc__ = (
        "Make a sparse MoE from a dense Llama-family model and train its experts and routers.\n\n"
        "\b\nExample:\n"
        "  subten train --config configs/smollm2-moe.toml --gguf MODEL.gguf \\\n"
        "    --text corpus.txt.xz --out runs/moe --max-seconds 420"
    )
    return train


def _parameter(name: str, kind: Any, help_text: str) -> inspect.Parameter:
    option = typer.Option(help=help_text, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


if __name__ == "__main__":
    typer.run(make_command())
