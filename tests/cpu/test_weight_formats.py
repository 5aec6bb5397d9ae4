"""Weight formats against a decoder of their bytes written here, in NumPy and float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subten.core import CheckpointError, ConfigError
from subten.kernels.triton_shim import tl, triton_jit
from subten.kernels.weight_formats import (
    WEIGHT_FORMATS,
    Weight,
    group_size,
    load_scale,
    packed_bytes,
)

QUANTIZED = [name for name in WEIGHT_FORMATS if name != "none"]


def decode_e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    assert (exponent, mantissa) != (15, 7), "NaN"
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


def decode_fp8(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    table = np.array([0.0 if b & 127 == 127 else decode_e4m3(b) for b in range(256)])
    assert not ((codes & 127) == 127).any(), "NaN codes"
    return table[codes] * scale.astype(np.float64)


def decode_int4(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Input k_j of a 32-bit word lies in nibble j // 2 + 4 * (j % 2), as q + 8."""
    num_rows, num_bytes = codes.shape
    group = 2 * num_bytes // scale.shape[1]
    out = np.empty((num_rows, 2 * num_bytes))
    for r in range(num_rows):
        words = np.frombuffer(codes[r].tobytes(), dtype="<u4")
        for k in range(2 * num_bytes):
            j = k % 8
            q = int(words[k // 8] >> (4 * (j // 2 + 4 * (j % 2))) & 15) - 8
            out[r, k] = q * float(scale[r, k // group])
    return out


def decode(weight: Weight) -> np.ndarray:
    assert weight.scale is not None
    decoder = {"fp8": decode_fp8, "int4": decode_int4}[weight.format]
    return decoder(weight.codes.cpu().numpy(), weight.scale.float().cpu().numpy())


def check_error(weight: Weight, exact: np.ndarray, values: np.ndarray) -> None:
    """No error beyond what the format's steps leave."""
    assert weight.scale is not None
    error = np.abs(values - exact)
    scale = np.abs(weight.scale.double().cpu().numpy()).repeat(weight.group, axis=1)
    # A float32 quotient on the edge between two codes may go either way: 1 + 2**-22. Values below
    # the smallest normal float32 keep fewer bits, and the scale with them.
    slack, tiny = 1 + 2.0**-22, 448 * 2.0**-149
    if weight.format == "fp8":
        # Three bits of mantissa: half a step is at most 2**-4 of a code; below 2**-6, 2**-10.
        bound = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * scale)
    else:
        # Half a step for what -8 to 7 reach; beyond, the distance to the nearer end.
        code = exact / np.where(scale == 0, 1.0, weight_sign(weight) * scale)
        # A scale of up to half of bfloat16's smallest number rounds to 0, and -8 of it with it.
        tiny = 8 * 2.0**-134
        outside = np.maximum(np.maximum(code - 7, -8 - code), 0.0)
        bound = np.maximum(scale / 2, outside * scale)
    assert (error <= bound * slack + tiny).all(), float((error - bound * slack).max())


def weight_sign(weight: Weight) -> np.ndarray:
    assert weight.scale is not None
    return np.sign(weight.scale.double().cpu().numpy()).repeat(weight.group, axis=1)


ROWS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed))


@pytest.mark.parametrize("quantization", QUANTIZED)
@settings(max_examples=30, deadline=None)
@given(
    rng=ROWS,
    num_in=st.sampled_from([64, 128, 192]),
    magnitude=st.integers(-43, 37),
    has_outlier=st.booleans(),
    search=st.booleans(),
)
def test_bytes_mean_what_the_layout_says(
    quantization: str,
    rng: np.random.Generator,
    num_in: int,
    magnitude: int,
    has_outlier: bool,
    search: bool,
) -> None:
    x = rng.standard_normal((3, num_in)) * 10.0**magnitude
    if has_outlier:
        x[0, rng.integers(num_in)] *= -8.0
    x[1, rng.integers(num_in)] = 0.0
    x[2] = 0.0
    rows = torch.from_numpy(x).float()
    weight = Weight.of(rows, quantization, search=search)
    values = decode(weight)
    assert not values[2].any()
    check_error(weight, rows.double().numpy(), values)
    # One rounding of float32 for each product of code and scale; below 2**-126 a fixed step.
    assert np.allclose(weight.dequantize().numpy(), values, rtol=2.0**-23, atol=2.0**-148)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_every_code_is_read(quantization: str, device: torch.device) -> None:
    num_in = 256
    weight = Weight((2, num_in), quantization, device=device, dtype=torch.float32)
    assert weight.scale is not None
    byte = torch.arange(256).to(torch.uint8)
    if quantization == "fp8":
        byte[[127, 255]] = 126
    weight.codes.copy_(
        torch.cat([byte, byte.flip(0)])[: weight.codes.numel()].view_as(weight.codes)
    )
    weight.scale.copy_(torch.tensor([[0.5], [3.0]]).expand_as(weight.scale))
    assert np.array_equal(weight.dequantize().double().cpu().numpy(), decode(weight))


def test_the_search_lowers_the_error(randn: Callable[..., torch.Tensor]) -> None:
    x = randn(16, 512)
    with_search, without = (
        (Weight.of(x, "int4", search=search).dequantize() - x).square().sum() for search in (1, 0)
    )
    # 0.0972 and 0.1033 of the norm on 2 million normal values: a tenth less of the square.
    assert with_search < 0.95 * without


@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
def test_rows_are_put_in_their_place(
    quantization: str, randn: Callable[..., torch.Tensor], device: torch.device
) -> None:
    x = randn(3, 6, 128, dtype=torch.bfloat16)
    whole = Weight.of(x, quantization)
    weight = Weight((3, 6, 128), quantization, device=device, dtype=torch.bfloat16)
    for expert in (2, 0, 1):
        weight.copy_((expert, slice(2, 6)), x[expert, 2:])
        weight.copy_((expert, slice(0, 2)), x[expert, :2])
    assert torch.equal(weight.codes, whole.codes)
    assert torch.equal(weight.dequantize((1, slice(1, 3))), whole.dequantize()[1, 1:3])
    assert weight.shape == (3, 6, 128) and weight.numel() == x.numel()
    assert weight.nbytes == packed_bytes(quantization, 18, 128)


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_weights_are_refused_by_name(
    quantization: str, bad: float, randn: Callable[..., torch.Tensor], device: torch.device
) -> None:
    rows = randn(4, 64)
    rows[2, 5] = bad
    weight = Weight((4, 64), quantization, device=device, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"^layer\.7: got a NaN or an infinity; allowed: fin"):
        weight.copy_((), rows, name="layer.7")


def test_groups_and_what_has_none() -> None:
    assert [group_size("int4", k) for k in (128, 192, 576, 1536, 64)] == [128, 64, 64, 128, 64]
    assert (group_size("none", 7), group_size("fp8", 7)) == (0, 7)
    with pytest.raises(ConfigError, match=r"^quantization: got int4 for qkv of 48 inputs; allowed"):
        group_size("int4", 48, name="qkv")
    with pytest.raises(ConfigError, match="quantization: got 'int3'; allowed: none, fp8, int4"):
        group_size("int3", 64)


def test_bytes_counted_by_hand() -> None:
    # Rows of 576: 9 scales of 2 bytes; of 1024: 8. fp8: 4 bytes a row.
    assert packed_bytes("int4", 10, 576) == 10 * (288 + 18)
    assert packed_bytes("int4", 10, 1024) == 10 * (512 + 16)
    assert packed_bytes("fp8", 10, 576) == 5800
    assert packed_bytes("none", 10, 576, itemsize=4) == 23040


@triton_jit
def _read_kernel(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    LOAD_CODES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    r = tl.arange(0, BLOCK_R)
    for first in range(0, K, BLOCK_K):
        codes = LOAD_CODES(codes_ptr, (r * WIDTH).to(tl.int64), first, r < num_rows, 1, K, BLOCK_K)
        scale = load_scale(scale_ptr, r, first, r < num_rows, K, GROUP)
        at = r[:, None] * 512 + (first + tl.arange(0, BLOCK_K))[None, :]
        tl.store(out_ptr + at, codes * scale[:, None])


LOADERS = ["load_codes", pytest.param("load_codes_ptx", marks=pytest.mark.gpu)]
"""The interpreter has no PTX; what its instructions do, test_cuda_grouped.py runs in C++."""


@pytest.mark.triton
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize(("num_in", "block_k"), [(64, 64), (192, 32), (320, 64), (384, 128)])
def test_kernels_read_what_the_twin_reads(
    quantization: str, num_in: int, block_k: int, loader: str, randn: Callable[..., torch.Tensor]
) -> None:
    weight = Weight.of(randn(5, num_in), quantization)
    check_read(weight, block_k, loader)


@pytest.mark.triton
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_kernels_read_every_code(
    quantization: str, loader: str, generator: torch.Generator, device: torch.device
) -> None:
    """All bytes but NaN, in each place of a word."""
    num_in = 256 if quantization == "fp8" else 512
    weight = Weight((5, num_in), quantization, device=device, dtype=torch.bfloat16)
    assert weight.scale is not None
    byte = torch.arange(256, dtype=torch.uint8)
    if quantization == "fp8":
        byte = torch.where((byte & 0x7F) == 0x7F, 0, byte)
    byte = byte[torch.randperm(256, generator=generator)]
    weight.codes.copy_(torch.stack([byte.roll(i) for i in range(5)]))
    weight.scale.fill_(1.0)
    check_read(weight, 64, loader)


def check_read(weight: Weight, block_k: int, loader: str) -> None:
    num_in, quantization = weight.in_features, weight.format
    out = torch.full((8, 512), torch.nan, device=weight.codes.device)
    _read_kernel[(1,)](
        weight.storage,
        weight.scale,
        out,
        5,
        K=num_in,
        WIDTH=weight.storage.shape[-1],
        GROUP=weight.group,
        LOAD_CODES=getattr(WEIGHT_FORMATS[quantization], loader),
        BLOCK_R=8,
        BLOCK_K=block_k,
    )
    assert torch.equal(out[:5, :num_in], weight.dequantize())
    # Outside, a tile is zero: nothing past the end of a row or of the matrix is read.
    assert not out[5:, : -(-num_in // block_k) * block_k].any()
