// What a warp does with a slice of keys: scores, running maximum, weighted sums of values.
//
// Letters as in attend.cu: D channels of a head, N keys of a slice. Lane = 4 * g + t, as in `mma`.
#ifndef SUBTEN_ATTEND_SLICE_CUH
#define SUBTEN_ATTEND_SLICE_CUH

#include "attend_groups.cuh"
#include "attend_query.cuh"

#define MINUS_INFINITY bits_float(0xff800000u)

INLINE void store_vector(float* to, const float (&v)[2]) {
    *reinterpret_cast<float2*>(to) = {v[0], v[1]};
}
INLINE void store_vector(float* to, const float (&v)[4]) {
    *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
}

INLINE void load_vector(float (&v)[2], const float* from) {
    const float2 a = *reinterpret_cast<const float2*>(from);
    v[0] = a.x;
    v[1] = a.y;
}
INLINE void load_vector(float (&v)[4], const float* from) {
    const float4 a = *reinterpret_cast<const float4*>(from);
    v[0] = a.x;
    v[1] = a.y;
    v[2] = a.z;
    v[3] = a.w;
}

// The value of code MIDDLE, from which codes are counted. One rounding: MIDDLE * scale alone may
// overflow.
template <class Codec>
INLINE float middle_of(float scale, float zero) {
    return multiply_add(Codec::MIDDLE, scale, zero);
}

// The largest value of the 8 lanes that share t (FIRST = 4), or of all 32 (FIRST = 1).
template <int FIRST>
INLINE float max_over_lanes(float v) {
#pragma unroll
    for (int mask = FIRST; mask < WARP; mask *= 2) v = larger(v, shuffle_xor(v, mask));
    return v;
}

// What to subtract from scores whose maximum is `max`: 0 where nothing was seen yet, for
// -infinity less itself is NaN.
INLINE float shift_of(float max) { return max == MINUS_INFINITY ? 0.0f : max; }

// One lane's share of its warp's sums over slices, for TILES_H * 8 heads.
//   S^T, tile n:      p[n][h] = keys g (row) and heads 8h + 2t, 2t+1; then keys g + 8, same heads
//   O^T, fragment m:  acc[h][m] = channel x and heads 8h + 2t, 2t+1; then channel y, same heads
// `sum` and `of_middle` are of this lane's keys alone until `finish`. They and `acc` count
// 2^WEIGHT_SHIFT until then.
template <class Codec, int DIM, int TILES_H>
struct WarpSums {
    using P = Part<Codec, DIM>;
    using KeyShare = RowShare<P::ROW, 4>;
    using ValueShare = RowShare<P::ROW, 8>;
    static constexpr int HEADS = 8 * TILES_H, STEPS = DIM / 16, TILES = P::TILES;
    static constexpr int FRAGMENTS = STEPS / ValueShare::WORDS;  // of a word of V
    // A head's row of sums: lane 8 * i + g of 32 holds VALUES neighbouring channels, and rows lie
    // so far apart that `finish` and readers of a row meet no bank twice.
    static constexpr int VALUES = DIM / WARP, SUMS_ROW = DIM + 4;
    using Scores = float[TILES][TILES_H][4];

    int g, t;
    // Keys of this lane's rows of S^T: key_g + 4 * tile, and two on. Bytes of a stage: `k_at`, the
    // first that it reads of such a row; `v_at`, of row 2t of V; `v_next`, from there to row 2t+1.
    int key_g, k_at, v_at, v_next;
    u32 key_half;  // which of two neighbouring keys
    GroupShare<Codec, DIM> group_share;
    u32 q_pairs[TILES_H][STEPS][2];
    const QueryFacts<HEADS>* facts;  // read slice by slice, for registers are scarce
    float acc[TILES_H][STEPS][4];
    float max[TILES_H][2], sum[TILES_H][2], of_middle[TILES_H][2];

    // Where a channel of a head of q goes, so that each lane finds its B fragments of Q^T, of two
    // steps at a time, in 16 bytes.
    // Where KEYS_ARE_BYTES the place is that of the upper byte, in bytes; the lower one lies
    // Q_LOWER on.
    static constexpr int Q_LOWER = 8;

    static INLINE int q_place(int head, int channel) {
        const int byte = Codec::key_byte(channel, DIM);
        const int step = Codec::key_step(channel, KeyShare::word_at(byte), DIM);
        const int lane = head % 8 * 4 + KeyShare::lane_at(byte);
        if (Codec::KEYS_ARE_BYTES)
            return ((head / 8 * (STEPS / 2) + step) * WARP + lane) * 16 +
                   Codec::key_slot(channel, DIM);
        const int pair = head / 8 * (STEPS / 2) + step / 2;
        return ((pair * WARP + lane) * 2 + step % 2) * 4 + Codec::key_slot(channel, DIM);
    }

