// x = residual + W a of one token, and meanwhile, from a and the residual, the K experts of
// E that its router will choose. `src/subten/kernels/linear_route.py` says why that is enough.
//
// Letters: D rows of W, N inputs, P parts of an expert's row. folded [E, M = N + D] float32:
//
//   r_e = sum_n folded_en a_n + sum_d folded_e,N+d residual_d
//
// a bf16, x and the residual float32.
//
//   block of threads 0: waits for the parts, adds them, ranks the experts and hands out their ids
//   block 1 + b: its rows of W, as linear.cu;  and job b = p * E + e: part p of r_e
//
// Parts are UNSET between launches and the ids from the start of this one, so each is its own
// signal: no counter. `up_ahead_kernel`, the next launch, waits for ids before this launch has
// ended. That cannot lock up: it starts once every block of this launch has started or ended, and
// only block 0 waits for others, which find room beside it on any device that holds two blocks. It
// sees no id of an earlier launch: it starts after block 0 has let it, which that does once the
// kernels ahead have ended, so that this memory is nobody else's any more, and ids that are UNSET
// lie in it. Block 0 comes first so that it starts beside the kernel ahead.
// Bytes: those of linear.cu; E * M * 4 of the folded matrix, once, asked for before the wait.
#include "gemv.cuh"
#include "select.cuh"

// Four inputs from `at` on: bf16 of a, in the low words, or floats of the residual.
INLINE uint4 load_quad(const u8* at, bool is_head) {
    if (!is_head) return *reinterpret_cast<const uint4*>(at);
    const uint2 pairs = *reinterpret_cast<const uint2*>(at);
    return {pairs.x, pairs.y, 0, 0};
}

// Taken apart only here, so that the loads of all quads are on their way together.
INLINE float product(uint4 folded, uint4 bits, bool is_head) {
    const float a = is_head ? low_bf16(bits.x) : bits_float(bits.x);
    const float b = is_head ? high_bf16(bits.x) : bits_float(bits.y);
    const float c = is_head ? low_bf16(bits.y) : bits_float(bits.z);
    const float d = is_head ? high_bf16(bits.y) : bits_float(bits.w);
    return (bits_float(folded.x) * a + bits_float(folded.y) * b) +
           (bits_float(folded.z) * c + bits_float(folded.w) * d);
}

// Publishes the ids of the best. `key` holds those of all experts and TAKEN up to a multiple of 4: the
// rank of an expert is the number of better ones, of which `lanes` neighbours count a share each.
INLINE void rank_experts(int* topk_id, const int* key, int num_experts, int top_k, bool is_real) {
    const int thread = threadIdx.x, num_threads = blockDim.x;
    int log_lanes = 3;
    while (log_lanes > 0 && num_experts << log_lanes > num_threads) --log_lanes;
    const int lanes = 1 << log_lanes;
#pragma unroll 1
    for (int first = 0; first < num_experts; first += num_threads >> log_lanes) {
        const int e = first + (thread >> log_lanes);
        const int own = e < num_experts ? key[e] : TAKEN + 1;
        int rank = 0;
#pragma unroll 4
        for (int i = thread & (lanes - 1); i * 4 < num_experts; i += lanes) {
            const uint4 four = reinterpret_cast<const uint4*>(key)[i];
            const int other[4] = {(int)four.x, (int)four.y, (int)four.z, (int)four.w};
            // As good and earlier is better too: at e's own four, element by element.
            const int least = i < e / 4 ? own - 1 : own;
#pragma unroll
            for (int j = 0; j < 4; ++j) rank += other[j] > least;
#pragma unroll
            for (int j = 0; j < 3; ++j) rank += i == e / 4 && j < e % 4 && other[j] == own;
        }
        float better = rank;
        for (int mask = lanes / 2; mask > 0; mask /= 2) better += shuffle_xor(better, mask);
        if (is_real && (thread & (lanes - 1)) == 0 && e < num_experts && better < top_k)
            publish(topk_id + static_cast<int>(better), e);
    }
}

