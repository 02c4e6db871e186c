// Book I by itself: the definitions of qwen3.cu, without cpu/ and without a GPU, are the model. (Tests of the fast
// ops: test_ops.cpp, test_backward.cpp. `make headers` compiles Book I without them, by QWEN3_PLAIN.)
#include "model/chat_template.h"
#include "model/model_file.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "qwen3.cu"
#include "sj.h"
#include <doctest/doctest.h>

namespace {
Context plain() {
    Context ctx;
    ctx.plain = true;
    return ctx;
}

// Our logits of every position of the prompts of a fixture, and Hugging Face's in float32.
template <class T> double largest_difference(const std::string& folder) {
    const ModelFile file(folder);
    const Weights<T> weights(file);
    const MappedFile text(folder + "/golden.json");
    sj::Doc golden;
    REQUIRE(sj::parse(golden, text.text()) == "");
    const MappedFile truth(folder + "/" + golden.root()["logits"].str());
    const float* want = (const float*)truth.data;
    double worst = 0;
    for (sj::Value prompt : golden.root()["prompts"].items()) {
        std::vector<int> ids;
        for (sj::Value id : prompt.items()) ids.push_back((int)id.number());
        Session<T> session(file.config, weights, (int)ids.size(), plain());
        session.feed(ids, nullptr, [&](const acc<T>* row) {
            for (int v = 0; v < file.config.V; v++) {
                const double d = std::fabs((double)row[v] - *want++);
                worst = d <= worst ? worst : d; // a NaN becomes the worst
            }
        });
    }
    REQUIRE((const uint8_t*)want == truth.data + truth.size);
    return worst;
}

TEST_CASE("Book I alone: every logit within 2e-4 of Hugging Face's, in float and in double") {
    for (const char* folder : {"tests/fixtures/tied_f32", "tests/fixtures/untied_f32_sharded"}) {
        INFO(std::string(folder));
        CHECK(largest_difference<float>(folder) <= 2e-4);
        CHECK(largest_difference<double>(folder) <= 2e-4);
    }
}

TEST_CASE("Book I alone: the default model answers") {
    const ModelFile file("data/tiny/model.bin");
    const Weights<bf16> weights(file);
    const Tokenizer tokenizer("data/tiny/tokenizer.bin");
    const MappedFile answers("tests/fixtures/default/answers.jsonl");
    sj::Doc row;
    REQUIRE(sj::parse(row, answers.text().substr(0, answers.text().find('\n'))) == "");
    Session<bf16> session(file.config, weights, 512, plain());
    session.feed(render_chat(tokenizer, {{"user", row.root()["question"].str()}}));
    Generation how;
    how.sampling.temperature = 0;
    std::string shown;
    generate(session, &tokenizer, how, [&](std::string_view s) { shown += s; });
    CHECK(shown == row.root()["answer"].str());
    CHECK(std::string(how.finish) == "stop");
}

TEST_CASE("Book I alone: generate gives the ids of a session") {
    const ModelFile file("data/tiny/model.bin");
    const Weights<bf16> weights(file);
    const Tokenizer tokenizer("data/tiny/tokenizer.bin");
    const std::vector<int> prompt = render_chat(tokenizer, {{"user", "什么是 warp？"}});
    for (float temperature : {0.f, 1.5f}) {
        Generation how;
        how.sampling.temperature = temperature, how.sampling.seed = 3, how.max_tokens = 12;
        Session<bf16> session(file.config, weights, 512, plain());
        session.feed(prompt);
        generate(session, &tokenizer, how, [](std::string_view) {});
        Context ctx = plain();
        CHECK(generate(ctx, file.config, weights, prompt, how.max_tokens, tokenizer.size(), how.sampling) == how.ids);
    }
}
} // namespace
