"""What the engine says of slow formats is what was measured."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from subten.engine.attend_speed import LONG_CONTEXT, TIMES_FP8, warn_if_slow

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-adaptive-attend.json"


def test_the_table_is_the_record() -> None:
    records = json.loads(RECORD.read_text(encoding="utf-8"))["records"]
    found: dict[str, dict[int, float]] = {}
    for context in sorted({r["context"] for r in records}):
        here = [r for r in records if r["context"] == context]
        (fp8,) = (r for r in here if r["format"] == "fp8")
        for record in here:
            name = record["format"].split()[0]
            if record["kv_bytes"] < fp8["kv_bytes"]:
                share = record["us_per_layer"] / fp8["us_per_layer"]
                each = found.setdefault(name, {})
                each[context] = max(each.get(context, 0.0), round(share, 2))
    slow = {name: times for name, times in found.items() if max(times.values()) > 1}
    assert slow == TIMES_FP8


def test_one_line_where_contexts_are_long(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_slow("fp8", device_kind="cuda", max_model_len=10**6)
        warn_if_slow("adaptive", device_kind="cpu", max_model_len=10**6)
        warn_if_slow("adaptive", device_kind="cuda", max_model_len=LONG_CONTEXT - 1)
        assert not caplog.records
        warn_if_slow("adaptive", device_kind="cuda", max_model_len=LONG_CONTEXT)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "adaptive" in message
    assert f"times at {LONG_CONTEXT} tokens" in message
