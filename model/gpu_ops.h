// model/gpu_ops.h: the ops on a GPU, as Book II (qwen3.cu) defines them: launchers, parameters of the sampler, scratch.
#pragma once
#include "model/bf16.h"
#include "model/context.h"
#include "model/dropout.h"
#include "model/sampling.h"
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

struct AdamW; // qwen3.cu, Book I, has these
struct Batch;
struct Config;
struct HeadShape;
struct Moments8;
template <class T> struct Activations;
template <class T> struct Attended;
template <class T> struct Expert;
template <class T> struct Flow;
template <class T> struct HeadNormGradients;
template <class T> struct HeadNorms;
template <class T> struct KVCache;
template <class T> struct Layer;
template <class T> struct LayerCache;
template <class T> struct Linear;
template <class A> struct Distilled;
template <class A> struct DistillationRows;
template <class A> struct LossRows;
template <class T> struct Routed;

// ---- Sampling on a GPU: parameters, and the destination of the sampled tokens.
struct Draw {
    Sampling how;
    int exist; // only ids below may be drawn
};

// The destination of sampled tokens, and the batch of the next step.
struct DrawState {
    int *token, *pos, *slot; // (R) of the token just sampled, out; pos: in, the position of the token before
    const int *seq, *pages;  // (R), (., max_pages)
    int max_pages;
    uint32_t* seen;          // (sequences, V) or null
    volatile int* ring;      // (R, ring_size) in the host's memory, or null: id + 1 of the token at each position
    int ring_size;
    int* last;               // (sequences) last sampled token, or null
};

// How a product's rows are distributed: `rows` neighbours at a time to its blocks in turn, the first ones to block
// `shift`. blocks 0: no record.
struct RowsDealt {
    int blocks = 0, rows = 0, shift = 0;
};

// Activations (N,in) once more, as e4m3, in a GPU's scratch (gpu/packed/round.h): the handle that a product of FP8
// activations takes. q null: none.
struct E4M3Rows {
    uint8_t* q = nullptr;   // (N,in)
    float* scale = nullptr; // (groups, pitch) of the groups of columns, see model/fp8_activations.h
    int pitch = 0;
};

// A step of up to `most` tokens as one kernel (gpu/step/), if there is one: see Optional::one_kernel.
inline constexpr int STEP_TOKENS = 8; // `most` at most
struct OneKernelStep {
    int most = 1;
    virtual ~OneKernelStep() = default;
    // The batch and its cache; logits go to `logits`, each block's likeliest id to `best`.
    virtual void use(const Batch& batch, const KVCache<bf16>& cache, const float* rope, float* logits, const Draw* draw,
                     unsigned long long* best) = 0;
    // greedy: the kernel itself samples, to `next`. seen: counts for the penalties, or null.
    virtual void draw_to(bool greedy, const DrawState& next, const uint32_t* seen) = 0;
    virtual void launch_step() = 0;             // on the context's stream; part of a graph, if one is being recorded
    virtual RowsDealt dealt() const = 0;        // the head's rows
    virtual const uint32_t* steps() const = 0;  // how many were computed, in the GPU's memory
    virtual void check() const = 0;             // throws Error if a block's wait timed out
};

// The likeliest id of each of the head's blocks: an array of this size.
inline constexpr int BEST_BLOCKS = 1024;
// Groups of ids in the sampler: the ids of four of its threads, or of some of the head's blocks.
inline constexpr int DRAW_GROUPS = 256;

// ---- Book II's launchers: the ops on a GPU. RUN calls op_gpu with the arguments of op, which documents their shapes.
// No launcher waits for the GPU. Each throws Error if its kernels cannot compute these sizes. Forward
void embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b, int C);
void add_noise_gpu(Context& ctx, float* x, const Noise& noise, int N, int C);
void rmsnorm_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, int N, int C, float eps);
// h of W's adapter. made: its dropout masks are already computed.
void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N, bool made = false);
void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N);
void dora_norm_gpu(Context& ctx, const Linear<bf16>& W);
// rounded: x, if that is already stored as e4m3.
void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W, int N,
                    const E4M3Rows& rounded = {});
void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* x, const bf16* w, const Linear<bf16>& W,
                     int N, float eps);
