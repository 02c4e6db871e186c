// cpu/forward.cpp: the forward ops on the CPU that are no products by themselves, in Book I's order.
#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/tiles.h"
#include "model/instances.h"

// ---- embed's definition is fast enough. (`flatten`: compiled here, with this file's optimisation.) A packed embedding
// is rounded where packed weights are.
template <class T>
__attribute__((flatten)) void embed_cpu(Context&, acc<T>* x, const Linear<T>& table, const Batch& b, int C) {
    embed(x, table, b, C);
    if (table.format != Format::PLAIN && takes_bf16<T>())
        for (size_t i = 0; i < (size_t)b.N * C; i++) x[i] = to_acc(to_stored<T>(x[i]));
}

template <class A> __attribute__((flatten)) void add_noise_cpu(Context&, A* x, const Noise& noise, int N, int C) {
    add_noise(x, noise, N, C);
}

template <class T>
void rmsnorm_cpu(Context&, T* out, const acc<T>* x, const T* w, int N, int C, float eps) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const acc<T>* row = x + (size_t)n * C;
        const acc<T> r = inverse_rms(row, C, eps);
        for (int i = 0; i < C; i++) out[(size_t)n * C + i] = to_stored<T>(row[i] * r * to_acc(w[i]));
    }
}

template <class T>
void norm_linear_cpu(Context& ctx, T* out, T* normed, const acc<T>* x, const T* w, const Linear<T>& W, int N,
                     float eps) {
    rmsnorm_cpu(ctx, normed, x, w, N, W.in, eps);
    linear_cpu(ctx, out, normed, W, N);
}

template <class T>
void qknorm_rope_kv_cpu(Context&, T* q, const LayerCache<T>& cache, const T* qkv, const HeadNorms<T>& norms,
                        const Batch& b, const HeadShape& shape) {
    const int H = shape.H, K = shape.K, D = shape.D;
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const T* row = qkv + (size_t)n * (H + 2 * K) * D;
        const acc<T>* angle = norms.rope + (size_t)b.pos[n] * D;
        auto norm_rope = [&](T* out, const T* head, const T* w) {
            const acc<T> r = inverse_rms(head, D, shape.eps);
            for (int i = 0; i < D / 2; i++) {
                const acc<T> u = to_acc(head[i]) * r * to_acc(w[i]);
                const acc<T> v = to_acc(head[i + D / 2]) * r * to_acc(w[i + D / 2]);
                out[i] = to_stored<T>(u * angle[2 * i] - v * angle[2 * i + 1]);
                out[i + D / 2] = to_stored<T>(v * angle[2 * i] + u * angle[2 * i + 1]);
            }
        };
        for (int h = 0; h < H; h++) norm_rope(q + ((size_t)n * H + h) * D, row + h * D, norms.q);
        for (int h = 0; h < K; h++) {
            T key[MAX_HEAD];
            norm_rope(key, row + (H + h) * D, norms.k);
            store_kv(cache.keys, b.fp8, b.slot[n], h, key, K, D);
            store_kv(cache.values, b.fp8, b.slot[n], h, row + (H + K + h) * D, K, D);
        }
    }
}

template <class T>
void attend_cpu(Context& ctx, T* out, acc<T>* lse, T* q, const LayerCache<T>& cache, const T* qkv,
                const HeadNorms<T>& norms, const Batch& b, const HeadShape& shape) {
    qknorm_rope_kv_cpu(ctx, q, cache, qkv, norms, b, shape);
    attention_cpu(ctx, out, lse, q, cache, b, shape);
}

template <class T> void swiglu_cpu(Context&, T* out, const T* gate_up, int N, int F) {
    const int COLUMNS = 512, across = (F + COLUMNS - 1) / COLUMNS; // of a task
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int task = 0; task < N * across; task++) {
        const int begin = task % across * COLUMNS, end = std::min(F, begin + COLUMNS);
        const T *gate = gate_up + (size_t)(task / across) * 2 * F, *up = gate + F;
        T* row = out + (size_t)(task / across) * F;
        for (int i = begin; i < end; i += LANES) {
            const int n = std::min(LANES, F - i);
            lanes<T> g, u, e;
            load_some(g, gate + i, n);
            load_some(u, up + i, n);
            one_plus_exp_minus(e, g);
            u *= g / e;
            store_some(row + i, u, n);
        }
    }
}

template <class T>
void norm_linear_swiglu_cpu(Context& ctx, T* out, T* gate_up, T* normed, const acc<T>* x, const T* w,
                            const Linear<T>& W, int N, float eps) {
    norm_linear_cpu(ctx, gate_up, normed, x, w, W, N, eps);
    swiglu_cpu(ctx, out, gate_up, N, W.rows[0]);
}

template <class T>
void mlp_cpu(Context& ctx, acc<T>* out, T* hidden, T* gate_up, T* normed, const acc<T>* x, const T* w,
             const Linear<T>& up, const Linear<T>& down, int N, float eps) {
    norm_linear_swiglu_cpu(ctx, hidden, gate_up, normed, x, w, up, N, eps);
    linear_add_cpu(ctx, out, x, hidden, down, N);
}

#define INSTANTIATE(T)                                                                                                \
    template void embed_cpu(Context&, acc<T>*, const Linear<T>&, const Batch&, int);                                  \
    template void rmsnorm_cpu(Context&, T*, const acc<T>*, const T*, int, int, float);                                \
    template void norm_linear_cpu(Context&, T*, T*, const acc<T>*, const T*, const Linear<T>&, int, float);           \
    template void qknorm_rope_kv_cpu(Context&, T*, const LayerCache<T>&, const T*, const HeadNorms<T>&, const Batch&, \
                                     const HeadShape&);                                                               \
    template void attend_cpu(Context&, T*, acc<T>*, T*, const LayerCache<T>&, const T*, const HeadNorms<T>&,          \
                             const Batch&, const HeadShape&);                                                         \
    template void swiglu_cpu(Context&, T*, const T*, int, int);                                                       \
    template void norm_linear_swiglu_cpu(Context&, T*, T*, T*, const acc<T>*, const T*, const Linear<T>&, int, float); \
    template void mlp_cpu(Context&, acc<T>*, T*, T*, T*, const acc<T>*, const T*, const Linear<T>&, const Linear<T>&, \
                          int, float);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
#ifdef QWEN3_DOUBLE
template void add_noise_cpu(Context&, double*, const Noise&, int, int);
#else
template void add_noise_cpu(Context&, float*, const Noise&, int, int); // of bf16 and of float
#endif
