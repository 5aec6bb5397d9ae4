"""Packed weights that are unpacked on a second stream while other work leaves the memory idle.

Letters: T tokens, N output features, K inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from subten.kernels.attend_tiles import num_sms
from subten.kernels.linear import unpack_rows
from subten.kernels.weight_formats import Weight, chunk_rows

SIDE_TOKENS = 64
"""Tokens from which every backend unpacks a weight whole."""

SIDE_ROWS = 32
"""Rows of a tile of what is unpacked beside other work."""

SIDE_PROGRAMS = 2
"""Programs of that a multiprocessor: the router's have room beside so many, and come first
(benchmarks/plans/h200-prompt-beside.json)."""


class Beside:
    """Weights that are unpacked while other work runs, each for one `linear` of many tokens."""

    def __init__(self, weights: list[Weight]) -> None:
        self._weights = weights
        self._values: dict[int, torch.Tensor] = {}

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """Unpack them beside the launches within; those after it come after what was started.

        Also after an error: a capture cannot be ended while another stream is a part of it.
        """
        device = self._weights[0].codes.device
        side, main = _side_stream(device), torch.cuda.current_stream(device)
        # Memory of the stream that will read it: what has used it before has ended where `side`
        # begins.
        self._values = {
            id(weight): torch.empty(weight.shape, dtype=weight.dtype, device=device)
            for weight in self._weights
        }
        programs = SIDE_PROGRAMS * num_sms(device)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                for weight in self._weights:
                    w_NK = self._values[id(weight)]
                    rows = slice(0, len(w_NK))
                    unpack_rows(weight, rows, w_NK, block_r=SIDE_ROWS, most_programs=programs)
            yield
        finally:
            main.wait_stream(side)

    def take(self, weight: Weight) -> Weight:
        """A weight in the dtype of its layer, once; itself where it is not unpacked."""
        values = self._values.pop(id(weight), None)
        return weight if values is None else Weight.of(values)


def add_product(residual_TN: torch.Tensor, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """residual + x @ w.T, in the residual's own memory; it is float32, the others bfloat16.

    The bits of `linear`, less a launch that reads and writes all of it.
    """
    return torch.addmm(residual_TN, x_TK, w_NK.T, out_dtype=torch.float32, out=residual_TN)


def unpack_beside(weights: Iterable[Weight], num_tokens: int) -> Beside | None:
    """Those of `weights` that `linear` of so many tokens would unpack whole, none of them started.

    Within a graph capture alone, where it costs no host's time; None where there are none.
    """
    if num_tokens < SIDE_TOKENS:
        return None
    packed = [
        weight
        for weight in weights
        if weight.scale is not None
        and weight.codes.device.type == "cuda"
        and chunk_rows(weight.in_features, weight.codes.device) >= weight.shape[0]
    ]
    if not packed:
        return None
    _side_stream(packed[0].codes.device)  # made before there is a capture
    return Beside(packed) if torch.cuda.is_current_stream_capturing() else None


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
