/* backward.h: Book II's other half, training on a GPU: the kernels of Book I's sections 6 and 7. Included behind
   qwen3.cu, whose toolbox, products and attention it goes on with, by train_lora.cu; programs that only answer do
   without.

   Each kernel's header says which op of Book I it computes, what a thread, a warp and a block own, and what bounds it.

   Contents    1 Small kernels: losses, norms, RoPE, embedding, AdamW    2 Products: head, dx, dA and dB    3 Attention
*/
#pragma once
#ifdef __CUDACC__

// ===================================================================================================== 1 Small kernels
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
inline void add_losses_gpu(Context& ctx, double* total, const float* loss, int R) {
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
inline void scale_rows_gpu(Context& ctx, bf16* x, size_t ld, const float* by, int R, int n) {
    launch(ctx, scale_rows_kernel, R, 256, 0, x, ld, by, n);
}

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
inline void rmsnorm_backward_gpu(Context& ctx, float* dx, bf16* dy, bf16* normed, float* dw, const bf16* dout,
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
inline void qknorm_rope_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* qkv,
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
inline void embed_backward_gpu(Context& ctx, float* dW, const float* dx, const Batch& b, int C) {
    launch(ctx, embed_backward_kernel, b.N, 128, 0, dW, dx, b, C);
}

// ---- grad_norm. A block a piece of NORM_PIECE numbers; then one block adds the pieces.
__global__ void __launch_bounds__(256) grad_squares_kernel(double* partial, const float* g, size_t n) {
    let_next_start();
    wait_for_previous();
    const size_t first = blockIdx.x * NORM_PIECE + threadIdx.x, last = min(n, (blockIdx.x + 1) * NORM_PIECE);
    double sum = 0;
    for (size_t i = first; i < last; i += 256) sum += (double)g[i] * (double)g[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(1024) grad_norm_kernel(double* norm, const double* partial, size_t pieces) {
    let_next_start();
    wait_for_previous();
    double sum = 0;
    for (size_t p = threadIdx.x; p < pieces; p += 1024) sum += partial[p];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = sqrt(sum);
}
inline void grad_norm_gpu(Context& ctx, double* norm, double* partial, const float* g, size_t n) {
    const size_t pieces = (n + NORM_PIECE - 1) / NORM_PIECE;
    launch(ctx, grad_squares_kernel, (unsigned)pieces, 256, 0, partial, g, n);
    launch(ctx, grad_norm_kernel, 1, 1024, 0, norm, partial, pieces);
}

// ---- adamw. A thread a number.
struct AdamWStep { float beta1, beta2, root, keep, pace, eps, clip, copy; };
__global__ void adamw_kernel(bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n,
                             AdamWStep a) {
    let_next_start();
    wait_for_previous();
    const double length = *norm;
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (!isfinite(length) || i >= n) return;
    const float gi = g[i] * (float)(a.clip > 0 ? fmin(1., a.clip / (length + 1e-6)) : 1.);
    const float mi = m[i] + (gi - m[i]) * (1 - a.beta1), vi = v[i] * a.beta2 + gi * gi * (1 - a.beta2);
    const float pi = p[i] * a.keep - a.pace * (mi / (sqrtf(vi) / a.root + a.eps));
    m[i] = mi, v[i] = vi, p[i] = pi;
    stored[i] = round_bf16(pi * a.copy);
}
inline void adamw_gpu(Context& ctx, bf16* stored, float* p, float* m, float* v, const float* g, const double* norm,
                      size_t n, const AdamW& a) {
    const float first = (float)(1 - std::pow((double)a.beta1, (double)a.step));
    const float root = (float)std::sqrt(1 - std::pow((double)a.beta2, (double)a.step));
    const float keep = (float)(1 - (double)a.lr * a.decay);
    const AdamWStep s = {a.beta1, a.beta2, root, keep, a.lr / first, a.eps, a.clip, a.copy};
    launch(ctx, adamw_kernel, (unsigned)((n + 255) / 256), 256, 0, stored, p, m, v, g, norm, n, s);
}

// ========================================================================================================== 2 Products
// dx = dy W, dW = dy^T x and the head's products are tile_product's, in other layouts and with these epilogues.

// head_loss: what cross_entropy_kernel wants.
struct LossEpilogue : Epilogue {
    static constexpr bool PARTS = true;
    bf16* weights;      // (R,ld), or null
    float2* parts;      // (R,pieces)
    float* right;       // (R)
    const int* target;  // (R)
    const float* since; // (R)
    const int* again;   // null: the first time
    size_t ld, pieces;
    int first; // of the head's rows
    __device__ bool skipped() const {
        if (again) wait_for_previous();
        return again && !*again;
    }
    __device__ float from(int n) const { return again ? since[n] : 0; }
    __device__ void part(int n, int piece, float largest, float sum) { parts[n * pieces + piece] = {largest, sum}; }
    __device__ int chosen_row(int n) const { return target[n] - first; }
    __device__ void chosen(int n, float y) { right[n] = y; }
    static constexpr int OUTPUTS = 1;
    BOTH Output<bf16> output(int) const { return {weights, ld}; }
    template <class Put> __device__ void values(const float4& y, const float4&, Put put) { put(0, y); }
    __device__ void four(int n, int r, const float4& y, const float4& second) { put_values(*this, n, r, y, second); }
};

// head_backward: the gradient of row n of the picked ones goes to row rows[n].
struct ScatterEpilogue : Epilogue {
    bf16* out;           // (., C)
    const float* factor; // (R)
    const int* rows;     // (R)
    size_t C;
    ScatterEpilogue(bf16* out, const float* factor, const int* rows, size_t C)
        : out(out), factor(factor), rows(rows), C(C) {}
    __device__ void four(int n, int c, const float4& y, const float4&) {
        const float by = factor[n];
        store_four(out + rows[n] * C + c, make_float4(y.x * by, y.y * by, y.z * by, y.w * by));
    }
};

struct DropEpilogue : StoreEpilogue<bf16> { // linear_backward_input where x was dropped on its way to the modules' A
    static constexpr bool MASKS = true;
    DropoutMasks masks;
    int rank;
    float scale;
    DropEpilogue(bf16* out, size_t ld, const DropoutMasks& masks, int rank, float scale)
        : StoreEpilogue(out, ld), masks(masks), rank(rank), scale(scale) {}
};

// linear_backward_swiglu: a sum is dhidden's; `second` is what gate_up has there, as bits.
template <bool DROPS> struct SwigluBackwardEpilogue : Epilogue {
    static constexpr bool ADDS = true, MASKS = DROPS;
    bf16 *dgate_up, *hidden; // (N,2F); (N,F), or null
    const bf16* gate_up;     // (N,2F)
    size_t F;
    DropoutMasks masks;
    int rank;
    float scale;
    SwigluBackwardEpilogue(bf16* dgate_up, bf16* hidden, const bf16* gate_up, size_t F, const LoraArgs& lora)
        : dgate_up(dgate_up), hidden(hidden), gate_up(gate_up), F(F), masks(lora.kept), rank(lora.rank),
          scale(lora.scale) {}
    __device__ float4 old_four(int n, int f) const {
        const float2 g = *(const float2*)(gate_up + n * 2 * F + f), u = *(const float2*)(gate_up + (n * 2 + 1) * F + f);
        return make_float4(g.x, g.y, u.x, u.y);
    }
    __device__ void four(int n, int f, const float4& y, const float4& old) {
        const float d4[] = {y.x, y.y, y.z, y.w};
        const uint32_t gates[] = {__float_as_uint(old.x), __float_as_uint(old.y)};
        const uint32_t ups[] = {__float_as_uint(old.z), __float_as_uint(old.w)};
        float out[4], dg[4], du[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float g = i % 2 ? high(gates[i / 2]) : low(gates[i / 2]);
            const float u = i % 2 ? high(ups[i / 2]) : low(ups[i / 2]), d = to_acc(round_bf16(d4[i]));
            const float sigma = __fdividef(1, 1 + exp2_fast(-LOG2E * g)), silu = g * sigma;
            out[i] = silu * u, dg[i] = d * u * sigma * (1 + g * (1 - sigma)), du[i] = d * silu;
        }
        if (hidden) store_four(hidden + n * F + f, make_float4(out[0], out[1], out[2], out[3]));
        store_four(dgate_up + n * 2 * F + f, make_float4(dg[0], dg[1], dg[2], dg[3]));
        store_four(dgate_up + (n * 2 + 1) * F + f, make_float4(du[0], du[1], du[2], du[3]));
    }
};

struct LoraUpEpilogue : Epilogue { // linear_backward_input: dB += s y, in the rows and columns that belong together
    static constexpr bool ADDS = true;
    float* dB; // (out, m * rank)
    float s;
    int rank, columns, first[3], last[3]; // rows of module j
    LoraUpEpilogue(float* dB, const Linear<bf16>& W)
        : dB(dB), s(W.adapter.s), rank(W.adapter.rank), columns((int)W.adapter.width()), first(), last() {
        for (int j = 0; j < W.adapter.modules; j++) {
            const int block = W.adapter.block[j];
            first[j] = W.first_row(block), last[j] = first[j] + W.rows[block];
        }
    }
    __device__ bool own(int r, int c) const { return r >= first[c / rank] && r < last[c / rank]; }
    __device__ float4 old_four(int r, int c) const {
        return own(r, c) ? *(const float4*)(dB + (size_t)r * columns + c) : float4{};
    }
    __device__ void four(int r, int c, const float4& y, const float4& old) {
        if (!own(r, c)) return;
        const float4 sum = {old.x + s * y.x, old.y + s * y.y, old.z + s * y.z, old.w + s * y.w};
        store_four(dB + (size_t)r * columns + c, sum);
    }
};

// dh and dB on Hopper, for ranks up to 32: a tile of dy comes from memory once, and wgmma takes it both ways. A block
// owns a unit, 1024 rows of a module's s B, which stay in shared memory, and a split of the tokens; of these 64 at a
// time pass by, in stages of 256 rows. Each of two warpgroups has half of a stage's rows: it sums dB of all its rows in
// registers, and dh of the 64 tokens, whose halves the first warpgroup adds up. One warp copies. What several blocks
// have parts of, lora_up_sums_kernel adds up in order: dB's splits, and dh where a module has several units.
// Bound by the memory's speed.
struct LoraUp {
    static constexpr int ROWS = 1024, TOKENS = 64, PIECE = 256, PIECES = ROWS / PIECE, RANK = 32, STAGES = 4;
    static constexpr int PANEL = TOKENS * 128, DY_BYTES = PIECE / 64 * PANEL;
    static constexpr int STAGE_BYTES = DY_BYTES + TOKENS * RANK * 2;
    static constexpr int B_BYTES = ROWS * RANK * 2, DH_BYTES = TOKENS * RANK * 4; // (dh in two buffers)
    static constexpr int SHARED = B_BYTES + STAGES * STAGE_BYTES + 2 * DH_BYTES + 1024;
    static constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128, SUMS = ROWS * RANK;
    static constexpr int LEAST_TILES = 4; // of 64 tokens, for a block
    bf16* dh;        // (N, width)
    float* dB;       // (out, width)
    float* dh_parts; // (parts, N, RANK): of each unit of the modules with several
    float* dB_parts; // (units, splits, SUMS), as the threads hold them
    float s;
    int N, rank, width, modules, splits;
    int first[4], last[4]; // rows of module j
    int unit[4], part[4];  // its first unit; the first of its parts of dh. [modules]: how many there are in all

    LoraUp(bf16* dh, float* dB, void* scratch, float* partial, const Linear<bf16>& W, int N, int sms)
        : dh(dh), dB(dB), dh_parts((float*)scratch), dB_parts(partial), s(W.adapter.s), N(N), rank(W.adapter.rank),
          width((int)W.adapter.width()), modules(W.adapter.modules), first(), last(), unit(), part() {
        for (int j = 0; j < modules; j++) {
            const int block = W.adapter.block[j], units = (W.rows[block] + ROWS - 1) / ROWS;
            first[j] = W.first_row(block), last[j] = first[j] + W.rows[block];
            unit[j + 1] = unit[j] + units, part[j + 1] = part[j] + (units > 1 ? units : 0);
        }
        splits = std::max(1, std::min(sms / unit[modules], tiles() / LEAST_TILES));
    }
    BOTH int tiles() const { return (N + TOKENS - 1) / TOKENS; }
    int units() const { return unit[modules]; }
    int parts() const { return part[modules]; }
    bool fits(size_t scratch) const {
        return rank <= RANK && (size_t)parts() * N * RANK * sizeof(float) <= scratch &&
               (size_t)units() * splits * SUMS * sizeof(float) <= PARTIAL_BYTES;
    }
    // (An index that is not constant would cost a copy of the array.)
    __device__ static int pick(const int (&x)[4], int j) { return j == 0 ? x[0] : j == 1 ? x[1] : x[2]; }
    __device__ int module_of(int u) const { return (modules > 1 && u >= unit[1]) + (modules > 2 && u >= unit[2]); }
    __device__ bool has_parts(int j) const { return (j == 0 ? part[1] : j == 1 ? part[2] : part[3]) > pick(part, j); }
};
struct LoraUpMaps {
    CUtensorMap dy, h, B;
};
__global__ void __launch_bounds__(LoraUp::THREADS, 1)
lora_up_kernel(const __grid_constant__ LoraUpMaps maps, const __grid_constant__ LoraUp p) {
#ifdef HAVE_WGMMA
    using S = LoraUp;
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * S::STAGES + 1];
    const uint32_t B_at = (shared_address(memory) + 1023) & ~1023u, ring_at = B_at + S::B_BYTES;
    const uint32_t dh_at = ring_at + S::STAGES * S::STAGE_BYTES, B_there = shared_address(barriers + 2 * S::STAGES);
    const auto stage_at = [&](int s) { return ring_at + s * S::STAGE_BYTES; };
    const auto full = [&](int s) { return shared_address(barriers + s); };
    const auto empty = [&](int s) { return shared_address(barriers + S::STAGES + s); };
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; s++)
            barrier_begin(full(s), 1), barrier_begin(empty(s), S::CONSUMERS / 32);
        barrier_begin(B_there, 1);
        barriers_begun();
    }
    __syncthreads();
    const int u = blockIdx.x / p.splits, split = blockIdx.x % p.splits, j = p.module_of(u);
    const int r0 = p.pick(p.first, j) + (u - p.pick(p.unit, j)) * S::ROWS, c0 = j * p.rank;
    const int begin = (int)((int64_t)p.tiles() * split / p.splits);
    const int end = (int)((int64_t)p.tiles() * (split + 1) / p.splits);
    Ring<S::STAGES> ring;
    if (threadIdx.x >= S::CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x > S::CONSUMERS) return;
        barrier_arrive_expecting(B_there, S::B_BYTES); // weights: before what ran before has ended
        for (int r = 0; r < S::ROWS; r += 256) copy_box(B_at + r * S::RANK * 2, maps.B, B_there, c0, r0 + r);
        wait_for_previous();
        for (int tile = begin; tile < end; tile++)
            for (int piece = 0; piece < S::PIECES; piece++, ring.next()) {
                barrier_wait(empty(ring.stage), ring.parity ^ 1);
                const uint32_t to = stage_at(ring.stage), filled = full(ring.stage);
                barrier_arrive_expecting(filled, S::STAGE_BYTES);
                for (int c = 0; c < S::PIECE / 64; c++)
                    copy_box(to + c * S::PANEL, maps.dy, filled, r0 + piece * S::PIECE + c * 64, tile * S::TOKENS);
                copy_box(to + S::DY_BYTES, maps.h, filled, c0, tile * S::TOKENS);
            }
        return;
    }
    take_registers<232>();
    wait_for_previous(); // whose scratch this one writes
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const auto done_with = [&](int stage) {
        if (lane == 0) barrier_arrive(empty(stage));
    };
    barrier_wait(B_there, 0);
    float dB[2 * S::PIECES][4][4]; // of 64 rows each
    for (int tile = begin; tile < end; tile++) {
        float dh[1][4][4];
        int before = 0;
        #pragma unroll
        for (int piece = 0; piece < S::PIECES; piece++, ring.next()) {
            barrier_wait(full(ring.stage), ring.parity);
            const uint32_t h = stage_at(ring.stage) + S::DY_BYTES;
            wgmma_begin();
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t dy = stage_at(ring.stage) + (group * 2 + half) * S::PANEL;
                const uint32_t B = B_at + (piece * S::PIECE + (group * 2 + half) * 64) * S::RANK * 2;
                #pragma unroll
                for (int k = 0; k < 4; k++) // 16 rows; 16 tokens
                    wgmma<32, false, true>(dh[0], wgmma_operand(dy + k * 32, 0),
                                           wgmma_narrow_operand(B + k * 16 * S::RANK * 2), piece || half || k);
                #pragma unroll
                for (int k = 0; k < 4; k++)
                    wgmma<32, true, true>(dB[2 * piece + half], wgmma_operand(dy + k * 16 * 128, S::PANEL),
                                          wgmma_narrow_operand(h + k * 16 * S::RANK * 2), tile > begin || k);
            }
            wgmma_commit();
            if (piece) wgmma_wait<1>(), done_with(before);
            before = ring.stage;
        }
        wgmma_wait<0>();
        wgmma_settle(dh);
        done_with(before);
        // Both warpgroups' halves, in buffers that take turns: so one barrier a tile is enough.
        const uint32_t half = dh_at + tile % 2 * S::DH_BYTES + threadIdx.x % 128 * 16;
        if (group)
            #pragma unroll
            for (int f = 0; f < 4; f++)
                store_shared(half + f * 128 * 16, dh[0][f]);
        asm volatile("barrier.sync 1, %0;" ::"n"(S::CONSUMERS) : "memory");
        if (group) continue;
        #pragma unroll
        for (int f = 0; f < 4; f++) {
            const uint4 v = load_shared(half + f * 128 * 16);
            dh[0][f][0] += __uint_as_float(v.x), dh[0][f][1] += __uint_as_float(v.y);
            dh[0][f][2] += __uint_as_float(v.z), dh[0][f][3] += __uint_as_float(v.w);
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) { // of token e * 8 + lane / 4 columns c .. c + 3
            const int e = i % 2, n = tile * S::TOKENS + warp * 16 + e * 8 + lane / 4;
            const int c = i / 2 * 16 + lane % 4 / 2 * 4 + lane % 2 * 8;
            const float4 y = four_columns(dh[0][i / 2 * 2], dh[0][i / 2 * 2 + 1], e);
            if (n >= p.N) continue;
            if (p.has_parts(j)) {
                const int part = p.pick(p.part, j) + u - p.pick(p.unit, j);
                store_four(p.dh_parts + ((size_t)part * p.N + n) * S::RANK + c, y);
            } else if (c < p.rank) store_four(p.dh + (size_t)n * p.width + c0 + c, y);
        }
    }
    let_next_start();
    wgmma_settle(dB);
    #pragma unroll
    for (int f = 0; f < 8 * S::PIECES; f++) {
        const float(&v)[4] = dB[f / 4][f % 4];
        ((float4*)p.dB_parts)[((size_t)blockIdx.x * 8 * S::PIECES + f) * S::CONSUMERS + threadIdx.x] =
            make_float4(v[0], v[1], v[2], v[3]);
    }
