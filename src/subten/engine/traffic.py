"""Bytes that a decode step of a model in memory must read: its packed weights and its cache.

Unlike `bench.plan`, which reckons from a shape, this counts the bytes of the tensors themselves,
codes and scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from subten.cache.pool import PagePool
from subten.models.decoder import Decoder

EXPERT_PARTS = (".ffn.gate_up", ".ffn.down")
"""How the names of parameters begin, after their layer, of which a step reads chosen experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """Bytes of one step; `experts_per_layer` distinct experts were read in a layer, on average."""

    weight_bytes: float
    kv_bytes: float
    experts_per_layer: float

    @property
    def total_bytes(self) -> float:
        """Weights and cache."""
        return self.weight_bytes + self.kv_bytes

    def floor_ms(self, bytes_per_s: float) -> float:
        """Milliseconds at that bandwidth."""
        return self.total_bytes / bytes_per_s * 1e3


def step_traffic(
    model: Decoder,
    pool: PagePool,
    *,
    batch_size: int,
    mean_kv_len: float,
    experts_per_layer: float,
) -> StepTraffic:
    """What a step of `batch_size` tokens reads, each over `mean_kv_len` tokens of cache.

    A dense FFN is read whole.
    """
    return StepTraffic(
        weight_bytes=weight_bytes_of_step(
            model, batch_size=batch_size, experts_per_layer=experts_per_layer
        ),
        kv_bytes=batch_size * mean_kv_len * pool.bytes_per_token,
        experts_per_layer=experts_per_layer,
    )


def weight_bytes_of_step(model: Decoder, *, batch_size: int, experts_per_layer: float) -> float:
    """Bytes of weights that a step of `batch_size` tokens reads.

    Of the experts those that the batch touches, of the embedding a row a token, of everything else
    (attention, router, norms, head) all. A folded router is not the model's: its kernel reads
    more than this counts, so that the floor is that of any way to compute the step.
    """
    total = 0.0
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * parameter.element_size()
        if name.startswith("embedding"):
            if model.config.tie_word_embeddings:
                total += num_bytes  # it is the head as well
            total += batch_size * num_bytes / parameter.shape[0]
        elif model.config.is_moe and any(part in name for part in EXPERT_PARTS):
            total += num_bytes * experts_per_layer / model.config.num_experts
        else:
            total += num_bytes
    return total
