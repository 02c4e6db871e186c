// gpu/products/linear_add.cu: linear_add.
#include "gpu/ops.h"
#include "gpu/products/product.h"
#include "qwen3.cu"

void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W,
                           int N) {
    product_gpu(ctx, AddEpilogue(out, residual, W.out()), x, W, N);
}
