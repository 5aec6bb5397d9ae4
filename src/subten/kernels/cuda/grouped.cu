// The routed experts for many tokens: tokens sorted by expert, each weight read and decoded once
// for up to 8 * NT of them.
//
// Letters: T tokens, K experts a token, A = T * K assignments, E experts, D features, F hidden
// features; p a position in the order by expert. gate_up [E, 2F, D] holds F gate rows and then F up
// rows of each expert, down [E, D, F].
//
// A block takes one tile of an expert's tokens and 32 rows of its weights a warp; `mma` has the
// weights as A and the tokens as B, so that a tile costs what its tokens do, 8 at a time.
//
//   weights:  through a ring of DEPTH blocks in registers
//   tokens:   copied into shared memory, DEPTH blocks of inputs a stage, three stages
//
// weight_tiles.cuh shows both.
#include "weight_tiles.cuh"
#include "wide_device.cuh"

#define NUM_STAGES 3

// A tile of an expert's sorted assignments: `count` of them from position `first`, at most `most`;
// and the part of the rows that goes with it.
struct Tile {
    int expert, first, count, part;
};

// The tiles of all experts, counted by every block from their E + 1 starts, so that no host has to
// know them. An item is a tile and a part: parts run slowest, so that tiles of an expert meet in L2.
struct Tiles {
    const int* starts;
    int num_experts, most, lane, each, own, up_to, num_tiles;

    // Leaves the starts in `to`. All threads of a block call it together.
    INLINE Tiles(int* to, const int* start, int all_experts, int at_most, int thread,
                 int num_threads) {
        starts = to, num_experts = all_experts, most = at_most, lane = thread % WARP;
        for (int i = thread; i <= num_experts; i += num_threads) to[i] = load_from_l2(start + i);
        __syncthreads();
        each = (num_experts + WARP - 1) / WARP;
        own = 0;
        for (int i = 0; i < each; ++i) own += tiles_of(lane * each + i);
        up_to = sum_to_lane(own, lane), num_tiles = from_lane(up_to, WARP - 1);
    }

    INLINE int tiles_of(int e) const {
        return e < num_experts ? (starts[e + 1] - starts[e] + most - 1) / most : 0;
    }

    INLINE Tile find(int item) const { return part_of(item % num_tiles, item / num_tiles); }

    // All lanes of a warp call it together.
    INLINE Tile part_of(int index, int part) const {
        const int owner = lowest_bit(lanes_where(up_to > index));
        int left = index - (from_lane(up_to, owner) - from_lane(own, owner));
        int e = owner * each;
        for (; left >= tiles_of(e); ++e) left -= tiles_of(e);
        const int first = starts[e] + left * most, rest = starts[e + 1] - first;
        return {e, first, rest < most ? rest : most, part};
    }
};

// Sums of a block's rows and up to 8 * NT tokens. With WIDE the four warps of a group work together,
// and the tensor cores read the tokens: FP8 alone, as the inputs of a lane decide where a token's
// lie. Of a block's 64, lane t has codes 16 t ..; in step s of four it gives those from 4 s on, as
// the numbers 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of the step's sixteen.
//
//   inputs 2 i and 2 i + 1 (4 bytes) of a token:  word i / 8 of unit i % 8
//
// With IN_PLACE they lie like that in memory already; without, copies put them there, 4 bytes each.
template <class Format, int NT, int WARPS, int DEPTH, bool WIDE, bool IN_PLACE>
struct Product : Sums<Format, NT> {
    using Sums<Format, NT>::UNITS;
    using Sums<Format, NT>::BLOCK_BYTES;
    using Sums<Format, NT>::sum;
    static constexpr int THREADS = WARP * WARPS, COLUMNS = 8 * NT;
    static constexpr int STAGE_UNITS = DEPTH * 4 * UNITS;     // of a token in a stage
    static constexpr int ROW_BYTES = DEPTH * BLOCK_BYTES / 128 * 128 + 64 +
                                     (DEPTH * BLOCK_BYTES % 128 ? 128 : 0);
    static constexpr int WIDE_BYTES = COLUMNS * 128;  // 64 inputs of all tokens
    static constexpr int STAGE_BYTES = WIDE ? DEPTH * WIDE_BYTES : COLUMNS * ROW_BYTES;
    static constexpr bool IN_PAIRS = WIDE && !IN_PLACE;
    // Tokens that all threads copy at once, a unit each, or two inputs.
    static constexpr int AT_ONCE = IN_PAIRS ? WARPS : THREADS / STAGE_UNITS;
    static constexpr int COPIES = (COLUMNS + AT_ONCE - 1) / AT_ONCE;
    static_assert(AT_ONCE > 0, "a stage of a token has more units than the block threads");
    static_assert(!WIDE || (Format::CODES == 16 && WARPS % 4 == 0), "not wide");

