"""Encoding, chat templates with exactly one BOS, and text that streams."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import CHAT_TEMPLATE, MERGES, SPECIAL, vocabulary
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from subten.core import CheckpointError, RequestError
from subten.tokenizer import Tokenizer

BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE
TALK = [{"role": "user", "content": "then a cat"}, {"role": "assistant", "content": "in"}]
TEXTS = ["", "the cat", "12 345", "caf\u00e9 \u20ac \U0001f600", "a\n\n b\t c", "\u0001 \u2028"]


def gguf_fields(**changes: Any) -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **changes,
    }


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_fields())


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_digits_and_special_tokens(tokenizer: Tokenizer) -> None:
    spelled = [vocabulary()[i] for i in tokenizer.encode("the in a12<|im_end|>")]
    assert spelled == ["the", "\u0120", "in", "\u0120a", "1", "2", "<|im_end|>"]
    assert tokenizer.decode([1, *tokenizer.encode("the"), 2]) == "the"
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == len(vocabulary())


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, BOS_TEMPLATE])
def test_exactly_one_bos_in_a_chat(adds_bos: bool, template: str) -> None:
    # `<|endoftext|>` is the BOS here, since the template itself opens each turn with id 1.
    changes = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.chat_template": template}
    found = Tokenizer.from_gguf(
        gguf_fields(**changes, **{"tokenizer.ggml.add_bos_token": adds_bos})
    )
    ids = found.encode_chat(TALK)
    wanted = 1 if adds_bos or template == BOS_TEMPLATE else 0
    assert ids.count(0) == wanted
    assert ids[:wanted] == [0] * wanted


def test_exactly_one_bos_in_a_completion() -> None:
    found = Tokenizer.from_gguf(
        gguf_fields(**{"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True})
    )
    the = found.encode_part("the")
    assert found.encode("the") == [0, *the]
    assert found.encode("<|endoftext|>the") == [0, *the]
    assert found.encode("") == [0]
    assert 0 not in the


def test_chat_template(tokenizer: Tokenizer) -> None:
    opened = "<|im_start|>user\nthen a cat<|im_end|>\n<|im_start|>assistant\nin<|im_end|>\n"
    assert tokenizer.apply_chat_template(TALK, add_generation_prompt=False) == opened
    assert tokenizer.apply_chat_template(TALK) == opened + "<|im_start|>assistant\n"


def test_without_a_template_chat_is_refused_and_completion_works() -> None:
    found = Tokenizer.from_gguf(gguf_fields(**{"tokenizer.chat_template": None}))
    with pytest.raises(RequestError, match=r"chat_template\.jinja"):
        found.encode_chat(TALK)
    assert found.encode("the")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{% broken",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str) -> None:
    found = Tokenizer.from_gguf(gguf_fields(**{"tokenizer.chat_template": template}))
    with pytest.raises(RequestError, match="messages"):
        found.apply_chat_template(TALK)


def test_hidden_attributes_are_not_there() -> None:
    template = "[{{ messages.__class__ }}{{ raise_exception.__globals__ }}]"
    found = Tokenizer.from_gguf(gguf_fields(**{"tokenizer.chat_template": template}))
    assert found.apply_chat_template(TALK) == "[]"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(vocabulary()) - 1), max_size=40), st.booleans())
def test_streamed_pieces_join_to_the_whole_text(ids: list[int], skip: bool) -> None:
    found = Tokenizer.from_gguf(gguf_fields())
    stream = found.stream(skip_special_tokens=skip)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == found.decode(ids, skip_special_tokens=skip)


def test_a_character_streams_when_its_last_byte_has_come(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U0001f600\u20acb")
    assert len(ids) == 1 + 4 + 3 + 1
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert pieces == ["a", "", "", "", "\U0001f600", "", "", "\u20ac", "b"]
    assert stream.push(ids[1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_saved_tokenizer_reads_back_here_and_in_transformers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    again = Tokenizer.from_file(tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text) == theirs.encode(text)
    assert again.eos_token_ids == tokenizer.eos_token_ids == (theirs.eos_token_id,)
    assert again.bos_token_id == tokenizer.bos_token_id == theirs.bos_token_id
    assert again.encode_chat(TALK) == tokenizer.encode_chat(TALK)
    prompt = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer.apply_chat_template(TALK)


def test_a_template_may_lie_in_its_own_file_or_a_list(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    config_file = tmp_path / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["chat_template"] = [{"name": "default", "template": "listed"}]
    config["eos_token"] = {"content": "<|endoftext|>", "special": True}
    config_file.write_text(json.dumps(config))
    read = Tokenizer.from_file(tmp_path / "tokenizer.json", config_file)
    assert read.apply_chat_template(TALK) == "listed"
    assert read.eos_token_ids == (0,)
    (tmp_path / "chat_template.jinja").write_text("in a file, {{ eos_token }}")
    read = Tokenizer.from_file(tmp_path / "tokenizer.json", config_file, eos_token_ids=(7, 8))
    assert read.apply_chat_template(TALK) == "in a file, <|endoftext|>"
    assert read.eos_token_ids == (7, 8)


def test_what_cannot_be_read_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for key, value in (("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "mystery")):
        with pytest.raises(CheckpointError, match=f"{key}.*{value}"):
            Tokenizer.from_gguf(gguf_fields(**{key: value}))
    fields = gguf_fields()
    del fields["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match="merges"):
        Tokenizer.from_gguf(fields)
    with pytest.raises(CheckpointError, match="absent"):
        Tokenizer.from_file(tmp_path / "absent.json")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        Tokenizer.from_file(broken)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(CheckpointError, match="<nowhere>"):
        Tokenizer.from_file(broken, tmp_path / "tokenizer_config.json")


SPACE = "\u2581"


def spaced_tokenizer(*, strips_by_rule: bool) -> Tokenizer:
    """A vocabulary as SentencePiece has it, whose decoder drops the space that begins a text."""
    names = [SPACE, f"{SPACE}leading", f"{SPACE}x", "x", "<s>", "</s>"]
    names += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    rules = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    rules += [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(rules) if strips_by_rule else decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_token_ids=[5], bos_token_id=4)


@pytest.mark.parametrize("strips_by_rule", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_leading_spaces_are_those_of_the_prompts_context(strips_by_rule: bool, skip: bool) -> None:
    # Case A06: first tokens with and without a space, alone, after text and after special tokens.
    tokenizer = spaced_tokenizer(strips_by_rule=strips_by_rule)
    space, leading, x, bare, bos, eos = range(6)
    rng = random.Random()
    for context in ([], [bos], [bos, x], [bare], [bos, bare, eos], [space], [x, space, bos]):
        for _ in range(30):
            ids = rng.choices([space, leading, x, bare, bos], k=rng.randrange(1, 6))
            stream = tokenizer.stream(skip_special_tokens=skip, context=context)
            text = "".join(stream.push(token) for token in ids) + stream.flush()
            before = tokenizer.decode(context, skip_special_tokens=skip)
            both = tokenizer.decode([*context, *ids], skip_special_tokens=skip)
            assert before + text == both, (context, ids)
    after = tokenizer.stream(context=[bos, bare])
    assert after.push(leading) + after.push(x) == " leading x"


def test_a_character_left_open_by_the_prompt_is_not_the_answers() -> None:
    tokenizer = spaced_tokenizer(strips_by_rule=True)
    byte = [6 + value for value in "\u00e9".encode()]
    stream = tokenizer.stream(context=[3, byte[0]])
    assert stream.push(byte[1]) + stream.push(3) == "\ufffdx"


class CountingBackend:
    """A backend that counts the ids that it decodes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += len(ids)
        return self._backend.decode(ids, **options)


