// What the decode kernels say to the machine, so that no other file holds PTX.
//
// The tests replace this file by one with the same names that runs on a CPU, lane by lane; a
// kernel uses nothing of the device that is not named here, but threadIdx and its kin,
// __syncthreads, and the float and uint vectors.
#ifndef SUBTEN_DEVICE_CUH
#define SUBTEN_DEVICE_CUH

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]
#define INLINE __device__ __forceinline__
#define WARP 32

// Programmatic dependent launch. A kernel launched with that attribute may start while the one
// before it runs. Until `wait_for_previous_kernels` returns it may read weights and nothing else,
// and write nothing; afterwards all earlier kernels have ended and all they wrote can be seen.
INLINE void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as every block of this one has come here or ended.
INLINE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes of weights, read once: past L1, and L2 fetches the whole 128-byte line, whose other
// half the same warp asks for next. An ordinary load, as the three after it: the assembler moves
// those of the read-only path (.nc) across barriers, and past `wait_for_previous_kernels`.
INLINE uint4 load_stream(const void* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// Small read-only data that neighbours in time share: scales, norm weights. Kept in L1.
INLINE uint4 load_constant16(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

INLINE u16 load_constant2(const void* at) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

INLINE float load_constant_float(const float* at) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}

// Past L1: what another block of this launch, or a kernel that still ends, has written.
INLINE float load_from_l2(const float* at) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}

INLINE int load_from_l2(const int* at) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

INLINE uint4 load_from_l2(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// Asks L2 for the 128 bytes around `at`.
INLINE void fetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// A number that another block of this launch polls: it is its own flag, so no fence is needed.
INLINE void publish(float* to, float v) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}

INLINE float poll(const float* at) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}

INLINE void publish(int* to, int v) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

INLINE int poll(const int* at) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// What this thread has written is in memory before it goes on.
INLINE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// D (16 x 8) += A (16 x 16) * B (16 x 8), bf16 into FP32. Lane = 4 * g + t holds of
//   A: a0 = row g, k 2t and 2t+1;  a1 = row g+8, same k;  a2, a3 = the same rows, k + 8
//   B: b0 = k 2t and 2t+1 of column g;  b1 = k + 8
//   D: d0, d1 = row g, columns 2t and 2t+1;  d2, d3 = row g+8
INLINE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats rounded to nearest even, `low` in the low half.
INLINE u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

INLINE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
INLINE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
INLINE int float_bits(float v) { return __float_as_int(v); }
INLINE float bits_float(int v) { return __int_as_float(v); }

// Correctly rounded whatever the compiler's flags.
INLINE float inverse_sqrt(float v) { return __frcp_rn(__fsqrt_rn(v)); }

// To one unit in the last place: the hardware's guess, and a step of Newton's. It has no branches,
// as the root and the division have, and so a third of their latency.
INLINE float near_inverse_sqrt(float v) {
    float guess;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(guess) : "f"(v));
    return fmaf(guess, 0.5f * fmaf(-v * guess, guess, 1.0f), guess);
}
INLINE float exponential(float v) { return expf(v); }
INLINE float divide(float a, float b) { return __fdiv_rn(a, b); }
// To 1 ulp, of numbers far from the ends of the range.
INLINE float rough_reciprocal(float v) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
    return inverse;
}
// Not joined with an addition to one rounding.
INLINE float multiply(float a, float b) { return __fmul_rn(a, b); }
INLINE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

INLINE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
INLINE u32 lanes_where(bool holds) { return __ballot_sync(0xffffffffu, holds); }
INLINE int count_bits(u32 v) { return __popc(v); }
INLINE int lowest_bit(u32 v) { return __ffs(static_cast<int>(v)) - 1; }
INLINE int warp_max(int v) { return __reduce_max_sync(0xffffffffu, v); }
INLINE int warp_min(int v) { return __reduce_min_sync(0xffffffffu, v); }
INLINE int warp_sum(int v) { return __reduce_add_sync(0xffffffffu, v); }
INLINE void sync_warp() { __syncwarp(); }

// The same order of additions in every lane and every run.
template <int LANES>
INLINE float sum_over_lanes(float v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}

#endif
