// The names of src/subten/kernels/cuda/wide_device.cuh on a CPU, by their own formulas: where a
// descriptor's layout (PTX ISA, wgmma, K-major, 128-byte swizzle) puts an element. Products are done
// when they are asked for.
#ifndef SUBTEN_WIDE_DEVICE_CUH
#define SUBTEN_WIDE_DEVICE_CUH

#include "grouped_device.cuh"

// The piece's first byte, and bytes that it has been moved on.
struct ColumnsAt {
    const u8* piece;
    int on;
};

inline ColumnsAt columns_at(SharedAt at) {
    if ((at - emulation::dynamic_shared) % 1024) std::abort();
    return {at, 0};
}
inline ColumnsAt columns_on(ColumnsAt at, int num_steps) { return {at.piece, at.on + 32 * num_steps}; }

namespace emulation {

// By thread: whether its writes are shown, and whether it may start products.
inline std::map<int, bool> is_begun;

inline float element(ColumnsAt at, int k, int column) {
    int byte = column / 8 * 1024 + column % 8 * 128 + at.on + 2 * k;
    byte ^= byte >> 3 & 0x70;  // bits 7 to 9 onto bits 4 to 6
    return low_bf16(as<u16>(at.piece + byte));
}

}  // namespace emulation

inline void show_to_wide_mma() {}
inline void begin_wide_mma() { emulation::is_begun[emulation::current] = true; }
inline void end_wide_mma() { emulation::is_begun[emulation::current] = false; }
template <int NEWEST>
void wait_wide_mma() {}

template <int NT>
struct WideMma {
    template <int I, int ALL>
    static void add(float (&sum)[ALL][2][4], const u32 (&a)[4], ColumnsAt b) {
        using namespace emulation;
        if (!is_begun[current]) std::abort();
        slots[current] = {{a[0], a[1], a[2], a[3]}, {}};
        meet_warp();
        const int g = current % WARP / 4, t = current % WARP % 4;
        for (int i = 0; i < 4 * NT; ++i) {
            const int row = g + i % 4 / 2 * 8, column = i / 4 * 8 + t * 2 + i % 2;
            double total = sum[i / 4][I][i % 4];
            for (int k = 0; k < 16; ++k) {
                const u32 pair = warp_slots()[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
                total += (double)low_bf16(pair >> k % 2 * 16 & 0xffff) * element(b, k, column);
            }
            sum[i / 4][I][i % 4] = total;
        }
        meet_warp();
    }
};

#endif
