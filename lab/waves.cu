// waves.cu: the costs of a kernel beside its work: the last wave of blocks, too few loads in flight, launches, arrays
// that are written only to be read again. Each group of steps does the same work in several ways, so that the
// difference is the price. (lab/lab.h says how to run it)
//
// --size AxBxC: A terms a sum (blocks, launches), an array of B MiB (loads), C MiB (fusion). "Predicted"
// is arithmetic for an H100 (132 multiprocessors, 3.35 TB/s, launches as the course's notes measured them on an H200 of
// the same design).
#include "lab/lab.h"
#ifdef __CUDACC__
#define ONE_BY_ONE _Pragma("unroll 1")
#else
#define ONE_BY_ONE
#endif

namespace lab::waves {

#ifndef __CUDACC__ // what the emulator has not
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
#endif

// ---- Waves. Tiles of equal work, of which a multiprocessor takes one at a time: each block asks for more than half of
// its shared memory. A tile is THREADS sums of `terms` unpredictable terms: small whole numbers, so that
// float32 adds them up exactly in any order.
constexpr int THREADS = 128;
struct Tiles : Problem {
    int terms, tiles;
    size_t shared = 0; // bytes that keep a second block out
    Array<float> out;
    Tiles(int terms, int tiles) : terms(terms), tiles(tiles), out((size_t)tiles * THREADS) {
        flops = (double)tiles * THREADS * terms;
#ifdef __CUDACC__
        int bytes;
        GPU_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));
        shared = bytes / 2 + 1024;
#endif
    }
    void spoil() override { out.spoil(); }
    double error() override {
        const std::vector<float> got = out.get();
        double most = 0;
        for (size_t i = 0; i < got.size(); i++) {
            double want = 0;
            for (int k = 0; k < terms; k++) want += (i / THREADS * 7 + k * 3 + i % THREADS) & 15;
            most = std::isnan(got[i]) ? INFINITY : std::max(most, std::fabs(got[i] - want));
        }
        return most;
    }
};
struct OneWave : Tiles {
    explicit OneWave(Shape s) : Tiles(s.x, multiprocessors()) {}
};
struct OneMore : Tiles {
    explicit OneMore(Shape s) : Tiles(s.x, multiprocessors() + 1) {}
};
__device__ float terms_between(int tile, int first, int last) {
    float sum = 0;
    for (int k = first; k < last; k++) sum += (float)((tile * 7 + k * 3 + threadIdx.x) & 15);
    return sum;
}

// ---- 1 one wave. A block for each tile, a tile for each multiprocessor. The time of all others is told by this one.
// ---- 2 one more. One tile more: S + 1 blocks on S multiprocessors, and the last has the GPU for itself. Predicted:
// twice the time for 1 / 132 more work, an efficiency of 133 / 264 = 50.4%.
__global__ void a_block_a_tile(float* out, int terms) {
    out[blockIdx.x * THREADS + threadIdx.x] = terms_between(blockIdx.x, 0, terms);
}

// ---- 3 quarters. Bound before: a last wave as long as a full one. Split each tile's terms in four (split-K): 4 (S +
// 1) short blocks are 4 waves and a bit, so five waves of a quarter. Predicted: 1.25 times step 1. The price: zeros
// first, and a sum by atomics (exact here; a matrix product would lose its order of addition, or add up in a second
// kernel).
__global__ void split_tiles(float* out, int terms) {
    int part = (terms + gridDim.y - 1) / gridDim.y, first = blockIdx.y * part;
    atomicAdd(&out[blockIdx.x * THREADS + threadIdx.x], terms_between(blockIdx.x, first, min(first + part, terms)));
}

