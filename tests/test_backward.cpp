// The backward pass: every op against finite differences in double and against PyTorch's autograd
// (tests/make_train_fixtures.py), every type against double, and the gradients of whole models against PyTorch's.
#include "common.h"

// dL/dx by central differences where L = f(x), against `got`. Their own error is about 1e-9 of the gradient's size.
static void check_gradient(const char* what, std::vector<double>& x, const std::vector<double>& got, const std::function<double()>& f) {
    REQUIRE(x.size() == got.size());
    const double h = 1e-5;
    double size = 0, worst = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const double was = x[i];
        x[i] = was + h;
        const double above = f();
        x[i] = was - h;
        const double below = f();
        x[i] = was;
        const double want = (above - below) / (2 * h);
        size = std::max(size, std::fabs(want)), worst = std::max(worst, std::isnan(got[i]) ? 1e300 : std::fabs(got[i] - want));
    }
    INFO(what << ": largest gradient " << size << ", largest difference " << worst);
    CHECK(size > 1e-3); // the test sees something
    CHECK(worst < 1e-7 * std::max(size, 1.));
}
static double inner(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum;
}
static std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
    for (size_t i = 0; i < a.size(); i++) a[i] -= b[i];
    return a;
}

// A Linear over numbers of the test's own.
template <class T> static Linear<T> linear_of(const std::vector<T>& w, std::vector<int> rows, int in) {
    Linear<T> W;
    W.in = in;
    for (size_t b = 0, at = 0; b < rows.size(); at += (size_t)rows[b++] * in) W.w[b] = w.data() + at, W.rows[b] = rows[b];
    REQUIRE(w.size() == (size_t)W.out() * in);
    return W;
}

TEST_CASE("cross_entropy: finite differences, in place, and nothing but the loss if that is all") {
    Random random{1};
    for (auto [R, V] : {std::pair(1, 5), {3, 16}, {4, 37}}) {
        auto logits = random.fill<double>((size_t)R * V, 4);
        std::vector<int> target;
        for (int r = 0; r < R; r++) target.push_back(random.below(V));
        std::vector<double> loss(R), gradient = logits;
        cross_entropy_cpu(loss.data(), gradient.data(), gradient.data(), target.data(), 0.3, R, V);
        auto f = [&] {
            double sum = 0;
            std::vector<double> each(R);
            cross_entropy_cpu(each.data(), (double*)nullptr, logits.data(), target.data(), 1., R, V);
            for (double l : each) sum += l;
            return 0.3 * sum;
        };
        check_gradient("logits", logits, gradient, f);
        // The formula itself.
        double sum = 0;
        for (int v = 0; v < V; v++) sum += std::exp(logits[v]);
        CHECK(loss[0] == doctest::Approx(std::log(sum) - logits[target[0]]).epsilon(1e-12));
    }
}

TEST_CASE("cross_entropy: bf16 gradients lie in the first halves of the rows; logits of any size; a NaN is not lost") {
    Random random{2};
    const int R = 3, V = 50;
    auto logits = random.fill<float>(R * V, 300);
    const std::vector<int> target = {0, 49, 7};
    std::vector<float> loss(R), wide = logits, narrow = logits, unused(R);
    cross_entropy_cpu(loss.data(), wide.data(), wide.data(), target.data(), 1.f, R, V);
    cross_entropy_cpu(unused.data(), (bf16*)narrow.data(), narrow.data(), target.data(), 1.f, R, V);
    CHECK(same_bits(loss, unused));
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            bf16 got;
            memcpy(&got, (uint8_t*)(narrow.data() + r * V) + 2 * v, 2);
            CHECK(got.bits == to_bf16(wide[r * V + v]).bits);
        }
    for (float l : loss) CHECK(std::isfinite(l));
    logits[V + 20] = NAN;
    cross_entropy_cpu(loss.data(), (float*)nullptr, logits.data(), target.data(), 1.f, R, V);
    CHECK(std::isfinite(loss[0]));
    CHECK(std::isnan(loss[1]));
}

