"""The adaptive cache as the laboratory sees it: its codecs, its plan, and pages lowered by age.

Keys are encoded once, at a width of their layer, in the basis that calibration gave; values at
insertion to 4 bits. While a sequence has more of them than its allowance, pages lose their fine
plane (2 bits), and once all but the newest have, they are, if asked, encoded again at 1.5. The last
tokens and the first ones have exact rows besides. The engine lowers the pages that matter least;
here it is the oldest ones.

Letters: T tokens, G KV heads, D head dimension, L layers, O outlier channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from subten.bench.kv_lab import EXACT_BITS, Scheme
from subten.cache.plane_plan import PlaneAsk, plan_planes
from subten.calibration.keys import turn
from subten.calibration.keys_at_load import KeyCalibration
from subten.calibration.rows import LayerRows
from subten.codecs.mixed import MixedFormat, decode_cold, encode_cold
from subten.codecs.nested import decode_nested, encode_nested
from subten.codecs.rotation import hadamard
from subten.codecs.shaped import WIDTHS, decode_shaped, encode_shaped, outliers_of
from subten.codecs.vq import codebook
from subten.config import ModelConfig
from subten.core import PAGE_SIZE

WINDOW, SINKS = 32, 4
"""Tokens with exact rows besides their codes: the last and the first."""

FINE, BASE, COLD = 1, 2, 3
"""Versions of values: 4, 2 and 1.5 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """What is kept of keys and values. None of `value_bytes`: no limit.

    `key_bits_L` are widths of keys; the `num_outliers` channels of a head that calibration puts
    first are BF16 instead. `value_bytes` is what the values of a sequence may take in one layer and
    KV head; the `newest_pages` keep 4 bits as long as others can give theirs.
    """

    key_bits_L: tuple[int, ...]
    value_bytes: float | None = None
    newest_pages: int = 8
    has_cold: bool = False
    window: int = WINDOW
    sinks: int = SINKS
    num_outliers: int = 0

    def value_kinds(self, page: int, fmt: MixedFormat) -> torch.Tensor:
        """Versions of the values of pages 0 to `page` while that is written, int64 [page + 1]."""
        count = page + 1
        kind_P = torch.full((count,), FINE)
        if self.value_bytes is None:
            return kind_P
        left = self.value_bytes - count * fmt.base_bytes
        num_fine = min(count, max(0, math.floor(left / fmt.fine_bytes)))
        num_cold = 0
        if self.has_cold:
            # Old pages go cold before the newest give their fine planes.
            saved = fmt.base_bytes - fmt.cold_bytes
            num_old = max(0, count - self.newest_pages)
            most = max(0, math.floor((left + num_old * saved) / fmt.fine_bytes))
            num_fine = max(num_fine, min(most, count - num_old))
            num_cold = max(0, math.ceil((num_fine * fmt.fine_bytes - left) / saved))
            num_cold = min(num_cold, count - num_fine)
        kind_P[: count - num_fine] = BASE
        kind_P[:num_cold] = COLD
        return kind_P


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBasis:
    """What is taken from keys before they are encoded, and how they are turned.

    Without `calibration` nothing is, and keys are Hadamard-rotated; `is_turned` False: the mean
    alone is taken.
    """

    calibration: KeyCalibration | None = None
    is_turned: bool = True

    def turned(self, rows: LayerRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys as they are stored, float32, with the shift and the inverse that lead back."""
        rotation_DD = hadamard(rows.key_GTD.shape[-1], rows.key_GTD.device)
        matrix_DD, inverse_DD = rotation_DD, rotation_DD.mT
        shift_GTD = torch.zeros((), device=rotation_DD.device)
        if self.calibration is not None:
            shift_GTD = turn(self.calibration.mean_LGD[rows.layer], rows.cos_sin_TD)
            if self.is_turned:
                matrix_DD = self.calibration.matrix_LGDD[rows.layer]
                inverse_DD = self.calibration.inverse_LGDD[rows.layer]
        return (rows.key_GTD - shift_GTD) @ matrix_DD, shift_GTD, inverse_DD

    def feedback(self, layer: int) -> torch.Tensor | None:
        """M of a layer [G, D, D], if there is one."""
        if self.calibration is None or not self.is_turned:
            return None
        return self.calibration.feedback_LGDD[layer].contiguous()


def adaptive(name: str, protection: Protection, basis: KeyBasis, *, head_dim: int) -> Scheme:
    """The cache under a protection."""
    fmt = MixedFormat(head_dim=head_dim)
    elements = PAGE_SIZE * head_dim / 8
    num_outliers = protection.num_outliers
    assert not num_outliers or basis.calibration is not None, num_outliers
    out_bytes = fmt.outlier_bytes(num_outliers)
    key_bits = [(fmt.k_bytes(bits) + out_bytes) / elements for bits in protection.key_bits_L]
    value_bytes = (fmt.base_bytes + fmt.fine_bytes, fmt.base_bytes, fmt.cold_bytes)
    kinds = (FINE, BASE, COLD) if protection.has_cold else (FINE, BASE)

    def encode(rows: LayerRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        stored_GTD, shift_GTD, inverse_DD = basis.turned(rows)
        width, feedback_GDD = protection.key_bits_L[rows.layer], basis.feedback(rows.layer)
        outlier_GO = None
        if num_outliers:
            assert basis.calibration is not None
            outlier_GO = basis.calibration.outlier_LGD[rows.layer, :, :num_outliers]
        # Exact rows are BF16 in the basis that they are stored in.
        exact_GTD = stored_GTD.bfloat16().float()
        keys = [exact_GTD, shaped(stored_GTD, width, feedback_GDD, outlier_GO)]
        rotation_DD = hadamard(head_dim, rows.value_GTD.device)
        values = value_versions(rows.value_GTD @ rotation_DD, kinds)
        return (
            [key_GTD @ inverse_DD + shift_GTD for key_GTD in keys],
            [value_GTD @ rotation_DD.mT for value_GTD in values],
        )

    def tiers(page: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(page + 1, dtype=torch.int64), protection.value_kinds(page, fmt)

    return Scheme(
        name=name,
        ours=True,
        encode=encode,
        key_bits=(EXACT_BITS, sum(key_bits) / len(key_bits)),
        value_bits=(EXACT_BITS, *(num_bytes / elements for num_bytes in value_bytes[: len(kinds)])),
        tiers=tiers,
        sinks=protection.sinks,
        key_window=protection.window,
        value_window=protection.window,
        is_beside=True,
        codebook_bytes=codebook(torch.device("cpu")).nbytes if protection.has_cold else 0,
    )


def protection_for(
    budget: float,
    config: ModelConfig,
    *,
    num_tokens: int,
    noise_L: Sequence[float],
    has_cold: bool = False,
    num_outliers: int = 0,
) -> Protection:
    """What the engine plans for `budget` true bits at a longest context of `num_tokens`.

    ConfigError, with both numbers, for a budget that cannot be met.
    """
    fmt = MixedFormat(head_dim=config.head_dim)
    heads = config.num_layers * config.num_kv_heads
    ask = PlaneAsk(
        key_bytes={
            width: config.num_kv_heads * (fmt.k_bytes(width) + fmt.outlier_bytes(num_outliers))
            for width in WIDTHS
        },
        sensitivity=noise_L,
        base_bytes=heads * fmt.base_bytes,
        fine_bytes=heads * fmt.fine_bytes,
        cold_bytes=heads * fmt.cold_bytes,
        sink_bytes=heads * fmt.exact_bytes(SINKS),
        ring_bytes=heads * fmt.exact_bytes(WINDOW),
        codebook_bytes=codebook(torch.device("cpu")).nbytes,
        fixed_bytes=0,
        page_elements=PAGE_SIZE * 2 * heads * config.head_dim,
        memory_bytes=None,
        memory_name="num_pages",
        num_pages=-(-num_tokens // PAGE_SIZE),
        bits_budget=budget,
        has_cold=has_cold,
        max_num_seqs=1,
        max_num_batched_tokens=num_tokens,
        max_model_len=num_tokens,
    )
    plan = plan_planes(ask)
    return Protection(
        key_bits_L=plan.widths,
        value_bytes=None if plan.value_bytes is None else plan.value_bytes / heads,
        newest_pages=plan.newest_pages,
        has_cold=has_cold,
        num_outliers=num_outliers,
    )


def shaped(
    stored_GTD: torch.Tensor,
    bits: int,
    feedback_GDD: torch.Tensor | None = None,
    outlier_GO: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stored keys [..., G, T, D] through their bytes."""
    # Windows and tokens first, heads after them.
    token_first = stored_GTD.movedim(-3, -2)
    rows_TGD = token_first.reshape(-1, *token_first.shape[-2:])
    low_TGQ, high_TGB, norm_TG, is_bad_TG = encode_shaped(
        rows_TGD, bits=bits, feedback_GDD=feedback_GDD, outlier_GO=outlier_GO
    )
    decoded_ND = decode_shaped(
        low_TGQ.flatten(0, 1), high_TGB.flatten(0, 1), norm_TG.flatten(), bits=bits
    )
    del is_bad_TG  # A row out of range ends its request; here its error shows in the figures.
    decoded_TGD = decoded_ND.view(rows_TGD.shape)
    if outlier_GO is not None:
        place_TGO = outlier_GO.long().expand(len(rows_TGD), -1, -1)
        exact_TGO = outliers_of(rows_TGD, outlier_GO).bfloat16().float()
        decoded_TGD = decoded_TGD.scatter(-1, place_TGO, exact_TGO)
    return decoded_TGD.view(token_first.shape).movedim(-2, -3)


def value_versions(turned_GTD: torch.Tensor, kinds: Sequence[int]) -> list[torch.Tensor]:
    """Rotated values exact in BF16, then as each kind of plane gives them back."""
    codes, fine, norm, _ = encode_nested(turned_GTD.contiguous())
    base_GTD = decode_nested(codes, None, norm)
    versions = [turned_GTD.bfloat16().float()]
    for kind in kinds:
        if kind == FINE:
            versions.append(decode_nested(codes, fine, norm))
        else:
            versions.append(base_GTD if kind == BASE else decode_cold(*encode_cold(base_GTD)))
    return versions
