/* qwen3.cu: the Qwen3 language model, as a text to study.

   Book I    the model in plain C++: every op is its formula and a loop, forwards and backwards. Slow and right.
   Book II   the same on a GPU, for nvcc: a kernel an op. Each is tested against its definition in Book I. It goes on in
             attention.h and draws.h; the backward pass, which only train_lora needs, is in backward.h.

   Build:  make                 with nvcc where it is found, else with g++ alone (this file is also plain C++17)
   Run:    ./qwen3 model.bin -i "What is a warp?"            (-d plain runs Book I itself, on the CPU)

   What happens to a prompt: text becomes token ids (tokenizer.h); `forward` turns the ids into one vector for each
   token; the head turns the vector of the last token into one score (logit) for each id of the vocabulary; the sampler
   draws an id; that id is fed back. The keys and values of all past tokens stay in the KV cache, so that each step
   computes one token only.

   Notation    N tokens   C channels (hidden size)   H query heads   K key/value heads   D head size
               F feed-forward size   V vocabulary rows   L layers   B sequences   G = H / K
               (N,C) is a row-major array of N rows of C numbers. A product y = W x has W of (out, in).
   Types       T is what is stored: bf16, float or double. acc<T> is what sums are kept in: float (double for double).
               The residual stream is acc<T>; everything else between ops is T.

   Contracts
   - An op is defined once, in Book I. Outputs come first, then inputs, then sizes. Ops that take time exist once more
     for speed: `op_cpu` in cpu.h for the vector and matrix instructions of CPUs, `op_gpu` in Book II. RUN(op, ...) is
     the one place that chooses between them.
   - A ragged batch is the only batch: N tokens of B sequences, packed (see Batch).
   - A sum has one fixed order. On a CPU the bits of a row depend neither on the other rows of the batch nor on the
     number of threads; so the compiler may not choose whether a * b + c is rounded once or twice: -ffp-contract=off. On
     a GPU the same batch gives the same bits; with `invariant` a row's bits do not depend on its batch there either.
   - What a user can get wrong is thrown as Error: one line that names the file and the fault.
   - Memory is planned once (Arena). On a GPU `forward` and `backward` allocate nothing; on a CPU some ops keep scratch,
     which grows to the largest batch and stays.

   Easy to get wrong: RoPE rotates the halves (i, i + D/2), not neighbours; q and k are RMS-normalised head by head
   *before* RoPE; D is not C / H; a tied head is the embedding; there are several end tokens; ids from the tokenizer's
   count up to V have rows but do not exist, and must not be drawn.

   Contents
   Book I     1 Numbers    2 The model's data    3 Forward ops    4 forward    5 Sampler, session, generate
              6 Backward ops, AdamW    7 backward
   Book II    8 Toolbox    9 Small kernels    10 Products;     and main
*/
#include "file.h"
#include "lookup.h"
#include "sj.h"
#include "tokenizer.h"
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <csignal>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#ifdef __CUDACC__
#include <cuda.h> // CUtensorMap
#define BOTH __host__ __device__ // for the CPU and the GPU alike
#else
#define BOTH
#endif

// ###################################################### Book I #######################################################

// ========================================================================================================== 1 Numbers

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

template <class T> struct Acc { using type = T; };
template <> struct Acc<bf16> { using type = float; };
template <class T> using acc = typename Acc<T>::type;

template <class T> inline T to_stored(acc<T> x) {
    if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
    else return x;
}

// e^x for the sampler, every step one fmaf: the bits are the same on every machine and on a GPU. Relative error under
// 3e-7; 0 below -87; x <= 88. e^x = 2^k e^r with k = round(x / ln 2), |r| <= ln 2 / 2, and e^r by its Taylor series.
BOTH inline float exp_exact(float x) {
    const float shifted = fmaf(x, 1.44269504f, 12582912.f), k = shifted - 12582912.f; // 1.5 * 2^23: adding it rounds
    const float r = fmaf(k, -1.42860677e-6f, fmaf(k, -0.693145752f, x)); // ln 2 in two parts, the first with few bits
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
    bits += shift << 23; // k is in the low bits of `shifted`
    memcpy(&p, &bits, 4);
    return x < -87.f ? 0.f : p;
}

// ---- Random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
// A pure function of (counter, key): any draw can be made anywhere, in any order, on CPU or GPU.
struct Philox {
    uint32_t v[4];
};
struct PhiloxKeys { // of each round
    uint32_t k[10][2];
    BOTH explicit PhiloxKeys(uint64_t seed) {
        for (uint32_t i = 0; i < 10; i++)
            k[i][0] = (uint32_t)seed + i * 0x9E3779B9, k[i][1] = (uint32_t)(seed >> 32) + i * 0xBB67AE85;
    }
};
BOTH inline Philox philox(const PhiloxKeys& keys, uint64_t counter, uint64_t stream) {
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
    for (auto& k : keys.k) {
        uint64_t a = (uint64_t)0xD2511F53 * c[0], b = (uint64_t)0xCD9E8D57 * c[2];
        uint32_t x = (uint32_t)(b >> 32) ^ c[1] ^ k[0], y = (uint32_t)(a >> 32) ^ c[3] ^ k[1];
        c[0] = x, c[1] = (uint32_t)b, c[2] = y, c[3] = (uint32_t)a;
    }
    return {{c[0], c[1], c[2], c[3]}};
}
BOTH inline Philox philox(uint64_t seed, uint64_t counter, uint64_t stream) {
    return philox(PhiloxKeys(seed), counter, stream);
}
// Streams keep the draws of different purposes apart.
enum RandomStream : uint64_t {
    STREAM_SAMPLE = 1, STREAM_SYNTHESIZE = 2, STREAM_DROPOUT = 3, STREAM_INIT = 4, STREAM_SHUFFLE = 5,
    STREAM_ROLLOUT = 6
};

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
BOTH inline uint32_t dropout_mask(const Dropout& d, const PhiloxKeys& keys, // of d.seed
                                  uint32_t token, uint32_t module, uint32_t k8) {
    const uint64_t counter = (uint64_t)token << 32 | module << 16 | k8;
    const Philox r = philox(keys, counter, STREAM_DROPOUT | (uint64_t)d.step << 8);
    const uint32_t limit = (uint32_t)(d.p * 65536 + 0.5f);
    uint32_t kept = 0;
    for (int i = 0; i < 8; i++) kept |= (uint32_t)((r.v[i / 2] >> i % 2 * 16 & 0xffff) >= limit) << i;
    return kept;
}
BOTH inline uint32_t dropout_mask(const Dropout& d, uint32_t token, uint32_t module, uint32_t k8) {
    return dropout_mask(d, PhiloxKeys(d.seed), token, module, k8);
}

// What dropout keeps of a Linear's x, for each of its adapter's modules: of 64 neighbours two words, bit i % 32 of word
// i / 32 is number i; tokens lie side by side. lora_down makes them, once; the backward pass reads them.
struct DropoutMasks {
    uint32_t* words; // (modules, in / 64 rounded up, N, 2)
    int sixty_fours, N;
    BOTH static size_t size(int modules, int in, size_t N) { return modules * (((size_t)in + 63) / 64) * N * 2; }
    BOTH uint32_t* at(int module, int i64, int n) const {
        return words + (((size_t)module * sixty_fours + i64) * N + n) * 2;
    }
};

// ================================================================================================ 2 The model's data

struct Gpu; // Book II: a GPU's stream, properties and scratch

// Where and how ops run.
struct Context {
    std::shared_ptr<Gpu> gpu;                    // null: on the CPU
    bool plain = false;                          // by the definitions of this book
    bool invariant = false;                      // on a GPU: a row's bits do not depend on its batch (slower)
    bool kv_fp8 = false;                         // a session's cache is FP8
    bool fp8_activations = false;                // on a GPU: of prompts, for FP8 weights: see round_activations
    // On a GPU, drawn tokens by step.h's kernel: WHERE_FASTER as StepRoad::find says.
    enum OneKernel { OFF, WHERE_FASTER, TOGETHER, BY_PHASE } one_kernel = OFF;
    const volatile sig_atomic_t* stop = nullptr; // forward and backward give up between layers when this is not zero
};

// RUN(op, ...): the op, by the fastest code that the context allows. For templates on T that have `ctx`. (It is `ctx`
// by which the compiler finds op_cpu and op_gpu, which stand further down: argument-dependent lookup.)
#ifdef QWEN3_PLAIN // Book I alone
template <class T> constexpr bool HAS_CPU = false;
#else
template <class T> constexpr bool HAS_CPU = true;
#endif
template <class T> constexpr bool HAS_GPU = WITH_GPU && std::is_same_v<T, bf16>;
#define RUN(op, ...) do { \
        if constexpr (HAS_GPU<T>) if (ctx.gpu) { op##_gpu(ctx, __VA_ARGS__); break; } \
        if constexpr (HAS_CPU<T>) if (!ctx.plain) { op##_cpu(ctx, __VA_ARGS__); break; } \
        op(__VA_ARGS__); \
    } while (0)

// ---- Memory comes from an Arena (file.h), which is planned once; what a GPU needs for it is in Book II.
inline void gpu_copy(Context& ctx, void* to, const void* from, size_t bytes, bool to_host);
inline void gpu_clear(Context& ctx, void* p, size_t bytes);
template <class U> std::shared_ptr<U[]> gpu_host_memory(size_t n); // the CPU's, which the GPU reaches at full speed

// n numbers, to and from where the context computes, and zeros there.
template <class U> void copy_in(Context& ctx, U* to, const U* from, size_t n) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_copy(ctx, to, from, n * sizeof(U), false);
    memcpy((void*)to, from, n * sizeof(U));
}
template <class U> void copy_out(Context& ctx, U* to, const U* from, size_t n) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_copy(ctx, to, from, n * sizeof(U), true);
    memcpy((void*)to, from, n * sizeof(U));
}
template <class U> void clear(Context& ctx, U* p, size_t n) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_clear(ctx, p, n * sizeof(U));
    memset((void*)p, 0, n * sizeof(U));
}

// ---- Shapes and weights. checkpoint.h reads them from files.
struct Config {
    int C, L, H, K, D, F, V, max_positions;
    float eps;
    double rope_theta;
    bool tied;
    std::vector<int> end_tokens; // any of them ends an answer
};
constexpr int MAX_HEAD = 512; // D; checkpoint.h refuses more

// LoRA (Hu et al., "LoRA: low-rank adaptation of large language models", 2021) of up to three blocks of a product, m in
// all: y += s B (A drop(x)). The A of module j are rows j * rank .. of `A`; its B has its block's rows and the columns
// j * rank .. of `B`, all else there being zero.
template <class T> struct Adapter {
    int rank = 0;                     // 0: no adapter
    int true_rank = 0;                // the file's; rows of A, columns of B past it are zero, and stay so in training
    int modules = 0;                  // m
    int block[3] = {};                // (m) of the Linear
    int module[3] = {};               // (m) layer * 7 + (q, k, v, o, gate, up, down = 0..6): names the dropout mask
    float s = 1;                      // alpha / rank; rslora: alpha / sqrt(rank)
    T* A = nullptr;                   // (m * rank, in)
    T* B = nullptr;                   // (out, m * rank): s B
    T* h = nullptr;                   // (N, m * rank) A drop(x), which backward reads again
    uint32_t* kept = nullptr;         // on a GPU: what drop(x) keeps, for backward too; see DropoutMasks
    const Dropout* dropout = nullptr; // training only
    size_t width() const { return (size_t)modules * rank; }
};

// The weights of a product y = W x, in up to three blocks of rows that are separate tensors in the file (q, k, v; gate,
// up). They are stored as T or in a smaller format, where `group` neighbours of a row share a scale s:
//   INT8   W[r][i] = q s         q a signed byte; groups of 32; s a bf16
//   INT4   W[r][i] = (q - z) s   q, z 0..15, two q a byte; groups of 32, 64 or 128; s a half; z = 8 if there are none
//   FP8    W[r][i] = q s         q an e4m3; blocks of group_rows rows and `group` columns; s a float
// INT4: each 64 columns of a row are 32 bytes: column i is in the lower half of byte i, column 32 + i in the upper.
enum class Format { PLAIN, INT8, INT4, FP8 };
constexpr int GROUP = 32; // INT8's, and the least there is
constexpr int FP8_GROUP = 128; // of FP8 activations; and the usual one of weights, of rows and of columns
inline float half_to_float(uint16_t h); // quantized.h
inline float e4m3_to_float(uint8_t x);
BOTH inline uint8_t float_to_e4m3(float f);
template <class T> struct Linear {
    Format format = Format::PLAIN; // of all blocks
    const T* w[3] = {};            // PLAIN
    const int8_t* q[3] = {};       // (rows, row_bytes), all others
    const void* scale[3] = {};     // (rows / group_rows, groups)
    const uint8_t* zero[3] = {};   // INT4: (rows, groups) or null
    int group = GROUP, group_rows = 1;
    int rows[3] = {};
    int in = 0;
    Adapter<T> adapter;
    int out() const { return rows[0] + rows[1] + rows[2]; }
    int groups() const { return (in + group - 1) / group; }
    size_t row_bytes() const { // of q
        return format == Format::INT4 ? ((size_t)in + 63) / 64 * 32 : (size_t)in;
    }
    // W[r][i], whatever it is stored as.
    acc<T> at(int r, int i) const {
        int b = 0;
        while (r >= rows[b]) r -= rows[b++];
        if (format == Format::PLAIN) return to_acc(w[b][(size_t)r * in + i]);
        const size_t g = (size_t)(r / group_rows) * groups() + i / group;
        const int8_t* row = q[b] + (size_t)r * row_bytes();
        if (format == Format::INT8) return (acc<T>)row[i] * to_acc(((const bf16*)scale[b])[g]);
        if (format == Format::FP8) return (acc<T>)e4m3_to_float((uint8_t)row[i]) * ((const float*)scale[b])[g];
        const int number = row[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        return (acc<T>)(number - (zero[b] ? zero[b][g] : 8)) * half_to_float(((const uint16_t*)scale[b])[g]);
    }
    int first_row(int b) const { return b == 0 ? 0 : b == 1 ? rows[0] : rows[0] + rows[1]; } // of block b
};

template <class T> struct Layer {
    const T *norm1, *norm2;      // (C)
    const T *q_norm, *k_norm;    // (D)
    Linear<T> qkv, o;            // (HD + 2KD, C), (C, HD)
    Linear<T> gate_up, down;     // (2F, C), (C, F)
};

struct ModelFile; // checkpoint.h
template <class T> struct Weights {
    Linear<T> embed;             // (V,C)
    std::vector<Layer<T>> layers;
    const T* norm = nullptr;     // (C)
    Linear<T> head;              // (V,C), the embedding when tied
    std::vector<std::shared_ptr<void>> converted; // what the file does not hold in this form
    Arena gpu;                   // holds all of them after `upload`

    // Of a checkpoint (see checkpoint.h). A tensor stored as T is used where the file maps it; others are converted
    // once. With `int8` every matrix becomes INT8 (a file's own INT8 matrices are so anyway). With `packed` a quantised
    // matrix stays so: in its own format if Linear has it, else as INT8. Norms stay as they are.
    explicit Weights(const ModelFile& file, bool int8 = false, bool packed = false);
    Weights() = default; // to be filled by hand (lab/decode)
    // Copies all to the GPU (see Book II) and lets every pointer point there, the blocks of a Linear one after another.
    void upload(Context& ctx, const ModelFile& file);
};

// ---- N packed tokens of B sequences. The rows of a sequence are neighbours and in order of position. Sequences of one
// row come first (decoding), longer ones (prompts, training) follow. Spare rows have seq = -1: ops that look at tokens
// skip them, the others compute rows that nobody reads. On a GPU the arrays are in its memory.
// Keys and values live in pages of 16 tokens; row seq of the block table names the pages of a sequence.
constexpr int PAGE = 16;
constexpr int SPLIT = 8 * PAGE; // keys that a block of the GPU's attention of single tokens takes
struct Batch {
    int N, B;
    const int* token; // (N)
    const int* pos;   // (N) position in its sequence, from 0
    const int* seq;   // (N) row of the block table
    const int* slot;  // (N) where its key and value go: page * 16 + offset
    const int* pages; // (B, max_pages) block table
    int max_pages;    // pages a sequence can have
    int singles = 0;  // the first rows, of which each may be taken as a sequence's only one
    int splits = 1;   // of SPLIT keys: enough for the longest of these sequences. The GPU's, as is the next:
    int longest = 0;  // keys of the longest other sequence; 0: not known
    bool fp8 = false; // the cache is: see KVRow
};

// One layer's keys or values: (pages, K, 16, D).
BOTH inline size_t kv_offset(int page, int head, int within, int K, int D) {
    return (((size_t)page * K + head) * PAGE + within) * D;
}

// The key or value of a token and head, as it lies in one layer's cache.
// FP8: the 16 rows of a page and head are 16 D e4m3, then 16 bytes e: a number is q 2^(e - 128). The e of a row is the
// least with which none of it is beyond 448; 0 says that one was not finite, and all of the row is NaN. So each number
// is a bf16, and what a row is depends on no other: attention is that of a bf16 cache that holds these numbers.
template <class T> struct KVRow {
    const T* plain;
    const uint8_t* q;
    acc<T> factor;
    KVRow(const T* cache, const Batch& b, int page, int head, int within, int K, int D)
        : plain(cache + kv_offset(page, head, within, K, D)), q(nullptr), factor(1) {
        if (!b.fp8) return;
        const uint8_t* block = (const uint8_t*)cache + ((size_t)page * K + head) * PAGE * (D + 1);
        q = block + (size_t)within * D, factor = scale(block[(size_t)PAGE * D + within]);
    }
    acc<T> operator[](int i) const { return q ? (acc<T>)e4m3_to_float(q[i]) * factor : to_acc(plain[i]); }
    static acc<T> scale(uint8_t e) {
        return e ? (acc<T>)std::ldexp(1.f, e - 128) : std::numeric_limits<acc<T>>::quiet_NaN();
    }
};
// Of a row whose largest number has this size. (Least: 2^-9 times it is still a bf16.)
BOTH inline int kv_exponent(float largest) {
    int exponent = 0; // largest = f 2^exponent, 1/2 <= f < 1; 448 is 7/8 of 2^9
    const float f = frexpf(largest, &exponent);
    const int e = exponent - 9 + (f > 0.875f);
    return largest > 0 && e > -100 ? e : -100;
}
// Stores row (D), the key or value of a token and head.
template <class T> void store_kv(T* cache, const Batch& b, int slot, int head, const T* row, int K, int D) {
    const int page = slot / PAGE, within = slot % PAGE;
    if (!b.fp8) return (void)std::copy_n(row, D, cache + kv_offset(page, head, within, K, D));
    uint8_t* block = (uint8_t*)cache + ((size_t)page * K + head) * PAGE * (D + 1);
    bool finite = true;
    float largest = 0;
    for (int i = 0; i < D; i++) {
        const float size = std::fabs((float)to_acc(row[i]));
        finite &= size <= std::numeric_limits<float>::max(), largest = std::max(largest, size);
    }
    const int e = kv_exponent(finite ? largest : 0);
    block[(size_t)PAGE * D + within] = finite ? (uint8_t)(e + 128) : (uint8_t)0;
    for (int i = 0; i < D; i++)
        block[(size_t)within * D + i] = float_to_e4m3((float)std::ldexp((float)to_acc(row[i]), -e));
}

// What ops hand to each other, for up to N tokens. Inference uses one set for all layers; in training each layer has
// its own arrays of what the backward pass reads.
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
    // it keeps only what enters a layer, and backward runs the layer again. With `ample` it keeps what SwiGLU and RoPE
    // made, too: keys and values in a cache of all layers.
    bool recompute = false, ample = false;
    void plan_training(Arena& arena, const Config& c, int N, bool whole_layers, bool ample_memory = false) {
        recompute = whole_layers, ample = ample_memory;
        PerLayer a;
        auto take_ample = [&] {
            a.q = arena.take<T>((size_t)N * c.H * c.D);
            a.hidden = arena.take<T>((size_t)N * c.F);
        };
        auto rest = [&] {
            if (ample) take_ample();
            a.qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
            a.attention = arena.take<T>((size_t)N * c.H * c.D);
            a.lse = arena.take<acc<T>>((size_t)N * c.H);
            a.mid = arena.take<acc<T>>((size_t)N * c.C);
            a.gate_up = arena.take<T>((size_t)N * 2 * c.F);
        };
        a.norm1 = a.norm2 = arena.take<T>((size_t)N * c.C);
        normed = arena.take<T>((size_t)N * c.C);
        if (!ample) take_ample();
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

// Keys and values of all layers, (L, pages, K, 16, D) each. Training may have one layer's, which all take in turn.
template <class T> struct KVCache {
    T *keys, *values;
    size_t layer_size; // from one layer to the next
    bool fp8 = false;  // see KVRow: then arrays of T stand for bytes

    static size_t block_bytes(const Config& c, bool fp8) { // of a page and head
        return (size_t)PAGE * (fp8 ? c.D + 1 : c.D * sizeof(T));
    }
    static size_t bytes(const Config& c, size_t pages, bool fp8 = false) {
        return 2 * (size_t)c.L * pages * c.K * block_bytes(c, fp8);
    }
    Batch of(Batch b) const { return b.fp8 = fp8, b; }
    void plan(Arena& arena, const Config& c, size_t pages, bool one_layer = false, bool eight = false) {
        fp8 = eight;
        const size_t layer = pages * c.K * block_bytes(c, fp8) / sizeof(T), layers = one_layer ? 1 : c.L;
        layer_size = one_layer ? 0 : layer;
        keys = arena.take<T>(layers * layer), values = arena.take<T>(layers * layer);
    }
};

// ====================================================================================================== 3 Forward ops
// In the order the model runs them. A loop over tokens may run in parallel; what a row is does not depend on that.

// ---- embed: x[n] = W[token[n]]
template <class T>
void embed(acc<T>* x,              // (N,C) out
           const Linear<T>& table, // (V,C)
           const Batch& b, int C) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++)
        for (int i = 0; i < C && b.seq[n] >= 0; i++) x[(size_t)n * C + i] = table.at(b.token[n], i);
}

// 1 / sqrt(mean(x^2) + eps) of one row.
template <class T> acc<T> rms_factor(const T* x, int n, float eps) {
    acc<T> sum = 0;
    for (int i = 0; i < n; i++) sum += to_acc(x[i]) * to_acc(x[i]);
    return 1 / std::sqrt(sum / n + (acc<T>)eps);
}

// ---- rmsnorm: out[n] = x[n] / rms(x[n]) * w       (Zhang & Sennrich, "Root mean square layer normalization", 2019)
template <class T>
void rmsnorm(T* out,          // (N,C) out
             const acc<T>* x, // (N,C)
             const T* w,      // (C)
             int N, int C, float eps) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const acc<T>* row = x + (size_t)n * C;
        const acc<T> r = rms_factor(row, C, eps);
        for (int i = 0; i < C; i++) out[(size_t)n * C + i] = to_stored<T>(row[i] * r * to_acc(w[i]));
    }
}

// ---- product: y[n][r] = sum_i W[r][i] x[n][i]; `store(n, r, y)` takes each of them once.
template <class T, class Store> void product(const Linear<T>& W, const T* x, int N, Store store) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < W.out(); r++)
        for (int n = 0; n < N; n++) {
            acc<T> y = 0;
            for (int i = 0; i < W.in; i++) y += W.at(r, i) * to_acc(x[(size_t)n * W.in + i]);
            store(n, r, y);
        }
}

// ---- round_activations: out = x, each number the nearest q 2^e, q an e4m3; e is the least with which none of
// FP8_GROUP neighbours of a token is beyond 448. So each is a bf16. Of neighbours that are not all finite, all become
// NaN.
template <class T>
void round_activations(T* out,     // (N,in) out
                       const T* x, // (N,in)
                       int N, int in) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++)
        for (int first = 0; first < in; first += FP8_GROUP) {
            const size_t begin = (size_t)n * in + first, end = begin + std::min(FP8_GROUP, in - first);
            bool finite = true;
            float largest = 0;
            for (size_t i = begin; i < end; i++) {
                const float size = std::fabs((float)to_acc(x[i]));
                finite &= size <= std::numeric_limits<float>::max(), largest = std::max(largest, size);
            }
            const int e = kv_exponent(finite ? largest : 0);
            for (size_t i = begin; i < end; i++) {
                const uint8_t q = float_to_e4m3((float)std::ldexp((float)to_acc(x[i]), -e));
                out[i] = to_stored<T>(finite ? (acc<T>)std::ldexp(e4m3_to_float(q), e)
                                             : std::numeric_limits<acc<T>>::quiet_NaN());
            }
        }
}

// x[n][i] as module j of an adapter sees it: dropped, or 1 / (1 - p) of it, in training; else x itself. (Not rounded:
// implementations may divide last.)
template <class T> acc<T> dropped(const T* x, const Linear<T>& W, int j, int n, int i) {
    const acc<T> value = to_acc(x[(size_t)n * W.in + i]);
    const Dropout* d = W.adapter.dropout;
    if (!d) return value;
    const bool kept = dropout_mask(*d, d->token[n], W.adapter.module[j], i / 8) >> i % 8 & 1;
    return kept ? value * (1 / (1 - (acc<T>)d->p)) : 0;
}

// ---- lora_down: h[n][j * rank + r] = sum_i A[j * rank + r][i] drop_j(x[n])[i]
template <class T>
void lora_down(T* h,       // (N, m * rank) out
               const T* x, // (N, W.in)
               const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int r = 0; r < (int)a.width(); r++) {
            acc<T> sum = 0;
            for (int i = 0; i < W.in; i++) sum += to_acc(a.A[(size_t)r * W.in + i]) * dropped(x, W, r / a.rank, n, i);
            h[n * a.width() + r] = to_stored<T>(sum);
        }
}

// x W^T with W's adapter, if it has one: s B h is added before anything is rounded. (B is zero where a row and a module
// do not belong together.)
template <class T, class Store> void adapted_product(const Linear<T>& W, const T* x, int N, Store store) {
    const Adapter<T>& a = W.adapter;
    if (a.rank) lora_down(a.h, x, W, N);
    product(W, x, N, [&](int n, int r, acc<T> y) {
        for (size_t i = 0; i < a.width(); i++) y += to_acc(a.B[r * a.width() + i]) * to_acc(a.h[n * a.width() + i]);
        store(n, r, y);
    });
}

// ---- linear: out = x W^T
template <class T>
void linear(T* out,     // (N, W.out) out
            const T* x, // (N, W.in)
            const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}

