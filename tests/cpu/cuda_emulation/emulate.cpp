// Runs a kernel of src/subten/kernels/cuda on the CPU by name, with CUDA's own argument array.
// First: its guard keeps the real one out.
#include "device.cuh"

#include "experts.cu"
#include "kv_append.cu"
#include "linear.cu"
#include "linear_route.cu"
#include "route.cu"
#include "up_ahead.cu"

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

// Without their launch bounds, the last two arguments, which mean nothing here.
#define ROUTE_AHEAD(FORMAT, DEPTH, UNITS, QUADS)                                             \
    EACH("linear_route_kernel<" #FORMAT ", " #DEPTH ", " #UNITS ", " #QUADS ">",             \
         (linear_route_kernel<FORMAT, DEPTH, UNITS, QUADS, 512, 1>))
#define UP_AHEAD(FORMAT, DEPTH, UNITS)                                                       \
    EACH("up_ahead_kernel<" #FORMAT ", " #DEPTH ", " #UNITS ">",                             \
         (up_ahead_kernel<FORMAT, DEPTH, UNITS, 512, 1>))
#define AHEAD(FORMAT, DEPTH, UNITS)                                                          \
    UP_AHEAD(FORMAT, DEPTH, UNITS), ROUTE_AHEAD(FORMAT, DEPTH, UNITS, 1),                    \
        ROUTE_AHEAD(FORMAT, DEPTH, UNITS, 3), ROUTE_AHEAD(FORMAT, DEPTH, UNITS, 6),          \
        ROUTE_AHEAD(FORMAT, DEPTH, UNITS, 0)
#define AHEADS(FORMAT)                                                                       \
    AHEAD(FORMAT, 2, 1), AHEAD(FORMAT, 2, 2), AHEAD(FORMAT, 4, 1), AHEAD(FORMAT, 4, 2)

#define ROUTE(KEYS) {"route_kernel<" #KEYS ">", unpack(route_kernel<KEYS>)}

#define APPEND(ENCODER, DIM, VALUE)                          \
    {"kv_append_kernel<" #ENCODER ", " #DIM ", " #VALUE ">", \
     unpack(kv_append_kernel<ENCODER, DIM, VALUE>)}
#define APPENDS(ENCODER)                                                             \
    APPEND(ENCODER, 64, u16), APPEND(ENCODER, 64, float), APPEND(ENCODER, 128, u16), \
        APPEND(ENCODER, 128, float), APPEND(ENCODER, 256, u16), APPEND(ENCODER, 256, float)

const std::map<std::string, Launch> kernels = {
    GEMV(Bf16, 2), GEMV(Bf16, 4), GEMV(Fp8, 2), GEMV(Fp8, 4), GEMV(Int4, 2), GEMV(Int4, 4),
    AHEADS(Bf16),  AHEADS(Fp8),   AHEADS(Int4),
    ROUTE(1),      ROUTE(2),      ROUTE(4),     ROUTE(8),     ROUTE(16),     ROUTE(32),
    APPENDS(Bf16Encoder), APPENDS(Fp8Encoder), APPENDS(IntEncoder<8>), APPENDS(IntEncoder<4>),
    APPENDS(Int2Encoder), APPENDS(Fp4Encoder), APPENDS(Fp4MxEncoder),
};

}  // namespace

// 0, or 1 where no kernel has that name.
extern "C" int emulate(const char* name, int x, int y, int z, int block, int shared_bytes,
                       void** args) {
    std::string shorter = name;
    shorter = shorter.substr(0, shorter.rfind(',', shorter.rfind(',') - 1)) + ">";
    auto found = kernels.find(name);
    if (found == kernels.end()) found = kernels.find(shorter);
    if (found == kernels.end()) return 1;
    // Its first block waits for the others.
    emulation::is_backwards = shorter.rfind("linear_route_kernel", 0) == 0;
    emulation::run_grid({x, y, z}, block, shared_bytes, [&] { found->second(args); });
    return 0;
}

// Calls back whenever a thread lets the next kernel start: its block, and whether it has waited for
// the kernels before.
extern "C" void watch_launch_dependents(void (*callback)(int block, int has_waited)) {
    emulation::at_launch_dependents = nullptr;
    if (callback)
        emulation::at_launch_dependents = [callback] {
            callback(blockIdx.x, emulation::has_waited[emulation::current]);
        };
}
