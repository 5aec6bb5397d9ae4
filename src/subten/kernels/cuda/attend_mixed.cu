// Decode attention over the planes of an adaptive cache: one query token a sequence.
//
// Letters: D channels of a head, C = D columns of the table of positions, N keys of a page (64).
// Work, splits, rings, waits, products and the merge are those of attend.cu, with a slice of one
// page in each of its planes (codecs/mixed.py), and these differences:
//
//   score of key n:   norm_n (q . level_n), or q . k_n of an exact row, + sum_c coef_c table_nc
//   value of key n:   norm_n level_n at 2 bits or at 4, as the page's planes are, or an exact row
//
//   page_table -> page -> K at its id:  | low bits | high bits | norms |
//                      -> place:  (base, fine) ids of V:  | codes | norms |,  | finer codes |
//   a warp's ring:     | K, a row of the table, V base, V fine | K ... |
//
// Levels of K are bytes out of tables in registers, and q integers of two bytes, as for int2; levels
// of V at 4 bits come out of a table of all pairs of codes in shared memory, a copy a lane, so that no
// bank is met twice; at 2 bits as int2's.
//
// The table's columns are cosines and sines of n w_c, times a factor: scores of a page need its
// row of the page's first key alone, by which coefficients are turned, and angles of distances from
// the page's middle, which lie in shared memory as A fragments in half precision: the error is that
// of TF32. At position n the sum of two angles may differ by 2^-24 n from the table's, whose angles
// are rounded to FP32.
//
//   before the rings:  256 rows of  | a pair of levels, 32 times | 128 bytes of A fragments, or of
//                                                                  scores of exact keys |
//
// Exact rows, few and in at most a few pages, hide their keys' codes. They are read straight from
// memory when the pages are done, a warp a key, in FP32, and join the sums of that warp: of any
// split, so that none has many, but where masses are counted, for a page's is its own split's.
//
// Bytes: planes of all pages but for exact rows, 4 C of the table a page and KV head. The loop at
// D = 128 and 4 bits of both, with a table: see docs/performance.md.
#include "attend_finish.cuh"
#include "head_row.cuh"
#include "mixed_slice.cuh"

#define ARENA_ROW 256
#define MAX_MIXED_WARPS 8

// Strides are below 2^31, so that an address is one multiplication.
struct Plane {
    const u8* at;
    u32 stride, head_stride;

    INLINE Plane(const u8* of_all, i64 of_index, i64 of_head)
        : at(of_all), stride((u32)of_index), head_stride((u32)of_head) {}
    INLINE const u8* of_head(int kv_head) const { return at + (u64)(u32)kv_head * head_stride; }
    INLINE const u8* of(int index, int kv_head) const {
        return of_head(kv_head) + (u64)(u32)index * stride;
    }
};

// What a call has beside AttendCall.
struct MixedCall {
    const u16* q;
    i64 q_stride_t, q_stride_h, q_stride_d;
    Plane k, base, fine, sinks;  // strides in bytes
    const u16* recent;
    i64 recent_stride, recent_head_stride;  // in bf16
    const int *place, *sink_of, *recent_base, *recent_cap, *recent_from;
    const float *coefs, *table;
    float *shares, *lse;
    int num_sinks, window, table_len, share_pages;
    bool has_fine;
};

// Levels of V at 4 bits, in pairs, over 256: a lane makes the pair of an entry, and the warp stores
// four entries at a time.
INLINE void fill_levels(u8* arena) {
    const int num_warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int first = threadIdx.x / WARP * WARP; first < 256; first += WARP * num_warps) {
        float level[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int code = (first + lane) >> 4 * i & 15, size = (code >> 2 & 1) * 4 + (code & 3);
            // Sixteenths of codecs/lloyd_max.py's FINE_LEVELS.
            const u64 sizes = 0xfbbb906d5037220bull;
            level[i] = (float)(int)(sizes >> 8 * size & 255) * (code & 8 ? -0x1p-12f : 0x1p-12f);
        }
        const u32 own = pack_bf16(level[0], level[1]);
#pragma unroll
        for (int i = 0; i < WARP; i += 4) {
            const u32 pair = shuffle_from((int)own, i + lane / 8);
            u8* to = arena + (first + i + lane / 8) * ARENA_ROW + lane % 8 * 16;
            *reinterpret_cast<uint4*>(to) = {pair, pair, pair, pair};
        }
    }
}

