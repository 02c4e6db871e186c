// ==================================================================================================== 9 Small kernels
// In Book I's order, forwards, then backwards. Each reads and writes its arrays once, so memory bounds them all. "A
// block a token" means: block n computes row n, its threads share the channels.

// ---- embed. A block a token.
__global__ void embed_kernel(float* x, const bf16* table, Batch b, int C) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    if (b.seq[n] < 0) return;
    const bf16* row = table + (size_t)b.token[n] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) x[(size_t)n * C + i] = to_acc(row[i]);
}
inline void embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b, int C) {
    // A forward's first kernel waits for all before it, so that those after it may read early: see launch_kernel.
    launch_after_all(ctx, embed_kernel, b.N, 128, 0, x, table.w[0], b, C);
}

// ---- rmsnorm of `rows` rows of C, by all warps of a block; y, whose rows begin ld apart, may be in shared memory.
// The squares are added in pieces of 128 numbers, a warp each, and the pieces in order: the bits do not depend on the
// number of warps. A warp keeps its first pieces in registers.
// pieces: rows * ceil(C / 128) floats of shared memory. C is a multiple of 8. Ends with a barrier.
__device__ inline void norm_rows(bf16* y, int ld, const float* x, const bf16* w, float* pieces, int rows, int C,
                                 float eps) {
    constexpr int KEPT = 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int per_row = (C + 127) / 128, all = rows * per_row;
    float4 kept[KEPT];
    auto load = [&](int p) {
        const int i = p % per_row * 128 + lane * 4;
        return p < all && i < C ? *(const float4*)(x + (size_t)(p / per_row) * C + i) : make_float4(0, 0, 0, 0);
    };
    auto square = [&](int p, const float4& v) {
        const float sum = warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w);
        if (lane == 0 && p < all) pieces[p] = sum;
    };
    #pragma unroll
    for (int k = 0; k < KEPT; k++) kept[k] = load(warp + k * warps);
    #pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (warp + k * warps < all) square(warp + k * warps, kept[k]);
    for (int p = warp + KEPT * warps; p < all; p += warps) square(p, load(p));
    __syncthreads();
    auto scaled = [&](int p, const float4& v) {
        const int row = p / per_row, i = p % per_row * 128 + lane * 4;
        float sum = 0;
        for (int j = 0; j < per_row; j++) sum += pieces[row * per_row + j];
        const float scale = 1 / sqrtf(sum / C + eps);
        if (i >= C) return;
        const uint2 u = *(const uint2*)(w + i);
        *(uint2*)(y + (size_t)row * ld + i) = make_uint2(pack(v.x * scale * low(u.x), v.y * scale * high(u.x)),
                                                         pack(v.z * scale * low(u.y), v.w * scale * high(u.y)));
    };
    #pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (warp + k * warps < all) scaled(warp + k * warps, kept[k]);
    for (int p = warp + KEPT * warps; p < all; p += warps) scaled(p, load(p));
    __syncthreads();
}