#endif
}
// Grid: SUMS / 256 blocks for a unit's dB, a thread a number; then N / 32 for a module's dh, a thread four numbers.
__global__ void __launch_bounds__(256) lora_up_sums_kernel(const __grid_constant__ LoraUp p, int of_dB) {
    using S = LoraUp;
    let_next_start();
    wait_for_previous();
    if ((int)blockIdx.x < of_dB) {
        const int u = blockIdx.x / (S::SUMS / 256), j = p.module_of(u);
        const int i = blockIdx.x % (S::SUMS / 256) * 256 + threadIdx.x; // as lora_up_kernel's threads leave them
        const int e = i % 4, thread = i / 4 % 256, f = i / 1024, g = thread % 32 / 4, t = thread % 4;
        const int panel = f / 8 * 4 + thread / 128 * 2 + f / 4 % 2, c = f % 4 * 8 + 2 * t + e % 2;
        const int r = p.pick(p.first, j) + (u - p.pick(p.unit, j)) * S::ROWS + panel * 64 + thread / 32 % 4 * 16 +
                      e / 2 * 8 + g;
        const float* part = p.dB_parts + (size_t)u * p.splits * S::SUMS + i;
        if (r >= p.pick(p.last, j) || c >= p.rank) return;
        float* to = p.dB + (size_t)r * p.width + j * p.rank + c;
        float sum = 0;
        const float old = *to;
        #pragma unroll 12
        for (int split = 0; split < p.splits; split++) sum += __ldcg(part + (size_t)split * S::SUMS);
        *to = old + p.s * sum;
        return;
    }
    const int each = (p.N + 31) / 32, j = (blockIdx.x - of_dB) / each;
    const int n = (blockIdx.x - of_dB) % each * 32 + threadIdx.x / 8, c = threadIdx.x % 8 * 4;
    if (!p.has_parts(j) || n >= p.N || c >= p.rank) return;
    const int units = (j == 0 ? p.unit[1] : j == 1 ? p.unit[2] : p.unit[3]) - p.pick(p.unit, j);
    const float* part = p.dh_parts + ((size_t)p.pick(p.part, j) * p.N + n) * S::RANK + c;
    float4 sum = {};
    #pragma unroll 3
    for (int i = 0; i < units; i++) {
        const float4 v = __ldcg((const float4*)(part + (size_t)i * p.N * S::RANK));
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    store_four(p.dh + (size_t)n * p.width + j * p.rank + c, sum);
}

// lora_backward_weight: dA_j += dh_j^T drop_j(x). Grid: (columns / 128, groups / GROUPS, splits of the
// tokens), 8 warps. A block owns 32 GROUPS rows of the A by 128 columns, a warp 16 of the columns; 64 tokens at a time
// pass through a ring in shared memory: x, dh, and what was kept. A warp masks its x in registers, once for each
// module. lora_weight_sums_kernel adds the splits' sums in order, on all multiprocessors (the last block of a tile
// would take longer, alone). Bound by the memory's speed.
template <int GROUPS> struct LoraWeightShape {
    static constexpr int STAGES = 3, X_BYTES = 64 * 256;       // rows of 256 bytes, swizzled
    static constexpr int H_ROW = GROUPS * 64 + 16;             // eight rows of dh begin in different banks
    static constexpr int KEPT_BYTES = 2 * 64 * 8;              // of a module: two columns of 64 words
    static constexpr int H_AT = X_BYTES, KEPT_AT = H_AT + 64 * H_ROW;
    static constexpr int STAGE_BYTES = KEPT_AT + GROUPS * KEPT_BYTES;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES, TILE_BYTES = GROUPS * 32 * 128 * sizeof(float);
};
// Two neighbours of fragment f of a thread's sums, f = 4 group + 2 (16 rows) + (8 columns), are added to dA.
__device__ __forceinline__ void add_to_dA(float* dA, const LoraArgs& p, int first, int c0, int f, int thread, int half,
                                          float2 sum) {
    const int j = p.module_of(first + f / 4), g = thread % 32 / 4, t = thread % 4;
    const int r = p.first_row(first + f / 4) + f / 2 % 2 * 16 + half * 8 + g;
    const int c = c0 + thread / 32 * 16 + f % 2 * 8 + 2 * t;
    if (j >= p.modules || r >= p.rank || c >= p.in) return;
    float2* to = (float2*)(dA + (size_t)(j * p.rank + r) * p.in + c);
    const float2 old = *to;
    *to = make_float2(fmaf(p.scale, sum.x, old.x), fmaf(p.scale, sum.y, old.y));
}
template <int GROUPS>
__global__ void __launch_bounds__(256, 2) lora_weight_kernel(float* dA, const bf16* dh, const bf16* x, LoraArgs p,
                                                             float* partial) {
    using S = LoraWeightShape<GROUPS>;
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.y * GROUPS, c0 = blockIdx.x * 128;
    const int share = ((p.N + 63) / 64 + gridDim.z - 1) / gridDim.z * 64, begin = blockIdx.z * share;
    const int end = min(p.N, begin + share), steps = (end - begin + 63) / 64;
    const auto copy = [&](int step) {
        const uint32_t stage = shared + step % S::STAGES * S::STAGE_BYTES;
        const int n0 = begin + step * 64;
        #pragma unroll
        for (int k = 0; k < 64; k += 16) {
            const int row = threadIdx.x / 16 + k, chunk = threadIdx.x % 16, c = c0 + chunk * 8;
            copy_async(stage + row * 256 + ((chunk ^ row % 8) << 4), x + (size_t)(n0 + row) * p.in + c,
                       n0 + row < end && c < p.in);
        }
        const int row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int j = p.module_of(first + k), r = p.first_row(first + k) + chunk * 8;
            copy_async(stage + S::H_AT + row * S::H_ROW + k * 64 + chunk * 16,
                       dh + (size_t)(n0 + row) * p.width() + j * p.rank + r,
                       n0 + row < end && j < p.modules && r < p.rank);
            if (!p.dropping || threadIdx.x >= 128) continue;
            const int i64 = c0 / 64 + threadIdx.x / 64, n = n0 + threadIdx.x % 64; // (two words: N may be odd)
            copy_few_async<8>(stage + S::KEPT_AT + k * S::KEPT_BYTES + threadIdx.x * 8, p.kept.at(j, i64, n),
                         n < end && j < p.modules && i64 < p.kept.sixty_fours);
        }
        commit_copies();
    };
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++)
        if (s < steps) copy(s);
        else commit_copies();
    float sum[GROUPS * 2][2][4] = {};
    for (int step = 0; step < steps; step++) {
        wait_for_copies<S::STAGES - 2>();
        __syncthreads();
        if (step + S::STAGES - 1 < steps) copy(step + S::STAGES - 1);
        else commit_copies();
        const int at = step % S::STAGES * S::STAGE_BYTES;
        const uint32_t x_at = shared + at, h_at = x_at + S::H_AT;
        // Lane 16 c + 4 i + t fetches the masks of tokens 16 i + 2 t + {0, 1, 8, 9} and of the warp's eight columns c.
        uint32_t kept[GROUPS];
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            kept[k] = ~0u;
            if (!p.dropping) continue;
            const uint8_t* bytes = (const uint8_t*)memory + at + S::KEPT_AT + k * S::KEPT_BYTES + warp / 4 * 64 * 8 +
                                   (lane / 4 % 4 * 16 + t * 2) * 8 + warp % 4 * 2 + lane / 16;
            kept[k] = bytes[0] | bytes[8] << 8 | bytes[64] << 16 | (uint32_t)bytes[72] << 24;
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) { // 16 tokens
            uint32_t b[4];            // tokens 2 t .., 2 t + 8 .. by eight columns, and by the next eight
            const int row = i * 16 + lane % 16, chunk = warp * 2 + lane / 16;
            ldmatrix_transposed(b, x_at + row * 256 + ((chunk ^ row % 8) << 4));
            #pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                uint32_t y[4];
                #pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint32_t top = __shfl_sync(~0u, kept[k], c * 16 + i * 4 + t) << (7 - g);
                    y[2 * c] = b[2 * c] & spread_bits(top, top, 0x9988);
                    y[2 * c + 1] = b[2 * c + 1] & spread_bits(top, top, 0xbbaa);
                }
                #pragma unroll
                for (int f = 0; f < 2; f++) {
                    uint32_t a[4];
                    ldmatrix_transposed(a, h_at + (i * 16 + lane % 8 + lane / 16 * 8) * S::H_ROW +
                                               (k * 4 + f * 2 + lane / 8 % 2) * 16);
                    mma(sum[2 * k + f][0], a[0], a[1], a[2], a[3], y[0], y[1]);
                    mma(sum[2 * k + f][1], a[0], a[1], a[2], a[3], y[2], y[3]);
                }
            }
        }
    }
    wait_for_copies<0>();
    let_next_start();
    const size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * gridDim.z + blockIdx.z;
    #pragma unroll
    for (int f = 0; f < GROUPS * 4; f++) {
        const float(&v)[4] = sum[f / 2][f % 2];
        if (gridDim.z > 1) {
            ((float4*)partial)[(at * GROUPS * 4 + f) * 256 + threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
            continue;
        }
        for (int half = 0; half < 2; half++)
            add_to_dA(dA, p, first, c0, f, threadIdx.x, half, make_float2(v[2 * half], v[2 * half + 1]));
    }
}
// Grid: (8 groups, columns / 128, groups / GROUPS). A thread owns two numbers of a tile.
__global__ void __launch_bounds__(256) lora_weight_sums_kernel(float* dA, LoraArgs p, const float* partial,
                                                               int splits) {
    let_next_start();
    wait_for_previous();
    const int groups = gridDim.x / 8, i = blockIdx.x * 256 + threadIdx.x; // as lora_weight_kernel's threads leave them
    const size_t tile = (size_t)blockIdx.z * gridDim.y + blockIdx.y, numbers = (size_t)groups * 2048;
    const float2* part = (const float2*)partial + tile * splits * numbers + i;
    float2 sum = {};
    #pragma unroll 12
    for (int split = 0; split < splits; split++) {
        const float2 v = __ldcg(part + split * numbers);
        sum.x += v.x, sum.y += v.y;
    }
    add_to_dA(dA, p, blockIdx.z * groups, blockIdx.y * 128, i / 512, i / 2 % 256, i % 2, sum);
}

