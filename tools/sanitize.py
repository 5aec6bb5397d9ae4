"""Runs tests of the kernels under NVIDIA's compute-sanitizer, and keeps what it says of each.

    python tools/sanitize.py --tool memcheck,racecheck,synccheck --jobs 8 \
        --json benchmarks/results/h200-sanitizer.json

A case is one process: the tests of one kernel on small odd shapes, under one tool. Every tensor is
an allocation of its own there, so that memcheck sees one read past its end. Racecheck and synccheck
look at the kernels written in CUDA C++ alone: Triton places its barriers itself. A further case of
each tool is a planted fault, which the tool has to find.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subten.bench.records import add_records, origin
from subten.device import detect

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 97
"""Exit status of a tool that found something."""

FOREIGN = ("at6native", "cutlass", "cublas", "gemm", "cub")
"""In the names of kernels that are not this project's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tests of one kernel: functions of a file of tests/cpu, and which of their parameters."""

    kernel: str
    file: str
    tests: tuple[str, ...]
    parameters: str = ""
    is_triton: bool = False

    @property
    def expression(self) -> str:
        """For pytest's `-k`."""
        tests = " or ".join(self.tests)
        return f"({tests}) and ({self.parameters})" if self.parameters else tests


GROUPS = (
    Group(
        kernel="attend",
        file="test_cuda_attend.py",
        tests=("test_matches_twin", "test_scores_that_rise_along_the_sequence"),
        parameters="not on_a_gpu and not 128-8 and not 64-1",
    ),
    Group(
        kernel="append_attend",
        file="test_cuda_append_attend.py",
        tests=("test_equals_two_launches_and_the_twin",),
        parameters="128-4 or 64-5",
    ),
    Group(
        kernel="append_attend, plans",
        file="test_cuda_append_attend.py",
        tests=("test_every_kind_of_plan",),
        parameters="int4",
    ),
    Group(
        kernel="append_attend, merge that polls",
        file="test_cuda_append_attend.py",
        tests=("test_splits_that_poll_give_the_same_bits", "test_nan_reaches_a_merge_that_polls"),
    ),
    Group(
        kernel="kv_append",
        file="test_cuda_kv_append.py",
        tests=("test_rows_and_queries", "test_strided_inputs"),
        parameters="not slots4 and not slots5 and not slots6",
    ),
    Group(
        kernel="attend_mixed",
        file="test_cuda_attend_mixed.py",
        tests=("test_matches_dense", "test_polling_gives_the_bits_of_counting"),
        parameters="not on_a_gpu",
    ),
    Group(
        kernel="linear, tiles",
        file="test_cuda_linear_tiles.py",
        tests=("test_linear_of_odd_numbers_of_tokens", "test_rows_with_gaps"),
    ),
    Group(
        kernel="route, batch",
        file="test_cuda_route_batch.py",
        tests=("test_route_of_odd_sizes", "test_ties_go_to_the_lowest_id"),
    ),
    Group(
        kernel="linear",
        file="test_cuda_gemv.py",
        tests=("test_linear_of_odd_sizes", "test_rows_with_gaps"),
    ),
    Group(kernel="experts", file="test_cuda_experts.py", tests=("test_experts_of_odd_sizes",)),
    Group(
        kernel="experts, grouped",
        file="test_cuda_grouped.py",
        tests=("test_grouped_is_the_formula", "test_all_tokens_to_the_last_expert"),
    ),
    Group(
        kernel="route",
        file="test_cuda_route.py",
        tests=("test_route_of_odd_sizes", "test_every_width_of_the_selection"),
    ),
    Group(
        kernel="linear_route and experts after it",
        file="test_cuda_linear_route.py",
        tests=("test_a_layer_of_odd_sizes", "test_every_share_of_a_folded_row"),
    ),
    Group(
        kernel="kv_append, Triton",
        file="test_kv_append.py",
        tests=("test_only_the_named_rows_are_written", "test_queries_turn_in_the_same_launch"),
        is_triton=True,
    ),
    Group(
        kernel="attend, Triton",
        file="test_attend.py",
        tests=("test_splits_merge_to_the_whole", "test_strided_inputs"),
        is_triton=True,
    ),
    Group(
        kernel="linear, Triton", file="test_linear.py", tests=("test_odd_sizes",), is_triton=True
    ),
    Group(
        kernel="experts, Triton",
        file="test_experts.py",
        tests=("test_both_paths_read_packed_weights", "test_all_tokens_to_one_expert"),
        is_triton=True,
    ),
    Group(
        kernel="route, Triton",
        file="test_route.py",
        tests=("test_order_of_any_length", "test_ties_go_to_the_lowest_id"),
        is_triton=True,
    ),
    Group(
        kernel="norm_rope, Triton",
        file="test_norm_rope.py",
        tests=("test_rms_norm_is_the_formula", "test_norm_rope_reads_strides"),
        is_triton=True,
    ),
    Group(
        kernel="embed and advance, Triton",
        file="test_embed.py test_advance.py",
        tests=("test_each_row_is_its_tokens", "test_rows_move_on_by_a_token"),
        is_triton=True,
    ),
    Group(
        kernel="sample, Triton",
        file="test_sample.py",
        tests=("test_ties_at_a_threshold_all_stay", "test_bias_and_mask"),
        is_triton=True,
    ),
    Group(
        kernel="append_mixed, Triton",
        file="test_append_mixed.py",
        tests=("test_rows_go_where_they_belong",),
        is_triton=True,
    ),
    Group(
        kernel="demote, Triton",
        file="test_demote.py",
        tests=("test_cold_planes_are_written_and_nothing_else",),
        is_triton=True,
    ),
    Group(
        kernel="attend_mixed, Triton",
        file="test_attend_mixed.py",
        tests=("test_nan_stays_in_its_sequence",),
        is_triton=True,
    ),
)


