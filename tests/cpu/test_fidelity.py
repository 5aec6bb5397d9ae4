"""The ladder of an adaptive cache under random traffic, against a store that knows its content."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np

from subten.cache.allocator import PageAllocator
from subten.cache.fidelity import Fidelity, FidelityPolicy, Move, Span
from subten.cache.planes import KIND_BASE, KIND_HOT, Place, PlaneNumbers, Rung
from subten.core import PAGE_SIZE, Batch, BatchItem, FinishReason, Request, SamplingParams
from subten.engine.scheduler import Scheduler

BYTES = PlaneNumbers(hot=1600, base=225, fine=100, cold=160, sink=70)


class Store:
    """Planes with a tag in each instead of bytes; a tag is what a page's tokens are."""

    def __init__(self) -> None:
        self.planes: dict[tuple[str, int], object] = {}

    def write(self, place: Place, tag: object) -> None:
        assert place.kind == KIND_HOT
        self.planes["hot", place.first] = tag

    def names(self, place: Place) -> list[tuple[str, int]]:
        first = [(("hot", "base", "cold")[place.kind], place.first)]
        return first + [("fine", fine) for fine in (place.fine_k, place.fine_v) if fine >= 0]

    def read(self, place: Place) -> object:
        tags = {self.planes[name] for name in self.names(place)}
        assert len(tags) == 1, (place, tags)
        return tags.pop()

    def apply(self, moves: list[Move]) -> None:
        """Each run of one kind of move is a launch: all of its reads may come after its writes."""
        while moves:
            kinds = (moves[0].source.kind, moves[0].target.kind)
            launch = [m for m in moves if (m.source.kind, m.target.kind) == kinds]
            assert launch == moves[: len(launch)], "moves of one kind lie apart"
            moves = moves[len(launch) :]
            written = [name for m in launch for name in self.names(m.target)]
            assert len(set(written)) == len(written), "two moves write one plane"
            if kinds == (KIND_BASE, KIND_BASE):
                for m in launch:
                    assert set(self.names(m.target)) < set(self.names(m.source)), m
                continue
            read = {name for m in launch for name in self.names(m.source)}
            assert not read & set(written), "a move reads what another one writes"
            for m in launch:
                tag = self.read(m.source)
                if m.sink >= 0:
                    self.planes["sink", m.sink] = tag
                for name in self.names(m.target):
                    self.planes[name] = tag


def make_fidelity(counts: PlaneNumbers, num_pages: int, **policy: object) -> Fidelity:
    settings = {"sink_pages": 1, "window_tokens": 64} | policy
    return Fidelity(
        FidelityPolicy(**settings), counts=counts, plane_bytes=BYTES, num_pages=num_pages
    )


