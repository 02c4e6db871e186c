// model/ceilings.h: the read bandwidth and the multiply rate of this machine, and the bytes that a step reads.
#pragma once
#include "cpu/ceilings.h"
#include "model/session.h"
#include "model/weights.h"

#ifdef __CUDACC__
__global__ void noise_kernel(uint32_t* p, size_t n) { // (what is multiplied sets the power, and the power the clock)
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
template <class F> double time_launch(const Context& ctx, F f) {
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
inline double gpu_multiply_ceiling(const Context& ctx) {
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
#endif

// Flops a second: on a CPU as above, in `time` seconds; on a GPU by mma.sync, which every GPU from sm_80 on has, in
// some milliseconds.
template <class T> double multiply_ceiling([[maybe_unused]] const Context& ctx, bool int8, double time) {
#ifdef __CUDACC__
    if (ctx.gpu) return gpu_multiply_ceiling(ctx);
#endif
    return cpu_multiply_ceiling<T>(int8, time);
}

struct Ceilings { double read, multiply; }; // bytes, flops a second

// Of the GPU, which reads 2 GB, less if there is less; else of the CPU, whose memory was tested before.
template <class T>
Ceilings measure_ceilings([[maybe_unused]] const Context& ctx, bool int8, const ReadTest* memory = nullptr) {
#ifdef __CUDACC__
    if (ctx.gpu) {
        size_t free = 0, all = 0;
        CUDA_CHECK(cudaMemGetInfo(&free, &all));
        const size_t bytes = std::min((size_t)2 << 30, free / 2 / 4096 * 4096);
        uint32_t* data;
        CUDA_CHECK(cudaMalloc(&data, bytes));
        noise_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(data, bytes / 4);
        Ceilings c = {};
        for (int blocks : {4, 8, 16}) {
            const double took = time_launch(ctx, [&] {
                read_kernel<<<ctx.gpu->sms * blocks, 256, 0, ctx.gpu->stream>>>((uint4*)data, bytes / 16, data);
            });
            c.read = std::max(c.read, (double)bytes / took);
        }
        CUDA_CHECK(cudaGetLastError());
        cudaFree(data);
        c.multiply = gpu_multiply_ceiling(ctx);
        return c;
    }
#endif
    return {memory->ceiling, cpu_multiply_ceiling<T>(int8, 0.3)};
}

// The first n tokens in a session's KV cache: block_bytes(n) from the start of each of 2 L blocks, in whole pages of a
// layer's keys, then of its values. With `ids` this is all there is to save and restore. f may read and write.
template <class T> size_t block_bytes(const Session<T>& s, size_t n) {
    return (n + PAGE - 1) / PAGE * s.config.K * KVCache<T>::block_bytes(s.config, s.cache.fp8);
}
template <class T, class F> void each_block(Session<T>& s, size_t n, F f) {
    std::vector<T> copy(s.ctx.gpu ? block_bytes(s, n) / sizeof(T) : 0);
    T* const both[] = {s.cache.keys, s.cache.values}; // (nvcc cannot walk a braced list here)
    for (T* all : both)
        for (int l = 0; l < s.config.L; l++) {
            T* block = all + l * s.cache.layer_size;
            if (!s.ctx.gpu) { // host memory itself
                f(block);
                continue;
            }
            copy_out(s.ctx, copy.data(), block, copy.size());
            f(copy.data());
            copy_in(s.ctx, block, copy.data(), copy.size());
        }
}

// Bytes of a product's weights, and of all that one token's step reads.
template <class T> size_t weight_bytes(const Linear<T>& W) {
    if (W.format == Format::PLAIN) return (size_t)W.out() * W.in * sizeof(T);
    const size_t scale = W.format == Format::FP8 ? 4 : W.zero[0] ? 3 : 2, each = (size_t)W.group_rows;
    return (size_t)W.out() * W.row_bytes() + ((size_t)W.out() + each - 1) / each * (size_t)W.groups() * scale;
}
template <class T> size_t step_bytes(const Weights<T>& w) {
    size_t n = weight_bytes(w.head);
    for (auto& l : w.layers)
        for (const Linear<T>* W : {&l.qkv, &l.o, &l.gate_up, &l.down}) n += weight_bytes(*W);
    return n;
}
