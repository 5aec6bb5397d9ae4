"""Makes the tables of the documents from the JSON files under benchmarks/results.

    python benchmarks/tables.py           rewrites README.md and documents under docs/
    python benchmarks/tables.py --check   exits with 1 if they would change

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kv_tables
from kv_tables import MISSING, Results
from kv_tables import of_kind as _of_kind
from kv_tables import table as _table
from subten.bench.report import human_bytes
from subten.codecs import CODECS, get_codec, kv_format
from subten.core import ConfigError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All results, in the order of their file names, each with the name of its file.

    A file holds one result, or a list of records.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for result in content if isinstance(content, list) else [content]:
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
        [_text_of(result), row["kv_cache_dtype"], f"{row['kv_true_bits']:.3f}", *_quality(row)]
        for result in _of_kind(results, "kv_quality")
        if result.get("quantization", "none") == "none"
        for row in result["results"]
    ]
    return _table(["model, text", "KV cache", "true bits", *QUALITY_HEADER], rows)


def weights_table(results: Results) -> str:
    """Perplexity and KLD per weight format, from the same model unquantised."""
    rows = [
        [_text_of(result), result["quantization"], row["kv_cache_dtype"], *_quality(row)]
        for result in _of_kind(results, "kv_quality")
        if result.get("quantization", "none") != "none"
        for row in result["results"]
    ]
    return _table(["model, text", "weights", "KV cache", *QUALITY_HEADER], rows)


QUALITY_HEADER = ("perplexity", "change", "KLD mean", "KLD 99.9 %", "top-1 agrees", "tokens")


def _quality(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['perplexity']:.3f}",
        f"{(row['perplexity_ratio'] - 1) * 100:+.2f} %",
        f"{row['kld_mean']:.5f}",
        f"{row['kld_p999']:.4f}",
        f"{row['top1_agreement'] * 100:.2f} %",
        str(row["num_tokens"]),
    ]


def _text_of(result: Mapping[str, Any]) -> str:
    return f"{result['model']}, {result['text']}"


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


def decode_table(results: Results) -> str:
    """Decode steps at model shapes beside the roof, and what other engines took where measured."""
    rows = []
    for result in sorted(_of_kind(results, "decode_latency"), key=_decode_key):
        peers = [
            f"{peer['engine']} {peer['version']}: {peer['tpot_ms_p50']:.2f}"
            for peer in _of_kind(results, "peer_latency")
            if _decode_key(peer)[:2] == _decode_key(result)[:2]
            and all(peer[key] == result[key] for key in ("gpu", "weights_dtype", "kv_cache_dtype"))
        ]
        rows.append(
            [
                result["shape"],
                f"{result['weights_dtype']}, {result['kv_cache_dtype']}",
                str(result["batch_size"]),
                str(result["context_len"]),
                f"{result['tpot_ms_p50']:.3f}",
                f"{result['tpot_ms_p99']:.3f}",
                f"{result['bytes_per_step'] / 1e9:.3f}",
                f"{result['floor_ms']:.3f}",
                f"{result['roof_fraction'] * 100:.0f} %",
                f"{result['ttft_ms_p50']:.1f} ({result['prompt_len']})",
                f"{result['peak_memory_bytes'] / 1e9:.1f}",
                "; ".join(peers),
            ]
        )
    header = ["shape", "weights, KV cache", "batch", "context", "TPOT p50, ms", "p99", "GB read"]
    header += ["floor, ms", "of the roof", "TTFT p50, ms (prompt)", "peak GB", "others, TPOT p50"]
    return _table(header, rows)


def short_decode_table(results: Results) -> str:
    """Batch 1 alone, and what a reader of the README wants of it."""
    rows = [
        [
            result["shape"],
            f"{result['weights_dtype']}, {result['kv_cache_dtype']}",
            str(result["context_len"]),
            f"{result['tpot_ms_p50']:.2f}",
            f"{result['tpot_ms_p99']:.2f}",
            f"{result['floor_ms']:.2f}",
            f"{result['roof_fraction'] * 100:.0f} %",
        ]
        for result in sorted(_of_kind(results, "decode_latency"), key=_decode_key)
        if result["batch_size"] == 1
    ]
    header = ["shape", "weights, KV cache", "context", "TPOT p50, ms", "p99", "floor, ms"]
    return _table([*header, "of the roof"], rows)


def peers_table(results: Results) -> str:
    """What other engines take at the same shapes, in their own best setting."""
    rows = [
        [
            f"{result['engine']} {result['version']}",
            result["shape"],
            f"{result['weights_dtype']}, {result['kv_cache_dtype']}",
            str(result["context_len"]),
            f"{result['tpot_ms_p50']:.3f}",
            f"{result['tpot_ms_p99']:.3f}",
            f"{result['roof_fraction'] * 100:.0f} %",
            result["settings"],
            result["gpu"],
            result["date"],
        ]
        for result in sorted(_of_kind(results, "peer_latency"), key=_decode_key)
    ]
    header = ["engine", "shape", "weights, KV cache", "context", "TPOT p50, ms", "p99"]
    return _table([*header, "of the roof", "settings", "GPU", "date"], rows)


def short_peers_table(results: Results) -> str:
    """A row an engine, shape and format, a column a context."""
    records = sorted(_of_kind(results, "peer_latency"), key=_decode_key)
    contexts = sorted({result["context_len"] for result in records})
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for result in records:
        form = f"{result['weights_dtype']}, {result['kv_cache_dtype']}"
        key = (f"{result['engine']} {result['version']}", result["shape"], form)
        rows.setdefault(key, {})[result["context_len"]] = f"{result['tpot_ms_p50']:.2f}"
    header = ["engine", "shape", "weights, KV cache", *(f"{n:,}, ms" for n in contexts)]
    return _table(
        header, [[*key, *(row.get(n, "") for n in contexts)] for key, row in rows.items()]
    )


def logits_table(results: Results) -> str:
    """How far logits are from the torch path in float32, per backend, dtype and way of reading."""
    rows = [
        [
            result["gpu"] if case["device"] != "cpu" else "CPU",
            f"{case['backend']}, {case['dtype']}",
            case["path"],
            f"{case['kld_mean']:.1e}",
            f"{case['kld_p50']:.1e}",
            f"{case['kld_max']:.1e}",
            f"{case['logit_difference_max']:.1e}",
            f"{case['num_other_tokens']} of {case['num_positions']}",
            f"{case['largest_lead_lost']:.1e}",
            result["date"],
        ]
        for result in _of_kind(results, "logit_differences")
        for case in result["cases"]
    ]
    header = ["device", "backend, dtype", "read as", "KLD mean", "median", "largest"]
    return _table([*header, "logits differ by", "other tokens", "by a lead of", "date"], rows)


def sanitizer_table(results: Results) -> str:
    """What compute-sanitizer said of each kernel's tests."""
    rows = [
        [
            result["tool"],
            result["kernel"],
            str(result["tests_passed"]),
            result["closing_line"] or f"none, exit status {result['exit_status']}",
            result["gpu"],
            result["commit"] or "",
            result["date"],
        ]
        for result in _of_kind(results, "sanitizer")
    ]
    header = ["tool", "kernel", "tests passed", "closing line", "GPU", "commit", "date"]
    return _table(header, rows)


