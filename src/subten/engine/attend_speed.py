"""Which formats of the cache attention reads more slowly than `fp8`, though they are smaller."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

LONG_CONTEXT = 32768
"""Tokens from which on it is said: below, attention is a small part of a step."""

TIMES_FP8: Mapping[str, Mapping[int, float]] = {
    "int4_g32": {32768: 3.35},
    "int4_g64": {32768: 3.93},
    "vq1.5": {32768: 4.09},
    "adaptive": {32768: 1.28, 131072: 0.92},
    "adaptive with cold pages": {32768: 7.91, 131072: 9.38},
}
"""Time of attention over that of `fp8`, by tokens in the cache, of formats of fewer bytes that took
longer: qwen3-30b-a3b's shape, batch 1, one H200, from benchmarks/results/h200-adaptive-attend.json.
Of `adaptive` the slowest mix of pages; with cold ones Triton reads them."""


def warn_if_slow(
    kv_cache_dtype: str, *, device_kind: str, max_model_len: int, has_cold_pages: bool = False
) -> None:
    """Say so in one line, where contexts may be long and `fp8` was measured to be faster."""
    name = f"{kv_cache_dtype} with cold pages" if has_cold_pages else kv_cache_dtype
    times = TIMES_FP8.get(name)
    if times is None or device_kind != "cuda" or max_model_len < LONG_CONTEXT:
        return
    logger.warning(
        "kv_cache_dtype: attention over %s took %s as long as over fp8 on an H200: "
        "choose it for memory, not for speed",
        name,
        " and ".join(f"{share:.1f} times at {context} tokens" for context, share in times.items()),
    )