PLANTED = Group(kernel="planted fault", file="", tests=())
"""No test, but a fault."""


def command(sanitizer: str, tool: str, group: Group, number: int) -> list[str]:
    """One case; `number` tells apart those that run at one time."""
    files = [str(ROOT / "tests" / "cpu" / name) for name in group.file.split()]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cuda", *files]
    tests += ["-k", group.expression]
    program = [str(ROOT / "tools" / "planted_fault.py"), tool] if group is PLANTED else tests
    of_tool = ["--padding", "64"] if tool == "memcheck" else []
    return [
        sanitizer,
        *("--tool", tool, *of_tool),
        # What the driver refuses raises in these tests; what torch only asks about is no error.
        *("--report-api-errors", "no", "--error-exitcode", str(FOUND)),
        *("--target-processes", "application-only", "--port", str(49152 + 20 * number)),
        *("--print-limit", "10"),
        *(word for name in FOREIGN for word in ("--kernel-name-exclude", f"kns={name}")),
        *(sys.executable, *program),
    ]


def result(output: str, status: int, *, is_planted: bool = False) -> dict[str, Any]:
    """What a case said: the tool's closing line, and how many tests passed."""
    closing = re.findall(r"^=+ (\w+ SUMMARY: .*)$", output, re.MULTILINE)
    tests = re.findall(r"(\d+) passed", output)
    num_errors = [
        int(number) for number in re.findall(r"(\d+) (?:errors?|hazards?)", "".join(closing))
    ]
    num_tests = int(tests[-1]) if tests else 0
    is_clean = status == 0 and bool(closing) and not any(num_errors) and num_tests > 0
    is_found = status == FOUND and any(num_errors)
    return {
        "tests_passed": num_tests,
        "closing_line": closing[0] if closing else "",
        "exit_status": status,
        "passed": is_found if is_planted else is_clean,
    }


