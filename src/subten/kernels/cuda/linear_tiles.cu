// y = h W^T (+ bias) (+ residual) for more tokens than a matrix-vector product takes,
// h = x / sqrt(mean(x^2) + eps) * norm_weight rounded to bf16, or h = x.
//
// Letters: T tokens, N rows, K inputs, S blocks of a cluster. W [N, K] in a format of
// weight_tiles.cuh, row-major:
//
//   grid (S, tiles of 8 * NT tokens, lanes of rows), a cluster along x:
//
//            | K / S inputs | K / S inputs | ...      block s of a cluster: its inputs of all tokens
//     32 rows|  warp (n, k) |              |          in shared memory, 32 rows a warp n, cut once
//     32 rows|              |              |          more along K for the warps k
//
// so that a block reads little of x, all weights of a small matrix are on their way at once, and no
// SM idles. Sums of S * warps_k parts meet in shared memory, each block of the cluster finishing
// its share of them, in the order of K: no atomics, and a token's bits do not depend on the others.
// A large matrix has S = 1: a block keeps its tokens and walks over groups of rows, weights of the
// next group on their way while one ends.
//
// Bytes: N * K * bits / 8 and the scales of weights, once for all tiles of tokens (L2 serves the
// later ones); T * K * itemsize of x for each group of rows at once on the machine (from L2); T * N
// * itemsize of y, and of the residual. FP8, 32 tokens of qwen3-30b-a3b: 12 us for the 10 MB of qkv,
// of which the memory needs 2.3; 133 for the 312 MB of the head, of which it needs 68.
#include "cluster_device.cuh"
#include "weight_tiles.cuh"

#define TILE_ROWS 32

INLINE int part_start(int num_blocks, int part, int parts) { return num_blocks * part / parts; }