// Rows from `first` on; the same for attention_gpu.
void qknorm_rope_kv_gpu(Context& ctx, bf16* q, const LayerCache<bf16>& cache, const bf16* qkv,
                        const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape, int first = 0);
void attention_gpu(Context& ctx, bf16* out, float* lse, const bf16* q, const LayerCache<bf16>& cache, const Batch& b,
                   const HeadShape& shape, int first = 0);
void attend_gpu(Context& ctx, bf16* out, float* lse, bf16* q, const LayerCache<bf16>& cache, const bf16* qkv,
                const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape);
// rounded: becomes `out` as e4m3 if the kernel stored that too, until the next product of FP8 activations; or null.
void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
                            const Linear<bf16>& W, int N, float eps, E4M3Rows* rounded = nullptr);
void mlp_gpu(Context& ctx, float* out, bf16* hidden, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
             const Linear<bf16>& up, const Linear<bf16>& down, int N, float eps);
void route_gpu(Context& ctx, const Routed<bf16>& out, const bf16* x, const Linear<bf16>& W, const Batch& b, int k,
               bool normed);
// gate_up: for the backward pass, or null.
void expert_mlp_gpu(Context& ctx, float* out, bf16* gate_up, bf16* hidden, bf16* rows, const float* residual,
                    const bf16* x, const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k);
// Floats of expert_mlp_gpu's scratch, `rows`: all pairs' x in bf16; then their outputs, or at least half of the columns.
inline size_t expert_scratch(int N, int C, int k) {
    const size_t pairs = (size_t)N * k, enough = 16 << 20;
    return std::max(std::min(pairs * C, enough), pairs * std::max((C + 1) / 2, std::min(C, 128)));
}
void scores_gpu(Context& ctx, float* scores, const bf16* x, const Linear<bf16>& W, int N); // x W^T; route's
void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W, int R);
void pick_rows_gpu(Context& ctx, bf16* picked, const bf16* x, const int* rows, int R, int C); // head's first half

// Backward
void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* factor, float* logits, bf16* picked, float* parts,
                   const bf16* x, const LossRows<float>& of, const Linear<bf16>& W);
void distillation_gpu(Context& ctx, const Distilled<float>& out, bf16* dlogits, float* logits,
                      const DistillationRows<float>& of);
void gather_outcomes_gpu(Context& ctx, float* z, float* tail, float* logits, const int* id, int R, int J, int V);
void scatter_outcomes_gpu(Context& ctx, bf16* dlogits, float* logits, const bf16* dz, size_t ld, const float* tail,
                          const int* id, int R, int J, int V);
void add_losses_gpu(Context& ctx, double* total, const float* loss, int R);
void scale_rows_gpu(Context& ctx, bf16* x, size_t ld, const float* by, int R, int n);
void head_backward_gpu(Context& ctx, bf16* dx, const bf16* dlogits, size_t ld, const float* factor,
                       const int* rows, const Linear<bf16>& W, int R);
void rmsnorm_backward_gpu(Context& ctx, float* dx, bf16* rounded, bf16* out, float* dw, const bf16* dout,
                          const float* x, const bf16* w, int N, int C, float eps);
void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, float* dB, const bf16* dy, const Linear<bf16>& W,
                               int N);
void dora_backward_gpu(Context& ctx, bf16* du, float* dm, const bf16* dy, const Linear<bf16>& W, int N);
void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N, int out,
                                int in);
void linear_backward_swiglu_gpu(Context& ctx, bf16* dgate_up, bf16* hidden, bf16* dhidden, bf16* dh, float* dB,
                                const bf16* dy, const bf16* gate_up, const Linear<bf16>& W, int N);
// Arrays of a layer and its forward pass, for experts_backward_gpu: x (N,C), gate_up (N k, 2M); hidden (N k, M) and
// rows, as expert_mlp_gpu's, are scratch. The first expert's gradients of adapters; the others' lie as their numbers
// do.
struct ExpertsBackward {
    const bf16 *x, *gate_up;
    bf16 *hidden, *rows;
    float *up_A, *up_B, *down_A, *down_B;
};
// d.share, d.scores and d.normed, and the gradients of the experts' adapters; d.gate_up, d.h and d.sum are scratch. The
// router is not trained.
void experts_backward_gpu(Context& ctx, const Flow<bf16>& d, const ExpertsBackward& in, const Layer<bf16>& layer,
                          const Routed<bf16>& to, int N, int k, bool normed);
