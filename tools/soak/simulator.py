"""Clients, engine and a scripted model in one thread and in virtual time, all from one seed.

Everything that is random comes from the seed, so that a run can be repeated to the bit. Faults are
made at the points that production code names, at a front end that loses its clients, and in time.
After every step the books are checked; at the end every accepted request has ended once, its tokens
are the beginning of what the model says, and all pages are free.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from scripted_run import (
    Clock,
    Faults,
    InjectedFaultError,
    Letters,
    ScriptedRunner,
    expected,
)

from subten.cache.allocator import PageAllocator
from subten.core import FinishReason, OverloadError, Request, SamplingParams, TokenEvent
from subten.engine.engine import Engine, RequestRecord
from subten.engine.scheduler import Scheduler
from subten.engine.stop import TextOutput

RATES = {
    "kv.alloc": 0.02,
    "copy.in": 0.001,
    "copy.out": 0.001,
    "step": 0.0005,
    "logits": 0.0005,
    "text": 0.0005,
    "send": 0.001,
    "clock": 0.01,
}
"""Chance of a fault at one call of its point."""

MAX_WAITING = 24
"""Requests in the queue beyond which clients send no more; the books are read at every step."""

MAX_IDLE_STEPS = 5
"""Steps in a row without progress, after which a run has failed."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the engine and of its traffic."""

    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int | None
    max_model_len: int
    max_queue: int | None
    enable_prefix_caching: bool
    num_requests: int
    max_prompt: int
    max_output: int
    arrival_rate: float
    cancel_share: float

    @classmethod
    def drawn(cls, rng: random.Random) -> Shape:
        """Small, so that sequences get into each other's way; a third of all with too few pages."""
        max_num_seqs = rng.choice([1, 3, 4, 8])
        shape = cls(
            num_pages=rng.choice([1, 3, 4, 7, 10]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 20, 63, 64, 200]),
            max_prefill_tokens=rng.choice([None, 1, 16, 64]),
            max_model_len=rng.choice([65, 400, 600]),
            max_queue=rng.choice([None, None, 2]),
            enable_prefix_caching=rng.random() < 0.75,
            num_requests=rng.randint(4, 14),
            max_prompt=rng.choice([3, 60, 200, 250]),
            max_output=rng.choice([5, 70, 250]),
            arrival_rate=rng.choice([0.05, 0.3, 2.0]),
            cancel_share=rng.choice([0.0, 0.2, 0.6]),
        )
        if rng.random() < 2 / 3:
            return shape
        return replace(
            shape,
            num_pages=rng.choice([4, 5, 6]),
            max_num_seqs=8,
            max_num_batched_tokens=72,
            max_model_len=600,
            max_queue=None,
            num_requests=8,
            max_prompt=60,
            max_output=250,
            arrival_rate=2.0,
        )


@dataclass(kw_only=True)
class Client:
    """One request and what its client saw."""

    request: Request
    record: RequestRecord
    output: TextOutput
    tokens: list[int] = field(default_factory=list)
    end: TokenEvent | None = None
    cancel_after: int | None = None
    is_gone: bool = False


