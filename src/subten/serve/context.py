"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from subten.serve import ipc
from subten.serve.auth import HostList, KeyRing
from subten.serve.errors import ApiError, bad_field
from subten.serve.generation import Generator
from subten.serve.grammar import Grammar, GrammarChecker
from subten.serve.logprobs import TokenTexts
from subten.serve.metrics import Metrics
from subten.serve.streams import unless_gone
from subten.serve.templates import ChatTemplates
from subten.serve.tool_calls import CallForm
from subten.tokenizer import LONG_TEXT, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts of a server; `names` are those of its one model."""

    names: Sequence[str]
    info: ipc.EngineInfo
    tokenizer: Tokenizer | None
    templates: ChatTemplates | None
    generator: Generator
    metrics: Metrics
    grammars: GrammarChecker
    keys: KeyRing
    hosts: HostList
    call_form: CallForm | None
    created_s: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """Texts of single tokens; ApiError 400 where the model has no tokenizer."""
        return TokenTexts(self.need_tokenizer("logprobs"))

    def created_now(self) -> int:
        """The time for `created`, in seconds."""
        return int(time.time())

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that is not served; None means the one that is."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model: no such model; served: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer; ApiError 400 where the model has none."""
        if self.tokenizer is None:
            raise bad_field(param, "this model has no tokenizer; send token ids")
        return self.tokenizer

    def need_templates(self, param: str) -> ChatTemplates:
        """The chat templates; ApiError 400 where the model has no tokenizer."""
        if self.templates is None:
            raise bad_field(param, "this model has no tokenizer; send token ids")
        return self.templates

    async def grammar(self, request: Request, asked: Grammar | None) -> Grammar | None:
        """A grammar that was tried; ApiError 400 where it cannot be followed."""
        if asked is not None:
            self.need_tokenizer(asked.param)
            await unless_gone(request, self.grammars.check(asked))
        return asked

    async def encode(self, text: str, *, param: str, is_part: bool = False) -> list[int]:
        """Token ids of a text; `is_part` adds no BOS that is not in it.

        Long ones are made beside the event loop.
        """
        tokenizer = self.need_tokenizer(param)
        encode = tokenizer.encode_part if is_part else tokenizer.encode
        if len(text) <= LONG_TEXT:
            return encode(text)
        return await asyncio.to_thread(encode, text)

    async def decode(
        self, token_ids: Sequence[int], *, param: str, skip_special_tokens: bool = False
    ) -> str:
        """The text of token ids; that of many is made beside the event loop."""
        decode = functools.partial(
            self.need_tokenizer(param).decode, skip_special_tokens=skip_special_tokens
        )
        if len(token_ids) <= LONG_TEXT:
            return decode(token_ids)
        return await asyncio.to_thread(decode, token_ids)

    async def encode_chat(self, text: str, *, param: str) -> list[int]:
        """Token ids of a rendered conversation, with one BOS where the tokenizer adds one."""
        tokenizer = self.need_tokenizer(param)
        token_ids = await self.encode(text, param=param, is_part=True)
        if tokenizer.adds_bos and token_ids[:1] != [tokenizer.bos_token_id]:
            assert tokenizer.bos_token_id is not None
            return [tokenizer.bos_token_id, *token_ids]
        return token_ids

    def check_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """ApiError 400 for an id that is not in the vocabulary."""
        vocab_size = self.info.vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        index = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        raise bad_field(f"{param}.{index}", f"allowed: token ids from 0 to {vocab_size - 1}")

    def check_length(self, num_tokens: int, *, param: str) -> None:
        """ApiError 400 for a prompt that is empty or leaves no room for an answer."""
        longest = self.info.max_model_len - 1
        if 1 <= num_tokens <= longest:
            return
        raise ApiError(
            400,
            f"{param}: got {num_tokens} tokens; allowed: 1 to {longest} (prompt and answer share "
            f"{self.info.max_model_len} tokens)",
            param=param,
            code="context_length_exceeded" if num_tokens else "invalid_value",
        )


def new_id(prefix: str) -> str:
    """An id that nobody guesses."""
    return f"{prefix}-{secrets.token_hex(12)}"
