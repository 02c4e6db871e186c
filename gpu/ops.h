// gpu/ops.h: the ops of Book I on a GPU, by their launchers; no CUDA types.
// RUN in qwen3.cu calls op_gpu with the arguments of op: shapes stand there. Nothing waits for the GPU. Each throws
// Error if its kernels cannot compute these sizes.
#pragma once
#include "qwen3.cu"

// ---- Forward
void embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b, int C);
void packed_embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b); // of a packed table
void rmsnorm_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, int N, int C, float eps);
// h of W's adapter. made: its dropout masks are there.
void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N, bool made = false);
void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N);
void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W, int N);
void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* x, const bf16* w, const Linear<bf16>& W,
                     int N, float eps);
// Rows from `first` on; so has attention_gpu.
void qknorm_rope_kv_gpu(Context& ctx, bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight,
                        const bf16* k_weight, const float* rope, const Batch& b, int H, int K, int D, float eps,
                        int first = 0);
void attention_gpu(Context& ctx, bf16* out, float* lse, const bf16* q, const bf16* keys, const bf16* values,
                   const Batch& b, int H, int K, int D, int first = 0);
void attend_gpu(Context& ctx, bf16* out, float* lse, bf16* q, bf16* keys, bf16* values, const bf16* qkv,
                const bf16* q_weight, const bf16* k_weight, const float* rope, const Batch& b, int H, int K, int D,
                float eps);
void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
                            const Linear<bf16>& W, int N, float eps);
void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W, int R);
void pick_rows_gpu(Context& ctx, bf16* picked, const bf16* x, const int* rows, int R, int C); // head's first half

// ---- Backward
void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* factor, float* logits, bf16* picked, float* parts,
                   const bf16* x, const int* rows, const int* target, float scale, const float* by,
                   const Linear<bf16>& W, int R);
void add_losses_gpu(Context& ctx, double* total, const float* loss, int R);
void scale_rows_gpu(Context& ctx, bf16* x, size_t ld, const float* by, int R, int n);
void head_backward_gpu(Context& ctx, bf16* dnormed, const bf16* dlogits, size_t ld, const float* factor,
                       const int* rows, const Linear<bf16>& W, int R);
void rmsnorm_backward_gpu(Context& ctx, float* dx, bf16* dy, bf16* normed, float* dw, const bf16* dout, const float* x,
                          const bf16* w, int N, int C, float eps);
void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, float* dB, const bf16* dy, const Linear<bf16>& W,
                               int N);
void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N, int out,
                                int in);
void linear_backward_swiglu_gpu(Context& ctx, bf16* dgate_up, bf16* hidden, bf16* dhidden, bf16* dh, float* dB,
                                const bf16* dy, const bf16* gate_up, const Linear<bf16>& W, int N);
void lora_backward_weight_gpu(Context& ctx, float* dA, const bf16* dh, const bf16* x, const Linear<bf16>& W, int N);
void attention_backward_gpu(Context& ctx, bf16* dqkv, const bf16* dout, const bf16* q, const bf16* keys,
                            const bf16* values, const bf16* out, const float* lse, const Batch& b, int H, int K, int D,
                            float* delta);
void qknorm_rope_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* qkv,
                              const bf16* q_weight, const bf16* k_weight, const float* rope, const Batch& b, int H,
                              int K, int D, float eps);
void attend_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* dout, const bf16* q,
                         const bf16* keys, const bf16* values, const bf16* out, const float* lse, const bf16* qkv,
                         const bf16* q_weight, const bf16* k_weight, const float* rope, const Batch& b, int H, int K,
                         int D, float eps, float* delta);
void embed_backward_gpu(Context& ctx, float* dW, const float* dx, const Batch& b, int C);
void grad_norm_gpu(Context& ctx, double* norm, double* partial, const float* g, size_t n);
void adamw_gpu(Context& ctx, bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n,
               const AdamW& a);

// ---- Scratch
// Takes scratch for products; or for forwards of up to `rows` rows and `singles` sequences of one token, of up to
// `context` tokens in `pages` pages. From then on the context has a Gpu of its own.
void plan_scratch(Context& ctx, Arena& arena);
void plan_scratch(Context& ctx, Arena& arena, const Config& c, int rows, int singles, int context, int pages);
// Numbers of scratch that attention needs: for so many sequences of one token, or for any others.
size_t attention_scratch(const Context& ctx, int singles, int splits, int H, int D);
size_t widened_numbers(const Config& c, size_t pages); // of a layer's FP8 cache as bf16
// Splits for a position in a context of so many tokens: 1, 2, 4, ... or all, a graph for each; blocks without keys cost
// little.
int splits_for_graph(int position, int context);
