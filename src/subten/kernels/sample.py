"""The next token of each sequence: penalties, temperature, min-p, top-k, top-p, Gumbel-max.

Letters: S sequences, V vocabulary.

Both backends choose the same token, to the bit: random bits come from integers, `exp` and `log`
from polynomials below in separately rounded FP32 operations (no fused multiply-add), probability
mass is summed in integers, whose sum has no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTensors:
    """How each row of logits is sampled; every tensor [S] unless its letters say otherwise.

    `temperature_S`, `top_p_S`, `min_p_S` float32; `top_k_S` int32, below 1 or at least V is off;
    `seed_S`, `index_S` (of the token within its output) int64. Penalties all given or all None:
    `repetition_S`, `presence_S`, `frequency_S` float32, `prompt_mask_SV` bool (token occurs in
    the prompt), `output_count_SV` int32. Ranges are those of `core.SamplingParams`.
    """

    temperature_S: torch.Tensor
    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    min_p_S: torch.Tensor
    seed_S: torch.Tensor
    index_S: torch.Tensor
    repetition_S: torch.Tensor | None = None
    presence_S: torch.Tensor | None = None
    frequency_S: torch.Tensor | None = None
    prompt_mask_SV: torch.Tensor | None = None
    output_count_SV: torch.Tensor | None = None


MASS_ONE = 2.0**40
"""Units of probability mass of the most likely token; 2**22 tokens of it still fit 63 bits."""

COLDEST = 2.0**-100
"""Below this temperature the most likely token is taken: 1 / temperature must stay finite."""


def sample_torch(
    logits_SV: torch.Tensor, params: SamplingTensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `sample`."""
    logit_SV = _penalise(logits_SV.float(), params)
    is_bad_S = (logit_SV.isnan() | (logit_SV == torch.inf)).any(dim=-1)
    is_ok_S = ~is_bad_S & logit_SV.isfinite().any(dim=-1)
    token_S = logit_SV.argmax(dim=-1)
    is_greedy_S = (params.temperature_S < COLDEST) | (params.top_p_S <= 0) | (params.top_k_S == 1)
    # On a GPU this waits for the device; the kernels do not.
    for row in (is_ok_S & ~is_greedy_S).nonzero().squeeze(-1).tolist():
        logit_V = logit_SV[row]
        inverse = 1.0 / params.temperature_S[row]
        portion_V = _exp((logit_V - logit_V.amax()) * inverse)
        top_k, top_p, min_p = (
            values_S[row].item() for values_S in (params.top_k_S, params.top_p_S, params.min_p_S)
        )
        is_kept_V = _kept(logit_V, portion_V, top_k, top_p, min_p)
        gumbel_V = _gumbel(params.seed_S[row], params.index_S[row], len(logit_V))
        score_V = logit_V.double() * inverse.double() + gumbel_V.double()
        token_S[row] = score_V.masked_fill(~is_kept_V, -torch.inf).argmax()
    return torch.where(is_ok_S, token_S, 0), is_ok_S


def _penalise(logit_SV: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    if params.repetition_S is None:
        return logit_SV
    assert params.presence_S is not None and params.frequency_S is not None
    assert params.prompt_mask_SV is not None and params.output_count_SV is not None
    is_output_SV = params.output_count_SV > 0
    repetition_S1 = params.repetition_S.unsqueeze(-1)
    divided_SV = torch.where(logit_SV > 0, logit_SV / repetition_S1, logit_SV * repetition_S1)
    logit_SV = torch.where(is_output_SV | params.prompt_mask_SV, divided_SV, logit_SV)
    logit_SV = logit_SV - params.frequency_S.unsqueeze(-1) * params.output_count_SV.float()
    return logit_SV - params.presence_S.unsqueeze(-1) * is_output_SV.float()


def _kept(
    logit_V: torch.Tensor, portion_V: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Which tokens min-p, top-k and top-p leave, by sorting; ties at a threshold all stay."""
    is_kept_V = portion_V >= min_p
    if 1 <= top_k < len(logit_V):
        is_kept_V &= logit_V >= logit_V.topk(top_k).values[-1]
    if top_p < 1:
        mass_V = (portion_V * MASS_ONE).long().masked_fill(~is_kept_V, 0)
        id_N = mass_V.nonzero().squeeze(-1)
        down_N, order_N = logit_V[id_N].sort(descending=True)
        mass_N = mass_V[id_N][order_N]
        above_N = mass_N.cumsum(dim=-1) - mass_N
        num_kept = int((above_N.double() < top_p * mass_N.sum().double()).sum())
        is_kept_V &= logit_V >= down_N[num_kept - 1]
    return is_kept_V


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 0 as 2^n times the Taylor series of e^r, |r| <= ln(2) / 2; 0 below -87."""
    bounded = x.clamp_min(-87.0)
    n = (bounded * LOG2_E + 0.5).floor()
    r = bounded - n * LN2_HIGH - n * LN2_LOW
    series = torch.full_like(r, EXP_SERIES[0])
    for factor in EXP_SERIES[1:]:
        series = series * r + factor
    power = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, series * power)


def _log(x: torch.Tensor) -> torch.Tensor:
    """ln(x) of a normal x > 0: e ln(2) + 2 atanh((m - 1) / (m + 1)), m within [1, 2) / sqrt(2)."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    m = (bits - (exponent << 23)).view(torch.float32)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = torch.full_like(t, LOG_SERIES[0])
    for factor in LOG_SERIES[1:]:
        series = series * t + factor
    return exponent.float() * LN2 + s * series


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64 (shifts made logical by masks, products wrap)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def _gumbel(seed: torch.Tensor, index: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel numbers [V] from (seed, index, vocabulary id) alone."""
    id_V = torch.arange(1, vocab + 1, device=seed.device)
    stream = _mix(_mix(seed + GOLDEN) + index * GOLDEN)
    word_V = (_mix(stream + id_V * GOLDEN) >> 32) & (2**32 - 1)
    v_V = (2 * word_V + 1).float() * 2.0**-33
    # -log(1 - v), exact in the relative sense also for tiny v, where the largest numbers come
    # from (Higham, Accuracy and Stability of Numerical Algorithms, section 1.14.1).
    w_V = (1.0 - v_V).clamp_min(2.0**-25)
    exponential_V = torch.where(w_V == 1.0, v_V, -_log(w_V) * (v_V / (1.0 - w_V)))
    return -_log(exponential_V)


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
