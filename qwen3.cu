/* qwen3.cu: the Qwen3 language model, as a text to study.

   Book I    the model in plain C++: each op is its formula and a loop, forward and backward. Slow and right.
   Book II   the same ops on a GPU, for nvcc. Each kernel is tested against its op in Book I. Small kernels are in this
             file, norm and RoPE in gpu/norm_rope.h; products, attention, sampling and the backward pass are in gpu/.

   Build:  make                 with nvcc where a GPU is, else with g++ alone (this file is also plain C++17)
   Run:    ./qwen3 model.bin -i "What is a warp?"            (-d plain runs Book I itself, on the CPU)

   From a prompt to an answer: text becomes token ids (model/tokenizer.h). `forward` turns the ids into one vector for
   each token. The head turns the vector of the last token into one score (logit) for each id of the vocabulary. The
   sampler picks an id, which is the next input. The KV cache holds the keys and values of all past tokens, so each step
   computes one token only.

   One layer. x is the residual stream; the second line begins with the x of the first:
     x (N,C) -> rmsnorm (N,C) -> q (N,HD), k, v (N,KD) -> head norms, RoPE -> attention (N,HD) -> o (N,C) -> + x
     x (N,C) -> rmsnorm (N,C) -> gate, up (N,F)        -> silu(gate) * up (N,F)         -> down (N,C)     -> + x

   Notation    N tokens   C channels (hidden size)   H query heads   K key/value heads   D head size
               F feed-forward size   V rows of the vocabulary   L layers   B sequences   G = H / K query heads a KV head
               n a token (row)   i a column   r a row of W   h a head   m a key's position; of an Adapter: its modules
               (N,C) is a row-major array of N rows of C numbers. W has shape (out, in): y = W x for one token, and
               y = x W^T for the rows of x together. The head is the last product; a head is one of attention's.
   Types       T is the stored type: bf16, float or double. acc<T> is the type of sums: float (double for double).
               The residual stream, logits and lse are acc<T>. The other arrays between ops are T.

   Contracts
   - An op is defined once, in Book I. Outputs come first, then inputs, then sizes. Each op that takes time has two more
     versions: `op_cpu` in cpu/ for the instructions of CPUs, `op_gpu` in Book II and gpu/. RUN (section 4) chooses.
   - A ragged batch is the only batch: N tokens of B sequences, packed (see Batch).
   - A sum has one fixed order. On a CPU the bits of a row depend neither on the other rows of the batch nor on the
     number of threads; so the compiler may not choose whether a * b + c is rounded once or twice: -ffp-contract=off. On
     a GPU the same batch gives the same bits; with `invariant` a row's bits do not depend on its batch there either.
   - A user's error is thrown as Error: one line that names the file and the fault.
   - Memory is planned once (Arena). On a GPU `forward` and `backward` allocate nothing. The ops in cpu/ keep scratch,
     which grows to the largest batch and stays. Book I's own attention allocates its rows of scores.

   Easy to get wrong: RoPE rotates the halves (i, i + D/2), not neighbours; q and k are RMS-normalised head by head
   *before* RoPE; D is not C / H; a tied model's head is the embedding's matrix; there are several end tokens; the
   vocabulary has more rows (V) than the tokenizer has ids: the rows from there on must not be sampled.

   Contents
   Book I     1 Ops on rows    2 Products    3 Tokens, cache and attention    4 forward    5 generate
              6 Backward ops, AdamW    7 backward
   Book II    8 Toolbox    9 Small kernels;     and main
*/
#ifndef QWEN3_CU
#define QWEN3_CU
#include "base/arena.h"
#include "model/bf16.h" // bf16, acc<T>; to_acc(x) reads a T, to_stored<T>(x) rounds to one
#include "model/context.h"
#include "model/dropout.h"
#include "model/formats.h"
#include "model/instances.h"
#include "model/kv_cache.h"
#include "model/sampling.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#ifdef __CUDACC__
#include <cuda.h> // CUtensorMap
#endif

// ###################################################### Book I #######################################################

// ======================================================================================================= 1 Ops on rows
// The loop over tokens may run in parallel. The threads share no sum, so a row's bits do not depend on their number.

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

