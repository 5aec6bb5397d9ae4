"""Tokens that a JSON schema, a regular expression or a grammar allows next, through llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt


class GrammarError(ValueError):
    """A grammar that is none, or that cannot be followed within the limits."""


class GrammarMask:
    """One answer's way through a grammar; see `core.LogitsMask`."""

    def __init__(self, matcher: Any, *, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)

    def next_mask(self, token_id: int | None) -> npt.NDArray[np.uint32]:
        """Words of 32 tokens each, after one more token; GrammarError past the limits."""
        matcher = self._matcher
        if token_id is not None:
            matcher.consume_token(token_id)
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().split("\n")[0])
        # Its masks have room for one token more.
        return words[: self._num_words]


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """A matcher of the texts of a grammar, as `Grammar.text` has it; GrammarError for none."""
    [(kind, value)] = json.loads(grammar).items()
    try:
        if kind == "json_schema":
            made = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value))
        elif kind == "regex":
            made = llguidance.LLMatcher.grammar_from_regex(value)
        else:
            assert kind == "lark", kind
            made = llguidance.LLMatcher.grammar_from_lark(value)
    except ValueError as error:
        raise GrammarError(str(error).split("\n")[0]) from error
    # A tenth to a half of llguidance's own, as the engine's steps wait for a mask.
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
    )
    matcher = llguidance.LLMatcher(tokenizer, made, limits=limits, log_level=0)
    if matcher.is_error():
        raise GrammarError(matcher.get_error().split("\n")[0][:300])
    return matcher


class _Vocabulary:
    """What llguidance asks of a tokenizer; `encode` spells the text that a schema forces."""

    def __init__(
        self,
        tokens: list[bytes],
        encode: Callable[[str], list[int]],
        *,
        end_ids: Sequence[int],
        special_ids: Sequence[int],
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(special_ids)
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text; TypeError for bytes, which llguidance tries first."""
        if not isinstance(text, str):
            raise TypeError(type(text))
        return self._encode(text)


def make_tokenizer(
    tokens: list[bytes],
    encode: Callable[[str], list[int]],
    *,
    end_ids: Sequence[int],
    special_ids: Sequence[int],
    vocab_size: int,
) -> Any:
    """A vocabulary for matchers; takes a second or more for a large one."""
    vocabulary = _Vocabulary(tokens, encode, end_ids=end_ids, special_ids=special_ids)
    slices = llguidance.LLTokenizer.json_slices()
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary),
        n_vocab=vocab_size,
        eos_token=list(end_ids),
        slices=slices,
    )


def byte_tokenizer() -> Any:
    """The smallest vocabulary: the bytes, and an end."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    return make_tokenizer(
        tokens,
        lambda text: list(text.encode()),
        end_ids=[256],
        special_ids=[256],
        vocab_size=len(tokens),
    )
