// serve.cu: its parts by themselves, then the program (SERVE, else ./serve) from outside, on the random model in
// fixtures/tiny. What an answer must be is said by `generate` on a Session of its own.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define SERVE_NO_MAIN
#include "../serve.cu"
#include "http.h"
#include "process.h"

static const std::string MODEL = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";

// The tiny model, in this process.
struct Tiny {
    Tokenizer tokenizer{VOCABULARY};
    ModelFile file{MODEL};
    Weights<bf16> weights{file};
};
static const Tiny& tiny() {
    static const Tiny t;
    return t;
}

struct Random {
    uint64_t seed, counter = 0;
    uint32_t bits() { return philox(seed, counter++, 98).v[0]; }
    int below(int n) { return (int)(bits() % (uint32_t)n); }
    double uniform() { return bits() / 4294967296.; }
};

// JSON that outlives its text.
struct Json {
    std::string text;
    sj::Doc doc;
    explicit Json(std::string s) : text(std::move(s)) {
        INFO(text);
        REQUIRE(sj::parse(doc, text) == "");
    }
    Json(const Json&) = delete;
    sj::Value operator[](std::string_view key) const { return doc.root()[key]; }
};

// ---------------------------------------------------------------------------------------------------- the pages

TEST_CASE("pages are found by all that comes before them, and the longest idle goes first") {
    PagePool pool(4);
    std::vector<int> a(PAGE, 1), b(PAGE, 2);
    const int p = pool.take(), q = pool.take(), r = pool.take();
    CHECK(pool.available() == 1);
    const uint64_t after_a = pool.name(p, 1, a.data()), after_b = pool.name(q, after_a, b.data());
    CHECK(pool.find(1, a.data()) == p);
    CHECK(pool.find(2, a.data()) == -1);        // another salt
    CHECK(pool.find(1, b.data()) == -1);        // these ids, but not there
    CHECK(pool.find(after_a, b.data()) == q);
    CHECK(pool.find(after_b, b.data()) == -1);
    CHECK(pool.name(r, 1, a.data()) == after_a); // the same content: the first page stays the one
    CHECK(pool.find(1, a.data()) == p);

    pool.release(q), pool.release(p), pool.release(r);
    CHECK(pool.available() == 4);
    CHECK(pool.find(after_a, b.data()) == q);   // idle, and still of use
    const int first = pool.take(), second = pool.take();
    CHECK((first == r || first == 3));          // those without a name
    CHECK((second == r || second == 3));
    pool.use(p);
    CHECK(pool.available() == 1);
    CHECK(pool.take() == q);
    CHECK(pool.find(after_a, b.data()) == -1);
    CHECK(pool.find(1, a.data()) == p);
    pool.use(p);
    pool.release(p);
    CHECK(pool.available() == 0);               // two used it
    pool.release(p);
    CHECK(pool.take() == p);
    CHECK(pool.find(1, a.data()) == -1);
}

TEST_CASE("a page that is known by name never is another's: random use") {
    Random random{3};
    PagePool pool(8);
    std::vector<int> held;
    std::map<std::pair<uint64_t, int>, uint64_t> names; // what every name stands for: it never changes
    for (int round = 0; round < 3000; round++) {
        if (random.below(2) && pool.available()) {
            const int p = pool.take();
            CHECK(pool.pages[p].users == 1);
            held.push_back(p);
            if (random.below(2)) {
                std::vector<int> ids(PAGE, random.below(5));
                uint64_t before = 1 + (uint64_t)random.below(2);
                if (!names.empty() && random.below(2)) before = std::next(names.begin(), random.below((int)names.size()))->second;
                const bool there = pool.find(before, ids.data()) >= 0;
                const uint64_t name = pool.name(p, before, ids.data());
                if (there) CHECK(names.at({before, ids[0]}) == name);
                else for (auto& [key, old] : names) REQUIRE(old != name);
                names[{before, ids[0]}] = name;
            }
        } else if (!held.empty()) {
            std::swap(held[(size_t)random.below((int)held.size())], held.back());
            pool.release(held.back());
            held.pop_back();
        }
        CHECK(pool.available() == 8 - held.size());
        for (auto& [key, name] : names) {
            const int p = pool.find(key.first, std::vector<int>(PAGE, key.second).data());
            if (p >= 0) CHECK(pool.pages[p].ids[0] == key.second);
        }
    }
}

