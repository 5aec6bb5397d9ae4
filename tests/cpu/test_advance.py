"""The end of a decode step against the same in plain integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from subten.core import PAGE_SIZE
from subten.kernels.advance import BAD_TOKEN, advance, advance_torch
from subten.kernels.step import StepTensors

ADVANCE = [advance_torch, pytest.param(advance, marks=pytest.mark.triton)]

INT32_FIELDS = ("kv_len", "turn")


def random_rows(num_rows: int, num_pages: int, generator: torch.Generator) -> dict[str, Any]:
    """A step in plain integers; about a third of its rows stand for no sequence."""

    def draw(high: int, count: int = num_rows) -> list[int]:
        return torch.randint(high, (count,), generator=generator).tolist()

    # Many positions at an end of a page, one at the end of the table.
    position = [
        PAGE_SIZE * (page + 1) - 1 if at_end else PAGE_SIZE * page + offset
        for page, offset, at_end in zip(draw(num_pages), draw(PAGE_SIZE), draw(2), strict=True)
    ]
    position[-1] = PAGE_SIZE * num_pages - 1
    table = [draw(2**31 // PAGE_SIZE, num_pages) for _ in range(num_rows)]
    is_live = [draw(3)[0] > 0 for _ in range(num_rows - 1)] + [True]
    slot = [
        table[i][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE if is_live[i] else -1
        for i, p in enumerate(position)
    ]
    return {
        "token_id": draw(1000),
        "position": position,
        "slot": slot,
        "kv_len": [p + 1 for p in position],
        "index": draw(2**40),
        "table": table,
        "turn": draw(2, 1),
        "sampled": [draw(1000, num_rows + 2), draw(1000, num_rows + 2)],
        "token": draw(2**22),
        "is_ok": [number > 0 for number in draw(4)],
    }


def moved_on(rows: dict[str, Any]) -> dict[str, Any]:
    """What is expected of `advance`."""
    after = {name: list(values) for name, values in rows.items()}
    after["sampled"] = [list(turn) for turn in rows["sampled"]]
    for i, slot in enumerate(rows["slot"]):
        if slot < 0:
            continue
        ok, position = rows["is_ok"][i], rows["position"][i] + 1
        after["sampled"][rows["turn"][0]][i] = rows["token"][i] if ok else BAD_TOKEN
        after["token_id"][i] = rows["token"][i]
        after["position"][i] = position
        after["kv_len"][i] += 1
        after["index"][i] += 1
        pages = rows["table"][i]
        after["slot"][i] = -1
        if position // PAGE_SIZE < len(pages):
            after["slot"][i] = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    after["turn"] = [1 - rows["turn"][0]]
    return after


@pytest.mark.parametrize("op", ADVANCE)
@pytest.mark.parametrize(("num_rows", "num_pages"), [(1, 1), (1, 7), (5, 3), (16, 4), (33, 2)])
def test_rows_move_on_by_a_token(
    op: Callable[..., None],
    num_rows: int,
    num_pages: int,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    rows = random_rows(num_rows, num_pages, generator)

    def tensor(name: str) -> torch.Tensor:
        values = rows[name]
        dtype = torch.int32 if name in INT32_FIELDS or name == "table" else torch.int64
        dtype = torch.bool if name == "is_ok" else dtype
        return torch.tensor(values, dtype=dtype, device=device)

    given = {name: tensor(name) for name in rows}
    # As in the engine: the host's memory, and a table whose rows lie apart.
    given["sampled"] = given["sampled"].cpu()
    if device.type == "cuda":
        given["sampled"] = given["sampled"].pin_memory()
    table = torch.nn.functional.pad(given["table"], (0, 3))[:, :num_pages]
    unused = torch.empty(0)
    step = StepTensors(
        token_id_T=given["token_id"],
        position_T=given["position"],
        slot_T=given["slot"],
        page_table_SP=table,
        kv_len_S=given["kv_len"],
        query_start_S1=unused,
        tile_seq_Q=unused,
        tile_start_Q=unused,
        logit_row_S=unused,
        max_kv_len=0,
        max_query_len=1,
    )
    op(
        given["token"],
        given["is_ok"],
        step,
        index_S=given["index"],
        turn_1=given["turn"],
        sampled_2S=given["sampled"],
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    expected = moved_on(rows)
    for name, values in given.items():
        assert values.tolist() == expected[name], name
