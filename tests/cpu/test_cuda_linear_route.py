"""`linear_route` on CUDA, and `experts` after it, against float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cuda_launcher import emulator, use_kernels

from conftest import assert_close
from subten.kernels.cuda import experts as cuda_experts
from subten.kernels.cuda import linear_route as cuda_linear_route
from subten.kernels.cuda import route as cuda_route
from subten.kernels.cuda import runtime
from subten.kernels.cuda.experts import experts, plan_up_ahead
from subten.kernels.cuda.gemv import FORMATS, KEPT_UNITS, GemvPlan, units_of_thread
from subten.kernels.cuda.linear_route import blocks_and_parts, can_route_ahead, linear_route
from subten.kernels.linear_route import Router, fold_router
from subten.kernels.weight_formats import Weight

EPS = 1e-6


@pytest.fixture
def compiler():
    if not runtime.has_compiler():
        pytest.skip("needs cuda-bindings and NVRTC")


@pytest.fixture
def kernels(device, monkeypatch):
    use_kernels(device, monkeypatch)


class Layer:
    """Random weights and input of a layer from attention's heads on."""

    def __init__(
        self,
        randn,
        *,
        E,
        top_k,
        N,
        D,
        hidden=128,
        weight_format="fp8",
        renormalize=True,
        scaling_factor=1.0,
    ):
        def weight(*shape):
            scale = shape[-1] ** -0.5
            return Weight.of(randn(*shape, scale=scale).bfloat16(), weight_format, search=False)

        self.output, self.gate_up = weight(D, N), weight(E, 2 * hidden, D)
        self.down = weight(E, D, hidden)
        self.router = Router(
            norm_weight_D=(1 + 0.2 * randn(D)).bfloat16(),
            gate_ED=randn(E, D, scale=D**-0.5),
            eps=EPS,
            top_k=top_k,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
        )
        self.fold()
        self.heads_1N = randn(1, N).bfloat16()
        self.residual_1D = randn(1, D, scale=2.0)

    def fold(self):
        router = self.router
        folded_EM = fold_router(router.gate_ED, router.norm_weight_D, self.output)
        self.router = replace(router, folded_EM=folded_EM)

    def route(self, **options):
        return linear_route(
            self.heads_1N,
            self.output,
            self.router,
            residual_TD=self.residual_1D,
            **options,
        )

    def check_route(self, x_1D, routing):
        """x is the product; scores are sums of the fold; ids are those of the scores."""
        assert routing.ahead is not None and routing.ahead.x_TD is x_1D
        assert routing.h_TD.shape == (0, x_1D.shape[1]) and routing.order_A is None
        assert x_1D.dtype == torch.float32
        exact_1D = self.exact_x()
        w_DN = self.output.dequantize().double()
        terms = self.heads_1N.double().abs() @ w_DN.abs().T
        factor = 17 if self.output.format == "int4" else 1
        bound = (w_DN.shape[1] / 16 + 64) * 2.0**-23 * factor * float(terms.max())
        bound += 2.0**-22 * float(exact_1D.abs().max())
        assert_close(x_1D, exact_1D, bound, bound, "x")
        input_1M = torch.cat([self.heads_1N.double(), self.residual_1D.double()], dim=1)
        folded_EM = self.router.folded_EM.double()
        # At most M / 32 additions one after another, of terms of this size.
        size_E = (folded_EM.abs() * input_1M.abs()).sum(dim=1)
        bound = (input_1M.shape[1] / 32 + 64) * 2.0**-24 * float(size_E.max())
        score_1E = routing.ahead.score_TE
        assert_close(score_1E, input_1M @ folded_EM.T, bound, bound, "scores")
        ids = score_1E.double().sort(dim=-1, descending=True, stable=True).indices
        top_k = self.router.top_k
        assert routing.topk_id_TK.tolist() == ids[:, :top_k].tolist()

    def exact_x(self):
        x_1D = self.heads_1N.double() @ self.output.dequantize().double().T
        return x_1D + self.residual_1D.double()

    def check_experts(self, x_1D, routing, out_1D):
        """The rest of the layer from the x that was given, in float64."""
        router, ids = self.router, routing.topk_id_TK[0].tolist()
        norm_D = router.norm_weight_D.double()
        inverse = (x_1D.double().square().mean() + EPS).rsqrt()
        weight_E = (routing.ahead.score_TE[0].double() * inverse).softmax(dim=-1)
        weight_K = weight_E[torch.tensor(ids, device=weight_E.device)]
        if router.renormalize:
            weight_K = weight_K / weight_K.sum()
        weight_K = weight_K * router.scaling_factor
        # Exponentials of sums of size s differ by s * 2^-24, and some roundings.
        size = 8 + float((routing.ahead.score_TE[0].double() * inverse).abs().max())
        bound = 2.0**-22 * size * router.scaling_factor
        assert_close(routing.topk_weight_TK[0], weight_K, bound, bound, "weights")
        # h as the kernel rounds it: x * weight, before the norm's factor.
        h_1D = (x_1D.float() * router.norm_weight_D.float()).bfloat16().double()
        assert_close(
            h_1D * inverse, F.rms_norm(x_1D.double(), x_1D.shape[1:], norm_D, EPS), 0.1, 0.02
        )
        expected_1D, bound = x_1D.double().clone(), 0.0
        for e, weight in zip(ids, weight_K.tolist(), strict=True):
            gate_up_FD = self.gate_up.dequantize((e,)).double()
            down_DF = self.down.dequantize((e,)).double()
            gate_F, up_F = (inverse * (h_1D @ gate_up_FD.T))[0].chunk(2)
            act_F = (F.silu(gate_F) * up_F).bfloat16().double()
            expected_1D[0] += weight * (down_DF @ act_F)
            # As in test_cuda_experts.py: sums, and values of act that round the other way.
            factor = 17 if self.down.format == "int4" else 1
            steps = (down_DF.shape[1] / 16 + 64) * 2.0**-23 * factor
            flips = max(3, act_F.numel() // 16) ** 0.5 * 2.0**-7
            size_D = steps * (down_DF.abs() @ act_F.abs())
            bound += weight * float(size_D.max() + flips * down_DF.abs().max() * act_F.abs().max())
        assert_close(out_1D, expected_1D, bound, bound / 2, "experts")

    def experts(self, x_1D, routing, **options):
        return experts(routing, self.gate_up, self.down, residual_TD=x_1D, **options)

    def check(self, plan=None, up_plan=None, down_plan=None):
        x_1D, routing = self.route(plan=plan)
        self.check_route(x_1D, routing)
        out_1D = self.experts(x_1D, routing, up_plan=up_plan, down_plan=down_plan)
        self.check_experts(x_1D, routing, out_1D)
        return routing


DOWN = GemvPlan(warps_k=1, warps_n=3, depth=2)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_a_layer_of_odd_sizes(randn, weight_format, renormalize):
    """7 experts and 3 blocks, so that blocks have jobs of two or three; the last block's rows end
    early."""
    layer = Layer(
        randn,
        E=7,
        top_k=3,
        N=384,
        D=256,
        weight_format=weight_format,
        renormalize=renormalize,
        scaling_factor=2.5,
    )
    layer.check(
        GemvPlan(warps_k=3, warps_n=2, tiles=3, depth=2),
        GemvPlan(warps_k=1, warps_n=2, tiles=2, depth=2),
        DOWN,
    )


PLANS = {
    "parts": (5, 1, 384, GemvPlan(warps_k=2, depth=2)),
    "two fours": (20, 3, 384, GemvPlan(warps_k=3, depth=4)),
    "six fours": (20, 6, 384, GemvPlan(warps_k=1, depth=2)),
    "more jobs than blocks": (40, 0, 384, GemvPlan(warps_k=4, depth=4)),
    "more than six fours": (10, 0, 512, GemvPlan(warps_k=1, tiles=2, depth=2)),
}
"""Experts, fours that a thread keeps, inputs as well as features, and a plan of the product."""


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_every_share_of_a_folded_row(randn, case):
    num_experts, quads, dim, plan = case
    layer = Layer(randn, E=num_experts, top_k=3, N=dim, D=dim, weight_format="none")
    name = cuda_linear_route.kernel_name("none", plan, layer.output.shape, num_experts)
    assert name.split(", ")[3] == str(quads), name
    layer.check(plan, GemvPlan(warps_k=2, depth=4), DOWN)


@pytest.mark.parametrize("num_experts", [1, 8, 31, 32, 33, 64, 128, 1023])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_every_number_of_experts(randn, num_experts):
    layer = Layer(randn, E=num_experts, top_k=min(num_experts, 8), N=128, D=128, hidden=64)
    x_1D, routing = layer.route(plan=GemvPlan(warps_k=2, warps_n=2, depth=2))
    layer.check_route(x_1D, routing)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_plans_of_the_table(randn, weight_format):
    """As the layers call it; the emulator holds rings of 2 and 4."""
    layer = Layer(randn, E=8, top_k=2, N=256, D=256, weight_format=weight_format)
    assert can_route_ahead(layer.output, layer.router, layer.gate_up, layer.down)
    layer.check()


@pytest.mark.usefixtures("kernels")
def test_ties_go_to_the_lowest_id(randn):
    layer = Layer(randn, E=70, top_k=4, N=128, D=128, hidden=64)
    layer.router.gate_ED[:] = layer.router.gate_ED[:1]
    layer.router.gate_ED[50] *= 2
    layer.fold()
    _, routing = layer.route()
    better = float(routing.ahead.score_TE[0, 0]) > 0
    assert routing.topk_id_TK.tolist() == [[50, 0, 1, 2] if better else [0, 1, 2, 3]]


@pytest.mark.parametrize("bad", ["gate", "heads", "residual", "inf", "no finite"])
@pytest.mark.usefixtures("kernels")
def test_a_bad_number_keeps_distinct_ids_and_shows_nan(randn, bad):
    layer = Layer(randn, E=40, top_k=8, N=128, D=128)
    if bad == "gate":
        layer.router.folded_EM[5] = float("nan")
    elif bad == "inf":
        layer.router.folded_EM[5, 7] = torch.inf * layer.heads_1N[0, 7].sign()
    elif bad == "no finite":
        layer.router.folded_EM[:, 128] = -torch.inf * layer.residual_1D[0, 0].sign()
    elif bad == "heads":
        layer.heads_1N[0, 3] = float("nan")
    else:
        layer.residual_1D[0, 3] = float("nan")
    x_1D, routing = layer.route()
    ids = routing.topk_id_TK[0].tolist()
    assert len(set(ids)) == 8 and min(ids) >= 0 and max(ids) < 40, ids
    if bad == "gate":
        assert 5 not in ids
    layer.experts(x_1D, routing, down_plan=replace(DOWN, warps_n=8))
    assert routing.topk_weight_TK.isnan().all()


@pytest.mark.usefixtures("kernels", "poisoned")
def test_launches_leave_scores_unset_and_give_equal_bits(randn):
    layer = Layer(randn, E=12, top_k=3, N=256, D=128)
    x_1D, first = layer.route()
    scores = cuda_route.unset_scores(x_1D.device)
    assert (scores.view(torch.int32) == cuda_route.UNSET_BITS).all()
    # The router of its own shares them.
    cuda_route.route(
        x_1D, layer.router.norm_weight_D, layer.router.gate_ED, eps=EPS, top_k=3, renormalize=True
    )
    assert (scores.view(torch.int32) == cuda_route.UNSET_BITS).all()
    y_1D, second = layer.route()
    assert torch.equal(x_1D, y_1D) and torch.equal(first.ahead.score_TE, second.ahead.score_TE)
    assert torch.equal(first.topk_id_TK, second.topk_id_TK)
    out_1D = layer.experts(x_1D, first)
    assert torch.equal(out_1D, layer.experts(y_1D, second))
    assert torch.equal(first.topk_weight_TK, second.topk_weight_TK)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_the_next_launch_starts_after_ids_are_unset(randn, device, monkeypatch):
    """Whatever is in their memory: the first block lets it start after waiting, with ids unset."""
    if device.type == "cuda":
        pytest.skip("watches the emulator")
    layer = Layer(randn, E=12, top_k=3, N=256, D=128)
    launch, seen = runtime.launch, []

    def watched(source, name, grid, block, args, **options):
        ids = args[-4]

        def callback(number, has_waited):
            seen.append((number == 0, bool(has_waited), ids.tolist()))

        handle = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int)(callback)
        library = emulator()
        library.watch_launch_dependents(handle)
        launch(source, name, grid, block, args, **options)
        library.watch_launch_dependents(None)

    monkeypatch.setattr(runtime, "launch", watched)
    layer.route()
    of_first = [entry for entry in seen if entry[0]]
    assert of_first == [(True, True, [[cuda_route.UNSET_BITS] * 3])]
    assert len(seen) > 100  # every thread of the others


