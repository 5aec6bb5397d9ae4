"""What "auto" and None in an EngineConfig mean on this machine; decided once, one log line each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from subten.cache.pool import bytes_per_page
from subten.codecs import KVFormat
from subten.codecs.adaptive import AdaptiveFormat
from subten.config import EngineConfig, ModelConfig
from subten.core import PAGE_SIZE, ConfigError, refuse
from subten.device import Device, detect, free_memory_bytes
from subten.engine.resolve_adaptive import AdaptiveLimits, resolve_adaptive
from subten.weights.load import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Size of the page pool, and the tokens that one sequence may reach.

    `adaptive` is there for an adaptive cache alone.
    """

    num_pages: int
    max_model_len: int
    max_num_seqs: int
    adaptive: AdaptiveLimits | None = None


def resolve_device(config: EngineConfig) -> Device:
    """The device; ConfigError for one that is not there, or for limits that contradict."""
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise refuse(
            ConfigError,
            "max_num_batched_tokens",
            config.max_num_batched_tokens,
            f"at least max_num_seqs ({config.max_num_seqs}), one token a step for each sequence",
        )
    device = detect(config.device)
    logger.info("device: %s -> %s (%s)", config.device, device.torch_device, device.name)
    return device


def check_loaded(config: EngineConfig, loaded: LoadedModel) -> None:
    """Log what dtype and backend became; ConfigError where the model was loaded for another."""
    backends = loaded.model.ops.backend
    logger.info("dtype: %s -> %s", config.dtype, loaded.dtype)
    served = ", ".join(f"{op} {backend}" for op, backend in backends.items())
    logger.info("backend: %s -> %s", config.backend, served)
    settings = [
        ("kv_cache_dtype", config.kv_cache_dtype, loaded.model.fmt.codec.name),
        ("device", config.device, str(loaded.model.device)),
        ("dtype", config.dtype, str(loaded.dtype).removeprefix("torch.")),
        ("quantization", config.quantization, loaded.quantization),
        ("kv_key_bias", config.kv_key_bias, loaded.kv_key_bias),
        *(("backend", config.backend, backend) for backend in backends.values()),
    ]
    for name, asked, got in settings:
        if asked not in ("auto", got) and f"{asked}:0" != got:
            raise refuse(ConfigError, name, asked, f"{got}, for which the model was loaded")


def resolve_limits(
    config: EngineConfig,
    model: ModelConfig,
    fmt: KVFormat,
    device: Device,
    *,
    sensitivity: Sequence[float] | None = None,
) -> Limits:
    """Pages and context length; call it with the weights in memory.

    The context length never exceeds the pool: one that was asked for is refused with ConfigError,
    the model's own is lowered with a warning. `sensitivity` is that of an adaptive cache's layers.
    """
    max_model_len = config.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise refuse(
            ConfigError,
            "max_model_len",
            max_model_len,
            f"1 to {model.max_model_len}, the model's own context",
        )
    if isinstance(fmt, AdaptiveFormat):
        return _adaptive_limits(config, model, fmt, device, sensitivity)
    num_pages = config.num_pages
    if num_pages is None:
        num_pages = _affordable_pages(config, model, fmt, device)
        # More pages than all sequences at full length would never be used.
        num_pages = min(num_pages, config.max_num_seqs * -(-max_model_len // PAGE_SIZE))
    page_bytes = bytes_per_page(model.num_layers, model.num_kv_heads, fmt)
    logger.info(
        "num_pages: %s -> %d (%d tokens, %.1f MiB in %s)",
        "auto" if config.num_pages is None else config.num_pages,
        num_pages,
        num_pages * PAGE_SIZE,
        num_pages * page_bytes / 2**20,
        fmt.codec.name,
    )
    capacity = num_pages * PAGE_SIZE
    if max_model_len > capacity:
        held = f"all that {num_pages} pages hold"
        if config.max_model_len is not None:
            raise refuse(ConfigError, "max_model_len", max_model_len, f"1 to {capacity}, {held}")
        logger.warning("max_model_len: %d lowered to %d, %s", max_model_len, capacity, held)
        max_model_len = capacity
    return Limits(
        num_pages=num_pages, max_model_len=max_model_len, max_num_seqs=config.max_num_seqs
    )


def max_step_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Upper estimate of what one step allocates besides pages, in bytes.

    A token: residual, normed input and their FP32 copies (8 d_model), q, k, v and the attention
    output, gate, up and their product for each chosen expert. A sequence: four FP32 rows of logits
    (raw, penalised, filtered, sorted). FP32 throughout, which is twice what bfloat16 takes.
    """
    num_ffn = max(model.top_k, 1) * 3 * model.d_ffn
    num_attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    token_bytes = 4 * (8 * model.d_model + num_attention + num_ffn)
    logits_bytes = 4 * 4 * model.vocab_size
    return config.max_num_batched_tokens * token_bytes + config.max_num_seqs * logits_bytes


def _adaptive_limits(
    config: EngineConfig,
    model: ModelConfig,
    fmt: AdaptiveFormat,
    device: Device,
    sensitivity: Sequence[float] | None,
) -> Limits:
    memory, asked = None, config.kv_memory_bytes
    if config.num_pages is None or asked is not None:
        mixed = fmt.mixed
        page_bytes = model.num_layers * model.num_kv_heads * (mixed.k_bytes(2) + mixed.base_bytes)
        memory = _affordable_bytes(config, model, page_bytes, device)
    if asked is not None:
        assert memory is not None
        # On a CPU `cpu_kv_cache_bytes` is a default, not what the machine has.
        if device.kind != "cpu" and asked > memory[1]:
            allowed = f"at most {memory[1]}, the {memory[0]}"
            raise refuse(ConfigError, "kv_memory_bytes", asked, allowed)
        memory = ("kv_memory_bytes", asked)
    found = resolve_adaptive(config, model, fmt, memory=memory, sensitivity=sensitivity)
    return Limits(
        num_pages=found.plan.num_pages,
        max_model_len=found.max_model_len,
        max_num_seqs=found.plan.max_num_seqs,
        adaptive=found,
    )


def _affordable_pages(
    config: EngineConfig, model: ModelConfig, fmt: KVFormat, device: Device
) -> int:
    page_bytes = bytes_per_page(model.num_layers, model.num_kv_heads, fmt)
    return _affordable_bytes(config, model, page_bytes, device)[1] // page_bytes


def _affordable_bytes(
    config: EngineConfig, model: ModelConfig, page_bytes: int, device: Device
) -> tuple[str, int]:
    """What limits the cache, in words, and the bytes it leaves; refused below one page."""
    if device.kind == "cpu":
        if config.cpu_kv_cache_bytes < page_bytes:
            raise refuse(
                ConfigError,
                "cpu_kv_cache_bytes",
                config.cpu_kv_cache_bytes,
                f"at least {page_bytes}, one page of {PAGE_SIZE} tokens",
            )
        return "cpu_kv_cache_bytes", config.cpu_kv_cache_bytes
    total_bytes = device.memory_bytes
    used_bytes = total_bytes - free_memory_bytes(device.torch_device)
    step_bytes = max_step_bytes(config, model)
    budget_bytes = int(config.gpu_memory_utilization * total_bytes) - used_bytes - step_bytes
    if budget_bytes < page_bytes:
        raise refuse(
            ConfigError,
            "gpu_memory_utilization",
            config.gpu_memory_utilization,
            f"more: {used_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are taken, a step "
            f"needs {step_bytes / 2**30:.1f} and one page {page_bytes / 2**30:.3f}",
        )
    return "memory that gpu_memory_utilization leaves", budget_bytes
