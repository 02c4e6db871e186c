// model/experts_backward.h by emulation (tests/emulate/emulate.h): the gradients of SwiGLU and of shares, of the router's
// scores, and the load-balancing loss are Book I's, with the threads from the first to the last and from the last to the
// first.
#include <doctest/doctest.h>
#include "tests/emulate/packed_emulation.h"
#include "model/balance.h"
#include "qwen3.cu"
#include "tests/batch.h"
#include "model/experts_backward.h"

namespace {
// N tokens with k of E experts each, by random scores; the last of several tokens is spare. Expert 1 has no token, and
// expert 2 all, where k leaves a choice.
template <class T> struct Chosen {
    int N, E, k;
    std::vector<acc<T>> p, share;
    std::vector<int> expert, first, pair, seq;
    Chosen(Random& random, int N, int E, int k, bool normed)
        : N(N), E(E), k(k), p((size_t)N * E), share((size_t)N * k), expert((size_t)N * k), first((size_t)E + 1), pair((size_t)N * k, -7), seq((size_t)N, 0) {
        if (N > 1) seq.back() = -1;
        std::vector<acc<T>> x((size_t)N * 2), W((size_t)E * 2);
        for (auto& y : x) y = (acc<T>)(random.uniform() * 2 - 1);
        for (auto& y : W) y = (acc<T>)(random.uniform() * 2 - 1);
        for (int n = 0; n < N; n++) {
            acc<T> *row = &p[(size_t)n * E], all = 0, sum = 0;
            for (int e = 0; e < E; e++) row[e] = std::exp(x[(size_t)n * 2] * W[(size_t)e * 2] + x[(size_t)n * 2 + 1] * W[(size_t)e * 2 + 1] + (E > k + 1 ? (e == 2) * 6 - (e == 1) * 6 : 0)), all += row[e];
            for (int e = 0; e < E; e++) row[e] /= all;
            int chosen = 0;
            for (int e = 0; e < E && chosen < k; e++) {
                int ahead = 0;
                for (int f = 0; f < E; f++) ahead += row[f] > row[e] || (row[f] == row[e] && f < e);
                if (ahead < k) expert[(size_t)n * k + chosen] = seq[(size_t)n] < 0 ? -1 : e, share[(size_t)n * k + chosen++] = row[e], sum += row[e];
            }
            for (int j = 0; j < k && normed; j++) share[(size_t)n * k + j] /= sum;
        }
        int at = 0;
        for (int e = 0; e <= E; e++) {
            first[(size_t)e] = at;
            for (int i = 0; i < N * k; i++)
                if (expert[(size_t)i] == e) pair[(size_t)at++] = i;
        }
    }
    Routed<T> view() { return {p.data(), expert.data(), share.data(), first.data(), pair.data()}; }
};
template <class To, class From> std::vector<To> converted(const std::vector<From>& from) {
    std::vector<To> to;
    for (const From& x : from)
        if constexpr (std::is_same_v<From, bf16>) to.push_back((To)to_acc(x));
        else to.push_back((To)x);
    return to;
}
} // namespace

