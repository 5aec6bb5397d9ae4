"""A Hugging Face folder: config.json, safetensors in one file or in shards, tokenizer.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from subten.core import CheckpointError
from subten.tokenizer import Tokenizer
from subten.weights.safetensors_file import (
    SafetensorsFile,
    open_safetensors,
    parse_json_object,
)

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EXECUTABLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack")


class FolderCheckpoint:
    """A folder whose headers have been read and checked against its index; no data read yet.

    `config` is config.json; `eos_token_ids` are those of generation_config.json, which chat models
    use for the ends of turns. Tensors come by their Hugging Face name.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config_source = str(folder / "config.json")
        self.config = _read_json(folder / "config.json")
        self._files = _open_files(folder)
        self._file_of = {name: file for file in self._files for name in file.entries}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, file by file in the order of their bytes."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its header."""
        return self._file_of[name].entries[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as safetensors spells it, from its header."""
        return self._file_of[name].entries[name].dtype

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for errors."""
        return str(self._file_of[name].path)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor, in the file's dtype."""
        return self._file_of[name].read(name)

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, empty where the folder has none."""
        path = self.path / "generation_config.json"
        return _read_json(path) if path.is_file() else {}

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the folder; None, with a warning, where tokenizer.json is absent."""
        path, settings = self.path / "tokenizer.json", self.path / "tokenizer_config.json"
        if not path.is_file():
            logger.warning("%s: no tokenizer.json: token ids only, no text", self.path)
            return None
        return Tokenizer.from_file(path, settings if settings.is_file() else None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no such file; a model folder holds config.json and *.safetensors"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json_object(data, str(path), what="file")


def _open_files(folder: Path) -> list[SafetensorsFile]:
    has_single, has_index = (folder / _SINGLE).is_file(), (folder / _INDEX).is_file()
    if has_single and has_index:
        raise CheckpointError(
            f"{folder}: holds both {_SINGLE} and {_INDEX}; remove the one that is not the model"
        )
    if has_single:
        return [open_safetensors(folder / _SINGLE)]
    if has_index:
        return _open_shards(folder)
    present = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    unsafe = [name for name in present if name.endswith(_EXECUTABLE_SUFFIXES)]
    if unsafe:
        raise CheckpointError(
            f"{folder}: {unsafe[0]}: a pickled checkpoint can run code and is never opened; "
            f"convert it to {_SINGLE}"
        )
    shards = [name for name in present if name.endswith(".safetensors")]
    found = f"found {_listing(shards)} but no index" if shards else "found no weights"
    raise CheckpointError(f"{folder}: {found}; wanted {_SINGLE}, or {_INDEX} with its shards")


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    """Open the shards that the index names, and check that both tell of the same tensors."""
    index = folder / _INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: got no map from tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(
                f"{index}: {name}: got file {file!r}, wanted the name of a .safetensors file in "
                "the same folder"
            )
    file_names = sorted(set(weight_map.values()))
    missing = [name for name in file_names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: missing shards: {_listing(missing)} ({len(missing)} of {len(file_names)}); "
            "download them again"
        )
    files = [open_safetensors(folder / name) for name in file_names]
    for file in files:
        listed = {name for name, shard in weight_map.items() if shard == file.path.name}
        lost, unlisted = sorted(listed - file.entries.keys()), sorted(file.entries.keys() - listed)
        if lost:
            raise CheckpointError(
                f"{file.path}: missing tensors that the index puts there: {_listing(lost)}"
            )
        if unlisted:
            raise CheckpointError(
                f"{file.path}: holds tensors that the index does not put there: "
                f"{_listing(unlisted)}"
            )
    return files


def _is_plain_name(name: str) -> bool:
    is_inside = not any(part in name for part in ("/", "\\", "\0", ".."))
    return is_inside and name.endswith(".safetensors")


def _listing(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
