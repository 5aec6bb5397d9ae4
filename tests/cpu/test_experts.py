"""The routed experts against FP64 mathematics written here, on both paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted import fake_config

from conftest import assert_close
from subten.kernels import experts as experts_module
from subten.kernels import select_ops
from subten.kernels.experts import MAX_GATHER_TOKENS, experts, experts_torch
from subten.kernels.route import Routing
from subten.kernels.triton_shim import tl, triton_jit
from subten.kernels.weight_formats import Weight, row_offset
from subten.layers.linear import WeightSpec
from subten.layers.moe import MoE

DTYPES = [torch.float32, torch.bfloat16]


def make_routing(h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int):
    """A routing with its order, made without `route`."""
    flat = ids.flatten()
    starts = [int((flat < e).sum()) for e in range(num_experts + 1)]
    return Routing(
        h_TD=h,
        topk_id_TK=ids.int().to(h.device),
        topk_weight_TK=weights.to(h.device),
        expert_start_E1=torch.tensor(starts, dtype=torch.int32, device=h.device),
        order_A=flat.argsort(stable=True).int().to(h.device),
    )


def without_order(routing: Routing) -> Routing:
    return Routing(
        h_TD=routing.h_TD,
        topk_id_TK=routing.topk_id_TK,
        topk_weight_TK=routing.topk_weight_TK,
    )


class Case:
    """Random inputs of one size and the exact result in FP64, expert by expert."""

    def __init__(
        self,
        randn: Callable[..., torch.Tensor],
        generator: torch.Generator,
        size: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        quantization: str = "none",
    ) -> None:
        num_tokens, num_experts, top_k, dim, hidden = size
        ids = torch.stack(
            [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)]
        )
        weights = torch.rand(num_tokens, top_k, generator=generator)
        self.routing = make_routing(randn(num_tokens, dim, dtype=dtype), ids, weights, num_experts)
        gate_up = randn(num_experts, 2 * hidden, dim, dtype=dtype, scale=dim**-0.5)
        down = randn(num_experts, dim, hidden, dtype=dtype, scale=hidden**-0.5)
        self.gate_up, self.down = (Weight.of(w, quantization) for w in (gate_up, down))
        # For half the sizes a float32 residual stream, whatever the layer's dtype.
        self.residual = randn(num_tokens, dim, dtype=dtype if num_tokens % 2 else torch.float32)

    def run(self, op: Callable[..., torch.Tensor], routing: Routing) -> torch.Tensor:
        return op(routing, self.gate_up, self.down, residual_TD=self.residual)

    def check(self, op: Callable[..., torch.Tensor], routing: Routing) -> torch.Tensor:
        actual = self.run(op, routing)
        assert actual.dtype == self.residual.dtype
        expected = self.residual.double().clone()
        gate_up, down = (w.dequantize().double() for w in (self.gate_up, self.down))
        spread = torch.zeros_like(expected)  # squares of the terms of each output's sum
        for t, row in enumerate(routing.topk_id_TK.tolist()):
            for k, expert in enumerate(row):
                gate, up = (gate_up[expert] @ routing.h_TD[t].double()).chunk(2)
                act = gate / (1 + (-gate).exp()) * up
                terms = down[expert] * act * routing.topk_weight_TK[t, k].double()
                expected[t] += terms.sum(dim=-1)
                spread[t] += terms.square().sum(dim=-1)
        # Roundings: of the stored activation, which spread over F terms add up like their root
        # sum of squares, and of the output. FP32: 2**-24 each, and sums of D and F terms whose
        # roundings add up like sqrt(D + F) more. bfloat16: 2**-8 each; the twin also rounds
        # gate, up, silu and the expert's output, four in all, twice as much; Triton's
        # interpreter truncates, twice as much.
        dim, hidden = self.down.shape[1:]
        is_narrow = self.down.dtype == torch.bfloat16
        unit = 2 * 2.0**-8 if is_narrow else 2.0**-24 * (2 + (dim + hidden) ** 0.5)
        size = (spread + expected.square()).sqrt()
        # Largest of up to some thousand independent errors of that size: 5 deviations. The mean of
        # n squares varies by sqrt(2 / n) of itself: 5 times that, which matters for few outputs.
        few = (1 + 5 * (2 / max(1, size.numel())) ** 0.5) ** 0.5
        assert_close(
            actual,
            expected,
            5 * unit * float(size.square().mean().sqrt()) + unit * float(expected.abs().max()),
            few * unit * float(size.square().mean().sqrt()),
            f"{op.__name__} {'gather' if routing.order_A is None else 'grouped'}",
        )
        return actual


SIZES = [
    # tokens, experts, top_k, D, F
    (1, 1, 1, 1, 1),
    (1, 8, 2, 64, 48),
    (3, 5, 3, 61, 33),
    (2, 64, 8, 32, 17),
    (4, 12, 4, 65, 40),
    (1, 512, 22, 16, 16),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned")
def test_twin_is_the_formula(
    size: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> None:
    case = Case(randn, generator, size, dtype)
    case.check(experts_torch, case.routing)


@pytest.mark.triton
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned")
def test_both_paths_are_the_formula(
    size: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> None:
    case = Case(randn, generator, size, dtype)
    case.check(experts, without_order(case.routing))
    case.check(experts, case.routing)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("size", [(2, 5, 3, 192, 64), (1, 4, 2, 64, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned")
def test_twin_reads_packed_weights(
    quantization: str,
    size: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> None:
    case = Case(randn, generator, size, dtype, quantization)
    case.check(experts_torch, case.routing)


@pytest.mark.triton
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
# One scale a row, several, and groups of 64 and of 128; more than one tile of rows of an expert.
@pytest.mark.parametrize(
    ("size", "dtype"),
    [((2, 5, 3, 192, 64), torch.float32), ((20, 2, 1, 64, 256), torch.bfloat16)],
)
@pytest.mark.usefixtures("poisoned")
def test_both_paths_read_packed_weights(
    quantization: str,
    size: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> None:
    case = Case(randn, generator, size, dtype, quantization)
    case.check(experts, without_order(case.routing))
    case.check(experts, case.routing)


# Every expert count and every top-k that broke others, each at least once: a kernel is compiled
# for each pair.
EXPERTS_AND_TOP_K = [
    *[(1, 1), (2, 1), (2, 2), (3, 2), (5, 4), (6, 6), (7, 1), (12, 10), (60, 4), (64, 6)],
    *[(96, 8), (128, 8), (160, 6), (256, 8), (512, 10), (512, 22)],
]


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(("num_experts", "top_k"), EXPERTS_AND_TOP_K)
@pytest.mark.usefixtures("poisoned")
def test_expert_count_is_any_number(
    num_experts: int,
    top_k: int,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> None:
    num_tokens, dtype = 33, DTYPES[top_k % 4 == 2]
    case = Case(randn, generator, (num_tokens, num_experts, top_k, 192, 80), dtype)
    case.check(experts, without_order(case.routing))
    case.check(experts, case.routing)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size", [(1, 8, 2, 576, 1536), (300, 8, 2, 576, 1536), (64, 128, 8, 2048, 768)]
)
@pytest.mark.usefixtures("poisoned")
def test_model_shapes(
    size: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> None:
    case = Case(randn, generator, size, dtype)
    case.check(experts, case.routing)
    case.check(experts, without_order(case.routing))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned")
def test_all_tokens_to_one_expert(
    dtype: torch.dtype, randn: Callable[..., torch.Tensor], generator: torch.Generator
) -> None:
    num_tokens = MAX_GATHER_TOKENS + 1  # more than one tile of rows
    case = Case(randn, generator, (num_tokens, 6, 1, 64, 32), dtype)
    ids = torch.full((num_tokens, 1), 4)
    h, weights = case.routing.h_TD, case.routing.topk_weight_TK.cpu()
    case.check(experts, make_routing(h, ids, weights, 6))


@pytest.mark.parametrize("op", [experts_torch, pytest.param(experts, marks=pytest.mark.triton)])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_no_tokens(
    op: Callable[..., torch.Tensor],
    is_grouped: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_gather_up_kernel", "_gather_down_kernel", "grouped"):
        monkeypatch.setattr(experts_module, name, None)
    x = torch.ones(0, 64, device=device)
    routing = make_routing(x, torch.ones(0, 2, dtype=torch.int64), torch.ones(0, 2), 3)
    out = op(
        routing if is_grouped else without_order(routing),
        Weight.of(torch.ones(3, 32, 64, device=device)),
        Weight.of(torch.ones(3, 64, 16, device=device)),
        residual_TD=x,
    )
    assert out.shape == (0, 64)


@pytest.mark.triton
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_bad_token_leaves_the_others_alone(
    is_grouped: bool, randn: Callable[..., torch.Tensor], generator: torch.Generator
) -> None:
    case = Case(randn, generator, (4, 3, 2, 32, 16), torch.float32)
    routing = case.routing if is_grouped else without_order(case.routing)
    good = case.run(experts, routing)
    assert torch.equal(case.run(experts, routing), good), "equal inputs, equal bits"
    routing.h_TD[2] = torch.nan
    routing.topk_weight_TK[2] = torch.nan
    actual = case.run(experts, routing)
    assert bool(actual[2].isnan().all())
    kept = torch.tensor([0, 1, 3], device=good.device)
    assert torch.equal(actual[kept], good[kept])


@pytest.mark.parametrize("op", [experts_torch, pytest.param(experts, marks=pytest.mark.triton)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_batch(
    op: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
    device: torch.device,
) -> None:
    if op is experts_torch and dtype == torch.float32:
        pytest.skip("torch's own float32 product adds up in an order of its own")
    if op is experts_torch and device.type == "cuda":
        pytest.skip("so does its product on a GPU")
    case = Case(randn, generator, (5, 4, 2, 32, 24), dtype)
    routing = without_order(case.routing)
    together = case.run(op, routing)
    alone = op(
        Routing(
            h_TD=routing.h_TD[3:4],
            topk_id_TK=routing.topk_id_TK[3:4],
            topk_weight_TK=routing.topk_weight_TK[3:4],
        ),
        case.gate_up,
        case.down,
        residual_TD=case.residual[3:4],
    )
    assert torch.equal(alone, together[3:4])


@pytest.mark.triton
@pytest.mark.parametrize("is_grouped", [False, True])
def test_strided_inputs(
    is_grouped: bool, randn: Callable[..., torch.Tensor], generator: torch.Generator
) -> None:
    case = Case(randn, generator, (3, 3, 2, 32, 16), torch.float32)
    routing = case.routing if is_grouped else without_order(case.routing)
    expected = case.run(experts, routing)
    gate_up, down = case.gate_up.codes, case.down.codes
    case.gate_up = Weight.of(gate_up.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    case.down = Weight.of(torch.stack([down, down], dim=-1)[..., 0])
    case.residual = torch.cat([case.residual, case.residual], dim=1)[:, :32]
    # Other strides may change the order in which a GPU adds up some dozens of terms.
    assert_close(case.run(experts, routing), expected, 2e-5, 5e-6, "strided")


@pytest.mark.parametrize(("backend", "limit"), [("torch", 8), ("triton", 8), ("cuda", 5)])
def test_a_layer_orders_what_its_backend_does_not_gather(
    backend: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "torch":
        pytest.importorskip("triton")
    monkeypatch.setattr("subten.kernels.runtime.is_available", lambda _: True)
    ops = select_ops(backend, torch.device("cpu"))
    assert ops.max_gather_tokens == limit
    ordered: list[bool] = []

    def route(*_args: object, with_order: bool, **_kwargs: object) -> Any:
        ordered.append(with_order)
        return SimpleNamespace(topk_id_TK=None)

    config = fake_config(architecture="MixtralForCausalLM", num_experts=4, top_k=2)
    spec = WeightSpec(device="cpu", dtype=torch.float32)
    layer = MoE(config, ops=replace(ops, route=route, experts=lambda *_, **__: None), spec=spec)
    for num_tokens in (1, limit, limit + 1):
        layer(torch.zeros(num_tokens, config.d_model), torch.ones(config.d_model))
    assert ordered == [False, False, True]


@triton_jit
def _row_offset_kernel(row_ptr: tl.tensor, stride: tl.tensor, out_ptr: tl.tensor) -> None:
    i = tl.program_id(0)
    tl.store(out_ptr + i, row_offset(tl.load(row_ptr + i), stride))


@pytest.mark.triton
@pytest.mark.parametrize("stride", [16384, 16383, 2**31 - 1, 2**31, 2**32 + 1])
def test_offsets_pass_32_bits(stride: int, device: torch.device) -> None:
    # 131072 * 16384 is 2**31; the rows around it, and the last row there can be.
    rows = [0, 1, 131071, 131072, 131073, 262144, 2**31 - 1]
    row = torch.tensor(rows, dtype=torch.int32, device=device)
    out = torch.full((len(rows),), -1, dtype=torch.int64, device=device)
    _row_offset_kernel[(len(rows),)](row, stride, out)
    assert out.tolist() == [r * stride for r in rows]


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("is_grouped", [False, True])
def test_experts_past_32_bits(
    is_grouped: bool, randn: Callable[..., torch.Tensor], generator: torch.Generator
) -> None:
    """Two experts more than 2**31 elements apart, the space between them untouched."""
    case = Case(randn, generator, (3, 2, 2, 64, 32), torch.bfloat16)
    routing = case.routing if is_grouped else without_order(case.routing)
    expected = case.run(experts, routing)
    gap = 2**31 + 4096
    storage = torch.empty(gap + 8192, dtype=torch.bfloat16, device=case.down.codes.device)
    for name in ("gate_up", "down"):
        weight = getattr(case, name).codes
        apart = storage.as_strided(weight.shape, (gap, *weight.stride()[1:]))
        setattr(case, name, Weight.of(apart.copy_(weight)))
        if name == "gate_up":
            storage = storage.new_empty(len(storage))
    assert torch.equal(case.run(experts, routing), expected)


def test_twin_passes_gradients(
    randn: Callable[..., torch.Tensor], generator: torch.Generator
) -> None:
    case = Case(randn, generator, (4, 3, 2, 12, 8), torch.float32)
    gate_up, down = case.gate_up.codes, case.down.codes
    leaves = [gate_up, down, case.residual, case.routing.h_TD, case.routing.topk_weight_TK]
    for leaf in leaves:
        leaf.requires_grad_()
    towards = randn(4, 12)
    actual = torch.autograd.grad((case.run(experts_torch, case.routing) * towards).sum(), leaves)
    # Dense: every expert on every token, weighted by a matrix that is zero elsewhere.
    weight_TE = torch.zeros(4, 3, dtype=torch.float64, device=towards.device).scatter(
        1, case.routing.topk_id_TK.long(), case.routing.topk_weight_TK.double()
    )
    gate, up = torch.einsum("efd,td->tef", gate_up.double(), case.routing.h_TD.double()).chunk(
        2, dim=-1
    )
    act = gate * gate.sigmoid() * up * weight_TE[:, :, None]
    dense: Any = case.residual.double() + torch.einsum("edf,tef->td", down.double(), act)
    expected = torch.autograd.grad((dense * towards.double()).sum(), leaves)
    for left, right in zip(actual, expected, strict=True):
        # Tens of FP32 operations on values of a few units.
        assert_close(left, right, 2e-5, 1e-5, "gradient")
