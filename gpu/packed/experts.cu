// gpu/packed/experts.cu: experts with packed weights. Up to 16 tokens: packed_kernel's loads in expert_stream_kernel.
// More, and the backward products: expert_tile_kernel, whose copies of W unpack it to bf16, eight numbers a thread at a
// time.
#include "gpu/packed/few.h"
#include "gpu/packed/unpack.h"
#include "model/expert_products.h"
#include "qwen3.cu"

template <class F> struct PackedExperts : PackedArgs {
    int column = 0; // of a transposed product: its first one
};

template <class F, int TILES, bool PAIR> struct ExpertStream<PackedExperts<F>, TILES, PAIR> {
    using Loads = PackedWeights<F, TILES, PAIR>;
    static constexpr int STEP = Loads::STEP, IN_FLIGHT = F::LOADS, WARPS = 8;
};
template <class F> __device__ inline void go_to(PackedExperts<F>& p, const ExpertsArgs& of, int e) {
    p.q += e * of.apart[0];
    p.scale = (const uint8_t*)p.scale + e * of.apart[1];
    if (p.zero) p.zero += e * of.apart[2];
}

__device__ inline void store_chunk(uint32_t shared, const uint4& v) { // PTX ISA: st.shared
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// As TileStages::copy_w; numbers are rounded as unpack_kernel rounds them.
template <class S, bool W_COLS, bool PAIR, class F>
__device__ __forceinline__ void copy_expert_w(const ExpertStages<S, W_COLS, PAIR>& stages,
                                              const PackedExperts<F>& weights, int step) {
    const auto& cw = stages.cw;
    const uint32_t to = stages.w_stage(step) + cw.offset;
    const int number = stages.at.number(step);
    #pragma unroll
    for (int k = 0; k < cw.COUNT; k++) {
        const int row = cw.row + k * cw.STEP; // of the stage
        const int r = W_COLS ? number + row
                             : PAIR ? stages.at.r0 / 2 + row / 32 * 16 + row % 16 : stages.at.r0 + row;
        const int i = (W_COLS ? stages.at.r0 : number) + cw.chunk * 8; // column
        uint4 v = {};
        const bool inside = W_COLS ? r < weights.in && i < weights.out : r < weights.out && i < weights.in;
        if (step < stages.at.last && inside) {
            float y[8];
            unpack_run<F>(y, weights, PAIR && row / 16 % 2 ? weights.out + r : r, i + (W_COLS ? weights.column : 0));
            v = make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
        }
        store_chunk(to + k * cw.STEP * 128, v);
    }
}

static bool are_plain(const std::vector<Expert<bf16>>& experts) {
    return experts[0].gate_up.format == Format::PLAIN && experts[0].down.format == Format::PLAIN;
}
// The first expert's matrix, and the others' distances in `of`.
static const Linear<bf16>& packed_experts(ExpertsArgs& of, const std::vector<Expert<bf16>>& experts,
                                          Linear<bf16> Expert<bf16>::*which) {
    of.apart[0] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.q[0]; });
    of.apart[1] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.scale[0]; });
    of.apart[2] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.zero[0]; });
    return experts[0].*which;
}

bool Optional::experts(Context& ctx, float* out, bf16* gate_up, bf16* hidden, float* y, const float* residual,
                       const bf16* x, const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k) {
    if (are_plain(experts)) return false;
    expert_mlp_by(ctx, out, gate_up, hidden, y, residual, x, experts, to, N, k,
                  [&](auto which, const bf16* x, int first, int rows, ExpertsArgs of, auto epilogue) {
        const Linear<bf16>& W = packed_experts(of, experts, which);
        if (first % W.group_rows) DIE("experts on a GPU: blocks of %d rows", W.group_rows);
        with_packing(W, [&](auto format) {
            using F = decltype(format);
            PackedExperts<F> p = {packed_args(W)};
            const size_t scales = (size_t)(first / W.group_rows) * p.groups;
            p.q += (size_t)first * p.row_bytes;
            p.scale = (const uint8_t*)p.scale + scales * sizeof(typename F::Raw);
            if (p.zero) p.zero += scales;
            p.x = x, p.out = rows;
            expert_product<false>(ctx, p, of, N, epilogue);
        });
    });
    return true;
}

bool Optional::experts_backward(Context& ctx, const Flow<bf16>& d, const ExpertsBackward& in,
                                const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k) {
    if (are_plain(experts)) return false;
    experts_backward_by(ctx, d, in, experts, to, N, k,
                        [&](auto which, const bf16* dy, int first, int columns, ExpertsArgs of, auto epilogue) {
        const Linear<bf16>& W = packed_experts(of, experts, which);
        with_packing(W, [&](auto format) {
            PackedExperts<decltype(format)> p = {packed_args(W), first};
            p.x = dy, p.in = W.out(), p.out = columns;
            expert_product<true>(ctx, p, of, N, epilogue);
        });
    });
    return true;
}
