"""`append_attend` on CUDA against its twin and, bit for bit, against `kv_append` and `attend`.

On a CPU the kernel's own source runs in the emulator of test_cuda_attend.py. There q, k and v hold
NaN until a block has waited for the kernel ahead, and copies that start before bring what lay in
the pages then: NaN in the newest rows.

Letters as in test_attend.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cuda_launcher import emulated_launch as emulated_append
from cuda_launcher import emulator, refuse_launch, use_kernels
from test_attend import POISON, Scene, make_scene, tolerances
from test_cuda_attend import EMULATOR, SMALL, emulated_launch
from test_kv_append import make_rope

from conftest import assert_close
from subten.codecs import kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels import attend as triton_attend
from subten.kernels import kv_append as triton_append
from subten.kernels.attend import attend_torch
from subten.kernels.cuda import append_attend as cuda_append_attend
from subten.kernels.cuda import attend as cuda_attend
from subten.kernels.cuda import kv_append as cuda_append
from subten.kernels.cuda import runtime
from subten.kernels.cuda.append_attend import append_attend, kernel_name
from subten.kernels.cuda.attend import (
    STRUCTS,
    DecodePlan,
    decode_launch,
    plan_decode,
    slice_bytes,
)
from subten.kernels.kv_append import page_planes
from subten.kernels.norm_rope import norm_rope_torch
from subten.kernels.step import StepTensors

Randn = Callable[..., torch.Tensor]
EPS = 1e-6
LENGTHS = [1, 64, 65, 150]


@pytest.fixture(autouse=True)
def no_counter_is_left(device: torch.device) -> Any:
    """What a split left in a counter, or where others poll, would break the next launch."""
    yield
    if cuda_attend._counters.cache_info().currsize:
        assert not cuda_attend._counters(device).any()
    if cuda_attend._unset_parts.cache_info().currsize:
        bits = cuda_attend._unset_parts(device).view(torch.int32)
        assert (bits == cuda_attend.UNSET_BITS).all()


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels on the GPU, or emulated; Triton must not step in."""
    use_kernels(device, monkeypatch)

    def emulated(source: str, *args: Any, **kwargs: Any) -> None:
        launch = emulated_append if source == "kv_append.cu" else emulated_launch
        launch(source, *args, **kwargs)

    if device.type == "cpu":
        monkeypatch.setattr(runtime, "launch", emulated)
    monkeypatch.setattr(triton_attend, "attend", None)
    monkeypatch.setattr(triton_append, "kv_append", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A decode step: sequences in pages, and rows of their new tokens, as a product made them."""

    scene: Scene
    step: StepTensors
    qkv_THD: torch.Tensor
    norms: dict[str, Any]

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """q, k, v as slices of one matrix."""
        num_kv_heads = self.scene.pages_PGB.shape[1]
        num_heads = self.qkv_THD.shape[1] - 2 * num_kv_heads
        return self.qkv_THD.split((num_heads, num_kv_heads, num_kv_heads), dim=1)

    def run(
        self, op: Callable[..., torch.Tensor], pages_PGB: torch.Tensor, **choices: Any
    ) -> torch.Tensor:
        """`op` on these pages."""
        fmt = self.scene.fmt
        return op(
            *self.rows,
            pages_PGB,
            fmt,
            make_rope(5000, fmt.head_dim, pages_PGB.device),
            self.step,
            scale=self.scene.scale,
            rotation_DD=self.scene.rotation_DD,
            **self.norms,
            **choices,
        )

    def run_both(self, pages_PGB: torch.Tensor, plan: DecodePlan | None) -> torch.Tensor:
        """The same in two launches."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(cuda_append_attend, "suits", lambda *_: False)
            return self.run(append_attend, pages_PGB, plan=plan)


def make_case(
    randn: Randn,
    codec: str,
    head_dim: int,
    *,
    num_kv_heads: int,
    group: int,
    lengths: list[int],
    norm_dtype: torch.dtype | None = torch.bfloat16,
) -> Case:
    """Sequences whose newest row in the pages is NaN."""
    scene = make_scene(randn, codec, head_dim, num_kv_heads=num_kv_heads, lengths=lengths)
    step = scene.step([1] * len(lengths))
    for plane in page_planes(scene.pages_PGB, scene.fmt):
        plane[step.slot_T // PAGE_SIZE, :, :, step.slot_T % PAGE_SIZE] = POISON
    norms: dict[str, Any] = {"eps": EPS}
    if norm_dtype is not None:
        for name in ("q_norm_weight_D", "k_norm_weight_D"):
            norms[name] = (1 + randn(head_dim, scale=0.2)).to(norm_dtype)
    shape = (len(lengths), num_kv_heads * (group + 2), head_dim)
    return Case(scene=scene, step=step, qkv_THD=randn(*shape, dtype=torch.bfloat16), norms=norms)


def late_inputs(tensors: Sequence[torch.Tensor]) -> None:
    """From the next emulated launch on the kernel ahead writes these, as they are now."""
    num = len(tensors)
    starts = (ctypes.c_void_p * num)(*(tensor.data_ptr() for tensor in tensors))
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    emulator(*EMULATOR).set_inputs(starts, (ctypes.c_int * num)(*sizes), num)


def check(
    case: Case, plan: DecodePlan | None = None, *, pdl: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch gives the result of two, and leaves the same pages; both are returned."""
    two_PGB, one_PGB = case.scene.pages_PGB.clone(), case.scene.pages_PGB.clone()
    expected_THD = case.run_both(two_PGB, plan)
    is_emulated = one_PGB.device.type == "cpu"
    if is_emulated:
        late_inputs([case.qkv_THD])
    try:
        actual_THD = case.run(append_attend, one_PGB, plan=plan, pdl=pdl)
    finally:
        if is_emulated:
            late_inputs([])
    assert torch.equal(one_PGB, two_PGB)
    assert not torch.equal(one_PGB, case.scene.pages_PGB)
    assert actual_THD.dtype == torch.bfloat16 and actual_THD.is_contiguous()
    assert actual_THD.isfinite().all()
    assert torch.equal(actual_THD, expected_THD), (actual_THD - expected_THD).abs().max()
    return actual_THD, one_PGB


def check_against_twin(case: Case, actual_THD: torch.Tensor, pages_PGB: torch.Tensor) -> None:
    """The result agrees with attention in float32 over the pages as the op has left them."""
    fmt = case.scene.fmt
    turned_THD = norm_rope_torch(
        case.rows[0].float(),
        make_rope(5000, fmt.head_dim, pages_PGB.device),
        case.step.position_T,
        norm_weight_D=case.norms.get("q_norm_weight_D"),
        eps=EPS,
    )
    scene = dataclasses.replace(case.scene, pages_PGB=pages_PGB)
    expected_THD = scene.run(attend_torch, turned_THD, case.step)
    # Those of `attend` in bfloat16, for q is rounded once more, before its rotation.
    largest, rms = tolerances(case.scene, turned_THD.bfloat16())
    assert_close(actual_THD, expected_THD, 2 * largest, 2 * rms, fmt.codec.name)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (128, 8), (64, 1), (64, 5)])
def test_equals_two_launches_and_the_twin(
    randn: Randn, codec: str, head_dim: int, group: int
) -> None:
    """Two KV heads, one launch: the newest row first, last and alone in its slice and page."""
    norm_dtype = {1: None, 4: torch.bfloat16, 5: torch.float32, 8: torch.bfloat16}[group]
    case = make_case(
        randn,
        codec,
        head_dim,
        num_kv_heads=2,
        group=group,
        lengths=LENGTHS,
        norm_dtype=norm_dtype,
    )
    check_against_twin(case, *check(case, SMALL))


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
@pytest.mark.parametrize(
    "plan",
    [
        DecodePlan(num_splits=1, min_slices=1, num_warps=1, num_stages=3),
        DecodePlan(num_splits=1, min_slices=16, num_warps=3, num_stages=2),
        DecodePlan(num_splits=7, min_slices=2, num_warps=4, num_stages=5),
        DecodePlan(num_splits=64, min_slices=1, num_warps=1, num_stages=4),
    ],
    ids=str,
)
def test_every_kind_of_plan(randn: Randn, codec: str, plan: DecodePlan) -> None:
    """The newest row's slice in the first round of its ring or a later one, and in any split; key
    and value by warps that had a query before, or none."""
    check(make_case(randn, codec, 128, num_kv_heads=1, group=3, lengths=[577]), plan)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize(("codec", "head_dim"), [("int4", 64), ("int4", 128), ("bf16", 128)])
@pytest.mark.parametrize("num_splits", [2, 3, 9, 12])
def test_splits_that_poll_give_the_same_bits(
    randn: Randn, codec: str, head_dim: int, num_splits: int
) -> None:
    """More heads than splits and fewer, rows that do not fill fours; sequences with a single split
    too."""
    lengths = [1, 64, 200] if num_splits < 9 else [577]
    group = 5 if num_splits < 9 else 2
    case = make_case(randn, codec, head_dim, num_kv_heads=2, group=group, lengths=lengths)
    plan = DecodePlan(num_splits=num_splits, min_slices=1, num_warps=2, num_stages=2)
    polling = dataclasses.replace(plan, polls=True)
    launch = decode_launch(case.rows[0], 2, case.scene.fmt, case.step, scale=1.0, plan=polling)
    assert launch.polls
    assert torch.equal(check(case, polling)[0], check(case, plan)[0])


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("length", [60, 200])
def test_a_block_for_every_sm_gives_the_same_bits(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Blocks beyond the last split, and splits without a slice, do nothing but wait."""
    case = make_case(randn, "int4", 64, num_kv_heads=2, group=5, lengths=[length])
    monkeypatch.setattr(cuda_attend, "_num_sms", lambda _device: 11)
    plan = DecodePlan(num_splits=5, min_slices=1, num_warps=2, num_stages=2, polls=True)
    filling = dataclasses.replace(plan, fills=True)
    launch = decode_launch(case.rows[0], 2, case.scene.fmt, case.step, scale=1.0, plan=filling)
    assert launch.grid == (11, 1, 1)
    assert torch.equal(check(case, filling)[0], check(case, plan)[0])


@pytest.mark.usefixtures("kernels", "poisoned")
def test_nan_reaches_a_merge_that_polls(randn: Randn) -> None:
    """It is not taken for a number that is not there yet."""
    case = make_case(randn, "int4", 64, num_kv_heads=1, group=2, lengths=[200])
    case.scene.pages_PGB[case.scene.page_ids[0][0]] = POISON
    plan = DecodePlan(num_splits=4, min_slices=1, num_warps=1, num_stages=2, polls=True)
    assert case.run(append_attend, case.scene.pages_PGB, plan=plan).isnan().all()


def test_splits_poll_only_where_all_are_there(
    randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(randn, "int4", 64, num_kv_heads=1, group=2, lengths=[200])
    polling = DecodePlan(num_splits=4, min_slices=1, num_warps=1, num_stages=2, polls=True)

    def polls(plan: DecodePlan) -> bool:
        fmt, step = case.scene.fmt, case.step
        return decode_launch(case.rows[0], 1, fmt, step, scale=1.0, plan=plan).polls

    assert polls(polling)
    assert not polls(dataclasses.replace(polling, polls=False))
    assert not polls(dataclasses.replace(polling, num_splits=1)), "nothing to merge"
    monkeypatch.setattr(cuda_attend, "MAX_POLLED", 4 * 2 * 66 - 1)
    assert not polls(polling), "too much memory"
    monkeypatch.setattr(cuda_attend, "MAX_POLLED", 4 * 2 * 66)
    assert polls(polling)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
def test_rows_that_are_not_stored_or_not_seen(randn: Randn, codec: str) -> None:
    """Slot -1 leaves the pages alone and reads them; a row past kv_len is stored and not read; a
    sequence of length 0 gives zeros; a skipped tile leaves its token alone."""
    lengths = [70, 71, 65, 5, 40]
    case = make_case(randn, codec, 64, num_kv_heads=1, group=2, lengths=lengths)
    step = case.step
    full = make_scene(randn, codec, 64, num_kv_heads=1, lengths=[70])
    for page, source in zip(case.scene.page_ids[0], full.page_ids[0], strict=True):
        case.scene.pages_PGB[page] = full.pages_PGB[source]
    step.slot_T[0] = -1
    step.kv_len_S[1] = 60
    step.kv_len_S[2] = 0
    step.slot_T[3], step.kv_len_S[3] = -1, 0
    step.tile_seq_Q[4], step.slot_T[4] = -1, -1
    one_PGB, two_PGB = case.scene.pages_PGB.clone(), case.scene.pages_PGB.clone()
    out_THD = case.run(append_attend, one_PGB, plan=SMALL)
    expected_THD = case.run_both(two_PGB, SMALL)
    assert torch.equal(one_PGB, two_PGB)
    assert torch.equal(out_THD[:4], expected_THD[:4])
    assert out_THD[:2].isfinite().all() and out_THD[:2].any(-1).all()
    assert not out_THD[2:4].any() and out_THD[4].isnan().all()
    changed = (one_PGB != case.scene.pages_PGB).any(-1).any(-1).nonzero().flatten().tolist()
    assert changed == sorted(case.scene.page_ids[s][-1] for s in (1, 2))


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", STRUCTS)
def test_a_nan_stays_in_its_sequence(randn: Randn, codec: str) -> None:
    """NaN in a new key or value: NaN in its own heads' results, and nothing else moves."""
    case = make_case(randn, codec, 64, num_kv_heads=2, group=2, lengths=[70, 20, 64])
    clean_THD = case.run(append_attend, case.scene.pages_PGB.clone(), plan=SMALL)
    _, k_TGD, v_TGD = case.rows
    k_TGD[0, 1, 3] = v_TGD[2, 0, 5] = float("nan")
    out_THD = case.run(append_attend, case.scene.pages_PGB.clone(), plan=SMALL)
    is_bad_TH = torch.zeros(3, 4, dtype=torch.bool, device=out_THD.device)
    is_bad_TH[0, 2:] = is_bad_TH[2, :2] = True
    assert out_THD[is_bad_TH].isnan().any(-1).all()
    assert torch.equal(out_THD[~is_bad_TH], clean_THD[~is_bad_TH])


@pytest.mark.usefixtures("kernels", "poisoned")
def test_no_copy_waits_for_the_newest_row(randn: Randn, device: torch.device) -> None:
    """All stages are on their way before the wait, even for a sequence of one slice."""
    if device.type != "cpu":
        pytest.skip("only the emulator sees when a copy starts")
    case = make_case(randn, "int4", 128, num_kv_heads=2, group=2, lengths=[1, 40])
    emulator(*EMULATOR).set_late(None, None, 0)
    case.run(append_attend, case.scene.pages_PGB, plan=SMALL)
    # K and V of one page, of 2 sequences and 2 KV heads.
    assert emulator(*EMULATOR).num_early_copies() == 2 * 2 * 2


@pytest.mark.usefixtures("kernels")
def test_offsets_pass_four_gigabytes(randn: Randn, device: torch.device) -> None:
    """The newest row goes to a page beyond 4 GiB, and is read there by the next step."""
    fmt = kv_format("int8", 64)
    num_pages = 2**32 // fmt.page_bytes + 2
    # Never filled: on the CPU its pages cost no memory until written.
    pages_PGB = torch.empty(num_pages, 1, fmt.page_bytes, dtype=torch.uint8, device=device)
    case = make_case(randn, "int8", 64, num_kv_heads=1, group=1, lengths=[2])
    near_PGB, far = case.scene.pages_PGB, num_pages - 1
    page = case.scene.page_ids[0][0]
    pages_PGB[far] = near_PGB[page]
    expected_THD = case.run(append_attend, near_PGB, plan=SMALL)
    case.step.page_table_SP[0, 0] = far
    case.step.slot_T[0] += PAGE_SIZE * (far - page)
    assert torch.equal(case.run(append_attend, pages_PGB, plan=SMALL), expected_THD)
    assert torch.equal(pages_PGB[far], near_PGB[page])


@pytest.mark.parametrize("what", ["codec", "dtype", "group", "tokens", "head_dim", "norms"])
def test_the_rest_goes_to_the_two_ops(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    calls: list[str] = []
    turned: list[torch.Tensor] = []

    def appended(*_args: Any, q_THD: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        calls.append("kv_append")
        turned.append(q_THD.clone())
        return turned[0]

    def attended(q_THD: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        calls.append("attend")
        assert q_THD is turned[0]
        return q_THD

    monkeypatch.setattr(cuda_append, "kv_append", appended)
    monkeypatch.setattr(cuda_attend, "attend", attended)
    monkeypatch.setattr(runtime, "launch", refuse_launch)
    case = make_case(
        randn,
        "vq1.5" if what == "codec" else "int8",
        96 if what == "head_dim" else 64,
        num_kv_heads=1,
        group=9 if what == "group" else 2,
        lengths=[5, 70],
    )
    if what == "dtype":
        case = dataclasses.replace(case, qkv_THD=case.qkv_THD.float())
    elif what == "tokens":
        case = dataclasses.replace(case, step=case.scene.step([1, 2]), qkv_THD=randn(3, 4, 64))
    elif what == "norms":
        case.norms["q_norm_weight_D"] = case.norms["q_norm_weight_D"].float()
    case.run(append_attend, case.scene.pages_PGB)
    assert calls == ["kv_append", "attend"]


def test_wrong_inputs_fail_loudly(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "launch", refuse_launch)
    case = make_case(randn, "int4", 64, num_kv_heads=2, group=2, lengths=[5])
    pages_PGB = case.scene.pages_PGB
    wrong = dataclasses.replace(case, norms={"eps": EPS, "k_norm_weight_D": randn(63)})
    with pytest.raises(AssertionError):
        wrong.run(append_attend, pages_PGB)
    for wrong_DD in (None, -hadamard(64, pages_PGB.device)):
        with pytest.raises(AssertionError):
            append_attend(
                *case.rows,
                pages_PGB,
                case.scene.fmt,
                make_rope(300, 64, pages_PGB.device),
                case.step,
                scale=1.0,
                rotation_DD=wrong_DD,
            )


@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_memory_holds_what_is_declared(codec: str, head_dim: int) -> None:
    """Rows of q, sums of the warps and the appended rows, beside the largest rings."""
    fmt = kv_format(codec, head_dim)
    declared = 8 * head_dim * 2 + 8 * 4 + 16 * 8 * 3 * 4 + 2 * (fmt.row.codes + 16)
    assert declared + cuda_attend.MAX_SHARED_BYTES <= 227 * 1024
    assert slice_bytes(fmt).stage_bytes % 16 == 0


needs_compiler = pytest.mark.skipif(
    not runtime.has_compiler(), reason="needs cuda-bindings and NVRTC"
)


@needs_compiler
def test_nvrtc_compiles() -> None:
    name = kernel_name(kv_format("int4", 128), polls=True)
    cubin, symbol = runtime.compile_cubin("append_attend.cu", name, "sm_90a")
    assert cubin[:4] == b"\x7fELF" and symbol.encode() in cubin


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.gpu
@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", [[4097], [1, 1000, 65], [63, 64, 65, 1, 4097, 130, 2, 700]])
def test_equals_two_launches_on_a_gpu(
    randn: Randn, codec: str, head_dim: int, group: int, lengths: list[int]
) -> None:
    case = make_case(randn, codec, head_dim, num_kv_heads=4, group=group, lengths=lengths)
    out_THD, pages_PGB = check(case)
    check_against_twin(case, out_THD, pages_PGB)
    assert torch.equal(check(case, pdl=False)[0], out_THD), "PDL changes bits"
    chosen = plan_decode(
        case.scene.fmt,
        num_sms=cuda_attend._num_sms(out_THD.device),
        num_sequences=len(lengths),
        num_kv_heads=4,
    )
    for polls in (False, True, True):
        assert torch.equal(check(case, dataclasses.replace(chosen, polls=polls))[0], out_THD)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("codec", STRUCTS)
@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("polls", [False, True])
def test_graph_replays_append_and_attend(
    randn: Randn, device: torch.device, codec: str, num_sequences: int, polls: bool
) -> None:
    """A graph of layers, each of which reads what the one before gave, step after step over pages
    that the steps fill: one launch a layer with PDL gives the bits of two without it."""
    num_layers, first, num_steps, head_dim = 4, 40, 150, 128
    fmt = kv_format(codec, head_dim)
    pages_each = -(-(first + num_steps) // PAGE_SIZE)
    scene = make_scene(
        randn,
        codec,
        head_dim,
        num_kv_heads=4,
        lengths=[pages_each * PAGE_SIZE] * num_sequences,
    )
    step = scene.step([1] * num_sequences)
    start_THD = randn(num_sequences, 40, head_dim, dtype=torch.bfloat16)
    # Several splits even here: of one slice, or of some.
    plan = DecodePlan(
        num_splits=16, min_slices=1, num_warps=8, num_stages=3, polls=polls, fills=polls
    )
    weight_D = (1 + randn(head_dim, scale=0.2)).bfloat16()
    cos_sin_PD = make_rope(5000, head_dim, device)
    pools = {
        is_one: [scene.pages_PGB.clone() for _ in range(num_layers)] for is_one in (True, False)
    }

    def layers(is_one: bool) -> torch.Tensor:
        # An ordinary kernel begins the step.
        qkv_THD = (start_THD + step.position_T[:, None, None] * 2.0**-8).bfloat16()
        q_THD, k_TGD, v_TGD = qkv_THD.split((32, 4, 4), dim=1)
        for pages_PGB in pools[is_one]:
            with pytest.MonkeyPatch.context() as patched:
                if not is_one:
                    patched.setattr(cuda_append_attend, "suits", lambda *_: False)
                q_THD = append_attend(
                    q_THD,
                    k_TGD,
                    v_TGD,
                    pages_PGB,
                    fmt,
                    cos_sin_PD,
                    step,
                    scale=scene.scale,
                    rotation_DD=scene.rotation_DD,
                    q_norm_weight_D=weight_D,
                    k_norm_weight_D=weight_D,
                    eps=EPS,
                    plan=plan,
                    pdl=is_one,
                )
            k_TGD, v_TGD = q_THD[:, :4], q_THD[:, 4:8]
        return q_THD

    for is_one in (True, False):
        layers(is_one)
    torch.cuda.synchronize()
    graphs, outs = {}, {}
    for is_one in (True, False):
        graphs[is_one] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[is_one]):
            outs[is_one] = layers(is_one)
    for position in range(first, first + num_steps):
        step.position_T.fill_(position)
        step.kv_len_S.fill_(position + 1)
        slots = [
            pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for pages in scene.page_ids
        ]
        step.slot_T.copy_(torch.tensor(slots))
        for is_one in (True, False):
            graphs[is_one].replay()
        torch.cuda.synchronize()
        assert torch.equal(outs[True], outs[False]), position
        for one_PGB, two_PGB in zip(pools[True], pools[False], strict=True):
            assert torch.equal(one_PGB, two_PGB), position
        assert outs[True].isfinite().all()
