// gpu/attention/hopper.cu: attention for prompts and training, on Hopper.
#include "gpu/attention/hopper.h"
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
    let_next_start(); // every block is resident
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

// Keys that justify a block of their own: writing and joining parts takes as long as 1,024 keys.
constexpr int HOPPER_LEAST_KEYS = 1024;

int Optional::attention(Context& ctx, const AttentionArgs& p, int D) {
    if (!ctx.gpu->hopper || D != HopperAttention::D) return 0;
    const int G = p.H / p.K, tokens = QUERY_ROWS / G, tiles = (p.b.N - p.first + tokens - 1) / tokens;
    const int blocks = tiles * p.K, wanted = std::min(ctx.gpu->sms / blocks, p.b.longest / HOPPER_LEAST_KEYS);
    const int splits = ctx.invariant || p.lse ? 1 : std::max(1, wanted);
    const size_t C = (size_t)p.H * D, groups = (size_t)1 << 28; // (an upper bound: pages are always inside)
    const auto map_pages = [&](const bf16* cache) {
        return tensor_map(cache, {{64, 1, 64}, {8, (size_t)D, 8}, {2, 64, 2}, {groups, 8 * (size_t)D, 2}});
    };
    const HopperAttention::Maps maps = {
        tensor_map(p.q, {{(size_t)D, 1, 64}, {(size_t)p.H, (size_t)D, G}, {(size_t)p.b.N, C, tokens}}),
        map_pages(p.keys), map_pages(p.values)};
    launch(ctx, attention_hopper_kernel, std::min(blocks * splits, ctx.gpu->sms), HopperAttention::THREADS,
           HopperAttention::SHARED, maps, p, tiles, splits, ctx.gpu->arrived);
    return splits;
}
