// Weights streamed from memory through the tensor cores, for up to 8 columns (tokens).
//
// Letters: N rows of the weight, K inputs, k an input, C = codes in 16 bytes (bf16 8, fp8 16,
// int4 32). Lane = 4 * g + t of a warp, as in `mma`.
//
// A warp takes a tile of 16 rows in blocks of 4 * C inputs. Of each block a lane reads 16 bytes of
// row g and 16 of row g + 8, straight from the row-major weight:
//
//            | 16 bytes  16 bytes  16 bytes  16 bytes |  next block: 64 bytes on
//   row g    |   t = 0     t = 1     t = 2     t = 3  |
//   row g+8  |   t = 0     t = 1     t = 2     t = 3  |  (in `up`: the matching row of the up half)
//
// The order of k within a sum is free, so those C codes become the A fragments of C / 4 products,
// four codes of each row at a time, and B is read from shared memory at the same k: x is stored
// there so that the 8 values a lane needs next are 16 bytes, and the four t of a quarter warp are
// 64 bytes in a row. Input t * C + 8 * j + i of a block lies at element 32 * j + 8 * t + P(i).
// Rows of x are 64 bytes longer than a multiple of 128, so two of them meet in no bank.
//
// Columns that hold no token read the last one's x: a column of B reaches its own column of D only.
#ifndef SUBTEN_GEMV_CUH
#define SUBTEN_GEMV_CUH

#include "device.cuh"

#define MAX_COLUMNS 8
#define TILE_ROWS 16
#define MAX_WARPS 16
// One warp's sums over its slice of K: [16 rows][8 columns].
#define PARTIAL 128

// Units of 8 inputs of x, and of the norm's weights, that a thread keeps in registers: 256 threads
// hold K = 4096. `gemv.py` knows it too.
#define KEPT 2

// Codes become bf16 numbers by masks and shifts alone, far below 1 and partly subnormal, which the
// tensor cores take exactly. So that products are normal, x carries X_FACTOR; each row's sum is
// multiplied by SCALE_FACTOR in the end. The largest |x| is 2^127 / X_FACTOR.

struct Block {
    uint4 low;   // of row g
    uint4 high;  // of row g + 8
    u16 scale_low, scale_high;
};

// bf16: 32 inputs a block. Word w of the 16 bytes is inputs 2w and 2w+1.
struct Bf16 {
    static constexpr int CODES = 8;
    static constexpr bool HAS_ROW_SCALE = false, HAS_GROUP_SCALE = false;
    static constexpr float X_FACTOR = 1.0f, SCALE_FACTOR = 1.0f;

    static INLINE uint4 order(const float (&v)[8]) {
        return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                pack_bf16(v[6], v[7])};
    }

    template <int SUMS>
    static INLINE void multiply(float (&sum)[2][4], const Block& w, const uint4* x, float2) {
        const uint4 b = x[0];
        mma(sum[0], w.low.x, w.high.x, w.low.y, w.high.y, b.x, b.y);
        mma(sum[1], w.low.z, w.high.z, w.low.w, w.high.w, b.z, b.w);
    }
};

// fp8: 64 inputs a block. Shifting the exponent and mantissa of an E4M3 code into those of a bf16
// gives 2^-120 of its value, subnormals included.
struct Fp8 {
    static constexpr int CODES = 16;
    static constexpr bool HAS_ROW_SCALE = true, HAS_GROUP_SCALE = false;
    static constexpr float X_FACTOR = 0x1p64f, SCALE_FACTOR = 0x1p56f;

    // A word gives its bytes 0 and 2 as one pair, 1 and 3 as the other; x follows.
    static INLINE uint4 order(const float (&v)[8]) {
        return {pack_bf16(v[0], v[2]), pack_bf16(v[1], v[3]), pack_bf16(v[4], v[6]),
                pack_bf16(v[5], v[7])};
    }

