"""`attend` against its twin and against a dense FP64 oracle that knows neither pages nor tiles.

Letters: T tokens, H query heads, G KV heads, D head_dim, N key positions, P pages, B bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import assert_close
from subten.codecs import CODECS, KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels import attend as attend_module
from subten.kernels import attend_plan
from subten.kernels import unpack_pages as unpack_pages_module
from subten.kernels.attend import attend, attend_torch, read_pages
from subten.kernels.attend_tiles import _signs, turn_results
from subten.kernels.kv_append import kv_append_torch
from subten.kernels.step import StepTensors, make_step
from subten.kernels.triton_shim import tl, triton_jit

Randn = Callable[..., torch.Tensor]
POISON = 0xFF
"""Every codec reads this byte, repeated, as NaN in its codes or in its scale."""

LENGTHS = [1, 63, 64, 65, 200]
DECODE = [1, 1, 1, 1, 1]
MIXED = [1, 5, 1, 64, 33]
GQA = [1, 3, 5, 7, 8, 12, 24, 71]


@pytest.fixture(autouse=True)
def nan_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that whatever a kernel forgets to write is seen."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def filled(*args: Any, make: Any = original, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            return out.fill_(math.nan) if out.is_floating_point() else out

        monkeypatch.setattr(owner, name, filled)
    assert torch.empty(1).isnan().item()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """Sequences with their keys and values, in pages and as they were before encoding."""

    fmt: KVFormat
    pages_PGB: torch.Tensor
    page_ids: list[list[int]]
    lengths: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def rotation_DD(self) -> torch.Tensor | None:
        device = self.pages_PGB.device
        return hadamard(self.fmt.head_dim, device) if self.fmt.codec.is_rotated else None

    @property
    def scale(self) -> float:
        return self.fmt.head_dim**-0.5

    def step(self, num_new: list[int]) -> StepTensors:
        starts = [length - new for length, new in zip(self.lengths, num_new, strict=True)]
        return make_step(
            token_ids=[[0] * new for new in num_new],
            starts=starts,
            page_ids=self.page_ids,
            device=self.pages_PGB.device,
        )

    def run(
        self, op: Callable[..., torch.Tensor], q_THD: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        return op(
            q_THD, self.pages_PGB, self.fmt, step, scale=self.scale, rotation_DD=self.rotation_DD
        )


def write(scene: Scene, index: int) -> None:
    """Encode sequence `index` into its pages, with the twin and without turning keys."""
    length = scene.lengths[index]
    half = torch.ones(length, scene.fmt.head_dim // 2)
    cos_sin_PD = torch.cat([half, 0 * half], dim=1).to(scene.pages_PGB.device)
    step = make_step(
        token_ids=[[0] * length],
        starts=[0],
        page_ids=[scene.page_ids[index]],
        device=scene.pages_PGB.device,
    )
    kv_append_torch(
        scene.keys[index],
        scene.values[index],
        scene.pages_PGB,
        scene.fmt,
        cos_sin_PD,
        step.position_T,
        step.slot_T,
        rotation_DD=scene.rotation_DD,
    )


def make_scene(
    randn: Randn,
    codec: str,
    head_dim: int,
    *,
    num_kv_heads: int,
    lengths: list[int],
    shuffle: int = 0,
    scales: list[float] | None = None,
) -> Scene:
    """Random sequences in shuffled pages of a pool whose every other byte is poison."""
    fmt = kv_format(codec, head_dim)
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(shuffle))
    ids, page_ids = order.tolist(), []
    for count in counts:
        page_ids.append(ids[:count])
        ids = ids[count:]
    keys = [randn(n, num_kv_heads, head_dim) for n in lengths]
    values = [randn(n, num_kv_heads, head_dim) for n in lengths]
    for s, factor in enumerate(scales or []):
        keys[s], values[s] = keys[s] * factor, values[s] * factor
    pages_PGB = torch.full(
        (sum(counts) + 2, num_kv_heads, fmt.page_bytes),
        POISON,
        dtype=torch.uint8,
        device=keys[0].device,
    )
    scene = Scene(
        fmt=fmt,
        pages_PGB=pages_PGB,
        page_ids=page_ids,
        lengths=lengths,
        keys=keys,
        values=values,
    )
    for s in range(len(lengths)):
        write(scene, s)
    return scene


def dense(
    scene: Scene,
    q_THD: torch.Tensor,
    num_new: list[int],
    added: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention in FP64 over decode(encode(rows)), token by token, head by head.

    `added` [N, G, D] of each sequence are what its keys have more than is stored.
    """

    def stored(s: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Keys and values in one product and one call, as the twin has them: sums of another shape
        # may round to another code.
        codec, rotation_DD = scene.fmt.codec, scene.rotation_DD
        x_N2GD = torch.stack([scene.keys[s], scene.values[s]], dim=1)
        rows = (x_N2GD if rotation_DD is None else x_N2GD @ rotation_DD).flatten(0, 2)
        rows = codec.decode(*codec.encode(rows), scene.fmt.head_dim).double()
        rows = rows if rotation_DD is None else rows @ rotation_DD.double()
        k_NGD, v_NGD = rows.view(x_N2GD.shape).unbind(1)
        return k_NGD, v_NGD

    out_THD, token = torch.zeros(q_THD.shape, dtype=torch.float64, device=q_THD.device), 0
    for s, new in enumerate(num_new):
        k_NGD, v_NGD = stored(s)
        k_NGD = k_NGD if added is None else k_NGD + added[s]
        group = q_THD.shape[1] // k_NGD.shape[1]
        for position in range(scene.lengths[s] - new, scene.lengths[s]):
            for h in range(q_THD.shape[1]):
                k_ND = k_NGD[: position + 1, h // group]
                weight_N = (k_ND @ q_THD[token, h].double() * scene.scale).softmax(0)
                out_THD[token, h] = weight_N @ v_NGD[: position + 1, h // group]
            token += 1
    return out_THD


def tolerances(scene: Scene, q_THD: torch.Tensor) -> tuple[float, float]:
    """Largest and RMS error of an output that rounding explains.

    A score is a sum of D products. Rounding one factor of each to u relative moves it by about
    scale * u * |q| |k| / sqrt(D); FP32 sums of D terms by scale * 2**-24 * sqrt(D) * |q| |k|, times
    3, as code * scale and zero of an affine codec are up to twice and once the row's largest value.
    An output moves by twice that times the spread of V, and by u of V's range for rounded weights
    and outputs. For BF16 u is 2**-9, half its worst case, which errors of random signs stay under.
    RMS an eighth of that: the maximum takes the largest norms with all signs alike, and a model of
    the BF16 kernel in torch stays below a twenty-fifth of it.
    """
    head_dim = scene.fmt.head_dim
    q_norm = q_THD.float().norm(dim=-1).max().item()
    k_norm = max(k.norm(dim=-1).max().item() for k in scene.keys)
    v_range = 2 * max(v.abs().max().item() for v in scene.values)
    product = scene.scale * q_norm * k_norm
    score = 3 * 2**-24 * math.sqrt(head_dim) * product
    value = 2**-24 * math.sqrt(max(scene.lengths))
    if q_THD.dtype == torch.bfloat16:
        score += 2 * 2**-9 * product / math.sqrt(head_dim)
        value += 2 * 2**-9
    largest = (2 * score + value) * v_range
    return largest, largest / 8


def check(scene: Scene, q_THD: torch.Tensor, num_new: list[int], *, twin_only: bool) -> None:
    """The twin, and the op unless `twin_only`, agree with the oracle."""
    step = scene.step(num_new)
    expected_THD = dense(scene, q_THD, num_new)
    for op in (attend_torch,) if twin_only else (attend_torch, attend):
        actual_THD = scene.run(op, q_THD, step)
        assert actual_THD.dtype == q_THD.dtype
        assert_close(actual_THD, expected_THD, *tolerances(scene, q_THD), op.__name__)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("head_dim", [48, 80, 64, 128])
@pytest.mark.parametrize("num_new", [DECODE, MIXED], ids=["decode", "mixed"])
def test_twin_matches_dense(randn: Randn, codec: str, head_dim: int, num_new: list[int]) -> None:
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=LENGTHS)
    check(scene, randn(sum(num_new), 6, head_dim), num_new, twin_only=True)


@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "lengths", "num_new"),
    [
        (64, 1, 3, LENGTHS, DECODE),
        (48, 2, 2, [65, 3], [18, 1]),
        (80, 1, 1, [66, 17], [1, 17]),
        (128, 1, 3, [1, 66], [1, 1]),
    ],
    ids=["64", "48", "80", "128"],
)
def test_op_matches_dense(
    randn: Randn,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    lengths: list[int],
    num_new: list[int],
) -> None:
    # Unsplit, so that a program walks over all pages of its sequence.
    monkeypatch.setattr(attend_plan, "MAX_SPLITS", 1)
    scene = make_scene(randn, codec, head_dim, num_kv_heads=num_kv_heads, lengths=lengths)
    # FP32 dots compile slowly on a GPU, and how a dot is done does not depend on the codec.
    is_float32 = device.type == "cpu" or codec in ("fp32", "int4")
    dtype = torch.float32 if is_float32 else torch.bfloat16
    q_THD = randn(sum(num_new), group * num_kv_heads, head_dim, dtype=dtype)
    check(scene, q_THD, num_new, twin_only=False)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("head_dim", "group"), [(96, 3), (128, 8), (256, 5)])
