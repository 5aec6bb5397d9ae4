"""The `subten` command: generate, chat, info, and the commands that measure and train.

Heavy imports stay inside the commands, so that `subten --help` answers at once.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subten import __version__, cli_measure, cli_serve
from subten.cli_options import (
    DEMO,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
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
    ModelOption,
    QuantizationOption,
    QuantizeHeadOption,
    new_app,
    print_json,
    progress,
    resolve_model,
)
from subten.core import RequestError, SamplingParams, refuse
from subten.train.__main__ import make_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from subten.engine.completion import Chunk, Completion
    from subten.engine.llm import LLM

app = new_app()
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", help="The answer has at most so many tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 takes the most likely token each time.")
]
TopKOption = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0: all.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Keep the likeliest tokens of this total probability.")
]
MinPOption = Annotated[
    float, typer.Option("--min-p", help="Keep tokens of at least this share of the likeliest.")
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Random numbers depend on it and the token's index alone.")
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"subten {__version__}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say on stderr what was chosen and why.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Low-latency decoding of sparse Mixture-of-Experts models from a packed KV cache.

    \b
    Examples:
      subten generate "Why is the sky blue?" --kv-cache-dtype int4
      subten serve demo
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="subten: %(message)s", stream=sys.stderr)


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The question; default: stdin.")
    ] = None,
    model: ModelOption = DEMO,
    kv_cache_dtype: KVCacheOption = "bf16",
    kv_bits_budget: KVBitsOption = None,
    kv_memory_bytes: KVMemoryOption = None,
    kv_cold_pages: KVColdOption = False,
    kv_outlier_channels: KVOutlierOption = None,
    kv_sink_tokens: KVSinkOption = None,
    kv_window_tokens: KVWindowOption = None,
    kv_calibration: KVCalibrationOption = None,
    kv_key_bias: KVKeyBiasOption = "auto",
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 repeats less.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="-2 to 2, once for a used token.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="-2 to 2, for each use of a token.")
    ] = 0.0,
    seed: SeedOption = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    max_model_len: MaxModelLenOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    quantize_head: QuantizeHeadOption = True,
    json: JsonOption = False,
) -> None:
    """Answer one prompt.

    A model with a chat template is asked through it; --raw, or a model without one, continues the
    prompt as plain text. At the default temperature of 0 the answer is the same every time.

    \b
    Examples:
      subten generate "Why is the sky blue?"
      subten generate "Once upon a time" --raw --kv-cache-dtype int4 --max-tokens 64
      subten generate "Name three rivers." --temperature 0.7 --seed 1 --json
      subten generate "Name three rivers." --kv-cache-dtype adaptive --kv-bits-budget 3.3
    """
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if not prompt or not prompt.strip():
        raise refuse(RequestError, "prompt", prompt or "", "text that is not empty")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    llm = _load(
        model,
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
        backend=backend,
        dtype=dtype,
        quantization=quantization,
        quantize_head=quantize_head,
        max_model_len=max_model_len,
    )
    asked: str | list[int] = prompt
    if llm.tokenizer is not None and llm.tokenizer.chat_template is not None and not raw:
        # Not through chat_stream: what cannot be served is the user's prompt, not `messages`.
        asked = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    completion = _write(llm.stream(asked, params), is_quiet=json)
    if json:
        print_json(_completion_dict(llm, completion, model))
    else:
        typer.echo(f"\n\n{facts_line(llm, completion)}")


@app.command()
def chat(
    model: ModelOption = DEMO,
    kv_cache_dtype: KVCacheOption = "bf16",
    kv_bits_budget: KVBitsOption = None,
    kv_memory_bytes: KVMemoryOption = None,
    kv_cold_pages: KVColdOption = False,
    kv_outlier_channels: KVOutlierOption = None,
    kv_sink_tokens: KVSinkOption = None,
    kv_window_tokens: KVWindowOption = None,
    kv_calibration: KVCalibrationOption = None,
    kv_key_bias: KVKeyBiasOption = "auto",
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    max_model_len: MaxModelLenOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    quantize_head: QuantizeHeadOption = True,
) -> None:
    """Talk with a model; the KV cache of the conversation is kept between turns.

    Type /reset to begin again and /exit (or end of file) to leave. Questions may also come from a
    pipe, one a line.

    \b
    Examples:
      subten chat --kv-cache-dtype int4
      printf 'My name is Ada.\\nWhat is my name?\\n' | subten chat
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    llm = _load(
        model,
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
        backend=backend,
        dtype=dtype,
        quantization=quantization,
        quantize_head=quantize_head,
        max_model_len=max_model_len,
    )
    is_terminal = sys.stdin.isatty()
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            break
        if line == "/exit":
            break
        if line == "/reset":
            messages.clear()
            typer.echo("(a new conversation)")
        elif line.startswith("/"):
            typer.echo(f"subten: error: command: got {line!r}; allowed: /reset, /exit", err=True)
        elif line:
            if not is_terminal:
                typer.echo(f"> {line}")
            _chat_turn(llm, messages, line, params)


