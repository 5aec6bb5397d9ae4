"""The command that serves: `subten serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from subten.cli_options import (
    DEMO,
    BackendOption,
    DeviceOption,
    DtypeOption,
    KVBitsOption,
    KVCacheOption,
    KVCalibrationOption,
    KVColdOption,
    KVKeyBiasOption,
    KVMemoryOption,
    KVOutlierOption,
    KVSinkOption,
    KVWindowOption,
    MaxModelLenOption,
    QuantizationOption,
    QuantizeHeadOption,
)
from subten.config import API_KEY_VARIABLE, EngineConfig, env_api_key
from subten.core import ConfigError, reason, refuse

INSTALL = f"{sys.executable} -m pip install 'subten[serve]'"


def register(app: typer.Typer) -> None:
    """Add this command to the `subten` command."""
    app.command(cls=_ConfigFileCommand)(serve)


def _read_config(path: str, allowed: dict[str, Any]) -> dict[str, Any]:
    """Settings of a YAML file by option name; ConfigError for one that no option has."""
    yaml = _import("yaml")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(ConfigError, "config", path, f"a YAML file ({reason(error)})") from error
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise refuse(ConfigError, "config", path, f"a YAML file ({where})") from error
    if not isinstance(values, dict):
        raise refuse(ConfigError, "config", path, "a YAML file with a mapping of options to values")
    found = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in allowed:
            raise refuse(ConfigError, f"config: {key}", value, ", ".join(sorted(allowed)))
        found[name] = value
    return found


class _ConfigFileCommand(TyperCommand):
    """A command whose options may also come from the file of --config; the command line wins."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Read the file, if there is one, before the options are parsed."""
        path = _option_value(args, "--config")
        if path is not None:
            allowed = {p.name: p for p in self.params if p.name not in ("config", "help")}
            extra["default_map"] = _read_config(path, allowed)
        return super().make_context(info_name, args, parent=parent, **extra)


def _option_value(args: list[str], name: str) -> str | None:
    for index, arg in enumerate(args):
        if arg == "--":
            break
        if arg.startswith(f"{name}="):
            return arg.partition("=")[2]
        if arg == name and index + 1 < len(args):
            return args[index + 1]
    return None


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder, .gguf file, Hugging Face repository, 'demo' or 'demo-dense'.",
        ),
    ] = DEMO,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Address to listen on; others than this machine's own loopback ask for --api-key.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="0 takes a free one, told in the log.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help=f"Clients must send it as bearer token; repeatable. Default: {API_KEY_VARIABLE}.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="Host name to answer to; repeatable."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name", metavar="NAME", help="The model's name for clients; repeatable."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", metavar="FILE", help="Jinja template to use.")
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            "--tool-call-parser",
            help="How the model writes calls: hermes, mistral, llama3_json, none; "
            "auto: as its chat template shows.",
        ),
    ] = "auto",
    max_queued_requests: Annotated[
        int,
        typer.Option(
            "--max-queued-requests",
            help="Requests that may wait; further ones are refused with 429.",
        ),
    ] = 256,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", help="Seconds for answers to end after SIGTERM.")
    ] = 30.0,
    kv_cache_dtype: KVCacheOption = "bf16",
    kv_bits_budget: KVBitsOption = None,
    kv_memory_bytes: KVMemoryOption = None,
    kv_cold_pages: KVColdOption = False,
    kv_outlier_channels: KVOutlierOption = None,
    kv_sink_tokens: KVSinkOption = None,
    kv_window_tokens: KVWindowOption = None,
    kv_calibration: KVCalibrationOption = None,
    kv_key_bias: KVKeyBiasOption = "auto",
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Sequences in one step.")
    ] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Tokens in one step.")
    ] = 2048,
    max_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prefill-tokens", help="Prompt tokens in a step that also decodes; default: all."
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", help="Share of the GPU's memory.")
    ] = 0.9,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Share pages of prompts."
        ),
    ] = True,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Decode without CUDA graphs.")
    ] = False,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    quantize_head: QuantizeHeadOption = True,
    seed: Annotated[
        int,
        typer.Option("--seed", help="Seed of the engine; requests that name none draw their own."),
    ] = 0,
    config: Annotated[  # noqa: ARG001 - read before the options are parsed
        Path | None,
        typer.Option("--config", metavar="FILE", help="YAML file with any of these options."),
    ] = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, until SIGTERM or Ctrl-C.

    \b
    Examples:
      subten serve demo --kv-cache-dtype int4
      subten serve --config serve.yaml
      curl http://127.0.0.1:8000/v1/models
    """
    _import("fastapi")
    from subten.serve.server import run
    from subten.serve.settings import ServeConfig

    run(
        ServeConfig(
            model=model,
            host=host,
            port=port,
            api_key=tuple(api_key or ()) or env_api_key(),
            allowed_host=tuple(allowed_host or ()),
            served_model_name=tuple(served_model_name or ()),
            chat_template=chat_template,
            tool_call_parser=tool_call_parser,
            max_queued_requests=max_queued_requests,
            drain_timeout=drain_timeout,
            engine=EngineConfig(
                kv_cache_dtype=kv_cache_dtype,
                kv_bits_budget=kv_bits_budget,
                kv_memory_bytes=kv_memory_bytes,
                kv_cold_pages=kv_cold_pages,
                kv_outlier_channels=kv_outlier_channels,
                kv_sink_tokens=kv_sink_tokens,
                kv_window_tokens=kv_window_tokens,
                kv_calibration=kv_calibration,
                kv_key_bias=kv_key_bias,
                device=device,
                dtype=dtype,
                backend=backend,
                quantization=quantization,
                quantize_head=quantize_head,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_prefill_tokens=max_prefill_tokens,
                gpu_memory_utilization=gpu_memory_utilization,
                enable_prefix_caching=enable_prefix_caching,
                enforce_eager=enforce_eager,
                seed=seed,
            ),
        )
    )


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve: {name} is not installed; install it with: {INSTALL}") from error
