// A product with DoRA on some of its blocks, with all that it needs, for suites.
#pragma once
#include "tests/common.h"
#include <numeric>

template <class T> struct DoraProduct {
    std::vector<T> w, A, B, sB, h, u, off; // B as it is, s B as it is used
    std::vector<acc<T>> m, norm, c;
    std::vector<uint32_t> token;
    Dropout dropout;
    Linear<T> W;
    DoraProduct(Random& random, const std::vector<int>& rows, const std::vector<int>& blocks, int in, int rank, int N,
                float p, double more = 1) {
        const int out = std::accumulate(rows.begin(), rows.end(), 0), k = (int)blocks.size() * rank;
        w = random.fill<T>((size_t)out * in), A = random.fill<T>((size_t)k * in, more), B.resize((size_t)out * k);
        h.resize((size_t)N * k), u = off = poisoned<T>((size_t)N * out), m.resize(out), norm = c = poisoned<acc<T>>(out);
        W.in = in;
        for (size_t b = 0, row = 0; b < rows.size(); row += (size_t)rows[b++])
            W.w[b] = &w[row * in], W.rows[b] = rows[b];
        Adapter<T>& a = W.adapter;
        a.rank = rank, a.s = 2, a.dora.on = true;
        for (int b : blocks) {
            const size_t j = (size_t)a.modules++;
            a.block[j] = b, a.module[j] = 10 + (int)j;
            for (int r = W.first_row(b); r < W.first_row(b) + rows[(size_t)b]; r++) {
                m[r] = (acc<T>)(1 + random.uniform()) * std::sqrt((acc<T>)in);
                for (int i = 0; i < rank; i++) B[(size_t)r * k + j * rank + i] = random.fill<T>(1, more)[0];
            }
        }
        for (int n = 0; n < N; n++) token.push_back(100 + 3 * (uint32_t)n);
        dropout = {p, 5, 77, token.data()};
        if (p > 0) a.dropout = &dropout;
        use();
    }
    DoraProduct(const DoraProduct&) = delete;
    void use() {
        sB.clear();
        for (T x : B) sB.push_back(to_stored<T>(to_acc(x) * W.adapter.s));
        Adapter<T>& a = W.adapter;
        a.A = A.data(), a.B = sB.data(), a.h = h.data();
        a.dora.m = m.data(), a.dora.norm = norm.data(), a.dora.c = c.data(), a.dora.u = u.data(), a.dora.off = off.data();
    }
    // y of row r and token n as PEFT writes it, W x + (c - 1) W x' + c s B A x', in double; its terms' magnitudes.
    double row(const std::vector<T>& x, int n, int r, double* u_of = nullptr, double* size = nullptr) const {
        const int j = W.module_of(r), in = W.in, rank = W.adapter.rank;
        std::vector<double> row(in), seen(in);
        double plain = 0, norm = 0, dropped = 0, more = 0, all = 0;
        for (int i = 0; i < in; i++) {
            const bool kept = j < 0 || !W.adapter.dropout || dropout_keeps(dropout, n, W.adapter.module[j], i);
            seen[i] = kept ? to_acc(x[(size_t)n * in + i]) / (j >= 0 && W.adapter.dropout ? 1 - (double)dropout.p : 1) : 0;
            for (int k = j * rank; j >= 0 && k < (j + 1) * rank; k++)
                row[i] += to_acc(sB[r * W.adapter.width() + k]) * (double)to_acc(A[(size_t)k * in + i]);
            const double v = to_acc(w[(size_t)r * in + i]);
            plain += v * to_acc(x[(size_t)n * in + i]), dropped += v * seen[i], more += row[i] * seen[i];
            all += std::fabs(v * seen[i]) + std::fabs(row[i] * seen[i]);
            norm += (v + row[i]) * (v + row[i]);
        }
        const double by = j < 0 ? 1 : m[r] / std::sqrt(norm);
        if (u_of) *u_of = dropped + more;
        if (size) *size = all * (1 + by);
        return plain + (by - 1) * dropped + by * more;
    }
};
