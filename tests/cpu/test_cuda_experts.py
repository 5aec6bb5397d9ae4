"""`experts` on CUDA against float64: shared and separate experts, every format, odd T; plans."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuda_launcher import refuse_launch, use_kernels

from conftest import assert_close
from subten.kernels.cuda import experts as cuda_experts
from subten.kernels.cuda import runtime
from subten.kernels.cuda.experts import experts, plan_down, plan_up
from subten.kernels.cuda.gemv import (
    FORMATS,
    MAX_SHARED_BYTES,
    NUM_SMS,
    GemvPlan,
    is_one_token,
    linear_shared,
)
from subten.kernels.route import Routing
from subten.kernels.weight_formats import Weight


@pytest.fixture
def compiler():
    if not runtime.has_compiler():
        pytest.skip("needs cuda-bindings and NVRTC")


@pytest.fixture
def kernels(device, monkeypatch):
    use_kernels(device, monkeypatch)


class Case:
    """Random inputs of one call, and its result in float64."""

    def __init__(self, randn, generator, *, T, E, top_k, D, hidden, weight_format, residual_dtype):
        self.gate_up = Weight.of(
            randn(E, 2 * hidden, D, scale=D**-0.5).bfloat16(), weight_format, search=False
        )
        self.down = Weight.of(
            randn(E, D, hidden, scale=hidden**-0.5).bfloat16(), weight_format, search=False
        )
        h_TD = randn(T, D).bfloat16()
        id_TK = torch.stack([torch.randperm(E, generator=generator)[:top_k] for _ in range(T)])
        self.routing = Routing(
            h_TD=h_TD,
            topk_id_TK=id_TK.to(device=h_TD.device, dtype=torch.int32),
            topk_weight_TK=randn(T, top_k).softmax(dim=-1),
        )
        self.residual_TD = randn(T, D, dtype=residual_dtype)

    def run(self, **options):
        return experts(
            self.routing, self.gate_up, self.down, residual_TD=self.residual_TD, **options
        )

    def check(self, out_TD):
        assert out_TD.dtype == self.residual_TD.dtype
        expected_TD, bound_TD = self.residual_TD.double(), torch.zeros_like(out_TD).double()
        for t, ids in enumerate(self.routing.topk_id_TK.tolist()):
            for k, e in enumerate(ids):
                y_D, bound_D = self.expert(t, e)
                weight = float(self.routing.topk_weight_TK[t, k])
                expected_TD[t] += weight * y_D
                bound_TD[t] += weight * bound_D
        bound = float(bound_TD.max())
        if out_TD.dtype == torch.bfloat16:
            bound += 2.0**-8 * float(expected_TD.abs().max())
        assert_close(out_TD, expected_TD, bound, bound / 2)

    def expert(self, t, e):
        """One expert of one token, and a bound of the error of each output.

        act is exact to n steps of 2^-23 of its terms before it is rounded to bfloat16, so it may
        come out one step of 2^-8 away where it lies near the middle of two: less than one in 16
        of all, taken at their largest; down adds n steps of its own.
        """
        gate_up_FD = self.gate_up.dequantize((e,)).double()
        down_DF = self.down.dequantize((e,)).double()
        gate_F, up_F = (self.routing.h_TD[t].double() @ gate_up_FD.T).chunk(2)
        act_F = (F.silu(gate_F) * up_F).bfloat16().double()
        factor = 17 if self.down.format == "int4" else 1
        steps = (down_DF.shape[1] / 16 + 64) * 2.0**-23 * factor
        size_D = down_DF.abs() @ act_F.abs()
        flips = max(3, act_F.numel() // 16) ** 0.5 * 2.0**-7
        bound_D = steps * size_D + flips * down_DF.abs().max() * act_F.abs().max()
        return down_DF @ act_F, bound_D


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_experts_of_odd_sizes(randn, generator, weight_format, num_tokens):
    """5 experts of which 3 are taken, so that tokens share some from T = 2 on."""
    dtype = torch.float32 if num_tokens % 2 else torch.bfloat16
    sizes = {"T": num_tokens, "E": 5, "top_k": 3, "D": 128, "hidden": 256}
    case = Case(randn, generator, **sizes, weight_format=weight_format, residual_dtype=dtype)
    case.check(
        case.run(
            up_plan=GemvPlan(warps_k=1, warps_n=3, tiles=2, depth=2),
            down_plan=GemvPlan(warps_k=2, warps_n=3, depth=2),
        )
    )


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dim", [512, 640])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_one_token_in_and_past_the_registers(randn, generator, weight_format, dim):
    """32 threads keep 512 features of h; slices of `down` are longer than one warp's batch."""
    sizes = {"T": 1, "E": 3, "top_k": 2, "D": dim, "hidden": 1152}
    case = Case(
        randn, generator, **sizes, weight_format=weight_format, residual_dtype=torch.float32
    )
    up_plan = GemvPlan(warps_k=1, tiles=2, depth=2)
    assert is_one_token(1, dim, up_plan) == (dim <= 512)
    case.check(case.run(up_plan=up_plan, down_plan=GemvPlan(warps_k=1, warps_n=2, depth=4)))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_plans_of_the_table(randn, generator, weight_format):
    """`experts` as the layers call it; the emulator holds rings of 2 and 4."""
    sizes = {"T": 2, "E": 4, "top_k": 2, "D": 256, "hidden": 128}
    case = Case(
        randn, generator, **sizes, weight_format=weight_format, residual_dtype=torch.float32
    )
    case.check(case.run())


