"""Ways to cache keys and values, as torch encode/decode pairs: what others ship, and ours.

Others, at their defaults, decode to what their own code would give, stored in as many bits:

- `quanto`, `hqq`: the quantised caches of transformers 5: asymmetric groups of 64 along a head,
  16-bit scale and zero-point, the last block of 128 tokens exact until it is full. hqq moves the
  zero-point by its half-quadratic iteration (Badri and Shaji, 2023).
- `kivi` (Liu et al., 2024): keys per channel in groups of 32 tokens, flushed in blocks of 128;
  values per token in groups of 32, the last 128 exact.
- `int4-g32`, `int4-g64`: groups along a head, no window.
- `nvfp4`, `mxfp4`: as codecs fp4 and fp4_mx.
- `turboquant` (Zandieh et al., 2025), without its residual stage, as engines ship it: a random
  rotation, Lloyd-Max levels, one 16-bit norm a row.

Letters: T tokens, G KV heads, D head dimension, N channels or tokens of a group, L layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from subten.bench.kv_lab import EXACT_BITS, Scheme, Tiers, all_encoded
from subten.calibration.keys import KeyStatistics, KeyTransform, turn
from subten.calibration.rows import LayerRows
from subten.codecs import kv_format
from subten.codecs.mixed import decode_cold, encode_cold
from subten.codecs.nested import decode_nested, encode_nested
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE

RowCoder = Callable[[torch.Tensor], torch.Tensor]
"""Float32 rows [..., D] -> what they decode to."""

KIVI_BLOCK = 128
"""Tokens that KIVI and transformers keep exact until the block is full."""


def comparison_schemes(head_dim: int) -> list[Scheme]:
    """What others ship, at 4 and 2 bits where they offer both."""
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
            _scheme(
                f"turboquant-{bits}",
                functools.partial(turboquant_rows, bits=bits),
                bits=bits + 16 / head_dim,
            ),
        ]
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
        return [key_GTD], [affine_rows(rows.value_GTD, bits=bits, group=32)]

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


KeyCoder = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Stored rows [G, T, D] and a transform's feedback [G, D, D] -> what the rows decode to."""


