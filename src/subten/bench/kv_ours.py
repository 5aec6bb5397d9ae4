"""The adaptive cache as the laboratory sees it: the shipped codecs, and tiers by age.

Keys are encoded once, at a width of their layer, in the basis that calibration gave; values at
insertion to 4 bits, the older pages without their fine plane at 2 bits, the oldest, if asked, again
at 1.5. The last tokens and the first ones have exact rows besides. The engine takes planes from the
pages that matter least; here these are the oldest ones.

Letters: T tokens, G KV heads, D head dimension, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from subten.bench.kv_lab import EXACT_BITS, Scheme
from subten.bench.kv_schemes import ladder
from subten.calibration.keys import KeyStatistics, KeyTransform, score_noise, turn
from subten.calibration.rows import LayerRows
from subten.codecs.mixed import MixedFormat, decode_cold, encode_cold
from subten.codecs.nested import decode_nested, encode_nested
from subten.codecs.rotation import hadamard
from subten.codecs.shaped import WIDTHS, decode_shaped, encode_shaped
from subten.codecs.vq import codebook
from subten.core import PAGE_SIZE, ConfigError, refuse

WINDOW, SINKS = 32, 4
"""Tokens with exact rows besides their codes: the last and the first."""

COLD_AFTER = 8
"""Newest pages that a plan never makes cold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """Widths of keys of each layer, and how many of the newest pages of values are at 4 and 2 bits.

    None: all pages that are older than those before it. What is older than both is at 1.5 bits.
    """

    key_bits_L: tuple[int, ...]
    fine_pages: int | None
    base_pages: int | None = None
    window: int = WINDOW
    sinks: int = SINKS


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBasis:
    """What is taken from keys before they are encoded, and how they are turned.

    Means [L, G, D] before rotary embedding, or none; without a transform keys are
    Hadamard-rotated.
    """

    mean_key_LGD: torch.Tensor | None = None
    transform: KeyTransform | None = None

    def turned(self, rows: LayerRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys as they are stored, float32, with the shift and the inverse that lead back."""
        rotation_DD = hadamard(rows.key_GTD.shape[-1], rows.key_GTD.device)
        matrix_DD, inverse_DD = rotation_DD, rotation_DD.mT
        if self.transform is not None:
            matrix_DD = self.transform.matrix_LGDD[rows.layer]
            inverse_DD = self.transform.inverse_LGDD[rows.layer]
        shift_GTD = torch.zeros((), device=rotation_DD.device)
        if self.mean_key_LGD is not None:
            shift_GTD = turn(self.mean_key_LGD[rows.layer], rows.cos_sin_TD)
        return (rows.key_GTD - shift_GTD) @ matrix_DD, shift_GTD, inverse_DD

    def feedback(self, layer: int) -> torch.Tensor | None:
        """M of a layer [G, D, D], if there is one."""
        if self.transform is None or self.transform.feedback_LGDD is None:
            return None
        return self.transform.feedback_LGDD[layer].contiguous()


def adaptive(name: str, protection: Protection, basis: KeyBasis, *, head_dim: int) -> Scheme:
    """The cache under a protection."""
    fmt = MixedFormat(head_dim=head_dim)
    elements = PAGE_SIZE * head_dim / 8
    key_bits = [fmt.k_bytes(bits) / elements for bits in protection.key_bits_L]
    base = fmt.base_bytes / elements
    kinds = _kinds(protection)
    bits = {"fine": base + fmt.fine_bytes / elements, "base": base}
    bits["cold"] = fmt.cold_bytes / elements

    def encode(rows: LayerRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        stored_GTD, shift_GTD, inverse_DD = basis.turned(rows)
        coded_GTD = shaped(
            stored_GTD, protection.key_bits_L[rows.layer], basis.feedback(rows.layer)
        )
        rotation_DD = hadamard(head_dim, rows.value_GTD.device)
        values = value_versions(rows.value_GTD @ rotation_DD, [kind for kind, _ in kinds])
        # Exact rows are BF16 in the basis that they are stored in.
        keys = [stored_GTD.bfloat16().float(), coded_GTD]
        return (
            [key_GTD @ inverse_DD + shift_GTD for key_GTD in keys],
            [value_GTD @ rotation_DD.mT for value_GTD in values],
        )

    return Scheme(
        name=name,
        ours=True,
        encode=encode,
        key_bits=(EXACT_BITS, sum(key_bits) / len(key_bits)),
        value_bits=(EXACT_BITS, *(bits[kind] for kind, _ in kinds)),
        tiers=ladder([(pages, 1, i + 1) for i, (_, pages) in enumerate(kinds)]),
        sinks=protection.sinks,
        key_window=protection.window,
        value_window=protection.window,
        is_beside=True,
        codebook_bytes=codebook(torch.device("cpu")).nbytes if "cold" in dict(kinds) else 0,
    )


def protection_for(
    budget: float,
    *,
    num_tokens: int,
    head_dim: int,
    noise_L: Sequence[float],
    has_cold: bool = False,
) -> Protection:
    """What fits `budget` true bits once `num_tokens` are cached.

    Keys come first: 4 bits if values can have 4 as well, else 3, else 3 in the layers of most
    `noise_L` (`calibration.keys.score_noise`) and 2 in the others. Then as many of the newest pages
    of values as fit keep 4 bits. With `has_cold` values go to 1.5 bits, which buys keys. Raises
    ConfigError for a budget below keys and values at their least.
    """
    num_layers = len(noise_L)
    order = sorted(range(num_layers), key=lambda layer: -noise_L[layer])
    low, middle, high = WIDTHS
    oldest = {"fine_pages": 0, "base_pages": COLD_AFTER if has_cold else None}

    def fits(plan: Protection) -> bool:
        return _bits(plan, num_tokens, head_dim) <= budget

    def keys(wide: int) -> Protection:
        chosen = set(order[:wide])
        widths = tuple(middle if layer in chosen else low for layer in range(num_layers))
        return Protection(key_bits_L=widths, **oldest)  # type: ignore[arg-type]

    best = Protection(key_bits_L=(high,) * num_layers, fine_pages=None)
    if fits(best):
        return best
    wide = max((n for n in range(num_layers + 1) if fits(keys(n))), default=None)
    if wide is None:
        least = _bits(keys(0), num_tokens, head_dim)
        raise refuse(ConfigError, "kv_bits_budget", budget, f"at least {least:.3f}")
    plan = keys(wide)
    if wide < num_layers:
        return plan
    pages = -(-num_tokens // PAGE_SIZE)
    plans = [replace(plan, fine_pages=n) for n in range(pages + 1)]
    return max((p for p in plans if fits(p)), key=lambda p: p.fine_pages or 0)


def layer_noise(statistics: KeyStatistics, transform: KeyTransform) -> list[float]:
    """`score_noise` as numbers."""
    return [float(noise) for noise in score_noise(statistics, transform)]


def shaped(
    stored_GTD: torch.Tensor, bits: int, feedback_GDD: torch.Tensor | None = None
) -> torch.Tensor:
    """Stored keys [..., G, T, D] through their bytes."""
    # Windows and tokens first, heads after them.
    token_first = stored_GTD.movedim(-3, -2)
    rows_TGD = token_first.reshape(-1, *token_first.shape[-2:])
    low_TGQ, high_TGB, norm_TG, is_bad_TG = encode_shaped(
        rows_TGD, bits=bits, feedback_GDD=feedback_GDD
    )
    decoded_ND = decode_shaped(
        low_TGQ.flatten(0, 1), high_TGB.flatten(0, 1), norm_TG.flatten(), bits=bits
    )
    del is_bad_TG  # A row out of range ends its request; here its error shows in the figures.
    return decoded_ND.view(token_first.shape).movedim(-2, -3)


def value_versions(turned_GTD: torch.Tensor, kinds: Sequence[str]) -> list[torch.Tensor]:
    """Rotated values exact in BF16, then as each kind of plane gives them back."""
    codes, fine, norm, _ = encode_nested(turned_GTD.contiguous())
    versions = [turned_GTD.bfloat16().float()]
    for kind in kinds:
        if kind == "fine":
            versions.append(decode_nested(codes, fine, norm))
            continue
        base_GTD = decode_nested(codes, None, norm)
        versions.append(base_GTD if kind == "base" else decode_cold(*encode_cold(base_GTD)))
    return versions


def _kinds(plan: Protection) -> list[tuple[str, int | None]]:
    """Kinds of planes of values and their pages, newest first; the last has None."""
    kinds: list[tuple[str, int | None]] = []
    for kind, pages in (("fine", plan.fine_pages), ("base", plan.base_pages), ("cold", None)):
        if pages != 0:
            kinds.append((kind, pages))
        if pages is None:
            break
    return kinds


def _bits(plan: Protection, num_tokens: int, head_dim: int) -> float:
    return adaptive("", plan, KeyBasis(), head_dim=head_dim).true_bits(num_tokens)
