"""Draws the charts of README.md and docs/ from the JSON files under benchmarks/results.

python benchmarks/charts.py           rewrites docs/images
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from subten.train.plots import plot_load
from tables import RESULTS, ROOT, read_results

IMAGES = ROOT / "docs" / "images"
LABELS = {"demo": "demo MoE", "demo-dense": "dense model it was made from"}


def kv_quality(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean KL divergence over true bits, one line a model."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result, marker in zip(results, "os^v", strict=False):
        rows = [row for row in result["results"] if row["kld_mean"] > 0]
        rows.sort(key=lambda row: row["kv_true_bits"])
        axes.plot(
            [row["kv_true_bits"] for row in rows],
            [row["kld_mean"] for row in rows],
            marker,
            label=LABELS.get(result["model"], result["model"]),
        )
        if marker != "o":
            continue
        for row in rows:
            axes.annotate(
                row["kv_cache_dtype"],
                (row["kv_true_bits"], row["kld_mean"]),
                xytext=(7, -3),
                textcoords="offset points",
                fontsize="small",
            )
    text, window = results[0]["text"], results[0]["window"]
    axes.set_yscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("true bits per cached element (scales, zero-points and padding counted)")
    axes.set_ylabel("mean KLD from a bf16 cache, nats")
    axes.set_title(f"What a KV format costs: {text}, windows of {window}", fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


FAMILIES = (
    (r"adaptive-[\d.]+(-cold)?", "Subten: adaptive", "tab:blue", "o-"),
    (r"(fp8|int8|int4|int2|vq1\.5)", "Subten: one format for all", "tab:cyan", "D"),
    (r"kivi-\d", "KIVI", "tab:red", "s-"),
    (r"hqq-\d", "HQQ cache", "tab:orange", "^-"),
    (r"quanto-\d", "quanto cache", "tab:olive", "v-"),
    (r"turboquant-\d", "TurboQuant", "tab:purple", "P-"),
    (r"int4-g\d+", "INT4, groups of 32, 64", "tab:brown", "X-"),
    (r"nvfp4", "NVFP4", "tab:gray", "*"),
    (r"mxfp4", "MXFP4", "black", "1"),
)
"""Schemes by pattern: what they are called, their colour, marker and line. Others are not drawn:
adaptive without a protection, and our own twins of MXFP4, NVFP4 and INT4 in groups."""


def kv_schemes(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean KL divergence over true bits of the schemes on one text, a panel for each model."""
    models = sorted({record["model"] for record in records})
    figure = Figure(figsize=(5.5 * len(models) + 2, 5), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False, sharex=True, sharey=True)[0]
    named = {}
    for axes, model in zip(panels, models, strict=True):
        found = [r for r in records if r["model"] == model and r["kld_mean"] > 0]
        for pattern, label, colour, style in FAMILIES:
            rows = [r for r in found if re.fullmatch(pattern, r["scheme"])]
            rows.sort(key=lambda row: row["true_bits"])
            if not rows:
                continue
            places = [(row["true_bits"], row["kld_mean"]) for row in rows]
            (named[label],) = axes.plot(*zip(*places, strict=True), style, color=colour)
            if "one format" not in label:
                continue
            for row, place in zip(rows, places, strict=True):
                axes.annotate(
                    row["scheme"],
                    place,
                    xytext=(-6, -11),
                    textcoords="offset points",
                    fontsize="small",
                    horizontalalignment="right",
                )
        axes.set_yscale("log")
        axes.margins(x=0.13)
        axes.set_xlabel("true bits per cached element at the end of a window, all counted")
        axes.set_title(LABELS.get(model, model), fontsize="medium")
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("mean KLD from a bf16 cache, nats")
    text, window = records[0]["text"], records[0]["window"]
    figure.suptitle(f"What a KV cache costs: {text}, windows of {window:,}", fontsize="medium")
    figure.legend(named.values(), named.keys(), loc="outside right center")
    figure.savefig(path, dpi=110)


def decode(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Milliseconds a token at batch 1: measured, and the floor in it; a panel for each shape."""
    peers = [result for result in results if result["kind"] == "peer_latency"]
    own = [result for result in results if result["kind"] == "decode_latency"]
    own = [result for result in own if result["batch_size"] == 1]
    shapes = sorted({result["shape"] for result in own})
    rows = {name: [r for r in (*own, *peers) if r["shape"] == name] for name in shapes}
    height = 1 + 0.28 * max(len(found) for found in rows.values())
    figure = Figure(figsize=(6 * len(shapes), height), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        found = sorted(rows[name], key=_decode_key)
        for kind, colour in (("decode_latency", "tab:blue"), ("peer_latency", "tab:gray")):
            places = [i for i, row in enumerate(found) if row["kind"] == kind]
            picked = [found[i] for i in places]
            axes.barh(places, [row["tpot_ms_p50"] for row in picked], color=colour, alpha=0.35)
            axes.barh(places, [row["floor_ms"] for row in picked], color=colour)
        for place, row in enumerate(found):
            text = f" {row['tpot_ms_p50']:.2f} ms, {row['roof_fraction'] * 100:.0f} %"
            axes.text(row["tpot_ms_p50"], place, text, va="center", fontsize="small")
        axes.set_yticks(range(len(found)), [_decode_label(row) for row in found], fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.35)
        axes.set_xlabel("ms a token, p50; dark: the floor")
        axes.set_title(f"{name}, batch 1, {found[0]['gpu']}", fontsize="medium")
    figure.savefig(path, dpi=110)


def _decode_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["context_len"], row["tpot_ms_p50"])


def _decode_label(row: Mapping[str, Any]) -> str:
    who = f"{row['engine']} " if row["kind"] == "peer_latency" else ""
    context = row["context_len"]
    length = f"{context // 1024}k" if context % 1024 == 0 else str(context)
    return f"{who}{row['weights_dtype']}, {row['kv_cache_dtype']} cache, {length}"


def main() -> None:
    """Draw what there are results for."""
    results = read_results(RESULTS)
    IMAGES.mkdir(parents=True, exist_ok=True)
    quality = [
        result
        for result in results
        if result.get("kind") == "kv_quality" and result.get("quantization", "none") == "none"
    ]
    if quality:
        quality.sort(key=lambda result: str(result["model"]))
        kv_quality(quality, IMAGES / "kv-quality.png")
    schemes: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in results:
        if record.get("kind") == "kv_scheme_quality":
            schemes.setdefault((record["text"], record["window"]), []).append(record)
    for (text, window), records in schemes.items():
        kv_schemes(records, IMAGES / f"kv-schemes-{Path(text).stem}-{window}.png")
    decoding = [r for r in results if r.get("kind") in ("decode_latency", "peer_latency")]
    if any(r["kind"] == "decode_latency" and r["batch_size"] == 1 for r in decoding):
        decode(decoding, IMAGES / "decode.png")
    for result in results:
        if result.get("kind") == "train" and result["config"]["aux_weight"] > 0:
            weight = result["config"]["aux_weight"]
            load_LE = torch.tensor(result["eval"]["load"])
            plot_load(load_LE, IMAGES / "expert-load.png", f"held-out load, aux_weight {weight}")


if __name__ == "__main__":
    main()
