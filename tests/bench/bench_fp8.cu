// Products of FP8 weights and FP8 activations beside bf16's and beside cuBLASLt's (e4m3, one scale a tensor, exact
// sums; a yardstick here), as replays of a CUDA graph over weights that do not fit the L2 cache.
//     build/bench_fp8 [products] [sweep] [training]      (default: products)
#include "gpu/gpu.h"
#include "lab/timing.h"
#include "model/fp8_activations.h"
#include "qwen3.cu"
#include <cmath>
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cstring>
#include <set>

static Context ctx;
struct Product { const char* name; int R, K; };
static const Product SHAPES[] = {{"0.6B qkv", 4096, 1024}, {"0.6B o", 1024, 2048}, {"0.6B gate+up", 6144, 1024}, {"0.6B down", 1024, 3072},
                               {"1.7B gate+up", 12288, 2048}, {"4B qkv", 6144, 2560}, {"4B down", 2560, 9728},
                               {"8B qkv", 6144, 4096}, {"8B o", 4096, 4096}, {"8B gate+up", 24576, 4096}, {"8B down", 4096, 12288}};
static double time_graph(int calls, const std::function<void(int)>& f) { return lab::time_graph(ctx.gpu->stream, calls, f); }
#define BLAS(call) do { if ((call) != CUBLAS_STATUS_SUCCESS) DIE("cuBLAS: %s failed", #call); } while (0)

template <class T> static T* array(size_t n) {
    void* p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    return (T*)p;
}
// Random bytes that are e4m3 numbers of either sign from 1/8 to 2.
__global__ void random_e4m3_kernel(uint8_t* p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const uint32_t r = philox(1, i, 0).v[0];
        p[i] = (uint8_t)((r & 0x87) | (4 + (r >> 8) % 4) << 3);
    }
}
__global__ void fill_kernel(float* p, size_t n, float x) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = x;
}
// A matrix in e4m3 (the same bytes are also used as bf16), `sets` of them, and activations with their scales.
struct Operands {
    int sets;
    size_t size;
    uint8_t *w, *x;
    float *scales, *x_scales;
    bf16* out;
    int N, pitch;
    Operands(const Product& s, int tokens) : N(tokens), pitch((tokens + 127) / 128 * 128) {
        size = (size_t)s.R * s.K, sets = (int)std::min<size_t>(16, (200ull << 20) / size + 1);
        w = array<uint8_t>(2 * size * sets), x = array<uint8_t>((size_t)2 * N * s.K), out = array<bf16>((size_t)N * s.R);
        scales = array<float>(size / 128 * sets + 256), x_scales = array<float>((size_t)(s.K / 128 + 1) * pitch);
        random_e4m3_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(w, 2 * size * sets);
        random_e4m3_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(x, (size_t)2 * N * s.K);
        fill_kernel<<<256, 256, 0, ctx.gpu->stream>>>(scales, size / 128 * sets + 256, 0.02f);
        fill_kernel<<<256, 256, 0, ctx.gpu->stream>>>(x_scales, (size_t)(s.K / 128 + 1) * pitch, 1);
    }
    ~Operands() {
        for (void* p : {(void*)w, (void*)x, (void*)out, (void*)scales, (void*)x_scales}) cudaFree(p);
    }
    Operands(const Operands&) = delete;
    Linear<bf16> fp8(const Product& s, int set) const {
        Linear<bf16> W;
        W.format = Format::FP8, W.group = W.group_rows = FP8_GROUP, W.rows[0] = s.R, W.in = s.K;
        W.q[0] = (const int8_t*)w + size * set, W.scale[0] = scales;
        return W;
    }
    Linear<bf16> plain(const Product& s, int set) const {
        Linear<bf16> W;
        W.w[0] = (const bf16*)w + size * set, W.rows[0] = s.R, W.in = s.K;
        return W;
    }
    E4M3Rows rows() const { return {x, x_scales, pitch}; }
};
// The fastest of the library's six plans.
struct Library {
    cublasLtHandle_t lt;
    void* workspace = array<uint8_t>(64 << 20);
    Library() { BLAS(cublasLtCreate(&lt)); }
    double time(const Operands& a, const Product& s, int calls) {
        cublasLtMatmulDesc_t d;
        cublasLtMatrixLayout_t w, x, y;
        cublasLtMatmulPreference_t preference;
        const cublasOperation_t t = CUBLAS_OP_T;
        const int8_t fast = 0;
        const size_t room = 64 << 20;
        BLAS(cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        BLAS(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t));
        BLAS(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
        BLAS(cublasLtMatrixLayoutCreate(&w, CUDA_R_8F_E4M3, s.K, s.R, s.K));
        BLAS(cublasLtMatrixLayoutCreate(&x, CUDA_R_8F_E4M3, s.K, a.N, s.K));
        BLAS(cublasLtMatrixLayoutCreate(&y, CUDA_R_16BF, s.R, a.N, s.R));
        BLAS(cublasLtMatmulPreferenceCreate(&preference));
        BLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room));
        cublasLtMatmulHeuristicResult_t found[6];
        int count = 0;
        BLAS(cublasLtMatmulAlgoGetHeuristic(lt, d, w, x, y, y, preference, 6, found, &count));
        double best = 1e30;
        const float one = 1, zero = 0;
        for (int i = 0; i < count; i++)
            best = std::min(best, time_graph(calls, [&](int k) {
                BLAS(cublasLtMatmul(lt, d, &one, a.w + a.size * (k % a.sets), w, a.x, x, &zero, a.out, y, a.out, y, &found[i].algo, workspace, room, ctx.gpu->stream));
            }));
        cublasLtMatmulPreferenceDestroy(preference), cublasLtMatmulDescDestroy(d);
        for (auto layout : {w, x, y}) cublasLtMatrixLayoutDestroy(layout);
        return best;
    }
};

