// Packed weights as the A operand of tensor cores, for many columns (tokens): the weights' formats,
// how a warp reads 32 rows of them, and its sums.
//
// Letters: C = codes in 16 bytes (bf16 8, fp8 16, int4 32). Lane = 4 * g + t of a warp, as in `mma`.
//
//   weights:  a lane reads 16 bytes (C codes) of four rows at a time, straight from the row-major
//             matrix into registers, and makes bf16 of them there
//
//               | 16 bytes  16 bytes  16 bytes  16 bytes |  next block: 64 bytes on
//       row     |   t = 0     t = 1     t = 2     t = 3  |
//
//   tokens:   in shared memory; a unit of 8 inputs that lane t needs j-th lies at 64 * j + 16 * t of
//             its block, and rows are 64 bytes longer than a multiple of 128, so that no two of a
//             quarter warp meet in a bank
//
// Inputs keep their order within a unit: the k of a sum is free, so that codes and tokens need only
// agree. Every sum has one order, and a column is its token's alone: a token's bits do not depend
// on the others.
#ifndef SUBTEN_WEIGHT_TILES_CUH
#define SUBTEN_WEIGHT_TILES_CUH

#include "grouped_device.cuh"

// Bf16, C = 8: a block is 32 inputs, and its words are fragments already.
struct Bf16Codes {
    static constexpr int CODES = 8, TOGETHER = 1;
    static constexpr bool HAS_ROW_SCALE = false, HAS_GROUP_SCALE = false;
    static constexpr float UNIT = 1;

    static INLINE void pairs(u32 (&pair)[4], const uint4& v, int) {
        pair[0] = v.x, pair[1] = v.y, pair[2] = v.z, pair[3] = v.w;
    }
};

// E4M3, C = 16: exponent and mantissa of a code, shifted into those of a bf16, are 2^-120 of its
// value, subnormals included. So are the sums, which in float32 end at 2^-29 of a code's 1. Two codes
// take three instructions: bytes made 16 bits wide with their sign, so that one shift and one mask
// leave the sign on top.
struct Fp8Codes {
    static constexpr int CODES = 16, TOGETHER = 1;
    static constexpr bool HAS_ROW_SCALE = true, HAS_GROUP_SCALE = false;
    static constexpr float UNIT = 0x1p120f;

    static INLINE u32 value(u32 wide) { return wide << 4 & 0x87f087f0u; }

    static INLINE void pairs(u32 (&pair)[4], const uint4& v, int unit) {
        const u32 first = unit == 0 ? v.x : v.z, second = unit == 0 ? v.y : v.w;
        pair[0] = value(choose_bytes(first, 0x9180));
        pair[1] = value(choose_bytes(first, 0xb3a2));
        pair[2] = value(choose_bytes(second, 0x9180));
        pair[3] = value(choose_bytes(second, 0xb3a2));
    }
};

// int4, C = 32: a block is the 128 inputs of a group. A nibble q + 8 under the bits of 128 is 136 +
// q, and 136 leaves exactly.
struct Int4Codes {
    static constexpr int CODES = 32, TOGETHER = 2;
    static constexpr bool HAS_ROW_SCALE = false, HAS_GROUP_SCALE = true;
    static constexpr float UNIT = 1;

    static INLINE void pairs(u32 (&pair)[4], const uint4& v, int unit) {
        const u32 word = unit == 0 ? v.x : unit == 1 ? v.y : unit == 2 ? v.z : v.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 bits = mask_or(word >> (4 * i), 0x000f000fu, 0x43004300u);
            pair[i] = multiply_add_bf16x2(bits, 0x3f803f80u, 0xc308c308u);  // * 1 - 136
        }
    }
};

// The four rows of weights that a lane reads: row, row + high, row + next, row + next + high. In
// `mma` number i of two, `high` goes to the rows 8 .. 15 and `next` to i = 1.
struct Rows {
    int high, next;
};

template <class Format>
struct Block {
    uint4 codes[2][2];  // [mma][high]
    u16 scale[2][2];
};

template <class Format>
struct Cursor {
    const u8* codes;
    const u16* scale;
    int high, next, scale_high, scale_next;

