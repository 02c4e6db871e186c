// gpu/backward/attention.cu: attention_backward and attend_backward.
#include "gpu/backward/attention.h"
#include "gpu/backward/hopper.h"
#include "qwen3.cu"

__global__ void __launch_bounds__(HopperBackward::THREADS, 1)
attention_backward_hopper_kernel(const __grid_constant__ AttentionBackward p, int* taken) {
#ifdef HAVE_WGMMA
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ HopperBackward::Shared told;
    const HopperBackward a = {p, taken, told, (shared_address(memory) + 1023) & ~1023u}; // (the swizzle's unit)
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 + a.STAGES; i++) // (an owned tile's unit is told besides)
            barrier_begin(a.full(i), a.PRODUCERS + (i < 2)), barrier_begin(a.empty(i), a.CONSUMERS / 32);
        barriers_begun();
    }
    __syncthreads();
    let_next_start(); // all our blocks have their places
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
void launch_attention_backward(Context& ctx, const AttentionBackward& p, const bf16* out, float* delta, int D) {
    const int N = p.b.N, H = p.H, K = p.K;
    const int64_t rows = (int64_t)N * (H / K), key_tiles = (N + GRADIENT_KEYS - 1) / GRADIENT_KEYS;
    const int64_t tiles = key_tiles + (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
    if (rows * H >= (int64_t)1 << 31 || tiles > 65535)
        DIE("attention_backward: a batch of %d tokens is too large for %d query heads", N, H);
    const size_t heads = (size_t)N * H;
    launch(ctx, D == 128 ? attention_delta_kernel<128> : attention_delta_kernel<64>,
           (unsigned)((heads * (D / 8) + 255) / 256), 256, 0, delta, p.dout, out, heads);
    if (ctx.gpu->hopper && D == HopperBackward::D) {
        const int units = HopperBackward::units(N, H, K);
        launch(ctx, attention_backward_hopper_kernel, std::min(units, ctx.gpu->sms), HopperBackward::THREADS,
               HopperBackward::SHARED, p, ctx.gpu->arrived);
    } else
        launch(ctx, D == 128 ? attention_backward_kernel<128> : attention_backward_kernel<64>,
               dim3((unsigned)K, (unsigned)tiles), 128, backward_shared(D), p, (int)key_tiles);
}
void attention_backward_gpu(Context& ctx, bf16* dqkv, const bf16* dout, const bf16* q, const bf16* keys,
                                   const bf16* values, const bf16* out, const float* lse, const Batch& b, int H, int K,
                                   int D, float* delta) {
    launch_attention_backward(ctx, {dqkv, dout, q, keys, values, lse, delta, b, H, K}, out, delta, D);
}
// The weights' gradients are sums over what attention_backward leaves: with them, one op after the other.
void attend_backward_gpu(Context& ctx, bf16* dqkv, float* dq_weight, float* dk_weight, const bf16* dout,
                                const bf16* q, const bf16* keys, const bf16* values, const bf16* out, const float* lse,
                                const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const float* rope,
                                const Batch& b, int H, int K, int D, float eps, float* delta) {
    AttentionBackward p = {dqkv, dout, q, keys, values, lse, delta, b, H, K};
    if (!dq_weight) p.qkv = qkv, p.q_weight = q_weight, p.k_weight = k_weight, p.rope = rope, p.eps = eps;
    launch_attention_backward(ctx, p, out, delta, D);
    if (dq_weight)
        qknorm_rope_backward_gpu(ctx, dqkv, dq_weight, dk_weight, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
}
