"""From a batch of integers to one token a sequence; the only owner of device state.

Letters: S sequences of the batch, V vocabulary, T tokens of a prompt's chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from subten.cache.pool import KVPool
from subten.core import Batch, BatchItem, Fault, no_fault
from subten.device import on_device
from subten.engine.expert_load import ExpertLoad
from subten.engine.graph_inputs import span_of
from subten.engine.graphs import DecodeGraphs
from subten.engine.prefill_graphs import PrefillGraphs
from subten.engine.sampler import Sampler
from subten.engine.scheduler import BAD_LOGITS
from subten.kernels.cpu_linear import FEW_ROWS
from subten.kernels.step import StepTensors, make_step

Model = Callable[[StepTensors, Any], torch.Tensor]
"""`model(step, pool.eager_step(spans)) -> logits_SV` float32, as `Decoder` has it."""


class Runner:
    """Runs batches: tensors in, forward, sample, one small copy back."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        sample: Callable[..., Any],
        vocab_size: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
        expert_load: ExpertLoad | None = None,
        fault: Fault = no_fault,
    ) -> None:
        """`graphs`, if given, serves the sequences that compute a single token.

        `prefill_graphs`, if given, serves a sequence that alone computes more of them.
        `expert_load`, if given, is shown the routing of steps that no graph runs.
        """
        self._model = model
        self._pool = pool
        self._sampler = Sampler(sample, vocab_size=vocab_size, device=device, fault=fault)
        self._device = device
        self._graphs = graphs
        self._prefill_graphs = prefill_graphs
        self._expert_load = expert_load
        self._fault = fault

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int | None]:
        """Compute a batch; for each item its next token, or None while its prompt is unfinished.

        An item whose logits are NaN or have no finite value gives BAD_LOGITS, unfinished or not.
        """
        tokens: list[int | None] = [None] * len(batch.items)
        groups = self._groups(batch)
        spans = [span_of(item) for item in batch.items]
        is_decode = all(item.num_tokens == 1 for item in batch.items)
        settle = _Once(lambda: self._pool.settle(spans, is_decode=is_decode))
        with on_device(self._device):
            self._pool.prepare(spans)
            for group in groups:
                items = [batch.items[i] for i in group]
                has_more = len(groups) > 1
                sampled = self._run_items(
                    items,
                    has_more=has_more,
                    settle=_nothing if has_more else settle,
                    meanwhile=batch.meanwhile,
                )
                for index, token in zip(group, sampled, strict=True):
                    tokens[index] = token
            settle()
        return tokens

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended."""
        self._sampler.forget(request_id)

    def _groups(self, batch: Batch) -> list[list[int]]:
        """Which items, by index, share a forward pass.

        On a GPU all of them, less the decoders that graphs serve. On a CPU each has its own, so
        that a sequence's tokens are the same, bit for bit, alone and beside others: matrix products
        round in another way when a call has other rows. That costs nothing for prefills, which keep
        a CPU busy alone, and little for up to FEW_ROWS decoders, whose rows would go through the
        weights one by one anyway. More decoders share a pass. A prompt whose log-probabilities are
        wanted goes alone everywhere: it has a row of logits for each token.
        """
        alone = [[i] for i, item in enumerate(batch.items) if _reads_prompt(item)]
        indices = [i for i, item in enumerate(batch.items) if not _reads_prompt(item)]
        decoders = [i for i in indices if batch.items[i].num_tokens == 1]
        others = [i for i in indices if batch.items[i].num_tokens > 1]
        if self._graphs is not None:
            width = self._graphs.max_batch
            groups = [decoders[i : i + width] for i in range(0, len(decoders), width)]
            return [*groups, *([others] if others else []), *alone]
        if self._device.type != "cpu":
            return [*([indices] if indices else []), *alone]
        if len(decoders) <= FEW_ROWS:
            return [*([i] for i in indices), *alone]
        return [decoders, *([i] for i in others), *alone]

    def _run_items(
        self,
        items: list[BatchItem],
        *,
        has_more: bool,
        settle: Callable[[], None],
        meanwhile: Callable[[], None],
    ) -> list[int | None]:
        self._fault("step")
        if self._graphs is None or _reads_prompt(items[0]):
            if self._graphs is not None:
                self._graphs.drop_ahead()
            sampled = self._forward(items)
        elif all(item.num_tokens == 1 for item in items):

            def when_queued() -> None:
                settle()
                self._sampler.prepare(items)
                meanwhile()

            logits_SV, sampled = self._graphs.run(items, has_more=has_more, settle=when_queued)
            sampled = self._sampler.choose(logits_SV, items, sampled)
        else:
            self._graphs.drop_ahead()
            sampled = self._prefill(items, meanwhile)
        return [
            token if item.needs_token or token == BAD_LOGITS else None
            for item, token in zip(items, sampled, strict=True)
        ]

    def _prefill(self, items: list[BatchItem], meanwhile: Callable[[], None]) -> list[int]:
        graphs = self._prefill_graphs
        if graphs is None or len(items) > 1 or not graphs.takes(items[0]):
            return self._forward(items)

        def when_queued() -> None:
            self._sampler.prepare(items)
            meanwhile()

        logits_SV, sampled = graphs.run(items[0], meanwhile=when_queued)
        return self._sampler.choose(logits_SV, items, sampled)

    def _forward(self, items: list[BatchItem]) -> list[int]:
        step = make_step(
            token_ids=[i.sequence.token_ids[i.start : i.start + i.num_tokens] for i in items],
            starts=[i.start for i in items],
            page_ids=[i.sequence.page_ids for i in items],
            device=self._device,
        )
        pages = self._pool.eager_step([span_of(item) for item in items])
        if not _reads_prompt(items[0]):
            logits_SV = self._model(step, pages)
            if self._expert_load is not None and self._expert_load.is_due:
                self._expert_load.take(self._expert_load.routed(), len(step.token_id_T))
            return self._sampler.choose(logits_SV, items)
        row_T = torch.arange(items[0].num_tokens, device=self._device)
        logits_TV = self._model(replace(step, logit_row_S=row_T), pages)
        is_ok = self._sampler.read_prompt(logits_TV, items[0])
        return self._sampler.choose(logits_TV[-1:], items) if is_ok else [BAD_LOGITS]


def _reads_prompt(item: BatchItem) -> bool:
    """Whether every row of logits of a chunk is wanted, for log-probabilities of the prompt."""
    return item.sequence.wants_prompt_logprobs and item.start < item.sequence.num_prompt


def _nothing() -> None:
    pass


class _Once:
    """Calls a function the first time that it is called."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
