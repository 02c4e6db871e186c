/* qwen3.cu: the Qwen3 language model, as a text to study.

   Book I    the model in plain C++: each op is its formula and a loop, forward and backward. Slow and right.
   Book II   the same ops on a GPU, for nvcc: all forward and backward kernels, for any GPU from sm_80 on. Each kernel
             is tested against its op in Book I. cpu/ and gpu/ are optional: they are faster where the machine allows.

   Build:  make                 with nvcc where a GPU is, else with g++ alone (this file is also plain C++17)
           make portable        without cpu/ and gpu/: this text alone computes
   Run:    ./qwen3 model.bin -i "What is a warp?"            (-d plain runs Book I itself, on the CPU)

   From a prompt to an answer: text becomes token ids (model/tokenizer.h). `forward` turns the ids into one vector for
   each token. The head turns the vector of the last token into one score (logit) for each id of the vocabulary. The
   sampler picks an id, which is the next input. The KV cache holds the keys and values of all past tokens, so each step
   computes one token only.

   One layer. x is the residual stream; the second line begins with the x of the first:
     x (N,C) -> rmsnorm (N,C) -> q (N,HD), k, v (N,KD) -> head norms, RoPE -> attention (N,HD) -> o (N,C) -> + x
     x (N,C) -> rmsnorm (N,C) -> gate, up (N,F)        -> silu(gate) * up (N,F)         -> down (N,C)     -> + x
   A mixture of experts has E such MLPs of M in place of one of F; a router chooses k of them for each token.

   Notation    N tokens   C channels (hidden size)   H query heads   K key/value heads   D head size
               F feed-forward size   V rows of the vocabulary   L layers   B sequences   G = H / K query heads a KV head
               R tokens that go through the head   E experts of a layer, k of them for a token, M the F of one expert
               n a token (row)   i a column   r a row of W, or one of R   h a head   m a key's position   e an expert
               (N,C) is a row-major array of N rows of C numbers. W has shape (out, in): y = W x for one token, and
               y = x W^T for the rows of x together. The head is the last product; a head is one of attention's.
   Types       T is the stored type: bf16, float or double. acc<T> is the type of sums: float (double for double); an op
               of sums alone names it A. The residual stream and the logits are acc<T>. Other arrays between ops are T.

   Contracts
   - An op is defined once, in Book I. Its heading, // ----, has its formula and its shapes: outputs <- inputs. Outputs
     come first, then inputs, then sizes. Each op that takes time has two more versions: `op_cpu` in cpu/ for the
     instructions of CPUs, `op_gpu` in Book II. RUN (section 4) chooses.
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
   Book II    8 Toolbox    9 Small kernels    10 Products    11 Attention    12 Sampled logits    13 Backward
   and main
*/
#ifndef QWEN3_CU
#define QWEN3_CU
#include "base/arena.h"
#include "model/adamw.h"
#include "model/bf16.h" // bf16, acc<T>; to_acc(x) reads a T, to_stored<T>(x) rounds to one
#include "model/context.h"
#include "model/dropout.h"
#include "model/formats.h"
#include "model/gpu_ops.h"
#include "model/instances.h"
#include "model/kv_cache.h"
#include "model/rope.h"
#include "model/sampling.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

// ###################################################### Book I #######################################################

// ======================================================================================================= 1 Ops on rows
// The loop over tokens may run in parallel. The threads share no sum, so a row's bits do not depend on their number.

// 1 / sqrt(mean(x^2) + eps) of a row x (n).
template <class T> acc<T> rms_factor(const T* x, int n, float eps) {
    acc<T> sum = 0;
    for (int i = 0; i < n; i++) sum += to_acc(x[i]) * to_acc(x[i]);
    return 1 / std::sqrt(sum / n + (acc<T>)eps);
}

// ---- rmsnorm: out[n] = x[n] / rms(x[n]) * w       (Zhang & Sennrich, "Root mean square layer normalization", 2019)
//      out (N,C) <- x (N,C), w (C)
template <class T> void rmsnorm(T* out, const acc<T>* x, const T* w, int N, int C, float eps) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const acc<T>* row = x + (size_t)n * C;
        const acc<T> r = rms_factor(row, C, eps);
        for (int i = 0; i < C; i++) out[(size_t)n * C + i] = to_stored<T>(row[i] * r * to_acc(w[i]));
    }
}

// ---- swiglu: out = silu(gate) * up, silu(g) = g / (1 + e^-g)     (Shazeer, "GLU variants improve transformer", 2020)
//      out (N,F) <- gate_up (N,2F): a row is its gates, then its ups
template <class T> void swiglu(T* out, const T* gate_up, int N, int F) {
    for (int n = 0; n < N; n++)
        for (int f = 0; f < F; f++) {
            const T* row = gate_up + (size_t)n * 2 * F;
            const acc<T> gate = to_acc(row[f]), up = to_acc(row[F + f]);
            out[(size_t)n * F + f] = to_stored<T>(gate / (1 + std::exp(-gate)) * up);
        }
}

// ========================================================================================================== 2 Products

// The matrix W of a product y = W x is a Linear. Its rows are up to three blocks, separate tensors in the file: q, k, v
// of one layer, or gate and up. An Adapter adds LoRA to the product (Hu et al., "LoRA: low-rank adaptation of large
// language models", 2021): y += s B_j A_j drop_j(x) in the block of module j. A block has at most one module. The
// modules lie side by side, width = modules * rank: the rows of A are those of all A_j; the columns of B are those of
// all s B_j, with zeros in the rows of other blocks. So y += B h with h = A drop(x).
//
// DoRA (Liu et al., "DoRA: weight-decomposed low-rank adaptation", 2024): each row of W + s B A has a trained length m.
// y = c u + W (x - drop(x)), u = W drop(x) + B h, c = m / |W + s B A|. So without dropout y = c (W x + s B A x).
template <class T> struct Dora {
    bool on = false;
    const acc<T>* m = nullptr;                     // (out); of a row without a module 0
    acc<T> *norm = nullptr, *c = nullptr;          // (out) |W + s B A| and c, of a row without a module infinite and 1
    T* u = nullptr;                                // (N, out) written by the product, read by the backward pass
    T *off = nullptr, *x = nullptr, *dx = nullptr; // scratch with dropout, (N, out); on a GPU also (N, in) twice
};
template <class T> struct Adapter {
    int rank = 0;                     // of a module; 0: no adapter
    int true_rank = 0;                // rank in the file; A_j has zero rows, B_j zero columns from there on
    int modules = 0;
    int block[3] = {};                // (modules) the block of module j: 0, 1 or 2
    int module[3] = {};               // (modules) layer * 7 + (q, k, v, o, gate, up, down = 0..6): its dropout mask
    float s = 1;                      // alpha / rank; rslora: alpha / sqrt(rank)
    T* A = nullptr;                   // (width, in)
    T* B = nullptr;                   // (out, width) s B; AdamW trains B and stores s B here
    T* h = nullptr;                   // (N, width) written by the product, read by the backward pass
    uint32_t* kept = nullptr;         // on a GPU: the masks of forward, for the backward pass; see DropoutMasks
    const Dropout* dropout = nullptr; // training only
    Dora<T> dora;
    size_t width() const { return (size_t)modules * rank; }
};
template <class T> struct Linear : StoredRows { // model/formats.h: `in`, and numbers that are not stored as T
    const T* w[3] = {};               // PLAIN: (rows, in) of each block
    int rows[3] = {};
    Adapter<T> adapter;
    int out() const { return rows[0] + rows[1] + rows[2]; }
    int first_row(int b) const { return b == 0 ? 0 : b == 1 ? rows[0] : rows[0] + rows[1]; } // first row of block b
    int module_of(int r) const { // the adapter's module of row r, or -1
        for (int j = 0; j < adapter.modules; j++)
            if (const int b = adapter.block[j]; r >= first_row(b) && r < first_row(b) + rows[b]) return j;
        return -1;
    }
    Linear block(int b) const { // its rows alone, without the adapter
        Linear one = *this;
        one.w[0] = w[b], one.q[0] = q[b], one.scale[0] = scale[b], one.zero[0] = zero[b], one.type[0] = type[b];
        one.rows[0] = rows[b], one.rows[1] = one.rows[2] = 0, one.adapter = {};
        return one;
    }
    acc<T> at(int r, int i) const { // W[r][i] in any format
        int b = 0;
        while (r >= rows[b]) r -= rows[b++];
        if (format != Format::PLAIN) return packed_number<acc<T>>(*this, b, r, i);
        return to_acc(w[b][(size_t)r * in + i]);
    }
};

// ---- product: store(n, r, y[n][r]) is called for each n and r, y[n][r] = sum_i W[r][i] x[n][i]
//      <- x (N, W.in)
template <class T, class Store> void product(const Linear<T>& W, const T* x, int N, Store store) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < W.out(); r++)
        for (int n = 0; n < N; n++) {
            acc<T> y = 0;
            for (int i = 0; i < W.in; i++) y += W.at(r, i) * to_acc(x[(size_t)n * W.in + i]);
            store(n, r, y);
        }
}

// drop_j of a number of token n and column i: in training 0 or value / (1 - p), else the value. It is not rounded to T,
// so a faster version may multiply the finished sum by 1 / (1 - p).
template <class T> acc<T> drop(const Adapter<T>& a, int j, int n, int i, acc<T> value) {
    if (!a.dropout) return value;
    return dropout_keeps(*a.dropout, n, a.module[j], i) ? value * (1 / (1 - (acc<T>)a.dropout->p)) : 0;
}
template <class T> acc<T> dropped(const T* x, const Linear<T>& W, int j, int n, int i) { // drop_j(x)[n][i]
    return drop(W.adapter, j, n, i, to_acc(x[(size_t)n * W.in + i]));
}

// ---- lora_down: h[n][r] = sum_i A[r][i] drop_j(x[n])[i], j = r / rank
//      h (N, width) <- x (N, W.in)
template <class T> void lora_down(T* h, const T* x, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int r = 0; r < (int)a.width(); r++) {
            acc<T> sum = 0;
            for (int i = 0; i < W.in; i++) sum += to_acc(a.A[(size_t)r * W.in + i]) * dropped(x, W, r / a.rank, n, i);
            h[n * a.width() + r] = to_stored<T>(sum);
        }
}

// ---- dora_norm: norm[r] = |W[r] + s (B A)[r]|, c[r] = m[r] / norm[r]
//      norm, c (W.out) of the adapter <- W, its A, B and m; after each change of these
template <class T> void dora_norm(const Linear<T>& W) {
    const Adapter<T>& a = W.adapter;
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < W.out(); r++) {
        const int j = W.module_of(r);
        a.dora.norm[r] = std::numeric_limits<acc<T>>::infinity(), a.dora.c[r] = 1;
        if (j < 0) continue;
        std::vector<acc<T>> row(W.in);
        for (int k = j * a.rank; k < (j + 1) * a.rank; k++) {
            const acc<T> b = to_acc(a.B[r * a.width() + k]);
            for (int i = 0; i < W.in; i++) row[i] += b * to_acc(a.A[(size_t)k * W.in + i]);
        }
        acc<T> sum = 0;
        for (int i = 0; i < W.in; i++) row[i] += W.at(r, i), sum += row[i] * row[i];
        a.dora.norm[r] = std::sqrt(sum), a.dora.c[r] = a.dora.m[r] / a.dora.norm[r];
    }
}

// DoRA's y of a row and token, from y = W x + B h. off = W (drop(x) - x).
template <class T> acc<T> dora_row(const Linear<T>& W, int n, int r, acc<T> y, acc<T> off) {
    const Dora<T>& d = W.adapter.dora;
    d.u[(size_t)n * W.out() + r] = to_stored<T>(y + off);
    return d.c[r] * (y + off) - off;
}

// x W^T, plus h B^T if W has an adapter. h is rounded to T; the sum of both is rounded once.
template <class T, class Store> void adapted_product(const Linear<T>& W, const T* x, int N, Store store) {
    const Adapter<T>& a = W.adapter;
    if (a.rank) lora_down(a.h, x, W, N);
    product(W, x, N, [&](int n, int r, acc<T> y) {
        for (size_t i = 0; i < a.width(); i++) y += to_acc(a.B[r * a.width() + i]) * to_acc(a.h[n * a.width() + i]);
        if (a.dora.on) {
            const int j = W.module_of(r);
            acc<T> off = 0;
            for (int i = 0; i < W.in && a.dropout && j >= 0; i++)
                off += W.at(r, i) * (dropped(x, W, j, n, i) - to_acc(x[(size_t)n * W.in + i]));
            y = dora_row(W, n, r, y, off);
        }
        store(n, r, y);
    });
}

// ---- linear: out = x W^T
//      out (N, W.out) <- x (N, W.in)
template <class T> void linear(T* out, const T* x, const Linear<T>& W, int N) {
    const size_t ld = W.out(); // numbers from one row of out to the next
    adapted_product(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}

// ---- linear_add: out = residual + x W^T; out may be residual
//      out (N, W.out) <- residual (N, W.out), x (N, W.in)
template <class T> void linear_add(acc<T>* out, const acc<T>* residual, const T* x, const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

// ---- norm_linear: out = rmsnorm(x) W^T. `normed` is scratch, which a fused kernel leaves as it was.
//      out (N, W.out), normed (N,C) <- x (N,C), w (C)
template <class T>
void norm_linear(T* out, T* normed, const acc<T>* x, const T* w, const Linear<T>& W, int N, float eps) {
    rmsnorm(normed, x, w, N, W.in, eps);
    linear(out, normed, W, N);
}

// ---- norm_linear_swiglu: out = swiglu(rmsnorm(x) W^T). On a GPU gate_up may be null.
//      out (N,F), gate_up (N,2F), normed (N,C) <- x (N,C), w (C)
template <class T>
void norm_linear_swiglu(T* out, T* gate_up, T* normed, const acc<T>* x, const T* w, const Linear<T>& W, int N,
                        float eps) {
    norm_linear(gate_up, normed, x, w, W, N, eps);
    swiglu(out, gate_up, N, W.rows[0]);
}

// ---- mlp: out = x + hidden down^T, hidden = swiglu(rmsnorm(x) up^T); the rows of `up` are gate and up
//      out (N,C), hidden (N,F), gate_up (N,2F), normed (N,C) <- x (N,C), w (C)
template <class T>
void mlp(acc<T>* out, T* hidden, T* gate_up, T* normed, const acc<T>* x, const T* w, const Linear<T>& up,
         const Linear<T>& down, int N, float eps) {
    norm_linear_swiglu(hidden, gate_up, normed, x, w, up, N, eps);
    linear_add(out, x, hidden, down, N);
}

// ---- head: the logits of R chosen tokens, not rounded to T
//      logits (R,V), picked (R,C) scratch <- x (N,C) after the final norm, rows (R)
template <class T> void head(acc<T>* logits, T* picked, const T* x, const int* rows, const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++) std::copy_n(x + (size_t)rows[r] * W.in, W.in, picked + (size_t)r * W.in);
    const size_t V = W.out();
    product(W, picked, R, [=](int r, int v, acc<T> y) { logits[r * V + v] = y; });
}

// ======================================================================================= 3 Tokens, cache and attention

// N packed tokens of B sequences. The rows of a sequence are adjacent and in order of position. Each of the first
// `singles` rows is the only row of its sequence (decoding); sequences with more rows (prompts, training) follow. A
// spare row has seq = -1. Ops that use token, pos or slot skip it; other ops compute a result that is not read. On a
// GPU the arrays are in its memory. Keys and values are in pages of 16 tokens (model/kv_cache.h). Row seq[n] of the
// block table lists the pages of token n's sequence.
struct Batch {
    int N, B;
    const int* token; // (N)
    const int* pos;   // (N) position in its sequence, from 0
    const int* seq;   // (N) row of the block table
    const int* slot;  // (N) where its key and value go: page * 16 + offset
    const int* pages; // (B, max_pages) block table
    int max_pages;    // pages a sequence can have
    int singles = 0;  // leading rows that are the only row of their sequence
    int splits = 1;   // Book II: parts of SPLIT keys in the longest of the singles' sequences
    int longest = 0;  // Book II: keys of the longest of the other sequences; 0: not known
    bool fp8 = false; // the cache is FP8: see KVRow
};

// ---- embed: x[n] = table[token[n]]
//      x (N,C) <- table (V,C)
template <class T> void embed(acc<T>* x, const Linear<T>& table, const Batch& b, int C) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        for (int i = 0; i < C; i++) x[(size_t)n * C + i] = table.at(b.token[n], i);
    }
}

// Arguments of attention's ops.
constexpr int MAX_HEAD = 512;                           // the largest D; model/model_file.cpp refuses more
struct HeadShape { int H, K, D; float eps = 0; };       // eps: of the heads' norms
template <class T> struct LayerCache { T *keys, *values; }; // a layer of the cache, (pages, K, 16, D) each
template <class T> struct HeadNorms {
    const T *q, *k;     // (D) weights of the heads' norms
    const acc<T>* rope; // (positions, D/2, 2) cosine and sine of each plane's angle
};

// ---- qknorm_rope_kv: each q and k head of a token is RMS-normalised. Then RoPE (Su et al., "RoFormer", 2021) rotates
// its planes: numbers i and i + D/2 form plane i, whose angle at position p is p theta^(-2i/D). The cosines and sines
// are fill_rope's (model/rope.h). The rotated k, and v as it is, go to the cache by store_kv.
//      q (N,HD), cache <- qkv (N,(H+2K)D)
template <class T>
void qknorm_rope_kv(T* q, const LayerCache<T>& cache, const T* qkv, const HeadNorms<T>& norms, const Batch& b,
                    const HeadShape& shape) {
    const int H = shape.H, K = shape.K, D = shape.D;
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const T* row = qkv + (size_t)n * (H + 2 * K) * D;
        const acc<T>* angle = norms.rope + (size_t)b.pos[n] * D;
        auto norm_rope = [&](T* out, const T* head, const T* w) {
            const acc<T> r = rms_factor(head, D, shape.eps);
            for (int i = 0; i < D / 2; i++) {
                const acc<T> u = to_acc(head[i]) * r * to_acc(w[i]);
                const acc<T> v = to_acc(head[i + D / 2]) * r * to_acc(w[i + D / 2]);
                const acc<T> cosine = angle[2 * i], sine = angle[2 * i + 1];
                out[i] = to_stored<T>(u * cosine - v * sine);
                out[i + D / 2] = to_stored<T>(v * cosine + u * sine);
            }
        };
        for (int h = 0; h < H; h++) norm_rope(q + ((size_t)n * H + h) * D, row + h * D, norms.q);
        for (int h = 0; h < K; h++) {
            T key[MAX_HEAD];
            norm_rope(key, row + (H + h) * D, norms.k);
            store_kv(cache.keys, b.fp8, b.slot[n], h, key, K, D);
            store_kv(cache.values, b.fp8, b.slot[n], h, row + (H + K + h) * D, K, D);
        }
    }
}

// ---- attention: out[n][h] = sum_m p_m v_m, p = softmax(q[n][h] . k_m / sqrt(D)) over the positions m = 0..pos[n] of
// n's sequence; query head h reads key/value head h / G.      (Vaswani et al., "Attention is all you need", 2017)
// lse[n][h] = log sum_m e^(q . k_m / sqrt(D)), which the backward pass needs. It may be null.
//      out (N,HD), lse (N,H) <- q (N,HD), cache
template <class T>
void attention(T* out, acc<T>* lse, const T* q, const LayerCache<T>& cache, const Batch& b, const HeadShape& shape) {
    const int H = shape.H, K = shape.K, D = shape.D;
    #pragma omp parallel for schedule(dynamic)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const int length = b.pos[n] + 1, *pages = b.pages + (size_t)b.seq[n] * b.max_pages;
        std::vector<acc<T>> p(length), mix(D); // p[m]: the score of key m, then e^(score - top); mix: sum_m p[m] v_m
        for (int h = 0; h < H; h++) {
            const T* query = q + ((size_t)n * H + h) * D;
            auto row_of = [&](const T* rows, int m) { // the key or value (D) of position m; row[i] reads a number
                return KVRow<T>(rows, b.fp8, pages[m / PAGE], h / (H / K), m % PAGE, K, D);
            };
            acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
            for (int m = 0; m < length; m++) { // first pass: scores and the largest of them
                const KVRow<T> key = row_of(cache.keys, m);
                p[m] = 0;
                for (int i = 0; i < D; i++) p[m] += to_acc(query[i]) * key[i];
                p[m] /= std::sqrt((acc<T>)D);
                top = std::max(top, p[m]);
            }
            std::fill(mix.begin(), mix.end(), 0);
            for (int m = 0; m < length; m++) { // second pass: exponentials, their sum, the weighted sum of values
                const KVRow<T> value = row_of(cache.values, m);
                p[m] = std::exp(p[m] - top);
                sum += p[m];
                for (int i = 0; i < D; i++) mix[i] += p[m] * value[i];
            }
            for (int i = 0; i < D; i++) out[((size_t)n * H + h) * D + i] = to_stored<T>(mix[i] / sum);
            if (lse) lse[(size_t)n * H + h] = top + std::log(sum);
        }
    }
}

// ---- attend: qknorm_rope_kv, then attention; `out` is the input of o
//      out (N,HD), lse (N,H) or null, q (N,HD), cache <- qkv (N,(H+2K)D)
template <class T>
void attend(T* out, acc<T>* lse, T* q, const LayerCache<T>& cache, const T* qkv, const HeadNorms<T>& norms,
            const Batch& b, const HeadShape& shape) {
    qknorm_rope_kv(q, cache, qkv, norms, b, shape);
    attention(out, lse, q, cache, b, shape);
}

// ---- Experts: an MLP of which each token uses k of E.     (Fedus et al., "Switch transformers", 2021)
template <class T> struct Expert { Linear<T> gate_up, down; }; // (2M, C), (C, M)

// The experts of N tokens. Token n and its j-th expert are pair n k + j.
template <class T> struct Routed {
    acc<T>* p;     // (N,E) softmax of the router's scores
    int* expert;   // (N,k) of each pair, ascending for a token; -1: a spare row has none
    acc<T>* share; // (N,k) the expert's factor in the token's sum
    int* first;    // (E + 1) the pairs of expert e are pair[first[e]] .. pair[first[e + 1] - 1], in order of token
    int* pair;     // (N k)
};

// ---- route: p[n] = softmax(W x[n]); n's experts are the k of the largest p (of equal ones the first); share = p, or p
// divided by the sum of the k.
//      out <- x (N,C), W (E,C)
template <class T>
void route(const Routed<T>& out, const T* x, const Linear<T>& W, const Batch& b, int k, bool normed) {
    const int E = W.out();
    product(W, x, b.N, [&](int n, int e, acc<T> y) { out.p[(size_t)n * E + e] = y; });
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < b.N; n++) {
        acc<T> *p = out.p + (size_t)n * E, *share = out.share + (size_t)n * k, all = 0, sum = 0;
        int *expert = out.expert + (size_t)n * k, chosen = 0;
        const acc<T> top = *std::max_element(p, p + E);
        for (int e = 0; e < E; e++) p[e] = std::exp(p[e] - top), all += p[e];
        for (int e = 0; e < E; e++) p[e] /= all;
        for (int e = 0; e < E && chosen < k; e++) {
            int rank = 0; // experts that are chosen before e
            for (int f = 0; f < E; f++) rank += p[f] > p[e] || (p[f] == p[e] && f < e);
            if (rank >= k) continue;
            expert[chosen] = b.seq[n] < 0 ? -1 : e;
            share[chosen++] = p[e];
            sum += p[e];
        }
        for (int j = 0; j < k && normed; j++) share[j] /= sum;
    }
    int at = 0;
    for (int e = 0; e < E; e++) {
        out.first[e] = at;
        for (int i = 0; i < b.N * k; i++)
            if (out.expert[i] == e) out.pair[at++] = i;
    }
    out.first[E] = at;
}

// PairsProduct (model/dropout.h) is an expert's matrix with the dropout masks of its pairs' tokens.

// ---- expert_mlp: out[n] = residual[n] + sum_j share[n][j] down_e(swiglu(gate_up_e(x[n]))), e = expert[n][j]. Rows of
// gate_up and hidden are in the order of `pair`, so an expert's are adjacent. A token's sum has the order of its
// experts' numbers, whatever else is in the batch. `rows` is scratch, the x of one expert. out may be residual.
//      out (N,C), gate_up (N k, 2M), hidden (N k, M), rows (N,C) <- residual (N,C), x (N,C), to
template <class T>
void expert_mlp(acc<T>* out, T* gate_up, T* hidden, T* rows, const acc<T>* residual, const T* x,
                const std::vector<Expert<T>>& experts, const Routed<T>& to, int N, int k) {
    const size_t C = experts[0].gate_up.in, M = experts[0].down.in;
    if (out != residual) std::copy_n(residual, N * C, out);
    for (size_t e = 0; e < experts.size(); e++) {
        const int first = to.first[e], n = to.first[e + 1] - first, *pair = to.pair + first;
        const PairsProduct<T> up(experts[e].gate_up, pair, n, k), down(experts[e].down, pair, n, k);
        for (int i = 0; i < n; i++) std::copy_n(x + pair[i] / k * C, C, rows + i * C);
        linear(gate_up + first * 2 * M, rows, up.W, n);
        swiglu(hidden + first * M, gate_up + first * 2 * M, n, (int)M);
        adapted_product(down.W, hidden + first * M, n,
                        [=](int i, int r, acc<T> y) { out[pair[i] / k * C + r] += to.share[pair[i]] * y; });
    }
}

// =========================================================================================================== 4 forward

// Shapes and weights. model/model_file.h and model/weights.h read them from files.
struct Config {
    int C, L, H, K, D, F, V, max_positions;
    float eps;
    double rope_theta;
    bool tied;                   // the head's matrix is the embedding's
    std::vector<int> end_tokens; // any of them ends an answer
    RopeScaling rope_scaling = {};
    int E = 0, k = 0, M = 0;     // mixture of experts: how many, how many a token, their feed-forward size; E = 0: none
    bool normed_shares = false;  // the shares of a token's experts add up to 1
    float balance = 0;           // factor of the load-balancing loss in training
    int sparse_step = 1;         // the last of so many layers has experts, the others one MLP of F
    std::vector<int> dense_layers = {}; // these have one MLP, too
    HeadShape heads() const { return {H, K, D, eps}; }
    bool sparse(int l) const { // layer l has experts
        return E > 0 && (l + 1) % sparse_step == 0 && !std::count(dense_layers.begin(), dense_layers.end(), l);
    }
    int width() const { // numbers of a token in the MLPs, at most
        int most = 0;
        for (int l = 0; l < L; l++) most = std::max(most, sparse(l) ? k * M : F);
        return most;
    }
};

template <class T> struct Layer {
    const T *norm1, *norm2;      // (C)
    const T *q_norm, *k_norm;    // (D)
    Linear<T> qkv, o;            // (HD + 2KD, C), (C, HD)
    Linear<T> gate_up, down;     // (2F, C), (C, F)
    Linear<T> router;            // (E, C), in place of gate_up and down
    std::vector<Expert<T>> experts;
    HeadNorms<T> norms(const acc<T>* rope) const { return {q_norm, k_norm, rope}; }
};

struct ModelFile; // model/model_file.h
template <class T> struct Weights {
    Linear<T> embed;             // (V,C)
    std::vector<Layer<T>> layers;
    const T* norm = nullptr;     // (C)
    Linear<T> head;              // (V,C), the embedding when tied
    std::vector<std::shared_ptr<void>> converted; // memory of the tensors that are not used in the mapped file
    Arena gpu;                   // after `upload`: all weights, in the GPU's memory

    Weights() = default;
    explicit Weights(const ModelFile& file, Format made = Format::PLAIN, bool packed = false); // model/weights.cpp
    void upload(Context& ctx, const ModelFile& file); // to the GPU (model/upload.cu): every pointer changes
};
template <> void Weights<bf16>::upload(Context& ctx, const ModelFile& file);

