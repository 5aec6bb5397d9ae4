"""A picture of the load of each expert in each layer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor


def plot_load(count_LE: Tensor, path: Path, title: str) -> bool:
    """Write a heat map of load over mean load (L x E) as PNG; False where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    load = count_LE.double().cpu()
    relative = load / load.mean(-1, keepdim=True)
    num_layers, num_experts = relative.shape
    figure = Figure(figsize=(2 + 0.6 * num_experts, 2 + 0.25 * num_layers), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(relative.numpy(), vmin=0, vmax=2, cmap="RdBu_r", aspect="auto")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, label="load / mean load")
    figure.savefig(path, dpi=120)
    return True
