"""Log-probabilities as OpenAI's API shows them: each token with its true bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from subten.core import TokenLogprobs
from subten.tokenizer import Tokenizer

_LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have; OpenAI's own value."""


class TokenTexts:
    """Bytes and text of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend
        # As pickling has it: all of a tokenizer as JSON takes long for a large vocabulary.
        decoder = tokenizer.backend.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        added = tokenizer.backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to a text; a piece of a character, perhaps."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelling = self._backend.id_to_token(token_id)
        if spelling is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_char()
            return b"".join(
                bytes([table[char]]) if char in table else char.encode() for char in spelling
            )
        byte = self.tokenizer.byte_of(token_id)
        if byte is not None:
            return bytes([byte])
        return str(spelling).replace("\u2581", " ").encode()

    def text_of(self, token_id: int) -> str:
        """The text of a token, or `bytes:` and its bytes in hexadecimal if it is no text."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text_of(token_id),
            "logprob": _number(logprob),
            "bytes": list(texts.bytes_of(token_id)),
        }

    content = [
        entry(found.token_id, found.logprob)
        | {"top_logprobs": [entry(token_id, logprob) for token_id, logprob in found.top]}
        for found in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Makes the `logprobs` of one answer to a completion, piece by piece.

    `text_offset` is where in the text a token begins, in characters. It is counted from the tokens:
    the text of a piece may lag behind them, and may end where a token is within a character. What
    the text leaves out, a special token or a space at its start, takes no character of it.
    """

    def __init__(
        self, texts: TokenTexts, *, context: Sequence[int] = (), num_chars: int = 0
    ) -> None:
        self._texts = texts
        self._stream = texts.tokenizer.stream(context=context)
        self._num_chars = num_chars

    def of(self, entries: Sequence[TokenLogprobs | int]) -> dict[str, Any]:
        """`logprobs` of the next tokens; a plain id is one without a number, a prompt's first."""
        texts = self._texts
        tokens: list[str] = []
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for found in entries:
            token_id = found if isinstance(found, int) else found.token_id
            offsets.append(self._num_chars)
            self._num_chars += len(self._stream.push(token_id))
            tokens.append(texts.text_of(token_id))
            if isinstance(found, int):
                chosen.append(None)
                tops.append(None)
            else:
                chosen.append(_number(found.logprob))
                top = {texts.text_of(i): _number(logprob) for i, logprob in found.top}
                tops.append({texts.text_of(token_id): _number(found.logprob)} | top)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
