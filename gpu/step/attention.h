// gpu/step/attention.h: parts of one kernel's attention: a page in registers, RoPE, a warp's softmax, joining of
// splits. Step::attend and Step::join combine them.
#pragma once
#include "gpu/step/plan.h"
#include "qwen3.cu"
#include <cfloat>

// Element i of 8 neighbours of a and of b, as one operand's pair.
__device__ __forceinline__ uint32_t step_pair(const uint4& a, const uint4& b, int i) {
    const uint32_t x = i < 2 ? a.x : i < 4 ? a.y : i < 6 ? a.z : a.w, y = i < 2 ? b.x : i < 4 ? b.y : i < 6 ? b.z : b.w;
    return i % 2 ? x >> 16 | (y & 0xffff0000) : (x & 0xffff) | y << 16;
}

// A page of keys and values in a warp's registers, as operands b of mma. For keys lane 4 g + t has numbers 32 j + 8 t
// .. + 7 of keys g and g + 8; for values numbers 16 g .. + 15 of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9. All keys begin in
// the same bank: so of two chunks every other lane reads the second first (for values, where four lanes read the same
// two, half of the conflicts remain).
struct StepPage {
    static constexpr int D = STEP_HEAD;
    uint4 k[2][D / 32], v[4][D / 64];
    __device__ __forceinline__ static void swap_if(bool odd, uint4& a, uint4& b) { // branchless
        const uint4 x = a, y = b;
        a.x = odd ? y.x : x.x, a.y = odd ? y.y : x.y, a.z = odd ? y.z : x.z, a.w = odd ? y.w : x.w;
        b.x = odd ? x.x : y.x, b.y = odd ? x.y : y.y, b.z = odd ? x.z : y.z, b.w = odd ? x.w : y.w;
    }
    __device__ __forceinline__ void load_keys(const bf16* keys) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, odd = g % 2;
        GPU_UNROLL
        for (int half = 0; half < 2; half++) {
            const bf16* key = keys + (half * 8 + g) * D + t * 8;
            GPU_UNROLL
            for (int j = 0; j < D / 32; j++) k[half][j] = *(const uint4*)(key + (j ^ odd) * 32);
            GPU_UNROLL
            for (int j = 0; j < D / 32; j += 2) swap_if(odd, k[half][j], k[half][j + 1]);
        }
    }
    __device__ __forceinline__ void load_values(const bf16* values) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, odd = t % 2;
        GPU_UNROLL
        for (int a = 0; a < 4; a++) {
            GPU_UNROLL
            for (int c = 0; c < D / 64; c++)
                v[a][c] = *(const uint4*)(values + (a / 2 * 8 + 2 * t + a % 2) * D + (2 * g + (c ^ odd)) * 8);
            swap_if(odd, v[a][0], v[a][1]);
        }
    }
    // Key i of the page is new key from + i, if the cache does not have it; past the `count` new ones the last is
    // repeated.
    __device__ __forceinline__ void renew(const bf16* keys, const bf16* values, int from, int count) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        GPU_UNROLL
        for (int half = 0; half < 2; half++) {
            const int i = from + half * 8 + g;
            if (i < 0) continue;
            GPU_UNROLL
            for (int j = 0; j < D / 32; j++)
                k[half][j] = *(const uint4*)(keys + min(i, count - 1) * D + j * 32 + t * 8);
        }
        GPU_UNROLL
        for (int a = 0; a < 4; a++) {
            const int i = from + a / 2 * 8 + 2 * t + a % 2;
            if (i < 0) continue;
            GPU_UNROLL
            for (int c = 0; c < D / 64; c++)
                v[a][c] = *(const uint4*)(values + min(i, count - 1) * D + (2 * g + c) * 8);
        }
    }
};

// Gains of numbers 4 lane .. 4 lane + 3 of a head, and the angles (cosine, sine) of their planes.
struct StepTurn {
    uint2 gain;
    float4 angle[2];
    __device__ __forceinline__ StepTurn(const bf16* gains, const float* angles, int lane)
        : gain(*(const uint2*)(gains + lane * 4)),
          angle{*(const float4*)(angles + lane % 16 * 8), *(const float4*)(angles + lane % 16 * 8 + 4)} {}
};

