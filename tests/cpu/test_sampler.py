"""What a request asks of its logits: bias, masks, least length, log-probabilities."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scripted_engine
import torch
from rust_panic import rust_panic
from scripted import EOS, VOCAB_SIZE, ScriptedModel, hash_script, noise_script
from scripted_engine import drain, expected, make_request, tokens_of

from subten.core import ErrorCause, FinishReason, Request, RequestError, SamplingParams, TokenEvent
from subten.engine.engine import Engine
from subten.engine.logprobs import ROWS_AT_ONCE, read_logprobs
from subten.engine.prompts import check_params
from subten.engine.stop import NoText, TextOutput

NUM_WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture(autouse=True, params=[False, True], ids=["eager", "graphs"])
def has_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs a second time with single tokens through the fixed inputs of graphs."""
    monkeypatch.setattr(sys.modules[__name__], "HAS_GRAPHS", request.param)


HAS_GRAPHS = False


def make_engine(script: Any = noise_script, **settings: Any) -> Engine:
    return scripted_engine.make_engine(ScriptedModel(script), has_graphs=HAS_GRAPHS, **settings)


def run(
    *requests: Request, script: Any = noise_script, **settings: Any
) -> dict[str, list[TokenEvent]]:
    engine = make_engine(script, **settings)
    for request in requests:
        engine.add(request)
    return drain(engine)


