// model/experts.h: the small kernels of experts on a GPU: the choice of experts, their pairs, the rows of a block, the
// sum of a token's experts. R is Routed<bf16>, or a test's. tests/unit/test_experts.cpp runs them by emulation,
// tests/gpu/test_experts_gpu.cpp on a GPU.
#pragma once
#ifdef __CUDACC__
#include "qwen3.cu" // emulation includes what it needs
#endif

// ---- route: after the product p = scores. A block of 128 threads a token. An expert is chosen if fewer than k have a
// larger p; the first warp lists the chosen. Shared memory: E floats and E flags. Bound by latency: E^2 / 128 compares.
template <class R>
__global__ void __launch_bounds__(128) choose_kernel(R to, const int* seq, int E, int k, bool normed) {
    SHARED_FLOATS(shared);
    float* const p = shared;
    int* const chosen = (int*)(shared + E);
    __shared__ float top_of_all;
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x, lane = threadIdx.x % 32;
    float* const row = to.p + (size_t)n * E;
    if (threadIdx.x < 32) {
        float top = -INFINITY;
        for (int e = lane; e < E; e += 32) top = fmaxf(top, row[e]);
        for (int other = 16; other; other /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
        if (lane == 0) top_of_all = top;
    }
    __syncthreads();
    float sum = 0;
    for (int e = threadIdx.x; e < E; e += blockDim.x) sum += p[e] = exp2_fast((row[e] - top_of_all) * LOG2E);
    sum = block_sum(sum); // (its barriers order p, too)
    for (int e = threadIdx.x; e < E; e += blockDim.x) row[e] = p[e] = p[e] / sum;
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int ahead = 0;
        for (int f = 0; f < E; f++) ahead += p[f] > p[e] || (p[f] == p[e] && f < e);
        chosen[e] = ahead < k;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int* const expert = to.expert + (size_t)n * k;
    __shared__ int list[32]; // the chosen
    int before = 0;          // ... so far. NaNs choose too many: the first k of them
    for (int e0 = 0; e0 < E && before < k; e0 += 32) {
        const bool mine = e0 + lane < E && chosen[e0 + lane];
        const uint32_t who = __ballot_sync(~0u, mine);
        const int place = before + __popc(who & ((1u << lane) - 1));
        if (mine && place < k) list[place] = e0 + lane;
        before += __popc(who);
    }
    __syncwarp();
    const float share = lane < k ? p[list[lane]] : 0;
    if (lane < k) expert[lane] = seq[n] < 0 ? -1 : list[lane];
    const float all = normed ? warp_sum(share) : 1;
    if (lane < k) to.share[(size_t)n * k + lane] = share / all;
}

// ---- Pairs by expert: a warp an expert, which goes through all pairs twice, in order: first to count those of earlier
// experts, then to write its own. Bound by latency.
template <class R> __global__ void __launch_bounds__(256) group_kernel(R to, int pairs, int E) {
    let_next_start();
    wait_for_previous();
    const int e = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (e >= E) return;
    int before = 0, own = 0;
    for (int i0 = 0; i0 < pairs; i0 += 32) {
        const int x = i0 + lane < pairs ? to.expert[i0 + lane] : -1;
        before += __popc(__ballot_sync(~0u, x >= 0 && x < e));
    }
    for (int i0 = 0; i0 < pairs; i0 += 32) {
        const int x = i0 + lane < pairs ? to.expert[i0 + lane] : -1;
        const uint32_t list = __ballot_sync(~0u, x == e);
        if (x == e) to.pair[before + own + __popc(list & ((1u << lane) - 1))] = i0 + lane;
        own += __popc(list);
    }
    if (lane == 0) to.first[e] = before;
    if (lane == 0 && e == E - 1) to.first[E] = before + own;
}

// ---- The rows of a block: every expert has ceil(rows / EACH) places; a block's place is the blockIdx.y-th of all.
// All threads call it, after wait_for_previous. n = 0: there are fewer places.
struct ExpertRows {
    int e, first, n; // pair[first] .. pair[first + n - 1]
};
template <int EACH> __device__ inline ExpertRows expert_rows(const int* first, int E) {
    __shared__ ExpertRows found;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        int before = 0; // places of the experts so far
        ExpertRows mine = {0, 0, 0};
        for (int e0 = 0; e0 < E; e0 += 32) {
            const int e = e0 + lane, from = first[min(e, E)], n = first[min(e + 1, E)] - from;
            const int places = (n + EACH - 1) / EACH;
            int up_to = places; // ... of this and the earlier lanes
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(~0u, up_to, d);
                if (lane >= d) up_to += other;
            }
            const int place = (int)blockIdx.y - before - (up_to - places); // of this expert
            const bool here = place >= 0 && place < places;
            if (here) mine = {e, from + place * EACH, min(EACH, n - place * EACH)};
            const uint32_t who = __ballot_sync(~0u, here);
            if (who) {
                if (here) found = mine;
                break;
            }
            before += __shfl_sync(~0u, up_to, 31);
            if (e0 + 32 >= E && lane == 0) found = {0, 0, 0};
        }
    }
    __syncthreads();
    return found;
}

// ---- out[n] = residual[n] + sum_j share_j y[n k + j], in columns from `first` on, of which y holds ld. A block of 128
// threads a token, a thread every 128th four. Bound by memory bandwidth: 4 k + 8 bytes a number.
template <class R>
__global__ void __launch_bounds__(128) add_shares_kernel(float* out, const float* residual, const float* y, R to, int k,
                                                         int C, int first, int ld) {
    let_next_start();
    wait_for_previous();
    const size_t n = blockIdx.x;
    const bool spare = to.expert[n * k] < 0;
    for (int i = threadIdx.x * 4; i < ld; i += blockDim.x * 4) {
        float4 sum = *(const float4*)(residual + n * C + first + i);
        for (int j = 0; j < k && !spare; j++) {
            const float share = to.share[n * k + j];
            const float4 v = *(const float4*)(y + (n * k + j) * ld + i);
            sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
        }
        *(float4*)(out + n * C + first + i) = sum;
    }
}
