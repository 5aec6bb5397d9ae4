"""What a caller gets back: a whole completion, or one chunk for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from subten.core import FinishReason, TokenLogprobs
from subten.engine.stats import Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts of a request, from ids; `cached_tokens` of the prompt came from shared pages."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished request.

    `token_ids` has every token that was generated; `text` leaves out the token or the stop string
    that ended it. `kv_bytes` are the bytes of the pages that the request held at its end, pages
    shared with others included; `kv_true_bits` is those bits over the elements cached in them, so
    that a last page with few tokens raises it; None where nothing was cached. In full pages it
    would be `kv_full_page_bits` (of an adaptive cache: what a page outside of the windows takes, or
    may take in the mean). `kv_pages` counts the pages by kind: the format, or the rung.

    `logprobs` has an entry for each of `token_ids`, `prompt_logprobs` one for each prompt token but
    the first; None where the request did not ask.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    finish_detail: str
    usage: Usage
    timings: Timings
    kv_cache_dtype: str
    kv_true_bits: float | None
    kv_full_page_bits: float
    kv_bytes: int
    kv_pages: Mapping[str, int] = field(default_factory=dict)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Request accepted to first token; None without a token."""
        return self.timings.ttft_ms

    @property
    def tpot_ms(self) -> float | None:
        """Mean gap between tokens; None below two tokens."""
        return self.timings.tpot_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What one token added: `text` may be empty while a character or a stop string is open.

    The last chunk has a finish reason and the whole completion; its token is None where the
    request ended without one.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    logprobs: TokenLogprobs | None = None
