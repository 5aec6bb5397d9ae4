// Which experts each token of a batch goes to, the normed rows h that the experts read, and the
// order of the assignments by expert: one launch.
//
//   h_d = x_d / sqrt(mean(x^2) + eps) * w_d        score_e = sum_d gate_ed h_d   (all FP32)
//
// Letters: T tokens, D features, E experts, K experts a token, A = T * K assignments. gate [E, D]
// float32:
//
//            | D / 8 features | D / 8 features | ...     block s of a cluster of 8: its features of
//   E rows   |                |                |         the whole gate and of TT tokens, in shared
//                                                        memory; a thread one expert and a part of
//                                                        the features, all tokens at once
//
// Blocks of a cluster read each other's sums: token t is picked by a warp of block t % 8. The block
// that arrives last of all orders the assignments: a stable sort by counting, a warp for each
// eighth of them.
// A token's sums have one order, whoever shares its cluster.
// Bytes: E * D * 4 of gate for each TT tokens (from L2), T * D * itemsize of x, 2 * T * D of h. For
// 32 tokens of qwen3-30b-a3b (TT = 4) 8 MB from L2, 128 KB an SM, in 10 us.
#include "cluster_device.cuh"
#include "gemv.cuh"
#include "select.cuh"

#define BATCH_THREADS 256
#define BATCH_WARPS (BATCH_THREADS / WARP)
#define SLICES 8

// Rows of the gate are 16 bytes longer than their features, so that no two of a quarter warp meet in
// a bank.
INLINE int gate_row(int width) { return width + 4; }

INLINE float dot(float4 a, float4 b, float sum) {
    sum = multiply_add(a.x, b.x, sum);
    sum = multiply_add(a.y, b.y, sum);
    sum = multiply_add(a.z, b.z, sum);
    return multiply_add(a.w, b.w, sum);
}

// Writes order and starts, by one block; `numbers`: room for A + (BATCH_WARPS + 1) * EXPERTS.
template <int EXPERTS>
INLINE void order_by_expert(const int* topk_id, int* expert_start, int* order, int* numbers,
                            int num_assignments, int num_experts, int thread) {
    const int lane = thread % WARP, warp = thread / WARP;
    int* ids = numbers;
    int* counts = numbers + num_assignments;  // [warp][expert]
    int* sums = counts + BATCH_WARPS * EXPERTS;
    __syncthreads();
    for (int i = thread; i < BATCH_WARPS * EXPERTS; i += BATCH_THREADS) counts[i] = 0;
#pragma unroll 8  // their latencies together
    for (int i = thread; i < num_assignments; i += BATCH_THREADS) ids[i] = load_from_l2(topk_id + i);
    __syncthreads();
    const int steps = (num_assignments + BATCH_THREADS - 1) / BATCH_THREADS;
    int* own = counts + warp * EXPERTS;
    for (int i = 0; i < steps; ++i) {
        const int a = (warp * steps + i) * WARP + lane;
        const int id = a < num_assignments ? ids[a] : -1;
        const u32 same = lanes_like(id);
        if (id >= 0 && lane == lowest_bit(same)) own[id] += count_bits(same);
        sync_warp();
    }
    __syncthreads();
    // Thread e: where its expert begins, and in it the assignments of each warp.
    static_assert(EXPERTS <= BATCH_THREADS, "a thread counts for one expert");
    int total = 0;
    if (thread < EXPERTS)
        for (int w = 0; w < BATCH_WARPS; ++w) total += counts[w * EXPERTS + thread];
    const int up_to = sum_to_lane(total, lane);
    if (lane == WARP - 1 && thread < EXPERTS) sums[warp] = up_to;
    __syncthreads();
    if (thread < EXPERTS) {
        int start = up_to - total;
        for (int w = 0; w < warp; ++w) start += sums[w];
        if (thread < num_experts) expert_start[thread] = start;
        for (int w = 0; w < BATCH_WARPS; ++w) {
            const int count = counts[w * EXPERTS + thread];
            counts[w * EXPERTS + thread] = start;
            start += count;
        }
    }
    if (thread == 0) expert_start[num_experts] = num_assignments;
    __syncthreads();
    for (int i = 0; i < steps; ++i) {
        const int a = (warp * steps + i) * WARP + lane;
        const int id = a < num_assignments ? ids[a] : -1;
        const u32 same = lanes_like(id);
        if (id >= 0) order[own[id] + count_bits(same & ((1u << lane) - 1))] = a;
        sync_warp();
        if (id >= 0 && lane == lowest_bit(same)) own[id] += count_bits(same);
        sync_warp();
    }
}

