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
//   a warp's ring:     | K, a row of the table | V base, V fine | K ... |
//
// Levels of K are bytes out of tables in registers, and q integers of two bytes, as for int2; levels
// of V at 4 bits come out of a table of all pairs of codes in shared memory, a copy a lane, so that no
// bank is met twice; at 2 bits as int2's.
//
// The table's columns are cosines and sines of n w_c, times a factor: scores of a page need its
// row of the page's first key alone, by which coefficients are turned, and rows 0 to 63, which lie
// in shared memory as A fragments in half precision: the error is that of TF32. At position n the
// sum of two angles may differ by 2^-24 n from the table's, whose angles are rounded to FP32.
//
//   before the rings:  256 rows of  | a pair of levels, 32 times | 128 bytes of A fragments, or of
//                                                                  scores of exact keys |
//
// Exact rows, few and in at most a few pages, hide their keys' codes. They are read straight from
// memory when the pages are done, a warp a key, in FP32, and join the sums of that warp.
//
// Bytes: planes of all pages but for exact rows, 4 C of the table a page and KV head. The loop at
// D = 128 and 4 bits of both, with a table: see docs/performance.md.
#include "attend_finish.cuh"
#include "head_row.cuh"
#include "mixed_slice.cuh"

#define ARENA_ROW 256

struct Plane {
    const u8* at;
    i64 stride, head_stride;

