// What a warp does with a slice of keys: scores, running maximum, weighted sums of values.
//
// Letters as in attend.cu: D channels of a head, N keys of a slice. Lane = 4 * g + t, as in `mma`.
#ifndef SUBTEN_ATTEND_SLICE_CUH
#define SUBTEN_ATTEND_SLICE_CUH

#include "attend_codecs.cuh"

#define MINUS_INFINITY bits_float(0xff800000u)

INLINE float load_bf16(const u8* plane, int index) {
    return low_bf16(*reinterpret_cast<const u16*>(plane + 2 * index));
}

// Half the value of code MIDDLE, from which codes are counted: halved, since MIDDLE * scale alone
// may overflow.
template <class Codec>
INLINE float half_zero_of(float scale, float zero) {
    return 0.5f * zero + Codec::HALF_MIDDLE * scale;
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
// `sum` and `half_zero` are of this lane's keys alone until `finish`.
template <class Codec, int DIM, int TILES_H>
struct WarpSums {
    using P = Part<Codec, DIM>;
    using KeyShare = RowShare<P::ROW, 4>;
    using ValueShare = RowShare<P::ROW, 8>;
    static constexpr int HEADS = 8 * TILES_H, STEPS = DIM / 16, TILES = P::TILES;
    using Scores = float[TILES][TILES_H][4];

    int g, t;
    // Keys of this lane's rows of S^T: key_g + 4 * tile, and two on. Bytes of a stage: `k_at`, the
    // first that it reads of such a row; `v_at`, of row 2t of V; `v_next`, from there to row 2t+1.
    int key_g, k_at, v_at, v_next;
    u32 q_pairs[TILES_H][STEPS][2];
    float q_sums[TILES_H][2];
    float acc[TILES_H][STEPS][4];
    float max[TILES_H][2], sum[TILES_H][2], half_zero[TILES_H][2];

    // B fragments of Q^T: channels in the order in which the lanes t find them in a row of K.
    INLINE WarpSums(int lane, const u16 (&q_rows)[HEADS][DIM + 2], const float (&q_sum)[HEADS]) {
        g = lane / 4;
        t = lane % 4;
        key_g = first_key<P::QUARTER>(g);
        k_at = key_g * P::ROW + t * KeyShare::UNIT;
        v_at = first_key<P::QUARTER>(2 * t) * P::ROW + t * P::PAD + g * ValueShare::UNIT;
        v_next = t % 2 ? -P::ROW : P::ROW;
#pragma unroll
        for (int h = 0; h < TILES_H; ++h) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                u32 v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int byte = KeyShare::byte_of(Codec::key_word(step, i), t);
                    v[i] = q_rows[8 * h + g][Codec::key_channel(byte, step, i, DIM)];
                }
                q_pairs[h][step][0] = v[0] | v[1] << 16;
                q_pairs[h][step][1] = v[2] | v[3] << 16;
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[h][step][j] = 0;
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                q_sums[h][j] = q_sum[8 * h + 2 * t + j];
                max[h][j] = MINUS_INFINITY;
                sum[h][j] = half_zero[h][j] = 0;
            }
        }
    }

    // Scores of the keys in `stage`. Two tiles at once: their sums do not wait for each other, and
    // more would not fit the registers.
    INLINE void score(Scores& p, const u8* stage, float scale_log2) const {
        constexpr int ABREAST = TILES < 2 ? TILES : 2;
#pragma unroll
        for (int first = 0; first < TILES; first += ABREAST) {
            u32 words[ABREAST][2][KeyShare::WORDS];
#pragma unroll
            for (int b = 0; b < ABREAST; ++b) {
                const u8* row = stage + k_at + 4 * (first + b) * P::ROW;
                KeyShare::load(words[b][0], row);
                KeyShare::load(words[b][1], row + 2 * P::ROW);
#pragma unroll
                for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        p[first + b][h][j] = -Codec::OFFSET * q_sums[h][j % 2];
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int b = 0; b < ABREAST; ++b) {
                    u32 a[4];
                    Codec::key_pairs(a, words[b][0], words[b][1], step);
#pragma unroll
                    for (int h = 0; h < TILES_H; ++h)
                        mma(p[first + b][h], a[0], a[1], a[2], a[3], q_pairs[h][step][0],
                            q_pairs[h][step][1]);
                }
        }
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int key = key_g + 4 * n + 2 * r;
                const float scale = Codec::HAS_SCALE ? load_bf16(stage + P::SCALE, key) : 1.0f;
                const float zero = Codec::HAS_ZERO ? load_bf16(stage + P::ZERO, key) : 0.0f;
                const float half = half_zero_of<Codec>(scale, zero);
#pragma unroll
                for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float s = p[n][h][2 * r + j] * (scale * scale_log2);
                        if (Codec::HAS_ZERO) s += half * (2.0f * scale_log2 * q_sums[h][j]);
                        p[n][h][2 * r + j] = s;
                    }
            }
    }

    // Scores become weights; keys from `limit` on are hidden. The running maximum (Dao et al. 2022,
    // algorithm 1) is one for all lanes of a head; the sums shrink only where it has moved.
    INLINE void weigh(Scores& p, int limit) {
        if (limit < P::KEYS) {
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int h = 0; h < TILES_H; ++h)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (key_g + 4 * n + j / 2 * 2 >= limit) p[n][h][j] = MINUS_INFINITY;
        }
        float decay[TILES_H][2];
        bool has_moved = false;
