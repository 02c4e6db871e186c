// gpu/ceilings.cu: the read bandwidth and the multiply rate of a GPU.
#include "model/device.h"
#include "qwen3.cu"
#include <algorithm>

__global__ void noise_kernel(uint32_t* p, size_t n) { // (operand values set the power, and the power the clock)
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride)
        p[i] = philox(1, i, 0).v[0] & 0xbfffbfff;
}
// All blocks stride through n of 16 bytes.
__global__ void read_kernel(const uint4* p, size_t n, uint32_t* out) {
    uint32_t sum = 0;
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
        for (int k = 0; k < 4; k++) v[k] = load_stream(p + i + k * stride);
        for (int k = 0; k < 4; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 12345) *out = sum;
}
// Eight independent chains of mma a warp.
__global__ void mma_kernel(const uint32_t* in, float* out, int rounds) {
    float d[8][4] = {};
    uint32_t a[4], b[8][2];
    for (int i = 0; i < 4; i++) a[i] = in[threadIdx.x * 20 + i];
    for (int j = 0; j < 8; j++) b[j][0] = in[threadIdx.x * 20 + 4 + j], b[j][1] = in[threadIdx.x * 20 + 12 + j];
    for (int r = 0; r < rounds; r++)
        for (int j = 0; j < 8; j++) mma(d[j], a[0], a[1], a[2], a[3], b[j][0], b[j][1]);
    float sum = 0;
    for (int j = 0; j < 8; j++) sum += d[j][0] + d[j][1] + d[j][2] + d[j][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
// The best of some launches of f, in seconds.
template <class F> static double time_launch(const Context& ctx, F f) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    float ms, best = 1e30f;
    for (int i = 0; i < 6; i++) {
        CUDA_CHECK(cudaEventRecord(start, ctx.gpu->stream));
        f();
        CUDA_CHECK(cudaEventRecord(stop, ctx.gpu->stream));
        CUDA_CHECK(cudaEventSynchronize(stop));
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        best = std::min(best, ms);
    }
    cudaEventDestroy(start), cudaEventDestroy(stop);
    return best / 1e3;
}
double gpu_multiply_ceiling(const Context& ctx) {
    constexpr int ROUNDS = 20000, WARPS = 8, NOISE = WARPS * 32 * 20;
    const int blocks = ctx.gpu->sms * 2;
    uint32_t* data;
    CUDA_CHECK(cudaMalloc(&data, (NOISE + (size_t)blocks * WARPS * 32) * 4));
    noise_kernel<<<32, 256, 0, ctx.gpu->stream>>>(data, NOISE);
    const double took = time_launch(ctx, [&] {
        mma_kernel<<<blocks, WARPS * 32, 0, ctx.gpu->stream>>>(data, (float*)data + NOISE, ROUNDS);
    });
    CUDA_CHECK(cudaGetLastError());
    cudaFree(data);
    return 2. * 16 * 8 * 16 * 8 * ROUNDS * WARPS * blocks / took;
}
double gpu_read_ceiling(const Context& ctx) {
    size_t free = 0, all = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &all));
    const size_t bytes = std::min((size_t)2 << 30, free / 2 / 4096 * 4096);
    uint32_t* data;
    CUDA_CHECK(cudaMalloc(&data, bytes));
    noise_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(data, bytes / 4);
    double rate = 0;
    for (int blocks : {4, 8, 16}) {
        const double took = time_launch(ctx, [&] {
            read_kernel<<<ctx.gpu->sms * blocks, 256, 0, ctx.gpu->stream>>>((uint4*)data, bytes / 16, data);
        });
        rate = std::max(rate, (double)bytes / took);
    }
    CUDA_CHECK(cudaGetLastError());
    cudaFree(data);
    return rate;
}
