// What a warp does with a page of an adaptive cache: scores, exact rows, positions, values.
//
// Letters as in attend_mixed.cu. Lane = 4 * g + t, as in `mma`.
#ifndef SUBTEN_MIXED_SLICE_CUH
#define SUBTEN_MIXED_SLICE_CUH

#include "attend_slice.cuh"

// Levels of keys in units (codecs/shaped.py), by code, as bytes; SURPLUS is what they are too large
// by. At 4 bits each half of the codes has a table, whose bytes are positive, so that codes of the
// other half give 0.
template <int BITS>
struct KeyLevels;
template <>
struct KeyLevels<2> {
    static constexpr float UNIT = 0.171141f;
    static constexpr int SURPLUS = 0;
    static INLINE u32 bytes(u32 nibbles) { return bytes_of_table(0x0a03fdf6u, 0, nibbles); }
    static INLINE u32 nibbles(u32 low, u32, int q) { return low >> 2 * q & 0x33333333u; }
};
template <>
struct KeyLevels<3> {
    static constexpr float UNIT = 0.0358764f;
    static constexpr int SURPLUS = 0;
    static INLINE u32 bytes(u32 nibbles) {
        return bytes_of_table(0xf9ead9c2u, 0x3e271607u, nibbles);
    }
    static INLINE u32 nibbles(u32 low, u32 high, int q) {
        if (q) return (low >> 2 & 0x33333333u) | (high & 0x44444444u);
        return (low & 0x33333333u) | (high << 2 & 0x44444444u);
    }
};
template <>
struct KeyLevels<4> {
    static constexpr float UNIT = 0.0430917f;
    static constexpr int SURPLUS = 64;
    static INLINE u32 bytes(u32 nibbles) {
        return bytes_of_table(0x22190e01u, 0x3d37312au, nibbles) |
               bytes_of_table(0x564f4943u, 0x7f72675eu, nibbles ^ 0x88888888u);
    }
    static INLINE u32 nibbles(u32 low, u32 high, int q) {
        if (q) return (low >> 2 & 0x33333333u) | (high & 0xccccccccu);
        return (low & 0x33333333u) | (high << 2 & 0xccccccccu);
    }
};

// Key of row 0 to 15 of tile 0, rows 2a, 2a+1, 2a+8 and 2a+9 four neighbours of quarter a of the page,
// each quarter in an order of its own: so neither the rows of V that four lanes t read, nor those of
// K of four lanes g, meet in a bank.
INLINE int key_of_row(int row) {
    const int quarter = row % 8 / 2;
    return 16 * quarter + ((row % 2 + row / 8 * 2) ^ (quarter / 2 + quarter % 2 * 2));
}

// Bytes of a page's planes, and where they lie in a stage of the ring: K with one row of the table
// of positions, or V with its fine plane. A stage ends in a barrier and a word for the consumer.
template <int BITS, int DIM>
struct MixedPart {
    static constexpr int ROW = DIM / 4, LOW = PAGE_KEYS * ROW;
    static constexpr int HIGH_ROW = BITS == 4 ? ROW : BITS == 3 ? ROW / 2 : 0;
    static constexpr int K_NORMS = LOW + PAGE_KEYS * HIGH_ROW, K_BYTES = K_NORMS + PAGE_KEYS;
    static constexpr int V_NORMS = LOW, BASE_BYTES = LOW + PAGE_KEYS, FINE_BYTES = LOW;
    static constexpr int TABLE_ROW = K_BYTES, TABLE_BYTES = 4 * DIM;
    static constexpr int K_END = TABLE_ROW + TABLE_BYTES, V_END = BASE_BYTES + FINE_BYTES;
    static constexpr int BARRIER = K_END > V_END ? K_END : V_END;
    static constexpr int STAGE = BARRIER + 16;
    static_assert(BARRIER % 16 == 0 && K_BYTES % 16 == 0 && BASE_BYTES % 16 == 0, "bulk copies");