    u8* stages;
    const u16* x;
    int units, num_blocks, thread;
    Block<Format> ring[DEPTH];
    int from[COPIES];  // in units; -1 where there is no column
    int into, copied;  // the stage to fill, and the first unit to fill it with

    INLINE Product(u8* all_stages, const u16* all_x, int dim, int own_thread) {
        stages = all_stages, thread = own_thread;
        take_inputs(all_x, dim);
    }

    INLINE void take_inputs(const u16* all_x, int dim) {
        x = all_x, units = dim / 8, num_blocks = dim / (4 * Format::CODES);
    }

    // Asks for the first blocks of weights.
    INLINE void ask(Cursor<Format>& cursor) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s)
            if (s < num_blocks) cursor.load(ring[s]);
    }

    // Starts the first copies of columns, rows of `x`, `row_of(column)` saying which. Nobody may
    // still read the stages.
    template <class RowOf>
    INLINE void copy_first(int num_columns, RowOf row_of) {
        const int own_column = IN_PAIRS ? thread / WARP : thread / STAGE_UNITS;
        const int own_unit = IN_PAIRS ? 0 : thread % STAGE_UNITS;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int column = own_column + i * AT_ONCE;
            const bool is_inside = own_column < AT_ONCE && column < num_columns;
            from[i] = is_inside ? row_of(column) * units + own_unit : -1;
        }
        into = copied = 0;
        copy();
        copy();
    }

    INLINE void copy() {
        if constexpr (IN_PAIRS)
            copy_pairs();
        else
            copy_units();
        end_copies();
        copied += STAGE_UNITS;
        into = into < (NUM_STAGES - 1) * STAGE_BYTES ? into + STAGE_BYTES : 0;
    }

    INLINE void copy_units() {
        const int own_column = thread / STAGE_UNITS, own_unit = thread % STAGE_UNITS;
        if (copied + own_unit >= units) return;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int column = own_column + i * AT_ONCE;
            const int at = WIDE ? own_unit / 8 * WIDE_BYTES + column * 128 +
                                      (own_unit % 8 ^ column % 8) * 16
                                : column * ROW_BYTES + this->unit_byte(own_unit);
            if (from[i] >= 0)
                copy16(shared_at(stages) + at + into, x + (i64)(from[i] + copied) * 8);
        }
    }

    INLINE void copy_pairs() {
        if (copied >= units) return;
        const int lane = thread % WARP, own_column = thread / WARP;
        const int own = own_column * 128 + (lane % 8 ^ own_column % 8) * 16 + lane / 8 * 4;
        const SharedAt to = shared_at(stages) + into;
        const uint4* own_x = reinterpret_cast<const uint4*>(x + copied * 8 + lane * 2);
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
#pragma unroll
            for (int s = 0; s < DEPTH; ++s) {
                const int at = (own ^ i * WARPS % 8 * 16) + i * WARPS * 128 + s * WIDE_BYTES;
                copy4_if(from[i] >= 0 && copied + s * 8 < units, to + at, own_x + from[i] + s * 8);
            }
        }
    }

    INLINE void run(Cursor<Format>& cursor, int num_columns) {
        run(cursor, num_columns, [](int, int) {});
    }

    // `at_chunk(chunk, last)`: after the barrier of each chunk.
    template <class AtChunk>
    INLINE void run(Cursor<Format>& cursor, int num_columns, AtChunk at_chunk) {
        this->clear();
        if (WIDE && NT > 2 && num_columns <= 16)
            run_tiles<2>(cursor, num_columns, at_chunk);
        else if (WIDE && NT > 4 && num_columns <= 32)
            run_tiles<4>(cursor, num_columns, at_chunk);
        else
            run_tiles<NT>(cursor, num_columns, at_chunk);
    }

    // Wide products are of TILES tiles, others of as many as there are columns for.
    template <int TILES, class AtChunk>
    INLINE void run_tiles(Cursor<Format>& cursor, int num_columns, AtChunk at_chunk) {
        const int lane = thread % WARP, num_chunks = (num_blocks + DEPTH - 1) / DEPTH;
        const int num_tiles = (num_columns + 7) / 8;
        const u8* own = stages + lane / 4 * ROW_BYTES + lane % 4 * 16;
        int stage = 0;
        for (int chunk = 0; chunk < num_chunks; ++chunk) {
            wait_copies<1>();
            if constexpr (WIDE) show_to_wide_mma();
            // Chunk `chunk` is there, and nobody reads the one before it any more.
            __syncthreads();
            copy();
            at_chunk(chunk, num_chunks - 1);
            const int left = num_blocks - chunk * DEPTH;
#pragma unroll
            for (int s = 0; s < DEPTH; ++s) {
                if (s >= left) break;
                const bool has_next = s + DEPTH < left;
                if constexpr (WIDE) {
                    multiply_wide<TILES>(ring[s], shared_at(stages) + stage + s * WIDE_BYTES, [&] {
                        if (has_next) cursor.load(ring[s]);
                    });
                } else {
                    this->multiply(ring[s], own + stage + s * BLOCK_BYTES, ROW_BYTES, num_tiles);
                    if (has_next) cursor.load(ring[s]);
                }
            }
            if constexpr (WIDE) wait_wide_mma<0>();
            stage = stage < (NUM_STAGES - 1) * STAGE_BYTES ? stage + STAGE_BYTES : 0;
        }
    }

    // While the products of one step of 16 inputs run, the weights of the next are decoded.
    // `when_read`: once nobody needs `block` any more.
    template <int TILES, class WhenRead>
    INLINE void multiply_wide(const Block<Format>& block, SharedAt tokens, WhenRead when_read) {
        const ColumnsAt columns = columns_at(tokens);
        u32 a[2][2][4];  // [step][mma]
#pragma unroll
        for (int step = 0; step < 2 * UNITS; ++step) {
            u32(&now)[2][4] = a[step % 2];
            wait_wide_mma<1>();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int mma = i / 2, high = i % 2;
                u32 pair[4];
                Format::pairs(pair, block.codes[mma][high], step / 2);
                now[mma][high] = pair[step % 2 * 2];
                now[mma][high + 2] = pair[step % 2 * 2 + 1];
            }
            if (step == 2 * UNITS - 1) when_read();
            begin_wide_mma();
            const ColumnsAt b = columns_on(columns, step);
            WideMma<TILES>::template add<0>(sum, now[0], b);
            WideMma<TILES>::template add<1>(sum, now[1], b);
            end_wide_mma();
        }
    }
};