// The arrays between forward ops, for up to N tokens. In inference all layers share one set. In training a layer has
// its own copy of the arrays that the backward pass reads and does not compute again: see model/plans.cpp.
template <class T> struct Activations {
    struct PerLayer {
        acc<T> *in, *mid, *out; // (N,C) residual stream: at the entry, between attention and MLP, at the exit
        T *norm1, *norm2;       // (N,C)
        T *qkv, *q, *attention; // (N,(H+2K)D), (N,HD), (N,HD)
        acc<T>* lse = nullptr;  // (N,H) of attention, for training
        T *gate_up, *hidden;    // (N,2F), (N,F); of experts (N k, 2M), (N k, M)
        Routed<T> routed = {};
        T* rows = nullptr;      // (N,C) scratch of experts; on a GPU see expert_scratch
    };
    std::vector<PerLayer> layer;
    T* normed; // (N,C) after the final norm

    bool recompute = false; // training keeps only `in` of each layer; the backward pass runs layer_forward again
    bool ample = false;     // training also keeps q, hidden, keys and values of each layer
    const Noise* noise = nullptr; // training only: added to the embeddings
    void plan(Arena& arena, const Config& c, int N, bool gate_up = true); // gate_up: false for the GPU's fused op
    void plan_training(Arena& arena, const Config& c, int N, bool whole_layers, bool ample_memory = false,
                       bool gpu = false);
};
// Keys and values of all layers, (L, pages, K, 16, D) each. In training all layers may share the memory of one.
template <class T> struct KVCache {
    T *keys, *values;
    size_t layer_size; // numbers from one layer to the next; 0 if the layers share one
    bool fp8 = false;  // the arrays hold bytes, not T: see KVRow

    void plan(Arena& arena, const Config& c, size_t pages, bool one_layer = false, bool fp8 = false);
    static size_t block_bytes(const Config& c, bool fp8); // of a page and head
    static size_t bytes(const Config& c, size_t pages, bool fp8 = false);
    Batch of(Batch b) const { return b.fp8 = fp8, b; } // b, with the format of this cache
    LayerCache<T> layer(int l) const { return {keys + l * layer_size, values + l * layer_size}; }
};

// RUN(op, ...) calls the fastest version of an op that the context allows: op_gpu, op_cpu or op. The function around it
// is a template on T and has a variable `ctx`. cpu/ops.h and model/gpu_ops.h declare op_cpu and op_gpu; the compiler
// finds them by the type of `ctx` (argument-dependent lookup). HAS_GPU and HAS_CPU are in model/instances.h.
#define RUN(op, ...) do { \
        if constexpr (HAS_GPU<T>) if (ctx.gpu) { op##_gpu(ctx, __VA_ARGS__); break; } \
        if constexpr (HAS_CPU<T>) if (!ctx.plain) { op##_cpu(ctx, __VA_ARGS__); break; } \
        op(__VA_ARGS__); \
    } while (0)

template <class T> void dora_norm(Context& ctx, const Linear<T>& W) { RUN(dora_norm, W); }
template <class T> void dora_backward(Context& ctx, T* du, acc<T>* dm, const T* dy, const Linear<T>& W, int N) {
    if constexpr (HAS_GPU<T>) if (ctx.gpu) return dora_backward_gpu(ctx, du, dm, dy, W, N);
    dora_backward(du, dm, dy, W, N);
}

// The layer's MLP, or its experts: s.mid to s.out.
template <class T>
void mlp_forward(Context& ctx, const Config& c, const Layer<T>& layer, const Batch& b,
                 typename Activations<T>::PerLayer& s) {
    const int N = b.N;
    if (layer.experts.empty()) {
        RUN(mlp, s.out, s.hidden, s.gate_up, s.norm2, s.mid, layer.norm2, layer.gate_up, layer.down, N, c.eps);
    } else {
        RUN(rmsnorm, s.norm2, s.mid, layer.norm2, N, c.C, c.eps);
        RUN(route, s.routed, s.norm2, layer.router, b, c.k, c.normed_shares);
        RUN(expert_mlp, s.out, s.gate_up, s.hidden, s.rows, s.mid, s.norm2, layer.experts, s.routed, N, c.k);
    }
}

// One layer: s.in to s.out.
template <class T>
void layer_forward(Context& ctx, const Config& c, const Layer<T>& layer, const Batch& b,
                   typename Activations<T>::PerLayer& s, const LayerCache<T>& cache, const acc<T>* rope) {
    const int N = b.N;
    RUN(norm_linear, s.qkv, s.norm1, s.in, layer.norm1, layer.qkv, N, c.eps);
    RUN(attend, s.attention, s.lse, s.q, cache, s.qkv, layer.norms(rope), b, c.heads());
    RUN(linear_add, s.mid, s.in, s.attention, layer.o, N);
    mlp_forward(ctx, c, layer, b, s);
}

// From tokens to vectors, the final norm included: a.normed (N,C). The keys and values of the batch go to the cache.
template <class T>
void forward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& batch, Activations<T>& a, KVCache<T>& kv,
             const acc<T>* rope) {
    const Batch b = kv.of(batch);
    const int N = b.N, C = c.C;
    RUN(embed, a.layer[0].in, w.embed, b, C);
    if (a.noise) RUN(add_noise, a.layer[0].in, *a.noise, N, C);
    for (int l = 0; l < c.L && !(ctx.stop && *ctx.stop); l++)
        layer_forward(ctx, c, w.layers[l], b, a.layer[l], kv.layer(l), rope);
    RUN(rmsnorm, a.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
}

// ========================================================================================================== 5 generate

// Continues a prompt on the CPU: up to `most` new ids, without the end token. Only ids below `exist` are sampled, by
// `sample` of model/sampling.h. (model/session.h has GPUs, a cache that stays, penalties and stop strings.)
template <class T>
std::vector<int> generate(Context& ctx, const Config& c, const Weights<T>& w, std::vector<int> ids, size_t most,
                          int exist, const Sampling& how) {
    const size_t prompt = ids.size(), context = prompt + most;
    std::vector<int> pos(context), seq(context), pages((context + PAGE - 1) / PAGE); // pages 0, 1, ...: slot = position
    std::iota(pos.begin(), pos.end(), 0), std::iota(pages.begin(), pages.end(), 0);
    std::vector<acc<T>> rope(context * c.D), logits(c.V);
    fill_rope(rope.data(), (int)context, c.D, c.rope_theta, c.rope_scaling);
    std::vector<T> picked(c.C);
    Arena arena;
    Activations<T> a;
    KVCache<T> kv;
    const auto plan = [&] { a.plan(arena, c, (int)prompt), kv.plan(arena, c, pages.size()); };
    plan(), arena.allocate("generate"), plan(); // the first time it counts bytes, the second it sets pointers
    for (size_t done = 0; ids.size() < context;) { // the prompt, then one id at a time
        const int N = (int)(ids.size() - done), last = N - 1;
        Batch b = {N, 1, &ids[done], &pos[done], &seq[done], &pos[done], pages.data(), (int)pages.size()};
        b.singles = N == 1;
        forward(ctx, c, w, b, a, kv, rope.data());
        RUN(head, logits.data(), picked.data(), a.normed, &last, w.head, 1);
        done = ids.size(); // the position of the next id
        const int id = sample(std::vector<float>(logits.begin(), logits.end()).data(), exist, how, done);
        if (std::count(c.end_tokens.begin(), c.end_tokens.end(), id)) break;
        ids.push_back(id);
    }
    return {ids.begin() + prompt, ids.end()};
}

// ============================================================================================ 6 Backward ops, AdamW
// A gradient is the derivative of the loss with respect to an array; the gradient of x is named dx. A backward op
// computes the gradients of its op's inputs from the gradient of its output. Its heading repeats the forward op; the
// lines below it are the gradients, then the shapes, where += marks an array to which the op adds. Gradients of
// activations are written, as T. The gradient of the residual stream is one array of acc<T>, to which each branch adds.
// Gradients of parameters are acc<T>, to which each op adds, token by token in order: on a CPU their bits do not depend
// on how a step is cut into batches (but for a tied embedding, to which the head and embed add in turn). Values that
// forward did not keep are computed again.

// ---- cross_entropy: loss[r] = log(sum_v e^logits[r][v]) - logits[r][target[r]]
// dlogits[r][v] = scale (softmax(logits[r])[v] - [v = target[r]]). The sum is over all V rows, as in Hugging Face's,
// those past the tokenizer's ids included. dlogits overwrites logits: row r of both begins at the same byte, so rows
// of dlogits are V * sizeof(acc<T>) bytes apart. dlogits null: no gradient.
//      loss (R), dlogits <- logits (R,V), target (R)
template <class T>
void cross_entropy(acc<T>* loss, T* dlogits, acc<T>* logits, const int* target, acc<T> scale, int R, int V) {
    for (int r = 0; r < R; r++) {
        const acc<T>* row = logits + (size_t)r * V;
        acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
        for (int v = 0; v < V; v++) top = std::max(top, row[v]);
        for (int v = 0; v < V; v++) sum += std::exp(row[v] - top);
        loss[r] = std::log(sum) + top - row[target[r]];
        for (int v = 0; v < V && dlogits; v++) { // T is no longer than acc<T>: this overwrites logits already read
            const T d = to_stored<T>((std::exp(row[v] - top) / sum - (v == target[r])) * scale);
            memcpy((uint8_t*)(logits + (size_t)r * V) + v * sizeof(T), &d, sizeof(T));
        }
    }
}

// R rows of a batch and their targets, the ids that follow them. The trained loss is sum_r by[r] scale loss[r].
template <class A> struct LossRows {
    const int *rows, *target; // (R), rows: distinct
    A scale;
    const A* by;              // (R), or null: 1
    int R;
};
// ---- head_loss: head, then cross_entropy. factor[r] dlogits[r] is the gradient of by[r] scale loss[r] with respect to
// logits[r]. (A GPU writes a row before it knows the sum of its exponentials: its factor has 1 / sum. Here it is by.)
//      loss (R), dlogits, factor (R), logits (R,V), picked (R,C), scratch of head_loss_gpu <- x (N,C)
template <class T>
void head_loss(acc<T>* loss, T* dlogits, acc<T>* factor, acc<T>* logits, T* picked, acc<T>*, const T* x,
               const LossRows<acc<T>>& of, const Linear<T>& W) {
    head(logits, picked, x, of.rows, W, of.R);
    cross_entropy(loss, dlogits, logits, of.target, of.scale, of.R, W.out());
    for (int r = 0; r < of.R; r++) factor[r] = of.by ? of.by[r] : 1;
}

// ---- add_losses: total += loss[0] + loss[1] + ..., in double and in order
template <class A> void add_losses(double* total, const A* loss, int R) {
    for (int r = 0; r < R; r++) *total += (double)loss[r];
}

// ---- scale_rows: x[r][i] *= by[r], i < n. (ld, here and below: numbers from one row to the next.)
//      x (R, ld) <- by (R)
template <class T> void scale_rows(T* x, size_t ld, const acc<T>* by, int R, int n) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < R; r++)
        for (int i = 0; i < n; i++) x[r * ld + i] = to_stored<T>(to_acc(x[r * ld + i]) * by[r]);
}

// ---- head: logits[r] = W x[rows[r]]
// dx[rows[r]] = factor[r] W^T dlogits[r]. Other rows of dx are not touched.
//      dx (N,C) <- dlogits (R, ld), factor (R), rows (R) distinct
template <class T>
void head_backward(T* dx, const T* dlogits, size_t ld, const acc<T>* factor, const int* rows, const Linear<T>& W,
                   int R) {
    for (int r = 0; r < R; r++)
        for (int i = 0; i < W.in; i++) {
            acc<T> sum = 0;
            for (int v = 0; v < W.out(); v++) sum += to_acc(dlogits[r * ld + v]) * W.at(v, i);
            dx[(size_t)rows[r] * W.in + i] = to_stored<T>(sum * factor[r]);
        }
}

// ---- rmsnorm: out = x r w with r = 1 / sqrt(mean(x^2) + eps)
// dx += r w dout - x r^3 / C sum_j x_j w_j dout_j,  dw += x r dout
// Also rounded = dx after the addition, as T, for the products before this norm; out = forward's, computed again.
//      dx (N,C) +=, rounded (N,C), out (N,C) or null, dw (C) += or null <- dout (N,C), x (N,C), w (C)
template <class T>
void rmsnorm_backward(acc<T>* dx, T* rounded, T* out, acc<T>* dw, const T* dout, const acc<T>* x, const T* w, int N,
                      int C, float eps) {
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        const acc<T> r = rms_factor(x + at, C, eps);
        acc<T> sum = 0;
        for (int i = 0; i < C; i++) sum += x[at + i] * to_acc(w[i]) * to_acc(dout[at + i]);
        for (int i = 0; i < C; i++) {
            const acc<T> weight = to_acc(w[i]), d = to_acc(dout[at + i]);
            if (out) out[at + i] = to_stored<T>(x[at + i] * r * weight);
            if (dw) dw[i] += d * x[at + i] * r;
            dx[at + i] += r * weight * d - x[at + i] * (sum * r * r * r / C);
            if (rounded) rounded[at + i] = to_stored<T>(dx[at + i]);
        }
    }
}

// ---- linear: y = x W^T + sum_j s h_j B_j^T,  h_j = drop_j(x) A_j^T (the sum is the adapter's)
// dx = dy W + sum_j drop_j(dh_j A_j),  dh_j = dy (s B_j),  dB_j += s dy^T h_j, in the rows of module j's block only.
// dW and dA have ops of their own, below. Adapter::B holds s B_j, but dB is the gradient of B_j itself.
// DoRA: dy is dora_backward's du; with dropout dx += sum_j (drop_j(t) - t), t = off W of module j's rows.
//      dx (N, W.in), dh (N, width), dB (W.out, width) += <- dy (N, W.out)
template <class T> void linear_backward_input(T* dx, T* dh, acc<T>* dB, const T* dy, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, out = W.out(), width = a.width();
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        for (size_t i = 0; i < width; i++) {
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
                sum += drop(a, j, n, (int)i, part);
            }
            for (size_t r = 0; r < out; r++) sum += to_acc(dy[n * out + r]) * W.at((int)r, (int)i);
            for (size_t r = 0; r < out && a.dora.on && a.dropout; r++)
                if (const int j = W.module_of((int)r); j >= 0) {
                    const acc<T> t = to_acc(a.dora.off[n * out + r]) * W.at((int)r, (int)i);
                    sum += drop(a, j, n, (int)i, t) - t;
                }
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

// ---- DoRA: y = c u + W (x - drop(x)), c = m / norm; norm counts as a constant (the paper's section 4.3, and PEFT)
// du = c dy,  dm += sum_n dy u / norm. For linear_backward_input with dropout: the adapter's off = (c - 1) dy.
//      du (N, W.out), dm (W.out) += <- dy (N, W.out)
template <class T> void dora_backward(T* du, acc<T>* dm, const T* dy, const Linear<T>& W, int N) {
    constexpr int COLUMNS = 64;
    const Adapter<T>& a = W.adapter;
    const Dora<T>& d = a.dora;
    const int out = W.out();
    #pragma omp parallel for schedule(static)
    for (int first = 0; first < out; first += COLUMNS)
        for (int n = 0; n < N; n++)
            for (int r = first; r < std::min(first + COLUMNS, out); r++) {
                const size_t at = (size_t)n * out + r;
                const acc<T> y = to_acc(dy[at]);
                dm[r] += y * to_acc(d.u[at]) / d.norm[r];
                du[at] = to_stored<T>(d.c[r] * y);
                if (a.dropout) d.off[at] = to_stored<T>((d.c[r] - 1) * y);
            }
}

// ---- linear_backward_weight: dW += dy^T x
//      dW (out,in) += <- dy (N, ld), x (N,in)
template <class T> void linear_backward_weight(acc<T>* dW, const T* dy, size_t ld, const T* x, int N, int out, int in) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < out; r++)
        for (int i = 0; i < in; i++)
            for (int n = 0; n < N; n++)
                dW[(size_t)r * in + i] += to_acc(dy[n * ld + r]) * to_acc(x[(size_t)n * in + i]);
}

// ---- lora_backward_weight: dA_j += dh_j^T drop_j(x), after linear_backward_input has computed dh
//      dA (width, W.in) += <- dh (N, width), x (N, W.in)
template <class T> void lora_backward_weight(acc<T>* dA, const T* dh, const T* x, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, width = a.width();
    for (int j = 0; j < a.modules; j++)
        #pragma omp parallel for schedule(static)
        for (int i = j * a.rank; i < (j + 1) * a.rank; i++)
            for (int k = 0; k < W.in; k++)
                for (int n = 0; n < N; n++) dA[i * in + k] += to_acc(dh[n * width + i]) * dropped(x, W, j, n, k);
}

// ---- swiglu: out = silu(gate) * up, silu(g) = g sigma(g), sigma(g) = 1 / (1 + e^-g)
// dgate = dout up sigma (1 + g (1 - sigma)),  dup = dout silu(gate). Also out = forward's, computed again.
//      dgate_up (N,2F), out (N,F) or null <- dout (N,F), gate_up (N,2F)
template <class T> void swiglu_backward(T* dgate_up, T* out, const T* dout, const T* gate_up, int N, int F) {
    for (int n = 0; n < N; n++)
        for (int f = 0; f < F; f++) {
            const size_t at = (size_t)n * F + f, gate = (size_t)n * 2 * F + f, up = gate + F;
            const acc<T> g = to_acc(gate_up[gate]), u = to_acc(gate_up[up]), d = to_acc(dout[at]);
            const acc<T> sigma = 1 / (1 + std::exp(-g));
            if (out) out[at] = to_stored<T>(g / (1 + std::exp(-g)) * u);
            dgate_up[gate] = to_stored<T>(d * u * sigma * (1 + g * (1 - sigma)));
            dgate_up[up] = to_stored<T>(d * g * sigma);
        }
}

// ---- linear_backward_swiglu, of y = hidden W^T, hidden = swiglu(gate_up): linear_backward_input, then
// swiglu_backward. On a GPU dhidden may be null.
//      dgate_up (N,2F), hidden (N,F) or null, dhidden (N,F), dh (N, width), dB += <- dy (N, W.out), gate_up (N,2F)
template <class T>
void linear_backward_swiglu(T* dgate_up, T* hidden, T* dhidden, T* dh, acc<T>* dB, const T* dy, const T* gate_up,
                            const Linear<T>& W, int N) {
    linear_backward_input(dhidden, dh, dB, dy, W, N);
    swiglu_backward(dgate_up, hidden, dhidden, gate_up, N, W.in);
}

template <class T> struct HeadNormGradients { acc<T> *q, *k; }; // (D) += of the norms' weights, or both null
template <class T> struct Attended { const T *q, *out; const acc<T>* lse; }; // attention's: (N,HD), (N,HD), (N,H)

// ---- attention: s[n][m] = q_n . k_m / sqrt(D), p = e^(s - lse), o_n = sum_m p[n][m] v_m over m <= n of n's sequence
//     dv_m = sum_n p[n][m] do_n                              dp[n][m] = do_n . v_m
//     ds[n][m] = p[n][m] (dp[n][m] - delta_n)                delta_n = sum_m p[n][m] dp[n][m] = do_n . o_n
//     dq_n = sum_m ds[n][m] k_m / sqrt(D)                    dk_m = sum_n ds[n][m] q_n / sqrt(D)
// dv and dk also sum over the G query heads that read the KV head. p is computed again from lse. The batch holds whole
// sequences, from position 0 on: m is a row of the batch here, and the first row of n's sequence is n - pos[n]. The
// cache holds T, not FP8. Spare rows come last; their gradients are zero, because weight gradients sum over all rows.
//      dqkv (N,(H+2K)D): of q and k after RoPE, and of v; delta (N,H) <- dout (N,HD), of, cache
template <class T>
void attention_backward(T* dqkv, const T* dout, const Attended<T>& of, const LayerCache<T>& cache, const Batch& b,
                        const HeadShape& shape, acc<T>* delta) {
    const int H = shape.H, K = shape.K, D = shape.D, G = H / K, width = (H + 2 * K) * D;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    auto dot = [&](const T* u, const T* v) {
        acc<T> sum = 0;
        for (int i = 0; i < D; i++) sum += to_acc(u[i]) * to_acc(v[i]);
        return sum;
    };
    std::vector<acc<T>> sums((size_t)b.N * width); // dqkv before it is rounded
    #pragma omp parallel for schedule(static)
    for (int kv = 0; kv < K; kv++)
        for (int n = 0; n < b.N; n++)
            for (int h = kv * G; h < (kv + 1) * G && b.seq[n] >= 0; h++) {
                const size_t row = (size_t)n * H + h;
                const T *query = of.q + row * D, *d = dout + row * D;
                delta[row] = dot(d, of.out + row * D);
                for (int m = n - b.pos[n]; m <= n; m++) { // the rows of n's sequence up to n
                    const size_t at = kv_offset(b.slot[m] / PAGE, kv, b.slot[m] % PAGE, K, D);
                    const acc<T> p = std::exp(dot(query, cache.keys + at) * scale - of.lse[row]);
                    const acc<T> ds = p * (dot(d, cache.values + at) - delta[row]);
                    acc<T> *dq = &sums[(size_t)n * width + h * D], *dk = &sums[(size_t)m * width + (H + kv) * D];
                    acc<T>* dv = dk + K * D;
                    for (int i = 0; i < D; i++) {
                        dv[i] += p * to_acc(d[i]);
                        dk[i] += ds * to_acc(query[i]) * scale;
                        dq[i] += ds * to_acc(cache.keys[at + i]) * scale;
                    }
                }
            }
    for (size_t i = 0; i < sums.size(); i++) dqkv[i] = to_stored<T>(sums[i]);
}

// ---- qknorm_rope: (u, v) = x r w in the plane (i, i + D/2) of a head, r = 1 / rms(x);
// out = (u cos - v sin, v cos + u sin)
// The gradient is rotated by the opposite angle. Then it goes through the norm, as in rmsnorm_backward.
//      dqkv (N,(H+2K)D) in place: dq and dk become those before norm and RoPE; dnorms += <- qkv (N,(H+2K)D)
template <class T>
void qknorm_rope_backward(T* dqkv, const HeadNormGradients<T>& dnorms, const T* qkv, const HeadNorms<T>& norms,
                          const Batch& b, const HeadShape& shape) {
    const int H = shape.H, K = shape.K, D = shape.D;
    for (int n = 0; n < b.N; n++)
        for (int h = 0; h < H + K && b.seq[n] >= 0; h++) {
            const size_t at = ((size_t)n * (H + 2 * K) + h) * D;
            const T *x = qkv + at, *w = h < H ? norms.q : norms.k;
            acc<T>* dw = h < H ? dnorms.q : dnorms.k;
            const acc<T> r = rms_factor(x, D, shape.eps), *angle = norms.rope + (size_t)b.pos[n] * D;
            acc<T> dy[MAX_HEAD], sum = 0; // dy: the gradient of the norm's output
            for (int i = 0; i < D / 2; i++) {
                const acc<T> du = to_acc(dqkv[at + i]), dv = to_acc(dqkv[at + i + D / 2]);
                const acc<T> cosine = angle[2 * i], sine = angle[2 * i + 1];
                dy[i] = du * cosine + dv * sine, dy[i + D / 2] = dv * cosine - du * sine;
            }
            for (int i = 0; i < D; i++) {
                sum += to_acc(x[i]) * to_acc(w[i]) * dy[i];
                if (dw) dw[i] += dy[i] * to_acc(x[i]) * r;
            }
            for (int i = 0; i < D; i++)
                dqkv[at + i] = to_stored<T>(r * to_acc(w[i]) * dy[i] - to_acc(x[i]) * (sum * r * r * r / D));
        }
}

// ---- attend: attention_backward, then qknorm_rope_backward
//      dqkv (N,(H+2K)D), dnorms +=, delta (N,H) <- dout (N,HD), of, cache, qkv (N,(H+2K)D)
template <class T>
void attend_backward(T* dqkv, const HeadNormGradients<T>& dnorms, const T* dout, const Attended<T>& of,
                     const LayerCache<T>& cache, const T* qkv, const HeadNorms<T>& norms, const Batch& b,
                     const HeadShape& shape, acc<T>* delta) {
    attention_backward(dqkv, dout, of, cache, b, shape, delta);
    qknorm_rope_backward(dqkv, dnorms, qkv, norms, b, shape);
}

// ---- embed: x[n] = W[token[n]]
// dW[token[n]] += dx[n]
//      dW (V,C) += <- dx (N,C)
template <class A> void embed_backward(A* dW, const A* dx, const Batch& b, int C) {
    #pragma omp parallel for schedule(static) if ((size_t)b.N * C > 2000)
    for (int i = 0; i < C; i++)
        for (int n = 0; n < b.N; n++)
            if (b.seq[n] >= 0) dW[(size_t)b.token[n] * C + i] += dx[(size_t)n * C + i];
}

// ---- route: p = softmax(z), z = W x; share_j = p_e / s for n's j-th expert e, s the sum of its experts' p (or 1)
// dp_e = (dshare_j - sum_i share_i dshare_i) / s (not normed: dshare_j), 0 for all other experts; all get slope_e, too.
// dz_e = p_e (dp_e - sum_f p_f dp_f), in spare rows 0. dx = dz W is linear_backward_input's.
//      dz (N,E) <- dshare (N,k), slope (E) of balance_loss or null, of
template <class T>
void route_backward(T* dz, const acc<T>* dshare, const acc<T>* slope, const Routed<T>& of, int N, int E, int k,
                    bool normed) {
    std::vector<acc<T>> dp(E);
    for (int n = 0; n < N; n++) {
        const acc<T>*p = of.p + (size_t)n * E, *share = of.share + (size_t)n * k, *d = dshare + (size_t)n * k;
        const int* expert = of.expert + (size_t)n * k;
        const bool spare = expert[0] < 0;
        acc<T> s = 1, mean = 0, sum = 0;
        for (int j = 0; j < k && normed; j++) mean += share[j] * d[j];
        if (normed && !spare) s = p[expert[0]] / share[0];
        for (int e = 0; e < E; e++) dp[e] = slope ? slope[e] : 0;
        for (int j = 0; j < k && !spare; j++) dp[expert[j]] += (d[j] - mean) / s;
        for (int e = 0; e < E; e++) sum += p[e] * dp[e];
        for (int e = 0; e < E; e++) dz[(size_t)n * E + e] = to_stored<T>(spare ? 0 : p[e] * (dp[e] - sum));
    }
}