def hot_needed(num_seqs: int, num_batched: int, policy: FidelityPolicy) -> int:
    recent = -(-policy.window_tokens // PAGE_SIZE) + 2
    return num_seqs * (policy.sink_pages + recent) + -(-num_batched // PAGE_SIZE)


def end_of(item: BatchItem) -> int:
    return item.start + item.num_tokens


class Traffic:
    """A scheduler and a fidelity under random requests; every step is checked."""

    def __init__(self, rng: random.Random, *, num_steps: int, is_tight: bool = False) -> None:
        self.rng = rng
        num_pages, num_seqs, num_batched = rng.randint(6, 24), rng.randint(1, 4), 150
        has_cold = is_tight or rng.random() < 0.5
        num_cold = rng.randint(1, num_pages) if has_cold else 0
        policy = FidelityPolicy(
            sink_pages=rng.randint(0, 2),
            window_tokens=rng.choice([0, 1, 63, 64, 65, 200]),
            routine_bytes=170.0 if is_tight else rng.choice([None, rng.uniform(160, 425)]),
            min_age=rng.choice([0, 64, 1000]),
            key_weight=rng.choice([0.5, 1.0, 7.0]),
        )
        counts = PlaneNumbers(
            hot=min(num_pages, hot_needed(num_seqs, num_batched, policy)),
            base=num_pages - num_cold,
            fine=rng.randint(0, 2 * num_pages),
            cold=num_cold,
            sink=rng.choice([0, num_seqs + 1, 2 * num_seqs + 1]),
        )
        self.fidelity = Fidelity(policy, counts=counts, plane_bytes=BYTES, num_pages=num_pages)
        allocator = PageAllocator(num_pages, listener=self.fidelity)
        self.scheduler = Scheduler(
            allocator,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched,
            max_model_len=1000,
            on_release=self.fidelity.leave,
        )
        self.store = Store()
        self.total_P = np.zeros(num_pages, dtype=np.int64)
        self.lowest: dict[int, Rung] = {}
        self.num_requests = 0
        self.was_idle: set[int] = set()
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        rng, scheduler, fidelity = self.rng, self.scheduler, self.fidelity
        if len(scheduler.waiting) < 3 and rng.random() < 0.1:
            self.add()
        if scheduler.running and rng.random() < 0.02:
            victim = rng.choice(list(scheduler.running.values()))
            reason = rng.choice([FinishReason.CANCELLED, FinishReason.ERROR])
            scheduler.finish(victim, reason)
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
        self.check_windows(batch)
        self.check_budget()
        scheduler.commit(batch, [3 if item.needs_token else None for item in batch.items])
        for sequence in list(scheduler.running.values()):
            is_full = len(sequence.token_ids) == scheduler.max_seq_len
            if is_full or (sequence.num_output > 0 and rng.random() < 0.01):
                scheduler.finish(sequence, FinishReason.LENGTH)
        if rng.random() < 0.3:
            scheduler.check_integrity()
            fidelity.check_integrity()

    def add(self) -> None:
        longest = min(500, self.scheduler.max_seq_len - 1)
        length = min(longest, self.rng.choice([1, 64, 65, 150, 400]))
        # Few distinct prompts, so that prefixes are shared.
        prompt = tuple([self.rng.choice([1, 2])] * length)
        params = SamplingParams(max_tokens=100)
        name = str(self.num_requests)
        request = Request(request_id=name, prompt_token_ids=prompt, sampling=params, seed=0)
        self.scheduler.add(request)
        self.num_requests += 1

    def apply(self, moves: list[Move]) -> None:
        for move in moves:
            assert Rung.HOT <= move.source.rung < move.target.rung, move
        self.store.apply(moves)
        places = self.fidelity.ledger.places
        for page_id, place, sink in self.fidelity.take_changed():
            assert place == places[page_id]
            assert sink == self.fidelity.ledger.sink_of.get(page_id, -1)
        assert self.fidelity.take_changed() == []

    def compute(self, batch: Batch) -> None:
        """Write the pages of the step, and read every page that its sequences have."""
        places = self.fidelity.ledger.places
        for item in batch.items:
            tokens, pages = item.sequence.token_ids, item.sequence.page_ids
            end = end_of(item)
            for index in range(item.start // PAGE_SIZE, -(-end // PAGE_SIZE)):
                self.store.write(places[pages[index]], tuple(tokens[: (index + 1) * PAGE_SIZE]))
                self.lowest[pages[index]] = Rung.HOT
            for index in range(-(-end // PAGE_SIZE)):
                place = places[pages[index]]
                wanted = tuple(tokens[: min(end, (index + 1) * PAGE_SIZE)])
                got = self.store.read(place)
                # A page that is being filled holds what its sequence knew when it was written.
                assert isinstance(got, tuple)
                assert got[: len(wanted)] == wanted or wanted[: len(got)] == got
                self.check_sink(index, pages[index], got)
                assert place.rung >= self.lowest[pages[index]], "a page was promoted"
                self.lowest[pages[index]] = place.rung

    def check_sink(self, index: int, page_id: int, tag: object) -> None:
        ledger = self.fidelity.ledger
        sink = ledger.sink_of.get(page_id)
        if index > 0 or ledger.places[page_id].rung is Rung.HOT:
            assert sink is None
        elif sink is not None:
            assert self.store.planes["sink", sink] == tag
        else:
            # One that nobody held for a while may have lost it.
            assert ledger.counts.sink == 0 or page_id in self.was_idle

    def check_windows(self, batch: Batch) -> None:
        policy, fidelity = self.fidelity.policy, self.fidelity
        for item in batch.items:
            end = end_of(item)
            first = max(0, end - policy.window_tokens) // PAGE_SIZE
            own = item.sequence.num_cached // PAGE_SIZE
            recent = range(first, -(-end // PAGE_SIZE))
            sinks = range(min(policy.sink_pages, -(-end // PAGE_SIZE)))
            for index in {*recent, *sinks}:
                # Pages that came with the prefix may have been encoded before.
                rung = fidelity.rung(item.sequence.page_ids[index])
                assert rung is Rung.HOT or index < own, (item, index, rung)

    def check_budget(self) -> None:
        fidelity, policy = self.fidelity, self.fidelity.policy
        held = [
            page
            for page in range(self.scheduler.allocator.num_pages)
            if self.scheduler.allocator.num_holders(page) > 0
        ]
        assert fidelity.held_bytes == fidelity.bytes_of(held)
        num_hot = fidelity.num_by_rung(held)[Rung.HOT]
        window = -(-policy.window_tokens // PAGE_SIZE) + 1
        most = self.scheduler.max_num_seqs * (policy.sink_pages + window)
        assert num_hot <= most, (num_hot, most)
        routine = [page for page in held if fidelity.rung(page) > Rung.HOT]
        if policy.routine_bytes is None or not routine:
            return
        mean = sum(BYTES.by_rung[fidelity.rung(page)] for page in routine) / len(routine)
        can_go = Rung.K2V2 if fidelity.ledger.cold.num_free else Rung.MIDDLE
        is_at_bottom = all(fidelity.rung(page) > can_go for page in routine)
        assert mean <= policy.routine_bytes or is_at_bottom, (mean, policy.routine_bytes)


def test_random_traffic_keeps_ledger_content_windows_and_budget() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rungs: dict[Rung, int] = defaultdict(int)
    num_requests = 0
    for index in range(20):
        traffic = Traffic(rng, num_steps=500, is_tight=index % 4 == 0)
        num_requests += traffic.num_requests
        for rung in traffic.lowest.values():
            rungs[rung] += 1
    # 10,000 steps. A run reaches K4V4 or K2V2 in half of the cases, a tight one COLD in nearly all.
    assert num_requests > 100
    assert {Rung.HOT, Rung.K4V4, Rung.K2V2, Rung.COLD} <= set(rungs), rungs
