"""Flat records of measurements: what each carries, and the files that hold lists of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subten.bench.report import check_writable, environment, write_json
from subten.core import ConfigError, reason, refuse
from subten.device import Device

KEY_FIELDS = (
    "kind",
    "engine",
    "gpu",
    "shape",
    "weights_dtype",
    "kv_cache_dtype",
    "batch_size",
    "context_len",
    "kernel",
    "model",
    "text",
    "window",
    "scheme",
    "tool",
)
"""A record with the same values here, absent ones included, takes the place of an older one."""

WEIGHT_NAMES = {"bfloat16": "bf16"}
"""`weights_dtype` of weights that are not quantised, where it is not the name of their dtype."""


def origin(device: Device) -> dict[str, Any]:
    """Where a record is from: device, versions, date, commit, command."""
    found = environment(device)
    return {
        "gpu": found["device_name"],
        "device": found["device"],
        "num_threads": found["num_threads"],
        "python": found["python"],
        "torch": found["torch"],
        "triton": found["triton"],
        "date": found["date"],
        "commit": found["commit"],
        "command": found["command"],
    }


def weights_dtype(quantization: str, dtype: str) -> str:
    """The name of a weight format in records: bf16, float32, fp8, int4."""
    return WEIGHT_NAMES.get(dtype, dtype) if quantization == "none" else quantization


def check_records(path: Path) -> None:
    """ConfigError where `add_records` could not add to the file; leaves it as it is."""
    _read(path)
    check_writable(path)


def add_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add to the list in the file, in place of older records of the same key; makes the file."""
    kept = _read(path)
    for record in records:
        key = _key(record)
        places = [i for i, old in enumerate(kept) if _key(old) == key]
        if places:
            kept[places[0]] = dict(record)
        else:
            kept.append(dict(record))
    write_json(path, kept)


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(field) for field in KEY_FIELDS)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    allowed = "a file to make, or one that holds a JSON list of records"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(ConfigError, "json", str(path), f"{allowed} ({reason(error)})") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise refuse(ConfigError, "json", str(path), allowed) from error
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise refuse(ConfigError, "json", str(path), allowed)
    return found