TEST_CASE("head: finite differences by the rows that are named; the others' gradient is not touched") {
    Random random{3};
    const int N = 5, C = 7, V = 19, R = 2, rows[R] = {3, 1};
    const auto w = random.fill<double>(V * C), g = random.fill<double>(R * V);
    auto x = random.fill<double>(N * C);
    const Linear<double> W = linear_of(w, {V}, C);
    std::vector<double> dx(N * C, 0), logits(R * V), picked(R * C);
    head_backward_cpu(dx.data(), g.data(), V, rows, W, R);
    check_gradient("normed", x, dx, [&] {
        head_cpu(logits.data(), picked.data(), x.data(), rows, W, R);
        return inner(logits, g);
    });
    std::vector<double> kept(N * C, 7);
    head_backward_cpu(kept.data(), g.data(), V, rows, W, R);
    for (int i = 0; i < C; i++) CHECK((kept[i] == 7 && kept[2 * C + i] == 7 && kept[4 * C + i] == 7));
}

TEST_CASE("rmsnorm: finite differences by x and w; what it makes again is what forward made") {
    Random random{4};
    for (auto [N, C] : {std::pair(1, 4), {3, 33}, {6, 16}}) {
        auto x = random.fill<double>(N * C), w = random.fill<double>(C, 0.5, 1);
        const auto g = random.fill<double>(N * C), before = random.fill<double>(N * C), dw_before = random.fill<double>(C);
        std::vector<double> dx = before, dw = dw_before, dy = poisoned<double>(N * C), normed = dy, out(N * C);
        const float eps = 1e-3f;
        rmsnorm_backward_cpu(dx.data(), dy.data(), normed.data(), dw.data(), g.data(), x.data(), w.data(), N, C, eps);
        auto f = [&] {
            rmsnorm_cpu(out.data(), x.data(), w.data(), N, C, eps);
            return inner(out, g);
        };
        check_gradient("x", x, minus(dx, before), f);
        check_gradient("w", w, minus(dw, dw_before), f);
        f();
        CHECK(same_bits(normed, out));
        CHECK(same_bits(dy, dx));
        std::vector<double> alone = before;
        double* none = nullptr;
        rmsnorm_backward_cpu(alone.data(), none, none, none, g.data(), x.data(), w.data(), N, C, eps);
        CHECK(same_bits(alone, dx));
    }
}

TEST_CASE("linear: finite differences by x and W, of one to three blocks") {
    Random random{5};
    for (auto& [rows, in, N] : {std::tuple(std::vector<int>{1}, 1, 1), {{5}, 33, 3}, {{6, 4, 4}, 40, 5}, {{17, 17}, 32, 9}}) {
        const int out = std::accumulate(rows.begin(), rows.end(), 0);
        auto x = random.fill<double>(N * in), w = random.fill<double>(out * in);
        const auto g = random.fill<double>(N * out), dw_before = random.fill<double>(out * in);
        const Linear<double> W = linear_of(w, rows, in);
        std::vector<double> y(N * out), dx = poisoned<double>(N * in), dw = dw_before;
        linear_backward_input_cpu(dx.data(), g.data(), W, N);
        linear_backward_weight_cpu(dw.data(), g.data(), (size_t)out, x.data(), N, out, in);
        auto f = [&] {
            linear_cpu(y.data(), x.data(), W, N);
            return inner(y, g);
        };
        check_gradient("x", x, dx, f);
        check_gradient("W", w, minus(dw, dw_before), f);
    }
}