// ---- linear_add: out = residual + x W^T; out may be residual.
template <class T>
void linear_add(acc<T>* out,            // (N, W.out) out
                const acc<T>* residual, // (N, W.out)
                const T* x,             // (N, W.in)
                const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

// ---- norm_linear: out = rmsnorm(x) W^T
template <class T>
void norm_linear(T* out,          // (N, W.out) out
                 T* normed,       // (N,C) scratch; a fused kernel leaves it as it was
                 const acc<T>* x, // (N,C)
                 const T* w,      // (C)
                 const Linear<T>& W, int N, float eps) {
    rmsnorm(normed, x, w, N, W.in, eps);
    linear(out, normed, W, N);
}

// ---- qknorm_rope_kv: the q and k heads of each token are RMS-normalised, then rotated in each plane (i, i + D/2) by
// the angle pos * theta^(-2i/D)      (Su et al., "RoFormer", 2021, in the half-split layout); k and v go to the cache.
template <class T>
void qknorm_rope_kv(T* q,               // (N,HD) out
                    T* keys,            // one layer's cache, out
                    T* values,          // one layer's cache, out
                    const T* qkv,       // (N,(H+2K)D)
                    const T* q_weight,  // (D)
                    const T* k_weight,  // (D)
                    const acc<T>* rope, // (positions, D/2, 2) cosine and sine
                    const Batch& b, int H, int K, int D, float eps) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const T* row = qkv + (size_t)n * (H + 2 * K) * D;
        const acc<T>* angle = rope + (size_t)b.pos[n] * D;
        auto norm_rope = [&](T* out, const T* head, const T* w) {
            const acc<T> r = rms_factor(head, D, eps);
            for (int i = 0; i < D / 2; i++) {
                const acc<T> u = to_acc(head[i]) * r * to_acc(w[i]);
                const acc<T> v = to_acc(head[i + D / 2]) * r * to_acc(w[i + D / 2]);
                const acc<T> cosine = angle[2 * i], sine = angle[2 * i + 1];
                out[i] = to_stored<T>(u * cosine - v * sine);
                out[i + D / 2] = to_stored<T>(v * cosine + u * sine);
            }
        };
        for (int h = 0; h < H; h++) norm_rope(q + ((size_t)n * H + h) * D, row + h * D, q_weight);
        for (int h = 0; h < K; h++) {
            T key[MAX_HEAD];
            norm_rope(key, row + (H + h) * D, k_weight);
            store_kv(keys, b, b.slot[n], h, key, K, D);
            store_kv(values, b, b.slot[n], h, row + (H + K + h) * D, K, D);
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

// ---- attention: out[n][h] = sum_m p_m v_m, p = softmax(q[n][h] . k_m / sqrt(D)) over the positions m = 0..pos[n] of
// n's sequence; query head h reads key/value head h / G.      (Vaswani et al., "Attention is all you need", 2017)
template <class T>
void attention(T* out,          // (N,HD) out
               acc<T>* lse,     // (N,H) out: log sum_m e^(q . k_m / sqrt(D)), which backward needs; null: not wanted
               const T* q,      // (N,HD)
               const T* keys,   // one layer's cache
               const T* values, // one layer's cache
               const Batch& b, int H, int K, int D) {
    #pragma omp parallel for schedule(dynamic)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const int length = b.pos[n] + 1, *pages = b.pages + (size_t)b.seq[n] * b.max_pages;
        std::vector<acc<T>> p(length), mix(D);
        for (int h = 0; h < H; h++) {
            const T* query = q + ((size_t)n * H + h) * D;
            auto at = [&](const T* cache, int m) {
                return KVRow<T>(cache, b, pages[m / PAGE], h / (H / K), m % PAGE, K, D);
            };
            acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
            for (int m = 0; m < length; m++) { // first pass: scores and the largest of them
                const KVRow<T> key = at(keys, m);
                p[m] = 0;
                for (int i = 0; i < D; i++) p[m] += to_acc(query[i]) * key[i];
                p[m] /= std::sqrt((acc<T>)D);
                top = std::max(top, p[m]);
            }
            std::fill(mix.begin(), mix.end(), 0);
            for (int m = 0; m < length; m++) { // second pass: exponentials, their sum, the weighted sum of values
                const KVRow<T> value = at(values, m);
                p[m] = std::exp(p[m] - top);
                sum += p[m];
                for (int i = 0; i < D; i++) mix[i] += p[m] * value[i];
            }
            for (int i = 0; i < D; i++) out[((size_t)n * H + h) * D + i] = to_stored<T>(mix[i] / sum);
            if (lse) lse[(size_t)n * H + h] = top + std::log(sum);
        }
    }
}

// ---- attend: from qkv to what o takes. `q` is scratch.
template <class T>
void attend(T* out, acc<T>* lse, T* q, T* keys, T* values, const T* qkv, const T* q_weight, const T* k_weight,
            const acc<T>* rope, const Batch& b, int H, int K, int D, float eps) {
    qknorm_rope_kv(q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
    attention(out, lse, q, keys, values, b, H, K, D);
}

// ---- swiglu: out = silu(gate) * up, silu(g) = g / (1 + e^-g)     (Shazeer, "GLU variants improve transformer", 2020)
template <class T>
void swiglu(T* out,           // (N,F) out
            const T* gate_up, // (N,2F)
            int N, int F) {
    for (int n = 0; n < N; n++)
        for (int f = 0; f < F; f++) {
            const T* row = gate_up + (size_t)n * 2 * F;
            const acc<T> gate = to_acc(row[f]), up = to_acc(row[F + f]);
            out[(size_t)n * F + f] = to_stored<T>(gate / (1 + std::exp(-gate)) * up);
        }
}

// ---- norm_linear_swiglu: out = swiglu(rmsnorm(x) W^T). On a GPU gate_up may be null.
template <class T>
void norm_linear_swiglu(T* out,     // (N,F) out
                        T* gate_up, // (N,2F) out
                        T* normed,  // (N,C) as norm_linear's, with the next two
                        const acc<T>* x, const T* w, const Linear<T>& W, int N, float eps) {
    norm_linear(gate_up, normed, x, w, W, N, eps);
    swiglu(out, gate_up, N, W.rows[0]);
}

// ---- head: the logits of R named rows, never rounded below acc<T>
template <class T>
void head(acc<T>* logits,  // (R,V) out
          T* picked,       // (R,C) scratch
          const T* x,      // (N,C) after the final norm
          const int* rows, // (R)
          const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++) std::copy_n(x + (size_t)rows[r] * W.in, W.in, picked + (size_t)r * W.in);
    const size_t V = W.out();
    product(W, picked, R, [=](int r, int v, acc<T> y) { logits[r * V + v] = y; });
}

// ========================================================================================================== 4 forward

// One layer: s.in to s.out.
template <class T>
void layer_forward(Context& ctx, const Config& c, const Layer<T>& layer, const Batch& b,
                   typename Activations<T>::PerLayer& s, T* keys, T* values, const acc<T>* rope) {
    const int N = b.N;
    RUN(norm_linear, s.qkv, s.norm1, s.in, layer.norm1, layer.qkv, N, c.eps);
    RUN(attend, s.attention, s.lse, s.q, keys, values, s.qkv, layer.q_norm, layer.k_norm, rope, b, c.H, c.K, c.D,
        c.eps);
    RUN(linear_add, s.mid, s.in, s.attention, layer.o, N);
    RUN(norm_linear_swiglu, s.hidden, s.gate_up, s.norm2, s.mid, layer.norm2, layer.gate_up, N, c.eps);
    RUN(linear_add, s.out, s.mid, s.hidden, layer.down, N);
}

// Tokens to vectors, up to the final norm: a.normed (N,C). The keys and values of the batch go to the cache.
template <class T>
void forward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& batch, Activations<T>& a, KVCache<T>& kv,
             const acc<T>* rope) {
    const Batch b = kv.of(batch);
    const int N = b.N, C = c.C;
    RUN(embed, a.layer[0].in, w.embed, b, C);
    for (int l = 0; l < c.L && !(ctx.stop && *ctx.stop); l++) {
        T *keys = kv.keys + l * kv.layer_size, *values = kv.values + l * kv.layer_size;
        layer_forward(ctx, c, w.layers[l], b, a.layer[l], keys, values, rope);
    }
    RUN(rmsnorm, a.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
}

// ======================================================================================= 5 Sampler, session, generate

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
BOTH inline bool has_penalties(const Sampling& how) {
    return how.repeat != 1 || how.presence != 0 || how.frequency != 0;
}

// The logit of an id with the penalties. `seen`: IN_PROMPT if the prompt has it, plus how often the answer has it.
constexpr uint32_t IN_PROMPT = 1u << 31;
BOTH inline float penalized(float logit, const Sampling& how, uint32_t seen) {
    if (seen && how.repeat != 1) logit = logit > 0 ? logit / how.repeat : logit * how.repeat;
    const uint32_t count = seen & ~IN_PROMPT;
    return count ? logit - fmaf(how.frequency, (float)count, how.presence) : logit;
}
// (V): `seen` of every id. ids: prompt and answer, which begins at ids[answer].
inline std::vector<uint32_t> seen_counts(const std::vector<int>& ids, size_t answer, int V) {
    std::vector<uint32_t> seen(V);
    for (size_t i = 0; i < answer; i++) seen[ids[i]] = IN_PROMPT;
    for (size_t i = answer; i < ids.size(); i++) seen[ids[i]]++;
    return seen;
}

// Applies them to logits (V).
inline void penalize(float* logits, const Sampling& how, const std::vector<int>& ids, size_t answer, int V) {
    if (!has_penalties(how)) return;
    const std::vector<uint32_t> seen = seen_counts(ids, answer, V);
    for (int id = 0; id < V; id++) logits[id] = penalized(logits[id], how, seen[id]);
}

// A logit as it is compared: a NaN is the least there is; infinities are only very large.
BOTH inline float usable(float logit) { return logit == logit ? fminf(fmaxf(logit, -FLT_MAX), FLT_MAX) : -FLT_MAX; }

// Draws an id from logits (V), of which only ids < exist may be drawn. In this order: penalties (above), temperature,
// top-k, top-p, min-p; ties go to the lower id. `counter` is the position of the drawn token: the same seed, counter
// and logits give the same id.
// Probabilities are integers, e^(l - max) in steps of 2^-40: integer sums are the same in any order, so that any number
// of threads, and a GPU, draw the same token.
inline int sample(const float* logits, int exist, const Sampling& how, uint64_t counter) {
    auto value = [&](int id) { return usable(logits[id]); };
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
    auto likelier = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
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
        auto unlikely = [&](const Candidate& c) { return (double)c.weight < need; };
        kept.erase(std::remove_if(kept.begin(), kept.end(), unlikely), kept.end());
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

// What is told of a row of logits: its log-probabilities are logit - log_sum.
constexpr int MAX_LIKELIEST = 20;
struct Likeliest {
    float log_sum;              // log sum_id e^logit
    int count;                  // of the likeliest ids, the likeliest first; ties go to the lower id
    int id[MAX_LIKELIEST];
    float logit[MAX_LIKELIEST];
};
// Of logits (V), of which the ids < exist count. k <= MAX_LIKELIEST of them are wanted.
inline void likeliest(Likeliest& out, const float* logits, int exist, int k) {
    std::vector<int> ids(exist);
    for (int id = 0; id < exist; id++) ids[id] = id;
    std::sort(ids.begin(), ids.end(), [&](int a, int b) {
        const float x = usable(logits[a]), y = usable(logits[b]);
        return x != y ? x > y : a < b;
    });
    const float top = usable(logits[ids[0]]);
    double sum = 0;
    for (int id = 0; id < exist; id++) sum += std::exp((double)usable(logits[id]) - top);
    out.log_sum = (float)(top + std::log(sum));
    out.count = std::min(k, exist);
    for (int i = 0; i < out.count; i++) out.id[i] = ids[i], out.logit[i] = usable(logits[ids[i]]);
}

// One conversation: a model, its KV cache, and the ids in it. On the GPU if `ctx` says so; the weights are there too.
template <class T> struct GpuDraws; // Book II: drawing on a GPU, a CUDA graph a token
template <class T> struct Session {
    static constexpr int CHUNK = 512;      // tokens of a prompt that go through `forward` at once
    static constexpr int GPU_CHUNK = 8192; // ... on a GPU
    static constexpr int ROWS = 16;        // of them that go through the head at once, where all logits are wanted

    Context ctx;
    const Config& config;
    const Weights<T>& weights;
    int capacity;             // tokens
    std::vector<int> ids;     // what the cache holds
    acc<T>* logits;           // (V) after the last id that was fed, in the CPU's memory

    // Where it computes. The rest is for GpuDraws.
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    T* picked;                              // (ROWS,C) scratch of `head`
    acc<T> *rope, *row_logits;              // (capacity, D/2, 2), (ROWS,V)
    int chunk, pages, *token, *pos, *seq, *slot, *table, *named; // a Batch; the rows that go through the head
    int* last_row;                          // the one whose logits were taken last
    std::shared_ptr<acc<T>[]> host_logits;  // on a GPU: row_logits in the CPU's memory
    struct { Sampling how; int exist; size_t answer, most; } drawing; // see begin_draws
    std::shared_ptr<GpuDraws<T>> draws;     // on a GPU
    LookUp lookup;                          // may be asked for, see can_look_up
    std::vector<int> ahead;                 // what it proposed after ids, as far as it has not been judged: in the
                                            // cache; the logits of each lie in the row after `logits`
    double fed = 0;                         // s that `feed` has taken for prompts, since an answer began

    // Plans all memory for `context` tokens. Throws Error if it is more than there is.
    Session(const Config& c, const Weights<T>& w, int context, const Context& where = {})
        : ctx(where), config(c), weights(w), capacity(context) {
        if constexpr (HAS_GPU<T>) if (ctx.gpu) draws = std::make_shared<GpuDraws<T>>(*this);
        arena.gpu = ctx.gpu != nullptr;
        chunk = std::min(ctx.gpu ? GPU_CHUNK : CHUNK, capacity);
        plan();
        arena.allocate(format("a context of %d tokens", context).c_str());
        plan();
        std::vector<acc<T>> angles((size_t)capacity * c.D);
        fill_rope(angles.data(), context, c.D, c.rope_theta);
        copy_in(ctx, rope, angles.data(), angles.size());
        std::vector<int> identity(pages);
        std::iota(identity.begin(), identity.end(), 0);
        copy_in(ctx, table, identity.data(), identity.size());
        if constexpr (HAS_GPU<T>)
            if (ctx.gpu) host_logits = gpu_host_memory<acc<T>>((size_t)std::min(chunk, ROWS) * c.V);
        logits = ctx.gpu ? host_logits.get() : row_logits;
    }
    Session(const Session&) = delete;

    void plan() {
        pages = capacity / PAGE + (capacity % PAGE != 0);
        cache.plan(arena, config, pages, false, ctx.kv_fp8);
        activations.plan(arena, config, chunk, !ctx.gpu);
        rope = arena.take<acc<T>>((size_t)capacity * config.D);
        row_logits = arena.take<acc<T>>((size_t)std::min(chunk, ROWS) * config.V);
        picked = arena.take<T>((size_t)std::min(chunk, ROWS) * config.C);
        for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>(chunk);
        table = arena.take<int>(pages);
        named = arena.take<int>(ROWS);
        if constexpr (HAS_GPU<T>) if (draws) draws->plan();
    }

    bool full() const { return (int)ids.size() == capacity; }

    // Appends tokens; afterwards `logits` are the last one's. `rows` (if given) is handed the logits of every token in
    // turn. Stops early, with what it has, when *stop becomes non-zero.
    // Throws Error if they do not fit or one is not in the vocabulary.
    void feed(const std::vector<int>& tokens, const volatile sig_atomic_t* stop = nullptr,
              const std::function<void(const acc<T>*)>& rows = nullptr) {
        if (tokens.size() > (size_t)capacity - ids.size())
            DIE("%zu tokens do not fit: the context holds %d and %zu are in it", tokens.size(), capacity, ids.size());
        for (int id : tokens)
            if (id < 0 || id >= config.V) DIE("id %d is not in the vocabulary of %d", id, config.V);
        ahead.clear();
        fed -= seconds();
        for (size_t done = 0; done < tokens.size() && !(stop && *stop);) {
            const int N = (int)std::min(tokens.size() - done, (size_t)chunk);
            std::vector<int> positions(N), zero(N);
            std::iota(positions.begin(), positions.end(), (int)ids.size());
            copy_in(ctx, token, &tokens[done], N);
            copy_in(ctx, pos, positions.data(), N);
            copy_in(ctx, seq, zero.data(), N);
            copy_in(ctx, slot, positions.data(), N); // the identity table: page p holds positions 16 p ..
            Batch batch = {N, 1, token, pos, seq, slot, table, pages, N == 1};
            batch.splits = positions.back() / SPLIT + 1, batch.longest = positions.back() + 1;
            ctx.stop = stop;
            forward(ctx, config, weights, batch, activations, cache, rope);
            if (stop && *stop) break;
            ids.insert(ids.end(), &tokens[done], &tokens[done] + N);
            done += N;
            const bool last = done == tokens.size();
            for (int n = rows ? 0 : last ? N - 1 : N, R; n < N; n += R) {
                R = std::min(N - n, ROWS);
                take_logits(n, R);
                for (int r = 0; r < R; r++) {
                    logits = (ctx.gpu ? host_logits.get() : row_logits) + (size_t)r * config.V;
                    if (rows) rows(logits);
                }
            }
        }
        fed += seconds();
    }

    // The logits of R rows of the last batch, from row n on.
    void take_logits(int n, int R) {
        int wanted[ROWS];
        std::iota(wanted, wanted + R, n);
        copy_in(ctx, named, wanted, R);
        last_row = named + R - 1;
        RUN(head, row_logits, picked, activations.normed, named, weights.head, R);
        if (ctx.gpu) copy_out(ctx, host_logits.get(), row_logits, (size_t)R * config.V);
    }

    // ---- Drawing an answer, token by token. `exist`: only ids below may be drawn; `answer`: ids[answer] on belong to
    // the answer (see penalized); `most`: no more draws than these will follow.
    void begin_draws(const Sampling& how, int exist, size_t answer, size_t most) {
        if (lookup.most && !can_look_up()) DIE("prompt lookup on a GPU needs --one-kernel's steps, or --invariant");
        drawing = {how, exist, answer, most};
        ahead.clear();
        if (lookup.most) lookup.begin(ids, std::exchange(fed, 0));
        if constexpr (HAS_GPU<T>) if (draws_ahead()) draws->begin(most);
    }
    // The next token: not in the session until it is accepted.
    int draw() {
        if constexpr (HAS_GPU<T>) if (draws_ahead()) return draws->next();
        penalize(logits, drawing.how, ids, drawing.answer, config.V);
        if constexpr (HAS_CPU<T>)
            if (!ctx.plain) return sample_cpu(ctx, logits, drawing.exist, drawing.how, ids.size());
        return sample(logits, drawing.exist, drawing.how, ids.size());
    }
    // Takes the token just drawn into the session.
    void accept(int id) {
        if (draws_ahead()) ids.push_back(id); // the GPU has gone on with it already
        else if (!lookup.most) feed({id});
        else if (!was_proposed(id)) feed_with_proposal(id);
    }
    // On a GPU: whether it draws, and is ahead of the caller; then it sees to proposals, too.
    bool draws_ahead() const { return ctx.gpu && (!lookup.most || step_tokens() > 1); }
    // Whether a token has the same bits in steps of several tokens as in one of its own.
    bool can_look_up() const { return !ctx.gpu || ctx.invariant || step_tokens() > 1; }
    // On a GPU: that one kernel computes.
    int step_tokens() const {
        if constexpr (HAS_GPU<T>) return draws->tokens();
        return 1;
    }

    // Takes the token if it is the next one that was proposed: then its logits are there.
    bool was_proposed(int id) {
        if (ahead.empty()) return false;
        const bool right = ahead.front() == id;
        lookup.judged(right);
        if (!right) return false;
        ahead.erase(ahead.begin());
        ids.push_back(id);
        logits += config.V;
        return true;
    }
    // Feeds the token and what is proposed to follow it, of which no more is in the session yet than in the cache.
    void feed_with_proposal(int id) {
        ids.push_back(id);
        const size_t drawn = ids.size() - drawing.answer, draws_left = drawing.most - std::min(drawing.most, drawn);
        const size_t room = std::min((size_t)capacity - ids.size(), std::max(draws_left, (size_t)1) - 1);
        std::vector<int> proposal = lookup.propose(ids, room), step = {id};
        ids.pop_back();
        step.insert(step.end(), proposal.begin(), proposal.end());
        const double before = fed;
        const auto keep = [](const acc<T>*) {}; // all rows of logits
        feed(step, nullptr, keep);
        lookup.computed(step.size(), std::exchange(fed, before) - before);
        ids.resize(ids.size() - proposal.size());
        logits -= proposal.size() * (size_t)config.V;
        ahead.swap(proposal);
    }

    // Forgets all but the first n ids.
    void rewind(size_t n) { if (n < ids.size()) ids.resize(n); }
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
void generate(Session<T>& session, const Tokenizer* tokenizer, Generation& g,
              const std::function<void(std::string_view)>& show) {
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


// ============================================================================================ 6 Backward ops, AdamW
// Of each op the gradient of the loss by its inputs, given that by its output; d stands for "gradient of the loss by".
// The gradient of an activation is written, as T; the residual stream's is one buffer of acc<T>, to which each branch
// adds; those of parameters are acc<T> and are added to, token by token in order: on a CPU it makes no difference to a
// bit of them into how many batches a step is cut. What forward did not keep is made again.

// ---- cross_entropy: loss[r] = log(sum_v e^logits[r][v]) - logits[r][target[r]]
// dlogits = scale (softmax(logits) - one at the target). Over all V rows, those of ids that do not exist too, as in
// Hugging Face's. A gradient takes the place of its logits: row r of dlogits begins where row r of logits did.
template <class T>
void cross_entropy(acc<T>* loss,      // (R) out
                   T* dlogits,        // out: the memory of logits; or null
                   acc<T>* logits,    // (R,V) in; become dlogits
                   const int* target, // (R)
                   acc<T> scale, int R, int V) {
    for (int r = 0; r < R; r++) {
        const acc<T>* row = logits + (size_t)r * V;
        acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
        for (int v = 0; v < V; v++) top = std::max(top, row[v]);
        for (int v = 0; v < V; v++) sum += std::exp(row[v] - top);
        loss[r] = std::log(sum) + top - row[target[r]];
        for (int v = 0; v < V && dlogits; v++) { // (a gradient is no longer than a logit: what is unread stays)
            const T d = to_stored<T>((std::exp(row[v] - top) / sum - (v == target[r])) * scale);
            memcpy((uint8_t*)(logits + (size_t)r * V) + v * sizeof(T), &d, sizeof(T));
        }
    }
}

// The head and its loss: logits[r] = W x[rows[r]], and their gradient, factor[r] dlogits[r], in place of them: scale
// times the loss's, by[r] times if there is `by`.
template <class T>
void head_loss(acc<T>* loss,      // (R) out
               T* dlogits,        // out, or null: as cross_entropy's
               acc<T>* factor,    // (R) out
               acc<T>* logits,    // (R,V) out; become dlogits
               T* picked,         // (R,C) out: rows of x
               acc<T>*,           // (R, V / 64 rounded up + 1, 2) scratch of the GPU's
               const T* x,        // (N,C) after the final norm
               const int* rows,   // (R)
               const int* target, // (R)
               acc<T> scale,
               const acc<T>* by,  // (R), or null
               const Linear<T>& W, int R) {
    head(logits, picked, x, rows, W, R);
    cross_entropy(loss, dlogits, logits, target, scale, R, W.out());
    for (int r = 0; r < R; r++) factor[r] = by ? by[r] : 1;
}

// ---- add_losses: total += loss[0] + loss[1] + ..., in double and in order
template <class A> void add_losses(double* total, const A* loss, int R) {
    for (int r = 0; r < R; r++) *total += (double)loss[r];
}

// ---- scale_rows: row r times by[r]
template <class T>
void scale_rows(T* x,             // (R, ld), n of each row; in and out
                size_t ld,
                const acc<T>* by, // (R)
                int R, int n) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < R; r++)
        for (int i = 0; i < n; i++) x[r * ld + i] = to_stored<T>(to_acc(x[r * ld + i]) * by[r]);
}

// ---- head: logits[r] = W normed[rows[r]]
// dnormed of these rows; those of the others are not touched.
template <class T>
void head_backward(T* dnormed,           // (N,C) out
                   const T* dlogits,     // (R, ld), V of each row: factor[r] times as long
                   size_t ld,
                   const acc<T>* factor, // (R)
                   const int* rows,      // (R), none twice
                   const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++)
        for (int i = 0; i < W.in; i++) {
            acc<T> sum = 0;
            for (int v = 0; v < W.out(); v++) sum += to_acc(dlogits[r * ld + v]) * W.at(v, i);
            dnormed[(size_t)rows[r] * W.in + i] = to_stored<T>(sum * factor[r]);
        }
}

// ---- rmsnorm: out = x r w with r = 1 / sqrt(mean(x^2) + eps)
// dx += r w dout - x r^3 / C sum_j x_j w_j dout_j,  dw += x r dout
template <class T>
void rmsnorm_backward(acc<T>* dx,      // (N,C) +=
                      T* dy,           // (N,C) out: the new dx as T, or null
                      T* normed,       // (N,C) out: what forward's `out` was, or null
                      acc<T>* dw,      // (C) +=, or null
                      const T* dout,   // (N,C)
                      const acc<T>* x, // (N,C)
                      const T* w,      // (C)
                      int N, int C, float eps) {
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        const acc<T> r = rms_factor(x + at, C, eps);
        acc<T> sum = 0;
        for (int i = 0; i < C; i++) sum += x[at + i] * to_acc(w[i]) * to_acc(dout[at + i]);
        for (int i = 0; i < C; i++) {
            const acc<T> weight = to_acc(w[i]), d = to_acc(dout[at + i]);
            if (normed) normed[at + i] = to_stored<T>(x[at + i] * r * weight);
            if (dw) dw[i] += d * x[at + i] * r;
            dx[at + i] += r * weight * d - x[at + i] * (sum * r * r * r / C);
            if (dy) dy[at + i] = to_stored<T>(dx[at + i]);
        }
    }
}

// ---- linear: y = x W^T + sum_j s h_j B_j^T,  h_j = drop_j(x) A_j^T; the second part is the adapter's, if there is one
// dh_j = dy (s B_j),  dB_j += s dy^T h_j,  dx = sum_j drop_j(dh_j A_j) + dy W
template <class T>
void linear_backward_input(T* dx,       // (N, W.in) out
                           T* dh,       // (N, m * rank) out
                           acc<T>* dB,  // (W.out, m * rank) +=, where module and row belong together
                           const T* dy, // (N, W.out)
                           const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, out = W.out(), width = a.width();
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        for (size_t i = 0; i < width; i++) { // (B is zero where a row and a module do not belong together)
            acc<T> sum = 0;
            for (size_t r = 0; r < out; r++) sum += to_acc(dy[n * out + r]) * to_acc(a.B[r * width + i]);
            dh[n * width + i] = to_stored<T>(sum);
        }
        for (size_t i = 0; i < in; i++) {
            acc<T> sum = 0;
            for (int j = 0; j < a.modules; j++) {
                acc<T> part = 0;
                for (size_t r = (size_t)j * a.rank; r < (size_t)(j + 1) * a.rank; r++)
                    part += to_acc(dh[n * width + r]) * to_acc(a.A[r * in + i]);
                const Dropout* d = a.dropout;
                if (d && !(dropout_mask(*d, d->token[n], a.module[j], (uint32_t)i / 8) >> i % 8 & 1)) continue;
                sum += d ? part * (1 / (1 - (acc<T>)d->p)) : part;
            }
            for (size_t r = 0; r < out; r++) sum += to_acc(dy[n * out + r]) * W.at((int)r, (int)i);
            dx[n * in + i] = to_stored<T>(sum);
        }
    }
    for (int j = 0; j < a.modules; j++)
        #pragma omp parallel for schedule(static)
        for (int r = W.first_row(a.block[j]); r < W.first_row(a.block[j]) + W.rows[a.block[j]]; r++)
            for (int i = j * a.rank; i < (j + 1) * a.rank; i++)
                for (int n = 0; n < N; n++)
                    dB[r * width + i] += a.s * to_acc(dy[n * out + r]) * to_acc(a.h[n * width + i]);
}