    static INLINE u64* barrier_of(u8* stage) { return reinterpret_cast<u64*>(stage + BARRIER); }
    static INLINE int* note_of(u8* stage) { return reinterpret_cast<int*>(stage + BARRIER + 8); }
};

// Queries and sums of values lie in the order of int2's codes, and sums count as its do.
struct KvMixed : KvInt2 {};

// What a block knows of the queries of 8 heads beside their bytes: they themselves, for exact keys;
// what scores of positions count, in those of codes and in full. `first_sum` is minus SURPLUS times
// the sum of a query's integers.
template <int DIM>
struct MixedFacts : QueryFacts<8> {
    static constexpr int ROW = DIM + 8;  // two heads' rows in different banks
    alignas(8) float positions[8];
    float of_coefs[8];
    alignas(16) u16 rows[8 * ROW];
};

// The rows of one sequence and KV head that are read exactly: keys below `num_sinks`, and those from
// `first_near` to `num_keys` - 1, row `base` + key % `cap` of `recent`. Strides count bf16.
struct ExactRows {
    const u16 *sinks, *recent;
    i64 sink_values, recent_stride;
    int num_sinks, first_near, num_keys, base, cap;

    INLINE bool has(int key) const {
        return key < num_sinks || (key >= first_near && key < num_keys);
    }
    INLINE bool are_in(int first, int count) const {
        return first < num_sinks || first + count > first_near;
    }
    // Of a key that it has.
    template <int DIM>
    INLINE const u16* row(int key, bool is_value) const {
        if (key < num_sinks) return sinks + (is_value ? sink_values : 0) + key * DIM;
        return recent + (base + (u32)key % (u32)cap) * recent_stride + (is_value ? DIM : 0);
    }
};

// Exact rows as a warp reads them, one after the other, and the sums of all heads over them. Lane l
// has channels 4 l on (2 l at D = 64) of K, and of V those of its part of a row of sums.
template <int DIM>
struct ExactSums {
    static constexpr int VALUES = DIM / WARP, HEADS = 8;
    float max[HEADS], sum[HEADS], acc[HEADS][VALUES];

    INLINE ExactSums() {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            max[h] = MINUS_INFINITY;
            sum[h] = 0;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) acc[h][i] = 0;
        }
    }

    // Adds a key; `angles` and `coefs` are those of the lane, coefs of neighbouring heads `stride`
    // apart, or null. Leaves scores in base 2 of all heads in `scores`.
    INLINE void add(const u16* key, const u16* value, const float* angles, const float* coefs,
                    int stride, const MixedFacts<DIM>& facts, float scale_log2, float* scores,
                    int lane) {
        float k[VALUES], v[VALUES], angle[VALUES] = {};
        load_row(k, key);
        load_row(v, value);
        if (angles) load_vector(angle, angles);
        float s[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float q[VALUES], of_angles = 0;
            load_row(q, facts.rows + h * MixedFacts<DIM>::ROW + lane * VALUES);
            s[h] = 0;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) s[h] = multiply_add(q[i], k[i], s[h]);
            if (angles) {
                float c[VALUES];
                load_vector(c, coefs + h * stride);
#pragma unroll
                for (int i = 0; i < VALUES; ++i) of_angles = multiply_add(c[i], angle[i], of_angles);
                s[h] = multiply_add(of_angles, facts.of_coefs[h], s[h]);
            }
        }
#pragma unroll
        for (int mask = 1; mask < WARP; mask *= 2)
