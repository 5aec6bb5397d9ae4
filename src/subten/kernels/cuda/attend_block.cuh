// Decode attention of one block: its slices of one sequence and KV head, and the merge of splits.
//
// Letters, lanes and layouts as in attend.cu.
#ifndef SUBTEN_ATTEND_BLOCK_CUH
#define SUBTEN_ATTEND_BLOCK_CUH

#include "attend_finish.cuh"
#include "attend_slice.cuh"
#include "head_row.cuh"

// The work of one block. `Rows` gives the token's rows, which the kernel ahead writes: queries
// 0 to group - 1 of the block's KV head and, where it APPENDS, a key and a value:
//
//   prepare      what of it needs no wait; true where key and value are to be appended
//   begin, take  the warp's first row, after the wait; a row, and which one is next
//                (lane's values as in head_row.cuh)
//   turn_query   from the row as it was to a query whose values are bf16
//   append       encodes the key or the value, into its page and into shared memory
template <class Codec, int DIM, int TILES_H, bool POLLS, class Rows>
INLINE void attend_block(const AttendCall& call, Rows& rows) {
    using P = Part<Codec, DIM>;
    using Sums = WarpSums<Codec, DIM, TILES_H>;
    constexpr int HEADS = Sums::HEADS, KEYS = P::KEYS, N = DIM / 2 / WARP;
    static_assert(HEADS * Sums::SUMS_ROW * 4 <= 2 * P::STAGE, "two stages hold a warp's sums");
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ uint4 q_shared[HEADS * DIM / 8];  // rotated, where `q_place` says
    __shared__ QueryFacts<HEADS> q_facts;
    __shared__ float stats[MAX_WARPS][HEADS][3];  // max, sum, zero of each warp
    // Codes, scale and zero of the key and the value that the block appends.
    __shared__ uint4 appended[Rows::APPENDS ? 2 : 1][P::ROW / 16 + 1];
    launch_dependents();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    const int group = call.group, num_stages = call.num_stages;
    u8* ring = dynamic_shared + warp * num_stages * P::STAGE;
    BlockShare share;
    const bool has_work = share.find<KEYS>(call, [&] {
        if (lane == 0) {
#pragma unroll 1
            for (int i = 0; i < num_stages; ++i) init_barrier(P::barrier_of(ring + i * P::STAGE));
            publish_barriers();
        }
        sync_warp();
    }, [] {});
    if (!has_work) return;
    const int kv_head = share.kv_head, seq = share.seq, token = share.token;
    const int num_keys = share.num_keys, num_seen = share.num_seen, num_slices = share.num_slices;
    const int first = share.first, end = share.end;

    // The producer goes through K and V of the warp's slices first + warp, first + warp +
    // num_warps, ... Lane l holds the page of the l-th of the 32 slices that it is at.
    const u8* head_pages = call.pages + kv_head * call.head_stride;
    const int* table = call.page_table + seq * call.page_table_stride;
    constexpr int SLICES = PAGE_KEYS / KEYS, PARTS = P::HAS_BOTH ? 1 : 2;
    auto load_pages = [&](int slice) {
        slice += lane * num_warps;
        return slice < end ? load_from_l2(table + slice / SLICES) : 0;
    };
    int put_slice = first + warp, put_part = 0, page_ids = load_pages(put_slice);
    auto put = [&](u8* stage) {
        if (put_slice < end) {
            const i64 page = shuffle_from(page_ids, put_part / PARTS);
            const int is_value = put_part % PARTS;
            if (lane == 0)
                P::fetch(stage, head_pages + page * call.page_stride + is_value * P::PAGE_BYTES,
                         put_slice % SLICES * KEYS, is_value);
            ++put_part;
            if (put_part % PARTS == 0) {
                put_slice += num_warps;
                if (put_part == PARTS * WARP) {
                    put_part = 0;
                    page_ids = load_pages(put_slice);
                }
            }
        }
    };
    // The slice with the newest row, its row filled in once its copy is there, if this block
    // appends it. Before that the copy may bring anything in the row's place.
    const int newest = num_slices - 1;
    bool appends = false;
    int patched = -1;
    int num_put = 0;
    if constexpr (Rows::APPENDS) {
#pragma unroll 1
        for (; num_put < num_stages; ++num_put) put(ring + num_put * P::STAGE);
        appends = rows.prepare(token, kv_head, group, num_seen - 1, lane) && end == num_slices;
        if (appends && num_keys == num_seen) patched = newest;
    } else {
#pragma unroll 1
        for (; num_put < num_stages && put_slice < newest; ++num_put)
            put(ring + num_put * P::STAGE);
        if (num_put < num_stages && put_slice == newest && lane == 0) {
            // L2 is where the newest row will be written, so the rest of the slice may wait there.
            const i64 page = load_from_l2(table + newest / SLICES);
#pragma unroll
            for (int is_value = 0; is_value < 2; ++is_value)
                P::prefetch(head_pages + page * call.page_stride + is_value * P::PAGE_BYTES,
                            newest % SLICES * KEYS);
        }
        rows.prepare(token, kv_head, group, num_seen - 1, lane);
    }
    u16* q_places = reinterpret_cast<u16*>(q_shared);
    auto place_query = [&](const float (&x)[2][N], int head) {
        float sum = 0, most = 0;
        int whole_sum = 0, first_sum = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float rounded = low_bf16(pack_bf16(x[half][j], 0.0f));
                sum += rounded;
                most = larger(most, larger(rounded, -rounded));
            }
        QuerySteps steps;
        if constexpr (Codec::KEYS_ARE_BYTES) {
            // NaN stays NaN; so does infinity, less itself.
            steps = QuerySteps(most, !lanes_where(sum - sum != 0.0f));
        } else if (Codec::HAS_ZERO) {
            sum = sum_over_lanes<WARP>(sum);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const int channel = half * (DIM / 2) + lane * N + j;
                const float rounded = low_bf16(pack_bf16(x[half][j], 0.0f));
                const int place = Sums::q_place(head, channel);
                if constexpr (Codec::KEYS_ARE_BYTES) {
                    const int bits = steps.round(rounded);
                    u8* bytes = reinterpret_cast<u8*>(q_shared) + place;
                    bytes[0] = (u8)((bits + 128) >> 8);
                    bytes[Sums::Q_LOWER] = (u8)bits;
                    whole_sum += bits;
                    if (half == 0) first_sum -= Codec::LOW_MIDDLE * bits;
                } else {
                    q_places[place] = (u16)pack_bf16(rounded * Codec::QUERY_FACTOR, 0.0f);
                }
            }
        if constexpr (Codec::KEYS_ARE_BYTES) {
            if (Codec::LOW_MIDDLE != 0) first_sum = warp_sum(first_sum);
            if (Codec::HAS_ZERO) sum = (float)(warp_sum(whole_sum) * (1 << Codec::KEY_SHIFT));
        }
        if (lane == 0) {
            q_facts.factor[head] = call.scale_log2 * steps.step * Codec::SCORE_FACTOR;
            q_facts.sum[head] = sum;
            q_facts.first_sum[head] = first_sum;
        }
    };