// What a block needs besides weights and tokens, in shared memory, by copies that come with the next
// group: the assignments of its columns, and the scales of its rows, 32 a warp.
template <class Tokens>
struct Aside {
    int* ids;

    INLINE float* scales() const { return reinterpret_cast<float*>(ids + Tokens::COLUMNS); }

    INLINE Aside other() const { return {ids + Tokens::COLUMNS + Tokens::THREADS}; }

    // `scale`: of the thread's row, or null.
    INLINE void copy(const int* order, const Tile& tile, const float* scale, int thread) const {
        if (thread < tile.count) copy4(shared_at(ids + thread), order + tile.first + thread);
        if (scale) copy4(shared_at(scales() + thread), scale);
    }
};

template <class Format>
INLINE const float* scale_of(const void* scale, i64 row) {
    return Format::HAS_ROW_SCALE ? reinterpret_cast<const float*>(scale) + row : nullptr;
}

template <class T>
INLINE void swap(T& a, T& b) {
    const T other = a;
    a = b, b = other;
}

INLINE void unpack8(float (&v)[8], uint4 bits) {
    v[0] = low_bf16(bits.x), v[1] = high_bf16(bits.x), v[2] = low_bf16(bits.y);
    v[3] = high_bf16(bits.y), v[4] = low_bf16(bits.z), v[5] = high_bf16(bits.z);
    v[6] = low_bf16(bits.w), v[7] = high_bf16(bits.w);
}

