// The names of src/subten/kernels/cuda/cluster_device.cuh on a CPU.
#ifndef SUBTEN_CLUSTER_DEVICE_CUH
#define SUBTEN_CLUSTER_DEVICE_CUH

#include "grouped_device.cuh"

inline void sync_cluster() {
    if (emulation::cluster_blocks == 1) std::abort();
    emulation::meet(emulation::cluster_barrier,
                    emulation::cluster_blocks * emulation::block_threads);
}

inline SharedAt at_block(SharedAt at, int rank) {
    return at + (rank - emulation::own_block()) * emulation::shared_stride;
}
inline float load_from_block(SharedAt at, int rank) {
    return *reinterpret_cast<const float*>(at_block(at, rank));
}
inline float4 load4_from_block(SharedAt at, int rank) {
    return *reinterpret_cast<const float4*>(at_block(at, rank));
}

inline void copy16_weights(SharedAt to, const void* from) {
    const bool has_waited = emulation::has_waited[emulation::current];
    emulation::has_waited[emulation::current] = true;
    copy16(to, from);
    emulation::has_waited[emulation::current] = has_waited;
}

inline int arrive(int* counter) { return (*counter)++; }

inline u32 lanes_like(int v) {
    u32 mask = 0;
    exchange(v, [&](int lane, int other) { mask |= (u32)(other == v) << lane; });
    return mask;
}

#endif
