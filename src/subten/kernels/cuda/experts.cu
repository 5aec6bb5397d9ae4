// The feed-forward of the chosen experts for T <= 8 tokens, in two launches.
//
// Letters: T tokens, K experts a token, A = T * K assignments, E experts, D features, F hidden
// features. gate_up [E, 2F, D] holds F gate rows and then F up rows of each expert, down [E, D, F].
#include "gemv.cuh"

// act_f = silu(sum_d gate_fd h_d) * sum_d up_fd h_d, bf16 [A, F].
//
//   tile i of expert e:   rows g     = gate rows 8i .. 8i + 7        in `mma`'s rows 0 .. 7
//                         rows g + 8 = up   rows 8i .. 8i + 7        in `mma`'s rows 8 .. 15
//
// so that one thread has both halves of its features. The block of threads (a, .) of the first
// assignment of an expert does all of that expert's tokens, its columns; the others end at once.
// Bytes: distinct experts * 2 * F * D * bits / 8, each row once, and A * F * 2 of act.
// IS_ONE: for one token of at most KEPT units a thread, whose experts differ: assignment a is the
// only column of its block, and h is on its way before the expert is known.
template <class Format, int DEPTH, bool IS_ONE>
__global__ void __launch_bounds__(512, 1)
    up_kernel(const u8* codes, const void* scale, const u16* h, const int* topk_id, u16* act,
              int num_assignments, int top_k, int dim, int hidden, int warps_k, int tiles_each) {
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ int columns[MAX_COLUMNS];
    const int thread = threadIdx.x, num_threads = blockDim.x;
    const int lane = thread % WARP, warp = thread / WARP;
    const int warp_k = warp % warps_k, warp_n = warp / warps_k;
    const int warps_n = num_threads / WARP / warps_k;
    const int num_tokens = IS_ONE ? 1 : num_assignments / top_k;
    const int units = dim / 8;
    Shared<Format> shared(dynamic_shared, num_tokens, MAX_COLUMNS, dim);
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
    // Never: a branch keeps the arithmetic for all this on its side of the wait, where it is free.
    if (blocks + num_tiles + cursor.codes_tile + cursor.scale_tile == -0x7fffffff) return;

    wait_for_previous_kernels();
    // Only now: `down_kernel` reads the expert ids before it waits for this kernel, and they are
    // final once a block of this kernel has got past its own wait.
    launch_dependents();
    const int expert = load_from_l2(topk_id + blockIdx.x);
    uint4 kept[KEPT];
    int num_columns = 0;
    if constexpr (IS_ONE) {
        num_columns = 1;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int u = thread + i * num_threads;
            kept[i] = {0, 0, 0, 0};
            if (u < units) kept[i] = load_from_l2(reinterpret_cast<const uint4*>(h) + u);
        }
    } else {
        int first_assignment = -1;
        for (int first = 0; first < num_assignments; first += WARP) {
            const int a = first + lane;
            const bool is_own = a < num_assignments && load_from_l2(topk_id + a) == expert;
            const u32 own = lanes_where(is_own);
            if (first_assignment < 0 && own) first_assignment = first + lowest_bit(own);
            if (warp == 0 && is_own)
                columns[num_columns + count_bits(own & ((1u << lane) - 1))] = a;
            num_columns += count_bits(own);
        }
        if (first_assignment != blockIdx.x) return;
    }
    cursor.move((i64)expert * 2 * hidden, dim);
    float gate_scale = 1.0f, up_scale = 1.0f;
    if (Format::HAS_ROW_SCALE && has_feature) {
        const float* row_scale = reinterpret_cast<const float*>(scale) + (i64)expert * 2 * hidden;
        gate_scale = load_constant_float(row_scale + feature);
        up_scale = load_constant_float(row_scale + hidden + feature);
    }

    // Before the weights are asked for: h comes with the expert's id, and waiting for it later
    // would be waiting for weights too.
    float sums[KEPT] = {};
    if constexpr (IS_ONE) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int u = thread + i * num_threads;
            if (u - thread >= units) break;
            float v[8];
            unpack8(v, kept[i]);
            sums[i] = shared.store_x(0, u, v, u < units);
        }
    }
    auto store_zeros = [&] {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int u = thread + i * num_threads;
            if (u - thread < units) shared.store_zero(u, sums[i], u < units, 0);
        }
    };
    auto store_columns = [&] {
        __syncthreads();
        const int all_units = num_columns * units;
        for (int first = 0; first < all_units; first += num_threads) {
            const int index = first + thread;
            const bool is_inside = index < all_units;
            const int column = is_inside ? index / units : 0, u = is_inside ? index % units : 0;
            float v[8];
            load8(v, h + (i64)(columns[column] / top_k) * dim, u, true);
            shared.store(column, u, v, is_inside, column);
        }
    };
    auto prologue = [&] {
        if constexpr (IS_ONE)
            store_zeros();
        else
            store_columns();
        __syncthreads();
    };

    const int column = lane / 4 < num_columns ? lane / 4 : num_columns - 1;
    float* partial = shared.partial + (warp_n * tiles_each * warps_k + warp_k) * PARTIAL;
    stream<Format, DEPTH>(cursor, num_tiles, first_block, shared, column, lane % 4 * 2, lane,
                          prologue, [&](int tile, const float(&d)[4]) {
                              store_partial(partial + tile * warps_k * PARTIAL, d, lane);
                          });

    __syncthreads();
    if (!has_feature) return;
    gate_scale *= Format::SCALE_FACTOR;
    up_scale *= Format::SCALE_FACTOR;
    const float* own = shared.partial + thread / 8 * warps_k * PARTIAL;
