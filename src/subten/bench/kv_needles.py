"""A fact told once in a long text, asked for at its end: does the cache still have it?

Windows of one length: other text, at some depth the needle, `The pass key is ...`, more text, a
question and its answer, random digits. The needle is found if every token of the answer is the
likeliest one after those before it, which is what greedy decoding would have written.

Letters: W windows, T tokens, A tokens of the answer, D model width, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from subten.bench.kv_lab import EXACT, TOKENS_AT_ONCE, Scheme, hidden_states, logits
from subten.core import RequestError, refuse
from subten.models.decoder import Decoder

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the other text before the needle."""

NEEDLE = "\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
ANSWER = " {key}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleQuality:
    """Shares of needles found under a scheme, and by the reference, at each depth.

    `digits` are shares of the answer's tokens that were right; bits are at the end of a window.
    """

    scheme: str
    ours: bool
    window: int
    true_bits: float
    depths: list[float]
    found: list[float]
    found_reference: list[float]
    digits: float
    digits_reference: float
    num_needles: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needles:
    """Windows [W, T], of depth after depth, whose last `num_answer` tokens are the answer."""

    id_WT: torch.Tensor
    num_answer: int


def make_needles(
    encode: Callable[[str], list[int]],
    other_ids: Sequence[int],
    *,
    window: int,
    each: int,
    seed: int = 0,
) -> Needles:
    """`each` needles a depth in stretches of `other_ids`; RequestError for too few of those."""
    rng = random.Random(seed)
    question = encode(QUESTION)
    windows = []
    for depth in DEPTHS:
        for _ in range(each):
            key = "".join(rng.choices("123456789", k=5))
            needle, answer = encode(NEEDLE.format(key=key)), encode(ANSWER.format(key=key))
            room = window - len(needle) - len(question) - len(answer)
            if not 0 < room <= len(other_ids):
                allowed = f"1 to {len(other_ids)} tokens of other text, got {room}"
                raise refuse(RequestError, "window", window, allowed)
            start = rng.randrange(len(other_ids) - room + 1)
            other = list(other_ids[start : start + room])
            place = round(depth * room)
            windows.append([*other[:place], *needle, *other[place:], *question, *answer])
    assert len({len(ids) for ids in windows}) == 1, "digits are tokens of their own"
    return Needles(id_WT=torch.tensor(windows), num_answer=len(answer))


def evaluate_needles(
    model: Decoder,
    needles: Needles,
    schemes: Sequence[Scheme],
    *,
    progress: Callable[[float], None] = lambda _share: None,
) -> Iterator[NeedleQuality]:
    """Each scheme as it is done, the reference before all."""
    window = needles.id_WT.shape[1]
    elements = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim
    reference_WA = _right(model, needles, EXACT)
    for index, scheme in enumerate(schemes):
        right_WA = _right(model, needles, scheme)
        progress((index + 1) / len(schemes))
        yield NeedleQuality(
            scheme=scheme.name,
            ours=scheme.ours,
            window=window,
            true_bits=scheme.true_bits(window, elements),
            depths=list(DEPTHS),
            found=_by_depth(right_WA),
            found_reference=_by_depth(reference_WA),
            digits=float(right_WA.double().mean()),
            digits_reference=float(reference_WA.double().mean()),
            num_needles=len(right_WA),
        )


@torch.inference_mode()
def _right(model: Decoder, needles: Needles, scheme: Scheme) -> torch.Tensor:
    """Which tokens of each answer are the likeliest, bool [W, A]."""
    window, num_answer = needles.id_WT.shape[1], needles.num_answer
    parts = []
    for id_WT in needles.id_WT.split(max(1, TOKENS_AT_ONCE[model.device.type] // window)):
        id_WT = id_WT.to(model.device)
        x_WTD = hidden_states(model, id_WT, scheme)
        last_WAD = x_WTD[:, -num_answer - 1 : -1]
        likeliest_WA = logits(model, last_WAD.flatten(0, 1)).argmax(dim=-1)
        parts.append(likeliest_WA.view(len(id_WT), -1) == id_WT[:, -num_answer:])
    return torch.cat(parts).cpu()


def _by_depth(right_WA: torch.Tensor) -> list[float]:
    return right_WA.all(dim=1).view(len(DEPTHS), -1).double().mean(dim=1).tolist()
