// gpu/attention/attend.cu: attend, by whichever kernels its rows want; scratch.
#include "gpu/attention/decode.h"
#include "gpu/attention/prompt.h"
#include "gpu/attention/widen.h"
#include "gpu/packed/packed.h"
#include "qwen3.cu"

// Splits for a position in a context of so many tokens: 1, 2, 4, ... or all, a graph for each; blocks without keys cost
// little.
int splits_for_graph(int position, int context) {
    int splits = 1;
    while (splits * SPLIT <= position) splits *= 2;
    return std::min(splits, (context - 1) / SPLIT + 1);
}

// Numbers of scratch that attention needs: for so many sequences of one token, or for any others.
size_t attention_scratch(const Context& ctx, int singles, int splits, int H, int D) {
    return std::max((size_t)singles * H * splits, (size_t)BLOCKS_A_SM * ctx.gpu->sms * QUERY_ROWS) * (D + 2);
}

size_t widened_numbers(const Config& c, size_t pages) { return 2 * pages * c.K * PAGE * c.D; }
// Where the widened keys are; the values are behind them.
bf16* widen_pages_gpu(Context& ctx, bf16* keys, bf16* values, const Batch& b, int first, int K, int D) {
    bf16* const widened = ctx.gpu->widened;
    const dim3 grid((unsigned)K, (unsigned)std::max(1, 8 * ctx.gpu->sms / K));
    launch(ctx, D == 128 ? widen_pages_kernel<128> : widen_pages_kernel<64>, grid, 256, 0, widened,
           widened + ctx.gpu->widened_numbers / 2, keys, values, b, first, K);
    return widened;
}

void attend_gpu(Context& ctx, bf16* out, float* lse, bf16* q, bf16* keys, bf16* values, const bf16* qkv,
                       const bf16* q_weight, const bf16* k_weight, const float* rope, const Batch& b, int H, int K,
                       int D, float eps) {
    const int singles = ctx.invariant || lse ? 0 : b.singles; // attention_decode_kernel has no lse
    if (singles) {
        const DecodeArgs p = {out, keys, values, qkv, q_weight, k_weight, rope, b, H, K, eps,
                              ctx.gpu->attention, ctx.gpu->attention_arrived};
        attention_decode_gpu(ctx, p, singles, D);
    }
    if (singles == b.N) return;
    qknorm_rope_kv_gpu(ctx, q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps, singles);
    if (b.fp8) {
        keys = widen_pages_gpu(ctx, keys, values, b, singles, K, D);
        values = keys + ctx.gpu->widened_numbers / 2;
    }
    attention_gpu(ctx, out, lse, q, keys, values, b, H, K, D, singles);
}

// ---- Scratch: of products, and of forwards with so many rows and sequences of one token, of up to `context` tokens in
// `pages` pages. The context has a Gpu of its own from then on.
void plan_scratch(Context& ctx, Arena& arena) {
    ctx.gpu = std::make_shared<Gpu>(*ctx.gpu);
    ctx.gpu->partial = arena.take<float>(PARTIAL_BYTES / sizeof(float));
    ctx.gpu->arrived = arena.take<int>(MAX_TILES);
}
void plan_scratch(Context& ctx, Arena& arena, const Config& c, int rows, int singles, int context, int pages) {
    plan_scratch(ctx, arena);
    ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, singles, (context - 1) / SPLIT + 1, c.H, c.D));
    ctx.gpu->attention_arrived = arena.take<int>((size_t)singles * c.H);
    ctx.gpu->widened_numbers = ctx.kv_fp8 ? widened_numbers(c, (size_t)pages) : 0;
    ctx.gpu->widened = arena.take<bf16>(ctx.gpu->widened_numbers);
    plan_rounded(ctx, arena, c, rows);
}
