// gpu/products/weight.cu: linear_backward_weight.
#include "gpu/ops.h"
#include "gpu/products/plans.h"
#include "qwen3.cu"

// dW of training, and X^T X of GPTQ (model/quantize.h). Of some shapes the transposed product has fewer waves
// of tiles.
void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N,
                                       int out, int in) {
    TileArgs p = {dy, x, out, N, in}, transposed = {x, dy, in, N, out};
    p.ldx = transposed.ldw = (int)ld;
    const auto time = [&](int out, int in) { return HopperPlan(ctx, MOST_SPLITS, out, in, N, false).least; };
    if (ctx.gpu->hopper && !ctx.invariant && time(in, out) < time(out, in))
        return hopper_product<true, true>(ctx, transposed, AddTransposedEpilogue(dW, in));
    tile_product<true, true>(ctx, p, AddEpilogue(dW, dW, in));
}