def test_what_the_kernel_does_not_take_is_two_launches(monkeypatch, randn):
    taken = []
    monkeypatch.setattr(
        cuda_linear_route,
        "one_after_other",
        lambda _linear, _route, heads_TN, *_: taken.append(heads_TN.shape[0]),
    )
    layer = Layer(randn, E=4, top_k=2, N=128, D=128)
    heads_1N, residual_1D, router = layer.heads_1N, layer.residual_1D, layer.router
    layer.router = replace(router, folded_EM=None)
    layer.route()
    layer.router = replace(router, norm_weight_D=router.norm_weight_D.float())
    layer.route()
    layer.router = router
    layer.heads_1N = heads_1N.float()
    layer.route()
    layer.heads_1N, layer.residual_1D = heads_1N, residual_1D.bfloat16()
    layer.route()
    layer.heads_1N, layer.residual_1D = heads_1N.repeat(2, 1), residual_1D.repeat(2, 1)
    layer.route()
    assert taken == [1, 1, 1, 1, 2]


def test_layers_that_cannot_route_ahead(randn):
    layer = Layer(randn, E=4, top_k=2, N=128, D=128)
    good = (layer.output, layer.router, layer.gate_up, layer.down)
    assert can_route_ahead(*good)
    other = Layer(randn, E=4, top_k=2, N=96, D=96, hidden=96)  # fp8 packs 64 inputs
    assert not can_route_ahead(other.output, *good[1:])
    assert not can_route_ahead(*good[:2], other.gate_up, good[3])
    float_norm = replace(layer.router, norm_weight_D=layer.router.norm_weight_D.float())
    assert not can_route_ahead(good[0], float_norm, *good[2:])