INLINE void store_pair(u16* to, float low, float high) {
    *reinterpret_cast<u32*>(to) = pack_bf16(low, high);
}

// Writes act of a warp's 16 features, of those that there are, from gate and up of the columns.
// `scales`: of the warp's 32 rows.
template <class Format, int NT>
INLINE void end_up(const float (&sum)[NT][2][4], const float* scales, const Tile& tile,
                   int own_feature, u16* act, int hidden, int is_act_wide, int lane) {
    const int feature = own_feature + lane / 4 * 2, pair = feature % 64 / 2;
    const int place = is_act_wide ? feature - feature % 64 + pair % 8 * 8 + pair / 8 * 2 : feature;
    float row_scale[2][2] = {{1, 1}, {1, 1}};
    if constexpr (Format::HAS_ROW_SCALE) {
        const float* own_scale = scales + lane / 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) row_scale[i / 2][i % 2] = own_scale[i / 2 + i % 2 * 16];
    }
#pragma unroll
    for (int c = 0; c < 2 * NT; ++c) {
        const int column = c / 2 * 8 + lane % 4 * 2 + c % 2;
        if (column >= tile.count || own_feature >= hidden) continue;
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float gate = sum[c / 2][i][c % 2] * Format::UNIT * row_scale[i][0];
            const float up = sum[c / 2][i][c % 2 + 2] * Format::UNIT * row_scale[i][1];
            value[i] = gate * rough_reciprocal(1.0f + exponential(-gate)) * up;
        }
        store_pair(act + (i64)(tile.first + column) * hidden + place, value[0], value[1]);
    }
}

// Writes a warp's 32 rows of y, of those that there are, at the places `ids` of the columns.
template <class Format, int NT>
INLINE void end_down(const float (&sum)[NT][2][4], const float* scales, const int* ids,
                     const Tile& tile, int own_row, u16* y, int dim, int lane) {
    const int row = own_row + lane / 4 * 4;
    float row_scale[4] = {1, 1, 1, 1};
    if constexpr (Format::HAS_ROW_SCALE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) row_scale[i] = scales[lane / 4 * 4 + i];
    }
#pragma unroll
    for (int c = 0; c < 2 * NT; ++c) {
        const int column = c / 2 * 8 + lane % 4 * 2 + c % 2;
        if (column >= tile.count || own_row >= dim) continue;
        u16* to = y + (i64)ids[column] * dim + row;
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            value[i] = sum[c / 2][i / 2][c % 2 + i % 2 * 2] * Format::UNIT * row_scale[i];
        store_pair(to, value[0], value[1]);
        store_pair(to + 2, value[2], value[3]);
    }
}

