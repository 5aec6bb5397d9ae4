// What a KV codec's pages look like to attend.cu: decoding of codes, and where bytes lie.
//
// Letters as there: D channels of a head, N keys of a slice. Lane = 4 * g + t, as in `mma`.
#ifndef SUBTEN_ATTEND_CODECS_CUH
#define SUBTEN_ATTEND_CODECS_CUH

#include "attend_device.cuh"

#define PAGE_KEYS 64

// A codec turns words of codes into A fragments. Word w of a K row holds channels that `mma` number
// `step` of that row takes: 4 a lane. A channel of q meets its K where `key_byte`, its byte in a
// row, lies: in step `key_step` of that byte's word, as value `key_slot` of the lane's 4, times
// QUERY_FACTOR; sums of products count SCORE_FACTOR. Where KEYS_ARE_BYTES a step has 32 channels, 8
// a lane, sums of the first half of all steps count 2^KEY_SHIFT more, and codes of the channels
// below D / 2 are LOW_MIDDLE too large.
// Word w of a V row, with the same word of three other keys, gives VALUE_STEPS fragments of 2
// channels (x in row g, y in row g + 8: next to x, or D / 2 on where Y_IS_FAR) and 4 keys. They are
// too large by SURPLUS_X or SURPLUS_Y, pairs of bf16; what is left counts `value_factor`, once
// weights, 2^WEIGHT_SHIFT times too large, are right.
// Where there is a GROUP, fragments still lack the scales of GROUP channels each, D / GROUP bytes
// of a row's scale plane, which `scale_pair` makes bf16s and `scaled` multiplies in
// (attend_groups.cuh); where it HAS_SCALE, the row's own is a power of two, a byte of its zero
// plane (E8M0: 255 is NaN). Then a[0] and a[1] of a step of K, like x of V, are channels below D /
// 2, a[2] and a[3], like y, the others.

// A word is 2 channels.
struct KvBf16 {
    static constexpr int BITS = 16, VALUE_STEPS = 1, MIDDLE = 0;
    static constexpr bool HAS_SCALE = false, HAS_ZERO = false, IS_ROTATED = false;
    static constexpr bool Y_IS_FAR = false, KEYS_ARE_BYTES = false;
    static constexpr u32 SURPLUS_X = 0, SURPLUS_Y = 0;
    static constexpr float QUERY_FACTOR = 1, SCORE_FACTOR = 1;
    static constexpr int WEIGHT_SHIFT = 0, GROUP = 0;

    static INLINE void key_pairs(u32 (&a)[4], const u32* low, const u32* high, int step) {
        a[0] = low[2 * step];
        a[1] = high[2 * step];
        a[2] = low[2 * step + 1];
        a[3] = high[2 * step + 1];
    }
    static INLINE int key_byte(int channel, int) { return 2 * channel; }
    static INLINE int key_step(int, int word, int) { return word / 2; }
    static INLINE int key_slot(int channel, int) { return channel % 4; }
    static INLINE float value_factor(int) { return 1; }

    static INLINE void value_pairs(u32 (&a)[1][4], const u32 (&ab)[2], const u32 (&cd)[2]) {
        a[0][0] = ab[0];
        a[0][1] = ab[1];
        a[0][2] = cd[0];
        a[0][3] = cd[1];
    }
    static INLINE int value_channel(int byte, int, int is_y, int) { return byte / 2 + is_y; }
};

// A word is 4 channels; `Bytes::even` makes a pair of its bytes 0 and 2, `odd` of 1 and 3.
template <class Bytes>
struct KvByte {
    static constexpr int BITS = 8, VALUE_STEPS = 2;
    static constexpr bool HAS_SCALE = true, IS_ROTATED = false, Y_IS_FAR = false;
    static constexpr bool KEYS_ARE_BYTES = false;
    static constexpr u32 SURPLUS_X = 0, SURPLUS_Y = 0;
    static constexpr float QUERY_FACTOR = 1, SCORE_FACTOR = 1;
    static constexpr int WEIGHT_SHIFT = 0, GROUP = 0;

