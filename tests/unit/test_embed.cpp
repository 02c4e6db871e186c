// Vectors and rankings (search/, the server's API of embeddings), against sentence-transformers and transformers
// (fixtures/embed): in the engine beside answers, on the command line (QWEN3, else ./qwen3) and over HTTP (SERVE, else
// ./serve); passages of documents found by them.
#include "model/session.h"
#include "search/documents.h"
#include "search/embed.h"
#include "search/embedder.h"
#include "search/hybrid.h"
#include "search/index.h"
#include "search/rerank.h"
#include "search/vector_file.h"
#include "search/vector_update.h"
#include "server/api/asked.h"
#include "server/api/paths.h"
#include "server/api/service.h"
#include "tests/engine.h"
#include "tests/http.h"
#include "tests/process.h"
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <thread>

using namespace std::literals;

static const std::string FOLDER = "tests/fixtures/embed", WORDS = FOLDER + "/tokenizer.bin";
static std::string program(const char* variable, const char* otherwise) {
    return getenv(variable) ? getenv(variable) : otherwise;
}

namespace {
struct Golden {
    Json json{std::string(MappedFile(FOLDER + "/golden.json").text())};
    Tokenizer tokenizer{WORDS};
    ModelFile file{FOLDER};
    static std::vector<int> ids(sj::Value list) {
        std::vector<int> all;
        for (sj::Value id : list.items()) all.push_back((int)id.number());
        return all;
    }
};
} // namespace
static const Golden& golden() {
    static const Golden g;
    return g;
}
using Texts = std::vector<std::vector<int>>;
template <class T>
static std::vector<std::vector<float>> hidden_of(const Config& c, const Weights<T>& w, const Texts& texts,
                                                 const Context& ctx = {}) {
    size_t longest = 0;
    for (auto& ids : texts) longest = std::max(longest, ids.size());
    Embedder<T> model(c, w, (int)longest, ctx);
    std::vector<std::vector<float>> all;
    model.run(texts, nullptr, [&](size_t i, const std::vector<float>& hidden) {
        CHECK(i == all.size());
        all.push_back(hidden);
    });
    REQUIRE(all.size() == texts.size());
    return all;
}

// ------------------------------------------------------------------------------------------------------- parity

TEST_CASE("embed: the ids are sentence-transformers', the reranker's those of its card") {
    const Golden& g = golden();
    for (sj::Value row : g.json["texts"].items()) {
        const std::string text = row["text"].str();
        const bool query = row["task"].is(sj::String);
        CHECK(embedding_ids(g.tokenizer, query ? with_task(row["task"].str(), text) : text) == Golden::ids(row["ids"]));
    }
    CHECK(g.json["task"].str() == RETRIEVAL_TASK);
    const RerankPrompt prompt(g.tokenizer);
    for (sj::Value row : g.json["pairs"].items()) {
        const std::vector<int> query = prompt.query_ids(g.tokenizer, RETRIEVAL_TASK, row["query"].str());
        CHECK(prompt.ids(g.tokenizer, query, row["document"].str()) == Golden::ids(row["ids"]));
    }
    // Text that looks like a special token stays text; what is cut leaves the end, and the question, whole.
    CHECK(embedding_ids(g.tokenizer, "<|endoftext|>").size() > 2);
    const std::vector<int> all = embedding_ids(g.tokenizer, "one two three four");
    CHECK(embedding_ids(g.tokenizer, "one two three four", 3) == std::vector<int>{all[0], all[1], all.back()});
    CHECK(embedding_ids(g.tokenizer, "one two three four", 2, true) == std::vector<int>{all.end()[-2], all.back()});
    const std::vector<int> query = prompt.query_ids(g.tokenizer, "t", "q");
    const std::vector<int> cut = prompt.ids(g.tokenizer, query, std::string(500, 'x'), prompt.length() + query.size() + 4);
    CHECK(cut.size() == prompt.length() + query.size() + 4);
    CHECK(std::equal(prompt.after.rbegin(), prompt.after.rend(), cut.rbegin()));
}

// Vectors and scores against float32's: in float they are the same, in bfloat16 nearer than transformers' own.
template <class T>
static void check_parity(const Context& ctx, double vector_limit, double short_limit, double score_limit) {
    const Golden& g = golden();
    const Weights<T> weights(g.file);
    Texts texts;
    for (sj::Value row : g.json["texts"].items()) texts.push_back(Golden::ids(row["ids"]));
    const auto hidden = hidden_of(g.file.config, weights, texts, ctx);
    std::map<std::string, double> apart;
    size_t i = 0;
    for (sj::Value row : g.json["texts"].items()) {
        for (auto [dimensions, wanted] : row["vectors"].members()) {
            const std::vector<float> v = unit_vector(hidden[i], (size_t)atoi(dimensions.c_str()));
            REQUIRE(v.size() == wanted.size());
            double squares = 0;
            for (size_t k = 0; k < v.size(); k++) squares += std::pow(v[k] - wanted[k].number(), 2);
            apart[dimensions] += std::sqrt(squares) / (double)hidden.size();
        }
        i++;
    }
    MESSAGE("vectors " << apart["48"] << " " << apart["7"]);
    CHECK(apart["48"] <= vector_limit);
    CHECK(apart["7"] <= short_limit);

    texts.clear();
    for (sj::Value row : g.json["pairs"].items()) texts.push_back(Golden::ids(row["ids"]));
    const Relevance relevance(ctx, weights, RerankPrompt(g.tokenizer));
    const auto states = hidden_of(g.file.config, weights, texts, ctx);
    double error = 0;
    i = 0;
    for (sj::Value row : g.json["pairs"].items())
        error += std::fabs(relevance(states[i++]) - row["score"].number()) / (double)states.size();
    MESSAGE("scores " << error);
    CHECK(error <= score_limit);
}
TEST_CASE("embed: vectors and scores are those of sentence-transformers and transformers") {
    const Golden& g = golden();
    Context plain;
    plain.plain = true;
    const sj::Value theirs = g.json["bf16_distance"];
    const double whole = theirs["48"].number(), part = theirs["7"].number(), score = g.json["bf16_score_error"].number();
    SUBCASE("float32") { check_parity<float>(Context{}, 2e-6, 2e-6, 2e-6); }
    SUBCASE("bfloat16") { check_parity<bf16>(Context{}, whole, part, score); }
    SUBCASE("bfloat16, as defined") { check_parity<bf16>(plain, whole, part, score); }
}

TEST_CASE("embed: a text's numbers do not depend on those beside it, nor on where it is cut") {
    const Config& c = golden().file.config;
    const Weights<bf16> weights(golden().file);
    Random random{31};
    Texts texts;
    for (int n : {1, 2, 15, 16, 17, 511, 512, 513, 1200, 3, 100, 1, 400}) {
        texts.emplace_back();
        while ((int)texts.back().size() < n) texts.back().push_back(random.below(1000));
    }
    for (int i = 0; i < 600; i++) texts.push_back({random.below(1000)}); // more than one batch takes
    const auto together = hidden_of(c, weights, texts);
    std::vector<size_t> order(texts.size());
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[(size_t)random.below((int)i)]);
    Texts shuffled;
    for (size_t i : order) shuffled.push_back(texts[i]);
    const auto otherwise = hidden_of(c, weights, shuffled);
    for (size_t i = 0; i < order.size(); i++) CHECK(otherwise[i] == together[order[i]]);
    for (size_t i = 0; i < 14; i++) CHECK(hidden_of(c, weights, {texts[i]})[0] == together[i]);
    // ... and are those of a conversation's last row.
    Session<bf16> session(c, weights, 1200);
    session.feed(texts[8]);
    const bf16* row = session.activations.normed + (size_t)((1200 - 1) % Session<bf16>::CHUNK) * c.C;
    for (int k = 0; k < c.C; k++) CHECK(together[8][(size_t)k] == to_acc(row[k]));
    const std::vector<std::vector<float>> vectors = [&] {
        Embedder<bf16> model(c, weights, 64, {});
        CHECK_THROWS_AS(model.run({std::vector<int>(65, 1)}, nullptr, [](size_t, const std::vector<float>&) {}), Error);
        CHECK_THROWS_AS(model.run({{}}, nullptr, [](size_t, const std::vector<float>&) {}), Error);
        CHECK_THROWS_AS(model.run({{c.V}}, nullptr, [](size_t, const std::vector<float>&) {}), Error);
        return embed_texts(model, golden().tokenizer, {"a", "b"}, "task");
    }();
    CHECK(vectors[0] == unit_vector(hidden_of(c, weights, {embedding_ids(golden().tokenizer, "Instruct: task\nQuery:a")})[0], (size_t)c.C));
}