#pragma unroll 1
    for (int c = 0; c < num_columns; ++c) {
        const float gate = sum_partials(own, thread % 8, c, warps_k) * gate_scale;
        const float up = sum_partials(own, thread % 8 + 8, c, warps_k) * up_scale;
        const float value = gate / (1.0f + exponential(-gate)) * up;
        const int a = IS_ONE ? blockIdx.x : columns[c];
        store_value(act, (i64)a * hidden + feature, value, true);
    }
}

// out_d = residual_d + sum_k weight_k sum_f down_edf act_kf for one token.
//
//   block of threads (t, i): rows 16i .. 16i + 15 of the K experts of token t
//   warp (k, s) of it:       expert k, slice s of F;  act row t * K + k is its only column
//
// A warp prepares its own slice of act, so that it waits for no other. The sum over k and s is in
// shared memory, in that order: no atomics. Tokens run fastest in the grid, so that those with a
// common expert meet in L2. A shallow ring takes half of an SM's registers at 16 warps, so that the blocks of the kernels
// around it are there too.
// Bytes: A * D * F * bits / 8 (from memory once for each distinct expert, if L2 serves), A * F * 2
// of act a block of threads, 2 * T * D * itemsize.
template <class Format, int DEPTH>
__global__ void __launch_bounds__(512, DEPTH == 2 ? 2 : 1)
    down_kernel(const u8* codes, const void* scale, const u16* act, const int* topk_id,
                const float* topk_weight, const void* residual, i64 residual_stride, void* out,
                int residual_is_bf16, int top_k, int dim, int hidden, int warps_k,
                int has_early_ids) {
    DYNAMIC_SHARED(dynamic_shared);
    launch_dependents();
    const int thread = threadIdx.x, num_warps = blockDim.x / WARP;
    const int lane = thread % WARP, warp = thread / WARP;
    const int k = warp / warps_k, warp_k = warp % warps_k;
    const int token = blockIdx.x, first_row = blockIdx.y * TILE_ROWS;
    Shared<Format> shared(dynamic_shared, top_k, 2 * top_k, hidden);

    // Ids may be read here if the kernel before is `up_kernel` or `up_ahead_kernel`: they let this one
    // start after their own wait, when the router has ended. So weights are on their way meanwhile.
    if (!has_early_ids) wait_for_previous_kernels();
    const i64 expert_row = (i64)load_from_l2(topk_id + token * top_k + k) * dim + first_row;
    float scale_low = 1.0f, scale_high = 1.0f;
    if (Format::HAS_ROW_SCALE) {
        const float* row_scale = reinterpret_cast<const float*>(scale) + expert_row + lane / 4;
        scale_low = load_constant_float(row_scale);
        scale_high = load_constant_float(row_scale + 8);
    }
    const int num_blocks = hidden / Layout<Format>::BLOCK;
    const int first_block = slice_start(num_blocks, warp_k, warps_k);
    const int blocks = slice_start(num_blocks, warp_k + 1, warps_k) - first_block;
    Cursor<Format> cursor(codes, scale, hidden, expert_row, 8, TILE_ROWS, first_block, blocks,
                          lane);

    const int row = first_row + thread;
    float sum = 0, weight = 0;
    auto prologue = [&] {
        wait_for_previous_kernels();
        // Which `up_ahead_kernel` writes.
        weight = load_from_l2(topk_weight + token * top_k + k) * Format::SCALE_FACTOR;
        constexpr int UNITS = Layout<Format>::BLOCK / 8;
        store_slice(shared, act + (i64)(token * top_k + k) * hidden, k, first_block * UNITS,
                    blocks * UNITS, 2 * k, lane);
        if (thread < TILE_ROWS)
            sum = load_value(residual, token * residual_stride + row, residual_is_bf16);
        sync_warp();
    };

    float* partial = shared.partial + warp * TILE_ROWS;
    stream<Format, DEPTH>(cursor, 1, first_block, shared, k, 2 * k, lane, prologue,
                          [&](int, const float(&d)[4]) {
                              if (lane % 4 != 0) return;
                              partial[lane / 4] = d[0] * (scale_low * weight);
                              partial[lane / 4 + 8] = d[2] * (scale_high * weight);
                          });

    __syncthreads();
    if (thread >= TILE_ROWS) return;
#pragma unroll 8  // eight loads at a time
    for (int w = 0; w < num_warps; ++w) sum += shared.partial[w * TILE_ROWS + thread];
    store_value(out, (i64)token * dim + row, sum, residual_is_bf16);
}
