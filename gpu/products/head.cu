// gpu/products/head.cu: head.
#include "gpu/ops.h"
#include "gpu/products/product.h"
#include "qwen3.cu"

void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W,
                     int R) {
    pick_rows_gpu(ctx, picked, x, rows, R, W.in);
    if (W.format == Format::PLAIN || (R <= STREAM_TOKENS && !ctx.invariant) || streams_packed(ctx, W, R))
        return product_gpu(ctx, StoreEpilogue<float>(logits, W.out()), picked, W, R);
    each_part(ctx, W, false, [&](int first, int count, const bf16* weights) {
        const AfterUnpacking order(ctx, W);
        tile_product(ctx, {picked, weights, R, W.in, count}, StoreEpilogue<float>(logits + first, W.out()));
    });
}