    INLINE WarpSums(int lane, const u16* q_places, const QueryFacts<HEADS>& of_queries)
        : group_share(lane / 4, lane % 4) {
        g = lane / 4;
        t = lane % 4;
        facts = &of_queries;
        key_g = first_key<P::QUARTER>(g);
        key_half = half_selector(key_g % 2);
        k_at = key_g * P::ROW + t * KeyShare::UNIT;
        v_at = first_key<P::QUARTER>(2 * t) * P::ROW + t * P::PAD + g * ValueShare::UNIT;
        v_next = t % 2 ? -P::ROW : P::ROW;
#pragma unroll
        for (int h = 0; h < TILES_H; ++h) {
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                const int place = (h * STEPS / 2 + step / 2) * WARP + lane;
                u32 words[4];
                load_words<16>(words, reinterpret_cast<const u8*>(q_places) + 16 * place);
                q_pairs[h][step][0] = words[0];
                q_pairs[h][step][1] = words[1];
                q_pairs[h][step + 1][0] = words[2];
                q_pairs[h][step + 1][1] = words[3];
            }
#pragma unroll
            for (int m = 0; m < STEPS; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[h][m][j] = 0;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                max[h][j] = MINUS_INFINITY;
                sum[h][j] = of_middle[h][j] = 0;
            }
        }
    }

    // Scores of the keys in `stage`. Two tiles at once: their sums do not wait for each other, and
    // more would not fit the registers.
    INLINE void score(Scores& p, const u8* stage) const {
        float q_sums[TILES_H][2];
#pragma unroll
        for (int h = 0; h < TILES_H; ++h)
            if (Codec::HAS_ZERO) load_vector(q_sums[h], facts->sum + 8 * h + 2 * t);
        constexpr int ABREAST = TILES < 2 ? TILES : 2;
#pragma unroll
        for (int first = 0; first < TILES; first += ABREAST) {
            u32 words[ABREAST][2][KeyShare::WORDS], groups[ABREAST][2][2];
#pragma unroll
            for (int b = 0; b < ABREAST; ++b) {
                const u8* row = stage + k_at + 4 * (first + b) * P::ROW;
                KeyShare::load(words[b][0], row);
                KeyShare::load(words[b][1], row + 2 * P::ROW);
                if constexpr (Codec::GROUP != 0) {
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        group_share.load_key(groups[b][r], stage, key_g + 4 * (first + b) + 2 * r);
                }
            }
            if constexpr (Codec::KEYS_ARE_BYTES)
                score_bytes(p, words, first);
            else
                score_pairs(p, words, groups, first);
        }
        [[maybe_unused]] Metadata all;
        if constexpr (HAS_QUARTERS) load_metadata(all, stage);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            if (!Codec::HAS_SCALE) continue;
            float scales[2], middles[2];
            if constexpr (HAS_QUARTERS)
                scales_of(scales, middles, all, n);
            else
                load_scales(scales, middles, stage, n);
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float s = p[n][h][2 * r + j] * scales[r];
                        if (Codec::HAS_ZERO) s = multiply_add(middles[r], q_sums[h][j], s);
                        p[n][h][2 * r + j] = s;
                    }
        }
    }

    template <int ABREAST>
    INLINE void score_pairs(Scores& p, const u32 (&words)[ABREAST][2][KeyShare::WORDS],
                            const u32 (&groups)[ABREAST][2][2], int first) const {
#pragma unroll
        for (int b = 0; b < ABREAST; ++b)
#pragma unroll
            for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                for (int j = 0; j < 4; ++j) p[first + b][h][j] = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int b = 0; b < ABREAST; ++b) {
                u32 a[4];
                Codec::key_pairs(a, words[b][0], words[b][1], step);
                if constexpr (Codec::GROUP != 0) {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        a[i] = Codec::scaled(a[i], groups[b][i % 2][i / 2]);
                }
#pragma unroll
                for (int h = 0; h < TILES_H; ++h)
                    mma(p[first + b][h], a[0], a[1], a[2], a[3], q_pairs[h][step][0],
                        q_pairs[h][step][1]);
            }
    }

    // Sums of integers, exact; those of the upper bytes of q count 256.
    template <int ABREAST>
    INLINE void score_bytes(Scores& p, const u32 (&words)[ABREAST][2][KeyShare::WORDS],
                            int first) const {
        int upper[ABREAST][TILES_H][4] = {}, lower[ABREAST][TILES_H][4];
#pragma unroll
        for (int b = 0; b < ABREAST; ++b)
#pragma unroll
            for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    lower[b][h][j] =
                        Codec::LOW_MIDDLE != 0 ? facts->first_sum[8 * h + 2 * t + j % 2] : 0;
#pragma unroll
        for (int step = 0; step < STEPS; step += 2)
#pragma unroll
            for (int b = 0; b < ABREAST; ++b) {
                if (Codec::KEY_SHIFT != 0 && step == STEPS / 2) {
#pragma unroll
                    for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            upper[b][h][j] *= 1 << Codec::KEY_SHIFT;
                            lower[b][h][j] *= 1 << Codec::KEY_SHIFT;
                        }
                }
                u32 a[4];
                Codec::template key_bytes<STEPS / 2>(a, words[b][0], words[b][1], step / 2);
#pragma unroll
                for (int h = 0; h < TILES_H; ++h) {
                    mma_bytes(upper[b][h], a, q_pairs[h][step]);
                    mma_bytes(lower[b][h], a, q_pairs[h][step + 1]);
                }
            }
