// Tensor cores that read the tokens from shared memory by themselves (`wgmma`): four neighbouring
// warps at once. Only Hopper has it (9.0, compiled as sm_90a). The tests replace this file too.
#ifndef SUBTEN_WIDE_DEVICE_CUH
#define SUBTEN_WIDE_DEVICE_CUH

#include "grouped_device.cuh"

// Columns of 64 inputs, bf16, in shared memory: 128 bytes each, one after another from a multiple of
// 1024, unit u (16 bytes) of column c at u ^ c % 8. To be moved on 16 inputs at a time.
using ColumnsAt = unsigned long long;
INLINE ColumnsAt columns_at(SharedAt at) {
    // Eight columns are 1024 bytes; the swizzle of 128 bytes.
    return (ColumnsAt)(at >> 4 & 0x3fff) | (ColumnsAt)1 << 16 | (ColumnsAt)(1024 >> 4) << 32 |
           (ColumnsAt)1 << 62;
}
INLINE ColumnsAt columns_on(ColumnsAt at, int num_steps) { return at + 2 * num_steps; }

// What this thread has written to shared memory can be seen by those tensor cores, of the whole
// block after a barrier.
INLINE void show_to_wide_mma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Before the first `WideMma` that reads registers which were written since the last one.
INLINE void begin_wide_mma() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Those since the last end are a group.
INLINE void end_wide_mma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All groups but the newest NEWEST have ended.
template <int NEWEST>
INLINE void wait_wide_mma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
}

// sum[.][I] += A B, bf16 into FP32: A, 64 rows of 16 inputs, is 16 of each warp, in the registers of
// `mma`; B the first 16 inputs of 8 * NT columns. sum[n][I], n < NT, is what `mma` has for columns
// 8 n to 8 n + 7.
#define SUM(n) "+f"(sum[n][I][0]), "+f"(sum[n][I][1]), "+f"(sum[n][I][2]), "+f"(sum[n][I][3])
#define WIDE_MMA(NT, N, D, A, B, ...)                                                            \
    template <>                                                                                  \
    struct WideMma<NT> {                                                                         \
        template <int I, int ALL>                                                                \
        static INLINE void add(float (&sum)[ALL][2][4], const u32 (&a)[4], ColumnsAt b) {        \
            asm volatile(                                                                        \
                "{ .reg .pred p; setp.eq.u32 p, 0, 0;\n\t"                                       \
                "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" D "}, {" A "}, " B   \
                ", p, 1, 1, 0; }"                                                                \
                : __VA_ARGS__                                                                    \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
        }                                                                                        \
    };
template <int NT>
struct WideMma;
WIDE_MMA(2, "16",
         "%0, %1, %2, %3, %4, %5, %6, %7",
         "%8, %9, %10, %11", "%12",
         SUM(0), SUM(1))
WIDE_MMA(4, "32",
         "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
         "%16, %17, %18, %19", "%20",
         SUM(0), SUM(1), SUM(2), SUM(3))
WIDE_MMA(6, "48",
         "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
         "%18, %19, %20, %21, %22, %23",
         "%24, %25, %26, %27", "%28",
         SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5))
WIDE_MMA(8, "64",
         "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
         "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
         "%32, %33, %34, %35", "%36",
         SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7))
WIDE_MMA(12, "96",
         "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
         "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
         "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
         "%48, %49, %50, %51", "%52",
         SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7), SUM(8), SUM(9),
         SUM(10), SUM(11))
#undef SUM
#undef WIDE_MMA

#endif
