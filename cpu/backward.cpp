// cpu/backward.cpp: the backward ops on the CPU, in Book I's order.
#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/scratch.h"
#include "model/instances.h"
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

template <class T>
void cross_entropy_cpu(Context&, acc<T>* loss, T* dlogits, acc<T>* logits, const int* target, acc<T> scale, int R,
                       int V) {
    #pragma omp parallel for schedule(static) if ((size_t)R * V > 2000)
    for (int r = 0; r < R; r++) {
        acc<T>* row = logits + (size_t)r * V;
        acc<T> top = -std::numeric_limits<acc<T>>::infinity();
        for (int v = 0; v < V; v++) top = std::max(top, row[v]);
        lanes<T> e, sums = {};
        auto exponentials = [&](int v) { // of 16 logits, zeros past the end
            const int n = std::min(LANES, V - v);
            load_some(e, row + v, n);
            for (int l = n; l < LANES; l++) e[l] = -std::numeric_limits<acc<T>>::infinity();
            e -= top;
            exp_lanes(e);
            return n;
        };
        for (int v = 0; v < V; v += LANES) {
            exponentials(v);
            sums += e;
        }
        const acc<T> sum = sum_lanes(sums);
        acc<T> right;
        memcpy(&right, row + target[r], sizeof right); // (the memory is of both types)
        loss[r] = std::log(sum) + top - right;
        for (int v = 0; v < V && dlogits; v += LANES) { // (a gradient is no longer than a logit: unread logits stay)
            const int n = exponentials(v);
            T g[LANES];
            for (int l = 0; l < n; l++) g[l] = to_stored<T>((e[l] / sum - (v + l == target[r])) * scale);
            memcpy((uint8_t*)row + v * sizeof(T), g, n * sizeof(T));
        }
    }
}

template <class T>
void head_loss_cpu(Context& ctx, acc<T>* loss, T* dlogits, acc<T>* factor, acc<T>* logits, T* picked, acc<T>*,
                   const T* x, const LossRows<acc<T>>& of, const Linear<T>& W) {
    head_cpu(ctx, logits, picked, x, of.rows, W, of.R);
    cross_entropy_cpu(ctx, loss, dlogits, logits, of.target, of.scale, of.R, W.out());
    for (int r = 0; r < of.R; r++) factor[r] = of.by ? of.by[r] : 1;
}

// log(sum_v e^(by x[v])), 16 ids at a time
template <class A> static A log_sum_lanes(const A* x, int V, A by) {
    const A top = by * *std::max_element(x, x + V);
    lanes<A> e, sums = {};
    for (int v = 0; v < V; v += LANES) {
        const int n = std::min(LANES, V - v);
        load_some(e, x + v, n);
        e = e * by - top;
        exp_lanes(e);
        for (int l = n; l < LANES; l++) e[l] = 0;
        sums += e;
    }
    return std::log(sum_lanes(sums)) + top;
}

// One row of `distillation`, 16 ids at a time.
template <class T> struct DistilledRow {
    const acc<T>*s, *t; // logits of the student and of the teacher
    const Distillation& how;
    const int V;
    const acc<T> by = 1 / (acc<T>)how.temperature;
    const acc<T> sum_s = log_sum_lanes(s, V, by), sum_t = log_sum_lanes(t, V, by),
                 sum = how.weight < 1 ? log_sum_lanes(s, V, (acc<T>)1) : 0;

    struct Ids { lanes<T> p, q, log_p, log_q, log_m; };
    int load(Ids& x, int v) const { // p and q are zero past the end
        const int n = std::min(LANES, V - v);
        load_some(x.log_p, t + v, n), load_some(x.log_q, s + v, n);
        x.log_p = x.log_p * by - sum_t, x.log_q = x.log_q * by - sum_s;
        x.p = x.log_p, x.q = x.log_q;
        exp_lanes(x.p), exp_lanes(x.q);
        for (int l = n; l < LANES; l++) x.p[l] = x.q[l] = 0;
        x.log_m = how.beta == 0 ? x.log_q : x.log_p;
        for (int l = 0; how.beta > 0 && how.beta < 1 && l < LANES; l++)
            x.log_m[l] = std::log(std::max(how.beta * x.p[l] + (1 - how.beta) * x.q[l],
                                           std::numeric_limits<acc<T>>::min()));
        return n;
    }
};

