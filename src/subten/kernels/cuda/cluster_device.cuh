// What a cluster of blocks says to the machine: blocks that run at once, each reading the others'
// shared memory; and what blocks of a whole launch say to each other. The tests replace this file
// too.
#ifndef SUBTEN_CLUSTER_DEVICE_CUH
#define SUBTEN_CLUSTER_DEVICE_CUH

#include "grouped_device.cuh"

// All threads of all blocks of the cluster have come here, and what they wrote to shared memory can
// be read by the others. Not for a launch without clusters.
INLINE void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "barrier.cluster.arrive.release;\n\t"
        "barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// What lies at the same place in the shared memory of the cluster's block `rank`.
INLINE float load_from_block(SharedAt at, int rank) {
    float v = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .u32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a]; }"
        : "=f"(v)
        : "r"(at), "r"(rank)
        : "memory");
#endif
    return v;
}

INLINE float4 load4_from_block(SharedAt at, int rank) {
    float4 v = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .u32 a; mapa.shared::cluster.u32 a, %4, %5;\n\t"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a]; }"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(at), "r"(rank)
        : "memory");
#endif
    return v;
}

// As `copy16`, of weights: before `wait_for_previous_kernels`, too.
INLINE void copy16_weights(SharedAt to, const void* from) { copy16(to, from); }

// The lanes of this warp that hold the same number.
INLINE u32 lanes_like(int v) {
#if __CUDA_ARCH__ >= 700
    return __match_any_sync(0xffffffffu, v);
#else
    return 0;
#endif
}

#endif
