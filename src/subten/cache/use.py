"""What pages of the KV cache take; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """Bytes of some pages, over all layers and heads, and how many of them are of each kind.

    A cache of one format has one kind, named like it; an adaptive one has a kind a rung.
    """

    num_bytes: int = 0
    pages_by_kind: Mapping[str, int] = field(default_factory=dict)
