"""`linear` on CUDA against float64: every format, odd T, plans; plans and shared memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from cuda_launcher import refuse_launch, use_kernels

from conftest import assert_close
from subten.kernels.cuda import gemv, runtime
from subten.kernels.cuda.gemv import FORMATS, GemvPlan, linear, plan_gemv
from subten.kernels.weight_formats import Weight

EPS = 1e-6


@pytest.fixture
def compiler():
    if not runtime.has_compiler():
        pytest.skip("needs cuda-bindings and NVRTC")


@pytest.fixture
def kernels(device, monkeypatch):
    use_kernels(device, monkeypatch)


def exact_h(x_TK, norm_weight_K):
    """h as float64, of bfloat16 values."""
    if norm_weight_K is None:
        return x_TK.double()
    h_TK = F.rms_norm(x_TK.double(), (x_TK.shape[1],), norm_weight_K.double(), EPS)
    return h_TK.bfloat16().double()


def allowed(h_TK, weight, index=()):
    """Largest error of a product: n steps of the accumulator, each 2^-23 of the terms' size.

    n = K / 16 products of the tensor core, and up to 64 additions after. An int4 term is as large
    as 24 * scale, for q + 8 is multiplied and 8 taken off. Three elements of h may round the other
    way, each by 2^-8 of itself.
    """
    w_NK = weight.dequantize(index).double()
    size_NK = w_NK.abs()
    if weight.format == "int4":
        scale_NG = weight.scale[index].double().abs()
        size_NK = (24 * scale_NG).repeat_interleave(w_NK.shape[-1] // scale_NG.shape[-1], dim=-1)
    num_steps = w_NK.shape[-1] / 16 + 64
    error = num_steps * 2.0**-23 * float((h_TK.abs() @ size_NK.T).max())
    return error + 3 * 2.0**-8 * float(h_TK.abs().max() * w_NK.abs().max())


def check_linear(randn, *, T, N, K, weight_format, x_dtype, plan=None, has_bias=False):
    weight = Weight.of(randn(N, K, scale=K**-0.5).bfloat16(), weight_format)
    is_normed = x_dtype == torch.float32 or has_bias
    x_TK = randn(T, K, dtype=x_dtype, scale=3.0)
    norm_weight_K = (1 + 0.2 * randn(K)).bfloat16() if is_normed else None
    residual_TN = randn(T, N) if T % 2 else None
    bias_N = randn(N).bfloat16() if has_bias else None
    out_TN = linear(
        x_TK,
        weight,
        bias_N=bias_N,
        norm_weight_K=norm_weight_K,
        eps=EPS,
        residual_TN=residual_TN,
        plan=plan,
    )
    h_TK = exact_h(x_TK, norm_weight_K)
    expected_TN = h_TK @ weight.dequantize().double().T
    bound = allowed(h_TK, weight)
    if bias_N is not None:
        expected_TN = expected_TN + bias_N.double()
    if residual_TN is not None:
        expected_TN = expected_TN + residual_TN.double()
    assert out_TN.dtype == (torch.bfloat16 if residual_TN is None else torch.float32)
    if residual_TN is None:
        bound += 2.0**-8 * float(expected_TN.abs().max())  # rounding of y
    assert_close(out_TN, expected_TN, bound, bound / 2)
    return out_TN


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_linear_of_odd_sizes(randn, weight_format, num_tokens):
    """Rows that are no multiple of a block's 64; K is three blocks of each format at least."""
    plan = GemvPlan(warps_k=2, warps_n=2, tiles=2, depth=2)
    for x_dtype, has_bias in ((torch.bfloat16, False), (torch.float32, True)):
        check_linear(
            randn,
            T=num_tokens,
            N=80,
            K=384,
            weight_format=weight_format,
            x_dtype=x_dtype,
            plan=plan,
            has_bias=has_bias,
        )


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    "plan",
    [
        GemvPlan(warps_k=1, depth=4),
        GemvPlan(warps_k=3, warps_n=2, tiles=3, depth=2),
        GemvPlan(warps_k=4, tiles=1, depth=4),
    ],
    ids=str,
)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_linear_of_every_kind_of_plan(randn, weight_format, plan):
    """Slices of unequal length, more ring than blocks, several tiles a warp."""
    sizes = {"T": 3, "N": 112, "K": 640}
    check_linear(randn, **sizes, weight_format=weight_format, x_dtype=torch.float32, plan=plan)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dim", [128, 384, 512, 640])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_one_token_in_and_past_the_registers(randn, weight_format, dim):
    """32 threads keep 512 inputs; of more, x is read twice."""
    plan = GemvPlan(warps_k=1, depth=2)
    assert gemv.is_one_token(1, dim, plan) == (dim <= 512)
    for x_dtype, has_bias in (
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float32, True),
    ):
        check_linear(
            randn,
            T=1,
            N=32,
            K=dim,
            weight_format=weight_format,
            x_dtype=x_dtype,
            plan=plan,
            has_bias=has_bias,
        )


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("kernels")
def test_a_token_has_the_same_bits_alone_and_among_others(randn, weight_format):
    weight = Weight.of(randn(32, 512).bfloat16(), weight_format)
    x_TK, norm_weight_K = randn(5, 512), randn(512).bfloat16()
    together_TN = linear(x_TK, weight, norm_weight_K=norm_weight_K, eps=EPS)
    for t in range(5):
        alone_1N = linear(x_TK[t : t + 1], weight, norm_weight_K=norm_weight_K, eps=EPS)
        assert torch.equal(alone_1N, together_TN[t : t + 1]), t


