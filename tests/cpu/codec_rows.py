"""Rows that codecs are tested on, and the error that each codec may make on them.

Letters: N rows, D head_dim.
"""

from __future__ import annotations

import torch

from subten.codecs import CODECS, KVFormat, get_codec, kv_format
from subten.core import ConfigError

HEAD_DIMS = (48, 64, 80, 96, 100, 112, 128, 192, 256)
FLOAT_MAX = 3.4028234663852886e38
SMALLEST = 2.0**-149
ROTATED = ("int4", "int2", "vq1.5")
AFFINE = ("int8", "int4", "int4_g32", "int4_g64")
GROUPS = {"int4_g32": 32, "int4_g64": 64, "fp4": 16, "fp4_mx": 32}


def formats() -> list[KVFormat]:
    """Every codec with every head_dim that it takes."""
    found = []
    for name in CODECS:
        for head_dim in HEAD_DIMS:
            try:
                found.append(kv_format(name, head_dim))
            except ConfigError:
                assert name in ROTATED and head_dim == 100, (name, head_dim)
    return found


def format_id(fmt: KVFormat) -> str:
    """Name of a parametrised case."""
    return f"{fmt.codec.name}-{fmt.head_dim}"


def special_rows(head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """Finite rows that break careless codecs: cases K07, K08, K10, K11 and extreme exponents."""
    ones = torch.ones(head_dim)
    normal = torch.randn(14, head_dim, generator=generator)
    sign = torch.where(normal > 0, 1.0, -1.0)
    spread = torch.exp2(torch.rand(head_dim, generator=generator) * 277 - 149)
    rows = [9.0 * ones, -9.0 * ones, 0.0 * ones, -0.0 * ones, 0.1 * ones]
    for size in (1e-9, 1e-20, 1e-38, SMALLEST, 6e37, 3e38):
        rows += [size * ones, size * sign[0], size * (normal[0] / normal[0].abs().max())]
    outlier = normal[1].clone()
    outlier[head_dim // 3] = -70000.0
    zero_channel = normal[2].clone()
    zero_channel[5] = 0.0
    rows += [outlier, 3e6 * sign[2], 100 + 1e-3 * normal[3], zero_channel, FLOAT_MAX * sign[4]]
    rows += [spread * sign[5], spread * sign[6], spread.clamp(max=1e4) * sign[7]]
    # Quarters hit the ties of E2M1 and INT4, odd sixteenths those of E4M3 under a scale of 1, odd
    # 256ths those of BF16; whole numbers hit every grid.
    odd = 2.0 * torch.arange(head_dim) + 1
    sixteenths = (1 + odd % 16 / 16) * torch.exp2(odd % 13 - 9) * sign[8]
    sixteenths[0] = 448.0
    rows += [(4 * normal[8]).round() / 4, (30 * normal[9]).round(), normal[10], 1000 * normal[11]]
    rows += [sixteenths, (1 + odd % 256 / 256) * sign[9]]
    return torch.stack(rows)


def metadata_scale(x_ND: torch.Tensor, name: str) -> torch.Tensor:
    """Largest scale that the written formula can give each element, float64 [N, D].

    BF16 keeps 8 significant bits, so that rounding away from zero adds at most 2^-7 of a value, or
    a whole step of 2^-133 below its normal range.
    """
    x_ND = x_ND.double()
    group = GROUPS.get(name, x_ND.shape[-1])
    scale_ND = torch.empty_like(x_ND)
    for first in range(0, x_ND.shape[-1], group):
        part = x_ND[:, first : first + group]
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        absmax = torch.maximum(low.abs(), high.abs())
        if name in AFFINE:
            levels = 255 if name == "int8" else 15
            low_rounding = low.abs() * 2**-7 + 2.0**-133
            scale = (high - low + low_rounding) / levels * (1 + 2**-7) + 2.0**-133
        elif name == "fp8":
            scale = absmax / 448 * (1 + 2**-7) + 2.0**-133
        elif name == "fp4":
            # E4M3: nearest within 2^-4 if normal, else up to a step of 2^-9 above, in units of the
            # row's power of two, which is below absmax of the row / 1344 but for its least value.
            unit = (x_ND.abs().amax(-1, keepdim=True) / 1344).clamp(min=2.0**-126)
            scale = absmax / 6 * (1 + 2**-4) + unit * 2**-9
        else:
            # The least power of two of at least absmax / 6.
            scale = (absmax / 3).clamp(min=2.0**-126)
        scale_ND[:, first : first + group] = scale
    return scale_ND


def error_bound(x_ND: torch.Tensor, name: str) -> torch.Tensor:
    """Largest error that codec `name` may make on each element of `x_ND`, float64 [N, D]."""
    size_ND = x_ND.double().abs()
    # Float32 arithmetic of the decode, and values below float32's subnormals.
    slack_ND = size_ND.amax(-1, keepdim=True) * 2**-22 + 2 * SMALLEST
    if name == "fp32":
        return torch.zeros_like(size_ND)
    if name == "bf16":
        # 8 significant bits to nearest; below 2^-126 steps of 2^-133; 3.39e38 is the largest.
        return (size_ND * 2**-8).clamp(min=2.0**-134)
    if name == "int2":
        # A norm n is at most a mean of |x| / 3, and 2s of least squares: an inner value becomes 3n,
        # no more than the largest, and an outer one, above 6.5s, at most 20s, with its own sign.
        # Fixed-point steps are at least 2^-118; more than 1e38 counts as that.
        limit = (size_ND - 1e38).clamp(min=0.0) + 2.0**-118
        largest_N1 = size_ND.clamp(max=1e38).amax(-1, keepdim=True)
        outer_ND = (20 / 6.5 * (1 + 2**-8) - 1) * size_ND.clamp(max=1e38)
        return torch.maximum(outer_ND, largest_N1 * (1 + 2**-8)) + slack_ND + limit
    if name == "vq1.5":
        # At most twice the norm of least squares: no row is further from its codewords than from
        # zero. BF16 adds 2^-8 of it, and a level has at most 127 steps of 2^-134.
        limit = (size_ND - 1e37).clamp(min=0.0) + 16 * 2.0**-118
        distance_N1 = size_ND.clamp(max=1e37).square().sum(-1, keepdim=True).sqrt()
        return distance_N1 * (1 + 2**-7) + slack_ND + limit
    if name in AFFINE:
        # Half a step; magnitudes above 3.3e38 count as 3.3e38.
        limit = (size_ND - 3.3e38).clamp(min=0.0)
        return metadata_scale(x_ND.clamp(-3.3e38, 3.3e38), name) / 2 + slack_ND + limit
    if name == "fp8":
        # E4M3: 4 significant bits to nearest, below 2^-6 steps of 2^-9. A row whose absmax / 448 is
        # below float32's subnormals becomes zeros.
        limit = (size_ND - 3.3e38).clamp(min=0.0) + 448 * SMALLEST
        scale_ND = metadata_scale(x_ND, name)
        return torch.maximum(size_ND * 2**-4, scale_ND * 2**-10) + slack_ND + limit
    # E2M1: 2 significant bits to nearest, below 1 steps of 0.5; magnitudes above 2.97e38 count as
    # 2.97e38, after which they may lie at a tie.
    limit = (size_ND - 2.97e38).clamp(min=0.0)
    scale_ND = metadata_scale(x_ND, name)
    return torch.maximum(size_ND / 4, scale_ND / 4) + slack_ND + limit


def round_trip(x_ND: torch.Tensor, name: str) -> torch.Tensor:
    """`x_ND` encoded and decoded by the torch twins; no rotation."""
    codec = get_codec(name)
    return codec.decode(*codec.encode(x_ND), x_ND.shape[-1])


def assert_within(decoded_ND: torch.Tensor, x_ND: torch.Tensor, name: str) -> None:
    """Fail unless every element is finite and within the codec's bound; names the worst one."""
    assert bool(decoded_ND.isfinite().all()), (name, "not finite")
    excess_ND = (decoded_ND.double() - x_ND.double()).abs() - error_bound(x_ND, name)
    n, d = divmod(int(excess_ND.argmax()), x_ND.shape[-1])
    assert float(excess_ND[n, d]) <= 0, (
        f"{name}: row {n} channel {d}: {float(x_ND[n, d])!r} became {float(decoded_ND[n, d])!r}, "
        f"{float(excess_ND[n, d]):.3e} beyond the bound"
    )
