"""`attend_mixed` against dense FP64 attention over rows decoded here, bit by bit.

Letters: T tokens, H query heads, G KV heads, D head_dim, N key positions, P pages (of `table_PC`
positions), S sequences, C columns of the table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixed_pages import int32, make_pages, no_window

from subten.codecs.lloyd_max import FINE_LEVELS
from subten.codecs.mixed import MixedFormat
from subten.codecs.rotation import hadamard
from subten.codecs.shaped import levels
from subten.codecs.vq import codebook
from subten.core import PAGE_SIZE
from subten.kernels import attend_mixed as attend_module
from subten.kernels import attend_plan, page_mass
from subten.kernels.append_mixed import append_mixed_torch
from subten.kernels.attend_mixed import attend_mixed, attend_mixed_torch
from subten.kernels.mixed_pages import MixedPages, Window
from subten.kernels.step import StepTensors, make_step

Randn = Callable[..., torch.Tensor]
Op = Callable[..., torch.Tensor]
OPS = [pytest.param(attend_mixed, marks=pytest.mark.triton), attend_mixed_torch]
PLACES = [(0, -1, -1), (1, 1, -1), (-1, -1, 1), (3, 0, -1), (4, -1, -1), (-1, -1, 0), (2, 2, -1)]
"""Pages at 2 and at 4 bits of V, and cold ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """Sequences over some pages; recent rows are sane where they may be read, else NaN."""

    fmt: MixedFormat
    pages: MixedPages
    window: Window
    page_ids: list[list[int]]
    lengths: list[int]
    num_new: list[int]

    @property
    def step(self) -> StepTensors:
        return make_step(
            token_ids=[[0] * new for new in self.num_new],
            starts=[end - new for end, new in zip(self.lengths, self.num_new, strict=True)],
            page_ids=self.page_ids,
            device=self.pages.k_PGB.device,
        )

    def run(self, op: Op, q_THD: torch.Tensor, **keywords: Any) -> torch.Tensor:
        head_dim = self.fmt.head_dim
        step = keywords.pop("step", self.step)
        window = keywords.pop("window", self.window)
        keywords |= {"scale": head_dim**-0.5, "rotation_DD": hadamard(head_dim, q_THD.device)}
        return op(q_THD, self.pages, self.fmt, step, window, **keywords)


