"""What a run tells while it runs: a bar on a terminal or lines elsewhere, and JSON lines."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from subten.core import ConfigError, reason, refuse

logger = logging.getLogger(__name__)


class RunLog:
    """Progress of the stages of a run, and a JSON line for each step.

    Only the first process of several talks (`is_silent` for the others).
    """

    def __init__(self, path: Path, *, log_seconds: float, is_silent: bool, append: bool) -> None:
        self._log_seconds = log_seconds
        self._is_silent = is_silent
        self._last_line_s = -float("inf")
        self._stage = ""
        self._start_s = time.perf_counter()
        self._file: TextIO | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if is_silent:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if append else "w", encoding="utf-8")
        except OSError as error:
            allowed = f"a writable file ({reason(error)})"
            raise refuse(ConfigError, "json", str(path), allowed) from error
        console = Console(stderr=True)
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=console)
            self._bar.start()

    def stage(self, what: str, share: float, detail: str = "") -> None:
        """Show how much of a stage is done; lines are at least `log_seconds` apart in a stage."""
        if self._is_silent:
            return
        is_new = what != self._stage
        self._stage = what
        if self._bar is not None:
            if is_new or self._task is None:
                self._task = self._bar.add_task(what, total=1.0, detail=detail)
            self._bar.update(self._task, completed=share, detail=detail)
            return
        now = time.perf_counter()
        if is_new or now - self._last_line_s >= self._log_seconds:
            self._last_line_s = now
            elapsed = now - self._start_s
            logger.info("%6.1f s  %s %3.0f %%  %s", elapsed, what, 100 * share, detail)

    def step(self, record: dict[str, Any], share: float) -> None:
        """Log one optimiser step."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        detail = (
            f"step {record['step']} loss {record['loss']:.4f} ce {record['ce']:.4f} "
            f"kd {record['kd']:.4f} kd_self {record['kd_self']:.4f} aux {record['aux']:.4f} "
            f"MaxVio {record['max_vio']:.2f} {record['tokens_per_s'] / 1e3:.1f} k tok/s"
        )
        self.stage("training", share, detail)

    def close(self) -> None:
        """End the bar and the file."""
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()
