"""A kernel with a fault for compute-sanitizer to find: what finds nothing here proves nothing.

compute-sanitizer --tool racecheck python tools/planted_fault.py racecheck
"""

from __future__ import annotations

import sys
from unittest import mock

import torch

from subten.kernels.cuda import runtime

NUM_THREADS = 64
NAME, FILE = "planted_fault", "planted_fault.cu"
BODIES = {
    # One integer past the end of x.
    "memcheck": "x[threadIdx.x + 1] = 1;",
    # A neighbour's value, which nobody waited for.
    "racecheck": "shared[threadIdx.x] = x[threadIdx.x];"
    " x[threadIdx.x] = shared[(threadIdx.x + 32) % blockDim.x];",
    # A barrier that half a warp stays away from.
    "synccheck": "if (threadIdx.x < 16) __syncthreads(); x[threadIdx.x] = 1;",
    # Numbers that nobody wrote.
    "initcheck": "x[threadIdx.x] += 1;",
}
"""What the kernel does, by the tool that has to see it."""


def sources(tool: str) -> dict[str, str]:
    """The kernel's file, in place of the package's."""
    head = f"__shared__ int shared[{NUM_THREADS}];" if "shared" in BODIES[tool] else ""
    return {FILE: f"__global__ void {NAME}(int* x) {{ {head} {BODIES[tool]} }}\n"}


def main() -> int:
    """Launch it once."""
    (tool,) = sys.argv[1:]
    device = torch.device("cuda", 0)
    x = torch.empty(NUM_THREADS, dtype=torch.int32, device=device)
    with mock.patch.object(runtime, "source_files", return_value=sources(tool)):
        runtime.launch(FILE, NAME, (1,), NUM_THREADS, [x], device=device)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
