"""Ways to cache keys and values, as torch encode/decode pairs: what others ship, and our codecs.

Others, at their defaults, decode to what their own code would give, stored in as many bits:

- `quanto`, `hqq`: the quantised caches of transformers 5: asymmetric groups of 64 along a head,
  16-bit scale and zero-point, the last block of 128 tokens exact until it is full. hqq moves the
  zero-point by its half-quadratic iteration (Badri and Shaji, 2023); transformers asks for less,
  no iteration, and groups that span tokens and heads, which lost more than twice as much.
- `kivi` (Liu et al., 2024): keys per channel in groups of 32 tokens, flushed in blocks of 128;
  values per token in groups of 32, the last 128 exact.
- `int4-g32`, `int4-g64`: groups along a head, no window.
- `nvfp4`, `mxfp4`: as codecs fp4 and fp4_mx.
- `turboquant` (Zandieh et al., 2025), without its residual stage, as engines ship it: a random
  rotation, Lloyd-Max levels, one 16-bit norm a row.

Letters: T tokens, G KV heads, D head dimension, N channels or tokens of a group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from subten.bench.kv_lab import EXACT_BITS, Scheme, Tiers, all_encoded
from subten.calibration.rows import LayerRows
from subten.codecs import kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE

RowCoder = Callable[[torch.Tensor], torch.Tensor]
"""Float32 rows [..., D] -> what they decode to."""

KIVI_BLOCK = 128
"""Tokens that KIVI and transformers keep exact until the block is full."""


def comparison_schemes(head_dim: int) -> list[Scheme]:
    """What others ship, at each width that they offer of 4, 3 and 2 bits."""
    schemes = []
    for bits in (4, 2):
        per_64 = bits + 32 / 64
        schemes += [
            _scheme(
                f"quanto-{bits}",
                functools.partial(affine_rows, bits=bits, group=64),
                bits=per_64,
                tiers=flushed_blocks,
            ),
            _scheme(
                f"hqq-{bits}",
                functools.partial(hqq_rows, bits=bits, group=64),
                bits=per_64,
                tiers=flushed_blocks,
            ),
            kivi(bits),
        ]
    for bits in (4, 3, 2):
        coder = functools.partial(turboquant_rows, bits=bits)
        schemes.append(_scheme(f"turboquant-{bits}", coder, bits=bits + 16 / head_dim))
    for group in (32, 64):
        coder = functools.partial(affine_rows, bits=4, group=group)
        schemes.append(_scheme(f"int4-g{group}", coder, bits=4 + 32 / group))
    for name, codec in (("nvfp4", "fp4"), ("mxfp4", "fp4_mx")):
        stored_bits = kv_format(codec, head_dim).true_bits
        schemes.append(_scheme(name, codec_rows(codec), bits=stored_bits))
    return schemes


def codec_scheme(codec: str, head_dim: int) -> Scheme:
    """A codec of ours for every row, without protection."""
    bits = kv_format(codec, head_dim).true_bits
    return _scheme(codec, codec_rows(codec), bits=bits, ours=True)


def kivi(bits: int) -> Scheme:
    """KIVI with groups of 32 and a residual of 128."""

    def encode(rows: LayerRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        key_GTD = affine_channels(rows.key_GTD, bits=bits, group=32)
        value_GTD = affine_rows(rows.value_GTD, bits=bits, group=32)
        return [rows.key_GTD, key_GTD], [rows.value_GTD, value_GTD]

    def tiers(page: int) -> tuple[torch.Tensor, torch.Tensor]:
        return flushed_blocks(page)[0], all_encoded(page)[1]

    stored = (EXACT_BITS, bits + 1.0)
    return Scheme(
        name=f"kivi-{bits}",
        ours=False,
        encode=encode,
        key_bits=stored,
        value_bits=stored,
        tiers=tiers,
        value_window=KIVI_BLOCK,
    )


def flushed_blocks(page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of the last, unfinished block of 128 tokens exact, all before it encoded."""
    pages = KIVI_BLOCK // PAGE_SIZE
    tier_P = torch.ones(page + 1, dtype=torch.int64)
    tier_P[page // pages * pages :] = 0
    return tier_P, tier_P


def ladder(steps: Sequence[tuple[int | None, int, int]], *, first_exact: bool = False) -> Tiers:
    """Tiers by age: `(pages, key version, value version)` for the next so many pages, newest first.

    The last step has None: all older pages. With `first_exact` the first page stays exact.
    """

    def tiers(page: int) -> tuple[torch.Tensor, torch.Tensor]:
        tier_2P = torch.empty(2, page + 1, dtype=torch.int64)
        stop = page + 1
        for pages, key, value in steps:
            start = 0 if pages is None else max(0, stop - pages)
            tier_2P[:, start:stop] = torch.tensor([[key], [value]])
            stop = start
        assert stop == 0 or steps[-1][0] is not None, steps
        if first_exact:
            tier_2P[:, 0] = 0
        return tier_2P[0], tier_2P[1]

    return tiers


def codec_rows(codec: str) -> RowCoder:
    """Rows through a codec's bytes, turned before and back after where the codec is rotated."""

    def coder(x_D: torch.Tensor) -> torch.Tensor:
        fmt = kv_format(codec, x_D.shape[-1])
        rotation_DD = hadamard(x_D.shape[-1], x_D.device) if fmt.codec.is_rotated else None
        turned_D = x_D if rotation_DD is None else x_D @ rotation_DD
        planes = fmt.codec.encode(turned_D.contiguous())
        decoded_D = fmt.codec.decode(*planes, x_D.shape[-1])
        return decoded_D if rotation_DD is None else decoded_D @ rotation_DD.mT

    return coder


def affine_rows(x_D: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """Asymmetric codes, FP16 scale and minimum per `group` neighbouring channels."""
    return _affine(x_D.unflatten(-1, (-1, min(group, x_D.shape[-1]))), bits, dim=-1).flatten(-2)


def affine_channels(x_GTD: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """The same per channel over `group` tokens; what is left of a last group is one of its own."""
    whole = x_GTD.shape[-2] // group * group
    groups = x_GTD[..., :whole, :].unflatten(-2, (-1, group))
    full_GTD = _affine(groups, bits, dim=-2).flatten(-3, -2)
    if whole == x_GTD.shape[-2]:
        return full_GTD
    return torch.cat([full_GTD, _affine(x_GTD[..., whole:, :], bits, dim=-2)], dim=-2)


def hqq_rows(x_D: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """Asymmetric codes whose zero-point minimises an l_0.7 error (Badri and Shaji, 2023)."""
    x_N = x_D.unflatten(-1, (-1, min(group, x_D.shape[-1])))
    low_1, high_1 = torch.aminmax(x_N, dim=-1, keepdim=True)
    levels = 2**bits - 1
    scale_1 = (levels / (high_1 - low_1).clamp(min=1e-8)).clamp(max=2e4)
    zero_1 = -low_1 * scale_1
    if bits == 4:
        zero_1 = zero_1.round()
    beta, power, growth = 10.0, 0.7, 1.01
    best, best_zero_1 = math.inf, zero_1
    for _ in range(20):
        code_N = (x_N * scale_1 + zero_1).round().clamp(0, levels)
        rest_N = x_N - (code_N - zero_1) / scale_1
        error = float(rest_N.abs().mean())
        if error >= best:
            break
        best, best_zero_1 = error, zero_1
        size_N = rest_N.abs()
        shrunk_N = rest_N.sign() * (size_N - size_N.clamp(min=1e-12).pow(power - 1) / beta).relu()
        zero_1 = (code_N - (x_N - shrunk_N) * scale_1).mean(dim=-1, keepdim=True)
        beta *= growth
    zero_1, scale_1 = best_zero_1.half().float(), scale_1.half().float()
    code_N = (x_N * scale_1 + zero_1).round().clamp(0, levels)
    return ((code_N - zero_1) / scale_1).flatten(-2)  # type: ignore[no-any-return]


def turboquant_rows(x_D: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Random rotation, Lloyd-Max levels of a unit Gaussian, an FP16 norm a row."""
    rotation_DD = _random_rotation(x_D.shape[-1], x_D.device)
    turned_D = x_D @ rotation_DD
    norm_1 = turned_D.pow(2).mean(dim=-1, keepdim=True).sqrt().half().float().clamp(min=1e-7)
    level_N = lloyd_max_levels(2**bits).to(x_D.device)
    code_D = torch.bucketize(turned_D / norm_1, (level_N[1:] + level_N[:-1]) / 2)
    return level_N[code_D] * norm_1 @ rotation_DD.mT


@functools.cache
def lloyd_max_levels(count: int) -> torch.Tensor:
    """The levels that lose least of a unit Gaussian (Max, 1960), float32, ascending."""
    normal = torch.distributions.Normal(*torch.tensor([0.0, 1.0], dtype=torch.float64))
    # Panter and Dite's companding: levels are densest where density^(1/3) is, a Gaussian 3 wide.
    share_N = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    level_N = normal.icdf(share_N) * math.sqrt(3.0)
    for _ in range(20_000):
        edge_N = torch.cat([level_N[:1] - 40, (level_N[1:] + level_N[:-1]) / 2, level_N[-1:] + 40])
        density_N = normal.log_prob(edge_N).exp()
        mass_N = normal.cdf(edge_N).diff().clamp(min=1e-300)
        moved_N = -density_N.diff() / mass_N
        if float((moved_N - level_N).abs().max()) < 1e-12:
            break
        level_N = moved_N
    return level_N.float()  # type: ignore[no-any-return]


def _affine(x: torch.Tensor, bits: int, *, dim: int) -> torch.Tensor:
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    low = low.half().float()
    scale = ((high - low) / (2**bits - 1)).half().float().clamp(min=1e-7)
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low  # type: ignore[no-any-return]


@functools.cache
def _random_rotation(head_dim: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    gaussian_DD = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64)
    q_DD, r_DD = torch.linalg.qr(gaussian_DD)
    return (q_DD * r_DD.diagonal().sign()).float().to(device)  # type: ignore[no-any-return]


def _scheme(
    name: str, coder: RowCoder, *, bits: float, tiers: Tiers = all_encoded, ours: bool = False
) -> Scheme:
    """One coder for keys and values."""
    return Scheme(
        name=name,
        ours=ours,
        encode=lambda rows: (
            [rows.key_GTD, coder(rows.key_GTD)],
            [rows.value_GTD, coder(rows.value_GTD)],
        ),
        key_bits=(EXACT_BITS, bits),
        value_bits=(EXACT_BITS, bits),
        tiers=tiers,
    )