    INLINE const u8* of(int index, int kv_head) const {
        return at + index * stride + kv_head * head_stride;
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

// Levels of V at 4 bits, in pairs, over 256.
INLINE void fill_levels(u8* arena) {
    const int num_warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int entry = threadIdx.x / WARP * 4 + lane / 8; entry < 256; entry += 4 * num_warps) {
        float level[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int code = entry >> 4 * i & 15, size = (code >> 2 & 1) * 4 + (code & 3);
            // Sixteenths of codecs/lloyd_max.py's FINE_LEVELS.
            const u64 sizes = 0xfbbb906d5037220bull;
            level[i] = (float)(int)(sizes >> 8 * size & 255) * (code & 8 ? -0x1p-12f : 0x1p-12f);
        }
        const u32 pair = pack_bf16(level[0], level[1]);
        *reinterpret_cast<uint4*>(arena + entry * ARENA_ROW + lane % 8 * 16) = {pair, pair, pair,
                                                                             pair};
    }
}

// Rows 0 to 63 of the table as A fragments: 32 * 16 bytes each, in quarters of 128 bytes.
template <int DIM>
INLINE void fill_angles(u8* arena, const float* table, int table_len) {
    constexpr int STEPS = DIM / 16;
    const int num_warps = blockDim.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int f = threadIdx.x / WARP; f < 4 * STEPS; f += num_warps) {
        const int tile = f / STEPS, step = f % STEPS, pair = 16 * (step / 2) + 4 * t + step % 2 * 2;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = key_of_row(g + i % 2 * 8) + 4 * tile;
            float v[2] = {};
            if (row < table_len) {
                float factor[2];
                load_vector(factor, table + pair);
                load_vector(v, table + row * DIM + i / 2 * (DIM / 2) + pair);
                v[0] = divide(v[0], factor[0]);
                v[1] = divide(v[1], factor[1]);
            }
            words[i] = pack_half(v[0], v[1]);
        }
        u8* to = arena + (4 * f + lane / 8) * ARENA_ROW + 128 + lane % 8 * 16;
        *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    }
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
    __shared__ MixedFacts<DIM> q_facts;
    __shared__ float stats[MAX_WARPS][HEADS][3];
    launch_dependents();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    const int group = call.group, num_stages = call.num_stages;
    // First, so that its address is a constant.
    u8* const arena = dynamic_shared;
    u8* const rings = dynamic_shared + 256 * ARENA_ROW;
    u8* ring = rings + warp * num_stages * P::STAGE;
    const bool has_idle = (int)gridDim.x != call.num_kv_heads;
    int kv_head = blockIdx.x, tile = blockIdx.y, split = blockIdx.z;
    if (has_idle) {
        tile = 0;
        split = kv_head / call.num_kv_heads;
        kv_head -= split * call.num_kv_heads;
    }
    const int seq = load_from_l2(call.tile_seq + tile);
    const int token = load_from_l2(call.tile_start + tile);
    if (lane == 0) {
#pragma unroll 1
        for (int i = 0; i < num_stages; ++i) init_barrier(P::barrier_of(ring + i * P::STAGE));
        publish_barriers();
    }
    sync_warp();

    int num_keys = 0, num_seen = 0;
    if (seq >= 0) {
        // The low word of an int64 that fits it.
        num_seen = load_from_l2(reinterpret_cast<const int*>(call.position + token)) + 1;
        const int length = load_from_l2(call.kv_len + seq);
        num_keys = length < num_seen ? length : num_seen;
    }
    const int num_slices = (num_keys + PAGE_KEYS - 1) / PAGE_KEYS;
    int slices_each = (num_slices + call.num_splits - 1) / call.num_splits;
    slices_each = slices_each < call.min_slices ? call.min_slices : slices_each;
    const int first = split * slices_each, rest = num_slices - first;
    if (split > 0 && rest <= 0 && !has_idle) {
        leave_without_waiting();
        return;
    }
    if (seq < 0 || (split > 0 && rest <= 0)) {
        wait_for_previous_kernels();
        return;
    }
    const int end = first + (rest < slices_each ? rest : slices_each);

    // The producer goes through K and V of the warp's pages first + warp, first + warp + num_warps,
    // ... Lane l holds page and places of the l-th of the 32 that it is at.
    const int* table_row = call.page_table + seq * call.page_table_stride;
    int put_slice = first + warp, put_part = 0, page = 0, base = 0, fine = -1;
    auto load_places = [&] {
        const int slice = put_slice + lane * num_warps;
        if (slice >= end) return;
        page = load_from_l2(table_row + slice);
        base = load_from_l2(mixed.place + 3 * (i64)page);
        fine = load_from_l2(mixed.place + 3 * (i64)page + 1);
    };
    auto put = [&](u8* stage) {
        if (put_slice >= end) return;
        const int from = put_part / 2, fine_id = shuffle_from(fine, from);
        u64* barrier = P::barrier_of(stage);
        if (put_part % 2 == 0) {
            const int page_id = shuffle_from(page, from);
            if (lane == 0) {
                expect_bytes(barrier, HAS_TABLE ? P::K_END : P::K_BYTES);
                copy_bulk(stage, mixed.k.of(page_id, kv_head), P::K_BYTES, barrier);
                if (HAS_TABLE)
                    copy_bulk(stage + P::TABLE_ROW, mixed.table + (i64)put_slice * PAGE_KEYS * DIM,
                              P::TABLE_BYTES, barrier);
            }
        } else {
            const int base_id = shuffle_from(base, from);
            if (lane == 0) {
                *P::note_of(stage) = fine_id;
                expect_bytes(barrier, fine_id < 0 ? P::BASE_BYTES : P::V_END);
                copy_bulk(stage, mixed.base.of(base_id, kv_head), P::BASE_BYTES, barrier);
                if (fine_id >= 0)
                    copy_bulk(stage + P::BASE_BYTES, mixed.fine.of(fine_id, kv_head), P::FINE_BYTES,
                              barrier);
            }
            put_slice += num_warps;
        }
        ++put_part;
        if (put_part == 2 * WARP) {
            put_part = 0;
            load_places();
        }
    };
    load_places();
    // The newest row may come from the kernel ahead.
    const int newest = num_slices - 1;
    int num_put = 0;
