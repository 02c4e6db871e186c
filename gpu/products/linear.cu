// gpu/products/linear.cu: linear and norm_linear.
#include "gpu/ops.h"
#include "gpu/products/product.h"
#include "qwen3.cu"

void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), x, W, N);
}
void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* x, const bf16* w,
                            const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), normed, x, w, W, N, eps);
}
