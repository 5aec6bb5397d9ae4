"""Calibration as an engine does it: a text is read when a model is loaded, once for its weights.

What was found is kept in the cache folder, under a hash of weights, text and tokenizer's ids.

The text that comes with the package: the beginning of Alice's Adventures in Wonderland (Lewis
Carroll, 1865), the first scene of Coriolanus (William Shakespeare), most of the Gettysburg address
(Abraham Lincoln, 1863), all in the public domain; lists, tables, chat and code are the project's.

Letters: L layers, G KV heads, D head dimension.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from subten.calibration.keys import key_statistics, score_noise, shaped_transform
from subten.core import ConfigError, RequestError, reason, refuse
from subten.device import on_device
from subten.files import write_whole
from subten.layers.adaptive_attention import AdaptiveAttention
from subten.layers.decoder_layer import DecoderLayer
from subten.models.decoder import Decoder

logger = logging.getLogger(__name__)

WINDOW, MAX_TOKENS = 2048, 4096
"""Tokens that are read at a time, and of a text in all."""

MIN_TOKENS = 256
"""Fewer say too little about 64 to 256 channels."""

FORMAT = "subten-key-calibration-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyCalibration:
    """How each layer stores keys: see `AdaptiveAttention.calibrate`; `noise_L` is `score_noise`.

    `outlier_LGD` int32 has the channels of stored keys, first those to keep exact if any are.
    """

    mean_LGD: torch.Tensor
    matrix_LGDD: torch.Tensor
    inverse_LGDD: torch.Tensor
    feedback_LGDD: torch.Tensor
    noise_L: torch.Tensor
    outlier_LGD: torch.Tensor

    def apply(self, model: Decoder) -> None:
        """Make the layers of a model with an adaptive cache store keys so."""
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer), type(layer)
            assert isinstance(layer.attention, AdaptiveAttention), type(layer.attention)
            layer.attention.calibrate(
                self.matrix_LGDD[index],
                self.inverse_LGDD[index],
                mean_GD=self.mean_LGD[index],
                feedback_GDD=self.feedback_LGDD[index],
            )


def shipped_text() -> str:
    """The text that comes with the package."""
    return (resources.files("subten") / "assets" / "calibration.txt").read_text(encoding="utf-8")


def read_text(path: str | None) -> str | None:
    """The text that `kv_calibration` names, None where it names none; ConfigError if not there."""
    if path is None or path == "none":
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        allowed = f"a UTF-8 text file of some {MIN_TOKENS} tokens or more ({reason(error)})"
        raise refuse(ConfigError, "kv_calibration", path, allowed) from error


def calibrate_keys(
    model: Decoder,
    token_ids: Sequence[int],
    *,
    folder: Path | None,
    progress: Callable[[float], None] = lambda _share: None,
) -> KeyCalibration:
    """What a text says about a model's keys, from `folder` if it was read before.

    RequestError for a text of fewer than MIN_TOKENS tokens. A folder that cannot be written is
    left alone.
    """
    if len(token_ids) < MIN_TOKENS:
        got = f"{len(token_ids)} tokens"
        raise refuse(RequestError, "kv_calibration", got, f"at least {MIN_TOKENS}")
    ids = list(token_ids[:MAX_TOKENS])
    path = None
    if folder is not None:
        path = folder / f"kv-calibration-{_fingerprint(model, ids)}.safetensors"
        found = _load(path, model)
        if found is not None:
            return found
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    with on_device(model.device):
        statistics = key_statistics(model, windows, progress=progress)
    transform = shaped_transform(statistics)
    assert transform.feedback_LGDD is not None
    assert transform.outlier_LGD is not None
    calibration = KeyCalibration(
        mean_LGD=statistics.mean_key_LGD,
        matrix_LGDD=transform.matrix_LGDD,
        inverse_LGDD=transform.inverse_LGDD,
        feedback_LGDD=transform.feedback_LGDD,
        noise_L=score_noise(statistics, transform).float(),
        outlier_LGD=transform.outlier_LGD,
    )
    if path is not None:
        _save(calibration, path)
    return calibration


def _fingerprint(model: Decoder, token_ids: Sequence[int]) -> str:
    """Hash of every weight's sum and of a thousand numbers of each, and of the tokens."""
    digest = hashlib.sha256(f"{FORMAT} {model.config} {list(token_ids)}".encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[:: max(1, flat.numel() // 1000)].float().cpu().numpy().tobytes())
        digest.update(flat.float().sum(dtype=torch.float64).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _load(path: Path, model: Decoder) -> KeyCalibration | None:
    """What is kept there; None where nothing is, or nothing whole."""
    config = model.config
    head = (config.num_layers, config.num_kv_heads, config.head_dim)
    shapes: dict[str, tuple[int, ...]] = {"mean_LGD": head, "noise_L": head[:1]}
    shapes["outlier_LGD"] = head
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {f.name: file.get_tensor(f.name) for f in fields(KeyCalibration)}
    except (OSError, SafetensorError):
        return None
    for name, tensor in tensors.items():
        if tensor.shape != shapes.get(name, (*head, head[-1])) or not tensor.isfinite().all():
            logger.warning("%s: %s is not what was written: reading the text again", path, name)
            return None
    return KeyCalibration(**{name: t.to(model.device) for name, t in tensors.items()})


def _save(calibration: KeyCalibration, path: Path) -> None:
    tensors = {
        f.name: getattr(calibration, f.name).cpu().contiguous() for f in fields(KeyCalibration)
    }
    try:
        # Not by `save_file`: what it writes is for its owner alone, and its errors are no OSError.
        write_whole(path, save(tensors))
    except OSError as error:
        logger.warning("%s: not kept: %s", path, error)
