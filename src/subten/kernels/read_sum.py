"""Reading memory and nothing else: the kernel that measures the roof.

Letters: N words of 4 bytes, P programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.kernels.triton_shim import tl, triton_jit


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLaunch:
    """A program reads `num_iterations` blocks of `block` words, one after the other."""

    block: int
    num_iterations: int
    num_warps: int

    @property
    def num_words(self) -> int:
        """Words of one program."""
        return self.block * self.num_iterations

    def __str__(self) -> str:
        return f"{self.num_iterations} x {4 * self.block} bytes by {self.num_warps} warps"


MAX_PROGRAM_WORDS = 32768
READ_LAUNCHES = tuple(
    ReadLaunch(block=block, num_iterations=num_iterations, num_warps=num_warps)
    for block, num_warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (16384, 16))
    for num_iterations in (1, 2, 8)
    if block * num_iterations <= MAX_PROGRAM_WORDS
)
"""8 to 64 KB a block, 4 or 8 loads of 16 bytes a thread: all of one iteration are in flight."""


def read_sum(words_N: torch.Tensor, launch: ReadLaunch) -> torch.Tensor:
    """Sum of int32 words modulo 2**32, a partial sum a program: int32 [P]; one launch.

    N must be a multiple of `launch.num_words`.
    """
    assert words_N.dtype == torch.int32 and words_N.is_contiguous(), words_N.dtype
    num_programs, rest = divmod(words_N.numel(), launch.num_words)
    assert rest == 0, (words_N.numel(), launch.num_words)
    sum_P = torch.empty(num_programs, dtype=torch.int32, device=words_N.device)
    _read_kernel[(num_programs,)](
        words_N,
        sum_P,
        NUM_ITERATIONS=launch.num_iterations,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return sum_P


# sum_p = sum of the words of program p, modulo 2**32. Words lie as they came: program p owns
# [p * NUM_ITERATIONS * BLOCK, (p + 1) * NUM_ITERATIONS * BLOCK). A block is a multiple of 4 words
# a thread, so every load is 16 bytes wide (ld.global.v4 in the PTX of Triton 3.6). Reads 4 * N
# bytes, writes 4 * P.
@triton_jit
def _read_kernel(
    WORDS: tl.tensor, SUMS: tl.tensor, NUM_ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    pid = tl.program_id(0).to(tl.int64)
    first = pid * NUM_ITERATIONS * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in tl.static_range(NUM_ITERATIONS):
        offset = first + i * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(WORDS + offset, eviction_policy="evict_first")
    tl.store(SUMS + pid, tl.sum(total, axis=0))
