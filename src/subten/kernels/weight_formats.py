"""Formats of weight matrices in memory: none, fp8, int4; one row is one output feature.

    none   the model's dtype, K numbers a row
    fp8    K E4M3 bytes a row (never NaN) and one float32 scale:  w ~ code * scale
    int4   K / 2 bytes a row and a bfloat16 scale for each group of G inputs:  w ~ q * scale

G is 128 where K is a multiple of 128, else 64. A little-endian 32-bit word of int4 holds 8
consecutive inputs k0 .. k7, each as q + 8 (q from -8 to 7) in a nibble, even ones in the low half:

    | k7 | k5 | k3 | k1 | k6 | k4 | k2 | k0 |      bits 31 .. 0; word & 0x000F000F: k0, k1

Letters: R rows, N output features, K inputs, G inputs of a group, W words of 8 inputs, and I the 8
inputs of a word; `...` are leading dimensions, as of stacked experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from subten.codecs.fp8 import E4M3_MAX, e4m3_over_256
from subten.core import CheckpointError, ConfigError, refuse
from subten.kernels.triton_shim import tl, triton_jit

Index = tuple[int | slice, ...]
"""Which rows: integers and slices over the leading dimensions and N, as in `weight[index]`."""

INT4_GROUPS = (128, 64)
"""Group sizes of int4, the first that divides the number of inputs."""

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Factors on extreme / -8 that the int4 search tries: below 1 the few largest weights are cut off,
for smaller steps everywhere else."""