// ---- 4 stream_k. Bound before: still whole waves, though shorter ones. S blocks cut the row of all terms of all tiles
// into S equal shares, wherever a tile ends. Predicted: 133 / 132 of step 1. A tile has at most two blocks here, and
// their sums meet.
__global__ void stream_k(float* out, int terms, int tiles) {
    long all = (long)tiles * terms, at = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
    while (at < end) {
        // exercise waves-4: this block's share of all terms, from `at` to `end`: as far as the tile of `at` goes.
        // terms_between(tile, first, last) adds up terms of a tile. Another block may have the rest: atomicAdd.
        // instead: at = end;
        int tile = (int)(at / terms), first = (int)(at % terms), last = (int)min((long)terms, first + end - at);
        atomicAdd(&out[tile * THREADS + threadIdx.x], terms_between(tile, first, last));
        at += last - first;
        // end of exercise
    }
}

// ---- Loads on the way. An array is added up. By Little's law bandwidth x latency bytes have to be on the way: with
// the 435 ns that the course's notes deduce for a round of such a loop, 3.35 TB/s take 1.46 MB, 11 KB of each of 132
// multiprocessors.
struct Numbers : Problem {
    std::vector<float> numbers;
    double want = 0;
    Array<float> in, out; // out: a sum for each thread
    explicit Numbers(size_t n)
        : numbers(random_numbers(n, 1)), in(numbers), out((size_t)multiprocessors() * 16 * THREADS) {
        for (float x : numbers) want += x;
        bytes = 4. * (double)n;
    }
    explicit Numbers(Shape s) : Numbers((size_t)s.y << 18) {}
    void spoil() override { out.spoil(); }
    double error() override {
        double sum = 0;
        for (float x : out.get()) sum += x;
        return std::isnan(sum) ? INFINITY : std::fabs(sum - want);
    }
};

// ---- 5 few warps. 8 warps a multiprocessor, each thread one load at a time: 8 x 128 B = 1 KB on the way. Predicted: 1
// KB / 435 ns x 132 = 0.31 TB/s, a tenth of the bandwidth.
// ---- 6 many warps. Bound before: latency. 64 warps, which is occupancy 100%: 8 KB on the way. Predicted: eight times
// step 5.
// ---- 7 eight loads. Bound before: the same. 8 warps again, but eight independent loads a thread before the first is
// used: also 8 KB. Predicted: step 6's time at an eighth of its occupancy. What counts is bytes on the way, not warps.
// ---- 8 both. Bound before: latency still, a little. 64 KB are more than enough. Predicted: above 90% of the ceiling.
template <int LOADS> __global__ void add_up(const float* in, float* out, size_t n) {
    size_t stride = (size_t)gridDim.x * blockDim.x, thread = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    float sum = 0, v[LOADS];
    ONE_BY_ONE for (size_t i = thread; i < n; i += LOADS * stride) {
        // exercise waves-7: LOADS numbers, `stride` apart, are asked for before the first is added up; zeros past the
        // end.
        // A loop that loads and a loop that adds: then LOADS loads of a thread are on the way at once.
        UNROLL for (int k = 0; k < LOADS; k++) v[k] = i + k * stride < n ? in[i + k * stride] : 0;
        UNROLL for (int k = 0; k < LOADS; k++) sum += v[k];
        // end of exercise
    }
    out[thread] = sum;
}

