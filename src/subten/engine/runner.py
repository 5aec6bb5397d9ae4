"""From a batch of integers to one token a sequence; the only owner of device state.

Letters: S sequences of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subten.cache.pool import PagePool
from subten.core import Batch, BatchItem, Sequence
from subten.device import on_device
from subten.engine.graphs import DecodeGraphs
from subten.engine.prefill_graphs import PrefillGraphs
from subten.engine.scheduler import BAD_LOGITS
from subten.kernels.cpu_linear import FEW_ROWS
from subten.kernels.sample import SamplingTensors
from subten.kernels.step import StepTensors, make_step

Model = Callable[[StepTensors, torch.Tensor], torch.Tensor]
"""`model(step, pages_LPGB) -> logits_SV` float32, as `models.decoder.Decoder` has it."""


@dataclass(slots=True)
class _TokenCounts:
    """What penalties know of one sequence: tokens of its prompt, and counts of its output."""

    prompt_mask_V: torch.Tensor
    output_count_V: torch.Tensor
    num_counted: int


class Runner:
    """Runs batches: tensors in, forward, sample, one small copy back."""

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        sample: Callable[..., Any],
        vocab_size: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
    ) -> None:
        """`graphs`, if given, serves the sequences that compute a single token.

        `prefill_graphs`, if given, serves a sequence that alone computes more of them.
        """
        self._model = model
        self._pool = pool
        self._sample = sample
        self._vocab_size = vocab_size
        self._device = device
        self._graphs = graphs
        self._prefill_graphs = prefill_graphs
        self._counts: dict[str, _TokenCounts] = {}

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int | None]:
        """Compute a batch; for each item its next token, or None while its prompt is unfinished.

        An item whose logits are NaN or have no finite value gives BAD_LOGITS, unfinished or not.
        """
        tokens: list[int | None] = [None] * len(batch.items)
        groups = self._groups(batch)
        with on_device(self._device):
            for group in groups:
                items = [batch.items[i] for i in group]
                sampled = self._run_items(items, has_more=len(groups) > 1)
                for index, token in zip(group, sampled, strict=True):
                    tokens[index] = token
        return tokens

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended."""
        self._counts.pop(request_id, None)

    def _groups(self, batch: Batch) -> list[list[int]]:
        """Which items, by index, share a forward pass.

        On a GPU all of them, less the decoders that graphs serve. On a CPU each has its own, so
        that a sequence's tokens are the same, bit for bit, alone and beside others: matrix products
        round in another way when a call has other rows. That costs nothing for prefills, which keep
        a CPU busy alone, and little for up to FEW_ROWS decoders, whose rows would go through the
        weights one by one anyway. More decoders share a pass.
        """
        indices = list(range(len(batch.items)))
        decoders = [i for i in indices if batch.items[i].num_tokens == 1]
        others = [i for i in indices if batch.items[i].num_tokens > 1]
        if self._graphs is not None:
            width = self._graphs.max_batch
            groups = [decoders[i : i + width] for i in range(0, len(decoders), width)]
            return [*groups, others] if others else groups
        if self._device.type != "cpu":
            return [indices] if indices else []
        if len(decoders) <= FEW_ROWS:
            return [[i] for i in indices]
        return [decoders, *([i] for i in others)]

    def _run_items(self, items: list[BatchItem], *, has_more: bool) -> list[int | None]:
        if self._graphs is None:
            sampled = self._forward(items)
        elif all(item.num_tokens == 1 for item in items):
            sampled = self._replay(self._graphs, items, has_more=has_more)
        else:
            self._graphs.drop_ahead()
            sampled = self._prefill(items)
        return [
            token if item.needs_token or token == BAD_LOGITS else None
            for item, token in zip(items, sampled, strict=True)
        ]

    def _replay(self, graphs: DecodeGraphs, items: list[BatchItem], *, has_more: bool) -> list[int]:
        logits_SV, sampled = graphs.run(items, has_more=has_more)
        return self._penalised(logits_SV, sampled, items)

    def _penalised(
        self, logits_SV: torch.Tensor, sampled: list[int], items: list[BatchItem]
    ) -> list[int]:
        """`sampled`, unless an item has penalties, which graphs do not apply."""
        if not any(item.sequence.request.sampling.has_penalties for item in items):
            return sampled
        return self._choose(logits_SV, [item.sequence for item in items])

    def _prefill(self, items: list[BatchItem]) -> list[int]:
        graphs = self._prefill_graphs
        if graphs is None or len(items) > 1 or not graphs.takes(items[0]):
            return self._forward(items)
        logits_SV, sampled = graphs.run(items[0])
        return self._penalised(logits_SV, sampled, items)

    def _forward(self, items: list[BatchItem]) -> list[int]:
        step = make_step(
            token_ids=[i.sequence.token_ids[i.start : i.start + i.num_tokens] for i in items],
            starts=[i.start for i in items],
            page_ids=[i.sequence.page_ids for i in items],
            device=self._device,
        )
        logits_SV = self._model(step, self._pool.pages_LPGB)
        return self._choose(logits_SV, [item.sequence for item in items])

    def _choose(self, logits_SV: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        token_S, is_ok_S = self._sample(logits_SV, self._sampling_tensors(sequences))
        sampled: list[int] = torch.where(is_ok_S, token_S, BAD_LOGITS).tolist()
        return sampled

    def _sampling_tensors(self, sequences: list[Sequence]) -> SamplingTensors:
        params = [sequence.request.sampling for sequence in sequences]
        numbers = self._tensor(
            [
                [p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                [p.repetition_penalty for p in params],
                [p.presence_penalty for p in params],
                [p.frequency_penalty for p in params],
            ],
            torch.float32,
        )
        # Integers travel apart: float32 would round seeds, and equal seeds must stay equal.
        integers = self._tensor(
            [
                [sequence.request.seed for sequence in sequences],
                [sequence.num_output for sequence in sequences],
            ],
            torch.int64,
        )
        base = {
            "temperature_S": numbers[0],
            "top_p_S": numbers[1],
            "min_p_S": numbers[2],
            "top_k_S": self._tensor([p.top_k for p in params], torch.int32),
            "seed_S": integers[0],
            "index_S": integers[1],
        }
        if not any(p.has_penalties for p in params):
            return SamplingTensors(**base)
        counts = [self._count(sequence) for sequence in sequences]
        return SamplingTensors(
            **base,
            repetition_S=numbers[3],
            presence_S=numbers[4],
            frequency_S=numbers[5],
            prompt_mask_SV=torch.stack([c.prompt_mask_V for c in counts]),
            output_count_SV=torch.stack([c.output_count_V for c in counts]),
        )

    def _count(self, sequence: Sequence) -> _TokenCounts:
        """Bring the counts of a sequence up to its last token; usually one token to add."""
        request_id = sequence.request.request_id
        counts = self._counts.get(request_id)
        if counts is None:
            prompt = self._tensor(sequence.token_ids[: sequence.num_prompt], torch.int64)
            prompt_mask_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            prompt_mask_V[prompt] = True
            counts = self._counts[request_id] = _TokenCounts(
                prompt_mask_V=prompt_mask_V,
                output_count_V=torch.zeros_like(prompt_mask_V, dtype=torch.int32),
                num_counted=sequence.num_prompt,
            )
        fresh = self._tensor(sequence.token_ids[counts.num_counted :], torch.int64)
        one = torch.ones_like(fresh, dtype=torch.int32)
        counts.output_count_V.index_add_(0, fresh, one)
        counts.num_counted = len(sequence.token_ids)
        return counts

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)