// dW += dy^T x
template <class T>
void linear_backward_weight(acc<T>* dW,  // (out,in) +=
                            const T* dy, // (N, ld), `out` of each row
                            size_t ld,
                            const T* x,  // (N,in)
                            int N, int out, int in) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < out; r++)
        for (int i = 0; i < in; i++)
            for (int n = 0; n < N; n++)
                dW[(size_t)r * in + i] += to_acc(dy[n * ld + r]) * to_acc(x[(size_t)n * in + i]);
}

// dA_j += dh_j^T drop_j(x)
template <class T>
void lora_backward_weight(acc<T>* dA,  // (m * rank, W.in) +=
                          const T* dh, // (N, m * rank)
                          const T* x,  // (N, W.in)
                          const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, width = a.width();
    for (int j = 0; j < a.modules; j++)
        #pragma omp parallel for schedule(static)
        for (int i = j * a.rank; i < (j + 1) * a.rank; i++)
            for (int k = 0; k < W.in; k++)
                for (int n = 0; n < N; n++) dA[i * in + k] += to_acc(dh[n * width + i]) * dropped(x, W, j, n, k);
}

// ---- swiglu: out = silu(gate) * up, silu(g) = g sigma(g), sigma(g) = 1 / (1 + e^-g)
// dgate = dout up sigma (1 + g (1 - sigma)),  dup = dout silu(gate)
template <class T>
void swiglu_backward(T* dgate_up,      // (N,2F) out
                     T* hidden,        // (N,F) out: what forward's `out` was, or null
                     const T* dhidden, // (N,F)
                     const T* gate_up, // (N,2F)
                     int N, int F) {
    for (int n = 0; n < N; n++)
        for (int f = 0; f < F; f++) {
            const size_t at = (size_t)n * F + f, gate = at + (size_t)n * F, up = gate + F; // (N,2F)
            const acc<T> g = to_acc(gate_up[gate]), u = to_acc(gate_up[up]), d = to_acc(dhidden[at]);
            const acc<T> sigma = 1 / (1 + std::exp(-g));
            if (hidden) hidden[at] = to_stored<T>(g / (1 + std::exp(-g)) * u);
            dgate_up[gate] = to_stored<T>(d * u * sigma * (1 + g * (1 - sigma)));
            dgate_up[up] = to_stored<T>(d * g * sigma);
        }
}

// ---- y = out W^T of that out: both
template <class T>
void linear_backward_swiglu(T* dgate_up,      // (N,2F) out
                            T* hidden,        // (N,F) out, or null
                            T* dhidden,       // (N,F) scratch; on a GPU it may be null
                            T* dh,            // (N, m * rank) out
                            acc<T>* dB,       // (W.out, m * rank) +=
                            const T* dy,      // (N, W.out)
                            const T* gate_up, // (N,2F)
                            const Linear<T>& W, int N) {
    linear_backward_input(dhidden, dh, dB, dy, W, N);
    swiglu_backward(dgate_up, hidden, dhidden, gate_up, N, W.in);
}

// ---- attention_backward:  attention(out, lse, q, keys, values)
// With s[n][m] = q_n . k_m / sqrt(D), p = e^(s - lse), o_n = sum_m p[n][m] v_m over the tokens m <= n of n's sequence:
//     dv_m = sum_n p[n][m] do_n                              dp[n][m] = do_n . v_m
//     ds[n][m] = p[n][m] (dp[n][m] - delta_n)                delta_n = sum_m p[n][m] dp[n][m] = do_n . o_n
//     dq_n = sum_m ds[n][m] k_m / sqrt(D)                    dk_m = sum_n ds[n][m] q_n / sqrt(D)
// where for dk and dv n runs over all G query heads of the KV head too. A training batch holds sequences from their
// position 0 on: so key m of a sequence is its m-th row of the batch, and lies at that row's slot. Spare rows, after
// all others, get zeros, since weight gradients are sums over all rows.
// The probabilities are computed again from lse, not stored.
template <class T>
void attention_backward(T* dqkv,           // (N,(H+2K)D) out: gradients of q and k after RoPE, and of v
                        const T* dout,     // (N,HD)
                        const T* q,        // (N,HD)
                        const T* keys,     // one layer's cache
                        const T* values,   // one layer's cache
                        const T* out,      // (N,HD) of attention
                        const acc<T>* lse, // (N,H) of attention
                        const Batch& b, int H, int K, int D,
                        acc<T>* delta) { // (N,H) scratch
    const int G = H / K, width = (H + 2 * K) * D;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    auto dot = [&](const T* u, const T* v) {
        acc<T> sum = 0;
        for (int i = 0; i < D; i++) sum += to_acc(u[i]) * to_acc(v[i]);
        return sum;
    };
    #pragma omp parallel for schedule(static)
    for (int kv = 0; kv < K; kv++) {
        std::vector<acc<T>> dq((size_t)b.N * G * D), dk((size_t)b.N * D), dv((size_t)b.N * D);
        for (int n = 0; n < b.N; n++)
            for (int h = kv * G; h < (kv + 1) * G && b.seq[n] >= 0; h++) {
                const size_t row = (size_t)n * H + h;
                const T *query = q + row * D, *d = dout + row * D;
                acc<T>* to = &dq[((size_t)n * G + h % G) * D];
                delta[row] = dot(d, out + row * D);
                for (int m = n - b.pos[n]; m <= n; m++) { // the rows of n's sequence up to n
                    const size_t at = kv_offset(b.slot[m] / PAGE, kv, b.slot[m] % PAGE, K, D);
                    const acc<T> p = std::exp(dot(query, keys + at) * scale - lse[row]);
                    const acc<T> ds = p * (dot(d, values + at) - delta[row]);
                    for (int i = 0; i < D; i++) {
                        dv[(size_t)m * D + i] += p * to_acc(d[i]);
                        dk[(size_t)m * D + i] += ds * to_acc(query[i]) * scale;
                        to[i] += ds * to_acc(keys[at + i]) * scale;
                    }
                }
            }
        for (int n = 0; n < b.N; n++) {
            T* row = dqkv + (size_t)n * width;
            for (int i = 0; i < G * D; i++) row[kv * G * D + i] = to_stored<T>(dq[(size_t)n * G * D + i]);
            for (int i = 0; i < D; i++) {
                row[(H + kv) * D + i] = to_stored<T>(dk[(size_t)n * D + i]);
                row[(H + K + kv) * D + i] = to_stored<T>(dv[(size_t)n * D + i]);
            }
        }
    }
}

// ---- qknorm_rope: (a, b) = x r w in the plane (i, i + D/2) of a head, r = 1 / rms(x);
// out = (a cos - b sin, b cos + a sin)
// The gradient is rotated back, by the opposite angle, and then goes through the norm as in rmsnorm.
template <class T>
void qknorm_rope_backward(T* dqkv,            // (N,(H+2K)D) in; the heads of q and k become those before norm and RoPE
                          acc<T>* dq_weight,  // (D) +=, or null
                          acc<T>* dk_weight,  // (D) +=, or null
                          const T* qkv,       // (N,(H+2K)D) before norm and RoPE
                          const T* q_weight,  // (D)
                          const T* k_weight,  // (D)
                          const acc<T>* rope, // (positions, D/2, 2)
                          const Batch& b, int H, int K, int D, float eps) {
    for (int n = 0; n < b.N; n++)
        for (int h = 0; h < H + K && b.seq[n] >= 0; h++) {
            const size_t at = ((size_t)n * (H + 2 * K) + h) * D;
            const T *x = qkv + at, *w = h < H ? q_weight : k_weight;
            acc<T>* dw = h < H ? dq_weight : dk_weight;
            const acc<T> r = rms_factor(x, D, eps), *angle = rope + (size_t)b.pos[n] * D;
            acc<T> dy[MAX_HEAD], sum = 0; // of what the norm makes of x
            for (int i = 0; i < D / 2; i++) {
                const acc<T> u = to_acc(dqkv[at + i]), v = to_acc(dqkv[at + i + D / 2]);
                const acc<T> cosine = angle[2 * i], sine = angle[2 * i + 1];
                dy[i] = u * cosine + v * sine, dy[i + D / 2] = v * cosine - u * sine;
            }
            for (int i = 0; i < D; i++) {
                sum += to_acc(x[i]) * to_acc(w[i]) * dy[i];
                if (dw) dw[i] += dy[i] * to_acc(x[i]) * r;
            }
            for (int i = 0; i < D; i++)
                dqkv[at + i] = to_stored<T>(r * to_acc(w[i]) * dy[i] - to_acc(x[i]) * (sum * r * r * r / D));
        }
}

// ---- attend, whose q, keys and values have been made again: both
template <class T>
void attend_backward(T* dqkv,            // (N,(H+2K)D) out
                     acc<T>* dq_weight,  // (D) +=, or null
                     acc<T>* dk_weight,  // (D) +=, or null, like dq_weight
                     const T* dout,      // (N,HD)
                     const T* q,         // (N,HD)
                     const T* keys,      // one layer's cache
                     const T* values,    // one layer's cache
                     const T* out,       // (N,HD) of attend
                     const acc<T>* lse,  // (N,H) of attend
                     const T* qkv,       // (N,(H+2K)D) before norm and RoPE
                     const T* q_weight,  // (D)
                     const T* k_weight,  // (D)
                     const acc<T>* rope, // (positions, D/2, 2)
                     const Batch& b, int H, int K, int D, float eps,
                     acc<T>* delta) { // (N,H) scratch
    attention_backward(dqkv, dout, q, keys, values, out, lse, b, H, K, D, delta);
    qknorm_rope_backward(dqkv, dq_weight, dk_weight, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
}

// ---- embed: x[n] = W[token[n]]
// dW[token[n]] += dx[n]
template <class A>
void embed_backward(A* dW,       // (V,C) +=
                    const A* dx, // (N,C)
                    const Batch& b, int C) {
    #pragma omp parallel for schedule(static) if ((size_t)b.N * C > 2000)
    for (int i = 0; i < C; i++)
        for (int n = 0; n < b.N; n++)
            if (b.seq[n] >= 0) dW[(size_t)b.token[n] * C + i] += dx[(size_t)n * C + i];
}

// ---- grad_norm: the length of all gradients as one vector, in double: the squares of each piece of NORM_PIECE numbers
// in order, then the pieces in order
inline constexpr size_t NORM_PIECE = 4096;
template <class A>
void grad_norm(double* norm,    // (1) out
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

// ---- adamw (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019), in the order of PyTorch's steps; the
// gradients are scaled down to the length `clip` first, as clip_grad_norm_ does. If their length is not finite nothing
// changes: who reads it later finds the parameters as they were.
struct AdamW {
    float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0;
    float clip = 0;   // 0: off
    int64_t step = 0; // from 1
    float copy = 1;   // what the copy is scaled by: an adapter's s
};
template <class T>
void adamw(T* stored,          // (n) out: copy * p, which the products read
           acc<T>* p,          // (n) in place
           acc<T>* m,          // (n) in place
           acc<T>* v,          // (n) in place
           const acc<T>* g,    // (n)
           const double* norm, // (1) of all gradients
           size_t n, const AdamW& a) {
    using A = acc<T>;
    if (!std::isfinite(*norm)) return;
    const A scale = (A)(a.clip > 0 ? std::min(1., a.clip / (*norm + 1e-6)) : 1.);
    const A first = (A)(1 - std::pow((double)a.beta1, (double)a.step));
    const A root = (A)std::sqrt(1 - std::pow((double)a.beta2, (double)a.step));
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

// ========================================================================================================= 7 backward

// Gradients of what is trained; null is what is not.
template <class T> struct Gradients {
    struct OfLinear { acc<T> *W = nullptr, *A = nullptr, *B = nullptr; };
    struct OfLayer {
        acc<T> *norm1 = nullptr, *norm2 = nullptr, *q_norm = nullptr, *k_norm = nullptr;
        OfLinear qkv, o, gate_up, down;
    };
    std::vector<OfLayer> layer;
    acc<T> *embed = nullptr, *norm = nullptr, *head = nullptr; // head is embed when tied
    std::function<void(int layer)> done; // called when a layer's are complete
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
    T* hidden;       // (N,F); null on a GPU
    T* h;            // (N, 3 rank) of a product's adapter
    acc<T>* logits;  // (head_rows,V), then their gradient; of a GPU half as long: see head_loss_gpu
    acc<T>* factor;  // (head_rows) of dlogits' rows
    acc<T>* parts;   // scratch of head_loss
    T* picked;       // (head_rows,C)
    int head_rows;   // rows that go through the head at once

    void plan(Arena& arena, const Config& c, int N, int rank, int rows, bool gpu) {
        x = arena.take<acc<T>>((size_t)N * c.C);
        y = arena.take<T>((size_t)N * c.C);
        normed = arena.take<T>((size_t)N * c.C);
        qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
        attention = arena.take<T>((size_t)N * c.H * c.D);
        delta = arena.take<acc<T>>((size_t)N * c.H);
        gate_up = arena.take<T>((size_t)N * 2 * c.F);
        hidden = gpu ? nullptr : arena.take<T>((size_t)N * c.F);
        h = arena.take<T>((size_t)N * 3 * rank);
        head_rows = rows;
        logits = (acc<T>*)arena.take<uint8_t>((size_t)rows * c.V * (gpu ? sizeof(T) : sizeof(acc<T>)));
        factor = arena.take<acc<T>>(rows);
        parts = arena.take<acc<T>>((size_t)rows * ((c.V + 63) / 64 + 1) * 2);
        picked = arena.take<T>((size_t)rows * c.C);
    }
};

// After `forward`: the losses of R named rows, the only ones that go through the head; with `g` also d.normed and the
// head's gradient, of `scale` times their sum, or with `by` times the sum of by[r] loss[r]. Logits become their
// gradients in place, head_rows at a time.
template <class T>
void loss_backward(Context& ctx, const Config& c, const Weights<T>& w, const Activations<T>& a, Flow<T>& d,
                   const Gradients<T>* g,
                   acc<T>* loss,      // (R) out
                   const int* rows,   // (R), none twice
                   const int* target, // (R)
                   acc<T> scale, int N, int R,
                   const acc<T>* by = nullptr) { // (R)
    const size_t ld = (size_t)c.V * (ctx.gpu ? 1 : sizeof(acc<T>) / sizeof(T));
    T* dlogits = g ? (T*)d.logits : nullptr;
    if (g) clear(ctx, d.normed, (size_t)N * c.C);
    for (int r = 0; r < R && !(ctx.stop && *ctx.stop); r += d.head_rows) {
        const int n = std::min(d.head_rows, R - r);
        RUN(head_loss, loss + r, dlogits, d.factor, d.logits, d.picked, d.parts, a.normed, rows + r, target + r, scale,
            by ? by + r : nullptr, w.head, n);
        if (!g) continue;
        if (g->head) {
            RUN(scale_rows, d.picked, (size_t)c.C, d.factor, n, c.C);
            RUN(linear_backward_weight, g->head, dlogits, ld, d.picked, n, c.V, c.C);
        }
        RUN(head_backward, d.normed, dlogits, ld, d.factor, rows + r, w.head, n);
    }
}

// From d.normed to the gradient of every parameter: `forward` from its last line to its first. The batch holds whole
// sequences.
template <class T>
void backward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, Flow<T>& d,
              const Gradients<T>& g, KVCache<T>& kv, const acc<T>* rope) {
    const int N = b.N, C = c.C, H = c.H, K = c.K, D = c.D;
    auto through = [&](T* dx, const typename Gradients<T>::OfLinear& to, const T* dy, const Linear<T>& W) {
        RUN(linear_backward_input, dx, d.h, to.B, dy, W, N);
    };
    auto weights = [&](const typename Gradients<T>::OfLinear& to, const T* dy, const T* x, const Linear<T>& W) {
        if (to.W) RUN(linear_backward_weight, to.W, dy, (size_t)W.out(), x, N, W.out(), W.in);
        if (W.adapter.rank) RUN(lora_backward_weight, to.A, d.h, x, W, N); // d.h is from `through`
    };
    T* const none = nullptr;
    clear(ctx, d.x, (size_t)N * C);
    RUN(rmsnorm_backward, d.x, d.y, none, g.norm, d.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
    for (int l = c.L - 1; l >= 0 && !(ctx.stop && *ctx.stop); l--) {
        const Layer<T>& layer = w.layers[l];
        auto& s = a.layer[l];
        const auto& to = g.layer[l];
        T *keys = kv.keys + l * kv.layer_size, *values = kv.values + l * kv.layer_size;
        if (a.recompute) layer_forward(ctx, c, layer, b, s, keys, values, rope);
        // out = mid + hidden down^T, hidden = swiglu(gate_up), gate_up = norm2(mid) W^T
        RUN(linear_backward_swiglu, d.gate_up, a.ample ? none : s.hidden, d.hidden, d.h, to.down.B, d.y, s.gate_up,
            layer.down, N);
        weights(to.down, d.y, s.hidden, layer.down);
        through(d.normed, to.gate_up, d.gate_up, layer.gate_up);
        RUN(rmsnorm_backward, d.x, d.y, s.norm2, to.norm2, d.normed, s.mid, layer.norm2, N, C, c.eps);
        weights(to.gate_up, d.gate_up, s.norm2, layer.gate_up);
        // mid = in + attention o^T, attention = attend(qkv), qkv = norm1(in) W^T
        through(d.attention, to.o, d.y, layer.o);
        weights(to.o, d.y, s.attention, layer.o);
        if (!a.ample)
            RUN(qknorm_rope_kv, s.q, keys, values, s.qkv, layer.q_norm, layer.k_norm, rope, b, H, K, D, c.eps);
        RUN(attend_backward, d.qkv, to.q_norm, to.k_norm, d.attention, s.q, keys, values, s.attention, s.lse, s.qkv,
            layer.q_norm, layer.k_norm, rope, b, H, K, D, c.eps, d.delta);
        through(d.normed, to.qkv, d.qkv, layer.qkv);
        RUN(rmsnorm_backward, d.x, d.y, s.norm1, to.norm1, d.normed, s.in, layer.norm1, N, C, c.eps);
        weights(to.qkv, d.qkv, s.norm1, layer.qkv);
        if (g.done) g.done(l);
    }
    if (g.embed) RUN(embed_backward, g.embed, d.x, b, C);
}

// ################################################# The end of Book I #################################################
// Its slow ops once more, for the vector and matrix instructions of CPUs:
#ifndef QWEN3_PLAIN
#include "cpu.h"
#endif

#ifdef __CUDACC__
// ###################################################### Book II ######################################################

// ========================================================================================================== 8 Toolbox
// Errors, launches, and the instructions that kernels are made of, each wrapped once under its name in the PTX ISA.
#define CUDA_CHECK(call) cuda_check((call), #call)
inline void cuda_check(cudaError_t e, const char* call) {
    if (e != cudaSuccess) DIE("%.60s: %s", call, cudaGetErrorString(e));
}

// What launches need to know of the GPU, and scratch. Whoever has scratch of their own has a copy of their own.
struct Gpu {
    cudaStream_t stream = nullptr;
    int sm = 0, sms = 0;         // 10 x compute capability; multiprocessors
    bool hopper = false;         // sm_90a, and this binary was built for it: wgmma
    bool overlap = false;        // sm_90 and up: a kernel may start before the one ahead of it has ended
    float* partial = nullptr;    // of products whose sums several blocks share, PARTIAL_BYTES
    int* arrived = nullptr;      // ... and how many of them are done: (MAX_TILES), zero between kernels
    float* attention = nullptr;  // the same for attention, see attention_scratch
    int* attention_arrived = nullptr;
    bf16* unpacked = nullptr;    // of packed weights, a matrix at a time: see packed.h
    size_t unpacked_numbers = 0;
    bf16* rounded = nullptr;     // what FP8 weights are multiplied by, with Context::fp8_activations
    size_t rounded_numbers = 0;
    struct { const bf16* x = nullptr; int N = 0, in = 0; } ahead; // activations that it has already: see E4M3Rows
    bf16* widened = nullptr;     // one layer's FP8 keys and values as bf16: see widen_pages_kernel
    size_t widened_numbers = 0;
};
constexpr size_t PARTIAL_BYTES = 32 << 20;
constexpr int MAX_TILES = 4096;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA
#define BLOCKS_OF_1024 2 // that a multiprocessor should hold: two rows of draws at a time
__device__ int has_wgmma = 1; // whether the code that this GPU runs has the instructions of sm_90a
#else
#define BLOCKS_OF_1024 1
__device__ int has_wgmma = 0;
#endif

// Launches a kernel. With `overlap` (programmatic dependent launch) its blocks may start as soon as every block of the
// kernel before it has called let_next_start or ended: what comes before its own wait_for_previous then runs beside
// that kernel. Every block of every kernel waits, even one with nothing to do, and writes nothing before: so when a
// kernel has completed, all kernels before it have.
//
// What may be read before the wait? The kernel before may have called let_next_start before its own wait, and so on:
// many kernels can be under way at once, back to the last one without `overlap`, copy, memset or beginning of a graph.
// That one starts when all before it has completed, and what follows starts later than it. Hence the rule: before its
// wait a kernel reads only what no kernel since then writes. forward begins without `overlap` (embed); so safe are
// - the batch (tokens, positions, sequences, slots, block table): written by copies, by serve's prepare_kernel or by
//   the sample_kernel of the step before, all of which are ahead of embed;
// - weights: adamw_kernel writes them, after backward, and the next forward begins with embed;
// - keys and values of earlier forwards. Those of this one's own tokens are read after the wait.
//
// `cluster` neighbouring blocks (Hopper: up to 8) run at once, and reach each other's shared memory.
template <class... P, class... A>
void launch_clusters(Context& ctx, bool overlap, int cluster, void (*kernel)(P...), dim3 grid, int threads,
                     size_t shared, A... args) {
    if (shared > 40 * 1024) // with a kernel's own arrays it may pass the 48 KB that need no asking
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    cudaLaunchAttribute attributes[2];
    int count = 0;
    if (overlap) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {(unsigned)cluster, 1, 1};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
    config.stream = ctx.gpu->stream, config.attrs = attributes, config.numAttrs = count;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, P(args)...));
    CUDA_CHECK(cudaGetLastError());
}
template <class... P, class... A>
void launch_kernel(Context& ctx, bool overlap, void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... args) {
    launch_clusters(ctx, overlap, 1, kernel, grid, threads, shared, args...);
}
template <class... P, class... A>
void launch(Context& ctx, void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... args) {
    launch_kernel(ctx, ctx.gpu->overlap, kernel, grid, threads, shared, args...);
}
// What f launches, as a graph that can be launched again and again.
template <class F> cudaGraphExec_t record_graph(Context& ctx, F f) {
    cudaGraph_t recorded;
    cudaGraphExec_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(ctx.gpu->stream, cudaStreamCaptureModeThreadLocal));
    f();
    CUDA_CHECK(cudaStreamEndCapture(ctx.gpu->stream, &recorded));
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
    asm volatile("{ .reg .pred there; setp.ne.u32 there, %5, 0;\n"
                 "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
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
__device__ inline uint32_t pack_e4m3(float first, float second) { // the first in the lower byte; see float_to_e4m3
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return float_to_e4m3(first) | (uint32_t)float_to_e4m3(second) << 8;
#endif
}

// d += a b with a (16,16), b (16,8), d (16,8) spread over a warp: lane 4g + t holds of d rows g (d[0], d[1]) and
// g + 8 (d[2], d[3]), columns 2t, 2t + 1; of a rows g (a0, a2) and g + 8 (a1, a3), pairs of columns 2t (a0, a1) and
// 2t + 8 (a2, a3); of b column g, pairs of rows 2t (b0) and 2t + 8 (b1). PTX ISA: mma.m16n8k16, .bf16
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// x is made before what follows: a product that all lanes have to compute does not move behind a branch of some.
__device__ __forceinline__ void settle(float& x) { asm volatile("" : "+f"(x)); }

// Four 8 x 8 matrices of bf16 from shared memory; lane l names row l % 8 of matrix l / 8. As mma wants them, or
// transposed.
#define LDMATRIX(name) \
    asm volatile(name " {%0,%1,%2,%3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address))
__device__ inline void ldmatrix(uint32_t (&m)[4], uint32_t address) {
    LDMATRIX("ldmatrix.sync.aligned.m8n8.x4.shared.b16");
}
__device__ inline void ldmatrix_transposed(uint32_t (&m)[4], uint32_t address) {
    LDMATRIX("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16");
}
#undef LDMATRIX

// An mbarrier in shared memory (PTX ISA, "mbarrier"). A phase of it ends when as many have arrived as it was begun with
// and all bytes expected in it have come; then the next begins. Whoever waits names the parity of the phase that is to
// end: 0 for the first, 1 for the second, 0 for the third. Before the first has ended, parity 1 is past. From sm_80 on;
// bytes are expected from sm_90 on.
__device__ inline void barrier_begin(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barriers_begun() { // all threads and copies see it; before the block's next __syncthreads
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expecting([[maybe_unused]] uint32_t barrier, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
#define BARRIER_WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define BARRIER_WAIT "mbarrier.test_wait.parity.shared::cta.b64"
#endif
    asm volatile("{ .reg .pred done;\n"
                 "again: " BARRIER_WAIT " done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
#undef BARRIER_WAIT
}

// ---- Hopper's own instructions: sm_90a only, elsewhere nothing.
#ifdef HAVE_WGMMA
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_ASM(...)
#endif

// Stages in shared memory that are filled and used in turn: which one is next, and the parity of its phase.
template <int STAGES> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int stages = STAGES, int by = 1) { // stages: fewer of them, always the same
        if ((stage += by) >= stages) stage -= stages, parity ^= 1;
    }
};

// The Tensor Memory Accelerator copies a box of an array to shared memory (PTX ISA, "cp.async.bulk.tensor"): from place
// x, y, .. on as many numbers of each dimension as the map says, swizzled as wgmma wants them, zeros past the array's
// end. The barrier counts the bytes of the whole box. One thread asks for it.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
__device__ inline void copy_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y, int z) {
    HOPPER_ASM("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3,%4,%5}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ inline void copy_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y, int z, int u) {
    HOPPER_ASM("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3,%4,%5,%6}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
// The same by what the L2 cache shall do with the box (the values are CUTLASS's, cute::TMA::CacheHintSm90).
[[maybe_unused]] constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000;
__device__ inline void copy_box_by(uint64_t policy, uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x,
                                   int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%3,%4}], [%2], %5;"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(policy) : "memory");
}
// ... to the same place of both blocks of a cluster of two, each of whose barriers there counts the bytes.
__device__ inline void copy_box_to_both(uint64_t policy, uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                        int x, int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               ".L2::cache_hint [%0], [%1, {%3,%4}], [%2], %6, %5;"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(policy), "h"((uint16_t)3) : "memory");
}
// ... and back, as a part of the group that ends at the next commit_boxes. What is past the array's end is left out.
__device__ inline void store_box(const CUtensorMap& map, uint32_t shared, int x, int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];"
               ::"l"(&map), "r"(shared), "r"(x), "r"(y) : "memory");
}
__device__ inline void commit_boxes() { HOPPER_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until shared memory has been read by all of this thread's groups but the last few.
template <int LAST> __device__ inline void wait_for_boxes() {
    HOPPER_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(LAST) : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
    HOPPER_ASM("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The blocks of a cluster (PTX ISA, "barrier.cluster"): all threads that have not ended meet; what they wrote to shared
// memory before, all may read after it. Numbers of the shared memory of block `rank`, at our own `address`.
__device__ inline void cluster_arrive() { HOPPER_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { HOPPER_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void read_block(float (&v)[4], uint32_t at, int rank) {
    HOPPER_ASM("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there]; }"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at), "r"(rank) : "memory");
}
// Our own `address` as it is in block `rank`, for send_block: four numbers go to `to` there, and `barrier`, there too,
// counts their bytes (PTX ISA, "st.async"). The block must have begun, and not end before it waited for them.
__device__ inline uint32_t block_address(uint32_t address, int rank) {
    uint32_t there = 0;
    HOPPER_ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Arrives at another block's barrier, by its block_address. (Not release.cluster, which would wait for all
// that the thread has written: what follows are copies by TMA, and those it does not order.)
__device__ inline void barrier_arrive_there(uint32_t barrier) {
    HOPPER_ASM("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void send_block(uint32_t to, const float (&v)[4], uint32_t barrier) {
    HOPPER_ASM("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
// The map of an array of 2 to 4 dimensions, the first of them contiguous: of each its size, how many numbers lie from
// one to the next (the first: 1), and how many a box has, of the first 64 or 32: rows of 128 or 64 bytes, so swizzled.
struct Dimension {
    size_t size, step;
    int box;
};
inline CUtensorMap tensor_map(const void* array, CUtensorMapDataType type, int number_bytes, CUtensorMapSwizzle swizzle,
                              std::initializer_list<Dimension> dimensions) {
    static const auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
#else
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found));
#endif
        return (decltype(&cuTensorMapEncodeTiled))f;
    }();
    cuuint64_t size[4], bytes[4];
    cuuint32_t box[4], step[4] = {1, 1, 1, 1};
    int n = 0;
    for (const Dimension& d : dimensions) size[n] = d.size, bytes[n] = d.step * (size_t)number_bytes, box[n++] = d.box;
    CUtensorMap map;
    if (encode(&map, type, n, (void*)array, size, bytes + 1, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        DIE("the GPU's driver has no map for an array of %zu x %zu", (size_t)size[1], (size_t)size[0]);
    return map;
}
inline CUtensorMap tensor_map(const bf16* array, std::initializer_list<Dimension> dimensions) {
    const auto swizzle = dimensions.begin()->box == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    return tensor_map(array, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, swizzle, dimensions);
}
inline CUtensorMap tensor_map(const float* array, std::initializer_list<Dimension> dimensions) {
    return tensor_map(array, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, CU_TENSOR_MAP_SWIZZLE_128B, dimensions);
}

// Registers move between the warpgroups of a block (all four warps of one say it; a multiple of 8 each thread).
template <int REGISTERS> __device__ inline void keep_registers() {
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ inline void take_registers() {
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): 128 threads multiply what lies in shared memory,
// without ldmatrix and at the full rate of the tensor cores.
// The operand at `shared`: 128 bytes a row in the 128-byte swizzle (chunk c of 16 bytes of row r lies in place
// c ^ r % 8), groups of eight rows `group` bytes apart (SBO). If it is transposed, rows are steps of the contraction,
// and panels of 64 columns lie `panel` bytes apart (LBO).
__device__ inline uint64_t wgmma_operand(uint32_t shared, int panel, int group = 1024) {
    const uint64_t at = shared >> 4 & 0x3fff, lbo = panel >> 4, sbo = group >> 4, swizzle = 1;
    return at | lbo << 16 | sbo << 32 | swizzle << 62;
}
// Of 64 bytes a row in the 64-byte swizzle (chunk c of row r lies in place c ^ r / 2 % 4), transposed, 32 columns.
__device__ inline uint64_t wgmma_narrow_operand(uint32_t shared) {
    const uint64_t at = shared >> 4 & 0x3fff, sbo = 512 >> 4, swizzle = 2;
    return at | sbo << 32 | swizzle << 62;
}
// d (64,N) = a (64,16) b (16,N), added to d if `add`. Warp w of the four has rows 16 w .. 16 w + 15, each lane what mma
// gives it; d[j] is of columns 8 j .. 8 j + 7. It reads shared memory and runs on after the instruction: "memory" keeps
// the compiler from moving stores to shared memory past it, wgmma_settle from using d too early.
#define F1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define F8(j) F1(j), F1(j + 1), F1(j + 2), F1(j + 3), F1(j + 4), F1(j + 5), F1(j + 6), F1(j + 7)
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define WGMMA(n, sums, a, b, add, a_cols, b_cols, ...) \
    HOPPER_ASM("{ .reg .pred add; setp.ne.b32 add, " add ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" sums "}, " \
               a ", " b ", add, 1, 1, " a_cols ", " b_cols "; }" \
               : __VA_ARGS__ : "l"(a_at), "l"(b_at), "r"((int)more), "n"((int)A_COLS), "n"((int)B_COLS) : "memory")
template <int N, bool A_COLS, bool B_COLS>
__device__ __forceinline__ void wgmma(float (&d)[N / 8][4], uint64_t a_at, uint64_t b_at, bool more) {
    if constexpr (N == 32)
        WGMMA("32", TEN() "%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19", "%20", F1(0), F1(1), F1(2), F1(3));
    else if constexpr (N == 64)
        WGMMA("64", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", "%35", "%36", F8(0));
    else if constexpr (N == 96)
        WGMMA("96", TEN() TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47", "%48", "%49", "%50", "%51", "%52",
              F8(0), F1(8), F1(9), F1(10), F1(11));
    else if constexpr (N == 128)
        WGMMA("128", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65", "%66", "%67", "%68",
              F8(0), F8(8));
    else if constexpr (N == 192)
        WGMMA("192", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95", "%96",
              "%97", "%98", "%99", "%100", F8(0), F8(8), F8(16));
    else
        WGMMA("256", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
              "%120,%121,%122,%123,%124,%125,%126,%127", "%128", "%129", "%130", "%131", "%132",
              F8(0), F8(8), F8(16), F8(24));
}
// The same with a in registers, as mma has it.
#define WGMMA_REGISTERS(n, sums, a0, a1, a2, a3, b, add, b_cols, ...) \
    HOPPER_ASM("{ .reg .pred add; setp.ne.b32 add, " add ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" sums "}, " \
               "{" a0 "," a1 "," a2 "," a3 "}, " b ", add, 1, 1, " b_cols "; }" \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_at), "r"((int)more), "n"((int)B_COLS) \
               : "memory")
template <int N, bool B_COLS>
__device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b_at, bool more) {
    static_assert(N == 64 || N == 128, "a row of columns that somebody needs");
    if constexpr (N == 64)
        WGMMA_REGISTERS("64", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", "%35", "%36", "%37", "%38", F8(0));
    else
        WGMMA_REGISTERS("128", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65", "%66", "%67",
                        "%68", "%69", "%70", F8(0), F8(8));
}
// d (64,128) = a (64,32) b (32,128) of e4m3, added to d if `more`: a step has 32 numbers, and as many bytes.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[16][4], uint64_t a_at, uint64_t b_at, bool more) {
    HOPPER_ASM("{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
               "%60,%61,%62,%63}, %64, %65, add, 1, 1; }"
               : F8(0), F8(8) : "l"(a_at), "l"(b_at), "r"((int)more) : "memory");
}
#undef WGMMA_REGISTERS
#undef WGMMA
#undef TEN
#undef F8
#undef F1
// Before the first wgmma of a group: the sums' registers have been written.
__device__ inline void wgmma_begin() {
    HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}
// The group ends.
__device__ inline void wgmma_commit() {
    HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// What was written to shared memory before, wgmma may read.
__device__ inline void shared_to_async() { HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }
// Waits until all groups but the last few are done.
template <int LAST> __device__ inline void wgmma_wait() {
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory");
}
// The compiler moves no use of the sums across this.
template <int M, int N> __device__ inline void wgmma_settle(float (&d)[M][N][4]) {
    #pragma unroll
    for (int i = 0; i < M * N * 4; i++) asm volatile("" : "+f"(d[i / 4 / N][i / 4 % N][i % 4])::"memory");
}

// 16 bytes from global to shared memory in the background; zeros if not `there`.
__device__ inline void copy_async(uint32_t shared, const void* global, bool there) {
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
template <int BYTES> // 4 or 8
__device__ inline void copy_few_async(uint32_t shared, const void* global, bool there) {
    const int bytes = there ? BYTES : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES), "r"(bytes)
                 : "memory");
}
// Arrives, as one of those that the barrier was begun with, when all of this thread's copies so far are there.
__device__ inline void barrier_arrive_with_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int YOUNGER> __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGER) : "memory");
}

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_shared(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_half(uint32_t at, uint32_t v) { // its lower 16 bits
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((uint16_t)v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, const float4& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

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

// Over the four lanes of a quad, which hold a row of mma's d between them; for all four.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
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
// must come from the L2 cache: __ldcg.) With THREADS it is the block's first so many threads.
template <int THREADS = 0> __device__ inline bool last_to_arrive(int* arrived, int blocks) {
    __shared__ int last;
    const auto sync = [] {
        if (THREADS) asm volatile("barrier.sync 1, %0;" ::"n"(THREADS) : "memory");
        else __syncthreads();
    };
    sync();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
        last = before == blocks - 1;
        if (last) *arrived = 0;
    }
    sync();
    return last;
}

// ---- Memory
inline void* gpu_allocate(size_t bytes, const char* what) {
    size_t have = 0, all = 0;
    void* base = nullptr;
    CUDA_CHECK(cudaMemGetInfo(&have, &all));
    if (bytes > have || cudaMalloc(&base, bytes) != cudaSuccess)
        DIE("%s needs %.2f GB of GPU memory and %.2f of its %.2f GB are free", what, (double)bytes / 1e9,
            (double)have / 1e9, (double)all / 1e9);
    CUDA_CHECK(cudaMemset(base, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize()); // our streams do not wait for the one that clears it
    return base;
}
inline void gpu_release(void* p) { cudaFree(p); }
template <class U> std::shared_ptr<U[]> gpu_host_memory(size_t n) {
    void* base = nullptr;
    CUDA_CHECK(cudaMallocHost(&base, n * sizeof(U)));
    return {(U*)base, [](U* p) { cudaFreeHost(p); }};
}
inline void gpu_copy(Context& ctx, void* to, const void* from, size_t bytes, bool to_host) {
    const cudaMemcpyKind kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, ctx.gpu->stream)); // (the CPU's side is not pinned: it is read
    if (to_host) CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream));     // before this returns)
}
inline void gpu_clear(Context& ctx, void* p, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, ctx.gpu->stream));
}

// ==================================================================================================== 9 Small kernels
// In Book I's order (the backward pass's: backward.h). Each reads and writes its arrays once, so memory bounds them. "A
// block a token" means: block n computes row n, its threads share the channels.

// ---- embed. A block a token.
__global__ void embed_kernel(float* x, const bf16* table, Batch b, int C) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    if (b.seq[n] < 0) return;
    const bf16* row = table + (size_t)b.token[n] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) x[(size_t)n * C + i] = to_acc(row[i]);
}
inline void packed_embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b); // packed.h
inline void embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b, int C) {
    if (table.format != Format::PLAIN) return packed_embed_gpu(ctx, x, table, b);
    // A forward's first kernel waits for all before it, so that those after it may read early: see launch_kernel.
    launch_kernel(ctx, false, embed_kernel, b.N, 128, 0, x, table.w[0], b, C);
}