INLINE void load8(float (&v)[8], const float* from) {
    const float4 a = reinterpret_cast<const float4*>(from)[0];
    const float4 b = reinterpret_cast<const float4*>(from)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

INLINE float bf16_at(uint4 bits, int i) {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    return i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
}

// The tokens of a block in its shared memory, `units` units of 8 inputs each from unit `first` on;
// a warp takes whole tokens.
template <class Format, int WARPS>
struct Tokens {
    const u8* x;  // of the tile's first token
    i64 stride_bytes;
    u8* rows;
    int row_bytes, count, first, units, warp, lane;

    INLINE u8* at(int t, int u) const {
        return rows + t * row_bytes + Sums<Format, 1>::unit_byte(u);
    }

    INLINE void copy() const {
        for (int t = warp; t < count; t += WARPS) {
            const u8* from = x + t * stride_bytes + first * 16;
            for (int u = lane; u < units; u += WARP) copy16(shared_at(at(t, u)), from + u * 16);
        }
        end_copies();
        wait_copies<0>();
        __syncthreads();
    }

    // `raw`: room for float32 inputs, `squares` and `inverses` for a number a token.
    INLINE void copy_normed(float* raw, float* squares, float* inverses, const u16* norm_weight,
                            float eps, int dim, int num_slices) const {
        const int width = units * 8;
        for (int t = warp; t < count; t += WARPS) {
            const u8* from = x + t * stride_bytes + first * 32;
            for (int i = lane; i < 2 * units; i += WARP)
                copy16(shared_at(raw + t * width + i * 4), from + i * 16);
        }
        end_copies();
        wait_copies<0>();
        // A lane reads below what another of its warp has copied.
        sync_warp();
        for (int t = warp; t < count; t += WARPS) {
            float square = 0;
            for (int i = lane; i < 2 * units; i += WARP) {
                const float4 v = *reinterpret_cast<const float4*>(raw + t * width + i * 4);
                square += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
            }
            square = sum_over_lanes<WARP>(square);
            if (lane == 0) squares[t] = square;
        }
        if (num_slices > 1)
            sync_cluster();
        else
            __syncthreads();
        for (int own = warp * WARP + lane; own < count; own += WARP * WARPS) {
            float square = 0;
            const SharedAt from = shared_at(squares + own);
            for (int s = 0; s < num_slices; ++s)
                square += num_slices > 1 ? load_from_block(from, s) : squares[own];
            inverses[own] = near_inverse_sqrt(square * (1.0f / dim) + eps);
        }
        __syncthreads();
        for (int u = lane; u < units; u += WARP) {
            const uint4 weight = load_constant16(norm_weight + (first + u) * 8);
            for (int t = warp; t < count; t += WARPS) {
                float v[8];
                load8(v, raw + t * width + u * 8);
                const float inverse = inverses[t];
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = v[i] * inverse * bf16_at(weight, i);
                *reinterpret_cast<uint4*>(at(t, u)) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                                       pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
            }
        }
        __syncthreads();
    }
};

// What stands around the sums of four neighbouring rows, of one token.
struct Around {
    float factor[4], bias[4], residual[4];
};

// Shared memory: tokens, then the larger of float32 tokens and partial sums (twice, `buffer_floats`
// apart, where a block has several groups of rows), squares and inverses.
template <class Format, int NT, int WARPS, int DEPTH, bool IS_NORMED>
__global__ void __launch_bounds__(WARP* WARPS, 1)
    linear_tiles_kernel(const u8* codes, const void* scale, const void* x, i64 x_stride_bytes,
                        const u16* norm_weight, float eps, const u16* bias, const void* residual,
                        i64 residual_stride, int residual_is_bf16, void* out, int out_is_bf16,
                        int all_tokens, int num_rows, int dim, int warps_k, int row_bytes,
                        int buffer_floats, int region_bytes) {
    DYNAMIC_SHARED(dynamic_shared);
    constexpr int COLUMNS = 8 * NT;
    launch_dependents();
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int warp_k = warp % warps_k, warp_n = warp / warps_k, warps_n = WARPS / warps_k;
    const int slice = blockIdx.x, num_slices = gridDim.x;
    const int first_token = blockIdx.y * COLUMNS, tokens_left = all_tokens - first_token;
    const int num_tokens = tokens_left < COLUMNS ? tokens_left : COLUMNS;

    // Of K, in blocks: this block's slice, and this warp's part of it.
    const int num_blocks = dim / (4 * Format::CODES), parts = num_slices * warps_k;
    const int first_part = slice * warps_k, first_block = part_start(num_blocks, first_part, parts);
    const int slice_blocks = part_start(num_blocks, first_part + warps_k, parts) - first_block;
    const int own_first = part_start(num_blocks, first_part + warp_k, parts);
    const int own_blocks = part_start(num_blocks, first_part + warp_k + 1, parts) - own_first;

    const int rows_each = TILE_ROWS * warps_n;
    const int num_groups = (num_rows + rows_each - 1) / rows_each;
    // A warp past the last row repeats the last 32, and nobody reads its sums.
    auto cursor_of = [&](int group) {
        const int own = group * rows_each + warp_n * TILE_ROWS;
        const int row = (own < num_rows ? own : num_rows - TILE_ROWS) + lane / 4 * 4;
        Cursor<Format> cursor(codes, scale, row, {1, 2}, dim, lane);
        cursor.codes += own_first * 64;
        cursor.scale += own_first;
        return cursor;
    };
    int group = blockIdx.z, asked = group, asked_left = own_blocks;
    Cursor<Format> cursor = cursor_of(group);
    Block<Format> ring[DEPTH];
    auto load = [&](Block<Format>& block) {
        cursor.load(block);
        if (--asked_left > 0) return;
        asked += gridDim.z;
        asked_left = own_blocks;
        if (asked < num_groups) cursor = cursor_of(asked);
    };
#pragma unroll
    for (int s = 0; s < DEPTH; ++s)
        if (s < own_blocks) load(ring[s]);

    // Sums that this thread finishes: four rows, the same for every token, so that what their
    // epilogue needs is asked for a group ahead; of the tokens, those of the cluster's block.
    const int quads = rows_each / 4, at_once = WARP * WARPS / quads;
    const int quad = thread % quads, first_t = thread < at_once * quads
                                                   ? slice + thread / quads * num_slices
                                                   : num_tokens;
    auto factors = [&](Around& around, int of_group) {
        const int row = of_group * rows_each + quad * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) around.factor[i] = 1, around.bias[i] = 0;
        if (row >= num_rows) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (Format::HAS_ROW_SCALE)
                around.factor[i] =
                    load_constant_float(reinterpret_cast<const float*>(scale) + row + i);
            if (bias) around.bias[i] = low_bf16(load_constant2(bias + row + i));
        }
    };
    auto residuals = [&](Around& around, int of_group, int t) {
        const int row = of_group * rows_each + quad * 4;
        if (!residual || t >= num_tokens || row >= num_rows) return;
        const i64 at = (i64)(first_token + t) * residual_stride + row;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            around.residual[i] = residual_is_bf16
                                     ? low_bf16(reinterpret_cast<const u16*>(residual)[at + i])
                                     : reinterpret_cast<const float*>(residual)[at + i];
    };
    Around around = {};
    factors(around, group);
    wait_for_previous_kernels();
    residuals(around, group, first_t);

    u8* region = dynamic_shared + COLUMNS * row_bytes;
    float* numbers = reinterpret_cast<float*>(region + region_bytes);
    constexpr int UNITS = Sums<Format, NT>::UNITS, BLOCK_BYTES = Sums<Format, NT>::BLOCK_BYTES;
    const Tokens<Format, WARPS> tokens = {
        reinterpret_cast<const u8*>(x) + first_token * x_stride_bytes,
        x_stride_bytes,
        dynamic_shared,
        row_bytes,
        num_tokens,
        first_block * (4 * UNITS),
        slice_blocks * (4 * UNITS),
        warp,
        lane};
    if constexpr (IS_NORMED)
        tokens.copy_normed(reinterpret_cast<float*>(region), numbers, numbers + COLUMNS,
                           norm_weight, eps, dim, num_slices);
    else
        tokens.copy();

    const int num_tiles = (num_tokens + 7) / 8;
    const int sum_row = rows_each + 4;  // of a token's partial sums, so that few meet in a bank
    const u8* own_x = dynamic_shared + lane / 4 * row_bytes + lane % 4 * 16 +
                      (own_first - first_block) * BLOCK_BYTES;
    float* partial = reinterpret_cast<float*>(region);
    Sums<Format, NT> sums;
    for (; group < num_groups; group += gridDim.z) {
        const bool has_next = group + (int)gridDim.z < num_groups;
        sums.clear();
        for (int first = 0; first < own_blocks; first += DEPTH) {
#pragma unroll
            for (int s = 0; s < DEPTH; ++s) {
                if (first + s < own_blocks)
                    sums.multiply(ring[s], own_x + (first + s) * BLOCK_BYTES, row_bytes, num_tiles);
                const bool is_last = first + DEPTH >= own_blocks;
                if (is_last ? has_next && s < own_blocks : first + DEPTH + s < own_blocks)
                    load(ring[s]);
            }
        }
        float* own = partial + warp_k * (COLUMNS * sum_row) + warp_n * TILE_ROWS + lane / 4 * 4;
#pragma unroll
        for (int c = 0; c < 2 * NT; ++c) {
            if (c / 2 >= num_tiles) break;
            const float(&a)[4] = sums.sum[c / 2][0], (&b)[4] = sums.sum[c / 2][1];
            *reinterpret_cast<float4*>(own + (c / 2 * 8 + lane % 4 * 2 + c % 2) * sum_row) = {
                a[c % 2], a[c % 2 + 2], b[c % 2], b[c % 2 + 2]};
        }
        if (num_slices > 1)
            sync_cluster();
        else
            __syncthreads();
        const int row = group * rows_each + quad * 4;
        for (int t = first_t; t < num_tokens; t += at_once * num_slices) {
            const float* from = partial + t * sum_row + quad * 4;
            float4 v = {0, 0, 0, 0};
#pragma unroll 8  // their latencies together
            for (int p = 0, s = 0, k = 0; p < parts; ++p) {
                const float* part = from + k * (COLUMNS * sum_row);
                const float4 add = num_slices > 1 ? load4_from_block(shared_at(part), s)
                                                  : *reinterpret_cast<const float4*>(part);
                v.x += add.x, v.y += add.y, v.z += add.z, v.w += add.w;
                if (++k == warps_k) k = 0, ++s;
            }
            const float sum[4] = {v.x, v.y, v.z, v.w};
            float y[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                y[i] = multiply_add(sum[i] * Format::UNIT, around.factor[i],
                                    around.bias[i] + around.residual[i]);
            const i64 at = (i64)(first_token + t) * num_rows + row;
            if (row < num_rows && out_is_bf16)
                *reinterpret_cast<uint2*>(reinterpret_cast<u16*>(out) + at) = {
                    pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
            else if (row < num_rows)
                *reinterpret_cast<float4*>(reinterpret_cast<float*>(out) + at) = {y[0], y[1], y[2],
                                                                                  y[3]};
            residuals(around, group, t + at_once * num_slices);
        }
        // The other buffer: nobody reads it any more once all have come to the barrier above.
        partial = reinterpret_cast<float*>(region) +
                  (partial == reinterpret_cast<float*>(region) ? buffer_floats : 0);
        if (has_next) {
            factors(around, group + gridDim.z);
            residuals(around, group + gridDim.z, first_t);
        }
    }
    // Others may still read this block's sums.
    if (num_slices > 1) sync_cluster();
}