// ---- grad_norm: sqrt(sum_i g[i]^2) of all gradients, in double: squares are summed in pieces of NORM_PIECE numbers,
// in order; then the pieces are summed in order.
//      norm (1), partial (ceil(n / NORM_PIECE)) <- g (n)
inline constexpr size_t NORM_PIECE = 4096;
template <class A> void grad_norm(double* norm, double* partial, const A* g, size_t n) {
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
// If the norm is not finite, nothing changes. stored = copy p is read by the products; copy is s for an adapter's B,
// else 1. AdamWStep (model/adamw.h) has the constants of a step: root = sqrt(1 - beta2^step), keep = 1 - lr decay,
// pace = lr / (1 - beta1^step), and scale, the factor of g.
//      stored (n), p, m, v (n) in place <- g (n), norm (1) of all gradients
template <class T>
void adamw(T* stored, acc<T>* p, acc<T>* m, acc<T>* v, const acc<T>* g, const double* norm, size_t n, const AdamW& a) {
    using A = acc<T>;
    if (!std::isfinite(*norm)) return;
    const AdamWStep<A> s(a);
    const A scale = s.scale(*norm);
    #pragma omp parallel for schedule(static) if (n > 2000)
    for (size_t i = 0; i < n; i++) {
        const A gi = g[i] * scale;
        m[i] += (gi - m[i]) * (1 - s.beta1);
        v[i] = v[i] * s.beta2 + gi * gi * (1 - s.beta2);
        p[i] = p[i] * s.keep - s.pace * (m[i] / (std::sqrt(v[i]) / s.root + s.eps));
        stored[i] = to_stored<T>(p[i] * s.copy);
    }
}

// ========================================================================================================= 7 backward

// Gradients of the parameters. A pointer is null if its parameter is not trained.
template <class T> struct Gradients {
    struct OfLinear { acc<T> *W = nullptr, *A = nullptr, *B = nullptr, *m = nullptr; };
    struct OfLayer {
        acc<T> *norm1 = nullptr, *norm2 = nullptr, *q_norm = nullptr, *k_norm = nullptr;
        OfLinear qkv, o, gate_up, down, router;
        struct OfExpert { OfLinear gate_up, down; };
        std::vector<OfExpert> experts;
    };
    std::vector<OfLayer> layer;
    acc<T> *embed = nullptr, *norm = nullptr, *head = nullptr; // head is embed when tied
    std::function<void(int layer)> done; // called when all gradients of a layer are complete
};

// The arrays between backward ops, for up to N tokens, which all layers share. Unless noted each holds a gradient.
template <class T> struct Flow {
    acc<T>* x;              // (N,C) of the residual stream
    T* y;                   // (N,C) x rounded to T
    T* normed;              // (N,C) of a norm's output
    T *qkv, *attention;     // (N,(H+2K)D); (N,HD) of attention's output
    acc<T>* delta;          // (N,H) scratch of attention_backward
    T *gate_up, *hidden;    // (N,2F), (N,F); hidden is null on a GPU
    T* u = nullptr;         // (N, out) of DoRA's u
    T* h;                   // (N, 3 rank) of the h of an adapter; on a GPU of experts (N k, 2 rank)
    acc<T> *logits, *factor; // (head_rows,V), (head_rows) of head_loss; on a GPU logits holds bf16
    acc<T>* parts;   // scratch of head_loss_gpu
    T* picked;       // (head_rows,C) rows of Activations::normed, not a gradient
    int head_rows;   // rows that go through the head at once
    T* rows;         // experts: (N,C) rows of y, of the tokens of one expert; null on a GPU
    acc<T>* sum;     // experts: (N,C) of their input
    acc<T>* share;   // experts: (N,k) of their shares
    T* scores;       // experts: (N,E) of the router's scores
    acc<T>* slope;   // experts: (E) of balance_loss; null: it is not trained

    void plan(Arena& arena, const Config& c, int N, int rank, int rows, bool gpu); // model/plans.cpp
};

// After `forward` of N tokens: loss (R). Only these R tokens go through the head, head_rows at a time. If `g` is not
// null, d.normed becomes, and g->head gets, the gradient of sum_r by[r] scale loss[r].
template <class T>
void loss_backward(Context& ctx, const Config& c, const Weights<T>& w, const Activations<T>& a, Flow<T>& d,
                   const Gradients<T>* g, acc<T>* loss, const LossRows<acc<T>>& of, int N) {
    // Numbers from one row of dlogits to the next: rows overwrite those of the logits, but a GPU stores no logits.
    const size_t ld = (size_t)c.V * (ctx.gpu ? 1 : sizeof(acc<T>) / sizeof(T));
    T* dlogits = g ? (T*)d.logits : nullptr;
    if (g) clear(ctx, d.normed, (size_t)N * c.C);
    for (int r = 0; r < of.R && !(ctx.stop && *ctx.stop); r += d.head_rows) {
        const int n = std::min(d.head_rows, of.R - r);
        const LossRows<acc<T>> part = {of.rows + r, of.target + r, of.scale, of.by ? of.by + r : nullptr, n};
        RUN(head_loss, loss + r, dlogits, d.factor, d.logits, d.picked, d.parts, a.normed, part, w.head);
        if (!g) continue;
        if (g->head) { // the factor goes to the rows of x, which are shorter than those of dlogits
            RUN(scale_rows, d.picked, (size_t)c.C, d.factor, n, c.C);
            RUN(linear_backward_weight, g->head, dlogits, ld, d.picked, n, c.V, c.C);
        }
        RUN(head_backward, d.normed, dlogits, ld, d.factor, part.rows, w.head, n);
    }
}

// The experts of a layer, one after another: out = mid + sum_j share_j y_j, y_j = hidden down_e^T,
// hidden = swiglu(gate_up), gate_up = x gate_up_e^T; then its router. dout is d.y, and d.normed becomes dx.
// d.share[j] = dout . y_j = (dout down_e) . hidden, so that y_j is not computed again;  d.sum: dx, of all experts.
// The gradient of y_j is share_j dout. The product with down_e takes dout, for d.share; share_j multiplies its results.
// forward did not keep the h of adapters: they are computed again. On a GPU only adapters are trained.
template <class T>
void experts_backward(Context& ctx, const Layer<T>& layer, typename Activations<T>::PerLayer& s, Flow<T>& d,
                      const typename Gradients<T>::OfLayer& g, int N, int k, bool normed) {
    const Routed<T>& to = s.routed;
    if constexpr (HAS_GPU<T>) if (ctx.gpu) {
        const auto &up = g.experts[0].gate_up, &down = g.experts[0].down;
        const ExpertsBackward in = {s.norm2, s.gate_up, s.hidden, s.rows, up.A, up.B, down.A, down.B};
        return experts_backward_gpu(ctx, d, in, layer, to, N, k, normed);
    }
    const size_t C = layer.router.in, M = layer.experts[0].down.in;
    T* const none = nullptr;
    std::fill_n(d.sum, N * C, (acc<T>)0), std::fill_n(d.share, (size_t)N * k, (acc<T>)0);
    for (size_t e = 0; e < layer.experts.size(); e++) {
        const size_t first = to.first[e];
        const int n = to.first[e + 1] - to.first[e], *pair = to.pair + first;
        if (n == 0) continue;
        const PairsProduct<T> up(layer.experts[e].gate_up, pair, n, k), down(layer.experts[e].down, pair, n, k);
        const Adapter<T>&a = down.W.adapter, &b = up.W.adapter;
        const typename Gradients<T>::OfLayer::OfExpert& grads = g.experts[e];
        T *hidden = s.hidden + first * M, *gate_up = s.gate_up + first * 2 * M;
        std::vector<acc<T>> share(n);
        for (int i = 0; i < n; i++) { // the expert's rows of dout and of x
            share[i] = to.share[pair[i]];
            std::copy_n(d.y + pair[i] / k * C, C, d.rows + i * C);
            std::copy_n(s.norm2 + pair[i] / k * C, C, s.rows + i * C);
        }
        auto scale = [&](T* x, size_t width) { RUN(scale_rows, x, width, share.data(), n, (int)width); };
        if (a.rank) { // h times the share: dB = dout^T h
            RUN(lora_down, a.h, hidden, down.W, n);
            scale(a.h, a.width());
        }
        RUN(linear_backward_swiglu, d.gate_up, none, d.hidden, d.h, grads.down.B, d.rows, gate_up, down.W, n);
        for (int i = 0; i < n; i++)
            for (size_t f = 0; f < M; f++) d.share[pair[i]] += to_acc(d.hidden[i * M + f]) * to_acc(hidden[i * M + f]);
        if (a.rank) {
            scale(d.h, a.width());
            RUN(lora_backward_weight, grads.down.A, d.h, hidden, down.W, n);
        }
        if (grads.down.W) {
            scale(d.rows, C);
            RUN(linear_backward_weight, grads.down.W, d.rows, C, hidden, n, (int)C, (int)M);
        }
        scale(d.gate_up, 2 * M);
        if (b.rank) RUN(lora_down, b.h, s.rows, up.W, n);
        RUN(linear_backward_input, d.normed, d.h, grads.gate_up.B, d.gate_up, up.W, n);
        if (b.rank) RUN(lora_backward_weight, grads.gate_up.A, d.h, s.rows, up.W, n);
        if (grads.gate_up.W)
            RUN(linear_backward_weight, grads.gate_up.W, d.gate_up, 2 * M, s.rows, n, 2 * (int)M, (int)C);
        for (int i = 0; i < n; i++)
            for (size_t c = 0; c < C; c++) d.sum[pair[i] / k * C + c] += to_acc(d.normed[i * C + c]);
    }
    const Linear<T>& router = layer.router;
    route_backward(d.scores, d.share, d.slope, to, N, router.out(), k, normed);
    RUN(linear_backward_input, d.normed, d.h, g.router.B, d.scores, router, N);
    if (g.router.W)
        RUN(linear_backward_weight, g.router.W, d.scores, (size_t)router.out(), s.norm2, N, router.out(), router.in);
    for (size_t i = 0; i < N * C; i++) d.normed[i] = to_stored<T>(to_acc(d.normed[i]) + d.sum[i]);
}

// From d.normed (loss_backward) to the gradient of every parameter: `forward` in reverse order. The batch holds whole
// sequences. In a layer s has the activations, d the gradients that flow, grads those of the parameters. A step of
// training (train/step.cpp) is forward, loss_backward and backward for each batch, then grad_norm and adamw.
template <class T>
void backward(Context& ctx, const Config& c, const Weights<T>& w, const Batch& b, Activations<T>& a, Flow<T>& d,
              const Gradients<T>& g, KVCache<T>& kv, const acc<T>* rope) {
    const int N = b.N, C = c.C;
    auto scaled = [&](const typename Gradients<T>::OfLinear& to, const T* dy, const Linear<T>& W) { // dy, or DoRA's du
        if (!W.adapter.dora.on) return dy;
        dora_backward(ctx, d.u, to.m, dy, W, N);
        return (const T*)d.u;
    };
    auto input_gradient = [&](T* dx, const typename Gradients<T>::OfLinear& to, const T* dy, const Linear<T>& W) {
        RUN(linear_backward_input, dx, d.h, to.B, scaled(to, dy, W), W, N);
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
        const LayerCache<T> cache = kv.layer(l);
        const HeadNorms<T> norms = layer.norms(rope);
        if (a.recompute) layer_forward(ctx, c, layer, b, s, cache, rope);
        if (layer.experts.empty()) {
            // out = mid + hidden down^T, hidden = swiglu(gate_up), gate_up = norm2(mid) W^T. s.hidden and s.norm2 are
            // computed again (`ample` kept hidden), before the weight gradients that read them.
            RUN(linear_backward_swiglu, d.gate_up, a.ample ? none : s.hidden, d.hidden, d.h, grads.down.B,
                scaled(grads.down, d.y, layer.down), s.gate_up, layer.down, N);
            weight_gradients(grads.down, d.y, s.hidden, layer.down);
            input_gradient(d.normed, grads.gate_up, d.gate_up, layer.gate_up);
            RUN(rmsnorm_backward, d.x, d.y, s.norm2, grads.norm2, d.normed, s.mid, layer.norm2, N, C, c.eps);
            weight_gradients(grads.gate_up, d.gate_up, s.norm2, layer.gate_up);
        } else { // x = norm2(mid) goes to the experts and to the router
            RUN(rmsnorm, s.norm2, s.mid, layer.norm2, N, C, c.eps);
            experts_backward(ctx, layer, s, d, grads, N, c.k, c.normed_shares);
            RUN(rmsnorm_backward, d.x, d.y, none, grads.norm2, d.normed, s.mid, layer.norm2, N, C, c.eps);
        }
        // mid = in + attention o^T, attention = attend(qkv), qkv = norm1(in) W^T
        input_gradient(d.attention, grads.o, d.y, layer.o);
        weight_gradients(grads.o, d.y, s.attention, layer.o);
        if (!a.ample) // q, keys and values of this layer were not kept
            RUN(qknorm_rope_kv, s.q, cache, s.qkv, norms, b, c.heads());
        RUN(attend_backward, d.qkv, {grads.q_norm, grads.k_norm}, d.attention, {s.q, s.attention, s.lse}, cache, s.qkv,
            norms, b, c.heads(), d.delta);
        input_gradient(d.normed, grads.qkv, d.qkv, layer.qkv);
        RUN(rmsnorm_backward, d.x, d.y, s.norm1, grads.norm1, d.normed, s.in, layer.norm1, N, C, c.eps);
        weight_gradients(grads.qkv, d.qkv, s.norm1, layer.qkv);
        if (g.done) g.done(l);
    }
    if (g.embed) RUN(embed_backward, g.embed, d.x, b, C);
}

// ################################################# The end of Book I #################################################
// Its slow ops once more, for the vector and matrix instructions of CPUs:
#if !defined(QWEN3_PLAIN) && !defined(QWEN3_PORTABLE)
#include "cpu/ops.h"
#endif

#ifndef QWEN3_PLAIN
QWEN3_INSTANCES(BOOK_I_INSTANCES) // compiled once, in the object of this file
#endif

// ###################################################### Book II ######################################################
// Kernels, and launchers: op_gpu launches those of op. The kernels of experts are in model/experts.cu, of `sample` in
// model/sample.cu, of `distillation` in train/distillation.cu, of `adamw8` in train/adamw8.cu. Suites also compile some
// kernels for a CPU and run them there (tests/emulate). On a GPU without gpu/'s optional kernels, such as an RTX 4090:
//
//       op                             kernel                          a warp owns
//   9   embed                          embed_kernel                    32 of every 128 channels of a token
//       add_noise                      add_noise_kernel                128 of every 512 channels of a token
//       rmsnorm of few tokens          rmsnorm_kernel                  pieces of 128 channels of a token, in turn
//       rmsnorm of many                rmsnorm_warp_kernel             a token
//         ... with dropout             rmsnorm_masks_kernel (10)       a token, and its dropout masks
//       qknorm_rope_kv                 qknorm_rope_kv_kernel           two heads of a token
//   10  linear, linear_add, mlp,
//         head of up to 16 tokens      stream_kernel                   steps of 32 of `in`, of all rows of a group
//         ... of more                  tile_kernel                     16 to 64 tokens by 32 or 64 rows of W
//       lora_down of over 16 tokens    lora_down_few_kernel            every eighth step of 32 of `in`
//         ... of many, or with dropout lora_down_kernel                16 tokens by every second or fourth 64 of `in`
//   11  attention, prompts             attention_kernel                32 query rows (a head of a token each)
//       attend of one new token        attention_decode_kernel         pages of 16 keys, in turn
//   12  head before `sample`           stream_kernel, DrawEpilogue     as above
//   13  head_loss                      tile_kernel, LossEpilogue       64 tokens by 64 rows of W
//         ... then                     cross_entropy_kernel            32 of every 256 pieces of a row
//       head_backward,
//         linear_backward_*            tile_kernel, W_COLS, X_COLS     16 to 64 rows by 32 or 64 columns of the result
//       lora_backward_weight           lora_weight_kernel              16 columns of A
//       rmsnorm_backward               rmsnorm_backward_kernel         128 of every 512 channels of a token
//       attention_backward             attention_backward_kernel       16 keys (dk, dv) or 32 query rows (dq)
//       qknorm_rope_backward           qknorm_rope_backward_kernel     a head of a token
//         ... with the norms' weights  head_weight_kernel              a token
//       embed_backward                 embed_backward_kernel           32 of every 128 channels of an id
//       grad_norm; adamw               grad_squares_kernel; adamw_kernel   32 of every 256 numbers
#if defined(__CUDACC__) || defined(QWEN3_EMULATED)
#define QWEN3_KERNELS
#endif
#include <climits>
#ifdef __CUDACC__

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
    bool hopper = false;         // sm_90a, and this binary was built for it, with gpu/: wgmma
    bool overlap = false;        // sm_90 and up: a kernel may start before the one ahead of it has ended
    float* partial = nullptr;    // scratch of products whose sums several blocks share, PARTIAL_BYTES
    int* arrived = nullptr;      // ... and how many of the blocks are done: (MAX_TILES), zero between kernels
    float* attention = nullptr;  // the same for attention, see attention_scratch
    int* attention_arrived = nullptr;
    bf16* unpacked = nullptr;    // of packed weights, a matrix at a time: see gpu/packed/unpack.h
    size_t unpacked_numbers = 0;
    bf16* rounded = nullptr;     // the activations of FP8 products, with Context::fp8_activations
    size_t rounded_numbers = 0;
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
// Tests of kernels on a CPU have other definitions of these two (tests/emulate).
#define GPU_UNROLL _Pragma("unroll")
#define SHARED_FLOATS(name) extern __shared__ __align__(128) float name[]

// Launches a kernel. With `overlap` (programmatic dependent launch) its blocks may start as soon as every block of the
// previous kernel has called let_next_start or ended: code before its own wait_for_previous then overlaps that kernel.
// Every block of every kernel waits, even one with nothing to do, and writes nothing before: so when a kernel has
// completed, all kernels before it have.
//
// Which reads are safe before the wait? The previous kernel may have called let_next_start before its own wait, and so
// on: many kernels can be in flight at once, back to the last kernel without `overlap`, copy, memset or beginning of a
// graph. That operation starts when all before it has completed, and all later kernels start later. Hence the rule:
// before its wait a kernel reads only data that no kernel since then writes. forward begins without `overlap` (embed);
// so safe are
// - the batch (tokens, positions, sequences, slots, block table): written by copies, by serve's prepare_kernel or by
//   the sample_kernel of the step before, all of which are ahead of embed;
// - weights: adamw_kernel writes them, after backward, and the next forward begins with embed;
// - keys and values of earlier forwards. Those of this one's own tokens are read after the wait.
//
// `cluster` neighbouring blocks (Hopper: up to 8) run at once, and reach each other's shared memory.
template <class... P, class... A>
void launch_clusters(Context& ctx, bool overlap, int cluster, void (*kernel)(P...), dim3 grid, int threads,
                     size_t shared, A... args) {
    if (shared > 40 * 1024) // with static shared memory the total may exceed 48 KB without the attribute
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

// 16 bytes of weights: read once, so they bypass the first-level cache. Zeros if not `there`, by a predicate instead of
// a branch, so that many loads are issued in a row.
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
__device__ inline uint32_t pack_half(float first, float second) { // in half precision
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
// Four numbers of FP8 (e4m3), the first in the lowest byte, as two pairs in half precision.
__device__ inline uint2 half_e4m3(uint32_t four) {
    uint2 pairs;
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }" : "=r"(pairs.x), "=r"(pairs.y) : "r"(four));
#else // moved to half precision's fields they are 2^-8 times as large
    const auto half = [](uint32_t high) {
        uint32_t pair;
        asm("mul.rn.f16x2 %0, %1, %2;"
            : "=r"(pair) : "r"((high & 0x80008000) | (high >> 1 & 0x3f803f80)), "r"(0x5c005c00));
        return pair;
    };
    pairs = {half(__byte_perm(four, 0, 0x1404)), half(__byte_perm(four, 0, 0x3424))};
#endif
    return pairs;
}
__device__ inline void store_one(float* to, float y) { *to = y; }
__device__ inline void store_one(bf16* to, float y) { *to = round_bf16(y); }
__device__ inline void store_four(float* to, const float4& y) { *(float4*)to = y; }
__device__ inline void store_four(bf16* to, const float4& y) {
    *(uint2*)to = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
}

// d += a b with a (16,16), b (16,8), d (16,8), all spread over a warp. PTX ISA: mma.m16n8k16, .bf16. Lane 4 g + t has
//              columns 2 t, 2 t + 1   columns 2 t + 8, 2 t + 9                            column g
//   a  row g          a0                     a2                 b  rows 2 t, 2 t + 1         b0
//      row g + 8      a1                     a3                    rows 2 t + 8, 2 t + 9     b1
//   d  row g       d[0], d[1]
//      row g + 8   d[2], d[3]
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same for numbers in half precision: .f16
__device__ inline void mma_half(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// d += a b for 32 numbers of `in`. Lane 4 g + t holds numbers 8 t .. 8 t + 7 of tokens g (a0), g + 8 (a1) and of row g
// of W (b). mma takes them for its columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9, twice: a sum may take `in` in any order, if
// both operands have the same.
__device__ __forceinline__ void mma_32(float (&d)[4], const uint4& a0, const uint4& a1, const uint4& b) {
    mma(d, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
    mma(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
}
// Makes the compiler compute x here, in all lanes, and not later, behind a branch that only some lanes take.
__device__ __forceinline__ void settle(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void settle(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void settle(const uint8_t*& p) { asm volatile("" : "+l"(p)); }
// Four 8 x 8 matrices of bf16 from shared memory; lane l names row l % 8 of matrix l / 8. In mma's layout, or
// transposed.
#define LDMATRIX(name, ptx) \
    __device__ inline void name(uint32_t (&m)[4], uint32_t address) { \
        asm volatile(ptx " {%0,%1,%2,%3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address)); \
    }
LDMATRIX(ldmatrix, "ldmatrix.sync.aligned.m8n8.x4.shared.b16")
LDMATRIX(ldmatrix_transposed, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
#undef LDMATRIX
// 16 bytes from global to shared memory, asynchronously; zeros if not `there`.
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
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int YOUNGER> __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGER) : "memory");
}
__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// A ring of STAGES stages in shared memory, which cp.async fills: use(i) computes with one while copies to the others
// are in flight, for i = from, from + EACH, .. below `to`. copy(i) starts the copies of i; past the end it starts none,
// or copies zeros. The caller has started those of the first STAGES - 1, a group each.
template <int STAGES, int EACH = 1, class Copy, class Use>
__device__ __forceinline__ void walk_ring(int from, int to, Copy copy, Use use) {
    for (int i = from; i < to; i += EACH) {
        wait_for_copies<STAGES - 2>(); // this thread's copies of i are complete
        __syncthreads(); // ... all threads' are; and all have left the stage before it, which the next copies overwrite
        copy(i + (STAGES - 1) * EACH);
        commit_copies();
        use(i);
    }
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
__device__ inline float warp_max(float x) {
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
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
// neighbours exchange two numbers. Lanes 0 1 2 3 of a quad get columns 0 .. 3, 8 .. 11, 4 .. 7, 12 .. 15. `lanes`: the
// mask of the calling lanes.
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

// True for the last of several blocks to arrive: it may then read all data that the others wrote before. `arrived`
// counts from zero and is zero again afterwards. All threads of the block call it. (One thread's release and acquire
// are enough: barriers order the other threads' accesses. The data must be read from the L2 cache: __ldcg.) With
// THREADS the block's first THREADS threads call it.
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

// ---- Optional speed. Book II is complete without gpu/. If gpu/ may have a faster kernel, or a format that Book II
// lacks (packed weights, FP8 activations), the launcher calls Optional first. If that does nothing (false, 0, no
// blocks), Book II's own kernel follows. A portable build has no optional kernels; else gpu/ defines these functions.
#ifdef QWEN3_PORTABLE
#include "model/portable.h"
#else
#include "gpu/optional.h"
#endif

// ==================================================================================================== 9 Small kernels
// In Book I's order (the backward pass's: section 13). Each reads and writes its arrays once, so memory bounds them.
// "A block a token" means: block n computes row n, its threads share the channels.

#if COMPILED(PART_TEXT)
// ---- embed. A block a token, 128 threads, a thread every 128th channel. Bound by reading the rows of the table.
__global__ void embed_kernel(float* x, const bf16* table, Batch b, int C) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    if (b.seq[n] < 0) return;
    const bf16* row = table + (size_t)b.token[n] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) x[(size_t)n * C + i] = to_acc(row[i]);
}
void embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b, int C) {
    if (Optional::embed(ctx, x, table, b)) return;
    // A forward's first kernel waits for all earlier work, so that those after it may read early: see launch_kernel.
    launch_kernel(ctx, false, embed_kernel, b.N, 128, 0, x, table.w[0], b, C);
}

// ---- add_noise. A block a token, 128 threads, a thread four neighbouring channels at a time. Bound by the ten rounds
// of Philox.
__global__ void add_noise_kernel(float* x, Noise noise, PhiloxKeys keys, int C) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    for (int i = threadIdx.x * 4; i < C; i += blockDim.x * 4) {
        const FourNumbers u = noise_numbers(keys, noise.step, noise.token[n], i / 4);
        for (int k = 0; k < 4 && i + k < C; k++) x[(size_t)n * C + i + k] += noise.bound[n] * u.v[k];
    }
}
void add_noise_gpu(Context& ctx, float* x, const Noise& noise, int N, int C) {
    launch(ctx, add_noise_kernel, N, 128, 0, x, noise, PhiloxKeys(noise.seed), C);
}
#endif

// ---- rmsnorm of `rows` rows of C, by all warps of a block. A row is cut into pieces of 128 numbers, which the warps
// take in turn; a lane has four neighbours of a piece. The squares of a piece are added by its warp, and the pieces in
// order: the bits do not depend on the number of warps. A warp keeps its first pieces in registers. All lanes of a warp
// call put(row, i, four) with their numbers i .. i + 3; i may be past the end. pieces: rows * ceil(C / 128) floats of
// shared memory. C is a multiple of 8. Ends with a barrier.
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
#if COMPILED(PART_TEXT)
// rmsnorm of few tokens. A block a token, 256 to 1,024 threads; a warp owns pieces of 128 channels, in turn. Shared
// memory: the sums of their squares, C / 128 floats. Bound by memory latency.
__global__ void rmsnorm_kernel(bf16* out, const float* x, const bf16* w, int C, float eps) {
    extern __shared__ float pieces[];
    let_next_start();
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * C;
    norm_rows(PlainRows{out + at, C, C}, x + at, w, pieces, 1, C, eps);
}
#endif
// The same for many tokens: a warp a token, so that no warp waits for another and more loads are in flight. The same
// bits. meanwhile() runs during the first loads.
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
inline int norm_threads(int C) { return std::clamp((C + 255) / 256 * 32, 256, 1024); } // a warp keeps its pieces
inline bool norms_by_warps(Context& ctx, int N) { return N >= 16 * ctx.gpu->sms; }
#if COMPILED(PART_TEXT)
// rmsnorm of many tokens. Eight tokens a block, a warp a token; no shared memory. Bound by memory bandwidth.
__global__ void __launch_bounds__(256) rmsnorm_warp_kernel(bf16* out, const float* x, const bf16* w, int N, int C,
                                                           float eps) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * 8 + threadIdx.x / 32;
    if (n < N) norm_row(out + (size_t)n * C, x + (size_t)n * C, w, C, eps, [] {});
}
void rmsnorm_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, int N, int C, float eps) {
    if (norms_by_warps(ctx, N))
        return launch(ctx, rmsnorm_warp_kernel, (N + 7) / 8, 256, 0, out, x, w, N, C, eps);
    launch(ctx, rmsnorm_kernel, N, norm_threads(C), (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}
#endif

#endif // __CUDACC__
#ifdef QWEN3_KERNELS
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

    struct alignas(2 * P) Stored { bf16 x[P]; }; // (a lane's numbers are contiguous: one access)
    __device__ void load(const bf16* head) {
        const Stored a = ((const Stored*)head)[threadIdx.x % 32], b = ((const Stored*)head)[threadIdx.x % 32 + 32];
        for (int p = 0; p < P; p++) u[p] = to_acc(a.x[p]), v[p] = to_acc(b.x[p]);
    }
    __device__ void store(bf16* head) const {
        Stored a, b;
        for (int p = 0; p < P; p++) a.x[p] = round_bf16(u[p]), b.x[p] = round_bf16(v[p]);
        ((Stored*)head)[threadIdx.x % 32] = a, ((Stored*)head)[threadIdx.x % 32 + 32] = b;
    }
    // `weights` are loaded in the layout of a head.
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

#include "model/fp8_head.h" // WarpFp8Head: the same as a row of an FP8 cache

// Rows of q, k and v, from row `first` on. Blocks of 8 warps, a warp two heads of a token: four loads are in flight
// before it is known whether the row is spare (one wait instead of two; spare rows store nothing). Bound by memory
// bandwidth.
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
    GPU_UNROLL
    for (int i = 0; i < 2; i++) {
        const int h = min(h0 + i, heads - 1);
        head[i].load(qkv + ((size_t)n * heads + h) * D);
        weights[i].load(h < H ? q_weight : k_weight);
    }
    const WarpAngles<D / 64> angle(rope + (size_t)(spare ? 0 : pos) * D);
    GPU_UNROLL
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
#endif // QWEN3_KERNELS
#ifdef __CUDACC__
#if COMPILED(PART_TEXT)
void qknorm_rope_kv_gpu(Context& ctx, bf16* q, const LayerCache<bf16>& cache, const bf16* qkv,
                        const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape, int first) {
    const int H = shape.H, K = shape.K, D = shape.D;
    const int blocks = (int)(((int64_t)(b.N - first) * ((H + 2 * K + 1) / 2) + 7) / 8);
    const auto kernel = b.fp8 ? (D == 128 ? qknorm_rope_kv_kernel<128, true> : qknorm_rope_kv_kernel<64, true>)
                              : D == 128 ? qknorm_rope_kv_kernel<128, false> : qknorm_rope_kv_kernel<64, false>;
    launch(ctx, kernel, blocks, 256, 0, q, cache.keys, cache.values, qkv, norms.q, norms.k, norms.rope, b, first, H, K,
           shape.eps);
}

// ---- head's first half: the chosen rows, one after another. A block of 256 threads a row, a thread every 256th
// number. Bound by launching.
__global__ void pick_rows_kernel(bf16* picked, const bf16* x, const int* rows, int C) {
    let_next_start();
    wait_for_previous();
    const bf16* row = x + (size_t)rows[blockIdx.x] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) picked[(size_t)blockIdx.x * C + i] = row[i];
}

void pick_rows_gpu(Context& ctx, bf16* picked, const bf16* x, const int* rows, int R, int C) {
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, C);
}
#endif

// ========================================================================================================= 10 Products
// Book I's product, y[n][r] = sum_i x[n][i] W[r][i], for N tokens n and `out` rows r of W; the sum runs over `in`.
// The blocks of a Linear lie one after another on a GPU (Weights::upload), so W is one matrix. A product of the
// backward pass has its own `in` and `out`: dx = dy W sums over W's rows, dW = dy^T x over the tokens.
// Three kernels compute them all: stream_kernel for up to 16 tokens, bound by memory bandwidth, and for more tokens,
// bound by the tensor cores, tile_kernel, or on Hopper hopper_kernel (gpu/products/hopper.h). The kernel's epilogue
// consumes the sums.

// ---- Epilogues. A kernel takes its epilogue by value, so that each thread has a copy, and calls these functions of
// it. Here are the defaults. An epilogue for stream_kernel adds `one`, one for tile_kernel and hopper_kernel `four`:
//
//   one(inside, n, r, y, second)   Sum y of token n and row r, from one thread. Whole warps call it, eight neighbouring
//                                  lanes for the same n and rows 8 q .. 8 q + 7, so that they can shuffle; `inside`
//                                  is false where n or r is past the end.
//   four(n, r, y, second)          Sums of token n and rows r .. r + 3 (r % 4 = 0), from one thread; none past the end.
//
// `second` is, with PAIR, the sum of up (y is that of gate), with ADDS the result of old or old_four, else zero.
// hopper_kernel can store results itself, in boxes, asynchronously. For that an epilogue has OUTPUTS > 0: `values` of
// four sums calls put(k, four) for each output k, and these four belong at output(k).
template <class T> struct Output {
    T* at; // or null: not wanted
    size_t ld;
    __device__ T* of(int n, int r) const { return at + n * ld + r; }
};
struct Epilogue {
    // The sums:
    static constexpr bool PAIR = false;          // W is (2 out, in), gate over up: a thread receives the sums of both
    static constexpr bool ADAPTS = true;         // W may have an adapter, see BesideAdapter
    static constexpr bool MASKS = false;         // `four`: dropout masks an adapter's sums (model/dropout_kernels.h)
    // On the way to the epilogue:
    static constexpr bool ADDS = false;          // the kernel loads a number early, for `second`
    static constexpr bool PARTS = false;         // sums become weights and parts of a softmax: section 13, head_loss
    // The results:
    static constexpr int OUTPUTS = 0;            // 0: `four` alone knows where its results go
    using Four = uint2;                          // four numbers of an output: bf16; with ADDS float4: float
    static constexpr bool ROUNDS = false;        // hopper_kernel stores output 0 as e4m3 too, in `rounded`
    static constexpr int MOST_BLOCKS = INT_MAX;  // stream_kernel is launched with no more blocks

    // stream_kernel: all threads, once, after wait_for_previous; a barrier follows before any `one`.
    __device__ void begin() {}
    // stream_kernel: all threads, once, after their last `one` (there is no barrier between).
    __device__ void end(int /* N */) {}
    // With ADDS, the number, or the four, that will be `second`. Loaded before the sums are complete, by the thread
    // that will pass them on; n and r are not past the end.
    __device__ float old(int /* n */, int /* r */) const { return 0; }
    __device__ float4 old_four(int /* n */, int /* r */) const { return {}; }
    // tile_kernel, hopper_kernel: all threads, first. If true the kernel does nothing.
    __device__ bool skipped() const { return false; }
};

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
// Epilogue E of up to 16 tokens if W has an adapter, whose h is already computed: s B h is added to each sum before
// rounding. A thread has an output and all of its row of B: bound by latency.
inline constexpr int MOST_BESIDE = 192; // columns of B: rank 64 of q, k, v; the range measured faster than tiles
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
// of them. Lane 4 g + t reads row g of each tile, numbers 8 t .. 8 t + 7 of each step, in one load of 16 bytes. Its
// halves are two b operands of mma, if the a operands hold the same numbers of the tokens (mma_32): the order of `in`
// is free, as long as both operands agree. So no number is moved or converted between memory and tensor core. M: the a
// operand has room for 8 M tokens; fewer cost as much.
// Afterwards the warps' sums are added in shared memory, one (token, row) a thread, which calls the epilogue.
// Shared memory: two sets of (warps, TILES, 8 M, 8) sums, used in turn, so that one barrier a group is enough; with
// NORM the pieces of norm_rows, and its output (N, in + 8), whose rows begin in different banks. Bound by memory
// bandwidth: each weight is read once, and all of a group's first STREAM_LOADS loads are in flight before the first
// wait; those of the next group before the sums of this one are added. A sum's order depends on `in` only: a row of
// tokens has the same bits whatever N and M are.
inline constexpr int STREAM_TOKENS = 16, NORM_TOKENS = 4, STREAM_LOADS = 8;

struct StreamArgs {
    const bf16* x;       // (., in)
    const int* rows;     // (N) rows of x, or null: the first N
    const float* stream; // (N,in) with NORM
    const bf16* norm;    // (in)
    float eps;
    const bf16* W;       // (out,in), with PAIR (2 out, in)
    int N, in, out;
    int steps = 0;       // of 32 numbers of `in`, a warp: set by launch_stream
    // The product of N rows of x, or of the N named rows; of rmsnorm(stream).
    static StreamArgs of(const bf16* x, const bf16* W, int N, int in, int out, const int* rows = nullptr) {
        return {x, rows, nullptr, nullptr, 0, W, N, in, out};
    }
    static StreamArgs of_norm(const float* stream, const bf16* norm, float eps, const bf16* W, int N, int in, int out) {
        return {nullptr, nullptr, stream, norm, eps, W, N, in, out};
    }
};

// A lane's part of a group's rows: LOADS steps.
template <int TILES, bool PAIR> struct StreamWeights {
    static constexpr int LOADS = STREAM_LOADS / TILES, ROWS = PAIR ? 8 : 8 * TILES;
    uint4 w[LOADS][TILES];
    // Loads LOADS steps from `step` on; zeros from step `last` on.
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

// Shared memory of stream_kernel behind its sums, with NORM.
BOTH inline int stream_norm_pieces(int N, int in) { return (N * ((in + 127) / 128) + 3) / 4 * 4; } // floats
inline constexpr int STREAM_NORM_PAD = 8; // numbers between two rows

// linear, linear_add, norm_linear, norm_linear_swiglu and head of few tokens: see above.
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
    // one, embed, starts only when all earlier launches have ended (AdamW in training).
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
    const bf16* token[M]; // tokens g and g + 8, this lane's rows of a; results past the last token are unused
    #pragma unroll
    for (int m = 0; m < M; m++) {
        const int n = min(g + 8 * m, p.N - 1);
        token[m] = x + (size_t)(!NORM && p.rows ? p.rows[n] : n) * ld;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        // The first (token, row) that this thread passes to the epilogue. A set of sums is (tile, token, row of the
        // tile).
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
    const bool two = PAIR || p.in <= 1024; // a warp has few steps of a short row; two tiles give it as many loads
    const auto launch_tiles = [&](auto tiles) {
        if (p.stream) return launch_stream<tiles, 1, true>(ctx, p, epilogue);
        if (p.N <= 8) return launch_stream<tiles, 1, false>(ctx, p, epilogue);
        return launch_stream<tiles, 2, false>(ctx, p, epilogue);
    };
    if constexpr (!PAIR) if (!two) return launch_tiles(std::integral_constant<int, 1>());
    return launch_tiles(std::integral_constant<int, 2>());
}

// ---- Many tokens. Every product of more than 16 tokens and of the backward pass; for fewer tokens, products with
// dropout, with an adapter of many columns, or with `invariant`.
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
// ldmatrix, which reads the same chunk of eight rows at once, accesses eight different groups of banks; wgmma needs the
// same order.
//
// Ownership. A warp owns S::WARP_TOKENS by S::WARP_ROWS of the tile, in fragments of 16 tokens by eight rows of W, in
// the layout of mma: lane 4 g + t holds sum[i][j][0 .. 3] of fragment (i, j): rows 2 t and 2 t + 1 of token g, then the
// same rows of token g + 8. PAIR: the tile has 16 rows of gate and 16 rows of up in turn, so that a lane holds the same
// columns of both, two fragments apart.
//
// An adapter's h and s B are further columns of x and W: `more` numbers of `in`, in stages of their own, which come
// first, or last.
//
// Splits. If there are too few tiles to fill the GPU, `splits` blocks share a tile, each has a part of the stages, and
// the last one to arrive adds their sums in order.
inline constexpr int STAGE_IN = 64; // numbers of `in` in a stage

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
// The number of tiles, or of pairs of them.
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
    int ldx = 0, ldw = 0; // numbers from one row of x and W to the next; 0: the row's length
    bool early = false;   // few blocks: those of the next kernel may be resident beside them from the start
    int splits = 1;
    // For gpu/products/hopper.h: stages of the ring; whether received sums have their own memory; scales of e4m3
    // operands (see multiply_groups; two e4m3 then count as one number), W's (., groups) and x's (groups, pitch).
    int stages = 0;
    bool apart = false;
    const float *x_scale = nullptr, *W_scale = nullptr;
    int pitch = 0;
    float* partial = nullptr; // set by plan_tiles: Gpu's
    int* arrived = nullptr;
};

// The tile of a block, and its steps (stages of `in`).
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

// The place of a chunk of 16 bytes in an operand's stage. With `in` along the rows there are eight chunks, one panel.
__device__ __forceinline__ uint32_t chunk_address(uint32_t stage, int row, int chunk) {
    return stage + row * 128 + ((chunk ^ row % 8) << 4);
}
__device__ __forceinline__ uint32_t panel_address(uint32_t stage, int row, int chunk) {
    return chunk_address(stage + chunk / 8 * (STAGE_IN * 128), row, chunk % 8);
}

// One thread's copies in a stage of an operand: `chunk` of COUNT rows, STEP rows apart, from `row` on.
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

    // The source of a step's copy: the adapter's columns or the operand's own, from number i of `in` numbers on.
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

// For epilogues with MASKS: model/dropout_kernels.h; with PARTS: section 13, head_loss.
template <class S> struct KeptWords;
template <class S, class Epilogue>
__device__ __forceinline__ void add_masked_stage(float (&sum)[S::MF][S::NF][4], uint32_t x_stage, uint32_t w_stage,
                                                 int first, const KeptWords<S>& words, const TileArgs& p,
                                                 const Epilogue& epilogue);
template <class S, class Epilogue>
__device__ __forceinline__ void finish_weights(const float (&sum)[S::NF][4], int h, int n, int first, int N, int out,
                                               Epilogue& epilogue);

// Adds the sums of the blocks that share a tile, in order, in the last one to arrive: true in that one. In `partial`
// they are in the threads' layout: (tile, split, fragment, thread, 4).
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

// Passes a lane's sums of token n to the epilogue, four at a time; `first` is the first row of the warp's part.
template <class S, class Epilogue>
__device__ __forceinline__ void finish_row(const float (&sum)[S::NF][4], int h, int n, int first, int N, int out,
                                           Epilogue& epilogue) {
    if constexpr (Epilogue::PARTS) return finish_weights<S>(sum, h, n, first, N, out, epilogue);
    constexpr int EACH = Epilogue::PAIR ? 4 : 2; // fragments that give a lane four columns, of gate and up with PAIR
    constexpr int FOURS = S::NF / EACH;
    const int t = threadIdx.x % 4;
    const auto row = [&](int i) { return (Epilogue::PAIR ? first / 2 : first) + i * 16 + t / 2 * 4 + t % 2 * 8; };
    constexpr int AHEAD = Epilogue::ADDS && FOURS > 8 ? FOURS / 2 : FOURS; // loaded before the first wait
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

// linear, linear_add, norm_linear_swiglu, head of many tokens, and the products of the backward ops: see above.
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
    const auto copy = [&](int step) {
        if (step < at.last) stages.copy_x(step), stages.copy_w(step);
    };
    const auto multiply = [&](int step) {
        multiply_stage<S, X_COLS, W_COLS>(sum, stages.x_stage(step), stages.w_stage(step));
    };
    if constexpr (Epilogue::MASKS) {
        const KeptWords<S> words(at, epilogue.masks, p.more / epilogue.rank);
        walk_ring<S::STAGES>(at.first, min(at.last, at.first_more), copy, multiply);
        walk_ring<S::STAGES>(max(at.first, at.first_more), at.last, copy, [&](int step) {
            add_masked_stage<S>(sum, stages.x_stage(step), stages.w_stage(step), at.number(step), words, p, epilogue);
        });
    } else walk_ring<S::STAGES>(at.first, at.last, copy, multiply);
    wait_for_copies<0>();
    if (!p.early) let_next_start(); // earlier, blocks of the next kernel would take the places of this one's

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

// Whether the scratch has room for the sums of `splits` splits.
template <class S> bool splits_fit(int64_t tiles, int splits) {
    return tiles <= MAX_TILES && tiles * splits * S::TOKENS * S::ROWS * 4 <= (int64_t)PARTIAL_BYTES;
}

// Completes the arguments of a product by tiles. Returns its number of tiles.
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

// ---- The choice of a tile
using Tile128x128 = TileShape<128, 128, 64, 64, 3>;
using Tile64x128 = TileShape<64, 128, 32, 64, 3>;
using Tile64x64 = TileShape<64, 64, 32, 32, 4>;
using Tile32x64 = TileShape<32, 64, 16, 32, 6>;

// Microseconds that a block takes for 1,024 numbers of `in`, if it is alone on its multiprocessor and if that has many.
// Only their proportion matters. `bench_gpu tiles` measures the card at hand and prints its row.
struct TileTimes {
    int sm; // for cards from this one on
    struct { double alone, full; } of[4]; // Tile128x128, Tile64x128, Tile64x64, Tile32x64
};
inline constexpr TileTimes TILE_TIMES[] = {
    {80, {{13, 9.8}, {9.1, 6.5}, {9, 3.4}, {5.8, 2.6}}}, // of an H100, for all cards until theirs are measured
};
inline const TileTimes& tile_times(int sm) {
    const TileTimes* own = TILE_TIMES;
    for (const TileTimes& row : TILE_TIMES)
        if (row.sm <= sm) own = &row;
    return *own;
}
// The shape and the number of splits with the least predicted time in microseconds: the blocks of the busiest
// multiprocessor, times a block's steps, plus the cost of splits (fitted to an H100).
struct TilePlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    template <class S> void consider(const Context& ctx, const TileTimes& times, int index, int N, int out, int in) {
        const double alone = times.of[index].alone, full = times.of[index].full;
        const int64_t tiles = count_tiles<S>(N, out), area = S::TOKENS * S::ROWS;
        for (int s = 1; s <= 12; s++) {
            if (s > 1 && (s * 128 > in || !splits_fit<S>(tiles, s))) break;
            const double blocks = (double)((tiles * s + ctx.gpu->sms - 1) / ctx.gpu->sms); // of the busiest
            double time = 1 + std::max(alone, blocks * full) * in / 1024 / s;
            if (s > 1) time += 0.85 + s * (0.22 + 0.93 * (double)area / 16384) + (double)(tiles * s * area) * 8 / 5.5e6;
            if (time < least) shape = index, splits = s, least = time;
        }
    }
    // With X_COLS there are no tiles of 32 tokens; for many tokens they were never the best.
    TilePlan(const Context& ctx, const TileTimes& times, int N, int out, int in, bool x_cols = false) {
        if (ctx.invariant) return;
        consider<Tile128x128>(ctx, times, 0, N, out, in);
        consider<Tile64x128>(ctx, times, 1, N, out, in);
        consider<Tile64x64>(ctx, times, 2, N, out, in);
        if (!x_cols && N <= 128) consider<Tile32x64>(ctx, times, 3, N, out, in);
    }
};
template <bool X_COLS = false, bool W_COLS = false, class Epilogue>
void tile_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    if (Optional::tiles<X_COLS, W_COLS>(ctx, p, epilogue)) return;
    const TilePlan plan(ctx, tile_times(ctx.gpu->sm), p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in + p.more, X_COLS);
    p.splits = plan.splits;
    switch (plan.shape) {
        case 0: return launch_tiles<Tile128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_tiles<Tile64x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_tiles<Tile64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: if constexpr (!X_COLS) return launch_tiles<Tile32x64, X_COLS, W_COLS>(ctx, p, epilogue); else break;
    }
    DIE("no tile of shape %d for this product", plan.shape);
}

// ---- The adapters' own kernels. A's rows are processed in groups of 32, so that one pass over x serves up to three
// modules (q, k, v; gate, up) of rank 32. Their arguments:
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
    // (A variable index would put a copy of the array into local memory.)
    __device__ int name(int j) const { return j == 0 ? module[0] : j == 1 ? module[1] : module[2]; }
    __device__ int module_of(int group) const { return group / each(); }
    __device__ int first_row(int group) const { return group % each() * 32; } // of its module's
};

#include "model/dropout_kernels.h" // masks of dropout

// Calls launch(std::integral_constant<int, G>()): a block processes G groups of 32 of an adapter's rows at once.
template <class Launch> void in_groups(int groups, Launch launch) {
    if (groups == 1) return launch(std::integral_constant<int, 1>());
    if (groups == 2) return launch(std::integral_constant<int, 2>());
    launch(std::integral_constant<int, 3>());
}

#if COMPILED(PART_LORA)
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

// rmsnorm of many tokens, and the dropout masks of each module. Eight tokens a block, a warp a token: it computes masks
// while it waits for memory. Bound by Philox and by memory bandwidth.
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

void rmsnorm_masks_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, float eps, const LoraArgs& p, int N) {
    launch(ctx, rmsnorm_masks_kernel, (N + 7) / 8, 256, 0, out, x, w, eps, p);
}

