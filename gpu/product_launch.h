// gpu/product_launch.h: the products of Book I, launched.
#pragma once
#include "gpu/products.h"
#include "gpu/packed/packed.h"

// ---- Launchers: the products of Book I, in its order.

// Calls launch(std::integral_constant<int, G>()): G groups of 32 of an adapter's rows pass a block at once.
template <class Launch> void in_groups(int groups, Launch launch) {
    if (groups == 1) return launch(std::integral_constant<int, 1>());
    if (groups == 2) return launch(std::integral_constant<int, 2>());
    launch(std::integral_constant<int, 3>());
}

// h, with dropout or of more than 16 tokens (or as product_gpu says).
inline void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N, bool made = false) {
    const LoraArgs p(W, N);
    if (!p.dropping && N < 64 * ctx.gpu->sms)
        return launch(ctx, lora_down_few_kernel, dim3((N + 31) / 32, p.groups()), 256, 0, h, x, p);
    in_groups(p.groups(), [&](auto groups) {
        using S = LoraDownShape<groups>;
        const dim3 grid((N + S::TOKENS - 1) / S::TOKENS, (p.groups() + groups - 1) / groups);
        const auto kernel = made ? lora_down_kernel<groups, true> : lora_down_kernel<groups, false>;
        launch(ctx, kernel, grid, S::THREADS, S::SHARED, h, x, p);
    });
}

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
        else launch(ctx, rmsnorm_masks_kernel, (N + 7) / 8, 256, 0, normed, stream, norm, eps, LoraArgs(W, N));
        return product_gpu(ctx, epilogue, normed, W, N, made);
    }
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    stream_product(ctx, {nullptr, nullptr, stream, norm, eps, W.w[0], N, W.in, out}, epilogue);
}

inline void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), x, W, N);
}
inline void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W,
                           int N) {
    product_gpu(ctx, AddEpilogue(out, residual, W.out()), x, W, N);
}
inline void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* x, const bf16* w,
                            const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), normed, x, w, W, N, eps);
}

inline void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
                                   const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, SwigluEpilogue(out, gate_up, W.rows[0]), normed, x, w, W, N, eps);
}

inline void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W,
                     int R) {
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    if (W.format == Format::PLAIN || (R <= STREAM_TOKENS && !ctx.invariant) || streams_packed(ctx, W, R))
        return product_gpu(ctx, StoreEpilogue<float>(logits, W.out()), picked, W, R);
    each_part(ctx, W, false, [&](int first, int count, const bf16* weights) {
        const AfterUnpacking order(ctx, W);
        tile_product(ctx, {picked, weights, R, W.in, count}, StoreEpilogue<float>(logits + first, W.out()));
    });
}

// dW of training (backward.h), and X^T X of GPTQ (quantize.h). Of some shapes the transposed product has fewer waves
// of tiles.
inline void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N,
                                       int out, int in) {
    TileArgs p = {dy, x, out, N, in}, transposed = {x, dy, in, N, out};
    p.ldx = transposed.ldw = (int)ld;
    const auto time = [&](int out, int in) { return HopperPlan(ctx, MOST_SPLITS, out, in, N, false).least; };
    if (ctx.gpu->hopper && !ctx.invariant && time(in, out) < time(out, in))
        return hopper_product<true, true>(ctx, transposed, AddTransposedEpilogue(dW, in));
    tile_product<true, true>(ctx, p, AddEpilogue(dW, dW, in));
}
