// Runs a kernel of src/subten/kernels/cuda on the CPU by name, with CUDA's own argument array.
// First: its guard keeps the real one out.
#include "device.cuh"

#include "experts.cu"
#include "kv_append.cu"
#include "linear.cu"
#include "route.cu"

#include "launches.h"

namespace {

using emulation::Launch;
using emulation::unpack;

#define EACH(NAME, KERNEL) {NAME, unpack(KERNEL)}

#define TOKENS(FORMAT, DEPTH, IS_ONE)                                                      \
    EACH("linear_kernel<" #FORMAT ", " #DEPTH ", true, " #IS_ONE ">",                      \
         (linear_kernel<FORMAT, DEPTH, true, IS_ONE>)),                                    \
        EACH("linear_kernel<" #FORMAT ", " #DEPTH ", false, " #IS_ONE ">",                 \
             (linear_kernel<FORMAT, DEPTH, false, IS_ONE>)),                               \
        EACH("up_kernel<" #FORMAT ", " #DEPTH ", " #IS_ONE ">",                            \
             (up_kernel<FORMAT, DEPTH, IS_ONE>))

#define GEMV(FORMAT, DEPTH)                                                                \
    TOKENS(FORMAT, DEPTH, true), TOKENS(FORMAT, DEPTH, false),                             \
        EACH("down_kernel<" #FORMAT ", " #DEPTH ">", (down_kernel<FORMAT, DEPTH>))

#define ROUTE(KEYS) {"route_kernel<" #KEYS ">", unpack(route_kernel<KEYS>)}

#define APPEND(ENCODER, DIM, VALUE)                          \
    {"kv_append_kernel<" #ENCODER ", " #DIM ", " #VALUE ">", \
     unpack(kv_append_kernel<ENCODER, DIM, VALUE>)}
#define APPENDS(ENCODER)                                                             \
    APPEND(ENCODER, 64, u16), APPEND(ENCODER, 64, float), APPEND(ENCODER, 128, u16), \
        APPEND(ENCODER, 128, float), APPEND(ENCODER, 256, u16), APPEND(ENCODER, 256, float)

const std::map<std::string, Launch> kernels = {
    GEMV(Bf16, 2), GEMV(Bf16, 4), GEMV(Fp8, 2), GEMV(Fp8, 4), GEMV(Int4, 2), GEMV(Int4, 4),
    ROUTE(1),      ROUTE(2),      ROUTE(4),     ROUTE(8),     ROUTE(16),     ROUTE(32),
    APPENDS(Bf16Encoder), APPENDS(Fp8Encoder), APPENDS(IntEncoder<8>), APPENDS(IntEncoder<4>),
    APPENDS(Int2Encoder),
};

}  // namespace

// 0, or 1 where no kernel has that name.
extern "C" int emulate(const char* name, int x, int y, int z, int block, int shared_bytes,
                       void** args) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return 1;
    emulation::run_grid({x, y, z}, block, shared_bytes, [&] { found->second(args); });
    return 0;
}
