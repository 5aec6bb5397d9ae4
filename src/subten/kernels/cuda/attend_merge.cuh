// How the splits of a sequence put their sums together.
//
// Letters as in attend.cu: D channels of a head.
#ifndef SUBTEN_ATTEND_MERGE_CUH
#define SUBTEN_ATTEND_MERGE_CUH

#include "attend_slice.cuh"

// Memory for one number between launches that poll: a NaN that the kernel never writes.
#define UNSET (-1)
#define OTHER_NAN 0x7fc00000

// What the warps of all splits of one head do with their sums (`v` of each lane, `sum`, relative to
// `max`): each leaves them in row `split` of `part` and `stats`, and one of them gets true, with
// those of the whole head:
//
//   v = sum_z 2 ** (max_z - max) v_z,   sum likewise, z in order
//
// It is the last to arrive at a counter, whoever that is: a fence, then the count, then the rows,
// each a way to L2 and back. Or, where the splits POLL, that of the last split, which waits for the
// rows themselves: every number is its own flag. Then memory must be UNSET before, as it is left
// after, and the splits ahead must be running or done: they are all on an SM, or ahead in the grid.
// Lane l holds the weights of splits l and l + 32; BATCH rows of 4 * D bytes are in flight.
template <bool POLLS, int VALUES>
INLINE bool merge_splits(float (&v)[VALUES], float& sum, float max, float* part, float* stats,
                         int* arrived, int split, int num_used, int lane) {
    constexpr int BATCH = POLLS ? 8 : 16;
    float own[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) own[i] = v[i];
    float own_stat[2] = {max, sum};
    const int num_stored = POLLS ? num_used - 1 : num_used;
    if (POLLS) {
        if (split < num_stored) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                own[i] = own[i] == own[i] ? own[i] : bits_float(OTHER_NAN);
            own_stat[1] = sum == sum ? sum : bits_float(OTHER_NAN);
            publish(part + (split * WARP + lane) * VALUES, own);
            if (lane == 0) publish(stats + 2 * split, own_stat);
            return false;
        }
    } else {
        store_vector(part + (split * WARP + lane) * VALUES, own);
        if (lane == 0) store_vector(stats + 2 * split, own_stat);
        sync_warp();
        int num_before = 0;
        if (lane == 0) {
            num_before = count_arrival(arrived);
            if (num_before == num_used - 1) *arrived = 0;  // for the next launch
        }
        if (shuffle_from(num_before, 0) != num_used - 1) return false;
        sync_warp();
    }

    float stat[2][2] = {{MINUS_INFINITY, 0}, {MINUS_INFINITY, 0}};
    float rows[BATCH][VALUES];
    float* from = part + lane * VALUES;
    // Rows z to z + BATCH - 1; with the first of them all statistics, so that nothing waits twice.
    auto load = [&](int z) {
        bool is_set;
        do {
            is_set = true;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (z == 0 && lane + j * WARP < num_stored)
                    poll(stat[j], stats + 2 * (lane + j * WARP));
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int i = 0; i < VALUES; ++i) rows[b][i] = 0;
                if (z + b < num_stored) poll(rows[b], from + b * WARP * VALUES);
            }
            if (!POLLS) break;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                is_set = is_set && float_bits(stat[j][0]) != UNSET &&
                         float_bits(stat[j][1]) != UNSET;
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < VALUES; ++i)
                    is_set = is_set && float_bits(rows[b][i]) != UNSET;
        } while (!is_set);
        float* const stored = from;
        from += BATCH * WARP * VALUES;
        if (!POLLS) return;
        float unset[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) unset[i] = bits_float(UNSET);
        const float unset_stat[2] = {bits_float(UNSET), bits_float(UNSET)};
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (z == 0 && lane + j * WARP < num_stored)
                store_vector(stats + 2 * (lane + j * WARP), unset_stat);
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (z + b < num_stored) store_vector(stored + b * WARP * VALUES, unset);
        sync_warp();
    };
    load(0);
    if (POLLS) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (lane + j * WARP == split) {
                stat[j][0] = own_stat[0];
                stat[j][1] = own_stat[1];
            }
    }
    max = max_over_lanes<1>(larger(stat[0][0], stat[1][0]));
    float weight[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) weight[j] = power_of_two(stat[j][0] - shift_of(max));
    sum = sum_over_lanes<WARP>(weight[0] * stat[0][1] + weight[1] * stat[1][1]);
    auto weight_of = [&](int z) {
        const float held = z < WARP ? weight[0] : weight[1];
        return bits_float(shuffle_from(float_bits(held), z % WARP));
    };
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = 0;
#pragma unroll 1
    for (int z = 0;;) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const float of_row = weight_of(z + b);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] = multiply_add(of_row, rows[b][i], v[i]);
        }
        z += BATCH;
        if (z >= num_stored) break;
        load(z);
    }
    if (POLLS) {
        const float of_own = weight_of(split);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = multiply_add(of_own, own[i], v[i]);
    }
    return true;
}

#endif
