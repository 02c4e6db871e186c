// cpu/experts.cpp: the choice of experts, and their MLPs, an expert at a time.
#include "cpu/ops.h"
#include "cpu/scratch.h"
#include "model/instances.h"
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

// Softmax of a row of scores, then its k experts, ascending, and their shares.
template <class A> static void choose(A* p, int* expert, A* share, int E, int k, bool normed) {
    const A top = *std::max_element(p, p + E);
    A all = 0, sum = 0;
    for (int e = 0; e < E; e++) all += p[e] = std::exp(p[e] - top);
    for (int e = 0; e < E; e++) p[e] /= all;
    // The k largest so far, largest first; insertion keeps the first of equal ones ahead.
    int chosen = 0;
    for (int e = 0; e < E; e++) {
        int at = chosen;
        while (at > 0 && p[e] > p[expert[at - 1]]) at--;
        if (at >= k) continue;
        chosen = std::min(k, chosen + 1);
        for (int j = chosen - 1; j > at; j--) expert[j] = expert[j - 1];
        expert[at] = e;
    }
    std::sort(expert, expert + k);
    for (int j = 0; j < k; j++) sum += share[j] = p[expert[j]];
    for (int j = 0; j < k && normed; j++) share[j] /= sum;
}

template <class T>
void route_cpu(Context& ctx, const Routed<T>& out, const T* x, const Linear<T>& W, const Batch& b, int k, bool normed) {
    const int E = W.out();
    std::fill_n(out.p, (size_t)b.N * E, (acc<T>)0);
    linear_add_cpu(ctx, out.p, out.p, x, W, b.N);
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        int* expert = out.expert + (size_t)n * k;
        choose(out.p + (size_t)n * E, expert, out.share + (size_t)n * k, E, k, normed);
        if (b.seq[n] < 0) std::fill_n(expert, k, -1);
    }
    // Counts, their sums, then each pair's place.
    std::fill_n(out.first, E + 1, 0);
    for (int i = 0; i < b.N * k; i++)
        if (out.expert[i] >= 0) out.first[out.expert[i] + 1]++;
    std::partial_sum(out.first, out.first + E + 1, out.first);
    for (int i = 0; i < b.N * k; i++)
        if (out.expert[i] >= 0) out.pair[out.first[out.expert[i]]++] = i;
    for (int e = E; e > 0; e--) out.first[e] = out.first[e - 1]; // (they have moved to their ends)
    out.first[0] = 0;
}

template <class T>
void expert_mlp_cpu(Context& ctx, acc<T>* out, T* gate_up, T* hidden, T* rows, const acc<T>* residual, const T* x,
                    const std::vector<Expert<T>>& experts, const Routed<T>& to, int N, int k) {
    const size_t C = experts[0].gate_up.in, M = experts[0].down.in;
    static thread_local std::vector<acc<T>> kept;
    acc<T>* const y = at_least(kept, N * C); // of one expert
    if (out != residual) std::copy_n(residual, N * C, out);
    for (size_t e = 0; e < experts.size(); e++) {
        const size_t first = to.first[e];
        const int n = to.first[e + 1] - to.first[e], *pair = to.pair + first;
        if (n == 0) continue;
        const PairsProduct<T> up(experts[e].gate_up, pair, n, k), down(experts[e].down, pair, n, k);
        for (int i = 0; i < n; i++) std::copy_n(x + pair[i] / k * C, C, rows + i * C);
        linear_cpu(ctx, gate_up + first * 2 * M, rows, up.W, n);
        swiglu_cpu(ctx, hidden + first * M, gate_up + first * 2 * M, n, (int)M);
        std::fill_n(y, n * C, (acc<T>)0);
        linear_add_cpu(ctx, y, y, hidden + first * M, down.W, n);
        #pragma omp parallel for schedule(static) if (n * C > 20000)
        for (int i = 0; i < n; i++) {
            acc<T>* row = out + pair[i] / k * C;
            const acc<T> share = to.share[pair[i]];
            for (size_t r = 0; r < C; r++) row[r] += share * y[i * C + r];
        }
    }
}

#define INSTANTIATE(T)                                                                                            \
    template void route_cpu(Context&, const Routed<T>&, const T*, const Linear<T>&, const Batch&, int, bool);     \
    template void expert_mlp_cpu(Context&, acc<T>*, T*, T*, T*, const acc<T>*, const T*,                          \
                                 const std::vector<Expert<T>>&, const Routed<T>&, int, int);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