@pytest.mark.parametrize("num_new", [DECODE, MIXED], ids=["decode", "mixed"])
def test_op_matches_dense_in_bf16(
    randn: Randn, codec: str, head_dim: int, group: int, num_new: list[int]
) -> None:
    if head_dim == 256 and codec not in ("bf16", "int4"):
        pytest.skip("two codecs show the launch choices of wide heads; each compiles for seconds")
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=LENGTHS)
    q_THD = randn(sum(num_new), 2 * group, head_dim, dtype=torch.bfloat16)
    check(scene, q_THD, num_new, twin_only=False)


@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
def test_pages_decoded_first(
    randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """As a step of a long query has them: several sequences, pages that are not full, and padding.

    The pages that no key fills hold NaN, or what the allocator left.
    """
    monkeypatch.setattr(unpack_pages_module, "MIN_QUERIES", 2)
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    head_dim, group = (128, 8) if is_gpu else (48, 2)
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=[65, 3, 130])
    num_new = [18, 1, 64 if is_gpu else 2]
    launched = []
    monkeypatch.setattr(
        attend_module,
        "unpack_pages",
        lambda *args: launched.append(args) or unpack_pages_module.unpack_pages(*args),
    )
    check(scene, randn(sum(num_new), 2 * group, head_dim, dtype=dtype), num_new, twin_only=False)
    assert bool(launched) == (codec not in ("fp32", "bf16"))


