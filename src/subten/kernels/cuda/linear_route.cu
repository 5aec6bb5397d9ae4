// x = residual + W a (+ bias) of one token, and meanwhile, from a and the residual, the K experts of
// E that its router will choose. `src/subten/kernels/linear_route.py` says why that is enough.
//
// Letters: D rows of W, N inputs, P parts of an expert's row. folded [E, M = N + D] float32:
//
//   r_e = sum_n folded_en a_n + sum_d folded_e,N+d residual_d
//
//   block of threads b: its rows of W, as linear.cu;  and job b = p * E + e: part p of r_e
//   the last block: waits for the parts, adds them, ranks the experts and hands out their ids
//
// Parts are UNSET between launches and the ids from the start of this one, so each is its own
// signal: no counter. `up_ahead_kernel`, the next launch, waits for ids before this launch has
// ended. That cannot lock up: it starts once every block of this launch has started or ended, and
// no block of this launch but the last waits for another. It sees no id of an earlier launch: it
// starts after the last block has let it, which that does once the kernels ahead have ended
// (nobody reads the ids of a layer before) and ids that are UNSET are in memory.
// Bytes: those of linear.cu; E * M * 4 of the folded matrix, once, all of it before the wait.
#include "gemv.cuh"
#include "select.cuh"

// Of a and then the residual: their inputs 4 * quad .. 4 * quad + 3.
INLINE void load_quad(float (&v)[4], const u16* heads, const void* residual, int residual_is_bf16,
                      int dim, int quad) {
    const int own = quad - dim / 4;
    if (own >= 0 && !residual_is_bf16) {
        const float4 four = reinterpret_cast<const float4*>(residual)[own];
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        return;
    }
    const uint2 pairs = own < 0 ? reinterpret_cast<const uint2*>(heads)[quad]
                                : reinterpret_cast<const uint2*>(residual)[own];
    v[0] = low_bf16(pairs.x), v[1] = high_bf16(pairs.x);
    v[2] = low_bf16(pairs.y), v[3] = high_bf16(pairs.y);
}

INLINE float product(uint4 folded, const float (&v)[4]) {
    return (bits_float(folded.x) * v[0] + bits_float(folded.y) * v[1]) +
           (bits_float(folded.z) * v[2] + bits_float(folded.w) * v[3]);
}

// The last block. `shared` holds E * P floats and E keys. Other warps than the first do not let the
// next launch start: the block counts from its first thread that does.
INLINE void pick_experts(float* part_score, float* score, int* topk_id, u8* shared,
                         int num_experts, int num_parts, int top_k) {
    const int thread = threadIdx.x, num_threads = blockDim.x, lane = thread % WARP;
    float* part = reinterpret_cast<float*>(shared);
    int* key = reinterpret_cast<int*>(part + num_experts * num_parts);
    wait_for_previous_kernels();
    if (thread < WARP) {
        if (lane < top_k) publish(topk_id + lane, UNSET);
        fence();
        sync_warp();
        if (lane == 0) launch_dependents();
    }
#pragma unroll 1
    for (int i = thread; i < num_experts * num_parts; i += num_threads) {
        float v;
        do v = poll(part_score + i);
        while (float_bits(v) == UNSET);
        part_score[i] = bits_float(UNSET);
        part[i] = v;
    }
    __syncthreads();
#pragma unroll 1
    for (int e = thread; e < num_experts; e += num_threads) {
        float sum = 0;
        for (int p = 0; p < num_parts; ++p) sum += part[p * num_experts + e];
        key[e] = sort_key(sum);
        score[e] = sum;
    }
    __syncthreads();
    // The rank of an expert is the number of better ones: `lanes` neighbours count a share each.
    int lanes = WARP;
    while (lanes > 1 && num_experts * lanes > num_threads) lanes /= 2;
#pragma unroll 1
    for (int first = 0; first < num_experts; first += num_threads / lanes) {
        const int e = first + thread / lanes;
        const int own = e < num_experts ? key[e] : TAKEN;
        float rank = 0;
        for (int other = thread % lanes; other < num_experts; other += lanes) {
            const int k = key[other];
            rank += k > own || (k == own && other < e) ? 1.0f : 0.0f;
        }
        for (int mask = lanes / 2; mask > 0; mask /= 2) rank += shuffle_xor(rank, mask);
        if (thread % lanes == 0 && e < num_experts && rank < top_k)
            publish(topk_id + static_cast<int>(rank), e);
    }
}

