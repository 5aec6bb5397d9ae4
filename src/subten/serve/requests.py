"""From the body of a request to what the engine is asked: token ids, sampling, usage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from subten.core import RequestError, SamplingParams
from subten.serve.context import Context
from subten.serve.errors import ApiError, bad_field
from subten.serve.generation import Generation
from subten.serve.protocol import (
    MAX_CHOICES,
    ChatMessage,
    CompletionBody,
    Sampled,
    TextPart,
    ToolSpec,
)

_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def sampling_params(
    context: Context,
    body: Sampled,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """How to sample; more tokens than there is room for end with `length` when it is used up."""
    room = context.info.max_model_len
    values: dict[str, Any] = {
        name: getattr(body, name) for name in _NUMBERS if getattr(body, name) is not None
    }
    values["max_tokens"] = room if max_tokens is None else min(max_tokens, room)
    if body.stop is not None:
        context.need_tokenizer("stop")
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        context.check_ids(body.stop_token_ids, param="stop_token_ids")
        values["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias:
        bias = {int(token_id): value for token_id, value in body.logit_bias.items()}
        context.check_ids(list(bias), param="logit_bias")
        values["logit_bias"] = bias
    if body.seed is not None:
        values["seed"] = body.seed % 2**63
    try:
        return SamplingParams(**values, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    except RequestError as error:
        raise request_error(error) from error


def request_error(error: RequestError) -> ApiError:
    """The 400 for what the engine's own checks refuse; they name the field first."""
    return ApiError(
        400, str(error), param=str(error).partition(":")[0].partition("[")[0], code="invalid_value"
    )


def check_stream_options(body: Sampled) -> bool:
    """Whether a stream ends with usage; ApiError 400 for options without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise bad_field("stream_options", "allowed only with stream true")
    return bool(body.stream_options.include_usage)


async def prompts_of(context: Context, body: CompletionBody) -> list[list[int]]:
    """Token ids of every prompt of a completion request, checked."""
    prompt = body.prompt
    if isinstance(prompt, str):
        named: list[tuple[str, Any]] = [("prompt", prompt)]
    elif isinstance(prompt[0], int):
        named = [("prompt", prompt)]
    else:
        named = [(f"prompt.{index}", part) for index, part in enumerate(prompt)]
    num_choices = len(named) * (body.n or 1)
    if num_choices > MAX_CHOICES:
        message = f"got {num_choices} answers, prompts times n; allowed: at most {MAX_CHOICES}"
        raise bad_field("n", message)
    found = []
    for param, part in named:
        if isinstance(part, str):
            if not part:
                raise bad_field(param, "an empty text; allowed: at least one character")
            token_ids = await context.encode(part, param=param)
        else:
            context.check_ids(part, param=param)
            token_ids = part
        context.check_length(len(token_ids), param=param)
        found.append(token_ids)
    return found


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text contents, calls with parsed arguments."""
    found = []
    for index, message in enumerate(messages):
        param = f"messages.{index}"
        content = message_text(message.content)
        has_calls = bool(message.tool_calls)
        if has_calls and message.role != "assistant":
            raise bad_field(f"{param}.tool_calls", "allowed only with role assistant")
        if content is None and not has_calls:
            raise bad_field(f"{param}.content", "missing; allowed: text")
        if content == "" and message.role == "user":
            raise bad_field(f"{param}.content", "empty; allowed: at least one character")
        role = "system" if message.role == "developer" else message.role
        shown: dict[str, Any] = {"role": role, "content": content or ""}
        if message.name is not None:
            shown["name"] = message.name
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(
                            call.function.arguments, f"{param}.tool_calls.{number}"
                        ),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        found.append(shown)
    return found


def template_tools(tools: Sequence[ToolSpec] | None) -> list[dict[str, Any]] | None:
    """Tools as chat templates expect them."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def message_text(content: str | Sequence[TextPart] | None) -> str | None:
    """The text of a message, whose parts follow one another."""
    if content is None or isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def usage_of(generation: Generation) -> dict[str, Any]:
    """Token counts of a request, from ids."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def _arguments(text: str, param: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise bad_field(f"{param}.function.arguments", "not JSON") from error
    if not isinstance(value, dict):
        raise bad_field(f"{param}.function.arguments", "not a JSON object")
    return value