#pragma unroll
            for (int h = 0; h < HEADS; ++h) s[h] += shuffle_xor(s[h], mask);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            s[h] *= scale_log2;
            if (lane == h) scores[h] = s[h];
            const float most = larger(max[h], s[h]), shift = shift_of(most);
            const float decay = power_of_two(max[h] - shift), p = power_of_two(s[h] - shift);
            max[h] = most;
            sum[h] = multiply_add(sum[h], decay, p);
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                acc[h][i] = multiply_add(p, v[i], acc[h][i] * decay);
        }
    }

    // Joins a warp's rows of sums and its maxima and sums of weights, those of keys from planes.
    INLINE void join(float* rows, int stride, float (&stats)[HEADS][3], int lane) const {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float most = larger(max[h], stats[h][0]), shift = shift_of(most);
            const float own = power_of_two(max[h] - shift);
            const float other = power_of_two(stats[h][0] - shift);
            float row[VALUES];
            load_vector(row, rows + h * stride + lane * VALUES);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) row[i] = multiply_add(own, acc[h][i], other * row[i]);
            store_vector(rows + h * stride + lane * VALUES, row);
            const float all = multiply_add(own, sum[h], other * stats[h][1]);
            sync_warp();
            if (lane == 0) {
                stats[h][0] = most;
                stats[h][1] = all;
            }
        }
    }

private:
    static INLINE void load_row(float (&x)[VALUES], const u16* at) {
#pragma unroll
        for (int i = 0; i < VALUES; i += 2) {
            const u32 pair = *reinterpret_cast<const u32*>(at + i);
            x[i] = low_bf16(pair);
            x[i + 1] = high_bf16(pair);
        }
    }
};

template <int BITS, int DIM>
struct MixedSums : WarpSums<KvMixed, DIM, 1> {
    using Base = WarpSums<KvMixed, DIM, 1>;
    using P = MixedPart<BITS, DIM>;
    using Levels = KeyLevels<BITS>;
    using typename Base::Scores;
    using Base::acc, Base::g, Base::t, Base::max, Base::q_pairs, Base::sum;
    static constexpr int STEPS = Base::STEPS, TILES = Base::TILES, FRAGMENTS = Base::FRAGMENTS;
    static constexpr int WORDS = Base::KeyShare::WORDS, UNIT = Base::KeyShare::UNIT;
    // Neighbouring channels of V that a lane holds in each quarter.
    static constexpr int V_UNIT = DIM / 32;
    static_assert(TILES == 4 && FRAGMENTS == STEPS && Base::ValueShare::WORDS == 1, "a whole page");

    // Of this lane's rows of S^T, g + 8 r of tile n: keys, `first_row_key` + 4 n + `turn` r; and
    // where their norms lie in four bytes. Of its rows of V: bytes of a plane, those of tile 0.
    int first_row_key, turn, v_at[4];
    u32 norm_bytes[2];

    const MixedFacts<DIM>* mixed_facts;

    INLINE MixedSums(int lane, const u16* q_places, const MixedFacts<DIM>& of_queries)
        : Base(lane, q_places, of_queries) {
        mixed_facts = &of_queries;
        first_row_key = key_of_row(g);
        turn = key_of_row(g + 8) - first_row_key;
#pragma unroll
        for (int r = 0; r < 2; ++r) norm_bytes[r] = byte_selector((first_row_key + turn * r) % 4);
#pragma unroll
        for (int r = 0; r < 4; ++r)
            v_at[r] = key_of_row(2 * t + r % 2 + r / 2 * 8) * P::ROW + g * V_UNIT;
    }

    INLINE int key(int n, int r) const { return first_row_key + 4 * n + turn * r; }

    // Hides keys of the page from `limit` on.
    INLINE void hide(Scores& p, int limit) const {
        if (limit >= PAGE_KEYS) return;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (key(n, i / 2) >= limit) p[n][0][i] = MINUS_INFINITY;
    }

    // Hides those of the page from `first` on that are exact.
    INLINE void hide(Scores& p, const ExactRows& exact, int first) const {
        if (!exact.are_in(first, PAGE_KEYS)) return;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (exact.has(first + key(n, i / 2))) p[n][0][i] = MINUS_INFINITY;
    }