def kernels_table(results: Results) -> str:
    """Each op of a decode step by itself; ops that read no cache once a shape and batch."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for result in _of_kind(results, "decode_kernels"):
        reads_cache = result["kernel"] in ("attend", "append_attend")
        cache = [result["kv_cache_dtype"], str(result["context_len"])] if reads_cache else ["", ""]
        shape = f"{result['shape']}, {result['weights_dtype']}"
        row = [shape, result["kernel"], result["backend"], str(result["batch_size"]), *cache]
        measured = [
            str(result["calls_per_step"]),
            f"{result['us_p50']:.2f}",
            f"{result['bytes'] / 1e6:.3f}",
            f"{result['tb_s']:.2f}",
            f"{result['roof_fraction'] * 100:.0f} %",
        ]
        rows.setdefault(tuple(row), [*row, *measured])
    header = ["shape, weights", "op", "backend", "batch", "cache", "context", "calls a step"]
    return _table([*header, "us p50", "MB", "TB/s", "of the roof"], list(rows.values()))


def attention_table(results: Results) -> str:
    """Attention of a decode step over every format of the cache, in one run."""
    rows = []
    for result in _of_kind(results, "adaptive_attend"):
        fp8 = {r["context"]: r for r in result["records"] if r["format"] == "fp8"}
        for row in result["records"]:
            share = row["us_per_layer"] / fp8[row["context"]]["us_per_layer"]
            measured = [f"{row['us_per_layer']:.1f}", f"{share:.2f}"]
            form = [row["format"], row.get("op", "triton"), f"{row['true_bits']:.3f}"]
            rows.append([result["shape"], str(row["context"]), *form, *measured])
    header = ["shape", "context", "format", "kernel", "true bits", "us a layer", "times fp8"]
    return _table(header, rows)


def runs_table(results: Results) -> str:
    """Where the decode records are from: roof, GPU, versions, commit."""
    kinds = ("decode_latency", "decode_kernels", "peer_latency")
    runs: dict[tuple[str, ...], list[float]] = {}
    for result in results:
        if result.get("kind") in kinds:
            fields = ("file", "gpu", "torch", "triton", "commit", "date")
            key = tuple(str(result[field] or "") for field in fields)
            runs.setdefault(key, []).append(result["roof_tb_s"])
    rows = [
        [*key, f"{min(roofs):.3f} to {max(roofs):.3f}", str(len(roofs))]
        for key, roofs in runs.items()
    ]
    header = ["file", "GPU", "torch", "triton", "commit", "date", "roof, TB/s", "records"]
    return _table(header, rows)


TABLES: Mapping[str, Callable[[Results], str]] = {
    "answer": answer_block,
    "demo": demo_table,
    "latency": latency_table,
    "quality": quality_table,
    "schemes": kv_tables.schemes_table,
    "needles": kv_tables.needles_table,
    "generation": kv_tables.generation_table,
    "keys": kv_tables.keys_table,
    "kv-engine": kv_tables.engine_table,
    "kv-bars": kv_tables.bars_table,
    "kv-menu": kv_tables.menu_table,
    "weights": weights_table,
    "moe": moe_table,
    "formats": formats_table,
    "decode": decode_table,
    "decode-short": short_decode_table,
    "kernels": kernels_table,
    "peers": peers_table,
    "peers-short": short_peers_table,
    "logits": logits_table,
    "sanitizer": sanitizer_table,
    "attention": attention_table,
    "runs": runs_table,
}

DOCUMENTS = ("README.md", "docs/performance.md", "docs/kv-cache.md", "docs/gpu-runs.md")
"""Texts with marked tables."""


def fill(text: str, results: Results) -> str:
    """`text` with every marked table made anew; an unknown table name raises KeyError."""

    def table(match: re.Match[str]) -> str:
        return match[1] + "\n" + TABLES[match["name"]](results) + "\n\n" + match[3]

    return MARKED.sub(table, text)


def main() -> None:
    """Rewrite or check the documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    args = parser.parse_args()
    results = read_results(RESULTS)
    for name in DOCUMENTS:
        old = (ROOT / name).read_text(encoding="utf-8")
        new = fill(old, results)
        if args.check and new != old:
            sys.exit(f"{name}: its tables are not those of benchmarks/results: make tables")
        if not args.check:
            (ROOT / name).write_text(new, encoding="utf-8")


def _decode_key(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What was asked for first, then how weights and cache were kept, the widest first."""
    order = ("float32", "bf16", "fp8", "int8", "int4")
    formats = [result["weights_dtype"], result["kv_cache_dtype"]]
    places = [order.index(name) if name in order else len(order) for name in formats]
    workload = (result["shape"], (result["batch_size"], result["context_len"]))
    return (*workload, places, formats)


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
