// Turns, encodes and stores the keys and values of a step's few tokens, and turns its queries.
//
// Letters: T tokens, H query heads, G KV heads, D channels of a head, C = D / 2. Per row:
//
//   K: rope(norm(k)) R, encoded into its page     V: v R, encoded     Q: rope(norm(q)) as it is
//
// norm and the Hadamard rotation R only where there are any; all in FP32. The encoders make the
// bytes of `subten.codecs`, bit for bit. A warp, a block of its own, takes one row, so that nothing
// waits for another row; lane l holds channels N * l + j and N * l + j + C, N = C / 32:
//
//   row:  | N of lane 0 | N of lane 1 | ... | N of lane 31 | N of lane 0 | ... | N of lane 31 |
//           x[0][0..N)                                       x[1][0..N)
//
// A rotary pair, and the two nibbles of a byte, then lie in one lane, and five of the log2(D)
// stages of R go from lane to lane. The stages are in the order of `rotate_rows` in kv_append.py.
//
//   grid: (G rows of K, G of V, H of Q; T)
//
// Bytes: as in kv_append.py, a few hundred a warp; latency is all. So what no kernel of a step
// writes is read before the wait: position and slot, which the host fills, angles, norm weights.
#include "device.cuh"

#define PAGE_TOKENS 64
#define INFINITY_BITS 0x7f800000
#define NAN_HALF 0x7fc0u
// Codecs with a scale take larger magnitudes as this.
#define FLOAT_LIMIT 3.3e38f

// Where a row's bytes go: K, or V, of its page, and the planes in there.
struct Place {
    u8* codes;
    int scale_at, zero_at, row;

    INLINE void store_scale(u32 half) const { store_half(scale_at, half); }
    INLINE void store_zero(u32 half) const { store_half(zero_at, half); }

private:
    INLINE void store_half(int plane_at, u32 half) const {
        *reinterpret_cast<u16*>(codes + plane_at + 2 * row) = (u16)half;
    }
};

template <int N>
INLINE void load_values(float (&v)[N], const float* at) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = at[j];
}

template <int N>
INLINE void load_values(float (&v)[N], const u16* at) {
    if constexpr (N == 1) {
        v[0] = low_bf16(*at);
    } else {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const u32 pair = *reinterpret_cast<const u32*>(at + j);
            v[j] = low_bf16(pair);
            v[j + 1] = high_bf16(pair);
        }
    }
}

template <int N>
INLINE void store_values(float* at, const float (&v)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) at[j] = v[j];
}

template <int N>
INLINE void store_values(u16* at, const float (&v)[N]) {
    if constexpr (N == 1) {
        *at = (u16)pack_bf16(v[0], 0.0f);
    } else {
#pragma unroll
        for (int j = 0; j < N; j += 2)
            *reinterpret_cast<u32*>(at + j) = pack_bf16(v[j], v[j + 1]);
    }
}

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

// To nearest, ties to even; a finite value stays finite.
struct Bf16Encoder {
    static constexpr bool IS_ROTATED = false;

    template <int N>
    static INLINE void store(const float (&x)[2][N], const Place& place, int lane) {
        u16* row = reinterpret_cast<u16*>(place.codes) + place.row * (N * 2 * WARP);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u16* at = row + half * N * WARP + lane * N;
            if constexpr (N == 1) {
                *at = (u16)code(x[half][0]);
            } else {
#pragma unroll
                for (int j = 0; j < N; j += 2)
                    *reinterpret_cast<u32*>(at + j) =
                        code(x[half][j]) | code(x[half][j + 1]) << 16;
            }
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
    static constexpr bool IS_ROTATED = false;

    template <int N>
    static INLINE void store(const float (&x)[2][N], const Place& place, int lane) {
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
        u8* row = place.codes + place.row * (N * 2 * WARP);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 bytes = 0;
#pragma unroll
            for (int j = 0; j < N; ++j)
                bytes |= code(x[half][j], divisor) << 8 * j;
            store_bytes<N>(row + half * N * WARP + lane * N, is_bad ? 0u : bytes);
        }
        if (lane == 0) place.store_scale(is_bad ? NAN_HALF : upper_half(scale));
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
template <int BITS>
struct IntEncoder {
    static constexpr bool IS_ROTATED = BITS == 4;
    static constexpr int LEVELS = (1 << BITS) - 1;

    template <int N>
    static INLINE void store(const float (&x)[2][N], const Place& place, int lane) {
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
        u8* row = place.codes + place.row * (N * 2 * WARP * BITS / 8) + lane * N;
        if constexpr (BITS == 4) {
            store_bytes<N>(row, bytes[0] | bytes[1] << 4);
        } else {
            store_bytes<N>(row, bytes[0]);
            store_bytes<N>(row + N * WARP, bytes[1]);
        }
        if (lane == 0) {
            place.store_scale(is_bad ? NAN_HALF : upper_half(scale));
            place.store_zero(is_bad ? NAN_HALF : upper_half(low));
        }
    }
};

// The fast Walsh-Hadamard transform, one bit of the channel after the other, from the lowest.
template <int N>
INLINE void rotate_row(float (&x)[2][N], int lane) {
#pragma unroll
    for (int bit = 1; bit < N; bit *= 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (j & bit) continue;
                const float left = x[half][j], right = x[half][j | bit];
                x[half][j] = left + right;
                x[half][j | bit] = left - right;
            }
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) {
        const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float other = shuffle_xor(x[half][j], mask);
                x[half][j] = other + sign * x[half][j];
            }
    }
    const float norm = N == 1 ? 0.125f : N == 2 ? 0.08838834764831845f : 0.0625f;  // D ** -0.5
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float left = x[0][j], right = x[1][j];
        x[0][j] = (left + right) * norm;
        x[1][j] = (left - right) * norm;
    }
}

