// train/distillation.cu: model/distillation.h on a GPU.
#if defined(QWEN3_GPU) || defined(QWEN3_EMULATED)
#include "model/distillation.h"

// A block of 512 threads a row, a thread four neighbouring ids of every 2,048. Bound by memory bandwidth: both rows of
// logits are read for the sums, and again for the gradient, which replaces the student's row. If 0 < beta < 1 they are
// read between the two as well: KL(q || m) needs both sums, and the gradient needs it.
inline constexpr int DISTIL_THREADS = 512, DISTIL_WARPS = DISTIL_THREADS / 32;

// Sums over logits x of a row, of weights e^(by (x - top)), where `by` is 1 / temperature.
struct LogitSums {
    float top, sum, other, plain; // largest x; sums of weights, of weights times x - the other model's, of e^(x - top)
    int id;                       // of the largest
    __device__ static LogitSums none() { return {-1e30f, 0, 0, 0, 0}; }
    __device__ void add(float x, float y, int v, float by) {
        if (x > top) shrink(x, by), id = v;
        const float w = exp2_fast((x - top) * by * LOG2E);
        sum += w, other += w * (x - y), plain += exp2_fast((x - top) * LOG2E);
    }
    __device__ void shrink(float to, float by) {
        const float w = exp2_fast((top - to) * by * LOG2E);
        sum *= w, other *= w, plain *= exp2_fast((top - to) * LOG2E), top = to;
    }
    __device__ void join(LogitSums x, float by) {
        id = x.top > top || (x.top == top && x.id < id) ? x.id : id;
        const float both = fmaxf(top, x.top);
        shrink(both, by), x.shrink(both, by);
        sum += x.sum, other += x.other, plain += x.plain;
    }
    __device__ LogitSums of_lane(int lane) const {
        return {__shfl_xor_sync(~0u, top, lane), __shfl_xor_sync(~0u, sum, lane), __shfl_xor_sync(~0u, other, lane),
                __shfl_xor_sync(~0u, plain, lane), __shfl_xor_sync(~0u, id, lane)};
    }
    __device__ float log_sum(float by) const { return logf(sum) + top * by; }
};
// Joins the sums of a block's threads, for all of them.
__device__ inline LogitSums block_join(LogitSums x, float by, LogitSums* of_warp) {
    for (int lane = 16; lane; lane /= 2) x.join(x.of_lane(lane), by);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int w = 1; w < DISTIL_WARPS; w++) x.join(of_warp[w], by);
    return x;
}
__device__ inline float block_total(float x, float* of_warp) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < DISTIL_WARPS; w++) x += of_warp[w];
    return x;
}

// Both softmaxes of a row, once their sums are known.
struct RowPair {
    float beta, by, sum_p, sum_q;
    struct At { float p, q, log_p, log_q, log_m; };
    __device__ At at(float s, float t) const {
        At a;
        a.log_p = fmaf(t, by, -sum_p), a.log_q = fmaf(s, by, -sum_q);
        a.p = exp2_fast(a.log_p * LOG2E), a.q = exp2_fast(a.log_q * LOG2E);
        a.log_m = beta == 0 ? a.log_q : a.log_p;
        if (beta > 0 && beta < 1) a.log_m = logf(fmaxf(beta * a.p + (1 - beta) * a.q, 1e-37f));
        return a;
    }
};

__global__ void __launch_bounds__(DISTIL_THREADS)
distillation_kernel(Distilled<float> out, float* logits, DistillationRows<float> of, bool gradient) {
    __shared__ LogitSums of_warp[2][DISTIL_WARPS];
    __shared__ float totals[2][DISTIL_WARPS];
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, V = of.V, first = (int)threadIdx.x * 4;
    float* const row = logits + (size_t)r * V;
    const float* const teacher = of.teacher + (size_t)r * V;
    const float beta = of.how.beta, weight = of.how.weight, by = 1 / of.how.temperature;
    const float of_q = beta == 0 ? 0 : beta == 1 ? 1 : 1 - beta;
    LogitSums ps = LogitSums::none(), qs = ps;
    for (int v = first; v < V; v += DISTIL_THREADS * 4) {
        const float4 s = *(const float4*)(row + v), t = *(const float4*)(teacher + v);
        ps.add(t.x, s.x, v, by), ps.add(t.y, s.y, v + 1, by), ps.add(t.z, s.z, v + 2, by), ps.add(t.w, s.w, v + 3, by);
        qs.add(s.x, t.x, v, by), qs.add(s.y, t.y, v + 1, by), qs.add(s.z, t.z, v + 2, by), qs.add(s.w, t.w, v + 3, by);
    }
    ps = block_join(ps, by, of_warp[0]), qs = block_join(qs, by, of_warp[1]);
    const RowPair pair = {beta, by, ps.log_sum(by), qs.log_sum(by)};
    const float apart = pair.sum_p - pair.sum_q, right = row[of.target[r]], sum = logf(qs.plain) + qs.top;
    float from_p = ps.other / ps.sum * by - apart, from_q = qs.other / qs.sum * by + apart; // from each other
    if (beta > 0 && beta < 1) {
        from_p = from_q = 0;
        for (int v = first; v < V; v += DISTIL_THREADS * 4)
            for (int i = 0; i < 4; i++) {
                const RowPair::At a = pair.at(row[v + i], teacher[v + i]);
                from_p += a.p * (a.log_p - a.log_m), from_q += a.q * (a.log_q - a.log_m);
            }
        from_p = block_total(from_p, totals[0]), from_q = block_total(from_q, totals[1]);
    }
    const float divergence = beta == 0 ? from_p : beta == 1 ? from_q : beta * from_p + (1 - beta) * from_q;
    if (threadIdx.x == 0) {
        out.divergence[r] = divergence, out.loss[r] = weight * divergence + (1 - weight) * (sum - right);
        out.agrees[r] = ps.id == qs.id;
    }
    for (int v0 = 0; v0 < V && gradient; v0 += DISTIL_THREADS * 4) {
        const int v = v0 + first;
        float g[4] = {};
        for (int i = 0; i < 4 && v < V; i++) {
            const float s = row[v + i];
            const RowPair::At a = pair.at(s, teacher[v + i]);
            const float by_z = beta == 0 ? a.q - a.p : of_q * a.q * (a.log_q - a.log_m - from_q);
            const float by_s = exp2_fast((s - sum) * LOG2E) - (v + i == of.target[r] ? 1.f : 0.f);
            g[i] = of.scale * (weight * by * by_z + (1 - weight) * by_s);
        }
        __syncthreads(); // all have read these ids: their memory holds the gradients of twice as many
        if (v < V) store_four((bf16*)row + v, make_float4(g[0], g[1], g[2], g[3]));
    }
}

