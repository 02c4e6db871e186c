// model/experts.cu: route and expert_mlp (Book I) on a GPU, for any card from sm_80 on.
#ifdef QWEN3_GPU
#include "model/expert_products.h"

void route_gpu(Context& ctx, const Routed<bf16>& out, const bf16* x, const Linear<bf16>& W, const Batch& b, int k,
               bool normed) {
    const int E = W.out();
    if (k > 32) DIE("route: %d experts a token; the GPU's kernel takes 32", k);
    if (W.format != Format::PLAIN) DIE("route: the router's weights are packed; the GPU's kernels take bfloat16");
    const StoreEpilogue<float> scores(out.p, E);
    if (b.N <= STREAM_TOKENS && !ctx.invariant)
        stream_product(ctx, {x, nullptr, nullptr, nullptr, 0, W.w[0], b.N, W.in, E}, scores);
    else launch_tiles<Tile64x64>(ctx, {x, W.w[0], b.N, W.in, E}, scores);
    launch(ctx, choose_kernel<Routed<bf16>>, dim3(b.N), 128, (size_t)E * 8, out, b.seq, E, k, normed);
    launch(ctx, group_kernel<Routed<bf16>>, E, 256, 0, out, b.N * k, E);
}

void expert_mlp_gpu(Context& ctx, float* out, bf16*, bf16* hidden, bf16* rows, const float* residual, const bf16* x,
                    const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k) {
    float* const y = (float*)rows;
    if (Optional::experts(ctx, out, hidden, y, residual, x, experts, to, N, k)) return;
    expert_mlp_by(ctx, out, hidden, y, residual, x, experts, to, N, k,
                  [&](auto which, const bf16* x, int first, int rows, ExpertsArgs of, auto epilogue) {
        const Linear<bf16>& W = experts[0].*which;
        if (W.format != Format::PLAIN) DIE("experts on a GPU: packed, in a portable build");
        of.apart[0] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.w[0]; });
        const bf16* const from = W.w[0] + (size_t)first * W.in;
        expert_product(ctx, StreamArgs{x, nullptr, nullptr, nullptr, 0, from, 0, W.in, rows}, of, N, epilogue);
    });
}
#endif