    static INLINE void key_pairs(u32 (&a)[4], const u32* low, const u32* high, int step) {
        a[0] = Bytes::even(low[step]);
        a[1] = Bytes::even(high[step]);
        a[2] = Bytes::odd(low[step]);
        a[3] = Bytes::odd(high[step]);
    }
    static INLINE int key_byte(int channel, int) { return channel; }
    static INLINE int key_step(int, int word, int) { return word; }
    static INLINE int key_slot(int channel, int) { return channel % 4 / 2 + channel % 2 * 2; }
    static INLINE float value_factor(int) { return 1; }

    static INLINE void value_pairs(u32 (&a)[2][4], const u32 (&ab)[2], const u32 (&cd)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[i][0] = Bytes::even(ab[i]);
            a[i][1] = Bytes::odd(ab[i]);
            a[i][2] = Bytes::even(cd[i]);
            a[i][3] = Bytes::odd(cd[i]);
        }
    }
    static INLINE int value_channel(int byte, int step, int is_y, int) {
        return byte + 2 * step + is_y;
    }
};

// E4M3: the bits of a code, shifted into place, are the bf16 of 2^-120 of its value, subnormals
// included; q and weights are 2^64 times too large, which keeps products in range. The code of NaN,
// which only garbage holds, comes out as 480.
struct KvFp8 : KvByte<KvFp8> {
    static constexpr int MIDDLE = 0, WEIGHT_SHIFT = 64;
    static constexpr bool HAS_ZERO = false;
    static constexpr float QUERY_FACTOR = 0x1p64f, SCORE_FACTOR = 0x1p56f;

    static INLINE u32 even(u32 w) { return and_or(w << 8, 0x80008000u, (w << 4) & 0x07f007f0u); }
    static INLINE u32 odd(u32 w) { return and_or(w, 0x80008000u, (w >> 4) & 0x07f007f0u); }
    static INLINE float value_factor(int) { return 0x1p56f; }
};

// Of K, code - 128 is the byte with its upper bit flipped, and q is as for int4. Of V it is exact
// in bf16: the low 7 bits under the bits of 128.0, less 128 where bit 7 is set, less 256 where it
// is not.
struct KvInt8 : KvByte<KvInt8> {
    static constexpr int MIDDLE = 128, KEY_SHIFT = 0, LOW_MIDDLE = 0;
    static constexpr bool HAS_ZERO = true, KEYS_ARE_BYTES = true;

    // A fragments of `mma_bytes` number `step`: two words.
    template <int STEPS>
    static INLINE void key_bytes(u32 (&a)[4], const u32* low, const u32* high, int step) {
        a[0] = low[2 * step] ^ 0x80808080u;
        a[1] = high[2 * step] ^ 0x80808080u;
        a[2] = low[2 * step + 1] ^ 0x80808080u;
        a[3] = high[2 * step + 1] ^ 0x80808080u;
    }
    static INLINE int key_step(int, int word, int) { return word / 2; }
    static INLINE int key_slot(int channel, int) { return channel % 8; }

    static INLINE u32 even(u32 w) {
        return add_bf16x2(and_or(w, 0x007f007fu, 0x43004300u),
                          and_xor(w, 0x00800080u, 0xc380c380u));
    }
    static INLINE u32 odd(u32 w) { return even(w >> 8); }
};

// A word is 8 channels: byte i of a row is channel i in its low nibble, i + D / 2 in its high one.
// Integers issue at half the rate of multiplications, so the least of them wins:
// - nibbles of K are bytes, four at once: a low one is the code, a high one 16 times it, and 8
//   less with its upper bit flipped. q is integers of 16 bits in two bytes;
// - of V a nibble alone in a bf16 is 2^-133 code, or 2^-129 code, for exponents 0 and 1 count in
//   the same steps. Weights are 2^64 times what they were, which keeps products in range. The
//   surplus of code 8 leaves at each slice's end (`WarpSums::drop_surplus`).
struct KvInt4 {
    static constexpr int BITS = 4, VALUE_STEPS = 4, MIDDLE = 8;
    static constexpr bool HAS_SCALE = true, HAS_ZERO = true, IS_ROTATED = true;
    static constexpr bool Y_IS_FAR = true, KEYS_ARE_BYTES = true;
    static constexpr float SCORE_FACTOR = 0x1p-4f;
    static constexpr int KEY_SHIFT = 4, LOW_MIDDLE = 8, WEIGHT_SHIFT = 64, GROUP = 0;
    static constexpr u32 SURPLUS_X = 0x00080008u, SURPLUS_Y = 0x00800080u;

