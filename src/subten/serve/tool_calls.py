"""Calls of functions in an answer's text, in the forms that models write.

    hermes         <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>     a list as well
    mistral        [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]
                   [TOOL_CALLS]f[ARGS]{"x": 1}
    llama3_json    {"name": "f", "parameters": {"x": 1}}     <|python_tag|> before it, ; between

Hermes is what Qwen3 and SmolLM2 write. The names are those of vLLM's parsers. Text that does not
parse as a call stays text.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from subten.tokenizer import Tokenizer

MAX_CALL_CHARS = 2**18
"""A longer call is taken for text."""
HEAD_CHARS = 200
"""Within these the first key of a call without marks tells that it may be one."""
_ID_CHARS = string.ascii_letters + string.digits
_CALL_KEYS = frozenset({"name", "parameters", "arguments", "type"})
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_SPACE = re.compile(r"[\s;]*")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_decode = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode


@dataclass(frozen=True, slots=True)
class FoundCall:
    """One call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(slots=True)
class Found:
    """What a piece of text added: text outside of calls, and calls that it completed."""

    text: str = ""
    calls: list[FoundCall] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """How a model writes calls.

    `close` "" means that calls go on to the next `open`, or to the end. `may_be_bare` says that an
    answer that begins with a call needs no `open`. `key` has the arguments. `in_template` are the
    words of chat templates that tell the form.
    """

    open: str
    close: str
    parse: Callable[[str], list[FoundCall] | None]
    key: str = "arguments"
    may_be_bare: bool = False
    in_template: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    id_chars: int = 24

    def new_id(self) -> str:
        """An id for a call; Mistral's templates take those of nine letters and digits alone."""
        name = "".join(secrets.choice(_ID_CHARS) for _ in range(self.id_chars))
        return name if self.id_chars < 24 else f"call-{name}"

    def special_marks(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Those of its marks that are special tokens, which texts leave out otherwise."""
        added = tokenizer.backend.get_added_tokens_decoder().items()
        return {i: t.content for i, t in added if t.special and t.content in self.marks}


class ToolCallReader:
    """Finds calls in a text that comes in pieces; each character is looked at a few times.

    What is found does not depend on where pieces begin. Without a form the whole text is one call
    without marks, as a forced one is.
    """

    def __init__(self, form: CallForm | None) -> None:
        self._form = form
        self._held: list[str] = []
        self._num_held = 0
        self._head = ""
        self._is_no_call = False
        self._tail = ""
        self._opened = ""
        self._is_inside = form is None
        self._may_begin = form is not None and form.may_be_bare

    def push(self, piece: str) -> Found:
        """What a piece adds."""
        found = Found()
        if self._form is None:
            self._keep(piece, found)
            return found
        text, self._tail = self._tail + piece, ""
        if self._may_begin:
            if not text.strip():
                self._tail = text
                return found
            self._may_begin = False
            self._is_inside = text.lstrip()[0] == "{"
        while text:
            mark = self._form.close or self._form.open if self._is_inside else self._form.open
            start = text.find(mark)
            if start < 0:
                num_kept = _overlap(text, mark)
                self._keep(text[: len(text) - num_kept], found)
                self._tail = text[len(text) - num_kept :]
                break
            self._keep(text[:start], found)
            text = text[start + len(mark) :]
            is_between = self._is_inside and not self._form.close
            if self._is_inside:
                self._finish(found, mark=self._form.close)
            self._is_inside = is_between or not self._is_inside
            self._opened = self._form.open if self._is_inside else ""
        if self._is_inside and not self._is_no_call and not self._can_be_a_call():
            found.text += self._opened + self._take_held()
            self._opened, self._is_no_call = "", True
        return found

    def flush(self) -> Found:
        """What is left at the end of the text; an unclosed call that parses counts as one."""
        found = Found()
        tail, self._tail = self._tail, ""
        self._keep(tail, found)
        if self._is_inside:
            self._finish(found, mark="")
            self._is_inside = False
        return found

    def _keep(self, text: str, found: Found) -> None:
        if self._is_inside and not self._is_no_call:
            self._held.append(text)
            self._num_held += len(text)
            if len(self._head) < HEAD_CHARS:
                self._head = (self._head + text)[:HEAD_CHARS]
        else:
            found.text += text

    def _finish(self, found: Found, *, mark: str) -> None:
        can_be_a_call = self._can_be_a_call()
        text, self._is_no_call = self._take_held(), False
        parse = parse_objects if self._form is None else self._form.parse
        calls = parse(text) if can_be_a_call else None
        if calls is None:
            found.text += self._opened + text + mark
        else:
            found.calls += calls

    def _can_be_a_call(self) -> bool:
        if self._form is None:
            return True
        if self._is_no_call or self._num_held > MAX_CALL_CHARS:
            return False
        # An answer in JSON that is no call need not wait for its end.
        key = None if self._opened else _FIRST_KEY.match(self._head)
        return key is None or key[1] in _CALL_KEYS

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held, self._num_held, self._head = [], 0, ""
        return text


def parse_objects(text: str, *, needs_arguments: bool = False) -> list[FoundCall] | None:
    """Calls from one or more JSON objects, or a list of them; None where anything else is there."""
    values: list[object] = []
    place = 0
    try:
        while (place := _after_space(text, place)) < len(text):
            value, place = _decode(text, place)
            values += value if isinstance(value, list) else [value]
        calls = [_call(value, needs_arguments) for value in values]
    except (ValueError, RecursionError):
        return None
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def parse_mistral(text: str) -> list[FoundCall] | None:
    """Calls of one [TOOL_CALLS]: a list of objects, or a name and its arguments."""
    named = _NAMED.match(text)
    if named is None:
        return parse_objects(text)
    try:
        arguments, end = _decode(text, named.end())
        return None if text[end:].strip() else [FoundCall(named[1], _text(arguments))]
    except (ValueError, RecursionError):
        return None


FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm(
        open="<tool_call>",
        close="</tool_call>",
        parse=parse_objects,
        in_template=("<tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
    ),
    "mistral": CallForm(
        open="[TOOL_CALLS]",
        close="",
        parse=parse_mistral,
        in_template=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        id_chars=9,
    ),
    "llama3_json": CallForm(
        open="<|python_tag|>",
        close="",
        # Without marks, any object with a name would else be a call.
        parse=functools.partial(parse_objects, needs_arguments=True),
        key="parameters",
        may_be_bare=True,
        # The role of what a function has answered; templates of Llama 3.1 and later have it.
        in_template=("<|python_tag|>", "ipython"),
        marks=("<|python_tag|>",),
    ),
}


def form_of(name: str, chat_template: str | None) -> CallForm | None:
    """The form of that name; of "auto" the one that a chat template shows, else Hermes'."""
    if name == "none":
        return None
    if name != "auto":
        return FORMS[name]
    for form in FORMS.values():
        if any(word in (chat_template or "") for word in form.in_template):
            return form
    return FORMS["hermes"]


def _call(value: object, needs_arguments: bool) -> FoundCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    missing: Any = None if needs_arguments else {}
    arguments = value.get("arguments", value.get("parameters", missing))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    name.encode()
    return FoundCall(name, _text(arguments))


def _text(arguments: dict[str, object]) -> str:
    """JSON that can be sent: 1e999 is none, and half a surrogate pair stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    return text


def _after_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    assert space is not None
    return space.end()


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` and is not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