// ---- gather_outcomes, scatter_outcomes. A block of 512 threads a row, a thread four neighbouring ids of every 2,048,
// as in distillation_kernel. Bound by memory bandwidth: a row of logits is read for the sum, and for the gradient.
__global__ void __launch_bounds__(DISTIL_THREADS)
gather_outcomes_kernel(float* z, float* tail, float* logits, const int* id, int J, int V) {
    __shared__ LogitSums of_warp[DISTIL_WARPS];
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x;
    float *const row = logits + (size_t)r * V, *const to = z + (size_t)r * J;
    for (int j = (int)threadIdx.x; j < J - 1; j += DISTIL_THREADS) {
        const int v = id[(size_t)r * J + j];
        to[j] = v < 0 ? NEVER<float> : row[v];
        if (v >= 0) row[v] = NEVER<float>;
    }
    __syncthreads();
    LogitSums all = LogitSums::none();
    for (int v = (int)threadIdx.x * 4; v < V; v += DISTIL_THREADS * 4) {
        const float4 s = *(const float4*)(row + v);
        all.add(s.x, s.x, v, 1), all.add(s.y, s.y, v + 1, 1), all.add(s.z, s.z, v + 2, 1), all.add(s.w, s.w, v + 3, 1);
    }
    all = block_join(all, 1, of_warp);
    if (threadIdx.x == 0) to[J - 1] = tail[r] = all.log_sum(1);
}

__global__ void __launch_bounds__(DISTIL_THREADS)
scatter_outcomes_kernel(float* logits, const bf16* dz, size_t ld, const float* tail, const int* id, int J, int V) {
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, first = (int)threadIdx.x * 4;
    float* const row = logits + (size_t)r * V;
    bf16* const to = (bf16*)row;
    const float of_tail = to_acc(dz[r * ld + J - 1]), sum = tail[r];
    for (int v0 = 0; v0 < V; v0 += DISTIL_THREADS * 4) {
        const int v = v0 + first;
        float g[4] = {};
        for (int i = 0; i < 4 && v < V; i++) g[i] = of_tail * exp2_fast((row[v + i] - sum) * LOG2E);
        __syncthreads(); // as in distillation_kernel
        if (v < V) store_four(to + v, make_float4(g[0], g[1], g[2], g[3]));
    }
    __syncthreads();
    for (int j = (int)threadIdx.x; j < J - 1; j += DISTIL_THREADS)
        if (const int v = id[(size_t)r * J + j]; v >= 0) to[v] = dz[r * ld + j];
}

#ifdef __CUDACC__
void distillation_gpu(Context& ctx, const Distilled<float>& out, bf16* dlogits, float* logits,
                      const DistillationRows<float>& of) {
    if (of.V % 4) DIE("distillation: %d rows of the vocabulary, no multiple of 4", of.V);
    launch(ctx, distillation_kernel, of.R, DISTIL_THREADS, 0, out, logits, of, dlogits != nullptr);
}

void gather_outcomes_gpu(Context& ctx, float* z, float* tail, float* logits, const int* id, int R, int J, int V) {
    if (V % 4) DIE("gather_outcomes: %d rows of the vocabulary, no multiple of 4", V);
    launch(ctx, gather_outcomes_kernel, R, DISTIL_THREADS, 0, z, tail, logits, id, J, V);
}

void scatter_outcomes_gpu(Context& ctx, bf16*, float* logits, const bf16* dz, size_t ld, const float* tail,
                          const int* id, int R, int J, int V) {
    if (V % 4) DIE("scatter_outcomes: %d rows of the vocabulary, no multiple of 4", V);
    launch(ctx, scatter_outcomes_kernel, R, DISTIL_THREADS, 0, logits, dz, ld, tail, id, J, V);
}
#endif
#endif
