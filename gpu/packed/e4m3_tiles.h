// gpu/packed/e4m3_tiles.h: products of FP8 weights and FP8 activations by mma.sync, from sm_89 on.
#pragma once
#include "gpu/packed/packed.h"
#include "qwen3.cu"

// d (16,8) += a (16,32) b (8,32) of e4m3: lanes hold the bytes that they hold of 16 bf16 numbers. PTX ISA: mma
__device__ __forceinline__ void mma_e4m3([[maybe_unused]] float (&d)[4], [[maybe_unused]] const uint32_t (&a)[4],
                                         [[maybe_unused]] uint32_t b0, [[maybe_unused]] uint32_t b1) {
#if __CUDA_ARCH__ >= 890
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// The scales of a stage, a group of 128 numbers of `in`: those of this lane's tokens, and of the warp's rows of W
// (PAIR: of gate and of up), which lie in one block of 128 rows.
template <class S, bool PAIR> struct GroupScales {
    static constexpr int SIDES = PAIR ? 2 : 1;
    float x[S::MF][2], w[SIDES];
    __device__ __forceinline__ GroupScales(const TileArgs& p, const TilePlace<S, PAIR>& at, int group) {
        const int groups = (p.in + STAGE_IN - 1) / STAGE_IN, last = (SIDES * p.out - 1) / 128;
        #pragma unroll
        for (int i = 0; i < S::MF; i++)
            #pragma unroll
            for (int h = 0; h < 2; h++) x[i][h] = p.x_scale[(size_t)group * p.pitch + at.token(i, h)];
        #pragma unroll
        for (int side = 0; side < SIDES; side++) {
            const int row = PAIR ? side * p.out + (at.r0 + S::warp_row()) / 2 : at.r0 + S::warp_row();
            w[side] = p.W_scale[(size_t)min(row / 128, last) * groups + group];
        }
    }
};

// sum += the stage's products, which are summed by themselves, times both scales: a block of 16 tokens by 32 rows after
// another, since these sums take registers, too.
template <class S, bool PAIR>
__device__ __forceinline__ void multiply_group(float (&sum)[S::MF][S::NF][4], uint32_t x_stage, uint32_t w_stage,
                                               const GroupScales<S, PAIR>& scales) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int f = 0; f < S::MF * S::NF; f += 4) {
        const int i = f / S::NF, j0 = f % S::NF;
        float part[4][4] = {};
        #pragma unroll
        for (int k = 0; k < STAGE_IN / 16; k++) {
            uint32_t a[4];
            ldmatrix(a, chunk_address(x_stage, S::warp_token() + i * 16 + lane % 16, 2 * k + lane / 16));
            #pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const int row = S::warp_row() + (j0 + j) * 8 + lane % 8 + lane / 16 * 8;
                uint32_t b[4];
                ldmatrix(b, chunk_address(w_stage, row, 2 * k + lane / 8 % 2));
                mma_e4m3(part[j], a, b[0], b[1]), mma_e4m3(part[j + 1], a, b[2], b[3]);
            }
        }
        #pragma unroll
        for (int e = 0; e < 16; e++) {
            const int j = j0 + e / 4;
            const float factor = scales.x[i][e % 4 / 2] * scales.w[PAIR ? j / S::UP % 2 : 0];
            sum[i][j][e % 4] = fmaf(part[e / 4][e % 4], factor, sum[i][j][e % 4]);
        }
    }
}

// tile_kernel (qwen3.cu) for e4m3: two numbers count as one of two bytes. Bound by the tensor cores.
template <class S, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, 1) e4m3_tile_kernel(TileArgs p, Epilogue epilogue) {
    constexpr bool PAIR = Epilogue::PAIR;
    extern __shared__ __align__(128) uint4 memory[];
    const TilePlace<S, PAIR> at(p, blockIdx.x, blockIdx.y);
    const TileStages<S, false, false, PAIR> stages = {p, at, shared_address(memory), {}, {}};
    for (int s = 0; s < S::STAGES - 1; s++) stages.copy_w(at.first + s); // (weights: before the wait)
    if (p.early) let_next_start();
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) {
        stages.copy_x(at.first + s);
        commit_copies(); // (the first of these groups has all of the weights above)
    }
    float sum[S::MF][S::NF][4] = {};
    walk_ring<S::STAGES>(at.first, at.last, [&](int step) {
        if (step < at.last) stages.copy_x(step), stages.copy_w(step);
    }, [&](int step) {
        const GroupScales<S, PAIR> scales(p, at, step);
        multiply_group<S, PAIR>(sum, stages.x_stage(step), stages.w_stage(step), scales);
    });
    wait_for_copies<0>();
    if (!p.early) let_next_start();
    if (p.splits > 1 && !reduce_splits<S::THREADS>(sum, p.partial, p.arrived, blockIdx.x, blockIdx.y, p.splits)) return;
    #pragma unroll
    for (int i = 0; i < S::MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
            finish_row<S>(sum[i], h, at.token(i, h), at.r0 + S::warp_row(), p.N, p.out, epilogue);
}
template <class S, class Epilogue> void launch_e4m3_tiles(Context& ctx, TileArgs p, Epilogue epilogue) {
    const int tiles = plan_tiles<S, false, false, Epilogue>(ctx, p);
    launch(ctx, e4m3_tile_kernel<S, Epilogue>, dim3(tiles, p.splits), S::THREADS, S::SHARED, p, epilogue);
}
using E4M3Tile128x128 = TileShape<128, 128, 32, 64, 3>; // by twice the warps of Tile128x128, for registers
template <class Epilogue> void e4m3_tile_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    const TilePlan plan(ctx, tile_times(ctx.gpu->sm), p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in);
    p.splits = plan.splits, p.early = p.N <= 128;
    switch (plan.shape) {
        case 0: return launch_e4m3_tiles<E4M3Tile128x128>(ctx, p, epilogue);
        case 1: return launch_e4m3_tiles<Tile64x128>(ctx, p, epilogue);
        case 2: return launch_e4m3_tiles<Tile64x64>(ctx, p, epilogue);
        case 3: return launch_e4m3_tiles<Tile32x64>(ctx, p, epilogue);
    }
    DIE("no tile of shape %d for this product", plan.shape);
}
