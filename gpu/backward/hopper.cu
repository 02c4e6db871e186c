// gpu/backward/hopper.cu: attention_backward on Hopper.
#include "gpu/backward/hopper.h"
#include "qwen3.cu"

__global__ void __launch_bounds__(HopperBackward::THREADS, 1)
attention_backward_hopper_kernel(const __grid_constant__ AttentionBackward p, int* taken) {
#ifdef HAVE_WGMMA
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ HopperBackward::Shared told;
    const HopperBackward a = {p, taken, told, (shared_address(memory) + 1023) & ~1023u}; // (the swizzle's unit)
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 + a.STAGES; i++) // (an owned tile's unit is stored as well)
            barrier_begin(a.full(i), a.PRODUCERS + (i < 2)), barrier_begin(a.empty(i), a.CONSUMERS / 32);
        barriers_begun();
    }
    __syncthreads();
    let_next_start(); // every block is resident
    wait_for_previous();
    if (threadIdx.x >= a.CONSUMERS) {
        keep_registers<24>();
        a.produce();
    } else {
        take_registers<240>();
        a.consume();
    }
#endif
}

bool Optional::attention_backward(Context& ctx, const AttentionBackward& p, int D) {
    if (!ctx.gpu->hopper || D != HopperBackward::D) return false;
    const int units = HopperBackward::units(p.b.N, p.H, p.K);
    launch(ctx, attention_backward_hopper_kernel, std::min(units, ctx.gpu->sms), HopperBackward::THREADS,
           HopperBackward::SHARED, p, ctx.gpu->arrived);
    return true;
}
