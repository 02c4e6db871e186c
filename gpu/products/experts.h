// gpu/products/experts.h: products of experts' rows on Hopper, by wgmma: prompts, training, many packed weights.
#pragma once
#include "gpu/hopper.h"
#include "gpu/products/hopper.h"
#include "model/expert_products.h"

// ---- bf16 weights, forward: hopper_kernel's loop over the places of experts (see there). The producer copies boxes of
// x, which has the order of `pair`, and of W, (E, rows, in). A box of x goes on behind the expert's last pair: those
// rows' results are not stored, and a warpgroup that has no others does not multiply. Grid: as many blocks as are
// resident at once; neighbouring blocks have the same expert. Bound by the bandwidth of the L2 cache.
struct ExpertMaps {
    CUtensorMap x, W;
};
template <class S, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
expert_boxes_kernel(const __grid_constant__ ExpertMaps maps, ExpertsArgs of, int in, int out, Epilogue epilogue) {
#ifdef HAVE_WGMMA
    constexpr bool PAIR = Epilogue::PAIR;
    constexpr int BOX_BYTES = 64 * STAGE_IN * 2; // of a warpgroup's pairs
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * S::STAGES];
    const uint32_t at_barriers = shared_address(barriers);
    const HopperStages<S> stages = {(shared_address(memory) + 1023) & ~1023u, at_barriers, at_barriers + 8 * S::STAGES,
                                    S::STAGES};
    if (threadIdx.x == S::CONSUMERS) prefetch_map(maps.W), prefetch_map(maps.x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; s++)
            barrier_begin(stages.full(s), 1), barrier_begin(stages.empty(s), S::CONSUMERS / 32);
        barriers_begun();
    }
    __syncthreads();
    let_next_start();
    if (threadIdx.x > S::CONSUMERS) return;
    wait_for_previous();
    const int across = ((PAIR ? 2 * out : out) + S::ROWS - 1) / S::ROWS, steps = (in + STAGE_IN - 1) / STAGE_IN;
    Ring<S::STAGES> ring;
    ExpertPlaces<S::TOKENS> places = {of.first, of.E};
    for (int u = blockIdx.x;; u += gridDim.x) {
        const ExpertRows rows = places.at(u / across);
        const int r0 = u % across * S::ROWS;
        if (!rows.n) return;
        if (threadIdx.x == S::CONSUMERS) { // the producer
            const int boxes = (rows.n + 63) / 64;
            for (int step = 0; step < steps; step++, ring.next()) {
                const uint32_t full = stages.full(ring.stage), w = stages.w(ring.stage);
                const int i = step * STAGE_IN;
                barrier_wait(stages.empty(ring.stage), ring.parity ^ 1);
                barrier_arrive_expecting(full, boxes * BOX_BYTES + S::ROWS * STAGE_IN * 2);
                copy_box(w, maps.W, full, i, PAIR ? r0 / 2 : r0, rows.e);
                if (PAIR) copy_box(w + S::ROWS * STAGE_IN, maps.W, full, i, out + r0 / 2, rows.e);
                for (int b = 0; b < boxes; b++)
                    copy_box(stages.x(ring.stage) + b * BOX_BYTES, maps.x, full, i, rows.first + b * 64);
            }
            continue;
        }
        if ((int)threadIdx.x / 128 * 64 >= rows.n) {
            for (int step = 0; step < steps; step++, ring.next())
                barrier_wait(stages.full(ring.stage), ring.parity), stages.done_with(ring.stage);
            continue;
        }
        float sum[1][S::NF][4];
        multiply_steps_wgmma<S, false, false>(sum, stages, ring, steps);
        Epilogue own = epilogue;
        own.at(rows.first);
        #pragma unroll
        for (int h = 0; h < 2; h++)
            finish_row<S>(sum[0], h, S::warp_token() + h * 8 + (int)threadIdx.x % 32 / 4, r0, rows.n, out, own);
    }
#endif
}
template <class S, class Epilogue>
void launch_expert_boxes(Context& ctx, StreamArgs p, const ExpertsArgs& of, int pairs, const Epilogue& epilogue) {
    constexpr int BOX = Epilogue::PAIR ? S::ROWS / 2 : S::ROWS;
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out;
    const size_t in = (size_t)p.in, apart = std::max(of.apart[0] / sizeof(bf16), (size_t)rows * in);
    if (of.by_token) {
        launch(ctx, gather_pairs_kernel<bf16>, dim3((unsigned)(pairs + 7) / 8), 256, 0, of.room, p.x, of.first + of.E,
               of.pair, of.k, p.in);
        p.x = of.room;
    }
    const ExpertMaps maps = {
        tensor_map(p.x, {{in, 1, STAGE_IN}, {(size_t)pairs, in, 64}}),
        tensor_map(p.W, {{in, 1, STAGE_IN}, {(size_t)rows, in, BOX}, {(size_t)of.E, apart, 1}})};
    const int64_t units = (int64_t)most_places(pairs, of.E, S::TOKENS) * ((rows + S::ROWS - 1) / S::ROWS);
    launch(ctx, expert_boxes_kernel<S, Epilogue>, dim3((unsigned)std::min<int64_t>(units, S::BLOCKS * ctx.gpu->sms)),
           S::THREADS, S::SHARED, maps, of, p.in, p.out, epilogue);
}

// ---- Packed weights, adapters, backward: expert_tile_kernel by wgmma.
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
    if constexpr (PLAIN && !W_COLS && !ADAPTED<Weights>) {
        launch_expert_boxes<HopperShape<128, 256, 4, 128, 1, false>>(ctx, p, of, pairs, epilogue);
        return true;
    }
    using Large = TileShape<256, 128, 16, 128, 4>;
    if constexpr (PLAIN) if (each < 96) {
        launch_expert_tiles<TileShape<128, 128, 16, 128, 3>, W_COLS, WgmmaWalk>(ctx, p, of, pairs, epilogue);
        return true;
    }
    launch_expert_tiles<Large, W_COLS, WgmmaWalk>(ctx, p, of, pairs, epilogue);
    return true;
}
