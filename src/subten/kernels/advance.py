"""The end of a decode step: its tokens to the host, its inputs to those of the next step.

Letters: S rows of the step, one token each, P entries of a row of the page table.
"""

from __future__ import annotations

import torch

from subten.core import PAGE_SIZE
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import tl, triton, triton_jit

BAD_TOKEN = -1
"""In place of a token that cannot be sampled."""


def advance(
    token_S: torch.Tensor,
    is_ok_S: torch.Tensor,
    step: StepTensors,
    *,
    index_S: torch.Tensor,
    turn_1: torch.Tensor,
    sampled_2S: torch.Tensor,
) -> None:
    """Report what a step sampled, and make `step` the next one, all in place; one launch.

    token_S int64 and is_ok_S bool as `sample` returns them; index_S int64, the number of the output
    token that a row draws; turn_1 int32, 0 or 1; sampled_2S int64, on the device or in pinned
    memory of the host, at least S wide. Row turn of `sampled_2S` gets the tokens, BAD_TOKEN where
    not ok, and the turn changes. A row's token, position, KV length, index and slot move on by one
    token; where the page table has no such page the slot is -1. Rows of slot -1, which stand for no
    sequence, report nothing and stay.
    """
    num_rows = len(token_S)
    _check(token_S, step, sampled_2S)
    _advance_kernel[(1,)](
        token_S,
        is_ok_S,
        step.token_id_T,
        step.position_T,
        step.slot_T,
        step.kv_len_S,
        index_S,
        step.page_table_SP,
        turn_1,
        sampled_2S,
        num_rows,
        step.page_table_SP.shape[1],
        step.page_table_SP.stride(0),
        sampled_2S.stride(0),
        PAGE=PAGE_SIZE,
        BAD=BAD_TOKEN,
        BLOCK=triton.next_power_of_2(num_rows),
        num_warps=1,
    )


def advance_torch(
    token_S: torch.Tensor,
    is_ok_S: torch.Tensor,
    step: StepTensors,
    *,
    index_S: torch.Tensor,
    turn_1: torch.Tensor,
    sampled_2S: torch.Tensor,
) -> None:
    """The twin of `advance`."""
    _check(token_S, step, sampled_2S)
    live_S = step.slot_T >= 0
    told_S = sampled_2S[int(turn_1), : len(token_S)]
    told_S.copy_(torch.where(live_S, torch.where(is_ok_S, token_S, BAD_TOKEN), told_S.to(token_S)))
    step.token_id_T.copy_(torch.where(live_S, token_S, step.token_id_T))
    for number_S in (step.position_T, step.kv_len_S, index_S):
        number_S += live_S
    page_S = step.position_T // PAGE_SIZE
    table_SP = step.page_table_SP
    known_S = page_S.clamp(max=table_SP.shape[1] - 1)
    id_S = table_SP.gather(1, known_S[:, None])[:, 0].long()
    slot_S = id_S * PAGE_SIZE + step.position_T % PAGE_SIZE
    step.slot_T.copy_(torch.where(live_S & (page_S < table_SP.shape[1]), slot_S, -1))
    turn_1.copy_(1 - turn_1)


def _check(token_S: torch.Tensor, step: StepTensors, sampled_2S: torch.Tensor) -> None:
    num_rows = len(token_S)
    assert step.slot_T.shape == step.kv_len_S.shape == (num_rows,), (step.slot_T.shape, num_rows)
    assert len(step.page_table_SP) == num_rows, (step.page_table_SP.shape, num_rows)
    assert len(sampled_2S) == 2 and sampled_2S.shape[1] >= num_rows, sampled_2S.shape
    assert sampled_2S.dtype == torch.int64, sampled_2S.dtype


@triton_jit
def _advance_kernel(
    TOKEN: tl.tensor,
    IS_OK: tl.tensor,
    TOKEN_ID: tl.tensor,
    POSITION: tl.tensor,
    SLOT: tl.tensor,
    KV_LEN: tl.tensor,
    INDEX: tl.tensor,
    PAGE_TABLE: tl.tensor,
    TURN: tl.tensor,
    SAMPLED: tl.tensor,
    num_rows: tl.int32,
    num_pages: tl.int32,
    page_table_stride: tl.int64,
    sampled_stride: tl.int64,
    PAGE: tl.constexpr,
    BAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    s = tl.arange(0, BLOCK)
    live = s < num_rows
    live = live & (tl.load(SLOT + s, mask=live, other=-1) >= 0)
    token = tl.load(TOKEN + s, mask=live, other=0)
    is_ok = tl.load(IS_OK + s, mask=live, other=0) != 0
    turn = tl.load(TURN)
    tl.store(SAMPLED + turn * sampled_stride + s, tl.where(is_ok, token, BAD), mask=live)
    tl.store(TOKEN_ID + s, token, mask=live)
    tl.store(KV_LEN + s, tl.load(KV_LEN + s, mask=live, other=0) + 1, mask=live)
    tl.store(INDEX + s, tl.load(INDEX + s, mask=live, other=0) + 1, mask=live)
    position = tl.load(POSITION + s, mask=live, other=0) + 1
    tl.store(POSITION + s, position, mask=live)
    page = position // PAGE
    is_known = live & (page < num_pages)
    page_id = tl.load(PAGE_TABLE + s * page_table_stride + page, mask=is_known, other=0)
    slot = tl.where(is_known, page_id.to(tl.int64) * PAGE + position % PAGE, -1)
    tl.store(SLOT + s, slot, mask=live)
    tl.debug_barrier()  # everyone has read the turn
    tl.store(TURN, 1 - turn)
