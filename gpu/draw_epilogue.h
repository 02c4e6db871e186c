// gpu/draw_epilogue.h: the head's product for draws: penalties, and each block's likeliest id.
#pragma once
#include "gpu/draw.h"
#include "qwen3.cu"

// The head's product: logits with the penalties, and the likeliest id of each block's rows. `best` has room for
// BEST_BLOCKS blocks, and sample_kernel has a thread for each of them: MOST_BLOCKS holds stream_product to that.
struct DrawEpilogue : Epilogue {
    static constexpr int MOST_BLOCKS = BEST_BLOCKS;
    float* out;                // (R,V)
    size_t V;
    const Draw* draw;          // (R)
    const uint32_t* seen;      // (R,V), or null: no penalties
    unsigned long long* best;  // (R, BEST_BLOCKS)
    DrawEpilogue(float* out, size_t V, const Draw* draw, const uint32_t* seen, unsigned long long* best)
        : out(out), V(V), draw(draw), seen(seen), best(best) {}
    __device__ static unsigned long long* shared_best() {
        __shared__ unsigned long long best[STREAM_TOKENS];
        return best;
    }
    __device__ void begin() {
        if (threadIdx.x < STREAM_TOKENS) shared_best()[threadIdx.x] = 0; // a barrier comes before its first use
    }
    __device__ void one(bool inside, int n, int r, float y, float) {
        unsigned long long key = 0;
        if (inside) {
            const Sampling& how = draw[n].how;
            const uint32_t s = seen ? seen[n * V + r] : 0;
            out[n * V + r] = y = penalized(y, how, s);
            if (r < draw[n].exist) key = draw_key(usable(y), r);
        }
        for (int other = 1; other < 8; other *= 2) key = max(key, __shfl_xor_sync(~0u, key, other));
        if (threadIdx.x % 8 == 0 && key) atomicMax(shared_best() + n, key);
    }
    __device__ void end(int N) {
        __syncthreads();
        if (threadIdx.x < N) best[threadIdx.x * BEST_BLOCKS + blockIdx.x] = shared_best()[threadIdx.x];
    }
};