// Cosines and sines of the distances from a page's middle as A fragments: 32 * 16 bytes each, in
// quarters of 128 bytes. Of the four pairs of columns of `rows` for fragments `f`, those of two tiles.
template <int DIM>
INLINE void fill_angles(u8* arena, const FirstRows<4>& rows, int f) {
    const int lane = threadIdx.x % WARP, g = lane / 4, tile = f / (DIM / 32) * 2;
    const int num = PAGE_KEYS / 2 - 1 - key_of_row(g) - 8 * tile;  // of whole turns from the middle
    u32 cosines[4], sines[4];
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
        Turn turns[2][2];  // of two columns; of keys `num` and `num` - 8 from the middle
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const Turn half = rows.half(pair + c);
            Turn all = half, power = half * half;
            Turn eight{1, 0};
#pragma unroll
            for (int bit = 0; bit < 5; ++bit) {
                const Turn more = all * power;
                if (num >> bit & 1) all = more;
                if (bit == 3) eight = power;
                power = power * power;
            }
            turns[c][0] = all;
            turns[c][1] = all * Turn{eight.cosine, -eight.sine};
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cosines[pair + i] = pack_half(turns[0][i].cosine, turns[1][i].cosine);
            sines[pair + i] = pack_half(turns[0][i].sine, turns[1][i].sine);
        }
    }
    u8* to = arena + (8 * f + lane / 8) * ARENA_ROW + 128 + lane % 8 * 16;
    *reinterpret_cast<uint4*>(to) = {cosines[0], cosines[1], cosines[2], cosines[3]};
    to += 4 * ARENA_ROW;
    *reinterpret_cast<uint4*>(to) = {sines[0], sines[1], sines[2], sines[3]};
}