// A block a token.
__global__ void rmsnorm_kernel(bf16* out, const float* x, const bf16* w, int C, float eps) {
    extern __shared__ float pieces[];
    let_next_start();
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * C;
    norm_rows(out + at, C, x + at, w, pieces, 1, C, eps);
}
inline void rmsnorm_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, int N, int C, float eps) {
    launch(ctx, rmsnorm_kernel, N, 256, (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}

// ---- qknorm_rope_kv. A head of D numbers in a warp: lane l holds P = D / 64 pairs of its planes, u = head[i] and v =
// head[i + D/2] for i = P l .. P l + P - 1.
template <int D> struct WarpHead {
    static constexpr int P = D / 64;
    float u[P], v[P];

    __device__ void load(const bf16* head) {
        const int i = threadIdx.x % 32 * P;
        for (int p = 0; p < P; p++) u[p] = to_acc(head[i + p]), v[p] = to_acc(head[i + p + D / 2]);
    }
    __device__ void store(bf16* head) const {
        const int i = threadIdx.x % 32 * P;
        for (int p = 0; p < P; p++) head[i + p] = round_bf16(u[p]), head[i + p + D / 2] = round_bf16(v[p]);
    }
    __device__ void norm_rope(const bf16* w, const float* angle, float eps) {
        float squares = 0;
        for (int p = 0; p < P; p++) squares += u[p] * u[p] + v[p] * v[p];
        const float scale = 1 / sqrtf(warp_sum(squares) / D + eps);
        const int i = threadIdx.x % 32 * P;
        for (int p = 0; p < P; p++) {
            const float a = u[p] * scale * to_acc(w[i + p]), b = v[p] * scale * to_acc(w[i + p + D / 2]);
            const float cosine = angle[2 * (i + p)], sine = angle[2 * (i + p) + 1];
            u[p] = a * cosine - b * sine, v[p] = b * cosine + a * sine;
        }
    }
};

// A warp a head of a token, from row `first` on.
template <int D>
__global__ void qknorm_rope_kv_kernel(bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight,
                                      const bf16* k_weight, const float* rope, Batch b, int first, int H, int K,
                                      float eps) {
    let_next_start();
    wait_for_previous();
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, heads = H + 2 * K;
    const int n = first + task / heads, h = task % heads;
    if (n >= b.N || b.seq[n] < 0) return;
    WarpHead<D> head;
    head.load(qkv + ((size_t)n * heads + h) * D);
    const size_t at = h < H ? 0 : kv_offset(b.slot[n] / PAGE, (h - H) % K, b.slot[n] % PAGE, K, D);
    if (h < H + K) head.norm_rope(h < H ? q_weight : k_weight, rope + (size_t)b.pos[n] * D, eps);
    head.store(h < H ? q + ((size_t)n * H + h) * D : h < H + K ? keys + at : values + at);
}
inline void qknorm_rope_kv_gpu(Context& ctx, bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight,
                               const bf16* k_weight, const float* rope, const Batch& b, int H, int K, int D, float eps,
                               int first = 0) {
    const int blocks = (int)(((int64_t)(b.N - first) * (H + 2 * K) + 7) / 8);
    launch(ctx, D == 128 ? qknorm_rope_kv_kernel<128> : qknorm_rope_kv_kernel<64>, blocks, 256, 0, q, keys, values, qkv,
           q_weight, k_weight, rope, b, first, H, K, eps);
}

// ---- head's first half: the rows that are wanted, one after another. A block a row.
__global__ void pick_rows_kernel(bf16* picked, const bf16* x, const int* rows, int C) {
    let_next_start();
    wait_for_previous();
    const bf16* row = x + (size_t)rows[blockIdx.x] * C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) picked[(size_t)blockIdx.x * C + i] = row[i];
}

// ---- cross_entropy. A block a row. Of every 64 logits of it `parts` has the largest and sum e^(logit - largest), so
// the row itself is read once: for the gradient, which overwrites it from its beginning; 4,096 logits are read by all
// threads before any of them is overwritten. V is a multiple of 8.
__global__ void __launch_bounds__(1024) cross_entropy_kernel(float* loss, bf16* dlogits, const float* logits,
                                                             const float2* parts, int pieces, const int* target,
                                                             float scale, int V) {
    __shared__ float tops[32], sums[32];
    let_next_start();
    wait_for_previous();
    const float* row = logits + (size_t)blockIdx.x * V;
    const int right = target[blockIdx.x];
    const float logit = row[right];
    float top = -1e30f, sum = 0;
    auto join = [&](float t, float s) { // (top, sum) of two sets of logits
        const float most = fmaxf(top, t);
        sum = (top == most ? sum : sum * exp2_fast((top - most) * LOG2E)) +
              (t == most ? s : s * exp2_fast((t - most) * LOG2E));
        top = most;
    };
    auto join_lanes = [&] {
        for (int lane = 16; lane; lane /= 2) join(__shfl_xor_sync(~0u, top, lane), __shfl_xor_sync(~0u, sum, lane));
    };
    for (int i = threadIdx.x; i < pieces; i += 1024) {
        const float2 part = parts[(size_t)blockIdx.x * pieces + i];
        join(part.x, part.y);
    }
    join_lanes();
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top, sums[threadIdx.x / 32] = sum;
    __syncthreads();
    top = tops[threadIdx.x % 32], sum = sums[threadIdx.x % 32];
    join_lanes();
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + top - logit;
    if (!dlogits) return;
    const float base = top * LOG2E, part = 1 / sum;
    auto gradient = [&](float x, int v) { return (exp2_fast(x * LOG2E - base) * part - (v == right)) * scale; };
    for (int first = 0; first < V; first += 4096) {
        const int v = first + threadIdx.x * 4;
        float4 x = {};
        if (v < V) x = *(const float4*)(row + v);
        __syncthreads();
        if (v < V)
            *(uint2*)((uint8_t*)row + 2 * v) = make_uint2(pack(gradient(x.x, v), gradient(x.y, v + 1)),
                                                          pack(gradient(x.z, v + 2), gradient(x.w, v + 3)));
    }
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

// ---- rmsnorm_backward. A block a token. scale (N) gets r if it is not null.
__global__ void __launch_bounds__(128) rmsnorm_backward_kernel(float* dx, bf16* dy, bf16* normed, float* scale,
                                                               const bf16* dout, const float* x, const bf16* w, int C,
                                                               float eps) {
    __shared__ float parts[2][4];
    let_next_start();
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * C;
    float squares = 0, mixed = 0;
    for (int i = threadIdx.x * 4; i < C; i += 512) {
        const float4 a = *(const float4*)(x + at + i);
        const uint2 b = *(const uint2*)(w + i), d = *(const uint2*)(dout + at + i);
        squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
        mixed += a.x * low(b.x) * low(d.x) + a.y * high(b.x) * high(d.x) +
                 a.z * low(b.y) * low(d.y) + a.w * high(b.y) * high(d.y);
    }
    squares = warp_sum(squares), mixed = warp_sum(mixed);
    if (threadIdx.x % 32 == 0) parts[0][threadIdx.x / 32] = squares, parts[1][threadIdx.x / 32] = mixed;
    __syncthreads();
    squares = parts[0][0] + parts[0][1] + parts[0][2] + parts[0][3];
    mixed = parts[1][0] + parts[1][1] + parts[1][2] + parts[1][3];
    const float r = 1 / sqrtf(squares / C + eps), mean = mixed * r * r * r / C;
    if (scale && threadIdx.x == 0) scale[blockIdx.x] = r;
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
    }
}
// dw[i] += sum_n dout[n][i] x[n][i] scale[n]: a block has 32 columns and a split of the tokens, eight at a time; the
// last block of some columns to arrive adds their splits in order.
__global__ void __launch_bounds__(256) norm_weight_kernel(float* dw, const float* scale, const bf16* dout,
                                                          const float* x, int N, int C, float* partial, int* arrived) {
    __shared__ float sums[8][32];
    let_next_start();
    wait_for_previous();
    const int column = blockIdx.x * 32 + threadIdx.x % 32, group = threadIdx.x / 32;
    const int each = (N + gridDim.y - 1) / gridDim.y, last = min(N, (int)(blockIdx.y + 1) * each);
    float sum = 0;
    for (int n = blockIdx.y * each + group; n < last && column < C; n += 8)
        sum += to_acc(dout[(size_t)n * C + column]) * x[(size_t)n * C + column] * scale[n];
    sums[group][threadIdx.x % 32] = sum;
    __syncthreads();
    if (group == 0 && column < C) {
        for (int g = 1; g < 8; g++) sum += sums[g][threadIdx.x];
        partial[(size_t)blockIdx.y * C + column] = sum;
    }
    if (!last_to_arrive(arrived + blockIdx.x, gridDim.y) || group || column >= C) return;
    sum = dw[column];
    for (int split = 0; split < (int)gridDim.y; split++) sum += __ldcg(partial + (size_t)split * C + column);
    dw[column] = sum;
}
inline void rmsnorm_backward_gpu(Context& ctx, float* dx, bf16* dy, bf16* normed, float* dw, const bf16* dout,
                                 const float* x, const bf16* w, int N, int C, float eps) {
    constexpr int SPLITS = 32;
    if (dw && ((size_t)N + (size_t)SPLITS * C) * sizeof(float) > PARTIAL_BYTES)
        DIE("%d tokens of %d channels are more than the norms' gradients can sum at once", N, C);
    float *partial = ctx.gpu->partial, *scale = dw ? partial + (size_t)SPLITS * C : nullptr;
    launch(ctx, rmsnorm_backward_kernel, N, 128, 0, dx, dy, normed, scale, dout, x, w, C, eps);
    if (!dw) return;
    launch(ctx, norm_weight_kernel, dim3((C + 31) / 32, SPLITS), 256, 0, dw, scale, dout, x, N, C, partial,
           ctx.gpu->arrived);
}

// ---- swiglu_backward. A thread has eight columns of a token.
__global__ void swiglu_backward_kernel(bf16* dgate_up, bf16* hidden, const bf16* dhidden, const bf16* gate_up, int N,
                                       int F) {
    let_next_start();
    wait_for_previous();
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 8, n = at / F;
    if (n >= N) return;
    const size_t gate = at + n * F, up = gate + F; // (N,2F)
    const uint4 g4 = *(const uint4*)(gate_up + gate), u4 = *(const uint4*)(gate_up + up);
    const uint4 d4 = *(const uint4*)(dhidden + at);
    const uint32_t *gs = &g4.x, *us = &u4.x, *ds = &d4.x;
    uint32_t out[4], dg[4], du[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        float y[2], a[2], b[2];
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            const float g = e ? high(gs[i]) : low(gs[i]), u = e ? high(us[i]) : low(us[i]);
            const float d = e ? high(ds[i]) : low(ds[i]);
            const float sigma = 1 / (1 + exp2_fast(-LOG2E * g)), silu = g * sigma;
            y[e] = silu * u, a[e] = d * u * sigma * (1 + g * (1 - sigma)), b[e] = d * silu;
        }
        out[i] = pack(y[0], y[1]), dg[i] = pack(a[0], a[1]), du[i] = pack(b[0], b[1]);
    }
    *(uint4*)(hidden + at) = make_uint4(out[0], out[1], out[2], out[3]);
    *(uint4*)(dgate_up + gate) = make_uint4(dg[0], dg[1], dg[2], dg[3]);
    *(uint4*)(dgate_up + up) = make_uint4(du[0], du[1], du[2], du[3]);
}
inline void swiglu_backward_gpu(Context& ctx, bf16* dgate_up, bf16* hidden, const bf16* dhidden, const bf16* gate_up,
                                int N, int F) {
    const unsigned blocks = (unsigned)(((size_t)N * F / 8 + 255) / 256);
    launch(ctx, swiglu_backward_kernel, blocks, 256, 0, dgate_up, hidden, dhidden, gate_up, N, F);
}