// act[p] = silu(gate_e h[order[p] / K]) * up_e h[order[p] / K], bf16 [A, F]; with `is_act_wide` every
// 64 features in the order in which wide products take them (`Product`).
//
//   lane 4g + t of a warp with features f .. f + 15:  gate and up rows f + 2g and f + 2g + 1
//
// so that a thread has gate and up of two neighbouring features. A warp past the last feature
// repeats the last 16 and stores nothing.
// Bytes: 2 * F rows of weights for each expert with tokens, once where its tokens fit a tile or L2
// serves the others; A * D * 2 from L2 for each part of the rows; A * F * 2 of act.
// FP8, 512 tokens of qwen3-30b-a3b: 403 MB, 90 us at 4.5 TB/s. For 128 inputs and 48 tokens a warp
// has 445 instructions (SASS; 96 of them `mma`), or 391 with WIDE (16 of them `wgmma`), and its
// share of the memory's time is 820 cycles.
template <class Format, int NT, int WARPS, int DEPTH, int BLOCKS, bool WIDE>
__global__ void __launch_bounds__(WARP* WARPS, BLOCKS)
    grouped_up_kernel(const u8* codes, const void* scale, const u16* h, const int* start,
                      const int* order, u16* act, int num_experts, int top_k, int dim,
                      int hidden, int is_act_wide) {
    DYNAMIC_SHARED(dynamic_shared);
    using Tokens = Product<Format, NT, WARPS, DEPTH, WIDE, false>;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    wait_for_previous_kernels();
    // Only now: `grouped_down_kernel` reads the starts before it waits for this kernel, and they
    // are final once a block of this kernel has got past its own wait.
    launch_dependents();
    int* starts = reinterpret_cast<int*>(dynamic_shared + NUM_STAGES * Tokens::STAGE_BYTES);
    const Aside<Tokens> aside = {starts + num_experts + 1};
    const Tiles tiles(starts, start, num_experts, Tokens::COLUMNS, thread, Tokens::THREADS);
    if (blockIdx.x >= tiles.num_tiles * ((hidden + 16 * WARPS - 1) / (16 * WARPS))) return;
    const Tile tile = tiles.find(blockIdx.x);
    const int own_feature = (tile.part * WARPS + warp) * 16;
    const i64 first_row =
        (i64)tile.expert * 2 * hidden + (own_feature < hidden ? own_feature : hidden - 16);
    Cursor<Format> cursor(codes, scale, first_row + lane / 4 * 2, {hidden, 1}, dim, lane);
    Tokens tokens(dynamic_shared, h, dim, thread);
    tokens.ask(cursor);
    aside.copy(order, tile, scale_of<Format>(scale, first_row + lane % 16 + lane / 16 * hidden),
               thread);
    end_copies();
    wait_copies<0>();
    __syncthreads();
    tokens.copy_first(tile.count, [&](int column) { return aside.ids[column] / top_k; });
    tokens.run(cursor, tile.count);
    end_up<Format>(tokens.sum, aside.scales() + warp * WARP, tile, own_feature, act, hidden,
                   is_act_wide, lane);
}

