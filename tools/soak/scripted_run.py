"""A model in plain Python whose every token is known, and a clock and faults that a seed decides.

The model keeps tokens in pages where others keep keys and values, and reads each sequence back
through its page ids. So a page that is wrong, shared too early or recycled too soon stops the run.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Mapping

from subten.cache.allocator import PageAllocator
from subten.core import PAGE_SIZE, Batch, FinishReason, Request
from subten.engine.scheduler import BAD_LOGITS

POISON = -7
"""In place of a token in a page that nobody owns."""

FIRST_LETTER, NUM_LETTERS = 97, 26


class InjectedFaultError(Exception):
    """A fault that a test made."""


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


class Faults:
    """Raises at fault points: at each with its own chance, or at the k-th call of one."""

    def __init__(
        self,
        rng: random.Random,
        rates: Mapping[str, float] | None = None,
        *,
        fail_at: tuple[str, int] | None = None,
    ) -> None:
        self.is_on = True
        self.num_calls: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()
        self._rng = rng
        self._rates = rates or {}
        self._fail_at = fail_at

    def __call__(self, point: str) -> None:
        """Raise InjectedFaultError, or not."""
        if self.happens(point):
            raise InjectedFaultError(point)

    def happens(self, point: str) -> bool:
        """Whether this call of `point` fails."""
        if not self.is_on:
            return False
        self.num_calls[point] += 1
        fails = self._fail_at == (point, self.num_calls[point])
        rate = self._rates.get(point, 0.0)
        if rate:
            fails = self._rng.random() < rate or fails
        self.num_failed[point] += fails
        return fails


def next_token(history: list[int]) -> int:
    """A letter that depends on every token before it, each below 256."""
    return FIRST_LETTER + zlib.crc32(bytes(history)) % NUM_LETTERS


def expected(request: Request, max_seq_len: int) -> tuple[list[int], FinishReason]:
    """What the model says to a request that nothing disturbs, and why it ends."""
    params = request.sampling
    history = list(request.prompt_token_ids)
    output: list[int] = []
    text = ""
    while True:
        output.append(next_token(history + output))
        text += chr(output[-1]) if len(output) > params.min_tokens else ""
        if output[-1] in request.end_token_ids or any(stop in text for stop in params.stop):
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(history) + len(output) >= max_seq_len:
            return output, FinishReason.LENGTH


class Letters:
    """The detokeniser: a token is the letter of its number."""

    def push(self, token_id: int) -> str:
        """Its letter."""
        return chr(token_id)

    def flush(self) -> str:
        """Nothing is ever held back."""
        return ""


class ScriptedRunner:
    """Runs batches; fault points `step`, `copy.in`, `copy.out` and `logits`."""

    def __init__(self, allocator: PageAllocator, faults: Faults) -> None:
        self._allocator = allocator
        self._faults = faults
        self._pages = [[POISON] * PAGE_SIZE for _ in range(allocator.num_pages)]

    def run(self, batch: Batch) -> list[int | None]:
        """One token, None or BAD_LOGITS for each item."""
        self._faults("copy.in")
        tokens: list[int | None] = []
        for item in batch.items:
            sequence, end = item.sequence, item.start + item.num_tokens
            for position in range(item.start, end):
                page = self._pages[sequence.page_ids[position // PAGE_SIZE]]
                page[position % PAGE_SIZE] = sequence.token_ids[position]
            self._faults("step")
            history: list[int] = []
            for page_id in sequence.page_ids:
                history += self._pages[page_id]
            assert history[:end] == sequence.token_ids[:end], (sequence.page_ids, end)
            if self._faults.happens("logits"):
                tokens.append(BAD_LOGITS)
            else:
                tokens.append(next_token(history[:end]) if item.needs_token else None)
        self._faults("copy.out")
        return tokens

    def forget(self, request_id: str) -> None:
        """Nothing is kept here."""

    def poison(self) -> None:
        """Overwrite what lies in pages that nobody holds and nobody can find."""
        for page_id in self._allocator.free_page_ids():
            if self._pages[page_id][0] != POISON:
                self._pages[page_id] = [POISON] * PAGE_SIZE
