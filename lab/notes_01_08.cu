// Runs every kernel of data/course/notes/01 to 08 against a plain loop, and measures what the notes say of the hardware.
//   python3 data/course/check_notes.py --no-compile --emit build/notes.cuh && nvcc -std=c++17 -O3 -Ibuild -gencode
//   arch=compute_90a,code=sm_90a lab/notes_01_08.cu -o build/notes_01_08 && build/notes_01_08
#include "notes.cuh"
#include <algorithm>
#include <vector>

static int failures = 0;
#define OK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)
static void check(const char* what, bool ok) { printf("%-34s %s\n", what, ok ? "ok" : "WRONG"); failures += !ok; }

template <class T> struct Dev {   // a device array
    T* p; size_t n;
    explicit Dev(size_t n) : n(n) { OK(cudaMalloc(&p, n * sizeof(T))); OK(cudaMemset(p, 0, n * sizeof(T))); }
    explicit Dev(const std::vector<T>& v) : Dev(v.size()) { OK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice)); }
    ~Dev() { cudaFree(p); }
    std::vector<T> get() { std::vector<T> v(n); OK(cudaDeviceSynchronize()); OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost)); return v; }
    void zero() { OK(cudaMemset(p, 0, n * sizeof(T))); }
};
static std::vector<float> noise(size_t n, unsigned seed = 1) {
    std::vector<float> v(n);
    for (auto& x : v) { seed = seed * 1664525u + 1013904223u; x = (int)(seed >> 24) / 64.0f - 2.0f; }   // multiples of 1/64: short sums are exact
    return v;
}
static bool close(const std::vector<float>& a, const std::vector<float>& b, float tol) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); i++) if (!(std::fabs(a[i] - b[i]) <= tol * (1 + std::fabs(b[i])))) { printf("  at %zu: %g, want %g\n", i, a[i], b[i]); return false; }
    return true;
}
template <class F> static float ms_of(F f, int reps = 20) {
    cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
    f(); cudaEventRecord(a); for (int i = 0; i < reps; i++) f(); cudaEventRecord(b); OK(cudaEventSynchronize(b));
    float ms; cudaEventElapsedTime(&ms, a, b); OK(cudaGetLastError()); return ms / reps;
}

static void empty_launch() { b_saxpy::saxpy<<<1, 32>>>(0, 0, nullptr, nullptr); }