// lora_down: h_j = drop_j(x) A_j^T. It computes the dropout masks; with MADE rmsnorm_masks_kernel has. Grid: (tokens /
// 64, groups / GROUPS), 8 or 16 warps. A block owns 64 tokens by 32 GROUPS rows of A, and walks along `in` in stages of
// PANELS panels of 64 numbers (see chunk_address) of x and of A. A warp owns 16 tokens by one panel of each stage, and
// masks its x in registers, once for each module. A lane computes half of a token's masks; the bits of two numbers
// become a mask by one instruction. The panels' sums are added in shared memory. Bound by computing the masks
// (Philox), without that by memory bandwidth.
template <int GROUPS> struct LoraDownShape {
    static constexpr int TOKENS = 64, PANELS = GROUPS == 1 ? 4 : 2, STAGES = GROUPS == 2 ? 3 : 2;
    static constexpr int THREADS = PANELS * 128;
    static constexpr int X_PANEL = TOKENS * 128, PANEL = X_PANEL + GROUPS * 32 * 128, STAGE_BYTES = PANELS * PANEL;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES;
};
// Copies this panel's part of a step, of the tokens from n0 on and the groups from `first` on.
template <int GROUPS>
__device__ __forceinline__ void lora_down_copy(uint32_t to, const bf16* x, const LoraArgs& p, int n0, int first,
                                               int i64) {
    using S = LoraDownShape<GROUPS>;
    const int chunk = threadIdx.x % 8, row = threadIdx.x % 128 / 8, i = i64 * 64 + chunk * 8;
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
}
template <int GROUPS, bool MADE>
__global__ void __launch_bounds__(LoraDownShape<GROUPS>::THREADS, 512 / LoraDownShape<GROUPS>::THREADS)
lora_down_kernel(bf16* h, const bf16* x, const __grid_constant__ LoraArgs p) {
    using S = LoraDownShape<GROUPS>;
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * S::TOKENS, first = blockIdx.y * GROUPS, panel = warp / 4, token = warp % 4 * 16;
    const int steps = (p.in + 64 * S::PANELS - 1) / (64 * S::PANELS);
    const auto stage = [&](int step) { return shared + step % S::STAGES * S::STAGE_BYTES + panel * S::PANEL; };
    const auto copy = [&](int step) { // (each panel's own threads copy it)
        if (step < steps) lora_down_copy<GROUPS>(stage(step), x, p, n0, first, step * S::PANELS + panel);
    };
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) copy(s), commit_copies();
    const int mine = n0 + token + lane % 16; // this lane computes a half of this token's masks
    const uint32_t name = p.dropping && mine < p.N ? p.dropout.token[mine] : 0;
    uint32_t kept[GROUPS], next[GROUPS]; // masks; of the next step, if they are made already
    if (MADE) load_masks(next, p, first, mine, panel);
    float sum[GROUPS][4][4] = {};
    for (int step = 0; step < steps; step++) {
        const int i64 = step * S::PANELS + panel;
        #pragma unroll
        for (int k = 0; k < GROUPS && MADE; k++) kept[k] = next[k];
        if (MADE) load_masks(next, p, first, mine, i64 + S::PANELS);
        else make_masks(kept, p, first, mine, name, i64); // (while copies are in flight)
        wait_for_copies<S::STAGES - 2>(); // as walk_ring
        __syncthreads();
        copy(step + S::STAGES - 1);
        commit_copies();
        multiply_dropped(sum, kept, stage(step), token, stage(step) + S::X_PANEL);
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

// h, with dropout or of more than 16 tokens (or as product_gpu says).
void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N, bool made) {
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
#endif

#endif // __CUDACC__
#ifdef QWEN3_KERNELS
#include "model/dora_kernels.h" // DoRA: the product's last step, lengths of rows, gradients
#endif // QWEN3_KERNELS
#ifdef __CUDACC__
inline unsigned blocks_of(size_t threads) { return (unsigned)((threads + 255) / 256); } // of 256
// u of DoRA, without `off`; and `off` with dropout, whose scratch is returned: else null. made: as product_gpu.
const bf16* dora_product(Context& ctx, const bf16* x, const Linear<bf16>& W, int N, bool made);

// ---- The product for any number of tokens: x W^T. Up to 16: stream_kernel; the epilogue adds an adapter's h B^T. More
// tokens, dropout, a wide adapter, or `invariant`: tile_kernel; h and s B are further columns of x and W. made: the
// dropout masks are computed already. rounded: x as e4m3, or {}.
void rmsnorm_masks_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, float eps, const LoraArgs& p, int N);
template <class Epilogue>
void product_gpu(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N, bool made = false,
                 const E4M3Rows& rounded = {}) {
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    const Adapter<bf16>& a = W.adapter;
    if constexpr (Epilogue::ADAPTS)
        if (a.dora.on) {
            const bf16* off = dora_product(ctx, x, W, N, made);
            return launch(ctx, dora_kernel<Epilogue>, blocks_of((size_t)N * out / 4), 256, 0, epilogue, a.dora.u, off,
                          a.dora.c, N, W.out());
        }
    if (N <= STREAM_TOKENS && !ctx.invariant) {
        const auto few = [&](auto e) {
            if (!Optional::few(ctx, e, x, nullptr, W, N).blocks)
                stream_product(ctx, StreamArgs::of(x, W.w[0], N, W.in, out), e);
        };
        if (!a.rank) return few(epilogue);
        if constexpr (Epilogue::ADAPTS)
            if (!a.dropout && (int)a.width() <= MOST_BESIDE) {
                const int width = (int)a.width();
                stream_product(ctx, StreamArgs::of(x, a.A, N, W.in, width), StoreEpilogue<bf16>(a.h, width));
                return few(BesideAdapter<Epilogue>(epilogue, W));
            }
    }
    if (Optional::many(ctx, epilogue, x, rounded, W, N)) return;
    Optional::weights(ctx, W, [&](const bf16* weights) {
        TileArgs p = {x, weights, N, W.in, out};
        p.early = N <= 128;
        if (a.rank) {
            lora_down_gpu(ctx, a.h, x, W, N, made);
            p.more_x = a.h, p.more_W = a.B, p.more = (int)a.width();
        }
        tile_product(ctx, p, epilogue);
    });
}
// The same for rmsnorm(stream). `normed` (N,in) holds that if the product does not compute it for itself, or rounds it.
// output: becomes the product's output as e4m3 if the kernel stored it so, too; null: not wanted.
template <class Epilogue>
void norm_product_gpu(Context& ctx, Epilogue epilogue, bf16* normed, const float* stream, const bf16* norm,
                      const Linear<bf16>& W, int N, float eps, E4M3Rows* output = nullptr) {
    if (N > NORM_TOKENS || ctx.invariant || W.adapter.rank || W.format != Format::PLAIN) {
        if (Optional::norm_many(ctx, epilogue, stream, norm, W, N, eps, output)) return;
        const bool made = W.adapter.dropout && norms_by_warps(ctx, N);
        if (!made) rmsnorm_gpu(ctx, normed, stream, norm, N, W.in, eps);
        else rmsnorm_masks_gpu(ctx, normed, stream, norm, eps, LoraArgs(W, N), N);
        return product_gpu(ctx, epilogue, normed, W, N, made);
    }
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    stream_product(ctx, StreamArgs::of_norm(stream, norm, eps, W.w[0], N, W.in, out), epilogue);
}

// ---- The products of Book I, launched.
#if COMPILED(PART_LINEAR)
const bf16* dora_product(Context& ctx, const bf16* x, const Linear<bf16>& W, int N, bool made) {
    const Adapter<bf16>& a = W.adapter;
    const int out = W.out();
    Linear<bf16> lora = W;
    lora.adapter.dora.on = false;
    product_gpu(ctx, StoreEpilogue<bf16>(a.dora.u, out), x, lora, N, made);
    if (!a.dropout) return nullptr;
    const LoraArgs p(W, N);
    clear(ctx, a.dora.off, (size_t)N * out);
    for (int j = 0; j < a.modules; j++) {
        launch(ctx, dropped_kernel<false>, blocks_of((size_t)N * W.in / 8), 256, 0, a.dora.x, x, p.kept, j, p.scale, N,
               W.in);
        product_gpu(ctx, StoreEpilogue<bf16>(a.dora.off + W.first_row(a.block[j]), out), a.dora.x, W.block(a.block[j]),
                    N);
    }
    return a.dora.off;
}
void dora_norm_gpu(Context& ctx, const Linear<bf16>& W) {
    const size_t shared = (size_t)W.adapter.rank * DORA_ROWS * sizeof(float);
    Optional::weights(ctx, W, [&](const bf16* weights) {
        for (int b = 0; b < 3 && W.rows[b]; b++) {
            const int rows = W.rows[b], first = W.first_row(b);
            if (rows % DORA_ROWS) DIE("DoRA of %d rows: the GPU takes multiples of %d", rows, DORA_ROWS);
            launch(ctx, dora_norm_kernel, rows / DORA_ROWS, DORA_THREADS, shared, W.adapter, weights, W.in,
                   W.module_of(first), first);
        }
    });
}
void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), x, W, N);
}
void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* x, const bf16* w, const Linear<bf16>& W,
                     int N, float eps) {
    norm_product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), normed, x, w, W, N, eps);
}
#endif
#if COMPILED(PART_LINEAR_ADD)
void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W, int N,
                    const E4M3Rows& rounded) {
    product_gpu(ctx, AddEpilogue(out, residual, W.out()), x, W, N, false, rounded);
}
#endif
#if COMPILED(PART_SWIGLU)
void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
                            const Linear<bf16>& W, int N, float eps, E4M3Rows* rounded) {
    norm_product_gpu(ctx, SwigluEpilogue(out, gate_up, W.rows[0]), normed, x, w, W, N, eps, rounded);
}
void mlp_gpu(Context& ctx, float* out, bf16* hidden, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
             const Linear<bf16>& up, const Linear<bf16>& down, int N, float eps) {
    E4M3Rows rounded; // hidden, for down
    norm_linear_swiglu_gpu(ctx, hidden, gate_up, normed, x, w, up, N, eps, &rounded);
    linear_add_gpu(ctx, out, x, hidden, down, N, rounded);
}
#endif
#if COMPILED(PART_HEAD)
void scores_gpu(Context& ctx, float* scores, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue<float>(scores, W.out()), x, W, N);
}
void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W, int R) {
    pick_rows_gpu(ctx, picked, x, rows, R, W.in);
    const StoreEpilogue<float> epilogue(logits, W.out());
    if (W.format == Format::PLAIN || (R <= STREAM_TOKENS && !ctx.invariant))
        return product_gpu(ctx, epilogue, picked, W, R);
    const bf16* of = picked;
    if (Optional::many(ctx, epilogue, of, {}, W, R)) return;
    Optional::parts(ctx, W, false, [&](int first, int count, const bf16* weights) {
        tile_product(ctx, {picked, weights, R, W.in, count}, StoreEpilogue<float>(logits + first, W.out()));
    });
}
#endif

