"""Which formats of the cache attention reads more slowly than `fp8`, though they are smaller."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

LONG_CONTEXT = 32768
"""Tokens from which on it is said: below, attention is a small part of a step."""

TIMES_FP8: Mapping[str, Mapping[int, float]] = {
    "int4_g32": {32768: 3.34, 131072: 3.28},
    "int4_g64": {32768: 3.91, 131072: 4.04},
    "vq1.5": {32768: 4.07, 131072: 4.1},
    "adaptive": {32768: 1.31, 131072: 0.92},
}
"""Time of attention over that of `fp8`, by tokens in the cache, of formats of fewer bytes that took
longer: qwen3-30b-a3b's shape, batch 1, one H200, from benchmarks/results/h200-adaptive-attend.json.
Of `adaptive` the slowest mix of pages."""


def warn_if_slow(kv_cache_dtype: str, *, device_kind: str, max_model_len: int) -> None:
    """Say so in one line, where contexts may be long and `fp8` was measured to be faster."""
    times = TIMES_FP8.get(kv_cache_dtype)
    if times is None or device_kind != "cuda" or max_model_len < LONG_CONTEXT:
        return
    logger.warning(
        "kv_cache_dtype: attention over %s took %s as long as over fp8 on an H200: "
        "choose it for memory, not for speed",
        kv_cache_dtype,
        " and ".join(f"{share:.1f} times at {context} tokens" for context, share in times.items()),
    )
