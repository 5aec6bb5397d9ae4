"""Goal R10: a script of 20 requests, once for each call of each fault point, which then fails.

    python tools/soak/fail_each.py

After each run all invariants hold, every request has ended once with tokens of its own, all pages
are free and a clean request is served.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

from records import parse, parser, report
from scripted_run import Faults
from simulator import RATES, Shape, Simulation

POINTS = tuple(point for point in RATES if point not in ("clock", "logits"))

SHAPE = Shape(
    num_pages=7,
    max_num_seqs=5,
    max_num_batched_tokens=69,
    max_prefill_tokens=40,
    max_model_len=400,
    max_queue=None,
    enable_prefix_caching=True,
    num_requests=20,
    max_prompt=100,
    max_output=40,
    arrival_rate=1.0,
    cancel_share=0.1,
)


def run_script(seed: int, fail_at: tuple[str, int] | None = None) -> Simulation:
    """The script, with one call failing or none."""
    faults = Faults(random.Random(seed), fail_at=fail_at)
    simulation = Simulation(seed, shape=SHAPE, faults=faults)
    simulation.run()
    return simulation


def main() -> int:
    """Fail each call in turn and report."""
    arguments = parser("R10: fail the k-th call, for every k")
    arguments.add_argument("--every", type=int, default=1, help="only each so many-th k")
    options = parse(arguments)
    seed = options.seed
    calls = run_script(seed).faults.num_calls
    num_runs: Counter[str] = Counter()
    broken: list[str] = []
    for point in POINTS:
        for k in range(1, calls[point] + 1, options.every):
            num_runs[point] += 1
            try:
                simulation = run_script(seed, (point, k))
                if simulation.faults.num_failed[point] != 1:
                    broken.append(f"{point} {k}: did not fail")
            except AssertionError as error:
                broken.append(f"{point} {k}: {error}"[:500])
    seen: dict[str, object] = {"runs": dict(num_runs), "broken": broken}
    number = "every k for allocate, copy, send on the script: 100 % recover"
    return report("R10", number=number, seen=seen, passed=not broken, options=options)


if __name__ == "__main__":
    sys.exit(main())