def make_scene(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    head_dim: int,
    *,
    page_ids: list[list[int]],
    lengths: list[int],
    num_new: list[int],
    bits: int = 3,
    num_kv_heads: int = 1,
    size: int = 20,
    num_sinks: int = 3,
    num_outliers: int = 0,
    places: list[tuple[int, int, int]] = PLACES,
) -> Scene:
    """Every second sequence has lost recent rows before some key (`from_S`)."""
    caps = [size + new for new in num_new]
    bases = [3 + sum(caps[:s]) for s in range(len(caps))]
    starts = [
        max(0, end - new - 5) * (s % 2)
        for s, (end, new) in enumerate(zip(lengths, num_new, strict=True))
    ]
    sinks = [(page % 3) - 1 for page in range(len(places))]
    fmt, pages = make_pages(
        generator,
        device,
        head_dim,
        places=places,
        bits=bits,
        num_kv_heads=num_kv_heads,
        num_recent=3 + sum(caps) + 1,
        num_sinks=num_sinks,
        sinks=sinks if num_sinks else None,
        num_outliers=num_outliers,
    )
    for plane, low in ((pages.k_PGB, 120), (pages.vbase_XGB, 165), (pages.vcold_ZGB, 150)):
        plane[..., -PAGE_SIZE:] = plane[..., -PAGE_SIZE:] // 8 + low
    if pages.k_out_PGB is not None:
        numbers = 5 * randn(*pages.k_out_PGB.shape[:2], PAGE_SIZE * num_outliers)
        pages.k_out_PGB.copy_(numbers.bfloat16().view(torch.uint8))
    if pages.sink_XGB is not None:
        shape = (*pages.sink_XGB.shape[:2], pages.sink_XGB.shape[2] // 2)
        pages.sink_XGB.copy_(randn(*shape).bfloat16().view(torch.uint8))
    for s, (end, new) in enumerate(zip(lengths, num_new, strict=True)):
        for key in range(max(starts[s], end - new - size + 1, 0), end):
            row = bases[s] + key % caps[s]
            pages.recent_NGE[row] = randn(num_kv_heads, 2 * head_dim).bfloat16()
    window = Window(
        size=size,
        row_T=torch.full((sum(num_new),), -1, dtype=torch.int32, device=device),
        base_S=int32(*bases, device=device),
        cap_S=int32(*caps, device=device),
        from_S=int32(*starts, device=device),
    )
    return Scene(
        fmt=fmt, pages=pages, window=window, page_ids=page_ids, lengths=lengths, num_new=num_new
    )


def norm(byte_N: torch.Tensor, bias: int) -> torch.Tensor:
    size_N = torch.exp2((byte_N.double() - 1 - bias) / 16)
    return torch.where(byte_N == 0, 0.0, size_N)[:, None]


def pairs(plane_B: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Two bits of each channel of 64 rows."""
    quarter, d = head_dim // 4, torch.arange(head_dim, device=plane_B.device)
    byte_ND = plane_B.view(PAGE_SIZE, quarter).int()[:, d % quarter]
    return byte_ND >> 2 * (d // quarter) & 3


def page_rows(scene: Scene, page: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a page as its planes have them, FP64 [64, D]; layout of docs/kv-cache.md."""
    pages, head_dim = scene.pages, scene.fmt.head_dim
    bits, device = pages.k_bits, pages.k_PGB.device
    plane_B = pages.k_PGB[page, head]
    low_bytes = 16 * head_dim
    code_ND = pairs(plane_B[:low_bytes], head_dim)
    high_B = plane_B[low_bytes:-PAGE_SIZE]
    if bits == 4:
        code_ND = code_ND + 4 * pairs(high_B, head_dim)
    if bits == 3:
        eighth, d = head_dim // 8, torch.arange(head_dim, device=device)
        byte_ND = high_B.view(PAGE_SIZE, eighth).int()[:, d % eighth]
        code_ND = code_ND + 4 * (byte_ND >> d // eighth & 1)
    k_ND = levels(bits, device).double()[code_ND] * norm(plane_B[-PAGE_SIZE:], 128)
    if pages.k_out_PGB is not None and pages.outlier_GO is not None:
        out_NO = pages.k_out_PGB[page, head].contiguous().view(torch.bfloat16).view(PAGE_SIZE, -1)
        k_ND[:, pages.outlier_GO[head].long()] = out_NO.double()
    base, fine, cold = pages.place_P3[page].tolist()
    if cold >= 0:
        plane_B = pages.vcold_ZGB[cold, head]
        row_NB = plane_B[:-PAGE_SIZE].view(PAGE_SIZE, -1).int()
        book_C8, num = codebook(device).double(), head_dim // 8
        second_NB = row_NB[:, num:]
        second_NV = torch.cat([second_NB & 15, second_NB >> 4], dim=1)
        v_NV8 = book_C8[row_NB[:, :num]] + book_C8[256 + second_NV]
        return k_ND, v_NV8.flatten(1) * norm(plane_B[-PAGE_SIZE:], 240)
    plane_B = pages.vbase_XGB[base, head]
    code_ND = pairs(plane_B[:-PAGE_SIZE], head_dim)
    size_ND = torch.tensor([3.0, 10.0], dtype=torch.float64, device=device)[code_ND & 1]
    if fine >= 0:
        fine_ND = pairs(pages.vfine_YGB[fine, head], head_dim)
        table_8 = torch.tensor(FINE_LEVELS, dtype=torch.float64, device=device)
        size_ND = table_8[4 * (code_ND & 1) + fine_ND]
    v_ND = torch.where(code_ND >= 2, -size_ND, size_ND) * norm(plane_B[-PAGE_SIZE:], 208)
    return k_ND, v_ND


def dense(
    scene: Scene,
    q_THD: torch.Tensor,
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and page masses in FP64, token by token, head by head."""
    pages, window, head_dim = scene.pages, scene.window, scene.fmt.head_dim
    num_sinks = pages.num_sinks(scene.fmt)
    out_THD = torch.zeros_like(q_THD, dtype=torch.float64)
    width = max(len(ids) for ids in scene.page_ids)
    mass_SP = torch.zeros(len(scene.num_new), width, dtype=torch.float64, device=q_THD.device)
    rotation_DD = hadamard(head_dim, q_THD.device).double()
    group = q_THD.shape[1] // pages.num_kv_heads
    token = 0
    for s, (ids, end, new) in enumerate(
        zip(scene.page_ids, scene.lengths, scene.num_new, strict=True)
    ):
        used = ids[: -(-end // PAGE_SIZE)]
        rows = [[page_rows(scene, page, g) for page in used] for g in range(pages.num_kv_heads)]
        for position in range(end - new, end):
            key_N = torch.arange(position + 1, device=q_THD.device)
            is_near_N = (position - key_N < window.size) & (key_N >= window.from_S[s])
            near_N = key_N[is_near_N]
            row_N = (window.base_S[s] + near_N % window.cap_S[s]).long()
            sink = -1 if pages.sink_P is None else int(pages.sink_P[ids[0]])
            for h in range(q_THD.shape[1]):
                g = h // group
                kv_2ND = [
                    torch.cat(parts)[: position + 1].clone() for parts in zip(*rows[g], strict=True)
                ]
                for half, x_ND in enumerate(kv_2ND):
                    recent_ND = pages.recent_NGE[row_N, g].double()
                    x_ND[near_N] = recent_ND[:, half * head_dim :][:, :head_dim]
                    if sink >= 0 and pages.sink_XGB is not None:
                        plane = pages.sink_XGB[sink, g].contiguous().view(torch.bfloat16).double()
                        first_ND = plane.view(2, num_sinks, head_dim)[half, : position + 1]
                        x_ND[: len(first_ND)] = first_ND
                k_ND, v_ND = kv_2ND
                score_N = k_ND @ q_THD[token, h].double()
                if coef_THC is not None and table_PC is not None:
                    score_N += table_PC[: position + 1].double() @ coef_THC[token, h].double()
                weight_N = (score_N * head_dim**-0.5).softmax(0)
                out_THD[token, h] = weight_N @ v_ND @ rotation_DD
                mass_SP[s].index_add_(0, key_N // PAGE_SIZE, weight_N)
            token += 1
    return out_THD, mass_SP


def check(scene: Scene, op: Op, q_THD: torch.Tensor, **added: torch.Tensor) -> None:
    """Output and mass, within what rounding explains.

    As `tolerances` of test_attend.py: a score is off by 3 * 2^-24 * sqrt(D) * scale |q| |k| in FP32
    and by 2 * 2^-9 * scale |q| |k| / sqrt(D) more in BF16, a weight by that relative, an output by
    twice that times the range of V and its own rounding. |k| is that of planes, 3 sqrt(D), or of
    outliers. A table adds 3 * 2^-24 * sqrt(C) * scale |coef| |table|; in TF32 2 * 2^-10 of it.
    """
    expected_THD, expected_SP = dense(scene, q_THD, **added)
    # Whatever the buffer held is added to.
    mass_SP = torch.full_like(expected_SP, 2.0, dtype=torch.float32)
    actual_THD = scene.run(op, q_THD, mass_SP=mass_SP, **added)
    assert actual_THD.dtype == q_THD.dtype
    head_dim = q_THD.shape[-1]
    product = q_THD.float().norm(dim=-1).max().item() * (3 + 2 * scene.pages.num_outliers)
    score, value = 3 * 2**-24 * math.sqrt(head_dim) * product, 2**-24 * 20
    if q_THD.dtype == torch.bfloat16:
        score += 2 * 2**-9 * product / math.sqrt(head_dim)
        value += 2 * 2**-9
    if added:
        coef_THC, table_PC = added["coef_THC"], added["table_PC"]
        most = (coef_THC.norm(dim=-1).max() * table_PC.nan_to_num(0.0).norm(dim=-1).max()).item()
        is_tf32 = q_THD.dtype == torch.bfloat16
        step_size = 2 * 2**-10 if is_tf32 else 3 * 2**-24 * math.sqrt(table_PC.shape[1])
        score += step_size * most / math.sqrt(head_dim)
    # Norms of V end at 2^((165 + 31 - 1 - 208) / 16) = .57, the largest level is 15.7.
    v_range = 2 * 0.57 * 15.7
    difference_THD = (actual_THD.double() - expected_THD).abs()
    assert difference_THD.max().item() <= (2 * score + value) * v_range
    largest = q_THD.shape[1] * max(scene.num_new)
    difference_SP = (mass_SP.double() - 2 - expected_SP).abs()
    assert difference_SP.max().item() <= (2 * score + 2**-22) * largest + 2 * 2**-23


@pytest.fixture(params=["whole", "split"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every page in one program's hands, or each in its own."""
    name = str(request.param)
    monkeypatch.setattr(attend_module, "num_sms", lambda _device: 132)
    monkeypatch.setattr(attend_plan, "MAX_SPLITS", 1 if name == "whole" else 64)
    monkeypatch.setattr(attend_plan, "PREFILL_SPLIT_PAGES", 1)
    return name


DECODE = {"page_ids": [[1, 6, 2, 5, 3, 4, 0], [2, 0]], "lengths": [443, 65], "num_new": [1, 1]}
MIXED = {"page_ids": [[4, 1, 0], [3, 6]], "lengths": [150, 65], "num_new": [17, 1]}
SHORT: dict[str, Any] = {"page_ids": [[2], [4]], "lengths": [2, 19], "num_new": [2, 19]}


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("layout", "head_dim", "options"),
    [
        (DECODE, 48, {"num_kv_heads": 2, "bits": 4}),
        (SHORT, 64, {"bits": 3, "num_outliers": 2, "num_sinks": 0}),
        (MIXED, 32, {"bits": 2, "num_outliers": 1}),
        (MIXED, 64, {"bits": 3, "size": 70, "num_sinks": 5}),
        (SHORT, 16, {"bits": 3, "size": 8}),
        (MIXED, 16, {"bits": 4, "size": 1, "num_sinks": 1, "num_kv_heads": 2}),
    ],
)
def test_matches_dense(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    op: Op,
    layout: dict[str, Any],
    head_dim: int,
    options: dict[str, Any],
) -> None:
    scene = make_scene(randn, generator, device, head_dim, **layout, **options)
    num_heads = 3 * scene.pages.num_kv_heads
    check(scene, op, randn(sum(scene.num_new), num_heads, head_dim))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [6, 32])
def test_a_table_adds_to_every_score(
    randn: Randn, generator: torch.Generator, device: torch.device, op: Op, width: int
) -> None:
    """Exact rows too; what the table has past the longest sequence is not read."""
    scene = make_scene(randn, generator, device, 32, **MIXED)
    table_PC = randn(152, width)
    table_PC[150:] = math.nan
    q_THD, coef_THC = randn(18, 3, 32), 3 * randn(18, 3, width)
    for broken in (
        {"coef_THC": coef_THC},
        {"coef_THC": coef_THC, "table_PC": table_PC[:86]},
        {"coef_THC": coef_THC[:, :2], "table_PC": table_PC},
        {"coef_THC": coef_THC.double(), "table_PC": table_PC},
    ):
        with pytest.raises(AssertionError):
            scene.run(op, q_THD, **broken)
    check(scene, op, q_THD, coef_THC=coef_THC, table_PC=table_PC)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("layout", [DECODE, MIXED])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("head_dim", "max_rows"),
    [(64, 32), (128, 32), (80, 32), (256, 32), (64, 128), (128, 128), (80, 128)],
)
def test_matches_dense_in_bf16(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, Any],
    bits: int,
    head_dim: int,
    max_rows: int,
) -> None:
    monkeypatch.setattr(attend_module, "MAX_ROWS", max_rows)
    scene = make_scene(
        randn, generator, device, head_dim, **layout, bits=bits, num_outliers=bits % 2
    )
    q_THD = randn(sum(scene.num_new), 8, head_dim, dtype=torch.bfloat16)
    check(scene, attend_mixed, q_THD)
    coef_THC, table_PC = randn(*q_THD.shape), randn(max(scene.lengths), head_dim)
    check(scene, attend_mixed, q_THD, coef_THC=coef_THC, table_PC=table_PC)


