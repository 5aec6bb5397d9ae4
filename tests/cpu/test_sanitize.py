"""Cases of compute-sanitizer: they name tests that are there, and what the tool says is read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from planted_fault import BODIES, FILE, NAME, sources
from sanitize import FOUND, GROUPS, PLANTED, ROOT, TOOLS, command, main, result

from subten.kernels.cuda import runtime


def test_every_cuda_kernel_has_a_case():
    folder = ROOT / "src" / "subten" / "kernels" / "cuda"
    entries = {
        name
        for path in folder.glob("*.cu")
        for name in re.findall(
            r"__global__[^;{(]*(?:\([^)]*\)\s*)?(\w+)_kernel\(", path.read_text()
        )
    }
    assert {"attend", "route", "linear"} <= entries
    text = "".join(
        (ROOT / "tests" / "cpu" / group.file).read_text() for group in GROUPS if not group.is_triton
    )
    part_of = {
        "up": "experts",
        "down": "experts",
        "grouped_up": "grouped",
        "grouped_down": "grouped",
    }
    part_of["combine"] = "grouped"
    for entry in entries:
        assert part_of.get(entry, entry) in text, entry


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.kernel)
def test_a_case_names_tests_that_are_there(group):
    files = [ROOT / "tests" / "cpu" / name for name in group.file.split()]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    for name in group.tests:
        assert f"def {name}(" in text, name


def test_a_command():
    argv = command("sanitizer", "memcheck", GROUPS[1], 3)
    assert argv[0] == "sanitizer"
    assert argv[-1] == "(test_equals_two_launches_and_the_twin) and (128-4 or 64-5)"
    assert argv[argv.index("--port") + 1] == "49212"
    assert command("sanitizer", "synccheck", PLANTED, 0)[-2:] == [
        str(ROOT / "tools" / "planted_fault.py"),
        "synccheck",
    ]


@pytest.mark.parametrize(
    ("line", "tests", "status", "passed"),
    [
        ("========= ERROR SUMMARY: 0 errors", "12 passed in 3.21s", 0, True),
        ("========= ERROR SUMMARY: 1 error", "12 passed in 3.21s", 0, False),
        ("========= ERROR SUMMARY: 0 errors", "12 passed in 3.21s", FOUND, False),
        ("========= ERROR SUMMARY: 0 errors", "12 deselected in 3.21s", 0, False),
        ("========= ERROR SUMMARY: 0 errors", "1 failed, 11 passed in 3.21s", 1, False),
        ("", "12 passed in 3.21s", 0, False),
        (
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            "3 passed in 1.00s",
            0,
            True,
        ),
        (
            "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)",
            "3 passed in 1.00s",
            0,
            False,
        ),
    ],
)
def test_what_a_case_said(line, tests, status, passed):
    found = result(f"========= COMPUTE-SANITIZER\n{tests}\n{line}\n", status)
    assert found["passed"] is passed
    assert found["closing_line"] == line.removeprefix("========= ")
    assert found["exit_status"] == status


def test_a_planted_fault_has_to_be_found():
    errors = "========= ERROR SUMMARY: 2 errors\n"
    assert result(errors, FOUND, is_planted=True)["passed"]
    assert not result("========= ERROR SUMMARY: 0 errors\n", 0, is_planted=True)["passed"]
    assert not result("Traceback\n", 1, is_planted=True)["passed"]


@pytest.mark.skipif(not runtime.has_compiler(), reason="needs cuda-bindings and NVRTC")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_planted_fault_compiles(tool, monkeypatch):
    assert set(BODIES) == set(TOOLS)
    monkeypatch.setattr(runtime, "source_files", lambda: sources(tool))
    cubin, symbol = runtime.compile_cubin(FILE, NAME, "sm_90a")
    assert cubin and NAME in symbol


def test_a_program_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--sanitizer", "/no/such/program"])
    with pytest.raises(SystemExit):
        main()
    assert "--sanitizer: got '/no/such/program'" in capsys.readouterr().err


def test_cases_beside_each_other_leave_records(tmp_path, monkeypatch, capsys):
    """Under a program that says what a clean tool says, but for one kernel."""
    program, out = tmp_path / "sanitizer", tmp_path / "out.json"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *planted*) echo "= ERROR SUMMARY: 1 error"; exit 97;; esac\n'
        'echo 7 passed\ncase "$*" in *racecheck*test_cuda_route*) n=1;; *) n=0;; esac\n'
        'echo "========= ERROR SUMMARY: $n errors"\n'
    )
    program.chmod(0o755)
    argv = ["sanitize.py", "--sanitizer", str(program), "--device", "cpu", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [*argv, "--tool", "memcheck,racecheck"])
    assert main() == 1
    records = json.loads(out.read_text())
    num_cuda = sum(not group.is_triton for group in GROUPS)
    assert len(records) == len(GROUPS) + num_cuda + 2
    failed = [(record["tool"], record["kernel"]) for record in records if not record["passed"]]
    assert failed == [("racecheck", "route")]
    of_tests = [record for record in records if record["kernel"] != PLANTED.kernel]
    assert all(record["tests_passed"] == 7 and record["date"] for record in of_tests)
    assert f"{len(records) - 1} of {len(records)} cases" in capsys.readouterr().out