TEST_CASE("expert_swiglu_backward_kernel, expert_hidden_kernel, add_pairs_kernel: gradients of gate, up and share; the sum of a token's pairs") {
    Random random{3};
    const struct { int N, E, k, M; } shapes[] = {{1, 8, 2, 8}, {5, 8, 8, 40}, {21, 16, 4, 136}, {9, 40, 1, 264}};
    for (auto& shape : shapes) {
        const int N = shape.N, k = shape.k, M = shape.M, C = 136;
        INFO("N " << N << " E " << shape.E << " k " << k << " M " << M);
        Chosen<bf16> to(random, N, shape.E, k, true);
        if (shape.E > k + 1) CHECK((to.first[2] == to.first[1] && to.first[3] - to.first[2] == (N > 1 ? N - 1 : 1)));
        const std::vector<bf16> gate_up = random.fill<bf16>((size_t)N * k * 2 * M, 6), dhidden = random.fill<bf16>((size_t)N * k * M, 2);
        const int pairs = to.first.back();
        // The definition, in double: rows in the order of `pair`.
        std::vector<double> dgate_up((size_t)pairs * 2 * M), hidden((size_t)pairs * M), d((size_t)pairs * M);
        for (int i = 0; i < pairs; i++)
            for (int f = 0; f < M; f++) d[(size_t)(i * M + f)] = to_acc(dhidden[(size_t)(to.pair[(size_t)i] * M + f)]);
        swiglu_backward<double>(dgate_up.data(), hidden.data(), d.data(), converted<double>(gate_up).data(), pairs, M);
        for (bool order : {false, true}) {
            backwards = order;
            std::vector<bf16> got((size_t)N * k * 2 * M, to_bf16(-3));
            std::vector<float> dshare((size_t)N * k, -3);
            launch(dim3((unsigned)(N * k + 7) / 8), dim3(256), [&] { expert_swiglu_backward_kernel(got.data(), dshare.data(), dhidden.data(), gate_up.data(), to.view(), shape.E, M); });
            CHECK(!stuck);
            int wrong = 0;
            for (int i = 0; i < N * k; i++) {
                double sum = 0, size = 0;
                for (int f = 0; f < M && i < pairs; f++) sum += d[(size_t)(i * M + f)] * hidden[(size_t)(i * M + f)], size += std::fabs(d[(size_t)(i * M + f)] * hidden[(size_t)(i * M + f)]);
                const size_t pair = (size_t)(i < pairs ? to.pair[(size_t)i] : 0);
                if (i < pairs) wrong += !(std::fabs(dshare[pair] - sum) <= size / 255 + 1e-6); // half of the last bit of each hidden is up to 1 / 256
                for (size_t f = 0; f < (size_t)2 * M; f++) {
                    const double y = to_acc(got[(size_t)i * 2 * M + f]), want = i < pairs ? to.share[pair] * dgate_up[(size_t)i * 2 * M + f] : -3;
                    wrong += !(std::fabs(y - want) <= std::fabs(want) / 255 + 1e-6);
                }
            }
            for (int i = 0; i < k && N > 1; i++) wrong += dshare[(size_t)((N - 1) * k + i)] != -3; // the spare row's
            CHECK(wrong == 0);
            std::vector<bf16> shared((size_t)N * k * M, to_bf16(-3)); // hidden times share
            launch(dim3((unsigned)(N * k + 7) / 8), dim3(256), [&] { expert_hidden_kernel(shared.data(), gate_up.data(), to.view(), shape.E, M); });
            for (int i = 0; i < N * k * M; i++) {
                const double want = i < pairs * M ? to.share[(size_t)to.pair[(size_t)(i / M)]] * hidden[(size_t)i] : -3;
                wrong += !(std::fabs(to_acc(shared[(size_t)i]) - want) <= std::fabs(want) / 255 + 1e-6);
            }
            CHECK(wrong == 0);
            // Columns 8 to 103 of C.
            const std::vector<bf16> dx = random.fill<bf16>((size_t)N * k * 96);
            std::vector<float> sum((size_t)N * C, -3);
            launch(dim3((unsigned)N), dim3(128), [&] { add_pairs_kernel(sum.data(), dx.data(), to.view(), k, C, 8, 96); });
            for (int n = 0; n < N; n++)
                for (int c = 0; c < C; c++) {
                    float want = 0;
                    for (int j = 0; j < k && to.seq[(size_t)n] >= 0 && c >= 8 && c < 104; j++) want += to_acc(dx[(size_t)((n * k + j) * 96 + c - 8)]);
                    wrong += sum[(size_t)(n * C + c)] != (c >= 8 && c < 104 ? want : -3);
                }
            CHECK(wrong == 0);
            backwards = false;
        }
    }
}

