// gpu/backward/adamw.cu: grad_norm and adamw.
#include "qwen3.cu"

// ---- grad_norm. A block a piece of NORM_PIECE numbers; then one block adds the pieces.
__global__ void __launch_bounds__(256) grad_squares_kernel(double* partial, const float* g, size_t n) {
    let_next_start();
    wait_for_previous();
    const size_t first = blockIdx.x * NORM_PIECE + threadIdx.x, last = min(n, (blockIdx.x + 1) * NORM_PIECE);
    double sum = 0;
    for (size_t i = first; i < last; i += 256) sum += (double)g[i] * (double)g[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(1024) grad_norm_kernel(double* norm, const double* partial, size_t pieces) {
    let_next_start();
    wait_for_previous();
    double sum = 0;
    for (size_t p = threadIdx.x; p < pieces; p += 1024) sum += partial[p];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = sqrt(sum);
}
void grad_norm_gpu(Context& ctx, double* norm, double* partial, const float* g, size_t n) {
    const size_t pieces = (n + NORM_PIECE - 1) / NORM_PIECE;
    launch(ctx, grad_squares_kernel, (unsigned)pieces, 256, 0, partial, g, n);
    launch(ctx, grad_norm_kernel, 1, 1024, 0, norm, partial, pieces);
}

// ---- adamw. A thread a number.
struct AdamWStep { float beta1, beta2, root, keep, pace, eps, clip, copy; };
__global__ void adamw_kernel(bf16* stored, float* p, float* m, float* v, const float* g, const double* norm, size_t n,
                             AdamWStep a) {
    let_next_start();
    wait_for_previous();
    const double length = *norm;
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (!isfinite(length) || i >= n) return;
    const float gi = g[i] * (float)(a.clip > 0 ? fmin(1., a.clip / (length + 1e-6)) : 1.);
    const float mi = m[i] + (gi - m[i]) * (1 - a.beta1), vi = v[i] * a.beta2 + gi * gi * (1 - a.beta2);
    const float pi = p[i] * a.keep - a.pace * (mi / (sqrtf(vi) / a.root + a.eps));
    m[i] = mi, v[i] = vi, p[i] = pi;
    stored[i] = round_bf16(pi * a.copy);
}
void adamw_gpu(Context& ctx, bf16* stored, float* p, float* m, float* v, const float* g, const double* norm,
                      size_t n, const AdamW& a) {
    const float first = (float)(1 - std::pow((double)a.beta1, (double)a.step));
    const float root = (float)std::sqrt(1 - std::pow((double)a.beta2, (double)a.step));
    const float keep = (float)(1 - (double)a.lr * a.decay);
    const AdamWStep s = {a.beta1, a.beta2, root, keep, a.lr / first, a.eps, a.clip, a.copy};
    launch(ctx, adamw_kernel, (unsigned)((n + 255) / 256), 256, 0, stored, p, m, v, g, norm, n, s);
}
