"""The tables of docs/kv-cache.md: what caches cost in quality, which bars they meet, the menu."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subten.bench.report import markdown_table
from subten.codecs import CODECS, kv_format
from subten.core import PAGE_SIZE

MISSING = "*Not measured yet.*"

Results = Sequence[Mapping[str, Any]]

WIKI, BOOK = ("wiki.test.raw.txt", 2048), ("moby_dick.txt", 8192)
"""Text and window that the bars are set on."""

FOUR_BITS = (
    "kivi-4",
    "hqq-4",
    "quanto-4",
    "turboquant-4",
    "int4-g32",
    "int4-g64",
    "nvfp4",
    "mxfp4",
)
"""Schemes of others at 4 bits."""


def of_kind(results: Results, kind: str) -> list[Mapping[str, Any]]:
    """Results of one kind."""
    return [result for result in results if result.get("kind") == kind]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Names and formats flush left, numbers flush right."""
    return markdown_table(header, rows, num_left=2) if rows else MISSING


def schemes_table(results: Results) -> str:
    """Perplexity and KLD of ways to keep a cache, ours and others', by bits."""
    rows = [
        [
            f"{row['model']}, {row['text']}, {row['window']}",
            _bold(row),
            f"{row['true_bits']:.3f}",
            f"{row['true_bits_mean']:.3f}",
            f"{row['ppl']:.3f}",
            _change(row),
            f"{row['kld_mean']:.5f}",
            f"{row['kld_p999']:.4f}",
            f"{row['top1_agreement'] * 100:.2f} %",
            str(row["num_tokens"]),
        ]
        for row in sorted(of_kind(results, "kv_scheme_quality"), key=_scheme_key)
    ]
    header = ["model, text, window", "scheme (bold: ours)", "true bits, end of window", "mean"]
    header += ["perplexity", "change", "KLD mean", "KLD 99.9 %", "top-1 agrees", "tokens"]
    return table(header, rows)


def needles_table(results: Results) -> str:
    """Needles found, of those at each depth from the first to the last, by length of the text."""
    records = of_kind(results, "kv_needles")
    windows = sorted({row["window"] for row in records})
    cells: dict[tuple[str, str], dict[int, tuple[float, str]]] = {}
    for row in records:
        each = row["num_needles"] // len(row["depths"])
        model = f"{row['model']}, {each} a depth"
        for name, bits, shares in (
            ("bf16", 16.0, row["found_reference"]),
            (_bold(row), row["true_bits"], row["found"]),
        ):
            found = " ".join(str(round(share * each)) for share in shares)
            cells.setdefault((model, name), {})[row["window"]] = (bits, found)
    # By model, then by bits in the longest text.
    order = sorted(cells, key=lambda key: (key[0], -cells[key][max(cells[key])][0]))
    rows = []
    for key in order:
        shown = [cells[key].get(window) for window in windows]
        rows.append([*key, *(text for cell in shown for text in _bits_and_found(cell))])
    header = ["model", "scheme (bold: ours)"]
    for window in windows:
        header += [f"bits at {window}", f"found in {window}"]
    return table(header, rows)


def _bits_and_found(cell: tuple[float, str] | None) -> tuple[str, str]:
    return ("", "") if cell is None else (f"{cell[0]:.2f}", cell[1])


def generation_table(results: Results) -> str:
    """Long greedy answers: whether they stay text."""
    rows = [
        [
            row["model"],
            row["scheme"],
            f"{row['true_bits']:.3f}",
            str(row["num_tokens"]),
            f"{row['repeated_4'] * 100:.0f} %",
            *(f"{row[f'distinct_{n}'] * 100:.0f} %" for n in (1, 2, 3)),
            f"{row['ppl']:.2f}",
            " ".join(f"{ppl:.1f}" for ppl in row["ppl_quarters"]),
            str(row["same_as_reference"]),
        ]
        for row in sorted(of_kind(results, "kv_generation"), key=_scheme_key)
    ]
    header = ["model", "KV cache", "true bits", "tokens", "4-grams repeated", "distinct words"]
    header += ["2-grams", "3-grams", "perplexity to the reference", "by quarters"]
    return table([*header, "first other token"], rows)


def keys_table(results: Results) -> str:
    """Synthetic keys, with and without stripping."""
    rows = [
        [
            row["model"].removeprefix("synthetic "),
            row["scheme"],
            f"{row['true_bits']:.3f}",
            f"{row['relative_key_error']:.4f}",
        ]
        for row in of_kind(results, "kv_synthetic")
    ]
    return table(["keys as of", "codec", "true bits", "relative key error"], rows)


