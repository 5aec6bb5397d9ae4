// The names of src/subten/kernels/cuda/grouped_device.cuh on a CPU, beside those of
// cuda_emulation/device.cuh.
//
// A copy poisons its target when it starts and brings the bytes when its group is waited for, so
// that reading too early and writing too early both show.
#ifndef SUBTEN_GROUPED_DEVICE_CUH
#define SUBTEN_GROUPED_DEVICE_CUH

#include "device.cuh"

#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>

namespace emulation {

struct Copy {
    void* to;
    const void* from;
    size_t num_bytes;
};

struct Copies {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

inline std::map<int, Copies> copies;  // by thread; all waited for when a block ends

inline void start_copy(void* to, const void* from, size_t num_bytes) {
    if (((uintptr_t)to | (uintptr_t)from) % num_bytes || !has_waited[current]) {
        std::fprintf(stderr, "emulated copy: not aligned, or before the wait\n");
        std::abort();
    }
    std::memset(to, 0xff, num_bytes);
    copies[current].open.push_back({to, from, num_bytes});
}

}  // namespace emulation

using SharedAt = u8*;
inline SharedAt shared_at(const void* at) { return static_cast<u8*>(const_cast<void*>(at)); }

inline void copy16(SharedAt to, const void* from) { emulation::start_copy(to, from, 16); }
inline void copy4(SharedAt to, const void* from) { emulation::start_copy(to, from, 4); }
inline void copy4_if(bool is_wanted, SharedAt to, const void* from) {
    if (is_wanted) copy4(to, from);
}

inline void end_copies() {
    emulation::Copies& own = emulation::copies[emulation::current];
    own.groups.push_back(own.open);
    own.open.clear();
}

template <int NEWEST>
void wait_copies() {
    std::deque<std::vector<emulation::Copy>>& groups =
        emulation::copies[emulation::current].groups;
    for (; groups.size() > NEWEST; groups.pop_front())
        for (const emulation::Copy& copy : groups.front())
            std::memcpy(copy.to, copy.from, copy.num_bytes);
}

// Reads what it asks for, all of which must be there.
inline void fetch_to_l2(const void* from, int num_bytes) {
    if ((uintptr_t)from % 16 || num_bytes % 16) std::abort();
    volatile u8 seen;
    for (int i = 0; i < num_bytes; ++i) seen = static_cast<const u8*>(from)[i];
    (void)seen;
}

// One rounding, from the exact result: products and sums here have far fewer than 53 bits.
inline u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) {
    const double low = (double)low_bf16(a) * low_bf16(b) + low_bf16(c);
    const double high = (double)high_bf16(a) * high_bf16(b) + high_bf16(c);
    return pack_bf16((float)low, (float)high);
}

inline u32 choose_bytes(u32 v, u32 selector) {
    u32 out = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = selector >> 4 * i & 15, byte = v >> 8 * (nibble & 3) & 0xff;
        if (nibble & 4) std::abort();
        out |= (nibble & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
    }
    return out;
}

inline u32 mask_or(u32 v, u32 mask, u32 bits) { return (v & mask) | bits; }

inline int from_lane(int v, int lane) {
    int got = 0;
    exchange(v, [&](int other_lane, int other) { if (other_lane == lane) got = other; });
    return got;
}

inline int sum_to_lane(int v, int lane) {
    int sum = 0;
    exchange(v, [&](int other_lane, int other) { if (other_lane <= lane) sum += other; });
    return sum;
}

inline int arrive(int* counter) { return (*counter)++; }

// Blocks run one after another, so all but the last one of a launch get three only.
inline int take(int* counter) {
    static int last = -1, num_taken;
    num_taken = blockIdx.x == last ? num_taken + 1 : 1;
    last = blockIdx.x;
    if (num_taken > 3 && last < gridDim.x - 1) return 1 << 30;
    return (*counter)++;
}

// Blocks run one after another, so that what is waited for must be there.
inline void wait_until(const int* counter, int sum) {
    if (*counter != sum) std::abort();
}

#endif
