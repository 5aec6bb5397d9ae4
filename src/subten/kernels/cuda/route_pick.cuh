// The K best of a token's scores, and their weights, for the routers.
#ifndef SUBTEN_ROUTE_PICK_CUH
#define SUBTEN_ROUTE_PICK_CUH

#include "device.cuh"

// Key of an expert that is chosen already or does not exist, below every float's.
#define TAKEN (-0x7fffffff - 1)

// Integers in the order of the floats; NaN counts as the lowest, and -0.0 ties with 0.0.
INLINE int sort_key(float score) {
    float clean = score == score ? score : bits_float(0xff800000);
    if (clean == 0.0f) clean = 0.0f;
    const int bits = float_bits(clean);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

INLINE float key_score(int key) { return bits_float(key < 0 ? key ^ 0x7fffffff : key); }

// One warp, K passes of find and mask, as `pick_experts` in route_pick.py. A lane holds the scores
// of KEYS experts from lane * KEYS on, so the first lane of those with the best key holds the lowest
// id.
template <int KEYS>
INLINE void pick_experts(const float (&value)[KEYS], int* topk_id, float* topk_weight,
                         int num_experts, int top_k, bool renormalize, float scaling_factor,
                         int lane) {
    const int first = lane * KEYS;
    int key[KEYS], best, at;
    auto find_best = [&] {
        best = key[0], at = 0;
#pragma unroll
        for (int i = 1; i < KEYS; ++i)
            if (key[i] > best) best = key[i], at = i;
    };
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
        key[i] = first + i < num_experts ? sort_key(value[i]) : TAKEN;
    find_best();
    int most = warp_max(best), own_key = 0;
    const float largest = key_score(most);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
        if (first + i < num_experts) sum += exponential(value[i] - largest);
    sum = sum_over_lanes<WARP>(sum);

    for (int k = 0; k < top_k; ++k) {
        if (k > 0) most = warp_max(best);
        if (lane == k) own_key = most;
        if (lane == lowest_bit(lanes_where(best == most))) {
            topk_id[k] = first + at;
#pragma unroll
            for (int i = 0; i < KEYS; ++i)
                if (i == at) key[i] = TAKEN;
            find_best();
        }
    }
    float own_weight = lane < top_k ? exponential(key_score(own_key) - largest) / sum : 0.0f;
    if (renormalize) own_weight /= sum_over_lanes<WARP>(own_weight);
    if (lane < top_k) topk_weight[lane] = own_weight * scaling_factor;
}

#endif
