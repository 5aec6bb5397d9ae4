"""Prompts and sampling parameters as callers write them, checked and made uniform."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from subten.core import RequestError, SamplingParams, refuse

Prompt = str | Sequence[int]


def as_prompts(prompts: str | Sequence[int] | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or many; a sequence of integers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise refuse(RequestError, "prompts", type(prompts).__name__, _ALLOWED)
    if len(prompts) == 0:
        raise RequestError("prompts: got none; allowed: at least one")
    if all(_is_token_id(item) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_sampling_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams for each prompt; None means the defaults."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise refuse(
            RequestError,
            "sampling_params",
            type(params).__name__,
            "SamplingParams, or a list of one for each prompt",
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params: got {len(params)} for {num_prompts} prompts; allowed: one for all, "
            "or one for each"
        )
    return list(params)


def as_token_ids(prompt: Any, *, name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids as plain integers, each in the vocabulary; an empty prompt is refused."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        raise refuse(RequestError, name, type(prompt).__name__, _ALLOWED)
    if len(prompt) == 0:
        raise RequestError(f"{name}: got an empty prompt; allowed: at least one token")
    for position, token_id in enumerate(prompt):
        if not _is_token_id(token_id) or not 0 <= token_id < vocab_size:
            raise refuse(
                RequestError,
                f"{name}[{position}]",
                token_id,
                f"a token id from 0 to {vocab_size - 1}",
            )
    return tuple(operator.index(token_id) for token_id in prompt)


def check_params(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuse ids that no token can have: they would reach what belongs to other requests."""
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise refuse(RequestError, name, token_id, f"token ids from 0 to {vocab_size - 1}")


_ALLOWED = "a text, a list of token ids, or a list of these"


def _is_token_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
