// model/experts.cu: route, expert_mlp and experts_backward (Book I) on a GPU, for any card from sm_80 on.
#ifdef QWEN3_GPU
#include "model/expert_products.h"

void route_gpu(Context& ctx, const Routed<bf16>& out, const bf16* x, const Linear<bf16>& W, const Batch& b, int k,
               bool normed) {
    const int E = W.out();
    if (k > 32) DIE("route: %d experts a token; the GPU's kernel takes 32", k);
    if (W.format != Format::PLAIN) DIE("route: the router's weights are packed; the GPU's kernels take bfloat16");
    scores_gpu(ctx, out.p, x, W, b.N);
    launch(ctx, choose_kernel<Routed<bf16>>, dim3(b.N), 128, ((size_t)E + 3) / 4 * 32, out, b.seq, E, k, normed);
    if (b.N > 1) launch(ctx, group_kernel<Routed<bf16>>, E, b.N * k > 2048 ? 1024 : 256, 0, out, b.N * k, E);
}

// The first expert's matrix, and the others' distance in `of`.
static const Linear<bf16>& plain_experts(ExpertsArgs& of, const std::vector<Expert<bf16>>& experts, WhichMatrix which) {
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
        expert_product<false>(ctx, StreamArgs::of(x, W.w[0] + (size_t)first * W.in, 0, W.in, rows), of, N, epilogue);
    });
}

