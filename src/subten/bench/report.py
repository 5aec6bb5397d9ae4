"""What every measurement carries: the environment it ran in, its tables, its JSON file."""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from subten.config import env_commit
from subten.core import ConfigError, reason, refuse
from subten.device import Device
from subten.files import write_whole


def environment(device: Device) -> dict[str, Any]:
    """The machine, the versions, the commit, the date and the command of this run."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device.kind,
        "device_name": device.name,
        "device_memory_bytes": device.memory_bytes,
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "subten": package_version("subten"),
        "commit": source_commit(),
        "command": shlex.join(["subten", *sys.argv[1:]]),
    }


def package_version(name: str) -> str | None:
    """The installed version of a package, None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write_json(path: Path, result: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a result or a list of them; a NaN or an infinity is our bug and raises ValueError.

    A file that was there is replaced whole or not at all, whenever the process may end.
    """
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    with _refusals(path):
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
        else:
            write_whole(path, text.encode())


def check_writable(path: Path) -> None:
    """ConfigError where `write_json` could not write: to be known before hours of work, not after.

    It tries, which makes the folders that the file lies in and leaves the file itself alone.
    """
    with _refusals(path):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not _is_special(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryDirectory(dir=path.parent).cleanup()


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, which is written as it is."""
    return path.exists() and not path.is_file()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        allowed = f"a writable file ({reason(error)})"
        raise refuse(ConfigError, "json", str(path), allowed) from error


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal: the first flush left, the others flush right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1
) -> str:
    """The same in Markdown; the first `num_left` columns are flush left."""
    align = [":--"] * num_left + ["--:"] * (len(header) - num_left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, align, *rows])


def human_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit and three significant figures: `46.1 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"


def source_commit() -> str | None:
    """The commit of the source tree that runs, `-dirty` with changes; None outside a checkout.

    `env_commit` names it where the tree is a copy whose git does not know.
    """
    if named := env_commit():
        return named
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
