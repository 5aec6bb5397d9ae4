// Decode attention over paged keys and values that stay encoded: one query token a sequence.
//
// Letters: D channels of a head, N keys of a slice, C bytes. A group is the query heads of one KV
// head. Lane = 4 * g + t of a warp, as in `mma`. Scores are in base 2.
//
//   s_n = c * (scale_n * (q . code_n) + zero_n * sum(q))      c = softmax scale * log2(e)
//   p_n = 2 ** (s_n - max s),   out = (sum_n p_n vscale_n vcode_n + sum_n p_n vzero_n) / sum_n p_n
//
// Work: block (z, kv head, tile) of threads takes split z of one sequence's slices; its warps take
// slices in turn, each with a ring of its own in shared memory, so that warps never wait for one
// another before the end. The last block of a (tile, kv head) to arrive merges the splits.
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
// branch counted (cuobjdump, nvcc 13.0): int4 2.6 instructions an element, 8-bit 4.7, bf16 4.6, of
// the 3.3, 6 and 12 that 132 SMs at 1.75 GHz issue while the bytes of one arrive.
//
// Keys at or past the sequence's end, and garbage there: their scores become -infinity, their V
// scale and zero 0, and bf16 values 0, each replaced, not multiplied.
#include "attend_slice.cuh"

#define MAX_WARPS 16

INLINE void store_vector(float* to, const float (&v)[2]) {
    *reinterpret_cast<float2*>(to) = {v[0], v[1]};
}
INLINE void store_vector(float* to, const float (&v)[4]) {
    *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
}

// Hadamard rotation of a row whose channel 32 * i + lane is v[i]: the fast transform, one bit of
// the channel after the other.
template <int VALUES>
INLINE void rotate(float (&v)[VALUES], int lane) {
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const float other = shuffle_xor(v[i], mask);
            v[i] = lane & mask ? other - v[i] : v[i] + other;
        }
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

template <class Codec, int DIM, int TILES_H>
__global__ void __launch_bounds__(TILES_H == 1 ? 512 : 256, 1)
    attend_kernel(const u16* q, i64 q_stride_t, i64 q_stride_h, i64 q_stride_d, const u8* pages,
                  i64 page_stride, i64 head_stride, const int* page_table, i64 page_table_stride,
                  const i64* position, const int* kv_len, const int* tile_seq,
                  const int* tile_start, u16* out, float* part, float* part_stats, int* arrived,
                  float scale_log2, int group, int num_splits, int min_slices, int num_stages) {
    using P = Part<Codec, DIM>;
    using Sums = WarpSums<Codec, DIM, TILES_H>;
    constexpr int HEADS = Sums::HEADS, STEPS = Sums::STEPS, VALUES = DIM / WARP, KEYS = P::KEYS;
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ u16 q_rows[HEADS][DIM + 2];  // rotated
    __shared__ float q_sum[HEADS];
    __shared__ float stats[MAX_WARPS][HEADS][3];  // max, sum, zero of each warp
    __shared__ float weights[MAX_WARPS][HEADS], block_max[HEADS];
    __shared__ float merged[HEADS][DIM + 1];      // of the block, not yet divided by the sum
    __shared__ int num_before;
    launch_dependents();
    const int thread = threadIdx.x, num_threads = blockDim.x;
    const int lane = thread % WARP, warp = thread / WARP, num_warps = num_threads / WARP;
    u8* ring = dynamic_shared + warp * num_stages * P::STAGE;
    if (lane == 0) {
#pragma unroll 1
        for (int i = 0; i < num_stages; ++i) init_barrier(P::barrier_of(ring + i * P::STAGE));
        publish_barriers();
    }
    sync_warp();
    wait_for_previous_kernels();

    const int split = blockIdx.x, kv_head = blockIdx.y, tile = blockIdx.z;
    const int seq = load_from_l2(tile_seq + tile), token = load_from_l2(tile_start + tile);
    if (seq < 0) return;
    // The low word of an int64 that fits it.
    const int seen = load_from_l2(reinterpret_cast<const int*>(position + token)) + 1;
    const int length = load_from_l2(kv_len + seq), num_keys = length < seen ? length : seen;
    const int num_slices = (num_keys + KEYS - 1) / KEYS;
    int slices_each = (num_slices + num_splits - 1) / num_splits;
    slices_each = slices_each < min_slices ? min_slices : slices_each;
    const int first = split * slices_each, rest = num_slices - first;
    if (split > 0 && rest <= 0) return;
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
#pragma unroll 1
    for (int i = 0; i < num_stages; ++i) put(ring + i * P::STAGE);

    // q: a warp rotates a head, rounds it to bf16 and adds it up; heads past the group are zeros.
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
            const u32 rounded = pack_bf16(v[i], 0.0f);
            q_rows[head][i * WARP + lane] = (u16)rounded;
            sum += low_bf16(rounded);
        }
        sum = sum_over_lanes<WARP>(sum);
        if (lane == 0) q_sum[head] = sum;
    }
    __syncthreads();

    Sums own(lane, q_rows, q_sum);
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
        own.add_values(p, stage, limit);
        give_back();
    }

    // The warps' sums, each in its own ring, which is idle now; then the block's.
    own.finish(reinterpret_cast<float4*>(ring), stats[warp]);
    __syncthreads();
    // Weights 2 ** (max_w - max) of the warps' sums, each warp and head by one thread.
