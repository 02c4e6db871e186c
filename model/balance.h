// model/balance.h: the loss that keeps a mixture of experts balanced in training; a definition, as in Book I.
#pragma once
#include "qwen3.cu"
#include <cstddef>
#include <vector>

// The load-balancing loss of a batch that went forward: E sum_e f_e P_e (Fedus et al., section 2.2). f_e is the number
// of tokens that have expert e, P_e the sum of p_e over all tokens; both are sums over the layers, divided by tokens
// times layers. total += weight times the loss. slope_e becomes the gradient of `scale` times the loss with respect to
// each p_e.
//      total (1) +=, slope (E) <- a.layer[].routed
template <class T>
void balance_loss(Context& ctx, double* total, acc<T>* slope, const Config& c, const Activations<T>& a, const Batch& b,
                  double weight, double scale) {
    if constexpr (HAS_GPU<T>) if (ctx.gpu) return balance_loss_gpu(ctx, total, slope, c, a, b, weight, scale);
    double loss = 0, rows = 0;
    std::vector<double> f(c.E), P(c.E);
    for (int l = 0; l < c.L; l++)
        for (int n = 0; c.sparse(l) && n < b.N; n++) {
            const Routed<T>& of = a.layer[l].routed;
            if (b.seq[n] < 0) continue;
            rows++;
            for (int j = 0; j < c.k; j++) f[of.expert[(size_t)n * c.k + j]]++;
            for (int e = 0; e < c.E; e++) P[e] += of.p[(size_t)n * c.E + e];
        }
    for (int e = 0; e < c.E; e++) {
        loss += c.E * f[e] * P[e] / (rows * rows);
        slope[e] = (acc<T>)(scale * c.E * f[e] / (rows * rows));
    }
    *total += weight * loss;
}
