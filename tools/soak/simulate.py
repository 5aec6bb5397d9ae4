"""Goal R9: many seeds of the simulator with all faults on; no invariant breaks.

    python tools/soak/simulate.py --seeds 10000

Every hundredth seed runs twice and must repeat to the bit. A failure names its seed:
`--seed SEED --seeds 1` runs it again.
"""

from __future__ import annotations

import sys
from collections import Counter

from records import parse, parser, report
from simulator import Simulation


def run_seed(seed: int) -> Simulation:
    """One simulation; an AssertionError names the seed and the step."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except AssertionError as error:
        where = f"seed={seed} step={simulation.num_steps}"
        raise AssertionError(f"{where}: {error}") from error
    return simulation


def main() -> int:
    """Run the seeds and report."""
    arguments = parser("R9: seeds of the simulator, all faults on")
    arguments.add_argument("--seeds", type=int, default=10_000)
    options = parse(arguments)
    ended: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    num_steps = num_preemptions = num_repeated = 0
    broken: list[str] = []
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            simulation = run_seed(seed)
        except AssertionError as error:
            broken.append(str(error)[:500])
            continue
        ended.update(simulation.num_ended)
        failed.update(simulation.faults.num_failed)
        num_steps += simulation.num_steps
        num_preemptions += simulation.engine.scheduler.num_preemptions
        if seed % 100 == 0:
            num_repeated += 1
            if run_seed(seed).digest != simulation.digest:
                broken.append(f"seed={seed}: the second run differs")
    seen = {
        "seeds": options.seeds,
        "broken": broken,
        "repeated": num_repeated,
        "steps": num_steps,
        "preemptions": num_preemptions,
        "ended": dict(ended),
        "faults": {point: count for point, count in failed.items() if count},
    }
    number = "10,000 seeds, all faults on: 0 invariant breaks; a seed repeats to the bit"
    return report("R9", number=number, seen=seen, passed=not broken, options=options)


if __name__ == "__main__":
    sys.exit(main())
