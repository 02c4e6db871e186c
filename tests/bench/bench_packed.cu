// Products of packed weights by number of tokens: beside bf16's, and beside the same weights unpacked first. Replays of
// a CUDA graph over weights that do not fit the L2 cache.
//     build/bench_packed [8B] [0.6B] [4B] [sweep]      (default: 8B 0.6B; sweep: every tile of PackedPlan)
#include "gpu/optional_products.h"
#include "lab/timing.h"
#include "model/device.h"
#include "qwen3.cu"
#include <cmath>
#include <set>

static Context ctx;
template <class T> static T* array(size_t n) {
    void* p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    return (T*)p;
}
__global__ void random_kernel(bf16* p, size_t n, float most) { // in -most .. most
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = round_bf16(((float)philox(2, i, 0).v[0] * 0x1p-31f - 1) * most);
}
__global__ void random_floats_kernel(float* p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = (float)philox(3, i, 0).v[0] * 0x1p-31f - 1;
}
// Random bytes; of e4m3 numbers of either sign from 1/8 to 2.
__global__ void random_bytes_kernel(uint8_t* p, size_t n, bool e4m3) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const uint32_t r = philox(1, i, 0).v[0];
        p[i] = (uint8_t)(e4m3 ? (r & 0x87) | (4 + (r >> 8) % 4) << 3 : r);
    }
}
template <class T> __global__ void fill_kernel(T* p, size_t n, T x) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = x;
}

enum Kind { PLAIN, INT4, INT4_32, INT8, FP8, KINDS };
static const char* const NAMES[] = {"bf16", "INT4", "INT4/32", "INT8", "FP8"};
enum Role { QKV, ATTENTION_OUT, GATE_UP, DOWN };
struct PackedShape { const char *model, *name; int rows, in; Role role; };
static const PackedShape SHAPES[] = {
    {"8B", "qkv", 6144, 4096, QKV}, {"8B", "o", 4096, 4096, ATTENTION_OUT}, {"8B", "gate+up", 24576, 4096, GATE_UP}, {"8B", "down", 4096, 12288, DOWN},
    {"4B", "qkv", 6144, 2560, QKV}, {"4B", "o", 2560, 4096, ATTENTION_OUT}, {"4B", "gate+up", 19456, 2560, GATE_UP}, {"4B", "down", 2560, 9728, DOWN},
    {"0.6B", "qkv", 4096, 1024, QKV}, {"0.6B", "o", 1024, 2048, ATTENTION_OUT}, {"0.6B", "gate+up", 6144, 1024, GATE_UP}, {"0.6B", "down", 1024, 3072, DOWN}};
constexpr int MOST_TOKENS = 8192, MOST_IN = 12288, MOST_ROWS = 24576;

