// cpu/products.cpp: products with a Linear, its adapter, or each row's adapter.
#include "cpu/adapter_rows.h"
#include "cpu/ops.h"
#include "cpu/product_input.h"
#include "cpu/products.h"
#include "cpu/scratch.h"
#include "model/instances.h"
#include <vector>

// A task is a few rows of W: a thread streams its own rows, and keeps them in its cache for all tokens, TILE_TOKENS at
// a time. Each tile y goes to use(y, block, row, rows, token, tokens): `rows` rows of W from `row` on, all of one
// block; y[n * TILE_ROWS + i] belongs to token + n and row + i.
template <class T, class Use>
static void product_tiles(const Context& ctx, const Linear<T>& W, const T* x, int N, Use use) {
    const ProductInput<T> input(ctx, W, x, N);
    const int task_rows = input.task_rows;
    int first_task[4] = {};
    for (int b = 0; b < 3; b++) first_task[b + 1] = first_task[b] + (W.rows[b] + task_rows - 1) / task_rows;
    #pragma omp parallel for schedule(guided, 2) if ((size_t)W.out() * W.in * N > 50000)
    for (int task = 0; task < first_task[3]; task++) {
        int b = 0;
        while (task >= first_task[b + 1]) b++;
        const int r0 = (task - first_task[b]) * task_rows, r1 = std::min(W.rows[b], r0 + task_rows);
        const int base = W.first_row(b);
        acc<T> y[TILE_ROWS * TILE_TOKENS];
        for (int n0 = 0; n0 < N; n0 += TILE_TOKENS) {
            const int tokens = std::min(TILE_TOKENS, N - n0);
            for (int r = r0; r < r1; r += TILE_ROWS) {
                const int rows = std::min(TILE_ROWS, r1 - r);
                input.tile(y, WeightRows<T>(W, b, r), rows, (r - r0) / TILE_ROWS, n0, tokens);
                use(y, b, base + r, rows, n0, tokens);
            }
        }
    }
}
template <class T, class Store>
static void product_cpu(const Context& ctx, const Linear<T>& W, const T* x, int N, Store store) {
    product_tiles(ctx, W, x, N, [&](const acc<T>* y, int, int row, int rows, int token, int tokens) {
        for (int n = 0; n < tokens; n++)
            for (int i = 0; i < rows; i++) store(token + n, row + i, y[n * TILE_ROWS + i]);
    });
}

template <class T> const T* dropped_cpu(const T* x, const Linear<T>& W, int j, int N) {
    const Dropout* d = W.adapter.dropout;
    if (!d) return x;
    const int in = W.in, module = W.adapter.module[j];
    static thread_local std::vector<T> kept;
    T* out = at_least(kept, (size_t)N * in);
    #pragma omp parallel for schedule(static) if ((size_t)N * in > 2000)
    for (int n = 0; n < N; n++)
        for (int k = 0; k < in; k += 8) {
            const uint32_t mask = dropout_mask(*d, d->token[n], module, k / 8);
            for (int i = k; i < std::min(in, k + 8); i++) {
                const size_t at = (size_t)n * in + i;
                out[at] = mask >> (i - k) & 1 ? x[at] : to_stored<T>((acc<T>)0);
            }
        }
    return out;
}

template <class T> void lora_down_cpu(Context& ctx, T* h, const T* x, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t ld = a.width();
    const int together = a.dropout ? 1 : a.modules; // modules that see the same x
    const acc<T> scale = drop_scale(a);
    for (int j = 0; j < a.modules; j += together) {
        Linear<T> A;
        A.w[0] = a.A + (size_t)j * a.rank * W.in, A.rows[0] = together * a.rank, A.in = W.in;
        T* column = h + (size_t)j * a.rank;
        product_cpu(ctx, A, dropped_cpu(x, W, j, N), N,
                    [=](int n, int r, acc<T> y) { column[n * ld + r] = to_stored<T>(y * scale); });
    }
}

template <class T>
static __attribute__((noinline)) void add_adapter_part(acc<T>* y, const Adapter<T>& a, int block, int row, int rows,
                                                       const T* h) {
    add_adapter(y, a, block, row, rows, h);
}

