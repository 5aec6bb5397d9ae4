"""The scheduler alone: order, budgets, preemption, refusals, and long random runs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from subten.cache.allocator import PageAllocator, PageHash, page_key
from subten.core import (
    PAGE_SIZE,
    Batch,
    Fault,
    FinishReason,
    OverloadError,
    Request,
    RequestError,
    SamplingParams,
    Sequence,
    SequenceStatus,
    no_fault,
)
from subten.engine.scheduler import BAD_LOGITS, Scheduler


def make_scheduler(
    num_pages: int,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 10**6,
    enable_prefix_caching: bool = True,
    page_hash: PageHash = page_key,
    fault: Fault = no_fault,
    **settings: Any,
) -> Scheduler:
    return Scheduler(
        PageAllocator(num_pages, enable_prefix_caching, page_hash=page_hash, fault=fault),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **settings,
    )


def make_request(
    name: str, num_prompt: int, *, max_tokens: int = 16, first: int = 0, tenant: str = ""
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(first, first + num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
        tenant=tenant,
    )


def next_token(sequence: Sequence) -> int:
    """A token that depends on everything before it, so that a lost or repeated one shows."""
    return hash(tuple(sequence.token_ids)) % 1000


def run_step(scheduler: Scheduler) -> Batch:
    """Schedule, compute and commit one step; end sequences at their `max_tokens` or full length."""
    batch = scheduler.schedule()
    scheduler.commit(
        batch, [next_token(i.sequence) if i.needs_token else None for i in batch.items]
    )
    for item in batch.items:
        sequence = item.sequence
        is_full = len(sequence.token_ids) >= scheduler.max_seq_len
        if sequence.num_output >= sequence.request.sampling.max_tokens or is_full:
            scheduler.finish(sequence, FinishReason.LENGTH)
    return batch


def drain(scheduler: Scheduler, max_steps: int = 100_000) -> list[Batch]:
    batches = []
    while scheduler.has_work:
        batches.append(run_step(scheduler))
        assert len(batches) <= max_steps
    scheduler.check_integrity()
    assert scheduler.allocator.num_used == 0
    return batches


def expected_tokens(request: Request) -> list[int]:
    sequence = Sequence.from_request(request)
    while sequence.num_output < request.sampling.max_tokens:
        sequence.token_ids.append(next_token(sequence))
    return sequence.token_ids


# Case S01, with pages of 64: a pool of 128 tokens under a context limit of 256.
def test_request_that_can_never_fit_is_refused_and_the_others_finish() -> None:
    scheduler = make_scheduler(2, max_model_len=256)
    with pytest.raises(
        RequestError, match=r"got 200 tokens; allowed: 1 to 127 .*share 128 tokens, all the cache"
    ):
        scheduler.add(make_request("long", 200))
    sequences = [scheduler.add(make_request(str(i), 10)) for i in range(10)]
    drain(scheduler)
    assert all(s.token_ids == expected_tokens(s.request) for s in sequences)


@pytest.mark.parametrize("num_prompt", [0, 128, 129])
def test_prompt_without_room_for_one_token_is_refused(num_prompt: int) -> None:
    with pytest.raises(RequestError, match=f"got {num_prompt} tokens"):
        make_scheduler(2).add(make_request("a", num_prompt))


def test_longest_prompt_that_fits_yields_one_token() -> None:
    scheduler = make_scheduler(2)
    sequence = scheduler.add(make_request("a", 127))
    drain(scheduler)
    assert sequence.num_output == 1


def test_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    scheduler = make_scheduler(2)
    scheduler.add(make_request("a", 3))
    with pytest.raises(RequestError, match="request_id: got 'a'"):
        scheduler.add(make_request("a", 3))
    drain(scheduler)
    scheduler.add(make_request("a", 3))


def test_decoders_go_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    scheduler = make_scheduler(32, max_num_batched_tokens=100)
    for name in "ab":
        scheduler.add(make_request(name, 5, max_tokens=1000))
    run_step(scheduler)
    scheduler.add(make_request("long", 300, first=5000))
    chunks = []
    for _ in range(4):
        batch = run_step(scheduler)
        assert batch.num_tokens <= 100
        assert [i.sequence.request.request_id for i in batch.items] == ["a", "b", "long"]
        assert [i.num_tokens for i in batch.items[:2]] == [1, 1]
        chunks.append((batch.items[2].start, batch.items[2].num_tokens))
    # 300 = 3 * 98 + 6, and then it decodes.
    assert chunks == [(0, 98), (98, 98), (196, 98), (294, 6)]
    assert run_step(scheduler).num_tokens == 3


def test_a_long_prompt_holds_decoders_no_longer_than_asked() -> None:
    scheduler = make_scheduler(32, max_num_batched_tokens=100, max_prefill_tokens=30)
    scheduler.add(make_request("alone", 90, max_tokens=1))
    # Nobody waits for a token: the whole budget.
    assert run_step(scheduler).num_tokens == 90
    for name in "ab":
        scheduler.add(make_request(name, 5, max_tokens=1000, first=1000 + ord(name)))
    run_step(scheduler)
    for i in range(3):
        scheduler.add(make_request(f"long {i}", 70, max_tokens=2, first=5000 + 1000 * i))
    seen = []
    while len(scheduler.running) > 2 or scheduler.waiting:
        batch = run_step(scheduler)
        chunks = [i.num_tokens for i in batch.items if i.num_tokens > 1]
        assert [i.sequence.request.request_id for i in batch.items[:2]] == ["a", "b"]
        # The last token of a prompt may come as a chunk of one.
        assert sum(chunks) <= 30
        seen.append(batch.num_tokens - sum(i.num_tokens == 1 for i in batch.items[:3]))
    # 3 * 70 tokens, 30 a step.
    assert len(seen) in (8, 9), seen


def test_no_more_wait_than_allowed() -> None:
    scheduler = make_scheduler(2, max_num_seqs=1, max_queue=2)
    for name in "ab":
        scheduler.add(make_request(name, 10))
    with pytest.raises(OverloadError, match="queue: 2 requests are waiting; allowed: 2"):
        scheduler.add(make_request("c", 10))
    # What can never be served is told so, queue or not.
    with pytest.raises(RequestError, match="got 200 tokens"):
        scheduler.add(make_request("long", 200))
    run_step(scheduler)
    scheduler.add(make_request("c", 10))
    with pytest.raises(OverloadError):
        scheduler.add(make_request("d", 10))
    drain(scheduler)
    scheduler.add(make_request("d", 10))


def test_pages_are_shared_within_a_tenant_alone() -> None:
    """Names that run into each other are no less apart."""
    tenants = ["", "a", "ab", "1:a", "0:"]
    scopes: list[tuple[str, ...]] = [(), ("m",), ("m", "int4"), ("mint4",), ("m", "int", "4")]
    salts = set()
    for scope in scopes:
        scheduler = make_scheduler(32, cache_scope=scope)
        for tenant in tenants:
            sequences = [
                scheduler.add(make_request(str(i), 130, max_tokens=1, tenant=tenant))
                for i in range(2)
            ]
            run_step(scheduler)
            drain(scheduler)
            again = scheduler.add(make_request("again", 130, max_tokens=1, tenant=tenant))
            drain(scheduler)
            assert [s.num_cached for s in (*sequences, again)] == [0, 0, 128], (scope, tenant)
            salts.add(scheduler._salt(again))
    assert len(salts) == len(tenants) * len(scopes)


@pytest.mark.parametrize("num_running", [0, 2])
def test_pages_that_cannot_be_had_fail_their_own_sequence(num_running: int) -> None:
    is_broken = False

    def fault(point: str) -> None:
        if is_broken:
            raise MemoryError(point)

    scheduler = make_scheduler(16, fault=fault)
    # Two pages of its prompt are known, and must not stay held.
    scheduler.add(make_request("before", 130, max_tokens=1))
    drain(scheduler)
    others = [
        scheduler.add(make_request(str(i), 30, max_tokens=50, first=1000 * i + 500))
        for i in range(num_running)
    ]
    if others:
        run_step(scheduler)
    own = scheduler.add(make_request("own", 130))
    later = scheduler.add(make_request("later", 10, first=7000))
    is_broken = True
    batch = run_step(scheduler)
    assert len(batch.items) == num_running
    ((failed, detail),) = scheduler.take_failed()
    assert failed is own
    assert detail == "its pages could not be had: MemoryError: kv.alloc"
    assert scheduler.take_failed() == []
    scheduler.finish(failed, FinishReason.ERROR, detail)
    is_broken = False
    scheduler.check_integrity()
    drain(scheduler)
    for sequence in (*others, later):
        assert sequence.token_ids == expected_tokens(sequence.request)


def test_decoder_that_gets_no_page_fails_alone() -> None:
    is_broken = False

    def fault(point: str) -> None:
        if is_broken:
            raise MemoryError(point)

    scheduler = make_scheduler(16, fault=fault)
    own = scheduler.add(make_request("own", 62, max_tokens=50))
    other = scheduler.add(make_request("other", 10, max_tokens=50, first=1000))
    for _ in range(2):
        run_step(scheduler)
    # The third step fills its page, and takes the next one early.
    is_broken = True
    batch = run_step(scheduler)
    assert [item.sequence for item in batch.items] == [other]
    ((failed, _),) = scheduler.take_failed()
    assert failed is own
    scheduler.finish(failed, FinishReason.ERROR)
    is_broken = False
    drain(scheduler)
    assert other.token_ids == expected_tokens(other.request)


def test_no_more_sequences_than_allowed() -> None:
    scheduler = make_scheduler(32, max_num_seqs=3)
    for i in range(7):
        scheduler.add(make_request(str(i), 2, max_tokens=2))
    assert len(run_step(scheduler).items) == 3
    drain(scheduler)


def test_budget_below_one_token_a_sequence_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        make_scheduler(2, max_num_seqs=4, max_num_batched_tokens=3)


def test_shared_beginning_is_computed_once() -> None:
    scheduler = make_scheduler(32)
    scheduler.add(make_request("a", 130, max_tokens=1))
    drain(scheduler)
    sequence = scheduler.add(make_request("b", 130, max_tokens=1))
    batch = run_step(scheduler)
    assert sequence.num_cached == 128
    assert [(i.start, i.num_tokens) for i in batch.items] == [(128, 2)]


def test_last_prompt_token_is_always_computed() -> None:
    scheduler = make_scheduler(32)
    for name in "ab":
        sequence = scheduler.add(make_request(name, 128, max_tokens=1))
        drain(scheduler)
    # Both pages are known, but logits come from a computed token only.
    assert sequence.num_cached == 64
    assert sequence.num_output == 1


def test_bad_logits_move_nothing_and_end_forgets_the_pages() -> None:
    scheduler = make_scheduler(32, max_num_batched_tokens=64)
    bad = scheduler.add(make_request("bad", 100))
    batch = scheduler.schedule()
    scheduler.commit(batch, [None])
    salt = scheduler._salt(bad)
    assert scheduler.allocator.match_prefix(bad.token_ids[:64], salt=salt) != []
    scheduler.allocator.release(bad.page_ids[:1])
    batch = scheduler.schedule()
    scheduler.commit(batch, [BAD_LOGITS])
    assert (bad.num_computed, bad.num_output) == (64, 0)
    scheduler.finish(bad, FinishReason.ERROR, "NaN")
    assert scheduler.allocator.match_prefix(bad.token_ids[:64], salt=salt) == []
    assert scheduler.allocator.num_free == 32
    scheduler.check_integrity()


# Case S08: each of four sequences is preempted at least once, and none notices.
def test_preempted_sequences_lose_nothing() -> None:
    scheduler = make_scheduler(8)
    requests = [make_request(str(i), 40, max_tokens=300, first=1000 * i) for i in range(4)]
    sequences = [scheduler.add(request) for request in requests]
    drain(scheduler)
    assert sum(s.num_preemptions > 0 for s in sequences) >= 2, scheduler.num_preemptions
    for sequence in sequences:
        assert sequence.token_ids == expected_tokens(sequence.request)


# Case S03: eight streams of twelve pages in a pool of sixteen.
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_is_bounded_and_every_step_moves_on(enable_prefix_caching: bool) -> None:
    scheduler = make_scheduler(16, enable_prefix_caching=enable_prefix_caching)
    num_tokens = 12 * PAGE_SIZE
    sequences = [
        scheduler.add(make_request(str(i), 8, max_tokens=num_tokens - 8, first=1000 * i))
        for i in range(8)
    ]
    batches = drain(scheduler)
    assert all(batch.items for batch in batches)
    for age, sequence in enumerate(sequences):
        assert sequence.token_ids == expected_tokens(sequence.request)
        # A preemption needs an older sequence to take a page: at most 12 pages for each of them.
        assert sequence.num_preemptions <= 12 * age, (age, sequence.num_preemptions)
    # What was lost to recomputing stays small against the 8 * 768 tokens of useful work.
    computed = sum(batch.num_tokens for batch in batches)
    assert computed < 2 * 8 * num_tokens, computed


def test_preempted_sequence_goes_before_later_arrivals() -> None:
    scheduler = make_scheduler(3, max_num_seqs=2)
    for name, num_prompt in (("a", 50), ("b", 55), ("c", 10)):
        scheduler.add(make_request(name, num_prompt, max_tokens=30, first=1000 * num_prompt))
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    assert list(scheduler.running) == ["a"]
    assert list(scheduler.waiting) == ["b", "c"]
    drain(scheduler)


def test_admission_leaves_a_page_of_growth_for_each_running_sequence() -> None:
    scheduler = make_scheduler(3)
    scheduler.add(make_request("a", 60, max_tokens=30))
    run_step(scheduler)
    scheduler.add(make_request("b", 100, max_tokens=1, first=5000))
    while "a" in scheduler.running:
        # Two pages are free until "a" grows, and "b" needs two: it would lose them at once.
        assert "b" in scheduler.waiting
        run_step(scheduler)
    drain(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_prompt_that_waits_for_room_is_not_hashed_at_every_step() -> None:
    num_hashes = 0

    def counted(*page: Any) -> bytes:
        nonlocal num_hashes
        num_hashes += 1
        return page_key(*page)

    scheduler = make_scheduler(8, page_hash=counted)
    scheduler.add(make_request("first", 300, max_tokens=1))
    drain(scheduler)
    scheduler.add(make_request("old", 60, max_tokens=150, first=5000))
    run_step(scheduler)
    waiting = scheduler.add(make_request("waits", 450, max_tokens=2))
    run_step(scheduler)
    before = num_hashes
    while "old" in scheduler.running:
        assert waiting.status is SequenceStatus.WAITING
        run_step(scheduler)
    # Three pages of the one that runs; the four that the waiting one shares were hashed before.
    assert num_hashes <= before + 3
    drain(scheduler)
    assert waiting.token_ids == expected_tokens(waiting.request)


def test_a_page_is_taken_a_step_early_where_there_are_enough() -> None:
    for max_tokens, num_pages, is_early in ((9, 5, True), (3, 5, False), (9, 4, False)):
        scheduler = make_scheduler(num_pages)
        sequences = [
            scheduler.add(make_request(str(i), 60 + 2 * i, max_tokens=max_tokens, first=1000 * i))
            for i in range(2)
        ]
        for _ in range(2):
            run_step(scheduler)
        assert [len(s.page_ids) for s in sequences] == [1, 1]
        # This step fills the page of the second, which goes on unless its answer ends with it.
        run_step(scheduler)
        assert len(sequences[1].page_ids) == (1 + is_early if max_tokens > 3 else 0)
        scheduler.check_integrity()
        drain(scheduler)
        for sequence in sequences:
            assert sequence.token_ids == expected_tokens(sequence.request)
        assert scheduler.num_preemptions == 0


def test_oldest_is_never_preempted() -> None:
    scheduler = make_scheduler(4)
    sequences = [
        scheduler.add(make_request(str(i), 60, max_tokens=190, first=1000 * i)) for i in range(3)
    ]
    drain(scheduler)
    assert sequences[0].num_preemptions == 0
    assert scheduler.num_preemptions > 0


def test_cancelled_while_queued_never_starts() -> None:
    scheduler = make_scheduler(2, max_num_seqs=1)
    scheduler.add(make_request("a", 10))
    queued = scheduler.add(make_request("b", 10))
    run_step(scheduler)
    scheduler.finish(queued, FinishReason.CANCELLED)
    drain(scheduler)
    assert queued.num_output == 0
    assert queued.num_computed == 0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_cancelled_frees_its_pages_at_once(num_steps: int) -> None:
    scheduler = make_scheduler(8, max_num_batched_tokens=64, max_num_seqs=4)
    sequence = scheduler.add(make_request("a", 100))
    for _ in range(num_steps):
        run_step(scheduler)
    scheduler.finish(sequence, FinishReason.CANCELLED)
    assert scheduler.allocator.num_used == 0
    scheduler.check_integrity()


def simulate(seed: int, num_steps: int, *, num_pages: int, max_num_seqs: int) -> Counter[str]:
    """Random arrivals, ends and cancels; invariants of cases S02, S03 and S04 at every step."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([8, 61, 256]),
        max_model_len=rng.choice([65, 256, 2000]),
        enable_prefix_caching=rng.random() < 0.8,
    )
    allocator = scheduler.allocator
    seen: Counter[str] = Counter()
    live: dict[str, Sequence] = {}
    for step in range(num_steps):
        if rng.random() < 0.2 and len(scheduler.waiting) < 12:
            request = make_request(
                str(step),
                rng.randint(1, min(rng.choice([9, 90, 300]), scheduler.max_seq_len - 1)),
                max_tokens=rng.choice([1, 7, 100, 400]),
                first=rng.choice([0, 0, 500]),
            )
            live[request.request_id] = scheduler.add(request)
            seen["added"] += 1
        if live and rng.random() < 0.01:
            scheduler.finish(live.pop(rng.choice(list(live))), FinishReason.CANCELLED)
            seen["cancelled"] += 1
        batch = scheduler.schedule()
        # S02: whoever waits, something moves; the oldest of all in particular.
        assert bool(batch.items) == scheduler.has_work
        if batch.items:
            oldest = next(iter(scheduler.running.values()))
            assert any(item.sequence is oldest for item in batch.items)
        assert batch.num_tokens <= scheduler.max_num_batched_tokens
        tokens = [rng.randrange(3) if item.needs_token else None for item in batch.items]
        if batch.items and rng.random() < 0.005:
            tokens[rng.randrange(len(tokens))] = BAD_LOGITS
        scheduler.commit(batch, tokens)
        for item, token in zip(batch.items, tokens, strict=True):
            sequence = item.sequence
            reason = None
            if token == BAD_LOGITS:
                reason = FinishReason.ERROR
            elif token is not None and (
                sequence.num_output >= sequence.request.sampling.max_tokens
                or len(sequence.token_ids) >= scheduler.max_seq_len
            ):
                reason = FinishReason.LENGTH
            if reason is not None:
                scheduler.finish(sequence, reason)
                del live[sequence.request.request_id]
                seen[reason.value] += 1
        total = allocator.num_free + allocator.num_used + allocator.num_cached
        assert total == allocator.num_pages
        if step % 50 == 0:
            scheduler.check_integrity()
    while scheduler.has_work:
        run_step(scheduler)
    allocator.flush()
    scheduler.check_integrity()
    assert allocator.num_free == allocator.num_pages
    seen["preempted"] = scheduler.num_preemptions
    return seen


