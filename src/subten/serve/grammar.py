"""JSON schemas that answers must follow: taken from requests, and tried before the engine is."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Any

from subten.serve.errors import bad_field
from subten.serve.helper import Helper
from subten.serve.protocol import NamedTool, ResponseFormat, ResponsesText, ToolSpec

MAX_SCHEMA_CHARS = 2**16
MAX_DEPTH = 32
COMPILE_S = 2.0
CACHE_CHARS = 2**22
"""Schemas that are known to be good, in characters."""
_MODULE = "subten.serve.grammar_process"


class GrammarChecker:
    """Tries schemas in a helper process, one at a time, and remembers the good ones."""

    def __init__(self) -> None:
        self._helper = Helper(_MODULE, limit_s=COMPILE_S)
        self._lock = asyncio.Lock()
        self._good: OrderedDict[str, None] = OrderedDict()
        self._num_chars = 0

    async def start(self) -> None:
        """Start the helper process."""
        await self._helper.start()

    async def close(self) -> None:
        """End the helper process."""
        await self._helper.close()

    async def check(self, schema: dict[str, Any], *, param: str) -> str:
        """A schema as text for the engine; ApiError 400 where it cannot be followed."""
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARS:
            raise bad_field(param, f"allowed: at most {MAX_SCHEMA_CHARS} characters")
        if _depth(schema) > MAX_DEPTH:
            raise bad_field(param, f"nested deeper than {MAX_DEPTH}")
        if text in self._good:
            self._good.move_to_end(text)
            return text
        async with self._lock:
            answer = await self._helper.ask({"schema": text})
        if answer is None:
            raise bad_field(param, f"it takes more than {COMPILE_S:.0f} s or too much memory")
        if "error" in answer:
            raise bad_field(param, f"cannot be followed: {answer['error']}")
        self._remember(text)
        return text

    def _remember(self, text: str) -> None:
        if text in self._good:
            return
        self._good[text] = None
        self._num_chars += len(text)
        while self._num_chars > CACHE_CHARS:
            oldest, _ = self._good.popitem(last=False)
            self._num_chars -= len(oldest)


def format_schema(
    form: ResponseFormat | ResponsesText.Format | None, *, param: str
) -> tuple[dict[str, Any], str] | None:
    """The schema that a response format asks for and where it stands; None for free text."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}, param
    if isinstance(form, ResponseFormat):
        if form.json_schema is None:
            raise bad_field(f"{param}.json_schema", "missing")
        return form.json_schema.schema_, f"{param}.json_schema.schema"
    if form.schema_ is None:
        raise bad_field(f"{param}.schema", "missing")
    return form.schema_, f"{param}.schema"


def call_schema(tools: list[ToolSpec], choice: str | NamedTool) -> dict[str, Any]:
    """The schema of a call of one of the functions, or of the one that `choice` names."""
    named = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        named = [function for function in named if function.name == choice.function.name]
        if not named:
            raise bad_field("tool_choice.function.name", "allowed: a name of tools")
    calls = []
    for function in named:
        parameters = function.parameters or {"type": "object", "properties": {}}
        properties = {"name": {"const": function.name}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _depth(root: Any) -> int:
    depth, level = 0, [root]
    while level and depth <= MAX_DEPTH:
        below: list[Any] = []
        for value in level:
            children = value.values() if isinstance(value, dict) else value
            below += [child for child in children if isinstance(child, dict | list)]
        depth, level = depth + 1, below
    return depth
