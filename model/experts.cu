// model/experts.cu: route, expert_mlp and experts_backward (Book I) on a GPU, for any card from sm_80 on.
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

// The first expert's matrix, and the others' distance in `of`.
static const Linear<bf16>& plain_experts(ExpertsArgs& of, const std::vector<Expert<bf16>>& experts,
                                         Linear<bf16> Expert<bf16>::*which) {
    const Linear<bf16>& W = experts[0].*which;
    if (W.format != Format::PLAIN) DIE("experts on a GPU: packed, in a portable build");
    of.apart[0] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.w[0]; });
    return W;
}

void expert_mlp_gpu(Context& ctx, float* out, bf16* gate_up, bf16* hidden, bf16* rows, const float* residual,
                    const bf16* x, const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k) {
    float* const y = (float*)rows;
    if (Optional::experts(ctx, out, gate_up, hidden, y, residual, x, experts, to, N, k)) return;
    expert_mlp_by(ctx, out, gate_up, hidden, y, residual, x, experts, to, N, k,
                  [&](auto which, const bf16* x, int first, int rows, ExpertsArgs of, auto epilogue) {
        const Linear<bf16>& W = plain_experts(of, experts, which);
        const bf16* const from = W.w[0] + (size_t)first * W.in;
        const StreamArgs p = {x, nullptr, nullptr, nullptr, 0, from, 0, W.in, rows};
        expert_product<false>(ctx, p, of, N, epilogue);
    });
}

void experts_backward_gpu(Context& ctx, const Flow<bf16>& d, bf16* hidden, bf16* rows, const bf16* gate_up,
                          const Layer<bf16>& layer, const Routed<bf16>& to, int N, int k, bool normed) {
    const std::vector<Expert<bf16>>& experts = layer.experts;
    const int E = (int)experts.size(), C = layer.router.in;
    if (!Optional::experts_backward(ctx, d, hidden, rows, gate_up, experts, to, N, k))
        experts_backward_by(ctx, d, hidden, rows, gate_up, experts, to, N, k,
                            [&](auto which, const bf16* dy, int first, int columns, ExpertsArgs of, auto epilogue) {
            const Linear<bf16>& W = plain_experts(of, experts, which);
            const StreamArgs p = {dy, nullptr, nullptr, nullptr, 0, W.w[0] + first, 0, W.out(), columns};
            expert_product<true>(ctx, ExpertColumns{p, W.in}, of, N, epilogue);
        });
    launch(ctx, route_backward_kernel<Routed<bf16>>, dim3(N), 128, (size_t)E * 4, d.scores, d.share, d.slope, to, E, k,
           normed);
    launch_tiles<Tile64x64, false, true>(ctx, {d.scores, layer.router.w[0], N, E, C},
                                         AddRoundedEpilogue(d.normed, d.sum, C));
}

void balance_loss_gpu(Context& ctx, double* total, float* slope, const Config& c, const Activations<bf16>& a,
                      const Batch& b, double weight, double scale) {
    double *const f = (double*)ctx.gpu->partial, *const P = f + c.E; // sums over the layers so far
    clear(ctx, f, 2 * (size_t)c.E);
    for (int l = 0; l < c.L; l++)
        if (c.sparse(l))
            launch(ctx, balance_sums_kernel<Routed<bf16>>, dim3((c.E + 31) / 32), 1024, 0, f, P, a.layer[l].routed,
                   b.seq, b.N, c.E);
    launch(ctx, balance_kernel<float>, dim3(1), 256, 0, total, slope, f, P, c.E, c.k, weight, scale);
}
#endif
