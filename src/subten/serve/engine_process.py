"""The engine's process: loads a model, serves it to the server that started it, ends with that.

Nothing pickled passes between the two, and no code does.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from dataclasses import fields

import torch

from subten.calibration.keys_at_load import read_text
from subten.config import EngineConfig, cache_dir
from subten.core import UserError
from subten.device import keep_freed_memory
from subten.engine.llm import LLM
from subten.engine.resolve import resolve_device
from subten.engine.roof import measure_roof
from subten.kernels import select_ops
from subten.serve import ipc
from subten.serve.channel import Channel, ServerGoneError
from subten.serve.engine_loop import BEAT_S, EngineLoop
from subten.serve.lifetime import die_with_parent
from subten.serve.logs import set_up_logs
from subten.tokenizer import Tokenizer
from subten.weights.load import open_checkpoint, read_settings
from subten.weights.upcycled import demo_model, find_demo_gguf

logger = logging.getLogger(__name__)

ROOF_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""What is read to measure a memory's bandwidth: beyond any cache, and over in a moment."""


def serve(channel: Channel, llm: LLM, roof_bytes_per_s: float | None = None) -> None:
    """Say what was loaded and serve until the server is gone.

    `roof_bytes_per_s` is the bandwidth of the device's memory, for metrics.
    """
    channel.send(ipc.Ready(info=_info(llm), tokenizer=_tokenizer_file(llm.tokenizer)))
    # What is there now stays: collections between steps need not look at it.
    gc.collect()
    gc.freeze()
    try:
        EngineLoop(channel, llm, roof_bytes_per_s).run()
    except ServerGoneError:
        logger.info("the server is gone")


def channel_from_arguments() -> Channel:
    """The channel whose socket's number is the last argument of this process."""
    die_with_parent()
    # A terminal's Ctrl-C goes to the whole group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logs()
    return Channel(socket.socket(fileno=int(sys.argv[-1])))


def main() -> None:
    """Load the model that the first message names, then serve."""
    channel = channel_from_arguments()
    try:
        start = first_message(channel)
        device = resolve_device(start.config).torch_device
        source = _source(start.model)
        _check(start.config, device, source)
        roof_bytes_per_s = _measure_roof(device)
        llm = _load(start, source)
    except ServerGoneError:
        return
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, UserError):
            logger.exception("loading failed")
        is_user_error = isinstance(error, UserError)
        message = str(error) if is_user_error else f"{type(error).__name__}: {error}"
        channel.send(ipc.Failed(message=message, is_user_error=is_user_error))
        sys.exit(2)
    code = 0
    try:
        serve(channel, llm, roof_bytes_per_s)
    except Exception:
        logger.exception("the engine ends")
        code = 1
    # The kernel frees all there is, at once and without a word of the libraries about leaks; on a
    # device that is lost they might not come to an end either.
    logging.shutdown()
    os._exit(code)


def first_message(channel: Channel) -> ipc.Start:
    """The message that a server begins with."""
    while True:
        for message in channel.receive(BEAT_S):
            assert isinstance(message, ipc.Start), type(message)
            return message


def _source(model: str) -> str:
    """What the loader takes; the demo model is built where it is new."""
    if model == "demo":
        logger.info("the demo model is built first where it is new")
        return str(demo_model(cache_dir(), lambda _what, _share: None))
    return str(find_demo_gguf()) if model == "demo-dense" else model


def _check(config: EngineConfig, device: torch.device, source: str) -> None:
    """Refuse settings that the model or this machine cannot serve before anything takes long."""
    select_ops(config.backend, device)
    read_text(config.kv_calibration)
    read_settings(
        *open_checkpoint(source),
        kv_cache_dtype=config.kv_cache_dtype,
        kv_key_bias=config.kv_key_bias,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
    )


def _measure_roof(device: torch.device) -> float | None:
    """Bytes a second at which the device reads, while its memory is still empty."""
    try:
        roof = measure_roof(device, num_bytes=ROOF_BYTES[device.type], num_reads=5)
    except (torch.OutOfMemoryError, MemoryError):
        logger.warning("the memory's bandwidth could not be measured: too little is free")
        return None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    logger.info("memory reads at %.3f TB/s (%s)", roof.tb_s, roof.how)
    return roof.bytes_per_s


def _load(start: ipc.Start, source: str) -> LLM:
    keep_freed_memory()
    logger.info("loading %s", start.model)
    settings = {field.name: getattr(start.config, field.name) for field in fields(start.config)}
    return LLM(source, **settings)


def _info(llm: LLM) -> ipc.EngineInfo:
    return ipc.EngineInfo(
        name=llm.loaded.name,
        vocab_size=llm.model_config.vocab_size,
        max_model_len=llm.engine.scheduler.max_seq_len,
        max_num_seqs=llm.config.max_num_seqs,
        eos_token_ids=list(llm.model_config.eos_token_ids),
        kv_cache_dtype=llm.config.kv_cache_dtype,
        kv_full_page_bits=llm.pool.full_page_bits,
        num_pages=llm.engine.scheduler.allocator.num_pages,
        device=llm.device.name,
    )


def _tokenizer_file(tokenizer: Tokenizer | None) -> ipc.TokenizerFile | None:
    if tokenizer is None:
        return None
    return ipc.TokenizerFile(
        tokenizer_json=tokenizer.backend.to_str(),
        config=tokenizer.config,
        eos_token_ids=list(tokenizer.eos_token_ids),
        bos_token_id=tokenizer.bos_token_id,
        chat_template=tokenizer.chat_template,
    )


if __name__ == "__main__":
    main()