// ======================================================================================================== 11 Attention
// attention_kernel is for prompts (and training's forward), attention_decode_kernel for sequences of one new token
// (with qknorm_rope_kv in it: all of `attend`). If there are too few blocks for the GPU, the keys of a row are split:
// each block writes a part (the largest score, the sum of weights, the weighted sum of values), and parts are joined in
// order. G = H / K query heads share a KV head.

// ---- Shared parts: tiles, products of tiles, sums over the lanes of a row
// A tile in shared memory has rows of D numbers in chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8), so that
// the eight rows that an ldmatrix reads at a time are in different banks. A tile begins at a multiple of 128 bytes.
template <int D> struct HeadTile {
    static constexpr int ROW = D * 2, CHUNKS = D / 8; // bytes and chunks of a row
    __device__ static int at(int row, int chunk) { return row * ROW + ((chunk ^ row % 8) << 4); }
};
// The share of each of 128 threads in the copy of a tile: one chunk of every STEPth row.
template <int D> struct HeadRows {
    static constexpr int THREADS = 128, STEP = THREADS / HeadTile<D>::CHUNKS;
    const int row = threadIdx.x % THREADS / HeadTile<D>::CHUNKS, chunk = threadIdx.x % HeadTile<D>::CHUNKS;
};

// s += a b^T: each of 16 I rows of the warp's own with each of 16 J others, all of D numbers and in tiles. s[i][j] is
// rows 16 i .. of a by rows 8 j .. of b, in mma's layout.
template <int D, int I, int J>
__device__ __forceinline__ void multiply_rows(float (&s)[I][2 * J][4], uint32_t a_rows, uint32_t b_rows) {
    constexpr int ROW = HeadTile<D>::ROW;
    const int lane = threadIdx.x % 32;
    const uint32_t a_at = a_rows + HeadTile<D>::at(lane % 16, lane / 16);
    const uint32_t b_at = b_rows + HeadTile<D>::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    #pragma unroll
    for (int d = 0; d < D / 16; d++) {
        // Chunk 2d + c lies at (2d + c) ^ (r % 8) = ((c ^ r % 8) ^ 2 (d % 4)) + 8 (d / 4).
        const uint32_t flip = d % 4 << 5, far = d / 4 << 7;
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

// sum += w b: w (16 I, 16 J) as multiply_rows leaves its s, rounded to bf16 (s is the a operand as it lies); b is 16 J
// rows of D numbers of a tile.
template <int D, int I, int J>
__device__ __forceinline__ void add_weighted_rows(float (&sum)[I][D / 8][4], const float (&w)[I][2 * J][4],
                                                  uint32_t b_rows) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_at = b_rows + HeadTile<D>::at(lane % 16, lane / 16);
    #pragma unroll
    for (int k = 0; k < J; k++) {
        uint32_t a[I][4], b[4];
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const float* pair = &w[i][2 * k + e / 2][e % 2 * 2];
                a[i][e] = pack(pair[0], pair[1]);
            }
        #pragma unroll
        for (int j = 0; j < D / 16; j++) {
            ldmatrix_transposed(b, (b_at ^ (j % 4 << 5)) + (j / 4 << 7) + k * 16 * HeadTile<D>::ROW);
            #pragma unroll
            for (int i = 0; i < I; i++) {
                mma(sum[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(sum[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

// This lane's numbers of such an s: row of s[i][.][e], column of s[.][j][e]; f(number, i, j, e) for each.
__device__ __forceinline__ int score_row(int i, int e) { return i * 16 + e / 2 * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int score_column(int j, int e) { return j * 8 + threadIdx.x % 4 * 2 + e % 2; }
template <int I, int J, class F> __device__ __forceinline__ void each_score(float (&s)[I][J][4], F f) {
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int j = 0; j < J; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) f(s[i][j][e], i, j, e);
}
// Such an s of 16 rows, rounded, as the a operand of mma and wgmma.
template <int K>
__device__ __forceinline__ void round_weights(uint32_t (&weights)[K][4], const float (&s)[1][2 * K][4]) {
    #pragma unroll
    for (int i = 0; i < 4 * K; i++)
        weights[i / 4][i % 4] = pack(s[0][i / 2][i % 2 * 2], s[0][i / 2][i % 2 * 2 + 1]);
}
// Stores a quad's numbers of one of the two rows in x = s[i], lane / 4 (h = 0) or lane / 4 + 8 (1), times `by`, to
// `row`.
template <int J> __device__ __forceinline__ void store_row(bf16* row, const float (&x)[J][4], int h, float by) {
    const int quad = threadIdx.x % 4, column = quad / 2 * 4 + quad % 2 * 8;
    #pragma unroll
    for (int j = 0; j < J; j += 2) {
        const float4 y = four_columns(x[j], x[j + 1], h, 0xfu << (threadIdx.x % 32 - quad));
        store_four(row + j * 8 + column, make_float4(y.x * by, y.y * by, y.z * by, y.w * by));
    }
}

// ---- Attention for prompts: Book I's `attention` (Dao, "FlashAttention-2", 2023)
// A block of 128 threads owns 128 query rows: all G heads of 128 / G neighbouring tokens that share a KV head. Keys and
// values pass through shared memory, 64 at a time, in two stages. A warp owns 32 of the rows, with their scores and
// sums in registers; a thread has two columns of every eight, of four rows (see mma). The tokens of a tile may belong
// to several sequences: these are processed one after another; each computes all rows and keeps its own. If tiles are
// too few for the GPU, the keys are split: blocks that share a tile write parts, which attention_sum_kernel joins.
// Grid (K, tiles of tokens, splits); shared memory (128 + 4 x 64) rows of D numbers: 96 KB for D = 128, two blocks a
// multiprocessor. Bound by the tensor cores and by registers: for D = 128 all 255 are in use.
inline constexpr int QUERY_ROWS = 128, KEYS = 64;

struct AttentionArgs {
    bf16* out;        // (N,HD)
    float* lse;       // (N,H) or null
    const bf16* q;    // (N,HD)
    const bf16 *keys, *values; // one layer's cache
    Batch b;
    int first, H, K;  // tokens from `first` on
    float* partial;   // (N - first, H, splits, D + 2): see join_splits
};

// The rows that a block owns: row r is head kv G + r % G of token begin + r / G.
struct QueryTile {
    int kv, G, begin, end; // of tokens begin .. end - 1
    __device__ QueryTile(const AttentionArgs& p, int kv, int tile) : kv(kv), G(p.H / p.K) {
        const int tokens = QUERY_ROWS / G;
        begin = p.first + tile * tokens, end = min(p.b.N, begin + tokens);
    }
    __device__ int token(int r) const { return begin + r / G; }
    __device__ size_t row(int r, int n, int H) const { return (size_t)n * H + kv * G + r - (n - begin) * G; } // of q
};

template <int D>
__device__ __forceinline__ void load_queries(const AttentionArgs& p, const QueryTile& tile, uint32_t q_tile) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < QUERY_ROWS; r += mine.STEP) {
        const int n = tile.token(r);
        const bool there = n < tile.end;
        const bf16* from = there ? p.q + tile.row(r, n, p.H) * D + mine.chunk * 8 : p.q;
        copy_async(q_tile + HeadTile<D>::at(r, mine.chunk), from, there);
    }
}

// Passes keys and values of a sequence, up to position `to`, through two stages of shared memory. A tile has four
// pages, whose numbers are read a tile ahead of their copies.
template <int D> struct PassingPages {
    static constexpr int TILE = KEYS * HeadTile<D>::ROW;
    const AttentionArgs& p;
    const int* table; // the sequence's pages
    int kv, to;
    uint32_t k_tiles, v_tiles;
    HeadRows<D> mine;
    int page[KEYS / PAGE];

    __device__ __forceinline__ static uint32_t stage(int key0) { return key0 / KEYS % 2 * TILE; }
    __device__ __forceinline__ void next_pages(int key0) {
        #pragma unroll
        for (int j = 0; j < KEYS / PAGE; j++) page[j] = key0 + j * PAGE < to ? table[key0 / PAGE + j] : 0;
    }
    __device__ __forceinline__ void copy(int key0) const {
        #pragma unroll
        for (int i = 0; i < KEYS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP, tile = stage(key0) + HeadTile<D>::at(r, mine.chunk);
            // (r is of page r / PAGE, the same for all threads)
            const size_t at = kv_offset(page[i * mine.STEP / PAGE], kv, r % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(k_tiles + tile, p.keys + at, key0 + r < to);
            copy_async(v_tiles + tile, p.values + at, key0 + r < to);
        }
    }
};

// A lane's part of its warp's 32 rows: [i][h] belongs to row 16 i + 8 h + lane / 4; mixed has the layout of
// multiply_rows' s.
template <int D> struct RowSums {
    float maximum[2][2], sum[2][2] = {}, mixed[2][D / 8][4] = {};
    __device__ __forceinline__ RowSums() { // (a row may see no key of a split: infinities would make it NaN)
        #pragma unroll
        for (int i = 0; i < 2; i++) maximum[i][0] = maximum[i][1] = -1e30f;
    }
};

// The online softmax: scores s become weights 2^(scale (s - maximum)); earlier sums shrink to the new maximum. `sum`
// covers this lane's columns alone: the four lanes of a row are added at the end.
template <int D>
__device__ __forceinline__ void online_softmax(RowSums<D>& rows, float (&s)[2][KEYS / 8][4], float scale) {
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float& maximum = rows.maximum[i][h];
            float top = maximum;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
            top = quad_max(top);
            const float shrink = exp2_fast((maximum - top) * scale), base = top * scale;
            maximum = top;
            float weights = 0;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                #pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    weights += s[i][j][e] = exp2_fast(fmaf(s[i][j][e], scale, -base));
            rows.sum[i][h] = rows.sum[i][h] * shrink + weights;
            #pragma unroll
            for (int j = 0; j < D / 8; j++) rows.mixed[i][j][2 * h] *= shrink, rows.mixed[i][j][2 * h + 1] *= shrink;
        }
}

// Rows of tokens n0 .. n1 - 1 go to `out`, or, if the keys are split, to `partial`.
template <int D>
__device__ __forceinline__ void store_rows(const AttentionArgs& p, const QueryTile& tile, const RowSums<D>& rows,
                                           int n0, int n1, float scale) {
    const int first_row = threadIdx.x / 32 * 32;
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float total = quad_sum(rows.sum[i][h]), maximum = rows.maximum[i][h];
            const int r = first_row + score_row(i, 2 * h), n = tile.token(r);
            if (n < n0 || n >= n1) continue;
            const size_t row = tile.row(r, n, p.H);
            if (gridDim.z > 1) {
                float* part = p.partial + ((row - (size_t)p.first * p.H) * gridDim.z + blockIdx.z) * (D + 2);
                #pragma unroll
                for (int j = 0; j < D / 8; j++)
                    *(float2*)(part + score_column(j, 0)) = *(const float2*)&rows.mixed[i][j][2 * h];
                *(float2*)(part + D) = make_float2(maximum * scale, total);
                continue;
            }
            store_row(p.out + row * D, rows.mixed[i], h, 1 / total);
            if (p.lse) p.lse[row] = maximum / sqrtf((float)D) + logf(total); // all four lanes of a row
        }
}

// All rows of the tile with the keys of one sequence, whose tokens are n0 .. n1 - 1.
template <int D>
__device__ __forceinline__ void attend_sequence(const AttentionArgs& p, const QueryTile& tile, int n0, int n1,
                                                uint32_t q_tile) {
    constexpr int ROW = HeadTile<D>::ROW;
    const Batch& b = p.b;
    const float scale = LOG2E / sqrtf((float)D); // powers of 2, not of e
    const int longest = b.pos[n1 - 1] + 1, shortest = b.pos[n0] + 1; // keys that the last and the first token see
    const int key_tiles = (longest + KEYS - 1) / KEYS, splits = gridDim.z, split = blockIdx.z;
    const int from = key_tiles * split / splits * KEYS, to = min(longest, key_tiles * (split + 1) / splits * KEYS);
    const int first_row = threadIdx.x / 32 * 32; // of this warp
    int limit[2][2]; // keys that this lane's rows see; results of rows of other sequences are unused
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = tile.token(first_row + score_row(i, 2 * h));
            limit[i][h] = n >= n0 && n < n1 ? b.pos[n] + 1 : to;
        }
    const uint32_t k_tiles = q_tile + QUERY_ROWS * ROW, v_tiles = k_tiles + 2 * KEYS * ROW;
    PassingPages<D> pages = {p, b.pages + (size_t)b.seq[n0] * b.max_pages, tile.kv, to, k_tiles, v_tiles};
    RowSums<D> rows;
    __syncthreads(); // all have left the tiles of the sequence before this one
    pages.next_pages(from);
    pages.copy(from);
    commit_copies();
    pages.next_pages(from + KEYS);
    walk_ring<2, KEYS>(from, to, [&](int key0) { pages.copy(key0), pages.next_pages(key0 + KEYS); }, [&](int key0) {
        float s[2][KEYS / 8][4] = {};
        multiply_rows<D, 2, KEYS / 16>(s, q_tile + first_row * ROW, k_tiles + pages.stage(key0));
        if (key0 + KEYS > shortest)
            each_score(s, [&](float& x, int i, int j, int e) {
                if (key0 + score_column(j, e) >= limit[i][e / 2]) x = -INFINITY;
            });
        online_softmax(rows, s, scale);
        add_weighted_rows<D, 2, KEYS / 16>(rows.mixed, s, v_tiles + pages.stage(key0));
    });
    wait_for_copies<0>();
    store_rows(p, tile, rows, n0, n1, scale);
}

// attention: see "Attention for prompts".
template <int D> __global__ void __launch_bounds__(128, 2) attention_kernel(AttentionArgs p) {
    extern __shared__ __align__(128) uint4 tiles[]; // of queries; two stages of keys, two of values
    const QueryTile tile(p, blockIdx.x, gridDim.y - 1 - blockIdx.y); // later tokens see more keys: long blocks first
    wait_for_previous();
    load_queries<D>(p, tile, shared_address(tiles));
    for (int n0 = tile.begin, n1; n0 < tile.end; n0 = n1) {
        for (n1 = n0 + 1; n1 < tile.end && p.b.seq[n1] == p.b.seq[n0]; n1++) {}
        if (p.b.seq[n0] >= 0) attend_sequence<D>(p, tile, n0, n1, shared_address(tiles));
    }
}

inline constexpr int BLOCKS_A_SM = 2;  // blocks of attention_kernel that share a multiprocessor
// Keys that justify a block of their own: writing and joining parts takes 20 us.
inline constexpr int LEAST_KEYS = 256;

#endif // __CUDACC__
#ifdef QWEN3_KERNELS
// A row's attention over some of its keys, one number of it: the largest score, the sum of the weights 2^(score - top)
// and the sum of the values by them.
struct AttentionPart {
    float top, weights, value;
};
// Joins `count` parts: their common maximum, then their sums in order. get(i) is part i; eight are read at a time.
template <class Get> __device__ __forceinline__ AttentionPart join_parts(int count, Get get) {
    AttentionPart all = {-INFINITY, 0, 0};
    for (int first = 0; first < count; first += 8) {
        AttentionPart part[8];
        float top = all.top;
        GPU_UNROLL
        for (int i = 0; i < 8; i++) part[i] = get(min(first + i, count - 1));
        GPU_UNROLL
        for (int i = 0; i < 8; i++) top = fmaxf(top, part[i].top);
        if (first) {
            const float shrink = exp2_fast(all.top - top);
            all.value *= shrink, all.weights *= shrink;
        }
        all.top = top;
        GPU_UNROLL
        for (int i = 0; i < 8; i++)
            if (first + i < count) {
                const float shrink = exp2_fast(part[i].top - top);
                all.value += part[i].value * shrink, all.weights += part[i].weights * shrink;
            }
    }
    return all;
}
// Number d of a row whose keys were split. `parts` (splits, D + 2): D weighted sums of values, the largest score (of
// powers of 2), the sum of the weights. From the L2 cache: other blocks wrote them.
__device__ __forceinline__ float join_splits(const float* parts, int splits, int D, int d) {
    const AttentionPart all = join_parts(splits, [&](int split) {
        const float* part = parts + split * (D + 2);
        return AttentionPart{__ldcg(part + D), __ldcg(part + D + 1), __ldcg(part + d)};
    });
    return all.value / all.weights;
}

// ---- Attention for sequences of one new token: Book I's `attend` (Dao et al., "Flash-Decoding", 2023)
// qknorm_rope_kv and attention in one. A block has up to 8 query heads of a KV head, the rows of an mma, and every
// gridDim.x-th of a sequence's splits of SPLIT keys each. Its warps take a split's pages in turn. If several blocks
// share a sequence, the last one to arrive joins their parts in order. All keys and values but the newest token's are
// loaded before the previous kernel has ended. A warp's page is in registers (HeldPage) if there are few sequences,
// since a block that needs little shared memory starts beside the previous kernel. For many sequences it is in a ring
// of two stages in shared memory (RingPage): cp.async fills it with the next page while one is multiplied, and with
// whole lines, where loads into registers request halves.
//
// Layouts. No number moves between lanes. First product: keys are operand b; lane 4 g + t has eight numbers of keys g
// and g + 8, from 8 t on, of every 32. Its result are the scores of head g and of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
// Second product: their weights, rounded to bf16 as in prompts, are operand b; the lane has the values of the same four
// keys, eight numbers from 8 g on of every 64, and makes operands a of pairs of them.
//
// FP8. The cache's e4m3 numbers become half precision in registers, for which GPUs from sm_89 on have an instruction. q
// and the weights become it too, times powers of two that keep them in its range. The rows' factors go to scores and
// weights. All are powers of two: sums have the bits that this kernel gives for a bf16 cache of the same numbers,
// unless a number of q is below 2^-31 of the largest, or a weight below 2^-29 matters.
//
// Grid (blocks of a KV head of a sequence, H / heads, sequences). Bound by reading keys and values; with one short
// sequence, by latency.
inline constexpr int DECODE_ROWS = 8; // query heads of a block, at most

struct DecodeArgs {
    bf16* out;                           // (N,HD)
    bf16 *keys, *values;                 // one layer's cache
    const bf16 *qkv;                     // (N,(H+2K)D)
    const bf16 *q_weight, *k_weight;     // (D)
    const float* rope;                   // (positions, D/2, 2)
    Batch b;
    int H, K;
    float eps;
    float* partial;                      // (singles, H, splits, D + 2): see join_splits
    int* arrived;                        // (singles, H / heads), zero between kernels
};

template <int D> struct DecodeShared {
    __align__(16) uint16_t q[DECODE_ROWS][D];                // normalised and rotated; zeros where there is no head
    float q_factor[DECODE_ROWS];                             // FP8: a head is q times this
    // A head, in bf16 or in half precision. Pair 1 of four changes places with pair 2, so that a lane's eight numbers
    // are an operand a (see DecodePart::add).
    template <bool FP8> __device__ void put(const WarpHead<D>& head, int h) {
        float by = 1;
        if constexpr (FP8) { // makes the largest number 2^14 to 2^15
            float largest = 0;
            for (int k = 0; k < D / 64; k++) largest = fmaxf(largest, fmaxf(fabsf(head.u[k]), fabsf(head.v[k])));
            const int e = max((int)(__float_as_uint(warp_max(largest)) >> 23), 15);
            by = __uint_as_float((uint32_t)(268 - e) << 23);
            if (threadIdx.x % 32 == 0) q_factor[h] = __uint_as_float((uint32_t)(e - 14) << 23);
        }
        const auto place = [](int i) { return (i & ~6) | (i & 2) << 1 | (i & 4) >> 1; };
        const auto stored = [&](float x) {
            return FP8 ? (uint16_t)pack_half(to_acc(round_bf16(x)) * by, 0) : round_bf16(x).bits;
        };
        GPU_UNROLL
        for (int k = 0; k < D / 64; k++) {
            const int i = (int)threadIdx.x % 32 * (D / 64) + k;
            q[h][place(i)] = stored(head.u[k]), q[h][place(i + D / 2)] = stored(head.v[k]);
        }
    }
    float maximum[SPLIT / PAGE][DECODE_ROWS], sum[SPLIT / PAGE][DECODE_ROWS]; // of a warp's pages
    __align__(16) uint8_t new_key[2 * D], new_value[2 * D];  // the newest token's, as in the cache
    uint8_t exponents[2];
};

// The common part of the two places of a page: registers (HeldPage) and a ring in shared memory (RingPage). A place has
// WARPS a block, STAGES a warp, RING bytes of shared memory a warp. ask_for(k, ..) starts the load of a page, whose
// first `count` rows exist, to stage k; FP8: exponents follow `exponents_at` bytes behind the first row. wait(k) waits
// for it; insert adds one row; key(j, i) and value(r, c) are eight numbers of a lane, the keys as operand b;
// exponent(r, value) is the byte of an FP8 row.
template <int D, bool FP8> struct DecodePage {
    static constexpr int SIZE = FP8 ? 1 : 2, ROW = D * SIZE; // bytes of a number and of a row
    using Chunk = std::conditional_t<FP8, uint2, uint4>;      // eight numbers
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __device__ int key_of(int r) const { return r / 2 * 8 + 2 * t + r % 2; } // of a lane's scores
    __device__ static uint4 pairs(const Chunk& x) {
        if constexpr (!FP8) return x;
        else {
            const uint2 a = half_e4m3(x.x), b = half_e4m3(x.y);
            return {a.x, a.y, b.x, b.y};
        }
    }
    __device__ static uint2 two_pairs(const Chunk& a, const Chunk& b, int e) { // numbers e and e + 1 of both; e is even
        if constexpr (FP8)
            return half_e4m3(__byte_perm(e < 4 ? a.x : a.y, e < 4 ? b.x : b.y, e % 4 ? 0x7362 : 0x5140));
        else {
            const uint32_t of_a = e < 2 ? a.x : e < 4 ? a.y : e < 6 ? a.z : a.w;
            const uint32_t of_b = e < 2 ? b.x : e < 4 ? b.y : e < 6 ? b.z : b.w;
            return {__byte_perm(of_a, of_b, 0x5410), __byte_perm(of_a, of_b, 0x7632)};
        }
    }
    __device__ static void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
        FP8 ? mma_half(d, a0, a1, a2, a3, b0, b1) : mma(d, a0, a1, a2, a3, b0, b1);
    }
    __device__ static const Chunk& chunk(const uint8_t* row, int column) {
        return *(const Chunk*)(row + column * SIZE);
    }
};

template <int D, bool FP8> struct HeldPage : DecodePage<D, FP8> {
    using Base = DecodePage<D, FP8>;
    using Base::key_of, Base::lane, Base::g, Base::t, Base::ROW, Base::chunk, Base::pairs;
    static constexpr int WARPS = SPLIT / PAGE, STAGES = 1, RING = 0, BLOCKS = 2;
    typename Base::Chunk k[2][D / 32] = {}, v[4][D / 64] = {};
    int exponents[2][4] = {}; // FP8: the bytes of KVRow of keys and values key_of(r)
    __device__ explicit HeldPage(uint8_t*) {}

    __device__ __forceinline__ void ask_for(int, const uint8_t* keys, const uint8_t* values, int exponents_at,
                                            int count) {
        GPU_UNROLL
        for (int j = 0; j < 2; j++)
            GPU_UNROLL
            for (int i = 0; i < D / 32; i++)
                if (8 * j + g < count) k[j][i] = chunk(keys + (8 * j + g) * ROW, 32 * i + 8 * t);
        GPU_UNROLL
        for (int r = 0; r < 4; r++)
            GPU_UNROLL
            for (int c = 0; c < D / 64; c++)
                if (key_of(r) < count) v[r][c] = chunk(values + key_of(r) * ROW, 64 * c + 8 * g);
        GPU_UNROLL
        for (int r = 0; r < 4 && FP8; r += 2) // two keys are neighbours
            if (key_of(r) < count) {
                const int two = *(const uint16_t*)(keys + exponents_at + key_of(r));
                const int of_values = *(const uint16_t*)(values + exponents_at + key_of(r));
                exponents[0][r] = two & 255, exponents[0][r + 1] = two >> 8;
                exponents[1][r] = of_values & 255, exponents[1][r + 1] = of_values >> 8;
            }
    }
    __device__ void wait(int) { __syncwarp(); } // (loads and insert have branches)
    __device__ void insert(const DecodeShared<D>& shared, int row) {
        GPU_UNROLL
        for (int j = 0; j < 2; j++)
            GPU_UNROLL
            for (int i = 0; i < D / 32; i++)
                if (8 * j + g == row) k[j][i] = chunk(shared.new_key, 32 * i + 8 * t);
        GPU_UNROLL
        for (int r = 0; r < 4; r++) {
            if (key_of(r) != row) continue;
            GPU_UNROLL
            for (int c = 0; c < D / 64; c++) v[r][c] = chunk(shared.new_value, 64 * c + 8 * g);
            exponents[0][r] = shared.exponents[0], exponents[1][r] = shared.exponents[1];
        }
        __syncwarp();
    }
    __device__ uint4 key(int j, int i) const { return pairs(k[j][i]); }
    __device__ const typename Base::Chunk& value(int r, int c) const { return v[r][c]; }
    __device__ int exponent(int r, bool value) const { return exponents[value][r]; }
};

// Rows of D numbers in chunks of 16 bytes, swizzled so that the rows that a load touches at once lie in different
// banks; an FP8 cache's exponents behind the stages. Stages begin at multiples of 128 bytes: a GPU fetches a line twice
// if it is copied to parts of two lines of shared memory.
template <int D, bool FP8> struct RingPage : DecodePage<D, FP8> {
    using Base = DecodePage<D, FP8>;
    using Base::key_of, Base::lane, Base::g, Base::t, Base::SIZE, Base::ROW, Base::chunk, Base::pairs;
    static constexpr int WARPS = 4, STAGES = 2, CHUNKS = ROW / 16, BLOCKS = FP8 ? 4 : 3;
    static constexpr int VALUES = PAGE * ROW, BYTES = 2 * VALUES, EXPONENTS = STAGES * BYTES; // where they begin
    static constexpr int RING = EXPONENTS + (FP8 ? 128 : 0); // (whole lines)
    static_assert(2 * PAGE * STAGES <= 128);
    static_assert(RING >= DECODE_ROWS * (D + 8) * 4, "a ring has room for a warp's sums");
    uint8_t *const ring, *stage, *exponents;
    // Places in a stage, computed once: of the lane's first copy, and of eight numbers of rows below 8 (flip does not
    // change 8 rows further).
    int copied, key_at[D / 32], value_at[2][D / 64];
    __device__ explicit RingPage(uint8_t* at)
        : ring(at), stage(at), exponents(at), copied(chunk_at(lane / CHUNKS, lane % CHUNKS)) {
        settle(copied);
        const auto eight = [](int row, int column) {
            return chunk_at(row, column * SIZE / 16) + column * SIZE % 16;
        };
        GPU_UNROLL
        for (int i = 0; i < D / 32; i++) settle(key_at[i] = eight(g, 32 * i + 8 * t));
        GPU_UNROLL
        for (int r = 0; r < 2; r++)
            GPU_UNROLL
            for (int c = 0; c < D / 64; c++) settle(value_at[r][c] = eight(2 * t + r, 64 * c + 8 * g));
    }

    __device__ static constexpr int flip(int row) {
        return (FP8 ? 2 * (row % 4 ^ row / 4 % 2) : (row & 6) ^ row % 2 * 4) % CHUNKS;
    }
    __device__ static int chunk_at(int row, int chunk) { return row * ROW + (chunk ^ flip(row)) * 16; }
    // Rows past `count` become zeros. A step of the loops copies 512 bytes, `rows` rows.
    __device__ __forceinline__ void ask_for(int k, const uint8_t* keys, const uint8_t* values, int exponents_at,
                                            int count) const {
        constexpr int rows = 32 / CHUNKS;
        const uint32_t to = shared_address(ring + k * BYTES);
        const int left = count - lane / CHUNKS;
        GPU_UNROLL
        for (int v = 0; v < 2; v++) {
            const uint8_t* from = (v ? values : keys) + lane * 16;
            settle(from);
            GPU_UNROLL
            for (int c = 0; c < PAGE / rows; c++) // (flip is linear)
                copy_async(to + (copied ^ flip(c * rows) * 16) + v * VALUES + c * 512, from + c * 512, left > c * rows);
        }
        if (FP8 && lane < 2)
            copy_async(shared_address(ring + EXPONENTS + k * 2 * PAGE) + lane * PAGE,
                       (lane ? values : keys) + exponents_at, count > 0);
    }
    __device__ void wait(int k) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        stage = ring + k * BYTES, exponents = ring + EXPONENTS + k * 2 * PAGE;
    }
    __device__ void insert(const DecodeShared<D>& shared, int row) {
        if (lane < 2 * CHUNKS) {
            const bool value = lane >= CHUNKS;
            const int chunk = lane % CHUNKS;
            *(uint4*)(stage + value * VALUES + chunk_at(row, chunk)) =
                *(const uint4*)((value ? shared.new_value : shared.new_key) + chunk * 16);
        }
        if (FP8 && lane < 2) exponents[lane * PAGE + row] = shared.exponents[lane];
        __syncwarp();
    }
    __device__ uint4 key(int j, int i) const { return pairs(chunk(stage + key_at[i] + j * 8 * ROW, 0)); }
    __device__ const typename Base::Chunk& value(int r, int c) const {
        return chunk(stage + VALUES + value_at[r % 2][c] + r / 2 * 8 * ROW, 0);
    }
    __device__ int exponent(int r, bool value) const { return exponents[value * PAGE + key_of(r)]; }
};

// The part of a warp's pages so far: of head g the largest score and the sum of the weights; the weighted sums of the
// values: y[c][i] holds numbers 64 c + 8 g + 2 i of heads 2 t and 2 t + 1, then their next numbers.
template <int D, bool FP8, class Page> struct DecodePart {
    float top = -INFINITY, sum = 0, y[D / 64][4][4] = {};
    int unit = 28; // FP8: the largest exponent of a value so far (kv_exponent has a least); y is over 2^(unit - 143)

    // The first `count` keys of the page count: one at least.
    __device__ __forceinline__ void add(const DecodeShared<D>& shared, const Page& page, int count) {
        // Scores. Rows g and g + 8 of operand a are two halves of head g's numbers: a product with the keys' first half
        // leaves row g, one with their second half row g + 8. The other rows are not used.
        float s[2][4] = {}, more_s[2][4] = {};
        GPU_UNROLL
        for (int i = 0; i < D / 32; i++) {
            const uint4 q = *(const uint4*)(shared.q[page.g] + 32 * i + 8 * page.t);
            GPU_UNROLL
            for (int j = 0; j < 2; j++) {
                const uint4 key = page.key(j, i);
                Page::multiply(s[j], q.x, q.y, q.z, q.w, key.x, key.y);
                Page::multiply(more_s[j], q.x, q.y, q.z, q.w, key.z, key.w);
            }
        }
        const float scale = LOG2E / sqrtf((float)D) * (FP8 ? shared.q_factor[page.g] : 1); // scores are powers of 2
        float weights[4], largest = top, more = 0;
        GPU_UNROLL
        for (int r = 0; r < 4; r++) {
            const float score = (s[r / 2][r % 2] + more_s[r / 2][2 + r % 2]) * scale;
            const float factor = FP8 ? fp8_factor(page.exponent(r, false)) : 1;
            weights[r] = page.key_of(r) < count ? score * factor : -INFINITY;
            largest = fmaxf(largest, weights[r]);
        }
        largest = quad_max(largest);
        GPU_UNROLL
        for (int r = 0; r < 4; r++) weights[r] = exp2_fast(weights[r] - largest), more += weights[r];
        const float shrink = exp2_fast(top - largest);
        top = largest, sum = fmaf(sum, shrink, quad_sum(more));
        uint32_t first = pack(weights[0], weights[1]), second = pack(weights[2], weights[3]);
        float rescale = shrink;
        if constexpr (FP8) rescale *= take_factors(first, second, page, count);
        if (__any_sync(~0u, rescale < 1)) { // (rare)
            const float by[2] = {__shfl_sync(~0u, rescale, 8 * page.t), __shfl_sync(~0u, rescale, 8 * page.t + 4)};
            GPU_UNROLL
            for (int e = 0; e < D / 4; e++) y[e / 16][e / 4 % 4][e % 4] *= by[e % 2];
        }
        // Operand b: weights of heads. Operand a: the transposed values, rows g and g + 8 of it are two neighbours.
        GPU_UNROLL
        for (int c = 0; c < D / 64; c++) {
            typename Page::Chunk rows[4];
            GPU_UNROLL
            for (int r = 0; r < 4; r++) rows[r] = page.value(r, c);
            GPU_UNROLL
            for (int e = 0; e < 8; e += 2) {
                const uint2 a = Page::two_pairs(rows[0], rows[1], e), b = Page::two_pairs(rows[2], rows[3], e);
                Page::multiply(y[c][e / 2], a.x, a.y, b.x, b.y, first, second);
            }
        }
    }
    // Weights (bf16) times the values' factors, in `unit`, as half precision. Returns the factor of a new unit.
    __device__ __forceinline__ float take_factors(uint32_t& first, uint32_t& second, const Page& page, int count) {
        int e[4], most = unit;
        GPU_UNROLL
        for (int r = 0; r < 4; r++) {
            e[r] = page.key_of(r) < count ? page.exponent(r, true) : 1; // (whose weight is zero)
            most = max(most, e[r]);
        }
        most = (int)quad_max((float)most);
        const auto factor = [&](int r) {
            return e[r] ? __uint_as_float((uint32_t)max(142 + e[r] - most, 0) << 23) : NAN;
        };
        first = pack_half(low(first) * factor(0), high(first) * factor(1));
        second = pack_half(low(second) * factor(2), high(second) * factor(3));
        const float rescale = __uint_as_float((uint32_t)max(127 + unit - most, 0) << 23);
        unit = most;
        return rescale;
    }
    // To shared memory: heads are D + 8 numbers apart.
    __device__ __forceinline__ void store(DecodeShared<D>& shared, const Page& page, float* sums, int heads) const {
        const int warp = threadIdx.x / 32, g = page.g, t = page.t;
        if (t == 0 && g < heads) shared.maximum[warp][g] = top, shared.sum[warp][g] = sum;
        const float by = FP8 ? fp8_factor(unit) * 0x1p-15f : 1;
        GPU_UNROLL
        for (int h = 0; h < 2; h++)
            GPU_UNROLL
            for (int e = 0; e < D / 8 && 2 * t + h < heads; e += 4) {
                const float(&from)[4][4] = y[e / 8];
                const int i = e % 8 / 2;
                store_four(sums + (2 * t + h) * (D + 8) + e / 8 * 64 + 8 * g + e % 8,
                           make_float4(from[i][h] * by, from[i][2 + h] * by, from[i + 1][h] * by,
                                       from[i + 1][2 + h] * by));
            }
    }
};

// The newest token's key (one warp) or value (another) to shared memory, and to the cache if no other block does it.
template <int D, bool FP8>
__device__ __forceinline__ void take_newest(const DecodeArgs& p, DecodeShared<D>& shared, const bf16* from, int slot,
                                            int kv, bool key, const WarpAngles<D / 64>& angles, bool writes) {
    WarpHead<D> head, weights;
    head.load(from), weights.load(p.k_weight);
    if (key) head.norm_rope(weights, angles, p.eps);
    uint8_t* const row = key ? shared.new_key : shared.new_value;
    bf16* const cache = key ? p.keys : p.values;
    if constexpr (FP8) {
        const WarpFp8Head<D> rounded(head);
        rounded.store(row, shared.exponents + !key);
        if (writes) rounded.store(cache, slot, kv, p.K);
    } else {
        head.store((bf16*)row);
        if (writes) head.store(cache + kv_offset(slot / PAGE, kv, slot % PAGE, p.K, D));
    }
}

// attend: see "Attention for sequences of one new token".
template <int D, bool FP8, class Page>
__global__ void __launch_bounds__(32 * Page::WARPS, Page::BLOCKS) attention_decode_kernel(DecodeArgs p, int heads) {
    __shared__ DecodeShared<D> shared;
    SHARED_FLOATS(rings); // the warps'; then their sums
    // No kernel of this forward writes the data read before the wait: positions, sequences and pages belong to the
    // batch, older keys and values to an earlier forward (see launch_kernel).
    const Batch& b = p.b;
    const int h0 = blockIdx.y * heads, n = blockIdx.z, kv = h0 / (p.H / p.K), warp = threadIdx.x / 32;
    // Pages go to the blocks in turn, as many at a time as a block has stages. This warp's are `first`, then WARPS
    // further for the next of its stages, and `step` further for the same stage.
    constexpr int WARPS = Page::WARPS, STAGES = Page::STAGES, DEALT = WARPS * STAGES;
    const int seq = b.seq[n], pos = b.pos[n], pages = pos / PAGE + 1;
    const int blocks = min((pages - 1) / DEALT + 1, (int)gridDim.x);
    const int first = (int)blockIdx.x * DEALT + warp, step = (int)gridDim.x * DEALT;
    if (!Page::RING && seq >= 0 && pages > step) __trap(); // keys that no block owns: an error
    if (seq < 0 || (int)blockIdx.x >= blocks) {
        let_next_start();
        wait_for_previous();
        return;
    }
    const int* table = b.pages + (size_t)seq * b.max_pages;
    const auto place = [&](int number) { return number < pages ? table[number] : 0; }; // of the page in the cache
    Page page((uint8_t*)rings + warp * Page::RING);
    const auto ask_for = [&](int k, int number, int place) { // without the newest token
        const size_t at = FP8 ? fp8_rows(place, kv, p.K, D) : kv_offset(place, kv, 0, p.K, D) * sizeof(bf16);
        if (number < pages)
            page.ask_for(k, (const uint8_t*)p.keys + at, (const uint8_t*)p.values + at, fp8_exponents(kv, p.K, D),
                         pos - number * PAGE);
        commit_copies();
    };
    int next[STAGES]; // places of the pages after those in flight
    GPU_UNROLL
    for (int k = 0; k < STAGES; k++) next[k] = place(first + k * WARPS);
    GPU_UNROLL
    for (int k = 0; k < STAGES; k++) {
        ask_for(k, first + k * WARPS, next[k]);
        next[k] = place(first + k * WARPS + step);
    }
    for (int i = threadIdx.x; i < (DECODE_ROWS - heads) * D / 8; i += blockDim.x)
        ((uint4*)shared.q[heads])[i] = make_uint4(0, 0, 0, 0);
    const WarpAngles<D / 64> angles(p.rope + (size_t)pos * D);
    WarpHead<D> weights;
    weights.load(p.q_weight);
    let_next_start();
    wait_for_previous();

    // Heads of q, and the newest token's key and value; a warp takes these in turn.
    const bf16* row = p.qkv + (size_t)n * (p.H + 2 * p.K) * D;
    const int newest = (pages - 1) / DEALT % (int)gridDim.x == (int)blockIdx.x ? 2 : 0;
    for (int h = warp; h < heads + newest; h += WARPS)
        if (h < heads) {
            WarpHead<D> head;
            head.load(row + (size_t)(h0 + h) * D);
            head.norm_rope(weights, angles, p.eps);
            shared.template put<FP8>(head, h);
        } else {
            const bool key = h == heads, writes = h0 % (p.H / p.K) == 0;
            take_newest<D, FP8>(p, shared, row + (size_t)(p.H + (key ? 0 : p.K) + kv) * D, b.slot[n], kv, key, angles,
                                writes);
        }
    __syncthreads();
    DecodePart<D, FP8, Page> part;
    for (int begin = first; begin < pages; begin = Page::RING ? begin + step : pages) { // (Held: a block a split)
        GPU_UNROLL
        for (int k = 0; k < STAGES; k++) {
            const int number = begin + k * WARPS;
            if (number >= pages) break;
            page.wait(k);
            if (number == pages - 1) page.insert(shared, pos % PAGE);
            part.add(shared, page, pos + 1 - number * PAGE);
            if (!Page::RING) break;
            __syncwarp(); // all have read it
            ask_for(k, number + step, next[k]);
            next[k] = place(number + 2 * step);
        }
    }
    const int apart = Page::RING ? Page::RING / 4 : heads * (D + 8); // numbers from one warp's sums to the next
    part.store(shared, page, rings + warp * apart, heads);
    __syncthreads();
    // The warps' parts, a thread a number: to `out` or, where the sequence has several blocks, to `parts`.
    bf16* out = p.out + ((size_t)n * p.H + h0) * D;
    float* parts = p.partial + ((size_t)n * p.H + h0) * gridDim.x * (D + 2);
    for (int o = threadIdx.x; o < heads * D; o += blockDim.x) {
        const int h = o / D, d = o % D;
        const AttentionPart all = join_parts(WARPS, [&](int w) {
            return AttentionPart{shared.maximum[w][h], shared.sum[w][h], rings[w * apart + h * (D + 8) + d]};
        });
        if (blocks == 1) out[o] = round_bf16(all.value / all.weights);
        else {
            float* to = parts + ((size_t)h * gridDim.x + blockIdx.x) * (D + 2);
            to[d] = all.value;
            if (d == 0) to[D] = all.top, to[D + 1] = all.weights;
        }
    }
    if (blocks == 1 || !last_to_arrive(p.arrived + (size_t)n * gridDim.y + blockIdx.y, blocks)) return;
    for (int o = threadIdx.x; o < heads * D; o += blockDim.x)
        out[o] = round_bf16(join_splits(parts + (size_t)(o / D) * gridDim.x * (D + 2), blocks, D, o % D));
}
#endif // QWEN3_KERNELS
#ifdef __CUDACC__

// ---- Attention, launched.
#if COMPILED(PART_PROMPT)
// attention's last step with split keys: joins the parts. A block a head of a token, D threads, a thread a number of
// it. Bound by launching.
__global__ void attention_sum_kernel(bf16* out, const float* partial, const int* seq, int first, int H, int splits) {
    wait_for_previous();
    const size_t row = blockIdx.x, D = blockDim.x;
    if (seq[first + row / H] < 0) return;
    const float sum = join_splits(partial + row * splits * (D + 2), splits, (int)D, threadIdx.x);
    out[((size_t)first * H + row) * D + threadIdx.x] = round_bf16(sum);
}

void attention_gpu(Context& ctx, bf16* out, float* lse, const bf16* q, const LayerCache<bf16>& cache, const Batch& b,
                   const HeadShape& shape, int first) {
    const int H = shape.H, K = shape.K, D = shape.D;
    const AttentionArgs p = {out, lse, q, cache.keys, cache.values, b, first, H, K, ctx.gpu->attention};
    int splits = Optional::attention(ctx, p, D);
    if (!splits) {
        const int tokens = QUERY_ROWS / (H / K), tiles = (b.N - first + tokens - 1) / tokens;
        const int wanted = std::min(BLOCKS_A_SM * ctx.gpu->sms / (tiles * K), b.longest / LEAST_KEYS);
        splits = ctx.invariant || lse ? 1 : std::max(1, wanted);
        const dim3 grid((unsigned)K, (unsigned)tiles, (unsigned)splits);
        const size_t shared = (size_t)(QUERY_ROWS + 4 * KEYS) * D * sizeof(bf16);
        launch(ctx, D == 128 ? attention_kernel<128> : attention_kernel<64>, grid, 128, shared, p);
    }
    if (splits == 1) return;
    const dim3 rows((unsigned)((b.N - first) * H));
    launch(ctx, attention_sum_kernel, rows, D, 0, out, p.partial, b.seq, first, H, splits);
}
#endif
// b.splits: of the longest sequence. A block takes more than one split where sequences fill the GPU by themselves.
void attention_decode_gpu(Context& ctx, const DecodeArgs& p, int singles, int D);
#if COMPILED(PART_DECODE)
void attention_decode_gpu(Context& ctx, const DecodeArgs& p, int singles, int D) {
    if (p.b.splits < 1) DIE("attention_decode: %d splits", p.b.splits);
    const int G = p.H / p.K;
    int heads = std::min(G, DECODE_ROWS);
    while (G % heads) heads--;
    const int others = singles * p.H / heads, sms = ctx.gpu->sms;
    const auto launch_pages = [&](auto kernel, auto* page, int blocks) {
        using Page = std::remove_pointer_t<decltype(page)>;
        const size_t shared = (size_t)Page::WARPS * std::max(Page::RING, heads * (D + 8) * 4);
        const dim3 grid((unsigned)blocks, (unsigned)(p.H / heads), (unsigned)singles);
        launch(ctx, kernel, grid, 32 * Page::WARPS, shared, p, heads);
    };
    const auto with = [&](auto size, auto fp8) {
        using Held = HeldPage<size, fp8>;
        using Ring = RingPage<size, fp8>;
        if (others * p.b.splits <= 8 * sms)
            launch_pages(attention_decode_kernel<size, fp8, Held>, (Held*)nullptr, p.b.splits);
        else launch_pages(attention_decode_kernel<size, fp8, Ring>, (Ring*)nullptr,
                          std::min(p.b.splits, (3 * sms + others - 1) / others));
    };
    const auto with_size = [&](auto fp8) {
        D == 128 ? with(std::integral_constant<int, 128>(), fp8) : with(std::integral_constant<int, 64>(), fp8);
    };
    p.b.fp8 ? with_size(std::true_type()) : with_size(std::false_type());
}
#endif
#if COMPILED(PART_ATTEND)
void attend_gpu(Context& ctx, bf16* out, float* lse, bf16* q, const LayerCache<bf16>& cache, const bf16* qkv,
                const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape) {
    const int singles = ctx.invariant || lse ? 0 : b.singles; // attention_decode_kernel has no lse
    if (singles) {
        const DecodeArgs p = {out, cache.keys, cache.values, qkv, norms.q, norms.k, norms.rope, b, shape.H, shape.K,
                              shape.eps, ctx.gpu->attention, ctx.gpu->attention_arrived};
        attention_decode_gpu(ctx, p, singles, shape.D);
    }
    if (singles == b.N) return;
    qknorm_rope_kv_gpu(ctx, q, cache, qkv, norms, b, shape, singles);
    attention_gpu(ctx, out, lse, q, b.fp8 ? widen_pages_gpu(ctx, cache, b, shape, singles) : cache, b, shape, singles);
}
#endif

// =================================================================================================== 12 Sampled logits
// The head's product of a decoding step; model/sample.cu samples from its logits. Parameters, counts and the batch of
// the next step are in the GPU's memory, so that one graph of a step (model/graph.h) serves them all;
// model/draw_ahead.cu launches it.
#endif // __CUDACC__
#ifdef QWEN3_KERNELS
// A larger key is likelier: the logit, then the lower id.
__device__ inline unsigned long long draw_key(float logit, int id) {
    const uint32_t u = __float_as_uint(logit + 0.f); // -0 becomes 0
    return (unsigned long long)(u >> 31 ? ~u : u | 0x80000000) << 32 | (uint32_t)~id;
}

// The sampled token becomes the next step's batch, is counted and stored, and goes to the host.
__device__ __forceinline__ void publish(const DrawState& state, int row, size_t V, int answer) {
    const int pos = state.pos[row] + 1, page = pos / PAGE, seq = state.seq[row];
    state.token[row] = answer;
    state.pos[row] = pos;
    if (page < state.max_pages)
        state.slot[row] = state.pages[(size_t)seq * state.max_pages + page] * PAGE + pos % PAGE;
    if (state.seen) state.seen[seq * V + answer]++;
    if (state.last) state.last[seq] = answer;
    if (state.ring) state.ring[(size_t)row * state.ring_size + pos % state.ring_size] = answer + 1;
}
#endif // QWEN3_KERNELS
#ifdef __CUDACC__

// ---- The head's product: logits with the penalties, and the likeliest id of each block's rows. `best` has room for
// BEST_BLOCKS blocks, and sample_kernel has a thread for each of them: MOST_BLOCKS holds stream_product to that.
struct DrawEpilogue : Epilogue {
    static constexpr int MOST_BLOCKS = BEST_BLOCKS;
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
    __device__ void one(bool inside, int n, int r, float y, float) {
        unsigned long long key = 0;
        if (inside) {
            const Sampling& how = draw[n].how;
            const uint32_t s = seen ? seen[n * V + r] : 0;
            out[n * V + r] = y = penalized(y, how, s);
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
#if COMPILED(PART_DRAW_HEAD)
RowsDealt draw_head_gpu(Context& ctx, float* logits, const Draw* draw, const uint32_t* seen, unsigned long long* best,
                        const bf16* x, const int* rows, const Linear<bf16>& W, int R) {
    const DrawEpilogue epilogue = {{}, logits, (size_t)W.out(), draw, seen, best};
    if (const RowsDealt dealt = Optional::few(ctx, epilogue, x, rows, W, R); dealt.blocks) return dealt;
    return stream_product(ctx, StreamArgs::of(x, W.w[0], R, W.in, W.out(), rows), epilogue);
}
#endif

// ========================================================================================================= 13 Backward
// In the order of Book I's backward ops. dx = dy W, dW = dy^T x and the head's products are tile_product's, in other
// layouts and with epilogues of their own.

// ---- head_loss. The epilogue leaves parts of a softmax for cross_entropy_kernel, and the weights.
// With PARTS the epilogue's `four` receives w = e^(y - from(n)) of the sums y of token n; its part() receives, for rows
// 64 piece .. 64 piece + 63, the largest y and the sum of w: from one thread, n and 64 piece not past the end. And
// chosen(n, y) is called once, with the sum of row chosen_row(n). A quad of lanes has whole pieces of 64 rows; `first`
// is the first row of the warp's part.
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
struct LossEpilogue : Epilogue {
    static constexpr bool PARTS = true;
    bf16* weights;      // (R,ld), or null
    float2* parts;      // (R,pieces)
    float* right;       // (R)
    const int* target;  // (R)
    const float* since; // (R)
    const int* again;   // null: the first time
    size_t ld, pieces;
    int first; // of the head's rows
    __device__ bool skipped() const {
        if (again) wait_for_previous();
        return again && !*again;
    }
    __device__ float from(int n) const { return again ? since[n] : 0; }
    __device__ void part(int n, int piece, float largest, float sum) { parts[n * pieces + piece] = {largest, sum}; }
    __device__ int chosen_row(int n) const { return target[n] - first; }
    __device__ void chosen(int n, float y) { right[n] = y; }
    static constexpr int OUTPUTS = 1;
    BOTH Output<bf16> output(int) const { return {weights, ld}; }
    template <class Put> __device__ void values(const float4& y, const float4&, Put put) { put(0, y); }
    __device__ void four(int n, int r, const float4& y, const float4& second) { put_values(*this, n, r, y, second); }
};

#if COMPILED(PART_LOSS)
// ---- cross_entropy. A block of 256 threads a row; a thread owns every 256th part. Bound by latency. For each 64
// logits of the row `parts` has the largest, and the sum of w = e^(logit - from); `weights` (R,V) holds w, or is null;
// loss[r] is the target's logit on entry. The gradient of logit v is factor (w[v] - [v = target] sum w): the target's
// weight alone changes here, and head_backward multiplies by the factor. `from` is zero at first: if w of some row
// might leave the range of a float, all rows are computed `again`, this one from its largest logit on.
__global__ void __launch_bounds__(256) cross_entropy_kernel(float* loss, bf16* weights, float* factor, float* from,
                                                            int* again, const float2* parts, int pieces,
                                                            const int* target, float scale, const float* by, int V,
                                                            bool second) {
    __shared__ float tops[8], sums[8];
    let_next_start();
    wait_for_previous();
    if (second && !*again) return;
    const int r = blockIdx.x, warp = threadIdx.x / 32;
    parts += (size_t)r * pieces;
    float top = -1e30f, sum = 0;
    for (int i = threadIdx.x; i < pieces; i += 256) top = fmaxf(top, parts[i].x), sum += parts[i].y;
    sum = warp_sum(sum);
    for (int lane = 16; lane; lane /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lane));
    if (threadIdx.x % 32 == 0) tops[warp] = top, sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < 8; w++) top = fmaxf(top, tops[w]), sum += sums[w];
    const float since = second ? from[r] : 0, right = loss[r];
    if (!second) {
        const bool far = !(fabsf(top) < 60); // (e^60 = 1e26)
        from[r] = far ? top : 0;
        if (far) *again = 1;
    }
    loss[r] = logf(sum) + since - right;
    if (!weights) return;
    factor[r] = (by ? scale * by[r] : scale) / sum;
    weights[(size_t)r * V + target[r]] = round_bf16(exp2_fast((right - since) * LOG2E) - sum);
}

// ---- add_losses. One block of 1,024 threads, a thread every 1,024th loss. Bound by latency.
__global__ void __launch_bounds__(1024) add_losses_kernel(double* total, const float* loss, int R) {
    let_next_start();
    wait_for_previous();
    double sum = 0;
    for (int r = threadIdx.x; r < R; r += 1024) sum += loss[r];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}
void add_losses_gpu(Context& ctx, double* total, const float* loss, int R) {
    launch(ctx, add_losses_kernel, 1, 1024, 0, total, loss, R);
}

// ---- scale_rows. A block of 256 threads a row, a thread every 256th number. Bound by memory bandwidth.
__global__ void __launch_bounds__(256) scale_rows_kernel(bf16* x, size_t ld, const float* by, int n) {
    let_next_start();
    wait_for_previous();
    bf16* row = x + blockIdx.x * ld;
    const float scale = by[blockIdx.x];
    for (int i = threadIdx.x; i < n; i += 256) row[i] = round_bf16(to_acc(row[i]) * scale);
}
void scale_rows_gpu(Context& ctx, bf16* x, size_t ld, const float* by, int R, int n) {
    launch(ctx, scale_rows_kernel, R, 256, 0, x, ld, by, n);
}

// Always in tiles of 128: their epilogue computes the softmax's parts. Logits do not leave the chip; their weights in
// the softmax do, if their gradients are requested: in `logits`, as bf16 (R,V), its only contents.
void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* factor, float* logits, bf16* picked, float* parts,
                   const bf16* x, const LossRows<float>& of, const Linear<bf16>& W) {
    const int R = of.R, V = W.out(), pieces = (V + 63) / 64;
    float2* const of_64 = (float2*)parts;
    float* const from = parts + (size_t)R * pieces * 2;
    int* const again = (int*)from + R;
    bf16* const weights = dlogits ? (bf16*)logits : nullptr;
    clear(ctx, again, 1);
    pick_rows_gpu(ctx, picked, x, of.rows, R, W.in);
    for (bool second : {false, true}) {
        Optional::parts(ctx, W, false, [&](int first, int count, const bf16* part) {
            const LossEpilogue epilogue = {{}, weights ? weights + first : nullptr, of_64 + first / 64, loss, of.target,
                                           from, second ? again : nullptr, (size_t)V, (size_t)pieces, first};
            const TileArgs p = {picked, part, R, W.in, count};
            if (!Optional::tiles<false, false>(ctx, p, epilogue)) launch_tiles<Tile128x128>(ctx, p, epilogue);
        });
        launch(ctx, cross_entropy_kernel, R, 256, 0, loss, weights, factor, from, again, of_64, pieces, of.target,
               of.scale, of.by, V, second);
    }
}
#endif

// ---- head_backward: tile_kernel, W in columns. The gradient of row n of the picked ones goes to row rows[n].
struct ScatterEpilogue : Epilogue {
    bf16* out;           // (., C)
    const float* factor; // (R)
    const int* rows;     // (R)
    size_t C;
    __device__ void four(int n, int c, const float4& y, const float4&) {
        const float by = factor[n];
        store_four(out + rows[n] * C + c, make_float4(y.x * by, y.y * by, y.z * by, y.w * by));
    }
};

#if COMPILED(PART_LOSS)
void head_backward_gpu(Context& ctx, bf16* dnormed, const bf16* dlogits, size_t ld, const float* factor,
                       const int* rows, const Linear<bf16>& W, int R) {
    Optional::parts(ctx, W, true, [&](int first, int count, const bf16* weights) {
        TileArgs p = {dlogits, weights, R, W.out(), count};
        p.ldx = (int)ld;
        tile_product<false, true>(ctx, p, ScatterEpilogue{{}, dnormed + first, factor, rows, (size_t)W.in});
    });
}
#endif

#if COMPILED(PART_NORMS_BACKWARD)
// ---- rmsnorm_backward. A block of 128 threads owns a token, a thread four of every 512 channels. With DW a block owns
// every gridDim.x-th token, and adds up its part of dw in shared memory (C floats), for `partial` (blocks, C). Bound by
// memory bandwidth.
inline constexpr int NORM_BLOCKS = 12; // of a multiprocessor, with DW
template <bool DW>
__global__ void __launch_bounds__(128, NORM_BLOCKS)
rmsnorm_backward_kernel(float* dx, bf16* dy, bf16* normed, float* partial, const bf16* dout, const float* x,
                        const bf16* w, int N, int C, float eps) {
    extern __shared__ float dw[]; // (C)
    __shared__ float parts[2][2][4];
    let_next_start();
    wait_for_previous();
    for (int i = threadIdx.x * 4; DW && i < C; i += 512) *(float4*)(dw + i) = {};
    for (int n = blockIdx.x, turn = 0; n < N; n += DW ? gridDim.x : N, turn ^= 1) {
        const size_t at = (size_t)n * C;
        float squares = 0, mixed = 0;
        for (int i = threadIdx.x * 4; i < C; i += 512) {
            const float4 a = *(const float4*)(x + at + i);
            const uint2 b = *(const uint2*)(w + i), d = *(const uint2*)(dout + at + i);
            squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
            mixed += a.x * low(b.x) * low(d.x) + a.y * high(b.x) * high(d.x) +
                     a.z * low(b.y) * low(d.y) + a.w * high(b.y) * high(d.y);
        }
        squares = warp_sum(squares), mixed = warp_sum(mixed);
        float(&part)[2][4] = parts[turn];
        if (threadIdx.x % 32 == 0) part[0][threadIdx.x / 32] = squares, part[1][threadIdx.x / 32] = mixed;
        __syncthreads();
        squares = part[0][0] + part[0][1] + part[0][2] + part[0][3];
        mixed = part[1][0] + part[1][1] + part[1][2] + part[1][3];
        const float r = 1 / sqrtf(squares / C + eps), mean = mixed * r * r * r / C;
        for (int i = threadIdx.x * 4; i < C; i += 512) {
            const float4 a = *(const float4*)(x + at + i);
            const uint2 b = *(const uint2*)(w + i), d = *(const uint2*)(dout + at + i);
            float4 g = *(const float4*)(dx + at + i);
            g.x += r * low(b.x) * low(d.x) - a.x * mean, g.y += r * high(b.x) * high(d.x) - a.y * mean;
            g.z += r * low(b.y) * low(d.y) - a.z * mean, g.w += r * high(b.y) * high(d.y) - a.w * mean;
            *(float4*)(dx + at + i) = g;
            if (dy) *(uint2*)(dy + at + i) = make_uint2(pack(g.x, g.y), pack(g.z, g.w));
            if (normed)
                *(uint2*)(normed + at + i) = make_uint2(pack(a.x * r * low(b.x), a.y * r * high(b.x)),
                                                        pack(a.z * r * low(b.y), a.w * r * high(b.y)));
            if (!DW) continue;
            float4 sum = *(const float4*)(dw + i);
            sum.x += low(d.x) * a.x * r, sum.y += high(d.x) * a.y * r;
            sum.z += low(d.y) * a.z * r, sum.w += high(d.y) * a.w * r;
            *(float4*)(dw + i) = sum;
        }
    }
    for (int i = threadIdx.x * 4; DW && i < C; i += 512)
        *(float4*)(partial + (size_t)blockIdx.x * C + i) = *(const float4*)(dw + i);
}
// dw[i] += the sums of the blocks, in order. A block of 1,024 threads has 32 columns, a warp every 32nd row. Bound by
// latency.
__global__ void __launch_bounds__(1024) norm_weight_kernel(float* dw, const float* partial, int rows, int C) {
    __shared__ float sums[32][32];
    let_next_start();
    wait_for_previous();
    const int column = blockIdx.x * 32 + threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0;
    #pragma unroll 8
    for (int row = warp; row < rows; row += 32) sum += column < C ? partial[(size_t)row * C + column] : 0;
    sums[warp][threadIdx.x % 32] = sum;
    __syncthreads();
    if (warp || column >= C) return;
    for (int other = 1; other < 32; other++) sum += sums[other][threadIdx.x];
    dw[column] += sum;
}
void rmsnorm_backward_gpu(Context& ctx, float* dx, bf16* dy, bf16* normed, float* dw, const bf16* dout, const float* x,
                          const bf16* w, int N, int C, float eps) {
    float* const partial = ctx.gpu->partial;
    if (!dw)
        return launch(ctx, rmsnorm_backward_kernel<false>, N, 128, 0, dx, dy, normed, partial, dout, x, w, N, C, eps);
    const int most = (int)(PARTIAL_BYTES / (C * sizeof(float)));
    const int blocks = std::min({N, NORM_BLOCKS * ctx.gpu->sms, most});
    launch(ctx, rmsnorm_backward_kernel<true>, blocks, 128, C * sizeof(float), dx, dy, normed, partial, dout, x, w, N,
           C, eps);
    launch(ctx, norm_weight_kernel, (C + 31) / 32, 1024, 0, dw, partial, blocks, C);
}
void dora_backward_gpu(Context& ctx, bf16* du, float* dm, const bf16* dy, const Linear<bf16>& W, int N) {
    Dora<bf16> d = W.adapter.dora;
    if (!W.adapter.dropout) d.off = nullptr;
    const int out = W.out(), across = (out + 255) / 256;
    const int most = (int)std::min<size_t>(PARTIAL_BYTES / (out * sizeof(float)), (size_t)(N + 63) / 64);
    const int splits = std::max(1, std::min(most, 8 * ctx.gpu->sms / across)), each = (N + splits - 1) / splits;
    launch(ctx, dora_backward_kernel, dim3(across, splits), 256, 0, du, ctx.gpu->partial, dy, d, N, out, each);
    launch(ctx, norm_weight_kernel, (out + 31) / 32, 1024, 0, dm, ctx.gpu->partial, splits, out);
}
#endif

// ---- linear_backward_input: dx = dy W; an adapter's dh = dy (s B), dB += s dy^T h: tile_kernel, operands in columns.
struct DropEpilogue : StoreEpilogue<bf16> { // linear_backward_input where x was dropped on its way to the modules' A
    static constexpr bool MASKS = true;
    DropoutMasks masks;
    int rank;
    float scale;
    DropEpilogue(bf16* out, size_t ld, const DropoutMasks& masks, int rank, float scale)
        : StoreEpilogue(out, ld), masks(masks), rank(rank), scale(scale) {}
};

struct LoraUpEpilogue : Epilogue { // linear_backward_input: dB += s y, in the rows and columns that belong together
    static constexpr bool ADDS = true;
    float* dB; // (out, m * rank)
    float s;
    int rank, columns, first[3], last[3]; // rows of module j
    LoraUpEpilogue(float* dB, const Linear<bf16>& W)
        : dB(dB), s(W.adapter.s), rank(W.adapter.rank), columns((int)W.adapter.width()), first(), last() {
        for (int j = 0; j < W.adapter.modules; j++) {
            const int block = W.adapter.block[j];
            first[j] = W.first_row(block), last[j] = first[j] + W.rows[block];
        }
    }
    __device__ bool own(int r, int c) const { return r >= first[c / rank] && r < last[c / rank]; }
    __device__ float4 old_four(int r, int c) const {
        return own(r, c) ? *(const float4*)(dB + (size_t)r * columns + c) : float4{};
    }
    __device__ void four(int r, int c, const float4& y, const float4& old) {
        if (!own(r, c)) return;
        const float4 sum = {old.x + s * y.x, old.y + s * y.y, old.z + s * y.z, old.w + s * y.w};
        store_four(dB + (size_t)r * columns + c, sum);
    }
};
// dh and dB of an adapter. `scratch` has as many numbers as dx.
void lora_up_backward(Context& ctx, bf16* dh, float* dB, bf16* scratch, const bf16* dy, const Linear<bf16>& W, int N);
#if COMPILED(PART_LORA_UP)
void lora_up_backward(Context& ctx, bf16* dh, float* dB, bf16* scratch, const bf16* dy, const Linear<bf16>& W, int N) {
    if (Optional::lora_up(ctx, dh, dB, scratch, dy, W, N)) return;
    const Adapter<bf16>& a = W.adapter;
    const int width = (int)a.width(), out = W.out();
    tile_product<false, true>(ctx, {dy, a.B, N, out, width}, StoreEpilogue<bf16>(dh, width));
    tile_product<true, true>(ctx, {dy, a.h, out, N, width}, LoraUpEpilogue(dB, W));
}
#endif

// dx = dy W and the adapter's part, whose dh and A are further columns of dy and W; the epilogue applies dropout, if
// any.
template <class Drop, class Store>
void input_product(Context& ctx, bf16* dh, const bf16* dy, const Linear<bf16>& W, const LoraArgs& lora, Drop drop,
                   Store store) {
    Optional::weights(ctx, W, [&](const bf16* weights) {
        TileArgs p = {dy, weights, lora.N, W.out(), W.in};
        if (lora.width()) p.more_x = dh, p.more_W = W.adapter.A, p.more = lora.width(), p.more_last = lora.dropping;
        if (lora.dropping) tile_product<false, true>(ctx, p, drop);
        else tile_product<false, true>(ctx, p, store);
    });
}
#if COMPILED(PART_BACKWARD_LINEAR)
void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, float* dB, const bf16* dy, const Linear<bf16>& W,
                               int N) {
    const LoraArgs lora(W, N);
    if (lora.width()) lora_up_backward(ctx, dh, dB, dx, dy, W, N);
    input_product(ctx, dh, dy, W, lora, DropEpilogue(dx, W.in, lora.kept, lora.rank, lora.scale),
                  StoreEpilogue<bf16>(dx, W.in));
    const Adapter<bf16>& a = W.adapter;
    for (int j = 0; j < a.modules && a.dora.on && a.dropout; j++) {
        const Linear<bf16> rows = W.block(a.block[j]);
        Optional::weights(ctx, rows, [&](const bf16* weights) {
            TileArgs p = {a.dora.off + W.first_row(a.block[j]), weights, N, rows.out(), W.in};
            p.ldx = W.out();
            tile_product<false, true>(ctx, p, StoreEpilogue<bf16>(a.dora.x, W.in));
        });
        launch(ctx, dropped_kernel<true>, blocks_of((size_t)N * W.in / 8), 256, 0, dx, a.dora.x, lora.kept, j,
               lora.scale, N, W.in);
    }
}
#endif

// ---- linear_backward_weight: dW += dy^T x: tile_kernel, both operands in columns.
#if COMPILED(PART_WEIGHT)
// dW of training, and X^T X of GPTQ (model/quantize.h).
void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N, int out,
                                int in) {
    TileArgs p = {dy, x, out, N, in}, transposed = {x, dy, in, N, out};
    p.ldx = transposed.ldw = (int)ld;
    if (!Optional::weight_gradient(ctx, dW, p, transposed)) tile_product<true, true>(ctx, p, AddEpilogue(dW, dW, in));
}
#endif