@pytest.mark.parametrize("op", OPS)
def test_a_prompt_reads_what_its_tokens_would_one_by_one(
    randn: Randn, device: torch.device, generator: torch.Generator, op: Op
) -> None:
    """Appended by the twin: a chunk with a staging buffer, or tokens with a ring that wraps.

    Rows with wholes as values rotate exactly, and keys encode alike: outputs differ by the order of
    FP32 sums alone, 2^-24 times some tens, of values below 80.
    """
    num, size, head_dim = 70, 8, 16
    k_TGD, q_THD = randn(num, 1, head_dim), randn(num, 2, head_dim)
    v_TGD = torch.randint(-20, 21, (num, 1, head_dim), generator=generator).float().to(device)
    rotation_DD = hadamard(head_dim, device)
    options = {"places": [(0, 0, -1), (1, -1, -1)], "bits": 3, "num_sinks": 2, "sinks": [0, -1]}
    zero_1 = int32(0, device=device)
    outputs, planes = [], []
    for chunk in (num, 1):
        generator_2 = torch.Generator().manual_seed(0)
        cap = size if chunk == 1 else size + num
        fmt, pages = make_pages(
            generator_2, device, head_dim, num_kv_heads=1, num_recent=cap, **options
        )
        rows = []
        for start in range(0, num, chunk):
            tokens = slice(start, start + chunk)
            step = make_step(
                token_ids=[[0] * chunk], starts=[start], page_ids=[[0, 1]], device=device
            )
            row_T = (step.position_T % cap).int()
            window = Window(
                size=size, row_T=row_T, base_S=zero_1, cap_S=zero_1 + cap, from_S=zero_1
            )
            common = (pages, fmt, step, window)
            append_mixed_torch(k_TGD[tokens], v_TGD[tokens], *common, rotation_DD=rotation_DD)
            last = start + chunk == num
            if last or op is attend_mixed_torch or start in (0, 7, 9, 64, 65):
                out_TD = op(q_THD[tokens], *common, scale=0.25, rotation_DD=rotation_DD)
                rows.append((tokens, out_TD))
        outputs.append(rows)
        planes.append(pages)
    for name in ("k_PGB", "vbase_XGB", "vfine_YGB", "sink_XGB"):
        left, right = (getattr(pages, name) for pages in planes)
        assert torch.equal(left, right), name
    ((_, whole_THD),) = outputs[0]
    for tokens, out_THD in outputs[1]:
        assert (whole_THD[tokens] - out_THD).abs().max().item() <= 80 * 40 * 2**-24


