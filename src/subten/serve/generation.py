"""Answers on their way from the engine's tokens to text: detokenised, cut at stop strings, counted.

This runs in the server, beside the engine's steps and not between them.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Container, Sequence
from dataclasses import dataclass, field, replace

from subten.core import PAGE_SIZE, ErrorCause, FinishReason, SamplingParams, TokenLogprobs
from subten.engine.stop import Detokenizer, NoText, TextOutput
from subten.serve import ipc
from subten.serve.errors import ApiError, bad_field
from subten.serve.grammar import Grammar
from subten.serve.metrics import Metrics
from subten.serve.supervisor import EngineFault, EngineState, StreamEvent, Supervisor
from subten.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SEEDS = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a request asks for: its prompts, `n` answers to each, sampled alike."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    n: int = 1
    tenant: str = ""
    grammar: Grammar | None = None
    shown_tokens: Container[int] = ()
    """Special tokens that are part of the text, which leaves out the others."""


@dataclass(kw_only=True, slots=True)
class Piece:
    """What became visible of one answer; `finish_reason` with the last piece of it."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None


class _Choice:
    """One answer."""

    def __init__(self, index: int, request_id: str, num_prompt: int, output: TextOutput) -> None:
        self.index = index
        self.request_id = request_id
        self.num_prompt = num_prompt
        self.output = output
        self.num_tokens = 0
        self.num_cached = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.finish: str | None = None
        self.followers: list[ipc.Submit] = []


