// What the grouped experts say to the machine beyond device.cuh: copies into shared memory that run
// by themselves, packed bf16 arithmetic, and integers passed between lanes. The tests replace this
// file too.
#ifndef SUBTEN_GROUPED_DEVICE_CUH
#define SUBTEN_GROUPED_DEVICE_CUH

#include "device.cuh"

// A place in shared memory, as copies want it: 32 bits, computed once.
using SharedAt = u32;
INLINE SharedAt shared_at(const void* at) {
    SharedAt address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(address) : "l"(at));
    return address;
}

// Starts a copy of 16 bytes from global to shared memory, past L1, or of 4 through it. A thread's
// copies since its last `end_copies` are a group.
INLINE void copy16(SharedAt to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
INLINE void copy4(SharedAt to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
INLINE void copy4_if(bool is_wanted, SharedAt to, const void* from) {
    asm volatile(
        "{ .reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4; }" ::"r"(to),
        "l"(from), "r"((int)is_wanted)
        : "memory");
}
INLINE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the newest NEWEST. For those of other threads a barrier
// must follow.
template <int NEWEST>
INLINE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}

// Asks for bytes, a multiple of 16, that somebody will read from L2.
INLINE void fetch_to_l2(const void* from, int num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(num_bytes) : "memory");
#endif
}

// a * b + c of two bf16 each, rounded once; subnormal numbers are kept.
INLINE u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Four bytes of `v`, the lowest nibble of `selector` saying which becomes the lowest; with 8 added,
// eight times that byte's sign.
INLINE u32 choose_bytes(u32 v, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(out) : "r"(v), "r"(selector));
    return out;
}

// (v & mask) | bits in one instruction; the compiler, given constants, takes two.
INLINE u32 mask_or(u32 v, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(v), "r"(mask), "r"(bits));
    return out;
}

INLINE int from_lane(int v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

// Sum of `v` over this lane and those below it.
INLINE int sum_to_lane(int v, int lane) {
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, v, distance);
        if (lane >= distance) v += below;
    }
    return v;
}

// Adds one; what threads of this block have written before a barrier can be seen, past L1, by whom
// sees the sum. The sum before.
INLINE int arrive(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

// Adds one; the sum before. No more than that can be relied on.
INLINE int take(int* counter) {
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

// Returns once `counter` is `sum`; then what was written before its arrivals can be seen, past L1, by
// the threads of this block after a barrier.
INLINE void wait_until(const int* counter, int sum) {
    int v;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    } while (v != sum);
}

#endif
