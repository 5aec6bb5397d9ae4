// How the splits of a sequence put their sums together.
//
// Letters as in attend.cu: D channels of a head, Z splits. Split z leaves a row of sums v_z of each
// head, and two statistics of it: the largest score, and the sum of weights relative to that.
//
//   v = sum_j sum_z 2 ** (max_z - max) v_z,   z = 4j to 4j + 3, both in order;   sum likewise
//
// Memory: rows of 4 * D bytes and pairs of statistics in L2. Two ways, whose results are the same
// bits:
//
//   count  a warp a head leaves its row, then counts; the last to arrive reads all Z rows of its
//          head: a fence, the count and the rows, each a way to L2 and back
//   poll   every number is its own flag, and split z waits for the rows of heads z, z + Z, ...:
//          four rows a warp, all at once, so that one way to L2 is all. Memory must be UNSET
//          before, as it is left after, and all splits of a sequence must be running at once
#ifndef SUBTEN_ATTEND_MERGE_CUH
#define SUBTEN_ATTEND_MERGE_CUH

#include "attend_slice.cuh"

// Memory for one number between launches that poll: a NaN that the kernel never writes.
#define UNSET (-1)
#define OTHER_NAN 0x7fc00000
#define FOUR 4

// Statistics of all splits of a head: lane l holds those of splits l and l + 32.
struct SplitStats {
    float held[2][2];  // max and sum

    // Whether they are all there.
    INLINE bool load(const float* stats, int num_used, int lane) {
        bool is_set = true;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            held[j][0] = MINUS_INFINITY;
            held[j][1] = 0;
            if (lane + j * WARP < num_used) poll(held[j], stats + 2 * (lane + j * WARP));
            is_set = is_set && float_bits(held[j][0]) != UNSET && float_bits(held[j][1]) != UNSET;
        }
        return is_set;
    }

    // Turns maxima into weights, and gives sum and maximum of the whole head.
    INLINE float weigh(float& max) {
        max = max_over_lanes<1>(larger(held[0][0], held[1][0]));
#pragma unroll
        for (int j = 0; j < 2; ++j) held[j][0] = power_of_two(held[j][0] - shift_of(max));
        return sum_over_lanes<WARP>(held[0][0] * held[0][1] + held[1][0] * held[1][1]);
    }

    INLINE float weight_of(int split) const {
        const float weight = split < WARP ? held[0][0] : held[1][0];
        return bits_float(shuffle_from(float_bits(weight), split % WARP));
    }
};

// v = the weighted sum of four rows from split z on.
template <int VALUES>
INLINE void add_four(float (&v)[VALUES], const float (*rows)[VALUES], const SplitStats& stats,
                     int z) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = 0;
#pragma unroll
    for (int b = 0; b < FOUR; ++b) {
        const float weight = stats.weight_of(z + b);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = multiply_add(weight, rows[b][i], v[i]);
    }
}

// Counting. `v` of each lane and `sum`, relative to `max`, are those of one split, of which one
// warp gets true, and what is of the whole head.
template <int VALUES>
INLINE bool merge_by_count(float (&v)[VALUES], float& sum, float& max, float* part, float* stats,
                           int* arrived, int split, int num_used, int lane) {
    constexpr int BATCH = 4 * FOUR;
    const float own_stat[2] = {max, sum};
    store_vector(part + (split * WARP + lane) * VALUES, v);
    if (lane == 0) store_vector(stats + 2 * split, own_stat);
    sync_warp();
    int num_before = 0;
    if (lane == 0) {
        num_before = count_arrival(arrived);
        if (num_before == num_used - 1) *arrived = 0;  // for the next launch
    }
    if (shuffle_from(num_before, 0) != num_used - 1) return false;
    sync_warp();

    SplitStats all;
    float rows[BATCH][VALUES];
    auto load = [&](int z) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) rows[b][i] = 0;
            if (z + b < num_used) poll(rows[b], part + ((z + b) * WARP + lane) * VALUES);
        }
    };
    all.load(stats, num_used, lane);
    load(0);
    sum = all.weigh(max);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = 0;
#pragma unroll 1
    for (int z = 0;;) {
#pragma unroll
        for (int b = 0; b < BATCH; b += FOUR) {
            float of_four[VALUES];
            add_four(of_four, rows + b, all, z + b);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] += of_four[i];
        }
        z += BATCH;
        if (z >= num_used) return true;
        load(z);
    }
}

// Polling, first: leaves a split's sums where others find them.
template <int VALUES>
INLINE void publish_split(const float (&v)[VALUES], float sum, float max, float* part,
                          float* stats, int split, int lane) {
    float own[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) own[i] = v[i] == v[i] ? v[i] : bits_float(OTHER_NAN);
    const float own_stat[2] = {max, sum == sum ? sum : bits_float(OTHER_NAN)};
    publish(part + (split * WARP + lane) * VALUES, own);
    if (lane == 0) publish(stats + 2 * split, own_stat);
}

// Polling, second: v = the sum of four rows from split z on, once they are there, which it unsets;
// gives sum of weights and maximum of the whole head.
template <int VALUES>
INLINE float merge_four(float (&v)[VALUES], float& max, float* part, const float* stats, int z,
                        int num_used, int lane) {
    SplitStats all;
    float rows[FOUR][VALUES];
    float* const from = part + (z * WARP + lane) * VALUES;
    for (;;) {
        bool is_set = all.load(stats, num_used, lane);
#pragma unroll
        for (int b = 0; b < FOUR; ++b) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) rows[b][i] = 0;
            if (z + b < num_used) poll(rows[b], from + b * WARP * VALUES);
        }
#pragma unroll
        for (int b = 0; b < FOUR; ++b)
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                is_set = is_set && float_bits(rows[b][i]) != UNSET;
        if (is_set) break;
        poll_again();
    }
    sync_warp();
    float unset[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) unset[i] = bits_float(UNSET);
#pragma unroll
    for (int b = 0; b < FOUR; ++b)
        if (z + b < num_used) store_vector(from + b * WARP * VALUES, unset);
    const float sum = all.weigh(max);
    add_four(v, rows, all, z);
    return sum;
}

// Polling, last, when all warps that wait for them have seen them.
INLINE void unset_stats(float* stats, int num_used, int lane) {
    const float unset[2] = {bits_float(UNSET), bits_float(UNSET)};
#pragma unroll 1
    for (int z = lane; z < num_used; z += WARP) store_vector(stats + 2 * z, unset);
}

#endif
