"""`attend` on CUDA against its twin: codecs, odd lengths, groups, plans, poison, padding, graphs.

On a CPU the kernel's own source runs in an emulator, lane by lane, whose `mma` and transposition
follow the PTX ISA's layouts by formulas of their own.

Letters as in test_attend.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_launcher import emulator, use_kernels
from test_attend import POISON, Scene, make_scene, tolerances

from conftest import assert_close
from subten.codecs import KVFormat, kv_format
from subten.core import PAGE_SIZE
from subten.kernels import attend as triton_attend
from subten.kernels.attend import attend_torch, read_pages
from subten.kernels.cuda import attend as cuda_attend
from subten.kernels.cuda import runtime
from subten.kernels.cuda.attend import STRUCTS, DecodePlan, attend, plan_decode, slice_bytes
from subten.kernels.step import StepTensors

Randn = Callable[..., torch.Tensor]
EMULATOR = (Path(__file__).parent / "attend_emulation",)
SERVED = ("attend.cu", "append_attend.cu", "attend_mixed.cu")
SMALL = DecodePlan(num_splits=3, min_slices=1, num_warps=2, num_stages=2)
"""Splits, warps and a ring that wraps around, within lengths that an emulator manages."""


def emulated_launch(
    source: str,
    name: str,
    grid: tuple[int, int, int],
    block: int,
    args: Sequence[runtime.Argument],
    *,
    device: torch.device,
    shared_bytes: int = 0,
    pdl: bool = False,
) -> None:
    """`runtime.launch` of a file that emulate.cpp includes on the CPU."""
    assert source in SERVED and isinstance(pdl, bool), source
    assert device.type == "cpu", device
    values = [runtime.pack_argument(arg) for arg in args]
    pointers = runtime.pointer_array(values)
    failed = emulator(*EMULATOR).emulate(name.encode(), *grid, block, shared_bytes, pointers)
    assert not failed, f"the emulator does not hold {name}"


@pytest.fixture(autouse=True)
def no_counter_is_left(device: torch.device) -> Any:
    """A split that arrived and was not counted back would break the next launch."""
    yield
    if cuda_attend._counters.cache_info().currsize:
        assert not cuda_attend._counters(device).any()


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on the GPU, or emulated; Triton must not step in."""
    use_kernels(device, monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(runtime, "launch", emulated_launch)

    monkeypatch.setattr(triton_attend, "attend", None)


def on_cuda(scene: Scene, q_THD: torch.Tensor, step: StepTensors, **choices: Any) -> torch.Tensor:
    return scene.run(functools.partial(attend, **choices), q_THD, step)


def check(scene: Scene, q_THD: torch.Tensor, **choices: Any) -> torch.Tensor:
    """One decode step of every sequence agrees with the twin in float32."""
    step = scene.step([1] * len(scene.lengths))
    actual_THD = on_cuda(scene, q_THD, step, **choices)
    expected_THD = scene.run(attend_torch, q_THD.float(), step)
    assert actual_THD.dtype == torch.bfloat16 and actual_THD.is_contiguous()
    assert_close(actual_THD, expected_THD, *tolerances(scene, q_THD), scene.fmt.codec.name)
    return actual_THD


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (128, 8), (64, 1), (64, 5)])
def test_matches_twin(randn: Randn, codec: str, head_dim: int, group: int) -> None:
    """Two KV heads, one or two tiles of heads; every byte that no row owns is NaN."""
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=[1, 63, 64, 65, 150])
    q_THD = randn(5, 2 * group, head_dim, dtype=torch.bfloat16)
    check(scene, q_THD, plan=SMALL)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