// A product with an adapter on some of its blocks, with all that it needs.
template <class T> struct Adapted {
    std::vector<T> w, A, B, h; // B as it is, s B as it is used
    std::vector<T> sB;
    Linear<T> W;
    std::vector<uint32_t> token;
    Dropout dropout;
    Adapted(Random& random, std::vector<int> rows, std::vector<int> blocks, int in, int rank, int N, float p, float s) {
        const int out = std::accumulate(rows.begin(), rows.end(), 0), m = (int)blocks.size();
        w = random.fill<T>(out * in);
        W = linear_of(w, rows, in);
        A = random.fill<T>(m * rank * in), B.resize(out * m * rank), h.resize(N * m * rank);
        for (int j = 0; j < m; j++) {
            const int first = std::accumulate(rows.begin(), rows.begin() + blocks[j], 0);
            for (int r = first; r < first + rows[blocks[j]]; r++)
                for (int i = 0; i < rank; i++) B[(r * m + j) * rank + i] = random.fill<T>(1)[0];
        }
        W.adapter.rank = rank, W.adapter.modules = m, W.adapter.s = s;
        for (int j = 0; j < m; j++) W.adapter.block[j] = blocks[j], W.adapter.module[j] = 10 + j;
        for (int n = 0; n < N; n++) token.push_back(100 + 3 * n);
        dropout = {p, 5, 77, token.data()};
        use();
        if (p > 0) W.adapter.dropout = &dropout;
    }
    Adapted(const Adapted&) = delete;
    void use() {
        sB.clear();
        for (T x : B) sB.push_back(to_stored<T>(to_acc(x) * W.adapter.s));
        W.adapter.A = A.data(), W.adapter.B = sB.data(), W.adapter.h = h.data();
    }
};

TEST_CASE("an adapter: y = W x + s B A drop(x) by its plain formula, in every type and on every road") {
    auto check = [](auto type) {
        using T = decltype(type);
        Random random{6};
        const int N = 5, in = 40, rank = 3;
        Adapted<T> a(random, {6, 4, 4}, {0, 2}, in, rank, N, 0.3f, 2);
        const auto x = random.fill<T>(N * in);
        std::vector<T> y(N * 14);
        linear_cpu(y.data(), x.data(), a.W, N);
        std::vector<double> want(N * 14), size(N * 14);
        const double scale = 1 / (1 - (double)0.3f);
        for (int n = 0; n < N; n++)
            for (int r = 0; r < 14; r++) {
                const int j = r < 6 ? 0 : r < 10 ? -1 : 1;
                for (int k = 0; k < in; k++) {
                    const double term = to_acc(a.w[r * in + k]) * (double)to_acc(x[n * in + k]);
                    want[n * 14 + r] += term, size[n * 14 + r] += std::fabs(term);
                }
                for (int i = 0; i < rank && j >= 0; i++) {
                    double h = 0;
                    for (int k = 0; k < in; k++)
                        if (dropout_mask(a.dropout, a.token[n], a.W.adapter.module[j], k / 8) >> k % 8 & 1)
                            h += to_acc(a.A[(j * rank + i) * in + k]) * (double)to_acc(to_stored<T>((acc<T>)(to_acc(x[n * in + k]) * scale)));
                    h = to_acc(to_stored<T>((acc<T>)h));
                    const double term = 2 * h * to_acc(a.B[(r * 2 + j) * rank + i]);
                    want[n * 14 + r] += term, size[n * 14 + r] += std::fabs(term);
                }
            }
        // h may fall on the other side of a rounding: one more unit.
        CHECK(wrong(y, want, [&](size_t i) { return rounding<T>(want[i]) + rounding<T>(size[i]) + sum_error<T>(size[i]); }) == 0);
        // What is added to a residual is the same sum.
        std::vector<acc<T>> residual = random.fill<acc<T>>(N * 14), sum(N * 14);
        linear_add_cpu(sum.data(), residual.data(), x.data(), a.W, N);
        std::vector<double> total = want;
        for (size_t i = 0; i < total.size(); i++) total[i] += residual[i];
        CHECK(wrong(sum, total, [&](size_t i) { return rounding<T>(size[i]) + sum_error<T>(size[i] + 1); }) == 0);
    };
    on_every_road([&] { check(bf16{}), check(0.f), check(0.); });
}