// ---- Activations (N,in) as e4m3 and their groups' scales (groups, pitch), as Book I's round_activations has them.
struct E4M3Rows {
    uint8_t* q = nullptr;
    float* scale = nullptr;
    int pitch = 0;
};
// Of a group whose largest number has these bits, without sign; from 0x7f80 on it is not finite.
struct GroupRounding {
    float by, factor;
    __device__ explicit GroupRounding(uint32_t largest) {
        const bool finite = largest < 0x7f80;
        const int e = kv_exponent(finite ? low(largest) : 0);
        by = __uint_as_float((uint32_t)(127 - e) << 23);
        factor = finite ? __uint_as_float((uint32_t)(127 + e) << 23) : NAN;
    }
    __device__ uint32_t two(uint32_t pair) const { return pack_e4m3(low(pair) * by, high(pair) * by); }
};
__device__ __forceinline__ uint32_t larger(uint32_t largest, uint32_t pair) {
    return max(largest, max(pair & 0x7fff, pair >> 16 & 0x7fff));
}
template <int LANES> __device__ __forceinline__ uint32_t largest_of(uint32_t largest) { // neighbours, for all of them
    #pragma unroll
    for (int other = LANES / 2; other; other /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, other));
    return largest;
}

// ---- rmsnorm of `rows` rows of C, by all warps of a block. put(row, i, four) gets numbers i .. i + 3 of a row, from
// whole warps, which have 128 neighbours: a group; i may be past the end.
// The squares are added in pieces of 128 numbers, a warp each, and the pieces in order: the bits do not depend on the
// number of warps. A warp keeps its first pieces in registers.
// pieces: rows * ceil(C / 128) floats of shared memory. C is a multiple of 8. Ends with a barrier.
template <class Put>
__device__ inline void norm_rows(Put put, const float* x, const bf16* w, float* pieces, int rows, int C, float eps) {
    constexpr int KEPT = 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int per_row = (C + 127) / 128, all = rows * per_row;
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
        const uint2 u = i < C ? *(const uint2*)(w + i) : uint2{};
        put(row, i, make_uint2(pack(v.x * scale * low(u.x), v.y * scale * high(u.x)),
                               pack(v.z * scale * low(u.y), v.w * scale * high(u.y))));
    };
    #pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (warp + k * warps < all) scaled(warp + k * warps, kept[k]);
    for (int p = warp + KEPT * warps; p < all; p += warps) scaled(p, load(p));
    __syncthreads();
}