// ---- Launchers

// Always in tiles of 128: their epilogue makes the softmax's parts. Logits do not leave the chip; their weights in the
// softmax do, if their gradients are wanted: in these' place, as bf16 (R,V), which is all there is of `logits`.
inline void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* factor, float* logits, bf16* picked,
                          float* parts, const bf16* x, const int* rows, const int* target, float scale,
                          const float* by, const Linear<bf16>& W, int R) {
    const int V = W.out(), pieces = (V + 63) / 64;
    float2* const of_64 = (float2*)parts;
    float* const from = parts + (size_t)R * pieces * 2;
    int* const again = (int*)from + R;
    bf16* const weights = dlogits ? (bf16*)logits : nullptr;
    clear(ctx, again, 1);
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
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

inline void head_backward_gpu(Context& ctx, bf16* dnormed, const bf16* dlogits, size_t ld, const float* factor,
                              const int* rows, const Linear<bf16>& W, int R) {
    each_part(ctx, W, true, [&](int first, int count, const bf16* weights) {
        const AfterUnpacking order(ctx, W);
        TileArgs p = {dlogits, weights, R, W.out(), count};
        p.ldx = (int)ld;
        tile_product<false, true>(ctx, p, ScatterEpilogue(dnormed + first, factor, rows, W.in));
    });
}

// dh and dB of an adapter. `scratch` has as many numbers as dx.
inline void lora_up_backward(Context& ctx, bf16* dh, float* dB, bf16* scratch, const bf16* dy, const Linear<bf16>& W,
                             int N) {
    const Adapter<bf16>& a = W.adapter;
    const int width = (int)a.width(), out = W.out();
    const LoraUp p(dh, dB, scratch, ctx.gpu->partial, W, N, ctx.gpu->sms);
    if (!ctx.gpu->hopper || !p.fits((size_t)N * W.in * sizeof(bf16))) {
        tile_product<false, true>(ctx, {dy, a.B, N, out, width}, StoreEpilogue<bf16>(dh, width));
        return tile_product<true, true>(ctx, {dy, a.h, out, N, width}, LoraUpEpilogue(dB, W));
    }
    const auto map = [](const bf16* x, int rows, int columns, int wide, int high) {
        return tensor_map(x, {{(size_t)columns, 1, wide}, {(size_t)rows, (size_t)columns, high}});
    };
    const LoraUpMaps maps = {map(dy, N, out, 64, p.TOKENS), map(a.h, N, width, p.RANK, p.TOKENS),
                             map(a.B, out, width, p.RANK, 256)};
    launch(ctx, lora_up_kernel, p.units() * p.splits, p.THREADS, p.SHARED, maps, p);
    const int of_dB = p.units() * (p.SUMS / 256), of_dh = p.parts() ? p.modules * ((N + 31) / 32) : 0;
    launch(ctx, lora_up_sums_kernel, of_dB + of_dh, 256, 0, p, of_dB);
}

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
inline void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, float* dB, const bf16* dy,
                                      const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    if (lora.width()) lora_up_backward(ctx, dh, dB, dx, dy, W, N);
    input_product(ctx, dh, dy, W, lora, DropEpilogue(dx, W.in, lora.kept, lora.rank, lora.scale),
                  StoreEpilogue<bf16>(dx, W.in));
}
inline void linear_backward_swiglu_gpu(Context& ctx, bf16* dgate_up, bf16* hidden, bf16*, bf16* dh, float* dB,
                                       const bf16* dy, const bf16* gate_up, const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    if (lora.width()) lora_up_backward(ctx, dh, dB, dgate_up, dy, W, N);
    input_product(ctx, dh, dy, W, lora, SwigluBackwardEpilogue<true>(dgate_up, hidden, gate_up, W.in, lora),
                  SwigluBackwardEpilogue<false>(dgate_up, hidden, gate_up, W.in, lora));
}