TEST_CASE("an adapter: finite differences by x, A and B, with and without dropout; rows and blocks that are not its own") {
    Random random{7};
    for (float p : {0.f, 0.4f})
        for (auto& [rows, blocks] : {std::pair(std::vector<int>{9}, std::vector<int>{0}), {{6, 4, 4}, {0, 1, 2}}, {{6, 4, 4}, {1, 2}}, {{5, 5}, {1}}}) {
            const int N = 4, in = 21, rank = 3, m = (int)blocks.size(), out = std::accumulate(rows.begin(), rows.end(), 0);
            Adapted<double> a(random, rows, blocks, in, rank, N, p, 2);
            auto x = random.fill<double>(N * in);
            const auto g = random.fill<double>(N * out), A_before = random.fill<double>(a.A.size()), B_before = random.fill<double>(a.B.size());
            std::vector<double> y(N * out), dx(N * in), dh = poisoned<double>(N * m * rank), dA = A_before, dB = B_before;
            auto f = [&] {
                a.use();
                linear_cpu(y.data(), x.data(), a.W, N);
                return inner(y, g);
            };
            f();
            linear_backward_input_cpu(dx.data(), g.data(), a.W, N);
            lora_backward_input_cpu(dx.data(), dh.data(), g.data(), a.W, N);
            lora_backward_weight_cpu(dA.data(), dB.data(), dh.data(), g.data(), x.data(), a.W, N);
            check_gradient("x", x, dx, f);
            check_gradient("A", a.A, minus(dA, A_before), f);
            // Where module and row do not belong together nothing is added.
            std::vector<double> own = minus(dB, B_before);
            for (size_t i = 0; i < a.B.size(); i++)
                if (a.B[i] == 0) {
                    CHECK(dB[i] == B_before[i]);
                    own[i] = 0;
                }
            std::vector<double> some, theirs; // the numbers of B that are the adapter's
            std::vector<size_t> where;
            for (size_t i = 0; i < a.B.size(); i++)
                if (a.B[i] != 0) some.push_back(a.B[i]), theirs.push_back(own[i]), where.push_back(i);
            check_gradient("B", some, theirs, [&] {
                for (size_t i = 0; i < some.size(); i++) a.B[where[i]] = some[i];
                return f();
            });
        }
}

TEST_CASE("dropout: keeps 1 - p, each module, step, token and seed its own mask, none at p = 0") {
    const uint32_t token = 0;
    auto kept = [&](float p, uint64_t seed, uint32_t step, uint32_t t, uint32_t module) {
        const Dropout d = {p, seed, step, &token};
        std::string bits;
        for (uint32_t k = 0; k < 200; k++)
            for (uint32_t mask = dropout_mask(d, t, module, k), i = 0; i < 8; i++) bits += (char)('0' + (mask >> i & 1));
        return bits;
    };
    for (float p : {0.05f, 0.1f, 0.5f}) {
        double count = 0, n = 0;
        for (uint32_t t = 0; t < 100; t++)
            for (char c : kept(p, 1, 2, t, 3)) count += c == '1', n++;
        CHECK(std::fabs(count / n - (1 - p)) < 4 * std::sqrt(p * (1 - p) / n)); // four standard deviations
    }
    CHECK(kept(0, 1, 2, 3, 4) == std::string(1600, '1'));
    std::set<std::string> all;
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t j = 0; j < 2; j++)
            for (uint32_t k = 0; k < 2; k++)
                for (uint32_t l = 0; l < 2; l++) all.insert(kept(0.5f, 1 + i, 2 + j, 3 + k, 4 + l));
    CHECK(all.size() == 16);
    CHECK(kept(0.5f, 1, 2, 3, 4) == kept(0.5f, 1, 2, 3, 4));
}

TEST_CASE("SwiGLU: finite differences; what it makes again is what forward made") {
    Random random{8};
    for (auto [N, F] : {std::pair(1, 1), {3, 16}, {2, 37}}) {
        auto gate_up = random.fill<double>(N * 2 * F, 4);
        const auto g = random.fill<double>(N * F);
        std::vector<double> d = poisoned<double>(N * 2 * F), hidden = poisoned<double>(N * F), out(N * F);
        swiglu_backward_cpu(d.data(), hidden.data(), g.data(), gate_up.data(), N, F);
        auto f = [&] {
            swiglu_cpu(out.data(), gate_up.data(), N, F);
            return inner(out, g);
        };
        check_gradient("gate and up", gate_up, d, f);
        f();
        CHECK(same_bits(hidden, out));
    }
}

TEST_CASE("q/k norm, RoPE, attention: finite differences from qkv to the output, by the norms' weights too; ragged, scattered pages") {
    Random random{9};
    for (auto& [H, K, D, lengths] : {std::tuple(1, 1, 2, std::vector<int>{1}), {4, 2, 6, {1, 7, 19}}, {3, 1, 16, {18, 2}}}) {
        std::vector<std::pair<int, int>> sequences;
        for (int n : lengths) sequences.push_back({0, n});
        const TestBatch batch(random, sequences, 50);
        const Batch b = batch.view();
        const int N = b.N, width = (H + 2 * K) * D;
        const float eps = 1e-3f;
        auto qkv = random.fill<double>(N * width), q_weight = random.fill<double>(D, 0.5, 1), k_weight = random.fill<double>(D, 0.5, 1);
        const auto g = random.fill<double>(N * H * D), wq_before = random.fill<double>(D), wk_before = random.fill<double>(D);
        std::vector<double> rope(64 * D), q(N * H * D), keys((size_t)batch.page_count * PAGE * K * D), values = keys, out(N * H * D), lse(N * H);
        fill_rope(rope.data(), 64, D, 100.);
        auto f = [&] {
            qknorm_rope_kv_cpu(q.data(), keys.data(), values.data(), qkv.data(), q_weight.data(), k_weight.data(), rope.data(), b, H, K, D, eps);
            attention_cpu(out.data(), lse.data(), q.data(), keys.data(), values.data(), b, H, K, D);
            return inner(out, g);
        };
        f();
        std::vector<double> d = poisoned<double>(N * width), delta(N * H), dwq = wq_before, dwk = wk_before;
        attention_backward_cpu(d.data(), g.data(), q.data(), keys.data(), values.data(), out.data(), lse.data(), b, H, K, D, delta.data());
        qknorm_rope_backward_cpu(d.data(), dwq.data(), dwk.data(), qkv.data(), q_weight.data(), k_weight.data(), rope.data(), b, H, K, D, eps);
        check_gradient("qkv", qkv, d, f);
        if (N == 1) continue; // one key: its weight is 1, whatever q and k are
        check_gradient("q_norm", q_weight, minus(dwq, wq_before), f);
        check_gradient("k_norm", k_weight, minus(dwk, wk_before), f);
    }
}

TEST_CASE("embed: finite differences; tokens that come twice") {
    Random random{10};
    const int V = 6, C = 5;
    const TestBatch batch(random, {{0, 9}}, V, 1);
    const Batch b = batch.view();
    auto w = random.fill<double>(V * C);
    auto g = random.fill<double>(b.N * C);
    const auto before = random.fill<double>(V * C);
    const Linear<double> table = linear_of(w, {V}, C);
    std::vector<double> x(b.N * C, 0), dw = before;
    embed_backward_cpu(dw.data(), g.data(), b, C);
    check_gradient("W", w, minus(dw, before), [&] {
        embed_cpu(x.data(), table, b, C);
        return inner(x, g);
    });
}
