"""Decode steps as CUDA graphs: one launch a step, inputs that move under fixed addresses.

Letters: S sequences of the step, P entries of a row of the page table, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subten.cache.fidelity import Span
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
    replay_or_step,
    sampling_of,
    span,
)
from subten.engine.scheduler import BAD_LOGITS
from subten.kernels.advance import BAD_TOKEN
from subten.kernels.step import StepTensors

assert BAD_TOKEN == BAD_LOGITS, (BAD_TOKEN, BAD_LOGITS)

EXACT_SIZES = 8
"""Up to so many sequences each number has its own graph: a padded row would read experts too."""

SIZE_STEP = 8
"""Above, sizes are multiples of this, and the rows that no sequence fills are padding."""


class DecodeGraphs:
    """Steps of one token a sequence, for up to `max_batch` sequences of `max_model_len` tokens.

    A graph is captured when a batch size and a bucket of KV lengths first occur. Rows without a
    sequence have kv_len 0 and slot -1: they read and write no page. `capture` turns a step into
    its replay; tests on a CPU pass the step itself, which is also what stays in place of a graph
    where it raises CaptureError.

    The device does not wait for the host between two steps: before the tokens of a step are read,
    the next one is started on the device's own tokens, for the sequences that go on as far as is
    known. If the next call asks for these or some of them, the results are there or on their way.
    Else they are dropped: what such a step wrote lies past the end of its sequences, and numbers
    drawn depend on seed and index alone.

    Nor is there a copy between the two: `advance` ends each step by writing its tokens to memory of
    the host and by moving the inputs on. The host fills them when it starts other rows, when a
    sequence has a new page, and where the pool has inputs of its own.
    """

    def __init__(
        self,
        model: Callable[[StepTensors, Any], torch.Tensor],
        pool: KVPool,
        *,
        sample: Callable[..., Any],
        advance: Callable[..., None],
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
        self._advance = advance
        self._capture = capture
        self._max_model_len = max_model_len
        self._replays: dict[tuple[int, int], Step] = {}
        self._expert_load = expert_load
        self._routed: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._ahead: _Flight | None = None
        rows = _padded_size(max_batch)
        pool_layout = pool.decode_layout(rows)
        self._fills_each_step = bool(pool_layout)
        # Results of a step and of the one ahead of it, by turns.
        self._turn = 0
        self._sampled_2S = torch.zeros(2, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = Inputs(
            {
                "token_id_T": ("int64", (rows,)),
                "position_T": ("int64", (rows,)),
                "slot_T": ("int64", (rows,)),
                "kv_len_S": ("int32", (rows,)),
                **{name: (dtype, (rows,)) for name, dtype in SAMPLING_LAYOUT.items()},
                "turn_1": ("int32", (1,)),
                **pool_layout,
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
        chosen = None if flight is None else flight.find(items)
        if flight is None or chosen is None:
            flight, chosen = (
                self._launch([_Row.of(item) for item in items]),
                list(range(len(items))),
            )
        settle()
        logits_SV, runs = flight.logits_SV, _runs(chosen)
        if runs != [(0, 0, len(flight.rows))]:
            logits_SV = torch.cat([logits_SV[old : old + n] for _, old, n in runs])
        # A step ahead would overwrite logits that are still to be read.
        is_simple = all(item.needs_token and not _needs_logits(item) for item in items)
        if not has_more and is_simple:
            self._ahead = self._launch_ahead(flight, chosen)
        sampled = flight.read()
        return logits_SV, [sampled[i] for i in chosen]

    def drop_ahead(self) -> None:
        """Forget the step that was started ahead, since other steps come between."""
        self._ahead = None

    def _launch_ahead(self, flight: _Flight, chosen: list[int]) -> _Flight | None:
        """Start the step after `flight` for those of its rows that will go on, if it can run."""
        following = [(i, flight.rows[i].next()) for i in chosen]
        following = [(i, row) for i, row in following if not self._is_over(row)]
        rows = [row for _, row in following]
        if not rows or not all(row.can_run for row in rows):
            return None
        # A page that the step opens is not yet known to the pool.
        opening = [row for row in rows if row.position % PAGE_SIZE == 0]
        if opening:
            self._pool.prepare([row.span for row in opening])
        return self._launch(rows, feed=(flight.token_S, _runs([i for i, _ in following])))

    def _is_over(self, row: _Row) -> bool:
        """Whether `row` will not be wanted, whatever the token before it is."""
        num_allowed = row.sequence.request.sampling.max_tokens
        return row.index >= num_allowed or row.position + 1 >= self._max_model_len

    def _launch(
        self, rows: list[_Row], feed: tuple[torch.Tensor, list[_Run]] | None = None
    ) -> _Flight:
        """Start a step; its tokens are those of the sequences.

        With `feed` the host does not know them yet: they are these runs of what the last step that
        was started gave its rows.
        """
        size = _padded_size(len(rows))
        bucket = kv_bucket(max(row.position + 1 for row in rows), self._max_model_len)
        self._turn = 1 - self._turn
        # All rows of that step, in their places: it has moved them on itself.
        is_filled = feed is not None and feed[1] == [(0, 0, len(feed[0]))]
        is_filled &= not self._fills_each_step
        replay = self._replays.get((size, bucket))
        if replay is None:
            # The step runs before its capture: on padding, which no live page notices.
            self._fill([], size)
            what = f"decode steps of {size} sequences, up to {bucket} tokens each"
            replay = replay_or_step(lambda: self._step(size, bucket), self._capture, what=what)
            self._replays[size, bucket] = replay
            is_filled = False
        for i, row in enumerate(rows):
            # A new page: the slot was not known when the inputs moved on.
            is_filled &= not self._page_table.set_row(i, row.sequence.page_ids)
        if not is_filled:
            self._fill(rows, size)
            if feed is not None:
                self._feed(*feed)
        logits_SV, token_S = (tensor[: len(rows)] for tensor in replay())
        if self._expert_load is not None and self._expert_load.is_due:
            self._expert_load.take(self._routed[size, bucket], len(rows))
        return _Flight(rows, logits_SV, token_S, self._sampled_2S[self._turn, : len(rows)])

    def _feed(self, token_S: torch.Tensor, runs: list[_Run]) -> None:
        token_id_T = self._inputs.device["token_id_T"]
        for new, old, num in runs:
            token_id_T[new : new + num].copy_(token_S[old : old + num])

    def _step(self, size: int, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
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
        token_S, is_ok_S = self._sample(logits_SV, sampling_of(inputs))
        self._advance(
            token_S,
            is_ok_S,
            step,
            index_S=inputs["index_S"],
            turn_1=self._inputs.device["turn_1"],
            sampled_2S=self._sampled_2S,
        )
        return logits_SV, token_S

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
        host["turn_1"][0] = self._turn
        padding = slice(len(rows), size)
        for name, values in host.items():
            if name != "turn_1":
                values[padding] = -1 if name == "slot_T" else 0
        self._pool.fill_decode(host, [row.span for row in rows])
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

    @property
    def span(self) -> Span:
        return span(self.sequence, self.position, self.position + 1)

    @property
    def can_run(self) -> bool:
        """Whether it has a page, and the device alone can choose its token."""
        has_page = self.position < len(self.sequence.page_ids) * PAGE_SIZE
        return has_page and not self.sequence.request.needs_logits(self.index)

    def computes(self, item: BatchItem) -> bool:
        """Whether this is `item`, with the token that the device went on with."""
        return (
            item.sequence is self.sequence
            and item.start == self.position
            and item.sequence.num_output == self.index
        )


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
        self._sampled_S = sampled_S
        self._done = Event(token_S.device)
        self._done.record()

    def find(self, items: list[BatchItem]) -> list[int] | None:
        """Which row each item is; None if one of them is none."""
        index_of = {row.sequence.request.request_id: i for i, row in enumerate(self.rows)}
        found = [index_of.get(item.sequence.request.request_id) for item in items]
        chosen = [i for i in found if i is not None]
        if len(chosen) < len(items):
            return None
        pairs = zip(items, chosen, strict=True)
        return chosen if all(self.rows[i].computes(item) for item, i in pairs) else None

    def read(self) -> list[int]:
        """Wait for the step; its sampled ids."""
        self._done.wait()
        sampled: list[int] = self._sampled_S.tolist()
        return sampled


_Run = tuple[int, int, int]
"""Rows that stay together: first new row, first old row, number."""


def _runs(chosen: list[int]) -> list[_Run]:
    """Old rows in their new order, as few runs as there can be: each is one copy."""
    runs: list[_Run] = []
    for new, old in enumerate(chosen):
        if runs and old == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((new, old, 1))
    return runs


def _needs_logits(item: BatchItem) -> bool:
    return item.sequence.request.needs_logits(item.sequence.num_output)


def _padded_size(num_sequences: int) -> int:
    if num_sequences <= EXACT_SIZES:
        return num_sequences
    return -(-num_sequences // SIZE_STEP) * SIZE_STEP
