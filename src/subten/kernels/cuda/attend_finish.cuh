// The end of a block's work: its warps' sums become one row a head, and splits are merged.
//
// Letters, lanes and layouts as in attend.cu.
#ifndef SUBTEN_ATTEND_FINISH_CUH
#define SUBTEN_ATTEND_FINISH_CUH

#include "attend_merge.cuh"

#define MAX_WARPS 16

// Hadamard rotation of a row of sums, one bit of the channel after the other: the fast transform.
// Each bit of the channel that v[i] holds must be one of `lane` or of i, whichever.
template <int VALUES>
INLINE void rotate(float (&v)[VALUES], int lane) {
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) {
        const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = sign * v[i] + shuffle_xor(v[i], mask);
    }
#pragma unroll
    for (int bit = 1; bit < VALUES; bit *= 2) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            if (i & bit) continue;
            const float low = v[i], high = v[i | bit];
            v[i] = low + high;
            v[i | bit] = low - high;
        }
    }
    const float norm = VALUES == 4 ? 0.08838834764831845f : 0.125f;  // D ** -0.5
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] *= norm;
}

INLINE void store_bf16(u16* to, const float (&v)[2]) {
    *reinterpret_cast<u32*>(to) = pack_bf16(v[0], v[1]);
}
INLINE void store_bf16(u16* to, const float (&v)[4]) {
    *reinterpret_cast<u64*>(to) = pack_bf16(v[0], v[1]) | (u64)pack_bf16(v[2], v[3]) << 32;
}

// What a call gives beside its rows.
struct AttendCall {
    const u8* pages;
    i64 page_stride, head_stride;
    const int* page_table;
    i64 page_table_stride;
    const i64* position;
    const int *kv_len, *tile_seq, *tile_start;
    u16* out;
    float *part, *part_stats;
    int* arrived;
    float scale_log2;
    int num_kv_heads, group, num_splits, min_slices, num_stages;
};

// Which part of the work a block has: of one sequence and KV head, slices `first` to `end` - 1 of
// `num_slices`, as split `split`; and of that sequence what may be seen.
struct BlockShare {
    int tile, kv_head, split, seq, token, num_seen, num_keys, num_slices, slices_each, first, end;

    // Finds it for slices of KEYS keys, and calls `start` and `go_on`, which need nothing of it, while
    // loads are under way. False for a block that has none, and must end.
    //
    // The integers of the step, and all rows of pages but the newest of each sequence, are older
    // than the step's first kernel: they need no wait. Blocks of split 0 wait, whatever they do; so
    // do all of a grid with a block for every SM, which is a row for one sequence.
    template <int KEYS, class Start, class GoOn>
    INLINE bool find(const AttendCall& call, Start start, GoOn go_on) {
        const bool has_idle = (int)gridDim.x != call.num_kv_heads;
        kv_head = blockIdx.x;
        tile = blockIdx.y;
        split = blockIdx.z;
        if (has_idle) {
            tile = 0;
            split = kv_head / call.num_kv_heads;
            kv_head -= split * call.num_kv_heads;
        }
        seq = load_from_l2(call.tile_seq + tile);
        token = load_from_l2(call.tile_start + tile);
        start();
        int position = -1, length = 0;
        if (seq >= 0) {
            // The low word of an int64 that fits it.
            position = load_from_l2(reinterpret_cast<const int*>(call.position + token));
            length = load_from_l2(call.kv_len + seq);
        }
        go_on();
        num_seen = position + 1;
        num_keys = length < num_seen ? length : num_seen;
        num_slices = (num_keys + KEYS - 1) / KEYS;
        slices_each = (num_slices + call.num_splits - 1) / call.num_splits;
        slices_each = slices_each < call.min_slices ? call.min_slices : slices_each;
        first = split * slices_each;
        const int rest = num_slices - first;
        end = first + (rest < slices_each ? rest : slices_each);
        if (split > 0 && rest <= 0 && !has_idle) {
            leave_without_waiting();
            return false;
        }
        if (seq < 0 || (split > 0 && rest <= 0)) {
            wait_for_previous_kernels();
            return false;
        }
        return true;
    }

    INLINE int num_used() const { return (num_slices + slices_each - 1) / slices_each; }
};

