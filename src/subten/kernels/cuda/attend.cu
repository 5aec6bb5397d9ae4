// Decode attention over paged keys and values that stay encoded: one query token a sequence.
//
// Letters: D channels of a head, N keys of a slice, C bytes. A group is the query heads of one KV
// head. Lane = 4 * g + t of a warp, as in `mma`. Scores are in base 2.
//
//   s_n = c * (scale_n * (q . code_n) + zero_n * sum(q))      c = softmax scale * log2(e)
//   p_n = 2 ** (s_n - max s),   out = (sum_n p_n vscale_n vcode_n + sum_n p_n vzero_n) / sum_n p_n
//
// Work: block (kv head, tile, z) of threads takes split z of one sequence's slices; its warps take
// slices in turn, each with a ring of its own in shared memory, so that warps never wait for one
// another before the end, when a warp a head adds up the block's sums. Where a sequence has several
// splits, the last warp of a head to arrive merges them.
//
// Time: a step is a chain of short launches, so what needs nothing of the kernel ahead is done
// while that one runs: page table, and copies of all slices but the one with the newest row, which
// goes to L2 as it is. Blocks without a slice leave at once.
//
//   page (64 tokens x 1 KV head):  | K codes | K scale | K zero | V codes | V scale | V zero |
//   slice = N of its tokens:       N * D * bits / 8 = 4 KB of K codes, then the same of V
//   int4: N = 64 (the page), 8-bit 32, bf16 16 at D = 128
//   a warp's ring:                 | K of slice 0 | V of slice 0 | K of slice 1 | ...
//
// Products on the tensor cores, the transposed way round, for a group has few heads:
//   S^T [16 keys x 8 heads] = K [16 keys x 16 channels] Q^T
//   O^T [16 channels x 8 heads] = V^T [16 channels x 16 keys] P^T
// The order of channels within a sum is free, so a lane reads 16 bytes of a key as they lie.
// So is the order of keys: row r = 2a + e of tile i is key `first_key(r) + 4 * i` (r < 8), and
// row r + 8 two keys on. Then lane t, which needs V of rows 2t, 2t+1, 2t+8, 2t+9, reads four
// neighbouring keys of quarter t of the slice, and rows 2t, 2t+1 of K lie in one 128-byte line.
//
//   quarter of the slice:   0                    1                    2            3
//   tile 0, rows:           0 1 8 9              3 2 11 10            4 5 12 13    7 6 15 14
//   tile 1, rows:               0 1 8 9              3 2 11 10            ...
//
// Bytes: kv_len * C of pages a (sequence, KV head), once; with Z splits 4 * Z * group * (D + 2)
// written and read again, all in L2. The loop at D = 128 and up to 8 heads, both ways of every
// branch counted (nvdisasm, nvcc 13.0): int4 2.4 instructions an element, 8-bit 4.7, bf16 4.5, of
// the 3.3, 6 and 12 that 132 SMs at 1.75 GHz issue while the bytes of one arrive. Of int4's, 1.05
// are integer ones, which issue every other cycle: two warps a scheduler do not fill it.
//
// Keys at or past the sequence's end, and garbage there: their scores become -infinity, and their V
// scale and zero, or bf16 values, 0 in shared memory, each replaced, not multiplied.
#include "attend_slice.cuh"

#define MAX_WARPS 16

// Hadamard rotation of a row, one bit of the channel after the other: the fast transform. Each bit
// of the channel that v[i] holds must be one of `lane` or of i, whichever.
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

// What the warps of all splits of one head do with their sums (`v` of each lane, `sum`, relative to
// `max`): each leaves them in row `split` of `part` and `stats`. The last one to arrive returns
// true, with those of the whole head:
//
//   v = sum_z 2 ** (max_z - max) v_z,   sum likewise, z in order
//
// Lane l holds the weights of splits l and l + 32; BATCH rows of 4 * D bytes are in flight.
template <int VALUES>
INLINE bool merge_splits(float (&v)[VALUES], float& sum, float max, float* part, float* stats,
                         int* arrived, int split, int num_used, int lane) {
    constexpr int BATCH = 16;
    store_vector(part + (split * WARP + lane) * VALUES, v);
    const float own_stat[2] = {max, sum};
    if (lane == 0) store_vector(stats + 2 * split, own_stat);
    sync_warp();
    int num_before = 0;
    if (lane == 0) {
        num_before = count_arrival(arrived);
        if (num_before == num_used - 1) *arrived = 0;  // for the next launch
    }
    if (shuffle_from(num_before, 0) != num_used - 1) return false;
    sync_warp();

    float stat[2][2] = {{MINUS_INFINITY, 0}, {MINUS_INFINITY, 0}};
#pragma unroll
    for (int j = 0; j < 2; ++j)
        if (lane + j * WARP < num_used) load_from_l2(stat[j], stats + 2 * (lane + j * WARP));
    float rows[BATCH][VALUES];
    const float* from = part + lane * VALUES;
    auto load_rows = [&](int num_left) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) rows[b][i] = 0;
            if (b < num_left) load_from_l2(rows[b], from + b * WARP * VALUES);
        }
        from += BATCH * WARP * VALUES;
    };
    load_rows(num_used);
    max = max_over_lanes<1>(larger(stat[0][0], stat[1][0]));
    float weight[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) weight[j] = power_of_two(stat[j][0] - shift_of(max));
    sum = sum_over_lanes<WARP>(weight[0] * stat[0][1] + weight[1] * stat[1][1]);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = 0;
