// ceilings.h: what this machine could do, measured by loops that do nothing else: reading memory, and multiplying out of
// registers. A figure of ours is then a share of one of them. Include it after qwen3.cu.
#pragma once

// Bytes a second that all threads read from memory: the best of five passes over 2 GB.
inline double read_ceiling() {
    Arena arena;
    arena.take<uint64_t>((size_t)1 << 28);
    arena.allocate("the bandwidth test");
    const size_t n = (size_t)1 << 28;
    uint64_t *data = arena.take<uint64_t>(n), sum = 0;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) data[i] = i;
    double best = 1e9;
    for (int pass = 0; pass < 5; pass++) {
        const double start = seconds();
        #pragma omp parallel for schedule(static) reduction(+ : sum)
        for (size_t i = 0; i < n; i++) sum += data[i];
        best = std::min(best, seconds() - start);
    }
    if (sum == 1) fprintf(stderr, " "); // the sum is used: no compiler drops the loop
    return (double)(n * 8) / best;
}

// A burst of multiply-adds on registers alone; returns how many flops it was. Sums enough to hide the latency of
// one, few enough for the registers.
inline double multiply_plain(float16v* memory) {
    float16v a = memory[14], b = memory[15], s0 = memory[0], s1 = memory[1];
    for (int k = 0; k < 4000; k++) s0 = s0 * a + b, s1 = s1 * a + b;
    memory[0] = s0, memory[1] = s1;
    return 2. * LANES * 2 * 4000;
}
#ifdef HAVE_SIMD
TARGET_AVX2 inline double multiply_avx2(float16v* memory) {
    __m256 a = _mm256_set1_ps(1), s[10];
    for (int i = 0; i < 10; i++) s[i] = a;
    for (int k = 0; k < 4000; k++)
        for (int i = 0; i < 10; i++) s[i] = _mm256_fmadd_ps(a, a, s[i]);
    for (int i = 0; i < 10; i++) memcpy(memory + i, s + i, 32);
    return 2. * 8 * 10 * 4000;
}
TARGET_AVX512 inline double multiply_avx512(float16v* memory) {
    __m512 a = _mm512_set1_ps(1), s[12];
    for (int i = 0; i < 12; i++) s[i] = a;
    for (int k = 0; k < 4000; k++)
        for (int i = 0; i < 12; i++) s[i] = _mm512_fmadd_ps(a, a, s[i]);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 16 * 12 * 4000;
}
TARGET_AVX512_BF16 inline double multiply_bf16(float16v* memory) {
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 s[12];
    for (int i = 0; i < 12; i++) s[i] = _mm512_set1_ps(1);
    for (int k = 0; k < 4000; k++)
        for (int i = 0; i < 12; i++) s[i] = _mm512_dpbf16_ps(s[i], a, a);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 32 * 12 * 4000;
}
// vpdpbusd for INT8 weights: three of them, one a plane of x, are one multiplication each of 64 pairs.
TARGET_AVX512_BF16 inline double multiply_vnni(float16v* memory) {
    __m512i a = _mm512_set1_epi8(1), s[12];
    for (int i = 0; i < 12; i++) s[i] = a;
    for (int k = 0; k < 4000; k++)
        for (int i = 0; i < 12; i++) s[i] = _mm512_dpbusd_epi32(s[i], a, a);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 64 / 3 * 12 * 4000;
}
TARGET_AMX inline double multiply_amx(float16v* memory) {
    amx_configure(64);
    _tile_loadd(4, memory, 64);
    _tile_loadd(5, memory, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < 500; k++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, memory, 64);
    _tile_release();
    return 2. * 16 * 16 * 32 * 4 * 500;
}
// tdpbssd takes the same time, and is twice as deep; but three planes of x want one each.
TARGET_AMX inline double multiply_amx_int8(float16v* memory) { return multiply_amx(memory) * 2 / 3; }
#endif

// Flops a second that all threads reach, for `time` seconds, on the road that products of T take (or of INT8 and T).
template <class T> double cpu_multiply_ceiling(bool int8, double time) {
    [[maybe_unused]] const bool narrow = std::is_same_v<T, bf16>;
    auto multiply = multiply_plain;
#ifdef HAVE_SIMD
    if (instruction_set >= ISA_AVX2) multiply = multiply_avx2;
    if (instruction_set >= ISA_AVX512) multiply = multiply_avx512;
    if (narrow && instruction_set >= ISA_AVX512_BF16) multiply = int8 ? multiply_vnni : multiply_bf16;
    if (narrow && instruction_set >= ISA_AMX) multiply = int8 ? multiply_amx_int8 : multiply_amx;
#endif
    double rate = 0;
    #pragma omp parallel reduction(+ : rate)
    {
        float16v memory[16];
        for (auto& v : memory) v = float16v{} + 1;
        double flops = 0, took = 0; // each thread's own: they take their time to start
        for (const double start = seconds(); took < time; took = seconds() - start) flops += multiply(memory);
        rate += flops / took;
    }
    return rate;
}

#ifdef __CUDACC__
__global__ void noise_kernel(uint32_t* p, size_t n) { // (what is multiplied sets the power, and the power the clock)
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = philox(1, i, 0).v[0] & 0xbfffbfff;
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
    const double took = time_launch(ctx, [&] { mma_kernel<<<blocks, WARPS * 32, 0, ctx.gpu->stream>>>(data, (float*)data + NOISE, ROUNDS); });
    CUDA_CHECK(cudaGetLastError());
    cudaFree(data);
    return 2. * 16 * 8 * 16 * 8 * ROUNDS * WARPS * blocks / took;
}
#endif

// Flops a second: on the CPU's road for products of T, measured for `time` seconds; on a GPU by mma.sync, the road of every
// one from sm_80 on, in some milliseconds.
template <class T> double multiply_ceiling([[maybe_unused]] const Context& ctx, bool int8, double time) {
#ifdef __CUDACC__
    if (ctx.gpu) return gpu_multiply_ceiling(ctx);
#endif
    return cpu_multiply_ceiling<T>(int8, time);
}

struct Ceilings { double read, multiply; }; // bytes, flops a second

// (On a GPU it reads 2 GB, less if there is less.)
template <class T> Ceilings measure_ceilings([[maybe_unused]] const Context& ctx, bool int8) {
#ifdef __CUDACC__
    if (ctx.gpu) {
        size_t free = 0, all = 0;
        CUDA_CHECK(cudaMemGetInfo(&free, &all));
        const size_t bytes = std::min((size_t)2 << 30, free / 2 / 4096 * 4096);
        uint32_t* data;
        CUDA_CHECK(cudaMalloc(&data, bytes));
        noise_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(data, bytes / 4);
        Ceilings c = {};
        for (int blocks : {4, 8, 16})
            c.read = std::max(c.read, (double)bytes / time_launch(ctx, [&] { read_kernel<<<ctx.gpu->sms * blocks, 256, 0, ctx.gpu->stream>>>((uint4*)data, bytes / 16, data); }));
        CUDA_CHECK(cudaGetLastError());
        cudaFree(data);
        c.multiply = gpu_multiply_ceiling(ctx);
        return c;
    }
#endif
    return {read_ceiling(), cpu_multiply_ceiling<T>(int8, 0.3)};
}