#pragma unroll
        for (int b = 0; b < ABREAST; ++b)
#pragma unroll
            for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    p[first + b][h][j] = (float)(upper[b][h][j] * 256 + lower[b][h][j]);
    }

    // The words of `load_scales` of all tiles: a quarter of the slice, in loads of 16 bytes.
    static constexpr bool HAS_QUARTERS = TILES == 4 && Codec::HAS_SCALE && Codec::GROUP == 0;
    struct Metadata {
        u32 scale[8], zero[8];
    };
    INLINE void load_metadata(Metadata& all, const u8* stage) const {
        const int at = 2 * (key_g - key_g % 2);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            load_words<16>(all.scale + i, stage + P::SCALE + at + 4 * i);
            if (Codec::HAS_ZERO) load_words<16>(all.zero + i, stage + P::ZERO + at + 4 * i);
        }
    }
    INLINE void scales_of(float (&scales)[2], float (&middles)[2], const Metadata& all,
                          int n) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scales[r] = select_half(all.scale[2 * n + r], key_half);
            middles[r] = Codec::HAS_ZERO
                             ? middle_of<Codec>(scales[r], select_half(all.zero[2 * n + r], key_half))
                             : 0.0f;
        }
    }

    // Scale and `middle_of` of this lane's keys of tile n, 2 apart: it takes the same half of
    // each word.
    INLINE void load_scales(float (&scales)[2], float (&middles)[2], const u8* stage, int n) const {
        if constexpr (Codec::GROUP != 0 && Codec::HAS_SCALE) {
            group_share.load_powers(scales, stage, key_g + 4 * n);
            middles[0] = middles[1] = 0;
            return;
        }
        u32 scale[2] = {0, 0}, zero[2] = {0, 0};
        const int at = 2 * (key_g - key_g % 2 + 4 * n);
        if (Codec::HAS_SCALE) load_words<8>(scale, stage + P::SCALE + at);
        if (Codec::HAS_ZERO) load_words<8>(zero, stage + P::ZERO + at);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scales[r] = Codec::HAS_SCALE ? select_half(scale[r], key_half) : 1.0f;
            const float of_zero = Codec::HAS_ZERO ? select_half(zero[r], key_half) : 0.0f;
            middles[r] = Codec::HAS_ZERO ? middle_of<Codec>(scales[r], of_zero) : 0.0f;
        }
    }

    // Scores become weights; keys from `limit` on are hidden. `of_slice` gets their sums, of this
    // lane's keys alone. A running maximum (Dao et al. 2022, algorithm 1) is one for all lanes of a
    // head, and no weight needs it to be that of the newest slice: it moves, and the sums shrink,
    // only where a lane's weights have come to MOST_WEIGHT. Most slices need no maximum of theirs.
    static constexpr float MOST_WEIGHT = Codec::WEIGHT_SHIFT == 0 ? 0x1p10f : 0x1p74f;

    INLINE void weigh(Scores& p, float (&of_slice)[TILES_H][2], int limit) {
        if (limit < P::KEYS) {
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (key_g + 4 * n + j / 2 * 2 >= limit) p[n][h][j] = MINUS_INFINITY;
        }
        float weights[TILES][TILES_H][4];
        bool has_moved = false;
#pragma unroll 1
        for (;;) {
            bool is_off = false;
#pragma unroll
            for (int h = 0; h < TILES_H; ++h) {
                float factors[2];
                load_vector(factors, facts->factor + 8 * h + 2 * t);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float less = shift_of(max[h][j]) - Codec::WEIGHT_SHIFT;
                    // In pairs, so that no sum waits for all exponentials before it.
                    float sums[TILES];
#pragma unroll
                    for (int n = 0; n < TILES; ++n) {
#pragma unroll
                        for (int r = j; r < 4; r += 2)
                            weights[n][h][r] =
                                power_of_two(multiply_add(p[n][h][r], factors[j], -less));
                        sums[n] = weights[n][h][j] + weights[n][h][j + 2];
                    }
#pragma unroll
                    for (int by = 1; by < TILES; by *= 2)
#pragma unroll
                        for (int n = 0; n < TILES; n += 2 * by) sums[n] += sums[n + by];
                    of_slice[h][j] = sums[0];
                    // NaN is off too.
                    is_off = is_off || max[h][j] == MINUS_INFINITY ||
                             !(of_slice[h][j] <= MOST_WEIGHT);
                }
            }
            if (has_moved || !lanes_where(is_off)) break;
            has_moved = true;
            move_max(p);
        }
