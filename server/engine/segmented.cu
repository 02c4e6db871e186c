// segmented.cu: launches the kernels of segmented.h, and the products that add their sums.
#include "server/engine/row_products.h"
#ifdef QWEN3_GPU
#ifndef QWEN3_PORTABLE
#include "gpu/optional_products.h"
#endif
#include "server/engine/segmented.h"

namespace server {

// sums = (residual, or 0) + the adapters' part.
static void add_adapters(Context& ctx, const float* residual, const bf16* x, const Linear<bf16>& W,
                         RowAdapters adapters, int N) {
    if (W.in % 8) DIE("adapters of rows on %d columns: the GPU takes multiples of 8", W.in);
    const unsigned groups = (unsigned)(N + SEGMENT - 1) / SEGMENT, blocks = (unsigned)(W.out() + 127) / 128;
    launch(ctx, segment_down_kernel<RowAdapters>, dim3(4, (unsigned)N), 256, 0, x, adapters, N, W.in);
    launch(ctx, segment_up_kernel<RowAdapters>, dim3(blocks, groups), 256, 0, residual, adapters, N, W.out(),
           W.first_row(1), W.first_row(2));
}

struct RowsEpilogue : StoreEpilogue<bf16> { // linear
    static constexpr int OUTPUTS = 0; // (`four` is not of `values`)
    static constexpr bool ADDS = true, ADAPTS = false;
    const float* sums;
    RowsEpilogue(bf16* out, size_t ld, const float* sums) : StoreEpilogue(out, ld), sums(sums) {}
    __device__ float old(int n, int r) const { return sums[n * ld + r]; }
    __device__ float4 old_four(int n, int r) const { return *(const float4*)(sums + n * ld + r); }
    __device__ void one(bool inside, int n, int r, float y, float old) { StoreEpilogue::one(inside, n, r, y + old, 0); }
    __device__ void four(int n, int r, const float4& y, const float4& old) {
        store_four(out + n * ld + r, make_float4(y.x + old.x, y.y + old.y, y.z + old.z, y.w + old.w));
    }
};
struct RowsSwigluEpilogue : SwigluEpilogue { // norm_linear_swiglu's product
    static constexpr int OUTPUTS = 0;
    static constexpr bool ADAPTS = false;
    const float* sums; // (N,2F)
    RowsSwigluEpilogue(bf16* out, size_t F, const float* sums) : SwigluEpilogue(out, nullptr, F), sums(sums) {}
    __device__ void one(bool inside, int n, int f, float gate, float up) {
        if (inside) SwigluEpilogue::one(true, n, f, gate + sums[n * 2 * F + f], up + sums[(n * 2 + 1) * F + f]);
    }
    __device__ void four(int n, int f, const float4& g, const float4& u) {
        const float4 a = *(const float4*)(sums + n * 2 * F + f), b = *(const float4*)(sums + (n * 2 + 1) * F + f);
        SwigluEpilogue::four(n, f, {g.x + a.x, g.y + a.y, g.z + a.z, g.w + a.w},
                             {u.x + b.x, u.y + b.y, u.z + b.z, u.w + b.w});
    }
};

void rows_linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, RowAdapters adapters, int N) {
    add_adapters(ctx, nullptr, x, W, adapters, N);
    product_gpu(ctx, RowsEpilogue(out, W.out(), adapters.sums), x, W, N);
}
void rows_linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W,
                                RowAdapters adapters, int N) {
    add_adapters(ctx, residual, x, W, adapters, N);
    linear_add_gpu(ctx, out, adapters.sums, x, W, N);
}
void rows_linear_swiglu_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, RowAdapters adapters,
                                   int N) {
    add_adapters(ctx, nullptr, x, W, adapters, N);
    product_gpu(ctx, RowsSwigluEpilogue(out, W.rows[0], adapters.sums), x, W, N);
}

} // namespace server
#endif // QWEN3_GPU