// ---- Launches. LAUNCHES times: x <- x / 2 + 1 of a few numbers, each time by one block. Nothing that could take time.
constexpr int LAUNCHES = 100, FEW = 1000;
struct Chain : Problem {
    std::vector<float> first;
    Array<float> x;
    Chain() : first(random_numbers(FEW, 1)), x(first) { flops = 2. * LAUNCHES * FEW; }
    void spoil() override { // in place: a step begins with the first numbers
        GPU_CHECK(cudaMemcpy(x, first.data(), FEW * sizeof(float), cudaMemcpyHostToDevice));
    }
    double error() override {
        std::vector<float> want = first;
        for (int r = 0; r < LAUNCHES; r++)
            for (float& v : want) v = v * 0.5f + 1;
        return largest_difference(x.get(), want);
    }
};
struct Launched : Chain { // by the host, one after the other
    explicit Launched(Shape) { captured = false; }
};
struct Graphed : Chain { // as nodes of a graph
    explicit Graphed(Shape) {}
};
__global__ void halve(float* x, int n, int times) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    for (int t = 0; t < times; t++) v = v * 0.5f + 1;
    x[i] = v;
}
// ---- 9 launches. From the host, one after the other, in one stream. Predicted: 2.8 us each, 0.28 ms: the host is what
// takes so long.
// ---- 10 a graph. Bound before: the host. The same kernels as nodes of a graph: one call of the host. Predicted: 1.2
// to 1.6 us each: a node starts when the one before has ended and its writes are seen.
// ---- 11 one kernel. Bound before: the start of a kernel. The loop moves inside, x stays in a register. Predicted: one
// launch, 3 us, a fiftieth of the graph. (Possible since no thread needs another's x; else see grid.sync in the notes.)
inline void halve_often(Chain& c, int launches) {
    for (int l = 0; l < launches; l++)
        launch(halve, blocks_for(FEW, 1024), 1024, 0, c.x, FEW, LAUNCHES / launches);
}

// ---- Streams. PIECES kernels of a few blocks each, which do not depend on each other: a multiprocessor's work in
// each.
constexpr int PIECES = 8;
struct Pieces : Tiles {
    explicit Pieces(Shape s) : Tiles(s.x, std::max(1, multiprocessors() / PIECES) * PIECES) {}
#ifdef __CUDACC__
    cudaStream_t streams[PIECES];
    cudaEvent_t begun, done[PIECES];
    bool there = false;
    ~Pieces() override {
        for (int i = 0; i < PIECES && there; i++) cudaStreamDestroy(streams[i]), cudaEventDestroy(done[i]);
        if (there) cudaEventDestroy(begun);
    }
#endif
};
__global__ void piece(float* out, int terms, int first_tile) {
    int tile = first_tile + blockIdx.x;
    out[tile * THREADS + threadIdx.x] = terms_between(tile, 0, terms);
}
// ---- 12 one stream. Each kernel fills an eighth of the GPU and waits for the one before: predicted eight times step
// 1.
inline void one_stream(Pieces& p) {
    const int each = p.tiles / PIECES;
    for (int i = 0; i < PIECES; i++) launch(piece, each, THREADS, p.shared, p.out, p.terms, i * each);
}
// ---- 13 eight streams. Bound before: an unnecessary order. A stream for each kernel; all begin after an
// event of the first stream, which waits for an event of each (in a graph: eight nodes side by side). Predicted: step
// 1's time.
inline void eight_streams(Pieces& p) {
#ifdef __CUDACC__
    const cudaStream_t main = stream;
    if (!p.there) {
        p.there = true;
        GPU_CHECK(cudaEventCreateWithFlags(&p.begun, cudaEventDisableTiming));
        for (int i = 0; i < PIECES; i++) {
            GPU_CHECK(cudaStreamCreateWithFlags(&p.streams[i], cudaStreamNonBlocking));
            GPU_CHECK(cudaEventCreateWithFlags(&p.done[i], cudaEventDisableTiming));
        }
    }
    GPU_CHECK(cudaEventRecord(p.begun, main));
    for (int i = 0; i < PIECES; i++) {
        GPU_CHECK(cudaStreamWaitEvent(stream = p.streams[i], p.begun)); // (launch() goes to `stream`)
        const int each = p.tiles / PIECES;
        launch(piece, each, THREADS, p.shared, p.out, p.terms, i * each);
        GPU_CHECK(cudaEventRecord(p.done[i], stream));
        GPU_CHECK(cudaStreamWaitEvent(main, p.done[i]));
    }
    stream = main;
#else
    one_stream(p);
#endif
}