// Warps have left their rows of sums in `rings`, `ring_bytes` apart, and max, sum and zero in `stats`;
// those from `num_taken` on have none. A warp a head from here on. The logarithm of each head's sum of weights goes to `lse` [T, H], if
// there is one.
template <class Codec, class Sums, int DIM, bool POLLS>
INLINE void finish_block(const AttendCall& call, const BlockShare& share, int num_taken, u8* rings,
                         int ring_bytes, float (&stats)[MAX_WARPS][Sums::HEADS][3], float* lse) {
    constexpr int VALUES = Sums::VALUES;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    const int group = call.group, split = share.split, num_used = share.num_used();
    __syncthreads();
    const bool is_alone = share.num_slices <= share.slices_each;
    const int num_busy = num_taken < num_warps ? num_taken : num_warps;
    const i64 first_row = ((i64)share.tile * call.num_kv_heads + share.kv_head) * group;
    const i64 out_row = ((i64)share.token * call.num_kv_heads + share.kv_head) * group;
    auto first_part = [&](int head) { return (first_row + head) * call.num_splits; };
    auto part_of = [&](int head) { return call.part + first_part(head) * DIM; };
    auto stats_of = [&](int head) { return call.part_stats + first_part(head) * 2; };
    auto put_out = [&](float (&v)[VALUES], float sum, float max, int head) {
        if (lse && lane == 0) lse[out_row + head] = max + logarithm_of_two(sum);
        // A row that saw nothing becomes 0; NaN is not 0, so a poisoned sequence stays NaN.
        const float inverse = 1.0f / (sum == 0.0f ? 1.0f : sum);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] *= inverse;
        if (Codec::IS_ROTATED) rotate(v, lane);
        u16* to = call.out + (out_row + head) * DIM;
        store_bf16(to + Sums::first_channel(lane), v);
    };
#pragma unroll 1
    for (int head = warp; head < group; head += num_warps) {
        // The block's sums over the warps that had a slice, lanes l and l + 16 with the weight of
        // warp l.
        const bool has_warp = lane % MAX_WARPS < num_busy;
        const float* own_stats = stats[lane % MAX_WARPS][head];
        const float own_max = has_warp ? own_stats[0] : MINUS_INFINITY;
        float max = own_max;
#pragma unroll
        for (int mask = 1; mask < MAX_WARPS; mask *= 2) max = larger(max, shuffle_xor(max, mask));
        const float own_weight = power_of_two(own_max - shift_of(max));
        float sum = has_warp ? own_weight * own_stats[1] : 0.0f;
        float zero = Codec::HAS_ZERO && has_warp ? own_weight * own_stats[2] : 0.0f;
#pragma unroll
        for (int mask = MAX_WARPS / 2; mask > 0; mask /= 2) {
            sum += shuffle_xor(sum, mask);
            if (Codec::HAS_ZERO) zero += shuffle_xor(zero, mask);
        }
        float v[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = 0;
#pragma unroll 4
        for (int w = 0; w < num_busy; ++w) {
            const u8* other = rings + w * ring_bytes;
            const float* rows = reinterpret_cast<const float*>(other);
            const float weight = bits_float(shuffle_from(float_bits(own_weight), w));
            float row[VALUES];
            load_vector(row, rows + head * Sums::SUMS_ROW + lane * VALUES);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] += weight * row[i];
        }
        if (Codec::HAS_ZERO) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] += zero;
        }
        if (!is_alone) {
            if (POLLS) {
                publish_split(v, sum, max, part_of(head), stats_of(head), split, lane);
                continue;
            }
            if (!merge_by_count(v, sum, max, part_of(head), stats_of(head),
                                call.arrived + first_row + head, split, num_used, lane))
                continue;
        }
        put_out(v, sum, max, head);
    }
    if (!POLLS || is_alone || split >= group) return;

    // Heads split, split + num_used, ... are this block's: first a warp four rows of one of them,
    // then a warp a head.
    __syncthreads();  // the rings are idle again
    float* of_fours = reinterpret_cast<float*>(rings) + lane * VALUES;
    const int num_fours = (num_used + FOUR - 1) / FOUR;
    const int num_merged = (group - split + num_used - 1) / num_used;
#pragma unroll 1
    for (int i = warp; i < num_merged * num_fours; i += num_warps) {
        const int head = split + i / num_fours * num_used, four = i % num_fours;
        float v[VALUES], max;
        const float sum =
            merge_four(v, max, part_of(head), stats_of(head), FOUR * four, num_used, lane);
        store_vector(of_fours + i * DIM, v);
        if (lane == 0 && four == 0) {
            stats[0][i / num_fours][0] = max;
            stats[0][i / num_fours][1] = sum;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < num_merged; i += num_warps) {
        const int head = split + i * num_used;
        unset_stats(stats_of(head), num_used, lane);
        float v[VALUES];
#pragma unroll
        for (int j = 0; j < VALUES; ++j) v[j] = 0;
#pragma unroll 4
        for (int four = 0; four < num_fours; ++four) {
            float of_four[VALUES];
            load_vector(of_four, of_fours + (i * num_fours + four) * DIM);
#pragma unroll
            for (int j = 0; j < VALUES; ++j) v[j] += of_four[j];
        }
        put_out(v, stats[0][i][1], stats[0][i][0], head);
    }
}

#endif
