"""The loop: schedule, run, commit, emit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from subten.cache.use import CacheUse
from subten.core import (
    Batch,
    ErrorCause,
    Fault,
    FinishReason,
    OverloadError,
    Request,
    Sequence,
    TokenEvent,
    no_fault,
    panics_as_errors,
)
from subten.engine.scheduler import BAD_LOGITS, Scheduler
from subten.engine.stats import EngineStats, Timings
from subten.engine.stop import TextOutput, find_end


class BatchRunner(Protocol):
    """What the engine needs of `runner.Runner`."""

    def run(self, batch: Batch) -> list[int | None]:
        """One token, None or BAD_LOGITS for each item of the batch."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended."""
        ...


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """What became of one request; complete once its last event is out.

    `num_pages` and `num_kv_tokens` are the pages that it held at its end, shared ones included,
    and the tokens in them; `cache_use` is what those pages took. `num_cached` tokens of its prompt
    came with pages that others computed.
    """

    sequence: Sequence
    output: TextOutput | None
    token_times_s: list[float] = field(default_factory=list)
    num_cached: int | None = None
    num_pages: int = 0
    num_kv_tokens: int = 0
    cache_use: CacheUse = field(default_factory=CacheUse)

    @property
    def timings(self) -> Timings:
        """Arrival of the request and of its tokens."""
        return Timings(
            arrival_s=self.sequence.request.arrival_s, token_times_s=tuple(self.token_times_s)
        )


