// model/distillation.h: losses that compare two models: definitions, as in Book I.
#pragma once
#include "qwen3.cu"

// Distillation (Agarwal et al., "On-policy distillation of language models: learning from self-generated mistakes",
// 2024, equation 1). p is the teacher's distribution, q the student's, m = beta p + (1 - beta) q.
struct Distillation {
    float beta = 0;        // D = beta KL(p || m) + (1 - beta) KL(q || m); 0: KL(p || q), 1: KL(q || p)
    float temperature = 1; // p = softmax(teacher / temperature), q = softmax(logits / temperature)
    float weight = 1;      // loss = weight D + (1 - weight) cross_entropy

    template <class A> A log_mixture(A log_p, A log_q) const {
        if (beta == 0) return log_q;
        if (beta == 1) return log_p;
        const A top = std::max(log_p, log_q);
        return top + std::log(beta * std::exp(log_p - top) + (1 - beta) * std::exp(log_q - top));
    }
    float of_p() const { return beta == 0 ? 1 : beta == 1 ? 0 : beta; } // weights of both divergences in D
    float of_q() const { return beta == 0 ? 0 : beta == 1 ? 1 : 1 - beta; }
};
template <class A> struct DistillationRows {
    const A* teacher;  // (R,V) logits
    const int* target; // (R)
    Distillation how;
    A scale;
    int R, V;
};
template <class A> struct Distilled {
    A *loss, *divergence; // (R) divergence: D
    A* agrees;            // (R) 1 if the likeliest id is the teacher's, else 0
};
// log(sum_v e^(by x[v]))
template <class A> A log_sum(const A* x, int V, A by) {
    const A top = by * *std::max_element(x, x + V);
    A sum = 0;
    for (int v = 0; v < V; v++) sum += std::exp(by * x[v] - top);
    return std::log(sum) + top;
}
// ---- distillation: loss[r] = weight D(p, q) + (1 - weight) cross_entropy(logits[r], target[r])
// dlogits[r] = scale (weight / temperature dD + (1 - weight) (softmax(logits[r])[v] - [v = target[r]])), where
// dD[v] = q - p if beta is 0, else of_q q (log(q / m) - KL(q || m)). dlogits is in the memory of logits: row r begins
// where row r of logits began.
template <class T>
void distillation(const Distilled<acc<T>>& out, // (R) out
                  T* dlogits,                   // the memory of logits; null: no gradient
                  acc<T>* logits,               // (R,V) in; become dlogits
                  const DistillationRows<acc<T>>& of) {
    using A = acc<T>;
    const Distillation& how = of.how;
    const int V = of.V;
    const A by = 1 / (A)how.temperature, weight = how.weight;
    for (int r = 0; r < of.R; r++) {
        const A *s = logits + (size_t)r * V, *t = of.teacher + (size_t)r * V;
        const A sum_s = log_sum(s, V, by), sum_t = log_sum(t, V, by), sum = log_sum(s, V, (A)1);
        A from_p = 0, from_q = 0; // KL(p || m), KL(q || m)
        for (int v = 0; v < V; v++) {
            const A log_p = by * t[v] - sum_t, log_q = by * s[v] - sum_s, log_m = how.log_mixture(log_p, log_q);
            from_p += std::exp(log_p) * (log_p - log_m), from_q += std::exp(log_q) * (log_q - log_m);
        }
        out.divergence[r] = how.of_p() * from_p + how.of_q() * from_q;
        out.loss[r] = weight * out.divergence[r] + (1 - weight) * (sum - s[of.target[r]]);
        out.agrees[r] = std::max_element(s, s + V) - s == std::max_element(t, t + V) - t;
        for (int v = 0; v < V && dlogits; v++) { // as in cross_entropy
            const A log_p = by * t[v] - sum_t, log_q = by * s[v] - sum_s, log_m = how.log_mixture(log_p, log_q);
            const A by_z = how.beta == 0 ? std::exp(log_q) - std::exp(log_p)
                                         : how.of_q() * std::exp(log_q) * (log_q - log_m - from_q);
            const A by_s = std::exp(s[v] - sum) - (v == of.target[r]);
            const T d = to_stored<T>(of.scale * (weight * by * by_z + (1 - weight) * by_s));
            memcpy((uint8_t*)(logits + (size_t)r * V) + v * sizeof(T), &d, sizeof(T));
        }
    }
}

// Distillation from a file: the teacher's log-probabilities of some ids, as an endpoint reports them. Both
// distributions become J outcomes: those ids, and all other ids together, the tail. `distillation` compares them as J
// logits; a temperature above or below 1 is of the outcomes.
template <class A> constexpr A NEVER = (A)-1e30; // the logit of an outcome without an id
// ---- gather_outcomes: z[r][j] = logits[r][id[r][j]] for j < J - 1, and z[r][J - 1] = log(sum of e^logits[r][v] over
// all other v). The named logits become NEVER, so that scatter_outcomes finds the others.
template <class A>
void gather_outcomes(A* z,          // (R,J) out
                     A* tail,       // (R) out: z[r][J - 1]
                     A* logits,     // (R,V) in and out
                     const int* id, // (R,J) distinct; -1: no id, as in the last column
                     int R, int J, int V) {
    for (int r = 0; r < R; r++) {
        A *s = logits + (size_t)r * V, *to = z + (size_t)r * J;
        for (int j = 0; j < J - 1; j++) {
            const int v = id[(size_t)r * J + j];
            to[j] = v < 0 ? NEVER<A> : s[v];
            if (v >= 0) s[v] = NEVER<A>;
        }
        to[J - 1] = tail[r] = log_sum(s, V, (A)1);
    }
}
// ---- scatter_outcomes: dlogits[r][id[r][j]] = dz[r][j]; of all other v dz[r][J - 1] e^(logits[r][v] - tail[r]).
// dlogits is in the memory of logits: row r begins where row r of logits began. Likewise dz in that of z.
template <class T>
void scatter_outcomes(T* dlogits,          // the memory of logits
                      acc<T>* logits,      // (R,V) as gather_outcomes left them; become dlogits
                      const T* dz,         // (R, ld), J numbers of each row
                      size_t ld,           // numbers from one row to the next
                      const acc<T>* tail,  // (R)
                      const int* id,       // (R,J)
                      int R, int J, int V) {
    for (int r = 0; r < R; r++) {
        const acc<T>* s = logits + (size_t)r * V;
        uint8_t* to = (uint8_t*)dlogits + (size_t)r * V * sizeof(acc<T>);
        const acc<T> of_tail = to_acc(dz[r * ld + J - 1]);
        for (int v = 0; v < V; v++) { // as in cross_entropy
            const T d = to_stored<T>(of_tail * std::exp(s[v] - tail[r]));
            memcpy(to + v * sizeof(T), &d, sizeof(T));
        }
        for (int j = 0; j < J - 1; j++)
            if (const int v = id[(size_t)r * J + j]; v >= 0) memcpy(to + v * sizeof(T), &dz[r * ld + j], sizeof(T));
    }
}
