"""One step over an adaptive cache: the layers that the model runs through, and who failed.

Letters: L layers, T tokens of the step, S sequences, R rows of logits, V vocabulary, N rows of
recent keys and values, G KV heads, E 2D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from subten.kernels.adaptive_pages import AdaptivePages, LayerPages
from subten.kernels.mixed_pages import Window
from subten.kernels.step import StepTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """Recent rows of a step that computes several tokens of a sequence.

    A ring has no room for rows that queries of the step still want and for those that it brings.
    So all layers share one buffer `rows_NGE`: rows `in_ring` of a layer's ring are copied to its
    rows `in_row`, and when the layer is done its rows `out_row` to rows `out_ring`; int64 [N].
    """

    rows_NGE: torch.Tensor
    in_ring: torch.Tensor
    in_row: torch.Tensor
    out_row: torch.Tensor
    out_ring: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveStep:
    """What the model of an adaptive cache gets in place of pages; `window` is for the ring itself
    where there is no `staging`, else for the buffer."""

    pages: AdaptivePages
    window: Window
    staging: Staging | None = None

    def layers(self, step: StepTensors, bad_T: torch.Tensor) -> Iterator[LayerPages]:
        """The layers in order; what a layer leaves in the buffer is kept once the next is wanted,
        so run it to its end. Tokens that cannot be stored become 1 in `bad_T` int32."""
        for index, layer in enumerate(self.pages.layers(step, self.window, bad_T)):
            staging, ring_NGE = self.staging, self.pages.ring_LNGE[index]
            if staging is None:
                yield layer
                continue
            rows_NGE = staging.rows_NGE
            rows_NGE.index_copy_(0, staging.in_row, ring_NGE.index_select(0, staging.in_ring))
            yield replace(layer, pages=replace(layer.pages, recent_NGE=rows_NGE))
            ring_NGE.index_copy_(0, staging.out_ring, rows_NGE.index_select(0, staging.out_row))
        self.pages.count_mass(step)


def fail_bad(
    logits_RV: torch.Tensor, bad_T: torch.Tensor, step: StepTensors, row_R: torch.Tensor
) -> torch.Tensor:
    """Logits of tokens `row_R`, NaN where any token of their sequence is bad."""
    num_bad_T1 = torch.nn.functional.pad(bad_T.cumsum(0), (1, 0))
    start_S1 = step.query_start_S1.long()
    is_bad_S = num_bad_T1[start_S1[1:]] > num_bad_T1[start_S1[:-1]]
    seq_R = torch.searchsorted(start_S1[1:], row_R, right=True).clamp(max=len(is_bad_S) - 1)
    return logits_RV.masked_fill(is_bad_S[seq_R, None], torch.nan)