template <int BITS, int DIM, bool HAS_TABLE, bool POLLS>
INLINE void mixed_block(const AttendCall& call, const MixedCall& mixed) {
    using P = MixedPart<BITS, DIM>;
    using Sums = MixedSums<BITS, DIM>;
    constexpr int HEADS = 8;
    // Heads lie so far apart that lanes of two of them read different banks.
    constexpr int COEFS = DIM + 16;
    static_assert(HEADS * Sums::SUMS_ROW * 4 <= 2 * P::STAGE, "two stages hold a warp's sums");
    DYNAMIC_SHARED(dynamic_shared);
    __shared__ uint4 q_shared[HEADS * DIM / 8];
    __shared__ float4 coefs_shared[HAS_TABLE ? HEADS * COEFS / 4 : 1];
    __shared__ Turn turns_shared[HAS_TABLE ? DIM / 2 : 1];  // of pairs of columns, by 31.5 rows
    __shared__ MixedFacts<DIM> q_facts;
    __shared__ float stats[MAX_WARPS][HEADS][3];
    launch_dependents();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    const int group = call.group, num_stages = call.num_stages;
    // First, so that its address is a constant.
    u8* const arena = dynamic_shared;
    float* const norms = reinterpret_cast<float*>(arena + 256 * ARENA_ROW);
    u8* const rings = arena + 256 * ARENA_ROW + MAX_MIXED_WARPS * P::NORMS * 4;
    u8* ring = rings + warp * num_stages * P::STAGE;
    // What needs no more than the table is done while loads are under way.
    constexpr int UNITS = DIM / 32;
    const int pair = lane % (WARP / 2) * (DIM / WARP);
    FirstRows<4> of_fragments;
    FirstRows<DIM / WARP> of_lane;
    Turn turns[DIM / WARP] = {};  // of the lane's columns, by 31.5 rows
    if (HAS_TABLE) {
        of_fragments.template load<DIM>(mixed.table, mixed.table_len,
                                        warp % UNITS * 16 + 4 * (lane % 4));
        of_lane.template load<DIM>(mixed.table, mixed.table_len, pair);
    }
    auto make_barriers = [&] {
        if (lane == 0) {
#pragma unroll 1
            for (int i = 0; i < num_stages; ++i) init_barrier(P::barrier_of(ring + i * P::STAGE));
            publish_barriers();
        }
        sync_warp();
    };
    auto make_turns = [&] {
        if (!HAS_TABLE) return;
#pragma unroll 1
        for (int f = warp; f < 2 * UNITS; f += num_warps) {
            if (f != warp)
                of_fragments.template load<DIM>(mixed.table, mixed.table_len,
                                                f % UNITS * 16 + 4 * (lane % 4));
            fill_angles<DIM>(arena, of_fragments, f);
        }
#pragma unroll
        for (int i = 0; i < DIM / WARP; ++i) {
            const Turn half = of_lane.half(i);
            Turn power = half;
#pragma unroll
            for (int bit = 0; bit < 6; ++bit) power = power * power;
            turns[i] = power * Turn{half.cosine, -half.sine};
            if (warp == 0 && lane < WARP / 2) turns_shared[pair + i] = turns[i];
        }
    };
    BlockShare share;
    if (!share.find<PAGE_KEYS>(call, make_barriers, make_turns)) return;
    const int tile = share.tile, kv_head = share.kv_head, seq = share.seq, token = share.token;
    const int num_keys = share.num_keys, num_seen = share.num_seen, num_slices = share.num_slices;
    const int split = share.split, first = share.first, end = share.end;

    // The producer goes through the warp's pages first + warp, first + warp + num_warps, ... Lane l
    // holds page and places of the l-th of the 32 that it is at, and copies one plane of each: what
    // such a plane is, by its id.
    const int* table_row = call.page_table + seq * call.page_table_stride;
    const u8* plane = mixed.k.of_head(kv_head);
    u32 plane_stride = mixed.k.stride;
    int plane_at = 0, plane_bytes = P::K_BYTES;
    if (lane == 1) {
        plane = mixed.base.of_head(kv_head);
        plane_stride = mixed.base.stride;
        plane_at = P::BASE;
        plane_bytes = P::BASE_BYTES;
    } else if (lane == 2) {
        plane = mixed.fine.of_head(kv_head);
        plane_stride = mixed.fine.stride;
        plane_at = P::FINE;
        plane_bytes = P::FINE_BYTES;
    } else if (lane == 3) {
        plane = reinterpret_cast<const u8*>(mixed.table);
        plane_stride = 4 * PAGE_KEYS * DIM;
        plane_at = P::TABLE_ROW;
        plane_bytes = P::TABLE_BYTES;
    }
    int put_slice = first + warp, put_lane = 0, page = 0, base = 0, fine = -1;
    auto load_places = [&] {
        const int slice = put_slice + lane * num_warps;
        if (slice >= end) return;
        page = load_from_l2(table_row + slice);
        base = load_from_l2(mixed.place + 3 * (i64)page);
        fine = load_from_l2(mixed.place + 3 * (i64)page + 1);
    };
    auto put = [&](u8* stage) {
        if (put_slice >= end) return;
        const int page_id = shuffle_from(page, put_lane), base_id = shuffle_from(base, put_lane);
        const int fine_id = shuffle_from(fine, put_lane);
        u64* barrier = P::barrier_of(stage);
        if (lane == 0) {
            *P::note_of(stage) = fine_id;
            expect_bytes(barrier, P::K_BYTES + P::BASE_BYTES + (HAS_TABLE ? P::TABLE_BYTES : 0) +
                                      (fine_id < 0 ? 0 : P::FINE_BYTES));
        }
        const int id = lane == 0 ? page_id : lane == 1 ? base_id : lane == 2 ? fine_id : put_slice;
        if (lane < (HAS_TABLE ? 4 : 3) && id >= 0)
            copy_bulk(stage, plane + (u64)(u32)id * plane_stride, plane_bytes, barrier, plane_at);
        put_slice += num_warps;
        if (++put_lane == WARP) {
            put_lane = 0;
            load_places();
        }
    };
    // Where exact rows are: asked for at once, needed when the levels are there.
    int near_from = 0, near_base = 0, near_cap = 0, sink = -1;
    if (mixed.window > 0) {
        near_from = load_from_l2(mixed.recent_from + seq);
        near_base = load_from_l2(mixed.recent_base + seq);
        near_cap = load_from_l2(mixed.recent_cap + seq);
    }
    const bool has_sinks = num_keys > 0 && mixed.num_sinks > 0;
    const int first_page = has_sinks ? load_from_l2(table_row) : 0;
    load_places();
    if (has_sinks) sink = load_from_l2(mixed.sink_of + first_page);
    // The newest row may come from the kernel ahead.
    const int newest = num_slices - 1;
    int num_put = 0;
#pragma unroll 1
    for (; num_put < num_stages && put_slice < newest; ++num_put) put(ring + num_put * P::STAGE);

    if (mixed.has_fine) fill_levels(arena);
    ExactRows exact{};
    exact.num_keys = num_keys;
    exact.first_near = num_keys;
    if (num_keys > 0 && mixed.window > 0) {
        const int near = num_seen - mixed.window;
        exact.first_near = near > near_from ? near : near_from;
        if (exact.first_near > num_keys) exact.first_near = num_keys;
        exact.base = near_base;
        exact.cap = near_cap;
        exact.recent = mixed.recent + kv_head * mixed.recent_head_stride;
        exact.recent_stride = mixed.recent_stride;
    }
    if (sink >= 0) {
        exact.sinks = reinterpret_cast<const u16*>(mixed.sinks.of(sink, kv_head));
        exact.sink_values = mixed.num_sinks * DIM;
        exact.num_sinks = mixed.num_sinks < num_keys ? mixed.num_sinks : num_keys;
    }
    // The block's exact keys, of sinks and then of recent ones: every `exact_step`-th from
    // `first_exact` on, the first of which a warp fetches to L2, but for the newest of all.
    const bool has_masses = mixed.shares != nullptr;
    const int num_used = share.num_used();
    exact.span(has_masses ? first * PAGE_KEYS : 0, has_masses ? end * PAGE_KEYS : num_keys);
    const int first_exact = has_masses ? warp : split + warp * num_used;
    const int exact_step = has_masses ? num_warps : num_warps * num_used;
    if (first_exact < exact.count() && exact.key(first_exact) < num_keys - 1 && lane < 2) {
        const int key = exact.key(first_exact);
        if (lane == 0) prefetch_bulk(exact.row<DIM>(key, false), 2 * DIM);
        if (lane == 1) prefetch_bulk(exact.row<DIM>(key, true), 2 * DIM);
        if (HAS_TABLE && lane == 0) prefetch_bulk(mixed.table + (i64)key * DIM, 4 * DIM);
    }

    wait_for_previous_kernels();
#pragma unroll 1
    for (; num_put < num_stages; ++num_put) put(ring + num_put * P::STAGE);

    // A warp a head: coefficients as halves, at most 2^12, and the query as integers and as it is.
    u8* q_bytes = reinterpret_cast<u8*>(q_shared);
    float* coefs = reinterpret_cast<float*>(coefs_shared);
#pragma unroll 1
    for (int head = warp; head < HEADS; head += num_warps) {
        const bool is_real = head < group;
        const i64 row = (i64)token * call.num_kv_heads * group + kv_head * group + head;
        const u16* from = mixed.q + token * mixed.q_stride_t +
                          (kv_head * group + head) * mixed.q_stride_h;
        u16 numbers[DIM / WARP] = {};
        float own[DIM / WARP] = {}, unscale = 1;
        if (is_real) {
#pragma unroll
            for (int j = 0; j < DIM / WARP; ++j)
                numbers[j] = from[(lane + j * WARP) * mixed.q_stride_d];
            if (HAS_TABLE) load_values(own, mixed.coefs + row * DIM + lane * (DIM / WARP));
        }
        if (HAS_TABLE) {
            turn_columns(own, turns, lane);
            int most = 0;
#pragma unroll
            for (int i = 0; i < DIM / WARP; ++i) {
                const int bits = float_bits(own[i]) & 0x7fffffff;
                most = bits > most ? bits : most;
            }
            int exponent = warp_max(most) >> 23;
            exponent = exponent < 87 ? 87 : exponent;
            float scale = 1;
            if (exponent < 255) {
                scale = bits_float((265 - exponent) << 23);
                unscale = bits_float((exponent - 11) << 23);
            }
#pragma unroll
            for (int i = 0; i < DIM / WARP; ++i)
                coefs[head * COEFS + lane * (DIM / WARP) + i] = own[i] * scale;
        }
        float x[DIM / WARP], most = 0;
        bool is_finite = true;
#pragma unroll
        for (int j = 0; j < DIM / WARP; ++j) {
            const int channel = lane + j * WARP;
            q_facts.rows[head * MixedFacts<DIM>::ROW + channel] = numbers[j];
            x[j] = low_bf16(numbers[j]);
            most = larger(most, larger(x[j], -x[j]));
            is_finite = is_finite && x[j] - x[j] == 0.0f;
        }
        const QuerySteps steps(most, !lanes_where(!is_finite));
        int sum = 0;
#pragma unroll
        for (int j = 0; j < DIM / WARP; ++j) {
            const int bits = steps.round(x[j]), place = Sums::q_place(head, lane + j * WARP);
            q_bytes[place] = (u8)((bits + 128) >> 8);
            q_bytes[place + Sums::Q_LOWER] = (u8)bits;
            sum += bits;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            const float unit = steps.step * Sums::Levels::UNIT;
            q_facts.factor[head] = call.scale_log2 * unit;
            q_facts.first_sum[head] = -Sums::Levels::SURPLUS * sum;
            q_facts.of_coefs[head] = unscale;
            q_facts.positions[head] = divide(unscale, unit);
        }
    }
    __syncthreads();

    Sums own(lane, reinterpret_cast<const u16*>(q_shared), q_facts, norms + warp * P::NORMS);
    const float* own_coefs = coefs + own.g * COEFS;
    const u8* fragments = arena + lane / 8 * ARENA_ROW + 128 + lane % 8 * 16;
    float* shares = nullptr;
    if (mixed.shares)
        shares = mixed.shares + ((i64)tile * call.num_kv_heads + kv_head) * mixed.share_pages * HEADS;
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
        const int first_key = slice * PAGE_KEYS;
        typename Sums::Scores p;
        wait_phase(P::barrier_of(stage), parity);
        own.decode_norms(stage);
        own.score(p, stage);
        if (HAS_TABLE)
            own.add_positions(p, reinterpret_cast<const float*>(stage + P::TABLE_ROW), own_coefs,
                              fragments);
        own.hide(p, exact.num_sinks - first_key, exact.first_near - first_key);
        float of_page[1][2];
        own.weigh(p, of_page, PAGE_KEYS);
        if (shares) own.put_share(shares + (i64)slice * HEADS, of_page[0]);
        u32 pairs[Sums::TILES][2];
        own.weigh_values(pairs, p);
        if (*P::note_of(stage) < 0)
            own.add_base(pairs, stage);
        else
            own.add_fine(pairs, stage, arena, 4 * lane);
        give_back();
    }

    // The sums may reach beyond a stage's end, where its barrier lies.
    if (lane == 0) {
#pragma unroll 1
        for (int i = 0; i < num_stages; ++i) end_barrier(P::barrier_of(ring + i * P::STAGE));
    }
    sync_warp();

    // The warps' sums, each in its own ring, which is idle now.
    float* rows = reinterpret_cast<float*>(ring);
    own.finish(rows, stats[warp]);
    sync_warp();

    float* scores = reinterpret_cast<float*>(arena + 128 * ARENA_ROW + 128);
    auto scores_of = [&](int i) { return scores + i / 4 * (ARENA_ROW / 4) + i % 4 * HEADS; };
    if (first_exact < exact.count()) {
        ExactSums<DIM> sums;
        const int at = lane * (DIM / WARP);
#pragma unroll
        for (int i = 0; HAS_TABLE && i < DIM / WARP; ++i) turns[i] = turns_shared[pair + i];
#pragma unroll 1
        for (int i = first_exact; i < exact.count(); i += exact_step) {
            const int key = exact.key(i);
            sums.add(exact.row<DIM>(key, false) + at,
                     exact.row<DIM>(key, true) + Sums::first_channel(lane),
                     HAS_TABLE ? mixed.table + (i64)key * DIM + at : nullptr, turns, coefs + at,
                     COEFS, q_facts, call.scale_log2, has_masses ? scores_of(i) : nullptr, lane);
        }
        sums.join(rows, Sums::SUMS_ROW, stats[warp], lane);
    }
    if (shares) {
        // They count for their pages: a thread a head of one.
        __syncthreads();
#pragma unroll 1
        for (int slice = first + warp; slice < end; slice += num_warps) {
            const int from = slice * PAGE_KEYS, to = from + PAGE_KEYS;
            if (!exact.are_in(from, PAGE_KEYS) || lane >= HEADS) continue;
            float* of_page = shares + (i64)slice * HEADS + lane;
            float max = *of_page, sum = 1;
#pragma unroll 1
            for (int i = 0; i < exact.count(); ++i) {
                const int key = exact.key(i);
                if (key < from || key >= to) continue;
                const float s = scores_of(i)[lane], most = larger(max, s), shift = shift_of(most);
                sum = sum * power_of_two(max - shift) + power_of_two(s - shift);
                max = most;
            }
            *of_page = max + logarithm_of_two(sum);
        }
    }
    const int num_taken = exact.count() > 0 ? num_warps : end - first;
    finish_block<KvMixed, Sums, DIM, POLLS>(call, share, num_taken, rings, num_stages * P::STAGE,
                                            stats, mixed.lse);
}