#if COMPILED(PART_LORA)
// ---- lora_backward_weight: dA_j += dh_j^T drop_j(x). Grid: (columns / 128, groups / GROUPS, splits of the tokens), 8
// warps. A block owns 32 GROUPS rows of the A by 128 columns, a warp 16 of the columns; 64 tokens at a time pass
// through a ring in shared memory: x, dh, and the masks. A warp masks its x in registers, once for each module.
// lora_weight_sums_kernel adds the splits' sums in order, on all multiprocessors (the last block of a tile alone would
// take longer). Bound by memory bandwidth.
template <int GROUPS> struct LoraWeightShape {
    static constexpr int STAGES = 3, X_BYTES = 64 * 256;       // rows of 256 bytes, swizzled
    static constexpr int H_ROW = GROUPS * 64 + 16;             // eight rows of dh begin in different banks
    static constexpr int KEPT_BYTES = 2 * 64 * 8;              // of a module: two columns of 64 words
    static constexpr int H_AT = X_BYTES, KEPT_AT = H_AT + 64 * H_ROW;
    static constexpr int STAGE_BYTES = KEPT_AT + GROUPS * KEPT_BYTES;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES, TILE_BYTES = GROUPS * 32 * 128 * sizeof(float);
};
// Two neighbours of fragment f of a thread's sums, f = 4 group + 2 (16 rows) + (8 columns), are added to dA.
__device__ __forceinline__ void add_to_dA(float* dA, const LoraArgs& p, int first, int c0, int f, int thread, int half,
                                          float2 sum) {
    const int j = p.module_of(first + f / 4), g = thread % 32 / 4, t = thread % 4;
    const int r = p.first_row(first + f / 4) + f / 2 % 2 * 16 + half * 8 + g;
    const int c = c0 + thread / 32 * 16 + f % 2 * 8 + 2 * t;
    if (j >= p.modules || r >= p.rank || c >= p.in) return;
    float2* to = (float2*)(dA + (size_t)(j * p.rank + r) * p.in + c);
    const float2 old = *to;
    *to = make_float2(fmaf(p.scale, sum.x, old.x), fmaf(p.scale, sum.y, old.y));
}
template <int GROUPS>
__global__ void __launch_bounds__(256, 2) lora_weight_kernel(float* dA, const bf16* dh, const bf16* x, LoraArgs p,
                                                             float* partial) {
    using S = LoraWeightShape<GROUPS>;
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.y * GROUPS, c0 = blockIdx.x * 128;
    const int share = ((p.N + 63) / 64 + gridDim.z - 1) / gridDim.z * 64, begin = blockIdx.z * share;
    const int end = min(p.N, begin + share), steps = (end - begin + 63) / 64;
    const auto copy = [&](int step) {
        if (step >= steps) return;
        const uint32_t stage = shared + step % S::STAGES * S::STAGE_BYTES;
        const int n0 = begin + step * 64;
        #pragma unroll
        for (int k = 0; k < 64; k += 16) {
            const int row = threadIdx.x / 16 + k, chunk = threadIdx.x % 16, c = c0 + chunk * 8;
            copy_async(stage + row * 256 + ((chunk ^ row % 8) << 4), x + (size_t)(n0 + row) * p.in + c,
                       n0 + row < end && c < p.in);
        }
        const int row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int j = p.module_of(first + k), r = p.first_row(first + k) + chunk * 8;
            copy_async(stage + S::H_AT + row * S::H_ROW + k * 64 + chunk * 16,
                       dh + (size_t)(n0 + row) * p.width() + j * p.rank + r,
                       n0 + row < end && j < p.modules && r < p.rank);
            if (!p.dropping || threadIdx.x >= 128) continue;
            const int i64 = c0 / 64 + threadIdx.x / 64, n = n0 + threadIdx.x % 64; // (two words: N may be odd)
            copy_few_async<8>(stage + S::KEPT_AT + k * S::KEPT_BYTES + threadIdx.x * 8, p.kept.at(j, i64, n),
                              n < end && j < p.modules && i64 < p.kept.sixty_fours);
        }
    };
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) copy(s), commit_copies();
    float sum[GROUPS * 2][2][4] = {};
    walk_ring<S::STAGES>(0, steps, copy, [&](int step) {
        const int at = step % S::STAGES * S::STAGE_BYTES;
        const uint32_t x_at = shared + at, h_at = x_at + S::H_AT;
        // Lane 16 c + 4 i + t fetches the masks of tokens 16 i + 2 t + {0, 1, 8, 9} and of the warp's eight columns c.
        uint32_t kept[GROUPS];
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            kept[k] = ~0u;
            if (!p.dropping) continue;
            const uint8_t* bytes = (const uint8_t*)memory + at + S::KEPT_AT + k * S::KEPT_BYTES + warp / 4 * 64 * 8 +
                                   (lane / 4 % 4 * 16 + t * 2) * 8 + warp % 4 * 2 + lane / 16;
            kept[k] = bytes[0] | bytes[8] << 8 | bytes[64] << 16 | (uint32_t)bytes[72] << 24;
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) { // 16 tokens
            uint32_t b[4];            // tokens 2 t .., 2 t + 8 .. by eight columns, and by the next eight
            const int row = i * 16 + lane % 16, chunk = warp * 2 + lane / 16;
            ldmatrix_transposed(b, x_at + row * 256 + ((chunk ^ row % 8) << 4));
            #pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                uint32_t y[4];
                #pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint32_t top = __shfl_sync(~0u, kept[k], c * 16 + i * 4 + t) << (7 - g);
                    y[2 * c] = b[2 * c] & spread_bits(top, top, 0x9988);
                    y[2 * c + 1] = b[2 * c + 1] & spread_bits(top, top, 0xbbaa);
                }
                #pragma unroll
                for (int f = 0; f < 2; f++) {
                    uint32_t a[4];
                    ldmatrix_transposed(a, h_at + (i * 16 + lane % 8 + lane / 16 * 8) * S::H_ROW +
                                               (k * 4 + f * 2 + lane / 8 % 2) * 16);
                    mma(sum[2 * k + f][0], a[0], a[1], a[2], a[3], y[0], y[1]);
                    mma(sum[2 * k + f][1], a[0], a[1], a[2], a[3], y[2], y[3]);
                }
            }
        }
    });
    wait_for_copies<0>();
    let_next_start();
    const size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * gridDim.z + blockIdx.z;
    #pragma unroll
    for (int f = 0; f < GROUPS * 4; f++) {
        const float(&v)[4] = sum[f / 2][f % 2];
        if (gridDim.z > 1) {
            ((float4*)partial)[(at * GROUPS * 4 + f) * 256 + threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
            continue;
        }
        for (int half = 0; half < 2; half++)
            add_to_dA(dA, p, first, c0, f, threadIdx.x, half, make_float2(v[2 * half], v[2 * half + 1]));
    }
}
// The second half of lora_backward_weight with splits: their sums. Grid: (8 groups, columns / 128, groups / GROUPS),
// 256 threads. A thread owns two numbers of a tile. Bound by reading the L2 cache.
__global__ void __launch_bounds__(256) lora_weight_sums_kernel(float* dA, LoraArgs p, const float* partial,
                                                               int splits) {
    let_next_start();
    wait_for_previous();
    const int groups = gridDim.x / 8, i = blockIdx.x * 256 + threadIdx.x; // as lora_weight_kernel's threads leave them
    const size_t tile = (size_t)blockIdx.z * gridDim.y + blockIdx.y, numbers = (size_t)groups * 2048;
    const float2* part = (const float2*)partial + tile * splits * numbers + i;
    float2 sum = {};
    #pragma unroll 12
    for (int split = 0; split < splits; split++) {
        const float2 v = __ldcg(part + split * numbers);
        sum.x += v.x, sum.y += v.y;
    }
    add_to_dA(dA, p, blockIdx.z * groups, blockIdx.y * 128, i / 512, i / 2 % 256, i % 2, sum);
}