inline void lora_backward_weight_gpu(Context& ctx, float* dA, const bf16* dh, const bf16* x, const Linear<bf16>& W,
                                     int N) {
    const LoraArgs p(W, N);
    in_groups(p.groups(), [&](auto groups) {
        using S = LoraWeightShape<groups>;
        const int columns = (p.in + 127) / 128, rows = (p.groups() + groups - 1) / groups, tiles = columns * rows;
        const int most = (int)(PARTIAL_BYTES / (S::TILE_BYTES * tiles)); // splits that the scratch has room for
        const int splits = std::max(1, std::min({(N + 63) / 64, 2 * ctx.gpu->sms / tiles, most}));
        float* const partial = ctx.gpu->partial;
        launch(ctx, lora_weight_kernel<groups>, dim3(columns, rows, splits), 256, S::SHARED, dA, dh, x, p, partial);
        if (splits > 1)
            launch(ctx, lora_weight_sums_kernel, dim3(8 * groups, columns, rows), 256, 0, dA, p, partial, splits);
    });
}

// ========================================================================================================= 3 Attention
// ---- Attention backward: Book I's `attention_backward`, and `attend_backward` where the norms' weights are not
// trained (FlashAttention-2's backward pass without its atomics)
// The probabilities are computed twice: once where dk and dv of some keys are summed over all queries, once where dq
// of some queries is summed over all keys. So a number has one block that sums it, in one order; seven products of
// tiles instead of five. With s = q . k / sqrt(D), p = e^(s - lse) and ds = p (dout . v - delta):
//     dv_m = sum_n p dout_n      dk_m = sum_n ds q_n / sqrt(D)      dq_n = sum_m ds k_m / sqrt(D)
// The query rows of a KV head are numbered through: row r is head r % G of token r / G. The keys that token n sees are
// rows n - pos[n] .. n of the batch; tiles may lie across the borders of sequences, since that is all that a mask
// needs. A warp skips tiles in which its keys and queries do not meet.
struct AttentionBackward {
    bf16* dqkv;                // (N,(H+2K)D) out
    const bf16 *dout, *q;      // (N,HD)
    const bf16 *keys, *values; // one layer's cache
    const float *lse, *delta;  // (N,H)
    Batch b;
    int H, K;
    // attend_backward's: qkv (N,(H+2K)D) before norm and RoPE, whose gradient dqkv then is.
    const bf16 *qkv = nullptr, *q_weight = nullptr, *k_weight = nullptr;
    const float* rope = nullptr;
    float eps = 0;
};
constexpr int GRADIENT_KEYS = 64;  // that a block sums dk and dv of
constexpr int PASSING_ROWS = 64;   // query rows that pass by them at a time
constexpr int GRADIENT_ROWS = 128; // query rows that a block sums dq of
constexpr int PASSING_KEYS = 32;   // keys that pass by them at a time
// Shared memory of either block: keys, values, two stages of q and two of dout, 64 rows each; or q and dout, 128 rows
// each, two stages of keys and two of values, 32 rows each. And lse, delta and position of 128 rows: 97.5 KB for D =
// 128.
constexpr size_t backward_shared(int D) { return (size_t)6 * 64 * D * sizeof(bf16) + 3 * 128 * 4; }

