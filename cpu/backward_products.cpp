// cpu/backward_products.cpp: gradients of products on the CPU.
#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/products.h"
#include "cpu/scratch.h"
#include "cpu/tiles.h"
#include "model/instances.h"
#include <vector>

// ---- Sums of rows, each times a number, by the loop of the CPU's instruction set. Its inputs are packed before:
// numbers of `rows` sums side by side for each term, and rows of `columns` numbers, both as acc<T>.
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
constexpr int OUTER_TERMS = 256; // packed rows of so many stay in the first-level cache
constexpr size_t OUTER_ALONE = 400'000; // multiplications that one thread does as fast as several

// packed (terms, columns): row(t)[i0 + i], zeros past the I numbers of a row
template <class T, class Row>
static void pack_rows(acc<T>* packed, Row row, int t0, int terms, int i0, int columns, int I) {
    lanes<T> v;
    for (int t = t0; t < t0 + terms; t++, packed += columns)
        for (int i = 0; i < columns; i += LANES) {
            load_some(v, row(t) + i0 + std::min(i, I - i0), std::clamp(I - i0 - i, 0, LANES));
            memcpy(packed + i, &v, sizeof v);
        }
}
// close(a, i, sum) for every a < A, i < I with one sum in the order of t < terms,
//     sum = open(a, i) + sum_t (factor * u[t * u_term + a * u_row]) * row(t)[i]
// A task covers the columns of one tile and some blocks of its rows.
template <class T, class Row, class Open, class Close>
static void outer_sums(int A, int I, int terms, const T* u, size_t u_term, size_t u_row, acc<T> factor, Row row,
                       Open open, Close close) {
    const OuterLoop<acc<T>> loop = best_loops<T>().outer;
    const int R = loop.rows, C = loop.columns, blocks = (A + R - 1) / R, across = (I + C - 1) / C;
    const bool alone = (size_t)A * I * terms <= OUTER_ALONE;
    const int groups = alone ? 1 : std::clamp(4 * thread_count() / across, 1, (blocks + 3) / 4);
    static thread_local std::vector<acc<T>> kept;
    acc<T>* const factors = at_least(kept, (size_t)blocks * R * terms); // (blocks, terms, R)
    #pragma omp parallel if (!alone)
    {
        #pragma omp for schedule(static)
        for (int b = 0; b < blocks; b++)
            for (int t = 0; t < terms; t++)
                for (int r = 0; r < R; r++) {
                    const int a = b * R + r;
                    factors[((size_t)b * terms + t) * R + r] = a < A ? factor * to_acc(u[t * u_term + a * u_row]) : 0;
                }
        static thread_local std::vector<acc<T>> kept_rows, kept_sums;
        acc<T>* const packed = at_least(kept_rows, OUTER_TERMS * C);
        acc<T>* const sums = at_least(kept_sums, (size_t)blocks * R * C);
        #pragma omp for schedule(static)
        for (int task = 0; task < groups * across; task++) {
            const int b0 = task % groups * blocks / groups, b1 = (task % groups + 1) * blocks / groups;
            const int a0 = b0 * R, a1 = std::min(A, b1 * R), i0 = task / groups * C, columns = std::min(C, I - i0);
            if (columns < C || a1 < b1 * R) std::fill_n(sums, (size_t)(b1 * R - a0) * C, 0);
            for (int a = a0; a < a1; a++)
                for (int i = 0; i < columns; i++) sums[(size_t)(a - a0) * C + i] = open(a, i0 + i);
            for (int t = 0, some; t < terms; t += some) {
                some = std::min(OUTER_TERMS, terms - t);
                pack_rows<T>(packed, row, t, some, i0, C, I);
                for (int b = b0; b < b1; b++)
                    loop.add(sums + (size_t)(b - b0) * R * C, C, factors + ((size_t)b * terms + t) * R, packed, some);
            }
            for (int a = a0; a < a1; a++)
                for (int i = 0; i < columns; i++) close(a, i0 + i, sums[(size_t)(a - a0) * C + i]);
        }
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
            for (int r = 0; r < rows; r++) WeightRows<T>(W, b, (size_t)(r0 + r)).widen(wide + r * in, 0, W.in);
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
template <class T> static acc<T>* adapter_backward(const T* dh, const Linear<T>& W, int N) {
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
    acc<T>* ahead = a.rank ? adapter_backward(dh, W, N) : nullptr;
    for (int j = 0; j < a.modules && a.dora.on && a.dropout; j++) { // drop_j(t) - t, t rounded to T
        static thread_local std::vector<T> kept;
        T* const t = at_least(kept, N * in);
        const T* off = a.dora.off + W.first_row(a.block[j]);
        transposed_product_cpu(W.block(a.block[j]), off, out, N, (const acc<T>*)nullptr,
                               [&](int n, int i, acc<T> sum) { t[n * in + i] = to_stored<T>(sum); });
        const T* some = dropped_cpu(t, W, j, N);
        for (size_t i = 0; i < N * in; i++) ahead[i] += to_acc(some[i]) * drop_scale(a) - to_acc(t[i]);
    }
    transposed_product_cpu(W, dy, out, N, ahead,
                           [&](int n, int i, acc<T> sum) { dx[n * in + i] = to_stored<T>(sum); });
}

// (Beside the gradients, since B A is a product of their kind.)
template <class T> void dora_norm_cpu(Context&, const Linear<T>& W) {
    constexpr int ROWS = 256;
    const Adapter<T>& a = W.adapter;
    const Dora<T>& d = a.dora;
    const size_t in = W.in, ld = a.width();
    static thread_local std::vector<acc<T>> kept;
    acc<T>* const sums = at_least(kept, ROWS * in);
    std::fill_n(d.norm, W.out(), std::numeric_limits<acc<T>>::infinity()), std::fill_n(d.c, W.out(), (acc<T>)1);
    for (int j = 0; j < a.modules; j++)
        for (int b = a.block[j], r0 = 0; r0 < W.rows[b]; r0 += ROWS) {
            const int rows = std::min(ROWS, W.rows[b] - r0), first = W.first_row(b) + r0;
            outer_sums(rows, W.in, a.rank, a.B + first * ld + j * a.rank, 1, ld, 1, Rows<T>{a.A + j * a.rank * in, in},
                       FROM_ZERO, [&](int r, int i, acc<T> sum) { sums[r * in + i] = sum; });
            #pragma omp parallel for schedule(static) if (rows * in > 20000)
            for (int r = 0; r < rows; r++) {
                static thread_local std::vector<acc<T>> kept_row;
                acc<T>*const w = at_least(kept_row, in), sum = 0;
                WeightRows<T>(W, b, (size_t)(r0 + r)).widen(w, 0, W.in);
                for (size_t i = 0; i < in; i++) w[i] += sums[r * in + i], sum += w[i] * w[i];
                d.norm[first + r] = std::sqrt(sum), d.c[first + r] = d.m[first + r] / d.norm[first + r];
            }
        }
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
    template void dora_norm_cpu(Context&, const Linear<T>&);                                                     \
    template void linear_backward_weight_cpu(Context&, acc<T>*, const T*, size_t, const T*, int, int, int);      \
    template void lora_backward_weight_cpu(Context&, acc<T>*, const T*, const T*, const Linear<T>&, int);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