template <class T>
void distillation_cpu(Context&, const Distilled<acc<T>>& out, T* dlogits, acc<T>* logits,
                      const DistillationRows<acc<T>>& of) {
    #pragma omp parallel for schedule(static) if ((size_t)of.R * of.V > 2000)
    for (int r = 0; r < of.R; r++) {
        const int V = of.V;
        acc<T>* s = logits + (size_t)r * V;
        const acc<T> *t = of.teacher + (size_t)r * V, weight = of.how.weight, right = s[of.target[r]];
        const DistilledRow<T> row = {s, t, of.how, V};
        typename DistilledRow<T>::Ids x;
        lanes<T> from_p = {}, from_q = {};
        for (int v = 0; v < V; v += LANES) {
            row.load(x, v);
            from_p += x.p * (x.log_p - x.log_m), from_q += x.q * (x.log_q - x.log_m);
        }
        const acc<T> of_q = sum_lanes(from_q);
        out.divergence[r] = of.how.of_p() * sum_lanes(from_p) + of.how.of_q() * of_q;
        out.loss[r] = weight * out.divergence[r] + (weight < 1 ? (1 - weight) * (row.sum - right) : 0);
        out.agrees[r] = std::max_element(s, s + V) - s == std::max_element(t, t + V) - t;
        for (int v = 0; v < V && dlogits; v += LANES) { // (as in cross_entropy_cpu)
            lanes<T> by_s;
            const int n = row.load(x, v);
            load_some(by_s, s + v, n);
            by_s -= row.sum;
            if (weight < 1) exp_lanes(by_s);
            const lanes<T> by_z = of.how.beta == 0 ? x.q - x.p
                                                   : of.how.of_q() * x.q * (x.log_q - x.log_m - of_q);
            T g[LANES];
            for (int l = 0; l < n; l++) {
                const acc<T> of_target = weight < 1 ? (1 - weight) * (by_s[l] - (v + l == of.target[r])) : 0;
                g[l] = to_stored<T>(of.scale * (weight * row.by * by_z[l] + of_target));
            }
            memcpy((uint8_t*)s + v * sizeof(T), g, n * sizeof(T));
        }
    }
}

template <class A> void gather_outcomes_cpu(Context&, A* z, A* tail, A* logits, const int* id, int R, int J, int V) {
    #pragma omp parallel for schedule(static) if ((size_t)R * V > 2000)
    for (int r = 0; r < R; r++) {
        A *s = logits + (size_t)r * V, *to = z + (size_t)r * J;
        for (int j = 0; j < J - 1; j++) {
            const int v = id[(size_t)r * J + j];
            to[j] = v < 0 ? NEVER<A> : s[v];
            if (v >= 0) s[v] = NEVER<A>;
        }
        to[J - 1] = tail[r] = log_sum_lanes(s, V, (A)1);
    }
}

template <class T>
void scatter_outcomes_cpu(Context&, T* dlogits, acc<T>* logits, const T* dz, size_t ld, const acc<T>* tail,
                          const int* id, int R, int J, int V) {
    #pragma omp parallel for schedule(static) if ((size_t)R * V > 2000)
    for (int r = 0; r < R; r++) {
        const acc<T>* s = logits + (size_t)r * V;
        uint8_t* to = (uint8_t*)dlogits + (size_t)r * V * sizeof(acc<T>);
        for (int v = 0; v < V; v += LANES) { // (as in cross_entropy_cpu)
            const int n = std::min(LANES, V - v);
            lanes<T> e;
            load_some(e, s + v, n);
            e -= tail[r];
            exp_lanes(e);
            T g[LANES];
            for (int l = 0; l < n; l++) g[l] = to_stored<T>(to_acc(dz[r * ld + J - 1]) * e[l]);
            memcpy(to + v * sizeof(T), g, n * sizeof(T));
        }
        for (int j = 0; j < J - 1; j++)
            if (const int v = id[(size_t)r * J + j]; v >= 0) memcpy(to + v * sizeof(T), &dz[r * ld + j], sizeof(T));
    }
}