def _chat_turn(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams) -> None:
    """Ask and answer once; a question that cannot be served leaves the conversation as it was."""
    messages.append({"role": "user", "content": line})
    try:
        completion = _write(llm.chat_stream(messages, params), is_quiet=False)
    except RequestError as error:
        messages.pop()
        typer.echo(f"subten: error: {error} (/reset begins a new conversation)", err=True)
        return
    messages.append({"role": "assistant", "content": completion.text})
    typer.echo(f"\n{facts_line(llm, completion)}\n")


@app.command()
def info(
    device: DeviceOption = "auto", backend: BackendOption = "auto", json: JsonOption = False
) -> None:
    """What this machine has, which backend each op uses, and the KV formats.

    \b
    Examples:
      subten info
      subten info --json
    """
    from subten.bench.machine import describe_machine, machine_text

    found = describe_machine(device, backend)
    if json:
        print_json(found)
    else:
        typer.echo(machine_text(found))


app.command("train")(make_command())
cli_measure.register(app)
cli_serve.register(app)


def facts_line(llm: LLM, completion: Completion) -> str:
    """Latency, KV bytes and true bits of one answer, in one line for people.

    A budget of bits is told with the length that it holds at: shorter texts take more a token, as
    the exact rows of their first and last tokens weigh more.
    """
    from subten.bench.report import human_bytes

    usage = completion.usage
    parts = [f"{usage.completion_tokens} tokens"]
    if completion.ttft_ms is not None:
        parts.append(f"first after {completion.ttft_ms:.0f} ms")
    if completion.tpot_ms is not None:
        rate = 1e3 / completion.tpot_ms
        parts.append(f"then {completion.tpot_ms:.1f} ms a token ({rate:.1f}/s)")
    cache = f"KV cache {completion.kv_cache_dtype}: {human_bytes(completion.kv_bytes)}"
    if completion.kv_true_bits is not None:
        inside = f"{completion.kv_full_page_bits:.2f} in full pages"
        if len(completion.kv_pages) > 1:
            kinds = [f"{number} {kind}" for kind, number in completion.kv_pages.items()]
            inside = f"pages: {', '.join(kinds)}"
        if llm.config.kv_bits_budget is not None:
            inside += f"; budget: {llm.config.kv_bits_budget:g} at {llm.max_model_len} tokens"
        cache += f", {completion.kv_true_bits:.2f} true bits ({inside})"
    parts.append(cache)
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached")
    if completion.finish_reason.value == "length":
        parts.append("ended at the length limit")
    return "[" + " | ".join(parts) + "]"


def _load(model: str, **settings: Any) -> LLM:
    from subten.codecs.adaptive import ADAPTIVE
    from subten.device import keep_freed_memory
    from subten.engine.llm import LLM

    source = resolve_model(model)
    keep_freed_memory()
    if settings["kv_cache_dtype"] == ADAPTIVE:
        # These commands serve one request at a time; room for the windows of others is wasted.
        settings = {"max_num_seqs": 1, **settings}
    with progress("Loading", terminal_only=True) as update:
        return LLM(source, progress=lambda done, total: update(done / total), **settings)


def _write(chunks: Iterator[Chunk], *, is_quiet: bool) -> Completion:
    """Take the chunks of one answer, writing their text as it comes unless `is_quiet`."""
    completion = None
    for chunk in chunks:
        if not is_quiet and chunk.text:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        completion = chunk.completion
    assert completion is not None, "a stream without its last chunk"
    if completion.finish_reason.value == "error":
        typer.echo(f"subten: error: the request failed: {completion.finish_detail}", err=True)
        raise typer.Exit(1)
    return completion


def _completion_dict(llm: LLM, completion: Completion, model: str) -> dict[str, Any]:
    """What `generate --json` prints."""
    return {
        "model": model,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(completion.prompt_token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": asdict(completion.usage),
        "ttft_ms": completion.ttft_ms,
        "tpot_ms": completion.tpot_ms,
        "kv_cache_dtype": completion.kv_cache_dtype,
        "kv_true_bits": completion.kv_true_bits,
        "kv_full_page_bits": completion.kv_full_page_bits,
        "kv_bits_budget": llm.config.kv_bits_budget,
        "max_model_len": llm.max_model_len,
        "kv_bytes": completion.kv_bytes,
        "kv_pages": dict(completion.kv_pages),
        "kv_bytes_per_token": llm.pool.bytes_per_token,
        "quantization": llm.loaded.quantization,
        "weight_bytes": llm.loaded.weight_bytes,
        "device": str(llm.device.torch_device),
        "device_name": llm.device.name,
    }


def main() -> None:
    """Entry point of the `subten` command."""
    app(prog_name="subten")


if __name__ == "__main__":
    main()
