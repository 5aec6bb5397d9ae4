"""The router of a batch on CUDA against its twin: scores, order, ties, NaN, odd sizes.

On a CPU the kernel's own source runs in an emulator, the blocks of a cluster together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_launcher import emulator, refuse_launch, use_kernels
from test_cuda_route import EPS, make

from conftest import assert_close
from subten.kernels.cuda import route as cuda_route
from subten.kernels.cuda import route_batch, runtime
from subten.kernels.cuda.route_batch import TOKENS, route, suits, tokens_of_cluster
from subten.kernels.route import route_torch

HERE = Path(__file__).parent
EMULATOR = (HERE / "route_batch_emulation", HERE / "grouped_emulation")


def emulated_launch(
    source, name, grid, block, args, *, device, shared_bytes=0, pdl=False, cluster=1
):
    """`runtime.launch` of route_batch.cu on the CPU."""
    assert source == "route_batch.cu" and device.type == "cpu" and isinstance(pdl, bool), source
    values = [runtime.pack_argument(arg) for arg in args]
    pointers = runtime.pointer_array(values)
    library = emulator(*EMULATOR)
    failed = library.emulate(name.encode(), *grid, 1, block, shared_bytes, cluster, pointers)
    assert not failed, f"the emulator does not hold {name}"


@pytest.fixture
def kernels(device, monkeypatch):
    """The kernel on the GPU, or emulated."""
    use_kernels(device, monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(runtime, "launch", emulated_launch)


def check(x_TD, norm_weight_D, gate_ED, *, top_k, renormalize=True, with_order=True):
    """Against the twin; the order against the ids that were picked."""
    options = {"eps": EPS, "top_k": top_k, "renormalize": renormalize, "scaling_factor": 2.5}
    routing = route(x_TD, norm_weight_D, gate_ED, with_order=with_order, **options)
    twin = route_torch(x_TD, norm_weight_D, gate_ED, **options)
    # Sums of some hundred terms in FP32, of scores of about 3: 2^-20 of a weight below 2.5.
    assert_close(routing.topk_weight_TK, twin.topk_weight_TK, 2.5e-5, 1e-5)
    gap_TK = twin.topk_weight_TK.diff(dim=-1).abs()
    is_clear_T = (gap_TK > 1e-4).all(dim=-1)
    is_same_TK = routing.topk_id_TK == twin.topk_id_TK
    assert bool(is_same_TK[is_clear_T][:, :-1].all())
    # h is rounded to bfloat16: one step of 2^-8 where FP32 falls on the other side of a middle.
    difference = (routing.h_TD.float() - twin.h_TD.float()).abs()
    assert (difference <= 2.0**-7 * twin.h_TD.float().abs()).all()
    assert (difference > 0).float().mean() < 0.01
    if not with_order:
        assert routing.order_A is None and routing.expert_start_E1 is None
        return routing
    id_A, order_A = routing.topk_id_TK.flatten().sort(stable=True)
    assert torch.equal(routing.order_A, order_A.int())
    edge_E1 = torch.arange(gate_ED.shape[0] + 1, device=id_A.device, dtype=torch.int32)
    assert torch.equal(routing.expert_start_E1, torch.searchsorted(id_A, edge_E1).int())
    assert int(route_batch._arrivals(x_TD.device)) == 0
    return routing


@pytest.mark.parametrize("num_tokens", [1, 9, 17, 64, 65])
@pytest.mark.parametrize("with_order", [False, True])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_route_of_odd_sizes(randn, num_tokens, with_order):
    dtype = torch.float32 if num_tokens % 2 else torch.bfloat16
    tensors = make(randn, T=num_tokens, E=37, D=128, dtype=dtype)
    check(*tensors, top_k=3, renormalize=with_order, with_order=with_order)


@pytest.mark.parametrize("num_experts", [1, 8, 33, 128, 129])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_every_kernel(monkeypatch, randn, num_experts, tokens):
    """Experts that are no power of two, clusters of every size, one of which is not full."""
    monkeypatch.setattr(route_batch, "tokens_of_cluster", lambda _: tokens)
    tensors = make(randn, T=tokens + 3, E=num_experts, D=320)
    check(*tensors, top_k=min(num_experts, 8))


@pytest.mark.usefixtures("kernels")
def test_a_token_has_the_same_bits_in_any_company(monkeypatch, randn):
    x_TD, norm_weight_D, gate_ED = make(randn, T=33, E=16, D=192)
    options = {"eps": EPS, "top_k": 4, "renormalize": True, "scaling_factor": 1.0}
    run = lambda rows: route(x_TD[rows], norm_weight_D, gate_ED, with_order=False, **options)  # noqa: E731
    together = run(slice(None))
    for tokens in TOKENS:
        monkeypatch.setattr(route_batch, "tokens_of_cluster", lambda _, n=tokens: n)
        for rows in (slice(0, 9), slice(11, 33)):
            alone = run(rows)
            assert torch.equal(alone.h_TD, together.h_TD[rows])
            assert torch.equal(alone.topk_weight_TK, together.topk_weight_TK[rows])


@pytest.mark.usefixtures("kernels")
def test_ties_go_to_the_lowest_id(randn):
    x_TD, norm_weight_D, gate_ED = make(randn, T=9, E=64, D=64)
    routing = check(x_TD, norm_weight_D, gate_ED[:1].repeat(64, 1), top_k=5)
    assert (routing.topk_id_TK.cpu() == torch.arange(5)).all()


@pytest.mark.usefixtures("kernels")
def test_a_bad_row_keeps_distinct_ids_and_shows_nan(randn):
    x_TD, norm_weight_D, gate_ED = make(randn, T=12, E=40, D=64)
    x_TD[5, 3] = torch.nan
    options = {"eps": EPS, "top_k": 4, "renormalize": True, "scaling_factor": 1.0}
    routing = route(x_TD, norm_weight_D, gate_ED, with_order=True, **options)
    assert bool(routing.topk_weight_TK[5].isnan().all())
    assert bool(routing.topk_weight_TK[torch.arange(12) != 5].isfinite().all())
    id_TK = routing.topk_id_TK.sort().values
    assert bool((id_TK.diff() > 0).all()) and 0 <= int(id_TK.min()) <= int(id_TK.max()) < 40
    assert torch.equal(routing.order_A.sort().values.cpu(), torch.arange(48, dtype=torch.int32))


def test_clusters_hold_the_tokens():
    for num_tokens in (1, 9, 32, 48, 49, 96):
        tokens = tokens_of_cluster(num_tokens)
        assert num_tokens <= tokens * route_batch.CLUSTERS or tokens == TOKENS[-1]


def test_who_serves_how_many_tokens(monkeypatch, randn):
    """The kernel of few tokens up to 8 without order, this one up to MAX_TOKENS, above Triton."""
    taken = []
    monkeypatch.setattr(runtime, "launch", lambda source, *_, **__: taken.append(source))
    monkeypatch.setattr(cuda_route.triton_route, "route", lambda *_, **__: taken.append("triton"))
    for num_tokens, with_order in ((8, False), (8, True), (9, False), (96, True), (97, True)):
        tensors = make(randn, T=num_tokens, E=8, D=64)
        options = {"eps": EPS, "top_k": 2, "renormalize": True, "with_order": with_order}
        cuda_route.route(*tensors, **options)
    assert taken == ["route.cu", *["route_batch.cu"] * 3, "triton"]


def test_what_the_kernel_does_not_take(monkeypatch, randn):
    monkeypatch.setattr(runtime, "launch", refuse_launch)
    x_TD, norm_weight_D, gate_ED = make(randn, T=9, E=8, D=64)
    assert suits(x_TD, norm_weight_D, gate_ED, 2)
    for change in (
        (x_TD.half(), norm_weight_D, gate_ED),
        (x_TD.mT.contiguous().mT, norm_weight_D, gate_ED),
        (x_TD, norm_weight_D.float(), gate_ED),
        (x_TD, norm_weight_D, gate_ED.bfloat16()),
        make(randn, T=9, E=8, D=72),
        make(randn, T=9, E=257, D=64),
        make(randn, T=9, E=128, D=4096),  # shared memory
        make(randn, T=97, E=8, D=64),
    ):
        assert not suits(*change, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [9, 32, 64, 96])
@pytest.mark.parametrize(("num_experts", "dim", "top_k"), [(128, 2048, 8), (8, 4096, 2)])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_route_of_real_shapes(randn, num_tokens, num_experts, dim, top_k):
    check(*make(randn, T=num_tokens, E=num_experts, D=dim), top_k=top_k)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [32, 96])
def test_graph_replays_give_equal_bits(randn, num_tokens):
    x_TD, norm_weight_D, gate_ED = make(randn, T=num_tokens, E=128, D=2048)
    options = {"eps": EPS, "top_k": 8, "renormalize": True, "scaling_factor": 1.0}
    torch.cuda.synchronize()
    run = lambda: route(x_TD, norm_weight_D, gate_ED, with_order=True, **options)  # noqa: E731
    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run() for _ in range(3)]
    for _ in range(100):
        for out in outs:
            out.order_A.fill_(-1)
        graph.replay()
        for out in outs:
            assert torch.equal(out.order_A, expected.order_A)
            assert torch.equal(out.topk_weight_TK, expected.topk_weight_TK)
            assert torch.equal(out.h_TD, expected.h_TD)
