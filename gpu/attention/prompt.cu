// gpu/attention/prompt.cu: attention of several tokens a sequence.
#include "gpu/attention/hopper.h"
#include "gpu/attention/prompt.h"
#include "qwen3.cu"

__global__ void __launch_bounds__(HopperAttention::THREADS, 1)
attention_hopper_kernel(const __grid_constant__ HopperAttention::Maps maps, const __grid_constant__ AttentionArgs p,
                        int tiles, int splits, int* taken) {
#ifdef HAVE_WGMMA
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[12];
    __shared__ HopperAttention::Shared told;
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u; // the swizzle counts from multiples of 1024
    const HopperAttention a = {p, tiles, splits, taken, told, shared, shared_address(barriers)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 6; i++) barrier_begin(a.full(i), 1), barrier_begin(a.empty(i), a.CONSUMERS / 32);
        told.queries = told.keys = told.values = {}, told.ended = false;
        barriers_begun();
    }
    __syncthreads();
    let_next_start(); // all our blocks have their places
    wait_for_previous();
    if (threadIdx.x >= a.CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x < a.CONSUMERS + 64) a.produce(maps, threadIdx.x / 32 % 4);
    } else {
        take_registers<232>();
        a.consume();
    }
#endif
}

// Joins the parts of split keys. A block a token's head, a thread a number; bound by launching.
__global__ void attention_sum_kernel(bf16* out, const float* partial, const int* seq, int first, int H, int splits) {
    wait_for_previous();
    const size_t row = blockIdx.x, D = blockDim.x;
    if (seq[first + row / H] < 0) return;
    const float sum = join_splits(partial + row * splits * (D + 2), splits, (int)D, threadIdx.x);
    out[((size_t)first * H + row) * D + threadIdx.x] = round_bf16(sum);
}

void attention_gpu(Context& ctx, bf16* out, float* lse, const bf16* q, const bf16* keys, const bf16* values,
                          const Batch& b, int H, int K, int D, int first) {
    const bool hopper = ctx.gpu->hopper && D == HopperAttention::D;
    const int G = H / K, tokens = QUERY_ROWS / G, tiles = (b.N - first + tokens - 1) / tokens, blocks = tiles * K;
    const int wanted = hopper ? std::min(ctx.gpu->sms / blocks, b.longest / HOPPER_LEAST_KEYS)
                              : std::min(BLOCKS_A_SM * ctx.gpu->sms / blocks, b.longest / LEAST_KEYS);
    const int splits = ctx.invariant || lse ? 1 : std::max(1, wanted);
    const AttentionArgs p = {out, lse, q, keys, values, b, first, H, K, ctx.gpu->attention};
    if (hopper) {
        const size_t C = (size_t)H * D, groups = (size_t)1 << 28; // (as many as there can be: pages are always inside)
        const auto map_pages = [&](const bf16* cache) {
            return tensor_map(cache, {{64, 1, 64}, {8, (size_t)D, 8}, {2, 64, 2}, {groups, 8 * (size_t)D, 2}});
        };
        const HopperAttention::Maps maps = {
            tensor_map(q, {{(size_t)D, 1, 64}, {(size_t)H, (size_t)D, G}, {(size_t)b.N, C, tokens}}),
            map_pages(keys), map_pages(values)};
        launch(ctx, attention_hopper_kernel, std::min(blocks * splits, ctx.gpu->sms), HopperAttention::THREADS,
               HopperAttention::SHARED, maps, p, tiles, splits, ctx.gpu->arrived);
    } else {
        const dim3 grid((unsigned)K, (unsigned)tiles, (unsigned)splits);
        const size_t shared = (size_t)(QUERY_ROWS + 4 * KEYS) * D * sizeof(bf16);
        launch(ctx, D == 128 ? attention_kernel<128> : attention_kernel<64>, grid, 128, shared, p);
    }
    if (splits == 1) return;
    const dim3 rows((unsigned)((b.N - first) * H));
    launch(ctx, attention_sum_kernel, rows, D, 0, out, p.partial, b.seq, first, H, splits);
}
