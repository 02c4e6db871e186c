// gpu/backward/input.h: dx of a product and of its adapter.
#pragma once
#include "gpu/packed/packed.h"
#include "gpu/products/plans.h"
#include "qwen3.cu"

// dh and dB of an adapter. `scratch` has as many numbers as dx.
void lora_up_backward(Context& ctx, bf16* dh, float* dB, bf16* scratch, const bf16* dy, const Linear<bf16>& W, int N);

// dx = dy W and the adapter's part, whose dh and A are further columns of dy and W; the epilogue drops, or does not.
template <class Drop, class Store>
void input_product(Context& ctx, bf16* dh, const bf16* dy, const Linear<bf16>& W, const LoraArgs& lora, Drop drop,
                   Store store) {
    TileArgs p = {dy, unpacked(ctx, W), lora.N, W.out(), W.in};
    const AfterUnpacking order(ctx, W);
    if (lora.width()) p.more_x = dh, p.more_W = W.adapter.A, p.more = lora.width(), p.more_last = lora.dropping;
    if (lora.dropping) tile_product<false, true>(ctx, p, drop);
    else tile_product<false, true>(ctx, p, store);
}