// ---- Fusion. y = silu(g) u, in bf16: g, u, y of n numbers each.
struct Gate : Problem {
    size_t n;
    std::vector<float> gates, ups;
    Array<__nv_bfloat162> g, u, t, y;
    static std::vector<__nv_bfloat162> pairs(const std::vector<float>& v) {
        std::vector<__nv_bfloat162> p(v.size() / 2);
        for (size_t i = 0; i < p.size(); i++) p[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        return p;
    }
    explicit Gate(size_t pairs_of)
        : n(2 * pairs_of), gates(random_numbers(n, 1)), ups(random_numbers(n, 2)), g(pairs(gates)), u(pairs(ups)),
          t(pairs_of), y(pairs_of) {
        bytes = 6. * (double)n;
        tolerance = 1. / 256; // |y| < 3 / 4, so that a unit in bf16's last place is 1 / 256 at most; t is rounded too
    }
    explicit Gate(Shape s) : Gate((size_t)s.z << 18) {}
    void spoil() override { t.spoil(), y.spoil(); }
    double error() override {
        const auto got = y.get();
        double most = 0;
        for (size_t i = 0; i < n; i++) {
            const double x = gates[i], d = std::fabs(__bfloat162float(i % 2 ? got[i / 2].y : got[i / 2].x) -
                                                     x / (1 + std::exp(-x)) * ups[i]);
            if (!(d <= most)) most = std::isnan(d) ? INFINITY : d;
        }
        return most;
    }
};
// ---- 14 two kernels. The first reads g and writes t, the second reads t and u and writes y: 5 n numbers. Predicted:
// memory bounds both; for n = 67M (128 MiB each) 671 MB are 0.20 ms (RTX 4090: 0.67 ms).
__global__ void silu(const __nv_bfloat162* g, __nv_bfloat162* t, size_t n2) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n2) return;
    float2 a = __bfloat1622float2(g[i]);
    a.x = a.x / (1.0f + __expf(-a.x));
    a.y = a.y / (1.0f + __expf(-a.y));
    t[i] = __float22bfloat162_rn(a);
}
__global__ void multiply(const __nv_bfloat162* t, const __nv_bfloat162* u, __nv_bfloat162* y, size_t n2) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n2) return;
    float2 a = __bfloat1622float2(t[i]), b = __bfloat1622float2(u[i]);
    a.x *= b.x;
    a.y *= b.y;
    y[i] = __float22bfloat162_rn(a);
}
// ---- 15 swiglu. Bound before: bytes, two of five for t. One kernel: t never leaves its register. Predicted: 3 / 5 of
// the time, 0.12 ms; and one rounding less.
__global__ void swiglu(const __nv_bfloat162* g, const __nv_bfloat162* u, __nv_bfloat162* y, size_t n2) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n2) return;
    float2 a = __bfloat1622float2(g[i]), b = __bfloat1622float2(u[i]);
    // exercise waves-15: y = silu(g) u for the two numbers of a pair, rounded once: silu(x) = x / (1 + e^-x).
    // __expf is e^x; __float22bfloat162_rn rounds a float2 to a pair of bf16.
    a.x = a.x / (1.0f + __expf(-a.x)) * b.x;
    a.y = a.y / (1.0f + __expf(-a.y)) * b.y;
    y[i] = __float22bfloat162_rn(a);
    // end of exercise
}

