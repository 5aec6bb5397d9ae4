"""What a request is, from prompt to last token, and the errors that a user can meet; no torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol

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


class OverloadError(UserError):
    """A request that cannot be taken now and may be sent again later."""


Fault = Callable[[str], None]
"""Called with the name of a point at which something could fail; a test's may raise there."""


def no_fault(point: str) -> None:
    """The points of production, where nothing is made to fail."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """A panic of a Rust extension, which pyo3 makes no Exception, becomes a RuntimeError.

    Each extension has a type of its own for it, under this name.
    """
    try:
        yield
    except BaseException as error:
        kind = type(error)
        if (kind.__module__, kind.__name__) != ("pyo3_runtime", "PanicException"):
            raise
        raise RuntimeError(f"panic: {error}") from error


def refuse(kind: type[UserError], field_name: str, value: Any, allowed: str) -> UserError:
    """The error for a bad value: names the field, what came and what is allowed."""
    return kind(f"{field_name}: got {_shown(value)}; allowed: {allowed}")


def reason(error: Exception) -> str:
    """Why a file could not be used, as the system puts it and without Python's own words."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of many thousand digits.
        text = f"{type(value).__name__} of {value.bit_length()} bits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_number(field_name: str, value: Any, low: float, high: float, allowed: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The comparison is false for NaN, and exact for integers that no float can hold.
    if not is_number or not low <= value <= high:
        raise refuse(RequestError, field_name, value, allowed)


def _check_integer(field_name: str, value: Any, low: int, high: int, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise refuse(RequestError, field_name, value, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; the names and meanings are vLLM's.

    `temperature` 0 takes the most likely token. `top_k` 0 or -1 and `min_p` 0 are off. `top_p` 0
    keeps the most likely token alone. The order is bias, penalties, what is allowed, temperature,
    min-p, top-k, top-p. `seed` None draws a seed from the engine's own generator; with a seed the
    tokens depend on (seed, token index) and the logits alone.

    `logit_bias` is added to the logits of token ids. `allowed_token_ids`, if given, are the only
    ones. Before `min_tokens` tokens no end token and no stop token id is allowed and stop strings
    are not looked for; where a mask allows nothing but the model's end, the answer ends all the
    same. `logprobs` n tells of each token its log-probability and the n likeliest;
    `prompt_logprobs` does so of each prompt token but the first. Both come from the model's own
    logits, before everything that this class does to them.
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
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "an integer of at least 1")
        _check_number("temperature", self.temperature, 0.0, 1e6, "a number from 0 to 1e6")
        _check_integer("top_k", self.top_k, -1, 2**31 - 1, "0 or -1 (off) or a positive integer")
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number from 0 to 1")
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        # Logits are divided by it, and the quotients must stay finite.
        repetition = self.repetition_penalty
        _check_number("repetition_penalty", repetition, 1e-30, 1e6, "a number from 1e-30 to 1e6")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0, "a number from -2 to 2")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**63 - 1, "an integer from 0 to 2**63 - 1")
        if isinstance(self.stop, str):
            raise refuse(RequestError, "stop", self.stop, "a tuple of texts")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise refuse(RequestError, "stop", text, "text that is not empty")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, 2**31 - 1, "token ids of at least 0")
        allowed = f"an integer from 0 to max_tokens ({self.max_tokens})"
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens, allowed)
        self._check_bias()
        self._check_allowed()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_integer(
                    name, value, 0, MAX_LOGPROBS, f"None or an integer from 0 to {MAX_LOGPROBS}"
                )

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping) or len(bias) > MAX_BIASES:
            got = f"{len(bias)} entries" if isinstance(bias, Mapping) else type(bias).__name__
            allowed = f"a mapping of at most {MAX_BIASES} token ids to numbers"
            raise RequestError(f"logit_bias: got {got}; allowed: {allowed}")
        for token_id, value in bias.items():
            _check_integer("logit_bias", token_id, 0, 2**31 - 1, "token ids of at least 0")
            _check_number(f"logit_bias[{token_id}]", value, -100, 100, "a number from -100 to 100")
        # A copy: nobody changes a request that is under way.
        object.__setattr__(self, "logit_bias", dict(bias))

    def _check_allowed(self) -> None:
        allowed = "None or a tuple of at least one token id, each of at least 0"
        token_ids = self.allowed_token_ids
        if token_ids is None:
            return
        if not isinstance(token_ids, tuple) or not token_ids:
            raise refuse(RequestError, "allowed_token_ids", token_ids, allowed)
        for token_id in token_ids:
            _check_integer("allowed_token_ids", token_id, 0, 2**31 - 1, allowed)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


