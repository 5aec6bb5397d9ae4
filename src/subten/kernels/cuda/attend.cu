// Decode attention over paged keys and values that stay encoded: one query token a sequence.
//
// Letters: D channels of a head, N keys of a slice, C bytes. A group is the query heads of one KV
// head. Lane = 4 * g + t of a warp, as in `mma`. Scores are in base 2.
//
//   s_n = c * (scale_n * (q . code_n) + zero_n * sum(q))      c = softmax scale * log2(e)
//   p_n = 2 ** (s_n - max s),   out = (sum_n p_n vscale_n vcode_n + sum_n p_n vzero_n) / sum_n p_n
//
// Work: block (kv head, tile, z) of threads takes split z of one sequence's slices; its warps take
// slices in turn, each with a ring of its own in shared memory, so that warps never wait for one
// another before the end, when a warp a head adds up the block's sums. Where a sequence has several
// splits, attend_merge.cuh says how they are merged.
//
// Time: a step is a chain of short launches, so what needs nothing of the kernel ahead is done
// while that one runs: page table, and copies of all slices but the one with the newest row, which
// goes to L2 as it is. Where two blocks fit an SM, all of that goes on beside the launch ahead, if
// that is attention too. Blocks without a slice leave at once.
//
//   page (64 tokens x 1 KV head):  | K codes | K scale | K zero | V codes | V scale | V zero |
//   slice = N of its tokens:       N * D * bits / 8 = 4 KB of K codes, then the same of V
//   4 bits: N = 64 (the page); 8-bit 32, bf16 16 at D = 128; int2: 64, K and V together
//   a warp's ring:                 | K of slice 0 | V of slice 0 | K of slice 1 | ...
//
// Products on the tensor cores, the transposed way round, for a group has few heads:
//   S^T [16 keys x 8 heads] = K [16 keys x 16 channels] Q^T
//   O^T [16 channels x 8 heads] = V^T [16 channels x 16 keys] P^T
// The order of channels within a sum is free, so a lane reads 16 bytes of a key as they lie.
// So is the order of keys: row r = 2a + e of tile i is key `first_key(r) + 4 * i` (r < 8), and
// row r + 8 two keys on. Then lane t, which needs V of rows 2t, 2t+1, 2t+8, 2t+9, reads four
// neighbouring keys of quarter t of the slice, and rows 2t, 2t+1 of K lie in one 128-byte line.
//
//   quarter of the slice:   0                    1                    2            3
//   tile 0, rows:           0 1 8 9              3 2 11 10            4 5 12 13    7 6 15 14
//   tile 1, rows:               0 1 8 9              3 2 11 10            ...
//
// Bytes: kv_len * C of pages a (sequence, KV head), once; with Z splits 4 * Z * group * (D + 2)
// written and read again, all in L2. A slice that moves no maximum, at D = 128 and up to 8 heads
// (nvdisasm, nvcc 13.0): int2 and int4 1.8 instructions an element, fp4 3.5, fp4_mx 3.8, 8-bit 3.7
// and 4.1, bf16 4.0, of the 1.7, 3.3, 3.6, 3.3, 6 and 12 that 132 SMs at 1.75 GHz issue while the
// bytes of one arrive. Of int4's and int2's, 0.8 are integer ones, of fp4's 1.6, which issue every
// other cycle: of int2, and nearly of fp4, they alone take as long as its bytes.
//
// Keys at or past the sequence's end, and garbage there: their scores become -infinity, and their V
// scale and zero, or bf16 values, 0 in shared memory, each replaced, not multiplied.
#include "attend_block.cuh"

// Queries that are turned already.
template <int DIM>
struct GivenQueries {
    static constexpr bool APPENDS = false;
    static constexpr int N = DIM / 2 / WARP;
    const u16* q;
    i64 stride_t, stride_h, stride_d;
    int token, first_head, channel;

    INLINE bool prepare(int of_token, int kv_head, int group, int, int lane) {
        token = of_token;
        first_head = kv_head * group;
        channel = lane * N;
        return false;
    }

    INLINE void begin(int) const {}

    INLINE void take(float (&x)[2][N], int row, int) const {
        const u16* from = q + token * stride_t + (first_head + row) * stride_h;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N; ++j)
                x[half][j] = low_bf16(from[(half * (DIM / 2) + channel + j) * stride_d]);
    }

    INLINE void turn_query(float (&)[2][N]) const {}
};

template <class Codec, int DIM, int TILES_H, bool POLLS>
__global__ void __launch_bounds__(TILES_H == 1 ? 512 : 256, 1)
    attend_kernel(const u16* q, i64 q_stride_t, i64 q_stride_h, i64 q_stride_d, const u8* pages,
                  i64 page_stride, i64 head_stride, const int* page_table, i64 page_table_stride,
                  const i64* position, const int* kv_len, const int* tile_seq,
                  const int* tile_start, u16* out, float* part, float* part_stats, int* arrived,
                  float scale_log2, int num_kv_heads, int group, int num_splits,
                  int min_slices, int num_stages) {
    const AttendCall call{pages,    page_stride, head_stride, page_table, page_table_stride,
                          position, kv_len,      tile_seq,    tile_start, out,
                          part,     part_stats,  arrived,     scale_log2, num_kv_heads,
                          group,    num_splits,  min_slices,  num_stages};
    GivenQueries<DIM> rows{q, q_stride_t, q_stride_h, q_stride_d};
    attend_block<Codec, DIM, TILES_H, POLLS>(call, rows);
}
