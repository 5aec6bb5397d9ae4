"""Chat templates, rendered in helper processes that are killed when they take too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from subten.serve.errors import bad_field
from subten.serve.helper_pool import MAX_WAITING, HelperPool
from subten.serve.strict_json import MAX_BODY_BYTES
from subten.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

RENDER_S = 1.0
NUM_PROCESSES = 2
MAX_TEXT_CHARS = 2 * MAX_BODY_BYTES
MIN_TEXT_CHARS = 2**16
CHARS_A_TOKEN = 64
"""Of a prompt. What is shorter is judged by its tokens: prose has four to seven characters each, a
run of spaces up to a hundred. A text of megabytes takes the event loop milliseconds."""
_MODULE = "subten.serve.template_process"
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def max_text_chars(max_model_len: int) -> int:
    """Characters that a prompt may have where its context has `max_model_len` tokens."""
    return min(MAX_TEXT_CHARS, max(MIN_TEXT_CHARS, CHARS_A_TOKEN * max_model_len))


class ChatTemplates:
    """The prompt of a conversation, by the model's template; at most NUM_PROCESSES at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_chars: int = MAX_TEXT_CHARS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_chars = max_chars
        self._helpers = HelperPool(
            _MODULE, limit_s=RENDER_S, num=NUM_PROCESSES, max_waiting=max_waiting
        )
        self._special = special_tokens(tokenizer)
        self._kwargs: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Start the processes and read what the template takes."""
        template = self._tokenizer.chat_template
        if template is None:
            return
        # What a template says without messages, an error perhaps, is of no interest.
        request = {"template": template, "variables": {}, "max_chars": 2**20, "names": True}
        answer, *_ = await asyncio.gather(*(helper.ask(request) for helper in self._helpers.all))
        if answer is None:
            logger.warning("the chat template takes too long")
            return
        self._kwargs = frozenset(answer["names"]) - _OURS - self._special.keys()

    async def close(self) -> None:
        """End the processes."""
        await self._helpers.close()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; ApiError 400 where the template cannot or may not make it,
        429 where too many wait for theirs.

        `kwargs` may set what the template reads and the server does not set itself.
        """
        template = self._tokenizer.chat_template
        if template is None:
            raise bad_field(
                "messages",
                "this model has no chat template; give one with --chat-template, or send a plain "
                "prompt to /v1/completions",
            )
        self._check_kwargs(kwargs or {})
        variables = {
            **self._special,
            **(kwargs or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            variables["tools"] = list(tools)
        request = {"template": template, "variables": variables, "max_chars": self._max_chars}
        answer = await self._helpers.ask(request)
        if answer is None:
            raise bad_field(
                "messages",
                f"the chat template took more than {RENDER_S:.0f} s or too much memory",
            )
        if "error" in answer:
            raise bad_field("messages", f"the chat template failed: {answer['error']}")
        return str(answer["text"])

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name not in self._kwargs:
                allowed = ", ".join(sorted(self._kwargs)) or "none with this model"
                field = f"chat_template_kwargs.{name[:64]}"
                raise bad_field(field, f"not a variable of the chat template; allowed: {allowed}")


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Spellings of the special tokens that templates print."""
    found = {}
    for name in _SPECIAL:
        token = tokenizer.config.get(name)
        if token:
            found[name] = token if isinstance(token, str) else str(token["content"])
    return found
