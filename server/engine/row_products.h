// row_products.h: the products of Book I on a GPU for rows with different adapters: first the adapters' part, then the
// product with W, whose epilogue adds it before rounding. W itself has no adapter.
#pragma once
#include "qwen3.cu"

namespace server {

struct RowAdapters {
    const Adapter<bf16>* const* of; // (N) the adapters of a row's products, 4 per layer; null: none
    int product;                    // index of this product
    float* sums;                    // (N, out) scratch
    BOTH const Adapter<bf16>* at(int n) const { return of[n] ? of[n] + product : nullptr; }
};

// linear, linear_add and norm_linear_swiglu's product. Throws Error unless W's columns are a multiple of 8.
void rows_linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, RowAdapters adapters, int N);
void rows_linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W,
                         RowAdapters adapters, int N);
void rows_linear_swiglu_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, RowAdapters adapters, int N);

} // namespace server
