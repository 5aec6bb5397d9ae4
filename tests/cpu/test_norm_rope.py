"""RMSNorm and rotary embedding against FP64 mathematics written here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conftest import assert_close
from subten.kernels.norm_rope import norm_rope, norm_rope_torch, rms_norm, rms_norm_torch

DTYPES = [torch.float32, torch.bfloat16]
RMS_NORM = [rms_norm_torch, pytest.param(rms_norm, marks=pytest.mark.triton)]
NORM_ROPE = [norm_rope_torch, pytest.param(norm_rope, marks=pytest.mark.triton)]


def check(
    op: Callable[..., torch.Tensor],
    actual: torch.Tensor,
    expected: torch.Tensor,
    size: torch.Tensor,
) -> None:
    """`size` bounds the values that were rounded, element by element."""
    # FP32: the sum of squares and about six operations, 16 roundings of 2**-24. BF16: one more of
    # 2**-8 to the output, 2**-7 in Triton's interpreter, which truncates.
    unit = 16 * 2.0**-24
    if actual.dtype == torch.bfloat16:
        is_interpreted = actual.device.type == "cpu" and not op.__name__.endswith("_torch")
        unit += 2.0**-7 if is_interpreted else 2.0**-8
    rms = float(size.square().mean().sqrt()) if size.numel() else 0.0
    largest = float(size.abs().max()) if size.numel() else 0.0
    assert_close(actual, expected, unit * largest, unit * rms, op.__name__)


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("op", RMS_NORM)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 8), (1, 1), (3, 61), (5, 576), (2, 513)])
@pytest.mark.usefixtures("poisoned")
def test_rms_norm_is_the_formula(
    op: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    num_tokens: int,
    dim: int,
    randn: Callable[..., torch.Tensor],
) -> None:
    # x in the other dtype for half the sizes: a float32 residual stream, a bfloat16 layer.
    x = randn(num_tokens, dim, dtype=DTYPES[dim % 2], scale=3.0)
    weight = randn(dim, dtype=dtype)
    actual = op(x, weight, eps=1e-5)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    expected = norm64(x, weight, 1e-5)
    check(op, actual, expected, expected)


@pytest.mark.parametrize("op", RMS_NORM)
def test_rms_norm_takes_eps_and_zeros(
    op: Callable[..., torch.Tensor], device: torch.device
) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-3, -1e-3]], device=device)
    actual = op(x, torch.ones(2, device=device), eps=1e-6)
    expected = torch.tensor([[0.0, 0.0], [0.5**0.5, -(0.5**0.5)]])
    assert_close(actual, expected, 1e-6, 1e-6, "eps as large as the mean square")


@pytest.mark.triton
def test_rms_norm_reads_strides(randn: Callable[..., torch.Tensor]) -> None:
    big, weight = randn(6, 40), randn(30)
    for x in (big[:, ::2], big.t(), big[1:4, 7:27]):
        w = weight[: x.shape[1]]
        assert torch.equal(rms_norm(x, w, eps=1e-5), rms_norm(x.contiguous(), w, eps=1e-5))


def rope64(
    q: torch.Tensor, position: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """As complex numbers: channel i and i + D/2 are one number, turned by an angle."""
    q = q.double() if weight is None else norm64(q, weight, eps)
    half = q.shape[-1] // 2
    turn = torch.polar(torch.ones_like(angles(position, half)), angles(position, half))
    turned = torch.complex(q[..., :half], q[..., half:]) * turn[:, None, :]
    return torch.cat([turned.real, turned.imag], dim=-1)


def angles(position: torch.Tensor, half: int) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=position.device) / half)
    return position.double()[:, None] * frequency


def cos_sin(num_positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    angle = angles(torch.arange(num_positions, device=device), head_dim // 2)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


@pytest.mark.parametrize("op", NORM_ROPE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"), [(0, 2, 8), (1, 1, 2), (3, 9, 64), (2, 5, 80)]
)
@pytest.mark.usefixtures("poisoned")
def test_norm_rope_turns_pairs(
    op: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    has_norm: bool,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
    device: torch.device,
) -> None:
    q = randn(num_tokens, num_heads, head_dim, dtype=dtype, scale=2.0)
    weight = randn(head_dim, dtype=dtype) if has_norm else None
    position = torch.randint(0, 200, (num_tokens,), generator=generator).to(device)
    table = cos_sin(200, head_dim, device)
    actual = op(q, table, position, norm_weight_D=weight, eps=1e-6)
    assert actual.dtype == dtype
    expected = rope64(q, position, weight, 1e-6)
    first, second = expected.chunk(2, dim=-1)
    size = (first.square() + second.square()).sqrt().repeat(1, 1, 2)
    check(op, actual, expected, size)


@pytest.mark.parametrize("op", NORM_ROPE)
def test_norm_rope_reads_strides(
    op: Callable[..., torch.Tensor], randn: Callable[..., torch.Tensor], device: torch.device
) -> None:
    qkv = randn(3, 7 * 16)
    table = cos_sin(50, 16, device)
    position = torch.tensor([3, 9, 49, 9, 0, 0], device=device)[::2]
    views = (qkv.view(3, 7, 16)[:, 1:5], qkv.view(3, 16, 7).transpose(1, 2))
    for q in views:
        expected = op(q.contiguous(), table, position.contiguous())
        assert torch.equal(op(q, table, position), expected)


def test_twins_pass_gradients(randn: Callable[..., torch.Tensor], device: torch.device) -> None:
    q, weight = randn(2, 3, 8).requires_grad_(), randn(8).requires_grad_()
    position = torch.tensor([1, 5], device=device)
    table = cos_sin(6, 8, device)
    out = norm_rope_torch(q, table, position, norm_weight_D=weight, eps=1e-6)
    towards = randn(2, 3, 8)
    actual = torch.autograd.grad((out * towards).sum(), (q, weight))
    exact = rope64(q, position, weight, 1e-6)
    expected = torch.autograd.grad((exact * towards.double()).sum(), (q, weight))
    for left, right in zip(actual, expected, strict=True):
        # Tens of FP32 operations on values of a few units.
        assert_close(left, right, 1e-5, 1e-5, "gradient")


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dim", [1, 2, 31, 64, 65, 2048, 4096, 4097, 8192, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 17, 4096])
def test_rms_norm_sweep(
    dim: int, dtype: torch.dtype, num_tokens: int, randn: Callable[..., torch.Tensor]
) -> None:
    x, weight = randn(num_tokens, dim, dtype=dtype), randn(dim, dtype=dtype)
    expected = norm64(x, weight, 1e-5)
    check(rms_norm, rms_norm(x, weight, eps=1e-5), expected, expected)
