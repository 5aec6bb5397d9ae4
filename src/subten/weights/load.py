"""From a folder, a GGUF file or a hub name to a model with every weight in place.

All names, shapes and dtypes are checked against the config before anything is allocated; then
tensors stream one at a time into parameters that are allocated once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from subten.codecs import KVFormat
from subten.codecs.adaptive import cache_format
from subten.config import ModelConfig
from subten.core import CheckpointError, ConfigError, refuse
from subten.kernels import select_ops
from subten.kernels.weight_formats import Index, Weight, check_format
from subten.models import read_config
from subten.models.config_reader import ConfigReader
from subten.models.decoder import Decoder
from subten.models.family import Family, WeightSlot
from subten.tokenizer import Tokenizer
from subten.weights import hub
from subten.weights.folder import FolderCheckpoint
from subten.weights.gguf import read_gguf
from subten.weights.key_bias import check_key_bias, settle_key_bias
from subten.weights.safetensors_file import FLOAT_DTYPES

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Dtypes that a model runs in: both have the exponent range of float32."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints carry and that the config says already."""


class Checkpoint(Protocol):
    """What weights are loaded from; nothing is read before `tensor`."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Keys of a Hugging Face config.json."""

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of all tensors, in the order that is best to read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that comes with the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run; `weight_bytes` are `Decoder.weight_bytes`, `tokenizer` may be None.

    `config` is as resolved: its `eos_token_ids` unite those of config.json, generation_config.json
    and the tokenizer, its `tie_word_embeddings` says whether the head is the embedding.
    """

    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer | None
    name: str
    weight_bytes: int
    dtype: torch.dtype
    quantization: str = "none"
    kv_key_bias: str = "auto"


def load_model(
    model: str,
    *,
    device: torch.device,
    dtype: str,
    backend: str,
    kv_cache_dtype: str,
    kv_key_bias: str = "auto",
    max_model_len: int | None = None,
    quantization: str = "none",
    quantize_head: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load `model`: a folder (config.json, safetensors), a .gguf file, or a hub name owner/name.

    `dtype` is bfloat16, float32, or auto, which is bfloat16 whatever the checkpoint holds: it has
    float32's exponent range, so that no weight overflows, and half the bytes. `kv_key_bias` is that
    of `EngineConfig`. `max_model_len` may shorten the model's own context, never stretch it.
    `quantization` none, fp8 or int4 is the format of the matrices of attention and feed-forward
    networks, and with `quantize_head` of a head that is not the embedding: tensors are packed one
    at a time as they are read.
    `progress(done, total)` is called with the number of weights (elements) in place after each
    tensor. Raises CheckpointError for a checkpoint that is missing, damaged or not what its config
    says, ConfigError for a setting.
    """
    checkpoint, source = open_checkpoint(model)
    family, config, fmt = read_settings(
        checkpoint,
        source,
        kv_cache_dtype=kv_cache_dtype,
        kv_key_bias=kv_key_bias,
        max_model_len=max_model_len,
        quantization=quantization,
    )
    config = _settle_head(checkpoint, config, source)
    slots = family.weight_map(config)
    _check_names(checkpoint, slots, config, source)
    _check_entries(checkpoint, slots)
    tokenizer = checkpoint.tokenizer()
    config = _settle_eos(checkpoint, config, tokenizer)
    ops, torch_dtype = select_ops(backend, device), _resolve_dtype(dtype)
    new_decoder = functools.partial(
        Decoder,
        config,
        ops,
        fmt,
        dtype=torch_dtype,
        quantization=quantization,
        quantize_head=quantize_head,
    )
    try:
        decoder = new_decoder(device=device)
    except torch.OutOfMemoryError as error:
        num_bytes = new_decoder(device=torch.device("meta")).weight_bytes
        raise ConfigError(
            f"device: got {device}, whose free memory does not hold the model's "
            f"{num_bytes / 1e9:.1f} GB of weights; free some, or use a smaller model"
            + (" or quantization fp8 or int4" if quantization == "none" else "")
        ) from error
    _fill(decoder, checkpoint, slots, progress)
    decoder.fold_routers()
    settle_key_bias(decoder, kv_key_bias, source)
    weight_bytes = decoder.weight_bytes
    logger.info(
        "loaded %s: %s, %d layers, %.1f MB of weights in %s%s%s on %s, %s cache",
        model,
        config.architecture,
        config.num_layers,
        weight_bytes / 1e6,
        str(decoder.dtype).removeprefix("torch."),
        " (dtype auto)" if dtype == "auto" else "",
        "" if quantization == "none" else f", matrices in {quantization}",
        device,
        kv_cache_dtype,
    )
    return LoadedModel(
        model=decoder,
        config=config,
        tokenizer=tokenizer,
        name=model,
        weight_bytes=weight_bytes,
        dtype=decoder.dtype,
        quantization=quantization,
        kv_key_bias=kv_key_bias,
    )