// ---- Adapters of experts
// Rows (., columns) of one operand of dW, as ExpertInput.
struct WeightRows {
    const bf16* at;
    bool by_token;
    int columns;
};
// dA and dB: dW_e += a^T b over the pairs of expert e: tile_kernel's loop, both operands in columns. Grid: (tiles of
// dW, experts). Copies gather the rows of tokens.
template <class S, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, 1)
expert_weight_kernel(WeightRows a, WeightRows b, ExpertsArgs of, Epilogue epilogue, size_t apart) {
    extern __shared__ __align__(128) uint4 memory[];
    let_next_start();
    wait_for_previous();
    const int e = blockIdx.y, first = of.first[e], n = of.first[e + 1] - first;
    if (!n) return;
    epilogue.move(e * apart);
    const TileArgs p = {a.at, b.at, a.columns, n, b.columns};
    const TilePlace<S, false> at(p, blockIdx.x, 0);
    const TileStages<S, true, true, false> stages = {p, at, shared_address(memory), {}, {}};
    const auto copy_rows = [&](uint32_t stage, const auto& copy, const WeightRows& from, int step, int column) {
        column += copy.chunk * 8;
        #pragma unroll
        for (int k = 0; k < copy.COUNT; k++) {
            const int i = step * STAGE_IN + copy.row + k * copy.STEP, pair = first + min(i, n - 1);
            const size_t row = from.by_token ? of.pair[pair] / of.k : pair;
            const bool inside = i < n && column < from.columns;
            copy_async(stage + copy.offset + k * copy.STEP * 128, from.at + row * from.columns + (inside ? column : 0),
                       inside);
        }
    };
    const auto copy = [&](int step) {
        if (step >= at.last) return;
        copy_rows(stages.x_stage(step), stages.cx, a, step, at.n0);
        copy_rows(stages.w_stage(step), stages.cw, b, step, at.r0);
    };
    float sum[S::MF][S::NF][4] = {};
    MmaWalk::run<S, true, true>(sum, stages, copy);
    #pragma unroll
    for (int i = 0; i < S::MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
            finish_row<S>(sum[i], h, at.token(i, h), at.r0 + S::warp_row(), p.N, p.out, epilogue);
}
struct ExpertAddEpilogue : AddEpilogue { // dA += y
    ExpertAddEpilogue(float* dA, size_t in) : AddEpilogue(dA, dA, in) {}
    __device__ void move(size_t by) { out += by, residual += by; }
};
struct ExpertLoraUpEpilogue : LoraUpEpilogue { // dB += s y
    ExpertLoraUpEpilogue(float* dB, const Linear<bf16>& W) : LoraUpEpilogue(dB, W) {}
    __device__ void move(size_t by) { dB += by; }
};
// apart: numbers from one expert's dW to the next one's
template <class Epilogue>
static void weight_product(Context& ctx, const WeightRows& a, const WeightRows& b, const ExpertsArgs& of,
                           Epilogue epilogue, size_t apart) {
    using S = Tile64x64;
    launch(ctx, expert_weight_kernel<S, Epilogue>, dim3((unsigned)count_tiles<S>(a.columns, b.columns), of.E),
           S::THREADS, S::SHARED, a, b, of, epilogue, apart);
}

// `of` for a product with A or B of all experts.
static ExpertsArgs args_of(const ExpertsArgs& of, size_t apart, bool by_token) {
    ExpertsArgs own = {of.first, of.pair, of.E, of.k, by_token};
    own.apart[0] = apart;
    return own;
}
void expert_lora_down(Context& ctx, ExpertsArgs& of, const std::vector<Expert<bf16>>& experts, WhichMatrix which,
                      const ExpertInput& x, int N) {
    const Linear<bf16>& W = experts[0].*which;
    const Adapter<bf16>& a = W.adapter;
    of.more = {};
    if (!a.rank) return;
    const int width = (int)a.width();
    const size_t A = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.adapter.A; });
    const size_t B = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.adapter.B; });
    if (a.dropout) DIE("adapters of experts on a GPU: with dropout");
    const StreamArgs p = StreamArgs::of(x.at, a.A, 0, W.in, width);
    launch_expert_tiles<Tile64x64, false>(ctx, p, args_of(of, A, x.by_token), N * of.k, ExpertRowsStore(a.h, width));
    of.more = {a.h, a.B, width, width, B};
}
void expert_lora_backward(Context& ctx, ExpertsArgs& of, const std::vector<Expert<bf16>>& experts, WhichMatrix which,
                          float* dA, float* dB, bf16* dh, const ExpertInput& dy, const ExpertInput& x, int N) {
    const Linear<bf16>& W = experts[0].*which;
    const Adapter<bf16>& a = W.adapter;
    expert_lora_down(ctx, of, experts, which, x, N); // forward did not keep h
    if (!a.rank) return;
    const int width = (int)a.width();
    const size_t A = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.adapter.A; });
    const size_t B = of.more.apart, number = sizeof(bf16);
    const StreamArgs p = StreamArgs::of(dy.at, a.B, 0, W.out(), width);
    launch_expert_tiles<Tile64x64, true>(ctx, ExpertColumns{p, width}, args_of(of, B, dy.by_token), N * of.k,
                                         ExpertRowsStore(dh, width));
    weight_product(ctx, {dy.at, dy.by_token, W.out()}, {a.h, false, width}, of, ExpertLoraUpEpilogue(dB, W),
                   B / number);
    weight_product(ctx, {dh, false, width}, {x.at, x.by_token, W.in}, of, ExpertAddEpilogue(dA, W.in), A / number);
    of.more = {dh, a.A, width, W.in, A};
}

void experts_backward_gpu(Context& ctx, const Flow<bf16>& d, const ExpertsBackward& in, const Layer<bf16>& layer,
                          const Routed<bf16>& to, int N, int k, bool normed) {
    const std::vector<Expert<bf16>>& experts = layer.experts;
    const int E = (int)experts.size(), C = layer.router.in;
    if (!Optional::experts_backward(ctx, d, in, experts, to, N, k))
        experts_backward_by(ctx, d, in, experts, to, N, k,
                            [&](auto which, const bf16* dy, int first, int columns, ExpertsArgs of, auto epilogue) {
            const Linear<bf16>& W = plain_experts(of, experts, which);
            const StreamArgs p = StreamArgs::of(dy, W.w[0] + first, 0, W.out(), columns);
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
