"""Bytes that a token costs: what a decode step reads, the time floor, and whether it all fits.

The rule: at small batch a step takes at least (weights read + KV cache read) / bandwidth.

    KV bytes a token = layers * kv_heads * page bytes / 64      (K and V, scales, padding)
    KV read a step   = batch * context * KV bytes a token
    weights a step   = attention + router + head + FFN of the experts that the batch touches
    experts touched  = E * (1 - (1 - k / E) ** batch)           (uniform independent routing)

`num_kv_heads`, not query heads, and bytes, not elements: a GQA model caches far less than
2 * batch * layers * heads * head_dim * context suggests, and a 4-bit cache is not 4 bits exactly.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from subten.config import ModelConfig
from subten.core import PAGE_SIZE, ConfigError, refuse
from subten.kernels.weight_formats import check_format, packed_bytes

H200_BANDWIDTH_TBPS = 4.56
"""Read-only bandwidth of one H200, measured (the roof, not a data-sheet number), in 1e12 B/s."""

H200_MEMORY_BYTES = 141 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Bytes of one layer's weights by what decides how often they are read."""

    attention: float
    router: float
    expert: float
    num_experts: int
    norms: float


def layer_bytes(config: ModelConfig, quantization: str = "none") -> LayerBytes:
    """Bytes of one layer, scales included; a dense FFN counts as one expert that is always read.

    Matrices are packed, routers float32, norms and biases 2 bytes a number.
    """
    d, ffn = config.d_model, config.d_ffn
    query = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = packed_bytes(quantization, query + 2 * keys, d, name="qkv")
    attention += packed_bytes(quantization, d, query, name="attention output")
    if config.has_qkv_bias:
        attention += 2 * (query + 2 * keys + d)
    expert = packed_bytes(quantization, 2 * ffn, d, name="gate_up")
    return LayerBytes(
        attention=attention,
        router=4 * config.num_experts * d,
        expert=expert + packed_bytes(quantization, d, ffn, name="down"),
        num_experts=max(config.num_experts, 1),
        norms=2 * (2 * d + (2 * config.head_dim if config.has_qk_norm else 0)),
    )


def head_bytes(config: ModelConfig, quantization: str = "none") -> float:
    """Bytes of the head; one that is the embedding is never quantised."""
    kept = "none" if config.tie_word_embeddings else quantization
    return packed_bytes(kept, config.vocab_size, config.d_model, name="head")


def experts_touched(num_experts: int, top_k: int, batch_size: int) -> float:
    """Expected distinct experts of one layer that `batch_size` tokens choose.

    Routing is taken as uniform and independent between tokens; real routers touch fewer. A dense
    FFN (`num_experts` 0) is one expert, always read.
    """
    if num_experts == 0:
        return 1.0
    return float(num_experts * (1.0 - (1.0 - top_k / num_experts) ** batch_size))


def weight_bytes_read(config: ModelConfig, batch_size: int, quantization: str = "none") -> float:
    """Expected bytes of weights that one decode step reads; of the embedding, one row a token."""
    layer = layer_bytes(config, quantization)
    touched = experts_touched(config.num_experts, config.top_k, batch_size)
    each = layer.attention + layer.router + layer.norms + touched * layer.expert
    rows = 2 * config.d_model * (1 + batch_size)  # the last norm, and of the embedding
    return config.num_layers * each + rows + head_bytes(config, quantization)


def weight_bytes_held(config: ModelConfig, quantization: str = "none") -> float:
    """Bytes of all weights in memory: every expert, the embedding (16 bits) and the head.

    Routers that a backend folds (151 MB of qwen3-30b-a3b) are not in it.
    """
    layer = layer_bytes(config, quantization)
    each = layer.attention + layer.router + layer.norms + layer.num_experts * layer.expert
    embedding = 2 * config.d_model * config.vocab_size
    head = 0.0 if config.tie_word_embeddings else head_bytes(config, quantization)
    return config.num_layers * each + 2 * config.d_model + embedding + head


def kv_bytes_per_token(config: ModelConfig, bits_per_value: float) -> float:
    """Bytes that one cached token takes over all layers, K and V, at `bits_per_value` true bits."""
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return values * bits_per_value / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one decode step of `batch_size` tokens at `context_len` costs. Bytes, ms, 1e12 B/s."""

    kv_cache_dtype: str
    kv_true_bits: float
    quantization: str
    context_len: int
    batch_size: int
    experts_per_layer: float
    weight_bytes_per_step: float
    kv_bytes_per_token: float
    kv_bytes_per_context: float
    kv_bytes_per_step: float
    bytes_per_token: float
    bandwidth_tbps: float
    floor_ms: float
    weight_bytes: float
    kv_bytes: float
    memory_bytes: float
    usable_bytes: float
    is_fitting: bool

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is asked of the machine, and what the machine has."""

    context_len: int
    batch_size: int = 1
    quantization: str = "none"
    bandwidth_tbps: float = H200_BANDWIDTH_TBPS
    memory_bytes: float = H200_MEMORY_BYTES
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("context_len", "batch_size"):
            if getattr(self, name) < 1:
                raise refuse(ConfigError, name, getattr(self, name), "an integer of at least 1")
        for name in ("bandwidth_tbps", "memory_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise refuse(ConfigError, name, value, "a finite number above 0")
        check_format(self.quantization)


def make_plan(
    config: ModelConfig, workload: Workload, *, kv_cache_dtype: str, kv_true_bits: float
) -> Plan:
    """Work out `workload` for `config` with a cache of `kv_true_bits` bits a value.

    The floor counts reads alone: writing one token's K and V is one context-th of the reading.
    Memory counts weights and whole pages of cache, not activations; it fits when both stay
    within `gpu_memory_utilization` of the memory.
    """
    batch, context = workload.batch_size, workload.context_len
    weights = weight_bytes_read(config, batch, workload.quantization)
    per_token = kv_bytes_per_token(config, kv_true_bits)
    kv_step = batch * context * per_token
    pages = math.ceil(context / PAGE_SIZE)
    held = weight_bytes_held(config, workload.quantization)
    kv_held = batch * pages * PAGE_SIZE * per_token
    usable = workload.memory_bytes * workload.gpu_memory_utilization
    return Plan(
        kv_cache_dtype=kv_cache_dtype,
        kv_true_bits=kv_true_bits,
        quantization=workload.quantization,
        context_len=context,
        batch_size=batch,
        experts_per_layer=experts_touched(config.num_experts, config.top_k, batch),
        weight_bytes_per_step=weights,
        kv_bytes_per_token=per_token,
        kv_bytes_per_context=context * per_token,
        kv_bytes_per_step=kv_step,
        bytes_per_token=(weights + kv_step) / batch,
        bandwidth_tbps=workload.bandwidth_tbps,
        floor_ms=(weights + kv_step) / (workload.bandwidth_tbps * 1e12) * 1e3,
        weight_bytes=held,
        kv_bytes=kv_held,
        memory_bytes=workload.memory_bytes,
        usable_bytes=usable,
        is_fitting=held + kv_held <= usable,
    )
