"""Stop strings over token borders, characters over token borders, and the reasons to end."""

from __future__ import annotations

import random

import pytest
from scripted import EOS, byte_tokenizer

from subten.core import FinishReason, Request, SamplingParams
from subten.engine.stop import NoText, StopMatcher, TextOutput, find_end, is_stop_token


def cut_by_character(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The definition: read by character, cut at the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def read(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool, list[str]]:
    """What a reader of the stream sees, piece by piece, and whether it stopped."""
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.is_stopped:
            break
    if not matcher.is_stopped:
        shown.append(matcher.flush())
    return "".join(shown), matcher.is_stopped, shown


# Case A01.
@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["the br", "own f", "ox jumps"], ("own fox",), "the br"),
        (["ab", "c"], ("ab", "abc"), ""),
        (["abc"], ("abc", "ab"), ""),
        (["x", "y"], ("x",), ""),
        (["a", "a", "a", "b"], ("aab",), "a"),
        (["one two"], ("three",), "one two"),
        (["own fo", "o"], ("own fox",), "own foo"),
        (["stop"], (), "stop"),
        (["", "a", "", "b"], ("ab",), ""),
        (["xfox", "fox"], ("own fox", "fox"), "x"),
        (["the own ", "fox"], ("fox", "own fox"), "the "),
    ],
)
def test_text_before_the_stop_is_shown_exactly(
    pieces: list[str], stops: tuple[str, ...], shown: str
) -> None:
    assert read(pieces, stops)[0] == shown


def test_nothing_is_held_that_cannot_become_a_stop() -> None:
    matcher = StopMatcher(("own fox",))
    assert matcher.push("the o") == "the "
    assert matcher.push("w") == ""
    assert matcher.push("l") == "owl"
    assert matcher.push(" own fo") == " "
    assert matcher.flush() == "own fo"


def test_random_texts_do_not_depend_on_their_pieces() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_stopped = 0
    for _ in range(20_000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 12)))
        stops = tuple(
            "".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))
        )
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown, is_stopped, steps = read(pieces, stops)
        assert (shown, is_stopped) == cut_by_character(text, stops), (pieces, stops)
        num_stopped += is_stopped
        # Held is the longest end of the text so far that begins a stop string, and no more.
        for i in range(len(steps) - 1):
            held = "".join(pieces[: i + 1])[len("".join(steps[: i + 1])) :]
            so_far = "".join(pieces[: i + 1])
            begins = [s[:n] for s in stops for n in range(1, len(s))]
            longest = max((b for b in begins if so_far.endswith(b)), key=len, default="")
            assert held == longest, (pieces, stops, i)
    assert 5_000 < num_stopped < 19_000, num_stopped


def stream(token_ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    output = TextOutput(byte_tokenizer().stream(), stops)
    pieces = []
    is_stopped = False
    for token_id in token_ids:
        is_stopped = output.push(token_id)
        pieces.append(output.take())
        if is_stopped:
            break
    is_stopped = output.finish() or is_stopped
    pieces.append(output.take())
    assert "".join(pieces) == output.text
    return pieces, is_stopped


# Case A03: an emoji of four byte tokens, and a stop that mixes ASCII and CJK.
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("gene \U0001f9ec edit", "\U0001f9ec", "gene "),
        ("\U0001f9ec", "\U0001f9ec", ""),
        ("say end\u7ed3\u675f now", "end\u7ed3\u675f", "say "),
    ],
)
def test_stop_string_of_many_byte_tokens(text: str, stop: str, shown: str) -> None:
    pieces, is_stopped = stream(list(text.encode()), (stop,))
    assert is_stopped
    assert "".join(pieces) == shown


def test_pieces_never_end_inside_a_character() -> None:
    # Case A04.
    text = "d\u010f \U0001f44b\U0001f3fd\u200d \ud55c\uae00 \u05e9"
    pieces, _ = stream(list(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("end", "replacements"),
    [
        (b"\xf0\x9f\xa7", 1),
        (b"\xe2\x82", 1),
        (b"\xc3", 1),
        (b"\xf0\xe2\x82", 2),  # the first begins nothing that the others go on with
        (b"\xff\xff", 2),
        (b"\xed\xa0", 2),  # half of a surrogate pair begins no character
    ],
)
def test_open_character_at_the_end_becomes_one_replacement(end: bytes, replacements: int) -> None:
    # Case A04.
    pieces, _ = stream([*b"ab", *end])
    assert "".join(pieces) == "ab" + "\ufffd" * replacements
    assert "".join(pieces) == (b"ab" + end).decode(errors="replace")
    assert pieces[:2] == ["a", "b"]


def test_model_without_tokenizer_has_no_text() -> None:
    output = TextOutput(NoText())
    assert not output.push(3)
    assert not output.finish()
    assert output.text == output.take() == ""


def request(**sampling: object) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=(1,),
        sampling=SamplingParams(**sampling),
        seed=0,
        eos_token_ids=(EOS, 300),
    )


@pytest.mark.parametrize(
    ("sampling", "token_id", "num_output", "num_tokens", "reason"),
    [
        ({}, 5, 1, 2, None),
        ({}, EOS, 1, 2, FinishReason.STOP),
        ({}, 300, 1, 2, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, 1, 2, None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, 1, 2, FinishReason.STOP),
        ({"stop_token_ids": (5,)}, 5, 1, 2, FinishReason.STOP),
        ({"max_tokens": 3}, 5, 3, 4, FinishReason.LENGTH),
        ({"max_tokens": 3}, 5, 2, 3, None),
        ({"max_tokens": 3}, EOS, 3, 4, FinishReason.STOP),
        ({}, 5, 1, 100, FinishReason.LENGTH),
        ({}, 5, 1, 99, None),
    ],
)
def test_reasons_to_end(
    sampling: dict[str, object],
    token_id: int,
    num_output: int,
    num_tokens: int,
    reason: FinishReason | None,
) -> None:
    asked = request(**sampling)
    found = find_end(asked, token_id, num_output=num_output, num_tokens=num_tokens, max_seq_len=100)
    assert found is reason
    assert is_stop_token(asked, token_id) == (reason is FinishReason.STOP)
