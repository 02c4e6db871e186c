// The sampler: greedy choices, the order of its filters, and its frequencies (chi-square) against probabilities
// computed another way.
#include "tests/common.h"
#include <limits>
#include <map>
#include <set>

namespace {
static Sampling sampling(float temperature, int top_k, float top_p, float min_p, uint64_t seed = 1) {
    Sampling s;
    s.temperature = temperature, s.top_k = top_k, s.top_p = top_p, s.min_p = min_p, s.seed = seed;
    return s;
}

TEST_CASE("greedy takes the largest, the lowest id among equals, and only ids that exist") {
    std::vector<float> logits = {1, 5, 5, -3, 9};
    CHECK(sample(logits.data(), 5, sampling(0, 0, 1, 0), 0) == 4);
    CHECK(sample(logits.data(), 4, sampling(0, 0, 1, 0), 0) == 1);
    CHECK(sample(logits.data(), 1, sampling(1, 0, 1, 0), 0) == 0);
    logits[1] = NAN;
    CHECK(sample(logits.data(), 4, sampling(0, 0, 1, 0), 0) == 2);
    logits[0] = INFINITY;
    CHECK(sample(logits.data(), 4, sampling(0, 0, 1, 0), 0) == 0);
    CHECK(sample(logits.data(), 4, sampling(1, 0, 1, 0), 0) == 0);
    std::vector<float> hopeless = {NAN, NAN, -INFINITY};
    for (float t : {0.f, 1.f}) {
        int id = sample(hopeless.data(), 3, sampling(t, 0, 1, 0), 0);
        CHECK(id >= 0);
        CHECK(id < 3);
    }
}

// Logits of every kind: ties, infinities, NaNs, all large ones in one place.
static std::vector<float> odd_logits(Random& random, int exist, int kind) {
    auto logits = random.fill<float>(exist, 4);
    for (int id = 0; id < exist; id++) {
        if (kind == 1) logits[id] = std::round(logits[id]); // ties
        if (kind == 2 && random.below(3)) logits[id] = random.below(2) ? -INFINITY : NAN;
        if (kind == 3 && random.below(exist) < 30) logits[id] = random.below(2) ? INFINITY : NAN;
        if (kind == 4) logits[id] = id % 512 ? -INFINITY : logits[id]; // one a block
        if (kind == 5) logits[id] = id < 300 ? logits[id] : NAN; // all in one
        if (kind == 6) logits[id] = NAN;
    }
    return logits;
}
TEST_CASE("cpu/'s sampler draws what the definition draws: ties, infinities, NaNs, every filter") {
    Random random{12};
    int different = 0, drawn = 0;
    for (int exist : {1, 511, 512, 1100, 20000, 20481})
        for (int kind = 0; kind < 6; kind++) {
            const auto logits = odd_logits(random, exist, kind);
            for (const Sampling& how : {sampling(0, 0, 1, 0), sampling(0.7f, 20, 0.8f, 0), sampling(1, 1, 1, 0),
                                        sampling(2, 40, 1, 0.01f), sampling(1, 0, 0.9f, 0), sampling(1, 38, 0.99f, 0)})
                for (uint64_t counter = 0; counter < (exist < 2000 ? 20 : 4); counter++, drawn++)
                    different += sample(logits.data(), exist, how, counter) !=
                                 sample_cpu(cpu(), logits.data(), exist, how, counter);
        }
    CHECK(drawn == 6 * 6 * (4 * 20 + 2 * 4));
    CHECK(different == 0);
}

TEST_CASE("cpu/ tells the likeliest that the definition tells, and the same log-probabilities") {
    Random random{13};
    for (int exist : {1, 7, 511, 512, 1100, 20481})
        for (int kind = 0; kind < 7; kind++)
            for (int k : {0, 1, 5, 20}) {
                const auto logits = odd_logits(random, exist, kind);
                Likeliest want, got;
                likeliest(want, logits.data(), exist, k);
                likeliest_cpu(cpu(), got, logits.data(), exist, k);
                INFO("exist " << exist << " kind " << kind << " k " << k);
                REQUIRE(want.count == std::min(k, exist));
                REQUIRE(got.count == want.count);
                CHECK(std::equal(got.id, got.id + got.count, want.id));
                CHECK(std::equal(got.logit, got.logit + got.count, want.logit));
                CHECK(std::abs(got.log_sum - want.log_sum) <= 2e-6f * (1 + std::abs(want.log_sum)));
            }
}
TEST_CASE("telling the likeliest costs no more than a few passes over the logits") {
    // Beside what the sampler needs for the same row, which is mostly one pass: the least of some tries of each. (By
    // sorting ids and a sum in double it was 20 times that.)
    Random random{14};
    const int V = 151936;
    const auto logits = random.fill<float>(V, 4);
    double tell = 1e9, draw = 1e9;
    for (int i = 0; i < 30; i++) {
        Likeliest row;
        double start = seconds();
        likeliest_cpu(cpu(), row, logits.data(), V, 20);
        tell = std::min(tell, seconds() - start), start = seconds();
        sample_cpu(cpu(), logits.data(), V, sampling(0.7f, 20, 0.8f, 0), (uint64_t)i);
        draw = std::min(draw, seconds() - start);
    }
    MESSAGE("the likeliest " << tell * 1e6 << " us, a draw " << draw * 1e6 << " us");
    CHECK(tell < 8 * draw);
}

TEST_CASE("the same seed and counter draw the same id; others draw others") {
    Random random{10};
    auto logits = random.fill<float>(1000, 2);
    std::set<int> by_counter, by_seed;
    for (uint64_t i = 0; i < 100; i++) {
        int id = sample(logits.data(), 1000, sampling(1, 0, 1, 0, 7), i);
        CHECK(id == sample(logits.data(), 1000, sampling(1, 0, 1, 0, 7), i));
        by_counter.insert(id);
        by_seed.insert(sample(logits.data(), 1000, sampling(1, 0, 1, 0, i), 3));
    }
    CHECK(by_counter.size() > 50);
    CHECK(by_seed.size() > 50);
}

// The sampler's definition, by sorting and in double: temperature, top-k, top-p over the rest, min-p.
static std::vector<double> probabilities(const std::vector<float>& logits, int exist, const Sampling& s) {
    std::vector<int> order(exist);
    for (int i = 0; i < exist; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    if (s.top_k > 0 && s.top_k < exist) order.resize(s.top_k);
    std::vector<double> p(logits.size(), 0.);
    double sum = 0, cumulative = 0, kept = 0;
    for (int id : order) sum += std::exp((logits[id] - logits[order[0]]) / s.temperature);
    for (int id : order) {
        double x = std::exp((logits[id] - logits[order[0]]) / s.temperature) / sum;
        if ((cumulative < s.top_p || cumulative == 0) && x >= s.min_p / sum) p[id] = x, kept += x;
        cumulative += x;
    }
    for (double& x : p) x /= kept;
    return p;
}

TEST_CASE("frequencies are the probabilities (chi-square)") {
    Random random{11};
    const int V = 40, exist = 37, draws = 20000;
    for (const Sampling& s : {sampling(1, 0, 1, 0), sampling(0.6f, 0, 1, 0), sampling(1.7f, 5, 1, 0), sampling(1, 0, 0.7f, 0), sampling(1, 20, 0.8f, 0),
                              sampling(1, 0, 1, 0.2f), sampling(0.7f, 20, 0.95f, 0.05f), sampling(1, 1, 1, 0), sampling(1, 0, 0, 0), sampling(1, 0, 1, 1)}) {
        auto logits = random.fill<float>(V, 2);
        logits[V - 1] = 50; // exists only as a row
        auto p = probabilities(logits, exist, s);
        std::vector<int> count(V);
        for (int i = 0; i < draws; i++) count[sample(logits.data(), exist, s, i)]++;
        double chi = 0;
        int freedom = -1;
        for (int v = 0; v < V; v++) {
            if (p[v] == 0) { CHECK(count[v] == 0); continue; }
            chi += (count[v] - p[v] * draws) * (count[v] - p[v] * draws) / (p[v] * draws);
            freedom++;
        }
        INFO("temperature " << s.temperature << " top-k " << s.top_k << " top-p " << s.top_p << " min-p " << s.min_p << ": chi-square " << chi << " of " << freedom);
        CHECK(chi <= freedom + 4.5 * std::sqrt(2. * freedom)); // beyond 4.5 sigma once in some 10^5 runs; the seed is fixed
    }
}

TEST_CASE("top-k cuts between equals by id") {
    std::vector<float> logits(10, 1.f);
    std::set<int> seen;
    for (int i = 0; i < 300; i++) seen.insert(sample(logits.data(), 10, sampling(1, 3, 1, 0), i));
    CHECK(seen == std::set<int>{0, 1, 2});
}

TEST_CASE("huge logits and tiny temperatures stay finite") {
    std::vector<float> logits = {3e38f, -3e38f, 2.9e38f};
    for (int i = 0; i < 20; i++) CHECK(sample(logits.data(), 3, sampling(1e-3f, 0, 1, 0), i) == 0);
}

TEST_CASE("draws are fixed for good: saved conversations must replay") {
    std::vector<float> logits;
    for (int i = 0; i < 100; i++) logits.push_back((float)(i * 37 % 101) / 25);
    std::vector<int> ids;
    for (int i = 0; i < 8; i++) ids.push_back(sample(logits.data(), 100, sampling(0.7f, 20, 0.8f, 0, 12345), i));
    std::string got;
    for (int id : ids) got += format("%d ", id);
    CHECK(got == "90 60 68 49 60 68 57 49 ");
}
} // namespace