// As many copies of a matrix as do not fit the L2 cache, and the other operands.
struct Operands {
    static inline bf16 *x, *y; // of all products
    static inline float *stream, *sums;
    static inline bf16 *norm, *normed;
    const PackedShape& shape;
    Kind kind;
    size_t bytes;
    int sets;
    uint8_t* w;
    void* scales;
    Operands(const PackedShape& s, Kind kind) : shape(s), kind(kind) {
        const size_t size = (size_t)s.rows * s.in;
        bytes = kind == PLAIN ? 2 * size : kind == INT4 || kind == INT4_32 ? size / 2 : size;
        sets = (int)std::min<size_t>(16, (200ull << 20) / bytes + 1);
        w = array<uint8_t>(bytes * sets);
        if (kind == PLAIN) random_kernel<<<1024, 256, 0, ctx.gpu->stream>>>((bf16*)w, size * sets, 0.05f);
        else random_bytes_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(w, bytes * sets, kind == FP8);
        scales = array<float>(size / 32);
        if (kind == FP8) fill_kernel<<<1024, 256, 0, ctx.gpu->stream>>>((float*)scales, size / 32, 0.02f);
        else fill_kernel<<<1024, 256, 0, ctx.gpu->stream>>>((uint16_t*)scales, size / 32, (uint16_t)(kind == INT8 ? 0x3a00 : 0x1c00));
    }
    ~Operands() { cudaFree(w), cudaFree(scales); }
    Operands(const Operands&) = delete;
    Linear<bf16> weights(int i) const {
        Linear<bf16> W;
        const bool two = shape.role == GATE_UP;
        W.rows[0] = two ? shape.rows / 2 : shape.rows, W.rows[1] = two ? shape.rows / 2 : 0, W.in = shape.in;
        const uint8_t* const at = w + bytes * (i % sets);
        if (kind == PLAIN) {
            W.w[0] = (const bf16*)at;
            return W;
        }
        W.format = kind == FP8 ? Format::FP8 : kind == INT8 ? Format::INT8 : Format::INT4;
        W.group = kind == FP8 || kind == INT4 ? 128 : 32, W.group_rows = kind == FP8 ? FP8_GROUP : 1;
        W.q[0] = (const int8_t*)at, W.scale[0] = scales;
        return W;
    }
    // f(epilogue) with the product's own.
    template <class F> void with_epilogue(F f) const {
        if (shape.role == QKV) f(StoreEpilogue<bf16>(y, shape.rows));
        else if (shape.role == GATE_UP) f(SwigluEpilogue(y, nullptr, shape.rows / 2));
        else f(AddEpilogue(sums, stream, shape.rows));
    }
    // Seconds of launch(W, epilogue).
    template <class Launch> double time(int N, Launch launch_it) const {
        const double flops = 2. * N * shape.rows * shape.in;
        const int calls = std::max(4, std::min(32, (int)(1e12 / flops)));
        return lab::time_graph(ctx.gpu->stream, calls, [&](int i) {
            const Linear<bf16> W = weights(i);
            with_epilogue([&](auto epilogue) { launch_it(W, epilogue); });
        });
    }
    static void launch_product(int N, const Linear<bf16>& W, const Role role) { // as programs have it, with the norm
        if (role == QKV) linear_gpu(ctx, y, x, W, N);
        else if (role == GATE_UP) norm_linear_swiglu_gpu(ctx, y, nullptr, normed, stream, norm, W, N, 1e-6f);
        else linear_add_gpu(ctx, sums, stream, x, W, N);
    }
    double product(int N) const {
        return time(N, [&](const Linear<bf16>& W, auto) { launch_product(N, W, shape.role); });
    }
    double unpacked_first(int N) const {
        return time(N, [&](const Linear<bf16>& W, auto) {
            Linear<bf16> plain;
            plain.w[0] = unpacked(ctx, W), plain.rows[0] = W.rows[0], plain.rows[1] = W.rows[1], plain.in = W.in;
            plain.w[1] = plain.w[0] + (size_t)W.rows[0] * W.in;
            const AfterUnpacking order(ctx, W);
            launch_product(N, plain, shape.role);
        });
    }
    template <class F, int TOKENS> double tile(int N, int warpgroups, int splits) const {
        return time(N, [&](const Linear<bf16>& W, auto epilogue) {
            PackedArgs p = packed_args(W);
            p.x = x, p.N = N;
            if (epilogue.PAIR) p.out = W.rows[0];
            launch_packed_hopper<F, TOKENS>(ctx, p, {TOKENS, warpgroups, splits}, epilogue);
        });
    }
};

static void products(const char* model) {
    printf("%s, TFLOP/s: bf16; of each format: as chosen, unpacked first; the four products' time of bf16's\n", model);
    for (int N : {32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192}) {
        double sum[KINDS] = {}, first[KINDS] = {};
        for (const PackedShape& s : SHAPES) {
            if (strcmp(s.model, model)) continue;
            printf("  N %4d %-8s", N, s.name);
            for (int kind = 0; kind < KINDS; kind++) {
                const Operands o(s, (Kind)kind);
                const double t = o.product(N), flops = 2. * N * s.rows * s.in / 1e12;
                sum[kind] += t;
                printf("  %s %5.0f", NAMES[kind], flops / t);
                if (kind == PLAIN) continue;
                const double other = o.unpacked_first(N);
                first[kind] += other;
                printf(" %5.0f", flops / other);
            }
            printf("\n");
        }
        printf("  N %4d all, us: bf16 %.1f", N, sum[0] * 1e6);
        for (int kind = 1; kind < KINDS; kind++)
            printf("   %s %.1f %.1f: %.2f %.2f", NAMES[kind], sum[kind] * 1e6, first[kind] * 1e6, sum[kind] / sum[0], first[kind] / sum[0]);
        printf("\n");
        fflush(stdout);
    }
}

