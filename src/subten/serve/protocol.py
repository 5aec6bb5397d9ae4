"""The bodies of requests, field by field, with their limits.

Types are strict and unknown fields are refused, so that nothing a client asks for is dropped in
silence. Fields that OpenAI's API has and that make no difference here are named as such.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticKnownError
from starlette.requests import Request

from subten.core import MAX_BIASES
from subten.serve.errors import bad_field
from subten.serve.strict_json import OFF_LOOP_BYTES, parse_object, read_bytes

MAX_CHOICES = 128
"""Answers to one request: prompts times n."""

MAX_METADATA = 16

MAX_SHOWN = 64
"""Characters of a value up to which an error repeats it."""


def _at_most(max_length: int) -> BeforeValidator:
    """Counts a dict's items before they are looked at: each bad one would be an error of its own.

    Lists stop at their first error (fail_fast); dicts cannot.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > max_length:
            limits = {"field_type": "Dictionary", "max_length": max_length, "actual_length": None}
            raise PydanticKnownError("too_long", limits)
        return value

    return BeforeValidator(check)


_MANY = Field(min_length=1, max_length=2048, fail_fast=True)
Text = Annotated[str, StringConstraints(max_length=4 * 2**20)]
TokenIds = Annotated[list[int], Field(min_length=1, max_length=2**20, fail_fast=True)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Stops = Annotated[list[StopText], Field(max_length=16, fail_fast=True)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
LogitBias = Annotated[
    dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    _at_most(MAX_BIASES),
]
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), _at_most(MAX_METADATA)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """One field that is not known is refused as a hundred thousand are, and sooner."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in value if name not in names)
        return {name: held for name, held in value.items() if name in names or name == unknown}


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(kind: type[AnyBody], request: Request) -> AnyBody:
    """A request's body; ApiError 400, 408, 413 or 415. A large one is read in a thread."""
    data = await read_bytes(request)
    read = functools.partial(_read, kind, data)
    return await asyncio.to_thread(read) if len(data) > OFF_LOOP_BYTES else read()


def _read(kind: type[AnyBody], data: bytes) -> AnyBody:
    return parse(kind, parse_object(data))


def parse(kind: type[AnyBody], value: dict[str, Any]) -> AnyBody:
    """A body of some kind; ApiError 400 naming the first field that is wrong, as a path."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
    paths = [_path(value, item) for item in found]
    # Of a union's alternatives the one that got furthest is what the client meant.
    ranks = [_rank(item, path) for item, path in zip(found, paths, strict=True)]
    chosen = ranks.index(max(ranks))
    param, came = paths[chosen], _came(found[chosen])
    messages = [
        item["msg"]
        for item, path, rank in zip(found, paths, ranks, strict=True)
        if path == param and rank == max(ranks)
    ]
    raise bad_field(param, "; or: ".join(dict.fromkeys(messages)) + came)


def _came(error: ErrorDetails) -> str:
    """What stood there, as far as it is short."""
    if error["type"] in ("missing", "extra_forbidden"):
        return ""
    came = error["input"]
    if isinstance(came, list | dict):
        what = "a list" if isinstance(came, list) else "an object"
        return f"; got {what} of {len(came)}"
    if isinstance(came, str) and len(came) > MAX_SHOWN:
        return f"; got {len(came)} characters"
    text = json.dumps(came)
    if isinstance(came, int) and len(text) > MAX_SHOWN:
        return f"; got an integer of {len(text.lstrip('-'))} digits"
    return f"; got {text}"


def _rank(error: ErrorDetails, path: str) -> tuple[bool, int, int]:
    """How far an alternative got: the type was right, how deep, at which entry."""
    last = path.rpartition(".")[2]
    index = int(last) if last.isdecimal() and len(last) < 9 else -1
    return not error["type"].endswith("_type"), path.count("."), index


def _path(value: Any, error: ErrorDetails) -> str:
    """Where in the body an error lies: pydantic's location without the names of its own types."""
    path: list[str] = []
    for part in error["loc"]:
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int)
        if is_key or is_index:
            value = value[part]
            path.append(str(part)[:64])
    if error["type"] == "missing":
        path.append(str(error["loc"][-1]))
    return ".".join(path)


class StreamOptions(Body):
    """What a stream tells besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Body):
    """What an answer must follow, by one of these fields; names are vLLM's."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Annotated[Text, StringConstraints(min_length=1)] | None = None
    choice: (
        Annotated[
            list[Annotated[Text, StringConstraints(min_length=1)]],
            Field(min_length=1, max_length=1024, fail_fast=True),
        ]
        | None
    ) = None
    grammar: Annotated[Text, StringConstraints(min_length=1)] | None = None
    """In the Lark form that llguidance reads."""


class Sampled(Body):
    """What completions and chats share; ranges beyond these are checked by SamplingParams."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Makes no difference here."""


class CompletionBody(Sampled):
    """POST /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class FunctionCall(Body):
    """A call as the model wrote it; `arguments` is JSON in a string."""

    name: FunctionName
    arguments: Text


class ToolCall(Body):
    """A call in an earlier message of the assistant."""

    id: Annotated[str, StringConstraints(max_length=256)]
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Body):
    """One message of a conversation; every part of its content is text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], _MANY] | None = None
    name: Annotated[str, StringConstraints(max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    refusal: Text | None = None


class FunctionSpec(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    """The name of a function."""

    name: FunctionName


class NamedTool(Body):
    """The function that the answer has to call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """The schema of an answer."""

    name: FunctionName
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], _MANY]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    store: Literal[False] | None = None
    metadata: Metadata | None = None
    """Makes no difference here."""


class ResponsesPart(TextPart):
    """A piece of a message, as an earlier response gave it."""

    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class ResponsesMessage(Body):
    """One message of a /v1/responses conversation; the output of an earlier response is one."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ResponsesPart], _MANY]
    type: Literal["message"] | None = None
    id: Annotated[str, StringConstraints(max_length=256)] | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """Like `id` it makes no difference here."""


class ResponsesText(Body):
    """The form of an answer."""

    class Format(Body):
        """Free text, any JSON object, or JSON by a schema."""

        type: Literal["text", "json_object", "json_schema"]
        name: FunctionName | None = None
        description: Text | None = None
        schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
        strict: bool | None = None

    format: Format | None = None


class ResponsesBody(Body):
    """POST /v1/responses; text in, text out, nothing kept."""

    model: Name
    input: Text | Annotated[list[ResponsesMessage], _MANY]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    text: ResponsesText | None = None
    store: Literal[False] | None = None
    metadata: Metadata | None = None
    """Comes back in the answer."""
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Makes no difference here."""


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], _MANY] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[int], Field(max_length=2**20, fail_fast=True)]