void lora_backward_weight_gpu(Context& ctx, float* dA, const bf16* dh, const bf16* x, const Linear<bf16>& W, int N) {
    const LoraArgs p(W, N);
    in_groups(p.groups(), [&](auto groups) {
        using S = LoraWeightShape<groups>;
        const int columns = (p.in + 127) / 128, rows = (p.groups() + groups - 1) / groups, tiles = columns * rows;
        const int most = (int)(PARTIAL_BYTES / (S::TILE_BYTES * tiles)); // splits that the scratch has room for
        const int splits = std::max(1, std::min({(N + 63) / 64, 2 * ctx.gpu->sms / tiles, most}));
        float* const partial = ctx.gpu->partial;
        launch(ctx, lora_weight_kernel<groups>, dim3(columns, rows, splits), 256, S::SHARED, dA, dh, x, p, partial);
        if (splits > 1)
            launch(ctx, lora_weight_sums_kernel, dim3(8 * groups, columns, rows), 256, 0, dA, p, partial, splits);
    });
}
#endif

// ---- linear_backward_swiglu: a sum is dhidden's; `second` is gate_up's number at its place, as bits.
template <bool DROPS> struct SwigluBackwardEpilogue : Epilogue {
    static constexpr bool ADDS = true, MASKS = DROPS;
    bf16 *dgate_up, *hidden; // (N,2F); (N,F), or null
    const bf16* gate_up;     // (N,2F)
    size_t F;
    DropoutMasks masks;
    int rank;
    float scale;
    SwigluBackwardEpilogue(bf16* dgate_up, bf16* hidden, const bf16* gate_up, size_t F, const LoraArgs& lora)
        : dgate_up(dgate_up), hidden(hidden), gate_up(gate_up), F(F), masks(lora.kept), rank(lora.rank),
          scale(lora.scale) {}
    __device__ float4 old_four(int n, int f) const {
        const float2 g = *(const float2*)(gate_up + n * 2 * F + f), u = *(const float2*)(gate_up + (n * 2 + 1) * F + f);
        return make_float4(g.x, g.y, u.x, u.y);
    }
    __device__ void four(int n, int f, const float4& y, const float4& old) {
        const float d4[] = {y.x, y.y, y.z, y.w};
        const uint32_t gates[] = {__float_as_uint(old.x), __float_as_uint(old.y)};
        const uint32_t ups[] = {__float_as_uint(old.z), __float_as_uint(old.w)};
        float out[4], dg[4], du[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float g = i % 2 ? high(gates[i / 2]) : low(gates[i / 2]);
            const float u = i % 2 ? high(ups[i / 2]) : low(ups[i / 2]), d = to_acc(round_bf16(d4[i]));
            const float sigma = __fdividef(1, 1 + exp2_fast(-LOG2E * g)), silu = g * sigma;
            out[i] = silu * u, dg[i] = d * u * sigma * (1 + g * (1 - sigma)), du[i] = d * silu;
        }
        if (hidden) store_four(hidden + n * F + f, make_float4(out[0], out[1], out[2], out[3]));
        store_four(dgate_up + n * 2 * F + f, make_float4(dg[0], dg[1], dg[2], dg[3]));
        store_four(dgate_up + (n * 2 + 1) * F + f, make_float4(du[0], du[1], du[2], du[3]));
    }
};

#if COMPILED(PART_BACKWARD_SWIGLU)
// swiglu_backward by itself: four numbers a thread.
__global__ void __launch_bounds__(256)
swiglu_backward_kernel(SwigluBackwardEpilogue<false> epilogue, const bf16* dout, int N, int F) {
    let_next_start();
    wait_for_previous();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    const int n = (int)(i / (F / 4)), f = (int)(i % (F / 4)) * 4;
    if (n < N) epilogue.four(n, f, load_four(dout + (size_t)n * F + f), epilogue.old_four(n, f));
}
void linear_backward_swiglu_gpu(Context& ctx, bf16* dgate_up, bf16* hidden, bf16*, bf16* dh, float* dB,
                                const bf16* dy, const bf16* gate_up, const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    if (W.adapter.dora.on && lora.dropping) {
        bf16* const dhidden = W.adapter.dora.dx;
        linear_backward_input_gpu(ctx, dhidden, dh, dB, dy, W, N);
        return launch(ctx, swiglu_backward_kernel, blocks_of((size_t)N * W.in / 4), 256, 0,
                      SwigluBackwardEpilogue<false>(dgate_up, hidden, gate_up, W.in, lora), dhidden, N, W.in);
    }
    if (lora.width()) lora_up_backward(ctx, dh, dB, dgate_up, dy, W, N);
    input_product(ctx, dh, dy, W, lora, SwigluBackwardEpilogue<true>(dgate_up, hidden, gate_up, W.in, lora),
                  SwigluBackwardEpilogue<false>(dgate_up, hidden, gate_up, W.in, lora));
}
#endif

// ---- Attention backward: Book I's `attention_backward`; where the norms' weights are not trained, all of
// `attend_backward`.
// The probabilities are computed twice: once where dk and dv of some keys are summed over all queries, once where dq of
// some queries is summed over all keys. So one block sums each number, in one order, at the cost of seven products of
// tiles instead of five.
// The query rows of a KV head are numbered through: row r is head r % G of token r / G. The keys that token n sees are
// rows n - pos[n] .. n of the batch; tiles may lie across the borders of sequences, since that is all that a mask
// needs. A warp skips tiles in which its keys and queries do not meet.
struct AttentionBackward {
    bf16* dqkv;                // (N,(H+2K)D) out
    const bf16 *dout, *q;      // (N,HD)
    const bf16 *keys, *values; // one layer's cache
    const float *lse, *delta;  // (N,H)
    Batch b;
    int H, K;
    // For attend_backward: qkv (N,(H+2K)D) before norm and RoPE. Then dqkv is its gradient. Null: attention_backward.
    const bf16 *qkv = nullptr, *q_weight = nullptr, *k_weight = nullptr;
    const float* rope = nullptr;
    float eps = 0;
};
inline constexpr int GRADIENT_KEYS = 64;  // a block of dk and dv: its keys
inline constexpr int PASSING_ROWS = 64;   // ... the query rows that pass by them at a time
inline constexpr int GRADIENT_ROWS = 128; // a block of dq: its query rows
inline constexpr int PASSING_KEYS = 32;   // ... the keys that pass by them at a time
// Shared memory of either block: keys, values, two stages of q and two of dout, 64 rows each; or q and dout, 128 rows
// each, two stages of keys and two of values, 32 rows each. And lse, delta and position of 128 rows: 97.5 KB for D =
// 128.
inline constexpr size_t backward_shared(int D) { return (size_t)6 * 64 * D * sizeof(bf16) + 3 * 128 * 4; }

