// gpu/products/hopper_tiles.h: the tile and the number of splits for a product of many tokens on Hopper.
#pragma once
#include "gpu/products/hopper.h"
#include "qwen3.cu"

// On Hopper: the shape and the number of splits with the least predicted time in microseconds of the busiest
// multiprocessor. A step of 128 x 256 takes 0.55 on an H100; a narrower tile reads more per multiplication.
using Hopper128x256 = HopperShape<128, 256, 4>;
using Hopper128x192 = HopperShape<128, 192, 5>;
using HopperPairs = HopperShape<128, 256, 4, 128, 2>; // of four waves or more; of fewer it is slower
using Hopper128x128 = HopperShape<128, 128, 6>;
using Hopper64x64 = HopperShape<64, 64, 6>; // two blocks a multiprocessor
// For few blocks, forward: stages for most of a block's reads, so that half of the multiprocessors load the weights of
// the next product while the other half multiply this one's, and memory for received sums.
using Hopper32x64 = HopperShape<64, 64, 16, 32>;
using Hopper64x64Deep = HopperShape<64, 64, 14>;
using Hopper64x128 = HopperShape<64, 128, 9>;
using Hopper128x64 = HopperShape<128, 64, 9>;
using Hopper128x96 = HopperShape<128, 96, 8>;
struct HopperPlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    HopperPlan() = default;
    template <class S> void consider(int index, double step, int sms, int most, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), steps = (in + STAGE_IN - 1) / STAGE_IN;
        const bool small = S::TOKENS * S::ROWS == 64 * 64;
        if (S::BLOCKS == 1) most = std::min(most, 2); // large clusters of such blocks cannot be placed
        for (int s = 1; s <= std::min<int64_t>(most, steps); s *= 2) {
            if (s > 1 && tiles * s > S::BLOCKS * (sms - 4)) break;
            const double each = (double)(tiles * s) / (sms / S::SHARING);
            const double waves = S::BLOCKS > 1 ? std::max(1., each) : std::ceil(each);
            // Blocks of few tokens also take places in which the next product's blocks could start.
            const double sums = s > 1 ? 0.8 + 0.6 * S::TOKENS * S::ROWS / 4096 + 0.05 * s : 0;
            const double places = small ? each / 2 : 0;
            choose(index, s, waves * (double)((steps + s - 1) / s) * step + sums + places);
        }
    }
    // Considers a shape for few blocks, one tile a block. Blocks occupy places in which the next product's blocks could
    // start; large clusters, or clusters of large blocks, cannot be placed if they need more than two thirds of the
    // GPU.
    template <class S> void consider_few(int index, double step, int sms, int most, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), steps = (in + STAGE_IN - 1) / STAGE_IN;
        for (int s = 1; s <= std::min<int64_t>(std::min(most, 4), steps); s *= 2) {
            const int64_t each = (steps + s - 1) / s;
            if (tiles * s > (s == 1 ? sms : s > 2 || S::ROWS > 64 ? sms * 2 / 3 : sms - 4)) break;
            if (each > (s > 1 ? 96 : 64)) continue; // they stream less well
            const double sums = s > 1 ? 0.3 + 0.3 * S::ROWS / 64 + 0.05 * s : 0;
            choose(index, s, (double)each * step + sums + 1.1 * (double)(tiles * s) / sms);
        }
    }
    void choose(int index, int s, double time) {
        if (time < least) shape = index, splits = s, least = time;
    }
    HopperPlan(const Context& ctx, int most, int N, int out, int in, bool few) {
        const int sms = ctx.gpu->sms;
        consider<Hopper128x128>(2, 0.32, sms, ctx.invariant ? 1 : most, N, out, in);
        if (ctx.invariant) return;
        consider<Hopper128x256>(0, 0.55, sms, most, N, out, in);
        if (count_tiles<HopperPairs>(N, out) >= 2 * sms) consider<HopperPairs>(9, 0.53, sms, 1, N, out, in);
        consider<Hopper128x192>(1, 0.419, sms, most, N, out, in);
        consider<Hopper64x64>(3, 0.17, sms, most, N, out, in);
        if (!few) return;
        if (N <= Hopper32x64::MOST) consider_few<Hopper32x64>(8, 0.1, sms, most, N, out, in);
        consider_few<Hopper64x64Deep>(4, 0.115, sms, most, N, out, in);
        consider_few<Hopper64x128>(5, 0.147, sms, most, N, out, in);
        consider_few<Hopper128x64>(6, 0.15, sms, most, N, out, in);
        consider_few<Hopper128x96>(7, 0.21, sms, 1, N, out, in);
    }
};
template <bool X_COLS, bool W_COLS, class Epilogue> void hopper_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    constexpr bool FEW = !X_COLS && !W_COLS && !Epilogue::MASKS && !Epilogue::PARTS;
    const int most = Epilogue::MASKS || Epilogue::PARTS ? 1 : MOST_SPLITS;
    const HopperPlan plan(ctx, most, p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in + p.more, FEW);
    p.splits = plan.splits;
    if constexpr (FEW)
        switch (plan.shape) {
            case 4: return launch_hopper<Hopper64x64Deep>(ctx, p, epilogue);
            case 5: return launch_hopper<Hopper64x128>(ctx, p, epilogue);
            case 6: return launch_hopper<Hopper128x64>(ctx, p, epilogue);
            case 7: return launch_hopper<Hopper128x96>(ctx, p, epilogue);
            case 8: return launch_hopper<Hopper32x64>(ctx, p, epilogue);
        }
    switch (plan.shape) {
        case 0: return launch_hopper<Hopper128x256, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_hopper<Hopper128x192, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_hopper<Hopper128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: return launch_hopper<Hopper64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 9: return launch_hopper<HopperPairs, X_COLS, W_COLS>(ctx, p, epilogue);
    }
    DIE("no tile of shape %d for this product", plan.shape);
}
struct AddTransposedEpilogue : Epilogue { // linear_backward_weight: out, transposed, += y
    static constexpr bool ADDS = true;
    float* out; // (., ld)
    size_t ld;
    AddTransposedEpilogue(float* out, size_t ld) : out(out), ld(ld) {}
    __device__ float4 old_four(int n, int r) const {
        const float* at = out + r * ld + n;
        return make_float4(at[0], at[ld], at[2 * ld], at[3 * ld]);
    }
    __device__ void four(int n, int r, const float4& y, const float4& old) {
        float* at = out + r * ld + n;
        at[0] = old.x + y.x, at[ld] = old.y + y.y, at[2 * ld] = old.z + y.z, at[3 * ld] = old.w + y.w;
    }
};
