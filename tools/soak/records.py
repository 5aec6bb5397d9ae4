"""What a soak run says at its end: one JSON record, printed, and kept where one asks for it."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from subten.bench.report import source_commit


def parser(description: str) -> argparse.ArgumentParser:
    """What every soak script takes: a seed, and a file of results to keep its record in."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    result.add_argument("--record", type=Path, default=None, help="JSON file of results to update")
    return result


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with a seed."""
    options = arguments.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**40)
    options.commit = source_commit() or "unknown"
    return options


class Progress:
    """What a goal's runs have seen so far; with a file, one run goes on where another ended.

    `values` starts as `empty` and is JSON. `done` counts what is finished of `whole`. The seed is
    the first run's, and so is the commit: another one's count would be worth nothing here.
    """

    def __init__(self, options: argparse.Namespace, whole: int, empty: dict[str, Any]) -> None:
        self._path: Path | None = options.progress
        self._end_s = time.monotonic() + options.seconds
        self._whole = whole
        self.done = 0
        self.values = empty
        self._runs = 0
        if self._path is not None and self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["commit"] != options.commit:
                raise SystemExit(f"progress: {self._path} is of commit {kept['commit']}")
            self.done, self.values, self._runs = kept["done"], kept["values"], kept["runs"]
            options.seed = kept["seed"]
        self._runs += 1
        self._options = options

    @property
    def has_more(self) -> bool:
        """Whether there is something left to do and time to do it."""
        return self.has_more_after(0)

    def has_more_after(self, number: int) -> bool:
        """The same, once `number` more that are under way will be done."""
        return self.done + number < self._whole and time.monotonic() < self._end_s

    def random(self) -> random.Random:
        """The numbers of what comes next."""
        return numbers(self._options.seed, self.done)

    def keep(self, number: int) -> None:
        """Count `number` more as done, and write that down."""
        self.done += number
        if self._path is None:
            return
        kept = {"commit": self._options.commit, "seed": self._options.seed, "runs": self._runs}
        kept |= {"done": self.done, "values": self.values}
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(kept), encoding="utf-8")
        beside.replace(self._path)

    @property
    def seen(self) -> dict[str, object]:
        """For the record: the number of runs, where it took several."""
        return {"runs": self._runs} if self._runs > 1 else {}


def numbers(seed: int, at: int) -> random.Random:
    """Random numbers for the part of a run that begins after `at`: the same in one run as in
    several, and beside each other."""
    return random.Random(f"{seed}/{at}")


def add_progress(arguments: argparse.ArgumentParser) -> None:
    """The options of runs that may be cut short and go on later."""
    arguments.add_argument("--seconds", type=float, default=math.inf, help="end after so many")
    arguments.add_argument(
        "--progress", type=Path, default=None, help="file to go on from and to keep the count in"
    )


def report(
    goal: str, *, number: str, seen: dict[str, object], passed: bool, options: argparse.Namespace
) -> int:
    """Print the record of a run, and put it in the place of its goal's last; the exit status."""
    record = {
        "kind": "reliability",
        "goal": goal,
        "number": number,
        "seen": seen,
        "passed": passed,
        "seed": options.seed,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": options.commit,
        "command": _command(),
    }
    sys.stdout.write(json.dumps(record) + "\n")
    if options.record is not None:
        _keep(record, options.record)
    return 0 if passed else 1


def _keep(record: dict[str, object], path: Path) -> None:
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    others = [other for other in records if other["goal"] != record["goal"]]
    ordered = sorted([*others, record], key=lambda other: int(str(other["goal"])[1:]))
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def _command() -> str:
    """The command without what depends on one machine."""
    script = "/".join(Path(sys.argv[0]).absolute().parts[-3:])
    options = sys.argv[1:]
    for name in ("--record", "--progress"):
        if name in options:
            at = options.index(name)
            del options[at : at + 2]
    return " ".join(["python", script, *options])