def words(token_ids: set[int]) -> np.ndarray:
    """One bit after another, by hand."""
    result = np.zeros(NUM_WORDS, dtype=np.uint32)
    for token_id in token_ids:
        result[token_id // 32] |= np.uint32(1 << token_id % 32)
    return result


class Grammar:
    """Allows after each token what `rule` says; remembers what it was told."""

    def __init__(self, rule: Callable[[int | None], set[int]]) -> None:
        self.rule = rule
        self.told: list[int | None] = []
        self._words = np.zeros(NUM_WORDS, dtype=np.uint32)

    def next_mask(self, token_id: int | None) -> np.ndarray:
        self.told.append(token_id)
        # The same array each time, as matchers of grammars have it.
        self._words[:] = words(self.rule(token_id))
        return self._words


def plain(history: list[int], allowed: set[int], bias: dict[int, float] | None = None) -> int:
    """The greedy choice of the noise script, from its definition."""
    logits = noise_script(tuple(history)).tolist()
    for token_id, value in (bias or {}).items():
        logits[token_id] = float(np.float32(logits[token_id]) + np.float32(value))
    return max(sorted(allowed), key=lambda token_id: logits[token_id])


def follow(prompt: list[int], choose: Callable[[list[int]], int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(choose(history))
    return history[len(prompt) :]


EVERYTHING = set(range(VOCAB_SIZE)) - {EOS}


def test_bias_moves_its_tokens_and_no_neighbour() -> None:
    rng = random.Random()
    bias = {rng.randrange(VOCAB_SIZE): rng.uniform(-6, 6) for _ in range(200)} | {EOS: -100.0}
    biased = make_request("b", [1, 2], logit_bias=bias, max_tokens=20)
    other = make_request("o", [1, 2], logit_bias={EOS: -100.0}, max_tokens=20)
    alone = make_request("p", [1, 2], max_tokens=20, ignore_eos=True)
    events = run(biased, other, alone)
    everything = set(range(VOCAB_SIZE))
    wanted = follow([1, 2], lambda h: plain(h, everything, bias), 20)
    assert tokens_of(events["b"]) == wanted
    assert tokens_of(events["o"]) == follow([1, 2], lambda h: plain(h, EVERYTHING), 20)
    assert tokens_of(events["p"]) == follow([1, 2], lambda h: plain(h, everything), 20)
    # A bias of 100 decides against logits of this size, whichever way.
    forced = run(make_request("f", [3], logit_bias={77: 100}, max_tokens=5))
    assert tokens_of(forced["f"]) == [77] * 5


def test_only_allowed_tokens_come_greedy_or_drawn() -> None:
    allowed = {0, 31, 32, 63, 64, VOCAB_SIZE - 1}
    params = {"allowed_token_ids": tuple(allowed), "max_tokens": 40}
    greedy = make_request("g", [5], **params)
    drawn = make_request("d", [5], temperature=1.0, seed=3, **params)
    free = make_request("f", [5], temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    events = run(greedy, drawn, free)
    assert tokens_of(events["g"]) == follow([5], lambda h: plain(h, allowed), 40)
    # Seed and script are fixed, and 40 draws of 6 about equal tokens see them all.
    assert set(tokens_of(events["d"])) == allowed
    assert tokens_of(events["f"]) == tokens_of(run(free)["f"])


def test_no_end_before_the_least_length() -> None:
    eager = torch.zeros(VOCAB_SIZE)
    eager[EOS], eager[7], eager[9] = 30.0, 20.0, 10.0
    requests = [
        make_request("a", [1], min_tokens=4),
        make_request("b", [1], min_tokens=4, stop_token_ids=(7,)),
        make_request("c", [1], min_tokens=4, ignore_eos=True),
        make_request("d", [1], min_tokens=10),
        make_request("e", [1]),
        make_request("f", [1], min_tokens=2, stop_token_ids=(VOCAB_SIZE + 5,)),
    ]
    events = run(*requests, script=lambda _: eager)
    assert tokens_of(events["a"]) == [7, 7, 7, 7, EOS]
    assert tokens_of(events["b"]) == [9, 9, 9, 9, EOS]
    assert tokens_of(events["c"]) == [EOS] * 10
    assert tokens_of(events["d"]) == [7] * 10
    assert tokens_of(events["e"]) == [EOS]
    assert tokens_of(events["f"]) == [7, 7, EOS]


def test_what_follows_the_least_length_knows_the_tokens_before() -> None:
    """The last masked token is not the one that the model alone would have gone on with."""

    def script(history: tuple[int, ...]) -> torch.Tensor:
        logits = noise_script(history)
        logits[EOS] = 30.0 if len(history) == 2 + 3 else -30.0
        return logits

    events = run(make_request("a", [1, 2], min_tokens=4, max_tokens=12), script=script)
    assert tokens_of(events["a"]) == follow([1, 2], lambda h: plain(h, EVERYTHING), 12)


def test_stop_strings_wait_for_the_least_length() -> None:
    class Letters(NoText):
        def push(self, token_id: int) -> str:
            return chr(token_id)

    for min_tokens, text, num_tokens in ((0, "a", 3), (2, "abca", 6), (4, "abca", 6), (5, None, 9)):
        engine = make_engine(lambda history: ord("abcabcxyz"[len(history) - 1]))
        output = TextOutput(Letters(), ("bc",), min_tokens=min_tokens)
        engine.add(make_request("a", [1], max_tokens=9, min_tokens=min_tokens), output)
        assert len(tokens_of(drain(engine)["a"])) == num_tokens
        assert output.text == ("abcabcxyz" if text is None else text)


@pytest.mark.parametrize("num_pages", [64, 3])
def test_mask_is_told_each_token_once_and_obeyed(num_pages: int) -> None:
    """Three pages preempt: what was chosen is told once all the same."""

    def rule(token_id: int | None) -> set[int]:
        return {(7 * (token_id or 0) + i) % VOCAB_SIZE for i in (1, 2, 40)}

    prompts = {"a": [9] * 55, "b": [8] * 60, "c": [7] * 50}
    grammars = {name: Grammar(rule) for name in prompts}
    requests = [
        make_request(name, prompt, mask=grammars[name], max_tokens=40, ignore_eos=True)
        for name, prompt in prompts.items()
    ]
    engine = make_engine(num_pages=num_pages)
    for request in requests:
        engine.add(request)
    events = drain(engine)
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 3)
    for name, prompt in prompts.items():
        wanted: list[int] = []
        for _ in range(40):
            wanted.append(plain(prompt + wanted, rule(wanted[-1] if wanted else None)))
        assert tokens_of(events[name]) == wanted
        assert grammars[name].told == [None, *wanted[:-1]]
    assert engine.runner._sampler._masks == {}


def test_masks_of_both_kinds_join() -> None:
    request = make_request(
        "a",
        [1],
        mask=Grammar(lambda _: {3, 5, EOS}),
        allowed_token_ids=(4, 5, EOS),
        min_tokens=3,
        max_tokens=3,
    )
    assert tokens_of(run(request)["a"]) == [5, 5, 5]


@pytest.mark.parametrize(
    ("stop_token_ids", "ignore_eos"), [((), False), ((EOS,), True), ((7,), False)]
)
def test_a_mask_that_is_complete_ends_before_the_least_length(
    stop_token_ids: tuple[int, ...], ignore_eos: bool
) -> None:
    mask = Grammar(lambda t: {7, 8, EOS} if t is None else {EOS})
    given = {"stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos, "min_tokens": 5}
    bias = {EOS: 100.0, 7: 90.0} if stop_token_ids == (7,) else {EOS: 100.0, 8: 90.0}
    events = run(make_request("a", [1], mask=mask, logit_bias=bias, **given))["a"]
    # While another token is allowed the end is not.
    assert tokens_of(events) == [8, EOS]
    assert events[-1].finish_reason is FinishReason.STOP


def raising(error: Callable[[], Any]) -> Any:
    """A mask that fails after its first token."""

    class Raising:
        def next_mask(self, token_id: int | None) -> Any:
            return words({8}) if token_id is None else error()

    return Raising()


def throw(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


ENGINE, MASK = ErrorCause.ENGINE, ErrorCause.MASK


@pytest.mark.parametrize(
    ("mask", "num_tokens", "cause", "detail"),
    [
        (raising(throw(ValueError("odd"))), 1, ENGINE, "the mask failed: ValueError: odd"),
        (raising(throw(RequestError("too deep"))), 1, MASK, "too deep"),
        (raising(rust_panic), 1, ENGINE, "the mask failed: RuntimeError: panic: "),
        (Grammar(lambda t: {8} if t is None else set()), 1, MASK, "no token is left"),
        (Grammar(lambda _: {9}), 0, MASK, "no token is left"),
    ],
)
def test_mask_that_fails_ends_its_own_request_alone(
    mask: Any, num_tokens: int, cause: ErrorCause, detail: str
) -> None:
    own = make_request("own", [1], mask=mask, min_tokens=2, stop_token_ids=(9,))
    others = [
        make_request("plain", [2] * 70, ignore_eos=True),
        make_request("masked", [3], mask=Grammar(lambda _: {11, 12})),
    ]
    events = run(own, *others)
    assert tokens_of(events["own"]) == [8] * num_tokens
    assert events["own"][-1].finish_reason is FinishReason.ERROR
    assert detail in events["own"][-1].finish_detail
    assert events["own"][-1].error_cause is cause
    assert tokens_of(events["plain"]) == tokens_of(run(others[0])["plain"])
    assert set(tokens_of(events["masked"])) <= {11, 12}
    assert events["masked"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_no_failure_of_a_mask(error: type[BaseException]) -> None:
    with pytest.raises(error):
        run(make_request("a", [1], mask=raising(throw(error()))))


@pytest.mark.parametrize("bad", [np.zeros(NUM_WORDS - 1, np.uint32), np.zeros(NUM_WORDS)])
def test_words_of_another_size_or_type_are_told(bad: np.ndarray) -> None:
    class Odd:
        def next_mask(self, _: int | None) -> Any:
            return bad

    event = run(make_request("a", [1], mask=Odd()))["a"][-1]
    assert event.finish_reason is FinishReason.ERROR
    assert f"allowed: {NUM_WORDS} words of 32 bits" in event.finish_detail


def check_logprobs(
    logits: torch.Tensor, got: Any, token_id: int, num_top: int, *, name: object = ""
) -> None:
    """Against exact sums of Python floats."""
    values = logits.tolist()
    peak = max(values)
    total = peak + math.log(math.fsum(math.exp(x - peak) for x in values))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num_top]
    assert got.token_id == token_id, name
    assert [i for i, _ in got.top] == [i for i in order if values[i] > -math.inf], name
    for i, logprob in [(token_id, got.logprob), *got.top]:
        # float64 sums, rounded once to float32; a log-probability is at most 1e38 here.
        exact = values[i] - total
        assert logprob == exact or abs(logprob - exact) <= 2**-23 * abs(exact) + 1e-12, (name, i)
    assert got.rank == 1 + sum(x > values[token_id] for x in values), name


@pytest.mark.parametrize("vocab", [1, 2, 31, 320])
def test_logprobs_are_those_of_the_definition(vocab: int, generator: torch.Generator) -> None:
    rows = 2 * ROWS_AT_ONCE + 1
    logits = torch.randn(rows, vocab, generator=generator) * 5
    logits[0] = 0.0
    logits[1] = logits[1].round()
    logits[2] *= 1e37
    logits[3, 1::2] = -math.inf
    logits[4] = torch.where(logits[4] > 0, 0.0, -0.0)
    tokens = torch.randint(vocab, (rows,), generator=generator).tolist()
    tops = torch.randint(21, (rows,), generator=generator).tolist()
    found = read_logprobs(logits, tokens, tops)
    for row in range(rows):
        check_logprobs(logits[row], found[row], tokens[row], tops[row], name=row)


def test_logprobs_of_rows_without_a_distribution_are_none() -> None:
    logits = torch.tensor([[0.0, math.nan], [math.inf, 0.0], [-math.inf] * 2, [0.0, -math.inf]])
    found = read_logprobs(logits, [0, 0, 1, 1], [2, 2, 2, 2])
    assert found[:3] == [None] * 3
    assert found[3] is not None
    assert (found[3].logprob, found[3].rank, found[3].top) == (-math.inf, 2, ((0, 0.0),))


# Case A12's engine half, and Z: what is told are the model's numbers, whatever changes the choice.
def test_events_tell_the_models_logprobs() -> None:
    prompt = [1, 2, 3]
    requests = [
        make_request("greedy", prompt, logprobs=5, ignore_eos=True),
        make_request("drawn", prompt, logprobs=0, temperature=2.0, seed=5, ignore_eos=True),
        make_request("changed", prompt, logprobs=20, logit_bias={EOS: -100, 30: 3.5}),
        make_request("masked", prompt, logprobs=1, allowed_token_ids=(10, 11), temperature=1.0),
        make_request("none", prompt, ignore_eos=True),
    ]
    events = run(*requests)
    for request in requests:
        own = events[request.request_id]
        assert len(own) == 10
        history = list(prompt)
        for event in own:
            num_top = request.sampling.logprobs
            if num_top is None:
                assert event.logprobs is None
            else:
                logits = noise_script(tuple(history))
                check_logprobs(logits, event.logprobs, event.token_id, num_top, name=event)
            history.append(event.token_id)
        assert all(event.prompt_logprobs is None for event in own)
    assert tokens_of(events["greedy"]) == tokens_of(events["none"])


# Case S11's engine half: told numbers do not depend on who sits beside, either.
@pytest.mark.parametrize("num_others", [1, 6, 7])
def test_logprobs_do_not_depend_on_the_batch(num_others: int) -> None:
    own = make_request("own", [4] * 70, logprobs=3, temperature=0.7, seed=1, ignore_eos=True)
    others = [
        make_request(str(i), [i] * (i + 1), logprobs=i, temperature=1.0, seed=i, ignore_eos=True)
        for i in range(num_others)
    ]
    alone, together = run(own)["own"], run(*others, own)["own"]
    assert [e.logprobs for e in alone] == [e.logprobs for e in together]
    assert tokens_of(alone) == tokens_of(together)


@pytest.mark.parametrize(
    ("num_prompt", "budget", "num_pages"),
    [(1, 256, 32), (2, 256, 32), (64, 256, 32), (129, 256, 32), (130, 31, 32), (200, 7, 4)],
)
def test_prompt_logprobs_come_once_and_whole(num_prompt: int, budget: int, num_pages: int) -> None:
    prompt = [(3 * i * i) % 250 for i in range(num_prompt)]
    engine = make_engine(num_pages=num_pages, max_num_batched_tokens=budget, max_num_seqs=3)
    # Its pages are known, and others decode beside it.
    engine.add(make_request("before", prompt, max_tokens=1))
    first = engine.step()
    engine.add(make_request("beside", [9], max_tokens=30, ignore_eos=True))
    engine.add(make_request("own", prompt, prompt_logprobs=4, max_tokens=3, ignore_eos=True))
    events = drain(engine, first)
    own = events["own"]
    assert [event.prompt_logprobs is not None for event in own] == [True, False, False]
    told = own[0].prompt_logprobs
    assert told is not None
    assert len(told) == num_prompt - 1
    for position, logprobs in enumerate(told, start=1):
        logits = noise_script(tuple(prompt[:position]))
        check_logprobs(logits, logprobs, prompt[position], 4, name=position)
    assert tokens_of(own) == follow(prompt, lambda h: plain(h, set(range(VOCAB_SIZE))), 3)
    beside = follow([9], lambda h: plain(h, set(range(VOCAB_SIZE))), 30)
    assert tokens_of(events["beside"]) == beside


def test_prompt_logprobs_survive_preemption() -> None:
    prompt = [(5 * i) % 250 for i in range(70)]
    engine = make_engine(num_pages=3, max_num_batched_tokens=64)
    engine.add(make_request("old", [1] * 60, max_tokens=80, ignore_eos=True))
    first = engine.step()
    engine.add(make_request("own", prompt[:40], prompt_logprobs=2, max_tokens=60, ignore_eos=True))
    engine.add(make_request("new", [2] * 50, prompt_logprobs=0, max_tokens=40, ignore_eos=True))
    events = drain(engine, first)
    assert engine.scheduler.num_preemptions > 0
    for name, tokens in (("own", prompt[:40]), ("new", [2] * 50)):
        told = events[name][0].prompt_logprobs
        assert told is not None
        assert len(told) == len(tokens) - 1
        for position, logprobs in enumerate(told, start=1):
            logits = noise_script(tuple(tokens[:position]))
            check_logprobs(logits, logprobs, tokens[position], 2 if name == "own" else 0)
        assert all(event.prompt_logprobs is None for event in events[name][1:])


def test_prompt_logprobs_come_once_though_the_prompt_is_begun_twice() -> None:
    """The older one takes the pages of a prompt that goes on by a token a step."""
    engine = make_engine(num_pages=4, max_num_batched_tokens=64, max_prefill_tokens=1)
    engine.add(make_request("old", [1] * 60, max_tokens=80, ignore_eos=True))
    first = engine.step()
    prompt = [(5 * i) % 250 for i in range(100)]
    record = engine.add(make_request("own", prompt, prompt_logprobs=1, ignore_eos=True))
    own = drain(engine, first)["own"]
    assert record.sequence.num_preemptions == 1
    told = own[0].prompt_logprobs
    assert told is not None
    assert [logprobs.token_id for logprobs in told] == prompt[1:]
    for position, logprobs in enumerate(told, start=1):
        check_logprobs(noise_script(tuple(prompt[:position])), logprobs, prompt[position], 1)


def test_nan_in_a_prompt_whose_logprobs_are_asked_ends_it() -> None:
    def script(history: tuple[int, ...]) -> int | torch.Tensor:
        return torch.full((VOCAB_SIZE,), math.nan) if len(history) == 5 else hash_script(history)

    own = make_request("own", [1] * 9, prompt_logprobs=1)
    other = make_request("other", [2] * 9)
    events = run(own, other, script=script)
    assert [e.finish_reason for e in events["own"]] == [FinishReason.ERROR]
    assert tokens_of(events["other"]) == expected(other)


# Case A10 at the edge: numbers that no sampler should ever see.
@pytest.mark.parametrize(
    "given",
    [
        {name: value}
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
        for value in (math.nan, math.inf, -math.inf, 1e308, 10**400, "1", True, None)
    ]
    + [
        {"repetition_penalty": 0},
        {"repetition_penalty": -0.0},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": True},
        {"prompt_logprobs": 10**30},
        {"min_tokens": -1},
        {"min_tokens": 257},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 100.5}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": [1.0]},
        {"logit_bias": dict.fromkeys(range(1025), 0.5)},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (2**63,)},
        {"allowed_token_ids": 5},
    ],
)
def test_odd_numbers_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(given))}.*: got .*allowed: "):
        SamplingParams(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": t, "top_p": p, "min_p": m, "top_k": k, "repetition_penalty": r}
        for t in (0, -0.0, 1e-12, 1e-4, 2)
        for p, m, k, r in ((0, 1e-12, -1, 1e-12), (1e-12, 1, VOCAB_SIZE + 1, 1e-4), (1, 0, 1, 2))
    ],
)
def test_odd_numbers_that_are_taken_give_tokens_and_numbers(given: dict[str, Any]) -> None:
    masked = make_request(
        "masked",
        [1],
        mask=Grammar(lambda t: {t or 5, 6, 7}),
        logprobs=20,
        logit_bias={5: 100, 6: -100},
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        ignore_eos=True,
        max_tokens=4,
        **given,
    )
    greedy = make_request("greedy", [1], max_tokens=4, ignore_eos=True)
    events = run(masked, greedy)
    assert set(tokens_of(events["masked"])) <= {5, 6, 7}
    assert len(tokens_of(events["masked"])) == 4
    for event in events["masked"]:
        assert event.logprobs is not None
        numbers = [event.logprobs.logprob, *(logprob for _, logprob in event.logprobs.top)]
        assert all(-math.inf < x <= 0 for x in numbers)
    assert tokens_of(events["greedy"]) == follow([1], lambda h: plain(h, set(range(VOCAB_SIZE))), 4)


# Reliability T8: ids outside the vocabulary would be written into a neighbour's row.
@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"allowed_token_ids": (1, VOCAB_SIZE)},
        {"stop_token_ids": (VOCAB_SIZE,)},
        {"logit_bias": {2**31 - 1: 1.0}},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(given))}: got .* to {VOCAB_SIZE - 1}"):
        check_params(SamplingParams(**given), vocab_size=VOCAB_SIZE)
    inside = {"logit_bias": {VOCAB_SIZE - 1: 1.0}, "allowed_token_ids": (0, VOCAB_SIZE - 1)}
    check_params(SamplingParams(**inside), vocab_size=VOCAB_SIZE)


def test_a_request_under_way_keeps_its_bias() -> None:
    bias = {77: 100.0}
    params = SamplingParams(logit_bias=bias)
    bias[78] = 100.0
    assert params.logit_bias == {77: 100.0}
