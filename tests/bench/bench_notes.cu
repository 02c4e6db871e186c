// Measures what chapters 1 to 8 of the course's notes say of the hardware and of float, with the code that stands
// there:
//   make build/bench_notes && build/bench_notes
#include "tests/gpu/notes.h"

static void empty_launch() { b_saxpy::saxpy<<<1, 32>>>(0, 0, nullptr, nullptr); }

template <class F> static float ms_of(F f, int reps = 20) {
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    f();
    cudaEventRecord(a);
    for (int i = 0; i < reps; i++) f();
    cudaEventRecord(b);
    OK(cudaEventSynchronize(b));
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    OK(cudaGetLastError());
    return ms / reps;
}

__global__ void chase(const unsigned* next, unsigned at, int steps, unsigned* out, long long* cyc) {
    long long t0 = clock64();
    for (int i = 0; i < steps; i++) at = next[at];
    long long t1 = clock64();
    *out = at;
    *cyc = t1 - t0;
}
__global__ void chase_shared(int steps, unsigned* out, long long* cyc) {
    __shared__ unsigned s[1024];
    for (int i = 0; i < 1024; i++) s[i] = (i + 33) & 1023;
    unsigned at = 0;
    long long t0 = clock64();
    for (int i = 0; i < steps; i++) at = s[at];
    long long t1 = clock64();
    *out = at;
    *cyc = t1 - t0;
}
__global__ void fma_chain(float x, int steps, float* out, long long* cyc) {
    long long t0 = clock64();
    for (int i = 0; i < steps; i++) x = x * 0.5f + 1.0f;
    long long t1 = clock64();
    *out = x;
    *cyc = t1 - t0;
}
__global__ void banks(
    int stride, int steps, float* out, long long* cyc) { // one warp; each load's address depends on the one before
    __shared__ int s[32 * 64];
    for (int i = threadIdx.x; i < 32 * 64; i += 32) s[i] = 0;
    __syncthreads();
    int at = threadIdx.x * stride, acc = 0;
    long long t0 = clock64();
    for (int i = 0; i < steps; i++) { acc = s[(at + acc) & 2047]; }
    long long t1 = clock64();
    out[threadIdx.x] = acc;
    if (!threadIdx.x) *cyc = t1 - t0;
}
__global__ void spin(long long cycles) {
    long long t = clock64();
    while (clock64() - t < cycles) {}
}
__global__ void transpose_naive(const float* in, float* out, int R, int C) {
    int x = blockIdx.x * 32 + threadIdx.x;
    for (int y = blockIdx.y * 32 + threadIdx.y; y < blockIdx.y * 32 + 32; y += 8)
        out[(size_t)x * R + y] = in[(size_t)y * C + x];
}
__global__ void transpose_32(const float* in, float* out, int R, int C) {
    __shared__ float t[32][32];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) t[threadIdx.y + j][threadIdx.x] = in[(size_t)(y + j) * C + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x;
    y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) out[(size_t)(y + j) * R + x] = t[threadIdx.x][threadIdx.y + j];
}
__global__ void copy1(const float* in, float* out, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i];
}
__global__ void sum_few_warps(const float4* in, float* out, size_t n4) {
    float s = 0;
    extern __shared__ char unused[];
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n4; i += (size_t)gridDim.x * blockDim.x) {
        float4 v = in[i];
        s += v.x + v.y + v.z + v.w;
    }
    if (s == 1234.5f) out[0] = s;
}
__global__ void sum1(const float* in, float* out, size_t n) {
    float s = 0;
#pragma unroll 1
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        s += in[i];
    if (s == 1234.5f) out[0] = s;
}
__global__ void sum_atomic(const float* in, float* out, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(out, in[i]);
}
__global__ void tree_interleaved(const float* in, float* out, int n) {
    __shared__ float s[256];
    int t = threadIdx.x;
    size_t i = (size_t)blockIdx.x * 512 + t;
    s[t] = (i < n ? in[i] : 0) + (i + 256 < n ? in[i + 256] : 0);
    for (int d = 1; d < 256; d *= 2) {
        __syncthreads();
        if (t % (2 * d) == 0) s[t] += s[t + d];
    }
    if (t == 0) out[blockIdx.x] = s[0];
}
__global__ void hist_global(const unsigned char* x, unsigned* bins, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        atomicAdd(&bins[x[i]], 1u);
}
__global__ void conv_plain(const float* in, const float* f, float* out, int w, int h) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= w || y >= h) return;
    float acc = 0;
    for (int j = 0; j < 5; j++)
        for (int i = 0; i < 5; i++) {
            int u = x + i - 2, v = y + j - 2;
            if (u >= 0 && u < w && v >= 0 && v < h) acc += in[(size_t)v * w + u] * f[j * 5 + i];
        }
    out[(size_t)y * w + x] = acc;
}
__global__ void atomic_order(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(out, in[i]);
}