// y[order[p]] = down_e act[p], bf16 [A, D], back at the place of the assignment. Wide products take
// `act` as `grouped_up_kernel` leaves it for them.
//
//   lane 4g + t of a warp with rows d .. d + 31:  rows d + 4g .. d + 4g + 3, one after another
//
// Bytes: D rows of weights for each expert with tokens, A * F * 2 from L2 for each part of the
// rows, A * D * 2 of y.
template <class Format, int NT, int WARPS, int DEPTH, int BLOCKS, bool WIDE>
__global__ void __launch_bounds__(WARP* WARPS, BLOCKS)
    grouped_down_kernel(const u8* codes, const void* scale, const u16* act, const int* start,
                        const int* order, u16* y, int num_experts, int dim, int hidden,
                        int has_early_starts) {
    DYNAMIC_SHARED(dynamic_shared);
    using Tokens = Product<Format, NT, WARPS, DEPTH, WIDE, true>;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    launch_dependents();
    // Starts and weights may be read here if the kernel before is `grouped_up_kernel`, which lets
    // this one begin after its own wait: so that weights are on their way while it ends.
    if (!has_early_starts) wait_for_previous_kernels();
    int* starts = reinterpret_cast<int*>(dynamic_shared + NUM_STAGES * Tokens::STAGE_BYTES);
    const Aside<Tokens> aside = {starts + num_experts + 1};
    const Tiles tiles(starts, start, num_experts, Tokens::COLUMNS, thread, Tokens::THREADS);
    if (blockIdx.x >= tiles.num_tiles * ((dim + 32 * WARPS - 1) / (32 * WARPS))) {
        wait_for_previous_kernels();
        return;
    }
    const Tile tile = tiles.find(blockIdx.x);
    const int own_row = (tile.part * WARPS + warp) * 32;
    const i64 first_row = (i64)tile.expert * dim + (own_row < dim ? own_row : dim - 32);
    Cursor<Format> cursor(codes, scale, first_row + lane / 4 * 4, {1, 2}, hidden, lane);
    Tokens tokens(dynamic_shared, act, hidden, thread);
    tokens.ask(cursor);
    wait_for_previous_kernels();
    aside.copy(order, tile, scale_of<Format>(scale, first_row + lane), thread);
    tokens.copy_first(tile.count, [&](int column) { return tile.first + column; });
    tokens.run(cursor, tile.count);
    end_down<Format>(tokens.sum, aside.scales() + warp * WARP, aside.ids, tile, own_row, y, dim,
                     lane);
}

// out_d = residual_d + sum_k weight_k y[t * K + k]_d, k in order; a block is a token, a thread 8
// features at a time. Sets what `grouped_both_kernel` has counted back to zero.
// Bytes: 2 * A * D of y, mostly from L2, and 2 * T * D * itemsize.
__global__ void __launch_bounds__(256)
    combine_kernel(const u16* y, const float* topk_weight, const void* residual,
                   i64 residual_stride, void* out, int residual_is_bf16, int top_k, int dim,
                   int* progress, int num_progress) {
    launch_dependents();
    wait_for_previous_kernels();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < num_progress; i += blockDim.x) progress[i] = 0;
    const int token = blockIdx.x, units = dim / 8;
    const float* weight = topk_weight + (i64)token * top_k;
    for (int u = threadIdx.x; u < units; u += blockDim.x) {
        const i64 from = token * residual_stride + u * 8, to = (i64)token * dim + u * 8;
        float sum[8] = {}, before[8];
        // Asked for first, so that it comes with the others.
        if (residual_is_bf16) {
            unpack8(before, *reinterpret_cast<const uint4*>(
                                reinterpret_cast<const u16*>(residual) + from));
        } else {
            const float4* r = reinterpret_cast<const float4*>(
                reinterpret_cast<const float*>(residual) + from);
            const float4 a = r[0], b = r[1];
            before[0] = a.x, before[1] = a.y, before[2] = a.z, before[3] = a.w;
            before[4] = b.x, before[5] = b.y, before[6] = b.z, before[7] = b.w;
        }
        const uint4* row = reinterpret_cast<const uint4*>(y + (i64)token * top_k * dim) + u;
#pragma unroll 8
        for (int k = 0; k < top_k; ++k) {
            const uint4 v = load_from_l2(row + (i64)k * units);
            const float w = load_from_l2(weight + k);
            float value[8];
            unpack8(value, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = multiply_add(w, value[i], sum[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += before[i];
        if (residual_is_bf16) {
            u16* o = reinterpret_cast<u16*>(out) + to;
#pragma unroll
            for (int i = 0; i < 8; i += 2) store_pair(o + i, sum[i], sum[i + 1]);
        } else {
            float4* o = reinterpret_cast<float4*>(reinterpret_cast<float*>(out) + to);
            o[0] = {sum[0], sum[1], sum[2], sum[3]};
            o[1] = {sum[4], sum[5], sum[6], sum[7]};
        }
    }
}

#include "grouped_both.cuh"
