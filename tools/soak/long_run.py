"""Goal R1, its engine half: mixed requests for long; nothing leaks, nothing gets stuck.

    python tools/soak/long_run.py --requests 20000

1,036,800 requests are a day of twelve a second. The last tenth has to need no more memory and no
more files than the first tenth left behind.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from records import parse, parser, report
from scripted_run import Faults
from simulator import Shape, Simulation

MAX_GROWTH = 0.02

SHAPE = Shape(
    num_pages=40,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_prefill_tokens=128,
    max_model_len=600,
    max_queue=None,
    enable_prefix_caching=True,
    num_requests=1000,
    max_prompt=250,
    max_output=60,
    arrival_rate=4.0,
    cancel_share=0.1,
)


class LongRun(Simulation):
    """Requests that are drawn when they are needed; what the process holds, in between."""

    def __init__(self, seed: int, num_requests: int) -> None:
        faults = Faults(random.Random(0))
        super().__init__(seed, shape=SHAPE, faults=faults, requests=[], keeps_clients=False)
        self._num_requests = num_requests
        self.held: list[tuple[int, int]] = []

    def serve(self) -> None:
        """Ten parts, and after each what is held."""
        size = self._num_requests // 10
        for part in range(10):
            self.held.append(_held())
            self.send(self.draw_requests(size, f"{part}-"))
        self.held.append(_held())
        self.run()


def _held() -> tuple[int, int]:
    """Bytes in memory and open files of this process (Linux)."""
    fields = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(line.split()[1] for line in fields if line.startswith("VmRSS:"))
    return int(kilobytes) * 1024, sum(1 for _ in Path("/proc/self/fd").iterdir())


def main() -> int:
    """Serve and report."""
    arguments = parser("R1: a long run of the engine")
    arguments.add_argument("--requests", type=int, default=20_000)
    options = parse(arguments)
    run = LongRun(options.seed, options.requests)
    broken = ""
    try:
        run.serve()
    except AssertionError as error:
        broken = f"{error}"[:500] or "an assertion without words"
    memory = [held[0] for held in run.held]
    files = [held[1] for held in run.held]
    growth = memory[-1] / memory[1] - 1 if len(memory) > 1 else 0.0
    seen: dict[str, object] = {
        "level": "engine, virtual time",
        "requests": options.requests,
        "ended": dict(run.num_ended),
        "steps": run.num_steps,
        "memory_growth_after_the_first_tenth": round(growth, 4),
        "file_growth": files[-1] - files[0],
        "broken": broken,
    }
    number = "0 leaked pages, 0 stuck, memory growth after the first 10 % < 2 %, files growth 0"
    passed = not broken and growth < MAX_GROWTH and files[-1] == files[0]
    return report("R1", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
