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
     inputs, then sizes. RUN(op, ...) is the one place that will choose between it and its CUDA kernel.
   - A ragged batch is the only batch: N tokens of B sequences, packed (see Batch).
   - The bits of a row never depend on the other rows of the batch, nor on the number of threads: each sum is
     taken in one fixed order. (For that the Makefile turns the compiler's own choice between a * b + c in one or
     two roundings off: -ffp-contract=off.)
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
   5 Forward           activations, KV cache, the model
   6 Sampler, session  penalties, sampling, stop strings, generate
   9 main
   (Section 4 is for adapters, 7 and 8 for the backward pass; the numbers are shared/DESIGN.md's.)
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

// The upper half of a float: 8 bits of exponent, 7 of fraction.
struct bf16 {
    uint16_t bits;
};

inline float to_acc(bf16 x) {
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

// Where and how ops run. CPU only for now: RUN is the one place that will choose.
struct Context {
    bool gpu = false;
    const volatile sig_atomic_t* stop = nullptr; // forward gives up between layers when this becomes non-zero
};
#define RUN(op, ...) ((void)ctx, op##_cpu(__VA_ARGS__))

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
inline float exp_exact(float x) {
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
inline Philox philox(uint64_t seed, uint64_t counter, uint64_t stream) {
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
enum RandomStream : uint64_t { STREAM_SAMPLE = 1, STREAM_SYNTHESIZE = 2 };

// ---- Memory and time

// An arena is planned by running the same code twice: first without memory, to count; then to hand out.
struct Arena {
    uint8_t* base = nullptr;
    size_t used = 0, size = 0;

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { if (base) munmap(base, size); }

    // n numbers, 64-byte aligned, zero.
    template <class T> T* take(size_t n) {
        size_t at = used, bytes;
        if (__builtin_mul_overflow(n, sizeof(T), &bytes) || bytes > SIZE_MAX / 2 - used) DIE("the memory plan overflows");
        used = (used + bytes + 63) / 64 * 64;
        return base ? (T*)(base + at) : nullptr;
    }
    // After counting: takes the memory and starts over. The system gives pages when they are first touched.
    void allocate(const char* what);
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
    size_t have = available_memory();
    void* at = MAP_FAILED;
    if (used <= have) at = mmap(nullptr, used, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) DIE("%s needs %zu bytes of memory and %zu are available", what, used, have);
    madvise(at, used, MADV_HUGEPAGE); // fewer TLB misses; a wish, not a need
    base = (uint8_t*)at, size = used, used = 0;
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

    // The checkpoint's own type: what the embedding is stored in. F16 is read as bf16.
    bool is_float32() const {
        auto t = tensors.find("model.embed_tokens.weight");
        return t != tensors.end() && t->second.dtype == Dtype::F32;
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

// A product's weights: y = x W^T, W of (out, in) in up to three blocks of rows that are separate tensors in
// the file (q, k, v; gate, up). Stored as T, or as INT8: then w is null.
template <class T> struct Linear {
    const T* w[3] = {};
    const int8_t* q[3] = {};
    const bf16* scale[3] = {};
    int rows[3] = {};
    int in = 0;
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
        auto text = [](const std::vector<int64_t>& dims) {
            std::string s;
            for (int64_t d : dims) s += format("%s%lld", s.empty() ? "" : ",", (long long)d);
            return s;
        };
        if (t.shape != shape)
            DIE("%s: tensor %s is (%s), the config needs (%s)", t.file.c_str(), name.c_str(), text(t.shape).c_str(), text(shape).c_str());
        return t;
    }

    // New numbers, if there is memory for them.
    template <class U> U* own(std::vector<std::unique_ptr<U[]>>& list, size_t n, const Tensor& t, const std::string& name) {
        const size_t have = available_memory();
        if (n * sizeof(U) > have) DIE("%s: converting tensor %s needs %zu bytes of memory and %zu are available", t.file.c_str(), name.c_str(), n * sizeof(U), have);
        list.emplace_back(new U[n]);
        return list.back().get();
    }

    static float number(const Tensor& t, size_t i) {
        float f;
        uint16_t h;
        if (t.dtype == Dtype::F32) return memcpy(&f, t.data + 4 * i, 4), f;
        memcpy(&h, t.data + 2 * i, 2);
        return t.dtype == Dtype::F16 ? half_to_float(h) : to_acc(bf16{h});
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

// ===================================================================================================== 3 Ops
// In the order the model runs them.

// N packed tokens of B sequences. The rows of a sequence are neighbours and in order of position. Sequences of
// one row come first (decode), longer pieces (prompts, training) follow. Spare rows have seq = -1: ops that look
// at tokens skip them, the others compute rows that nobody reads.
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
};

// One layer's keys or values: (pages, K, 16, D).
inline size_t kv_offset(int page, int head, int within, int K, int D) {
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

// out = x W^T
template <class T>
void linear_cpu(T* out,     // (N, W.out) out
                const T* x, // (N, W.in)
                const Linear<T>& W, int N) {
    const size_t ld = W.out();
    product_cpu(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}

// out = residual + x W^T; out may be residual.
template <class T>
void linear_add_cpu(acc<T>* out,            // (N, W.out) out
                    const acc<T>* residual, // (N, W.out)
                    const T* x,             // (N, W.in)
                    const Linear<T>& W, int N) {
    const size_t ld = W.out();
    product_cpu(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

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

// ================================================================================================= 5 Forward

// What ops hand to each other, for up to N tokens. Inference reuses one set for all layers; training will give
// each layer its own.
template <class T> struct Activations {
    struct PerLayer {
        acc<T>* in;    // (N,C) residual stream at the layer's entry
        T* norm1;      // (N,C)
        T* qkv;        // (N,(H+2K)D)
        T* q;          // (N,HD)
        T* attention;  // (N,HD)
        acc<T>* mid;   // (N,C) residual stream between attention and MLP
        T* norm2;      // (N,C)
        T* gate_up;    // (N,2F)
        T* hidden;     // (N,F)
        acc<T>* out;   // (N,C) residual stream at its exit
    };
    std::vector<PerLayer> layer;
    T* normed; // (N,C) after the final norm

    void plan(Arena& arena, const Config& c, int N) {
        PerLayer a;
        a.in = a.mid = a.out = arena.take<acc<T>>((size_t)N * c.C);
        a.norm1 = a.norm2 = normed = arena.take<T>((size_t)N * c.C);
        a.qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
        a.q = arena.take<T>((size_t)N * c.H * c.D);
        a.attention = arena.take<T>((size_t)N * c.H * c.D);
        a.gate_up = arena.take<T>((size_t)N * 2 * c.F);
        a.hidden = arena.take<T>((size_t)N * c.F);
        layer.assign(c.L, a);
    }
};

// Keys and values of all layers, (L, pages, K, 16, D) each.
template <class T> struct KVCache {
    T *keys, *values;
    size_t layer_size; // numbers in a layer

    static size_t bytes(const Config& c, size_t pages) { return 2 * (size_t)c.L * pages * c.K * PAGE * c.D * sizeof(T); }
    void plan(Arena& arena, const Config& c, size_t pages) {
        layer_size = pages * c.K * PAGE * c.D;
        keys = arena.take<T>(c.L * layer_size);
        values = arena.take<T>(c.L * layer_size);
    }
};

// Tokens to vectors, up to the final norm: a.normed (N,C). The keys and values of the batch go to the cache.
template <class T>
void forward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, KVCache<T>& kv, const acc<T>* rope) {
    const int N = b.N, C = c.C, H = c.H, K = c.K, D = c.D;
    RUN(embed, a.layer[0].in, w.embed, b, C);
    for (int l = 0; l < c.L && !(ctx.stop && *ctx.stop); l++) {
        const Layer<T>& y = w.layers[l];
        auto& s = a.layer[l];
        T *keys = kv.keys + l * kv.layer_size, *values = kv.values + l * kv.layer_size;
        RUN(rmsnorm, s.norm1, s.in, y.norm1, N, C, c.eps);
        RUN(linear, s.qkv, s.norm1, y.qkv, N);
        RUN(qknorm_rope_kv, s.q, keys, values, s.qkv, y.q_norm, y.k_norm, rope, b, H, K, D, c.eps);
        RUN(attention, s.attention, s.q, keys, values, b, H, K, D);
        RUN(linear_add, s.mid, s.in, s.attention, y.o, N);
        RUN(rmsnorm, s.norm2, s.mid, y.norm2, N, C, c.eps);
        RUN(linear_swiglu, s.hidden, s.gate_up, s.norm2, y.gate_up, N);
        RUN(linear_add, s.out, s.mid, s.hidden, y.down, N);
    }
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

// One conversation: a model, its KV cache, and the ids in it.
template <class T> struct Session {
    static constexpr int CHUNK = 512; // tokens of a prompt that go through `forward` at once
    static constexpr int ROWS = 16;   // of them that share one reading of the head, where all their logits are wanted

    Context ctx;
    const Config& config;
    const Weights<T>& weights;
    int capacity;             // tokens
    std::vector<int> ids;     // what the cache holds
    acc<T>* logits;           // (V) after the last id; meaningless before the first

    // Plans all memory for `context` tokens. Throws Error if it is more than there is.
    Session(const Config& c, const Weights<T>& w, int context) : config(c), weights(w), capacity(context) {
        plan();
        arena.allocate(format("a context of %d tokens", context).c_str());
        plan();
        fill_rope(rope, context, c.D, c.rope_theta);
        for (int p = 0; p < pages; p++) table[p] = p;
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
            const int N = (int)std::min(tokens.size() - done, (size_t)CHUNK);
            for (int n = 0; n < N; n++) {
                token[n] = tokens[done + n];
                pos[n] = (int)ids.size() + n;
                seq[n] = 0;
                slot[n] = pos[n]; // the identity table: page p holds positions 16 p ..
            }
            Batch batch = {N, 1, token, pos, seq, slot, table, pages};
            ctx.stop = stop;
            forward(ctx, config, weights, batch, activations, cache, rope);
            if (stop && *stop) return;
            ids.insert(ids.end(), token, token + N);
            done += N;
            const bool last = done == tokens.size();
            for (int n = rows ? 0 : last ? N - 1 : N, R; n < N; n += R) {
                R = std::min(N - n, ROWS);
                int named[ROWS];
                for (int r = 0; r < R; r++) named[r] = n + r;
                RUN(head, row_logits, picked, activations.normed, named, weights.head, R);
                for (int r = 0; r < R; r++) {
                    logits = row_logits + (size_t)r * config.V;
                    if (rows) rows(logits);
                }
            }
        }
    }

    // The first n tokens in the KV cache: block_bytes(n) from the start of each of 2 L blocks, in whole pages of
    // a layer's keys, then of its values. With `ids` this is all there is to save and restore.
    size_t block_bytes(size_t n) const { return (n + PAGE - 1) / PAGE * config.K * PAGE * config.D * sizeof(T); }
    template <class F> void each_block(F f) {
        T* const both[] = {cache.keys, cache.values}; // (nvcc cannot walk a braced list here)
        for (T* all : both)
            for (int l = 0; l < config.L; l++) f(all + l * cache.layer_size);
    }

    // Forgets all but the first n ids.
    void rewind(size_t n) { if (n < ids.size()) ids.resize(n); }

  private:
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    T* picked;
    acc<T> *rope, *row_logits;
    int pages, *token, *pos, *seq, *slot, *table;

    void plan() {
        const int N = std::min(CHUNK, capacity);
        pages = capacity / PAGE + (capacity % PAGE != 0);
        cache.plan(arena, config, pages);
        activations.plan(arena, config, N);
        rope = arena.take<acc<T>>((size_t)capacity * config.D);
        logits = row_logits = arena.take<acc<T>>((size_t)std::min(N, ROWS) * config.V);
        picked = arena.take<T>((size_t)std::min(N, ROWS) * config.C);
        for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>(N);
        table = arena.take<int>(pages);
    }
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
    while (g.ids.size() < g.max_tokens) {
        if (g.interrupt && *g.interrupt) { g.finish = "interrupt"; break; }
        penalize(session.logits, g.sampling, session.ids, answer);
        int id = sample(session.logits, exist, g.sampling, session.ids.size());
        if (std::find(c.end_tokens.begin(), c.end_tokens.end(), id) != c.end_tokens.end()) { g.finish = "stop"; break; }
        g.ids.push_back(id);
        if (!tokenizer) emit(format(g.ids.size() > 1 ? " %d" : "%d", id));
        else if (!tokenizer->is_special(id)) emit(characters.feed(tokenizer->bytes(id)));
        if (filter.stopped) { g.finish = "stop"; break; }
        if (session.full()) break;
        if (g.ids.size() < g.max_tokens) session.feed({id});
    }
    emit(characters.flush());
    std::string rest = filter.flush();
    g.text += rest;
    if (!rest.empty()) show(rest);
}

// ==================================================================================================== 9 main
#ifndef QWEN3_NO_MAIN

static volatile sig_atomic_t interrupted = 0;

struct Options {
    std::string model, input, system, tokenizer, device, dtype, ids, logits_file, tokenize, detokenize;
    bool has_input = false, has_tokenize = false, has_detokenize = false, has_ids = false;
    bool raw = false, json = false, logits_hash = false, help = false;
    float temperature = -1, top_p = -1, min_p = 0; // negative: Qwen's advice for the mode
    float repeat = 1, presence = 0, frequency = 0;
    std::vector<std::string> stops;
    int top_k = -1, max_tokens = -1, context = 0, think = 0, threads = 0;
    uint64_t seed = 0;
    bool has_seed = false, bench = false, bench_long = false;
    std::string synthesize, synthesize_to;
    std::string prompt_cache;
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
    "  -d, --device NAME     cpu, the only one so far\n"
    "      --dtype NAME      compute in f32 or bf16 (default: as stored), or int8: weights of 8.5 bits, made at load\n"
    "  -j, --threads N       CPU threads (default: all)\n"
    "      --prompt-cache FILE   restores what the prompt shares with FILE's; writes FILE if it does not exist\n"
    "                        or is the beginning of this prompt\n"
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

static double parse_number(const char* option, const char* text, double low, double high) {
    char* end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || *end || errno || !(v >= low && v <= high) || isspace((unsigned char)*text))
        DIE("%s: %.60s is not a number from %g to %g", option, text, low, high);
    return v;
}
static int64_t parse_integer(const char* option, const char* text, int64_t low, int64_t high) {
    char* end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || v < low || v > high || isspace((unsigned char)*text))
        DIE("%s: %.60s is not a whole number from %lld to %lld", option, text, (long long)low, (long long)high);
    return v;
}

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
        else if (is("", "--raw")) o.raw = true;
        else if (is("", "--json")) o.json = true;
        else if (is("", "--ids")) o.ids = value(), o.has_ids = true;
        else if (is("", "--logits")) o.logits_file = value();
        else if (is("", "--logits-hash")) o.logits_hash = true;
        else if (is("", "--tokenize")) o.tokenize = value(), o.has_tokenize = true;
        else if (is("", "--detokenize")) o.detokenize = value(), o.has_detokenize = true;
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

// tokenizer.bin: as said, or beside the model, beside the program, in the working folder. "" if there is none.
static std::string find_tokenizer(const Options& o) {
    if (!o.tokenizer.empty()) return o.tokenizer;
    std::vector<std::string> folders;
    struct stat st;
    if (!o.model.empty()) {
        bool folder = stat(o.model.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
        size_t slash = o.model.find_last_of('/');
        folders.push_back(folder ? o.model : slash == std::string::npos ? "." : o.model.substr(0, slash + 1));
    }
    char program[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program);
    if (n > 0) folders.push_back(std::string(program, (size_t)n).substr(0, std::string(program, (size_t)n).find_last_of('/')));
    folders.push_back(".");
    for (auto& f : folders)
        if (access((f + "/tokenizer.bin").c_str(), F_OK) == 0) return f + "/tokenizer.bin";
    return "";
}

static std::unique_ptr<Tokenizer> load_tokenizer(const Options& o) {
    std::string path = find_tokenizer(o);
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

#include "cli.h"

// One prompt, one answer; or a chat.
template <class T> int answer(const Options& o, const ModelFile& file, double start) {
    const Config& c = file.config;
    Weights<T> weights(file, o.dtype == "int8");
    std::unique_ptr<Tokenizer> tokenizer;
    if (!o.has_ids || !find_tokenizer(o).empty()) {
        tokenizer = load_tokenizer(o);
        // Rows are padded up (151,669 ids, 151,936 rows); a tokenizer of another model is not a little off.
        if (tokenizer->size() > c.V || c.V - tokenizer->size() >= 1024) {
            if (!o.has_ids || !o.tokenizer.empty())
                DIE("%s: %d ids, but the vocabulary of %s has %d rows: not its tokenizer", find_tokenizer(o).c_str(), tokenizer->size(), o.model.c_str(), c.V);
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
    Session<T> session(c, weights, context);
    if (!o.logits_file.empty() || o.logits_hash) return write_logits(o, session, prompt), 0;

    Generation g;
    g.sampling = sampling_of(o);
    g.stops = o.stops;
    g.interrupt = &interrupted;
    if (o.max_tokens >= 0) g.max_tokens = (size_t)o.max_tokens;

    fprintf(stderr, "%s: %.1f M parameters, %s, cpu, %d threads, context %d, seed %llu\n", o.model.c_str(), (double)c.parameters() / 1e6,
            weights.type_name(), thread_count(), context, (unsigned long long)g.sampling.seed);
    PromptCache<T> cache(o.prompt_cache, file, o.dtype == "int8", session);
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

// Compute in float? As the checkpoint is stored, unless --dtype says otherwise.
static bool wide(const Options& o, const ModelFile& file) { return o.dtype == "f32" || (o.dtype != "bf16" && file.is_float32()); }

static int run(int argc, char** argv) {
    const double start = seconds();
    Options o = parse_options(argc, argv);
    if (o.help) return write_stdout(USAGE), 0;
#ifdef _OPENMP
    if (o.threads) omp_set_num_threads(o.threads);
#endif
    if (o.device == "cuda") DIE("--device cuda: there are no CUDA kernels yet");
    if (!o.device.empty() && o.device != "cpu") DIE("--device %s: only cpu so far", o.device.c_str());
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
    if (o.bench) return wide(o, file) ? bench<float>(o, file) : bench<bf16>(o, file), 0;
    return wide(o, file) ? answer<float>(o, file, start) : answer<bf16>(o, file, start);
}

int main(int argc, char** argv) {
    // Standard descriptors that are closed stay taken, so that no file we write becomes one of them.
    for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;)
        if (fd > 2) { close(fd); break; }
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    action.sa_flags = (int)SA_RESETHAND; // a second Ctrl-C ends the program
    sigaction(SIGINT, &action, nullptr);
    signal(SIGPIPE, SIG_IGN);
    try {
        return run(argc, argv);
    } catch (const std::bad_alloc&) {
        fprintf(stderr, "qwen3: out of memory\n");
    } catch (const std::exception& e) {
        std::string line = e.what(); // names out of files may hold anything: it stays one line, and no escapes
        for (char& ch : line)
            if ((unsigned char)ch < 0x20 || ch == 0x7f) ch = ' ';
        fprintf(stderr, "qwen3: %s\n", line.c_str());
    }
    return 1;
}
#endif // QWEN3_NO_MAIN