    static INLINE u32 even(u32 w) { return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07f007f0u); }
    static INLINE u32 odd(u32 w) { return (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u); }

    template <int SUMS>
    static INLINE void multiply(float (&sum)[2][4], const Block& w, const uint4* x, float2) {
        const u32 low[4] = {w.low.x, w.low.y, w.low.z, w.low.w};
        const u32 high[4] = {w.high.x, w.high.y, w.high.z, w.high.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint4 b = x[4 * j];
            const u32 l0 = low[2 * j], l1 = low[2 * j + 1], h0 = high[2 * j], h1 = high[2 * j + 1];
            mma(sum[0], even(l0), even(h0), odd(l0), odd(h0), b.x, b.y);
            mma(sum[1], even(l1), even(h1), odd(l1), odd(h1), b.z, b.w);
        }
    }
};

// int4: 128 inputs a block, which is one group of the scale. Below 256, the bits of a bf16 are its
// value in units of 2^-133, across the end of the subnormals too: so a masked nibble, q + 8, is a
// number already, and 16 times one if it is the upper nibble of its byte, where x carries 1 / 16.
// The 8 leaves with the sums' first value, -8 * (sum of the group's x).
struct Int4 {
    static constexpr int CODES = 32;
    static constexpr bool HAS_ROW_SCALE = false, HAS_GROUP_SCALE = true;
    static constexpr float X_FACTOR = 0x1p64f, SCALE_FACTOR = 0x1p69f, ZERO = -0x1p-130f;

    static INLINE uint4 order(const float (&v)[8]) {
        return {pack_bf16(v[0], v[1]), pack_bf16(v[2] / 16, v[3] / 16), pack_bf16(v[4], v[5]),
                pack_bf16(v[6] / 16, v[7] / 16)};
    }

    static INLINE float sum(uint4 x) {
        const float ones = (low_bf16(x.x) + high_bf16(x.x)) + (low_bf16(x.z) + high_bf16(x.z));
        const float parts = (low_bf16(x.y) + high_bf16(x.y)) + (low_bf16(x.w) + high_bf16(x.w));
        return ones + 16 * parts;
    }

    static INLINE u32 lower(u32 w) { return w & 0x000f000fu; }
    static INLINE u32 upper(u32 w) { return w & 0x00f000f0u; }

    template <int SUMS>
    static INLINE void multiply(float (&sum)[2][4], const Block& w, const uint4* x, float2 zero) {
        const u32 low[4] = {w.low.x, w.low.y, w.low.z, w.low.w};
        const u32 high[4] = {w.high.x, w.high.y, w.high.z, w.high.w};
        // Of four sums, none waits for more than one product; two take eight registers less.
        float part[SUMS][4] = {{zero.x, zero.y, zero.x, zero.y}};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint4 b = x[4 * j];
            const u32 l = low[j], h = high[j], l8 = l >> 8, h8 = h >> 8;
            mma(part[2 * j % SUMS], lower(l), lower(h), upper(l), upper(h), b.x, b.y);
            mma(part[(2 * j + 1) % SUMS], lower(l8), lower(h8), upper(l8), upper(h8), b.z, b.w);
        }
        float total[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            total[i] = part[0][i] + part[1][i];
            if constexpr (SUMS == 4) total[i] += part[2][i] + part[3][i];
        }
        const float scale_low = low_bf16(w.scale_low), scale_high = low_bf16(w.scale_high);
        sum[0][0] += scale_low * total[0];
        sum[0][1] += scale_low * total[1];
        sum[0][2] += scale_high * total[2];
        sum[0][3] += scale_high * total[3];
    }
};

template <class Format>
struct Layout {
    static constexpr int BLOCK = 4 * Format::CODES;  // inputs of a block
    static constexpr int BLOCK_X_BYTES = 2 * BLOCK;  // of x in shared memory

