"""The CPU's matrix product: accuracy, gradients, and bits that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from conftest import assert_close
from subten.kernels.cpu_linear import CHUNK_ROWS, EXACT_TOKENS, FEW_ROWS, cpu_linear, head_logits


@pytest.mark.parametrize("num_rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("num_out", [1, 61, CHUNK_ROWS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_a_matrix_product(
    num_rows: int, num_out: int, has_bias: bool, randn: Callable[..., torch.Tensor]
) -> None:
    x = randn(num_rows, 67, dtype=torch.bfloat16)
    weight = randn(num_out, 67, dtype=torch.bfloat16, scale=67**-0.5)
    bias = randn(num_out, dtype=torch.bfloat16) if has_bias else None
    actual = cpu_linear(x, weight, bias)
    assert actual.dtype == torch.bfloat16
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    # Sums in FP32, then one rounding of 2**-8 (another before a bias is added).
    unit = 2.0**-8 * (2 if has_bias else 1) * 1.01
    largest = float(expected.abs().max()) + 3.0 if num_rows else 0.0
    rms = float(expected.square().mean().sqrt()) + 1.0 if num_rows else 0.0
    assert_close(actual, expected, unit * largest, unit * rms, "product")


def test_other_dtypes_and_ranks_are_torch(randn: Callable[..., torch.Tensor]) -> None:
    x, weight, bias = randn(2, 3, 16), randn(5, 16), randn(5)
    assert torch.equal(cpu_linear(x, weight, bias), F.linear(x, weight, bias))
    half = cpu_linear(x.bfloat16(), weight.bfloat16())
    assert half.shape == (2, 3, 5)


def test_few_rows_do_not_see_each_other(randn: Callable[..., torch.Tensor]) -> None:
    x = randn(FEW_ROWS, 96, dtype=torch.bfloat16)
    weight = randn(33, 96, dtype=torch.bfloat16)
    together = cpu_linear(x, weight)
    for row in range(FEW_ROWS):
        assert torch.equal(cpu_linear(x[row : row + 1], weight), together[row : row + 1])


@pytest.mark.parametrize("num_rows", [3, FEW_ROWS + 1])
def test_gradients(num_rows: int, randn: Callable[..., torch.Tensor]) -> None:
    x = randn(num_rows, 12, dtype=torch.bfloat16).requires_grad_()
    weight = randn(7, 12, dtype=torch.bfloat16).requires_grad_()
    towards = randn(num_rows, 7, dtype=torch.bfloat16)
    actual = torch.autograd.grad((cpu_linear(x, weight) * towards).sum(), (x, weight))
    expected = (towards.double() @ weight.double(), towards.double().T @ x.double())
    for left, right in zip(actual, expected, strict=True):
        # Rows one by one sum their weight gradients in bfloat16: a rounding of 2**-8 a row.
        error = 2.0**-8 * num_rows * float(right.detach().abs().max())
        assert_close(left, right, error, error / 2, "gradient")


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_logits_are_exact_where_they_decide(num_rows: int, generator: torch.Generator) -> None:
    x_TD = torch.randn(num_rows, 64, generator=generator).bfloat16()
    weight_VD = torch.randn(1100, 64, generator=generator).bfloat16()
    exact_TV = x_TD.double() @ weight_VD.double().T
    logits_TV = head_logits(x_TD, weight_VD)
    assert logits_TV.dtype == torch.float32
    # 64 products, exact in float32, added up: at most 64 roundings of 2^-24 of the sum of sizes.
    size_TV = x_TD.double().abs() @ weight_VD.double().abs().T
    error_TV = (logits_TV - exact_TV).abs()
    assert (error_TV <= 64 * 2.0**-24 * size_TV + 2.0**-8 * exact_TV.abs()).all()
    # The last of the exact ones may stand within one rounding of the first of the others.
    num_sure = EXACT_TOKENS // 2 if num_rows <= FEW_ROWS else 1100
    sure_TK = exact_TV.topk(num_sure).indices
    assert (error_TV <= 64 * 2.0**-24 * size_TV).gather(1, sure_TK).all()
    assert torch.equal(logits_TV.argmax(-1), exact_TV.argmax(-1))
