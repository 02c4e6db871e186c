// The speed of the kernels, beside the card's ceilings and, for products, beside cuBLAS (a yardstick here; no other
// program of ours uses it). Everything is timed as replays of a CUDA graph, over weights that do not fit the L2 cache.
//     build/bench_gpu MODEL.bin [ceilings] [decode] [step] [products] [few] [head] [attention] [attention-backward]
//                               [batch] [sequences] [train]       (default: all)
//                               [packed]: quantised weights stay so
//                               [tiles]: this card's row of TILE_TIMES (qwen3.cu, 10)   [sweep]: Hopper's tiles
#include "gpu/gpu.h"
#include "lab/timing.h"
#include "cpu/step_ceilings.h"
#include "model/weights.h"
#include "qwen3.cu"
#include <cublas_v2.h>

static Context ctx;

template <class T> T* gpu_array(size_t n) {
    void* p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    return (T*)p;
}
__global__ void random_kernel(bf16* p, size_t n, float scale) { // about normal
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const Philox r = philox(1, i, 0);
        p[i] = round_bf16(((float)r.v[0] + (float)r.v[1] + (float)r.v[2] - 1.5f * 4294967296.f) / 2147483648.f * scale);
    }
}
static bf16* random_array(size_t n, float scale = 1) {
    bf16* p = gpu_array<bf16>(n);
    random_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(p, n, scale);
    return p;
}

static double time_graph(int calls, const std::function<void(int)>& f) { return lab::time_graph(ctx.gpu->stream, calls, f); }

// ---- Ceilings
static double read_bandwidth, mma_rate;
static void ceilings() {
    const lab::Ceilings c = lab::measure_gpu(ctx.gpu->stream);
    read_bandwidth = c.read, mma_rate = c.mma;
    printf("ceilings: read %.0f GB/s; mma.sync out of registers %.0f TFLOP/s\n", read_bandwidth / 1e9, mma_rate / 1e12);
}

// ---- One token: every kernel of a step by itself, through all layers, then the step
struct Model {
    ModelFile file;
    Weights<bf16> weights;
    explicit Model(const char* path, bool packed = false) : file(path), weights(file, Format::PLAIN, packed) { weights.upload(ctx, file); }
};
struct State { // activations and cache for N rows and B sequences of up to `context` tokens
    Arena arena;
    Activations<bf16> a;
    KVCache<bf16> kv;
    float *rope, *logits;
    bf16* picked;
    int *token, *pos, *seq, *slot, *table, *rows;
    Batch batch;
    State(const Config& c, int N, int B, int position, int context, int logit_rows, bool fp8 = false) {
        arena.gpu = true;
        const int pages = (context + PAGE - 1) / PAGE, splits = (context - 1) / SPLIT + 1;
        for (int pass = 0; pass < 2; pass++) {
            a.plan(arena, c, N, false);
            kv.plan(arena, c, (size_t)B * pages, false, fp8);
            rope = arena.take<float>((size_t)context * c.D);
            logits = arena.take<float>((size_t)logit_rows * c.V);
            picked = arena.take<bf16>((size_t)logit_rows * c.C);
            for (int** list : {&token, &pos, &seq, &slot, &rows}) *list = arena.take<int>(N);
            table = arena.take<int>((size_t)B * pages);
            ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, B, splits, c.H, c.D));
            ctx.gpu->attention_arrived = arena.take<int>((size_t)B * c.H);
            if (!pass) arena.allocate("the benchmark");
        }
        random_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(kv.keys, (size_t)c.L * kv.layer_size, 1);
        random_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(kv.values, (size_t)c.L * kv.layer_size, 1);
        std::vector<float> angles((size_t)context * c.D);
        fill_rope(angles.data(), context, c.D, c.rope_theta, c.rope_scaling);
        std::vector<int> t(N), p(N), s(N), w(N), r(N), pages_of((size_t)B * pages);
        for (size_t i = 0; i < pages_of.size(); i++) pages_of[i] = (int)i;
        const int each = N / B; // rows of a sequence, from `position` on
        for (int n = 0; n < N; n++) {
            s[n] = n / each, p[n] = position + n % each, t[n] = (int)(philox(2, n, 0).v[0] % c.V), r[n] = n;
            w[n] = (s[n] * pages + p[n] / PAGE) * PAGE + p[n] % PAGE;
        }
        auto put = [&](auto* to, const auto& from) { CUDA_CHECK(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(*to), cudaMemcpyHostToDevice, ctx.gpu->stream)); };
        put(rope, angles), put(token, t), put(pos, p), put(seq, s), put(slot, w), put(rows, r), put(table, pages_of);
        batch = {N, B, token, pos, seq, slot, table, pages, B == N ? N : 0};
        batch.splits = splits, batch.longest = B == N ? 0 : position + each, batch.fp8 = fp8;
    }
};
// Seconds of a step, from embedding to the logits of R rows.
static double time_step(Model& m, State& s, const int* rows, int R, int calls = 1) {
    return time_graph(calls, [&](int) {
        forward(ctx, m.file.config, m.weights, s.batch, s.a, s.kv, s.rope);
        head_gpu(ctx, s.logits, s.picked, s.a.normed, rows, m.weights.head, R);
    });
}