    INLINE Cursor() {}
    INLINE Cursor(const u8* all_codes, const void* all_scales, i64 row, Rows rows, int dim,
                  int lane) {
        const int blocks = dim / (4 * Format::CODES), row_bytes = 64 * blocks;
        codes = all_codes + row * row_bytes + lane % 4 * 16;
        high = rows.high * row_bytes, next = rows.next * row_bytes;
        scale = reinterpret_cast<const u16*>(all_scales) + row * blocks;
        scale_high = rows.high * blocks, scale_next = rows.next * blocks;
    }

    INLINE void load(Block<Format>& block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            block.codes[i][0] = load_stream(codes + i * next);
            block.codes[i][1] = load_stream(codes + i * next + high);
            if constexpr (Format::HAS_GROUP_SCALE) {
                block.scale[i][0] = load_constant2(scale + i * scale_next);
                block.scale[i][1] = load_constant2(scale + i * scale_next + scale_high);
            }
        }
        codes += 64;
        scale += 1;
    }
};

// Sums of a warp's 32 rows and up to 8 * NT columns, to be multiplied by UNIT of the format.
template <class Format, int NT>
struct Sums {
    static constexpr int UNITS = Format::CODES / 8;        // of a lane in a block
    static constexpr int BLOCK_BYTES = 8 * Format::CODES;  // of a column's inputs in a block

    // Tiles of tokens side by side: `mma` waits for the one before it on the same sums.
    static constexpr int SIDE = NT % 2 ? 1 : 2;

    float sum[NT][2][4];

    INLINE void clear() {
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i / 2][i % 2][j] = 0;
    }

    // Byte at which unit `u` of a column's inputs begins.
    static INLINE int unit_byte(int u) {
        const int in_block = u % (4 * UNITS);
        return u / (4 * UNITS) * BLOCK_BYTES + in_block % UNITS * 64 + in_block / UNITS * 16;
    }

    // x: of column g at unit t.
    INLINE void multiply(const Block<Format>& block, const u8* x, int row_bytes,
                         int num_tiles) {
        constexpr int TOGETHER = Format::TOGETHER;
#pragma unroll
        for (int first = 0; first < UNITS; first += TOGETHER) {
            u32 pair[TOGETHER][2][2][4];  // [unit][mma][high]
#pragma unroll
            for (int j = 0; j < 4 * TOGETHER; ++j)
                Format::pairs(pair[j / 4][j / 2 % 2][j % 2], block.codes[j / 2 % 2][j % 2],
                              first + j / 4);
#pragma unroll
            for (int n = 0; n < NT; n += SIDE) {
                if (n > 0 && n >= num_tiles) break;
                uint4 b[SIDE][TOGETHER];
#pragma unroll
                for (int i = 0; i < SIDE * TOGETHER; ++i)
                    b[i / TOGETHER][i % TOGETHER] = *reinterpret_cast<const uint4*>(
                        x + (n + i / TOGETHER) * 8 * row_bytes + (first + i % TOGETHER) * 64);
                if constexpr (Format::HAS_GROUP_SCALE) {
                    float part[2 * SIDE][4] = {};
                    multiply_units(part, pair, b);
#pragma unroll
                    for (int i = 0; i < 8 * SIDE; ++i) {
                        float& total = sum[n + i / 8][i / 4 % 2][i % 4];
                        total = multiply_add(part[i / 4][i % 4],
                                             low_bf16(block.scale[i / 4 % 2][i % 4 / 2]), total);
                    }
                } else {
                    multiply_units(&sum[n][0], pair, b);
                }
            }
        }
    }

    // d: sums of SIDE tiles of tokens, two `mma` each.
    static INLINE void multiply_units(float (*d)[4],
                                      const u32 (&pair)[Format::TOGETHER][2][2][4],
                                      const uint4 (&b)[SIDE][Format::TOGETHER]) {
#pragma unroll
        for (int j = 0; j < 2 * Format::TOGETHER; ++j) {
            const int half = j % 2 * 2;
#pragma unroll
            for (int i = 0; i < 2 * SIDE; ++i) {
                const auto& p = pair[j / 2][i % 2];
                const uint4& v = b[i / 2][j / 2];
                mma(d[i], p[0][half], p[1][half], p[0][half + 1], p[1][half + 1],
                    half ? v.z : v.x, half ? v.w : v.y);
            }
        }
    }
};

#endif