@pytest.mark.usefixtures("kernels")
def test_every_e4m3_code(device):
    """Exact, subnormal codes too: row n holds code n at one input, where x is 1.5."""
    code_N = torch.arange(256, dtype=torch.uint8, device=device)
    code_N[[0x7F, 0xFF]] = 0  # NaN, which no weight has
    weight = Weight((256, 64), quantization="fp8", device=device, dtype=torch.bfloat16)
    weight.codes.zero_()
    for n in range(256):
        weight.codes[n, n % 64] = code_N[n]
    weight.scale.fill_(0.5)
    x_1K = torch.full((1, 64), 1.5, dtype=torch.bfloat16, device=device)
    residual_1N = torch.zeros(1, 256, device=device)
    value_N = code_N.view(torch.float8_e4m3fn).float()
    assert torch.equal(linear(x_1K, weight, residual_TN=residual_1N)[0], value_N * 0.75)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("kernels")
def test_a_nan_stays_in_its_row(randn, weight_format):
    weight = Weight.of(randn(16, 256).bfloat16(), weight_format)
    x_TK = randn(3, 256).bfloat16()
    x_TK[1, 7] = float("nan")
    out_TN = linear(x_TK, weight)
    assert out_TN[1].isnan().all() and out_TN[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("kernels")
def test_rows_with_gaps(randn):
    weight = Weight.of(randn(16, 64).bfloat16(), "fp8")
    wide_TK, wide_TN = randn(3, 128).bfloat16(), randn(3, 48)
    x_TK, residual_TN = wide_TK[:, 32:96], wide_TN[:, 5:21]
    out_TN = linear(x_TK, weight, residual_TN=residual_TN)
    assert torch.equal(
        out_TN, linear(x_TK.contiguous(), weight, residual_TN=residual_TN.contiguous())
    )


def test_what_the_kernel_does_not_take_goes_to_triton(monkeypatch, randn):
    taken = []
    monkeypatch.setattr(gemv.triton_linear, "linear", lambda *a, **k: taken.append((a, k)))
    monkeypatch.setattr(gemv.runtime, "launch", refuse_launch)
    bf16 = torch.bfloat16
    for x_TK, weight, options in (
        (randn(9, 64, dtype=bf16), Weight.of(randn(16, 64).bfloat16()), {}),  # T > 8
        (randn(0, 64, dtype=bf16), Weight.of(randn(16, 64).bfloat16()), {}),
        (randn(1, 64, dtype=bf16), Weight.of(randn(24, 64).bfloat16()), {}),  # N % 16
        (randn(1, 48, dtype=bf16), Weight.of(randn(16, 48).bfloat16()), {}),  # K % 32
        (randn(1, 96, dtype=bf16), Weight.of(randn(16, 96).bfloat16(), "fp8"), {}),  # K % 64
        (randn(1, 192, dtype=bf16), Weight.of(randn(16, 192).bfloat16(), "int4"), {}),  # K % 128
        (randn(1, 64), Weight.of(randn(16, 64)), {}),  # float32 weights
        (randn(8, 2**14, dtype=bf16), Weight.of(randn(16, 2**14).bfloat16()), {}),  # shared memory
        (randn(2, 64, dtype=bf16).mT.contiguous().mT, Weight.of(randn(16, 64).bfloat16()), {}),
        (randn(1, 64), Weight.of(randn(16, 64).bfloat16()), {"norm_weight_K": randn(64)}),
    ):
        linear(x_TK, weight, **options)
        assert taken.pop()[0][0] is x_TK
    assert not taken


SHAPES = {
    "qwen3 qkv": (5120, 2048),
    "qwen3 o": (2048, 4096),
    "qwen3 head": (151936, 2048),
    "mixtral qkv": (6144, 4096),
    "mixtral o": (4096, 4096),
    "mixtral head": (32000, 4096),
    "one tile": (16, 128),
    "short": (4096, 128),
}


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plans_hold_what_kernels_rely_on(shape, weight_format):
    num_rows, dim = shape
    plan = plan_gemv(num_rows // 16, dim, weight_format)
    plan.check(dim, FORMATS[weight_format])
    for num_tokens in (1, 8):
        assert gemv.linear_shared(weight_format, num_tokens, dim, plan) <= gemv.MAX_SHARED_BYTES


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_rule_for_other_shapes_keeps_an_sm_busy(monkeypatch, shape, weight_format):
    monkeypatch.setattr(gemv, "MEASURED", {})
    num_rows, dim = shape
    plan = plan_gemv(num_rows // 16, dim, weight_format)
    plan.check(dim, FORMATS[weight_format])
    if num_rows >= 2048 and dim >= 2048:
        # Enough warps for every SM, and 32 KiB in flight an SM if its warps hold that much.
        warps = num_rows // 16 * plan.warps_k / plan.tiles
        assert warps >= 9 * gemv.NUM_SMS
        blocks = dim // FORMATS[weight_format].block / plan.warps_k * plan.tiles
        assert min(plan.depth, blocks) * min(16, warps / gemv.NUM_SMS) >= 31


def test_a_launch_starts_early_if_its_plan_does_so(monkeypatch, randn):
    weight = Weight.of(randn(32, 256).bfloat16())
    plan = plan_gemv(2, 256, "none")
    assert plan.starts_early
    seen = []
    monkeypatch.setattr(gemv.runtime, "launch", lambda *_, pdl, **__: seen.append(pdl))
    for is_early in (True, False):
        chosen = dataclasses.replace(plan, starts_early=is_early)
        linear(randn(1, 256).bfloat16(), weight, plan=chosen)
        linear(randn(1, 256).bfloat16(), weight, plan=chosen, pdl=False)
    assert seen == [True, False, False, False]


def test_a_bad_plan_is_refused(randn):
    weight = Weight.of(randn(16, 64).bfloat16())
    good = GemvPlan(warps_k=2, depth=2)
    for change in ({"warps_k": 3}, {"warps_n": 9}, {"tiles": 5}, {"depth": 3}):
        with pytest.raises(AssertionError):
            linear(randn(1, 64).bfloat16(), weight, plan=dataclasses.replace(good, **change))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_linear_of_real_shapes(randn, shape, weight_format, num_tokens):
    N, K = shape
    check_linear(randn, T=num_tokens, N=N, K=K, weight_format=weight_format, x_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("compiler")
def test_pdl_and_graph_replays_give_equal_bits(randn, weight_format):
    """A chain of layers, each reading the one before: 1000 replays equal the eager launches."""
    use = [Weight.of(randn(2048, 2048, scale=0.02).bfloat16(), weight_format) for _ in range(4)]
    norm_K, x_1K = (1 + 0.2 * randn(2048)).bfloat16(), randn(1, 2048)

    def chain(pdl):
        y_1K = x_1K
        for weight in use:
            y_1K = linear(y_1K, weight, norm_weight_K=norm_K, residual_TN=y_1K, eps=EPS, pdl=pdl)
        return y_1K

    torch.cuda.synchronize()
    expected_1K = chain(False)
    torch.cuda.synchronize()
    assert torch.equal(chain(True), expected_1K)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_1K = chain(True)
    for i in range(1000):
        out_1K.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(out_1K, expected_1K), i
