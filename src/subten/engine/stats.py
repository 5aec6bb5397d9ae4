"""Times and counts of requests, with each word defined once.

TTFT: request accepted to its first token out. ITL: gap between two token arrivals of one request.
TPOT: (last - first) / (tokens - 1). A number that its request cannot define is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from subten.core import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """When a request was accepted and when each of its tokens came out; seconds of one clock."""

    arrival_s: float
    token_times_s: tuple[float, ...]

    @property
    def ttft_ms(self) -> float | None:
        """Accepted to first token; None without a token."""
        if not self.token_times_s:
            return None
        return (self.token_times_s[0] - self.arrival_s) * 1e3

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Gaps between tokens, one fewer than tokens; the wait for the first is not one of them."""
        times = self.token_times_s
        return tuple((b - a) * 1e3 for a, b in pairwise(times))

    @property
    def tpot_ms(self) -> float | None:
        """Mean gap between tokens; None below two tokens."""
        if len(self.token_times_s) < 2:
            return None
        span_s = self.token_times_s[-1] - self.token_times_s[0]
        return span_s * 1e3 / (len(self.token_times_s) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Percentiles of a sample and its size; linear interpolation between order statistics."""

    p50: float
    p90: float
    p99: float
    num_samples: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Percentiles | None:
        """Percentiles of `samples`, or None if there are none."""
        ordered = sorted(samples)
        if not ordered:
            return None
        return cls(
            p50=_quantile(ordered, 0.50),
            p90=_quantile(ordered, 0.90),
            p99=_quantile(ordered, 0.99),
            num_samples=len(ordered),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySummary:
    """TTFT, TPOT and ITL over requests, in milliseconds; None where no request defines one.

    TTFT and TPOT have one sample a request, ITL one a gap.
    """

    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None

    @classmethod
    def of(cls, timings: Iterable[Timings]) -> LatencySummary:
        """Summarise the requests of a run."""
        timings = list(timings)
        return cls(
            ttft_ms=Percentiles.of(t.ttft_ms for t in timings if t.ttft_ms is not None),
            tpot_ms=Percentiles.of(t.tpot_ms for t in timings if t.tpot_ms is not None),
            itl_ms=Percentiles.of(gap for t in timings for gap in t.itl_ms),
        )


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Counts since the engine started.

    `num_late_calls` are cancels of requests that are unknown or have ended, `num_overloaded`
    requests that were refused because too many waited.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_accepted: int = 0
    num_late_calls: int = 0
    num_overloaded: int = 0
    num_ended: Counter[FinishReason] = field(default_factory=Counter)


def _quantile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
