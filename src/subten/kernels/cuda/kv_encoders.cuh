// KV encoders: from a row of a warp to the bytes of `subten.codecs`, bit for bit.
//
// Letters and lanes as in head_row.cuh.
#ifndef SUBTEN_KV_ENCODERS_CUH
#define SUBTEN_KV_ENCODERS_CUH

#include "head_row.cuh"

#define INFINITY_BITS 0x7f800000
#define NAN_HALF 0x7fc0u
// Codecs with a scale take larger magnitudes as this.
#define FLOAT_LIMIT 3.3e38f

// The N low bytes of `bytes`.
template <int N>
INLINE void store_bytes(u8* at, u32 bytes) {
    static_assert(N == 1 || N == 2 || N == 4, "N");
    if constexpr (N == 1) *at = (u8)bytes;
    if constexpr (N == 2) *reinterpret_cast<u16*>(at) = (u16)bytes;
    if constexpr (N == 4) *reinterpret_cast<u32*>(at) = bytes;
}

INLINE float halve(float v) { return multiply(v, 0.5f); }
INLINE float limit(float v) {
    return v > FLOAT_LIMIT ? FLOAT_LIMIT : v < -FLOAT_LIMIT ? -FLOAT_LIMIT : v;
}

// The least BF16 value >= v >= 0, and the largest <= v.
INLINE float bf16_up(float v) { return bits_float((float_bits(v) + 0xffff) & -0x10000); }
INLINE float bf16_down(float v) {
    const int bits = float_bits(v);
    return bits_float((bits + (bits >> 31 & 0xffff)) & -0x10000);
}
INLINE u32 upper_half(float v) { return (u32)float_bits(v) >> 16; }

// Quotients of anything by one divisor d > 0 of at most 8 significant bits, as a division rounds
// them; but those below 2^-11, where every codec's code is 0, may be off, and -0.0 may be 0.0.
//
// x * (1 / d) is off by 2.5 ulp at most; its remainder is exact, and the quotient corrected by that
// is off by 2.5 * 2^-23 ulp before it is rounded. As d has 8 bits, x / d lies at least 2^-9 ulp
// from any number halfway between two floats: both round alike. Tiny divisors, and what they
// divide, are moved up, so that the remainder does not underflow; the largest, 2^125, leaves 1 / d
// normal. Divisions proper would take turns, each with a branch.
struct Divisor {
    float factor, moved, inverse;

    INLINE explicit Divisor(float d) {
        factor = d < 0x1p-60f ? 0x1p64f : 1.0f;
        moved = multiply(d, factor);
        inverse = rough_reciprocal(moved);
    }

    INLINE float of(float x) const {
        const float a = multiply(x, factor);
        const float quotient = multiply(a, inverse);
        return multiply_add(multiply_add(-moved, quotient, a), inverse, quotient);
    }
};

// Integers in the order of the floats, and back; NaN lies beyond the infinity of its sign.
INLINE int in_order(int bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; }

// What a lane holds of an encoded row: its bytes of each run, and the row's scale and zero, bf16.
// Where the encoder has a GROUP, `scale` is a byte for the group of the lane's channels below C
// and, above it, one for the others' group; `zero` is the row's byte.
//
//   8 and 16 bits:  | BYTES of lane 0 | ... | of lane 31 | BYTES of lane 0 | ... | of lane 31 |
//                     run 0: channels below C              run 1: channels from C on
//   4 bits:         one run; a byte is a channel below C and, in its high nibble, the one C on
//   2 bits:         one run, of the lower 16 lanes
template <int N, int BITS>
struct EncodedRow {
    static constexpr int RUNS = BITS <= 4 ? 1 : 2, BYTES = BITS <= 4 ? N : N * BITS / 8;
    static constexpr int LANES = BITS == 2 ? WARP / 2 : WARP;
    static constexpr int WORDS = (BYTES + 3) / 4, ROW = RUNS * BYTES * LANES;
    u32 codes[RUNS][WORDS], scale, zero;

    INLINE void store_codes(u8* row, int lane) const {
        if (lane >= LANES) return;
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                store_bytes<BYTES / WORDS>(row + (run * LANES + lane) * BYTES + 4 * w,
                                           codes[run][w]);
    }
};

// Each `encode` makes an EncodedRow; all lanes have its scale and zero, but for scales of groups. A
// row, or a group of fp4_mx, with a NaN or an infinity decodes to NaN throughout, but for BF16,
// where each value keeps its own.

// To nearest, ties to even; a finite value stays finite.
struct Bf16Encoder {
    static constexpr int BITS = 16, GROUP = 0;
    static constexpr bool HAS_SCALE = false, HAS_ZERO = false, IS_ROTATED = false;