// Block 0. `shared` holds keys of E experts, up to a multiple of 4, and E * P floats. Only one thread
// lets the next launch start: the block counts from its first that does.
INLINE void pick_experts(float* part_score, float* score, int* topk_id, u8* shared,
                         int num_experts, int num_parts, int top_k) {
    const int thread = threadIdx.x, num_threads = blockDim.x, lane = thread % WARP;
    const int padded = (num_experts + 3) / 4 * 4, num_jobs = num_experts * num_parts;
    int* key = reinterpret_cast<int*>(shared);
    float* part = reinterpret_cast<float*>(key + padded);
    // First with zeros, before the wait, so that the code is there when the scores are.
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        const bool is_real = round == 1;
        if (is_real) {
            wait_for_previous_kernels();
            if (thread < WARP) {
                if (lane < top_k) publish(topk_id + lane, UNSET);
                fence();
                sync_warp();
                if (lane == 0) launch_dependents();
            }
        }
        auto take = [&](int e, float sum) {
            key[e] = sort_key(sum);
            if (is_real) score[e] = sum;
        };
        if (thread < padded - num_experts) key[num_experts + thread] = TAKEN;
#pragma unroll 1
        for (int i = thread; i < num_jobs; i += num_threads) {
            float v = 0;
            if (is_real) {
                do v = poll(part_score + i);
                while (float_bits(v) == UNSET);
                part_score[i] = bits_float(UNSET);
            }
            if (num_parts == 1)
                take(i, v);
            else
                part[i] = v;
        }
        __syncthreads();
        if (num_parts > 1) {
#pragma unroll 1
            for (int e = thread; e < num_experts; e += num_threads) {
                float sum = 0;
                for (int p = 0; p < num_parts; ++p) sum += part[p * num_experts + e];
                take(e, sum);
            }
            __syncthreads();
        }
        rank_experts(topk_id, key, num_experts, top_k, is_real);
        __syncthreads();
    }
}

