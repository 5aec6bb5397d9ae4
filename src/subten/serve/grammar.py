"""Grammars that answers must follow: taken from requests, and tried before the engine is."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

from subten.serve.errors import bad_field
from subten.serve.helper import Helper
from subten.serve.protocol import (
    FunctionSpec,
    NamedTool,
    ResponseFormat,
    ResponsesText,
    StructuredOutputs,
    ToolSpec,
)
from subten.serve.tool_calls import CLOSE, OPEN

MAX_GRAMMAR_CHARS = 2**16
MAX_DEPTH = 32
COMPILE_S = 2.0
CACHE_CHARS = 2**22
"""Grammars that are known to be good, in characters."""
_MODULE = "subten.serve.grammar_process"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """What an answer must follow, and the field of the request that says so."""

    kind: Literal["json_schema", "regex", "lark"]
    value: dict[str, Any] | str
    param: str

    @property
    def text(self) -> str:
        """The grammar as the engine takes it."""
        return json.dumps({self.kind: self.value})


class GrammarChecker:
    """Tries grammars in a helper process, one at a time, and remembers the good ones."""

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

    async def check(self, grammar: Grammar) -> str:
        """A grammar as text for the engine; ApiError 400 where it cannot be followed."""
        text, param = grammar.text, grammar.param
        if len(text) > MAX_GRAMMAR_CHARS:
            raise bad_field(param, f"allowed: at most {MAX_GRAMMAR_CHARS} characters")
        if isinstance(grammar.value, dict) and _depth(grammar.value) > MAX_DEPTH:
            raise bad_field(param, f"nested deeper than {MAX_DEPTH}")
        if text in self._good:
            self._good.move_to_end(text)
            return text
        async with self._lock:
            answer = await self._helper.ask({"grammar": text})
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


def of_format(form: ResponseFormat | ResponsesText.Format | None, *, param: str) -> Grammar | None:
    """What a response format asks for; None for free text."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return _json({"type": "object"}, param)
    if isinstance(form, ResponseFormat):
        if form.json_schema is None:
            raise bad_field(f"{param}.json_schema", "missing")
        return _json(form.json_schema.schema_, f"{param}.json_schema.schema")
    if form.schema_ is None:
        raise bad_field(f"{param}.schema", "missing")
    return _json(form.schema_, f"{param}.schema")


def of_structured_outputs(asked: StructuredOutputs | None) -> Grammar | None:
    """What `structured_outputs` asks for, the name and forms of vLLM; None for free text."""
    if asked is None:
        return None
    param = "structured_outputs"
    if len(asked.model_dump(exclude_none=True)) != 1:
        allowed = "json, json_object, regex, choice or grammar, one of them"
        raise bad_field(param, f"allowed: {allowed}")
    if asked.json_ is not None:
        return _json(asked.json_, f"{param}.json")
    if asked.json_object is not None:
        return _json({"type": "object"}, f"{param}.json_object")
    if asked.regex is not None:
        return Grammar(kind="regex", value=asked.regex, param=f"{param}.regex")
    if asked.grammar is not None:
        return Grammar(kind="lark", value=asked.grammar, param=f"{param}.grammar")
    assert asked.choice is not None
    # Strings of Lark are those of JSON.
    texts = (json.dumps(text, ensure_ascii=False) for text in asked.choice)
    return Grammar(kind="lark", value="start: " + " | ".join(texts), param=f"{param}.choice")


def of_call(tools: list[ToolSpec], choice: str | NamedTool) -> Grammar:
    """A call of one of the functions, or of the one that `choice` names."""
    named = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        named = [function for function in named if function.name == choice.function.name]
        if not named:
            raise bad_field("tool_choice.function.name", "allowed: a name of tools")
    return _json(_call(named), "tools")


def of_strict_calls(tools: list[ToolSpec] | None) -> Grammar | None:
    """Any text, its calls as strict functions want them; None where no function is strict."""
    named = [tool.function for tool in tools or ()]
    if not any(function.strict for function in named):
        return None
    anything = {"parameters": {"type": "object"}}
    schema = _call([f if f.strict else f.model_copy(update=anything) for f in named])
    close = CLOSE.replace("/", r"\/")
    rules = (
        "start: (text call)* rest",
        rf"text[lazy]: /(.|\n)*{OPEN}/",
        r"rest: /(.|\n)*/",
        rf"call: /[ \n]{{0,2}}/ %json {json.dumps(schema)} /[ \n]{{0,2}}{close}/",
    )
    return Grammar(kind="lark", value="\n".join(rules), param="tools")


def _call(functions: list[FunctionSpec]) -> dict[str, Any]:
    """The schema of a call of one of the functions."""
    calls = []
    for function in functions:
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


def _json(schema: dict[str, Any], param: str) -> Grammar:
    return Grammar(kind="json_schema", value=schema, param=param)


def _depth(root: Any) -> int:
    depth, level = 0, [root]
    while level and depth <= MAX_DEPTH:
        below: list[Any] = []
        for value in level:
            children = value.values() if isinstance(value, dict) else value
            below += [child for child in children if isinstance(child, dict | list)]
        depth, level = depth + 1, below
    return depth