    // A fragments of `mma_bytes` number `step` of STEPS: the low nibbles of two words, or, in the
    // second half, the high ones.
    template <int STEPS>
    static INLINE void key_bytes(u32 (&a)[4], const u32* low, const u32* high, int step) {
        const int word = step * 2 % STEPS;
        const u32 words[4] = {low[word], high[word], low[word + 1], high[word + 1]};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = step < STEPS / 2 ? words[i] & 0x0f0f0f0fu
                                    : and_xor(words[i], 0xf0f0f0f0u, 0x80808080u);
    }
    static INLINE int key_byte(int channel, int dim) { return channel % (dim / 2); }
    static INLINE int key_step(int channel, int word, int dim) {
        return word / 2 + channel / (dim / 2) * (dim / 64);
    }
    // Byte of the lane's 8 of that step.
    static INLINE int key_slot(int channel, int) { return channel % 8; }

    static INLINE void value_pairs(u32 (&a)[4][4], const u32 (&ab)[2], const u32 (&cd)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 l = ab[i / 2] >> (i % 2 * 8), h = cd[i / 2] >> (i % 2 * 8);
            a[i][0] = l & 0x000f000fu;
            a[i][1] = l & 0x00f000f0u;
            a[i][2] = h & 0x000f000fu;
            a[i][3] = h & 0x00f000f0u;
        }
    }
    // 2^133 and 2^129, less WEIGHT_SHIFT.
    static INLINE float value_factor(int is_y) { return is_y ? 0x1p65f : 0x1p69f; }
    static INLINE int value_channel(int byte, int step, int is_y, int dim) {
        return byte + step + is_y * (dim / 2);
    }
};

// A word is 16 channels: byte i of a row is channels i, i + D / 4, i + D / 2 and i + 3 D / 4, from
// the lowest bits up; a code is `is_outer + 2 * is_negative`, of levels 3 and 10. ALU instructions,
// every other cycle one, are what there is too few of:
// - levels of K are bytes, four at once out of a table, and q integers of 16 bits in two bytes: a
//   code costs half of what a bf16 would, and two products of 32 channels replace two of 16;
// - of V, with the xor of its bits for the lower one and the upper one flipped, a code counts the
//   levels in order, c = 0 to 3. They lie 7, 6 and 7 apart: codes alone in their bf16s, 2^-133 c or
//   up to 2^6 times that, become (182 + 6.625 c) / 256, which rounds to (192 + level) / 256. The
//   surplus leaves at each slice's end (`WarpSums::drop_surplus`).
struct KvInt2 {
    static constexpr int BITS = 2, VALUE_STEPS = 8, MIDDLE = 0;
    static constexpr bool HAS_SCALE = true, HAS_ZERO = false, IS_ROTATED = true;
    static constexpr bool Y_IS_FAR = true, KEYS_ARE_BYTES = true;
    static constexpr float SCORE_FACTOR = 1;
    static constexpr int KEY_SHIFT = 0, LOW_MIDDLE = 0, WEIGHT_SHIFT = 0, GROUP = 0;
    static constexpr u32 SURPLUS_X = 0x3f403f40u, SURPLUS_Y = SURPLUS_X;  // 0.75

    // A fragments of `mma_bytes` number `step`: quarters 0 and 2 of a word's codes, or 1 and 3.
    template <int STEPS>
    static INLINE void key_bytes(u32 (&a)[4], const u32* low, const u32* high, int step) {
        const int shift = step % 2 * 2;
        const u32 l = low[step / 2] >> shift & 0x33333333u;
        const u32 h = high[step / 2] >> shift & 0x33333333u;
        a[0] = bytes_of_nibbles(LEVELS, l);
        a[1] = bytes_of_nibbles(LEVELS, h);
        a[2] = bytes_of_nibbles(LEVELS, upper_half(l));
        a[3] = bytes_of_nibbles(LEVELS, upper_half(h));
    }
    static INLINE int key_byte(int channel, int dim) { return channel % (dim / 4); }
    static INLINE int key_step(int channel, int word, int dim) {
        return 2 * word + channel / (dim / 4) % 2;
    }
    // Byte of the lane's 8 of that step.
    static INLINE int key_slot(int channel, int dim) {
        return channel % 4 * 2 + channel / (dim / 2);
    }
    static INLINE float value_factor(int) { return 256; }

