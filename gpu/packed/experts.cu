// gpu/packed/experts.cu: experts with packed weights. Few tokens: packed_kernel's loads in expert_stream_kernel. More,
// and the backward products: expert_tile_kernel, whose copies of W unpack it to bf16, eight numbers a thread at a time.
#include "gpu/packed/few.h"
#include "gpu/packed/unpack.h"
#include "gpu/products/experts.h"
#include "qwen3.cu"

template <class F> struct PackedExperts : PackedArgs {
    int column = 0; // of a transposed product: its first one
};

// INT4 in groups of 64 columns and more has twice packed_kernel's loads in flight: nothing is read ahead of the kernel.
template <class F> struct MoreLoads : F {};
template <> struct MoreLoads<PackedInt4<1>> : PackedInt4<1> {
    static constexpr int LOADS = 8;
};
template <class F, int TILES, bool PAIR> struct ExpertStream<PackedExperts<F>, TILES, PAIR> {
    using Loads = PackedWeights<MoreLoads<F>, TILES, PAIR>;
    static constexpr int STEP = Loads::STEP, WARPS = 8;
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
// As TileStages::copy_w; numbers are rounded as unpack_kernel rounds them (FP8: but for ties of the two words of a
// scale). The packed bytes of the next step are requested before this step's products.
template <class Stages, class F> struct ExpertCopies<Stages, PackedExperts<F>> {
    static constexpr int COUNT = decltype(Stages::cw)::COUNT;
    const Stages& stages;
    const PackedExperts<F>& weights;
    uint2 q[COUNT];
    typename F::Raw scale[COUNT];
    uint32_t zero[COUNT];

    __device__ ExpertCopies(const Stages& stages, const PackedExperts<F>& weights) : stages(stages), weights(weights) {
        request(stages.at.first);
    }
    __device__ __forceinline__ int column(int step) const { // of W, first of a chunk
        return (Stages::COLS ? stages.at.r0 + weights.column : stages.at.number(step)) + stages.cw.chunk * 8;
    }
    __device__ __forceinline__ void request(int step) {
        const auto& cw = stages.cw;
        const int i = column(step), end = Stages::COLS ? weights.column + weights.out : weights.in;
        #pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int row = cw.row + k * cw.STEP; // of the stage
            const int r = Stages::COLS    ? stages.at.number(step) + row
                          : Stages::PAIRS ? stages.at.r0 / 2 + row / 32 * 16 + row % 16
                                          : stages.at.r0 + row;
            const int from = Stages::PAIRS && row / 16 % 2 ? weights.out + r : r;
            const bool there = step < stages.at.last && i < end && r < (Stages::COLS ? weights.in : weights.out);
            q[k] = uint2{}, scale[k] = typename F::Raw{}, zero[k] = 0;
            if (!there) continue;
            q[k] = *(const uint2*)(weights.q + (size_t)from * weights.row_bytes + F::byte(i));
            scale[k] = ((const typename F::Raw*)weights.scale)[weights.template scale_at<F>(from, i)];
            if (F::ZEROS) zero[k] = weights.template zero_at<F>(from, i);
        }
    }
    __device__ __forceinline__ void copy(int step) {
        const auto& cw = stages.cw;
        const uint32_t to = stages.w_stage(step) + cw.offset;
        const int upper = F::RUNS == 2 ? column(step) / 32 % 2 : 0;
        #pragma unroll
        for (int k = 0; k < COUNT; k++) { // past the ends the scale is zero, and so are the numbers
            uint32_t words[F::WORDS];
            F::scale_words(words, scale[k]);
            const uint4 v = F::run(q[k], upper, zero[k]);
            store_chunk(to + k * cw.STEP * 128, make_uint4(F::scaled(v.x, words), F::scaled(v.y, words),
                                                           F::scaled(v.z, words), F::scaled(v.w, words)));
        }
        request(step + 1);
    }
};

static bool are_plain(const std::vector<Expert<bf16>>& experts) {
    return experts[0].gate_up.format == Format::PLAIN && experts[0].down.format == Format::PLAIN;
}
// The first expert's matrix, and the others' distances in `of`.
static const Linear<bf16>& packed_experts(ExpertsArgs& of, const std::vector<Expert<bf16>>& experts,
                                          WhichMatrix which) {
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
