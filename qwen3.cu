/* qwen3.cu: the Qwen3 language model, every op of it, in one file that reads from top to bottom.

   Build:  make                 with nvcc where it is found, else with g++ alone (this file is also plain C++17)
   Run:    ./qwen3 model.bin -i "What is a warp?"

   What happens to a prompt: text becomes token ids (tokenizer.h); `forward` turns ids into one vector a
   token; the head turns the vector of the last token into one score (logit) for each word of the vocabulary;
   the sampler draws an id; that id is fed back. The keys and values of all past tokens stay in the KV cache,
   so that each step costs one token.

   Notation    N tokens   C channels (hidden size)   H query heads   K key/value heads   D head size
               F feed-forward size   V vocabulary rows   L layers   B sequences   G = H / K
               (N,C) is a row-major array of N rows of C numbers.
   Types       T is what is stored: bf16, float or double. acc<T> is what sums are kept in: float (double for
               double). The residual stream x is acc<T>; everything else between ops is T.

   Contracts
   - Every op has a CPU definition `op_cpu`, which is its meaning: tests hold to it. Outputs come first, then
     inputs, then sizes. RUN(op, ...) is the one place that chooses between it and `op_gpu`, its CUDA kernel, which
     stands below it. Kernels are for T = bf16 and any GPU from sm_80 on.
   - A ragged batch is the only batch: N tokens of B sequences, packed (see Batch).
   - On the CPU the bits of a row never depend on the other rows of the batch, nor on the number of threads: each
     sum is taken in one fixed order. (For that the Makefile turns the compiler's own choice between a * b + c in one
     or two roundings off: -ffp-contract=off.) On the GPU the same batch gives the same bits; with `invariant` a row's
     do not depend on its batch there either.
   - What a user can get wrong is thrown as Error: one line that names the file and the fault.
   - Nothing is allocated inside `forward`: a Session plans its memory once. (The CPU's products and attention
     keep scratch of their own, which grows to the largest batch and stays.)

   Easy to get wrong: RoPE turns the halves (i, i + D/2), not neighbours; q and k are RMS-normalised head by
   head *before* RoPE; D is not C / H; a tied head is the embedding; there are several end tokens; ids from
   the tokenizer's count up to V have rows but do not exist, and must not be drawn.

   Contents
   1 Platform          bf16, RUN, lanes, exp, CPU roads, Philox, memory, time
   2 Model file        config, safetensors, validation, weights
   3 Ops               embed, rmsnorm, products, q/k norm + RoPE, attention, SwiGLU, head
   4 Adapters          LoRA in PEFT's format: read, validate, attach
   5 Forward           activations, KV cache, the model
   6 Sampler, session  penalties, sampling, stop strings, generate
                       (a reader of inference stops here)
   7 Backward ops      in reverse order, each quoting its forward line; AdamW
   8 Backward          of the model: from the loss to the gradient of every parameter
   9 main
*/
#include "file.h"
#include "sj.h"
#include "tokenizer.h"
#include "chat_template.h"
#include <algorithm>
#include <chrono>
#include <cfloat>
#include <climits>
#include <cmath>
#include <csignal>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#endif

// ================================================================================================ 1 Platform

#ifdef __CUDACC__
#define BOTH __host__ __device__ // for the CPU and the GPU alike
#else
#define BOTH
#endif

// The upper half of a float: 8 bits of exponent, 7 of fraction.
struct bf16 {
    uint16_t bits;
};

BOTH inline float to_acc(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline float to_acc(float x) { return x; }
inline double to_acc(double x) { return x; }

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline bf16 to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t nearest = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
    return {(uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : nearest)}; // a choice, not a jump: loops vectorise
}

inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff, u;
    if (exponent == 31) u = sign | 0x7f800000 | fraction << 13;
    else if (exponent) u = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        float f = std::ldexp((float)fraction, -24); // subnormal or zero: fraction * 2^-24, exact
        memcpy(&u, &f, 4);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}

template <class T> struct Acc { using type = T; };
template <> struct Acc<bf16> { using type = float; };
template <class T> using acc = typename Acc<T>::type;

template <class T> inline T to_stored(acc<T> x) {
    if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
    else return x;
}

// Where and how ops run.
struct Context {
    bool gpu = false;
    bool invariant = false; // on the GPU: a row's bits do not depend on its batch, at some cost in speed
    const volatile sig_atomic_t* stop = nullptr; // forward gives up between layers when this becomes non-zero
#ifdef __CUDACC__
    cudaStream_t stream = nullptr;
    int sm = 0, sms = 0;         // 10 x compute capability; multiprocessors
    bool hopper = false;         // sm_90a, and this binary was built for it: wgmma
    bool overlap = false;        // sm_90 and up: a kernel may start before the one ahead of it has ended
    float* partial = nullptr;    // scratch of products whose sums several blocks share, PARTIAL_BYTES
    int* arrived = nullptr;      // ... and how many of them are done: (MAX_TILES), zero between kernels
    float* attention = nullptr;  // the same for attention, see attention_scratch
    int* attention_arrived = nullptr;
    int splits = 1;              // pieces of SPLIT keys that decode attention launches: enough for the longest sequence
    int longest = 0;             // keys of the longest sequence of several tokens; 0: attention need not know
#endif
};

#ifdef __CUDACC__
template <class T> constexpr bool HAS_KERNELS = std::is_same_v<T, bf16>;
#else
template <class T> constexpr bool HAS_KERNELS = false;
#endif
#define RUN(op, ...) do { \
        if constexpr (HAS_KERNELS<T>) if (ctx.gpu) { op##_gpu(ctx, __VA_ARGS__); break; } \
        op##_cpu(__VA_ARGS__); \
    } while (0)

// Inlined wherever it is used, so that it is compiled for the instruction set of the function that uses it.
#define INLINE inline __attribute__((always_inline))

// ---- Lanes: 16 numbers that are computed on at once. The compilers' own vector type: one zmm register with
// AVX-512, two ymm with AVX2, four xmm on any x86-64.
constexpr int LANES = 16;
typedef float float16v __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef double double16v __attribute__((vector_size(LANES * sizeof(double)), may_alias));
typedef uint16_t ushort16v __attribute__((vector_size(LANES * sizeof(uint16_t)), may_alias));
typedef uint32_t uint16v __attribute__((vector_size(LANES * sizeof(uint32_t)), may_alias));
typedef int32_t int16v __attribute__((vector_size(LANES * sizeof(int32_t)), may_alias));
typedef int8_t char16v __attribute__((vector_size(LANES), may_alias));
template <class A> struct LanesOf;
template <> struct LanesOf<float> { using type = float16v; };
template <> struct LanesOf<double> { using type = double16v; };
template <class T> using lanes = typename LanesOf<acc<T>>::type;

INLINE void load_lanes(float16v& v, const bf16* p) {
    ushort16v h;
    memcpy(&h, p, sizeof h);
    uint16v u = __builtin_convertvector(h, uint16v) << 16;
    memcpy(&v, &u, sizeof v);
}
template <class A> INLINE void load_lanes(lanes<A>& v, const A* p) { memcpy(&v, p, sizeof v); }
template <class V> INLINE void load_lanes(V& v, const int8_t* p) {
    char16v c;
    memcpy(&c, p, sizeof c);
    v = __builtin_convertvector(__builtin_convertvector(c, int16v), V);
}

// The next n <= 16 numbers of a row, zeros behind them.
template <class V, class T> INLINE void load_some(V& v, const T* p, int n) {
    if (n == LANES) return load_lanes(v, p);
    T whole[LANES] = {};
    memcpy((void*)whole, p, (size_t)n * sizeof(T));
    load_lanes(v, whole);
}

// The sum of 16 lanes, always in this order: halves onto each other.
template <class V> INLINE auto sum_lanes(const V& v) {
    std::decay_t<decltype(v[0])> s[LANES];
    memcpy(s, &v, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

// sum_i a[i] b[i], i < n: lane l sums i = l, l + 16, l + 32, ..., and sum_lanes adds the lanes.
template <class A, class B> INLINE acc<A> dot(const A* a, const B* b, int n) {
    lanes<A> sum = {}, u, v;
    for (int i = 0; i < n; i += LANES) {
        load_some(u, a + i, std::min(LANES, n - i));
        load_some(v, b + i, std::min(LANES, n - i));
        sum += u * v;
    }
    return sum_lanes(sum);
}

// e^x from multiplications, additions and exponent bits only, 16 lanes at once. Relative error under 3e-7; 0 below
// -87; x <= 88. e^x = 2^k e^r with k = round(x / ln 2), |r| <= ln 2 / 2, and e^r by its Taylor series up to r^7.
INLINE void exp_lanes(float16v& x) {
    const float16v shifted = x * 1.44269504f + 12582912.f; // 1.5 * 2^23: adding it rounds to an integer,
    const float16v k = shifted - 12582912.f;
    const float16v r = x - k * 0.693145752f - k * 1.42860677e-6f; // ln 2 in two parts, the first with few bits
    float16v p = r * (1.f / 5040) + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    const uint16v power = (uint16v)p + ((uint16v)shifted << 23); // which the low bits of `shifted` then hold
    x = (float16v)(power & ~(uint16v)(x < -87.f)); // (so that a NaN stays one)
}
INLINE void exp_lanes(double16v& x) {
    for (int l = 0; l < LANES; l++) x[l] = std::exp(x[l]);
}

// The same for one float, every step one fmaf: the bits are the same on every machine and on a GPU, which the
// sampler needs.
BOTH inline float exp_exact(float x) {
    const float shifted = fmaf(x, 1.44269504f, 12582912.f), k = shifted - 12582912.f;
    const float r = fmaf(k, -1.42860677e-6f, fmaf(k, -0.693145752f, x));
    float p = fmaf(1.f / 5040, r, 1.f / 720);
    p = fmaf(p, r, 1.f / 120);
    p = fmaf(p, r, 1.f / 24);
    p = fmaf(p, r, 1.f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.f);
    p = fmaf(p, r, 1.f);
    uint32_t bits, shift;
    memcpy(&shift, &shifted, 4);
    memcpy(&bits, &p, 4);
    bits += shift << 23;
    memcpy(&p, &bits, 4);
    return x < -87.f ? 0.f : p;
}

// ---- CPU roads: what instructions there are is asked when the program starts. Ops whose plain loop is too slow
// have twins for them; the others are compiled for the build's own target.
enum CpuRoad { CPU_PLAIN, CPU_AVX2, CPU_AVX512, CPU_AVX512_BF16, CPU_AMX };
inline const char* cpu_road_name(int road) {
    static const char* names[] = {"plain", "avx2", "avx512", "avx512bf16", "amx"};
    return names[road];
}

// Older compilers do not know the instructions of bf16 and AMX; they, and other processors, get the plain loops.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_TWINS
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")))
#define TARGET_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))
#define TARGET_AMX __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")))
#endif

// The best road this CPU has.
inline CpuRoad best_cpu_road() {
#ifdef HAVE_TWINS
    unsigned a, b, c, d, a1 = 0, b1, c1, d1;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CPU_PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq")) return CPU_AVX2;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return CPU_AVX512;
    if (!(a1 >> 5 & 1) || !(c >> 11 & 1)) return CPU_AVX512; // AVX512_BF16, AVX512_VNNI
    const bool amx = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1); // AMX-BF16, AMX-TILE, AMX-INT8
    // Linux gives a process the tile registers when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return amx && syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? CPU_AMX : CPU_AVX512_BF16;
#else
    return CPU_PLAIN;
#endif
}
inline CpuRoad cpu_road = best_cpu_road(); // for the whole process; a test or --cpu may take a lesser one

// ---- Random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
// A pure function of (counter, key): any draw can be made anywhere, in any order, on CPU or GPU.
struct Philox {
    uint32_t v[4];
};
BOTH inline Philox philox(uint64_t seed, uint64_t counter, uint64_t stream) {
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53 * c[0], b = (uint64_t)0xCD9E8D57 * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
        memcpy(c, next, sizeof c);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return {{c[0], c[1], c[2], c[3]}};
}
// Streams keep the draws of different purposes apart.
enum RandomStream : uint64_t { STREAM_SAMPLE = 1, STREAM_SYNTHESIZE = 2, STREAM_DROPOUT = 3, STREAM_INIT = 4, STREAM_SHUFFLE = 5 };

// Dropout of one training step. A mask is never stored: it is a function of what it is for. `token` numbers the tokens
// of the step by row and position, so that masks depend neither on packing nor on accumulation.
struct Dropout {
    float p;               // probability that a number is dropped
    uint64_t seed;
    uint32_t step;
    const uint32_t* token; // (N)
};
// Which of columns 8 k8 .. 8 k8 + 7 of a token are kept for a module: bit i is column 8 k8 + i. Eight numbers of 16
// bits out of one Philox; kept is what is not below p.
BOTH inline uint32_t dropout_mask(const Dropout& d, uint32_t token, uint32_t module, uint32_t k8) {
    const Philox r = philox(d.seed, (uint64_t)token << 32 | module << 16 | k8, STREAM_DROPOUT | (uint64_t)d.step << 8);
    const uint32_t limit = (uint32_t)(d.p * 65536 + 0.5f);
    uint32_t kept = 0;
    for (int i = 0; i < 8; i++) kept |= (uint32_t)((r.v[i / 2] >> i % 2 * 16 & 0xffff) >= limit) << i;
    return kept;
}

// ---- The GPU: errors, launches, and the handful of PTX instructions that kernels are made of
#ifdef __CUDACC__
#define CUDA_CHECK(call) cuda_check((call), #call)
inline void cuda_check(cudaError_t e, const char* call) {
    if (e != cudaSuccess) DIE("%.60s: %s", call, cudaGetErrorString(e));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA
__device__ int has_wgmma = 1; // whether the code that this GPU runs has the instructions of sm_90a
#else
__device__ int has_wgmma = 0;
#endif

// The first GPU, or one line that says why there is none.
inline Context open_gpu() {
    int n = 0, driver = 0, runtime = 0;
    const cudaError_t e = cudaGetDeviceCount(&n);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) DIE("no GPU here: there is no NVIDIA driver");
    if (e == cudaErrorInsufficientDriver || (e != cudaSuccess && driver / 1000 < runtime / 1000))
        DIE("the GPU's driver is for CUDA %d.%d, this program needs %d.%d", driver / 1000, driver % 100 / 10, runtime / 1000, runtime % 100 / 10);
    if (e != cudaSuccess || n == 0) DIE("no GPU here: %s", e == cudaSuccess ? "the driver sees none" : cudaGetErrorString(e));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    Context ctx;
    ctx.sm = properties.major * 10 + properties.minor;
    if (ctx.sm < 80) DIE("%s is sm_%d; the kernels need sm_80 (Ampere) or later", properties.name, ctx.sm);
    ctx.gpu = true;
    ctx.sms = properties.multiProcessorCount;
    ctx.overlap = ctx.sm >= 90;
    int wgmma = 0;
    CUDA_CHECK(cudaMemcpyFromSymbol(&wgmma, has_wgmma, sizeof wgmma));
    ctx.hopper = wgmma;
    CUDA_CHECK(cudaStreamCreateWithFlags(&ctx.stream, cudaStreamNonBlocking));
    return ctx;
}

// Launches a kernel. With `overlap` (programmatic dependent launch) its blocks may start as soon as every block of
// the kernel ahead has called let_next_start: what comes before its own wait_for_previous then runs beside that one.
// Before that wait a kernel may read only what no kernel of the same forward writes: weights, the batch, keys and
// values of earlier calls. Every block waits, even one with nothing to do: so the kernel after it can rely on
// everything before.
template <class... P, class... A>
void launch(Context& ctx, void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... args) {
    if (shared > 40 * 1024) // with a kernel's own arrays it may pass the 48 KB that need no asking
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = ctx.stream;
    config.attrs = &attribute, config.numAttrs = ctx.overlap;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, P(args)...));
    CUDA_CHECK(cudaGetLastError());
}

// What f launches, as a graph that can be launched again and again.
template <class F> cudaGraphExec_t record_graph(Context& ctx, F f) {
    cudaGraph_t recorded;
    cudaGraphExec_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(ctx.stream, cudaStreamCaptureModeThreadLocal));
    f();
    CUDA_CHECK(cudaStreamEndCapture(ctx.stream, &recorded));
    CUDA_CHECK(cudaGraphInstantiate(&graph, recorded, 0));
    cudaGraphDestroy(recorded);
    return graph;
}

// griddepcontrol (PTX ISA, "Parallel Synchronization and Communication Instructions")
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes of weights: read once, so they should not push anything out of the first-level cache. Zeros if not `there`,
// by a predicate and not by a jump, so that many are asked for in a row.
__device__ inline uint4 load_stream(const void* p, bool there = true) {
    uint4 v;
    asm volatile("{ .reg .pred there; setp.ne.u32 there, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((uint32_t)there));
    return v;
}

// Two neighbours: the first is in the lower half.
__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ inline uint32_t pack(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ inline bf16 round_bf16(float x) { return {(uint16_t)pack(x, 0)}; }

// d += a b with a (16,16), b (16,8), d (16,8) spread over a warp: lane 4g + t holds of d rows g (d[0], d[1]) and
// g + 8 (d[2], d[3]), columns 2t, 2t + 1; of a rows g (a0, a2) and g + 8 (a1, a3), pairs of columns 2t (a0, a1) and
// 2t + 8 (a2, a3); of b column g, pairs of rows 2t (b0) and 2t + 8 (b1). PTX ISA: mma.m16n8k16, .bf16
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of bf16 from shared memory; lane l names row l % 8 of matrix l / 8. As mma wants them, or
// transposed.
__device__ inline void ldmatrix(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}
__device__ inline void ldmatrix_transposed(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}

// ---- Hopper's own product (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): 128 threads multiply what
// lies in shared memory, without ldmatrix and at the full rate of the tensor cores; sm_90a's alone.
// Rows of 128 bytes, their chunks of 16 exchanged by row % 8, eight rows behind one another (SBO); for an operand whose
// rows are steps of K (transposed), panels of 64 columns lie `panel` bytes apart (LBO).
__device__ inline uint64_t wgmma_operand(uint32_t shared, int panel) {
    return (uint64_t)(shared >> 4 & 0x3fff) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// d (64,128) += a (64,16) b (16,128): warp w of the four holds rows 16 w .. 16 w + 15 as mma does; d[j] are columns 8 j ..
template <bool A_COLS, bool B_COLS> __device__ inline void wgmma(float (&d)[16][4], uint64_t a, uint64_t b) {
#ifdef HAVE_WGMMA
#define D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "%64, %65, 1, 1, 1, %66, %67;"
                 : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
                 : "l"(a), "l"(b), "n"((int)A_COLS), "n"((int)B_COLS));
#undef D4
#endif
}
// What was written to shared memory is there for wgmma; sums may be handed to it; it is started; it is done.
__device__ inline void wgmma_see_shared() {
#ifdef HAVE_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ inline void wgmma_begin() {
#ifdef HAVE_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
template <int M> __device__ inline void wgmma_settle(float (&d)[M][16][4]) { // the compiler moves no use of the sums past here
    #pragma unroll
    for (int i = 0; i < M * 64; i++) asm volatile("" : "+f"(d[i / 64][i / 4 % 16][i % 4])::"memory");
}
template <int M> __device__ inline void wgmma_end(float (&d)[M][16][4]) {
#ifdef HAVE_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    wgmma_settle(d);
#endif
}

// 16 bytes from global to shared memory in the background; zeros if not `there`.
__device__ inline void copy_async(uint32_t shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void copy_async_4(uint32_t shared, const void* global, bool there) { // 4 bytes
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(there ? 4 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int YOUNGER> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGER) : "memory"); }

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

constexpr float LOG2E = 1.44269504f;
__device__ inline float exp2_fast(float x) { // 2^x, relative error 2^-22; 0 for -infinity
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float warp_sum(float x) {
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// The sum over a block, in one order, for all its threads.
template <class N> __device__ inline N block_sum(N x) {
    __shared__ N parts[32];
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0;
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// One block of several is the last to come here: it may then read what all of them wrote before. `arrived` counts
// from zero and is zero again afterwards. All threads of the block call it.
// (One thread's release and acquire are enough: barriers order the others' accesses before and after it. What is read
// must come from the L2 cache: __ldcg.)
__device__ inline bool last_to_arrive(int* arrived, int blocks) {
    __shared__ int last;
    __syncthreads();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
        last = before == blocks - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    return last;
}
#endif

// ---- Memory and time

// An arena is planned by running the same code twice: first without memory, to count; then to hand out.
struct Arena {
    uint8_t* base = nullptr;
    size_t used = 0, size = 0;
    bool gpu = false; // its memory is the GPU's

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { release(); }

    // n numbers, 64-byte aligned, zero.
    template <class T> T* take(size_t n) {
        size_t at = used, bytes;
        if (__builtin_mul_overflow(n, sizeof(T), &bytes) || bytes > SIZE_MAX / 2 - used) DIE("the memory plan overflows");
        used = (used + bytes + 63) / 64 * 64;
        return base ? (T*)(base + at) : nullptr;
    }
    // After counting: takes the memory and starts over. The system gives pages when they are first touched.
    void allocate(const char* what);
    void release();
};

// Bytes that can still be used, as the kernel says and a container's limit allows (SIZE_MAX where neither does).
inline size_t available_memory() {
    size_t bytes = SIZE_MAX, number;
    if (FILE* f = fopen("/proc/meminfo", "r")) {
        char line[128];
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "MemAvailable: %zu kB", &number) == 1) bytes = number * 1024;
        fclose(f);
    }
    for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"})
        if (FILE* f = fopen(file, "r")) {
            if (fscanf(f, "%zu", &number) == 1) bytes = std::min(bytes, number);
            fclose(f);
        }
    return bytes;
}

inline void Arena::allocate(const char* what) {
#ifdef __CUDACC__
    if (gpu) {
        size_t have = 0, all = 0;
        CUDA_CHECK(cudaMemGetInfo(&have, &all));
        if (used > have || cudaMalloc(&base, used) != cudaSuccess)
            DIE("%s needs %.2f GB of GPU memory and %.2f of its %.2f GB are free", what, (double)used / 1e9, (double)have / 1e9, (double)all / 1e9);
        CUDA_CHECK(cudaMemset(base, 0, used));
        CUDA_CHECK(cudaDeviceSynchronize()); // our streams do not wait for the one that clears it
        size = used, used = 0;
        return;
    }
#endif
    size_t have = available_memory();
    void* at = MAP_FAILED;
    if (used <= have) at = mmap(nullptr, used, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) DIE("%s needs %zu bytes of memory and %zu are available", what, used, have);
    madvise(at, used, MADV_HUGEPAGE); // fewer TLB misses; a wish, not a need
    base = (uint8_t*)at, size = used, used = 0;
}

inline void Arena::release() {
    if (!base) return;
#ifdef __CUDACC__
    if (gpu) cudaFree(base);
#endif
    if (!gpu) munmap(base, size);
    base = nullptr;
}

// n numbers, to and from where an arena is, and zeros there.
template <class U> void copy_in([[maybe_unused]] Context& ctx, U* to, const U* from, size_t n) {
#ifdef __CUDACC__
    if (ctx.gpu) return CUDA_CHECK(cudaMemcpyAsync(to, from, n * sizeof(U), cudaMemcpyHostToDevice, ctx.stream)); // (not pinned: read before it returns)
#endif
    memcpy((void*)to, from, n * sizeof(U));
}
template <class U> void copy_out([[maybe_unused]] Context& ctx, U* to, const U* from, size_t n) {
#ifdef __CUDACC__
    if (ctx.gpu) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, n * sizeof(U), cudaMemcpyDeviceToHost, ctx.stream));
        return CUDA_CHECK(cudaStreamSynchronize(ctx.stream));
    }
#endif
    memcpy((void*)to, from, n * sizeof(U));
}
template <class U> void clear([[maybe_unused]] Context& ctx, U* p, size_t n) {
#ifdef __CUDACC__
    if (ctx.gpu) return CUDA_CHECK(cudaMemsetAsync(p, 0, n * sizeof(U), ctx.stream));
#endif
    memset((void*)p, 0, n * sizeof(U));
}

inline double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline int thread_count() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

inline uint64_t fnv1a(const void* bytes, size_t n, uint64_t hash = 0xcbf29ce484222325) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t*)bytes)[i]) * 0x100000001b3;
    return hash;
}

// ============================================================================================== 2 Model file
// model.bin is a safetensors file (8 bytes: length of the header; the header, JSON; the tensors' bytes) with
// Hugging Face's tensor names and two texts in __metadata__: config and generation_config. A Hugging Face
// folder is taken as it is: config.json, generation_config.json, model.safetensors or an index and shards.

struct Config {
    int C, L, H, K, D, F, V, max_positions;
    float eps;
    double rope_theta;
    bool tied;
    std::vector<int> end_tokens; // any of them ends an answer
    size_t parameters() const {
        size_t layer = (size_t)C * (2 * H + 2 * K) * D + 3 * (size_t)C * F + 2 * (size_t)C + 2 * (size_t)D;
        return (size_t)L * layer + (size_t)V * C * (tied ? 1 : 2) + (size_t)C;
    }
};

// Reads config.json (or its text in model.bin). Every key that changes the computation is either read or must
// have the one value that this program computes; keys of training and bookkeeping are ignored.
inline Config parse_config(const std::string& file, std::string_view text, std::string_view generation_text) {
    const char* name = file.c_str();
    sj::Doc doc;
    std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: config: %s", name, fault.c_str());
    sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: config is not a JSON object", name);

    if (j["model_type"].str() != "qwen3")
        DIE("%s: model_type is %.60s, only \"qwen3\" is supported", name, j["model_type"] ? std::string(j["model_type"].raw()).c_str() : "missing");

    auto refuse = [&](const char* key, sj::Value v) {
        DIE("%s: config has %s = %.60s, which is not supported", name, key, std::string(v.raw()).c_str());
    };
    auto must_be = [&](const char* key, bool ok) { if (j[key] && !ok) refuse(key, j[key]); };
    auto off = [](sj::Value v) { return v.is(sj::Null) || v.is(sj::False); };
    for (const char* key : {"attention_bias", "mlp_bias", "use_sliding_window", "rope_scaling", "quantization_config", "num_experts",
                            "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_multiplier",
                            "embedding_multiplier", "tie_encoder_decoder", "is_encoder_decoder", "use_bidirectional_attention"})
        must_be(key, off(j[key]));
    must_be("hidden_act", j["hidden_act"].str() == "silu");
    must_be("partial_rotary_factor", j["partial_rotary_factor"].number() == 1);
    must_be("use_qk_norm", j["use_qk_norm"].is(sj::True));
    must_be("layer_types", j["layer_types"].is(sj::Array) || j["layer_types"].is(sj::Null));
    for (sj::Value kind : j["layer_types"].items())
        if (kind.str() != "full_attention") refuse("layer_types", kind);

    auto integer = [&](const char* key, int64_t low, int64_t high, int64_t otherwise) {
        int64_t v = otherwise;
        if (!j[key] && otherwise < 0) DIE("%s: config has no %s", name, key);
        if (j[key] && !j[key].integer(&v)) DIE("%s: config: %s is not an integer", name, key);
        if (v < low || v > high) DIE("%s: config: %s = %lld is outside %lld..%lld", name, key, (long long)v, (long long)low, (long long)high);
        return (int)v;
    };
    Config c;
    c.C = integer("hidden_size", 1, 1 << 20, -1);
    c.L = integer("num_hidden_layers", 1, 4096, -1);
    c.H = integer("num_attention_heads", 1, 4096, -1);
    c.K = integer("num_key_value_heads", 1, 4096, -1);
    c.D = integer("head_dim", 2, 512, 128); // 128 is Hugging Face's default for qwen3
    c.F = integer("intermediate_size", 1, 1 << 20, -1);
    c.V = integer("vocab_size", 1, 1 << 24, -1);
    c.max_positions = integer("max_position_embeddings", 1, 1 << 24, -1);
    if (c.D % 2) DIE("%s: config: head_dim = %d is odd, RoPE needs pairs", name, c.D);
    if (c.H % c.K) DIE("%s: config: %d query heads do not share %d key/value heads evenly", name, c.H, c.K);

    if (!j["rms_norm_eps"].is(sj::Number)) DIE("%s: config has no rms_norm_eps", name);
    c.eps = (float)j["rms_norm_eps"].number();
    if (!(c.eps > 0 && c.eps < 1)) DIE("%s: config: rms_norm_eps is not between 0 and 1", name);
    sj::Value rope = j["rope_parameters"], theta = j["rope_theta"]; // transformers 5 has the first, 4 the second
    if (rope && !rope.is(sj::Null)) {
        if (!rope.is(sj::Object)) refuse("rope_parameters", rope);
        for (auto [key, value] : rope.members()) {
            if (key == "rope_theta") theta = value;
            else if (!(key == "rope_type" && value.str() == "default") && !(key == "partial_rotary_factor" && value.number() == 1))
                refuse(("rope_parameters." + key).c_str(), value);
        }
    }
    if (!theta.is(sj::Number)) DIE("%s: config has no rope_theta", name);
    c.rope_theta = theta.number();
    if (!(c.rope_theta >= 1 && c.rope_theta < 1e12)) DIE("%s: config: rope_theta is not between 1 and 1e12", name);
    sj::Value tied = j["tie_word_embeddings"];
    if (tied && !tied.is_bool()) refuse("tie_word_embeddings", tied);
    c.tied = tied.boolean(false);

    sj::Doc generation;
    if (!generation_text.empty()) {
        fault = sj::parse(generation, generation_text);
        if (!fault.empty()) DIE("%s: generation_config: %s", name, fault.c_str());
    }
    sj::Value g = generation.root(), eos = g["eos_token_id"];
    if (!eos || eos.is(sj::Null)) eos = j["eos_token_id"];
    auto end = [&](sj::Value v) {
        int64_t id;
        if (!v.integer(&id) || id < 0 || id >= c.V) DIE("%s: eos_token_id holds %.60s, which is no id of the vocabulary", name, std::string(v.raw()).c_str());
        c.end_tokens.push_back((int)id);
    };
    if (eos.is(sj::Array)) for (sj::Value v : eos.items()) end(v);
    else if (eos && !eos.is(sj::Null)) end(eos);
    return c;
}

enum class Dtype { BF16, F16, F32, I8, Other };

struct Tensor {
    std::string file;          // where it is, for messages
    Dtype dtype = Dtype::Other;
    std::vector<int64_t> shape;
    const uint8_t* data = nullptr;
    size_t bytes = 0;
};
using Tensors = std::map<std::string, Tensor>;

// Number i of a BF16, F16 or F32 tensor.
inline float number(const Tensor& t, size_t i) {
    float f;
    uint16_t h;
    if (t.dtype == Dtype::F32) return memcpy(&f, t.data + 4 * i, 4), f;
    memcpy(&h, t.data + 2 * i, 2);
    return t.dtype == Dtype::F16 ? half_to_float(h) : to_acc(bf16{h});
}

// Bytes of one number of a safetensors dtype, 0 if it has no such name.
inline size_t dtype_size(const std::string& name, Dtype* dtype) {
    static const struct { const char* name; size_t size; Dtype dtype; } table[] = {
        {"BF16", 2, Dtype::BF16}, {"F16", 2, Dtype::F16}, {"F32", 4, Dtype::F32},
        {"F64", 8, Dtype::Other}, {"I64", 8, Dtype::Other}, {"U64", 8, Dtype::Other}, {"I32", 4, Dtype::Other},
        {"U32", 4, Dtype::Other}, {"I16", 2, Dtype::Other}, {"U16", 2, Dtype::Other}, {"I8", 1, Dtype::I8},
        {"U8", 1, Dtype::Other}, {"BOOL", 1, Dtype::Other}, {"F8_E4M3", 1, Dtype::Other}, {"F8_E5M2", 1, Dtype::Other}};
    for (auto& row : table)
        if (name == row.name) { *dtype = row.dtype; return row.size; }
    return 0;
}

// Adds the tensors of one safetensors file to `out` and its __metadata__ to `metadata`. Accepts what the
// reference implementation accepts: a header of at most 100 MB that is a UTF-8 JSON object; for every tensor
// begin <= end and end - begin = shape x dtype; together the tensors cover the data exactly, without a hole
// or an overlap.
inline void read_safetensors(const MappedFile& map, Tensors& out, std::map<std::string, std::string>& metadata) {
    const char* name = map.path.c_str();
    uint64_t length = 0;
    if (map.size < 8) DIE("%s: %zu bytes are too few for a safetensors file", name, map.size);
    memcpy(&length, map.data, 8);
    if (length > 100'000'000) DIE("%s: not a safetensors file: its header would be %llu bytes", name, (unsigned long long)length);
    if (length > map.size - 8) DIE("%s: truncated: the header is %llu bytes, the file %zu", name, (unsigned long long)length, map.size);
    std::string_view header((const char*)map.data + 8, length);
    const uint8_t* data = map.data + 8 + length;
    const uint64_t data_size = map.size - 8 - length;
    if (header.empty() || header[0] != '{') DIE("%s: not a safetensors file: its header is no JSON object", name);
    sj::Doc doc;
    std::string fault = sj::parse(doc, header);
    if (!fault.empty()) DIE("%s: header: %s", name, fault.c_str());

    struct Span { uint64_t begin, end; std::string name; };
    std::vector<Span> spans;
    std::set<std::string> seen;
    for (auto [key, v] : doc.root().members()) {
        const char* k = key.c_str();
        if (!seen.insert(key).second) DIE("%s: header names %s twice", name, k);
        if (key == "__metadata__") {
            if (!v.is(sj::Object)) DIE("%s: __metadata__ is not an object", name);
            for (auto [mk, mv] : v.members()) {
                if (!mv.is(sj::String)) DIE("%s: __metadata__: %s is not a string", name, mk.c_str());
                metadata[mk] = mv.str();
            }
            continue;
        }
        Tensor t;
        t.file = map.path;
        size_t size = dtype_size(v["dtype"].str(), &t.dtype);
        if (!v.is(sj::Object) || !v["dtype"].is(sj::String) || !v["shape"].is(sj::Array) || !v["data_offsets"].is(sj::Array))
            DIE("%s: tensor %s lacks dtype, shape or data_offsets", name, k);
        if (!size) DIE("%s: tensor %s has the unknown dtype %.40s", name, k, v["dtype"].str().c_str());
        uint64_t bytes = size;
        for (sj::Value d : v["shape"].items()) {
            int64_t n;
            if (!d.integer(&n) || d.raw()[0] == '-') DIE("%s: tensor %s has a bad shape", name, k); // -0 is refused too
            if (__builtin_mul_overflow(bytes, (uint64_t)n, &bytes)) DIE("%s: the shape of tensor %s overflows 64 bits", name, k);
            t.shape.push_back(n);
        }
        int64_t begin, end;
        sj::Value at = v["data_offsets"];
        if (at.size() != 2 || !at[(size_t)0].integer(&begin) || !at[1].integer(&end) || begin < 0 || end < begin || at[(size_t)0].raw()[0] == '-')
            DIE("%s: tensor %s has bad data_offsets", name, k);
        if ((uint64_t)end > data_size) DIE("%s: truncated: tensor %s ends at byte %lld of %llu", name, k, (long long)end, (unsigned long long)data_size);
        if ((uint64_t)(end - begin) != bytes)
            DIE("%s: tensor %s has %lld bytes, its shape needs %llu", name, k, (long long)(end - begin), (unsigned long long)bytes);
        t.data = data + begin;
        t.bytes = bytes;
        spans.push_back({(uint64_t)begin, (uint64_t)end, key});
        auto [where, fresh] = out.emplace(key, t);
        if (!fresh) DIE("%s: tensor %s is also in %s", name, k, where->second.file.c_str());
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    uint64_t expected = 0;
    for (const Span& s : spans) {
        if (s.begin != expected) DIE("%s: %s before tensor %s", name, s.begin < expected ? "overlap" : "hole", s.name.c_str());
        expected = s.end;
    }
    if (expected != data_size) DIE("%s: the tensors end at byte %llu, the data at %llu", name, (unsigned long long)expected, (unsigned long long)data_size);
}

inline void need_shape(const std::string& name, const Tensor& t, const std::vector<int64_t>& shape) {
    auto text = [](const std::vector<int64_t>& dims) {
        std::string s;
        for (int64_t d : dims) s += format("%s%lld", s.empty() ? "" : ",", (long long)d);
        return s;
    };
    if (t.shape != shape)
        DIE("%s: tensor %s is (%s), the config needs (%s)", t.file.c_str(), name.c_str(), text(t.shape).c_str(), text(shape).c_str());
}

// The files of a model, mapped and checked; tensors are found by name and not yet looked at.
struct ModelFile {
    std::string path;
    std::vector<MappedFile> maps;
    Tensors tensors;
    Config config;
    std::string config_text, generation_text;

    // path: a model.bin or a Hugging Face folder.
    explicit ModelFile(const std::string& p) : path(p) {
        struct stat st;
        if (stat(p.c_str(), &st) != 0) DIE("%s: %s", p.c_str(), strerror(errno));
        std::map<std::string, std::string> metadata;
        if (!S_ISDIR(st.st_mode)) {
            add(p, metadata);
            if (!metadata.count("config")) DIE("%s: no config in its metadata; export.py makes a model.bin from a Hugging Face folder", p.c_str());
            config_text = metadata["config"];
            generation_text = metadata["generation_config"];
            config = parse_config(p, config_text, generation_text);
            return;
        }
        auto exists = [](const std::string& f) { return access(f.c_str(), F_OK) == 0; };
        if (!exists(p + "/config.json")) DIE("%s: a folder without a model: it has no config.json", p.c_str());
        config_text = MappedFile(p + "/config.json").text();
        if (exists(p + "/generation_config.json")) generation_text = MappedFile(p + "/generation_config.json").text();
        config = parse_config(p, config_text, generation_text);
        if (exists(p + "/model.safetensors")) add(p + "/model.safetensors", metadata);
        else if (exists(p + "/model.safetensors.index.json")) add_shards(p + "/model.safetensors.index.json", metadata);
        else DIE("%s: a folder without a model: it has no model.safetensors and no model.safetensors.index.json", p.c_str());
    }

    bool is_int8() const {
        auto t = tensors.find("model.embed_tokens.weight");
        return t != tensors.end() && t->second.dtype == Dtype::I8;
    }

    // The checkpoint's own type: what the embedding is stored in. F16 is read as bf16.
    bool is_float32() const {
        auto t = tensors.find("model.embed_tokens.weight");
        return t != tensors.end() && t->second.dtype == Dtype::F32;
    }

    // A name for config and weights. Of these the hash takes 16 stretches of 256 bytes a tensor, evenly spread (all of a
    // norm), in milliseconds; training moves every number. Models that differ in a few numbers between the stretches
    // would be taken for the same.
    uint64_t hash() const {
        uint64_t hash = fnv1a(config_text.data(), config_text.size());
        for (auto& [name, tensor] : tensors) {
            hash = fnv1a(name.data(), name.size() + 1, hash);
            hash = fnv1a(&tensor.dtype, sizeof tensor.dtype, hash);
            hash = fnv1a(&tensor.bytes, sizeof tensor.bytes, hash);
            const size_t stretch = std::min(tensor.bytes, (size_t)256);
            for (size_t i = 0; i < 16; i++)
                hash = fnv1a(tensor.data + (tensor.bytes - stretch) * i / 15, stretch, hash);
        }
        return hash;
    }

  private:
    void add(const std::string& file, std::map<std::string, std::string>& metadata) {
        maps.emplace_back(file);
        read_safetensors(maps.back(), tensors, metadata);
    }
    void add_shards(const std::string& file, std::map<std::string, std::string>& metadata) {
        MappedFile map(file);
        sj::Doc doc;
        std::string fault = sj::parse(doc, map.text());
        if (!fault.empty()) DIE("%s: %s", file.c_str(), fault.c_str());
        sj::Value names = doc.root()["weight_map"];
        if (!names.is(sj::Object)) DIE("%s: no weight_map", file.c_str());
        std::set<std::string> shards;
        for (auto [tensor, v] : names.members()) {
            std::string shard = v.str();
            if (shard.empty() || shard.find('/') != std::string::npos || shard.find('\0') != std::string::npos)
                DIE("%s: tensor %s has a bad file name", file.c_str(), tensor.c_str());
            if (shards.insert(shard).second) add(path + "/" + shard, metadata);
        }
        for (auto [tensor, v] : names.members()) {
            auto t = tensors.find(tensor);
            if (t == tensors.end() || t->second.file != path + "/" + v.str())
                DIE("%s: tensor %s is not in %s", file.c_str(), tensor.c_str(), v.str().c_str());
        }
    }
};

// INT8 weights: 32 neighbours in a row of W share a scale s, W[r][i] = q[r][i] * s[r][i / 32], q in -127..127, which is
// w / s rounded to nearest even. An 8-bit integer times the 8 bits of a bf16 is exact in a float, so that INT8 weights
// are nothing but other weights, cheaper to read: 8.5 bits each. Files hold them as NAME (I8) and NAME_scale (BF16,
// (rows, ceil(in / 32))).
// The scale is the smallest bf16 with 127 s >= max |w|, or one of the next seven: where the weights fall between the
// multiples of s is chance, and the best of eight draws loses a fifth less (in KL) than the first.
constexpr int GROUP = 32, SCALES = 8;

// The smallest bf16 with 127 s >= largest.
inline bf16 int8_scale(float largest) {
    bf16 s = to_bf16(largest / 127);
    while (127. * to_acc(s) < largest) s.bits++;
    while (s.bits && 127. * to_acc(bf16{(uint16_t)(s.bits - 1)}) >= largest) s.bits--;
    return s;
}
// Of it and the next seven the one that leaves the least squares, summed in the order of w (of equals the first).
inline bf16 int8_scale(const float* w, size_t n) {
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(w[i]));
    const bf16 first = int8_scale(largest);
    if (first.bits == 0) return first;
    typedef double Each __attribute__((vector_size(SCALES * sizeof(double))));
    Each s, lost = {};
    for (int c = 0; c < SCALES; c++) s[c] = to_acc(bf16{(uint16_t)std::min(first.bits + c, 0x7f7f)});
    const Each inverse = 1. / s;
    for (size_t i = 0; i < n; i++) {
        const double x = w[i];
        const Each off = x - (x * inverse + 6755399441055744. - 6755399441055744.) * s; // 1.5 * 2^52: rounds to an integer
        lost += off * off;
    }
    int best = 0;
    for (int c = 1; c < SCALES; c++)
        if (lost[c] < lost[best]) best = c;
    return {(uint16_t)std::min(first.bits + best, 0x7f7f)};
}

// LoRA (Hu et al., "LoRA: low-rank adaptation of large language models", 2021) of up to three blocks of a product, m in
// all: y += s B (A drop(x)). The A of module j are rows j * rank .. of `A`; its B has its block's rows and the columns
// j * rank .. of `B`, all else there being zero.
template <class T> struct Adapter {
    int rank = 0;                     // 0: no adapter
    int true_rank = 0;                // as its file has it; see adapt. Behind it rows of A and columns of B are zero, and
                                      // remain so in training, since h and dh are zero there
    int modules = 0;                  // m
    int block[3] = {};                // (m) of the Linear
    int module[3] = {};               // (m) layer * 7 + (q, k, v, o, gate, up, down = 0..6): names the dropout mask
    float s = 1;                      // alpha / rank; rslora: alpha / sqrt(rank)
    T* A = nullptr;                   // (m * rank, in)
    T* B = nullptr;                   // (out, m * rank): s B
    T* h = nullptr;                   // (N, m * rank) A drop(x), which backward reads again
    const Dropout* dropout = nullptr; // training only
};

// A product's weights: y = x W^T, W of (out, in) in up to three blocks of rows that are separate tensors in
// the file (q, k, v; gate, up). Stored as T, or as INT8: then w is null.
template <class T> struct Linear {
    const T* w[3] = {};
    const int8_t* q[3] = {};
    const bf16* scale[3] = {};
    int rows[3] = {};
    int in = 0;
    Adapter<T> adapter;
    int out() const { return rows[0] + rows[1] + rows[2]; }
    int groups() const { return (in + GROUP - 1) / GROUP; }
    size_t bytes() const { return (size_t)out() * (q[0] ? (size_t)in + 2 * (size_t)groups() : (size_t)in * sizeof(T)); }
};

template <class T> struct Layer {
    const T *norm1, *norm2;      // (C)
    const T *q_norm, *k_norm;    // (D)
    Linear<T> qkv, o;            // (HD + 2KD, C), (C, HD)
    Linear<T> gate_up, down;     // (2F, C), (C, F)
};

// Weights in type T. A tensor stored as T is used where the file maps it; others are converted once. With
// `int8` every matrix becomes INT8 (a file's own INT8 matrices are so anyway); norms stay.
template <class T> struct Weights {
    Linear<T> embed;             // (V,C)
    std::vector<Layer<T>> layers;
    const T* norm;               // (C)
    Linear<T> head;              // (V,C), the embedding when tied
    std::vector<std::unique_ptr<T[]>> converted;
    std::vector<std::unique_ptr<int8_t[]>> quantized;
    std::vector<std::unique_ptr<bf16[]>> scales;
    Arena gpu;                   // holds all of them after `upload`

    explicit Weights(const ModelFile& file, bool int8 = false) {
        const Config& c = file.config;
        auto matrix = [&](const std::string& name, int rows, int in, Linear<T>& y) { add_rows(file, name, rows, in, int8, y); };
        matrix("model.embed_tokens.weight", c.V, c.C, embed);
        for (int l = 0; l < c.L; l++) {
            auto name = [&](const char* part) { return format("model.layers.%d.%s.weight", l, part); };
            Layer<T> y;
            y.norm1 = tensor(file, name("input_layernorm"), {c.C});
            matrix(name("self_attn.q_proj"), c.H * c.D, c.C, y.qkv);
            matrix(name("self_attn.k_proj"), c.K * c.D, c.C, y.qkv);
            matrix(name("self_attn.v_proj"), c.K * c.D, c.C, y.qkv);
            y.q_norm = tensor(file, name("self_attn.q_norm"), {c.D});
            y.k_norm = tensor(file, name("self_attn.k_norm"), {c.D});
            matrix(name("self_attn.o_proj"), c.C, c.H * c.D, y.o);
            y.norm2 = tensor(file, name("post_attention_layernorm"), {c.C});
            matrix(name("mlp.gate_proj"), c.F, c.C, y.gate_up);
            matrix(name("mlp.up_proj"), c.F, c.C, y.gate_up);
            matrix(name("mlp.down_proj"), c.C, c.F, y.down);
            layers.push_back(y);
        }
        norm = tensor(file, "model.norm.weight", {c.C});
        if (c.tied) head = embed;
        else matrix("lm_head.weight", c.V, c.C, head);
    }

    const char* type_name() const { return head.q[0] ? "int8" : std::is_same_v<T, float> ? "float32" : "bfloat16"; }

#ifdef __CUDACC__
    void upload(Context& ctx, const ModelFile& file);
#endif

    // What one decode step reads of them.
    size_t step_bytes() const {
        size_t n = head.bytes();
        for (auto& y : layers) n += y.qkv.bytes() + y.o.bytes() + y.gate_up.bytes() + y.down.bytes();
        return n;
    }

  private:
    const Tensor& find(const ModelFile& file, const std::string& name, const std::vector<int64_t>& shape) {
        auto found = file.tensors.find(name);
        if (found == file.tensors.end()) DIE("%s: no tensor %s", file.path.c_str(), name.c_str());
        const Tensor& t = found->second;
        need_shape(name, t, shape);
        return t;
    }

    // New numbers, if there is memory for them.
    template <class U> U* own(std::vector<std::unique_ptr<U[]>>& list, size_t n, const Tensor& t, const std::string& name) {
        const size_t have = available_memory();
        if (n * sizeof(U) > have) DIE("%s: converting tensor %s needs %zu bytes of memory and %zu are available", t.file.c_str(), name.c_str(), n * sizeof(U), have);
        list.emplace_back(new U[n]);
        return list.back().get();
    }

    const T* tensor(const ModelFile& file, const std::string& name, const std::vector<int64_t>& shape) {
        const Tensor& t = find(file, name, shape);
        if (t.dtype == Dtype::Other || t.dtype == Dtype::I8) DIE("%s: tensor %s is not BF16, F16 or F32", t.file.c_str(), name.c_str());
        const bool same = (std::is_same_v<T, bf16> && t.dtype == Dtype::BF16) || (std::is_same_v<T, float> && t.dtype == Dtype::F32);
        if (same && (uintptr_t)t.data % alignof(T) == 0) return (const T*)t.data;
        const size_t n = t.bytes / (t.dtype == Dtype::F32 ? 4 : 2);
        T* out = own(converted, n, t, name);
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i++) {
            const float f = number(t, i);
            if constexpr (std::is_same_v<T, bf16>) out[i] = to_bf16(f);
            else out[i] = f;
        }
        return out;
    }

    // Makes the matrix `name` the next block of rows of y.
    void add_rows(const ModelFile& file, const std::string& name, int rows, int in, bool int8, Linear<T>& y) {
        int b = 0;
        while (y.rows[b]) b++;
        y.rows[b] = rows, y.in = in;
        const Tensor& t = find(file, name, {rows, in});
        const size_t groups = y.groups();
        if (t.dtype == Dtype::I8) {
            const Tensor& s = find(file, name + "_scale", {rows, (int64_t)groups});
            if (s.dtype != Dtype::BF16 || (uintptr_t)s.data % 2) DIE("%s: tensor %s_scale is not BF16 at an even address", s.file.c_str(), name.c_str());
            y.q[b] = (const int8_t*)t.data, y.scale[b] = (const bf16*)s.data;
        } else if (int8) {
            if (t.dtype == Dtype::Other) DIE("%s: tensor %s is not BF16, F16, F32 or I8", t.file.c_str(), name.c_str());
            int8_t* q = own(quantized, (size_t)rows * in, t, name);
            bf16* scale = own(scales, rows * groups, t, name);
            bool finite = true;
            #pragma omp parallel for schedule(static) reduction(&& : finite)
            for (size_t g = 0; g < rows * groups; g++) {
                const size_t first = g / groups * in + g % groups * GROUP, n = std::min((size_t)GROUP, (size_t)in - g % groups * GROUP);
                float w[GROUP];
                for (size_t i = 0; i < n; i++) {
                    w[i] = number(t, first + i);
                    finite = finite && std::isfinite(w[i]);
                }
                if (!finite) continue;
                scale[g] = int8_scale(w, n);
                const double s = to_acc(scale[g]);
                for (size_t i = 0; i < n; i++) q[first + i] = s > 0 ? (int8_t)std::nearbyint(w[i] / s) : (int8_t)0;
            }
            if (!finite) DIE("%s: tensor %s has an infinity or a NaN, which INT8 cannot hold", t.file.c_str(), name.c_str());
            y.q[b] = q, y.scale[b] = scale;
        } else {
            y.w[b] = tensor(file, name, {rows, in});
        }
        if (b && !y.q[b] != !y.q[0]) DIE("%s: tensor %s is INT8 and its neighbours are not, or the other way round", t.file.c_str(), name.c_str());
    }
};

#ifdef __CUDACC__
// What the kernels can compute, else one line.
inline void check_gpu(const std::string& name, const Config& c, bool int8) {
    const char* n = name.c_str();
    if (int8) DIE("%s: INT8 weights run on the CPU only so far (--device cpu)", n);
    if (c.D != 64 && c.D != 128) DIE("%s: the GPU's kernels are for heads of 64 and 128, not %d (--device cpu)", n, c.D);
    if (c.H / c.K > 128) DIE("%s: %d query heads a key/value head; the GPU's kernels take 128 (--device cpu)", n, c.H / c.K);
    if (c.C % 8 || c.F % 8 || c.V % 8)
        DIE("%s: the GPU's kernels need hidden size (%d), ffn size (%d) and vocabulary rows (%d) in multiples of 8 (--device cpu)", n, c.C, c.F, c.V);
}

// Copies all to the GPU and lets every pointer point there, the blocks of a Linear one behind the other. The CPU's
// threads read the mapped file into one pinned buffer while the other one is on its way: the link, not the page
// faults, sets the pace.
template <class T> void Weights<T>::upload(Context& ctx, const ModelFile& file) {
    check_gpu(file.path, file.config, head.q[0]);
    struct Piece { const T* from; size_t to, bytes; };
    std::vector<Piece> pieces;
    gpu.gpu = true;
    const T* tied = embed.w[0];
    for (bool planned : {false, true}) {
        pieces.clear();
        auto place = [&](const T*& at, T* to, size_t n) {
            pieces.push_back({at, (size_t)((uint8_t*)to - gpu.base), n * sizeof(T)});
            if (planned) at = to;
        };
        auto matrix = [&](Linear<T>& y) {
            T* to = gpu.take<T>((size_t)y.out() * y.in);
            for (int b = 0; b < 3 && y.rows[b]; to += (size_t)y.rows[b++] * y.in) place(y.w[b], to, (size_t)y.rows[b] * y.in);
        };
        auto vector = [&](const T*& at, int n) { place(at, gpu.take<T>(n), n); };
        const Config& c = file.config;
        matrix(embed);
        for (Layer<T>& y : layers) {
            vector(y.norm1, c.C);
            matrix(y.qkv);
            vector(y.q_norm, c.D);
            vector(y.k_norm, c.D);
            matrix(y.o);
            vector(y.norm2, c.C);
            matrix(y.gate_up);
            matrix(y.down);
        }
        vector(norm, c.C);
        if (head.w[0] != tied) matrix(head);
        if (!planned) gpu.allocate("the model");
    }
    if (head.w[0] == tied) head = embed;

    constexpr size_t BUFFER = 16 << 20;
    uint8_t* buffer[2];
    cudaEvent_t sent[2];
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost(&buffer[i], BUFFER));
        CUDA_CHECK(cudaEventCreateWithFlags(&sent[i], cudaEventDisableTiming));
    }
    size_t start = 0, piece = 0, done = 0; // the buffer stands for the arena from `start` on; bytes done of a piece
    for (int turn = 0; piece < pieces.size(); turn ^= 1) {
        CUDA_CHECK(cudaEventSynchronize(sent[turn]));
        start = pieces[piece].to + done;
        size_t end = start;
        while (piece < pieces.size() && pieces[piece].to + done < start + BUFFER) {
            const Piece& p = pieces[piece];
            const size_t at = p.to + done - start, n = std::min(p.bytes - done, BUFFER - at), part = 1 << 19;
            #pragma omp parallel for schedule(static) if (n > part)
            for (size_t i = 0; i < (n + part - 1) / part; i++)
                memcpy(buffer[turn] + at + i * part, (const uint8_t*)p.from + done + i * part, std::min(part, n - i * part));
            end = start + at + n;
            done += n;
            if (done == p.bytes) piece++, done = 0;
        }
        CUDA_CHECK(cudaMemcpyAsync(gpu.base + start, buffer[turn], end - start, cudaMemcpyHostToDevice, ctx.stream));
        CUDA_CHECK(cudaEventRecord(sent[turn], ctx.stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(ctx.stream));
    for (int i = 0; i < 2; i++) cudaFreeHost(buffer[i]), cudaEventDestroy(sent[i]);
    converted.clear();
}
#endif

// ===================================================================================================== 3 Ops
// In the order the model runs them.

// N packed tokens of B sequences. The rows of a sequence are neighbours and in order of position. Sequences of
// one row come first (decode), longer pieces (prompts, training) follow. Spare rows have seq = -1: ops that look
// at tokens skip them, the others compute rows that nobody reads. On the GPU the arrays are in its memory.
// Keys and values live in pages of 16 tokens; row seq of the block table names the pages of a sequence.
constexpr int PAGE = 16;
struct Batch {
    int N, B;
    const int* token; // (N)
    const int* pos;   // (N) position in its sequence, from 0
    const int* seq;   // (N) row of the block table
    const int* slot;  // (N) where its key and value go: page * 16 + offset
    const int* pages; // (B, max_pages) block table
    int max_pages;    // pages a sequence can have
    int singles = 0;  // the first rows, of which each may be taken as a sequence's only one
};

// One layer's keys or values: (pages, K, 16, D).
BOTH inline size_t kv_offset(int page, int head, int within, int K, int D) {
    return (((size_t)page * K + head) * PAGE + within) * D;
}

// ---- embed: x[n] = W[token[n]]
template <class T>
void embed_cpu(acc<T>* x,              // (N,C) out
               const Linear<T>& table, // (V,C)
               const Batch& b, int C) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const size_t row = (size_t)b.token[n] * C;
        for (int i = 0; i < C; i++) {
            if (table.w[0]) x[(size_t)n * C + i] = to_acc(table.w[0][row + i]);
            else x[(size_t)n * C + i] = (acc<T>)table.q[0][row + i] * to_acc(table.scale[0][(size_t)b.token[n] * table.groups() + i / GROUP]);
        }
    }
}

#ifdef __CUDACC__
// A block a token.
__global__ void embed_kernel(float* x, const bf16* table, Batch b, int C) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    if (b.seq[n] < 0) return;
    const bf16* row = table + (size_t)b.token[n] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) x[(size_t)n * C + i] = to_acc(row[i]);
}
inline void embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b, int C) {
    launch(ctx, embed_kernel, b.N, 128, 0, x, table.w[0], b, C);
}
#endif

// 1 / sqrt(mean(x^2) + eps) of one row.
template <class T> acc<T> inverse_rms(const T* x, int n, float eps) { return 1 / std::sqrt(dot(x, x, n) / n + (acc<T>)eps); }

// ---- rmsnorm: out[n] = x[n] / rms(x[n]) * w       (Zhang & Sennrich, "Root mean square layer normalization", 2019)
template <class T>
void rmsnorm_cpu(T* out,          // (N,C) out
                 const acc<T>* x, // (N,C)
                 const T* w,      // (C)
                 int N, int C, float eps) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const acc<T>* row = x + (size_t)n * C;
        acc<T> scale = inverse_rms(row, C, eps);
        for (int i = 0; i < C; i++) out[(size_t)n * C + i] = to_stored<T>(row[i] * scale * to_acc(w[i]));
    }
}

#ifdef __CUDACC__
// y = x * w / rms(x) for `rows` rows of C, by all warps of a block; y, whose rows begin ld apart, may be in shared memory.
// The squares are added in pieces of 128, a warp each, and the pieces in order: the bits do not depend on the number
// of warps. A warp keeps its first pieces in registers.
// pieces: rows * ceil(C / 128) floats of shared memory. C is a multiple of 8. Ends with a barrier.
__device__ inline void norm_rows(bf16* y, int ld, const float* x, const bf16* w, float* pieces, int rows, int C, float eps) {
    constexpr int KEPT = 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, per_row = (C + 127) / 128, all = rows * per_row;
    float4 kept[KEPT];
    auto load = [&](int p) {
        const int i = p % per_row * 128 + lane * 4;
        return p < all && i < C ? *(const float4*)(x + (size_t)(p / per_row) * C + i) : make_float4(0, 0, 0, 0);
    };
    auto square = [&](int p, const float4& v) {
        const float sum = warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w);
        if (lane == 0 && p < all) pieces[p] = sum;
    };
    #pragma unroll
    for (int k = 0; k < KEPT; k++) kept[k] = load(warp + k * warps);
    #pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (warp + k * warps < all) square(warp + k * warps, kept[k]);
    for (int p = warp + KEPT * warps; p < all; p += warps) square(p, load(p));
    __syncthreads();
    auto scaled = [&](int p, const float4& v) {
        const int row = p / per_row, i = p % per_row * 128 + lane * 4;
        float sum = 0;
        for (int j = 0; j < per_row; j++) sum += pieces[row * per_row + j];
        const float scale = 1 / sqrtf(sum / C + eps);
        if (i >= C) return;
        const uint2 u = *(const uint2*)(w + i);
        *(uint2*)(y + (size_t)row * ld + i) = make_uint2(pack(v.x * scale * low(u.x), v.y * scale * high(u.x)),
                                                         pack(v.z * scale * low(u.y), v.w * scale * high(u.y)));
    };
    #pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (warp + k * warps < all) scaled(warp + k * warps, kept[k]);
    for (int p = warp + KEPT * warps; p < all; p += warps) scaled(p, load(p));
    __syncthreads();
}

// A block a token.
__global__ void rmsnorm_kernel(bf16* out, const float* x, const bf16* w, int C, float eps) {
    extern __shared__ float pieces[];
    let_next_start();
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * C;
    norm_rows(out + at, C, x + at, w, pieces, 1, C, eps);
}
inline void rmsnorm_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, int N, int C, float eps) {
    launch(ctx, rmsnorm_kernel, N, 256, (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}
#endif

// ---- products: y[n][r] = sum_i W[r][i] x[n][i]
// Work is cut into tasks, a few rows of W each: a thread streams its own rows, and holds them in its cache while
// the tokens pass, SLAB at a time. The innermost piece, `product_tile`, has a twin for each instruction set:
//     y[n * TILE_ROWS + r] = W[r] . x[n] for `rows` <= TILE_ROWS rows and N <= SLAB tokens.
// In each of them an output is one sum in one order, whatever the other rows and tokens are.
constexpr int TILE_ROWS = 32, SLAB = 64;

// Consecutive rows of one block of a Linear.
template <class T> struct WeightRows {
    const T* w;
    const int8_t* q;
    const bf16* scale;
    int K;
    WeightRows(const Linear<T>& W, int block, size_t r) : w(W.w[block]), q(W.q[block]), scale(W.scale[block]), K(W.in) { skip(r); }
    INLINE void skip(size_t r) {
        if (w) w += r * K;
        else q += r * K, scale += r * ((K + GROUP - 1) / GROUP);
    }
};

// R rows by M tokens, in lanes of the compiler's making. TOKENS: how many at once keep the sums in registers.
struct PlainKernel {
    static constexpr int TOKENS = 4;
    template <bool INT8, int R, int M, class T> static INLINE void run(acc<T>* y, const WeightRows<T>& rows, const T* x, int K) {
        lanes<T> sum[R][M] = {}, a, b[M];
        const size_t groups = (K + GROUP - 1) / GROUP;
        for (int i = 0; i < K; i += LANES) {
            const int n = std::min(LANES, K - i);
            for (int m = 0; m < M; m++) load_some(b[m], x + (size_t)m * K + i, n);
            for (int r = 0; r < R; r++) {
                if (!INT8) load_some(a, rows.w + (size_t)r * K + i, n);
                else {
                    load_some(a, rows.q + (size_t)r * K + i, n);
                    a *= (acc<T>)to_acc(rows.scale[r * groups + i / GROUP]);
                }
                for (int m = 0; m < M; m++) sum[r][m] += a * b[m];
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum_lanes(sum[r][m]);
    }
};

#ifdef HAVE_TWINS
// The same with AVX2: 8 lanes, 16 registers.
TARGET_AVX2 INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
TARGET_AVX2 INLINE __m256 load8(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
TARGET_AVX2 INLINE __m256 load8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
template <class T> TARGET_AVX2 INLINE __m256 load8(const T* p, int n) {
    if (n >= 8) return load8(p);
    T whole[8] = {};
    memcpy((void*)whole, p, (size_t)n * sizeof(T));
    return load8(whole);
}
TARGET_AVX2 INLINE float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
struct Avx2Kernel {
    static constexpr int TOKENS = 2;
    template <bool INT8, int R, int M, class T> TARGET_AVX2 static void run(float* y, const WeightRows<T>& rows, const T* x, int K) {
        __m256 sum[R][M], a, b[M];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) sum[r][m] = _mm256_setzero_ps();
        const size_t groups = (K + GROUP - 1) / GROUP;
        for (int i = 0; i < K; i += 8) {
            for (int m = 0; m < M; m++) b[m] = load8(x + (size_t)m * K + i, K - i);
            for (int r = 0; r < R; r++) {
                if (!INT8) a = load8(rows.w + (size_t)r * K + i, K - i);
                else a = _mm256_mul_ps(load8(rows.q + (size_t)r * K + i, K - i), _mm256_set1_ps(to_acc(rows.scale[r * groups + i / GROUP])));
                for (int m = 0; m < M; m++) sum[r][m] = _mm256_fmadd_ps(a, b[m], sum[r][m]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum8(sum[r][m]);
    }
};

// With AVX-512: 16 lanes, 32 registers, and masks for the end of a row.
TARGET_AVX512 INLINE __mmask16 first_lanes(int n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }
TARGET_AVX512 INLINE __m512 load16(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
TARGET_AVX512 INLINE __m512 load16(const bf16* p, __mmask16 m) {
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(m, _mm512_maskz_cvtepu16_epi32(m, _mm256_maskz_loadu_epi16(m, p)), 16));
}
TARGET_AVX512 INLINE __m512 load16(const int8_t* p, __mmask16 m) {
    return _mm512_maskz_cvtepi32_ps(m, _mm512_maskz_cvtepi8_epi32(m, _mm_maskz_loadu_epi8(m, p)));
}
// Adds the lanes: halves, quarters, pairs. (The masked forms, all lanes on: g++ 12 warns of the plain ones.)
TARGET_AVX512 INLINE float sum16(__m512 v) {
    v = _mm512_add_ps(v, _mm512_maskz_shuffle_f32x4(0xffff, v, v, 0x4e));
    v = _mm512_add_ps(v, _mm512_maskz_shuffle_f32x4(0xffff, v, v, 0xb1));
    v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0x4e));
    v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0xb1));
    return _mm512_cvtss_f32(v);
}
struct Avx512Kernel {
    static constexpr int TOKENS = 4;
    template <bool INT8, int R, int M, class T> TARGET_AVX512 static void run(float* y, const WeightRows<T>& rows, const T* x, int K) {
        __m512 sum[R][M], a, b[M];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) sum[r][m] = _mm512_setzero_ps();
        const size_t groups = (K + GROUP - 1) / GROUP;
        for (size_t g = 0; g < groups; g += 16) { // 16 groups: their scales, as floats, are one register a row
            float scale[R][16];
            if (INT8)
                for (int r = 0; r < R; r++) _mm512_storeu_ps(scale[r], load16(rows.scale + r * groups + g, first_lanes((int)(groups - g))));
            for (int i = (int)g * GROUP; i < std::min(K, (int)g * GROUP + 16 * GROUP); i += 16) {
                const __mmask16 mask = first_lanes(K - i);
                for (int m = 0; m < M; m++) b[m] = load16(x + (size_t)m * K + i, mask);
                for (int r = 0; r < R; r++) {
                    // A row is short; the next ones are asked for while this one is computed on.
                    const void* next = INT8 ? (const void*)(rows.q + (size_t)(R + r) * K + i) : (const void*)(rows.w + (size_t)(R + r) * K + i);
                    if (M == 1 && i % 64 == 0) _mm_prefetch((const char*)next, _MM_HINT_T0);
                    if (!INT8) a = load16(rows.w + (size_t)r * K + i, mask);
                    else a = _mm512_mul_ps(load16(rows.q + (size_t)r * K + i, mask), _mm512_set1_ps(scale[r][i / GROUP - g]));
                    for (int m = 0; m < M; m++) sum[r][m] = _mm512_fmadd_ps(a, b[m], sum[r][m]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum16(sum[r][m]);
    }
};

// vdpbf16ps multiplies 32 pairs of bf16 and adds neighbours into 16 floats, with no conversion at all.
struct Bf16Kernel {
    static constexpr int TOKENS = 4;
    template <bool INT8, int R, int M, class T> TARGET_AVX512_BF16 static void run(float* y, const WeightRows<T>& rows, const T* x, int K) {
        static_assert(!INT8 && std::is_same_v<T, bf16>, "");
        __m512 sum[R][M];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) sum[r][m] = _mm512_setzero_ps();
        for (int i = 0; i < K; i += 32) {
            const __mmask32 mask = K - i >= 32 ? ~0u : (1u << (K - i)) - 1;
            __m512bh b[M];
            for (int m = 0; m < M; m++) b[m] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + (size_t)m * K + i);
            for (int r = 0; r < R; r++) {
                __m512bh a = (__m512bh)_mm512_maskz_loadu_epi16(mask, rows.w + (size_t)r * K + i);
                for (int m = 0; m < M; m++) sum[r][m] = _mm512_dpbf16_ps(sum[r][m], a, b[m]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum16(sum[r][m]);
    }
};

// INT8 in integers. vpdpbusd multiplies 64 pairs of bytes and adds them by fours into 16 sums of 32 bits, exactly; so
// x becomes integers, too. In each group of 32, x = step * (65536 h + 256 m + l): three planes of signed bytes, and a
// power of two that gives the largest |x| 22 bits. A bf16 has 8: all within 2^-14 of the largest are held exactly,
// and what smaller ones lose is less than a float sum would round away. (The least step is 2^-126.) The sums over a
// group are integers, the same in any order; so vectors may do a part of the work and tiles another, with the bits of
//     y = fma(scale_g, step_g * fma(256 H_g + M_g, 256, L_g), y)    group after group.
// For K a multiple of 64.
struct alignas(64) FixedX { // two groups of one token
    int8_t plane[3][2 * GROUP]; // h, m, l
    int32_t upper[2], lower[2]; // 128 times the sums of 256 h + m, and of l
    float step[2];
};
TARGET_AVX512_BF16 inline void fix_x(FixedX* out, const bf16* x) {
    for (int g = 0; g < 2; g++, x += GROUP) {
        int largest = 0;
        for (int i = 0; i < GROUP; i++) largest = std::max(largest, x[i].bits & 0x7fff);
        const int exponent = std::max(largest >> 7, 22); // so that neither power of two is subnormal
        const uint32_t step = (uint32_t)(exponent - 21) << 23, inverse = (uint32_t)(275 - exponent) << 23;
        const __m512 per_x = _mm512_castsi512_ps(_mm512_set1_epi32((int)inverse)); // step is 2^(exponent - 148)
        int sum[3] = {};
        for (int i = 0; i < GROUP; i += 16) {
            __m512i v = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(load16(x + i, 0xffff), per_x));
            for (int p = 2; p >= 0; p--) {
                _mm_storeu_si128((__m128i*)(out->plane[p] + g * GROUP + i), _mm512_maskz_cvtepi32_epi8(0xffff, v));
                v = _mm512_maskz_srai_epi32(0xffff, _mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
            }
        }
        for (int i = 0; i < GROUP; i++)
            for (int p = 0; p < 3; p++) sum[p] += out->plane[p][g * GROUP + i];
        out->upper[g] = 128 * (256 * sum[0] + sum[1]), out->lower[g] = 128 * sum[2];
        memcpy(out->step + g, &step, 4);
        if (exponent == 255) out->step[g] = NAN; // an infinity or a NaN is among them
    }
}
inline const FixedX* fix_all_x(const bf16* x, int N, int K) {
    static thread_local std::vector<FixedX> all; // grows to the largest batch, and stays
    const size_t n = (size_t)N * (K / 64);
    if (all.size() < n) all.resize(n);
    FixedX* out = all.data();
    #pragma omp parallel for schedule(static) if (N > 16)
    for (size_t i = 0; i < n; i++) fix_x(out + i, x + i * 64);
    return out;
}

// The sums of each half of 8 vectors of integers: of the lower halves of a[0..3], of their upper halves, and the same
// of a[4..7].
TARGET_AVX512_BF16 INLINE __m512i sum_halves(const __m512i* a) {
    __m512i two[4], four[2];
    for (int i = 0; i < 4; i++)
        two[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi32(0xffff, a[2 * i], a[2 * i + 1]),
                                  _mm512_maskz_unpackhi_epi32(0xffff, a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        four[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi64(0xff, two[2 * i], two[2 * i + 1]),
                                   _mm512_maskz_unpackhi_epi64(0xff, two[2 * i], two[2 * i + 1]));
    return _mm512_add_epi32(_mm512_maskz_shuffle_i32x4(0xffff, four[0], four[1], 0x88),
                            _mm512_maskz_shuffle_i32x4(0xffff, four[0], four[1], 0xdd));
}

// A number for each of two groups, in the order of sum_halves.
TARGET_AVX512_BF16 INLINE __m512i per_group(const void* two_words) {
    int64_t pair;
    memcpy(&pair, two_words, 8);
    const __m512i which = _mm512_set_epi32(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_maskz_permutexvar_epi32(0xffff, which, _mm512_set1_epi64(pair));
}

// 8 rows at a time, from all over the tile: memory gives the most when it is read at several places.
TARGET_AVX512_BF16 inline void product_tile_vnni(float* y, const WeightRows<bf16>& w, int rows, const FixedX* x, int N) {
    const int K = w.K, groups = K / GROUP, apart = (rows + 7) / 8;
    for (int first = 0; first < apart; first++) {
        const int8_t* q[8];
        int at[8], row[8];
        for (int r = 0; r < 8; r++) { // (the last rows stand for those that are missing)
            row[r] = std::min(first + r * apart, rows - 1);
            q[r] = w.q + (size_t)row[r] * K, at[r] = row[r] * groups;
        }
        const __m256i scale_at = _mm256_loadu_si256((const __m256i*)at);
        for (int n = 0; n < N; n++) {
            __m256 total = _mm256_setzero_ps();
            for (int k = 0; k < K; k += 64) {
                const FixedX& f = x[(size_t)n * (K / 64) + k / 64];
                const __m512i h = _mm512_load_si512(f.plane[0]), m = _mm512_load_si512(f.plane[1]), l = _mm512_load_si512(f.plane[2]);
                __m512i upper[8], lower[8]; // the sums of 256 h + m, and of l
                for (int r = 0; r < 8; r++) {
                    if (N == 1) _mm_prefetch((const char*)(q[r] + (size_t)TILE_ROWS * K + k), _MM_HINT_T0); // the next tile
                    // The instruction wants one factor without sign: q + 128, and 128 sum x is taken away below.
                    const __m512i u = _mm512_xor_si512(_mm512_loadu_si512(q[r] + k), _mm512_set1_epi8(-128));
                    lower[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, l);
                    upper[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, h);
                    upper[r] = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, upper[r], 8), u, m);
                }
                const __m512 a = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(upper), per_group(f.upper)));
                const __m512 b = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(lower), per_group(f.lower)));
                __m512 sum = _mm512_mul_ps(_mm512_castsi512_ps(per_group(f.step)), _mm512_fmadd_ps(a, _mm512_set1_ps(256), b));
                sum = _mm512_maskz_shuffle_f32x4(0xffff, sum, sum, 0xd8); // the first group's halves, then the second's
                const __m256i scales = _mm256_i32gather_epi32((const int*)(w.scale + k / GROUP), scale_at, 2); // two a row
                const __m256i scale0 = _mm256_slli_epi32(scales, 16), scale1 = _mm256_and_si256(scales, _mm256_set1_epi32(-65536));
                total = _mm256_fmadd_ps(_mm256_castsi256_ps(scale0), _mm512_maskz_extractf32x8_ps(0xff, sum, 0), total);
                total = _mm256_fmadd_ps(_mm256_castsi256_ps(scale1), _mm512_maskz_extractf32x8_ps(0xff, sum, 1), total);
            }
            float sums[8];
            _mm256_storeu_ps(sums, total);
            for (int r = 0; r < 8; r++) y[n * TILE_ROWS + row[r]] = sums[r];
        }
    }
}
#endif

// A whole tile in pieces of 4 rows and TOKENS tokens: their sums, and an operand or five, are what registers hold.
template <class Kernel, bool INT8, class T>
void product_tile(acc<T>* y, WeightRows<T> w, int rows, const T* x, int N) {
    constexpr int M = Kernel::TOKENS;
    const int K = w.K;
    for (int r = 0; r < rows;) {
        const bool four = r + 4 <= rows;
        int n = 0;
        for (; n + M <= N; n += M) {
            if (four) Kernel::template run<INT8, 4, M>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
            else Kernel::template run<INT8, 1, M>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
        }
        for (; n < N; n++) {
            if (four) Kernel::template run<INT8, 4, 1>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
            else Kernel::template run<INT8, 1, 1>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
        }
        const int done = four ? 4 : 1;
        w.skip(done);
        y += done, r += done;
    }
}
template <class T> using ProductTile = void (*)(acc<T>* y, WeightRows<T> w, int rows, const T* x, int N);

#ifdef HAVE_TWINS
// AMX: a tile register is 16 rows of 64 bytes; tdpbf16ps multiplies 16 rows of W by 16 tokens, 32 deep, at once.
// Rows of W are loaded from where they are. Of x it wants, row after row, the pairs (x[2k], x[2k+1]) of all 16
// tokens side by side: `amx_pack`. A single token is packed by its nature: so decoding takes the same road, one
// column wide, and gets the same bits as any batch. For K a multiple of 32 and 32 rows; else Bf16Kernel.
struct alignas(64) AmxConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    AmxConfig& tiles(int first, int last, int count, int bytes) {
        for (int t = first; t <= last; t++) rows[t] = (uint8_t)count, row_bytes[t] = (uint16_t)bytes;
        return *this;
    }
    TARGET_AMX void load() const {
        asm volatile("" ::"r"(this) : "memory"); // g++ 12 does not see that the next line reads all of it
        _tile_loadconfig(this);
    }
};

// x (N,K) to (N/16, K/2, 16) pairs, zeros for the tokens that are missing in the last 16. N = 1: x itself.
inline const bf16* amx_pack(const bf16* x, int N, int K) {
    if (N == 1) return x;
    static thread_local std::vector<uint32_t> packed; // grows to the largest batch, and stays
    const int groups = (N + 15) / 16;
    if (packed.size() < (size_t)groups * K * 8) packed.resize((size_t)groups * K * 8);
    uint32_t* out = packed.data();
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int g = 0; g < groups; g++)
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < K / 2; k++) {
                uint32_t pair = 0;
                if (g * 16 + n < N) memcpy(&pair, x + (size_t)(g * 16 + n) * K + 2 * k, 4);
                out[((size_t)g * K / 2 + k) * 16 + n] = pair;
            }
    return (const bf16*)out;
}

// Tiles 0-3: sums, 4 and 5: rows of W, 6 and 7: tokens. `width`: bytes of a row of tokens or sums.
TARGET_AMX inline void amx_configure(int width) {
    AmxConfig().tiles(0, 7, 16, width).tiles(4, 5, 16, 64).load();
}

// x as amx_pack made it, `width` bytes a row, from a multiple of 16 tokens on; N <= SLAB.
TARGET_AMX inline void product_tile_amx(float* y, const bf16* w, const bf16* x, int width, int N, int K) {
    amx_configure(width);
    const bf16* w2 = w + (size_t)16 * K;
    if (width == 4) { // one token: two columns of sums
        _tile_zero(0);
        _tile_zero(1);
        for (int k = 0; k < K; k += 32) {
            _tile_loadd(4, w + k, K * 2);
            _tile_loadd(6, x + k, 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, w2 + k, K * 2);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, y, 4);
        _tile_stored(1, y + 16, 4);
        return _tile_release();
    }
    for (int n = 0; n < N; n += 32) { // 32 rows by 32 tokens; the second 16 tokens may not be there
        const bool two = N - n > 16;
        const bf16 *x1 = x + (size_t)n * K, *x2 = two ? x1 + (size_t)16 * K : x1;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < K; k += 32) {
            _tile_loadd(4, w + k, K * 2);
            _tile_loadd(6, x1 + (size_t)k * 16, 64);
            _tile_loadd(5, w2 + k, K * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (two) {
                _tile_loadd(7, x2 + (size_t)k * 16, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        float sums[TILE_ROWS * 32]; // (rows, tokens): y wants it the other way round
        _tile_stored(0, sums, 128);
        _tile_stored(1, sums + 16 * 32, 128);
        _tile_stored(2, sums + 16, 128);
        _tile_stored(3, sums + 16 * 32 + 16, 128);
        for (int m = 0; m < std::min(32, N - n); m++)
            for (int r = 0; r < TILE_ROWS; r++) y[(n + m) * TILE_ROWS + r] = sums[r * 32 + m];
    }
    _tile_release();
}

// For INT8 weights: what 16 tokens have in a group, as tdpbssd takes it, 4 neighbours together.
struct alignas(64) FixedTile {
    int8_t plane[3][8][16][4]; // (planes, fours, tokens, 4)
    float step[16];
};
inline const FixedTile* amx_pack_int8(const FixedX* x, int N, int K) { // (N/16, K/32)
    static thread_local std::vector<FixedTile> packed; // grows to the largest batch, and stays
    const int tiles = (N + 15) / 16, groups = K / GROUP;
    if (packed.size() < (size_t)tiles * groups) packed.resize((size_t)tiles * groups);
    FixedTile* out = packed.data();
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int t = 0; t < tiles; t++)
        for (int g = 0; g < groups; g++)
            for (int n = 0; n < 16; n++) {
                const size_t token = std::min(t * 16 + n, N - 1); // (nobody reads what is behind N)
                const FixedX& from = x[token * groups / 2 + g / 2];
                FixedTile& to = out[(size_t)t * groups + g];
                to.step[n] = from.step[g % 2];
                for (int p = 0; p < 3; p++)
                    for (int k = 0; k < 8; k++) memcpy(to.plane[p][k][n], from.plane[p] + g % 2 * GROUP + 4 * k, 4);
            }
    return out;
}

// The sums H, M, L of one group, 16 rows by 16 tokens each, in tiles A, B and C. (A tile's name is no variable.)
#define AMX_GROUP(A, B, C, sums, q, x) \
    _tile_zero(A);                     \
    _tile_zero(B);                     \
    _tile_zero(C);                     \
    _tile_loadd(6, q, K);              \
    _tile_loadd(7, x.plane[0], 64);    \
    _tile_dpbssd(A, 6, 7);             \
    _tile_loadd(7, x.plane[1], 64);    \
    _tile_dpbssd(B, 6, 7);             \
    _tile_loadd(7, x.plane[2], 64);    \
    _tile_dpbssd(C, 6, 7);             \
    _tile_stored(A, sums[0], 64);      \
    _tile_stored(B, sums[1], 64);      \
    _tile_stored(C, sums[2], 64)

// 32 rows of INT8 and N <= SLAB tokens, 16 by 16 at a time; the bits of product_tile_vnni. A few groups go through the
// tiles, in turns through two sets of them, before vectors take the sums: what a tile has stored cannot be loaded soon.
TARGET_AMX inline void product_tile_amx_int8(float* y, const WeightRows<bf16>& w, const FixedTile* x, int N) {
    constexpr int PART = 4;
    const int K = w.K, groups = K / GROUP;
    alignas(64) float total[SLAB / 16][16][16]; // (tokens / 16, rows, tokens)
    alignas(64) int32_t sums[PART][3][16][16];  // (groups, planes, rows, tokens)
    AmxConfig().tiles(0, 5, 16, 64).tiles(6, 6, 16, GROUP).tiles(7, 7, 8, 64).load();
    for (int half = 0; half < 2; half++) {
        memset(total, 0, sizeof total);
        for (int g0 = 0; g0 < groups; g0 += PART) {
            const int parts = std::min(PART, groups - g0);
            float scale[PART][16];
            for (int r = 0; r < 16; r++)
                for (int g = 0; g < parts; g++) scale[g][r] = to_acc(w.scale[(size_t)(half * 16 + r) * groups + g0 + g]);
            for (int t = 0; t * 16 < N; t++) {
                const FixedTile* tile = x + (size_t)t * groups + g0;
                const int8_t* q = w.q + (size_t)half * 16 * K + g0 * GROUP;
                for (int g = 0; g < parts; g += 2) {
                    AMX_GROUP(0, 1, 2, sums[g], q + g * GROUP, tile[g]);
                    AMX_GROUP(3, 4, 5, sums[g + 1], q + (g + 1) * GROUP, tile[g + 1]);
                }
                for (int r = 0; r < 16; r += 4) {
                    __m512 sum[4];
                    for (int i = 0; i < 4; i++) sum[i] = _mm512_load_ps(total[t][r + i]);
                    for (int g = 0; g < parts; g++) {
                        const __m512 step = _mm512_load_ps(tile[g].step);
                        for (int i = 0; i < 4; i++) {
                            const __m512i h = _mm512_load_si512(sums[g][0][r + i]), m = _mm512_load_si512(sums[g][1][r + i]);
                            const __m512i upper = _mm512_add_epi32(_mm512_maskz_slli_epi32(0xffff, h, 8), m);
                            const __m512 a = _mm512_maskz_cvtepi32_ps(0xffff, upper);
                            const __m512 b = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(sums[g][2][r + i]));
                            const __m512 of_group = _mm512_mul_ps(step, _mm512_fmadd_ps(a, _mm512_set1_ps(256), b));
                            sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(scale[g][r + i]), of_group, sum[i]);
                        }
                    }
                    for (int i = 0; i < 4; i++) _mm512_store_ps(total[t][r + i], sum[i]);
                }
            }
        }
        for (int n = 0; n < N; n++)
            for (int r = 0; r < 16; r++) y[n * TILE_ROWS + half * 16 + r] = total[n / 16][r][n % 16];
    }
    _tile_release();
}
#endif

// The twin for this CPU.
template <bool INT8, class T> ProductTile<T> choose_tile() {
#ifdef HAVE_TWINS
    if constexpr (!INT8 && std::is_same_v<T, bf16>)
        if (cpu_road >= CPU_AVX512_BF16) return product_tile<Bf16Kernel, INT8, T>;
    if constexpr (!std::is_same_v<T, double>) {
        if (cpu_road >= CPU_AVX512) return product_tile<Avx512Kernel, INT8, T>;
        if (cpu_road >= CPU_AVX2) return product_tile<Avx2Kernel, INT8, T>;
    }
#endif
    return product_tile<PlainKernel, INT8, T>;
}

// `store(n, r, y)` takes each output once.
template <class T, class Store>
void product_cpu(const Linear<T>& W, const T* x, int N, Store store) {
    const int K = W.in;
    const ProductTile<T> tile = W.q[0] ? choose_tile<true, T>() : choose_tile<false, T>();
    bool integers = false, amx = false; // integers for INT8; AMX for whole tiles
#ifdef HAVE_TWINS
    const bf16* packed = nullptr;
    const FixedX* fixed = nullptr;
    const FixedTile* fixed_packed = nullptr;
    if constexpr (std::is_same_v<T, bf16>) {
        integers = cpu_road >= CPU_AVX512_BF16 && W.q[0] && K % 64 == 0;
        amx = cpu_road >= CPU_AMX && (W.q[0] ? integers && N > 1 : K % 32 == 0);
        if (integers) fixed = fix_all_x(x, N, K);
        if (amx && integers) fixed_packed = amx_pack_int8(fixed, N, K);
        else if (amx) packed = amx_pack(x, N, K);
    }
#endif
    // Tasks of 32 rows; fewer for a single token, so that they spread evenly (AMX and integers want their 32); more when there
    // are tokens enough to make re-reading x cost something.
    int step = N == 1 && !amx && !integers ? 8 : TILE_ROWS, first_task[4] = {};
    while (N >= SLAB && step < 128 && W.out() / (2 * step) >= 2 * thread_count()) step *= 2;
    for (int b = 0; b < 3; b++) first_task[b + 1] = first_task[b] + (W.rows[b] + step - 1) / step;
    #pragma omp parallel for schedule(static) if ((size_t)W.out() * K * N > 50000)
    for (int task = 0; task < first_task[3]; task++) {
        int b = 0, base = 0;
        while (task >= first_task[b + 1]) base += W.rows[b++];
        const int r0 = (task - first_task[b]) * step, r1 = std::min(W.rows[b], r0 + step);
        acc<T> y[TILE_ROWS * SLAB];
        for (int n0 = 0; n0 < N; n0 += SLAB) {
            const int n1 = std::min(N, n0 + SLAB);
            for (int r = r0; r < r1; r += TILE_ROWS) {
                const int rows = std::min(TILE_ROWS, r1 - r);
                const WeightRows<T> w(W, b, r);
#ifdef HAVE_TWINS
                if constexpr (std::is_same_v<T, bf16>) {
                    const size_t before = (size_t)n0 * K;
                    const bool tiles = amx && rows == TILE_ROWS;
                    if (tiles && integers) product_tile_amx_int8(y, w, fixed_packed + before / (16 * GROUP), n1 - n0);
                    else if (tiles) product_tile_amx(y, w.w, packed + before, N == 1 ? 4 : 64, n1 - n0, K);
                    else if (integers) product_tile_vnni(y, w, rows, fixed + before / (2 * GROUP), n1 - n0);
                }
#endif
                if (!integers && (!amx || rows < TILE_ROWS)) tile(y, w, rows, x + (size_t)n0 * K, n1 - n0);
                for (int n = n0; n < n1; n++)
                    for (int i = 0; i < rows; i++) store(n, base + r + i, y[(n - n0) * TILE_ROWS + i]);
            }
        }
    }
}

// out[n][k] = x[n][k] / (1 - p) where the mask keeps it, else 0
template <class T> void drop_cpu(T* out, const T* x, const Dropout& d, int module, int N, int K) {
    const acc<T> scale = 1 / (1 - (acc<T>)d.p);
    #pragma omp parallel for schedule(static) if ((size_t)N * K > 2000)
    for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k += 8) {
            const uint32_t kept = dropout_mask(d, d.token[n], module, k / 8);
            for (int i = k; i < std::min(K, k + 8); i++) out[(size_t)n * K + i] = to_stored<T>(kept >> (i - k) & 1 ? to_acc(x[(size_t)n * K + i]) * scale : 0);
        }
}
// x as module j of W's adapter sees it: dropped into scratch, or x itself.
template <class T> const T* dropped_cpu(const T* x, const Linear<T>& W, int j, int N) {
    if (!W.adapter.dropout) return x;
    static thread_local std::vector<T> scratch; // grows to the largest, and stays
    if (scratch.size() < (size_t)N * W.in) scratch.resize((size_t)N * W.in);
    drop_cpu(scratch.data(), x, *W.adapter.dropout, W.adapter.module[j], N, W.in);
    return scratch.data();
}

// ---- lora_down: h[n][j * rank + i] = sum_k A[j * rank + i][k] drop_j(x[n])[k]
template <class T>
void lora_down_cpu(T* h,       // (N, m * rank) out
                   const T* x, // (N, W.in)
                   const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t ld = (size_t)a.modules * a.rank;
    for (int j = 0; j < a.modules; j++) {
        Linear<T> A;
        A.w[0] = a.A + (size_t)j * a.rank * W.in, A.rows[0] = a.rank, A.in = W.in;
        product_cpu(A, dropped_cpu(x, W, j, N), N, [=](int n, int r, acc<T> y) { h[n * ld + j * a.rank + r] = to_stored<T>(y); });
    }
}

// x W^T with W's adapter, if it has one: s B h is added before anything is rounded.
template <class T, class Store>
void adapted_product_cpu(const Linear<T>& W, const T* x, int N, Store store) {
    const Adapter<T>& a = W.adapter;
    if (!a.rank) return product_cpu(W, x, N, store);
    lora_down_cpu(a.h, x, W, N);
    const size_t ld = (size_t)a.modules * a.rank;
    product_cpu(W, x, N, [&, ld](int n, int r, acc<T> y) {
        int block = 0, first = W.rows[0];
        while (r >= first) first += W.rows[++block];
        for (int j = 0; j < a.modules; j++)
            if (a.block[j] == block) y += dot(a.h + n * ld + j * a.rank, a.B + r * ld + j * a.rank, a.rank);
        store(n, r, y);
    });
}

// out = x W^T
template <class T>
void linear_cpu(T* out,     // (N, W.out) out
                const T* x, // (N, W.in)
                const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}

// out = residual + x W^T; out may be residual.
template <class T>
void linear_add_cpu(acc<T>* out,            // (N, W.out) out
                    const acc<T>* residual, // (N, W.out)
                    const T* x,             // (N, W.in)
                    const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

// out = normed W^T with normed = rmsnorm(x): where it helps, the product makes the rows it needs itself, and
// `normed` is not written.
template <class T>
void norm_linear_cpu(T* out,          // (N, W.out) out
                     T* normed,       // (N,C) scratch
                     const acc<T>* x, // (N,C)
                     const T* w,      // (C)
                     const Linear<T>& W, int N, float eps) {
    rmsnorm_cpu(normed, x, w, N, W.in, eps);
    linear_cpu(out, normed, W, N);
}
#ifdef __CUDACC__
// On the GPU the blocks of a Linear lie behind one another (see Weights::upload): one matrix W of R rows. What
// becomes of a sum is the epilogue's business. PAIR: W is gate over up, and the epilogue gets both of a column. ADDS: it adds
// to what is there, which `old` asks for. MASKS: of the further columns' sums only what `kept` says counts. PARTS: of every
// 64 sums of a row it gets what a softmax needs. `ask` comes before the sums are there: what `one` will need can be on its way.
struct StoreEpilogue {
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = false;
    bf16* out; // (N,R)
    size_t R;
    __device__ void begin() {}
    __device__ void ask(bool, int, int) {}
    __device__ void one(bool there, int n, int r, float y, bool) { if (there) out[n * R + r] = round_bf16(y); }
    __device__ void four(int n, int r, const float* y) { *(uint2*)(out + n * R + r) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3])); }
    __device__ void end(int) {}
};
struct AddEpilogue {
    static constexpr bool PAIR = false, ADDS = true, MASKS = false, PARTS = false;
    float* out;            // (N,R)
    const float* residual; // (N,R), may be out
    size_t R;
    float ahead = 0;
    __device__ void begin() {}
    __device__ void ask(bool there, int n, int r) { ahead = there ? residual[n * R + r] : 0; }
    __device__ void one(bool there, int n, int r, float y, bool asked) {
        if (there) out[n * R + r] = (asked ? ahead : residual[n * R + r]) + y;
    }
    __device__ float4 old(int n, int r) const { return *(const float4*)(residual + n * R + r); }
    __device__ void four(int n, int r, const float* y, float4 old) {
        *(float4*)(out + n * R + r) = make_float4(old.x + y[0], old.y + y[1], old.z + y[2], old.w + y[3]);
    }
    __device__ void end(int) {}
};
// gate and up are rounded as the CPU rounds them when it stores them.
__device__ inline float swiglu(float gate, float up) {
    const float g = to_acc(round_bf16(gate));
    return g / (1 + exp2_fast(-LOG2E * g)) * to_acc(round_bf16(up));
}
struct SwigluEpilogue {
    static constexpr bool PAIR = true, ADDS = false, MASKS = false, PARTS = false;
    bf16* out;     // (N,F)
    bf16* gate_up; // (N,2F) for the backward pass, or null
    size_t F;
    __device__ void begin() {}
    __device__ void ask(bool, int, int) {}
    __device__ void one(bool there, int n, int f, float gate, float up) {
        if (!there) return;
        out[n * F + f] = round_bf16(swiglu(gate, up));
        if (gate_up) gate_up[n * 2 * F + f] = round_bf16(gate), gate_up[(n * 2 + 1) * F + f] = round_bf16(up);
    }
    __device__ void four(int n, int f, const float* g, const float* u) {
        *(uint2*)(out + n * F + f) = make_uint2(pack(swiglu(g[0], u[0]), swiglu(g[1], u[1])), pack(swiglu(g[2], u[2]), swiglu(g[3], u[3])));
        if (!gate_up) return;
        *(uint2*)(gate_up + n * 2 * F + f) = make_uint2(pack(g[0], g[1]), pack(g[2], g[3]));
        *(uint2*)(gate_up + (n * 2 + 1) * F + f) = make_uint2(pack(u[0], u[1]), pack(u[2], u[3]));
    }
    __device__ void end(int) {}
};

// ---- Few tokens: the weights are streamed once, at the memory's speed.
// A block owns groups of TILES x 8 rows of W; its warps share out K in steps of 32. A step of a tile is one 16-byte
// load a lane: lane 4g + t holds k = 8t .. 8t + 7 of row g. Taken in pairs these are two b operands of mma, if a
// holds the same k of the tokens: any order of k will do that both agree on. So no number is moved or converted
// between memory and tensor core, and 1 to 8 M tokens cost the same. K and R are multiples of 8. All of a group's first LOADS steps are asked
// for before anything is waited for, the first group's before the kernel ahead has ended.
// A sum is taken in an order that depends on K only: a row of tokens has the same bits whatever M is.
// NORM: x is `norm_rows` of `stream`, made by each block for itself.
constexpr int STREAM_TOKENS = 16, NORM_TOKENS = 4, STREAM_LOADS = 8;

struct StreamArgs {
    const bf16* x;      // (., K)
    const int* rows;    // (N) rows of x, or null: the first N
    const float* stream; // (N,K) with NORM
    const bf16* norm;   // (K)
    float eps;
    const bf16* W;      // (R,K), with PAIR (2R,K)
    int N, K, R;
    int steps = 0;      // of K, a warp: set by launch_stream
};

template <int TILES, int M, bool NORM, class Epilogue>
__global__ void __launch_bounds__(384, 2) stream_kernel(StreamArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || TILES == 2, "a tile of gate, a tile of up");
    constexpr int LOADS = STREAM_LOADS / TILES, SUMS = TILES * M * 64; // (tile, token, row)
    extern __shared__ float shared[]; // two sets of (warps, SUMS), taken in turn; pieces of norm_rows; its output
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int first = warp * p.steps, last = min((p.K + 31) / 32, first + p.steps);
    const int rows = Epilogue::PAIR ? 8 : 8 * TILES, groups = (p.R + rows - 1) / rows;
    uint4 w[LOADS][TILES];
    auto load = [&](int group, int step) {
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int r = Epilogue::PAIR ? min(group * 8 + g, p.R - 1) + tile * p.R : min(group * rows + tile * 8 + g, p.R - 1);
            const bf16* at = p.W + (size_t)r * p.K + step * 32 + 8 * t;
            #pragma unroll
            for (int i = 0; i < LOADS; i++) w[i][tile] = load_stream(at + i * 32, step + i < last && (step + i) * 32 + 8 * t < p.K);
        }
    };
    int group = blockIdx.x;
    load(group, first);
    let_next_start();
    wait_for_previous();
    epilogue.begin();
    const bf16* x = p.x;
    int ld = p.K;
    if (NORM) {
        float* pieces = shared + 2 * warps * SUMS;
        bf16* normed = (bf16*)(pieces + (p.N * ((p.K + 127) / 128) + 3) / 4 * 4);
        ld = p.K + 8; // rows that begin in different banks
        norm_rows(normed, ld, p.stream, p.norm, pieces, p.N, p.K, p.eps);
        x = normed;
    }
    const bf16* token[M]; // this lane's rows of a: tokens g and g + 8; beyond the last one it computes what nobody keeps
    #pragma unroll
    for (int m = 0; m < M; m++) {
        const int n = min(g + 8 * m, p.N - 1);
        token[m] = x + (size_t)(!NORM && p.rows ? p.rows[n] : n) * ld;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        // This thread's first output: tokens 8 M, rows 8, of each tile.
        const int o0 = threadIdx.x, n0 = o0 / 8 % (8 * M), at0 = group * rows + o0 / (64 * M) * 8 + o0 % 8;
        epilogue.ask(o0 < SUMS && n0 < p.N && at0 < p.R, n0, at0);
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += LOADS) {
            if (step > first) load(group, step);
            #pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int k = min((step + i) * 32 + 8 * t, p.K - 8); // behind the end w is zero
                uint4 a[2] = {};
                #pragma unroll
                for (int m = 0; m < M; m++) a[m] = *(const uint4*)(token[m] + k);
                #pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    mma(sum[tile], a[0].x, a[1].x, a[0].y, a[1].y, w[i][tile].x, w[i][tile].y);
                    mma(sum[tile], a[0].z, a[1].z, a[0].w, a[1].w, w[i][tile].z, w[i][tile].w);
                }
            }
        }
        if (group + (int)gridDim.x < groups) load(group + gridDim.x, first);
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            #pragma unroll
            for (int m = 0; m < M; m++)
                *(float2*)(sums + warp * SUMS + ((tile * M + m) * 8 + g) * 8 + 2 * t) = make_float2(sum[tile][2 * m], sum[tile][2 * m + 1]);
        __syncthreads();
        for (int o = threadIdx.x; o < (Epilogue::PAIR ? SUMS / 2 : SUMS); o += blockDim.x) {
            const int n = o / 8 % (8 * M), r = group * rows + o / (64 * M) * 8 + o % 8;
            float y = 0, up = 0;
            #pragma unroll 4
            for (int v = 0; v < warps; v++) {
                y += sums[v * SUMS + o];
                if (Epilogue::PAIR) up += sums[v * SUMS + SUMS / 2 + o];
            }
            const bool there = n < p.N && r < p.R;
            if constexpr (Epilogue::PAIR) epilogue.one(there, n, r, y, up);
            else epilogue.one(there, n, r, y, o == o0); // eight lanes in a row have the same n
        }
        sums = sums == shared ? shared + warps * SUMS : shared;
    }
    epilogue.end(p.N);
}

// Returns the number of blocks.
template <int TILES, int M, bool NORM, class Epilogue>
int launch_stream(Context& ctx, StreamArgs p, Epilogue epilogue) {
    const int rows = Epilogue::PAIR ? 8 : 8 * TILES, groups = (p.R + rows - 1) / rows, steps = (p.K + 31) / 32;
    const int warps = std::min(12, std::max(4, steps * TILES / STREAM_LOADS));
    p.steps = (steps + warps - 1) / warps;
    size_t shared = 2 * (size_t)warps * TILES * M * 64 * sizeof(float);
    if (NORM) shared += (p.N * ((p.K + 127) / 128) + 3) / 4 * 4 * sizeof(float) + (size_t)p.N * (p.K + 8) * sizeof(bf16);
    const int blocks = std::min(groups, ctx.sms * (24 / warps)); // what is resident at once: 85 registers a thread
    launch(ctx, stream_kernel<TILES, M, NORM, Epilogue>, blocks, warps * 32, shared, p, epilogue);
    return blocks;
}
template <class Epilogue>
int stream_product(Context& ctx, const StreamArgs& p, Epilogue epilogue) {
    constexpr bool PAIR = Epilogue::PAIR;
    const bool two = PAIR || p.K <= 1024;
    if (p.stream) {
        if (two) return launch_stream<2, 1, true>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, true>(ctx, p, epilogue);
    } else if (p.N <= 8) {
        if (two) return launch_stream<2, 1, false>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, false>(ctx, p, epilogue);
    }
    if (two) return launch_stream<2, 2, false>(ctx, p, epilogue);
    if constexpr (!PAIR) return launch_stream<1, 2, false>(ctx, p, epilogue);
    return 0;
}

// ---- Many tokens: tiles of BM tokens by BN rows of W, a block each. Both operands pass through shared memory, BK numbers
// of K a stage, copied STAGES - 1 stages ahead of their use. y[n][r] = sum_k x[n][k] W[r][k], and the backward pass has
// two more: x and W can each lie with K running down (X_COLS: x is (K,N), W_COLS: W is (K,R)); the tensor core takes
// them transposed.
// A row of a stage is the 128 bytes of a cache line. Of an operand with K along its rows a row of shared memory holds
// one row; of one with K down it, 64 columns at one k, a panel of BK such rows for every 64. The row's chunks of 16 bytes
// are exchanged by row % 8, so that the 8 rows which are read at once lie in different banks.
// Roads: mma.sync, a warp owns WM by WN of the tile; or wgmma (S::WARPGROUP), the block's four warps own it together.
// A lane's sums lie in pairs of columns, 2t and 2t + 1 of eight: two neighbours exchange one of two pairs each, so that
// each has four columns in a row, and a quad of lanes writes whole sectors. With PAIR 16 rows of gate and 16 of up
// take turns: a lane's sums of both are of the same columns.
// splits > 1: as many blocks share a tile, each with a part of K; the last to arrive adds their sums in order.
constexpr int BK = 64;
constexpr size_t PARTIAL_BYTES = 32 << 20;
constexpr int MAX_TILES = 4096;

template <int BM_, int BN_, int WM_, int WN_, int STAGES_, bool WARPGROUP_ = false> struct TileShape {
    static constexpr int BM = BM_, BN = BN_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr bool WARPGROUP = WARPGROUP_;
    static constexpr int THREADS = BM / WM * (BN / WN) * 32;
    static constexpr size_t SHARED = (size_t)STAGES * (BM + BN) * BK * sizeof(bf16) + (WARPGROUP ? 1024 : 0);
};

struct TileArgs {
    const bf16 *x, *W;  // (N,K); (R,K), with PAIR (2R,K)
    int N, K, R;
    const bf16 *more_x = nullptr, *more_W = nullptr; // (N,more), (R,more): further columns of both (an adapter's), taken first;
                                                     // W_COLS: more_W is (more,R)
    int more = 0;
    int ldx = 0, ldw = 0; // numbers from one row of x and W to the next; 0: as many as a row has
    bool early = false;   // few blocks: the next kernel's may come beside them from the start
    int splits = 1;
    float* partial = nullptr;
    int* arrived = nullptr;
};

// Copies what one thread does of an operand's stage to shared memory. Chunks of 16 bytes: `chunk` of every STEPth row.
template <int ROWS, bool COLS, int THREADS> struct TileCopy {
    static constexpr int CHUNKS = COLS ? ROWS / 8 : BK / 8, STEP = THREADS / CHUNKS, COUNT = (COLS ? BK : ROWS) / STEP;
    static_assert(STEP % 8 == 0 && COUNT * STEP == (COLS ? BK : ROWS) && (!COLS || ROWS % 64 == 0), "every thread copies the same");
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const uint32_t at = (COLS ? chunk / 8 * (BK * 128) : 0) + row * 128 + ((chunk % 8 ^ row % 8) << 4);
};

template <class S, bool X_COLS, bool W_COLS, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, S::WARPGROUP ? 2 : 1) tile_kernel(TileArgs p, Epilogue epilogue) {
    constexpr int BM = S::BM, BN = S::BN, WM = S::WM, WN = S::WN, STAGES = S::STAGES, THREADS = S::THREADS;
    constexpr int MF = S::WARPGROUP ? BM / 64 : WM / 16, NF = S::WARPGROUP ? BN / 8 : WN / 8, STAGE = (BM + BN) * BK * 2, W_AT = BM * BK * 2;
    static_assert(!S::WARPGROUP || (THREADS == 128 && BN == 128), "one warpgroup");
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    extern __shared__ __align__(128) uint4 stages[]; // rows that straddle two lines of 128 bytes cost three times as much
    const uint32_t shared = S::WARPGROUP ? (shared_address(stages) + 1023) & ~1023u : shared_address(stages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int R = Epilogue::PAIR ? 2 * p.R : p.R;
    // Bands of 8 tiles of tokens: blocks that run at the same time share rows of both operands in the L2 cache.
    const int across = (R + BN - 1) / BN, down = (p.N + BM - 1) / BM, band = blockIdx.x / (8 * across), in_band = blockIdx.x % (8 * across);
    const int high = min(8, down - band * 8), n0 = (band * 8 + in_band % high) * BM, r0 = in_band / high * BN;
    const int ahead = (p.more + BK - 1) / BK, steps = ahead + (p.K + BK - 1) / BK; // of further columns, and all
    const int first = (int)((int64_t)steps * blockIdx.y / p.splits), last = (int)((int64_t)steps * (blockIdx.y + 1) / p.splits);

    const TileCopy<BM, X_COLS, THREADS> cx;
    const TileCopy<BN, W_COLS, THREADS> cw;
    auto copy_x = [&](int step) {
        const uint32_t to = shared + step % STAGES * STAGE + cx.at;
        if constexpr (X_COLS) {
            const int k = step * BK + cx.row, n = n0 + cx.chunk * 8;
            const bf16* from = p.x + (size_t)k * p.ldx + n;
            #pragma unroll
            for (int i = 0; i < cx.COUNT; i++) copy_async(to + i * cx.STEP * 128, from + (size_t)i * cx.STEP * p.ldx, step < last && k + i * cx.STEP < p.K && n < p.N);
        } else {
            const bool extra = step < ahead;
            const int k = (extra ? step : step - ahead) * BK + cx.chunk * 8, n = n0 + cx.row, ld = extra ? p.more : p.ldx;
            const bool inside = step < last && k < (extra ? p.more : p.K);
            const bf16* from = (extra ? p.more_x : p.x) + (size_t)n * ld + k;
            #pragma unroll
            for (int i = 0; i < cx.COUNT; i++) copy_async(to + i * cx.STEP * 128, from + (size_t)i * cx.STEP * ld, inside && n + i * cx.STEP < p.N);
        }
    };
    auto copy_w = [&](int step) {
        const uint32_t to = shared + step % STAGES * STAGE + W_AT + cw.at;
        if constexpr (W_COLS) {
            const bool extra = step < ahead;
            const int k = (extra ? step : step - ahead) * BK + cw.row, r = r0 + cw.chunk * 8, ld = extra ? p.R : p.ldw, end = extra ? p.more : p.K;
            const bf16* from = (extra ? p.more_W : p.W) + (size_t)k * ld + r;
            #pragma unroll
            for (int i = 0; i < cw.COUNT; i++) copy_async(to + i * cw.STEP * 128, from + (size_t)i * cw.STEP * ld, step < last && k + i * cw.STEP < end && r < R);
        } else {
            const bool extra = step < ahead;
            const int k = (extra ? step : step - ahead) * BK + cw.chunk * 8, ld = extra ? p.more : p.ldw;
            const bool inside = step < last && k < (extra ? p.more : p.K);
            const bf16* from = (extra ? p.more_W : p.W) + k;
            #pragma unroll
            for (int i = 0; i < cw.COUNT; i++) {
                const int w = cw.row + i * cw.STEP, r = Epilogue::PAIR ? r0 / 2 + w / 32 * 16 + w % 16 : r0 + w;
                copy_async(to + i * cw.STEP * 128, from + (size_t)(Epilogue::PAIR && w / 16 % 2 ? p.R + r : r) * ld, inside && r < p.R);
            }
        }
    };
    // Weights depend on no kernel ahead.
    if (!W_COLS)
        for (int s = 0; s < STAGES - 1; s++) copy_w(first + s);
    if (p.early) let_next_start();
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (W_COLS) copy_w(first + s);
        copy_x(first + s);
        commit_copies(); // (the first of these groups has all of the weights above)
    }
    const int warp_m = S::WARPGROUP ? warp * 16 : warp % (BM / WM) * WM, warp_n = S::WARPGROUP ? 0 : warp / (BM / WM) * WN, t = lane % 4;
    const auto row_of = [&](int i, int h) { return n0 + warp_m + i * (S::WARPGROUP ? 64 : 16) + h * 8 + lane / 4; };
    float sum[MF][NF][4] = {};
    const auto multiply = [&](int from, int to) {
        for (int step = from; step < to; step++) {
            wait_for_copies<STAGES - 2>();
            if (S::WARPGROUP) wgmma_see_shared();
            __syncthreads();
            if (step + STAGES - 1 < last) copy_x(step + STAGES - 1), copy_w(step + STAGES - 1);
            commit_copies();
            const uint32_t x_stage = shared + step % STAGES * STAGE, w_stage = x_stage + W_AT;
            if constexpr (S::WARPGROUP) {
                wgmma_begin();
                #pragma unroll
                for (int k = 0; k < BK / 16; k++)
                    #pragma unroll
                    for (int i = 0; i < MF; i++)
                        wgmma<X_COLS, W_COLS>(sum[i], wgmma_operand(x_stage + i * 64 * 128 + k * (X_COLS ? 16 * 128 : 32), BK * 128),
                                              wgmma_operand(w_stage + k * (W_COLS ? 16 * 128 : 32), BK * 128));
                wgmma_end(sum);
            } else {
                #pragma unroll
                for (int k = 0; k < BK / 16; k++) {
                    uint32_t a[MF][4], b[NF / 2][4];
                    #pragma unroll
                    for (int i = 0; i < MF; i++) {
                        if constexpr (X_COLS) { // four 8 x 8: k down, rows of x across
                            const int row = k * 16 + lane % 8 + lane / 16 * 8, chunk = (warp_m + i * 16) / 8 + lane / 8 % 2;
                            ldmatrix_transposed(a[i], x_stage + chunk / 8 * (BK * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4));
                        } else {
                            const int row = warp_m + i * 16 + lane % 16;
                            ldmatrix(a[i], x_stage + row * 128 + (((2 * k + lane / 16) ^ row % 8) << 4));
                        }
                    }
                    #pragma unroll
                    for (int j = 0; j < NF / 2; j++) {
                        if constexpr (W_COLS) {
                            const int row = k * 16 + lane % 16, chunk = (warp_n + j * 16) / 8 + lane / 16;
                            ldmatrix_transposed(b[j], w_stage + chunk / 8 * (BK * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4));
                        } else {
                            const int row = warp_n + j * 16 + lane % 8 + lane / 16 * 8;
                            ldmatrix(b[j], w_stage + row * 128 + (((2 * k + lane / 8 % 2) ^ row % 8) << 4));
                        }
                    }
                    #pragma unroll
                    for (int i = 0; i < MF; i++)
                        #pragma unroll
                        for (int j = 0; j < NF; j++) mma(sum[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    };
    if constexpr (Epilogue::MASKS) {
        multiply(first, min(last, ahead));
        if (first < ahead)
            #pragma unroll
            for (int i = 0; i < MF; i++)
                #pragma unroll
                for (int h = 0; h < 2; h++)
                    #pragma unroll
                    for (int f = 0; f < NF; f += 4) { // each lane of a quad asks about eight columns, for all four
                        const uint32_t mine = row_of(i, h) < p.N ? epilogue.kept(row_of(i, h), (r0 + warp_n) / 8 + f + t) : 0;
                        #pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const uint32_t kept = __shfl_sync(~0u, mine, (lane & ~3) + e) >> 2 * t;
                            float* y = &sum[i][f + e][2 * h];
                            y[0] = kept & 1 ? y[0] * epilogue.scale : 0, y[1] = kept & 2 ? y[1] * epilogue.scale : 0;
                        }
                    }
        if constexpr (S::WARPGROUP) wgmma_settle(sum);
    }
    multiply(Epilogue::MASKS ? max(first, ahead) : first, last);
    wait_for_copies<0>();
    if (!p.early) let_next_start(); // earlier, blocks of the next kernel would take the places of ours

    if (p.splits > 1) { // sums lie in the scratch as the threads hold them
        float4* part = (float4*)p.partial + (size_t)blockIdx.x * p.splits * MF * NF * THREADS + threadIdx.x;
        float4* mine = part + (size_t)blockIdx.y * MF * NF * THREADS;
        #pragma unroll
        for (int f = 0; f < MF * NF; f++) {
            float(&v)[4] = sum[f / NF][f % NF];
            mine[f * THREADS] = make_float4(v[0], v[1], v[2], v[3]);
            v[0] = v[1] = v[2] = v[3] = 0;
        }
        if (!last_to_arrive(p.arrived + blockIdx.x, p.splits)) return;
        #pragma unroll 1
        for (int split = 0; split < p.splits; split++, part += MF * NF * THREADS)
            #pragma unroll
            for (int f = 0; f < MF * NF; f++) {
                const float4 more = __ldcg(part + f * THREADS);
                float(&v)[4] = sum[f / NF][f % NF];
                v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
            }
    }
    #pragma unroll
    for (int i = 0; i < MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = row_of(i, h);
            if constexpr (Epilogue::PARTS) {
                static_assert(NF % 8 == 0, "a quad of lanes has whole pieces of 64");
                #pragma unroll
                for (int f0 = 0; f0 < NF; f0 += 8) {
                    const int c0 = r0 + warp_n + f0 * 8;
                    float top = -1e30f, part = 0;
                    #pragma unroll
                    for (int f = f0; f < f0 + 8; f++)
                        #pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (c0 + (f - f0) * 8 + 2 * t + e < p.R) top = fmaxf(top, sum[i][f][2 * h + e]);
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                    #pragma unroll
                    for (int f = f0; f < f0 + 8; f++)
                        #pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (c0 + (f - f0) * 8 + 2 * t + e < p.R) part += exp2_fast((sum[i][f][2 * h + e] - top) * LOG2E);
                    part += __shfl_xor_sync(~0u, part, 1);
                    part += __shfl_xor_sync(~0u, part, 2);
                    if (t == 0 && n < p.N && c0 < p.R) epilogue.part(n, c0 / 64, top, part);
                }
            }
            // Four columns in a row, of the 16 of sums f and f + 1: lanes 0 1 2 3 of a quad get those from 0, 8, 4, 12 on.
            const auto row = [&](int f) {
                const float *even = &sum[i][f][2 * h], *odd = &sum[i][f + 1][2 * h];
                const float a = __shfl_xor_sync(~0u, t % 2 ? even[0] : odd[0], 1), b = __shfl_xor_sync(~0u, t % 2 ? even[1] : odd[1], 1);
                return t % 2 ? make_float4(a, b, odd[0], odd[1]) : make_float4(even[0], even[1], a, b);
            };
            constexpr int EACH = Epilogue::PAIR ? 4 : 2;
            const auto column = [&](int j) { return (Epilogue::PAIR ? (r0 + warp_n) / 2 + j * 4 : r0 + warp_n + j * 8) + t / 2 * 4 + t % 2 * 8; };
            [[maybe_unused]] float4 old[Epilogue::ADDS ? NF / EACH : 1]; // all of a row is asked for before the first of it is waited for
            if constexpr (Epilogue::ADDS)
                #pragma unroll
                for (int j = 0; j < NF; j += EACH) old[j / EACH] = n < p.N && column(j) < p.R ? epilogue.old(n, column(j)) : float4{};
            #pragma unroll
            for (int j = 0; j < NF; j += EACH) {
                const bool there = n < p.N && column(j) < p.R;
                const float4 y = row(j);
                if constexpr (Epilogue::PAIR) {
                    const float4 up = row(j + 2);
                    if (there) epilogue.four(n, column(j), &y.x, &up.x);
                } else if constexpr (Epilogue::ADDS) {
                    if (there) epilogue.four(n, column(j), &y.x, old[j / EACH]);
                } else {
                    if (there) epilogue.four(n, column(j), &y.x);
                }
            }
        }
}

using Tile128x128 = TileShape<128, 128, 64, 64, 3>;
using Tile64x128 = TileShape<64, 128, 32, 64, 3>;
using Tile64x64 = TileShape<64, 64, 32, 32, 4>;
using Tile32x64 = TileShape<32, 64, 16, 32, 6>;
using TileHopper = TileShape<128, 128, 64, 64, 3, true>;

// The shape and the number of splits with the least predicted time in microseconds. The figures were fitted to an
// H100 (tests/bench/bench_gpu sweep); what matters is their proportion. Of 1,024 of K a block takes `alone` if it is alone on
// its multiprocessor, and `full` if that has many.
struct TilePlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    template <class S> void consider(const Context& ctx, int index, double alone, double full, int N, int R, int K) {
        const int64_t tiles = (int64_t)((N + S::BM - 1) / S::BM) * ((R + S::BN - 1) / S::BN), area = S::BM * S::BN;
        for (int s = 1; s <= 12; s++) {
            if (s > 1 && (s * 128 > K || tiles > MAX_TILES || tiles * s * area * 4 > (int64_t)PARTIAL_BYTES)) break;
            const double blocks = (double)((tiles * s + ctx.sms - 1) / ctx.sms); // of the busiest multiprocessor
            double time = 1 + std::max(alone, blocks * full) * K / 1024 / s;
            if (s > 1) time += 0.85 + s * (0.22 + 0.93 * (double)area / 16384) + (double)(tiles * s * area) * 8 / 5.5e6;
            if (time < least) shape = index, splits = s, least = time;
        }
    }
    // x_cols: K runs down x, which tiles of 32 tokens cannot take; of many tokens they were never the best.
    TilePlan(const Context& ctx, int N, int R, int K, bool x_cols = false) {
        if (ctx.invariant) return;
        consider<Tile128x128>(ctx, 0, 13, 9.8, N, R, K);
        consider<Tile64x128>(ctx, 1, 9.1, 6.5, N, R, K);
        consider<Tile64x64>(ctx, 2, 9, 3.4, N, R, K);
        if (!x_cols && N <= 128) consider<Tile32x64>(ctx, 3, 5.8, 2.6, N, R, K);
        if (ctx.hopper) consider<TileHopper>(ctx, 4, 9.6, 8.6, N, R, K);
    }
};

template <class S, bool X_COLS = false, bool W_COLS = false, class Epilogue>
void launch_tiles(Context& ctx, TileArgs p, Epilogue epilogue) {
    const int R = Epilogue::PAIR ? 2 * p.R : p.R;
    const dim3 grid((unsigned)((p.N + S::BM - 1) / S::BM * ((R + S::BN - 1) / S::BN)), (unsigned)p.splits);
    p.partial = ctx.partial, p.arrived = ctx.arrived;
    if (!p.ldx) p.ldx = X_COLS ? p.N : p.K;
    if (!p.ldw) p.ldw = W_COLS ? p.R : p.K;
    launch(ctx, tile_kernel<S, X_COLS, W_COLS, Epilogue>, grid, S::THREADS, S::SHARED, p, epilogue);
}
template <bool X_COLS = false, bool W_COLS = false, class Epilogue>
void tile_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    const TilePlan plan(ctx, p.N, Epilogue::PAIR ? 2 * p.R : p.R, p.K + p.more, X_COLS);
    p.splits = plan.splits;
    switch (plan.shape) {
        case 0: return launch_tiles<Tile128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_tiles<Tile64x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_tiles<Tile64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: if constexpr (!X_COLS) return launch_tiles<Tile32x64, X_COLS, W_COLS>(ctx, p, epilogue); else break;
        default: return launch_tiles<TileHopper, X_COLS, W_COLS>(ctx, p, epilogue);
    }
}

// ---- lora_down. What the adapter's kernels need to know; masks are made anew wherever they are needed.
struct LoraArgs {
    const bf16* A;   // (m * rank, K)
    int N, K, rank, modules, module[3];
    bool dropping;
    float scale = 1; // 1 / (1 - p)
    Dropout dropout = {};
    LoraArgs(const Linear<bf16>& W, int N) : A(W.adapter.A), N(N), K(W.in), rank(W.adapter.rank), modules(W.adapter.modules), dropping(W.adapter.dropout) {
        for (int j = 0; j < 3; j++) module[j] = W.adapter.module[j];
        if (dropping) dropout = *W.adapter.dropout, scale = 1 / (1 - dropout.p);
    }
    __device__ int name(int j) const { return j == 0 ? module[0] : j == 1 ? module[1] : module[2]; } // (an index would cost a copy)
    // Eight neighbours of token n as a module sees them.
    __device__ uint4 drop(uint4 v, int n, int name, int k8) const {
        if (!dropping || n >= N) return v;
        const uint32_t kept = dropout_mask(dropout, dropout.token[n], name, k8);
        auto two = [&](uint32_t pair, int bit) { return pack(kept >> bit & 1 ? low(pair) * scale : 0, kept >> bit & 2 ? high(pair) * scale : 0); };
        return make_uint4(two(v.x, 0), two(v.y, 2), two(v.z, 4), two(v.w, 6));
    }
};
// A block owns 32 tokens by 32 rows of a module's A; its warps take K in turns, 32 at a time, with operands straight from
// memory as in stream_kernel.
__global__ void __launch_bounds__(256, 2) lora_down_kernel(bf16* h, const bf16* x, LoraArgs p) {
    __shared__ float sums[8][32][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, groups = (p.rank + 31) / 32;
    const int n0 = blockIdx.x * 32, j = blockIdx.y / groups, r0 = blockIdx.y % groups * 32, name = p.name(j);
    wait_for_previous();
    float sum[4][2][4] = {};
    for (int k = warp * 32 + 8 * t; k < (p.K + 31) / 32 * 32; k += 256) {
        uint4 a[4], b[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = n0 + i * 8 + g < p.N && k < p.K ? *(const uint4*)(x + (size_t)(n0 + i * 8 + g) * p.K + k) : uint4{};
        #pragma unroll
        for (int c = 0; c < 4; c++) b[c] = r0 + c * 8 + g < p.rank && k < p.K ? *(const uint4*)(p.A + (size_t)(j * p.rank + r0 + c * 8 + g) * p.K + k) : uint4{};
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = p.drop(a[i], n0 + i * 8 + g, name, k / 8);
        #pragma unroll
        for (int c = 0; c < 4; c++)
            #pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(sum[c][m], a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y, b[c].x, b[c].y);
                mma(sum[c][m], a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w, b[c].z, b[c].w);
            }
    }
    let_next_start();
    #pragma unroll
    for (int c = 0; c < 4; c++)
        #pragma unroll
        for (int e = 0; e < 4; e++) // token e * 8 + g
            *(float2*)&sums[warp][e * 8 + g][c * 8 + 2 * t] = make_float2(sum[c][e / 2][e % 2 * 2], sum[c][e / 2][e % 2 * 2 + 1]);
    __syncthreads();
    const int n = threadIdx.x / 8, r = threadIdx.x % 8 * 4;
    float4 all = {};
    for (int w = 0; w < 8; w++) {
        const float4 v = *(const float4*)&sums[w][n][r];
        all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
    }
    if (n0 + n < p.N && r0 + r < p.rank)
        *(uint2*)(h + (size_t)(n0 + n) * p.modules * p.rank + j * p.rank + r0 + r) = make_uint2(pack(all.x, all.y), pack(all.z, all.w));
}
inline void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N) {
    const LoraArgs p(W, N);
    launch(ctx, lora_down_kernel, dim3((N + 31) / 32, p.modules * ((p.rank + 31) / 32)), 256, 0, h, x, p);
}

// x W^T, by the road that suits N; an adapter's h and s B are further columns of x and W.
template <class Epilogue>
void product_gpu(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N) {
    const int R = Epilogue::PAIR ? W.rows[0] : W.out();
    const Adapter<bf16>& a = W.adapter;
    if (N <= STREAM_TOKENS && !ctx.invariant && !a.rank) {
        stream_product(ctx, {x, nullptr, nullptr, nullptr, 0, W.w[0], N, W.in, R}, epilogue);
        return;
    }
    TileArgs p = {x, W.w[0], N, W.in, R};
    p.early = N <= 128;
    if (a.rank) {
        lora_down_gpu(ctx, a.h, x, W, N);
        p.more_x = a.h, p.more_W = a.B, p.more = a.modules * a.rank;
    }
    tile_product(ctx, p, epilogue);
}
// The same of norm_rows(stream); `normed` (N,K) holds these where the product does not make them on its way.
template <class Epilogue>
void norm_product_gpu(Context& ctx, Epilogue epilogue, bf16* normed, const float* stream, const bf16* norm, const Linear<bf16>& W, int N, float eps) {
    if (N > NORM_TOKENS || ctx.invariant || W.adapter.rank) {
        rmsnorm_gpu(ctx, normed, stream, norm, N, W.in, eps);
        return product_gpu(ctx, epilogue, normed, W, N);
    }
    stream_product(ctx, {nullptr, nullptr, stream, norm, eps, W.w[0], N, W.in, Epilogue::PAIR ? W.rows[0] : W.out()}, epilogue);
}

inline void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue{out, (size_t)W.out()}, x, W, N);
}
inline void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, AddEpilogue{out, residual, (size_t)W.out()}, x, W, N);
}
inline void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* stream, const bf16* norm, const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, StoreEpilogue{out, (size_t)W.out()}, normed, stream, norm, W, N, eps);
}
#endif

// ---- q/k norm, RoPE, KV write: the q and k heads of each token are RMS-normalised and turned by the angle
// pos * theta^(-2i/D) in each plane (i, i + D/2)      (Su et al., "RoFormer", 2021, in the half-split layout);
// q goes on, k and v go to the cache.
template <class T>
void qknorm_rope_kv_cpu(T* q,              // (N,HD) out
                        T* keys,           // one layer's cache, out
                        T* values,         // one layer's cache, out
                        const T* qkv,      // (N,(H+2K)D)
                        const T* q_weight, // (D)
                        const T* k_weight, // (D)
                        const acc<T>* rope, // (positions, D/2, 2) cosine and sine
                        const Batch& b, int H, int K, int D, float eps) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const T* row = qkv + (size_t)n * (H + 2 * K) * D;
        const acc<T>* turn = rope + (size_t)b.pos[n] * D;
        const int page = b.slot[n] / PAGE, within = b.slot[n] % PAGE;
        auto norm_rope = [&](T* out, const T* in, const T* w) {
            const acc<T> scale = inverse_rms(in, D, eps);
            for (int i = 0; i < D / 2; i++) {
                acc<T> u = to_acc(in[i]) * scale * to_acc(w[i]), v = to_acc(in[i + D / 2]) * scale * to_acc(w[i + D / 2]);
                out[i] = to_stored<T>(u * turn[2 * i] - v * turn[2 * i + 1]);
                out[i + D / 2] = to_stored<T>(v * turn[2 * i] + u * turn[2 * i + 1]);
            }
        };
        for (int h = 0; h < H; h++) norm_rope(q + ((size_t)n * H + h) * D, row + h * D, q_weight);
        for (int h = 0; h < K; h++) {
            size_t at = kv_offset(page, h, within, K, D);
            norm_rope(keys + at, row + (H + h) * D, k_weight);
            memcpy((void*)(values + at), row + (H + K + h) * D, D * sizeof(T));
        }
    }
}

#ifdef __CUDACC__
// A head of D numbers in a warp: lane l holds P = D / 64 pairs of its planes, u = head[i] and v = head[i + D/2] for
// i = P l .. P l + P - 1.
template <int D> struct WarpHead {
    static constexpr int P = D / 64;
    float u[P], v[P];

    __device__ void load(const bf16* head) {
        const int i = threadIdx.x % 32 * P;
        for (int p = 0; p < P; p++) u[p] = to_acc(head[i + p]), v[p] = to_acc(head[i + p + D / 2]);
    }
    __device__ void store(bf16* head) const {
        const int i = threadIdx.x % 32 * P;
        for (int p = 0; p < P; p++) head[i + p] = round_bf16(u[p]), head[i + p + D / 2] = round_bf16(v[p]);
    }
    __device__ void norm_rope(const bf16* w, const float* turn, float eps) {
        float squares = 0;
        for (int p = 0; p < P; p++) squares += u[p] * u[p] + v[p] * v[p];
        const float scale = 1 / sqrtf(warp_sum(squares) / D + eps);
        const int i = threadIdx.x % 32 * P;
        for (int p = 0; p < P; p++) {
            const float a = u[p] * scale * to_acc(w[i + p]), b = v[p] * scale * to_acc(w[i + p + D / 2]);
            const float cosine = turn[2 * (i + p)], sine = turn[2 * (i + p) + 1];
            u[p] = a * cosine - b * sine, v[p] = b * cosine + a * sine;
        }
    }
};

// A warp a head of a token, from row `first` on.
template <int D>
__global__ void qknorm_rope_kv_kernel(bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                      const float* rope, Batch b, int first, int H, int K, float eps) {
    let_next_start();
    wait_for_previous();
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, n = first + task / (H + 2 * K), h = task % (H + 2 * K);
    if (n >= b.N || b.seq[n] < 0) return;
    WarpHead<D> head;
    head.load(qkv + ((size_t)n * (H + 2 * K) + h) * D);
    const size_t at = h < H ? 0 : kv_offset(b.slot[n] / PAGE, (h - H) % K, b.slot[n] % PAGE, K, D);
    if (h < H + K) head.norm_rope(h < H ? q_weight : k_weight, rope + (size_t)b.pos[n] * D, eps);
    head.store(h < H ? q + ((size_t)n * H + h) * D : h < H + K ? keys + at : values + at);
}
inline void qknorm_rope_kv_gpu(Context& ctx, bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                               const float* rope, const Batch& b, int H, int K, int D, float eps, int first = 0) {
    const int blocks = (int)(((int64_t)(b.N - first) * (H + 2 * K) + 7) / 8);
    launch(ctx, D == 128 ? qknorm_rope_kv_kernel<128> : qknorm_rope_kv_kernel<64>, blocks, 256, 0, q, keys, values, qkv, q_weight, k_weight, rope, b, first, H, K, eps);
}
#endif

// The angles as Hugging Face computes them: in float32 (in double for double), since the models were trained so.
template <class A> void fill_rope(A* rope, int positions, int D, double theta) {
    std::vector<A> frequency(D / 2);
    for (int i = 0; i < D / 2; i++) frequency[i] = (A)1 / (A)std::pow(theta, (double)((A)(2 * i) / (A)D));
    #pragma omp parallel for schedule(static)
    for (int p = 0; p < positions; p++)
        for (int i = 0; i < D / 2; i++) {
            const A angle = (A)p * frequency[i];
            rope[(size_t)p * D + 2 * i] = std::cos(angle);
            rope[(size_t)p * D + 2 * i + 1] = std::sin(angle);
        }
}

// ---- attention: out[n][h] = softmax(q . k / sqrt(D)) v over the positions 0..pos[n] of n's sequence; query head
// h reads key/value head h / G. Page by page with a running maximum (Milakov & Gimelshein, "Online normalizer
// calculation for softmax", 2018): when it grows, what was summed so far is scaled down. Every PIECE keys the sums
// start anew, and are then added to those of the pieces before in the same way: so the pieces of one row can be tasks
// of their own, where there are few rows (decode at long contexts), and the row's bits stay what they are.
constexpr int ATTENTION_ROWS = 32; // query rows that share a page while it is in the first-level cache
constexpr int MAX_HEAD = 512;      // parse_config refuses more
constexpr int PIECE = 512;         // keys; whole pages

// Numerator and denominator of a softmax over some keys, both divided by e^maximum.
template <class T> struct AttentionSum {
    acc<T> out[MAX_HEAD], maximum, sum;

    void clear(int D) {
        std::fill(out, out + D, (acc<T>)0);
        maximum = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
    }
    void add(const AttentionSum& o, int D) { // other keys
        const acc<T> top = std::max(maximum, o.maximum), mine = std::exp(maximum - top), theirs = std::exp(o.maximum - top);
        for (int i = 0; i < D; i++) out[i] = out[i] * mine + o.out[i] * theirs;
        maximum = top, sum = sum * mine + o.sum * theirs;
    }
};
template <class T> struct AttentionRow {
    acc<T> q[MAX_HEAD];
    AttentionSum<T> piece, total;
    int length; // keys it sees
};

// p[j] = q . keys[j] for the 16 keys of a page, and out = out * scale + sum_j p[j] values[j]; keys, values (16,D).
template <class A> void attention_scores_plain(A* p, const A* q, const A* keys, int D) {
    for (int j = 0; j < PAGE; j++) p[j] = dot(q, keys + j * D, D);
}
template <class A> void attention_mix_plain(A* out, A scale, const A* p, const A* values, int D) {
    for (int i = 0; i < D; i += LANES) {
        const int n = std::min(LANES, D - i);
        lanes<A> o, v;
        load_some(o, out + i, n);
        o *= scale;
        for (int j = 0; j < PAGE; j++) {
            load_some(v, values + j * D + i, n);
            o += v * p[j];
        }
        memcpy(out + i, &o, n * sizeof(A));
    }
}
#ifdef HAVE_TWINS
TARGET_AVX2 inline void attention_scores_avx2(float* p, const float* q, const float* keys, int D) {
    for (int j = 0; j < PAGE; j += 4) {
        __m256 sum[4], a;
        for (int k = 0; k < 4; k++) sum[k] = _mm256_setzero_ps();
        for (int i = 0; i < D; i += 8) {
            a = load8(q + i, D - i);
            for (int k = 0; k < 4; k++) sum[k] = _mm256_fmadd_ps(a, load8(keys + (j + k) * D + i, D - i), sum[k]);
        }
        for (int k = 0; k < 4; k++) p[j + k] = sum8(sum[k]);
    }
}
TARGET_AVX2 inline void attention_mix_avx2(float* out, float scale, const float* p, const float* values, int D) {
    for (int i = 0; i < D; i += 8) {
        __m256 o = _mm256_mul_ps(load8(out + i, D - i), _mm256_set1_ps(scale));
        for (int j = 0; j < PAGE; j++) o = _mm256_fmadd_ps(_mm256_set1_ps(p[j]), load8(values + j * D + i, D - i), o);
        memcpy(out + i, &o, std::min(8, D - i) * sizeof(float));
    }
}
TARGET_AVX512 inline void attention_scores_avx512(float* p, const float* q, const float* keys, int D) {
    for (int j = 0; j < PAGE; j += 8) {
        __m512 sum[8], a;
        for (int k = 0; k < 8; k++) sum[k] = _mm512_setzero_ps();
        for (int i = 0; i < D; i += 16) {
            const __mmask16 mask = first_lanes(D - i);
            a = load16(q + i, mask);
            for (int k = 0; k < 8; k++) sum[k] = _mm512_fmadd_ps(a, load16(keys + (j + k) * D + i, mask), sum[k]);
        }
        for (int k = 0; k < 8; k++) p[j + k] = sum16(sum[k]);
    }
}
// 64 numbers of `out` at a time: four chains of sums hide each other's latency.
TARGET_AVX512 inline void attention_mix_avx512(float* out, float scale, const float* p, const float* values, int D) {
    for (int i = 0; i < D; i += 64) {
        __m512 o[4];
        for (int k = 0; k < 4; k++) o[k] = _mm512_mul_ps(load16(out + i + 16 * k, first_lanes(std::max(0, D - i - 16 * k))), _mm512_set1_ps(scale));
        for (int j = 0; j < PAGE; j++) {
            const __m512 weight = _mm512_set1_ps(p[j]);
            for (int k = 0; k < 4; k++)
                o[k] = _mm512_fmadd_ps(weight, load16(values + j * D + i + 16 * k, first_lanes(std::max(0, D - i - 16 * k))), o[k]);
        }
        for (int k = 0; k < 4; k++) _mm512_mask_storeu_ps(out + i + 16 * k, first_lanes(std::max(0, D - i - 16 * k)), o[k]);
    }
}
#endif

template <class T> void widen(acc<T>* __restrict out, const T* __restrict in, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = to_acc(in[i]);
}

// One page for one query row: keys and values as acc<T>, zeros behind the row's length.
template <class T, class Scores, class Mix>
void attention_page(AttentionRow<T>& row, const acc<T>* keys, const acc<T>* values, int first, int D, Scores scores, Mix mix) {
    const int n = row.length - first;
    if (n <= 0) return;
    AttentionSum<T>& a = row.piece;
    acc<T> p[PAGE], top = a.maximum;
    scores(p, row.q, keys, D);
    for (int j = n; j < PAGE; j++) p[j] = -std::numeric_limits<acc<T>>::infinity();
    for (int j = 0; j < PAGE; j++) top = p[j] > top ? p[j] : top;
    const acc<T> scale = std::exp(a.maximum - top);
    lanes<T> e;
    static_assert(PAGE == LANES, "a page's scores are one vector");
    load_lanes(e, p);
    e -= top;
    exp_lanes(e);
    memcpy(p, &e, sizeof e);
    a.maximum = top;
    a.sum *= scale;
    for (int j = 0; j < PAGE; j++) a.sum += p[j];
    mix(a.out, scale, p, values, D);
}

template <class T>
void attention_cpu(T* out,          // (N,HD) out
                   acc<T>* lse,     // (N,H) out: log sum_j e^(q . k_j / sqrt(D)) of each row, which backward needs; null: not wanted
                   const T* q,      // (N,HD)
                   const T* keys,   // one layer's cache
                   const T* values, // one layer's cache
                   const Batch& b, int H, int K, int D) {
    const int G = H / K;
    const int heads = std::min(G, ATTENTION_ROWS);   // query heads of one KV head at a time
    const int tokens = ATTENTION_ROWS / heads;       // tokens at a time
    const int head_tiles = (G + heads - 1) / heads, token_tiles = (b.N + tokens - 1) / tokens;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    auto scores = attention_scores_plain<acc<T>>;
    auto mix = attention_mix_plain<acc<T>>;
#ifdef HAVE_TWINS
    if constexpr (std::is_same_v<acc<T>, float>) {
        if (cpu_road >= CPU_AVX2) scores = attention_scores_avx2, mix = attention_mix_avx2;
        if (cpu_road >= CPU_AVX512) scores = attention_scores_avx512, mix = attention_mix_avx512;
    }
#endif
    [[maybe_unused]] size_t work = 0;
    int pieces = 1; // of the longest row
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        work += (size_t)(b.pos[n] + 1) * H * D;
        pieces = std::max(pieces, b.pos[n] / PIECE + 1);
    }
    const int parts = (size_t)b.N * H * pieces <= 8192 ? pieces : 1; // tasks that share a row, if there are few rows
    static thread_local std::vector<AttentionSum<T>> partial;        // (N,H,parts): grows to the largest, and stays
    if (parts > 1 && partial.size() < (size_t)b.N * H * parts) partial.resize((size_t)b.N * H * parts);
    AttentionSum<T>* sums = partial.data();
    auto store = [&](size_t row, const AttentionSum<T>& a) {
        for (int i = 0; i < D; i++) out[row * D + i] = to_stored<T>(a.out[i] / a.sum);
        if (lse) lse[row] = a.maximum + std::log(a.sum);
    };
    #pragma omp parallel if (work > 20000)
    {
        static thread_local std::vector<AttentionRow<T>> rows; // they grow once, and stay
        static thread_local std::vector<acc<T>> page;          // keys and values of a page, as acc<T>
        if (rows.size() < (size_t)heads * std::min(tokens, b.N)) rows.resize((size_t)heads * std::min(tokens, b.N));
        if (page.size() < (size_t)2 * PAGE * D) page.resize((size_t)2 * PAGE * D);
        #pragma omp for schedule(dynamic)
        for (int task = 0; task < token_tiles * K * head_tiles * parts; task++) {
            // Later tokens see more keys: long tasks first.
            const int part = task % parts, tile = token_tiles - 1 - task / (K * head_tiles * parts), kv = task / (head_tiles * parts) % K;
            const int h0 = kv * G + task / parts % head_tiles * heads, h1 = std::min(h0 + heads, (kv + 1) * G);
            const int end = std::min(b.N, (tile + 1) * tokens);
            for (int n0 = tile * tokens, n1; n0 < end; n0 = n1) {
                for (n1 = n0 + 1; n1 < end && b.seq[n1] == b.seq[n0]; n1++) {}
                if (b.seq[n0] < 0) continue;
                int count = 0, longest = 0;
                for (int n = n0; n < n1; n++)
                    for (int h = h0; h < h1; h++) {
                        AttentionRow<T>& row = rows[count++];
                        for (int i = 0; i < D; i++) row.q[i] = to_acc(q[((size_t)n * H + h) * D + i]) * scale;
                        row.total.clear(D);
                        row.length = b.pos[n] + 1;
                        longest = std::max(longest, row.length);
                    }
                const int* table = b.pages + (size_t)b.seq[n0] * b.max_pages;
                const int end_key = parts > 1 ? std::min(longest, (part + 1) * PIECE) : longest;
                for (int first = part * PIECE; first < end_key; first += PAGE) {
                    if (first % PIECE == 0)
                        for (int i = 0; i < count; i++) rows[i].piece.clear(D);
                    // What lies behind the longest row was never written: zeros stand for it.
                    const size_t at = kv_offset(table[first / PAGE], kv, 0, K, D), held = (size_t)std::min(PAGE, longest - first) * D;
                    widen(page.data(), keys + at, held);
                    widen(page.data() + PAGE * D, values + at, held);
                    std::fill(page.begin() + held, page.begin() + PAGE * D, 0);
                    std::fill(page.begin() + PAGE * D + held, page.begin() + 2 * PAGE * D, 0);
                    for (int i = 0; i < count; i++) attention_page(rows[i], page.data(), page.data() + PAGE * D, first, D, scores, mix);
                    const bool complete = (first + PAGE) % PIECE == 0 || first + PAGE >= end_key;
                    for (int i = 0; i < count && complete; i++)
                        if (rows[i].length > first / PIECE * PIECE) rows[i].total.add(rows[i].piece, D);
                }
                count = 0;
                for (int n = n0; n < n1; n++)
                    for (int h = h0; h < h1; h++) {
                        const size_t row = (size_t)n * H + h;
                        if (parts > 1) sums[row * parts + part] = rows[count++].total;
                        else store(row, rows[count++].total);
                    }
            }
        }
    }
    for (int n = 0; n < b.N && parts > 1; n++)
        for (int h = 0; h < H && b.seq[n] >= 0; h++) {
            const size_t row = (size_t)n * H + h;
            AttentionSum<T>& all = sums[row * parts];
            for (int part = 1; part <= b.pos[n] / PIECE; part++) all.add(sums[row * parts + part], D);
            store(row, all);
        }
}

// The two together: from qkv to what o takes.
template <class T>
void attend_cpu(T* out, acc<T>* lse, T* q, T* keys, T* values, const T* qkv, const T* q_weight, const T* k_weight, const acc<T>* rope,
                const Batch& b, int H, int K, int D, float eps) {
    qknorm_rope_kv_cpu(q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
    attention_cpu(out, lse, q, keys, values, b, H, K, D);
}

#ifdef __CUDACC__
// ---- Attention for prompts (Dao, "FlashAttention-2", 2023): a block owns 128 query rows, which are all G heads of
// 128 / G neighbouring tokens that share a KV head, and passes 64 keys at a time through shared memory; a warp owns
// 32 of the rows, with its scores and sums in registers. A tile of tokens may touch several sequences: they are taken
// one after the other, each computing all rows and keeping its own. Where tiles are too few for the GPU, several blocks
// share one, each with a part of the keys, and attention_sum_kernel adds what they leave in `partial`.
// A row of shared memory has D / 8 chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8).
constexpr int QUERY_ROWS = 128, KEYS = 64;

template <int D>
__global__ void __launch_bounds__(128, 2) attention_kernel(bf16* out, float* lse, const bf16* q, const bf16* keys, const bf16* values, Batch b, int first, int H, int K,
                                                           float* partial) { // (tokens from `first` on, H, splits, D + 2): see sum_parts
    constexpr int ROW = D * 2, CHUNKS = D / 8, THREADS = 128, TILE = KEYS * ROW;
    extern __shared__ __align__(128) uint4 tiles[]; // queries; two of keys and of values
    const uint32_t q_tile = shared_address(tiles), k_tiles = q_tile + QUERY_ROWS * ROW, v_tiles = k_tiles + 2 * TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, G = H / K, tokens = QUERY_ROWS / G, kv = blockIdx.x;
    const int tile = gridDim.y - 1 - blockIdx.y; // later tokens see more keys: long blocks first
    const int begin = first + tile * tokens, end = min(b.N, begin + tokens);
    const float scale = LOG2E / sqrtf((float)D); // powers of 2, not of e
    wait_for_previous();

    const int copy_row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    for (int r = copy_row; r < QUERY_ROWS; r += THREADS / CHUNKS) {
        const int n = begin + r / G;
        const bool there = r < tokens * G && n < end;
        copy_async(q_tile + r * ROW + ((chunk ^ (r % 8)) << 4), there ? q + ((size_t)n * H + kv * G + r % G) * D + chunk * 8 : q, there);
    }
    const int a_row = warp * 32 + lane % 16, k_row = lane % 8 + lane / 16 * 8, v_row = lane % 16;
    for (int n0 = begin, n1; n0 < end; n0 = n1) {
        for (n1 = n0 + 1; n1 < end && b.seq[n1] == b.seq[n0]; n1++) {}
        if (b.seq[n0] < 0) continue;
        const int* table = b.pages + (size_t)b.seq[n0] * b.max_pages;
        const int longest = b.pos[n1 - 1] + 1, shortest = b.pos[n0] + 1, key_tiles = (longest + KEYS - 1) / KEYS;
        const int parts = gridDim.z, from = key_tiles * (int)blockIdx.z / parts * KEYS, to = min(longest, key_tiles * (int)(blockIdx.z + 1) / parts * KEYS);
        int limit[2][2]; // keys that this lane's rows see; rows of other sequences compute what nobody keeps
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int r = warp * 32 + i * 16 + h * 8 + lane / 4, n = begin + r / G;
                limit[i][h] = n >= n0 && n < n1 ? b.pos[n] + 1 : to;
            }
        // A tile has four pages, whose numbers are read a tile ahead of the copies that need them.
        int page[KEYS / PAGE];
        auto next_pages = [&](int key0) {
            #pragma unroll
            for (int j = 0; j < KEYS / PAGE; j++) page[j] = key0 + j * PAGE < to ? table[key0 / PAGE + j] : 0;
        };
        auto copy = [&](uint32_t tile, const bf16* cache, int key0) {
            #pragma unroll
            for (int i = 0; i < KEYS / (THREADS / CHUNKS); i++) {
                const int r = copy_row + i * (THREADS / CHUNKS); // page r / PAGE, the same for all rows of i
                copy_async(tile + r * ROW + ((chunk ^ (r % 8)) << 4), cache + kv_offset(page[i * (THREADS / CHUNKS) / PAGE], kv, r % PAGE, K, D) + chunk * 8, key0 + r < to);
            }
            commit_copies();
        };
        float maximum[2][2], sum[2][2] = {}, mixed[2][D / 8][4] = {};
        #pragma unroll
        for (int i = 0; i < 2; i++) maximum[i][0] = maximum[i][1] = -1e30f; // (of a part a row may see no key: infinities would make it NaN)
        __syncthreads(); // the sequence before this one is done with the tiles
        next_pages(from);
        copy(k_tiles + from / KEYS % 2 * TILE, keys, from);
        copy(v_tiles + from / KEYS % 2 * TILE, values, from);
        next_pages(from + KEYS);
        for (int key0 = from; key0 < to; key0 += KEYS) {
            const uint32_t half = key0 / KEYS % 2 * TILE, k_tile = k_tiles + half, v_tile = v_tiles + half;
            wait_for_copies<0>();
            __syncthreads();
            copy(k_tiles + (half ^ TILE), keys, key0 + KEYS);
            copy(v_tiles + (half ^ TILE), values, key0 + KEYS);
            next_pages(key0 + 2 * KEYS);
            float s[2][KEYS / 8][4] = {};
            #pragma unroll
            for (int d = 0; d < D / 16; d++) {
                uint32_t a[2][4], k[4];
                #pragma unroll
                for (int i = 0; i < 2; i++) ldmatrix(a[i], q_tile + (a_row + i * 16) * ROW + (((2 * d + lane / 16) ^ (a_row % 8)) << 4));
                #pragma unroll
                for (int j = 0; j < KEYS / 16; j++) {
                    ldmatrix(k, k_tile + (k_row + j * 16) * ROW + (((2 * d + lane / 8 % 2) ^ (k_row % 8)) << 4));
                    #pragma unroll
                    for (int i = 0; i < 2; i++) {
                        mma(s[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], k[0], k[1]);
                        mma(s[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], k[2], k[3]);
                    }
                }
            }
            if (key0 + KEYS > shortest)
                #pragma unroll
                for (int i = 0; i < 2; i++)
                    #pragma unroll
                    for (int j = 0; j < KEYS / 8; j++)
                        #pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (key0 + j * 8 + lane % 4 * 2 + e % 2 >= limit[i][e / 2]) s[i][j][e] = -INFINITY;
            #pragma unroll
            for (int i = 0; i < 2; i++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    float top = maximum[i][h];
                    #pragma unroll
                    for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                    const float shrink = exp2_fast((maximum[i][h] - top) * scale), base = top * scale;
                    maximum[i][h] = top;
                    float part = 0;
                    #pragma unroll
                    for (int j = 0; j < KEYS / 8; j++)
                        #pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; e++) part += s[i][j][e] = exp2_fast(fmaf(s[i][j][e], scale, -base));
                    sum[i][h] = sum[i][h] * shrink + part; // this lane's columns; the quad's are added at the end
                    #pragma unroll
                    for (int j = 0; j < D / 8; j++) mixed[i][j][2 * h] *= shrink, mixed[i][j][2 * h + 1] *= shrink;
                }
            #pragma unroll
            for (int k = 0; k < KEYS / 16; k++) { // the scores, rounded, are the a operand as they lie
                uint32_t a[2][4], v[4];
                #pragma unroll
                for (int i = 0; i < 2; i++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) a[i][e] = pack(s[i][2 * k + e / 2][e % 2 * 2], s[i][2 * k + e / 2][e % 2 * 2 + 1]);
                #pragma unroll
                for (int j = 0; j < D / 16; j++) {
                    ldmatrix_transposed(v, v_tile + (v_row + k * 16) * ROW + (((2 * j + lane / 16) ^ (v_row % 8)) << 4));
                    #pragma unroll
                    for (int i = 0; i < 2; i++) {
                        mma(mixed[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], v[0], v[1]);
                        mma(mixed[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], v[2], v[3]);
                    }
                }
            }
        }
        wait_for_copies<0>();
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float total = sum[i][h];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                const int r = warp * 32 + i * 16 + h * 8 + lane / 4, n = begin + r / G;
                if (r >= tokens * G || n < n0 || n >= n1) continue;
                const size_t row = (size_t)n * H + kv * G + r % G;
                if (gridDim.z > 1) {
                    float* part = partial + ((row - (size_t)first * H) * gridDim.z + blockIdx.z) * (D + 2);
                    #pragma unroll
                    for (int j = 0; j < D / 8; j++) *(float2*)(part + j * 8 + lane % 4 * 2) = make_float2(mixed[i][j][2 * h], mixed[i][j][2 * h + 1]);
                    *(float2*)(part + D) = make_float2(maximum[i][h] * scale, total);
                    continue;
                }
                bf16* end = out + row * D + lane % 4 * 2;
                const float share = 1 / total;
                #pragma unroll
                for (int j = 0; j < D / 8; j++) *(uint32_t*)(end + j * 8) = pack(mixed[i][j][2 * h] * share, mixed[i][j][2 * h + 1] * share);
                if (lse) lse[row] = maximum[i][h] / sqrtf((float)D) + logf(total); // all four lanes of a row
            }
    }
}

// Number d of a row of attention whose keys were split. A part has D sums of values by their weights, the largest score,
// to which weights are relative (as powers of 2), and the sum of the weights.
__device__ inline float sum_parts(const float* part, int splits, int D, int d) {
    float top = -INFINITY, total = 0, weights = 0;
    for (int first = 0; first < splits; first += 8) { // eight at a time are on their way
        float m[8], w[8], v[8], next = top;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const float* at = part + min(first + i, splits - 1) * (D + 2);
            m[i] = __ldcg(at + D), w[i] = __ldcg(at + D + 1), v[i] = __ldcg(at + d);
        }
        #pragma unroll
        for (int i = 0; i < 8; i++) next = fmaxf(next, m[i]);
        const float shrink = exp2_fast(top - next);
        total *= shrink, weights *= shrink, top = next;
        #pragma unroll
        for (int i = 0; i < 8; i++)
            if (first + i < splits) total += v[i] * exp2_fast(m[i] - top), weights += w[i] * exp2_fast(m[i] - top);
    }
    return total / weights;
}
// A block a token's head, a thread a number.
__global__ void attention_sum_kernel(bf16* out, const float* partial, const int* seq, int first, int H, int splits) {
    wait_for_previous();
    const size_t row = blockIdx.x, D = blockDim.x;
    if (seq[first + row / H] >= 0) out[((size_t)first * H + row) * D + threadIdx.x] = round_bf16(sum_parts(partial + row * splits * (D + 2), splits, (int)D, threadIdx.x));
}

constexpr int BLOCKS_A_SM = 2, LEAST_KEYS = 256; // blocks of attention that share a multiprocessor; keys worth a block of their own
inline void attention_gpu(Context& ctx, bf16* out, float* lse, const bf16* q, const bf16* keys, const bf16* values, const Batch& b, int H, int K, int D, int first = 0) {
    const int tokens = QUERY_ROWS / (H / K), tiles = (b.N - first + tokens - 1) / tokens;
    const int splits = ctx.invariant || lse ? 1 : std::max(1, std::min(BLOCKS_A_SM * ctx.sms / (tiles * K), ctx.longest / LEAST_KEYS));
    launch(ctx, D == 128 ? attention_kernel<128> : attention_kernel<64>, dim3((unsigned)K, (unsigned)tiles, (unsigned)splits), 128,
           (size_t)(QUERY_ROWS + 4 * KEYS) * D * sizeof(bf16), out, lse, q, keys, values, b, first, H, K, ctx.attention);
    if (splits > 1) launch(ctx, attention_sum_kernel, dim3((unsigned)((b.N - first) * H)), D, 0, out, ctx.attention, b.seq, first, H, splits);
}

// ---- Attention for sequences of one token (Dao et al., "Flash-Decoding", 2023), with q/k norm, RoPE and KV write: a
// block owns SPLIT keys of one sequence and the G query heads of a KV head; each of its 8 warps owns a page, whose
// keys and values, but for the newest token's, it asks for before the kernel ahead has ended. Where a sequence has
// several splits, the last block to arrive adds their parts in order. The length of a split is fixed: a row's bits
// do not depend on the batch.
constexpr int SPLIT = 8 * PAGE;

// Splits for a position in a context of so many tokens: 1, 2, 4, ... or all, a graph for each; blocks without keys cost little.
inline int splits_for_graph(int position, int context) {
    int splits = 1;
    while (splits * SPLIT <= position) splits *= 2;
    return std::min(splits, (context - 1) / SPLIT + 1);
}

struct DecodeArgs {
    bf16 *out, *keys, *values;
    const bf16 *qkv, *q_weight, *k_weight;
    const float* rope;
    Batch b;
    int H, K;
    float eps;
    float* partial; // (singles, H, splits, D + 2): see sum_parts
    int* arrived;   // (singles, H / G)
};

// sum_i a[i] q[i] of 8 numbers
__device__ inline float dot8(uint4 a, const float* q) {
    const float4 u = *(const float4*)q, v = *(const float4*)(q + 4);
    return low(a.x) * u.x + high(a.x) * u.y + low(a.y) * u.z + high(a.y) * u.w + low(a.z) * v.x + high(a.z) * v.y + low(a.w) * v.z + high(a.w) * v.w;
}

template <int D, int G>
__global__ void __launch_bounds__(256, G <= 4 ? 2 : 1) attention_decode_kernel(DecodeArgs p) {
    constexpr int LANES_A_KEY = D / 8, KEYS_A_LOAD = 32 / LANES_A_KEY, LOADS = PAGE / KEYS_A_LOAD; // of values
    __shared__ __align__(16) float q[G][D], mixed[8][G][D];
    __shared__ float maximum[8][G], sum[8][G];
    __shared__ __align__(16) bf16 new_key[D], new_value[D];
    const Batch& b = p.b;
    const int split = blockIdx.x, h0 = blockIdx.y * G, n = blockIdx.z, kv = h0 / (p.H / p.K);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, seq = b.seq[n], pos = b.pos[n], splits = pos / SPLIT + 1;
    if (seq < 0 || split >= splits) {
        let_next_start();
        wait_for_previous();
        return;
    }
    // Keys: four lanes a key, 8 keys at once, twice. Values: a lane has 8 columns of every KEYS_A_LOADth key.
    const int page = split * 8 + warp, first = page * PAGE;
    const bool held = first <= pos;
    const size_t at = held ? kv_offset(b.pages[(size_t)seq * b.max_pages + page], kv, 0, p.K, D) : 0;
    const int value_key = lane / LANES_A_KEY, column = lane % LANES_A_KEY * 8;
    uint4 k[2][D / 32] = {}, v[LOADS] = {};
    #pragma unroll
    for (int half = 0; half < 2; half++)
        #pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const int key = half * 8 + lane / 4;
            if (first + key < pos) k[half][i] = *(const uint4*)(p.keys + at + key * D + (i * 4 + lane % 4) * 8);
        }
    #pragma unroll
    for (int j = 0; j < LOADS; j++) {
        const int key = j * KEYS_A_LOAD + value_key;
        if (first + key < pos) v[j] = *(const uint4*)(p.values + at + key * D + column);
    }
    let_next_start();
    wait_for_previous();

    const bf16* row = p.qkv + (size_t)n * (p.H + 2 * p.K) * D;
    const float* turn = p.rope + (size_t)pos * D;
    WarpHead<D> head;
    for (int h = warp; h < G; h += 8) {
        head.load(row + (size_t)(h0 + h) * D);
        head.norm_rope(p.q_weight, turn, p.eps);
        const int i = lane * WarpHead<D>::P;
        const float scale = LOG2E / sqrtf((float)D);
        for (int e = 0; e < WarpHead<D>::P; e++) {
            q[h][i + e] = to_acc(round_bf16(head.u[e])) * scale;
            q[h][i + e + D / 2] = to_acc(round_bf16(head.v[e])) * scale;
        }
    }
    if (split == splits - 1 && warp >= 6) { // the newest token: its key by one warp, its value by another
        const bool key = warp == 6, writes = h0 % (p.H / p.K) == 0;
        const size_t to = kv_offset(b.slot[n] / PAGE, kv, b.slot[n] % PAGE, p.K, D);
        head.load(row + (size_t)(p.H + (key ? 0 : p.K) + kv) * D);
        if (key) head.norm_rope(p.k_weight, turn, p.eps);
        head.store(key ? new_key : new_value);
        if (writes) head.store((key ? p.keys : p.values) + to);
    }
    __syncthreads();
    if (page == pos / PAGE) {
        const int newest = pos % PAGE;
        for (int half = 0; half < 2; half++)
            if (half * 8 + lane / 4 == newest)
                for (int i = 0; i < D / 32; i++) k[half][i] = *(const uint4*)(new_key + (i * 4 + lane % 4) * 8);
        #pragma unroll
        for (int j = 0; j < LOADS; j++)
            if (j * KEYS_A_LOAD + value_key == newest) v[j] = *(const uint4*)(new_value + column);
    }
    float s[2][G], mix[G][8] = {};
    #pragma unroll
    for (int h = 0; h < G; h++) {
        float top = -INFINITY;
        for (int half = 0; half < 2; half++) {
            float dot = 0;
            for (int i = 0; i < D / 32; i++) dot += dot8(k[half][i], q[h] + (i * 4 + lane % 4) * 8);
            dot += __shfl_xor_sync(~0u, dot, 1);
            dot += __shfl_xor_sync(~0u, dot, 2);
            s[half][h] = first + half * 8 + lane / 4 <= pos ? dot : -INFINITY;
            top = fmaxf(top, s[half][h]);
        }
        for (int other = 4; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
        float weights = 0;
        for (int half = 0; half < 2; half++) {
            s[half][h] = held ? exp2_fast(s[half][h] - top) : 0;
            weights += s[half][h];
        }
        for (int other = 4; other < 32; other *= 2) weights += __shfl_xor_sync(~0u, weights, other);
        if (lane == 0) maximum[warp][h] = top, sum[warp][h] = weights;
    }
    #pragma unroll
    for (int j = 0; j < LOADS; j++) {
        const float values[8] = {low(v[j].x), high(v[j].x), low(v[j].y), high(v[j].y), low(v[j].z), high(v[j].z), low(v[j].w), high(v[j].w)};
        #pragma unroll
        for (int h = 0; h < G; h++) {
            const float weight = __shfl_sync(~0u, s[j * KEYS_A_LOAD / 8][h], (j * KEYS_A_LOAD % 8 + value_key) * 4);
            for (int e = 0; e < 8; e++) mix[h][e] += weight * values[e];
        }
    }
    #pragma unroll
    for (int h = 0; h < G; h++) {
        for (int e = 0; e < 8; e++)
            for (int other = LANES_A_KEY; other < 32; other *= 2) mix[h][e] += __shfl_xor_sync(~0u, mix[h][e], other);
        if (value_key == 0) {
            *(float4*)(mixed[warp][h] + column) = make_float4(mix[h][0], mix[h][1], mix[h][2], mix[h][3]);
            *(float4*)(mixed[warp][h] + column + 4) = make_float4(mix[h][4], mix[h][5], mix[h][6], mix[h][7]);
        }
    }
    __syncthreads();
    // Parts of one head, from pages or from splits: their common maximum, then their sums in order.
    float* partial = p.partial + ((size_t)n * p.H + h0) * gridDim.x * (D + 2);
    for (int o = threadIdx.x; o < G * D; o += blockDim.x) {
        const int h = o / D, d = o % D;
        float top = -INFINITY, total = 0, weights = 0;
        for (int w = 0; w < 8; w++) top = fmaxf(top, maximum[w][h]);
        for (int w = 0; w < 8; w++) {
            const float shrink = exp2_fast(maximum[w][h] - top);
            total += mixed[w][h][d] * shrink, weights += sum[w][h] * shrink;
        }
        if (splits == 1) p.out[((size_t)n * p.H + h0 + h) * D + d] = round_bf16(total / weights);
        else {
            float* part = partial + ((size_t)h * gridDim.x + split) * (D + 2);
            part[d] = total;
            if (d == 0) part[D] = top, part[D + 1] = weights;
        }
    }
    if (splits == 1 || !last_to_arrive(p.arrived + (size_t)n * gridDim.y + blockIdx.y, splits)) return;
    for (int o = threadIdx.x; o < G * D; o += blockDim.x) {
        const int h = o / D, d = o % D;
        p.out[((size_t)n * p.H + h0 + h) * D + d] = round_bf16(sum_parts(partial + (size_t)h * gridDim.x * (D + 2), splits, D, d));
    }
}

// Numbers of scratch that attention needs: for so many sequences of one token, or for any others.
inline size_t attention_scratch(const Context& ctx, int singles, int splits, int H, int D) {
    return std::max((size_t)singles * H * splits, (size_t)BLOCKS_A_SM * ctx.sms * QUERY_ROWS) * (D + 2);
}

inline void attention_decode_gpu(Context& ctx, const DecodeArgs& p, int singles, int D) {
    const int G = p.H / p.K, heads = G % 8 == 0 ? 8 : G % 5 == 0 ? 5 : G % 4 == 0 ? 4 : G % 2 == 0 ? 2 : 1; // of a block
    static void (*const kernels[2][5])(DecodeArgs) = {
        {attention_decode_kernel<64, 1>, attention_decode_kernel<64, 2>, attention_decode_kernel<64, 4>, attention_decode_kernel<64, 5>, attention_decode_kernel<64, 8>},
        {attention_decode_kernel<128, 1>, attention_decode_kernel<128, 2>, attention_decode_kernel<128, 4>, attention_decode_kernel<128, 5>, attention_decode_kernel<128, 8>}};
    const int instance = heads == 8 ? 4 : heads == 5 ? 3 : heads == 4 ? 2 : heads - 1;
    launch(ctx, kernels[D == 128][instance], dim3((unsigned)ctx.splits, (unsigned)(p.H / heads), (unsigned)singles), 256, 0, p);
}

inline void attend_gpu(Context& ctx, bf16* out, float* lse, bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                       const float* rope, const Batch& b, int H, int K, int D, float eps) {
    const int singles = ctx.invariant || lse ? 0 : b.singles; // decode attention has no lse
    if (singles) attention_decode_gpu(ctx, {out, keys, values, qkv, q_weight, k_weight, rope, b, H, K, eps, ctx.attention, ctx.attention_arrived}, singles, D);
    if (singles == b.N) return;
    qknorm_rope_kv_gpu(ctx, q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps, singles);
    attention_gpu(ctx, out, lse, q, keys, values, b, H, K, D, singles);
}
#endif

// ---- SwiGLU: out = silu(gate) * up, silu(g) = g / (1 + e^-g)       (Shazeer, "GLU variants improve transformer", 2020)
template <class T>
void swiglu_cpu(T* out,           // (N,F) out
                const T* gate_up, // (N,2F)
                int N, int F) {
    const int PART = 512, parts = (F + PART - 1) / PART;
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int task = 0; task < N * parts; task++) {
        const T *gate = gate_up + (size_t)(task / parts) * 2 * F, *up = gate + F;
        T* row = out + (size_t)(task / parts) * F;
        for (int i = task % parts * PART; i < std::min(F, (task % parts + 1) * PART); i += LANES) {
            const int n = std::min(LANES, F - i);
            lanes<T> g, u, e = {};
            load_some(g, gate + i, n);
            load_some(u, up + i, n);
            for (int l = 0; l < LANES; l++) e[l] = std::min(-g[l], (acc<T>)80); // beyond 80 it is 0 to all purposes
            exp_lanes(e);
            u *= g / (1 + e);
            for (int l = 0; l < n; l++) row[i + l] = to_stored<T>(u[l]);
        }
    }
}

// The product with gate and up, then SwiGLU.
template <class T>
void linear_swiglu_cpu(T* out,     // (N,F) out
                       T* gate_up, // (N,2F) out
                       const T* x, // (N,C)
                       const Linear<T>& W, int N) {
    linear_cpu(gate_up, x, W, N);
    swiglu_cpu(out, gate_up, N, W.rows[0]);
}

// The same of rmsnorm(x), see norm_linear. gate_up may be null on the GPU, if nobody wants it.
template <class T>
void norm_linear_swiglu_cpu(T* out, T* gate_up, T* normed, const acc<T>* x, const T* w, const Linear<T>& W, int N, float eps) {
    rmsnorm_cpu(normed, x, w, N, W.in, eps);
    linear_swiglu_cpu(out, gate_up, normed, W, N);
}
#ifdef __CUDACC__
inline void linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, SwigluEpilogue{out, gate_up, (size_t)W.rows[0]}, x, W, N);
}
inline void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w, const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, SwigluEpilogue{out, gate_up, (size_t)W.rows[0]}, normed, x, w, W, N, eps);
}
#endif

// ---- head: the logits of R named rows, never rounded below acc<T>
template <class T>
void head_cpu(acc<T>* logits, // (R,V) out
              T* picked,      // (R,C) scratch
              const T* x,     // (N,C) after the final norm
              const int* rows, // (R)
              const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++) memcpy((void*)(picked + (size_t)r * W.in), x + (size_t)rows[r] * W.in, (size_t)W.in * sizeof(T));
    const size_t V = W.out();
    product_cpu(W, picked, R, [=](int r, int v, acc<T> y) { logits[r * V + v] = y; });
}

#ifdef __CUDACC__
struct LogitsEpilogue {
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = false;
    float* out; // (R,V)
    size_t V;
    __device__ void begin() {}
    __device__ void ask(bool, int, int) {}
    __device__ void one(bool there, int n, int r, float y, bool) { if (there) out[n * V + r] = y; }
    __device__ void four(int n, int r, const float* y) { *(float4*)(out + n * V + r) = make_float4(y[0], y[1], y[2], y[3]); }
    __device__ void end(int) {}
};
__global__ void pick_rows_kernel(bf16* picked, const bf16* x, const int* rows, int C) {
    let_next_start();
    wait_for_previous();
    for (int i = threadIdx.x; i < C; i += blockDim.x) picked[(size_t)blockIdx.x * C + i] = x[(size_t)rows[blockIdx.x] * C + i];
}
inline void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W, int R) {
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    product_gpu(ctx, LogitsEpilogue{logits, (size_t)W.out()}, picked, W, R);
}
#endif

// ================================================================================================ 4 Adapters
// LoRA in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors. An adapter is used beside the
// weights, unmerged: see Adapter, and linear_cpu.

// The products that can have one, by the number that names their dropout mask within a layer.
constexpr int MODULES = 7;
constexpr const char* MODULE_NAMES[MODULES] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"};
constexpr int MAX_RANK = 1024, GPU_RANK_STEP = 8; // the GPU's kernels take multiples of 8

struct AdapterConfig {
    int rank = 0;
    double alpha = 0;
    bool rslora = false; // Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA", 2023
    bool targets[MODULES] = {};
    double scale() const { return alpha / (rslora ? std::sqrt((double)rank) : (double)rank); }
};

// The module of that name, as PEFT's target_modules says it ("q_proj", "self_attn.q_proj"); -1 if it is none.
inline int module_of(const std::string& name) {
    for (int m = 0; m < MODULES; m++) {
        const std::string full = MODULE_NAMES[m];
        if (name == full || name == full.substr(full.find('.') + 1)) return m;
    }
    return -1;
}

// Reads adapter_config.json. As with a model's config: what changes the computation is read or must be off, and what is
// not known here and not off is refused too, since it may.
inline AdapterConfig parse_adapter_config(const std::string& file, std::string_view text) {
    const char* name = file.c_str();
    sj::Doc doc;
    const std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: %s", name, fault.c_str());
    const sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: not a JSON object", name);
    if (j["peft_type"].str() != "LORA") DIE("%s: peft_type is %.60s, only \"LORA\" is supported", name, j["peft_type"] ? std::string(j["peft_type"].raw()).c_str() : "missing");
    static const std::set<std::string> read_below = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights"};
    static const std::set<std::string> bookkeeping = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core",
                                                      "peft_version", "qalora_group_size", "revision", "task_type"};
    for (auto [key, v] : j.members()) {
        if (read_below.count(key) || bookkeeping.count(key)) continue;
        const bool empty = (v.is(sj::Object) || v.is(sj::Array)) && v.size() == 0;
        if (!(v.is(sj::Null) || v.is(sj::False) || empty || (key == "bias" && v.str() == "none")))
            DIE("%s: %s = %.60s is not supported", name, key.c_str(), std::string(v.raw()).c_str());
    }
    // PiSSA, OLoRA and their like move a part of the base model's weights into the adapter: it fits no other base.
    const sj::Value init = j["init_lora_weights"];
    if (init && !init.is_bool() && !init.is(sj::Null) && init.str() != "gaussian")
        DIE("%s: init_lora_weights = %.60s is not supported", name, std::string(init.raw()).c_str());
    AdapterConfig a;
    int64_t rank;
    if (!j["r"].integer(&rank) || rank < 1 || rank > MAX_RANK) DIE("%s: r is not a whole number from 1 to %d", name, MAX_RANK);
    a.rank = (int)rank;
    if (!j["lora_alpha"].is(sj::Number)) DIE("%s: no lora_alpha", name);
    a.alpha = j["lora_alpha"].number();
    if (!(std::fabs(a.alpha) < 1e6)) DIE("%s: lora_alpha is not between -1e6 and 1e6", name);
    const sj::Value rslora = j["use_rslora"], targets = j["target_modules"];
    if (rslora && !rslora.is_bool()) DIE("%s: use_rslora is not true or false", name);
    a.rslora = rslora.boolean(false);
    if (targets.str() == "all-linear") std::fill(a.targets, a.targets + MODULES, true);
    else if (!targets.is(sj::Array) || targets.size() == 0) DIE("%s: target_modules is neither a list of modules nor \"all-linear\"", name);
    for (sj::Value v : targets.items()) {
        const int m = module_of(v.str());
        if (m < 0) DIE("%s: target_modules has %.60s; q, k, v, o, gate, up and down_proj can have an adapter", name, std::string(v.raw()).c_str());
        a.targets[m] = true;
    }
    return a;
}

// (out, in) of a module.
inline std::pair<int, int> module_shape(const Config& c, int m) {
    const int rows[MODULES] = {c.H * c.D, c.K * c.D, c.K * c.D, c.C, c.F, c.F, c.C};
    return {rows[m], m == 3 ? c.H * c.D : m == 6 ? c.F : c.C};
}
inline size_t adapter_parameters(const Config& c, const AdapterConfig& a) {
    size_t n = 0;
    for (int m = 0; m < MODULES; m++)
        if (a.targets[m]) n += (size_t)c.L * a.rank * ((size_t)module_shape(c, m).first + module_shape(c, m).second);
    return n;
}
inline std::string adapter_tensor(int layer, int m, char matrix) {
    return format("base_model.model.model.layers.%d.%s.lora_%c.weight", layer, MODULE_NAMES[m], matrix);
}

// An adapter's files, mapped and checked against the model they are for: every tensor that must be there is, with the
// right shape and finite numbers, and no other.
struct AdapterFile {
    std::string path;
    MappedFile map;
    Tensors tensors;
    std::map<std::string, std::string> metadata;
    AdapterConfig config;

    AdapterFile(const std::string& folder, const Config& c) : path(folder) {
        const std::string text = folder + "/adapter_config.json";
        config = parse_adapter_config(text, MappedFile(text).text());
        map = MappedFile(folder + "/adapter_model.safetensors");
        read_safetensors(map, tensors, metadata);
        size_t expected = 0;
        for (int l = 0; l < c.L; l++)
            for (int m = 0; m < MODULES; m++) {
                if (!config.targets[m]) continue;
                const auto [out, in] = module_shape(c, m);
                check(adapter_tensor(l, m, 'A'), {config.rank, in});
                check(adapter_tensor(l, m, 'B'), {out, config.rank});
                expected += 2;
            }
        if (tensors.size() == expected) return;
        for (auto& [name, t] : tensors)
            if (!checked.count(name)) DIE("%s: tensor %s belongs to no module that the config names", map.path.c_str(), name.c_str());
    }

  private:
    std::set<std::string> checked;
    void check(const std::string& name, const std::vector<int64_t>& shape) {
        const auto found = tensors.find(name);
        if (found == tensors.end()) DIE("%s: no tensor %s", map.path.c_str(), name.c_str());
        const Tensor& t = found->second;
        need_shape(name, t, shape);
        if (t.dtype == Dtype::Other || t.dtype == Dtype::I8) DIE("%s: tensor %s is not BF16, F16 or F32", map.path.c_str(), name.c_str());
        for (size_t i = 0; i < (size_t)(shape[0] * shape[1]); i++)
            if (!std::isfinite(number(t, i))) DIE("%s: tensor %s has an infinity or a NaN", map.path.c_str(), name.c_str());
        checked.insert(name);
    }
};

// Gives every targeted product of the model its Adapter, without memory so far, of a rank rounded up to a multiple of
// `step`. Returns that rank.
template <class T> int adapt(Weights<T>& w, const AdapterConfig& config, int step = 1) {
    const int rank = (config.rank + step - 1) / step * step;
    for (size_t l = 0; l < w.layers.size(); l++) {
        Layer<T>& y = w.layers[l];
        Linear<T>* const linears[] = {&y.qkv, &y.qkv, &y.qkv, &y.o, &y.gate_up, &y.gate_up, &y.down};
        constexpr int blocks[MODULES] = {0, 1, 2, 0, 0, 1, 0};
        for (int m = 0; m < MODULES; m++) {
            if (!config.targets[m]) continue;
            Adapter<T>& a = linears[m]->adapter;
            a.rank = rank, a.true_rank = config.rank, a.s = (float)config.scale();
            a.block[a.modules] = blocks[m], a.module[a.modules++] = (int)l * MODULES + m;
        }
    }
    return rank;
}

// Where a product's A and B begin in an array that holds all of an adapter's numbers, every A before every B; and its h
// among the numbers of one token.
struct AdapterPlace { size_t A = 0, B = 0, h = 0; };
// Calls f(linear, place) for each; returns where A, B and h end.
template <class T, class F> AdapterPlace each_adapter(Weights<T>& w, F f) {
    AdapterPlace at;
    for (Layer<T>& y : w.layers)
        for (Linear<T>* W : {&y.qkv, &y.o, &y.gate_up, &y.down}) at.B += (size_t)W->adapter.modules * W->adapter.rank * W->in;
    for (Layer<T>& y : w.layers)
        for (Linear<T>* W : {&y.qkv, &y.o, &y.gate_up, &y.down}) {
            const size_t width = (size_t)W->adapter.modules * W->adapter.rank;
            if (width) f(*W, at);
            at.A += width * W->in, at.B += width * W->out(), at.h += width;
        }
    return at;
}

// Calls f(name, rows, columns, at, apart) for each of PEFT's tensors: (rows, columns) numbers that begin at `at` of such an
// array, rows `apart`. What lies between them is zero.
template <class T, class F> void each_adapter_tensor(Weights<T>& w, F f) {
    each_adapter(w, [&](Linear<T>& W, AdapterPlace at) {
        const Adapter<T>& a = W.adapter;
        const size_t rank = a.rank, kept = a.true_rank, width = a.modules * rank;
        for (int j = 0; j < a.modules; j++) {
            const size_t first = std::accumulate(W.rows, W.rows + a.block[j], (size_t)0);
            f(adapter_tensor(a.module[j] / MODULES, a.module[j] % MODULES, 'A'), kept, (size_t)W.in, at.A + j * rank * W.in, (size_t)W.in);
            f(adapter_tensor(a.module[j] / MODULES, a.module[j] % MODULES, 'B'), (size_t)W.rows[a.block[j]], kept, at.B + first * width + j * rank, width);
        }
    });
}

// The file's numbers as such an array.
template <class T> std::vector<float> adapter_numbers(Weights<T>& w, const AdapterFile& file) {
    std::vector<float> p(each_adapter(w, [](Linear<T>&, AdapterPlace) {}).B);
    each_adapter_tensor(w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t apart) {
        const Tensor& t = file.tensors.at(name);
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < columns; i++) p[at + r * apart + i] = number(t, r * columns + i);
    });
    return p;
}

// An adapter in use, for batches of up to `tokens`. The weights point into it.
template <class T> struct AttachedAdapter {
    Arena arena;

    AttachedAdapter(Context& ctx, Weights<T>& w, const AdapterFile& file, int tokens) {
        const int rank = adapt(w, file.config, ctx.gpu ? GPU_RANK_STEP : 1);
        std::vector<float> p = adapter_numbers(w, file);
        const size_t A = each_adapter(w, [](Linear<T>&, AdapterPlace) {}).A;
        std::vector<T> stored(p.size());
        for (size_t i = 0; i < p.size(); i++) stored[i] = to_stored<T>(i < A ? p[i] : p[i] * (float)file.config.scale());
        arena.gpu = ctx.gpu;
        T *numbers, *h; // one h for all: nobody reads it again
        auto plan = [&] { numbers = arena.take<T>(p.size()), h = arena.take<T>((size_t)tokens * 3 * rank); };
        plan();
        arena.allocate("the adapter");
        plan();
        copy_in(ctx, numbers, stored.data(), stored.size());
        each_adapter(w, [&](Linear<T>& W, AdapterPlace at) { W.adapter.A = numbers + at.A, W.adapter.B = numbers + at.B, W.adapter.h = h; });
    }
};

// ================================================================================================= 5 Forward

// What ops hand to each other, for up to N tokens. Inference uses one set for all layers; in training each layer has its
// own of what the backward pass reads.
template <class T> struct Activations {
    struct PerLayer {
        acc<T>* in;    // (N,C) residual stream at the layer's entry
        T* norm1;      // (N,C)
        T* qkv;        // (N,(H+2K)D)
        T* q;          // (N,HD)
        T* attention;  // (N,HD)
        acc<T>* lse = nullptr; // (N,H) of attention, for training
        acc<T>* mid;   // (N,C) residual stream between attention and MLP
        T* norm2;      // (N,C)
        T* gate_up;    // (N,2F)
        T* hidden;     // (N,F)
        acc<T>* out;   // (N,C) residual stream at its exit
    };
    std::vector<PerLayer> layer;
    T* normed; // (N,C) after the final norm

    // gate_up: the GPU's fused op does without.
    void plan(Arena& arena, const Config& c, int N, bool gate_up = true) {
        PerLayer a;
        a.in = a.mid = a.out = arena.take<acc<T>>((size_t)N * c.C);
        a.norm1 = a.norm2 = normed = arena.take<T>((size_t)N * c.C);
        a.qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
        a.q = arena.take<T>((size_t)N * c.H * c.D);
        a.attention = arena.take<T>((size_t)N * c.H * c.D);
        a.gate_up = gate_up ? arena.take<T>((size_t)N * 2 * c.F) : nullptr;
        a.hidden = arena.take<T>((size_t)N * c.F);
        layer.assign(c.L, a);
    }

    // Training keeps what enters products and attention; norms, SwiGLU and RoPE are computed again. With `recompute`
    // it keeps only what enters a layer, and backward runs the layer again.
    bool recompute = false;
    void plan_training(Arena& arena, const Config& c, int N, bool whole_layers) {
        recompute = whole_layers;
        PerLayer a;
        auto rest = [&] {
            a.qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
            a.attention = arena.take<T>((size_t)N * c.H * c.D);
            a.lse = arena.take<acc<T>>((size_t)N * c.H);
            a.mid = arena.take<acc<T>>((size_t)N * c.C);
            a.gate_up = arena.take<T>((size_t)N * 2 * c.F);
        };
        a.norm1 = a.norm2 = arena.take<T>((size_t)N * c.C);
        normed = arena.take<T>((size_t)N * c.C);
        a.q = arena.take<T>((size_t)N * c.H * c.D);
        a.hidden = arena.take<T>((size_t)N * c.F);
        if (recompute) rest();
        layer.clear();
        a.out = arena.take<acc<T>>((size_t)N * c.C);
        for (int l = 0; l < c.L; l++) {
            a.in = a.out; // of the layer before
            if (!recompute) rest();
            a.out = arena.take<acc<T>>((size_t)N * c.C);
            layer.push_back(a);
        }
    }
};

// Keys and values of all layers, (L, pages, K, 16, D) each. Training has one layer's, which all take in turn.
template <class T> struct KVCache {
    T *keys, *values;
    size_t layer_size; // from one layer to the next

    static size_t bytes(const Config& c, size_t pages) { return 2 * (size_t)c.L * pages * c.K * PAGE * c.D * sizeof(T); }
    void plan(Arena& arena, const Config& c, size_t pages) {
        layer_size = pages * c.K * PAGE * c.D;
        keys = arena.take<T>(c.L * layer_size);
        values = arena.take<T>(c.L * layer_size);
    }
    void plan_training(Arena& arena, const Config& c, size_t pages) {
        layer_size = 0;
        keys = arena.take<T>(pages * c.K * PAGE * c.D);
        values = arena.take<T>(pages * c.K * PAGE * c.D);
    }
};

// One layer: s.in to s.out.
template <class T>
void layer_forward(Context& ctx, const Config& c, const Layer<T>& y, const Batch& b, typename Activations<T>::PerLayer& s, T* keys, T* values, const acc<T>* rope) {
    const int N = b.N;
    RUN(norm_linear, s.qkv, s.norm1, s.in, y.norm1, y.qkv, N, c.eps);
    RUN(attend, s.attention, s.lse, s.q, keys, values, s.qkv, y.q_norm, y.k_norm, rope, b, c.H, c.K, c.D, c.eps);
    RUN(linear_add, s.mid, s.in, s.attention, y.o, N);
    RUN(norm_linear_swiglu, s.hidden, s.gate_up, s.norm2, s.mid, y.norm2, y.gate_up, N, c.eps);
    RUN(linear_add, s.out, s.mid, s.hidden, y.down, N);
}

// Tokens to vectors, up to the final norm: a.normed (N,C). The keys and values of the batch go to the cache.
template <class T>
void forward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, KVCache<T>& kv, const acc<T>* rope) {
    const int N = b.N, C = c.C;
    RUN(embed, a.layer[0].in, w.embed, b, C);
    for (int l = 0; l < c.L && !(ctx.stop && *ctx.stop); l++)
        layer_forward(ctx, c, w.layers[l], b, a.layer[l], kv.keys + l * kv.layer_size, kv.values + l * kv.layer_size, rope);
    RUN(rmsnorm, a.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
}

// ======================================================================================= 6 Sampler, session

struct Sampling {
    float temperature = 0.7f; // 0: greedy
    int top_k = 20;           // 0: off
    float top_p = 0.8f;       // 1: off
    float min_p = 0;          // 0: off
    float repeat = 1;         // 1: off; divides (multiplies, where negative) the logits of ids seen in prompt or answer
    float presence = 0;       // is subtracted once from the logits of ids in the answer
    float frequency = 0;      // is subtracted as often as they occur there
    uint64_t seed = 0;
};
BOTH inline bool has_penalties(const Sampling& how) { return how.repeat != 1 || how.presence != 0 || how.frequency != 0; }

// Applies the penalties to logits (V) in place. ids: prompt and answer, which begins at ids[answer].
inline void penalize(float* logits, const Sampling& how, const std::vector<int>& ids, size_t answer) {
    if (how.repeat != 1)
        for (int id : std::set<int>(ids.begin(), ids.end())) logits[id] = logits[id] > 0 ? logits[id] / how.repeat : logits[id] * how.repeat;
    if (how.presence == 0 && how.frequency == 0) return;
    std::map<int, int> count;
    for (size_t i = answer; i < ids.size(); i++) count[ids[i]]++;
    for (auto [id, n] : count) logits[id] -= how.presence + how.frequency * (float)n;
}

// Draws an id from logits (V), of which only ids < exist may be drawn. In this order: penalties (above),
// temperature, top-k, top-p, min-p; ties go to the lower id. `counter` is the position of the drawn token: the
// same seed, counter and logits give the same id.
// Probabilities are integers, e^(l - max) in steps of 2^-40: integer sums are the same in any order, so that
// any number of threads, and a GPU, draw the same token.
inline int sample(const float* logits, int exist, const Sampling& how, uint64_t counter) {
    auto value = [&](int id) { // a NaN is the least there is; infinities are only very large
        float l = logits[id];
        return std::isnan(l) ? -FLT_MAX : std::min(std::max(l, -FLT_MAX), FLT_MAX);
    };
    int best = 0;
    for (int id = 1; id < exist; id++)
        if (value(id) > value(best)) best = id;
    if (how.temperature == 0 || exist == 1) return best;

    struct Candidate { float logit; int id; uint64_t weight; };
    std::vector<Candidate> kept;
    const float top = value(best);
    for (int id = 0; id < exist; id++) {
        float x = (value(id) - top) / how.temperature;
        uint64_t weight = x < -28.f ? 0 : (uint64_t)(exp_exact(x) * 1099511627776.f); // 2^40; e^-28 is below 2^-40
        if (weight) kept.push_back({value(id), id, weight});
    }
    auto likelier = [](const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; };
    if (how.top_k > 0 && (size_t)how.top_k < kept.size()) {
        std::nth_element(kept.begin(), kept.begin() + how.top_k, kept.end(), likelier);
        kept.resize(how.top_k);
    }
    auto total = [&] {
        uint64_t sum = 0;
        for (auto& c : kept) sum += c.weight;
        return sum;
    };
    if (how.top_p < 1) { // the fewest likeliest tokens that together reach top_p
        std::sort(kept.begin(), kept.end(), likelier);
        double need = (double)how.top_p * (double)total();
        uint64_t sum = 0;
        size_t n = 0;
        while (n < kept.size() && (n == 0 || (double)sum < need)) sum += kept[n++].weight;
        kept.resize(n);
    }
    if (how.min_p > 0) { // at least min_p times as likely as the likeliest
        double need = (double)how.min_p * 1099511627776.;
        kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Candidate& c) { return (double)c.weight < need; }), kept.end());
    }
    std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    Philox random = philox(how.seed, counter, STREAM_SAMPLE);
    uint64_t r = (uint64_t)random.v[1] << 32 | random.v[0];
    r = (uint64_t)((unsigned __int128)r * total() >> 64); // 0 <= r < total
    for (auto& c : kept) {
        if (r < c.weight) return c.id;
        r -= c.weight;
    }
    return best;
}

#ifdef __CUDACC__
// ---- The sampler on the GPU: the same draws, bit for bit, since probabilities are integers and every float step is
// rounded alike. What changes between draws lies in the GPU's memory, so that one graph serves them all.
struct Draw {
    Sampling how;
    int exist; // only ids below may be drawn
};
constexpr uint32_t IN_PROMPT = 1u << 31; // in `seen`; below it: how often the id is in the answer
inline std::vector<uint32_t> seen_counts(const std::vector<int>& ids, size_t answer, int V) { // (V); ids[answer] on are the answer
    std::vector<uint32_t> seen(V);
    for (size_t i = 0; i < answer; i++) seen[ids[i]] = IN_PROMPT;
    for (size_t i = answer; i < ids.size(); i++) seen[ids[i]]++;
    return seen;
}

__device__ inline float usable(float logit) { return isnan(logit) ? -FLT_MAX : fminf(fmaxf(logit, -FLT_MAX), FLT_MAX); }
// A larger key is likelier: the logit, then the lower id.
__device__ inline unsigned long long draw_key(float logit, int id) {
    const uint32_t u = __float_as_uint(logit + 0.f); // -0 becomes 0
    return (unsigned long long)(u >> 31 ? ~u : u | 0x80000000) << 32 | (uint32_t)~id;
}

// The head's product, with the penalties, and each block's likeliest id on the way.
constexpr int BEST_BLOCKS = 1024;
struct DrawEpilogue {
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = false;
    float* out;                // (R,V)
    size_t V;
    const Draw* draw;          // (R)
    const uint32_t* seen;      // (R,V), or null: no penalties
    unsigned long long* best;  // (R, BEST_BLOCKS)
    __device__ static unsigned long long* shared_best() {
        __shared__ unsigned long long best[STREAM_TOKENS];
        return best;
    }
    __device__ void begin() {
        if (threadIdx.x < STREAM_TOKENS) shared_best()[threadIdx.x] = 0; // a barrier comes before its first use
    }
    __device__ void ask(bool, int, int) {}
    __device__ void one(bool there, int n, int r, float y, bool) {
        unsigned long long key = 0;
        if (there) {
            const Sampling& how = draw[n].how;
            const uint32_t s = seen ? seen[n * V + r] : 0;
            if (s && how.repeat != 1) y = y > 0 ? y / how.repeat : y * how.repeat;
            if (s & ~IN_PROMPT) y = __fsub_rn(y, __fadd_rn(how.presence, __fmul_rn(how.frequency, (float)(s & ~IN_PROMPT))));
            out[n * V + r] = y;
            if (r < draw[n].exist) key = draw_key(usable(y), r);
        }
        for (int other = 1; other < 8; other *= 2) key = max(key, __shfl_xor_sync(~0u, key, other));
        if (threadIdx.x % 8 == 0 && key) atomicMax(shared_best() + n, key);
    }
    __device__ void end(int N) {
        __syncthreads();
        if (threadIdx.x < N) best[threadIdx.x * BEST_BLOCKS + blockIdx.x] = shared_best()[threadIdx.x];
    }
};

// The sum over the threads before this one.
__device__ inline unsigned long long block_sum_before(unsigned long long x) {
    __shared__ unsigned long long parts[32];
    unsigned long long sum = x;
    for (int lane = 1; lane < 32; lane *= 2) {
        const unsigned long long other = __shfl_up_sync(~0u, sum, lane);
        if ((int)threadIdx.x % 32 >= lane) sum += other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int w = 0; w < (int)threadIdx.x / 32; w++) sum += parts[w];
    return sum - x;
}

// Where draws go, and the batch of the next step.
struct DrawState {
    int *token, *pos, *slot;      // (R) of the token just drawn; pos is the position of the one before on entry
    const int *seq, *pages;
    int max_pages;
    uint32_t* seen;               // (R,V) or null
    volatile int* ring;           // (R, ring_size) in the host's memory: id + 1 of the token at each position
    int ring_size;
};

// A block of 1024 threads a row. The likely ids go to a list in shared memory, in which all is decided by comparing
// everyone with everyone; if what may be drawn is more than the list holds (flat distributions without top-k), the
// cut is found by bisection over all ids instead, a pass each.
constexpr int LIST = 1024, BINS = 2048;
__global__ void __launch_bounds__(1024) sample_kernel(const float* all_logits, size_t V, const Draw* draws, const unsigned long long* best, int best_blocks, DrawState state) {
    __shared__ uint32_t bins[BINS];
    __shared__ unsigned long long keys[LIST], weights[LIST];
    __shared__ int listed, answer, cut;
    __shared__ unsigned long long top_key;
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x, i = threadIdx.x;
    if (state.seq[row] < 0) return;
    const float* logits = all_logits + row * V;
    const Sampling how = draws[row].how;
    const int exist = draws[row].exist;
    for (int bin = i; bin < BINS; bin += 1024) bins[bin] = 0;
    if (i == 0) top_key = 0, listed = 0;
    __syncthreads();
    unsigned long long most = 0;
    if (best) {
        if (i < best_blocks) most = best[row * BEST_BLOCKS + i];
    } else {
        for (int id = i; id < exist; id += 1024) most = max(most, draw_key(usable(logits[id]), id));
    }
    for (int lane = 16; lane; lane /= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
    if (i % 32 == 0 && most) atomicMax(&top_key, most);
    __syncthreads();
    const int likeliest = (int)~(uint32_t)top_key;
    if (i == 0) answer = likeliest;
    if (how.temperature != 0 && exist > 1) {
        const float top = usable(logits[likeliest]);
        auto exponent = [&](int id) { return (usable(logits[id]) - top) / how.temperature; };
        auto weight_of = [&](float x) { return x < -28.f ? 0ull : (unsigned long long)(exp_exact(x) * 1099511627776.f); };
        const int k = how.top_k > 0 ? how.top_k : INT_MAX;
        // How many there are in each step of 1/64 of the exponent, and how much in all.
        unsigned long long all = 0;
        for (int id = i; id < exist; id += 1024) {
            const float x = exponent(id);
            const unsigned long long w = weight_of(x);
            all += w;
            if (w) atomicAdd(&bins[min(BINS - 1, (int)(x * -64))], 1u);
        }
        all = block_sum(all);
        __syncthreads();
        if (i == 0) { // the first `cut` bins go to the list
            unsigned held = 0;
            cut = 0;
            while (cut < BINS && held < (unsigned)min(k, LIST + 1) && held + bins[cut] <= LIST) held += bins[cut++];
        }
        __syncthreads();
        unsigned long long in_list = 0;
        for (int id = i; id < exist; id += 1024) {
            const float x = exponent(id);
            const unsigned long long w = weight_of(x);
            if (!w || min(BINS - 1, (int)(x * -64)) >= cut) continue;
            const int at = atomicAdd(&listed, 1);
            keys[at] = draw_key(usable(logits[id]), id), weights[at] = w;
            in_list += w;
        }
        in_list = block_sum(in_list);
        __syncthreads();
        Philox random = philox(how.seed, (uint64_t)state.pos[row] + 1, STREAM_SAMPLE);
        const uint64_t r64 = (uint64_t)random.v[1] << 32 | random.v[0];
        const double floor_weight = (double)how.min_p * 1099511627776.;
        const int n = listed;
        const bool cut_by_k = n >= k, complete = cut_by_k || in_list == all || (how.top_k <= 0 && how.top_p < 1 && (double)in_list >= (double)how.top_p * (double)all);
        if (complete) {
            const unsigned long long key = i < n ? keys[i] : 0, mine = i < n ? weights[i] : 0;
            int rank = 0;
            unsigned long long before = 0;
            for (int j = 0; i < n && j < n; j++)
                if (keys[j] > key) rank++, before += weights[j];
            bool kept = i < n && rank < k;
            const unsigned long long total = cut_by_k ? block_sum(kept ? mine : 0) : all;
            if (how.top_p < 1) kept = kept && (rank == 0 || (double)before < (double)how.top_p * (double)total);
            if (how.min_p > 0) kept = kept && (double)mine >= floor_weight;
            const unsigned long long left = block_sum(kept ? mine : 0), r = __umul64hi(r64, left);
            if (!kept && i < n) weights[i] = 0;
            __syncthreads();
            unsigned long long lower = 0;
            for (int j = 0; kept && j < n; j++)
                if ((uint32_t)keys[j] > (uint32_t)key) lower += weights[j]; // ids are inverted in keys
            if (kept && lower <= r && r < lower + mine) answer = (int)~(uint32_t)key;
        } else {
            // The least key that is kept, by top-k and then by top-p: bit by bit, from the largest down.
            auto above = [&](unsigned long long least, bool count) {
                unsigned long long sum = 0;
                for (int id = i; id < exist; id += 1024) {
                    const unsigned long long w = weight_of(exponent(id));
                    if (w && draw_key(usable(logits[id]), id) >= least) sum += count ? 1 : w;
                }
                return block_sum(sum);
            };
            unsigned long long least = 0;
            if (k != INT_MAX) {
                unsigned long long found = 0; // the largest key that at least k keys reach
                for (int bit = 63; bit >= 0; bit--)
                    if (above(found | 1ull << bit, true) >= (unsigned long long)k) found |= 1ull << bit;
                least = found;
            }
            if (how.top_p < 1) {
                const double need = (double)how.top_p * (double)above(least, false);
                unsigned long long found = 0;
                for (int bit = 63; bit >= 0; bit--)
                    if ((double)above(found | 1ull << bit, false) >= need) found |= 1ull << bit;
                least = max(least, min(found, top_key));
            }
            auto kept = [&](int id) {
                const unsigned long long w = weight_of(exponent(id));
                return draw_key(usable(logits[id]), id) >= least && (how.min_p <= 0 || (double)w >= floor_weight) ? w : 0;
            };
            // Ids in order: a stretch a thread.
            const int each = (exist + 1023) / 1024, from = min(exist, i * each), to = min(exist, from + each);
            unsigned long long sum = 0;
            for (int id = from; id < to; id++) sum += kept(id);
            const unsigned long long r = __umul64hi(r64, block_sum(sum));
            unsigned long long lower = block_sum_before(sum);
            if (lower <= r && r < lower + sum)
                for (int id = from; id < to; id++) {
                    const unsigned long long w = kept(id);
                    if (r < lower + w) { answer = id; break; }
                    lower += w;
                }
        }
    }
    __syncthreads();
    if (i != 0) return;
    const int pos = state.pos[row] + 1;
    state.token[row] = answer;
    state.pos[row] = pos;
    if (pos / PAGE < state.max_pages) state.slot[row] = state.pages[(size_t)state.seq[row] * state.max_pages + pos / PAGE] * PAGE + pos % PAGE;
    if (state.seen) state.seen[row * V + answer]++;
    if (state.ring) state.ring[(size_t)row * state.ring_size + pos % state.ring_size] = answer + 1;
}
#endif

// One conversation: a model, its KV cache, and the ids in it. On the GPU if `ctx` says so; the weights are there too.
template <class T> struct Session {
    static constexpr int CHUNK = 512;      // tokens of a prompt that go through `forward` at once
    static constexpr int GPU_CHUNK = 8192; // ... on a GPU
    static constexpr int ROWS = 16;        // of them that share one reading of the head, where all their logits are wanted

    Context ctx;
    const Config& config;
    const Weights<T>& weights;
    int capacity;             // tokens
    std::vector<int> ids;     // what the cache holds
    acc<T>* logits;           // (V) after the last id, in the CPU's memory; meaningless before the first, or after draws on a GPU

    // Plans all memory for `context` tokens. Throws Error if it is more than there is.
    Session(const Config& c, const Weights<T>& w, int context, const Context& where = {}) : ctx(where), config(c), weights(w), capacity(context) {
        arena.gpu = ctx.gpu;
        chunk = std::min(ctx.gpu ? GPU_CHUNK : CHUNK, capacity);
        plan();
        arena.allocate(format("a context of %d tokens", context).c_str());
        plan();
        std::vector<acc<T>> angles(ctx.gpu ? (size_t)capacity * c.D : 0);
        fill_rope(ctx.gpu ? angles.data() : rope, context, c.D, c.rope_theta);
        if (ctx.gpu) give(rope, angles.data(), angles.size());
        std::vector<int> identity(pages);
        for (int p = 0; p < pages; p++) identity[p] = p;
        give(table, identity.data(), identity.size());
        logits = row_logits;
        if (ctx.gpu) host_logits.resize((size_t)std::min(chunk, ROWS) * c.V), logits = host_logits.data();
    }
    Session(const Session&) = delete;
    ~Session() {
#ifdef __CUDACC__
        if (ctx.gpu) end_draws();
#endif
    }

    bool full() const { return (int)ids.size() == capacity; }

    // Appends tokens; afterwards `logits` are the last one's. `rows` (if given) is handed the logits of every
    // token in turn. Stops early, with what it has, when *stop becomes non-zero.
    // Throws Error if they do not fit or one is not in the vocabulary.
    void feed(const std::vector<int>& tokens, const volatile sig_atomic_t* stop = nullptr,
              const std::function<void(const acc<T>*)>& rows = nullptr) {
        if (tokens.size() > (size_t)capacity - ids.size())
            DIE("%zu tokens do not fit: the context holds %d and %zu are in it", tokens.size(), capacity, ids.size());
        for (int id : tokens)
            if (id < 0 || id >= config.V) DIE("id %d is not in the vocabulary of %d", id, config.V);
        for (size_t done = 0; done < tokens.size() && !(stop && *stop);) {
            const int N = (int)std::min(tokens.size() - done, (size_t)chunk);
            std::vector<int> positions(N), zero(N);
            for (int n = 0; n < N; n++) positions[n] = (int)ids.size() + n;
            give(token, &tokens[done], N);
            give(pos, positions.data(), N);
            give(seq, zero.data(), N);
            give(slot, positions.data(), N); // the identity table: page p holds positions 16 p ..
            Batch batch = {N, 1, token, pos, seq, slot, table, pages, N == 1};
            ctx.stop = stop;
#ifdef __CUDACC__
            ctx.splits = positions.back() / SPLIT + 1, ctx.longest = positions.back() + 1;
#endif
            forward(ctx, config, weights, batch, activations, cache, rope);
            if (stop && *stop) return;
            ids.insert(ids.end(), &tokens[done], &tokens[done] + N);
            done += N;
            const bool last = done == tokens.size();
            for (int n = rows ? 0 : last ? N - 1 : N, R; n < N; n += R) {
                R = std::min(N - n, ROWS);
                int wanted[ROWS];
                for (int r = 0; r < R; r++) wanted[r] = n + r;
                give(named, wanted, R);
                last_row = named + R - 1;
                RUN(head, row_logits, picked, activations.normed, named, weights.head, R);
                take_logits(R);
                for (int r = 0; r < R; r++) {
                    logits = (ctx.gpu ? host_logits.data() : row_logits) + (size_t)r * config.V;
                    if (rows) rows(logits);
                }
            }
        }
    }

    // ---- Drawing an answer, token by token. `exist`: only ids below may be drawn; `answer`: ids[answer] on belong to
    // the answer (see penalize); `most`: no more draws than these will follow.
    void begin_draws(const Sampling& how, int exist, size_t answer, size_t most) {
        drawing = {how, exist, answer};
        (void)most;
        if constexpr (HAS_KERNELS<T>) if (ctx.gpu) this->begin_draws_gpu(most);
    }
    // The next token: not in the session until it is accepted.
    int draw() {
        if constexpr (HAS_KERNELS<T>) if (ctx.gpu) return this->draw_gpu();
        penalize(logits, drawing.how, ids, drawing.answer);
        return sample(logits, drawing.exist, drawing.how, ids.size());
    }
    // Takes the token just drawn into the session.
    void accept(int id) {
        if (ctx.gpu) ids.push_back(id); // the GPU has gone on with it already
        else feed({id});
    }

    // The first n tokens in the KV cache: block_bytes(n) from the start of each of 2 L blocks, in whole pages of
    // a layer's keys, then of its values. With `ids` this is all there is to save and restore. f may read and write.
    size_t block_bytes(size_t n) const { return (n + PAGE - 1) / PAGE * config.K * PAGE * config.D * sizeof(T); }
    template <class F> void each_block(size_t n, F f) {
        std::vector<uint8_t> copy(ctx.gpu ? block_bytes(n) : 0);
        T* const both[] = {cache.keys, cache.values}; // (nvcc cannot walk a braced list here)
        for (T* all : both)
            for (int l = 0; l < config.L; l++) {
                T* block = all + l * cache.layer_size;
                if (!ctx.gpu) f(block);
#ifdef __CUDACC__
                else {
                    CUDA_CHECK(cudaMemcpyAsync(copy.data(), block, copy.size(), cudaMemcpyDeviceToHost, ctx.stream));
                    CUDA_CHECK(cudaStreamSynchronize(ctx.stream));
                    f((T*)copy.data());
                    CUDA_CHECK(cudaMemcpyAsync(block, copy.data(), copy.size(), cudaMemcpyHostToDevice, ctx.stream));
                }
#endif
            }
    }

    // Forgets all but the first n ids.
    void rewind(size_t n) { if (n < ids.size()) ids.resize(n); }

  private:
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    T* picked;
    acc<T> *rope, *row_logits;
    std::vector<acc<T>> host_logits;
    int chunk, pages, *token, *pos, *seq, *slot, *table, *named, *last_row;
    struct { Sampling how; int exist; size_t answer; } drawing;

    void plan() {
        pages = capacity / PAGE + (capacity % PAGE != 0);
        cache.plan(arena, config, pages);
        activations.plan(arena, config, chunk, !ctx.gpu);
        rope = arena.take<acc<T>>((size_t)capacity * config.D);
        row_logits = arena.take<acc<T>>((size_t)std::min(chunk, ROWS) * config.V);
        picked = arena.take<T>((size_t)std::min(chunk, ROWS) * config.C);
        for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>(chunk);
        table = arena.take<int>(pages);
        named = arena.take<int>(ROWS);
#ifdef __CUDACC__
        if (!ctx.gpu) return;
        const int splits = (capacity - 1) / SPLIT + 1;
        ctx.partial = arena.take<float>(PARTIAL_BYTES / sizeof(float));
        ctx.arrived = arena.take<int>(MAX_TILES);
        ctx.attention = arena.take<float>(attention_scratch(ctx, 1, splits, config.H, config.D));
        ctx.attention_arrived = arena.take<int>(config.H);
        for (int** one : {&step.token, &step.pos, &step.slot}) *one = arena.take<int>(1);
        seen = arena.take<uint32_t>(config.V);
        draw_parameters = arena.take<Draw>(1);
        best = arena.take<unsigned long long>(BEST_BLOCKS);
#endif
    }

    // To where the session computes.
    template <class U> void give(U* to, const U* from, size_t n) { copy_in(ctx, to, from, n); }
    void take_logits(int R) {
        if (ctx.gpu) copy_out(ctx, host_logits.data(), row_logits, (size_t)R * config.V);
    }

#ifdef __CUDACC__
    // ---- The one-token road: a step, from embedding to drawn token, is one CUDA graph, whose every changing number
    // lies in the GPU's memory. Steps are launched AHEAD of the tokens the caller has seen, which come through `ring` in
    // the CPU's memory; what was computed beyond the last token that was accepted is overwritten later.
    static constexpr int AHEAD = 8;
    DrawState step = {};
    uint32_t* seen;
    Draw* draw_parameters;
    unsigned long long* best;
    volatile int* ring = nullptr;
    int launched = 0, last = 0;              // draws up to these positions are on their way, will be wanted
    std::map<int, cudaGraphExec_t> graphs;   // by ctx.splits and whether there are penalties
    bool penalties = false;

    void begin_draws_gpu(size_t most) {
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream)); // steps that an answer before this one left behind
        if (!ring) {
            CUDA_CHECK(cudaHostAlloc((void**)&ring, ((size_t)capacity + 1) * sizeof(int), cudaHostAllocMapped));
            CUDA_CHECK(cudaHostGetDevicePointer((void**)&step.ring, (void*)ring, 0));
            step.ring_size = capacity + 1, step.seq = table, step.pages = table, step.max_pages = pages; // table[0] = 0: sequence 0
        }
        penalties = has_penalties(drawing.how);
        if (penalties) give(seen, seen_counts(ids, drawing.answer, config.V).data(), (size_t)config.V);
        step.seen = penalties ? seen : nullptr;
        const int n = (int)ids.size(), pos = n - 1;
        const Draw d = {drawing.how, drawing.exist};
        give(draw_parameters, &d, 1);
        give(step.pos, &pos, 1);
        for (int p = 0; p <= capacity; p++) ring[p] = 0;
        last = (int)std::min((size_t)capacity, n + std::min(most, (size_t)capacity) - 1);
        launched = n;
        launch_draw(last_row); // the row that `feed` took its logits from
    }

    void launch_draw(const int* row) {
        const int blocks = stream_product(ctx, {activations.normed, row, nullptr, nullptr, 0, weights.head.w[0], 1, config.C, config.V},
                                          DrawEpilogue{row_logits, (size_t)config.V, draw_parameters, step.seen, best});
        launch(ctx, sample_kernel, 1, 1024, 0, row_logits, (size_t)config.V, draw_parameters, best, blocks, step);
    }

    void launch_step() {
        ctx.splits = splits_for_graph(launched, capacity);
        cudaGraphExec_t& graph = graphs[2 * ctx.splits + penalties];
        if (!graph) {
            ctx.stop = nullptr;
            graph = record_graph(ctx, [&] {
                const Batch batch = {1, 1, step.token, step.pos, step.seq, step.slot, table, pages, 1};
                forward(ctx, config, weights, batch, activations, cache, rope);
                launch_draw(table); // row 0
            });
        }
        CUDA_CHECK(cudaGraphLaunch(graph, ctx.stream));
        launched++;
    }

    int draw_gpu() {
        const int p = (int)ids.size();
        while (launched < std::min(p + AHEAD, last)) launch_step();
        for (int spins = 0; !ring[p]; spins++)
            if (spins % 4096 == 4095) { // a fault of the GPU must not hang us
                const cudaError_t e = cudaStreamQuery(ctx.stream);
                if (e != cudaErrorNotReady) CUDA_CHECK(e);
            }
        return ring[p] - 1;
    }

    void end_draws() {
        cudaStreamSynchronize(ctx.stream);
        for (auto& [key, graph] : graphs) cudaGraphExecDestroy(graph);
        if (ring) cudaFreeHost((void*)ring);
    }
#endif
};

// Text on its way out: stops before a stop string, and holds back what may be the beginning of one. Of several it
// is the one that ends first (of these the longest), so that it does not matter in which pieces the text comes.
struct StopFilter {
    std::vector<std::string> stops; // none empty
    std::string held;
    bool stopped = false;

    // Takes new text, returns what is certain to be before any stop string.
    std::string feed(std::string_view text) {
        if (stopped) return "";
        held += text;
        size_t cut = std::string::npos, end = std::string::npos;
        for (auto& s : stops) {
            const size_t at = held.find(s);
            if (at == std::string::npos || std::make_pair(at + s.size(), at) >= std::make_pair(end, cut)) continue;
            cut = at, end = at + s.size();
        }
        if (cut != std::string::npos) {
            stopped = true;
            held.resize(cut);
            return flush();
        }
        size_t hold = 0; // the longest tail that begins a stop string
        for (auto& s : stops)
            for (size_t n = std::min(s.size() - 1, held.size()); n > hold; n--)
                if (held.compare(held.size() - n, n, s, 0, n) == 0) hold = n;
        std::string out = held.substr(0, held.size() - hold);
        held.erase(0, out.size());
        return out;
    }
    std::string flush() { return std::exchange(held, {}); }
};

// How one answer is made, and what came of it.
struct Generation {
    Sampling sampling;
    size_t max_tokens = SIZE_MAX;
    std::vector<std::string> stops;
    const volatile sig_atomic_t* interrupt = nullptr;

    std::vector<int> ids;         // the answer, without the end token
    std::string text;
    const char* finish = "";      // "stop", "length" or "interrupt"
};

// Answers from the session's logits on, until an end token, a stop string, max_tokens or a full context; every
// token of the answer but the last is then in the session. `show` is handed the text as it comes, in whole
// characters. Without a tokenizer the text is the ids.
template <class T>
void generate(Session<T>& session, const Tokenizer* tokenizer, Generation& g, const std::function<void(std::string_view)>& show) {
    const Config& c = session.config;
    const int exist = tokenizer ? tokenizer->size() : c.V;
    const size_t answer = session.ids.size();
    Utf8Stream characters;
    StopFilter filter{g.stops, "", false};
    auto emit = [&](std::string_view s) {
        std::string out = filter.feed(s);
        g.text += out;
        if (!out.empty()) show(out);
    };
    g.finish = "length";
    session.begin_draws(g.sampling, exist, answer, g.max_tokens);
    while (g.ids.size() < g.max_tokens) {
        if (g.interrupt && *g.interrupt) { g.finish = "interrupt"; break; }
        const int id = session.draw();
        if (std::find(c.end_tokens.begin(), c.end_tokens.end(), id) != c.end_tokens.end()) { g.finish = "stop"; break; }
        g.ids.push_back(id);
        if (!tokenizer) emit(format(g.ids.size() > 1 ? " %d" : "%d", id));
        else if (!tokenizer->is_special(id)) emit(characters.feed(tokenizer->bytes(id)));
        if (filter.stopped) { g.finish = "stop"; break; }
        if (session.full()) break;
        if (g.ids.size() < g.max_tokens) session.accept(id);
    }
    emit(characters.flush());
    std::string rest = filter.flush();
    g.text += rest;
    if (!rest.empty()) show(rest);
}

// ============================================================================================== 7 Backward ops
// Of each op the gradient of the loss by its inputs, given that by its output; d stands for "gradient of the loss by".
// The gradient of an activation is written, as T; the residual stream's is one buffer of acc<T>, to which each branch
// adds; those of parameters are acc<T> and are added to, token by token in order: on the CPU it makes no difference to a
// bit of them into how many batches a step is cut. What forward did not keep is made again.

// The products of this section: close(a, i, sum) for every a < A, i < I with one sum in the order of t,
//     sum = open(a, i) + sum_t (factor * u[t * u_term + a * u_row]) * row(t)[i],  t < terms.
// Tiles of 4 by 32 sums stay in registers.
template <class T, class Row, class Open, class Close>
void outer_sums(int A, int I, int terms, const T* u, size_t u_term, size_t u_row, acc<T> factor, Row row, Open open, Close close) {
    constexpr int ROWS = 4, COLUMNS = 2 * LANES;
    const int across = (I + COLUMNS - 1) / COLUMNS, tiles = (A + ROWS - 1) / ROWS * across;
    #pragma omp parallel for schedule(static) if ((size_t)A * I * terms > 50000)
    for (int tile = 0; tile < tiles; tile++) {
        const int a0 = tile / across * ROWS, i0 = tile % across * COLUMNS, rows = std::min(ROWS, A - a0), columns = std::min(COLUMNS, I - i0);
        acc<T> sums[ROWS][COLUMNS] = {};
        for (int a = 0; a < rows; a++)
            for (int i = 0; i < columns; i++) sums[a][i] = open(a0 + a, i0 + i);
        lanes<T> s[ROWS][2], v[2];
        const T* from[ROWS]; // (the last row stands for those that are missing)
        for (int a = 0; a < ROWS; a++) {
            load_lanes(s[a][0], sums[a]), load_lanes(s[a][1], sums[a] + LANES);
            from[a] = u + std::min(a0 + a, A - 1) * u_row;
        }
        for (int t = 0; t < terms; t++) {
            const T* x = row(t) + i0;
            load_some(v[0], x, std::min(LANES, columns));
            if (columns > LANES) load_some(v[1], x + LANES, columns - LANES);
            else v[1] = lanes<T>{};
            for (int a = 0; a < ROWS; a++) {
                const acc<T> y = factor * to_acc(from[a][t * u_term]);
                s[a][0] += y * v[0], s[a][1] += y * v[1];
            }
        }
        for (int a = 0; a < rows; a++) {
            memcpy(sums[a], s[a], sizeof s[a]);
            for (int i = 0; i < columns; i++) close(a0 + a, i0 + i, sums[a][i]);
        }
    }
}

// ---- cross_entropy: loss[r] = log(sum_v e^logits[r][v]) - logits[r][target[r]]
// dlogits = scale (softmax(logits) - one at the target). Over all V rows, those of ids that do not exist too, as Hugging
// Face's is.
template <class T>
void cross_entropy_cpu(acc<T>* loss,         // (R) out
                       T* dlogits,           // out, or null: the memory of logits, row r at its row r
                       const acc<T>* logits, // (R,V)
                       const int* target,    // (R)
                       acc<T> scale, int R, int V) {
    #pragma omp parallel for schedule(static) if ((size_t)R * V > 2000)
    for (int r = 0; r < R; r++) {
        const acc<T>* row = logits + (size_t)r * V;
        acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0, right;
        for (int v = 0; v < V; v++) top = std::max(top, row[v]);
        lanes<T> e, sums = {};
        auto exponentials = [&](int v) { // of 16 logits, zeros behind the end
            const int n = std::min(LANES, V - v);
            load_some(e, row + v, n);
            for (int l = n; l < LANES; l++) e[l] = -std::numeric_limits<acc<T>>::infinity();
            e -= top;
            exp_lanes(e);
            return n;
        };
        for (int v = 0; v < V; v += LANES) {
            exponentials(v);
            sums += e;
        }
        sum = sum_lanes(sums);
        memcpy(&right, row + target[r], sizeof right);
        loss[r] = std::log(sum) + top - right;
        if (!dlogits) continue;
        uint8_t* out = (uint8_t*)row; // (a gradient is never longer than its logit: nothing unread is overwritten)
        for (int v = 0; v < V; v += LANES) {
            const int n = exponentials(v);
            T g[LANES];
            for (int l = 0; l < n; l++) g[l] = to_stored<T>((e[l] / sum - (v + l == target[r])) * scale);
            memcpy(out + v * sizeof(T), g, n * sizeof(T));
        }
    }
}

// The head and its loss: logits[r] = W x[rows[r]], and their gradient in place of them.
template <class T>
void head_loss_cpu(acc<T>* loss,       // (R) out
                   T* dlogits,         // out, or null: as cross_entropy's
                   acc<T>* logits,     // (R,V) out
                   T* picked,          // (R,C) scratch
                   acc<T>*,            // (R, V / 64 rounded up, 2) scratch of the GPU's
                   const T* x,         // (N,C) after the final norm
                   const int* rows,    // (R)
                   const int* target,  // (R)
                   acc<T> scale, const Linear<T>& W, int R) {
    head_cpu(logits, picked, x, rows, W, R);
    cross_entropy_cpu(loss, dlogits, logits, target, scale, R, W.out());
}

#ifdef __CUDACC__
struct LossEpilogue { // logits, and of every 64 of a row the largest and sum e^(logit - largest)
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = true;
    float* out; // (R,V)
    size_t V;
    float2* parts; // (R,pieces)
    size_t pieces;
    __device__ void four(int n, int r, const float* y) { *(float4*)(out + n * V + r) = make_float4(y[0], y[1], y[2], y[3]); }
    __device__ void part(int n, int piece, float top, float sum) { parts[n * pieces + piece] = make_float2(top, sum); }
};
// A block a row: its largest logit and the sum, then the gradient, which overwrites the row from its beginning. A piece is
// read by all before any of it is written. V is a multiple of 8.
__global__ void __launch_bounds__(1024) cross_entropy_kernel(float* loss, bf16* dlogits, const float* logits, const float2* parts, int pieces, const int* target, float scale, int V) {
    __shared__ float tops[32], sums[32];
    let_next_start();
    wait_for_previous();
    const float* row = logits + (size_t)blockIdx.x * V;
    const int right = target[blockIdx.x];
    const float logit = row[right];
    float top = -1e30f, sum = 0;
    auto join = [&](float t, float s) { // sum e^-top and s e^-t
        const float most = fmaxf(top, t);
        sum = (top == most ? sum : sum * exp2_fast((top - most) * LOG2E)) + (t == most ? s : s * exp2_fast((t - most) * LOG2E));
        top = most;
    };
    for (int i = threadIdx.x; i < pieces; i += 1024) {
        const float2 part = parts[(size_t)blockIdx.x * pieces + i];
        join(part.x, part.y);
    }
    auto join_lanes = [&] { for (int lane = 16; lane; lane /= 2) join(__shfl_xor_sync(~0u, top, lane), __shfl_xor_sync(~0u, sum, lane)); };
    join_lanes();
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top, sums[threadIdx.x / 32] = sum;
    __syncthreads();
    top = tops[threadIdx.x % 32], sum = sums[threadIdx.x % 32];
    join_lanes();
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + top - logit;
    if (!dlogits) return;
    const float base = top * LOG2E, part = 1 / sum;
    for (int first = 0; first < V; first += 4096) {
        const int v = first + threadIdx.x * 4;
        float4 x = {};
        if (v < V) x = *(const float4*)(row + v);
        __syncthreads();
        auto gradient = [&](float logit, int v) { return (exp2_fast(logit * LOG2E - base) * part - (v == right)) * scale; };
        if (v < V) *(uint2*)((uint8_t*)row + 2 * v) = make_uint2(pack(gradient(x.x, v), gradient(x.y, v + 1)), pack(gradient(x.z, v + 2), gradient(x.w, v + 3)));
    }
}
inline void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* logits, bf16* picked, float* parts, const bf16* x, const int* rows, const int* target, float scale,
                          const Linear<bf16>& W, int R) {
    const int V = W.out(), pieces = (V + 63) / 64;
    const LossEpilogue epilogue = {logits, (size_t)V, (float2*)parts, (size_t)pieces};
    const TileArgs p = {picked, W.w[0], R, W.in, V};
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    if (ctx.hopper) launch_tiles<TileHopper>(ctx, p, epilogue);
    else launch_tiles<Tile128x128>(ctx, p, epilogue);
    launch(ctx, cross_entropy_kernel, R, 1024, 0, loss, dlogits, logits, (const float2*)parts, pieces, target, scale, V);
}
#endif

// ---- add_losses: total += loss[0] + loss[1] + ..., in double and in order
template <class A> void add_losses_cpu(double* total, const A* loss, int R) {
    for (int r = 0; r < R; r++) *total += (double)loss[r];
}
#ifdef __CUDACC__
__global__ void __launch_bounds__(1024) add_losses_kernel(double* total, const float* loss, int R) {
    let_next_start();
    wait_for_previous();
    double sum = 0;
    for (int r = threadIdx.x; r < R; r += 1024) sum += loss[r];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}
inline void add_losses_gpu(Context& ctx, double* total, const float* loss, int R) { launch(ctx, add_losses_kernel, 1, 1024, 0, total, loss, R); }
#endif

// ---- head: logits[r] = W normed[rows[r]]
// dnormed of these rows; those of the others are not touched.
template <class T>
void head_backward_cpu(T* dnormed,       // (N,C) out
                       const T* dlogits, // (R, ld), V of each row
                       size_t ld,
                       const int* rows,  // (R), none twice
                       const Linear<T>& W, int R) {
    const int C = W.in;
    outer_sums(R, C, W.out(), dlogits, 1, ld, 1, [&](int v) { return W.w[0] + (size_t)v * C; }, [](int, int) { return 0; },
               [&](int r, int i, acc<T> sum) { dnormed[(size_t)rows[r] * C + i] = to_stored<T>(sum); });
}

#ifdef __CUDACC__
struct ScatterEpilogue {
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = false;
    bf16* out;       // (., C)
    const int* rows; // (R)
    size_t C;
    __device__ void four(int n, int i, const float* y) { *(uint2*)(out + rows[n] * C + i) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3])); }
};
inline void head_backward_gpu(Context& ctx, bf16* dnormed, const bf16* dlogits, size_t ld, const int* rows, const Linear<bf16>& W, int R) {
    TileArgs p = {dlogits, W.w[0], R, W.out(), W.in};
    p.ldx = (int)ld;
    tile_product<false, true>(ctx, p, ScatterEpilogue{dnormed, rows, (size_t)W.in});
}
#endif

// ---- rmsnorm: out = x r w with r = 1 / sqrt(mean(x^2) + eps)
// dx += r w dout - x r^3 / C sum_j x_j w_j dout_j,  dw += x r dout
template <class T>
void rmsnorm_backward_cpu(acc<T>* dx,      // (N,C) +=
                          T* dy,           // (N,C) out: the new dx as T, or null
                          T* normed,       // (N,C) out: what forward's `out` was, or null
                          acc<T>* dw,      // (C) +=, or null
                          const T* dout,   // (N,C)
                          const acc<T>* x, // (N,C)
                          const T* w,      // (C)
                          int N, int C, float eps) {
    static thread_local std::vector<acc<T>> scratch; // r of each token: grows to the largest, and stays
    scratch.resize(N);
    acc<T>* scale = scratch.data();
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        const acc<T> r = scale[n] = inverse_rms(x + at, C, eps);
        lanes<T> sums = {}, a, b, d;
        for (int i = 0; i < C; i += LANES) {
            const int k = std::min(LANES, C - i);
            load_some(a, x + at + i, k), load_some(b, w + i, k), load_some(d, dout + at + i, k);
            sums += a * b * d;
        }
        const acc<T> mean = sum_lanes(sums) * r * r * r / C;
        for (int i = 0; i < C; i++) {
            const acc<T> weight = to_acc(w[i]);
            if (normed) normed[at + i] = to_stored<T>(x[at + i] * r * weight);
            dx[at + i] += r * weight * to_acc(dout[at + i]) - x[at + i] * mean;
            if (dy) dy[at + i] = to_stored<T>(dx[at + i]);
        }
    }
    if (!dw) return;
    #pragma omp parallel for schedule(static) if ((size_t)N * C > 2000)
    for (int i = 0; i < C; i++)
        for (int n = 0; n < N; n++) dw[i] += to_acc(dout[(size_t)n * C + i]) * x[(size_t)n * C + i] * scale[n];
}

#ifdef __CUDACC__
// A block a token. scale (N) gets r if it is not null.
__global__ void __launch_bounds__(128) rmsnorm_backward_kernel(float* dx, bf16* dy, bf16* normed, float* scale, const bf16* dout, const float* x, const bf16* w, int C, float eps) {
    __shared__ float parts[2][4];
    let_next_start();
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * C;
    float squares = 0, mixed = 0;
    for (int i = threadIdx.x * 4; i < C; i += 512) {
        const float4 a = *(const float4*)(x + at + i);
        const uint2 b = *(const uint2*)(w + i), d = *(const uint2*)(dout + at + i);
        squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
        mixed += a.x * low(b.x) * low(d.x) + a.y * high(b.x) * high(d.x) + a.z * low(b.y) * low(d.y) + a.w * high(b.y) * high(d.y);
    }
    squares = warp_sum(squares), mixed = warp_sum(mixed);
    if (threadIdx.x % 32 == 0) parts[0][threadIdx.x / 32] = squares, parts[1][threadIdx.x / 32] = mixed;
    __syncthreads();
    squares = parts[0][0] + parts[0][1] + parts[0][2] + parts[0][3], mixed = parts[1][0] + parts[1][1] + parts[1][2] + parts[1][3];
    const float r = 1 / sqrtf(squares / C + eps), mean = mixed * r * r * r / C;
    if (scale && threadIdx.x == 0) scale[blockIdx.x] = r;
    for (int i = threadIdx.x * 4; i < C; i += 512) {
        const float4 a = *(const float4*)(x + at + i);
        const uint2 b = *(const uint2*)(w + i), d = *(const uint2*)(dout + at + i);
        float4 g = *(const float4*)(dx + at + i);
        g.x += r * low(b.x) * low(d.x) - a.x * mean, g.y += r * high(b.x) * high(d.x) - a.y * mean;
        g.z += r * low(b.y) * low(d.y) - a.z * mean, g.w += r * high(b.y) * high(d.y) - a.w * mean;
        *(float4*)(dx + at + i) = g;
        if (dy) *(uint2*)(dy + at + i) = make_uint2(pack(g.x, g.y), pack(g.z, g.w));
        if (normed) *(uint2*)(normed + at + i) = make_uint2(pack(a.x * r * low(b.x), a.y * r * high(b.x)), pack(a.z * r * low(b.y), a.w * r * high(b.y)));
    }
}
// dw[i] += sum_n dout[n][i] x[n][i] scale[n]: a block has 32 columns and a part of the tokens, eight at a time.
__global__ void __launch_bounds__(256) norm_weight_kernel(float* dw, const float* scale, const bf16* dout, const float* x, int N, int C, float* partial, int* arrived) {
    __shared__ float sums[8][32];
    let_next_start();
    wait_for_previous();
    const int column = blockIdx.x * 32 + threadIdx.x % 32, group = threadIdx.x / 32;
    const int each = (N + gridDim.y - 1) / gridDim.y, last = min(N, (int)(blockIdx.y + 1) * each);
    float sum = 0;
    for (int n = blockIdx.y * each + group; n < last && column < C; n += 8) sum += to_acc(dout[(size_t)n * C + column]) * x[(size_t)n * C + column] * scale[n];
    sums[group][threadIdx.x % 32] = sum;
    __syncthreads();
    if (group == 0 && column < C) {
        for (int g = 1; g < 8; g++) sum += sums[g][threadIdx.x];
        partial[(size_t)blockIdx.y * C + column] = sum;
    }
    if (!last_to_arrive(arrived + blockIdx.x, gridDim.y) || group || column >= C) return;
    sum = dw[column];
    for (int part = 0; part < (int)gridDim.y; part++) sum += __ldcg(partial + (size_t)part * C + column);
    dw[column] = sum;
}
inline void rmsnorm_backward_gpu(Context& ctx, float* dx, bf16* dy, bf16* normed, float* dw, const bf16* dout, const float* x, const bf16* w, int N, int C, float eps) {
    constexpr int PARTS = 32;
    if (dw && ((size_t)N + (size_t)PARTS * C) * sizeof(float) > PARTIAL_BYTES) DIE("%d tokens of %d channels are more than the norms' gradients can sum at once", N, C);
    float *scale = dw ? ctx.partial + (size_t)PARTS * C : nullptr;
    launch(ctx, rmsnorm_backward_kernel, N, 128, 0, dx, dy, normed, scale, dout, x, w, C, eps);
    if (dw) launch(ctx, norm_weight_kernel, dim3((C + 31) / 32, PARTS), 256, 0, dw, scale, dout, x, N, C, ctx.partial, ctx.arrived);
}
#endif

// ---- linear: y = x W^T + sum_j s h_j B_j^T,  h_j = drop_j(x) A_j^T; the second part is the adapter's, if there is one
// dh_j = dy (s B_j),  dx = sum_j drop_j(dh_j A_j) + dy W
template <class T>
void linear_backward_input_cpu(T* dx,       // (N, W.in) out
                               T* dh,       // (N, m * rank) out
                               const T* dy, // (N, W.out)
                               const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const int rank = a.rank;
    const size_t in = W.in, ld = (size_t)a.modules * rank;
    for (int j = 0; j < a.modules; j++) {
        const int first = std::accumulate(W.rows, W.rows + a.block[j], 0);
        outer_sums(N, rank, W.rows[a.block[j]], dy + first, 1, (size_t)W.out(), 1, [&](int r) { return a.B + (first + r) * ld + j * rank; },
                   [](int, int) { return 0; }, [&](int n, int i, acc<T> sum) { dh[n * ld + j * rank + i] = to_stored<T>(sum); });
    }
    static thread_local std::vector<acc<T>> scratch; // the adapter's part; grows to the largest, and stays
    if (rank && scratch.size() < N * in) scratch.resize(N * in);
    acc<T>* ahead = scratch.data();
    const acc<T> scale = a.dropout ? 1 / (1 - (acc<T>)a.dropout->p) : 1;
    #pragma omp parallel for schedule(static) if ((size_t)N * in > 2000)
    for (int n = 0; n < (rank ? N : 0); n++)
        for (int k = 0; k < (int)in; k += LANES) {
            const int some = std::min(LANES, (int)in - k);
            lanes<T> sum = {}, part, v;
            for (int j = 0; j < a.modules; j++) {
                part = lanes<T>{};
                for (int i = 0; i < rank; i++) {
                    load_some(v, a.A + (size_t)(j * rank + i) * in + k, some);
                    part += to_acc(dh[n * ld + j * rank + i]) * v;
                }
                for (int l = 0; l < LANES && a.dropout; l += 8) {
                    const uint32_t kept = dropout_mask(*a.dropout, a.dropout->token[n], a.module[j], (k + l) / 8);
                    for (int i = 0; i < 8; i++) part[l + i] *= kept >> i & 1 ? scale : 0;
                }
                sum += part;
            }
            for (int l = 0; l < some; l++) ahead[n * in + k + l] = sum[l];
        }
    auto row = [&](int r) {
        int b = 0;
        while (r >= W.rows[b]) r -= W.rows[b++];
        return W.w[b] + r * in;
    };
    outer_sums(N, W.in, W.out(), dy, 1, (size_t)W.out(), 1, row, [&](int n, int i) { return rank ? ahead[n * in + i] : 0; },
               [&](int n, int i, acc<T> sum) { dx[n * in + i] = to_stored<T>(sum); });
}

#ifdef __CUDACC__
struct DropEpilogue { // stores the sum, whose further columns were dropped as a module's input was
    static constexpr bool PAIR = false, ADDS = false, MASKS = true, PARTS = false;
    bf16* out; // (N,R)
    size_t R;
    Dropout dropout;
    int module;
    float scale;
    __device__ uint32_t kept(int n, int k8) const { return dropout_mask(dropout, dropout.token[n], module, k8); }
    __device__ void four(int n, int r, const float* y) { *(uint2*)(out + n * R + r) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3])); }
};
// dx[n][k] += sum_j drop_j(A_j^T dh_j[n])[k]. A block owns 64 tokens by 64 columns, a warp 16 of the tokens; 32 rows of
// an A pass through shared memory at a time.
__global__ void __launch_bounds__(128, 3) lora_backward_input_kernel(bf16* dx, const bf16* dh, LoraArgs p) {
    constexpr int CHUNKS = 8, F = CHUNKS; // of 16 bytes a row, eights of columns
    __shared__ __align__(128) uint4 tile[32 * CHUNKS];
    const uint32_t shared = shared_address(tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n0 = blockIdx.x * 64 + warp * 16, c0 = blockIdx.y * CHUNKS * 8;
    const size_t ld = (size_t)p.modules * p.rank;
    wait_for_previous();
    float sum[F][4];
    #pragma unroll
    for (int f = 0; f < F; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = n0 + h * 8 + g, c = c0 + f * 8 + 2 * t;
            const uint32_t old = n < p.N && c < p.K ? *(const uint32_t*)(dx + (size_t)n * p.K + c) : 0;
            sum[f][2 * h] = low(old), sum[f][2 * h + 1] = high(old);
        }
    for (int j = 0; j < p.modules; j++) {
        float part[F][4] = {};
        for (int r0 = 0; r0 < p.rank; r0 += 32) {
            __syncthreads();
            for (int i = threadIdx.x; i < 32 * CHUNKS; i += 128) {
                const int row = i / CHUNKS, chunk = i % CHUNKS;
                const bool there = r0 + row < p.rank && c0 + chunk * 8 < p.K;
                tile[row * CHUNKS + (chunk ^ row % 8)] = there ? *(const uint4*)(p.A + (size_t)(j * p.rank + r0 + row) * p.K + c0 + chunk * 8) : uint4{};
            }
            __syncthreads();
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t a[4], b[4];
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int n = n0 + e % 2 * 8 + g, r = r0 + k * 16 + e / 2 * 8 + 2 * t;
                    a[e] = n < p.N && r < p.rank ? *(const uint32_t*)(dh + n * ld + j * p.rank + r) : 0;
                }
                #pragma unroll
                for (int f = 0; f < F / 2; f++) {
                    const int row = k * 16 + lane % 16, chunk = f * 2 + lane / 16;
                    ldmatrix_transposed(b, shared + (row * CHUNKS + (chunk ^ row % 8)) * 16);
                    mma(part[2 * f], a[0], a[1], a[2], a[3], b[0], b[1]);
                    mma(part[2 * f + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
                }
            }
        }
        #pragma unroll
        for (int f = 0; f < F; f += 2) { // a lane of a quad makes the mask of one token and one eight columns, for all four
            const int n = n0 + t % 2 * 8 + g;
            const uint32_t mine = p.dropping && n < p.N ? dropout_mask(p.dropout, p.dropout.token[n], p.name(j), (c0 >> 3) + f + t / 2) : 0xff;
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint32_t kept = __shfl_sync(~0u, mine, (lane & ~3) + e) >> 2 * t;
                float *to = &sum[f + e / 2][e % 2 * 2], *from = &part[f + e / 2][e % 2 * 2];
                to[0] += kept & 1 ? from[0] * p.scale : 0, to[1] += kept & 2 ? from[1] * p.scale : 0;
            }
        }
    }
    let_next_start();
    #pragma unroll
    for (int f = 0; f < F; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = n0 + h * 8 + g, c = c0 + f * 8 + 2 * t;
            if (n < p.N && c < p.K) *(uint32_t*)(dx + (size_t)n * p.K + c) = pack(sum[f][2 * h], sum[f][2 * h + 1]);
        }
}
// What the adapter adds rides in the product with W, as columns of dh and rows of A, unless modules share x and each
// drops it in its own way: then dy W is stored, rounded, and added to.
inline void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, const bf16* dy, const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    const int columns = lora.modules * lora.rank;
    const bool rides = columns && (lora.modules == 1 || !lora.dropping);
    if (columns) tile_product<false, true>(ctx, {dy, W.adapter.B, N, W.out(), columns}, StoreEpilogue{dh, (size_t)columns});
    TileArgs p = {dy, W.w[0], N, W.out(), W.in};
    if (rides) p.more_x = dh, p.more_W = W.adapter.A, p.more = columns;
    if (rides && lora.dropping) return tile_product<false, true>(ctx, p, DropEpilogue{dx, (size_t)W.in, lora.dropout, lora.module[0], lora.scale});
    tile_product<false, true>(ctx, p, StoreEpilogue{dx, (size_t)W.in});
    if (columns && !rides) launch(ctx, lora_backward_input_kernel, dim3((N + 63) / 64, (W.in + 63) / 64), 128, 0, dx, dh, lora);
}
#endif

// dW += dy^T x
template <class T>
void linear_backward_weight_cpu(acc<T>* dW,  // (out,in) +=
                                const T* dy, // (N, ld), `out` of each row
                                size_t ld,
                                const T* x,  // (N,in)
                                int N, int out, int in) {
    outer_sums(out, in, N, dy, ld, 1, 1, [&](int n) { return x + (size_t)n * in; }, [&](int o, int i) { return dW[(size_t)o * in + i]; },
               [&](int o, int i, acc<T> sum) { dW[(size_t)o * in + i] = sum; });
}

#ifdef __CUDACC__
inline void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N, int out, int in) {
    TileArgs p = {dy, x, out, N, in};
    p.ldx = (int)ld;
    tile_product<true, true>(ctx, p, AddEpilogue{dW, dW, (size_t)in});
}
#endif

// dA_j += dh_j^T drop_j(x),  dB_j += s dy^T h_j
template <class T>
void lora_backward_weight_cpu(acc<T>* dA,  // (m * rank, W.in) +=
                              acc<T>* dB,  // (W.out, m * rank) +=, where module and row belong together
                              const T* dh, // (N, m * rank)
                              const T* dy, // (N, W.out)
                              const T* x,  // (N, W.in)
                              const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const int rank = a.rank;
    const size_t in = W.in, ld = (size_t)a.modules * rank;
    for (int j = 0; j < a.modules; j++) {
        const T* seen = dropped_cpu(x, W, j, N);
        acc<T>* A = dA + j * rank * in;
        outer_sums(rank, W.in, N, dh + j * rank, ld, 1, 1, [&](int n) { return seen + n * in; }, [&](int r, int i) { return A[r * in + i]; },
                   [&](int r, int i, acc<T> sum) { A[r * in + i] = sum; });
        const int first = std::accumulate(W.rows, W.rows + a.block[j], 0);
        acc<T>* B = dB + first * ld + j * rank;
        outer_sums(W.rows[a.block[j]], rank, N, dy + first, (size_t)W.out(), 1, a.s, [&](int n) { return a.h + n * ld + j * rank; },
                   [&](int r, int i) { return B[r * ld + i]; }, [&](int r, int i, acc<T> sum) { B[r * ld + i] = sum; });
    }
}

#ifdef __CUDACC__
struct LoraUpEpilogue { // dB, of the rows and columns that belong together
    static constexpr bool PAIR = false, ADDS = true, MASKS = false, PARTS = false;
    float* dB; // (out, m * rank)
    float s;
    int rank, columns, first[3], last[3]; // rows of module j
    __device__ bool own(int r, int c) const { return r >= first[c / rank] && r < last[c / rank]; }
    __device__ float4 old(int r, int c) const { return own(r, c) ? *(const float4*)(dB + (size_t)r * columns + c) : float4{}; }
    __device__ void four(int r, int c, const float* y, float4 old) {
        if (own(r, c)) *(float4*)(dB + (size_t)r * columns + c) = make_float4(old.x + s * y[0], old.y + s * y[1], old.z + s * y[2], old.w + s * y[3]);
    }
};
// dA_j += dh_j^T drop_j(x). A block owns 32 rows of an A by 128 columns and a part of the tokens, 64 at a time through
// shared memory; a warp owns 16 of the columns. The last block of a tile to arrive adds the parts in order.
__global__ void __launch_bounds__(256) lora_down_weight_kernel(float* dA, const bf16* dh, const bf16* x, LoraArgs p, float* partial, int* arrived) {
    __shared__ __align__(128) uint4 x_tile[64 * 16];
    __shared__ __align__(128) uint4 h_tile[64 * 5]; // rows of 64 bytes, 80 apart: eight of them in different banks
    const uint32_t x_at = shared_address(x_tile), h_at = shared_address(h_tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = (p.rank + 31) / 32;
    const int j = blockIdx.y / groups, r0 = blockIdx.y % groups * 32, c0 = blockIdx.x * 128, name = p.name(j);
    const size_t ld = (size_t)p.modules * p.rank;
    const int each = ((p.N + 63) / 64 + gridDim.z - 1) / gridDim.z * 64, last = min(p.N, (int)(blockIdx.z + 1) * each);
    const int row = threadIdx.x / 16, chunk = threadIdx.x % 16, h_row = threadIdx.x / 4, h_chunk = threadIdx.x % 4;
    wait_for_previous();
    float sum[2][2][4] = {};
    for (int n0 = blockIdx.z * each; n0 < last; n0 += 64) {
        uint4 v[4], h = {};
        #pragma unroll
        for (int i = 0; i < 4; i++) v[i] = n0 + row + i * 16 < last && c0 + chunk * 8 < p.K ? *(const uint4*)(x + (size_t)(n0 + row + i * 16) * p.K + c0 + chunk * 8) : uint4{};
        if (n0 + h_row < last && r0 + h_chunk * 8 < p.rank) h = *(const uint4*)(dh + (n0 + h_row) * ld + j * p.rank + r0 + h_chunk * 8);
        #pragma unroll
        for (int i = 0; i < 4; i++) v[i] = p.drop(v[i], n0 + row + i * 16, name, c0 / 8 + chunk);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 4; i++) x_tile[(row + i * 16) * 16 + (chunk ^ row % 8)] = v[i];
        h_tile[h_row * 5 + h_chunk] = h;
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t a[4], b[4];
            const int b_row = k * 16 + lane % 16, b_chunk = warp * 2 + lane / 16;
            ldmatrix_transposed(b, x_at + (b_row * 16 + (b_chunk ^ b_row % 8)) * 16);
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                ldmatrix_transposed(a, h_at + ((k * 16 + lane % 8 + lane / 16 * 8) * 5 + i * 2 + lane / 8 % 2) * 16);
                mma(sum[i][0], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma(sum[i][1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
    let_next_start();
    const int tile = blockIdx.y * gridDim.x + blockIdx.x;
    if (gridDim.z > 1) {
        float4 *part = (float4*)partial + (size_t)tile * gridDim.z * 1024 + threadIdx.x, *mine = part + (size_t)blockIdx.z * 1024;
        #pragma unroll
        for (int f = 0; f < 4; f++) {
            float(&v)[4] = sum[f / 2][f % 2];
            mine[f * 256] = make_float4(v[0], v[1], v[2], v[3]);
            v[0] = v[1] = v[2] = v[3] = 0;
        }
        if (!last_to_arrive(arrived + tile, gridDim.z)) return;
        for (int z = 0; z < (int)gridDim.z; z++, part += 1024)
            #pragma unroll
            for (int f = 0; f < 4; f++) {
                const float4 more = __ldcg(part + f * 256);
                float(&v)[4] = sum[f / 2][f % 2];
                v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
            }
    }
    #pragma unroll
    for (int f = 0; f < 4; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = r0 + f / 2 * 16 + h * 8 + lane / 4, c = c0 + warp * 16 + f % 2 * 8 + lane % 4 * 2;
            if (r >= p.rank || c >= p.K) continue;
            float2* to = (float2*)(dA + (size_t)(j * p.rank + r) * p.K + c);
            const float2 old = *to;
            *to = make_float2(old.x + sum[f / 2][f % 2][2 * h], old.y + sum[f / 2][f % 2][2 * h + 1]);
        }
}
inline void lora_backward_weight_gpu(Context& ctx, float* dA, float* dB, const bf16* dh, const bf16* dy, const bf16* x, const Linear<bf16>& W, int N) {
    const LoraArgs p(W, N);
    const Adapter<bf16>& a = W.adapter;
    const int columns = (p.K + 127) / 128, groups = p.modules * ((p.rank + 31) / 32), tiles = columns * groups;
    if (tiles > MAX_TILES) DIE("an adapter of rank %d on %d columns is more than the GPU's kernels take", p.rank, p.K);
    const int parts = std::max(1, std::min({(N + 63) / 64, 6 * ctx.sms / tiles, (int)(PARTIAL_BYTES / (16384 * (size_t)tiles))}));
    launch(ctx, lora_down_weight_kernel, dim3(columns, groups, parts), 256, 0, dA, dh, x, p, ctx.partial, ctx.arrived);
    LoraUpEpilogue up = {dB, a.s, a.rank, a.modules * a.rank, {}, {}};
    for (int j = 0; j < a.modules; j++) {
        for (int b = 0; b < a.block[j]; b++) up.first[j] += W.rows[b];
        up.last[j] = up.first[j] + W.rows[a.block[j]];
    }
    tile_product<true, true>(ctx, {dy, a.h, W.out(), N, up.columns}, up);
}
#endif

// ---- SwiGLU: out = silu(gate) * up, silu(g) = g sigma(g), sigma(g) = 1 / (1 + e^-g)
// dgate = dout up sigma (1 + g (1 - sigma)),  dup = dout silu(gate)
template <class T>
void swiglu_backward_cpu(T* dgate_up,      // (N,2F) out
                         T* hidden,        // (N,F) out: what forward's `out` was
                         const T* dhidden, // (N,F)
                         const T* gate_up, // (N,2F)
                         int N, int F) {
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * F;
        const T *gate = gate_up + 2 * at, *up = gate + F;
        for (int i = 0; i < F; i += LANES) {
            const int some = std::min(LANES, F - i);
            lanes<T> g, u, d, e = {};
            load_some(g, gate + i, some), load_some(u, up + i, some), load_some(d, dhidden + at + i, some);
            for (int l = 0; l < LANES; l++) e[l] = std::min(-g[l], (acc<T>)80);
            exp_lanes(e);
            const lanes<T> silu = g / (1 + e), sigma = 1 / (1 + e), dgate = d * u * sigma * (1 + g * (1 - sigma)), dup = d * silu;
            u *= silu;
            for (int l = 0; l < some; l++) {
                hidden[at + i + l] = to_stored<T>(u[l]);
                dgate_up[2 * at + i + l] = to_stored<T>(dgate[l]);
                dgate_up[2 * at + F + i + l] = to_stored<T>(dup[l]);
            }
        }
    }
}

#ifdef __CUDACC__
// A thread has eight columns of a token.
__global__ void swiglu_backward_kernel(bf16* dgate_up, bf16* hidden, const bf16* dhidden, const bf16* gate_up, int N, int F) {
    let_next_start();
    wait_for_previous();
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 8, n = at / F;
    if (n >= N) return;
    const size_t gate = at + n * F, up = gate + F; // (N,2F)
    const uint4 g4 = *(const uint4*)(gate_up + gate), u4 = *(const uint4*)(gate_up + up), d4 = *(const uint4*)(dhidden + at);
    const uint32_t *gs = &g4.x, *us = &u4.x, *ds = &d4.x;
    uint32_t out[4], dg[4], du[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        float y[2], a[2], b[2];
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            const float g = e ? high(gs[i]) : low(gs[i]), u = e ? high(us[i]) : low(us[i]), d = e ? high(ds[i]) : low(ds[i]);
            const float sigma = 1 / (1 + exp2_fast(-LOG2E * g)), silu = g * sigma;
            y[e] = silu * u, a[e] = d * u * sigma * (1 + g * (1 - sigma)), b[e] = d * silu;
        }
        out[i] = pack(y[0], y[1]), dg[i] = pack(a[0], a[1]), du[i] = pack(b[0], b[1]);
    }
    *(uint4*)(hidden + at) = make_uint4(out[0], out[1], out[2], out[3]);
    *(uint4*)(dgate_up + gate) = make_uint4(dg[0], dg[1], dg[2], dg[3]);
    *(uint4*)(dgate_up + up) = make_uint4(du[0], du[1], du[2], du[3]);
}
inline void swiglu_backward_gpu(Context& ctx, bf16* dgate_up, bf16* hidden, const bf16* dhidden, const bf16* gate_up, int N, int F) {
    launch(ctx, swiglu_backward_kernel, (unsigned)(((size_t)N * F / 8 + 255) / 256), 256, 0, dgate_up, hidden, dhidden, gate_up, N, F);
}
#endif

// ---- attention_backward:  attention(out, lse, q, keys, values)
// With s[n][m] = q_n . k_m / sqrt(D), p = e^(s - lse) and o_n = sum_m p[n][m] v_m over the tokens m <= n of n's sequence:
//     dv_m = sum_n p[n][m] do_n                              dp[n][m] = do_n . v_m
//     ds[n][m] = p[n][m] (dp[n][m] - delta_n)                delta_n = sum_m p[n][m] dp[n][m] = do_n . o_n
//     dq_n = sum_m ds[n][m] k_m / sqrt(D)                    dk_m = sum_n ds[n][m] q_n / sqrt(D)
// where for dk and dv n runs over all G query heads of the KV head too. A training batch holds sequences from their
// position 0 on: so key m of a sequence is its m-th row of the batch, and lies at that row's slot. Spare rows, behind
// all others, get zeros, since weight gradients are sums over all rows.
// The probabilities are computed again from lse, not stored.
template <class T>
void attention_backward_cpu(T* dqkv,           // (N,(H+2K)D) out: gradients of q and k after RoPE, and of v
                            const T* dout,     // (N,HD)
                            const T* q,        // (N,HD)
                            const T* keys,     // one layer's cache
                            const T* values,   // one layer's cache
                            const T* out,      // (N,HD) of attention
                            const acc<T>* lse, // (N,H) of attention
                            const Batch& b, int H, int K, int D,
                            acc<T>* delta) { // (N,H) scratch
    const int G = H / K;
    const size_t width = (size_t)(H + 2 * K) * D;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    std::vector<int> starts; // of sequences, and N
    for (int n = 0; n < b.N; n++)
        if (n == 0 || b.seq[n] != b.seq[n - 1]) starts.push_back(n);
    const int tasks = (int)starts.size() * K; // a sequence and KV head each; sums run over its tokens in order
    starts.push_back(b.N);
    #pragma omp parallel for schedule(dynamic) if (b.N > 4)
    for (int task = 0; task < tasks; task++) {
        const int n0 = starts[task / K], n1 = starts[task / K + 1], kv = task % K;
        const size_t all = (size_t)(n1 - n0) * D;
        auto key_gradient = [&](int n) { return dqkv + n * width + (size_t)(H + kv) * D; };
        auto value_gradient = [&](int n) { return key_gradient(n) + (size_t)K * D; };
        auto query_gradient = [&](int n) { return dqkv + n * width + (size_t)kv * G * D; };
        if (b.seq[n0] < 0) {
            for (int n = n0; n < n1; n++) {
                std::fill(query_gradient(n), query_gradient(n) + (size_t)G * D, T{});
                std::fill(key_gradient(n), key_gradient(n) + D, T{});
                std::fill(value_gradient(n), value_gradient(n) + D, T{});
            }
            continue;
        }
        static thread_local std::vector<acc<T>> scratch; // it grows to the longest sequence, and stays
        scratch.assign(4 * all + 3 * D, 0);
        acc<T> *k = scratch.data(), *v = k + all, *dk = v + all, *dv = dk + all; // (tokens, D) each
        acc<T> *query = dv + all, *dquery = query + D, *doutput = dquery + D;
        for (int n = n0; n < n1; n++) {
            const size_t at = kv_offset(b.slot[n] / PAGE, kv, b.slot[n] % PAGE, K, D);
            widen(k + (size_t)(n - n0) * D, keys + at, D);
            widen(v + (size_t)(n - n0) * D, values + at, D);
        }
        for (int n = n0; n < n1; n++)
            for (int g = 0; g < G; g++) {
                const size_t row = (size_t)n * H + kv * G + g;
                delta[row] = dot(dout + row * D, out + row * D, D);
                widen(doutput, dout + row * D, D);
                for (int i = 0; i < D; i++) query[i] = to_acc(q[row * D + i]) * scale, dquery[i] = 0;
                for (int m = 0; m <= n - n0; m++) {
                    const size_t at = (size_t)m * D;
                    const acc<T> p = std::exp(dot(query, k + at, D) - lse[row]), ds = p * (dot(doutput, v + at, D) - delta[row]);
                    for (int i = 0; i < D; i++) dv[at + i] += p * doutput[i];
                    for (int i = 0; i < D; i++) dk[at + i] += ds * query[i];
                    for (int i = 0; i < D; i++) dquery[i] += ds * k[at + i];
                }
                for (int i = 0; i < D; i++) query_gradient(n)[g * D + i] = to_stored<T>(dquery[i] * scale);
            }
        for (int n = n0; n < n1; n++)
            for (int i = 0; i < D; i++) {
                key_gradient(n)[i] = to_stored<T>(dk[(size_t)(n - n0) * D + i]);
                value_gradient(n)[i] = to_stored<T>(dv[(size_t)(n - n0) * D + i]);
            }
    }
}

#ifdef __CUDACC__
// FlashAttention-2's backward pass (Dao, 2023) without its atomics: the probabilities are computed twice, once where dk
// and dv of some keys are summed over all queries, once where dq of some queries is summed over all keys. So a number
// has one block that sums it, in one order. Seven products of a tile instead of five.
// The query rows of a KV head are counted through: row r is head r % G of token r / G. The keys that token n sees are
// the rows n - pos[n] .. n of the batch; tiles may lie across the borders of sequences, since that is all that a mask
// needs. Tiles in which a warp's keys and queries do not meet are skipped by it.
struct AttentionBackward {
    bf16* dqkv;
    const bf16 *dout, *q, *keys, *values;
    const float *lse, *delta;
    Batch b;
    int H, K;
};
constexpr int GRADIENT_KEYS = 64;  // that a block sums dk and dv of
constexpr int PASSING_ROWS = 64;   // query rows that pass by them at a time
constexpr int GRADIENT_ROWS = 128; // query rows that a block sums dq of
constexpr int PASSING_KEYS = 32;   // keys that pass by them at a time
// Shared memory of either block: keys, values, two tiles of q and two of dout, 64 rows each; or q and dout, 128 rows each,
// two tiles of keys and two of values, 32 rows each. And lse, delta and position of 128 rows. For D = 128, 97.5 KB.
constexpr size_t backward_shared(int D) { return (size_t)6 * 64 * D * sizeof(bf16) + 3 * 128 * 4; }

// r / G from `inverse` = 2^31 / G, rounded up: exact as long as r * G < 2^31.
__device__ inline int token_of(int r, uint32_t inverse) { return (int)__umulhi(2 * (uint32_t)r, inverse); }

// delta[n][h] = dout[n][h] . out[n][h]: D / 8 lanes a row.
template <int D>
__global__ void attention_delta_kernel(float* delta, const bf16* dout, const bf16* out, size_t rows) {
    let_next_start();
    wait_for_previous();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / (D / 8);
    float sum = 0;
    if (row < rows) {
        const uint4 a = *(const uint4*)(dout + i * 8), b = *(const uint4*)(out + i * 8);
        sum = low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y) +
              low(a.z) * low(b.z) + high(a.z) * high(b.z) + low(a.w) * low(b.w) + high(a.w) * high(b.w);
    }
    #pragma unroll
    for (int lane = D / 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (row < rows && i % (D / 8) == 0) delta[row] = sum;
}

// s += a b^T: each of 16 I rows of the warp's own with each of 16 J others, all of D numbers and in shared memory, where
// chunks lie as in attention_kernel. s[i][j] are rows 16 i .. of a with rows 8 j .. of b, spread over the warp as mma says.
template <int D, int I, int J>
__device__ inline void multiply_rows(float (&s)[I][2 * J][4], uint32_t a_rows, uint32_t b_rows) {
    constexpr int ROW = D * 2;
    const int lane = threadIdx.x % 32, a_row = lane % 16, b_row = lane % 8 + lane / 16 * 8;
    const uint32_t a_at = a_rows + a_row * ROW + ((lane / 16 ^ a_row % 8) << 4), b_at = b_rows + b_row * ROW + ((lane / 8 % 2 ^ b_row % 8) << 4);
    #pragma unroll
    for (int d = 0; d < D / 16; d++) {
        const uint32_t flip = d % 4 << 5, far = d / 4 << 7; // chunk 2d + c lies at (2d + c) ^ (r % 8) = ((c ^ r % 8) ^ 2 (d % 4)) + 8 (d / 4)
        uint32_t a[I][4], b[4];
        #pragma unroll
        for (int i = 0; i < I; i++) ldmatrix(a[i], (a_at ^ flip) + far + i * 16 * ROW);
        #pragma unroll
        for (int j = 0; j < J; j++) {
            ldmatrix(b, (b_at ^ flip) + far + j * 16 * ROW);
            #pragma unroll
            for (int i = 0; i < I; i++) {
                mma(s[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(s[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

// sum += w b, with weights w (16 I, 16 J) that lie as multiply_rows leaves them, and are rounded to bf16, and 16 J rows b.
template <int D, int I, int J>
__device__ inline void add_weighted_rows(float (&sum)[I][D / 8][4], const float (&w)[I][2 * J][4], uint32_t b_rows) {
    constexpr int ROW = D * 2;
    const int lane = threadIdx.x % 32, b_row = lane % 16;
    const uint32_t b_at = b_rows + b_row * ROW + ((lane / 16 ^ b_row % 8) << 4);
    #pragma unroll
    for (int k = 0; k < J; k++) {
        uint32_t a[I][4], b[4];
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) a[i][e] = pack(w[i][2 * k + e / 2][e % 2 * 2], w[i][2 * k + e / 2][e % 2 * 2 + 1]);
        #pragma unroll
        for (int j = 0; j < D / 16; j++) {
            ldmatrix_transposed(b, (b_at ^ (j % 4 << 5)) + (j / 4 << 7) + k * 16 * ROW);
            #pragma unroll
            for (int i = 0; i < I; i++) {
                mma(sum[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(sum[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

// A block owns 64 keys of a KV head, a warp 16 of them, with the sums of dk and dv in registers; all query rows that see
// one of the keys pass by, 64 at a time, of all G heads. Scores are computed as keys times queries, so that they lie as
// the weights of the two sums want them.
template <int D>
__device__ inline void key_value_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = D * 2, CHUNKS = D / 8, THREADS = 128, STEP = THREADS / CHUNKS, TILE = 64 * ROW;
    static_assert(GRADIENT_KEYS == 64 && PASSING_ROWS == 64, "one size of tile; 16 keys a warp");
    const uint32_t k_tile = shared_address(tiles), v_tile = k_tile + TILE, q_tiles = v_tile + TILE, o_tiles = q_tiles + 2 * TILE; // o: of dout
    float* numbers = (float*)((char*)tiles + 6 * TILE); // of two tiles of rows: 64 lse, 64 delta, 64 positions
    const Batch& b = p.b;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, G = p.H / p.K;
    const uint32_t inverse = (0x80000000u + G - 1) / G;
    const int m0 = tile * GRADIENT_KEYS, m1 = min(m0 + GRADIENT_KEYS, b.N);
    // The first token behind the sequence of the last key, or spare: every thread asks one, until no gap is left.
    int end = m0, behind = b.N;
    while (end < behind) {
        const int stride = (behind - end + THREADS - 1) / THREADS, n = end + threadIdx.x * stride;
        const int before = __syncthreads_count(n < behind && b.seq[n] >= 0 && n - b.pos[n] < m1);
        behind = min(behind, end + before * stride);
        if (before) end += (before - 1) * stride + 1;
    }
    const int copy_row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, rows = end * G, last_row = max(rows, 1) - 1;
    for (int r = copy_row; r < GRADIENT_KEYS; r += STEP) {
        const bool there = m0 + r < min(m1, end);
        const int slot = there ? b.slot[m0 + r] : 0, to = r * ROW + ((chunk ^ (r % 8)) << 4);
        const size_t at = kv_offset(slot / PAGE, kv, slot % PAGE, p.K, D) + chunk * 8;
        copy_async(k_tile + to, p.keys + at, there);
        copy_async(v_tile + to, p.values + at, there);
    }
    // Row r of q and dout, of lse and delta: n H + kv G + r % G = r + n (H - G) + kv G.
    auto place = [&](int r, int n) { return r + n * (p.H - G) + kv * G; };
    auto copy = [&](int half, int row0) {
        #pragma unroll
        for (int i = 0; i < PASSING_ROWS / STEP; i++) {
            const int r = copy_row + i * STEP, row = min(row0 + r, last_row), to = half * TILE + r * ROW + ((chunk ^ (r % 8)) << 4);
            const size_t at = (size_t)place(row, token_of(row, inverse)) * D + chunk * 8;
            copy_async(q_tiles + to, p.q + at, row0 + r < rows);
            copy_async(o_tiles + to, p.dout + at, row0 + r < rows);
        }
        const int r = threadIdx.x % PASSING_ROWS, row = min(row0 + r, last_row), n = token_of(row, inverse);
        const uint32_t to = shared_address(numbers + half * 3 * PASSING_ROWS + r);
        if (threadIdx.x < PASSING_ROWS) {
            copy_async_4(to, p.lse + place(row, n), row0 + r < rows);
            copy_async_4(to + 2 * PASSING_ROWS * 4, b.pos + n, row0 + r < rows);
        } else copy_async_4(to + PASSING_ROWS * 4, p.delta + place(row, n), row0 + r < rows);
        commit_copies();
    };
    const int first = m0 + warp * 16, last = first + 15; // this warp's keys
    const float scale = 1 / sqrtf((float)D), log2e = 1.44269504f;
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    copy(0, m0 * G);
    for (int row0 = m0 * G, half = 0; row0 < rows; row0 += PASSING_ROWS, half ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        copy(half ^ 1, row0 + PASSING_ROWS);
        const uint32_t q_tile = q_tiles + half * TILE, o_tile = o_tiles + half * TILE;
        const float *lse = numbers + half * 3 * PASSING_ROWS, *delta = lse + PASSING_ROWS;
        const int *pos = (const int*)(delta + PASSING_ROWS), end_row = min(PASSING_ROWS, rows - row0) - 1;
        const int oldest = token_of(row0, inverse), newest = token_of(row0 + end_row, inverse);
        if (first > newest || last < oldest - pos[0]) continue;
        const bool mask = last > oldest || first < newest - pos[end_row];
        float s[1][PASSING_ROWS / 8][4] = {}, ds[1][PASSING_ROWS / 8][4];
        multiply_rows<D, 1, PASSING_ROWS / 16>(s, k_tile + warp * 16 * ROW, q_tile);
        #pragma unroll
        for (int j = 0; j < PASSING_ROWS / 8; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = j * 8 + lane % 4 * 2 + e % 2;
                s[0][j][e] = exp2_fast(fmaf(s[0][j][e], scale * log2e, -lse[r] * log2e));
            }
        if (mask)
            #pragma unroll
            for (int j = 0; j < PASSING_ROWS / 8; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int r = j * 8 + lane % 4 * 2 + e % 2, n = token_of(row0 + r, inverse), m = first + lane / 4 + e / 2 * 8;
                    if ((uint32_t)(n - m) > (uint32_t)pos[r]) s[0][j][e] = 0;
                }
        add_weighted_rows<D, 1, PASSING_ROWS / 16>(dv, s, o_tile);
        #pragma unroll
        for (int j = 0; j < PASSING_ROWS / 8; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) ds[0][j][e] = -delta[j * 8 + lane % 4 * 2 + e % 2];
        multiply_rows<D, 1, PASSING_ROWS / 16>(ds, v_tile + warp * 16 * ROW, o_tile);
        #pragma unroll
        for (int j = 0; j < PASSING_ROWS / 8; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) ds[0][j][e] *= s[0][j][e];
        add_weighted_rows<D, 1, PASSING_ROWS / 16>(dk, ds, q_tile);
    }
    wait_for_copies<0>();
    #pragma unroll
    for (int h = 0; h < 2; h++) { // spare rows met no query: zeros
        const int m = first + lane / 4 + h * 8;
        if (m >= m1) continue;
        bf16* to = p.dqkv + ((size_t)m * (p.H + 2 * p.K) + p.H + kv) * D + lane % 4 * 2;
        #pragma unroll
        for (int j = 0; j < D / 8; j++) {
            *(uint32_t*)(to + j * 8) = pack(dk[0][j][2 * h] * scale, dk[0][j][2 * h + 1] * scale);
            *(uint32_t*)(to + p.K * D + j * 8) = pack(dv[0][j][2 * h], dv[0][j][2 * h + 1]);
        }
    }
}

// A block owns 128 query rows of a KV head, a warp 32 of them, with the sums of dq in registers; the keys they see pass
// by, 32 at a time.
template <int D>
__device__ inline void query_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = D * 2, CHUNKS = D / 8, THREADS = 128, STEP = THREADS / CHUNKS, TILE = PASSING_KEYS * ROW;
    static_assert(GRADIENT_ROWS == THREADS, "32 rows a warp; a thread asks for a row");
    const uint32_t q_tile = shared_address(tiles), o_tile = q_tile + GRADIENT_ROWS * ROW, k_tiles = o_tile + GRADIENT_ROWS * ROW, v_tiles = k_tiles + 2 * TILE;
    float *lse = (float*)((char*)tiles + (2 * GRADIENT_ROWS + 4 * PASSING_KEYS) * ROW), *delta = lse + GRADIENT_ROWS; // of each row
    int* pos = (int*)(delta + GRADIENT_ROWS);
    const Batch& b = p.b;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, G = p.H / p.K;
    const uint32_t inverse = (0x80000000u + G - 1) / G;
    const int row0 = tile * GRADIENT_ROWS, n0 = token_of(row0, inverse), n1 = token_of(min(row0 + GRADIENT_ROWS, b.N * G) - 1, inverse);
    const int n = n0 + threadIdx.x, end = n0 + __syncthreads_count(n <= n1 && b.seq[n] >= 0), rows = end * G; // behind them are spare ones
    auto place = [&](int r) { return r + token_of(r, inverse) * (p.H - G) + kv * G; }; // as above
    const int copy_row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    for (int r = copy_row; r < GRADIENT_ROWS; r += STEP) {
        const bool there = row0 + r < rows;
        const int to = r * ROW + ((chunk ^ (r % 8)) << 4);
        const size_t at = there ? (size_t)place(row0 + r) * D + chunk * 8 : 0;
        copy_async(q_tile + to, p.q + at, there);
        copy_async(o_tile + to, p.dout + at, there);
    }
    {
        const int t = threadIdx.x, r = row0 + t;
        lse[t] = r < rows ? p.lse[place(r)] : 0, delta[t] = r < rows ? p.delta[place(r)] : 0;
        pos[t] = r < rows ? b.pos[token_of(r, inverse)] : 0;
    }
    const float scale = 1 / sqrtf((float)D), log2e = 1.44269504f;
    // This warp's tokens, and where the sequences of the first and of the last of them begin.
    const int first_row = row0 + warp * 32, oldest = token_of(first_row, inverse), newest = token_of(min(first_row + 32, rows) - 1, inverse);
    const bool some = first_row < rows;
    const int oldest_first = some ? oldest - b.pos[oldest] : b.N, newest_first = some ? newest - b.pos[newest] : b.N;
    // The slots of a tile's keys are read a tile ahead of the copies that need them.
    const int key_begin = end > n0 ? n0 - b.pos[n0] : end;
    int slot[PASSING_KEYS / STEP];
    auto next_slots = [&](int key0) {
        #pragma unroll
        for (int i = 0; i < PASSING_KEYS / STEP; i++) {
            const int m = key0 + copy_row + i * STEP;
            slot[i] = m < end ? b.slot[m] : 0;
        }
    };
    auto copy = [&](int half, int key0) {
        #pragma unroll
        for (int i = 0; i < PASSING_KEYS / STEP; i++) {
            const int r = copy_row + i * STEP, to = half * TILE + r * ROW + ((chunk ^ (r % 8)) << 4);
            const size_t at = kv_offset(slot[i] / PAGE, kv, slot[i] % PAGE, p.K, D) + chunk * 8;
            copy_async(k_tiles + to, p.keys + at, key0 + r < end);
            copy_async(v_tiles + to, p.values + at, key0 + r < end);
        }
        commit_copies();
    };
    float dq[2][D / 8][4] = {};
    next_slots(key_begin);
    copy(0, key_begin);
    next_slots(key_begin + PASSING_KEYS);
    for (int key0 = key_begin, half = 0; key0 < end; key0 += PASSING_KEYS, half ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        copy(half ^ 1, key0 + PASSING_KEYS);
        next_slots(key0 + 2 * PASSING_KEYS);
        if (key0 > newest || key0 + PASSING_KEYS <= oldest_first) continue;
        const uint32_t k_tile = k_tiles + half * TILE, v_tile = v_tiles + half * TILE;
        float s[2][PASSING_KEYS / 8][4] = {}, ds[2][PASSING_KEYS / 8][4];
        multiply_rows<D, 2, PASSING_KEYS / 16>(s, q_tile + warp * 32 * ROW, k_tile);
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int j = 0; j < PASSING_KEYS / 8; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int r = warp * 32 + i * 16 + e / 2 * 8 + lane / 4;
                    s[i][j][e] = exp2_fast(fmaf(s[i][j][e], scale * log2e, -lse[r] * log2e));
                    ds[i][j][e] = -delta[r];
                }
        if (key0 + PASSING_KEYS > oldest + 1 || key0 < newest_first)
            #pragma unroll
            for (int i = 0; i < 2; i++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int r = warp * 32 + i * 16 + h * 8 + lane / 4, n = token_of(row0 + r, inverse);
                    #pragma unroll
                    for (int j = 0; j < PASSING_KEYS / 8; j++)
                        #pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int m = key0 + j * 8 + lane % 4 * 2 + e;
                            if ((uint32_t)(n - m) > (uint32_t)pos[r]) s[i][j][2 * h + e] = 0;
                        }
                }
        multiply_rows<D, 2, PASSING_KEYS / 16>(ds, o_tile + warp * 32 * ROW, v_tile);
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int j = 0; j < PASSING_KEYS / 8; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++) ds[i][j][e] *= s[i][j][e];
        add_weighted_rows<D, 2, PASSING_KEYS / 16>(dq, ds, k_tile);
    }
    wait_for_copies<0>();
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) { // spare rows are zeros: so were their q and dout
            const int r = first_row + i * 16 + h * 8 + lane / 4, t = token_of(r, inverse);
            if (t >= b.N) continue;
            bf16* to = p.dqkv + ((size_t)t * (p.H + 2 * p.K) + kv * G + r - t * G) * D + lane % 4 * 2;
            #pragma unroll
            for (int j = 0; j < D / 8; j++) *(uint32_t*)(to + j * 8) = pack(dq[i][j][2 * h] * scale, dq[i][j][2 * h + 1] * scale);
        }
}

// Both in one launch, so that neither waits for the other's last blocks: grid (K, tiles of keys + tiles of rows), 128
// threads. Early keys are seen by many queries, late queries see many keys: of one sequence, long blocks come first.
template <int D>
__global__ void __launch_bounds__(128, 2) attention_backward_kernel(AttentionBackward p, int key_tiles) {
    extern __shared__ __align__(128) uint4 tiles[];
    wait_for_previous();
    if ((int)blockIdx.y < key_tiles) key_value_gradients<D>(p, blockIdx.y, blockIdx.x, tiles);
    else query_gradients<D>(p, gridDim.y - 1 - blockIdx.y, blockIdx.x, tiles);
}
inline void attention_backward_gpu(Context& ctx, bf16* dqkv, const bf16* dout, const bf16* q, const bf16* keys, const bf16* values, const bf16* out,
                                   const float* lse, const Batch& b, int H, int K, int D, float* delta) {
    const int64_t rows = (int64_t)b.N * (H / K), key_tiles = (b.N + GRADIENT_KEYS - 1) / GRADIENT_KEYS, row_tiles = (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
    if (rows * H >= (int64_t)1 << 31 || key_tiles + row_tiles > 65535) DIE("attention_backward: a batch of %d tokens is too large for %d query heads", b.N, H);
    launch(ctx, D == 128 ? attention_delta_kernel<128> : attention_delta_kernel<64>, (unsigned)(((size_t)b.N * H * (D / 8) + 255) / 256), 256, 0,
           delta, dout, out, (size_t)b.N * H);
    launch(ctx, D == 128 ? attention_backward_kernel<128> : attention_backward_kernel<64>, dim3((unsigned)K, (unsigned)(key_tiles + row_tiles)), 128,
           backward_shared(D), AttentionBackward{dqkv, dout, q, keys, values, lse, delta, b, H, K}, (int)key_tiles);
}
#endif

// ---- q/k norm, RoPE: (a, b) = x r w in the plane (i, i + D/2) of a head, r = 1 / rms(x);
// out = (a cos - b sin, b cos + a sin)
// Back through the turn, which is the turn by the opposite angle, and then as rmsnorm.
template <class T>
void qknorm_rope_backward_cpu(T* dqkv,            // (N,(H+2K)D) in place, the heads of q and k
                              acc<T>* dq_weight,  // (D) +=, or null
                              acc<T>* dk_weight,  // (D) +=, or null
                              const T* qkv,       // (N,(H+2K)D) before norm and turn
                              const T* q_weight,  // (D)
                              const T* k_weight,  // (D)
                              const acc<T>* rope, // (positions, D/2, 2)
                              const Batch& b, int H, int K, int D, float eps) {
    const int heads = H + K;
    auto at = [&](int n, int h) { return ((size_t)n * (H + 2 * K) + h) * D; };
    // The gradient of (a, b) in plane i of head h.
    auto unturned = [&](int n, int h, int i, acc<T>& da, acc<T>& db) {
        const acc<T> *turn = rope + (size_t)b.pos[n] * D + 2 * i, u = to_acc(dqkv[at(n, h) + i]), v = to_acc(dqkv[at(n, h) + i + D / 2]);
        da = u * turn[0] + v * turn[1], db = v * turn[0] - u * turn[1];
    };
    if (dq_weight) {
        static thread_local std::vector<acc<T>> scratch; // r of each head: grows to the largest, and stays
        scratch.resize((size_t)b.N * heads);
        acc<T>* scale = scratch.data();
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int n = 0; n < b.N; n++)
            for (int h = 0; h < heads && b.seq[n] >= 0; h++) scale[n * heads + h] = inverse_rms(qkv + at(n, h), D, eps);
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int i = 0; i < D / 2; i++)
            for (int n = 0; n < b.N; n++)
                for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
                    acc<T> da, db, *dw = h < H ? dq_weight : dk_weight;
                    unturned(n, h, i, da, db);
                    dw[i] += da * to_acc(qkv[at(n, h) + i]) * scale[n * heads + h];
                    dw[i + D / 2] += db * to_acc(qkv[at(n, h) + i + D / 2]) * scale[n * heads + h];
                }
    }
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++)
        for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
            const T *x = qkv + at(n, h), *w = h < H ? q_weight : k_weight;
            T* dx = dqkv + at(n, h);
            const acc<T> r = inverse_rms(x, D, eps);
            acc<T> dy[MAX_HEAD], sum = 0;
            for (int i = 0; i < D / 2; i++) unturned(n, h, i, dy[i], dy[i + D / 2]);
            for (int i = 0; i < D; i++) sum += to_acc(x[i]) * to_acc(w[i]) * dy[i];
            const acc<T> mean = sum * r * r * r / D;
            for (int i = 0; i < D; i++) dx[i] = to_stored<T>(r * to_acc(w[i]) * dy[i] - to_acc(x[i]) * mean);
        }
}

#ifdef __CUDACC__
// A head in a warp, as WarpHead holds it: the gradient g of what the norm makes of x, and r and mean of rmsnorm's rule.
template <int D> struct WarpHeadBackward {
    static constexpr int P = D / 64;
    WarpHead<D> x, g;
    float wu[P], wv[P], r, mean;
    __device__ WarpHeadBackward(const bf16* head, const bf16* dhead, const bf16* w, const float* turn, float eps) {
        x.load(head), g.load(dhead);
        const int i = threadIdx.x % 32 * P;
        float squares = 0, mixed = 0;
        for (int p = 0; p < P; p++) {
            const float cosine = turn[2 * (i + p)], sine = turn[2 * (i + p) + 1], u = g.u[p], v = g.v[p];
            g.u[p] = u * cosine + v * sine, g.v[p] = v * cosine - u * sine;
            wu[p] = to_acc(w[i + p]), wv[p] = to_acc(w[i + p + D / 2]);
            squares += x.u[p] * x.u[p] + x.v[p] * x.v[p];
            mixed += x.u[p] * wu[p] * g.u[p] + x.v[p] * wv[p] * g.v[p];
        }
        r = 1 / sqrtf(warp_sum(squares) / D + eps);
        mean = warp_sum(mixed) * r * r * r / D;
    }
};
// A warp a head of a token.
template <int D>
__global__ void qknorm_rope_backward_kernel(bf16* dqkv, const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const float* rope, Batch b, int H, int K, float eps) {
    let_next_start();
    wait_for_previous();
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, n = task / (H + K), h = task % (H + K);
    if (n >= b.N || b.seq[n] < 0) return;
    const size_t at = ((size_t)n * (H + 2 * K) + h) * D;
    WarpHeadBackward<D> y(qkv + at, dqkv + at, h < H ? q_weight : k_weight, rope + (size_t)b.pos[n] * D, eps);
    for (int p = 0; p < y.P; p++) {
        y.g.u[p] = y.r * y.wu[p] * y.g.u[p] - y.x.u[p] * y.mean;
        y.g.v[p] = y.r * y.wv[p] * y.g.v[p] - y.x.v[p] * y.mean;
    }
    y.g.store(dqkv + at);
}
// The weights' gradients, before dqkv is overwritten: a warp takes every (all warps)th token, its sums stay in registers;
// the last block to arrive adds the blocks' in order.
constexpr int HEAD_BLOCKS = 256;
template <int D>
__global__ void __launch_bounds__(256) head_weight_kernel(float* dq_weight, float* dk_weight, const bf16* dqkv, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                                          const float* rope, Batch b, int H, int K, float eps, float* partial, int* arrived) {
    constexpr int P = D / 64;
    __shared__ float sums[8][2 * D];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 * P;
    float u[2][P] = {}, v[2][P] = {};
    for (int n = blockIdx.x * 8 + warp; n < b.N; n += gridDim.x * 8)
        for (int h = 0; h < H + K && b.seq[n] >= 0; h++) {
            const size_t at = ((size_t)n * (H + 2 * K) + h) * D;
            const WarpHeadBackward<D> y(qkv + at, dqkv + at, h < H ? q_weight : k_weight, rope + (size_t)b.pos[n] * D, eps);
            #pragma unroll
            for (int p = 0; p < P; p++) {
                const float du = y.g.u[p] * y.x.u[p] * y.r, dv = y.g.v[p] * y.x.v[p] * y.r;
                if (h < H) u[0][p] += du, v[0][p] += dv;
                else u[1][p] += du, v[1][p] += dv;
            }
        }
    for (int w = 0; w < 2; w++)
        for (int p = 0; p < P; p++) sums[warp][w * D + i + p] = u[w][p], sums[warp][w * D + i + p + D / 2] = v[w][p];
    __syncthreads();
    const int c = threadIdx.x;
    float sum = 0;
    if (c < 2 * D) {
        for (int w = 0; w < 8; w++) sum += sums[w][c];
        partial[blockIdx.x * 2 * D + c] = sum;
    }
    if (!last_to_arrive(arrived, gridDim.x) || c >= 2 * D) return;
    float* to = c < D ? dq_weight + c : dk_weight + c - D;
    sum = *to;
    for (int block = 0; block < (int)gridDim.x; block++) sum += __ldcg(partial + block * 2 * D + c);
    *to = sum;
}
inline void qknorm_rope_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                     const float* rope, const Batch& b, int H, int K, int D, float eps) {
    if (dq_weight)
        launch(ctx, D == 128 ? head_weight_kernel<128> : head_weight_kernel<64>, std::min(HEAD_BLOCKS, (b.N + 7) / 8), 256, 0, dq_weight, dk_weight, dqkv, qkv, q_weight, k_weight,
               rope, b, H, K, eps, ctx.partial, ctx.arrived);
    const int blocks = (int)(((int64_t)b.N * (H + K) + 7) / 8);
    launch(ctx, D == 128 ? qknorm_rope_backward_kernel<128> : qknorm_rope_backward_kernel<64>, blocks, 256, 0, dqkv, qkv, q_weight, k_weight, rope, b, H, K, eps);
}
#endif

// ---- embed: x[n] = W[token[n]]
// dW[token[n]] += dx[n]
template <class A>
void embed_backward_cpu(A* dW,       // (V,C) +=
                        const A* dx, // (N,C)
                        const Batch& b, int C) {
    #pragma omp parallel for schedule(static) if ((size_t)b.N * C > 2000)
    for (int part = 0; part < (C + LANES - 1) / LANES; part++)
        for (int n = 0; n < b.N; n++)
            for (int i = part * LANES; i < std::min(C, (part + 1) * LANES) && b.seq[n] >= 0; i++) dW[(size_t)b.token[n] * C + i] += dx[(size_t)n * C + i];
}

#ifdef __CUDACC__
// A block a token; the first one with its id adds up all that have it, in order.
__global__ void __launch_bounds__(128) embed_backward_kernel(float* dW, const float* dx, Batch b, int C) {
    __shared__ uint32_t found[4];
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x, id = b.token[n], warp = threadIdx.x / 32;
    bool before = b.seq[n] < 0;
    for (int m = threadIdx.x; m < n && !before; m += 128) before = b.token[m] == id && b.seq[m] >= 0;
    if (__syncthreads_or(before)) return;
    for (int first = n; first < b.N; first += 128) {
        const int m = first + threadIdx.x;
        const uint32_t same = __ballot_sync(~0u, m < b.N && b.token[m] == id && b.seq[m] >= 0);
        if (threadIdx.x % 32 == 0) found[warp] = same;
        __syncthreads();
        for (int w = 0; w < 4; w++)
            for (uint32_t left = found[w]; left; left &= left - 1) {
                const float* row = dx + (size_t)(first + w * 32 + __ffs(left) - 1) * C;
                for (int i = threadIdx.x; i < C; i += 128) dW[(size_t)id * C + i] += row[i];
            }
        __syncthreads();
    }
}
inline void embed_backward_gpu(Context& ctx, float* dW, const float* dx, const Batch& b, int C) {
    launch(ctx, embed_backward_kernel, b.N, 128, 0, dW, dx, b, C);
}
#endif

// ---- grad_norm: the length of all gradients as one vector, in double: the squares of each piece of NORM_PIECE numbers
// in order, then the pieces in order
inline constexpr size_t NORM_PIECE = 4096;
template <class A>
void grad_norm_cpu(double* norm,    // (1) out
                   double* partial, // (ceil(n / NORM_PIECE)) scratch
                   const A* g,      // (n)
                   size_t n) {
    const size_t pieces = (n + NORM_PIECE - 1) / NORM_PIECE;
    #pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces; p++) {
        double sum = 0;
        for (size_t i = p * NORM_PIECE; i < std::min(n, (p + 1) * NORM_PIECE); i++) sum += (double)g[i] * (double)g[i];
        partial[p] = sum;
    }
    *norm = std::sqrt(std::accumulate(partial, partial + pieces, 0.));
}

#ifdef __CUDACC__
// A block a piece.
__global__ void __launch_bounds__(256) grad_squares_kernel(double* partial, const float* g, size_t n) {
    let_next_start();
    wait_for_previous();
    const size_t first = blockIdx.x * NORM_PIECE + threadIdx.x, last = min(n, (blockIdx.x + 1) * NORM_PIECE);
    double sum = 0;
    for (size_t i = first; i < last; i += 256) sum += (double)g[i] * (double)g[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(1024) grad_norm_kernel(double* norm, const double* partial, size_t pieces) {
    let_next_start();
    wait_for_previous();
    double sum = 0;
    for (size_t p = threadIdx.x; p < pieces; p += 1024) sum += partial[p];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = sqrt(sum);
}
inline void grad_norm_gpu(Context& ctx, double* norm, double* partial, const float* g, size_t n) {
    const size_t pieces = (n + NORM_PIECE - 1) / NORM_PIECE;
    launch(ctx, grad_squares_kernel, (unsigned)pieces, 256, 0, partial, g, n);
    launch(ctx, grad_norm_kernel, 1, 1024, 0, norm, partial, pieces);
}
#endif

// ---- adamw (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019), in the order of PyTorch's steps; the
// gradients are scaled down to the length `clip` first, as clip_grad_norm_ does. If their length is not finite nothing
// changes: who reads it later finds the parameters as they were.
struct AdamW {
    float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0;
    float clip = 0;  // 0: off
    int64_t step = 0; // from 1
    float copy = 1;  // what the copy is scaled by: an adapter's s
};
template <class T>
void adamw_cpu(T* stored,          // (n) out: copy * p, which the products read
               acc<T>* p,          // (n) in place
               acc<T>* m,          // (n) in place
               acc<T>* v,          // (n) in place
               const acc<T>* g,    // (n)
               const double* norm, // (1) of all gradients
               size_t n, const AdamW& a) {
    using A = acc<T>;
    if (!std::isfinite(*norm)) return;
    const A scale = (A)(a.clip > 0 ? std::min(1., a.clip / (*norm + 1e-6)) : 1.);
    const A first = (A)(1 - std::pow((double)a.beta1, (double)a.step)), root = (A)std::sqrt(1 - std::pow((double)a.beta2, (double)a.step));
    const A keep = (A)(1 - (double)a.lr * a.decay), pace = (A)a.lr / first;
    #pragma omp parallel for schedule(static) if (n > 2000)
    for (size_t i = 0; i < n; i++) {
        const A gi = g[i] * scale;
        m[i] += (gi - m[i]) * (1 - (A)a.beta1);
        v[i] = v[i] * (A)a.beta2 + gi * gi * (1 - (A)a.beta2);
        p[i] = p[i] * keep - pace * (m[i] / (std::sqrt(v[i]) / root + (A)a.eps));
        stored[i] = to_stored<T>(p[i] * (A)a.copy);
    }
}

#ifdef __CUDACC__
struct AdamWStep { float beta1, beta2, root, keep, pace, eps, clip, copy; };
__global__ void adamw_kernel(bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n, AdamWStep a) {
    let_next_start();
    wait_for_previous();
    const double length = *norm;
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (!isfinite(length) || i >= n) return;
    const float gi = g[i] * (float)(a.clip > 0 ? fmin(1., a.clip / (length + 1e-6)) : 1.);
    const float mi = m[i] + (gi - m[i]) * (1 - a.beta1), vi = v[i] * a.beta2 + gi * gi * (1 - a.beta2);
    const float pi = p[i] * a.keep - a.pace * (mi / (sqrtf(vi) / a.root + a.eps));
    m[i] = mi, v[i] = vi, p[i] = pi;
    stored[i] = round_bf16(pi * a.copy);
}
inline void adamw_gpu(Context& ctx, bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n, const AdamW& a) {
    const float first = (float)(1 - std::pow((double)a.beta1, (double)a.step));
    const AdamWStep s = {a.beta1, a.beta2, (float)std::sqrt(1 - std::pow((double)a.beta2, (double)a.step)), (float)(1 - (double)a.lr * a.decay), a.lr / first, a.eps, a.clip, a.copy};
    launch(ctx, adamw_kernel, (unsigned)((n + 255) / 256), 256, 0, stored, p, m, v, g, norm, n, s);
}
#endif

// ================================================================================================= 8 Backward

// Gradients of what is trained; null is what is not.
template <class T> struct Gradients {
    struct OfLinear { acc<T> *W = nullptr, *A = nullptr, *B = nullptr; };
    struct OfLayer {
        acc<T> *norm1 = nullptr, *norm2 = nullptr, *q_norm = nullptr, *k_norm = nullptr;
        OfLinear qkv, o, gate_up, down;
    };
    std::vector<OfLayer> layer;
    acc<T> *embed = nullptr, *norm = nullptr, *head = nullptr; // head is embed when tied
};

// What the backward ops hand to each other, for up to N tokens: one set for all layers.
template <class T> struct Flow {
    acc<T>* x;       // (N,C) gradient of the residual stream
    T* y;            // (N,C) the same as T
    T* normed;       // (N,C)
    T* qkv;          // (N,(H+2K)D)
    T* attention;    // (N,HD)
    acc<T>* delta;   // (N,H) scratch of attention's
    T* gate_up;      // (N,2F)
    T* hidden;       // (N,F)
    T* h;            // (N, 3 rank) of a product's adapter
    acc<T>* logits;  // (head_rows,V), then their gradient
    acc<T>* parts;   // scratch of head_loss
    T* picked;       // (head_rows,C)
    int head_rows;   // rows that go through the head at once

    void plan(Arena& arena, const Config& c, int N, int rank, int rows) {
        x = arena.take<acc<T>>((size_t)N * c.C);
        y = arena.take<T>((size_t)N * c.C);
        normed = arena.take<T>((size_t)N * c.C);
        qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
        attention = arena.take<T>((size_t)N * c.H * c.D);
        delta = arena.take<acc<T>>((size_t)N * c.H);
        gate_up = arena.take<T>((size_t)N * 2 * c.F);
        hidden = arena.take<T>((size_t)N * c.F);
        h = arena.take<T>((size_t)N * 3 * rank);
        head_rows = rows;
        logits = arena.take<acc<T>>((size_t)rows * c.V);
        parts = arena.take<acc<T>>((size_t)rows * ((c.V + 63) / 64) * 2);
        picked = arena.take<T>((size_t)rows * c.C);
    }
};

// After `forward`: the losses of R named rows, the only ones that go through the head; with `g` also d.normed and the
// head's gradient, of `scale` times their sum. Logits become their gradients in place, head_rows at a time.
template <class T>
void loss_backward(Context& ctx, const Config& c, const Weights<T>& w, const Activations<T>& a, Flow<T>& d, const Gradients<T>* g,
                   acc<T>* loss,      // (R) out
                   const int* rows,   // (R), none twice
                   const int* target, // (R)
                   acc<T> scale, int N, int R) {
    const size_t ld = (size_t)c.V * sizeof(acc<T>) / sizeof(T);
    T* dlogits = g ? (T*)d.logits : nullptr;
    if (g) clear(ctx, d.normed, (size_t)N * c.C);
    for (int r = 0; r < R && !(ctx.stop && *ctx.stop); r += d.head_rows) {
        const int n = std::min(d.head_rows, R - r);
        RUN(head_loss, loss + r, dlogits, d.logits, d.picked, d.parts, a.normed, rows + r, target + r, scale, w.head, n);
        if (!g) continue;
        if (g->head) RUN(linear_backward_weight, g->head, dlogits, ld, d.picked, n, c.V, c.C);
        RUN(head_backward, d.normed, dlogits, ld, rows + r, w.head, n);
    }
}

// From d.normed to the gradient of every parameter: `forward` from its last line to its first. The batch holds whole
// sequences.
template <class T>
void backward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, Flow<T>& d, const Gradients<T>& g,
              KVCache<T>& kv, const acc<T>* rope) {
    const int N = b.N, C = c.C, H = c.H, K = c.K, D = c.D;
    auto through = [&](T* dx, const T* dy, const Linear<T>& W) { RUN(linear_backward_input, dx, d.h, dy, W, N); };
    auto weights = [&](const typename Gradients<T>::OfLinear& to, const T* dy, const T* x, const Linear<T>& W) { // after `through`
        if (to.W) RUN(linear_backward_weight, to.W, dy, (size_t)W.out(), x, N, W.out(), W.in);
        if (W.adapter.rank) RUN(lora_backward_weight, to.A, to.B, d.h, dy, x, W, N);
    };
    T* const none = nullptr;
    clear(ctx, d.x, (size_t)N * C);
    RUN(rmsnorm_backward, d.x, d.y, none, g.norm, d.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
    for (int l = c.L - 1; l >= 0 && !(ctx.stop && *ctx.stop); l--) {
        const Layer<T>& y = w.layers[l];
        auto& s = a.layer[l];
        const auto& to = g.layer[l];
        T *keys = kv.keys + l * kv.layer_size, *values = kv.values + l * kv.layer_size;
        if (a.recompute) layer_forward(ctx, c, y, b, s, keys, values, rope);
        // out = mid + hidden down^T, hidden = swiglu(gate_up), gate_up = norm2(mid) W^T
        through(d.hidden, d.y, y.down);
        RUN(swiglu_backward, d.gate_up, s.hidden, d.hidden, s.gate_up, N, c.F);
        weights(to.down, d.y, s.hidden, y.down);
        through(d.normed, d.gate_up, y.gate_up);
        RUN(rmsnorm_backward, d.x, d.y, s.norm2, to.norm2, d.normed, s.mid, y.norm2, N, C, c.eps);
        weights(to.gate_up, d.gate_up, s.norm2, y.gate_up);
        // mid = in + attention o^T, attention = attend(qkv), qkv = norm1(in) W^T
        through(d.attention, d.y, y.o);
        weights(to.o, d.y, s.attention, y.o);
        RUN(qknorm_rope_kv, s.q, keys, values, s.qkv, y.q_norm, y.k_norm, rope, b, H, K, D, c.eps);
        RUN(attention_backward, d.qkv, d.attention, s.q, keys, values, s.attention, s.lse, b, H, K, D, d.delta);
        RUN(qknorm_rope_backward, d.qkv, to.q_norm, to.k_norm, s.qkv, y.q_norm, y.k_norm, rope, b, H, K, D, c.eps);
        through(d.normed, d.qkv, y.qkv);
        RUN(rmsnorm_backward, d.x, d.y, s.norm1, to.norm1, d.normed, s.in, y.norm1, N, C, c.eps);
        weights(to.qkv, d.qkv, s.norm1, y.qkv);
    }
    if (g.embed) RUN(embed_backward, g.embed, d.x, b, C);
}

// ==================================================================================================== 9 main
// ---- What every program's main asks: numbers, the tokenizer, the device
inline double parse_number(const char* option, const char* text, double low, double high) {
    char* end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || *end || errno || !(v >= low && v <= high) || isspace((unsigned char)*text))
        DIE("%s: %.60s is not a number from %g to %g", option, text, low, high);
    return v;
}
inline int64_t parse_integer(const char* option, const char* text, int64_t low, int64_t high) {
    char* end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || v < low || v > high || isspace((unsigned char)*text))
        DIE("%s: %.60s is not a whole number from %lld to %lld", option, text, (long long)low, (long long)high);
    return v;
}

// tokenizer.bin: as said, or beside the model, beside the program, in the working folder. "" if there is none.
inline std::string find_tokenizer(const std::string& named, const std::string& model) {
    if (!named.empty()) return named;
    std::vector<std::string> folders;
    struct stat st;
    if (!model.empty()) {
        bool folder = stat(model.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
        size_t slash = model.find_last_of('/');
        folders.push_back(folder ? model : slash == std::string::npos ? "." : model.substr(0, slash + 1));
    }
    char program[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program);
    if (n > 0) folders.push_back(std::string(program, (size_t)n).substr(0, std::string(program, (size_t)n).find_last_of('/')));
    folders.push_back(".");
    for (auto& f : folders)
        if (access((f + "/tokenizer.bin").c_str(), F_OK) == 0) return f + "/tokenizer.bin";
    return "";
}

// Calls f(number, text, value) for each line of a JSONL file that is not blank.
template <class F> void each_json_line(const MappedFile& file, F f) {
    const std::string_view text = file.text();
    for (size_t at = 0, line = 1; at < text.size(); line++) {
        const std::string_view s = text.substr(at, text.find('\n', at) - at);
        at += s.size() + 1;
        if (s.find_first_not_of(" \t\r") == std::string::npos) continue;
        sj::Doc doc;
        const std::string fault = sj::parse(doc, s);
        if (!fault.empty()) // it begins with "line 1, ", since each line is a text by itself
            DIE("%s: line %zu, %s", file.path.c_str(), line, fault.c_str() + fault.find("byte"));
        f(line, s, doc.root());
    }
}

// What the computation runs on, for people.
inline std::string device_name(const Context& ctx) {
#ifdef __CUDACC__
    cudaDeviceProp properties;
    if (ctx.gpu && cudaGetDeviceProperties(&properties, 0) == cudaSuccess) return properties.name;
#endif
    return (void)ctx, format("cpu, %d threads", thread_count());
}

// Compute in float? As the checkpoint is stored, unless --dtype says otherwise. The GPU computes in bf16.
inline bool wide(const std::string& device, const std::string& dtype, const ModelFile& file) {
    return dtype == "f32" || (dtype != "bf16" && device != "cuda" && file.is_float32());
}

// The GPU, if it was asked for or is there and can do what is asked; else the CPU.
inline Context choose_device(const std::string& device, const std::string& dtype, [[maybe_unused]] bool invariant, [[maybe_unused]] const ModelFile& file) {
    if (!device.empty() && device != "cpu" && device != "cuda") DIE("--device %s: cpu or cuda", device.c_str());
    const bool wanted = device == "cuda";
    if (wanted && dtype == "f32") DIE("--dtype f32: the GPU computes in bf16 (--device cpu)");
#ifdef __CUDACC__
    if (device == "cpu") return {};
    try {
        if (!wanted && wide(device, dtype, file)) return {};
        check_gpu(file.path, file.config, dtype == "int8" || file.is_int8());
        Context ctx = open_gpu();
        ctx.invariant = invariant;
        return ctx;
    } catch (const Error&) {
        if (wanted) throw;
    }
#else
    if (wanted) DIE("--device cuda: this program was built without nvcc");
#endif
    return {};
}

#ifndef QWEN3_NO_MAIN

static volatile sig_atomic_t interrupted = 0;

struct Options {
    std::string model, input, system, tokenizer, device, dtype, ids, logits_file, tokenize, detokenize;
    bool has_input = false, has_tokenize = false, has_detokenize = false, has_ids = false;
    Context ctx; // where it runs
    bool raw = false, json = false, logits_hash = false, help = false;
    float temperature = -1, top_p = -1, min_p = 0; // negative: Qwen's advice for the mode
    float repeat = 1, presence = 0, frequency = 0;
    std::vector<std::string> stops;
    int top_k = -1, max_tokens = -1, context = 0, think = 0, threads = 0;
    uint64_t seed = 0;
    bool has_seed = false, bench = false, bench_long = false, invariant = false;
    std::string synthesize, synthesize_to;
    std::string prompt_cache, adapter;
    uint64_t variant = 0; // names what is made of the model's file at load: INT8, an adapter
    std::string ppl, eval, output;
    int stride = 0; // 0: half a window
};

static const char* USAGE =
    "usage: qwen3 MODEL [-i TEXT] [options]      MODEL: a model.bin or a Hugging Face folder\n"
    "  -i, --input TEXT      the question; - reads it from standard input. Without -i: a chat (/help in it)\n"
    "  -y, --system TEXT     system prompt\n"
    "  -r, --think 0|1       let the model think first (default 0)\n"
    "  -t, --temp X          temperature (default 0.7, thinking 0.6); 0 takes the likeliest token\n"
    "  -k, --top-k N         draw among the N likeliest (default 20); 0 is off\n"
    "  -p, --top-p X         ... that together have probability X (default 0.8, thinking 0.95); 1 is off\n"
    "      --min-p X         ... and at least X times that of the likeliest (default 0)\n"
    "      --repeat-penalty X, --presence-penalty X, --frequency-penalty X   (default 1, 0, 0: off)\n"
    "      --stop TEXT       ends the answer before this text; may be repeated\n"
    "  -s, --seed N          seed of the draws (default random, printed)\n"
    "  -n, --max-tokens N    tokens of the answer (default: to the end of the context)\n"
    "  -c, --ctx N           context in tokens (default 4096, or the model's limit if that is less)\n"
    "  -z, --tokenizer FILE  default: tokenizer.bin beside the model, beside the program, or in this folder\n"
    "  -d, --device NAME     cpu or cuda (default: cuda where there is a GPU for it)\n"
    "      --dtype NAME      compute in f32 or bf16 (default: as stored), or int8: weights of 8.5 bits, made at load\n"
    "  -j, --threads N       CPU threads (default: all)\n"
    "      --adapter DIR     a LoRA adapter in PEFT's format, as train_lora writes it, beside the weights\n"
    "      --prompt-cache FILE   restores what the prompt shares with FILE's; writes FILE if it does not exist\n"
    "                        or is the beginning of this prompt\n"
    "      --invariant       on a GPU: a row's bits do not depend on its batch (slower; the CPU is always so)\n"
    "      --raw             the input as it is, without the chat template; special tokens are recognised\n"
    "      --json            one JSON object instead of streamed text\n"
    "      --bench [long]    speed of prompt and decoding, with the machine's ceilings; --json\n"
    "how good is it:\n"
    "      --ppl FILE        perplexity of a text (- reads standard input), over windows of -c tokens (default 2048)\n"
    "      --stride N        from one window to the next (default half a window)\n"
    "      --eval FILE -o OUT   JSONL of questions and answers: what the model answers, and its loss on the answers\n"
    "                        there. Greedy; -n 512. Interrupted, it goes on where it was\n"
    "for study and tests:\n"
    "      --cpu NAME        lesser instructions: plain, avx2, avx512, avx512bf16, amx\n"
    "      --tokenize TEXT, --detokenize IDS       no model needed; - reads standard input\n"
    "      --ids 1,2,3       these ids instead of text (no tokenizer needed)\n"
    "      --logits FILE     with --ids or --raw or -i: float32 logits of every position, then stop\n"
    "      --logits-hash     the same, as one 64-bit hash on stdout\n"
    "      --synthesize 0.6B|1.7B|4B|8B|14B|32B|CONFIG.json OUT.bin   random weights of that shape (-s: seed)\n";

static std::string roads_here() {
    std::string list;
    for (int road = CPU_AVX2; road <= best_cpu_road(); road++) list += format(", %s", cpu_road_name(road));
    return list;
}

static Options parse_options(int argc, char** argv) {
    Options o;
    std::vector<const char*> plain;
    bool only_plain = false;
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        if (only_plain || a.size() < 2 || a[0] != '-') { plain.push_back(argv[i]); continue; }
        if (a == "--") { only_plain = true; continue; }
        std::string name = a;
        const char* attached = nullptr; // --name=value
        if (size_t eq = a.find('='); a[1] == '-' && eq != std::string::npos) name = a.substr(0, eq), attached = argv[i] + eq + 1;
        auto is = [&](const char* s, const char* l) { return name == s || name == l; };
        auto value = [&]() -> const char* {
            if (attached) { const char* v = attached; attached = nullptr; return v; }
            if (i + 1 == argc) DIE("%s needs a value", name.c_str());
            return argv[++i];
        };
        auto integer = [&](int64_t low, int64_t high) { return (int)parse_integer(name.c_str(), value(), low, high); };
        auto number = [&](double low, double high) { return (float)parse_number(name.c_str(), value(), low, high); };
        if (is("-i", "--input")) o.input = value(), o.has_input = true;
        else if (is("-y", "--system")) o.system = value();
        else if (is("-t", "--temp")) o.temperature = number(0, 100);
        else if (is("-k", "--top-k")) o.top_k = integer(0, INT_MAX);
        else if (is("-p", "--top-p")) o.top_p = number(0, 1);
        else if (is("", "--min-p")) o.min_p = number(0, 1);
        else if (is("", "--repeat-penalty")) o.repeat = number(0.01, 100);
        else if (is("", "--presence-penalty")) o.presence = number(-100, 100);
        else if (is("", "--frequency-penalty")) o.frequency = number(-100, 100);
        else if (is("", "--stop")) {
            o.stops.push_back(value());
            if (o.stops.back().empty()) DIE("--stop needs some text");
        }
        else if (is("-s", "--seed")) {
            const char* text = value();
            char* end;
            errno = 0;
            o.seed = strtoull(text, &end, 10), o.has_seed = true;
            if (!isdigit((unsigned char)*text) || *end || errno) DIE("%s: %.60s is not a whole number from 0 to 2^64 - 1", name.c_str(), text);
        }
        else if (is("-n", "--max-tokens")) o.max_tokens = integer(0, INT_MAX);
        else if (is("-c", "--ctx")) o.context = integer(1, INT_MAX);
        else if (is("-r", "--think")) o.think = integer(0, 1);
        else if (is("-z", "--tokenizer")) o.tokenizer = value();
        else if (is("-d", "--device")) o.device = value();
        else if (is("", "--dtype")) {
            o.dtype = value();
            if (o.dtype != "f32" && o.dtype != "bf16" && o.dtype != "int8") DIE("--dtype %.40s: f32, bf16 or int8", o.dtype.c_str());
        }
        else if (is("-j", "--threads")) o.threads = integer(1, 4096);
        else if (is("", "--invariant")) o.invariant = true;
        else if (is("", "--raw")) o.raw = true;
        else if (is("", "--json")) o.json = true;
        else if (is("", "--ids")) o.ids = value(), o.has_ids = true;
        else if (is("", "--logits")) o.logits_file = value();
        else if (is("", "--logits-hash")) o.logits_hash = true;
        else if (is("", "--tokenize")) o.tokenize = value(), o.has_tokenize = true;
        else if (is("", "--detokenize")) o.detokenize = value(), o.has_detokenize = true;
        else if (is("", "--adapter")) o.adapter = value();
        else if (is("", "--prompt-cache")) o.prompt_cache = value();
        else if (is("", "--bench")) {
            o.bench = true;
            if (i + 1 < argc && !strcmp(argv[i + 1], "long")) o.bench_long = true, i++;
        }
        else if (is("", "--cpu")) {
            const char* name = value();
            int road = CPU_PLAIN;
            while (road <= best_cpu_road() && strcmp(name, cpu_road_name(road))) road++;
            if (road > best_cpu_road()) DIE("--cpu %s: this machine has plain%s", name, roads_here().c_str());
            cpu_road = (CpuRoad)road;
        }
        else if (is("", "--ppl")) o.ppl = value();
        else if (is("", "--stride")) o.stride = integer(1, INT_MAX);
        else if (is("", "--eval")) o.eval = value();
        else if (is("-o", "--output")) o.output = value();
        else if (is("", "--synthesize")) o.synthesize = value(), o.synthesize_to = value();
        else if (is("-h", "--help")) o.help = true;
        else DIE("unknown option %s (--help lists them)", name.c_str());
        if (attached) DIE("%s takes no value", name.c_str());
    }
    if (plain.size() > 1) DIE("one model, please: %s and %s", plain[0], plain[1]);
    if (plain.size() == 1) o.model = plain[0];
    return o;
}

static std::string read_stdin() {
    std::string text;
    char buffer[65536];
    for (ssize_t n; (n = read(0, buffer, sizeof buffer)) != 0;) {
        if (n < 0 && errno == EINTR && !interrupted) continue;
        if (n < 0) DIE("standard input: %s", strerror(errno));
        text.append(buffer, (size_t)n);
    }
    return text;
}

// Ids separated by commas or white space.
static std::vector<int> parse_ids(const char* option, const std::string& text) {
    std::vector<int> ids;
    for (size_t i = 0; i < text.size();) {
        size_t j = text.find_first_of(", \t\r\n", i);
        if (j == std::string::npos) j = text.size();
        if (j > i) ids.push_back((int)parse_integer(option, text.substr(i, j - i).c_str(), 0, INT_MAX));
        i = j + 1;
    }
    return ids;
}

static void write_stdout(std::string_view text) {
    if (fwrite(text.data(), 1, text.size(), stdout) != text.size() || fflush(stdout) != 0) DIE("standard output: %s", strerror(errno));
}

static std::unique_ptr<Tokenizer> load_tokenizer(const Options& o) {
    std::string path = find_tokenizer(o.tokenizer, o.model);
    if (path.empty()) DIE("no tokenizer.bin beside the model, beside the program or in this folder (-z FILE names one)");
    return std::make_unique<Tokenizer>(path);
}

// The ids of the prompt, as the options give it.
static std::vector<int> prompt_ids(const Options& o, const Tokenizer* tokenizer) {
    if (o.has_ids) return parse_ids("--ids", o.ids == "-" ? read_stdin() : o.ids);
    std::string text = o.input;
    if (text == "-") {
        text = read_stdin();
        if (!text.empty() && text.back() == '\n') text.pop_back(); // what `echo` adds is no part of the question
    }
    if (o.raw) return tokenizer->encode(text, true);
    std::vector<Message> messages;
    if (!o.system.empty()) messages.push_back({"system", o.system});
    messages.push_back({"user", text});
    ChatOptions options;
    options.thinking = o.think;
    return render_chat(*tokenizer, messages, options);
}

// --logits, --logits-hash: every position's logits as float32, V a row.
template <class T> void write_logits(const Options& o, Session<T>& session, const std::vector<int>& prompt) {
    std::unique_ptr<OutputFile> out;
    if (!o.logits_file.empty()) out = std::make_unique<OutputFile>(o.logits_file);
    uint64_t hash = fnv1a(nullptr, 0);
    const size_t bytes = (size_t)session.config.V * sizeof(float);
    session.feed(prompt, &interrupted, [&](const float* row) {
        if (out) out->write(row, bytes);
        if (o.logits_hash) hash = fnv1a(row, bytes, hash);
    });
    if (interrupted) DIE("interrupted");
    if (out) out->commit();
    if (o.logits_hash) write_stdout(format("%016llx\n", (unsigned long long)hash));
}

static Sampling sampling_of(const Options& o) {
    Sampling how; // Qwen's advice without thinking
    if (o.think) how.temperature = 0.6f, how.top_p = 0.95f;
    if (o.temperature >= 0) how.temperature = o.temperature;
    if (o.top_p >= 0) how.top_p = o.top_p;
    if (o.top_k >= 0) how.top_k = o.top_k;
    how.min_p = o.min_p;
    how.repeat = o.repeat, how.presence = o.presence, how.frequency = o.frequency;
    how.seed = o.has_seed ? o.seed : (uint64_t)std::random_device()() << 32 | std::random_device()();
    return how;
}

template <class T> void to_device([[maybe_unused]] const Options& o, [[maybe_unused]] const ModelFile& file, [[maybe_unused]] Weights<T>& weights) {
#ifdef __CUDACC__
    if constexpr (HAS_KERNELS<T>)
        if (o.ctx.gpu) {
            Context ctx = o.ctx;
            weights.upload(ctx, file);
        }
#endif
}

#include "cli.h"

// One prompt, one answer; or a chat.
template <class T> int answer(Options& o, const ModelFile& file, double start) {
    const Config& c = file.config;
    Weights<T> weights(file, o.dtype == "int8");
    to_device(o, file, weights);
    o.variant = o.dtype == "int8";
    std::unique_ptr<AttachedAdapter<T>> adapter;
    if (!o.adapter.empty()) {
        const AdapterFile from(o.adapter, c);
        o.variant = fnv1a(from.map.data, from.map.size, fnv1a(&from.config.alpha, sizeof from.config.alpha, o.variant + from.config.rslora));
        adapter = std::make_unique<AttachedAdapter<T>>(o.ctx, weights, from, o.ctx.gpu ? Session<T>::GPU_CHUNK : Session<T>::CHUNK);
    }
    std::unique_ptr<Tokenizer> tokenizer;
    if (!o.has_ids || !find_tokenizer(o.tokenizer, o.model).empty()) {
        tokenizer = load_tokenizer(o);
        // Rows are padded up (151,669 ids, 151,936 rows); a tokenizer of another model is not a little off.
        if (tokenizer->size() > c.V || c.V - tokenizer->size() >= 1024) {
            if (!o.has_ids || !o.tokenizer.empty())
                DIE("%s: %d ids, but the vocabulary of %s has %d rows: not its tokenizer", find_tokenizer(o.tokenizer, o.model).c_str(), tokenizer->size(), o.model.c_str(), c.V);
            tokenizer.reset(); // found by chance, and not needed
        }
    }
    if (o.context > c.max_positions) DIE("--ctx %d: the model's limit is %d", o.context, c.max_positions);
    if (!o.ppl.empty()) return perplexity(o, c, weights, *tokenizer);
    if (!o.eval.empty()) return evaluate(o, file, weights, *tokenizer);

    const bool chat = !o.has_input && !o.has_ids;
    std::vector<int> prompt;
    if (!chat) {
        prompt = prompt_ids(o, tokenizer.get());
        if (prompt.empty()) DIE("the prompt is empty");
        for (int id : prompt)
            if (id >= c.V) DIE("id %d is not in the vocabulary of %d", id, c.V);
    }

    const int context = o.context ? o.context : std::min(4096, c.max_positions);
    if (prompt.size() > (size_t)context) DIE("the prompt is %zu tokens, the context %d (-c sets it, up to %d)", prompt.size(), context, c.max_positions);
    Session<T> session(c, weights, context, o.ctx);
    if (!o.logits_file.empty() || o.logits_hash) return write_logits(o, session, prompt), 0;

    Generation g;
    g.sampling = sampling_of(o);
    g.stops = o.stops;
    g.interrupt = &interrupted;
    if (o.max_tokens >= 0) g.max_tokens = (size_t)o.max_tokens;

    fprintf(stderr, "%s: %.1f M parameters, %s, %s, context %d, seed %llu\n", o.model.c_str(), (double)c.parameters() / 1e6,
            weights.type_name(), device_name(o.ctx).c_str(), context, (unsigned long long)g.sampling.seed);
    PromptCache<T> cache(o.prompt_cache, file, o.variant, session);
    if (chat) return Chat<T>{o, session, *tokenizer, cache, g}.run();
    const double loaded = seconds();
    double prompted = loaded;
    size_t reused = 0; // tokens of the prompt that came from the prompt cache
    if (g.max_tokens > 0 || !o.prompt_cache.empty()) {
        reused = feed_prompt(session, prompt);
        prompted = seconds();
        if (!interrupted) cache.save(session);
        Screen screen(isatty(1));
        generate(session, tokenizer.get(), g, [&](std::string_view s) { if (!o.json) screen.show(s); });
        screen.end();
    } else {
        g.finish = "length";
    }
    const double done = seconds(), prompt_s = prompted - loaded, decode_s = done - prompted;
    // The first token comes from the prompt's logits: the decode phase makes the others.
    const double rate = g.ids.size() > 1 ? (double)(g.ids.size() - 1) / decode_s : 0;
    const double prompt_rate = prompt_s > 0 ? (double)(prompt.size() - reused) / prompt_s : 0;
    if (o.json) {
        std::string out = "{\"text\": ";
        sj::quote(out, g.text);
        out += ", \"ids\": [";
        for (size_t i = 0; i < g.ids.size(); i++) out += format("%s%d", i ? ", " : "", g.ids[i]);
        out += format("], \"finish_reason\": \"%s\", \"seed\": %llu, \"prompt_tokens\": %zu, \"answer_tokens\": %zu, "
                      "\"timings\": {\"load_s\": %.6f, \"prompt_s\": %.6f, \"prompt_tokens_per_s\": %.3f, \"decode_s\": %.6f, \"decode_tokens_per_s\": %.3f}}\n",
                      g.finish, (unsigned long long)g.sampling.seed, prompt.size(), g.ids.size(), loaded - start, prompt_s,
                      prompt_rate, decode_s, rate);
        write_stdout(out);
    } else {
        write_stdout("\n");
    }
    const std::string from_cache = o.prompt_cache.empty() ? "" : format(" (%zu from the prompt cache)", reused);
    fprintf(stderr, "prompt %zu tokens%s, %.1f tok/s; answer %zu tokens, %.1f tok/s (%s)\n", prompt.size(), from_cache.c_str(),
            prompt_rate, g.ids.size(), rate, g.finish);
    return interrupted ? 130 : 0;
}

static int run(int argc, char** argv) {
    const double start = seconds();
    Options o = parse_options(argc, argv);
    if (o.help) return write_stdout(USAGE), 0;
#ifdef _OPENMP
    if (o.threads) omp_set_num_threads(o.threads);
#endif
    if (o.has_tokenize) {
        std::string line;
        for (int id : load_tokenizer(o)->encode(o.tokenize == "-" ? read_stdin() : o.tokenize, true)) line += format(line.empty() ? "%d" : " %d", id);
        return write_stdout(line + "\n"), 0;
    }
    if (o.has_detokenize) {
        std::vector<int> ids = parse_ids("--detokenize", o.detokenize == "-" ? read_stdin() : o.detokenize);
        return write_stdout(load_tokenizer(o)->decode(ids, false)), 0;
    }
    if (!o.synthesize.empty()) return synthesize(o.synthesize, o.synthesize_to, o.seed), 0;
    if (o.model.empty()) DIE("no model named (--help lists the options)");
    const bool measures = !o.ppl.empty() || !o.eval.empty() || o.bench;
    if ((o.has_input || o.has_ids) + !o.ppl.empty() + !o.eval.empty() + o.bench > 1) DIE("one thing at a time: -i or --ids, --ppl, --eval, --bench");
    if (o.eval.empty() != o.output.empty()) DIE(o.output.empty() ? "--eval needs -o FILE, where the answers go" : "-o is for --eval");
    if (o.stride && o.ppl.empty()) DIE("--stride is for --ppl");
    if (!o.has_input && !o.has_ids && (o.raw || (o.json && !measures) || o.logits_hash || !o.logits_file.empty()))
        DIE("nothing asked: -i TEXT gives a question (without it there is a chat, which has no --raw, --json or --logits)");
    ModelFile file(o.model);
    o.ctx = choose_device(o.device, o.dtype, o.invariant, file);
    if (o.bench && !o.adapter.empty()) DIE("--adapter changes no figure of --bench");
    if (o.bench) return wide(o.device, o.dtype, file) ? bench<float>(o, file) : bench<bf16>(o, file), 0;
    return wide(o.device, o.dtype, file) ? answer<float>(o, file, start) : answer<bf16>(o, file, start);
}

int main(int argc, char** argv) {
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    action.sa_flags = (int)SA_RESETHAND; // a second Ctrl-C ends the program
    sigaction(SIGINT, &action, nullptr);
    signal(SIGPIPE, SIG_IGN);
    return run_program("qwen3", run, argc, argv);
}
#endif // QWEN3_NO_MAIN
