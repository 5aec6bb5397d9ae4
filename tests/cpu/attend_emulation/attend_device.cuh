// The names of src/subten/kernels/cuda/attend_device.cuh on a CPU, beside those of
// cuda_emulation/device.cuh.
//
// A bulk copy poisons its target when it starts and brings the bytes when a barrier is waited for,
// so that reading too early and writing too early both show; one that starts before the wait for
// earlier kernels brings what was there then. Barriers count phases and bytes.
#ifndef SUBTEN_ATTEND_DEVICE_CUH
#define SUBTEN_ATTEND_DEVICE_CUH

#include "device.cuh"

#include <cstdint>
#include <cstdio>
#include <map>

using u64 = unsigned long long;

namespace emulation {

struct Copy {
    u8* to;
    const u8* from;
    int num_bytes;
    std::vector<u8> early;
};

struct Arrivals {
    int phase = 0, expected = 0;
    std::vector<Copy> copies;
};

inline std::map<const void*, Arrivals> arrivals;
constexpr u64 BARRIER = 0x5bea12e4c0de5a11;  // what a barrier's memory holds until it ends

// Bytes that the kernel ahead still writes: no copy may start before the wait, and how many did.
struct Late {
    const u8* from;
    int num_bytes;
};
inline std::vector<Late> late;
inline int num_early_copies;

inline void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "emulated attention: %s\n", what);
    std::abort();
}

}  // namespace emulation

inline void init_barrier(u64* barrier) {
    emulation::check((uintptr_t)barrier % 8 == 0, "a barrier is not aligned");
    emulation::arrivals[barrier] = {};
    *barrier = emulation::BARRIER;
    emulation::at_block_end = [] {
        for (const auto& entry : emulation::arrivals)
            emulation::check(*static_cast<const u64*>(entry.first) == emulation::BARRIER,
                             "a barrier is overwritten that has not ended");
        emulation::arrivals.clear();
    };
}
inline void end_barrier(u64* barrier) {
    emulation::check(emulation::arrivals.at(barrier).copies.empty(), "a copy is under way");
    emulation::check(*barrier == emulation::BARRIER, "a barrier is overwritten");
    emulation::arrivals.erase(barrier);
}
inline void publish_barriers() {}

inline void expect_bytes(u64* barrier, int num_bytes) {
    emulation::Arrivals& a = emulation::arrivals.at(barrier);
    emulation::check(a.expected == 0, "a phase that is not over is begun again");
    a.expected = num_bytes;
}

inline void copy_bulk(void* first, const void* from, int num_bytes, u64* barrier, int at = 0) {
    void* to = (u8*)first + at;
    const uintptr_t bits = (uintptr_t)to | (uintptr_t)from | num_bytes;
    emulation::check(bits % 16 == 0 && num_bytes > 0, "a copy is not aligned");
    if (!emulation::has_waited[emulation::current]) {
        ++emulation::num_early_copies;
        for (const emulation::Late& l : emulation::late)
            emulation::check((const u8*)from >= l.from + l.num_bytes ||
                                 (const u8*)from + num_bytes <= l.from,
                             "a row is copied before the wait that says it is written");
    }
    std::vector<u8> early;
    if (!emulation::has_waited[emulation::current])
        early.assign((const u8*)from, (const u8*)from + num_bytes);
    emulation::arrivals.at(barrier).copies.push_back(
        {(u8*)to, (const u8*)from, num_bytes, std::move(early)});
    std::memset(to, 0xff, num_bytes);
}

inline void prefetch_bulk(const void* from, int num_bytes) {
    emulation::check(((uintptr_t)from | num_bytes) % 16 == 0 && num_bytes > 0,
                     "a prefetch is not aligned");
}

inline void leave_without_waiting() { emulation::has_waited[emulation::current] = true; }

inline void wait_phase(u64* barrier, int parity) {
    emulation::Arrivals& a = emulation::arrivals.at(barrier);
    if (a.phase % 2 != parity) return;  // another lane has brought the bytes
    emulation::check(a.expected > 0, "a phase that was never begun is waited for");
    for (const emulation::Copy& copy : a.copies) {
        std::memcpy(copy.to, copy.early.empty() ? copy.from : copy.early.data(), copy.num_bytes);
        a.expected -= copy.num_bytes;
    }
    emulation::check(a.expected == 0, "the bytes of a phase are not those expected");
    a.copies.clear();
    ++a.phase;
}

// Element (row, column) lies in lane row * 4 + column / 2, half column % 2.
inline u32 transpose_8x8(u32 pair) {
    u32 lanes[WARP];
    exchange(pair, [&](int lane, u32 other) { lanes[lane] = other; });
    const int row = emulation::current % WARP / 4, column = emulation::current % 4 * 2;
    auto element = [&](int r, int c) { return lanes[r * 4 + c / 2] >> (c % 2 * 16) & 0xffff; };
    return element(column, row) | element(column + 1, row) << 16;
}

