"""The list of what only a GPU can run: its commands exist, and one that fails stops none."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from gpu_runs import JOBS, ROOT, Job, main

from subten.bench.report import source_commit
from subten.core import ConfigError

DIRECTORIES = {"workers": 4, "results": "results", "logs": "logs", "gpu": "h200"}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_command_takes_its_options(job):
    """Each is parsed as the script or the command line does, up to what would need a GPU."""
    words = shlex.split(job.command.format(**DIRECTORIES))
    if words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[2]).is_dir()
    elif words[:2] == ["-m", "subten"]:
        from typer.main import get_command

        from subten.cli import app

        command, rest = get_command(app), words[2:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context("subten", rest)
    else:
        text = (ROOT / words[0]).read_text(encoding="utf-8")
        for word in words[1:]:
            assert not word.startswith("--") or f'"{word}"' in text, word


def test_a_record_names_the_commit_of_a_copy(monkeypatch):
    here = source_commit()
    monkeypatch.setenv("SUBTEN_COMMIT", "0123456789ab")
    assert source_commit() == "0123456789ab" != here
    monkeypatch.setenv("SUBTEN_COMMIT", "")
    with pytest.raises(ConfigError, match="SUBTEN_COMMIT: got ''"):
        source_commit()


def test_one_that_fails_or_hangs_stops_none(tmp_path, capsys):
    jobs = (
        Job(name="fails", command="-c 'raise SystemExit(3)'", limit_s=60),
        Job(name="hangs", command="-c 'import time; time.sleep(60)'", limit_s=1),
        Job(name="ends", command="-c 'print(5)'", limit_s=60),
        Job(name="left-out", command="-c 'print(6)'", limit_s=60),
    )
    arguments = ["--logs", str(tmp_path), "--only", "fails", "hangs", "ends"]
    assert main(arguments, jobs) == 1
    lines = capsys.readouterr().out.splitlines()
    ends = [line.split(" s  ")[1] for line in lines]
    assert ends == ["failed, exit status 3", "cut after 1 s", "done"]
    assert (tmp_path / "ends.log").read_text() == "5\n"
    assert not (tmp_path / "left-out.log").exists()
    assert main([*arguments[:2], "--seconds", "0"], jobs[2:]) == 1
    assert "no time left" in capsys.readouterr().out


def test_failures_are_kept_as_they_happen(tmp_path):
    """Those of a run that is ended by force as well."""
    text = "import os\n\ndef test_a():\n    assert 1 == 2\n\ndef test_b():\n    os._exit(9)\n"
    (tmp_path / "test_x.py").write_text(text, encoding="utf-8")
    kept = tmp_path / "failures.txt"
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", "/dev/null"]
    command += ["-p", "no:cacheprovider", "--failures", str(kept), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stdout + done.stderr
    lines = kept.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "test_x.py::test_a, call:"
    assert "E       assert 1 == 2" in lines
