"""TTFT, ITL and TPOT as they are defined, and percentiles with their sample counts."""

from __future__ import annotations

import pytest

from subten.engine.stats import LatencySummary, Percentiles, Timings


# Case P01: first token at 500 ms, then ten tokens 5 ms apart.
def test_first_token_is_no_gap() -> None:
    timings = Timings(arrival_s=0.0, token_times_s=tuple(0.5 + 0.005 * i for i in range(11)))
    assert timings.ttft_ms == pytest.approx(500)
    assert timings.itl_ms == pytest.approx([5] * 10)
    assert timings.tpot_ms == pytest.approx(5)


def test_undefined_times_are_none() -> None:
    assert Timings(arrival_s=0.0, token_times_s=()).ttft_ms is None
    one = Timings(arrival_s=1.0, token_times_s=(2.0,))
    assert (one.ttft_ms, one.tpot_ms, one.itl_ms) == (1000.0, None, ())
    summary = LatencySummary.of([one])
    assert summary.tpot_ms is None
    assert summary.itl_ms is None
    assert summary.ttft_ms == Percentiles(p50=1000.0, p90=1000.0, p99=1000.0, num_samples=1)


def test_percentiles_interpolate_between_order_statistics() -> None:
    found = Percentiles.of(float(i) for i in reversed(range(101)))
    assert found == Percentiles(p50=50.0, p90=90.0, p99=99.0, num_samples=101)
    assert Percentiles.of([1.0, 2.0]).p50 == 1.5
    assert Percentiles.of([]) is None
