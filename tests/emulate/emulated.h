// Definitions on a CPU that headers of Book II use from CUDA and from Book II, for suites that run their kernels by the
// coroutines of tests/emulate/emulate.h. Include it after qwen3.cu.
#pragma once
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#ifdef __clang__
#pragma GCC diagnostic ignored "-Wunneeded-internal-declaration"
#endif
#include "tests/emulate/emulate.h"
#pragma GCC diagnostic pop
#undef check
#undef __device__ // (static there: a member is that already)
#define __device__ [[maybe_unused]]

inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
inline uint32_t pack(float first, float second) { return to_bf16(first).bits | (uint32_t)to_bf16(second).bits << 16; }

static uint32_t fragments[2][MOST_THREADS][6];
static uint8_t fragments_of[MOST_THREADS]; // the next of the two: a writer of one has seen that all have read the other
template <class Half>
void emulated_mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, Half of) {
    auto& all = fragments[fragments_of[running] ^= 1];
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(all[running], mine, sizeof mine);
    __syncwarp();
    const auto* lane = &all[running / 32 * 32];
    const auto half = [&](uint32_t pair, int odd) { return of((uint16_t)(pair >> 16 * odd)); };
    for (int e = 0; e < 4; e++) { // row and column of d[e]; lane 4 r + k / 2 % 4 holds element k of row (column) r
        const int row = lane_of() / 4 + e / 2 * 8, column = lane_of() % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++)
            sum += half(lane[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                   half(lane[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
        d[e] += sum;
    }
}
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    emulated_mma(d, a0, a1, a2, a3, b0, b1, [](uint16_t x) { return to_acc(bf16{x}); });
}
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
