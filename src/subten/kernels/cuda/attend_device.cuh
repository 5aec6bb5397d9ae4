// What attention says to the machine beyond device.cuh: bulk copies, their barriers, and packed
// bf16. Needs compute capability 9.0. The tests replace this file too.
#ifndef SUBTEN_ATTEND_DEVICE_CUH
#define SUBTEN_ATTEND_DEVICE_CUH

#include "device.cuh"

using u64 = unsigned long long;

INLINE u32 shared_address(const void* at) {
    u32 address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }"
        : "=r"(address)
        : "l"(at));
    return address;
}

// A barrier in shared memory completes a phase when one thread has said how many bytes to expect
// and the copies have brought them. Phases alternate between parity 0 and 1, from 0.
INLINE void init_barrier(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier))
                 : "memory");
}

// Of a barrier in its memory's last phase: only then may the memory hold anything else.
INLINE void end_barrier(u64* barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// The copy engine must see the barriers that this thread has made.
INLINE void publish_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

INLINE void expect_bytes(u64* barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(num_bytes)
                 : "memory");
}

// Starts a copy of `num_bytes` from global to shared memory, `at` bytes on from `to`; all multiples
// of 16. An `at` of a lane's own is added to the address in shared memory, for one addition.
INLINE void copy_bulk(void* to, const void* from, int num_bytes, u64* barrier, int at = 0) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to) + at),
        "l"(from), "r"(num_bytes), "r"(shared_address(barrier))
        : "memory");
}

// Starts to bring `num_bytes` into L2; both multiples of 16.
INLINE void prefetch_bulk(const void* from, int num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(num_bytes)
                 : "memory");
}

// Of a block that ends without `wait_for_previous_kernels`. Another one of its launch must wait:
// else the launch may end before those ahead of it, and the next one would not wait for them.
INLINE void leave_without_waiting() {}

INLINE void wait_phase(u64* barrier, int parity) {
    u32 is_done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(is_done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!is_done);
}

// Transposes the 8 x 8 matrix whose row g lanes 4 * g + t hold, columns 2t and 2t+1 in `pair`.
INLINE u32 transpose_8x8(u32 pair) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// The low halves of `a` and `b` as one word, a below; and the high halves.
INLINE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
INLINE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Of words of two bf16, the float of the low one or of the high one, as `selector` says.
INLINE u32 half_selector(bool is_high) { return is_high ? 0x3244u : 0x1044u; }
INLINE float select_half(u32 w, u32 selector) {
    u32 bits;  // not __byte_perm, which masks a selector first
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bits) : "r"(w), "r"(selector));
    return __uint_as_float(bits);
}

// The byte of a word that `selector` says, in the low bytes of both halves, zeros above; and those
// bytes of two words, `a` below, with anything above.
INLINE u32 pair_selector(int byte) { return 0x4040u + 0x0101u * byte; }
INLINE u32 byte_twice(u32 w, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bytes) : "r"(w), "r"(selector));
    return bytes;
}
INLINE u32 two_selector(int byte) { return 0x4400u + 0x1111u * byte; }
INLINE u32 byte_of_two(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

// (w & mask) | bits and (w & mask) ^ bits as one instruction, which the compiler makes two.
INLINE u32 and_or(u32 w, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(w), "r"(mask), "r"(bits));
    return out;
}
INLINE u32 and_xor(u32 w, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(w), "r"(mask), "r"(bits));
    return out;
}

// The upper half of a word, by which a `bytes_of_...` selects, as an addition of zero: it issues each
// cycle, as a shift does not. No nibble of the word is above 7: so no half is infinite or NaN.
INLINE u32 upper_half(u32 w) {
    u32 out;
    asm("{ .reg .b16 low, high; .reg .b32 twice; mov.b32 {low, high}, %1; "
        "mov.b32 twice, {high, high}; add.rn.f16x2 %0, twice, %2; }"
        : "=r"(out)
        : "r"(w), "r"(0x80008000u));
    return out;
}

// Bits of `a` where `mask` has ones, of `b` elsewhere, as one instruction too.
INLINE u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
    return out;
}

// Byte i is the byte of `table` that the i-th lowest nibble of `nibbles`, at most 3, names. Not
// __byte_perm, which masks a selector first.
INLINE u32 bytes_of_nibbles(u32 table, u32 nibbles) {
    u32 bytes;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bytes) : "r"(table), "r"(nibbles));
    return bytes;
}

// Byte `byte` of w, times 256, plus `below`, which is less than 256.
INLINE u32 byte_and_below(u32 w, int byte, u32 below) {
    return __byte_perm(w, below, 0x5504 | byte << 4);
}

// FLOAT_OF_BYTE plus a byte of w: its low bits in the float's. Not __byte_perm, which masks a
// selector first.
#define FLOAT_OF_BYTE 8388608.0f
INLINE u32 byte_selector(int byte) { return 0x7440u | byte; }
INLINE float float_of_byte(u32 w, u32 selector) {
    u32 bits;
    asm("prmt.b32 %0, %1, 0x4b000000, %2;" : "=r"(bits) : "r"(w), "r"(selector));
    return __uint_as_float(bits);
}

// Two floats rounded to half precision, `low` in the low half; and `mma` of such numbers.
INLINE u32 pack_half(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

INLINE void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A byte of a word, zeros above it.
INLINE u32 alone_selector(int byte) { return 0x4440u | byte; }
INLINE u32 byte_alone(u32 w, u32 selector) {
    u32 byte;  // not __byte_perm, which masks a selector first
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(byte) : "r"(w), "r"(selector));
    return byte;
}

// Byte i is byte n of the eight of `low` and `high`, n the i-th lowest nibble; where n is 8 or more,
// the sign of byte n - 8, all ones or zeros.
INLINE u32 bytes_of_table(u32 low, u32 high, u32 nibbles) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(nibbles));
    return bytes;
}

// D (16 x 8) += A (16 x 32) * B (32 x 8), signed bytes into int32. Lane = 4 * g + t holds of
//   A: a0 = row g, k 4t to 4t+3;  a1 = row g+8, same k;  a2, a3 = the same rows, k + 16
//   B: b0 = k 4t to 4t+3 of column g;  b1 = k + 16
//   D: as `mma`
INLINE void mma_bytes(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

INLINE u32 add_bf16x2(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// Subnormal operands count at their value.
INLINE u32 multiply_bf16x2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

INLINE u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// 2 ** v to 2 ulp; 0 for -infinity.
INLINE float power_of_two(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

// The logarithm of v to base 2, to 2^-22; -infinity for 0.
INLINE float logarithm_of_two(float v) {
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(v));
    return logarithm;
}

// The larger one; a NaN loses.
INLINE float larger(float a, float b) { return fmaxf(a, b); }

INLINE int shuffle_from(int v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

// Number of arrivals before this one; whoever reads it after sees what they wrote before.
INLINE int count_arrival(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

// Past L1, as those of device.cuh.
INLINE i64 load_from_l2(const i64* at) {
    i64 v;
    asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

// Two or four numbers, each its own flag as in device.cuh.
INLINE void publish(float* to, const float (&v)[2]) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v[0]), "f"(v[1])
                 : "memory");
}

INLINE void publish(float* to, const float (&v)[4]) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]),
                 "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

// Before what was not there yet is polled once more.
INLINE void poll_again() {}

// What other blocks of this launch write, or have written.
INLINE void poll(float (&v)[2], const float* at) {
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v[0]), "=f"(v[1])
                 : "l"(at)
                 : "memory");
}

INLINE void poll(float (&v)[4], const float* at) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "l"(at)
                 : "memory");
}

#endif