    static INLINE u32 ordered(u32 w) { return and_xor(w >> 1, 0x55555555u, w); }

    // Codes of quarter `quarter`, in the low bytes of both halves of `w`.
    static INLINE u32 levels(u32 w, int quarter) {
        const u32 alone = and_xor(w, 0x00030003u << 2 * quarter, 0x00020002u << 2 * quarter);
        return multiply_add_bf16x2(alone, 0x7f547f54u - 0x01000100u * quarter, 0x3f363f36u);
    }

    // STEPS / 2 bytes of a key, 2 where D is 64.
    template <int STEPS>
    static INLINE void value_pairs(u32 (&a)[STEPS][4], const u32 (&ab)[2], const u32 (&cd)[2]) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int byte = i % (STEPS / 2), quarter = i / (STEPS / 2);
            const u32 l = ordered(ab[byte / 2]) >> byte % 2 * 8;
            const u32 h = ordered(cd[byte / 2]) >> byte % 2 * 8;
            a[i][0] = levels(l, quarter);
            a[i][1] = levels(l, quarter + 2);
            a[i][2] = levels(h, quarter);
            a[i][3] = levels(h, quarter + 2);
        }
    }
    static INLINE int value_channel(int byte, int step, int is_y, int dim) {
        const int num_bytes = dim / 32;
        return byte + step % num_bytes + step / num_bytes * (dim / 4) + is_y * (dim / 2);
    }

private:
    static constexpr u32 LEVELS = 0xf6fd0a03u;  // 3, 10, -3, -10
};

// E2M1, bytes as int4's: byte i of a row is channel i in its low nibble, i + D / 2 in its high one.
// The bits of a code, s e e m, shifted to those of a bf16's sign, lower exponent and upper
// mantissa, are the bf16 of 2^-126 of its value, subnormals included.
//
// Four instructions a pair: two masks, between them an integer multiplication, which is two shifts,
// and the product with the scale; 3.5 an element in all. Scales could act on the sums of a step of
// K where all of its channels are of one group: four sums an `mma` for four pairs, which is as many
// instructions, and lanes would read keys by words, which meet banks four times as often. Those of
// V could act on weights, group by group: two products a fragment in place of four, 16 fewer a tile
// of 16 keys, but 12 more pairs of scales, four instructions each.
struct KvE2m1 {
    static constexpr int BITS = 4, VALUE_STEPS = 4, MIDDLE = 0;
    static constexpr bool HAS_ZERO = false, IS_ROTATED = false;
    static constexpr bool Y_IS_FAR = true, KEYS_ARE_BYTES = false;
    static constexpr u32 SURPLUS_X = 0, SURPLUS_Y = 0;

    // Of the low nibbles of a word's bytes 0 and 2, and of the high ones.
    static INLINE u32 low(u32 w) { return (w & 0x000f000fu) * 0x1040u & 0x81c081c0u; }
    static INLINE u32 high(u32 w) { return (w & 0x00f000f0u) * 0x0104u & 0x81c081c0u; }

    static INLINE void key_pairs(u32 (&a)[4], const u32* low_row, const u32* high_row, int step) {
        const u32 l = low_row[step / 2] >> step % 2 * 8, h = high_row[step / 2] >> step % 2 * 8;
        a[0] = low(l);
        a[1] = low(h);
        a[2] = high(l);
        a[3] = high(h);
    }
    static INLINE int key_byte(int channel, int dim) { return channel % (dim / 2); }
    static INLINE int key_step(int channel, int word, int) { return 2 * word + channel % 2; }
    static INLINE int key_slot(int channel, int dim) {
        return channel / (dim / 2) * 2 + channel % 4 / 2;
    }

    static INLINE void value_pairs(u32 (&a)[4][4], const u32 (&ab)[2], const u32 (&cd)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 l = ab[i / 2] >> i % 2 * 8, h = cd[i / 2] >> i % 2 * 8;
            a[i][0] = low(l);
            a[i][1] = high(l);
            a[i][2] = low(h);
            a[i][3] = high(h);
        }
    }
    static INLINE int value_channel(int byte, int step, int is_y, int dim) {
        return byte + step + is_y * (dim / 2);
    }
};

