"""Norms in one byte: powers of two in steps of a sixteenth, 2.2 % from one to the next half-way.

    0 is a row of zeros;    b > 0 stands for 2 ** ((b - 1 - bias) / 16)

Fifteen octaves, which `bias`, a multiple of 16, puts where rows of K or V lie. A norm becomes the
byte whose logarithm is nearest. Below the range it becomes the least one, and below half of that 0:
an error no larger than that of the range's smallest rows. Above the range it is the caller's to
refuse: 255 is stored, and `encode_norm` says so.

Letters: N rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from subten.kernels.triton_shim import tl, triton_jit

STEPS = 16
"""Bytes of one octave."""

_THRESHOLDS = tuple(round(2**23 * (2 ** ((k - 0.5) / STEPS) - 1)) for k in range(1, STEPS + 1))
"""Mantissas from which on the logarithm rounds to k sixteenths."""


def encode_norm(norm_N: torch.Tensor, bias: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite float32 norms >= 0 -> `(byte_N uint8, is_over_N bool)`, any shape."""
    step_N = torch.bucketize(norm_N, _least_norms(norm_N.device, bias), right=True)
    return step_N.clamp(max=255).to(torch.uint8), step_N > 255


def decode_norm(byte_N: torch.Tensor, bias: int) -> torch.Tensor:
    """Inverse of `encode_norm`, float32 of the same shape."""
    return _norms(byte_N.device, bias)[byte_N.int()]


@functools.cache
def _least_norms(device: torch.device, bias: int) -> torch.Tensor:
    """The least norm that becomes 1, that becomes 2, and so on to the one that is over, [256]."""
    assert bias % STEPS == 0, bias
    with torch.inference_mode(False):
        # Byte 1 reaches down to half of the range's least norm.
        step_B = torch.arange(256, dtype=torch.int32) - bias
        step_B[0] -= STEPS - 1
        # To become step 16 e + k, a norm has a mantissa of at least the k-th threshold.
        exponent_B, part_B = (step_B - 1) >> 4, (step_B - 1) & (STEPS - 1)
        bits_B = (exponent_B + 127 << 23) + torch.tensor(_THRESHOLDS, dtype=torch.int32)[part_B]
        return bits_B.view(torch.float32).to(device)


@functools.cache
def _norms(device: torch.device, bias: int) -> torch.Tensor:
    """Norms of all bytes, float32 [256]."""
    with torch.inference_mode(False):
        # The power of two apart from the table: exact.
        return norm_table(device) * 2.0 ** -(bias // STEPS)


@functools.cache
def norm_table(device: torch.device) -> torch.Tensor:
    """Norms of all bytes at bias 0, float32 [256]."""
    # A first call under inference mode must not leave later callers a tensor without autograd.
    with torch.inference_mode(False):
        step_B = torch.arange(256, dtype=torch.float64) - 1
        table_B = torch.exp2(step_B / STEPS)
        table_B[0] = 0.0
        return table_B.float().to(device)


@triton_jit
def encode_norm_device(norm_N: tl.tensor, BIAS: tl.constexpr) -> Any:
    """Device twin of `encode_norm`: bytes in int32, and which were over."""
    bits_N = norm_N.to(tl.int32, bitcast=True)
    part_N = bits_N & 0x7FFFFF
    byte_N = ((bits_N >> 23) - 127) * 16 + (1 + BIAS)
    byte_N += (part_N >= 183687).to(tl.int32)
    byte_N += (part_N >= 563215).to(tl.int32)
    byte_N += (part_N >= 959546).to(tl.int32)
    byte_N += (part_N >= 1373424).to(tl.int32)
    byte_N += (part_N >= 1805626).to(tl.int32)
    byte_N += (part_N >= 2256963).to(tl.int32)
    byte_N += (part_N >= 2728283).to(tl.int32)
    byte_N += (part_N >= 3220470).to(tl.int32)
    byte_N += (part_N >= 3734447).to(tl.int32)
    byte_N += (part_N >= 4271181).to(tl.int32)
    byte_N += (part_N >= 4831678).to(tl.int32)
    byte_N += (part_N >= 5416990).to(tl.int32)
    byte_N += (part_N >= 6028216).to(tl.int32)
    byte_N += (part_N >= 6666503).to(tl.int32)
    byte_N += (part_N >= 7333050).to(tl.int32)
    byte_N += (part_N >= 8029107).to(tl.int32)
    is_over_N = byte_N > 255
    byte_N = tl.where(byte_N >= 1, byte_N, (byte_N > -15).to(tl.int32))
    return tl.minimum(byte_N, 255), is_over_N


@triton_jit
def decode_norm_device(byte_N: tl.tensor, BIAS: tl.constexpr) -> Any:
    """Norms of bytes (int32), float32; by the device's own exp2, within 2^-22."""
    norm_N = tl.exp2((byte_N - (1 + BIAS)).to(tl.float32) * 0.0625)
    return tl.where(byte_N == 0, 0.0, norm_N)


@triton_jit
def exact_norm_device(byte_N: tl.tensor, table_ptr: tl.tensor, BIAS: tl.constexpr) -> Any:
    """Norms of bytes (int32) as `decode_norm` has them, bit for bit, from `norm_table`."""
    return tl.load(table_ptr + byte_N) * (0.5 ** (BIAS // 16))
