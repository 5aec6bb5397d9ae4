"""The grouped experts on CUDA against float64: loads of tiles, formats, plans, codes, fallbacks.

On a CPU the kernels' own source runs in an emulator, lane by lane.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_launcher import emulator, refuse_launch, use_kernels

from conftest import assert_close
from subten.kernels.cuda import experts as cuda_experts
from subten.kernels.cuda import grouped as cuda_grouped
from subten.kernels.cuda import runtime
from subten.kernels.cuda.grouped import (
    FORMATS,
    GroupedPlan,
    grouped,
    plan_grouped,
    suits,
)
from subten.kernels.route import Routing
from subten.kernels.weight_formats import Weight, dequantize

EMULATOR = (Path(__file__).parent / "grouped_emulation",)

PLANS = [
    GroupedPlan(tiles=1, warps=1, depth=2, blocks=1),
    GroupedPlan(tiles=2, warps=2, depth=2, blocks=1),
    GroupedPlan(tiles=2, warps=2, depth=3, blocks=1),
    GroupedPlan(tiles=3, warps=3, depth=1, blocks=1),
]
"""What the emulator holds: one warp and more, some without rows, rings of 1, 2 and 3."""

ONE_TILE_PLANS = [PLANS[0], GroupedPlan(tiles=1, warps=2, depth=3, blocks=1)]
"""A warp, and two, one of which has no rows of `up`, in one launch."""

WIDE_PLANS = [
    GroupedPlan(tiles=2, warps=4, depth=3, blocks=1, wide=True),
    GroupedPlan(tiles=4, warps=4, depth=2, blocks=1, wide=True),
    GroupedPlan(tiles=6, warps=8, depth=1, blocks=1, wide=True),
]
"""And these, of FP8: tensor cores that read the tokens; the third has warps without rows."""

LARGE = GroupedPlan(tiles=4, warps=2, depth=2, blocks=1)
"""So does it this one: two pairs of tiles, one of which most loads leave out."""


def emulated_launch(source, name, grid, block, args, *, device, shared_bytes=0, pdl=False):
    """`runtime.launch` of grouped.cu on the CPU."""
    assert source == "grouped.cu" and device.type == "cpu" and isinstance(pdl, bool), source
    values = [runtime.pack_argument(arg) for arg in args]
    pointers = runtime.pointer_array(values)
    failed = emulator(*EMULATOR).emulate(name.encode(), *grid, 1, 1, block, shared_bytes, pointers)
    assert not failed, f"the emulator does not hold {name}"


@pytest.fixture
def kernels(device, monkeypatch):
    """The kernels on the GPU, or emulated."""
    use_kernels(device, monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(runtime, "launch", emulated_launch)


class Case:
    """Random inputs of one call with tokens sorted by expert, and its result in float64."""

    def __init__(self, randn, ids_TK, *, E, D, hidden, weight_format, residual_dtype):
        self.gate_up = Weight.of(
            randn(E, 2 * hidden, D, scale=D**-0.5).bfloat16(), weight_format, search=False
        )
        self.down = Weight.of(
            randn(E, D, hidden, scale=hidden**-0.5).bfloat16(), weight_format, search=False
        )
        (T, top_k), h_TD = ids_TK.shape, randn(ids_TK.shape[0], D).bfloat16()
        flat = ids_TK.flatten()
        starts = [int((flat < e).sum()) for e in range(E + 1)]
        self.routing = Routing(
            h_TD=h_TD,
            topk_id_TK=ids_TK.to(device=h_TD.device, dtype=torch.int32),
            topk_weight_TK=randn(T, top_k).softmax(dim=-1),
            expert_start_E1=torch.tensor(starts, dtype=torch.int32, device=h_TD.device),
            order_A=flat.argsort(stable=True).int().to(h_TD.device),
        )
        self.residual_TD = randn(T, D, dtype=residual_dtype)

    def run(self, plan=None, **options):
        return grouped(
            self.routing,
            self.gate_up,
            self.down,
            residual_TD=self.residual_TD,
            up_plan=plan,
            down_plan=plan,
            **options,
        )

    def check(self, out_TD):
        """act and y are rounded to bfloat16 with independent errors.

        act: 2^-9 of itself at most, and twice that where its sums fall on the other side of a
        middle, over F terms like their root sum of squares. y: 2^-9 of itself. FP32 sums: 2^-24 of
        the terms for each of their steps, which at these lengths is less than a tenth of that.
        bfloat16 results: 2^-9 of the largest. The largest of some thousand errors is within 6 of
        their deviations, which the largest output bounds.
        """
        assert out_TD.dtype == self.residual_TD.dtype
        expected_TD = self.residual_TD.double()
        square_TD = torch.zeros_like(expected_TD)
        for e in self.routing.topk_id_TK.unique().tolist():
            gate_up_FD = self.gate_up.dequantize((e,)).double()
            down_DF = self.down.dequantize((e,)).double()
            tokens, ks = (self.routing.topk_id_TK == e).nonzero(as_tuple=True)
            gate_RF, up_RF = (self.routing.h_TD[tokens].double() @ gate_up_FD.T).chunk(2, dim=-1)
            act_RF = F.silu(gate_RF) * up_RF
            weight_R1 = self.routing.topk_weight_TK[tokens, ks].double()[:, None]
            y_RD = act_RF @ down_DF.T
            expected_TD.index_add_(0, tokens, weight_R1 * y_RD)
            spread_RD = act_RF.square() @ down_DF.T.square() + y_RD.square()
            square_TD.index_add_(0, tokens, weight_R1.square() * spread_RD)
        bound = 6 * 1.1 * 2.0**-9 * float(square_TD.max().sqrt())
        if out_TD.dtype == torch.bfloat16:
            bound += 2.0**-9 * float(expected_TD.abs().max()) * 1.01
        assert_close(out_TD, expected_TD, bound, bound / 6)


def distinct_ids(generator, T, E, top_k):
    return torch.stack([torch.randperm(E, generator=generator)[:top_k] for _ in range(T)])


SHAPES = {"none": (96, 64), "fp8": (192, 64), "int4": (384, 128)}
"""D and F: a last chunk that is not whole, warps without rows."""


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_grouped_is_the_formula(randn, generator, weight_format, plan):
    """Loads of some 10 in tiles of 8, 16 and 24; a few experts without tokens."""
    dim, hidden = SHAPES[weight_format]
    case = Case(
        randn,
        distinct_ids(generator, 19, 5, 3) * 8,
        E=40,
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
        residual_dtype=torch.float32 if plan.warps % 2 else torch.bfloat16,
    )
    case.check(case.run(plan))


@pytest.mark.parametrize("plan", WIDE_PLANS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_wide_products(randn, generator, num_tokens, plan):
    """Full tiles and one more token, experts without any, inputs that end within a stage."""
    case = Case(
        randn,
        distinct_ids(generator, num_tokens, 3, 2) * 2,
        E=5,
        D=320,
        hidden=192,
        weight_format="fp8",
        residual_dtype=torch.float32,
    )
    case.check(case.run(plan))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 33])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_all_tokens_to_the_last_expert(randn, weight_format, num_tokens):
    """Full tiles, and one more token; more experts than a warp has lanes."""
    dim, hidden = SHAPES[weight_format]
    case = Case(
        randn,
        torch.full((num_tokens, 1), 36),
        E=37,
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
        residual_dtype=torch.float32,
    )
    case.check(case.run(LARGE))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("plan", ONE_TILE_PLANS, ids=str)
@pytest.mark.parametrize("num_sms", [1, 3, 132])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_one_launch_has_the_bits_of_two(
    monkeypatch, randn, generator, weight_format, plan, num_sms
):
    """Whoever takes an item, and whatever is asked for early: experts of two tiles and without
    tokens, warps without rows, tokens that have an expert twice."""
    dim, hidden = SHAPES[weight_format]
    case = Case(
        randn,
        distinct_ids(generator, 26, 6, 3) % 4,
        E=6,
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
        residual_dtype=torch.bfloat16 if plan.warps == 1 else torch.float32,
    )
    monkeypatch.setattr(cuda_grouped, "NUM_SMS", num_sms)
    monkeypatch.setattr(cuda_grouped, "MAX_EARLY_BYTES", 2**18)
    together_TD = case.run(plan)
    case.check(together_TD)
    assert torch.equal(case.run(plan), together_TD), "counters are zero again"
    assert not bool(cuda_grouped._all_progress(together_TD.device).any())
    monkeypatch.setattr(cuda_grouped, "MAX_PROGRESS", 0)
    assert torch.equal(case.run(plan), together_TD)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_a_step_that_fails_half_way_leaves_no_counts(monkeypatch, randn, generator):
    """Memory may run out between the launches; the steps after it have the same counters."""
    ids_TK = distinct_ids(generator, 26, 6, 3)
    case = Case(
        randn, ids_TK, E=6, D=256, hidden=128, weight_format="fp8", residual_dtype=torch.float32
    )
    cuda_grouped._all_progress.cache_clear()
    with torch.inference_mode():  # as the engine's first step has it
        expected_TD = case.run(ONE_TILE_PLANS[0])

    def no_memory(*_: Any, **__: Any) -> torch.Tensor:
        assert bool(cuda_grouped._all_progress(expected_TD.device).any())
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(cuda_grouped, "launch_combine", no_memory)
        with pytest.raises(MemoryError):
            case.run(ONE_TILE_PLANS[0])
    assert torch.equal(case.run(ONE_TILE_PLANS[0]), expected_TD)


@pytest.mark.usefixtures("kernels")
def test_a_token_has_the_same_bits_in_any_company(randn, generator):
    ids_TK = distinct_ids(generator, 21, 3, 2)
    options = {"E": 3, "D": 256, "hidden": 128, "weight_format": "int4"}
    case = Case(randn, ids_TK, **options, residual_dtype=torch.float32)
    together_TD = case.run(PLANS[1])
    assert torch.equal(case.run(PLANS[1], pdl=False), together_TD), "equal inputs, equal bits"
    alone = Case(randn, ids_TK[7:8], **options, residual_dtype=torch.float32)
    alone.gate_up, alone.down = case.gate_up, case.down
    alone.routing.h_TD.copy_(case.routing.h_TD[7:8])
    alone.routing.topk_weight_TK.copy_(case.routing.topk_weight_TK[7:8])
    alone.residual_TD.copy_(case.residual_TD[7:8])
    assert torch.equal(alone.run(PLANS[1]), together_TD[7:8])


@pytest.mark.usefixtures("kernels")
def test_a_bad_token_leaves_the_others_alone(randn, generator):
    case = Case(
        randn,
        distinct_ids(generator, 9, 2, 2),
        E=2,
        D=64,
        hidden=64,
        weight_format="fp8",
        residual_dtype=torch.float32,
    )
    good_TD = case.run(PLANS[1])
    case.routing.h_TD[4] = torch.nan
    case.routing.topk_weight_TK[4] = torch.nan
    bad_TD = case.run(PLANS[1])
    kept = torch.arange(9, device=good_TD.device) != 4
    assert bool(bad_TD[4].isnan().all())
    assert torch.equal(bad_TD[kept], good_TD[kept])


@pytest.mark.usefixtures("kernels")
def test_sums_below_the_normal_numbers(randn, generator):
    """Codes are 2^-120 of their values, so sums of act, about 2^-21 here, are subnormal."""
    ids_TK, (dim, hidden) = distinct_ids(generator, 9, 4, 2), SHAPES["fp8"]
    case = Case(
        randn,
        ids_TK,
        E=4,
        D=dim,
        hidden=hidden,
        weight_format="fp8",
        residual_dtype=torch.float32,
    )
    case.routing.h_TD.mul_(2.0**-10)
    case.residual_TD.zero_()
    case.check(case.run(PLANS[1]))


@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
@pytest.mark.usefixtures("kernels")
def test_codes_are_decoded_exactly(weight_format, device):
    """All 256 bytes: every E4M3 number in each place of a word, every nibble beside every other."""
    if device.type == "cuda":
        pytest.skip("the emulator shows single codes")
    byte = torch.arange(256, dtype=torch.uint8)
    if weight_format == "fp8":
        byte = byte[(byte & 0x7F) != 0x7F]  # never NaN
    # Each byte in each of the four places of a word, and enough of them for whole 16 bytes.
    byte = torch.cat([byte.roll(i) for i in range(4)] * 4).view(-1, 16)
    num_units = FORMATS[weight_format].codes // 8
    pairs = torch.empty(len(byte), num_units * 4, dtype=torch.int32)
    for row, out in zip(byte, pairs, strict=True):
        failed = emulator(*EMULATOR).decode(
            weight_format.encode(),
            ctypes.c_void_p(row.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            num_units,
        )
        assert not failed
    scale = torch.ones(len(byte), 1)
    expected = dequantize(byte, scale, weight_format)
    unit = 2.0**120 if weight_format == "fp8" else 1.0
    assert torch.equal(pairs.view(torch.bfloat16).float() * unit, expected)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dim", [768, 4096, 14336])
@pytest.mark.parametrize("num_assignments", [9, 256, 1024, 4096, 65536])
@pytest.mark.parametrize("has_wide", [False, True])
def test_plans_fit_an_sm(dim, weight_format, num_assignments, has_wide):
    """The shared memory of its blocks together; a tile for the mean load, or the largest."""
    plan = plan_grouped(dim, num_assignments, 128, weight_format, has_wide=has_wide)
    is_wide = has_wide and weight_format == "fp8" and num_assignments > 2048 and dim < 4096
    assert plan.wide == is_wide
    assert plan.shared_bytes(FORMATS[weight_format], 1024) * plan.blocks <= 226 * 1024
    assert plan.columns >= min(48, num_assignments / 128)


@pytest.mark.parametrize(
    "change", [{"hidden": 80}, {"D": 80}, {"weight_format": "none", "dtype": torch.float32}]
)
def test_what_the_kernels_do_not_take_goes_to_triton(monkeypatch, randn, generator, change):
    taken = []
    monkeypatch.setattr(
        cuda_experts.triton_experts, "experts", lambda *a, **k: taken.append((a, k))
    )
    monkeypatch.setattr(runtime, "launch", refuse_launch)
    sizes = {"E": 4, "D": 128, "hidden": 128, "weight_format": "fp8"} | change
    dtype = sizes.pop("dtype", torch.bfloat16)
    case = Case(randn, distinct_ids(generator, 17, 4, 2), **sizes, residual_dtype=torch.float32)
    if dtype == torch.float32:
        case.gate_up, case.down = (
            Weight.of(w.dequantize().float()) for w in (case.gate_up, case.down)
        )
    assert not suits(case.routing, case.gate_up, case.down, case.residual_TD)
    cuda_experts.experts(case.routing, case.gate_up, case.down, residual_TD=case.residual_TD)
    assert taken.pop()[0][0] is case.routing


def test_plans_that_do_not_fit_a_block_are_handed_over(monkeypatch, randn):
    ids_TK = torch.zeros(64, 1, dtype=torch.int64)
    options = {"D": 4096, "hidden": 384, "residual_dtype": torch.float32}
    case = Case(randn, ids_TK, E=1, weight_format="int4", **options)
    arguments = (case.routing, case.gate_up, case.down, case.residual_TD)
    assert suits(*arguments)
    monkeypatch.setattr(runtime, "max_shared_bytes", lambda _device: 98 * 1024)
    assert not suits(*arguments)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_experts_takes_the_grouped_path(monkeypatch, randn, generator):
    monkeypatch.setattr(cuda_experts.triton_experts, "experts", refuse_launch)
    monkeypatch.setattr(cuda_grouped, "plan_grouped", lambda *_, **__: PLANS[1])
    case = Case(
        randn,
        distinct_ids(generator, 17, 4, 2),
        E=4,
        D=128,
        hidden=64,
        weight_format="fp8",
        residual_dtype=torch.float32,
    )
    case.check(
        cuda_experts.experts(case.routing, case.gate_up, case.down, residual_TD=case.residual_TD)
    )


MODELS = {"qwen3-30b-a3b": (8, 2048, 768, 128), "mixtral-8x7b": (2, 4096, 14336, 8)}
"""Experts a token, features, hidden features, experts."""


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_tokens", [17, 100, 512])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_grouped_of_real_shapes(randn, generator, model, weight_format, num_tokens):
    top_k, dim, hidden, num_experts = model
    case = Case(
        randn,
        distinct_ids(generator, num_tokens, min(num_experts, 24), top_k),
        E=min(num_experts, 24),
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
        residual_dtype=torch.float32,
    )
    case.check(case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [4, 6, 8, 12])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_wide_products_of_real_shapes(randn, generator, tiles):
    """Experts with all the tokens beside experts with a few."""
    top_k, dim, hidden, _ = MODELS["qwen3-30b-a3b"]
    ids_TK = distinct_ids(generator, 301, 24, top_k)
    ids_TK[:, 0] = 24
    case = Case(
        randn,
        ids_TK,
        E=25,
        D=dim,
        hidden=hidden,
        weight_format="fp8",
        residual_dtype=torch.float32,
    )
    case.check(case.run(GroupedPlan(tiles=tiles, warps=8, depth=2, blocks=1, wide=True)))