// delta[n][h] = dout[n][h] . out[n][h]: D / 8 lanes a row, 8 numbers a lane; blocks of 256. Bound by memory.
template <int D> __global__ void attention_delta_kernel(float* delta, const bf16* dout, const bf16* out, size_t rows) {
    let_next_start();
    wait_for_previous();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / (D / 8);
    float sum = 0;
    if (row < rows) {
        const uint4 a = *(const uint4*)(dout + i * 8), b = *(const uint4*)(out + i * 8);
        sum = low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y) +
              low(a.z) * low(b.z) + high(a.z) * high(b.z) + low(a.w) * low(b.w) + high(a.w) * high(b.w);
    }
    #pragma unroll
    for (int lane = D / 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (row < rows && i % (D / 8) == 0) delta[row] = sum;
}

// The query rows of a KV head.
struct HeadQueries {
    int H, G, kv;
    uint32_t inverse; // 2^31 / G, rounded up
    __device__ HeadQueries(const AttentionBackward& p, int kv)
        : H(p.H), G(p.H / p.K), kv(kv), inverse((0x80000000u + G - 1) / G) {}
    // r / G, exact as long as r * G < 2^31.
    __device__ int token(int r) const { return (int)__umulhi(2 * (uint32_t)r, inverse); }
    // Row r of q and dout, of lse and delta: n H + kv G + r % G, for n = token(r).
    __device__ int place(int r, int n) const { return r + n * (H - G) + kv * G; }
};

// s, scores, become probabilities: 2^(s scale log2(e) - lse log2(e)). lse_of(i, j, e) is that of the number's query
// row.
template <int I, int J, class F>
__device__ __forceinline__ void probabilities(float (&s)[I][J][4], float scale, F lse_of) {
    each_score(s, [&](float& x, int i, int j, int e) {
        x = exp2_fast(fmaf(x, scale * LOG2E, -lse_of(i, j, e) * LOG2E));
    });
}

// ---- dk and dv. A block owns 64 keys of a KV head, a warp 16 of them, with the sums of dk and dv in registers; all
// query rows that see one of the keys pass by, 64 at a time, of all G heads. Scores are computed as keys times queries,
// so that they lie as the weights of the two sums want them.

// One past the last token that sees one of the tokens before m1, or a spare row: each of THREADS asks one token, evenly
// spaced between what is known to see one and what is known not to, until no gap is left. count(x): how many of them
// say so, for all of them.
template <int THREADS, class F>
__device__ __forceinline__ int end_of_queries(const Batch& b, int m0, int m1, F count) {
    int end = m0, past = b.N;
    while (end < past) {
        const int stride = (past - end + THREADS - 1) / THREADS, n = end + (int)threadIdx.x % THREADS * stride;
        const int seeing = count(n < past && b.seq[n] >= 0 && n - b.pos[n] < m1);
        past = min(past, end + seeing * stride);
        if (seeing) end += (seeing - 1) * stride + 1;
    }
    return end;
}

// Query rows, up to `rows`, pass through two stages of shared memory, with dout, lse, delta and position.
template <int D> struct PassingQueries {
    static constexpr int TILE = PASSING_ROWS * HeadTile<D>::ROW;
    const AttentionBackward& p;
    const HeadQueries heads;
    int rows;
    uint32_t q_tiles, dout_tiles;
    float* numbers; // of each stage 64 lse, 64 delta, 64 positions
    HeadRows<D> mine;

    __device__ __forceinline__ const float* lse(int stage) const { return numbers + stage * 3 * PASSING_ROWS; }
    __device__ __forceinline__ const float* delta(int stage) const { return lse(stage) + PASSING_ROWS; }
    __device__ __forceinline__ const int* pos(int stage) const { return (const int*)(lse(stage) + 2 * PASSING_ROWS); }
    __device__ __forceinline__ void copy(int stage, int row0) const {
        const int last = max(rows, 1) - 1;
        #pragma unroll
        for (int i = 0; i < PASSING_ROWS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP, row = min(row0 + r, last);
            const int to = stage * TILE + HeadTile<D>::at(r, mine.chunk);
            const size_t at = (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8;
            copy_async(q_tiles + to, p.q + at, row0 + r < rows);
            copy_async(dout_tiles + to, p.dout + at, row0 + r < rows);
        }
        const int r = threadIdx.x % PASSING_ROWS, row = min(row0 + r, last), n = heads.token(row);
        const uint32_t to = shared_address(lse(stage) + r);
        if (threadIdx.x < PASSING_ROWS) {
            copy_few_async<4>(to, p.lse + heads.place(row, n), row0 + r < rows);
            copy_few_async<4>(to + 2 * PASSING_ROWS * 4, p.b.pos + n, row0 + r < rows);
        } else copy_few_async<4>(to + PASSING_ROWS * 4, p.delta + heads.place(row, n), row0 + r < rows);
        commit_copies();
    }
};

// The keys and values of tokens m0 .., of which those from `end` on are zeros, to tiles.
template <int D>
__device__ __forceinline__ void load_keys(const AttentionBackward& p, int m0, int end, int kv, uint32_t k_tile,
                                          uint32_t v_tile) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < GRADIENT_KEYS; r += mine.STEP) {
        const bool there = m0 + r < end;
        const int slot = there ? p.b.slot[m0 + r] : 0, to = HeadTile<D>::at(r, mine.chunk);
        const size_t at = kv_offset(slot / PAGE, kv, slot % PAGE, p.K, D) + mine.chunk * 8;
        copy_async(k_tile + to, p.keys + at, there);
        copy_async(v_tile + to, p.values + at, there);
    }
}

// What a quad of lanes has of two rows, as store_row takes them: g becomes the gradient of the heads `head` of tokens n
// before norm and RoPE. The rule is WarpHeadBackward's; it is linear in g, which may still lack a factor. Spare rows
// stay zeros. All of both rows is asked for before the first number is needed.
template <int D>
__device__ __forceinline__ void through_norm_rope(const AttentionBackward& p, float (&g)[D / 8][4], const int (&n)[2],
                                                  const int (&head)[2]) {
    constexpr int J = D / 16; // g[j] and g[j + J] are of the same planes
    const int quad = threadIdx.x % 4;
    const uint32_t* w = (const uint32_t*)(head[0] < p.H ? p.q_weight : p.k_weight) + quad;
    uint32_t x[2][2 * J];
    const float4* angles[2];
    bool spare[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int token = min(n[h], p.b.N - 1), pos = p.b.pos[token];
        const uint32_t* row = (const uint32_t*)(p.qkv + ((size_t)token * (p.H + 2 * p.K) + head[h]) * D) + quad;
        spare[h] = p.b.seq[token] < 0;
        angles[h] = (const float4*)(p.rope + (size_t)(spare[h] ? 0 : pos) * D) + quad;
        #pragma unroll
        for (int j = 0; j < 2 * J; j++) x[h][j] = row[j * 4];
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        float squares = 0, mixed = 0;
        #pragma unroll
        for (int j = 0; j < J; j++) {
            const float4 angle = angles[h][j * 4]; // cosine and sine of one plane, and of the next
            const uint32_t xu = x[h][j], xv = x[h][j + J], wu = w[j * 4], wv = w[(j + J) * 4];
            const auto turn = [](float& u, float& v, float cosine, float sine) {
                const float a = u;
                u = a * cosine + v * sine, v = v * cosine - a * sine;
            };
            float *u = &g[j][2 * h], *v = &g[j + J][2 * h];
            turn(u[0], v[0], angle.x, angle.y), turn(u[1], v[1], angle.z, angle.w);
            squares += low(xu) * low(xu) + low(xv) * low(xv) + high(xu) * high(xu) + high(xv) * high(xv);
            mixed += low(xu) * low(wu) * u[0] + low(xv) * low(wv) * v[0];
            mixed += high(xu) * high(wu) * u[1] + high(xv) * high(wv) * v[1];
        }
        const float r = 1 / sqrtf(quad_sum(squares) / D + p.eps), mean = quad_sum(mixed) * r * r * r / D;
        #pragma unroll
        for (int j = 0; j < 2 * J; j++) {
            float* y = &g[j][2 * h];
            y[0] = spare[h] ? 0 : r * low(w[j * 4]) * y[0] - low(x[h][j]) * mean;
            y[1] = spare[h] ? 0 : r * high(w[j * 4]) * y[1] - high(x[h][j]) * mean;
        }
    }
}

// Of this warp's keys first ..; spare rows met no query: zeros.
template <int D>
__device__ __forceinline__ void store_key_value_gradients(const AttentionBackward& p, float (&dk)[1][D / 8][4],
                                                          const float (&dv)[1][D / 8][4], int first, int m1, int kv,
                                                          float scale) {
    if (p.qkv) through_norm_rope<D>(p, dk[0], {first + score_row(0, 0), first + score_row(0, 2)}, {p.H + kv, p.H + kv});
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int m = first + score_row(0, 2 * h);
        if (m >= m1) continue;
        bf16* to = p.dqkv + ((size_t)m * (p.H + 2 * p.K) + p.H + kv) * D;
        store_row(to, dk[0], h, scale);
        store_row(to + p.K * D, dv[0], h, 1);
    }
}

