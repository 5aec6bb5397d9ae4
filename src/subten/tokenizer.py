"""Text to token ids and back, chat templates, and text as it streams; no torch."""

from __future__ import annotations

import codecs
import functools
import itertools
import json
from collections.abc import Container, Mapping, Sequence
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


LONG_TEXT = 2000
"""More characters, or tokens, are encoded and decoded while other threads of Python run.

The backend lets them in its calls for several texts alone, whose first one starts its own threads.
"""


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
        ids = self._encode(text, add_special_tokens=True)
        if self.adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def encode_part(self, text: str) -> list[int]:
        """Token ids without BOS; some vocabularies put a space before each text they encode."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        backend, options = self.backend, {"add_special_tokens": add_special_tokens}
        if len(text) <= LONG_TEXT:
            return list(backend.encode(text, **options).ids)
        [found] = backend.encode_batch_fast([text], **options)
        return list(found.ids)

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
        if self.byte_ids:
            characters = _Characters(self, skip_special_tokens=skip_special_tokens)
            whole = itertools.chain.from_iterable(map(characters.push, ids))
            ids = [*whole, *characters.flush()]
        if len(ids) <= LONG_TEXT:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        [text] = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        shown: Container[int] = (),
        context: Sequence[int] = (),
    ) -> TextStream:
        """An incremental detokeniser for what follows the tokens of `context`.

        Special tokens of `shown` are spelled out though the others are skipped.
        """
        characters = _Characters(self, skip_special_tokens=skip_special_tokens, shown=shown)
        return TextStream(self, characters, context)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, or None."""
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that texts leave out unless they are asked for."""
        added = self.backend.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in added if token.special)

    @functools.cached_property
    def byte_ids(self) -> tuple[int, ...]:
        """The tokens that stand for the bytes 0 to 255; empty without byte fallback."""
        found = [self.token_id(f"<0x{byte:02X}>") for byte in range(256)]
        known = tuple(token_id for token_id in found if token_id is not None)
        is_spelled = len(known) == 256 and self.backend.decode([known[ord("A")]]) == "A"
        return known if is_spelled else ()

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a token of byte fallback stands for; None for any other token."""
        return self._bytes_by_id.get(token_id)

    @functools.cached_property
    def _bytes_by_id(self) -> dict[int, int]:
        return {token_id: byte for byte, token_id in enumerate(self.byte_ids)}

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
"""Tokens of a text that decide how the token after them is written.

Each has a byte at least. So of those that are cut out of a text, three bytes at most are the rest
of a character, and one that is still open lies within them.
"""


class TextStream:
    """Text of one sequence as its tokens arrive; the pieces join to `decode` of all ids.

    After a `context` they join to what `decode` of both has beyond that of the context: the first
    token of an answer keeps the space that it would drop at the start of a text. A token that ends
    inside a UTF-8 character waits for the rest of it. A token costs the same wherever it stands.
    """

    def __init__(
        self, tokenizer: Tokenizer, characters: _Characters, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._characters = characters
        # Without byte tokens a character that is open, or one that is none, decodes to U+FFFD.
        self._has_open_ends = not tokenizer.byte_ids
        texts = (token_id for token_id in reversed(context) if characters.has_text(token_id))
        self._ids: list[int] = []
        self._num_known = 0
        for token_id in reversed(list(itertools.islice(texts, CONTEXT_TOKENS))):
            self._ids += characters.push(token_id)
        self.flush()

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is open."""
        ids = self._characters.push(token_id)
        if not ids:
            return ""
        self._ids += ids
        text = self._sure_text()
        piece = text[self._num_known :]
        self._num_known = len(text)
        if len(self._ids) > 2 * CONTEXT_TOKENS:
            self._forget()
        return piece

    def flush(self) -> str:
        """Text still held back; call at the end of the sequence."""
        self._ids += self._characters.flush()
        text = self._text()
        piece = text[self._num_known :]
        self._num_known = len(text)
        if self._sure_text() != text:
            # A character that ends here is no part of what follows.
            self._ids, self._num_known = [], 0
        return piece

    def _forget(self) -> None:
        """Go on from the last few tokens, and no part of a character."""
        start = len(self._ids) - CONTEXT_TOKENS
        while (self._tokenizer.byte_of(self._ids[start]) or 0) & 0xC0 == 0x80:
            start -= 1
        del self._ids[:start]
        self._num_known = len(self._sure_text())

    def _sure_text(self) -> str:
        """The text that no further token changes: without a character that may be open."""
        text = self._text()
        return text[:-1] if self._has_open_ends and text.endswith(_REPLACEMENT) else text

    def _text(self) -> str:
        return str(self._tokenizer.backend.decode(self._ids, skip_special_tokens=False))


class _Characters:
    """Leaves out tokens without text, and passes tokens of single bytes on by whole characters.

    The backend spells out a run of these byte by byte where one of them is wrong. Here each maximal
    subpart that is no UTF-8 (Unicode Standard, 3.9) becomes one U+FFFD, and the rest stays text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Container[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def has_text(self, token_id: int) -> bool:
        """Whether a token adds anything to a text."""
        if self._skips and token_id in self._tokenizer.special_ids and token_id not in self._shown:
            return False
        return bool(self._tokenizer.backend.id_to_token(token_id))

    def push(self, token_id: int) -> list[int]:
        """Tokens whose text is decided by this one."""
        if not self.has_text(token_id):
            return []
        byte = self._tokenizer.byte_of(token_id)
        if byte is None:
            return [*self.flush(), token_id]
        return self._spelled(self._decoder.decode(bytes([byte])))

    def flush(self) -> list[int]:
        """What stands for a character that stays open."""
        return self._spelled(self._decoder.decode(b"", final=True))

    def _spelled(self, text: str) -> list[int]:
        return [self._tokenizer.byte_ids[byte] for byte in text.encode()]


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