template <class T>
void rmsnorm_backward_cpu(Context&, acc<T>* dx, T* dy, T* normed, acc<T>* dw, const T* dout, const acc<T>* x,
                          const T* w, int N, int C, float eps) {
    static thread_local std::vector<acc<T>> kept;
    acc<T>* factor = at_least(kept, N); // r of each token
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        const acc<T> r = factor[n] = inverse_rms(x + at, C, eps);
        lanes<T> sums = {}, a, b, d;
        for (int i = 0; i < C; i += LANES) {
            const int k = std::min(LANES, C - i);
            load_some(a, x + at + i, k), load_some(b, w + i, k), load_some(d, dout + at + i, k);
            sums += a * b * d;
        }
        const acc<T> mean = sum_lanes(sums) * r * r * r / C;
        for (int i = 0; i < C; i++) {
            const acc<T> weight = to_acc(w[i]);
            if (normed) normed[at + i] = to_stored<T>(x[at + i] * r * weight);
            dx[at + i] += r * weight * to_acc(dout[at + i]) - x[at + i] * mean;
            if (dy) dy[at + i] = to_stored<T>(dx[at + i]);
        }
    }
    if (!dw) return;
    #pragma omp parallel for schedule(static) if ((size_t)N * C > 2000)
    for (int i = 0; i < C; i++)
        for (int n = 0; n < N; n++) dw[i] += to_acc(dout[(size_t)n * C + i]) * x[(size_t)n * C + i] * factor[n];
}

template <class T>
void swiglu_backward_cpu(Context&, T* dgate_up, T* hidden, const T* dhidden, const T* gate_up, int N, int F) {
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * F;
        const T *gate = gate_up + 2 * at, *up = gate + F;
        for (int i = 0; i < F; i += LANES) {
            const int some = std::min(LANES, F - i);
            lanes<T> g, u, d, e;
            load_some(g, gate + i, some), load_some(u, up + i, some), load_some(d, dhidden + at + i, some);
            one_plus_exp_minus(e, g);
            const lanes<T> silu = g / e, sigma = 1 / e, dgate = d * u * sigma * (1 + g * (1 - sigma)), dup = d * silu;
            u *= silu;
            for (int l = 0; l < some; l++) {
                if (hidden) hidden[at + i + l] = to_stored<T>(u[l]);
                dgate_up[2 * at + i + l] = to_stored<T>(dgate[l]);
                dgate_up[2 * at + F + i + l] = to_stored<T>(dup[l]);
            }
        }
    }
}
template <class T>
void linear_backward_swiglu_cpu(Context& ctx, T* dgate_up, T* hidden, T* dhidden, T* dh, acc<T>* dB, const T* dy,
                                const T* gate_up, const Linear<T>& W, int N) {
    linear_backward_input_cpu(ctx, dhidden, dh, dB, dy, W, N);
    swiglu_backward_cpu(ctx, dgate_up, hidden, dhidden, gate_up, N, W.in);
}

// One KV head of one sequence, rows n0 .. n1 - 1 of the batch; its sums run over the tokens in order.
template <class T>
static void attention_backward_sequence(T* dqkv, const T* dout, const Attended<T>& of, const LayerCache<T>& cache,
                                        const Batch& b, const HeadShape& shape, acc<T>* delta, int n0, int n1, int kv) {
    const int H = shape.H, K = shape.K, D = shape.D, G = H / K;
    const size_t width = (size_t)(H + 2 * K) * D, all = (size_t)(n1 - n0) * D;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    auto key_gradient = [&](int n) { return dqkv + n * width + (size_t)(H + kv) * D; };
    auto value_gradient = [&](int n) { return key_gradient(n) + (size_t)K * D; };
    auto query_gradient = [&](int n) { return dqkv + n * width + (size_t)kv * G * D; };
    if (b.seq[n0] < 0) {
        for (int n = n0; n < n1; n++) {
            std::fill_n(query_gradient(n), (size_t)G * D, T{});
            std::fill_n(key_gradient(n), D, T{});
            std::fill_n(value_gradient(n), D, T{});
        }
        return;
    }
    static thread_local std::vector<acc<T>> kept;
    acc<T>* k = at_least(kept, 4 * all + 3 * D);
    acc<T> *v = k + all, *dk = v + all, *dv = dk + all;                       // (tokens, D) each
    acc<T> *query = dv + all, *dquery = query + D, *doutput = dquery + D;     // (D) each
    std::fill(dk, dk + 2 * all, 0);
    for (int n = n0; n < n1; n++) {
        const size_t at = kv_offset(b.slot[n] / PAGE, kv, b.slot[n] % PAGE, K, D);
        widen(k + (size_t)(n - n0) * D, cache.keys + at, D);
        widen(v + (size_t)(n - n0) * D, cache.values + at, D);
    }
    for (int n = n0; n < n1; n++)
        for (int g = 0; g < G; g++) {
            const size_t row = (size_t)n * H + kv * G + g;
            delta[row] = dot(dout + row * D, of.out + row * D, D);
            widen(doutput, dout + row * D, D);
            for (int i = 0; i < D; i++) query[i] = to_acc(of.q[row * D + i]) * scale, dquery[i] = 0;
            for (int m = 0; m <= n - n0; m++) {
                const size_t at = (size_t)m * D;
                const acc<T> p = std::exp(dot(query, k + at, D) - of.lse[row]);
                const acc<T> ds = p * (dot(doutput, v + at, D) - delta[row]);
                for (int i = 0; i < D; i++) dv[at + i] += p * doutput[i];
                for (int i = 0; i < D; i++) dk[at + i] += ds * query[i];
                for (int i = 0; i < D; i++) dquery[i] += ds * k[at + i];
            }
            for (int i = 0; i < D; i++) query_gradient(n)[g * D + i] = to_stored<T>(dquery[i] * scale);
        }
    for (int n = n0; n < n1; n++)
        for (int i = 0; i < D; i++) {
            key_gradient(n)[i] = to_stored<T>(dk[(size_t)(n - n0) * D + i]);
            value_gradient(n)[i] = to_stored<T>(dv[(size_t)(n - n0) * D + i]);
        }
}

