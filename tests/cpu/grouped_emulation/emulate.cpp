// Runs the kernels of grouped.cu on the CPU by name, with CUDA's own argument array.
// First: their guards keep the real ones out.
#include "device.cuh"
#include "grouped_device.cuh"
#include "wide_device.cuh"

#include "grouped.cu"

#include "launches.h"

namespace {

using emulation::Launch;
using emulation::unpack;

#define BOTH(CODES, NT, WARPS, DEPTH, WIDE)                                                  \
    {"grouped_up_kernel<" #CODES ", " #NT ", " #WARPS ", " #DEPTH ", 1, " #WIDE ">", \
     unpack(grouped_up_kernel<CODES, NT, WARPS, DEPTH, 1, WIDE>)},                  \
    {"grouped_down_kernel<" #CODES ", " #NT ", " #WARPS ", " #DEPTH ", 1, " #WIDE ">",      \
     unpack(grouped_down_kernel<CODES, NT, WARPS, DEPTH, 1, WIDE>)}
#define IN_ONE(CODES, NT, WARPS, DEPTH)                                         \
    {"grouped_both_kernel<" #CODES ", " #NT ", " #WARPS ", " #DEPTH ", 1>", \
     unpack(grouped_both_kernel<CODES, NT, WARPS, DEPTH, 1>)}
#define ALL(CODES)                                                                        \
    BOTH(CODES, 1, 1, 2, false), BOTH(CODES, 2, 2, 2, false), BOTH(CODES, 2, 2, 3, false), \
        BOTH(CODES, 3, 3, 1, false), BOTH(CODES, 4, 2, 2, false),                          \
        BOTH(CODES, 1, 2, 3, false), IN_ONE(CODES, 1, 1, 2), IN_ONE(CODES, 1, 2, 3)

const std::map<std::string, Launch> kernels = {
    ALL(Bf16Codes), ALL(Fp8Codes), ALL(Int4Codes), BOTH(Fp8Codes, 4, 4, 2, true),
    BOTH(Fp8Codes, 6, 8, 1, true), BOTH(Fp8Codes, 2, 4, 3, true), {"combine_kernel", unpack(combine_kernel)}};

u32 pairs(const std::string& codes, u32 (&pair)[4], const uint4& v, int unit) {
    if (codes == "fp8") return Fp8Codes::pairs(pair, v, unit), 0;
    if (codes == "int4") return Int4Codes::pairs(pair, v, unit), 0;
    return 1;
}

}  // namespace

// 0, or 1 where no kernel has that name.
extern "C" int emulate(const char* name, int x, int y, int z, int block, int shared_bytes,
                       void** args) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return 1;
    emulation::run_grid({x, y, z}, block, shared_bytes, [&] { found->second(args); });
    return 0;
}

// The bf16 numbers of 16 bytes of codes, in their order.
extern "C" int decode(const char* codes, const u32* from, u32* to, int num_units) {
    const uint4 v = {from[0], from[1], from[2], from[3]};
    for (int unit = 0; unit < num_units; ++unit) {
        u32 pair[4];
        if (pairs(codes, pair, v, unit)) return 1;
        for (int i = 0; i < 4; ++i) to[4 * unit + i] = pair[i];
    }
    return 0;
}
