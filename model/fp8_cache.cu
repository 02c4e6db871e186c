// model/fp8_cache.cu: an FP8 cache's pages as bf16, for attention of several tokens.
#if defined(QWEN3_GPU) || defined(QWEN3_EMULATED)
#include "qwen3.cu"

// That kernel reads bf16: the pages that it will read of a layer are widened first, into pages of the same numbers.
// Grid: (K, blocks); a block takes every gridDim.y-th page of each sequence that has rows from `first` on. Bound by
// memory bandwidth: 3 bytes a number, and 2 when attention reads it.
template <int D>
__global__ void __launch_bounds__(256) widen_pages_kernel(bf16* to_keys, bf16* to_values, bf16* keys, bf16* values,
                                                          Batch b, int first, int K) {
    __shared__ int last[256], count; // the sequences' last rows, of 256 rows
    let_next_start();
    wait_for_previous();
    const int kv = blockIdx.x, row = threadIdx.x * 8 / D;
    for (int n0 = first; n0 < b.N; n0 += 256) {
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        const int n = n0 + (int)threadIdx.x;
        if (n < b.N && b.seq[n] >= 0 && (n + 1 == b.N || b.seq[n + 1] != b.seq[n])) last[atomicAdd(&count, 1)] = n;
        __syncthreads();
        for (int i = 0; i < count && row < PAGE; i++) {
            const int length = b.pos[last[i]] + 1, *table = b.pages + (size_t)b.seq[last[i]] * b.max_pages;
            for (int page = blockIdx.y; page * PAGE < length; page += gridDim.y) {
                const size_t at = kv_offset(table[page], kv, 0, K, D) + threadIdx.x * 8;
                const auto widen = [&](bf16* to, bf16* cache) {
                    const uint8_t* rows = (const uint8_t*)cache + fp8_rows(table[page], kv, K, D);
                    const bool there = page * PAGE + row < length; // the rows after them must be finite
                    const uint2 raw = there ? *(const uint2*)(rows + threadIdx.x * 8) : uint2{0, 0};
                    const float factor = there ? fp8_factor(rows[fp8_exponents(kv, K, D) + row]) : 1;
                    const uint4 v = widen_e4m3(raw);
                    *(uint4*)(to + at) = {pack(low(v.x) * factor, high(v.x) * factor),
                                          pack(low(v.y) * factor, high(v.y) * factor),
                                          pack(low(v.z) * factor, high(v.z) * factor),
                                          pack(low(v.w) * factor, high(v.w) * factor)};
                };
                widen(to_keys, keys), widen(to_values, values);
            }
        }
        __syncthreads();
    }
}
#ifdef QWEN3_GPU
LayerCache<bf16> widen_pages_gpu(Context& ctx, const LayerCache<bf16>& cache, const Batch& b, const HeadShape& shape,
                                 int first) {
    const LayerCache<bf16> to = {ctx.gpu->widened, ctx.gpu->widened + ctx.gpu->widened_numbers / 2};
    const dim3 grid((unsigned)shape.K, (unsigned)std::max(1, 8 * ctx.gpu->sms / shape.K));
    launch(ctx, shape.D == 128 ? widen_pages_kernel<128> : widen_pages_kernel<64>, grid, 256, 0, to.keys, to.values,
           cache.keys, cache.values, b, first, shape.K);
    return to;
}
#endif
#endif