MODELS = {"qwen3-30b-a3b": (8, 4096, 2048, 768, 128), "mixtral-8x7b": (2, 4096, 4096, 14336, 8)}
"""Experts a token, features of heads, features, hidden features, experts."""


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_plans_hold_what_kernels_rely_on(model, weight_format):
    top_k, num_inputs, dim, hidden, num_experts = model
    output = Weight(
        (dim, num_inputs), quantization=weight_format, device="meta", dtype=torch.bfloat16
    )
    plan = cuda_linear_route.plan_output(output)
    plan.check(num_inputs, FORMATS[weight_format])
    assert units_of_thread(num_inputs, plan) <= KEPT_UNITS
    num_blocks, num_parts = blocks_and_parts(plan, output.shape, num_experts)
    assert num_blocks * plan.warps_n * plan.tiles * 16 >= dim
    assert 1 <= num_parts * num_experts <= num_blocks  # a job a block
    name = cuda_linear_route.kernel_name(weight_format, plan, output.shape, num_experts)
    assert ", 0, " not in name  # all of it in registers
    up = plan_up_ahead(top_k, hidden, dim, weight_format)
    up.check(dim, FORMATS[weight_format])
    assert units_of_thread(dim, up) <= KEPT_UNITS
    assert up.depth in cuda_experts.UP_AHEAD_REGISTERS


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_a_layer_of_real_shapes(randn, model, weight_format):
    top_k, num_inputs, dim, hidden, num_experts = model
    hidden = min(hidden, 2048)
    num_experts = min(num_experts, 64)
    layer = Layer(
        randn,
        E=num_experts,
        top_k=top_k,
        N=num_inputs,
        D=dim,
        hidden=hidden,
        weight_format=weight_format,
    )
    layer.check()