@pytest.mark.usefixtures("kernels")
def test_a_token_has_the_same_bits_alone_and_among_others(randn, generator):
    sizes = {"T": 4, "E": 3, "top_k": 2, "D": 128, "hidden": 128}
    case = Case(randn, generator, **sizes, weight_format="int4", residual_dtype=torch.float32)
    together_TD = case.run()
    routing, residual_TD = case.routing, case.residual_TD
    for t in range(4):
        case.routing = Routing(
            h_TD=routing.h_TD[t : t + 1].clone(),
            topk_id_TK=routing.topk_id_TK[t : t + 1].clone(),
            topk_weight_TK=routing.topk_weight_TK[t : t + 1].clone(),
        )
        case.residual_TD = residual_TD[t : t + 1]
        assert torch.equal(case.run(), together_TD[t : t + 1]), t


def test_what_the_kernels_do_not_take_goes_to_triton(monkeypatch, randn, generator):
    taken = []
    monkeypatch.setattr(
        cuda_experts.triton_experts, "experts", lambda *a, **k: taken.append((a, k))
    )
    monkeypatch.setattr(cuda_experts.runtime, "launch", refuse_launch)
    sizes = {"T": 1, "E": 4, "top_k": 2, "D": 128, "hidden": 128}
    for change in ({"T": 9}, {"hidden": 192}, {"D": 192}, {"E": 20, "top_k": 17}):
        case = Case(
            randn,
            generator,
            **(sizes | change),
            weight_format="int4",
            residual_dtype=torch.float32,
        )
        case.run()
        assert taken.pop()[0][0] is case.routing


MODELS = {"qwen3-30b-a3b": (8, 2048, 768, 128), "mixtral-8x7b": (2, 4096, 14336, 8)}
"""Experts a token, features, hidden features, experts."""


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_plans_hold_what_kernels_rely_on(model, weight_format):
    top_k, dim, hidden, _ = model
    up = plan_up(top_k, hidden, dim, weight_format)
    down = plan_down(top_k, hidden, weight_format)
    up.check(dim, FORMATS[weight_format])
    down.check(hidden, FORMATS[weight_format])
    assert linear_shared(weight_format, 8, dim, up) <= MAX_SHARED_BYTES
    # Two blocks an SM where there are more than one for each.
    blocks_sm = 1 if dim // 16 <= NUM_SMS else 2
    down_bytes = cuda_experts._down_shared(weight_format, top_k, hidden, down)
    assert down_bytes * blocks_sm <= MAX_SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_experts_of_real_shapes(randn, generator, model, weight_format, num_tokens):
    top_k, dim, hidden, num_experts = model
    case = Case(
        randn,
        generator,
        T=num_tokens,
        E=min(num_experts, 16),
        top_k=top_k,
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
        residual_dtype=torch.float32,
    )
    case.check(case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("kernels")
def test_an_expert_past_two_gib(device, generator, randn, weight_format):
    """The last of enough experts that the codes before it pass 2^31 bytes."""
    dim, hidden = 4096, 2048
    expert_bytes = 2 * hidden * dim * {"none": 2, "fp8": 1, "int4": 0.5}[weight_format]
    num_experts = int(2**31 // expert_bytes) + 2
    case = Case(
        randn,
        generator,
        T=1,
        E=2,
        top_k=2,
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
        residual_dtype=torch.float32,
    )
    expected_TD = case.run()
    for name in ("gate_up", "down"):
        small = getattr(case, name)
        large = Weight(
            (num_experts, *small.shape[1:]),
            quantization=weight_format,
            device=device,
            dtype=torch.bfloat16,
        )
        large.codes[-2:] = small.codes
        if large.scale is not None:
            large.scale[-2:] = small.scale
        setattr(case, name, large)
    case.routing.topk_id_TK.add_(num_experts - 2)
    assert torch.equal(case.run(), expected_TD)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("compiler")
def test_pdl_and_graph_replays_give_equal_bits(device, randn, generator, weight_format):
    """Routing changes between replays: `down` reads the ids before it waits for `up`."""
    top_k, dim, hidden = 8, 2048, 768
    case = Case(
        randn,
        generator,
        T=1,
        E=32,
        top_k=top_k,
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
        residual_dtype=torch.float32,
    )
    given = case.routing
    others = [torch.randperm(32, generator=generator)[:top_k] for _ in range(8)]
    id_SK = torch.stack(others).to(device=device, dtype=torch.int32)
    now_TK = torch.empty_like(given.topk_id_TK)
    case.routing = Routing(h_TD=given.h_TD, topk_id_TK=now_TK, topk_weight_TK=given.topk_weight_TK)
    chosen = torch.zeros(1, dtype=torch.int64, device=device)

    def layers(pdl):
        x_TD = case.residual_TD
        for _ in range(4):
            now_TK.copy_(id_SK.index_select(0, chosen))
            chosen.add_(1).remainder_(8)
            x_TD = experts(case.routing, case.gate_up, case.down, residual_TD=x_TD, pdl=pdl)
        return x_TD

    torch.cuda.synchronize()
    expected = [layers(False).clone() for _ in range(2)]
    torch.cuda.synchronize()
    assert torch.equal(layers(True), expected[0]) and torch.equal(layers(True), expected[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = layers(True)
    for i in range(1000):
        out_TD.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out_TD, expected[i % 2]), i