    template <int N>
    static INLINE void encode(EncodedRow<N, BITS>& row, const float (&x)[2][N]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (j % 2 == 0) row.codes[half][j / 2] = 0;
                row.codes[half][j / 2] |= code(x[half][j]) << j % 2 * 16;
            }
    }

    static INLINE u32 code(float v) {
        const u32 bits = (u32)float_bits(v), size = bits & 0x7fffffffu;
        u32 half = (size + 0x7fffu + (size >> 16 & 1u)) >> 16;
        if (half > 0x7f7fu) half = size < INFINITY_BITS ? 0x7f7fu : INFINITY_BITS >> 16;
        if (size > INFINITY_BITS) half = NAN_HALF;
        return half | (bits >> 16 & 0x8000u);
    }
};

struct Fp8Encoder {
    static constexpr int BITS = 8, GROUP = 0;
    static constexpr bool HAS_SCALE = true, HAS_ZERO = false, IS_ROTATED = false;

    template <int N>
    static INLINE void encode(EncodedRow<N, BITS>& row, const float (&x)[2][N]) {
        int most = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const int size = float_bits(x[half][j]) & 0x7fffffff;
                most = size > most ? size : most;
            }
        most = warp_max(most);
        const bool is_bad = most >= INFINITY_BITS;
        const float scale = is_bad ? 0.0f : bf16_up(divide(limit(bits_float(most)), 448.0f));
        const Divisor divisor(scale > 0 ? scale : 1.0f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 bytes = 0;
#pragma unroll
            for (int j = 0; j < N; ++j)
                bytes |= code(x[half][j], divisor) << 8 * j;
            row.codes[half][0] = is_bad ? 0u : bytes;
        }
        row.scale = is_bad ? NAN_HALF : upper_half(scale);
    }

    // E4M3 of v over the scale: FP32 keeps 20 more mantissa bits, and its exponent bias is larger
    // by 120. Below 2^-6 the steps are 2^-9, the last bit of 2^14: adding it rounds to a step.
    static INLINE u32 code(float v, const Divisor& divisor) {
        const u32 bits = (u32)float_bits(limit(v));
        const float quotient = divisor.of(bits_float((int)(bits & 0x7fffffffu)));
        const u32 size = (u32)float_bits(quotient);
        const u32 normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
        const u32 small = (u32)float_bits(quotient + 16384.0f) & 0xffu;
        return (quotient < 0.015625f ? small : normal) | (bits >> 24 & 0x80u);
    }
};

// Halves all along, for the range of two finite numbers may exceed the largest one.
template <int B>
struct IntEncoder {
    static constexpr int BITS = B, GROUP = 0, LEVELS = (1 << B) - 1;
    static constexpr bool HAS_SCALE = true, HAS_ZERO = true, IS_ROTATED = B == 4;

    template <int N>
    static INLINE void encode(EncodedRow<N, BITS>& row, const float (&x)[2][N]) {
        int least = in_order(float_bits(x[0][0])), most = least;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const int key = in_order(float_bits(x[half][j]));
                least = key < least ? key : least;
                most = key > most ? key : most;
            }
        least = warp_min(least);
        most = warp_max(most);
        const bool is_bad = most >= INFINITY_BITS || least < -INFINITY_BITS;
        // Adding 0.0 makes -0.0 the 0.0 that it equals.
        const float high = is_bad ? 0.0f : limit(bits_float(in_order(most))) + 0.0f;
        const float low = is_bad ? 0.0f : bf16_down(limit(bits_float(in_order(least))) + 0.0f);
        const float scale = bf16_up(divide(halve(high) - halve(low), LEVELS / 2.0f));
        const Divisor divisor(halve(scale > 0 ? scale : 1.0f));
        u32 bytes[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float step = divisor.of(halve(limit(x[half][j])) - halve(low));
                // The last bit of 2^23 is 1: adding it rounds to nearest, ties to even.
                const u32 code = (u32)float_bits(step + 8388608.0f) & LEVELS;
                bytes[half] |= (is_bad ? 0u : code) << 8 * j;
            }
        if constexpr (BITS == 4) {
            row.codes[0][0] = bytes[0] | bytes[1] << 4;
        } else {
            row.codes[0][0] = bytes[0];
            row.codes[1][0] = bytes[1];
        }
        row.scale = is_bad ? NAN_HALF : upper_half(scale);
        row.zero = is_bad ? NAN_HALF : upper_half(low);
    }
};

// Levels 3 and 10 (codecs/lloyd_max.py), its sums those of integers (codecs/fixed_point.py).
struct Int2Encoder {
    static constexpr int BITS = 2, GROUP = 0;
    static constexpr bool HAS_SCALE = true, HAS_ZERO = false, IS_ROTATED = true;

