// model/experts_backward.h: the small kernels of the backward pass of experts on a GPU: SwiGLU and shares, the sum of a
// token's pairs, the router's softmax, the load-balancing loss. R is Routed<bf16>. tests/unit/test_experts_backward.cpp
// runs them by emulation, tests/gpu/test_experts_gpu.cpp on a GPU.
#pragma once
#ifdef __CUDACC__
#include "qwen3.cu" // emulation includes what it needs
#endif

// ---- experts_backward, for an adapter of down: hidden times the pair's share, in the order of `pair`. A warp a pair,
// a lane every 32nd four of M. Bound by memory bandwidth: 6 bytes a number of M.
template <class R>
__global__ void __launch_bounds__(256) expert_hidden_kernel(bf16* hidden, const bf16* gate_up, R to, int E, int M) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * 8 + threadIdx.x / 32;
    if (i >= to.first[E]) return; // (pairs of spare rows are in no expert's list)
    const float share = to.share[to.pair[i]];
    for (int f = threadIdx.x % 32 * 4; f < M; f += 128) {
        const uint2 g = *(const uint2*)(gate_up + (size_t)i * 2 * M + f);
        const uint2 u = *(const uint2*)(gate_up + (size_t)i * 2 * M + M + f);
        const auto times = [&](float g, float u) { return share * g / (1 + exp2_fast(-LOG2E * g)) * u; };
        store_four(hidden + (size_t)i * M + f, make_float4(times(low(g.x), low(u.x)), times(high(g.x), high(u.x)),
                                                           times(low(g.y), low(u.y)), times(high(g.y), high(u.y))));
    }
}

// ---- experts_backward, between its two products: of a pair the gradients of its share and of gate and up. Rows of
// gate_up and dgate_up have the order of `pair`; dhidden and dshare are numbered by pair. A warp a pair, a lane every
// 32nd four of M. Bound by memory bandwidth: 10 bytes a number of M.
template <class R>
__global__ void __launch_bounds__(256) expert_swiglu_backward_kernel(bf16* dgate_up, float* dshare, const bf16* dhidden,
                                                                     const bf16* gate_up, R to, int E, int M) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= to.first[E]) return; // (pairs of spare rows are in no expert's list)
    const size_t pair = to.pair[i], gate = (size_t)i * 2 * M, up = gate + M;
    const float share = to.share[pair];
    float sum = 0;
    for (int f = lane * 4; f < M; f += 128) {
        const uint2 gates = *(const uint2*)(gate_up + gate + f), ups = *(const uint2*)(gate_up + up + f);
        const uint2 ds = *(const uint2*)(dhidden + pair * M + f);
        const uint32_t g2[] = {gates.x, gates.y}, u2[] = {ups.x, ups.y}, d2[] = {ds.x, ds.y};
        float dg[4], du[4];
        GPU_UNROLL
        for (int j = 0; j < 4; j++) {
            const float g = j % 2 ? high(g2[j / 2]) : low(g2[j / 2]), u = j % 2 ? high(u2[j / 2]) : low(u2[j / 2]);
            const float d = j % 2 ? high(d2[j / 2]) : low(d2[j / 2]);
            const float sigma = 1 / (1 + exp2_fast(-LOG2E * g)), silu = g * sigma;
            sum += d * to_acc(round_bf16(silu * u));
            dg[j] = share * d * u * sigma * (1 + g * (1 - sigma)), du[j] = share * d * silu;
        }
        store_four(dgate_up + gate + f, make_float4(dg[0], dg[1], dg[2], dg[3]));
        store_four(dgate_up + up + f, make_float4(du[0], du[1], du[2], du[3]));
    }
    sum = warp_sum(sum);
    if (lane == 0) dshare[pair] = sum;
}