struct PlainRows { // C numbers, ld apart; also in shared memory
    bf16* y;
    int ld, C;
    __device__ void operator()(int row, int i, uint2 four) const {
        if (i < C) *(uint2*)(y + (size_t)row * ld + i) = four;
    }
};
struct RoundedRow { // token n
    E4M3Rows to;
    int n, C;
    __device__ void operator()(int, int i, uint2 four) const {
        const GroupRounding rounding(largest_of<32>(larger(larger(0, four.x), four.y)));
        if (i >= C) return;
        *(uint32_t*)(to.q + (size_t)n * C + i) = rounding.two(four.x) | rounding.two(four.y) << 16;
        if (threadIdx.x % 32 == 0) to.scale[(size_t)(i / 128) * to.pitch + n] = rounding.factor;
    }
};
// A block a token.
__global__ void rmsnorm_kernel(bf16* out, const float* x, const bf16* w, int C, float eps) {
    extern __shared__ float pieces[];
    let_next_start();
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * C;
    norm_rows(PlainRows{out + at, C, C}, x + at, w, pieces, 1, C, eps);
}
__global__ void rmsnorm_rounded_kernel(E4M3Rows out, const float* x, const bf16* w, int C, float eps) {
    extern __shared__ float pieces[];
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    norm_rows(RoundedRow{out, n, C}, x + (size_t)n * C, w, pieces, 1, C, eps);
}
// The same where there are many: a warp a token, so that nobody waits for other warps and more loads are on their way.
// The same bits. meanwhile() runs while the first ones are.
template <class Meanwhile>
__device__ __forceinline__ void norm_row(bf16* out, const float* x, const bf16* w, int C, float eps,
                                         Meanwhile meanwhile) {
    constexpr int KEPT = 8; // pieces of 128 numbers
    const int lane = threadIdx.x % 32;
    const auto load = [&](int p) {
        const int i = p * 128 + lane * 4;
        return i < C ? *(const float4*)(x + i) : float4{};
    };
    const auto square = [](const float4& v) { return warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w); };
    float4 kept[KEPT];
    #pragma unroll
    for (int p = 0; p < KEPT; p++) kept[p] = load(p);
    meanwhile();
    float sum = 0;
    #pragma unroll
    for (int p = 0; p < KEPT; p++) sum += square(kept[p]); // (a piece past the end adds 0)
    for (int p = KEPT; p * 128 < C; p++) sum += square(load(p));
    const float scale = 1 / sqrtf(sum / C + eps);
    const auto store = [&](int p, const float4& v) {
        const int i = p * 128 + lane * 4;
        if (i >= C) return;
        const uint2 u = *(const uint2*)(w + i);
        *(uint2*)(out + i) = make_uint2(pack(v.x * scale * low(u.x), v.y * scale * high(u.x)),
                                        pack(v.z * scale * low(u.y), v.w * scale * high(u.y)));
    };
    #pragma unroll
    for (int p = 0; p < KEPT; p++) store(p, kept[p]);
    for (int p = KEPT; p * 128 < C; p++) store(p, load(p));
}
__global__ void __launch_bounds__(256) rmsnorm_warp_kernel(bf16* out, const float* x, const bf16* w, int N, int C,
                                                           float eps) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * 8 + threadIdx.x / 32;
    if (n < N) norm_row(out + (size_t)n * C, x + (size_t)n * C, w, C, eps, [] {});
}
inline bool norms_by_warps(Context& ctx, int N) { return N >= 16 * ctx.gpu->sms; }
inline int norm_threads(int C) { return std::clamp((C + 255) / 256 * 32, 256, 1024); } // a warp keeps what it has
inline void rmsnorm_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, int N, int C, float eps) {
    if (norms_by_warps(ctx, N))
        return launch(ctx, rmsnorm_warp_kernel, (N + 7) / 8, 256, 0, out, x, w, N, C, eps);
    launch(ctx, rmsnorm_kernel, N, norm_threads(C), (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}
inline void rmsnorm_rounded_gpu(Context& ctx, const E4M3Rows& out, const float* x, const bf16* w, int N, int C,
                                float eps) {
    launch(ctx, rmsnorm_rounded_kernel, N, norm_threads(C), (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}

// ---- qknorm_rope_kv. A head of D numbers in a warp: lane l holds P = D / 64 pairs of its planes, u = head[i] and v =
// head[i + D/2] for i = P l .. P l + P - 1.
template <int P> struct WarpAngles { // of those planes
    struct alignas(8 * P) Stored { float x[2 * P]; } both;
    __device__ explicit WarpAngles(const float* angles) : both(((const Stored*)angles)[threadIdx.x % 32]) {}
    __device__ float cosine(int p) const { return both.x[2 * p]; }
    __device__ float sine(int p) const { return both.x[2 * p + 1]; }
};
template <int D> struct WarpHead {
    static constexpr int P = D / 64;
    float u[P], v[P];

    struct alignas(2 * P) Stored { bf16 x[P]; }; // (what a lane has lies together: one access)
    __device__ void load(const bf16* head) {
        const Stored a = ((const Stored*)head)[threadIdx.x % 32], b = ((const Stored*)head)[threadIdx.x % 32 + 32];
        for (int p = 0; p < P; p++) u[p] = to_acc(a.x[p]), v[p] = to_acc(b.x[p]);
    }
    __device__ void store(bf16* head) const {
        Stored a, b;
        for (int p = 0; p < P; p++) a.x[p] = round_bf16(u[p]), b.x[p] = round_bf16(v[p]);
        ((Stored*)head)[threadIdx.x % 32] = a, ((Stored*)head)[threadIdx.x % 32 + 32] = b;
    }
    // `weights` have been loaded as a head is.
    __device__ void norm_rope(const WarpHead& weights, const WarpAngles<P>& angle, float eps) {
        float squares = 0;
        for (int p = 0; p < P; p++) squares += u[p] * u[p] + v[p] * v[p];
        const float scale = 1 / sqrtf(warp_sum(squares) / D + eps);
        for (int p = 0; p < P; p++) {
            const float a = u[p] * scale * weights.u[p], b = v[p] * scale * weights.v[p];
            u[p] = a * angle.cosine(p) - b * angle.sine(p), v[p] = b * angle.cosine(p) + a * angle.sine(p);
        }
    }
};

// The rows of a page and head in a layer's FP8 cache (KVRow).
template <int D> __device__ uint8_t* fp8_block(bf16* cache, int page, int head, int K) {
    return (uint8_t*)cache + ((size_t)page * K + head) * PAGE * (D + 1);
}
// A WarpHead, rounded to bf16, as a row of such a cache (Book I's store_kv): numbers, and the byte of their exponent.
template <int D> struct WarpFp8Head {
    static constexpr int P = D / 64;
    uint8_t u[P], v[P], byte;
    __device__ explicit WarpFp8Head(const WarpHead<D>& head) {
        float largest = 0;
        bool finite = true;
        const auto look = [&](float x) {
            x = fabsf(to_acc(round_bf16(x)));
            finite &= x < INFINITY, largest = fmaxf(largest, x);
        };
        for (int p = 0; p < P; p++) look(head.u[p]), look(head.v[p]);
        for (int other = 16; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
        finite = __all_sync(~0u, finite);
        const int e = kv_exponent(finite ? largest : 0);
        const auto round = [&](float x) { return float_to_e4m3(ldexpf(to_acc(round_bf16(x)), -e)); };
        for (int p = 0; p < P; p++) u[p] = round(head.u[p]), v[p] = round(head.v[p]);
        byte = (uint8_t)(finite ? e + 128 : 0);
    }
    __device__ void store(uint8_t* row, uint8_t* exponent) const {
        for (int p = 0; p < P; p++) {
            const int i = threadIdx.x % 32 * P + p;
            row[i] = u[p], row[i + D / 2] = v[p];
        }
        if (threadIdx.x % 32 == 0) *exponent = byte;
    }
    __device__ void store(bf16* cache, int slot, int head, int K) const {
        uint8_t* const block = fp8_block<D>(cache, slot / PAGE, head, K);
        store(block + slot % PAGE * D, block + PAGE * D + slot % PAGE);
    }
};
// 2^(e - 128), of which 0 says that the row is NaN
__device__ inline float fp8_factor(int e) { return e ? __uint_as_float((uint32_t)(e - 1) << 23) : NAN; }

// A warp two heads of a token, from row `first` on: four loads on their way, before it is known whether the row is
// spare (one wait instead of two; of spare rows nothing is stored). Bound by the memory's speed.
template <int D, bool FP8>
__global__ void qknorm_rope_kv_kernel(bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight,
                                      const bf16* k_weight, const float* rope, Batch b, int first, int H, int K,
                                      float eps) {
    let_next_start();
    wait_for_previous();
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, heads = H + 2 * K, twos = (heads + 1) / 2;
    const int n = first + task / twos, h0 = task % twos * 2;
    if (n >= b.N) return;
    const int slot = b.slot[n], pos = b.pos[n];
    const bool spare = b.seq[n] < 0;
    WarpHead<D> head[2], weights[2];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int h = min(h0 + i, heads - 1);
        head[i].load(qkv + ((size_t)n * heads + h) * D);
        weights[i].load(h < H ? q_weight : k_weight);
    }
    const WarpAngles<D / 64> angle(rope + (size_t)(spare ? 0 : pos) * D);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int h = h0 + i;
        if (h < H + K) head[i].norm_rope(weights[i], angle, eps);
        if (spare || h >= heads) return;
        const size_t at = h < H ? 0 : kv_offset(slot / PAGE, (h - H) % K, slot % PAGE, K, D);
        if (FP8 && h >= H) {
            WarpFp8Head<D>(head[i]).store(h < H + K ? keys : values, slot, (h - H) % K, K);
            continue;
        }
        head[i].store(h < H ? q + ((size_t)n * H + h) * D : h < H + K ? keys + at : values + at);
    }
}
inline void qknorm_rope_kv_gpu(Context& ctx, bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight,
                               const bf16* k_weight, const float* rope, const Batch& b, int H, int K, int D, float eps,
                               int first = 0) {
    const int blocks = (int)(((int64_t)(b.N - first) * ((H + 2 * K + 1) / 2) + 7) / 8);
    const auto kernel = b.fp8 ? (D == 128 ? qknorm_rope_kv_kernel<128, true> : qknorm_rope_kv_kernel<64, true>)
                              : D == 128 ? qknorm_rope_kv_kernel<128, false> : qknorm_rope_kv_kernel<64, false>;
    launch(ctx, kernel, blocks, 256, 0, q, keys, values, qkv, q_weight, k_weight, rope, b, first, H, K, eps);
}

// ---- head's first half: the rows that are wanted, one after another. A block a row.
__global__ void pick_rows_kernel(bf16* picked, const bf16* x, const int* rows, int C) {
    let_next_start();
    wait_for_previous();
    const bf16* row = x + (size_t)rows[blockIdx.x] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) picked[(size_t)blockIdx.x * C + i] = row[i];
}

// ========================================================================================================= 10 Products
// Book I's product, y[n][r] = sum_i x[n][i] W[r][i], for N tokens n and `out` rows r of W; `in` is what is summed over.
// The blocks of a Linear lie one after another on a GPU (Weights::upload), so W is one matrix. A product of the
// backward pass has its own `in` and `out`: dx = dy W sums over W's rows, dW = dy^T x over the tokens.
// Three kernels compute them all: stream_kernel for up to 16 tokens, at the speed at which W comes from memory, and for
// more, at the speed of the tensor cores, tile_kernel, or on Hopper hopper_kernel. What becomes of a sum is said by the
// kernel's epilogue.

// ---- Epilogues. A kernel takes its epilogue by value, so that each thread has a copy, and calls these functions of
// it. Here are the defaults. An epilogue for stream_kernel adds `one`, one for tile_kernel and hopper_kernel `four`:
//
//   one(inside, n, r, y, second)   Sum y of token n and row r, from one thread. Whole warps call it, eight neighbouring
//                                  lanes for the same n and rows 8 q .. 8 q + 7, so that they can shuffle; `inside`
//                                  is false where n or r is past the end.
//   four(n, r, y, second)          Sums of token n and rows r .. r + 3 (r % 4 = 0), from one thread; none past the end.
//
// What becomes of four sums, each by itself, is up to OUTPUTS times four numbers: values(y, second, put) calls put(k,
// four) for each k, and they belong at output(k). So hopper_kernel can have whole boxes of them written in the
// background.
// `second` is with PAIR the sum of up (y is that of gate), with ADDS what old or old_four returned, else zero.
template <class T> struct Output {
    T* at; // or null: not wanted
    size_t ld;
    __device__ T* of(int n, int r) const { return at + n * ld + r; }
};
struct Epilogue {
    static constexpr int OUTPUTS = 0;            // `four` is of `values`; a new `four` needs 0
    using Four = uint2;                          // ... and they are bf16; with ADDS float4: float
    static constexpr bool PAIR = false;          // W is (2 out, in), gate over up: a thread gets the sums of both
    static constexpr bool ADDS = false;          // the sum is added to a number that the kernel asks for early
    static constexpr bool ADAPTS = true;         // W may have an adapter, see BesideAdapter
    static constexpr bool MASKS = false;         // `four`'s kernels mask the sums of each module of an adapter
    static constexpr bool PARTS = false;         // ... and make what a softmax needs of each 64 rows
    static constexpr bool ROUNDS = false;        // ... and leave output 0 as e4m3 too, in `rounded`: hopper_kernel
    static constexpr int MOST_BLOCKS = INT_MAX;  // stream_kernel is launched with no more blocks

    // stream_kernel: all threads, once, after wait_for_previous; a barrier follows before any `one`.
    __device__ void begin() {}
    // stream_kernel: all threads, once, after their last `one` (there is no barrier between).
    __device__ void end(int /* N */) {}
    // With ADDS, the number, or the four, that will be `second`. Asked for before the sums are complete, by the thread
    // that will hand them over; n and r are not past the end.
    __device__ float old(int /* n */, int /* r */) const { return 0; }
    __device__ float4 old_four(int /* n */, int /* r */) const { return {}; }
    // With MASKS: each `rank` of the further columns are a module's, whose sums are multiplied by `scale` where `masks`
    // keeps them (r being its number), else left out. The columns come after all others then (TileArgs::more_last).
    static constexpr DropoutMasks masks = {nullptr, 0, 0};
    static constexpr int rank = 0;
    static constexpr float scale = 1;
    // With PARTS `four` gets w = e^(y - from(n)) of the sums y of token n; part() of rows 64 piece .. 64 piece + 63 the
    // largest y and the sum of w: from one thread, n and 64 piece not past the end. And chosen(n, y) is called once,
    // with the sum of row chosen_row(n).
    __device__ float from(int /* n */) const { return 0; }
    __device__ void part(int /* n */, int /* piece */, float /* largest */, float /* sum */) {}
    __device__ int chosen_row(int /* n */) const { return -1; }
    __device__ void chosen(int /* n */, float /* y */) {}
    // tile_kernel, hopper_kernel: all threads, first. If true the kernel does nothing.
    __device__ bool skipped() const { return false; }
};

__device__ inline void store_one(float* to, float y) { *to = y; }
__device__ inline void store_one(bf16* to, float y) { *to = round_bf16(y); }
__device__ inline void store_four(float* to, const float4& y) { *(float4*)to = y; }
__device__ inline void store_four(bf16* to, const float4& y) {
    *(uint2*)to = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
}

__device__ inline void round_four(float4& to, const float4& y) { to = y; }
__device__ inline void round_four(uint2& to, const float4& y) { to = make_uint2(pack(y.x, y.y), pack(y.z, y.w)); }
template <class Epilogue> // an epilogue's `four`, of `values`
__device__ __forceinline__ void put_values(Epilogue& epilogue, int n, int r, const float4& y, const float4& second) {
    epilogue.values(y, second, [&](int k, const float4& v) {
        const auto to = epilogue.output(k);
        if (to.at) store_four(to.of(n, r), v);
    });
}

template <class T> struct StoreEpilogue : Epilogue { // linear: out = y; in float the head's logits
    T* out; // (N, ld)
    size_t ld;
    static constexpr int OUTPUTS = std::is_same_v<T, bf16>;
    static constexpr bool ADAPTS = std::is_same_v<T, bf16>;
    StoreEpilogue(T* out, size_t ld) : out(out), ld(ld) {}
    BOTH Output<T> output(int) const { return {out, ld}; }
    template <class Put> __device__ void values(const float4& y, const float4&, Put put) { put(0, y); }
    __device__ void one(bool inside, int n, int r, float y, float) { if (inside) store_one(out + n * ld + r, y); }
    __device__ void four(int n, int r, const float4& y, const float4&) { store_four(out + n * ld + r, y); }
};

struct AddEpilogue : Epilogue { // linear_add: out = residual + y; linear_backward_weight: dW += y
    static constexpr bool ADDS = true;
    float* out;            // (N, ld)
    const float* residual; // (N, ld), may be out
    size_t ld;
    AddEpilogue(float* out, const float* residual, size_t ld) : out(out), residual(residual), ld(ld) {}
    __device__ float old(int n, int r) const { return residual[n * ld + r]; }
    __device__ float4 old_four(int n, int r) const { return *(const float4*)(residual + n * ld + r); }
    __device__ void one(bool inside, int n, int r, float y, float old) { if (inside) out[n * ld + r] = old + y; }
    static constexpr int OUTPUTS = 1;
    using Four = float4;
    BOTH Output<float> output(int) const { return {out, ld}; }
    template <class Put> __device__ void values(const float4& y, const float4& old, Put put) {
        put(0, make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w));
    }
    __device__ void four(int n, int r, const float4& y, const float4& old) { put_values(*this, n, r, y, old); }
};

struct AddTransposedEpilogue : Epilogue { // linear_backward_weight: out, transposed, += y
    static constexpr bool ADDS = true;
    float* out; // (., ld)
    size_t ld;
    AddTransposedEpilogue(float* out, size_t ld) : out(out), ld(ld) {}
    __device__ float4 old_four(int n, int r) const {
        const float* at = out + r * ld + n;
        return make_float4(at[0], at[ld], at[2 * ld], at[3 * ld]);
    }
    __device__ void four(int n, int r, const float4& y, const float4& old) {
        float* at = out + r * ld + n;
        at[0] = old.x + y.x, at[ld] = old.y + y.y, at[2 * ld] = old.z + y.z, at[3 * ld] = old.w + y.w;
    }
};

// gate and up are rounded as Book I rounds them when it stores them.
__device__ inline float swiglu(float gate, float up) {
    const float g = to_acc(round_bf16(gate));
    return __fdividef(g, 1 + exp2_fast(-LOG2E * g)) * to_acc(round_bf16(up)); // (an exact division is a call)
}
struct SwigluEpilogue : Epilogue { // norm_linear_swiglu
    static constexpr int OUTPUTS = 3;
    static constexpr bool PAIR = true;
    bf16* out;     // (N,F)
    bf16* gate_up; // (N,2F) for the backward pass, or null
    size_t F;
    SwigluEpilogue(bf16* out, bf16* gate_up, size_t F) : out(out), gate_up(gate_up), F(F) {}
    __device__ void one(bool inside, int n, int f, float gate, float up) {
        if (!inside) return;
        out[n * F + f] = round_bf16(swiglu(gate, up));
        if (gate_up) gate_up[n * 2 * F + f] = round_bf16(gate), gate_up[(n * 2 + 1) * F + f] = round_bf16(up);
    }
    BOTH Output<bf16> output(int k) const {
        if (k == 0) return {out, F};
        return {gate_up && k == 2 ? gate_up + F : gate_up, 2 * F};
    }
    template <class Put> __device__ void values(const float4& g, const float4& u, Put put) {
        put(0, make_float4(swiglu(g.x, u.x), swiglu(g.y, u.y), swiglu(g.z, u.z), swiglu(g.w, u.w)));
        put(1, g), put(2, u);
    }
    __device__ void four(int n, int f, const float4& g, const float4& u) { put_values(*this, n, f, g, u); }
};
struct RoundedSwigluEpilogue : SwigluEpilogue { // ... and as the next product takes it; F in whole groups
    static constexpr int OUTPUTS = 1;
    static constexpr bool ROUNDS = true;
    E4M3Rows rounded;
    RoundedSwigluEpilogue(const SwigluEpilogue& e, const E4M3Rows& rounded) : SwigluEpilogue(e), rounded(rounded) {}
    template <class Put> __device__ void values(const float4& g, const float4& u, Put put) {
        SwigluEpilogue::values(g, u, [&](int k, const float4& y) { if (k == 0) put(0, y); });
    }
};

// Epilogue E of up to 16 tokens where W has an adapter, whose h has been computed: s B h is added to each sum before
// anything is rounded. A thread has an output and all of its row of B: bound by latency.
constexpr int MOST_BESIDE = 192; // columns of B: rank 64 of q, k, v; as far as it was measured faster than tiles
template <class E> struct BesideAdapter : E {
    const bf16 *B, *h; // s B (out or, with PAIR, 2 out, width), (N, width)
    int width, out;
    BesideAdapter(const E& epilogue, const Linear<bf16>& W)
        : E(epilogue), B(W.adapter.B), h(W.adapter.h), width((int)W.adapter.width()), out(W.rows[0]) {}
    __device__ float more(int n, int r) const {
        float sum = 0;
        for (int c = 0; c < width; c += 8) { // (ranks are multiples of 8)
            const uint4 u = *(const uint4*)(B + (size_t)r * width + c), v = *(const uint4*)(h + (size_t)n * width + c);
            const uint32_t b[4] = {u.x, u.y, u.z, u.w}, x[4] = {v.x, v.y, v.z, v.w};
            #pragma unroll
            for (int i = 0; i < 4; i++) sum = fmaf(high(b[i]), high(x[i]), fmaf(low(b[i]), low(x[i]), sum));
        }
        return sum;
    }
    __device__ void one(bool inside, int n, int r, float y, float second) {
        if (inside) y += more(n, r);
        if (inside && E::PAIR) second += more(n, out + r);
        E::one(inside, n, r, y, second);
    }
};

// ---- Few tokens. linear, linear_add, SwiGLU of them, the head, and with NORM the same of rmsnorm(stream).
// Grid: as many blocks as are resident at once, each of 4 to 12 warps. A block takes groups of TILES x 8 rows of W in
// turn (PAIR: 8 of gate and 8 of up), all of its warps together: `in` is cut into steps of 32, and a warp has p.steps
// of them. Lane 4 g + t reads row g of each tile, numbers 8 t .. 8 t + 7 of each step, in one load of 16 bytes.
// In halves these are two b operands of mma, if the a operands hold the same numbers of the tokens (mma_32): a sum does
// not ask in which order `in` is numbered, as long as both operands agree. So nothing is moved or converted between
// memory and tensor core. M: the a operand has room for 8 M tokens; fewer cost as much.
// Afterwards the warps' sums are added in shared memory, one (token, row) a thread, which calls the epilogue.
// Shared memory: two sets of (warps, TILES, 8 M, 8) sums, used in turn, so that one barrier a group is enough; with
// NORM what norm_rows needs, and its output (N, in + 8), whose rows begin in different banks.
// Bound by the memory's speed: each weight is read once, and all of a group's first STREAM_LOADS loads are on their way
// before any is waited for; those of the next group before the sums of this one are added.
// A sum's order depends on `in` only: a row of tokens has the same bits whatever N and M are.
constexpr int STREAM_TOKENS = 16, NORM_TOKENS = 4, STREAM_LOADS = 8;

struct StreamArgs {
    const bf16* x;       // (., in)
    const int* rows;     // (N) rows of x, or null: the first N
    const float* stream; // (N,in) with NORM
    const bf16* norm;    // (in)
    float eps;
    const bf16* W;       // (out,in), with PAIR (2 out, in)
    int N, in, out;
    int steps = 0;       // of 32 numbers of `in`, a warp: set by launch_stream
};

// d += a b for 32 numbers of `in`. Lane 4 g + t holds eight of them, of tokens g (a0), g + 8 (a1) and of row g of W.
__device__ __forceinline__ void mma_32(float (&d)[4], const uint4& a0, const uint4& a1, const uint4& b) {
    mma(d, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
    mma(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
}

// What a lane holds of a group's rows: LOADS steps.
template <int TILES, bool PAIR> struct StreamWeights {
    static constexpr int LOADS = STREAM_LOADS / TILES, ROWS = PAIR ? 8 : 8 * TILES;
    uint4 w[LOADS][TILES];
    // Of LOADS steps from `step` on; zeros from step `last` on.
    __device__ __forceinline__ void load(const StreamArgs& p, int group, int step, int last) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int row = min(group * ROWS + (PAIR ? 0 : tile * 8) + g, p.out - 1);
            const int r = PAIR ? row + tile * p.out : row;
            const bf16* at = p.W + (size_t)r * p.in + step * 32 + 8 * t;
            #pragma unroll
            for (int i = 0; i < LOADS; i++)
                w[i][tile] = load_stream(at + i * 32, step + i < last && (step + i) * 32 + 8 * t < p.in);
        }
    }
    // sum += W x^T for these steps; token[m]: this lane's rows of x.
    template <int M>
    __device__ __forceinline__ void multiply(float (&sum)[TILES][4], const bf16* const (&token)[M], int in,
                                             int step) const {
        #pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int k = min((step + i) * 32 + 8 * (int)(threadIdx.x % 4), in - 8); // past the end w is zero
            uint4 a[2] = {};
            #pragma unroll
            for (int m = 0; m < M; m++) a[m] = *(const uint4*)(token[m] + k);
            #pragma unroll
            for (int tile = 0; tile < TILES; tile++) mma_32(sum[tile], a[0], a[1], w[i][tile]);
        }
    }
};

// What stream_kernel has in shared memory after its sums, with NORM.
BOTH inline int stream_norm_pieces(int N, int in) { return (N * ((in + 127) / 128) + 3) / 4 * 4; } // floats
constexpr int STREAM_NORM_PAD = 8; // numbers between two rows

template <int TILES, int M, bool NORM, class Epilogue>
__global__ void __launch_bounds__(384, 2) stream_kernel(StreamArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || TILES == 2, "a tile of gate, a tile of up");
    constexpr int SUMS = TILES * M * 64; // (tile, token, row)
    extern __shared__ float shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int first = warp * p.steps, last = min((p.in + 31) / 32, first + p.steps);
    StreamWeights<TILES, Epilogue::PAIR> weights;
    constexpr int ROWS = weights.ROWS;
    const int groups = (p.out + ROWS - 1) / ROWS;
    int group = blockIdx.x;
    // Weights may be read before the previous kernels have ended: no kernel of a forward writes them, and the first
    // one, embed, starts only when all that was launched before it has ended (AdamW in training).
    weights.load(p, group, first, last);
    let_next_start();
    wait_for_previous();
    epilogue.begin();
    const bf16* x = p.x;
    int ld = p.in;
    if (NORM) {
        float* pieces = shared + 2 * warps * SUMS;
        bf16* normed = (bf16*)(pieces + stream_norm_pieces(p.N, p.in));
        ld = p.in + STREAM_NORM_PAD;
        norm_rows(PlainRows{normed, ld, p.in}, p.stream, p.norm, pieces, p.N, p.in, p.eps);
        x = normed;
    }
    const bf16* token[M]; // tokens g and g + 8, this lane's rows of a; past the last one it computes what nobody keeps
    #pragma unroll
    for (int m = 0; m < M; m++) {
        const int n = min(g + 8 * m, p.N - 1);
        token[m] = x + (size_t)(!NORM && p.rows ? p.rows[n] : n) * ld;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        // The first (token, row) that this thread will hand over. A set of sums is (tile, token, row of the tile).
        const int o0 = threadIdx.x, n0 = o0 / 8 % (8 * M), r0 = group * ROWS + o0 / (64 * M) * 8 + o0 % 8;
        [[maybe_unused]] float old = 0;
        if constexpr (Epilogue::ADDS) old = o0 < SUMS && n0 < p.N && r0 < p.out ? epilogue.old(n0, r0) : 0;
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += weights.LOADS) {
            if (step > first) weights.load(p, group, step, last);
            weights.multiply(sum, token, p.in, step);
        }
        if (group + (int)gridDim.x < groups) weights.load(p, group + gridDim.x, first, last);
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            #pragma unroll
            for (int m = 0; m < M; m++) {
                float* to = sums + warp * SUMS + ((tile * M + m) * 8 + g) * 8 + 2 * t;
                *(float2*)to = make_float2(sum[tile][2 * m], sum[tile][2 * m + 1]);
            }
        __syncthreads();
        for (int o = threadIdx.x; o < (Epilogue::PAIR ? SUMS / 2 : SUMS); o += blockDim.x) {
            const int n = o / 8 % (8 * M), r = group * ROWS + o / (64 * M) * 8 + o % 8;
            float y = 0, second = 0;
            #pragma unroll 4
            for (int v = 0; v < warps; v++) {
                y += sums[v * SUMS + o];
                if (Epilogue::PAIR) second += sums[v * SUMS + SUMS / 2 + o];
            }
            const bool inside = n < p.N && r < p.out;
            if constexpr (Epilogue::ADDS) second = o == o0 ? old : inside ? epilogue.old(n, r) : 0;
            epilogue.one(inside, n, r, y, second);
        }
        sums = sums == shared ? shared + warps * SUMS : shared;
    }
    epilogue.end(p.N);
}

// How a product's rows were dealt: `rows` neighbours at a time to its blocks in turn, the first ones to block `shift`.
// blocks 0: they were not.
struct RowsDealt {
    int blocks = 0, rows = 0, shift = 0;
};
template <int TILES, int M, bool NORM, class Epilogue>
RowsDealt launch_stream(Context& ctx, StreamArgs p, Epilogue epilogue) {
    constexpr int ROWS = StreamWeights<TILES, Epilogue::PAIR>::ROWS;
    const int groups = (p.out + ROWS - 1) / ROWS, steps = (p.in + 31) / 32;
    const int warps = std::min(12, std::max(4, steps * TILES / STREAM_LOADS));
    p.steps = (steps + warps - 1) / warps;
    const size_t normed = (size_t)p.N * (p.in + STREAM_NORM_PAD);
    size_t shared = 2 * (size_t)warps * TILES * M * 64 * sizeof(float);
    if (NORM) shared += stream_norm_pieces(p.N, p.in) * sizeof(float) + normed * sizeof(bf16);
    const int resident = ctx.gpu->sms * (24 / warps); // at once: 80 registers a thread leave room for 24 warps
    const int blocks = std::min({groups, resident, Epilogue::MOST_BLOCKS});
    launch(ctx, stream_kernel<TILES, M, NORM, Epilogue>, blocks, warps * 32, shared, p, epilogue);
    return {blocks, ROWS};
}
template <class Epilogue> RowsDealt stream_product(Context& ctx, const StreamArgs& p, Epilogue epilogue) {
    constexpr bool PAIR = Epilogue::PAIR;
    if (p.N < 1 || p.N > (p.stream ? NORM_TOKENS : STREAM_TOKENS)) DIE("stream_product: %d tokens", p.N);
    if (p.in % 8 || p.out % 8) DIE("stream_product: W is (%d,%d); its kernel takes multiples of 8", p.out, p.in);
    const bool two = PAIR || p.in <= 1024; // a warp has few steps of a short row; of two tiles it has as many loads
    if (p.stream) {
        if (two) return launch_stream<2, 1, true>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, true>(ctx, p, epilogue);
    } else if (p.N <= 8) {
        if (two) return launch_stream<2, 1, false>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, false>(ctx, p, epilogue);
    }
    if (two) return launch_stream<2, 2, false>(ctx, p, epilogue);
    if constexpr (!PAIR) return launch_stream<1, 2, false>(ctx, p, epilogue);
    return {}; // (not reached: PAIR is always two)
}

// ---- Many tokens. Every product of more than 16 tokens and of the backward pass; of fewer those with dropout, with an
// adapter of many columns, or with `invariant`.
// Grid: (tiles, splits). A block owns a tile of the output: S::TOKENS tokens by S::ROWS rows of W (PAIR: half of them
// of gate, half of up). It walks along `in` in stages of 64 numbers, which cp.async copies to a ring of S::STAGES
// stages in shared memory while the tensor cores work on an earlier one. Bound by the tensor cores; by the memory if
// there are few tokens.
//
// Layouts. A forward product has `in` along the rows of both operands: x is (N,in), W is (out,in). Of the backward
// products dx = dy W has `in` down W's columns, W (in,out): W_COLS; and dW = dy^T x down both, x (in,N) also: X_COLS.
// The tensor core takes such an operand transposed.
//
// A stage in shared memory. A row has the 128 bytes of a cache line. `in` along the rows: a row of the operand's 64
// numbers each. `in` down the columns: 64 neighbouring columns at one i, 64 such rows to a panel, a panel for every 64
// columns of the tile. A row's eight chunks of 16 bytes are swizzled: chunk c of row r lies in place c ^ r % 8. So
// ldmatrix, which reads the same chunk of eight rows at once, meets eight different groups of banks; wgmma wants the
// same order.
//
// Who owns what. A warp owns S::WARP_TOKENS by S::WARP_ROWS of the tile, made of fragments, 16 tokens by eight rows of
// W, spread over its lanes as mma leaves them: of fragment (i, j) lane 4 g + t holds sum[i][j][0 .. 3]: rows 2 t and
// 2 t + 1 of token g, then the same of token g + 8.
// PAIR: the tile has 16 rows of gate and 16 rows of up in turn, so that a lane holds the same columns of both, two
// fragments apart.
//
// An adapter's h and s B are further columns of x and W: `more` numbers of `in`, in stages of their own, which come
// first, or last.
//
// Splits. If there are too few tiles to fill the GPU, `splits` blocks share a tile, each has a part of the stages, and
// the last one to arrive adds their sums in order.
constexpr int STAGE_IN = 64; // numbers of `in` in a stage

template <int TOKENS_, int ROWS_, int WARP_TOKENS_, int WARP_ROWS_, int STAGES_> struct TileShape {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, STAGES = STAGES_, SHARING = 1;
    static constexpr int WARP_TOKENS = WARP_TOKENS_, WARP_ROWS = WARP_ROWS_;
    static constexpr int THREADS = TOKENS / WARP_TOKENS * (ROWS / WARP_ROWS) * 32, CONSUMERS = THREADS;
    static constexpr int X_BYTES = TOKENS * STAGE_IN * 2, STAGE_BYTES = X_BYTES + ROWS * STAGE_IN * 2; // x, then W
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES;
    // Fragments of tokens and of rows that a warp has, and the first token and row of its part.
    static constexpr int MF = WARP_TOKENS / 16, NF = WARP_ROWS / 8;
    static constexpr int BAND = 8, UP = 2; // tiles of tokens to a band; from a fragment of gate to that of up
    __device__ static int warp_token() { return threadIdx.x / 32 % (TOKENS / WARP_TOKENS) * WARP_TOKENS; }
    __device__ static int warp_row() { return threadIdx.x / 32 / (TOKENS / WARP_TOKENS) * WARP_ROWS; }
};
// How many tiles it takes, or pairs of them.
template <class S> int64_t count_tiles(int N, int rows) {
    constexpr int TOKENS = S::TOKENS * S::SHARING;
    return (int64_t)((N + TOKENS - 1) / TOKENS) * ((rows + S::ROWS - 1) / S::ROWS);
}

struct TileArgs {
    const bf16 *x, *W;    // (N,in), X_COLS (in,N); (out,in), with PAIR (2 out, in), W_COLS (in,out)
    int N, in, out;
    const bf16 *more_x = nullptr, *more_W = nullptr; // (N,more); (out,more), W_COLS (more,out). Not with X_COLS
    int more = 0;
    bool more_last = false;
    int ldx = 0, ldw = 0; // numbers from one row of x and W to the next; 0: as many as a row has
    bool early = false;   // few blocks: those of the next kernel may come beside them from the start
    int splits = 1;
    // Set by launch_hopper: stages of the ring; with splits, whether sums that a block receives have their own memory.
    int stages = 0;
    bool apart = false;
    // Of e4m3 operands (see multiply_groups), two of which then count as one number: W's scales of 128 rows by 128
    // columns (., groups), x's of 128 numbers of a token (groups, pitch). What is past the end may be read.
    const float *x_scale = nullptr, *W_scale = nullptr;
    int pitch = 0;
    float* partial = nullptr;
    int* arrived = nullptr;
};

// Which tile and which of its steps (stages of `in`) a block has.
template <class S, bool PAIR> struct TilePlace {
    int n0, r0;                  // first token; first row, of gate and up together with PAIR
    int first_more, past_more;   // steps over the adapter's columns
    int first, last;             // this block's steps
    // Tiles are numbered in bands of so many tiles of tokens: blocks that run at the same time share rows of both
    // operands in the L2 cache.
    __device__ __forceinline__ TilePlace(const TileArgs& p, int tile, int split) {
        const int rows = PAIR ? 2 * p.out : p.out;
        constexpr int TOKENS = S::TOKENS * S::SHARING;
        const int across = (rows + S::ROWS - 1) / S::ROWS, down = (p.N + TOKENS - 1) / TOKENS;
        if (down == 1) n0 = 0, r0 = tile * S::ROWS; // (a division takes as long as a copy from the L2 cache)
        else {
            const int band = tile / (S::BAND * across), in_band = tile % (S::BAND * across);
            const int high = min(S::BAND, down - band * S::BAND);
            n0 = (band * S::BAND + in_band % high) * TOKENS, r0 = in_band / high * S::ROWS;
        }
        if (S::SHARING > 1) n0 += blockIdx.x % 2 * S::TOKENS;
        const int own = (p.in + STAGE_IN - 1) / STAGE_IN, steps = (p.more + STAGE_IN - 1) / STAGE_IN + own;
        first_more = p.more_last ? own : 0, past_more = first_more + steps - own;
        first = 0, last = steps;
        if (p.splits > 1) first = steps * split / p.splits, last = steps * (split + 1) / p.splits;
    }
    // Whether a step is over the adapter's columns; the first number of `in`, or column, of it.
    __device__ __forceinline__ bool more(int step) const { return step >= first_more && step < past_more; }
    __device__ __forceinline__ int number(int step) const {
        return (step < first_more ? step : step < past_more ? step - first_more : step - past_more + first_more) *
               STAGE_IN;
    }
    // This lane's token in rows g + 8 h of fragment i.
    __device__ __forceinline__ int token(int i, int h) const {
        return n0 + S::warp_token() + i * 16 + h * 8 + threadIdx.x % 32 / 4;
    }
};

// Where in an operand's stage a chunk of 16 bytes lies. With `in` along the rows there are eight chunks, one panel.
__device__ __forceinline__ uint32_t chunk_address(uint32_t stage, int row, int chunk) {
    return stage + row * 128 + ((chunk ^ row % 8) << 4);
}
__device__ __forceinline__ uint32_t panel_address(uint32_t stage, int row, int chunk) {
    return chunk_address(stage + chunk / 8 * (STAGE_IN * 128), row, chunk % 8);
}

// What one thread copies of an operand's stage: `chunk` of COUNT rows, STEP rows apart, from `row` on.
template <int ROWS, bool COLS, int THREADS> struct TileCopy {
    static constexpr int CHUNKS = (COLS ? ROWS : STAGE_IN) / 8, ALL = COLS ? STAGE_IN : ROWS;
    static constexpr int STEP = THREADS / CHUNKS, COUNT = ALL / STEP;
    static_assert(STEP % 8 == 0 && COUNT * STEP == ALL && (!COLS || ROWS % 64 == 0), "every thread copies the same");
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const uint32_t offset = panel_address(0, row, chunk); // STEP is a multiple of 8: the same swizzle in every row
};