inline u32 low_halves(u32 a, u32 b) { return (a & 0xffff) | b << 16; }
inline u32 high_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
inline u32 half_selector(bool is_high) { return is_high; }
inline float select_half(u32 w, u32 selector) { return selector ? high_bf16(w) : low_bf16(w); }
inline u32 pair_selector(int byte) { return byte; }
inline u32 byte_twice(u32 w, u32 byte) { return (w >> 8 * byte & 255) * 0x00010001u; }
inline u32 two_selector(int byte) { return byte; }
inline u32 byte_of_two(u32 a, u32 b, u32 byte) {
    return (a >> 8 * byte & 255) | (b >> 8 * byte & 255) << 16 | 0xa500a500u;
}
inline u32 and_or(u32 w, u32 mask, u32 bits) { return (w & mask) | bits; }
inline u32 and_xor(u32 w, u32 mask, u32 bits) { return (w & mask) ^ bits; }

inline u32 upper_half(u32 w) {
    emulation::check((w & 0x88888888u) == 0, "a half may be NaN");
    return w >> 16;
}
inline u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

inline u32 bytes_of_nibbles(u32 table, u32 nibbles) {
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = nibbles >> 4 * i & 15;
        emulation::check(nibble < 4, "a nibble is not in the table");
        bytes |= (table >> 8 * nibble & 0xff) << 8 * i;
    }
    return bytes;
}

inline u32 bytes_of_table(u32 low, u32 high, u32 nibbles) {
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = nibbles >> 4 * i & 15;
        const u32 byte = (nibble & 4 ? high : low) >> nibble % 4 * 8 & 255;
        bytes |= (nibble < 8 ? byte : byte & 128 ? 255u : 0u) << 8 * i;
    }
    return bytes;
}

inline u32 byte_and_below(u32 w, int byte, u32 below) {
    emulation::check(below < 256, "more than a byte below a byte");
    return (w >> 8 * byte & 255) << 8 | below;
}
#define FLOAT_OF_BYTE 8388608.0f
inline u32 byte_selector(int byte) { return byte; }
inline u32 alone_selector(int byte) { return byte; }
inline u32 byte_alone(u32 w, u32 selector) { return w >> 8 * selector & 255; }
inline float float_of_byte(u32 w, u32 byte) { return FLOAT_OF_BYTE + (w >> 8 * byte & 255); }

inline float half_value(u32 half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return fraction ? NAN : half & 0x8000 ? -INFINITY : INFINITY;
    const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25)
                                : std::ldexp((float)fraction, -24);
    return half & 0x8000 ? -size : size;
}
inline u32 half_bits(float v) {
    if (v != v) return 0x7fff;
    const u32 sign = std::signbit(v) ? 0x8000 : 0;
    v = std::fabs(v);
    if (v >= 65520.0f) return sign | 0x7c00;
    int exponent = v > 0 ? std::ilogb(v) : -14;
    exponent = exponent < -14 ? -14 : exponent;
    // Of steps of 2^(exponent - 10); what rounds up to the next power of two carries.
    const int steps = (int)std::nearbyint(std::ldexp(v, 10 - exponent));
    return sign | (u32)(steps < 1024 ? steps : steps + ((exponent + 14) << 10));
}
inline u32 pack_half(float low, float high) { return half_bits(low) | half_bits(high) << 16; }

inline void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_of(d, {{a0, a1, a2, a3}, {b0, b1}}, half_value);
}

// Element (row, k) of A lies in lane row % 8 * 4 + k % 16 / 4, register row / 8 + k / 16 * 2, byte
// k % 4; element (k, column) of B in lane column * 4 + k % 16 / 4, register k / 16, byte k % 4.
inline void mma_bytes(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    using namespace emulation;
    slots[current] = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    meet_warp();
    const Slot* lanes = warp_slots();
    const int g = current % WARP / 4, t = current % WARP % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = t * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const u32 x = lanes[row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2];
            const u32 y = lanes[column * 4 + k % 16 / 4].b[k / 16];
            d[i] += (signed char)(x >> k % 4 * 8) * (signed char)(y >> k % 4 * 8);
        }
    }
    meet_warp();
}

inline u32 add_bf16x2(u32 a, u32 b) {
    return pack_bf16(low_bf16(a) + low_bf16(b), high_bf16(a) + high_bf16(b));
}
inline u32 multiply_bf16x2(u32 a, u32 b) {
    return pack_bf16(low_bf16(a) * low_bf16(b), high_bf16(a) * high_bf16(b));
}

// The product is exact, and so is its sum with what the kernel adds.
inline u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) {
    return pack_bf16(low_bf16(a) * low_bf16(b) + low_bf16(c),
                     high_bf16(a) * high_bf16(b) + high_bf16(c));
}

inline float power_of_two(float v) { return std::exp2(v); }
inline float logarithm_of_two(float v) { return std::log2(v); }
inline float larger(float a, float b) { return std::fmax(a, b); }

inline int shuffle_from(int v, int from) {
    int got = 0;
    exchange(v, [&](int lane, int other) { if (lane == from) got = other; });
    return got;
}

inline int count_arrival(int* counter) { return (*counter)++; }

inline i64 load_from_l2(const i64* at) { return *at; }

template <int N>
void publish(float* to, const float (&v)[N]) {
    for (int i = 0; i < N; ++i) publish(to + i, v[i]);
}

inline void poll_again() {
    emulation::is_put_off = true;
    emulation::yield();
}

template <int N>
void poll(float (&v)[N], const float* at) {
    for (int i = 0; i < N; ++i) v[i] = at[i];
}

#endif
