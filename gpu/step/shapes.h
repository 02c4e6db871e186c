// gpu/step/shapes.h: the kernel and the plan for weights packed in one way; an object for each (shapes_*.cu).
#pragma once
#include "gpu/step/formats.h"
#include "gpu/step/road.h"
#include "gpu/step/step.h"
#include "qwen3.cu"

template <int TOKENS, class P, bool EXPERTS> void StepRoad::choose_shape(Part& part, const Config& c, int N) {
    auto take = [&](auto shape) {
        using S = decltype(shape);
        part.kernel = step_kernel<S>, part.chunk = P::CHUNK, threads = S::THREADS;
        part.args = plan_step<S>(c, N, blocks, (size_t)most_shared());
    };
    auto choose = [&](auto steps) {
        constexpr int STEPS = decltype(steps)::value;
        take(StepShape<8, STEPS, TOKENS, false, P, EXPERTS>());
        cudaFuncAttributes built;
        CUDA_CHECK(cudaFuncGetAttributes(&built, part.kernel));
        if (built.ptxVersion >= 90 && ctx.gpu->sm >= 90) take(StepShape<8, STEPS, TOKENS, true, P, EXPERTS>());
    };
    // Chunks of a stage: 16 KB; of layers in 8 bits, where rows are shorter, 1,024 numbers.
    if constexpr (P::RUNS == 2)
        if (c.C <= STEP_SMALL && &part != &head) return choose(std::integral_constant<int, 16>());
    choose(std::integral_constant<int, 32>());
}
template <class P>
void StepRoad::pack_matrix(unsigned char* to, const Linear<bf16>& W, P packed, const StepProduct& q, size_t second) {
    const StepPacking<P> p = {to, step_source(W, packed), q, second};
    launch_kernel(ctx, false, step_pack_kernel<P>, dim3((unsigned)((q.bytes(P::CHUNK) / 16 + 255) / 256)), 256, 0, p);
}

// For steps of up to TOKENS tokens; of a mixture of experts; and the packing.
#define STEP_SHAPE(TOKENS, ...) \
    template void StepRoad::choose_shape<TOKENS, __VA_ARGS__, false>(StepRoad::Part&, const Config&, int);
#define STEP_EXPERTS(...) \
    template void StepRoad::choose_shape<1, __VA_ARGS__, true>(StepRoad::Part&, const Config&, int);
#define STEP_PACKING(...) \
    template void StepRoad::pack_matrix(unsigned char*, const Linear<bf16>&, __VA_ARGS__, const StepProduct&, size_t);