    static INLINE int x_row_bytes(int dim) { return (2 * dim + 127) / 128 * 128 + 64; }

    // Byte at which the 8 inputs of unit u = k / 8 begin in a row of x.
    static INLINE int x_byte(int u) {
        constexpr int IN_LANE = Format::CODES / 8, IN_BLOCK = BLOCK / 8;
        const int block = u / IN_BLOCK, t = u % IN_BLOCK / IN_LANE, j = u % IN_LANE;
        return block * BLOCK_X_BYTES + j * 64 + t * 16;
    }
};

// Shared memory of a block of threads: x of each column, the int4 groups' first values
// [group][zero_columns], then the partial sums. A lane reads the first values of two columns as a
// pair: 8 columns of `mma`, or each column twice. `gemv.py` counts the same bytes.
template <class Format>
struct Shared {
    u8* x;
    float* zero;
    float* partial;
    int row_bytes, zero_columns;

    INLINE Shared(u8* base, int reserved_columns, int all_zero_columns, int dim) {
        row_bytes = Layout<Format>::x_row_bytes(dim);
        zero_columns = all_zero_columns;
        x = base;
        zero = reinterpret_cast<float*>(base + reserved_columns * row_bytes);
        const int groups = Format::HAS_GROUP_SCALE ? dim / Layout<Format>::BLOCK : 0;
        partial = zero + (groups * zero_columns + 3) / 4 * 4;
    }

    // Stores inputs 8 * unit .. 8 * unit + 7 of a column. All lanes call it together, 16
    // neighbours with the 16 units of one group; a lane past the end passes is_inside = false.
    INLINE void store(int column, int unit, float (&v)[8], bool is_inside, int zero_column) {
        store_zero(unit, store_x(column, unit, v, is_inside), is_inside, zero_column);
    }

    // The two halves of `store`, the first of which returns what the second takes.
    INLINE float store_x(int column, int unit, float (&v)[8], bool is_inside) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= Format::X_FACTOR;
        const uint4 packed = Format::order(v);
        if (is_inside)
            *reinterpret_cast<uint4*>(x + column * row_bytes + Layout<Format>::x_byte(unit)) =
                packed;
        if constexpr (Format::HAS_GROUP_SCALE)
            return Format::sum(packed);
        else
            return 0.0f;
    }

    INLINE void store_zero(int unit, float sum, bool is_inside, int zero_column) {
        if constexpr (Format::HAS_GROUP_SCALE) {
            const float total = sum_over_lanes<16>(sum);
            if (is_inside && unit % 16 == 0)
                zero[unit / 16 * zero_columns + zero_column] = Format::ZERO * total;
        }
    }
};

INLINE void unpack8(float (&v)[8], uint4 bits) {
    v[0] = low_bf16(bits.x), v[1] = high_bf16(bits.x), v[2] = low_bf16(bits.y);
    v[3] = high_bf16(bits.y), v[4] = low_bf16(bits.z), v[5] = high_bf16(bits.z);
    v[6] = low_bf16(bits.w), v[7] = high_bf16(bits.w);
}

// Eight values that an earlier kernel wrote: an ordinary load, after the wait.
INLINE void load8(float (&v)[8], const void* row, int unit, bool is_bf16) {
    if (is_bf16) {
        unpack8(v, reinterpret_cast<const uint4*>(row)[unit]);
    } else {
        const float4 a = reinterpret_cast<const float4*>(row)[2 * unit];
        const float4 b = reinterpret_cast<const float4*>(row)[2 * unit + 1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z,
        v[7] = b.w;
    }
}

INLINE float sum_of_squares(const float (&v)[8]) {
    return ((v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])) +
           ((v[4] * v[4] + v[5] * v[5]) + (v[6] * v[6] + v[7] * v[7]));
}

