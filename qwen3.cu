/* qwen3.cu: the Qwen3 language model in one file, as a text to study.

   Book I    the model in plain C++: every op is its formula and a loop, forwards and backwards. Slow and right.
   Book II   the same on a GPU, for nvcc: a kernel an op. Each is tested against its definition in Book I.

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
   Book II    8 Toolbox    9 Small kernels    10 Products    11 Attention    12 Sampler, CUDA graphs
   and        main
*/
#include "file.h"
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
#include <random>
#include <set>
#include <utility>
#include <vector>

#ifdef __CUDACC__
#define BOTH __host__ __device__ // for the CPU and the GPU alike
#else
#define BOTH
#endif

// #####################################################################################################################
//                                                        Book I
// #####################################################################################################################

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
enum RandomStream : uint64_t {
    STREAM_SAMPLE = 1, STREAM_SYNTHESIZE = 2, STREAM_DROPOUT = 3, STREAM_INIT = 4, STREAM_SHUFFLE = 5
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
BOTH inline uint32_t dropout_mask(const Dropout& d, uint32_t token, uint32_t module, uint32_t k8) {
    const uint64_t counter = (uint64_t)token << 32 | module << 16 | k8;
    const Philox r = philox(d.seed, counter, STREAM_DROPOUT | (uint64_t)d.step << 8);
    const uint32_t limit = (uint32_t)(d.p * 65536 + 0.5f);
    uint32_t kept = 0;
    for (int i = 0; i < 8; i++) kept |= (uint32_t)((r.v[i / 2] >> i % 2 * 16 & 0xffff) >= limit) << i;
    return kept;
}

// ================================================================================================ 2 The model's data

struct Gpu; // Book II: a GPU's stream, properties and scratch

// Where and how ops run.
struct Context {
    std::shared_ptr<Gpu> gpu;                    // null: on the CPU
    bool plain = false;                          // by the definitions of this book
    bool invariant = false;                      // on a GPU: a row's bits do not depend on its batch (slower)
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
    size_t parameters() const {
        size_t layer = (size_t)C * (2 * H + 2 * K) * D + 3 * (size_t)C * F + 2 * (size_t)C + 2 * (size_t)D;
        return (size_t)L * layer + (size_t)V * C * (tied ? 1 : 2) + (size_t)C;
    }
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
    const Dropout* dropout = nullptr; // training only
    size_t width() const { return (size_t)modules * rank; }
};

// The weights of a product y = W x, in up to three blocks of rows that are separate tensors in the file (q, k, v; gate,
// up). Stored as T, or as INT8: then w is null, and 32 neighbours of a row share a scale, W[r][i] = q[r][i] *
// scale[r][i / 32].
constexpr int GROUP = 32;
template <class T> struct Linear {
    const T* w[3] = {};
    const int8_t* q[3] = {};
    const bf16* scale[3] = {};
    int rows[3] = {};
    int in = 0;
    Adapter<T> adapter;
    int out() const { return rows[0] + rows[1] + rows[2]; }
    int groups() const { return (in + GROUP - 1) / GROUP; }
    // W[r][i], whatever it is stored as.
    acc<T> at(int r, int i) const {
        int b = 0;
        while (r >= rows[b]) r -= rows[b++];
        if (w[b]) return to_acc(w[b][(size_t)r * in + i]);
        return (acc<T>)q[b][(size_t)r * in + i] * to_acc(scale[b][(size_t)r * groups() + i / GROUP]);
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
    const T* norm;               // (C)
    Linear<T> head;              // (V,C), the embedding when tied
    std::vector<std::shared_ptr<void>> converted; // what the file does not hold in this form
    Arena gpu;                   // holds all of them after `upload`

    // Of a checkpoint (see checkpoint.h). A tensor stored as T is used where the file maps it; others are converted
    // once. With `int8` every matrix becomes INT8 (a file's own INT8 matrices are so anyway); norms stay as they are.
    explicit Weights(const ModelFile& file, bool int8 = false);
    // Copies all to the GPU (see Book II) and lets every pointer point there, the blocks of a Linear one after another.
    void upload(Context& ctx, const ModelFile& file);

    const char* type_name() const {
        if (head.q[0]) return "int8";
        return std::is_same_v<T, bf16> ? "bfloat16" : std::is_same_v<T, float> ? "float32" : "float64";
    }
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
};

// One layer's keys or values: (pages, K, 16, D).
BOTH inline size_t kv_offset(int page, int head, int within, int K, int D) {
    return (((size_t)page * K + head) * PAGE + within) * D;
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

    static size_t bytes(const Config& c, size_t pages) {
        return 2 * (size_t)c.L * pages * c.K * PAGE * c.D * sizeof(T);
    }
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
template <class T, class Store>
void product(const Linear<T>& W, const T* x, int N, Store store) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < W.out(); r++)
        for (int n = 0; n < N; n++) {
            acc<T> y = 0;
            for (int i = 0; i < W.in; i++) y += W.at(r, i) * to_acc(x[(size_t)n * W.in + i]);
            store(n, r, y);
        }
}

// x[n][i] as module j of an adapter sees it: dropped, or 1 / (1 - p) of it, in training; else x itself.
template <class T> acc<T> dropped(const T* x, const Linear<T>& W, int j, int n, int i) {
    const acc<T> value = to_acc(x[(size_t)n * W.in + i]);
    const Dropout* d = W.adapter.dropout;
    if (!d) return value;
    const bool kept = dropout_mask(*d, d->token[n], W.adapter.module[j], i / 8) >> i % 8 & 1;
    return kept ? to_acc(to_stored<T>(value * (1 / (1 - (acc<T>)d->p)))) : 0;
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
template <class T, class Store>
void adapted_product(const Linear<T>& W, const T* x, int N, Store store) {
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

// ---- qknorm_rope_kv: the q and k heads of each token are RMS-normalised, then rotated in each plane (i, i + D/2) by the
// angle pos * theta^(-2i/D)      (Su et al., "RoFormer", 2021, in the half-split layout); k and v go to the cache.
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
            const size_t at = kv_offset(b.slot[n] / PAGE, h, b.slot[n] % PAGE, K, D);
            norm_rope(keys + at, row + (H + h) * D, k_weight);
            for (int i = 0; i < D; i++) values[at + i] = row[(H + K + h) * D + i];
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

// ---- attention: out[n][h] = sum_m p_m v_m with p_m = softmax(q[n][h] . k_m / sqrt(D)) over the positions m = 0..pos[n]
// of n's sequence; query head h reads key/value head h / G.      (Vaswani et al., "Attention is all you need", 2017)
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
            auto at = [&](int m) { return kv_offset(pages[m / PAGE], h / (H / K), m % PAGE, K, D); };
            acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
            for (int m = 0; m < length; m++) { // first pass: scores and the largest of them
                p[m] = 0;
                for (int i = 0; i < D; i++) p[m] += to_acc(query[i]) * to_acc(keys[at(m) + i]);
                p[m] /= std::sqrt((acc<T>)D);
                top = std::max(top, p[m]);
            }
            std::fill(mix.begin(), mix.end(), 0);
            for (int m = 0; m < length; m++) { // second pass: exponentials, their sum, the weighted sum of values
                p[m] = std::exp(p[m] - top);
                sum += p[m];
                for (int i = 0; i < D; i++) mix[i] += p[m] * to_acc(values[at(m) + i]);
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
void forward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, KVCache<T>& kv,
             const acc<T>* rope) {
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

// Draws an id from logits (V), of which only ids < exist may be drawn. In this order: penalties (above), temperature,
// top-k, top-p, min-p; ties go to the lower id. `counter` is the position of the drawn token: the same seed, counter
// and logits give the same id.
// Probabilities are integers, e^(l - max) in steps of 2^-40: integer sums are the same in any order, so that any number
// of threads, and a GPU, draw the same token.
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
    std::vector<acc<T>> host_logits;        // on a GPU: row_logits in the CPU's memory
    struct { Sampling how; int exist; size_t answer; } drawing; // see begin_draws
    std::shared_ptr<GpuDraws<T>> draws;     // on a GPU

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
        if (ctx.gpu) host_logits.resize((size_t)std::min(chunk, ROWS) * c.V);
        logits = ctx.gpu ? host_logits.data() : row_logits;
    }
    Session(const Session&) = delete;

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
            if (stop && *stop) return;
            ids.insert(ids.end(), &tokens[done], &tokens[done] + N);
            done += N;
            const bool last = done == tokens.size();
            for (int n = rows ? 0 : last ? N - 1 : N, R; n < N; n += R) {
                R = std::min(N - n, ROWS);
                take_logits(n, R);
                for (int r = 0; r < R; r++) {
                    logits = (ctx.gpu ? host_logits.data() : row_logits) + (size_t)r * config.V;
                    if (rows) rows(logits);
                }
            }
        }
    }

