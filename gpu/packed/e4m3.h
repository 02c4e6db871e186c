// gpu/packed/e4m3.h: products of FP8 weights and FP8 activations.
#pragma once
#include "gpu/packed/e4m3_tiles.h"
#include "gpu/packed/packed.h"
#include "gpu/products/hopper_tiles.h"
#include "qwen3.cu"

struct RoundedSwigluEpilogue : SwigluEpilogue { // ... and as the next product takes it; F in whole groups
    static constexpr int OUTPUTS = 1;
    static constexpr bool ROUNDS = true;
    E4M3Rows rounded;
    RoundedSwigluEpilogue(const SwigluEpilogue& e, const E4M3Rows& rounded) : SwigluEpilogue(e), rounded(rounded) {}
    template <class Put> __device__ void values(const float4& g, const float4& u, Put put) {
        SwigluEpilogue::values(g, u, [&](int k, const float4& y) { if (k == 0) put(0, y); });
    }
};

// Hopper128x128 with registers for the results of two stages.
using E4M3Hopper128x128 = HopperShape<128, 128, 6, 128, 1, true>;

// HopperPlan with the times of e4m3's steps, which have twice the numbers: fitted to an H200 (tests/bench/bench_fp8
// sweep), where its choices take 1.5% more than the best.
struct E4M3Plan : HopperPlan {
    E4M3Plan(const Context& ctx, int N, int out, int in) {
        const int sms = ctx.gpu->sms;
        consider<E4M3Hopper128x128>(2, 0.334, sms, MOST_SPLITS, N, out, in);
        consider<Hopper128x256>(0, 0.581, sms, MOST_SPLITS, N, out, in);
        consider<Hopper64x64>(3, 0.187, sms, MOST_SPLITS, N, out, in);
        if (N <= Hopper32x64::MOST) consider_few<Hopper32x64>(8, 0.112, sms, MOST_SPLITS, N, out, in);
        consider_few<Hopper64x64Deep>(4, 0.118, sms, MOST_SPLITS, N, out, in);
        consider_few<Hopper64x128>(5, 0.174, sms, MOST_SPLITS, N, out, in);
        consider_few<Hopper128x64>(6, 0.169, sms, MOST_SPLITS, N, out, in);
    }
};

// The product of such a W up to the order of sums, without anything unpacked. output: see norm_product_gpu.
template <class Epilogue>
void e4m3_product(Context& ctx, Epilogue epilogue, const E4M3Rows& x, const Linear<bf16>& W, int N,
                  E4M3Rows* output = nullptr) {
    TileArgs p = {(const bf16*)x.q, (const bf16*)W.q[0], N, W.in / 2, Epilogue::PAIR ? W.rows[0] : W.out()};
    p.x_scale = x.scale, p.W_scale = (const float*)W.scale[0], p.pitch = x.pitch;
    if (!ctx.gpu->hopper) return e4m3_tile_product(ctx, p, epilogue);
    const E4M3Plan plan(ctx, N, W.out(), p.in);
    p.splits = plan.splits;
    switch (plan.shape) {
        case 2: return launch_hopper<E4M3Hopper128x128, false, false, true>(ctx, p, epilogue);
        case 3: return launch_hopper<Hopper64x64, false, false, true>(ctx, p, epilogue);
        case 4: return launch_hopper<Hopper64x64Deep, false, false, true>(ctx, p, epilogue);
        case 5: return launch_hopper<Hopper64x128, false, false, true>(ctx, p, epilogue);
        case 6: return launch_hopper<Hopper128x64, false, false, true>(ctx, p, epilogue);
        case 8: return launch_hopper<Hopper32x64, false, false, true>(ctx, p, epilogue);
    }
    if constexpr (std::is_same_v<Epilogue, SwigluEpilogue>)
        if (output && p.splits == 1 && !epilogue.gate_up && p.out % FP8_GROUP == 0)
            if (const E4M3Rows to = *output = output_rows(ctx, N, p.out, e4m3_bytes(N, W.in)); to.q)
                return launch_hopper<Hopper128x256, false, false, true>(ctx, p, RoundedSwigluEpilogue(epilogue, to));
    launch_hopper<Hopper128x256, false, false, true>(ctx, p, epilogue);
}
