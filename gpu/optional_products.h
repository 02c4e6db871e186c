// gpu/optional_products.h: the templates of Optional: Hopper's tiles, packed weights, FP8 activations. Sources that
// instantiate products include it.
#pragma once
#include "gpu/packed/e4m3.h"
#include "gpu/packed/few.h"
#include "gpu/packed/hopper.h"
#include "gpu/packed/packed.h"
#include "gpu/packed/unpack.h"
#include "gpu/products/hopper_tiles.h"
#include "qwen3.cu"

template <class Epilogue>
RowsDealt Optional::few(Context& ctx, const Epilogue& epilogue, const bf16* x, const int* rows, const Linear<bf16>& W,
                        int N) {
    if (W.format == Format::PLAIN) return {};
    return packed_product(ctx, epilogue, x, rows, W, N);
}

template <class Epilogue>
bool Optional::many(Context& ctx, const Epilogue& epilogue, const bf16*& x, const E4M3Rows& rounded,
                    const Linear<bf16>& W, int N) {
    constexpr bool HEAD = std::is_same_v<Epilogue, StoreEpilogue<float>>; // whose x is never rounded
    const bool rounds = !HEAD && rounds_activations(ctx, W, N);
    if constexpr (!HEAD)
        if (rounds && takes_e4m3(W)) {
            e4m3_product(ctx, epilogue, rounded.q ? rounded : e4m3_rows(ctx, x, N, W.in), W, N);
            return true;
        }
    if (rounds) x = round_to_bf16(ctx, x, N, W.in);
    if (!streams_packed(ctx, W, N)) return false;
    packed_hopper_product(ctx, epilogue, x, W, N);
    return true;
}

template <class Epilogue>
bool Optional::norm_many(Context& ctx, const Epilogue& epilogue, const float* stream, const bf16* norm,
                         const Linear<bf16>& W, int N, float eps, E4M3Rows* output) {
    if (!rounds_activations(ctx, W, N) || !takes_e4m3(W)) return false;
    const E4M3Rows x = first_rows(ctx, N, W.in);
    rmsnorm_rounded_gpu(ctx, x, stream, norm, N, W.in, eps);
    e4m3_product(ctx, epilogue, x, W, N, output);
    return true;
}

template <bool X_COLS, bool W_COLS, class Epilogue>
bool Optional::tiles(Context& ctx, const TileArgs& p, const Epilogue& epilogue) {
    if (!ctx.gpu->hopper) return false;
    hopper_product<X_COLS, W_COLS>(ctx, p, epilogue);
    return true;
}

template <class Use> void Optional::weights(Context& ctx, const Linear<bf16>& W, Use use) {
    const bf16* weights = unpacked(ctx, W);
    const AfterUnpacking order(ctx, W);
    use(weights);
}
template <class Use> void Optional::parts(Context& ctx, const Linear<bf16>& W, bool columns, Use use) {
    each_part(ctx, W, columns, [&](int first, int count, const bf16* weights) {
        const AfterUnpacking order(ctx, W);
        use(first, count, weights);
    });
}

template <class Use> bool Optional::packed_rows(const Linear<bf16>& W, Use use) {
    if (W.format == Format::PLAIN) return false;
    with_packing(W, [&](auto format) { use(PackedRows<decltype(format)>{packed_args(W)}); });
    return true;
}