    // Norms of this lane's keys from their bytes (codecs/norm_byte.py).
    template <int BIAS>
    INLINE void load_norms(float (&norms)[TILES][2], const u8* bytes) const {
        u32 words[4];
        load_words<16>(words, bytes + g / 2 * 16);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float byte = float_of_byte(words[n], norm_bytes[r]);
                const float power = multiply_add(byte, 0.0625f, -(FLOAT_OF_BYTE + 1 + BIAS) / 16);
                norms[n][r] = byte == FLOAT_OF_BYTE ? 0.0f : power_of_two(power);
            }
    }

    INLINE void load_codes(u32 (&low)[WORDS], u32 (&high)[WORDS], const u8* stage, int row) const {
        load_words<UNIT>(low, stage + t * UNIT + row * P::ROW);
        if (BITS == 4) load_words<UNIT>(high, stage + P::LOW + t * UNIT + row * P::ROW);
        if (BITS == 3) {
            // Byte i has the high bits of bytes i and i + D / 8 of the low plane, side by side.
            load_words<UNIT>(high, stage + P::LOW + t % 2 * UNIT + row * P::HIGH_ROW);
#pragma unroll
            for (int w = 0; w < WORDS; ++w) high[w] >>= t / 2;
        }
    }

    // Scores of the keys in `stage` from their codes: sums of integers, exact; those of the upper
    // bytes of q count 256. Nibble j of a word of codes has that of byte j / 2, of quarter q or,
    // where j is odd, q + 2. Two tiles at once: their sums do not wait for each other.
    INLINE void score(Scores& p, const u8* stage) const {
#pragma unroll
        for (int first = 0; first < TILES; first += 2) {
            u32 low[2][2][WORDS], high[2][2][WORDS];
            int upper[2][4] = {}, lower[2][4];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    load_codes(low[b][r], high[b][r], stage, key(first + b, r));
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    lower[b][i] = Levels::SURPLUS ? mixed_facts->first_sum[2 * t + i % 2] : 0;
            }
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
#pragma unroll
                for (int q = 0; q < 2; ++q)
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        u32 a[4];
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const u32 codes = Levels::nibbles(low[b][r][w], high[b][r][w], q);
                            a[r] = Levels::bytes(codes);
                            a[r + 2] = Levels::bytes(codes >> 16);
                        }
                        const int step = 2 * (2 * w + q);
                        mma_bytes(upper[b], a, q_pairs[0][step]);
                        mma_bytes(lower[b], a, q_pairs[0][step + 1]);
                    }
#pragma unroll
            for (int b = 0; b < 2; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    p[first + b][0][i] = (float)(upper[b][i] * 256 + lower[b][i]);
        }
        float norms[TILES][2];
        load_norms<128>(norms, stage + P::K_NORMS);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) p[n][0][i] *= norms[n][i / 2];
    }

    // Adds what positions do: with n = n0 + r, n0 the page's first key, and a pair of columns a, b
    //   a cos(n w) + b sin(n w) = (a c + b s) cos(r w) + (b c - a s) sin(r w),
    // c and s those of n0 w, in `row`. `coefs` are the head's, and `fragments` the lane's, 1024
    // bytes apart: cosines and sines of r w as A fragments.
    INLINE void add_positions(Scores& p, const float* row, const float* coefs,
                              const u8* fragments) const {
        float of_positions[TILES][4] = {}, factors[2];
#pragma unroll
        for (int u = 0; u < DIM / 32; ++u) {
            const int pair = 16 * u + 4 * t;
            float c[4], s[4], a[4], b[4], x[4], y[4];
            load_vector(c, row + pair);
            load_vector(s, row + DIM / 2 + pair);
            load_vector(a, coefs + pair);
            load_vector(b, coefs + DIM / 2 + pair);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = multiply_add(a[i], c[i], b[i] * s[i]);
                y[i] = multiply_add(b[i], c[i], -(a[i] * s[i]));
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 cosines = pack_half(x[2 * e], x[2 * e + 1]);
                const u32 sines = pack_half(y[2 * e], y[2 * e + 1]);
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    u32 a4[4];
                    load_words<16>(a4, fragments + (n * STEPS + 2 * u + e) * 1024);
                    mma_half(of_positions[n], a4[0], a4[1], a4[2], a4[3], cosines, sines);
                }
            }
        }
        load_vector(factors, mixed_facts->positions + 2 * t);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[n][0][i] = multiply_add(of_positions[n][i], factors[i % 2], p[n][0][i]);
    }

    // Weights of a page as B fragments; `of_page` gets their sums, of this lane's keys alone.
    INLINE void weigh_values(u32 (&pairs)[TILES][2], float (&of_page)[2], const Scores& p,
                             const u8* stage) {
        float norms[TILES][2];
        load_norms<208>(norms, stage + P::V_NORMS);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float low = p[n][0][2 * r], high = p[n][0][2 * r + 1];
                of_page[0] += low;
                of_page[1] += high;
                pairs[n][r] = transpose_8x8(pack_bf16(low * norms[n][r], high * norms[n][r]));
            }