MAX_LOGPROBS = 20
"""Most alternatives told of one token."""

MAX_BIASES = 1024
"""Most entries of `logit_bias`."""


class LogitsMask(Protocol):
    """Which tokens a grammar allows next; one object serves one request.

    Called on the engine's thread between two tokens: it must be quick. What it raises ends its
    own request with an error; RequestError says that the request is to blame.
    """

    def next_mask(self, token_id: int | None) -> Any:
        """Words of 32 bits, one bit for each token of the vocabulary, lowest bit first.

        `token_id` is the token that was chosen under the mask before, None at the first call. A
        set bit allows a token. The result is anything that `numpy.asarray` makes uint32 or int32
        [ceil(V / 32)] of, and may be overwritten by the next call. Once the grammar is complete
        the end token must be allowed; with no token allowed the request ends with an error.
        """
        ...


class FinishReason(StrEnum):
    """Why a request ended; every accepted request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class ErrorCause(StrEnum):
    """What a request failed at: the engine, or its own mask, which cannot be followed."""

    ENGINE = "engine"
    MASK = "mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a caller asked for: prompt token ids (at least one) and how to continue them.

    Pages are shared with requests of the same `tenant` alone. `mask`, if given, says which tokens
    are allowed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    arrival_s: float = field(default_factory=time.perf_counter)
    tenant: str = ""
    mask: LogitsMask | None = None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end it by themselves: its stop ids, and unless ignored the model's."""
        params = self.sampling
        return params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)

    def needs_logits(self, index: int) -> bool:
        """Whether output token `index` takes more of its logits than a sampled token."""
        return self.sampling.logprobs is not None or self.changes_logits(index)

    def changes_logits(self, index: int) -> bool:
        """Whether bias, penalties or a mask change the logits of output token `index`."""
        params = self.sampling
        return params.has_penalties or params.logit_bias is not None or self.has_mask(index)

    def has_mask(self, index: int) -> bool:
        """Whether some tokens are not allowed as output token `index`."""
        return (
            self.mask is not None
            or self.sampling.allowed_token_ids is not None
            or index < self.sampling.min_tokens
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one place, of the model's own distribution.

    `rank` is 1 where no token is likelier. `top` has the likeliest tokens and their
    log-probabilities, at most as many as asked for, in falling order and the lowest id first among
    equals; impossible tokens are left out, so it can be shorter. A prompt may hold a token that the
    model calls impossible: `logprob` is -inf then, and never NaN.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


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
    `page_keys` are what full pages of its tokens are known by, as far as anybody has asked.

    The runner appends to `logprobs` and `prompt_logprobs` what the request asked for, one entry a
    token (of the prompt: from its second on), and says in `failure` and its cause why a token could
    not be chosen.
    """

    request: Request
    token_ids: list[int]
    num_prompt: int
    num_cached: int = 0
    num_computed: int = 0
    page_ids: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    finish_detail: str = ""
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    failure: str = ""
    failure_cause: ErrorCause = ErrorCause.ENGINE

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
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not there yet."""
        is_asked = self.request.sampling.prompt_logprobs is not None
        return is_asked and len(self.prompt_logprobs) < self.num_prompt - 1

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


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step computes; plain integers, no tensors.

    `meanwhile` is work of the scheduler for the time in which the device computes the batch: who
    runs it may call that, once or several times, before the step is committed.
    """

    items: tuple[BatchItem, ...]
    meanwhile: Callable[[], None] = field(default=_nothing, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens over all items."""
        return sum(item.num_tokens for item in self.items)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One generated token, or the end of a request; `token_id` is None for an end without one.

    `logprobs` are there where the request asked for them, `prompt_logprobs` with the first token,
    `error_cause` with FinishReason.ERROR.
    """

    request_id: str
    token_id: int | None
    index: int
    finish_reason: FinishReason | None = None
    finish_detail: str = ""
    error_cause: ErrorCause | None = None
    time_s: float = 0.0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
