// Scales of groups of channels, of codecs that have them: what a lane of `WarpSums` reads of them.
//
// Letters as in attend.cu: D channels of a head. Lane = 4 * g + t, as in `mma`.
#ifndef SUBTEN_ATTEND_GROUPS_CUH
#define SUBTEN_ATTEND_GROUPS_CUH

#include "attend_codecs.cuh"

// A lane's channels of a row are of two groups, one below D / 2 and the other as far above, in K as
// in V: it picks their bytes out of two words of a row's scales.
template <class Codec, int DIM, bool HAS_GROUPS = (Codec::GROUP != 0)>
struct GroupShare {
    INLINE GroupShare(int, int) {}
};

template <class Codec, int DIM>
struct GroupShare<Codec, DIM, true> {
    using P = Part<Codec, DIM>;
    static constexpr int KEY_BYTES = P::ROW / 4, VALUE_BYTES = P::ROW / 8;  // a lane's of a row
    static_assert(KEY_BYTES <= Codec::GROUP && KEY_BYTES <= 16, "one group of each half a lane");
    u32 key_selector, value_selector;

    INLINE GroupShare(int g, int t) {
        key_selector = pair_selector(t * KEY_BYTES / Codec::GROUP);
        value_selector = two_selector(g * VALUE_BYTES / Codec::GROUP);
    }

    // The scales of a row of K, each in both halves.
    INLINE void load_key(u32 (&scales)[2], const u8* stage, int key) const {
        u32 words[2];
        load(words, stage, key);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            scales[i] = Codec::scale_pair(byte_twice(words[i], key_selector));
    }

    // The scales of four rows of V, as a fragment holds the values: of x and y of the first two
    // rows, then of the others.
    INLINE void load_values(u32 (&scales)[4], const u8* stage, const int (&keys)[4]) const {
        u32 words[4][2];
#pragma unroll
        for (int r = 0; r < 4; ++r) load(words[r], stage, keys[r]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 two =
                byte_of_two(words[i / 2 * 2][i % 2], words[i / 2 * 2 + 1][i % 2], value_selector);
            scales[i] = Codec::scale_pair(two & 0x00ff00ffu);
        }
    }

    // Of keys `key` and two on, `key` the first or second of four neighbours: their own scales.
    static INLINE void load_powers(float (&scales)[2], const u8* stage, int key) {
        u32 bytes;
        load_words<4>(&bytes, stage + P::ZERO + key - key % 2);
        bytes >>= key % 2 * 8;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float power = bits_float((r ? bytes << 7 : bytes << 23) & 0x7f800000u);
            scales[r] = power + (power - power);  // byte 255, an infinity, becomes NaN
        }
    }

    // Makes what is decoded of rows from `limit` on 0.
    static INLINE void clear_tail(u8* stage, int limit, int lane) {
        constexpr int EACH = Codec::HAS_SCALE ? P::ZERO_ROW : P::SCALE_ROW;
        u8* scales = stage + (Codec::HAS_SCALE ? P::ZERO : P::SCALE);
#pragma unroll 1
        for (int at = limit * EACH + lane; at < P::KEYS * EACH; at += WARP) scales[at] = 0;
    }

private:
    static INLINE void load(u32 (&words)[2], const u8* stage, int key) {
        load_words<P::SCALE_ROW>(words, stage + P::SCALE + key * P::SCALE_ROW);
        if (P::SCALE_ROW < 8) words[1] = words[0] >> 4 * P::SCALE_ROW;
    }
};

#endif