def engine_table(results: Results) -> str:
    """Perplexity by the engine beside that in one pass."""
    one_pass = {
        (row["model"], row["text"], row["window"], row["scheme"]): row
        for row in of_kind(results, "kv_scheme_quality")
    }
    rows = []
    for row in sorted(of_kind(results, "kv_engine_quality"), key=_scheme_key):
        other = one_pass.get((row["model"], row["text"], row["window"], row["scheme"]))
        rows.append(
            [
                f"{row['model']}, {row['text']}, {row['window']}",
                row["scheme"],
                _change(row),
                f"{row['top1_agreement'] * 100:.2f} %",
                str(row["num_tokens"]),
                *([_change(other), str(other["num_tokens"])] if other is not None else ["", ""]),
            ]
        )
    header = ["model, text, window", "KV cache", "by the engine", "top-1 agrees", "tokens"]
    return table([*header, "in one pass", "tokens"], rows)


Found = Mapping[str, Mapping[str, Any]]
"""Records of one model, text and window, by scheme."""


def bars_table(results: Results) -> str:
    """What was aimed at, what was measured, and whether it is met."""
    rows = []
    records = of_kind(results, "kv_scheme_quality")
    for model in sorted({row["model"] for row in records}):
        for (text, window), judge in BARS:
            found = {
                row["scheme"]: row
                for row in records
                if (row["model"], row["text"], row["window"]) == (model, text, window)
            }
            rows += [[f"{model}, {text}, {window}", *row] for row in judge(found)]
    for row in of_kind(results, "kv_synthetic"):
        stripped = ("adaptive, stripped", "int4, stripped")
        if row["model"] == "synthetic qwen2.5" and row["scheme"] in stripped:
            error, asked = row["relative_key_error"], "at most 0.02 at 4.25 bits"
            met = _met(error <= 0.02 and row["true_bits"] <= 4.25)
            name = f"{row['scheme']}, {row['true_bits']:.3f}"
            rows.append(["keys as of qwen2.5", name, "relative error", asked, f"{error:.4f}", met])
    header = ["model, text, window", "scheme, true bits", "figure", "asked", "measured", "met"]
    return table(header, rows)


def _perplexity_bar(scheme: str, bits: float, percent: float) -> Callable[[Found], list[list[str]]]:
    def judge(found: Found) -> list[list[str]]:
        if scheme not in found:
            return []
        row = found[scheme]
        is_met = row["true_bits"] <= bits and row["ppl_ratio"] <= 1 + percent / 100
        asked = f"within {percent:g} % at {bits:g} bits"
        return [[_with_bits(row), "perplexity", asked, _change(row), _met(is_met)]]

    return judge


def _best_of_others(found: Found) -> list[list[str]]:
    ours = found.get("adaptive-4.5")
    if ours is None:
        return []
    others = [found[name] for name in FOUR_BITS if name in found]
    others = [row for row in others if row["true_bits"] >= ours["true_bits"]]
    if not others:
        return []
    best = min(others, key=lambda row: row["kld_mean"])
    asked = f"at most the least of {len(others)} others, {best['kld_mean']:.5f} ({best['scheme']})"
    is_met = ours["kld_mean"] <= best["kld_mean"]
    return [[_with_bits(ours), "KLD mean", asked, f"{ours['kld_mean']:.5f}", _met(is_met)]]


def _half_of_kivi(found: Found) -> list[list[str]]:
    if not {"adaptive-2.7", "kivi-2"} <= found.keys():
        return []
    ours, other = found["adaptive-2.7"], found["kivi-2"]
    most = other["kld_mean"] / 2
    asked = f"at most half of kivi-2's {other['kld_mean']:.5f} ({other['true_bits']:.3f} bits)"
    is_met = ours["kld_mean"] <= most
    return [[_with_bits(ours), "KLD mean", asked, f"{ours['kld_mean']:.5f}", _met(is_met)]]


def _vq_alone(found: Found) -> list[list[str]]:
    if "vq1.5" not in found:
        return []
    row = found["vq1.5"]
    return [[_with_bits(row), "perplexity", "reported", _change(row), ""]]


BARS: Sequence[tuple[tuple[str, int], Callable[[Found], list[list[str]]]]] = (
    (WIKI, _perplexity_bar("adaptive-4.5", 4.5, 1)),
    (WIKI, _best_of_others),
    (WIKI, _perplexity_bar("adaptive-3.3", 3.3, 2)),
    (BOOK, _perplexity_bar("adaptive-2.7", 2.7, 5)),
    (BOOK, _half_of_kivi),
    (BOOK, _perplexity_bar("adaptive-2.3-cold", 2.3, 10)),
    (BOOK, _vq_alone),
)
"""Text and window, and what judges its schemes."""


