"""What the model of an adaptive cache gets: planes layer by layer, exact rows, sums of mass.

Letters: L layers, P page ids (in `mass_SP` pages of one sequence, in order), S sequences of a step,
T its tokens, G KV heads, D head_dim, E 2D, O outlier channels; X base and sink, Y fine and Z cold
planes, N exact rows, B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from subten.kernels.demote import ValuePools
from subten.kernels.mixed_pages import MixedPages, Window
from subten.kernels.step import StepTensors

MASS_UNIT = 2**16
"""Masses are summed over steps as integers of this part: their order then does not matter."""


MASS_LAYERS = 6
"""About so many layers, evenly spread, tell how much softmax mass a page draws."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of an adaptive cache in one step.

    `mass_SP` float32 has a row for each sequence of the step and a column for each of its pages,
    to which softmax masses are added; None where nobody wants to know. In `bad_T` int32 the tokens
    whose rows cannot be stored become 1.
    """

    pages: MixedPages
    window: Window
    mass_SP: torch.Tensor | None
    bad_T: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPool:
    """Keys of one layer: `k_PGB` uint8 at `bits` a channel, and its outliers, if there are any."""

    bits: int
    k_PGB: torch.Tensor
    k_out_PGB: torch.Tensor | None = None
    outlier_GO: torch.Tensor | None = None


class AdaptivePages:
    """What the model gets in place of `pages_LPGB`: the planes, layer by layer.

    `ring_LNGE` bf16 has the recent rows of all sequences and `sink_LXGB` uint8 the first ones, both
    as `MixedPages` says; `place_P3` and `sink_P` tell where a page lies. `total_P` int64 counts the
    softmax mass of each page since the start, in MASS_UNIT.
    """

    def __init__(
        self,
        *,
        keys: Sequence[KeyPool],
        values: ValuePools,
        ring_LNGE: torch.Tensor,
        sink_LXGB: torch.Tensor,
        mass_shape: tuple[int, int] | None,
    ) -> None:
        device, num_pages = ring_LNGE.device, len(keys[0].k_PGB)
        assert len(keys) == len(ring_LNGE) == len(values.vbase_LXGB), (len(keys), ring_LNGE.shape)
        self.keys = tuple(keys)
        self.values = values
        self.ring_LNGE = ring_LNGE
        self.sink_LXGB = sink_LXGB
        self.place_P3 = torch.full((num_pages, 3), -1, dtype=torch.int32, device=device)
        self.sink_P = torch.full((num_pages,), -1, dtype=torch.int32, device=device)
        self.total_P = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self._mass_SP = None if mass_shape is None else torch.zeros(mass_shape, device=device)

    def __len__(self) -> int:
        return len(self.keys)

    def layers(
        self, step: StepTensors, window: Window, bad_T: torch.Tensor | None = None
    ) -> list[LayerPages]:
        """The layers for one step, recent rows in the ring; its masses start at zero."""
        mass_SP = self._step_mass(step)
        if mass_SP is not None:
            mass_SP.zero_()
        # Launches for masses are the same whatever the layer's size: a few layers tell enough.
        stride = max(1, len(self) // MASS_LAYERS)
        return [
            LayerPages(
                self._layer(index),
                window,
                mass_SP if index % stride == stride // 2 else None,
                bad_T,
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

    def _layer(self, index: int) -> MixedPages:
        keys, has_sinks = self.keys[index], self.sink_LXGB.numel() > 0
        return MixedPages(
            k_PGB=keys.k_PGB,
            k_bits=keys.bits,
            vbase_XGB=self.values.vbase_LXGB[index],
            vfine_YGB=self.values.vfine_LYGB[index],
            vcold_ZGB=self.values.vcold_LZGB[index],
            place_P3=self.place_P3,
            recent_NGE=self.ring_LNGE[index],
            sink_XGB=self.sink_LXGB[index] if has_sinks else None,
            sink_P=self.sink_P if has_sinks else None,
            k_out_PGB=keys.k_out_PGB,
            outlier_GO=keys.outlier_GO,
        )

    def _step_mass(self, step: StepTensors) -> torch.Tensor | None:
        num_rows, width = step.page_table_SP.shape
        return None if self._mass_SP is None else self._mass_SP[:num_rows, :width]
