// y = h W^T (+ bias) (+ residual),   h = x / sqrt(mean(x^2) + eps) * norm_weight rounded to bf16,
// or h = x.
//
// Letters: T <= 8 tokens, N rows, K inputs. W [N, K] in a format of gemv.cuh, row-major:
//
//   block b of threads: tiles  b * warps_n * num_tiles ...        16 rows each
//   warp (n, k) of it:  num_tiles tiles, one after another;  the k-th slice of K of each
//
// The warps k of a tile add their sums in shared memory, in the order of k: no atomics, equal bits
// from equal inputs. One thread finishes one row for all tokens.
// Bytes: N * K * bits / 8 and the scales of weights, once; T * K * itemsize of x a block of
// threads (from L2); T * N * itemsize of y, and of the residual.
#include "gemv.cuh"

// IS_ONE: for one token of at most KEPT units a thread; x is read once, and the sum of squares has
// the order that it has among several tokens.
template <class Format, int DEPTH, bool X_IS_BF16, bool IS_ONE>
__global__ void __launch_bounds__(512, 1)
    linear_kernel(const u8* codes, const void* scale, const void* x, i64 x_stride_bytes,
                  const u16* norm_weight, float eps, const u16* bias, const void* residual,
                  i64 residual_stride, int residual_is_bf16, void* out, int out_is_bf16,
                  int all_tokens, int num_rows, int dim, int warps_k, int tiles_each) {
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ float4 square[MAX_COLUMNS][MAX_WARPS / 4];
    __shared__ float inverses[MAX_COLUMNS];
    launch_dependents();
    const int num_tokens = IS_ONE ? 1 : all_tokens;
    const int thread = threadIdx.x, num_threads = blockDim.x;
    const int lane = thread % WARP, warp = thread / WARP, num_warps = num_threads / WARP;
    const int warp_k = warp % warps_k, warp_n = warp / warps_k, warps_n = num_warps / warps_k;
    Shared<Format> shared(dynamic_shared, num_tokens, MAX_COLUMNS, dim);

    // What the epilogue of this thread's row needs of the weights.
    const int rows_each = warps_n * tiles_each * TILE_ROWS;
    const i64 row = (i64)blockIdx.x * rows_each + thread;
    const bool has_row = thread < rows_each && row < num_rows;
    float row_scale = 1.0f, row_bias = 0.0f;
    if (Format::HAS_ROW_SCALE && has_row)
        row_scale = load_constant_float(reinterpret_cast<const float*>(scale) + row);
    if (bias && has_row) row_bias = low_bf16(load_constant2(bias + row));

    const int units = dim / 8, all_units = num_tokens * units;
    // With bfloat16 x they come with it: it rarely has a norm, and a deep ring needs the registers.
    uint4 kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int index = thread + i * num_threads, u = IS_ONE ? index : index % units;
        kept[i] = {0, 0, 0, 0};
        if (!X_IS_BF16 && norm_weight && index < all_units)
            kept[i] = load_constant16(norm_weight + u * 8);
    }

    const int num_blocks = dim / Layout<Format>::BLOCK;
    const int first_block = slice_start(num_blocks, warp_k, warps_k);
    const int blocks = slice_start(num_blocks, warp_k + 1, warps_k) - first_block;
    const int first_tile = (blockIdx.x * warps_n + warp_n) * tiles_each;
    const int tiles_left = num_rows / TILE_ROWS - first_tile;
    const int num_tiles = tiles_left < 0 ? 0 : tiles_left < tiles_each ? tiles_left : tiles_each;
    Cursor<Format> cursor(codes, scale, dim, (i64)first_tile * TILE_ROWS, 8, TILE_ROWS, first_block,
                          blocks, lane);

    auto load_residual = [&](int t) {
        if (!residual || !has_row || t >= num_tokens) return 0.0f;
        return load_value(residual, t * residual_stride + row, residual_is_bf16);
    };
    float next = 0;

    auto prepare_one = [&] {
        wait_for_previous_kernels();
        uint4 bits[KEPT] = {};      // of bfloat16 x
        float whole[KEPT][8] = {};  // of float32 x
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int u = thread + i * num_threads;
            if (u >= units) continue;
            if constexpr (X_IS_BF16) {
                bits[i] = reinterpret_cast<const uint4*>(x)[u];
                if (norm_weight) kept[i] = load_constant16(norm_weight + u * 8);
            } else {
                load8(whole[i], x, u, false);
            }
        }
        auto get = [&](float(&v)[8], int i) {
            if constexpr (X_IS_BF16) {
                unpack8(v, bits[i]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = whole[i][j];
            }
        };
        next = load_residual(0);
        float inverse = 1.0f;
        if (norm_weight) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                float v[8];
                get(v, i);
                sum += sum_of_squares(v);
            }
            store_warp_sum(square[0], sum_over_lanes<WARP>(sum), warp, num_warps, lane);
            __syncthreads();
            inverse = near_inverse_sqrt(sum_of_warps(square[0]) * (1.0f / dim) + eps);
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int u = thread + i * num_threads;
            if (u - thread >= units) break;
            float v[8], w[8];
            get(v, i);
            if (norm_weight) {
                unpack8(w, kept[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = v[j] * inverse * w[j];
            }
            shared.store(0, u, v, u < units, 0);
        }
        __syncthreads();
    };
    auto prepare = [&] {
        wait_for_previous_kernels();
        const u8* x_bytes = reinterpret_cast<const u8*>(x);
        if (norm_weight) {
            // Two tokens at a time, so that their loads overlap. A token's sum has the same order
            // whatever the number of tokens.
#pragma unroll 1
            for (int t = 0; t < num_tokens; t += 2) {
                const int other = t + 1 < num_tokens ? t + 1 : t;
                float sum = 0, other_sum = 0;
#pragma unroll 1
                for (int u = thread; u < units; u += num_threads) {
                    float v[8], w[8];
                    load8(v, x_bytes + t * x_stride_bytes, u, X_IS_BF16);
                    load8(w, x_bytes + other * x_stride_bytes, u, X_IS_BF16);
                    sum += sum_of_squares(v);
                    other_sum += sum_of_squares(w);
                }
                sum = sum_over_lanes<WARP>(sum);
                other_sum = sum_over_lanes<WARP>(other_sum);
                store_warp_sum(square[t], sum, warp, num_warps, lane);
                store_warp_sum(square[other], other_sum, warp, num_warps, lane);
            }
            __syncthreads();
            if (thread < num_tokens)
                inverses[thread] = near_inverse_sqrt(sum_of_warps(square[thread]) * (1.0f / dim) + eps);
            __syncthreads();
        }
#pragma unroll 1
        for (int first = 0, i = 0; first < all_units; first += num_threads, ++i) {
            const int index = first + thread;
            const bool is_inside = index < all_units;
            const int t = is_inside ? index / units : 0, u = is_inside ? index % units : 0;
            float v[8];
            load8(v, x_bytes + t * x_stride_bytes, u, X_IS_BF16);
            if (norm_weight) {
                uint4 bits = i == 0 ? kept[0] : kept[1];
                if (X_IS_BF16 || i >= KEPT) bits = load_constant16(norm_weight + u * 8);
                float w[8];
                unpack8(w, bits);
                const float inverse = inverses[t];
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = v[j] * inverse * w[j];
            }
            shared.store(t, u, v, is_inside, t);
        }
        __syncthreads();
    };
    auto prologue = [&] {
        if constexpr (IS_ONE)
            prepare_one();
        else
            prepare();
    };

    const int column = lane / 4 < num_tokens ? lane / 4 : num_tokens - 1;
    float* partial = shared.partial + (warp_n * tiles_each * warps_k + warp_k) * PARTIAL;
    stream<Format, DEPTH>(cursor, num_tiles, first_block, shared, column, lane % 4 * 2, lane,
                          prologue, [&](int tile, const float(&d)[4]) {
                              store_partial(partial + tile * warps_k * PARTIAL, d, lane);
                          });

    if (!IS_ONE) next = load_residual(0);
    __syncthreads();
    if (!has_row) return;
    const float factor = row_scale * Format::SCALE_FACTOR;
    const float* own = shared.partial + thread / TILE_ROWS * warps_k * PARTIAL;
#pragma unroll 1  // short code: it comes cold from memory
    for (int t = 0; t < num_tokens; ++t) {
        const float before = next + row_bias;
        next = load_residual(t + 1);
        const float sum = sum_partials(own, thread % TILE_ROWS, t, warps_k);
        store_value(out, (i64)t * num_rows + row, sum * factor + before, out_is_bf16);
    }
}