// UNITS of 8 inputs and QUADS of 4 of the folded row are what a thread keeps in registers; of the
// former that is all. BLOCKS of THREADS should find registers on an SM.
template <class Format, int DEPTH, int UNITS, int QUADS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_route_kernel(const u8* codes, const void* scale, const u16* heads, const u16* bias,
                        const void* residual, int residual_is_bf16, void* out, int num_rows,
                        int dim, int warps_k, int tiles_each, const float* folded,
                        float* part_score, float* score, int* topk_id, int num_experts,
                        int num_parts, int top_k) {
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ float4 sums[MAX_WARPS / 4];
    const int num_blocks = gridDim.x - 1, block = blockIdx.x;
    if (block == num_blocks) {
        pick_experts(part_score, score, topk_id, dynamic_shared, num_experts, num_parts, top_k);
        return;
    }
    launch_dependents();
    const int thread = threadIdx.x, num_threads = blockDim.x;
    const int lane = thread % WARP, warp = thread / WARP, num_warps = num_threads / WARP;
    const int warp_k = warp % warps_k, warp_n = warp / warps_k, warps_n = num_warps / warps_k;
    Shared<Format> shared(dynamic_shared, 1, MAX_COLUMNS, dim);

    // Part p of expert e: quads begin_of(p) .. begin_of(p + 1) - 1 of row e.
    const int num_jobs = num_experts * num_parts, row_quads = (dim + num_rows) / 4;
    auto begin_of = [&](int p) { return static_cast<int>((i64)row_quads * p / num_parts); };
    const int begin = begin_of(block / num_experts);
    const int end = block < num_jobs ? begin_of(block / num_experts + 1) : begin;
    const float* folded_row = folded + (i64)(block % num_experts) * (row_quads * 4);
    uint4 kept[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int quad = begin + thread + i * num_threads;
        kept[i] = {0, 0, 0, 0};
        if (quad < end) kept[i] = load_stream(folded_row + quad * 4);
    }

    const int rows_each = warps_n * tiles_each * TILE_ROWS;
    const i64 row = (i64)block * rows_each + thread;
    const bool has_row = thread < rows_each && row < num_rows;
    float row_scale = 1.0f, row_bias = 0.0f;
    if (Format::HAS_ROW_SCALE && has_row)
        row_scale = load_constant_float(reinterpret_cast<const float*>(scale) + row);
    if (bias && has_row) row_bias = low_bf16(load_constant2(bias + row));

    const int units = dim / 8, blocks_of_k = dim / Layout<Format>::BLOCK;
    const int first_block = slice_start(blocks_of_k, warp_k, warps_k);
    const int blocks = slice_start(blocks_of_k, warp_k + 1, warps_k) - first_block;
    const int first_tile = (block * warps_n + warp_n) * tiles_each;
    const int tiles_left = num_rows / TILE_ROWS - first_tile;
    const int num_tiles = tiles_left < 0 ? 0 : tiles_left < tiles_each ? tiles_left : tiles_each;
    Cursor<Format> cursor(codes, scale, dim, (i64)first_tile * TILE_ROWS, 8, TILE_ROWS, first_block,
                          blocks, lane);

    // What the kept quads do not cover, and whole jobs after the first: few shapes have any.
    auto rest_of = [&](const float* from, int first, int last) {
        float sum = 0;
#pragma unroll 1
        for (int quad = first + thread; quad < last; quad += num_threads) {
            float v[4];
            load_quad(v, heads, residual, residual_is_bf16, dim, quad);
            sum += product(load_stream(from + quad * 4), v);
        }
        return sum;
    };

    float before = 0;
    auto prologue = [&] {
        wait_for_previous_kernels();
        float value[QUADS][4] = {};
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const int quad = begin + thread + i * num_threads;
            if (quad < end) load_quad(value[i], heads, residual, residual_is_bf16, dim, quad);
        }
        uint4 bits[UNITS] = {};
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int u = thread + i * num_threads;
            if (u < units) bits[i] = reinterpret_cast<const uint4*>(heads)[u];
        }
        if (has_row) before = load_value(residual, row, residual_is_bf16);

        float sum = 0;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) sum += product(kept[i], value[i]);
        sum += rest_of(folded_row, begin + QUADS * num_threads, end);
        store_warp_sum(sums, sum_over_lanes<WARP>(sum), warp, num_warps, lane);
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int u = thread + i * num_threads;
            if (u - thread >= units) break;
            float v[8];
            unpack8(v, bits[i]);
            shared.store(0, u, v, u < units, 0);
        }
        __syncthreads();
        if (thread == 0 && block < num_jobs)
            publish(part_score + block, not_unset(sum_of_warps(sums)));
#pragma unroll 1
        for (int job = block + num_blocks; job < num_jobs; job += num_blocks) {
            const int p = job / num_experts;
            const float* from = folded + (i64)(job % num_experts) * (row_quads * 4);
            const float other = sum_over_lanes<WARP>(rest_of(from, begin_of(p), begin_of(p + 1)));
            __syncthreads();
            store_warp_sum(sums, other, warp, num_warps, lane);
            __syncthreads();
            if (thread == 0) publish(part_score + job, not_unset(sum_of_warps(sums)));
        }
    };

    float* partial = shared.partial + (warp_n * tiles_each * warps_k + warp_k) * PARTIAL;
    stream<Format, DEPTH>(cursor, num_tiles, first_block, shared, 0, lane % 4 * 2, lane, prologue,
                          [&](int tile, const float(&d)[4]) {
                              store_partial(partial + tile * warps_k * PARTIAL, d, lane);
                          });

    __syncthreads();
    if (!has_row) return;
    const float* own = shared.partial + thread / TILE_ROWS * warps_k * PARTIAL;
    const float sum = sum_partials(own, thread % TILE_ROWS, 0, warps_k);
    store_value(out, row, sum * (row_scale * Format::SCALE_FACTOR) + (before + row_bias),
                residual_is_bf16);
}