MENU: Mapping[str, str] = {
    "bf16": "nothing may be lost; the yardstick of all others",
    "int8": "next to nothing may be lost, at half the memory",
    "fp8": "half the memory; less exact than `int8` on these models, no slower",
    "int4": "speed, at a quarter of the memory",
    "adaptive-4.5": "memory of `int4`, a fraction of its loss: first to try where memory counts",
    "adaptive-3.3": "nearly five times as many tokens as `bf16` holds",
    "adaptive-2.7": "nearly six times as many; contexts from 1,024 tokens on",
    "adaptive-2.3-cold": "seven times as many; contexts from 2,048 tokens on",
    "int2": "speed alone, for a model that bears it; these do not",
    "vq1.5": "cold pages of `adaptive`; alone it is no cache to read from",
    "int4_g32": "head dimensions that are no multiple of 16",
    "int4_g64": "comparison with others' INT4",
    "fp4": "comparison with NVFP4",
    "fp4_mx": "comparison with MXFP4",
}
"""What `--kv-cache-dtype` takes (of `adaptive` with its budget), and when to."""


def menu_table(results: Results) -> str:
    """Each entry: bytes, what it costs on which model, its speed, when to take it."""
    schemes = of_kind(results, "kv_scheme_quality")
    models = sorted({row["model"] for row in schemes})
    cost = {
        (row["model"], row["scheme"]): f"{_change(row)}, {row['kld_mean']:.4f}"
        for row in schemes
        if (row["text"], row["window"]) == WIKI
    }
    context, speed = _times_fp8(results)
    twin = {"fp4": "nvfp4", "fp4_mx": "mxfp4"}  # The same codes, as others call them.
    rows = []
    for name, when in MENU.items():
        is_adaptive = name.startswith("adaptive-")
        exact = "0" if name == "bf16" else ""
        options = f"`{name}`"
        if is_adaptive:
            budget, _, cold = name.removeprefix("adaptive-").partition("-")
            options = f"`adaptive --kv-bits-budget {budget}{' --kv-cold-pages' if cold else ''}`"
            sizes = [f"{2 * dim * float(budget) / 8:.1f}" for dim in (64, 128)]
        else:
            assert name in CODECS, name
            sizes = [f"{kv_format(name, dim).page_bytes / PAGE_SIZE:g}" for dim in (64, 128)]
        known = [name, twin.get(name, name)]
        costs = [next((cost[m, n] for n in known if (m, n) in cost), exact) for m in models]
        form = name.partition("-")[0] + ("-cold" if is_adaptive and cold else "")
        rows.append([options, when, *sizes, *costs, speed.get(form, "")])
    header = ["`--kv-cache-dtype`", "when to use it", "bytes at 64", "at 128"]
    header += [f"{model}: perplexity, KLD" for model in models]
    return table([*header, f"attention at {context} tokens, times fp8"], rows)


def _times_fp8(results: Results) -> tuple[int, dict[str, str]]:
    """The shortest context at which most were measured, and attention there by format."""
    rows = [row for result in of_kind(results, "adaptive_attend") for row in result["records"]]
    contexts = [row["context"] for row in rows]
    most = max(contexts, key=lambda context: (contexts.count(context), -context), default=0)
    rows = [row for row in rows if row["context"] == most]
    found: dict[str, list[float]] = {}
    for row in rows:
        if not row["format"].endswith("plain"):
            fp8 = next(other["us_per_layer"] for other in rows if other["format"] == "fp8")
            name = row["format"].partition(" ")[0] + ("-cold" if row.get("cold") else "")
            found.setdefault(name, []).append(row["us_per_layer"] / fp8)
    return most, {
        name: f"{min(each):.2f}" + (f" to {max(each):.2f}" if len(each) > 1 else "")
        for name, each in found.items()
    }


def _scheme_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["model"], row["text"], row["window"], -row["true_bits"], row["scheme"])


def _bold(row: Mapping[str, Any]) -> str:
    return f"**{row['scheme']}**" if row["ours"] else str(row["scheme"])


def _change(row: Mapping[str, Any]) -> str:
    return f"{(row['ppl_ratio'] - 1) * 100:+.2f} %"


def _with_bits(row: Mapping[str, Any]) -> str:
    return f"{row['scheme']}, {row['true_bits']:.3f}"


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"
