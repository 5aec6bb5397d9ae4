"""What becomes of the bias of the key projection: left in stored keys, or added to their scores.

A bias of norm 600 on a few channels stretches the range of every key, so that few of its codes are
left for what differs between tokens: 4-bit caches of such models are known to lose the text.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator

from subten.codecs.adaptive import AdaptiveFormat
from subten.config import KEY_BIAS, ModelConfig
from subten.core import ConfigError, refuse
from subten.layers.adaptive_attention import AdaptiveAttention
from subten.layers.attention import Attention
from subten.layers.decoder_layer import DecoderLayer
from subten.models.decoder import Decoder

logger = logging.getLogger(__name__)

KEY_BIAS_RATIO, KEY_BIAS_NORM = 10.0, 50.0
"""A key bias is large above this many times the median over layers, or above this norm."""


def check_key_bias(asked: str, config: ModelConfig) -> None:
    """ConfigError unless `asked` is one of KEY_BIAS, and can be had: call it before loading."""
    if asked not in KEY_BIAS:
        raise refuse(ConfigError, "kv_key_bias", asked, ", ".join(KEY_BIAS))
    if asked != "strip":
        return
    why = None
    if not config.has_qkv_bias:
        why = "the model's keys have no bias"
    elif config.has_qk_norm:
        why = "the model's keys have a norm after their bias"
    if why is not None:
        raise refuse(ConfigError, "kv_key_bias", asked, f"auto or keep, as {why}")


def settle_key_bias(decoder: Decoder, asked: str, source: str) -> None:
    """Strip the bias of keys from the layers that `asked` means; one line says which, or warns.

    `auto` strips it where it is large and rows have fewer than 16 bits, `strip` from every layer.
    An adaptive cache strips the mean key of every layer, unless the bias is to be kept. Call it
    with the weights in place.
    """
    config, fmt = decoder.config, decoder.fmt
    attentions = list(_attentions(decoder))
    is_adaptive = isinstance(fmt, AdaptiveFormat)
    if is_adaptive:
        for attention in attentions:
            assert isinstance(attention, AdaptiveAttention), type(attention)
            attention.keeps_mean = asked == "keep"
    has_room = fmt.true_bits >= 16 and not is_adaptive
    if not config.has_qkv_bias or (has_room and asked != "strip"):
        return
    norms = [_key_bias_norm(attention) for attention in attentions]
    usual = statistics.median(norms)
    large = [i for i, norm in enumerate(norms) if norm > min(KEY_BIAS_RATIO * usual, KEY_BIAS_NORM)]
    can_strip = not config.has_qk_norm and not is_adaptive
    stripped = list(range(len(norms))) if asked == "strip" else large
    if asked != "keep" and can_strip and stripped:
        for index in stripped:
            attentions[index].strip_key_bias()
        logger.info(
            "kv_key_bias: %s -> strip in %s: k_proj.bias has a norm of up to %.3g (median over "
            "layers %.3g); attention adds its score instead of reading it from %s keys",
            asked,
            _layers(stripped),
            max(norms[i] for i in stripped),
            usual,
            fmt.codec.name,
        )
    elif large and (asked == "keep" or not is_adaptive):
        is_curable = asked == "keep" and (can_strip or is_adaptive)
        cure = "--kv-key-bias auto" if is_curable else "--kv-cache-dtype adaptive"
        logger.warning(
            "%s: k_proj.bias of %s has a norm of up to %.3g (median over layers %.3g), which "
            "costs a %s cache accuracy; %s takes it out of the keys, --kv-cache-dtype bf16 has "
            "room for it",
            source,
            _layers(large),
            max(norms[i] for i in large),
            usual,
            fmt.codec.name,
            cure,
        )


def _attentions(decoder: Decoder) -> Iterator[Attention]:
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer), type(layer)
        yield layer.attention


def _key_bias_norm(attention: Attention) -> float:
    assert attention.qkv.bias is not None
    return float(attention.qkv.bias.detach()[attention.key_rows].float().norm())


def _layers(indices: list[int], limit: int = 16) -> str:
    shown = ", ".join(map(str, indices[:limit]))
    rest = f" and {len(indices) - limit} more" if len(indices) > limit else ""
    return f"{'layer' if len(indices) == 1 else 'layers'} {shown}{rest}"