class Generator:
    """Sends jobs to the engine while there is room for them."""

    def __init__(
        self,
        supervisor: Supervisor,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        *,
        max_live: int,
        has_prefix_cache: bool = True,
    ) -> None:
        self.supervisor = supervisor
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.is_draining = False
        self._max_live = max_live
        self._has_prefix_cache = has_prefix_cache
        self._numbers = itertools.count()

    def check_ready(self) -> None:
        """ApiError 503 while no request can be taken, whatever it is."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="draining")
        if self.supervisor.state is not EngineState.READY:
            raise ApiError(503, "the engine does not serve now", code="engine_not_ready")

    def shares_prefix(self, prompt: Sequence[int]) -> bool:
        """Whether further answers to a prompt find whole pages of it once one has computed it."""
        return self._has_prefix_cache and len(prompt) > PAGE_SIZE

    def start(self, job: Job) -> Generation:
        """Send a job to the engine; ApiError 400 where it has more answers than ever can wait and
        run, 429 or 503 where it cannot be taken now."""
        num_choices = len(job.prompts) * job.n
        if num_choices > self._max_live:
            raise bad_field(
                "n" if job.n > 1 else "prompt",
                f"got {num_choices} answers, prompts times n; allowed here: at most "
                f"{self._max_live}, which run or wait at a time",
            )
        self.metrics.accepted.inc(num_choices)
        try:
            self.check_ready()
            if self.supervisor.num_live + num_choices > self._max_live:
                raise ApiError(429, "too many requests are waiting", code="queue_full")
        except ApiError:
            self.metrics.finished["rejected"].inc(num_choices)
            raise
        return Generation(self, job, [next(self._numbers) for _ in range(num_choices)])


class Generation:
    """The answers to one request, from their start to the last token; read `pieces` once.

    Whoever does not read to the end calls `close`, which cancels what is left. Of the answers to a
    prompt of more than a page the first goes ahead. The others follow when its first token shows
    that the prompt's pages are there, so that the prompt is computed once.
    """

    def __init__(self, generator: Generator, job: Job, numbers: Sequence[int]) -> None:
        self._metrics = generator.metrics
        self._supervisor = generator.supervisor
        self._events: deque[tuple[_Choice, StreamEvent]] = deque()
        self._has_events = asyncio.Event()
        self._is_failed = False
        self._began_s = time.perf_counter()
        self._job = job
        self._choices: list[_Choice] = []
        base = secrets.randbelow(_SEEDS) if job.sampling.seed is None else job.sampling.seed
        # Stop strings are matched here.
        sampling = replace(job.sampling, stop=(), seed=None)
        grammar = "" if job.grammar is None else job.grammar.text
        for index, number in enumerate(numbers):
            tokenizer = generator.tokenizer
            prompt = job.prompts[index // job.n]
            detokenizer: Detokenizer = (
                NoText()
                if tokenizer is None
                else tokenizer.stream(shown=job.shown_tokens, context=prompt)
            )
            output = TextOutput(detokenizer, job.sampling.stop, min_tokens=job.sampling.min_tokens)
            choice = _Choice(index, str(number), len(prompt), output)
            self._choices.append(choice)
            request = ipc.Submit(
                request_id=choice.request_id,
                token_ids=list(prompt),
                sampling=sampling,
                seed=(base + index % job.n) % _SEEDS,
                tenant=job.tenant,
                grammar=grammar,
            )
            first = self._choices[index - index % job.n]
            is_held = False
            if choice is not first:
                # What a prompt's tokens had comes once, and before the other answers.
                request.sampling = replace(sampling, prompt_logprobs=None)
                has_own = sampling.prompt_logprobs is not None
                is_held = has_own or generator.shares_prefix(prompt)
            if is_held:
                first.followers.append(request)
            self._supervisor.submit(request, functools.partial(self._take, choice), is_held=is_held)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self._job.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came with shared pages; of each prompt's first answer."""
        return sum(choice.num_cached for choice in self._choices[:: self._job.n])

    @property
    def first_token_s(self) -> float | None:
        """Start to first token."""
        times = [choice.first_s for choice in self._choices if choice.first_s is not None]
        return min(times) - self._began_s if times else None

    def finish_reasons(self) -> list[str | None]:
        """Why each answer ended."""
        return [choice.finish for choice in self._choices]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces as they come, until all answers have ended; ApiError if the engine fails.

        What came while the reader was busy comes as one piece for each answer.
        """
        try:
            while self._is_open:
                await self._has_events.wait()
                self._has_events.clear()
                merged: dict[int, Piece] = {}
                while self._events:
                    choice, event = self._events.popleft()
                    if choice.finish is None:
                        piece = merged.setdefault(choice.index, Piece(index=choice.index))
                        self._add(piece, choice, event)
                for piece in merged.values():
                    yield piece
            # What an end still takes comes after the tokens that others got from the same step.
            await asyncio.sleep(0)
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the answers that have not ended."""
        live = [choice for choice in self._choices if choice.finish is None]
        for choice in live:
            self._end(choice, "error" if self._is_failed else "cancelled")
        if live:
            self._has_events.set()
            self._supervisor.cancel([choice.request_id for choice in live])

    @property
    def _is_open(self) -> bool:
        return any(choice.finish is None for choice in self._choices)

    def _take(self, choice: _Choice, event: StreamEvent) -> None:
        if isinstance(event, ipc.TokenOut) and event.token_id is not None:
            self._count(choice, event)
        self._events.append((choice, event))
        self._has_events.set()

    def _count(self, choice: _Choice, event: ipc.TokenOut) -> None:
        """Times are those of arrival, however late the reader comes."""
        if choice.finish is not None:
            return
        now_s = time.perf_counter()
        if choice.first_s is None:
            choice.first_s = now_s
            choice.num_cached = event.num_cached
            self._metrics.ttft.observe(now_s - self._began_s)
            self._metrics.queue.observe(event.queue_s)
            self._metrics.prefill.observe(max(0.0, now_s - self._began_s - event.queue_s))
            for request in choice.followers:
                self._supervisor.release(request)
            choice.followers.clear()
        else:
            self._metrics.itl.observe(now_s - choice.last_s)
        choice.last_s = now_s

    def _add(self, piece: Piece, choice: _Choice, event: StreamEvent) -> None:
        """Put what an event adds to its answer into `piece`; ApiError for a failure."""
        failure = self._failure(event)
        if failure is not None:
            self._is_failed = True
            self._end(choice, "rejected" if isinstance(event, ipc.Refused) else "error")
            raise failure
        assert isinstance(event, ipc.TokenOut)
        assert event.token_id is not None, event
        choice.num_tokens += 1
        if event.logprobs is not None:
            piece.logprobs.append(event.logprobs)
        piece.prompt_logprobs = event.prompt_logprobs or piece.prompt_logprobs
        finish: str | None = event.finish_reason
        if event.finish_reason is not FinishReason.STOP and choice.output.push(event.token_id):
            finish = "stop"
            self._supervisor.cancel([choice.request_id])
        if finish is not None and choice.output.finish():
            finish = "stop"
        piece.text += choice.output.take()
        if finish is not None:
            piece.finish_reason = finish
            self._end(choice, finish)

    def _failure(self, event: StreamEvent) -> ApiError | None:
        if isinstance(event, EngineFault):
            return ApiError(503, event.message, code="engine_failed")
        if isinstance(event, ipc.Refused):
            if event.is_overload:
                return ApiError(429, event.message, code="queue_full")
            if event.is_grammar:
                return self._bad_grammar(event.message)
            return ApiError(400, event.message, param=event.message.partition(":")[0])
        if event.error_cause is ErrorCause.MASK:
            return self._bad_grammar(event.detail)
        if event.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            logger.warning("request %s failed: %s", event.request_id, event.detail)
            return ApiError(500, "the engine failed at this request", code="engine_error")
        return None

    def _bad_grammar(self, detail: str) -> ApiError:
        assert self._job.grammar is not None
        return bad_field(self._job.grammar.param, f"cannot be followed: {detail}")

    def _end(self, choice: _Choice, reason: str) -> None:
        assert choice.finish is None, choice.finish
        choice.finish = reason
        metrics = self._metrics
        metrics.finished[reason].inc()
        if reason == "rejected":
            return
        now_s = time.perf_counter()
        metrics.e2e.observe(now_s - self._began_s)
        metrics.generation_tokens.inc(choice.num_tokens)
        metrics.request_output.observe(choice.num_tokens)
        if choice.index % self._job.n == 0:
            metrics.prompt_tokens.inc(choice.num_prompt)
            metrics.request_prompt.observe(choice.num_prompt)
        if choice.first_s is not None and choice.num_tokens > 1:
            span_s = choice.last_s - choice.first_s
            metrics.decode.observe(span_s)
            metrics.tpot.observe(span_s / (choice.num_tokens - 1))