TEST_CASE("route_backward_kernel: shares normed and not, with and without slopes, spare rows") {
    Random random{5};
    const struct { int N, E, k; } shapes[] = {{1, 8, 2}, {4, 8, 8}, {7, 128, 8}, {3, 200, 32}, {5, 40, 1}};
    for (auto& shape : shapes)
        for (bool normed : {false, true})
            for (bool sloped : {false, true}) {
                const int N = shape.N, E = shape.E, k = shape.k;
                INFO("N " << N << " E " << E << " k " << k << " normed " << normed << " slopes " << sloped);
                Chosen<bf16> of(random, N, E, k, normed);
                const std::vector<float> dshare = random.fill<float>((size_t)N * k, 3), slope = random.fill<float>((size_t)E);
                std::vector<double> want((size_t)N * E), p = converted<double>(of.p), share = converted<double>(of.share);
                const Routed<double> wide = {p.data(), of.expert.data(), share.data(), of.first.data(), of.pair.data()};
                route_backward<double>(want.data(), converted<double>(dshare).data(), sloped ? converted<double>(slope).data() : nullptr, wide, N, E, k, normed);
                for (bool order : {false, true}) {
                    backwards = order;
                    std::vector<bf16> got((size_t)N * E, to_bf16(-3));
                    launch(dim3((unsigned)N), dim3(128), [&] { route_backward_kernel(got.data(), dshare.data(), sloped ? slope.data() : nullptr, of.view(), E, k, normed); });
                    CHECK(!stuck);
                    backwards = false;
                    int wrong = 0, some = 0;
                    for (size_t i = 0; i < got.size(); i++) {
                        // half of the last bit is up to 1 / 256 of it; dp and its mean are numbers up to 50
                        wrong += !(std::fabs(to_acc(got[i]) - want[i]) <= std::fabs(want[i]) / 255 + 2e-5 * p[i]);
                        some += want[i] != 0;
                    }
                    CHECK(wrong == 0);
                    if (N > 1) CHECK(some <= (N - 1) * E); // spare rows have zeros
                    if (!normed || k > 1 || sloped) CHECK(some > 0); // (one share is 1)
                }
            }
}

TEST_CASE("balance kernels: loss and slopes over layers with and without experts, added to a total") {
    Random random{7};
    for (int E : {8, 40, 72})
        for (int N : {1, 33, 100}) {
            INFO("E " << E << " N " << N);
            const int k = 3;
            Config c = {};
            c.L = 3, c.E = E, c.k = k, c.dense_layers = {1};
            std::vector<Chosen<bf16>> of;
            for (int l = 0; l < 3; l++) of.emplace_back(random, N, E, k, l == 0);
            Activations<bf16> a;
            a.layer.resize(3);
            for (int l : {0, 2}) a.layer[(size_t)l].routed = of[(size_t)l].view();
            Batch b = {N, 1, nullptr, nullptr, of[0].seq.data(), nullptr, nullptr, 0};
            double want = 2.5;
            std::vector<float> want_slope((size_t)E);
            Context ctx;
            ctx.plain = true;
            balance_loss<bf16>(ctx, &want, want_slope.data(), c, a, b, 0.7, 0.3);
            CHECK(want > 2.5 + 0.7 * 0.5);
            for (bool order : {false, true}) {
                backwards = order;
                std::vector<double> sums((size_t)2 * E);
                double total = 2.5;
                std::vector<float> slope((size_t)E, NAN);
                for (int l : {0, 2}) launch(dim3((unsigned)(E + 31) / 32), dim3(1024), [&] { balance_sums_kernel(sums.data(), sums.data() + E, of[(size_t)l].view(), of[0].seq.data(), N, E); });
                launch(dim3(1), dim3(256), [&] { balance_kernel(&total, slope.data(), sums.data(), sums.data() + E, E, k, 0.7, 0.3); });
                CHECK(!stuck);
                backwards = false;
                CHECK(std::fabs(total - want) < 1e-6 * want);
                int wrong = 0;
                for (int e = 0; e < E; e++) wrong += !(std::fabs(slope[(size_t)e] - want_slope[(size_t)e]) <= 1e-6 * std::fabs(want_slope[(size_t)e]));
                CHECK(wrong == 0);
            }
        }
}
