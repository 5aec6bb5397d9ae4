// Which experts each of T <= 8 tokens goes to, and the normed rows h that the experts read.
//
//   h_d = x_d / sqrt(mean(x^2) + eps) * w_d        score_e = sum_d gate_ed h_d   (all FP32)
//
// Letters: T tokens, D features, E experts, K experts a token. gate [E, D] float32:
//
//   block of threads e: row e of gate, for every token; writes score[t][e] and its E-th part of h
//   the last block: warp t waits for the scores of token t and picks its K experts
//
// Scores are UNSET between launches, so a score that is there is its own signal: no counter, no
// fence. Every other block runs to its end without waiting for this one.
// The norm's factor is common to all terms of a score, so one pass over x gives both sums. Row e
// and the norm's weights are in registers before the wait: static, and most of the bytes.
// Bytes: E * D * 4 of gate, once; T * D * itemsize of x a block of threads (from L2).
#include "gemv.cuh"
#include "select.cuh"

#define ROUTE_THREADS 256
#define ROUTE_WARPS (ROUTE_THREADS / WARP)
// Units of 8 features that a thread fetches before it waits: all of 4096.
#define ROUTE_KEPT 2

INLINE void load_unit(float (&gate)[8], uint4& weight, const float* gate_row,
                      const u16* norm_weight, int unit) {
    const uint4 a = load_stream(gate_row + unit * 8), b = load_stream(gate_row + unit * 8 + 4);
    weight = load_constant16(norm_weight + unit * 8);
    gate[0] = bits_float(a.x), gate[1] = bits_float(a.y), gate[2] = bits_float(a.z);
    gate[3] = bits_float(a.w), gate[4] = bits_float(b.x), gate[5] = bits_float(b.y);
    gate[6] = bits_float(b.z), gate[7] = bits_float(b.w);
}

// Waits for one token's scores and leaves them unset for the next launch, by one warp.
template <int KEYS>
INLINE void take_scores(float (&value)[KEYS], float* score, int num_experts, int lane) {
    const int first = lane * KEYS;
    bool is_set;
    do {
        is_set = true;
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            value[i] = first + i < num_experts ? poll(score + first + i) : bits_float(0xff800000);
            is_set = is_set && float_bits(value[i]) != UNSET;
        }
    } while (!is_set);
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
        if (first + i < num_experts) score[first + i] = bits_float(UNSET);
}

template <int KEYS>
__global__ void __launch_bounds__(ROUTE_THREADS, 1)
    route_kernel(const void* x, i64 x_stride_bytes, int x_is_bf16, const u16* norm_weight,
                 const float* gate, float* score, u16* h, int* topk_id,
                 float* topk_weight, int num_tokens, int num_experts, int dim, int top_k,
                 int renormalize, float eps, float scaling_factor) {
    __shared__ float squares[MAX_COLUMNS][ROUTE_WARPS], products[MAX_COLUMNS][ROUTE_WARPS];
    __shared__ float inverse[MAX_COLUMNS];
    launch_dependents();
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int expert = blockIdx.x, units = dim / 8;
    const float* gate_row = gate + (i64)expert * dim;

    float kept_gate[ROUTE_KEPT][8] = {};
    uint4 kept_weight[ROUTE_KEPT] = {};
#pragma unroll
    for (int i = 0; i < ROUTE_KEPT; ++i) {
        const int u = thread + i * ROUTE_THREADS;
        if (u < units) load_unit(kept_gate[i], kept_weight[i], gate_row, norm_weight, u);
    }
    wait_for_previous_kernels();

    const u8* x_bytes = reinterpret_cast<const u8*>(x);
#pragma unroll 1
    for (int t = 0; t < num_tokens; ++t) {
        float square = 0, product = 0;
        auto add = [&](const float(&g)[8], uint4 weight, int u) {
            float v[8], w[8];
            load8(v, x_bytes + t * x_stride_bytes, u, x_is_bf16);
            unpack8(w, weight);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                square += v[j] * v[j];
                product += v[j] * w[j] * g[j];
            }
        };
#pragma unroll
        for (int i = 0; i < ROUTE_KEPT; ++i) {
            const int u = thread + i * ROUTE_THREADS;
            if (u < units) add(kept_gate[i], kept_weight[i], u);
        }
#pragma unroll 1
        for (int u = thread + ROUTE_KEPT * ROUTE_THREADS; u < units; u += ROUTE_THREADS) {
            float g[8];
            uint4 weight;
            load_unit(g, weight, gate_row, norm_weight, u);
            add(g, weight, u);
        }
        square = sum_over_lanes<WARP>(square);
        product = sum_over_lanes<WARP>(product);
        if (lane == 0) squares[t][warp] = square, products[t][warp] = product;
    }
    __syncthreads();
    if (thread < num_tokens) {
        float square = 0, product = 0;
        for (int w = 0; w < ROUTE_WARPS; ++w) {
            square += squares[thread][w];
            product += products[thread][w];
        }
        inverse[thread] = near_inverse_sqrt(square * (1.0f / dim) + eps);
        publish(score + thread * num_experts + expert, not_unset(product * inverse[thread]));
    }
    __syncthreads();

    // From the last thread down, so that the warps that pick have no share or a small one.
    const int first_unit = units * expert / num_experts;
    const int own_units = units * (expert + 1) / num_experts - first_unit;
    for (int i = ROUTE_THREADS - 1 - thread; i < own_units * num_tokens; i += ROUTE_THREADS) {
        const int t = i / own_units, u = first_unit + i % own_units;
        float v[8], w[8];
        load8(v, x_bytes + t * x_stride_bytes, u, x_is_bf16);
        unpack8(w, load_constant16(norm_weight + u * 8));
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = v[j] * inverse[t] * w[j];
        reinterpret_cast<uint4*>(h + (i64)t * dim)[u] = Bf16::order(v);
    }
    if (expert == num_experts - 1 && warp < num_tokens) {
        float value[KEYS];
        take_scores(value, score + warp * num_experts, num_experts, lane);
        int* ids = topk_id + warp * top_k;
        const Picks picks = select_experts<KEYS>(value, num_experts, top_k, lane,
                                                 [&](int k, int chosen) { ids[k] = chosen; });
        const float own = expert_weight<KEYS>(value, picks, num_experts, top_k, renormalize,
                                              scaling_factor, lane);
        if (lane < top_k) topk_weight[warp * top_k + lane] = own;
    }
}
