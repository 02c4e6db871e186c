// cpu/backward_products.cpp: gradients of products on the CPU.
#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/products.h"
#include "cpu/scratch.h"
#include "cpu/tiles.h"
#include "model/instances.h"
#include <vector>

// ---- Sums of rows, each times a number. Tiles of 4 by 32 sums stay in registers.
namespace {
template <class X> struct Rows { // row t, and its length
    const X* first;
    size_t apart;
    const X* operator()(int t) const { return first + t * apart; }
};
template <class T> struct BlockRows { // of a Linear's
    const Linear<T>& W;
    const T* operator()(int r) const {
        int b = 0;
        while (r >= W.rows[b]) r -= W.rows[b++];
        return W.w[b] + (size_t)r * W.in;
    }
};
} // namespace
constexpr int OUTER_ROWS = 4, OUTER_COLUMNS = 2 * LANES;

// sums[a][i] += (factor * from[a][t * u_term]) * row(t)[i0 + i], t < terms in this order, i < columns
template <class T, class Row>
static __attribute__((noinline)) void add_outer_tile(acc<T> (&sums)[OUTER_ROWS][OUTER_COLUMNS],
                                                     const T* const (&from)[OUTER_ROWS], size_t u_term, acc<T> factor,
                                                     Row row, int terms, int i0, int columns) {
    lanes<T> s[OUTER_ROWS][2], v[2];
    for (int a = 0; a < OUTER_ROWS; a++) load_lanes(s[a][0], sums[a]), load_lanes(s[a][1], sums[a] + LANES);
    for (int t = 0; t < terms; t++) {
        const auto* x = row(t) + i0;
        load_some(v[0], x, std::min(LANES, columns));
        if (columns > LANES) load_some(v[1], x + LANES, columns - LANES);
        else v[1] = lanes<T>{};
        for (int a = 0; a < OUTER_ROWS; a++) {
            const acc<T> y = factor * to_acc(from[a][t * u_term]);
            s[a][0] += y * v[0], s[a][1] += y * v[1];
        }
    }
    for (int a = 0; a < OUTER_ROWS; a++) memcpy(sums[a], s[a], sizeof s[a]);
}
// close(a, i, sum) for every a < A, i < I with one sum in the order of t < terms,
//     sum = open(a, i) + sum_t (factor * u[t * u_term + a * u_row]) * row(t)[i]
template <class T, class Row, class Open, class Close>
static void outer_sums(int A, int I, int terms, const T* u, size_t u_term, size_t u_row, acc<T> factor, Row row,
                       Open open, Close close) {
    const int across = (I + OUTER_COLUMNS - 1) / OUTER_COLUMNS, tiles = (A + OUTER_ROWS - 1) / OUTER_ROWS * across;
    #pragma omp parallel for schedule(static) if ((size_t)A * I * terms > 50000)
    for (int tile = 0; tile < tiles; tile++) {
        const int a0 = tile / across * OUTER_ROWS, i0 = tile % across * OUTER_COLUMNS;
        const int rows = std::min(OUTER_ROWS, A - a0), columns = std::min(OUTER_COLUMNS, I - i0);
        acc<T> sums[OUTER_ROWS][OUTER_COLUMNS] = {};
        for (int a = 0; a < rows; a++)
            for (int i = 0; i < columns; i++) sums[a][i] = open(a0 + a, i0 + i);
        const T* from[OUTER_ROWS]; // (the last row stands for those that are missing)
        for (int a = 0; a < OUTER_ROWS; a++) from[a] = u + std::min(a0 + a, A - 1) * u_row;
        add_outer_tile<T>(sums, from, u_term, factor, row, terms, i0, columns);
        for (int a = 0; a < rows; a++)
            for (int i = 0; i < columns; i++) close(a0 + a, i0 + i, sums[a][i]);
    }
}
static constexpr auto FROM_ZERO = [](int, int) { return 0; }; // an `open`

// Products with W's transpose: close(n, i, ahead[n][i] + sum_r dy[n * ld + r] W[r][i]), the sum in the order of r.
// Packed rows are widened a few at a time while the sums wait in memory: the same sums in the same order.
template <class T, class Close>
static void transposed_product_cpu(const Linear<T>& W, const T* dy, size_t ld, int N,
                                   const acc<T>* ahead, // (N, W.in), or null: zeros
                                   Close close) {
    const size_t in = W.in;
    auto begin = [&](int n, int i) { return ahead ? ahead[n * in + i] : 0; };
    if (W.format == Format::PLAIN)
        return outer_sums(N, W.in, W.out(), dy, 1, ld, 1, BlockRows<T>{W}, begin, close);
    constexpr int ROWS = 64;
    static thread_local std::vector<acc<T>> kept, kept_sums;
    acc<T> *wide = at_least(kept, ROWS * in), *sums = at_least(kept_sums, N * in);
    const int out = W.out();
    for (int b = 0; b < 3; b++)
        for (int r0 = 0; r0 < W.rows[b]; r0 += ROWS) {
            const int rows = std::min(ROWS, W.rows[b] - r0), first = W.first_row(b) + r0;
            #pragma omp parallel for schedule(static) if (rows * in > 20000)
            for (int r = 0; r < rows; r++) WeightRows<T>(W, b, (size_t)(r0 + r)).widen(wide + r * in, 1, 0, W.in);
            outer_sums(N, W.in, rows, dy + first, 1, ld, 1, Rows<acc<T>>{wide, in},
                       [&](int n, int i) { return first ? sums[n * in + i] : begin(n, i); },
                       [&](int n, int i, acc<T> sum) {
                           if (first + rows == out) close(n, i, sum);
                           else sums[n * in + i] = sum;
                       });
        }
}

