"""Calls of functions in an answer's text, in the Hermes form that many models write.

    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>

Text that does not parse as a call stays text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARS = 2**18
"""A longer call is taken for text."""


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


class ToolCallReader:
    """Finds calls in a text that comes in pieces; each character is looked at a few times.

    With `is_bare` the whole text is one call without marks.
    """

    def __init__(self, *, is_bare: bool = False) -> None:
        self._held: list[str] = []
        self._num_held = 0
        self._tail = ""
        self._is_bare = self._is_inside = is_bare

    def push(self, piece: str) -> Found:
        """What a piece adds."""
        found = Found()
        if self._is_bare:
            self._keep(piece, found)
            return found
        text, self._tail = self._tail + piece, ""
        while text:
            mark = CLOSE if self._is_inside else OPEN
            start = text.find(mark)
            if start < 0:
                num_kept = _overlap(text, mark)
                self._keep(text[: len(text) - num_kept], found)
                self._tail = text[len(text) - num_kept :]
                break
            self._keep(text[:start], found)
            text = text[start + len(mark) :]
            if self._is_inside:
                self._close(found)
            self._is_inside = not self._is_inside
        if self._is_inside and self._num_held > MAX_CALL_CHARS:
            self._give_up(found)
        return found

    def flush(self) -> Found:
        """What is left at the end of the text; an unclosed call that parses counts as one."""
        found = Found()
        tail, self._tail = self._tail, ""
        self._keep(tail, found)
        if self._is_inside:
            self._close(found, mark="")
            self._is_inside = False
        return found

    def _keep(self, text: str, found: Found) -> None:
        if self._is_inside:
            self._held.append(text)
            self._num_held += len(text)
        else:
            found.text += text

    def _close(self, found: Found, mark: str = CLOSE) -> None:
        text = self._take_held()
        call = parse_call(text)
        if call is None:
            found.text += text if self._is_bare else OPEN + text + mark
        else:
            found.calls.append(call)

    def _give_up(self, found: Found) -> None:
        found.text += OPEN + self._take_held()
        self._is_inside = False

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held, self._num_held = [], 0
        return text


def parse_call(text: str) -> FoundCall | None:
    """A call from its JSON object, or None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return FoundCall(name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` and is not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