// ---- experts_backward, after its last product: sum[n] = sum_j dx[n k + j], in columns from `first` on, of which dx
// holds ld. A block of 128 threads a token, a thread every 128th four. Bound by memory bandwidth: 2 k + 4 bytes a
// number.
template <class R>
__global__ void __launch_bounds__(128) add_pairs_kernel(float* sum, const bf16* dx, R to, int k, int C, int first,
                                                        int ld) {
    let_next_start();
    wait_for_previous();
    const size_t n = blockIdx.x;
    const bool spare = to.expert[n * k] < 0;
    for (int i = threadIdx.x * 4; i < ld; i += blockDim.x * 4) {
        float4 all = {};
        for (int j = 0; j < k && !spare; j++) {
            const uint2 v = *(const uint2*)(dx + (n * k + j) * ld + i);
            all.x += low(v.x), all.y += high(v.x), all.z += low(v.y), all.w += high(v.y);
        }
        *(float4*)(sum + n * C + first + i) = all;
    }
}

// ---- route_backward. A block of 128 threads a token. Shared memory: E floats. Bound by latency.
template <class R>
__global__ void __launch_bounds__(128) route_backward_kernel(bf16* dz, const float* dshare, const float* slope, R of,
                                                             int E, int k, bool normed) {
    SHARED_FLOATS(dp);
    let_next_start();
    wait_for_previous();
    const size_t n = blockIdx.x;
    const float *const p = of.p + n * E, *const share = of.share + n * k, *const d = dshare + n * k;
    const int* const expert = of.expert + n * k;
    const bool spare = expert[0] < 0;
    for (int e = threadIdx.x; e < E; e += blockDim.x) dp[e] = slope ? slope[e] : 0;
    __syncthreads();
    if ((int)threadIdx.x < k && !spare) { // (k <= 32: see route_gpu)
        float mean = 0;
        for (int j = 0; j < k && normed; j++) mean += share[j] * d[j];
        dp[expert[threadIdx.x]] += (d[threadIdx.x] - mean) / (normed ? p[expert[0]] / share[0] : 1);
    }
    __syncthreads();
    float sum = 0;
    for (int e = threadIdx.x; e < E; e += blockDim.x) sum += p[e] * dp[e];
    sum = block_sum(sum);
    for (int e = threadIdx.x; e < E; e += blockDim.x) dz[n * E + e] = round_bf16(spare ? 0 : p[e] * (dp[e] - sum));
}

// ---- balance_loss, sums over a layer: f[e] += pairs of expert e, P[e] += sum_n p[n][e]. A block of 1,024 threads has
// 32 experts, a warp every 32nd token. Bound by latency.
template <class R>
__global__ void __launch_bounds__(1024) balance_sums_kernel(double* f, double* P, R of, const int* seq, int N, int E) {
    __shared__ float sums[32][32];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, e = blockIdx.x * 32 + lane;
    float sum = 0;
    for (int n = warp; n < N; n += 32) sum += e < E && seq[n] >= 0 ? of.p[(size_t)n * E + e] : 0;
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || e >= E) return;
    double all = P[e];
    for (int w = 0; w < 32; w++) all += sums[w][lane];
    P[e] = all, f[e] += of.first[e + 1] - of.first[e];
}
// ... and after all layers: total += weight times the loss, and its slopes. A block of 256 threads. Bound by latency.
template <class A> // float
__global__ void __launch_bounds__(256) balance_kernel(double* total, A* slope, const double* f, const double* P, int E,
                                                      int k, double weight, double scale) {
    let_next_start();
    wait_for_previous();
    double rows = 0, loss = 0;
    for (int e = threadIdx.x; e < E; e += 256) rows += f[e], loss += f[e] * P[e];
    rows = block_sum(rows) / k;
    loss = block_sum(loss) * E / (rows * rows);
    for (int e = threadIdx.x; e < E; e += 256) slope[e] = (A)(scale * E * f[e] / (rows * rows));
    if (threadIdx.x == 0) *total += weight * loss;
}
