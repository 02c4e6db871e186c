// gpu/draw_head.cu: the head's product for draws, launched.
#include "gpu/draw.h"
#include "gpu/draw_epilogue.h"
#include "gpu/packed/few.h"
#include "qwen3.cu"

RowsDealt draw_head_gpu(Context& ctx, float* logits, const Draw* draw, const uint32_t* seen, unsigned long long* best,
                        const bf16* x, const int* rows, const Linear<bf16>& W, int R) {
    const DrawEpilogue epilogue{logits, (size_t)W.out(), draw, seen, best};
    if (W.format != Format::PLAIN) return packed_product(ctx, epilogue, x, rows, W, R);
    return stream_product(ctx, StreamArgs{x, rows, nullptr, nullptr, 0, W.w[0], R, W.in, W.out()}, epilogue);
}
