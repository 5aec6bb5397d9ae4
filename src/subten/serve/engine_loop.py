"""The engine's loop: takes requests from its server, steps back to back, sends tokens."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import asdict
from typing import Any

from subten.core import PAGE_SIZE, LogitsMask, OverloadError, Request, TokenEvent, UserError
from subten.device import is_lost
from subten.engine.engine import RequestRecord
from subten.engine.llm import LLM
from subten.serve import ipc
from subten.serve.channel import Channel, ServerGoneError
from subten.serve.mask_maker import MaskMaker
from subten.serve.step_meter import StepMeter

logger = logging.getLogger(__name__)

BEAT_S = 0.5
STATUS_S = 0.1
CACHE_S = 1.0
MAX_FAILED_STEPS = 3
"""Steps that fail in a row until the engine ends; where its device is lost the first one does."""
END_GRACE_S = 3.0


class EngineLoop:
    """Steps an LLM's engine for the requests that come through a channel, until it closes."""

    def __init__(self, channel: Channel, llm: LLM, roof_bytes_per_s: float | None = None) -> None:
        self._channel = channel
        self._llm = llm
        self._engine = llm.engine
        self._masks = MaskMaker(llm, channel.wake)
        self._meter = StepMeter(llm, roof_bytes_per_s)
        self._records: dict[str, RequestRecord] = {}
        self._unstarted: dict[str, float] = {}
        self._queue_s: dict[str, float] = {}
        self._num_failed_steps = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._status_due_s = 0.0
        self._cache_due_s = 0.0
        self._slow: dict[str, Any] = {}
        self._busy_since_s: float | None = None
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Serve until the server is gone, which ends it with ServerGoneError."""
        threading.Thread(target=self._beat, daemon=True, name="beat").start()
        try:
            self._send_status()
            self._serve()
        finally:
            self._has_ended.set()

    def _serve(self) -> None:
        while True:
            is_idle = not self._engine.has_work
            if is_idle:
                self._meter.idle()
            for message in self._channel.receive(BEAT_S if is_idle else 0.0):
                self._take(message)
            self._take_masks()
            if self._engine.has_work:
                self._busy_since_s = time.monotonic()
                self._step()
                self._busy_since_s = None
                if not self._engine.has_work or time.monotonic() >= self._status_due_s:
                    self._send_status()

    def _take(self, message: ipc.ToEngine) -> None:
        if isinstance(message, ipc.Cancel):
            for request_id in message.request_ids:
                if not self._masks.cancel(request_id):
                    self._engine.cancel(request_id)
        elif isinstance(message, ipc.Submit) and message.grammar:
            self._masks.submit(message)
        elif isinstance(message, ipc.Submit):
            self._add(message, None)
        else:
            logger.error("a second start was asked for and not made")

    def _add(self, message: ipc.Submit, mask: LogitsMask | None) -> None:
        request = self._request(message, mask)
        try:
            self._records[request.request_id] = self._engine.add(request)
        except UserError as error:
            refused = ipc.Refused(
                request_id=message.request_id,
                message=str(error),
                is_overload=isinstance(error, OverloadError),
            )
            self._channel.send(refused)
        else:
            self._unstarted[request.request_id] = request.arrival_s

    def _take_masks(self) -> None:
        """Add the requests whose grammars are ready."""
        for message, mask in self._masks.take():
            if isinstance(mask, str):
                refused = ipc.Refused(request_id=message.request_id, message=mask, is_grammar=True)
                self._channel.send(refused)
            else:
                self._add(message, mask)

    def _request(self, message: ipc.Submit, mask: LogitsMask | None) -> Request:
        return Request(
            request_id=message.request_id,
            prompt_token_ids=tuple(message.token_ids),
            sampling=message.sampling,
            seed=message.seed,
            eos_token_ids=self._llm.model_config.eos_token_ids,
            tenant=message.tenant,
            mask=mask,
        )

    def _step(self) -> None:
        stats = self._engine.stats
        began_s, num_before = time.perf_counter(), stats.num_computed_tokens
        num_steps = stats.num_steps
        num_running = len(self._engine.scheduler.running)
        try:
            events = self._engine.step()
        except Exception:
            # Its requests have ended, and the next step tells; the others can go on.
            logger.exception("a step failed")
            self._num_failed_steps += 1
            is_over = self._num_failed_steps >= MAX_FAILED_STEPS
            if is_over or is_lost(self._llm.device.torch_device):
                raise
            return
        # A step that only told of ends has shown nothing of the device.
        if stats.num_steps > num_steps:
            self._num_failed_steps = 0
        self._note_starts(began_s)
        items = [self._token(event) for event in events]
        num_computed = stats.num_computed_tokens - num_before
        self._meter.stepped(time.perf_counter(), num_running, num_computed)
        self._channel.send(ipc.Tokens(num_computed=num_computed, items=items))

    def _note_starts(self, began_s: float) -> None:
        """Keep when requests had their first step."""
        waiting = self._engine.scheduler.waiting
        for request_id in [name for name in self._unstarted if name not in waiting]:
            arrival_s = self._unstarted.pop(request_id)
            self._queue_s[request_id] = max(0.0, began_s - arrival_s)

    def _token(self, event: TokenEvent) -> ipc.TokenOut:
        record = self._records[event.request_id]
        num_cached = record.num_cached or 0
        queue_s = self._queue_s.get(event.request_id, 0.0)
        if event.finish_reason is not None:
            del self._records[event.request_id]
            self._queue_s.pop(event.request_id, None)
            self._num_prefix_queries += record.sequence.num_prompt
            self._num_prefix_hits += num_cached
        return ipc.TokenOut(
            request_id=event.request_id,
            token_id=event.token_id,
            finish_reason=event.finish_reason,
            detail=event.finish_detail,
            error_cause=event.error_cause,
            num_cached=num_cached,
            queue_s=queue_s,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
        )

    def _send_status(self) -> None:
        now_s = time.monotonic()
        self._status_due_s = now_s + STATUS_S
        scheduler, stats = self._engine.scheduler, self._engine.stats
        if not scheduler.has_work or now_s >= self._cache_due_s:
            self._cache_due_s = now_s + CACHE_S
            self._slow = self._cache_use() | self._speed()
        self._channel.send(
            ipc.Status(
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting) + self._masks.num_waiting,
                num_pages_free=scheduler.allocator.num_free,
                num_pages_cached=scheduler.allocator.num_cached,
                num_pages_used=scheduler.allocator.num_used,
                num_preemptions=scheduler.num_preemptions,
                num_steps=stats.num_steps,
                num_computed_tokens=stats.num_computed_tokens,
                num_prefix_queries=self._num_prefix_queries,
                num_prefix_hits=self._num_prefix_hits,
                **self._slow,
            )
        )

    def _speed(self) -> dict[str, Any]:
        """Time and roof fraction of a decode step, and how evenly experts are used."""
        load = self._meter.load()
        is_running = bool(self._engine.scheduler.running)
        return {
            "step_s": self._meter.step_s if is_running else None,
            "roof_fraction": self._meter.roof_fraction(load) if is_running else None,
            "expert_load": None if load is None else ipc.ExpertLoadOut(**asdict(load)),
        }

    def _cache_use(self) -> dict[str, Any]:
        """Bytes, true bits and pages by kind of what running sequences hold."""
        running = list(self._engine.scheduler.running.values())
        page_ids = list(set().union(*(sequence.page_ids for sequence in running)))
        use = self._llm.pool.use(page_ids)
        # Only full pages are shared, so each open row belongs to one sequence.
        num_open = sum(len(s.page_ids) * PAGE_SIZE - s.num_computed for s in running)
        num_tokens = len(page_ids) * PAGE_SIZE - num_open
        true_bits = self._llm.pool.bits(use.num_bytes, max(0, num_tokens))
        return {
            "kv_bytes": use.num_bytes,
            "kv_true_bits": true_bits,
            "kv_pages_by_kind": dict(use.pages_by_kind),
        }

    def _beat(self) -> None:
        """Tell that the process runs; end it if the server is gone and the loop hangs."""
        while not self._channel.wait_closed(BEAT_S):
            since_s = self._busy_since_s
            busy_s = 0.0 if since_s is None else time.monotonic() - since_s
            try:
                self._channel.send(ipc.Beat(busy_s=busy_s))
            except ServerGoneError:
                break
        if not self._has_ended.wait(END_GRACE_S):
            os._exit(1)
