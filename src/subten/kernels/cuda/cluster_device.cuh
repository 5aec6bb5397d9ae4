// What a cluster of blocks says to the machine: blocks that run at once, each reading the others'
// shared memory. The tests replace this file too.
#ifndef SUBTEN_CLUSTER_DEVICE_CUH
#define SUBTEN_CLUSTER_DEVICE_CUH

#include "grouped_device.cuh"

// All threads of all blocks of the cluster have come here, and what they wrote to shared memory can
// be read by the others. Not for a launch without clusters.
INLINE void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n\t"
        "barrier.cluster.wait.acquire.aligned;" ::: "memory");
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

#endif