static void decode(Model& m, int position) {
    const Config& c = m.file.config;
    State s(c, 1, 1, position, position + 64, 1);
    const Weights<bf16>& w = m.weights;
    const int calls = c.L;
    auto row = [&](const char* name, double times, double bytes, const std::function<void(int)>& f) {
        const double t = time_graph(calls, f);
        printf("  %-22s %7.2f us  x %3.0f = %7.1f us   floor %6.1f us  %5.1f%%\n", name, t * 1e6, times, t * times * 1e6,
               bytes / read_bandwidth * times * 1e6, 100 * bytes / read_bandwidth / t);
    };
    auto& a = s.a.layer[0];
    printf("one token at position %d: every kernel by itself, launched %d times in a row\n", position, calls);
    row("norm + qkv", c.L, weight_bytes(w.layers[0].qkv), [&](int l) { norm_linear_gpu(ctx, a.qkv, a.norm1, a.in, w.layers[l].norm1, w.layers[l].qkv, 1, c.eps); });
    row("attention", c.L, 4. * c.K * c.D * (position + 1), [&](int l) {
        const Layer<bf16>& y = w.layers[l];
        attend_gpu(ctx, a.attention, nullptr, a.q, s.kv.layer(l), a.qkv, y.norms(s.rope), s.batch, c.heads());
    });
    row("o + residual", c.L, weight_bytes(w.layers[0].o), [&](int l) { linear_add_gpu(ctx, a.mid, a.in, a.attention, w.layers[l].o, 1); });
    row("norm + gate, up", c.L, weight_bytes(w.layers[0].gate_up), [&](int l) { norm_linear_swiglu_gpu(ctx, a.hidden, nullptr, a.norm2, a.mid, w.layers[l].norm2, w.layers[l].gate_up, 1, c.eps); });
    row("down + residual", c.L, weight_bytes(w.layers[0].down), [&](int l) { linear_add_gpu(ctx, a.out, a.mid, a.hidden, w.layers[l].down, 1); });
    row("embed", 1, 0, [&](int) { embed_gpu(ctx, a.in, w.embed, s.batch, c.C); });
    row("last norm", 1, 0, [&](int) { rmsnorm_gpu(ctx, s.a.normed, a.out, w.norm, 1, c.C, c.eps); });
    row("head", 1, weight_bytes(w.head), [&](int) { head_gpu(ctx, s.logits, s.picked, s.a.normed, s.table, w.head, 1); });
    const double bytes = (double)step_bytes(w) + KVCache<bf16>::bytes(c, 1) / (double)PAGE * (position + 1);
    const double t = time_step(m, s, s.table, 1, 8);
    printf("  step without draw      %7.1f us, %.0f tok/s, %.1f%% of the read bandwidth\n", t * 1e6, 1 / t, 100 * bytes / read_bandwidth / t);
}

// ---- The same as one kernel: step.h. First with other stages in the ring and in flight, then by position; then of several
// tokens that follow each other.
static void step(Model& m) {
    const Config& c = m.file.config;
    Context where = ctx;
    where.one_kernel = Context::TOGETHER;
    StepRoad road(where, c, m.weights);
    StepArgs& a = road.args;
    const StepArgs planned = a;
    Draw* draw = gpu_array<Draw>(STEP_TOKENS);
    const std::vector<Draw> greedy(STEP_TOKENS, {Sampling{}, c.V});
    CUDA_CHECK(cudaMemcpy(draw, greedy.data(), sizeof(Draw) * STEP_TOKENS, cudaMemcpyHostToDevice));
    unsigned long long* best = gpu_array<unsigned long long>(STEP_TOKENS * BEST_BLOCKS);
    auto time = [&](int position, int tokens = 1) {
        State s(c, tokens, 1, position, position + 64, tokens);
        road.use(s.batch, s.kv, s.rope, s.logits, draw, best);
        const double t = time_graph(8, [&](int) { road.launch_step(); });
        road.check();
        return t;
    };
    printf("a token as one kernel, at position 100, without draw: us by (half stages in flight / in the head)\n");
    for (int stages : {std::min(6, planned.stages), planned.stages}) {
        printf("  ring of %2d", stages);
        a.stages = stages;
        for (int in_flight = 2; in_flight <= 6; in_flight++)
            for (int head : {4, 8}) {
                for (StepProduct& q : a.product) q.in_flight = &q == a.product + STEP_LOGITS ? head : in_flight;
                printf("  (%d/%d) %6.1f", in_flight, head, time(100) * 1e6);
            }
        printf("\n");
    }
    a = step_as_planned(a, planned);
    for (int position : {1, 30, 62, 100, 200, 300, 512, 2048, 8192}) {
        const double bytes = (double)step_bytes(m.weights) + KVCache<bf16>::bytes(c, 1) / (double)PAGE * (position + 1);
        const double t = time(position);
        printf("  position %5d  %7.1f us, %.0f tok/s, %.1f%% of the read bandwidth\n", position, t * 1e6, 1 / t,
               100 * bytes / read_bandwidth / t);
    }
    for (int position : {100, 1000, 4000}) {
        printf("  tokens of a step at position %d (times a token's):", position);
        const double one = time(position);
        for (int tokens : {1, 2, 3, 4, 6, 8})
            if (tokens <= road.most) {
                const double t = time(position, tokens);
                printf("  %d: %.1f us (%.2f)", tokens, t * 1e6, t / one);
            }
        printf("\n");
    }
    road.check();
}