// ------------------------------------------------------------------------------------------------------- speech

struct Spoken {
    std::string text, thought, tokens;
    size_t pieces = 0, informed = 0;
    bool stopped = false;
};
static Spoken speak(const std::vector<int>& ids, const std::vector<std::string>& stops, bool thinking = false, int alternatives = 0) {
    Job job;
    job.stops = stops, job.thinking = thinking, job.alternatives = alternatives;
    Speech speech(tiny().tokenizer, job);
    Spoken all;
    auto note = [&](const Piece& p) {
        (p.thought ? all.thought : all.text) += p.text;
        for (auto& t : p.tokens) all.tokens += t.text, all.informed++;
        all.pieces += !p.text.empty();
        CHECK(all.text.substr(0, all.tokens.size()) == all.tokens); // a token is told when its text is there, at the latest
    };
    for (int id : ids) {
        Piece piece;
        speech.feed(piece, {id, 0, "", {}});
        note(piece);
        all.stopped = speech.filter.stopped;
        if (all.stopped) break;
    }
    Piece piece;
    speech.finish(piece);
    note(piece);
    return all;
}

TEST_CASE("speech: tokens of random bytes, whole characters, nothing lost") {
    Random random{4};
    const Tokenizer& t = tiny().tokenizer;
    for (int round = 0; round < 500; round++) {
        std::vector<int> ids;
        for (int n = random.below(30); n > 0; n--) ids.push_back(random.below(t.size()));
        const Spoken all = speak(ids, {});
        CHECK(all.text == t.decode(ids, true));
        CHECK(all.tokens == all.text);
        CHECK(all.informed == ids.size());
    }
}

TEST_CASE("speech: a stop string at every place of a text") {
    const Tokenizer& t = tiny().tokenizer;
    const std::string text = "线程束 warps 共享 memory，块与网格。ababab";
    const std::vector<int> ids = t.encode(text, false);
    for (size_t begin = 0; begin < text.size(); begin++)
        for (size_t length : {1, 2, 3, 5, 9, 20}) {
            const std::string stop = text.substr(begin, length);
            const Spoken all = speak(ids, {stop});
            INFO("stop " << stop);
            CHECK(all.stopped);
            CHECK(all.text == text.substr(0, text.find(stop)));
            CHECK(all.tokens == all.text);
        }
    const Spoken none = speak(ids, {text + "x", "ababababab"});
    CHECK(!none.stopped);
    CHECK(none.text == text);
    CHECK(none.tokens == text);
}

TEST_CASE("speech: thoughts") {
    const Tokenizer& t = tiny().tokenizer;
    auto ids = [&](const std::string& text) { return t.encode(text, true); };
    REQUIRE(t.id("<think>") >= 0);
    auto check = [&](const std::string& said, const std::string& thought, const std::string& text, bool thinking = true) {
        INFO(said);
        const Spoken all = speak(ids(said), {}, thinking);
        CHECK(all.thought == thought);
        CHECK(all.text == text);
        CHECK(all.tokens == text);
    };
    check("<think>\nLet me\n\nsee.\n</think>\n\nYes.\n", "Let me\n\nsee.", "Yes.\n");
    check("<think>\n\n</think>\n\nYes.", "", "Yes.");
    check("<think></think>Yes.", "", "Yes.");
    check("<think>\nhalf a thought\n", "half a thought", "");
    check("No thought.\n", "", "No thought.\n");
    check("a <think>b</think>", "", "a <think>b</think>");  // not at the beginning: text
    check("<think>a</think>b</think>", "a", "b</think>");
    check("<think>\na\n</think>\n\nb", "", "<think>\na\n</think>\n\nb", false);

    std::vector<int> fake = t.encode("<think>", false); // that the model spells it does not make it a marker
    const Spoken all = speak(fake, {}, true);
    CHECK(all.text == "<think>");
    CHECK(all.thought == "");
    CHECK(speak(ids("<think>one STOP two</think>three"), {"STOP"}, true).thought == "one ");
    CHECK(speak(ids("<think>one</think>two STOP three"), {"STOP"}, true).text == "two ");
}

