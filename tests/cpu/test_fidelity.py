"""Planes and rings of an adaptive cache under random traffic, against a store of their content."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from subten.cache.allocator import PageAllocator
from subten.cache.fidelity import Fidelity, FidelityPolicy, Span
from subten.cache.planes import PlaneNumbers, Rung
from subten.core import PAGE_SIZE, Batch, BatchItem, FinishReason, Request, SamplingParams
from subten.engine.scheduler import Scheduler

BYTES = PlaneNumbers(key=325, base=225, fine=200, cold=160, sink=70, ring=50)


def make_fidelity(counts: PlaneNumbers, **policy: object) -> Fidelity:
    return Fidelity(FidelityPolicy(**policy), counts=counts, plane_bytes=BYTES)


def end_of(item: BatchItem) -> int:
    return item.start + item.num_tokens


class Traffic:
    """A scheduler and a fidelity under random requests; every step is checked.

    `planes` has a tag for each plane instead of bytes: the tokens up to the end of its page.
    """

    def __init__(self, rng: random.Random, *, num_steps: int, is_tight: bool = False) -> None:
        self.rng = rng
        num_pages, num_seqs, num_batched = rng.randint(10, 24), rng.randint(1, 4), 150
        has_cold = is_tight or rng.random() < 0.5
        written = 2 * num_seqs + 3
        num_cold = rng.randint(1, max(1, num_pages - written)) if has_cold else 0
        counts = PlaneNumbers(
            key=num_pages,
            base=max(num_pages - num_cold, min(num_pages, written)),
            fine=rng.randint(0, num_pages),
            cold=num_cold,
            sink=rng.choice([0, num_seqs + 1, 2 * num_seqs + 1]),
            ring=rng.choice([0, num_seqs]),
        )
        value_bytes = 500.0 if is_tight else rng.choice([None, rng.uniform(200, 3000)])
        newest_pages = rng.choice([0, 1, 8])
        self.fidelity = make_fidelity(counts, value_bytes=value_bytes, newest_pages=newest_pages)
        allocator = PageAllocator(num_pages, listener=self.fidelity)
        self.scheduler = Scheduler(
            allocator,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched,
            max_model_len=1000,
            on_release=self.fidelity.leave,
        )
        self.planes: dict[tuple[str, int], tuple[int, ...]] = {}
        self.total_P = np.zeros(num_pages, dtype=np.int64)
        self.lowest: dict[int, Rung] = {}
        self.num_requests = self.num_shared = 0
        self.was_idle: set[int] = set()
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        rng, scheduler, fidelity = self.rng, self.scheduler, self.fidelity
        if len(scheduler.waiting) < 3 and rng.random() < 0.1:
            self.add()
        if scheduler.running and rng.random() < 0.02:
            victim = rng.choice(list(scheduler.running.values()))
            scheduler.finish(victim, rng.choice([FinishReason.CANCELLED, FinishReason.ERROR]))
        self.was_idle |= set(scheduler.allocator._cached)
        batch = scheduler.schedule()
        self.was_idle -= set(scheduler.allocator._free)
        spans = [
            Span(item.sequence.request.request_id, item.sequence.page_ids, item.start, end_of(item))
            for item in batch.items
        ]
        self.apply(fidelity.prepare(spans))
        self.compute(batch)
        if rng.random() < 0.5:
            self.total_P += np.array([rng.randint(0, 100) for _ in self.total_P])
            fidelity.count_mass(self.total_P)
        self.apply(fidelity.settle(spans))
        self.check_allowance(batch)
        scheduler.commit(batch, [3 if item.needs_token else None for item in batch.items])
        for sequence in list(scheduler.running.values()):
            is_full = len(sequence.token_ids) == scheduler.max_seq_len
            if is_full or (sequence.num_output > 0 and rng.random() < 0.01):
                scheduler.finish(sequence, FinishReason.LENGTH)
        if rng.random() < 0.3:
            scheduler.check_integrity()
            fidelity.check_integrity()
            assert set(fidelity.ledger.ring_of) <= set(scheduler.running)

    def add(self) -> None:
        longest = min(500, self.scheduler.max_seq_len - 1)
        length = min(longest, self.rng.choice([1, 64, 65, 150, 400]))
        # Few distinct prompts, so that prefixes are shared.
        prompt = tuple([self.rng.choice([1, 2])] * length)
        name, params = str(self.num_requests), SamplingParams(max_tokens=100)
        request = Request(request_id=name, prompt_token_ids=prompt, sampling=params, seed=0)
        self.scheduler.add(request)
        self.num_requests += 1

    def apply(self, moves: list[tuple[int, int, int]]) -> None:
        """One launch: what it reads is what lay there before it."""
        written = [cold for _, _, cold in moves]
        assert len(set(written)) == len(written), moves
        for base, fine, cold in moves:
            tag = self.planes["base", base]
            assert fine < 0 or self.planes["fine", fine] == tag
            self.planes["cold", cold] = tag
        places = self.fidelity.ledger.places
        for page_id, place, sink in self.fidelity.take_changed():
            assert place == places[page_id]
            assert sink == self.fidelity.ledger.sink_of.get(page_id, -1)
        assert self.fidelity.take_changed() == []

    def names(self, page_id: int) -> list[tuple[str, int]]:
        place = self.fidelity.ledger.places[page_id]
        planes = zip(("base", "fine", "cold"), place.record, strict=True)
        return [("key", page_id), *(pair for pair in planes if pair[1] >= 0)]

    def compute(self, batch: Batch) -> None:
        """Write the pages of the step, and read every page and the ring of its sequences."""
        ledger = self.fidelity.ledger
        for item in batch.items:
            tokens, pages, end = item.sequence.token_ids, item.sequence.page_ids, end_of(item)
            for index in range(item.start // PAGE_SIZE, -(-end // PAGE_SIZE)):
                page_id = pages[index]
                tag = tuple(tokens[: (index + 1) * PAGE_SIZE])
                for name in self.names(page_id):
                    self.planes[name] = tag
                if index == 0 and page_id in ledger.sink_of:
                    self.planes["sink", ledger.sink_of[page_id]] = tag
                if item.start <= index * PAGE_SIZE:
                    self.lowest[page_id] = Rung.V4
            self.num_shared += item.sequence.num_cached > 0
            for index in range(-(-end // PAGE_SIZE)):
                self.read(index, pages[index], tokens[: min(end, (index + 1) * PAGE_SIZE)])
            if ledger.counts.ring:
                recent = self.fidelity.recent(item.sequence.request.request_id)
                assert recent.first == item.sequence.num_cached
                assert sorted(set(ledger.ring_of.values())) == sorted(ledger.ring_of.values())

    def read(self, index: int, page_id: int, wanted: list[int]) -> None:
        names, ledger = self.names(page_id), self.fidelity.ledger
        assert len(names) > 1, "a page without values"
        sink = ledger.sink_of.get(page_id)
        if index > 0:
            assert sink is None
        elif sink is not None:
            names.append(("sink", sink))
        else:
            # One that nobody held for a while may have lost it.
            assert ledger.counts.sink == 0 or page_id in self.was_idle
        for name in names:
            # A page that is being filled holds what its sequence knew when it was written.
            got = self.planes[name]
            length = min(len(got), len(wanted))
            assert list(got[:length]) == wanted[:length], name
        rung = self.fidelity.rung(page_id)
        assert rung >= self.lowest[page_id], "a page was promoted"
        self.lowest[page_id] = rung

    def check_allowance(self, batch: Batch) -> None:
        fidelity, policy = self.fidelity, self.fidelity.policy
        if policy.value_bytes is None:
            return
        for item in batch.items:
            pages = item.sequence.page_ids[: -(-end_of(item) // PAGE_SIZE)]
            rungs = [fidelity.rung(page) for page in pages]
            values = {Rung.V4: 425, Rung.V2: 225, Rung.COLD: 160}
            taken = sum(values[rung] for rung in rungs)
            assert taken <= policy.value_bytes or all(r >= Rung.V2 for r in rungs), rungs


def test_random_traffic_keeps_ledger_content_and_allowance() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rungs: Counter[Rung] = Counter()
    num_requests = num_shared = 0
    for index in range(12):
        traffic = Traffic(rng, num_steps=400, is_tight=index % 4 == 0)
        num_requests += traffic.num_requests
        num_shared += traffic.num_shared
        rungs.update(traffic.lowest.values())
    # Of 4,800 steps; a run reaches each rung in half of the cases, a tight one COLD in nearly all.
    assert num_requests > 60
    assert num_shared > 0
    assert {Rung.V4, Rung.V2, Rung.COLD} <= set(rungs), rungs


def grow(fidelity: Fidelity, num_pages: int, mass: list[int] | None = None) -> list[Rung]:
    """One sequence that grows a page a step; `mass` is what its pages draw each time."""
    pages: list[int] = []
    total_P = np.zeros(len(fidelity.importance_P), dtype=np.int64)
    for index in range(num_pages):
        pages.append(index)
        fidelity.page_held(index)
        span = Span("a", pages, index * PAGE_SIZE, (index + 1) * PAGE_SIZE)
        fidelity.prepare([span])
        if mass is not None:
            total_P[: len(pages)] += mass[: len(pages)]
            fidelity.count_mass(total_P)
        fidelity.settle([span])
    fidelity.check_integrity()
    return [fidelity.rung(page) for page in pages]


PLENTY = PlaneNumbers(key=32, base=32, fine=32, cold=0)


def test_the_oldest_of_the_unimportant_goes_first() -> None:
    allowed = 20 * 225 + 6 * 200
    policy = {"value_bytes": allowed, "newest_pages": 4}
    rungs = grow(make_fidelity(PLENTY, **policy), 20)
    assert rungs == [Rung.V2] * 14 + [Rung.V4] * 6
    # Page 2 draws more than twice what the hysteresis forgives.
    mass = [100] * 20
    mass[2] = 400
    rungs = grow(make_fidelity(PLENTY, **policy), 20, mass)
    assert rungs[2] is Rung.V4
    assert rungs.count(Rung.V4) == 6


def test_newest_pages_go_last() -> None:
    mass = [100] * 16 + [1] * 4
    policy = {"value_bytes": 20 * 225 + 4 * 200, "newest_pages": 4}
    rungs = grow(make_fidelity(PLENTY, **policy), 20, mass)
    assert rungs == [Rung.V2] * 16 + [Rung.V4] * 4
    rungs = grow(make_fidelity(PLENTY, **(policy | {"value_bytes": 1.0})), 20, mass)
    assert rungs == [Rung.V2] * 20


def test_a_page_that_gets_no_fine_plane_has_two_bits() -> None:
    few = PlaneNumbers(key=32, base=32, fine=3, cold=0)
    # All are young, so that none gives its plane.
    assert grow(make_fidelity(few, newest_pages=100), 8) == [Rung.V4] * 3 + [Rung.V2] * 5
    assert grow(make_fidelity(few, newest_pages=2), 8) == [Rung.V2] * 5 + [Rung.V4] * 3


def test_cold_pages_make_room() -> None:
    scarce = PlaneNumbers(key=12, base=4, fine=4, cold=8)
    rungs = grow(make_fidelity(scarce, newest_pages=1), 12)
    assert rungs[:8] == [Rung.COLD] * 8
    assert all(rung < Rung.COLD for rung in rungs[8:])