    template <int N>
    static INLINE void encode(EncodedRow<N, BITS>& row, const float (&x)[2][N]) {
        constexpr int DIM = 2 * N * WARP;
        int most = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const int size = float_bits(x[half][j]) & 0x7fffffff;
                most = size > most ? size : most;
            }
        most = warp_max(most);
        const bool is_bad = most >= INFINITY_BITS;
        const int most_bits = float_bits(bits_float(most) > LIMIT ? LIMIT : bits_float(most));
        const int exponent = is_bad || most_bits >> 23 < 27 ? 27 : most_bits >> 23;
        const float to_whole = bits_float((272 - exponent) << 23);  // 2^(18 - exponent + 127)
        const float unit = bits_float((exponent - 18) << 23);
        int size[2][N], total = 0, low = 0, high = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float v = bits_float(float_bits(x[half][j]) & 0x7fffffff);
                const float limited = is_bad ? 0.0f : v > LIMIT ? LIMIT : v;
                // The last bit of 1.5 * 2^23 is 1: adding it rounds to an integer.
                const int s = float_bits(multiply(limited, to_whole) + 12582912.0f) - 0x4b400000;
                const i64 square = (i64)s * s;  // 2^38 at most, whose sum no int holds
                size[half][j] = s;
                total += s;
                low += (int)(square & 0xfffff);
                high += (int)(square >> 20);
            }
        total = warp_sum(total);
        const float length = (float)(((i64)warp_sum(high) << 20) + warp_sum(low));
        float fit = multiply((float)total, (float)(0.18917 / DIM)), product, square;
        float threshold;
#pragma unroll
        for (int round = 0; round < 3; ++round) {
            threshold = multiply(fit, 6.5f);
            int outer = 0, count = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < N; ++j)
                    if ((float)size[half][j] > threshold) {
                        outer += size[half][j];
                        ++count;
                    }
            product = (float)(3 * total + 7 * warp_sum(outer));
            square = (float)(9 * DIM + 91 * warp_sum(count));
            fit = divide(product, square);
        }
        const float unbiased = divide(length, product < 1 ? 1.0f : product);
        const float most_norm = multiply(2.0f, fit);
        const float norm = multiply(unbiased < most_norm ? unbiased : most_norm, unit);
        const int bits = float_bits(norm);
        row.scale = is_bad ? NAN_HALF : (u32)(bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        // Quarters 0 and 2 of a byte lie in a lane below 16, 1 and 3 in the lane 16 on.
        u32 codes = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const u32 is_outer = (float)size[half][j] > threshold;
                const u32 is_negative = !is_bad && x[half][j] < 0;
                codes |= (is_outer | is_negative << 1) << (8 * j + 4 * half);
            }
        const u32 other = (u32)float_bits(shuffle_xor(bits_float((int)codes), WARP / 2));
        row.codes[0][0] = codes | other << 2;
    }

private:
    static constexpr float LIMIT = 1e38f;
};

// E2M1 (codecs/fp4.py).
struct E2m1Encoder {
    static constexpr int BITS = 4;
    static constexpr bool HAS_ZERO = false, IS_ROTATED = false;

protected:
    static constexpr float LIMIT = 2.97e38f;

    static INLINE float limit_fp4(float v) { return v > LIMIT ? LIMIT : v < -LIMIT ? -LIMIT : v; }

