// gpu/backward/embed.cu: embed_backward.
#include "qwen3.cu"

// ---- embed_backward. A block a token; the first one with its id adds up all that have it, in order.
__global__ void __launch_bounds__(128) embed_backward_kernel(float* dW, const float* dx, Batch b, int C) {
    __shared__ uint32_t found[4];
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x, id = b.token[n], warp = threadIdx.x / 32;
    bool before = b.seq[n] < 0;
    for (int m = threadIdx.x; m < n && !before; m += 128) before = b.token[m] == id && b.seq[m] >= 0;
    if (__syncthreads_or(before)) return;
    for (int first = n; first < b.N; first += 128) {
        const int m = first + threadIdx.x;
        const uint32_t same = __ballot_sync(~0u, m < b.N && b.token[m] == id && b.seq[m] >= 0);
        if (threadIdx.x % 32 == 0) found[warp] = same;
        __syncthreads();
        for (int w = 0; w < 4; w++)
            for (uint32_t left = found[w]; left; left &= left - 1) {
                const float* row = dx + (size_t)(first + w * 32 + __ffs(left) - 1) * C;
                for (int i = threadIdx.x; i < C; i += 128) dW[(size_t)id * C + i] += row[i];
            }
        __syncthreads();
    }
}
void embed_backward_gpu(Context& ctx, float* dW, const float* dx, const Batch& b, int C) {
    launch(ctx, embed_backward_kernel, b.N, 128, 0, dW, dx, b, C);
}