// ---- qknorm_rope_backward. A head in a warp, as WarpHead holds it: the gradient g of what the norm makes of x, and r
// and mean of rmsnorm's rule.
template <int D> struct WarpHeadBackward {
    static constexpr int P = D / 64;
    WarpHead<D> x, g;
    float wu[P], wv[P], r, mean;
    __device__ WarpHeadBackward(const bf16* head, const bf16* dhead, const bf16* w, const float* angle, float eps) {
        x.load(head), g.load(dhead);
        const int i = threadIdx.x % 32 * P;
        float squares = 0, mixed = 0;
        for (int p = 0; p < P; p++) {
            const float cosine = angle[2 * (i + p)], sine = angle[2 * (i + p) + 1], u = g.u[p], v = g.v[p];
            g.u[p] = u * cosine + v * sine, g.v[p] = v * cosine - u * sine;
            wu[p] = to_acc(w[i + p]), wv[p] = to_acc(w[i + p + D / 2]);
            squares += x.u[p] * x.u[p] + x.v[p] * x.v[p];
            mixed += x.u[p] * wu[p] * g.u[p] + x.v[p] * wv[p] * g.v[p];
        }
        r = 1 / sqrtf(warp_sum(squares) / D + eps);
        mean = warp_sum(mixed) * r * r * r / D;
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
    const float* angle = rope + (size_t)b.pos[n] * D;
    WarpHeadBackward<D> y(qkv + at, dqkv + at, h < H ? q_weight : k_weight, angle, eps);
    for (int p = 0; p < y.P; p++) {
        y.g.u[p] = y.r * y.wu[p] * y.g.u[p] - y.x.u[p] * y.mean;
        y.g.v[p] = y.r * y.wv[p] * y.g.v[p] - y.x.v[p] * y.mean;
    }
    y.g.store(dqkv + at);
}
// The weights' gradients, before dqkv is overwritten: warp w of W takes tokens w, w + W, ..., its sums stay in
// registers; the last block to arrive adds the blocks' sums in order.
constexpr int HEAD_BLOCKS = 256;
template <int D>
__global__ void __launch_bounds__(256) head_weight_kernel(float* dq_weight, float* dk_weight, const bf16* dqkv,
                                                          const bf16* qkv, const bf16* q_weight, const bf16* k_weight,
                                                          const float* rope, Batch b, int H, int K, float eps,
                                                          float* partial, int* arrived) {
    constexpr int P = D / 64;
    __shared__ float sums[8][2 * D];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 * P;
    float u[2][P] = {}, v[2][P] = {};
    for (int n = blockIdx.x * 8 + warp; n < b.N; n += gridDim.x * 8)
        for (int h = 0; h < H + K && b.seq[n] >= 0; h++) {
            const size_t at = ((size_t)n * (H + 2 * K) + h) * D;
            const float* angle = rope + (size_t)b.pos[n] * D;
            const WarpHeadBackward<D> y(qkv + at, dqkv + at, h < H ? q_weight : k_weight, angle, eps);
            #pragma unroll
            for (int p = 0; p < P; p++) {
                const float du = y.g.u[p] * y.x.u[p] * y.r, dv = y.g.v[p] * y.x.v[p] * y.r;
                if (h < H) u[0][p] += du, v[0][p] += dv;
                else u[1][p] += du, v[1][p] += dv;
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
    for (int block = 0; block < (int)gridDim.x; block++) sum += __ldcg(partial + block * 2 * D + c);
    *to = sum;
}
inline void qknorm_rope_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* qkv,
                                     const bf16* q_weight, const bf16* k_weight, const float* rope, const Batch& b,
                                     int H, int K, int D, float eps) {
    const auto weights = D == 128 ? head_weight_kernel<128> : head_weight_kernel<64>;
    const auto inputs = D == 128 ? qknorm_rope_backward_kernel<128> : qknorm_rope_backward_kernel<64>;
    if (dq_weight)
        launch(ctx, weights, std::min(HEAD_BLOCKS, (b.N + 7) / 8), 256, 0, dq_weight, dk_weight, dqkv, qkv, q_weight,
               k_weight, rope, b, H, K, eps, ctx.gpu->partial, ctx.gpu->arrived);
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