#pragma unroll 1
    for (int i = thread; i < num_warps * HEADS; i += num_threads) {
        const int w = i / HEADS, head = i % HEADS;
        float max = MINUS_INFINITY;
#pragma unroll 4
        for (int other = 0; other < num_warps; ++other) max = larger(max, stats[other][head][0]);
        const float factor = power_of_two(stats[w][head][0] - shift_of(max));
        weights[w][head] = factor;
        stats[w][head][1] *= factor;
        stats[w][head][2] *= factor;
        if (w == 0) block_max[head] = max;
    }
    __syncthreads();
#pragma unroll 1
    for (int item = thread; item < TILES_H * STEPS * WARP; item += num_threads) {
        const int item_g = item % WARP / 4, m = item / WARP % STEPS;
        const int head = item / WARP / STEPS * 8 + item % 4 * 2;
        float total[4] = {0, 0, 0, 0};
#pragma unroll 4
        for (int w = 0; w < num_warps; ++w) {
            const u8* other = dynamic_shared + w * num_stages * P::STAGE;
            const float4 a = reinterpret_cast<const float4*>(other)[item];
            const float low = weights[w][head], high = weights[w][head + 1];
            const float low_zero = stats[w][head][2], high_zero = stats[w][head + 1][2];
            total[0] += low * a.x + low_zero;
            total[1] += high * a.y + high_zero;
            total[2] += low * a.z + low_zero;
            total[3] += high * a.w + high_zero;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) merged[head + j % 2][Sums::channel(m, item_g, j)] = total[j];
    }
    __syncthreads();

    // A warp a head from here on; channel 32 * i + lane is value i.
    const bool is_alone = num_slices <= slices_each;
    const i64 pair = (i64)tile * gridDim.y + kv_head;
    const int num_used = (num_slices + slices_each - 1) / slices_each;
    auto block_sum = [&](int head) {
        return sum_over_lanes<WARP>(lane < num_warps ? stats[lane][head][1] : 0.0f);
    };
    if (!is_alone) {
#pragma unroll 1
        for (int head = warp; head < group; head += num_warps) {
            const i64 row = (pair * group + head) * num_splits + split;
            const float sum = block_sum(head);
            float v[VALUES];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] = merged[head][i * WARP + lane];
            store_vector(part + (row * WARP + lane) * VALUES, v);
            const float stat[2] = {block_max[head], sum};
            if (lane == 0) store_vector(part_stats + 2 * row, stat);
        }
        __syncthreads();
        if (thread == 0) num_before = arrive(arrived + pair);
        __syncthreads();
        if (num_before != num_used - 1) return;
        if (thread == 0) arrived[pair] = 0;  // for the next launch
    }

    // out = sum_z 2 ** (max_z - max) part_z / sum_z 2 ** (max_z - max) sum_z, z in order. Lane l
    // holds the weights of splits l and l + 32; BATCH rows of 4 * D bytes are in flight.
    constexpr int BATCH = 16;
#pragma unroll 1
    for (int head = warp; head < group; head += num_warps) {
        float v[VALUES], sum;
        if (is_alone) {
            sum = block_sum(head);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] = merged[head][i * WARP + lane];
        } else {
            const i64 row = (pair * group + head) * num_splits;
            float stat[2][2] = {{MINUS_INFINITY, 0}, {MINUS_INFINITY, 0}};
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (lane + j * WARP < num_used)
                    load_from_l2(stat[j], part_stats + 2 * (row + lane + j * WARP));
            const float max = max_over_lanes<1>(larger(stat[0][0], stat[1][0]));
            float weight[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) weight[j] = power_of_two(stat[j][0] - shift_of(max));
            sum = sum_over_lanes<WARP>(weight[0] * stat[0][1] + weight[1] * stat[1][1]);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) v[i] = 0;
#pragma unroll 1
            for (int z = 0; z < num_used; z += BATCH) {
                float rows[BATCH][VALUES];
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const int last = num_used - 1, from = z + b < last ? z + b : last;
                    load_from_l2(rows[b], part + ((row + from) * WARP + lane) * VALUES);
                }
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const float held = z + b < WARP ? weight[0] : weight[1];
                    const float own_weight =
                        bits_float(shuffle_from(float_bits(held), (z + b) % WARP));
#pragma unroll
                    for (int i = 0; i < VALUES; ++i)
                        v[i] = z + b < num_used ? v[i] + own_weight * rows[b][i] : v[i];
                }
            }
        }
        // A row that saw nothing becomes 0; NaN is not 0, so a poisoned sequence stays NaN.
        const float inverse = 1.0f / (sum == 0.0f ? 1.0f : sum);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] *= inverse;
        if (Codec::IS_ROTATED) rotate(v, lane);
        u16* to = out + (((i64)token * gridDim.y + kv_head) * group + head) * DIM;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) to[i * WARP + lane] = (u16)pack_bf16(v[i], 0.0f);
    }
}
