// The names of src/subten/kernels/cuda/cluster_device.cuh on a CPU: the threads of all blocks of a
// cluster are fibers that take turns.
#ifndef SUBTEN_CLUSTER_DEVICE_CUH
#define SUBTEN_CLUSTER_DEVICE_CUH

#include "grouped_device.cuh"

namespace emulation {

inline int cluster_blocks, block_threads;
inline int shared_stride;  // bytes from a block's shared memory to that of the next one
inline Barrier cluster_barrier;

inline int own_block() { return current / block_threads; }

// Runs `cluster` neighbours along x at once. What device.cuh knows of the block that runs is put
// back for each fiber: blockIdx, shared memory, barrier, living threads.
inline void run_clusters(dim3 grid, int num_threads, int shared_bytes, int cluster,
                         std::function<void()> kernel) {
    const int in_each = shared_bytes / sizeof(float4) + 1, all_threads = cluster * num_threads;
    std::vector<float4> shared(in_each * cluster);
    body = kernel, gridDim = grid, blockDim = {num_threads, 1, 1};
    cluster_blocks = cluster, block_threads = num_threads;
    shared_stride = in_each * sizeof(float4);
    if ((int)fibers.size() < all_threads) fibers.resize(all_threads);
    auto run = [&](dim3 first) {
        std::memset(shared.data(), 0xff, shared.size() * sizeof(float4));
        slots.assign(all_threads, {});
        warp_barriers.assign(all_threads / WARP, {});
        has_waited.assign(all_threads, false);
        cluster_barrier = {};
        std::vector<Barrier> barriers(cluster);
        std::vector<int> live(cluster, num_threads);
        for (int i = 0; i < all_threads; ++i) {
            Fiber& fiber = fibers[i];
            fiber.is_done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, run_fiber, 0);
        }
        int left = all_threads;
        for (long round = 0; left > 0; ++round) {
            if (round > 10'000'000) std::abort();  // threads wait for one another
            for (current = 0; current < all_threads; ++current) {
                if (fibers[current].is_done) continue;
                const int block = own_block();
                threadIdx.x = current % num_threads;
                blockIdx = {first.x + block, first.y, first.z};
                dynamic_shared = reinterpret_cast<u8*>(shared.data()) + block * shared_stride;
                block_barrier = barriers[block], num_live = live[block];
                swapcontext(&scheduler, &fibers[current].context);
                barriers[block] = block_barrier, live[block] = num_live;
                left -= fibers[current].is_done;
            }
        }
        for (bool waited : has_waited)
            if (!waited) std::abort();
    };
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x; x += cluster) run({x, y, z});
}

}  // namespace emulation

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

inline u32 lanes_like(int v) {
    u32 mask = 0;
    exchange(v, [&](int lane, int other) { mask |= (u32)(other == v) << lane; });
    return mask;
}

#endif
