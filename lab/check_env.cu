// check_env.cu: `make check-env` on a machine just rented: driver, toolkit, compiler, GPU, clock, bandwidth and
// multiply rate beside the card's data sheet, and the usual cause of each gap. Ends with 1 if there is a gap.
#include <cstdio>
#ifndef __CUDACC__
int main() {
    printf("GPU       not looked at: this was built without nvcc. With the CUDA toolkit (nvcc in PATH)\n"
           "          `make check-env` tests the GPU, too. Without a GPU everything here runs on the CPU\n");
    return 1;
}
#else
#include "lab/timing.h"
#include <cstring>
#include <string>

// The makers' data sheets: GB/s, TFLOP/s of float32, and of bf16 on the tensor cores with float32 sums, without
// sparsity.
struct Card {
    const char* name; // a part of what the driver calls it
    double read, fma, mma;
};
static const Card CARDS[] = {{"H200", 4800, 67, 989},       {"H100 PCIe", 2039, 51, 756}, {"H100 NVL", 3900, 60, 835},
                             {"H100", 3350, 67, 989},       {"A100-PCIE-40GB", 1555, 19.5, 312},
                             {"A100-SXM4-40GB", 1555, 19.5, 312},                         {"A100", 2039, 19.5, 312},
                             {"RTX 5090", 1792, 104.8, 209.5}, {"RTX 4090", 1008, 82.6, 165.2},
                             {"RTX 3090", 936, 35.6, 71},   {"L40S", 864, 91.6, 362},     {"A10", 600, 31.2, 125}};

// The clock while all multiprocessors multiply: cycles over nanoseconds.
__global__ void clock_kernel(const float* in, float* out, long long* cycles, long long* nanoseconds) {
    long long began, ended;
    float x = in[threadIdx.x];
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    const long long first = clock64();
    for (int i = 0; i < 20000000; i++) x = x * 0.999f + 0.001f;
    const long long last = clock64();
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ended));
    out[blockIdx.x * blockDim.x + threadIdx.x] = x;
    if (blockIdx.x == 0 && threadIdx.x == 0) *cycles = last - first, *nanoseconds = ended - began;
}
static double clock_under_load(int sms) { // Hz
    char* p;
    const size_t room = 16 + 1024 + (size_t)sms * 4 * 256 * 4;
    GPU_CHECK(cudaMalloc(&p, room));
    GPU_CHECK(cudaMemset(p, 0, room));
    clock_kernel<<<sms * 4, 256>>>((float*)(p + 16), (float*)(p + 16 + 1024), (long long*)p, (long long*)(p + 8));
    long long said[2];
    GPU_CHECK(cudaMemcpy(said, p, 16, cudaMemcpyDeviceToHost));
    cudaFree(p);
    return (double)said[0] / (double)said[1] * 1e9;
}
static int attribute(cudaDeviceAttr a) {
    int v = 0;
    GPU_CHECK(cudaDeviceGetAttribute(&v, a, 0));
    return v;
}

int main() {
    int driver = 0, runtime = 0, count = 0;
    cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
    printf("toolkit   CUDA %d.%d, built by nvcc %d.%d\n", runtime / 1000, runtime % 100 / 10, __CUDACC_VER_MAJOR__,
           __CUDACC_VER_MINOR__);
    if (!driver)
        return printf("driver    none: this machine has no NVIDIA driver, or the container was started without its\n"
                      "          GPUs (docker run --gpus all). Programs run on the CPU\n"), 1;
    printf("driver    takes programs up to CUDA %d.%d\n", driver / 1000, driver % 100 / 10);
    if (driver / 1000 < runtime / 1000)
        printf("          GAP: older than the toolkit. Programs may not start: a newer driver, or toolkit %d\n",
               driver / 1000);
    if (const cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess || !count)
        return printf("GPU       none can be used: %s\n"
                      "          nvidia-smi says whether the driver sees one; CUDA_VISIBLE_DEVICES may hide it\n",
                      cudaGetErrorString(e)), 1;
    cudaDeviceProp gpu;
    GPU_CHECK(cudaGetDeviceProperties(&gpu, 0));
    size_t free = 0, all = 0;
    GPU_CHECK(cudaMemGetInfo(&free, &all));
    printf("GPU       %s, sm_%d%d, %d multiprocessors, %.1f GB (%.1f free), L2 cache %.0f MB%s\n", gpu.name, gpu.major,
           gpu.minor, gpu.multiProcessorCount, (double)all / 1e9, (double)free / 1e9, gpu.l2CacheSize / 1e6,
           count > 1 ? "; the first of several" : "");
    if (gpu.major < 8) return printf("          GAP: this project needs sm_80 or later\n"), 1;
    bool gap = driver / 1000 < runtime / 1000;
    if ((double)free < 0.9 * (double)all)
        printf("          GAP: %.1f GB are taken: another process uses this GPU (nvidia-smi), and timings will vary\n",
               (double)(all - free) / 1e9), gap = true;

    const double most = attribute(cudaDevAttrClockRate) * 1e3, clock = clock_under_load(gpu.multiProcessorCount);
    printf("clock     %.0f MHz under load, %.0f at most\n", clock / 1e6, most / 1e6);
    if (clock < 0.8 * most)
        printf("          GAP: a limit of power or temperature, or a locked clock: nvidia-smi -q -d "
               "PERFORMANCE,POWER,CLOCK\n"), gap = true;

    cudaStream_t stream; // (graphs are not recorded on the default one)
    GPU_CHECK(cudaStreamCreate(&stream));
    const lab::Ceilings c = lab::measure_gpu(stream);
    const Card* card = nullptr;
    for (const Card& k : CARDS)
        if (!card && std::string(gpu.name).find(k.name) != std::string::npos) card = &k;
    // The share of the data sheet that a plain kernel usually reaches. (On Hopper mma.sync reaches about two thirds of
    // wgmma's rate, which the data sheet gives.)
    const auto row = [&](const char* name, double got, double sheet, const char* unit, double usual,
                         const char* meaning) {
        if (!card) return (void)printf("%-9s %.1f %s\n", name, got, unit);
        printf("%-9s %.1f %s, %.0f%% of the data sheet's %.0f\n", name, got, unit, 100 * got / sheet, sheet);
        if (got < usual * sheet)
            printf("          GAP: %.0f%% or more is usual. %s\n", 100 * usual, meaning), gap = true;
    };
    row("read", c.read / 1e9, card ? card->read : 0, "GB/s", 0.85,
        "Another process reads too; a part of a card (MIG, vGPU); a lower memory clock (nvidia-smi -q -d CLOCK)");
    row("copy", c.copy / 1e9, card ? card->read : 0, "GB/s", 0.8, "As with read");
    row("float32", c.fma / 1e12, card ? card->fma : 0, "TFLOP/s", 0.8,
        "A lower clock (above), or fewer multiprocessors than the card has: a part of one (MIG, vGPU)");
    row("bf16", c.mma / 1e12, card ? card->mma : 0, "TFLOP/s", gpu.major == 9 ? 0.55 : 0.8,
        "As with float32; if only this one is low, the power limit: tensor cores draw the most");
    if (!card) printf("          (no data sheet for this card in lab/check_env.cu: compare by hand)\n");
    printf("%s\n", gap ? "There are gaps: see above" : "No gap found");
    return gap;
}
#endif