template <int D>
__device__ __forceinline__ void key_value_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = HeadTile<D>::ROW, TILE = 64 * ROW, J = PASSING_ROWS / 16;
    static_assert(GRADIENT_KEYS == 64 && PASSING_ROWS == 64, "one size of tile; 16 keys a warp");
    const uint32_t k_tile = shared_address(tiles), v_tile = k_tile + TILE, own = threadIdx.x / 32 * 16 * ROW;
    const int m0 = tile * GRADIENT_KEYS, m1 = min(m0 + GRADIENT_KEYS, p.b.N);
    const int end = end_of_queries<128>(p.b, m0, m1, [](bool sees) { return __syncthreads_count(sees); });
    const HeadQueries heads(p, kv);
    const int rows = end * heads.G, first = m0 + threadIdx.x / 32 * 16, last = first + 15; // this warp's keys
    float* numbers = (float*)((char*)tiles + 6 * TILE);
    const PassingQueries<D> queries = {p, heads, rows, v_tile + TILE, v_tile + 3 * TILE, numbers};
    const float scale = 1 / sqrtf((float)D);
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    load_keys<D>(p, m0, min(m1, end), kv, k_tile, v_tile);
    queries.copy(0, m0 * heads.G);
    for (int row0 = m0 * heads.G, stage = 0; row0 < rows; row0 += PASSING_ROWS, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        queries.copy(stage ^ 1, row0 + PASSING_ROWS);
        const uint32_t q_tile = queries.q_tiles + stage * TILE, dout_tile = queries.dout_tiles + stage * TILE;
        const float *lse = queries.lse(stage), *delta = queries.delta(stage);
        const int *pos = queries.pos(stage), last_row = min(PASSING_ROWS, rows - row0) - 1;
        const int oldest = heads.token(row0), newest = heads.token(row0 + last_row);
        if (first > newest || last < oldest - pos[0]) continue;
        float s[1][2 * J][4] = {}, ds[1][2 * J][4];
        multiply_rows<D, 1, J>(s, k_tile + own, q_tile);
        probabilities(s, scale, [&](int, int j, int e) { return lse[score_column(j, e)]; });
        if (last > oldest || first < newest - pos[last_row])
            each_score(s, [&](float& x, int, int j, int e) {
                const int r = score_column(j, e), n = heads.token(row0 + r), m = first + score_row(0, e);
                if ((uint32_t)(n - m) > (uint32_t)pos[r]) x = 0;
            });
        add_weighted_rows<D, 1, J>(dv, s, dout_tile);
        each_score(ds, [&](float& x, int, int j, int e) { x = -delta[score_column(j, e)]; });
        multiply_rows<D, 1, J>(ds, v_tile + own, dout_tile);
        each_score(ds, [&](float& x, int i, int j, int e) { x *= s[i][j][e]; });
        add_weighted_rows<D, 1, J>(dk, ds, q_tile);
    }
    wait_for_copies<0>();
    store_key_value_gradients<D>(p, dk, dv, first, m1, kv, scale);
}

// ---- dq. A block owns 128 query rows of a KV head, a warp 32 of them, with the sums of dq in registers; the keys they
// see pass by, 32 at a time.

// Rows row0 .., of which those from `rows` on are zeros: q and dout to tiles; lse, delta and position, a thread a row.
template <int D>
__device__ __forceinline__ void load_query_rows(const AttentionBackward& p, const HeadQueries& heads, int row0,
                                                int rows, uint32_t q_tile, uint32_t dout_tile, float* lse,
                                                float* delta, int* pos) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < GRADIENT_ROWS; r += mine.STEP) {
        const bool there = row0 + r < rows;
        const int to = HeadTile<D>::at(r, mine.chunk), row = row0 + r;
        const size_t at = there ? (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8 : 0;
        copy_async(q_tile + to, p.q + at, there);
        copy_async(dout_tile + to, p.dout + at, there);
    }
    const int t = threadIdx.x, row = row0 + t, n = heads.token(row), at = heads.place(row, n);
    const bool there = row < rows;
    lse[t] = there ? p.lse[at] : 0, delta[t] = there ? p.delta[at] : 0, pos[t] = there ? p.b.pos[n] : 0;
}

// Keys and values of the batch's tokens up to `end` pass through two stages of shared memory. Their slots are read a
// tile ahead of the copies that need them.
template <int D> struct PassingKeys {
    static constexpr int TILE = PASSING_KEYS * HeadTile<D>::ROW, COUNT = PASSING_KEYS / HeadRows<D>::STEP;
    const AttentionBackward& p;
    int kv, end;
    uint32_t k_tiles, v_tiles;
    HeadRows<D> mine;
    int slot[COUNT];
    __device__ __forceinline__ void next_slots(int key0) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int m = key0 + mine.row + i * mine.STEP;
            slot[i] = m < end ? p.b.slot[m] : 0;
        }
    }
    __device__ __forceinline__ void copy(int stage, int key0) const {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int r = mine.row + i * mine.STEP, to = stage * TILE + HeadTile<D>::at(r, mine.chunk);
            const size_t at = kv_offset(slot[i] / PAGE, kv, slot[i] % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(k_tiles + to, p.keys + at, key0 + r < end);
            copy_async(v_tiles + to, p.values + at, key0 + r < end);
        }
        commit_copies();
    }
};

// Of this warp's rows first_row ..; spare rows are zeros: so were their q and dout.
template <int D, int I>
__device__ __forceinline__ void store_query_gradients(const AttentionBackward& p, const HeadQueries& heads,
                                                      float (&dq)[I][D / 8][4], int first_row, float scale) {
    #pragma unroll
    for (int i = 0; i < I; i++) {
        int n[2], head[2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = first_row + score_row(i, 2 * h), G = heads.G;
            n[h] = heads.token(r), head[h] = heads.kv * G + r - n[h] * G;
        }
        if (p.qkv) through_norm_rope<D>(p, dq[i], n, head);
        #pragma unroll
        for (int h = 0; h < 2; h++)
            if (n[h] < p.b.N) store_row(p.dqkv + ((size_t)n[h] * (p.H + 2 * p.K) + head[h]) * D, dq[i], h, scale);
    }
}

template <int D>
__device__ __forceinline__ void query_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = HeadTile<D>::ROW, J = PASSING_KEYS / 16;
    static_assert(GRADIENT_ROWS == 128, "32 rows a warp; a thread asks for a row");
    const uint32_t q_tile = shared_address(tiles), dout_tile = q_tile + GRADIENT_ROWS * ROW;
    const uint32_t k_tiles = dout_tile + GRADIENT_ROWS * ROW, v_tiles = k_tiles + 2 * PASSING_KEYS * ROW;
    float *lse = (float*)((char*)tiles + (2 * GRADIENT_ROWS + 4 * PASSING_KEYS) * ROW), *delta = lse + GRADIENT_ROWS;
    int* pos = (int*)(delta + GRADIENT_ROWS);
    const Batch& b = p.b;
    const HeadQueries heads(p, kv);
    const int row0 = tile * GRADIENT_ROWS, n0 = heads.token(row0);
    const int n1 = heads.token(min(row0 + GRADIENT_ROWS, b.N * heads.G) - 1), n = n0 + threadIdx.x;
    const int end = n0 + __syncthreads_count(n <= n1 && b.seq[n] >= 0), rows = end * heads.G; // what follows is spare
    load_query_rows<D>(p, heads, row0, rows, q_tile, dout_tile, lse, delta, pos);
    // This warp's tokens, and where the sequences of the first and of the last of them begin.
    const int own = threadIdx.x / 32 * 32, first_row = row0 + own;
    const int oldest = heads.token(first_row), newest = heads.token(min(first_row + 32, rows) - 1);
    const bool some = first_row < rows;
    const int oldest_first = some ? oldest - b.pos[oldest] : b.N, newest_first = some ? newest - b.pos[newest] : b.N;
    const float scale = 1 / sqrtf((float)D);
    const int key_begin = end > n0 ? n0 - b.pos[n0] : end;
    PassingKeys<D> keys = {p, kv, end, k_tiles, v_tiles};
    float dq[2][D / 8][4] = {};
    keys.next_slots(key_begin);
    keys.copy(0, key_begin);
    keys.next_slots(key_begin + PASSING_KEYS);
    for (int key0 = key_begin, stage = 0; key0 < end; key0 += PASSING_KEYS, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        keys.copy(stage ^ 1, key0 + PASSING_KEYS);
        keys.next_slots(key0 + 2 * PASSING_KEYS);
        if (key0 > newest || key0 + PASSING_KEYS <= oldest_first) continue;
        const uint32_t k_tile = k_tiles + stage * keys.TILE, v_tile = v_tiles + stage * keys.TILE;
        float s[2][2 * J][4] = {}, ds[2][2 * J][4];
        multiply_rows<D, 2, J>(s, q_tile + own * ROW, k_tile);
        probabilities(s, scale, [&](int i, int, int e) { return lse[own + score_row(i, e)]; });
        if (key0 + PASSING_KEYS > oldest + 1 || key0 < newest_first)
            each_score(s, [&](float& x, int i, int j, int e) {
                const int r = own + score_row(i, e), n = heads.token(row0 + r), m = key0 + score_column(j, e);
                if ((uint32_t)(n - m) > (uint32_t)pos[r]) x = 0;
            });
        each_score(ds, [&](float& x, int i, int, int e) { x = -delta[own + score_row(i, e)]; });
        multiply_rows<D, 2, J>(ds, dout_tile + own * ROW, v_tile);
        each_score(ds, [&](float& x, int i, int j, int e) { x *= s[i][j][e]; });
        add_weighted_rows<D, 2, J>(dq, ds, k_tile);
    }
    wait_for_copies<0>();
    store_query_gradients<D>(p, heads, dq, first_row, scale);
}

