"""Draws the charts of README.md and docs/ from the JSON files under benchmarks/results.

python benchmarks/charts.py           rewrites docs/images
"""

from __future__ import annotations

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


def main() -> None:
    """Draw what there are results for."""
    results = read_results(RESULTS)
    IMAGES.mkdir(parents=True, exist_ok=True)
    quality = [result for result in results if result.get("kind") == "kv_quality"]
    if quality:
        quality.sort(key=lambda result: str(result["model"]))
        kv_quality(quality, IMAGES / "kv-quality.png")
    for result in results:
        if result.get("kind") == "train" and result["config"]["aux_weight"] > 0:
            weight = result["config"]["aux_weight"]
            load_LE = torch.tensor(result["eval"]["load"])
            plot_load(load_LE, IMAGES / "expert-load.png", f"held-out load, aux_weight {weight}")


if __name__ == "__main__":
    main()
