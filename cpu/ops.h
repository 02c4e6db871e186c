// cpu/ops.h: the ops for the vector and matrix instructions of CPUs.
#pragma once
#include "model/distillation.h"
#include "model/moments.h"
#include "qwen3.cu"
#include <cstddef>
#include <cstdint>

// op_cpu(ctx, ...) computes `op` of Book I, which documents formulas, shapes and parameters. Only the order of a sum's
// terms differs. Two contracts hold for every op and instruction set: the bits of a row depend neither on the other
// rows of the batch nor on the number of threads. They are compiled for the types of model/instances.h. RUN finds them
// by the type of ctx.

// ---- Forward ops: cpu/forward.cpp, products.cpp, attention.cpp

// x[n] = the embedding of token n
template <class T> void embed_cpu(Context& ctx, acc<T>* x, const Linear<T>& table, const Batch& b, int C);

// x[n] += noise
template <class A> void add_noise_cpu(Context& ctx, A* x, const Noise& noise, int N, int C);

// out[n] = x[n] / rms(x[n]) * w
template <class T> void rmsnorm_cpu(Context& ctx, T* out, const acc<T>* x, const T* w, int N, int C, float eps);

// h = A drop(x), of each of W's adapter modules
template <class T> void lora_down_cpu(Context& ctx, T* h, const T* x, const Linear<T>& W, int N);

// out = x W^T
template <class T> void linear_cpu(Context& ctx, T* out, const T* x, const Linear<T>& W, int N);

// out = residual + x W^T
template <class T>
void linear_add_cpu(Context& ctx, acc<T>* out, const acc<T>* residual, const T* x, const Linear<T>& W, int N);

// The same two, where of[n] is token n's adapter, or null; lora_down_cpu has computed its row of h. W's own is not
// used.
template <class T>
void rows_linear_cpu(Context& ctx, T* out, const T* x, const Linear<T>& W, const Adapter<T>* const* of, int N);
template <class T>
void rows_linear_add_cpu(Context& ctx, acc<T>* out, const acc<T>* residual, const T* x, const Linear<T>& W,
                         const Adapter<T>* const* of, int N);

// out = rmsnorm(x) W^T
template <class T>
void norm_linear_cpu(Context& ctx, T* out, T* normed, const acc<T>* x, const T* w, const Linear<T>& W, int N,
                     float eps);

// Norm and RoPE of the heads of q and k; k and v go to the cache
template <class T>
void qknorm_rope_kv_cpu(Context& ctx, T* q, const LayerCache<T>& cache, const T* qkv, const HeadNorms<T>& norms,
                        const Batch& b, const HeadShape& shape);

// out[n][h] = the softmax-weighted sum of the values of n's sequence
template <class T>
void attention_cpu(Context& ctx, T* out, acc<T>* lse, const T* q, const LayerCache<T>& cache, const Batch& b,
                   const HeadShape& shape);

// Both: from qkv to the input of o
template <class T>
void attend_cpu(Context& ctx, T* out, acc<T>* lse, T* q, const LayerCache<T>& cache, const T* qkv,
                const HeadNorms<T>& norms, const Batch& b, const HeadShape& shape);

// out = silu(gate) * up
template <class T> void swiglu_cpu(Context& ctx, T* out, const T* gate_up, int N, int F);

// out = swiglu(rmsnorm(x) W^T)
template <class T>
void norm_linear_swiglu_cpu(Context& ctx, T* out, T* gate_up, T* normed, const acc<T>* x, const T* w,
                            const Linear<T>& W, int N, float eps);

// out = x + swiglu(rmsnorm(x) up^T) down^T
template <class T>
void mlp_cpu(Context& ctx, acc<T>* out, T* hidden, T* gate_up, T* normed, const acc<T>* x, const T* w,
             const Linear<T>& up, const Linear<T>& down, int N, float eps);

// The experts of each token, and the tokens of each expert
template <class T>
void route_cpu(Context& ctx, const Routed<T>& out, const T* x, const Linear<T>& W, const Batch& b, int k, bool normed);

// out = residual + the shares of a token's experts
template <class T>
void expert_mlp_cpu(Context& ctx, acc<T>* out, T* gate_up, T* hidden, T* rows, const acc<T>* residual, const T* x,
                    const std::vector<Expert<T>>& experts, const Routed<T>& to, int N, int k);

// The logits of R named rows
template <class T>
void head_cpu(Context& ctx, acc<T>* logits, T* picked, const T* x, const int* rows, const Linear<T>& W, int R);

// ---- Sampler: cpu/sample.cpp

// Samples the same id as `sample`
int sample_cpu(const Context& ctx, const float* logits, int exist, const Sampling& how, uint64_t counter);

// The k likeliest ids and the sum that makes log-probabilities of logits, as `likeliest`
void likeliest_cpu(const Context& ctx, Likeliest& out, const float* logits, int exist, int k);

