"""Keys, queries and values with the habits of models that are not at hand.

Three families of keys, before rotary embedding, with the numbers that others have published of
them: `llama` has a few channels of large scale and mean; `qwen2.5` a constant of norm 600 in a few
rotary pairs, the bias of its key projection; `qk_norm` rows of equal norm under a weight a channel.
The first tokens may be sinks: keys of low norm that queries point at, with small values.

Letters: T tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from subten.bench.kv_ours import shaped
from subten.bench.kv_schemes import codec_rows
from subten.calibration.keys import turn
from subten.codecs import kv_format
from subten.codecs.adaptive import ADAPTIVE
from subten.codecs.mixed import mixed_format
from subten.codecs.rotation import hadamard
from subten.config import RopeConfig
from subten.core import PAGE_SIZE, ConfigError, refuse
from subten.layers.rope import cos_sin_table

ROPE_THETA: Mapping[str, float] = {"llama": 5e5, "qwen2.5": 1e6, "qk_norm": 1e6}
"""Family to the base of its rotary embedding."""

BIAS_NORM = 600.0
"""Norm of the key bias of the first layer of Qwen2.5 models; most others have about 22."""

BIAS_PAIRS = 6
"""Rotary pairs that hold nearly all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticHead:
    """One KV head's rows, float32 [T, D], and the constant D of its keys before rotary embedding.

    `key_TD` and `query_TD` are rotated to their positions.
    """

    mean_key_D: torch.Tensor
    key_TD: torch.Tensor
    query_TD: torch.Tensor
    value_TD: torch.Tensor
    cos_sin_TD: torch.Tensor

    @property
    def turned_mean_TD(self) -> torch.Tensor:
        """The constant at every position."""
        return turn(self.mean_key_D[None], self.cos_sin_TD)[0]


def synthetic_head(
    family: str,
    *,
    num_tokens: int,
    head_dim: int = 128,
    num_sinks: int = 0,
    generator: torch.Generator | None = None,
) -> SyntheticHead:
    """Random rows of a `family` in ROPE_THETA; ConfigError lists the families."""
    if family not in ROPE_THETA:
        raise refuse(ConfigError, "family", family, ", ".join(ROPE_THETA))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mean_D = torch.zeros(head_dim)
    key_TD = normal(num_tokens, head_dim)
    if family == "llama":
        outlier_5 = torch.randperm(head_dim, generator=generator)[:5]
        key_TD[:, outlier_5] *= 4
        mean_D[outlier_5] = 10 * normal(5).sign()
    elif family == "qwen2.5":
        pair_6 = torch.randperm(head_dim // 2, generator=generator)[:BIAS_PAIRS]
        channel_12 = torch.cat([pair_6, pair_6 + head_dim // 2])
        bias_12 = normal(len(channel_12))
        mean_D[channel_12] = bias_12 * (BIAS_NORM / bias_12.norm())
        mean_D += normal(head_dim)
    else:
        weight_D = (0.5 * normal(head_dim)).exp()
        key_TD = torch.nn.functional.rms_norm(key_TD + 0.5 * normal(head_dim), (head_dim,))
        key_TD = key_TD * weight_D
        mean_D = key_TD.mean(dim=0)
        key_TD = key_TD - mean_D
    raw_TD = key_TD + mean_D
    query_TD = normal(num_tokens, head_dim) + normal(head_dim)
    value_TD = normal(num_tokens, head_dim)
    if num_sinks:
        # Low norm, and a score that all queries share: along the mean query.
        toward_D = query_TD.mean(dim=0)
        raw_TD[:num_sinks] = 0.1 * normal(num_sinks, head_dim)
        raw_TD[:num_sinks] += toward_D * (2 * head_dim**0.5 / toward_D.square().sum())
        value_TD[:num_sinks] *= 0.05
    rope = RopeConfig(theta=ROPE_THETA[family])
    cos_sin_TD = cos_sin_table(
        rope, head_dim=head_dim, max_len=num_tokens, device=torch.device("cpu")
    )
    turned_2TD = [_turn_rows(x, cos_sin_TD) for x in (raw_TD, query_TD)]
    return SyntheticHead(
        mean_key_D=mean_D,
        key_TD=turned_2TD[0],
        query_TD=turned_2TD[1],
        value_TD=value_TD,
        cos_sin_TD=cos_sin_TD,
    )


def key_error(head: SyntheticHead, codec: str, *, is_stripped: bool) -> float:
    """Squared error of a head's keys through a codec over their energy about the constant.

    The energy without the constant: what scores differ by, and what a codec must keep. `adaptive`
    is keys of the adaptive cache at 4 bits, Hadamard-rotated.
    """
    shift_TD = head.turned_mean_TD if is_stripped else torch.zeros(())
    rest_TD = head.key_TD - shift_TD
    if codec == ADAPTIVE:
        rotation_DD = hadamard(rest_TD.shape[-1], rest_TD.device)
        decoded_TD = shaped((rest_TD @ rotation_DD)[None], 4)[0] @ rotation_DD.mT
    else:
        decoded_TD = codec_rows(codec)(rest_TD)
    energy = (head.key_TD - head.turned_mean_TD).double().square().sum()
    return float((decoded_TD + shift_TD - head.key_TD).double().square().sum() / energy)


def key_bits(codec: str, head_dim: int) -> float:
    """True bits of a codec's keys."""
    if codec == ADAPTIVE:
        return mixed_format(head_dim).k_bytes(4) * 8 / (PAGE_SIZE * head_dim)
    return kv_format(codec, head_dim).true_bits


def measure_keys(num_tokens: int = 4096, head_dim: int = 128) -> Iterator[dict[str, Any]]:
    """Errors of every family with and without stripping, from a fixed seed."""
    for family in ROPE_THETA:
        generator = torch.Generator().manual_seed(0)
        head = synthetic_head(family, num_tokens=num_tokens, head_dim=head_dim, generator=generator)
        for codec in ("bf16", "int8", "int4", ADAPTIVE, "int2"):
            for is_stripped in (True, False):
                yield {
                    "model": f"synthetic {family}",
                    "scheme": codec + (", stripped" if is_stripped else ""),
                    "window": num_tokens,
                    "head_dim": head_dim,
                    "true_bits": key_bits(codec, head_dim),
                    "relative_key_error": key_error(head, codec, is_stripped=is_stripped),
                }


def _turn_rows(x_TD: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
    first_TC, second_TC = x_TD.chunk(2, dim=-1)
    cos_TC, sin_TC = cos_sin_TD.chunk(2, dim=-1)
    turned = (first_TC * cos_TC - second_TC * sin_TC, second_TC * cos_TC + first_TC * sin_TC)
    return torch.cat(turned, dim=-1)
