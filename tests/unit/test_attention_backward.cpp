// Attention's gradients, by their definition and by cpu/: against the dense formula, against finite differences of the
// forward op, and what else the op promises: sums in one order, whatever the threads and the other sequences are; zeros
// for spare rows.
#include "tests/common.h"

namespace {
// A training batch: whole sequences, then spare rows; what forward leaves for backward, and dout.
template <class T> struct Problem {
    int H, K, D, N;
    TestBatch batch;
    std::vector<T> q, keys, values, out, dout;
    std::vector<acc<T>> lse;

    static std::vector<std::pair<int, int>> whole(const std::vector<int>& lengths) {
        std::vector<std::pair<int, int>> v;
        for (int n : lengths) v.push_back({0, n});
        return v;
    }
    Problem(Random& random, const std::vector<int>& lengths, int spare, int H, int K, int D)
        : H(H), K(K), D(D), N(0), batch(random, whole(lengths), 10, spare) {
        N = (int)batch.token.size();
        q = random.fill<T>((size_t)N * H * D, 2), dout = random.fill<T>(q.size());
        keys = poisoned<T>((size_t)batch.page_count * K * PAGE * D), values = keys;
        for (int n = 0; n < N - spare; n++)
            for (int kv = 0; kv < K; kv++) {
                const std::vector<T> k = random.fill<T>(D, 2), v = random.fill<T>(D);
                memcpy((void*)&keys[key(n, kv)], k.data(), D * sizeof(T)), memcpy((void*)&values[key(n, kv)], v.data(), D * sizeof(T));
            }
        forward();
    }
    void forward() {
        out = poisoned<T>(q.size()), lse = poisoned<acc<T>>((size_t)N * H);
        CALL(attention, out.data(), lse.data(), q.data(), {keys.data(), values.data()}, batch.view(), {H, K, D});
    }
    std::vector<T> backward() {
        std::vector<T> dqkv = poisoned<T>((size_t)N * width());
        std::vector<acc<T>> delta = poisoned<acc<T>>((size_t)N * H);
        CALL(attention_backward, dqkv.data(), dout.data(), {q.data(), out.data(), lse.data()}, {keys.data(), values.data()}, batch.view(), {H, K, D}, delta.data());
        return dqkv;
    }
    int width() const { return (H + 2 * K) * D; }
    size_t key(int n, int kv) const { return kv_offset(batch.slot[n] / PAGE, kv, batch.slot[n] % PAGE, K, D); }
};

static const std::vector<std::pair<int, int>> HEADS = {{1, 1}, {4, 2}, {4, 1}, {10, 2}, {8, 1}}; // G = 1, 2, 4, 5, 8
static const std::vector<int> SIZES = {2, 6, 40, 64, 128};
// Two sizes for each of HEADS, so that each size has two of them.
static std::vector<int> sizes_for(size_t heads) { return {SIZES[heads], SIZES[(heads + 2) % SIZES.size()]}; }
static const std::vector<int> LENGTHS = {1, 2, 1, 7, 16, 17, 1, 33, 40};

TEST_CASE_TEMPLATE("lse and the gradients are those of the dense formula", T, bf16, float, double) {
    EACH_WAY;
    Random random{1};
    for (size_t heads = 0; heads < HEADS.size(); heads++)
        for (int D : sizes_for(heads)) {
            const int H = HEADS[heads].first, K = HEADS[heads].second, G = H / K, spare = 3;
            INFO("H " << H << " K " << K << " D " << D);
            Problem<T> p(random, LENGTHS, spare, H, K, D);
            // The gradients, and what they may be off by: T's rounding of `out`, which is in delta, of the result, and
            // the errors of the sums. (A score's error, some 1e-6 of its terms, is one of its probability: hence 20.)
            std::vector<double> want((size_t)p.N * p.width()), size(want.size()), off(want.size()), want_lse, lse_size;
            for (int n = 0; n < p.N - spare; n++)
                for (int h = 0; h < H; h++) {
                    const int kv = h / G, count = p.batch.pos[n] + 1;
                    const double scale = 1 / std::sqrt((double)D);
                    const size_t row = ((size_t)n * H + h) * D;
                    auto number = [&](const std::vector<T>& v, size_t at, int i) { return (double)to_acc(v[at + i]); };
                    std::vector<double> s(count), dp(count);
                    double top = -1e300, sum = 0, mean = 0, mean_size = 0, terms = 0, delta_off = 0;
                    for (int j = 0; j < count; j++) {
                        const size_t at = p.key(n - count + 1 + j, kv);
                        double magnitude = 0;
                        for (int i = 0; i < D; i++) {
                            s[j] += scale * number(p.q, row, i) * number(p.keys, at, i), magnitude += scale * std::fabs(number(p.q, row, i) * number(p.keys, at, i));
                            dp[j] += number(p.dout, row, i) * number(p.values, at, i);
                        }
                        top = std::max(top, s[j]), terms = std::max(terms, magnitude);
                    }
                    for (int j = 0; j < count; j++) sum += std::exp(s[j] - top);
                    for (int j = 0; j < count; j++) s[j] = std::exp(s[j] - top) / sum, mean += s[j] * dp[j], mean_size += s[j] * std::fabs(dp[j]);
                    for (int i = 0; i < D; i++) delta_off += std::fabs(number(p.dout, row, i)) * rounding<T>(number(p.out, row, i));
                    want_lse.push_back(top + std::log(sum)), lse_size.push_back(terms + 1);
                    for (int j = 0; j < count; j++) {
                        const size_t at = p.key(n - count + 1 + j, kv);
                        const double ds = s[j] * (dp[j] - mean) * scale, ds_size = s[j] * (std::fabs(dp[j]) + mean_size + D) * scale, ds_off = s[j] * delta_off * scale;
                        auto add = [&](size_t to, double term, double magnitude, double error) { want[to] += term, size[to] += std::fabs(magnitude), off[to] += std::fabs(error); };
                        for (int i = 0; i < D; i++) {
                            const size_t key = (size_t)(n - count + 1 + j) * p.width() + (H + kv) * D + i, query = (size_t)n * p.width() + h * D + i;
                            const double q = number(p.q, row, i), k = number(p.keys, at, i), dout = number(p.dout, row, i);
                            add(query, ds * k, ds_size * k, ds_off * k);
                            add(key, ds * q, ds_size * q, ds_off * q);
                            add(key + K * D, s[j] * dout, s[j] * dout, 0);
                        }
                    }
                }
            CHECK(wrong(p.backward(), want, [&](size_t i) { return rounding<T>(want[i]) + off[i] + sum_error<T>(20 * size[i]); }) == 0); // zeros in spare rows
            std::vector<acc<T>> lse = p.lse;
            lse.resize(want_lse.size());
            CHECK(wrong(lse, want_lse, [&](size_t i) { return sum_error<T>(lse_size[i]); }) == 0);
            for (size_t i = lse.size(); i < p.lse.size(); i++) CHECK(std::isnan(p.lse[i])); // spare rows
        }
}

TEST_CASE("the gradients are the forward op's slopes, in double") {
    EACH_WAY;
    Random random{2};
    for (size_t heads = 0; heads < HEADS.size(); heads++)
        for (int D : sizes_for(heads)) {
            const int H = HEADS[heads].first, K = HEADS[heads].second;
            Problem<double> p(random, {3, 1, 21, 6}, 1, H, K, D);
            const std::vector<double> dqkv = p.backward();
            auto loss = [&] {
                p.forward();
                double sum = 0;
                for (size_t i = 0; i < (size_t)(p.N - 1) * H * D; i++) sum += p.out[i] * p.dout[i];
                return sum;
            };
            for (int probe = 0; probe < 20; probe++) {
                const int n = random.below(p.N - 1), head = random.below(H + 2 * K), i = random.below(D);
                double& x = head < H ? p.q[((size_t)n * H + head) * D + i] : head < H + K ? p.keys[p.key(n, head - H) + i] : p.values[p.key(n, head - H - K) + i];
                const double before = x, step = 1e-5;
                x = before + step;
                const double above = loss();
                x = before - step;
                const double below = loss();
                x = before;
                const double slope = (above - below) / (2 * step), got = dqkv[(size_t)n * p.width() + head * D + i];
                INFO("H " << H << " K " << K << " D " << D << " row " << n << " head " << head << " at " << i << ": " << got << ", slope " << slope);
                CHECK(std::fabs(got - slope) < 1e-7 * (1 + std::fabs(slope))); // step^2 and 1e-14 / step
            }
        }
}

TEST_CASE_TEMPLATE("a sequence's gradients have the same bits alone, in any batch and on any number of threads", T, bf16, float, double) {
    Random random{3};
    const int H = 6, K = 2, D = 40;
    Problem<T> p(random, {1, 30, 5, 64, 17}, 2, H, K, D);
    const std::vector<T> whole = p.backward();
#ifdef _OPENMP
    const int threads = omp_get_max_threads();
    for (int j : {1, 3, 7}) {
        omp_set_num_threads(j);
        CHECK(same_bits(p.backward(), whole));
    }
    omp_set_num_threads(threads);
#endif
    for (int first = 0, last; first < p.N - 2; first = last) {
        for (last = first; p.batch.seq[last] == p.batch.seq[first]; last++) {}
        Problem<T> one = p;
        auto cut = [&](auto& v, size_t numbers) { v = std::decay_t<decltype(v)>(v.begin() + first * numbers, v.begin() + last * numbers); };
        cut(one.batch.token, 1), cut(one.batch.pos, 1), cut(one.batch.seq, 1), cut(one.batch.slot, 1);
        cut(one.q, (size_t)H * D), cut(one.out, (size_t)H * D), cut(one.dout, (size_t)H * D), cut(one.lse, H);
        one.N = last - first;
        CHECK(same_bits(one.backward(), std::vector<T>(whole.begin() + (size_t)first * p.width(), whole.begin() + (size_t)last * p.width())));
    }
}

TEST_CASE("what nobody asked for is not written: attention without lse") {
    Random random{4};
    Problem<bf16> p(random, LENGTHS, 0, 4, 2, 64);
    const std::vector<bf16> out = p.out;
    CALL(attention, p.out.data(), nullptr, p.q.data(), {p.keys.data(), p.values.data()}, p.batch.view(), {4, 2, 64});
    CHECK(same_bits(p.out, out));
}
} // namespace