static void test_all() {
    using std::vector;
    const int n = 1000003;
    auto x = noise(n), y = noise(n, 7);
    { Dev<float> a(x), b(y); b_saxpy::saxpy<<<(n + 255) / 256, 256>>>(n, 2, a.p, b.p); auto w = y; for (int i = 0; i < n; i++) w[i] = 2 * x[i] + y[i]; check("saxpy", b.get() == w); }
    { Dev<float> a(x), b(y), c(n); b_vec_add::vec_add<<<(n + 255) / 256, 256>>>(a.p, b.p, c.p, n); auto w = y; for (int i = 0; i < n; i++) w[i] += x[i]; check("vec_add", c.get() == w); }
    { auto h = x; b_vec_scale::scale_on_gpu(h.data(), 2, n); auto w = x; for (auto& v : w) v *= 2; check("scale_on_gpu", h == w); }
    { Dev<float> a(x); b_add_bias::add_bias<<<37, 96>>>(a.p, 1, n); auto w = x; for (auto& v : w) v += 1; check("add_bias", a.get() == w); }
    { float* h; OK(cudaMallocHost(&h, n * 4)); std::copy(x.begin(), x.end(), h); Dev<float> d(n); b_square::square_in_pieces(h, d.p, n, 7);
      bool ok = true; for (int i = 0; i < n; i++) ok &= h[i] == x[i] * x[i]; check("square_in_pieces", ok); cudaFreeHost(h); }
    { int w = 101, h = 67; vector<unsigned char> rgb(3 * w * h); for (size_t i = 0; i < rgb.size(); i++) rgb[i] = (unsigned char)(i * 37); Dev<unsigned char> a(rgb), g(w * h);
      b_rgb_to_gray::gray_on_gpu(a.p, g.p, w, h); auto r = g.get(); bool ok = true;
      for (int i = 0; i < w * h; i++) ok &= std::abs(r[i] - (0.299f * rgb[3 * i] + 0.587f * rgb[3 * i + 1] + 0.114f * rgb[3 * i + 2])) <= 0.51f; check("rgb_to_gray", ok); }
    { int w = 101, h = 67, r = 3; Dev<float> a(x), o(w * h); b_box_blur::box_blur<<<dim3(4, 9), dim3(32, 8)>>>(a.p, o.p, w, h, r); vector<float> q(w * h);
      for (int j = 0; j < h; j++) for (int i = 0; i < w; i++) { float s = 0; int c = 0; for (int v = -r; v <= r; v++) for (int u = -r; u <= r; u++) if (i + u >= 0 && i + u < w && j + v >= 0 && j + v < h) { s += x[(j + v) * w + i + u]; c++; } q[j * w + i] = s / c; }
      check("box_blur", close(o.get(), q, 1e-5f)); }
    { auto v = noise(512); Dev<float> a(v); b_reverse_256::reverse_256<<<2, 256>>>(a.p); std::reverse(v.begin(), v.begin() + 256); std::reverse(v.begin() + 256, v.end()); check("reverse_256", a.get() == v); }
    for (int M : {64, 33}) { int N = M == 64 ? 128 : 70, K = M == 64 ? 48 : 29; auto A = noise(M * K), B = noise(K * N, 3); vector<float> w(M * N);
      for (int i = 0; i < M; i++) for (int j = 0; j < N; j++) { float s = 0; for (int k = 0; k < K; k++) s += A[i * K + k] * B[k * N + j]; w[i * N + j] = s; }
      Dev<float> a(A), b(B), c(M * N); b_matmul_naive::matmul_naive<<<dim3((N + 15) / 16, (M + 15) / 16), dim3(16, 16)>>>(a.p, b.p, c.p, M, N, K); check("matmul_naive", close(c.get(), w, 1e-5f)); c.zero();
      b_matmul_tiled::matmul_tiled<32><<<dim3((N + 31) / 32, (M + 31) / 32), dim3(32, 32)>>>(a.p, b.p, c.p, M, N, K); check("matmul_tiled", close(c.get(), w, 1e-5f)); c.zero();
      if (M == 64) { b_matmul_coarse::matmul_coarse<<<dim3(N / 64, M / 64), dim3(16, 16)>>>(a.p, b.p, c.p, M, N, K); check("matmul_coarse", close(c.get(), w, 1e-5f)); } }
    { int R = 45, C = 77; Dev<float> a(x), o(R * C); b_transpose::transpose<<<dim3(3, 2), dim3(32, 8)>>>(a.p, o.p, R, C); auto r = o.get(); bool ok = true; for (int i = 0; i < R; i++) for (int j = 0; j < C; j++) ok &= r[j * R + i] == x[i * C + j]; check("transpose", ok); }
    { int m = 20000; Dev<float> a(x), o(m); OK(b_stage::launch_stage(a.p, o.p, m)); auto r = o.get(); bool ok = true; for (int i = 0; i < m; i++) ok &= r[i] == x[m - 1 - i]; check("launch_stage of 80,000 bytes", ok);
      check("launch_stage refuses 400,000 bytes", b_stage::launch_stage(a.p, o.p, 100000) != cudaSuccess); cudaGetLastError(); }
    { auto v = noise(4096); Dev<float> a(v), o(4096); b_copy_vec4::copy_vec4<<<4, 256>>>((float4*)a.p, (float4*)o.p, 1024); check("copy_vec4", o.get() == v); }
    { bool ok = true; unsigned s = 1; for (int i = 0; i < 2000000; i++) { s = s * 1664525u + 1013904223u; float f; memcpy(&f, &s, 4); unsigned short h = b_float_to_bf16::float_to_bf16(f); __nv_bfloat16 r = __float2bfloat16(f); unsigned short q; memcpy(&q, &r, 2);
        ok &= h == q || (f != f && (h & 0x7fff) > 0x7f80); } check("float_to_bf16 against __float2bfloat16", ok); }
    { int rows = 5, C = 77; auto v = noise(rows * C); for (auto& t : v) t *= 60; Dev<float> a(v), o(rows * C); b_softmax_rows::softmax_rows<<<2, 96>>>(a.p, o.p, rows, C); vector<float> w(rows * C);
      for (int r = 0; r < rows; r++) { double m = -1e30, s = 0; for (int i = 0; i < C; i++) m = std::max(m, (double)v[r * C + i]); for (int i = 0; i < C; i++) s += std::exp(v[r * C + i] - m); for (int i = 0; i < C; i++) w[r * C + i] = (float)(std::exp(v[r * C + i] - m) / s); }
      check("softmax_rows", close(o.get(), w, 1e-6f)); Dev<float> a1(v), o1(3); b_softmax_rows::softmax_rows<<<1, 32>>>(a1.p, o1.p, 1, 3); double s = 0; for (int i = 0; i < 3; i++) s += std::exp((double)v[i] - std::max({v[0], v[1], v[2]})); check("softmax_rows of 3", std::fabs(o1.get()[0] - std::exp((double)v[0] - std::max({v[0], v[1], v[2]})) / s) < 1e-6); }
    { int w = 101, h = 67; auto f = noise(25, 5); vector<float> q(w * h); for (int j = 0; j < h; j++) for (int i = 0; i < w; i++) { float s = 0; for (int v = 0; v < 5; v++) for (int u = 0; u < 5; u++) { int X = i + u - 2, Y = j + v - 2; if (X >= 0 && X < w && Y >= 0 && Y < h) s += x[Y * w + X] * f[v * 5 + u]; } q[j * w + i] = s; }
      Dev<float> a(x), o(w * h); OK(cudaMemcpyToSymbol(b_conv2d_const::filt, f.data(), 100)); OK(cudaMemcpyToSymbol(b_conv2d_tiled::taps, f.data(), 100));
      b_conv2d_const::conv2d_const<<<dim3(4, 9), dim3(32, 8)>>>(a.p, o.p, w, h); check("conv2d_const", close(o.get(), q, 1e-5f)); o.zero();
      b_conv2d_tiled::conv2d_tiled<<<dim3(4, 3), dim3(32, 32)>>>(a.p, o.p, w, h); check("conv2d_tiled", close(o.get(), q, 1e-5f));
      vector<float> g(f.begin(), f.begin() + 5), e(w * h, 0); for (int j = 0; j < h; j++) for (int i = 0; i < w; i++) { float s = 0; for (int v = 0; v < 5; v++) for (int u = 0; u < 5; u++) { int X = i + u - 2, Y = j + v - 2; if (X >= 0 && X < w && Y >= 0 && Y < h) s += x[Y * w + X] * g[v] * g[u]; } e[j * w + i] = s; }
      Dev<float> t(w * h), gd(g); b_conv1d_dir::conv1d_dir<<<dim3(4, 9), dim3(32, 8)>>>(a.p, t.p, gd.p, 2, w, h, false); b_conv1d_dir::conv1d_dir<<<dim3(4, 9), dim3(32, 8)>>>(t.p, o.p, gd.p, 2, w, h, true); check("conv1d_dir twice", close(o.get(), e, 1e-4f)); }
    { int C = 3, H = 9, W = 11, K = 3, P = 1; Dev<float> a(x), c(C * K * K * H * W); b_im2col::im2col<<<(C * K * K * H * W + 255) / 256, 256>>>(a.p, c.p, C, H, W, K, P); auto r = c.get(); bool ok = true;
      for (int k = 0; k < C; k++) for (int v = 0; v < K; v++) for (int u = 0; u < K; u++) for (int i = 0; i < H; i++) for (int j = 0; j < W; j++) { int X = j + u - P, Y = i + v - P; float want = X >= 0 && X < W && Y >= 0 && Y < H ? x[(k * H + Y) * W + X] : 0; ok &= r[(((k * K + v) * K + u) * H + i) * W + j] == want; } check("im2col", ok); }
    { float d[4] = {1, 2, -3, 5}, g[3] = {4, -6, 8}, o[2]; b_winograd_f23::winograd_f23(d, g, o); check("winograd_f23", o[0] == d[0] * g[0] + d[1] * g[1] + d[2] * g[2] && o[1] == d[1] * g[0] + d[2] * g[1] + d[3] * g[2]); }
    { int m = 100001; auto v = noise(m); for (auto& t : v) t = std::floor(t); double want = 0; for (float t : v) want += t; Dev<float> a(v), o((m + 511) / 512); b_reduce_tree::reduce_tree<<<(m + 511) / 512, 256>>>(a.p, o.p, m); double s = 0; for (float t : o.get()) s += t; check("reduce_tree", s == want);
      Dev<float> p(50); b_warp_sum::reduce_warp<<<50, 160>>>(a.p, p.p, m); s = 0; for (float t : p.get()) s += t; check("reduce_warp", s == want);
      vector<float> w(m); for (int i = 0; i < m; i++) w[i] = v[i] + (i % 256 ? w[i - 1] : 0); Dev<float> q(m); b_scan_kogge_stone::scan_kogge_stone<<<(m + 255) / 256, 256>>>(a.p, q.p, m); check("scan_kogge_stone", q.get() == w); q.zero(); b_scan_brent_kung::scan_brent_kung<<<(m + 255) / 256, 128>>>(a.p, q.p, m); check("scan_brent_kung", q.get() == w); }
    for (int m : {1, 256, 5000003}) { vector<unsigned> v(m), w(m); unsigned s = 1, t = 0; for (int i = 0; i < m; i++) { s = s * 1664525u + 1013904223u; v[i] = s; t += s; w[i] = t; } Dev<unsigned> a(v), o(m), ticket(1); int tiles = (m + 255) / 256; Dev<unsigned long long> st(tiles);
      b_scan_lookback::scan_lookback<<<tiles, 256>>>(a.p, o.p, m, st.p, ticket.p); check("scan_lookback", o.get() == w); }
    { vector<unsigned char> v(n); vector<unsigned> w(256); for (int i = 0; i < n; i++) { v[i] = (unsigned char)(i * i / 3); w[v[i]]++; } Dev<unsigned char> a(v); Dev<unsigned> b(256); b_histogram::histogram<<<40, 256>>>(a.p, b.p, n); check("histogram", b.get() == w); }
}