#pragma unroll
        for (int h = 0; h < TILES_H; ++h) {
#pragma unroll
            for (int j = 0; j < 2; ++j) sum[h][j] += of_slice[h][j];
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r) p[n][h][r] = weights[n][h][r];
        }
    }

    // Takes the scores of a slice into the running maximum.
    INLINE void move_max(const Scores& p) {
#pragma unroll
        for (int h = 0; h < TILES_H; ++h) {
            float factors[2], decay[2];
            load_vector(factors, facts->factor + 8 * h + 2 * t);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float most = MINUS_INFINITY;
#pragma unroll
                for (int n = 0; n < TILES; ++n)
                    most = larger(most, larger(p[n][h][j], p[n][h][j + 2]));
                most = larger(max[h][j], max_over_lanes<4>(most) * factors[j]);
                decay[j] = power_of_two(max[h][j] - shift_of(most));
                max[h][j] = most;
                sum[h][j] *= decay[j];
                of_middle[h][j] *= decay[j];
            }
#pragma unroll
            for (int m = 0; m < STEPS; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[h][m][j] *= decay[j % 2];
        }
    }

    // Keys of V from `limit` on may be garbage: makes them 0 in `stage`. No copy follows, for they
    // are a sequence's last.
    INLINE void clear_tail(u8* stage, int limit) const {
        const int lane = 4 * g + t;
        if (limit >= P::KEYS) return;
        if constexpr (Codec::GROUP != 0) {
            group_share.clear_tail(stage, limit, lane);
        } else if (Codec::HAS_SCALE) {
#pragma unroll
            for (int key = lane; key < P::KEYS; key += WARP) {
                if (key < limit) continue;
                *reinterpret_cast<u16*>(stage + P::SCALE + 2 * key) = 0;
                if (Codec::HAS_ZERO) *reinterpret_cast<u16*>(stage + P::ZERO + 2 * key) = 0;
            }
        } else {
#pragma unroll 1
            for (int key = limit; key < P::KEYS; ++key) {
                u8* row = stage + key * P::ROW + key / P::QUARTER * P::PAD;
                for (int at = 4 * lane; at < P::ROW; at += 4 * WARP)
                    *reinterpret_cast<u32*>(row + at) = 0;
            }
        }
        sync_warp();
    }

    // O^T += V^T P^T over the values in `stage`. `transpose_8x8` makes the layout of the scores,
    // keys down, that of B, keys across.
    INLINE void add_values(const Scores& p, const u8* stage) {
        float surplus[TILES_H][4] = {};
        [[maybe_unused]] Metadata all;
        if constexpr (HAS_QUARTERS) load_metadata(all, stage);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float scales[2], middles[2];
            if constexpr (HAS_QUARTERS)
                scales_of(scales, middles, all, n);
            else
                load_scales(scales, middles, stage, n);
            u32 p_pairs[TILES_H][2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int h = 0; h < TILES_H; ++h) {
                    const float low = p[n][h][2 * r], high = p[n][h][2 * r + 1];
                    if (Codec::HAS_ZERO) {
                        of_middle[h][0] += low * middles[r];
                        of_middle[h][1] += high * middles[r];
                    }
                    p_pairs[h][r] = transpose_8x8(Codec::HAS_SCALE
                                                      ? pack_bf16(low * scales[r], high * scales[r])
                                                      : pack_bf16(low, high));
                }
            }
            u32 rows[4][ValueShare::WORDS];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int on = (4 * n + r / 2 * 2) * P::ROW + (r % 2 ? v_next : 0);
                ValueShare::load(rows[r], stage + v_at + on);
            }
            u32 groups[4];
            if constexpr (Codec::GROUP != 0) {
                const int key = first_key<P::QUARTER>(2 * t) + 4 * n, on = t % 2 ? -1 : 1;
                group_share.load_values(groups, stage, {key, key + on, key + 2, key + 2 + on});
            }
