// gpu/packed/experts.cu: experts with packed weights. Up to 16 tokens: packed_kernel's loads in expert_stream_kernel.
// More: expert_tile_kernel, whose copies of W unpack it to bf16, eight numbers a thread at a time.
#include "gpu/packed/few.h"
#include "gpu/packed/unpack.h"
#include "model/expert_products.h"
#include "qwen3.cu"

template <class F> struct PackedExperts : PackedArgs {};

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
template <class S, bool PAIR, class F>
__device__ __forceinline__ void copy_expert_w(const ExpertStages<S, PAIR>& stages, const PackedExperts<F>& weights,
                                              int step) {
    const auto& cw = stages.cw;
    const uint32_t to = stages.w_stage(step) + cw.offset;
    const int i = stages.at.number(step) + cw.chunk * 8;
    const bool inside = step < stages.at.last && i < stages.p.in;
    #pragma unroll
    for (int k = 0; k < cw.COUNT; k++) {
        const int row = cw.row + k * cw.STEP;
        const int r = PAIR ? stages.at.r0 / 2 + row / 32 * 16 + row % 16 : stages.at.r0 + row;
        uint4 v = {};
        if (inside && r < weights.out) {
            float y[8];
            unpack_run<F>(y, weights, PAIR && row / 16 % 2 ? weights.out + r : r, i);
            v = make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
        }
        store_chunk(to + k * cw.STEP * 128, v);
    }
}

bool Optional::experts(Context& ctx, float* out, bf16* hidden, float* y, const float* residual, const bf16* x,
                       const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k) {
    if (experts[0].gate_up.format == Format::PLAIN && experts[0].down.format == Format::PLAIN) return false;
    expert_mlp_by(ctx, out, hidden, y, residual, x, experts, to, N, k,
                  [&](auto which, const bf16* x, int first, int rows, ExpertsArgs of, auto epilogue) {
        const Linear<bf16>& W = experts[0].*which;
        of.apart[0] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.q[0]; });
        of.apart[1] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.scale[0]; });
        of.apart[2] = distance_of_experts(experts, which, [](const Linear<bf16>& W) { return W.zero[0]; });
        if (first % W.group_rows) DIE("experts on a GPU: blocks of %d rows", W.group_rows);
        with_packing(W, [&](auto format) {
            using F = decltype(format);
            PackedExperts<F> p = {packed_args(W)};
            const size_t scales = (size_t)(first / W.group_rows) * p.groups;
            p.q += (size_t)first * p.row_bytes;
            p.scale = (const uint8_t*)p.scale + scales * sizeof(typename F::Raw);
            if (p.zero) p.zero += scales;
            p.x = x, p.out = rows;
            expert_product(ctx, p, of, N, epilogue);
        });
    });
    return true;
}