// Sums of up to MAX_WARPS warps in shared memory; those past the block's are zero.
INLINE void store_warp_sum(float4* four, float v, int warp, int num_warps, int lane) {
    float* sums = reinterpret_cast<float*>(four);
    if (lane == 0) sums[warp] = v;
    if (warp == 0 && lane >= num_warps && lane < MAX_WARPS) sums[lane] = 0;
}

INLINE float sum_of_warps(const float4* four) {
    float part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        part[i] = (four[i].x + four[i].y) + (four[i].z + four[i].w);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

INLINE float load_value(const void* from, i64 index, bool is_bf16) {
    if (is_bf16) return low_bf16(reinterpret_cast<const u16*>(from)[index]);
    return reinterpret_cast<const float*>(from)[index];
}

INLINE void store_value(void* to, i64 index, float v, bool is_bf16) {
    if (is_bf16)
        reinterpret_cast<u16*>(to)[index] = static_cast<u16>(pack_bf16(v, 0.0f));
    else
        reinterpret_cast<float*>(to)[index] = v;
}

// Units first .. first + count - 1 of a row that an earlier kernel wrote, by one warp, whole int4
// groups: all loads of a batch go out before the first one is needed.
template <class Format>
INLINE void store_slice(Shared<Format>& shared, const u16* row, int column, int first, int count,
                        int zero_column, int lane) {
    constexpr int BATCH = 4;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += BATCH * WARP) {
        uint4 bits[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int u = begin + i * WARP + lane;
            bits[i] = {0, 0, 0, 0};
            if (u < count) bits[i] = reinterpret_cast<const uint4*>(row)[first + u];
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int u = begin + i * WARP + lane;
            if (u - lane >= count) break;
            float v[8];
            unpack8(v, bits[i]);
            shared.store(column, first + u, v, u < count, zero_column);
        }
    }
}

// A lane's place in its warp's slice: `num_blocks` blocks of K in each of its tiles. Between tiles,
// and from the low row to the high one, lie fixed distances in rows, below 2^31 bytes.
template <class Format>
struct Cursor {
    const u8* codes;
    const u16* scale;
    int codes_high, codes_tile, scale_high, scale_tile;
    int num_blocks, left;

    INLINE Cursor(const u8* all_codes, const void* all_scales, int dim, i64 first_row,
                  int high_rows, int tile_rows, int first_block, int blocks, int lane) {
        // A block is 64 bytes of codes, and of int4 one scale.
        const int blocks_of_row = dim / Layout<Format>::BLOCK, row_bytes = blocks_of_row * 64;
        const int groups = blocks_of_row;
        const i64 row = first_row + lane / 4;
        codes = all_codes + row * row_bytes + first_block * 64 + lane % 4 * 16;
        codes_high = high_rows * row_bytes;
        codes_tile = tile_rows * row_bytes - blocks * 64;
        scale = reinterpret_cast<const u16*>(all_scales) + row * groups + first_block;
        scale_high = high_rows * groups;
        scale_tile = tile_rows * groups - blocks;
        num_blocks = left = blocks;
    }

    // Moves to the same place some rows on.
    INLINE void move(i64 rows, int dim) {
        const int blocks_of_row = dim / Layout<Format>::BLOCK;
        codes += rows * (blocks_of_row * 64);
        scale += rows * blocks_of_row;
    }

    INLINE void load(Block& block) {
        block.low = load_stream(codes);
        block.high = load_stream(codes + codes_high);
        codes += 64;
        if constexpr (Format::HAS_GROUP_SCALE) {
            block.scale_low = load_constant2(scale);
            block.scale_high = load_constant2(scale + scale_high);
            scale += 1;
        }
        if (--left == 0) {
            codes += codes_tile;
            if constexpr (Format::HAS_GROUP_SCALE) scale += scale_tile;
            left = num_blocks;
        }
    }
};

