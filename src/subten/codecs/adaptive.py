"""The format of an adaptive cache, whose pages start in BF16 and go down a ladder (nested.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from subten.codecs import CODECS, KVFormat, kv_format
from subten.codecs.nested import MixedFormat, mixed_format
from subten.core import ConfigError, refuse

ADAPTIVE = "adaptive"
"""The name that `--kv-cache-dtype` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveFormat(KVFormat):
    """The hot page, which tokens are appended to, and in `mixed` all that it may become."""

    mixed: MixedFormat


def adaptive_format(head_dim: int) -> AdaptiveFormat:
    """The format for `head_dim`; ConfigError for one that no Hadamard block divides."""
    mixed = mixed_format(head_dim)
    values = {field.name: getattr(mixed.hot, field.name) for field in fields(KVFormat)}
    summary = "BF16 sinks and window; the rest in 4 to 1.5 bits, by importance"
    codec = replace(mixed.hot.codec, name=ADAPTIVE, summary=summary)
    return AdaptiveFormat(**(values | {"codec": codec}), mixed=mixed)


def cache_format(name: str, head_dim: int) -> KVFormat:
    """The format that `kv_cache_dtype` names: a codec's, or the adaptive one."""
    if name == ADAPTIVE:
        return adaptive_format(head_dim)
    if name not in CODECS:
        raise refuse(ConfigError, "kv_cache_dtype", name, ", ".join((*CODECS, ADAPTIVE)))
    return kv_format(name, head_dim)
