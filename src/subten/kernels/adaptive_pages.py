"""What the model of an adaptive cache gets: planes layer by layer, and sums of softmax mass.

Letters: L layers, P page ids (in `mass_SP` pages of one sequence, in order), S sequences of a step
(in a sink plane: rows), G KV heads, H hot and X sink planes, B bytes, N moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from subten.codecs import KVFormat
from subten.kernels.demote import MixedPools
from subten.kernels.mixed_pages import MixedPages
from subten.kernels.step import StepTensors

MASS_UNIT = 2**16
"""Masses are summed over steps as integers of this part: their order then does not matter."""


MASS_LAYERS = 6
"""About so many layers, evenly spread, tell how much softmax mass a page draws."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of an adaptive cache, and where the softmax masses of its pages are added.

    `mass_SP` float32 has a row for each sequence of a step and a column for each of its pages; None
    where nobody wants to know.
    """

    pages: MixedPages
    mass_SP: torch.Tensor | None


class AdaptivePages:
    """What the model gets in place of `pages_LPGB`: the planes, layer by layer.

    `total_P` int64 counts the softmax mass of each page since the start, in MASS_UNIT. A sink plane
    `sink_LXGB` has the first S rows of a sequence in BF16, | K S x 2D bytes | V S x 2D bytes |;
    `sink_P` names that of a page, or -1.
    """

    def __init__(
        self,
        pools: MixedPools,
        sink_LXGB: torch.Tensor,
        num_pages: int,
        mass_shape: tuple[int, int] | None,
    ) -> None:
        device = pools.hot_LHGB.device
        self.pools = pools
        self.sink_LXGB = sink_LXGB
        self.place_P4 = torch.full((num_pages, 4), -1, dtype=torch.int32, device=device)
        self.sink_P = torch.full((num_pages,), -1, dtype=torch.int32, device=device)
        self.total_P = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self._mass_SP = None if mass_shape is None else torch.zeros(mass_shape, device=device)

    def __len__(self) -> int:
        return len(self.pools.hot_LHGB)

    def layers(self, step: StepTensors) -> list[LayerPages]:
        """The layers for one step; its masses start at zero."""
        mass_SP = self._step_mass(step)
        if mass_SP is not None:
            mass_SP.zero_()
        # Launches for masses are the same whatever the layer's size: a few layers tell enough.
        stride = max(1, len(self) // MASS_LAYERS)
        return [
            LayerPages(
                self._layer(index),
                mass_SP if index % stride == stride // 2 else None,
            )
            for index in range(len(self))
        ]

    def count_mass(self, step: StepTensors) -> None:
        """After the layers: add what each page got, whoever else has the page, to its total."""
        mass_SP = self._step_mass(step)
        if mass_SP is None:
            return
        # A NaN has ended its request; the pages may be those of others too.
        units = (mass_SP.nan_to_num(0.0, 0.0, 0.0) * MASS_UNIT).to(torch.int64)
        self.total_P.scatter_add_(0, step.page_table_SP.flatten().long(), units.flatten())

    def copy_sinks(self, hot_sink_N2: torch.Tensor, fmt: KVFormat) -> None:
        """Copy the first rows of hot planes to sink planes, int64 pairs of ids."""
        half = self.sink_LXGB.shape[-1] // 2
        hot_LNGB = self.pools.hot_LHGB[:, hot_sink_N2[:, 0]]
        parts = [hot_LNGB[..., start : start + half] for start in (fmt.k_codes, fmt.v_codes)]
        self.sink_LXGB[:, hot_sink_N2[:, 1]] = torch.cat(parts, dim=-1)

    def _layer(self, index: int) -> MixedPages:
        pages = self.pools.layer(index, self.place_P4)
        if self.sink_LXGB.numel() == 0:
            return pages
        return replace(pages, sink_XGB=self.sink_LXGB[index], sink_P=self.sink_P)

    def _step_mass(self, step: StepTensors) -> torch.Tensor | None:
        num_rows, width = step.page_table_SP.shape
        return None if self._mass_SP is None else self._mass_SP[:num_rows, :width]
