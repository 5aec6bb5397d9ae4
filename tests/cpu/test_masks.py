"""Texts that a grammar forces, in vocabularies that spell a text otherwise than its pieces."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("llguidance")

from tiny_llama import vocabulary
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from subten.serve.logprobs import TokenTexts
from subten.serve.masks import GrammarError, GrammarMask, make_tokenizer, new_matcher
from subten.tokenizer import Tokenizer

SPACE = "\u2581"
END = "</s>"
MERGES = [(SPACE, "{"), ("{", '"'), ("n", "a"), ("na", "m"), ('"', ":"), (SPACE, '"'), (SPACE, "n")]
AS_LLAMA_2 = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]


def spaced_tokenizer(
    *rules: normalizers.Normalizer, pre: pre_tokenizers.PreTokenizer | None = None
) -> Tokenizer:
    """A vocabulary as SentencePiece has it, with byte fallback as Mixtral's."""
    names = [END, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *map(chr, range(33, 127))]
    names += ["".join(pair) for pair in MERGES]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=MERGES, unk_token=END, byte_fallback=True))
    if rules:
        backend.normalizer = normalizers.Sequence(list(rules))
    if pre is not None:
        backend.pre_tokenizer = pre
    shown = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*shown, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return Tokenizer(backend, eos_token_ids=(0,))


def byte_level_tokenizer() -> Tokenizer:
    names = [END, *vocabulary()]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    # As Qwen's have it.
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?\S+|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return Tokenizer(backend, eos_token_ids=(0,))


TOKENIZERS = {
    "prepend": lambda: spaced_tokenizer(*AS_LLAMA_2),
    "metaspace": lambda: spaced_tokenizer(
        pre=pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    ),
    "lowercase": lambda: spaced_tokenizer(normalizers.Lowercase(), *AS_LLAMA_2),
    "byte_level": byte_level_tokenizer,
}


def follow(tokenizer: Tokenizer, grammar: str) -> str:
    """Text of random tokens that a grammar allows, till the end is one of them."""
    texts, size = TokenTexts(tokenizer), tokenizer.vocab_size
    made = make_tokenizer(
        [texts.bytes_of(token_id) for token_id in range(size)],
        tokenizer.encode_part,
        end_ids=tokenizer.eos_token_ids,
        special_ids=sorted(tokenizer.special_ids),
        vocab_size=size,
    )
    mask = GrammarMask(new_matcher(made, grammar), vocab_size=size)
    rng, token_ids = random.Random(), []
    while len(token_ids) < 500:
        words = mask.next_mask(token_ids[-1] if token_ids else None)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        token_ids.append(int(rng.choice(np.flatnonzero(bits))))
        if token_ids[-1] == 0:
            return b"".join(texts.bytes_of(token_id) for token_id in token_ids[:-1]).decode()
    raise AssertionError(token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    ["name", " name", "Name", "caf\u00e9", "cafe\u0301", "\U0001f9ec", f"a{END}b", f"{SPACE}na"],
)
def test_forced_text_is_spelled_in_every_kind_of_vocabulary(name, text):
    tokenizer = TOKENIZERS[name]()
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    found = follow(tokenizer, json.dumps({"json_schema": schema | {"additionalProperties": False}}))
    assert json.loads(found) == {text: text}
    assert follow(tokenizer, json.dumps({"lark": f"start: {json.dumps(text)}"})) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_forced_text_is_spelled_as_the_model_goes_on(name):
    """Behind other text the vocabulary's own merges are taken, not bytes."""
    tokenizer = TOKENIZERS[name]()
    texts = TokenTexts(tokenizer)
    tokens = [texts.bytes_of(token_id) for token_id in range(tokenizer.vocab_size)]
    made = make_tokenizer(
        tokens,
        tokenizer.encode_part,
        end_ids=(0,),
        special_ids=sorted(tokenizer.special_ids),
        vocab_size=len(tokens),
    )
    word = "the" if name == "byte_level" else "nam"
    assert made.tokenize_str(word) == [tokens.index(word.encode())]


@pytest.mark.parametrize("text", ["axb", "xab", "abx"])
def test_text_that_no_token_spells_is_told(text):
    tokens = [b"a", b"b", b"</s>"]
    settings = {"end_ids": (2,), "special_ids": (2,), "vocab_size": 3}
    made = make_tokenizer(tokens, lambda _: [], **settings)
    mask = GrammarMask(new_matcher(made, json.dumps({"lark": f'start: "{text}"'})), vocab_size=3)
    with pytest.raises(GrammarError, match="no token of this model goes on"):
        list(map(mask.next_mask, (None, 0, 1)))
