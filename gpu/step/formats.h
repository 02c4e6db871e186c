// gpu/step/formats.h: the packing of a model's weights for one kernel a token; steps by kernels of other shapes.
#pragma once
#include "gpu/packed/formats.h"
#include "gpu/step/plan.h"
#include "gpu/step/weights.h"
#include "qwen3.cu"

// Calls use(StepPlain()) or use(a StepPacked) according to W's format. Throws Error if it cannot be packed.
template <class Use> void with_step_weights(const Linear<bf16>& W, Use use) {
    switch (W.format) {
        case Format::PLAIN: return use(StepPlain());
        case Format::INT8: return use(StepPacked<PackedInt8, 2>());
        case Format::INT4:
            return W.group == 32   ? use(StepPacked<PackedInt4<1>, 4>())
                   : W.group == 64 ? use(StepPacked<PackedInt4<1>, 2>())
                                   : use(StepPacked<PackedInt4<1>, 1>());
        case Format::FP8:
            if (W.group % 64 || W.group_rows % 8)
                DIE("--one-kernel: FP8 in blocks of %d x %d (multiples of 8 x 64 only)", W.group_rows, W.group);
            return use(StepPacked<PackedFp8, 1>());
        case Format::BLOCKS: DIE("--one-kernel: GGUF's blocks (a GPU has them as INT8)");
    }
}
inline bool step_same(const Linear<bf16>& a, const Linear<bf16>& b) { // packed in the same way
    return a.format == b.format && a.group == b.group && a.group_rows == b.group_rows;
}
inline StepPlain::Source step_source(const Linear<bf16>& W, StepPlain) {
    if (!W.adapter.rank) return {W.w[0], W.in};
    const Adapter<bf16>& a = W.adapter;
    return {W.w[0], W.in, (int)a.width(), a.A, a.B, a.dora.on ? a.dora.c : nullptr};
}
template <class F, int GROUPS> PackedArgs step_source(const Linear<bf16>& W, StepPacked<F, GROUPS>) {
    return packed_args(W);
}

// A step by a kernel of another shape, for which `plan` was made.
inline StepArgs step_as_planned(StepArgs step, const StepArgs& plan) {
    step.stages = plan.stages, step.in_flight_pages = plan.in_flight_pages, step.joined = plan.joined;
    for (int i = 0; i < STEP_KINDS; i++) step.product[i].in_flight = plan.product[i].in_flight;
    step.sums_at = plan.sums_at, step.squares_at = plan.squares_at, step.work_at = plan.work_at;
    step.ring_at = plan.ring_at, step.shared = plan.shared;
    return step;
}
// The launch of a head that is packed in another format than the layers: `head` has its plan and weights.
inline StepArgs step_head(StepArgs step, const StepArgs& head) {
    step.product[STEP_LOGITS] = head.product[STEP_LOGITS], step.product[STEP_LOGITS].at = 0;
    step.packed = head.packed;
    return step_as_planned(step, head);
}
