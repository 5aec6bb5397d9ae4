"""The table of rotary angles: default, linear, dynamic, YaRN, Llama 3 and LongRoPE frequencies.

Letters: P positions, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch

from subten.config import RopeConfig


def cos_sin_table(
    rope: RopeConfig, *, head_dim: int, max_len: int, device: torch.device
) -> torch.Tensor:
    """Cosines and sines of every position below `max_len`: cos_sin_PD float32 [max_len, head_dim].

    Columns [0, D/2) are the cosines of the D/2 frequencies, [D/2, D) their sines; channel i turns
    with channel i + D/2. The attention factor of YaRN and LongRoPE is multiplied in. The
    arithmetic is float32 in the order of the transformers library, computed on the CPU, so that
    the table is the same to the last bit on every device.

    A key is cached with the angle of its own position, so a position's angle may not change when
    the context grows. Two kinds of scaling would change it: `dynamic` beyond
    `max_position_embeddings`, which `max_len` therefore never exceeds (below it, dynamic is
    default); and `longrope`, whose set of factors is chosen here once: the short ones if `max_len`
    is within the original context, otherwise the long ones.
    """
    inverse_F, attention_factor = _frequencies(rope, head_dim, max_len)
    angle_PF = torch.arange(max_len).float()[:, None] * inverse_F
    cos_sin_PD = torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1) * attention_factor
    return cos_sin_PD.to(device)


def _frequencies(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Radians a position for each pair of channels, and the factor on cosine and sine."""
    exponent_F = torch.arange(0, head_dim, 2).float() / head_dim
    inverse_F = 1.0 / (rope.theta**exponent_F)
    if rope.kind in ("default", "dynamic"):
        return inverse_F, 1.0
    assert rope.factor is not None, rope
    if rope.kind == "linear":
        return inverse_F / rope.factor, 1.0
    assert rope.original_max_len is not None, rope
    if rope.kind == "llama3":
        return _llama3(rope, inverse_F, rope.factor, rope.original_max_len), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, exponent_F, rope.factor, rope.original_max_len)
    assert rope.kind == "longrope", rope.kind
    return _longrope(rope, exponent_F, rope.factor, max_len, rope.original_max_len)


def _llama3(
    rope: RopeConfig, inverse_F: torch.Tensor, factor: float, original: int
) -> torch.Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a blend between (Llama 3.1)."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    assert low is not None and high is not None, rope
    wavelength_F = 2 * math.pi / inverse_F
    slow_F = torch.where(wavelength_F > original / low, inverse_F / factor, inverse_F)
    blend_F = (original / wavelength_F - low) / (high - low)
    blended_F = (1 - blend_F) * slow_F / factor + blend_F * slow_F
    is_between_F = (wavelength_F >= original / high) & (wavelength_F <= original / low)
    return torch.where(is_between_F, blended_F, slow_F)


def _yarn(
    rope: RopeConfig, exponent_F: torch.Tensor, factor: float, original: int
) -> tuple[torch.Tensor, float]:
    """Frequencies by parts and the attention factor (YaRN, arXiv 2309.00071, sections 3.2, 3.4)."""
    head_dim = 2 * exponent_F.numel()

    def channel_of(num_turns: float) -> float:
        """The channel pair that turns `num_turns` times over the original context."""
        return (head_dim * math.log(original / (num_turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    first = max(math.floor(channel_of(rope.beta_fast or 32)), 0)
    last: float = min(math.ceil(channel_of(rope.beta_slow or 1)), head_dim - 1)
    if first == last:
        last += 0.001
    ramp_F = ((torch.arange(head_dim // 2).float() - first) / (last - first)).clamp(0, 1)
    keep_F = 1 - ramp_F
    power_F = rope.theta**exponent_F
    inverse_F = (1.0 / (factor * power_F)) * (1 - keep_F) + (1.0 / power_F) * keep_F
    if rope.attention_factor is not None:
        return inverse_F, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return inverse_F, _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return inverse_F, _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(
    rope: RopeConfig, exponent_F: torch.Tensor, factor: float, max_len: int, original: int
) -> tuple[torch.Tensor, float]:
    """A factor a frequency, and the attention factor (LongRoPE, arXiv 2402.13753)."""
    chosen = rope.long_factor if max_len > original else rope.short_factor
    assert chosen is not None, rope
    inverse_F = 1.0 / (torch.tensor(chosen, dtype=torch.float32) * rope.theta**exponent_F)
    if rope.attention_factor is not None:
        return inverse_F, rope.attention_factor
    if factor <= 1.0:
        return inverse_F, 1.0
    return inverse_F, math.sqrt(1 + math.log(factor) / math.log(original))