CHUNK_ELEMENTS: Mapping[str, int] = {"cpu": 2**18, "cuda": 2**24}
"""Weights (un)packed at a time, by device: float32 temporaries that stay in a CPU's cache, or small
beside a model and large enough to fill a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """One format: its name, and how kernels read it.

    `load_codes` is a Triton function (codes, row_R, first, inside_R, stride_k, K, BLOCK_K) -> tile
    [R, BLOCK_K] of values that bfloat16 holds exactly, zero outside; `row_R` are int64 offsets of
    rows in elements of `Weight.storage`. `load_codes_ptx` gives the same values by a few PTX
    instructions for several codes at once, which Triton's interpreter cannot run.
    """

    name: str
    load_codes: Callable[..., Any]
    load_codes_ptx: Callable[..., Any]

    def loader(self, device: torch.device) -> Callable[..., Any]:
        """The function that kernels on `device` read codes with."""
        return self.load_codes if device.type == "cpu" else self.load_codes_ptx


class Weight(nn.Module):
    """A matrix [..., N, K] in a format; uninitialised, no gradient reaches it.

    `codes` is the matrix itself for `none`, uint8 [..., N, K] or [..., N, K / 2] otherwise; `scale`
    is None, float32 [..., N, 1] or bfloat16 [..., N, K / G]. `dtype` is what products take: the
    model's. `name` stands in errors. Raises ConfigError where the format cannot take K.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        quantization: str = "none",
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        name: str = "weight",
    ) -> None:
        super().__init__()
        self.group = group_size(quantization, shape[-1], name=name)
        self.format = quantization
        self.dtype = dtype
        self.in_features = shape[-1]
        *rows, num_in = shape
        width = num_in // 2 if quantization == "int4" else num_in
        code_dtype = dtype if quantization == "none" else torch.uint8
        self.codes = _parameter(*rows, width, device=device, dtype=code_dtype)
        self.scale: nn.Parameter | None = None
        if quantization != "none":
            scale_dtype = torch.float32 if quantization == "fp8" else torch.bfloat16
            num_groups = num_in // self.group
            self.scale = _parameter(*rows, num_groups, device=device, dtype=scale_dtype)

    @classmethod
    def of(cls, values: torch.Tensor, quantization: str = "none", *, search: bool = True) -> Weight:
        """`values` [..., N, K], bfloat16 or float32, in a format; `none` shares their memory."""
        if quantization == "none":
            weight = cls(tuple(values.shape), device="meta", dtype=values.dtype)
            weight.codes = nn.Parameter(values, requires_grad=values.requires_grad)
            return weight
        weight = cls(tuple(values.shape), quantization, device=values.device, dtype=values.dtype)
        weight.copy_((), values, search=search)
        return weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        return (*self.codes.shape[:-1], self.in_features)

    @property
    def nbytes(self) -> int:
        """True bytes in memory, scales included."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def storage(self) -> torch.Tensor:
        """The codes as kernels index them: int4 as int32 words [..., N, K / 8]."""
        return self.codes.view(torch.int32) if self.format == "int4" else self.codes

    @torch.no_grad()
    def copy_(
        self, index: Index, rows: torch.Tensor, *, name: str = "weight", search: bool = True
    ) -> None:
        """Quantise `rows` [..., K] of any float dtype and put them at `index`.

        `search` picks each int4 scale for the least squared error (a few times slower). Raises
        CheckpointError, naming the tensor `name`, for a NaN or an infinity in a quantised format.
        """
        codes = self.codes[index]
        assert rows.numel() * codes.shape[-1] == codes.numel() * self.in_features, (
            tuple(rows.shape),
            tuple(codes.shape),
        )
        if self.scale is None:
            codes.copy_(rows.view(codes.shape))
            return
        scale = self.scale[index]
        assert codes.is_contiguous() and scale.is_contiguous(), (codes.stride(), scale.stride())
        rows_RK = rows.reshape(-1, self.in_features)
        codes_RB, scale_RG = codes.view(-1, codes.shape[-1]), scale.view(-1, scale.shape[-1])
        step = chunk_rows(self.in_features, codes.device)
        for i in range(0, len(rows_RK), step):
            chunk_RK = rows_RK[i : i + step].to(device=codes.device, dtype=torch.float32)
            codes_RB[i : i + step], scale_RG[i : i + step] = quantize(
                chunk_RK, self.format, search=search, name=name
            )

    def dequantize(self, index: Index = ()) -> torch.Tensor:
        """float32 values of the rows at `index`, [..., K]."""
        codes = self.codes[index]
        return dequantize(codes, None if self.scale is None else self.scale[index], self.format)


def group_size(quantization: str, num_in: int, *, name: str = "weight") -> int:
    """Inputs that share a scale: 0 for `none`, all of them for fp8, 128 or 64 for int4.

    Raises ConfigError for an unknown format, and for int4 of inputs that 64 does not divide.
    """
    check_format(quantization)
    if quantization != "int4":
        return 0 if quantization == "none" else num_in
    for group in INT4_GROUPS:
        if num_in % group == 0:
            return group
    got = f"int4 for {name} of {num_in} inputs"
    raise ConfigError(
        f"quantization: got {got}; allowed: none, fp8, or inputs in multiples of {INT4_GROUPS[-1]}"
    )


def check_format(quantization: str) -> None:
    """ConfigError for a name that no weight format has."""
    if quantization not in WEIGHT_FORMATS:
        raise refuse(ConfigError, "quantization", quantization, ", ".join(WEIGHT_FORMATS))


def packed_bytes(
    quantization: str, num_rows: float, num_in: int, *, itemsize: int = 2, name: str = "weight"
) -> float:
    """Bytes of `num_rows` rows of `num_in` weights, scales included; `itemsize` is that of none."""
    group = group_size(quantization, num_in, name=name)
    if quantization == "none":
        return num_rows * num_in * itemsize
    if quantization == "fp8":
        return num_rows * (num_in + 4)
    return num_rows * (num_in // 2 + 2 * (num_in // group))


def chunk_rows(num_in: int, device: torch.device) -> int:
    """Rows of `num_in` weights that are packed or unpacked at a time."""
    return max(1, CHUNK_ELEMENTS["cuda" if device.type == "cuda" else "cpu"] // num_in)


def quantize(
    rows_RK: torch.Tensor, quantization: str, *, search: bool = True, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [R, K] -> (codes, scale) of fp8 or int4, on the same device.

    Raises CheckpointError, naming the tensor `name`, for a NaN or an infinity.
    """
    assert rows_RK.dtype == torch.float32, rows_RK.dtype
    if not bool(rows_RK.abs().amax() < math.inf):
        raise CheckpointError(
            f"{name}: got a NaN or an infinity; allowed: finite weights where they are quantised"
        )
    if quantization == "fp8":
        return _quantize_fp8(rows_RK)
    assert quantization == "int4", quantization
    return _quantize_int4(rows_RK, SHRINKS if search else (1.0,))


def dequantize(codes: torch.Tensor, scale: torch.Tensor | None, quantization: str) -> torch.Tensor:
    """Codes [..., N, K or K / 2] and their scales -> float32 [..., N, K]."""
    if scale is None:
        assert quantization == "none", quantization
        return codes.float()
    if quantization == "fp8":
        # As the KV codec does, with the 256 in the scale: several times as fast as torch's own.
        half = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
        return half.view(torch.float16).float().mul_(scale * 256.0)
    q = unpack_int4(codes)
    q.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.float().unsqueeze(-1))
    return q