// KEYS: experts of a lane that picks, TT: tokens of a cluster. `expert_start` is null without order.
template <int KEYS, int TT>
__global__ void __launch_bounds__(BATCH_THREADS, 1)
    route_batch_kernel(const void* x, i64 x_stride_bytes, int x_is_bf16, const u16* norm_weight,
                       const float* gate, u16* h, int* topk_id, float* topk_weight,
                       int* expert_start, int* order, int* arrivals, int num_tokens,
                       int num_experts, int dim, int top_k, int renormalize, float eps,
                       float scaling_factor) {
    DYNAMIC_SHARED(dynamic_shared);
    constexpr int EXPERTS = WARP * KEYS, PARTS = BATCH_THREADS / EXPERTS;
    launch_dependents();
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int slice = blockIdx.x, width = dim / SLICES, units = width / 8;
    const int first_token = blockIdx.y * TT, left = num_tokens - first_token;
    const int count = left < TT ? left : TT;

    float* x_TW = reinterpret_cast<float*>(dynamic_shared);  // x * w
    float* part = x_TW + TT * width;                         // [part][token][expert]
    float* square = part + PARTS * TT * EXPERTS;
    float* inverse = square + TT;
    float* gate_EW = inverse + TT;
    for (int e = warp; e < num_experts; e += BATCH_WARPS)
        for (int i = lane; i < 2 * units; i += WARP)
            copy16_weights(shared_at(gate_EW + e * gate_row(width) + i * 4),
                           gate + (i64)e * dim + slice * width + i * 4);
    end_copies();
    wait_for_previous_kernels();

    const u8* x_bytes = reinterpret_cast<const u8*>(x);
#pragma unroll 4  // their latencies together
    for (int t = warp; t < count; t += BATCH_WARPS) {
        float sum = 0;
        for (int u = lane; u < units; u += WARP) {
            float v[8], w[8];
            load8(v, x_bytes + (first_token + t) * x_stride_bytes, slice * units + u, x_is_bf16);
            unpack8(w, load_constant16(norm_weight + slice * width + u * 8));
            sum += sum_of_squares(v);
            float4* to = reinterpret_cast<float4*>(x_TW + t * width + u * 8);
            to[0] = {v[0] * w[0], v[1] * w[1], v[2] * w[2], v[3] * w[3]};
            to[1] = {v[4] * w[4], v[5] * w[5], v[6] * w[6], v[7] * w[7]};
        }
        sum = sum_over_lanes<WARP>(sum);
        if (lane == 0) square[t] = sum;
    }
    wait_copies<0>();
    __syncthreads();

    const int expert = thread % EXPERTS, own_part = thread / EXPERTS;
    if (expert < num_experts) {
        const int steps = width / 4, begin = steps * own_part / PARTS;
        const int end = steps * (own_part + 1) / PARTS;
        const float4* g = reinterpret_cast<const float4*>(gate_EW + expert * gate_row(width));
        float score[TT] = {};
        for (int k = begin; k < end; ++k) {
            const float4 weights = g[k];
#pragma unroll
            for (int t = 0; t < TT; ++t)
                score[t] = dot(weights, reinterpret_cast<const float4*>(x_TW + t * width)[k], score[t]);
        }
#pragma unroll
        for (int t = 0; t < TT; ++t) part[(own_part * TT + t) * EXPERTS + expert] = score[t];
    }
    sync_cluster();

    if (thread < count) {
        float sum = 0;
#pragma unroll
        for (int s = 0; s < SLICES; ++s) sum += load_from_block(shared_at(square + thread), s);
        inverse[thread] = near_inverse_sqrt(sum * (1.0f / dim) + eps);
    }
    __syncthreads();
    for (int t = slice + SLICES * warp; t < count; t += SLICES * BATCH_WARPS) {
        float value[KEYS] = {};
#pragma unroll
        for (int p = 0; p < SLICES * PARTS; ++p) {
            const float* from = part + (p % PARTS * TT + t) * EXPERTS + lane * KEYS;
#pragma unroll
            for (int i = 0; i < KEYS; ++i)
                value[i] += load_from_block(shared_at(from + i), p / PARTS);
        }
#pragma unroll
        for (int i = 0; i < KEYS; ++i) value[i] *= inverse[t];
        const i64 at = (i64)(first_token + t) * top_k;
        const Picks picks = select_experts(value, num_experts, top_k, lane,
                                           [&](int k, int expert) { topk_id[at + k] = expert; });
        const float weight = expert_weight(value, picks, num_experts, top_k, renormalize,
                                           scaling_factor, lane);
        if (lane < top_k) topk_weight[at + lane] = weight;
    }
    for (int t = warp; t < count; t += BATCH_WARPS)
        for (int u = lane; u < units; u += WARP) {
            const float4* from = reinterpret_cast<const float4*>(x_TW + t * width + u * 8);
            const float4 a = from[0], b = from[1];
            const float i = inverse[t];
            const float v[8] = {a.x * i, a.y * i, a.z * i, a.w * i,
                                b.x * i, b.y * i, b.z * i, b.w * i};
            reinterpret_cast<uint4*>(h + (i64)(first_token + t) * dim + slice * width)[u] =
                Bf16::order(v);
        }
    // Others may still read this block's sums.
    sync_cluster();
    if (!expert_start) return;
    int* is_last = reinterpret_cast<int*>(square);
    if (thread == 0) {
        *is_last = arrive(arrivals) == (int)(gridDim.x * gridDim.y) - 1;
        if (*is_last) *arrivals = 0;
    }
    __syncthreads();
    if (*is_last)
        order_by_expert<EXPERTS>(topk_id, expert_start, order,
                                 reinterpret_cast<int*>(dynamic_shared), num_tokens * top_k, num_experts, thread);
}
