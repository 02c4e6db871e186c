// gpu/products/lora.h: what the adapters' kernels share.
#pragma once
#include "gpu/ops.h"
#include "gpu/products/epilogues.h"
#include "qwen3.cu"

// ---- The adapters' own kernels. A's rows pass them in groups of 32, so that one pass over x serves up to three
// modules (q, k, v; gate, up) of rank 32. What they need to know:
struct LoraArgs {
    const bf16* A; // (m * rank, in)
    int N, in, rank, modules, module[3];
    bool dropping;
    float scale = 1; // 1 / (1 - p)
    Dropout dropout = {};
    PhiloxKeys keys = PhiloxKeys(0); // (as arguments they cost nothing; adding them up is a quarter of a mask's work)
    DropoutMasks kept;
    LoraArgs(const Linear<bf16>& W, int N)
        : A(W.adapter.A), N(N), in(W.in), rank(W.adapter.rank), modules(W.adapter.modules),
          dropping(W.adapter.dropout), kept{W.adapter.kept, (W.in + 63) / 64, N} {
        if (in % 8 || rank % 8) DIE("an adapter of rank %d on %d columns: the GPU takes multiples of 8", rank, in);
        for (int j = 0; j < 3; j++) module[j] = W.adapter.module[j];
        if (!dropping) return;
        if (!kept.words) DIE("dropout on a GPU needs room for what it keeps");
        dropout = *W.adapter.dropout, keys = PhiloxKeys(dropout.seed), scale = 1 / (1 - dropout.p);
    }
    BOTH int width() const { return modules * rank; }
    BOTH int each() const { return (rank + 31) / 32; } // groups of a module
    BOTH int groups() const { return modules * each(); }
    // (An index that is not constant would cost a copy of the array.)
    __device__ int name(int j) const { return j == 0 ? module[0] : j == 1 ? module[1] : module[2]; }
    __device__ int module_of(int group) const { return group / each(); }
    __device__ int first_row(int group) const { return group % each() * 32; } // of its module's
};

// The top bits of four bytes, each eight times. `which`: in hexadecimal, from the last digit on, 8 + the number of a
// byte of a (0 .. 3) or b (4 .. 7).
__device__ __forceinline__ uint32_t spread_bits(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(which));
    return y;
}


// Calls launch(std::integral_constant<int, G>()): G groups of 32 of an adapter's rows pass a block at once.
template <class Launch> void in_groups(int groups, Launch launch) {
    if (groups == 1) return launch(std::integral_constant<int, 1>());
    if (groups == 2) return launch(std::integral_constant<int, 2>());
    launch(std::integral_constant<int, 3>());
}

// rmsnorm of many tokens and, for every module of p, what dropout keeps of it.
void rmsnorm_masks_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, float eps, const LoraArgs& p, int N);
