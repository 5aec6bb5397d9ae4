"""Frozen settings of the engine: the model's shape, its rotary table, the engine's limits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from subten.core import PAGE_SIZE, ConfigError, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta` and how long contexts are reached.

    `kind` is default, linear, dynamic, yarn, llama3 or longrope; the other fields are the ones
    that Hugging Face's `rope_scaling` has for that kind, None where the kind has no use for them.
    """

    theta: float
    kind: str = "default"
    factor: float | None = None
    original_max_len: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a decoder; sizes in elements. `num_experts` 0 means a dense FFN of `d_ffn`."""

    architecture: str
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ffn: int
    vocab_size: int
    norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_word_embeddings: bool
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    num_experts: int = 0
    top_k: int = 0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_moe(self) -> bool:
        """Whether the FFN is routed."""
        return self.num_experts > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What `LLM(...)` and the command line set; every field has vLLM's name where vLLM has one.

    `device` auto, cpu, cuda, cuda:N; `dtype` auto, bfloat16, float32; `backend` auto, cuda, triton,
    torch; `max_model_len` None takes the model's, or what the page pool holds if that is less;
    `quantization` none, fp8, int4 packs the matrices of attention and feed-forward networks as they
    are loaded, with `quantize_head` also a head that is not the embedding; `num_pages` None sizes
    the page pool from the memory at hand: on a GPU `gpu_memory_utilization` of its memory less
    weights, on a CPU `cpu_kv_cache_bytes`; `enforce_eager` decodes without CUDA graphs on a GPU
    too. A step that decodes computes at most `max_prefill_tokens` of prompts beside (None: up to
    `max_num_batched_tokens`); with `max_queue` requests waiting, more are refused (None: never).

    `kv_key_bias` strip stores keys without the bias of their projection, whose score attention adds
    again, so that codes are left for what differs between tokens; keep leaves it in them; auto
    strips layers whose bias would ruin rows of fewer than 16 bits. An adaptive cache strips the
    mean key of every layer, unless it is keep.

    With `kv_cache_dtype` adaptive: `kv_bits_budget` true bits an element, which a sequence of
    `max_model_len` tokens takes (None: as fine as memory allows); `kv_memory_bytes` is the memory
    of the whole cache (None: sized like any other); `kv_cold_pages` lets values go down to 1.5
    bits; `kv_outlier_channels` percent of a head's channels of keys, at least one, stay in BF16
    (None or 0: none); `kv_sink_tokens` first and `kv_window_tokens` last tokens of a sequence are
    read in BF16; `kv_calibration` is a text file from which it is learned how to store keys, or
    "none" (None: a text that comes with the package). None where another format takes no such
    setting.
    """

    kv_cache_dtype: str = "bf16"
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    quantization: str = "none"
    quantize_head: bool = True
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_tokens: int | None = None
    max_queue: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_bytes: int = 256 * 2**20
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    kv_bits_budget: float | None = None
    kv_memory_bytes: int | None = None
    kv_cold_pages: bool = False
    kv_outlier_channels: float | None = None
    kv_sink_tokens: int | None = None
    kv_window_tokens: int | None = None
    kv_calibration: str | None = None
    kv_key_bias: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "cpu_kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise refuse(ConfigError, name, getattr(self, name), "an integer of at least 1")
        optional = ("max_model_len", "num_pages", "kv_memory_bytes")
        for name in (*optional, "max_prefill_tokens", "max_queue"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refuse(ConfigError, name, value, "an integer of at least 1")
        if not 0 <= self.seed < 2**63:
            raise refuse(ConfigError, "seed", self.seed, "an integer from 0 to 2**63 - 1")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise refuse(
                ConfigError,
                "gpu_memory_utilization",
                self.gpu_memory_utilization,
                "a number above 0, at most 1",
            )
        for name, allowed in (
            ("dtype", ("auto", "bfloat16", "float32")),
            ("quantization", ("none", "fp8", "int4")),
            ("backend", ("auto", "cuda", "triton", "torch")),
            ("kv_key_bias", KEY_BIAS),
        ):
            if getattr(self, name) not in allowed:
                raise refuse(ConfigError, name, getattr(self, name), ", ".join(allowed))
        self._check_adaptive()

    def _check_adaptive(self) -> None:
        bits = self.kv_bits_budget
        if bits is not None and not 0.0 < bits < math.inf:
            raise refuse(ConfigError, "kv_bits_budget", bits, "a number of bits above 0")
        percent = self.kv_outlier_channels
        if percent is not None and not 0.0 <= percent <= MAX_OUTLIER_PERCENT:
            allowed = f"a number of percent from 0 to {MAX_OUTLIER_PERCENT}"
            raise refuse(ConfigError, "kv_outlier_channels", percent, allowed)
        sinks, window = self.kv_sink_tokens, self.kv_window_tokens
        if sinks is not None and not 0 <= sinks <= PAGE_SIZE:
            raise refuse(ConfigError, "kv_sink_tokens", sinks, f"0 to {PAGE_SIZE}, one page")
        if window is not None and window < 0:
            raise refuse(ConfigError, "kv_window_tokens", window, "an integer of at least 0")
        if self.kv_cache_dtype == "adaptive":
            return
        for name in ADAPTIVE_FIELDS:
            value = getattr(self, name)
            if value is not None and value is not False:
                allowed = "none, as kv_cache_dtype is not adaptive"
                raise refuse(ConfigError, name, value, allowed)


KEY_BIAS = ("auto", "strip", "keep")
"""What `kv_key_bias` may be."""

MAX_OUTLIER_PERCENT = 10
"""Of a head's channels: more BF16 channels take more bytes than wider codes would."""

ADAPTIVE_FIELDS = (
    "kv_bits_budget",
    "kv_memory_bytes",
    "kv_cold_pages",
    "kv_outlier_channels",
    "kv_sink_tokens",
    "kv_window_tokens",
    "kv_calibration",
)
"""Settings of an adaptive cache."""


CACHE_DIR_VARIABLE = "SUBTEN_CACHE_DIR"


def cache_dir() -> Path:
    """Where built models are kept: SUBTEN_CACHE_DIR, or subten/ under the user's cache folder."""
    explicit = os.environ.get(CACHE_DIR_VARIABLE)
    if explicit is not None:
        if not explicit:
            raise refuse(ConfigError, CACHE_DIR_VARIABLE, explicit, "a folder")
        return Path(explicit)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError as error:
        raise ConfigError(
            f"{CACHE_DIR_VARIABLE}: not set, and this user has no home folder; allowed: a folder"
        ) from error
    return Path(base) / "subten"


API_KEY_VARIABLE = "SUBTEN_API_KEY"


def env_api_key() -> tuple[str, ...]:
    """The key that clients of a server must send: SUBTEN_API_KEY, or () if it is not set."""
    key = os.environ.get(API_KEY_VARIABLE)
    if key == "":
        raise ConfigError(f"{API_KEY_VARIABLE}: got ''; allowed: a key, or no such variable")
    return () if key is None else (key,)


def env_commit() -> str | None:
    """The commit that measurements name: SUBTEN_COMMIT, or None for what git says."""
    commit = os.environ.get("SUBTEN_COMMIT")
    if commit == "":
        raise refuse(ConfigError, "SUBTEN_COMMIT", commit, "a commit, or no such variable")
    return commit