@pytest.mark.parametrize("op", OPS)
def test_a_window_of_nothing(
    randn: Randn, generator: torch.Generator, device: torch.device, op: Op
) -> None:
    """All keys from planes; recent rows need not even be there."""
    scene = make_scene(randn, generator, device, 16, **SHORT, size=0, num_sinks=0)
    pages = dataclasses.replace(scene.pages, recent_NGE=scene.pages.recent_NGE[:0])
    scene = dataclasses.replace(scene, pages=pages, window=no_window(21, 2, device))
    check(scene, op, randn(21, 2, 16))


@pytest.mark.triton
def test_mass_of_a_long_prompt_is_taken_in_parts(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tile at a time gives what all tiles at once give, bit for bit."""
    layout = {"page_ids": [[0, 4], [1]], "lengths": [100, 40], "num_new": [20, 4]}
    scene = make_scene(randn, generator, device, 16, **layout)
    q_THD = randn(24, 2, 16)
    masses = [torch.zeros(2, 2, device=device) for _ in range(2)]
    whole_THD = scene.run(attend_mixed, q_THD, mass_SP=masses[0])
    monkeypatch.setattr(page_mass, "MAX_SHARE_BYTES", 1)
    parts_THD = scene.run(attend_mixed, q_THD, mass_SP=masses[1])
    assert torch.equal(parts_THD, whole_THD)
    assert torch.equal(masses[0], masses[1])
    # 20 and 4 queries of two heads; each weight and each sum of at most 40 is off by 2^-22.
    total_S = masses[0].sum(1) - torch.tensor([40.0, 8.0], device=device)
    assert total_S.abs().max().item() <= 40 * 2**-20


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", ["query", "recent", "sink"])
def test_nan_stays_in_its_sequence(
    randn: Randn, generator: torch.Generator, device: torch.device, op: Op, where: str
) -> None:
    # Case K20. Planes cannot hold a NaN.
    layout = {"page_ids": [[0, 1], [2, 6], [3]], "lengths": [70, 66, 64], "num_new": [1, 1, 1]}
    scene = make_scene(randn, generator, device, 16, **layout)
    q_THD = randn(3, 2, 16)
    clean_SP = torch.zeros(3, 2, device=device)
    clean_THD = scene.run(op, q_THD, mass_SP=clean_SP)
    if where == "query":
        q_THD[1, :, 3] = math.nan
    elif where == "recent":
        scene.pages.recent_NGE[int(scene.window.base_S[1]) + 65 % 21, 0, 3] = math.nan
    else:
        assert scene.pages.sink_XGB is not None
        scene.pages.sink_XGB[1] = 0xFF
    poisoned_SP = torch.zeros(3, 2, device=device)
    poisoned_THD = scene.run(op, q_THD, mass_SP=poisoned_SP)
    assert bool(poisoned_THD[1].isnan().all())
    assert torch.equal(poisoned_THD[[0, 2]], clean_THD[[0, 2]])
    assert torch.equal(poisoned_SP[[0, 2]], clean_SP[[0, 2]])
    assert bool(poisoned_SP[1].isnan().all())


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("op", OPS)
def test_padding_changes_nothing_and_comes_out_zero(
    randn: Randn, generator: torch.Generator, device: torch.device, op: Op
) -> None:
    # Case G04: a step padded to a larger captured size; the last page id has no plane.
    places = [*PLACES, (-1, -1, -1)]
    layout = {"page_ids": [[0], [5, 4]], "lengths": [3, 70], "num_new": [1, 1]}
    scene = make_scene(randn, generator, device, 16, **layout, places=places)
    step, q_THD = scene.step, randn(4, 2, 16)
    expected_SP = torch.zeros(2, 2, device=device)
    expected_THD = scene.run(op, q_THD[:2].clone(), mass_SP=expected_SP)

    def padded(index: torch.Tensor, *values: int) -> torch.Tensor:
        return torch.cat([index, index.new_tensor(values)])

    padded_step = dataclasses.replace(
        step,
        position_T=padded(step.position_T, 0, 0),
        kv_len_S=padded(step.kv_len_S, 0, 0),
        query_start_S1=padded(step.query_start_S1, 3, 4),
        page_table_SP=torch.cat([step.page_table_SP, torch.full_like(step.page_table_SP, 7)]),
        tile_seq_Q=padded(step.tile_seq_Q, 2, 3, -1),
        tile_start_Q=padded(step.tile_start_Q, 2, 3, 0),
        max_kv_len=100,
    )
    window = Window(
        size=scene.window.size,
        **{
            name: padded(getattr(scene.window, name), 0, 0)
            for name in ("row_T", "base_S", "cap_S", "from_S")
        },
    )
    mass_SP = torch.zeros(4, 2, device=device)
    actual_THD = scene.run(op, q_THD, step=padded_step, window=window, mass_SP=mass_SP)
    assert torch.equal(actual_THD[:2], expected_THD)
    assert torch.equal(actual_THD[2:], torch.zeros_like(actual_THD[2:]))
    assert torch.equal(mass_SP, torch.cat([expected_SP, torch.zeros_like(expected_SP)]))


def test_twin_is_differentiable_in_q(
    randn: Randn, generator: torch.Generator, device: torch.device
) -> None:
    scene = make_scene(randn, generator, device, 16, **SHORT)
    q_THD = randn(21, 2, 16).requires_grad_()
    mass_SP = torch.zeros(2, 1, device=device)
    scene.run(attend_mixed_torch, q_THD, mass_SP=mass_SP).sum().backward()
    assert q_THD.grad is not None
    assert bool(q_THD.grad.isfinite().all())
    assert not mass_SP.requires_grad


@pytest.mark.parametrize("op", [attend_mixed, attend_mixed_torch])
def test_wrong_inputs_fail_loudly(
    randn: Randn, generator: torch.Generator, device: torch.device, op: Op
) -> None:
    scene = make_scene(randn, generator, device, 16, **SHORT, num_kv_heads=2)
    q_THD = randn(21, 4, 16)
    pages, window = scene.pages, scene.window
    for changes, broken_q, keywords in (
        ({}, q_THD.half(), {}),
        ({}, q_THD[:, :3], {}),
        ({"pages": dataclasses.replace(pages, place_P3=pages.place_P3.long())}, q_THD, {}),
        ({"pages": dataclasses.replace(pages, k_bits=2)}, q_THD, {}),
        ({"pages": dataclasses.replace(pages, sink_P=None)}, q_THD, {}),
        ({"window": dataclasses.replace(window, cap_S=window.cap_S.long())}, q_THD, {}),
        ({}, q_THD, {"mass_SP": torch.zeros(2, 1, device=device).double()}),
        ({}, q_THD, {"mass_SP": torch.zeros(2, 2, device=device)}),
    ):
        with pytest.raises(AssertionError):
            dataclasses.replace(scene, **changes).run(op, broken_q, **keywords)