#pragma unroll
        for (int h = 0; h < TILES_H; ++h)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float most = max[h][j];
#pragma unroll
                for (int n = 0; n < TILES; ++n)
                    most = larger(most, larger(p[n][h][j], p[n][h][j + 2]));
                most = max_over_lanes<4>(most);
                const float shift = shift_of(most);
                decay[h][j] = power_of_two(max[h][j] - shift);
                has_moved = has_moved || most != max[h][j];
                max[h][j] = most;
#pragma unroll
                for (int n = 0; n < TILES; ++n)
#pragma unroll
                    for (int r = j; r < 4; r += 2) p[n][h][r] = power_of_two(p[n][h][r] - shift);
            }
        if (!lanes_where(has_moved)) return;
#pragma unroll
        for (int h = 0; h < TILES_H; ++h) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                sum[h][j] *= decay[h][j];
                half_zero[h][j] *= decay[h][j];
            }
#pragma unroll
            for (int m = 0; m < STEPS; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[h][m][j] *= decay[h][j % 2];
        }
    }

    // O^T += V^T P^T over the values in `stage`. `transpose_8x8` makes the layout of the scores,
    // keys down, that of B, keys across. Keys from `limit` on may be garbage.
    INLINE void add_values(const Scores& p, const u8* stage, int limit) {
        const bool is_tail = limit < P::KEYS;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            u32 p_pairs[TILES_H][2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int key = key_g + 4 * n + 2 * r;
                float scale = 1.0f, half = 0.0f;
                if (Codec::HAS_SCALE) scale = load_bf16(stage + P::SCALE, key);
                if (Codec::HAS_ZERO)
                    half = half_zero_of<Codec>(scale, load_bf16(stage + P::ZERO, key));
                if (is_tail && key >= limit) scale = half = 0.0f;
#pragma unroll
                for (int h = 0; h < TILES_H; ++h) {
                    const float low = p[n][h][2 * r], high = p[n][h][2 * r + 1];
                    sum[h][0] += low;
                    sum[h][1] += high;
                    if (Codec::HAS_ZERO) {
                        half_zero[h][0] += low * half;
                        half_zero[h][1] += high * half;
                    }
                    p_pairs[h][r] = transpose_8x8(Codec::HAS_SCALE
                                                      ? pack_bf16(low * scale, high * scale)
                                                      : pack_bf16(low, high));
                }
            }
            u32 rows[4][ValueShare::WORDS];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int key = first_key<P::QUARTER>(2 * t + r % 2) + 4 * n + r / 2 * 2;
                const int on = (4 * n + r / 2 * 2) * P::ROW + (r % 2 ? v_next : 0);
                ValueShare::load(rows[r], stage + v_at + on);
                if (Codec::CAN_BE_NAN && is_tail && key >= limit) {
#pragma unroll
                    for (int w = 0; w < ValueShare::WORDS; ++w) rows[r][w] = 0;
                }
            }
#pragma unroll
            for (int w = 0; w < ValueShare::WORDS; ++w) {
                const u32 ab[2] = {low_halves(rows[0][w], rows[1][w]),
                                   high_halves(rows[0][w], rows[1][w])};
                const u32 cd[2] = {low_halves(rows[2][w], rows[3][w]),
                                   high_halves(rows[2][w], rows[3][w])};
                u32 a[Codec::VALUE_STEPS][4];
                Codec::value_pairs(a, ab, cd);
#pragma unroll
                for (int m = 0; m < Codec::VALUE_STEPS; ++m)
#pragma unroll
                    for (int h = 0; h < TILES_H; ++h)
                        mma(acc[h][w * Codec::VALUE_STEPS + m], a[m][0], a[m][1], a[m][2], a[m][3],
                            p_pairs[h][0], p_pairs[h][1]);
            }
        }
    }

    // Writes the sums: acc as they lie, [h][m][lane]; max, sum and zero of each head.
    INLINE void finish(float4* fragments, float (&stats)[HEADS][3]) {
#pragma unroll
        for (int h = 0; h < TILES_H; ++h) {
#pragma unroll
            for (int m = 0; m < STEPS; ++m) {
                const float(&a)[4] = acc[h][m];
                fragments[(h * STEPS + m) * WARP + 4 * g + t] = {a[0], a[1], a[2], a[3]};
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int mask = 4; mask < WARP; mask *= 2) {
                    sum[h][j] += shuffle_xor(sum[h][j], mask);
                    half_zero[h][j] += shuffle_xor(half_zero[h][j], mask);
                }
                if (g > 0) continue;
                float(&to)[3] = stats[8 * h + 2 * t + j];
                to[0] = max[h][j];
                to[1] = sum[h][j];
                to[2] = 2.0f * half_zero[h][j];
            }
        }
    }

    // Channel of value j of fragment m in a lane (g, t).
    static INLINE int channel(int m, int g, int j) {
        const int byte = ValueShare::byte_of(m / Codec::VALUE_STEPS, g);
        return Codec::value_channel(byte, m % Codec::VALUE_STEPS, j / 2, DIM);
    }
};

#endif