// ---- numbers ----
__global__ void chase(const unsigned* next, unsigned at, int steps, unsigned* out, long long* cyc) {
    long long t0 = clock64(); for (int i = 0; i < steps; i++) at = next[at]; long long t1 = clock64(); *out = at; *cyc = t1 - t0; }
__global__ void chase_shared(int steps, unsigned* out, long long* cyc) {
    __shared__ unsigned s[1024]; for (int i = 0; i < 1024; i++) s[i] = (i + 33) & 1023; unsigned at = 0; long long t0 = clock64(); for (int i = 0; i < steps; i++) at = s[at]; long long t1 = clock64(); *out = at; *cyc = t1 - t0; }
__global__ void fma_chain(float x, int steps, float* out, long long* cyc) {
    long long t0 = clock64(); for (int i = 0; i < steps; i++) x = x * 0.5f + 1.0f; long long t1 = clock64(); *out = x; *cyc = t1 - t0; }
__global__ void banks(int stride, int steps, float* out, long long* cyc) {   // one warp; each load's address depends on the one before
    __shared__ int s[32 * 64]; for (int i = threadIdx.x; i < 32 * 64; i += 32) s[i] = 0; __syncthreads();
    int at = threadIdx.x * stride, acc = 0; long long t0 = clock64(); for (int i = 0; i < steps; i++) { acc = s[(at + acc) & 2047]; } long long t1 = clock64(); out[threadIdx.x] = acc; if (!threadIdx.x) *cyc = t1 - t0; }