    // The logits of R rows of the last batch, from row n on.
    void take_logits(int n, int R) {
        int wanted[ROWS];
        std::iota(wanted, wanted + R, n);
        copy_in(ctx, named, wanted, R);
        last_row = named + R - 1;
        RUN(head, row_logits, picked, activations.normed, named, weights.head, R);
        if (ctx.gpu) copy_out(ctx, host_logits.data(), row_logits, (size_t)R * config.V);
    }

    // ---- Drawing an answer, token by token. `exist`: only ids below may be drawn; `answer`: ids[answer] on belong to
    // the answer (see penalized); `most`: no more draws than these will follow.
    void begin_draws(const Sampling& how, int exist, size_t answer, [[maybe_unused]] size_t most) {
        drawing = {how, exist, answer};
        if constexpr (HAS_GPU<T>) if (draws) draws->begin(most);
    }
    // The next token: not in the session until it is accepted.
    int draw() {
        if constexpr (HAS_GPU<T>) if (draws) return draws->next();
        penalize(logits, drawing.how, ids, drawing.answer, config.V);
        return sample(logits, drawing.exist, drawing.how, ids.size());
    }
    // Takes the token just drawn into the session.
    void accept(int id) {
        if (ctx.gpu) ids.push_back(id); // the GPU has gone on with it already
        else feed({id});
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

// The head and its loss: logits[r] = W x[rows[r]], and their gradient in place of them.
template <class T>
void head_loss(acc<T>* loss,      // (R) out
               T* dlogits,        // out, or null: as cross_entropy's
               acc<T>* logits,    // (R,V) out; become dlogits
               T* picked,         // (R,C) scratch
               acc<T>*,           // (R, V / 64 rounded up, 2) scratch of the GPU's
               const T* x,        // (N,C) after the final norm
               const int* rows,   // (R)
               const int* target, // (R)
               acc<T> scale, const Linear<T>& W, int R) {
    head(logits, picked, x, rows, W, R);
    cross_entropy(loss, dlogits, logits, target, scale, R, W.out());
}

// ---- add_losses: total += loss[0] + loss[1] + ..., in double and in order
template <class A> void add_losses(double* total, const A* loss, int R) {
    for (int r = 0; r < R; r++) *total += (double)loss[r];
}

// ---- head: logits[r] = W normed[rows[r]]
// dnormed of these rows; those of the others are not touched.
template <class T>
void head_backward(T* dnormed,       // (N,C) out
                   const T* dlogits, // (R, ld), V of each row
                   size_t ld,
                   const int* rows,  // (R), none twice
                   const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++)
        for (int i = 0; i < W.in; i++) {
            acc<T> sum = 0;
            for (int v = 0; v < W.out(); v++) sum += to_acc(dlogits[r * ld + v]) * W.at(v, i);
            dnormed[(size_t)rows[r] * W.in + i] = to_stored<T>(sum);
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
// dh_j = dy (s B_j),  dx = sum_j drop_j(dh_j A_j) + dy W
template <class T>
void linear_backward_input(T* dx,       // (N, W.in) out
                           T* dh,       // (N, m * rank) out
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

// dA_j += dh_j^T drop_j(x),  dB_j += s dy^T h_j
template <class T>
void lora_backward_weight(acc<T>* dA,  // (m * rank, W.in) +=
                          acc<T>* dB,  // (W.out, m * rank) +=, where module and row belong together
                          const T* dh, // (N, m * rank)
                          const T* dy, // (N, W.out)
                          const T* x,  // (N, W.in)
                          const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, out = W.out(), width = a.width();
    for (int j = 0; j < a.modules; j++) {
        const int first = W.first_row(a.block[j]), end = first + W.rows[a.block[j]];
        #pragma omp parallel for schedule(static)
        for (int i = j * a.rank; i < (j + 1) * a.rank; i++) {
            for (int k = 0; k < W.in; k++)
                for (int n = 0; n < N; n++) dA[i * in + k] += to_acc(dh[n * width + i]) * dropped(x, W, j, n, k);
            for (int r = first; r < end; r++)
                for (int n = 0; n < N; n++)
                    dB[r * width + i] += a.s * to_acc(dy[n * out + r]) * to_acc(a.h[n * width + i]);
        }
    }
}

// ---- swiglu: out = silu(gate) * up, silu(g) = g sigma(g), sigma(g) = 1 / (1 + e^-g)
// dgate = dout up sigma (1 + g (1 - sigma)),  dup = dout silu(gate)
template <class T>
void swiglu_backward(T* dgate_up,      // (N,2F) out
                     T* hidden,        // (N,F) out: what forward's `out` was
                     const T* dhidden, // (N,F)
                     const T* gate_up, // (N,2F)
                     int N, int F) {
    for (int n = 0; n < N; n++)
        for (int f = 0; f < F; f++) {
            const size_t at = (size_t)n * F + f, gate = at + (size_t)n * F, up = gate + F; // (N,2F)
            const acc<T> g = to_acc(gate_up[gate]), u = to_acc(gate_up[up]), d = to_acc(dhidden[at]);
            const acc<T> sigma = 1 / (1 + std::exp(-g));
            hidden[at] = to_stored<T>(g / (1 + std::exp(-g)) * u);
            dgate_up[gate] = to_stored<T>(d * u * sigma * (1 + g * (1 - sigma)));
            dgate_up[up] = to_stored<T>(d * g * sigma);
        }
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
void loss_backward(Context& ctx, const Config& c, const Weights<T>& w, const Activations<T>& a, Flow<T>& d,
                   const Gradients<T>* g,
                   acc<T>* loss,      // (R) out
                   const int* rows,   // (R), none twice
                   const int* target, // (R)
                   acc<T> scale, int N, int R) {
    const size_t ld = (size_t)c.V * sizeof(acc<T>) / sizeof(T);
    T* dlogits = g ? (T*)d.logits : nullptr;
    if (g) clear(ctx, d.normed, (size_t)N * c.C);
    for (int r = 0; r < R && !(ctx.stop && *ctx.stop); r += d.head_rows) {
        const int n = std::min(d.head_rows, R - r);
        RUN(head_loss, loss + r, dlogits, d.logits, d.picked, d.parts, a.normed, rows + r, target + r, scale, w.head,
            n);
        if (!g) continue;
        if (g->head) RUN(linear_backward_weight, g->head, dlogits, ld, d.picked, n, c.V, c.C);
        RUN(head_backward, d.normed, dlogits, ld, rows + r, w.head, n);
    }
}

// From d.normed to the gradient of every parameter: `forward` from its last line to its first. The batch holds whole
// sequences.
template <class T>
void backward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, Flow<T>& d,
              const Gradients<T>& g, KVCache<T>& kv, const acc<T>* rope) {
    const int N = b.N, C = c.C, H = c.H, K = c.K, D = c.D;
    auto through = [&](T* dx, const T* dy, const Linear<T>& W) { RUN(linear_backward_input, dx, d.h, dy, W, N); };
    auto weights = [&](const typename Gradients<T>::OfLinear& to, const T* dy, const T* x, const Linear<T>& W) {
        if (to.W) RUN(linear_backward_weight, to.W, dy, (size_t)W.out(), x, N, W.out(), W.in);
        if (W.adapter.rank) RUN(lora_backward_weight, to.A, to.B, d.h, dy, x, W, N); // d.h is from `through`
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
        through(d.hidden, d.y, layer.down);
        RUN(swiglu_backward, d.gate_up, s.hidden, d.hidden, s.gate_up, N, c.F);
        weights(to.down, d.y, s.hidden, layer.down);
        through(d.normed, d.gate_up, layer.gate_up);
        RUN(rmsnorm_backward, d.x, d.y, s.norm2, to.norm2, d.normed, s.mid, layer.norm2, N, C, c.eps);
        weights(to.gate_up, d.gate_up, s.norm2, layer.gate_up);
        // mid = in + attention o^T, attention = attend(qkv), qkv = norm1(in) W^T
        through(d.attention, d.y, layer.o);
        weights(to.o, d.y, s.attention, layer.o);
        RUN(qknorm_rope_kv, s.q, keys, values, s.qkv, layer.q_norm, layer.k_norm, rope, b, H, K, D, c.eps);
        RUN(attention_backward, d.qkv, d.attention, s.q, keys, values, s.attention, s.lse, b, H, K, D, d.delta);
        RUN(qknorm_rope_backward, d.qkv, to.q_norm, to.k_norm, s.qkv, layer.q_norm, layer.k_norm, rope, b, H, K, D,
            c.eps);
        through(d.normed, d.qkv, layer.qkv);
        RUN(rmsnorm_backward, d.x, d.y, s.norm1, to.norm1, d.normed, s.in, layer.norm1, N, C, c.eps);
        weights(to.qkv, d.qkv, s.norm1, layer.qkv);
    }
    if (g.embed) RUN(embed_backward, g.embed, d.x, b, C);
}

// #####################################################################################################################
// Book I ends here. Its slow ops once more, for the vector and matrix instructions of CPUs:
#ifndef QWEN3_PLAIN
#include "cpu.h"
#endif

#ifdef __CUDACC__
// #####################################################################################################################
//                                                        Book II
// #####################################################################################################################
#include "parts/gpu1_toolbox.cuh"
#include "parts/gpu2_small.cuh"
#include "parts/gpu3_products.cuh"
#include "parts/gpu4_attention.cuh"
#include "parts/gpu5_sampler.cuh"
#endif // __CUDACC__

// #####################################################################################################################
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
