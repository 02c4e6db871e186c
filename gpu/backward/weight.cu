// gpu/backward/weight.cu: compiles linear_backward_weight of qwen3.cu, section 13, with the optional kernels.
#define PART_WEIGHT 1
#include "gpu/optional_products.h"
#include "qwen3.cu"

// For some shapes the transposed product has fewer waves of tiles.
bool Optional::weight_gradient(Context& ctx, float* dW, const TileArgs& p, const TileArgs& transposed) {
    const auto time = [&](const TileArgs& q) { return HopperPlan(ctx, MOST_SPLITS, q.N, q.out, q.in, false).least; };
    if (!ctx.gpu->hopper || ctx.invariant || !(time(transposed) < time(p))) return false;
    hopper_product<true, true>(ctx, transposed, AddTransposedEpilogue(dW, transposed.N));
    return true;
}
