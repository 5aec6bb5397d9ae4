// Runs the kernels of route_batch.cu on the CPU by name, with CUDA's own argument array.
// First: their guards keep the real ones out.
#include "device.cuh"
#include "grouped_device.cuh"
#include "cluster_device.cuh"

#include "route_batch.cu"

#include <string>
#include <utility>

namespace {

using Launch = std::function<void(void**)>;

template <class... Args, size_t... I>
Launch unpack(void (*kernel)(Args...), std::index_sequence<I...>) {
    return [kernel](void** args) { kernel(*reinterpret_cast<std::decay_t<Args>*>(args[I])...); };
}

template <class... Args>
Launch unpack(void (*kernel)(Args...)) {
    return unpack(kernel, std::index_sequence_for<Args...>{});
}

#define ONE(KEYS, TOKENS) \
    {"route_batch_kernel<" #KEYS ", " #TOKENS ">", unpack(route_batch_kernel<KEYS, TOKENS>)}
#define ALL(KEYS) ONE(KEYS, 4), ONE(KEYS, 8)

const std::map<std::string, Launch> kernels = {ALL(1), ALL(2), ALL(4), ALL(8)};

}  // namespace

// 0, or 1 where no kernel has that name.
extern "C" int emulate(const char* name, int x, int y, int z, int block, int shared_bytes,
                       int cluster, void** args) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return 1;
    emulation::run_clusters({x, y, z}, block, shared_bytes, cluster, [&] { found->second(args); });
    return 0;
}