TEST_CASE("log-probabilities by hand") {
    const float logits[] = {0, std::log(2.f), -INFINITY, std::log(5.f), 100};
    const TokenInfo info = describe(logits, 4, 1, 3); // the last does not exist
    CHECK(info.logprob == doctest::Approx(std::log(2. / 8)));
    REQUIRE(info.top.size() == 3);
    CHECK(info.top[0].id == 3);
    CHECK(info.top[0].logprob == doctest::Approx(std::log(5. / 8)));
    CHECK(info.top[1].id == 1);
    CHECK(info.top[2].id == 0);
    CHECK(describe(logits, 4, 2, 0).logprob == -9999);
    CHECK(describe(logits, 4, 0, 9).top.size() == 4);
}

// ------------------------------------------------------------------------------------------------------- engine

// A job of random kind, and what must come of it.
static Job random_job(Random& random, int context) {
    const Tokenizer& t = tiny().tokenizer;
    Job job;
    job.reply = std::make_shared<Reply>();
    job.reply->left = 1;
    const int shared = random.below(3) * 20; // prompts begin alike
    for (int i = 0; i < shared; i++) job.prompt.push_back(i % 300);
    for (int n = 1 + random.below(60); n > 0; n--) job.prompt.push_back(random.below(300));
    job.max_tokens = 1 + (size_t)random.below(std::min(150, context - (int)job.prompt.size()));
    job.how.seed = random.bits();
    job.how.temperature = random.below(4) ? 1.5f : 0;
    if (random.below(2)) job.how.top_k = 0, job.how.top_p = 0.95f;
    if (random.below(3) == 0) job.how.repeat = 1.3f, job.how.presence = 0.5f, job.how.frequency = 0.25f;
    job.ignore_eos = random.below(4);
    if (random.below(4) == 0) job.stops = {std::string(t.bytes(random.below(300)))};
    if (random.below(4) == 0) job.alternatives = random.below(3);
    return job;
}

static Generation expected(const Job& job, int context) {
    Session<bf16> session(tiny().file.config, tiny().weights, context);
    Config c = tiny().file.config;
    session.feed(job.prompt);
    Generation g;
    g.sampling = job.how, g.max_tokens = job.max_tokens, g.stops = job.stops;
    if (!job.ignore_eos) {
        generate(session, &tiny().tokenizer, g, [](std::string_view) {});
        return g;
    }
    Config endless = c; // a session that knows no end tokens
    endless.end_tokens.clear();
    Session<bf16> other(endless, tiny().weights, context);
    other.feed(job.prompt);
    generate(other, &tiny().tokenizer, g, [](std::string_view) {});
    return g;
}

struct Bench { // an engine whose steps we take
    Desk desk;
    Engine<bf16> engine;
    explicit Bench(EngineOptions o) : engine(tiny().file.config, tiny().weights, tiny().tokenizer, desk, o, {}) { desk.limit = 1000; }
    static size_t page_bytes() { return KVCache<bf16>::bytes(tiny().file.config, 1); }
};

static void check_answer(const Job& job, const Generation& want) {
    std::lock_guard lock(job.reply->mutex);
    std::string text, tokens;
    size_t count = 0;
    const char* finish = nullptr;
    for (auto& p : job.reply->pieces) {
        CHECK(!finish);
        text += p.text, count = p.count, finish = p.finish;
        for (auto& t : p.tokens) tokens += t.text;
    }
    CHECK(text == want.text);
    CHECK(count == want.ids.size());
    REQUIRE(finish);
    CHECK(std::string(finish) == want.finish);
    if (job.alternatives >= 0) CHECK(tokens == text);
}

TEST_CASE("an answer does not depend on what runs beside it, on chunks, pages or preemptions") {
    Random random{7};
    uint64_t preempted = 0, found = 0;
    for (auto [max_seqs, chunk, pages] : {std::tuple{1, 16, 16}, {4, 7, 60}, {8, 64, 24}, {8, 5, 17}, {16, 200, 400}, {16, 33, 20}}) {
        INFO("at most " << max_seqs << ", chunks of " << chunk << ", " << pages << " pages");
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        std::vector<Job> jobs;
        for (int i = 0; i < 24; i++) jobs.push_back(random_job(random, 256));
        size_t next = 0;
        for (int step = 0; step < 20000; step++) {
            if (next < jobs.size() && random.below(3)) {
                std::vector<Job> one = {jobs[next++]};
                REQUIRE(bench.desk.submit(std::move(one)));
            }
            bench.engine.step();
            if (next == jobs.size() && bench.desk.inside == 0) break;
        }
        CHECK(bench.desk.inside == 0);
        CHECK(bench.desk.figures.pages_used == 0);
        preempted += bench.desk.figures.preempted, found += bench.desk.figures.found;
        for (const Job& job : jobs) check_answer(job, expected(job, 256));
    }
    CHECK(preempted > 10);
    CHECK(found > 100);
}

