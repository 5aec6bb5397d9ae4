"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from subten.serve.context import Context, new_id
from subten.serve.errors import bad_field, json_response
from subten.serve.generation import Generation, Job, Piece
from subten.serve.grammar import of_structured_outputs
from subten.serve.logprobs import CompletionLogprobs, TokenTexts
from subten.serve.protocol import CompletionBody, read_body
from subten.serve.requests import (
    check_stream_options,
    prompts_of,
    sampling_params,
    usage_of,
)
from subten.serve.streams import DONE, ChoiceFrame, EventStream, collect, event

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
_MANY_ROWS = 100
"""Log-probabilities of a piece from which it is written beside the event loop."""

MAX_ECHOED_LOGPROBS = 2**18
"""In all answers to a request: the engine's message with those of a prompt is read in one go."""


class _Echo:
    """What stands before the answers: each prompt's text and log-probabilities, made once."""

    def __init__(self, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> None:
        self.is_on = bool(body.echo)
        self._prompts = prompts
        self._n = body.n or 1
        self._texts = [""] * len(prompts)
        self._logprobs: dict[int, dict[str, Any]] = {}

    async def read_texts(self, context: Context) -> None:
        """Decode the prompts, where they are asked for."""
        if self.is_on and context.tokenizer is not None:
            decode = functools.partial(context.decode, param="echo", skip_special_tokens=True)
            self._texts = [await decode(prompt) for prompt in self._prompts]

    def prompt(self, index: int) -> Sequence[int]:
        """The tokens of an answer's prompt."""
        return self._prompts[index // self._n]

    def text(self, index: int) -> str:
        """The prompt's text, or "" where no echo is asked for."""
        return self._texts[index // self._n]

    def logprobs(self, texts: TokenTexts, piece: Piece) -> dict[str, Any]:
        """Those of the prompt's tokens, which come with its first answer; the first has none."""
        number = piece.index // self._n
        if number not in self._logprobs:
            scored = piece.prompt_logprobs or ()
            self._logprobs[number] = CompletionLogprobs(texts).of(
                [self._prompts[number][0], *scored]
            )
        return self._logprobs[number]


class _Writer:
    """Makes the objects of one answer's stream or whole."""

    def __init__(self, context: Context, body: CompletionBody, echo: _Echo) -> None:
        self._texts = None if body.logprobs is None else context.token_texts
        self._echo = echo
        self._begun: dict[int, CompletionLogprobs | None] = {}
        self.head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": context.created_now(),
            "model": body.model,
        }

    def is_long(self, piece: Piece) -> bool:
        """Whether a piece takes long to write: the events of others do not wait for it."""
        return len(piece.logprobs) + len(piece.prompt_logprobs or ()) > _MANY_ROWS

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A piece as a choice; the first one of an answer begins with the echo."""
        is_first = piece.index not in self._begun
        text = self._echo.text(piece.index) if is_first else ""
        if is_first:
            self._begun[piece.index] = self._maker(piece.index, len(text))
        maker = self._begun[piece.index]
        logprobs = None if maker is None else maker.of(piece.logprobs)
        if self._texts is not None and logprobs is not None and is_first and self._echo.is_on:
            before = self._echo.logprobs(self._texts, piece)
            logprobs = {name: before[name] + found for name, found in logprobs.items()}
        return {
            "index": piece.index,
            "text": text + piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def response(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> Response:
        """Whole answers."""
        choices = [self.choice(piece) for piece in pieces]
        return json_response(self.head | {"choices": choices, "usage": usage})

    def _maker(self, index: int, num_chars: int) -> CompletionLogprobs | None:
        if self._texts is None:
            return None
        prompt = self._echo.prompt(index)
        return CompletionLogprobs(self._texts, context=prompt, num_chars=num_chars)


async def create_completion(context: Context, request: Request) -> Response:
    """Continue one or several prompts."""
    body = await read_body(CompletionBody, request)
    context.check_model(body.model)
    context.generator.check_ready()
    has_usage = check_stream_options(body)
    prompts = await prompts_of(context, body)
    _check_echo(body, prompts)
    echo = _Echo(body, prompts)
    await echo.read_texts(context)
    writer = _Writer(context, body, echo)
    if body.max_tokens == 0:
        return _echo_alone(body, prompts, writer)
    sampling = sampling_params(
        context,
        body,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    job = Job(
        prompts=prompts,
        sampling=sampling,
        n=body.n or 1,
        tenant=request.state.tenant,
        grammar=await context.grammar(request, of_structured_outputs(body.structured_outputs)),
    )
    generation = context.generator.start(job)
    request.state.generation = generation
    if body.stream:
        events = _events(generation, writer, has_usage=has_usage)
        return await EventStream(generation, events).prepare(request)
    pieces = await collect(request, generation)
    usage = usage_of(generation)
    if any(map(writer.is_long, pieces)):
        return await asyncio.to_thread(writer.response, pieces, usage)
    return writer.response(pieces, usage)


async def _events(
    generation: Generation, writer: _Writer, *, has_usage: bool
) -> AsyncIterator[bytes]:
    frame = ChoiceFrame(writer.head, has_usage=has_usage)
    async for piece in generation.pieces():
        if piece.text or piece.logprobs or piece.finish_reason:
            is_long = writer.is_long(piece)
            choice = (
                await asyncio.to_thread(writer.choice, piece) if is_long else writer.choice(piece)
            )
            yield frame.event(choice)
    if has_usage:
        yield event(writer.head | {"choices": [], "usage": usage_of(generation)})
    yield DONE


def _check_echo(body: CompletionBody, prompts: Sequence[Sequence[int]]) -> None:
    if not body.echo or body.logprobs is None:
        return
    num_rows = sum(map(len, prompts)) * (body.n or 1)
    if num_rows * (body.logprobs + 1) > MAX_ECHOED_LOGPROBS:
        raise bad_field(
            "logprobs",
            f"got {body.logprobs} with an echo of {num_rows} tokens in all answers; allowed: "
            f"tokens times (logprobs + 1) up to {MAX_ECHOED_LOGPROBS}",
        )


def _echo_alone(
    body: CompletionBody, prompts: Sequence[Sequence[int]], writer: _Writer
) -> Response:
    """The answer to max_tokens 0: the prompt, without asking the engine."""
    if not body.echo or body.stream or body.logprobs is not None:
        raise bad_field(
            "max_tokens", "0 is allowed only with echo, without stream and without logprobs"
        )
    num_choices = len(prompts) * (body.n or 1)
    pieces = [Piece(index=index, finish_reason="length") for index in range(num_choices)]
    num_prompt = sum(len(prompt) for prompt in prompts)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 0, "total_tokens": num_prompt}
    return writer.response(pieces, usage)
