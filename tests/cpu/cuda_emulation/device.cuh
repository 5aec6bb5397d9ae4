// The names of src/subten/kernels/cuda/device.cuh on a CPU, so that kernels run without a GPU.
//
// A thread of a block is a fiber. It runs until it needs the others (a barrier, a shuffle, `mma`),
// then the next one runs; blocks run one after another, and one that waits for another of its launch
// is run again when that has ended, without publishing a second time. `mma` follows the layout in the PTX ISA
// (mma.m16n8k16, .bf16) by its own formulas. Shared memory begins as NaN.
#ifndef SUBTEN_DEVICE_CUH
#define SUBTEN_DEVICE_CUH

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include <ucontext.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct dim3 { int x = 1, y = 1, z = 1; };

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define INLINE inline
#define WARP 32
#define DYNAMIC_SHARED(name) u8* const name = emulation::dynamic_shared

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

inline u8* dynamic_shared;

struct Barrier {
    int waiting = 0, round = 0;
};

struct Fiber {
    ucontext_t context;
    std::vector<u8> stack = std::vector<u8>(256 * 1024);
    bool is_done = false;
};

// What the lanes of a warp show each other.
struct Slot {
    u32 a[4], b[2];
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Slot> slots;
inline std::vector<Barrier> warp_barriers;
inline Barrier block_barrier;
inline int current, num_live;
inline std::function<void()> body;
// A thread that never waited for earlier kernels is a bug that a GPU shows rarely.
inline std::vector<bool> has_waited;
// What happens when all threads of a block have come to the wait, if anything.
inline std::function<void()> at_wait;
// Whether blocks run from the last to the first.
inline bool is_backwards;
// What happens when a thread lets the next kernel start, if anything.
inline std::function<void()> at_launch_dependents;
// What happens when a block has ended, if anything.
inline std::function<void()> at_block_end;

// The block waits for others, and whether it has before.
inline bool is_put_off, is_again;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline void meet(Barrier& barrier, int num_expected) {
    const int round = barrier.round;
    if (++barrier.waiting == num_expected) {
        barrier.waiting = 0;
        ++barrier.round;
        return;
    }
    while (barrier.round == round) yield();
}

inline void meet_warp() { meet(warp_barriers[current / WARP], WARP); }
inline Slot* warp_slots() { return &slots[current / WARP * WARP]; }

inline void run_fiber() {
    body();
    fibers[current].is_done = true;
    --num_live;
    if (block_barrier.waiting > 0 && block_barrier.waiting == num_live) {
        block_barrier.waiting = 0;
        ++block_barrier.round;
    }
}

// Whether it came to its end.
inline bool run_block(int num_threads, std::function<void()> kernel) {
    body = kernel;
    is_put_off = false;
    if ((int)fibers.size() < num_threads) fibers.resize(num_threads);
    slots.assign(num_threads, {});
    warp_barriers.assign(num_threads / WARP, {});
    block_barrier = {};
    num_live = num_threads;
    has_waited.assign(num_threads, false);
    for (int i = 0; i < num_threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.is_done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (long round = 0; num_live > 0; ++round) {
        if (round > 10'000'000) std::abort();  // threads wait for one another
        for (current = 0; current < num_threads; ++current) {
            if (fibers[current].is_done) continue;
            threadIdx.x = current;
            swapcontext(&scheduler, &fibers[current].context);
            if (is_put_off) break;
        }
        if (is_put_off) break;
    }
    for (bool waited : has_waited)
        if (!waited) std::abort();
    if (at_block_end) at_block_end();
    return !is_put_off;
}

inline void run_grid(dim3 grid, int num_threads, int shared_bytes, std::function<void()> kernel) {
    std::vector<float4> shared(shared_bytes / sizeof(float4) + 5);
    dynamic_shared = reinterpret_cast<u8*>(shared.data());
    gridDim = grid;
    blockDim = {num_threads, 1, 1};
    std::vector<dim3> blocks, put_off;
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x; ++x) blocks.push_back({x, y, z});
    if (is_backwards) blocks = std::vector<dim3>(blocks.rbegin(), blocks.rend());
    is_again = false;
    while (!blocks.empty()) {
        put_off.clear();
        for (const dim3& block : blocks) {
            std::memset(dynamic_shared, 0xff, shared.size() * sizeof(float4));
            blockIdx = block;
            if (!run_block(num_threads, kernel)) put_off.push_back(block);
            // A kernel that writes past its shared memory.
            for (int i = shared_bytes; i < shared_bytes + 64; ++i)
                if (dynamic_shared[i] != 0xff) std::abort();
        }
        if (put_off.size() == blocks.size()) std::abort();  // blocks wait for one another
        blocks = put_off;
        is_again = true;
    }
}

template <class T>
T as(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

}  // namespace emulation

inline void __syncthreads() { emulation::meet(emulation::block_barrier, emulation::num_live); }
inline void sync_warp() { emulation::meet_warp(); }
inline void wait_for_previous_kernels() {
    if (emulation::at_wait) {
        emulation::meet(emulation::block_barrier, emulation::num_live);
        emulation::at_wait();
    }
    emulation::has_waited[emulation::current] = true;
}
inline void launch_dependents() {
    if (emulation::at_launch_dependents) emulation::at_launch_dependents();
}

inline uint4 load_stream(const void* at) { return *reinterpret_cast<const uint4*>(at); }
inline uint4 load_constant16(const void* at) { return *reinterpret_cast<const uint4*>(at); }
inline u16 load_constant2(const void* at) { return *reinterpret_cast<const u16*>(at); }
inline float load_constant_float(const float* at) { return *at; }
inline float load_from_l2(const float* at) { return *at; }
inline int load_from_l2(const int* at) { return *at; }
inline uint4 load_from_l2(const uint4* at) { return *at; }
inline void fetch_line(const void* at) {
    volatile u8 seen = *static_cast<const u8*>(at);
    (void)seen;
}
inline void publish(float* to, float v) {
    if (!emulation::is_again) *to = v;
}
inline float poll(const float* at) { return *at; }
inline void publish(int* to, int v) {
    if (!emulation::is_again) *to = v;
}
inline int poll(const int* at) { return *at; }
inline void fence() {}

inline float bits_float(u32 v) { return emulation::as<float>(&v); }
inline int float_bits(float v) { return emulation::as<int>(&v); }
inline float low_bf16(u32 pair) { return bits_float(pair << 16); }
inline float high_bf16(u32 pair) { return bits_float(pair & 0xffff0000u); }

inline u32 round_bf16(float v) {
    const u32 bits = float_bits(v);
    if (v != v) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }

inline float inverse_sqrt(float v) { return 1.0f / std::sqrt(v); }
inline float near_inverse_sqrt(float v) { return 1.0f / std::sqrt(v); }
inline float exponential(float v) { return std::exp(v); }
inline float divide(float a, float b) { return a / b; }
inline float rough_reciprocal(float v) {
    const float inverse = 1.0f / v;  // off by an ulp where it may be
    return std::nextafter(inverse, float_bits(v) & 0x10000 ? 0.0f : 1e38f);
}
inline float multiply(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline int count_bits(u32 v) { return __builtin_popcount(v); }
inline int lowest_bit(u32 v) { return __builtin_ffs(v) - 1; }

// Shows `value` to the warp and folds all 32 lanes' with `join(lane, value)`.
template <class T, class Join>
void exchange(T value, Join join) {
    using namespace emulation;
    std::memcpy(slots[current].a, &value, sizeof(T));
    meet_warp();
    for (int lane = 0; lane < WARP; ++lane) join(lane, as<T>(warp_slots()[lane].a));
    meet_warp();
}

inline float shuffle_xor(float v, int mask) {
    float got = 0;
    const int from = emulation::current % WARP ^ mask;
    exchange(v, [&](int lane, float other) { if (lane == from) got = other; });
    return got;
}
inline u32 lanes_where(bool holds) {
    u32 mask = 0;
    exchange((int)holds, [&](int lane, int other) { mask |= (u32)other << lane; });
    return mask;
}
inline int warp_max(int v) {
    int most = v;
    exchange(v, [&](int, int other) { most = other > most ? other : most; });
    return most;
}
inline int warp_min(int v) {
    int least = v;
    exchange(v, [&](int, int other) { least = other < least ? other : least; });
    return least;
}

inline int warp_sum(int v) {
    int sum = 0;
    exchange(v, [&](int, int other) { sum += other; });
    return sum;
}

template <int LANES>
float sum_over_lanes(float v) {
    for (int mask = LANES / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}

// Element (row, k) of A lies in lane row % 8 * 4 + k % 8 / 2, register row / 8 + k / 8 * 2, half
// k % 2; element (k, column) of B in lane column * 4 + k % 8 / 2, register k / 8, half k % 2.
template <class Value>
void mma_of(float (&d)[4], emulation::Slot own, Value value) {
    using namespace emulation;
    slots[current] = own;
    meet_warp();
    const Slot* lanes = warp_slots();
    const int g = current % WARP / 4, t = current % WARP % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = t * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const u32 a = lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
            const u32 b = lanes[column * 4 + k % 8 / 2].b[k / 8];
            sum += (double)value(a >> k % 2 * 16 & 0xffff) * value(b >> k % 2 * 16 & 0xffff);
        }
        d[i] = sum;
    }
    meet_warp();
}

inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_of(d, {{a0, a1, a2, a3}, {b0, b1}}, low_bf16);
}

#endif