def run_case(argv: list[str], timeout_s: float) -> tuple[str, int]:
    """Output and exit status; 124 where it ran out of time."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.output or b"").decode(errors="replace"), 124
    return done.stdout.decode(errors="replace"), done.returncode


def run_cases(options: argparse.Namespace) -> int:
    """All cases, several at a time, the longest tools last; the exit status."""
    cases: queue.Queue[tuple[str, Group]] = queue.Queue()
    for tool in options.tool.split(","):
        cases.put((tool, PLANTED))
        for group in GROUPS:
            is_asked = not options.kernel or any(part in group.kernel for part in options.kernel)
            if is_asked and not (group.is_triton and tool != "memcheck"):
                cases.put((tool, group))
    origin_fields = origin(detect(options.device))
    lock, statuses = threading.Lock(), []
    end_s = time.monotonic() + options.seconds

    def work(number: int) -> None:
        while True:
            try:
                tool, group = cases.get_nowait()
            except queue.Empty:
                return
            began_s = time.monotonic()
            left_s = min(options.timeout, end_s - began_s)
            if left_s <= 0:
                sys.stdout.write(f"{tool}, {group.kernel}: no time left\n")
                continue
            argv = command(options.sanitizer, tool, group, number)
            output, status = run_case(argv, left_s)
            found = result(output, status, is_planted=group is PLANTED)
            seconds = time.monotonic() - began_s
            with lock:
                statuses.append(found["passed"])
                report(options, tool, group, found | {"seconds": round(seconds, 1)}, output)
                if options.json is not None:
                    again = [
                        "python",
                        "tools/sanitize.py",
                        "--tool",
                        tool,
                        "--kernel",
                        group.kernel,
                    ]
                    fields = {"kind": "sanitizer", "tool": tool, "kernel": group.kernel}
                    fields |= found | origin_fields | {"command": shlex.join(again)}
                    add_records(options.json, [fields])

    # Ports of its own, also beside another run of this script.
    first = os.getpid() % 600
    threads = [threading.Thread(target=work, args=(first + i,)) for i in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(f"{sum(statuses)} of {len(statuses)} cases as they should be\n")
    return 0 if statuses and all(statuses) else 1


def report(
    options: argparse.Namespace, tool: str, group: Group, found: dict[str, Any], output: str
) -> None:
    """A line of a case; the end of its output where it is not clean."""
    line = found["closing_line"] or f"no closing line, exit status {found['exit_status']}"
    tests, seconds = found["tests_passed"], found["seconds"]
    sys.stdout.write(f"{tool}, {group.kernel}: {line}; {tests} tests passed, {seconds} s\n")
    if not found["passed"]:
        sys.stdout.write("\n".join(output.splitlines()[-options.lines :]) + "\n")
    sys.stdout.flush()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kernels under compute-sanitizer.")
    parser.add_argument(
        "--tool", default=",".join(TOOLS[:3]), help=f"by commas: {', '.join(TOOLS)}"
    )
    parser.add_argument(
        "--kernel", action="append", help="part of a kernel's name, may come again; default: all"
    )
    parser.add_argument("--jobs", type=int, default=4, help="cases at one time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a case")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of all cases")
    parser.add_argument("--lines", type=int, default=30, help="shown of a case with a finding")
    parser.add_argument("--sanitizer", default=find_sanitizer(), help="the program")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="list of records to add to")
    options = parser.parse_args()
    wrong = [tool for tool in options.tool.split(",") if tool not in TOOLS]
    if wrong:
        parser.error(f"--tool: got {wrong[0]!r}; allowed: {', '.join(TOOLS)}")
    if shutil.which(options.sanitizer) is None:
        parser.error(f"--sanitizer: got {options.sanitizer!r}; allowed: a program that is there")
    return run_cases(options)


def find_sanitizer() -> str:
    """Where CUDA's toolkit puts it, if it is not on the path."""
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda")]
    places = [
        f"{home}/{part}/compute-sanitizer"
        for home in homes
        for part in ("bin", "compute-sanitizer")
    ]
    found = [place for place in ("compute-sanitizer", *places) if shutil.which(place)]
    return found[0] if found else "compute-sanitizer"


if __name__ == "__main__":
    sys.exit(main())
