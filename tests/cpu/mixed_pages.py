"""Planes of an adaptive cache for tests: random bytes everywhere, one layer or several.

Letters: L layers, G KV heads, D head_dim, P page ids, O outlier channels, S sink rows.
"""

from __future__ import annotations

import torch

from subten.codecs.mixed import MixedFormat, mixed_format
from subten.core import PAGE_SIZE
from subten.kernels.demote import ValuePools
from subten.kernels.mixed_pages import MixedPages, Window


def int32(*values: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_bytes(generator: torch.Generator, device: torch.device, *shape: int) -> torch.Tensor:
    """Every byte is a code or a norm of something: what a freed plane may hold."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


def make_pages(
    generator: torch.Generator,
    device: torch.device,
    head_dim: int,
    *,
    places: list[tuple[int, int, int]],
    bits: int,
    num_kv_heads: int = 2,
    num_recent: int = 8,
    num_sinks: int = 0,
    sinks: list[int] | None = None,
    num_outliers: int = 0,
) -> tuple[MixedFormat, MixedPages]:
    """Layer 1 of two, so that planes are not adjacent; recent and sink rows are NaN."""
    fmt, num_pages = mixed_format(head_dim), len(places)

    def pool(num_planes: int, num_bytes: int) -> torch.Tensor:
        shape = (num_planes, 2, num_kv_heads, num_bytes)
        return random_bytes(generator, device, *shape)[:, 1]

    recent_NGE = torch.full((num_recent, num_kv_heads, 2 * head_dim), float("nan"), device=device)
    optional: dict[str, torch.Tensor] = {}
    if sinks is not None:
        optional["sink_XGB"] = pool(max(sinks) + 1, fmt.exact_bytes(num_sinks)).fill_(0xFF)
        optional["sink_P"] = int32(*sinks, device=device)
    if num_outliers:
        ids = [torch.randperm(head_dim, generator=generator) for _ in range(num_kv_heads)]
        optional["outlier_GO"] = torch.stack(ids)[:, :num_outliers].int().contiguous().to(device)
        optional["k_out_PGB"] = pool(num_pages, fmt.outlier_bytes(num_outliers)).zero_()
    counts = [max(place[kind] for place in places) + 1 for kind in range(3)]
    return fmt, MixedPages(
        k_PGB=pool(num_pages, fmt.k_bytes(bits)),
        k_bits=bits,
        vbase_XGB=pool(counts[0], fmt.base_bytes),
        vfine_YGB=pool(counts[1], fmt.fine_bytes),
        vcold_ZGB=pool(counts[2], fmt.cold_bytes),
        place_P3=torch.tensor(places, dtype=torch.int32, device=device),
        recent_NGE=recent_NGE.bfloat16(),
        **optional,
    )


def make_values(
    generator: torch.Generator, device: torch.device, head_dim: int, *, num_planes: int
) -> tuple[MixedFormat, ValuePools]:
    """Two layers and heads of values, norms near the middle of the byte's range."""
    fmt = mixed_format(head_dim)

    def pool(num_bytes: int) -> torch.Tensor:
        return random_bytes(generator, device, num_planes, 2, 2, num_bytes).transpose(0, 1)

    pools = ValuePools(
        vbase_LXGB=pool(fmt.base_bytes),
        vfine_LYGB=pool(fmt.fine_bytes),
        vcold_LZGB=pool(fmt.cold_bytes),
    )
    pools.vbase_LXGB[..., -PAGE_SIZE:] //= 4
    pools.vbase_LXGB[..., -PAGE_SIZE:] += 130
    return fmt, pools


def no_window(num_tokens: int, num_seqs: int, device: torch.device) -> Window:
    """Nothing is read or written as a recent row."""
    zero_S = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    row_T = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
    return Window(size=0, row_T=row_T, base_S=zero_S, cap_S=zero_S, from_S=zero_S)
