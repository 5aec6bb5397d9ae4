// Encodes a decode step's keys and values into their pages, and attends for its queries, at once.
//
// Letters: T tokens, D channels of a head, P positions. Per token, R as in kv_append.cu:
//
//   K: rope(norm(k)) R, encoded     V: v R, encoded     Q: rope(norm(q)), rounded to bf16, attends
//
// The work of attend.cu, block for block, but that the rows are not yet what it takes. Every block
// turns the queries of its KV head, for that costs less than waiting for another block. The one
// with a sequence's last slice also encodes key and value, a warp each: into the page, for later
// steps, and through shared memory into the copy of the slice, for this one. So no copy waits for
// a row of this step: before the wait all stages are on their way, whatever they bring in place of
// the newest row. Nobody else reads that row before the launch has ended.
//
// Bytes: those of attend.cu, and T rows of q, k and v.
#include "attend_block.cuh"
#include "kv_encoders.cuh"

// Rows of one token as the QKV product leaves them, and where its key and value go.
template <class Codec, class Encoder, int DIM>
struct NewToken {
    using P = Part<Codec, DIM>;
    static constexpr bool APPENDS = true;
    static constexpr int N = DIM / 2 / WARP;
    static_assert(Codec::BITS == Encoder::BITS && Codec::IS_ROTATED == Encoder::IS_ROTATED &&
                      Codec::GROUP == Encoder::GROUP && Codec::HAS_SCALE == Encoder::HAS_SCALE &&
                      Codec::HAS_ZERO == Encoder::HAS_ZERO,
                  "one format");
    const u16 *q, *k, *v;
    i64 q_stride_t, q_stride_h, k_stride_t, k_stride_g, v_stride_t, v_stride_g;
    u8* pages;
    i64 page_stride, head_stride;
    const i64* slots;
    const float* cos_sin;
    i64 cos_sin_stride;
    const void *q_norm, *k_norm;
    int norm_is_bf16;
    float eps;
    // From here on `prepare` fills in.
    int num_queries;
    u8* page;
    int page_row;
    float held[2][N];
    Angles<N> angles;
    NormWeights<N> q_weights, k_weights;

    // Whether the token's key and value are to be stored.
    INLINE bool prepare(int token, int kv_head, int group, int position, int lane) {
        const i64 slot = load_from_l2(slots + token);
        num_queries = group;
        q += token * q_stride_t + kv_head * group * q_stride_h + lane * N;
        k += token * k_stride_t + kv_head * k_stride_g + lane * N;
        v += token * v_stride_t + kv_head * v_stride_g + lane * N;
        angles.load(cos_sin + position * cos_sin_stride, lane * N);
        q_weights.load(q_norm, norm_is_bf16, lane * N);
        k_weights.load(k_norm, norm_is_bf16, lane * N);
        page = pages + slot / PAGE_KEYS * page_stride + kv_head * head_stride;
        page_row = (int)(slot % PAGE_KEYS);
        return slot >= 0;
    }

    INLINE void begin(int row) {
        const u16* from = row < num_queries ? q + row * q_stride_h : row == num_queries ? k : v;
        load_values(held[0], from);
        load_values(held[1], from + DIM / 2);
    }

    // The next row is on its way while this one is turned.
    INLINE void take(float (&x)[2][N], int row, int next_row) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            x[0][j] = held[0][j];
            x[1][j] = held[1][j];
        }
        if (next_row != row) begin(next_row);
    }

    // The rounding is that of `kv_append`, whose result is bf16.
    INLINE void turn_query(float (&x)[2][N]) const {
        q_weights.apply(x, eps);
        angles.turn(x);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j) x[half][j] = low_bf16(pack_bf16(x[half][j], 0.0f));
    }

    // Into the page, and into `copy`: codes, scale, zero.
    INLINE void append(float (&x)[2][N], bool is_value, u8* copy, int lane) const {
        if (!is_value) {
            k_weights.apply(x, eps);
            angles.turn(x);
        }
        if constexpr (Encoder::IS_ROTATED) rotate_row(x, lane);
        EncodedRow<N, Encoder::BITS> encoded;
        Encoder::encode(encoded, x);
        const Place place{page + (is_value ? P::PAGE_BYTES : 0), P::PAGE_SCALE, P::PAGE_ZERO,
                          page_row};
        place.store<Encoder>(encoded, lane);
        const Place shared{copy, P::ROW, P::ROW + P::SCALE_ROW, 0};
        shared.store<Encoder>(encoded, lane);
    }
};

template <class Codec, class Encoder, int DIM, bool POLLS>
__global__ void __launch_bounds__(512, 1)
    append_attend_kernel(const u16* q, i64 q_stride_t, i64 q_stride_h, const u16* k,
                         i64 k_stride_t, i64 k_stride_g, const u16* v, i64 v_stride_t,
                         i64 v_stride_g, u8* pages, i64 page_stride, i64 head_stride,
                         const int* page_table, i64 page_table_stride, const i64* position,
                         const i64* slots, const int* kv_len, const int* tile_seq,
                         const int* tile_start, const float* cos_sin, i64 cos_sin_stride,
                         const void* q_norm, const void* k_norm, int norm_is_bf16, float eps,
                         u16* out, float* part, float* part_stats, int* arrived,
                         float scale_log2, int num_kv_heads, int group, int num_splits,
                         int min_slices, int num_stages) {
    const AttendCall call{pages,    page_stride, head_stride, page_table, page_table_stride,
                          position, kv_len,      tile_seq,    tile_start, out,
                          part,     part_stats,  arrived,     scale_log2, num_kv_heads,
                          group,    num_splits,  min_slices,  num_stages};
    NewToken<Codec, Encoder, DIM> rows;
    rows.q = q;
    rows.k = k;
    rows.v = v;
    rows.q_stride_t = q_stride_t;
    rows.q_stride_h = q_stride_h;
    rows.k_stride_t = k_stride_t;
    rows.k_stride_g = k_stride_g;
    rows.v_stride_t = v_stride_t;
    rows.v_stride_g = v_stride_g;
    rows.pages = pages;
    rows.page_stride = page_stride;
    rows.head_stride = head_stride;
    rows.slots = slots;
    rows.cos_sin = cos_sin;
    rows.cos_sin_stride = cos_sin_stride;
    rows.q_norm = q_norm;
    rows.k_norm = k_norm;
    rows.norm_is_bf16 = norm_is_bf16;
    rows.eps = eps;
    attend_block<Codec, DIM, 1, POLLS>(call, rows);
}