// ---- Products
static cublasHandle_t blas() {
    static cublasHandle_t handle = nullptr;
    if (!handle) {
        cublasCreate(&handle);
        cublasSetStream(handle, ctx.gpu->stream);
        cublasSetWorkspace(handle, gpu_array<char>(64 << 20), 64 << 20);
    }
    return handle;
}
template <class T> void blas_product(T* out, const bf16* x, const bf16* w, int N, int R, int K) {
    const float one = 1, zero = 0;
    const cudaDataType_t stored = std::is_same<T, float>::value ? CUDA_R_32F : CUDA_R_16BF;
    if (cublasGemmEx(blas(), CUBLAS_OP_T, CUBLAS_OP_N, R, N, K, &one, w, CUDA_R_16BF, K, x, CUDA_R_16BF, K, &zero, out, stored, R,
                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS) DIE("cuBLAS failed");
}
struct ProductShape { const char* name; int R, K; };
static void products(bool quick) {
    const std::vector<ProductShape> shapes = {{"0.6B qkv", 4096, 1024}, {"0.6B o", 1024, 2048}, {"0.6B gate+up", 6144, 1024}, {"0.6B down", 1024, 3072},
                                       {"1.7B gate+up", 12288, 2048}, {"4B qkv", 6144, 2560}, {"4B down", 2560, 9728},
                                       {"8B qkv", 6144, 4096}, {"8B o", 4096, 4096}, {"8B gate+up", 24576, 4096}, {"8B down", 4096, 12288}};
    printf("products: ours, cuBLAS (TFLOP/s), ratio, share of mma.sync out of registers\n");
    for (int N : {512, 2048, 8192}) {
        double geometric = 0, share = 0;
        for (const ProductShape& y : shapes) {
            if (quick && y.name[0] != '0') continue;
            const size_t size = (size_t)y.R * y.K;
            const int sets = (int)std::min<size_t>(16, (200ull << 20) / (size * 2) + 1), calls = std::max(4, std::min(40, (int)(4e12 / (2. * N * (double)size))));
            bf16 *w = random_array(size * sets, 0.02f), *x = random_array((size_t)N * y.K), *out = gpu_array<bf16>((size_t)N * y.R);
            const double ours = time_graph(calls, [&](int i) {
                Linear<bf16> W;
                W.w[0] = w + size * (i % sets), W.rows[0] = y.R, W.in = y.K;
                linear_gpu(ctx, out, x, W, N);
            });
            const double theirs = time_graph(calls, [&](int i) { blas_product(out, x, w + size * (i % sets), N, y.R, y.K); });
            const double flops = 2. * N * (double)size;
            printf("  N %5d  %-13s %6.1f  %6.1f  %.2f  %.2f\n", N, y.name, flops / ours / 1e12, flops / theirs / 1e12, theirs / ours, flops / ours / mma_rate);
            geometric += std::log(theirs / ours), share += std::log(flops / ours / mma_rate);
            cudaFree(w), cudaFree(x), cudaFree(out);
        }
        const double n = quick ? 4 : (double)shapes.size();
        printf("  N %5d  geometric mean of the ratio %.3f, of the share %.3f\n", N, std::exp(geometric / n), std::exp(share / n));
    }
}
// A product x W^T, with as many copies of W as do not fit the L2 cache; its time by one tile shape.
struct TiledProduct {
    int N, out, in, sets, calls;
    bf16 *w, *x, *y;
    TiledProduct(int N, int out, int in) : N(N), out(out), in(in) {
        const size_t size = (size_t)out * in;
        sets = (int)std::min<size_t>(16, (200ull << 20) / (size * 2) + 1);
        calls = std::max(4, std::min(32, (int)(1e12 / (2. * N * (double)size))));
        w = random_array(size * sets, 0.02f), x = random_array((size_t)N * in), y = gpu_array<bf16>((size_t)N * out);
    }
    TiledProduct(const TiledProduct&) = delete;
    ~TiledProduct() { cudaFree(w), cudaFree(x), cudaFree(y); }
    const bf16* weights(int i) const { return w + (size_t)(i % sets) * out * in; }
    template <class Launch> double time(int splits, Launch launch_it) const { // microseconds
        return 1e6 * time_graph(calls, [&](int i) {
            TileArgs p = {x, weights(i), N, in, out};
            p.early = N <= 128, p.splits = splits;
            launch_it(p, StoreEpilogue<bf16>(y, out));
        });
    }
    template <class S> double tiles(int splits) const {
        return time(splits, [](const TileArgs& p, auto epilogue) { launch_tiles<S>(ctx, p, epilogue); });
    }
    template <class S> bool takes(int splits) const { // TilePlan considers it
        return splits == 1 || (splits * 128 <= in && splits_fit<S>(count_tiles<S>(N, out), splits));
    }
    // f(index, splits, microseconds) for each candidate of TilePlan.
    template <class F> void each_tile(F f) const {
        const auto shape = [&](int index, auto tile) {
            for (int s = 1; s <= 12 && takes<decltype(tile)>(s); s++) f(index, s, tiles<decltype(tile)>(s));
        };
        shape(0, Tile128x128{}), shape(1, Tile64x128{}), shape(2, Tile64x64{});
        if (N <= 128) shape(3, Tile32x64{});
    }
};
struct NamedProduct { const char* name; int out, in; };
static const NamedProduct SWEPT[] = {{"qkv", 4096, 1024}, {"o", 1024, 2048}, {"gate+up", 6144, 1024}, {"down", 1024, 3072}, {"8B down", 4096, 12288}};

// TilePlan's two times of a shape, from products of one tile and of 16 a multiprocessor; 1 us is the launch.
template <class S> void measure_tile(TileTimes& times, int index) {
    const int in = 4096, sms = ctx.gpu->sms;
    const double one = TiledProduct(8 * S::TOKENS, S::ROWS * std::max(1, sms / 8), in).template tiles<S>(1);
    const double many = TiledProduct(16 * S::TOKENS, S::ROWS * sms, in).template tiles<S>(1);
    times.of[index] = {(one - 1) * 1024 / in, (many - 1) / 16 * 1024 / in};
}
// The row of this card in TILE_TIMES, and what the plans cost that it and the built-in row make: their time over that of
// the best candidate.
static void tile_choices() {
    const int sm = ctx.gpu->sm;
    TileTimes row = tile_times(sm);
    row.sm = sm;
    measure_tile<Tile128x128>(row, 0), measure_tile<Tile64x128>(row, 1), measure_tile<Tile64x64>(row, 2), measure_tile<Tile32x64>(row, 3);
    printf("tiles: this card's row of TILE_TIMES\n    {%d, {", sm);
    for (int i = 0; i < 4; i++) printf("%s{%.2g, %.2g}", i ? ", " : "", row.of[i].alone, row.of[i].full);
    printf("}},\n  product: best candidate, of the built-in row, of this row (us; shape in the order of the row, splits)\n");
    double built_in = 0, measured = 0;
    int products = 0;
    for (int N : {24, 64, 128, 256, 512, 2048})
        for (const NamedProduct& y : SWEPT) {
            const TilePlan plans[2] = {{ctx, tile_times(sm), N, y.out, y.in}, {ctx, row, N, y.out, y.in}};
            double best = 1e30, of_plan[2] = {};
            int shape = 0, splits = 0;
            TiledProduct(N, y.out, y.in).each_tile([&](int index, int s, double us) {
                if (us < best) best = us, shape = index, splits = s;
                for (int k = 0; k < 2; k++)
                    if (plans[k].shape == index && plans[k].splits == s) of_plan[k] = us;
            });
            printf("  N %4d %-8s %8.1f (%d, %d)", N, y.name, best, shape, splits);
            for (int k = 0; k < 2; k++) printf("  %8.1f (%d, %d)", of_plan[k], plans[k].shape, plans[k].splits);
            printf("\n");
            built_in += std::log(of_plan[0] / best), measured += std::log(of_plan[1] / best), products++;
        }
    printf("  geometric mean over the best: the built-in row %.3f, this row %.3f\n", std::exp(built_in / products), std::exp(measured / products));
}
// Hopper's shapes by numbers of splits, to set the rules of HopperPlan.
static void sweep() {
    if (!ctx.gpu->hopper) return;
    for (int N : {24, 32, 64, 128, 256, 512, 2048, 8192})
        for (const NamedProduct& y : SWEPT) {
            const TiledProduct product(N, y.out, y.in);
            printf("N %5d %-8s us by splits:", N, y.name);
            const auto row = [&](const char* name, auto shape) {
                using S = decltype(shape);
                printf("  %s", name);
                for (int s = 1; s <= MOST_SPLITS && product.takes<S>(s) && (s == 1 || count_tiles<S>(N, y.out) * s <= 2 * ctx.gpu->sms); s *= 2)
                    printf(" %.1f", product.time(s, [](const TileArgs& p, auto epilogue) { launch_hopper<S>(ctx, p, epilogue); }));
            };
            if (N > 64) row("128x256", Hopper128x256{}), row("128x192", Hopper128x192{}), row("128x128", Hopper128x128{});
            if (N <= 512) row("64x64", Hopper64x64{});
            const double theirs = time_graph(product.calls, [&](int i) { blas_product(product.y, product.x, product.weights(i), N, y.out, y.in); });
            const double ours = time_graph(product.calls, [&](int i) {
                Linear<bf16> W;
                W.w[0] = product.weights(i), W.rows[0] = y.out, W.in = y.in;
                linear_gpu(ctx, product.y, product.x, W, N);
            });
            printf("  chosen %.1f, cuBLAS %.1f\n", ours * 1e6, theirs * 1e6);
        }
}
// The head alone: logits of N rows, in float32 (what is drawn from) and in bf16 (what a loss keeps), beside cuBLAS.
static void head(Model& m) {
    const Config& c = m.file.config;
    printf("head: us, TFLOP/s; ours, cuBLAS, ratio; the floor by bytes\n");
    for (int N : {64, 256, 1024, 2048}) {
        bf16* x = random_array((size_t)N * c.C);
        float* logits = gpu_array<float>((size_t)N * c.V);
        auto row = [&](const char* name, auto* out) {
            const double ours = time_graph(2, [&](int) { product_gpu(ctx, StoreEpilogue<std::decay_t<decltype(*out)>>(out, c.V), x, m.weights.head, N); });
            const double theirs = time_graph(2, [&](int) { blas_product(out, x, m.weights.head.w[0], N, c.V, c.C); });
            const double flops = 2. * N * c.V * c.C / 1e12, bytes = (double)weight_bytes(m.weights.head) + (double)sizeof *out * N * c.V;
            printf("  N %4d %-7s  %7.1f us %5.1f   %7.1f us %5.1f   %.2f   %.1f us\n", N, name, ours * 1e6, flops / ours, theirs * 1e6,
                   flops / theirs, theirs / ours, bytes / read_bandwidth * 1e6);
        };
        row("float32", logits), row("bf16", (bf16*)logits);
        cudaFree(x), cudaFree(logits);
    }
}
// All products of a step in one graph, over the weights of all layers.
static void few_tokens(Model& m) {
    const Config& c = m.file.config;
    const Weights<bf16>& w = m.weights;
    printf("all products of a step, in one graph: times the time to read the weights; ours, cuBLAS\n");
    for (int N : {1, 8, 16, 24, 32, 64, 96, 128, 192, 256}) {
        State s(c, N, N, 0, 64, N);
        auto& a = s.a.layer[0];
        bf16* wide = gpu_array<bf16>((size_t)N * c.V);
        const double floor = (double)step_bytes(w) / read_bandwidth;
        const double ours = time_graph(1, [&](int) {
            for (auto& y : w.layers) {
                linear_gpu(ctx, a.qkv, a.norm1, y.qkv, N);
                linear_add_gpu(ctx, a.mid, a.in, a.attention, y.o, N);
                product_gpu(ctx, SwigluEpilogue(a.hidden, nullptr, c.F), a.norm2, y.gate_up, N);
                linear_add_gpu(ctx, a.out, a.mid, a.hidden, y.down, N);
            }
            product_gpu(ctx, StoreEpilogue<float>(s.logits, c.V), s.a.normed, w.head, N);
        });
        const double theirs = time_graph(1, [&](int) {
            for (auto& y : w.layers) {
                blas_product(a.qkv, a.norm1, y.qkv.w[0], N, y.qkv.out(), c.C);
                blas_product(a.norm1, a.attention, y.o.w[0], N, c.C, c.H * c.D);
                blas_product(wide, a.norm2, y.gate_up.w[0], N, 2 * c.F, c.C);
                blas_product(a.norm1, a.hidden, y.down.w[0], N, c.C, c.F);
            }
            blas_product(wide, s.a.normed, w.head.w[0], N, c.V, c.C);
        });
        printf("  N %4d  %5.2f  %5.2f   (%.0f us, floor %.0f us)\n", N, ours / floor, theirs / floor, ours * 1e6, floor * 1e6);
        cudaFree(wide);
    }
}

// ---- Attention of prompts, and a batch of sequences that decode
static void attention(const Config& c) {
    printf("attention forward, causal, %d heads of %d over %d\n", c.H, c.D, c.K);
    for (int N : {2048, 8192}) {
        State s(c, N, 1, 0, N, 1);
        random_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(s.a.layer[0].q, (size_t)N * c.H * c.D, 1);
        const double t = time_graph(8, [&](int l) {
            attention_gpu(ctx, s.a.layer[0].attention, nullptr, s.a.layer[0].q, s.kv.layer(l), s.batch, c.heads());
        });
        const double flops = 2. * N * N * c.H * c.D;
        printf("  %5d tokens  %8.1f us  %6.1f TFLOP/s  %.2f of mma.sync out of registers\n", N, t * 1e6, flops / t / 1e12, flops / t / mma_rate);
    }
}
// A training step's: whole sequences. Backward counts as 2.5 times the forward pass.
static void attention_backward(const Config& c) {
    printf("attention of whole sequences, %d heads of %d over %d: forward with lse, backward\n", c.H, c.D, c.K);
    struct Size { int B, T; };
    for (Size y : {Size{16, 512}, Size{64, 512}, Size{4, 2048}, Size{1, 8192}}) {
        const int N = y.B * y.T;
        State s(c, N, y.B, 0, y.T, 1);
        bf16 *q = s.a.layer[0].q, *out = s.a.layer[0].attention, *dout = random_array((size_t)N * c.H * c.D), *dqkv = gpu_array<bf16>((size_t)N * (c.H + 2 * c.K) * c.D);
        float *lse = gpu_array<float>((size_t)N * c.H), *delta = gpu_array<float>((size_t)N * c.H);
        random_kernel<<<1024, 256, 0, ctx.gpu->stream>>>(q, (size_t)N * c.H * c.D, 1);
        const double forward = time_graph(8, [&](int l) {
            attention_gpu(ctx, out, lse, q, s.kv.layer(l), s.batch, c.heads());
        });
        attention_gpu(ctx, out, lse, q, s.kv.layer(0), s.batch, c.heads());
        const double backward = time_graph(8, [&](int) {
            attention_backward_gpu(ctx, dqkv, dout, {q, out, lse}, s.kv.layer(0), s.batch, c.heads(), delta);
        });
        const double flops = 2. * N * y.T * c.H * c.D;
        printf("  %3d x %5d tokens  forward %8.1f us  %6.1f TFLOP/s   backward %8.1f us  %6.1f TFLOP/s  %.2f of mma.sync out of registers\n",
               y.B, y.T, forward * 1e6, flops / forward / 1e12, backward * 1e6, 2.5 * flops / backward / 1e12, 2.5 * flops / backward / mma_rate);
        for (void* p : {(void*)dout, (void*)dqkv, (void*)lse, (void*)delta}) cudaFree(p);
    }
}
// By kind of cache. (What random bytes are as an FP8 cache does not matter to the time.)
static void batch(Model& m) {
    const Config& c = m.file.config;
    for (int i = 0; i < 6; i++) {
        const int B = i < 2 ? 256 : i < 4 ? 193 : 64, position = B == 193 ? 300 : 512; // (193: bench_serve's exam)
        const bool fp8 = i % 2;
        State s(c, B, B, position, position + 16, B, fp8);
        const double held = (double)KVCache<bf16>::bytes(c, 1, fp8) / PAGE * (position + 1) * B, bytes = (double)step_bytes(m.weights) + held;
        const double t = time_step(m, s, s.rows, B);
        auto& a = s.a.layer[0];
        const double attend = time_graph(c.L, [&](int l) {
            const Layer<bf16>& y = m.weights.layers[l];
            attend_gpu(ctx, a.attention, nullptr, a.q, s.kv.layer(l), a.qkv, y.norms(s.rope), s.batch, c.heads());
        });
        printf("%d sequences at position %d, %s: %.2f ms a step, %.0f tok/s, floor %.2f ms, %.1f%%; attention %.2f ms (%.0f GB/s)\n", B, position,
               fp8 ? "FP8 cache" : "bf16", t * 1e3, B / t, bytes / read_bandwidth * 1e3, 100 * bytes / read_bandwidth / t, attend * c.L * 1e3, held / attend / c.L / 1e9);
    }
}
// Steps of several sequences, as in a server of a large model. Without the sampling.
static void sequences(Model& m) {
    const Config& c = m.file.config;
    const int position = 512;
    for (int B : {1, 8, 16, 32, 64, 128}) {
        State s(c, B, B, position, position + 16, B);
        const double held = (double)KVCache<bf16>::bytes(c, 1) / PAGE * (position + 1) * B, bytes = (double)step_bytes(m.weights) + held;
        const double t = time_step(m, s, s.rows, B);
        printf("%3d sequences at position %d: %7.3f ms a step, %6.0f tok/s, floor %.3f ms, %.1f%%\n", B, position, t * 1e3, B / t,
               bytes / read_bandwidth * 1e3, 100 * bytes / read_bandwidth / t);
    }
}
// Whole prompts, without the host.
static void prompts(Model& m) {
    const Config& c = m.file.config;
    for (int N : {512, 2048, 8192}) {
        State s(c, N, 1, 0, N, 1);
        const double t = time_step(m, s, s.rows + N - 1, 1);
        double launching = 1e9, launched = 1e9; // kernel by kernel, as a session does
        for (int turn = 0; turn < 10; turn++) {
            CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream));
            const double begun = seconds();
            forward(ctx, c, m.weights, s.batch, s.a, s.kv, s.rope);
            launching = std::min(launching, seconds() - begun);
            CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream));
            launched = std::min(launched, seconds() - begun);
        }
        printf("prompt of %d without a graph: %.2f ms, %.2f of them launching\n", N, launched * 1e3, launching * 1e3);
        auto& a = s.a.layer[0];
        auto each = [&](const std::function<void(const Layer<bf16>&, int)>& f) { return time_graph(c.L, [&](int l) { f(m.weights.layers[l], l); }) * c.L * 1e3; };
        printf("prompt of %d: %.2f ms, %.0f tok/s. ", N, t * 1e3, N / t);
        printf("norm + qkv %.2f, ", each([&](const Layer<bf16>& y, int) { norm_linear_gpu(ctx, a.qkv, a.norm1, a.in, y.norm1, y.qkv, N, c.eps); }));
        printf("q/k norm + RoPE %.2f, ", each([&](const Layer<bf16>& y, int l) {
            qknorm_rope_kv_gpu(ctx, a.q, s.kv.layer(l), a.qkv, y.norms(s.rope), s.batch, c.heads()); }));
        printf("attention %.2f, ", each([&](const Layer<bf16>&, int l) {
            attention_gpu(ctx, a.attention, nullptr, a.q, s.kv.layer(l), s.batch, c.heads()); }));
        printf("o %.2f, ", each([&](const Layer<bf16>& y, int) { linear_add_gpu(ctx, a.mid, a.in, a.attention, y.o, N); }));
        printf("norm + gate, up %.2f, ", each([&](const Layer<bf16>& y, int) { norm_linear_swiglu_gpu(ctx, a.hidden, nullptr, a.norm2, a.mid, y.norm2, y.gate_up, N, c.eps); }));
        printf("down %.2f ms\n", each([&](const Layer<bf16>& y, int) { linear_add_gpu(ctx, a.out, a.mid, a.hidden, y.down, N); }));
    }
}

