// Both products of the routed experts for few tokens each, in one launch: blocks take items, parts
// of a tile's rows, from one list, first all of `up` and then all of `down`, and an item of `down`
// begins as soon as the parts of its own tile's `up` have ended. So that the memory always has a
// block's next weights to bring: there is no border where all blocks end and begin.
//
// Letters and kernels for more tokens: grouped.cu, which includes this file.
#ifndef SUBTEN_GROUPED_BOTH_CUH
#define SUBTEN_GROUPED_BOTH_CUH

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
// A block takes an item's successor when two chunks are left: the later, the better the end is shared.
//
// Bytes: 2 * F and D rows of weights for each expert with tokens; A * D * 2 and A * F * 2 from L2 for
// each part of the rows. FP8, 32 tokens of qwen3-30b-a3b, with `combine_kernel`: 554 MB in 137 us on
// an H200, 125 us at the 4.44 TB/s that only reading gave (h200-grouped-both.json).
template <class Format, int NT, int WARPS, int DEPTH, int BLOCKS>
__global__ void __launch_bounds__(WARP* WARPS, BLOCKS)
    grouped_both_kernel(const u8* up_codes, const void* up_scale, const u8* down_codes,
                        const void* down_scale, const u16* h, const int* start, const int* order,
                        u16* act, u16* y, int* progress, int num_experts, int top_k, int dim,
                        int hidden, int early_bytes) {
    DYNAMIC_SHARED(dynamic_shared);
    using Tokens = Product<Format, NT, WARPS, DEPTH, false, false>;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int up_parts = (hidden + 16 * WARPS - 1) / (16 * WARPS);
    const int down_parts = (dim + 32 * WARPS - 1) / (32 * WARPS);
    launch_dependents();
    // While experts are chosen, and nothing else reads memory: all of the first experts, for some of
    // the first items, so that others have the memory while these are read from L2.
    const i64 early_end = (i64)(blockIdx.x * Tokens::THREADS + thread + 1) * early_bytes;
    if (early_bytes > 0 && early_end <= (i64)num_experts * 2 * hidden * dim / Format::CODES * 16)
        fetch_to_l2(up_codes + early_end - early_bytes, early_bytes);
    wait_for_previous_kernels();
    int* starts = reinterpret_cast<int*>(dynamic_shared + NUM_STAGES * Tokens::STAGE_BYTES);
    Aside<Tokens> aside = {starts + num_experts + 1}, next_aside = aside.other();
    int *next_number = next_aside.other().ids, *ended = progress + 1;
    if (thread == 0) *next_number = take(progress);
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

    Item item = find(*next_number), next = item;
    if (item.index < 0) return;
    ask(item);
    copy_aside(aside, item);
    end_copies();
    wait_copies<0>();
    if (item.is_down && thread == 0) wait_until(ended + item.index, up_parts);
    __syncthreads();
    copy_tokens(aside, item);
    for (;; swap(aside, next_aside), item = next) {
        int number = 0;
        tokens.run(cursor, item.tile.count, [&](int chunk, int last) {
            // A chunk between, so that nobody waits for the answer.
            if (thread == 0 && chunk == (last > 2 ? last - 2 : 0)) number = take(progress);
            if (thread == 0 && chunk == (last > 1 ? last - 1 : 0)) *next_number = number;
            if (chunk < last) return;
            if (last == 0) __syncthreads();
            next = find(*next_number);
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
        if (!item.is_down && thread == 0) arrive(ended + item.index);
        if (!has_next) return;
        if (next.is_down) {
            if (thread == 0) wait_until(ended + next.index, up_parts);
            __syncthreads();
            copy_tokens(next_aside, next);
        }
    }
}

#endif