TEST_CASE("embed: a bare model, without a head; modules that do something else") {
    Scratch scratch;
    auto folder = [&](const std::string& name, const std::function<std::string(std::string)>& config) {
        fs::create_directories(scratch / name + "/1_Pooling");
        for (const char* file : {"modules.json", "1_Pooling/config.json", "tokenizer.bin", "model.safetensors"})
            fs::copy_file(FOLDER + "/" + file, scratch / name + "/" + file);
        write_file(scratch / name + "/config.json", config(read_file(FOLDER + "/config.json")));
        return scratch / name;
    };
    auto with = [](std::string text, const std::string& from, const std::string& to) {
        REQUIRE(text.find(from) != text.npos);
        return text.replace(text.find(from), from.size(), to);
    };
    const std::string bare = folder("bare", [&](const std::string& text) {
        return with(with(text, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"), "Qwen3ForCausalLM", "Qwen3Model");
    });
    ModelFile file(bare);
    CHECK(says_it_embeds(file));
    CHECK_THROWS_WITH_AS(Weights<bf16>{file}, (bare + ": no tensor lm_head.weight").c_str(), Error);
    file.logits = false;
    const Weights<bf16> headless(file), whole(golden().file);
    CHECK(hidden_of(file.config, headless, {{1, 2, 3}}) == hidden_of(file.config, whole, {{1, 2, 3}}));
    CHECK_THROWS_AS(Relevance({}, headless, RerankPrompt(golden().tokenizer)), Error);
    CHECK(hidden_of(file.config, Weights<bf16>(file, Format::INT8), {{1, 2, 3}}).size() == 1); // INT8

    CHECK(says_it_embeds(golden().file));
    CHECK(!says_it_embeds(tiny().file));
    fs::remove(bare + "/modules.json");
    CHECK(says_it_embeds(ModelFile(bare))); // by its architecture
    const std::string mean = folder("mean", [](const std::string& text) { return text; });
    write_file(mean + "/1_Pooling/config.json", "{\"pooling_mode_mean_tokens\": true, \"pooling_mode_lasttoken\": false}");
    CHECK_THROWS_AS(says_it_embeds(ModelFile(mean)), Error);
    const std::string dense = folder("dense", [](const std::string& text) { return text; });
    write_file(dense + "/modules.json", "[{\"type\": \"sentence_transformers.models.Dense\", \"path\": \"3_Dense\"}]");
    CHECK_THROWS_AS(says_it_embeds(ModelFile(dense)), Error);
}

// ------------------------------------------------------------------------------------------------------- engine

static Job text_job(std::vector<int> ids, uint64_t salt = 1) {
    Job job;
    job.reply = std::make_shared<Reply>();
    job.reply->left = 1;
    job.prompt = std::move(ids), job.pooled = true, job.max_tokens = 1, job.salt = salt;
    return job;
}
static bool done(const Job& job) { return job.reply->left == 0; }

TEST_CASE("engine: texts beside answers, few pages, any chunk: both say what they say alone") {
    Random random{41};
    std::vector<Job> jobs;
    std::vector<Generation> wanted;
    Texts texts;
    for (int i = 0; i < 60; i++) {
        if (i % 2) {
            std::vector<int> ids;
            for (int n = random.below(4) ? 1 + random.below(90) : 256; n > 0; n--) ids.push_back(random.below(300));
            if (i % 6 == 1) for (size_t k = 0; k < ids.size() && k < 40; k++) ids[k] = (int)k; // some begin alike
            texts.push_back(ids);
            jobs.push_back(text_job(ids));
        } else {
            jobs.push_back(random_job(random, 256));
            wanted.push_back(expected(jobs.back(), 256));
        }
    }
    const auto hidden = hidden_of(tiny().file.config, tiny().weights, texts, where);
    size_t preempted = 0;
    for (auto [max_seqs, chunk, pages, at_once] : {std::tuple{8, 7, 400, 4}, {8, 64, 30, 16}, {2, 200, 17, 1}}) {
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes(), false, at_once});
        std::vector<Job> all = jobs;
        for (Job& job : all) job.reply = std::make_shared<Reply>(), job.reply->left = 1;
        run_all(bench, random, all);
        for (size_t i = 0; i < all.size(); i++) {
            if (!all[i].pooled) { check_answer(all[i], wanted[i / 2]); continue; }
            REQUIRE(all[i].reply->pieces.size() == 1);
            CHECK(all[i].reply->pieces[0].hidden == hidden[i / 2]);
        }
        CHECK(bench.desk.texts == 0);
        CHECK(bench.desk.text_tokens == 0);
        preempted += bench.desk.figures->preempted;
    }
    CHECK(preempted > 2);
}

TEST_CASE("engine: a thousand texts hold up no answer, and answers that fill all slots hold up no text") {
    Bench bench({256, 2, 32, 32, 4'000'000, false, 8});
    std::vector<Job> texts;
    for (int i = 0; i < 1000; i++) texts.push_back(text_job(std::vector<int>(30, i % 300)));
    REQUIRE(bench.desk.submit(std::vector<Job>(texts)));
    bench.engine.step();
    Random random{5};
    auto answer = [&] {
        Job job = random_job(random, 256);
        job.prompt.assign(20, 7), job.max_tokens = 100, job.ignore_eos = true, job.stops.clear(), job.alternatives = -1;
        job.every = true;
        return job;
    };
    std::vector<Job> answers = {answer(), answer(), answer(), answer()};
    REQUIRE(bench.desk.submit(std::vector<Job>(answers)));
    for (int i = 0; i < 4; i++) bench.engine.step(); // half of 32 tokens a step: two steps for its 20, one more to be told
    CHECK(!answers[0].reply->pieces.empty());
    const size_t before = (size_t)std::count_if(texts.begin(), texts.end(), done);
    for (int i = 0; i < 40; i++) bench.engine.step(); // both slots are taken, and two answers wait, which need no half
    CHECK(bench.desk.figures->running >= 2);
    CHECK((size_t)std::count_if(texts.begin(), texts.end(), done) >= before + 36);
    run_all(bench, random, {});
    CHECK(std::all_of(texts.begin(), texts.end(), done));
    CHECK(std::all_of(answers.begin(), answers.end(), done));
}

