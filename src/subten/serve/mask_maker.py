"""Grammars of requests, made ready beside the engine's steps."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from subten.core import panics_as_errors
from subten.engine.llm import LLM
from subten.serve import ipc
from subten.serve.logprobs import TokenTexts

logger = logging.getLogger(__name__)


class MaskMaker:
    """Makes masks in a thread of its own, and calls `wake` for each.

    The vocabulary is read at the first grammar. Everything but the thread's work happens on the
    engine's thread.
    """

    def __init__(self, llm: LLM, wake: Callable[[], None]) -> None:
        self._llm = llm
        self._wake = wake
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._waiting: set[str] = set()
        self._made: deque[tuple[ipc.Submit, Any]] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests whose grammars are not ready."""
        return len(self._waiting)

    def submit(self, message: ipc.Submit) -> None:
        """Begin with a request's grammar."""
        self._waiting.add(message.request_id)
        self._pool.submit(self._make, message)

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False if it is not waiting for its grammar."""
        if request_id not in self._waiting:
            return False
        self._waiting.discard(request_id)
        return True

    def take(self) -> list[tuple[ipc.Submit, Any]]:
        """Requests with their masks, or with a text that says why there is none."""
        found = []
        while self._made:
            message, mask = self._made.popleft()
            if self.cancel(message.request_id):
                found.append((message, mask))
        return found

    def _make(self, message: ipc.Submit) -> None:
        try:
            if message.request_id not in self._waiting:
                return
            with panics_as_errors():
                mask = self._mask(message.grammar)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
            logger.warning("a grammar failed: %s", type(error).__name__)
            mask = str(error)
        self._made.append((message, mask))
        self._wake()

    def _mask(self, grammar: str) -> Any:
        from subten.serve.masks import GrammarMask, new_matcher

        matcher = new_matcher(self._tokenizer, grammar)
        return GrammarMask(matcher, vocab_size=self._llm.model_config.vocab_size)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from subten.serve.masks import make_tokenizer

        tokenizer = self._llm.tokenizer
        assert tokenizer is not None
        texts = TokenTexts(tokenizer)
        vocab_size = self._llm.model_config.vocab_size
        num_tokens = min(vocab_size, tokenizer.vocab_size)
        return make_tokenizer(
            [texts.bytes_of(token_id) for token_id in range(num_tokens)],
            tokenizer.encode_part,
            end_ids=self._llm.model_config.eos_token_ids,
            special_ids=sorted(tokenizer.special_ids),
            vocab_size=vocab_size,
        )
