// Runs the kernels of attend.cu, append_attend.cu and attend_mixed.cu on the CPU by name, with
// CUDA's own array of arguments.
// First: their guards keep the real ones out.
#include "device.cuh"
#include "attend_device.cuh"

#include "append_attend.cu"
#include "attend.cu"
#include "attend_mixed.cu"

#include "launches.h"

namespace {

using emulation::Launch;
using emulation::unpack;

#define ONE(CODEC, DIM, TILES, POLLS)                                \
    {"attend_kernel<" #CODEC ", " #DIM ", " #TILES ", " #POLLS ">", \
     unpack(attend_kernel<CODEC, DIM, TILES, POLLS>)}
#define ALL(CODEC) ONE(CODEC, 64, 1, false), ONE(CODEC, 128, 1, false)

#define APPEND(CODEC, ENCODER, DIM, POLLS)                                \
    {"append_attend_kernel<" #CODEC ", " #ENCODER ", " #DIM ", " #POLLS ">", \
     unpack(append_attend_kernel<CODEC, ENCODER, DIM, POLLS>)}
#define APPENDS(CODEC, ENCODER) \
    APPEND(CODEC, ENCODER, 64, false), APPEND(CODEC, ENCODER, 128, false)

#define MIXED(BITS, DIM, TABLE, COLD, POLLS)                                          \
    {"attend_mixed_kernel<" #BITS ", " #DIM ", " #TABLE ", " #COLD ", " #POLLS ">", \
     unpack(attend_mixed_kernel<BITS, DIM, TABLE, COLD, POLLS>)}
#define MIXES(BITS, DIM, COLD) \
    MIXED(BITS, DIM, false, COLD, false), MIXED(BITS, DIM, true, COLD, false)

const std::map<std::string, Launch> kernels = {
    ALL(KvBf16),
    ALL(KvFp8),
    ALL(KvInt8),
    ALL(KvInt4),
    ALL(KvInt2),
    ALL(KvFp4),
    ALL(KvFp4Mx),
    ONE(KvInt4, 64, 1, true),
    ONE(KvInt4, 128, 1, true),
    ONE(KvBf16, 128, 1, true),
    APPENDS(KvBf16, Bf16Encoder),
    APPENDS(KvFp8, Fp8Encoder),
    APPENDS(KvInt8, IntEncoder<8>),
    APPENDS(KvInt4, IntEncoder<4>),
    APPENDS(KvInt2, Int2Encoder),
    APPENDS(KvFp4, Fp4Encoder),
    APPENDS(KvFp4Mx, Fp4MxEncoder),
    APPEND(KvInt4, IntEncoder<4>, 64, true),
    APPEND(KvInt4, IntEncoder<4>, 128, true),
    APPEND(KvBf16, Bf16Encoder, 128, true),
    MIXES(2, 64, false),
    MIXES(2, 128, false),
    MIXES(3, 64, false),
    MIXES(3, 128, false),
    MIXES(4, 64, false),
    MIXES(4, 128, false),
    MIXES(2, 128, true),
    MIXES(3, 64, true),
    MIXES(4, 128, true),
    MIXED(4, 128, false, false, true),
    MIXED(4, 128, true, false, true),
    MIXED(3, 64, true, false, true),
};

// Inputs that the kernel ahead writes: they are NaN until a block waits.
struct Input {
    u8* at;
    std::vector<u8> bytes;
};
std::vector<Input> inputs;

}  // namespace

// 0, or 1 where no kernel has that name.
extern "C" int emulate(const char* name, int x, int y, int z, int block, int shared_bytes,
                       void** args) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return 1;
    emulation::at_wait = [] {
        for (const Input& input : inputs)
            std::memcpy(input.at, input.bytes.data(), input.bytes.size());
    };
    emulation::run_grid({x, y, z}, block, shared_bytes, [&] {
        if (threadIdx.x == 0)  // the first to run
            for (const Input& input : inputs) std::memset(input.at, 0xff, input.bytes.size());
        found->second(args);
    });
    emulation::at_wait();  // where the last block did not wait
    emulation::at_wait = nullptr;
    return 0;
}

// From now on these `count` arrays, as they are, come from the kernel ahead of each launch.
extern "C" void set_inputs(u8* const* at, const int* num_bytes, int count) {
    inputs.clear();
    for (int i = 0; i < count; ++i)
        inputs.push_back({at[i], std::vector<u8>(at[i], at[i] + num_bytes[i])});
}

// From now on the bytes of `count` rows are written by the kernel ahead of each launch.
extern "C" void set_late(const void** from, const int* num_bytes, int count) {
    emulation::late.clear();
    emulation::num_early_copies = 0;
    for (int i = 0; i < count; ++i)
        emulation::late.push_back({(const u8*)from[i], num_bytes[i]});
}

// Copies that started before the wait since then.
extern "C" int num_early_copies() { return emulation::num_early_copies; }
