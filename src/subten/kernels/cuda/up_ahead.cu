// Gate and up of one token whose experts were chosen before its norm was known (linear_route.cu).
//
//   act_kf = silu(i sum_d gate_fd v_d) * (i sum_d up_fd v_d),   v = x * w in bf16,
//   i = 1 / sqrt(mean(x^2) + eps);   weight_k = softmax(i * r)_k, perhaps over their sum
//
// Letters and tiles as `up_kernel` of experts.cu; r [E] the router's raw scores. A block waits for
// the id of its expert alone and asks for weights at once, while x is still being computed; the
// norm's factor is one number for all of x, and comes in at the end.
// Bytes: K * 2 * F * D * bits / 8, each row once; D * 4 of x a block of threads (from L2); K * F * 2
// of act.
#include "gemv.cuh"
#include "select.cuh"

// Weights of the chosen experts, by one warp, from scores in shared memory.
INLINE void store_expert_weights(float* topk_weight, const float* score, const int* chosen,
                                 float inverse, int num_experts, int top_k, bool renormalize,
                                 float scaling_factor, int lane) {
    int best = TAKEN;
    for (int e = lane; e < num_experts; e += WARP) {
        const int key = sort_key(score[e] * inverse);
        if (key > best) best = key;
    }
    const float largest = key_score(warp_max(best));
    float sum = 0;
    for (int e = lane; e < num_experts; e += WARP) sum += exponential(score[e] * inverse - largest);
    sum = sum_over_lanes<WARP>(sum);
    float own = 0;
    if (lane < top_k) own = exponential(score[chosen[lane]] * inverse - largest) / sum;
    if (renormalize) own /= sum_over_lanes<WARP>(own);
    if (lane < top_k) topk_weight[lane] = own * scaling_factor;
}

// UNITS of 8 inputs are all of x that a thread has. BLOCKS of THREADS should find registers on an
// SM.
template <class Format, int DEPTH, int UNITS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    up_ahead_kernel(const u8* codes, const void* scale, const float* x, const u16* norm_weight,
                    float eps, const float* score, const int* topk_id, float* topk_weight, u16* act,
                    int num_experts, int top_k, int dim, int hidden, int warps_k, int tiles_each,
                    int renormalize, float scaling_factor) {
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ float4 squares[MAX_WARPS / 4];
    __shared__ int chosen[WARP];
    __shared__ int own_expert;
    const int thread = threadIdx.x, num_threads = blockDim.x;
    const int lane = thread % WARP, warp = thread / WARP, num_warps = num_threads / WARP;
    const int warp_k = warp % warps_k, warp_n = warp / warps_k, warps_n = num_warps / warps_k;
    const int units = dim / 8;
    Shared<Format> shared(dynamic_shared, 1, MAX_COLUMNS, dim);
    const int features_each = warps_n * tiles_each * 8;
    const int feature = blockIdx.y * features_each + thread;
    const bool has_feature = thread < features_each && feature < hidden;
    const int num_blocks = dim / Layout<Format>::BLOCK;
    const int first_block = slice_start(num_blocks, warp_k, warps_k);
    const int blocks = slice_start(num_blocks, warp_k + 1, warps_k) - first_block;
    const int first_tile = (blockIdx.y * warps_n + warp_n) * tiles_each;
    const int tiles_left = hidden / 8 - first_tile;
    const int num_tiles = tiles_left < 0 ? 0 : tiles_left < tiles_each ? tiles_left : tiles_each;
    Cursor<Format> cursor(codes, scale, dim, first_tile * 8, hidden, 8, first_block, blocks, lane);
    // One block weighs the experts besides; their scores lie behind all partial sums.
    const bool weighs = blockIdx.x == 0 && blockIdx.y == 0;
    float* all_scores = shared.partial + warps_n * tiles_each * warps_k * PARTIAL;
    uint4 kept[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int u = thread + i * num_threads;
        kept[i] = {0, 0, 0, 0};
        if (u < units) kept[i] = load_constant16(norm_weight + u * 8);
    }
    // Never: a branch keeps the arithmetic for all this on its side of the ids, where it is free.
    if (blocks + num_tiles + cursor.codes_tile + cursor.scale_tile == -0x7fffffff) return;

    // One thread asks, so that the others of all blocks leave the memory to the launch ahead.
    if (thread == 0) {
        int id;
        do id = poll(topk_id + blockIdx.x);
        while (id == UNSET);
        own_expert = id;
    }
    __syncthreads();
    const int expert = own_expert;
    cursor.move((i64)expert * 2 * hidden, dim);
    float gate_scale = 1.0f, up_scale = 1.0f;
    if (Format::HAS_ROW_SCALE && has_feature) {
        const float* row_scale = reinterpret_cast<const float*>(scale) + (i64)expert * 2 * hidden;
        gate_scale = load_constant_float(row_scale + feature);
        up_scale = load_constant_float(row_scale + hidden + feature);
    }

    auto prologue = [&] {
        wait_for_previous_kernels();
        // Only now: `down_kernel` reads the ids before it waits for this kernel, and they are all
        // there once every block of this kernel has come here.
        launch_dependents();
        float whole[UNITS][8] = {};
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int u = thread + i * num_threads;
            if (u < units) load8(whole[i], x, u, false);
        }
        if (weighs) {
#pragma unroll 1
            for (int e = thread; e < num_experts; e += num_threads)
                all_scores[e] = load_from_l2(score + e);
            if (thread < top_k) chosen[thread] = load_from_l2(topk_id + thread);
        }
        float sum = 0;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int u = thread + i * num_threads;
            if (u - thread >= units) break;
            sum += sum_of_squares(whole[i]);
            float v[8], w[8];
            unpack8(w, kept[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = whole[i][j] * w[j];
            shared.store(0, u, v, u < units, 0);
        }
        store_warp_sum(squares, sum_over_lanes<WARP>(sum), warp, num_warps, lane);
        __syncthreads();
    };
    float* partial = shared.partial + (warp_n * tiles_each * warps_k + warp_k) * PARTIAL;
    stream<Format, DEPTH>(cursor, num_tiles, first_block, shared, 0, lane % 4 * 2, lane, prologue,
                          [&](int tile, const float(&d)[4]) {
                              store_partial(partial + tile * warps_k * PARTIAL, d, lane);
                          });

    __syncthreads();
    const float inverse = near_inverse_sqrt(sum_of_warps(squares) * (1.0f / dim) + eps);
    if (weighs && warp == num_warps - 1)
        store_expert_weights(topk_weight, all_scores, chosen, inverse, num_experts, top_k,
                             renormalize, scaling_factor, lane);
    if (!has_feature) return;
    const float factor = Format::SCALE_FACTOR * inverse;
    const float* own = shared.partial + thread / 8 * warps_k * PARTIAL;
    const float gate = sum_partials(own, thread % 8, 0, warps_k) * (gate_scale * factor);
    const float up = sum_partials(own, thread % 8 + 8, 0, warps_k) * (up_scale * factor);
    const float value = gate / (1.0f + exponential(-gate)) * up;
    store_value(act, (i64)blockIdx.x * hidden + feature, value, true);
}
