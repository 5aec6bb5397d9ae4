"""Makes the tables of README.md from the JSON files under benchmarks/results.

    python benchmarks/tables.py           rewrites README.md
    python benchmarks/tables.py --check   exits with 1 if README.md would change

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from subten.bench.report import human_bytes, markdown_table
from subten.codecs import CODECS, get_codec, kv_format
from subten.core import ConfigError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MISSING = "*Not measured yet.*"

Results = Sequence[Mapping[str, Any]]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All results, in the order of their file names, each with the name of its file."""
    found = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("what") == "subten train":
            result["kind"] = "train"
        found.append({**result, "file": path.name})
    return found


def answer_block(results: Results) -> str:
    """What the demo printed, word for word, in the first of its measured runs."""
    for result in _of_kind(results, "demo"):
        codec = result["kv_cache_dtype"]
        command = f'$ subten generate "{result["prompt"]}" --kv-cache-dtype {codec}'
        return "\n".join(["```text", command, result["shown"].strip(), "```"])
    return MISSING


def demo_table(results: Results) -> str:
    """The demo: first text, tokens a second, memory, and answers alone and in a batch."""
    rows = []
    for result in _of_kind(results, "demo"):
        batch = result["batch_of_5"]
        equal = f"{batch['num_equal']} of 5 equal ({batch['num_tokens']} tokens)"
        rows.append(
            [
                _machine(result),
                result["kv_cache_dtype"],
                f"{result['first_text_s']:.1f} s",
                f"{1e3 / result['tpot_ms']:.1f}",
                human_bytes(result["peak_memory_bytes"]),
                equal,
                result["environment"]["date"],
            ]
        )
    header = ["machine", "KV cache", "command to first text", "tokens/s", "peak memory"]
    return _table([*header, "alone = in a batch of 5", "date"], rows)


def latency_table(results: Results) -> str:
    """TTFT and TPOT per cache format and shape."""
    rows = [
        [
            f"{result['model']}, {_machine(result)}",
            row["kv_cache_dtype"],
            f"{row['prompt_len']} + {row['output_len']} x {row['batch_size']}",
            *(f"{row['ttft_ms'][p]:.2f}" for p in ("p50", "p99")),
            *(f"{row['tpot_ms'][p]:.3f}" for p in ("p50", "p99")),
            f"{row['output_tokens_per_s']:.0f}",
            str(row["tpot_ms"]["num_samples"]),
            result["environment"]["date"],
        ]
        for result in _of_kind(results, "latency")
        for row in result["results"]
    ]
    header = ["model", "KV cache", "prompt + output x batch", "TTFT p50, ms", "p99"]
    return _table([*header, "TPOT p50, ms", "p99", "tokens/s", "samples", "date"], rows)


def quality_table(results: Results) -> str:
    """Perplexity and KLD per cache format and model."""
    rows = [
        [
            f"{result['model']}, {result['text']}",
            row["kv_cache_dtype"],
            f"{row['kv_true_bits']:.3f}",
            f"{row['perplexity']:.3f}",
            f"{(row['perplexity_ratio'] - 1) * 100:+.2f} %",
            f"{row['kld_mean']:.5f}",
            f"{row['kld_p999']:.4f}",
            f"{row['top1_agreement'] * 100:.2f} %",
            str(row["num_tokens"]),
        ]
        for result in _of_kind(results, "kv_quality")
        for row in result["results"]
    ]
    header = ["model, text", "KV cache", "true bits", "perplexity", "change", "KLD mean"]
    return _table([*header, "KLD 99.9 %", "top-1 agrees", "tokens"], rows)


def moe_table(results: Results) -> str:
    """The demo MoE beside its dense origin, one row for each training run."""
    rows = []
    for result in _of_kind(results, "train"):
        evaluation, config = result["eval"], result["config"]
        difference = evaluation["expert_difference"]
        rows.append(
            [
                f"{config['num_experts']} experts, aux weight {config['aux_weight']:g}",
                f"{result['deltas_bytes'] / 1e6:.1f} MB",
                *_perplexities(evaluation, "heldout"),
                *_perplexities(evaluation, "test_text"),
                f"{evaluation['balance']['max_vio_max']:.3f}",
                _changed(difference, "permute"),
                _changed(difference, "others"),
            ]
        )
    header = [
        "run",
        "deltas",
        "held-out, dense",
        "MoE",
        "WikiText-2, dense",
        "MoE",
        "largest MaxVio",
    ]
    return _table([*header, "experts permuted", "next-best experts"], rows)


def formats_table(_results: Results) -> str:
    """True bits of each format, scales, zero-points and padding included."""
    demo_values = 2 * 30 * 3  # K and V, 30 layers, 3 KV heads of 64: the demo model
    rows = []
    for name in CODECS:
        bits = [_bits(name, head_dim) for head_dim in (64, 128)]
        per_token = kv_format(name, 64).true_bits * 64 * demo_values / 8
        rows.append([f"`{name}`", get_codec(name).summary, *bits, f"{per_token:,.0f}"])
    header = ["`--kv-cache-dtype`", "what", "bits, head 64", "bits, head 128"]
    return _table([*header, "demo model, bytes a token"], rows)


TABLES: Mapping[str, Callable[[Results], str]] = {
    "answer": answer_block,
    "demo": demo_table,
    "latency": latency_table,
    "quality": quality_table,
    "moe": moe_table,
    "formats": formats_table,
}


def fill(text: str, results: Results) -> str:
    """`text` with every marked table made anew; an unknown table name raises KeyError."""

    def table(match: re.Match[str]) -> str:
        return match[1] + "\n" + TABLES[match["name"]](results) + "\n\n" + match[3]

    return MARKED.sub(table, text)


def main() -> None:
    """Rewrite or check README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = fill(old, read_results(RESULTS))
    if args.check:
        if new != old:
            sys.exit("README.md: its tables are not those of benchmarks/results: make tables")
        return
    readme.write_text(new, encoding="utf-8")


def _of_kind(results: Results, kind: str) -> list[Mapping[str, Any]]:
    return [result for result in results if result.get("kind") == kind]


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Names and formats flush left, numbers flush right."""
    return markdown_table(header, rows, num_left=2) if rows else MISSING


def _machine(result: Mapping[str, Any]) -> str:
    environment = result["environment"]
    if environment["device"] == "cpu":
        return f"CPU, {environment['num_threads']} threads"
    return str(environment["device_name"])


def _perplexities(evaluation: Mapping[str, Any], text: str) -> list[str]:
    if text not in evaluation:
        return ["", ""]
    row = evaluation[text]
    moe = f"{row['moe_exported']['perplexity']:.3f} ({row['moe_exported_to_dense']:.3f} x)"
    return [f"{row['dense']['perplexity']:.3f}", moe]


def _changed(difference: Mapping[str, Any], name: str) -> str:
    if name not in difference:
        return ""
    return f"{difference[name]['share_argmax_changed'] * 100:.1f} % of tokens change"


def _bits(name: str, head_dim: int) -> str:
    try:
        return f"{kv_format(name, head_dim).true_bits:.3f}"
    except ConfigError:
        return "-"


if __name__ == "__main__":
    main()