#pragma unroll
            for (int w = 0; w < ValueShare::WORDS; ++w) {
                const u32 ab[2] = {low_halves(rows[0][w], rows[1][w]),
                                   high_halves(rows[0][w], rows[1][w])};
                const u32 cd[2] = {low_halves(rows[2][w], rows[3][w]),
                                   high_halves(rows[2][w], rows[3][w])};
                u32 a[FRAGMENTS][4];
                Codec::value_pairs(a, ab, cd);
                if constexpr (Codec::GROUP != 0) {
#pragma unroll
                    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[m][i] = Codec::scaled(a[m][i], groups[i]);
                }
#pragma unroll
                for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
                    for (int h = 0; h < TILES_H; ++h)
                        mma(acc[h][w * FRAGMENTS + m], a[m][0], a[m][1], a[m][2], a[m][3],
                            p_pairs[h][0], p_pairs[h][1]);
            }
            if (Codec::SURPLUS_X != 0) {
#pragma unroll
                for (int h = 0; h < TILES_H; ++h)
                    mma(surplus[h], Codec::SURPLUS_X, Codec::SURPLUS_Y, Codec::SURPLUS_X,
                        Codec::SURPLUS_Y, p_pairs[h][0], p_pairs[h][1]);
            }
        }
        if (Codec::SURPLUS_X != 0) drop_surplus(surplus);
    }

    // The slice's surplus leaves before the next one: sums over many slices would lose what
    // cancels.
    INLINE void drop_surplus(const float (&surplus)[TILES_H][4]) {
#pragma unroll
        for (int h = 0; h < TILES_H; ++h)
#pragma unroll
            for (int m = 0; m < STEPS; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[h][m][j] -= surplus[h][j];
    }

    // Value n of a lane's 2 * STEPS channels of a head: fragment and half (x or y), in the order in
    // which channels are neighbours.
    static INLINE int fragment_of(int n) { return Codec::Y_IS_FAR ? n % STEPS : n / 2; }
    static INLINE int half_of(int n) { return Codec::Y_IS_FAR ? n / STEPS : n % 2; }

    // Channel of the first value that lane `lane` of 32 holds of a head's row.
    static INLINE int first_channel(int lane) {
        const int n = lane / 8 * VALUES, m = fragment_of(n);
        const int byte = ValueShare::byte_of(m / FRAGMENTS, lane % 8);
        return Codec::value_channel(byte, m % FRAGMENTS, half_of(n), DIM);
    }

    // Writes the sums: a row of each head; max, sum and zero of each head.
    INLINE void finish(float* rows, float (&stats)[HEADS][3]) {
#pragma unroll
        for (int h = 0; h < TILES_H; ++h)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int head = 8 * h + 2 * t + j;
#pragma unroll
                for (int i = 0; i < 2 * STEPS / VALUES; ++i) {
                    float v[VALUES];
#pragma unroll
                    for (int n = 0; n < VALUES; ++n)
                        v[n] = Codec::value_factor(half_of(i * VALUES + n)) *
                               acc[h][fragment_of(i * VALUES + n)]
                                  [2 * half_of(i * VALUES + n) + j];
                    store_vector(rows + head * SUMS_ROW + (8 * i + g) * VALUES, v);
                }
#pragma unroll
                for (int mask = 4; mask < WARP; mask *= 2) {
                    sum[h][j] += shuffle_xor(sum[h][j], mask);
                    if (Codec::HAS_ZERO) of_middle[h][j] += shuffle_xor(of_middle[h][j], mask);
                }
                if (g > 0) continue;
                stats[head][0] = max[h][j];
                const float factor = Codec::WEIGHT_SHIFT == 0 ? 1.0f : 0x1p-64f;
                static_assert(Codec::WEIGHT_SHIFT == 0 || Codec::WEIGHT_SHIFT == 64, "as above");
                stats[head][1] = factor * sum[h][j];
                stats[head][2] = factor * of_middle[h][j];
            }
    }
};

#endif
