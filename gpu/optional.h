// gpu/optional.h: the optional kernels, declared. qwen3.cu, 8, says how Book II calls them; templates are defined
// in gpu/optional_products.h.
#pragma once
#include "model/context.h"
#include "model/gpu_ops.h"
#include <cstddef>
#include <memory>
#include <vector>

struct AttentionArgs; // qwen3.cu, Book II, has these
struct AttentionBackward;
struct ExpertsArgs; // model/expert_products.h
struct TileArgs;
template <class T> struct Weights; // Book I

struct Optional {
    // embed of a packed table.
    static bool embed(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b);
    // The product of up to 16 tokens, rows `rows` of x or (null) the first N, with packed weights.
    template <class Epilogue>
    static RowsDealt few(Context& ctx, const Epilogue& epilogue, const bf16* x, const int* rows, const Linear<bf16>& W,
                         int N);
    // The product of more tokens with packed weights as they are stored. It may round the activations in x; rounded: x,
    // if that is already stored as e4m3.
    template <class Epilogue>
    static bool many(Context& ctx, const Epilogue& epilogue, const bf16*& x, const E4M3Rows& rounded,
                     const Linear<bf16>& W, int N);
    // output: see norm_product_gpu.
    template <class Epilogue>
    static bool norm_many(Context& ctx, const Epilogue& epilogue, const float* stream, const bf16* norm,
                          const Linear<bf16>& W, int N, float eps, E4M3Rows* output);
    // A product by tiles: on Hopper.
    template <bool X_COLS, bool W_COLS, class Epilogue>
    static bool tiles(Context& ctx, const TileArgs& p, const Epilogue& epilogue);
    // linear_backward_weight, where its transposed product takes less time.
    static bool weight_gradient(Context& ctx, float* dW, const TileArgs& p, const TileArgs& transposed);
    // Calls use(weights) with W in bf16; or use(first, count, weights) for parts of its rows or columns.
    template <class Use> static void weights(Context& ctx, const Linear<bf16>& W, Use use);
    template <class Use> static void parts(Context& ctx, const Linear<bf16>& W, bool columns, Use use);
    // Calls use(rows) with W's rows if it is packed: rows.run(y, r, k, W.in) reads RUN numbers of row r from k on.
    template <class Use> static bool packed_rows(const Linear<bf16>& W, Use use);
    // A product of many pairs with their experts' weights: on Hopper.
    template <bool W_COLS, class Weights, class Epilogue>
    static bool expert_tiles(Context& ctx, const Weights& p, const ExpertsArgs& of, int pairs,
                             const Epilogue& epilogue);
    // expert_mlp with packed weights, and the experts' part of experts_backward; y: see expert_scratch.
    static bool experts(Context& ctx, float* out, bf16* gate_up, bf16* hidden, float* y, const float* residual,
                        const bf16* x, const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k);
    static bool experts_backward(Context& ctx, const Flow<bf16>& d, const ExpertsBackward& in,
                                 const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k);
    // attention of prompts, for heads of D numbers: the number of splits of the keys.
    static int attention(Context& ctx, const AttentionArgs& p, int D);
    static bool attention_backward(Context& ctx, const AttentionBackward& p, int D);
    // dh and dB of an adapter, see lora_up_backward.
    static bool lora_up(Context& ctx, bf16* dh, float* dB, bf16* scratch, const bf16* dy, const Linear<bf16>& W, int N);
    // Scratch of forwards of up to `rows` rows.
    static void plan(Context& ctx, Arena& arena, const Config& c, int rows);
    // A step as one kernel, or null; its copy of the weights takes at most 1 / share of the free memory, less
    // `spoken_for`.
    static std::unique_ptr<OneKernelStep> one_kernel(const Context& ctx, const Config& c, const Weights<bf16>& w,
                                                     size_t share = 2, size_t spoken_for = 0);
    static constexpr bool HERE = true; // gpu/ is part of this build
};