void balance_loss_gpu(Context& ctx, double* total, float* slope, const Config& c, const Activations<bf16>& a,
                      const Batch& b, double weight, double scale);
void lora_backward_weight_gpu(Context& ctx, float* dA, const bf16* dh, const bf16* x, const Linear<bf16>& W, int N);
void attention_backward_gpu(Context& ctx, bf16* dqkv, const bf16* dout, const Attended<bf16>& of,
                            const LayerCache<bf16>& cache, const Batch& b, const HeadShape& shape, float* delta);
void qknorm_rope_backward_gpu(Context& ctx, bf16* dqkv, const HeadNormGradients<bf16>& dnorms, const bf16* qkv,
                              const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape);
void attend_backward_gpu(Context& ctx, bf16* dqkv, const HeadNormGradients<bf16>& dnorms, const bf16* dout,
                         const Attended<bf16>& of, const LayerCache<bf16>& cache, const bf16* qkv,
                         const HeadNorms<bf16>& norms, const Batch& b, const HeadShape& shape, float* delta);
void embed_backward_gpu(Context& ctx, float* dW, const float* dx, const Batch& b, int C);
void grad_norm_gpu(Context& ctx, double* norm, double* partial, const float* g, size_t n);
void adamw8_gpu(Context& ctx, bf16* stored, float* p, const Moments8& to, const float* g, const double* norm, size_t n,
                size_t decayed, const AdamW& a);
void adamw_gpu(Context& ctx, bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n,
               const AdamW& a);

// Sampler
// The logits of up to 16 rows of x, with the penalties of `draw` and `seen`; and the likeliest id of each block, to
// `best`. Returns the distribution of W's rows to blocks.
RowsDealt draw_head_gpu(Context& ctx,
                        float* logits,            // (R,V) out
                        const Draw* draw,         // (R)
                        const uint32_t* seen,     // (R,V), or null: no penalties
                        unsigned long long* best, // (R, BEST_BLOCKS) out
                        const bf16* x,            // (., C)
                        const int* rows,          // (R)
                        const Linear<bf16>& W, int R);
// Book I's `sample`, and the next step's batch. early: it may start before the previous kernel has ended.
void sample_gpu(Context& ctx, bool early,
                const float* logits,            // (R,V)
                size_t V,
                const Draw* draws,              // (R)
                const unsigned long long* best, // (R, BEST_BLOCKS) of draw_head_gpu, or null
                const RowsDealt& dealt,         // ... its return value
                const DrawState& state, int R);
// Book I's `likeliest`.
void likeliest_gpu(Context& ctx,
                   Likeliest* out,      // (R)
                   const float* logits, // (R,V)
                   size_t V, int exist,
                   const int* seq,      // (R) -1: a spare row
                   const int* wanted,   // by seq: how many ids; -1: the row is left alone
                   int R);

// Scratch: model/gpu.cu
// Allocates scratch for products; or for forwards of up to `rows` rows and `singles` sequences of one token, of up to
// `context` tokens in `pages` pages. From then on the context has a Gpu of its own.
void plan_scratch(Context& ctx, Arena& arena);
void plan_scratch(Context& ctx, Arena& arena, const Config& c, int rows, int singles, int context, int pages);
// Numbers of scratch that attention needs: for this number of sequences of one token, or for any others.
size_t attention_scratch(const Context& ctx, int singles, int splits, int H, int D);
size_t widened_numbers(const Config& c, size_t pages); // of a layer's FP8 cache as bf16
// Those pages of a layer's FP8 cache that attention of the rows from `first` on reads, as bf16 (model/fp8_cache.cu).
LayerCache<bf16> widen_pages_gpu(Context& ctx, const LayerCache<bf16>& cache, const Batch& b, const HeadShape& shape,
                                 int first);
// Splits for a position in a context of `context` tokens: 1, 2, 4, ... or all, a graph for each; blocks without keys
// cost little.
int splits_for_graph(int position, int context);