__global__ void spin(long long cycles) { long long t = clock64(); while (clock64() - t < cycles) {} }
__global__ void transpose_naive(const float* in, float* out, int R, int C) { int x = blockIdx.x * 32 + threadIdx.x; for (int y = blockIdx.y * 32 + threadIdx.y; y < blockIdx.y * 32 + 32; y += 8) out[(size_t)x * R + y] = in[(size_t)y * C + x]; }
__global__ void transpose_32(const float* in, float* out, int R, int C) { __shared__ float t[32][32]; int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) t[threadIdx.y + j][threadIdx.x] = in[(size_t)(y + j) * C + x]; __syncthreads(); x = blockIdx.y * 32 + threadIdx.x; y = blockIdx.x * 32 + threadIdx.y; for (int j = 0; j < 32; j += 8) out[(size_t)(y + j) * R + x] = t[threadIdx.x][threadIdx.y + j]; }
__global__ void copy1(const float* in, float* out, size_t n) { size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = in[i]; }
__global__ void sum_few_warps(const float4* in, float* out, size_t n4) { float s = 0; extern __shared__ char unused[]; for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n4; i += (size_t)gridDim.x * blockDim.x) { float4 v = in[i]; s += v.x + v.y + v.z + v.w; } if (s == 1234.5f) out[0] = s; }
__global__ void sum1(const float* in, float* out, size_t n) { float s = 0; 
#pragma unroll 1
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) s += in[i]; if (s == 1234.5f) out[0] = s; }
__global__ void sum_atomic(const float* in, float* out, size_t n) { size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) atomicAdd(out, in[i]); }
__global__ void tree_interleaved(const float* in, float* out, int n) { __shared__ float s[256]; int t = threadIdx.x; size_t i = (size_t)blockIdx.x * 512 + t; s[t] = (i < n ? in[i] : 0) + (i + 256 < n ? in[i + 256] : 0);
    for (int d = 1; d < 256; d *= 2) { __syncthreads(); if (t % (2 * d) == 0) s[t] += s[t + d]; } if (t == 0) out[blockIdx.x] = s[0]; }
