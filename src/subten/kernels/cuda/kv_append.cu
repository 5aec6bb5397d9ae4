// Turns, encodes and stores the keys and values of a step's few tokens, and turns its queries.
//
// Letters: T tokens, H query heads, G KV heads, D channels of a head. Per row:
//
//   K: rope(norm(k)) R, encoded into its page     V: v R, encoded     Q: rope(norm(q)) as it is
//
// norm and the Hadamard rotation R only where there are any; all in FP32. A warp, a block of its
// own, takes one row (head_row.cuh), so that nothing waits for another row.
//
//   grid: (G rows of K, G of V, H of Q; T)
//
// Bytes: as in kv_append.py, a few hundred a warp; latency is all. So what no kernel of a step
// writes is read before the wait: position and slot, which the host fills, angles, norm weights.
#include "kv_encoders.cuh"

#define PAGE_TOKENS 64

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

    NormWeights<N> norm = {};
    Angles<N> angles = {};
    if (!is_value) {
        const i64 turn = position[token];  // together with the slot
        angles.load(cos_sin + (has_work ? turn : 0) * cos_sin_stride, channel);
        norm.load(is_query ? q_norm : k_norm, norm_is_bf16, channel);
    }
    wait_for_previous_kernels();
    if (!has_work) return;

    float x[2][N];
    load_values(x[0], from);
    load_values(x[1], from + HALF);
    if (!is_value) {
        norm.apply(x, eps);
        angles.turn(x);
    }
    if (is_query) {
        Value* to = out + (token * num_heads + head) * DIM + channel;
        store_values(to, x[0]);
        store_values(to + HALF, x[1]);
        return;
    }
    if constexpr (Encoder::IS_ROTATED) rotate_row(x, lane);
    EncodedRow<N, Encoder::BITS> encoded;
    Encoder::encode(encoded, x);
    u8* page = pages + own_slot / PAGE_TOKENS * page_stride + head * head_stride;
    const int page_row = (int)(own_slot % PAGE_TOKENS);
    const Place place{page + (is_value ? v_at : 0), scale_at, zero_at, page_row};
    place.store<Encoder>(encoded, lane);
}
