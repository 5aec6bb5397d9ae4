"""What a soak run says at its end: one JSON record, printed, and kept where one asks for it."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path


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
    return options


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
        "commit": _commit(),
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
    if "--record" in options:
        at = options.index("--record")
        del options[at : at + 2]
    return " ".join(["python", script, *options])


def _commit() -> str:
    """The commit that ran, with a plus sign if files differ from it."""
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
