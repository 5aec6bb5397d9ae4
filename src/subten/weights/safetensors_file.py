"""One safetensors file: a header that is checked in full, then tensors read one at a time.

Layout: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets},
then the tensors' bytes without gaps. Everything is checked in Python integers against the file's
size before a byte of data is read, and data is read, not mapped: a file that shrinks meanwhile is
an error, not a signal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subten.core import CheckpointError

_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Every dtype of whole bytes that the format knows, so that a foreign tensor is named as such."""

FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes that weights may have."""

_LENGTH_BYTES = 8
_FOREIGN_MAGIC = {b"PK\x03\x04": "a zip archive (torch.save)", b"\x89HDF": "an HDF5 file"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a file; `start` and `stop` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsFile:
    """A checked header: tensors by name, in the order of their bytes."""

    path: Path
    entries: Mapping[str, TensorEntry]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in CPU memory of its own; its dtype must be one of FLOAT_DTYPES."""
        entry = self.entries[name]
        num_bytes = entry.stop - entry.start
        data = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(entry.start)
                num_read = file.readinto(data.numpy())  # type: ignore[arg-type]
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        if num_read != num_bytes:
            raise CheckpointError(
                f"{self.path}: {name}: got {num_read} bytes, wanted {num_bytes}: the file was cut"
            )
        return data.view(FLOAT_DTYPES[entry.dtype]).reshape(entry.shape)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read and check the header; CheckpointError names file, field, what came, what is wanted."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header = file.read(_header_bytes(path, file.read(_LENGTH_BYTES), file_bytes))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    fields = parse_json_object(header, str(path), what="header")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__: got no map from strings to strings")
    data_start = _LENGTH_BYTES + len(header)
    entries = {name: _entry(path, name, value, data_start) for name, value in fields.items()}
    in_order = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = data_start
    for name, entry in in_order.items():
        if entry.start != end:
            raise CheckpointError(
                f"{path}: {name}: data_offsets: got a start of {entry.start - data_start}, wanted "
                f"{end - data_start}: tensors may neither overlap nor leave gaps"
            )
        end = entry.stop
    if end != file_bytes:
        raise CheckpointError(
            f"{path}: got a file of {file_bytes} bytes, wanted {end} by its header: "
            f"{'the file is cut' if file_bytes < end else 'bytes follow the last tensor'}"
        )
    return SafetensorsFile(path=path, entries=in_order)


def parse_json_object(data: bytes, source: str, *, what: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top is an object without duplicate keys; else CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{source}: {what}: key {twice!r} is there twice")
        return values

    def no_constant(text: str) -> Any:
        raise CheckpointError(f"{source}: {what}: got {text}, which is not JSON")

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant
        )
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: {what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: {what}: got a {type(value).__name__}, wanted an object")
    return value


def _header_bytes(path: Path, start: bytes, file_bytes: int) -> int:
    for magic, what in _FOREIGN_MAGIC.items():
        if start.startswith(magic):
            raise CheckpointError(f"{path}: is {what}, not a safetensors file, whatever its name")
    if len(start) < _LENGTH_BYTES:
        raise CheckpointError(f"{path}: got a file of {file_bytes} bytes, wanted at least 10")
    header_bytes = int.from_bytes(start, "little")
    if not 2 <= header_bytes <= file_bytes - _LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: header length: got {header_bytes}, wanted 2 to {file_bytes - _LENGTH_BYTES} "
            "(what the file holds)"
        )
    return header_bytes


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    def bad(field: str, got: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{path}: {name}: {field}: got {got!r}, wanted {wanted}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        got = sorted(value) if isinstance(value, dict) else value
        raise bad("entry", got, "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise bad("dtype", dtype, f"one of {', '.join(_ITEM_BYTES)}")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise bad("shape", shape, "a list of integers of at least 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise bad("data_offsets", offsets, "two integers of at least 0")
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise bad("data_offsets", offsets, f"{num_bytes} bytes, as {dtype} {shape} needs")
    return TensorEntry(
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + offsets[0],
        stop=data_start + offsets[1],
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
