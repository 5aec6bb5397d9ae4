"""Engine and runner with the scripted model: every token is known beforehand."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter, defaultdict
from typing import Any

import pytest
import scripted_engine
import torch
from scripted import EOS, VOCAB_SIZE, ScriptedModel, hash_script, noise_script
from scripted_engine import drain, expected, make_request, tokens_of

from subten.core import FinishReason, OverloadError, Request, RequestError, TokenEvent
from subten.engine.engine import Engine
from subten.engine.stop import NoText, TextOutput
from subten.kernels.sample import sample_torch


@pytest.fixture(autouse=True, params=[False, True], ids=["eager", "graphs"])
def has_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs a second time with single tokens through the fixed inputs of graphs."""
    monkeypatch.setattr(sys.modules[__name__], "HAS_GRAPHS", request.param)


HAS_GRAPHS = False


def make_engine(model: ScriptedModel | None = None, **settings: Any) -> Engine:
    return scripted_engine.make_engine(model, has_graphs=HAS_GRAPHS, **settings)


def test_five_together_are_each_alone() -> None:
    prompts = [list(range(10 * i, 10 * i + n)) for i, n in enumerate((1, 31, 64, 65, 130))]
    requests = [make_request(str(i), p, max_tokens=70) for i, p in enumerate(prompts)]
    together = make_engine()
    for request in requests:
        together.add(request)
    events = drain(together)
    for request in requests:
        alone = make_engine()
        alone.add(request)
        own = tokens_of(drain(alone)[request.request_id])
        assert tokens_of(events[request.request_id]) == own == expected(request)


@pytest.mark.parametrize("budget", [1, 7, 64, 65, 4096])
def test_chunked_prefill_is_unchunked_prefill(budget: int) -> None:
    request = make_request("a", list(range(200)))
    engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=1)
    engine.add(request)
    assert tokens_of(drain(engine)["a"]) == expected(request)


# Case S08.
def test_preempted_requests_stream_the_same_tokens_once() -> None:
    requests = [make_request(str(i), [i] * 40, max_tokens=250) for i in range(4)]
    engine = make_engine(num_pages=8)
    records = [engine.add(request) for request in requests]
    events = drain(engine)
    assert sum(record.sequence.num_preemptions for record in records) >= 2
    # Pages of its own that a sequence finds again are no shared prompt.
    assert [record.num_cached for record in records] == [0] * 4
    for request in requests:
        assert tokens_of(events[request.request_id]) == expected(request)


def test_shared_beginning_gives_the_tokens_of_an_unshared_one() -> None:
    prompt = [i % 251 for i in range(200)]
    engine = make_engine()
    for name in ("first", "second"):
        request = make_request(name, [*prompt, ord(name[0])])
        record = engine.add(request)
        assert tokens_of(drain(engine)[name]) == expected(request)
    assert record.num_cached == 192


def weak_hash(_parent: bytes, _salt: str, tokens: tuple[int, ...]) -> bytes:
    return bytes([sum(tokens) % 4])


# Case A17: every key collides with a quarter of the others, and nobody's tokens change.
def test_colliding_pages_are_never_another_prompts() -> None:
    engine = make_engine(page_hash=weak_hash, max_num_seqs=4, num_pages=24)
    rng = random.Random()
    beginnings = [[4 * rng.randrange(60) for _ in range(64)] for _ in range(3)]
    requests = [
        make_request(
            str(i),
            [*rng.choice(beginnings), *rng.choice(beginnings), i],
            max_tokens=4,
            tenant=rng.choice(["", "a", "b"]),
        )
        for i in range(30)
    ]
    events: list[TokenEvent] = []
    for request in requests:
        engine.add(request)
        events += engine.step()
    streams = drain(engine, events)
    for request in requests:
        assert tokens_of(streams[request.request_id]) == expected(request)
    # Of pages whose keys collide one is found, the first that was made known.
    engine.scheduler.allocator.flush()
    for name in ("first", "again"):
        record = engine.add(make_request(name, [*beginnings[0], 1], max_tokens=1))
        drain(engine)
    assert record.num_cached == 64


