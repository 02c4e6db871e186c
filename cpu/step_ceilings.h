// cpu/step_ceilings.h: the read bandwidth and the multiply rate of this machine.
#pragma once
#include "cpu/ceilings.h"
#include "model/step_bytes.h"
#include "model/weights.h"

// gpu/ceilings.cu: flops a second by mma.sync, which every GPU from sm_80 on has, in some milliseconds; bytes a second
// when reading 2 GB, or all memory if there is less.
double gpu_multiply_ceiling(const Context& ctx);
double gpu_read_ceiling(const Context& ctx);

// Flops a second: on a CPU as above, in `time` seconds; on a GPU by mma.sync, which every GPU from sm_80 on has, in
// some milliseconds.
template <class T> double multiply_ceiling([[maybe_unused]] const Context& ctx, double time) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_multiply_ceiling(ctx);
    return cpu_multiply_ceiling<T>(time);
}

struct Ceilings { double read, multiply; }; // bytes, flops a second

// The ceilings of the GPU (it reads 2 GB, or all its memory if it has less), else of the CPU, whose bandwidth was
// measured before.
template <class T>
Ceilings measure_ceilings([[maybe_unused]] const Context& ctx, const ReadTest* memory = nullptr) {
    if constexpr (WITH_GPU) if (ctx.gpu) return {gpu_read_ceiling(ctx), gpu_multiply_ceiling(ctx)};
    return {memory->ceiling, cpu_multiply_ceiling<T>(0.3)};
}