template <class Encoder, int DIM, class Value>
__global__ void __launch_bounds__(WARP)
    kv_append_kernel(const Value* q, i64 q_stride_t, i64 q_stride_h, Value* out, const Value* k,
                     i64 k_stride_t, i64 k_stride_g, const Value* v, i64 v_stride_t,
                     i64 v_stride_g, u8* pages, i64 page_stride, i64 head_stride,
                     const float* cos_sin, i64 cos_sin_stride, const i64* position,
                     const i64* slot, const void* k_norm, const void* q_norm, int norm_is_bf16,
                     float eps, int num_heads, int num_kv_heads, int v_at, int scale_at,
                     int zero_at) {
    constexpr int HALF = DIM / 2, N = HALF / WARP;
    static_assert(N == 1 || N == 2 || N == 4, "DIM");
    launch_dependents();
    const int lane = threadIdx.x, channel = lane * N, row = blockIdx.x;
    const i64 token = blockIdx.y;
    const bool is_query = row >= 2 * num_kv_heads;
    const bool is_value = !is_query && row >= num_kv_heads;
    const int head = is_query ? row - 2 * num_kv_heads : is_value ? row - num_kv_heads : row;
    const Value* from = is_query   ? q + token * q_stride_t + head * q_stride_h
                        : is_value ? v + token * v_stride_t + head * v_stride_g
                                   : k + token * k_stride_t + head * k_stride_g;
    from += channel;
    const i64 own_slot = is_query ? 0 : slot[token];
    const bool has_work = own_slot >= 0;

    const void* norm = is_query ? q_norm : is_value ? nullptr : k_norm;
    float cosine[N] = {}, sine[N] = {}, weight[2][N] = {};
    if (!is_value) {
        const i64 turn = position[token];  // together with the slot
        const float* angle = cos_sin + (has_work ? turn : 0) * cos_sin_stride + channel;
        load_values(cosine, angle);
        load_values(sine, angle + HALF);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = channel + half * HALF;
            if (norm && norm_is_bf16)
                load_values(weight[half], static_cast<const u16*>(norm) + first);
            else if (norm)
                load_values(weight[half], static_cast<const float*>(norm) + first);
        }
    }
    wait_for_previous_kernels();
    if (!has_work) return;

    float x[2][N];
    load_values(x[0], from);
    load_values(x[1], from + HALF);
    if (norm) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) sum += x[0][j] * x[0][j] + x[1][j] * x[1][j];
        const float inverse = inverse_sqrt(sum_over_lanes<WARP>(sum) / DIM + eps);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) x[half][j] = x[half][j] * inverse * weight[half][j];
    }
    if (!is_value) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float first = x[0][j], second = x[1][j];
            x[0][j] = first * cosine[j] - second * sine[j];
            x[1][j] = second * cosine[j] + first * sine[j];
        }
    }
    if (is_query) {
        Value* to = out + (token * num_heads + head) * DIM + channel;
        store_values(to, x[0]);
        store_values(to + HALF, x[1]);
        return;
    }
    if constexpr (Encoder::IS_ROTATED) rotate_row(x, lane);
    u8* page = pages + own_slot / PAGE_TOKENS * page_stride + head * head_stride;
    const int page_row = (int)(own_slot % PAGE_TOKENS);
    Encoder::store(x, Place{page + (is_value ? v_at : 0), scale_at, zero_at, page_row}, lane);
}
