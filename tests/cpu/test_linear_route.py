"""The output product and the router as one op, and the router folded through the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from routed_ahead import linear_route_folded

from subten.kernels import weight_formats
from subten.kernels.linear import linear, linear_torch
from subten.kernels.linear_route import Router, fold_router, linear_route, linear_route_torch
from subten.kernels.route import route, route_torch
from subten.kernels.weight_formats import WEIGHT_FORMATS, Weight

PARTS = [
    (linear_route_torch, linear_torch, route_torch),
    pytest.param(linear_route, linear, route, marks=pytest.mark.triton),
]
HALF_ULP = 2.0**-24
"""Of a float32, relative: what one rounding may change."""


class Case:
    """Heads of T tokens, an output matrix in a format and a router, all random."""

    def __init__(
        self,
        generator: torch.Generator,
        device: torch.device,
        sizes: tuple[int, int, int, int],
        *,
        quantization: str = "none",
        top_k: int = 1,
    ) -> None:
        num_tokens, num_heads, dim, num_experts = sizes

        def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(device)

        self.heads_TN = randn(num_tokens, num_heads).bfloat16()
        self.residual_TD = randn(num_tokens, dim)
        matrix = randn(dim, num_heads, std=num_heads**-0.5).bfloat16()
        self.output = Weight.of(matrix, quantization)
        self.router = Router(
            norm_weight_D=(1 + 0.3 * randn(dim)).bfloat16(),
            gate_ED=randn(num_experts, dim, std=dim**-0.5),
            eps=1e-6,
            top_k=top_k,
            renormalize=bool(torch.randint(2, (), generator=generator)),
            scaling_factor=1.5,
        )

    @property
    def folded(self) -> Router:
        router = self.router
        folded_EM = fold_router(router.gate_ED, router.norm_weight_D, self.output)
        return replace(router, folded_EM=folded_EM)

    @property
    def normed_gate_ED(self) -> torch.Tensor:
        return self.router.gate_ED.double() * self.router.norm_weight_D.double()

    @property
    def score_TE(self) -> torch.Tensor:
        """g . w * (x + W a) in float64, less the factor that the norm gives all experts."""
        x_TD = self.residual_TD.double()
        x_TD = x_TD + self.heads_TN.double() @ self.output.dequantize().double().T
        return x_TD @ self.normed_gate_ED.T


@pytest.mark.parametrize(("op", "product", "choice"), PARTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 17])
def test_the_op_is_its_two_parts(
    op: Callable[..., Any],
    product: Callable[..., Any],
    choice: Callable[..., Any],
    num_tokens: int,
    generator: torch.Generator,
    device: torch.device,
) -> None:
    case = Case(generator, device, (num_tokens, 64, 40, 5), quantization="fp8", top_k=3)
    residual_TD, router = case.residual_TD, case.router
    x_TD, routing = op(
        case.heads_TN,
        case.output,
        # What is folded must not matter here.
        replace(router, folded_EM=torch.full((5, 104), torch.nan, device=device)),
        residual_TD=residual_TD,
    )
    wanted_TD = product(case.heads_TN, case.output, residual_TN=residual_TD)
    wanted = choice(
        wanted_TD,
        router.norm_weight_D,
        router.gate_ED,
        eps=router.eps,
        top_k=3,
        renormalize=router.renormalize,
        scaling_factor=1.5,
    )
    assert torch.equal(x_TD, wanted_TD)
    assert routing.ahead is None
    for name in ("h_TD", "topk_id_TK", "topk_weight_TK", "order_A", "expert_start_E1"):
        got, expected = getattr(routing, name), getattr(wanted, name)
        assert (got is None) == (expected is None) == (name[0] in "oe"), name
        assert got is None or torch.equal(got, expected), name


@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize("sizes", [(64, 16, 1), (128, 67, 8), (192, 65, 13)])
@pytest.mark.parametrize("chunk", [1, 1000, 2**20])
def test_the_fold_is_one_rounding_from_exact(
    quantization: str,
    sizes: tuple[int, int, int],
    chunk: int,
    generator: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_formats, "CHUNK_ELEMENTS", {"cpu": chunk, "cuda": chunk})
    case = Case(generator, device, (3, *sizes), quantization=quantization)
    folded_EM = case.folded.folded_EM
    assert folded_EM is not None
    assert folded_EM.dtype == torch.float32 and folded_EM.is_contiguous()
    gate_ED, matrix_DN = case.normed_gate_ED, case.output.dequantize().double()
    exact_EM = torch.cat([gate_ED @ matrix_DN, gate_ED], dim=1)
    # One rounding, and float64 sums of D terms in another order.
    terms_EM = torch.cat([gate_ED.abs() @ matrix_DN.abs(), gate_ED.abs()], dim=1)
    bound_EM = HALF_ULP * exact_EM.abs() + sizes[1] * 2.0**-52 * terms_EM
    assert ((folded_EM.double() - exact_EM).abs() <= bound_EM).all()
    # So a score moves by half a unit of its terms at most, whatever a token's heads and residual.
    both_TM = torch.cat([case.heads_TN.double(), case.residual_TD.double()], dim=1)
    moved_TE = (both_TM @ folded_EM.double().T - case.score_TE).abs()
    assert (moved_TE <= 1.01 * both_TM.abs() @ (HALF_ULP * folded_EM.double().abs().T)).all()


@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (31, 31), (129, 8)])
def test_experts_chosen_by_the_fold_are_the_best(
    quantization: str,
    num_experts: int,
    top_k: int,
    generator: torch.Generator,
    device: torch.device,
) -> None:
    sizes = (64, 128, 96, num_experts)
    case = Case(generator, device, sizes, quantization=quantization, top_k=top_k)
    router = case.folded
    x_TD, routing = linear_route_folded(
        case.heads_TN, case.output, router, residual_TD=case.residual_TD
    )
    id_TK, exact_TE = routing.topk_id_TK.long(), case.score_TE
    assert router.folded_EM is not None
    both_TM = torch.cat([case.heads_TN.float(), case.residual_TD], dim=1).double()
    num_terms = both_TM.shape[1]
    # A float32 sum of M products in any order, and the rounding of the fold itself.
    bound_TE = (num_terms + 2) * HALF_ULP * (both_TM.abs() @ router.folded_EM.double().abs().T)
    chosen_TK, best_TK = exact_TE.gather(1, id_TK), exact_TE.topk(top_k).values
    # Where two scores are closer than that, either may come first.
    assert ((best_TK - chosen_TK).abs() <= 2 * bound_TE.amax(1, keepdim=True)).all()
    # And the whole op, whose scores come from x as it is rounded, agrees but for near ties.
    plain_TD, plain = linear_route_torch(
        case.heads_TN, case.output, case.router, residual_TD=case.residual_TD
    )
    assert torch.equal(x_TD, plain_TD)
    same_T = (plain.topk_id_TK == routing.topk_id_TK).all(dim=1)
    # `none` rounds the product to bfloat16 before it is added: half a unit of it moves each score.
    product_TD = (x_TD - case.residual_TD).double().abs()
    rounding = 2.0**-8 if quantization == "none" else 2.0**-20
    inverse_T1 = (x_TD.double().square().mean(dim=-1, keepdim=True) + router.eps).rsqrt()
    moved_TE = inverse_T1 * (rounding * product_TD @ case.normed_gate_ED.abs().T + 2 * bound_TE)
    weight_TK, plain_TK = routing.topk_weight_TK.double(), plain.topk_weight_TK.double()
    # Of a softmax over scores that move by m, each entry moves by a factor of e^2m at most; where
    # it is divided by the sum of the chosen by e^2m too, and 1e-5 is for float32 exponentials.
    allowed_T1 = (2 * moved_TE.amax(1, keepdim=True)).exp() * (1 + 1e-5)
    ratio_TK = (weight_TK / plain_TK)[same_T]
    assert (torch.maximum(ratio_TK, 1 / ratio_TK) <= allowed_T1[same_T]).all()
    gap_T = -exact_TE.sort(dim=1, descending=True).values.diff(dim=1)[:, :top_k]
    if num_experts > 1:
        is_clear_T = (gap_T * inverse_T1).amin(dim=1) > 2 * moved_TE.amax(dim=1)
        assert same_T[is_clear_T].all()
