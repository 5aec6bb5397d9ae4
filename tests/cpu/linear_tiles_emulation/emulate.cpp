// Runs the kernels of linear_tiles.cu on the CPU by name, with CUDA's own argument array.
// First: their guards keep the real ones out.
#include "device.cuh"
#include "grouped_device.cuh"
#include "cluster_device.cuh"

#include "linear_tiles.cu"

#include "launches.h"

namespace {

using emulation::Launch;
using emulation::unpack;

#define ONE(CODES, NT, WARPS, DEPTH, IS_NORMED)                                              \
    {"linear_tiles_kernel<" #CODES ", " #NT ", " #WARPS ", " #DEPTH ", " #IS_NORMED ">",     \
     unpack(linear_tiles_kernel<CODES, NT, WARPS, DEPTH, IS_NORMED>)}
#define BOTH(CODES, NT, WARPS, DEPTH) \
    ONE(CODES, NT, WARPS, DEPTH, false), ONE(CODES, NT, WARPS, DEPTH, true)
#define ALL(CODES)                                                                        \
    BOTH(CODES, 1, 1, 3), BOTH(CODES, 1, 4, 2), BOTH(CODES, 2, 1, 3), BOTH(CODES, 2, 4, 2), \
        BOTH(CODES, 4, 3, 1), BOTH(CODES, 4, 4, 2), BOTH(CODES, 6, 1, 2), BOTH(CODES, 6, 4, 2)

const std::map<std::string, Launch> kernels = {ALL(Bf16Codes), ALL(Fp8Codes), ALL(Int4Codes)};

}  // namespace

// 0, or 1 where no kernel has that name.
extern "C" int emulate(const char* name, int x, int y, int z, int block, int shared_bytes,
                       int cluster, void** args) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return 1;
    emulation::run_clusters({x, y, z}, block, shared_bytes, cluster, [&] { found->second(args); });
    return 0;
}
