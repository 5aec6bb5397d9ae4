"""An engine that runs the scripted model, and what tests ask of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from scripted import EOS, FAKE_FORMAT, VOCAB_SIZE, ScriptedModel, hash_script

from subten.cache.allocator import PageAllocator, PageHash, page_key
from subten.cache.pool import PagePool
from subten.core import (
    Fault,
    LogitsMask,
    Request,
    SamplingParams,
    TokenEvent,
    no_fault,
)
from subten.engine.engine import Engine
from subten.engine.graphs import DecodeGraphs
from subten.engine.prefill_graphs import PrefillGraphs
from subten.engine.runner import Runner
from subten.engine.scheduler import Scheduler
from subten.kernels.advance import advance_torch
from subten.kernels.sample import sample_torch


def make_engine(
    model: ScriptedModel | None = None,
    *,
    num_pages: int = 32,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 4096,
    max_prefill_tokens: int | None = None,
    max_queue: int | None = None,
    enable_prefix_caching: bool = True,
    page_hash: PageHash = page_key,
    cache_scope: tuple[str, ...] = (),
    has_graphs: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    fault: Fault = no_fault,
) -> Engine:
    """An engine on the fake; `has_graphs` serves single tokens by the fixed inputs of graphs."""
    pool = PagePool(1, num_pages, 1, FAKE_FORMAT, torch.device("cpu"))
    pool.pages_LPGB.fill_(0xFF)
    device = torch.device("cpu")
    model = model or ScriptedModel()
    graphs: dict[str, Any] = {}
    if has_graphs:
        settings = {
            "sample": sample_torch,
            "max_model_len": max_model_len,
            "device": device,
            "capture": lambda step: step,
        }
        graphs = {
            "graphs": DecodeGraphs(
                model, pool, advance=advance_torch, max_batch=max_num_seqs, **settings
            ),
            "prefill_graphs": PrefillGraphs(model, pool, **settings),
        }
    runner = Runner(
        model,
        pool,
        sample=sample_torch,
        vocab_size=VOCAB_SIZE,
        device=device,
        fault=fault,
        **graphs,
    )
    scheduler = Scheduler(
        PageAllocator(num_pages, enable_prefix_caching, page_hash=page_hash, fault=fault),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_prefill_tokens=max_prefill_tokens,
        max_queue=max_queue,
        cache_scope=cache_scope,
    )
    return Engine(scheduler, runner, clock=clock, fault=fault)


def make_request(
    name: str,
    prompt: list[int],
    *,
    seed: int = 0,
    tenant: str = "",
    mask: LogitsMask | None = None,
    **sampling: object,
) -> Request:
    """A greedy request of ten tokens, unless `sampling` says otherwise."""
    params = {"max_tokens": 10, "temperature": 0.0} | sampling
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**params),
        seed=seed,
        eos_token_ids=(EOS,),
        tenant=tenant,
        mask=mask,
    )


def expected(request: Request) -> list[int]:
    """What the default script says to this request, greedily."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(hash_script(tuple(tokens)))
    return tokens[len(request.prompt_token_ids) :]


def drain(engine: Engine, earlier: Iterable[TokenEvent] = ()) -> dict[str, list[TokenEvent]]:
    """Step until nothing is left; all events by request, each stream complete and in order."""
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    for event in earlier:
        events[event.request_id].append(event)
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    engine.scheduler.check_integrity()
    assert engine.scheduler.allocator.num_used == 0
    for name, own in events.items():
        ends = [event for event in own if event.finish_reason is not None]
        assert ends == own[-1:], (name, ends)
        indices = [event.index for event in own if event.token_id is not None]
        assert indices == list(range(len(indices))), (name, indices)
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    """The tokens of a stream of events."""
    return [event.token_id for event in events if event.token_id is not None]
