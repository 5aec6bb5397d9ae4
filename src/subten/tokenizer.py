"""Text to token ids and back, chat templates, and text as it streams; no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from subten.core import CheckpointError, RequestError

Message = Mapping[str, Any]

# How llama.cpp names the pre-tokenizers of byte-level BPE vocabularies. A regex of None is GPT-2's
# own pattern, which ByteLevel carries.
_DIGITS_THEN_BYTES = "digits"
_GGUF_PRE: dict[str, str | None] = {
    "smollm": _DIGITS_THEN_BYTES,
    "default": None,
    "gpt-2": None,
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """A `tokenizers` tokenizer with what a language model adds to it: end ids and a chat template.

    Ids are plain integers below `vocab_size`. Text that spells a special token encodes to that
    token.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None = None,
        chat_template: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self.config = dict(config or {})
        empty = backend.encode("").ids
        self.adds_bos = bos_token_id is not None and empty[:1] == [bos_token_id]

    @classmethod
    def from_file(
        cls,
        tokenizer_json: str | Path,
        tokenizer_config_json: str | Path | None = None,
        *,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Tokenizer:
        """Read `tokenizer.json` and, if given, `tokenizer_config.json` and `chat_template.jinja`.

        `eos_token_ids` overrides the end token of the config file (a model's own configuration may
        name several). Raises CheckpointError for a missing or damaged file.
        """
        path = Path(tokenizer_json)
        try:
            backend = Backend.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"tokenizer: cannot read {path}: {error.strerror}") from error
        except Exception as error:  # tokenizers raises bare Exception for a damaged file
            raise CheckpointError(f"tokenizer: {path} is damaged: {error}") from error
        config = _read_json(Path(tokenizer_config_json)) if tokenizer_config_json else {}
        bos = _token_id(backend, config.get("bos_token"))
        eos = _token_id(backend, config.get("eos_token"))
        if eos_token_ids is None:
            eos_token_ids = () if eos is None else (eos,)
        template_file = path.with_name("chat_template.jinja")
        if template_file.is_file():
            template: str | None = template_file.read_text(encoding="utf-8")
        else:
            template = _default_template(config.get("chat_template"))
        return cls(
            backend,
            eos_token_ids=eos_token_ids,
            bos_token_id=bos,
            chat_template=template,
            config=config,
        )

    @classmethod
    def from_text(
        cls,
        tokenizer_json: str,
        *,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        chat_template: str | None,
        config: Mapping[str, Any],
    ) -> Tokenizer:
        """A tokenizer from the text of its `tokenizer.json`."""
        return cls(
            Backend.from_str(tokenizer_json),
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
            chat_template=chat_template,
            config=config,
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes; `fields` maps its keys to plain values.

        Byte-level BPE vocabularies only; others raise CheckpointError.
        """
        model = fields.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise CheckpointError(
                f"tokenizer.ggml.model: got {model!r}; allowed: 'gpt2' (byte-level BPE)"
            )
        pre = fields.get("tokenizer.ggml.pre", "default")
        if pre not in _GGUF_PRE:
            raise CheckpointError(
                f"tokenizer.ggml.pre: got {pre!r}; allowed: {', '.join(sorted(_GGUF_PRE))}"
            )
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
            if key not in fields:
                raise CheckpointError(f"{key}: missing from the GGUF file")
        tokens: list[str] = fields["tokenizer.ggml.tokens"]
        backend = _byte_level_bpe(tokens, fields["tokenizer.ggml.merges"], _GGUF_PRE[pre])
        kinds = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
        special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
        backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
        plain = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_TOKEN]
        backend.add_tokens([AddedToken(t, normalized=False) for t in plain])
        bos_id: int | None = fields.get("tokenizer.ggml.bos_token_id")
        eos_id: int | None = fields.get("tokenizer.ggml.eos_token_id")
        if eos_id is None:
            raise CheckpointError("tokenizer.ggml.eos_token_id: missing from the GGUF file")
        if fields.get("tokenizer.ggml.add_bos_token", False) and bos_id is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos_id]} $A",
                pair=f"{tokens[bos_id]} $A $B",
                special_tokens=[(tokens[bos_id], bos_id)],
            )
        config: dict[str, Any] = {"eos_token": tokens[eos_id]}
        for name, key in (("bos", "bos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None:
                config[f"{name}_token"] = tokens[token_id]
        return cls(
            backend,
            eos_token_ids=(eos_id,),
            bos_token_id=bos_id,
            chat_template=fields.get("tokenizer.chat_template"),
            config=config,
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with one BOS where the tokenizer adds one."""
        ids = list(self.backend.encode(text).ids)
        if self.adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def encode_part(self, text: str) -> list[int]:
        """Token ids without BOS; some vocabularies put a space before each text they encode."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, with one BOS, whoever adds it: template or tokenizer."""
        ids = self.encode_part(
            self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        )
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(
        self, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> TextStream:
        """An incremental detokeniser for what follows the tokens of `context`."""
        return TextStream(self, skip_special_tokens=skip_special_tokens, context=context)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, or None."""
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a token of byte fallback stands for; None for any other token."""
        spelled = self.backend.id_to_token(token_id)
        found = _BYTE_TOKEN.fullmatch(spelled) if spelled else None
        return int(found[1], 16) if found else None

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation, by the model's own Jinja template in a sandbox.

        Raises RequestError where the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "messages: this model has no chat template; put `chat_template` in its "
                "tokenizer_config.json or a chat_template.jinja file beside it, or send a plain "
                "prompt"
            )
        special = {
            name: _spelling(self.config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if self.config.get(name)
        }
        template = self.chat_template
        try:
            return (
                template_sandbox()
                .from_string(template)
                .render(
                    messages=[dict(m) for m in messages],
                    add_generation_prompt=add_generation_prompt,
                    **special,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # A template computes: what it cannot do with these messages is any of these.
            raise RequestError(f"messages: the chat template failed: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers reads too."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.config,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


CONTEXT_TOKENS = 5
"""Tokens of a prompt that decide how the first token after it is written."""


class TextStream:
    """Text of one sequence as its tokens arrive; the pieces join to `decode` of all ids, but for a
    character that the end leaves open, which is one U+FFFD.

    After a `context` they join to what `decode` of both has beyond that of the context: the first
    token of an answer keeps the space that it would drop at the start of a text. A token that ends
    inside a UTF-8 character waits for the rest of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(context[-CONTEXT_TOKENS:])
        self._start = 0
        self._read = len(self._ids)
        if self._decode(0).endswith(_REPLACEMENT):
            # A character that the context leaves open is no part of what follows it.
            self._ids, self._read = [], 0

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is open."""
        self._ids.append(token_id)
        text = self._decode(self._start)
        known = self._decode(self._start, self._read)
        if text.endswith(_REPLACEMENT):
            return ""
        piece = text[len(known) :]
        # Decoding goes on from a token with text before the new one: some vocabularies write a
        # token differently at the start of a text (a space that the first token drops).
        if piece:
            self._start = self._read
        self._read = len(self._ids)
        return piece

    def flush(self) -> str:
        """Text still held back; call at the end of the sequence."""
        known = self._decode(self._start, self._read)
        text = self._decode(self._start)
        self._start = self._read = len(self._ids)
        return self._with_one_replacement(text[len(known) :])

    def _with_one_replacement(self, tail: str) -> str:
        """A character that the end leaves open is one U+FFFD, as the Unicode Standard (3.9,
        substitution of maximal subparts) has it, where a vocabulary writes one for each byte.
        """
        num_open = len(tail) - len(tail.rstrip(_REPLACEMENT))
        for count in range(min(num_open, 3), 1, -1):
            each = [self._tokenizer.byte_of(token_id) for token_id in self._ids[-count:]]
            known = bytes(byte for byte in each if byte is not None)
            if len(known) == count and known.decode(errors="replace") == _REPLACEMENT:
                return tail[:-count] + _REPLACEMENT
        return tail

    def _decode(self, start: int, stop: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=self._skip)


def _byte_level_bpe(tokens: list[str], merges: list[str], pattern: str | None) -> Backend:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs))
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pattern in (None, _DIGITS_THEN_BYTES)
    )
    if pattern is None:
        backend.pre_tokenizer = byte_level
    elif pattern == _DIGITS_THEN_BYTES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"tokenizer: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"tokenizer: {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"tokenizer: {path} holds no JSON object")
    return value


def _token_id(backend: Backend, token: Any) -> int | None:
    if token is None:
        return None
    spelling = _spelling(token)
    token_id = backend.token_to_id(spelling)
    if token_id is None:
        raise CheckpointError(
            f"tokenizer: token {spelling!r} is named in the config, not in the vocabulary"
        )
    return int(token_id)


def _spelling(token: str | Mapping[str, Any]) -> str:
    """A token of a config file, which holds its spelling or a record of it."""
    return token if isinstance(token, str) else str(token["content"])


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):
        by_name = {entry["name"]: entry["template"] for entry in value}
        value = by_name.get("default")
    return value if isinstance(value, str) else None


def template_sandbox() -> ImmutableSandboxedEnvironment:
    """Where chat templates run: no attribute that begins with an underscore, nothing mutable."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment
