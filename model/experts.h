// model/experts.h: the small kernels of experts on a GPU: the choice of experts, their pairs, the rows of a block, the
// sum of a token's experts. R is Routed<bf16>, or a test's. tests/unit/test_experts.cpp runs them by emulation,
// tests/gpu/test_experts_gpu.cpp on a GPU.
#pragma once
#ifdef __CUDACC__
#include "qwen3.cu" // emulation includes what it needs
#define UNROLL_4 _Pragma("unroll 4")
#define UNROLL_8 _Pragma("unroll 8")
#else
#define UNROLL_4
#define UNROLL_8
#endif

// ---- route: after the product p = scores. A block of 128 threads a token. An expert is chosen if fewer than k have a
// larger p; the first warp lists the chosen, and groups the pairs of a token that is alone. Shared memory: E floats,
// filled up to a multiple of 4, and E flags. Bound by latency: E^2 / 128 compares.
template <class R>
__global__ void __launch_bounds__(128) choose_kernel(R to, const int* seq, int E, int k, bool normed) {
    SHARED_FLOATS(shared);
    float* const p = shared;
    const int filled = (E + 3) / 4 * 4;
    int* const chosen = (int*)(shared + filled);
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
    for (int e = threadIdx.x; e < filled; e += blockDim.x)
        if (e < E) row[e] = p[e] = p[e] / sum;
        else p[e] = -1;
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        const float own = p[e];
        const auto before = [&](float other, int f) { return other > own || (other == own && f < e); };
        int ahead = 0;
        UNROLL_8
        for (int f = 0; f < filled; f += 4) {
            const float4 v = *(const float4*)(p + f);
            ahead += before(v.x, f) + before(v.y, f + 1) + before(v.z, f + 2) + before(v.w, f + 3);
        }
        chosen[e] = ahead < k;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int* const expert = to.expert + (size_t)n * k;
    const bool spare = seq[n] < 0, alone = gridDim.x == 1;
    __shared__ int list[32]; // the chosen
    int before = 0;          // ... so far. NaNs choose too many: the first k of them
    for (int e0 = 0; e0 < E; e0 += 32) {
        const bool mine = e0 + lane < E && chosen[e0 + lane];
        const uint32_t who = __ballot_sync(~0u, mine);
        const int place = before + __popc(who & ((1u << lane) - 1));
        if (mine && place < k) list[place] = e0 + lane;
        if (alone && e0 + lane < E) to.first[e0 + lane] = spare ? 0 : min(place, k);
        before += __popc(who);
    }
    __syncwarp();
    if (alone && lane < k) to.pair[lane] = lane;
    if (alone && lane == 0) to.first[E] = spare ? 0 : k;
    const float share = lane < k ? p[list[lane]] : 0;
    if (lane < k) expert[lane] = spare ? -1 : list[lane];
    const float all = normed ? warp_sum(share) : 1;
    if (lane < k) to.share[(size_t)n * k + lane] = share / all;
}

// ---- Pairs by expert, of several tokens: a block of up to 1,024 threads an expert, whose warps go through a part of
// the pairs each, in order: first to count those of earlier experts and their own, then to write their own. Bound by
// latency.
template <class R> __global__ void __launch_bounds__(1024) group_kernel(R to, int pairs, int E) {
    __shared__ int earlier[32], own[32]; // of each warp's part
    let_next_start();
    wait_for_previous();
    const int e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warps = (int)blockDim.x / 32, part = (pairs + 32 * warps - 1) / (32 * warps) * 32;
    const int begin = warp * part, end = min(pairs, begin + part);
    int below = 0, equal = 0;
    UNROLL_4
    for (int i0 = begin; i0 < end; i0 += 32) {
        const int x = i0 + lane < end ? to.expert[i0 + lane] : -1;
        below += __popc(__ballot_sync(~0u, x >= 0 && x < e));
        equal += __popc(__ballot_sync(~0u, x == e));
    }
    if (lane == 0) earlier[warp] = below, own[warp] = equal;
    __syncthreads();
    int first = 0, at = 0, all = 0; // of the expert's pairs; of this warp's; how many
    for (int w = 0; w < warps; w++) first += earlier[w], at += w < warp ? own[w] : 0, all += own[w];
    at += first;
    UNROLL_4
    for (int i0 = begin; i0 < end; i0 += 32) {
        const int x = i0 + lane < end ? to.expert[i0 + lane] : -1;
        const uint32_t list = __ballot_sync(~0u, x == e);
        if (x == e) to.pair[at + __popc(list & ((1u << lane) - 1))] = i0 + lane;
        at += __popc(list);
    }
    if (threadIdx.x == 0) to.first[e] = first;
    if (threadIdx.x == 0 && e == E - 1) to.first[E] = first + all;
}