def _quantize_fp8(rows_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    absmax_R1 = rows_RK.abs().amax(dim=-1, keepdim=True)
    scale_R1 = absmax_R1 / E4M3_MAX
    # Among subnormal scales rounding down may be by half: past 464 / 448 E4M3 knows only NaN.
    larger_R1 = torch.nextafter(scale_R1, torch.full_like(scale_R1, math.inf))
    scale_R1 = torch.where(scale_R1 * E4M3_MAX < absmax_R1, larger_R1, scale_R1)
    code_RK = (rows_RK / torch.where(scale_R1 > 0, scale_R1, 1.0)).to(torch.float8_e4m3fn)
    return code_RK.view(torch.uint8), scale_R1


def _quantize_int4(
    rows_RK: torch.Tensor, shrinks: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale's sign puts the weight of largest magnitude on -8, where there is one more step."""
    num_in = rows_RK.shape[-1]
    x_RGI = rows_RK.unflatten(-1, (-1, group_size("int4", num_in)))
    high_RG1, low_RG1 = x_RGI.amax(dim=-1, keepdim=True), x_RGI.amin(dim=-1, keepdim=True)
    extreme_RG1 = torch.where(high_RG1 > -low_RG1, high_RG1, low_RG1)
    scales = [(extreme_RG1 * (-shrink / 8)).bfloat16().float() for shrink in shrinks]
    best_RG1, least_RG1 = scales[0], torch.full_like(extreme_RG1, math.inf)
    for scale_RG1 in scales if len(scales) > 1 else ():
        error_RGI = (_round_int4(x_RGI, scale_RG1) * scale_RG1).sub_(x_RGI)
        error_RG1 = error_RGI.square_().sum(dim=-1, keepdim=True)
        best_RG1 = torch.where(error_RG1 < least_RG1, scale_RG1, best_RG1)
        least_RG1 = torch.minimum(error_RG1, least_RG1)
    codes_RK = (_round_int4(x_RGI, best_RG1) + 8).to(torch.uint8).flatten(-2)
    return pack_int4(codes_RK), best_RG1.squeeze(-1).bfloat16()


def _round_int4(x_RGI: torch.Tensor, scale_RG1: torch.Tensor) -> torch.Tensor:
    return (x_RGI / torch.where(scale_RG1 == 0, 1.0, scale_RG1)).round_().clamp_(-8, 7)


def pack_int4(code: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] below 16 -> [..., K / 2] in the order of the words above."""
    # Nibble n of a word holds input 2 * (n % 4) + n // 4.
    nibble = code.unflatten(-1, (-1, 4, 2)).transpose(-1, -2).reshape(*code.shape[:-1], -1, 2)
    return torch.add(nibble[..., 0], nibble[..., 1], alpha=16)


def unpack_int4(byte: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] -> [..., K] float32, the numbers q from -8 to 7."""
    word = byte.view(torch.int32)
    q = torch.empty(*word.shape, 8, dtype=torch.float32, device=byte.device)
    for i in range(8):
        q[..., i] = (word >> 4 * (i // 2 + 4 * (i % 2))) & 0xF
    q.sub_(8.0)
    return q.flatten(-2)


def _parameter(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


@triton_jit
def row_offset(row: tl.tensor, stride: tl.tensor) -> tl.tensor:
    """row * stride in 64 bits: an expert or a token may lie past 2**31 elements."""
    return row.to(tl.int64) * stride


@triton_jit
def load_scale(
    scale_ptr: tl.tensor,
    row_R: tl.tensor,
    first: tl.tensor,
    inside_R: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    """float32 scales of rows `row_R` (indices) for a tile of inputs from `first` in one group."""
    at_R = scale_ptr + row_offset(row_R, K // GROUP) + first // GROUP
    return tl.load(at_R, mask=inside_R, other=0.0).to(tl.float32)


@triton_jit
def _load_plain(
    codes_ptr: tl.tensor,
    row_R: tl.tensor,
    first: tl.tensor,
    inside_R: tl.tensor,
    stride_k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    k = first + tl.arange(0, BLOCK_K)
    inside = inside_R[:, None] & (k < K)[None, :]
    return tl.load(
        codes_ptr + row_R[:, None] + row_offset(k, stride_k)[None, :], mask=inside, other=0.0
    )


@triton_jit
def _load_fp8(
    codes_ptr: tl.tensor,
    row_R: tl.tensor,
    first: tl.tensor,
    inside_R: tl.tensor,
    stride_k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    byte_RK = _load_plain(codes_ptr, row_R, first, inside_R, stride_k, K, BLOCK_K)
    return e4m3_over_256(byte_RK) * 256.0


@triton_jit
def _load_int4(
    codes_ptr: tl.tensor,
    row_R: tl.tensor,
    first: tl.tensor,
    inside_R: tl.tensor,
    stride_k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    tl.static_assert(K % 8 == 0 and BLOCK_K % 8 == 0)
    w = first // 8 + tl.arange(0, BLOCK_K // 8)
    inside = inside_R[:, None] & (w < K // 8)[None, :]
    at_RW = codes_ptr + row_R[:, None] + row_offset(w, stride_k)[None, :]
    word_RW = tl.load(at_RW, mask=inside, other=-0x77777778)
    i = tl.arange(0, 8)
    shift_I = 4 * (i // 2 + 4 * (i % 2))
    code_RWI = (word_RW[:, :, None] >> shift_I[None, None, :]) & 0xF
    # 2^23 + code as a float32 is this pattern: no conversion instruction, and the 8 goes with it.
    value_RWI = (code_RWI | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    return tl.reshape(value_RWI, (row_R.shape[0], BLOCK_K))


# Four codes: PRMT puts two into the low bytes of two halves. With the sign bit s of a half,
# 16 * (code + 15 * s) has exponent, mantissa and sign in the places of a bfloat16's: 2^-120 of the
# value, subnormals included. 10 instructions.
@triton_jit
def _load_fp8_ptx(
    codes_ptr: tl.tensor,
    row_R: tl.tensor,
    first: tl.tensor,
    inside_R: tl.tensor,
    stride_k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    byte_RK = _load_plain(codes_ptr, row_R, first, inside_R, stride_k, K, BLOCK_K)
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 low, high, sign, factor, zero;
        mov.b32 factor, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        prmt.b32 low, $2, 0, 0x4140;
        prmt.b32 high, $2, 0, 0x4342;
        and.b32 sign, low, 0x00800080;
        mad.lo.u32 low, sign, 15, low;
        and.b32 sign, high, 0x00800080;
        mad.lo.u32 high, sign, 15, high;
        shl.b32 low, low, 4;
        shl.b32 high, high, 4;
        fma.rn.bf16x2 $0, low, factor, zero;
        fma.rn.bf16x2 $1, high, factor, zero;
        }""",
        constraints="=r,=r,r",
        args=[byte_RK],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


# A word of eight codes: a nibble q + 8 under the bits of 128 is the bfloat16 136 + q, and 136
# leaves exactly. 11 instructions.
@triton_jit
def _load_int4_ptx(
    codes_ptr: tl.tensor,
    row_R: tl.tensor,
    first: tl.tensor,
    inside_R: tl.tensor,
    stride_k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    tl.static_assert(K % 8 == 0 and BLOCK_K % 8 == 0)
    w = first // 8 + tl.arange(0, BLOCK_K // 8)
    inside = inside_R[:, None] & (w < K // 8)[None, :]
    at_RW = codes_ptr + row_R[:, None] + row_offset(w, stride_k)[None, :]
    word_RW = tl.load(at_RW, mask=inside, other=-0x77777778)
    k0, k1, k2, k3, k4, k5, k6, k7 = tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 word, pair, one, middle;
        mov.b32 one, 0x3f803f80;
        mov.b32 middle, 0xc308c308;
        and.b32 pair, $8, 0x000f000f;
        or.b32 pair, pair, 0x43004300;
        fma.rn.bf16x2 pair, pair, one, middle;
        mov.b32 {$0, $1}, pair;
        shr.u32 word, $8, 4;
        and.b32 pair, word, 0x000f000f;
        or.b32 pair, pair, 0x43004300;
        fma.rn.bf16x2 pair, pair, one, middle;
        mov.b32 {$2, $3}, pair;
        shr.u32 word, $8, 8;
        and.b32 pair, word, 0x000f000f;
        or.b32 pair, pair, 0x43004300;
        fma.rn.bf16x2 pair, pair, one, middle;
        mov.b32 {$4, $5}, pair;
        shr.u32 word, $8, 12;
        and.b32 pair, word, 0x000f000f;
        or.b32 pair, pair, 0x43004300;
        fma.rn.bf16x2 pair, pair, one, middle;
        mov.b32 {$6, $7}, pair;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r",
        args=[word_RW],
        dtype=(
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )
    # Of input 4 a + 2 b + c of a word: dimensions a, then b, then c.
    even = tl.join(tl.join(k0, k4), tl.join(k2, k6))
    odd = tl.join(tl.join(k1, k5), tl.join(k3, k7))
    return tl.reshape(tl.join(even, odd), (row_R.shape[0], BLOCK_K))


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    name: WeightFormat(name=name, load_codes=load_codes, load_codes_ptx=load_codes_ptx)
    for name, load_codes, load_codes_ptx in (
        ("none", _load_plain, _load_plain),
        ("fp8", _load_fp8, _load_fp8_ptx),
        ("int4", _load_int4, _load_int4_ptx),
    )
}
"""Names that `--quantization` takes, and how kernels read each."""
