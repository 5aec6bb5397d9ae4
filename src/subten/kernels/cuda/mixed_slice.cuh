// What a warp does with a page of an adaptive cache: scores, exact rows, positions, values.
//
// Letters as in attend_mixed.cu. Lane = 4 * g + t, as in `mma`.
#ifndef SUBTEN_MIXED_SLICE_CUH
#define SUBTEN_MIXED_SLICE_CUH

#include "attend_slice.cuh"

// Levels of keys in units (codecs/shaped.py), by code, as bytes; SURPLUS is what they are too large
// by. At 4 bits each half of the codes has a table, whose bytes are positive, so that codes of the
// other half give 0: the upper half has nibbles of its own, two bits of which are turned.
template <int BITS>
struct KeyLevels;
template <>
struct KeyLevels<2> {
    static constexpr float UNIT = 0.171141f;
    static constexpr int SURPLUS = 0;
    // Two words: bytes of the lower four codes of a word of nibbles, and of the upper four.
    static INLINE void bytes(u32 (&out)[2], u32 low, u32, int q) {
        const u32 nibbles = low >> 2 * q & 0x33333333u;
        out[0] = bytes_of_table(0x0a03fdf6u, 0, nibbles);
        out[1] = bytes_of_table(0x0a03fdf6u, 0, upper_half(nibbles));
    }
};
template <>
struct KeyLevels<3> {
    static constexpr float UNIT = 0.0358764f;
    static constexpr int SURPLUS = 0;
    static INLINE void bytes(u32 (&out)[2], u32 low, u32 high, int q) {
        const u32 nibbles = select_bits(0x33333333u, q ? low >> 2 : low,
                                        (q ? high : high << 2) & 0x44444444u);
        out[0] = bytes_of_table(0xf9ead9c2u, 0x3e271607u, nibbles);
        out[1] = bytes_of_table(0xf9ead9c2u, 0x3e271607u, upper_half(nibbles));
    }
};
template <>
struct KeyLevels<4> {
    static constexpr float UNIT = 0.0430917f;
    static constexpr int SURPLUS = 64;
    static INLINE void bytes(u32 (&out)[2], u32 low, u32 high, int q) {
        low = q ? low >> 2 : low;
        high = q ? high : high << 2;
        const u32 lower = select_bits(0x33333333u, low, high);
        const u32 upper = select_bits(0x33333333u, low, ~high);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            out[i] = bytes_of_table(0x22190e01u, 0x3d37312au, lower >> 16 * i) +
                     bytes_of_table(0x7f72675eu, 0x564f4943u, upper >> 16 * i);
    }
};

// Key of row 0 to 7 of tile 0; those of tile n are 8 n on, and rows 8 to 15 have their mirror images,
// so that a lane has both keys of a distance from the page's middle. Neither the rows of V that four
// lanes t read, nor those of K of four lanes g, meet in a bank.
INLINE int key_of_row(int row) { return row / 4 * 4 + (row % 4 ^ row / 4); }
INLINE int mirror(int key) { return PAGE_KEYS - 1 - key; }

// A turn by an angle.
struct Turn {
    float cosine, sine;

    INLINE Turn operator*(const Turn& other) const {
        return {multiply_add(cosine, other.cosine, -(sine * other.sine)),
                multiply_add(sine, other.cosine, cosine * other.sine)};
    }
    // Of twice which this is the turn; that and half a turn would do as well.
    INLINE Turn half() const {
        const float size = multiply_add(cosine < 0 ? -cosine : cosine, 0.5f, 0.5f);
        const float inverse = near_inverse_sqrt(size), other = 0.5f * sine * inverse;
        if (cosine < 0) return {other, size * inverse};
        return {size * inverse, other};
    }
};

// Of N neighbouring pairs of columns from `pair` on, what rows 0 and 1 of the table have. Rows are
// turns of one another, times a factor.
template <int N>
struct FirstRows {
    float factor[N], cosine[N], sine[N];