template <int BITS, int DIM, bool HAS_TABLE, bool POLLS>
__global__ void __launch_bounds__(256, 1)
    attend_mixed_kernel(const u16* q, i64 q_stride_t, i64 q_stride_h, i64 q_stride_d, const u8* k,
                        i64 k_stride, i64 k_head_stride, const u8* base, i64 base_stride,
                        i64 base_head_stride, const u8* fine, i64 fine_stride,
                        i64 fine_head_stride, const u8* sinks, i64 sink_stride,
                        i64 sink_head_stride, const u16* recent, i64 recent_stride,
                        i64 recent_head_stride, const int* place, const int* sink_of,
                        const int* recent_base, const int* recent_cap, const int* recent_from,
                        const float* coefs, const float* table, float* shares, float* lse,
                        int num_sinks, int window, int table_len, int share_pages, int has_fine,
                        const int* page_table, i64 page_table_stride, const i64* position,
                        const int* kv_len, const int* tile_seq, const int* tile_start, u16* out,
                        float* part, float* part_stats, int* arrived, float scale_log2,
                        int num_kv_heads, int group, int num_splits, int min_slices,
                        int num_stages) {
    const AttendCall call{nullptr,  0,      0,        page_table, page_table_stride,
                          position, kv_len, tile_seq, tile_start, out,
                          part,     part_stats, arrived, scale_log2, num_kv_heads,
                          group,    num_splits, min_slices, num_stages};
    const MixedCall mixed{q,
                          q_stride_t,
                          q_stride_h,
                          q_stride_d,
                          {k, k_stride, k_head_stride},
                          {base, base_stride, base_head_stride},
                          {fine, fine_stride, fine_head_stride},
                          {sinks, sink_stride, sink_head_stride},
                          recent,
                          recent_stride,
                          recent_head_stride,
                          place,
                          sink_of,
                          recent_base,
                          recent_cap,
                          recent_from,
                          coefs,
                          table,
                          shares,
                          lse,
                          num_sinks,
                          window,
                          table_len,
                          share_pages,
                          has_fine != 0};
    mixed_block<BITS, DIM, HAS_TABLE, POLLS>(call, mixed);
}
