"""What the settings of an adaptive cache mean on this machine: widths, planes, page ids, rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from subten.cache.adaptive_pool import plane_bytes, staging_rows
from subten.cache.plane_plan import PlaneAsk, PlanePlan, plan_planes
from subten.codecs.adaptive import AdaptiveFormat
from subten.codecs.shaped import WIDTHS
from subten.codecs.vq import FIRST, SECOND, VECTOR
from subten.config import EngineConfig, ModelConfig
from subten.core import PAGE_SIZE, ConfigError, refuse

logger = logging.getLogger(__name__)

SINK_TOKENS = 4
"""First tokens of a sequence that stay in BF16 unless `kv_sink_tokens` says otherwise: attention
sinks lie there, whose errors reach every later token."""

WINDOW_TOKENS = 32
"""Last tokens that are read in BF16 unless `kv_window_tokens` says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLimits:
    """Sizes of an adaptive cache, and the tokens that one sequence may reach."""

    plan: PlanePlan
    max_model_len: int
    num_sinks: int
    num_outliers: int
    window: int


def resolve_adaptive(
    config: EngineConfig,
    model: ModelConfig,
    fmt: AdaptiveFormat,
    *,
    memory: tuple[str, int] | None,
    sensitivity: Sequence[float] | None = None,
) -> AdaptiveLimits:
    """Planes and context length within `memory`, a name and bytes; None: `num_pages` decides.

    `sensitivity` says how much each layer suffers from coarse keys. The context length never
    exceeds the pool, as in `resolve_limits`. ConfigError, with both numbers, where budget or memory
    cannot be met.
    """
    sinks = SINK_TOKENS if config.kv_sink_tokens is None else config.kv_sink_tokens
    window = WINDOW_TOKENS if config.kv_window_tokens is None else config.kv_window_tokens
    num_outliers = outlier_count(config.kv_outlier_channels, fmt.head_dim)
    exact = {"num_sinks": sinks, "num_outliers": num_outliers, "window": window}
    each = {width: plane_bytes((width,), model.num_kv_heads, fmt, **exact) for width in WIDTHS}
    planes = plane_bytes((4,) * model.num_layers, model.num_kv_heads, fmt, **exact)
    spare_rows = staging_rows(config.max_num_batched_tokens, config.max_num_seqs, window)
    spare_rows += model.num_layers if window else 0
    name, memory_bytes = memory if memory is not None else ("num_pages", None)
    ask = PlaneAsk(
        key_bytes={width: numbers.key for width, numbers in each.items()},
        sensitivity=[0.0] * model.num_layers if sensitivity is None else sensitivity,
        base_bytes=planes.base,
        fine_bytes=planes.fine,
        cold_bytes=planes.cold,
        sink_bytes=planes.sink,
        ring_bytes=planes.ring,
        codebook_bytes=2 * VECTOR * (FIRST + SECOND),
        fixed_bytes=spare_rows * model.num_kv_heads * fmt.mixed.exact_bytes(1),
        page_elements=PAGE_SIZE * 2 * model.num_layers * model.num_kv_heads * fmt.head_dim,
        memory_bytes=memory_bytes,
        memory_name=name,
        num_pages=config.num_pages,
        bits_budget=config.kv_bits_budget,
        has_cold=config.kv_cold_pages,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or model.max_model_len,
    )
    plan = plan_planes(ask)
    capacity = plan.num_pages * PAGE_SIZE
    if ask.max_model_len > capacity:
        held = f"all that {plan.num_pages} pages hold"
        if config.max_model_len is not None:
            allowed = f"1 to {capacity}, {held}"
            raise refuse(ConfigError, "max_model_len", config.max_model_len, allowed)
        logger.warning("max_model_len: %d lowered to %d, %s", ask.max_model_len, capacity, held)
        ask = replace(ask, max_model_len=capacity)
        plan = plan_planes(ask)
    if plan.max_num_seqs < config.max_num_seqs:
        logger.warning(
            "max_num_seqs: %d lowered to %d, whose recent rows take half of %s",
            config.max_num_seqs,
            plan.max_num_seqs,
            name,
        )
    _log(ask, plan)
    return AdaptiveLimits(
        plan=plan,
        max_model_len=ask.max_model_len,
        num_sinks=sinks,
        num_outliers=num_outliers,
        window=window,
    )


def outlier_count(percent: float | None, head_dim: int) -> int:
    """Channels of a head that so many percent are, at least one; None and 0 are none."""
    return max(1, round(percent * head_dim / 100)) if percent else 0


def _log(ask: PlaneAsk, plan: PlanePlan) -> None:
    counts, widths = plan.counts, sorted(set(plan.widths))
    keys = ", ".join(f"{width} bits in {plan.widths.count(width)} layers" for width in widths)
    finest = ask.pages_of_one * ask.finest
    values = finest if plan.value_bytes is None else plan.value_bytes
    logger.info(
        "adaptive cache: %d pages (%d tokens), %.1f MiB: keys %s; values %d base, %d fine, %d cold "
        "planes, at most %.3f bits of a sequence of %d tokens",
        plan.num_pages,
        plan.num_pages * PAGE_SIZE,
        (counts.dot(ask.plane_bytes(plan.widths)) + ask.fixed_bytes) / 2**20,
        keys,
        counts.base,
        counts.fine,
        counts.cold,
        values * 8 / (ask.page_elements / 2 * ask.max_model_len / PAGE_SIZE),
        ask.max_model_len,
    )
