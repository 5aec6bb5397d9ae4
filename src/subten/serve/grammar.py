"""Grammars that answers must follow: taken from requests, and tried before the engine is."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from subten.serve.errors import bad_field
from subten.serve.helper_pool import MAX_WAITING, HelperPool
from subten.serve.protocol import (
    FunctionSpec,
    NamedTool,
    ResponseFormat,
    ResponsesText,
    StructuredOutputs,
    ToolSpec,
)
from subten.serve.tool_calls import CallForm

MAX_GRAMMAR_CHARS = 2**16
MAX_DEPTH = 32
COMPILE_S = 2.0
CACHE_CHARS = 2**22
"""Grammars that are known to be good, in characters."""
BYTES_END = 256
"""The end token of the vocabulary in which grammars are tried."""
_MODULE = "subten.serve.grammar_process"
_TOKEN_ID = re.compile(r"<\[\d+\]>")
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
"""Keys of a schema whose values have schemas under names of the caller's."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keys of a schema whose values are no schemas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """What an answer must follow, and the field of the request that says so."""

    kind: Literal["json_schema", "regex", "lark"]
    value: dict[str, Any] | str
    param: str
    has_token_ids: bool = False

    @property
    def text(self) -> str:
        """The grammar as the engine takes it."""
        return json.dumps({self.kind: self.value})

    @property
    def tried_text(self) -> str:
        """The grammar for a vocabulary of bytes, whose only special token stands for all."""
        if self.kind != "lark" or not self.has_token_ids:
            return self.text
        assert isinstance(self.value, str)
        value = _TOKEN_ID.sub(f"<[{BYTES_END}]>", self.value)
        return json.dumps({self.kind: value})


class GrammarChecker:
    """Tries grammars in a helper process, one at a time, and remembers the good ones."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self._helpers = HelperPool(_MODULE, limit_s=COMPILE_S, num=1, max_waiting=max_waiting)
        self._good: OrderedDict[str, None] = OrderedDict()
        self._num_chars = 0

    async def start(self) -> None:
        """Start the helper process."""
        await self._helpers.all[0].start()

    async def close(self) -> None:
        """End the helper process."""
        await self._helpers.close()

    async def check(self, grammar: Grammar) -> str:
        """A grammar as text for the engine; ApiError 400 where it cannot be followed, 429 where
        too many wait for theirs."""
        param = grammar.param
        if isinstance(grammar.value, dict) and _depth(grammar.value) > MAX_DEPTH:
            raise bad_field(param, f"nested deeper than {MAX_DEPTH}")
        text = grammar.text
        if len(text) > MAX_GRAMMAR_CHARS:
            raise bad_field(param, f"allowed: at most {MAX_GRAMMAR_CHARS} characters")
        if text in self._good:
            self._good.move_to_end(text)
            return text
        answer = await self._helpers.ask({"grammar": grammar.tried_text})
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
    texts = " | ".join(map(_lark_string, asked.choice))
    return Grammar(kind="lark", value=f"start: {texts}", param=f"{param}.choice")


def of_call(tools: list[ToolSpec], choice: str | NamedTool) -> Grammar:
    """A call of one of the functions, or of the one that `choice` names."""
    named = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        named = [function for function in named if function.name == choice.function.name]
        if not named:
            raise bad_field("tool_choice.function.name", "allowed: a name of tools")
    return _json(_call(named), "tools")


def of_strict_calls(
    tools: list[ToolSpec] | None, form: CallForm, special: Mapping[int, str]
) -> Grammar | None:
    """Any text, its calls as strict functions want them; None where no function is strict.

    `special` has the marks of the form that are special tokens, which no other text spells.
    """
    named = [tool.function for tool in tools or ()]
    if not any(function.strict for function in named):
        return None
    anything = {"parameters": {"type": "object"}}
    named = [f if f.strict else f.model_copy(update=anything) for f in named]
    ids = {mark: f"<[{token_id}]>" for token_id, mark in special.items()}
    rules = [*_strict_rules(named, form, ids), r"rest: /(.|\n)*/", r"space: /[ \n]{0,2}/"]
    return Grammar(kind="lark", value="\n".join(rules), param="tools", has_token_ids=bool(ids))


def _strict_rules(
    functions: list[FunctionSpec], form: CallForm, ids: Mapping[str, str]
) -> list[str]:
    call = f"call: %json {json.dumps(_call(functions, key=form.key))}"
    if form.may_be_bare:
        tag = f"({ids[form.open]})?" if form.open in ids else ""
        calls = f'{tag} space call (";" space call)*'
        return [f"start: free | {calls}", r"free: (/[^ \n\t{](.|\n)*/)?", call]
    text = rf"text[lazy]: /(.|\n)*{_escaped(form.open)}/"
    if form.open in ids:
        text = rf"text: /(.|\n)*/ {ids[form.open]}"
    if form.close:
        close = ids.get(form.close) or f"/{_escaped(form.close)}/"
        return [f"start: (text space call space {close})* rest", text, call]
    if "[ARGS]" not in ids:
        return ['start: rest | text space "[" call ("," space call)* "]"', text, call]
    begin = ids["[ARGS]"]
    calls = " | ".join(f'"{f.name}" {begin} %json {json.dumps(_parameters(f))}' for f in functions)
    return [f"start: rest | text call ({ids[form.open]} call)*", text, f"call: {calls}"]


def _lark_string(text: str) -> str:
    """Strings of Lark are those of JSON, but for the one control character that JSON lets stand."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _escaped(mark: str) -> str:
    return re.sub(r"([/\[\]|])", r"\\\1", mark)


def _call(functions: list[FunctionSpec], *, key: str = "arguments") -> dict[str, Any]:
    """The schema of a call of one of the functions."""
    calls = []
    for index, function in enumerate(functions):
        place = "#" if len(functions) == 1 else f"#/anyOf/{index}"
        parameters = _moved(_parameters(function), f"{place}/properties/{key}")
        properties = {"name": {"const": function.name}, key: parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _parameters(function: FunctionSpec) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


def _moved(schema: Any, place: str) -> Any:
    """A schema with its references to itself as they are where it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    # Below an identifier of its own a schema's references begin there, wherever it stands.
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and re.match("#(/|$)", value):
            found[key] = place + value[1:]
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            found[key] = {name: _moved(part, place) for name, part in value.items()}
        else:
            found[key] = value if key in _VALUES else _moved(value, place)
    return found


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