static int calls_for(const Product& s, int N) { return std::max(4, std::min(40, (int)(4e12 / (2. * N * (double)s.R * s.K)))); }
static void products() {
    Library library;
    printf("us: bf16, e4m3, cuBLASLt's e4m3; e4m3 of bf16's time; cuBLASLt's time of ours; TFLOP/s; by mma.sync\n");
    for (int N : {24, 64, 128, 256, 384, 512, 2048, 8192}) {
        double sums[2] = {}, mean = 0;
        for (const Product& s : SHAPES) {
            const Operands a(s, N);
            const int calls = calls_for(s, N);
            const double bf16_time = time_graph(calls, [&](int i) { linear_gpu(ctx, a.out, (const bf16*)a.x, a.plain(s, i % a.sets), N); });
            const auto ours = [&] {
                return time_graph(calls, [&](int i) { e4m3_product(ctx, StoreEpilogue<bf16>(a.out, s.R), a.rows(), a.fp8(s, i % a.sets), N); });
            };
            const double e4m3 = ours(), theirs = library.time(a, s, calls);
            const bool hopper = std::exchange(ctx.gpu->hopper, false);
            const double portable = ours();
            ctx.gpu->hopper = hopper;
            printf("  N %4d  %-13s %7.2f %7.2f %7.2f   %.2f  %.2f  %6.0f  %7.2f\n", N, s.name, bf16_time * 1e6, e4m3 * 1e6, theirs * 1e6, e4m3 / bf16_time,
                   theirs / e4m3, 2. * N * (double)s.R * s.K / e4m3 / 1e12, portable * 1e6);
            if (s.name[0] == '0') sums[0] += bf16_time, sums[1] += e4m3;
            mean += std::log(theirs / e4m3);
        }
        printf("  N %4d  0.6B, four products: bf16 %.1f, e4m3 %.1f us: %.2f; of cuBLASLt %.3f\n", N, sums[0] * 1e6, sums[1] * 1e6, sums[1] / sums[0],
               std::exp(mean / (double)std::size(SHAPES)));
        fflush(stdout);
    }
}

