// The whole model against Hugging Face: golden logits and greedy texts of tests/fixtures, and what a session
// promises (chunks, rewinding, threads, ragged batches).
#include "tests/golden.h"
#include <climits>

namespace {
// Our logits of every position of every prompt, in type T.
template <class T> std::vector<acc<T>> all_logits(const Golden& g) {
    Weights<T> weights(g.file);
    std::vector<acc<T>> out;
    for (auto& prompt : g.prompts) {
        Session<T> session(g.file.config, weights, 64);
        session.feed(prompt, nullptr, [&](const acc<T>* row) { out.insert(out.end(), row, row + g.file.config.V); });
    }
    return out;
}

TEST_CASE("float32 checkpoints: every logit within 2e-4 of Hugging Face's, in float and in double") {
    for (const char* folder : {"tied_f32", "untied_f32_sharded"}) {
        INFO(std::string(folder));
        Golden g(folder);
        REQUIRE(g.file.is_float32());
        auto check = [&](const auto& ours) {
            REQUIRE(ours.size() == g.logits.size());
            double worst = 0;
            for (size_t i = 0; i < ours.size(); i++) {
                double d = std::fabs((double)ours[i] - g.logits[i]);
                worst = d <= worst ? worst : d; // a NaN becomes the worst
            }
            INFO("largest difference " << worst);
            CHECK(worst <= 2e-4);
        };
        on_every_instruction_set([&] { check(all_logits<float>(g)); });
        check(all_logits<double>(g));
    }
}

TEST_CASE("float32 checkpoints: 64 greedy tokens are Hugging Face's") {
    for (const char* folder : {"tied_f32", "untied_f32_sharded"}) {
        INFO(std::string(folder));
        Golden g(folder);
        REQUIRE(g.greedy.size() == g.prompts.size());
        Weights<float> weights(g.file);
        for (size_t i = 0; i < g.prompts.size(); i++) {
            Session<float> session(g.file.config, weights, 128);
            session.feed(g.prompts[i]);
            std::vector<int> ids;
            Sampling greedy;
            greedy.temperature = 0;
            while (ids.size() < 64) {
                ids.push_back(sample(session.logits, g.file.config.V, greedy, session.ids.size()));
                session.feed({ids.back()});
            }
            REQUIRE(g.greedy[i].size() == 64);
            CHECK(ids == g.greedy[i]);
        }
    }
}

TEST_CASE("bf16 and f16 checkpoints: no further from the fp32 truth than transformers' own bf16") {
    for (const char* folder : {"tied_bf16", "untied_bf16", "tied_f16"}) {
        INFO(std::string(folder));
        Golden g(folder);
        REQUIRE(!g.file.is_float32());
        REQUIRE(g.bf16_kl > 0);
        on_every_instruction_set([&] {
            double kl = mean_kl(g.logits, all_logits<bf16>(g), g.file.config.V);
            INFO("mean KL " << kl << ", transformers " << g.bf16_kl);
            CHECK(kl <= g.bf16_kl);
            CHECK(kl > 0);
        });
        // Float arithmetic on the same weights is the truth itself, but for F16, which bf16 would round first.
        if (std::string(folder) != "tied_f16") CHECK(mean_kl(g.logits, all_logits<float>(g), g.file.config.V) < 1e-9);
    }
}

TEST_CASE_TEMPLATE("logits do not depend on chunks, rewinding or threads", T, bf16, float) {
    Golden g(std::is_same_v<T, float> ? "tied_f32" : "tied_bf16");
    Weights<T> weights(g.file);
    const int V = g.file.config.V;
    std::vector<int> long_prompt; // more than one chunk
    Random random{8};
    for (int i = 0; i < Session<T>::CHUNK + 77; i++) long_prompt.push_back(random.below(V));
    const int n = (int)long_prompt.size();

    Session<T> whole(g.file.config, weights, n);
    std::vector<acc<T>> rows;
    whole.feed(long_prompt, nullptr, [&](const acc<T>* row) { rows.insert(rows.end(), row, row + V); });
    REQUIRE(rows.size() == (size_t)n * V);
    CHECK(whole.full());
    auto same = [&](const acc<T>* logits, int row) { return memcmp(logits, &rows[(size_t)row * V], V * sizeof(acc<T>)) == 0; };
    CHECK(same(whole.logits, n - 1));

    Session<T> steps(g.file.config, weights, n);
    for (int i = 0; i < 40; i++) {
        steps.feed({long_prompt[i]});
        REQUIRE(same(steps.logits, i));
    }
    steps.feed({1, 2, 3});
    steps.rewind(17);
    CHECK(steps.ids.size() == 17);
    steps.feed(std::vector<int>(long_prompt.begin() + 17, long_prompt.begin() + 500));
    CHECK(same(steps.logits, 499));
    steps.rewind(1000); // more than there is: nothing changes
    CHECK(steps.ids.size() == 500);

#ifdef _OPENMP
    const int threads = omp_get_max_threads();
    for (int j : {1, 3, 5}) {
        omp_set_num_threads(j);
        Session<T> again(g.file.config, weights, n);
        again.feed(long_prompt);
        CHECK(same(again.logits, n - 1));
    }
    omp_set_num_threads(threads);
#endif
    CHECK_THROWS_AS(steps.feed(long_prompt), Error);                          // does not fit
    CHECK_THROWS_AS(steps.feed({V}), Error);                                  // no such id
    CHECK_THROWS_AS(steps.feed({-1}), Error);
    CHECK(steps.ids.size() == 500);
    CHECK_THROWS_AS(Session<T>(g.file.config, weights, INT_MAX), Error);      // more memory than there is
}

TEST_CASE_TEMPLATE("a ragged batch of several sequences gives each what it gets alone", T, bf16, float) {
    std::string folder = std::is_same_v<T, float> ? "untied_f32_sharded" : "tied_bf16";
    SUBCASE("dense") {}
    SUBCASE("experts") { folder = std::is_same_v<T, float> ? "moe/odd_f32" : "moe/bf16"; }
    Golden g(folder);
    const Config& c = g.file.config;
    Weights<T> weights(g.file);
    Random random{9};
    // Pasts of 5, 20 and 0 tokens; then one more token of the first two, and the whole of the third.
    const std::vector<std::pair<int, int>> shape = {{5, 1}, {20, 1}, {0, 18}};
    std::vector<std::vector<int>> text;
    for (auto [past, fresh] : shape) {
        text.emplace_back();
        for (int i = 0; i < past + fresh; i++) text.back().push_back(random.below(c.V));
    }
    TestBatch mixed(random, shape, c.V, 2);
    Arena arena;
    Activations<T> a;
    KVCache<T> cache;
    for (int pass = 0; pass < 2; pass++) {
        a.plan(arena, c, 64);
        cache.plan(arena, c, mixed.page_count);
        if (pass == 0) arena.allocate("the test");
    }
    std::vector<acc<T>> rope((size_t)64 * c.D);
    fill_rope(rope.data(), 64, c.D, c.rope_theta, c.rope_scaling);
    Context ctx;
    for (size_t s = 0; s < shape.size(); s++) { // the pasts, one after another, into the scattered pages
        const int past = shape[s].first;
        if (!past) continue;
        std::vector<int> token, pos, seq, slot;
        for (int p = 0; p < past; p++) {
            token.push_back(text[s][p]), pos.push_back(p), seq.push_back((int)s);
            slot.push_back(mixed.pages[s * mixed.max_pages + p / PAGE] * PAGE + p % PAGE);
        }
        Batch one = {past, (int)shape.size(), token.data(), pos.data(), seq.data(), slot.data(), mixed.pages.data(), mixed.max_pages};
        forward(ctx, c, weights, one, a, cache, rope.data());
    }
    for (size_t n = 0; n < mixed.token.size(); n++)
        if (mixed.seq[n] >= 0) mixed.token[n] = text[mixed.seq[n]][mixed.pos[n]];
    forward(ctx, c, weights, mixed.view(), a, cache, rope.data());

    for (size_t s = 0; s < shape.size(); s++) {
        Session<T> alone(c, weights, 64);
        std::vector<acc<T>> rows;
        alone.feed(text[s], nullptr, [&](const acc<T>* row) { rows.insert(rows.end(), row, row + c.V); });
        for (int n = 0; n < (int)mixed.token.size(); n++) {
            if (mixed.seq[n] != (int)s) continue;
            std::vector<acc<T>> logits(c.V);
            std::vector<T> picked(c.C);
            head_cpu(cpu(), logits.data(), picked.data(), a.normed, &n, weights.head, 1);
            REQUIRE(memcmp(logits.data(), &rows[(size_t)mixed.pos[n] * c.V], c.V * sizeof(acc<T>)) == 0);
        }
    }
}
} // namespace
