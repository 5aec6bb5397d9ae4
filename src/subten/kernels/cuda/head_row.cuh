// A head's row within a warp: loads, stores, norm, rotary embedding, Hadamard rotation, in FP32.
//
// Letters: D channels of a head, C = D / 2, N = C / 32. Lane l holds channels N * l + j and
// N * l + j + C:
//
//   row:  | N of lane 0 | N of lane 1 | ... | N of lane 31 | N of lane 0 | ... | N of lane 31 |
//           x[0][0..N)                                       x[1][0..N)
//
// A rotary pair, and the two nibbles of a byte, then lie in one lane, and five of the log2(D)
// stages of the rotation go from lane to lane. Additions to products are spelled out, so that every
// kernel that includes this rounds alike.
#ifndef SUBTEN_HEAD_ROW_CUH
#define SUBTEN_HEAD_ROW_CUH

#include "device.cuh"

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

// Weights of an RMSNorm, or none.
template <int N>
struct NormWeights {
    float weight[2][N];
    bool is_given;

    INLINE void load(const void* norm, bool is_bf16, int channel) {
        is_given = norm != nullptr;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = channel + half * N * WARP;
            if (norm && is_bf16)
                load_values(weight[half], static_cast<const u16*>(norm) + first);
            else if (norm)
                load_values(weight[half], static_cast<const float*>(norm) + first);
        }
    }

    INLINE void apply(float (&x)[2][N], float eps) const {
        if (!is_given) return;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; ++j)
            sum = multiply_add(x[1][j], x[1][j], multiply_add(x[0][j], x[0][j], sum));
        const float inverse = inverse_sqrt(sum_over_lanes<WARP>(sum) / (2 * N * WARP) + eps);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) x[half][j] = x[half][j] * inverse * weight[half][j];
    }
};

// A row of the rotary table: D / 2 cosines, then as many sines.
template <int N>
struct Angles {
    float cosine[N], sine[N];

    INLINE void load(const float* row, int channel) {
        load_values(cosine, row + channel);
        load_values(sine, row + channel + N * WARP);
    }

    INLINE void turn(float (&x)[2][N]) const {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float first = x[0][j], second = x[1][j];
            x[0][j] = multiply_add(first, cosine[j], -multiply(second, sine[j]));
            x[1][j] = multiply_add(second, cosine[j], multiply(first, sine[j]));
        }
    }
};

// The fast Walsh-Hadamard transform, one bit of the channel after the other, from the lowest: the
// order of `rotate_rows` in kv_append.py.
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

#endif
