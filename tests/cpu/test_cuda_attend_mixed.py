"""`attend_mixed` on CUDA against dense FP64 attention: mixes of pages, exact rows, tables, masses.

On a CPU the kernel's own source runs in the emulator of test_cuda_attend.py.

Letters as in test_attend_mixed.py; F frequencies.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_launcher import emulator, use_kernels
from mixed_pages import int32
from test_attend_mixed import Scene, check, make_scene
from test_cuda_attend import EMULATOR, emulated_launch, no_counter_is_left  # noqa: F401

from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels import attend_mixed as triton_mixed
from subten.kernels.cuda import runtime
from subten.kernels.cuda.attend import DecodePlan
from subten.kernels.cuda.attend_mixed import attend_mixed, page_bytes, plan_mixed

Randn = Callable[..., torch.Tensor]
SMALL = DecodePlan(num_splits=3, min_slices=1, num_warps=2, num_stages=2)
POLLS = dataclasses.replace(SMALL, polls=True)
PLACES = [(0, -1, -1), (1, 1, -1), (3, 0, -1), (4, -1, -1), (2, 2, -1), (6, 3, -1), (5, -1, -1)]
"""Pages at 2 and at 4 bits of V; none cold."""
WITH_COLD = [(0, -1, -1), (1, 1, -1), (-1, -1, 1), (3, 0, -1), (2, 2, -1), (-1, -1, 2), (-1, -1, 0)]
"""Three of them cold; planes that no page has may hold anything."""
LONG: dict[str, Any] = {
    "page_ids": [[1, 6, 2, 5, 3, 4, 0], [2, 0], [5]],
    "lengths": [443, 65, 64],
    "num_new": [1, 1, 1],
}
SHORT: dict[str, Any] = {"page_ids": [[2], [4, 1]], "lengths": [2, 127], "num_new": [1, 1]}


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on the GPU, or emulated; Triton's own must not step in."""
    use_kernels(device, monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(runtime, "launch", emulated_launch)
    monkeypatch.setattr(triton_mixed, "attend_mixed", None)


def on_cuda(plan: DecodePlan | None = SMALL, **choices: Any) -> Callable[..., torch.Tensor]:
    return functools.partial(attend_mixed, plan=plan, **choices)


def rotary(randn: Randn, num: int, head_dim: int, factor: float = 1.25) -> torch.Tensor:
    """Cosines and sines of angles of all sizes, up to half a turn a row, times a factor."""
    frequency_F = 3.14 * 10000.0 ** -torch.rand(head_dim // 2, device=randn(1).device)
    angle_PF = torch.arange(num, device=frequency_F.device)[:, None] * frequency_F
    return torch.cat([angle_PF.cos(), angle_PF.sin()], dim=1).float() * factor


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("head_dim", "group", "layout", "options"),
    [
        (128, 8, SHORT, {"num_kv_heads": 2}),
        (128, 3, LONG, {"size": 70, "num_sinks": 5}),
        (64, 5, LONG, {"num_sinks": 0}),
        (64, 1, SHORT, {"size": 1, "num_kv_heads": 2}),
    ],
    ids=["128 short", "128", "64", "64 short"],
)
def test_matches_dense(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    bits: int,
    head_dim: int,
    group: int,
    layout: dict[str, Any],
    options: dict[str, Any],
) -> None:
    scene = make_scene(
        randn, generator, device, head_dim, **layout, **options, bits=bits, places=PLACES
    )
    num_heads = group * scene.pages.num_kv_heads
    q_THD = randn(len(scene.lengths), num_heads, head_dim, dtype=torch.bfloat16)
    check(scene, on_cuda(), q_THD)
    longest = max(scene.lengths)
    table_PC = rotary(randn, longest + 3, head_dim)
    table_PC[longest:] = math.nan
    check(scene, on_cuda(), q_THD, coef_THC=3 * randn(*q_THD.shape), table_PC=table_PC)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize(("bits", "head_dim"), [(2, 128), (3, 64), (4, 128)])
def test_cold_pages_match_dense(
    randn: Randn, generator: torch.Generator, device: torch.device, bits: int, head_dim: int
) -> None:
    """Pages of all kinds in one launch, exact rows in cold ones too."""
    scene = make_scene(
        randn, generator, device, head_dim, **LONG, bits=bits, places=WITH_COLD, num_sinks=5
    )
    q_THD = randn(3, 8, head_dim, dtype=torch.bfloat16)
    check(scene, on_cuda(), q_THD)
    table_PC = rotary(randn, 443, head_dim)
    check(scene, on_cuda(), q_THD, coef_THC=3 * randn(*q_THD.shape), table_PC=table_PC)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize(
    "plan",
    [
        POLLS,
        DecodePlan(num_splits=1, min_slices=1, num_warps=1, num_stages=3),
        DecodePlan(num_splits=2, min_slices=2, num_warps=3, num_stages=2),
        DecodePlan(num_splits=64, min_slices=1, num_warps=1, num_stages=5, polls=True),
    ],
    ids=str,
)
def test_every_kind_of_plan(
    randn: Randn, generator: torch.Generator, device: torch.device, plan: DecodePlan
) -> None:
    scene = make_scene(randn, generator, device, 128, **LONG, bits=4, places=PLACES)
    q_THD = randn(3, 8, 128, dtype=torch.bfloat16)
    check(scene, on_cuda(plan), q_THD)
    added = {"coef_THC": randn(3, 8, 128), "table_PC": rotary(randn, 443, 128)}
    check(scene, on_cuda(plan), q_THD, **added)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_polling_gives_the_bits_of_counting(
    randn: Randn, generator: torch.Generator, device: torch.device
) -> None:
    scene = make_scene(randn, generator, device, 64, **LONG, bits=3, places=PLACES)
    q_THD = randn(3, 7, 64, dtype=torch.bfloat16)
    added = {"coef_THC": randn(3, 7, 64), "table_PC": rotary(randn, 443, 64)}
    counted_THD, polled_THD = (scene.run(on_cuda(plan), q_THD, **added) for plan in (SMALL, POLLS))
    assert torch.equal(counted_THD, polled_THD)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("size", [2.0**-30, 2.0**-8, 2.0**20])
def test_coefficients_of_any_size(
    randn: Randn, generator: torch.Generator, device: torch.device, size: float
) -> None:
    """Also where heads differ, and some have none."""
    scene = make_scene(randn, generator, device, 64, **SHORT, bits=4, places=PLACES)
    q_THD, coef_THC = randn(2, 4, 64, dtype=torch.bfloat16), randn(2, 4, 64)
    coef_THC[:, 1] *= size
    coef_THC[:, 2] = 0
    if size > 1:
        # Scores that large choose one key: make it the same under any rounding.
        coef_THC[:, 1, :32] = 0
        coef_THC[:, 1, 0] = size
    check(scene, on_cuda(), q_THD, coef_THC=coef_THC, table_PC=rotary(randn, 127, 64))


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("where", ["query", "coefficient", "recent", "sink"])
def test_nan_stays_in_its_sequence(
    randn: Randn, generator: torch.Generator, device: torch.device, where: str
) -> None:
    layout = {"page_ids": [[0, 1], [2, 6], [3]], "lengths": [70, 66, 64], "num_new": [1, 1, 1]}
    scene = make_scene(randn, generator, device, 64, **layout, places=PLACES)
    q_THD, coef_THC = randn(3, 3, 64, dtype=torch.bfloat16), randn(3, 3, 64)
    added = {"coef_THC": coef_THC, "table_PC": rotary(randn, 70, 64)}
    clean_SP = torch.zeros(3, 2, device=device)
    clean_THD = scene.run(on_cuda(), q_THD, mass_SP=clean_SP, **added)
    alone = dataclasses.replace(
        scene,
        page_ids=layout["page_ids"][2:],
        lengths=[64],
        num_new=[1],
        window=dataclasses.replace(
            scene.window,
            row_T=scene.window.row_T[2:],
            base_S=scene.window.base_S[2:],
            cap_S=scene.window.cap_S[2:],
            from_S=scene.window.from_S[2:],
        ),
    )
    added_alone = {**added, "coef_THC": coef_THC[2:].contiguous()}
    assert torch.equal(alone.run(on_cuda(), q_THD[2:], **added_alone), clean_THD[2:])
    if where == "query":
        q_THD[1, :, 3] = math.nan
    elif where == "coefficient":
        coef_THC[1, :, 40] = math.nan
    elif where == "recent":
        scene.pages.recent_NGE[int(scene.window.base_S[1]) + 65 % 21, 0, 3] = math.nan
    else:
        assert scene.pages.sink_XGB is not None
        scene.pages.sink_XGB[1] = 0xFF
    poisoned_SP = torch.zeros(3, 2, device=device)
    poisoned_THD = scene.run(on_cuda(), q_THD, mass_SP=poisoned_SP, **added)
    assert bool(poisoned_THD[1].isnan().all())
    assert torch.equal(poisoned_THD[[0, 2]], clean_THD[[0, 2]])
    assert torch.equal(poisoned_SP[[0, 2]], clean_SP[[0, 2]])
    assert bool(poisoned_SP[1].isnan().all())


@pytest.mark.usefixtures("kernels", "poisoned")
def test_padding_is_zero_and_skipped_tiles_stay(
    randn: Randn, generator: torch.Generator, device: torch.device
) -> None:
    """Case G04; the pages of a sequence of length 0 have no planes."""
    layout = {"page_ids": [[0], [7], [5]], "lengths": [30, 30, 30], "num_new": [1, 1, 1]}
    places = [*PLACES, (-1, -1, -1)]
    scene = make_scene(randn, generator, device, 64, **layout, places=places)
    step = scene.step
    step.kv_len_S[1] = 0
    step.tile_seq_Q[2] = -1
    mass_SP = torch.zeros(3, 1, device=device)
    q_THD = randn(3, 2, 64, dtype=torch.bfloat16)
    out_THD = scene.run(on_cuda(), q_THD, step=step, mass_SP=mass_SP)
    assert out_THD[0].isfinite().all() and not out_THD[1].any() and out_THD[2].isnan().all()
    assert mass_SP[0] > 1.9 and not mass_SP[1:].any()


@pytest.mark.usefixtures("kernels", "poisoned")
def test_a_window_of_nothing(
    randn: Randn, generator: torch.Generator, device: torch.device
) -> None:
    """All keys from planes; recent rows need not even be there."""
    scene = make_scene(randn, generator, device, 64, **SHORT, size=0, num_sinks=0, places=PLACES)
    pages = dataclasses.replace(scene.pages, recent_NGE=scene.pages.recent_NGE[:0])
    check(dataclasses.replace(scene, pages=pages), on_cuda(), randn(2, 2, 64).bfloat16())


def newest_rows(scene: Scene) -> list[tuple[int, int]]:
    """Where bytes of each sequence's newest row lie, and how many."""
    pages, quarter, rows = scene.pages, scene.fmt.head_dim // 4, []
    high = {2: 0, 3: quarter // 2, 4: quarter}[pages.k_bits]
    for length, ids in zip(scene.lengths, scene.page_ids, strict=True):
        page, row = ids[(length - 1) // PAGE_SIZE], (length - 1) % PAGE_SIZE
        base, fine, cold = pages.place_P3[page].tolist()
        planes = [(pages.k_PGB[page], (quarter, high, 1))]
        planes += [(pages.vbase_XGB[base], (quarter, 1))] if base >= 0 else []
        planes += [(pages.vfine_YGB[fine], (quarter,))] if fine >= 0 else []
        planes += [(pages.vcold_ZGB[cold], (quarter * 3 // 4, 1))] if cold >= 0 else []
        for plane_GB, widths in planes:
            for head_B in plane_GB:
                at = head_B.data_ptr()
                for width in widths:
                    rows.append((at + row * width, width))
                    at += PAGE_SIZE * width
    return [(at, width) for at, width in rows if width]


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize(
    ("bits", "places"), [(2, PLACES), (3, WITH_COLD), (4, PLACES)], ids=["2", "3 cold", "4"]
)
def test_what_the_kernel_ahead_writes_is_read_after_the_wait(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    bits: int,
    places: list[tuple[int, int, int]],
) -> None:
    """Pages without the newest row are fetched before it; queries and exact rows are not."""
    if device.type != "cpu":
        pytest.skip("only the emulator sees when a copy starts")
    layout = {
        "page_ids": [[1, 6, 2], [3, 0], [5], [4]],
        "lengths": [150, 65, 64, 1],
        "num_new": [1, 1, 1, 1],
    }
    scene = make_scene(
        randn, generator, device, 64, **layout, bits=bits, num_kv_heads=2, places=places
    )
    q_THD, coef_THC = randn(4, 4, 64, dtype=torch.bfloat16), randn(4, 4, 64)
    added = {"coef_THC": coef_THC, "table_PC": rotary(randn, 150, 64)}
    expected_THD = scene.run(on_cuda(), q_THD, **added)
    assert scene.pages.sink_XGB is not None
    late = newest_rows(scene)
    sink = scene.pages.sink_XGB.as_strided(
        (scene.pages.sink_XGB.untyped_storage().nbytes(),), (1,), 0
    )
    ahead = (q_THD, coef_THC, scene.pages.recent_NGE, sink)
    at = [t.data_ptr() for t in ahead]
    sizes = [t.numel() * t.element_size() for t in ahead]
    starts, widths = zip(*late, strict=True)
    num = len(late)
    emulator(*EMULATOR).set_late(
        (ctypes.c_void_p * num)(*starts), (ctypes.c_int * num)(*widths), num
    )
    emulator(*EMULATOR).set_inputs((ctypes.c_void_p * 4)(*at), (ctypes.c_int * 4)(*sizes), 4)
    try:
        assert torch.equal(scene.run(on_cuda(), q_THD, **added), expected_THD)
        assert emulator(*EMULATOR).num_early_copies() > 0
    finally:
        emulator(*EMULATOR).set_late(None, None, 0)
        emulator(*EMULATOR).set_inputs(None, None, 0)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "options"),
    [
        (64, 1, torch.float32, {}),
        (64, 9, torch.bfloat16, {}),
        (96, 1, torch.bfloat16, {}),
        (64, 1, torch.bfloat16, {"num_outliers": 2}),
        (64, 1, torch.bfloat16, {"num_new": [2, 1]}),
        (64, 1, torch.bfloat16, {"width": 32}),
        (64, 1, torch.bfloat16, {"size": 449}),
    ],
)
def test_the_rest_goes_to_triton(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    calls = []
    monkeypatch.setattr(triton_mixed, "attend_mixed", lambda *a, **k: calls.append((a, k)) or a[0])
    width = options.pop("width", None)
    options = {**SHORT, "places": PLACES, **options}
    scene = make_scene(randn, generator, device, head_dim, **options)
    q_THD = randn(sum(scene.num_new), group, head_dim, dtype=dtype)
    added: dict[str, Any] = {"mass_SP": None, "coef_THC": None, "table_PC": None}
    if width is not None:
        added |= {"coef_THC": randn(2, group, width), "table_PC": randn(127, width)}
    assert scene.run(attend_mixed, q_THD, **added) is q_THD
    _, keywords = calls[0]
    assert keywords.keys() == {"scale", "rotation_DD", *added}


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("places", [PLACES, WITH_COLD], ids=["", "cold"])
def test_plans_fit(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    bits: int,
    head_dim: int,
    places: list[tuple[int, int, int]],
) -> None:
    """Rings and arena fit an SM; a stage holds K, a row of the table, V in both planes."""
    scene = make_scene(randn, generator, device, head_dim, **SHORT, bits=bits, places=places)
    layout = page_bytes(scene.pages, scene.fmt)
    assert layout.keys == PAGE_SIZE and layout.stage_bytes % 16 == 0
    held = (scene.fmt.k_bytes(bits), 4 * head_dim, scene.fmt.base_bytes, scene.fmt.fine_bytes)
    assert layout.stage_bytes >= sum(held) + 12
    for num_sequences in (1, 2, 8, 17, 66, 256):
        for num_kv_heads in (1, 2, 4, 8, 32):
            plan = plan_mixed(num_sms=132, num_sequences=num_sequences, num_kv_heads=num_kv_heads)
            plan.check(8, layout)
    batches = (1, 6, 8, 16, 32, 64)
    plans = [plan_mixed(num_sms=132, num_sequences=n, num_kv_heads=4) for n in batches]
    assert [plan.num_splits for plan in plans] == [32, 5, 4, 2, 1, 1], "one block an SM"
    # 72 pairs: two blocks of a third for each SM end before one of all, for some of them.
    assert plan_mixed(num_sms=132, num_sequences=9, num_kv_heads=8).num_splits == 3


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("lengths", [[4097], [1, 1000, 65], [63, 64, 65, 1, 130, 2, 700]])
@pytest.mark.parametrize("places", [PLACES, WITH_COLD], ids=["", "cold"])
def test_matches_dense_on_a_gpu(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    bits: int,
    head_dim: int,
    group: int,
    lengths: list[int],
    places: list[tuple[int, int, int]],
) -> None:
    """Sequences share pages; the planner's plans, with and without early launches."""
    ids = [[(3 * page + s) % 7 for page in range(-(-n // 64))] for s, n in enumerate(lengths)]
    scene = make_scene(
        randn,
        generator,
        device,
        head_dim,
        page_ids=ids,
        lengths=lengths,
        num_new=[1] * len(lengths),
        bits=bits,
        num_kv_heads=4,
        size=32,
        places=places,
    )
    q_THD = randn(len(lengths), 4 * group, head_dim, dtype=torch.bfloat16)
    added = {
        "coef_THC": randn(*q_THD.shape),
        "table_PC": rotary(randn, max(lengths), head_dim),
    }
    for extra in ({}, added):
        check(scene, on_cuda(None), q_THD, **extra)
        out_THD = scene.run(on_cuda(None), q_THD, **extra)
        assert torch.equal(scene.run(on_cuda(None), q_THD, **extra), out_THD), "two runs differ"
        assert torch.equal(scene.run(on_cuda(None, pdl=False), q_THD, **extra), out_THD)


@pytest.mark.gpu
def test_graph_replay_follows_kv_len(
    randn: Randn, generator: torch.Generator, device: torch.device
) -> None:
    """One graph of two launches in a row, replayed at lengths below that of its capture."""
    if not runtime.is_available(device):
        pytest.skip("needs cuda-bindings and NVRTC")
    ids = [[(3 * page + s) % 7 for page in range(47)] for s in range(2)]
    scene = make_scene(
        randn,
        generator,
        device,
        128,
        page_ids=ids,
        lengths=[3000, 2000],
        num_new=[1, 1],
        bits=4,
        num_kv_heads=4,
        places=WITH_COLD,
    )
    # Any row of a ring may be read.
    scene.pages.recent_NGE.copy_(randn(*scene.pages.recent_NGE.shape))
    scene = dataclasses.replace(
        scene, window=dataclasses.replace(scene.window, from_S=int32(0, 0, device=device))
    )
    q_THD, step = randn(2, 16, 128, dtype=torch.bfloat16), scene.step
    added = {"coef_THC": randn(2, 16, 128), "table_PC": rotary(randn, 3000, 128)}

    rotation_DD = hadamard(128, device)

    def run() -> torch.Tensor:
        return attend_mixed(
            q_THD,
            scene.pages,
            scene.fmt,
            step,
            scene.window,
            scale=0.1,
            rotation_DD=rotation_DD,
            **added,
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first_THD, second_THD = run(), run()
    for lengths in ([3000, 2000], [1, 1], [0, 64], [65, 1999], [2999, 0]):
        step.kv_len_S.copy_(torch.tensor(lengths))
        step.position_T.copy_(torch.tensor([max(0, n - 1) for n in lengths]))
        expected_THD = run()
        first_THD.fill_(float("nan"))
        second_THD.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first_THD, expected_THD), lengths
        assert torch.equal(second_THD, expected_THD), lengths
