"""POST /v1/responses: text in, text out, nothing kept."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from subten.serve.context import Context, new_id
from subten.serve.errors import ApiError, json_response
from subten.serve.generation import Generation, Job
from subten.serve.grammar import of_format
from subten.serve.protocol import ChatMessage, ResponsesBody, Sampled, read_body
from subten.serve.requests import message_text, sampling_params, template_messages
from subten.serve.streams import EventStream, collect, event, unless_gone


async def create_response(context: Context, request: Request) -> Response:
    """The answer to an input, in the form of OpenAI's Responses API."""
    body = await read_body(ResponsesBody, request)
    context.check_model(body.model)
    context.generator.check_ready()
    asked = of_format(body.text.format if body.text else None, param="text.format")
    grammar = await context.grammar(request, asked)
    templates = context.need_templates("input")
    text = await unless_gone(request, templates.render(template_messages(_messages(body))))
    prompt = await context.encode_chat(text, param="input")
    context.check_length(len(prompt), param="input")
    sampled = Sampled(model=body.model, temperature=body.temperature, top_p=body.top_p)
    sampling = sampling_params(context, sampled, max_tokens=body.max_output_tokens)
    job = Job(prompts=[prompt], sampling=sampling, tenant=request.state.tenant, grammar=grammar)
    generation = context.generator.start(job)
    request.state.generation = generation
    writer = _Writer(context, body)
    if body.stream:
        events = _events(generation, writer)
        stream = EventStream(generation, events, failed=writer.failed)
        return await stream.prepare(request)
    pieces = await collect(request, generation)
    return json_response(writer.whole(pieces[0].text, generation))


def _messages(body: ResponsesBody) -> list[ChatMessage]:
    messages = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    return messages + [
        ChatMessage(role=m.role, content=message_text(m.content)) for m in body.input
    ]


class _Writer:
    """Makes the response object and the events of its stream."""

    def __init__(self, context: Context, body: ResponsesBody) -> None:
        self._body = body
        self._id = new_id("resp")
        self._item_id = new_id("msg")
        self._created_s = context.created_now()
        self._numbers = itertools.count()
        self.text = ""

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        """The response at its end."""
        num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        is_cut = generation.finish_reasons() == ["length"]
        status = "incomplete" if is_cut else "completed"
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_output,
        }
        details = {"reason": "max_output_tokens"} if is_cut else None
        return self._response(status, [self._item(status, text)], usage, details)

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event of the stream."""
        numbered = {"type": kind, "sequence_number": next(self._numbers)} | fields
        return event(numbered, name=kind)

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self.event("error", **fields)

    def opening(self) -> bytes:
        """The events before the first text."""
        started = self._response("in_progress", [], None, None)
        item = self._item("in_progress", None)
        return (
            self.event("response.created", response=started)
            + self.event("response.in_progress", response=started)
            + self.event("response.output_item.added", output_index=0, item=item)
            + self.event("response.content_part.added", **self._place(), part=_part(""))
        )

    def delta(self, text: str) -> bytes:
        """The event of a piece of text."""
        self.text += text
        return self.event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def closing(self, generation: Generation) -> bytes:
        """The events behind the last text."""
        whole = self.whole(self.text, generation)
        kind = f"response.{whole['status']}"
        place = self._place()
        return (
            self.event("response.output_text.done", **place, text=self.text, logprobs=[])
            + self.event("response.content_part.done", **place, part=_part(self.text))
            + self.event("response.output_item.done", output_index=0, item=whole["output"][0])
            + self.event(kind, response=whole)
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if text is None else [_part(text)],
        }

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Any, details: Any
    ) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(body: ResponsesBody) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


async def _events(generation: Generation, writer: _Writer) -> AsyncIterator[bytes]:
    data = writer.opening()
    async for piece in generation.pieces():
        if piece.text:
            data += writer.delta(piece.text)
        if piece.finish_reason is not None:
            data += writer.closing(generation)
        if data:
            yield data
        data = b""