// attention_backward's delta[n][h] = dout[n][h] . out[n][h]: D / 8 lanes a row, 8 numbers a lane; blocks of 256
// threads. Bound by memory bandwidth.
template <int D> __global__ void attention_delta_kernel(float* delta, const bf16* dout, const bf16* out, size_t rows) {
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

// The query rows of a KV head.
struct HeadQueries {
    int H, G, kv;
    uint32_t inverse; // 2^31 / G, rounded up
    __device__ HeadQueries(const AttentionBackward& p, int kv)
        : H(p.H), G(p.H / p.K), kv(kv), inverse((0x80000000u + G - 1) / G) {}
    // r / G, exact as long as r * G < 2^31.
    __device__ int token(int r) const { return (int)__umulhi(2 * (uint32_t)r, inverse); }
    // Row r of q and dout, of lse and delta: n H + kv G + r % G, for n = token(r).
    __device__ int place(int r, int n) const { return r + n * (H - G) + kv * G; }
};

// s, scores, become probabilities: 2^(s scale log2(e) - lse log2(e)). lse_of(i, j, e) is that of the number's query
// row.
template <int I, int J, class F>
__device__ __forceinline__ void probabilities(float (&s)[I][J][4], float scale, F lse_of) {
    each_score(s, [&](float& x, int i, int j, int e) {
        x = exp2_fast(fmaf(x, scale * LOG2E, -lse_of(i, j, e) * LOG2E));
    });
}

// ---- dk and dv. A block owns 64 keys of a KV head, a warp 16 of them, with the sums of dk and dv in registers; all
// query rows that see one of the keys pass by, 64 at a time, of all G heads. Scores are computed as keys times queries,
// which is the layout that the two sums need.

// One past the last token that sees one of the tokens before m1, or a spare row: each of THREADS threads tests one
// token, evenly spaced between a token known to see one and a token known not to, until no gap is left. count(x): the
// number of threads with x true, for all of them.
template <int THREADS, class F>
__device__ __forceinline__ int end_of_queries(const Batch& b, int m0, int m1, F count) {
    int end = m0, past = b.N;
    while (end < past) {
        const int stride = (past - end + THREADS - 1) / THREADS, n = end + (int)threadIdx.x % THREADS * stride;
        const int seeing = count(n < past && b.seq[n] >= 0 && n - b.pos[n] < m1);
        past = min(past, end + seeing * stride);
        if (seeing) end += (seeing - 1) * stride + 1;
    }
    return end;
}

// Query rows, up to `rows`, pass through two stages of shared memory, with dout, lse, delta and position.
template <int D> struct PassingQueries {
    static constexpr int TILE = PASSING_ROWS * HeadTile<D>::ROW;
    const AttentionBackward& p;
    const HeadQueries heads;
    int rows;
    uint32_t q_tiles, dout_tiles;
    float* numbers; // of each stage 64 lse, 64 delta, 64 positions
    HeadRows<D> mine;

    __device__ __forceinline__ const float* lse(int stage) const { return numbers + stage * 3 * PASSING_ROWS; }
    __device__ __forceinline__ const float* delta(int stage) const { return lse(stage) + PASSING_ROWS; }
    __device__ __forceinline__ const int* pos(int stage) const { return (const int*)(lse(stage) + 2 * PASSING_ROWS); }
    __device__ __forceinline__ void copy(int stage, int row0) const {
        const int last = max(rows, 1) - 1;
        #pragma unroll
        for (int i = 0; i < PASSING_ROWS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP, row = min(row0 + r, last);
            const int to = stage * TILE + HeadTile<D>::at(r, mine.chunk);
            const size_t at = (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8;
            copy_async(q_tiles + to, p.q + at, row0 + r < rows);
            copy_async(dout_tiles + to, p.dout + at, row0 + r < rows);
        }
        const int r = threadIdx.x % PASSING_ROWS, row = min(row0 + r, last), n = heads.token(row);
        const uint32_t to = shared_address(lse(stage) + r);
        if (threadIdx.x < PASSING_ROWS) {
            copy_few_async<4>(to, p.lse + heads.place(row, n), row0 + r < rows);
            copy_few_async<4>(to + 2 * PASSING_ROWS * 4, p.b.pos + n, row0 + r < rows);
        } else copy_few_async<4>(to + PASSING_ROWS * 4, p.delta + heads.place(row, n), row0 + r < rows);
    }
};

// Copies the keys and values of tokens m0 .., those from `end` on as zeros, to tiles.
template <int D>
__device__ __forceinline__ void load_keys(const AttentionBackward& p, int m0, int end, int kv, uint32_t k_tile,
                                          uint32_t v_tile) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < GRADIENT_KEYS; r += mine.STEP) {
        const bool there = m0 + r < end;
        const int slot = there ? p.b.slot[m0 + r] : 0, to = HeadTile<D>::at(r, mine.chunk);
        const size_t at = kv_offset(slot / PAGE, kv, slot % PAGE, p.K, D) + mine.chunk * 8;
        copy_async(k_tile + to, p.keys + at, there);
        copy_async(v_tile + to, p.values + at, there);
    }
}

// A quad of lanes holds two rows in store_row's layout, of heads `head` of tokens n. g, the gradient after norm and
// RoPE, becomes the one before: the formula is WarpHeadBackward's (below). It is linear in g, so a factor of g may
// follow later. Spare rows stay zero. All loads of both rows are issued before the first number is used.
template <int D>
__device__ __forceinline__ void through_norm_rope(const AttentionBackward& p, float (&g)[D / 8][4], const int (&n)[2],
                                                  const int (&head)[2]) {
    constexpr int J = D / 16; // g[j] and g[j + J] are of the same planes
    const int quad = threadIdx.x % 4;
    const uint32_t* w = (const uint32_t*)(head[0] < p.H ? p.q_weight : p.k_weight) + quad;
    uint32_t x[2][2 * J];
    const float4* angles[2];
    bool spare[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int token = min(n[h], p.b.N - 1), pos = p.b.pos[token];
        const uint32_t* row = (const uint32_t*)(p.qkv + ((size_t)token * (p.H + 2 * p.K) + head[h]) * D) + quad;
        spare[h] = p.b.seq[token] < 0;
        angles[h] = (const float4*)(p.rope + (size_t)(spare[h] ? 0 : pos) * D) + quad;
        #pragma unroll
        for (int j = 0; j < 2 * J; j++) x[h][j] = row[j * 4];
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        float squares = 0, mixed = 0;
        #pragma unroll
        for (int j = 0; j < J; j++) {
            const float4 angle = angles[h][j * 4]; // cosine and sine of one plane, and of the next
            const uint32_t xu = x[h][j], xv = x[h][j + J], wu = w[j * 4], wv = w[(j + J) * 4];
            const auto turn = [](float& u, float& v, float cosine, float sine) {
                const float a = u;
                u = a * cosine + v * sine, v = v * cosine - a * sine;
            };
            float *u = &g[j][2 * h], *v = &g[j + J][2 * h];
            turn(u[0], v[0], angle.x, angle.y), turn(u[1], v[1], angle.z, angle.w);
            squares += low(xu) * low(xu) + low(xv) * low(xv) + high(xu) * high(xu) + high(xv) * high(xv);
            mixed += low(xu) * low(wu) * u[0] + low(xv) * low(wv) * v[0];
            mixed += high(xu) * high(wu) * u[1] + high(xv) * high(wv) * v[1];
        }
        const float r = 1 / sqrtf(quad_sum(squares) / D + p.eps), mean = quad_sum(mixed) * r * r * r / D;
        #pragma unroll
        for (int j = 0; j < 2 * J; j++) {
            float* y = &g[j][2 * h];
            y[0] = spare[h] ? 0 : r * low(w[j * 4]) * y[0] - low(x[h][j]) * mean;
            y[1] = spare[h] ? 0 : r * high(w[j * 4]) * y[1] - high(x[h][j]) * mean;
        }
    }
}

// Stores the gradients of this warp's keys and values from `first` on. No query sees spare rows: their gradients are
// zeros.
template <int D>
__device__ __forceinline__ void store_key_value_gradients(const AttentionBackward& p, float (&dk)[1][D / 8][4],
                                                          const float (&dv)[1][D / 8][4], int first, int m1, int kv,
                                                          float scale) {
    if (p.qkv) through_norm_rope<D>(p, dk[0], {first + score_row(0, 0), first + score_row(0, 2)}, {p.H + kv, p.H + kv});
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int m = first + score_row(0, 2 * h);
        if (m >= m1) continue;
        bf16* to = p.dqkv + ((size_t)m * (p.H + 2 * p.K) + p.H + kv) * D;
        store_row(to, dk[0], h, scale);
        store_row(to + p.K * D, dv[0], h, 1);
    }
}

template <int D>
__device__ __forceinline__ void key_value_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = HeadTile<D>::ROW, TILE = 64 * ROW, J = PASSING_ROWS / 16;
    static_assert(GRADIENT_KEYS == 64 && PASSING_ROWS == 64, "one size of tile; 16 keys a warp");
    const uint32_t k_tile = shared_address(tiles), v_tile = k_tile + TILE, own = threadIdx.x / 32 * 16 * ROW;
    const int m0 = tile * GRADIENT_KEYS, m1 = min(m0 + GRADIENT_KEYS, p.b.N);
    const int end = end_of_queries<128>(p.b, m0, m1, [](bool sees) { return __syncthreads_count(sees); });
    const HeadQueries heads(p, kv);
    const int rows = end * heads.G, first = m0 + threadIdx.x / 32 * 16, last = first + 15; // this warp's keys
    float* numbers = (float*)((char*)tiles + 6 * TILE);
    const PassingQueries<D> queries = {p, heads, rows, v_tile + TILE, v_tile + 3 * TILE, numbers};
    const float scale = 1 / sqrtf((float)D);
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    load_keys<D>(p, m0, min(m1, end), kv, k_tile, v_tile);
    queries.copy(0, m0 * heads.G);
    commit_copies();
    int next = 0; // stage
    const auto copy = [&](int row0) { queries.copy(next ^= 1, row0); };
    walk_ring<2, PASSING_ROWS>(m0 * heads.G, rows, copy, [&](int row0) {
        const int stage = next ^ 1;
        const uint32_t q_tile = queries.q_tiles + stage * TILE, dout_tile = queries.dout_tiles + stage * TILE;
        const float *lse = queries.lse(stage), *delta = queries.delta(stage);
        const int *pos = queries.pos(stage), last_row = min(PASSING_ROWS, rows - row0) - 1;
        const int oldest = heads.token(row0), newest = heads.token(row0 + last_row);
        if (first > newest || last < oldest - pos[0]) return;
        float s[1][2 * J][4] = {}, ds[1][2 * J][4];
        multiply_rows<D, 1, J>(s, k_tile + own, q_tile);
        probabilities(s, scale, [&](int, int j, int e) { return lse[score_column(j, e)]; });
        if (last > oldest || first < newest - pos[last_row])
            each_score(s, [&](float& x, int, int j, int e) {
                const int r = score_column(j, e), n = heads.token(row0 + r), m = first + score_row(0, e);
                if ((uint32_t)(n - m) > (uint32_t)pos[r]) x = 0;
            });
        add_weighted_rows<D, 1, J>(dv, s, dout_tile);
        each_score(ds, [&](float& x, int, int j, int e) { x = -delta[score_column(j, e)]; });
        multiply_rows<D, 1, J>(ds, v_tile + own, dout_tile);
        each_score(ds, [&](float& x, int i, int j, int e) { x *= s[i][j][e]; });
        add_weighted_rows<D, 1, J>(dk, ds, q_tile);
    });
    wait_for_copies<0>();
    store_key_value_gradients<D>(p, dk, dv, first, m1, kv, scale);
}

// ---- dq. A block owns 128 query rows of a KV head, a warp 32 of them, with the sums of dq in registers; the keys they
// see pass by, 32 at a time.

// Copies rows row0 .., those from `rows` on as zeros: q and dout to tiles; lse, delta and position, a thread a row.
template <int D>
__device__ __forceinline__ void load_query_rows(const AttentionBackward& p, const HeadQueries& heads, int row0,
                                                int rows, uint32_t q_tile, uint32_t dout_tile, float* lse,
                                                float* delta, int* pos) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < GRADIENT_ROWS; r += mine.STEP) {
        const bool there = row0 + r < rows;
        const int to = HeadTile<D>::at(r, mine.chunk), row = row0 + r;
        const size_t at = there ? (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8 : 0;
        copy_async(q_tile + to, p.q + at, there);
        copy_async(dout_tile + to, p.dout + at, there);
    }
    const int t = threadIdx.x, row = row0 + t, n = heads.token(row), at = heads.place(row, n);
    const bool there = row < rows;
    lse[t] = there ? p.lse[at] : 0, delta[t] = there ? p.delta[at] : 0, pos[t] = there ? p.b.pos[n] : 0;
}

// Keys and values of the batch's tokens up to `end` pass through two stages of shared memory. Their slots are read a
// tile ahead of the copies that need them.
template <int D> struct PassingKeys {
    static constexpr int TILE = PASSING_KEYS * HeadTile<D>::ROW, COUNT = PASSING_KEYS / HeadRows<D>::STEP;
    const AttentionBackward& p;
    int kv, end;
    uint32_t k_tiles, v_tiles;
    HeadRows<D> mine;
    int slot[COUNT];
    __device__ __forceinline__ void next_slots(int key0) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int m = key0 + mine.row + i * mine.STEP;
            slot[i] = m < end ? p.b.slot[m] : 0;
        }
    }
    __device__ __forceinline__ void copy(int stage, int key0) const {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int r = mine.row + i * mine.STEP, to = stage * TILE + HeadTile<D>::at(r, mine.chunk);
            const size_t at = kv_offset(slot[i] / PAGE, kv, slot[i] % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(k_tiles + to, p.keys + at, key0 + r < end);
            copy_async(v_tiles + to, p.values + at, key0 + r < end);
        }
    }
};

// Stores the gradients of this warp's queries from first_row on. Spare rows are zeros, as their q and dout were.
template <int D, int I>
__device__ __forceinline__ void store_query_gradients(const AttentionBackward& p, const HeadQueries& heads,
                                                      float (&dq)[I][D / 8][4], int first_row, float scale) {
    #pragma unroll
    for (int i = 0; i < I; i++) {
        int n[2], head[2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = first_row + score_row(i, 2 * h), G = heads.G;
            n[h] = heads.token(r), head[h] = heads.kv * G + r - n[h] * G;
        }
        if (p.qkv) through_norm_rope<D>(p, dq[i], n, head);
        #pragma unroll
        for (int h = 0; h < 2; h++)
            if (n[h] < p.b.N) store_row(p.dqkv + ((size_t)n[h] * (p.H + 2 * p.K) + head[h]) * D, dq[i], h, scale);
    }
}

template <int D>
__device__ __forceinline__ void query_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = HeadTile<D>::ROW, J = PASSING_KEYS / 16;
    static_assert(GRADIENT_ROWS == 128, "32 rows a warp; a thread asks for a row");
    const uint32_t q_tile = shared_address(tiles), dout_tile = q_tile + GRADIENT_ROWS * ROW;
    const uint32_t k_tiles = dout_tile + GRADIENT_ROWS * ROW, v_tiles = k_tiles + 2 * PASSING_KEYS * ROW;
    float *lse = (float*)((char*)tiles + (2 * GRADIENT_ROWS + 4 * PASSING_KEYS) * ROW), *delta = lse + GRADIENT_ROWS;
    int* pos = (int*)(delta + GRADIENT_ROWS);
    const Batch& b = p.b;
    const HeadQueries heads(p, kv);
    const int row0 = tile * GRADIENT_ROWS, n0 = heads.token(row0);
    const int n1 = heads.token(min(row0 + GRADIENT_ROWS, b.N * heads.G) - 1), n = n0 + threadIdx.x;
    const int end = n0 + __syncthreads_count(n <= n1 && b.seq[n] >= 0), rows = end * heads.G; // later rows are spare
    load_query_rows<D>(p, heads, row0, rows, q_tile, dout_tile, lse, delta, pos);
    // This warp's tokens, and where the sequences of the first and of the last of them begin.
    const int own = threadIdx.x / 32 * 32, first_row = row0 + own;
    const int oldest = heads.token(first_row), newest = heads.token(min(first_row + 32, rows) - 1);
    const bool some = first_row < rows;
    const int oldest_first = some ? oldest - b.pos[oldest] : b.N, newest_first = some ? newest - b.pos[newest] : b.N;
    const float scale = 1 / sqrtf((float)D);
    const int key_begin = end > n0 ? n0 - b.pos[n0] : end;
    PassingKeys<D> keys = {p, kv, end, k_tiles, v_tiles};
    float dq[2][D / 8][4] = {};
    keys.next_slots(key_begin);
    keys.copy(0, key_begin);
    commit_copies();
    keys.next_slots(key_begin + PASSING_KEYS);
    int next = 0; // stage
    const auto copy = [&](int key0) { keys.copy(next ^= 1, key0), keys.next_slots(key0 + PASSING_KEYS); };
    walk_ring<2, PASSING_KEYS>(key_begin, end, copy, [&](int key0) {
        const int stage = next ^ 1;
        if (key0 > newest || key0 + PASSING_KEYS <= oldest_first) return;
        const uint32_t k_tile = k_tiles + stage * keys.TILE, v_tile = v_tiles + stage * keys.TILE;
        float s[2][2 * J][4] = {}, ds[2][2 * J][4];
        multiply_rows<D, 2, J>(s, q_tile + own * ROW, k_tile);
        probabilities(s, scale, [&](int i, int, int e) { return lse[own + score_row(i, e)]; });
        if (key0 + PASSING_KEYS > oldest + 1 || key0 < newest_first)
            each_score(s, [&](float& x, int i, int j, int e) {
                const int r = own + score_row(i, e), n = heads.token(row0 + r), m = key0 + score_column(j, e);
                if ((uint32_t)(n - m) > (uint32_t)pos[r]) x = 0;
            });
        each_score(ds, [&](float& x, int i, int, int e) { x = -delta[own + score_row(i, e)]; });
        multiply_rows<D, 2, J>(ds, dout_tile + own * ROW, v_tile);
        each_score(ds, [&](float& x, int i, int j, int e) { x *= s[i][j][e]; });
        add_weighted_rows<D, 2, J>(dq, ds, k_tile);
    });
    wait_for_copies<0>();
    store_query_gradients<D>(p, heads, dq, first_row, scale);
}

// Both in one launch, so that neither waits for the other's last blocks: grid (K, tiles of keys + tiles of rows), 128
// threads, two blocks a multiprocessor; bound by the tensor cores and by registers (for D = 128 all 255). Early keys
// are seen by many queries, late queries see many keys: of one sequence, long blocks come first.
template <int D>
__global__ void __launch_bounds__(128, 2) attention_backward_kernel(AttentionBackward p, int key_tiles) {
    extern __shared__ __align__(128) uint4 tiles[];
    wait_for_previous();
    if ((int)blockIdx.y < key_tiles) key_value_gradients<D>(p, blockIdx.y, blockIdx.x, tiles);
    else query_gradients<D>(p, gridDim.y - 1 - blockIdx.y, blockIdx.x, tiles);
}
#if COMPILED(PART_BACKWARD_ATTENTION)
void launch_attention_backward(Context& ctx, const AttentionBackward& p, const bf16* out, float* delta, int D) {
    const int N = p.b.N, H = p.H, K = p.K;
    const int64_t rows = (int64_t)N * (H / K), key_tiles = (N + GRADIENT_KEYS - 1) / GRADIENT_KEYS;
    const int64_t tiles = key_tiles + (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
    if (rows * H >= (int64_t)1 << 31 || tiles > 65535)
        DIE("attention_backward: a batch of %d tokens is too large for %d query heads", N, H);
    const size_t heads = (size_t)N * H;
    launch(ctx, D == 128 ? attention_delta_kernel<128> : attention_delta_kernel<64>,
           (unsigned)((heads * (D / 8) + 255) / 256), 256, 0, delta, p.dout, out, heads);
    if (!Optional::attention_backward(ctx, p, D))
        launch(ctx, D == 128 ? attention_backward_kernel<128> : attention_backward_kernel<64>,
               dim3((unsigned)K, (unsigned)tiles), 128, backward_shared(D), p, (int)key_tiles);
}
void attention_backward_gpu(Context& ctx, bf16* dqkv, const bf16* dout, const Attended<bf16>& of,
                            const LayerCache<bf16>& cache, const Batch& b, const HeadShape& shape, float* delta) {
    const AttentionBackward p = {dqkv, dout, of.q, cache.keys, cache.values, of.lse, delta, b, shape.H, shape.K};
    launch_attention_backward(ctx, p, of.out, delta, shape.D);
}
#endif

#if COMPILED(PART_NORMS_BACKWARD)
// ---- qknorm_rope_backward. A head in a warp, as WarpHead holds it: the gradient g of the norm's output; r and mean as
// in rmsnorm_backward.
template <int D> struct WarpHeadBackward {
    static constexpr int P = D / 64;
    WarpHead<D> x, g, w;
    float r, mean;
    __device__ __forceinline__ void load(const bf16* head, const bf16* dhead, const bf16* weights) {
        x.load(head), g.load(dhead), w.load(weights);
    }
    __device__ __forceinline__ void turn(const WarpAngles<P>& angle, float eps) {
        float squares = 0, mixed = 0;
        for (int p = 0; p < P; p++) {
            const float u = g.u[p], v = g.v[p];
            g.u[p] = u * angle.cosine(p) + v * angle.sine(p), g.v[p] = v * angle.cosine(p) - u * angle.sine(p);
            squares += x.u[p] * x.u[p] + x.v[p] * x.v[p];
            mixed += x.u[p] * w.u[p] * g.u[p] + x.v[p] * w.v[p] * g.v[p];
        }
        r = 1 / sqrtf(warp_sum(squares) / D + eps);
        mean = warp_sum(mixed) * r * r * r / D;
    }
    __device__ __forceinline__ void store(bf16* dhead) const {
        WarpHead<D> d;
        for (int p = 0; p < P; p++) {
            d.u[p] = r * w.u[p] * g.u[p] - x.u[p] * mean;
            d.v[p] = r * w.v[p] * g.v[p] - x.v[p] * mean;
        }
        d.store(dhead);
    }
};
// Without the gradients of the weights. Blocks of 8 warps, a warp a head of a token. Bound by memory bandwidth.
template <int D>
__global__ void qknorm_rope_backward_kernel(bf16* dqkv, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                            const float* rope, Batch b, int H, int K, float eps) {
    let_next_start();
    wait_for_previous();
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, n = task / (H + K), h = task % (H + K);
    if (n >= b.N || b.seq[n] < 0) return;
    const size_t at = ((size_t)n * (H + 2 * K) + h) * D;
    const WarpAngles<D / 64> angle(rope + (size_t)b.pos[n] * D);
    WarpHeadBackward<D> y;
    y.load(qkv + at, dqkv + at, h < H ? q_weight : k_weight);
    y.turn(angle, eps);
    y.store(dqkv + at);
}
// The same, and the weights' gradients: warp w of W takes tokens w, w + W, ..., four heads at a time; its sums stay in
// registers; the last block to arrive adds the blocks' sums in order. Up to 512 blocks of 8 warps; shared memory: 8 (2
// D) floats. Bound by memory bandwidth.
inline constexpr int HEAD_BLOCKS = 512;
template <int D>
__global__ void __launch_bounds__(256) head_weight_kernel(float* dq_weight, float* dk_weight, bf16* dqkv,
                                                          const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                                          const float* rope, Batch b, int H, int K, float eps,
                                                          float* partial, int* arrived) {
    constexpr int P = D / 64;
    __shared__ float sums[8][2 * D];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 * P;
    float u[2][P] = {}, v[2][P] = {};
    for (int n = blockIdx.x * 8 + warp; n < b.N; n += gridDim.x * 8) {
        if (b.seq[n] < 0) continue;
        const WarpAngles<P> angle(rope + (size_t)b.pos[n] * D);
        const size_t token = (size_t)n * (H + 2 * K) * D;
        for (int h0 = 0; h0 < H + K; h0 += 4) {
            WarpHeadBackward<D> y[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int h = min(h0 + j, H + K - 1);
                y[j].load(qkv + token + h * D, dqkv + token + h * D, h < H ? q_weight : k_weight);
            }
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int h = h0 + j;
                y[j].turn(angle, eps);
                if (h >= H + K) break;
                y[j].store(dqkv + token + h * D);
                #pragma unroll
                for (int p = 0; p < P; p++) {
                    const float du = y[j].g.u[p] * y[j].x.u[p] * y[j].r, dv = y[j].g.v[p] * y[j].x.v[p] * y[j].r;
                    if (h < H) u[0][p] += du, v[0][p] += dv;
                    else u[1][p] += du, v[1][p] += dv;
                }
            }
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
    #pragma unroll 8
    for (int block = 0; block < (int)gridDim.x; block++) sum += __ldcg(partial + block * 2 * D + c);
    *to = sum;
}
void qknorm_rope_backward_gpu(Context& ctx, bf16* dqkv, const HeadNormGradients<bf16>& dnorms, const bf16* qkv,
                              const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape) {
    const int H = shape.H, K = shape.K, D = shape.D;
    const auto weights = D == 128 ? head_weight_kernel<128> : head_weight_kernel<64>;
    const auto inputs = D == 128 ? qknorm_rope_backward_kernel<128> : qknorm_rope_backward_kernel<64>;
    if (dnorms.q)
        return launch(ctx, weights, std::min(HEAD_BLOCKS, (b.N + 7) / 8), 256, 0, dnorms.q, dnorms.k, dqkv, qkv,
                      norms.q, norms.k, norms.rope, b, H, K, shape.eps, ctx.gpu->partial, ctx.gpu->arrived);
    const int blocks = (int)(((int64_t)b.N * (H + K) + 7) / 8);
    launch(ctx, inputs, blocks, 256, 0, dqkv, qkv, norms.q, norms.k, norms.rope, b, H, K, shape.eps);
}
#endif
#if COMPILED(PART_BACKWARD_ATTENTION)
// The weights' gradients are sums over the output of attention_backward: with them, one op after the other.
void attend_backward_gpu(Context& ctx, bf16* dqkv, const HeadNormGradients<bf16>& dnorms, const bf16* dout,
                         const Attended<bf16>& of, const LayerCache<bf16>& cache, const bf16* qkv,
                         const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape, float* delta) {
    AttentionBackward p = {dqkv, dout, of.q, cache.keys, cache.values, of.lse, delta, b, shape.H, shape.K};
    if (!dnorms.q) p.qkv = qkv, p.q_weight = norms.q, p.k_weight = norms.k, p.rope = norms.rope, p.eps = shape.eps;
    launch_attention_backward(ctx, p, of.out, delta, shape.D);
    if (dnorms.q) qknorm_rope_backward_gpu(ctx, dqkv, dnorms, qkv, norms, b, shape);
}
#endif

#if COMPILED(PART_TEXT)
// ---- embed_backward. A block of 128 threads a token; the first token of an id adds up all tokens that have it, in
// order. A thread owns every 128th channel. Bound by memory bandwidth.
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
void embed_backward_gpu(Context& ctx, float* dW, const float* dx, const Batch& b, int C) {
    launch(ctx, embed_backward_kernel, b.N, 128, 0, dW, dx, b, C);
}

// ---- grad_norm. A block of 256 threads a piece of NORM_PIECE numbers; then one block of 1,024 adds the pieces. Bound
// by memory bandwidth.
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
void grad_norm_gpu(Context& ctx, double* norm, double* partial, const float* g, size_t n) {
    const size_t pieces = (n + NORM_PIECE - 1) / NORM_PIECE;
    launch(ctx, grad_squares_kernel, (unsigned)pieces, 256, 0, partial, g, n);
    launch(ctx, grad_norm_kernel, 1, 1024, 0, norm, partial, pieces);
}

// ---- adamw. Blocks of 256 threads, a thread a number. Bound by memory bandwidth: 30 bytes a number.
__global__ void adamw_kernel(bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n,
                             AdamWStep<float> a) {
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
void adamw_gpu(Context& ctx, bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n,
               const AdamW& a) {
    launch(ctx, adamw_kernel, (unsigned)((n + 255) / 256), 256, 0, stored, p, m, v, g, norm, n, AdamWStep<float>(a));
}
#endif

#endif // __CUDACC__
#endif // QWEN3_CU

#if __INCLUDE_LEVEL__ == 0 && (!defined(QWEN3_LIBRARY) || defined(QWEN3_SINGLE))
#include "cli/cli.h"

int main(int argc, char** argv) {
    take_signals({SIGINT}, {SIGPIPE});
    return run_program("qwen3", cli::run, argc, argv);
}
#endif