def protected(
    name: str,
    *,
    keys: Sequence[tuple[KeyCoder, float]],
    values: Sequence[tuple[RowCoder, float]],
    tiers: Tiers,
    statistics: KeyStatistics | None = None,
    transform: KeyTransform | None = None,
    sinks: int = 0,
    window: int = 0,
) -> Scheme:
    """Rows less their means, keys under a transform and values rotated, then coded.

    `keys` and `values` are versions 1, 2, ... and their bits an element. Without `statistics`
    nothing is stripped, without `transform` keys are Hadamard-rotated. The first `sinks` tokens
    and the last `window` are exact, beside their codes.
    """

    def encode(rows: LayerRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rotation_DD = hadamard(rows.key_GTD.shape[-1], rows.key_GTD.device)
        matrix_DD, inverse_DD, feedback_GDD = rotation_DD, rotation_DD.mT, None
        if transform is not None:
            matrix_DD = transform.matrix_LGDD[rows.layer]
            inverse_DD = transform.inverse_LGDD[rows.layer]
            if transform.feedback_LGDD is not None:
                feedback_GDD = transform.feedback_LGDD[rows.layer]
        shift_GTD = center_G1D = torch.zeros((), device=rotation_DD.device)
        if statistics is not None:
            shift_GTD = turn(statistics.mean_key_LGD[rows.layer], rows.cos_sin_TD)
            center_G1D = statistics.mean_value_LGD[rows.layer][:, None]
        key_GTD = (rows.key_GTD - shift_GTD) @ matrix_DD
        value_GTD = (rows.value_GTD - center_G1D) @ rotation_DD
        return (
            [coder(key_GTD, feedback_GDD) @ inverse_DD + shift_GTD for coder, _ in keys],
            [coder(value_GTD) @ rotation_DD.mT + center_G1D for coder, _ in values],
        )

    return Scheme(
        name=name,
        ours=True,
        encode=encode,
        key_bits=(EXACT_BITS, *(bits for _, bits in keys)),
        value_bits=(EXACT_BITS, *(bits for _, bits in values)),
        tiers=tiers,
        sinks=sinks,
        key_window=window,
        value_window=window,
        is_beside=True,
    )


def alone(coder: RowCoder) -> KeyCoder:
    """A coder of keys that knows of no feedback."""
    return lambda x_GTD, _feedback_GDD: coder(x_GTD)


def shaped_rows(
    x_GTD: torch.Tensor,
    feedback_GDD: torch.Tensor | None,
    *,
    bits: int,
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Lloyd-Max codes, channel by channel, each error fed into the channels after it; unbiased.

    `norm` rounds norms to what is stored of them, BF16 by default.
    """
    assert feedback_GDD is not None, "a shaped transform"
    stored = _bf16 if norm is None else norm
    norm_GT1 = stored(x_GTD.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-30))
    want_GTD = x_GTD / norm_GT1
    level_N = lloyd_max_levels(2**bits).to(x_GTD.device)
    edge_N = (level_N[1:] + level_N[:-1]) / 2
    read_N = level_N / (1 - lloyd_max_error(2**bits))
    decoded_GTD = torch.empty_like(want_GTD)
    for i in range(x_GTD.shape[-1]):
        decoded_GTD[..., i] = read_N[torch.bucketize(want_GTD[..., i].contiguous(), edge_N)]
        # The error against the value itself, not against what was asked of this channel.
        error_GT1 = (x_GTD[..., i] / norm_GT1[..., 0] - decoded_GTD[..., i])[..., None]
        want_GTD += error_GT1 * feedback_GDD[:, None, i]
    return decoded_GTD * norm_GT1


def lloyd_max_rows(
    x_D: torch.Tensor,
    *,
    bits: int,
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Lloyd-Max codes of rotated rows and the norm for which <x, decoded> = |x|^2.

    `norm` rounds norms to what is stored of them, BF16 by default.
    """
    level_N = lloyd_max_levels(2**bits).to(x_D.device)
    square_1 = x_D.square().sum(dim=-1, keepdim=True)
    rms_1 = (square_1 / x_D.shape[-1]).sqrt().clamp(min=1e-30)
    read_D = level_N[torch.bucketize(x_D / rms_1, (level_N[1:] + level_N[:-1]) / 2)]
    norm_1 = square_1 / (x_D * read_D).sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return read_D * (_bf16 if norm is None else norm)(norm_1)


def byte_norm(norm_1: torch.Tensor) -> torch.Tensor:
    """Norms of one byte: powers of 2^(1/16), 2^-8 to 2^7.9; within 2.2 % of the norm."""
    return torch.exp2((norm_1.clamp(min=1e-30).log2() * 16).round().clamp(-128, 127) / 16)


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


def plane_rows(kind: str) -> RowCoder:
    """Rotated rows through the planes of values: `nested4`, `int2` (its base), `vq1.5`."""

    def coder(x_D: torch.Tensor) -> torch.Tensor:
        if kind == "vq1.5":
            return decode_cold(*encode_cold(x_D.contiguous()))
        codes, fine, norm, _ = encode_nested(x_D.contiguous())
        return decode_nested(codes, fine if kind == "nested4" else None, norm)

    return coder


def affine_rows(x_D: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """Asymmetric codes, FP16 scale and minimum per `group` neighbouring channels."""
    return _affine(x_D.unflatten(-1, (-1, min(group, x_D.shape[-1]))), bits, dim=-1).flatten(-2)


def affine_channels(x_GTD: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """The same per channel over `group` tokens; what is left of a last group is one of its own."""
    whole = x_GTD.shape[1] // group * group
    full_GTD = _affine(x_GTD[:, :whole].unflatten(1, (-1, group)), bits, dim=2).flatten(1, 2)
    if whole == x_GTD.shape[1]:
        return full_GTD
    return torch.cat([full_GTD, _affine(x_GTD[:, whole:], bits, dim=1)], dim=1)


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


@functools.cache
def lloyd_max_error(count: int) -> float:
    """Mean square error of those levels on a unit Gaussian: 1 - E[level^2], as for centroids."""
    level_N = lloyd_max_levels(count).double()
    normal = torch.distributions.Normal(*torch.tensor([0.0, 1.0], dtype=torch.float64))
    edge_N = torch.cat([level_N[:1] - 40, (level_N[1:] + level_N[:-1]) / 2, level_N[-1:] + 40])
    return float(1 - (normal.cdf(edge_N).diff() * level_N.square()).sum())


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


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
        encode=lambda rows: ([coder(rows.key_GTD)], [coder(rows.value_GTD)]),
        key_bits=(EXACT_BITS, bits),
        value_bits=(EXACT_BITS, bits),
        tiers=tiers,
    )