// Asks L2 for what a warp's ring of `depth` blocks does not hold yet: `blocks` blocks of 64 bytes of
// each of the rows of its tiles. `first` is where the first row's begin.
INLINE void fetch_rest(const u8* first, int row_bytes, int blocks, int depth, int num_tiles,
                       int lane) {
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int begin = depth - tile * blocks;
        // Two blocks of 16 rows at a time.
#pragma unroll 1
        for (int b = (begin > 0 ? begin : 0) + lane / TILE_ROWS * 2; b < blocks; b += 4)
            fetch_line(first + (tile * TILE_ROWS + lane % TILE_ROWS) * row_bytes + b * 64);
    }
}

// Streams a warp's slice through a ring of DEPTH blocks in registers: DEPTH KiB in flight a warp.
// `prologue` runs once the first blocks are asked for, and must leave x in shared memory for all
// threads; `begin` runs before them. Then `finish(tile, sum)` gets the lane's D fragment of each tile. `column` is the one
// whose x the lane reads; `zero_column` the first of the two of its sums.
template <class Format, int DEPTH, class Begin, class Prologue, class Finish>
INLINE void stream(Cursor<Format>& cursor, int num_tiles, int first_block,
                   const Shared<Format>& shared, int column, int zero_column, int lane,
                   Begin begin, Prologue prologue, Finish finish) {
    Block ring[DEPTH];
    const int total = cursor.num_blocks * num_tiles;
    begin();
#pragma unroll
    for (int s = 0; s < DEPTH; ++s)
        if (s < total) cursor.load(ring[s]);
    prologue();
    constexpr int STEP = Layout<Format>::BLOCK_X_BYTES;
    const u8* x = shared.x + column * shared.row_bytes + lane % 4 * 16 + first_block * STEP;
    const float* zero = shared.zero + first_block * shared.zero_columns + zero_column;
    float sum[2][4] = {};
    int block = 0, tile = 0;
    for (int first = 0; first < total; first += DEPTH) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            if (first + s >= total) break;
            float2 first_value = {0, 0};
            if constexpr (Format::HAS_GROUP_SCALE)
                first_value = *reinterpret_cast<const float2*>(zero + block * shared.zero_columns);
            const uint4* x_block = reinterpret_cast<const uint4*>(x + block * STEP);
            Format::template multiply<DEPTH == 2 ? 2 : 4>(sum, ring[s], x_block, first_value);
            if (first + s + DEPTH < total) cursor.load(ring[s]);
            if (++block == cursor.num_blocks) {
                float d[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    d[i] = sum[0][i] + sum[1][i];
                    sum[0][i] = sum[1][i] = 0;
                }
                finish(tile, d);
                block = 0;
                ++tile;
            }
        }
    }
}

template <class Format, int DEPTH, class Prologue, class Finish>
INLINE void stream(Cursor<Format>& cursor, int num_tiles, int first_block,
                   const Shared<Format>& shared, int column, int zero_column, int lane,
                   Prologue prologue, Finish finish) {
    stream<Format, DEPTH>(cursor, num_tiles, first_block, shared, column, zero_column, lane, [] {},
                          prologue, finish);
}

// Blocks of K that the part-th of `parts` warps takes.
INLINE int slice_start(int num_blocks, int part, int parts) { return num_blocks * part / parts; }

INLINE void store_partial(float* partial, const float (&d)[4], int lane) {
    const int at = lane / 4 * MAX_COLUMNS + lane % 4 * 2;
    *reinterpret_cast<float2*>(partial + at) = {d[0], d[1]};
    *reinterpret_cast<float2*>(partial + at + 8 * MAX_COLUMNS) = {d[2], d[3]};
}

// Sum over the warps that share a tile, always in the same order.
INLINE float sum_partials(const float* partial, int row, int column, int warps_k) {
    float sum = 0;
#pragma unroll 4  // four loads at a time
    for (int part = 0; part < warps_k; ++part)
        sum += partial[part * PARTIAL + row * MAX_COLUMNS + column];
    return sum;
}

#endif