// ---- fill_rope: cosine and sine of RoPE's angles. Numbers i and i + D/2 of a head form plane i. Its angle is
// position * theta^(-2i/D), computed in float (for double in double), as Hugging Face does.
template <class A>
void fill_rope(A* rope, // (positions, D/2, 2) out: cosine and sine
               int positions, int D, double theta) {
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

// ========================================================================================================== 2 Products

// LoRA (Hu et al., "LoRA: low-rank adaptation of large language models", 2021). A Linear has up to three blocks of rows
// (q, k, v). Each block may have one module, a pair (A_j, B_j); there are m modules. Module j adds s B_j A_j drop_j(x)
// to its block of y. A_j is the rows j * rank .. (j + 1) * rank - 1 of `A`. The same columns of `B` hold s B_j in the
// rows of its block, and zeros in all other rows.
template <class T> struct Adapter {
    int rank = 0;                     // 0: no adapter
    int true_rank = 0;                // rank in the file; A_j has zero rows, B_j zero columns from there on
    int modules = 0;                  // m
    int block[3] = {};                // (m) the block of module j: 0, 1 or 2
    int module[3] = {};               // (m) layer * 7 + (q, k, v, o, gate, up, down = 0..6): selects the dropout mask
    float s = 1;                      // alpha / rank; rslora: alpha / sqrt(rank)
    T* A = nullptr;                   // (m * rank, in)
    T* B = nullptr;                   // (out, m * rank) s B; AdamW trains B and stores s B here
    T* h = nullptr;                   // (N, m * rank) A drop(x): written by the product, read by the backward pass
    uint32_t* kept = nullptr;         // on a GPU: the masks of forward, for the backward pass; see DropoutMasks
    const Dropout* dropout = nullptr; // training only
    size_t width() const { return (size_t)modules * rank; }
};

// The weights of a product y = W x. W has up to three blocks of rows, which are separate tensors in the file (q, k, v;
// gate, up). A number is stored as T (PLAIN) or in a format of fewer bits (model/formats.h).
template <class T> struct Linear {
    Format format = Format::PLAIN;     // of every block
    const T* w[3] = {};                // PLAIN: (rows, in) of each block
    const int8_t* q[3] = {};           // other formats: (rows, row_bytes) of each block
    const void* scale[3] = {};         // other formats: (rows / group_rows, groups)
    const uint8_t* zero[3] = {};       // INT4: (rows, groups) zero points, or null: all are 8
    int group = GROUP, group_rows = 1; // columns and rows that share a scale
    int rows[3] = {};
    int in = 0;
    Adapter<T> adapter;
    int out() const { return rows[0] + rows[1] + rows[2]; }
    int groups() const { return (in + group - 1) / group; }
    size_t row_bytes() const { // bytes of a row of q
        return format == Format::INT4 ? ((size_t)in + 63) / 64 * 32 : (size_t)in;
    }
    // W[r][i] in any format.
    acc<T> at(int r, int i) const {
        int b = 0;
        while (r >= rows[b]) r -= rows[b++];
        if (format != Format::PLAIN) return packed_number<acc<T>>(*this, b, r, i);
        return to_acc(w[b][(size_t)r * in + i]);
    }
    int first_row(int b) const { return b == 0 ? 0 : b == 1 ? rows[0] : rows[0] + rows[1]; } // of block b
};

// ---- product: y[n][r] = sum_i W[r][i] x[n][i]; `store(n, r, y)` is called once for each.
template <class T, class Store> void product(const Linear<T>& W, const T* x, int N, Store store) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < W.out(); r++)
        for (int n = 0; n < N; n++) {
            acc<T> y = 0;
            for (int i = 0; i < W.in; i++) y += W.at(r, i) * to_acc(x[(size_t)n * W.in + i]);
            store(n, r, y);
        }
}

// drop_j(x)[n][i]: in training 0 or x[n][i] / (1 - p), else x[n][i]. It is not rounded to T, so a faster version may
// multiply the finished sum by 1 / (1 - p).
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

// x W^T, plus h (s B)^T if W has an adapter. h is rounded to T; the sum of both is rounded once. (B is zero where a row
// does not belong to a module's block.)
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
    const size_t ld = W.out(); // numbers from one row of out to the next
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

// ---- norm_linear_swiglu: out = swiglu(rmsnorm(x) W^T)
template <class T>
void norm_linear_swiglu(T* out,          // (N,F) out
                        T* gate_up,      // (N,2F) out; may be null on a GPU
                        T* normed,       // (N,C) scratch, as norm_linear's
                        const acc<T>* x, // (N,C)
                        const T* w,      // (C)
                        const Linear<T>& W, int N, float eps) {
    norm_linear(gate_up, normed, x, w, W, N, eps);
    swiglu(out, gate_up, N, W.rows[0]);
}

// ---- head: the logits of R chosen tokens. They stay acc<T>: they are not rounded to T.
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

// ======================================================================================= 3 Tokens, cache and attention

// N packed tokens of B sequences. The rows of a sequence are adjacent and in order of position. Each of the first
// `singles` rows is the only row of its sequence (decoding). The sequences after them have any number of rows (prompts,
// training). A spare row has seq = -1. Ops that use token, pos or slot skip it; other ops compute a result that is not
// read. On a GPU the arrays are in its memory. Keys and values are in pages of 16 tokens (model/kv_cache.h); row seq[n]
// of the block table lists the pages of token n's sequence.
struct Batch {
    int N, B;
    const int* token; // (N)
    const int* pos;   // (N) position in its sequence, from 0
    const int* seq;   // (N) row of the block table
    const int* slot;  // (N) where its key and value go: page * 16 + offset
    const int* pages; // (B, max_pages) block table
    int max_pages;    // pages a sequence can have
    int singles = 0;  // leading rows that are the only row of their sequence
    int splits = 1;   // GPU: splits of SPLIT keys in the longest of these sequences
    int longest = 0;  // GPU: keys of the longest sequence after them; 0: not known
    bool fp8 = false; // the cache is FP8: see KVRow
};

// ---- embed: x[n] = W[token[n]]
template <class T>
void embed(acc<T>* x,              // (N,C) out
           const Linear<T>& table, // (V,C)
           const Batch& b, int C) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        for (int i = 0; i < C; i++) x[(size_t)n * C + i] = table.at(b.token[n], i);
    }
}

constexpr int MAX_HEAD = 512; // the largest D; model/model_file.cpp refuses more

// ---- qknorm_rope_kv: each q and k head of a token is RMS-normalised. Then RoPE rotates its planes (i, i + D/2) by the
// angles of fill_rope (Su et al., "RoFormer", 2021). The rotated k, and v as it is, go to the cache.
template <class T>
void qknorm_rope_kv(T* q,               // (N,HD) out
                    T* keys,            // (pages, K, 16, D) one layer's cache, out
                    T* values,          // the same, out
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
            store_kv(keys, b.fp8, b.slot[n], h, key, K, D);
            store_kv(values, b.fp8, b.slot[n], h, row + (H + K + h) * D, K, D);
        }
    }
}