template <class T>
void head_backward_cpu(Context&, T* dnormed, const T* dlogits, size_t ld, const acc<T>* factor, const int* rows,
                       const Linear<T>& W, int R) {
    const size_t C = W.in;
    transposed_product_cpu(W, dlogits, ld, R, (const acc<T>*)nullptr,
                           [&](int r, int i, acc<T> sum) { dnormed[rows[r] * C + i] = to_stored<T>(sum * factor[r]); });
}

// The adapter's part of dx, (N, W.in): sum_j drop_j(dh_j A_j).
template <class T> static const acc<T>* adapter_backward(const T* dh, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const int in = W.in, rank = a.rank;
    const acc<T> scale = a.dropout ? 1 / (1 - (acc<T>)a.dropout->p) : 1;
    static thread_local std::vector<acc<T>> kept;
    acc<T>* out = at_least(kept, (size_t)N * in);
    #pragma omp parallel for schedule(static) if ((size_t)N * in > 2000)
    for (int n = 0; n < N; n++)
        for (int k = 0; k < in; k += LANES) {
            const int some = std::min(LANES, in - k);
            lanes<T> sum = {}, part, v;
            for (int j = 0; j < a.modules; j++) {
                part = lanes<T>{};
                for (int i = j * rank; i < (j + 1) * rank; i++) {
                    load_some(v, a.A + (size_t)i * in + k, some);
                    part += to_acc(dh[n * a.width() + i]) * v;
                }
                for (int l = 0; l < LANES && a.dropout; l += 8) {
                    const uint32_t mask = dropout_mask(*a.dropout, a.dropout->token[n], a.module[j], (k + l) / 8);
                    for (int i = 0; i < 8; i++) part[l + i] *= mask >> i & 1 ? scale : 0;
                }
                sum += part;
            }
            memcpy(out + (size_t)n * in + k, &sum, some * sizeof(acc<T>));
        }
    return out;
}

template <class T>
void linear_backward_input_cpu(Context&, T* dx, T* dh, acc<T>* dB, const T* dy, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, out = W.out(), ld = a.width();
    for (int j = 0; j < a.modules; j++) {
        const size_t first = W.first_row(a.block[j]), column = (size_t)j * a.rank;
        outer_sums(N, a.rank, W.rows[a.block[j]], dy + first, 1, out, 1,
                   Rows<T>{a.B + first * ld + column, ld}, FROM_ZERO,
                   [&](int n, int i, acc<T> sum) { dh[n * ld + column + i] = to_stored<T>(sum); });
        auto B = [&](int r, int i) -> acc<T>& { return dB[(first + r) * ld + column + i]; };
        outer_sums(W.rows[a.block[j]], a.rank, N, dy + first, out, 1, a.s,
                   Rows<T>{a.h + column, ld}, B, [&](int r, int i, acc<T> sum) { B(r, i) = sum; });
    }
    const acc<T>* ahead = a.rank ? adapter_backward(dh, W, N) : nullptr;
    transposed_product_cpu(W, dy, out, N, ahead,
                           [&](int n, int i, acc<T> sum) { dx[n * in + i] = to_stored<T>(sum); });
}

template <class T>
void linear_backward_weight_cpu(Context&, acc<T>* dW, const T* dy, size_t ld, const T* x, int N, int out, int in) {
    auto at = [=](int r, int i) -> acc<T>& { return dW[(size_t)r * in + i]; };
    outer_sums(out, in, N, dy, ld, 1, 1, Rows<T>{x, (size_t)in}, at,
               [&](int r, int i, acc<T> sum) { at(r, i) = sum; });
}

template <class T>
void lora_backward_weight_cpu(Context&, acc<T>* dA, const T* dh, const T* x, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, ld = a.width();
    for (int j = 0; j < a.modules; j++) {
        const size_t column = (size_t)j * a.rank;
        const T* seen = dropped_cpu(x, W, j, N);
        auto A = [&](int r, int i) -> acc<T>& { return dA[(column + r) * in + i]; };
        outer_sums(a.rank, W.in, N, dh + column, ld, 1, drop_scale(a), Rows<T>{seen, in}, A,
                   [&](int r, int i, acc<T> sum) { A(r, i) = sum; });
    }
}

#define INSTANTIATE(T)                                                                                           \
    template void head_backward_cpu(Context&, T*, const T*, size_t, const acc<T>*, const int*, const Linear<T>&, \
                                    int);                                                                        \
    template void linear_backward_input_cpu(Context&, T*, T*, acc<T>*, const T*, const Linear<T>&, int);         \
    template void linear_backward_weight_cpu(Context&, acc<T>*, const T*, size_t, const T*, int, int, int);      \
    template void lora_backward_weight_cpu(Context&, acc<T>*, const T*, const T*, const Linear<T>&, int);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