// ---- A training step of B sequences of 512 tokens, every token trained: with LoRA (rank 32 on everything, dropout 0.1), or
// of all parameters; its parts, and every op of a layer by itself. ample: see Activations.
struct Training {
    static constexpr int T = 512;
    Model& m;
    const Config& c;
    Weights<bf16>& w;
    const int B, N, C, rank, head_rows;
    const bool full, ample;
    Arena arena;
    Activations<bf16> a;
    Flow<bf16> d;
    KVCache<bf16> kv;
    Gradients<bf16> g;
    float *rope, *loss, *gradients = nullptr, *masters, *first, *second;
    double *norm, *pieces;
    bf16* copies;
    int *token, *pos, *seq, *slot, *table, *rows;
    uint32_t* names;
    size_t parameters = 0;
    Dropout dropout;
    Batch batch;

    Training(Model& m, int B, bool full, bool ample)
        : m(m), c(m.file.config), w(m.weights), B(B), N(B * T), C(c.C), rank(full ? 0 : 32), head_rows(full ? 4096 : 2048), full(full), ample(ample) {
        arena.gpu = true;
        plan();
        dropout = {0.1f, 1, 1, names};
        fill();
        batch = {N, B, token, pos, seq, slot, table, T / PAGE, 0};
    }
    ~Training() {
        for (auto& y : w.layers)
            for (Linear<bf16>* W : {&y.qkv, &y.o, &y.gate_up, &y.down}) W->adapter = {};
    }
    void plan() {
        for (int pass = 0; pass < 3; pass++) { // counts the parameters, then the memory, then takes it
            for (float** x : {&gradients, &masters, &first, &second}) *x = arena.take<float>(parameters);
            copies = arena.take<bf16>(parameters);
            norm = arena.take<double>(1), pieces = arena.take<double>(parameters / NORM_PIECE + 1);
            a.plan_training(arena, c, N, false, ample);
            d.plan(arena, c, N, rank, head_rows, true);
            kv.plan(arena, c, (size_t)B * T / PAGE, !ample);
            rope = arena.take<float>((size_t)T * c.D);
            loss = arena.take<float>(N);
            for (int** list : {&token, &pos, &seq, &slot, &rows}) *list = arena.take<int>(N);
            names = arena.take<uint32_t>(N);
            table = arena.take<int>((size_t)N / PAGE);
            parameters = 0;
            g = {};
            g.layer.resize(c.L);
            auto parameter = [&](float*& at, size_t n) { at = gradients + parameters, parameters += n; };
            auto dense = [&](Gradients<bf16>::OfLinear& to, Linear<bf16>& W) {
                if (full) return parameter(to.W, (size_t)W.out() * W.in);
                Adapter<bf16>& y = W.adapter;
                y.rank = rank, y.s = 2, y.modules = 1 + (W.rows[1] > 0) + (W.rows[2] > 0);
                for (int j = 0; j < y.modules; j++) y.block[j] = j, y.module[j] = j;
                const size_t E = (size_t)y.modules * rank;
                y.A = arena.take<bf16>(E * W.in), y.B = arena.take<bf16>(E * W.out()), y.h = arena.take<bf16>(E * N), y.kept = arena.take<uint32_t>(DropoutMasks::size(y.modules, W.in, N));
                parameter(to.A, E * W.in), parameter(to.B, E * W.out());
            };
            if (full) parameter(g.embed, (size_t)c.V * C), g.head = g.embed, parameter(g.norm, C);
            for (int l = 0; l < c.L; l++) {
                auto& to = g.layer[l];
                if (full) parameter(to.norm1, C), parameter(to.norm2, C), parameter(to.q_norm, c.D), parameter(to.k_norm, c.D);
                dense(to.qkv, w.layers[l].qkv), dense(to.o, w.layers[l].o), dense(to.gate_up, w.layers[l].gate_up), dense(to.down, w.layers[l].down);
            }
            if (pass == 0) arena.used = 0;
            if (pass == 1) arena.allocate("the training benchmark");
        }
    }
    void fill() {
        for (auto& y : w.layers)
            for (Linear<bf16>* W : {&y.qkv, &y.o, &y.gate_up, &y.down})
                if (!full) {
                    W->adapter.dropout = &dropout;
                    random_kernel<<<64, 256, 0, ctx.gpu->stream>>>(W->adapter.A, (size_t)W->adapter.modules * rank * W->in, 0.03f);
                    random_kernel<<<64, 256, 0, ctx.gpu->stream>>>(W->adapter.B, (size_t)W->adapter.modules * rank * W->out(), 0.03f);
                }
        std::vector<float> angles((size_t)T * c.D);
        fill_rope(angles.data(), T, c.D, c.rope_theta, c.rope_scaling);
        std::vector<int> t(N), p(N), s(N), sl(N), r(N), pages(N / PAGE);
        std::vector<uint32_t> n_(N);
        for (int n = 0; n < N; n++) t[n] = (int)(philox(3, n, 0).v[0] % c.V), p[n] = n % T, s[n] = n / T, sl[n] = r[n] = n, n_[n] = n;
        for (int i = 0; i < N / PAGE; i++) pages[i] = i;
        auto put = [&](auto* to, const auto& from) { CUDA_CHECK(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(*to), cudaMemcpyHostToDevice, ctx.gpu->stream)); };
        put(rope, angles), put(token, t), put(pos, p), put(seq, s), put(slot, sl), put(rows, r), put(table, pages), put(names, n_);
    }
    void step() {
        AdamW optimizer;
        optimizer.step = 1, optimizer.clip = 1, optimizer.lr = 1e-5f;
        auto forwards = [&] { forward(ctx, c, w, batch, a, kv, rope); };
        auto losses = [&] { loss_backward<bf16>(ctx, c, w, a, d, &g, loss, {rows, token, 1.f / N, nullptr, N}, N); };
        auto backwards = [&] { backward(ctx, c, w, batch, a, d, g, kv, rope); };
        auto optimize = [&] {
            grad_norm_gpu(ctx, norm, pieces, gradients, parameters);
            adamw_gpu(ctx, copies, masters, first, second, gradients, norm, parameters, optimizer);
            clear(ctx, gradients, parameters);
        };
        const double f = time_graph(1, [&](int) { forwards(); }), l = time_graph(1, [&](int) { losses(); }), b = time_graph(1, [&](int) { backwards(); }), o = time_graph(1, [&](int) { optimize(); });
        const double all = time_graph(1, [&](int) { forwards(), losses(), backwards(), optimize(); });
        // 2 flops a number of a matrix for y, 2 for dx, 2 for dW; attention 4 D a key and head, 2.5 times that backward.
        const double matrices = (double)step_bytes(w) / 2, keys = 4. * c.L * c.H * c.D * T / 2, adapters = full ? 0 : 6. * parameters;
        const double flops = (full ? 6 : 4) * matrices + 3.5 * keys + adapters;
        printf("%s step of %d x %d tokens%s: %.1f ms, %.0f tok/s, %.0f TFLOP/s (%.2f of mma.sync's); arena %.2f GB + weights %.2f GB. forward %.1f, head and loss %.1f, backward %.1f, AdamW %.1f ms\n",
               full ? "all-parameter" : "LoRA", B, T, ample ? ", ample memory" : "", all * 1e3, N / all, flops * N / all / 1e12, flops * N / all / mma_rate, (double)arena.size / 1e9, (double)w.gpu.size / 1e9, f * 1e3, l * 1e3, b * 1e3, o * 1e3);
    }
    void ops() {
        auto& x = a.layer[1];
        const Layer<bf16>& y = w.layers[1];
        const auto& to = g.layer[1];
        auto op = [&](const char* name, const std::function<void()>& run) {
            const double us = time_graph(4, [&](int) { run(); }) * 1e6;
            printf("    %-28s %8.1f us x %d = %6.2f ms\n", name, us, c.L, us * c.L / 1e3);
        };
        struct Product { const char* name; const Linear<bf16>& W; const Gradients<bf16>::OfLinear& to; bf16 *dx, *dy, *x; };
        op("forward qkv", [&] { norm_linear_gpu(ctx, x.qkv, x.norm1, x.in, y.norm1, y.qkv, N, c.eps); });
        op("forward attend", [&] { attend_gpu(ctx, x.attention, x.lse, x.q, kv.layer(0), x.qkv, y.norms(rope), batch, c.heads()); });
        op("forward o", [&] { linear_add_gpu(ctx, x.mid, x.in, x.attention, y.o, N); });
        op("forward gate, up", [&] { norm_linear_swiglu_gpu(ctx, x.hidden, x.gate_up, x.norm2, x.mid, y.norm2, y.gate_up, N, c.eps); });
        op("forward down", [&] { linear_add_gpu(ctx, x.out, x.mid, x.hidden, y.down, N); });
        for (const Product& k : {Product{"qkv", y.qkv, to.qkv, d.normed, d.qkv, x.norm1}, Product{"o", y.o, to.o, d.attention, d.y, x.attention},
                                 Product{"gate, up", y.gate_up, to.gate_up, d.normed, d.gate_up, x.norm2}, Product{"down", y.down, to.down, nullptr, d.y, x.hidden}}) {
            const bool last = !k.dx;
            op((std::string(k.name) + (full ? " dx" : " dh, dB, dx") + (last ? ", SwiGLU" : "")).c_str(), [&] {
                if (last) linear_backward_swiglu_gpu(ctx, d.gate_up, x.hidden, k.dx, d.h, k.to.B, k.dy, x.gate_up, k.W, N);
                else linear_backward_input_gpu(ctx, k.dx, d.h, k.to.B, k.dy, k.W, N);
            });
            if (!full) op((std::string(k.name) + " dh, dB of it").c_str(), [&] { lora_up_backward(ctx, d.h, k.to.B, last ? d.gate_up : k.dx, k.dy, k.W, N); });
            if (full) op((std::string(k.name) + " dW").c_str(), [&] { linear_backward_weight_gpu(ctx, k.to.W, k.dy, k.W.out(), k.x, N, k.W.out(), k.W.in); });
            else {
                op((std::string(k.name) + " h").c_str(), [&] { lora_down_gpu(ctx, k.W.adapter.h, k.x, k.W, N); });
                op((std::string(k.name) + " dA").c_str(), [&] { lora_backward_weight_gpu(ctx, k.to.A, d.h, k.x, k.W, N); });
            }
        }
        op("rmsnorm backward", [&] { rmsnorm_backward_gpu(ctx, d.x, d.y, x.norm2, to.norm2, d.normed, x.mid, y.norm2, N, C, c.eps); });
        op("q/k norm, RoPE again", [&] { qknorm_rope_kv_gpu(ctx, x.q, kv.layer(0), x.qkv, y.norms(rope), batch, c.heads()); });
        op("attention backward", [&] { attention_backward_gpu(ctx, d.qkv, d.attention, {x.q, x.attention, x.lse}, kv.layer(0), batch, c.heads(), d.delta); });
        op("the same, q/k norm, RoPE", [&] { attend_backward_gpu(ctx, d.qkv, {to.q_norm, to.k_norm}, d.attention, {x.q, x.attention, x.lse}, kv.layer(0), x.qkv, y.norms(rope), batch, c.heads(), d.delta); });
        const int R = std::min(head_rows, N);
        auto once = [&](const char* name, const std::function<void()>& run) {
            const double us = time_graph(4, [&](int) { run(); }) * 1e6;
            printf("    %-28s %8.1f us x %d = %6.2f ms\n", name, us, N / R, us * N / R / 1e3);
        };
        once("head and its loss", [&] { head_loss_gpu(ctx, loss, (bf16*)d.logits, d.factor, d.logits, d.picked, d.parts, a.normed, {rows, token, 1e-3f, nullptr, R}, w.head); });
        once("head backward", [&] { head_backward_gpu(ctx, d.normed, (bf16*)d.logits, (size_t)c.V, d.factor, rows, w.head, R); });
        if (full) once("head dW", [&] { linear_backward_weight_gpu(ctx, g.head, (bf16*)d.logits, (size_t)c.V, d.picked, R, c.V, C); });
    }
};
static void train(Model& m, int B, bool full, bool ample) {
    Training training(m, B, full, ample);
    training.step(), training.ops();
}