def read_settings(
    checkpoint: Checkpoint,
    source: str,
    *,
    kv_cache_dtype: str,
    kv_key_bias: str,
    max_model_len: int | None,
    quantization: str,
) -> tuple[Family, ModelConfig, KVFormat]:
    """What settings make of a checkpoint's config; ConfigError where they do not fit it.

    No weight is read for it.
    """
    family, config = read_config(checkpoint.config, source=source)
    config = _shorten(config, max_model_len)
    fmt = cache_format(kv_cache_dtype, config.head_dim)
    check_format(quantization)
    check_key_bias(kv_key_bias, config)
    return family, config, fmt


def open_checkpoint(model: str) -> tuple[Checkpoint, str]:
    """The checkpoint that `model` names, headers checked, and what errors about its config say."""
    path = _existing_path(model)
    if path is not None and path.is_dir():
        folder = FolderCheckpoint(path)
        return folder, folder.config_source
    if path is not None or model.endswith(".gguf"):
        if not model.endswith(".gguf"):
            raise CheckpointError(
                f"model: got file {model!r}; allowed: a .gguf file, a folder, or a hub name"
            )
        return read_gguf(path or model), model
    if not hub.is_repository_name(model):
        raise CheckpointError(
            f"model: got {model!r}, which is no folder or file here; allowed: a folder with "
            "config.json and *.safetensors, a .gguf file, or a hub name like owner/name"
        )
    folder = FolderCheckpoint(hub.download(model))
    return folder, folder.config_source


