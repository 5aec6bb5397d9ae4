"""Decode steps as CUDA graphs: one launch a step, inputs that move under fixed addresses.

Letters: S sequences of the step, P entries of a row of the page table, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subten.cache.pool import KVPool
from subten.core import PAGE_SIZE, BatchItem, Sequence
from subten.engine.expert_load import ExpertLoad
from subten.engine.graph_inputs import (
    SAMPLING_LAYOUT,
    Event,
    Inputs,
    PageTable,
    Step,
    capture_cuda_graph,
    fill_sampling,
    kv_bucket,
    sample_step,
    span,
)
from subten.kernels.step import StepTensors

EXACT_SIZES = 8
"""Up to so many sequences each number has its own graph: a padded row would read experts too."""

SIZE_STEP = 8
"""Above, sizes are multiples of this, and the rows that no sequence fills are padding."""


class DecodeGraphs:
    """Steps of one token a sequence, for up to `max_batch` sequences of `max_model_len` tokens.

    A graph is captured when a batch size and a bucket of KV lengths first occur. Rows without a
    sequence have kv_len 0 and slot -1: they read and write no page. `capture` turns a step into
    its replay; tests on a CPU pass the step itself.

    The device does not wait for the host between two steps: before the tokens of a step are read,
    the next one is started on the device's own tokens, for the same sequences in the same rows. If
    that is what the next call asks for, its results are there or on their way. Else they are
    dropped: what such a step wrote lies past the end of its sequences, and numbers drawn depend on
    seed and index alone.
    """

    def __init__(
        self,
        model: Callable[[StepTensors, Any], torch.Tensor],
        pool: KVPool,
        *,
        sample: Callable[..., Any],
        max_batch: int,
        max_model_len: int,
        device: torch.device,
        capture: Callable[[Step], Step] = capture_cuda_graph,
        expert_load: ExpertLoad | None = None,
    ) -> None:
        assert max_batch >= 1, max_batch
        self.max_batch = max_batch
        self._model = model
        self._pool = pool
        self._sample = sample
        self._capture = capture
        self._max_model_len = max_model_len
        self._replays: dict[tuple[int, int], Step] = {}
        self._expert_load = expert_load
        self._routed: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._ahead: _Flight | None = None
        rows = _padded_size(max_batch)
        self._inputs = Inputs(
            {
                "token_id_T": ("int64", (rows,)),
                "position_T": ("int64", (rows,)),
                "slot_T": ("int64", (rows,)),
                "kv_len_S": ("int32", (rows,)),
                **{name: (dtype, (rows,)) for name, dtype in SAMPLING_LAYOUT.items()},
                **pool.decode_layout(rows),
            },
            device,
        )
        self._page_table = PageTable(rows, math.ceil(max_model_len / PAGE_SIZE), device)
        index = torch.arange(rows + 1, device=device)
        self._index, self._index32 = index, index.int()

    def run(
        self,
        items: list[BatchItem],
        *,
        has_more: bool = False,
        settle: Callable[[], None] = lambda: None,
    ) -> tuple[torch.Tensor, list[int]]:
        """One token for each item of one token: logits_SV, on the device, and the sampled ids.

        BAD_LOGITS stands for a row that cannot be sampled. Bias, penalties and masks are not
        applied; who needs the logits may read them until the next run. With `has_more`, other
        sequences share the engine's step: the next one will not be for these alone, and none is
        started ahead. `settle` is called between the two: what it queues comes after this step and
        before the next.
        """
        assert 1 <= len(items) <= self.max_batch, (len(items), self.max_batch)
        flight, self._ahead = self._ahead, None
        if flight is None or not flight.serves(items):
            flight = self._launch([_Row.of(item) for item in items])
        settle()
        rows = [row.next() for row in flight.rows]
        # A step ahead would overwrite logits that are still to be read.
        is_simple = all(item.needs_token and not _needs_logits(item) for item in items)
        if not has_more and is_simple and all(self._may_follow(row) for row in rows):
            self._ahead = self._launch(rows, feed_T=flight.token_S)
        return flight.logits_SV, flight.read()

    def drop_ahead(self) -> None:
        """Forget the step that was started ahead, since other steps come between."""
        self._ahead = None

    def _may_follow(self, row: _Row) -> bool:
        """Whether `row` will be wanted as far as can be known before its token is, and can run."""
        sequence = row.sequence
        params = sequence.request.sampling
        return (
            not sequence.request.needs_logits(row.index)
            and row.index < params.max_tokens
            and row.position + 1 < self._max_model_len
            and row.position < len(sequence.page_ids) * PAGE_SIZE
        )

    def _launch(self, rows: list[_Row], feed_T: torch.Tensor | None = None) -> _Flight:
        """Start a step; its tokens are `feed_T` on the device, or else those of the sequences."""
        size = _padded_size(len(rows))
        bucket = kv_bucket(max(row.position + 1 for row in rows), self._max_model_len)
        replay = self._replays.get((size, bucket))
        if replay is None:
            # The step runs before its capture: on padding, which no live page notices.
            self._fill([], size)
            replay = self._capture(lambda: self._step(size, bucket))
            self._replays[size, bucket] = replay
        self._fill(rows, size)
        if feed_T is not None:
            self._inputs.device["token_id_T"][: len(rows)].copy_(feed_T)
        logits_SV, token_S, sampled_S = (tensor[: len(rows)] for tensor in replay())
        if self._expert_load is not None and self._expert_load.is_due:
            self._expert_load.take(self._routed[size, bucket], len(rows))
        return _Flight(rows, logits_SV, token_S, sampled_S)

    def _step(self, size: int, bucket: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = {name: tensor[:size] for name, tensor in self._inputs.device.items()}
        step = StepTensors(
            token_id_T=inputs["token_id_T"],
            position_T=inputs["position_T"],
            slot_T=inputs["slot_T"],
            page_table_SP=self._page_table.device[:size],
            kv_len_S=inputs["kv_len_S"],
            query_start_S1=self._index32[: size + 1],
            tile_seq_Q=self._index32[:size],
            tile_start_Q=self._index32[:size],
            logit_row_S=self._index[:size],
            max_kv_len=bucket,
            max_query_len=1,
        )
        logits_SV = self._model(step, self._pool.decode_step(inputs))
        if self._expert_load is not None:
            # The last time that this runs is the capture itself, whose tensors each replay fills.
            self._routed[size, bucket] = self._expert_load.routed()
        return sample_step(logits_SV, self._sample, inputs)

    def _fill(self, rows: list[_Row], size: int) -> None:
        host = self._inputs.next_host()
        for i, row in enumerate(rows):
            sequence, position = row.sequence, row.position
            page = sequence.page_ids[position // PAGE_SIZE]
            if position < len(sequence.token_ids):
                host["token_id_T"][i] = sequence.token_ids[position]
            host["position_T"][i] = position
            host["slot_T"][i] = page * PAGE_SIZE + position % PAGE_SIZE
            host["kv_len_S"][i] = position + 1
            fill_sampling(host, i, sequence, row.index)
            self._page_table.set_row(i, sequence.page_ids)
        padding = slice(len(rows), size)
        for name, values in host.items():
            values[padding] = -1 if name == "slot_T" else 0
        spans = [span(row.sequence, row.position, row.position + 1) for row in rows]
        self._pool.fill_decode(host, spans)
        self._inputs.upload()


@dataclass(frozen=True, slots=True)
class _Row:
    """What one row computes: the token at `position`, whose successor is output token `index`."""

    sequence: Sequence
    position: int
    index: int

    @classmethod
    def of(cls, item: BatchItem) -> _Row:
        assert item.num_tokens == 1, item.num_tokens
        return cls(item.sequence, item.start, item.sequence.num_output)

    def next(self) -> _Row:
        return _Row(self.sequence, self.position + 1, self.index + 1)


class _Flight:
    """A step that was started, and its results."""

    def __init__(
        self,
        rows: list[_Row],
        logits_SV: torch.Tensor,
        token_S: torch.Tensor,
        sampled_S: torch.Tensor,
    ) -> None:
        self.rows = rows
        self.logits_SV = logits_SV
        self.token_S = token_S
        # The next replay of the graph overwrites its outputs: this copy is queued before it.
        self._sampled_S = torch.empty(
            len(rows), dtype=torch.int64, pin_memory=sampled_S.device.type == "cuda"
        )
        self._sampled_S.copy_(sampled_S, non_blocking=True)
        self._done = Event(sampled_S.device)
        self._done.record()

    def serves(self, items: list[BatchItem]) -> bool:
        """Whether these items are the rows, each with the token that the device went on with."""
        return len(items) == len(self.rows) and all(
            item.sequence is row.sequence
            and item.start == row.position
            and item.sequence.num_output == row.index
            for item, row in zip(items, self.rows, strict=True)
        )

    def read(self) -> list[int]:
        """Wait for the step; its sampled ids."""
        self._done.wait()
        sampled: list[int] = self._sampled_S.tolist()
        return sampled


def _needs_logits(item: BatchItem) -> bool:
    return item.sequence.request.needs_logits(item.sequence.num_output)


def _padded_size(num_sequences: int) -> int:
    if num_sequences <= EXACT_SIZES:
        return num_sequences
    return -(-num_sequences // SIZE_STEP) * SIZE_STEP