// A product with its group's E4M3, 2^7 times too large, is exact: it has 6 significant bits, and is
// a multiple of 2^-129. q and weights are as for fp8.
struct KvFp4 : KvE2m1 {
    static constexpr int GROUP = 16, WEIGHT_SHIFT = 64;
    static constexpr bool HAS_SCALE = true;
    static constexpr float QUERY_FACTOR = 0x1p64f, SCORE_FACTOR = 0x1p55f;

    // Of the low bytes of both halves: the bits of E4M3, shifted into place, are 2^-120 of it.
    static INLINE u32 scale_pair(u32 bytes) {
        return multiply_bf16x2(bytes << 4, 0x7f007f00u);  // 2^127
    }
    static INLINE u32 scaled(u32 pair, u32 scales) { return multiply_bf16x2(pair, scales); }
    static INLINE float value_factor(int) { return 0x1p55f; }
};

// Powers of two, and no scale of the row: values have all of bf16's range, so that a pair takes two
// products.
struct KvFp4Mx : KvE2m1 {
    static constexpr int GROUP = 32, WEIGHT_SHIFT = 0;
    static constexpr bool HAS_SCALE = false;
    static constexpr float QUERY_FACTOR = 1, SCORE_FACTOR = 1;

    // Byte 255, the bits of an infinity, becomes NaN.
    static INLINE u32 scale_pair(u32 bytes) {
        return multiply_add_bf16x2(bytes << 7, 0, bytes << 7);
    }
    static INLINE u32 scaled(u32 pair, u32 scales) {
        return multiply_bf16x2(multiply_bf16x2(pair, 0x7e807e80u), scales);  // 2^126
    }
    static INLINE float value_factor(int) { return 1; }
};

// K, or V, of one slice: where it lies in a page, and in a stage of the ring. V codes of 8 and 16
// bits lie there in quarters 32 bytes apart, so that the four t of a warp read different banks;
// codes of 4 and 2 bits stay one copy, and rows of neighbouring quarters differ in parity instead.
// Of 2 bits, K and V of a slice lie in one stage, VALUES_AT apart, and come at once.
template <class Codec, int DIM>
struct Part {
    static constexpr int ROW = DIM * Codec::BITS / 8;
    static constexpr int KEYS = PAGE_KEYS * ROW <= 4096 ? PAGE_KEYS : 4096 / ROW;
    static constexpr int QUARTER = KEYS / 4, TILES = KEYS / 16;
    static constexpr int PAD = Codec::BITS <= 4 ? 0 : 32;
    static constexpr bool IS_WHOLE = KEYS == PAGE_KEYS && PAD == 0;

    // Bytes of a row in the planes of a page, each a multiple of 128.
    static constexpr int SCALE_ROW = Codec::GROUP ? DIM / Codec::GROUP : Codec::HAS_SCALE ? 2 : 0;
    static constexpr int ZERO_ROW = Codec::GROUP ? Codec::HAS_SCALE : Codec::HAS_ZERO ? 2 : 0;
    static constexpr int PAGE_SCALE = PAGE_KEYS * ROW;
    static constexpr int PAGE_ZERO = PAGE_SCALE + SCALE_ROW * PAGE_KEYS;
    static constexpr int PAGE_BYTES = PAGE_ZERO + (ZERO_ROW * PAGE_KEYS + 127) / 128 * 128;
    static_assert(IS_WHOLE || Codec::GROUP == 0, "part of a slice has scales of 2 bytes");

    static constexpr bool HAS_BOTH = IS_WHOLE && Codec::BITS == 2;
    static constexpr int VALUES_AT = HAS_BOTH ? PAGE_BYTES : 0;

    static constexpr int COPIED = VALUES_AT + PAGE_BYTES * KEYS / PAGE_KEYS;
    static constexpr int SCALE = KEYS * ROW + 4 * PAD;
    static constexpr int ZERO = SCALE + SCALE_ROW * KEYS;
    static constexpr int END = IS_WHOLE ? PAGE_BYTES : ZERO + ZERO_ROW * KEYS;
    static constexpr int BARRIER = (VALUES_AT + END + 7) / 8 * 8;
    static constexpr int STAGE = (BARRIER + 8 + 15) / 16 * 16;

