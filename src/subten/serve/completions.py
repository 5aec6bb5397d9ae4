"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from subten.core import TokenLogprobs
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


class _Echo:
    """What stands before the answers of each prompt."""

    def __init__(self, context: Context, body: CompletionBody, prompts: Sequence[Sequence[int]]):
        self.is_on = bool(body.echo)
        self._prompts = prompts
        self._n = body.n or 1
        self._texts = [
            context.tokenizer.decode(prompt) if self.is_on and context.tokenizer else ""
            for prompt in prompts
        ]

    def text(self, index: int) -> str:
        """The prompt's text, or "" where no echo is asked for."""
        return self._texts[index // self._n]

    def first_id(self, index: int) -> int:
        """The first token of the prompt, which has no probability."""
        return self._prompts[index // self._n][0]


class _Writer:
    """Makes the objects of one answer's stream or whole."""

    def __init__(self, context: Context, body: CompletionBody, echo: _Echo) -> None:
        self._texts = None
        if body.logprobs is not None:
            self._texts = TokenTexts(context.need_tokenizer("logprobs"))
        self._echo = echo
        self._begun: dict[int, CompletionLogprobs | None] = {}
        self.head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": context.created_now(),
            "model": body.model,
        }

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A piece as a choice; the first one of an answer begins with the echo."""
        index = piece.index
        is_first = index not in self._begun
        if is_first:
            self._begun[index] = None if self._texts is None else CompletionLogprobs(self._texts)
        maker, logprobs = self._begun[index], None
        if maker is not None:
            entries: list[TokenLogprobs | int] = list(piece.logprobs)
            if is_first and self._echo.is_on:
                entries = [self._echo.first_id(index), *(piece.prompt_logprobs or ()), *entries]
            logprobs = maker.of(entries)
        return {
            "index": index,
            "text": (self._echo.text(index) if is_first else "") + piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


async def create_completion(context: Context, request: Request) -> Response:
    """Continue one or several prompts."""
    body = await read_body(CompletionBody, request)
    context.check_model(body.model)
    context.generator.check_ready()
    has_usage = check_stream_options(body)
    prompts = await prompts_of(context, body)
    echo = _Echo(context, body, prompts)
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
    choices = [writer.choice(piece) for piece in pieces]
    return json_response(writer.head | {"choices": choices, "usage": usage_of(generation)})


async def _events(
    generation: Generation, writer: _Writer, *, has_usage: bool
) -> AsyncIterator[bytes]:
    frame = ChoiceFrame(writer.head, has_usage=has_usage)
    async for piece in generation.pieces():
        if piece.text or piece.logprobs or piece.finish_reason:
            yield frame.event(writer.choice(piece))
    if has_usage:
        yield event(writer.head | {"choices": [], "usage": usage_of(generation)})
    yield DONE


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
    choices = [writer.choice(piece) for piece in pieces]
    return json_response(writer.head | {"choices": choices, "usage": usage})
