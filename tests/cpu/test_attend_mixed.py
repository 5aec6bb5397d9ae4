"""`attend_mixed` against its twin and against dense FP64 attention over what the planes stand for.

Letters: T tokens, H query heads, G KV heads, D head_dim, N key positions, P pages (of `table_PC`
positions), S sequences, X sink planes, B bytes, C columns of the table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixed_pages import Pools, make_pools, put, random_rows

from subten.codecs.nested import BASE, COLD, HOT
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels import attend_mixed as attend_module
from subten.kernels import attend_plan, page_mass
from subten.kernels.attend_mixed import attend_mixed, attend_mixed_torch
from subten.kernels.step import StepTensors, make_step

Randn = Callable[..., torch.Tensor]
OPS = [pytest.param(attend_mixed, marks=pytest.mark.triton), attend_mixed_torch]

RECORDS = [
    [HOT, 4, -1, -1],
    [BASE, 1, 0, 3],
    [BASE, 3, 2, -1],
    [BASE, 0, -1, -1],
    [COLD, 2, -1, -1],
    [BASE, 4, -1, 1],
    [HOT, 1, -1, -1],
]
"""One page of every kind; the last page id has no plane."""
NO_PAGE = [-1, -1, -1, -1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """Sequences over some pages; `k_PGND` and `v_PGND` are what the planes stand for.

    `first_2PGND` the same of the first page of a sequence, where sinks make it another.
    """

    made: Pools
    place_P4: torch.Tensor
    k_PGND: torch.Tensor
    v_PGND: torch.Tensor
    page_ids: list[list[int]]
    lengths: list[int]
    sink_XGB: torch.Tensor | None = None
    sink_P: torch.Tensor | None = None
    first_2PGND: torch.Tensor | None = None

    def step(self, num_new: list[int]) -> StepTensors:
        return make_step(
            token_ids=[[0] * new for new in num_new],
            starts=[length - new for length, new in zip(self.lengths, num_new, strict=True)],
            page_ids=self.page_ids,
            device=self.place_P4.device,
        )

    def run(
        self,
        op: Callable[..., torch.Tensor],
        q_THD: torch.Tensor,
        step: StepTensors,
        mass_SP: torch.Tensor | None = None,
        **added: torch.Tensor,
    ) -> torch.Tensor:
        head_dim = self.made.fmt.head_dim
        sinks = {"sink_XGB": self.sink_XGB, "sink_P": self.sink_P}
        pages = dataclasses.replace(self.made.pools.layer(1, self.place_P4), **sinks)
        return op(
            q_THD,
            pages,
            self.made.fmt,
            step,
            scale=head_dim**-0.5,
            rotation_DD=hadamard(head_dim, self.place_P4.device),
            mass_SP=mass_SP,
            **added,
        )


def make_scene(
    randn: Randn,
    device: torch.device,
    head_dim: int,
    *,
    num_kv_heads: int,
    page_ids: list[list[int]],
    lengths: list[int],
) -> Scene:
    """Layer 1 of two holds RECORDS; all other planes are poison, and the rest of a hot page NaN."""
    made = make_pools(
        head_dim, num_layers=2, num_kv_heads=num_kv_heads, num_planes=5, device=device
    )
    stored = []
    for page, record in enumerate(RECORDS):
        x_2GND = random_rows(randn, num_kv_heads, head_dim)
        for ids, length in zip(page_ids, lengths, strict=True):
            if ids[(length - 1) // PAGE_SIZE] == page and length % PAGE_SIZE:
                x_2GND[:, :, length % PAGE_SIZE :] = math.nan
        stored.append(torch.stack(put(made, 1, record, x_2GND)))
    k_PGND, v_PGND = torch.stack(stored, dim=1).double()
    place_P4 = torch.tensor([*RECORDS, NO_PAGE], dtype=torch.int32, device=device)
    return Scene(
        made=made,
        place_P4=place_P4,
        k_PGND=k_PGND,
        v_PGND=v_PGND,
        page_ids=page_ids,
        lengths=lengths,
    )


def with_sinks(randn: Randn, scene: Scene, num_sinks: int) -> Scene:
    """Sink planes for every page but id 3, hot ones too; poison in the rows that they stand for.

    Planes are slices of one tensor [planes, layers, G, bytes], and one of them is nobody's.
    """
    fmt, device = scene.made.fmt, scene.place_P4.device
    num_pages, num_kv_heads = scene.k_PGND.shape[:2]
    rows_P2GSD = randn(num_pages + 1, 2, num_kv_heads, num_sinks, fmt.head_dim)
    rows_P2GSD = rows_P2GSD.to(torch.bfloat16)
    rows_P2GSD[0] = math.nan
    sink_XGB = rows_P2GSD.transpose(1, 2).flatten(2).contiguous().view(torch.uint8)
    sink_LXGB = torch.stack([torch.full_like(sink_XGB, 0xFF), sink_XGB])
    sink_P = torch.arange(1, num_pages + 2, dtype=torch.int32, device=device)
    sink_P[3] = sink_P[num_pages] = -1
    first_2PGND = torch.stack([scene.k_PGND, scene.v_PGND]).clone()
    for page, record in enumerate(RECORDS):
        if page != 3 and record[0] != HOT:
            first_2PGND[:, page, :, :num_sinks] = rows_P2GSD[page + 1].double()
    return dataclasses.replace(scene, sink_XGB=sink_LXGB[1], sink_P=sink_P, first_2PGND=first_2PGND)


def dense(
    scene: Scene,
    q_THD: torch.Tensor,
    num_new: list[int],
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and page masses in FP64, token by token, head by head."""
    head_dim = scene.made.fmt.head_dim
    rotation_DD = hadamard(head_dim, q_THD.device).double()
    out_THD = torch.zeros_like(q_THD, dtype=torch.float64)
    width = max(len(ids) for ids in scene.page_ids)
    mass_SP = torch.zeros(len(num_new), width, dtype=torch.float64, device=q_THD.device)
    token = 0
    for s, new in enumerate(num_new):
        pages_2 = [x_PGND[scene.page_ids[s]] for x_PGND in (scene.k_PGND, scene.v_PGND)]
        if scene.first_2PGND is not None:
            for half, x_PGND in enumerate(pages_2):
                x_PGND[0] = scene.first_2PGND[half, scene.page_ids[s][0]]
        k_GND, v_GND = (x_PGND.transpose(0, 1).flatten(1, 2) for x_PGND in pages_2)
        group = q_THD.shape[1] // len(k_GND)
        for position in range(scene.lengths[s] - new, scene.lengths[s]):
            for h in range(q_THD.shape[1]):
                q_D = q_THD[token, h].double() @ rotation_DD * head_dim**-0.5
                score_N = k_GND[h // group, : position + 1] @ q_D
                if coef_THC is not None and table_PC is not None:
                    added_N = table_PC[: position + 1].double() @ coef_THC[token, h].double()
                    score_N += added_N * head_dim**-0.5
                weight_N = score_N.softmax(0)
                out_D = weight_N @ v_GND[h // group, : position + 1]
                out_THD[token, h] = out_D @ rotation_DD
                page_N = torch.arange(position + 1, device=q_THD.device) // PAGE_SIZE
                mass_SP[s].index_add_(0, page_N, weight_N)
            token += 1
    return out_THD, mass_SP


def check(
    scene: Scene,
    op: Callable[..., torch.Tensor],
    q_THD: torch.Tensor,
    num_new: list[int],
    **added: torch.Tensor,
) -> None:
    """Output and mass, within what rounding explains; and no mass asked for changes no bit.

    As `tolerances` of test_attend.py: a score is off by 3 * 2^-24 * sqrt(D) * scale |q| |k| in FP32
    and by 2 * 2^-9 * scale |q| |k| / sqrt(D) more in BF16, a weight by that relative, an output by
    twice that times the range of V and its own rounding. Rows of D: |k| <= 1.5 sqrt(D). A table
    adds 3 * 2^-24 * sqrt(C) * scale |coef| |table|; in TF32 2 * 2^-10 * scale |coef| |table|.
    """
    step = scene.step(num_new)
    expected_THD, expected_SP = dense(scene, q_THD, num_new, **added)
    # Whatever the buffer held is added to.
    mass_SP = torch.full_like(expected_SP, 2.0, dtype=torch.float32)
    actual_THD = scene.run(op, q_THD, step, mass_SP, **added)
    assert actual_THD.dtype == q_THD.dtype
    head_dim = q_THD.shape[-1]
    product = q_THD.float().norm(dim=-1).max().item() * 1.5
    score, value = 3 * 2**-24 * math.sqrt(head_dim) * product, 2**-24 * 20
    if q_THD.dtype == torch.bfloat16:
        score += 2 * 2**-9 * product / math.sqrt(head_dim)
        value += 2 * 2**-9
    if added:
        coef_THC, table_PC = added["coef_THC"], added["table_PC"]
        most = (coef_THC.norm(dim=-1).max() * table_PC.norm(dim=-1).max()).item()
        is_tf32 = q_THD.dtype == torch.bfloat16
        step_size = 2 * 2**-10 if is_tf32 else 3 * 2**-24 * math.sqrt(table_PC.shape[1])
        score += step_size * most / math.sqrt(head_dim)
    v_range = 2 * scene.v_PGND.nan_to_num(0.0).abs().max().item()
    difference_THD = (actual_THD.double() - expected_THD).abs()
    assert difference_THD.max().item() <= (2 * score + value) * v_range
    largest = q_THD.shape[1] * max(num_new)
    difference_SP = (mass_SP.double() - 2 - expected_SP).abs()
    assert difference_SP.max().item() <= (2 * score + 2**-22) * largest + 2 * 2**-23
    if step.max_query_len == 1:
        assert torch.equal(scene.run(op, q_THD, step, **added), actual_THD)


@pytest.fixture(params=["whole", "split"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every page in one program's hands, or each in its own."""
    name = str(request.param)
    monkeypatch.setattr(attend_module, "num_sms", lambda _device: 132)
    monkeypatch.setattr(attend_plan, "MAX_SPLITS", 1 if name == "whole" else 64)
    monkeypatch.setattr(attend_plan, "PREFILL_SPLIT_PAGES", 1)
    return name


LAYOUTS = [
    ([[1, 6, 2, 5, 3, 4, 0]], [7 * 64 - 5], [1], 2),
    ([[4, 1, 0], [3, 6]], [150, 65], [17, 1], 1),
]


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("page_ids", "lengths", "num_new", "num_kv_heads", "head_dim"),
    [(*LAYOUTS[0], 48), (*LAYOUTS[1], 32)],
    ids=["decode", "mixed"],
)
def test_matches_dense(
    randn: Randn,
    device: torch.device,
    op: Callable[..., torch.Tensor],
    page_ids: list[list[int]],
    lengths: list[int],
    num_new: list[int],
    num_kv_heads: int,
    head_dim: int,
) -> None:
    scene = make_scene(
        randn, device, head_dim, num_kv_heads=num_kv_heads, page_ids=page_ids, lengths=lengths
    )
    check(scene, op, randn(sum(num_new), 3 * num_kv_heads, head_dim), num_new)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_sinks", [1, 5])
def test_sink_rows_stand_for_the_first_ones_of_a_sequence(
    randn: Randn, device: torch.device, op: Callable[..., torch.Tensor], num_sinks: int
) -> None:
    """Of a BASE, a COLD, a HOT page and one without a plane; and nowhere but at the start."""
    page_ids, lengths = [[2, 1, 0], [4, 1, 2], [6, 4], [3, 5]], [130, 192, 128, 66]
    scene = make_scene(randn, device, 16, num_kv_heads=2, page_ids=page_ids, lengths=lengths)
    scene = with_sinks(randn, scene, num_sinks)
    check(scene, op, randn(4, 4, 16), [1] * 4)
    check(scene, op, randn(6, 4, 16), [1, 3, 1, 1])
    short = make_scene(randn, device, 16, num_kv_heads=1, page_ids=[[1]], lengths=[2])
    check(with_sinks(randn, short, num_sinks), op, randn(2, 2, 16), [2])


@pytest.mark.parametrize("op", OPS)
def test_a_sink_row_is_read_whatever_became_of_its_page(
    randn: Randn, device: torch.device, op: Callable[..., torch.Tensor]
) -> None:
    """NaN in the encoded row is not seen; NaN in the sink row is."""
    scene = make_scene(randn, device, 16, num_kv_heads=1, page_ids=[[4]], lengths=[60])
    scene = with_sinks(randn, scene, 3)
    q_THD, step = randn(1, 2, 16), scene.step([1])
    clean_THD = scene.run(op, q_THD, step)
    x_2GND = scene.made.pools.cold_LCGB[1, 2]
    assert x_2GND.shape == (1, scene.made.fmt.cold.page_bytes)
    for scale in (scene.made.fmt.cold.k_scale, scene.made.fmt.cold.v_scale):
        x_2GND[:, scale : scale + 3 * 2] = 0xFF
    assert torch.equal(scene.run(op, q_THD, step), clean_THD)
    assert scene.sink_XGB is not None
    scene.sink_XGB[5, 0, :2] = 0xFF
    assert bool(scene.run(op, q_THD, step).isnan().all())


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [6, 32])
def test_a_table_adds_to_every_score(
    randn: Randn, device: torch.device, op: Callable[..., torch.Tensor], width: int
) -> None:
    """Hot rows and sink rows too; the table has a row more than there are positions."""
    page_ids, lengths, num_new, num_kv_heads = LAYOUTS[1]
    scene = make_scene(
        randn, device, 32, num_kv_heads=num_kv_heads, page_ids=page_ids, lengths=lengths
    )
    scene = with_sinks(randn, scene, 4)
    num_tokens = sum(num_new)
    table_PC = randn(152, width)
    table_PC[150:] = math.nan
    q_THD, coef_THC = randn(num_tokens, 3, 32), 3 * randn(num_tokens, 3, width)
    added = {"coef_THC": coef_THC, "table_PC": table_PC}
    with pytest.raises(AssertionError, match="table_PC"):
        scene.run(op, q_THD, scene.step(num_new), coef_THC=coef_THC)
    for broken in (
        added | {"table_PC": table_PC[:149]},
        added | {"coef_THC": coef_THC[:, :2]},
        added | {"coef_THC": coef_THC.double()},
    ):
        with pytest.raises(AssertionError):
            scene.run(op, q_THD, scene.step(num_new), **broken)
    check(scene, op, q_THD, num_new, coef_THC=coef_THC, table_PC=table_PC[:150])
    poisoned_THD = scene.run(op, q_THD, scene.step(num_new), **added)
    assert bool(poisoned_THD.isfinite().all())


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(("page_ids", "lengths", "num_new", "num_kv_heads"), LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_matches_dense_in_bf16(
    randn: Randn,
    device: torch.device,
    page_ids: list[list[int]],
    lengths: list[int],
    num_new: list[int],
    num_kv_heads: int,
    head_dim: int,
) -> None:
    scene = make_scene(
        randn, device, head_dim, num_kv_heads=num_kv_heads, page_ids=page_ids, lengths=lengths
    )
    q_THD = randn(sum(num_new), 8 * num_kv_heads, head_dim, dtype=torch.bfloat16)
    check(scene, attend_mixed, q_THD, num_new)
    coef_THC = randn(*q_THD.shape)
    table_PC = randn(max(lengths), head_dim)
    scene = with_sinks(randn, scene, 4)
    check(scene, attend_mixed, q_THD, num_new, coef_THC=coef_THC, table_PC=table_PC)


@pytest.mark.triton
def test_mass_of_a_long_prompt_is_taken_in_parts(
    randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile at a time gives what all tiles at once give, bit for bit."""
    scene = make_scene(randn, device, 16, num_kv_heads=1, page_ids=[[0, 4], [1]], lengths=[100, 40])
    q_THD, step = randn(60, 2, 16), scene.step([36, 24])
    masses = [torch.zeros(2, 2, device=device) for _ in range(2)]
    whole_THD = scene.run(attend_mixed, q_THD, step, masses[0])
    monkeypatch.setattr(page_mass, "MAX_SHARE_BYTES", 1)
    parts_THD = scene.run(attend_mixed, q_THD, step, masses[1])
    assert torch.equal(parts_THD, whole_THD)
    assert torch.equal(masses[0], masses[1])
    # 36 and 24 queries of two heads; each weight and each sum of at most 72 is off by 2^-22.
    total_S = masses[0].sum(1) - torch.tensor([72.0, 48.0], device=device)
    assert total_S.abs().max().item() <= 72 * 2**-20


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("record", [[HOT, 2, -1, -1], [BASE, 2, 4, 4], [COLD, 3, -1, -1]])
def test_nan_stays_in_its_sequence(
    randn: Randn, device: torch.device, op: Callable[..., torch.Tensor], record: list[int]
) -> None:
    # Case K20, in every kind of plane.
    scene = make_scene(
        randn, device, 16, num_kv_heads=1, page_ids=[[0, 1], [6, 2], [3]], lengths=[70, 66, 64]
    )
    q_THD, step = randn(3, 2, 16), scene.step([1, 1, 1])
    clean_SP = torch.zeros(3, 2, device=device)
    clean_THD = scene.run(op, q_THD, step, clean_SP)
    x_2GND = random_rows(randn, 1, 16)
    x_2GND[:, 0, 7, 3] = math.nan
    put(scene.made, 1, record, x_2GND)
    scene.place_P4[6] = torch.tensor(record, dtype=torch.int32)
    poisoned_SP = torch.zeros(3, 2, device=device)
    poisoned_THD = scene.run(op, q_THD, step, poisoned_SP)
    assert bool(poisoned_THD[1].isnan().all())
    assert torch.equal(poisoned_THD[[0, 2]], clean_THD[[0, 2]])
    assert torch.equal(poisoned_SP[[0, 2]], clean_SP[[0, 2]])
    assert bool(poisoned_SP[1].isnan().all())


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_new", [[1, 1], [2, 17]])
def test_padding_changes_nothing_and_comes_out_zero(
    randn: Randn, device: torch.device, op: Callable[..., torch.Tensor], num_new: list[int]
) -> None:
    # Case G04: a step padded to a larger captured size; page 7 has no plane.
    scene = make_scene(randn, device, 16, num_kv_heads=1, page_ids=[[0], [5, 4]], lengths=[3, 70])
    num_tokens = sum(num_new)
    step, q_THD = scene.step(num_new), randn(num_tokens + 2, 2, 16)
    expected_SP = torch.zeros(2, 2, device=device)
    expected_THD = scene.run(op, q_THD[:num_tokens].clone(), step, expected_SP)

    def padded(index: torch.Tensor, *values: int) -> torch.Tensor:
        return torch.cat([index, index.new_tensor(values)])

    no_page_SP = torch.full_like(step.page_table_SP, len(RECORDS))
    padded_step = dataclasses.replace(
        step,
        position_T=padded(step.position_T, 0, 0),
        kv_len_S=padded(step.kv_len_S, 0, 0),
        query_start_S1=padded(step.query_start_S1, num_tokens + 1, num_tokens + 2),
        page_table_SP=torch.cat([step.page_table_SP, no_page_SP]),
        tile_seq_Q=padded(step.tile_seq_Q, 2, 3, -1),
        tile_start_Q=padded(step.tile_start_Q, num_tokens, num_tokens + 1, 0),
        max_kv_len=100,
    )
    mass_SP = torch.zeros(4, 2, device=device)
    actual_THD = scene.run(op, q_THD, padded_step, mass_SP)
    assert torch.equal(actual_THD[:num_tokens], expected_THD)
    assert torch.equal(actual_THD[num_tokens:], torch.zeros_like(actual_THD[num_tokens:]))
    assert torch.equal(mass_SP, torch.cat([expected_SP, torch.zeros_like(expected_SP)]))


@pytest.mark.parametrize("op", OPS)
def test_a_page_of_two_sequences_counts_for_each(
    randn: Randn, device: torch.device, op: Callable[..., torch.Tensor]
) -> None:
    """Shared prefixes: the same page ids, one result."""
    scene = make_scene(
        randn, device, 16, num_kv_heads=1, page_ids=[[1, 4], [1, 4]], lengths=[128, 128]
    )
    q_THD = randn(1, 2, 16).repeat(2, 1, 1)
    mass_SP = torch.zeros(2, 2, device=device)
    out_THD = scene.run(op, q_THD, scene.step([1, 1]), mass_SP)
    assert torch.equal(out_THD[0], out_THD[1])
    assert torch.equal(mass_SP[0], mass_SP[1])


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(randn: Randn, device: torch.device, op: Callable[..., torch.Tensor]) -> None:
    scene = make_scene(randn, device, 16, num_kv_heads=1, page_ids=[[0]], lengths=[3])
    step = scene.step([1])
    empty: dict[str, Any] = {
        name: getattr(step, name)[:0]
        for name in ("position_T", "kv_len_S", "tile_seq_Q", "tile_start_Q", "page_table_SP")
    }
    step = dataclasses.replace(step, query_start_S1=step.query_start_S1[:1], **empty)
    mass_SP = torch.zeros(0, 1, device=device)
    assert scene.run(op, randn(0, 2, 16), step, mass_SP).shape == (0, 2, 16)


def test_twin_is_differentiable_in_q(randn: Randn, device: torch.device) -> None:
    scene = make_scene(randn, device, 16, num_kv_heads=1, page_ids=[[1, 0]], lengths=[70])
    q_THD = randn(2, 2, 16).requires_grad_()
    mass_SP = torch.zeros(1, 2, device=device)
    scene.run(attend_mixed_torch, q_THD, scene.step([2]), mass_SP).sum().backward()
    assert q_THD.grad is not None
    assert bool(q_THD.grad.isfinite().all())
    assert not mass_SP.requires_grad


@pytest.mark.parametrize("op", [attend_mixed, attend_mixed_torch])
def test_wrong_inputs_fail_loudly(
    randn: Randn, device: torch.device, op: Callable[..., torch.Tensor]
) -> None:
    scene = make_scene(randn, device, 16, num_kv_heads=2, page_ids=[[0]], lengths=[3])
    step, q_THD = scene.step([1]), randn(1, 4, 16)
    long_records = dataclasses.replace(scene, place_P4=scene.place_P4.long())
    for broken_scene, broken_q, mass_SP in (
        (scene, q_THD.half(), None),
        (scene, q_THD[:, :3], None),
        (long_records, q_THD, None),
        (scene, q_THD, torch.zeros(1, 1, device=device).double()),
        (scene, q_THD, torch.zeros(1, 2, device=device)),
    ):
        with pytest.raises(AssertionError):
            broken_scene.run(op, broken_q, step, mass_SP)
