"""Make `src/subten/codecs/vq_codebook.py`: the two-stage codebook of the codec vq1.5.

    python tools/make_vq_codebook.py > src/subten/codecs/vq_codebook.py

Additive quantization (Babenko and Lempitsky, 2014) of unit Gaussians: all 4096 sums are searched,
then both stages are solved for together by least squares, on fresh samples in every round. Noise on
the codewords, which fades, keeps them from settling early. Minutes on one core; the last digits
depend on the order in which a matrix product sums.

Letters: N vectors, C codewords of both stages (256, then 16).
"""

from __future__ import annotations

import sys

import torch

from subten.codecs.vq import FIRST, SECOND, STEPS, VECTOR, nearest_pair

TITLE = '''"""The codebook of vq1.5, made by `tools/make_vq_codebook.py` from unit Gaussians."""

ROWS = bytes.fromhex(
    """
%s
    """
)
"""Codewords as rows of 8 int8 in steps of 1/32: 256 of the first stage, then 16 of the second."""
'''


def train(num_vectors: int, rounds: int, noise: float, generator: torch.Generator) -> torch.Tensor:
    """Codewords [C, 8] in float32, in units of the Gaussian's deviation."""
    rows_C8 = torch.randn(FIRST + SECOND, VECTOR, generator=generator)
    rows_C8[FIRST:] *= 0.4
    for done in range(rounds):
        x_N8 = torch.randn(num_vectors, VECTOR, generator=generator)
        first_N, second_N = nearest_pair(x_N8, rows_C8)
        rows_C8 = solve(x_N8, first_N, second_N)
        left = 1 - done / (0.7 * rounds)
        if left > 0:
            rows_C8 += noise * left * torch.randn(rows_C8.shape, generator=generator)
        sys.stderr.write(f"round {done + 1} of {rounds}\n")
    return rows_C8


def solve(x_N8: torch.Tensor, first_N: torch.Tensor, second_N: torch.Tensor) -> torch.Tensor:
    """The codewords of least squared error for given choices, the second stage of mean zero."""
    num_rows = FIRST + SECOND
    counts = torch.bincount(first_N * SECOND + second_N, minlength=FIRST * SECOND)
    counts = counts.view(FIRST, SECOND).float()
    normal_CC = torch.zeros(num_rows, num_rows)
    normal_CC[:FIRST, :FIRST] = counts.sum(1).diag()
    normal_CC[FIRST:, FIRST:] = counts.sum(0).diag()
    normal_CC[:FIRST, FIRST:] = counts
    normal_CC[FIRST:, :FIRST] = counts.t()
    # A constant may move from one stage to the other: a little weight on the size decides.
    normal_CC += 1e-2 * torch.eye(num_rows)
    sums_C8 = torch.zeros(num_rows, VECTOR)
    sums_C8.index_add_(0, first_N, x_N8).index_add_(0, second_N + FIRST, x_N8)
    rows_C8 = torch.linalg.solve(normal_CC, sums_C8)
    middle_8 = rows_C8[FIRST:].mean(0)
    return torch.cat([rows_C8[:FIRST] + middle_8, rows_C8[FIRST:] - middle_8])


def render(rows_C8: torch.Tensor) -> str:
    """The module's text; rounds to steps of 1 / STEPS."""
    steps_C8 = (rows_C8 * STEPS).round().clamp(-127, 127).to(torch.int8)
    digits = steps_C8.contiguous().view(torch.uint8).numpy().tobytes().hex()
    lines = [digits[i : i + 96] for i in range(0, len(digits), 96)]
    return TITLE % "\n".join(lines)


def main() -> None:
    """Print the module."""
    generator = torch.Generator().manual_seed(15)
    sys.stdout.write(render(train(65536, 60, 0.1, generator)))


if __name__ == "__main__":
    main()