def byte_level_tokenizer() -> Tokenizer:
    """A vocabulary of bytes and of pieces that begin and end anywhere in a character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    chars = [chr(byte if byte in plain else next(others)) for byte in range(256)]
    pieces = ["\u20ac", "\ufffd", " a", "\U0001f600"]
    spelled = [piece.encode() for piece in pieces]
    spelled += [b"\x82\xac\xe2", b"\xe2\x82", b"\xf0\x9f", b"\x98", b"\x80a\xf0", b"\xed\xa0"]
    names = chars + ["".join(chars[byte] for byte in piece) for piece in spelled]
    backend = Backend(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_token_ids=[len(names) + 1])


TOKENIZERS = {
    "byte level": byte_level_tokenizer,
    "strip": lambda: spaced_tokenizer(strips_by_rule=True),
    "metaspace": lambda: spaced_tokenizer(strips_by_rule=False),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_streams_of_all_tokens_join_to_the_whole_text(kind: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    rng = random.Random()
    # Also ids that a model has and its tokenizer does not.
    everything = range(tokenizer.vocab_size + 3)
    for _ in range(2000):
        some = rng.sample(everything, k=rng.choice([1, 2, 5, 100]))
        ids = rng.choices(some, k=rng.randrange(60))
        context = rng.choices(some, k=rng.randrange(10))
        if tokenizer.decode(context, skip_special_tokens=skip).endswith("\ufffd"):
            context = []
        stream = tokenizer.stream(skip_special_tokens=skip, context=context)
        text = "".join(map(stream.push, ids)) + stream.flush()
        both = tokenizer.decode([*context, *ids], skip_special_tokens=skip)
        before = tokenizer.decode(context, skip_special_tokens=skip)
        assert before + text == both, (context, ids)


def test_bytes_that_are_no_utf8_spoil_no_others() -> None:
    tokenizer = spaced_tokenizer(strips_by_rule=True)
    rng = random.Random()
    parts = ["\u00e9".encode(), "\U0001f600".encode(), b"\xf0\x9f", b"\x80", b"\xed\xa0\x80", b"a"]
    for _ in range(300):
        data = b"".join(rng.choices(parts, k=rng.randrange(12)))
        ids = [6 + byte for byte in data]
        assert tokenizer.decode(ids) == data.decode(errors="replace")
        assert tokenizer.decode([*ids, 2]).endswith(" x" if ids else "x")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_token_costs_the_same_wherever_it_stands(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    counting: Any = CountingBackend(tokenizer.backend)
    tokenizer.backend = counting
    eos, unknown = tokenizer.eos_token_ids[0], tokenizer.vocab_size
    odd = range(256) if kind == "byte level" else range(6, 262)
    repeated = [[eos], [unknown], [eos, odd[0x80]], [odd[0xE2], odd[0x82]], [odd[0xFF]]]
    repeated += [[token] for token in range(256, tokenizer.vocab_size)]
    for ids in repeated:
        stream = tokenizer.stream(context=[3] * 9)
        before = counting.num_decoded
        pieces = [stream.push(token) for token in ids * 300]
        assert counting.num_decoded - before < 50 * len(pieces), ids
        # Nor is text held back for long.
        text = "".join(pieces)
        whole = text + stream.flush()
        assert len(whole) - len(text) <= 1, ids


def test_special_tokens_may_be_shown_one_by_one() -> None:
    tokenizer = spaced_tokenizer(strips_by_rule=True)
    _, leading, x, _, bos, eos = range(6)
    stream = tokenizer.stream(shown={bos})
    pieces = [stream.push(token) for token in (bos, x, eos, bos, leading, 6 + 0xC3, bos)]
    assert pieces == ["<s>", " x", "", "<s>", " leading", "", "\ufffd<s>"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_texts_are_as_short_ones(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    text = "x leading\u20ac" * 50
    found = []
    for longest in (0, 10**9):
        monkeypatch.setattr("subten.tokenizer.LONG_TEXT", longest)
        ids = [tokenizer.encode(text), tokenizer.encode_part(text)]
        ids += [[*ids[0], 4, *range(tokenizer.vocab_size)]]
        found.append((ids, [tokenizer.decode(some) for some in ids]))
    assert found[0] == found[1]


def test_long_texts_leave_other_threads_running(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat in 12 ") * 20_000
    text = tokenizer.decode(ids)
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(ids)):
        thread = threading.Thread(target=work)
        num_turns = 0
        began_s = time.perf_counter()
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)
            num_turns += 1
        assert num_turns > 10, time.perf_counter() - began_s