// x W^T + s B h, where of(n) is token n's adapter, or null.
template <class T, class Of, class Store>
static void product_with_adapters(const Context& ctx, const Linear<T>& W, const T* x, int N, Of of, Store store) {
    product_tiles(ctx, W, x, N, [&](acc<T>* y, int block, int row, int rows, int token, int tokens) {
        for (int n = token; n < token + tokens; n++, y += TILE_ROWS) {
            if (const Adapter<T>* a = of(n)) add_adapter_part(y, *a, block, row, rows, a->h + n * a->width());
            for (int i = 0; i < rows; i++) store(n, row + i, y[i]);
        }
    });
}

// W (drop(x) - x) of DoRA's modules, (N, W.out), or null without dropout. The difference is rounded to T.
template <class T> static const acc<T>* dora_off(const Context& ctx, const T* x, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    if (!a.dropout) return nullptr;
    const size_t out = W.out(), in = W.in;
    static thread_local std::vector<acc<T>> kept;
    static thread_local std::vector<T> kept_x;
    acc<T>* const off = at_least(kept, N * out);
    T* const less = at_least(kept_x, N * in);
    std::fill_n(off, N * out, (acc<T>)0);
    for (int j = 0; j < a.modules; j++) {
        const T* some = dropped_cpu(x, W, j, N);
        for (size_t i = 0; i < N * in; i++) less[i] = to_stored<T>(to_acc(some[i]) * drop_scale(a) - to_acc(x[i]));
        acc<T>* const to = off + W.first_row(a.block[j]);
        product_cpu(ctx, W.block(a.block[j]), less, N, [=](int n, int r, acc<T> y) { to[n * out + r] = y; });
    }
    return off;
}

template <class T, class Store>
static void adapted_product_cpu(Context& ctx, const Linear<T>& W, const T* x, int N, Store store) {
    const auto own = [&](int) { return &W.adapter; };
    if (!W.adapter.rank) return product_cpu(ctx, W, x, N, store);
    lora_down_cpu(ctx, W.adapter.h, x, W, N);
    if (!W.adapter.dora.on) return product_with_adapters(ctx, W, x, N, own, store);
    const acc<T>* off = dora_off(ctx, x, W, N);
    const size_t ld = W.out();
    product_with_adapters(ctx, W, x, N, own, [&](int n, int r, acc<T> y) {
        store(n, r, dora_row(W, n, r, y, off ? off[n * ld + r] : 0));
    });
}

template <class T> void linear_cpu(Context& ctx, T* out, const T* x, const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(ctx, W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}

template <class T>
void linear_add_cpu(Context& ctx, acc<T>* out, const acc<T>* residual, const T* x, const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(ctx, W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

template <class T>
void rows_linear_cpu(Context& ctx, T* out, const T* x, const Linear<T>& W, const Adapter<T>* const* of, int N) {
    const size_t ld = W.out();
    product_with_adapters(ctx, W, x, N, [=](int n) { return of[n]; },
                          [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}
template <class T>
void rows_linear_add_cpu(Context& ctx, acc<T>* out, const acc<T>* residual, const T* x, const Linear<T>& W,
                         const Adapter<T>* const* of, int N) {
    const size_t ld = W.out();
    product_with_adapters(ctx, W, x, N, [=](int n) { return of[n]; },
                          [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

template <class T>
void head_cpu(Context& ctx, acc<T>* logits, T* picked, const T* x, const int* rows, const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++) std::copy_n(x + (size_t)rows[r] * W.in, W.in, picked + (size_t)r * W.in);
    const size_t V = W.out();
    product_cpu(ctx, W, picked, R, [=](int r, int v, acc<T> y) { logits[r * V + v] = y; });
}

#define INSTANTIATE(T)                                                                                              \
    template const T* dropped_cpu(const T*, const Linear<T>&, int, int);                                            \
    template void lora_down_cpu(Context&, T*, const T*, const Linear<T>&, int);                                     \
    template void linear_cpu(Context&, T*, const T*, const Linear<T>&, int);                                        \
    template void linear_add_cpu(Context&, acc<T>*, const acc<T>*, const T*, const Linear<T>&, int);                \
    template void rows_linear_cpu(Context&, T*, const T*, const Linear<T>&, const Adapter<T>* const*, int);         \
    template void rows_linear_add_cpu(Context&, acc<T>*, const acc<T>*, const T*, const Linear<T>&,                 \
                                      const Adapter<T>* const*, int);                                               \
    template void head_cpu(Context&, acc<T>*, T*, const T*, const int*, const Linear<T>&, int);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