int main(int argc, char** argv) {
    if (argc < 2) return fprintf(stderr, "usage: bench_gpu MODEL.bin [decode step prompts products quick few head attention attention-backward batch sequences train packed tiles sweep]\n"), 1;
    try {
        ctx = open_gpu(0);
        cudaDeviceProp properties;
        CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
        printf("%s, sm_%d, %d multiprocessors\n", properties.name, ctx.gpu->sm, ctx.gpu->sms);
        auto wanted = [&](const char* name) {
            for (int i = 2; i < argc; i++)
                if (!strcmp(argv[i], name)) return true;
            return argc == 2 && strcmp(name, "packed") && strcmp(name, "quick") && strcmp(name, "serial") && strcmp(name, "sweep") && strcmp(name, "tiles");
        };
        ctx.gpu->partial = gpu_array<float>(PARTIAL_BYTES / 4);
        ctx.gpu->arrived = gpu_array<int>(MAX_TILES);
        CUDA_CHECK(cudaMemset(ctx.gpu->arrived, 0, MAX_TILES * sizeof(int)));
        if (wanted("serial")) ctx.gpu->overlap = false;
        ceilings();
        Model m(argv[1], wanted("packed"));
        if (wanted("decode")) decode(m, 100), decode(m, 2048);
        if (wanted("step")) step(m);
        if (wanted("prompts")) prompts(m);
        if (wanted("few")) few_tokens(m);
        if (wanted("head")) head(m);
        if (wanted("attention")) attention(m.file.config);
        if (wanted("attention-backward")) attention_backward(m.file.config);
        if (wanted("batch")) batch(m);
        if (wanted("sequences")) sequences(m);
        if (wanted("train") || wanted("train16")) train(m, 16, false, false);
        if (wanted("train")) train(m, 16, false, true), train(m, 64, false, true), train(m, 64, true, true);
        if (wanted("tiles")) tile_choices();
        if (wanted("sweep")) sweep();
        if (wanted("quick")) products(true);
        if (wanted("products")) products(false);
        CUDA_CHECK(cudaDeviceSynchronize());
    } catch (const std::exception& e) {
        return fprintf(stderr, "bench_gpu: %s\n", e.what()), 1;
    }
}