// ---- Backward ops: cpu/backward.cpp, backward_products.cpp

// Losses of rows of logits, which become their gradients
template <class T>
void cross_entropy_cpu(Context& ctx, acc<T>* loss, T* dlogits, acc<T>* logits, const int* target, acc<T> scale, int R,
                       int V);

// Losses against a teacher's rows of logits, and their gradients in place
template <class T>
void distillation_cpu(Context& ctx, const Distilled<acc<T>>& out, T* dlogits, acc<T>* logits,
                      const DistillationRows<acc<T>>& of);

// Logits as outcomes, and the outcomes' gradients as those of logits
template <class A>
void gather_outcomes_cpu(Context& ctx, A* z, A* tail, A* logits, const int* id, int R, int J, int V);
template <class T>
void scatter_outcomes_cpu(Context& ctx, T* dlogits, acc<T>* logits, const T* dz, size_t ld, const acc<T>* tail,
                          const int* id, int R, int J, int V);

// head_cpu and cross_entropy_cpu
template <class T>
void head_loss_cpu(Context& ctx, acc<T>* loss, T* dlogits, acc<T>* factor, acc<T>* logits, T* picked, acc<T>* parts,
                   const T* x, const LossRows<acc<T>>& of, const Linear<T>& W);

// total += all losses, in order
template <class A> void add_losses_cpu(Context& ctx, double* total, const A* loss, int R);

// Row r of x times by[r]
template <class T> void scale_rows_cpu(Context& ctx, T* x, size_t ld, const acc<T>* by, int R, int n);

// Gradient of the head's input
template <class T>
void head_backward_cpu(Context& ctx, T* dx, const T* dlogits, size_t ld, const acc<T>* factor, const int* rows,
                       const Linear<T>& W, int R);

// Gradients of rmsnorm's input and weight
template <class T>
void rmsnorm_backward_cpu(Context& ctx, acc<T>* dx, T* rounded, T* out, acc<T>* dw, const T* dout, const acc<T>* x,
                          const T* w, int N, int C, float eps);

// Gradients of a product's input, of its adapter's h and B
template <class T>
void linear_backward_input_cpu(Context& ctx, T* dx, T* dh, acc<T>* dB, const T* dy, const Linear<T>& W, int N);

// Lengths of the rows of W + s B A, and DoRA's c
template <class T> void dora_norm_cpu(Context& ctx, const Linear<T>& W);

// dW += dy^T x
template <class T>
void linear_backward_weight_cpu(Context& ctx, acc<T>* dW, const T* dy, size_t ld, const T* x, int N, int out, int in);

// dA_j += dh_j^T drop_j(x)
template <class T>
void lora_backward_weight_cpu(Context& ctx, acc<T>* dA, const T* dh, const T* x, const Linear<T>& W, int N);

// Gradients of gate and up
template <class T>
void swiglu_backward_cpu(Context& ctx, T* dgate_up, T* out, const T* dout, const T* gate_up, int N, int F);

// linear_backward_input_cpu and swiglu_backward_cpu
template <class T>
void linear_backward_swiglu_cpu(Context& ctx, T* dgate_up, T* hidden, T* dhidden, T* dh, acc<T>* dB, const T* dy,
                                const T* gate_up, const Linear<T>& W, int N);

// Gradients of q and k after RoPE, and of v
template <class T>
void attention_backward_cpu(Context& ctx, T* dqkv, const T* dout, const Attended<T>& of, const LayerCache<T>& cache,
                            const Batch& b, const HeadShape& shape, acc<T>* delta);

// Those of q and k before norm and RoPE, in place, and of the norms' weights
template <class T>
void qknorm_rope_backward_cpu(Context& ctx, T* dqkv, const HeadNormGradients<T>& dnorms, const T* qkv,
                              const HeadNorms<T>& norms, const Batch& b, const HeadShape& shape);

// Both
template <class T>
void attend_backward_cpu(Context& ctx, T* dqkv, const HeadNormGradients<T>& dnorms, const T* dout,
                         const Attended<T>& of, const LayerCache<T>& cache, const T* qkv, const HeadNorms<T>& norms,
                         const Batch& b, const HeadShape& shape, acc<T>* delta);

// dW[token[n]] += dx[n]
template <class A> void embed_backward_cpu(Context& ctx, A* dW, const A* dx, const Batch& b, int C);

// The length of all gradients as one vector
template <class A> void grad_norm_cpu(Context& ctx, double* norm, double* partial, const A* g, size_t n);

// One step of AdamW
template <class T>
void adamw8_cpu(Context& ctx, T* stored, acc<T>* p, const Moments8& to, const acc<T>* g, const double* norm, size_t n,
                size_t decayed, const AdamW& a);
template <class T>
void adamw_cpu(Context& ctx, T* stored, acc<T>* p, acc<T>* m, acc<T>* v, const acc<T>* g, const double* norm, size_t n,
               const AdamW& a);