// An answer of n tokens to a prompt of so many, told token by token.
static Job answer_job(size_t prompt, size_t n) {
    Job job;
    job.reply = std::make_shared<Reply>();
    job.reply->left = 1;
    for (size_t i = 0; i < prompt; i++) job.prompt.push_back((int)(7 * i) % 300);
    job.max_tokens = n, job.ignore_eos = true, job.every = true;
    return job;
}
// Steps until f(), or 0 if there are `most`.
template <class F> static int steps_until(Bench& bench, int most, F f) {
    for (int n = 1; n <= most; n++) {
        bench.engine.step();
        if (f()) return n;
    }
    return 0;
}

TEST_CASE("engine: prompts of one token a step: texts and answers in turn") {
    Bench bench({256, 2, 1, 1, 4'000'000, false, 2});
    std::vector<Job> texts(50, text_job(std::vector<int>(10, 5)));
    for (Job& job : texts) job.reply = std::make_shared<Reply>(), job.reply->left = 1;
    const Job first = answer_job(1, 200), second = answer_job(10, 3), third = answer_job(200, 3);
    REQUIRE(bench.desk.submit({first}));
    bench.engine.step();
    REQUIRE(bench.desk.submit(std::vector<Job>(texts)));
    REQUIRE(bench.desk.submit({second}));
    CHECK(steps_until(bench, 25, [&] { return !second.reply->pieces.empty(); }));
    REQUIRE(bench.desk.submit({third}));
    const auto before = std::count_if(texts.begin(), texts.end(), done);
    steps_until(bench, 100, [] { return false; });
    CHECK(!done(third)); // its prompt is being read
    CHECK(std::count_if(texts.begin(), texts.end(), done) >= before + 4);
}

TEST_CASE("engine: a stream of texts keeps no page from an answer that needs nearly all") {
    for (auto [pages, length, chunk] : {std::tuple{17, 30, 64}, {17, 200, 64}, {16, 30, 64}, {17, 30, 1}}) {
        const std::vector<int> alike((size_t)length, 7);
        const std::string size = format("%d pages, texts of %d, chunk %d", pages, length, chunk);
        INFO(size);
        Bench bench({256, 4, chunk, chunk, (size_t)pages * Bench::page_bytes(), false, 8});
        std::vector<Job> texts;
        auto more = [&](int n) {
            std::vector<Job> next;
            for (; n > 0; n--) {
                std::vector<int> ids = alike;
                ids[0] = (int)texts.size() / 300, ids[1] = (int)texts.size() % 300;
                texts.push_back(text_job(ids)), next.push_back(texts.back());
            }
            REQUIRE(bench.desk.submit(std::move(next)));
        };
        more(1500);
        for (int i = 0; i < 10; i++) bench.engine.step();
        const Job large = answer_job(235, 3); // 15 pages
        REQUIRE(bench.desk.submit({large}));
        CHECK(steps_until(bench, chunk == 1 ? 600 : 40, [&] { return done(large); }));
        CHECK(!done(texts.back()));
        // ... nor does it keep texts waiting after it, or answers that wait for each other's pages.
        const Job one = answer_job(150, 90), two = answer_job(230, 3); // 10 pages and more; 15
        REQUIRE(bench.desk.submit({one}));
        REQUIRE(steps_until(bench, 400, [&] { return !one.reply->pieces.empty(); }));
        REQUIRE(bench.desk.submit({two}));
        const auto before = std::count_if(texts.begin(), texts.end(), done);
        REQUIRE(steps_until(bench, 400, [&] { return done(one); }));
        if (length == 30 && chunk > 1) CHECK(std::count_if(texts.begin(), texts.end(), done) >= before + 20);
        CHECK(steps_until(bench, chunk == 1 ? 600 : 60, [&] { return done(two); }));
        for (Job& job : texts) job.reply->cancelled = true;
        while (bench.desk.inside) bench.engine.step();
        CHECK(bench.desk.figures->pages_used == 0);
    }
}

TEST_CASE("engine: answers that fill all pages do not keep out texts that need nearly all") {
    Bench bench({256, 4, 64, 64, 17 * Bench::page_bytes(), false, 8});
    std::vector<Job> answers, texts;
    for (int i = 0; i < 20; i++) answers.push_back(answer_job(20, 200));
    for (int i = 0; i < 3; i++) texts.push_back(text_job(std::vector<int>(200, i))); // 13 pages
    for (const Job& job : answers) REQUIRE(bench.desk.submit({job}));
    for (int i = 0; i < 20; i++) bench.engine.step();
    REQUIRE(bench.desk.submit(std::vector<Job>(texts)));
    CHECK(steps_until(bench, 3000, [&] { return std::all_of(texts.begin(), texts.end(), done); }));
    CHECK(std::count_if(answers.begin(), answers.end(), done) < 15);
    CHECK(steps_until(bench, 20000, [&] { return bench.desk.inside == 0; }));
    CHECK(std::all_of(answers.begin(), answers.end(), done));
}

TEST_CASE("engine: keys take turns with their texts; a cancelled one leaves; the desk is bounded") {
    Bench bench({256, 2, 32, 32, 4'000'000, false, 2});
    std::vector<Job> many, few = {text_job(std::vector<int>(20, 3), 2)};
    for (int i = 0; i < 300; i++) many.push_back(text_job(std::vector<int>(20, i), 1));
    REQUIRE(bench.desk.submit(std::vector<Job>(many)));
    for (int i = 0; i < 3; i++) bench.engine.step();
    REQUIRE(bench.desk.submit(std::vector<Job>(few)));
    for (int i = 0; i < 3; i++) bench.engine.step();
    CHECK(done(few[0]));
    CHECK(!done(many.back()));
    for (Job& job : many) job.reply->cancelled = true;
    for (int i = 0; i < 20 && bench.desk.inside; i++) bench.engine.step();
    CHECK(bench.desk.texts == 0);
    CHECK(bench.desk.figures->pages_used == 0);

    Desk desk;
    desk.limit = 1;
    auto submit = [&](size_t n, size_t tokens, uint64_t salt = 1) {
        return desk.submit(std::vector<Job>(n, text_job(std::vector<int>(tokens), salt)));
    };
    for (size_t n = 0; n < WAITING_TEXTS; n += MAX_TEXTS) CHECK(submit(MAX_TEXTS, 1));
    CHECK(!submit(1, 1));
    Random random{6};
    Job answer = random_job(random, 256);
    CHECK(desk.submit({answer})); // texts have no part in its queue
    CHECK(!desk.submit({answer}));
    desk.keys = 4;
    CHECK(submit(MAX_TEXTS, 1, 2)); // another key's share is left
    Desk long_ones;
    const std::vector<Job> one(1, text_job(std::vector<int>(MAX_TEXT_TOKENS)));
    size_t taken = 0;
    while (taken < 100 && long_ones.submit(std::vector<Job>(one))) taken++;
    CHECK(taken == WAITING_TEXT_TOKENS / MAX_TEXT_TOKENS);
    long_ones.keys = 4; // each key has its share of the tokens, too, also when one has taken all
    auto by = [&](uint64_t key) { return long_ones.submit({text_job(std::vector<int>(MAX_TEXT_TOKENS), key)}); };
    for (taken = 0; taken < 100 && by(2);) taken++;
    CHECK(taken == WAITING_TEXT_TOKENS / MAX_TEXT_TOKENS / 4);
    CHECK(!by(1));
    CHECK(by(3));

    // A finished job is no longer held.
    bench.desk.keys = 2;
    Job one_more = text_job(std::vector<int>(20, 3), 2);
    REQUIRE(bench.desk.submit({one_more}));
    CHECK(bench.desk.held[one_more.line()].tokens == 20);
    for (int i = 0; i < 5; i++) bench.engine.step();
    CHECK(done(one_more));
    for (auto& [line, held] : bench.desk.held) CHECK(held.jobs + held.tokens == 0);
}

