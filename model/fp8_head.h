// model/fp8_head.h: rows of an FP8 cache (KVRow) in kernels.
#ifndef QWEN3_CU
#include "qwen3.cu" // which includes this file where WarpHead is known
#elif !defined(FP8_HEAD_H)
#define FP8_HEAD_H

#ifdef __CUDACC__ // (an emulation has its own)
// a b + c of pairs of bf16, each rounded once. PTX ISA: fma.rn.bf16x2
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif

// Numbers of an FP8 cache (e4m3) as bf16: exponent and fraction, shifted to bf16's fields, are the number times
// 2^-120, subnormals too. Two, each in the upper byte of its half.
__device__ inline uint32_t place_e4m3(uint32_t high) { return (high & 0x80008000) | (high >> 4 & 0x07f007f0); }
// Two of `word`: `bytes` selects theirs, as in __byte_perm. And eight neighbours.
__device__ inline uint32_t widen_e4m3(uint32_t word, uint32_t bytes) {
    return fma_pair(place_e4m3(__byte_perm(word, 0, bytes)), 0x7b807b80, 0x80008000); // 2^120, -0
}
__device__ inline uint4 widen_e4m3(const uint2& v) {
    return {widen_e4m3(v.x, 0x1404), widen_e4m3(v.x, 0x3424), widen_e4m3(v.y, 0x1404), widen_e4m3(v.y, 0x3424)};
}
// A WarpHead, rounded to bf16, as a row of such a cache (Book I's store_kv): numbers, and the byte of their exponent.
template <int D> struct WarpFp8Head {
    static constexpr int P = D / 64;
    uint8_t u[P], v[P], byte;
    __device__ explicit WarpFp8Head(const WarpHead<D>& head) {
        float largest = 0;
        bool finite = true;
        const auto look = [&](float x) {
            x = fabsf(to_acc(round_bf16(x)));
            finite &= x < INFINITY, largest = fmaxf(largest, x);
        };
        for (int p = 0; p < P; p++) look(head.u[p]), look(head.v[p]);
        for (int other = 16; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
        finite = __all_sync(~0u, finite);
        const int e = kv_exponent(finite ? largest : 0);
        const auto round = [&](float x) { return float_to_e4m3(ldexpf(to_acc(round_bf16(x)), -e)); };
        for (int p = 0; p < P; p++) u[p] = round(head.u[p]), v[p] = round(head.v[p]);
        byte = (uint8_t)(finite ? e + 128 : 0);
    }
    __device__ void store(uint8_t* row, uint8_t* exponent) const {
        for (int p = 0; p < P; p++) {
            const int i = threadIdx.x % 32 * P + p;
            row[i] = u[p], row[i + D / 2] = v[p];
        }
        if (threadIdx.x % 32 == 0) *exponent = byte;
    }
    __device__ void store(bf16* cache, int slot, int head, int K) const {
        uint8_t* const rows = (uint8_t*)cache + fp8_rows(slot / PAGE, head, K, D);
        store(rows + slot % PAGE * D, rows + fp8_exponents(head, K, D) + slot % PAGE);
    }
};
// 2^(e - 128); 0 marks a NaN row
__device__ inline float fp8_factor(int e) { return e ? __uint_as_float((uint32_t)(e - 1) << 23) : NAN; }
#endif
