"""Goal R2: half of all requests cut at a random moment; the others do not notice.

    python tools/soak/cancel_storm.py --requests 50000

Pages of a cut request are free before the next step. The same requests are served once more
without any cut, and whoever was not cut has the same tokens in both.
"""

from __future__ import annotations

import heapq
import random
import sys

from records import parse, parser, report
from scripted_run import Faults
from simulator import Client, Shape, Simulation

from subten.core import Request

SHAPE = Shape(
    num_pages=24,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_prefill_tokens=128,
    max_model_len=400,
    max_queue=None,
    enable_prefix_caching=True,
    num_requests=0,
    max_prompt=150,
    max_output=40,
    arrival_rate=4.0,
    cancel_share=0.5,
)


class Storm(Simulation):
    """Cuts half of its clients, each a random number of steps after its arrival."""

    def __init__(self, seed: int, requests: list[Request], *, cut_share: float) -> None:
        super().__init__(seed, shape=SHAPE, faults=Faults(random.Random(0)), requests=requests)
        self.num_cut = 0
        self._cut_share = cut_share
        self._cuts: list[tuple[int, str]] = []

    def add(self, request: Request, cancel_after: int | None = None) -> bool:  # noqa: ARG002
        """Send a request, and decide when it is cut."""
        if self.rng.random() < self._cut_share:
            # As long as a request takes: from the queue to beyond its end.
            cut = self.num_steps + int(self.rng.expovariate(1 / 25))
            heapq.heappush(self._cuts, (cut, request.request_id))
        return super().add(request)

    def cancel_some(self) -> None:
        """Cut whose time has come."""
        while self._cuts and self._cuts[0][0] <= self.num_steps:
            self.cancel(self.clients[heapq.heappop(self._cuts)[1]])

    def cancel(self, client: Client) -> None:
        """Count it, if it was not over."""
        self.num_cut += client.end is None
        super().cancel(client)


def storm(seed: int, num_requests: int) -> tuple[Storm, int]:
    """The storm, and how many of its survivors differ from the calm."""
    drawn = Simulation(seed, shape=SHAPE).draw_requests(num_requests)
    wild = Storm(seed, list(drawn), cut_share=0.5)
    wild.run()
    calm = Storm(seed, list(drawn), cut_share=0.0)
    calm.run()
    num_different = sum(
        client.tokens != calm.clients[name].tokens
        for name, client in wild.clients.items()
        if not client.is_gone
    )
    return wild, num_different


def main() -> int:
    """Run the storm and report."""
    arguments = parser("R2: cancel storm")
    arguments.add_argument("--requests", type=int, default=50_000)
    options = parse(arguments)
    broken = ""
    seen: dict[str, object] = {"requests": options.requests}
    try:
        wild, num_different = storm(options.seed, options.requests)
        seen |= {
            "cut": wild.num_cut,
            "survivors_that_differ": num_different,
            "ended": dict(wild.num_ended),
            "steps": wild.num_steps,
        }
    except AssertionError as error:
        broken = f"{error}"[:500] or "an assertion without words"
        num_different = -1
    seen["broken"] = broken
    number = "50,000 requests, half cut: pages back within 2 steps, survivors the same, 0 leaks"
    return report("R2", number=number, seen=seen, passed=num_different == 0, options=options)


if __name__ == "__main__":
    sys.exit(main())
