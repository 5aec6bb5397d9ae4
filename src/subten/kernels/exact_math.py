"""exp, log and Gumbel numbers that torch and Triton compute to the same bit.

Letters: V vocabulary.

Every function is a fixed sequence of separately rounded FP32 operations (division included) or
of integer operations. Kernels that call the Triton half must be launched with
`enable_fp_fusion=False`, else a fused multiply-add rounds once where torch rounds twice.
"""

from __future__ import annotations

import torch

from subten.kernels.triton_shim import tl, triton_jit


def exact_exp_torch(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 0 as 2^n times the Taylor series of e^r, |r| <= ln(2) / 2; 0 below -87."""
    bounded = x.clamp_min(-87.0)
    n = (bounded * LOG2_E + 0.5).floor()
    r = bounded - n * LN2_HIGH - n * LN2_LOW
    series = torch.full_like(r, EXP_SERIES[0])
    for factor in EXP_SERIES[1:]:
        series = series * r + factor
    power = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, series * power)


def exact_log_torch(x: torch.Tensor) -> torch.Tensor:
    """ln(x) of a normal x > 0: e ln(2) + 2 atanh((m - 1) / (m + 1)), m within [1, 2) / sqrt(2)."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    m = (bits - (exponent << 23)).view(torch.float32)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = torch.full_like(t, LOG_SERIES[0])
    for factor in LOG_SERIES[1:]:
        series = series * t + factor
    log: torch.Tensor = exponent.float() * LN2 + s * series
    return log


def _mix_torch(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64 (shifts made logical by masks, products wrap)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def exact_gumbel_torch(seed: torch.Tensor, index: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel numbers [V] from (seed, index, vocabulary id) alone."""
    id_V = torch.arange(1, vocab + 1, device=seed.device)
    stream = _mix_torch(_mix_torch(seed + GOLDEN) + index * GOLDEN)
    word_V = (_mix_torch(stream + id_V * GOLDEN) >> 32) & (2**32 - 1)
    v_V = (2 * word_V + 1).float() * 2.0**-33
    # -log(1 - v), exact in the relative sense also for tiny v, where the largest numbers come
    # from (Higham, Accuracy and Stability of Numerical Algorithms, section 1.14.1).
    w_V = (1.0 - v_V).clamp_min(2.0**-25)
    exponential_V = torch.where(w_V == 1.0, v_V, -exact_log_torch(w_V) * (v_V / (1.0 - w_V)))
    return -exact_log_torch(exponential_V)


LOG2_E = 1.4426950408889634
LN2 = 0.6931471805599453
LN2_HIGH = 0.693359375
"""ln(2) in 10 bits, so that n * LN2_HIGH is exact for |n| < 2**14; LN2_LOW is the rest."""
LN2_LOW = LN2 - LN2_HIGH
EXP_SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
LOG_SERIES = (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)
SQRT_HALF_BITS = 0x3F3504F3

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Step of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
section 5.1 and its variant 13 of the finaliser), here as signed integers."""
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


# The device half: the same operations on the same constants, which a kernel cannot take from the
# module. The tests compare the halves bit by bit.


@triton_jit
def exact_exp(x: tl.tensor) -> tl.tensor:
    """e^x for x <= 0; see `exact_exp_torch`."""
    bounded = tl.maximum(x, -87.0)
    n = tl.floor(bounded * 1.4426950408889634 + 0.5)
    r = bounded - n * 0.693359375 - n * (0.6931471805599453 - 0.693359375)
    series = r * (1 / 5040) + 1 / 720
    series = series * r + 1 / 120
    series = series * r + 1 / 24
    series = series * r + 1 / 6
    series = series * r + 1 / 2
    series = series * r + 1.0
    series = series * r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, series * power)


@triton_jit
def exact_log(x: tl.tensor) -> tl.tensor:
    """ln(x) of a normal x > 0; see `exact_log_torch`."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    t = s * s
    series = t * (2 / 9) + 2 / 7
    series = series * t + 2 / 5
    series = series * t + 2 / 3
    series = series * t + 2.0
    return exponent.to(tl.float32) * 0.6931471805599453 + s * series


@triton_jit
def _mix(x: tl.tensor) -> tl.tensor:
    """See `_mix_torch`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - 0x10000000000000000)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - 0x10000000000000000)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton_jit
def exact_gumbel(seed: tl.tensor, index: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Standard Gumbel numbers of a block of token ids; see `exact_gumbel_torch`."""
    GOLDEN: tl.constexpr = 0x9E3779B97F4A7C15 - 0x10000000000000000
    stream = _mix(_mix(seed + GOLDEN) + index * GOLDEN)
    word = (_mix(stream + (token.to(tl.int64) + 1) * GOLDEN) >> 32) & 0xFFFFFFFF
    v = (2 * word + 1).to(tl.float32) * 1.1641532182693481e-10  # 2**-33
    w = tl.maximum(1.0 - v, 2.9802322387695312e-08)  # 2**-25
    ratio = tl.div_rn(v, tl.where(w == 1.0, 1.0, 1.0 - w))
    return -exact_log(tl.where(w == 1.0, v, -exact_log(w) * ratio))