@pytest.mark.parametrize(
    "plan",
    [
        DecodePlan(num_splits=1, min_slices=1, num_warps=1, num_stages=3),
        DecodePlan(num_splits=1, min_slices=1, num_warps=3, num_stages=2),
        DecodePlan(num_splits=7, min_slices=2, num_warps=4, num_stages=5),
        DecodePlan(num_splits=64, min_slices=1, num_warps=1, num_stages=4),
    ],
    ids=str,
)
def test_every_kind_of_plan(randn: Randn, codec: str, plan: DecodePlan) -> None:
    """Rings of odd and even length, warps without work, more splits than a warp has lanes."""
    scene = make_scene(randn, codec, 128, num_kv_heads=1, lengths=[577])
    check(scene, randn(1, 3, 128, dtype=torch.bfloat16), plan=plan)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_code_and_scale(
    randn: Randn, generator: torch.Generator, codec: str, head_dim: int
) -> None:
    """Random bytes for codes, subnormal ones too, and scales of every size from 2^-6 to 1."""
    scene = make_scene(randn, codec, head_dim, num_kv_heads=1, lengths=[100])
    fmt, num_pages = scene.fmt, len(scene.pages_PGB)
    if codec != "bf16":
        shape = (num_pages, 1, PAGE_SIZE * fmt.row.codes)
        code = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if codec == "fp8":
            code[(code & 0x7F) == 0x7F] = 0x01
        size = torch.rand(num_pages, 1, PAGE_SIZE, generator=generator) * -6
        planes = [(fmt.k_codes, code), (fmt.v_codes, code)]
        if codec == "fp4":
            # Every E4M3 scale but NaN, and powers of two that make 6 * 448 at most 2^-6 to 1; keys
            # have 2^6 more, for few groups have a large scale, and weights must show whose it is.
            groups = (num_pages, 1, PAGE_SIZE * fmt.row.scale)
            of_group = torch.randint(0, 0x7F, groups, generator=generator, dtype=torch.uint8)
            of_row = (size.floor() + 127 - 12).to(torch.uint8)
            planes += [(fmt.k_scale, of_group), (fmt.v_scale, of_group)]
            planes += [(fmt.k_zero, of_row + 6), (fmt.v_zero, of_row)]
        elif codec == "fp4_mx":
            # Powers of two below 1 and above.
            groups = (num_pages, 1, PAGE_SIZE * fmt.row.scale)
            of_group = torch.randint(127 - 7, 127 + 2, groups, generator=generator)
            planes += [(at, of_group.to(torch.uint8)) for at in (fmt.k_scale, fmt.v_scale)]
        else:
            scale = size.exp2() / {"fp8": 448, "int8": 128, "int4": 8, "int2": 10}[codec]
            stored = scale.bfloat16().view(torch.uint8)
            planes += [(fmt.k_scale, stored), (fmt.v_scale, stored)]
        for at, part in planes:
            scene.pages_PGB[:, :, at : at + part.shape[-1]] = part.to(scene.pages_PGB.device)
    ids = torch.tensor(scene.page_ids[0], device=scene.pages_PGB.device)
    k_NGD, v_NGD = read_pages(scene.pages_PGB, fmt, ids, 100)
    scene = dataclasses.replace(scene, keys=[k_NGD], values=[v_NGD])
    check(scene, randn(1, 5, head_dim, dtype=torch.bfloat16), plan=SMALL)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_queries_of_any_strides(randn: Randn) -> None:
    scene = make_scene(randn, "int4", 64, num_kv_heads=2, lengths=[70, 5, 64])
    q_DHT = randn(64, 6, 3, dtype=torch.bfloat16)
    step = scene.step([1, 1, 1])
    strided = on_cuda(scene, q_DHT.permute(2, 1, 0), step, plan=SMALL)
    assert torch.equal(
        strided, on_cuda(scene, q_DHT.permute(2, 1, 0).contiguous(), step, plan=SMALL)
    )
    check(scene, q_DHT.permute(2, 1, 0), plan=SMALL)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_padding_is_zero_and_skipped_tiles_stay(randn: Randn) -> None:
    """A sequence of length 0 gets zeros; a tile with sequence -1 leaves its token alone."""
    scene = make_scene(randn, "fp8", 64, num_kv_heads=1, lengths=[70, 70, 70])
    step = scene.step([1, 1, 1])
    step.kv_len_S[1] = 0
    step.tile_seq_Q[2] = -1
    out_THD = on_cuda(scene, randn(3, 2, 64, dtype=torch.bfloat16), step, plan=SMALL)
    assert out_THD[0].isfinite().all() and not out_THD[1].any() and out_THD[2].isnan().all()


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
def test_a_sequence_is_its_own(randn: Randn, codec: str) -> None:
    """Alone or in company, beside NaN or not: the same bits; NaN in its own row shows."""
    scene = make_scene(randn, codec, 64, num_kv_heads=1, lengths=[150, 90])
    q_THD = randn(2, 3, 64, dtype=torch.bfloat16)
    out_THD = on_cuda(scene, q_THD, scene.step([1, 1]), plan=SMALL)
    alone = dataclasses.replace(scene, lengths=[90], page_ids=scene.page_ids[1:])
    assert torch.equal(on_cuda(alone, q_THD[1:], alone.step([1]), plan=SMALL), out_THD[1:])
    scene.pages_PGB[scene.page_ids[0][1]] = POISON
    beside_THD = on_cuda(scene, q_THD, scene.step([1, 1]), plan=SMALL)
    assert torch.equal(beside_THD[1], out_THD[1])
    assert beside_THD[0].isnan().all()


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
def test_queries_of_every_size(randn: Randn, codec: str) -> None:
    """A NaN shows in its head alone; zeros, tiny and large values are what they are."""
    scene = make_scene(randn, codec, 64, num_kv_heads=1, lengths=[70])
    q_THD = randn(1, 5, 64, dtype=torch.bfloat16)
    q_THD[0, 1] = 0
    q_THD[0, 2] *= 2.0**-120
    q_THD[0, 3, 1:] *= 2.0**-12
    check(scene, q_THD, plan=SMALL)
    q_THD[0, 4, 7] = float("nan")
    out_THD = on_cuda(scene, q_THD, scene.step([1]), plan=SMALL)
    assert out_THD[0, 4].isnan().all() and out_THD[0, :4].isfinite().all()


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize(
    "plan", [SMALL, DecodePlan(num_splits=64, min_slices=1, num_warps=1)], ids=["small", "64"]
)
def test_scores_that_rise_along_the_sequence(randn: Randn, plan: DecodePlan) -> None:
    """Every slice moves the maximum, and the last of up to 36 splits outweighs all the others."""
    length, head_dim = 570, 128
    q_THD = randn(1, 2, head_dim, dtype=torch.bfloat16)
    direction_D = q_THD[0, 0].float() / q_THD[0, 0].float().norm()
    ramp_N = torch.linspace(-60, 60, length, device=q_THD.device)
    rows = [0.1 * randn(length, 1, head_dim) + ramp_N[:, None, None] * direction_D]
    rows.append(randn(length, 1, head_dim))
    scene = make_scene(
        lambda *_shape: rows.pop(0), "bf16", head_dim, num_kv_heads=1, lengths=[length]
    )
    step = scene.step([1])
    out_THD = on_cuda(scene, q_THD, step, plan=plan)
    expected_THD = scene.run(attend_torch, q_THD.float(), step)
    # Scores are exact but for FP32 sums; weights and output are rounded to bfloat16.
    largest = float(scene.values[0].abs().max())
    assert_close(out_THD, expected_THD, 2**-7 * largest, 2**-9 * largest)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_newest_rows_are_read_after_the_wait(
    randn: Randn, device: torch.device, codec: str, head_dim: int
) -> None:
    """Copies start before the kernel ahead has ended, but for slices with a row that it writes."""
    if device.type != "cpu":
        pytest.skip("only the emulator sees when a copy starts")
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=[1, 64, 65, 143])
    fmt = scene.fmt
    starts, sizes = [], []
    for length, page_ids in zip(scene.lengths, scene.page_ids, strict=True):
        page, row = page_ids[(length - 1) // PAGE_SIZE], (length - 1) % PAGE_SIZE
        for at, row_bytes in (
            *((at, fmt.row.codes) for at in (fmt.k_codes, fmt.v_codes)),
            *((at, fmt.row.scale) for at in (fmt.k_scale, fmt.v_scale)),
            *((at, fmt.row.zero) for at in (fmt.k_zero, fmt.v_zero)),
        ):
            for head in range(2 if row_bytes else 0):
                starts.append(scene.pages_PGB[page, head].data_ptr() + at + row * row_bytes)
                sizes.append(row_bytes)
    num = len(starts)
    emulator(*EMULATOR).set_late(
        (ctypes.c_void_p * num)(*starts), (ctypes.c_int * num)(*sizes), num
    )
    try:
        check(scene, randn(4, 6, head_dim, dtype=torch.bfloat16), plan=SMALL)
        assert emulator(*EMULATOR).num_early_copies() > 0
    finally:
        emulator(*EMULATOR).set_late(None, None, 0)


@pytest.mark.parametrize(
    ("codec", "head_dim", "group", "dtype", "num_new"),
    [
        ("int4", 64, 1, torch.float32, 1),
        ("int4", 64, 1, torch.bfloat16, 2),
        ("int4", 64, 9, torch.bfloat16, 1),
        ("int4", 96, 1, torch.bfloat16, 1),
        ("int4_g32", 64, 1, torch.bfloat16, 1),
        ("vq1.5", 64, 1, torch.bfloat16, 1),
        ("fp32", 64, 1, torch.bfloat16, 1),
    ],
)
def test_the_rest_goes_to_triton(
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    num_new: int,
) -> None:
    calls = []
    monkeypatch.setattr(triton_attend, "attend", lambda *a, **k: calls.append((a, k)) or a[0])
    scene = make_scene(randn, codec, head_dim, num_kv_heads=1, lengths=[5])
    q_THD = randn(num_new, group, head_dim, dtype=dtype)
    step = scene.step([num_new])
    assert scene.run(attend, q_THD, step) is q_THD
    args, kwargs = calls[0]
    assert args[1:] == (scene.pages_PGB, scene.fmt, step)
    assert kwargs.keys() == {"scale", "rotation_DD", "key_bias_GD", "cos_sin_PD"}


@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_slices_and_plans_fit(codec: str, head_dim: int) -> None:
    """Stages hold a slice and a barrier; rings fit an SM, two blocks of them past one wave."""
    fmt = kv_format(codec, head_dim)
    layout = slice_bytes(fmt)
    assert PAGE_SIZE % layout.keys == 0 and layout.keys % 16 == 0
    assert layout.stage_bytes >= layout.keys * fmt.row.total + 8 and layout.stage_bytes % 16 == 0
    for num_sequences in (1, 2, 3, 8, 17, 32, 66, 256):
        for num_kv_heads in (1, 2, 4, 8, 32, 128):
            plan = plan_decode(
                fmt, num_sms=132, num_sequences=num_sequences, num_kv_heads=num_kv_heads
            )
            plan.check(8, layout)
            # 228 KiB an SM; the kernels declare some memory, and the system takes 1 KiB.
            declared = 1024 * (4.1 if head_dim == 128 else 2.9)
            is_for_two = 2 * (plan.shared_bytes(layout) + declared + 1024) <= 228 * 1024
            num_blocks = num_sequences * num_kv_heads * plan.num_splits
            assert is_for_two or num_blocks <= 132, plan
            assert plan.num_warps == 8 or num_blocks <= 132, plan
            assert num_blocks > 66 or plan.num_splits == 64, plan


@pytest.mark.parametrize(
    ("num_sequences", "num_kv_heads", "num_splits"),
    [
        *((1, 4, 32), (1, 1, 64), (1, 8, 16), (2, 4, 16), (8, 4, 4), (9, 4, 3), (16, 4, 2)),
        *((8, 8, 2), (17, 4, 3), (21, 4, 3), (24, 4, 1), (32, 4, 1), (64, 4, 1), (67, 4, 4)),
        (256, 4, 1),
    ],
)
def test_splits_fill_the_sms_once(num_sequences: int, num_kv_heads: int, num_splits: int) -> None:
    fmt = kv_format("int4", 128)
    plan = plan_decode(fmt, num_sms=132, num_sequences=num_sequences, num_kv_heads=num_kv_heads)
    assert plan.num_splits == num_splits, plan


@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_page_is_what_the_kernel_thinks(codec: str, head_dim: int) -> None:
    """`Part` of attend_codecs.cuh derives offsets from head_dim; they are the format's."""
    fmt: KVFormat = kv_format(codec, head_dim)
    scale_at = PAGE_SIZE * fmt.row.codes
    zero_at = scale_at + PAGE_SIZE * fmt.row.scale
    half = zero_at + -(-PAGE_SIZE * fmt.row.zero // 128) * 128
    assert (fmt.k_codes, fmt.k_scale, fmt.k_zero) == (0, scale_at, zero_at)
    assert (fmt.v_codes, fmt.v_scale, fmt.v_zero) == (half, half + scale_at, half + zero_at)
    assert fmt.page_bytes == 2 * half


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.gpu
@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", [[4097], [1, 1000, 65], [63, 64, 65, 1, 4097, 130, 2, 700]])
def test_matches_twin_on_a_gpu(
    randn: Randn, codec: str, head_dim: int, group: int, lengths: list[int]
) -> None:
    scene = make_scene(randn, codec, head_dim, num_kv_heads=4, lengths=lengths)
    q_THD = randn(len(lengths), 4 * group, head_dim, dtype=torch.bfloat16)
    out_THD = check(scene, q_THD)
    assert torch.equal(check(scene, q_THD), out_THD), "two runs differ"
    assert torch.equal(check(scene, q_THD, pdl=False), out_THD), "PDL changes bits"


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.gpu
@pytest.mark.parametrize("codec", STRUCTS)
def test_long_contexts_on_a_gpu(randn: Randn, codec: str) -> None:
    scene = make_scene(randn, codec, 128, num_kv_heads=2, lengths=[5000, 33_000, 64])
    check(scene, randn(3, 16, 128, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", STRUCTS)
def test_graph_replay_follows_kv_len(randn: Randn, device: torch.device, codec: str) -> None:
    """One graph of two launches in a row, replayed at lengths below that of its capture."""
    if not runtime.is_available(device):
        pytest.skip("needs cuda-bindings and NVRTC")
    scene = make_scene(randn, codec, 128, num_kv_heads=4, lengths=[3000, 2000])
    q_THD = randn(2, 16, 128, dtype=torch.bfloat16)
    step = scene.step([1, 1])
    on_cuda(scene, q_THD, step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first_THD = on_cuda(scene, q_THD, step)
        second_THD = on_cuda(scene, q_THD, step)
    for lengths in ([3000, 2000], [1, 1], [0, 64], [65, 1999], [2999, 0]):
        step.kv_len_S.copy_(torch.tensor(lengths))
        step.position_T.copy_(torch.tensor([max(0, n - 1) for n in lengths]))
        expected_THD = on_cuda(scene, q_THD, step)
        first_THD.fill_(float("nan"))
        second_THD.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first_THD, expected_THD), lengths
        assert torch.equal(second_THD, expected_THD), lengths