// Both in one launch, so that neither waits for the other's last blocks: grid (K, tiles of keys + tiles of rows), 128
// threads, two blocks a multiprocessor; bound by the tensor cores and by registers (for D = 128 all 255). Early keys
// are seen by many queries, late queries see many keys: of one sequence, long blocks come first.
template <int D>
__global__ void __launch_bounds__(128, 2) attention_backward_kernel(AttentionBackward p, int key_tiles) {
    extern __shared__ __align__(128) uint4 tiles[];
    wait_for_previous();
    if ((int)blockIdx.y < key_tiles) key_value_gradients<D>(p, blockIdx.y, blockIdx.x, tiles);
    else query_gradients<D>(p, gridDim.y - 1 - blockIdx.y, blockIdx.x, tiles);
}
// ---- The same on Hopper, for D = 128. A block takes a unit after another: 128 keys of a KV head, whose dk and dv it
// sums, or 128 query rows, whose dq it sums. Either way it owns two tiles (keys and values; or q and dout) while two
// others pass by, 64 rows at a time (q and dout; or keys and values), and
//     s = own[0] passing[0]^T    dp = own[1] passing[1]^T    sum[0] += ds passing[0]    sum[1] += p passing[1] (keys)
// Each of two warpgroups has 64 of the rows owned. A third one copies: the tiles that pass by, in two stages, and,
// while both are full, the next unit's own. Bound by the tensor cores, and a seventh by waiting for tiles; the products
// of 64 x 64 take both operands from shared memory and all of its bandwidth. The sums of keys take 128 registers.
struct HopperBackward {
    static constexpr int D = 128, OWN = 128, PASSING = 64, STAGES = 2;
    static constexpr int TILE = OWN * D * 2, SHARED = (2 * 2 + STAGES) * TILE + 1024; // (two tiles pass by as one)
    static constexpr int CONSUMERS = 256, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
    template <int ROWS> struct Numbers { // of query rows
        float lse[ROWS], delta[ROWS];
        int pos[ROWS];
    };
    struct Unit {
        int kv, first, from, to; // it owns keys, or rows, from `first` on; rows, or keys, from .. to - 1 pass by
        bool keys;
        // In tiles; on the diagonal last, where only one warpgroup has something to do: the other one stores meanwhile.
        __device__ int count() const { return (to - from + PASSING - 1) / PASSING; }
        __device__ int tile(int i) const { return from + (keys ? count() - 1 - i : i) * PASSING; }
    };
    struct Shared {
        Numbers<OWN> own[2];
        Numbers<PASSING> passing[STAGES];
        Unit unit[2]; // kv -1 at the end
        int next[2];
        uint64_t barriers[2 * (2 + STAGES)];
    };
    const AttentionBackward& p;
    int* taken; // how many units were taken from the counter, and how many blocks have left
    Shared& told;
    uint32_t tiles; // in shared memory
    __device__ uint32_t own(int stage) const { return tiles + stage * 2 * TILE; }
    __device__ uint32_t passing(int stage) const { return tiles + (4 + stage) * TILE; }
    __device__ uint32_t full(int i) const { return shared_address(told.barriers + 2 * i); } // own 0, 1; passing 2 ..
    __device__ uint32_t empty(int i) const { return full(i) + 8; }

    // Keys, then rows; of one sequence, long units come first.
    BOTH static int units(int N, int H, int K) { return (N + OWN - 1) / OWN * (H + K); }
    __device__ __forceinline__ Unit unit_of(int number) const {
        const int G = p.H / p.K, all = units(p.b.N, p.H, p.K), lane = threadIdx.x % 32;
        const int of_keys = (p.b.N + OWN - 1) / OWN * p.K;
        const auto count = [](bool x) { return __popc(__ballot_sync(~0u, x)); };
        if (number >= all) return {-1, 0, 0, 0, false};
        Unit u = {number % p.K, 0, 0, 0, number < of_keys};
        u.first = (u.keys ? number : all - 1 - number) / p.K * OWN;
        if (u.keys) {
            u.from = u.first * G, u.to = G * end_of_queries<32>(p.b, u.first, min(u.first + OWN, p.b.N), count);
            return u;
        }
        const HeadQueries heads(p, u.kv);
        const int n0 = heads.token(u.first), n1 = heads.token(min(u.first + OWN, p.b.N * G) - 1);
        u.to = n0; // what follows is spare
        for (int n = n0; n <= n1; n += 32) u.to += count(n + lane <= n1 && p.b.seq[n + lane] >= 0);
        u.from = u.to > n0 ? n0 - p.b.pos[n0] : u.to;
        return u;
    }