class Engine:
    """Serves requests from `add` to their last event; every accepted one ends exactly once.

    Not for several threads at a time. `clock` returns seconds; `cache_use` tells what pages take.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: BatchRunner,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cache_use: Callable[[list[int]], CacheUse] = lambda _page_ids: CacheUse(),
        fault: Fault = no_fault,
    ) -> None:
        self.scheduler = scheduler
        self._cache_use = cache_use
        self.stats = EngineStats()
        self.runner = runner
        self._clock = clock
        self._fault = fault
        self._records: dict[str, RequestRecord] = {}
        self._pending: list[TokenEvent] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return self.scheduler.has_work or bool(self._pending)

    def step(self) -> list[TokenEvent]:
        """Compute one batch; the tokens and the ends that it brought."""
        batch = self.scheduler.schedule()
        for sequence, detail in self.scheduler.take_failed():
            record = self._records[sequence.request.request_id]
            self._pending.append(self._end(record, FinishReason.ERROR, detail=detail))
        tokens = self._run(batch)
        self.scheduler.commit(batch, tokens)
        return self._take_pending() + self._emit(batch, tokens)

    def add(self, request: Request, output: TextOutput | None = None) -> RequestRecord:
        """Accept a request; RequestError if it can never be served, OverloadError if not now.

        `output`, if given, receives its tokens and ends it at its stop strings.
        """
        try:
            sequence = self.scheduler.add(request)
        except OverloadError:
            self.stats.num_overloaded += 1
            raise
        record = RequestRecord(sequence=sequence, output=output)
        self._records[request.request_id] = record
        self.stats.num_accepted += 1
        return record

    def cancel(self, request_id: str) -> bool:
        """End a request and free its pages now; its last event comes with the next step.

        A request that is unknown or ended is left alone and counted, and the result is False.
        """
        record = self._records.get(request_id)
        if record is None:
            self.stats.num_late_calls += 1
            return False
        self._pending.append(self._end(record, FinishReason.CANCELLED))
        return True

    def _run(self, batch: Batch) -> list[int | None]:
        if not batch.items:
            return []
        try:
            tokens = self.runner.run(batch)
        except Exception as error:
            # What the step wrote is unknown: its requests end, the others can go on.
            for item in batch.items:
                record = self._records[item.sequence.request.request_id]
                detail = f"the step failed: {type(error).__name__}: {error}"
                self._pending.append(self._end(record, FinishReason.ERROR, detail=detail))
            raise
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += batch.num_tokens
        return tokens

    def _take_pending(self) -> list[TokenEvent]:
        pending, self._pending = self._pending, []
        return pending

    def _emit(self, batch: Batch, tokens: list[int | None]) -> list[TokenEvent]:
        now_s = self._clock()
        events = []
        for item, token in zip(batch.items, tokens, strict=True):
            record = self._records[item.sequence.request.request_id]
            if record.num_cached is None:
                record.num_cached = item.sequence.num_cached
            if token is not None:
                events.append(self._event(record, token, now_s))
        return events

    def _event(self, record: RequestRecord, token: int, now_s: float) -> TokenEvent:
        if token == BAD_LOGITS:
            sequence = record.sequence
            detail, cause = sequence.failure or _bad_logits(sequence), sequence.failure_cause
            return self._end(record, FinishReason.ERROR, detail=detail, cause=cause, time_s=now_s)
        record.token_times_s.append(now_s)
        self.stats.num_output_tokens += 1
        detail = ""
        try:
            reason = self._find_end(record, token)
        # What a text does to its decoder or its stop strings is the matter of its request alone.
        except Exception as error:  # noqa: BLE001
            reason = FinishReason.ERROR
            detail = f"the text failed: {type(error).__name__}: {error}"
        if reason is not None:
            return self._end(record, reason, token_id=token, detail=detail, time_s=now_s)
        return TokenEvent(
            request_id=record.sequence.request.request_id,
            token_id=token,
            index=record.sequence.num_output - 1,
            time_s=now_s,
            **_logprobs(record.sequence),
        )

    def _find_end(self, record: RequestRecord, token: int) -> FinishReason | None:
        sequence = record.sequence
        reason = find_end(
            sequence.request,
            token,
            num_output=sequence.num_output,
            num_tokens=len(sequence.token_ids),
            max_seq_len=self.scheduler.max_seq_len,
        )
        if reason is FinishReason.STOP or record.output is None:
            return reason
        self._fault("text")
        with panics_as_errors():
            return FinishReason.STOP if record.output.push(token) else reason

    def _end(
        self,
        record: RequestRecord,
        reason: FinishReason,
        *,
        token_id: int | None = None,
        detail: str = "",
        cause: ErrorCause = ErrorCause.ENGINE,
        time_s: float | None = None,
    ) -> TokenEvent:
        sequence = record.sequence
        request_id = sequence.request.request_id
        try:
            with panics_as_errors():
                is_stopped = record.output is not None and record.output.finish()
        except Exception as error:  # noqa: BLE001
            is_stopped = False
            if reason is not FinishReason.CANCELLED:
                reason = FinishReason.ERROR
                detail = detail or f"the text failed: {type(error).__name__}: {error}"
        if is_stopped and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        record.num_pages = len(sequence.page_ids)
        record.num_kv_tokens = sequence.num_computed
        record.cache_use = self._cache_use(sequence.page_ids)
        self.scheduler.finish(sequence, reason, detail)
        self.runner.forget(request_id)
        del self._records[request_id]
        self.stats.num_ended[reason] += 1
        return TokenEvent(
            request_id=request_id,
            token_id=token_id,
            index=sequence.num_output - (token_id is not None),
            finish_reason=reason,
            finish_detail=detail,
            error_cause=cause if reason is FinishReason.ERROR else None,
            time_s=self._clock() if time_s is None else time_s,
            **({} if token_id is None else _logprobs(sequence)),
        )


def _bad_logits(sequence: Sequence) -> str:
    index = sequence.num_output
    where = f"after output token {index}" if index else "of the prompt"
    if sequence.request.has_mask(index):
        return f"the logits {where} are NaN or infinite, or none that is allowed is finite"
    return f"the logits {where} are NaN, infinite or all -infinite"


def _logprobs(sequence: Sequence) -> dict[str, Any]:
    """Fields of the event of the last token: what its request asked to be told."""
    params = sequence.request.sampling
    told: dict[str, Any] = {}
    if params.logprobs is not None and sequence.logprobs:
        told["logprobs"] = sequence.logprobs[-1]
    if params.prompt_logprobs is not None and sequence.num_output == 1:
        told["prompt_logprobs"] = tuple(sequence.prompt_logprobs)
    return told
