"""The rotary settings of a config.json, in all the spellings that Hugging Face has had."""

from __future__ import annotations

import logging

from subten.config import RopeConfig
from subten.models.config_reader import ConfigReader

logger = logging.getLogger(__name__)

_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}
"""Rope kind to the keys that it reads beside its base; another key would change what we compute."""

_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


def read_rope(
    reader: ConfigReader, *, head_dim: int, max_len: int, default_theta: float | None
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before it).

    `rope_type` and the older `type` mean the same. `max_len` is `max_position_embeddings`, which
    stands in for an absent `original_max_position_embeddings` as in transformers. A kind that is
    unknown, keys that disagree or that the kind has no use for, and an absent factor raise
    CheckpointError.
    """
    rope = reader.section(reader.spelling("rope_parameters", "rope_scaling"))
    if rope is None:
        rope = ConfigReader({}, reader.source, "rope_parameters.")
    kind = _read_kind(rope)
    theta = _read_theta(reader, rope, default_theta)
    for holder in (reader, rope):
        holder.require("partial_rotary_factor", 1.0, "the whole head is rotated")
    for key in rope.values:
        if rope.has(key) and key not in (*_ALWAYS, *_FIELDS[kind]):
            raise rope.error(key, rope.values[key], f"rope type {kind!r} has no such key")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor"))
    original = _read_original_len(reader, rope, max_len)
    if kind == "llama3":
        return _read_llama3(rope, theta, original)
    if kind == "yarn":
        return _read_yarn(rope, theta, original)
    return _read_longrope(rope, theta, original, head_dim=head_dim, max_len=max_len)


def context_reach(rope: RopeConfig, max_len: int) -> int:
    """The longest context that the scaling is made for; `max_len` is `max_position_embeddings`.

    By Hugging Face's convention `linear` and `yarn` are added to a config whose
    `max_position_embeddings` stays that of the unscaled model. `dynamic` ends where its
    frequencies would begin to depend on the length of the context.
    """
    if rope.kind == "dynamic":
        logger.warning(
            "rope type dynamic: contexts end at %d tokens, beyond which keys that are cached "
            "already would need other angles",
            max_len,
        )
    if rope.kind == "linear" and rope.factor is not None:
        return max(max_len, int(max_len * rope.factor))
    if rope.kind == "yarn" and rope.factor is not None and rope.original_max_len is not None:
        return max(max_len, int(rope.original_max_len * rope.factor))
    return max_len


def _read_kind(rope: ConfigReader) -> str:
    key = rope.spelling("rope_type", "type")
    if not rope.has(key) and not rope.has("factor"):
        return "default"
    allowed = f"allowed: {', '.join(_FIELDS)}"
    kind = rope.raw(key, allowed)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise rope.error(key, kind, allowed)
    return kind


def _read_theta(reader: ConfigReader, rope: ConfigReader, default_theta: float | None) -> float:
    if rope.has("rope_theta"):
        theta = rope.number("rope_theta")
        reader.require("rope_theta", theta, "it must agree with rope_parameters.rope_theta")
        return theta
    if not reader.has("rope_theta") and default_theta is not None:
        return default_theta
    return reader.number("rope_theta")


def _read_original_len(reader: ConfigReader, rope: ConfigReader, max_len: int) -> int:
    key = "original_max_position_embeddings"
    if rope.has(key):
        original = rope.integer(key)
        reader.require(key, original, f"it must agree with {rope.prefix}{key}")
        return original
    return reader.integer(key) if reader.has(key) else max_len


def _optional(rope: ConfigReader, key: str) -> float | None:
    return rope.number(key) if rope.has(key) else None


def _read_llama3(rope: ConfigReader, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"allowed: above low_freq_factor = {low:g}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor"),
        original_max_len=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(rope: ConfigReader, theta: float, original: int) -> RopeConfig:
    rope.require("truncate", True, "the correction range is always whole channels")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=rope.number("factor"),
        original_max_len=original,
        attention_factor=_optional(rope, "attention_factor"),
        beta_fast=_optional(rope, "beta_fast"),
        beta_slow=_optional(rope, "beta_slow"),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
    )


def _read_longrope(
    rope: ConfigReader, theta: float, original: int, *, head_dim: int, max_len: int
) -> RopeConfig:
    factor = rope.number("factor") if rope.has("factor") else max_len / original
    return RopeConfig(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_max_len=original,
        attention_factor=_optional(rope, "attention_factor"),
        short_factor=rope.numbers("short_factor", length=head_dim // 2),
        long_factor=rope.numbers("long_factor", length=head_dim // 2),
    )