__global__ void hist_global(const unsigned char* x, unsigned* bins, size_t n) { for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1u); }
__global__ void conv_plain(const float* in, const float* f, float* out, int w, int h) { int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y; if (x >= w || y >= h) return; float acc = 0;
    for (int j = 0; j < 5; j++) for (int i = 0; i < 5; i++) { int u = x + i - 2, v = y + j - 2; if (u >= 0 && u < w && v >= 0 && v < h) acc += in[(size_t)v * w + u] * f[j * 5 + i]; } out[(size_t)y * w + x] = acc; }
__global__ void atomic_order(const float* in, float* out, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) atomicAdd(out, in[i]); }

static double chase_cycles(size_t bytes, int steps, bool warm) {
    size_t n = bytes / 4, line = 32; size_t lines = n / line; std::vector<unsigned> order(lines), next(n); for (size_t i = 0; i < lines; i++) order[i] = (unsigned)i; unsigned s = 1;
    for (size_t i = lines - 1; i > 0; i--) { s = s * 1664525u + 1013904223u; std::swap(order[i], order[(size_t)((unsigned long long)s * (i + 1) >> 32)]); }
    for (size_t i = 0; i < lines; i++) next[order[i] * line] = (unsigned)(order[(i + 1) % lines] * line);
    Dev<unsigned> d(next), o(1); Dev<long long> c(1); if (warm) chase<<<1, 1>>>(d.p, order[0] * line, (int)lines * 2, o.p, c.p); chase<<<1, 1>>>(d.p, order[0] * line, steps, o.p, c.p); return (double)c.get()[0] / steps;
}
static void numbers() {
    int dev = 0; cudaDeviceProp p; OK(cudaGetDeviceProperties(&p, dev)); int clk, mclk; cudaDeviceGetAttribute(&clk, cudaDevAttrClockRate, dev); cudaDeviceGetAttribute(&mclk, cudaDevAttrMemoryClockRate, dev);
    printf("%s: %d SMs, %d threads/SM, %d regs/SM, %d regs/block, shared %zu/SM %zu/block %zu opt-in, reserved %zu, L2 %d, bus %d bit, mem %.3f GHz, clock %.3f GHz, const %zu, maxblocks/SM %d, grid %d %d %d block %d %d %d\n", p.name, p.multiProcessorCount, p.maxThreadsPerMultiProcessor, p.regsPerMultiprocessor, p.regsPerBlock, p.sharedMemPerMultiprocessor, p.sharedMemPerBlock, p.sharedMemPerBlockOptin, p.reservedSharedMemPerBlock, p.l2CacheSize, p.memoryBusWidth, mclk / 1e6, clk / 1e6, p.totalConstMem, p.maxBlocksPerMultiProcessor, p.maxGridSize[0], p.maxGridSize[1], p.maxGridSize[2], p.maxThreadsDim[0], p.maxThreadsDim[1], p.maxThreadsDim[2]);
    { Dev<unsigned> o(1); Dev<float> f(32); Dev<long long> c(1); chase_shared<<<1, 1>>>(4096, o.p, c.p); chase_shared<<<1, 1>>>(4096, o.p, c.p); printf("latency: shared %.1f", c.get()[0] / 4096.0); fma_chain<<<1, 32>>>(1, 4096, f.p, c.p); fma_chain<<<1, 32>>>(1, 4096, f.p, c.p); printf(", fma %.2f", c.get()[0] / 4096.0); 
      printf(", L1 (16 KB) %.1f, L2 (4 MB) %.1f, DRAM (1 GB, random) %.1f cycles\n", chase_cycles(16 << 10, 4096, true), chase_cycles(4 << 20, 32768, true), chase_cycles(1u << 30, 32768, false));
      for (int st : {0, 1, 2, 4, 8, 16, 32, 33}) { banks<<<1, 32>>>(st, 4096, f.p, c.p); banks<<<1, 32>>>(st, 4096, f.p, c.p); printf("bank stride %d: %.1f cycles; ", st, c.get()[0] / 4096.0); } puts(""); }
    { float a = ms_of(empty_launch, 2000); auto t = ms_of([] { empty_launch(); cudaDeviceSynchronize(); }, 2000); printf("empty launch: %.2f us back to back, %.2f us with a synchronise each\n", a * 1e3, t * 1e3); }
    size_t N = 64u << 20; Dev<float> A(N), B(N);
    for (int st : {1, 2, 4, 8, 16, 32}) { int m = (int)(N / 32); float t = ms_of([&] { b_read_strided::read_strided<<<m / 256, 256>>>(A.p, B.p, m, st); }); printf("stride %d: useful read %.0f GB/s, both %.0f, %.4f ms; ", st, m * 4.0 / t / 1e6, m * 8.0 / t / 1e6, t); } puts("");
    { float t = ms_of([&] { copy1<<<N / 256, 256>>>(A.p, B.p, N); }), u = ms_of([&] { b_copy_vec4::copy_vec4<<<N / 1024, 256>>>((float4*)A.p, (float4*)B.p, N / 4); }); printf("copy of 256 MiB: float %.0f, float4 %.0f GB/s; saxpy %.0f\n", N * 8.0 / t / 1e6, N * 8.0 / u / 1e6, N * 12.0 / ms_of([&] { b_saxpy::saxpy<<<N / 256, 256>>>((int)N, 2, A.p, B.p); }) / 1e6); }
    for (int w : {1, 2, 4, 8, 16, 32, 64}) { int per = w < 32 ? w : 32, blocks = p.multiProcessorCount * (w / per); float t = ms_of([&] { sum1<<<blocks, per * 32>>>(A.p, B.p, N); }, 5), u = ms_of([&] { sum_few_warps<<<blocks, per * 32>>>((const float4*)A.p, B.p, N / 4); }, 5); printf("%d warps/SM: 4-byte loads %.0f, 16-byte unrolled %.0f GB/s; ", w, N * 4.0 / t / 1e6, N * 4.0 / u / 1e6); } puts("");
    { int D = 8192; auto bw = [&](float t) { return D * (double)D * 8 / t / 1e6; }; dim3 g(D / 32, D / 32), b(32, 8); printf("transpose 8192: naive %.0f, tile[32][32] %.0f, tile[32][33] %.0f GB/s\n", bw(ms_of([&] { transpose_naive<<<g, b>>>(A.p, B.p, D, D); })), bw(ms_of([&] { transpose_32<<<g, b>>>(A.p, B.p, D, D); })), bw(ms_of([&] { b_transpose::transpose<<<g, b>>>(A.p, B.p, D, D); }))); }
    { int D = 4096; Dev<float> C((size_t)D * D); auto tf = [&](float t) { return 2.0 * D * D * D / t / 1e9; }; printf("matmul fp32 4096: naive(32x8) %.2f, tiled32 %.2f, coarse %.2f TFLOP/s\n", tf(ms_of([&] { b_matmul_naive::matmul_naive<<<dim3(D / 32, D / 8), dim3(32, 8)>>>(A.p, B.p, C.p, D, D, D); }, 3)), tf(ms_of([&] { b_matmul_tiled::matmul_tiled<32><<<dim3(D / 32, D / 32), dim3(32, 32)>>>(A.p, B.p, C.p, D, D, D); }, 3)), tf(ms_of([&] { b_matmul_coarse::matmul_coarse<<<dim3(D / 64, D / 64), dim3(16, 16)>>>(A.p, B.p, C.p, D, D, D); }, 3))); }
    { int m = 1 << 22; printf("two_paths 1000 steps: by warp %.3f ms, by lane %.3f ms\n", ms_of([&] { b_busy::two_paths<<<m / 256, 256>>>(A.p, 1000, true); }), ms_of([&] { b_busy::two_paths<<<m / 256, 256>>>(A.p, 1000, false); })); }
    { int s = p.multiProcessorCount; OK(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10)); for (int b : {1, s, s + 1, 2 * s, 2 * s + 1}) { float t = ms_of([&] { spin<<<b, 1024, 200 << 10>>>(1000000); }); printf("spin of 1M cycles, %d blocks: %.3f ms; ", b, t); } puts(""); }
    { size_t bytes = 256u << 20; void *pin, *page = malloc(bytes); memset(page, 1, bytes); OK(cudaMallocHost(&pin, bytes)); memset(pin, 1, bytes); float a = ms_of([&] { cudaMemcpy(A.p, page, bytes, cudaMemcpyHostToDevice); }, 5), b = ms_of([&] { cudaMemcpy(A.p, pin, bytes, cudaMemcpyHostToDevice); }, 5); printf("host to device, 256 MiB: pageable %.1f, pinned %.1f GB/s\n", bytes / a / 1e6, bytes / b / 1e6);
      float* hp = (float*)pin; Dev<float> d(bytes / 4); for (int q : {1, 2, 4, 8, 16}) printf("pieces %d: %.2f ms; ", q, ms_of([&] { b_square::square_in_pieces(hp, d.p, (int)(bytes / 4), q); }, 5)); puts(""); free(page); cudaFreeHost(pin); }
    { A.zero(); auto gb = [&](float t) { return N * 4.0 / t / 1e6; }; printf("sum of 256 MiB: atomics %.1f, interleaved tree %.0f, tree %.0f, warp (grid 8/SM) %.0f GB/s\n", gb(ms_of([&] { sum_atomic<<<N / 256, 256>>>(A.p, B.p, N); }, 2)), gb(ms_of([&] { tree_interleaved<<<N / 512, 256>>>(A.p, B.p, (int)N); })), gb(ms_of([&] { b_reduce_tree::reduce_tree<<<N / 512, 256>>>(A.p, B.p, (int)N); })), gb(ms_of([&] { b_warp_sum::reduce_warp<<<p.multiProcessorCount * 8, 256>>>(A.p, B.p, N); }))); }
    { int m = 1 << 26; Dev<unsigned> a(m), o(m), t(1); Dev<unsigned long long> st(m / 256); float x = ms_of([&] { t.zero(); st.zero(); b_scan_lookback::scan_lookback<<<m / 256, 256>>>(a.p, o.p, m, st.p, t.p); }, 3); printf("scan_lookback of 2^26: %.3f ms, %.0f GB/s; kogge-stone blocks %.0f GB/s, brent-kung %.0f GB/s\n", x, m * 8.0 / x / 1e6, m * 8.0 / ms_of([&] { b_scan_kogge_stone::scan_kogge_stone<<<m / 256, 256>>>(A.p, B.p, m); }) / 1e6, m * 8.0 / ms_of([&] { b_scan_brent_kung::scan_brent_kung<<<m / 256, 128>>>(A.p, B.p, m); }) / 1e6); }
    { size_t m = 1u << 28; std::vector<unsigned char> v(m); unsigned s = 1; for (auto& c : v) { s = s * 1664525u + 1013904223u; c = s >> 24; } Dev<unsigned char> a(v), z(m); Dev<unsigned> b(256); int g = p.multiProcessorCount * 8;
      for (auto* q : {a.p, z.p}) printf("histogram of 2^28 bytes, %s: global atomics %.2f ms, shared %.2f ms; ", q == a.p ? "uniform" : "one value", ms_of([&] { hist_global<<<g, 256>>>(q, b.p, m); }, 2), ms_of([&] { b_histogram::histogram<<<g, 256>>>(q, b.p, m); }, 2)); puts(""); }
    { int D = 8192; dim3 g(D / 32, D / 8), b(32, 8), g2(D / 32, D / 32), b2(32, 32); Dev<float> f(25); printf("conv 5x5 of 8192x8192: filter in global %.3f, constant %.3f, tiled %.3f, two 1-D passes %.3f ms\n", ms_of([&] { conv_plain<<<g, b>>>(A.p, f.p, B.p, D, D); }), ms_of([&] { b_conv2d_const::conv2d_const<<<g, b>>>(A.p, B.p, D, D); }), ms_of([&] { b_conv2d_tiled::conv2d_tiled<<<g2, b2>>>(A.p, B.p, D, D); }), ms_of([&] { b_conv1d_dir::conv1d_dir<<<g, b>>>(A.p, B.p, f.p, 2, D, D, false); b_conv1d_dir::conv1d_dir<<<g, b>>>(B.p, A.p, f.p, 2, D, D, true); })); }
    { std::vector<float> v(1 << 20); unsigned s = 1; for (auto& x : v) { s = s * 1664525u + 1013904223u; x = (s >> 8) / 16777216.0f - 0.5f; } Dev<float> a(v), o(1); std::vector<float> seen; for (int i = 0; i < 20; i++) { o.zero(); atomic_order<<<4096, 256>>>(a.p, o.p, 1 << 20); float r = o.get()[0]; if (std::find(seen.begin(), seen.end(), r) == seen.end()) seen.push_back(r); } printf("float atomicAdd of 2^20 numbers, 20 runs: %zu different results\n", seen.size()); }
}
static void numerics() {
    { float s = 0; int i = 0; while (s + 1.0f != s) { s += 1.0f; i++; } printf("float += 1 stops at %.0f\n", s); }
    int n = 10000000; std::vector<float> v(n, 0.1f); float s = 0; for (float x : v) s += x; double d = 0; for (float x : v) d += x;
    printf("10^7 times 0.1f: exact sum %.6f; loop %.6f, pairwise %.6f, Kahan %.6f\n", d, s, b_pairwise_sum::pairwise_sum(v.data(), n), b_kahan_sum::kahan_sum(v.data(), n));
    printf("0.1f = %.20f; (1e8f + 1) - 1e8f = %g; (1e20f+(-1e20f))+1 = %g, 1e20f+((-1e20f)+1) = %g\n", (double)0.1f, (1e8f + 1) - 1e8f, (1e20f + -1e20f) + 1, 1e20f + (-1e20f + 1.0f));
    __nv_bfloat16 b = __float2bfloat16(0); float fb = 0; for (int i = 0; i < 1000; i++) { fb = __bfloat162float(__float2bfloat16(fb + 1.0f)); } printf("bf16 += 1, 1000 times: %g\n", fb); (void)b;
    float fh = 0; for (int i = 0; i < 5000; i++) fh = __half2float(__float2half(fh + 1.0f)); printf("fp16 += 1, 5000 times: %g; half(65519)=%g half(65520)=%g; bf16(3.14159265)=%g fp16 %g\n", fh, __half2float(__float2half(65519.0f)), __half2float(__float2half(65520.0f)), __bfloat162float(__float2bfloat16(3.14159265f)), __half2float(__float2half(3.14159265f)));
    float a = 1.0f + 0x1p-12f; printf("fma(a,a,-1-2^-11) = %g, a*a-(1+2^-11) = %g\n", std::fma(a, a, -(1 + 0x1p-11f)), a * a - (1 + 0x1p-11f)); printf("expf(88) %g expf(89) %g\n", std::exp(88.0f), std::exp(89.0f));
}
int main(int argc, char**) {
    test_all(); numerics(); if (argc == 1) numbers();
    b_work::print_occupancy(96); b_work::print_occupancy(1024); b_wave_report::wave_report(133, 132, 1); printf("time_ms of an empty launch: %.4f ms\n", b_time_ms::time_ms(empty_launch, 100));
    printf("%d failures\n", failures); return failures != 0;
}