    static INLINE u64* barrier_of(u8* stage) { return reinterpret_cast<u64*>(stage + BARRIER); }

    // Starts the copies of `from` (K or V of a page) from token `key` on into a stage; of what
    // HAS_BOTH, where K is.
    static INLINE void fetch(u8* stage, const u8* from, int key, bool is_value) {
        u64* barrier = barrier_of(stage);
        expect_bytes(barrier, COPIED);
        if (IS_WHOLE) {
            copy_bulk(stage, from, COPIED, barrier);
            return;
        }
        const u8* codes = from + key * ROW;
        if (is_value) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                copy_bulk(stage + i * (QUARTER * ROW + PAD), codes + i * QUARTER * ROW,
                          QUARTER * ROW, barrier);
        } else {
            copy_bulk(stage, codes, KEYS * ROW, barrier);
        }
        const u8* meta = from + 2 * key;
        if (Codec::HAS_SCALE) copy_bulk(stage + SCALE, meta + PAGE_SCALE, 2 * KEYS, barrier);
        if (Codec::HAS_ZERO) copy_bulk(stage + ZERO, meta + PAGE_ZERO, 2 * KEYS, barrier);
    }

    // Starts to bring into L2 what `fetch` would copy of K or V.
    static INLINE void prefetch(const u8* from, int key) {
        if (IS_WHOLE) {
            prefetch_bulk(from, PAGE_BYTES);
            return;
        }
        prefetch_bulk(from + key * ROW, KEYS * ROW);
        const u8* meta = from + 2 * key;
        if (Codec::HAS_SCALE) prefetch_bulk(meta + PAGE_SCALE, 2 * KEYS);
        if (Codec::HAS_ZERO) prefetch_bulk(meta + PAGE_ZERO, 2 * KEYS);
    }
};

// From one stage or row to another.
template <int BYTES>
INLINE void move_bytes(u8* to, const u8* from) {
    if (BYTES == 1) *to = *from;
    if (BYTES == 2) *reinterpret_cast<u16*>(to) = *reinterpret_cast<const u16*>(from);
    if (BYTES == 4) *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
    if (BYTES == 8) *reinterpret_cast<u64*>(to) = *reinterpret_cast<const u64*>(from);
}

// Key of row r < 8 of tile 0.
template <int QUARTER>
INLINE int first_key(int row) {
    return row / 2 * QUARTER + ((row ^ row >> 1) & 1);
}

template <int BYTES>
INLINE void load_words(u32* to, const u8* at) {
    if (BYTES == 16) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        to[0] = v.x;
        to[1] = v.y;
        to[2] = v.z;
        to[3] = v.w;
    } else if (BYTES == 8) {
        const u64 v = *reinterpret_cast<const u64*>(at);
        to[0] = (u32)v;
        to[1] = (u32)(v >> 32);
    } else if (BYTES == 4) {
        to[0] = *reinterpret_cast<const u32*>(at);
    } else {
        to[0] = *reinterpret_cast<const u16*>(at);
    }
}

// The words of a row that a lane of LANES reads: units of UNIT bytes, the first at lane * UNIT, the
// next LANES units on; of 2 bytes, it is the low half of a word. `byte_of` is where in the row its
// word w lies.
template <int ROW, int LANES>
struct RowShare {
    static constexpr int UNIT = ROW / LANES < 16 ? ROW / LANES : 16;
    static constexpr int WORDS = (ROW / LANES + 3) / 4;

    static INLINE void load(u32 (&words)[WORDS], const u8* first) {
#pragma unroll
        for (int w = 0; w < WORDS; w += (UNIT + 3) / 4)
            load_words<UNIT>(words + w, first + byte_of(w, 0));
    }
    static INLINE int byte_of(int w, int lane) {
        constexpr int EACH = (UNIT + 3) / 4;
        return (w / EACH * LANES + lane) * UNIT + w % EACH * 4;
    }
    static INLINE int word_at(int byte) {
        return byte / UNIT / LANES * (UNIT / 4) + byte % UNIT / 4;
    }
    static INLINE int lane_at(int byte) { return byte / UNIT % LANES; }
};

#endif
