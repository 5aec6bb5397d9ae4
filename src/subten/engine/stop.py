"""When a sequence ends, and the text that may be shown before that is known.

A stop string can begin in one token and end in another. Text that could still become a stop string
is held back, and only that: the longest end of the text so far that begins some stop string.
"""

from __future__ import annotations

from typing import Protocol

from subten.core import FinishReason, Request


class Detokenizer(Protocol):
    """Text of one sequence as its tokens arrive; `tokenizer.TextStream` is one."""

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        ...

    def flush(self) -> str:
        """Text still held back at the end of the sequence."""
        ...


class NoText:
    """The detokeniser of a model without a tokenizer."""

    def push(self, token_id: int) -> str:  # noqa: ARG002
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class StopMatcher:
    """Cuts a text at the first stop string, however the text is split into pieces.

    First means: ends first; of those that end together, begins first. So the result is that of
    reading character by character and does not depend on where pieces begin.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), stops
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def push(self, piece: str) -> str:
        """Text that can be shown now, given one more piece."""
        assert not self.is_stopped
        text = self._held + piece
        found = [(start + len(s), start) for s in self._stops if (start := text.find(s)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held text, once nothing can follow it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextOutput:
    """The text of one request: whole characters only, cut at its stop strings.

    The engine pushes tokens, the reader takes what became visible; pieces join to `text`. The text
    of the first `min_tokens` tokens is no part of any stop string.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...] = (), *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._num_unmatched = min_tokens
        self._matcher = StopMatcher(stops)
        self._pieces: list[str] = []
        self._num_taken = 0

    @property
    def text(self) -> str:
        """All visible text."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> bool:
        """Add a token; True if its text completes a stop string."""
        piece = self._detokenizer.push(token_id)
        if self._num_unmatched > 0:
            self._num_unmatched -= 1
        else:
            piece = self._matcher.push(piece)
        self._pieces.append(piece)
        return self._matcher.is_stopped

    def finish(self) -> bool:
        """Show what was held back for text that will not come; True if that completes a stop."""
        if not self._matcher.is_stopped:
            self._pieces.append(self._matcher.push(self._detokenizer.flush()))
        if not self._matcher.is_stopped:
            self._pieces.append(self._matcher.flush())
        return self._matcher.is_stopped

    def take(self) -> str:
        """Text that became visible since the last call."""
        new = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return new


def find_end(
    request: Request, token_id: int, *, num_output: int, num_tokens: int, max_seq_len: int
) -> FinishReason | None:
    """Why the sequence ends with this token, leaving stop strings aside; None if it goes on.

    `num_output` and `num_tokens` count the token itself; a sequence of `max_seq_len` tokens is
    full and ends with LENGTH whatever `max_tokens` says.
    """
    if is_stop_token(request, token_id):
        return FinishReason.STOP
    if num_output >= request.sampling.max_tokens or num_tokens >= max_seq_len:
        return FinishReason.LENGTH
    return None


def is_stop_token(request: Request, token_id: int) -> bool:
    """Whether a token ends the request by itself; its own text is not shown."""
    return token_id in request.end_token_ids