    template <int DIM>
    INLINE void load(const float* table, int table_len, int pair) {
        const float* next = table + (table_len > 1 ? DIM : 0) + pair;
        load_vector(factor, table + pair);
        load_vector(cosine, next);
        load_vector(sine, next + DIM / 2);
    }
    // Half of the turn from a row to the next; none where there is no next row that counts.
    INLINE Turn half(int i) const {
        if (cosine[i] != cosine[i]) return {1, 0};
        const float inverse = rough_reciprocal(factor[i]);
        return Turn{cosine[i] * inverse, sine[i] * inverse}.half();
    }
};

// Bytes of a page's planes, and where they lie in a stage of the ring: K, one row of the table of
// positions, V, its fine plane. A stage ends in a barrier and a word for the consumer. A warp has
// beside its ring the norms of a page's keys and values, NORMS floats.
template <int BITS, int DIM>
struct MixedPart {
    static constexpr int ROW = DIM / 4, LOW = PAGE_KEYS * ROW;
    static constexpr int HIGH_ROW = BITS == 4 ? ROW : BITS == 3 ? ROW / 2 : 0;
    static constexpr int K_NORMS = LOW + PAGE_KEYS * HIGH_ROW, K_BYTES = K_NORMS + PAGE_KEYS;
    static constexpr int BASE_BYTES = LOW + PAGE_KEYS, FINE_BYTES = LOW;
    static constexpr int TABLE_ROW = K_BYTES, TABLE_BYTES = 4 * DIM;
    static constexpr int BASE = TABLE_ROW + TABLE_BYTES, V_NORMS = BASE + LOW;
    static constexpr int FINE = BASE + BASE_BYTES, BARRIER = FINE + FINE_BYTES;
    static constexpr int STAGE = BARRIER + 16, NORMS = 2 * PAGE_KEYS;
    static_assert(BARRIER % 16 == 0 && K_BYTES % 16 == 0 && BASE_BYTES % 16 == 0, "bulk copies");
    // A cold plane of V lies where the base plane of others does.
    static constexpr int COLD_ROW = DIM * 3 / 16, COLD_NORMS = BASE + PAGE_KEYS * COLD_ROW;
    static constexpr int COLD_BYTES = PAGE_KEYS * (COLD_ROW + 1);
    static_assert(COLD_BYTES % 16 == 0 && COLD_BYTES <= BASE_BYTES, "in its place");
    // Each codeword's 16 bytes so many times in a row, as far as rings leave memory: with 8, no two
    // lanes that read at once meet in a bank. Those of the second stage follow the first's 256.
    static constexpr int COPIES = DIM == 64 || BITS == 2 ? 8 : BITS == 3 ? 4 : 2;
    static constexpr int BOOK_ROW = 16 * COPIES, SECOND = 256 * BOOK_ROW;
    static constexpr int BOOK = SECOND + 16 * BOOK_ROW;

    static INLINE u64* barrier_of(u8* stage) { return reinterpret_cast<u64*>(stage + BARRIER); }
    static INLINE int* note_of(u8* stage) { return reinterpret_cast<int*>(stage + BARRIER + 8); }
};

// Queries and sums of values lie in the order of int2's codes, and sums count as its do.
struct KvMixed : KvInt2 {};