// ---------------------------------------------------------------------------------------------------------- API

static Service service_of(int context = 512) {
    const Golden& g = golden();
    static const Weights<bf16> weights(g.file);
    Service s{&g.tokenizer, "tiny", "", context, false};
    s.generates = false, s.dimensions = g.file.config.C;
    s.rerank = std::make_shared<RerankPrompt>(g.tokenizer);
    s.relevance = std::make_shared<Relevance>(Context{}, weights, *s.rerank);
    return s;
}
static std::string refusal(const std::string& path, const std::string& body, const std::string& param, int status = 400) {
    try {
        read_asked(service_of(), path, body, 1);
        FAIL_CHECK("was taken: " << body);
    } catch (const Refusal& r) {
        INFO(body << "\n" << r.what());
        CHECK(r.status == status);
        CHECK(r.param == param);
        return r.what();
    }
    return "";
}

TEST_CASE("embed: what is malformed, too much or not done is refused by name") {
    const std::string E = "/v1/embeddings", R = "/v1/rerank";
    auto input = [](const std::string& more) { return "{\"input\": \"a\", " + more + "}"; };
    for (const char* body : {"{}", "{\"input\": []}", "{\"input\": 5}", "{\"input\": {}}", "{\"input\": [\"a\", 5]}", "{\"input\": [5, \"a\"]}",
                             "{\"input\": [[]]}", "{\"input\": [[5], []]}", "{\"input\": [1.5]}", "{\"input\": [-1]}", "{\"input\": [1001]}",
                             "{\"input\": [[1], [99999999999]]}", "{\"input\": null}", "{\"input\": \"\", \"add_special_tokens\": false}"})
        refusal(E, body, "input");
    for (const char* body : {"", "[]", "{", "{\"input\": \"\xff\"}", "{\"input\": NaN}"}) refusal(E, body, "");
    for (const char* d : {"0", "49", "-1", "1.5", "\"7\"", "1e99"}) refusal(E, input("\"dimensions\": " + std::string(d)), "dimensions");
    for (const char* e : {"\"hex\"", "5"}) refusal(E, input("\"encoding_format\": " + std::string(e)), "encoding_format");
    for (const char* n : {"0", "-2", "513", "\"a\""}) refusal(E, input("\"truncate_prompt_tokens\": " + std::string(n)), "truncate_prompt_tokens");
    refusal(E, input("\"truncation_side\": \"middle\""), "truncation_side");
    refusal(E, input("\"model\": \"other\""), "model", 404);
    refusal(E, input("\"messages\": []"), "messages");
    refusal(E, input("\"embed_dtype\": \"float16\""), "embed_dtype");
    refusal(E, input("\"cache_salt\": \"\""), "cache_salt");
    refusal(E, input("\"user\": 5"), "user");
    refusal("/v1/chat/completions", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", "model");

    // Too long, too many: the message says the limit.
    CHECK(refusal(E, "{\"input\": [\"a\", \"" + std::string(600, '1') + "\"]}", "input").find("512") != std::string::npos);
    std::string million = "{\"input\": [\"\"";
    for (int i = 1; i < 1000000; i++) million += ",\"\"";
    CHECK(refusal(E, million + "]}", "input").find("2048") != std::string::npos);
    std::string much = "{\"input\": [[1";
    for (int i = 0; i < 2047; i++) much += ",1";
    CHECK(refusal(E, much + "]]}", "input").find("512") != std::string::npos);
    much = "{\"input\": [";
    for (int i = 0; i < 2048; i++) much += (i ? ",\"" : "\"") + std::string(511, '7') + "\"";
    CHECK(read_asked(service_of(), E, much + "]}", 1).ask.jobs.size() == 2048); // a million tokens, no more

    auto rank = [](const std::string& more) { return "{\"query\": \"q\", \"documents\": [\"a\"]" + more + "}"; };
    for (const char* body : {"{\"documents\": [\"a\"]}", "{\"query\": \"\", \"documents\": [\"a\"]}", "{\"query\": 5, \"documents\": [\"a\"]}"})
        refusal(R, body, "query");
    for (const char* d : {"[]", "5", "\"a\"", "[5]", "[{\"title\": \"a\"}]", "null", "[[1]]"})
        refusal(R, "{\"query\": \"q\", \"documents\": " + std::string(d) + "}", "documents");
    for (const char* n : {"-1", "1.5", "\"a\""}) refusal(R, rank(", \"top_n\": " + std::string(n)), "top_n");
    refusal(R, rank(", \"return_documents\": 1"), "return_documents");
    refusal(R, rank(", \"rank_fields\": [\"title\"]"), "rank_fields");
    refusal(R, rank(", \"truncate_prompt_tokens\": 5"), "truncate_prompt_tokens");
    refusal(R, "{\"query\": \"q\", \"documents\": [\"" + std::string(600, '1') + "\"]}", "documents");
    const Service deaf = [] { Service s = service_of(); s.dimensions = 0, s.rerank = nullptr; return s; }();
    CHECK_THROWS_AS(read_asked(deaf, E, input("\"user\": \"u\""), 1), Refusal);
    CHECK_THROWS_AS(read_asked(deaf, R, rank(""), 1), Refusal);
    // A query of megabytes before many documents, of which little stays, takes no time for each.
    const double start = seconds();
    std::string heavy = "{\"truncate_prompt_tokens\": -1, \"query\": \"" + std::string(3 << 20, 'q') + "\", \"documents\": [\"\"";
    for (int i = 1; i < 2000; i++) heavy += ",\"\"";
    CHECK(read_asked(service_of(), R, heavy + "]}", 1).ask.prompt_tokens == 2000 * 512);
    CHECK(seconds() - start < 20);
}

TEST_CASE("embed: inputs of every kind; cuts") {
    const Tokenizer& t = golden().tokenizer;
    auto prompts = [](const std::string& fields) {
        Texts all;
        for (auto& job : read_asked(service_of(), "/v1/embeddings", "{" + fields + "}", 1).ask.jobs) all.push_back(job.prompt);
        return all;
    };
    const std::vector<int> a = embedding_ids(t, "a b"), b = embedding_ids(t, "");
    CHECK(b.size() == 1);
    CHECK(prompts("\"input\": \"a b\"") == Texts{a});
    CHECK(prompts("\"input\": [\"a b\", \"\"]") == Texts{a, b});
    CHECK(prompts("\"input\": [1, 2]") == Texts{{1, 2}}); // as they are
    CHECK(prompts("\"input\": [[1, 2], [3]]") == Texts{{1, 2}, {3}});
    CHECK(prompts("\"input\": [\"a b\", [3]]") == Texts{a, {3}});
    CHECK(prompts("\"input\": \"a b\", \"add_special_tokens\": false") == Texts{{a.begin(), a.end() - 1}});
    CHECK(prompts("\"input\": \"a\\u0000b\"") == Texts{embedding_ids(t, std::string("a\0b", 3))});
    const std::string digits(700, '7');
    const Texts cut = prompts("\"truncate_prompt_tokens\": -1, \"input\": \"" + digits + "\"");
    CHECK(cut[0].size() == 512);
    CHECK(cut[0].back() == b[0]);
    CHECK(prompts("\"truncate_prompt_tokens\": 2, \"truncation_side\": \"left\", \"input\": [[1, 2, 3]]") == Texts{{2, 3}});
    CHECK(prompts("\"truncate_prompt_tokens\": 2, \"input\": [[1, 2, 3]]") == Texts{{1, 2}});
}

TEST_CASE("embed: documents of a ranking are kept only to be told, and are counted until then") {
    const std::string document(1 << 20, 'd'); // of which 512 tokens stay
    auto ask = [&](bool told) {
        return read_asked(service_of(), "/v1/rerank",
                          "{\"query\": \"q\", \"truncate_prompt_tokens\": -1, \"return_documents\": "s + (told ? "true" : "false") +
                              ", \"documents\": [\"" + document + "\", \"" + document + "\"]}", 1).ask;
    };
    Desk desk;
    desk.unsent.limit = 5 << 20;
    auto submit = [&](uint64_t who, bool told) {
        Ask one = ask(told);
        CHECK(one.pooled->documents.size() == (told ? 2 : 0));
        const auto share = one.jobs[0].reply->share = std::make_shared<Budget::Share>();
        share->who = who;
        const bool taken = desk.submit(std::move(one.jobs));
        return std::pair(share, taken);
    };
    const auto [untold, first] = submit(1, false);
    CHECK(first);
    CHECK(desk.unsent.used == 0);
    const auto [other, second] = submit(2, true);
    CHECK(second);
    CHECK(desk.unsent.used > 2 * document.size());
    std::vector<std::shared_ptr<Budget::Share>> many;
    size_t refused = 0;
    for (int i = 0; i < 4; i++) {
        const auto [share, taken] = submit(1, true);
        many.push_back(share);
        refused += !taken;
        CHECK(taken == !share->lost);
        CHECK(desk.unsent.used <= desk.unsent.limit);
    }
    CHECK(desk.unsent.lost == 3); // of whoever has the most
    CHECK(!other->lost);
    CHECK(desk.texts == 2 * (6 - refused)); // what is refused waits for nothing
    for (auto& share : many) desk.unsent.remove(*share);
    desk.unsent.remove(*other);
    CHECK(desk.unsent.used == 0);
    Ask of_batch = ask(true); // a batch's answers have no share
    CHECK(desk.submit(std::move(of_batch.jobs)));
}

TEST_CASE("embed: answers in parts are answers at once; base64, dimensions, order, broken numbers") {
    auto answer_to = [&](const std::string& path, const std::string& body, float poison) {
        Ask ask = read_asked(service_of(), path, body, 1).ask;
        Answer answer(service_of(), ask);
        std::string all;
        for (size_t i = ask.jobs.size(); i-- > 0;) { // in any order
            Piece piece;
            piece.choice = (int)i, piece.finish = "stop";
            for (int k = 0; k < 48; k++) piece.hidden.push_back((float)(i + 1) * (float)(k % 5 - 2) + poison);
            answer.add(std::move(piece));
        }
        if (poison != 0) {
            CHECK(answer.broken());
            return all;
        }
        CHECK(!answer.broken());
        while (!answer.told()) all += answer.part();
        return all;
    };
    std::string inputs = "\"a\"";
    for (int i = 1; i < 300; i++) inputs += ", \"a\"";
    const Json numbers(answer_to("/v1/embeddings", "{\"input\": [" + inputs + "]}", 0));
    const Json coded(answer_to("/v1/embeddings", "{\"input\": [" + inputs + "], \"encoding_format\": \"base64\"}", 0));
    REQUIRE(numbers["data"].size() == 300);
    for (size_t i : {0, 7, 299}) {
        const sj::Value one = numbers["data"][i];
        CHECK(one["index"].number() == (double)i);
        CHECK(one["embedding"].size() == 48);
        std::string bytes;
        for (sj::Value x : one["embedding"].items()) {
            const float f = (float)x.number();
            bytes.append((const char*)&f, 4);
        }
        std::string text;
        write_base64(text, bytes.data(), bytes.size());
        CHECK(coded["data"][i]["embedding"].str() == text);
    }
    CHECK(numbers["usage"]["total_tokens"].number() == 600);
    std::string text;
    for (const char* s : {"", "f", "fo", "foo", "foob"}) write_base64(text, s, strlen(s)); // RFC 4648
    CHECK(text == "Zg==Zm8=Zm9vZm9vYg==");

    const std::string three = "{\"query\": \"q\", \"documents\": [\"a\", {\"text\": \"b\"}, \"c\"]";
    const Json ranking(answer_to("/rerank", three + "}", 0)), best(answer_to("/v2/rerank", three + ", \"top_n\": 1, \"return_documents\": false}", 0));
    REQUIRE(ranking["results"].size() == 3);
    CHECK(ranking["results"][(size_t)0]["relevance_score"].number() >= ranking["results"][1]["relevance_score"].number());
    for (sj::Value r : ranking["results"].items()) CHECK(r["document"]["text"].str() == std::string(1, (char)('a' + (int)r["index"].number())));
    REQUIRE(best["results"].size() == 1);
    CHECK(!best["results"][(size_t)0]["document"]);
    CHECK(best["results"][(size_t)0]["index"].number() == ranking["results"][(size_t)0]["index"].number());
    answer_to("/v1/embeddings", "{\"input\": \"a\"}", NAN);
    answer_to("/v1/rerank", three + "}", INFINITY);
    CHECK(unit_vector({0, 0}, 2) == std::vector<float>{0, 0});
    CHECK(unit_vector({3, 4, 12}, 2) == std::vector<float>{0.6f, 0.8f});
}

// ---------------------------------------------------------------------------------------------- the two programs

static Result qwen3(Strings more, std::string_view input = "", const std::string& model = FOLDER) {
    more.insert(more.begin(), {model, "-j", "1"});
    return Process(program("QWEN3", "./qwen3").c_str(), more, input).wait();
}
static std::vector<float> vector_of(sj::Value list) {
    std::vector<float> v;
    for (sj::Value x : list.items()) v.push_back((float)x.number());
    return v;
}

TEST_CASE("qwen3 --embed, --rerank: files, standard input, order; faults before anything is computed") {
    const Golden& g = golden();
    const Weights<bf16> weights(g.file);
    auto wanted = [&](const std::string& text, size_t d = 48) {
        return unit_vector(hidden_of(g.file.config, weights, {embedding_ids(g.tokenizer, text)})[0], d);
    };
    Scratch scratch;
    const Result one = qwen3({"--embed", "-i", "What is a warp?", "--dimensions", "7"});
    INFO(one.err);
    REQUIRE(one.status == 0);
    CHECK(vector_of(Json(one.out)["embedding"]) == wanted("What is a warp?", 7));
    const std::string text = "one\r\n\nth\0ree\n\xef\xbf\xbd"s; // an empty line, a NUL, no end
    for (bool file : {false, true}) {
        write_file(scratch / "texts", text);
        const Result r = qwen3({"--embed", "--texts", file ? scratch / "texts" : "-", "--instruct", "t", "-o", scratch / "out"}, text);
        INFO(r.err);
        REQUIRE(r.status == 0);
        const Strings rows = lines(read_file(scratch / "out"));
        REQUIRE(rows.size() == 4);
        size_t i = 0;
        for (const std::string& s : {"one"s, ""s, "th\0ree"s, "\xef\xbf\xbd"s}) {
            CHECK(Json(rows[i])["index"].number() == (double)i);
            CHECK(vector_of(Json(rows[i++])["embedding"]) == wanted("Instruct: t\nQuery:" + s));
        }
    }
    write_file(scratch / "d.jsonl", "\"Bread is made of flour.\"\n\n{\"id\": \"w\", \"text\": \"A warp is a group of 32 threads that run together.\"}\n");
    const Result ranked = qwen3({"--rerank", "-i", "What is a warp?", "--texts", scratch / "d.jsonl"});
    INFO(ranked.err);
    REQUIRE(ranked.status == 0);
    const Strings rows = lines(ranked.out);
    REQUIRE(rows.size() == 2);
    CHECK(Json(rows[0])["id"].str() == "w");
    CHECK(Json(rows[0])["index"].number() == 1);
    CHECK(Json(rows[0])["relevance_score"].number() > Json(rows[1])["relevance_score"].number());

    auto refused = [&](const Strings& options, const std::string& word, std::string_view input = "") {
        check_refusal(qwen3(options, input), "qwen3", word);
    };
    write_file(scratch / "long", "a\n" + std::string(300, '7') + "\n");
    write_file(scratch / "bad.jsonl", "\"a\"\n{\"title\": 1}\n");
    refused({"--embed", "--texts", scratch / "long", "-c", "200", "-o", scratch / "no"}, "text 2 is 301 tokens, the context 200");
    CHECK(!fs::exists(scratch / "no"));
    CHECK(lines(qwen3({"--embed", "--texts", scratch / "long", "-c", "200", "--truncate"}).out).size() == 2);
    refused({"--embed", "--texts", scratch / "bad.jsonl"}, "line 2: neither a string");
    refused({"--embed", "--texts", "-"}, "standard input: no text");
    refused({"--embed", "--texts", scratch / "none"}, "No such file");
    refused({"--embed"}, "--embed takes");
    refused({"--embed", "-i", "a", "--texts", "-"}, "--embed takes");
    refused({"--embed", "-i", "a", "--dimensions", "49"}, "48");
    refused({"--embed", "-i", "a", "--dimensions", "0"}, "--dimensions");
    refused({"--embed", "--rerank", "-i", "a", "--texts", "-"}, "one thing at a time");
    refused({"--embed", "-i", "a", "--json"}, "no question: -i TEXT");
    refused({"--rerank", "-i", "a"}, "--rerank takes");
    refused({"--rerank", "-i", "", "--texts", "-"}, "the query is empty", "a\n");
    refused({"--rerank", "-i", "a", "--texts", "-", "-c", "50"}, "the question alone", "a\n");
    refused({"-i", "a", "--truncate"}, "are for --embed");
    check_refusal(qwen3({"--rerank", "-i", "a", "--texts", "-", "-z", VOCABULARY}, "a\n", MODEL), "qwen3", "not one token each");
}

// Weights with a NaN: a fault, not a line of nulls.
TEST_CASE("embed: a model whose numbers are not finite") {
    Scratch scratch;
    fs::create_directories(scratch / "nan");
    for (const char* file : {"config.json", "tokenizer.bin", "model.safetensors"}) fs::copy_file(FOLDER + "/" + file, scratch / "nan/"s + file);
    std::string bytes = read_file(scratch / "nan/model.safetensors");
    const ModelFile file(FOLDER);
    const size_t at = (size_t)(file.tensors.at("model.norm.weight").data - file.maps[0].data);
    bytes[at] = (char)0xc0, bytes[at + 1] = 0x7f;
    write_file(scratch / "nan/model.safetensors", bytes);
    check_refusal(qwen3({"--embed", "-i", "a"}, "", scratch / "nan"), "qwen3", "not finite");
}

struct Serving : Process {
    int port = 0;
    explicit Serving(const std::string& path, const Strings& more) : Process(path.c_str(), with(more), "", [] { setenv("OMP_WAIT_POLICY", "passive", 1); }) {
        for (const double start = seconds(); port == 0; usleep(2000)) {
            const std::string said = err.text();
            INFO(said);
            REQUIRE(seconds() - start < 30);
            const size_t at = said.find("http://127.0.0.1:");
            if (at != std::string::npos && said.back() == '\n') port = atoi(said.c_str() + at + 17);
        }
    }
    ~Serving() { kill_running(); }
    static Strings with(const Strings& more) {
        Strings all = {FOLDER, "-j", "1", "--port", "0", "--name", "tiny"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    HttpReply post(const std::string& path, const std::string& body) const { return Http(port).call("POST", path, body, ""); }
};

TEST_CASE("serve: the folder says what it is for; many texts at once, beside a chat; a batch") {
    const std::string path = program("SERVE", "./serve");
    const std::vector<float> warp = vector_of(Json(qwen3({"--embed", "-i", "What is a warp?"}).out)["embedding"]);
    const std::string ask = "{\"input\": \"What is a warp?\", \"model\": \"tiny\"}";
    {
        const Serving server(path, {}); // of vectors only
        const HttpReply r = server.post("/v1/embeddings", ask);
        INFO(r.body);
        REQUIRE(r.status == 200);
        const Json j(r.body);
        CHECK(vector_of(j["data"][(size_t)0]["embedding"]) == warp);
        CHECK(j["usage"]["prompt_tokens"].number() == 7);
        for (const char* other : {"/v1/rerank", "/v1/chat/completions", "/v1/completions"})
            CHECK(server.post(other, "{}").status == 400);
        CHECK(Http(server.port).call("GET", "/v1/embeddings").status == 405);
    }
    const Serving server(path, {"--task", "embed", "--task", "rerank", "--task", "generate"});
    std::vector<std::string> inputs;
    std::string list;
    for (int i = 0; i < 1500; i++) list += format(i ? ", \"text %d\"" : "\"text %d\"", i);
    HttpReply all;
    std::thread texts([&] { all = server.post("/v1/embeddings", "{\"input\": [" + list + "], \"encoding_format\": \"base64\"}"); });
    const HttpReply chat = server.post("/v1/chat/completions", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"max_tokens\": 5}");
    texts.join();
    CHECK(chat.status == 200);
    REQUIRE(all.status == 200);
    CHECK(Json(all.body)["data"].size() == 1500);
    CHECK(vector_of(Json(server.post("/v1/embeddings", ask).body)["data"][(size_t)0]["embedding"]) == warp);
    for (const char* route : {"/rerank", "/v1/rerank", "/v2/rerank"}) {
        const Json j(server.post(route, "{\"query\": \"What is a warp?\", \"documents\": [\"Bread is made of flour.\", \"A warp is a group of 32 threads that run together.\"]}").body);
        CHECK(j["results"][(size_t)0]["index"].number() == 1);
        CHECK(std::fabs(j["results"][(size_t)0]["relevance_score"].number() - golden().json["pairs"][(size_t)0]["score"].number()) < 0.02);
    }
    const Json document(Http(server.port).call("GET", "/openapi.json").body); // its examples are rankings
    size_t examples = 0;
    for (auto [name, one] : document["components"]["requestBodies"]["Rerank"]["content"]["application/json"]["examples"].members()) {
        const HttpReply r = server.post("/v1/rerank", std::string(one["value"].raw()));
        INFO(r.body);
        CHECK(r.status == 200);
        examples += Json(r.body)["results"].size() == 2;
    }
    CHECK(examples == 2);
    Scratch scratch;
    write_file(scratch / "in", "{\"custom_id\": \"a\", \"url\": \"/v1/embeddings\", \"body\": " + ask + "}\n{\"custom_id\": \"b\", \"url\": \"/v1/embeddings\", \"body\": {}}\n");
    const Result batch = Process(path.c_str(), {FOLDER, "-j", "1", "--name", "tiny", "--batch", scratch / "in", "-o", scratch / "out"}).wait();
    INFO(batch.err);
    REQUIRE(batch.status == 0);
    const Strings rows = lines(read_file(scratch / "out"));
    CHECK(vector_of(Json(rows.at(0))["response"]["body"]["data"][(size_t)0]["embedding"]) == warp);
    CHECK(Json(rows.at(1))["response"]["status_code"].number() == 400);
    check_refusal(Process(path.c_str(), {FOLDER, "--task", "score"}).wait(), "serve", "generate, embed or rerank");
}

// ------------------------------------------------------------------------------------------- documents, by vectors

namespace {
// A folder of passages, of which no two say the same, and its index with models.
struct Notes {
    Scratch scratch;
    const std::string folder = scratch / "docs", index = scratch / "docs.index";
    Strings told{};

    Notes() {
        fs::create_directories(folder);
        const char* subjects[] = {"A warp is a group of 32 threads", "Shared memory has banks", "Bread is made of flour",
                                  "线程束由 32 个线程组成", "A sector has 32 bytes", "屋顶线给出上限"};
        for (int i = 0; i < 36; i++) {
            std::string text = format("# Note %d\n\n%s.", i, subjects[i % 6]);
            for (int k = 0; k < i; k++) text += format(" It says %d.", 7 * k + i);
            write_file(folder + format("/%02d.md", i), text);
        }
    }
    DocumentModels models(bool vectors, bool ranks) const {
        DocumentOptions o;
        if (vectors) o.embed = FOLDER;
        if (ranks) o.rerank = FOLDER;
        return open_document_models({}, o);
    }
    Documents open(const DocumentModels& models, size_t passages = 4) {
        told.clear();
        return Documents({folder, index, passages}, [this](const std::string& line) { told.push_back(line); }, models);
    }
};
} // namespace
static const char* const ASKED[] = {"What is a warp?", "线程束有多少线程？", "bread", "How many bytes has a sector of memory?", "roofline"};
static Strings names(const std::vector<Source>& sources) {
    Strings all;
    for (auto& s : sources) all.push_back(name_of(s));
    return all;
}
static Strings names(sj::Value sources) {
    Strings all;
    for (sj::Value s : sources.items())
        all.push_back(format("%s:%d, %s", s["file"].str().c_str(), (int)s["line"].number(), s["heading"].str().c_str()));
    return all;
}
static double product_of(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t k = 0; k < a.size(); k++) sum += (double)a[k] * b[k];
    return sum;
}

TEST_CASE("hybrid: the ranking by vectors is that of embed's own, and the two rankings are joined as they are defined") {
    Notes notes;
    const Documents docs = notes.open(notes.models(true, false), 9);
    const DocumentIndex index(notes.index);
    const Jieba jieba("data/datagen/jieba.bin");
    const auto named = [&](uint32_t passage) {
        const DocumentIndex::Passage& p = index.passage_at(passage);
        return format("%s:%u, %s", std::string(index.name_of(index.file_at(p.file))).c_str(), p.line, std::string(index.heading_of(p)).c_str());
    };
    const auto n = (uint32_t)index.header().passages;
    REQUIRE(n >= 36);
    const VectorFile file(vectors_path(notes.index, notes.models(true, false).vectors->hash()));
    REQUIRE(file.size() == n);
    // The vectors again, one by one, and without anything of hybrid.h.
    const Weights<bf16> weights(golden().file);
    Embedder<bf16> model(golden().file.config, weights, 1500, {});
    std::vector<std::vector<float>> vectors;
    for (uint32_t p = 0; p < n; p++) {
        const std::string text(index.text_of(index.passage_at(p)));
        const std::string shown = std::string(index.heading_of(index.passage_at(p))) + "\n" + text.substr(0, text.find_last_not_of('\n') + 1);
        vectors.push_back(embed_texts(model, golden().tokenizer, {shown})[0]);
    }
    for (const char* question : ASKED) {
        INFO(question);
        const std::vector<float> asked = embed_texts(model, golden().tokenizer, {question}, RETRIEVAL_TASK)[0];
        const std::vector<float> products = file.products(asked);
        std::vector<double> exact;
        for (uint32_t p = 0; p < n; p++) {
            exact.push_back(product_of(asked, vectors[p]));
            CHECK(std::fabs(products[p] - exact[p]) < 1. / 256); // a half of a last place of 8 bits, of length 1
        }
        // By the definition: of vectors rounded to bf16, one before another if its product is larger.
        std::vector<double> stored;
        for (uint32_t p = 0; p < n; p++) {
            std::vector<float> rounded;
            for (float x : vectors[p]) rounded.push_back(to_acc(to_bf16(x)));
            stored.push_back(product_of(asked, rounded));
        }
        const auto ranking = index.best(products, n, -INFINITY);
        REQUIRE(ranking.size() == n);
        for (uint32_t i = 1; i < n; i++) CHECK(stored[ranking[i - 1].passage] > stored[ranking[i].passage] - 1e-6);

        std::map<std::string, double> sums;
        const auto by_words = index.search(question_words(jieba, question), 1000);
        for (size_t i = 0; i < by_words.size(); i++) sums[named(by_words[i].passage)] += 1. / (61 + (double)i);
        for (size_t i = 0; i < n; i++) sums[named(ranking[i].passage)] += 1. / (61 + (double)i);
        const std::vector<Source> found = docs.find(question);
        REQUIRE(found.size() == 9);
        std::vector<double> best;
        for (auto& [name, sum] : sums) best.push_back(sum);
        std::sort(best.rbegin(), best.rend());
        for (size_t i = 0; i < 9; i++) {
            CHECK(found[i].score == doctest::Approx(best[i]).epsilon(1e-6));
            CHECK(sums[name_of(found[i])] == doctest::Approx(best[i]).epsilon(1e-6));
        }
    }
}

TEST_CASE("hybrid: opened again nothing is computed, and the answers are the same; a changed file has its own anew") {
    Notes notes;
    const DocumentModels models = notes.models(true, false);
    std::vector<Strings> first;
    {
        const Documents docs = notes.open(models);
        for (const char* question : ASKED) first.push_back(names(docs.find(question)));
    }
    CHECK(notes.told.back().find(" 0 made") == std::string::npos);
    const Documents again = notes.open(notes.models(true, false));
    CHECK(notes.told.back().find(" 0 made") != std::string::npos);
    for (size_t i = 0; i < first.size(); i++) CHECK(names(again.find(ASKED[i])) == first[i]);
    write_file(notes.folder + "/05.md", "# Note 5\n\nIt says something else.");
    notes.open(models);
    CHECK(notes.told.back().find(" 1 made") != std::string::npos);
    const DocumentIndex index(notes.index);
    const VectorFile file(vectors_path(notes.index, models.vectors->hash()));
    for (uint32_t p = 0; p < index.header().passages; p++) { // each still has its own
        std::vector<float> v;
        models.vectors->passages({shown_passage(index, p)}, [&](size_t, const std::vector<float>& x) { v = x; });
        CHECK(VectorFile::record_of(fnv1a(shown_passage(index, p)), v) ==
              std::string((const char*)file.record(p), file.stride()));
    }
}

TEST_CASE("hybrid: the reranker's order is that of its scores; a long question leaves room for the passage") {
    Notes notes;
    const DocumentModels models = notes.models(false, true);
    const Documents docs = notes.open(models, 5), words = notes.open({}, 20);
    const Weights<bf16> weights(golden().file);
    const RerankPrompt prompt(golden().tokenizer);
    const Relevance relevance({}, weights, prompt);
    const std::string question = "How many bytes has a sector of memory?";
    std::map<std::string, double> scores;
    const DocumentIndex index(notes.index);
    for (const Source& s : words.find(question)) {
        const std::vector<int> query = prompt.query_ids(golden().tokenizer, RETRIEVAL_TASK, question);
        const auto ids = prompt.ids(golden().tokenizer, query, s.heading + "\n" + s.text);
        scores[name_of(s)] = relevance(hidden_of(golden().file.config, weights, {ids})[0]);
    }
    std::vector<double> best;
    for (auto& [name, score] : scores) best.push_back(score);
    std::sort(best.rbegin(), best.rend());
    const std::vector<Source> found = docs.find(question);
    REQUIRE(found.size() == 5);
    for (size_t i = 0; i < 5; i++) {
        CHECK(found[i].score == doctest::Approx(best[i]).epsilon(1e-6));
        CHECK(scores[name_of(found[i])] == doctest::Approx(best[i]).epsilon(1e-6));
    }
    const std::string endless = "warp" + std::string(9000, '7');
    const std::vector<double> apart = models.ranks->scores(endless, {"one", "another thing"});
    CHECK(apart[0] != apart[1]); // the passages were seen
}

TEST_CASE("qwen3 --docs-embed, --docs-rerank: the sources are the library's; models that will not do") {
    Notes notes;
    Strings docs = {MODEL, "-z", VOCABULARY, "-j", "1", "-t", "0", "-n", "2", "--json", "--docs", notes.folder, "--index", notes.index};
    auto ask = [&](Strings more) {
        more.insert(more.begin(), docs.begin(), docs.end());
        return Process(program("QWEN3", "./qwen3").c_str(), more).wait();
    };
    const std::string question = ASKED[0];
    const Result plain = ask({"-i", question}), first = ask({"-i", question, "--docs-embed", FOLDER});
    INFO(first.err);
    REQUIRE(first.status == 0);
    CHECK(first.err.find(" of 48 numbers") != std::string::npos);
    CHECK(ask({"-i", question, "--docs-embed", FOLDER}).err.find(" 0 made") != std::string::npos);
    const auto source_names = [](const Result& r) { return names(Json(r.out)["sources"]); };
    CHECK(source_names(first) == names(notes.open(notes.models(true, false)).find(question)));
    CHECK(source_names(plain) == names(notes.open({}).find(question)));
    CHECK(source_names(first) != source_names(plain));
    const Result ranked = ask({"-i", question, "--docs-embed", FOLDER, "--docs-rerank", FOLDER});
    CHECK(source_names(ranked) == names(notes.open(notes.models(true, true)).find(question)));
    // A half evaluation goes on with the same models only.
    write_file(notes.scratch / "qa", "{\"instruction\": \"What is a warp?\", \"output\": \"32 threads\"}\n");
    CHECK(ask({"--eval", notes.scratch / "qa", "-o", notes.scratch / "out", "--docs-embed", FOLDER}).status == 0);
    CHECK(names(Json(read_file(notes.scratch / "out"))["sources"]) == source_names(first));

    auto refused = [&](const Strings& more, const std::string& word) {
        Result r = ask(more);
        r.err.erase(0, r.err.rfind("qwen3: ")); // what was read comes before it
        check_refusal(r, "qwen3", word);
    };
    fs::create_directories(notes.scratch / "mean/1_Pooling"), fs::create_directories(notes.scratch / "nan");
    for (const char* file : {"config.json", "modules.json", "tokenizer.bin", "model.safetensors"})
        fs::copy_file(FOLDER + "/" + file, notes.scratch / "mean/"s + file);
    write_file(notes.scratch / "mean/1_Pooling/config.json", "{\"pooling_mode_lasttoken\": false}");
    refused({"-i", "a", "--docs-embed", notes.scratch / "mean"}, "only the last token's vector");
    for (const char* file : {"config.json", "tokenizer.bin", "model.safetensors"})
        fs::copy_file(FOLDER + "/" + file, notes.scratch / "nan/"s + file);
    std::string bytes = read_file(notes.scratch / "nan/model.safetensors");
    const ModelFile file(FOLDER);
    const size_t at = (size_t)(file.tensors.at("model.norm.weight").data - file.maps[0].data);
    bytes[at] = (char)0xc0, bytes[at + 1] = 0x7f;
    write_file(notes.scratch / "nan/model.safetensors", bytes);
    refused({"-i", "a", "--docs-embed", notes.scratch / "nan"}, "not finite");
    refused({"-i", "a", "--docs-rerank", MODEL}, "not one token each"); // yes and no, in the vocabulary beside it
}

TEST_CASE("serve --docs-rerank: lookups of clients that are gone are given up, those of others wait within --max-queue") {
    Notes notes;
    const std::string body = "{\"messages\": [{\"role\": \"user\", \"content\": \"What is a warp?\"}], \"max_tokens\": 1}";
    Strings options = {"--task", "generate", "--docs", notes.folder, "--index", notes.index, "--docs-rerank", FOLDER};
    auto ask = [&](Http& http) { http.ask("POST", "/v1/chat/completions", body); };
    {
        const Serving server(program("SERVE", "./serve"), options);
        CHECK(server.post("/v1/chat/completions", body).status == 200); // (the first is slower)
        const double start = seconds();
        CHECK(server.post("/v1/chat/completions", body).status == 200);
        const double one = seconds() - start;
        const size_t many = std::clamp<size_t>((size_t)(8 / one), 8, 300);
        {
            std::vector<std::unique_ptr<Http>> users;
            for (size_t i = 0; i < many; i++) users.push_back(std::make_unique<Http>(server.port)), ask(*users.back());
            usleep(700'000); // all are there
        } // ... and go
        const double since = seconds();
        CHECK(server.post("/v1/chat/completions", body).status == 200);
        const double waited = seconds() - since;
        INFO("a lookup takes " << one << " s; after " << many << " were given up one took " << waited << " s");
        CHECK(waited < one * (double)many / 3 + 0.5); // it was about one * many
    }
    options.insert(options.end(), {"--max-queue", "1", "--max-seqs", "1"});
    const Serving server(program("SERVE", "./serve"), options);
    std::vector<std::unique_ptr<Http>> users;
    for (size_t i = 0; i < 12; i++) users.push_back(std::make_unique<Http>(server.port)), ask(*users.back());
    size_t done = 0, refused = 0;
    for (auto& user : users) {
        const HttpReply r = user->reply();
        CHECK((r.status == 200 || r.status == 429));
        (r.status == 200 ? done : refused)++;
    }
    CHECK(done >= 2);
    CHECK(refused > 0);
    CHECK(server.post("/v1/chat/completions", body).status == 200); // all places are given back
}

TEST_CASE("serve --docs-embed: chats at the same time have the library's sources") {
    Notes notes;
    const Serving server(program("SERVE", "./serve"), {"--task", "generate", "--docs", notes.folder, "--index", notes.index,
                                                      "--docs-embed", FOLDER});
    const Documents docs = notes.open(notes.models(true, false));
    CHECK(notes.told.back().find(" 0 made") != std::string::npos);
    std::vector<std::thread> users;
    std::vector<Strings> found(10);
    for (size_t i = 0; i < found.size(); i++)
        users.emplace_back([&, i] {
            const HttpReply r = server.post("/v1/chat/completions", "{\"messages\": [{\"role\": \"user\", \"content\": \""s +
                                                                        ASKED[i % 5] + "\"}], \"max_tokens\": 2}");
            if (r.status == 200) found[i] = names(Json(r.body)["sources"]);
        });
    for (auto& u : users) u.join();
    for (size_t i = 0; i < found.size(); i++) CHECK(found[i] == names(docs.find(ASKED[i % 5])));
    check_refusal(Process(program("SERVE", "./serve").c_str(), {FOLDER, "--docs-embed", FOLDER}).wait(), "serve", "--docs-embed is for --docs");
}