// ---- The rows of a block: every expert has ceil(rows / EACH) places; a block's place is the blockIdx.y-th of all.
// All threads call it, after wait_for_previous. n = 0: there are fewer places.
struct ExpertRows {
    int e, first, n; // pair[first] .. pair[first + n - 1]
};
template <int EACH> __device__ inline ExpertRows expert_rows(const int* first, int E) {
    __shared__ ExpertRows found;
    if (threadIdx.x < 32) { // a lane has neighbouring experts, so that its loads do not wait for each other
        const int lane = threadIdx.x, share = (E + 31) / 32, begin = min(E, lane * share), end = min(E, begin + share);
        const auto places = [&](int e) { return (first[e + 1] - first[e] + EACH - 1) / EACH; };
        int mine = 0;
        UNROLL_4
        for (int e = begin; e < end; e++) mine += places(e);
        int up_to = mine; // ... and of the earlier lanes
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, up_to, d);
            if (lane >= d) up_to += other;
        }
        int place = (int)blockIdx.y - (up_to - mine); // of this lane's
        if (place >= 0 && place < mine) {
            int e = begin;
            while (place >= places(e)) place -= places(e++);
            const int at = first[e] + place * EACH;
            found = {e, at, min(EACH, first[e + 1] - at)};
        }
        if (lane == 31 && place >= mine) found = {0, 0, 0};
    }
    __syncthreads();
    return found;
}

// ... the same, place after place, for one thread: numbers must ascend.
template <int EACH> struct ExpertPlaces {
    const int* first;
    int E, e = 0, before = 0; // places of experts before e
    __device__ __forceinline__ ExpertRows at(int place) {
        for (; e < E; e++) {
            const int begin = first[e], n = first[e + 1] - begin, places = (n + EACH - 1) / EACH;
            const int mine = place - before;
            if (mine < places) return {e, begin + mine * EACH, min(EACH, n - mine * EACH)};
            before += places;
        }
        return {0, 0, 0};
    }
};

// ---- out[i] = x[pair[i] / k], rows of C, a multiple of 8, for the *count pairs that have an expert. A warp a row.
// Bound by memory bandwidth: 2 C bytes written a pair.
template <class B>
__global__ void __launch_bounds__(256) gather_pairs_kernel(B* out, const B* x, const int* count, const int* pair, int k,
                                                           int C) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * 8 + threadIdx.x / 32;
    if (i >= *count) return;
    const uint4* from = (const uint4*)(x + (size_t)(pair[i] / k) * C);
    uint4* to = (uint4*)(out + (size_t)i * C);
    UNROLL_8
    for (int c = threadIdx.x % 32; c < C / 8; c += 32) to[c] = from[c];
}

// ---- out[n] = residual[n] + sum_j share_j y[n k + j], in columns from `first` on, of which y holds ld. Grid: (tokens,
// parts of 512 columns); a thread of 128 has four columns. Bound by memory bandwidth: 4 k + 8 bytes a number.
template <class R>
__global__ void __launch_bounds__(128) add_shares_kernel(float* out, const float* residual, const float* y, R to, int k,
                                                         int C, int first, int ld) {
    let_next_start();
    wait_for_previous();
    const size_t n = blockIdx.x;
    const int i = (blockIdx.y * 128 + threadIdx.x) * 4;
    if (i >= ld) return;
    float4 sum = *(const float4*)(residual + n * C + first + i);
    const int some = to.expert[n * k] < 0 ? 0 : k; // a spare row: none
    UNROLL_8
    for (int j = 0; j < some; j++) {
        const float share = to.share[n * k + j];
        const float4 v = *(const float4*)(y + (n * k + j) * ld + i);
        sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
    }
    *(float4*)(out + n * C + first + i) = sum;
}