@pytest.mark.gpu
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("compiler")
def test_graph_replays_and_eager_steps_give_equal_bits(randn, weight_format, num_layers):
    """Ids change from step to step, and their memory holds those of a step before.

    Each layer's heads come from the layer before, by a launch that waits for it.
    """
    layers = [
        Layer(randn, E=32, top_k=8, N=2048, D=2048, hidden=512, weight_format=weight_format)
        for _ in range(num_layers)
    ]
    start_S1D = randn(8, 1, 2048)
    x_1D = torch.empty_like(start_S1D[0])

    def step(pdl):
        now_1D, ids = x_1D, []
        for layer in layers:
            heads_1N = now_1D.bfloat16()
            now_1D, routing = linear_route(
                heads_1N, layer.output, layer.router, residual_TD=now_1D, pdl=pdl
            )
            now_1D = layer.experts(now_1D, routing, pdl=pdl)
            ids.append(routing.topk_id_TK.clone())
        return now_1D, ids

    def run(s, pdl):
        x_1D.copy_(start_S1D[s])
        out_1D, ids = step(pdl)
        return out_1D.clone(), torch.cat(ids)

    torch.cuda.synchronize()
    expected = [run(s, False) for s in range(8)]
    torch.cuda.synchronize()
    assert len({tuple(ids.flatten().tolist()) for _, ids in expected}) > 1
    for s in range(8):
        out_1D, ids = run(s, True)
        assert torch.equal(ids, expected[s][1]) and torch.equal(out_1D, expected[s][0]), s
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_1D, ids = step(True)
    for i in range(1000):
        s = i % 8
        x_1D.copy_(start_S1D[s])
        out_1D.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out_1D, expected[s][0]), i
        if i % 100 == 0:
            out, _ = run((s + 3) % 8, True)
            assert torch.equal(out, expected[(s + 3) % 8][0]), i


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.usefixtures("compiler")
def test_launches_without_one_between_give_equal_bits(randn, weight_format):
    """Layer after layer with nothing between: all launches start as early as they may, and ids lie
    in one place all the time."""
    layer = Layer(randn, E=32, top_k=8, N=2048, D=2048, hidden=512, weight_format=weight_format)
    heads_SN = randn(8, 2048).bfloat16()

    def chain(pdl):
        x_1D, outs = layer.residual_1D, []
        for s in range(8):
            x_1D, routing = linear_route(
                heads_SN[s : s + 1], layer.output, layer.router, residual_TD=x_1D, pdl=pdl
            )
            x_1D = layer.experts(x_1D, routing, pdl=pdl)
            outs.append(x_1D)
        return torch.cat(outs)

    torch.cuda.synchronize()
    expected_SD = chain(False)
    torch.cuda.synchronize()
    assert torch.equal(chain(True), expected_SD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_SD = chain(True)
    for i in range(1000):
        out_SD.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out_SD, expected_SD), i
