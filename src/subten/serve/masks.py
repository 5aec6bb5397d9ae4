"""Tokens that a JSON schema, a regular expression or a grammar allows next, through llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from subten.core import RequestError

_BEFORE = "\x02"
"""Encoded before a text, as some vocabularies add a space at a start; no merge has it."""


class GrammarError(RequestError):
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
            error = matcher.get_error().split("\n")[0]
            # What it says where the vocabulary cannot spell the text.
            is_stuck = error.startswith("NoExtension")
            raise GrammarError("no token of this model goes on" if is_stuck else error)
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
    """What llguidance asks of a tokenizer.

    `encode` spells the text that a grammar forces, as the model itself would go on with it. Where
    that spells another text (a normalizer's, a special token), the longest tokens do.
    """

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
        self._num_before = len(encode(_BEFORE))

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text; TypeError for bytes, which llguidance tries first."""
        if not isinstance(text, str):
            raise TypeError(type(text))
        data = text.encode()
        token_ids = self._encode(_BEFORE + text)[self._num_before :]
        is_plain = not any(token_id in self._special for token_id in token_ids)
        if is_plain and b"".join(map(self._bytes_of, token_ids)) == data:
            return token_ids
        return self._longest(data)

    def _bytes_of(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def _longest(self, data: bytes) -> list[int]:
        """The longest token that begins the text, then the next one; bytes of no token are left."""
        token_ids, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + self._max_bytes), place, -1)
            end = next((end for end in ends if data[place:end] in self._id_of), None)
            if end is None:
                break
            token_ids.append(self._id_of[data[place:end]])
            place = end
        return token_ids

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_token_ids)

    @functools.cached_property
    def _id_of(self) -> dict[bytes, int]:
        plain = (i for i in range(len(self.tokens)) if i not in self._special)
        return {self.tokens[token_id]: token_id for token_id in plain if self.tokens[token_id]}

    @functools.cached_property
    def _max_bytes(self) -> int:
        return max(map(len, self._id_of), default=0)


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
