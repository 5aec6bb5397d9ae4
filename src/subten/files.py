"""Files that appear whole or not at all; no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file and, where they are missing, the folders that it lies in.

    Its mode follows the umask, so that others may read a cache that they share. An OSError leaves
    nothing, and a file that was there as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Made within a folder of its own, as temporary files are for their owner alone.
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
        written = Path(folder) / path.name
        written.write_bytes(data)
        written.replace(path)
