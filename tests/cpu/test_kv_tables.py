"""Tables of what caches cost: which bars are met, which needles were found."""

from __future__ import annotations

from typing import Any

import pytest
from test_repo import load_tables


@pytest.fixture
def tables() -> Any:
    return load_tables().kv_tables


def record(scheme: str, **fields: Any) -> dict[str, Any]:
    shown = {"ours": scheme.startswith("adaptive"), "true_bits": 4.4, "kld_mean": 0.01}
    of = {"kind": "kv_scheme_quality", "model": "m", "text": "wiki.test.raw.txt", "window": 2048}
    return {**of, "scheme": scheme, "ppl_ratio": 1.002, **shown, **fields}


def judged(tables: Any, *records: dict[str, Any]) -> list[list[str]]:
    rows = tables.bars_table(records).splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({}, "yes"),
        ({"ppl_ratio": 1.0101}, "**no**"),
        ({"ppl_ratio": 0.9}, "yes"),
        ({"true_bits": 4.501}, "**no**"),
    ],
)
def test_a_bar_asks_for_bits_and_perplexity(tables, fields, met):
    ((_, name, _, asked, _, found),) = judged(tables, record("adaptive-4.5", **fields))
    assert name.startswith("adaptive-4.5, 4.")
    assert asked == "within 1 % at 4.5 bits"
    assert found == met


def test_the_best_of_others_counts_if_it_has_as_many_bits(tables):
    ours = record("adaptive-4.5", kld_mean=0.01)
    few_bits = record("mxfp4", true_bits=4.25, kld_mean=0.001)
    worse = record("kivi-4", true_bits=5.7, kld_mean=0.02)
    _, (_, _, figure, asked, _, met) = judged(tables, ours, few_bits, worse)
    assert (figure, met) == ("KLD mean", "yes")
    assert asked == "at most the least of 1 others, 0.02000 (kivi-4)"
    better = record("hqq-4", true_bits=4.4, kld_mean=0.009)
    assert judged(tables, ours, few_bits, worse, better)[1][-1] == "**no**"
    # Ours without an adaptive plan, and their coarser ones, are not 4-bit schemes of others.
    rest = (record("int4", kld_mean=0.001), record("kivi-2", true_bits=9.0, kld_mean=0.001))
    assert judged(tables, ours, worse, *rest)[1][-1] == "yes"


def test_a_book_is_judged_apart(tables):
    book = {"text": "moby_dick.txt", "window": 8192, "true_bits": 2.7}
    rows = judged(
        tables,
        record("adaptive-2.7", **book, kld_mean=0.11),
        record("kivi-2", **(book | {"true_bits": 3.2}), kld_mean=0.2),
        record("vq1.5", **book, ppl_ratio=7.3),
    )
    assert [row[-1] for row in rows] == ["yes", "**no**", ""]
    assert rows[2][4] == "+630.00 %"
    assert tables.bars_table([record("adaptive-2.7", kld_mean=0.1)]) == tables.MISSING


def test_needles_are_counted_by_depth_and_length(tables):
    def found(scheme: str, window: int, bits: float, shares: list[float]) -> dict[str, Any]:
        reference = [1.0, 0.8]
        of = record(scheme, kind="kv_needles", window=window, true_bits=bits, num_needles=10)
        return of | {"depths": [0, 1], "found": shares, "found_reference": reference}

    rows = tables.needles_table(
        [
            found("int2", 512, 2.25, [0.0, 0.2]),
            found("adaptive-3", 2048, 3.0, [0.6, 1.0]),
            found("int2", 2048, 2.25, [0.2, 0.0]),
        ]
    ).splitlines()[2:]
    assert [" ".join(row.split("|")[2:]).split() for row in rows] == [
        ["bf16", "16.00", "5", "4", "16.00", "5", "4"],
        ["**adaptive-3**", "3.00", "3", "5"],
        ["int2", "2.25", "0", "1", "2.25", "1", "0"],
    ]