TEST_CASE("logit_bias and the log-probabilities of a known model") {
    Bench bench({256, 4, 64, 64, 0});
    Job job;
    job.reply = std::make_shared<Reply>();
    job.reply->left = 1;
    job.prompt = {1, 2, 3};
    job.max_tokens = 5, job.how.temperature = 0, job.ignore_eos = true;
    job.bias = {{77, 100.f}};
    job.alternatives = 2;
    REQUIRE(bench.desk.submit({job}));
    while (job.reply->left) bench.engine.step();
    std::vector<TokenInfo> tokens;
    for (auto& p : job.reply->pieces) tokens.insert(tokens.end(), p.tokens.begin(), p.tokens.end());
    REQUIRE(tokens.size() == 5);
    CHECK(tokens[0].top[0].id != 77);
    Session<bf16> session(tiny().file.config, tiny().weights, 64);
    session.feed(job.prompt);
    for (auto& t : tokens) { // the model's own opinion, before the bias
        CHECK(t.id == 77);
        CHECK(t.logprob == describe(session.logits, tiny().tokenizer.size(), 77, 0).logprob);
        CHECK(t.top[0].logprob >= t.logprob);
        session.feed({77});
    }
}

TEST_CASE("the prefix cache: computed once, but not across salts") {
    Bench bench({512, 4, 64, 64, 0});
    std::vector<int> prompt;
    for (int i = 0; i < 100; i++) prompt.push_back(i);
    auto ask = [&](uint64_t salt) {
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        job.prompt = prompt, job.max_tokens = 3, job.salt = salt;
        bench.desk.submit({job});
        while (job.reply->left) bench.engine.step();
        return job.reply->pieces.back().cached;
    };
    CHECK(ask(1) == 0);
    CHECK(ask(1) == 96);
    CHECK(ask(2) == 0);
    CHECK(ask(2) == 96);
    prompt.resize(96);
    CHECK(ask(1) == 80); // the last token's logits are wanted: its page is computed again
    prompt[0] = 5;
    CHECK(ask(1) == 0);
}

TEST_CASE("a cancelled answer gives its pages back within a step") {
    Bench bench({256, 2, 64, 64, 0});
    Random random{9};
    std::vector<Job> jobs;
    for (int i = 0; i < 3; i++) {
        jobs.push_back(random_job(random, 256));
        jobs.back().max_tokens = 100, jobs.back().ignore_eos = true, jobs.back().stops.clear();
        bench.desk.submit({jobs.back()});
    }
    for (int i = 0; i < 4; i++) bench.engine.step();
    CHECK(bench.desk.figures.running == 2);
    CHECK(bench.desk.figures.waiting == 1);
    CHECK(bench.desk.figures.pages_used > 0);
    for (auto& job : jobs) job.reply->cancelled = true;
    bench.engine.step();
    CHECK(bench.desk.figures.pages_used == 0);
    CHECK(bench.desk.inside == 0);
    CHECK(bench.desk.figures.cancelled == 3);
}

TEST_CASE("the desk is bounded") {
    Bench bench({256, 2, 64, 64, 0});
    bench.desk.limit = 3;
    Random random{9};
    std::vector<Job> jobs;
    for (int i = 0; i < 4; i++) jobs.push_back(random_job(random, 256));
    CHECK(!bench.desk.submit(std::vector<Job>(jobs)));
    jobs.pop_back();
    CHECK(bench.desk.submit(std::vector<Job>(jobs)));
    CHECK(!bench.desk.submit({jobs[0]}));
    bench.engine.step();
    CHECK(!bench.desk.submit({jobs[0]}));
    while (bench.desk.inside) bench.engine.step();
    CHECK(bench.desk.submit({jobs[0]}));
}
