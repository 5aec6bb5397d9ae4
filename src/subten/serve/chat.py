"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from subten.serve.context import Context, new_id
from subten.serve.errors import bad_field, json_response
from subten.serve.generation import Generation, Job, Piece
from subten.serve.grammar import (
    Grammar,
    of_call,
    of_format,
    of_strict_calls,
    of_structured_outputs,
)
from subten.serve.logprobs import chat_logprobs
from subten.serve.protocol import ChatBody, read_body
from subten.serve.requests import (
    check_stream_options,
    sampling_params,
    template_messages,
    template_tools,
    usage_of,
)
from subten.serve.streams import DONE, ChoiceFrame, EventStream, collect, event, unless_gone
from subten.serve.tool_calls import FORMS, Found, FoundCall, ToolCallReader


async def create_chat_completion(context: Context, request: Request) -> Response:
    """The assistant's next message in a conversation."""
    body = await read_body(ChatBody, request)
    context.check_model(body.model)
    context.generator.check_ready()
    has_usage = check_stream_options(body)
    prompt = await unless_gone(request, _prompt(context, body))
    sampling = sampling_params(
        context, body, max_tokens=_max_tokens(body), logprobs=_num_logprobs(body)
    )
    writer = _Writer(context, body)
    job = Job(
        prompts=[prompt],
        sampling=sampling,
        n=body.n or 1,
        tenant=request.state.tenant,
        grammar=await context.grammar(request, _grammar(context, body)),
        shown_tokens=_shown_tokens(context, body),
    )
    generation = context.generator.start(job)
    request.state.generation = generation
    if body.stream:
        events = _events(generation, writer, has_usage=has_usage)
        return await EventStream(generation, events).prepare(request)
    pieces = await collect(request, generation)
    usage = usage_of(generation)
    if writer.has_logprobs:
        return await asyncio.to_thread(writer.response, pieces, usage)
    return writer.response(pieces, usage)


async def _prompt(context: Context, body: ChatBody) -> list[int]:
    templates = context.need_templates("messages")
    if body.tool_choice not in (None, "none") and not body.tools:
        raise bad_field("tool_choice", "allowed only with tools")
    messages = template_messages(body.messages)
    is_continued = body.add_generation_prompt is False
    text = await templates.render(
        messages,
        tools=None if body.tool_choice == "none" else template_tools(body.tools),
        add_generation_prompt=not is_continued,
        kwargs=body.chat_template_kwargs,
    )
    token_ids = await context.encode_chat(text, param="messages")
    context.check_length(len(token_ids), param="messages")
    return token_ids


def _grammar(context: Context, body: ChatBody) -> Grammar | None:
    """What the answer must follow: a format, a grammar, or the call of a function."""
    asked_form = of_format(body.response_format, param="response_format")
    asked = of_structured_outputs(body.structured_outputs)
    if asked_form is not None and asked is not None:
        raise bad_field("structured_outputs", "allowed: this or response_format, not both")
    asked = asked or asked_form
    if not _is_call_forced(body):
        form = context.call_form
        if asked is not None or form is None or not _may_call(body):
            return asked
        return of_strict_calls(
            body.tools, form, form.special_marks(context.need_tokenizer("tools"))
        )
    if asked is not None:
        raise bad_field(asked.param.partition(".")[0], "not allowed with this tool_choice")
    assert body.tools is not None
    assert body.tool_choice is not None
    return of_call(body.tools, body.tool_choice)


def _may_call(body: ChatBody) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def _is_call_forced(body: ChatBody) -> bool:
    return body.tool_choice not in (None, "none", "auto")


def _shown_tokens(context: Context, body: ChatBody) -> dict[int, str]:
    """Special tokens that begin or end calls, where those are read."""
    if context.call_form is None or context.tokenizer is None or not _may_call(body):
        return {}
    return context.call_form.special_marks(context.tokenizer)


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_field("max_tokens", "allowed: this or max_completion_tokens, not both")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "allowed only with logprobs true")
    return (body.top_logprobs or 0) if body.logprobs else None


class _Writer:
    """Makes the objects of a stream or of a whole answer."""

    def __init__(self, context: Context, body: ChatBody) -> None:
        self._texts = context.token_texts if body.logprobs else None
        # A forced call is JSON by itself, whatever form the model uses of its own will.
        is_forced = _is_call_forced(body)
        self._form = None if is_forced else context.call_form
        self._has_tools = _may_call(body) and (is_forced or self._form is not None)
        self._new_call_id = (context.call_form or FORMS["hermes"]).new_id
        self._max_calls = 1 if body.parallel_tool_calls is False else sys.maxsize
        self._readers: dict[int, ToolCallReader] = {}
        self._num_calls: dict[int, int] = {}
        self.head: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": context.created_now(),
            "model": body.model,
        }

    @property
    def has_logprobs(self) -> bool:
        """Whether an answer takes long to write: the events of others do not wait for it."""
        return self._texts is not None

    def response(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> Response:
        """Whole answers."""
        head = self.head | {"object": "chat.completion"}
        choices = [self.choice(piece) for piece in pieces]
        return json_response(head | {"choices": choices, "usage": usage})

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole answer."""
        found = self._read(piece)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": found.text or (None if found.calls else ""),
            "refusal": None,
        }
        if found.calls:
            message["tool_calls"] = self._calls(piece.index, found.calls, is_delta=False)
        return {
            "index": piece.index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": self._finish_reason(piece),
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of an answer."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """A piece as a choice of a chunk; None where it shows nothing."""
        found = self._read(piece)
        delta: dict[str, Any] = {}
        if found.text:
            delta["content"] = found.text
        if found.calls:
            delta["tool_calls"] = self._calls(piece.index, found.calls, is_delta=True)
        if not delta and not piece.logprobs and piece.finish_reason is None:
            return None
        return {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": self._finish_reason(piece),
        }

    def _read(self, piece: Piece) -> Found:
        if not self._has_tools:
            return Found(text=piece.text)
        reader = self._readers.setdefault(piece.index, ToolCallReader(self._form))
        found = reader.push(piece.text)
        if piece.finish_reason is not None:
            rest = reader.flush()
            found.text += rest.text
            found.calls += rest.calls
        del found.calls[self._max_calls - self._num_calls.get(piece.index, 0) :]
        return found

    def _calls(self, index: int, calls: list[FoundCall], *, is_delta: bool) -> list[dict[str, Any]]:
        shown = []
        for call in calls:
            number = self._num_calls.get(index, 0)
            self._num_calls[index] = number + 1
            function = {"name": call.name, "arguments": call.arguments}
            entry = {"id": self._new_call_id(), "type": "function", "function": function}
            shown.append({"index": number} | entry if is_delta else entry)
        return shown

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return None if self._texts is None else chat_logprobs(self._texts, piece.logprobs)

    def _finish_reason(self, piece: Piece) -> str | None:
        if piece.finish_reason == "stop" and self._num_calls.get(piece.index):
            return "tool_calls"
        return piece.finish_reason


async def _events(
    generation: Generation, writer: _Writer, *, has_usage: bool
) -> AsyncIterator[bytes]:
    frame = ChoiceFrame(writer.head, has_usage=has_usage)
    opened: set[int] = set()
    async for piece in generation.pieces():
        choice = writer.chunk(piece)
        data = b""
        if piece.index not in opened:
            opened.add(piece.index)
            data = frame.event(writer.opening(piece.index))
        if choice is not None:
            data += frame.event(choice)
        if data:
            yield data
    if has_usage:
        yield event(writer.head | {"choices": [], "usage": usage_of(generation)})
    yield DONE