// Every shape and number of splits, to set the times of E4M3Plan.
static void sweep() {
    for (int N : {24, 64, 128, 192, 256, 384, 512, 2048})
        for (const Product& s : SHAPES) {
            if (s.name[0] == '1' || (N == 2048 && s.name[0] == '4')) continue;
            const Operands a(s, N);
            const int calls = calls_for(s, N);
            printf("N %4d %-13s", N, s.name);
            const auto row = [&](const char* name, auto shape, int most) {
                using S = decltype(shape);
                if (S::MOST < S::TOKENS && N > S::MOST) return;
                printf("  %s", name);
                for (int splits = 1; splits <= most; splits *= 2) {
                    const int64_t tiles = count_tiles<S>(N, s.R);
                    if (splits > 1 && (splits > s.K / 128 || tiles * splits > S::BLOCKS * (ctx.gpu->sms - 4))) break;
                    printf(" %.2f", 1e6 * time_graph(calls, [&](int i) {
                        TileArgs p = {(const bf16*)a.x, (const bf16*)(a.w + a.size * (i % a.sets)), N, s.K / 2, s.R};
                        p.x_scale = a.x_scales, p.W_scale = a.scales, p.pitch = a.pitch, p.splits = splits;
                        launch_hopper<S, false, false, true>(ctx, p, StoreEpilogue<bf16>(a.out, s.R));
                    }));
                }
            };
            row("128x256", Hopper128x256{}, 2), row("128x128", E4M3Hopper128x128{}, 8), row("64x64", Hopper64x64{}, 8);
            row("deep", Hopper64x64Deep{}, 8), row("64x128", Hopper64x128{}, 8), row("128x64", Hopper128x64{}, 8), row("32x64", Hopper32x64{}, 8);
            const double bf16_time = time_graph(calls, [&](int i) { linear_gpu(ctx, a.out, (const bf16*)a.x, a.plain(s, i % a.sets), N); });
            const double chosen = time_graph(calls, [&](int i) { e4m3_product(ctx, StoreEpilogue<bf16>(a.out, s.R), a.rows(), a.fp8(s, i % a.sets), N); });
            const E4M3Plan plan(ctx, N, s.R, s.K / 2);
            printf("  chosen %d/%d %.2f, bf16 %.2f\n", plan.shape, plan.splits, 1e6 * chosen, 1e6 * bf16_time);
            fflush(stdout);
        }
}

