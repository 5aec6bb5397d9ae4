"""Prompt chunks as CUDA graphs: a chunk of a few hundred tokens is bound by launches, not by work.

Letters: T tokens of the chunk, Q query tiles, S sequences (here 1), V vocabulary.
"""

from __future__ import annotations

import bisect
import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from subten.cache.pool import KVPool
from subten.core import PAGE_SIZE, BatchItem
from subten.engine.graph_inputs import (
    SAMPLING_LAYOUT,
    Event,
    Inputs,
    Step,
    capture_cuda_graph,
    fill_sampling,
    kv_bucket,
    replay_or_step,
    sampling_of,
    span_of,
)
from subten.engine.scheduler import BAD_LOGITS
from subten.kernels.step import QUERY_TILE, StepTensors

CUT_LAYERS = (2, 8)
"""Layers at which a chunk's graph is cut: to launch all of 48 layers takes the host 0.3 to 0.6 ms,
in which the device would wait (benchmarks/plans/h200-prompt.json)."""

CHUNK_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens that chunks are padded to: at most a third of a chunk above 64 is padding."""


class PrefillGraphs:
    """Chunks of one sequence, up to CHUNK_SIZES[-1] tokens.

    A size and bucket of KV lengths is captured when it occurs the second time: a capture costs
    about three chunks, and a prompt that comes alone should not pay for others. Padding tokens have
    slot -1 and no query tile: they touch no page, and nothing reads what becomes of them. Where
    `capture` raises CaptureError, the padded step itself stays in place of its graph.
    """

    def __init__(
        self,
        model: Callable[[StepTensors, Any], torch.Tensor],
        pool: KVPool,
        *,
        sample: Callable[..., Any],
        max_model_len: int,
        device: torch.device,
        capture: Callable[..., Step] = capture_cuda_graph,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sample = sample
        layers = getattr(model, "layers", ())
        cuts = [layers[i] for i in CUT_LAYERS if i < len(layers)]
        self._capture = functools.partial(capture, cuts=cuts) if cuts else capture
        self._max_model_len = max_model_len
        self._seen: set[tuple[int, int]] = set()
        self._replays: dict[tuple[int, int], Step] = {}
        most = CHUNK_SIZES[-1]
        self._inputs = Inputs(
            {
                "token_id_T": ("int64", (most,)),
                "position_T": ("int64", (most,)),
                "slot_T": ("int64", (most,)),
                "logit_row_S": ("int64", (1,)),
                "kv_len_S": ("int32", (1,)),
                "page_table_SP": ("int32", (1, math.ceil(max_model_len / PAGE_SIZE))),
                "query_start_S1": ("int32", (2,)),
                "tile_seq_Q": ("int32", (most // QUERY_TILE,)),
                **{name: (dtype, (1,)) for name, dtype in SAMPLING_LAYOUT.items()},
                **pool.chunk_layout(most),
            },
            device,
            num_blocks=1,
        )
        self._tile_start_Q = torch.arange(0, most, QUERY_TILE, dtype=torch.int32, device=device)
        self._sampled_S = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._done = Event(device)

    def takes(self, item: BatchItem) -> bool:
        """Whether `run` serves this chunk; False when its size and bucket occur the first time."""
        if not 1 < item.num_tokens <= CHUNK_SIZES[-1]:
            return False
        key = self._key(item)
        is_known = key in self._seen
        self._seen.add(key)
        return is_known

    def run(
        self, item: BatchItem, *, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits_SV of the chunk's last token, until the next run, and the sampled id.

        BAD_LOGITS stands for logits that cannot be sampled. Bias, penalties and masks are not
        applied. `meanwhile` is called once the chunk is queued.
        """
        key = self._key(item)
        replay = self._replays.get(key)
        if replay is None:
            # The step runs before its capture: on padding, which no live page notices.
            self._fill(None, key[0])
            what = f"prompt chunks of {key[0]} tokens, up to {key[1]} with those before"
            replay = replay_or_step(lambda: self._step(*key), self._capture, what=what)
            self._replays[key] = replay
        self._fill(item, key[0])
        logits_SV, _ = replay()
        self._done.record()
        meanwhile()
        self._done.wait()
        return logits_SV, self._sampled_S.tolist()

    def _key(self, item: BatchItem) -> tuple[int, int]:
        size = CHUNK_SIZES[bisect.bisect_left(CHUNK_SIZES, item.num_tokens)]
        return size, kv_bucket(item.start + item.num_tokens, self._max_model_len)

    def _step(self, size: int, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Copies to the device and back are the graph's own: to ask for one takes the host 0.1 ms.
        self._inputs.copy()
        inputs = self._inputs.device
        step = StepTensors(
            token_id_T=inputs["token_id_T"][:size],
            position_T=inputs["position_T"][:size],
            slot_T=inputs["slot_T"][:size],
            page_table_SP=inputs["page_table_SP"],
            kv_len_S=inputs["kv_len_S"],
            query_start_S1=inputs["query_start_S1"],
            tile_seq_Q=inputs["tile_seq_Q"][: size // QUERY_TILE],
            tile_start_Q=self._tile_start_Q[: size // QUERY_TILE],
            logit_row_S=inputs["logit_row_S"],
            max_kv_len=bucket,
            max_query_len=size,
        )
        rows = {**inputs, "row_T": inputs["row_T"][:size]} if "row_T" in inputs else inputs
        logits_SV = self._model(step, self._pool.chunk_step(rows))
        token_S, is_ok_S = self._sample(logits_SV, sampling_of(inputs))
        sampled_S = torch.where(is_ok_S, token_S, BAD_LOGITS)
        self._sampled_S.copy_(sampled_S, non_blocking=True)
        return logits_SV, sampled_S

    def _fill(self, item: BatchItem | None, size: int) -> None:
        self._done.wait()
        host = self._inputs.next_host()
        num_tokens = 0 if item is None else item.num_tokens
        for name, padding in (("token_id_T", 0), ("position_T", 0), ("slot_T", -1)):
            host[name][num_tokens:size] = padding
        num_tiles = -(-num_tokens // QUERY_TILE)
        host["tile_seq_Q"][:num_tiles] = 0
        host["tile_seq_Q"][num_tiles:] = -1
        host["query_start_S1"][:] = (0, num_tokens)
        host["logit_row_S"][0] = max(0, num_tokens - 1)
        host["kv_len_S"][0] = 0
        if item is not None:
            sequence, end = item.sequence, item.start + num_tokens
            pages = sequence.page_ids
            token_ids = sequence.token_ids[item.start : end]
            # A third of the time that an assignment of the list takes.
            struct.pack_into(f"={num_tokens}q", host["token_id_T"].data, 0, *token_ids)
            host["position_T"][:num_tokens] = np.arange(item.start, end)
            page_P = np.asarray(pages, dtype=np.int64)
            first, last = item.start // PAGE_SIZE, -(-end // PAGE_SIZE)
            slot_PT = page_P[first:last, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
            own = item.start - first * PAGE_SIZE
            host["slot_T"][:num_tokens] = slot_PT.reshape(-1)[own : own + num_tokens]
            host["kv_len_S"][0] = end
            fill_sampling(host, 0, sequence, sequence.num_output)
            # What lies beyond them is never read.
            host["page_table_SP"][0, : len(pages)] = page_P
        self._pool.fill_chunk(host, None if item is None else span_of(item))