def test_random_runs_keep_every_invariant() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    seen: Counter[str] = Counter()
    pools = [(pages, seqs) for pages in (1, 3, 4, 5, 7, 9) for seqs in (1, 3, 4, 8)]
    for part, (pages, seqs) in enumerate(pools * 4):
        seen.update(simulate(seed + part, 1100, num_pages=pages, max_num_seqs=seqs))
    # A run that never gets into trouble shows nothing. In 16 runs the rarest kind, preemption, came
    # 165 +- 24 times.
    for kind in ("added", "cancelled", "error", "length", "preempted"):
        assert seen[kind] > 50, seen


@pytest.mark.parametrize("is_called", [True, False])
def test_pages_are_hashed_while_the_step_runs(is_called: bool) -> None:
    """A commit has nothing left to hash then; without, it does so itself, and finds the same."""
    hashed: list[bytes] = []

    def counted(parent: bytes, salt: str, tokens: tuple[int, ...]) -> bytes:
        hashed.append(page_key(parent, salt, tokens))
        return hashed[-1]

    scheduler = make_scheduler(20, page_hash=counted)
    sequence = scheduler.add(make_request("a", 3 * PAGE_SIZE, max_tokens=PAGE_SIZE + 1))
    for _ in range(PAGE_SIZE):
        batch = scheduler.schedule()
        if is_called:
            batch.meanwhile()
            batch.meanwhile()
        num_hashed = len(hashed)
        scheduler.commit(batch, [next_token(item.sequence) for item in batch.items])
        assert len(hashed) == num_hashed or not is_called
    assert len(hashed) == 3, "each page once, whoever hashes it"
    run_step(scheduler)
    # The last output token has no keys yet, and a prompt's last token is always computed.
    assert len(hashed) == 4
    again = scheduler.add(make_request("b", 4 * PAGE_SIZE))
    again.token_ids[:] = [*sequence.token_ids[: 4 * PAGE_SIZE], 1]
    scheduler.schedule()
    assert again.num_cached == 4 * PAGE_SIZE