@pytest.mark.triton
@pytest.mark.parametrize("group", GQA)
@pytest.mark.parametrize("codec", ["int4", pytest.param("bf16", marks=pytest.mark.gpu)])
def test_every_gqa_ratio(randn: Randn, device: torch.device, group: int, codec: str) -> None:
    # Case K21; two KV heads, so that a block that crosses their border is seen. BF16 has the tall
    # tiles of a GPU, which the interpreter would need minutes for.
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    scene = make_scene(randn, codec, 16, num_kv_heads=2, lengths=[3])
    check(scene, randn(1, 2 * group, 16, dtype=dtype), [1], twin_only=False)
    if group <= 3 or is_gpu:
        check(scene, randn(2, 2 * group, 16, dtype=dtype), [2], twin_only=False)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_new", "dtype"),
    [
        ([1, 1, 1], torch.float32),
        ([18, 1, 2], torch.bfloat16),
        pytest.param([1, 1, 1], torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param([18, 1, 2], torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_splits_merge_to_the_whole(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, num_new: list[int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(attend_module, "_num_sms", lambda _device: 132)
    monkeypatch.setattr(attend_plan, "PREFILL_SPLIT_PAGES", 1)
    scene = make_scene(randn, "int4", 32, num_kv_heads=1, lengths=[200, 1, 65])
    check(scene, randn(sum(num_new), 2, 32, dtype=dtype), num_new, twin_only=False)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_new", [[1, 1, 1], [300, 1, 17]], ids=["decode", "mixed"])
def test_long_contexts_on_a_gpu(randn: Randn, codec: str, num_new: list[int]) -> None:
    lengths = [5000, 33_000, 64]
    scene = make_scene(randn, codec, 128, num_kv_heads=2, lengths=lengths)
    q_THD = randn(sum(num_new), 16, 128, dtype=torch.bfloat16)
    step = scene.step(num_new)
    actual_THD = scene.run(attend, q_THD, step)
    largest, rms = tolerances(scene, q_THD)
    assert_close(actual_THD, scene.run(attend_torch, q_THD, step), 2 * largest, rms)
    assert torch.equal(actual_THD, scene.run(attend, q_THD, step)), "two runs differ"


OPS = [pytest.param(attend, marks=pytest.mark.triton), attend_torch]


@pytest.mark.parametrize("op", OPS)
def test_page_order_does_not_matter(randn: Randn, op: Callable[..., torch.Tensor]) -> None:
    scene = make_scene(randn, "int8", 16, num_kv_heads=1, lengths=[130])
    q_THD = randn(1, 2, 16)
    expected_THD = scene.run(op, q_THD, scene.step([1]))
    num_pages = len(scene.pages_PGB)
    moved = dataclasses.replace(
        scene,
        pages_PGB=scene.pages_PGB.flip(0),
        page_ids=[[num_pages - 1 - page for page in scene.page_ids[0]]],
    )
    assert torch.equal(moved.run(op, q_THD, moved.step([1])), expected_THD)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", ["int4", "fp4"])
def test_a_sequence_is_bit_equal_beside_a_loud_one(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, op: Callable[..., torch.Tensor], codec: str
) -> None:
    # Case K18: keys and values a thousand times larger next door, and a longer context.
    monkeypatch.setattr(attend_module, "_num_sms", lambda _device: 132)
    lengths, scales = [70, 200], [1.0, 1000.0]
    scene = make_scene(randn, codec, 32, num_kv_heads=1, lengths=lengths, scales=scales)
    q_THD = randn(2, 3, 32)
    alone = dataclasses.replace(scene, lengths=[70], page_ids=scene.page_ids[:1])
    beside_THD = scene.run(op, q_THD, scene.step([1, 1]))
    alone_THD = alone.run(op, q_THD[:1].clone(), alone.step([1]))
    assert torch.equal(beside_THD[:1], alone_THD)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_nan_stays_in_its_sequence_and_leaves_with_it(
    randn: Randn, op: Callable[..., torch.Tensor], codec: str
) -> None:
    # Case K20; the new sequence is shorter, so that NaN rows remain behind it in its page.
    scene = make_scene(randn, codec, 16, num_kv_heads=1, lengths=[5, 60, 66])
    q_THD, num_new = randn(3, 2, 16), [1, 1, 1]
    clean_THD = scene.run(op, q_THD, scene.step(num_new))
    scene.keys[1][7, 0, 3] = scene.values[1][7, 0, 3] = math.nan
    write(scene, 1)
    poisoned_THD = scene.run(op, q_THD, scene.step(num_new))
    assert poisoned_THD[1].isnan().all()
    assert torch.equal(poisoned_THD[[0, 2]], clean_THD[[0, 2]])
    scene.lengths[1], scene.keys[1], scene.values[1] = 5, scene.keys[0], scene.values[0]
    write(scene, 1)
    q_THD[1] = q_THD[0]
    recycled_THD = scene.run(op, q_THD, scene.step(num_new))
    assert torch.equal(recycled_THD[[0, 0, 2]], recycled_THD)
    assert torch.equal(recycled_THD[[0, 2]], clean_THD[[0, 2]])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("max_splits", [1, 64], ids=["whole", "split"])
def test_padding_changes_nothing_and_comes_out_zero(
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
    op: Callable[..., torch.Tensor],
    max_splits: int,
) -> None:
    # Case G04: a step padded to a larger captured size.
    monkeypatch.setattr(attend_module, "_num_sms", lambda _device: 132)
    monkeypatch.setattr(attend_plan, "MAX_SPLITS", max_splits)
    scene = make_scene(randn, "int4", 16, num_kv_heads=1, lengths=[3, 70])
    step, q_THD = scene.step([1, 1]), randn(4, 2, 16)
    expected_THD = scene.run(op, q_THD[:2].clone(), step)

    def padded(index: torch.Tensor, *values: int) -> torch.Tensor:
        return torch.cat([index, index.new_tensor(values)])

    padded_step = dataclasses.replace(
        step,
        position_T=padded(step.position_T, 0, 0),
        kv_len_S=padded(step.kv_len_S, 0, 0),
        query_start_S1=padded(step.query_start_S1, 3, 4),
        page_table_SP=torch.cat([step.page_table_SP, torch.zeros_like(step.page_table_SP)]),
        tile_seq_Q=padded(step.tile_seq_Q, 2, 3, -1),
        tile_start_Q=padded(step.tile_start_Q, 2, 3, 0),
        max_kv_len=100,
    )
    actual_THD = scene.run(op, q_THD, padded_step)
    assert torch.equal(actual_THD[:2], expected_THD)
    assert torch.equal(actual_THD[2:], torch.zeros_like(actual_THD[2:]))


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(randn: Randn, op: Callable[..., torch.Tensor]) -> None:
    scene = make_scene(randn, "bf16", 16, num_kv_heads=1, lengths=[3])
    step = scene.step([1])
    empty = {
        name: getattr(step, name)[:0]
        for name in ("position_T", "kv_len_S", "tile_seq_Q", "tile_start_Q", "page_table_SP")
    }
    step = dataclasses.replace(step, query_start_S1=step.query_start_S1[:1], **empty)
    assert scene.run(op, randn(0, 2, 16), step).shape == (0, 2, 16)


@pytest.mark.parametrize("op", OPS)
def test_strided_inputs(randn: Randn, op: Callable[..., torch.Tensor]) -> None:
    # Case M14: q a slice of a fused QKV output, channels apart, and pages a layer of a larger pool.
    scene = make_scene(randn, "int4", 16, num_kv_heads=2, lengths=[5, 2])
    step, qkv = scene.step([1, 1]), randn(2, 160)
    apart_THD = randn(2, 4, 32)[..., ::2]
    pool_PLGB = torch.stack([scene.pages_PGB ^ 0x55, scene.pages_PGB], dim=1)
    strided = dataclasses.replace(scene, pages_PGB=pool_PLGB[:, 1])
    for q_THD in (qkv[:, 64:128].view(2, 4, 16), apart_THD):
        expected_THD = scene.run(op, q_THD.contiguous(), step)
        assert torch.equal(strided.run(op, q_THD, step), expected_THD)


@pytest.mark.triton
def test_offsets_pass_four_gigabytes(randn: Randn, device: torch.device) -> None:
    # Case M13. The pool is never filled: on the CPU its pages cost no memory until written.
    scene = make_scene(randn, "fp32", 16, num_kv_heads=1, lengths=[3, 3])
    num_pages = 2**32 // scene.fmt.page_bytes + 2
    pages_PGB = torch.empty(num_pages, 1, scene.fmt.page_bytes, dtype=torch.uint8, device=device)
    far_ids = [2**31 // scene.fmt.page_bytes + 1, num_pages - 1]
    for (near,), far in zip(scene.page_ids, far_ids, strict=True):
        pages_PGB[far] = scene.pages_PGB[near]
    far_scene = dataclasses.replace(
        scene, pages_PGB=pages_PGB, page_ids=[[page] for page in far_ids]
    )
    q_THD = randn(2, 1, 16)
    expected_THD = scene.run(attend, q_THD, scene.step([1, 1]))
    assert torch.equal(far_scene.run(attend, q_THD, far_scene.step([1, 1])), expected_THD)


def test_read_pages_ignores_what_lies_behind(randn: Randn) -> None:
    scene = make_scene(randn, "fp4", 48, num_kv_heads=2, lengths=[70])
    ids = torch.tensor([*scene.page_ids[0], 0], device=scene.pages_PGB.device)
    k_NGD, v_NGD = read_pages(scene.pages_PGB, scene.fmt, ids, 70)
    codec = scene.fmt.codec
    for actual_NGD, rows_NGD in ((k_NGD, scene.keys[0]), (v_NGD, scene.values[0])):
        encoded = codec.encode(rows_NGD.reshape(-1, 48))
        assert torch.equal(actual_NGD, codec.decode(*encoded, 48).view(70, 2, 48))


def test_twin_is_differentiable_in_q(randn: Randn) -> None:
    scene = make_scene(randn, "int4", 16, num_kv_heads=1, lengths=[5])
    q_THD, direction_THD = randn(2, 2, 16), randn(2, 2, 16)
    step = scene.step([2])
    q_THD.requires_grad_()
    scene.run(attend_torch, q_THD, step).sum().backward()
    assert q_THD.grad is not None
    slope = (q_THD.grad * direction_THD).sum().item()
    with torch.no_grad():
        # Central difference: step 1e-2, error of order step**2 and of FP32 over the step.
        ends = [
            scene.run(attend_torch, q_THD + sign * 1e-2 * direction_THD, step).sum().item()
            for sign in (1, -1)
        ]
    assert abs((ends[0] - ends[1]) / 2e-2 - slope) < 1e-2, (ends, slope)


@pytest.mark.parametrize("op", [attend, attend_torch])
def test_wrong_inputs_fail_loudly(randn: Randn, op: Callable[..., torch.Tensor]) -> None:
    scene = make_scene(randn, "int4", 16, num_kv_heads=2, lengths=[3])
    step, q_THD = scene.step([1]), randn(1, 4, 16)
    bytes_apart = torch.stack([scene.pages_PGB, scene.pages_PGB], dim=-1)[..., 0]
    for broken_scene, broken_q, broken_step in (
        (scene, q_THD.half(), step),
        (scene, q_THD[:, :3], step),
        (scene, q_THD[..., :8], step),
        (scene, randn(2, 4, 16), step),
        (dataclasses.replace(scene, pages_PGB=bytes_apart), q_THD, step),
        (dataclasses.replace(scene, pages_PGB=scene.pages_PGB[..., 1:]), q_THD, step),
        (scene, q_THD, dataclasses.replace(step, kv_len_S=step.kv_len_S.long())),
        (scene, q_THD, dataclasses.replace(step, max_kv_len=65)),
    ):
        with pytest.raises(AssertionError):
            broken_scene.run(op, broken_q, broken_step)
    with pytest.raises(AssertionError):
        op(q_THD, scene.pages_PGB, scene.fmt, step, scale=1.0, rotation_DD=None)


@pytest.mark.triton
def test_op_refuses_a_rotation_that_its_butterfly_is_not(randn: Randn) -> None:
    scene = make_scene(randn, "int4", 16, num_kv_heads=1, lengths=[3])
    other_DD = torch.eye(16, device=scene.pages_PGB.device)
    with pytest.raises(AssertionError, match="hadamard"):
        attend(
            randn(1, 1, 16),
            scene.pages_PGB,
            scene.fmt,
            scene.step([1]),
            scale=1.0,
            rotation_DD=other_DD,
        )


@triton_jit
def _store_signs(out_ptr: tl.tensor, WIDTH: tl.constexpr, STAGES: tl.constexpr) -> None:
    d = tl.arange(0, WIDTH)
    sign_DD = _signs(WIDTH, STAGES).to(tl.float32)
    tl.store(out_ptr + d[:, None] * WIDTH + d[None, :], sign_DD)


@triton_jit
def _turn_tile(
    x_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, STAGES: tl.constexpr
) -> None:
    at_MD = tl.arange(0, 16)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    turned_MD = turn_results(tl.load(x_ptr + at_MD), STAGES, True)
    tl.store(out_ptr + at_MD, turned_MD)


@pytest.mark.triton
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_signs_are_those_of_the_rotation(head_dim: int, device: torch.device) -> None:
    width, block = 1 << (head_dim - 1).bit_length(), head_dim & -head_dim
    sign_DD = torch.empty(width, width, device=device)
    _store_signs[(1,)](sign_DD, WIDTH=width, STAGES=block.bit_length() - 1)
    turned_DD = sign_DD[:head_dim, :head_dim] * block**-0.5
    assert_close(turned_DD, hadamard(head_dim, device), 1e-7, 1e-7)
    assert bool((sign_DD[:head_dim, head_dim:] == 0).all())


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("head_dim", [64, 128])
def test_results_are_turned_as_exactly_as_in_float32(head_dim: int, randn: Randn) -> None:
    x_MD = randn(16, head_dim)
    out_MD = torch.empty_like(x_MD)
    _turn_tile[(1,)](x_MD, out_MD, WIDTH=head_dim, STAGES=head_dim.bit_length() - 1)
    expected_MD = x_MD.double() @ hadamard(head_dim, x_MD.device).double()
    # Three terms leave 2^-24 of each number; sums of head_dim products in FP32, 2^-24 a step.
    bound = 2.0**-22 * float(x_MD.abs().max()) * head_dim**0.5
    assert_close(out_MD, expected_MD, bound, bound / 2)