#pragma unroll 1
    for (int z = 0;;) {
        const float held = z < WARP ? weight[0] : weight[1];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const float of_row = bits_float(shuffle_from(float_bits(held), (z + b) % WARP));
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] += of_row * rows[b][i];
        }
        z += BATCH;
        if (z >= num_used) return true;
        load_rows(num_used - z);
    }
}

template <class Codec, int DIM, int TILES_H>
__global__ void __launch_bounds__(TILES_H == 1 ? 512 : 256, 1)
    attend_kernel(const u16* q, i64 q_stride_t, i64 q_stride_h, i64 q_stride_d, const u8* pages,
                  i64 page_stride, i64 head_stride, const int* page_table, i64 page_table_stride,
                  const i64* position, const int* kv_len, const int* tile_seq,
                  const int* tile_start, u16* out, float* part, float* part_stats, int* arrived,
                  float scale_log2, int group, int num_splits, int min_slices, int num_stages) {
    using P = Part<Codec, DIM>;
    using Sums = WarpSums<Codec, DIM, TILES_H>;
    constexpr int HEADS = Sums::HEADS, VALUES = Sums::VALUES, KEYS = P::KEYS;
    static_assert(HEADS * Sums::SUMS_ROW * 4 <= 2 * P::STAGE, "two stages hold a warp's sums");
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ uint4 q_shared[HEADS * DIM / 8];  // rotated, where `q_place` says
    __shared__ float q_sum[HEADS];
    __shared__ float stats[MAX_WARPS][HEADS][3];  // max, sum, zero of each warp
    launch_dependents();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    u8* ring = dynamic_shared + warp * num_stages * P::STAGE;
    if (lane == 0) {
#pragma unroll 1
        for (int i = 0; i < num_stages; ++i) init_barrier(P::barrier_of(ring + i * P::STAGE));
        publish_barriers();
    }
    sync_warp();

    // The integers of the step, and all rows of pages but the newest of each sequence, are older
    // than the step's first kernel: they need no wait. Blocks of split 0 wait, whatever they do.
    const int kv_head = blockIdx.x, tile = blockIdx.y, split = blockIdx.z;
    const int seq = load_from_l2(tile_seq + tile), token = load_from_l2(tile_start + tile);
    int num_keys = 0;
    if (seq >= 0) {
        // The low word of an int64 that fits it.
        const int seen = load_from_l2(reinterpret_cast<const int*>(position + token)) + 1;
        const int length = load_from_l2(kv_len + seq);
        num_keys = length < seen ? length : seen;
    }
    const int num_slices = (num_keys + KEYS - 1) / KEYS;
    int slices_each = (num_slices + num_splits - 1) / num_splits;
    slices_each = slices_each < min_slices ? min_slices : slices_each;
    const int first = split * slices_each, rest = num_slices - first;
    if (split > 0 && rest <= 0) {
        leave_without_waiting();
        return;
    }
    if (seq < 0) {
        wait_for_previous_kernels();
        return;
    }
    const int end = first + (rest < slices_each ? rest : slices_each);

    // The producer goes through K and V of the warp's slices first + warp, first + warp +
    // num_warps, ... Lane l holds the page of the l-th of the 32 slices that it is at.
    const u8* head_pages = pages + kv_head * head_stride;
    const int* table = page_table + seq * page_table_stride;
    constexpr int SLICES = PAGE_KEYS / KEYS;
    auto load_pages = [&](int slice) {
        slice += lane * num_warps;
        return slice < end ? load_from_l2(table + slice / SLICES) : 0;
    };
    int put_slice = first + warp, put_part = 0, page_ids = load_pages(put_slice);
    auto put = [&](u8* stage) {
        if (put_slice < end) {
            const i64 page = shuffle_from(page_ids, put_part / 2);
            const int is_value = put_part % 2;
            if (lane == 0)
                P::fetch(stage, head_pages + page * page_stride + is_value * P::PAGE_BYTES,
                         put_slice % SLICES * KEYS, is_value);
            ++put_part;
            if (is_value) {
                put_slice += num_warps;
                if (put_part == 2 * WARP) {
                    put_part = 0;
                    page_ids = load_pages(put_slice);
                }
            }
        }
    };
    const int newest = num_slices - 1;
    int num_put = 0;
#pragma unroll 1
    for (; num_put < num_stages && put_slice < newest; ++num_put) put(ring + num_put * P::STAGE);
    if (num_put < num_stages && put_slice == newest && lane == 0) {
        // L2 is where the newest row will be written, so the rest of the slice may wait there.
        const i64 page = load_from_l2(table + newest / SLICES);
#pragma unroll
        for (int is_value = 0; is_value < 2; ++is_value)
            P::prefetch(head_pages + page * page_stride + is_value * P::PAGE_BYTES,
                        newest % SLICES * KEYS);
    }
    wait_for_previous_kernels();
#pragma unroll 1
    for (; num_put < num_stages; ++num_put) put(ring + num_put * P::STAGE);

    // q: a warp rotates a head, rounds it to bf16 and adds it up; heads past the group are zeros.
    u16* q_places = reinterpret_cast<u16*>(q_shared);
#pragma unroll 1
    for (int head = warp; head < HEADS; head += num_warps) {
        float v[VALUES], sum = 0;
        const u16* from = q + token * q_stride_t + (kv_head * group + head) * q_stride_h;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            v[i] = head < group ? low_bf16(from[(i * WARP + lane) * q_stride_d]) : 0.0f;
        if (Codec::IS_ROTATED) rotate(v, lane);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int channel = i * WARP + lane;
            const float rounded = low_bf16(pack_bf16(v[i], 0.0f));
            const float factor = Codec::key_factor(channel, DIM);
            q_places[Sums::q_place(head, channel)] = (u16)pack_bf16(rounded * factor, 0.0f);
            sum += rounded;
        }
        sum = sum_over_lanes<WARP>(sum);
        if (lane == 0) q_sum[head] = sum;
    }
    __syncthreads();

    Sums own(lane, q_places, q_sum);
    u8 *stage = ring, *ring_end = ring + num_stages * P::STAGE;
    int parity = 0;
    auto give_back = [&] {
        sync_warp();
        put(stage);
        stage += P::STAGE;
        if (stage == ring_end) {
            stage = ring;
            parity ^= 1;
        }
    };