    // Bits of the lane's largest magnitudes.
    template <int N>
    static INLINE void find_largest(int (&most)[2], const float (&x)[2][N]) {
        most[0] = most[1] = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const int size = float_bits(x[half][j]) & 0x7fffffff;
                most[half] = size > most[half] ? size : most[half];
            }
    }

    // Of `LANES` neighbouring lanes, of bits of numbers that are not negative.
    template <int LANES>
    static INLINE int largest_of_lanes(int bits) {
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2) {
            const int other = float_bits(shuffle_xor(bits_float(bits), mask));
            bits = other > bits ? other : bits;
        }
        return bits;
    }

    // Ties go to the even code.
    static INLINE u32 magnitude(float size) {
        return (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
               (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
    }
};

// Over 2^e of the row and an E4M3 scale of 16 channels.
struct Fp4Encoder : E2m1Encoder {
    static constexpr int GROUP = 16;
    static constexpr bool HAS_SCALE = true;

    template <int N>
    static INLINE void encode(EncodedRow<N, BITS>& row, const float (&x)[2][N]) {
        int most[2];
        find_largest(most, x);
        const int of_row = warp_max(most[0] > most[1] ? most[0] : most[1]);
        const bool is_bad = of_row >= INFINITY_BITS;
        const float largest = is_bad ? 0.0f : limit_fp4(bits_float(of_row));
        // 1.3125 * 2^11, or 6 * 448, is the largest value of exponent 0.
        int exponent = ((float_bits(largest) + 0x57ffff) >> 23) - 11;
        exponent = exponent < 1 ? 1 : exponent;
        const float to_unit = bits_float((254 - exponent) << 23);
        row.scale = 0;
        row.zero = is_bad ? 255 : exponent;
        u32 bytes[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int of_lanes = largest_of_lanes<GROUP / N>(most[half]);
            const float of_group = is_bad ? 0.0f : limit_fp4(bits_float(of_lanes));
            const u32 scale = scale_code(divide(multiply(of_group, to_unit), 6.0f));
            const float value = scale_value(scale);
            const float step = value > 0 ? value : 1.0f;
            const Divisor divisor(step);
            row.scale |= scale << 8 * half;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float v = is_bad ? 0.0f : multiply(limit_fp4(x[half][j]), to_unit);
                bytes[half] |= code(v, step, divisor) << 8 * j;
            }
        }
        row.codes[0][0] = bytes[0] | bytes[1] << 4;
    }

private:
    // E4M3 to nearest; below 2^-6, where steps are 2^-9, up.
    static INLINE u32 scale_code(float scale) {
        const u32 size = (u32)float_bits(scale);
        const u32 normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
        const float steps = multiply(scale, 512.0f);
        const u32 nearest = (u32)float_bits(steps + 8388608.0f) & 0xffu;
        return scale < 0x1p-6f ? nearest + ((float)nearest < steps) : normal;
    }
    static INLINE float scale_value(u32 code) {
        return multiply(bits_float((int)(code << 20)), 0x1p120f);
    }

    // A quotient that underflows, 2^-150 at most, has no sign.
    static INLINE u32 code(float v, float step, const Divisor& divisor) {
        const float size = v < 0 ? -v : v;
        const bool is_negative = v < 0 && multiply(size, 0x1p64f) > multiply(step, 0x1p-86f);
        return magnitude(divisor.of(size)) | (is_negative ? 8u : 0u);
    }
};

// Over 2^e of 32 channels.
struct Fp4MxEncoder : E2m1Encoder {
    static constexpr int GROUP = 32;
    static constexpr bool HAS_SCALE = false;

    template <int N>
    static INLINE void encode(EncodedRow<N, BITS>& row, const float (&x)[2][N]) {
        int most[2];
        find_largest(most, x);
        row.scale = 0;
        u32 bytes[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int of_lanes = largest_of_lanes<GROUP / N>(most[half]);
            const bool is_bad = of_lanes >= INFINITY_BITS;
            const float largest = is_bad ? 0.0f : limit_fp4(bits_float(of_lanes));
            // 1.5 * 2^2, or 6, is the largest value of exponent 0.
            int exponent = ((float_bits(largest) + 0x3fffff) >> 23) - 2;
            exponent = exponent < 1 ? 1 : exponent;
            const float to_unit = bits_float((254 - exponent) << 23);
            row.scale |= (u32)(is_bad ? 255 : exponent) << 8 * half;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float v = is_bad ? 0.0f : multiply(limit_fp4(x[half][j]), to_unit);
                bytes[half] |= (magnitude(v < 0 ? -v : v) | (v < 0 ? 8u : 0u)) << 8 * j;
            }
        }
        row.codes[0][0] = bytes[0] | bytes[1] << 4;
    }
};

// Where a row's bytes go: the codes of K, or of V, of its page, and the planes after them.
struct Place {
    u8* codes;
    int scale_at, zero_at, row;

    template <class Encoder, int N>
    INLINE void store(const EncodedRow<N, Encoder::BITS>& encoded, int lane) const {
        encoded.store_codes(codes + row * encoded.ROW, lane);
        if constexpr (Encoder::GROUP != 0) {
            constexpr int GROUPS = N * WARP / Encoder::GROUP, LANES = Encoder::GROUP / N;
            u8* scales = codes + scale_at + row * 2 * GROUPS + lane / LANES;
            if (lane % LANES == 0) {
                scales[0] = (u8)encoded.scale;
                scales[GROUPS] = (u8)(encoded.scale >> 8);
            }
            if (Encoder::HAS_SCALE && lane == 0) codes[zero_at + row] = (u8)encoded.zero;
            return;
        }
        if (lane > 0) return;
        if (Encoder::HAS_SCALE) store_half(scale_at, encoded.scale);
        if (Encoder::HAS_ZERO) store_half(zero_at, encoded.zero);
    }

private:
    INLINE void store_half(int plane_at, u32 half) const {
        *reinterpret_cast<u16*>(codes + plane_at + 2 * row) = (u16)half;
    }
};

#endif
