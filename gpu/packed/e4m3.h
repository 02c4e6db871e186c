// gpu/packed/e4m3.h: products of FP8 weights and FP8 activations, on Hopper.
#pragma once
#include "gpu/packed/packed.h"
#include "gpu/products/plans.h"
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

// The same product of such a W up to the order of sums, without anything unpacked.
template <class Epilogue>
void e4m3_product(Context& ctx, Epilogue epilogue, const E4M3Rows& x, const Linear<bf16>& W, int N) {
    TileArgs p = {(const bf16*)x.q, (const bf16*)W.q[0], N, W.in / 2, Epilogue::PAIR ? W.rows[0] : W.out()};
    p.x_scale = x.scale, p.W_scale = (const float*)W.scale[0], p.pitch = x.pitch;
    HopperPlan plan;
    const int rows = W.out();
    plan.consider<Hopper128x128>(2, 0.36, ctx.gpu->sms, MOST_SPLITS, N, rows, p.in);
    plan.consider<Hopper128x256>(0, 0.66, ctx.gpu->sms, MOST_SPLITS, N, rows, p.in);
    p.splits = plan.splits;
    if (plan.shape) return launch_hopper<Hopper128x128, false, false, true>(ctx, p, epilogue);
    if constexpr (std::is_same_v<Epilogue, SwigluEpilogue>)
        if (p.splits == 1 && !epilogue.gate_up && p.out % FP8_GROUP == 0)
            if (const E4M3Rows to = round_ahead(ctx, epilogue.out, N, p.out, e4m3_bytes(N, W.in)); to.q)
                return launch_hopper<Hopper128x256, false, false, true>(ctx, p, RoundedSwigluEpilogue(epilogue, to));
    launch_hopper<Hopper128x256, false, false, true>(ctx, p, epilogue);
}
