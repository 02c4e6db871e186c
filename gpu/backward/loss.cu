// gpu/backward/loss.cu: the head, its losses and their gradients.
#include "gpu/backward/epilogues.h"
#include "gpu/packed/packed.h"
#include "gpu/products/plans.h"
#include "qwen3.cu"

// ---- cross_entropy. A block a row. Of each 64 logits of it `parts` has the largest, and the sum of w = e^(logit -
// from), which `weights` (R,V) holds, or is null; loss[r] was the target's logit. The row's gradient is factor (w, less
// their sum at the target), so that one of its weights changes. `from` is zero at first: if w of some row might leave
// what a float holds, all rows are asked for `again`, this one's from its largest logit on.
__global__ void __launch_bounds__(256) cross_entropy_kernel(float* loss, bf16* weights, float* factor, float* from,
                                                            int* again, const float2* parts, int pieces,
                                                            const int* target, float scale, const float* by, int V,
                                                            bool second) {
    __shared__ float tops[8], sums[8];
    let_next_start();
    wait_for_previous();
    if (second && !*again) return;
    const int r = blockIdx.x, warp = threadIdx.x / 32;
    parts += (size_t)r * pieces;
    float top = -1e30f, sum = 0;
    for (int i = threadIdx.x; i < pieces; i += 256) top = fmaxf(top, parts[i].x), sum += parts[i].y;
    sum = warp_sum(sum);
    for (int lane = 16; lane; lane /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lane));
    if (threadIdx.x % 32 == 0) tops[warp] = top, sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < 8; w++) top = fmaxf(top, tops[w]), sum += sums[w];
    const float since = second ? from[r] : 0, right = loss[r];
    if (!second) {
        const bool far = !(fabsf(top) < 60); // (e^60 = 1e26)
        from[r] = far ? top : 0;
        if (far) *again = 1;
    }
    loss[r] = logf(sum) + since - right;
    if (!weights) return;
    factor[r] = (by ? scale * by[r] : scale) / sum;
    weights[(size_t)r * V + target[r]] = round_bf16(exp2_fast((right - since) * LOG2E) - sum);
}

// ---- add_losses. One block.
__global__ void __launch_bounds__(1024) add_losses_kernel(double* total, const float* loss, int R) {
    let_next_start();
    wait_for_previous();
    double sum = 0;
    for (int r = threadIdx.x; r < R; r += 1024) sum += loss[r];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}
void add_losses_gpu(Context& ctx, double* total, const float* loss, int R) {
    launch(ctx, add_losses_kernel, 1, 1024, 0, total, loss, R);
}

// ---- scale_rows. A block a row, a thread every 256th number.
__global__ void __launch_bounds__(256) scale_rows_kernel(bf16* x, size_t ld, const float* by, int n) {
    let_next_start();
    wait_for_previous();
    bf16* row = x + blockIdx.x * ld;
    const float scale = by[blockIdx.x];
    for (int i = threadIdx.x; i < n; i += 256) row[i] = round_bf16(to_acc(row[i]) * scale);
}
void scale_rows_gpu(Context& ctx, bf16* x, size_t ld, const float* by, int R, int n) {
    launch(ctx, scale_rows_kernel, R, 256, 0, x, ld, by, n);
}

// Always in tiles of 128: their epilogue makes the softmax's parts. Logits do not leave the chip; their weights in the
// softmax do, if their gradients are wanted: in these' place, as bf16 (R,V), which is all there is of `logits`.
void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* factor, float* logits, bf16* picked,
                          float* parts, const bf16* x, const int* rows, const int* target, float scale,
                          const float* by, const Linear<bf16>& W, int R) {
    const int V = W.out(), pieces = (V + 63) / 64;
    float2* const of_64 = (float2*)parts;
    float* const from = parts + (size_t)R * pieces * 2;
    int* const again = (int*)from + R;
    bf16* const weights = dlogits ? (bf16*)logits : nullptr;
    clear(ctx, again, 1);
    pick_rows_gpu(ctx, picked, x, rows, R, W.in);
    for (bool second : {false, true}) {
        each_part(ctx, W, false, [&](int first, int count, const bf16* part) {
            const AfterUnpacking order(ctx, W);
            const LossEpilogue epilogue = {{}, weights ? weights + first : nullptr, of_64 + first / 64, loss, target,
                                           from, second ? again : nullptr, (size_t)V, (size_t)pieces, first};
            const TileArgs p = {picked, part, R, W.in, count};
            if (ctx.gpu->hopper) hopper_product<false, false>(ctx, p, epilogue);
            else launch_tiles<Tile128x128>(ctx, p, epilogue);
        });
        launch(ctx, cross_entropy_kernel, R, 256, 0, loss, weights, factor, from, again, of_64, pieces, target, scale,
               by, V, second);
    }
}

void head_backward_gpu(Context& ctx, bf16* dnormed, const bf16* dlogits, size_t ld, const float* factor,
                              const int* rows, const Linear<bf16>& W, int R) {
    each_part(ctx, W, true, [&](int first, int count, const bf16* weights) {
        const AfterUnpacking order(ctx, W);
        TileArgs p = {dlogits, weights, R, W.out(), count};
        p.ldx = (int)ld;
        tile_product<false, true>(ctx, p, ScatterEpilogue(dnormed + first, factor, rows, W.in));
    });
}
