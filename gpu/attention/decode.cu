// gpu/attention/decode.cu: attention of sequences of one new token, launched.
#include "gpu/attention/decode.h"
#include "qwen3.cu"

void attention_decode_gpu(Context& ctx, const DecodeArgs& p, int singles, int D) {
    if (p.b.splits < 1) DIE("attention_decode: %d splits", p.b.splits);
    const int G = p.H / p.K;
    int heads = std::min(G, DECODE_ROWS);
    while (G % heads) heads--;
    const int others = singles * p.H / heads, sms = ctx.gpu->sms;
    const auto launch_pages = [&](auto kernel, auto* page, int blocks) {
        using Page = std::remove_pointer_t<decltype(page)>;
        const size_t shared = (size_t)Page::WARPS * std::max(Page::RING, heads * (D + 8) * 4);
        const dim3 grid((unsigned)blocks, (unsigned)(p.H / heads), (unsigned)singles);
        launch(ctx, kernel, grid, 32 * Page::WARPS, shared, p, heads);
    };
    const auto with = [&](auto size, auto fp8) {
        using Held = HeldPage<size, fp8>;
        using Ring = RingPage<size, fp8>;
        if (others * p.b.splits <= 8 * sms)
            launch_pages(attention_decode_kernel<size, fp8, Held>, (Held*)nullptr, p.b.splits);
        else launch_pages(attention_decode_kernel<size, fp8, Ring>, (Ring*)nullptr,
                          std::min(p.b.splits, (3 * sms + others - 1) / others));
    };
    const auto with_format = [&](auto size) {
        if (p.b.fp8) with(size, std::true_type());
        else with(size, std::false_type());
    };
    if (D == 128) with_format(std::integral_constant<int, 128>());
    else with_format(std::integral_constant<int, 64>());
}
