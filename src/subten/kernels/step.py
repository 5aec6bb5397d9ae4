"""The integers of one step as tensors: where each token sits and what it may see.

Letters: T tokens of the step, S sequences, P page-table width, Q query tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.core import PAGE_SIZE

QUERY_TILE = 16
"""Query tokens in one tile of `attend`; a decode step has one tile of one token a sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTensors:
    """Inputs of one forward pass besides weights and pages; all on the model's device.

    `token_id_T` int64; `position_T` int64, position of each token in its sequence;
    `slot_T` int64, page id * 64 + row where the token's K and V go, -1 writes nothing;
    `page_table_SP` int32, page ids of each sequence in order, unused entries 0;
    `kv_len_S` int32, tokens in the pages once this step has appended its own;
    `query_start_S1` int32, sequence s owns tokens [query_start[s], query_start[s + 1]);
    `tile_seq_Q`, `tile_start_Q` int32, sequence and first token (index into T) of each query tile
    of at most QUERY_TILE tokens; `logit_row_S` int64, the token of each sequence whose logits are
    wanted. The two maxima are host integers, so that launches need no copy back.
    """

    token_id_T: torch.Tensor
    position_T: torch.Tensor
    slot_T: torch.Tensor
    page_table_SP: torch.Tensor
    kv_len_S: torch.Tensor
    query_start_S1: torch.Tensor
    tile_seq_Q: torch.Tensor
    tile_start_Q: torch.Tensor
    logit_row_S: torch.Tensor
    max_kv_len: int
    max_query_len: int


def make_step(
    *,
    token_ids: list[list[int]],
    starts: list[int],
    page_ids: list[list[int]],
    device: torch.device,
) -> StepTensors:
    """Build the tensors of a step from plain integers.

    `token_ids[s]` are the new tokens of sequence s, `starts[s]` the position of the first of them,
    `page_ids[s]` its pages, enough for `starts[s] + len(token_ids[s])` tokens.
    """
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    tile_seq: list[int] = []
    tile_start: list[int] = []
    kv_len: list[int] = []
    for s, (tokens, start, pages) in enumerate(zip(token_ids, starts, page_ids, strict=True)):
        assert len(tokens) > 0, s
        end = start + len(tokens)
        assert end <= len(pages) * PAGE_SIZE, (end, len(pages))
        first = query_start[-1]
        for position in range(start, end):
            positions.append(position)
            page = pages[position // PAGE_SIZE]
            slots.append(page * PAGE_SIZE + position % PAGE_SIZE)
        tile_starts = range(first, first + len(tokens), QUERY_TILE)
        tile_start.extend(tile_starts)
        tile_seq.extend([s] * len(tile_starts))
        kv_len.append(end)
        query_start.append(first + len(tokens))
    width = max(len(pages) for pages in page_ids)
    table = [pages + [0] * (width - len(pages)) for pages in page_ids]

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return StepTensors(
        token_id_T=tensor([t for tokens in token_ids for t in tokens], torch.int64),
        position_T=tensor(positions, torch.int64),
        slot_T=tensor(slots, torch.int64),
        page_table_SP=tensor(table, torch.int32),
        kv_len_S=tensor(kv_len, torch.int32),
        query_start_S1=tensor(query_start, torch.int32),
        tile_seq_Q=tensor(tile_seq, torch.int32),
        tile_start_Q=tensor(tile_start, torch.int32),
        logit_row_S=tensor([end - 1 for end in query_start[1:]], torch.int64),
        max_kv_len=max(kv_len),
        max_query_len=max(len(tokens) for tokens in token_ids),
    )