template <class T>
void attention_backward_cpu(Context&, T* dqkv, const T* dout, const Attended<T>& of, const LayerCache<T>& cache,
                            const Batch& b, const HeadShape& shape, acc<T>* delta) {
    std::vector<int> starts; // of sequences, and N
    for (int n = 0; n < b.N; n++)
        if (n == 0 || b.seq[n] != b.seq[n - 1]) starts.push_back(n);
    const int K = shape.K, tasks = (int)starts.size() * K;
    starts.push_back(b.N);
    #pragma omp parallel for schedule(dynamic) if (b.N > 4)
    for (int task = 0; task < tasks; task++)
        attention_backward_sequence(dqkv, dout, of, cache, b, shape, delta, starts[task / K], starts[task / K + 1],
                                    task % K);
}

template <class T>
void qknorm_rope_backward_cpu(Context&, T* dqkv, const HeadNormGradients<T>& dnorms, const T* qkv,
                              const HeadNorms<T>& norms, const Batch& b, const HeadShape& shape) {
    const int H = shape.H, K = shape.K, D = shape.D, heads = H + K;
    auto at = [&](int n, int h) { return ((size_t)n * (H + 2 * K) + h) * D; };
    // The gradient of plane i of head h, rotated back.
    auto rotate_back = [&](int n, int h, int i, acc<T>& da, acc<T>& db) {
        const acc<T>* angle = norms.rope + (size_t)b.pos[n] * D + 2 * i;
        const acc<T> u = to_acc(dqkv[at(n, h) + i]), v = to_acc(dqkv[at(n, h) + i + D / 2]);
        da = u * angle[0] + v * angle[1], db = v * angle[0] - u * angle[1];
    };
    if (dnorms.q) {
        static thread_local std::vector<acc<T>> kept;
        acc<T>* factor = at_least(kept, (size_t)b.N * heads); // r of each head
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int n = 0; n < b.N; n++)
            for (int h = 0; h < heads && b.seq[n] >= 0; h++)
                factor[n * heads + h] = inverse_rms(qkv + at(n, h), D, shape.eps);
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int i = 0; i < D / 2; i++)
            for (int n = 0; n < b.N; n++)
                for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
                    acc<T> da, db, *dw = h < H ? dnorms.q : dnorms.k;
                    rotate_back(n, h, i, da, db);
                    dw[i] += da * to_acc(qkv[at(n, h) + i]) * factor[n * heads + h];
                    dw[i + D / 2] += db * to_acc(qkv[at(n, h) + i + D / 2]) * factor[n * heads + h];
                }
    }
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++)
        for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
            const T *x = qkv + at(n, h), *w = h < H ? norms.q : norms.k;
            T* dx = dqkv + at(n, h);
            const acc<T> r = inverse_rms(x, D, shape.eps);
            acc<T> dy[MAX_HEAD], sum = 0;
            for (int i = 0; i < D / 2; i++) rotate_back(n, h, i, dy[i], dy[i + D / 2]);
            for (int i = 0; i < D; i++) sum += to_acc(x[i]) * to_acc(w[i]) * dy[i];
            const acc<T> mean = sum * r * r * r / D;
            for (int i = 0; i < D; i++) dx[i] = to_stored<T>(r * to_acc(w[i]) * dy[i] - to_acc(x[i]) * mean);
        }
}