// The products of a training step of 64 x 512 tokens through the 0.6B, forward and by their input, for long enough that
// the card is at its limit of power: in bf16, in e4m3 (dx by a copy of W transposed), and the rounding of the input.
__global__ void uniform_kernel(bf16* p, size_t n, float most) { // in -most .. most
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = round_bf16(((float)philox(2, i, 0).v[0] * 0x1p-31f - 1) * most);
}
struct TrainingProduct {
    static constexpr int N = 64 * 512;
    const char* name;
    int out, in; // forward, W is (out,in); dx = dy W of W (in,out)
    bool forward;
    bf16 *x = uniform((size_t)N * in, 1), *w = uniform((size_t)out * in, 0.05f), *y = array<bf16>((size_t)N * out);
    E4M3Rows x8 = rows(N), w8 = rows(out);
    float* scales = array<float>((size_t)(out / 128) * (in / 128));
    TrainingProduct(const char* name, int out, int in, bool forward) : name(name), out(out), in(in), forward(forward) {
        fill_kernel<<<16, 256, 0, ctx.gpu->stream>>>(scales, (size_t)(out / 128) * (in / 128), 1e-4f);
        launch_round<true>(ctx, w8, w, out, in);
        round();
    }
    static bf16* uniform(size_t n, float most) {
        bf16* p = array<bf16>(n);
        uniform_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(p, n, most);
        return p;
    }
    E4M3Rows rows(int n) const {
        return {array<uint8_t>((size_t)n * in), array<float>((size_t)(in / 128) * n), n};
    }
    double flop() const { return 2. * N * out * in; }
    void plain() const {
        Linear<bf16> W;
        W.w[0] = w, W.rows[0] = forward ? out : in, W.in = forward ? in : out;
        if (forward) linear_gpu(ctx, y, x, W, N);
        else linear_backward_input_gpu(ctx, y, nullptr, nullptr, x, W, N);
    }
    void round() const { launch_round<true>(ctx, x8, x, N, in); }
    void e4m3() const {
        Linear<bf16> W;
        W.format = Format::FP8, W.group = W.group_rows = FP8_GROUP, W.rows[0] = out, W.in = in;
        W.q[0] = (const int8_t*)w8.q, W.scale[0] = scales;
        e4m3_product(ctx, StoreEpilogue<bf16>(y, out), x8, W, N);
    }
};
static void training() {
    const TrainingProduct products[] = {{"qkv", 4096, 1024, true}, {"o", 1024, 2048, true},
                                        {"gate, up", 6144, 1024, true},
                                    {"down", 1024, 3072, true}, {"qkv dx", 1024, 4096, false},
                                    {"o dx", 2048, 1024, false}, {"gate, up dx", 1024, 6144, false},
                                    {"down dx", 3072, 1024, false}};
    printf("us: bf16, e4m3, its rounding; TFLOP/s of bf16, e4m3\n");
    for (const TrainingProduct& p : products) {
        const int calls = (int)(4e13 / p.flop());
        const double bf16_time = time_graph(calls, [&](int) { p.plain(); });
        const double e4m3 = time_graph(calls, [&](int) { p.e4m3(); });
        const double round = time_graph(calls, [&](int) { p.round(); });
        printf("  %-12s %7.1f %7.1f %7.1f   %5.0f %5.0f\n", p.name, bf16_time * 1e6, e4m3 * 1e6, round * 1e6,
               p.flop() / bf16_time / 1e12, p.flop() / e4m3 / 1e12);
        fflush(stdout);
    }
    const auto layers = [&](const char* what, bool rounds, auto in_e4m3) { // all products of 28 layers
        const double time = time_graph(28, [&](int) {
            for (const TrainingProduct& p : products) {
                if (rounds && in_e4m3(p)) p.round();
                if (in_e4m3(p)) p.e4m3();
                else p.plain();
            }
        });
        printf("  28 layers, %-44s %6.1f ms\n", what, time * 28e3);
        fflush(stdout);
    };
    for (int turn = 0; turn < 2; turn++) {
        layers("bf16", false, [](const TrainingProduct&) { return false; });
        layers("e4m3", false, [](const TrainingProduct&) { return true; });
        layers("e4m3 with rounding", true, [](const TrainingProduct&) { return true; });
        layers("e4m3 with rounding where out > 1,024", true, [](const TrainingProduct& p) { return p.out > 1024; });
    }
}

int main(int argc, char** argv) {
    try {
        ctx = open_gpu(0);
        ctx.gpu->partial = array<float>(PARTIAL_BYTES / 4), ctx.gpu->arrived = array<int>(MAX_TILES);
        CUDA_CHECK(cudaMemset(ctx.gpu->arrived, 0, MAX_TILES * sizeof(int)));
        const lab::Ceilings c = lab::measure_gpu(ctx.gpu->stream);
        printf("%s: read %.0f GB/s; mma.sync of bf16 %.0f TFLOP/s\n", gpu_name(0).c_str(), c.read / 1e9, c.mma / 1e12);
        const std::set<std::string> asked(argv + 1, argv + argc);
        if (asked.empty() || asked.count("products")) products();
        if (asked.count("sweep")) sweep();
        if (asked.count("training")) training();
        CUDA_CHECK(cudaDeviceSynchronize());
    } catch (const std::exception& e) {
        return fprintf(stderr, "bench_fp8: %s\n", e.what()), 1;
    }
}
