// Weights on their way into L2 while a kernel with little to read runs.
#ifndef SUBTEN_NEXT_WEIGHT_CUH
#define SUBTEN_NEXT_WEIGHT_CUH

#include "device.cuh"

#define PREFETCH_BYTES 4096

// A matrix that a later launch reads; its address and size are multiples of 16.
struct NextWeight {
    const u8* codes;
    i64 num_bytes;

    // A block's share of the requests, by one warp: that of `block` of `num_blocks`.
    INLINE void prefetch(int block, int num_blocks, int lane) const {
        const i64 stride = (i64)num_blocks * WARP * PREFETCH_BYTES;
        i64 at = ((i64)block * WARP + lane) * PREFETCH_BYTES;
#pragma unroll 1
        for (; at < num_bytes; at += stride) {
            const i64 rest = num_bytes - at;
            prefetch_bulk(codes + at, rest < PREFETCH_BYTES ? (int)rest : PREFETCH_BYTES);
        }
    }
};

#endif