// Copies stages to shared memory. A chunk past the end of `in`, of the tokens or of the rows becomes zeros.
template <class S, bool X_COLS, bool W_COLS, bool PAIR> struct TileStages {
    const TileArgs& p;
    const TilePlace<S, PAIR>& at;
    uint32_t shared;
    TileCopy<S::TOKENS, X_COLS, S::THREADS> cx;
    TileCopy<S::ROWS, W_COLS, S::THREADS> cw;

    // What a step copies from: the adapter's columns, or the operand's own, from number i of `in` numbers on.
    struct Source {
        const bf16* from;
        int ld, in, i;
    };
    __device__ __forceinline__ Source source(int step, const bf16* own, int ld, const bf16* more, int more_ld) const {
        const bool extra = at.more(step);
        return {extra ? more : own, extra ? more_ld : ld, extra ? p.more : p.in, at.number(step)};
    }
    __device__ __forceinline__ uint32_t x_stage(int step) const { return shared + step % S::STAGES * S::STAGE_BYTES; }
    __device__ __forceinline__ uint32_t w_stage(int step) const { return x_stage(step) + S::X_BYTES; }

    // `in` down the columns: 64 rows, of which a thread copies one chunk of columns.
    template <class Copy>
    __device__ __forceinline__ void copy_columns(uint32_t stage, const Copy& c, const Source& s, bool wanted, int first,
                                                 int end) const {
        const uint32_t to = stage + c.offset;
        const int i = s.i + c.row, column = first + c.chunk * 8;
        const bf16* from = s.from + (size_t)i * s.ld + column;
        #pragma unroll
        for (int k = 0; k < c.COUNT; k++) {
            const bool inside = wanted && i + k * c.STEP < s.in && column < end;
            copy_async(to + k * c.STEP * 128, from + (size_t)k * c.STEP * s.ld, inside);
        }
    }
    __device__ __forceinline__ void copy_x(int step) const {
        if constexpr (X_COLS) {
            copy_columns(x_stage(step), cx, {p.x, p.ldx, p.in, step * STAGE_IN}, step < at.last, at.n0, p.N);
        } else {
            const Source s = source(step, p.x, p.ldx, p.more_x, p.more);
            const uint32_t to = x_stage(step) + cx.offset;
            const int i = s.i + cx.chunk * 8, n = at.n0 + cx.row;
            const bool inside = step < at.last && i < s.in;
            const bf16* from = s.from + (size_t)n * s.ld + i;
            #pragma unroll
            for (int k = 0; k < cx.COUNT; k++)
                copy_async(to + k * cx.STEP * 128, from + (size_t)k * cx.STEP * s.ld, inside && n + k * cx.STEP < p.N);
        }
    }
    __device__ __forceinline__ void copy_w(int step) const {
        const Source s = source(step, p.W, p.ldw, p.more_W, W_COLS ? p.out : p.more);
        if constexpr (W_COLS) copy_columns(w_stage(step), cw, s, step < at.last, at.r0, p.out);
        else {
            const uint32_t to = w_stage(step) + cw.offset;
            const int i = s.i + cw.chunk * 8;
            const bool inside = step < at.last && i < s.in;
            #pragma unroll
            for (int k = 0; k < cw.COUNT; k++) {
                const int row = cw.row + k * cw.STEP; // of the tile; r: of W, or of gate or up
                const int r = PAIR ? at.r0 / 2 + row / 32 * 16 + row % 16 : at.r0 + row;
                const bf16* from = s.from + i + (size_t)(PAIR && row / 16 % 2 ? p.out + r : r) * s.ld;
                copy_async(to + k * cw.STEP * 128, from, inside && r < p.out);
            }
        }
    }
};

// sum += x W^T for one stage, by mma.sync: operands go through registers, 16 numbers of `in` at a time.
template <class S, bool X_COLS, bool W_COLS>
__device__ __forceinline__ void multiply_stage(float (&sum)[S::MF][S::NF][4], uint32_t x_stage, uint32_t w_stage) {
    const int lane = threadIdx.x % 32, warp_token = S::warp_token(), warp_row = S::warp_row();
    #pragma unroll
    for (int k = 0; k < STAGE_IN / 16; k++) {
        uint32_t a[S::MF][4], b[S::NF / 2][4];
        #pragma unroll
        for (int i = 0; i < S::MF; i++) {
            const int token = warp_token + i * 16;
            if constexpr (X_COLS) {
                const int row = k * 16 + lane % 8 + lane / 16 * 8;
                ldmatrix_transposed(a[i], panel_address(x_stage, row, token / 8 + lane / 8 % 2));
            } else {
                ldmatrix(a[i], chunk_address(x_stage, token + lane % 16, 2 * k + lane / 16));
            }
        }
        #pragma unroll
        for (int j = 0; j < S::NF / 2; j++) {
            const int row = warp_row + j * 16;
            if constexpr (W_COLS)
                ldmatrix_transposed(b[j], panel_address(w_stage, k * 16 + lane % 16, row / 8 + lane / 16));
            else
                ldmatrix(b[j], chunk_address(w_stage, row + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
        }
        #pragma unroll
        for (int i = 0; i < S::MF; i++)
            #pragma unroll
            for (int j = 0; j < S::NF; j++)
                mma(sum[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}
// The main loop: calls multiply(x, w) for the stages of steps from .. to - 1. The copies of the first STAGES - 1 stages
// are under way.
template <class S, bool X_COLS, bool W_COLS, bool PAIR, class Multiply>
__device__ __forceinline__ void walk_steps(const TileStages<S, X_COLS, W_COLS, PAIR>& stages, int from, int to,
                                           Multiply multiply) {
    for (int step = from; step < to; step++) {
        wait_for_copies<S::STAGES - 2>(); // this step's stage, as far as this thread copied it
        __syncthreads(); // ... as all did; and all are done with the stage before it, whose place the next copies take
        const int next = step + S::STAGES - 1;
        if (next < stages.at.last) stages.copy_x(next), stages.copy_w(next);
        commit_copies();
        multiply(stages.x_stage(step), stages.w_stage(step));
    }
}

// Epilogue::MASKS: what each of up to three modules keeps of a warp's part of a tile. A quad of lanes shares out the
// pairs of words (64 rows of a token) that all four need. They come from far, so they are asked for before the tile is
// multiplied: where they are needed, the compiler asks for each just before its use, and waits.
template <class S> struct KeptWords {
    static constexpr int PAIRS = S::NF > 8 ? S::NF / 8 : 1, ALL = S::MF * 2 * PAIRS, EACH = (ALL + 3) / 4;
    uint2 pairs[3][EACH];
    template <class Place>
    __device__ __forceinline__ KeptWords(const Place& at, const DropoutMasks& masks, int modules) {
        #pragma unroll
        for (int module = 0; module < 3; module++)
            #pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int pair = k * 4 + threadIdx.x % 4, r64 = (at.r0 + S::warp_row()) / 64 + pair % PAIRS;
                const int n = at.token(pair / PAIRS / 2, pair / PAIRS % 2);
                const bool there = module < modules && pair < ALL && n < masks.N && r64 < masks.sixty_fours;
                pairs[module][k] = there ? *(const uint2*)masks.at(module, r64, n) : uint2{};
            }
    }
    // (An index that is not constant would cost a copy of the array.)
    __device__ __forceinline__ void pick(uint2 (&of)[EACH], int module) const {
        #pragma unroll
        for (int k = 0; k < EACH; k++)
            of[k] = module == 0 ? pairs[0][k] : module == 1 ? pairs[1][k] : pairs[2][k];
    }
    // Of the 32 rows from row 32 j of the part on, this lane's from bit 0 on. All lanes of the warp call it.
    __device__ __forceinline__ static uint32_t rows(const uint2 (&of)[EACH], int i, int h, int j) {
        const int pair = (i * 2 + h) * PAIRS + j / 2, lane = threadIdx.x % 32;
        const uint32_t word = (S::warp_row() / 32 + j) % 2 ? of[pair / 4].y : of[pair / 4].x;
        return __shfl_sync(~0u, word, lane / 4 * 4 + pair % 4) >> 2 * (lane % 4);
    }
};

// Epilogue::MASKS: a stage of the further columns, from number `first` of them on, by mma.sync. Up to 32 of a module's
// at a time: of these a fragment's sums are made, masked, and added to `sum`, so that they take only their own
// registers. x's are zero where columns do not belong to the module. (`sum` cannot be indexed, so this is straight
// code, and wgmma idles meanwhile: hence few instructions.)
template <class S, class Epilogue>
__device__ __forceinline__ void add_masked_stage(float (&sum)[S::MF][S::NF][4], uint32_t x_stage, uint32_t w_stage,
                                                 int first, const KeptWords<S>& words, const TileArgs& p,
                                                 const Epilogue& epilogue) {
    const int lane = threadIdx.x % 32, warp_row = S::warp_row();
    const int last = min(STAGE_IN, p.more - first);
    int end;
    #pragma unroll 1
    for (int begin = 0; begin < last; begin = end) {
        const int module = (first + begin) / epilogue.rank, window = min(begin / 16 * 16, STAGE_IN - 32);
        end = min(min(last, (module + 1) * epilogue.rank - first), window + 32);
        const uint32_t w_rows = w_stage + (window + lane % 16) * 128; // in each panel
        uint2 pairs[KeptWords<S>::EACH];
        words.pick(pairs, module);
        #pragma unroll
        for (int i = 0; i < S::MF; i++) {
            uint32_t a[2][4];
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                ldmatrix(a[k], chunk_address(x_stage, S::warp_token() + i * 16 + lane % 16,
                                             window / 8 + 2 * k + lane / 16));
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int column = window + k * 16 + e / 2 * 8;
                    if (column < begin || column >= end) a[k][e] = 0;
                }
            }
            #pragma unroll
            for (int j = 0; j < S::NF; j += 4) { // four fragments: their chains overlap
                float part[4][4] = {};
                uint32_t b[2][2][4];
                const uint32_t kept[2] = {words.rows(pairs, i, 0, j / 4), words.rows(pairs, i, 1, j / 4)};
                #pragma unroll
                for (int k = 0; k < 2; k++)
                    #pragma unroll
                    for (int two = 0; two < 2; two++) {
                        const int chunk = warp_row / 8 + j + 2 * two + lane / 16;
                        ldmatrix_transposed(b[k][two], w_rows + chunk / 8 * (STAGE_IN * 128) + k * 16 * 128 +
                                                           ((chunk % 8 ^ lane % 8) << 4));
                    }
                #pragma unroll
                for (int k = 0; k < 2; k++)
                    #pragma unroll
                    for (int f = 0; f < 4; f++)
                        mma(part[f], a[k][0], a[k][1], a[k][2], a[k][3], b[k][f / 2][f % 2 * 2],
                            b[k][f / 2][f % 2 * 2 + 1]);
                #pragma unroll
                for (int e = 0; e < 16; e++) { // of each two columns of two tokens (with `if` for ?, `scale` is fetched
                                               // anew for every sum)
                    float& y = sum[i][j + e / 4][e % 4];
                    const uint32_t bit = 1u << (e / 4 * 8 + e % 2);
                    const float more = fmaf(part[e / 4][e % 4], epilogue.scale, y);
                    y = kept[e / 2 % 2] & bit ? more : y;
                }
            }
        }
    }
}

// The sums of the blocks that share a tile, in order, for the last one to arrive: true for that one. In `partial` they
// lie as the threads hold them: (tile, split, fragment, thread, 4).
template <int THREADS, int M, int N>
__device__ __forceinline__ bool reduce_splits(float (&sum)[M][N][4], float* partial, int* arrived, int tile, int split,
                                              int splits) {
    float4* part = (float4*)partial + (size_t)tile * splits * M * N * THREADS + threadIdx.x;
    float4* mine = part + (size_t)split * M * N * THREADS;
    #pragma unroll
    for (int f = 0; f < M * N; f++) {
        float(&v)[4] = sum[f / N][f % N];
        mine[f * THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        v[0] = v[1] = v[2] = v[3] = 0;
    }
    if (!last_to_arrive<THREADS>(arrived + tile, splits)) return false;
    #pragma unroll 1
    for (int s = 0; s < splits; s++, part += M * N * THREADS)
        #pragma unroll
        for (int f = 0; f < M * N; f++) {
            const float4 other = __ldcg(part + f * THREADS);
            float(&v)[4] = sum[f / N][f % N];
            v[0] += other.x, v[1] += other.y, v[2] += other.z, v[3] += other.w;
        }
    return true;
}

// Four neighbouring columns of the 16 of two fragments, so that a quad of lanes writes whole sectors of 32 bytes:
// neighbours exchange two numbers. Lanes 0 1 2 3 of a quad get columns 0 .. 3, 8 .. 11, 4 .. 7, 12 .. 15. `lanes`: who
// calls it.
__device__ __forceinline__ float4 four_columns(float2 even, float2 odd, uint32_t lanes = ~0u) {
    const bool second = threadIdx.x % 2; // gets its four from the second fragment
    const float a = __shfl_xor_sync(lanes, second ? even.x : odd.x, 1);
    const float b = __shfl_xor_sync(lanes, second ? even.y : odd.y, 1);
    return second ? make_float4(a, b, odd.x, odd.y) : make_float4(even.x, even.y, a, b);
}
__device__ __forceinline__ float4 four_columns(const float (&even)[4], const float (&odd)[4], int h,
                                               uint32_t lanes = ~0u) {
    return four_columns(make_float2(even[2 * h], even[2 * h + 1]), make_float2(odd[2 * h], odd[2 * h + 1]), lanes);
}
// With PARTS, what a lane of a quad, which has whole pieces of 64 rows, makes of its sums of token n, fragment after
// fragment; `first` is the first row of the warp's part.
struct WeightSums {
    int n, first, chosen;
    float from, right = 0, largest = -1e30f, part = 0;
    template <class Epilogue>
    __device__ __forceinline__ void begin(int n_, int first_, int N, const Epilogue& epilogue) {
        n = n_, first = first_;
        chosen = n < N ? epilogue.chosen_row(n) - first - (int)threadIdx.x % 4 * 2 : -1;
        from = n < N ? epilogue.from(n) * LOG2E : 0;
    }
    // Four weights, two of fragment j and two of j + 1.
    __device__ __forceinline__ float4 next(const float (&even)[4], const float (&odd)[4], int h, int j, int out) {
        float w[4];
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = (j + e / 2) * 8;
            const float y = (e / 2 ? odd : even)[2 * h + e % 2];
            w[e] = exp2_fast(fmaf(y, LOG2E, -from));
            if (first + row < out) largest = fmaxf(largest, y), part += w[e];
            right = chosen == row + e % 2 ? y : right;
        }
        return make_float4(w[0], w[1], w[2], w[3]);
    }
    // The eight fragments from j0 on.
    template <class Epilogue> __device__ __forceinline__ void end_piece(int j0, int N, int out, Epilogue& epilogue) {
        largest = quad_max(largest), part = quad_sum(part);
        if (threadIdx.x % 4 == 0 && n < N && first + j0 * 8 < out)
            epilogue.part(n, (first + j0 * 8) / 64, largest, part);
        largest = -1e30f, part = 0;
    }
    template <class Epilogue> __device__ __forceinline__ void end(int fragments, Epilogue& epilogue) {
        if (chosen >= 0 && chosen < fragments * 8 && chosen % 8 < 2) epilogue.chosen(n, right);
    }
};
template <class S, class Epilogue>
__device__ __forceinline__ void finish_weights(const float (&sum)[S::NF][4], int h, int n, int first, int N, int out,
                                               Epilogue& epilogue) {
    WeightSums weights;
    weights.begin(n, first, N, epilogue);
    #pragma unroll
    for (int j = 0; j < S::NF; j += 2) {
        const float4 w = weights.next(sum[j], sum[j + 1], h, j, out);
        const float4 y = four_columns(make_float2(w.x, w.y), make_float2(w.z, w.w));
        const int t = threadIdx.x % 4, r = first + j * 8 + t / 2 * 4 + t % 2 * 8;
        if (n < N && r < out) epilogue.four(n, r, y, {});
        if (j % 8 == 6) weights.end_piece(j - 6, N, out, epilogue);
    }
    weights.end(S::NF, epilogue);
}
// Hands a lane's sums of token n to the epilogue, four at a time; `first` is the first row of the warp's part.
template <class S, class Epilogue>
__device__ __forceinline__ void finish_row(const float (&sum)[S::NF][4], int h, int n, int first, int N, int out,
                                           Epilogue& epilogue) {
    if constexpr (Epilogue::PARTS) return finish_weights<S>(sum, h, n, first, N, out, epilogue);
    constexpr int EACH = Epilogue::PAIR ? 4 : 2; // fragments that give a lane four columns, of gate and up with PAIR
    constexpr int FOURS = S::NF / EACH;
    const int t = threadIdx.x % 4;
    const auto row = [&](int i) { return (Epilogue::PAIR ? first / 2 : first) + i * 16 + t / 2 * 4 + t % 2 * 8; };
    constexpr int AHEAD = Epilogue::ADDS && FOURS > 8 ? FOURS / 2 : FOURS; // asked for before the first is waited for
    #pragma unroll
    for (int i0 = 0; i0 < FOURS; i0 += AHEAD) {
        [[maybe_unused]] float4 old[Epilogue::ADDS ? AHEAD : 1];
        if constexpr (Epilogue::ADDS)
            #pragma unroll
            for (int i = 0; i < AHEAD; i++)
                old[i] = n < N && row(i0 + i) < out ? epilogue.old_four(n, row(i0 + i)) : float4{};
        #pragma unroll
        for (int i = i0; i < i0 + AHEAD; i++) {
            const bool inside = n < N && row(i) < out;
            const int j = Epilogue::PAIR && S::UP == 2 ? 4 * i : 2 * i;
            float4 y = four_columns(sum[j], sum[j + 1], h), second = {};
            if constexpr (Epilogue::PAIR) second = four_columns(sum[j + S::UP], sum[j + S::UP + 1], h);
            if constexpr (Epilogue::ADDS) second = old[i - i0];
            if (inside) epilogue.four(n, row(i), y, second);
        }
    }
}

template <class S, bool X_COLS, bool W_COLS, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, 1) tile_kernel(TileArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    static_assert(!Epilogue::PARTS || S::NF % 8 == 0, "a quad of lanes has whole pieces of 64");
    extern __shared__ __align__(128) uint4 memory[]; // no row straddles two lines of 128 bytes
    if (epilogue.skipped()) return;
    const TilePlace<S, Epilogue::PAIR> at(p, blockIdx.x, blockIdx.y);
    const TileStages<S, X_COLS, W_COLS, Epilogue::PAIR> stages = {p, at, shared_address(memory), {}, {}};

    // The first stages. Weights may be read before the previous kernels have ended, as in stream_kernel; with W_COLS W
    // may be an activation (dW = dy^T x), which may not.
    if (!W_COLS)
        for (int s = 0; s < S::STAGES - 1; s++) stages.copy_w(at.first + s);
    if (p.early) let_next_start();
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) {
        if (W_COLS) stages.copy_w(at.first + s);
        stages.copy_x(at.first + s);
        commit_copies(); // (the first of these groups has all of the weights above)
    }
    float sum[S::MF][S::NF][4] = {};
    const auto multiply = [&](uint32_t x, uint32_t w) { multiply_stage<S, X_COLS, W_COLS>(sum, x, w); };
    if constexpr (Epilogue::MASKS) {
        const KeptWords<S> words(at, epilogue.masks, p.more / epilogue.rank);
        walk_steps(stages, at.first, min(at.last, at.first_more), multiply);
        int step = max(at.first, at.first_more);
        walk_steps(stages, step, at.last, [&](uint32_t x, uint32_t w) {
            add_masked_stage<S>(sum, x, w, at.number(step++), words, p, epilogue);
        });
    } else walk_steps(stages, at.first, at.last, multiply);
    wait_for_copies<0>();
    if (!p.early) let_next_start(); // earlier, blocks of the next kernel would take the places of ours

    if (p.splits > 1 && !reduce_splits<S::THREADS>(sum, p.partial, p.arrived, blockIdx.x, blockIdx.y, p.splits)) return;
    const int first = at.r0 + S::warp_row();
    #pragma unroll
    for (int i = 0; i < S::MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = at.token(i, h);
            finish_row<S>(sum[i], h, n, first, p.N, p.out, epilogue);
        }
}

// Whether the scratch has room for the sums of so many splits.
template <class S> bool splits_fit(int64_t tiles, int splits) {
    return tiles <= MAX_TILES && tiles * splits * S::TOKENS * S::ROWS * 4 <= (int64_t)PARTIAL_BYTES;
}

// A product that is to be launched in tiles: what it left open is filled in. Its number of tiles.
template <class S, bool X_COLS, bool W_COLS, class Epilogue> int plan_tiles(Context& ctx, TileArgs& p) {
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out;
    const int64_t tiles = count_tiles<S>(p.N, rows);
    if (!p.ldx) p.ldx = X_COLS ? p.N : p.in;
    if (!p.ldw) p.ldw = W_COLS ? p.out : p.in;
    // A chunk of 16 bytes is inside or past the end as a whole.
    bool eights = p.out % 8 == 0 && p.more % 8 == 0 && p.ldx % 8 == 0 && p.ldw % 8 == 0;
    eights &= X_COLS ? p.N % 8 == 0 : p.in % 8 == 0;
    if (!eights || p.N < 1 || p.in < 1 || p.out < 1)
        DIE("a product of (%d,%d) and (%d,%d): the GPU's kernels take multiples of 8", p.N, p.in, p.out, p.in);
    if (X_COLS && p.more) DIE("a product whose x lies in columns takes no further columns of an adapter");
    if (tiles > INT_MAX) DIE("a product of %d tokens and %d rows has too many tiles", p.N, rows);
    if (p.splits < 1 || (p.splits > 1 && !splits_fit<S>(tiles, p.splits)))
        DIE("a product of %lld tiles in %d splits has more sums than there is scratch", (long long)tiles, p.splits);
    p.partial = ctx.gpu->partial, p.arrived = ctx.gpu->arrived;
    return (int)tiles;
}
template <class S, bool X_COLS = false, bool W_COLS = false, class Epilogue>
void launch_tiles(Context& ctx, TileArgs p, Epilogue epilogue) {
    const int tiles = plan_tiles<S, X_COLS, W_COLS, Epilogue>(ctx, p);
    const dim3 grid(tiles, p.splits);
    launch(ctx, tile_kernel<S, X_COLS, W_COLS, Epilogue>, grid, S::THREADS, S::SHARED, p, epilogue);
}

// ---- The same on Hopper. Grid: as many blocks as are resident at once; a block takes tiles in turn. One warp, the
// producer, has the Tensor Memory Accelerator copy stage after stage to a ring in shared memory, as far ahead as there
// is room, through the ends of tiles too. The others, the consumers, are a warpgroup for every 64 tokens of the tile:
// it multiplies them by all rows with wgmma, and says when it has done with a stage. So copies, products and a part of
// the epilogues run at the same time. Bound by the tensor cores.
//
// Layouts, stages, further columns, splits and fragments are tile_kernel's; PAIR: the tile's first half are rows of
// gate, its second half the same rows of up.
//
// SHARING: two blocks, a cluster, have neighbouring tiles of tokens and the same rows of W, of which each copies half
// to both: a stage is filled again when the consumers of both have left it, and what the other block has copied may
// count before this one says how many bytes it expects, since the phase still lacks that arrival. Products one after
// another take the card to the limit of its power, so it is bytes, here those from the L2 cache, that cost clocks.
constexpr int MOST_SPLITS = 8; // blocks that every GPU takes as a cluster
template <int TOKENS_, int ROWS_, int STAGES_, int MOST_ = TOKENS_, int SHARING_ = 1> struct HopperShape {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, STAGES = STAGES_;
    static constexpr int SHARING = SHARING_; // blocks that share W: 1 or 2
    static constexpr int MOST = MOST_; // less than TOKENS: of N, and a stage has no more of x; wgmma reads on into W
    static constexpr int X_BYTES = MOST * STAGE_IN * 2, STAGE_BYTES = X_BYTES + ROWS * STAGE_IN * 2;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES + 1024; // the swizzle counts from multiples of 1024
    static constexpr int MF = 1, NF = ROWS / 8;
    static constexpr int BAND = 2048 / TOKENS / SHARING, UP = NF / 2;
    static constexpr int CONSUMERS = TOKENS / 64 * 128; // threads
    // Where three warpgroups could not have registers enough each, the producer is one, and leaves the others most.
    static constexpr bool MOVES_REGISTERS = ROWS > 128;
    static constexpr int THREADS = CONSUMERS + (MOVES_REGISTERS ? 128 : 32);
    static constexpr int BLOCKS = 2 * SHARED < 225 * 1024 ? 2 : 1; // of a multiprocessor
    static constexpr size_t ROOM = BLOCKS == 2 ? 112 * 1024 : 226 * 1024; // what a block may have
    // Whether the ring may be shorter than STAGES by one, which a block's received sums take.
    static constexpr bool GIVES = BLOCKS == 1 && TOKENS * ROWS <= 128 * 64;
    // Two boxes of 16 tokens by 64 columns for each warp, where there is room.
    static constexpr int BOX = 16 * 128, STAGING = CONSUMERS / 32 * 2 * BOX;
    static constexpr bool STAGED = BLOCKS == 1 && CONSUMERS == 256 && ROWS >= 128 && SHARED + STAGING <= 227 * 1024;
    __device__ static int warp_token() { return threadIdx.x / 32 * 16; }
    __device__ static int warp_row() { return 0; }
};
struct TileMaps {
    CUtensorMap x, W, more_x, more_W, out[3];
};

// A stage's two halves. copy_w: two boxes with PAIR; down the columns a box of 64 columns is a panel.
template <class S, bool X_COLS>
__device__ __forceinline__ void copy_x_boxes(const TileMaps& maps, uint32_t to, int i, int n0, bool more,
                                             uint32_t filled) {
    if constexpr (X_COLS)
        #pragma unroll
        for (int c = 0; c < S::TOKENS; c += 64) copy_box(to + c * STAGE_IN * 2, maps.x, filled, n0 + c, i);
    else copy_box(to, more ? maps.more_x : maps.x, filled, i, n0);
}
template <class S, bool W_COLS, bool PAIR>
__device__ __forceinline__ void copy_w_boxes(const TileMaps& maps, uint32_t to, int i, int r0, int out, bool more,
                                             uint32_t filled, uint64_t policy) {
    const CUtensorMap& map = more ? maps.more_W : maps.W;
    constexpr int OWN = S::ROWS / S::SHARING;
    const int mine = S::SHARING > 1 ? (int)(blockIdx.x % 2) * OWN : 0;
    const auto copy = [&](int place, int x, int y) {
        if (S::SHARING > 1) copy_box_to_both(policy, to + place, map, filled, x, y);
        else copy_box_by(policy, to + place, map, filled, x, y);
    };
    if constexpr (W_COLS)
        #pragma unroll
        for (int c = 0; c < OWN; c += 64) copy((mine + c) * STAGE_IN * 2, r0 + mine + c, i);
    else if constexpr (S::SHARING > 1) copy(mine * STAGE_IN * 2, i, !PAIR ? r0 + mine : mine ? out + r0 / 2 : r0 / 2);
    else if constexpr (PAIR) copy(0, i, r0 / 2), copy(S::ROWS * STAGE_IN, i, out + r0 / 2);
    else copy(0, i, r0);
}

