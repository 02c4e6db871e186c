// model/context.h: where ops run, on the CPU or a GPU, and copies to and from there.
#pragma once
#include "base/arena.h"
#include "base/stop_flag.h"
#include <cstring>
#include <memory>

struct Gpu; // qwen3.cu, 8: a GPU's stream, properties and scratch

// Where and how ops run.
struct Context {
    std::shared_ptr<Gpu> gpu;                    // null: on the CPU
    bool plain = false;                          // by the definitions of qwen3.cu, Book I
    bool invariant = false;                      // on a GPU: a row's bits do not depend on its batch (slower)
    bool kv_fp8 = false;                         // a session's cache is FP8
    bool fp8_activations = false;                // on a GPU: of prompts, for FP8 weights: see round_activations
    bool int8_activations = false;               // on a CPU: of packed products, see model/int8_activations.h
    // On a GPU, drawn tokens by step.h's kernel: WHERE_FASTER as StepRoad::find says.
    enum OneKernel { OFF, WHERE_FASTER, TOGETHER, BY_PHASE } one_kernel = OFF;
    const StopFlag* stop = nullptr; // forward and backward give up between layers when this is not zero
};

void gpu_copy(Context& ctx, void* to, const void* from, size_t bytes, bool to_host); // model/gpu.cu
void gpu_clear(Context& ctx, void* p, size_t bytes);
void* gpu_host_allocate(size_t bytes);
void gpu_host_release(void* p);
template <class U> std::shared_ptr<U[]> gpu_host_memory(size_t n) { // the CPU's, which the GPU reaches at full speed
    return {(U*)gpu_host_allocate(n * sizeof(U)), [](U* p) { gpu_host_release(p); }};
}

// n numbers copied to and from the context's device, and zeros there.
template <class U> void copy_in(Context& ctx, U* to, const U* from, size_t n) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_copy(ctx, to, from, n * sizeof(U), false);
    memcpy((void*)to, from, n * sizeof(U));
}
template <class U> void copy_out(Context& ctx, U* to, const U* from, size_t n) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_copy(ctx, to, from, n * sizeof(U), true);
    memcpy((void*)to, from, n * sizeof(U));
}
template <class U> void clear(Context& ctx, U* p, size_t n) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_clear(ctx, p, n * sizeof(U));
    memset((void*)p, 0, n * sizeof(U));
}
