"""`subten serve`: an engine, a listener, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from subten.serve import ipc, listener
from subten.serve.app import make_app
from subten.serve.auth import HostList, KeyRing
from subten.serve.context import Context
from subten.serve.generation import Generator
from subten.serve.grammar import GrammarChecker
from subten.serve.helper import mapped_bytes
from subten.serve.http_limits import LimitedProtocol
from subten.serve.logs import set_up_logs
from subten.serve.metrics import Metrics
from subten.serve.settings import ServeConfig
from subten.serve.supervisor import ENGINE_COMMAND, Supervisor, WatchLimits
from subten.serve.templates import ChatTemplates, max_text_chars
from subten.serve.tool_calls import form_of
from subten.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
CLOSE_S = 2


def run(
    config: ServeConfig,
    *,
    command: Sequence[str] = ENGINE_COMMAND,
    limits: WatchLimits | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; ConfigError where that cannot begin."""
    set_up_logs()
    if mapped_bytes() is None:
        logger.warning("without /proc the memory of templates and grammars has no limit")
    # While it loads too; the first process of a container would else not hear of it.
    signal.signal(signal.SIGTERM, _end)
    uvicorn_loop = uvicorn.Config(_no_app, loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
        runner.run(_serve(config, command, limits))


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


async def _serve(config: ServeConfig, command: Sequence[str], limits: WatchLimits | None) -> None:
    template = config.read_chat_template()
    # Before minutes of loading, not after.
    sock = listener.bind(config.host, config.port)
    start = ipc.Start(model=config.model, config=config.engine)
    supervisor = Supervisor(start, command=command, limits=limits)
    helpers: list[ChatTemplates | GrammarChecker] = []
    try:
        ready = await supervisor.start()
        context = make_context(config, supervisor, ready, template)
        helpers = [part for part in (context.templates, context.grammars) if part is not None]
        await asyncio.gather(*(helper.start() for helper in helpers))
        # What is there now stays: collections between tokens need not look at it.
        gc.collect()
        gc.freeze()
        listener.listen(sock)
        server = _Server(config, context)
        where = "http://{}:{}".format(*sock.getsockname()[:2])
        logger.info("%s", json.dumps({"event": "listening", "url": where, "model": context.names}))
        await server.serve(sockets=[sock])
    finally:
        sock.close()
        await supervisor.stop()
        for helper in helpers:
            await helper.close()


def make_context(
    config: ServeConfig, supervisor: Supervisor, ready: ipc.Ready, template: str | None
) -> Context:
    """The parts of a server whose engine is ready."""
    info = ready.info
    max_live = info.max_num_seqs + config.max_queued_requests
    tokenizer = None if ready.tokenizer is None else read_tokenizer(ready.tokenizer)
    templates = None
    if tokenizer is not None:
        tokenizer.chat_template = template or tokenizer.chat_template
        templates = ChatTemplates(
            tokenizer, max_chars=max_text_chars(info.max_model_len), max_waiting=max_live
        )
    names = config.served_model_name or (_default_name(config.model),)
    metrics = Metrics(names[0], supervisor)
    supervisor.on_step = metrics.step_tokens.observe
    return Context(
        names=names,
        info=info,
        tokenizer=tokenizer,
        templates=templates,
        generator=Generator(
            supervisor,
            tokenizer,
            metrics,
            max_live=max_live,
            has_prefix_cache=config.engine.enable_prefix_caching,
        ),
        metrics=metrics,
        grammars=GrammarChecker(max_waiting=max_live),
        keys=KeyRing(config.api_key),
        hosts=HostList(config.hosts),
        call_form=form_of(
            config.tool_call_parser, None if tokenizer is None else tokenizer.chat_template
        ),
    )


def read_tokenizer(file: ipc.TokenizerFile) -> Tokenizer:
    """The engine's tokenizer."""
    return Tokenizer.from_text(
        file.tokenizer_json,
        eos_token_ids=file.eos_token_ids,
        bos_token_id=file.bos_token_id,
        chat_template=file.chat_template,
        config=file.config,
    )


def _default_name(model: str) -> str:
    """A name for clients that tells nothing of this machine's folders."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model


class _Server(uvicorn.Server):
    """Drains at the first signal, ends at the second; both with exit code 0."""

    def __init__(self, config: ServeConfig, context: Context) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(context),
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._generator = context.generator
        self._drain_s = config.drain_timeout
        self._drainer: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal; what takes time happens in the loop."""
        del frame
        if self._generator.is_draining:
            self.should_exit = self.force_exit = True
            return
        self._generator.is_draining = True
        logger.info("%s", json.dumps({"event": "draining", "signal": signal.Signals(sig).name}))

    async def on_tick(self, counter: int) -> bool:
        """Several times a second: begin to drain once that is asked for."""
        if self._generator.is_draining and self._drainer is None:
            self._drainer = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        """Let answers finish, then end the others with an error."""
        supervisor = self._generator.supervisor
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        while supervisor.num_live and loop.time() < end_s:
            await asyncio.sleep(0.02)
        supervisor.fail_all("the server is stopping")
        self.should_exit = True


async def _no_app(_scope: Any, _receive: Any, _send: Any) -> None:
    raise AssertionError
