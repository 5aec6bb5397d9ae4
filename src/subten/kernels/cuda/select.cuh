// The K best of E experts, by one warp, and their weights.
//
// A lane holds KEYS experts from lane * KEYS on, so the first lane of those with the best key holds
// the lowest id.
#ifndef SUBTEN_SELECT_CUH
#define SUBTEN_SELECT_CUH

#include "device.cuh"

// Bits of a sum or a score that is not there yet: a NaN that no kernel writes otherwise.
// `route.py` has it too.
#define UNSET (-1)
#define BAD_SCORE 0x7fc00000
// Key of an expert that is chosen already or does not exist, below every float's.
#define TAKEN (-0x7fffffff - 1)

// What may be published: `v`, or another NaN in place of any.
INLINE float not_unset(float v) { return v == v ? v : bits_float(BAD_SCORE); }

// Integers in the order of the floats; NaN counts as the lowest, and -0.0 ties with 0.0.
INLINE int sort_key(float score) {
    float clean = score == score ? score : bits_float(0xff800000);
    if (clean == 0.0f) clean = 0.0f;
    const int bits = float_bits(clean);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

INLINE float key_score(int key) { return bits_float(key < 0 ? key ^ 0x7fffffff : key); }

// Picks of a warp: lane k has the key of the k-th.
struct Picks {
    int own_key;
    float largest;
};

// `num_picks` passes of find and mask, as `_select` in route.py; `pick(k, expert)` is called by
// the lane that holds the k-th best.
template <int KEYS, class Pick>
INLINE Picks select_experts(const float (&value)[KEYS], int num_experts, int num_picks, int lane,
                            Pick pick) {
    const int first = lane * KEYS;
    int key[KEYS], best, at;
    auto find_best = [&] {
        best = key[0], at = 0;
#pragma unroll
        for (int i = 1; i < KEYS; ++i)
            if (key[i] > best) best = key[i], at = i;
    };
#pragma unroll
    for (int i = 0; i < KEYS; ++i) key[i] = first + i < num_experts ? sort_key(value[i]) : TAKEN;
    find_best();
    int most = warp_max(best);
    Picks picks = {0, key_score(most)};
    for (int k = 0; k < num_picks; ++k) {
        if (k > 0) most = warp_max(best);
        if (lane == k) picks.own_key = most;
        if (lane == lowest_bit(lanes_where(best == most))) {
            pick(k, first + at);
#pragma unroll
            for (int i = 0; i < KEYS; ++i)
                if (i == at) key[i] = TAKEN;
            find_best();
        }
    }
    return picks;
}

// Weight of the lane-th of `top_k` picks: softmax over all experts, perhaps divided by the sum of
// the chosen ones.
template <int KEYS>
INLINE float expert_weight(const float (&value)[KEYS], Picks picks, int num_experts, int top_k,
                           bool renormalize, float scaling_factor, int lane) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
        if (lane * KEYS + i < num_experts) sum += exponential(value[i] - picks.largest);
    sum = sum_over_lanes<WARP>(sum);
    float own = lane < top_k ? exponential(key_score(picks.own_key) - picks.largest) / sum : 0.0f;
    if (renormalize) own /= sum_over_lanes<WARP>(own);
    return own * scaling_factor;
}

#endif
