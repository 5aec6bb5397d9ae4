"""What a request is, from prompt to last token, and the errors that a user can meet; no torch."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

PAGE_SIZE = 64
"""Tokens in one KV page."""


class UserError(ValueError):
    """A mistake that the caller can correct; its message is one line and says how."""


class ConfigError(UserError):
    """A setting, or a combination of settings, that cannot work."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or not what its config says."""


class RequestError(UserError):
    """A request that can never be served as asked."""


def refuse(kind: type[UserError], field_name: str, value: Any, allowed: str) -> UserError:
    """The error for a bad value: names the field, what came and what is allowed."""
    return kind(f"{field_name}: got {value!r}; allowed: {allowed}")


def _check_number(
    field_name: str, value: Any, low: float, high: float, allowed: str, *, open_low: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise refuse(RequestError, field_name, value, allowed)
    if value < low or value > high or (open_low and value == low):
        raise refuse(RequestError, field_name, value, allowed)


def _check_integer(field_name: str, value: Any, low: int, high: int, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise refuse(RequestError, field_name, value, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; the names and meanings are vLLM's.

    `temperature` 0 takes the most likely token. `top_k` 0 or -1 and `min_p` 0 are off. `top_p` 0
    keeps the most likely token alone. The penalties follow the order penalties, temperature,
    min-p, top-k, top-p. `seed` None draws a seed from the engine's own generator; with a seed the
    tokens depend on (seed, token index) and the logits alone.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "an integer of at least 1")
        _check_number("temperature", self.temperature, 0.0, 1e6, "a number from 0 to 1e6")
        _check_integer("top_k", self.top_k, -1, 2**31 - 1, "0 or -1 (off) or a positive integer")
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number from 0 to 1")
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _check_number(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            1e6,
            "a number above 0, at most 1e6",
            open_low=True,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0, "a number from -2 to 2")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**63 - 1, "an integer from 0 to 2**63 - 1")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise refuse(RequestError, "stop", self.stop, "a tuple of non-empty strings")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, 2**31 - 1, "token ids of at least 0")

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class FinishReason(StrEnum):
    """Why a request ended; every accepted request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a caller asked for: prompt token ids (at least one) and how to continue them."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    arrival_s: float = field(default_factory=time.perf_counter)


class SequenceStatus(Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(kw_only=True, slots=True)
class Sequence:
    """One request on its way through the engine.

    Lengths form a ladder: `num_cached <= num_computed <= len(token_ids)`. `num_cached` tokens came
    with shared prefix pages, `num_computed` tokens have their keys and values in pages.
    """

    request: Request
    token_ids: list[int]
    num_prompt: int
    num_cached: int = 0
    num_computed: int = 0
    page_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    finish_detail: str = ""
    num_preemptions: int = 0

    @classmethod
    def from_request(cls, request: Request) -> Sequence:
        """A waiting sequence that holds the prompt alone."""
        tokens = list(request.prompt_token_ids)
        return cls(request=request, token_ids=tokens, num_prompt=len(tokens))

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not in pages yet."""
        return len(self.token_ids) - self.num_computed

    def check_ladder(self) -> None:
        """Assert the length ladder and that the pages hold exactly what is computed."""
        assert 0 <= self.num_cached <= self.num_computed <= len(self.token_ids), (
            self.num_cached,
            self.num_computed,
            len(self.token_ids),
        )
        assert self.num_computed <= len(self.page_ids) * PAGE_SIZE, (
            self.num_computed,
            len(self.page_ids),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchItem:
    """The part of one sequence that a step computes: tokens [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def needs_token(self) -> bool:
        """Whether the step reaches the end of the sequence, so that it yields the next token."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step computes; plain integers, no tensors."""

    items: tuple[BatchItem, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens over all items."""
        return sum(item.num_tokens for item in self.items)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One generated token, or the end of a request; `token_id` is None for an end without one."""

    request_id: str
    token_id: int | None
    index: int
    finish_reason: FinishReason | None = None
    finish_detail: str = ""
    time_s: float = 0.0
