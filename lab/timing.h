// timing.h: the time of a GPU's work, and the GPU's ceilings. lab/ and tests/bench/bench_gpu.cu share it.
//
// Work is timed as replays of a CUDA graph: a launch then costs about what it costs in a program that uses graphs,
// without the host's overhead. The L2 cache is not cleared: to measure it cold, use arrays that do not fit.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <functional>
#include <vector>

namespace lab {
inline void gpu_check(cudaError_t e, const char* call) {
    if (e != cudaSuccess) fprintf(stderr, "%.60s: %s\n", call, cudaGetErrorString(e)), exit(1);
}
#define GPU_CHECK(call) lab::gpu_check((call), #call)

// Seconds from event to event around f: the median of ten.
inline double time_events(cudaStream_t stream, const std::function<void()>& f) {
    cudaEvent_t start, stop;
    GPU_CHECK(cudaEventCreate(&start));
    GPU_CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < 12; i++) {
        GPU_CHECK(cudaEventRecord(start, stream));
        f();
        GPU_CHECK(cudaEventRecord(stop, stream));
        GPU_CHECK(cudaEventSynchronize(stop));
        float ms;
        GPU_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 2) times.push_back(ms);
    }
    cudaEventDestroy(start), cudaEventDestroy(stop);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] / 1e3;
}
// Seconds of one call of f, of replays of a graph of `calls` calls f(0), f(1), ...
inline double time_graph(cudaStream_t stream, int calls, const std::function<void(int)>& f) {
    for (int i = 0; i < std::min(calls, 2); i++) f(i);
    GPU_CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t recorded;
    cudaGraphExec_t graph;
    GPU_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; i++) f(i);
    GPU_CHECK(cudaStreamEndCapture(stream, &recorded));
    GPU_CHECK(cudaGraphInstantiate(&graph, recorded, 0));
    cudaGraphDestroy(recorded);
    const double seconds = time_events(stream, [&] { GPU_CHECK(cudaGraphLaunch(graph, stream)); });
    cudaGraphExecDestroy(graph);
    return seconds / calls;
}

// ---- Ceilings: what the simplest kernels reach that only read, only copy, or only multiply.
struct Ceilings {
    double read, copy; // bytes a second; a copied byte counts twice, read and written
    double fma, mma;   // flops a second: float32 on the CUDA cores; bf16 by mma.sync, operands in registers
};

// (What is multiplied sets the power, and the power the clock: noise, not zeros. No exponent is all ones.)
__global__ void noise_kernel(uint32_t* p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u + 12345;
        x = (x ^ x >> 16) * 0x7feb352d, x = (x ^ x >> 15) * 0x846ca68b;
        p[i] = (x ^ x >> 16) & 0xbfffbfff;
    }
}
__global__ void read_ceiling_kernel(const uint4* p, size_t n, uint32_t* out) { // blocks stride through n of 16 bytes
    uint32_t sum = 0;
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
        for (int k = 0; k < 4; k++) v[k] = __ldcs(p + i + k * stride);
        for (int k = 0; k < 4; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 12345) *out = sum; // (or the compiler would leave out the loads)
}
__global__ void copy_ceiling_kernel(const uint4* from, uint4* to, size_t n) {
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
        for (int k = 0; k < 4; k++) v[k] = __ldcs(from + i + k * stride);
        for (int k = 0; k < 4; k++) __stcs(to + i + k * stride, v[k]);
    }
}
__global__ void fma_ceiling_kernel(const float* in, float* out, int rounds) { // eight independent chains a thread
    float d[8] = {};
    const float a = in[threadIdx.x], b = in[threadIdx.x + blockDim.x];
    for (int r = 0; r < rounds; r++)
        for (int j = 0; j < 8; j++) d[j] = d[j] * a + b;
    out[blockIdx.x * blockDim.x + threadIdx.x] = d[0] + d[1] + d[2] + d[3] + d[4] + d[5] + d[6] + d[7];
}
__global__ void mma_ceiling_kernel(const uint32_t* in, float* out, int rounds) { // eight independent chains a warp
    float d[8][4] = {};
    uint32_t a[4], b[8][2];
    for (int i = 0; i < 4; i++) a[i] = in[threadIdx.x * 20 + i];
    for (int j = 0; j < 8; j++) b[j][0] = in[threadIdx.x * 20 + 4 + j], b[j][1] = in[threadIdx.x * 20 + 12 + j];
    for (int r = 0; r < rounds; r++)
        for (int j = 0; j < 8; j++)
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[j][0]), "r"(b[j][1]));
    float sum = 0;
    for (int j = 0; j < 8; j++) sum += d[j][0] + d[j][1] + d[j][2] + d[j][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Takes 1 GB of the GPU's memory for a moment, or a quarter of what is free.
inline Ceilings measure_gpu(cudaStream_t stream) {
    int sms = 0;
    size_t free = 0, all = 0;
    GPU_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    GPU_CHECK(cudaMemGetInfo(&free, &all));
    const size_t bytes = std::min((size_t)1 << 30, free / 4 / 4096 * 4096), n = bytes / 16;
    char* data;
    GPU_CHECK(cudaMalloc(&data, bytes));
    noise_kernel<<<1024, 256, 0, stream>>>((uint32_t*)data, bytes / 4);
    Ceilings c = {};
    uint4 *first = (uint4*)data, *second = first + n / 2;
    for (int blocks : {4, 8, 16}) {
        const double read = time_graph(stream, 1, [&](int) {
            read_ceiling_kernel<<<sms * blocks, 256, 0, stream>>>(first, n, (uint32_t*)data);
        });
        const double copy = time_graph(stream, 1, [&](int) {
            copy_ceiling_kernel<<<sms * blocks, 256, 0, stream>>>(first, second, n / 2);
        });
        c.read = std::max(c.read, (double)bytes / read), c.copy = std::max(c.copy, (double)bytes / copy);
    }
    constexpr int ROUNDS = 20000;
    const int blocks = 4 * sms, threads = 256;
    float* out = (float*)second; // (its first half holds noise still)
    const double fma = time_graph(stream, 1, [&](int) {
        fma_ceiling_kernel<<<blocks, threads, 0, stream>>>((float*)data, out, ROUNDS);
    });
    const double mma = time_graph(stream, 1, [&](int) {
        mma_ceiling_kernel<<<blocks, threads, 0, stream>>>((uint32_t*)data, out, ROUNDS);
    });
    GPU_CHECK(cudaGetLastError());
    cudaFree(data);
    c.fma = 2. * 8 * ROUNDS * threads * blocks / fma;
    c.mma = 2. * 16 * 8 * 16 * 8 * ROUNDS * (threads / 32) * blocks / mma;
    return c;
}
} // namespace lab
