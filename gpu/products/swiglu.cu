// gpu/products/swiglu.cu: norm_linear_swiglu.
#include "gpu/ops.h"
#include "gpu/products/product.h"
#include "qwen3.cu"

void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
                                   const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, SwigluEpilogue(out, gate_up, W.rows[0]), normed, x, w, W, N, eps);
}