static double chase_cycles(size_t bytes, int steps, bool warm) {
    size_t n = bytes / 4, line = 32;
    size_t lines = n / line;
    std::vector<unsigned> order(lines), next(n);
    for (size_t i = 0; i < lines; i++) order[i] = (unsigned)i;
    unsigned s = 1;
    for (size_t i = lines - 1; i > 0; i--) {
        s = s * 1664525u + 1013904223u;
        std::swap(order[i], order[(size_t)((unsigned long long)s * (i + 1) >> 32)]);
    }
    for (size_t i = 0; i < lines; i++) next[order[i] * line] = (unsigned)(order[(i + 1) % lines] * line);
    Dev<unsigned> d(next), o(1);
    Dev<long long> c(1);
    if (warm) chase<<<1, 1>>>(d.p, order[0] * line, (int)lines * 2, o.p, c.p);
    chase<<<1, 1>>>(d.p, order[0] * line, steps, o.p, c.p);
    return (double)c.get()[0] / steps;
}
static void numbers() {
    int dev = 0;
    cudaDeviceProp p;
    OK(cudaGetDeviceProperties(&p, dev));
    int clk, mclk;
    cudaDeviceGetAttribute(&clk, cudaDevAttrClockRate, dev);
    cudaDeviceGetAttribute(&mclk, cudaDevAttrMemoryClockRate, dev);
    printf("%s: %d SMs, %d threads/SM, %d regs/SM, %d regs/block, shared %zu/SM %zu/block %zu opt-in, reserved %zu, L2 "
           "%d, bus %d bit, mem %.3f GHz, clock %.3f GHz, const %zu, maxblocks/SM %d, grid %d %d %d block %d %d %d\n",
        p.name, p.multiProcessorCount, p.maxThreadsPerMultiProcessor, p.regsPerMultiprocessor, p.regsPerBlock,
        p.sharedMemPerMultiprocessor, p.sharedMemPerBlock, p.sharedMemPerBlockOptin, p.reservedSharedMemPerBlock,
        p.l2CacheSize, p.memoryBusWidth, mclk / 1e6, clk / 1e6, p.totalConstMem, p.maxBlocksPerMultiProcessor,
        p.maxGridSize[0], p.maxGridSize[1], p.maxGridSize[2], p.maxThreadsDim[0], p.maxThreadsDim[1],
        p.maxThreadsDim[2]);
    {
        Dev<unsigned> o(1);
        Dev<float> f(32);
        Dev<long long> c(1);
        chase_shared<<<1, 1>>>(4096, o.p, c.p);
        chase_shared<<<1, 1>>>(4096, o.p, c.p);
        printf("latency: shared %.1f", c.get()[0] / 4096.0);
        fma_chain<<<1, 32>>>(1, 4096, f.p, c.p);
        fma_chain<<<1, 32>>>(1, 4096, f.p, c.p);
        printf(", fma %.2f", c.get()[0] / 4096.0);
        printf(", L1 (16 KB) %.1f, L2 (4 MB) %.1f, DRAM (1 GB, random) %.1f cycles\n",
            chase_cycles(16 << 10, 4096, true), chase_cycles(4 << 20, 32768, true),
            chase_cycles(1u << 30, 32768, false));
        for (int st : {0, 1, 2, 4, 8, 16, 32, 33}) {
            banks<<<1, 32>>>(st, 4096, f.p, c.p);
            banks<<<1, 32>>>(st, 4096, f.p, c.p);
            printf("bank stride %d: %.1f cycles; ", st, c.get()[0] / 4096.0);
        }
        puts("");
    }
    {
        float a = ms_of(empty_launch, 2000);
        auto t = ms_of(
            [] {
                empty_launch();
                cudaDeviceSynchronize();
            },
            2000);
        printf("empty launch: %.2f us back to back, %.2f us with a synchronise each\n", a * 1e3, t * 1e3);
    }
    size_t N = 64u << 20;
    Dev<float> A(N), B(N);
    for (int st : {1, 2, 4, 8, 16, 32}) {
        int m = (int)(N / 32);
        float t = ms_of([&] { b_read_strided::read_strided<<<m / 256, 256>>>(A.p, B.p, m, st); });
        printf("stride %d: useful read %.0f GB/s, both %.0f, %.4f ms; ", st, m * 4.0 / t / 1e6, m * 8.0 / t / 1e6, t);
    }
    puts("");
    {
        float t = ms_of([&] { copy1<<<N / 256, 256>>>(A.p, B.p, N); }),
              u = ms_of([&] { b_copy_vec4::copy_vec4<<<N / 1024, 256>>>((float4*)A.p, (float4*)B.p, N / 4); });
        printf("copy of 256 MiB: float %.0f, float4 %.0f GB/s; saxpy %.0f\n", N * 8.0 / t / 1e6, N * 8.0 / u / 1e6,
            N * 12.0 / ms_of([&] { b_saxpy::saxpy<<<N / 256, 256>>>((int)N, 2, A.p, B.p); }) / 1e6);
    }
    for (int w : {1, 2, 4, 8, 16, 32, 64}) {
        int per = w < 32 ? w : 32, blocks = p.multiProcessorCount * (w / per);
        float t = ms_of([&] { sum1<<<blocks, per * 32>>>(A.p, B.p, N); }, 5),
              u = ms_of([&] { sum_few_warps<<<blocks, per * 32>>>((const float4*)A.p, B.p, N / 4); }, 5);
        printf("%d warps/SM: 4-byte loads %.0f, 16-byte unrolled %.0f GB/s; ", w, N * 4.0 / t / 1e6, N * 4.0 / u / 1e6);
    }
    puts("");
    {
        int D = 8192;
        auto bw = [&](float t) { return D * (double)D * 8 / t / 1e6; };
        dim3 g(D / 32, D / 32), b(32, 8);
        printf("transpose 8192: naive %.0f, tile[32][32] %.0f, tile[32][33] %.0f GB/s\n",
            bw(ms_of([&] { transpose_naive<<<g, b>>>(A.p, B.p, D, D); })),
            bw(ms_of([&] { transpose_32<<<g, b>>>(A.p, B.p, D, D); })),
            bw(ms_of([&] { b_transpose::transpose<<<g, b>>>(A.p, B.p, D, D); })));
    }
    {
        int D = 4096;
        Dev<float> C((size_t)D * D);
        auto tf = [&](float t) { return 2.0 * D * D * D / t / 1e9; };
        printf("matmul fp32 4096: naive(32x8) %.2f, tiled32 %.2f, coarse %.2f TFLOP/s\n",
            tf(ms_of(
                [&] { b_matmul_naive::matmul_naive<<<dim3(D / 32, D / 8), dim3(32, 8)>>>(A.p, B.p, C.p, D, D, D); },
                3)),
            tf(ms_of(
                [&] {
                    b_matmul_tiled::matmul_tiled<32><<<dim3(D / 32, D / 32), dim3(32, 32)>>>(A.p, B.p, C.p, D, D, D);
                },
                3)),
            tf(ms_of(
                [&] { b_matmul_coarse::matmul_coarse<<<dim3(D / 64, D / 64), dim3(16, 16)>>>(A.p, B.p, C.p, D, D, D); },
                3)));
    }
    {
        int m = 1 << 22;
        printf("two_paths 1000 steps: by warp %.3f ms, by lane %.3f ms\n",
            ms_of([&] { b_busy::two_paths<<<m / 256, 256>>>(A.p, 1000, true); }),
            ms_of([&] { b_busy::two_paths<<<m / 256, 256>>>(A.p, 1000, false); }));
    }
    {
        int s = p.multiProcessorCount;
        OK(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
        for (int b : {1, s, s + 1, 2 * s, 2 * s + 1}) {
            float t = ms_of([&] { spin<<<b, 1024, 200 << 10>>>(1000000); });
            printf("spin of 1M cycles, %d blocks: %.3f ms; ", b, t);
        }
        puts("");
    }
    {
        size_t bytes = 256u << 20;
        void *pin, *page = malloc(bytes);
        memset(page, 1, bytes);
        OK(cudaMallocHost(&pin, bytes));
        memset(pin, 1, bytes);
        float a = ms_of([&] { cudaMemcpy(A.p, page, bytes, cudaMemcpyHostToDevice); }, 5),
              b = ms_of([&] { cudaMemcpy(A.p, pin, bytes, cudaMemcpyHostToDevice); }, 5);
        printf("host to device, 256 MiB: pageable %.1f, pinned %.1f GB/s\n", bytes / a / 1e6, bytes / b / 1e6);
        float* hp = (float*)pin;
        Dev<float> d(bytes / 4);
        for (int q : {1, 2, 4, 8, 16})
            printf(
                "pieces %d: %.2f ms; ", q, ms_of([&] { b_square::square_in_pieces(hp, d.p, (int)(bytes / 4), q); }, 5));
        puts("");
        free(page);
        cudaFreeHost(pin);
    }
    {
        A.zero();
        auto gb = [&](float t) { return N * 4.0 / t / 1e6; };
        printf("sum of 256 MiB: atomics %.1f, interleaved tree %.0f, tree %.0f, warp (grid 8/SM) %.0f GB/s\n",
            gb(ms_of([&] { sum_atomic<<<N / 256, 256>>>(A.p, B.p, N); }, 2)),
            gb(ms_of([&] { tree_interleaved<<<N / 512, 256>>>(A.p, B.p, (int)N); })),
            gb(ms_of([&] { b_reduce_tree::reduce_tree<<<N / 512, 256>>>(A.p, B.p, (int)N); })),
            gb(ms_of([&] { b_warp_sum::reduce_warp<<<p.multiProcessorCount * 8, 256>>>(A.p, B.p, N); })));
    }
    {
        int m = 1 << 26;
        Dev<unsigned> a(m), o(m), t(1);
        Dev<unsigned long long> st(m / 256);
        float x = ms_of(
            [&] {
                t.zero();
                st.zero();
                b_scan_lookback::scan_lookback<<<m / 256, 256>>>(a.p, o.p, m, st.p, t.p);
            },
            3);
        printf("scan_lookback of 2^26: %.3f ms, %.0f GB/s; kogge-stone blocks %.0f GB/s, brent-kung %.0f GB/s\n", x,
            m * 8.0 / x / 1e6,
            m * 8.0 / ms_of([&] { b_scan_kogge_stone::scan_kogge_stone<<<m / 256, 256>>>(A.p, B.p, m); }) / 1e6,
            m * 8.0 / ms_of([&] { b_scan_brent_kung::scan_brent_kung<<<m / 256, 128>>>(A.p, B.p, m); }) / 1e6);
    }
    {
        size_t m = 1u << 28;
        std::vector<unsigned char> v(m);
        unsigned s = 1;
        for (auto& c : v) {
            s = s * 1664525u + 1013904223u;
            c = s >> 24;
        }
        Dev<unsigned char> a(v), z(m);
        Dev<unsigned> b(256);
        int g = p.multiProcessorCount * 8;
        for (auto* q : {a.p, z.p})
            printf("histogram of 2^28 bytes, %s: global atomics %.2f ms, shared %.2f ms; ",
                q == a.p ? "uniform" : "one value", ms_of([&] { hist_global<<<g, 256>>>(q, b.p, m); }, 2),
                ms_of([&] { b_histogram::histogram<<<g, 256>>>(q, b.p, m); }, 2));
        puts("");
    }
    {
        int D = 8192;
        dim3 g(D / 32, D / 8), b(32, 8), g2(D / 32, D / 32), b2(32, 32);
        Dev<float> f(25);
        printf("conv 5x5 of 8192x8192: filter in global %.3f, constant %.3f, tiled %.3f, two 1-D passes %.3f ms\n",
            ms_of([&] { conv_plain<<<g, b>>>(A.p, f.p, B.p, D, D); }),
            ms_of([&] { b_conv2d_const::conv2d_const<<<g, b>>>(A.p, B.p, D, D); }),
            ms_of([&] { b_conv2d_tiled::conv2d_tiled<<<g2, b2>>>(A.p, B.p, D, D); }), ms_of([&] {
                b_conv1d_dir::conv1d_dir<<<g, b>>>(A.p, B.p, f.p, 2, D, D, false);
                b_conv1d_dir::conv1d_dir<<<g, b>>>(B.p, A.p, f.p, 2, D, D, true);
            }));
    }
    {
        std::vector<float> v(1 << 20);
        unsigned s = 1;
        for (auto& x : v) {
            s = s * 1664525u + 1013904223u;
            x = (s >> 8) / 16777216.0f - 0.5f;
        }
        Dev<float> a(v), o(1);
        std::vector<float> seen;
        for (int i = 0; i < 20; i++) {
            o.zero();
            atomic_order<<<4096, 256>>>(a.p, o.p, 1 << 20);
            float r = o.get()[0];
            if (std::find(seen.begin(), seen.end(), r) == seen.end()) seen.push_back(r);
        }
        printf("float atomicAdd of 2^20 numbers, 20 runs: %zu different results\n", seen.size());
    }
}
static void numerics() {
    {
        float s = 0;
        int i = 0;
        while (s + 1.0f != s) {
            s += 1.0f;
            i++;
        }
        printf("float += 1 stops at %.0f\n", s);
    }
    int n = 10000000;
    std::vector<float> v(n, 0.1f);
    float s = 0;
    for (float x : v) s += x;
    double d = 0;
    for (float x : v) d += x;
    printf("10^7 times 0.1f: exact sum %.6f; loop %.6f, pairwise %.6f, Kahan %.6f\n", d, s,
        b_pairwise_sum::pairwise_sum(v.data(), n), b_kahan_sum::kahan_sum(v.data(), n));
    printf("0.1f = %.20f; (1e8f + 1) - 1e8f = %g; (1e20f+(-1e20f))+1 = %g, 1e20f+((-1e20f)+1) = %g\n", (double)0.1f,
        (1e8f + 1) - 1e8f, (1e20f + -1e20f) + 1, 1e20f + (-1e20f + 1.0f));
    __nv_bfloat16 b = __float2bfloat16(0);
    float fb = 0;
    for (int i = 0; i < 1000; i++) { fb = __bfloat162float(__float2bfloat16(fb + 1.0f)); }
    printf("bf16 += 1, 1000 times: %g\n", fb);
    (void)b;
    float fh = 0;
    for (int i = 0; i < 5000; i++) fh = __half2float(__float2half(fh + 1.0f));
    printf("fp16 += 1, 5000 times: %g; half(65519)=%g half(65520)=%g; bf16(3.14159265)=%g fp16 %g\n", fh,
        __half2float(__float2half(65519.0f)), __half2float(__float2half(65520.0f)),
        __bfloat162float(__float2bfloat16(3.14159265f)), __half2float(__float2half(3.14159265f)));
    float a = 1.0f + 0x1p-12f;
    printf("fma(a,a,-1-2^-11) = %g, a*a-(1+2^-11) = %g\n", std::fma(a, a, -(1 + 0x1p-11f)), a * a - (1 + 0x1p-11f));
    printf("expf(88) %g expf(89) %g\n", std::exp(88.0f), std::exp(89.0f));
}
int main() {
    numerics();
    numbers();
    b_work::print_occupancy(96);
    b_work::print_occupancy(1024);
    b_wave_report::wave_report(133, 132, 1);
    printf("time_ms of an empty launch: %.4f ms\n", b_time_ms::time_ms(empty_launch, 100));
}
