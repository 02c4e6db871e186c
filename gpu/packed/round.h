// gpu/packed/round.h: FP8 activations: how rows become e4m3 (E4M3Rows, model/gpu_ops.h).
#pragma once
#include "qwen3.cu"

#ifdef __CUDACC__ // (an emulation has its own)
__device__ inline uint32_t pack_e4m3(float first, float second) { // the first in the lower byte; see float_to_e4m3
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return float_to_e4m3(first) | (uint32_t)float_to_e4m3(second) << 8;
#endif
}
#endif
// `largest`: the bits of a group's largest number, without sign; from 0x7f80 on it is not finite.
struct GroupRounding {
    float by, factor;
    __device__ explicit GroupRounding(uint32_t largest) {
        const bool finite = largest < 0x7f80;
        const int e = kv_exponent(finite ? low(largest) : 0);
        by = __uint_as_float((uint32_t)(127 - e) << 23);
        factor = finite ? __uint_as_float((uint32_t)(127 + e) << 23) : NAN;
    }
    __device__ uint32_t two(uint32_t pair) const { return pack_e4m3(low(pair) * by, high(pair) * by); }
};
__device__ __forceinline__ uint32_t larger(uint32_t largest, uint32_t pair) {
    return max(largest, max(pair & 0x7fff, pair >> 16 & 0x7fff));
}
template <int LANES> __device__ __forceinline__ uint32_t largest_of(uint32_t largest) { // neighbours, for all of them
    GPU_UNROLL
    for (int other = LANES / 2; other; other /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, other));
    return largest;
}
struct RoundedRow { // token n
    E4M3Rows to;
    int n, C;
    __device__ void operator()(int, int i, uint2 four) const {
        const GroupRounding rounding(largest_of<32>(larger(larger(0, four.x), four.y)));
        if (i >= C) return;
        *(uint32_t*)(to.q + (size_t)n * C + i) = rounding.two(four.x) | rounding.two(four.y) << 16;
        if (threadIdx.x % 32 == 0) to.scale[(size_t)(i / 128) * to.pitch + n] = rounding.factor;
    }
};

void rmsnorm_rounded_gpu(Context& ctx, const E4M3Rows& out, const float* x, const bf16* w, int N, int C, float eps);
