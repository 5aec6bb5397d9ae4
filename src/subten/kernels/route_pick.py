"""The k best experts of each row of scores and their weights, for the kernels of the router.

Letters: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

from subten.kernels.triton_shim import tl, triton_jit


@triton_jit
def pick_experts(
    score_TE: tl.tensor,
    scaling_factor: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
) -> tl.tensor:
    """The k best experts of each row and their weights, by k passes of find and mask.

    Keys are the floats' bits made to sort as integers (the bits of negative ones flipped), so
    that -inf and NaN stay above `TAKEN` and a pass can never find an expert twice.
    """
    # Key of an expert that is chosen already or does not exist: below the key of every float.
    TAKEN: tl.constexpr = -0x80000000
    e_1E = tl.arange(0, EXPERTS_PAD)[None, :]
    k_1K = tl.arange(0, K_PAD)[None, :]
    is_expert = e_1E < NUM_EXPERTS
    score_TE = tl.where(is_expert, score_TE, float("-inf"))
    clean_TE = tl.where(score_TE == score_TE, score_TE, float("-inf"))
    clean_TE = tl.where(clean_TE == 0.0, 0.0, clean_TE)  # -0.0 and 0.0 tie
    bits_TE = clean_TE.to(tl.int32, bitcast=True)
    key_TE = tl.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE)
    key_TE = tl.where(is_expert, key_TE, TAKEN)
    portion_TE = tl.exp(score_TE - tl.max(clean_TE, axis=1)[:, None])
    portion_TE = portion_TE / tl.sum(portion_TE, axis=1)[:, None]
    id_TK = tl.zeros([score_TE.shape[0], K_PAD], tl.int32)
    weight_TK = tl.zeros([score_TE.shape[0], K_PAD], tl.float32)
    for k in range(TOP_K):
        best_T1 = tl.argmax(key_TE, axis=1, tie_break_left=True)[:, None]
        is_best_TE = e_1E == best_T1
        weight_T1 = tl.sum(tl.where(is_best_TE, portion_TE, 0.0), axis=1)[:, None]
        id_TK = tl.where(k_1K == k, best_T1, id_TK)
        weight_TK = tl.where(k_1K == k, weight_T1, weight_TK)
        key_TE = tl.where(is_best_TE, TAKEN, key_TE)
    if RENORMALIZE:
        weight_TK = weight_TK / tl.sum(weight_TK, axis=1)[:, None]
    return id_TK, weight_TK * scaling_factor
