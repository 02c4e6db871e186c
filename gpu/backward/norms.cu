// gpu/backward/norms.cu: rmsnorm_backward and qknorm_rope_backward.
#include "qwen3.cu"

// ---- rmsnorm_backward. A block has a token; or with DW every so many, and adds up its part of dw in shared memory,
// where each thread has its own columns, for `partial` (blocks, C). Bound by memory.
constexpr int NORM_BLOCKS = 12; // of a multiprocessor, with DW
template <bool DW>
__global__ void __launch_bounds__(128, NORM_BLOCKS)
rmsnorm_backward_kernel(float* dx, bf16* dy, bf16* normed, float* partial, const bf16* dout, const float* x,
                        const bf16* w, int N, int C, float eps) {
    extern __shared__ float dw[]; // (C)
    __shared__ float parts[2][2][4];
    let_next_start();
    wait_for_previous();
    for (int i = threadIdx.x * 4; DW && i < C; i += 512) *(float4*)(dw + i) = {};
    for (int n = blockIdx.x, turn = 0; n < N; n += DW ? gridDim.x : N, turn ^= 1) {
        const size_t at = (size_t)n * C;
        float squares = 0, mixed = 0;
        for (int i = threadIdx.x * 4; i < C; i += 512) {
            const float4 a = *(const float4*)(x + at + i);
            const uint2 b = *(const uint2*)(w + i), d = *(const uint2*)(dout + at + i);
            squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
            mixed += a.x * low(b.x) * low(d.x) + a.y * high(b.x) * high(d.x) +
                     a.z * low(b.y) * low(d.y) + a.w * high(b.y) * high(d.y);
        }
        squares = warp_sum(squares), mixed = warp_sum(mixed);
        float(&part)[2][4] = parts[turn];
        if (threadIdx.x % 32 == 0) part[0][threadIdx.x / 32] = squares, part[1][threadIdx.x / 32] = mixed;
        __syncthreads();
        squares = part[0][0] + part[0][1] + part[0][2] + part[0][3];
        mixed = part[1][0] + part[1][1] + part[1][2] + part[1][3];
        const float r = 1 / sqrtf(squares / C + eps), mean = mixed * r * r * r / C;
        for (int i = threadIdx.x * 4; i < C; i += 512) {
            const float4 a = *(const float4*)(x + at + i);
            const uint2 b = *(const uint2*)(w + i), d = *(const uint2*)(dout + at + i);
            float4 g = *(const float4*)(dx + at + i);
            g.x += r * low(b.x) * low(d.x) - a.x * mean, g.y += r * high(b.x) * high(d.x) - a.y * mean;
            g.z += r * low(b.y) * low(d.y) - a.z * mean, g.w += r * high(b.y) * high(d.y) - a.w * mean;
            *(float4*)(dx + at + i) = g;
            if (dy) *(uint2*)(dy + at + i) = make_uint2(pack(g.x, g.y), pack(g.z, g.w));
            if (normed)
                *(uint2*)(normed + at + i) = make_uint2(pack(a.x * r * low(b.x), a.y * r * high(b.x)),
                                                        pack(a.z * r * low(b.y), a.w * r * high(b.y)));
            if (!DW) continue;
            float4 sum = *(const float4*)(dw + i);
            sum.x += low(d.x) * a.x * r, sum.y += high(d.x) * a.y * r;
            sum.z += low(d.y) * a.z * r, sum.w += high(d.y) * a.w * r;
            *(float4*)(dw + i) = sum;
        }
    }
    for (int i = threadIdx.x * 4; DW && i < C; i += 512)
        *(float4*)(partial + (size_t)blockIdx.x * C + i) = *(const float4*)(dw + i);
}
// dw[i] += what the blocks left, in order. A block has 32 columns, a warp every 32nd row.
__global__ void __launch_bounds__(1024) norm_weight_kernel(float* dw, const float* partial, int rows, int C) {
    __shared__ float sums[32][32];
    let_next_start();
    wait_for_previous();
    const int column = blockIdx.x * 32 + threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0;
    #pragma unroll 8
    for (int row = warp; row < rows; row += 32) sum += column < C ? partial[(size_t)row * C + column] : 0;
    sums[warp][threadIdx.x % 32] = sum;
    __syncthreads();
    if (warp || column >= C) return;
    for (int other = 1; other < 32; other++) sum += sums[other][threadIdx.x];
    dw[column] += sum;
}
void rmsnorm_backward_gpu(Context& ctx, float* dx, bf16* dy, bf16* normed, float* dw, const bf16* dout,
                                 const float* x, const bf16* w, int N, int C, float eps) {
    float* const partial = ctx.gpu->partial;
    if (!dw)
        return launch(ctx, rmsnorm_backward_kernel<false>, N, 128, 0, dx, dy, normed, partial, dout, x, w, N, C, eps);
    const int most = (int)(PARTIAL_BYTES / (C * sizeof(float)));
    const int blocks = std::min({N, NORM_BLOCKS * ctx.gpu->sms, most});
    launch(ctx, rmsnorm_backward_kernel<true>, blocks, 128, C * sizeof(float), dx, dy, normed, partial, dout, x, w, N,
           C, eps);
    launch(ctx, norm_weight_kernel, (C + 31) / 32, 1024, 0, dw, partial, blocks, C);
}

