"""`linear` against FP64 mathematics on the values that its weight holds, in every format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from conftest import assert_close
from subten.kernels import linear as linear_module
from subten.kernels.beside import unpack_beside
from subten.kernels.linear import MAX_ONE_LAUNCH, linear, linear_torch, unpack_rows
from subten.kernels.weight_formats import WEIGHT_FORMATS, Weight

DTYPES = [torch.float32, torch.bfloat16]
OPS = [linear_torch, pytest.param(linear, marks=pytest.mark.triton)]
EPS = 1e-5


class Case:
    """Random inputs of one size; `parts` names what stands around the product."""

    def __init__(
        self,
        randn: Callable[..., torch.Tensor],
        size: tuple[int, int, int],
        quantization: str,
        dtype: torch.dtype,
        parts: str = "",
    ) -> None:
        num_tokens, num_out, num_in = size
        self.weight = Weight.of(
            randn(num_out, num_in, dtype=dtype, scale=num_in**-0.5), quantization
        )
        is_normed = "norm" in parts
        self.x = randn(num_tokens, num_in, dtype=torch.float32 if is_normed else dtype, scale=3.0)
        self.norm = 1 + randn(num_in, dtype=dtype, scale=0.2) if is_normed else None
        self.bias = randn(num_out, dtype=dtype) if "bias" in parts else None
        self.residual = randn(num_tokens, num_out) if "residual" in parts else None

    def run(
        self, op: Callable[..., torch.Tensor], rows: slice = slice(None), **changes: torch.dtype
    ) -> torch.Tensor:
        return op(
            self.x[rows],
            self.weight,
            bias_N=self.bias,
            norm_weight_K=self.norm,
            eps=EPS,
            residual_TN=None if self.residual is None else self.residual[rows],
            **changes,
        )

    def check(self, op: Callable[..., torch.Tensor], **changes: torch.dtype) -> None:
        x = self.x.double()
        if self.norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm.double()
        w = self.weight.dequantize().double()
        expected = x @ w.T
        spread = (x.square() @ w.square().T).sqrt()  # root of the sum of squared terms
        if self.bias is not None:
            expected = expected + self.bias.double()
        if self.residual is not None:
            expected = expected + self.residual.double()
        actual = self.run(op, **changes)
        usual = self.weight.dtype if self.residual is None else torch.float32
        assert actual.dtype == changes.get("out_dtype", usual)
        assert actual.is_contiguous()
        # FP32: a rounding of 2**-24 in each of K sums, which add up like their root, and four
        # more around. bfloat16: 2**-9 of every input where it is normed, of every unpacked weight
        # of the chunked product, and of the stored result; the interpreter truncates, twice that.
        num_in = self.weight.in_features
        unit = 2.0**-24 * (4 + num_in**0.5) if self.weight.dtype == torch.float32 else 2.0**-7
        size = (spread.square() + expected.square()).sqrt()
        # Largest of some thousand independent errors of that size: 5 deviations.
        assert_close(
            actual,
            expected,
            5 * unit * float(size.square().mean().sqrt()) + unit * float(expected.abs().max()),
            unit * float(size.square().mean().sqrt()),
            f"{op.__name__} {self.weight.format}",
        )


PARTS = ["", "norm", "bias residual", "norm bias", "norm bias residual"]
SIZES = [(1, 40, 64), (7, 33, 192), (16, 17, 256), (17, 40, 128), (33, 16, 320)]
PAIRS = list(zip(SIZES, PARTS, strict=True))
"""One launch up to 16 tokens and chunks above; K of one group, of several of 64, of 128."""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("size", "parts"), PAIRS)
@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned")
def test_is_the_formula(
    op: Callable[..., torch.Tensor],
    size: tuple[int, int, int],
    parts: str,
    quantization: str,
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
) -> None:
    Case(randn, size, quantization, dtype, parts).check(op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 7), (2, 65, 129), (18, 3, 31)])
@pytest.mark.usefixtures("poisoned")
def test_odd_sizes(
    op: Callable[..., torch.Tensor],
    quantization: str,
    size: tuple[int, int, int],
    randn: Callable[..., torch.Tensor],
) -> None:
    Case(randn, size, quantization, torch.float32, "norm bias").check(op)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 64])
@pytest.mark.parametrize("size", [(5120, 2048), (2048, 4096), (1152, 576), (32000, 4096)])
def test_model_shapes(
    quantization: str, num_tokens: int, size: tuple[int, int], randn: Callable[..., torch.Tensor]
) -> None:
    case = Case(randn, (num_tokens, *size), quantization, torch.bfloat16, "norm residual")
    case.check(linear)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [2, 20])
def test_out_dtype_is_what_was_asked_for(
    op: Callable[..., torch.Tensor], num_tokens: int, randn: Callable[..., torch.Tensor]
) -> None:
    case = Case(randn, (num_tokens, 24, 64), "int4", torch.bfloat16, "norm")
    case.check(op, out_dtype=torch.float32)
    case.check(op, out_dtype=torch.bfloat16)


@pytest.mark.triton
@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others(
    quantization: str,
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    device: torch.device,
) -> None:
    case = Case(randn, (MAX_ONE_LAUNCH, 20, 128), quantization, dtype, "norm bias residual")
    together = case.run(linear)
    # The interpreter's product is NumPy's, which adds up in an order of the row's place.
    moved = (slice(5, 6), slice(3, 10)) if device.type == "cuda" else ()
    for rows in (slice(0, 1), slice(0, 7), *moved):
        assert torch.equal(case.run(linear, rows), together[rows]), rows
    case.x[4] = torch.nan
    spoilt = case.run(linear)
    assert bool(spoilt[4].isnan().all())
    assert torch.equal(spoilt[:4], together[:4])
    assert torch.equal(spoilt[5:], together[5:])


@pytest.mark.triton
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_chunks_of_the_weight_make_one_result(
    quantization: str, randn: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(randn, (18, 37, 64), quantization, torch.float32, "norm bias residual")
    monkeypatch.setattr(linear_module, "chunk_rows", lambda *_: 10)
    case.check(linear)
    case.check(linear_torch)


@pytest.mark.triton
@pytest.mark.parametrize("num_tokens", [3, 17])
def test_strided_inputs(num_tokens: int, randn: Callable[..., torch.Tensor]) -> None:
    case = Case(randn, (num_tokens, 32, 64), "none", torch.float32, "norm residual")
    expected = case.run(linear)
    case.x = case.x.T.contiguous().T
    assert case.residual is not None
    case.residual = torch.stack([case.residual, case.residual], dim=-1)[..., 1]
    case.weight = Weight.of(case.weight.codes.T.contiguous().T)
    # Other strides may change the order in which some dozens of terms are added up.
    assert_close(case.run(linear), expected, 3e-5, 1e-5, "strided")


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(op: Callable[..., torch.Tensor], randn: Callable[..., torch.Tensor]) -> None:
    case = Case(randn, (0, 8, 64), "int4", torch.bfloat16, "norm")
    assert case.run(op).shape == (0, 8)


# The CPU path of unquantised models stays bit for bit what `F.linear` and a sum give.
def test_the_twin_adds_nothing_to_a_plain_product(randn: Callable[..., torch.Tensor]) -> None:
    case = Case(randn, (1, 24, 40), "none", torch.bfloat16, "bias residual")
    expected = case.residual + torch.nn.functional.linear(case.x, case.weight.codes, case.bias)
    assert torch.equal(case.run(linear_torch), expected)


@pytest.mark.triton
@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
@pytest.mark.parametrize("most_programs", [1, 3, 100])
def test_few_programs_unpack_all_tiles(randn, weight_format, most_programs):
    weight = Weight.of(randn(75, 256).bfloat16(), weight_format, search=False)
    w_NK = torch.full((75, 256), torch.nan, dtype=torch.bfloat16, device=weight.codes.device)
    unpack_rows(weight, slice(0, 75), w_NK, block_r=32, most_programs=most_programs)
    # The interpreter rounds toward zero: a unit of the last of bfloat16's 8 bits.
    torch.testing.assert_close(w_NK.float(), weight.dequantize(), rtol=2**-7, atol=0)
    assert torch.equal(w_NK, linear_module._unpacked(weight, slice(0, 75)))


@pytest.mark.parametrize("weight_format", ["none", "fp8", "int4"])
def test_weights_are_unpacked_beside_other_work_within_a_capture(randn, device, weight_format):
    """There what was started gives the bits of the product itself; elsewhere nothing is started."""
    shapes = [(96, 128), (33, 256)]
    weights = [Weight.of(randn(*s).bfloat16(), weight_format, search=False) for s in shapes]
    inputs = [randn(64, num_in).bfloat16() for _, num_in in shapes]
    assert unpack_beside(weights, 64) is None
    if device.type != "cuda":
        return
    expected = [linear(x_TK, weight) for x_TK, weight in zip(inputs, weights, strict=True)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert unpack_beside(weights, 63) is None
        beside = unpack_beside(weights, 64)
        assert (beside is None) == (weight_format == "none")
        with nullcontext() if beside is None else beside.unpacking():
            other = inputs[0].float().sin().sum()
        if beside is not None:
            taken = [beside.take(weight) for weight in weights]
            assert [weight.format for weight in taken] == ["none", "none"]
            assert beside.take(weights[0]) is weights[0]
        else:
            taken = weights
        found = [linear(x_TK, weight) for x_TK, weight in zip(inputs, taken, strict=True)]
    for out_TN in found:
        out_TN.fill_(torch.nan)
    graph.replay()
    for out_TN, expected_TN in zip(found, expected, strict=True):
        assert torch.equal(out_TN, expected_TN)
    assert bool(other.isfinite())