// A warp's row of cosines and sines, columns `N` a lane, less an angle; a sine's turns are those of
// its cosine. Coefficients of such rows turn likewise.
template <int N>
INLINE void turn_columns(float (&columns)[N], const Turn (&turns)[N], int lane) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float other = shuffle_xor(columns[i], WARP / 2);
        const float sine = lane < WARP / 2 ? turns[i].sine : -turns[i].sine;
        columns[i] = multiply_add(columns[i], turns[i].cosine, other * sine);
    }
}

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

    // Of a part of the sequence: its first sink, how many, and the same of its recent keys.
    int first_sink, sinks_in, first_in, recent_in;

    INLINE bool are_in(int first, int count) const {
        return first < num_sinks || first + count > first_near;
    }
    // The part is keys `start` to `stop` - 1.
    INLINE void span(int start, int stop) {
        first_sink = start;
        sinks_in = start < num_sinks ? num_sinks - start : 0;
        first_in = first_near < start ? start : first_near;
        first_in = first_in < num_sinks ? num_sinks : first_in;
        stop = stop < num_keys ? stop : num_keys;
        recent_in = stop > first_in ? stop - first_in : 0;
    }
    INLINE int count() const { return sinks_in + recent_in; }
    INLINE int key(int i) const {
        return i < sinks_in ? first_sink + i : first_in + i - sinks_in;
    }
    // Of one of these keys.
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

    // Adds a key; `angles`, `turns` and `coefs` are those of the lane's columns, coefs of neighbouring
    // heads `stride` apart, or null. Coefs are turned by `turns`, and angles are not. Leaves scores in base 2 of all heads in `scores`, if there is room.
    INLINE void add(const u16* key, const u16* value, const float* angles,
                    const Turn (&turns)[VALUES], const float* coefs, int stride,
                    const MixedFacts<DIM>& facts, float scale_log2, float* scores, int lane) {
        float k[VALUES], v[VALUES], angle[VALUES] = {};
        load_row(k, key);
        load_row(v, value);
        if (angles) {
            load_vector(angle, angles);
            turn_columns(angle, turns, lane);
        }
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
            if (scores && lane == h) scores[h] = s[h];
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
    using Base::acc, Base::g, Base::t, Base::max, Base::q_pairs;
    static constexpr int STEPS = Base::STEPS, TILES = Base::TILES, FRAGMENTS = Base::FRAGMENTS;
    static constexpr int WORDS = Base::KeyShare::WORDS, UNIT = Base::KeyShare::UNIT;
    // Neighbouring channels of V that a lane holds in each quarter.
    static constexpr int V_UNIT = DIM / 32;
    static_assert(TILES == 4 && FRAGMENTS == STEPS && Base::ValueShare::WORDS == 1, "a whole page");

    // Of this lane's rows of S^T, g of tile 0: its key; and where norms of rows g and g + 8 lie in
    // four bytes. Of its rows of V: bytes of a plane, those of tile 0.
    int first_row_key, v_at[4];
    u32 norm_bytes[2];

    const MixedFacts<DIM>* mixed_facts;
    float* norms;

    INLINE MixedSums(int lane, const u16* q_places, const MixedFacts<DIM>& of_queries,
                     float* of_warp)
        : Base(lane, q_places, of_queries) {
        mixed_facts = &of_queries;
        norms = of_warp;
        first_row_key = key_of_row(g);
#pragma unroll
        for (int r = 0; r < 2; ++r) norm_bytes[r] = byte_selector(key(0, r) % 4);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int first = key_of_row(2 * t + r % 2);
            v_at[r] = (r < 2 ? first : mirror(first)) * P::ROW + g * V_UNIT;
        }
    }

    INLINE int key(int n, int r) const {
        const int first = first_row_key + 8 * n;
        return r ? mirror(first) : first;
    }

    // Hides keys of the page but those from `start` to `end` - 1.
    INLINE void hide(Scores& p, int start, int end) const {
        if (start <= 0 && end >= PAGE_KEYS) return;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (key(n, i / 2) < start || key(n, i / 2) >= end) p[n][0][i] = MINUS_INFINITY;
    }

    // The norms of the page in `stage` from their bytes (codecs/norm_byte.py), for the warp to load
    // when it has met: each lane those of the two keys of its rows of tile t.
    INLINE void decode_norms(const u8* stage, bool is_cold) const {
        put_norms(norms, stage + P::K_NORMS, 128);
        put_norms(norms + PAGE_KEYS, stage + (is_cold ? P::COLD_NORMS : P::V_NORMS),
                  is_cold ? 240 : 208);
    }
    INLINE void put_norms(float* to, const u8* bytes, int bias) const {
        const float of_zero = -(FLOAT_OF_BYTE + 1 + bias) / 16;
        float pair[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            u32 word;
            load_words<4>(&word, bytes + key(t, r) / 4 * 4);
            const float byte = float_of_byte(word, norm_bytes[r]);
            const float power = multiply_add(byte, 0.0625f, of_zero);
            pair[r] = byte == FLOAT_OF_BYTE ? 0.0f : power_of_two(power);
        }
        store_vector(to + (g * TILES + t) * 2, pair);
    }

    // Those of this lane's keys of tiles `first` and the next, of K or of V: of row r, 2 n + r.
    INLINE void load_norms(float (&of_tiles)[4], bool is_value, int first) const {
        load_vector(of_tiles, norms + is_value * PAGE_KEYS + (g * TILES + first) * 2);
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
                            u32 bytes[2];
                            Levels::bytes(bytes, low[b][r][w], high[b][r][w], q);
                            a[r] = bytes[0];
                            a[r + 2] = bytes[1];
                        }
                        const int step = 2 * (2 * w + q);
                        mma_bytes(upper[b], a, q_pairs[0][step]);
                        mma_bytes(lower[b], a, q_pairs[0][step + 1]);
                    }
            // Here, where they have long been put.
            if (first == 0) sync_warp();
            float of_tiles[4];
            load_norms(of_tiles, false, first);