#pragma unroll 1
    for (int head = group + warp; head < HEADS; head += num_warps) {
        const float none[2][N] = {};
        place_query(none, head);
    }
    wait_for_previous_kernels();
    if constexpr (!Rows::APPENDS) {
#pragma unroll 1
        for (; num_put < num_stages; ++num_put) put(ring + num_put * P::STAGE);
    }

    // A warp a row.
    const int num_rows = group + (appends ? 2 : 0);
    if (warp < num_rows) rows.begin(warp);
#pragma unroll 1
    for (int row = warp; row < num_rows; row += num_warps) {
        float x[2][N];
        rows.take(x, row, row + num_warps < num_rows ? row + num_warps : row);
        if (row < group) {
            rows.turn_query(x);
            if (Codec::IS_ROTATED) rotate_row(x, lane);
            place_query(x, row);
        } else if constexpr (Rows::APPENDS) {
            rows.append(x, row > group, reinterpret_cast<u8*>(appended[row - group]), lane);
        }
    }
    __syncthreads();

    // The copy has ended and all lanes have seen it, so that ordinary stores follow it. No copy
    // follows them, for the slice is the warp's last.
    auto patch = [&](u8* stage, int row, bool is_value) {
        const u8* from = reinterpret_cast<const u8*>(appended[is_value]);
        u8* to = stage + row * P::ROW + (is_value ? row / P::QUARTER * P::PAD : 0);
#pragma unroll
        for (int at = 4 * lane; at < P::ROW; at += 4 * WARP)
            *reinterpret_cast<u32*>(to + at) = *reinterpret_cast<const u32*>(from + at);
        if (lane == 0) {
            from += P::ROW;
            move_bytes<P::SCALE_ROW>(stage + P::SCALE + P::SCALE_ROW * row, from);
            move_bytes<P::ZERO_ROW>(stage + P::ZERO + P::ZERO_ROW * row, from + P::SCALE_ROW);
        }
        sync_warp();
    };

    Sums own(lane, q_places, q_facts);
    u8 *stage = ring, *ring_end = ring + num_stages * P::STAGE;
    int parity = 0;
    auto give_back = [&] {
        sync_warp();
        put(stage);
        stage += P::STAGE;
        if (stage == ring_end) {
            stage = ring;
            parity ^= 1;
        }
    };
#pragma unroll 1
    for (int slice = first + warp; slice < end; slice += num_warps) {
        const int limit = num_keys - slice * KEYS;
        typename Sums::Scores p;
        float of_slice[TILES_H][2];
        wait_phase(P::barrier_of(stage), parity);
        if (Rows::APPENDS && slice == patched) patch(stage, limit - 1, false);
        own.score(p, stage);
        if (!P::HAS_BOTH) give_back();
        own.weigh(p, of_slice, limit);
        if (!P::HAS_BOTH) wait_phase(P::barrier_of(stage), parity);
        u8* values = stage + P::VALUES_AT;
        if (Rows::APPENDS && slice == patched) patch(values, limit - 1, true);
        own.clear_tail(values, limit);
        own.add_values(p, values);
        give_back();
    }

    // The sums may reach beyond a stage's end, where its barrier lies.
    if (lane == 0) {
#pragma unroll 1
        for (int i = 0; i < num_stages; ++i) end_barrier(P::barrier_of(ring + i * P::STAGE));
    }
    sync_warp();

    // The warps' sums, each in its own ring, which is idle now.
    own.finish(reinterpret_cast<float*>(ring), stats[warp]);
    finish_block<Codec, Sums, DIM, POLLS>(call, share, end - first, dynamic_shared,
                                          num_stages * P::STAGE, stats, nullptr);
}

#endif