template <class T>
void attend_backward_cpu(Context& ctx, T* dqkv, const HeadNormGradients<T>& dnorms, const T* dout,
                         const Attended<T>& of, const LayerCache<T>& cache, const T* qkv, const HeadNorms<T>& norms,
                         const Batch& b, const HeadShape& shape, acc<T>* delta) {
    attention_backward_cpu(ctx, dqkv, dout, of, cache, b, shape, delta);
    qknorm_rope_backward_cpu(ctx, dqkv, dnorms, qkv, norms, b, shape);
}

// ---- Ops whose definition is fast enough. (`flatten`: compiled here, with this file's optimisation.)
#define FLATTEN __attribute__((flatten))
template <class A> FLATTEN void add_losses_cpu(Context&, double* total, const A* loss, int R) {
    add_losses(total, loss, R);
}
template <class T> FLATTEN void scale_rows_cpu(Context&, T* x, size_t ld, const acc<T>* by, int R, int n) {
    scale_rows(x, ld, by, R, n);
}
template <class A> FLATTEN void embed_backward_cpu(Context&, A* dW, const A* dx, const Batch& b, int C) {
    embed_backward(dW, dx, b, C);
}
template <class A> FLATTEN void grad_norm_cpu(Context&, double* norm, double* partial, const A* g, size_t n) {
    grad_norm(norm, partial, g, n);
}
template <class T>
FLATTEN void adamw_cpu(Context&, T* stored, acc<T>* p, acc<T>* m, acc<T>* v, const acc<T>* g, const double* norm,
                       size_t n, const AdamW& a) {
    adamw(stored, p, m, v, g, norm, n, a);
}

template <class T>
FLATTEN void adamw8_cpu(Context&, T* stored, acc<T>* p, const Moments8& to, const acc<T>* g, const double* norm,
                        size_t n, size_t decayed, const AdamW& a) {
    adamw8(stored, p, to, g, norm, n, decayed, a);
}

#define INSTANTIATE(T)                                                                                                \
    template void distillation_cpu(Context&, const Distilled<acc<T>>&, T*, acc<T>*,                                   \
                                   const DistillationRows<acc<T>>&);                                                  \
    template void scatter_outcomes_cpu(Context&, T*, acc<T>*, const T*, size_t, const acc<T>*, const int*, int, int,  \
                                       int);                                                                          \
    template void cross_entropy_cpu(Context&, acc<T>*, T*, acc<T>*, const int*, acc<T>, int, int);                    \
    template void head_loss_cpu(Context&, acc<T>*, T*, acc<T>*, acc<T>*, T*, acc<T>*, const T*,                       \
                                const LossRows<acc<T>>&, const Linear<T>&);                                           \
    template void scale_rows_cpu(Context&, T*, size_t, const acc<T>*, int, int);                                      \
    template void rmsnorm_backward_cpu(Context&, acc<T>*, T*, T*, acc<T>*, const T*, const acc<T>*, const T*, int,    \
                                       int, float);                                                                   \
    template void swiglu_backward_cpu(Context&, T*, T*, const T*, const T*, int, int);                                \
    template void linear_backward_swiglu_cpu(Context&, T*, T*, T*, T*, acc<T>*, const T*, const T*, const Linear<T>&, \
                                             int);                                                                    \
    template void attention_backward_cpu(Context&, T*, const T*, const Attended<T>&, const LayerCache<T>&,            \
                                         const Batch&, const HeadShape&, acc<T>*);                                    \
    template void qknorm_rope_backward_cpu(Context&, T*, const HeadNormGradients<T>&, const T*, const HeadNorms<T>&,  \
                                           const Batch&, const HeadShape&);                                           \
    template void attend_backward_cpu(Context&, T*, const HeadNormGradients<T>&, const T*, const Attended<T>&,        \
                                      const LayerCache<T>&, const T*, const HeadNorms<T>&, const Batch&,              \
                                      const HeadShape&, acc<T>*);                                                     \
    template void adamw8_cpu(Context&, T*, acc<T>*, const Moments8&, const acc<T>*, const double*, size_t, size_t,    \
                             const AdamW&);                                                                           \
    template void adamw_cpu(Context&, T*, acc<T>*, acc<T>*, acc<T>*, const acc<T>*, const double*, size_t, const      \
                            AdamW&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
#ifdef QWEN3_DOUBLE
using Sum = double;
#else
using Sum = float; // of bf16 and of float
#endif
template void gather_outcomes_cpu(Context&, Sum*, Sum*, Sum*, const int*, int, int, int);
template void add_losses_cpu(Context&, double*, const Sum*, int);
template void embed_backward_cpu(Context&, Sum*, const Sum*, const Batch&, int);
template void grad_norm_cpu(Context&, double*, double*, const Sum*, size_t);