#pragma unroll
            for (int b = 0; b < 2; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    p[first + b][0][i] =
                        (float)(upper[b][i] * 256 + lower[b][i]) * of_tiles[2 * b + i / 2];
        }
    }

    // Adds what positions do: with n = n0 + 31.5 + r, n0 the page's first key, and a pair of columns
    //   a cos((n0 + r) w) + b sin((n0 + r) w) = (a c + b s) cos(r w) + (b c - a s) sin(r w),
    // c and s those of n0 w, in `row`: sums over cosines are the same, those over sines of other
    // sign, for the keys at r and -r. `coefs` are the head's, already turned by 31.5 w, and
    // `fragments` the lane's, 1024 bytes apart: cosines, then sines of r w as A fragments.
    INLINE void add_positions(Scores& p, const float* row, const float* coefs,
                              const u8* fragments) const {
        float even[TILES / 2][4] = {}, odd[TILES / 2][4] = {}, factors[2];
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
            const u32 of_x[2] = {pack_half(x[0], x[1]), pack_half(x[2], x[3])};
            const u32 of_y[2] = {pack_half(y[0], y[1]), pack_half(y[2], y[3])};
#pragma unroll
            for (int m = 0; m < TILES / 2; ++m) {
                u32 words[4];
                load_words<16>(words, fragments + (m * STEPS + 2 * u) * 1024);
                mma_half(even[m], words[0], words[1], words[2], words[3], of_x[0], of_x[1]);
                load_words<16>(words, fragments + (m * STEPS + 2 * u + 1) * 1024);
                mma_half(odd[m], words[0], words[1], words[2], words[3], of_y[0], of_y[1]);
            }
        }
        load_vector(factors, mixed_facts->positions + 2 * t);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float e = even[n / 2][n % 2 * 2 + j], o = odd[n / 2][n % 2 * 2 + j];
                p[n][0][j] = multiply_add(e - o, factors[j], p[n][0][j]);
                p[n][0][2 + j] = multiply_add(e + o, factors[j], p[n][0][2 + j]);
            }
    }

    // Weights of a page as B fragments.
    INLINE void weigh_values(u32 (&pairs)[TILES][2], const Scores& p) const {
#pragma unroll
        for (int first = 0; first < TILES; first += 2) {
            float of_tiles[4];
            load_norms(of_tiles, true, first);
#pragma unroll
            for (int b = 0; b < 2; ++b)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float low = p[first + b][0][2 * r], high = p[first + b][0][2 * r + 1];
                    const float norm = of_tiles[2 * b + r];
                    pairs[first + b][r] = transpose_8x8(pack_bf16(low * norm, high * norm));
                }
        }
    }

    INLINE void load_values(u32 (&rows)[4], const u8* plane, int n) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            load_words<V_UNIT>(rows + r, plane + v_at[r] + (r < 2 ? 8 : -8) * n * P::ROW);
        }
    }

    // O^T += V^T P^T of values at 2 bits.
    INLINE void add_base(const u32 (&pairs)[TILES][2], const u8* stage) {
        float surplus[1][4] = {};
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            u32 rows[4], a[FRAGMENTS][4];
            load_values(rows, stage + P::BASE, n);
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
            load_values(base, stage + P::BASE, n);
            load_values(fine, stage + P::FINE, n);
            u32 codes[2][2][2];  // keys a and b, or c and d; quarter q; q or q + 2
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const u32 first = fine_nibbles(base[2 * k], fine[2 * k], q);
                    const u32 second = fine_nibbles(base[2 * k + 1], fine[2 * k + 1], q);
                    codes[k][q][0] = select_bits(0x0f0f0f0fu, first, second << 4);
                    codes[k][q][1] = select_bits(0x0f0f0f0fu, first >> 4, second);
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

    // The same of cold values (codecs/vq.py): sums of two codewords of `book`, whole numbers / 256, of
    // which a lane reads its channels: LANES lanes share a vector of 8.
    INLINE void add_cold(const u32 (&pairs)[TILES][2], const u8* stage, const u8* book) {
        constexpr int LANES = 8 / V_UNIT, VECTORS = DIM / 32;  // of a quarter
        constexpr int WORDS_OF_FIRST = DIM / 32, UNIT_OF_ROW = DIM / 16;
        const int copy = (g / LANES % 2 * 4 + t) % P::COPIES;
        const u32 own = copy * 16 + g % LANES * V_UNIT * 2;
        const u32 selector = alone_selector(g / LANES);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            u32 values[4][4][V_UNIT / 2];  // of a key, quarter, and pair of channels
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int first_key = key_of_row(2 * t + r % 2) + 8 * n;
                const int key = r < 2 ? first_key : mirror(first_key);
                const u8* codes = stage + P::BASE + key * P::COLD_ROW;
                u32 first[WORDS_OF_FIRST], second[WORDS_OF_FIRST / 2];
                load_words<UNIT_OF_ROW>(first, codes);
                load_words<UNIT_OF_ROW>(first + WORDS_OF_FIRST / 2, codes + UNIT_OF_ROW);
                load_words<UNIT_OF_ROW>(second, codes + 2 * UNIT_OF_ROW);
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int at = q * VECTORS, of_pair = q % 2 * VECTORS;
                    const u32 a = byte_alone(first[at / 4], selector + at % 4);
                    const u32 both = byte_alone(second[of_pair / 4], selector + of_pair % 4);
                    const u32 b = q < 2 ? both & 15 : both >> 4;
                    u32 x[V_UNIT / 2], y[V_UNIT / 2];
                    load_words<2 * V_UNIT>(x, book + (a * P::BOOK_ROW + own));
                    load_words<2 * V_UNIT>(y, book + (P::SECOND + b * P::BOOK_ROW + own));
#pragma unroll
                    for (int i = 0; i < V_UNIT / 2; ++i) values[r][q][i] = add_bf16x2(x[i], y[i]);
                }
            }
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) {
                const int channel = m % V_UNIT, q = m / V_UNIT;
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 one = values[i / 2 * 2][q + i % 2 * 2][channel / 2];
                    const u32 two = values[i / 2 * 2 + 1][q + i % 2 * 2][channel / 2];
                    a[i] = channel % 2 ? high_halves(one, two) : low_halves(one, two);
                }
                mma(acc[0][m], a[0], a[1], a[2], a[3], pairs[n][0], pairs[n][1]);
            }
        }
    }

    static INLINE u32 fine_nibbles(u32 base, u32 fine, int q) {
        return select_bits(0x33333333u, q ? fine >> 2 : fine, q ? base : base << 2);
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