// ---- Recomputation. Forward y = silu(g) u, then backward: from dy the gradients dg and du, in float32. With s = 1 /
// (1 + exp(-g)): du = dy g s, dg = dy u (s + g s (1 - s)).
struct Training : Problem {
    size_t n;
    std::vector<float> gates, ups, grads;
    Array<float> g, u, dy, y, s, dg, du;
    explicit Training(size_t n)
        : n(n), gates(random_numbers(n, 1)), ups(random_numbers(n, 2)), grads(random_numbers(n, 3)), g(gates), u(ups),
          dy(grads), y(n), s(n), dg(n), du(n) {
        bytes = 4. * 8 * (double)n;
        tolerance = 1e-6; // a few units in the last place of numbers below 1, and __expf's
    }
    explicit Training(Shape s) : Training((size_t)s.z << 18) {}
    void spoil() override { y.spoil(), s.spoil(), dg.spoil(), du.spoil(); }
    double error() override {
        std::vector<double> wy(n), wg(n), wu(n);
        for (size_t i = 0; i < n; i++) {
            const double x = gates[i], s = 1 / (1 + std::exp(-x)), d = grads[i];
            wy[i] = x * s * ups[i], wu[i] = d * x * s, wg[i] = d * ups[i] * (s + x * s * (1 - s));
        }
        const auto differ = [](const Array<float>& a, const std::vector<double>& want) {
            const auto got = a.get();
            return largest_difference(std::vector<double>(got.begin(), got.end()), want);
        };
        return std::max({differ(y, wy), differ(dg, wg), differ(du, wu)});
    }
};
template <bool SAVED> __global__ void forward(const float* g, const float* u, float* y, float* saved, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = 1.0f / (1.0f + __expf(-g[i]));
    if (SAVED) saved[i] = s;
    y[i] = g[i] * s * u[i];
}
template <bool SAVED>
__global__ void backward(const float* dy, const float* g, const float* u, const float* saved, float* dg, float* du,
                         size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = SAVED ? saved[i] : 1.0f / (1.0f + __expf(-g[i]));
    // exercise waves-17: the gradients of y = g s u, with s = 1 / (1 + e^-g), from dy.
    // The slope of g s is s + g s (1 - s).
    du[i] = dy[i] * g[i] * s;
    dg[i] = dy[i] * u[i] * (s + g[i] * s * (1.0f - s));
    // end of exercise
}
// ---- 16 saved. Forward writes s, backward reads it: 4 + 6 = 10 numbers for each of n. Predicted: 34M numbers (128 MiB
// an array) x 40 B = 1.34 GB, 0.40 ms (RTX 4090: 1.3 ms).
// ---- 17 recomputed. Bound before: bytes, two of ten for s. Backward computes s once more: 8 numbers, and 4 n bytes
// less memory until then. A float read costs what 4 B x 67 TFLOP/s / 3.35 TB/s = 80 flops cost; s costs some 20.
// Predicted: 0.32 ms.
template <bool SAVED> void train(Training& t) {
    launch(forward<SAVED>, blocks_for(t.n, 256), 256, 0, t.g, t.u, t.y, t.s, t.n);
    launch(backward<SAVED>, blocks_for(t.n, 256), 256, 0, t.dy, t.g, t.u, t.s, t.dg, t.du, t.n);
}