#pragma unroll 1
    for (int slice = first + warp; slice < end; slice += num_warps) {
        const int limit = num_keys - slice * KEYS;
        typename Sums::Scores p;
        wait_phase(P::barrier_of(stage), parity);
        own.score(p, stage, scale_log2);
        give_back();
        own.weigh(p, limit);
        wait_phase(P::barrier_of(stage), parity);
        own.clear_tail(stage, limit);
        own.add_values(p, stage);
        give_back();
    }

    // The warps' sums, each in its own ring, which is idle now. A warp a head from here on.
    own.finish(reinterpret_cast<float*>(ring), stats[warp]);
    __syncthreads();
    const bool is_alone = num_slices <= slices_each;
    const int num_busy = end - first < num_warps ? end - first : num_warps;
    const int num_used = (num_slices + slices_each - 1) / slices_each;
#pragma unroll 1
    for (int head = warp; head < group; head += num_warps) {
        // The block's sums over the warps that had a slice, lane l with the weight of warp l.
        const bool has_warp = lane < num_busy;
        const float own_max = has_warp ? stats[lane][head][0] : MINUS_INFINITY;
        const float own_sum = has_warp ? stats[lane][head][1] : 0.0f;
        const float own_zero = has_warp ? stats[lane][head][2] : 0.0f;
        const float max = max_over_lanes<1>(own_max);
        const float own_weight = power_of_two(own_max - shift_of(max));
        float v[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = 0;
#pragma unroll 4
        for (int w = 0; w < num_busy; ++w) {
            const u8* other = dynamic_shared + w * num_stages * P::STAGE;
            const float* rows = reinterpret_cast<const float*>(other);
            const float weight = bits_float(shuffle_from(float_bits(own_weight), w));
            float row[VALUES];
            load_vector(row, rows + head * Sums::SUMS_ROW + lane * VALUES);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] += weight * row[i];
        }
        float sum = sum_over_lanes<WARP>(own_weight * own_sum);
        if (Codec::HAS_ZERO) {
            const float zero = sum_over_lanes<WARP>(own_weight * own_zero);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] += zero;
        }
        if (!is_alone) {
            const i64 row = ((i64)tile * gridDim.x + kv_head) * group + head;
            if (!merge_splits(v, sum, max, part + row * num_splits * DIM,
                              part_stats + row * num_splits * 2, arrived + row, split, num_used,
                              lane))
                continue;
        }
        // A row that saw nothing becomes 0; NaN is not 0, so a poisoned sequence stays NaN.
        const float inverse = 1.0f / (sum == 0.0f ? 1.0f : sum);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] *= inverse;
        if (Codec::IS_ROTATED) rotate(v, lane);
        u16* to = out + (((i64)token * gridDim.x + kv_head) * group + head) * DIM;
        store_bf16(to + Sums::first_channel(lane), v);
    }
}
