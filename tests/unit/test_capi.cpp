// qwen3.h's functions: null pointers, numbers out of range, calls in any order; logits after rewinds and answers.
#include "tests/capi.h"
#include "tests/common.h"

static const char MODEL[] = "tests/fixtures/tiny/model.bin";

TEST_CASE("C API: NULL is an error wherever qwen3.h does not allow it") {
    auto refused = [](auto result, decltype(result) failed, const char* word) {
        CHECK(result == failed);
        CHECK_MESSAGE(strstr(qwen3_error(), word), qwen3_error());
    };
    int id = 0;
    char text[4];
    qwen3_sampling how = qwen3_default_sampling(0);
    refused(qwen3_open(nullptr, nullptr, nullptr), nullptr, "path is NULL");
    refused(qwen3_vocabulary(nullptr), -1, "model is NULL");
    refused(qwen3_context_limit(nullptr), -1, "model is NULL");
    refused(qwen3_tokenize(nullptr, "a", 1, 0, &id, 1), -1, "model is NULL");
    refused(qwen3_detokenize(nullptr, &id, 1, text, 4), -1, "model is NULL");
    refused(qwen3_prompt(nullptr, nullptr, "a", 0, &id, 1), -1, "model is NULL");
    refused(qwen3_context_new(nullptr, 0), nullptr, "model is NULL");
    refused(qwen3_tokens(nullptr), -1, "context is NULL");
    refused(qwen3_rewind(nullptr, 0), -1, "context is NULL");
    refused(qwen3_feed(nullptr, &id, 1), -1, "context is NULL");
    refused(qwen3_logits(nullptr, nullptr), nullptr, "context is NULL");
    refused(qwen3_draw(nullptr, &how), -1, "context is NULL");
    refused(qwen3_generate(nullptr, &how, nullptr, nullptr), -1, "context is NULL");
    refused(qwen3_ask(nullptr, "a", &how, nullptr, nullptr), -1, "context is NULL");

    qwen3_model* m = qwen3_open(MODEL, nullptr, "cpu");
    REQUIRE(m);
    refused(qwen3_tokenize(m, nullptr, 1, 0, &id, 1), -1, "text is NULL");
    refused(qwen3_tokenize(m, "a", 1, 0, nullptr, 1), -1, "out is NULL");
    CHECK(qwen3_tokenize(m, nullptr, 0, 0, nullptr, 0) == 0);
    refused(qwen3_detokenize(m, nullptr, 1, text, 4), -1, "ids is NULL");
    refused(qwen3_prompt(m, nullptr, nullptr, 0, &id, 1), -1, "question is NULL");
    qwen3_context* c = qwen3_context_new(m, 64);
    REQUIRE(c);
    refused(qwen3_ask(c, nullptr, &how, nullptr, nullptr), -1, "question is NULL"); // of a new context
    refused(qwen3_logits(c, nullptr), nullptr, "feed a prompt first");
    refused(qwen3_feed(c, nullptr, 1), -1, "ids is NULL");
    CHECK(qwen3_feed(c, nullptr, 0) == 0);
    how.max_tokens = 3;
    CHECK(qwen3_ask(c, "hi", &how, nullptr, nullptr) >= 0);
    const int tokens = qwen3_tokens(c);
    refused(qwen3_ask(c, nullptr, &how, nullptr, nullptr), -1, "question is NULL"); // the answer stays
    CHECK(qwen3_tokens(c) == tokens);
    how.repeat_penalty = 0;
    refused(qwen3_ask(c, "hi", &how, nullptr, nullptr), -1, "repeat_penalty 0 is outside 0.01..100");
    CHECK(qwen3_tokens(c) == tokens);
    qwen3_context_free(c);
    qwen3_close(m);
}

TEST_CASE("C API: logits are those after the last token, also after a rewind and after an answer's penalties") {
    qwen3_model* m = qwen3_open(MODEL, nullptr, "cpu");
    REQUIRE(m);
    std::vector<int> ids(20);
    Random random{3};
    for (int& id : ids) id = random.below(900);
    auto fed = [&](size_t n) {
        qwen3_context* c = qwen3_context_new(m, 64);
        REQUIRE(qwen3_feed(c, ids.data(), n) == 0);
        return c;
    };
    auto row = [&](qwen3_context* c) {
        size_t V = 0;
        const float* logits = qwen3_logits(c, &V);
        REQUIRE(logits);
        return std::vector<float>(logits, logits + V);
    };
    qwen3_context *c = fed(20), *other = fed(7);
    qwen3_sampling greedy = qwen3_default_sampling(0);
    greedy.temperature = 0, greedy.max_tokens = 1, greedy.presence_penalty = 2, greedy.repeat_penalty = 5;
    CHECK(qwen3_rewind(c, 7) == 0);
    CHECK(qwen3_draw(c, &greedy) == qwen3_draw(other, &greedy));
    CHECK(row(c) == row(other));
    CHECK(qwen3_generate(c, &greedy, nullptr, nullptr) == 1);
    CHECK(qwen3_rewind(c, 7) == 0);
    CHECK(row(c) == row(other));
    const qwen3_show at_once = [](const char*, size_t, void*) { return 1; };
    CHECK(qwen3_generate(c, &greedy, at_once, nullptr) >= 0);
    const int n = qwen3_tokens(c);
    CHECK(qwen3_rewind(c, n) == 0); // nothing to forget
    const int next = qwen3_draw(other, &greedy);
    if (n == 8) CHECK((qwen3_feed(other, &next, 1) == 0 && row(c) == row(other)));
    for (qwen3_context* x : {c, other}) qwen3_context_free(x);
    qwen3_close(m);
}

TEST_CASE("C API: a rewind forgets the questions whose tokens it takes") {
    qwen3_model* m = qwen3_open(MODEL, nullptr, "cpu");
    REQUIRE(m);
    qwen3_sampling greedy = qwen3_default_sampling(0);
    greedy.temperature = 0, greedy.max_tokens = 4;
    auto ask = [&](qwen3_context* c, const char* question) {
        CHECK(qwen3_ask(c, question, &greedy, nullptr, nullptr) >= 0);
        return qwen3_tokens(c);
    };
    qwen3_context *c = qwen3_context_new(m, 256), *other = qwen3_context_new(m, 256);
    const int first = ask(c, "one"), second = ask(c, "two");
    CHECK(second > first);
    CHECK(qwen3_rewind(c, first) == 0);
    CHECK(ask(c, "two") == second);
    CHECK(qwen3_rewind(c, 0) == 0);
    CHECK(ask(c, "two") == ask(other, "two"));
    for (qwen3_context* x : {c, other}) qwen3_context_free(x);
    qwen3_close(m);
}

TEST_CASE("C API: calls in random order, with null pointers and numbers out of range") {
    for (uint64_t seed = 1; seed <= 4; seed++) {
        Random random{seed};
        auto below = [&](uint32_t n) { return (uint32_t)random.below((int)n); };
        RandomCalls<decltype(below)> calls(below, MODEL);
        calls.open();
        for (int i = 0; i < 1500; i++) calls.one();
        calls.end();
    }
}
