"""The losses that balance experts, against their formulas, and the router that follows them."""

from __future__ import annotations

import math

import pytest
import torch

from subten.train.balance import load_balancing_loss, max_violation, router_z_loss


@pytest.mark.parametrize("num_experts", [1, 4, 7, 8])
def test_even_load_costs_one_and_a_single_expert_costs_their_number(num_experts: int) -> None:
    even = torch.full((2, num_experts), 5.0)
    torch.testing.assert_close(
        load_balancing_loss(even, torch.full((2, num_experts), 1 / num_experts)), torch.ones(2)
    )
    one = torch.zeros(2, num_experts)
    one[:, 0] = 1.0
    expected = torch.full((2,), float(num_experts))
    torch.testing.assert_close(load_balancing_loss(13 * one, one), expected)


def test_the_formula_term_by_term() -> None:
    count = torch.tensor([[3.0, 1.0, 0.0], [2.0, 2.0, 4.0]])
    prob = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    expected = [3 * (0.75 * 0.5 + 0.25 * 0.3), 3 * (0.25 * 0.1 + 0.25 * 0.2 + 0.5 * 0.7)]
    torch.testing.assert_close(load_balancing_loss(count, prob), torch.tensor(expected))


def test_the_gradient_reaches_the_router_through_the_probability_alone() -> None:
    count = torch.tensor([[3.0, 1.0]], requires_grad=True)
    prob = torch.tensor([[0.6, 0.4]], requires_grad=True)
    load_balancing_loss(count, prob).sum().backward()
    assert count.grad is None
    assert prob.grad is not None
    torch.testing.assert_close(prob.grad, torch.tensor([[1.5, 0.5]]))


def test_z_loss_is_the_mean_squared_logsumexp() -> None:
    score = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    expected = (math.log(2.0) ** 2 + math.log(4.0) ** 2) / 2
    assert router_z_loss(score).item() == pytest.approx(expected, rel=1e-6)


def test_max_violation() -> None:
    count = torch.tensor([[5, 5, 5, 5], [10, 6, 4, 0], [0, 0, 0, 8]])
    assert max_violation(count).tolist() == [0.0, 1.0, 3.0]


def test_descent_on_the_loss_evens_out_a_skewed_router(generator: torch.Generator) -> None:
    num_experts, top_k = 8, 2
    x_TD = torch.randn(512, 16, generator=generator)
    x_TD[:, 0] += 3.0
    router = torch.randn(num_experts, 16, generator=generator)
    router[:, 0] = 0.0
    router[0, 0] = 3.0
    router.requires_grad_()
    optimizer = torch.optim.Adam([router], lr=0.02)

    def count_and_prob() -> tuple[torch.Tensor, torch.Tensor]:
        prob_TE = (x_TD @ router.T).softmax(-1)
        chosen = prob_TE.topk(top_k).indices.flatten()
        return torch.bincount(chosen, minlength=num_experts)[None].float(), prob_TE.mean(0)[None]

    before = max_violation(count_and_prob()[0]).item()
    for _ in range(150):
        optimizer.zero_grad()
        load_balancing_loss(*count_and_prob()).sum().backward()
        optimizer.step()
    after = max_violation(count_and_prob()[0]).item()
    assert before > 1.0
    # 150 steps of 0.02 move a row by up to 3, as far as it was skewed.
    assert after < 0.5 * before