#pragma unroll 1
    for (; num_put < num_stages && put_slice < newest; ++num_put) put(ring + num_put * P::STAGE);

    ExactRows exact{};
    exact.num_keys = num_keys;
    exact.first_near = num_keys;
    if (num_keys > 0) {
        if (mixed.window > 0) {
            const int near = num_seen - mixed.window, from = load_from_l2(mixed.recent_from + seq);
            exact.first_near = near > from ? near : from;
            exact.base = load_from_l2(mixed.recent_base + seq);
            exact.cap = load_from_l2(mixed.recent_cap + seq);
            exact.recent = mixed.recent + kv_head * mixed.recent_head_stride;
            exact.recent_stride = mixed.recent_stride;
            // All but the newest are in memory: to L2, from where they will be read.
            if (end == num_slices && warp == 0) {
                const int start = exact.first_near < 0 ? 0 : exact.first_near;
#pragma unroll 1
                for (int key = start + lane; key < num_keys - 1; key += WARP)
                    prefetch_bulk(exact.row<DIM>(key, false), 4 * DIM);
            }
        }
        const int sink =
            mixed.num_sinks > 0 ? load_from_l2(mixed.sink_of + load_from_l2(table_row)) : -1;
        if (sink >= 0) {
            exact.sinks = reinterpret_cast<const u16*>(mixed.sinks.of(sink, kv_head));
            exact.sink_values = mixed.num_sinks * DIM;
            exact.num_sinks = mixed.num_sinks < num_keys ? mixed.num_sinks : num_keys;
        }
    }
    if (mixed.has_fine) fill_levels(arena);
    if (HAS_TABLE) fill_angles<DIM>(arena, mixed.table, mixed.table_len);

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
        float unscale = 1;
        if (HAS_TABLE) {
            float own[DIM / WARP] = {};
            if (is_real) load_values(own, mixed.coefs + row * DIM + lane * (DIM / WARP));
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
        const u16* from = mixed.q + token * mixed.q_stride_t +
                          (kv_head * group + head) * mixed.q_stride_h;
        float x[DIM / WARP], most = 0;
        bool is_finite = true;
#pragma unroll
        for (int j = 0; j < DIM / WARP; ++j) {
            const int channel = lane + j * WARP;
            const u16 number = is_real ? from[channel * mixed.q_stride_d] : (u16)0;
            q_facts.rows[head * MixedFacts<DIM>::ROW + channel] = number;
            x[j] = low_bf16(number);
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

    Sums own(lane, reinterpret_cast<const u16*>(q_shared), q_facts);
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
        own.score(p, stage);
        if (HAS_TABLE)
            own.add_positions(p, reinterpret_cast<const float*>(stage + P::TABLE_ROW), own_coefs,
                              fragments);
        give_back();
        own.hide(p, num_keys - first_key);
        own.hide(p, exact, first_key);
        own.weigh(p, PAGE_KEYS);
        wait_phase(P::barrier_of(stage), parity);
        u32 pairs[Sums::TILES][2];
        float of_page[2] = {};
        own.weigh_values(pairs, of_page, p, stage);
        if (shares) own.put_share(shares + (i64)slice * HEADS, of_page);
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

    // Exact keys of the block's pages: sinks, then recent ones, a warp a key.
    const int start = first * PAGE_KEYS, stop = end * PAGE_KEYS;
    const int num_sinks = start < exact.num_sinks ? exact.num_sinks - start : 0;
    int first_near = exact.first_near < start ? start : exact.first_near;
    first_near = first_near < exact.num_sinks ? exact.num_sinks : first_near;
    const int last_near = num_keys < stop ? num_keys : stop;
    const int num_near = last_near > first_near ? last_near - first_near : 0;
    float* scores = reinterpret_cast<float*>(arena + 128 * ARENA_ROW + 128);
    auto scores_of = [&](int i) { return scores + i / 4 * (ARENA_ROW / 4) + i % 4 * HEADS; };
    if (warp < num_sinks + num_near) {
        ExactSums<DIM> sums;
        const int at = lane * (DIM / WARP);
#pragma unroll 1
        for (int i = warp; i < num_sinks + num_near; i += num_warps) {
            const int key = i < num_sinks ? start + i : first_near + i - num_sinks;
            sums.add(exact.row<DIM>(key, false) + at,
                     exact.row<DIM>(key, true) + Sums::first_channel(lane),
                     HAS_TABLE ? mixed.table + (i64)key * DIM + at : nullptr, coefs + at, COEFS,
                     q_facts, call.scale_log2, scores_of(i), lane);
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
            float* share = shares + (i64)slice * HEADS + lane;
            float max = *share, sum = 1;
#pragma unroll 1
            for (int i = 0; i < num_sinks + num_near; ++i) {
                const int key = i < num_sinks ? start + i : first_near + i - num_sinks;
                if (key < from || key >= to) continue;
                const float s = scores_of(i)[lane], most = larger(max, s), shift = shift_of(most);
                sum = sum * power_of_two(max - shift) + power_of_two(s - shift);
                max = most;
            }
            *share = max + logarithm_of_two(sum);
        }
    }
    const int num_taken = num_sinks + num_near > 0 ? num_warps : end - first;
    const BlockPlace place{tile,     kv_head, split,      token,
                           num_taken, num_slices, slices_each};
    finish_block<KvMixed, Sums, DIM, POLLS>(call, place, rings, num_stages * P::STAGE, stats,
                                            mixed.lse);
}

template <int BITS, int DIM, bool HAS_TABLE, bool POLLS, int MOST_THREADS>
__global__ void __launch_bounds__(MOST_THREADS, 1)
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
