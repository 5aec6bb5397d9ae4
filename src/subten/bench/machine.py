"""What this machine has: device, versions, the backend of each op, KV formats, the demo model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subten.bench.report import environment, human_bytes, text_table
from subten.codecs import CODECS, get_codec, kv_format
from subten.config import cache_dir
from subten.core import CheckpointError, ConfigError
from subten.device import detect
from subten.kernels import select_ops
from subten.weights.upcycled import find_demo_gguf

HEAD_DIMS = (64, 128)
"""Head dimensions that the true bits of each codec are listed for."""


def describe_machine(device: str, backend: str) -> dict[str, Any]:
    """Everything that `subten info` shows, as plain JSON values."""
    found = detect(device)
    ops = select_ops(backend, found.torch_device)
    record = environment(found)
    del record["command"]
    return {
        **record,
        "capability": list(found.capability) if found.kind == "cuda" else None,
        "num_sms": found.num_sms if found.kind == "cuda" else None,
        "backends": dict(ops.backend),
        "kv_cache_dtypes": {name: _describe_codec(name) for name in CODECS},
        "cache_dir": str(cache_dir()),
        "demo_package": _demo_package(),
    }


def machine_text(found: Mapping[str, Any]) -> str:
    """The same for people."""
    memory = human_bytes(found["device_memory_bytes"])
    device = f"{found['device']}: {found['device_name']}, {memory}"
    if found["capability"]:
        major, minor = found["capability"]
        device += f", {found['num_sms']} SMs, sm_{major}{minor}"
    else:
        device += f", {found['num_threads']} threads"
    lines = [
        ("subten", f"{found['subten'] or 'not installed'}, commit {found['commit'] or 'unknown'}"),
        ("device", device),
        ("python", found["python"]),
        ("torch", found["torch"]),
        ("triton", found["triton"] or "not installed"),
        ("cache", found["cache_dir"]),
        ("demo", found["demo_package"]),
        ("backends", ", ".join(f"{op} {name}" for op, name in found["backends"].items())),
    ]
    codecs = [
        [name, *(_bits_text(codec["true_bits"][str(dim)]) for dim in HEAD_DIMS), codec["summary"]]
        for name, codec in found["kv_cache_dtypes"].items()
    ]
    table = text_table(
        ["--kv-cache-dtype", *(f"bits, head {dim}" for dim in HEAD_DIMS)],
        [row[:-1] for row in codecs],
    ).splitlines()
    notes = ["", "", *(row[-1] for row in codecs)]
    head = "\n".join(f"{name:<10}{value}" for name, value in lines)
    body = "\n".join(f"{line}  {note}".rstrip() for line, note in zip(table, notes, strict=True))
    return f"{head}\n\n{body}"


def _bits_text(bits: float | None) -> str:
    return "refused" if bits is None else f"{bits:.3f}"


def _describe_codec(name: str) -> dict[str, Any]:
    bits: dict[str, float | None] = {}
    for head_dim in HEAD_DIMS:
        try:
            bits[str(head_dim)] = kv_format(name, head_dim).true_bits
        except ConfigError:
            bits[str(head_dim)] = None
    return {"summary": get_codec(name).summary, "true_bits": bits}


def _demo_package() -> str:
    """Where the demo model's file is, or how to get it."""
    try:
        return str(find_demo_gguf())
    except CheckpointError as error:
        return str(error)