// The shared memory of a block, and the barriers of its stages.
template <class S> struct HopperStages {
    uint32_t shared, filled, emptied; // the stages; two arrays of mbarriers
    int given;
    __device__ __forceinline__ int count() const { return S::GIVES ? given : S::STAGES; }
    __device__ __forceinline__ uint32_t x(int s) const { return shared + s * S::STAGE_BYTES; }
    __device__ __forceinline__ uint32_t w(int s) const { return x(s) + S::X_BYTES; }
    __device__ __forceinline__ uint32_t full(int s) const { return filled + 8 * s; }
    __device__ __forceinline__ uint32_t empty(int s) const { return emptied + 8 * s; }
    __device__ __forceinline__ void done_with(int s) const { // a warp; both blocks that fill the stage are told
        const int lane = threadIdx.x % 32;
        if (lane >= S::SHARING) return;
        if (S::SHARING == 1) barrier_arrive(empty(s));
        else barrier_arrive_there(block_address(empty(s), lane));
    }
};

// One thread. Weights may be read before the previous kernels have ended, as in stream_kernel; with W_COLS W may be an
// activation (dW = dy^T x), which may not. Where each block has one tile, W leaves the L2 cache to the activations.
// (Blocks that go on to further tiles lose by it: a copy brings 256 bytes of a row to that cache, a stage takes 128.)
template <class S, bool X_COLS, bool W_COLS, bool PAIR>
__device__ __forceinline__ void produce(const TileMaps& maps, const TileArgs& p, const HopperStages<S>& stages,
                                        int units) {
    Ring<S::STAGES> ring;
    const uint64_t policy = !W_COLS && units <= (int)gridDim.x / S::SHARING ? EVICT_FIRST : EVICT_NORMAL;
    const int first = blockIdx.x / S::SHARING;
    for (int u = first; u < units; u += gridDim.x / S::SHARING) {
        const TilePlace<S, PAIR> at(p, u / p.splits, u % p.splits);
        const auto copy_w = [&](int step, int s) {
            barrier_arrive_expecting(stages.full(s), S::STAGE_BYTES);
            copy_w_boxes<S, W_COLS, PAIR>(maps, stages.w(s), at.number(step), at.r0, p.out, at.more(step),
                                          stages.full(s), policy);
        };
        const auto copy_x = [&](int step, int s) {
            copy_x_boxes<S, X_COLS>(maps, stages.x(s), at.number(step), at.n0, at.more(step), stages.full(s));
        };
        int step = at.first;
        if (u == first) { // the ring is empty
            const int ready = min(at.last - at.first, stages.count());
            if (W_COLS) wait_for_previous();
            for (int s = 0; s < ready; s++) copy_w(at.first + s, s);
            if (!W_COLS) wait_for_previous();
            for (; step < at.first + ready; step++, ring.next(stages.count())) copy_x(step, ring.stage);
        }
        for (; step < at.last; step++, ring.next(stages.count())) {
            barrier_wait(stages.empty(ring.stage), ring.parity ^ 1);
            copy_w(step, ring.stage), copy_x(step, ring.stage);
        }
    }
}

// sum = x W^T over `steps` stages, of which there is one at least. One group of wgmma is under way while the next stage
// is waited for.
template <class S, bool X_COLS, bool W_COLS>
__device__ __forceinline__ void multiply_steps_wgmma(float (&sum)[1][S::NF][4], const HopperStages<S>& stages,
                                                     Ring<S::STAGES>& ring, int steps) {
    constexpr int PANEL = STAGE_IN * 128, DOWN = 16 * 128, ALONG = 32; // bytes of 16 numbers of `in`, down and along
    const uint32_t my_x = threadIdx.x / 128 * (64 * STAGE_IN * 2);
    const auto multiply = [&](bool add) {
        barrier_wait(stages.full(ring.stage), ring.parity);
        const uint32_t x = stages.x(ring.stage) + my_x, w = stages.w(ring.stage);
        wgmma_begin();
        #pragma unroll
        for (int k = 0; k < STAGE_IN / 16; k++)
            wgmma<S::ROWS, X_COLS, W_COLS>(sum[0], wgmma_operand(x + k * (X_COLS ? DOWN : ALONG), PANEL),
                                           wgmma_operand(w + k * (W_COLS ? DOWN : ALONG), PANEL), add || k);
        wgmma_commit();
    };
    multiply(false);
    int before = ring.stage;
    ring.next(stages.count());
    for (int step = 1; step < steps; step++) {
        multiply(true);
        wgmma_wait<1>();
        stages.done_with(before);
        before = ring.stage;
        ring.next(stages.count());
    }
    wgmma_wait<0>();
    wgmma_settle(sum);
    stages.done_with(before);
}

// The same of e4m3. A stage is a group of 128 numbers of `in`, and two e4m3 are to the copies one number of two bytes.
// A wgmma of e4m3 keeps of its 32 products, and of the sum before, what is less than about 14 bits behind the largest
// one's first, so what it makes of 128 rows of W and a group is added to the sums in float, times the scales of both
// operands, which are asked for a stage ahead. Meanwhile the other warpgroup's wgmma is under way.
template <class S, bool PAIR>
__device__ __forceinline__ void multiply_groups(float (&sum)[1][S::NF][4], const HopperStages<S>& stages,
                                                Ring<S::STAGES>& ring, const TileArgs& p,
                                                const TilePlace<S, PAIR>& at) {
    static_assert(S::ROWS % 128 == 0, "a wgmma has 128 rows");
    const uint32_t my_x = threadIdx.x / 128 * (64 * STAGE_IN * 2);
    const int groups = (p.in + STAGE_IN - 1) / STAGE_IN, last = ((PAIR ? 2 : 1) * p.out - 1) / 128;
    // Each half of the tile's rows has one scale.
    const int first = (PAIR ? at.r0 / 2 : at.r0) / 128, second = (PAIR ? p.out + at.r0 / 2 : at.r0 + S::ROWS / 2) / 128;
    const float* const of_x = p.x_scale + at.token(0, 0);
    const float *const of_w[2] = {p.W_scale + (size_t)first * groups, p.W_scale + (size_t)min(second, last) * groups};
    float x[2], w[2]; // of this lane's two tokens, and of the halves
    const auto load = [&](int step) {
        #pragma unroll
        for (int i = 0; i < 2; i++) x[i] = of_x[(size_t)step * p.pitch + i * 8], w[i] = of_w[i][step];
    };
    load(at.first);
    #pragma unroll
    for (int j = 0; j < S::NF * 4; j++) sum[0][j / 4][j % 4] = 0;
    for (int step = at.first; step < at.last; step++, ring.next(stages.count())) {
        barrier_wait(stages.full(ring.stage), ring.parity);
        float factor[2][2];
        #pragma unroll
        for (int f = 0; f < S::NF; f += 16) { // fragments of 128 rows
            const uint32_t from_x = stages.x(ring.stage) + my_x, from_w = stages.w(ring.stage) + f * (8 * STAGE_IN * 2);
            float part[1][16][4];
            wgmma_begin();
            #pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_e4m3(part[0], wgmma_operand(from_x + k * 32, 0), wgmma_operand(from_w + k * 32, 0), k);
            wgmma_commit();
            if (f == 0) {
                #pragma unroll
                for (int i = 0; i < 4; i++) factor[i / 2][i % 2] = x[i / 2] * w[i % 2];
                if (step + 1 < at.last) load(step + 1);
            }
            wgmma_wait<0>();
            wgmma_settle(part);
            if (f + 16 == S::NF) stages.done_with(ring.stage);
            #pragma unroll
            for (int j = 0; j < 16; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[0][f + j][e] = fmaf(part[0][j][e], factor[e / 2][2 * (f + j) / S::NF], sum[0][f + j][e]);
        }
    }
}

// The blocks of a cluster share a tile, and each has the sums of some of its steps. Block b adds up the tile's pieces
// b, b + splits, .., in the order of blocks; all send it theirs, to its memory at `received`, and its barrier `came`
// counts the bytes. A piece: the fragments that give a lane four columns of each of its two tokens. Nobody reads
// another block's memory, so none has to wait at its end. Consumers only.
template <class S, class Epilogue> struct ClusterPieces {
    static constexpr int EACH = Epilogue::PAIR ? 4 : 2, PIECES = S::NF / EACH; // fragments of a piece; pieces of a tile
    static constexpr int BYTES = EACH * S::CONSUMERS * 16;                     // of a piece
    BOTH static int most(int splits) { return (PIECES + splits - 1) / splits; } // that a block adds up
    __device__ static int count(int split, int splits) { return (PIECES - split + splits - 1) / splits; }
};
template <class S, class Epilogue, class Place>
__device__ __forceinline__ void finish_in_cluster(const float (&sum)[1][S::NF][4], uint32_t received, uint32_t came,
                                                  int split, const TileArgs& p, const Place& at, Epilogue& epilogue) {
    using C = ClusterPieces<S, Epilogue>;
    const int t = threadIdx.x % 4, splits = p.splits;
    const uint32_t mine = received + threadIdx.x * 16;
    const auto row = [&](int piece) {
        return (Epilogue::PAIR ? at.r0 / 2 : at.r0) + piece * 16 + t / 2 * 4 + t % 2 * 8;
    };
    const auto inside = [&](int piece, int h) {
        return piece < C::PIECES && at.token(0, h) < p.N && row(piece) < p.out;
    };
    const auto old = [&](int piece, int h) {
        return Epilogue::ADDS && inside(piece, h) ? epilogue.old_four(at.token(0, h), row(piece)) : float4{};
    };
    if (!p.apart) cluster_arrive();
    cluster_wait(); // all have begun; or all have used their stages, in whose place the sums come
    int owner = 0, turn = 0;
    #pragma unroll
    for (int piece = 0; piece < C::PIECES; piece++) {
        const uint32_t to = block_address(mine + (turn * splits + split) * C::BYTES, owner);
        const uint32_t barrier = block_address(came, owner);
        #pragma unroll
        for (int e = 0; e < C::EACH; e++)
            send_block(to + e * (S::CONSUMERS * 16), sum[0][piece * 2 + e % 2 + e / 2 * S::UP], barrier);
        if (++owner == splits) owner = 0, turn++;
    }
    float4 next[2] = {old(split, 0), old(split, 1)};
    if (split < C::PIECES) barrier_wait(came, 0);
    uint32_t from = mine;
    for (int piece = split; piece < C::PIECES; piece += splits, from += splits * C::BYTES) {
        float4 second[2] = {next[0], next[1]};
        if constexpr (Epilogue::ADDS) next[0] = old(piece + splits, 0), next[1] = old(piece + splits, 1);
        float v[C::EACH][4] = {};
        #pragma unroll
        for (int e = 0; e < C::EACH; e++) {
            uint4 part[MOST_SPLITS];
            #pragma unroll
            for (int s = 0; s < MOST_SPLITS; s++)
                if (s < splits) part[s] = load_shared(from + s * C::BYTES + e * (S::CONSUMERS * 16));
            #pragma unroll
            for (int s = 0; s < MOST_SPLITS; s++)
                if (s < splits) {
                    v[e][0] += __uint_as_float(part[s].x), v[e][1] += __uint_as_float(part[s].y);
                    v[e][2] += __uint_as_float(part[s].z), v[e][3] += __uint_as_float(part[s].w);
                }
        }
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 y = four_columns(v[0], v[1], h);
            if constexpr (Epilogue::PAIR) second[h] = four_columns(v[2], v[3], h);
            if (inside(piece, h)) epilogue.four(at.token(0, h), row(piece), y, second[h]);
        }
    }
}

// Hands a warp's sums to an epilogue with outputs, whose boxes of 128 bytes a token go through shared memory, each in
// one of the warp's two places there in turn: a lane's own stores would write eight pieces of 32 bytes at a time, and
// the warp would wait for them. What the epilogue adds to is asked for 64 columns ahead.
template <class S, class Epilogue> struct Boxes {
    static constexpr int FRAGMENTS = Epilogue::PAIR ? S::UP : S::NF;
    const TilePlace<S, Epilogue::PAIR>& at;
    const int N, out, mine = threadIdx.x % 4 / 2 * 4 + threadIdx.x % 2 * 8, n0 = at.token(0, 0);
    float4 old[2][4];
    using Kept = uint2[FRAGMENTS < 8 ? 1 : FRAGMENTS / 8][2][4]; // with ROUNDS: the numbers of output 0
    __device__ __forceinline__ int row(int j0, int i) const {
        return (Epilogue::PAIR ? at.r0 / 2 : at.r0) + j0 * 8 + i * 16 + mine;
    }
    __device__ __forceinline__ void load(int j0, const Epilogue& epilogue) {
        if constexpr (Epilogue::ADDS)
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const int n = n0 + k / 4 * 8, r = row(j0, k % 4);
                old[k / 4][k % 4] = n < N && r < out ? epilogue.old_four(n, r) : float4{};
            }
    }
    // store(place) to shared memory, then the box goes to column x of an output.
    template <class Store>
    __device__ __forceinline__ void put(const CUtensorMap& map, uint32_t places, int& turn, int x, Store store) const {
        const int lane = threadIdx.x % 32;
        const uint32_t place = places + turn * S::BOX;
        if (lane == 0) wait_for_boxes<1>();
        __syncwarp();
        #pragma unroll
        for (int h = 0; h < 2; h++) store(place, h, h * 8 + lane / 4);
        shared_to_async();
        __syncwarp();
        if (lane == 0) store_box(map, place, x, n0 - lane / 4), commit_boxes();
        turn ^= 1;
    }
    __device__ __forceinline__ void finish(const float (&sum)[S::NF][4], const TileMaps& maps, uint32_t places,
                                           int& turn, Epilogue& epilogue) {
        const int first = row(0, 0) - mine, t = threadIdx.x % 4;
        [[maybe_unused]] WeightSums weights[2];
        if constexpr (Epilogue::PARTS)
            weights[0].begin(n0, first, N, epilogue), weights[1].begin(n0 + 8, first, N, epilogue);
        [[maybe_unused]] Kept kept;
        #pragma unroll
        for (int j0 = 0; j0 < FRAGMENTS; j0 += 8) {
            Boxes next = *this;
            if (j0 + 8 < FRAGMENTS) next.load(j0 + 8, epilogue);
            typename Epilogue::Four four[Epilogue::OUTPUTS][2][4];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int j = j0 + 2 * i;
                    const auto two = [&](int j) { // if nothing is added, two of a fragment and two of the next will do
                        return make_float4(sum[j][2 * h], sum[j][2 * h + 1], sum[j + 1][2 * h], sum[j + 1][2 * h + 1]);
                    };
                    float4 y, second = {};
                    if constexpr (Epilogue::PARTS) y = weights[h].next(sum[j], sum[j + 1], h, j, out);
                    else if constexpr (Epilogue::ADDS) y = four_columns(sum[j], sum[j + 1], h), second = old[h][i];
                    else y = two(j);
                    if constexpr (Epilogue::PAIR) second = two(j + S::UP);
                    epilogue.values(y, second, [&](int k, const float4& v) { round_four(four[k][h][i], v); });
                }
                if constexpr (Epilogue::PARTS) weights[h].end_piece(j0, N, out, epilogue);
                if constexpr (Epilogue::ROUNDS)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) kept[j0 / 8][h][i] = four[0][h][i];
            }
            #pragma unroll
            for (int k = 0; k < Epilogue::OUTPUTS; k++) {
                if (!epilogue.output(k).at) continue;
                if constexpr (Epilogue::ADDS) // of float
                    #pragma unroll
                    for (int i0 = 0; i0 < 4; i0 += 2)
                        put(maps.out[k], places, turn, first + j0 * 8 + i0 * 16, [&](uint32_t place, int h, int row) {
                            #pragma unroll
                            for (int i = 0; i < 2; i++)
                                store_shared(chunk_address(place, row, 4 * i + mine / 4), four[k][h][i0 + i]);
                        });
                else
                    put(maps.out[k], places, turn, first + j0 * 8, [&](uint32_t place, int h, int row) {
                        #pragma unroll
                        for (int i = 0; i < 4; i++) {
                            store_shared(chunk_address(place, row, 2 * i) + t * 4, four[k][h][i].x);
                            store_shared(chunk_address(place, row, 2 * i + 1) + t * 4, four[k][h][i].y);
                        }
                    });
            }
            #pragma unroll
            for (int k = 0; k < 8; k++) old[k / 4][k % 4] = next.old[k / 4][k % 4];
        }
        if constexpr (Epilogue::PARTS) weights[0].end(S::NF, epilogue), weights[1].end(S::NF, epilogue);
        if constexpr (Epilogue::ROUNDS) round(kept, maps, places, turn, first, epilogue);
    }
    // The tile's columns are a group: a box of e4m3, two of which count as one number.
    __device__ __forceinline__ void round(const Kept& kept, const TileMaps& maps,
                                          uint32_t places, int& turn, int first, Epilogue& epilogue) {
        static_assert(FRAGMENTS == 16, "a group has 128 numbers");
        put(maps.out[1], places, turn, first / 2, [&](uint32_t place, int h, int row) {
            uint32_t largest = 0;
            #pragma unroll
            for (int k = 0; k < 8; k++)
                largest = larger(larger(largest, kept[k / 4][h][k % 4].x), kept[k / 4][h][k % 4].y);
            const GroupRounding rounding(largest_of<4>(largest));
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const uint32_t at = chunk_address(place, row, k) + threadIdx.x % 4 * 2;
                store_shared_half(at, rounding.two(kept[k / 4][h][k % 4].x));
                store_shared_half(at + 8, rounding.two(kept[k / 4][h][k % 4].y));
            }
            const int n = n0 + h * 8;
            if (threadIdx.x % 4 == 0 && n < N)
                epilogue.rounded.scale[(size_t)(first / 128) * epilogue.rounded.pitch + n] = rounding.factor;
        });
    }
};

template <class S, bool X_COLS, bool W_COLS, bool E4M3, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
hopper_kernel(const __grid_constant__ TileMaps maps, const __grid_constant__ TileArgs p, int units, Epilogue epilogue) {
#ifdef HAVE_WGMMA
    using C = ClusterPieces<S, Epilogue>;
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * S::STAGES + 1];
    if (epilogue.skipped()) return;
    const uint32_t at_barriers = shared_address(barriers), came = at_barriers + 16 * S::STAGES;
    const HopperStages<S> stages = {(shared_address(memory) + 1023) & ~1023u, at_barriers, at_barriers + 8 * S::STAGES,
                                    p.stages};
    if (threadIdx.x == S::CONSUMERS) prefetch_map(maps.W), prefetch_map(maps.x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages.count(); s++)
            barrier_begin(stages.full(s), 1), barrier_begin(stages.empty(s), S::SHARING * S::CONSUMERS / 32);
        barrier_begin(came, 1);
        barriers_begun();
    }
    __syncthreads();
    if (p.apart || S::SHARING > 1) cluster_arrive();
    if (S::SHARING > 1) cluster_wait(); // both have begun their barriers
    let_next_start(); // all our blocks have their places
    if (threadIdx.x >= S::CONSUMERS) {
        if (S::MOVES_REGISTERS) keep_registers<40>();
        if (threadIdx.x == S::CONSUMERS) produce<S, X_COLS, W_COLS, Epilogue::PAIR>(maps, p, stages, units);
        return;
    }
    if (S::MOVES_REGISTERS) take_registers<232>();
    if (p.splits > 1 && threadIdx.x == 0)
        barrier_arrive_expecting(came, C::count(blockIdx.x % p.splits, p.splits) * p.splits * C::BYTES);
    wait_for_previous(); // whose results an epilogue may add to
    Ring<S::STAGES> ring;
    [[maybe_unused]] const uint32_t places = stages.shared + S::STAGES * S::STAGE_BYTES + threadIdx.x / 32 * 2 * S::BOX;
    [[maybe_unused]] int turn = 0;
    for (int u = blockIdx.x / S::SHARING; u < units; u += gridDim.x / S::SHARING) {
        const TilePlace<S, Epilogue::PAIR> at(p, u / p.splits, u % p.splits);
        float sum[1][S::NF][4];
        [[maybe_unused]] Boxes<S, Epilogue> boxes = {at, p.N, p.out};
        constexpr bool STAGED = S::STAGED && Epilogue::OUTPUTS > 0, LATE = E4M3 || Epilogue::MASKS; // (registers)
        if constexpr (STAGED && !LATE)
            if (p.splits == 1) boxes.load(0, epilogue);
        if constexpr (Epilogue::MASKS) { // (then there are no splits)
            const KeptWords<S> words(at, epilogue.masks, p.more / epilogue.rank);
            multiply_steps_wgmma<S, X_COLS, W_COLS>(sum, stages, ring, at.first_more);
            for (int step = at.first_more; step < at.last; step++, ring.next(stages.count())) {
                barrier_wait(stages.full(ring.stage), ring.parity);
                const uint32_t x = stages.x(ring.stage), w = stages.w(ring.stage);
                add_masked_stage<S>(sum, x, w, at.number(step), words, p, epilogue);
                __syncwarp();
                stages.done_with(ring.stage);
            }
            wgmma_settle(sum);
        } else if constexpr (E4M3) multiply_groups(sum, stages, ring, p, at);
        else multiply_steps_wgmma<S, X_COLS, W_COLS>(sum, stages, ring, at.last - at.first);
        if (p.splits > 1) { // (then this is the block's only unit)
            const uint32_t received = stages.shared + (p.apart ? p.stages * S::STAGE_BYTES : 0);
            finish_in_cluster<S>(sum, received, came, u % p.splits, p, at, epilogue);
            return;
        }
        if constexpr (STAGED) {
            if constexpr (LATE) boxes.load(0, epilogue);
            boxes.finish(sum[0], maps, places, turn, epilogue);
        } else
            #pragma unroll
            for (int h = 0; h < 2; h++) finish_row<S>(sum[0], h, at.token(0, h), at.r0, p.N, p.out, epilogue);
    }
    wait_for_boxes<0>(); // before the memory they lie in goes away
    // ... or barriers at which the other block arrives. (A thread that has ended counts as there.)
    if (S::SHARING > 1) cluster_arrive(), cluster_wait();
#endif
}

template <class S, bool X_COLS = false, bool W_COLS = false, bool E4M3 = false, class Epilogue>
void launch_hopper(Context& ctx, TileArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    const int tiles = plan_tiles<S, X_COLS, W_COLS, Epilogue>(ctx, p), units = tiles * p.splits;
    if (Epilogue::MASKS && !(p.more && p.more_last))
        DIE("a product that masks further columns needs some, as its last");
    if (p.splits > (Epilogue::MASKS || Epilogue::PARTS ? 1 : MOST_SPLITS))
        DIE("this product takes no %d splits", p.splits);
    if (p.splits > (p.more + STAGE_IN - 1) / STAGE_IN + (p.in + STAGE_IN - 1) / STAGE_IN)
        DIE("a product of %d numbers has not %d splits", p.in + p.more, p.splits);
    if (S::MOST < S::TOKENS && p.N > S::MOST) DIE("a tile of %d tokens has not %d", S::MOST, p.N);
    constexpr int X_BOX = X_COLS ? STAGE_IN : S::MOST;
    constexpr int W_BOX = W_COLS ? STAGE_IN : Epilogue::PAIR || S::SHARING > 1 ? S::ROWS / 2 : S::ROWS;
    static_assert(S::SHARING == 1 || S::ROWS % 128 == 0, "a panel has one who copies it");
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out;
    const auto map = [](const bf16* matrix, int rows, int columns, int ld, int box) {
        return tensor_map(matrix, {{(size_t)columns, 1, STAGE_IN}, {(size_t)rows, (size_t)ld, box}});
    };
    const auto map_x = [&](const bf16* x, int in, int ld) {
        return X_COLS ? map(x, in, p.N, ld, X_BOX) : map(x, p.N, in, ld, X_BOX);
    };
    const auto map_w = [&](const bf16* W, int in, int ld) {
        return W_COLS ? map(W, in, p.out, ld, W_BOX) : map(W, rows, in, ld, W_BOX);
    };
    TileMaps maps = {map_x(p.x, p.in, p.ldx), map_w(p.W, p.in, p.ldw), {}, {}, {}};
    constexpr bool STAGED = S::STAGED && Epilogue::OUTPUTS > 0;
    if constexpr (STAGED)
        for (int k = 0; k < Epilogue::OUTPUTS; k++)
            if (const auto to = epilogue.output(k); to.at) {
                const int wide = 128 / (int)sizeof(*to.at);
                maps.out[k] = tensor_map(to.at, {{(size_t)p.out, 1, wide}, {(size_t)p.N, to.ld, 16}});
            }
    if constexpr (Epilogue::ROUNDS) {
        static_assert(STAGED && S::ROWS == 256);
        if (p.splits > 1 || p.out % 128) DIE("a product that rounds takes whole groups, and no splits");
        const size_t half = (size_t)p.out / 2;
        maps.out[1] = tensor_map((const bf16*)epilogue.rounded.q, {{half, 1, 64}, {(size_t)p.N, half, 16}});
    }
    if (p.more) {
        maps.more_x = map_x(p.more_x, p.more, p.more);
        maps.more_W = map_w(p.more_W, p.more, W_COLS ? p.out : p.more);
    }
    if (S::SHARING > 1 && p.splits > 1) DIE("blocks that share W have no splits");
    const int blocks =
        p.splits > 1 ? units : std::min(units, S::BLOCKS * ctx.gpu->sms / S::SHARING) * S::SHARING;
    using C = ClusterPieces<S, Epilogue>;
    const size_t received = p.splits > 1 ? (size_t)C::most(p.splits) * p.splits * C::BYTES : 0;
    p.stages = S::GIVES && received + S::SHARED > S::ROOM ? S::STAGES - 1 : S::STAGES;
    const size_t ring = S::SHARED - (size_t)(S::STAGES - p.stages) * S::STAGE_BYTES;
    p.apart = received && ring + received <= S::ROOM;
    if (!p.apart) p.stages = S::STAGES;
    if (!p.apart && received > (size_t)S::STAGES * S::STAGE_BYTES)
        DIE("a tile of %d x %d has no room for the sums of %d splits", S::TOKENS, S::ROWS, p.splits);
    const size_t shared = p.apart ? ring + received : S::SHARED + (STAGED && p.splits == 1 ? S::STAGING : 0);
    launch_clusters(ctx, ctx.gpu->overlap, p.splits * S::SHARING, hopper_kernel<S, X_COLS, W_COLS, E4M3, Epilogue>,
                    blocks, S::THREADS, shared, maps, p, units, epilogue);
}

// ---- The choice of a tile
using Tile128x128 = TileShape<128, 128, 64, 64, 3>;
using Tile64x128 = TileShape<64, 128, 32, 64, 3>;
using Tile64x64 = TileShape<64, 64, 32, 32, 4>;
using Tile32x64 = TileShape<32, 64, 16, 32, 6>;

