"""Routing against FP64 mathematics written here, and the inputs that broke other routers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import assert_close
from subten.kernels import route as route_module
from subten.kernels.route import FEW_TOKENS, Routing, route, route_torch
from subten.kernels.route_many import choose_many, order_by_expert

OPS = [route_torch, pytest.param(route, marks=pytest.mark.triton)]
# Overflow and NaN are what some of these inputs are for.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DTYPES = [torch.float32, torch.bfloat16]
MANY = FEW_TOKENS + 1


def check_against_fp64(routing: Routing, x: torch.Tensor, weight: torch.Tensor, **kwargs: Any):
    """Scores within FP32 of the exact ones, so ids may differ only where scores nearly tie."""
    gate, top_k = kwargs["gate"].double(), kwargs["top_k"]
    num_tokens, dim = x.shape
    x64 = x.double()
    h = x64 / (x64.square().mean(dim=-1, keepdim=True) + kwargs["eps"]).sqrt() * weight.double()
    # h goes to the experts in the weight's dtype: FP32 in about 16 roundings, bfloat16 in one of
    # 2**-8, twice that in the interpreter, which truncates.
    unit = 16 * 2.0**-24 if weight.dtype == torch.float32 else 2.0**-7
    assert routing.h_TD.dtype == weight.dtype
    largest = float(h.abs().max()) if h.numel() else 0.0
    assert_close(routing.h_TD, h, unit * largest, unit * largest, "h")

    score = h @ gate.T
    # A sum of D products in FP32, its roundings independent: 8 standard deviations.
    size = float((h.abs() @ gate.abs().T).max()) if h.numel() else 0.0
    slack = (8 * dim**-0.5 + 16) * 2.0**-24 * size
    ids = routing.topk_id_TK.long()
    assert routing.topk_id_TK.dtype == torch.int32
    assert ids.shape == (num_tokens, top_k)
    assert bool(((ids >= 0) & (ids < gate.shape[0])).all())
    assert all(len(set(row)) == top_k for row in ids.tolist())
    chosen = score.gather(1, ids)
    assert bool((chosen[:, :-1] >= chosen[:, 1:] - 2 * slack).all()), "best first"
    rest = score.scatter(1, ids, -torch.inf).amax(dim=-1, keepdim=True)
    assert bool((chosen >= rest - 2 * slack).all()), "a better expert was left out"

    expected = score.softmax(dim=-1).gather(1, ids)
    if kwargs["renormalize"]:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    expected = expected * kwargs["scaling_factor"]
    # d(weight) <= 2 * weight * d(score); exp and the division add a few roundings.
    error = (2 * slack + 16 * 2.0**-24) * kwargs["scaling_factor"]
    assert_close(routing.topk_weight_TK, expected, error, error, "weights")


def check_order(routing: Routing, num_experts: int) -> None:
    """A stable counting sort, done here with lists."""
    flat = routing.topk_id_TK.flatten().tolist()
    expected = [a for e in range(num_experts) for a, expert in enumerate(flat) if expert == e]
    starts = [sum(expert < e for expert in flat) for e in range(num_experts + 1)]
    assert routing.order_A is not None
    assert routing.expert_start_E1 is not None
    assert routing.order_A.dtype == routing.expert_start_E1.dtype == torch.int32
    assert routing.order_A.tolist() == expected
    assert routing.expert_start_E1.tolist() == starts


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "dim"),
    [
        (1, 1, 1, 16),
        (1, 8, 2, 61),
        (3, 5, 5, 64),
        (2, 128, 8, 65),
        (1, 512, 22, 32),
        (MANY, 3, 1, 48),
        (MANY, 60, 4, 33),
        (2 * MANY, 7, 6, 100),
        # Slices of the features, a last one that is not whole; two tiles of tokens; of experts.
        (MANY, 9, 3, 300),
        (65, 5, 2, 64),
        (MANY, 130, 4, 40),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_route_is_the_formula(
    op: Callable[..., Routing],
    num_tokens: int,
    num_experts: int,
    top_k: int,
    dim: int,
    randn: Callable[..., torch.Tensor],
) -> None:
    # Both dtypes of each input and both kinds of weights over the cases.
    x = randn(num_tokens, dim, dtype=DTYPES[num_experts % 2])
    weight = randn(dim, dtype=DTYPES[num_tokens % 2])
    gate = randn(num_experts, dim, dtype=DTYPES[dim % 2], scale=2.0 * dim**-0.5)
    kwargs: dict[str, Any] = {
        "eps": 1e-5,
        "top_k": top_k,
        "renormalize": top_k % 2 == 0,
        "scaling_factor": 1.0 if dim % 2 else 2.5,
    }
    routing = op(x, weight, gate, with_order=True, **kwargs)
    check_against_fp64(routing, x, weight, gate=gate, **kwargs)
    check_order(routing, num_experts)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (700, 7, 6), (4097, 2, 1), (37, 33, 32)]
)
@pytest.mark.usefixtures("poisoned")
def test_order_of_any_length(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    generator: torch.Generator,
    device: torch.device,
) -> None:
    """One block of assignments, several, and one past; most experts have none of a half."""
    score = torch.rand(num_tokens, num_experts, generator=generator)
    score[: num_tokens // 2, num_experts // 2 :] -= 1.0
    id_TK = score.topk(top_k).indices.int().to(device)
    routing = Routing(
        h_TD=torch.zeros(0),
        topk_id_TK=id_TK,
        topk_weight_TK=torch.zeros(0),
        expert_start_E1=torch.empty(num_experts + 1, dtype=torch.int32, device=device),
        order_A=torch.empty(id_TK.numel(), dtype=torch.int32, device=device),
    )
    assert routing.expert_start_E1 is not None
    assert routing.order_A is not None
    order_by_expert(id_TK, routing.expert_start_E1, routing.order_A)
    check_order(routing, num_experts)


def test_tiles_cover_features_and_fill_the_gpu() -> None:
    for num_tokens, num_experts, dim in itertools.product(
        (17, 512, 8192), (1, 8, 128, 513), (1, 127, 2048, 4096)
    ):
        launch = choose_many(num_tokens, num_experts, dim)
        assert launch.slice * (launch.num_slices - 1) < dim <= launch.slice * launch.num_slices
    assert choose_many(512, 128, 2048).num_slices == 8


# Every expert count and every top-k that broke others, each at least once: a kernel is compiled
# for each pair.
EXPERTS_AND_TOP_K = [
    *[(1, 1), (2, 1), (2, 2), (3, 2), (5, 4), (6, 6), (7, 1), (12, 10), (60, 4), (64, 6)],
    *[(96, 8), (128, 8), (160, 6), (256, 8), (512, 10), (512, 22)],
]


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(("num_experts", "top_k"), EXPERTS_AND_TOP_K)
@pytest.mark.parametrize("num_tokens", [1, FEW_TOKENS, 300])
@pytest.mark.usefixtures("poisoned")
def test_expert_count_is_any_number(
    num_experts: int, top_k: int, num_tokens: int, randn: Callable[..., torch.Tensor]
) -> None:
    x, weight = randn(num_tokens, 2048, dtype=torch.bfloat16), randn(2048, dtype=torch.bfloat16)
    gate = randn(num_experts, 2048, scale=2048**-0.5)
    kwargs: dict[str, Any] = {
        "eps": 1e-6,
        "top_k": top_k,
        "renormalize": True,
        "scaling_factor": 1.0,
    }
    routing = route(x, weight, gate, with_order=True, **kwargs)
    check_against_fp64(routing, x, weight, gate=gate, **kwargs)
    check_order(routing, num_experts)


def route_scores(op: Callable[..., Routing], scores: list[float], **kwargs: Any) -> Routing:
    """Exactly these scores: x of ones, eps 0, the scores as norm weights, a unit matrix as gate."""
    device = kwargs.pop("device")
    num_tokens = kwargs.pop("num_tokens", 1)
    x = torch.ones(num_tokens, len(scores), device=device)
    gate = torch.eye(len(scores), device=device)
    return op(x, torch.tensor(scores, device=device), gate, eps=0.0, **kwargs)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [1, MANY])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scaling_factor", [1.0, 2.5])
def test_renormalizing_and_scaling_are_independent(
    op: Callable[..., Routing],
    num_tokens: int,
    renormalize: bool,
    scaling_factor: float,
    device: torch.device,
) -> None:
    scores = [2.0, 1.0, -3.0, 0.0]
    routing = route_scores(
        op,
        scores,
        top_k=2,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        num_tokens=num_tokens,
        device=device,
    )
    softmax = torch.tensor(scores, dtype=torch.float64).softmax(dim=0)[:2]
    expected = (softmax / softmax.sum() if renormalize else softmax) * scaling_factor
    assert routing.topk_id_TK.tolist() == [[0, 1]] * num_tokens
    assert_close(routing.topk_weight_TK, expected.expand(num_tokens, 2), 2.5e-6, 2.5e-6, "weights")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [1, MANY])
def test_scores_are_not_rounded_to_the_activations(
    op: Callable[..., Routing], num_tokens: int, device: torch.device
) -> None:
    x = torch.tensor([[1.0, 1.001, 1.002, 1.003]], device=device).repeat(num_tokens, 1)
    weight = torch.ones(4, dtype=torch.bfloat16, device=device)
    gate = torch.eye(4, device=device)
    routing = op(x, weight, gate, eps=0.0, top_k=2, renormalize=True)
    # bfloat16 cannot tell the four apart: h shows it, the choice must not.
    assert routing.h_TD.dtype == torch.bfloat16
    assert len(routing.h_TD.unique()) <= 2
    assert routing.topk_id_TK.tolist() == [[3, 2]] * num_tokens


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [1, MANY])
def test_ties_go_to_the_lowest_id(
    op: Callable[..., Routing], num_tokens: int, device: torch.device
) -> None:
    for scores, expected in (
        ([1.0] * 4, [0, 1, 2]),
        ([0.0, 2.0, 1.0, 2.0, 2.0], [1, 3, 4]),
        ([-5.0, -7.0, -5.0, -7.0, -7.0, -7.0], [0, 2, 1]),
    ):
        routing = route_scores(
            op, scores, top_k=3, renormalize=True, num_tokens=num_tokens, device=device
        )
        assert routing.topk_id_TK.tolist() == [expected] * num_tokens
    # -0.0 and 0.0 are equal numbers.
    x = torch.full((num_tokens, 1), -1.0, device=device)
    gate = torch.tensor([[0.0], [-0.0], [0.0]], device=device)
    routing = op(x, x.new_ones(1), gate, eps=0.0, top_k=3, renormalize=True)
    assert routing.topk_id_TK.tolist() == [[0, 1, 2]] * num_tokens


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("repeats", [1, 8])
@pytest.mark.parametrize("top_k", [2, 5])
def test_bad_rows_keep_valid_experts(
    op: Callable[..., Routing], repeats: int, top_k: int, device: torch.device
) -> None:
    # h is about 2, -2, NaN, 0, NaN in the rows, so the scores overflow to +inf and -inf.
    x = torch.tensor([[1.0], [-1.0], [torch.nan], [0.0], [torch.inf]], device=device)
    x = x.repeat(repeats, 1)
    gate = torch.full((5, 1), 3e38, device=device)
    routing = op(
        x, x.new_full((1,), 2.0), gate, eps=1e-6, top_k=top_k, renormalize=False, with_order=True
    )
    assert routing.topk_id_TK.tolist() == [list(range(top_k))] * (5 * repeats)
    is_nan = routing.topk_weight_TK.isnan()
    expected = torch.tensor([True, True, True, False, True], device=device).repeat(repeats)
    assert torch.equal(is_nan, expected[:, None].expand_as(is_nan))
    good = routing.topk_weight_TK[~expected]
    assert_close(good, torch.full_like(good, 0.2), 1e-7, 1e-7, "the good row")
    check_order(routing, 5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [1, MANY])
def test_single_bad_scores_sort_last(
    op: Callable[..., Routing], num_tokens: int, device: torch.device
) -> None:
    gate = torch.tensor([[torch.nan], [1.0], [-3e38], [3e38], [2.0]], device=device)
    x = torch.ones(num_tokens, 1, device=device)
    routing = op(x, x.new_full((1,), 2.0), gate, eps=0.0, top_k=5, renormalize=True)
    # +inf, 4, 2, then NaN beside -inf in the order of their ids.
    assert routing.topk_id_TK.tolist() == [[3, 4, 1, 0, 2]] * num_tokens
    assert bool(routing.topk_weight_TK.isnan().all())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [1, MANY])
@pytest.mark.parametrize("renormalize", [False, True])
def test_a_nan_that_is_not_chosen_still_tells(
    op: Callable[..., Routing], num_tokens: int, renormalize: bool, device: torch.device
) -> None:
    gate = torch.tensor([[1.0], [torch.nan], [2.0], [0.0]], device=device)
    x = torch.ones(num_tokens, 1, device=device)
    routing = op(x, x.new_ones(1), gate, eps=0.0, top_k=2, renormalize=renormalize)
    assert routing.topk_id_TK.tolist() == [[2, 0]] * num_tokens
    assert bool(routing.topk_weight_TK.isnan().all())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned")
def test_no_tokens(
    op: Callable[..., Routing], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing may launch: an empty grid is an error on a GPU.
    monkeypatch.setattr(route_module, "_route_few_kernel", None)
    monkeypatch.setattr(route_module, "route_many", None)
    monkeypatch.setattr(route_module, "order_by_expert", None)
    x, gate = torch.ones(0, 64, device=device), torch.ones(3, 64, device=device)
    routing = op(x, gate[0], gate, eps=1e-5, top_k=2, renormalize=True, with_order=True)
    assert routing.h_TD.shape == (0, 64)
    assert routing.topk_id_TK.shape == routing.topk_weight_TK.shape == (0, 2)
    assert routing.expert_start_E1 is not None
    assert routing.expert_start_E1.tolist() == [0, 0, 0, 0]
    assert routing.order_A is not None
    assert routing.order_A.shape == (0,)


@pytest.mark.triton
@pytest.mark.parametrize("num_tokens", [2, MANY])
def test_strided_inputs(num_tokens: int, randn: Callable[..., torch.Tensor]) -> None:
    big, gates, weight = randn(20, 40), randn(40, 40), randn(40)[::2]
    kwargs: dict[str, Any] = {"eps": 1e-5, "top_k": 2, "renormalize": True}
    x_views = (big[:num_tokens, ::2], big.t()[:num_tokens], big[:num_tokens, 7:27])
    gate_views = (gates[:6, ::2], gates[:20, :6].t(), gates[3:9, 5:25])
    for x, gate in zip(x_views, gate_views, strict=True):
        actual = route(x, weight, gate, **kwargs)
        expected = route(x.contiguous(), weight.contiguous(), gate.contiguous(), **kwargs)
        assert torch.equal(actual.topk_id_TK, expected.topk_id_TK)
        # On a GPU other strides may change the order of a sum of 20 terms.
        assert_close(actual.topk_weight_TK, expected.topk_weight_TK, 1e-5, 1e-5, "weights")
        assert_close(actual.h_TD, expected.h_TD, 1e-5, 1e-5, "h")


@pytest.mark.triton
@pytest.mark.parametrize("num_tokens", [3, MANY])
def test_counters_return_to_zero(
    num_tokens: int, randn: Callable[..., torch.Tensor], device: torch.device
) -> None:
    x, weight, gate = randn(num_tokens, 32), randn(32), randn(9, 32)
    for _ in range(2):
        routing = route(x, weight, gate, eps=1e-5, top_k=3, renormalize=True, with_order=True)
        check_order(routing, 9)
        assert not route_module._counters(device).any()


@pytest.mark.triton
def test_a_token_does_not_depend_on_its_batch(randn: Callable[..., torch.Tensor]) -> None:
    x, weight, gate = randn(5, 48), randn(48), randn(12, 48)
    kwargs: dict[str, Any] = {"eps": 1e-5, "top_k": 4, "renormalize": True}
    together = route(x, weight, gate, **kwargs)
    alone = route(x[3:4], weight, gate, **kwargs)
    assert torch.equal(alone.topk_id_TK, together.topk_id_TK[3:4])
    assert torch.equal(alone.topk_weight_TK, together.topk_weight_TK[3:4])
    assert torch.equal(alone.h_TD, together.h_TD[3:4])


def test_twin_passes_gradients(randn: Callable[..., torch.Tensor]) -> None:
    x, weight, gate = (
        randn(3, 16).requires_grad_(),
        randn(16).requires_grad_(),
        randn(5, 16, scale=0.3).requires_grad_(),
    )
    routing = route_torch(x, weight, gate, eps=1e-5, top_k=2, renormalize=True, scaling_factor=2.5)
    towards = randn(3, 2)
    actual = torch.autograd.grad((routing.topk_weight_TK * towards).sum(), (x, weight, gate))
    x64 = x.double()
    h = x64 / (x64.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    chosen = (h @ gate.double().T).gather(1, routing.topk_id_TK.long())
    # Renormalised weights are a softmax over the chosen scores alone.
    expected = torch.autograd.grad(
        (2.5 * chosen.softmax(dim=-1) * towards.double()).sum(), (x, weight, gate)
    )
    for left, right in zip(actual, expected, strict=True):
        # Tens of FP32 operations on values of a few units.
        assert_close(left, right, 1e-5, 1e-5, "gradient")
