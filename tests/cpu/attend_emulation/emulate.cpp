// Runs the kernels of attend.cu on the CPU by name, with CUDA's own argument array.
// First: their guards keep the real ones out.
#include "device.cuh"
#include "attend_device.cuh"

#include "attend.cu"

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

#define ONE(CODEC, DIM, TILES)                            \
    {"attend_kernel<" #CODEC ", " #DIM ", " #TILES ">",   \
     unpack(attend_kernel<CODEC, DIM, TILES>)}
#define ALL(CODEC) ONE(CODEC, 64, 1), ONE(CODEC, 64, 2), ONE(CODEC, 128, 1), ONE(CODEC, 128, 2)

const std::map<std::string, Launch> kernels = {ALL(KvBf16), ALL(KvFp8), ALL(KvInt8), ALL(KvInt4)};

}  // namespace

// 0, or 1 where no kernel has that name.
extern "C" int emulate(const char* name, int x, int y, int z, int block, int shared_bytes,
                       void** args) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return 1;
    emulation::run_grid({x, y, z}, block, shared_bytes, [&] { found->second(args); });
    return 0;
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
