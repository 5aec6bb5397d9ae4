"""What the settings of an adaptive cache mean on this machine: planes, page ids, windows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from subten.cache.adaptive_pool import plane_bytes
from subten.cache.fidelity import FidelityPolicy
from subten.cache.plane_plan import PlaneAsk, PlanePlan, plan_planes
from subten.codecs.adaptive import AdaptiveFormat
from subten.config import EngineConfig, ModelConfig
from subten.core import PAGE_SIZE, ConfigError, refuse

logger = logging.getLogger(__name__)

SINK_TOKENS = 4
"""First tokens of a sequence that stay in BF16 unless `kv_sink_tokens` says otherwise: attention
sinks lie there, whose errors reach every later token."""

MAX_SINK_ROWS = 16
"""So many sink tokens are kept as rows of their own; for more the whole pages stay in BF16."""

WINDOW_TOKENS = 0
"""Last tokens that stay in BF16 unless `kv_window_tokens` says otherwise, besides the page that is
being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLimits:
    """Sizes and policy of an adaptive cache, and the tokens that one sequence may reach."""

    plan: PlanePlan
    policy: FidelityPolicy
    max_model_len: int
    num_sinks: int


def resolve_adaptive(
    config: EngineConfig, model: ModelConfig, fmt: AdaptiveFormat, *, memory: tuple[str, int] | None
) -> AdaptiveLimits:
    """Planes and context length within `memory`, a name and bytes; None: `num_pages` decides.

    The context length never exceeds the pool, as in `resolve_limits`. ConfigError, with both
    numbers, where windows alone exceed memory or budget.
    """
    sinks = SINK_TOKENS if config.kv_sink_tokens is None else config.kv_sink_tokens
    window = WINDOW_TOKENS if config.kv_window_tokens is None else config.kv_window_tokens
    num_sinks = sinks if sinks <= MAX_SINK_ROWS else 0
    name, memory_bytes = memory if memory is not None else ("num_pages", None)
    ask = PlaneAsk(
        plane_bytes=plane_bytes(model.num_layers, model.num_kv_heads, fmt, num_sinks),
        page_elements=PAGE_SIZE * 2 * model.num_layers * model.num_kv_heads * fmt.head_dim,
        memory_bytes=memory_bytes,
        memory_name=name,
        num_pages=config.num_pages,
        bits_budget=config.kv_bits_budget,
        has_cold=config.kv_cold_pages,
        sink_pages=0 if num_sinks else -(-sinks // PAGE_SIZE),
        window_tokens=window,
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
            "max_num_seqs: %d lowered to %d, whose windows in BF16 take half of %s",
            config.max_num_seqs,
            plan.max_num_seqs,
            name,
        )
    _log(ask, plan)
    policy = FidelityPolicy(
        sink_pages=ask.sink_pages, window_tokens=window, routine_bytes=plan.routine_bytes
    )
    return AdaptiveLimits(
        plan=plan, policy=policy, max_model_len=ask.max_model_len, num_sinks=num_sinks
    )


def _log(ask: PlaneAsk, plan: PlanePlan) -> None:
    counts = plan.counts
    finest = ask.plane_bytes.base + 2 * ask.plane_bytes.fine
    routine = finest if plan.routine_bytes is None else min(finest, plan.routine_bytes)
    logger.info(
        "adaptive cache: %d pages (%d tokens), %.1f MiB: %d hot, %d base, %d fine, %d cold planes; "
        "routine pages at most %.3f bits",
        plan.num_pages,
        plan.num_pages * PAGE_SIZE,
        counts.dot(ask.plane_bytes) / 2**20,
        counts.hot,
        counts.base,
        counts.fine,
        counts.cold,
        ask.bits(routine),
    )
