// The backward pass: every op, as Book I defines it and as cpu/ computes it, against finite differences in double and
// against PyTorch's autograd (tests/make_train_fixtures.py), every type against the definition in double, and the gradients
// of whole models against PyTorch's and against those that the definitions give.
#include "base/file.h"
#include "model/adapters.h"
#include "model/model_file.h"
#include "model/weights.h"
#include "sj.h"
#include "tests/common.h"
#include <map>
#include <set>

namespace {
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
    EACH_WAY;
    Random random{1};
    for (const auto& shape : {std::pair(1, 5), {3, 16}, {4, 37}}) {
        const int R = shape.first, V = shape.second;
        auto logits = random.fill<double>((size_t)R * V, 4);
        std::vector<int> target;
        for (int r = 0; r < R; r++) target.push_back(random.below(V));
        std::vector<double> loss(R), gradient = logits;
        CALL(cross_entropy, loss.data(), gradient.data(), gradient.data(), target.data(), 0.3, R, V);
        auto f = [&] {
            double sum = 0;
            std::vector<double> each(R);
            CALL(cross_entropy, each.data(), (double*)nullptr, logits.data(), target.data(), 1., R, V);
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
    EACH_WAY;
    Random random{2};
    const int R = 3, V = 50;
    auto logits = random.fill<float>(R * V, 300);
    const std::vector<int> target = {0, 49, 7};
    std::vector<float> loss(R), wide = logits, narrow = logits, unused(R);
    CALL(cross_entropy, loss.data(), wide.data(), wide.data(), target.data(), 1.f, R, V);
    CALL(cross_entropy, unused.data(), (bf16*)narrow.data(), narrow.data(), target.data(), 1.f, R, V);
    CHECK(same_bits(loss, unused));
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            bf16 got;
            memcpy(&got, (uint8_t*)(narrow.data() + r * V) + 2 * v, 2);
            CHECK(got.bits == to_bf16(wide[r * V + v]).bits);
        }
    for (float l : loss) CHECK(std::isfinite(l));
    logits[V + 20] = NAN;
    CALL(cross_entropy, loss.data(), (float*)nullptr, logits.data(), target.data(), 1.f, R, V);
    CHECK(std::isfinite(loss[0]));
    CHECK(std::isnan(loss[1]));
}

TEST_CASE("head: finite differences by the rows that are named; the others' gradient is not touched") {
    EACH_WAY;
    Random random{3};
    const int N = 5, C = 7, V = 19, R = 2, rows[R] = {3, 1};
    const auto w = random.fill<double>(V * C), g = random.fill<double>(R * V);
    auto x = random.fill<double>(N * C);
    const Linear<double> W = linear_of(w, {V}, C);
    std::vector<double> dx(N * C, 0), logits(R * V), picked(R * C), scaled = g;
    const double factor[R] = {0.5, 3};
    for (int i = 0; i < R * V; i++) scaled[i] *= factor[i / V];
    CALL(head_backward, dx.data(), g.data(), V, factor, rows, W, R);
    check_gradient("normed", x, dx, [&] {
        CALL(head, logits.data(), picked.data(), x.data(), rows, W, R);
        return inner(logits, scaled);
    });
    std::vector<double> kept(N * C, 7);
    CALL(head_backward, kept.data(), g.data(), V, factor, rows, W, R);
    for (int i = 0; i < C; i++) CHECK((kept[i] == 7 && kept[2 * C + i] == 7 && kept[4 * C + i] == 7));
}

TEST_CASE("rmsnorm: finite differences by x and w; what it makes again is what forward made") {
    EACH_WAY;
    Random random{4};
    for (const auto& shape : {std::pair(1, 4), {3, 33}, {6, 16}}) {
        const int N = shape.first, C = shape.second;
        auto x = random.fill<double>(N * C), w = random.fill<double>(C, 0.5, 1);
        const auto g = random.fill<double>(N * C), before = random.fill<double>(N * C), dw_before = random.fill<double>(C);
        std::vector<double> dx = before, dw = dw_before, dy = poisoned<double>(N * C), normed = dy, out(N * C);
        const float eps = 1e-3f;
        CALL(rmsnorm_backward, dx.data(), dy.data(), normed.data(), dw.data(), g.data(), x.data(), w.data(), N, C, eps);
        auto f = [&] {
            CALL(rmsnorm, out.data(), x.data(), w.data(), N, C, eps);
            return inner(out, g);
        };
        check_gradient("x", x, minus(dx, before), f);
        check_gradient("w", w, minus(dw, dw_before), f);
        f();
        CHECK(same_bits(normed, out));
        CHECK(same_bits(dy, dx));
        std::vector<double> alone = before;
        double* none = nullptr;
        CALL(rmsnorm_backward, alone.data(), none, none, none, g.data(), x.data(), w.data(), N, C, eps);
        CHECK(same_bits(alone, dx));
    }
}

TEST_CASE("linear: finite differences by x and W, of one to three blocks") {
    EACH_WAY;
    Random random{5};
    struct Shape { std::vector<int> rows; int in, N; };
    for (auto& [blocks, width, tokens] : {Shape{{1}, 1, 1}, {{5}, 33, 3}, {{6, 4, 4}, 40, 5}, {{17, 17}, 32, 9}}) {
        const int in = width, N = tokens; // (a lambda of C++17 cannot capture a binding)
        const std::vector<int>& rows = blocks;
        const int out = std::accumulate(rows.begin(), rows.end(), 0);
        auto x = random.fill<double>(N * in), w = random.fill<double>(out * in);
        const auto g = random.fill<double>(N * out), dw_before = random.fill<double>(out * in);
        const Linear<double> W = linear_of(w, rows, in);
        std::vector<double> y(N * out), dx = poisoned<double>(N * in), dw = dw_before;
        CALL(linear_backward_input, dx.data(), (double*)nullptr, (double*)nullptr, g.data(), W, N);
        CALL(linear_backward_weight, dw.data(), g.data(), (size_t)out, x.data(), N, out, in);
        auto f = [&] {
            CALL(linear, y.data(), x.data(), W, N);
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

TEST_CASE("an adapter: y = W x + s B A drop(x) by its plain formula, in every type and on every instruction set") {
    EACH_WAY;
    auto check = [](auto type) {
        using T = decltype(type);
        Random random{6};
        const int N = 5, in = 40, rank = 3;
        Adapted<T> a(random, {6, 4, 4}, {0, 2}, in, rank, N, 0.3f, 2);
        const auto x = random.fill<T>(N * in);
        std::vector<T> y(N * 14);
        CALL(linear, y.data(), x.data(), a.W, N);
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
        // The numbers added to a residual are the same sum.
        std::vector<acc<T>> residual = random.fill<acc<T>>(N * 14), sum(N * 14);
        CALL(linear_add, sum.data(), residual.data(), x.data(), a.W, N);
        std::vector<double> total = want;
        for (size_t i = 0; i < total.size(); i++) total[i] += residual[i];
        CHECK(wrong(sum, total, [&](size_t i) { return rounding<T>(size[i]) + sum_error<T>(size[i] + 1); }) == 0);
    };
    on_every_instruction_set([&] { check(bf16{}), check(0.f), check(0.); });
}

TEST_CASE("an adapter: finite differences by x, A and B, with and without dropout; rows and blocks that are not its own") {
    EACH_WAY;
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
                CALL(linear, y.data(), x.data(), a.W, N);
                return inner(y, g);
            };
            f();
            CALL(linear_backward_input, dx.data(), dh.data(), dB.data(), g.data(), a.W, N);
            CALL(lora_backward_weight, dA.data(), dh.data(), x.data(), a.W, N);
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
    EACH_WAY;
    Random random{8};
    for (const auto& shape : {std::pair(1, 1), {3, 16}, {2, 37}}) {
        const int N = shape.first, F = shape.second;
        auto gate_up = random.fill<double>(N * 2 * F, 4);
        const auto g = random.fill<double>(N * F);
        std::vector<double> d = poisoned<double>(N * 2 * F), hidden = poisoned<double>(N * F), out(N * F);
        CALL(swiglu_backward, d.data(), hidden.data(), g.data(), gate_up.data(), N, F);
        auto f = [&] {
            CALL(swiglu, out.data(), gate_up.data(), N, F);
            return inner(out, g);
        };
        check_gradient("gate and up", gate_up, d, f);
        f();
        CHECK(same_bits(hidden, out));
    }
}

TEST_CASE("q/k norm, RoPE, attention: finite differences from qkv to the output, by the norms' weights too; ragged, scattered pages") {
    EACH_WAY;
    Random random{9};
    struct Shape { int H, K, D; std::vector<int> lengths; };
    for (const Shape& shape : {Shape{1, 1, 2, {1}}, {4, 2, 6, {1, 4}}, {3, 1, 4, {18, 2}}}) {
        const int H = shape.H, K = shape.K, D = shape.D;
        std::vector<std::pair<int, int>> sequences;
        for (int n : shape.lengths) sequences.push_back({0, n});
        const TestBatch batch(random, sequences, 50);
        const Batch b = batch.view();
        const int N = b.N, width = (H + 2 * K) * D;
        const float eps = 1e-3f;
        auto qkv = random.fill<double>(N * width), q_weight = random.fill<double>(D, 0.5, 1), k_weight = random.fill<double>(D, 0.5, 1);
        const auto g = random.fill<double>(N * H * D), wq_before = random.fill<double>(D), wk_before = random.fill<double>(D);
        std::vector<double> rope(64 * D), q(N * H * D), keys((size_t)batch.page_count * PAGE * K * D), values = keys, out(N * H * D), lse(N * H);
        fill_rope(rope.data(), 64, D, 100., SCALED);
        auto f = [&] {
            CALL(qknorm_rope_kv, q.data(), {keys.data(), values.data()}, qkv.data(), {q_weight.data(), k_weight.data(), rope.data()}, b, {H, K, D, eps});
            CALL(attention, out.data(), lse.data(), q.data(), {keys.data(), values.data()}, b, {H, K, D});
            return inner(out, g);
        };
        f();
        std::vector<double> d = poisoned<double>(N * width), delta(N * H), dwq = wq_before, dwk = wk_before;
        CALL(attention_backward, d.data(), g.data(), {q.data(), out.data(), lse.data()}, {keys.data(), values.data()}, b, {H, K, D}, delta.data());
        CALL(qknorm_rope_backward, d.data(), {dwq.data(), dwk.data()}, qkv.data(), {q_weight.data(), k_weight.data(), rope.data()}, b, {H, K, D, eps});
        auto both = poisoned<double>(d.size()), both_wq = wq_before, both_wk = wk_before;
        CALL(attend_backward, both.data(), {both_wq.data(), both_wk.data()}, g.data(), {q.data(), out.data(), lse.data()}, {keys.data(), values.data()}, qkv.data(), {q_weight.data(), k_weight.data(), rope.data()}, b, {H, K, D, eps}, delta.data());
        CHECK(same_bits(both, d));
        CHECK(same_bits(both_wq, dwq));
        CHECK(same_bits(both_wk, dwk));
        check_gradient("qkv", qkv, d, f);
        if (N == 1) continue; // one key: its weight is 1, whatever q and k are
        check_gradient("q_norm", q_weight, minus(dwq, wq_before), f);
        check_gradient("k_norm", k_weight, minus(dwk, wk_before), f);
    }
}

TEST_CASE("embed: finite differences; tokens that come twice") {
    EACH_WAY;
    Random random{10};
    const int V = 6, C = 5;
    const TestBatch batch(random, {{0, 9}}, V, 1);
    const Batch b = batch.view();
    auto w = random.fill<double>(V * C);
    auto g = random.fill<double>(b.N * C);
    const auto before = random.fill<double>(V * C);
    const Linear<double> table = linear_of(w, {V}, C);
    std::vector<double> x(b.N * C, 0), dw = before;
    CALL(embed_backward, dw.data(), g.data(), b, C);
    check_gradient("W", w, minus(dw, before), [&] {
        CALL(embed, x.data(), table, b, C);
        return inner(x, g);
    });
}

// ---- Every stored type against the definition in double

// Counts the numbers that are not within a rounding and a sum's error of `want`; `roundings` more of T's where what is
// summed was itself rounded.
template <class T, class U> static int off(const std::vector<U>& got, const std::vector<double>& want, int roundings = 0) {
    double largest = 0;
    for (double x : want) largest = std::max(largest, std::fabs(x));
    return wrong(got, want, [&](size_t i) { return rounding<U>(want[i]) + roundings * rounding<T>(largest) + sum_error<T>(20 * largest); });
}
// The same Linear in double, with its adapter.
struct WideAdapted : WideLinear {
    std::vector<double> A, B, h;
    template <class T> explicit WideAdapted(const Adapted<T>& a)
        : WideLinear(a.W), A(as_double(a.A)), B(as_double(a.sB)), h(as_double(a.h)) {
        const Adapter<T>& from = a.W.adapter;
        adapter.rank = from.rank, adapter.modules = from.modules, adapter.s = from.s, adapter.dropout = from.dropout;
        std::copy_n(from.block, 3, adapter.block), std::copy_n(from.module, 3, adapter.module);
        adapter.A = A.data(), adapter.B = B.data(), adapter.h = h.data();
    }
};

TEST_CASE_TEMPLATE("losses and the head's gradient: the definition in double", T, bf16, float, double) {
    EACH_WAY;
    Random random{21};
    const int R = 3, V = 50, C = 37, N = 5, target[R] = {0, 49, 7}, rows[R] = {4, 0, 2};
    const auto w = random.fill<T>(V * C), x = random.fill<T>(N * C);
    const Linear<T> W = linear_of(w, {V}, C);
    const WideLinear wide(W);
    std::vector<acc<T>> loss(R), logits(R * V), again(R), scratch(4 * R), factor(R);
    std::vector<T> picked(R * C), dnormed(N * C);
    std::vector<double> want_loss(R), want(R * V), want_picked(R * C), want_dnormed(N * C), want_factor(R);
    const std::vector<acc<T>> by = random.fill<acc<T>>(R, 2);
    const std::vector<double> wide_by = as_double(by);
    const size_t ld = V * sizeof(acc<T>) / sizeof(T); // gradients lie at the beginnings of the logits' rows
    head_loss(want_loss.data(), want.data(), want_factor.data(), want.data(), want_picked.data(), (double*)nullptr, as_double(x).data(), {rows, target, 0.3, wide_by.data(), R}, wide);
    CALL(head_loss, loss.data(), (T*)logits.data(), factor.data(), logits.data(), picked.data(), scratch.data(), x.data(), {rows, target, (acc<T>)0.3, nullptr, R}, W);
    for (acc<T> one : factor) CHECK(one == 1);
    CALL(head_loss, loss.data(), (T*)logits.data(), factor.data(), logits.data(), picked.data(), scratch.data(), x.data(), {rows, target, (acc<T>)0.3, by.data(), R}, W);
    CHECK(as_double(factor) == want_factor);
    std::vector<T> d(R * V);
    for (int r = 0; r < R; r++) memcpy((void*)&d[r * V], (T*)logits.data() + r * ld, V * sizeof(T));
    CHECK(off<T>(loss, want_loss) == 0);
    CHECK(off<T>(d, want) == 0);
    CALL(head, logits.data(), picked.data(), x.data(), rows, W, R); // the fusion is the two ops
    CALL(cross_entropy, again.data(), (T*)nullptr, logits.data(), target, (acc<T>)0.3, R, V);
    CHECK(same_bits(loss, again));
    double total = 1, sum = 1;
    CALL(add_losses, &total, loss.data(), R);
    for (acc<T> l : loss) sum += (double)l;
    CHECK(total == sum);

    std::vector<T> scaled = d, want_scaled = d; // rows that are not neighbours
    for (int r = 0; r < R; r++)
        for (int v = 0; v < (int)V - 3; v++) want_scaled[r * V + v] = to_stored<T>(to_acc(d[r * V + v]) * by[r]);
    CALL(scale_rows, scaled.data(), (size_t)V, by.data(), R, (int)V - 3);
    CHECK(same_bits(scaled, want_scaled));

    CALL(head_backward, dnormed.data(), d.data(), (size_t)V, factor.data(), rows, W, R);
    head_backward(want_dnormed.data(), as_double(d).data(), V, want_factor.data(), rows, wide, R);
    CHECK(off<T>(dnormed, want_dnormed) == 0);
}

TEST_CASE_TEMPLATE("gradients of rmsnorm, SwiGLU, q/k norm and RoPE: the definition in double", T, bf16, float, double) {
    EACH_WAY;
    Random random{22};
    const int N = 7, C = 45;
    {
        const auto x = random.fill<acc<T>>(N * C, 2), before = random.fill<acc<T>>(N * C), dw_before = random.fill<acc<T>>(C);
        const auto w = random.fill<T>(C, 0.5, 1), dout = random.fill<T>(N * C);
        auto dx = before, dw = dw_before;
        std::vector<T> dy(N * C), normed(N * C);
        std::vector<double> want = as_double(before), want_dw = as_double(dw_before), none(N * C), want_normed(N * C);
        CALL(rmsnorm_backward, dx.data(), dy.data(), normed.data(), dw.data(), dout.data(), x.data(), w.data(), N, C, 1e-5f);
        rmsnorm_backward(want.data(), none.data(), want_normed.data(), want_dw.data(), as_double(dout).data(), as_double(x).data(), as_double(w).data(), N, C, 1e-5f);
        CHECK(off<T>(dx, want) == 0);
        CHECK(off<T>(dy, want) == 0);
        CHECK(off<T>(dw, want_dw) == 0);
        CHECK(off<T>(normed, want_normed) == 0);
    }
    {
        const auto gate_up = random.fill<T>(N * 2 * C, 8), dhidden = random.fill<T>(N * C);
        std::vector<T> d(N * 2 * C), hidden(N * C), forward(N * C);
        std::vector<double> want(N * 2 * C), want_hidden(N * C);
        CALL(swiglu_backward, d.data(), hidden.data(), dhidden.data(), gate_up.data(), N, C);
        swiglu_backward(want.data(), want_hidden.data(), as_double(dhidden).data(), as_double(gate_up).data(), N, C);
        CHECK(off<T>(d, want) == 0);
        CHECK(off<T>(hidden, want_hidden) == 0);
        CALL(swiglu, forward.data(), gate_up.data(), N, C);
        CHECK(same_bits(hidden, forward));
    }
    {
        const int H = 4, K = 2, D = 38, width = (H + 2 * K) * D;
        const TestBatch batch(random, {{0, 5}, {0, 18}}, 9, 2);
        const Batch b = batch.view();
        const auto qkv = random.fill<T>(b.N * width, 2), before = random.fill<T>(b.N * width), wq = random.fill<T>(D, 0.5, 1), wk = random.fill<T>(D, 0.5, 1);
        const auto dwq_before = random.fill<acc<T>>(D), dwk_before = random.fill<acc<T>>(D);
        std::vector<acc<T>> rope(20 * D);
        fill_rope(rope.data(), 20, D, 1e4, SCALED);
        auto d = before;
        auto dwq = dwq_before, dwk = dwk_before;
        std::vector<double> want = as_double(before), want_q = as_double(dwq), want_k = as_double(dwk);
        CALL(qknorm_rope_backward, d.data(), {dwq.data(), dwk.data()}, qkv.data(), {wq.data(), wk.data(), rope.data()}, b, {H, K, D, 1e-5f});
        qknorm_rope_backward(want.data(), {want_q.data(), want_k.data()}, as_double(qkv).data(), {as_double(wq).data(), as_double(wk).data(), as_double(rope).data()}, b, {H, K, D, 1e-5f});
        CHECK(off<T>(d, want) == 0); // v's heads and spare rows stay
        CHECK(off<T>(dwq, want_q) == 0);
        CHECK(off<T>(dwk, want_k) == 0);
        auto alone = before;
        acc<T>* none = nullptr;
        CALL(qknorm_rope_backward, alone.data(), {none, none}, qkv.data(), {wq.data(), wk.data(), rope.data()}, b, {H, K, D, 1e-5f});
        CHECK(same_bits(alone, d));

        auto dx = random.fill<acc<T>>(b.N * C), dW = random.fill<acc<T>>(9 * C);
        std::vector<double> want_dW = as_double(dW);
        CALL(embed_backward, dW.data(), dx.data(), b, C);
        embed_backward(want_dW.data(), as_double(dx).data(), b, C);
        CHECK(off<T>(dW, want_dW) == 0);
    }
}

TEST_CASE_TEMPLATE("gradients of products, with adapters and dropout or without: the definition in double", T, bf16, float, double) {
    EACH_WAY;
    Random random{23};
    for (float p : {0.f, 0.3f})
        for (auto& shape : {std::pair(std::vector<int>{1}, 1), {{6, 4, 4}, 40}, {{19, 33}, 75}}) {
            const std::vector<int>& rows = shape.first;
            const int in = shape.second, N = 7, rank = 3, m = (int)rows.size() > 1 ? 2 : 1, out = std::accumulate(rows.begin(), rows.end(), 0);
            Adapted<T> a(random, rows, m == 1 ? std::vector<int>{0} : std::vector<int>{0, (int)rows.size() - 1}, in, rank, N, p, 2);
            a.h = random.fill<T>(a.h.size());
            a.use();
            const auto x = random.fill<T>(N * in), dy = random.fill<T>(N * out);
            WideAdapted wide(a);
            std::vector<T> dx(N * in), dh(N * m * rank);
            std::vector<double> want(dx.size()), want_dh(dh.size());
            auto dA = random.fill<acc<T>>(a.A.size()), dB = random.fill<acc<T>>(a.B.size()), dW = random.fill<acc<T>>(out * in), again_B = dB;
            std::vector<double> want_A = as_double(dA), want_B = as_double(dB), want_W = as_double(dW);
            CALL(linear_backward_input, dx.data(), dh.data(), dB.data(), dy.data(), a.W, N);
            linear_backward_input(want.data(), want_dh.data(), want_B.data(), as_double(dy).data(), wide, N);
            CHECK(off<T>(dh, want_dh) == 0);
            CHECK(off<T>(dx, want, 4) == 0); // of dh, rounded
            CHECK(off<T>(dB, want_B) == 0);
            CALL(lora_backward_weight, dA.data(), dh.data(), x.data(), a.W, N);
            lora_backward_weight(want_A.data(), as_double(dh).data(), as_double(x).data(), wide, N);
            CHECK(off<T>(dA, want_A, p > 0 ? 4 : 0) == 0); // of x / (1 - p), rounded

            // With SwiGLU behind it: the two ops.
            const auto gate_up = random.fill<T>(N * 2 * in, 4);
            std::vector<T> dhidden(N * in), hidden(N * in), dgate_up(N * 2 * in), again_dh(dh.size()), again_hidden(N * in), again(N * 2 * in);
            CALL(swiglu_backward, dgate_up.data(), hidden.data(), dx.data(), gate_up.data(), N, in);
            CALL(linear_backward_swiglu, again.data(), again_hidden.data(), dhidden.data(), again_dh.data(), again_B.data(), dy.data(), gate_up.data(), a.W, N);
            CHECK(same_bits(again, dgate_up));
            CHECK(same_bits(again_hidden, hidden));
            CHECK(same_bits(again_dh, dh));
            CHECK(same_bits(again_B, dB));
            CALL(linear_backward_weight, dW.data(), dy.data(), (size_t)out, x.data(), N, out, in);
            linear_backward_weight(want_W.data(), as_double(dy).data(), out, as_double(x).data(), N, out, in);
            CHECK(off<T>(dW, want_W) == 0);

            // The forward pass: h of each module, and the product that uses it.
            std::vector<T> h(a.h.size()), y(N * out);
            std::vector<double> want_h(h.size());
            CALL(lora_down, h.data(), x.data(), a.W, N);
            lora_down(want_h.data(), as_double(x).data(), wide, N);
            CHECK(off<T>(h, want_h, p > 0 ? 4 : 0) == 0);
            CALL(linear, y.data(), x.data(), a.W, N);
            CHECK(same_bits(a.h, h));
        }
}

TEST_CASE_TEMPLATE("gradients of large products: the definition in double; a row's bits alone, in any batch, on any number of threads", T, bf16, float, double) {
    Random random{31};
    for (auto [N, out, in] : {std::tuple{300, 290, 75}, {13, 600, 40}, {70, 33, 257}, {1, 300, 16}}) on_every_instruction_set([&, N = N, out = out, in = in] {
        const std::vector<int> blocks = {out / 3, out - out / 3};
        const auto w = random.fill<T>((size_t)out * in);
        const auto wide = as_double(w);
        const Linear<T> W = linear_of(w, blocks, in);
        const auto x = random.fill<T>((size_t)N * in), dy = random.fill<T>((size_t)N * out);
        const auto before = random.fill<acc<T>>((size_t)out * in);
        std::vector<double> want((size_t)N * in), want_W = as_double(before);
        linear_backward_input(want.data(), (double*)nullptr, (double*)nullptr, as_double(dy).data(), linear_of(wide, blocks, in), N);
        linear_backward_weight(want_W.data(), as_double(dy).data(), out, as_double(x).data(), N, out, in);
        auto dx_of = [&](int first, int rows) {
            auto dx = poisoned<T>((size_t)rows * in);
            linear_backward_input_cpu(cpu(), dx.data(), (T*)nullptr, (acc<T>*)nullptr, dy.data() + (size_t)first * out, W, rows);
            return dx;
        };
        auto dW_of = [&] {
            auto dW = before;
            linear_backward_weight_cpu(cpu(), dW.data(), dy.data(), out, x.data(), N, out, in);
            return dW;
        };
        const auto dx = dx_of(0, N);
        const auto dW = dW_of();
        CHECK(off<T>(dx, want) == 0);
        CHECK(off<T>(dW, want_W) == 0);
        for (int rows : {1, 2, 7, 64})
            for (int n = 0; n + rows <= N; n += 17) {
                const auto alone = dx_of(n, rows);
                REQUIRE(memcmp(alone.data(), dx.data() + (size_t)n * in, alone.size() * sizeof(T)) == 0);
            }
#ifdef _OPENMP
        const int threads = omp_get_max_threads();
        for (int j : {1, 3, 7}) {
            omp_set_num_threads(j);
            CHECK(same_bits(dx_of(0, N), dx));
            CHECK(same_bits(dW_of(), dW));
        }
        omp_set_num_threads(threads);
#endif
    });
}

// ---- PyTorch's autograd, op by op (ops.json)

struct Reference {
    MappedFile file{"tests/fixtures/train/ops.json"};
    sj::Doc doc;
    Reference() { REQUIRE(sj::parse(doc, file.text()) == ""); }
    std::vector<double> operator()(const char* op, const char* name) const {
        std::vector<double> v;
        for (sj::Value x : doc.root()[op][name].items()) v.push_back(x.number());
        REQUIRE(!v.empty());
        return v;
    }
};
static void check_same(const char* what, const std::vector<double>& got, const std::vector<double>& want, double tolerance = 1e-12) {
    INFO(what);
    CHECK(wrong(got, want, [&](size_t) { return tolerance * 10; }) == 0);
}

TEST_CASE("every op: PyTorch's autograd in double") {
    EACH_WAY;
    const Reference reference;
    auto of = [&](const char* op) { return [&, op](const char* name) { return reference(op, name); }; };
    {
        auto r = of("cross_entropy");
        const int target[] = {3, 0, 18};
        const auto logits = r("logits"), g = r("g");
        std::vector<double> loss(3), d(57);
        for (int row = 0; row < 3; row++) { // `scale` is one number: a row at a time
            memcpy(&d[row * 19], &logits[row * 19], 19 * sizeof(double));
            CALL(cross_entropy, &loss[row], &d[row * 19], &d[row * 19], target + row, g[row], 1, 19);
        }
        check_same("loss", loss, r("out"));
        check_same("dlogits", d, r("d_logits"));
    }
    {
        auto r = of("linear");
        const auto x = r("x"), w = r("W"), g = r("g");
        const Linear<double> W = linear_of(w, {2, 3}, 9);
        std::vector<double> dx(36), dw(45), y(20);
        CALL(linear, y.data(), x.data(), W, 4);
        CALL(linear_backward_input, dx.data(), (double*)nullptr, (double*)nullptr, g.data(), W, 4);
        CALL(linear_backward_weight, dw.data(), g.data(), 5, x.data(), 4, 5, 9);
        check_same("y", y, r("out")), check_same("dx", dx, r("d_x")), check_same("dW", dw, r("d_W"));
        std::vector<double> picked(36), dnormed(36);
        const int rows[] = {2, 0, 3, 1};
        const double factor[] = {1, 1, 1, 1};
        CALL(head_backward, dnormed.data(), g.data(), 5, factor, rows, linear_of(w, {5}, 9), 4);
        for (int i = 0; i < 4; i++) memcpy(&picked[i * 9], &dnormed[rows[i] * 9], 9 * sizeof(double));
        check_same("head", picked, r("d_x"));
    }
    {
        auto r = of("lora");
        const auto x = r("x"), w = r("W"), g = r("g");
        auto A = r("A"), sB = r("B");
        for (double& b : sB) b *= 2;
        Linear<double> W = linear_of(w, {5}, 9);
        std::vector<double> h(12), y(20), dx(36), dh(12), dA(27), dB(15);
        W.adapter.rank = 3, W.adapter.modules = 1, W.adapter.s = 2, W.adapter.A = A.data(), W.adapter.B = sB.data(), W.adapter.h = h.data();
        CALL(linear, y.data(), x.data(), W, 4);
        CALL(linear_backward_input, dx.data(), dh.data(), dB.data(), g.data(), W, 4);
        CALL(lora_backward_weight, dA.data(), dh.data(), x.data(), W, 4);
        check_same("y", y, r("out")), check_same("dx", dx, r("d_x")), check_same("dA", dA, r("d_A")), check_same("dB", dB, r("d_B"));
    }
    {
        auto r = of("rmsnorm");
        const auto x = r("x"), w = r("w"), g = r("g");
        std::vector<double> dx(30), dw(10), normed(30);
        CALL(rmsnorm_backward, dx.data(), (double*)nullptr, normed.data(), dw.data(), g.data(), x.data(), w.data(), 3, 10, 1e-5f);
        // (eps is a float: 1e-5f is off by 3e-13 of itself and more)
        check_same("y", normed, r("out"), 1e-11), check_same("dx", dx, r("d_x"), 1e-11), check_same("dw", dw, r("d_w"), 1e-11);
    }
    {
        auto r = of("swiglu");
        const auto x = r("gate_up"), g = r("g");
        std::vector<double> d(66), hidden(33);
        CALL(swiglu_backward, d.data(), hidden.data(), g.data(), x.data(), 3, 11);
        check_same("hidden", hidden, r("out")), check_same("dgate_up", d, r("d_gate_up"));
    }
    {
        auto r = of("attend");
        const int N = 7, H = 4, K = 2, D = 6;
        Random random{1};
        const TestBatch batch(random, {{0, 3}, {0, 4}}, 9);
        const Batch b = batch.view();
        const auto qkv = r("qkv"), wq = r("q_weight"), wk = r("k_weight"), g = r("g");
        std::vector<double> rope(4 * D), q(N * H * D), keys((size_t)batch.page_count * PAGE * K * D), values = keys, out(N * H * D), lse(N * H), delta(N * H);
        std::vector<double> d(N * (H + 2 * K) * D), dwq(D), dwk(D);
        fill_rope(rope.data(), 4, D, 100.);
        CALL(attend, out.data(), lse.data(), q.data(), {keys.data(), values.data()}, qkv.data(), {wq.data(), wk.data(), rope.data()}, b, {H, K, D, 1e-5f});
        CALL(attention_backward, d.data(), g.data(), {q.data(), out.data(), lse.data()}, {keys.data(), values.data()}, b, {H, K, D}, delta.data());
        CALL(qknorm_rope_backward, d.data(), {dwq.data(), dwk.data()}, qkv.data(), {wq.data(), wk.data(), rope.data()}, b, {H, K, D, 1e-5f});
        check_same("out", out, r("out"), 1e-11), check_same("dqkv", d, r("d_qkv"), 1e-11);
        check_same("dq_weight", dwq, r("d_q_weight"), 1e-11), check_same("dk_weight", dwk, r("d_k_weight"), 1e-11);
    }
    {
        auto r = of("embed");
        const int token[] = {2, 0, 2, 4}, seq[] = {0, 0, 0, 0};
        const auto g = r("g");
        std::vector<double> dw(15);
        CALL(embed_backward, dw.data(), g.data(), Batch{4, 1, token, nullptr, seq, nullptr, nullptr, 1}, 3);
        check_same("dW", dw, r("d_W"));
    }
    {
        auto r = of("adamw");
        const auto gradients = r("gradients"), norms = r("norms"), steps = r("steps");
        std::vector<double> p = r("p"), m(6), v(6), stored(6);
        for (int step = 1; step <= 3; step++) {
            const double* g = &gradients[(step - 1) * 6];
            double norm, partial[1];
            CALL(grad_norm, &norm, partial, g, 6);
            CHECK(norm == doctest::Approx(norms[step - 1]).epsilon(1e-12));
            AdamW how;
            how.lr = 0.01f, how.decay = 0.1f, how.clip = 1, how.step = step, how.copy = 2;
            CALL(adamw, stored.data(), p.data(), m.data(), v.data(), g, &norm, 6, how);
            // (lr, betas and decay are floats here, doubles there)
            check_same("p", p, {&steps[(step - 1) * 6], &steps[(step - 1) * 6] + 6}, 1e-8);
            for (int i = 0; i < 6; i++) CHECK(stored[i] == 2 * p[i]);
        }
    }
}

TEST_CASE("grad_norm: pieces of any number; adamw: nothing moves where the norm is not finite") {
    EACH_WAY;
    Random random{11};
    for (size_t n : {(size_t)1, NORM_PIECE, NORM_PIECE + 1, 3 * NORM_PIECE + 77}) {
        const auto g = random.fill<float>(n);
        std::vector<double> partial((n + NORM_PIECE - 1) / NORM_PIECE);
        double norm, sum = 0;
        CALL(grad_norm, &norm, partial.data(), g.data(), n);
        for (float x : g) sum += (double)x * x;
        CHECK(norm == doctest::Approx(std::sqrt(sum)).epsilon(1e-12));
    }
    for (double norm : {(double)NAN, (double)INFINITY}) {
        std::vector<float> p = {1, 2}, m = {3, 4}, v = {5, 6}, g = {NAN, 1};
        std::vector<bf16> stored = {to_bf16(7), to_bf16(8)};
        AdamW how;
        how.lr = 1, how.step = 1;
        CALL(adamw, stored.data(), p.data(), m.data(), v.data(), g.data(), &norm, 2, how);
        CHECK((p[0] == 1 && p[1] == 2 && m[0] == 3 && v[1] == 6 && to_acc(stored[0]) == 7));
    }
}

// ---- Whole models

// A model of tests/fixtures/train with everything trained, and an adapter on everything too, B = 0 unless said.
template <class T> struct Harness {
    using A = acc<T>;
    ModelFile file;
    const Config& c = file.config;
    Weights<T> w;
    std::vector<std::vector<int>> ids, trained;
    std::vector<double> losses; // PyTorch's, of each row
    double bf16_error;          // mean relative error of PyTorch's gradients in bf16
    std::map<std::string, std::vector<A>> gradient; // by name
    std::vector<A> loss;        // of each trained token
    std::vector<T> stored;
    std::vector<A> dlora;
    double total = 0;           // trained tokens
    const int rank = 3;
    float dropout_p;
    bool plain = false; // by the definitions

    Harness(const std::string& name, bool adapter, double B = 0, float dropout_p = 0) : file("tests/fixtures/train/" + name), w(file), dropout_p(dropout_p) {
        MappedFile text("tests/fixtures/train/" + name + "/rows.json");
        sj::Doc doc;
        REQUIRE(sj::parse(doc, text.text()) == "");
        for (auto [key, to] : {std::pair("ids", &ids), {"trained", &trained}})
            for (sj::Value row : doc.root()[key].items()) {
                to->emplace_back();
                for (sj::Value v : row.items()) to->back().push_back((int)v.number());
            }
        for (sj::Value v : doc.root()["losses"].items()) losses.push_back(v.number());
        bf16_error = doc.root()["bf16_error"].number();
        for (auto& row : trained)
            for (int t : row) total += t;
        if (!adapter) return;
        AdapterConfig config;
        config.rank = rank, config.alpha = 6;
        std::fill(config.targets, config.targets + MODULES, true);
        adapt(w, config);
        const AdapterPlace end = each_adapter(w, [](Linear<T>&, AdapterPlace) {});
        Random random{12};
        stored = random.fill<T>(end.A, 0.3);
        stored.resize(end.B), dlora.assign(end.B, 0);
        if (B > 0) each_adapter_tensor(w, [&](const std::string&, size_t rows, size_t columns, size_t at, size_t apart) {
            for (size_t r = 0; r < rows && at >= end.A; r++)
                for (size_t i = 0; i < columns; i++) stored[at + r * apart + i] = random.fill<T>(1, B)[0];
        });
    }

    // Forward and backward of all rows, `batch` at a time; gradients are added up.
    void run(int batch, bool full, bool recompute = false, int head_rows = 5, bool ample = false) {
        for (size_t first = 0; first < ids.size(); first += batch) {
            std::vector<std::pair<int, int>> sequences;
            const size_t last = std::min(ids.size(), first + batch);
            for (size_t i = first; i < last; i++) sequences.push_back({0, (int)ids[i].size()});
            Random random{13};
            TestBatch packed(random, sequences, c.V);
            std::vector<int> rows, target;
            std::vector<uint32_t> place;
            int n = 0;
            for (size_t i = first; i < last; i++)
                for (size_t k = 0; k < ids[i].size(); k++, n++) {
                    packed.token[n] = ids[i][k];
                    place.push_back((uint32_t)(i * 100 + k));
                    if (k + 1 < ids[i].size() && trained[i][k + 1]) rows.push_back(n), target.push_back(ids[i][k + 1]);
                }
            const Batch b = packed.view();
            Arena arena;
            Activations<T> a;
            Flow<T> d;
            KVCache<T> kv;
            A* rope;
            T* h;
            const AdapterPlace end = each_adapter(w, [](Linear<T>&, AdapterPlace) {});
            auto plan = [&] {
                a.plan_training(arena, c, n, recompute, ample);
                d.plan(arena, c, n, rank, head_rows, false);
                kv.plan(arena, c, (size_t)packed.page_count, !ample);
                rope = arena.take<A>((size_t)n * c.D);
                h = arena.take<T>((size_t)n * end.h);
            };
            plan();
            arena.allocate("a test");
            memset((void*)arena.base, 0xff, arena.size); // a number that was never written is a NaN
            plan();
            fill_rope(rope, n, c.D, c.rope_theta, c.rope_scaling);
            const Dropout dropout = {dropout_p, 3, 4, place.data()};
            Gradients<T> g;
            g.layer.resize(c.L);
            each_adapter(w, [&](Linear<T>& W, AdapterPlace at) {
                const int l = W.adapter.module[0] / MODULES;
                auto& to = &W == &w.layers[l].qkv ? g.layer[l].qkv : &W == &w.layers[l].o ? g.layer[l].o : &W == &w.layers[l].gate_up ? g.layer[l].gate_up : g.layer[l].down;
                W.adapter.A = &stored[at.A], W.adapter.B = &stored[at.B], W.adapter.h = h + at.h * n;
                W.adapter.dropout = dropout_p > 0 ? &dropout : nullptr;
                to.A = &dlora[at.A], to.B = &dlora[at.B];
            });
            auto place_of = [&](const std::string& name, size_t size) {
                gradient[name].resize(size);
                return gradient[name].data();
            };
            for (int l = 0; l < c.L && full; l++) {
                const Layer<T>& y = w.layers[l];
                auto& to = g.layer[l];
                auto in = [&](const char* part) { return format("%d.%s", l, part); };
                to.norm1 = place_of(in("norm1"), c.C), to.norm2 = place_of(in("norm2"), c.C);
                to.q_norm = place_of(in("q_norm"), c.D), to.k_norm = place_of(in("k_norm"), c.D);
                to.qkv.W = place_of(in("qkv"), (size_t)y.qkv.out() * c.C), to.o.W = place_of(in("o"), (size_t)c.C * y.o.in);
                to.gate_up.W = place_of(in("gate_up"), (size_t)2 * c.F * c.C), to.down.W = place_of(in("down"), (size_t)c.C * c.F);
            }
            if (full) {
                g.norm = place_of("norm", c.C), g.embed = place_of("embed", (size_t)c.V * c.C);
                g.head = c.tied ? g.embed : place_of("head", (size_t)c.V * c.C);
            }
            Context ctx;
            ctx.plain = plain;
            std::vector<A> each(rows.size());
            forward(ctx, c, w, b, a, kv, rope);
            loss_backward<T>(ctx, c, w, a, d, &g, each.data(), {rows.data(), target.data(), (A)(1 / total), nullptr, (int)rows.size()}, n);
            loss.insert(loss.end(), each.begin(), each.end());
            backward(ctx, c, w, b, a, d, g, kv, rope);
        }
    }

    // PyTorch's gradient of these tensors, one behind the other.
    std::vector<double> reference(const std::vector<std::string>& names) const {
        const MappedFile map(file.path + "/gradients.safetensors");
        Tensors tensors;
        std::map<std::string, std::string> metadata;
        read_safetensors(map, tensors, metadata);
        std::vector<double> all;
        for (auto& name : names)
            for (size_t i = 0; i < tensors.at(name).bytes / 4; i++) all.push_back(number(tensors.at(name), i));
        return all;
    }
    template <class F> void each_reference(F f) const {
        for (int l = 0; l < c.L; l++) {
            auto in = [&](const char* part) { return format("%d.%s", l, part); };
            auto name = [&](const char* part) { return format("model.layers.%d.%s.weight", l, part); };
            f(in("norm1"), reference({name("input_layernorm")})), f(in("norm2"), reference({name("post_attention_layernorm")}));
            f(in("q_norm"), reference({name("self_attn.q_norm")})), f(in("k_norm"), reference({name("self_attn.k_norm")}));
            f(in("qkv"), reference({name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj")}));
            f(in("o"), reference({name("self_attn.o_proj")})), f(in("down"), reference({name("mlp.down_proj")}));
            f(in("gate_up"), reference({name("mlp.gate_proj"), name("mlp.up_proj")}));
        }
        f("norm", reference({"model.norm.weight"})), f("embed", reference({"model.embed_tokens.weight"}));
        if (!c.tied) f("head", reference({"lm_head.weight"}));
    }
};

// |a - b| / |b|
static double relative(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); i++) difference += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
    REQUIRE(size > 0);
    return std::sqrt(difference / size);
}

TEST_CASE("a whole model, tied and not: the gradient of every parameter within 1e-5 of PyTorch's, and the losses") {
    for (const char* name : {"tied", "untied"})
        for (bool recompute : {false, true}) {
            Harness<float> t(name, false);
            t.run(3, true, recompute);
            size_t at = 0;
            for (size_t i = 0; i < t.ids.size(); i++) {
                double sum = 0;
                for (int trained : t.trained[i]) sum += trained ? t.loss[at++] : 0;
                CHECK(sum == doctest::Approx(t.losses[i]).epsilon(1e-6));
            }
            t.each_reference([&](const std::string& part, const std::vector<double>& want) {
                const double off = relative(as_double(t.gradient.at(part)), want);
                INFO(name << " " << part << ": " << off);
                CHECK(off < 1e-5);
            });
        }
}

TEST_CASE("a whole model in bf16: its gradients are nearer to fp32's than PyTorch's bf16 gradients are") {
    for (const char* name : {"tied", "untied"}) {
        Harness<bf16> t(name, false);
        t.run(3, true);
        double sum = 0, n = 0;
        t.each_reference([&](const std::string& part, const std::vector<double>& want) { sum += relative(as_double(t.gradient.at(part)), want), n++; });
        INFO(name << ": mean relative error " << sum / n << ", PyTorch's " << t.bf16_error);
        CHECK(sum / n < t.bf16_error);
        CHECK(sum > 0); // it is not fp32
    }
}

TEST_CASE("a whole model with an adapter of B = 0: base's losses to the bit, dA = 0, dB = s dW A^T with PyTorch's dW") {
    Harness<float> base("tied", false), t("tied", true);
    base.run(3, false), t.run(3, false);
    CHECK(same_bits(base.loss, t.loss));
    const size_t A = each_adapter(t.w, [](Linear<float>&, AdapterPlace) {}).A;
    for (size_t i = 0; i < A; i++) CHECK(t.dlora[i] == 0);
    each_adapter_tensor(t.w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t apart) {
        if (at < A) return;
        const size_t layers = name.find("layers."), lora = name.find(".lora_B");
        const std::vector<double> dW = t.reference({"model." + name.substr(layers, lora - layers) + ".weight"});
        const size_t in = dW.size() / rows;
        size_t at_A = 0; // of the same module
        each_adapter_tensor(t.w, [&](const std::string& other, size_t, size_t, size_t where, size_t) {
            if (where < A && other.substr(0, lora) == name.substr(0, lora)) at_A = where;
        });
        std::vector<double> got, want;
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < columns; i++) {
                got.push_back(t.dlora[at + r * apart + i]), want.push_back(0);
                for (size_t k = 0; k < in; k++) want.back() += 2 * dW[r * in + k] * t.stored[at_A + i * in + k];
            }
        INFO(name);
        CHECK(relative(got, want) < 1e-5);
    });
}

TEST_CASE("an adapter's gradients: the same bits packed or not, recomputed or not, ample memory or not, whatever the threads and the head's rows; with dropout") {
    auto check = [](auto type) {
        using T = decltype(type);
        std::vector<acc<T>> first, first_loss;
        struct How { int batch; bool recompute; int head_rows, threads; bool ample = false; };
        for (const How& how : {How{3, false, 5, 1}, {1, false, 5, 1}, {2, false, 5, 2}, {3, true, 5, 2}, {3, false, 1, 2}, {3, false, 100, 1}, {3, false, 5, 2, true}, {2, true, 5, 1, true}}) {
#ifdef _OPENMP
            omp_set_num_threads(how.threads);
#endif
            Harness<T> t("tied", true, 0.2, 0.25f);
            t.run(how.batch, false, how.recompute, how.head_rows, how.ample);
            for (acc<T> x : t.dlora) REQUIRE(std::isfinite(x));
            if (first.empty()) first = t.dlora, first_loss = t.loss;
            CHECK(same_bits(t.dlora, first));
            CHECK(same_bits(t.loss, first_loss));
        }
        Harness<T> other("tied", true, 0.2, 0);
        other.run(3, false);
        CHECK(!same_bits(other.dlora, first)); // dropout does something
    };
    on_every_instruction_set([&] { check(0.f), check(bf16{}); });
#ifdef _OPENMP
    omp_set_num_threads(omp_get_num_procs());
#endif
}

TEST_CASE("a whole model with adapters and dropout: finite differences in double by A and B") {
    // In double a model's weights are those of its file.
    Harness<double> t("tied", true, 0.2, 0.25f);
    t.run(3, false);
    const std::vector<double> analytic = t.dlora;
    Random random{14};
    auto loss = [&] {
        t.loss.clear();
        t.run(3, false);
        double sum = 0;
        for (double l : t.loss) sum += l / t.total;
        return sum;
    };
    int seen = 0;
    for (int i = 0; i < 60; i++) {
        const size_t at = (size_t)random.below((int)t.stored.size());
        const bool B = at >= each_adapter(t.w, [](Linear<double>&, AdapterPlace) {}).A;
        if (t.stored[at] == 0) continue;
        const double h = 1e-5, was = t.stored[at];
        t.stored[at] = was + h;
        const double above = loss();
        t.stored[at] = was - h;
        const double below = loss();
        t.stored[at] = was;
        const double want = (above - below) / (2 * h) * (B ? 2 : 1); // stored is s B, s = 2
        CHECK(std::fabs(analytic[at] - want) < 1e-8 + 1e-6 * std::fabs(want));
        seen += std::fabs(want) > 1e-4;
    }
    CHECK(seen > 10);
}

TEST_CASE_TEMPLATE("a whole model by the definitions: PyTorch's gradients, and cpu/'s with everything trained or an adapter", T, bf16, float, double) {
    const double tolerance = std::is_same_v<T, double> ? 1e-12 : 1e-5;
    for (const char* name : {"tied", "untied"}) {
        INFO(std::string(name));
        Harness<T> fast(name, false), plain(name, false);
        plain.plain = true;
        fast.run(3, true), plain.run(3, true);
        CHECK(relative(as_double(fast.loss), as_double(plain.loss)) < (std::is_same_v<T, bf16> ? fast.bf16_error : tolerance));
        double sum = 0, n = 0;
        plain.each_reference([&](const std::string& part, const std::vector<double>& want) {
            const double off = relative(as_double(plain.gradient.at(part)), want);
            const double apart = relative(as_double(fast.gradient.at(part)), as_double(plain.gradient.at(part)));
            INFO(part << ": " << off << " from PyTorch's, " << apart << " from cpu/'s");
            sum += off, n++;
            if (std::is_same_v<T, bf16>) return;
            CHECK(off < 1e-5);
            CHECK(apart < tolerance);
        });
        if (std::is_same_v<T, bf16>) CHECK(sum / n < plain.bf16_error);
    }
    for (float p : {0.f, 0.25f}) {
        Harness<T> fast("tied", true, 0.2, p), plain("tied", true, 0.2, p);
        plain.plain = true;
        fast.run(3, false), plain.run(2, false, true);
        const double apart = relative(as_double(fast.dlora), as_double(plain.dlora));
        INFO("an adapter's gradients, dropout " << p << ": " << apart);
        CHECK(apart < (std::is_same_v<T, bf16> ? fast.bf16_error : tolerance));
        CHECK(relative(as_double(fast.loss), as_double(plain.loss)) < (std::is_same_v<T, bf16> ? fast.bf16_error : tolerance));
    }
}
} // namespace