// UNITS of 8 inputs and QUADS of 4 of the folded row are what a thread keeps in registers: all of its
// own, and its block has one job at most. QUADS = 0: any number of either, and nothing is kept.
// BLOCKS of THREADS should find registers on an SM.
template <class Format, int DEPTH, int UNITS, int QUADS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_route_kernel(const u8* codes, const void* scale, const u16* heads,
                        const float* residual, float* out, int num_rows, int dim, int warps_k,
                        int tiles_each, const float* folded, float* part_score, float* score,
                        int* topk_id, int num_experts, int num_parts, int top_k) {
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ float4 sums[MAX_WARPS / 4];
    const int num_blocks = gridDim.x - 1, block = blockIdx.x - 1;
    if (block < 0) {
        pick_experts(part_score, score, topk_id, dynamic_shared, num_experts, num_parts, top_k);
        return;
    }
    launch_dependents();
    const int thread = threadIdx.x, num_threads = blockDim.x;
    const int lane = thread % WARP, warp = thread / WARP, num_warps = num_threads / WARP;
    const int warp_k = warp % warps_k, warp_n = warp / warps_k, warps_n = num_warps / warps_k;
    Shared<Format> shared(dynamic_shared, 1, MAX_COLUMNS, dim);

    // Part p of expert e: quads begin .. end - 1 of row e.
    const int num_jobs = num_experts * num_parts, row_quads = (dim + num_rows) / 4;
    int begin, end;
    const float* folded_row;
    auto take_job = [&](int job) {
        const u32 p = static_cast<u32>(job) / num_experts;
        begin = static_cast<u32>(row_quads) * p / num_parts;
        end = job < num_jobs ? static_cast<u32>(row_quads) * (p + 1) / num_parts : begin;
        folded_row = folded + (i64)(job - p * num_experts) * (row_quads * 4);
    };
    auto is_head = [&](int quad) { return quad < dim / 4; };
    auto quad_at = [&](int quad) {
        const u8* head = reinterpret_cast<const u8*>(heads) + quad * 8;
        return is_head(quad) ? head : reinterpret_cast<const u8*>(residual + quad * 4 - dim);
    };
    take_job(block);
    constexpr int KEPT_QUADS = QUADS > 0 ? QUADS : 1;
    uint4 kept[KEPT_QUADS];
    const u8* inputs[KEPT_QUADS];
    bool never = false;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int quad = begin + thread + i * num_threads;
        kept[i] = {0, 0, 0, 0};
        if (quad < end) kept[i] = load_stream(folded_row + quad * 4);
        inputs[i] = quad < end ? quad_at(quad) : nullptr;
        never = never || reinterpret_cast<i64>(inputs[i]) == 1;
    }
    // A branch keeps the arithmetic for these addresses on its side of the wait, where it is free.
    if (never) return;

    const int rows_each = warps_n * tiles_each * TILE_ROWS;
    const i64 row = (i64)block * rows_each + thread;
    const bool has_row = thread < rows_each && row < num_rows;
    float row_scale = 1.0f;
    if (Format::HAS_ROW_SCALE && has_row)
        row_scale = load_constant_float(reinterpret_cast<const float*>(scale) + row);

    const int units = dim / 8, blocks_of_k = dim / Layout<Format>::BLOCK;
    const int first_block = slice_start(blocks_of_k, warp_k, warps_k);
    const int blocks = slice_start(blocks_of_k, warp_k + 1, warps_k) - first_block;
    const int first_tile = (block * warps_n + warp_n) * tiles_each;
    const int tiles_left = num_rows / TILE_ROWS - first_tile;
    const int num_tiles = tiles_left < 0 ? 0 : tiles_left < tiles_each ? tiles_left : tiles_each;
    Cursor<Format> cursor(codes, scale, dim, (i64)first_tile * TILE_ROWS, 8, TILE_ROWS, first_block,
                          blocks, lane);

    // Job after job, from memory and L2 at once.
    auto add_jobs = [&] {
#pragma unroll 1
        for (int job = block; job < num_jobs; job += num_blocks) {
            take_job(job);
            float sum = 0;
#pragma unroll 1
            for (int quad = begin + thread; quad < end; quad += num_threads)
                sum += product(load_stream(folded_row + quad * 4),
                               load_quad(quad_at(quad), is_head(quad)),
                               is_head(quad));
            store_warp_sum(sums, sum_over_lanes<WARP>(sum), warp, num_warps, lane);
            __syncthreads();
            if (thread == 0) publish(part_score + job, not_unset(sum_of_warps(sums)));
            __syncthreads();
        }
    };

    auto fetch_ahead = [&] {
        const u8* first = cursor.codes - lane / 4 * blocks_of_k * 64 - lane % 4 * 16;
        fetch_rest(first, blocks_of_k * 64, blocks, DEPTH, num_tiles, lane);
    };
    float before = 0;
    auto prologue = [&] {
        wait_for_previous_kernels();
        uint4 quads[KEPT_QUADS] = {};
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            if (inputs[i])
                quads[i] = load_quad(inputs[i], is_head(begin + thread + i * num_threads));
        }
        uint4 bits[UNITS] = {};
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int u = thread + i * num_threads;
            if (u < units) bits[i] = reinterpret_cast<const uint4*>(heads)[u];
        }
        if (has_row) before = residual[row];

        float sum = 0;
#pragma unroll
        for (int i = 0; i < QUADS; ++i)
            sum += product(kept[i], quads[i], is_head(begin + thread + i * num_threads));
        if constexpr (QUADS > 0)
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
        if constexpr (QUADS > 0) {
            if (thread == 0 && block < num_jobs)
                publish(part_score + block, not_unset(sum_of_warps(sums)));
        } else {
            add_jobs();
        }
    };

    float* partial = shared.partial + (warp_n * tiles_each * warps_k + warp_k) * PARTIAL;
    stream<Format, DEPTH>(cursor, num_tiles, first_block, shared, 0, lane % 4 * 2, lane, fetch_ahead,
                          prologue,
                          [&](int tile, const float(&d)[4]) {
                              store_partial(partial + tile * warps_k * PARTIAL, d, lane);
                          });

    __syncthreads();
    if (!has_row) return;
    const float* own = shared.partial + thread / TILE_ROWS * warps_k * PARTIAL;
    const float sum = sum_partials(own, thread % TILE_ROWS, 0, warps_k);
    out[row] = sum * (row_scale * Format::SCALE_FACTOR) + before;
}
