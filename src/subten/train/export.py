"""The deltas file: what a package carries of a trained MoE."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from subten.train.config import TrainConfig
from subten.train.dense import DenseModel
from subten.train.model import Deltas
from subten.weights.upcycled import DELTA_NAMES, DELTAS_FORMAT, merge_expert, read_deltas

LICENCE = "Apache-2.0"


def write_deltas(path: Path, deltas: Deltas, config: TrainConfig, base_sha256: str) -> None:
    """Write deltas and routers with what made them; the file appears whole or not at all.

    `int8` keeps each factor's rows (R of them an expert, as wide as the layer) as codes -127..127
    times one float32 scale a row: 8.03 bits a number at width 1152. Routers are BF16, as in the
    built model, whose merged weights are BF16 too.
    """
    tensors: dict[str, Tensor] = {"router": deltas.router.detach().bfloat16().cpu()}
    for name in DELTA_NAMES[1:]:
        values = getattr(deltas, name).detach().float().cpu()
        if config.export_format == "bfloat16":
            tensors[name] = values.bfloat16()
        else:
            tensors[f"{name}.codes"], tensors[f"{name}.scales"] = quantize_rows(values)
    metadata = {
        "format": DELTAS_FORMAT,
        "base_model": config.base_name or str((config.gguf or config.checkpoint or Path()).name),
        "base_sha256": base_sha256,
        "num_experts": str(deltas.num_experts),
        "top_k": str(config.top_k),
        "rank": str(deltas.rank),
        "number_format": config.export_format,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "licence": LICENCE,
        "train_config": json.dumps(config.to_shareable(), sort_keys=True),
    }
    partial = path.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata=metadata)
    partial.chmod(0o644)
    partial.replace(path)


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (int8, same shape) and scales (float32, without the last axis), nearest rounding.

    A zero row has scale 0 and codes 0.
    """
    scales = values.abs().amax(-1) / 127
    safe = torch.where(scales > 0, scales, 1.0)
    return (values / safe[..., None]).round().to(torch.int8), scales


def load_deltas(path: Path, device: torch.device) -> Deltas:
    """The deltas of a file, as the trainer's forward pass takes them (float32)."""
    tensors = read_deltas(path).tensors
    return Deltas(*(tensors[name].to(device) for name in DELTA_NAMES))


def export_error(
    model: DenseModel, trained: Deltas, exported: Deltas, *, layer: int
) -> dict[str, float]:
    """RMS error that the file format makes in the merged gates of one layer.

    Beside it stands the error that rounding the merged weights to BF16 makes: a format is good
    enough when its own error is below that.
    """
    base = model.layers[layer].gate_up_weight[: model.config.d_ffn].float().cpu()
    error_sq = delta_sq = bf16_sq = 0.0
    for expert in range(trained.num_experts):
        a, b, file_a, file_b = (
            getattr(deltas, f"gate_{side}")[layer, expert].detach().float().cpu()
            for deltas in (trained, exported)
            for side in "ab"
        )
        merged = merge_expert(base, a, b)
        error_sq += float((merge_expert(base, file_a, file_b) - merged).square().sum())
        delta_sq += float((merged - base).square().sum())
        bf16_sq += float((merged.bfloat16().float() - merged).square().sum())
    count = base.numel() * trained.num_experts
    return {
        "weight_rms": float(base.square().mean().sqrt()),
        "delta_rms": (delta_sq / count) ** 0.5,
        "format_error_rms": (error_sq / count) ** 0.5,
        "bf16_rounding_rms": (bf16_sq / count) ** 0.5,
    }
