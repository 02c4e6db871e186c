// gpu/attention/parts.h: attention over some of the keys of a row, and such parts as one.
#pragma once
#include "qwen3.cu"

// A row's attention over some of its keys, one number of it: the largest score, the sum of the weights 2^(score - top)
// and the sum of the values by them.
struct AttentionPart {
    float top, weights, value;
};
// `count` parts as one: their common maximum, then their sums in order. get(i) is part i; eight are read at a time.
template <class Get> __device__ __forceinline__ AttentionPart join_parts(int count, Get get) {
    AttentionPart all = {-INFINITY, 0, 0};
    for (int first = 0; first < count; first += 8) {
        AttentionPart part[8];
        float top = all.top;
        GPU_UNROLL
        for (int i = 0; i < 8; i++) part[i] = get(min(first + i, count - 1));
        GPU_UNROLL
        for (int i = 0; i < 8; i++) top = fmaxf(top, part[i].top);
        if (first) {
            const float shrink = exp2_fast(all.top - top);
            all.value *= shrink, all.weights *= shrink;
        }
        all.top = top;
        GPU_UNROLL
        for (int i = 0; i < 8; i++)
            if (first + i < count) {
                const float shrink = exp2_fast(part[i].top - top);
                all.value += part[i].value * shrink, all.weights += part[i].weights * shrink;
            }
    }
    return all;
}
// Number d of a row whose keys were split. `parts` (splits, D + 2): D weighted sums of values, the largest score (of
// powers of 2), the sum of the weights. From the L2 cache: other blocks wrote them.
__device__ __forceinline__ float join_splits(const float* parts, int splits, int D, int d) {
    const AttentionPart all = join_parts(splits, [&](int split) {
        const float* part = parts + split * (D + 2);
        return AttentionPart{__ldcg(part + D), __ldcg(part + D + 1), __ldcg(part + d)};
    });
    return all.value / all.weights;
}