def _existing_path(model: str) -> Path | None:
    """The file or folder that `model` names, None where there is none or it cannot be a path."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, unknown ~user, a NUL
        return None


def _resolve_dtype(dtype: str) -> torch.dtype:
    if dtype != "auto" and dtype not in DTYPES:
        raise refuse(ConfigError, "dtype", dtype, f"auto, {', '.join(DTYPES)}")
    return DTYPES["bfloat16" if dtype == "auto" else dtype]


def _shorten(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    if max_model_len is None:
        return config
    if not 1 <= max_model_len <= config.max_model_len:
        raise refuse(
            ConfigError,
            "max_model_len",
            max_model_len,
            f"1 to {config.max_model_len}, the model's own context",
        )
    return replace(config, max_model_len=max_model_len)


def _settle_head(checkpoint: Checkpoint, config: ModelConfig, source: str) -> ModelConfig:
    """Decide between the embedding and a head of its own; a real head is never thrown away."""
    has_head = _HEAD in checkpoint.names
    if not config.tie_word_embeddings:
        if not has_head:
            raise CheckpointError(
                f"{source}: tie_word_embeddings is false or absent, but the checkpoint has no "
                f"{_HEAD}; set it to true if the head is the embedding"
            )
        return config
    if not has_head or _EMBEDDING not in checkpoint.names:
        return config
    if _has_equal_bytes(checkpoint, _EMBEDDING, _HEAD):
        return config
    logger.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embedding: using it",
        source,
        _HEAD,
    )
    return replace(config, tie_word_embeddings=False)


def _has_equal_bytes(checkpoint: Checkpoint, left: str, right: str) -> bool:
    if checkpoint.shape(left) != checkpoint.shape(right):
        return False
    return torch.equal(checkpoint.tensor(left), checkpoint.tensor(right))


def _settle_eos(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | None
) -> ModelConfig:
    """End tokens: a chat model may name the end of a turn in any one of three files."""
    ids = list(config.eos_token_ids)
    if isinstance(checkpoint, FolderCheckpoint):
        source = str(checkpoint.path / "generation_config.json")
        reader = ConfigReader(checkpoint.generation_config(), source)
        ids.extend(reader.token_ids("eos_token_id", config.vocab_size))
    if tokenizer is not None:
        ids.extend(i for i in tokenizer.eos_token_ids if i < config.vocab_size)
        if tokenizer.vocab_size > config.vocab_size:
            logger.warning(
                "the tokenizer has %d tokens, the model %d: prompts with one beyond are refused",
                tokenizer.vocab_size,
                config.vocab_size,
            )
    eos_token_ids = tuple(dict.fromkeys(ids))
    if tokenizer is not None:
        tokenizer.eos_token_ids = eos_token_ids
    return replace(config, eos_token_ids=eos_token_ids)


def _check_names(
    checkpoint: Checkpoint, slots: Mapping[str, WeightSlot], config: ModelConfig, source: str
) -> None:
    present = set(checkpoint.names)
    missing = [name for name in slots if name not in present]
    if missing:
        raise CheckpointError(
            f"{source}: {len(missing)} of {len(slots)} tensors are missing: {_listing(missing)}"
        )
    extra = [name for name in checkpoint.names if name not in slots]
    if config.tie_word_embeddings:
        extra = [name for name in extra if name != _HEAD]
    extra = [name for name in extra if not name.endswith(_HARMLESS_SUFFIXES)]
    if extra:
        raise CheckpointError(
            f"{source}: {len(extra)} tensors that {config.architecture} does not have: "
            f"{_listing(extra)}"
        )


def _check_entries(checkpoint: Checkpoint, slots: Mapping[str, WeightSlot]) -> None:
    for name, slot in slots.items():
        shape = checkpoint.shape(name)
        if shape != slot.shape:
            where = _where(checkpoint, name)
            raise CheckpointError(
                f"{where}: {name}: shape: got {list(shape)}, wanted {list(slot.shape)} by the "
                "config"
            )
        if isinstance(checkpoint, FolderCheckpoint) and checkpoint.dtype(name) not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: {name}: dtype: got {checkpoint.dtype(name)}, wanted "
                f"one of {', '.join(FLOAT_DTYPES)}"
            )


def _where(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.file_of(name) if isinstance(checkpoint, FolderCheckpoint) else "checkpoint"


@torch.no_grad()
def _fill(
    decoder: Decoder,
    checkpoint: Checkpoint,
    slots: Mapping[str, WeightSlot],
    progress: Callable[[int, int], None] | None,
) -> None:
    plain = dict(decoder.named_parameters())
    packed = {name: m for name, m in decoder.named_modules() if isinstance(m, Weight)}
    inside = {f"{name}.{part}" for name in packed for part in ("codes", "scale")}
    total = sum(weight.numel() for weight in packed.values())
    total += sum(weight.numel() for name, weight in plain.items() if name not in inside)
    done = 0
    for name in checkpoint.names:
        if name not in slots:
            continue
        slot = slots[name]
        values = checkpoint.tensor(name)
        index: Index = () if slot.expert is None else (slot.expert,)
        if slot.rows is not None:
            index = (*index, slice(*slot.rows))
        if slot.parameter in packed:
            packed[slot.parameter].copy_(index, values, name=f"{_where(checkpoint, name)}: {name}")
        else:
            target = plain[slot.parameter][index]
            target.copy_(values.view(target.shape))
        done += values.numel()
        if progress is not None:
            progress(done, total)
    assert done == total, (done, total)


def _listing(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
