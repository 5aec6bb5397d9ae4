"""Where a model's router sends tokens: counts of a step now and then, read behind the device.

Letters: L routed layers, T tokens of a step, K experts a token, E experts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from subten.engine.graph_inputs import Event
from subten.layers.moe import MoE

SAMPLE_S = 0.25
"""Seconds between two steps that are counted: five small launches in hundreds of milliseconds."""

NUM_SAMPLES = 40
"""Counts are of the last so many sampled steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSummary:
    """How evenly experts are used; a load of 1 is an even share.

    `by_rank` is the load of a layer's most used expert, of its second and so on, averaged over
    layers. `max_violation` is the largest load minus 1 (MaxVio, Wang et al. 2024), averaged over
    layers, and `worst_violation` that of the worst layer. `experts_a_step` are the distinct experts
    of a layer that a step touched, on average.
    """

    by_rank: tuple[float, ...]
    max_violation: float
    worst_violation: float
    experts_a_step: float


class ExpertLoad:
    """Samples the routing of steps that were run anyway; no step waits for it.

    A model's MoE layers keep what they routed last. In a captured graph those tensors stay where
    they are, so whoever captures keeps `routed()` of the capture and passes it to `take` after a
    replay.
    """

    def __init__(self, layers: list[MoE], *, clock: Callable[[], float] = time.monotonic) -> None:
        assert layers
        self._layers = layers
        self._num_experts = layers[0].gate_ED.shape[0]
        self._clock = clock
        self._due_s = 0.0
        self._flight: tuple[torch.Tensor, Event] | None = None
        self._samples: deque[torch.Tensor] = deque(maxlen=NUM_SAMPLES)

    @classmethod
    def of(cls, model: object) -> ExpertLoad | None:
        """For a model with routed layers; None for any other."""
        if not isinstance(model, nn.Module):
            return None
        layers = [part for part in model.modules() if isinstance(part, MoE)]
        return cls(layers) if layers else None

    def routed(self) -> list[torch.Tensor]:
        """topk_id_TK of each layer in the forward pass that ran, or was captured, last."""
        return [layer.topk_id_TK for layer in self._layers if layer.topk_id_TK is not None]

    @property
    def is_due(self) -> bool:
        """Whether the next step should be counted."""
        return self._clock() >= self._due_s

    def take(self, topk_id_LTK: list[torch.Tensor], num_tokens: int) -> None:
        """Queue the count of a step's first `num_tokens` rows; the others are padding."""
        self._due_s = self._clock() + SAMPLE_S
        self._collect()
        if self._flight is not None or num_tokens == 0:
            return
        id_LA = torch.stack([id_TK[:num_tokens].flatten() for id_TK in topk_id_LTK]).long()
        count_LE = id_LA.new_zeros(len(id_LA), self._num_experts)
        count_LE.scatter_add_(1, id_LA, torch.ones_like(id_LA))
        is_cuda = count_LE.device.type == "cuda"
        host_LE = torch.empty(count_LE.shape, dtype=count_LE.dtype, pin_memory=is_cuda)
        host_LE.copy_(count_LE, non_blocking=True)
        done = Event(count_LE.device)
        done.record()
        self._flight = host_LE, done

    def summary(self) -> LoadSummary | None:
        """Of the last samples; None before the first."""
        self._collect()
        if not self._samples:
            return None
        count_SLE = torch.stack(list(self._samples)).double()
        count_LE = count_SLE.sum(0)
        load_LE = count_LE / count_LE.mean(1, keepdim=True)
        by_rank_E = load_LE.sort(1, descending=True).values.mean(0)
        violation_L = load_LE.max(1).values - 1
        return LoadSummary(
            by_rank=tuple(by_rank_E.tolist()),
            max_violation=float(violation_L.mean()),
            worst_violation=float(violation_L.max()),
            experts_a_step=float((count_SLE[-1] > 0).sum(1).double().mean()),
        )

    def _collect(self) -> None:
        """Keep the count under way, if the device is done with it."""
        if self._flight is not None and self._flight[1].is_done:
            self._samples.append(self._flight[0])
            self._flight = None
