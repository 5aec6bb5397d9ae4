// Both products of the routed experts for few tokens each, in one launch: blocks take items, parts
// of a tile's rows, from one list, first all of `up` and then all of `down`, and an item of `down`
// begins as soon as the parts of its own tile's `up` have ended. So that the memory always has a
// block's next weights to bring: there is no border where all blocks end and begin.
//
// Letters and kernels for more tokens: grouped.cu, which includes this file.
#ifndef SUBTEN_GROUPED_BOTH_CUH
#define SUBTEN_GROUPED_BOTH_CUH

// What blocks of one launch share, all zero before and after: the items that have been taken, the
// blocks that have ended; of each tile the parts of `up` that have ended; and of each token, for each
// part of its rows, the experts that have.
struct Progress {
    int *taken, *left, *up, *down;
};

// A tile's part of the rows of one of the products; no tile where `index` is -1.
struct Item {
    Tile tile;
    int index;
    bool is_down;
};

// act[p] = silu(gate_e h[order[p] / K]) * up_e h[order[p] / K], bf16 [A, F], and
// y[order[p]] = down_e act[p], bf16 [A, D]. Rows as in `grouped_up_kernel` and `grouped_down_kernel`.
//
// Nobody waits before all items of `up` have been taken, each by a block that runs: so that blocks
// need not all be on the device at once.
//
// Bytes: 2 * F and D rows of weights for each expert with tokens; A * D * 2 and A * F * 2 from L2 for
// each part of the rows. FP8, 32 tokens of qwen3-30b-a3b: 530 MB, 118 us at 4.5 TB/s. A block takes
// an item's successor when two chunks are left: items taken late share the end out better.
template <class Format, int NT, int WARPS, int DEPTH, int BLOCKS, bool JOINS, int AHEAD = 0>
__global__ void __launch_bounds__(WARP* WARPS, BLOCKS)
    grouped_both_kernel(const u8* up_codes, const void* up_scale, const u8* down_codes,
                        const void* down_scale, const u16* h, const int* start, const int* order,
                        u16* act, u16* y, int* progress, int max_tiles, int num_experts,
                        int top_k, int dim, int hidden, int early_bytes, const float* topk_weight,
                        const void* residual, i64 residual_stride, void* out,
                        int residual_is_bf16) {
    DYNAMIC_SHARED(dynamic_shared);
    using Tokens = Product<Format, NT, WARPS, DEPTH, false, false>;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int up_parts = (hidden + 16 * WARPS - 1) / (16 * WARPS);
    const int down_parts = (dim + 32 * WARPS - 1) / (32 * WARPS);
    launch_dependents();
    // While experts are chosen, and nothing else reads memory: where each will have tokens, these
    // are about the rows that the first items take.
    if (early_bytes > 0) {
        const int e = blockIdx.x / up_parts, part = blockIdx.x % up_parts;
        const int feature = (part * WARPS + warp) * 16 + lane % 16;
        const i64 row = (i64)e * 2 * hidden + feature + lane / 16 * hidden;
        if (e < num_experts && feature < hidden)
            fetch_to_l2(up_codes + row * (dim / Format::CODES * 16), early_bytes);
    }
    if (early_bytes < 0) {
        const i64 all_bytes = (i64)num_experts * 2 * hidden * (dim / Format::CODES * 16);
        const i64 first = (i64)(blockIdx.x * Tokens::THREADS + thread) * -early_bytes;
        if (first - early_bytes <= all_bytes) fetch_to_l2(up_codes + first, -early_bytes);
    }
    wait_for_previous_kernels();
    int* starts = reinterpret_cast<int*>(dynamic_shared + NUM_STAGES * Tokens::STAGE_BYTES);
    Aside<Tokens> aside = {starts + num_experts + 1}, next_aside = aside.other();
    int* taken = next_aside.other().ids;
    int* complete = taken + 1;
    const Progress shared = {progress, progress + 1, progress + 2, progress + 2 + max_tiles};
    const Joined joined = {y,   topk_weight,      residual, residual_stride,
                           out, residual_is_bf16, top_k,    dim};
    if (thread == 0) *taken = take(shared.taken);
    const Tiles tiles(starts, start, num_experts, Tokens::COLUMNS, thread, Tokens::THREADS);
    const int num_up = tiles.num_tiles * up_parts;
    const int num_items = num_up + tiles.num_tiles * down_parts;

    auto find = [&](int i) -> Item {
        if (i >= num_items) return {{}, -1, true};
        const bool is_down = i >= num_up;
        const int own = is_down ? i - num_up : i, parts = is_down ? down_parts : up_parts;
        return {tiles.part_of(own / parts, own % parts), own / parts, is_down};
    };
    auto own_row_of = [&](const Item& item) {
        return (item.tile.part * WARPS + warp) * (item.is_down ? 32 : 16);
    };
    auto first_row_of = [&](const Item& item) {
        const int own = own_row_of(item);
        return item.is_down ? (i64)item.tile.expert * dim + (own < dim ? own : dim - 32)
                            : (i64)item.tile.expert * 2 * hidden + (own < hidden ? own : hidden - 16);
    };
    // The last block to leave makes zeros of what it knows nobody reads any more.
    auto leave = [&] {
        if (!JOINS || warp > 0) return;
        int before = 0;
        if (lane == 0) before = arrive(shared.left);
        if (from_lane(before, 0) != gridDim.x - 1) return;
        for (int i = lane; i < tiles.num_tiles + 2; i += WARP) progress[i] = 0;
    };
    Tokens tokens(dynamic_shared, h, dim, thread);
    Cursor<Format> cursor;
    auto ask = [&](const Item& item) {
        const bool is_down = item.is_down;
        const i64 row = first_row_of(item) + lane / 4 * (is_down ? 4 : 2);
        const Rows rows = {is_down ? 1 : hidden, is_down ? 2 : 1};
        const int inputs = is_down ? hidden : dim;
        cursor = Cursor<Format>(is_down ? down_codes : up_codes, is_down ? down_scale : up_scale, row,
                                rows, inputs, lane);
        tokens.take_inputs(is_down ? act : h, inputs);
        tokens.ask(cursor);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if ((i + 1) * DEPTH < tokens.num_blocks) cursor.fetch(i * DEPTH * 64, lane);
    };
    auto copy_aside = [&](const Aside<Tokens>& to, const Item& item) {
        const i64 row =
            first_row_of(item) + (item.is_down ? lane : lane % 16 + lane / 16 * hidden);
        const void* scale = item.is_down ? down_scale : up_scale;
        to.copy(order, item.tile, scale_of<Format>(scale, row), thread);
    };
    auto copy_tokens = [&](const Aside<Tokens>& from, const Item& item) {
        tokens.copy_first(item.tile.count, [&](int column) {
            return item.is_down ? item.tile.first + column : from.ids[column] / top_k;
        });
    };

    Item item = find(*taken), next = item;
    if (item.index < 0) return leave();
    ask(item);
    copy_aside(aside, item);
    end_copies();
    wait_copies<0>();
    if (item.is_down && thread == 0) wait_until(shared.up + item.index, up_parts);
    __syncthreads();
    copy_tokens(aside, item);
    for (;; swap(aside, next_aside), item = next) {
        int ahead = 0;
        tokens.run(cursor, item.tile.count, [&](int chunk, int last) {
            if (AHEAD > 0 && chunk + AHEAD < last) cursor.fetch(AHEAD * DEPTH * 64, lane);
            if (thread == 0 && chunk == (last > 2 ? last - 2 : 0))
                ahead = take(shared.taken);
            if (thread == 0 && chunk == (last > 1 ? last - 1 : 0)) *taken = ahead;
            if (chunk < last) return;
            if (last == 0) __syncthreads();
            next = find(*taken);
            if (next.index >= 0) copy_aside(next_aside, next);
        });
        // The next item's weights are on their way while this one ends.
        const bool has_next = next.index >= 0;
        if (has_next) ask(next);
        end_copies();

        const float* scales = aside.scales() + warp * WARP;
        if (item.is_down)
            end_down<Format>(tokens.sum, scales, aside.ids, item.tile, own_row_of(item), y, dim, lane);
        else
            end_up<Format>(tokens.sum, scales, item.tile, own_row_of(item), act, hidden, 0, lane);
        wait_copies<0>();
        // All has been written, and nobody reads the stages.
        __syncthreads();
        if (has_next && !next.is_down) copy_tokens(next_aside, next);
        if (!item.is_down && thread == 0) arrive(shared.up + item.index);
        if (JOINS && item.is_down && warp == 0) {
            bool is_last = false;
            if (lane < item.tile.count) {
                const int token = aside.ids[lane] / top_k;
                int* ended = shared.down + token * down_parts + item.tile.part;
                is_last = arrive(ended) == top_k - 1;
                if (is_last) *ended = 0;
            }
            const u32 mask = lanes_where(is_last);
            if (lane == 0) *complete = mask;
        }
        if (has_next && next.is_down && thread == Tokens::THREADS - 1)
            wait_until(shared.up + next.index, up_parts);
        if (item.is_down || next.is_down) __syncthreads();
        if (has_next && next.is_down) copy_tokens(next_aside, next);
        if (JOINS && item.is_down) {
            const int row = item.tile.part * WARPS * 32;
            for (int c = warp; c < item.tile.count; c += WARPS)
                if (*complete >> c & 1)
                    for (int f = row + lane * 8; f < row + WARPS * 32 && f < dim; f += WARP * 8)
                        joined.join(aside.ids[c] / top_k, f);
        }
        if (!has_next) return leave();
    }
}

#endif