// ---- qknorm_rope_backward. A head in a warp, as WarpHead holds it: the gradient g of what the norm makes of x, and r
// and mean of rmsnorm's rule.
template <int D> struct WarpHeadBackward {
    static constexpr int P = D / 64;
    WarpHead<D> x, g, w;
    float r, mean;
    __device__ __forceinline__ void load(const bf16* head, const bf16* dhead, const bf16* weights) {
        x.load(head), g.load(dhead), w.load(weights);
    }
    __device__ __forceinline__ void turn(const WarpAngles<P>& angle, float eps) {
        float squares = 0, mixed = 0;
        for (int p = 0; p < P; p++) {
            const float u = g.u[p], v = g.v[p];
            g.u[p] = u * angle.cosine(p) + v * angle.sine(p), g.v[p] = v * angle.cosine(p) - u * angle.sine(p);
            squares += x.u[p] * x.u[p] + x.v[p] * x.v[p];
            mixed += x.u[p] * w.u[p] * g.u[p] + x.v[p] * w.v[p] * g.v[p];
        }
        r = 1 / sqrtf(warp_sum(squares) / D + eps);
        mean = warp_sum(mixed) * r * r * r / D;
    }
    __device__ __forceinline__ void store(bf16* dhead) const {
        WarpHead<D> d;
        for (int p = 0; p < P; p++) {
            d.u[p] = r * w.u[p] * g.u[p] - x.u[p] * mean;
            d.v[p] = r * w.v[p] * g.v[p] - x.v[p] * mean;
        }
        d.store(dhead);
    }
};
// A warp a head of a token.
template <int D>
__global__ void qknorm_rope_backward_kernel(bf16* dqkv, const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                            const float* rope, Batch b, int H, int K, float eps) {
    let_next_start();
    wait_for_previous();
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, n = task / (H + K), h = task % (H + K);
    if (n >= b.N || b.seq[n] < 0) return;
    const size_t at = ((size_t)n * (H + 2 * K) + h) * D;
    const WarpAngles<D / 64> angle(rope + (size_t)b.pos[n] * D);
    WarpHeadBackward<D> y;
    y.load(qkv + at, dqkv + at, h < H ? q_weight : k_weight);
    y.turn(angle, eps);
    y.store(dqkv + at);
}
// The same, and the weights' gradients: warp w of W takes tokens w, w + W, ..., four heads at a time; its sums stay in
// registers; the last block to arrive adds the blocks' sums in order.
constexpr int HEAD_BLOCKS = 512;
template <int D>
__global__ void __launch_bounds__(256) head_weight_kernel(float* dq_weight, float* dk_weight, bf16* dqkv,
                                                          const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                                          const float* rope, Batch b, int H, int K, float eps,
                                                          float* partial, int* arrived) {
    constexpr int P = D / 64;
    __shared__ float sums[8][2 * D];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 * P;
    float u[2][P] = {}, v[2][P] = {};
    for (int n = blockIdx.x * 8 + warp; n < b.N; n += gridDim.x * 8) {
        if (b.seq[n] < 0) continue;
        const WarpAngles<P> angle(rope + (size_t)b.pos[n] * D);
        const size_t token = (size_t)n * (H + 2 * K) * D;
        for (int h0 = 0; h0 < H + K; h0 += 4) {
            WarpHeadBackward<D> y[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int h = min(h0 + j, H + K - 1);
                y[j].load(qkv + token + h * D, dqkv + token + h * D, h < H ? q_weight : k_weight);
            }
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int h = h0 + j;
                y[j].turn(angle, eps);
                if (h >= H + K) break;
                y[j].store(dqkv + token + h * D);
                #pragma unroll
                for (int p = 0; p < P; p++) {
                    const float du = y[j].g.u[p] * y[j].x.u[p] * y[j].r, dv = y[j].g.v[p] * y[j].x.v[p] * y[j].r;
                    if (h < H) u[0][p] += du, v[0][p] += dv;
                    else u[1][p] += du, v[1][p] += dv;
                }
            }
        }
    }
    for (int w = 0; w < 2; w++)
        for (int p = 0; p < P; p++) sums[warp][w * D + i + p] = u[w][p], sums[warp][w * D + i + p + D / 2] = v[w][p];
    __syncthreads();
    const int c = threadIdx.x;
    float sum = 0;
    if (c < 2 * D) {
        for (int w = 0; w < 8; w++) sum += sums[w][c];
        partial[blockIdx.x * 2 * D + c] = sum;
    }
    if (!last_to_arrive(arrived, gridDim.x) || c >= 2 * D) return;
    float* to = c < D ? dq_weight + c : dk_weight + c - D;
    sum = *to;
    #pragma unroll 8
    for (int block = 0; block < (int)gridDim.x; block++) sum += __ldcg(partial + block * 2 * D + c);
    *to = sum;
}
void qknorm_rope_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* qkv,
                                     const bf16* q_weight, const bf16* k_weight, const float* rope, const Batch& b,
                                     int H, int K, int D, float eps) {
    const auto weights = D == 128 ? head_weight_kernel<128> : head_weight_kernel<64>;
    const auto inputs = D == 128 ? qknorm_rope_backward_kernel<128> : qknorm_rope_backward_kernel<64>;
    if (dq_weight)
        return launch(ctx, weights, std::min(HEAD_BLOCKS, (b.N + 7) / 8), 256, 0, dq_weight, dk_weight, dqkv, qkv,
                      q_weight, k_weight, rope, b, H, K, eps, ctx.gpu->partial, ctx.gpu->arrived);
    const int blocks = (int)(((int64_t)b.N * (H + K) + 7) / 8);
    launch(ctx, inputs, blocks, 256, 0, dqkv, qkv, q_weight, k_weight, rope, b, H, K, eps);
}
