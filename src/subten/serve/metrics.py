"""What Prometheus reads: vLLM's names under the prefix `subten:`, times from 0.1 ms on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from subten.serve import ipc
from subten.serve.supervisor import EngineState, Supervisor

TOKEN_BUCKETS_S = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3, 5e-3, 7.5e-3),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
REQUEST_BUCKETS_S = (
    *(1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
    *(120.0, 300.0, 600.0, 1800.0),
)
COUNT_BUCKETS = tuple(float(2**power) for power in range(18))
FINISHES = ("stop", "length", "cancelled", "error", "rejected")
"""How an accepted answer ends; each is counted under exactly one."""


class Metrics:
    """One registry a server; `model` is the value of the label model_name."""

    def __init__(self, model: str, supervisor: Supervisor) -> None:
        # Series that nobody reads, one for each counter and histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._model = model

        def counter(name: str, text: str) -> Counter:
            made = Counter(f"subten:{name}", text, ["model_name"], registry=self._registry)
            return made.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"subten:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
            )
            return made.labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.accepted = counter("request_accepted", "Answers asked for by well-formed requests.")
        self._finished = Counter(
            "subten:request_success",
            "Answers by how they ended; the sum of all is request_accepted once all have ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.finished = {reason: self._finished.labels(model, reason) for reason in FINISHES}
        self.ttft = histogram(
            "time_to_first_token_seconds", "Request accepted to first token.", REQUEST_BUCKETS_S
        )
        self.itl = histogram("inter_token_latency_seconds", "Between tokens.", TOKEN_BUCKETS_S)
        self.tpot = histogram(
            "request_time_per_output_token_seconds",
            "(last - first token) / (tokens - 1) of a request.",
            TOKEN_BUCKETS_S,
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds", "Request accepted to its end.", REQUEST_BUCKETS_S
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Request accepted to its first step.", REQUEST_BUCKETS_S
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS_S
        )
        self.decode = histogram(
            "request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS_S
        )
        self.step_tokens = histogram(
            "iteration_tokens_total", "Tokens computed by a step.", COUNT_BUCKETS
        )
        self.request_prompt = histogram(
            "request_prompt_tokens", "Tokens of a prompt.", COUNT_BUCKETS
        )
        self.request_output = histogram(
            "request_generation_tokens", "Tokens of an answer.", COUNT_BUCKETS
        )
        self._registry.register(_EngineCollector(model, supervisor))

    async def render(self) -> bytes:
        """The text that a scrape gets; tokens go out between one metric and the next."""
        parts = []
        for metric in self._registry.collect():
            parts.append(generate_latest(_Only(metric)))
            await asyncio.sleep(0)
        return b"".join(parts)


class _Only(CollectorRegistry):
    """A registry of one metric, collected already."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class _EngineCollector(Collector):
    """Reads the engine's own counts when a scrape asks."""

    def __init__(self, model: str, supervisor: Supervisor) -> None:
        self._model = model
        self._supervisor = supervisor

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        supervisor = self._supervisor
        is_ready = supervisor.state is EngineState.READY
        yield self._gauge("engine_ready", "Whether the engine answers.", float(is_ready))
        yield self._counter("engine_restarts", "Restarts.", supervisor.num_restarts)
        status, ready = supervisor.status, supervisor.ready
        if status is not None and ready is not None:
            yield from self._of_engine(status, ready.info)

    def _of_engine(self, status: ipc.Status, info: ipc.EngineInfo) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Sequences in steps.", status.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting.", status.num_waiting)
        share = status.num_pages_used / info.num_pages
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", share)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up.", status.num_prefix_queries
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found in shared pages.", status.num_prefix_hits
        )
        yield self._counter("num_preemptions", "Sequences preempted.", status.num_preemptions)
        yield self._counter("engine_steps", "Steps.", status.num_steps)
        yield self._counter(
            "computed_tokens", "Tokens computed, prompts included.", status.num_computed_tokens
        )
        pages = GaugeMetricFamily(
            "subten:kv_pages", "KV pages by state.", labels=["model_name", "state"]
        )
        for state in ("free", "cached", "used"):
            pages.add_metric([self._model, state], getattr(status, f"num_pages_{state}"))
        yield pages
        kinds = GaugeMetricFamily(
            "subten:kv_pages_by_fidelity",
            "KV pages of running sequences by format.",
            labels=["model_name", "fidelity"],
        )
        for kind, number in status.kv_pages_by_kind.items():
            kinds.add_metric([self._model, kind], number)
        yield kinds
        true_bits = GaugeMetricFamily(
            "subten:kv_true_bits",
            "Bits of a cached element, scales and open rows included; idle: in full pages.",
            labels=["model_name", "kv_cache_dtype"],
        )
        bits = info.kv_full_page_bits if status.kv_true_bits is None else status.kv_true_bits
        true_bits.add_metric([self._model, info.kv_cache_dtype], bits)
        yield true_bits
        yield self._gauge(
            "kv_cache_used_bytes", "KV bytes that running sequences hold.", status.kv_bytes
        )
        yield self._gauge(
            "decode_step_seconds", "Time of a decode step; idle: 0.", status.step_s or 0.0
        )
        yield self._gauge(
            "roof_fraction",
            "Time at the memory's roof for the bytes of a decode step, over its time; idle: 0.",
            status.roof_fraction or 0.0,
        )
        if status.expert_load is not None:
            yield from self._of_experts(status.expert_load)

    def _of_experts(self, load: ipc.ExpertLoadOut) -> Iterator[Metric]:
        ranks = GaugeMetricFamily(
            "subten:expert_load",
            "Tokens of a layer's most used expert (rank 1), of its second and so on, over an even "
            "share; mean over layers, steps sampled in the last seconds.",
            labels=["model_name", "rank"],
        )
        for rank, value in enumerate(load.by_rank, start=1):
            ranks.add_metric([self._model, str(rank)], value)
        yield ranks
        violation = GaugeMetricFamily(
            "subten:expert_max_violation",
            "MaxVio: largest load of a layer over an even share, minus 1.",
            labels=["model_name", "layers"],
        )
        violation.add_metric([self._model, "mean"], load.max_violation)
        violation.add_metric([self._model, "worst"], load.worst_violation)
        yield violation
        yield self._gauge(
            "experts_per_step", "Distinct experts of a layer in a step.", load.experts_a_step
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"subten:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"subten:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