// ---- attention: out[n][h] = sum_m p_m v_m, p = softmax(q[n][h] . k_m / sqrt(D)) over the positions m = 0..pos[n] of
// n's sequence; query head h reads key/value head h / G.      (Vaswani et al., "Attention is all you need", 2017)
template <class T>
void attention(T* out,          // (N,HD) out
               acc<T>* lse,     // (N,H) out: log sum_m e^(q . k_m / sqrt(D)), which backward needs; null: not wanted
               const T* q,      // (N,HD)
               const T* keys,   // (pages, K, 16, D) one layer's cache
               const T* values, // the same
               const Batch& b, int H, int K, int D) {
    #pragma omp parallel for schedule(dynamic)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const int length = b.pos[n] + 1, *pages = b.pages + (size_t)b.seq[n] * b.max_pages;
        std::vector<acc<T>> p(length), mix(D); // p[m]: the score of key m, then e^(score - top); mix: sum_m p[m] v_m
        for (int h = 0; h < H; h++) {
            const T* query = q + ((size_t)n * H + h) * D;
            auto at = [&](const T* cache, int m) {
                return KVRow<T>(cache, b.fp8, pages[m / PAGE], h / (H / K), m % PAGE, K, D);
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

// ---- attend: from qkv to the input of o: qknorm_rope_kv, then attention
template <class T>
void attend(T* out,             // (N,HD) out
            acc<T>* lse,        // (N,H) out, or null
            T* q,               // (N,HD) out: q after norm and RoPE
            T* keys,            // (pages, K, 16, D) one layer's cache, out
            T* values,          // the same, out
            const T* qkv,       // (N,(H+2K)D)
            const T* q_weight,  // (D)
            const T* k_weight,  // (D)
            const acc<T>* rope, // (positions, D/2, 2)
            const Batch& b, int H, int K, int D, float eps) {
    qknorm_rope_kv(q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
    attention(out, lse, q, keys, values, b, H, K, D);
}

// =========================================================================================================== 4 forward

// Shapes and weights. model/model_file.h and model/weights.h read them from files.
struct Config {
    int C, L, H, K, D, F, V, max_positions;
    float eps;
    double rope_theta;
    bool tied;                   // the head's matrix is the embedding's
    std::vector<int> end_tokens; // any of them ends an answer
};

template <class T> struct Layer {
    const T *norm1, *norm2;      // (C)
    const T *q_norm, *k_norm;    // (D)
    Linear<T> qkv, o;            // (HD + 2KD, C), (C, HD)
    Linear<T> gate_up, down;     // (2F, C), (C, F)
};

struct ModelFile; // model/model_file.h
template <class T> struct Weights {
    Linear<T> embed;             // (V,C)
    std::vector<Layer<T>> layers;
    const T* norm = nullptr;     // (C)
    Linear<T> head;              // (V,C), the embedding when tied
    std::vector<std::shared_ptr<void>> converted; // memory of the tensors that are not used in the mapped file
    Arena gpu;                   // after `upload`: all weights, in the GPU's memory

    // Reads a checkpoint (model/weights.cpp). A tensor that the file stores as T is used in place, and an INT8 matrix
    // stays INT8. Other tensors are converted to T. With `int8` every matrix becomes INT8. With `packed` a quantised
    // matrix keeps its format if Linear has it, else it becomes INT8. Norms are always T.
    explicit Weights(const ModelFile& file, bool int8 = false, bool packed = false);
    Weights() = default; // for lab/decode, which fills it
    // Copies all to the GPU, the blocks of a Linear one after another, and changes every pointer.
    void upload(Context& ctx, const ModelFile& file);
};
template <> void Weights<bf16>::upload(Context& ctx, const ModelFile& file); // gpu/upload.cu

// The arrays between forward ops, for up to N tokens. In inference all layers share one set. In training a layer has
// its own copy of the arrays that the backward pass reads and does not compute again: see model/plans.cpp.
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

    bool recompute = false; // training keeps only `in` of each layer; the backward pass runs layer_forward again
    bool ample = false;     // training also keeps q, hidden, keys and values of each layer
    void plan(Arena& arena, const Config& c, int N, bool gate_up = true); // gate_up: false for the GPU's fused op
    void plan_training(Arena& arena, const Config& c, int N, bool whole_layers, bool ample_memory = false);
};
// Keys and values of all layers, (L, pages, K, 16, D) each. In training all layers may share the memory of one.
template <class T> struct KVCache {
    T *keys, *values;
    size_t layer_size; // numbers from one layer to the next; 0 if the layers share one
    bool fp8 = false;  // the arrays hold bytes, not T: see KVRow

    void plan(Arena& arena, const Config& c, size_t pages, bool one_layer = false, bool fp8 = false);
    static size_t block_bytes(const Config& c, bool fp8); // of a page and head
    static size_t bytes(const Config& c, size_t pages, bool fp8 = false);
    Batch of(Batch b) const { return b.fp8 = fp8, b; } // the batch with this cache's format
};

// RUN(op, ...) calls the fastest version of an op that the context allows: op_gpu, op_cpu or op. The function around it
// is a template on T and has a variable `ctx`. op_cpu and op_gpu are declared at the end of Book I; the compiler finds
// them by the type of `ctx` (argument-dependent lookup).
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

// From tokens to vectors, the final norm included: a.normed (N,C). The keys and values of the batch go to the cache.
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

// ========================================================================================================== 5 generate

// Continues a prompt on the CPU: up to `most` new ids, without the end token. Only ids below `exist` are drawn, by
// `sample` of model/sampling.h. (model/session.h has GPUs, a cache that stays, penalties and stop strings.)
template <class T>
std::vector<int> generate(Context& ctx, const Config& c, const Weights<T>& w, std::vector<int> ids, size_t most,
                          int exist, const Sampling& how) {
    const size_t prompt = ids.size(), context = prompt + most;
    std::vector<int> pos(context), seq(context), pages((context + PAGE - 1) / PAGE); // pages 0, 1, ...: slot = position
    std::iota(pos.begin(), pos.end(), 0), std::iota(pages.begin(), pages.end(), 0);
    std::vector<acc<T>> rope(context * c.D), logits(c.V);
    fill_rope(rope.data(), (int)context, c.D, c.rope_theta);
    std::vector<T> picked(c.C);
    Arena arena;
    Activations<T> a;
    KVCache<T> kv;
    const auto plan = [&] { a.plan(arena, c, (int)prompt), kv.plan(arena, c, pages.size()); }; // counts, then hands out
    plan(), arena.allocate("generate"), plan();
    for (size_t done = 0; ids.size() < context;) { // the prompt, then one id at a time
        const int N = (int)(ids.size() - done), last = N - 1;
        const Batch b = {N, 1, &ids[done], &pos[done], &seq[done], &pos[done], pages.data(), (int)pages.size(), N == 1};
        forward(ctx, c, w, b, a, kv, rope.data());
        RUN(head, logits.data(), picked.data(), a.normed, &last, w.head, 1);
        done = ids.size();
        const int id = sample(std::vector<float>(logits.begin(), logits.end()).data(), exist, how, done);
        if (std::count(c.end_tokens.begin(), c.end_tokens.end(), id)) break;
        ids.push_back(id);
    }
    return {ids.begin() + prompt, ids.end()};
}

// ============================================================================================ 6 Backward ops, AdamW
// A gradient is the derivative of the loss with respect to an array; the gradient of x is named dx. A backward op
// computes the gradients of its op's inputs from the gradient of its output. Its heading repeats the forward op; the
// lines below it are the gradients. Gradients of activations are written, as T. The gradient of the residual stream is
// one array of acc<T>, to which each branch adds. Gradients of parameters are acc<T>, to which each op adds, token by
// token in order: on a CPU their bits do not depend on how a step is cut into batches (but for a tied embedding, to
// which the head and embed add in turn). Values that forward did not keep are computed again.

// ---- cross_entropy: loss[r] = log(sum_v e^logits[r][v]) - logits[r][target[r]]
// dlogits[r][v] = scale (softmax(logits[r])[v] - [v = target[r]]). The sum is over all V rows, as in Hugging Face's,
// those past the tokenizer's ids included. dlogits is in the memory of logits: row r begins where row r of logits
// began.
template <class T>
void cross_entropy(acc<T>* loss,      // (R) out
                   T* dlogits,        // the memory of logits; null: no gradient
                   acc<T>* logits,    // (R,V) in; become dlogits
                   const int* target, // (R)
                   acc<T> scale, int R, int V) {
    for (int r = 0; r < R; r++) {
        const acc<T>* row = logits + (size_t)r * V;
        acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
        for (int v = 0; v < V; v++) top = std::max(top, row[v]);
        for (int v = 0; v < V; v++) sum += std::exp(row[v] - top);
        loss[r] = std::log(sum) + top - row[target[r]];
        for (int v = 0; v < V && dlogits; v++) { // sizeof(T) <= sizeof(acc<T>): overwrites only logits already read
            const T d = to_stored<T>((std::exp(row[v] - top) / sum - (v == target[r])) * scale);
            memcpy((uint8_t*)(logits + (size_t)r * V) + v * sizeof(T), &d, sizeof(T));
        }
    }
}

// ---- head_loss: logits[r] = W x[rows[r]], then cross_entropy. factor[r] dlogits[r] is the gradient of by[r] scale
// loss[r] with respect to logits[r]. The factor is separate since a GPU knows a row's softmax sum only after it has
// written the row.
template <class T>
void head_loss(acc<T>* loss,      // (R) out
               T* dlogits,        // out, or null: as cross_entropy's
               acc<T>* factor,    // (R) out
               acc<T>* logits,    // (R,V) out; become dlogits
               T* picked,         // (R,C) out: rows of x
               acc<T>*,           // (R, V / 64 rounded up + 1, 2) scratch of head_loss_gpu
               const T* x,        // (N,C) after the final norm
               const int* rows,   // (R)
               const int* target, // (R)
               acc<T> scale,
               const acc<T>* by,  // (R) weights of the losses, or null: 1
               const Linear<T>& W, int R) {
    head(logits, picked, x, rows, W, R);
    cross_entropy(loss, dlogits, logits, target, scale, R, W.out());
    for (int r = 0; r < R; r++) factor[r] = by ? by[r] : 1;
}

// ---- add_losses: total += loss[0] + loss[1] + ..., in double and in order
template <class A> void add_losses(double* total, const A* loss, int R) {
    for (int r = 0; r < R; r++) *total += (double)loss[r];
}

// ---- scale_rows: x[r] *= by[r], the first n numbers of each row
template <class T>
void scale_rows(T* x,             // (R, ld) in and out
                size_t ld,        // numbers from one row to the next
                const acc<T>* by, // (R)
                int R, int n) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < R; r++)
        for (int i = 0; i < n; i++) x[r * ld + i] = to_stored<T>(to_acc(x[r * ld + i]) * by[r]);
}

// ---- head: logits[r] = W normed[rows[r]]
// dnormed[rows[r]] = factor[r] W^T dlogits[r]. Other rows of dnormed are not touched.
template <class T>
void head_backward(T* dnormed,           // (N,C) out
                   const T* dlogits,     // (R, ld), V numbers of each row
                   size_t ld,            // numbers from one row to the next
                   const acc<T>* factor, // (R) see head_loss
                   const int* rows,      // (R) distinct
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
                      T* dy,           // (N,C) out: dx after the addition, rounded to T; or null
                      T* normed,       // (N,C) out: forward's `out`, computed again; or null
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

// ---- linear: y = x W^T + sum_j s h_j B_j^T,  h_j = drop_j(x) A_j^T (the sum is the adapter's)
// dx = dy W + sum_j drop_j(dh_j A_j),  dh_j = dy (s B_j),  dB_j += s dy^T h_j. dW and dA have ops of their own, below.
template <class T>
void linear_backward_input(T* dx,       // (N, W.in) out
                           T* dh,       // (N, m * rank) out
                           acc<T>* dB,  // (W.out, m * rank) +=; only the rows of a module's block change
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

// ---- linear_backward_weight: dW += dy^T x
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

// ---- lora_backward_weight: dA_j += dh_j^T drop_j(x), after linear_backward_input has computed dh
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
                     T* hidden,        // (N,F) out: forward's `out`, computed again; or null
                     const T* dhidden, // (N,F)
                     const T* gate_up, // (N,2F)
                     int N, int F) {
    for (int n = 0; n < N; n++)
        for (int f = 0; f < F; f++) {
            const size_t at = (size_t)n * F + f, gate = (size_t)n * 2 * F + f, up = gate + F;
            const acc<T> g = to_acc(gate_up[gate]), u = to_acc(gate_up[up]), d = to_acc(dhidden[at]);
            const acc<T> sigma = 1 / (1 + std::exp(-g));
            if (hidden) hidden[at] = to_stored<T>(g / (1 + std::exp(-g)) * u);
            dgate_up[gate] = to_stored<T>(d * u * sigma * (1 + g * (1 - sigma)));
            dgate_up[up] = to_stored<T>(d * g * sigma);
        }
}

// ---- linear_backward_swiglu: y = swiglu(gate_up) W^T: linear_backward_input, then swiglu_backward
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

// ---- attention: s[n][m] = q_n . k_m / sqrt(D), p = e^(s - lse), o_n = sum_m p[n][m] v_m over m <= n of n's sequence
//     dv_m = sum_n p[n][m] do_n                              dp[n][m] = do_n . v_m
//     ds[n][m] = p[n][m] (dp[n][m] - delta_n)                delta_n = sum_m p[n][m] dp[n][m] = do_n . o_n
//     dq_n = sum_m ds[n][m] k_m / sqrt(D)                    dk_m = sum_n ds[n][m] q_n / sqrt(D)
// dv and dk also sum over the G query heads that read the KV head. p is computed again from lse. The batch holds whole
// sequences, from position 0 on, so a sequence's first row is n - pos[n]. (In the code m is a row of the batch.) The
// cache holds T, not FP8. Spare rows come last; their gradients are zero, because weight gradients sum over all rows.
template <class T>
void attention_backward(T* dqkv,           // (N,(H+2K)D) out: gradients of q and k after RoPE, and of v
                        const T* dout,     // (N,HD)
                        const T* q,        // (N,HD)
                        const T* keys,     // (pages, K, 16, D) one layer's cache
                        const T* values,   // the same
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
// The gradient is rotated by the opposite angle. Then it goes through the norm, as in rmsnorm_backward.
template <class T>
void qknorm_rope_backward(T* dqkv,            // (N,(H+2K)D) in and out: dq and dk become those before norm and RoPE
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
            acc<T> dy[MAX_HEAD], sum = 0; // dy: the gradient of the norm's output
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

// ---- attend: attention_backward, then qknorm_rope_backward. q, keys and values are those of attend.
template <class T>
void attend_backward(T* dqkv,            // (N,(H+2K)D) out
                     acc<T>* dq_weight,  // (D) +=, or null
                     acc<T>* dk_weight,  // (D) +=, or null
                     const T* dout,      // (N,HD)
                     const T* q,         // (N,HD)
                     const T* keys,      // (pages, K, 16, D) one layer's cache
                     const T* values,    // the same
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

// ---- grad_norm: sqrt(sum_i g[i]^2) of all gradients, in double: squares are summed in pieces of NORM_PIECE numbers,
// in order; then the pieces are summed in order.
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

// ---- adamw (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019), rounded as PyTorch does:
//     g *= min(1, clip / (norm + 1e-6))                           as clip_grad_norm_
//     m = beta1 m + (1 - beta1) g                                 v = beta2 v + (1 - beta2) g^2
//     p = (1 - lr decay) p - lr m' / (sqrt(v') + eps)             m' = m / (1 - beta1^step), v' = v / (1 - beta2^step)
// If the norm is not finite, nothing changes.
struct AdamW {
    float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0;
    float clip = 0;   // 0: off
    int64_t step = 0; // from 1
    float copy = 1;   // stored = copy * p: s for an adapter's B, else 1
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
    const A m_correction = (A)(1 - std::pow((double)a.beta1, (double)a.step));
    const A v_correction = (A)std::sqrt(1 - std::pow((double)a.beta2, (double)a.step)); // of sqrt(v)
    const A keep = (A)(1 - (double)a.lr * a.decay), pace = (A)a.lr / m_correction;
    #pragma omp parallel for schedule(static) if (n > 2000)
    for (size_t i = 0; i < n; i++) {
        const A gi = g[i] * scale;
        m[i] += (gi - m[i]) * (1 - (A)a.beta1);
        v[i] = v[i] * (A)a.beta2 + gi * gi * (1 - (A)a.beta2);
        p[i] = p[i] * keep - pace * (m[i] / (std::sqrt(v[i]) / v_correction + (A)a.eps));
        stored[i] = to_stored<T>(p[i] * (A)a.copy);
    }
}

// ========================================================================================================= 7 backward

// Gradients of the parameters. A pointer is null if its parameter is not trained.
template <class T> struct Gradients {
    struct OfLinear { acc<T> *W = nullptr, *A = nullptr, *B = nullptr; };
    struct OfLayer {
        acc<T> *norm1 = nullptr, *norm2 = nullptr, *q_norm = nullptr, *k_norm = nullptr;
        OfLinear qkv, o, gate_up, down;
    };
    std::vector<OfLayer> layer;
    acc<T> *embed = nullptr, *norm = nullptr, *head = nullptr; // head is embed when tied
    std::function<void(int layer)> done; // called when all gradients of a layer are complete
};

// The arrays between backward ops, for up to N tokens, which all layers share. Unless noted each holds a gradient.
template <class T> struct Flow {
    acc<T>* x;       // (N,C) of the residual stream
    T* y;            // (N,C) x rounded to T
    T* normed;       // (N,C) of a norm's output
    T* qkv;          // (N,(H+2K)D)
    T* attention;    // (N,HD) of attention's output
    acc<T>* delta;   // (N,H) scratch of attention_backward
    T* gate_up;      // (N,2F)
    T* hidden;       // (N,F); null on a GPU
    T* h;            // (N, 3 rank) of the h of an adapter
    acc<T>* logits;  // (head_rows,V) logits, then their gradient; on a GPU the memory holds bf16
    acc<T>* factor;  // (head_rows) see head_loss
    acc<T>* parts;   // scratch of head_loss_gpu
    T* picked;       // (head_rows,C) rows of Activations::normed, not a gradient
    int head_rows;   // rows that go through the head at once

    void plan(Arena& arena, const Config& c, int N, int rank, int rows, bool gpu); // model/plans.cpp
};

// After `forward`: loss[r] of token rows[r] against target[r], the id that follows it. Only these R tokens go through
// the head, head_rows at a time. If `g` is not null, d.normed and g->head get the gradient of sum_r by[r] scale
// loss[r].
template <class T>
void loss_backward(Context& ctx, const Config& c, const Weights<T>& w, const Activations<T>& a, Flow<T>& d,
                   const Gradients<T>* g,
                   acc<T>* loss,      // (R) out
                   const int* rows,   // (R) distinct
                   const int* target, // (R)
                   acc<T> scale, int N, int R,
                   const acc<T>* by = nullptr) { // (R) weights of the losses; null: 1
    const size_t ld = (size_t)c.V * (ctx.gpu ? 1 : sizeof(acc<T>) / sizeof(T)); // numbers between two rows of dlogits
    T* dlogits = g ? (T*)d.logits : nullptr;
    if (g) clear(ctx, d.normed, (size_t)N * c.C);
    for (int r = 0; r < R && !(ctx.stop && *ctx.stop); r += d.head_rows) {
        const int n = std::min(d.head_rows, R - r);
        RUN(head_loss, loss + r, dlogits, d.factor, d.logits, d.picked, d.parts, a.normed, rows + r, target + r, scale,
            by ? by + r : nullptr, w.head, n);
        if (!g) continue;
        if (g->head) { // the factor goes to the rows of x, which are shorter than those of dlogits
            RUN(scale_rows, d.picked, (size_t)c.C, d.factor, n, c.C);
            RUN(linear_backward_weight, g->head, dlogits, ld, d.picked, n, c.V, c.C);
        }
        RUN(head_backward, d.normed, dlogits, ld, d.factor, rows + r, w.head, n);
    }
}

// From d.normed (loss_backward) to the gradient of every parameter: `forward` in reverse order. The batch holds whole
// sequences. A training step (train/step.cpp) is forward, loss_backward and backward for each batch, then grad_norm and
// adamw.
template <class T>
void backward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, Flow<T>& d,
              const Gradients<T>& g, KVCache<T>& kv, const acc<T>* rope) {
    const int N = b.N, C = c.C, H = c.H, K = c.K, D = c.D;
    auto input_gradient = [&](T* dx, const typename Gradients<T>::OfLinear& to, const T* dy, const Linear<T>& W) {
        RUN(linear_backward_input, dx, d.h, to.B, dy, W, N);
    };
    auto weight_gradients = [&](const typename Gradients<T>::OfLinear& to, const T* dy, const T* x,
                                const Linear<T>& W) {
        if (to.W) RUN(linear_backward_weight, to.W, dy, (size_t)W.out(), x, N, W.out(), W.in);
        if (W.adapter.rank) RUN(lora_backward_weight, to.A, d.h, x, W, N); // d.h: from the same W's input gradient
    };
    T* const none = nullptr;
    clear(ctx, d.x, (size_t)N * C);
    RUN(rmsnorm_backward, d.x, d.y, none, g.norm, d.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
    for (int l = c.L - 1; l >= 0 && !(ctx.stop && *ctx.stop); l--) {
        const Layer<T>& layer = w.layers[l];
        auto& s = a.layer[l];
        const auto& grads = g.layer[l];
        T *keys = kv.keys + l * kv.layer_size, *values = kv.values + l * kv.layer_size;
        if (a.recompute) layer_forward(ctx, c, layer, b, s, keys, values, rope);
        // out = mid + hidden down^T, hidden = swiglu(gate_up), gate_up = norm2(mid) W^T
        RUN(linear_backward_swiglu, d.gate_up, a.ample ? none : s.hidden, d.hidden, d.h, grads.down.B, d.y, s.gate_up,
            layer.down, N);
        weight_gradients(grads.down, d.y, s.hidden, layer.down);
        input_gradient(d.normed, grads.gate_up, d.gate_up, layer.gate_up);
        RUN(rmsnorm_backward, d.x, d.y, s.norm2, grads.norm2, d.normed, s.mid, layer.norm2, N, C, c.eps);
        weight_gradients(grads.gate_up, d.gate_up, s.norm2, layer.gate_up);
        // mid = in + attention o^T, attention = attend(qkv), qkv = norm1(in) W^T
        input_gradient(d.attention, grads.o, d.y, layer.o);
        weight_gradients(grads.o, d.y, s.attention, layer.o);
        if (!a.ample) // q, keys and values of this layer were not kept
            RUN(qknorm_rope_kv, s.q, keys, values, s.qkv, layer.q_norm, layer.k_norm, rope, b, H, K, D, c.eps);
        RUN(attend_backward, d.qkv, grads.q_norm, grads.k_norm, d.attention, s.q, keys, values, s.attention, s.lse,
            s.qkv, layer.q_norm, layer.k_norm, rope, b, H, K, D, c.eps, d.delta);
        input_gradient(d.normed, grads.qkv, d.qkv, layer.qkv);
        RUN(rmsnorm_backward, d.x, d.y, s.norm1, grads.norm1, d.normed, s.in, layer.norm1, N, C, c.eps);
        weight_gradients(grads.qkv, d.qkv, s.norm1, layer.qkv);
        if (g.done) g.done(l);
    }
    if (g.embed) RUN(embed_backward, g.embed, d.x, b, C);
}

// ################################################# The end of Book I #################################################
// Its slow ops once more, for the vector and matrix instructions of CPUs:
#ifndef QWEN3_PLAIN
#include "cpu/ops.h"
#endif
#include "gpu/ops.h" // ... and Book II's launchers, declared: op_gpu

// Compiled once, in the object of this file.
#ifdef QWEN3_LIBRARY
#define BOOK_I_INSTANCE template
#else
#define BOOK_I_INSTANCE extern template
#endif
#define BOOK_I_INSTANCES(T) \
    BOOK_I_INSTANCE void layer_forward(Context&, const Config&, const Layer<T>&, const Batch&, \
                                       typename Activations<T>::PerLayer&, T*, T*, const acc<T>*); \
    BOOK_I_INSTANCE void forward(Context&, const Config&, const Weights<T>&, const Batch&, Activations<T>&, \
                                 KVCache<T>&, const acc<T>*); \
    BOOK_I_INSTANCE void loss_backward(Context&, const Config&, const Weights<T>&, const Activations<T>&, Flow<T>&, \
                                       const Gradients<T>*, acc<T>*, const int*, const int*, acc<T>, int, int, \
                                       const acc<T>*); \
    BOOK_I_INSTANCE void backward(Context&, const Config&, const Weights<T>&, const Batch&, Activations<T>&, Flow<T>&, \
                                  const Gradients<T>&, KVCache<T>&, const acc<T>*);
#ifndef QWEN3_PLAIN
QWEN3_INSTANCES(BOOK_I_INSTANCES)
#endif

#ifdef __CUDACC__
// ###################################################### Book II ######################################################

// ========================================================================================================== 8 Toolbox
// Errors, launches, and the instructions that kernels are made of, each wrapped once under its name in the PTX ISA.
#define CUDA_CHECK(call) cuda_check((call), #call)
inline void cuda_check(cudaError_t e, const char* call) {
    if (e != cudaSuccess) DIE("%.60s: %s", call, cudaGetErrorString(e));
}

// Properties of the GPU that launches depend on, and scratch. A session with its own scratch has its own copy.
struct Gpu {
    cudaStream_t stream = nullptr;
    int sm = 0, sms = 0;         // 10 x compute capability; multiprocessors
    bool hopper = false;         // sm_90a, and this binary was built for it: wgmma
    bool overlap = false;        // sm_90 and up: a kernel may start before the one ahead of it has ended
    float* partial = nullptr;    // of products whose sums several blocks share, PARTIAL_BYTES
    int* arrived = nullptr;      // ... and how many of them are done: (MAX_TILES), zero between kernels
    float* attention = nullptr;  // the same for attention, see attention_scratch
    int* attention_arrived = nullptr;
    bf16* unpacked = nullptr;    // of packed weights, a matrix at a time: see gpu/packed/unpack.h
    size_t unpacked_numbers = 0;
    bf16* rounded = nullptr;     // what FP8 weights are multiplied by, with Context::fp8_activations
    size_t rounded_numbers = 0;
    struct { const bf16* x = nullptr; int N = 0, in = 0; } ahead; // activations that it has already: see E4M3Rows
    bf16* widened = nullptr;     // one layer's FP8 keys and values as bf16: see widen_pages_kernel
    size_t widened_numbers = 0;
};
inline constexpr size_t PARTIAL_BYTES = 32 << 20;
inline constexpr int MAX_TILES = 4096;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA
#define BLOCKS_OF_1024 2 // that a multiprocessor should hold: two rows of draws at a time
#else
#define BLOCKS_OF_1024 1
#endif
#define GPU_UNROLL _Pragma("unroll") // where suites compile a header for a CPU too (tests/emulate)

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
// The launches of f, as a graph that can be launched many times.
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

__device__ inline void store_one(float* to, float y) { *to = y; }
__device__ inline void store_one(bf16* to, float y) { *to = round_bf16(y); }
__device__ inline void store_four(float* to, const float4& y) { *(float4*)to = y; }
__device__ inline void store_four(bf16* to, const float4& y) {
    *(uint2*)to = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
}

// d += a b with a (16,16), b (16,8), d (16,8) spread over a warp: lane 4g + t holds of d rows g (d[0], d[1]) and
// g + 8 (d[2], d[3]), columns 2t, 2t + 1; of a rows g (a0, a2) and g + 8 (a1, a3), pairs of columns 2t (a0, a1) and
// 2t + 8 (a2, a3); of b column g, pairs of rows 2t (b0) and 2t + 8 (b1). PTX ISA: mma.m16n8k16, .bf16
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += a b for 32 numbers of `in`. Lane 4 g + t holds eight of them, of tokens g (a0), g + 8 (a1) and of row g of W.
__device__ __forceinline__ void mma_32(float (&d)[4], const uint4& a0, const uint4& a1, const uint4& b) {
    mma(d, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
    mma(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
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
// 32 columns, transposed, of rows of 64 bytes in the 64-byte swizzle (chunk c of row r is at c ^ r / 2 % 4).
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
// wgmma may read all earlier writes to shared memory.
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

inline constexpr float LOG2E = 1.44269504f;
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

// ==================================================================================================== 9 Small kernels
// In Book I's order (the backward pass's: gpu/backward). Each reads and writes its arrays once, so memory bounds them.
// "A block a token" means: block n computes row n, its threads share the channels.

#ifdef QWEN3_LIBRARY // kernels and launchers are compiled once
// ---- embed. A block a token.
__global__ void embed_kernel(float* x, const bf16* table, Batch b, int C) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    if (b.seq[n] < 0) return;
    const bf16* row = table + (size_t)b.token[n] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) x[(size_t)n * C + i] = to_acc(row[i]);
}
void embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b, int C) {
    if (table.format != Format::PLAIN) return packed_embed_gpu(ctx, x, table, b);
    // A forward's first kernel waits for all before it, so that those after it may read early: see launch_kernel.
    launch_kernel(ctx, false, embed_kernel, b.N, 128, 0, x, table.w[0], b, C);
}
#endif

// ---- Activations (N,in) as e4m3 and their groups' scales (groups, pitch), see model/fp8_activations.h.
struct E4M3Rows {
    uint8_t* q = nullptr;
    float* scale = nullptr;
    int pitch = 0;
};
// `largest`: the bits of a group's largest number, without sign; from 0x7f80 on it is not finite.
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
#ifdef QWEN3_LIBRARY
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
#endif
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
inline bool norms_by_warps(Context& ctx, int N) { return N >= 16 * ctx.gpu->sms; }
void rmsnorm_rounded_gpu(Context& ctx, const E4M3Rows& out, const float* x, const bf16* w, int N, int C, float eps);
#ifdef QWEN3_LIBRARY
__global__ void __launch_bounds__(256) rmsnorm_warp_kernel(bf16* out, const float* x, const bf16* w, int N, int C,
                                                           float eps) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * 8 + threadIdx.x / 32;
    if (n < N) norm_row(out + (size_t)n * C, x + (size_t)n * C, w, C, eps, [] {});
}
static int norm_threads(int C) { return std::clamp((C + 255) / 256 * 32, 256, 1024); } // a warp keeps what it has
void rmsnorm_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, int N, int C, float eps) {
    if (norms_by_warps(ctx, N))
        return launch(ctx, rmsnorm_warp_kernel, (N + 7) / 8, 256, 0, out, x, w, N, C, eps);
    launch(ctx, rmsnorm_kernel, N, norm_threads(C), (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}
void rmsnorm_rounded_gpu(Context& ctx, const E4M3Rows& out, const float* x, const bf16* w, int N, int C, float eps) {
    launch(ctx, rmsnorm_rounded_kernel, N, norm_threads(C), (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}
#endif

#include "gpu/norm_rope.h" // ---- qknorm_rope_kv
#ifdef QWEN3_LIBRARY
void qknorm_rope_kv_gpu(Context& ctx, bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight,
                        const bf16* k_weight, const float* rope, const Batch& b, int H, int K, int D, float eps,
                        int first) {
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

void pick_rows_gpu(Context& ctx, bf16* picked, const bf16* x, const int* rows, int R, int C) {
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, C);
}
#endif // QWEN3_LIBRARY
#endif // __CUDACC__
#endif // QWEN3_CU

#if __INCLUDE_LEVEL__ == 0 && !defined(QWEN3_LIBRARY)
#include "cli/cli.h"

int main(int argc, char** argv) {
    take_signals({SIGINT}, {SIGPIPE});
    return run_program("qwen3", cli::run, argc, argv);
}
#endif
