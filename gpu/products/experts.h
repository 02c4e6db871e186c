// gpu/products/experts.h: products of experts' rows on Hopper, by wgmma: prompts, training, many packed weights.
#pragma once
#include "gpu/hopper.h"
#include "model/expert_products.h"

// A warpgroup for every 64 pairs of a place multiplies them by the tile's rows; one past the expert's last pair only
// copies. So an expert of up to S::TOKENS pairs reads, and unpacks, each weight once. A stage is filled again two steps
// after its product began: at the barrier every warpgroup has waited for that product.
struct WgmmaWalk {
    static constexpr int ALIGN = 1024; // the swizzle counts from multiples of it
    template <class S, bool X_COLS, bool W_COLS, class Stages, class Copy>
    __device__ __forceinline__ static void run(float (&sum)[S::MF][S::NF][4], const Stages& stages, Copy copy) {
        static_assert(!X_COLS && S::MF == 1 && S::WARP_ROWS == S::ROWS, "a warp has 16 pairs and all rows");
        if (threadIdx.x / 128 * 64 < (unsigned)stages.p.N) walk<S, W_COLS, true>(sum, stages, copy);
        else walk<S, W_COLS, false>(sum, stages, copy);
    }

  private:
    template <class S, bool W_COLS, bool MULTIPLIES, class Stages, class Copy>
    __device__ __forceinline__ static void walk(float (&sum)[1][S::NF][4], const Stages& stages, Copy copy) {
        constexpr int AHEAD = S::STAGES - 2, PANEL = STAGE_IN * 128, DOWN = 16 * 128, ALONG = 32;
        const int first = stages.at.first, last = stages.at.last;
        const uint32_t my_x = threadIdx.x / 128 * (64 * STAGE_IN * 2);
        #pragma unroll
        for (int s = 0; s < AHEAD; s++) copy(first + s), commit_copies();
        for (int step = first; step < last; step++) {
            wait_for_copies<AHEAD - 1>();
            shared_to_async();
            __syncthreads();
            if (MULTIPLIES) {
                const uint32_t x = stages.x_stage(step) + my_x, w = stages.w_stage(step);
                wgmma_begin();
                #pragma unroll
                for (int k = 0; k < STAGE_IN / 16; k++)
                    wgmma<S::ROWS, false, W_COLS>(sum[0], wgmma_operand(x + k * ALONG, PANEL),
                                                  wgmma_operand(w + k * (W_COLS ? DOWN : ALONG), PANEL), true);
                wgmma_commit();
            }
            copy(step + AHEAD), commit_copies();
            if (MULTIPLIES) wgmma_wait<1>();
        }
        if (MULTIPLIES) wgmma_wait<0>(), wgmma_settle(sum);
    }
};

// As launch_expert_tiles, for `each` pairs an expert. False: not on this GPU, or too few pairs.
template <bool W_COLS, class Weights, class Epilogue>
bool Optional::expert_tiles(Context& ctx, const Weights& p, const ExpertsArgs& of, int pairs,
                            const Epilogue& epilogue) {
    constexpr bool PLAIN = std::is_base_of_v<StreamArgs, Weights>;
    const int each = pairs / of.E;
    if (!ctx.gpu->hopper || ctx.invariant || (PLAIN && each < 40)) return false;
    using Large = TileShape<256, 128, 16, 128, 4>;
    if constexpr (PLAIN) if (each < 96) {
        launch_expert_tiles<TileShape<128, 128, 16, 128, 3>, W_COLS, WgmmaWalk>(ctx, p, of, pairs, epilogue);
        return true;
    }
    launch_expert_tiles<Large, W_COLS, WgmmaWalk>(ctx, p, of, pairs, epilogue);
    return true;
}