// Softmax over a warp's pages: for query g (a row of mma) the largest score and this lane's sum of weights; and the
// weighted sum of values: mix[e] has queries 2 t and 2 t + 1 as columns, numbers 16 g + e and 16 g + 8 + e as rows g
// and g + 8.
struct StepSoftmax {
    static constexpr int D = STEP_HEAD;
    static_assert(D == 128, "16 rows of mma are 16 chunks of 8");
    float top = -INFINITY, weights = 0, mix[8][4] = {};
    // The value of query 2 t + i, from the lane that holds it as query g.
    __device__ __forceinline__ static float of_column(float x, int i) {
        return __shfl_sync(~0u, x, (threadIdx.x % 4 * 2 + i) * 4);
    }
    // Adds the first `count` keys of a page. HIDDEN: query g may see none of them; then nothing changes.
    template <bool HIDDEN> __device__ __forceinline__ void add(const StepPage& page, const bf16* query, int count) {
        float s[2][4] = {};
        GPU_UNROLL
        for (int j = 0; j < D / 32; j++) {
            const uint4 q = *(const uint4*)(query + j * 32);
            GPU_UNROLL
            for (int half = 0; half < 2; half++) {
                const uint4& k = page.k[half][j];
                mma(s[half], q.x, 0, q.y, 0, k.x, k.y);
                mma(s[half], q.z, 0, q.w, 0, k.z, k.w);
            }
        }
        float largest = top;
        GPU_UNROLL
        for (int i = 0; i < 4; i++) {
            const int key = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
            float& x = s[i / 2][i % 2];
            x = key < count ? __fmul_rn(x, LOG2E / sqrtf((float)D)) : -INFINITY;
            largest = fmaxf(largest, x);
        }
        largest = quad_max(largest);
        if (HIDDEN) largest = fmaxf(largest, -FLT_MAX); // (-inf - -inf is NaN)
        const float by = exp2_fast(top - largest), by0 = of_column(by, 0), by1 = of_column(by, 1);
        top = largest;
        uint32_t p[2], rest[2]; // of keys 2 t, 2 t + 1 and of 2 t + 8, 2 t + 9
        GPU_UNROLL
        for (int half = 0; half < 2; half++) {
            const float x = exp2_fast(s[half][0] - top), y = exp2_fast(s[half][1] - top);
            weights = half ? weights + (x + y) : fmaf(weights, by, x + y);
            p[half] = pack(x, y), rest[half] = pack(x - low(p[half]), y - high(p[half]));
        }
        const auto& v = page.v;
        GPU_UNROLL
        for (int e = 0; e < 8; e++) {
            const uint32_t a0 = step_pair(v[0][0], v[1][0], e), a1 = step_pair(v[0][1], v[1][1], e);
            const uint32_t a2 = step_pair(v[2][0], v[3][0], e), a3 = step_pair(v[2][1], v[3][1], e);
            mix[e][0] *= by0, mix[e][1] *= by1, mix[e][2] *= by0, mix[e][3] *= by1;
            mma(mix[e], a0, a1, a2, a3, p[0], p[1]);
            mma(mix[e], a0, a1, a2, a3, rest[0], rest[1]);
        }
    }
    // To `parts` of `count` queries: D numbers, the largest score, the sum of weights.
    __device__ __forceinline__ void store(float* parts, int count) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const float all = quad_sum(weights);
        GPU_UNROLL
        for (int i = 0; i < 4; i++) {
            float* to = parts + (2 * t + i % 2) * (D + 4) + (2 * g + i / 2) * 8;
            if (2 * t + i % 2 >= count) continue;
            *(float4*)to = make_float4(mix[0][i], mix[1][i], mix[2][i], mix[3][i]);
            *(float4*)(to + 4) = make_float4(mix[4][i], mix[5][i], mix[6][i], mix[7][i]);
        }
        if (t == 0 && g < count) parts[g * (D + 4) + D] = top, parts[g * (D + 4) + D + 1] = all;
    }
};
// Joins numbers 4 i .. 4 i + 3 of `count` parts: their sums, and the largest score and sum of weights.
__device__ __forceinline__ float4 step_join(const float* parts, int count, int step, int i, float& top,
                                            float& weights) {
    constexpr int D = STEP_HEAD, ONCE = 8;
    top = -INFINITY, weights = 0;
    float4 sum = {0, 0, 0, 0};
    for (int from = 0; from < count; from += ONCE) {
        float2 of[ONCE]; // score and weight
        float4 x[ONCE];
        GPU_UNROLL
        for (int c = 0; c < ONCE; c++) {
            const float* part = parts + min(from + c, count - 1) * step;
            of[c] = *(const float2*)(part + D), x[c] = *(const float4*)(part + 4 * i);
        }
        float largest = top;
        GPU_UNROLL
        for (int c = 0; c < ONCE; c++) largest = fmaxf(largest, of[c].x);
        const float before = exp2_fast(top - largest);
        top = largest, weights *= before;
        sum.x *= before, sum.y *= before, sum.z *= before, sum.w *= before;
        GPU_UNROLL
        for (int c = 0; c < ONCE; c++) {
            const float by = from + c < count ? exp2_fast(of[c].x - top) : 0;
            sum.x = fmaf(by, x[c].x, sum.x), sum.y = fmaf(by, x[c].y, sum.y);
            sum.z = fmaf(by, x[c].z, sum.z), sum.w = fmaf(by, x[c].w, sum.w);
            weights = fmaf(by, of[c].y, weights);
        }
    }
    return sum;
}

// Joins four numbers of splits. Each split has a word: the numbers, normalised by its own softmax, and the logarithm
// (base 2) of its weights' sum.
struct StepJoin {
    float top = -INFINITY, weights = 0;
    float4 sum = {0, 0, 0, 0};
    static constexpr int ONCE = 4;
    __device__ __forceinline__ static float log_of(const uint4& word) { return __uint_as_float(word.z); }
    __device__ __forceinline__ void add(const uint4* words, int count) { // the next four, or the last `count`
        float largest = top;
        GPU_UNROLL
        for (int i = 0; i < ONCE; i++) largest = fmaxf(largest, i < count ? log_of(words[i]) : -INFINITY);
        const float before = exp2_fast(top - largest);
        top = largest;
        sum.x *= before, sum.y *= before, sum.z *= before, sum.w *= before;
        GPU_UNROLL
        for (int i = 0; i < ONCE; i++) {
            const float by = i < count ? exp2_fast(log_of(words[i]) - top) : 0;
            sum.x = fmaf(by, low(words[i].x), sum.x), sum.y = fmaf(by, high(words[i].x), sum.y);
            sum.z = fmaf(by, low(words[i].y), sum.z), sum.w = fmaf(by, high(words[i].y), sum.w);
            weights = i ? weights + by : fmaf(weights, before, by);
        }
    }
    __device__ __forceinline__ uint4 word(uint32_t epoch) const {
        const float by = __fdividef(1, weights), log = top + __log2f(weights);
        return make_uint4(pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by), __float_as_uint(log), epoch);
    }
};