template <int LOADS> void add_up_by(Numbers& a, int warps) { // warps a multiprocessor
    a.out.clear();
    launch(add_up<LOADS>, multiprocessors() * warps * 32 / THREADS, THREADS, 0, a.in, a.out, a.numbers.size());
}
inline Laboratory laboratory() {
    Laboratory l("waves", "what a kernel pays beside its work: waves, latency, launches, bytes", {1 << 16, 512, 128},
                 {50, 1, 1});
    const char *cycles = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
               *warps = "sm__warps_active.avg.pct_of_peak_sustained_active",
               *time = "gpu__time_duration.sum", *memory = "dram__bytes.sum";
    l.step<OneWave>("one wave", "a tile for each multiprocessor", [](OneWave& t) {
        launch(a_block_a_tile, t.tiles, THREADS, t.shared, t.out, t.terms);
    }, FMA, cycles, "multiprocessors work nearly all the time");
    l.step<OneMore>("one more", "one tile more", [](OneMore& t) {
        launch(a_block_a_tile, t.tiles, THREADS, t.shared, t.out, t.terms);
    }, FMA, cycles, "half of the time, on average");
    l.step<OneMore>("quarters", "each tile in four blocks", [](OneMore& t) {
        t.out.clear();
        launch(split_tiles, dim3(t.tiles, 4), THREADS, t.shared, t.out, t.terms);
    }, FMA, cycles, "four fifths");
    l.step<OneMore>("stream_k", "equal shares of all terms", [](OneMore& t) {
        t.out.clear();
        launch(stream_k, multiprocessors(), THREADS, t.shared, t.out, t.terms, t.tiles);
    }, FMA, cycles, "nearly all of it again");
    l.step<Numbers>("few warps", "8 warps a multiprocessor, one load at a time", [](Numbers& a) { add_up_by<1>(a, 8); },
                    READ, warps, "an eighth");
    l.step<Numbers>("many warps", "64 warps", [](Numbers& a) { add_up_by<1>(a, 64); }, READ, warps, "near 100%");
    l.step<Numbers>("eight loads", "8 warps, eight loads on the way", [](Numbers& a) { add_up_by<8>(a, 8); }, READ,
                    warps, "an eighth again; now look at the time");
    l.step<Numbers>("both", "64 warps, eight loads on the way", [](Numbers& a) { add_up_by<8>(a, 64); }, READ,
                    "dram__throughput.avg.pct_of_peak_sustained_elapsed", "the memory's share");
    l.step<Launched>("launches", "100 kernels, one by one by the host", [](Launched& c) { halve_often(c, LAUNCHES); },
                     FMA, time, "a microsecond or two each: the rest of the step's time is the host's");
    l.step<Graphed>("a graph", "the same 100 kernels as a graph", [](Graphed& c) { halve_often(c, LAUNCHES); }, FMA,
                    time, "as before: the kernels are the same");
    l.step<Graphed>("one kernel", "the loop inside", [](Graphed& c) { halve_often(c, 1); }, FMA, time, "one kernel");
    l.step<Pieces>("one stream", "eight kernels, one after the other", one_stream, FMA, cycles, "an eighth");
    l.step<Pieces>("eight streams", "side by side", eight_streams, FMA, time,
                   "nothing: ncu runs kernels one by one. nsys profile shows them side by side");
    l.step<Gate>("two kernels", "silu, then a product", [](Gate& p) {
        launch(silu, blocks_for(p.n / 2, 256), 256, 0, p.g, p.t, p.n / 2);
        launch(multiply, blocks_for(p.n / 2, 256), 256, 0, p.t, p.u, p.y, p.n / 2);
    }, COPY, memory, "both together: 10 n bytes");
    l.step<Gate>("swiglu", "fused", [](Gate& p) {
        launch(swiglu, blocks_for(p.n / 2, 256), 256, 0, p.g, p.u, p.y, p.n / 2);
    }, COPY, memory, "6 n bytes");
    l.step<Training>("saved", "forward saves what backward needs", train<true>, COPY, memory, "both: 40 n bytes");
    l.step<Training>("recomputed", "backward computes it once more", train<false>, COPY, memory, "32 n bytes");
    l.exercise("A product of 4,096 x 4,096 in tiles of 128 x 128 on 132 multiprocessors, one tile at a time each: "
               "how many per cent of the multiprocessors' time is used?", [] { return 100. * 1024 / (8 * 132); });
    l.exercise("Bandwidth 1.0 TB/s, latency 500 ns, 128 multiprocessors: how many warps, each with one load of 128 "
               "bytes on the way, must a multiprocessor have?", [] { return 1e12 * 500e-9 / 128 / 128; });
    l.exercise("82.6 TFLOP/s and 1.008 TB/s (RTX 4090): up to how many flops may a number of 4 bytes take to be "
               "computed once more rather than read?", [] { return 4 * 82.6e12 / 1.008e12; });
    return l;
}
} // namespace lab::waves
#undef ONE_BY_ONE

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::waves::laboratory().main(argc, argv); }
#endif