// Every tile, to set the times of PackedPlan: us by splits 1, 2, 4.
template <class F> static void sweep(const char* model, Kind kind, std::initializer_list<int> tokens) {
    for (const PackedShape& s : SHAPES) {
        if (strcmp(s.model, model)) continue;
        const Operands o(s, kind), plain(s, PLAIN);
        for (int N : tokens) {
            printf("sweep %s N %4d %4s %-8s", NAMES[kind], N, s.model, s.name);
            const auto row = [&](auto tile, int warpgroups) {
                constexpr int TOKENS = decltype(tile)::value;
                printf("  %dx%d", TOKENS, 64 * warpgroups);
                const int64_t tiles = (int64_t)((N + TOKENS - 1) / TOKENS) * ((s.rows + 64 * warpgroups - 1) / (64 * warpgroups));
                for (int splits = 1; splits <= 4; splits *= 2) {
                    if (splits > 1 && tiles * splits > ctx.gpu->sms) break;
                    printf(" %.2f", 1e6 * o.tile<F, TOKENS>(N, warpgroups, splits));
                }
            };
            using std::integral_constant;
            integral_constant<int, 64> t64;
            integral_constant<int, 128> t128;
            integral_constant<int, 256> t256;
            if (N <= 512) row(t64, 4), row(t64, 3), row(t64, 2), row(t64, 1);
            if (N > 64) row(t256, 2), row(t256, 1), row(t128, 3), row(t128, 2), row(t128, 1);
            printf("  chosen %.2f, first %.2f, bf16 %.2f\n", 1e6 * o.product(N), 1e6 * o.unpacked_first(N), 1e6 * plain.product(N));
            fflush(stdout);
        }
    }
}
int main(int argc, char** argv) {
    try {
        ctx = open_gpu(0);
        ctx.gpu->partial = array<float>(PARTIAL_BYTES / 4), ctx.gpu->arrived = array<int>(MAX_TILES);
        CUDA_CHECK(cudaMemset(ctx.gpu->arrived, 0, MAX_TILES * sizeof(int)));
        ctx.gpu->unpacked_numbers = (size_t)MOST_ROWS * 4096, ctx.gpu->unpacked = array<bf16>(ctx.gpu->unpacked_numbers);
        Operands::x = array<bf16>((size_t)MOST_TOKENS * MOST_IN), Operands::y = array<bf16>((size_t)MOST_TOKENS * MOST_IN);
        Operands::sums = array<float>((size_t)MOST_TOKENS * 4096), Operands::norm = array<bf16>(4096);
        random_kernel<<<16, 256, 0, ctx.gpu->stream>>>(Operands::norm, 4096, 1);
        random_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(Operands::x, (size_t)MOST_TOKENS * MOST_IN, 1);
        Operands::stream = array<float>((size_t)MOST_TOKENS * 4096), Operands::normed = array<bf16>((size_t)MOST_TOKENS * 4096);
        random_floats_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(Operands::stream, (size_t)MOST_TOKENS * 4096);
        printf("%s\n", gpu_name(0).c_str());
        const std::set<std::string> asked(argv + 1, argv + argc);
        for (const char* model : {"8B", "4B", "0.6B"})
            if (asked.count(model) || (asked.empty() && model[0] != '4')) products(model);
        if (asked.count("sweep") && ctx.gpu->hopper) {
            sweep<PackedInt4<1>>("0.6B", INT4, {24, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048});
            sweep<PackedInt4<1>>("8B", INT4, {64, 128, 256, 512, 1024, 2048});
            sweep<PackedInt8>("0.6B", INT8, {64, 128, 256, 512, 2048});
            sweep<PackedInt8>("8B", INT8, {128, 256, 512, 2048});
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    } catch (const std::exception& e) {
        return fprintf(stderr, "bench_packed: %s\n", e.what()), 1;
    }
}