# Case A17, the other half: equal tokens under another tenant, model or format are other pages.
@pytest.mark.parametrize("tenant", ["", "other"])
@pytest.mark.parametrize("scope", [("m", "bf16"), ("m", "int4"), ("n", "bf16")])
def test_pages_are_found_again_under_the_same_names_alone(
    tenant: str, scope: tuple[str, ...]
) -> None:
    engine = make_engine(cache_scope=("m", "bf16"))
    engine.add(make_request("first", [1] * 130))
    drain(engine)
    engine.scheduler._cache_scope = scope
    record = engine.add(make_request("second", [1] * 130, tenant=tenant))
    assert tokens_of(drain(engine)["second"]) == expected(make_request("x", [1] * 130))
    assert record.num_cached == (128 if (tenant, scope) == ("", ("m", "bf16")) else 0)


def test_refused_for_overload_is_counted_and_leaves_no_trace() -> None:
    engine = make_engine(max_num_seqs=1, max_queue=1)
    engine.add(make_request("a", [1]))
    with pytest.raises(OverloadError):
        engine.add(make_request("b", [2]))
    assert (engine.stats.num_accepted, engine.stats.num_overloaded) == (1, 1)
    assert not engine.cancel("b")
    assert list(drain(engine)) == ["a"]


class Failing(NoText):
    """A detokeniser that fails at a token, or at the end."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.num_pushed = 0

    def push(self, token_id: int) -> str:
        self.num_pushed += 1
        if self.num_pushed == self.at:
            raise ValueError("no such byte")
        return chr(token_id)

    def flush(self) -> str:
        if self.at is None:
            raise ValueError("no such end")
        return ""


# Reliability T6: what one request's text does, no other request sees.
@pytest.mark.parametrize(("at", "num_tokens"), [(1, 1), (3, 3), (None, 10)])
def test_text_that_fails_ends_its_own_request_alone(at: int | None, num_tokens: int) -> None:
    engine = make_engine()
    own, other = make_request("own", [1]), make_request("other", [2])
    engine.add(own, TextOutput(Failing(at)))
    engine.add(other, TextOutput(Failing(99)))
    events = drain(engine)
    assert tokens_of(events["own"]) == expected(own)[:num_tokens]
    assert events["own"][-1].finish_reason is FinishReason.ERROR
    assert events["own"][-1].finish_detail.startswith("the text failed: ValueError: no such")
    assert tokens_of(events["other"]) == expected(other)
    assert engine.stats.num_ended == {FinishReason.ERROR: 1, FinishReason.LENGTH: 1}


def test_pages_that_fail_end_their_own_request_alone() -> None:
    broken: list[str] = []

    def fault(point: str) -> None:
        if point in broken:
            raise MemoryError(point)

    engine = make_engine(fault=fault)
    other = make_request("other", [2], max_tokens=20)
    engine.add(other)
    first = engine.step()
    engine.add(make_request("own", [1] * 70))
    broken.append("kv.alloc")
    first += engine.step()
    broken.clear()
    events = drain(engine, first)
    assert [e.finish_reason for e in events["own"]] == [FinishReason.ERROR]
    assert "its pages could not be had: MemoryError" in events["own"][0].finish_detail
    assert tokens_of(events["other"]) == expected(other)


# Reliability 2.3 on the true runner: whichever copy or launch fails, the next request is served.
@pytest.mark.parametrize("point", ["copy.in", "sample", "step"])
def test_whichever_call_fails_the_engine_goes_on(point: str) -> None:
    def run(fail_at: int) -> int:
        num_calls = 0

        def fault(called: str) -> None:
            nonlocal num_calls
            num_calls += called == point
            if called == point and num_calls == fail_at:
                raise RuntimeError(point)

        engine = make_engine(fault=fault, num_pages=6)
        params = {"max_tokens": 3, "presence_penalty": 0.5, "logit_bias": {EOS: -100.0}}
        for name, prompt in (("a", [1] * 70), ("b", [2]), ("c", [3] * 65)):
            engine.add(make_request(name, prompt, logprobs=1, **params))
        events: list[TokenEvent] = []
        while engine.has_work:
            try:
                events += engine.step()
            except RuntimeError:
                assert num_calls == fail_at
        assert sum(engine.stats.num_ended.values()) == 3
        assert engine.scheduler.allocator.num_used == 0
        engine.scheduler.check_integrity()
        num_before, fail_at = num_calls, 0
        clean = make_request("clean", [5] * 66, max_tokens=3)
        engine.add(clean)
        assert tokens_of(drain(engine)["clean"]) == expected(clean)
        return num_before

    for k in range(1, run(0) + 1):
        run(k)


def test_each_step_runs_at_most_one_copy_back(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Counter[str]()
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda t: copies.update(n=t.numel() > 0) or tolist(t)
    )
    model = ScriptedModel()
    engine = make_engine(model)
    engine.add(make_request("a", [1], max_tokens=4))
    drain(engine)
    # The fake copies lengths, positions and tokens itself: three a call.
    assert copies["n"] == model.num_calls * 4


# Case K20, the whole way: the NaN comes with a token, sits in the pages, and the pages are reused.
def test_nan_ends_its_own_request_only_and_leaves_with_it() -> None:
    prompts = {name: [i + 1] * 100 for i, name in enumerate("abcd")}
    model = ScriptedModel()
    model.poisoned_token = 2
    engine = make_engine(model, num_pages=9)
    requests = {name: make_request(name, prompt) for name, prompt in prompts.items()}
    records = {name: engine.add(request) for name, request in requests.items()}
    events = drain(engine)
    assert [event.finish_reason for event in events["b"]] == [FinishReason.ERROR]
    assert "prompt" in events["b"][0].finish_detail
    assert records["b"].sequence.num_output == 0
    for name in "acd":
        assert tokens_of(events[name]) == expected(requests[name])
    # The same prompt, healthy now: nothing of the poisoned pages may come back.
    model.poisoned_token = None
    again = make_request("e", prompts["b"])
    record = engine.add(again)
    assert tokens_of(drain(engine)["e"]) == expected(again)
    assert record.num_cached == 0
    assert engine.stats.num_ended[FinishReason.ERROR] == 1


def test_nan_after_some_tokens_keeps_them_and_says_where() -> None:
    def script(history: tuple[int, ...]) -> int | torch.Tensor:
        return hash_script(history) if len(history) < 8 else torch.full((VOCAB_SIZE,), torch.nan)

    engine = make_engine(ScriptedModel(script))
    engine.add(make_request("a", [1] * 5))
    events = drain(engine)["a"]
    assert [event.token_id is None for event in events] == [False, False, False, True]
    assert events[-1].finish_reason is FinishReason.ERROR
    assert "after output token 3" in events[-1].finish_detail


def test_failed_step_ends_its_requests_and_the_engine_goes_on() -> None:
    model = ScriptedModel()
    engine = make_engine(model, max_num_seqs=1)
    engine.add(make_request("a", [1]))
    engine.add(make_request("b", [2]))
    model.error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    model.error = None
    events = drain(engine)
    assert [e.finish_reason for e in events["a"]] == [FinishReason.ERROR]
    assert events["a"][0].finish_detail == "the step failed: RuntimeError: no memory"
    assert tokens_of(events["b"]) == expected(make_request("b", [2]))


# Case S05, and S07 for the calls that come too late.
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_cancel_frees_pages_at_once_and_tells_once(num_steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=2)
    engine.add(make_request("a", [1] * 100))
    for _ in range(num_steps):
        engine.step()
    assert engine.cancel("a")
    assert engine.scheduler.allocator.num_used == 0
    assert engine.has_work
    assert not engine.cancel("a")
    assert not engine.cancel("unknown")
    events = drain(engine)
    assert [e.finish_reason for e in events["a"]] == [FinishReason.CANCELLED]
    assert engine.stats.num_late_calls == 2
    assert engine.stats.num_ended == {FinishReason.CANCELLED: 1}


def test_full_sequence_ends_with_length() -> None:
    engine = make_engine(max_model_len=70)
    engine.add(make_request("a", [1] * 64, max_tokens=1000))
    events = drain(engine)["a"]
    assert len(tokens_of(events)) == 6
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_end_token_counts_and_ends() -> None:
    engine = make_engine(ScriptedModel(lambda h: 5 if len(h) < 3 else EOS))
    engine.add(make_request("a", [1]))
    engine.add(make_request("b", [1], ignore_eos=True, max_tokens=4))
    engine.add(make_request("c", [1], stop_token_ids=(5,)))
    events = drain(engine)
    assert tokens_of(events["a"]) == [5, 5, EOS]
    assert tokens_of(events["b"]) == [5, 5, EOS, EOS]
    assert tokens_of(events["c"]) == [5]
    reasons = [events[name][-1].finish_reason for name in "abc"]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]


# Case S10: a seed decides alone, whoever sits beside it and wherever its row is.
def test_seeded_request_does_not_see_its_neighbours() -> None:
    def run(neighbours: list[Request], *, first: bool) -> list[int]:
        engine = make_engine(ScriptedModel(noise_script))
        own = make_request("own", [1, 2, 3], seed=42, temperature=1.0, max_tokens=20)
        for request in [own, *neighbours] if first else [*neighbours, own]:
            engine.add(request)
        return tokens_of(drain(engine)["own"])

    alone = run([], first=True)
    assert len(set(alone)) > 10
    for seed, temperature in ((7, 1.0), (42, 0.0), (2**63 - 1, 0.5)):
        other = make_request("other", [9] * 70, seed=seed, temperature=temperature, top_k=5)
        assert run([other], first=True) == run([other], first=False) == alone
    same = make_request("same", [1, 2, 3], seed=42, temperature=1.0, max_tokens=20)
    assert run([same], first=False) == alone


def test_seed_changes_the_tokens_and_each_token_its_random_numbers() -> None:
    flat = torch.zeros(VOCAB_SIZE)
    engine = make_engine(ScriptedModel(lambda _: flat))
    for seed in range(5):
        engine.add(make_request(str(seed), [1], seed=seed, temperature=1.0, max_tokens=30))
    outputs = [tuple(tokens_of(own)) for own in drain(engine).values()]
    assert len(set(outputs)) == 5
    # 30 draws of 320 equal tokens repeat about once; a stuck generator repeats 29 times.
    assert all(len(set(output)) > 20 for output in outputs)


def test_random_numbers_depend_on_seed_and_output_index_alone() -> None:
    flat = torch.zeros(VOCAB_SIZE)
    engine = make_engine(ScriptedModel(lambda _: flat), max_num_batched_tokens=16)
    for name, prompt in (("short", [1]), ("long", [2] * 77)):
        engine.add(make_request(name, prompt, seed=3, temperature=1.0, ignore_eos=True))
    events = drain(engine)
    assert tokens_of(events["short"]) == tokens_of(events["long"])


@pytest.mark.parametrize("has_graphs", [False], indirect=True, ids=["eager"])
@pytest.mark.parametrize(("num_seqs", "num_calls"), [(1, 1), (5, 5), (8, 8), (9, 1)])
def test_few_decoders_on_a_cpu_go_alone(num_seqs: int, num_calls: int) -> None:
    model = ScriptedModel()
    engine = make_engine(model, max_num_seqs=16)
    for i in range(num_seqs):
        engine.add(make_request(str(i), [i, i]))
    engine.step()
    assert model.num_calls == num_seqs
    engine.step()
    assert model.num_calls == num_seqs + num_calls


def test_chunk_of_one_token_among_many_decoders_keeps_its_place() -> None:
    engine = make_engine(max_num_seqs=12, max_num_batched_tokens=13)
    requests = [make_request(str(i), [i], max_tokens=30) for i in range(10)]
    # Ten decoders leave room for three prompt tokens a step: at last two of "x", one of "y".
    requests += [make_request("x", [20] * 14, max_tokens=3), make_request("y", [31])]
    for request in requests[:10]:
        engine.add(request)
    first = engine.step()
    for request in requests[10:]:
        engine.add(request)
    events = drain(engine, first)
    for request in requests:
        assert tokens_of(events[request.request_id]) == expected(request)


def test_preempted_seeded_request_draws_the_same_tokens() -> None:
    def run(num_pages: int) -> tuple[list[list[int]], int]:
        engine = make_engine(ScriptedModel(noise_script), num_pages=num_pages)
        for i in range(3):
            prompt = [i] * (50 + 5 * i)
            params = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
            engine.add(make_request(str(i), prompt, seed=i, **params))
        events = drain(engine)
        return [tokens_of(events[str(i)]) for i in range(3)], engine.scheduler.num_preemptions

    calm, _ = run(64)
    tight, num_preemptions = run(3)
    assert num_preemptions > 0
    assert tight == calm


def test_penalties_count_prompt_and_output_of_their_own_request() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[10], logits[11], logits[12] = 3.0, 2.5, 2.0
    model = ScriptedModel(lambda _: logits)

    def run(*requests: Request) -> dict[str, list[int]]:
        engine = make_engine(model)
        for request in requests:
            engine.add(request)
        return {name: tokens_of(own) for name, own in drain(engine).items()}

    # presence 2.0: each token pays once, so the next best follows, then the best again.
    presence = make_request("p", [10], max_tokens=4, presence_penalty=2.0)
    # frequency 1.0: it pays each time. 3 | 2.5 (10 at 2) | 10, 12 at 2, lowest id | 12 ...
    frequency = make_request("f", [10], max_tokens=4, frequency_penalty=1.0)
    # repetition 2: prompt counts too. 10 is at 1.5 from the start; 11, then 12 at 2.0.
    repetition = make_request("r", [10], max_tokens=3, repetition_penalty=2.0)
    plain = make_request("n", [10], max_tokens=3)
    together = run(presence, frequency, repetition, plain)
    assert together["p"] == [10, 11, 12, 10]
    assert together["f"] == [10, 11, 10, 12]
    assert together["r"] == [11, 12, 10]
    assert together["n"] == [10, 10, 10]
    for request in (presence, frequency, repetition):
        assert run(request)[request.request_id] == together[request.request_id]


@pytest.mark.parametrize("has_graphs", [False], indirect=True, ids=["eager"])
def test_penalties_are_dense_only_where_someone_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    seen = []

    def sample(logits_SV: torch.Tensor, params: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(params.prompt_mask_SV is not None)
        return sample_torch(logits_SV, params)

    monkeypatch.setattr(engine.runner._sampler, "_sample", sample)
    engine.add(make_request("a", [1], max_tokens=2))
    drain(engine)
    engine.add(make_request("b", [1], max_tokens=2, presence_penalty=0.5))
    drain(engine)
    assert seen == [False, False, True, True]
    assert engine.runner._sampler._counts == {}


def test_ids_in_use_and_impossible_prompts_are_refused_and_not_counted() -> None:
    engine = make_engine(num_pages=1)
    engine.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="got 64 tokens; allowed: 1 to 63"):
        engine.add(make_request("b", [1] * 64))
    assert engine.stats.num_accepted == 1
    assert list(drain(engine)) == ["a"]


def test_random_traffic_gives_every_request_its_tokens_and_one_end() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = make_engine(num_pages=5, max_num_seqs=4, max_num_batched_tokens=70)
    requests: dict[str, Request] = {}
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    cancelled = set()
    for number in itertools.count():
        if number < 250 and rng.random() < 0.2:
            prompt = [rng.choice([3, 4])] * rng.randint(1, 150)
            request = make_request(str(number), prompt, max_tokens=rng.choice([1, 9, 80]))
            requests[request.request_id] = request
            engine.add(request)
        if requests and rng.random() < 0.02:
            name = rng.choice(list(requests))
            if engine.cancel(name):
                cancelled.add(name)
        for event in engine.step():
            events[event.request_id].append(event)
        if number >= 250 and not engine.has_work:
            break
    engine.scheduler.check_integrity()
    assert events.keys() == requests.keys()
    for name, request in requests.items():
        own = events[name]
        assert [e.finish_reason is not None for e in own] == [False] * (len(own) - 1) + [True]
        wanted = expected(request)
        if name in cancelled:
            wanted = wanted[: len(tokens_of(own))]
        assert tokens_of(own) == wanted
    assert sum(engine.stats.num_ended.values()) == len(requests) == engine.stats.num_accepted


def test_engine_stamps_tokens_with_its_clock() -> None:
    ticks = iter([100.5, 100.505, 100.51])
    engine = make_engine(clock=ticks.__next__)
    request = make_request("a", [1], max_tokens=3)
    record = engine.add(request)
    events = drain(engine)["a"]
    assert [event.time_s for event in events] == [100.5, 100.505, 100.51]
    assert record.timings.tpot_ms == pytest.approx(5)
    assert record.timings.ttft_ms == pytest.approx((100.5 - request.arrival_s) * 1e3)
