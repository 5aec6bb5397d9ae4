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

#endif
