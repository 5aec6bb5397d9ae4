"""The format of an adaptive cache: exact rows, and planes that its pages lie in (mixed.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from subten.codecs import CODECS, KVFormat, kv_format, layout
from subten.codecs.mixed import MixedFormat, mixed_format
from subten.codecs.plain import BF16
from subten.core import ConfigError, refuse

ADAPTIVE = "adaptive"
"""The name that `--kv-cache-dtype` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveFormat(KVFormat):
    """Rows as recent tokens have them, rotated and in BF16, and in `mixed` the planes of pages."""

    mixed: MixedFormat


def adaptive_format(head_dim: int) -> AdaptiveFormat:
    """The format for `head_dim`; ConfigError for one that is not a multiple of 16, or above 256."""
    mixed = mixed_format(head_dim)
    summary = "K shaped at 2 to 4 bits, V at 4 to 1.5 by importance; sinks and recent tokens exact"
    codec = replace(BF16, name=ADAPTIVE, summary=summary, is_rotated=True)
    exact = layout(codec, head_dim)
    values = {field.name: getattr(exact, field.name) for field in fields(KVFormat)}
    return AdaptiveFormat(**values, mixed=mixed)


def cache_format(name: str, head_dim: int) -> KVFormat:
    """The format that `kv_cache_dtype` names: a codec's, or the adaptive one."""
    if name == ADAPTIVE:
        return adaptive_format(head_dim)
    if name not in CODECS:
        raise refuse(ConfigError, "kv_cache_dtype", name, ", ".join((*CODECS, ADAPTIVE)))
    return kv_format(name, head_dim)
