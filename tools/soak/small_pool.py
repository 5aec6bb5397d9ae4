"""Goal R8: a page pool of a tenth of what its sequences want; all is served, nothing is lost.

    python tools/soak/small_pool.py --requests 10000

The demand is that of all sequences that may run together, each at its full length.
"""

from __future__ import annotations

import random
import sys

from records import parse, parser, report
from scripted_run import Faults
from simulator import Shape, Simulation

from subten.core import PAGE_SIZE

MAX_PREEMPTIONS = 8
NUM_SEQS, MAX_PROMPT, MAX_OUTPUT = 32, 60, 250
PAGES_OF_ONE = -(-(MAX_PROMPT + MAX_OUTPUT) // PAGE_SIZE)

SHAPE = Shape(
    num_pages=NUM_SEQS * PAGES_OF_ONE // 10,
    max_num_seqs=NUM_SEQS,
    max_num_batched_tokens=256,
    max_prefill_tokens=None,
    max_model_len=MAX_PROMPT + MAX_OUTPUT,
    max_queue=None,
    enable_prefix_caching=True,
    num_requests=0,
    max_prompt=MAX_PROMPT,
    max_output=MAX_OUTPUT,
    arrival_rate=9.0,
    cancel_share=0.0,
)


def serve(seed: int, num_requests: int) -> Simulation:
    """All requests through the small pool; tokens are compared with the model's own."""
    requests = Simulation(seed, shape=SHAPE).draw_requests(num_requests)
    simulation = Simulation(seed, shape=SHAPE, faults=Faults(random.Random(0)), requests=requests)
    simulation.run()
    return simulation


def main() -> int:
    """Serve and report."""
    arguments = parser("R8: pool at a tenth of the demand")
    arguments.add_argument("--requests", type=int, default=10_000)
    options = parse(arguments)
    seen: dict[str, object] = {"requests": options.requests, "pages": SHAPE.num_pages}
    try:
        simulation = serve(options.seed, options.requests)
    except AssertionError as error:
        seen["broken"] = f"{error}"[:500] or "an assertion without words"
        passed = False
    else:
        counts = [c.record.sequence.num_preemptions for c in simulation.clients.values()]
        finished = simulation.num_ended["stop"] + simulation.num_ended["length"]
        seen |= {
            "finished": finished - 1,
            "steps": simulation.num_steps,
            "idle_steps": simulation.num_idle,
            "preemptions": sum(counts),
            "most_preemptions_of_one": max(counts),
        }
        is_complete = finished == len(simulation.clients)
        passed = is_complete and max(counts) <= MAX_PREEMPTIONS and simulation.num_idle == 0
    number = (
        "pool at 10 % of demand: 10,000 requests all finish, no step without progress, at most 8 "
        "preemptions a request, output equal to an ample pool"
    )
    return report("R8", number=number, seen=seen, passed=passed, options=options)


if __name__ == "__main__":
    sys.exit(main())