    // ---- One warpgroup copies. A tile of ROWS rows lies in two halves of 128 bytes a row.
    template <int ROWS> __device__ static int place(int r, int chunk) {
        return chunk / 8 * ROWS * 128 + r * 128 + ((chunk % 8 ^ r % 8) << 4);
    }
    template <int ROWS>
    __device__ __forceinline__ void copy_rows(uint32_t to, Numbers<ROWS>& numbers, int kv, int row0, int rows) const {
        const HeadQueries heads(p, kv);
        const HeadRows<D> mine;
        #pragma unroll 4
        for (int r = mine.row; r < ROWS; r += mine.STEP) {
            const int row = row0 + r, at = to + place<ROWS>(r, mine.chunk);
            const size_t from = row < rows ? (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8 : 0;
            copy_async(at, p.q + from, row < rows);
            copy_async(at + ROWS * D * 2, p.dout + from, row < rows);
        }
        const int r = threadIdx.x % ROWS, row = row0 + r, n = heads.token(row), from = heads.place(row, n);
        const bool there = row < rows, first = threadIdx.x % PRODUCERS < ROWS;
        if (first) {
            copy_few_async<4>(shared_address(numbers.lse + r), p.lse + (there ? from : 0), there);
            copy_few_async<4>(shared_address(numbers.pos + r), p.b.pos + (there ? n : 0), there);
        }
        if (!first || ROWS == PRODUCERS)
            copy_few_async<4>(shared_address(numbers.delta + r), p.delta + (there ? from : 0), there);
    }
    // Waits for `empty` when it knows where the keys are.
    template <int ROWS>
    __device__ __forceinline__ void copy_keys(uint32_t to, int kv, int m0, int end, uint32_t empty, int parity) const {
        const HeadRows<D> mine;
        const int lane = threadIdx.x % 32;
        int slot[ROWS / 32];
        #pragma unroll
        for (int i = 0; i < ROWS / 32; i++) slot[i] = m0 + i * 32 + lane < end ? p.b.slot[m0 + i * 32 + lane] : -1;
        barrier_wait(empty, parity);
        #pragma unroll
        for (int i = 0; i < ROWS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP, at = to + place<ROWS>(r, mine.chunk);
            const int its = __shfl_sync(~0u, slot[i * mine.STEP / 32], r % 32), s = max(its, 0);
            const size_t from = kv_offset(s / PAGE, kv, s % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(at, p.keys + from, its >= 0);
            copy_async(at + ROWS * D * 2, p.values + from, its >= 0);
        }
    }
    __device__ __forceinline__ void copy_own(const Unit& u, Ring<2>& ring) const {
        const int stage = ring.stage, parity = ring.parity ^ 1, G = p.H / p.K;
        if (u.keys) copy_keys<OWN>(own(stage), u.kv, u.first, u.to / G, empty(stage), parity);
        else barrier_wait(empty(stage), parity);
        if (u.kv >= 0 && !u.keys) copy_rows(own(stage), told.own[stage], u.kv, u.first, u.to * G);
        barrier_arrive_with_copies(full(stage));
        if (threadIdx.x % PRODUCERS == 0) {
            told.unit[stage] = u;
            barrier_arrive(full(stage));
            told.next[stage] = u.kv < 0 ? 0 : gridDim.x + atomicAdd(taken, 1);
        }
        ring.next();
    }
    __device__ __forceinline__ void copy_passing(const Unit& u, int i, Ring<STAGES>& ring) const {
        const int stage = ring.stage, parity = ring.parity ^ 1;
        if (u.keys) {
            barrier_wait(empty(2 + stage), parity);
            copy_rows(passing(stage), told.passing[stage], u.kv, i, u.to);
        } else copy_keys<PASSING>(passing(stage), u.kv, i, u.to, empty(2 + stage), parity);
        barrier_arrive_with_copies(full(2 + stage));
        ring.next();
    }
    __device__ __forceinline__ void produce() const {
        Ring<2> owned;
        Ring<STAGES> ring;
        Unit u = unit_of(blockIdx.x);
        for (copy_own(u, owned); u.kv >= 0;) {
            const int count = u.count();
            int i = 0;
            for (; i < min(STAGES, count); i++) copy_passing(u, u.tile(i), ring);
            asm volatile("barrier.sync 1, %0;" ::"n"(PRODUCERS) : "memory");
            const Unit next = unit_of(told.next[owned.stage ^ 1]);
            copy_own(next, owned);
            for (; i < count; i++) copy_passing(u, u.tile(i), ring);
            u = next;
        }
        if (threadIdx.x % PRODUCERS == 0 && atomicAdd(taken + 1, 1) == (int)gridDim.x - 1)
            taken[0] = taken[1] = 0; // nobody takes any more
    }

    // ---- Two warpgroups multiply.
    using Scores = float[1][PASSING / 8][4];
    using Sums = float[1][D / 8][4];
    using Weights = uint32_t[PASSING / 16][4];
    // s = a b^T of this warpgroup's 64 rows and those that pass by; sum += weights b. Both run on.
    __device__ __forceinline__ static void multiply(Scores& s, uint32_t a, uint32_t b) {
        wgmma_begin();
        #pragma unroll
        for (int d = 0; d < D / 16; d++)
            wgmma<PASSING, false, false>(s[0], wgmma_operand(a + d / 4 * OWN * 128 + d % 4 * 32, 0),
                                         wgmma_operand(b + d / 4 * PASSING * 128 + d % 4 * 32, 0), d);
        wgmma_commit();
    }
    __device__ __forceinline__ static void add(Sums& sum, const Weights& weights, uint32_t b) {
        wgmma_begin();
        #pragma unroll
        for (int k = 0; k < PASSING / 16; k++)
            wgmma<128, true>(sum[0], weights[k], wgmma_operand(b + k * 16 * 128, PASSING * 128), true);
        wgmma_commit();
    }
    template <bool OF_KEYS>
    __device__ __forceinline__ void sum_unit(const Unit& u, int owned, Ring<STAGES>& ring) const {
        const HeadQueries heads(p, u.kv);
        const float scale = 1 / sqrtf((float)D);
        const int group = threadIdx.x / 128 * 64, warp = threadIdx.x / 32 * 16; // where their rows begin in the tile
        const uint32_t mine = own(owned) + group * 128;
        const auto leave = [&](int i) { // all lanes have read what is there, also where the warp skips a tile
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(empty(i));
        };
        const auto& ours = told.own[owned];
        // Of rows that we own: this warpgroup's first and last token, and where the sequences of both begin.
        int oldest = 0, newest = -1, oldest_first = 0, newest_first = 0;
        const int own_rows = min(64, u.to * heads.G - u.first - group);
        if (!OF_KEYS && own_rows > 0) {
            oldest = heads.token(u.first + group), newest = heads.token(u.first + group + own_rows - 1);
            oldest_first = oldest - ours.pos[group], newest_first = newest - ours.pos[group + own_rows - 1];
        }
        Sums sum = {}, sum_p = {};
        for (int t = 0; t < u.count(); t++, leave(2 + ring.stage), ring.next()) {
            const int i = u.tile(t);
            barrier_wait(full(2 + ring.stage), ring.parity);
            shared_to_async();
            const auto& theirs = told.passing[ring.stage];
            int first_key = i, last_key = i + PASSING - 1;
            if (OF_KEYS) {
                const int last = min(PASSING, u.to - i) - 1;
                first_key = u.first + group, last_key = first_key + 63;
                oldest = heads.token(i), newest = heads.token(i + last);
                oldest_first = oldest - theirs.pos[0], newest_first = newest - theirs.pos[last];
            }
            if (first_key > newest || last_key < oldest_first) continue;
            uint32_t tile = passing(ring.stage), a = mine;
            asm volatile("" : "+r"(tile), "+r"(a)); // (else what follows from them takes registers all along)
            Scores s, ds;
            Weights weights, more;
            multiply(s, a, tile);
            multiply(ds, a + TILE, tile + TILE / 2);
            wgmma_wait<1>();
            wgmma_settle(s);
            probabilities(s, scale, [&](int, int j, int e) {
                return OF_KEYS ? theirs.lse[score_column(j, e)] : ours.lse[warp + score_row(0, e)];
            });
            if (last_key > oldest || first_key < newest_first)
                each_score(s, [&](float& x, int, int j, int e) {
                    const int row = warp + score_row(0, e), column = score_column(j, e);
                    const int n = heads.token(OF_KEYS ? i + column : u.first + row);
                    const int m = OF_KEYS ? u.first + row : i + column;
                    if ((uint32_t)(n - m) > (uint32_t)(OF_KEYS ? theirs.pos[column] : ours.pos[row])) x = 0;
                });
            if (OF_KEYS) {
                round_weights(weights, s);
                add(sum_p, weights, tile + TILE / 2);
                wgmma_wait<1>();
            } else wgmma_wait<0>();
            wgmma_settle(ds);
            each_score(ds, [&](float& x, int, int j, int e) {
                x -= OF_KEYS ? theirs.delta[score_column(j, e)] : ours.delta[warp + score_row(0, e)];
                x *= s[0][j][e];
            });
            round_weights(more, ds);
            add(sum, more, tile);
            wgmma_wait<0>();
            wgmma_settle(sum);
            if (OF_KEYS) wgmma_settle(sum_p);
        }
        const int first = u.first, kv = u.kv;
        leave(owned);
        if (OF_KEYS) store_key_value_gradients<D>(p, sum, sum_p, first + warp, min(first + OWN, p.b.N), kv, scale);
        else store_query_gradients<D>(p, HeadQueries(p, kv), sum, first + warp, scale);
    }
    __device__ __forceinline__ void consume() const {
        Ring<2> owned;
        Ring<STAGES> ring;
        for (;; owned.next()) {
            barrier_wait(full(owned.stage), owned.parity);
            shared_to_async();
            const Unit& u = told.unit[owned.stage];
            if (u.kv < 0) return;
            if (u.keys) sum_unit<true>(u, owned.stage, ring);
            else sum_unit<false>(u, owned.stage, ring);
        }
    }
};
__global__ void __launch_bounds__(HopperBackward::THREADS, 1)
attention_backward_hopper_kernel(const __grid_constant__ AttentionBackward p, int* taken) {
#ifdef HAVE_WGMMA
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ HopperBackward::Shared told;
    const HopperBackward a = {p, taken, told, (shared_address(memory) + 1023) & ~1023u}; // (the swizzle's unit)
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 + a.STAGES; i++) // (an owned tile's unit is told besides)
            barrier_begin(a.full(i), a.PRODUCERS + (i < 2)), barrier_begin(a.empty(i), a.CONSUMERS / 32);
        barriers_begun();
    }
    __syncthreads();
    let_next_start(); // all our blocks have their places
    wait_for_previous();
    if (threadIdx.x >= a.CONSUMERS) {
        keep_registers<24>();
        a.produce();
    } else {
        take_registers<240>();
        a.consume();
    }
#endif
}
inline void launch_attention_backward(Context& ctx, const AttentionBackward& p, const bf16* out, float* delta, int D) {
    const int N = p.b.N, H = p.H, K = p.K;
    const int64_t rows = (int64_t)N * (H / K), key_tiles = (N + GRADIENT_KEYS - 1) / GRADIENT_KEYS;
    const int64_t tiles = key_tiles + (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
    if (rows * H >= (int64_t)1 << 31 || tiles > 65535)
        DIE("attention_backward: a batch of %d tokens is too large for %d query heads", N, H);
    const size_t heads = (size_t)N * H;
    launch(ctx, D == 128 ? attention_delta_kernel<128> : attention_delta_kernel<64>,
           (unsigned)((heads * (D / 8) + 255) / 256), 256, 0, delta, p.dout, out, heads);
    if (ctx.gpu->hopper && D == HopperBackward::D) {
        const int units = HopperBackward::units(N, H, K);
        launch(ctx, attention_backward_hopper_kernel, std::min(units, ctx.gpu->sms), HopperBackward::THREADS,
               HopperBackward::SHARED, p, ctx.gpu->arrived);
    } else
        launch(ctx, D == 128 ? attention_backward_kernel<128> : attention_backward_kernel<64>,
               dim3((unsigned)K, (unsigned)tiles), 128, backward_shared(D), p, (int)key_tiles);
}
inline void attention_backward_gpu(Context& ctx, bf16* dqkv, const bf16* dout, const bf16* q, const bf16* keys,
                                   const bf16* values, const bf16* out, const float* lse, const Batch& b, int H, int K,
                                   int D, float* delta) {
    launch_attention_backward(ctx, {dqkv, dout, q, keys, values, lse, delta, b, H, K}, out, delta, D);
}
// The weights' gradients are sums over what attention_backward leaves: with them, one op after the other.
inline void attend_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* dout,
                                const bf16* q, const bf16* keys, const bf16* values, const bf16* out, const float* lse,
                                const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const float* rope,
                                const Batch& b, int H, int K, int D, float eps, float* delta) {
    AttentionBackward p = {dqkv, dout, q, keys, values, lse, delta, b, H, K};
    if (!dq_weight) p.qkv = qkv, p.q_weight = q_weight, p.k_weight = k_weight, p.rope = rope, p.eps = eps;
    launch_attention_backward(ctx, p, out, delta, D);
    if (dq_weight)
        qknorm_rope_backward_gpu(ctx, dqkv, dq_weight, dk_weight, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
}
#endif