#pragma unroll
        for (int j = 0; j < 2; ++j) sum[0][j] += of_page[j];
    }

    INLINE void load_values(u32 (&rows)[4], const u8* plane, int n) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            load_words<V_UNIT>(rows + r, plane + v_at[r] + 4 * n * P::ROW);
        }
    }

    // O^T += V^T P^T of values at 2 bits.
    INLINE void add_base(const u32 (&pairs)[TILES][2], const u8* stage) {
        float surplus[1][4] = {};
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            u32 rows[4], a[FRAGMENTS][4];
            load_values(rows, stage, n);
            const u32 ab[2] = {low_halves(rows[0], rows[1]), high_halves(rows[0], rows[1])};
            const u32 cd[2] = {low_halves(rows[2], rows[3]), high_halves(rows[2], rows[3])};
            KvMixed::value_pairs(a, ab, cd);
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m)
                mma(acc[0][m], a[m][0], a[m][1], a[m][2], a[m][3], pairs[n][0], pairs[n][1]);
            mma(surplus[0], KvMixed::SURPLUS_X, KvMixed::SURPLUS_Y, KvMixed::SURPLUS_X,
                KvMixed::SURPLUS_Y, pairs[n][0], pairs[n][1]);
        }
        Base::drop_surplus(surplus);
    }

    // The same of values at 4 bits. `table` has, 256 bytes apart, for each pair of codes
    // `fine | base << 2`, that of the first key in the lower four bits, both levels / 256; each
    // lane reads a copy of its own, `own` bytes on.
    INLINE void add_fine(const u32 (&pairs)[TILES][2], const u8* stage, const u8* table, u32 own) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            u32 base[4], fine[4];
            load_values(base, stage, n);
            load_values(fine, stage + P::BASE_BYTES, n);
            u32 codes[2][2][2];  // keys a and b, or c and d; quarter q; q or q + 2
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const u32 first = fine_nibbles(base[2 * k], fine[2 * k], q);
                    const u32 second = fine_nibbles(base[2 * k + 1], fine[2 * k + 1], q);
                    codes[k][q][0] = (first & 0x0f0f0f0fu) | (second << 4 & 0xf0f0f0f0u);
                    codes[k][q][1] = (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
                }
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) {
                const int byte = m % V_UNIT, q = m / V_UNIT;
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 at = byte_and_below(codes[i / 2][q][i % 2], byte, own);
                    a[i] = *reinterpret_cast<const u32*>(table + at);
                }
                mma(acc[0][m], a[0], a[1], a[2], a[3], pairs[n][0], pairs[n][1]);
            }
        }
    }

    static INLINE u32 fine_nibbles(u32 base, u32 fine, int q) {
        if (q) return (fine >> 2 & 0x33333333u) | (base & 0xccccccccu);
        return (fine & 0x33333333u) | (base << 2 & 0xccccccccu);
    }

    // The logarithm of the page's sum of weights, of heads 2t and 2t+1, to `shares` of the page.
    INLINE void put_share(float* shares, const float (&of_page)[2]) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float weight = of_page[j];
#pragma unroll
            for (int mask = 4; mask < WARP; mask *= 2) weight += shuffle_xor(weight, mask);
            if (g == 0) shares[2 * t + j] = max[0][j] + logarithm_of_two(weight);
        }
    }
};

#endif
