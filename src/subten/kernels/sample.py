"""The next token of each sequence: bias, penalties, mask, then temperature to Gumbel-max.

Letters: S sequences, V vocabulary, W words of 32 tokens.

Both backends choose the same token, to the bit: `exact_math` has exp, log and the random numbers,
and probability mass is summed in integers, whose sum has no order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from subten.kernels.exact_math import (
    exact_exp,
    exact_exp_torch,
    exact_gumbel,
    exact_gumbel_torch,
)
from subten.kernels.triton_shim import tl, triton, triton_jit


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTensors:
    """How each row of logits is sampled; every tensor [S] unless its letters say otherwise.

    `temperature_S`, `top_p_S`, `min_p_S` float32; `top_k_S` int32, below 1 or at least V is off;
    `seed_S`, `index_S` (of the token within its output) int64. Penalties all given or all None:
    `repetition_S`, `presence_S`, `frequency_S` float32, `prompt_mask_SV` bool (token occurs in
    the prompt), `output_count_SV` int32. `bias_SV` float32 is finite; `mask_SW` int32, W = V / 32
    rounded up, has a bit for each token, lowest first, and tokens without their bit are never
    chosen. Ranges are those of `core.SamplingParams`.
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
    bias_SV: torch.Tensor | None = None
    mask_SW: torch.Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether logits are more than scaled."""
        given = (self.repetition_S, self.bias_SV, self.mask_SW)
        return any(tensor is not None for tensor in given)


MASS_ONE = 2.0**40
"""Units of probability mass of the most likely token; 2**22 tokens of it still fit 63 bits."""

COLDEST = 2.0**-100
"""Below this temperature the most likely token is taken: 1 / temperature must stay finite."""


def sample(logits_SV: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's next token; returns token int64 [S] and is_ok bool [S].

    logits float32 [S, V] of any strides, V up to 2**22; -inf never wins. In the order and meaning
    of vLLM: bias, penalties (repetition over prompt and output, frequency and presence over
    output), mask, temperature, min-p, top-k, top-p; then the largest logit / temperature + Gumbel
    number (Gumbel 1954; Maddison et al. 2014) among the tokens left. `is_ok` is False, and the
    token 0, where a row holds NaN or +inf, masked or not, or nothing finite that is allowed.

    Temperature 0, top_p 0 and top_k 1 take the most likely token, the lowest id of equal ones.
    Otherwise ties at the top-k and top-p thresholds all stay: which of two equally likely tokens
    lives must not depend on a sort. The numbers depend on (seed, index, token id) alone, so a
    row's token does not depend on its batch. Two launches, no host sync.
    """
    num_rows, vocab = logits_SV.shape
    assert logits_SV.dtype == torch.float32, logits_SV.dtype
    assert 1 <= vocab <= 2**22, vocab
    for name in ("temperature_S", "top_k_S", "top_p_S", "min_p_S", "seed_S", "index_S"):
        values_S = getattr(params, name)
        assert values_S.shape == (num_rows,), (name, values_S.shape, num_rows)
        assert values_S.is_contiguous(), (name, values_S.stride())
    new = functools.partial(torch.empty, device=logits_SV.device)
    token_S, is_ok_S = new(num_rows, dtype=torch.int64), new(num_rows, dtype=torch.bool)
    if num_rows == 0:
        return token_S, is_ok_S
    changes_logits = params.changes_logits
    num_blocks = triton.cdiv(vocab, BLOCK_V)
    logit_SV = new(num_rows, vocab, dtype=torch.float32) if changes_logits else logits_SV
    gumbel_SV = new(num_rows, vocab, dtype=torch.float32)
    best_logit_SB = new(num_rows, num_blocks, dtype=torch.float32)
    best_score_SB = new(num_rows, num_blocks, dtype=torch.float64)
    best_id_SB2 = new(num_rows, num_blocks, 2, dtype=torch.int32)
    settings = (
        params.temperature_S,
        params.top_k_S,
        params.top_p_S,
        params.min_p_S,
        logit_SV,
        gumbel_SV,
        best_logit_SB,
        best_score_SB,
        best_id_SB2,
        *logit_SV.stride(),
        vocab,
        num_blocks,
    )
    # Without fused multiply-adds the device rounds as torch does, operation by operation.
    _score_kernel[(num_rows, num_blocks)](
        logits_SV,
        *_change_arguments(params, num_rows, vocab),
        params.seed_S,
        params.index_S,
        *settings,
        *logits_SV.stride(),
        HAS_BIAS=params.bias_SV is not None,
        HAS_PENALTIES=params.repetition_S is not None,
        HAS_MASK=params.mask_SW is not None,
        BLOCK=BLOCK_V,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _choose_kernel[(num_rows,)](
        token_S,
        is_ok_S,
        *settings,
        BLOCKS_PAD=triton.next_power_of_2(num_blocks),
        BLOCK=min(4096, triton.next_power_of_2(vocab)),
        num_warps=16,
        enable_fp_fusion=False,
    )
    return token_S, is_ok_S


def sample_torch(
    logits_SV: torch.Tensor, params: SamplingTensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `sample`."""
    logit_SV = logits_SV.float()
    if params.bias_SV is not None:
        logit_SV = logit_SV + params.bias_SV
    logit_SV = _penalise(logit_SV, params)
    is_bad_S = (logit_SV.isnan() | (logit_SV == torch.inf)).any(dim=-1)
    if params.mask_SW is not None:
        is_allowed_SV = unpack_mask(params.mask_SW, logit_SV.shape[-1])
        logit_SV = logit_SV.masked_fill(~is_allowed_SV, -torch.inf)
    is_ok_S = ~is_bad_S & logit_SV.isfinite().any(dim=-1)
    token_S = logit_SV.argmax(dim=-1)
    is_greedy_S = (params.temperature_S < COLDEST) | (params.top_p_S <= 0) | (params.top_k_S == 1)
    # On a GPU this waits for the device; the kernels do not.
    for row in (is_ok_S & ~is_greedy_S).nonzero().squeeze(-1).tolist():
        logit_V = logit_SV[row]
        inverse = 1.0 / params.temperature_S[row]
        portion_V = exact_exp_torch((logit_V - logit_V.amax()) * inverse)
        is_kept_V = _kept(
            logit_V,
            portion_V,
            int(params.top_k_S[row]),
            float(params.top_p_S[row]),
            float(params.min_p_S[row]),
        )
        gumbel_V = exact_gumbel_torch(params.seed_S[row], params.index_S[row], len(logit_V))
        score_V = logit_V.double() * inverse.double() + gumbel_V.double()
        token_S[row] = score_V.masked_fill(~is_kept_V, -torch.inf).argmax()
    return torch.where(is_ok_S, token_S, 0), is_ok_S


def unpack_mask(mask_SW: torch.Tensor, vocab: int) -> torch.Tensor:
    """int32 words, lowest bit first -> bool [S, vocab]."""
    bit_B = torch.arange(32, dtype=torch.int32, device=mask_SW.device)
    is_set_SWB = (mask_SW.unsqueeze(-1) >> bit_B) & 1 != 0
    return is_set_SWB.flatten(start_dim=-2)[..., :vocab]


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


BLOCK_V = 1024
"""Tokens a program of `_score_kernel`: a vocabulary of 151936 fills 149 SMs for one row."""


def _change_arguments(
    params: SamplingTensors, num_rows: int, vocab: int
) -> tuple[torch.Tensor | None, ...]:
    """What changes logits, checked, in the kernel's order; None where nothing does."""
    row, dense = (num_rows,), (num_rows, vocab)
    given = (
        (params.bias_SV, dense),
        (params.repetition_S, row),
        (params.presence_S, row),
        (params.frequency_S, row),
        (params.prompt_mask_SV, dense),
        (params.output_count_SV, dense),
        (params.mask_SW, (num_rows, triton.cdiv(vocab, 32))),
    )
    has_penalties = [tensor is not None for tensor, _ in given[1:6]]
    assert len(set(has_penalties)) == 1, "penalties: all or none"
    for tensor, shape in given:
        if tensor is not None:
            assert tensor.shape == shape, (tuple(tensor.shape), shape)
            assert tensor.is_contiguous(), tensor.stride()
    return tuple(tensor for tensor, _ in given)


@triton_jit
def _key(x: tl.tensor) -> tl.tensor:
    """float32 without NaN -> int32 of the same order, equal for -0.0 and 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton_jit
def _load_settings(
    temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, row: tl.tensor
) -> tl.tensor:
    """1 / temperature, top-k, top-p of a row and whether chance has a part in it."""
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    is_cold = temperature < 7.888609052210118e-31  # COLDEST
    is_greedy = is_cold | (top_p <= 0.0) | (top_k == 1)
    one = tl.full([], 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(is_greedy, 1.0, temperature))
    return inverse, top_k, top_p, is_greedy


# Block b of row s: changed logits, Gumbel numbers and the block's best, by logit and by
# score = logit / temperature + Gumbel number (in FP64: products of two floats are exact).
#
#   logits [S, V]:  | block 0: BLOCK tokens | block 1 | ...   best_* [S, B], best_id [S, B, 2]
#
# Bytes: 4 * S * V read; with penalties 5 * S * V more, with bias 4 * S * V, with a mask S * V / 8,
# and with any of them 4 * S * V written; for rows with top-k, top-p or min-p 4 * S * V written.
# A program a block: hashing and two logarithms are about 150 instructions a token, which one SM
# would take too long for.
@triton_jit
def _score_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    prompt_mask_ptr: tl.tensor,
    output_count_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    index_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    logit_ptr: tl.tensor,
    gumbel_ptr: tl.tensor,
    best_logit_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    stride_s: tl.tensor,
    stride_v: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    stride_given_s: tl.tensor,
    stride_given_v: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    v_64 = v.to(tl.int64)
    inside = v < vocab
    given = logits_ptr + row * stride_given_s + v_64 * stride_given_v
    logit = tl.load(given, mask=inside, other=float("-inf"))
    at = row * vocab + v_64
    if HAS_BIAS:
        logit = logit + tl.load(bias_ptr + at, mask=inside, other=0.0)
    if HAS_PENALTIES:
        count = tl.load(output_count_ptr + at, mask=inside, other=0)
        is_in_prompt = tl.load(prompt_mask_ptr + at, mask=inside, other=0) != 0
        repetition = tl.full([BLOCK], 1.0, tl.float32) * tl.load(repetition_ptr + row)
        divided = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
        logit = tl.where((count > 0) | is_in_prompt, divided, logit)
        logit = logit - tl.load(frequency_ptr + row) * count.to(tl.float32)
        logit = logit - tl.load(presence_ptr + row) * (count > 0).to(tl.float32)
    is_bad = tl.max(((logit != logit) | (logit == float("inf"))).to(tl.int32), axis=0) > 0
    if HAS_MASK:
        num_words = (vocab + 31) // 32
        word = tl.load(mask_ptr + row * num_words + v_64 // 32, mask=inside, other=0)
        logit = tl.where(((word >> (v % 32)) & 1) != 0, logit, float("-inf"))
    if HAS_BIAS or HAS_PENALTIES or HAS_MASK:
        tl.store(logit_ptr + row * stride_s + v_64 * stride_v, logit, mask=inside)
    logit = tl.where(logit == logit, logit, float("-inf"))
    best, best_at = tl.max(logit, axis=0, return_indices=True)
    place = row * num_blocks + block
    # +inf, which no good row has, tells the second kernel that the block is bad.
    tl.store(best_logit_ptr + place, tl.where(is_bad, float("inf"), best))
    tl.store(best_id_ptr + 2 * place, block * BLOCK + best_at)
    inverse, top_k, top_p, is_greedy = _load_settings(temperature_ptr, top_k_ptr, top_p_ptr, row)
    if not is_greedy:
        gumbel = exact_gumbel(tl.load(seed_ptr + row), tl.load(index_ptr + row), v)
        score = logit.to(tl.float64) * inverse.to(tl.float64) + gumbel.to(tl.float64)
        best_score, best_score_at = tl.max(score, axis=0, return_indices=True)
        tl.store(best_score_ptr + place, best_score)
        tl.store(best_id_ptr + 2 * place + 1, block * BLOCK + best_score_at)
        has_top_k = (top_k >= 1) & (top_k < vocab)
        if has_top_k | (top_p < 1.0) | (tl.load(min_p_ptr + row) > 0.0):
            tl.store(gumbel_ptr + at, gumbel, mask=inside)


@triton_jit
def _kth_key(
    logit_row: tl.tensor,
    stride_v: tl.tensor,
    vocab: tl.tensor,
    top_k: tl.tensor,
    top: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Key of the k-th largest logit of a row, 1 <= k < V.

    Bisection between keys of which at least k and fewer than k logits are not below, where each
    end moves on to a logit that exists; at most 32 passes, and about half on a language model's
    logits. A pass reads 4 * V bytes from L2.
    """
    low = _key(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    high = _key(top).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + (high - low) // 2).to(tl.int32)
        count = tl.zeros([BLOCK], tl.int32)
        above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        below = tl.full([BLOCK], -0x80000000, tl.int32)
        for first in range(0, vocab, BLOCK):
            v = first + tl.arange(0, BLOCK)
            inside = v < vocab
            at = logit_row + v.to(tl.int64) * stride_v
            key = _key(tl.load(at, mask=inside, other=float("-inf")))
            is_above = inside & (key >= middle)
            count += is_above.to(tl.int32)
            above = tl.minimum(above, tl.where(is_above, key, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(inside & (key < middle), key, -0x80000000))
        num_above = tl.sum(count, axis=0)
        if num_above >= top_k:
            low = tl.min(above, axis=0).to(tl.int64)
            if num_above == top_k:
                high = low + 1
        else:
            high = tl.max(below, axis=0).to(tl.int64) + 1
    return low


@triton_jit
def _scan(
    logit_row: tl.tensor,
    gumbel_row: tl.tensor,
    stride_v: tl.tensor,
    vocab: tl.tensor,
    floor_key: tl.tensor,
    top: tl.tensor,
    inverse: tl.tensor,
    min_p: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Mass, in units of 2**-40 (MASS_ONE), and best token of what min-p and a floor leave."""
    mass = tl.zeros([BLOCK], tl.int64)
    best_score = tl.full([BLOCK], float("-inf"), tl.float64)
    best_v = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for first in range(0, vocab, BLOCK):
        v = first + tl.arange(0, BLOCK)
        inside = v < vocab
        at = logit_row + v.to(tl.int64) * stride_v
        logit = tl.load(at, mask=inside, other=float("-inf"))
        gumbel = tl.load(gumbel_row + v, mask=inside, other=0.0)
        portion = exact_exp((logit - top) * inverse)
        is_kept = inside & (portion >= min_p) & (_key(logit) >= floor_key)
        mass += tl.where(is_kept, (portion * 1099511627776.0).to(tl.int64), 0)
        score = logit.to(tl.float64) * inverse.to(tl.float64) + gumbel.to(tl.float64)
        is_better = is_kept & (score > best_score)
        best_score = tl.where(is_better, score, best_score)
        best_v = tl.where(is_better, v, best_v)
    is_best = best_score == tl.max(best_score, axis=0)
    return tl.sum(mass, axis=0), tl.min(tl.where(is_best, best_v, 0x7FFFFFFF), axis=0)


# One program a row. Rows without top-k, top-p and min-p only compare their blocks' bests. Else:
#
#   floor   = the k-th largest logit, or none
#   token   = best score among the kept, total = their mass
#   top-p keeps a token where the mass of those strictly more likely is below top_p * total. While
#   the token is not kept, no token as likely or less is either: take the best among those that
#   are more likely. It ends at the token that is best among the kept, without any sort, after one
#   or two scans on the logits of a language model (the idea is rejection sampling as in
#   FlashInfer's sampler; with the noise held fixed nothing is drawn again).
#
# Bytes: 12 to 20 * B for simple rows; 8 * V a scan from L2 for the others.
@triton_jit
def _choose_kernel(
    token_ptr: tl.tensor,
    is_ok_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    logit_ptr: tl.tensor,
    gumbel_ptr: tl.tensor,
    best_logit_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    stride_s: tl.tensor,
    stride_v: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS_PAD)
    inside = b < num_blocks
    place = row * num_blocks + b
    best_B = tl.load(best_logit_ptr + place, mask=inside, other=float("-inf"))
    top, top_block = tl.max(best_B, axis=0, return_indices=True)
    is_ok = (top > float("-inf")) & (top < float("inf"))
    token = tl.load(best_id_ptr + 2 * (row * num_blocks + top_block))
    inverse, top_k, top_p, is_greedy = _load_settings(temperature_ptr, top_k_ptr, top_p_ptr, row)
    if is_ok & (not is_greedy):
        score_B = tl.load(best_score_ptr + place, mask=inside, other=float("-inf"))
        _, best_block = tl.max(score_B, axis=0, return_indices=True)
        token = tl.load(best_id_ptr + 2 * (row * num_blocks + best_block) + 1)
        min_p = tl.load(min_p_ptr + row)
        has_top_k = (top_k >= 1) & (top_k < vocab)
        if has_top_k | (top_p < 1.0) | (min_p > 0.0):
            logit_row = logit_ptr + row * stride_s
            gumbel_row = gumbel_ptr + row * vocab
            floor_key = tl.full([], -0x80000000, tl.int64)
            if has_top_k:
                floor_key = _kth_key(logit_row, stride_v, vocab, top_k, top, BLOCK)
            total, token = _scan(
                logit_row, gumbel_row, stride_v, vocab, floor_key, top, inverse, min_p, BLOCK
            )
            wanted = top_p.to(tl.float64) * total.to(tl.float64)
            is_searching = top_p < 1.0
            while is_searching:
                at = logit_row + token.to(tl.int64) * stride_v
                floor_key = _key(tl.load(at)).to(tl.int64) + 1
                above, better = _scan(
                    logit_row, gumbel_row, stride_v, vocab, floor_key, top, inverse, min_p, BLOCK
                )
                is_searching = above.to(tl.float64) >= wanted
                token = tl.where(is_searching, better, token)
    tl.store(token_ptr + row, tl.where(is_ok, token, 0).to(tl.int64))
    tl.store(is_ok_ptr + row, is_ok)
