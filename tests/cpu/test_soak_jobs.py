"""Repeats of a soak run that jobs do beside each other."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "soak"))

from kills import run_repeats
from records import Progress

JOB = """
import json, sys
for line in sys.stdin:
    repeat = int(line)
    if repeat == {dies_at}:
        sys.exit(3)
    with open({log!r}, "a") as log:
        log.write(line)
    answer = {{"fault": "no"}} if repeat == {fails_at} else {{"gone_s": repeat / 8}}
    print(json.dumps(answer), flush=True)
"""


def make_progress(path: Path, *, whole: int, seconds: float = math.inf) -> Progress:
    options = argparse.Namespace(progress=path, seconds=seconds, seed=5, commit="abc")
    return Progress(options, whole, {"worst": {}, "faults": []})


def run(folder: Path, progress: Progress, *, dies_at: int = -1, fails_at: int = -1) -> list[int]:
    """The repeats that three jobs did, sorted."""
    log = folder / "log"
    log.write_text("")
    code = JOB.format(log=str(log), dies_at=dies_at, fails_at=fails_at)
    run_repeats(progress, num_jobs=3, command=[sys.executable, "-c", code])
    return sorted(int(line) for line in log.read_text().split())


def test_each_repeat_is_done_once_and_another_run_goes_on(tmp_path):
    path = tmp_path / "progress.json"
    progress = make_progress(path, whole=7)
    assert run(tmp_path, progress) == list(range(7))
    assert progress.values == {"worst": {"gone_s": 6 / 8}, "faults": []}
    assert run(tmp_path, make_progress(path, whole=11)) == [7, 8, 9, 10]
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert (kept["done"], kept["runs"], kept["commit"]) == (11, 2, "abc")
    assert kept["values"]["worst"] == {"gone_s": 10 / 8}


@pytest.mark.parametrize("how", ["fails_at", "dies_at"])
def test_a_repeat_that_goes_wrong_is_a_fault_and_the_others_go_on(tmp_path, how):
    progress = make_progress(tmp_path / "progress.json", whole=9)
    assert len(run(tmp_path, progress, **{how: 4})) == (9 if how == "fails_at" else 8)
    assert progress.done == 9
    assert len(progress.values["faults"]) == 1


def test_no_time_no_repeats(tmp_path):
    progress = make_progress(tmp_path / "progress.json", whole=9, seconds=0.0)
    assert run(tmp_path, progress) == []
    assert progress.done == 0