class Simulation:
    """One run; `run` returns when all is served, and raises AssertionError where it must not."""

    def __init__(
        self,
        seed: int,
        *,
        shape: Shape | None = None,
        faults: Faults | None = None,
        requests: list[Request] | None = None,
        keeps_clients: bool = True,
    ) -> None:
        """Without `keeps_clients` each is checked and forgotten at its end."""
        self.rng = random.Random(seed)
        self.shape = shape or Shape.drawn(self.rng)
        self.faults = faults or Faults(random.Random(self.rng.getrandbits(64)), RATES)
        self.clock = Clock()
        allocator = PageAllocator(
            self.shape.num_pages, self.shape.enable_prefix_caching, fault=self.faults
        )
        scheduler = Scheduler(
            allocator,
            max_num_seqs=self.shape.max_num_seqs,
            max_num_batched_tokens=self.shape.max_num_batched_tokens,
            max_model_len=self.shape.max_model_len,
            max_prefill_tokens=self.shape.max_prefill_tokens,
            max_queue=self.shape.max_queue,
            cache_scope=("scripted", "plain"),
        )
        self.runner = ScriptedRunner(allocator, self.faults)
        self.engine = Engine(scheduler, self.runner, clock=self.clock, fault=self.faults)
        self.clients: dict[str, Client] = {}
        self._keeps_clients = keeps_clients
        self._recent: deque[Client] = deque(maxlen=64)
        self.num_ended: Counter[str] = Counter()
        self.num_steps = 0
        self.num_idle = 0
        self._num_idle_together = 0
        self._log = hashlib.sha256()
        if requests is None:
            requests = self.draw_requests(self.shape.num_requests)
        self._to_send = requests

    @property
    def digest(self) -> str:
        """SHA-256 of everything that happened, in order."""
        return self._log.hexdigest()

    def run(self) -> None:
        """Serve all that arrives, check the books, and serve one clean request after it."""
        self.send([])
        self.faults.is_on = False
        clean = self._request("clean", [1, 2, 3], max_tokens=5)
        self.add(clean)
        while self.engine.has_work:
            self.step()
        client = self._recent[-1]
        assert client.tokens == expected(clean, self.engine.scheduler.max_seq_len)[0]
        self.check_end()

    def send(self, requests: list[Request]) -> None:
        """Serve what is left to send and these, last first, and check the books."""
        self._to_send = self._to_send + requests
        while self._to_send or self.engine.has_work:
            self._arrive()
            self.cancel_some()
            self.step()
        self.check_end()

    def draw_requests(self, count: int, name: str = "") -> list[Request]:
        """Requests of the shape's sizes; prompts share their beginnings."""
        beginning = [self.rng.randrange(9) for _ in range(self.shape.max_prompt)]
        capacity = min(self.shape.num_pages * 64, self.shape.max_model_len)
        drawn = []
        for number in range(count):
            length = self.rng.randint(1, min(self.shape.max_prompt, capacity - 1))
            own = self.rng.choice([1, 1, self.rng.randint(1, length)])
            prompt = beginning[: length - own] + [self.rng.randrange(9) for _ in range(own)]
            max_tokens = self.rng.randint(1, self.shape.max_output)
            drawn.append(
                self._request(
                    f"{name}{number}",
                    prompt,
                    max_tokens=max_tokens,
                    min_tokens=self.rng.choice([0, 0, min(3, max_tokens)]),
                    stop=self.rng.choice([(), (), ("q",), ("ab", "xyz")]),
                )
            )
        return drawn

    def add(self, request: Request, cancel_after: int | None = None) -> bool:
        """Send a request; whether it was accepted."""
        output = TextOutput(
            Letters(), request.sampling.stop, min_tokens=request.sampling.min_tokens
        )
        scheduler = self.engine.scheduler
        try:
            record = self.engine.add(request, output)
        except OverloadError:
            # More than the limit where preempted ones wait as well.
            assert len(scheduler.waiting) >= (self.shape.max_queue or 0), len(scheduler.waiting)
            self.num_ended["overload"] += 1
            return False
        client = Client(request=request, record=record, output=output, cancel_after=cancel_after)
        self.clients[request.request_id] = client
        self._recent.append(client)
        return True

    def step(self) -> None:
        """One step of the engine, its events to their clients, and the books."""
        before = self._progress()
        had_work = self.engine.has_work
        self.clock.now_s += 0.001 + (100.0 if self.faults.happens("clock") else 0.0)
        try:
            events = self.engine.step()
        except InjectedFaultError as error:
            events = []
            self._log.update(f"step failed: {error}".encode())
        self.num_steps += 1
        for event in events:
            self._deliver(event)
        self.runner.poison()
        is_idle = had_work and self._progress() == before
        self.num_idle += is_idle
        self._num_idle_together = self._num_idle_together + 1 if is_idle else 0
        assert self._num_idle_together <= MAX_IDLE_STEPS, self.num_steps
        self._check_books()

    def cancel(self, client: Client) -> None:
        """The client goes away; its pages are free before the next step."""
        client.is_gone = True
        request_id = client.request.request_id
        if self.engine.cancel(request_id):
            assert client.record.sequence.page_ids == []
            assert self.engine.scheduler.find(request_id) is None

    def cancel_some(self) -> None:
        """Clients that go at any time: queued, in the middle of a prompt, after their end."""
        if self._recent and self.rng.random() < 0.05 * self.shape.cancel_share:
            self.cancel(self.rng.choice(self._recent))

    def check_end(self) -> None:
        """Every accepted request ended once, with tokens of its own; nothing is left behind."""
        stats, allocator = self.engine.stats, self.engine.scheduler.allocator
        assert stats.num_accepted == sum(stats.num_ended.values()), stats
        assert len(self.clients) == (stats.num_accepted if self._keeps_clients else 0), stats
        for client in self.clients.values():
            assert client.end is not None or client.is_gone, client.request.request_id
            self._check_client(client)
        assert allocator.num_used == 0, allocator.num_used
        allocator.flush()
        assert allocator.num_free == allocator.num_pages, allocator.num_free
        self.engine.scheduler.check_integrity()

    def _deliver(self, event: TokenEvent) -> None:
        client = self.clients[event.request_id]
        self._log.update(repr(event).encode())
        assert client.end is None, event
        if event.token_id is not None:
            assert event.index == len(client.tokens), (event, len(client.tokens))
            client.tokens.append(event.token_id)
        if event.finish_reason is not None:
            client.end = event
            self.num_ended[event.finish_reason.value] += 1
            if not self._keeps_clients:
                self._check_client(client)
                del self.clients[event.request_id]
        elif not client.is_gone and (
            self.faults.happens("send") or len(client.tokens) == client.cancel_after
        ):
            self.cancel(client)

    def _check_client(self, client: Client) -> None:
        max_seq_len = self.engine.scheduler.max_seq_len
        wanted, wanted_reason = expected(client.request, max_seq_len)
        assert client.tokens == wanted[: len(client.tokens)], client.request.request_id
        text = "".join(map(chr, wanted))
        assert text.startswith(client.output.text), (text, client.output.text)
        if client.end is None:
            return
        reason = client.end.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert client.tokens == wanted, (client.request.request_id, reason)
            assert reason is wanted_reason, (client.request.request_id, reason)
        elif reason is FinishReason.ERROR:
            assert sum(self.faults.num_failed.values()) > 0, client.end
        else:
            assert client.is_gone, client.end

    def _check_books(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        allocator = scheduler.allocator
        held = {page for sequence in scheduler.running.values() for page in sequence.page_ids}
        assert len(held) == allocator.num_used, (len(held), allocator.num_used)

    def _progress(self) -> tuple[int, ...]:
        stats = self.engine.stats
        return stats.num_computed_tokens, sum(stats.num_ended.values())

    def _arrive(self) -> None:
        rate = self.shape.arrival_rate
        waiting = self.engine.scheduler.waiting
        while (
            self._to_send and len(waiting) < MAX_WAITING and self.rng.random() < rate / (1 + rate)
        ):
            request = self._to_send.pop()
            after = None
            if self.rng.random() < self.shape.cancel_share:
                after = self.rng.randint(1, request.sampling.max_tokens)
            self.add(request, after)

    def _request(self, request_id: str, prompt: list[int], **params: object) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**params),  # type: ignore[arg-type]
            seed=0,
            arrival_s=self.clock.now_s,
            tenant=self.rng.choice(["", "", "", "a"]),
        )
