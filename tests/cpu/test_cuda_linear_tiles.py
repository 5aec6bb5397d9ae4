"""`linear` for a batch's tokens on CUDA against float64: formats, clusters, plans, fallbacks.

On a CPU the kernel's own source runs in an emulator, lane by lane, the blocks of a cluster
together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_launcher import emulator, refuse_launch, use_kernels
from test_cuda_gemv import EPS, SHAPES, allowed, exact_h

from conftest import assert_close
from subten.kernels.cuda import gemv, linear_tiles, runtime
from subten.kernels.cuda import linear as cuda_linear
from subten.kernels.cuda.grouped import FORMATS
from subten.kernels.cuda.linear import linear as op
from subten.kernels.cuda.linear_tiles import TilePlan, linear, plan_tiles, suits
from subten.kernels.norm_rope import rms_norm
from subten.kernels.weight_formats import Weight

HERE = Path(__file__).parent
EMULATOR = (HERE / "linear_tiles_emulation", HERE / "grouped_emulation")

PLANS = [
    TilePlan(slices=1, warps_n=1, warps_k=1, depth=3),
    TilePlan(slices=1, warps_n=2, warps_k=2, depth=2),
    TilePlan(slices=2, warps_n=4, warps_k=1, depth=2),
    TilePlan(slices=3, warps_n=1, warps_k=3, depth=1),
    TilePlan(slices=4, warps_n=2, warps_k=2, depth=2),
]
"""What the emulator holds, for one of its tiles each at least."""

SMALL = TilePlan(slices=2, warps_n=2, warps_k=2, depth=2)


def emulated_launch(
    source, name, grid, block, args, *, device, shared_bytes=0, pdl=False, cluster=1
):
    """`runtime.launch` of linear_tiles.cu on the CPU."""
    assert source == "linear_tiles.cu" and device.type == "cpu" and isinstance(pdl, bool), source
    assert len(grid) == 3 and grid[0] % cluster == 0, (grid, cluster)
    values = [runtime.pack_argument(arg) for arg in args]
    pointers = runtime.pointer_array(values)
    library = emulator(*EMULATOR)
    failed = library.emulate(name.encode(), *grid, block, shared_bytes, cluster, pointers)
    assert not failed, f"the emulator does not hold {name}"


@pytest.fixture
def kernels(device, monkeypatch):
    """The kernels on the GPU, or emulated."""
    use_kernels(device, monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(runtime, "launch", emulated_launch)


def check(randn, *, T, N, K, weight_format, parts, plan=None, out_dtype=None):
    """Against float64, `parts` naming what stands around the product."""
    weight = Weight.of(randn(N, K, scale=K**-0.5).bfloat16(), weight_format, search=False)
    is_normed = "norm" in parts
    x_TK = randn(T, K, dtype=torch.float32 if is_normed else torch.bfloat16, scale=3.0)
    norm_weight_K = (1 + 0.2 * randn(K)).bfloat16() if is_normed else None
    bias_N = randn(N).bfloat16() if "bias" in parts else None
    residual_TN = None
    if "residual" in parts:
        residual_TN = randn(T, N, dtype=torch.bfloat16 if "rounded" in parts else torch.float32)
    out_TN = linear(
        x_TK,
        weight,
        bias_N=bias_N,
        norm_weight_K=norm_weight_K,
        eps=EPS,
        residual_TN=residual_TN,
        out_dtype=out_dtype,
        plan=plan,
    )
    h_TK = exact_h(x_TK, norm_weight_K)
    expected_TN = h_TK @ weight.dequantize().double().T
    bound = allowed(h_TK, weight)
    for part in (bias_N, residual_TN):
        if part is not None:
            expected_TN = expected_TN + part.double()
    usual = torch.bfloat16 if residual_TN is None else residual_TN.dtype
    assert out_TN.dtype == (usual if out_dtype is None else out_dtype)
    if out_TN.dtype == torch.bfloat16:
        bound += 2.0**-8 * float(expected_TN.abs().max())  # rounding of y
    assert_close(out_TN, expected_TN, bound, bound / 2)


PARTS = ["", "norm", "bias residual", "norm bias", "residual rounded"]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("plan", "parts"), list(zip(PLANS, PARTS, strict=True)), ids=str)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_linear_of_every_kind_of_plan(randn, weight_format, plan, parts):
    """Rows that end within a block; slices and parts of unequal length; tiles that are not full."""
    num_tokens = 27 if plan.warps == 3 else 13
    sizes = {"T": num_tokens, "N": 96, "K": FORMATS[weight_format].block * 9}
    check(randn, **sizes, weight_format=weight_format, parts=parts, plan=plan)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_more_tokens_than_threads(randn, weight_format):
    sizes = {"T": 45, "N": 32, "K": 128}
    check(randn, **sizes, weight_format=weight_format, parts="norm residual", plan=PLANS[0])


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 5, 8, 9, 16, 17, 32, 33, 67])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_linear_of_odd_numbers_of_tokens(randn, weight_format, num_tokens):
    """Tiles of 8, 16, 32 and 48 tokens, full and not; 67 are two tiles."""
    sizes = {"T": num_tokens, "N": 96, "K": 640}
    parts = "norm residual" if num_tokens % 3 else "bias"
    check(randn, **sizes, weight_format=weight_format, parts=parts, plan=SMALL)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("plan", [PLANS[1], SMALL], ids=str)
@pytest.mark.parametrize("num_sms", [2, 4])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_a_block_walks_over_groups_of_rows(monkeypatch, randn, weight_format, plan, num_sms):
    """Five groups for one lane, or two: weights of the next one are asked for while one ends."""
    monkeypatch.setattr(linear_tiles, "SLOTS", {1: num_sms, 2: num_sms})
    sizes = {"T": 11, "N": 64 * 4 + 32, "K": 640}
    check(randn, **sizes, weight_format=weight_format, parts="norm bias residual", plan=plan)


@pytest.mark.triton
@pytest.mark.usefixtures("kernels", "poisoned")
def test_long_slices_are_normed_before(monkeypatch, randn):
    monkeypatch.setattr(linear_tiles, "MAX_NORMED_SLICE", 128)
    weight, norm_weight_K = Weight.of(randn(64, 640).bfloat16(), "fp8"), randn(640).bfloat16()
    for x_TK in (randn(10, 640), randn(10, 640).bfloat16()):
        h_TK = rms_norm(x_TK, norm_weight_K, eps=EPS)
        out_TN = linear(x_TK, weight, norm_weight_K=norm_weight_K, eps=EPS, plan=SMALL)
        assert torch.equal(out_TN, linear(h_TK, weight, plan=SMALL))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("kernels")
def test_a_token_has_the_same_bits_in_any_company(randn, weight_format):
    weight = Weight.of(randn(64, 640).bfloat16(), weight_format)
    x_TK, norm_weight_K = randn(40, 640), randn(640).bfloat16()
    residual_TN = randn(40, 64)

    def run(rows):
        parts = {"norm_weight_K": norm_weight_K, "residual_TN": residual_TN[rows]}
        return linear(x_TK[rows], weight, **parts, eps=EPS, plan=SMALL)

    together_TN = run(slice(None))
    for rows in (slice(0, 9), slice(7, 24), slice(39, 40)):
        assert torch.equal(run(rows), together_TN[rows]), rows
    x_TK[11] = torch.nan
    spoilt_TN = run(slice(None))
    kept = torch.arange(40, device=x_TK.device) != 11
    assert bool(spoilt_TN[11].isnan().all())
    assert torch.equal(spoilt_TN[kept], together_TN[kept])


@pytest.mark.usefixtures("kernels")
def test_rows_with_gaps(randn):
    weight = Weight.of(randn(64, 256).bfloat16(), "fp8")
    wide_TK, wide_TN = randn(10, 512).bfloat16(), randn(10, 80)
    x_TK, residual_TN = wide_TK[:, 32:288], wide_TN[:, 5:69]
    out_TN = linear(x_TK, weight, residual_TN=residual_TN, plan=SMALL)
    packed = {"residual_TN": residual_TN.contiguous(), "plan": SMALL}
    assert torch.equal(out_TN, linear(x_TK.contiguous(), weight, **packed))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plans_hold_what_the_kernel_relies_on(shape, weight_format):
    """One wave of blocks where the rows allow it; shared memory of an SM; every K has warps."""
    num_rows, dim = shape[0] + shape[0] % 32, shape[1]
    plan = plan_tiles(num_rows, dim, weight_format)
    plan.check(dim, weight_format)
    assert plan.warps <= 12
    for num_tokens in (9, 16, 32, 48, 100):
        for is_normed in {False, plan.norms(dim, weight_format)}:
            made = linear_tiles.launch_shape(
                num_tokens, num_rows, dim, weight_format, plan, is_normed=is_normed
            )
            assert made.shared_bytes <= linear_tiles.MAX_SHARED_BYTES
            assert made.num_tiles * made.tiles * 8 >= num_tokens
            assert made.row_bytes % 128 == 64
            # All at once, or lanes that walk.
            num_blocks = plan.slices * made.lanes * made.num_tiles
            assert num_blocks <= linear_tiles.SLOTS[plan.slices] * made.num_tiles


def test_a_bad_plan_is_refused(randn):
    weight = Weight.of(randn(32, 64).bfloat16(), "fp8")
    with pytest.raises(AssertionError):
        linear(randn(9, 64).bfloat16(), weight, plan=SMALL)


def test_who_serves_how_many_tokens(monkeypatch, randn):
    """A few gemv, up to MAX_TOKENS this kernel, above and for what it does not take Triton."""
    taken = []
    monkeypatch.setattr(linear_tiles, "linear", lambda *_, **__: taken.append("tiles"))
    monkeypatch.setattr(gemv.triton_linear, "linear", lambda *_, **__: taken.append("triton"))
    monkeypatch.setattr(runtime, "launch", lambda *_, **__: taken.append("gemv"))
    weight = Weight.of(randn(64, 128).bfloat16())
    few = cuda_linear.MAX_GEMV_TOKENS
    for num_tokens in (few, few + 1, linear_tiles.MAX_TOKENS, linear_tiles.MAX_TOKENS + 1):
        op(randn(num_tokens, 128).bfloat16(), weight)
    assert taken == ["gemv", "tiles", "tiles", "triton"]
    # Where tiles cannot run, gemv takes all that it can.
    monkeypatch.setattr(linear_tiles, "suits", lambda *_: False)
    for num_tokens in (few + 1, gemv.MAX_TOKENS, gemv.MAX_TOKENS + 1):
        op(randn(num_tokens, 128).bfloat16(), weight)
    assert taken[4:] == ["gemv", "gemv", "triton"]


def test_what_the_kernel_does_not_take(monkeypatch, randn):
    monkeypatch.setattr(runtime, "launch", refuse_launch)
    bf16 = torch.bfloat16
    good = Weight.of(randn(32, 64).bfloat16())
    for x_TK, weight, options in (
        (randn(9, 64, dtype=bf16), Weight.of(randn(48, 64).bfloat16()), {}),  # N % 32
        (randn(9, 48, dtype=bf16), Weight.of(randn(32, 48).bfloat16()), {}),  # K % 32
        (randn(9, 192, dtype=bf16), Weight.of(randn(32, 192).bfloat16(), "int4"), {}),  # K % 128
        (randn(9, 64), Weight.of(randn(32, 64)), {}),  # float32 weights
        (randn(9, 64), good, {"norm_weight_K": randn(64)}),  # float32 norm
        (randn(9, 64, dtype=bf16).mT.contiguous().mT, good, {}),
        (randn(9, 64, dtype=bf16), good, {"residual_TN": randn(9, 64)[:, ::2]}),
        (randn(9, 64, dtype=bf16), good, {"out_dtype": torch.float16}),
    ):
        names = ("bias_N", "norm_weight_K", "residual_TN", "out_dtype")
        assert not suits(x_TK, weight, *(options.get(name) for name in names)), options
    assert suits(randn(9, 64, dtype=bf16), good, None, None, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("num_tokens", "parts"), [(32, "norm residual"), (48, "bias")])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_linear_of_real_shapes(randn, shape, weight_format, num_tokens, parts):
    sizes = {"T": num_tokens, "N": shape[0] + shape[0] % 32, "K": shape[1]}
    check(randn, **sizes, weight_format=weight_format, parts=parts)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("device")
def test_pdl_and_graph_replays_give_equal_bits(randn, weight_format):
    """A chain of layers, each reading the one before: 200 replays equal the eager launches."""
    use = [Weight.of(randn(2048, 2048, scale=0.02).bfloat16(), weight_format) for _ in range(4)]
    norm_K, x_TK = (1 + 0.2 * randn(2048)).bfloat16(), randn(32, 2048)

    def chain(pdl):
        y_TK = x_TK
        for weight in use:
            y_TK = linear(y_TK, weight, norm_weight_K=norm_K, residual_TN=y_TK, eps=EPS, pdl=pdl)
        return y_TK

    torch.cuda.synchronize()
    expected_TK = chain(False)
    torch.cuda.synchronize()
    assert torch.equal(chain(True), expected_TK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TK = chain(True)
    for i in range(200):
        out_TK.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(out_TK, expected_TK), i
