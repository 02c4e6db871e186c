// train/adamw8.cu: adamw8 (model/moments.h) on a GPU.
#if defined(QWEN3_GPU) || defined(QWEN3_EMULATED)
#include "model/moments.h"

// A block of 256 threads a block of moments, then every 4,096th; a thread a number. Bound by memory bandwidth: 18
// bytes a number, and the search of two codes in shared memory.
__global__ void __launch_bounds__(MOMENT_BLOCK)
adamw8_kernel(bf16* stored, float* p, Moments8 to, const float* g, const double* norm, size_t n, size_t decayed,
              AdamWStep<float> a) {
    __shared__ float code_m[256], code_root[256], of_warp[2][MOMENT_BLOCK / 32];
    const int t = (int)threadIdx.x;
    code_m[t] = moment_code(t, true), code_root[t] = moment_code(t, false);
    let_next_start();
    wait_for_previous();
    __syncthreads();
    const double length = *norm;
    if (!(length < INFINITY)) return;
    const float clip = (float)(a.clip > 0 ? fmin(1., a.clip / (length + 1e-6)) : 1.);
    for (size_t b = blockIdx.x; b * MOMENT_BLOCK < n; b += gridDim.x) {
        const size_t i = b * MOMENT_BLOCK + t;
        float m = 0, root = 0;
        if (i < n) {
            const float gi = g[i] * clip, was_m = code_m[to.m[i]] * to.scale_m[b];
            const float was_root = code_root[to.root[i]] * to.scale_root[b];
            m = was_m + (gi - was_m) * (1 - a.beta1);
            root = sqrtf(was_root * was_root * a.beta2 + gi * gi * (1 - a.beta2));
            p[i] = p[i] * (i < decayed ? a.keep : 1) - a.pace * (m / (root / a.root + a.eps));
            stored[i] = round_bf16(p[i] * a.copy);
        }
        float top_m = warp_max(fabsf(m)), top_root = warp_max(root);
        if (t % 32 == 0) of_warp[0][t / 32] = top_m, of_warp[1][t / 32] = top_root;
        __syncthreads(); // all have read the block's scales, too
        for (int w = 0; w < MOMENT_BLOCK / 32; w++)
            top_m = fmaxf(top_m, of_warp[0][w]), top_root = fmaxf(top_root, of_warp[1][w]);
        if (t == 0) to.scale_m[b] = top_m, to.scale_root[b] = top_root;
        if (i < n) {
            to.m[i] = (uint8_t)nearest_code(code_m, top_m > 0 ? m / top_m : 0);
            to.root[i] = (uint8_t)nearest_code(code_root, top_root > 0 ? root / top_root : 0);
        }
        __syncthreads(); // of_warp is free
    }
}

#ifdef __CUDACC__
void adamw8_gpu(Context& ctx, bf16* stored, float* p, const Moments8& to, const float* g, const double* norm, size_t n,
                size_t decayed, const AdamW& a) {
    const size_t blocks = std::min<size_t>((n + MOMENT_BLOCK - 1) / MOMENT_BLOCK, 4096);
    const AdamWStep<float> s(a);
    launch(ctx, adamw8_kernel, (unsigned)blocks, MOMENT_BLOCK, 0, stored, p, to, g, norm, n, decayed, s);
}
#endif
#endif
