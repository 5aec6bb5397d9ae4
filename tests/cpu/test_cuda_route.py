"""`route` on CUDA against its twin: scores, ties, NaN, odd T and numbers of experts."""

from __future__ import annotations

import pytest
import torch
from cuda_launcher import refuse_launch, use_kernels

from conftest import assert_close
from subten.kernels.cuda import route as cuda_route
from subten.kernels.cuda import runtime
from subten.kernels.cuda.route import keys_of_lane, route
from subten.kernels.route import route_torch

EPS = 1e-6


@pytest.fixture
def compiler():
    if not runtime.has_compiler():
        pytest.skip("needs cuda-bindings and NVRTC")


@pytest.fixture
def kernels(device, monkeypatch):
    use_kernels(device, monkeypatch)


def make(randn, *, T, E, D, dtype=torch.float32):
    x_TD = randn(T, D, dtype=dtype, scale=3.0)
    return x_TD, (1 + 0.2 * randn(D)).bfloat16(), randn(E, D, scale=D**-0.5)


def check(x_TD, norm_weight_D, gate_ED, *, top_k, renormalize, scaling_factor=1.0):
    options = {"eps": EPS, "top_k": top_k, "renormalize": renormalize}
    options["scaling_factor"] = scaling_factor
    routing = route(x_TD, norm_weight_D, gate_ED, **options)
    twin = route_torch(x_TD.double().float(), norm_weight_D, gate_ED, **options)
    assert routing.order_A is None and routing.expert_start_E1 is None
    assert routing.topk_id_TK.dtype == torch.int32
    # Random scores differ by far more than an error of 2^-20 but rarely; compare as sets of
    # weights where two that are next to each other swap.
    is_same_TK = routing.topk_id_TK == twin.topk_id_TK
    assert_close(routing.topk_weight_TK, twin.topk_weight_TK, 1e-5 * scaling_factor, 1e-5)
    gap_TK = twin.topk_weight_TK.diff(dim=-1).abs()
    if gap_TK.numel() and float(gap_TK.min()) > 1e-5:
        assert is_same_TK[:, :-1].all()
    # h is rounded to bfloat16: one step of 2^-8 where FP32 falls on the other side of a middle.
    difference = (routing.h_TD.float() - twin.h_TD.float()).abs()
    assert (difference <= 2.0**-7 * twin.h_TD.float().abs()).all()
    assert (difference > 0).float().mean() < 0.01
    return routing


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_route_of_odd_sizes(randn, num_tokens, renormalize):
    dtype = torch.float32 if num_tokens % 2 else torch.bfloat16
    x_TD, norm_weight_D, gate_ED = make(randn, T=num_tokens, E=7, D=136, dtype=dtype)
    options = {"top_k": 3, "renormalize": renormalize, "scaling_factor": 2.5}
    check(x_TD, norm_weight_D, gate_ED, **options)


@pytest.mark.parametrize("num_experts", [1, 32, 33, 64, 65, 129])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_every_width_of_the_selection(randn, num_experts):
    tensors = make(randn, T=2, E=num_experts, D=16)
    check(*tensors, top_k=min(num_experts, 8), renormalize=True)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_features_past_the_registers(randn):
    check(*make(randn, T=2, E=3, D=4096 + 264), top_k=2, renormalize=True)


@pytest.mark.usefixtures("kernels")
def test_all_experts_may_be_taken(randn):
    routing = check(*make(randn, T=3, E=32, D=64), top_k=32, renormalize=False)
    assert (routing.topk_id_TK.sort().values.cpu() == torch.arange(32)).all()


@pytest.mark.usefixtures("kernels")
def test_ties_go_to_the_lowest_id(randn):
    x_TD, norm_weight_D, gate_ED = make(randn, T=2, E=70, D=64)
    gate_ED[:] = gate_ED[:1]
    routing = route(x_TD, norm_weight_D, gate_ED, eps=EPS, top_k=4, renormalize=True)
    assert routing.topk_id_TK.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("bad", ["one nan", "all nan", "inf", "no finite"])