// The shape and the number of splits with the least predicted time in microseconds: the blocks that the busiest
// multiprocessor has, times a block's steps, plus what splits cost. The figures were fitted to an H100 (tests/bench_gpu
// sweep); what matters is their proportion. For 1,024 numbers of `in` a block takes `alone` if it is alone on its
// multiprocessor, and `full` if that has many.
struct TilePlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    template <class S> void consider(const Context& ctx, int index, double alone, double full, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), area = S::TOKENS * S::ROWS;
        for (int s = 1; s <= 12; s++) {
            if (s > 1 && (s * 128 > in || !splits_fit<S>(tiles, s))) break;
            const double blocks = (double)((tiles * s + ctx.gpu->sms - 1) / ctx.gpu->sms); // of the busiest
            double time = 1 + std::max(alone, blocks * full) * in / 1024 / s;
            if (s > 1) time += 0.85 + s * (0.22 + 0.93 * (double)area / 16384) + (double)(tiles * s * area) * 8 / 5.5e6;
            if (time < least) shape = index, splits = s, least = time;
        }
    }
    // With X_COLS tiles of 32 tokens are not to be had; of many tokens they were never the best.
    TilePlan(const Context& ctx, int N, int out, int in, bool x_cols = false) {
        if (ctx.invariant) return;
        consider<Tile128x128>(ctx, 0, 13, 9.8, N, out, in);
        consider<Tile64x128>(ctx, 1, 9.1, 6.5, N, out, in);
        consider<Tile64x64>(ctx, 2, 9, 3.4, N, out, in);
        if (!x_cols && N <= 128) consider<Tile32x64>(ctx, 3, 5.8, 2.6, N, out, in);
    }
};
// On Hopper: the shape and the number of splits with the least predicted time in microseconds, that of the busiest
// multiprocessor. A step of 128 x 256 takes 0.55 on an H100; a narrower tile reads more than it multiplies.
using Hopper128x256 = HopperShape<128, 256, 4>;
using Hopper128x192 = HopperShape<128, 192, 5>;
using HopperPairs = HopperShape<128, 256, 4, 128, 2>; // of four waves or more; of fewer it is slower
using Hopper128x128 = HopperShape<128, 128, 6>;
using Hopper64x64 = HopperShape<64, 64, 6>; // two blocks a multiprocessor
// For few blocks, forward: with room for most of what they read, so that the weights of the next product are on their
// way to half of the multiprocessors while this one's multiply in the other half, and for sums they receive.
using Hopper32x64 = HopperShape<64, 64, 16, 32>;
using Hopper64x64Deep = HopperShape<64, 64, 14>;
using Hopper64x128 = HopperShape<64, 128, 9>;
using Hopper128x64 = HopperShape<128, 64, 9>;
using Hopper128x96 = HopperShape<128, 96, 8>;
struct HopperPlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    HopperPlan() = default;
    template <class S> void consider(int index, double step, int sms, int most, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), steps = (in + STAGE_IN - 1) / STAGE_IN;
        const bool small = S::TOKENS * S::ROWS == 64 * 64;
        if (S::BLOCKS == 1) most = std::min(most, 2); // large clusters of such blocks find no places
        for (int s = 1; s <= std::min<int64_t>(most, steps); s *= 2) {
            if (s > 1 && tiles * s > S::BLOCKS * (sms - 4)) break;
            const double each = (double)(tiles * s) / (sms / S::SHARING);
            const double waves = S::BLOCKS > 1 ? std::max(1., each) : std::ceil(each);
            // Blocks of few tokens also take places in which those of the next product could begin.
            const double sums = s > 1 ? 0.8 + 0.6 * S::TOKENS * S::ROWS / 4096 + 0.05 * s : 0;
            const double places = small ? each / 2 : 0;
            choose(index, s, waves * (double)((steps + s - 1) / s) * step + sums + places);
        }
    }
    // Of one of the shapes for few blocks, a tile each. Blocks take places in which the next product's could begin, and
    // large clusters of them, or clusters of large ones, find none if they need more than two thirds of the GPU.
    template <class S> void consider_few(int index, double step, int sms, int most, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), steps = (in + STAGE_IN - 1) / STAGE_IN;
        for (int s = 1; s <= std::min<int64_t>(std::min(most, 4), steps); s *= 2) {
            const int64_t each = (steps + s - 1) / s;
            if (tiles * s > (s == 1 ? sms : s > 2 || S::ROWS > 64 ? sms * 2 / 3 : sms - 4)) break;
            if (each > (s > 1 ? 96 : 64)) continue; // they stream less well
            const double sums = s > 1 ? 0.3 + 0.3 * S::ROWS / 64 + 0.05 * s : 0;
            choose(index, s, (double)each * step + sums + 1.1 * (double)(tiles * s) / sms);
        }
    }
    void choose(int index, int s, double time) {
        if (time < least) shape = index, splits = s, least = time;
    }
    HopperPlan(const Context& ctx, int most, int N, int out, int in, bool few) {
        const int sms = ctx.gpu->sms;
        consider<Hopper128x128>(2, 0.32, sms, ctx.invariant ? 1 : most, N, out, in);
        if (ctx.invariant) return;
        consider<Hopper128x256>(0, 0.55, sms, most, N, out, in);
        if (count_tiles<HopperPairs>(N, out) >= 2 * sms) consider<HopperPairs>(9, 0.53, sms, 1, N, out, in);
        consider<Hopper128x192>(1, 0.419, sms, most, N, out, in);
        consider<Hopper64x64>(3, 0.17, sms, most, N, out, in);
        if (!few) return;
        if (N <= Hopper32x64::MOST) consider_few<Hopper32x64>(8, 0.1, sms, most, N, out, in);
        consider_few<Hopper64x64Deep>(4, 0.115, sms, most, N, out, in);
        consider_few<Hopper64x128>(5, 0.147, sms, most, N, out, in);
        consider_few<Hopper128x64>(6, 0.15, sms, most, N, out, in);
        consider_few<Hopper128x96>(7, 0.21, sms, 1, N, out, in);
    }
};
template <bool X_COLS, bool W_COLS, class Epilogue> void hopper_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    constexpr bool FEW = !X_COLS && !W_COLS && !Epilogue::MASKS && !Epilogue::PARTS;
    const int most = Epilogue::MASKS || Epilogue::PARTS ? 1 : MOST_SPLITS;
    const HopperPlan plan(ctx, most, p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in + p.more, FEW);
    p.splits = plan.splits;
    if constexpr (FEW)
        switch (plan.shape) {
            case 4: return launch_hopper<Hopper64x64Deep>(ctx, p, epilogue);
            case 5: return launch_hopper<Hopper64x128>(ctx, p, epilogue);
            case 6: return launch_hopper<Hopper128x64>(ctx, p, epilogue);
            case 7: return launch_hopper<Hopper128x96>(ctx, p, epilogue);
            case 8: return launch_hopper<Hopper32x64>(ctx, p, epilogue);
        }
    switch (plan.shape) {
        case 0: return launch_hopper<Hopper128x256, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_hopper<Hopper128x192, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_hopper<Hopper128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: return launch_hopper<Hopper64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 9: return launch_hopper<HopperPairs, X_COLS, W_COLS>(ctx, p, epilogue);
    }
    DIE("no tile of shape %d for this product", plan.shape);
}
template <bool X_COLS = false, bool W_COLS = false, class Epilogue>
void tile_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    if (ctx.gpu->hopper) return hopper_product<X_COLS, W_COLS>(ctx, p, epilogue);
    const TilePlan plan(ctx, p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in + p.more, X_COLS);
    p.splits = plan.splits;
    switch (plan.shape) {
        case 0: return launch_tiles<Tile128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_tiles<Tile64x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_tiles<Tile64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: if constexpr (!X_COLS) return launch_tiles<Tile32x64, X_COLS, W_COLS>(ctx, p, epilogue); else break;
    }
    DIE("no tile of shape %d for this product", plan.shape);
}

// ---- The adapters' own kernels. A's rows pass them in groups of 32, so that one pass over x serves up to three
// modules (q, k, v; gate, up) of rank 32. What they need to know:
struct LoraArgs {
    const bf16* A; // (m * rank, in)
    int N, in, rank, modules, module[3];
    bool dropping;
    float scale = 1; // 1 / (1 - p)
    Dropout dropout = {};
    PhiloxKeys keys = PhiloxKeys(0); // (as arguments they cost nothing; adding them up is a quarter of a mask's work)
    DropoutMasks kept;
    LoraArgs(const Linear<bf16>& W, int N)
        : A(W.adapter.A), N(N), in(W.in), rank(W.adapter.rank), modules(W.adapter.modules),
          dropping(W.adapter.dropout), kept{W.adapter.kept, (W.in + 63) / 64, N} {
        if (in % 8 || rank % 8) DIE("an adapter of rank %d on %d columns: the GPU takes multiples of 8", rank, in);
        for (int j = 0; j < 3; j++) module[j] = W.adapter.module[j];
        if (!dropping) return;
        if (!kept.words) DIE("dropout on a GPU needs room for what it keeps");
        dropout = *W.adapter.dropout, keys = PhiloxKeys(dropout.seed), scale = 1 / (1 - dropout.p);
    }
    BOTH int width() const { return modules * rank; }
    BOTH int each() const { return (rank + 31) / 32; } // groups of a module
    BOTH int groups() const { return modules * each(); }
    // (An index that is not constant would cost a copy of the array.)
    __device__ int name(int j) const { return j == 0 ? module[0] : j == 1 ? module[1] : module[2]; }
    __device__ int module_of(int group) const { return group / each(); }
    __device__ int first_row(int group) const { return group % each() * 32; } // of its module's
};

// lora_down of few tokens, without dropout. Grid: (tokens / 32, groups), 8 warps. A block owns 32 tokens by 32 rows of
// one module's A. Its warps take steps of 32 of `in` in turn; a lane reads its operands straight from memory, as in
// stream_kernel: eight numbers each of four tokens and of four rows. The warps' sums are added in shared memory, four a
// thread. Bound by the latency of the loads.
__global__ void __launch_bounds__(256, 2) lora_down_few_kernel(bf16* h, const bf16* x, LoraArgs p) {
    __shared__ float sums[8][32][32]; // (warp, token, row)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * 32, j = p.module_of(blockIdx.y), r0 = p.first_row(blockIdx.y);
    wait_for_previous();
    float sum[4][2][4] = {};
    for (int i = warp * 32 + 8 * t; i < (p.in + 31) / 32 * 32; i += 256) {
        uint4 a[4], b[4];
        #pragma unroll
        for (int m = 0; m < 4; m++) {
            const int n = n0 + m * 8 + g;
            a[m] = n < p.N && i < p.in ? *(const uint4*)(x + (size_t)n * p.in + i) : uint4{};
        }
        #pragma unroll
        for (int c = 0; c < 4; c++) {
            const int r = r0 + c * 8 + g;
            b[c] = r < p.rank && i < p.in ? *(const uint4*)(p.A + (size_t)(j * p.rank + r) * p.in + i) : uint4{};
        }
        #pragma unroll
        for (int c = 0; c < 4; c++)
            #pragma unroll
            for (int m = 0; m < 2; m++) mma_32(sum[c][m], a[2 * m], a[2 * m + 1], b[c]);
    }
    let_next_start();
    #pragma unroll
    for (int c = 0; c < 4; c++)
        #pragma unroll
        for (int e = 0; e < 4; e++) { // token e * 8 + g
            const float* v = &sum[c][e / 2][e % 2 * 2];
            *(float2*)&sums[warp][e * 8 + g][c * 8 + 2 * t] = make_float2(v[0], v[1]);
        }
    __syncthreads();
    const int n = threadIdx.x / 8, r = threadIdx.x % 8 * 4;
    float4 all = {};
    for (int w = 0; w < 8; w++) {
        const float4 v = *(const float4*)&sums[w][n][r];
        all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
    }
    if (n0 + n < p.N && r0 + r < p.rank)
        store_four(h + (size_t)(n0 + n) * p.width() + j * p.rank + r0 + r, all);
}

// The top bits of four bytes, each eight times. `which`: in hexadecimal, from the last digit on, 8 + the number of a
// byte of a (0 .. 3) or b (4 .. 7).
__device__ __forceinline__ uint32_t spread_bits(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(which));
    return y;
}

// rmsnorm of many tokens, and what dropout keeps of it for each module: it makes the masks while it waits for memory.
__global__ void __launch_bounds__(256) rmsnorm_masks_kernel(bf16* out, const float* x, const bf16* w, float eps,
                                                            const __grid_constant__ LoraArgs p) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * 8 + threadIdx.x / 32;
    if (n >= p.N) return;
    const uint32_t name = p.dropout.token[n];
    norm_row(out + (size_t)n * p.in, x + (size_t)n * p.in, w, p.in, eps, [&] {
        for (int j = 0; j < p.modules; j++)
            for (int k = threadIdx.x % 32; k < 2 * p.kept.sixty_fours; k += 32) {
                uint32_t kept = 0;
                #pragma unroll
                for (int c = 0; c < 4; c++)
                    kept |= dropout_mask(p.dropout, p.keys, name, p.name(j), k * 4 + c) << 8 * c;
                p.kept.at(j, k / 2, n)[k % 2] = kept;
            }
    });
}

// lora_down: h_j = drop_j(x) A_j^T, and what was kept, unless that is MADE. Grid: (tokens / 64, groups / GROUPS), 8 or
// 16 warps. A block walks along `in` in stages of a few panels of 64 numbers (see chunk_address) of x and of A; a warp
// owns 16 tokens by one of the panels, and masks its x in registers, once for each module. A lane makes half of a
// token's masks; the bits of a pair of numbers become a mask by one instruction. The panels' sums are added in shared
// memory.
// Bound by making the masks (Philox), without that by the memory's speed.
template <int GROUPS> struct LoraDownShape {
    static constexpr int TOKENS = 64, PANELS = GROUPS == 1 ? 4 : 2, STAGES = GROUPS == 2 ? 3 : 2;
    static constexpr int THREADS = PANELS * 128;
    static constexpr int X_PANEL = TOKENS * 128, PANEL = X_PANEL + GROUPS * 32 * 128, STAGE_BYTES = PANELS * PANEL;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES;
};
template <int GROUPS, bool MADE>
__global__ void __launch_bounds__(LoraDownShape<GROUPS>::THREADS, 512 / LoraDownShape<GROUPS>::THREADS)
lora_down_kernel(bf16* h, const bf16* x, const __grid_constant__ LoraArgs p) {
    using S = LoraDownShape<GROUPS>;
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * S::TOKENS, first = blockIdx.y * GROUPS, panel = warp / 4, token = warp % 4 * 16;
    const auto copy = [&](int step) {
        const int chunk = threadIdx.x % 8, row = threadIdx.x % 128 / 8; // (each panel's own threads copy it)
        const uint32_t to = shared + step % S::STAGES * S::STAGE_BYTES + panel * S::PANEL;
        const int i = (step * S::PANELS + panel) * 64 + chunk * 8;
        #pragma unroll
        for (int k = 0; k < S::TOKENS; k += 16) {
            const int n = n0 + row + k;
            copy_async(chunk_address(to, row + k, chunk), x + (size_t)n * p.in + i, i < p.in && n < p.N);
        }
        #pragma unroll
        for (int k = 0; k < GROUPS * 32; k += 16) {
            const int j = p.module_of(first + k / 32), r = p.first_row(first + k / 32) + k % 32 + row;
            copy_async(chunk_address(to + S::X_PANEL, k + row, chunk), p.A + (size_t)(j * p.rank + r) * p.in + i,
                       i < p.in && j < p.modules && r < p.rank);
        }
        commit_copies();
    };
    const int steps = (p.in + 64 * S::PANELS - 1) / (64 * S::PANELS);
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++)
        if (s < steps) copy(s);
        else commit_copies();
    const int mine = n0 + token + lane % 16; // the token of whose masks this lane makes a half
    const uint32_t name = p.dropping && mine < p.N ? p.dropout.token[mine] : 0;
    uint32_t made[GROUPS]; // a step ahead
    const auto load_made = [&](int step) {
        const int i64 = step * S::PANELS + panel;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int j = p.module_of(first + k);
            made[k] = j < p.modules && mine < p.N && i64 < p.kept.sixty_fours ? p.kept.at(j, i64, mine)[lane / 16] : 0;
        }
    };
    if (MADE) load_made(0);
    float sum[GROUPS][4][4] = {};
    for (int step = 0; step < steps; step++) {
        const int i64 = step * S::PANELS + panel;
        uint32_t kept[GROUPS];
        #pragma unroll
        for (int k = 0; k < GROUPS && MADE; k++) kept[k] = made[k];
        if (MADE) load_made(step + 1);
        #pragma unroll
        for (int k = 0; k < GROUPS && !MADE; k++) {
            const int j = p.module_of(first + k);
            kept[k] = ~0u;
            if (k && j == p.module_of(first + k - 1)) kept[k] = kept[k - 1];
            else if (p.dropping && j < p.modules) {
                kept[k] = 0;
                #pragma unroll
                for (int c = 0; c < 4; c++)
                    kept[k] |= dropout_mask(p.dropout, p.keys, name, p.name(j), i64 * 8 + lane / 16 * 4 + c)
                               << 8 * c;
                if (mine < p.N && i64 < p.kept.sixty_fours) p.kept.at(j, i64, mine)[lane / 16] = kept[k];
            }
        }
        wait_for_copies<S::STAGES - 2>();
        __syncthreads();
        if (step + S::STAGES - 1 < steps) copy(step + S::STAGES - 1);
        else commit_copies();
        const uint32_t x_at = shared + step % S::STAGES * S::STAGE_BYTES + panel * S::PANEL, A_at = x_at + S::X_PANEL;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t even[GROUPS][2], odd[GROUPS][2]; // of tokens g and g + 8: top bits for columns 2 t and 2 t + 1
            #pragma unroll
            for (int k = 0; k < GROUPS; k++)
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    const uint32_t word = __shfl_sync(~0u, kept[k], half * 16 + e * 8 + g) >> 2 * t;
                    even[k][e] = word << 7, odd[k][e] = word << 6;
                }
            #pragma unroll
            for (int e = 0; e < 2; e++) { // 16 numbers of `in`
                const int c = (half * 2 + e) * 2;
                uint32_t a[4], b[2][4];
                ldmatrix(a, chunk_address(x_at, token + lane % 16, c + lane / 16));
                #pragma unroll
                for (int k = 0; k < GROUPS; k++) {
                    #pragma unroll
                    for (int f = 0; f < 2; f++)
                        ldmatrix(b[f], chunk_address(A_at, k * 32 + f * 16 + lane % 8 + lane / 16 * 8,
                                                     c + lane / 8 % 2));
                    uint32_t y[4];
                    #pragma unroll
                    for (int q = 0; q < 4; q++)
                        y[q] = a[q] & spread_bits(even[k][q % 2], odd[k][q % 2], 0xcc88 + (2 * e + q / 2) * 0x1111);
                    #pragma unroll
                    for (int f = 0; f < 4; f++)
                        mma(sum[k][f], y[0], y[1], y[2], y[3], b[f / 2][f % 2 * 2], b[f / 2][f % 2 * 2 + 1]);
                }
            }
        }
    }
    let_next_start();
    wait_for_copies<0>();
    __syncthreads(); // the ring is free
    float4* sums = (float4*)memory + threadIdx.x % 128; // (panel - 1, fragment, thread)
    #pragma unroll
    for (int i = 0; i < GROUPS * 4 && panel; i++) {
        const float(&v)[4] = sum[i / 4][i % 4];
        sums[((panel - 1) * GROUPS * 4 + i) * 128] = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < GROUPS * 4 && !panel; i++) {
        float(&v)[4] = sum[i / 4][i % 4];
        #pragma unroll
        for (int other = 0; other < S::PANELS - 1; other++) {
            const float4 y = sums[(other * GROUPS * 4 + i) * 128];
            v[0] += y.x, v[1] += y.y, v[2] += y.z, v[3] += y.w;
        }
        const int j = p.module_of(first + i / 4), r = p.first_row(first + i / 4) + i % 4 * 8 + 2 * t;
        const int n = n0 + token + g;
        uint32_t* to = (uint32_t*)(h + (size_t)n * p.width() + j * p.rank + r);
        if (j >= p.modules || r >= p.rank) continue;
        if (n < p.N) *to = pack(v[0] * p.scale, v[1] * p.scale);
        if (n + 8 < p.N) to[4 * p.width()] = pack(v[2] * p.scale, v[3] * p.scale);
    }
}

#include "packed.h" // the same with packed weights

// ---- Launchers: the products of Book I, in its order.

// Calls launch(std::integral_constant<int, G>()): G groups of 32 of an adapter's rows pass a block at once.
template <class Launch> void in_groups(int groups, Launch launch) {
    if (groups == 1) return launch(std::integral_constant<int, 1>());
    if (groups == 2) return launch(std::integral_constant<int, 2>());
    launch(std::integral_constant<int, 3>());
}

// h, with dropout or of more than 16 tokens (or as product_gpu says).
inline void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N, bool made = false) {
    const LoraArgs p(W, N);
    if (!p.dropping && N < 64 * ctx.gpu->sms)
        return launch(ctx, lora_down_few_kernel, dim3((N + 31) / 32, p.groups()), 256, 0, h, x, p);
    in_groups(p.groups(), [&](auto groups) {
        using S = LoraDownShape<groups>;
        const dim3 grid((N + S::TOKENS - 1) / S::TOKENS, (p.groups() + groups - 1) / groups);
        const auto kernel = made ? lora_down_kernel<groups, true> : lora_down_kernel<groups, false>;
        launch(ctx, kernel, grid, S::THREADS, S::SHARED, h, x, p);
    });
}

// x W^T, with the kernel that suits N. An adapter's h and s B are further columns of x and W; of up to 16 tokens the
// epilogue adds them (but see there). made: its masks are.
template <class Epilogue>
void product_gpu(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N, bool made = false) {
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    const Adapter<bf16>& a = W.adapter;
    if (N <= STREAM_TOKENS && !ctx.invariant) {
        const auto few = [&](auto e) {
            if (W.format != Format::PLAIN) packed_product(ctx, e, x, nullptr, W, N);
            else stream_product(ctx, {x, nullptr, nullptr, nullptr, 0, W.w[0], N, W.in, out}, e);
        };
        if (!a.rank) return few(epilogue);
        if constexpr (Epilogue::ADAPTS)
            if (!a.dropout && (int)a.width() <= MOST_BESIDE) {
                const StreamArgs down = {x, nullptr, nullptr, nullptr, 0, a.A, N, W.in, (int)a.width()};
                stream_product(ctx, down, StoreEpilogue<bf16>(a.h, a.width()));
                return few(BesideAdapter<Epilogue>(epilogue, W));
            }
    }
    constexpr bool HEAD = std::is_same_v<Epilogue, StoreEpilogue<float>>; // whose x is never rounded
    const bool rounds = !HEAD && rounds_activations(ctx, W, N);
    if constexpr (!HEAD)
        if (rounds && takes_e4m3(ctx, W)) return e4m3_product(ctx, epilogue, e4m3_rows(ctx, x, N, W.in), W, N);
    if (rounds) x = rounded(ctx, x, N, W.in);
    if (streams_packed(ctx, W, N)) return packed_hopper_product(ctx, epilogue, x, W, N);
    TileArgs p = {x, unpacked(ctx, W), N, W.in, out};
    const AfterUnpacking order(ctx, W);
    p.early = N <= 128;
    if (a.rank) {
        lora_down_gpu(ctx, a.h, x, W, N, made);
        p.more_x = a.h, p.more_W = a.B, p.more = (int)a.width();
    }
    tile_product(ctx, p, epilogue);
}
// The same of rmsnorm(stream). `normed` (N,in) holds that where the product does not make it for itself, or rounds it.
template <class Epilogue>
void norm_product_gpu(Context& ctx, Epilogue epilogue, bf16* normed, const float* stream, const bf16* norm,
                      const Linear<bf16>& W, int N, float eps) {
    ctx.gpu->ahead = {};
    if (N > NORM_TOKENS || ctx.invariant || W.adapter.rank || W.format != Format::PLAIN) {
        if (rounds_activations(ctx, W, N) && takes_e4m3(ctx, W)) {
            const E4M3Rows x = first_rows(ctx, N, W.in);
            rmsnorm_rounded_gpu(ctx, x, stream, norm, N, W.in, eps);
            return e4m3_product(ctx, epilogue, x, W, N);
        }
        const bool made = W.adapter.dropout && norms_by_warps(ctx, N);
        if (!made) rmsnorm_gpu(ctx, normed, stream, norm, N, W.in, eps);
        else launch(ctx, rmsnorm_masks_kernel, (N + 7) / 8, 256, 0, normed, stream, norm, eps, LoraArgs(W, N));
        return product_gpu(ctx, epilogue, normed, W, N, made);
    }
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    stream_product(ctx, {nullptr, nullptr, stream, norm, eps, W.w[0], N, W.in, out}, epilogue);
}

inline void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), x, W, N);
}
inline void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W,
                           int N) {
    product_gpu(ctx, AddEpilogue(out, residual, W.out()), x, W, N);
}
inline void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* x, const bf16* w,
                            const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), normed, x, w, W, N, eps);
}

inline void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
                                   const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, SwigluEpilogue(out, gate_up, W.rows[0]), normed, x, w, W, N, eps);
}

inline void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W,
                     int R) {
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    if (W.format == Format::PLAIN || (R <= STREAM_TOKENS && !ctx.invariant) || streams_packed(ctx, W, R))
        return product_gpu(ctx, StoreEpilogue<float>(logits, W.out()), picked, W, R);
    each_part(ctx, W, false, [&](int first, int count, const bf16* weights) {
        const AfterUnpacking order(ctx, W);
        tile_product(ctx, {picked, weights, R, W.in, count}, StoreEpilogue<float>(logits + first, W.out()));
    });
}

// dW of training (backward.h), and X^T X of GPTQ (quantize.h). Of some shapes the transposed product has fewer waves
// of tiles.
inline void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N,
                                       int out, int in) {
    TileArgs p = {dy, x, out, N, in}, transposed = {x, dy, in, N, out};
    p.ldx = transposed.ldw = (int)ld;
    const auto time = [&](int out, int in) { return HopperPlan(ctx, MOST_SPLITS, out, in, N, false).least; };
    if (ctx.gpu->hopper && !ctx.invariant && time(in, out) < time(out, in))
        return hopper_product<true, true>(ctx, transposed, AddTransposedEpilogue(dW, in));
    tile_product<true, true>(ctx, p, AddEpilogue(dW, dW, in));
}

#include "attention.h"
#include "draws.h" // the sampler, and a step as a graph
#endif // __CUDACC__

#include "checkpoint.h"
#ifndef QWEN3_PLAIN
#include "cli.h"
#endif

#ifndef QWEN3_NO_MAIN
int main(int argc, char** argv) {
    take_signals({SIGINT}, {SIGPIPE});
    return run_program("qwen3", run, argc, argv);
}
#endif
