// gpu/products/product.h: the product that suits the number of tokens and the format of the weights.
#pragma once
#include "gpu/ops.h"
#include "gpu/packed/e4m3.h"
#include "gpu/packed/few.h"
#include "gpu/packed/hopper.h"
#include "gpu/packed/packed.h"
#include "gpu/products/lora.h"
#include "gpu/products/plans.h"
#include "gpu/products/stream.h"
#include "qwen3.cu"

// x W^T, with the kernel that suits N. An adapter's h and s B are further columns of x and W; of up to 16 tokens the
// epilogue adds them (but see there). made: its masks are.
template <class Epilogue>
void product_gpu(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N, bool made = false) {
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    const Adapter<bf16>& a = W.adapter;
    if (N <= STREAM_TOKENS && !ctx.invariant) {
        const auto few = [&](auto e) {
            if (W.format != Format::PLAIN) packed_product(ctx, e, x, nullptr, W, N);
            else stream_product(ctx, {x, nullptr, nullptr, nullptr, 0, W.w[0], N, W.in, out}, e);
        };
        if (!a.rank) return few(epilogue);
        if constexpr (Epilogue::ADAPTS)
            if (!a.dropout && (int)a.width() <= MOST_BESIDE) {
                const StreamArgs down = {x, nullptr, nullptr, nullptr, 0, a.A, N, W.in, (int)a.width()};
                stream_product(ctx, down, StoreEpilogue<bf16>(a.h, a.width()));
                return few(BesideAdapter<Epilogue>(epilogue, W));
            }
    }
    constexpr bool HEAD = std::is_same_v<Epilogue, StoreEpilogue<float>>; // whose x is never rounded
    const bool rounds = !HEAD && rounds_activations(ctx, W, N);
    if constexpr (!HEAD)
        if (rounds && takes_e4m3(ctx, W)) return e4m3_product(ctx, epilogue, e4m3_rows(ctx, x, N, W.in), W, N);
    if (rounds) x = rounded(ctx, x, N, W.in);
    if (streams_packed(ctx, W, N)) return packed_hopper_product(ctx, epilogue, x, W, N);
    TileArgs p = {x, unpacked(ctx, W), N, W.in, out};
    const AfterUnpacking order(ctx, W);
    p.early = N <= 128;
    if (a.rank) {
        lora_down_gpu(ctx, a.h, x, W, N, made);
        p.more_x = a.h, p.more_W = a.B, p.more = (int)a.width();
    }
    tile_product(ctx, p, epilogue);
}
// The same of rmsnorm(stream). `normed` (N,in) holds that where the product does not make it for itself, or rounds it.
template <class Epilogue>
void norm_product_gpu(Context& ctx, Epilogue epilogue, bf16* normed, const float* stream, const bf16* norm,
                      const Linear<bf16>& W, int N, float eps) {
    ctx.gpu->ahead = {};
    if (N > NORM_TOKENS || ctx.invariant || W.adapter.rank || W.format != Format::PLAIN) {
        if (rounds_activations(ctx, W, N) && takes_e4m3(ctx, W)) {
            const E4M3Rows x = first_rows(ctx, N, W.in);
            rmsnorm_rounded_gpu(ctx, x, stream, norm, N, W.in, eps);
            return e4m3_product(ctx, epilogue, x, W, N);
        }
        const bool made = W.adapter.dropout && norms_by_warps(ctx, N);
        if (!made) rmsnorm_gpu(ctx, normed, stream, norm, N, W.in, eps);
        else rmsnorm_masks_gpu(ctx, normed, stream, norm, eps, LoraArgs(W, N), N);
        return product_gpu(ctx, epilogue, normed, W, N, made);
    }
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    stream_product(ctx, {nullptr, nullptr, stream, norm, eps, W.w[0], N, W.in, out}, epilogue);
}