@pytest.mark.usefixtures("kernels")
def test_a_bad_row_keeps_distinct_ids_and_shows_nan(randn, bad):
    x_TD, norm_weight_D, gate_ED = make(randn, T=3, E=40, D=64)
    norm_weight_D.fill_(1.0)
    if bad == "one nan":
        gate_ED[5] = float("nan")
    elif bad == "inf":
        gate_ED[5] = torch.inf * x_TD[1].sign()
    elif bad == "no finite":
        gate_ED[:] = -torch.inf * x_TD[1].sign()
    else:
        x_TD[1, 3] = float("nan")
    routing = route(x_TD, norm_weight_D, gate_ED, eps=EPS, top_k=8, renormalize=True)
    for ids in routing.topk_id_TK.tolist():
        assert len(set(ids)) == 8 and min(ids) >= 0 and max(ids) < 40, ids
    assert routing.topk_weight_TK[1].isnan().all()
    if bad == "all nan":
        assert routing.topk_weight_TK[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("kernels")
def test_scores_are_unset_after_a_launch(randn):
    tensors = make(randn, T=1, E=4, D=16)
    options = {"eps": EPS, "top_k": 2, "renormalize": True}
    first = route(*tensors, **options)
    scores = cuda_route.unset_scores(tensors[0].device)
    assert (scores.view(torch.int32) == cuda_route.UNSET_BITS).all()
    second = route(*tensors, **options)
    assert torch.equal(first.topk_weight_TK, second.topk_weight_TK)


def test_keys_of_a_lane_cover_the_experts():
    for num_experts in range(1, 1025):
        keys = keys_of_lane(num_experts)
        assert keys in (1, 2, 4, 8, 16, 32) and 32 * keys >= num_experts, num_experts


def test_what_the_kernel_does_not_take_goes_to_triton(monkeypatch, randn):
    taken = []
    monkeypatch.setattr(cuda_route.triton_route, "route", lambda *a, **k: taken.append((a, k)))
    monkeypatch.setattr(cuda_route.runtime, "launch", refuse_launch)
    options = {"eps": EPS, "top_k": 2, "renormalize": True}
    x_TD, norm_weight_D, gate_ED = make(randn, T=2, E=4, D=16)
    route(x_TD, norm_weight_D, gate_ED, **options, with_order=True)
    route(x_TD, norm_weight_D.float(), gate_ED, **options)
    route(x_TD, norm_weight_D, gate_ED.bfloat16(), **options)
    route(*make(randn, T=9, E=4, D=16), **options)
    route(*make(randn, T=1, E=4, D=12), **options)
    assert len(taken) == 5 and taken[0][1]["with_order"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize(
    ("num_experts", "dim", "top_k"), [(128, 2048, 8), (8, 4096, 2), (512, 2048, 10)]
)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_route_of_real_shapes(randn, num_tokens, num_experts, dim, top_k):
    tensors = make(randn, T=num_tokens, E=num_experts, D=dim)
    check(*tensors, top_k=top_k, renormalize=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
def test_graph_replays_give_equal_bits(randn):
    """Launches back to back share the scores."""
    x_TD, norm_weight_D, gate_ED = make(randn, T=2, E=128, D=2048)
    options = {"eps": EPS, "top_k": 8, "renormalize": True}
    torch.cuda.synchronize()
    expected = route(x_TD, norm_weight_D, gate_ED, **options, pdl=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [route(x_TD, norm_weight_D, gate_ED, **options) for _ in range(4)]
    for i in range(1000):
        for routing in got:
            routing.topk_weight_TK.fill_(float("nan"))
            routing.topk_id_TK.fill_(-1)
        graph.replay()
        for routing in got:
            assert torch.equal(routing.topk_id_TK, expected.topk_id_TK), i
            assert torch.equal(routing.topk_weight_TK, expected.topk_weight_TK), i
            assert torch.equal(routing.h_TD, expected.h_TD), i
