// serve.cu: its parts by themselves, then the program (SERVE, else ./serve) from outside, on the random model in
// fixtures/tiny. What an answer must be is said by `generate` on a Session of its own.
#include "base/file.h"
#include "model/chat_template.h"
#include "qwen3.cu"
#include "server/api/answer.h"
#include "server/api/limits.h"
#include "server/api/refusal.h"
#include "server/api/request.h"
#include "server/api/service.h"
#include "server/api/tokenizer_info.h"
#include "server/engine/budget.h"
#include "server/engine/disk_pages.h"
#include "server/engine/pace.h"
#include "server/engine/pages.h"
#include "server/engine/router.h"
#include "server/engines.h"
#include "server/http/log.h"
#include "server/http/server.h"
#include "server/run.h"
#include "search/documents.h"
#include "sj.h"
#include "tests/engine.h"
#include "tests/http.h"
#include "tests/process.h"
#include "tests/starters.h"
#include "tests/workload.h"
#include <algorithm>
#include <cmath>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <sys/resource.h>
#include <termios.h>
#include <thread>
#include <vector>

static std::string question(const std::string& text, const std::string& more) {
    std::string body = "{\"messages\": [{\"role\": \"user\", \"content\": ";
    sj::quote(body, text);
    return body + "}]" + (more.empty() ? "" : ", " + more) + "}";
}

static std::string many(size_t n, const std::string& one) { // one, one, ...
    std::string all;
    for (size_t i = 0; i < n; i++) all += (i ? ", " : "") + one;
    return all;
}
static int longest_token() {
    int best = 0;
    for (int id = 0; id < tiny().tokenizer.size(); id++)
        if (tiny().tokenizer.bytes(id).size() > tiny().tokenizer.bytes(best).size()) best = id;
    return best;
}

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
    // Stop strings look at the answer only.
    for (const std::string thought : {"one STOP two", "STOP", "one ST", "one STO\nP"}) {
        const Spoken some = speak(ids("<think>" + thought + "</think>\n\nOP two STOP three"), {"STOP"}, true);
        CHECK(some.thought == thought);
        CHECK(some.text == "OP two ");
        CHECK(some.tokens == "OP two ");
        CHECK(some.stopped);
        CHECK(speak(ids("<think>" + thought), {"STOP"}, true).thought == thought); // cut off
    }
}

TEST_CASE("log-probabilities by hand") {
    const float logits[] = {0, std::log(2.f), -INFINITY, std::log(5.f), 100};
    Likeliest row;
    likeliest(row, logits, 4, 3); // the last does not exist
    const TokenInfo info = describe(row, 1, logits[1]);
    CHECK(info.logprob == doctest::Approx(std::log(2. / 8)));
    REQUIRE(info.top.size() == 3);
    CHECK(info.top[0].id == 3);
    CHECK(info.top[0].logprob == doctest::Approx(std::log(5. / 8)));
    CHECK(info.top[1].id == 1);
    CHECK(info.top[2].id == 0);
    CHECK(describe(row, 2, logits[2]).logprob == -9999);
    likeliest(row, logits, 4, 9);
    CHECK(describe(row, 0, logits[0]).top.size() == 4);
}

// ------------------------------------------------------------------------------------------------------- engine

TEST_CASE("an answer does not depend on what runs beside it, on chunks, pages or preemptions") {
    Random random{7};
    uint64_t preempted = 0, found = 0;
    for (auto [max_seqs, chunk, pages] : {std::tuple{1, 16, 16}, {4, 7, 60}, {8, 64, 24}, {8, 5, 17}, {16, 200, 400}, {16, 33, 20}}) {
        const std::string kind = format("at most %d, chunks of %d, %d pages", max_seqs, chunk, pages);
        INFO(kind);
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        std::vector<Job> jobs;
        for (int i = 0; i < 18; i++) jobs.push_back(random_job(random, 256));
        run_all(bench, random, jobs);
        preempted += bench.desk.figures->preempted, found += bench.desk.figures->found;
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
    Session<bf16> session(tiny().file.config, tiny().weights, 64, where);
    session.feed(job.prompt);
    for (auto& t : tokens) { // the model's own opinion, before the bias
        CHECK(t.id == 77);
        CHECK(t.logprob == told_of(session.logits, 77, 0).logprob);
        CHECK(t.top[0].logprob >= t.logprob);
        session.feed({77});
    }
}

TEST_CASE("prompts beside running answers: as many tokens as keep the step short, whatever the machine") {
    struct Machine { double alone, fixed, each; }; // seconds: a step of single tokens, any prompt in it, a token of it
    for (Machine m : {Machine{2e-3, 1e-4, 1e-5}, {2e-3, 1e-3, 5e-6}, {0.1, 0, 4e-3}, {1e-2, 1e-2, 1e-3}, {1e-3, 0, 1e-9}}) {
        PromptPace pace;
        size_t prompts = 0, without = 0;
        std::vector<double> times;
        auto step = [&](int i) {
            const size_t n = pace.tokens(8, 512);
            const double noise = i % 10 == 9 ? 1.5 : 1; // (something else runs, too)
            const double took = (m.alone + (n ? m.fixed + m.each * (double)n : 0)) * noise;
            pace.learn(4, n, took);
            prompts += n, without += n == 0;
            CHECK((n == 0 || (n >= 8 && n <= 512)));
            if (noise == 1) times.push_back(took);
        };
        step(0);
        CHECK(without == 1); // first it learns what a step takes without
        for (int i = 1; i < 1000; i++) step(i);
        CHECK(without > 20);
        CHECK(without < 50);
        std::sort(times.begin(), times.end());
        const double least = m.alone + m.fixed + 8 * m.each, most = m.alone + m.fixed + 512 * m.each;
        INFO(m.alone << ' ' << m.fixed << ' ' << m.each);
        CHECK(times[times.size() * 98 / 100] < std::max(1.9 * m.alone, 1.001 * least));
        CHECK(times[times.size() / 2] > std::min({1.3 * m.alone, 0.999 * most}));
        m.alone *= 3; // more answers run now: more fits beside them
        const size_t before = prompts;
        for (int i = 0; i < 1000; i++) step(i);
        CHECK(prompts - before >= before * 4 / 5); // (less until it is known)
        CHECK(times.back() < std::max(1.9 * m.alone, 1.001 * (m.alone + m.fixed + 8 * m.each)));
    }
    // Prompts without waiting clients bound the time of their tokens from above; a slow first step is soon forgotten.
    PromptPace pace;
    pace.learn(0, 100, 0.1);
    pace.learn(1, 0, 1.);
    pace.learn(1, 0, 0.01);
    CHECK(pace.alone <= 0.02);
    CHECK(pace.tokens(1, 512) >= 7);
    CHECK(pace.tokens(1, 512) <= 14);
    CHECK(pace.tokens(20, 10) == 10);

    // In an engine: a long prompt goes on while others answer, in the end all is said, and a fixed chunk is kept to; a
    // batch's answers wait for it.
    for (int kind = 0; kind < 4; kind++) {
        const bool paced = kind & 1, bulk = kind & 2;
        INFO("paced: " << paced << ", bulk: " << bulk);
        EngineOptions o = {1024, 4, paced ? 8 : 100, 512, 0};
        o.paced = paced;
        Bench bench(o);
        Random random{77};
        Job running, guest;
        for (Job* job : {&running, &guest}) job->reply = std::make_shared<Reply>(), job->reply->left = 1;
        running.prompt = {1, 2, 3}, running.max_tokens = 800, running.ignore_eos = true, running.bulk = bulk;
        guest.max_tokens = 5, guest.ignore_eos = true;
        for (int i = 0; i < 400; i++) guest.prompt.push_back(random.below(300));
        REQUIRE(bench.desk.submit({running}));
        bench.engine.step();
        REQUIRE(bench.desk.submit({guest}));
        int steps = 0;
        for (; guest.reply->pieces.empty() && steps < 1000; steps++) bench.engine.step();
        if (bulk) CHECK(steps == 1);
        else if (paced) CHECK((steps >= 2 && steps <= 400 / 8 + 4)); // (one of them takes none)
        else CHECK(steps == 4);
        run_all(bench, random, {});
        check_answer(running, expected(running, 1024));
        check_answer(guest, expected(guest, 1024));
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
    CHECK(bench.desk.figures->running == 2);
    CHECK(bench.desk.figures->waiting == 1);
    CHECK(bench.desk.figures->pages_used > 0);
    for (auto& job : jobs) job.reply->cancelled = true;
    bench.engine.step();
    CHECK(bench.desk.figures->pages_used == 0);
    CHECK(bench.desk.inside == 0);
    CHECK(bench.desk.figures->cancelled == 3);
}

TEST_CASE("several engines: a prompt goes where its beginning is cached, unless that engine is far behind; else to the least loaded") {
    Desk desk;
    Window second, third;
    desk.windows = {&desk, &second, &third};
    desk.limit = 1000;
    auto job = [](int start, int n, uint64_t salt = 1) {
        Job j;
        j.reply = std::make_shared<Reply>();
        for (int i = 0; i < n; i++) j.prompt.push_back(start + i);
        j.max_tokens = 100, j.salt = salt;
        return j;
    };
    auto sent = [&](Job j) { // to which engine
        size_t had[3];
        for (int k = 0; k < 3; k++) had[k] = desk.windows[(size_t)k]->inbox.size();
        REQUIRE(desk.submit({std::move(j)}));
        for (int k = 0; k < 3; k++)
            if (desk.windows[(size_t)k]->inbox.size() > had[k]) return k;
        return -1;
    };
    CHECK(sent(job(0, 100)) == 0);
    CHECK(sent(job(1000, 400)) == 1);
    CHECK(sent(job(2000, 300)) == 2);
    CHECK(sent(job(1000, 450)) == 1); // though it has the most to do
    CHECK(sent(job(1000, 450, 2)) == 0); // another key's pages are not shared
    Job half = job(1000, 200); // a common beginning that is not half of it
    for (int i = 0; i < 300; i++) half.prompt.push_back(5000 + i);
    CHECK(sent(half) == 2);
    for (int i = 0; i < 40; i++) sent(job(1000, 400));
    CHECK(*second.load <= *third.load + Router::AHEAD + 500);
    CHECK(desk.inbox.size() + third.inbox.size() > 8); // the others were not left without work
    // Finished or dropped jobs are no load; an engine that has failed gets none.
    CHECK(*second.load > 0);
    second.inbox.clear();
    CHECK(*second.load == 0);
    second.gone = true;
    for (int i = 0; i < 10; i++) CHECK(sent(job(1000, 400)) != 1);
    desk.limit = desk.inbox.size() + third.inbox.size();
    CHECK(!desk.submit({job(0, 10)})); // the limit is of all together
    desk.limit++;
    CHECK(desk.submit({job(0, 10)}));
}

TEST_CASE("several engines: the answers of one; when an engine fails the others finish what it had, word for word") {
    std::vector<Generation> want;
    for (int fails_after : {-1, 0, 3, 12}) {
        INFO("fails after step " << fails_after);
        Random random{21};
        Desk desk;
        desk.limit = 1000;
        Window other, last;
        const EngineOptions o{256, 4, 32, 32, 40 * Bench::page_bytes()};
        Engine<bf16> zero(tiny().file.config, tiny().weights, tiny().tokenizer, desk, o, where);
        Engine<bf16> one(tiny().file.config, tiny().weights, tiny().tokenizer, desk, o, where, &other), two(tiny().file.config, tiny().weights, tiny().tokenizer, desk, o, where, &last);
        desk.windows.push_back(&other), desk.windows.push_back(&last);
        std::vector<Job> jobs;
        for (int i = 0; i < 24; i++) jobs.push_back(random_job(random, 256));
        for (const Job& job : jobs) REQUIRE(desk.submit({job}));
        CHECK(desk.inbox.size() > 4);
        CHECK(other.inbox.size() > 4);
        for (int step = 0; step < 20000 && !desk.empty(); step++) {
            if (step == fails_after) {
                const size_t unfinished = desk.answers();
                CHECK(zero.hand_over());
                CHECK(desk.answers() == unfinished);
                CHECK(other.handed.size() + other.inbox.size() > 0);
                CHECK(one.hand_over()); // also those that it was handed and has not taken
                CHECK(desk.answers() == unfinished);
            }
            if (fails_after < 0 || step < fails_after) zero.step(), one.step();
            two.step();
        }
        for (size_t i = 0; i < jobs.size(); i++) {
            if (want.size() == i) want.push_back(expected(jobs[i], 256));
            check_answer(jobs[i], want[i]);
        }
        CHECK(*desk.load == 0);
        CHECK(*other.load == 0);
        CHECK(desk.look().stopped + desk.look().cut == 24);
        CHECK(desk.look_at_each()[2].stopped + desk.look_at_each()[2].cut >= (fails_after < 0 ? 5 : 12));
        CHECK(desk.look().pages_used == 0);
        for (auto& [line, held] : desk.held) CHECK(held.jobs == 0);
        if (fails_after >= 0) CHECK(!two.hand_over()); // there is no other now
    }
}

namespace {
enum Fault { NONE, BEFORE_COMPUTE, AFTER_COMPUTE, AT_COLLECT };
struct Failing : Engine<bf16> { // fails in its step `at`
    Fault fault = NONE;
    int at = 0, steps = 0;
    using Engine<bf16>::Engine;
    void fail(Fault here) const {
        if (fault != here || steps <= at) return;
        usleep(50'000); // the other engines go on
        throw Error("CUDA: unspecified launch failure");
    }
    void compute(Step& s) override {
        steps++;
        fail(BEFORE_COMPUTE);
        Engine<bf16>::compute(s);
        fail(AFTER_COMPUTE);
    }
    void collect(Step& s) override {
        fail(AT_COLLECT);
        Engine<bf16>::collect(s);
    }
};

// A failing engine and `others` that do not, with their threads.
struct SeveralEngines {
    server::Options options;
    Desk desk;
    std::unique_ptr<Failing> zero;
    std::unique_ptr<Engines<bf16>> engines;
    SeveralEngines(int others, Fault fault, int at) {
        options.device = "cpu", options.threads = 1, options.gpus = 1 + others;
        options.engine = {256, 4, 32, 32, 40 * Bench::page_bytes()};
        desk.limit = 1000;
        zero = std::make_unique<Failing>(tiny().file.config, tiny().weights, tiny().tokenizer, desk, options.engine, where);
        zero->fault = fault, zero->at = at;
        engines = std::make_unique<Engines<bf16>>(options, tiny().file, nullptr, *zero);
    }
    void start() { engines->start(options); }
};

std::string stderr_of(const std::function<void()>& f) {
    MemoryFile err;
    err.append_only();
    fflush(stderr);
    const int was = dup(2);
    dup2(err.fd, 2);
    f();
    fflush(stderr);
    dup2(was, 2), close(was);
    return err.text();
}
} // namespace

TEST_CASE("several engines: one fails at any place of a step; only the log says so") {
    const std::string line = "serve: engine 0: CUDA: unspecified launch failure; the other engines finish its answers\n";
    std::vector<Generation> want;
    for (const Fault fault : {BEFORE_COMPUTE, AFTER_COMPUTE, AT_COLLECT})
        for (int at : fault == AT_COLLECT ? std::vector<int>{0, 9} : std::vector<int>{9}) {
            INFO("place " << (int)fault << ", step " << at);
            Random random{5};
            SeveralEngines e(2, fault, at);
            std::vector<Job> jobs;
            for (int i = 0; i < 15; i++) {
                jobs.push_back(random_job(random, 256));
                jobs.back().every = i % 2;
                if (i % 3 == 0) jobs.back().prompt_alternatives = 1;
            }
            CHECK(stderr_of([&] {
                for (const Job& job : jobs) REQUIRE(e.desk.submit({job}));
                e.start();
                auto waits = [&] { // read as a client reads, while engines run
                    return std::count_if(jobs.begin(), jobs.end(), [](const Job& job) {
                        std::lock_guard lock(job.reply->mutex);
                        return job.reply->left > 0;
                    });
                };
                for (const double end = seconds() + 30; waits() && seconds() < end;) usleep(2000);
                CHECK(waits() == 0);
                {
                    std::lock_guard lock(e.desk.mutex);
                    CHECK(e.desk.empty());
                    CHECK(e.desk.answers() == 0);
                }
                e.engines.reset();
            }) == line);
            for (size_t i = 0; i < jobs.size(); i++) {
                if (want.size() == i) want.push_back(expected(jobs[i], 256));
                check_answer(jobs[i], want[i]);
                size_t told = 0; // of the prompt, once
                for (auto& p : jobs[i].reply->pieces) told += p.prompt.size();
                CHECK(told == (jobs[i].prompt_alternatives >= 0 ? jobs[i].prompt.size() : 0));
            }
            CHECK(*e.desk.load == 0);
            for (auto& [line, held] : e.desk.held) CHECK(held.jobs == 0);
        }
}

TEST_CASE("several engines: one that fails during the shutdown finds the others still there") {
    SeveralEngines e(1, AT_COLLECT, 5);
    Random random{3};
    Job job = random_job(random, 256);
    job.max_tokens = 60, job.ignore_eos = true, job.stops.clear(), job.how.temperature = 1.5f;
    const std::string told = stderr_of([&] {
        REQUIRE(e.desk.submit({job}));
        CHECK(e.desk.inbox.size() == 1); // that of the engine that fails
        e.desk.close();
        e.start();
        e.engines.reset();
    });
    CHECK(told.find("the other engines finish its answers\n") != std::string::npos); // it did fail
    check_answer(job, expected(job, 256));
}

TEST_CASE("HTTP: clients see nothing of an engine that fails if there is another; else they get an error, and the server ends") {
    auto body = [](int i, const char* more) {
        return question(std::to_string(i), format("\"seed\": %d, \"max_tokens\": 40, \"temperature\": 1.5%s", i, more));
    };
    ServerOptions options;
    options.port = 0, options.log = open("/dev/null", O_WRONLY | O_CLOEXEC);
    auto answers_with = [&](int others, Fault fault, const std::function<void(Server&)>& f) {
        return stderr_of([&] {
            SeveralEngines e(others, fault, 12);
            Server server(options, e.desk);
            server.service = {&tiny().tokenizer, "tiny", "", 256, false};
            server.start();
            server.ready = true;
            f(server);
            e.start();
            for (const double end = seconds() + 30; server.answering && seconds() < end; usleep(2000)) server.watch();
            CHECK(server.answering == 0);
            e.engines.reset();
        });
    };
    auto texts_of = [&](int others, Fault fault, std::string& told) {
        std::vector<std::unique_ptr<Http>> clients;
        Strings texts;
        told = answers_with(others, fault, [&](Server& server) {
            for (int i = 0; i < 8; i++) {
                clients.push_back(std::make_unique<Http>(server.port()));
                clients.back()->ask("POST", "/v1/chat/completions", body(i, i % 2 ? ", \"stream\": true" : ""));
            }
            while (server.answering < clients.size()) usleep(1000); // all are in before the engines begin
        });
        for (size_t i = 0; i < clients.size(); i++) {
            const HttpReply r = clients[i]->reply();
            CHECK(r.status == 200);
            std::string text;
            if (i % 2 == 0) text = Json(r.body)["choices"][0]["message"]["content"].str();
            else for (auto& event : events_of(r.body))
                if (event != "[DONE]") text += Json(event)["choices"][0]["delta"]["content"].str();
            texts.push_back(text);
        }
        return texts;
    };
    std::string told;
    const Strings want = texts_of(0, NONE, told);
    CHECK(told == "");
    CHECK(std::count(want.begin(), want.end(), "") == 0);
    CHECK(texts_of(1, AT_COLLECT, told) == want);
    CHECK(lines(told).size() == 1);
    // No other engine.
    std::unique_ptr<Http> waits, streams;
    told = answers_with(0, AT_COLLECT, [&](Server& server) {
        waits = std::make_unique<Http>(server.port()), streams = std::make_unique<Http>(server.port());
        waits->ask("POST", "/v1/chat/completions", body(1, ""));
        streams->ask("POST", "/v1/chat/completions", body(2, ", \"stream\": true"));
        while (server.answering < 2) usleep(1000);
    });
    CHECK(told == "serve: CUDA: unspecified launch failure\n");
    const HttpReply r = waits->reply();
    CHECK(r.status == 503);
    CHECK(r.body.find("the engine has failed") != std::string::npos);
    CHECK(streams->head().status == 200);
    std::string begun;
    CHECK_THROWS_AS(while (streams->chunk(begun)) {}, Error);
    CHECK(events_of(begun).size() > 5);
    close(options.log);
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

// Steps until all are done; returns the jobs, by their place in `jobs`, in the order in which their first pieces came.
static std::vector<size_t> order_of(Bench& bench, const std::vector<Job>& jobs) {
    std::vector<size_t> order;
    for (auto& job : jobs) REQUIRE(bench.desk.submit({job}));
    for (int step = 0; step < 20000 && (step == 0 || bench.desk.inside); step++) {
        bench.engine.step();
        for (size_t i = 0; i < jobs.size(); i++)
            if (!jobs[i].reply->pieces.empty() && !std::count(order.begin(), order.end(), i)) order.push_back(i);
    }
    CHECK(order.size() == jobs.size());
    return order;
}
static Job job_of(uint64_t key, size_t prompt, size_t tokens) {
    Job job;
    job.reply = std::make_shared<Reply>();
    job.reply->left = 1;
    job.salt = key, job.max_tokens = tokens, job.ignore_eos = true, job.every = true;
    for (size_t i = 0; i < prompt; i++) job.prompt.push_back((int)(i + 7 * key) % 300);
    return job;
}

TEST_CASE("keys take turns: whoever asks for much waits behind whoever asks for little") {
    for (int max_seqs : {1, 2, 5}) {
        Bench bench({256, max_seqs, 64, 64, 0});
        std::vector<Job> jobs;
        for (int i = 0; i < 100; i++) jobs.push_back(job_of(1, 20, 5));
        jobs.push_back(job_of(2, 20, 5)), jobs.push_back(job_of(3, 20, 5)), jobs.push_back(job_of(2, 20, 5));
        const std::vector<size_t> order = order_of(bench, jobs);
        auto place = [&](size_t job) { return std::find(order.begin(), order.end(), job) - order.begin(); };
        INFO("at most " << max_seqs);
        CHECK(place(100) <= 2 * max_seqs);
        CHECK(place(101) <= 2 * max_seqs + 1);
        CHECK(place(102) > place(101)); // the third key's first before the second key's second
        CHECK(place(102) <= 4 * max_seqs);
        std::vector<size_t> first; // in a line nothing changes
        for (size_t i : order) if (i < 100) first.push_back(i);
        CHECK(std::is_sorted(first.begin(), first.end()));
    }
}

TEST_CASE("under one key answers are begun in the order of the requests") {
    Bench bench({256, 3, 64, 64, 0});
    std::vector<Job> jobs;
    for (int i = 0; i < 60; i++) jobs.push_back(job_of(1, 5 + (size_t)i * 37 % 50, 1 + (size_t)i * 11 % 30));
    const std::vector<size_t> order = order_of(bench, jobs);
    CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("what has given way comes back before anyone else, whatever the keys") {
    Bench bench({256, 4, 64, 64, 20 * Bench::page_bytes()}); // 320 tokens: two answers of 158 at most
    std::vector<Job> jobs;
    for (int i = 0; i < 10; i++) jobs.push_back(job_of(1, 8, 150));
    jobs.push_back(job_of(2, 8, 150)), jobs.push_back(job_of(3, 8, 150));
    size_t begun = 0; // most at once that have a piece and are not done
    for (auto& job : jobs) REQUIRE(bench.desk.submit({job}));
    for (int step = 0; step < 20000 && (step == 0 || bench.desk.inside); step++) {
        bench.engine.step();
        size_t started = 0, done = 0;
        for (auto& job : jobs) started += !job.reply->pieces.empty(), done += job.reply->left == 0;
        CHECK(started - done <= 4); // no fifth is begun while one of four waits to go on
        begun = std::max(begun, started - done);
    }
    CHECK(begun == 4);
    CHECK(bench.desk.figures->preempted > 3);
    for (auto& job : jobs) CHECK(job.reply->left == 0);
    CHECK(bench.desk.figures->pages_used == 0);
}

TEST_CASE("a key that fills the queue leaves the others their share") {
    Bench bench({256, 2, 64, 64, 0});
    bench.desk.limit = 12, bench.desk.keys = 3;
    auto ask = [&](uint64_t key, int n) {
        std::vector<Job> jobs;
        for (; n > 0; n--) jobs.push_back(job_of(key, 5, 3));
        return bench.desk.submit(std::move(jobs));
    };
    CHECK(ask(1, 12));
    CHECK(!ask(1, 1));
    CHECK(ask(2, 3));
    CHECK(!ask(2, 2));
    CHECK(ask(2, 1));
    CHECK(!ask(2, 1)); // a third of twelve
    CHECK(ask(3, 4));
    bench.engine.step();
    CHECK(!ask(3, 1));
    while (bench.desk.inside) bench.engine.step();
    CHECK(ask(2, 12));
    bench.engine.step();
    CHECK(!ask(2, 1));
}

TEST_CASE("turns are by tokens: one token does not wait for long answers of another key") {
    for (auto [max_seqs, pages, answers, tokens, patience] : {std::tuple{4, 100, 6, 120, 5}, {4, 16, 6, 120, 5}, {1, 100, 2, 700, 650}}) {
        const std::string size = format("at most %d, %d pages", max_seqs, pages);
        INFO(size);
        const int context = tokens + 16;
        Bench bench({context, max_seqs, 64, 64, (size_t)pages * Bench::page_bytes()});
        std::vector<Job> jobs;
        for (int i = 0; i < answers; i++) jobs.push_back(job_of(1, 8, (size_t)tokens)), jobs.back().how.seed = (uint64_t)i;
        for (Job& job : jobs) REQUIRE(bench.desk.submit({job}));
        for (int i = 0; i < 20; i++) bench.engine.step();
        const Job one = job_of(2, 8, 1);
        REQUIRE(bench.desk.submit({one}));
        int steps = 0;
        for (; one.reply->left && steps < 2000; steps++) bench.engine.step();
        CHECK(steps <= patience);
        while (bench.desk.inside) bench.engine.step();
        CHECK(bench.desk.figures->pages_used == 0);
        check_answer(jobs[0], expected(jobs[0], context));
        if (answers > 2) check_answer(jobs[3], expected(jobs[3], context));
    }
}

TEST_CASE("two keys with long answers have as many tokens each, in one slot and in four") {
    for (auto [max_seqs, tokens] : {std::pair{1, 1500}, {4, 200}}) {
        Bench bench({tokens + 16, max_seqs, 64, 64, 0});
        std::vector<Job> jobs;
        for (int i = 0; i < 2 * max_seqs; i++) jobs.push_back(job_of(1 + (uint64_t)i / (uint64_t)max_seqs, 8, (size_t)tokens));
        for (Job& job : jobs) REQUIRE(bench.desk.submit({job}));
        for (int i = 0; i < tokens - 20; i++) bench.engine.step();
        int of[2] = {};
        for (Job& job : jobs)
            if (!job.reply->pieces.empty()) of[job.salt - 1] += (int)job.reply->pieces.back().count;
        const std::string shares = format("at most %d: %d and %d", max_seqs, of[0], of[1]);
        INFO(shares);
        CHECK(of[0] + of[1] > (tokens - 100) * max_seqs);
        CHECK(std::abs(of[0] - of[1]) < (max_seqs == 1 ? 700 : 100));
    }
}

TEST_CASE("an answer that wants to end may not before min_tokens, also where it gives way") {
    const int end = tiny().file.config.end_tokens.at(0);
    for (int pages : {200, 10}) {
        Bench bench({128, 4, 64, 64, (size_t)pages * Bench::page_bytes()});
        std::vector<Job> jobs;
        for (int i = 0; i < 6; i++) {
            jobs.push_back(job_of(1, 1 + (size_t)i, 100));
            Job& job = jobs.back();
            job.bias = {{end, 100.f}, {77, i % 2 ? 50.f : 0.f}};
            job.ignore_eos = false, job.max_tokens = 100, job.min_tokens = 40 + 4 * (size_t)i, job.ends = {77};
            if (i % 2) job.ends.clear();
        }
        Random random{15};
        run_all(bench, random, jobs);
        for (auto& job : jobs) {
            CHECK(job.reply->pieces.back().count == job.min_tokens + 1);
            CHECK(std::string(job.reply->pieces.back().finish) == "stop");
        }
        if (pages == 10) CHECK(bench.desk.figures->preempted > 0);
    }
}

TEST_CASE("priority: within a key the lowest is first") {
    Bench bench({256, 1, 64, 64, 0});
    std::vector<Job> jobs;
    for (int priority : {0, 5, -3, 0, 5, -3}) jobs.push_back(job_of(1, 8, 3)), jobs.back().priority = priority;
    CHECK(order_of(bench, jobs) == std::vector<size_t>{2, 5, 0, 3, 1, 4});
}

TEST_CASE("a step takes no longer when thirty thousand wait, and the cancelled ones leave") {
    Bench bench({256, 1, 64, 64, 0});
    bench.desk.limit = 100'000;
    auto worked = [] { // seconds that this process has had of the CPUs: others may be busy too
        timespec t;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    };
    auto time_of = [&] { // a step with one answer at work, where other programs disturb it least
        Job job = job_of(1, 8, 240);
        REQUIRE(bench.desk.submit({job}));
        bench.engine.step();
        std::vector<double> all;
        for (int i = 0; i < 200; i++) {
            const double start = worked();
            bench.engine.step();
            all.push_back(worked() - start);
        }
        while (job.reply->left) bench.engine.step();
        return *std::min_element(all.begin(), all.end());
    };
    const double alone = time_of();
    std::vector<Job> many;
    for (int i = 0; i < 30'000; i++) many.push_back(job_of(1, 8, 1)), many.back().priority = 1;
    for (Job& job : many) REQUIRE(bench.desk.submit({job}));
    double crowded = time_of();
    for (int i = 0; i < 5 && crowded >= 1.5 * alone; i++) crowded = std::min(crowded, time_of());
    // (To look at every waiting one takes 5 ms; caches that neighbours share cost some 10 us.)
    const std::string times = format("%.0f us alone, %.0f us among many", 1e6 * alone, 1e6 * crowded);
    INFO(times);
    CHECK(crowded < 1.5 * alone + 500e-6);
    for (Job& job : many) job.reply->cancelled = true;
    int steps = 0;
    for (; bench.desk.inside && steps < 1000; steps++) bench.engine.step();
    CHECK(steps < 200);
    CHECK(bench.desk.figures->cancelled > 29'000);
}

TEST_CASE("a budget: whoever holds most loses what it has held for longest") {
    Budget budget{100};
    Budget::Share big[3], small, tiny;
    int dropped = 0;
    for (auto& share : big) share.who = 1, share.drop = [&] { dropped++; };
    small.who = 2, tiny.who = 3;
    big[1].since = seconds() - 50, big[2].since = big[0].since = seconds() - 10;
    for (auto& share : big) CHECK(budget.add(share, 30));
    CHECK(budget.add(small, 10));
    CHECK(budget.used == 100);
    CHECK(budget.add(tiny, 1)); // a client that requests little does not lose
    CHECK(dropped == 1);
    CHECK(big[1].lost);
    CHECK(budget.used == 71);
    CHECK(!budget.add(big[1], 1));
    budget.remove(big[0], 30);
    CHECK(!budget.add(small, 70)); // now the most is its own
    CHECK(dropped == 1);
    CHECK(budget.used == 31);
    CHECK(budget.lost == 2);
    budget.remove(big[2]), budget.remove(tiny), budget.remove(small);
    CHECK(budget.used == 0);
}

TEST_CASE("what nobody takes is bounded, and ends its own answer only") {
    Bench bench({256, 4, 64, 64, 0});
    bench.desk.unsent.limit = 20'000;
    std::vector<Job> jobs;
    for (uint64_t key : {1, 1, 2}) {
        jobs.push_back(job_of(key, 8, 200));
        jobs.back().reply->share = std::make_shared<Budget::Share>();
        jobs.back().reply->share->who = key;
        jobs.back().alternatives = 5;
        REQUIRE(bench.desk.submit({jobs.back()}));
    }
    for (int step = 0; (step == 0 || bench.desk.inside) && step < 1000; step++) {
        bench.engine.step();
        size_t waits = 0;
        for (const Job& job : jobs)
            if (!job.reply->share->lost) for (auto& piece : job.reply->pieces) waits += bytes_of(piece);
        CHECK(waits <= 20'000);
        for (auto& piece : std::exchange(jobs[2].reply->pieces, {})) // which is read
            bench.desk.unsent.remove(*jobs[2].reply->share, bytes_of(piece));
    }
    CHECK(jobs[0].reply->cancelled);
    CHECK(jobs[1].reply->cancelled);
    CHECK(jobs[2].reply->left == 0);
    CHECK(bench.desk.figures->cancelled == 2);
    CHECK(bench.desk.inside == 0);
}

// ------------------------------------------------------------------------------------------------------- requests

static Ask understood(const std::string& more, bool chat = true, int context = 4096) {
    const Service service = {&tiny().tokenizer, "tiny", "", context, false};
    return read_ask(service, chat ? question("a", more) : "{\"prompt\": \"a warp is\"" + (more.empty() ? "" : ", " + more) + "}", chat, 1);
}
// The field that a request is refused for; "-" if it is not.
static std::string refused_for(const std::string& more, bool chat = true, int context = 4096) {
    try {
        understood(more, chat, context);
        return "-";
    } catch (const Refusal& r) {
        CHECK(r.status == 400);
        return r.param;
    }
}

TEST_CASE("every documented field is done or refused by name") {
    for (const char* one : { // without effect on an answer, or done
             "\"tool_choice\": \"none\"", "\"tool_choice\": \"auto\"", "\"tools\": []", "\"function_call\": \"auto\"", "\"parallel_tool_calls\": true",
             "\"parallel_tool_calls\": false", "\"response_format\": {\"type\":\"text\"}", "\"use_beam_search\": false", "\"length_penalty\": 1.0",
             "\"best_of\": 1", "\"modalities\": [\"text\"]", "\"store\": false", "\"service_tier\": \"auto\"", "\"verbosity\": \"medium\"",
             "\"prompt_logprobs\": null", "\"prompt_logprobs\": 0", "\"structured_outputs\": null", "\"suffix\": \"\"", "\"skip_special_tokens\": true", "\"spaces_between_special_tokens\": true",
             "\"include_reasoning\": true", "\"echo\": false", "\"user\": \"me\", \"metadata\": {\"a\": \"b\"}, \"prompt_cache_key\": \"k\", \"safety_identifier\": \"s\"",
             "\"min_tokens\": 0", "\"stop_token_ids\": []", "\"bad_words\": []", "\"allowed_token_ids\": null", "\"reasoning_effort\": \"low\"", "\"priority\": -5",
             "\"cache_salt\": \"x\"", "\"request_id\": \"my-1_2\"", "\"truncate_prompt_tokens\": 5", "\"add_generation_prompt\": false",
             "\"continue_final_message\": true", "\"continue_final_message\": true, \"add_generation_prompt\": false", "\"session_id\": \"s\"",
             "\"prompt_cache_options\": {\"mode\": \"explicit\"}", "\"truncate_prompt_tokens\": 5, \"truncation_side\": \"right\"", "\"stream_interval\": 1",
             "\"return_prompt_text\": false", "\"documents\": []", "\"moderation\": null"})
        CHECK_MESSAGE(refused_for(one) == "-", one);
    for (const char* effort : {"none", "minimal", "low", "medium", "high", "xhigh", "max"}) CHECK(refused_for(format("\"reasoning_effort\": \"%s\"", effort)) == "-");
    for (const char* tier : {"auto", "default", "flex", "scale", "priority", "fast", "ultrafast"}) CHECK(refused_for(format("\"service_tier\": \"%s\"", tier)) == "-");
    CHECK(understood("\"reasoning_effort\": \"max\"").jobs[0].thinking);
    for (const char* name : {"logprob_token_ids", "repetition_detection", "moderation", "enable_thinking", "chat_id", "prompt_embeds", "media_io_kwargs", "x"}) // whoever documents them
        for (bool chat : {true, false}) CHECK(refused_for(format("\"%s\": 7", name), chat) == name);
    for (auto& row : std::initializer_list<std::pair<const char*, const char*>>{
             {"\"tool_choice\": \"required\"", "tool_choice"}, {"\"tool_choice\": {\"type\": \"function\"}", "tool_choice"}, {"\"tools\": [{}]", "tools"},
             {"\"parallel_tool_calls\": 1", "parallel_tool_calls"}, {"\"structured_outputs\": {\"choice\": []}", "structured_outputs"},
             {"\"response_format\": {\"type\": \"xml\"}", "response_format"}, {"\"guided_json\": {\"not\": {}}", "guided_json"},
             {"\"prompt_logprobs\": 21", "prompt_logprobs"}, {"\"chat_template\": \"{{x}}\"", "chat_template"}, {"\"use_beam_search\": true", "use_beam_search"},
             {"\"length_penalty\": 2", "length_penalty"}, {"\"best_of\": 2", "best_of"}, {"\"echo\": true", "echo"}, {"\"store\": true", "store"},
             {"\"include_stop_str_in_output\": true", "include_stop_str_in_output"}, {"\"return_token_ids\": true", "return_token_ids"},
             {"\"service_tier\": \"slow\"", "service_tier"}, {"\"stream_interval\": 2", "stream_interval"}, {"\"return_prompt_text\": true", "return_prompt_text"},
             {"\"truncation_side\": \"middle\"", "truncation_side"}, {"\"session_id\": 5", "session_id"}, {"\"prompt_cache_options\": 5", ""}, {"\"verbosity\": \"low\"", "verbosity"}, {"\"modalities\": [\"audio\"]", "modalities"},
             {"\"documents\": [{}]", "documents"}, {"\"logits_processors\": [1]", "logits_processors"}, {"\"kv_transfer_params\": {}", "kv_transfer_params"},
             {"\"min_tokens\": -1", "min_tokens"}, {"\"max_tokens\": 5, \"min_tokens\": 6", "min_tokens"}, {"\"stop_token_ids\": 5", "stop_token_ids"},
             {"\"stop_token_ids\": [99999]", "stop_token_ids"}, {"\"bad_words\": \"a\"", "bad_words"}, {"\"bad_words\": [\"\"]", "bad_words"},
             {"\"bad_words\": [\"many tokens of words\"]", "bad_words"}, {"\"allowed_token_ids\": []", "allowed_token_ids"},
             {"\"allowed_token_ids\": [-1]", "allowed_token_ids"}, {"\"allowed_token_ids\": [5], \"presence_penalty\": 1", "allowed_token_ids"},
             {"\"reasoning_effort\": \"much\"", "reasoning_effort"}, {"\"reasoning_effort\": 3", "reasoning_effort"},
             {"\"reasoning_effort\": \"high\", \"chat_template_kwargs\": {\"enable_thinking\": false}", "reasoning_effort"},
             {"\"chat_template_kwargs\": {\"tools\": 1}", "chat_template_kwargs"}, {"\"priority\": 0.5", "priority"}, {"\"cache_salt\": \"\"", "cache_salt"},
             {"\"cache_salt\": 1", "cache_salt"}, {"\"request_id\": \"a b\"", "request_id"}, {"\"truncate_prompt_tokens\": 0", "truncate_prompt_tokens"},
             {"\"truncate_prompt_tokens\": -2", "truncate_prompt_tokens"}, {"\"truncate_prompt_tokens\": 4097", "truncate_prompt_tokens"},
             {"\"continue_final_message\": true, \"add_generation_prompt\": true", "add_generation_prompt"},
             {"\"stream\": true, \"stream_options\": {\"continuous_usage_stats\": true}", "continuous_usage_stats"},
             {"\"continue_final_message\": true, \"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"tool\", \"content\": \"b\"}]", "messages"}})
        CHECK_MESSAGE(refused_for(row.first) == row.second, row.first);
    CHECK(refused_for("\"echo\": true, \"logprobs\": 1", false) == "-");
    CHECK(refused_for("\"echo\": true", false) == "-");
    CHECK(understood("\"request_id\": \"my-1\"").id == "chatcmpl-my-1");
    CHECK(understood("\"reasoning_effort\": \"high\"").jobs[0].thinking);
    CHECK(!understood("\"reasoning_effort\": \"none\"").jobs[0].thinking);
    CHECK(understood("\"reasoning_effort\": \"high\"").jobs[0].prompt == understood("\"chat_template_kwargs\": {\"enable_thinking\": true}").jobs[0].prompt);
    CHECK(understood("\"priority\": -7").jobs[0].priority == -7);
    CHECK(understood("\"n\": 2, \"min_tokens\": 3").jobs[1].min_tokens == 3);
}

TEST_CASE("prompts: what cannot fit is refused before it is tokenized, and only the end of it if so asked") {
    const std::string letters(200'000, 'x'); // 512 bytes of a token's NFC, 64 tokens
    const std::string words = "\"messages\": [{\"role\": \"user\", \"content\": \"" + letters + "\"}]";
    const Service service = {&tiny().tokenizer, "tiny", "", 64, false};
    for (bool chat : {true, false}) {
        const std::string body = "{" + (chat ? words : "\"prompt\": \"" + letters + "\"");
        std::string said;
        try { read_ask(service, body + "}", chat, 1); } catch (const Refusal& r) { said = r.code + ": " + r.what(); }
        CHECK(said == "context_length_exceeded: the context is 64 tokens: 200000 bytes cannot fit");
        CHECK(read_ask(service, body + ", \"truncate_prompt_tokens\": 9}", chat, 1).jobs[0].prompt.size() == 9);
        CHECK(read_ask(service, body + ", \"truncate_prompt_tokens\": -1, \"max_tokens\": 20}", chat, 1).jobs[0].prompt.size() == 44);
    }
    const std::vector<int> all = understood("", false).jobs[0].prompt, end = understood("\"truncate_prompt_tokens\": 2", false).jobs[0].prompt;
    CHECK(end == std::vector<int>(all.end() - 2, all.end()));
    const std::vector<int> begin = understood("\"truncate_prompt_tokens\": 2, \"truncation_side\": \"right\"", false).jobs[0].prompt;
    CHECK(begin == std::vector<int>(all.begin(), all.begin() + 2));
    CHECK(tiny().tokenizer.longest() >= 8);
}

TEST_CASE("a conversation whose last message goes on") {
    const std::vector<Message> said = {{"system", "s"}, {"user", "u"}, {"assistant", "It is"}};
    const std::string whole = render_text(said, {false, false}), open = render_text(said, {false, false, true});
    CHECK(open + "<|im_end|>\n" == whole);
    CHECK(open.substr(open.size() - 5) == "It is");
    CHECK(render_text({{"user", "u"}}, {false, false, true}) == "<|im_start|>user\nu");
    CHECK_THROWS_AS(render_text({{"user", "u"}, {"tool", "r"}}, {false, false, true}), Error);
    const Ask ask = understood("\"continue_final_message\": true, \"messages\": [{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", \"content\": \"It is\"}]");
    CHECK(ask.jobs[0].prompt == render_chat(tiny().tokenizer, {{"user", "u"}, {"assistant", "It is"}}, {false, false, true}));
}

TEST_CASE("spaces of shared prompts: a salt has its own, and never another key's") {
    CHECK(understood("").jobs[0].space == 0);
    const uint64_t one = understood("\"cache_salt\": \"a\"").jobs[0].space;
    CHECK(one == salted_space(1, "a"));
    CHECK(one != salted_space(1, "b"));
    CHECK(one != salted_space(2, "a"));
    CHECK((one >> 63) == 1);
    for (uint64_t key = 1; key < 100; key++)
        for (const char* salt : {"", "a", "b"}) CHECK((salted_space(key, salt) >> 40) == (1 << 23 | key));
    Bench bench({512, 4, 64, 64, 0});
    auto cached = [&](const char* more) {
        Job job = understood(more, false).jobs[0];
        job.prompt.assign(100, 7), job.max_tokens = 1;
        bench.desk.submit({job});
        while (job.reply->left) bench.engine.step();
        return job.reply->pieces.back().cached;
    };
    CHECK(cached("") == 0);
    CHECK(cached("\"cache_salt\": \"a\"") == 0);
    CHECK(cached("\"cache_salt\": \"a\"") == 96);
    CHECK(cached("\"cache_salt\": \"b\"") == 0);
    CHECK(cached("") == 96);
}

TEST_CASE("an answer told in parts is the answer told at once") {
    for (bool chat : {true, false})
        for (int alternatives : {-1, 0, 20}) {
            Ask ask = understood(alternatives < 0 ? "\"n\": 3" : chat ? format("\"n\": 3, \"logprobs\": true, \"top_logprobs\": %d", alternatives)
                                                                      : format("\"n\": 3, \"logprobs\": %d", alternatives), chat);
            const Service service = {&tiny().tokenizer, "tiny", "", 4096, false};
            Answer answer(service, ask);
            for (int choice = 0; choice < 3; choice++) {
                Piece piece;
                piece.choice = choice, piece.finish = "stop", piece.count = 3000;
                for (int i = 0; i < 3000 * choice; i++) {
                    TokenInfo info{i % 500, -1.5f, std::to_string(i), {}};
                    for (int k = 0; k < alternatives; k++) info.top.push_back({k + 5, -2.f});
                    piece.text += info.text;
                    if (alternatives >= 0) piece.tokens.push_back(std::move(info));
                }
                answer.add(std::move(piece));
            }
            std::string all, text;
            size_t largest = 0;
            while (!answer.told()) all += text = answer.part(), largest = std::max(largest, text.size());
            CHECK(largest < 3 * Answer::PART);
            const Json j(all);
            REQUIRE(j["choices"].size() == 3);
            const sj::Value last = j["choices"][2], probs = last["logprobs"];
            CHECK(last["finish_reason"].str() == "stop");
            CHECK(j["usage"]["completion_tokens"].number() == 9000);
            if (alternatives < 0) {
                CHECK(probs.is(sj::Null));
            } else if (chat) {
                REQUIRE(probs["content"].size() == 6000);
                CHECK(probs["content"][5999]["token"].str() == "5999");
                CHECK(probs["content"][77]["top_logprobs"].size() == (size_t)alternatives);
                CHECK(all.size() > 10 * Answer::PART);
            } else {
                for (const char* name : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) CHECK(probs[name].size() == 6000);
                CHECK(probs["text_offset"][10].number() == 10);
                CHECK(probs["text_offset"][12].number() == 14);
                CHECK(last["text"].str().size() == probs["text_offset"][5999].number() + 4);
            }
        }
}

TEST_CASE("log-probabilities of a completion: by names, the sampled token besides the likeliest") {
    const Tokenizer& t = tiny().tokenizer;
    const Service service = {&t, "tiny", "", 4096, false};
    const int a = t.encode("a", false).at(0), b = t.encode("b", false).at(0), c = t.encode("c", false).at(0);
    std::vector<int> broken; // no whole characters: their texts are the same
    for (int id = 0; id < t.size() && broken.size() < 3; id++)
        if (token_text(t, id) == "\xef\xbf\xbd") broken.push_back(id);
    REQUIRE(broken.size() == 3);
    auto top = [&](int sampled, std::vector<Alternative> likeliest, bool chat = false) {
        Ask ask;
        ask.chat = chat, ask.logprobs = true, ask.jobs.resize(1);
        Answer answer(service, ask);
        Piece piece;
        piece.text = "x", piece.finish = "stop";
        piece.tokens.push_back({sampled, -5, "x", std::move(likeliest)});
        answer.add(std::move(piece));
        const Json j(answer.whole());
        const sj::Value logprobs = j["choices"][(size_t)0]["logprobs"];
        return sj::dump(chat ? logprobs["content"][(size_t)0]["top_logprobs"] : logprobs["top_logprobs"][(size_t)0]);
    };
    CHECK(top(a, {{a, -1}, {b, -2}}) == R"({"a": -1.0, "b": -2.0})");
    CHECK(top(c, {{a, -1}, {b, -2}}) == R"({"a": -1.0, "b": -2.0, "c": -5.0})"); // up to N + 1, as OpenAI says
    CHECK(top(c, {}) == R"({"c": -5.0})");
    const auto name = [&](int id) { return token_name(t, id); };
    CHECK(name(a) == "a");
    CHECK(name(broken[0]).compare(0, 8, "bytes:\\x") == 0);
    const Json three(top(broken[2], {{broken[0], -1}, {broken[1], -2}}));
    CHECK(three.root().size() == 3); // each id is told
    CHECK(three[name(broken[1])].number() == -2);
    CHECK(three[name(broken[2])].number() == -5);
    // Where ids have one name (two entries of one id stand for them) a client gets one entry: the sampled one's, else the likeliest.
    CHECK(top(c, {{a, -1}, {a, -2}}) == R"({"a": -1.0, "c": -5.0})");
    const Json list(top(broken[2], {{broken[0], -1}, {broken[1], -2}}, true)); // a chat tells their bytes
    REQUIRE(list.root().size() == 2);
    CHECK(list.root()[(size_t)0]["bytes"].size() == t.bytes(broken[0]).size());
    CHECK(list.root()[(size_t)0]["token"].str() == "\xef\xbf\xbd");
}

// ------------------------------------------------------------------------------------------------ the benchmark

// The numbers are python3's (3.11; randint has been the same since 3.2):
//   from random import randint, seed
//   seed(0)
//   prompts = [[randint(0, 10000) for _ in range(randint(100, 1024))] for _ in range(256)]
//   answers = [randint(100, 1024) for _ in range(256)]
//   [len(p) for p in prompts[:4]], prompts[0][:4], prompts[255][-1], answers[:4], sum(map(len, prompts)), sum(answers)
//   h = 0xcbf29ce484222325
//   for b in b"".join(struct.pack(f"<{len(p) + 1}i", *p, a) for p, a in zip(prompts, answers)): h = (h ^ b) * 0x100000001b3 % 2**64
TEST_CASE("bench_serve's preset is nano-vllm's benchmark, number by number") {
    const std::vector<Work> all = nano_workload();
    REQUIRE(all.size() == 256);
    const size_t lengths[] = {964, 724, 484, 508};
    const int ids[] = {6311, 6890, 663, 4242}, answers[] = {845, 312, 607, 843};
    for (size_t i = 0; i < 4; i++) {
        CHECK(all[i].prompt.size() == lengths[i]);
        CHECK(all[0].prompt[i] == ids[i]);
        CHECK(all[i].answer == answers[i]);
    }
    CHECK(all[255].prompt.back() == 1958);
    size_t in = 0, out = 0;
    uint64_t hash = fnv1a(nullptr, 0);
    for (const Work& w : all) {
        in += w.prompt.size(), out += (size_t)w.answer;
        hash = fnv1a(&w.answer, sizeof w.answer, fnv1a(w.prompt.data(), w.prompt.size() * sizeof(int), hash));
    }
    CHECK(in == 142'827);
    CHECK(out == 133'966);
    CHECK(hash == 0xb6bec84eb1f71d);
}

TEST_CASE("Python's randint after another seed, with another range") {
    PythonRandom random(2026); // seed(2026)
    for (int dice : {1, 3, 5, 5, 6, 1, 2, 5}) CHECK(random.randint(1, 6) == dice);
    for (int big : {903263724, 1054209167}) CHECK(random.randint(-5, 1 << 30) == big);
    CHECK(random.randint(3, 3) == 3);
}

// -------------------------------------------------------------------------------------------------- the program

static const char* PROGRAM = getenv("SERVE") ? getenv("SERVE") : "./serve";

struct Serving : Process {
    int port = 0;
    explicit Serving(const Strings& more = {}, const std::function<void()>& prepare = [] {},
                     const std::string& model = MODEL)
        : Process(PROGRAM, with(more, model), "", [&] { setenv("OMP_WAIT_POLICY", "passive", 1), prepare(); }) {
        for (const double start = seconds(); port == 0;) {
            const std::string said = err.text();
            INFO(said);
            REQUIRE(seconds() - start < 30);
            const size_t at = said.find("listening on http://127.0.0.");
            if (at != std::string::npos && said.back() == '\n') port = atoi(said.c_str() + at + 30); // behind one digit and a colon
            usleep(2000);
        }
    }
    ~Serving() {
        if (port) kill_running();
    }
    static Strings with(const Strings& more, const std::string& model = MODEL) {
        Strings all = {model, "-z", VOCABULARY, "-j", "1", "--port", "0", "--name", "tiny"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    Result stop() { // in peace
        port = 0;
        kill(pid, SIGTERM);
        Result r = wait();
        if (r.status) MESSAGE("the server ended with status ", r.status, ": ", r.err);
        return r;
    }
    HttpReply post(const std::string& path, std::string_view body, const std::string& headers = "") const {
        return Http(port).call("POST", path, body, headers);
    }
    HttpReply chat(const std::string& body) const { return post("/v1/chat/completions", body); }
    double metric(const std::string& name) const {
        const std::string all = Http(port).call("GET", "/metrics").body;
        const size_t at = all.find("\nvllm:" + name + "{");
        REQUIRE(at != std::string::npos);
        return atof(all.c_str() + all.find("} ", at) + 2);
    }
    size_t memory() const { // bytes that it has
        const std::string all = read_all(format("/proc/%d/statm", (int)pid));
        return (size_t)atol(all.c_str() + all.find(' ')) * (size_t)sysconf(_SC_PAGESIZE);
    }
    static std::string read_all(const std::string& path) { // of no known size
        std::string all(4096, 0);
        const int fd = open(path.c_str(), O_RDONLY);
        const ssize_t n = read(fd, all.data(), all.size());
        close(fd);
        REQUIRE(n > 0);
        return all.substr(0, (size_t)n);
    }
    // No job is served and no page is used, within `s` seconds.
    void check_idle(double s = 5) const {
        const double start = seconds();
        auto idle = [&] { return metric("num_requests_running") + metric("num_requests_waiting") + metric("kv_cache_usage_perc") == 0; };
        while (!idle() && seconds() - start < s) usleep(20'000);
        CHECK(idle());
    }
};

static void check_refused(const HttpReply& r, int status, const std::string& param = "") {
    INFO(r.body);
    CHECK(r.status == status);
    const Json j(r.body);
    CHECK(j["error"]["message"].str() != "");
    CHECK(j["error"]["type"].is(sj::String));
    CHECK(j["error"]["param"].str() == param);
    CHECK(j["error"]["code"]);
}
static std::string content(const HttpReply& r) {
    INFO(r.body);
    REQUIRE(r.status == 200);
    return Json(r.body)["choices"][(size_t)0]["message"]["content"].str();
}

// Events of a chat, checked for form: the role first, one id, the reason once and last. Returns the joined content of
// each choice.
static std::vector<std::string> joined(const HttpReply& r, size_t choices = 1, bool usage = false) {
    INFO(r.body);
    REQUIRE(r.status == 200);
    CHECK(r.headers.at("content-type") == "text/event-stream; charset=utf-8");
    std::vector<std::string> events = events_of(r.body), texts(choices), ends(choices);
    std::vector<int> seen(choices);
    REQUIRE(!events.empty());
    CHECK(events.back() == "[DONE]");
    events.pop_back();
    if (usage) {
        const Json last(events.back());
        CHECK(last["choices"].is(sj::Array));
        CHECK(last["choices"].size() == 0);
        CHECK(last["usage"]["total_tokens"].number() == last["usage"]["prompt_tokens"].number() + last["usage"]["completion_tokens"].number());
        events.pop_back();
    }
    std::string id;
    for (auto& e : events) {
        const Json j(e);
        if (id.empty()) id = j["id"].str();
        CHECK(j["id"].str() == id);
        CHECK(j["object"].str() == "chat.completion.chunk");
        CHECK(j["model"].str() == "tiny");
        CHECK((bool)j["usage"] == usage);
        REQUIRE(j["choices"].size() == 1);
        const sj::Value c = j["choices"][(size_t)0];
        const size_t i = (size_t)c["index"].number();
        REQUIRE(i < choices);
        CHECK(ends[i] == "");
        CHECK(c["delta"]["role"].str() == (seen[i]++ == 0 ? "assistant" : ""));
        texts[i] += c["delta"]["content"].str();
        ends[i] = c["finish_reason"].str();
    }
    for (auto& end : ends) CHECK((end == "stop" || end == "length"));
    return texts;
}

TEST_SUITE_BEGIN("program");
TEST_CASE("a stream joined is the answer at once, alone or among many") {
    Serving server({"--max-seqs", "4", "--chunk", "16"});
    std::vector<std::string> alone;
    auto body = [](int i, const char* more) {
        return question("What is a warp? " + std::to_string(i % 5), format("\"seed\": %d, \"max_tokens\": %d, \"temperature\": 1.5, \"top_k\": 0%s", i, 5 + i, more));
    };
    for (int i = 0; i < 20; i++) alone.push_back(content(server.chat(body(i, ""))));
    std::vector<std::string> streamed(20), crowded(20);
    std::vector<std::thread> threads;
    for (int i = 0; i < 20; i++)
        threads.emplace_back([&, i] {
            try {
                streamed[i] = Http(server.port).call("POST", "/v1/chat/completions", body(i, ", \"stream\": true, \"stream_options\": {\"include_usage\": true}")).body;
                crowded[i] = Http(server.port).call("POST", "/v1/chat/completions", body(i, "")).body;
            } catch (const Error& e) { streamed[i] = e.what(); }
        });
    for (auto& t : threads) t.join();
    for (int i = 0; i < 20; i++) {
        HttpReply r{200, {{"content-type", "text/event-stream; charset=utf-8"}}, streamed[i]};
        CHECK(joined(r, 1, true)[0] == alone[i]);
        CHECK(content({200, {}, crowded[i]}) == alone[i]);
    }
    server.check_idle();
    CHECK(server.metric("prefix_cache_hits_total") > 0);
    const Result r = server.stop();
    CHECK(r.status == 0);
    const Strings log = lines(r.out);
    CHECK(log.size() > 60);
    for (auto& line : log) {
        CHECK(Json(line)["status"].number() == 200);
        CHECK(line.find("warp") == std::string::npos);
    }
}

TEST_CASE("n, usage, logprobs, stops, ignore_eos") {
    Serving server;
    const Json two(server.chat(question("hi", "\"n\": 3, \"seed\": 7, \"max_tokens\": 9, \"ignore_eos\": true")).body);
    REQUIRE(two["choices"].size() == 3);
    CHECK(two["usage"]["completion_tokens"].number() == 27);
    std::set<std::string> texts;
    for (sj::Value c : two["choices"].items()) {
        texts.insert(c["message"]["content"].str());
        CHECK(c["finish_reason"].str() == "length");
        CHECK(c["message"]["role"].str() == "assistant");
        CHECK(!c["message"]["reasoning_content"]);
    }
    CHECK(texts.size() == 3);
    const Tokenizer& t = tiny().tokenizer;
    CHECK(two["usage"]["prompt_tokens"].number() == (double)render_chat(t, {{"user", "hi"}}).size());
    const std::vector<std::string> parts = joined(server.chat(question("hi", "\"n\": 3, \"seed\": 7, \"max_tokens\": 9, \"ignore_eos\": true, \"stream\": true")), 3);
    CHECK(std::set<std::string>(parts.begin(), parts.end()) == texts);
    const HttpReply ten = server.chat(question("hi", "\"max_tokens\": 10, \"ignore_eos\": true, \"stream\": true"));
    const size_t events = events_of(ten.body).size(); // the role, ten tokens, the reason (maybe with the last text before it), the end
    CHECK((events == 12 || events == 13));

    const Json told(server.chat(question("hi", "\"seed\": 3, \"max_tokens\": 40, \"ignore_eos\": true, \"logprobs\": true, \"top_logprobs\": 4")).body);
    const sj::Value choice = told["choices"][(size_t)0];
    std::string tokens;
    CHECK(choice["logprobs"]["content"].size() == 40);
    for (sj::Value c : choice["logprobs"]["content"].items()) {
        tokens += c["token"].str();
        CHECK(c["logprob"].number(1) <= 0);
        CHECK(c["bytes"].is(sj::Array));
        REQUIRE(c["top_logprobs"].size() == 4);
        CHECK(c["top_logprobs"][(size_t)0]["logprob"].number() >= c["top_logprobs"][3]["logprob"].number());
    }
    const std::string text = choice["message"]["content"].str();
    CHECK(tokens == text);
    for (size_t begin = 3; begin + 4 < text.size(); begin += 5) { // in the middle of tokens, too
        size_t b = begin, e = begin + 4;
        while (((uint8_t)text[b] & 0xC0) == 0x80) b++;
        while (e < text.size() && ((uint8_t)text[e] & 0xC0) == 0x80) e++;
        std::string more = "\"seed\": 3, \"max_tokens\": 40, \"ignore_eos\": true, \"logprobs\": true, \"stop\": [\"never seen\", ";
        sj::quote(more, text.substr(b, e - b));
        const HttpReply r = server.chat(question("hi", more + "]"));
        CHECK(content(r) == text.substr(0, text.find(text.substr(b, e - b))));
        const Json j(r.body);
        tokens.clear();
        for (sj::Value c : j["choices"][(size_t)0]["logprobs"]["content"].items()) tokens += c["token"].str();
        CHECK(tokens == content(r));
        CHECK(j["choices"][(size_t)0]["finish_reason"].str() == "stop");
        CHECK(joined(server.chat(question("hi", more + "], \"stream\": true")))[0] == content(r));
    }
}

TEST_CASE("vLLM's fields: what may come, what ends, what is said first") {
    Serving server;
    const int end = tiny().file.config.end_tokens.at(0);
    const std::string random = "\"seed\": 3, \"temperature\": 1.5, \"top_k\": 0, \"top_p\": 1";
    auto choice = [&](const std::string& more) { return server.chat(question("hi", more)); };
    auto count = [](const HttpReply& r) { return Json(r.body)["usage"]["completion_tokens"].number(); };
    auto reason = [](const HttpReply& r) { return Json(r.body)["choices"][(size_t)0]["finish_reason"].str(); };
    // The model wants to end at once, and may not.
    const std::string ends = format("\"logit_bias\": {\"%d\": 100}, \"max_tokens\": 30", end);
    CHECK(count(choice(ends)) == 1);
    CHECK(count(choice(ends + ", \"min_tokens\": 12")) == 13);
    CHECK(count(choice(ends + ", \"min_tokens\": 30")) == 30);
    CHECK(reason(choice(ends + ", \"min_tokens\": 30")) == "length");
    // Stop strings wait, too.
    const std::string said = content(choice(random + ", \"max_tokens\": 40, \"ignore_eos\": true"));
    const std::string stops = random + ", \"max_tokens\": 40, \"ignore_eos\": true, \"stop\": [\"a\", \"e\", \" \", \"t\"]";
    CHECK(count(choice(stops)) < 20);
    CHECK(count(choice(stops + ", \"min_tokens\": 20")) > 20);
    // A token of the answer as its end.
    const Json told(choice(random + ", \"max_tokens\": 40, \"ignore_eos\": true, \"logprobs\": true").body);
    const std::string fifth = told["choices"][(size_t)0]["logprobs"]["content"][4]["token"].str();
    std::vector<int> ids;
    for (int id = 0; id < tiny().tokenizer.size(); id++) if (token_text(tiny().tokenizer, id) == fifth && ids.size() < MAX_ENDS) ids.push_back(id);
    std::string list;
    for (int id : ids) list += (list.empty() ? "" : ", ") + std::to_string(id);
    const HttpReply stopped = choice(random + ", \"max_tokens\": 40, \"ignore_eos\": true, \"stop_token_ids\": [" + list + "]");
    CHECK(count(stopped) <= 5);
    CHECK(reason(stopped) == "stop");
    CHECK(said.compare(0, content(stopped).size(), content(stopped)) == 0);
    // Few tokens are allowed; one is not.
    const Tokenizer& t = tiny().tokenizer;
    const std::vector<int> letters = {t.encode("a", false)[0], t.encode("b", false)[0], t.encode("c", false)[0]};
    const std::string only = format("\"allowed_token_ids\": [%d, %d, %d]", letters[0], letters[1], letters[2]);
    const std::string abc = content(choice(random + ", \"max_tokens\": 60, " + only));
    CHECK(abc.size() == 60);
    CHECK(abc.find_first_not_of("abc") == std::string::npos);
    for (char c : {'a', 'b', 'c'}) CHECK(abc.find(c) != std::string::npos);
    const std::string ac = content(choice(random + ", \"max_tokens\": 60, \"bad_words\": [\"b\"], " + only));
    CHECK(ac.size() == 60);
    CHECK(ac.find_first_not_of("ac") == std::string::npos);
    // Special tokens as text.
    const std::string special = format("\"max_tokens\": 2, \"temperature\": 0, \"logit_bias\": {\"%d\": 100}", t.id("<|im_start|>"));
    CHECK(content(choice(special)) == "");
    CHECK(content(choice(special + ", \"skip_special_tokens\": false")) == "<|im_start|><|im_start|>");
    // The prompt comes first, whole and streamed.
    const std::string how = ", \"seed\": 5, \"max_tokens\": 5, \"n\": 2}", prompts = "{\"prompt\": [\"one warp\", \"two\"]";
    const Json plain(server.post("/v1/completions", prompts + how).body), echoed(server.post("/v1/completions", prompts + ", \"echo\": true" + how).body);
    for (size_t i = 0; i < 4; i++) CHECK(echoed["choices"][i]["text"].str() == (i < 2 ? "one warp" : "two") + plain["choices"][i]["text"].str());
    std::vector<std::string> streamed(4), events = events_of(server.post("/v1/completions", prompts + ", \"echo\": true, \"stream\": true" + how).body);
    for (size_t i = 0; i + 1 < events.size(); i++) {
        const Json e(events[i]);
        streamed[(size_t)e["choices"][(size_t)0]["index"].number()] += e["choices"][(size_t)0]["text"].str();
    }
    for (size_t i = 0; i < 4; i++) CHECK(streamed[i] == echoed["choices"][i]["text"].str());
    check_refused(server.post("/detokenize", "{\"tokens\": [" + many(1'300'000, std::to_string(longest_token())) + "]}"), 400, "tokens");
}

TEST_CASE("/v1/completions: strings, ids, lists of both; special text is text") {
    Serving server;
    const Tokenizer& t = tiny().tokenizer;
    const std::string text = "a warp <|im_end|> is";
    std::string ids = "[";
    for (int id : t.encode(text, false)) ids += format("%s%d", ids.size() > 1 ? ", " : "", id);
    ids += "]";
    const std::string how = ", \"seed\": 5, \"max_tokens\": 12, \"temperature\": 1}";
    auto texts = [&](const std::string& prompt) {
        const HttpReply r = server.post("/v1/completions", "{\"prompt\": " + prompt + how);
        INFO(r.body);
        REQUIRE(r.status == 200);
        std::vector<std::string> all;
        const Json j(r.body);
        CHECK(j["object"].str() == "text_completion");
        for (sj::Value c : j["choices"].items()) all.push_back(c["text"].str());
        return all;
    };
    const std::string quoted = "\"" + text + "\"";
    const auto one = texts(quoted);
    REQUIRE(one.size() == 1);
    CHECK(texts(ids) == one);
    CHECK(texts("[" + quoted + "]") == one);
    const auto several = texts("[" + quoted + ", \"other\", \"" + text + "\"]");
    REQUIRE(several.size() == 3);
    CHECK(several[0] == one[0]);
    CHECK(texts("[" + ids + ", [1, 2]]")[0] == one[0]);
    const HttpReply r = server.post("/v1/completions", "{\"stream\": true, \"logprobs\": 2, \"prompt\": " + quoted + how);
    std::string streamed, tokens;
    std::vector<std::string> events = events_of(r.body);
    events.pop_back();
    for (auto& e : events) {
        const Json j(e);
        streamed += j["choices"][(size_t)0]["text"].str();
        for (sj::Value token : j["choices"][(size_t)0]["logprobs"]["tokens"].items()) tokens += token.str();
    }
    CHECK(streamed == one[0]);
    CHECK(tokens == one[0]);

    const Json counted(server.post("/tokenize", "{\"prompt\": " + quoted + "}").body);
    CHECK(sj::dump(counted["tokens"]) == ids);
    CHECK(counted["count"].number() == (double)t.encode(text, false).size());
    CHECK(Json(server.post("/detokenize", "{\"tokens\": " + ids + "}").body)["prompt"].str() == text);
    // As lm-evaluation-harness asks for vLLM's ids: special tokens in the text count as such.
    const Json special(server.post("/tokenize", "{\"add_special_tokens\": false, \"prompt\": " + quoted + "}").body);
    CHECK(special["count"].number() == (double)t.encode(text, true).size());
    CHECK(special["count"].number() < counted["count"].number());
    check_refused(server.post("/tokenize", R"({"prompt": "a", "add_special_tokens": 1})"), 400, "add_special_tokens");
    const Json chat(server.post("/tokenize", question("hi", "")).body);
    CHECK(chat["count"].number() == (double)render_chat(t, {{"user", "hi"}}).size());
}

TEST_CASE("/tokenizer_info: the special tokens by name, and the chat template") {
    Serving server;
    const HttpReply told = Http(server.port).call("GET", "/tokenizer_info");
    REQUIRE(told.status == 200);
    const Json info(told.body);
    CHECK(info["tokenizer_class"].str() == "Qwen2Tokenizer");
    CHECK(info["bos_token"].is(sj::Null));
    CHECK(tiny().tokenizer.id(info["eos_token"].str()) == tiny().file.config.end_tokens.at(0));
    CHECK(info["pad_token"].str() == "<|endoftext|>");
    // Qwen3's template, but it asks first whether names are defined that may not be; and one that a model brings.
    std::string jinja = info["chat_template"].str();
    const std::string first = "{%- set tools = tools | default(none) %}\n", asks = "m.tool_calls is defined and ";
    REQUIRE(jinja.compare(0, first.size(), first) == 0);
    jinja.erase(0, first.size());
    const size_t at = jinja.find(asks);
    REQUIRE(at != jinja.npos);
    jinja.erase(at, asks.size());
    CHECK(jinja == QWEN3_JINJA);
    ModelFile own(MODEL);
    own.chat_template = "{%- if message.tool_calls %}<|im_start|>{%- endif %}";
    CHECK(Json(tokenizer_info(own, tiny().tokenizer))["chat_template"].str() == first +
          "{%- if message.tool_calls is defined and message.tool_calls %}<|im_start|>{%- endif %}");
    check_refused(server.post("/tokenizer_info", "{}"), 405, "GET");
}

TEST_CASE("roles, parts, a system prompt, thinking") {
    Serving server({"--system", "Be brief."});
    auto tokens = [&](const std::string& messages) {
        const HttpReply r = server.post("/tokenize", "{\"messages\": " + messages + "}");
        INFO(r.body);
        REQUIRE(r.status == 200);
        return sj::dump(Json(r.body)["tokens"]);
    };
    CHECK(tokens(R"([{"role": "user", "content": "a"}])") == tokens(R"([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}])"));
    CHECK(tokens(R"([{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])") ==
          tokens(R"([{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}])"));
    const std::string mark = std::to_string(tiny().tokenizer.id("<|im_end|>"));
    auto marks = [&](const std::string& messages) { // what ends a turn
        size_t n = 0;
        const std::string ids = tokens(messages);
        for (size_t at = 0; (at = ids.find(mark, at)) != std::string::npos; at++) n++;
        return n;
    };
    CHECK(marks(R"([{"role": "user", "content": "a"}])") == 2);
    CHECK(marks(R"([{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb<|im_end|>"}])") == 2);
    tokens(R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
               {"role": "tool", "content": "r", "tool_call_id": "1"}])");
    // The tiny model begins a thought if it is made to: every token of it is the same one, too.
    const std::string force = format("\"logit_bias\": {\"%d\": 100}, \"max_tokens\": 3, \"temperature\": 0", tiny().tokenizer.id("<think>"));
    const Json thinks(server.chat(question("a", force + ", \"chat_template_kwargs\": {\"enable_thinking\": true}")).body);
    CHECK(thinks["choices"][(size_t)0]["message"]["content"].str() == "");
    CHECK(thinks["choices"][(size_t)0]["message"]["reasoning_content"].str() == "<think><think>");
    const Json plain(server.chat(question("a", force)).body);
    CHECK(plain["choices"][(size_t)0]["message"]["content"].str() == "<think><think><think>");
    CHECK(thinks["usage"]["prompt_tokens"].number() < plain["usage"]["prompt_tokens"].number()); // no empty thought there
    const HttpReply r = server.chat(question("a", force + ", \"stream\": true, \"chat_template_kwargs\": {\"enable_thinking\": true}"));
    CHECK(joined(r)[0] == "");
    CHECK(r.body.find("\"reasoning_content\": \"<think>\"") != std::string::npos);
}

TEST_CASE("what is malformed or out of range is refused by name") {
    Serving server; // a context of 4096
    for (auto [more, param] : std::initializer_list<std::pair<const char*, const char*>>{
             {"\"temperature\": -0.1", "temperature"}, {"\"temperature\": 2.1", "temperature"}, {"\"temperature\": 1e999", "temperature"},
             {"\"temperature\": \"hot\"", "temperature"}, {"\"top_p\": 1.01", "top_p"}, {"\"top_p\": -1", "top_p"}, {"\"top_p\": []", "top_p"},
             {"\"top_k\": -2", "top_k"}, {"\"top_k\": 1.5", "top_k"}, {"\"top_k\": 99999999999999999999", "top_k"}, {"\"min_p\": 2", "min_p"},
             {"\"seed\": 1.5", "seed"}, {"\"seed\": \"1\"", "seed"}, {"\"seed\": 1e300", "seed"}, {"\"max_tokens\": 0", "max_tokens"},
             {"\"max_tokens\": -1", "max_tokens"}, {"\"max_tokens\": 1e3", "max_tokens"}, {"\"max_completion_tokens\": 0", "max_completion_tokens"},
             {"\"max_tokens\": 4097", "messages"}, {"\"n\": 0", "n"}, {"\"n\": 129", "n"}, {"\"n\": true", "n"}, {"\"stop\": 5", "stop"}, {"\"stop\": \"\"", "stop"},
             {"\"stop\": [\"a\", 5]", "stop"}, {"\"stop\": [\"\"]", "stop"}, {"\"logprobs\": 1", "logprobs"}, {"\"top_logprobs\": 1", "top_logprobs"},
             {"\"logprobs\": true, \"top_logprobs\": 21", "top_logprobs"}, {"\"presence_penalty\": 2.5", "presence_penalty"},
             {"\"frequency_penalty\": -3", "frequency_penalty"}, {"\"repetition_penalty\": 0", "repetition_penalty"}, {"\"logit_bias\": []", "logit_bias"},
             {"\"logit_bias\": {\"x\": 1}", "logit_bias"}, {"\"logit_bias\": {\"-1\": 1}", "logit_bias"}, {"\"logit_bias\": {\"99999\": 1}", "logit_bias"},
             {"\"logit_bias\": {\"5\": 101}", "logit_bias"}, {"\"logit_bias\": {\"5\": \"1\"}", "logit_bias"}, {"\"logit_bias\": {\"99999999999999999999\": 1}", "logit_bias"},
             {"\"ignore_eos\": 1", "ignore_eos"}, {"\"stream\": \"yes\"", "stream"}, {"\"stream_options\": {}", "stream_options"},
             {"\"stream\": true, \"stream_options\": {\"include_usage\": 1}", "include_usage"}, {"\"stream\": true, \"stream_options\": 1", ""},
             {"\"user\": 1", "user"}, {"\"chat_template_kwargs\": {\"enable_thinking\": 1}", "enable_thinking"}, {"\"chat_template_kwargs\": 1", ""},
             {"\"tools\": [{}]", "tools"}, {"\"response_format\": {\"type\": \"json\"}", "response_format"}, {"\"messages\": 1", "messages"},
             {"\"n\": 128, \"logprobs\": true, \"top_logprobs\": 20, \"max_tokens\": 3901", "top_logprobs"},
             {"\"messages\": []", "messages"}, {"\"messages\": [1]", "messages"}, {"\"messages\": [{\"role\": \"king\", \"content\": \"a\"}]", "messages"},
             {"\"messages\": [{\"role\": \"user\"}]", "messages"}, {"\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]", "messages"}}) {
        const HttpReply r = server.chat(question("a", more));
        INFO(r.body);
        check_refused(r, 400, param);
    }
    check_refused(server.chat(question("a", "\"model\": \"other\"")), 404, "model");
    CHECK(server.chat(question("a", "\"model\": \"tiny\", \"seed\": null, \"stop\": null, \"max_tokens\": 1, \"session_id\": \"s\"")).status == 200);
    for (const char* prompt : {"\"\"", "[]", "5", "[1.5]", "[-1]", "[1024]", "[[]]", "[\"a\", 1]", "[[1], {}]", "null"})
        check_refused(server.post("/v1/completions", format("{\"prompt\": %s}", prompt)), 400, "prompt");
    check_refused(server.post("/v1/completions", "{\"prompt\": \"a\", \"n\": 2, \"best_of\": 3}"), 400, "best_of");
    check_refused(server.post("/tokenize", "{}"), 400, "prompt");
    check_refused(server.post("/detokenize", "{\"tokens\": [99999]}"), 400, "tokens");

    std::string words;
    for (int i = 0; i < 5000; i++) words += "warp ";
    const HttpReply long_one = server.chat(question(words, ""));
    check_refused(long_one, 400, "messages");
    CHECK(Json(long_one.body)["error"]["code"].str() == "context_length_exceeded");
    check_refused(server.post("/v1/completions", "{\"prompt\": [" + many(129, "\"a\"") + "]}"), 400, "prompt");
    check_refused(server.post("/v1/completions", "{\"prompt\": [" + many(65, "\"a\"") + "], \"n\": 2}"), 400, "n");
    check_refused(server.post("/v1/completions", "{\"prompt\": \"a\", \"logprobs\": 21}"), 400, "logprobs");
    check_refused(server.chat(question("a", "\"stop\": [" + many(17, "\"a\"") + "]")), 400, "stop");
    check_refused(server.chat(question("a", "\"stop\": \"" + std::string(129, 'x') + "\"")), 400, "stop");
    check_refused(server.chat(question("a", "\"logit_bias\": {" + many(1025, "\"5\": 1") + "}")), 400, "logit_bias");
    check_refused(server.chat(question("a", many(1000, "\"x\": 1"))), 400);
    CHECK(server.chat(question("a", "\"max_tokens\": 1, \"stop\": [" + many(16, "\"" + std::string(128, 'x') + "\"") + "], \"logit_bias\": {" +
                                        many(1024, "\"5\": 1") + "}")).status == 200);
    check_refused(server.post("/tokenize", "{\"prompt\": 5}"), 400, "prompt");
    check_refused(server.post("/detokenize", "{\"tokens\": \"a\"}"), 400, "tokens");

    for (std::string body : {"", "{", "[]", "5", "nonsense", "{\"messages\": \"\xff\"}", "{\"a\": NaN}", "{} {}", "{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}]}"})
        check_refused(server.chat(body), 400);
    check_refused(server.chat(std::string(300, '[') + std::string(300, ']')), 400);
    server.check_idle();
}

TEST_CASE("HTTP: routes, methods, types, hosts, sizes") {
    Serving server;
    const std::string good = question("a", "\"max_tokens\": 1");
    for (const char* path : {"/nothing", "/index.html", "//v1/models", "/../../etc/passwd", "/v1/models/..%2f..%2fetc/passwd", "/tests/unit/test_serve.cpp"})
        CHECK(Http(server.port).call("GET", path).status == 404);
    const HttpReply wrong = Http(server.port).call("GET", "/v1/chat/completions");
    CHECK(wrong.status == 405);
    CHECK(wrong.headers.at("allow") == "POST");
    check_refused(server.post("/health", "{}"), 405, "GET");
    check_refused(server.chat(""), 400);
    CHECK(Http(server.port).call("GET", "/health").status == 200);
    const Json models(Http(server.port).call("GET", "/v1/models").body);
    CHECK(models["data"][(size_t)0]["id"].str() == "tiny");
    CHECK(Json(Http(server.port).call("GET", "/v1/models/tiny").body)["id"].str() == "tiny");
    check_refused(Http(server.port).call("GET", "/v1/models/other"), 404, "model");

    auto raw = [&](const std::string& text) {
        Http h(server.port);
        h.send(text);
        return h.reply();
    };
    const std::string length = format("Content-Length: %zu\r\n", good.size()), post = "POST /v1/chat/completions HTTP/1.1\r\n";
    CHECK(raw(post + "Host: localhost:99\r\nContent-Type: application/json; charset=utf-8\r\n" + length + "\r\n" + good).status == 200);
    CHECK(raw(post + "Host: [::1]:99\r\nContent-Type: application/json\r\n" + length + "\r\n" + good).status == 200);
    CHECK(raw(post + "Host: 127.0.0.1\r\nContent-Type: application/json\r\n" + length + "\r\n" + good).status == 200);
    check_refused(raw(post + "Host: evil.example\r\nContent-Type: application/json\r\n" + length + "\r\n" + good), 403);
    check_refused(raw(post + "Host: localhost.evil.example:80\r\nContent-Type: application/json\r\n" + length + "\r\n" + good), 403);
    check_refused(raw(post + "Host: localhost\r\nContent-Type: text/plain\r\n" + length + "\r\n" + good), 415);
    check_refused(raw(post + "Host: localhost\r\n" + length + "\r\n" + good), 415);
    check_refused(raw(post + "Host: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n" + length + "\r\n" + good), 415);
    check_refused(raw(post + "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"), 413);
    CHECK(raw(post + "Host: localhost\r\nBig: " + std::string(60'000, 'x') + "\r\n\r\n").status >= 400);
    Serving other({"--host", "127.0.0.2"}); // loopback, too
    for (auto [host, status] : {std::pair{"127.0.0.2:80", 200}, {"localhost", 200}, {"evil.example", 403}}) {
        Http h(other.port, "127.0.0.2");
        h.send(format("GET /health HTTP/1.1\r\nHost: %s\r\n\r\n", host));
        CHECK(h.reply().status == status);
    }
    // in chunks: first small enough, then not
    std::string chunked = post + "Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    CHECK(raw(chunked + format("%zx\r\n", good.size()) + good + "\r\n0\r\n\r\n").status == 200);
    std::string much;
    for (int i = 0; i < 9; i++) much += "100000\r\n" + std::string(1 << 20, ' ') + "\r\n";
    check_refused(raw(chunked + much + "0\r\n\r\n"), 413);

    Http kept(server.port); // one connection, many requests, good and bad in turn
    for (int i = 0; i < 20; i++) {
        CHECK(kept.call("POST", "/v1/chat/completions", good).status == 200);
        CHECK(kept.call("POST", "/v1/chat/completions", "{").status == 400);
        CHECK(kept.call("GET", "/health").status == 200);
    }
    CHECK(kept.call("GET", "/v1/models", "", "Origin: http://any.example\r\n").headers.count("access-control-allow-origin") == 0);
}

static size_t count_of(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) n++;
    return n;
}

TEST_CASE("HTTP: HEAD is GET without a body") {
    Serving server;
    for (const char* path : {"/", "/health", "/version", "/metrics", "/openapi.json", "/v1/models", "/v1/models/tiny", "/nothing", "/v1/chat/completions"}) {
        INFO(std::string(path));
        Http http(server.port);
        http.ask("HEAD", path);
        const HttpReply head = http.head();
        const HttpReply get = http.call("GET", path); // what came next is its first line
        CHECK(head.status == get.status);
        CHECK(head.headers.at("content-type") == get.headers.at("content-type"));
        if (strcmp(path, "/metrics")) CHECK(head.headers.at("content-length") == get.headers.at("content-length"));
    }
    CHECK(Http(server.port).call("GET", "/metrics").body.find("{method=\"HEAD\",handler=\"/health\",status=\"200\"} 1\n") != std::string::npos);
}

TEST_CASE("the board for Grafana names what /metrics has") {
    Serving server;
    Http http(server.port);
    http.call("GET", "/health"); // (it is counted when it has ended, which the next one of its connection waits for)
    const std::string all = http.call("GET", "/metrics").body, text = read_file("deploy/grafana.json");
    const Json board(text);
    CHECK(board["panels"][8]["title"].str() == "Preempted and dropped"); // (it is JSON to the end)
    const std::regex name("(vllm:|http_)[a-z0-9_]+");
    std::set<std::string> names;
    for (std::sregex_iterator at(text.begin(), text.end(), name), end; at != end; ++at) names.insert(at->str());
    CHECK(names.size() >= 14);
    for (const std::string& one : names) {
        INFO(one);
        CHECK(all.find("\n" + one + "{") != std::string::npos);
    }
}

static const std::string BROWSER = "Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n";

TEST_CASE("GET / is the page for a browser, the course's health for programs") {
    for (const char* status : {"", "ok"}) {
        const Serving server(*status ? Strings{"--predict-status", status} : Strings{});
        for (const char* accept : {"", "Accept: */*\r\n", "Accept: application/json\r\n"}) {
            const HttpReply r = Http(server.port).call("GET", "/", "", accept);
            CHECK(r.status == 200);
            CHECK(r.headers.at("content-type") == "application/json");
            CHECK(r.headers.at("vary") == "Accept");
            CHECK(r.body == format(R"({"status": "%s"})", *status ? status : "batch"));
        }
        CHECK(Http(server.port).call("GET", "/", "", BROWSER).headers.at("content-type") == "text/html; charset=utf-8");
    }
    check_refusal(Process(PROGRAM, {MODEL, "--predict-status", "all"}).wait(), "serve", "--predict-status all: batch or ok");
    const MemoryFile nothing("\n");
    const std::string empty = format("/proc/%d/fd/%d", (int)getpid(), nothing.fd);
    check_refusal(Process(PROGRAM, {MODEL, "--predict-system", empty}).wait(), "serve", "--predict-system " + empty + ": the file is empty");
    check_refusal(Process(PROGRAM, {MODEL, "--predict-system", "lost"}).wait(), "serve", "lost");
}

TEST_CASE("/predict: one answer or as many as prompts, greedy, as a chat without a thought has them") {
    const Strings asked = {"What is a warp?", "什么是 warp？", "", "😀 \\ \" \n <|im_end|>"};
    auto quoted = [](const std::string& text) {
        sj::Writer w;
        return w.value(text).text;
    };
    auto chat = [&](const Serving& server, const std::string& prompt, const std::string& system, int most) {
        const std::string before = system.empty() ? "" : R"({"role": "system", "content": )" + quoted(system) + "}, ";
        return content(server.chat("{\"messages\": [" + before + R"({"role": "user", "content": )" + quoted(prompt) +
            format("}], \"temperature\": 0, \"max_tokens\": %d, \"chat_template_kwargs\": {\"enable_thinking\": false}}", most)));
    };
    const MemoryFile system("You answer\nin one line.\n\n");
    for (const bool options : {false, true}) {
        Strings arguments = {"--ctx", "512", "--think", "1", "-y", "All of them."};
        if (options)
            arguments.insert(arguments.end(), {"--predict-system", format("/proc/%d/fd/%d", (int)getpid(), system.fd), "--predict-max-tokens", "7"});
        Serving server(arguments);
        const std::string prompt_of_system = options ? "You answer\nin one line." : "";
        std::string list;
        Strings wanted;
        for (auto& prompt : asked) {
            list += (list.empty() ? "" : ", ") + quoted(prompt);
            wanted.push_back(chat(server, prompt, prompt_of_system, options ? 7 : 384));
            const Json one(server.post("/predict", "{\"prompt\": " + quoted(prompt) + "}").body);
            CHECK(one["response"].str() == wanted.back());
            CHECK(one.root().size() == 1);
        }
        CHECK(wanted[0] != wanted[1]);
        const Json many(server.post("/predict", R"({"id": 7, "prompt": [)" + list + "]}").body); // (what is not known is ignored)
        REQUIRE(many["response"].size() == asked.size());
        for (size_t i = 0; i < asked.size(); i++) CHECK(many["response"][i].str() == wanted[i]);

        // Prompts that the context has no room for get an empty response, and cost the others nothing.
        std::string words;
        for (int i = 0; i < 600; i++) words += "warp ";
        const std::string tokens = quoted(words), bytes = quoted(std::string(2'000'000, 'x'));
        const Json mixed(server.post("/predict", "{\"prompt\": [" + tokens + ", " + list + ", " + bytes + "]}").body);
        REQUIRE(mixed["response"].size() == asked.size() + 2);
        CHECK(mixed["response"][(size_t)0].str("none") == "");
        CHECK(mixed["response"][asked.size() + 1].str("none") == "");
        for (size_t i = 0; i < asked.size(); i++) CHECK(mixed["response"][i + 1].str() == wanted[i]);
        CHECK(server.post("/predict", "{\"prompt\": " + tokens + "}").body == R"({"response": ""})");
        CHECK(server.post("/predict", R"({"prompt": []})").body == R"({"response": []})");
        CHECK(server.post("/predict", "{\"prompt\": [" + bytes + "]}").body == R"({"response": [""]})");
        for (const char* wrong : {"{}", R"({"prompt": null})", R"({"prompt": 1})", R"({"prompt": {}})", R"({"prompt": ["a", 1]})", R"({"prompt": ["a", null]})"})
            check_refused(server.post("/predict", wrong), 400, "prompt");
        check_refused(server.post("/predict", "[]"), 400);
        check_refused(Http(server.port).call("GET", "/predict"), 405, "POST");
        const std::string log = server.stop().out;
        CHECK(log.find(format("\"unanswered\": [0, %zu]", asked.size() + 1)) != std::string::npos);
        CHECK(count_of(log, "\"unanswered\"") == 3);
    }
}

TEST_CASE("/predict: 300 prompts are one request; a list that the queue has no room for is refused whole") {
    const Serving server({"--ctx", "256", "--predict-max-tokens", "3"});
    auto body = [](size_t n) {
        std::string list;
        for (size_t i = 0; i < n; i++) list += format("%s\"What is %zu?\"", i ? ", " : "", i);
        return "{\"prompt\": [" + list + "]}";
    };
    const Json many(server.post("/predict", body(300)).body);
    REQUIRE(many["response"].size() == 300);
    CHECK(many["response"][299].str() == Json(server.post("/predict", R"({"prompt": "What is 299?"})").body)["response"].str());
    check_refused(server.post("/predict", body(1041)), 400, "prompt"); // --max-queue 1024, 16 at once
    server.check_idle();
}

TEST_CASE("the page to chat on: headers, title, a number of its own each time") {
    const MemoryFile keys("a-key\n");
    Serving server({"--title", "A <b> & \"c\" {{nonce}}", "--think", "1", "--api-key-file", format("/proc/%d/fd/%d", (int)getpid(), keys.fd)});
    std::string before;
    for (int i = 0; i < 2; i++) {
        const HttpReply r = Http(server.port).call("GET", "/", "", BROWSER); // without a key
        REQUIRE(r.status == 200);
        CHECK(r.headers.at("content-type") == "text/html; charset=utf-8");
        CHECK(r.headers.at("x-content-type-options") == "nosniff");
        CHECK(r.headers.at("cache-control") == "no-store");
        CHECK(r.headers.at("referrer-policy") == "no-referrer");
        const std::string policy = r.headers.at("content-security-policy"), mark = "script-src 'nonce-";
        REQUIRE(policy.find(mark) != std::string::npos);
        const std::string nonce = policy.substr(policy.find(mark) + mark.size(), 32);
        INFO(policy);
        CHECK(nonce.find_first_not_of("0123456789abcdef") == std::string::npos);
        CHECK(nonce != std::exchange(before, nonce));
        CHECK(policy.find("unsafe") == std::string::npos);
        for (const char* part : {"default-src 'none';", "connect-src 'self';", "base-uri 'none';", "form-action 'none';", "frame-ancestors 'none';",
                                 "require-trusted-types-for 'script';"})
            CHECK(policy.find(part) != std::string::npos);
        CHECK(count_of(r.body, "nonce=\"" + nonce + "\"") == 2); // its style and its script
        CHECK(count_of(r.body, "<script") == 1);
        CHECK(policy.find("trusted-types math") == policy.size() - 18); // one policy, which gives one address
        CHECK(count_of(r.body, "<style") == 1);
        CHECK(r.body.find("<title>A &#60;b&#62; &#38; &#34;c&#34; {{nonce}}</title>") != std::string::npos); // what was filled in is not looked at
        CHECK(r.body.find("data-think=\"1\"") != std::string::npos);
        CHECK(r.body.substr(r.body.size() - 8) == "</html>\n");
    }
    const HttpReply script = Http(server.port).call("GET", "/temml.js"); // without a key
    CHECK(script.status == 200);
    CHECK(script.headers.at("content-type") == "text/javascript; charset=utf-8");
    CHECK(script.headers.at("x-content-type-options") == "nosniff");
    const std::string licence = read_file("server/page/LICENSE-temml");
    CHECK(script.body == "/*\n" + licence + "*/\n" + read_file("server/page/temml.min.js"));
    for (const char* path : {"/", "/temml.js"})
        check_refused(server.post(path, "{}", "Authorization: Bearer a-key\r\n"), 405, "GET");
    Http strange(server.port);
    strange.send("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n");
    check_refused(strange.reply(), 403);
}

static std::string page_of(const Serving& server) { return Http(server.port).call("GET", "/", "", BROWSER).body; }

TEST_CASE("the page to chat on offers --starter, else the model's own questions, else neutral ones") {
    Scratch scratch;
    const std::string model = with_starters(MODEL, {"What is \"x\"?", "什么是 <b>？"}, scratch / "m.bin");
    const std::pair<Strings, std::string> cases[] = {
        {{model}, "[&#34;What is \\&#34;x\\&#34;?&#34;, &#34;什么是 &#60;b&#62;？&#34;]"},
        {{model, "--starter", "a", "--starter", "b"}, "[&#34;a&#34;, &#34;b&#34;]"},
        {{MODEL}, "[]"}};
    for (auto& [words, wanted] : cases) {
        Serving server({words.begin() + 1, words.end()}, [] {}, words[0]);
        CHECK(page_of(server).find("data-starters=\"" + wanted + "\"") != std::string::npos);
    }
    const std::string page = page_of(Serving());
    for (const char* word : {"warp?", "CUDA", "GPU", "warp？"})
        CHECK_MESSAGE(page.find(word) == page.npos, std::string(word));
    check_refusal(Process(PROGRAM, {MODEL, "--starter", std::string(301, 'a')}).wait(), "serve",
                  "--starter: a question is not 1 to 300 bytes of UTF-8");
}

TEST_CASE("the page to chat on needs nothing from elsewhere, and has no way from text to HTML") {
    const std::string page = page_of(Serving());
    REQUIRE(page.size() > 10'000);
    CHECK(page.find(".js}}") == page.npos); // each part is in its place
    for (const char* part : {"innerHTML", "outerHTML", "insertAdjacent", "document.write", "DOMParser", "eval(", "Function(", "import(", "createContextualFragment",
                             "@import", "url(", "<iframe", "<object", "<img", "src=", "srcdoc", "style=", "importScripts", "WebSocket", "sendBeacon", ")page\""})
        CHECK_MESSAGE(page.find(part) == std::string::npos, std::string(part));
    for (size_t at = 0; (at = page.find("://", at)) != std::string::npos; at++) { // names of XML, never fetched
        const std::string url = page.substr(at - 4, 34);
        CHECK_MESSAGE((url.find("http://www.w3.org/2000/svg") == 0 || url == "http://www.w3.org/1998/Math/MathML"), url);
    }
    for (size_t at = 0; (at = page.find("href=\"", at)) != std::string::npos; at++) CHECK(page.compare(at + 6, 5, "data:") == 0);
}

TEST_CASE("requests that come in share a room: slow senders lose theirs; those that are being answered need none") {
    Serving server({"--max-seqs", "1"});
    const std::string padded = question("a", "\"n\": 8, \"max_tokens\": 4000, \"ignore_eos\": true" + std::string(8'000'000, ' '));
    const std::string head = format("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                                    "Content-Length: %zu\r\n\r\n", padded.size());
    std::vector<std::unique_ptr<Http>> clients;
    auto send = [&](int n, size_t bytes) {
        for (int i = 0; i < n; i++) {
            clients.push_back(std::make_unique<Http>(server.port));
            clients.back()->send(head + padded.substr(0, bytes));
        }
    };
    const double start = seconds();
    send(36, padded.size() - 1); // 288 MB in all, and there is room for 268 MB
    Http kept(server.port);
    while (server.metric("dropped_requests_total") < 3) { // while others are served
        REQUIRE(kept.call("POST", "/tokenize", "{\"prompt\": \"a\"}").status == 200);
        REQUIRE(seconds() - start < 150);
        usleep(5000);
    }
    for (auto& c : clients) c->send("}"); // now they wait for their answers, or are told
    auto waiting = [&](size_t n) {
        while (server.metric("num_requests_waiting") < 8 * (double)n) {
            REQUIRE(seconds() - start < 150);
            REQUIRE(kept.call("POST", "/tokenize", "{\"prompt\": \"a\"}").status == 200);
            usleep(5000);
        }
    };
    waiting(28);
    size_t refused = 0;
    for (auto& c : clients) {
        pollfd p = {c->fd, POLLIN, 0};
        if (poll(&p, 1, 0) != 1) continue;
        const HttpReply r = c->reply();
        check_refused(r, 503);
        CHECK(r.headers.at("retry-after") == "1");
        refused++;
    }
    CHECK(refused >= 3);
    send(10, padded.size());
    waiting(35); // more than could come in at once
    clients.clear();
    server.check_idle(60); // (280 jobs end)
}

TEST_CASE("long texts are tokenized beside all else") {
    Serving server;
    const bool slow = strstr(PROGRAM, "tsan") || strstr(PROGRAM, "asan");
    const std::string body = "{\"prompt\": \"" + std::string(slow ? 200'000 : 2'000'000, '=') + "\"}";
    std::vector<std::unique_ptr<Http>> clients;
    const double start = seconds();
    for (int i = 0; i < 8; i++) clients.push_back(std::make_unique<Http>(server.port)), clients.back()->ask("POST", "/tokenize", body);
    double slowest = 0;
    Http other(server.port);
    for (auto& c : clients)
        for (pollfd p = {c->fd, POLLIN, 0}; poll(&p, 1, 0) == 0; usleep(2000)) {
            const double asked = seconds();
            REQUIRE(Http(server.port).call("GET", "/health").status == 200);
            REQUIRE(other.call("POST", "/tokenize", "{\"prompt\": \"a\"}").status == 200);
            slowest = std::max(slowest, seconds() - asked);
        }
    const double all = seconds() - start;
    for (auto& c : clients) CHECK(c->reply().status == 200);
    INFO(all << " s for all, " << slowest << " s for the slowest small one");
    CHECK(slowest < std::max(0.1, all / 6));
}

TEST_CASE("answers that nobody reads are made as they are read") {
    Serving server({"--ctx", "128", "--kv-memory", "0.01"});
    const bool sanitized = strstr(PROGRAM, "tsan") || strstr(PROGRAM, "asan"); // slow, and keeps what is let go
    const int count = sanitized ? 2 : 12;
    std::vector<std::unique_ptr<Http>> clients;
    const std::string body = question("a", "\"n\": 40, \"max_tokens\": 20, \"ignore_eos\": true, \"logprobs\": true, \"top_logprobs\": 20");
    CHECK(server.chat(body).status == 200);
    const size_t before = server.memory();
    for (int i = 0; i < count; i++) {
        clients.push_back(std::make_unique<Http>(server.port));
        clients.back()->ask("POST", "/v1/chat/completions", body);
    }
    for (auto& c : clients) {
        c->patience = 60'000;
        CHECK(c->head().status == 200);
    }
    const double grown = (double)(server.memory() - before) / 1e6;
    INFO(grown << " MB more for 12 answers of 1.4 MB each");
    if (!sanitized) CHECK(grown < 10);
    std::string all;
    while (clients[0]->chunk(all)) {}
    CHECK(all.size() > 1'300'000);
    const Json j(all);
    CHECK(j["choices"].size() == 40);
    CHECK(j["choices"][39]["logprobs"]["content"].size() == 20);
}

TEST_CASE("a stalled stdout delays nobody, and what it misses is counted") {
    int ends[2];
    REQUIRE(pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0);
    while (write(ends[1], "x", 1) == 1) {}
    fcntl(ends[1], F_SETFL, 0);
    Serving server({}, [&] { dup2(ends[1], 1); });
    close(ends[1]);
    Http http(server.port);
    for (int i = 0; i < 20'000 && (i % 1000 || server.metric("dropped_log_lines_total") == 0); i++) {
        http.patience = 5000;
        REQUIRE(http.call("GET", "/health").status == 200);
    }
    CHECK(server.metric("dropped_log_lines_total") > 0);
    CHECK(server.chat(question("a", "\"max_tokens\": 3")).status == 200);
    std::string said;
    for (const double start = seconds(); said.find("lines_dropped") == std::string::npos; usleep(1000)) { // once someone reads
        REQUIRE(seconds() - start < 10);
        char some[65536];
        const ssize_t n = read(ends[0], some, sizeof some);
        if (n > 0) said.append(some, (size_t)n);
    }
    const Strings log = lines(said.substr(said.find('{'), said.rfind('\n') + 1 - said.find('{')));
    CHECK(log.size() > 1000);
    for (auto& line : log) Json j(line);
    const double start = seconds();
    CHECK(server.stop().status == 0); // and nobody reads again
    CHECK(seconds() - start < 5);
    close(ends[0]);
}

TEST_CASE("the log holds nobody up at the end: what stdout does not take within its time is left") {
    for (bool over : {true, false}) { // the time that it has
        int ends[2];
        REQUIRE(pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0);
        double start;
        {
            Log log(ends[1]);
            log.write("first\n");
            for (pollfd there = {ends[0], POLLIN, 0}; poll(&there, 1, 1000) == 0;) {}
            while (write(ends[1], "x", 1) == 1) {} // nobody reads
            log.write("second\n");
            if (over) log.end = seconds();
            start = seconds();
        }
        const double took = seconds() - start;
        if (over) CHECK(took < 0.8 * Log::PATIENCE);
        else CHECK(took > 0.9 * Log::PATIENCE);
        char some[8];
        CHECK(std::string(some, (size_t)std::max<ssize_t>(0, read(ends[0], some, 6))) == "first\n");
        close(ends[0]), close(ends[1]);
    }
    // Data that it accepts at once are written, whatever the time.
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    {
        Log log(ends[1]);
        log.end = 0;
        for (int i = 0; i < 100; i++) log.write("line\n");
    }
    char some[1000];
    CHECK(read(ends[0], some, sizeof some) == 500);
    close(ends[0]), close(ends[1]);
}

TEST_CASE("the log writes whole lines to a terminal that takes a part of them at a time") {
    int ends[2] = {posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC), -1};
    REQUIRE((ends[0] >= 0 && grantpt(ends[0]) == 0 && unlockpt(ends[0]) == 0));
    REQUIRE((ends[1] = open(ptsname(ends[0]), O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC)) >= 0);
    termios raw;
    tcgetattr(ends[1], &raw), cfmakeraw(&raw), tcsetattr(ends[1], TCSANOW, &raw);
    std::string wanted, said;
    for (int i = 0; i < 20000; i++) wanted += format("line %d\n", i);
    {
        Log log(ends[1]);
        for (auto& line : lines(wanted)) log.write(line + "\n");
        for (const double start = seconds(); said.size() < wanted.size() && seconds() - start < 10;) {
            char some[4096];
            const ssize_t n = read(ends[0], some, sizeof some);
            if (n > 0) said.append(some, (size_t)n);
            else usleep(100);
        }
    }
    CHECK((said == wanted)); // (not shown)
    close(ends[0]), close(ends[1]);
}

TEST_CASE("an answer that nobody reads holds no drain up") {
    for (int i = 0; i < 2; i++) {
        Serving server({"--drain-seconds", "0"});
        Http kept(server.port), deaf(server.port);
        CHECK(kept.call("GET", "/health").status == 200);
        deaf.ask("POST", "/v1/chat/completions", question("a", "\"n\": 64, \"max_tokens\": 3000, \"ignore_eos\": true, \"stream\": true"));
        CHECK(deaf.head().status == 200);
        while (server.metric("generation_tokens_total") < 2000) usleep(1000);
        const double start = seconds();
        CHECK(server.stop().status == 0);
        CHECK(seconds() - start < 4);
    }
}

TEST_CASE("whoever asks how it is waits for no engine, whatever locks that holds") {
    ServerOptions options;
    options.port = 0, options.log = open("/dev/null", O_WRONLY | O_CLOEXEC);
    Desk desk;
    desk.limit = 10;
    Server server(options, desk);
    server.service = {&tiny().tokenizer, "tiny", "", 256, false};
    server.start();
    server.ready = true;
    const int port = server.port();
    Http waits(port), streams(port);
    waits.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 3"));
    streams.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 3, \"stream\": true"));
    CHECK(streams.head().status == 200);
    std::vector<Job> taken; // by an engine,
    while (taken.size() < 2) {
        std::lock_guard lock(desk.mutex);
        for (Job& job : desk.inbox) taken.push_back(std::move(job));
        desk.inbox.clear();
        usleep(1000);
    }
    std::atomic<bool> over{false};
    std::thread looks;
    {
        // ... which has lost its core where it holds all that it ever holds.
        std::unique_lock jobs(desk.mutex), unsent(desk.unsent.mutex), first(taken[0].reply->mutex), second(taken[1].reply->mutex);
        looks = std::thread([&] {
            for (; !over; usleep(2000)) server.watch();
        });
        usleep(50'000);
        for (int i = 0; i < 3; i++)
            for (const std::string path : {"/health", "/ping", "/version", "/metrics"}) {
                INFO(path);
                int status = 0;
                try {
                    Http http(port);
                    http.patience = 5000;
                    status = http.call("GET", path).status;
                } catch (const Error& e) {
                    MESSAGE(e.what());
                }
                CHECK(status == 200);
                if (!status) i = 3; // (once is enough)
            }
        over = true;
    }
    looks.join();
    for (Job& job : taken) {
        std::lock_guard lock(job.reply->mutex);
        job.reply->left = 0, job.reply->cancelled = true;
        if (job.reply->wake) job.reply->wake();
    }
    server.stop();
    server.daemon = nullptr;
    close(options.log);
}

TEST_CASE("HTTP: what a proxy may read otherwise is refused, and the connection closed") {
    Serving server;
    const std::string good = question("a", "\"max_tokens\": 1"), post = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    const std::string length = format("Content-Length: %zu\r\n", good.size()), chunk = format("%zx\r\n", good.size()) + good + "\r\n0\r\n\r\n";
    auto closed = [&](const std::string& text, int status) {
        INFO(text);
        Http h(server.port);
        h.patience = 3000;
        h.send(text);
        const HttpReply r = h.reply();
        check_refused(r, status);
        CHECK(r.headers.at("connection") == "close");
        char byte;
        CHECK(recv(h.fd, &byte, 1, 0) <= 0);
    };
    closed(post + length + "Content-Length: 5\r\n\r\n" + good, 400);
    closed(post + length + length + "\r\n" + good, 400);
    closed(post + length + "Transfer-Encoding: chunked\r\n\r\n" + chunk, 400);
    closed(post + length + "Host: localhost\r\n\r\n" + good, 400);
    for (const char* encoding : {"gzip", "xchunked", "identity", "gzip, chunked", "chunked, chunked"})
        closed(post + "Transfer-Encoding: " + encoding + "\r\n\r\n" + chunk, 501);
    closed(post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk, 501);
    for (const char* name : {"Content-Length ", "Content-Length\t", "Transfer-Encoding ", " Content-Length", "Content\x01Length", "a(b", "a\"b", "\xc3\xa9"}) // no names
        closed(post + name + ": 30\r\n\r\n" + good, 400);
    for (const char* value : {"a\rContent-Length: 30", "a\rTransfer-Encoding: chunked", "\x01", "a\x7f"}) closed(post + "X: " + value + "\r\n\r\n" + good, 400);
    closed("GET /health HTTP/1.1\r\n\r\n", 400); // no Host; and one head only
    std::string arguments = "a=1";
    for (int i = 0; i < 500; i++) arguments += "&a=1";
    closed("GET /health?" + arguments + " HTTP/1.1\r\nHost: localhost\r\n\r\n", 414);
    CHECK(Http(server.port).call("GET", "/health?a=1&b=2").status == 200);
    auto raw = [&](const std::string& text) {
        Http h(server.port);
        h.send(text);
        return h.reply().status;
    };
    CHECK(raw(post + "Transfer-Encoding: Chunked\r\n\r\n" + chunk) == 200);
    CHECK(raw("GET /health HTTP/1.1\r\nHost: LOCALHOST:80\r\n\r\n") == 200);
}

TEST_CASE("idle connections of one address keep neither others nor itself out") {
    Serving server({}, [] { // with room for 128 connections
        const rlimit few = {256, 256};
        setrlimit(RLIMIT_NOFILE, &few);
    });
    std::vector<std::unique_ptr<Http>> idle;
    auto quick = [&](const char* from) {
        Http h(server.port, "127.0.0.1", 0, from);
        h.patience = 3000;
        return h.call("GET", "/health").status == 200;
    };
    Http kept(server.port); // of an address that has few
    CHECK(kept.call("GET", "/health").status == 200);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 100; i++) {
            idle.push_back(std::make_unique<Http>(server.port));
            if (i % 2) idle.back()->send("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"); // half a request
        }
        CHECK(quick("127.0.0.2"));
        CHECK(quick("127.0.0.1"));
    }
}

TEST_CASE("idle connections of one key do not keep others out, whatever their addresses") {
    const MemoryFile keys("a-key many\nb-key few\n");
    Serving server({"--api-key-file", format("/proc/%d/fd/%d", (int)getpid(), keys.fd)}, [] { // with room for 128 connections
        const rlimit few = {256, 256};
        setrlimit(RLIMIT_NOFILE, &few);
    });
    auto lists = [](Http& h, const char* key) { return h.call("GET", "/v1/models", "", format("Authorization: Bearer %s\r\n", key)).status; };
    std::vector<std::unique_ptr<Http>> few, many;
    for (int i = 0; i < 8; i++) few.push_back(std::make_unique<Http>(server.port, "127.0.0.1", 0, "127.0.0.2")); // more than any address of the others
    for (auto& h : few) CHECK(lists(*h, "b-key") == 200);
    for (int i = 0; i < 300; i++) {
        many.push_back(std::make_unique<Http>(server.port, "127.0.0.1", 0, format("127.0.1.%d", i % 100).c_str()));
        REQUIRE(lists(*many.back(), "a-key") == 200);
    }
    for (auto& h : few) CHECK(lists(*h, "b-key") == 200);
}

TEST_CASE("a client that has closed its half gets its answer") {
    Serving server({"--max-seqs", "1"});
    Http blocks(server.port), whole(server.port), stream(server.port), gone(server.port);
    blocks.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 4000, \"ignore_eos\": true, \"n\": 8"));
    while (server.metric("num_requests_waiting") < 7) usleep(1000);
    whole.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 5, \"ignore_eos\": true"));
    for (Http* h : {&stream, &gone}) {
        h->ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 5, \"ignore_eos\": true, \"stream\": true"));
        CHECK(h->head().status == 200);
    }
    for (Http* h : {&whole, &stream, &gone}) shutdown(h->fd, SHUT_WR);
    CHECK(whole.head().status == 100); // it is asked whether it is still there
    for (Http* h : {&stream, &gone}) {
        std::string comment;
        h->chunk(comment);
        CHECK(comment == ":\n\n");
    }
    gone.close();
    const double start = seconds();
    while (server.metric("request_success_total") + server.metric("num_requests_waiting") > 9) { // it has left
        REQUIRE(seconds() - start < 10);
        usleep(10'000);
    }
    blocks.close();
    HttpReply r = whole.reply();
    while (r.status == 100) r = whole.reply();
    CHECK(r.status == 200);
    CHECK(r.body.find("\"finish_reason\": \"length\"") != std::string::npos);
    std::string all;
    while (stream.chunk(all)) {}
    while (all.compare(0, 3, ":\n\n") == 0) all.erase(0, 3);
    CHECK(events_of(all).back() == "[DONE]");
    server.check_idle();
}

TEST_CASE("a stream that has nothing to say says that it lives") {
    Serving server({"--max-seqs", "1", "--deadline", "3"}); // half a second of silence
    Http blocks(server.port), stream(server.port);
    blocks.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 4000, \"ignore_eos\": true, \"n\": 8"));
    while (server.metric("num_requests_waiting") < 7) usleep(1000);
    stream.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 5, \"ignore_eos\": true, \"stream\": true"));
    CHECK(stream.head().status == 200);
    const double start = seconds();
    std::string all;
    stream.patience = 1500;
    for (int i = 0; i < 3; i++) stream.chunk(all);
    CHECK(all == ":\n\n:\n\n:\n\n");
    CHECK(seconds() - start > 1);
    blocks.close();
    while (stream.chunk(all)) {}
    while (all.compare(0, 3, ":\n\n") == 0) all.erase(0, 3);
    CHECK(events_of(all).back() == "[DONE]");
}

TEST_CASE("a request's id comes back, and is in the log with the name of its key") {
    const MemoryFile keys("first-key\t Anna's own\nsecond-key\n");
    Serving server({"--api-key-file", format("/proc/%d/fd/%d", (int)getpid(), keys.fd)});
    auto ask = [&](const char* headers) {
        const HttpReply r = server.post("/tokenize", "{\"prompt\": \"a\"}", headers);
        return std::pair(r.status, r.headers.at("x-request-id"));
    };
    CHECK(ask("X-Request-Id: mine-1.a_b\r\nAuthorization: Bearer first-key\r\n") == std::pair(200, std::string("mine-1.a_b")));
    const auto [status, given] = ask("Authorization: Bearer second-key\r\n");
    CHECK(status == 200);
    CHECK(given.size() == 16);
    CHECK(ask("X-Request-Id: mine-2\r\n") == std::pair(401, std::string("mine-2")));
    for (const std::string& bad : {std::string("a b"), std::string("\"quoted\""), std::string(65, 'x')})
        CHECK(ask(("X-Request-Id: " + bad + "\r\nAuthorization: Bearer first-key\r\n").c_str()).second.size() == 16);
    check_refused(server.post("/tokenize", "{}", "Authorization: Bearer first-key\t Anna's own\r\n"), 401); // the name is not the key's
    const Strings log = lines(server.stop().out); // as they ended: three connections, in any order
    REQUIRE(log.size() == 7);
    auto entry = [&](const std::string& id) {
        for (auto& line : log)
            if (Json(line)["request_id"].str() == id) return std::make_unique<Json>(line);
        FAIL("no line of ", id);
        return std::make_unique<Json>("{}");
    };
    CHECK((*entry("mine-1.a_b"))["key"].str() == "Anna's own");
    CHECK((*entry(given))["key"].str() == "key 2");
    const auto refused = entry("mine-2");
    CHECK(!(*refused)["key"]);
    CHECK((*refused)["status"].number() == 401);
    for (auto& line : log) CHECK(line.find("first-key") == std::string::npos);
}

TEST_CASE("/version and /ping; requests by route and status") {
    Serving server;
    auto get = [&](const char* path) { return Http(server.port).call("GET", path); };
    CHECK(Json(get("/version").body)["version"].str() == std::to_string(QWEN3_VERSION));
    CHECK(get("/ping").status == 200);
    for (const char* path : {"/ping", "/version"}) check_refused(server.post(path, "{}"), 405, "GET");
    CHECK(get("/v1/models/tiny").status == 200);
    CHECK(get("/v1/models/other").status == 404);
    CHECK(get("/of/which/nobody\"knows").status == 404);
    CHECK(server.chat(question("a", "\"max_tokens\": 1")).status == 200);
    CHECK(server.chat("{").status == 400);
    CHECK(server.chat("{").status == 400);
    CHECK(get("/openapi.json").status == 200);
    Http(server.port).call("BREW", "/health");
    const Strings wanted = {"http_requests_total{method=\"POST\",handler=\"/v1/chat/completions\",status=\"400\"} 2\n",
                            "http_requests_total{method=\"POST\",handler=\"/v1/chat/completions\",status=\"200\"} 1\n",
                            "http_requests_total{method=\"GET\",handler=\"/v1/models/{id}\",status=\"404\"} 1\n",
                            "http_requests_total{method=\"GET\",handler=\"other\",status=\"404\"} 1\n",
                            "http_requests_total{method=\"POST\",handler=\"/ping\",status=\"405\"} 1\n",
                            "http_requests_total{method=\"other\",handler=\"/health\",status=\"405\"} 1\n",
                            "http_request_duration_seconds_count{handler=\"/v1/chat/completions\"} 3\n",
                            "http_request_duration_seconds_bucket{handler=\"/version\",le=\"+Inf\"} 2\n"};
    std::string all;
    auto there = [&](const std::string& line) { return all.find(line) != std::string::npos; };
    for (const double start = seconds(); seconds() - start < 5; usleep(10'000)) { // a request is counted when its answer has been sent
        all = get("/metrics").body;
        if (std::all_of(wanted.begin(), wanted.end(), there)) break;
    }
    for (auto& line : wanted) {
        INFO(line << all.substr(all.find("# TYPE http_requests")));
        CHECK(there(line));
    }
    CHECK(server.stop().out.find("\"path\": \"/openapi.json\"") != std::string::npos); // the log has its name, too
}

TEST_CASE("documents: the question gets passages unless the request says no; sources are told whole and streamed") {
    Scratch scratch;
    make_folder(scratch / "docs");
    write_file(scratch / "docs/warps.md", "# Warps\n\nA warp has 32 lanes.");
    write_file(scratch / "docs/banks.md", "# Banks\n\nShared memory has banks.");
    const Strings options = {"--docs", scratch / "docs", "--index", scratch / "docs.index", "--quote", "0"};
    std::string plain, with_passages;
    const std::string more = "\"max_tokens\": 8, \"temperature\": 0", off = more + ", \"use_documents\": false", ask = "What is a warp?";
    {
        const Serving server;
        const HttpReply r = server.chat(question(ask, more));
        plain = content(r);
        CHECK(!Json(r.body)["sources"]);
        CHECK(content(server.chat(question(ask, off))) == plain);
        check_refused(server.chat(question(ask, more + ", \"use_documents\": true")), 400, "use_documents");
        const std::string asked = "Answer the question from the passages below, and name those that you use by their number, like [1]. "
            "If the answer is not in them, say that it is not in the documents.\n\n"
            "[1] warps.md:1, Warps\n# Warps\n\nA warp has 32 lanes.\n\nQuestion: What is a warp?";
        with_passages = content(server.chat(question(asked, more)));
        CHECK(with_passages != plain);
        const Strings pages = {Http(server.port).call("GET", "/", "", BROWSER).body};
        CHECK(pages[0].find("data-docs=\"0\"") != std::string::npos);
    }
    const Serving server(options);
    for (const std::string& on : {more, more + ", \"use_documents\": true"}) {
        const HttpReply r = server.chat(question(ask, on));
        CHECK(content(r) == with_passages);
        const Json all(r.body);
        REQUIRE(all["sources"].size() == 1);
        const sj::Value source = all["sources"][(size_t)0];
        CHECK(source["file"].str() == "warps.md");
        CHECK(source["line"].number() == 1);
        CHECK(source["heading"].str() == "Warps");
        CHECK(source["text"].str() == "# Warps\n\nA warp has 32 lanes.");
        CHECK(source["score"].number() > 0);
    }
    const HttpReply without = server.chat(question(ask, off));
    CHECK(content(without) == plain);
    CHECK(!Json(without.body)["sources"]);
    CHECK(Json(server.chat(question("unheard-of", more)).body)["sources"].is(sj::Array)); // looked up, nothing found

    const HttpReply stream = server.chat(question(ask, more + ", \"stream\": true"));
    CHECK(joined(stream)[0] == with_passages);
    const std::vector<std::string> events = events_of(stream.body);
    for (size_t i = 0; i + 1 < events.size(); i++) CHECK((bool)Json(events[i])["sources"] == (i == 0)); // once, at once
    CHECK(Json(events[0])["sources"][(size_t)0]["file"].str() == "warps.md");
    CHECK(server.chat(question(ask, more + ", \"stream\": true, \"use_documents\": false")).body.find("sources") == std::string::npos);

    // The last question counts, whatever follows it; an earlier one if it has no word of its own.
    auto first_source = [&](const std::string& messages) {
        const Json all(server.chat("{\"messages\": [" + messages + "], " + more + "}").body);
        return all["sources"].size() ? all["sources"][(size_t)0]["file"].str() : "";
    };
    const std::string warp = R"({"role": "user", "content": "What is a warp?"}, {"role": "assistant", "content": "32 lanes"}, )";
    CHECK(first_source(warp + R"({"role": "user", "content": "And the banks?"})") == "banks.md");
    CHECK(first_source(warp + R"({"role": "user", "content": "Why?"})") == "warps.md");
    CHECK(first_source(R"({"role": "system", "content": "warp"})") == "");
    check_refused(server.post("/v1/completions", R"({"prompt": "a", "use_documents": true})"), 400, "use_documents");
    check_refused(server.chat(question(ask, "\"use_documents\": 1")), 400, "use_documents");
    CHECK(server.post("/v1/completions", R"({"prompt": "a", "max_tokens": 1})").status == 200);
    CHECK(Http(server.port).call("GET", "/", "", BROWSER).body.find("data-docs=\"1\"") != std::string::npos);

    // A context in which a passage does not fit: it is cut, and the answer has its room.
    Strings small = options;
    small.insert(small.end(), {"--ctx", "160"});
    const Serving tight(small);
    const Json cut(tight.chat(question(ask, more)).body);
    CHECK(cut["usage"]["prompt_tokens"].number() <= 152);
    CHECK(cut["usage"]["completion_tokens"].number() > 0);
    server.check_idle();
}

TEST_CASE("documents: a model that is too small quotes the best passage, whole and streamed, in every dialect") {
    Scratch scratch;
    make_folder(scratch / "docs");
    write_file(scratch / "docs/warps.md", "# Warps\n\nA warp has 32 lanes.");
    write_file(scratch / "docs/banks.md", "# Banks\n\nShared memory has banks.");
    const Serving server({"--docs", scratch / "docs", "--index", scratch / "docs.index"});
    CHECK(server.err.text().find("serve: the best passage of --docs is quoted: 0.2 M parameters are too few to use "
                                 "passages\n") != std::string::npos);
    const std::string ask = "What is a warp?", quote = "# Warps\n\nA warp has 32 lanes.\n\n— warps.md:1, Warps",
                      off = "\"max_tokens\": 8, \"temperature\": 0, \"use_documents\": false";
    const Json one(server.chat(question(ask, "\"n\": 2")).body), without(server.chat(question(ask, off)).body);
    for (size_t i = 0; i < 2; i++) {
        CHECK(one["choices"][i]["message"]["content"].str() == quote);
        CHECK(one["choices"][i]["finish_reason"].str() == "stop");
    }
    CHECK(one["sources"][(size_t)0]["file"].str() == "warps.md");
    CHECK(one["usage"]["prompt_tokens"].number() == without["usage"]["prompt_tokens"].number());
    const size_t tokens = Tokenizer(VOCABULARY).encode(quote, false).size();
    CHECK(one["usage"]["completion_tokens"].number() == 2. * (double)(tokens + 1));
    const HttpReply stream = server.chat(question(ask, "\"stream\": true"));
    CHECK(joined(stream)[0] == quote);
    CHECK(stream.body.find("\"finish_reason\": \"stop\"") != std::string::npos);
    const Json cut(server.chat(question(ask, "\"max_tokens\": 3")).body);
    CHECK(cut["choices"][(size_t)0]["finish_reason"].str() == "length");
    CHECK(cut["usage"]["completion_tokens"].number() == 3);
    CHECK(content(server.chat(question(ask, "\"stop\": \"32\""))) == "# Warps\n\nA warp has ");

    // The model answers where nothing is found, and where a form, tools or log-probabilities are wanted.
    const std::string more = "\"max_tokens\": 8, \"temperature\": 0";
    CHECK(content(server.chat(question("unheard-of", more))) == content(server.chat(question("unheard-of", off))));
    const std::string tool = R"(, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}])";
    for (const std::string& wants : {std::string(", \"logprobs\": true"), tool,
                                     std::string(R"(, "guided_choice": ["a", "b"])")}) {
        const Json other(server.chat(question(ask, more + wants)).body);
        CAPTURE(wants);
        CHECK(other["choices"].size() == 1);
        CHECK(other["choices"][(size_t)0]["message"]["content"].str() != quote);
        CHECK(other["sources"].is(sj::Array));
        CHECK(other["sources"].size() == 0);
    }
    const Json predicted(server.post("/predict",
                                     R"({"prompt": ["What is a warp?", "unheard-of", "Which banks?"]})").body);
    CHECK(predicted["response"][(size_t)0].str() == quote);
    CHECK(predicted["response"][(size_t)1].str().find("—") == std::string::npos);
    CHECK(predicted["response"][(size_t)2].str() == "# Banks\n\nShared memory has banks.\n\n— banks.md:1, Banks");
    const HttpReply response = server.post("/v1/responses", R"({"model": "tiny", "input": "What is a warp?"})");
    const HttpReply message = server.post("/v1/messages", R"({"model": "tiny", "max_tokens": 200, )"
                                          R"("messages": [{"role": "user", "content": "What is a warp?"}]})");
    CHECK(Json(message.body)["content"][(size_t)0]["text"].str() == quote);
    CHECK(Json(message.body)["stop_reason"].str() == "end_turn");
    CHECK(Json(response.body)["output"][(size_t)0]["content"][(size_t)0]["text"].str() == quote);
    server.check_idle();
}

TEST_CASE("documents: texts that come with a chat are looked up, whatever the server's own are") {
    Scratch scratch;
    make_folder(scratch / "docs");
    write_file(scratch / "docs/warps.md", "# Warps\n\nA warp has 32 lanes.");
    const std::string more = "\"max_tokens\": 8, \"temperature\": 0",
        texts = R"("documents": [{"title": "zoo.pdf", "text": "# Zebras\n\nA zebra has stripes.\n\n# Lions\n\nA lion has a mane."}, {"text": "Nothing else."}])";
    auto sources = [&](const Serving& server, const std::string& ask, const std::string& with) {
        const HttpReply r = server.chat(question(ask, more + ", " + with));
        INFO(r.body);
        REQUIRE(r.status == 200);
        const Json answer(r.body);
        Strings all;
        for (sj::Value s : answer["sources"].items()) all.push_back(format("%s:%d %s", s["file"].str().c_str(), (int)s["line"].number(), s["text"].str().c_str()));
        return all;
    };
    for (const bool own : {false, true}) {
        INFO(own);
        const Serving server(own ? Strings{"--docs", scratch / "docs", "--index", scratch / "docs.index", "--quote", "0"} : Strings{});
        const Strings zebra = {"zoo.pdf:1 # Zebras\n\nA zebra has stripes."};
        for (int again = 0; again < 2; again++) CHECK(sources(server, "What has a zebra?", texts) == zebra); // indexed, then kept
        CHECK(sources(server, "What has a zebra?", texts + ", \"use_documents\": true") == zebra);
        const Strings lion = sources(server, "And the lion?", texts);
        REQUIRE(lion.size() == 1);
        CHECK(lion[0].find("A lion has a mane.") != std::string::npos);
        // A question without a passage is answered from the beginning, unless the model quotes.
        const Strings summary = sources(server, "Summarize this", texts);
        CHECK(summary.size() == (own ? 3 : 0));
        if (own) CHECK(summary[2] == "document 2:1 Nothing else.");
        if (!own) CHECK(content(server.chat(question("What has a zebra?", texts))) == "# Zebras\n\nA zebra has stripes.\n\n— zoo.pdf:1, Zebras");
        CHECK(sources(server, "What is a warp?", "\"documents\": []").size() == own);
        CHECK(joined(server.chat(question("What has a zebra?", more + ", \"stream\": true, " + texts))).size() == 1);

        for (const char* wrong : {"\"x\"", "[1]", "[{}]", "[{\"text\": \" \"}]", "[{\"text\": 1}]", "[{\"text\": \"a\", \"x\": 1}]"}) {
            INFO(wrong);
            const HttpReply r = server.chat(question("a", "\"documents\": " + std::string(wrong)));
            CHECK(r.status == 400);
            CHECK(Json(r.body)["error"]["param"].str() != "messages");
        }
        const std::string title = "[{\"text\": \"a\", \"title\": \"" + std::string(201, 'a') + "\"}]", half = "{\"text\": \"" + std::string(MAX_DOCUMENT_BYTES / 2 + 1, 'a') + "\"}";
        check_refused(server.chat(question("a", "\"documents\": " + title)), 400, "documents");
        check_refused(server.chat(question("a", "\"documents\": [" + half + ", " + half + "]")), 400, "documents");
        check_refused(server.chat(question("a", "\"documents\": [" + many(65, "{\"text\": \"a\"}") + "]")), 400, "documents");
        check_refused(server.chat(question("a", "\"use_documents\": false, " + texts)), 400, "documents");
        check_refused(server.post("/v1/completions", R"({"prompt": "a", "documents": [{"text": "a"}]})"), 400, "documents");
        server.check_idle();
    }
}

TEST_CASE("/convert: the text of a document, by the programs of --docs; what cannot be converted is refused by name") {
    Scratch tools;
    auto tool = [&](const char* name, const std::string& script) {
        write_file(tools / name, "#!/bin/sh\nPATH=/usr/bin:/bin\n" + script);
        chmod((tools / name).c_str(), 0755);
    };
    const MemoryFile keys("good\n");
    const Serving server({"--api-key-file", format("/proc/%d/fd/%d", (int)getpid(), keys.fd), "--deadline", "3"},
                         [&] { setenv("PATH", tools.path.c_str(), 1); setenv("TMPDIR", tools.path.c_str(), 1); });
    auto convert = [&](const std::string& query, std::string_view bytes, const std::string& type = "application/octet-stream", const std::string& key = "good") {
        Http http(server.port);
        http.send("POST /convert" + query + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: " + type + "\r\nAuthorization: Bearer " + key +
                  format("\r\nContent-Length: %zu\r\n\r\n", bytes.size()) + std::string(bytes));
        return http.reply();
    };
    auto message = [](const HttpReply& r) { return Json(r.body)["error"]["message"].str(); };
    auto files = [&] { return (size_t)std::distance(fs::directory_iterator(tools.path), {}); };
    const HttpReply none = convert("?name=x.docx", "PK\3\4");
    check_refused(none, 501, "name");
    CHECK(message(none) == "x.docx: no Markdown, and there is no pandoc (install pandoc); elsewhere: pandoc -t gfm x.docx -o x.md");
    check_refused(convert("?name=x.pdf", "%PDF-1.7"), 501, "name");

    tool("pdftotext", "for fd in /proc/$$/fd/*; do readlink $fd; done | grep -c -e socket -e anon_inode\ncat \"$4\" | tail -n +2\n"); // $4: the file
    tool("pandoc", "echo \"# $*\"");
    const HttpReply pdf = convert("?name=a%20b.PDF", "%PDF-1.7\nA warp.\n");
    REQUIRE(pdf.status == 200);
    CHECK(Json(pdf.body)["name"].str() == "a b.PDF");
    CHECK(Json(pdf.body)["text"].str() == "0\nA warp.\n"); // no socket of ours is the program's
    CHECK(Json(convert("?name=no-ending", "%PDF-1.7\nA warp.\n").body)["text"].str() == "0\nA warp.\n");
    const std::string given = Json(convert("?name=../x;y.docx", "PK").body)["text"].str();
    CHECK(given.find("/document.docx") != std::string::npos); // the client's name is no path
    CHECK(given.find("..") == std::string::npos);
    CHECK(files() == 2);

    for (const char* name : {"x.doc", "x.pptx", "x", "x.", ".", "a.docx/b"}) {
        const HttpReply r = convert(std::string("?name=") + name, "PK");
        check_refused(r, 415, "name");
        CHECK(message(r).find(name + std::string(": PDF, DOCX, ODT, EPUB and HTML are converted")) == 0);
    }
    for (const std::string& query : Strings{"", "?name=", "?name=" + std::string(201, 'a'), "?name=%ff.pdf"}) check_refused(convert(query, "%PDF-"), 400, "name");
    check_refused(convert("?name=x.pdf", ""), 400);
    check_refused(convert("?name=x.pdf", "%PDF-", "application/json"), 415);
    check_refused(convert("?name=x.pdf", "%PDF-", "application/octet-stream", "bad"), 401);
    check_refused(Http(server.port).call("GET", "/convert", "", "Authorization: Bearer good\r\n"), 405, "POST");
    Http large(server.port);
    large.send(format("POST /convert?name=x.pdf HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n\r\n", MAX_CONVERTED + 1));
    check_refused(large.reply(), 413);

    tool("pdftotext", "echo \"May not be a PDF: $4\" >&2; exit 1");
    const HttpReply bad = convert("?name=x.pdf", "%PDF-");
    check_refused(bad, 400, "name");
    CHECK(message(bad) == "x.pdf: pdftotext failed: exit status 1: May not be a PDF: x.pdf");
    tool("pdftotext", "printf '\\f'");
    CHECK(message(convert("?name=scan.pdf", "%PDF-")) == "scan.pdf: no text in it; pictures of pages need OCR first");
    tool("pdftotext", "head -c 5000000 /dev/zero | tr '\\0' a");
    check_refused(convert("?name=x.pdf", "%PDF-"), 413);
    tool("pdftotext", "echo $$ > " + (tools / "pid") + "; exec sleep 100");
    CHECK(message(convert("?name=x.pdf", "%PDF-")) == "x.pdf: pdftotext took longer than 3 s");
    fs::remove(tools / "pid");
    { // A client that leaves ends it.
        Http leaves(server.port);
        leaves.send("POST /convert?name=x.pdf HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\nAuthorization: Bearer good\r\nContent-Length: 5\r\n\r\n%PDF-");
        for (const double start = seconds(); !fs::exists(tools / "pid") && seconds() - start < 5;) usleep(10'000);
        REQUIRE(fs::exists(tools / "pid"));
    }
    usleep(50'000); // (its number is written after the file is there)
    const pid_t child = atoi(read_file(tools / "pid").c_str());
    const double start = seconds();
    while (kill(child, 0) == 0 && seconds() - start < 2.5) usleep(20'000);
    CHECK(kill(child, 0) != 0);
    for (const double start = seconds(); files() > 3 && seconds() - start < 2;) usleep(10'000);
    CHECK(files() == 3); // two programs and a number: no temporary file
}

TEST_CASE("documents: a batch asks them, and what is wrong with them is one line") {
    Scratch scratch;
    make_folder(scratch / "docs");
    auto batch = [&] {
        Strings all = Serving::with({"--docs", scratch / "docs", "--index", scratch / "i", "--batch", scratch / "in", "-o", scratch / "out"});
        Result r = Process(PROGRAM, all).wait();
        return r;
    };
    write_file(scratch / "in", R"({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": )" + question("a warp?", "\"max_tokens\": 2") + "}\n");
    Result r = batch();
    CHECK(r.status == 1);
    CHECK(r.err.find("serve: " + (scratch / "docs") + ": no text in it\n") != std::string::npos);
    check_refusal(Process(PROGRAM, Serving::with({"--index", scratch / "i"})).wait(), "serve", "--index is for --docs");
    write_file(scratch / "docs/a.md", "a warp");
    r = batch();
    INFO(r.err);
    CHECK(r.status == 0);
    CHECK(read_file(scratch / "out").find("\"sources\": [{\"file\": \"a.md\"") != std::string::npos);
}

TEST_CASE("API keys and CORS") {
    const MemoryFile keys("# the first of them:\n  first-key\n   \n#second\n\t second-key \tits name \r\n"); // blanks at both ends
    Serving server({"--api-key-file", format("/proc/%d/fd/%d", (int)getpid(), keys.fd), "--cors", "https://good.example", "--max-seqs", "4"});
    const std::string body = question("The same long question, which fills a page or two of the cache.", "\"max_tokens\": 1");
    for (const char* header : {"", "Authorization: Bearer \r\n", "Authorization: Bearer first-ke\r\n", "Authorization: Bearer first-keyx\r\n",
                               "Authorization: first-key\r\n", "Authorization: Basic first-key\r\n", "Authorization: Bearer first-keyfirst-key\r\n"}) {
        const HttpReply r = server.post("/v1/chat/completions", body, header);
        check_refused(r, 401);
        CHECK(r.headers.count("www-authenticate") == 1);
        CHECK(Http(server.port).call("GET", "/v1/models", "", header).status == 401);
        CHECK(server.post("/tokenize", "{\"prompt\": \"a\"}", header).status == 401);
    }
    for (const char* header : {"Authorization: Bearer # the first of them:\r\n", "Authorization: Bearer #second\r\n"})
        check_refused(server.post("/v1/chat/completions", body, header), 401);
    for (const char* scheme : {"bearer", "BEARER"})
        CHECK(server.post("/tokenize", "{\"prompt\": \"a\"}", format("Authorization: %s second-key\r\n", scheme)).status == 200);
    CHECK(Http(server.port).call("GET", "/health").status == 200);
    auto cached = [&](const char* key) {
        const HttpReply r = server.post("/v1/chat/completions", body, format("Authorization: Bearer %s\r\n", key));
        REQUIRE(r.status == 200);
        return Json(r.body)["usage"]["prompt_tokens_details"]["cached_tokens"].number();
    };
    CHECK(cached("first-key") == 0);
    CHECK(cached("first-key") > 0);
    CHECK(cached("second-key") == 0); // whether someone else asked the same cannot be timed
    CHECK(cached("second-key") > 0);

    // One key floods; another's request is answered long before the flood has ended.
    std::vector<std::unique_ptr<Http>> flood;
    for (int i = 0; i < 40; i++) {
        flood.push_back(std::make_unique<Http>(server.port));
        flood.back()->ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 200, \"ignore_eos\": true"), "Authorization: Bearer first-key\r\n");
    }
    while (server.metric("num_requests_waiting") < 15) usleep(1000);
    CHECK(server.post("/v1/chat/completions", body, "Authorization: Bearer second-key\r\n").status == 200);
    CHECK(server.metric("num_requests_waiting") > 0);
    flood.clear();

    const HttpReply asked = Http(server.port).call("OPTIONS", "/v1/chat/completions", "", "Origin: https://good.example\r\nAccess-Control-Request-Method: POST\r\n");
    CHECK(asked.status == 204);
    CHECK(asked.headers.at("access-control-allow-origin") == "https://good.example");
    CHECK(asked.headers.at("access-control-allow-headers").find("Authorization") != std::string::npos);
    const HttpReply browser = Http(server.port).call("OPTIONS", "/v1/chat/completions", "", "Origin: https://good.example\r\nAccess-Control-Request-Method: POST\r\n"
        "Access-Control-Request-Headers: authorization,content-type,x-stainless-arch,x-stainless-retry-count,openai-organization,x-evil\r\n");
    const std::string allowed = browser.headers.at("access-control-allow-headers");
    for (const char* name : {"Authorization", "Content-Type", "x-stainless-arch", "x-stainless-retry-count", "openai-organization"})
        CHECK(allowed.find(name) != std::string::npos);
    CHECK(allowed.find("evil") == std::string::npos);
    CHECK(Http(server.port).call("OPTIONS", "/v1/models", "", "Origin: https://bad.example\r\n").headers.count("access-control-allow-origin") == 0);
}

TEST_CASE("the context is the model's limit unless --ctx says otherwise, or as much of it as the cache holds") {
    Scratch scratch;
    std::string model = read_file(MODEL);
    const std::string name = "max_position_embeddings", was = "4096";
    const size_t at = model.find(was, model.find(name));
    REQUIRE(at < model.find(name) + name.size() + 8);
    write_file(scratch / "long.bin", model.replace(at, was.size(), "9216"));
    auto context = [&](const Strings& more, std::string* said) {
        const Serving server(more, [] {}, scratch / "long.bin");
        *said = server.err.text();
        return Json(Http(server.port).call("GET", "/v1/models").body)["data"][0]["max_model_len"].number();
    };
    std::string said;
    CHECK(context({}, &said) == 9216);
    CHECK(said.find("context 9216 (the model's limit)") != std::string::npos);
    CHECK(context({"--ctx", "300"}, &said) == 300);
    const std::string forty_pages = format("%.9f", 40.5 * (double)KVCache<bf16>::bytes(tiny().file.config, 1) / 1e9);
    CHECK(context({"--kv-memory", forty_pages}, &said) == 40 * PAGE);
    CHECK(said.find("context 640 (what memory allows of the model's 9216)") != std::string::npos);
    check_refusal(Process(PROGRAM, Serving::with({"--kv-memory", forty_pages, "--ctx", "9216"}, scratch / "long.bin")).wait(), "serve", "a context of 9216");
}

TEST_CASE("pages so few that answers give way, and nobody sees it") {
    auto body = [](int i) {
        return question("What is a warp, a block, a grid? " + std::to_string(i), format("\"seed\": %d, \"max_tokens\": %d, \"ignore_eos\": true, \"temperature\": 1.2", i, 100 + i));
    };
    std::vector<std::string> wanted;
    {
        Serving calm;
        for (int i = 0; i < 12; i++) wanted.push_back(content(calm.chat(body(i))));
    }
    Serving server({"--ctx", "256", "--max-seqs", "12", "--kv-memory", format("%.9f", 40 * (double)KVCache<bf16>::bytes(tiny().file.config, 1) / 1e9)});
    std::vector<std::string> got(12);
    std::vector<std::thread> threads;
    for (int i = 0; i < 12; i++)
        threads.emplace_back([&, i] {
            try { got[i] = Http(server.port).call("POST", "/v1/chat/completions", body(i)).body; } catch (const Error&) {}
        });
    for (auto& t : threads) t.join();
    for (int i = 0; i < 12; i++) CHECK(content({200, {}, got[i]}) == wanted[i]);
    CHECK(server.metric("num_preemptions_total") > 0);
    server.check_idle();
}

static const std::string ENDLESS = "\"max_tokens\": 4000, \"ignore_eos\": true";

TEST_CASE("clients that vanish: mid-stream, waiting, all at once") {
    Serving server({"--max-queue", "1200", "--max-seqs", "8"});
    {
        std::vector<std::unique_ptr<Http>> clients;
        for (int i = 0; i < 200; i++) {
            clients.push_back(std::make_unique<Http>(server.port));
            clients.back()->ask("POST", "/v1/chat/completions", question("a", ENDLESS + (i % 2 ? ", \"stream\": true" : "")));
        }
        while (server.metric("num_requests_running") < 8) usleep(10'000);
        for (int i = 1; i < 8; i += 2) CHECK(clients[(size_t)i]->head().status == 200);
    }
    server.check_idle(3);

    Http waits(server.port); // nothing was sent to it that could fail: it is looked at
    waits.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 4000, \"ignore_eos\": true"));
    while (server.metric("num_requests_running") < 1) usleep(1000);
    waits.close();
    server.check_idle(1);
    CHECK(server.metric("num_requests_running") == 0);
    CHECK(Http(server.port).call("GET", "/health").status == 200);
}

TEST_CASE("a thousand open streams, and one that reads a byte at a time") {
    rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    REQUIRE(files.rlim_max > 1100);
    Serving server({"--max-queue", "1200", "--max-seqs", "4"});
    std::vector<std::unique_ptr<Http>> clients;
    for (int i = 0; i < 1000; i++) {
        clients.push_back(std::make_unique<Http>(server.port));
        clients.back()->ask("POST", "/v1/chat/completions", question("a", ENDLESS + ", \"stream\": true"));
    }
    const double start = seconds();
    while (server.metric("num_requests_running") + server.metric("num_requests_waiting") < 1000) {
        REQUIRE(seconds() - start < 20);
        usleep(50'000);
    }
    CHECK(Http(server.port).call("GET", "/health").status == 200);
    clients.clear();
    server.check_idle(5);

    Http slow(server.port);
    slow.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 50, \"ignore_eos\": true, \"seed\": 1, \"stream\": true"));
    char byte;
    std::string read;
    for (int i = 0; i < 20; i++) {
        REQUIRE(recv(slow.fd, &byte, 1, 0) == 1);
        slow.buffer += byte;
        CHECK(server.chat(question("b", "\"max_tokens\": 3")).status == 200); // others do not wait for it
    }
    server.check_idle(2);                                                      // and its pages are free
    const std::string same = content(server.chat(question("a", "\"max_tokens\": 50, \"ignore_eos\": true, \"seed\": 1")));
    CHECK(joined(slow.reply())[0] == same);
}

// Its stderr is a pipe without room: it cannot say that it is ready, and so it is loading until someone reads.
struct Loading {
    int port = free_port(), ends[2];
    std::unique_ptr<Process> process;
    Loading() {
        REQUIRE(pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0);
        while (write(ends[1], "x", 1) == 1) {}
        fcntl(ends[1], F_SETFL, 0);
        process = std::make_unique<Process>(PROGRAM, Serving::with({"--port", std::to_string(port)}), "", [&] { dup2(ends[1], 2); });
        close(ends[1]);
        for (const double start = seconds();; usleep(2000)) {
            REQUIRE(seconds() - start < 30);
            try { Http http(port); break; } catch (const Error&) {}
        }
    }
    ~Loading() {
        kill(process->pid, SIGKILL);
        waitpid(process->pid, nullptr, 0);
        close(ends[0]);
    }
    HttpReply call(const char* method, const char* path, const char* body = "", const std::string& headers = "") const {
        return Http(port).call(method, path, body, headers);
    }
};

TEST_CASE("while the model loads, the server says so") {
    Loading server;
    const HttpReply health = server.call("GET", "/health");
    CHECK(health.status == 503);
    CHECK(Json(health.body)["status"].str() == "loading");
    for (const char* path : {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/tiny"}) {
        INFO(path);
        const HttpReply r = server.call(strstr(path, "models") ? "GET" : "POST", path, "{}");
        check_refused(r, 503);
        CHECK(r.headers.at("retry-after") == "1");
    }
    CHECK(server.call("GET", "/metrics").status == 200);
    CHECK(server.call("GET", "/", "", BROWSER).status == 200); // the page waits, too
    const HttpReply status = server.call("GET", "/");
    CHECK(status.status == 503);
    CHECK(status.body == R"({"status": "initializing"})");
    check_refused(server.call("POST", "/predict", R"({"prompt": "a"})"), 503);
    check_refused(server.call("GET", "/nothing"), 404);

    std::string said;
    for (const double start = seconds(); said.find("listening on") == std::string::npos; usleep(2000)) {
        const std::string words = said.substr(std::min(said.size(), said.find_first_not_of('x')));
        INFO(words);
        REQUIRE(seconds() - start < 30);
        char some[4096];
        const ssize_t n = read(server.ends[0], some, sizeof some);
        REQUIRE(n != 0); // it has ended
        if (n > 0) said.append(some, (size_t)n);
    }
    CHECK(server.call("GET", "/health").status == 200);
    CHECK(server.call("GET", "/v1/models").status == 200);
}

TEST_CASE("a signal while the model loads ends the server") {
    Loading server;
    CHECK(server.call("GET", "/health").status == 503);
    kill(server.process->pid, SIGTERM);
    // ThreadSanitizer keeps a signal back until the thread's next call into libc has ended; here that may be a write into
    // the full pipe. So there is room in it after a second.
    int status;
    char some[4096];
    pid_t ended;
    for (const double start = seconds(); (ended = waitpid(server.process->pid, &status, WNOHANG)) == 0; usleep(2000))
        if (seconds() - start > 1) (void)!read(server.ends[0], some, sizeof some);
    REQUIRE(ended == server.process->pid);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 130);
}

TEST_CASE("deadlines: whoever sends nothing, or a byte now and then") {
    Serving server({"--deadline", "4"}); // 2 s without a byte
    struct Client {
        const char* what;
        std::string first;
        bool trickles;
        std::unique_ptr<Http> http{};
        double closed = 0;
    };
    const std::string post = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n";
    Client clients[] = {{"nothing", "", false},
                        {"kept", "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", false},
                        {"half a body", post + "{", false},
                        {"request line", "GET /hea", true},
                        {"headers", "GET /health HTTP/1.1\r\nHost: localhost\r\nX", true},
                        {"body", post, true}};
    const double start = seconds();
    size_t open = 0;
    for (Client& c : clients) c.http = std::make_unique<Http>(server.port), c.http->send(c.first), open++;
    CHECK(clients[1].http->reply().status == 200);
    for (; open > 0; usleep(50'000)) {
        REQUIRE(seconds() - start < 30);
        for (Client& c : clients) {
            char byte;
            if (c.closed > 0) continue;
            if (c.trickles) send(c.http->fd, " ", 1, MSG_NOSIGNAL);
            const ssize_t n = recv(c.http->fd, &byte, 1, MSG_DONTWAIT);
            CHECK(n <= 0); // not a word
            if (n < 0 && errno == EAGAIN) continue;
            c.closed = seconds() - start, open--;
        }
        CHECK(Http(server.port).call("GET", "/health").status == 200);
    }
    double silent = 0;
    for (Client& c : clients) {
        INFO(c.what << " after " << c.closed << " s");
        CHECK(c.closed > (c.trickles ? 4 : 1.9));
        if (c.trickles) CHECK(c.closed > silent);
        else silent = std::max(silent, c.closed);
    }
}

TEST_CASE("deadlines: whoever fetches an answer too slowly") {
    Serving server({"--deadline", "1", "--ctx", "128"}); // 5 s to fetch, 1 s without a byte
    std::string letters;
    for (int i = 0; i < 1'500'000; i++) letters += (char)('a' + i * 7 % 26);
    // An answer of the engine, and one without it; each is many MB. One after the other: they may share a thread of the
    // server, and to write out the first takes longer than that second.
    const std::pair<std::string, std::string> asked[] = {
        {"/v1/chat/completions", question("a", "\"n\": 50, \"max_tokens\": 80, \"ignore_eos\": true, \"logprobs\": true, \"top_logprobs\": 20")},
        {"/tokenize", "{\"prompt\": \"" + letters + "\"}"}};
    for (size_t i = 0; i < 2; i++) {
        Http http(server.port, "127.0.0.1", 1400); // (with loopback's packets of 64 KB the kernel would pause by itself)
        const int small = 1 << 16;
        setsockopt(http.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        http.ask("POST", asked[i].first, asked[i].second);
        std::string begin, end; // of what it is told
        size_t read = 0;
        double first = 0;  // byte
        for (const double start = seconds(); lines(whole(server.out.text())).size() == i; usleep(20'000)) { // until it is closed, and in the log
            REQUIRE(seconds() - (read ? first : start) < 60);
            char some[1 << 14]; // 0.8 MB/s
            const ssize_t n = recv(http.fd, some, sizeof some, MSG_DONTWAIT);
            if (n <= 0) continue;
            if (!read) first = seconds();
            read += (size_t)n;
            if (begin.size() < 4096) begin.append(some, (size_t)n);
            end = std::string(some, (size_t)n);
        }
        CHECK(seconds() - first > 3); // it was not for want of a byte
        CHECK(begin.compare(0, 13, "HTTP/1.1 200 ") == 0);
        const size_t length = begin.find("Content-Length: ");
        if (length != std::string::npos) CHECK(read < (size_t)atol(begin.c_str() + length + 16));
        else CHECK(end.substr(end.size() - std::min<size_t>(end.size(), 5)) != "0\r\n\r\n"); // in chunks, and not the last
    }
}

TEST_CASE("a full queue is 429, and SIGTERM lets answers come to their end") {
    Serving server({"--max-queue", "1", "--max-seqs", "1"});
    Http first(server.port), second(server.port);
    first.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 1000, \"ignore_eos\": true, \"temperature\": 1.5, \"top_k\": 0, \"stream\": true"));
    REQUIRE(first.head().status == 200);
    second.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 2, \"seed\": 1"));
    while (server.metric("num_requests_waiting") < 1) usleep(1000);
    const HttpReply full = server.chat(question("a", ""));
    check_refused(full, 429);
    CHECK(full.headers.at("retry-after") == "1");
    check_refused(server.chat(question("a", "\"n\": 2")), 429);
    check_refused(server.chat(question("a", "\"n\": 3")), 400, "n"); // there will never be room

    Http kept(server.port), idle(server.port);
    CHECK(kept.call("GET", "/health").status == 200);
    CHECK(idle.call("GET", "/health").status == 200);
    kill(server.pid, SIGTERM);
    while (server.err.text().find("to finish") == std::string::npos) usleep(1000);
    const HttpReply health = kept.call("GET", "/health");
    CHECK(health.status == 503);
    CHECK(health.headers.at("connection") == "close");
    CHECK(!kept.fill());
    const double start = seconds();
    const HttpReply late = server.chat(question("a", "")); // on a new connection
    check_refused(late, 503);
    CHECK(late.headers.at("connection") == "close");
    CHECK(seconds() - start < 5); // not when the others have ended
    std::string body;
    while (first.chunk(body)) {}
    CHECK(events_of(body).back() == "[DONE]");
    CHECK(second.reply().status == 200);
    server.port = 0;
    CHECK(server.wait().status == 0);
}

TEST_CASE("a drain ends in time, whoever waits and whoever does not read") {
    Serving server({"--drain-seconds", "1", "--max-seqs", "1"});
    Http runs(server.port), waits(server.port), deaf(server.port, "127.0.0.1", 1400);
    const int small = 1 << 12;
    setsockopt(deaf.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    deaf.ask("POST", "/tokenize", "{\"prompt\": \"" + std::string(300'000, '1') + "\"}");
    CHECK(deaf.head().status == 200);
    runs.ask("POST", "/v1/chat/completions", question("a", "\"n\": 64, \"max_tokens\": 4000, \"ignore_eos\": true, \"stream\": true"));
    CHECK(runs.head().status == 200);
    while (server.metric("num_requests_waiting") < 63) usleep(1000);
    waits.ask("POST", "/v1/chat/completions", question("a", "\"max_tokens\": 4"));
    while (server.metric("num_requests_waiting") < 64) usleep(1000);
    const double start = seconds();
    kill(server.pid, SIGTERM);
    check_refused(waits.reply(), 503);
    server.port = 0;
    const Result r = server.wait();
    CHECK(r.status == 0);
    CHECK(r.err.find("are abandoned") != std::string::npos);
    CHECK(seconds() - start > 0.9);
    CHECK(seconds() - start < 8);
}

TEST_CASE("whoever has an answer finds it counted, and its place free") {
    Serving server({"--max-queue", "0", "--max-seqs", "1"});
    for (int i = 1; i <= 200; i++) {
        REQUIRE(server.chat(question("a", "\"max_tokens\": 2, \"ignore_eos\": true")).status == 200);
        REQUIRE(server.metric("generation_tokens_total") == 2 * i);
    }
}

TEST_CASE("10,000 malformed requests") {
    Serving server({"--ctx", "64"});
    Random random{5};
    const std::string good = question("a", "\"max_tokens\": 1, \"stop\": [\"x\"], \"logit_bias\": {\"5\": 1}, \"stream\": true, \"n\": 2, \"temperature\": 0.5");
    auto http = std::make_unique<Http>(server.port);
    int refused = 0;
    for (int i = 0; i < 10'000; i++) {
        std::string bad = good;
        for (int n = 1 + random.below(4); n > 0; n--) {
            const size_t at = (size_t)random.below((int)bad.size());
            switch (random.below(4)) {
            case 0: bad.erase(at, 1 + (size_t)random.below(9)); break;
            case 1: bad[at] = (char)random.below(256); break;
            case 2: bad.insert(at, std::string(1 + (size_t)random.below(3), "{}[]\",:0-e"[random.below(10)])); break;
            default: bad.insert(at, bad.substr((size_t)random.below((int)bad.size()), 20));
            }
            if (bad.empty()) bad = " ";
        }
        const HttpReply r = http->call("POST", "/v1/chat/completions", bad);
        CHECK((r.status == 200 || r.status == 400 || r.status == 429));
        refused += r.status == 400;
    }
    CHECK(refused > 5000);
    for (int i = 0; i < 300; i++) { // not HTTP at all
        Http raw(server.port);
        std::string bytes;
        for (int n = random.below(200); n > 0; n--) bytes += (char)(random.below(3) ? random.below(256) : "\r\n: /"[random.below(5)]);
        try { raw.send(bytes + (random.below(2) ? "\r\n\r\n" : "")); } catch (const Error&) {}
    }
    CHECK(server.chat(question("a", "\"max_tokens\": 1")).status == 200);
    server.check_idle();
    CHECK(server.stop().status == 0);
}

TEST_CASE("malformed requests that come while the server ends") {
    for (int i = 0; i < 8; i++) {
        Serving server({"--ctx", "64"});
        std::atomic<int> sent{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; t++)
            threads.emplace_back([&sent, port = server.port] {
                try {
                    for (;; sent++) Http(port).send("GET / HTTP/9\r\n:\r\n\r\n");
                } catch (const Error&) {} // it is gone
            });
        while (sent < 200) usleep(1000);
        CHECK(server.stop().status == 0);
        for (auto& t : threads) t.join();
    }
}

// -------------------------------------------------------------------------------------------------------- batch

static Result batch(const std::string& in, const std::string& out, const Strings& more = {}) {
    Strings all = {MODEL, "-z", VOCABULARY, "-j", "1", "--name", "tiny", "--batch", in, "-o", out};
    all.insert(all.end(), more.begin(), more.end());
    return Process(PROGRAM, all).wait();
}
static std::string row(int i, const std::string& body, const char* url = "/v1/chat/completions") {
    return format("{\"custom_id\": \"r%d\", \"method\": \"POST\", \"url\": \"%s\", \"body\": ", i, url) + body + "}\n";
}

TEST_CASE("--gpus 2 on the CPU: two engines behind one port, with the answers of one, over HTTP and in a batch; figures of each") {
    Scratch scratch;
    std::string in;
    Serving one, two({"-d", "cpu", "--gpus", "2"});
    for (int i = 0; i < 12; i++) {
        const std::string body = question(std::to_string(i), format("\"seed\": %d, \"max_tokens\": 20", i));
        in += row(i, body);
        CHECK(content(two.chat(body)) == content(one.chat(body)));
    }
    write_file(scratch / "in", in);
    for (const char* n : {"1", "2"}) {
        const Result r = batch(scratch / "in", scratch / n, {"-d", "cpu", "--gpus", n});
        INFO(r.err);
        REQUIRE(r.status == 0);
    }
    auto answers = [&](const char* n) {
        Strings all;
        for (auto& line : lines(read_file(scratch / n))) all.push_back(Json(line)["response"]["body"]["choices"][0]["message"]["content"].str());
        return all;
    };
    CHECK(answers("1") == answers("2"));
    CHECK(answers("1").size() == 12);
    const std::string all = Http(two.port).call("GET", "/metrics").body;
    double sum = 0;
    for (const char* engine : {"0", "1"}) {
        const std::string name = format("vllm:engine_generation_tokens_total{model_name=\"tiny\",engine=\"%s\"} ", engine);
        REQUIRE(all.find(name) != std::string::npos);
        sum += atof(all.c_str() + all.find(name) + name.size());
        CHECK(atof(all.c_str() + all.find(name) + name.size()) > 0);
    }
    CHECK(sum == two.metric("generation_tokens_total"));
    CHECK(Http(one.port).call("GET", "/metrics").body.find("engine=") == std::string::npos);
    CHECK(two.stop().err.find("2 x cpu") != std::string::npos);
    check_refusal(Process(PROGRAM, Serving::with({"-d", "cpu", "--gpus", "2", "--allow-adapter-loading"})).wait(), "serve", "--gpus 2: adapters by name are for one GPU");
}

TEST_CASE("--cache-dir: a restart finds prompts, each key its own; the answers, the log and the figures say so") {
    Scratch s;
    write_file(s / "keys", "alpha one\nbeta two\n");
    const std::string body = question(many(300, "a page"), "\"max_tokens\": 20, \"temperature\": 0");
    const Strings options = {"--api-key-file", s / "keys", "--cache-dir", s / "pages/of/tiny", "--cache-size", "1GB"};
    std::string text;
    double prompt = 0, pages = 0;
    for (int round = 0; round < 3; round++) { // the third: another server has the folder meanwhile
        std::unique_ptr<DiskPages> another;
        if (round == 2) another = std::make_unique<DiskPages>(s / "pages/of/tiny", 1 << 30, "", Strings{}, [](auto&) {});
        Serving server(options);
        auto ask = [&](const char* key) {
            const HttpReply r = server.post("/v1/chat/completions", body, format("Authorization: Bearer %s\r\n", key));
            if (text.empty()) text = content(r);
            CHECK(content(r) == text);
            const Json j(r.body);
            prompt = j["usage"]["prompt_tokens"].number();
            return j["usage"]["prompt_tokens_details"]["cached_tokens"].number();
        };
        const double cached = ask("alpha");
        if (round == 0) CHECK(cached == 0);
        else CHECK((cached > prompt - 17 && cached < prompt));
        CHECK(ask("alpha") > prompt - 17);
        CHECK(server.metric("external_prefix_cache_hits_total") == (round ? cached : 0));
        CHECK(server.metric("external_prefix_cache_queries_total") == (round ? cached : floor((prompt - 1) / 16) * 16));
        if (round == 1) CHECK(ask("beta") == 0);
        CHECK((server.metric("disk_cache_read_bytes_total") > 0) == (round > 0));
        if (round == 1) pages = server.metric("disk_cache_pages");
        const Result r = server.stop(); // writes the rest
        CHECK(r.out.find(format("\"disk_tokens\": %.0f", round ? cached : 0)) != std::string::npos);
        CHECK(r.err.find("of 1 GB\n") != std::string::npos);
        CHECK((r.err.find("another server has this cache: no pages are written") != std::string::npos) == (round == 2));
        CHECK(r.err.find("alpha") == std::string::npos);
    }
    CHECK(pages >= floor(prompt / 16));
    // A second server that goes on without the folder.
    Serving server(options);
    fs::remove_all(s / "pages");
    CHECK(content(server.post("/v1/chat/completions", body, "Authorization: Bearer beta\r\n")) == text);
    const std::string err = server.stop().err;
    CHECK(err.find("tiny: No such file or directory: its pages are computed again\n") != std::string::npos);
    CHECK(err.find("tiny: No such file or directory: no pages are written\n") != std::string::npos);

    auto refused = [](const Strings& more, const std::string& word) {
        check_refusal(Process(PROGRAM, Serving::with(more)).wait(), "serve", word);
    };
    refused({"--cache-size", "5"}, "--cache-size is for --cache-dir");
    refused({"--cache-dir", s / "x", "--cache-size", "5XB"}, "--cache-size: 5XB is not a number");
    refused({"--cache-dir", s / "keys"}, "keys: not a folder");
}

TEST_CASE("a batch answers as the server does, in order, with errors in their places") {
    Scratch scratch;
    std::string in;
    Serving server;
    std::vector<std::string> wanted;
    for (int i = 0; i < 30; i++) {
        const std::string body = question(std::to_string(i), format("\"seed\": %d, \"max_tokens\": 20", i));
        in += row(i, body);
        wanted.push_back(content(server.chat(body)));
    }
    in += row(30, "{\"messages\": []}") + "\n" + row(31, "{\"prompt\": \"a\", \"max_tokens\": 2}", "/v1/completions") + row(32, "{}", "/v1/moderations") +
          row(33, "7") + row(34, question("a", "\"stream\": true"));
    write_file(scratch / "in", in);
    const Result r = batch(scratch / "in", scratch / "out", {"--max-seqs", "5"});
    INFO(r.err);
    REQUIRE(r.status == 0);
    const Strings out = lines(read_file(scratch / "out"));
    REQUIRE(out.size() == 35);
    for (int i = 0; i < 35; i++) {
        const Json j(out[(size_t)i]);
        CHECK(j["custom_id"].str() == format("r%d", i));
        CHECK(j["error"].is(sj::Null));
        CHECK(j["id"].is(sj::String));
        const int status = i < 30 || i == 31 ? 200 : i == 32 ? 404 : 400;
        CHECK(j["response"]["status_code"].number() == status);
        if (i < 30) CHECK(j["response"]["body"]["choices"][(size_t)0]["message"]["content"].str() == wanted[(size_t)i]);
        if (status != 200) CHECK(j["response"]["body"]["error"]["message"].str() != "");
    }
    CHECK(scratch.count() == 2); // no partial file is left
    check_refusal(batch(scratch / "in", scratch / "out"), "serve", "exists");
}

TEST_CASE("completion_tokens: what was drawn, the end token too, in every place the same") {
    const int end = tiny().file.config.end_tokens.at(0);
    const std::string ends = format("\"logit_bias\": {\"%d\": 100}, \"max_tokens\": 9", end);
    const std::string runs = "\"seed\": 3, \"max_tokens\": 12, \"ignore_eos\": true";
    Serving server;
    const std::string said = content(server.chat(question("hi", runs)));
    std::string stop = ", \"stop\": ";
    size_t cut = said.size() - 1;
    while (((uint8_t)said[cut] & 0xC0) == 0x80) cut--;
    sj::quote(stop, said.substr(cut)); // its last character: few texts have it before
    const std::vector<std::pair<std::string, double>> asked = {
        {ends, 1}, {ends + ", \"n\": 3", 3}, {ends + ", \"ignore_eos\": true", 9}, {runs, 12}, {runs + stop, said.find(said.substr(cut)) == cut ? 12 : 0}};
    double sum = 12;
    std::string in;
    std::vector<double> counts;
    for (auto& one : asked) {
        const std::string& more = one.first;
        const Json j(server.chat(question("hi", more)).body);
        counts.push_back(j["usage"]["completion_tokens"].number());
        INFO(more);
        if (one.second > 0) CHECK(counts.back() == one.second);
        CHECK(j["usage"]["total_tokens"].number() == counts.back() + j["usage"]["prompt_tokens"].number());
        const std::vector<std::string> events = events_of(server.chat(question("hi", more + ", \"stream\": true, \"stream_options\": {\"include_usage\": true}")).body);
        CHECK(Json(events.at(events.size() - 2))["usage"]["completion_tokens"].number() == counts.back());
        sum += 2 * counts.back();
        in += row((int)counts.size() - 1, question("hi", more));
    }
    const Json ended(server.chat(question("hi", ends)).body);
    CHECK(ended["choices"][(size_t)0]["finish_reason"].str() == "stop");
    CHECK(ended["choices"][(size_t)0]["message"]["content"].str() == "");
    sum += 1;
    CHECK(server.metric("generation_tokens_total") == sum);
    double logged = 0;
    for (auto& line : lines(server.stop().out)) logged += Json(line)["completion_tokens"].number();
    CHECK(logged == sum);

    Scratch scratch;
    write_file(scratch / "in", in);
    REQUIRE(batch(scratch / "in", scratch / "out").status == 0);
    const Strings out = lines(read_file(scratch / "out"));
    REQUIRE(out.size() == counts.size());
    for (size_t i = 0; i < out.size(); i++) CHECK(Json(out[i])["response"]["body"]["usage"]["completion_tokens"].number() == counts[i]);
}

TEST_CASE("with an adapter a batch says what qwen3 says with it, and not what it says without; so do quantised models, which stay packed") {
    Scratch scratch;
    // The fixture's B is zero: give it numbers.
    const std::string fixture = "tests/fixtures/train/adapter/", adapter = scratch / "adapter";
    fs::create_directory(adapter);
    fs::copy_file(fixture + "adapter_config.json", adapter + "/adapter_config.json");
    std::string file = read_file(fixture + "adapter_model.safetensors");
    uint64_t length;
    memcpy(&length, file.data(), 8);
    const Json header(file.substr(8, length));
    for (auto [name, t] : header.doc.root().members())
        for (size_t at = (size_t)t["data_offsets"][(size_t)0].number(), i = 0; name.find("lora_B") != std::string::npos && at < t["data_offsets"][(size_t)1].number(); at += 4, i++) {
            const float b = 0.05f * (float)((int)(i % 7) - 3);
            memcpy(&file[8 + length + at], &b, 4);
        }
    write_file(adapter + "/adapter_model.safetensors", file);
    const char* asked = R"({"model": "%s", "messages": [{"role": "user", "content": "What is a warp?"}], "temperature": 0, "max_tokens": 24})";
    const char* qwen3 = getenv("QWEN3") ? getenv("QWEN3") : "./qwen3";
    std::string unlike; // what they say of different weights
    for (const std::string kind : {"", "int4", "int8", "fp8"}) {
        CAPTURE(kind);
        const std::string model = kind.empty() ? MODEL : scratch / kind + ".bin";
        if (!kind.empty()) REQUIRE(Process(qwen3, Strings{MODEL, "--quantize", kind, model} + (kind == "int4" ? Strings{"--group", "64"} : Strings{})).wait().status == 0);
        const auto answers = [&](const Strings& names, const Strings& more) {
            std::string in;
            for (auto& name : names) in += row((int)in.size(), format(asked, name.c_str()));
            write_file(scratch / "in", in);
            const std::string out = scratch / "out";
            fs::remove(out);
            const Result r = Process(PROGRAM, Strings{model, "-z", VOCABULARY, "-d", "cpu", "-j", "1", "--name", "tiny", "--batch", scratch / "in", "-o", out} + more).wait();
            INFO(r.err);
            REQUIRE(r.status == 0);
            CHECK(r.err.find(" parameters, " + (kind.empty() ? "bfloat16" : kind) + ", ") != std::string::npos);
            Strings said;
            for (auto& line : lines(read_file(out))) said.push_back(Json(line)["response"]["body"]["choices"][(size_t)0]["message"]["content"].str() + "\n");
            REQUIRE(said.size() == names.size());
            return said;
        };
        const auto told = [&](const Strings& more) {
            return Process(qwen3, Strings{model, "-z", VOCABULARY, "-d", "cpu", "-t", "0", "-n", "24", "-i", "What is a warp?"} + more).wait().out;
        };
        const std::string with = told({"--adapter", adapter}), without = told({});
        CHECK(with != without);
        CHECK(without != unlike);
        unlike = without;
        CHECK(answers({"tiny"}, {"--adapter", adapter}) == Strings{with});
        CHECK(answers({"tiny", "other", "tiny", "other"}, {"--adapter", "other=" + adapter}) == Strings{without, with, without, with});
    }
    write_file(scratch / "in", row(0, format(asked, "tiny")));
    check_refusal(batch(scratch / "in", scratch / "other", {"--adapter", "tests"}), "serve", "adapter_config.json");
}

TEST_CASE("a batch goes on where it was stopped, and asks nothing twice") {
    Scratch scratch;
    std::string in;
    for (int i = 0; i < 40; i++) in += row(i, question(std::to_string(i), format("\"seed\": %d, \"max_tokens\": 30, \"ignore_eos\": true", i)));
    write_file(scratch / "in", in);
    REQUIRE(batch(scratch / "in", scratch / "whole").status == 0);
    auto texts = [&](const std::string& path) {
        Strings all;
        for (auto& line : lines(read_file(path))) all.push_back(Json(line)["response"]["body"]["choices"][(size_t)0]["message"]["content"].str());
        return all;
    };
    const std::string whole = read_file(scratch / "whole");
    // The leftovers of a killed run: the first line of the partial file, some answers, half of another.
    std::string partial;
    {
        Process stopped(PROGRAM, {MODEL, "-z", VOCABULARY, "-j", "1", "--name", "tiny", "--max-seqs", "1", "--batch", scratch / "in", "-o", scratch / "out"});
        while (!fs::exists(scratch / "out.partial") || lines(read_file(scratch / "out.partial").substr(0, read_file(scratch / "out.partial").rfind('\n') + 1)).size() < 4) usleep(100);
        kill(stopped.pid, SIGINT);
        const Result r = stopped.wait();
        CHECK((r.status == 130 || r.status == 0));
        partial = r.status == 0 ? "" : read_file(scratch / "out.partial");
    }
    REQUIRE(partial != "");
    const Strings kept = lines(partial);
    write_file(scratch / "out.partial", partial + "0123456789abcdef {\"id\": \"batch_req_1\", \"custom");
    const Result r = batch(scratch / "in", scratch / "out");
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(texts(scratch / "out") == texts(scratch / "whole"));
    const std::string done = read_file(scratch / "out");
    for (size_t i = 1; i < kept.size(); i++) CHECK(done.find(kept[i].substr(17) + "\n") != std::string::npos); // their very bytes

    // A flipped bit is found wherever it is.
    for (size_t at : {partial.find(kept[1]) + 3, partial.find(kept[2]) + kept[2].size() / 2, partial.find(kept[3]) + 17}) {
        std::string damaged = partial;
        damaged[at] ^= 1;
        write_file(scratch / "damaged.partial", damaged);
        check_refusal(batch(scratch / "in", scratch / "damaged"), "serve", "is damaged");
        CHECK(read_file(scratch / "damaged.partial") == damaged);
    }
    write_file(scratch / "other.partial", partial);
    check_refusal(batch(scratch / "in", scratch / "other", {"--think", "1"}), "serve", "begun with another");
    write_file(scratch / "bad", "{\"custom_id\": \"a\"}\n{\"custom_id\": \"a\"}\n");
    check_refusal(batch(scratch / "bad", scratch / "x"), "serve", "line 2");
    write_file(scratch / "bad", "{\n");
    check_refusal(batch(scratch / "bad", scratch / "x"), "serve", "line 1");
    CHECK(whole != "");
}

TEST_CASE("two batches on one output: the second refuses at its start") {
    Scratch scratch;
    write_file(scratch / "in", row(0, question("a", "\"n\": 8, " + ENDLESS)));
    Process first(PROGRAM, {MODEL, "-z", VOCABULARY, "-j", "1", "--name", "tiny", "--max-seqs", "1", "--batch", scratch / "in", "-o", scratch / "out"});
    while (read_file_if(scratch / "out.partial").find('\n') == std::string::npos) usleep(1000);
    check_refusal(batch(scratch / "in", scratch / "out", {"--max-seqs", "1"}), "serve", "another run");
    kill(first.pid, SIGKILL);
    first.wait();
    CHECK(!fs::exists(scratch / "out"));
    write_file(scratch / "in", row(0, question("a", "\"max_tokens\": 1")));
    check_refusal(batch(scratch / "in", scratch / "out"), "serve", "begun with another"); // whose lock went with it
}

TEST_CASE("a batch does not go on with other weights or another adapter in the same place") {
    Scratch scratch;
    std::string in;
    for (int i = 0; i < 120; i++) in += row(i, question(std::to_string(i), "\"max_tokens\": 30, \"ignore_eos\": true"));
    write_file(scratch / "in", in);
    const std::string model = scratch / "model.bin", adapter = scratch / "adapter", weights = read_file(MODEL);
    fs::copy_file(MODEL, model);
    fs::copy("tests/fixtures/train/adapter", adapter);
    // The leftovers of a killed run: at least the first line, which lists everything that the answers depend on.
    auto begin = [&](const std::string& out, const Strings& more) {
        Strings all = {model, "-z", VOCABULARY, "-j", "1", "--name", "tiny", "--batch", scratch / "in", "-o", out};
        all.insert(all.end(), more.begin(), more.end());
        Process p(PROGRAM, all);
        while (!fs::exists(out + ".partial") || read_file(out + ".partial").find('\n') == std::string::npos) usleep(100);
        kill(p.pid, SIGKILL);
        p.wait();
        REQUIRE(!fs::exists(out));
    };
    auto go_on = [&](const std::string& out, const Strings& more) {
        Strings all = {model, "-z", VOCABULARY, "-j", "1", "--name", "tiny", "--batch", scratch / "in", "-o", out};
        all.insert(all.end(), more.begin(), more.end());
        return Process(PROGRAM, all).wait();
    };
    auto edit = [](const std::string& path, const std::string& from, const std::string& to) {
        std::string all = read_file(path);
        const size_t at = all.find(from);
        REQUIRE(at != std::string::npos);
        write_file(path, all.replace(at, from.size(), to));
    };
    begin(scratch / "a", {});
    uint64_t header;
    memcpy(&header, weights.data(), 8);
    std::string other = weights;
    for (size_t i = 8 + header; i < other.size(); i += 2) other[i] ^= 1; // the last bit of every number
    write_file(model, other);
    check_refusal(go_on(scratch / "a", {}), "serve", "begun with another");
    write_file(model, weights);
    CHECK(go_on(scratch / "a", {}).status == 0);

    const Strings adapted = {"--adapter", adapter};
    const std::string config = adapter + "/adapter_config.json", matrices = adapter + "/adapter_model.safetensors";
    begin(scratch / "b", adapted);
    edit(config, "\"use_rslora\": false", "\"use_rslora\": true");
    check_refusal(go_on(scratch / "b", adapted), "serve", "begun with another");
    edit(config, "\"use_rslora\": true", "\"use_rslora\": false");
    std::string file = read_file(matrices);
    memcpy(&header, file.data(), 8);
    for (size_t i = 8 + header; i < file.size(); i += 4) file[i] ^= 1;
    write_file(matrices, file);
    check_refusal(go_on(scratch / "b", adapted), "serve", "begun with another");
}

TEST_CASE("options") {
    auto refused = [](const Strings& arguments, const std::string& word) { check_refusal(Process(PROGRAM, arguments).wait(), "serve", word); };
    refused({}, "no model");
    refused({MODEL, MODEL}, "one model");
    refused({MODEL, "--nonsense"}, "unknown option");
    refused({MODEL, "--port"}, "needs a value");
    refused({MODEL, "--port", "65536"}, "--port");
    refused({MODEL, "--port=65536"}, "--port: 65536");
    refused({MODEL, "-P", "65536"}, "-P: 65536");
    refused({MODEL, "-p", "0"}, "unknown option -p"); // which is top-p in qwen3
    refused({MODEL, "--invariant=1"}, "takes no value");
    refused({MODEL, "--ctx", "99999", "--port", "0"}, "limit is 4096");
    refused({MODEL, "--host", "nowhere"}, "not an address");
    refused({MODEL, "--deadline", "0"}, "--deadline");
    refused({MODEL, "--drain-seconds", "-1"}, "--drain-seconds");
    refused({MODEL, "--batch", MODEL}, "-o");
    refused({MODEL, "-o", "x"}, "--batch");
    refused({MODEL, "-z", VOCABULARY, "--port", "0", "--kv-memory", "0.000001"}, "--kv-memory");
    refused({"/nonexistent"}, "/nonexistent");
    const MemoryFile empty("\n\n");
    refused({MODEL, "--api-key-file", format("/proc/%d/fd/%d", (int)getpid(), empty.fd)}, "no key");
    const MemoryFile blank("  \t \n   # a comment\n \r\n");
    refused({MODEL, "--api-key-file", format("/proc/%d/fd/%d", (int)getpid(), blank.fd)}, "no key");
    Serving server;
    refused({MODEL, "-z", VOCABULARY, "--port", std::to_string(server.port)}, "Address already in use");
    const Result help = Process(PROGRAM, {"--help"}).wait();
    CHECK(help.status == 0);
    CHECK(help.out.find("--api-key-file") != std::string::npos);
}

TEST_CASE("--batch: every option is known to change answers, or not to") {
    Scratch s;
    write_file(s / "one.jsonl", "1"), write_file(s / "two.jsonl", "2"), fs::create_directory(s / "notes"), write_file(s / "notes/a.md", "warps");
    const ModelFile file(MODEL);
    const Tokenizer tokenizer(VOCABULARY), other("tokenizer.bin");
    const AdapterFile adapter("tests/fixtures/train/adapter", file.config);
    const std::function<void(const std::string&)> silent = [](auto&) {};
    const Documents documents({s / "notes", s / "index", 4}, silent), fewer({s / "notes", s / "index", 2}, silent);
    Options usual;
    usual.name = "m", usual.batch = s / "one.jsonl", usual.rope_scale = 2;
    auto with = [&](auto change, const AdapterFile* a = nullptr, const Documents* d = nullptr) {
        Options o = usual;
        change(o);
        if (o.rope_scaling.empty()) return batch_depends(o, file, a, tokenizer, d);
        ModelFile scaled(MODEL);
        scaled.scale_rope(o.rope_scaling, o.rope_scale, o.rope_original);
        return batch_depends(o, scaled, a, tokenizer, d);
    };
    const auto same = [](Options&) {};
    const std::string base = with(same), rope = with([](Options& o) { o.rope_scaling = "yarn"; }), docs = with(same, nullptr, &documents);
    const std::vector<std::pair<std::string, std::pair<std::string, std::string>>> changes = {
        {"--name", {base, with([](Options& o) { o.name = "n"; })}},
        {"--batch", {base, with([&](Options& o) { o.batch = s / "two.jsonl"; })}},
        {"--ctx", {base, with([](Options& o) { o.engine.context = 7; })}},
        {"--system", {base, with([](Options& o) { o.system = "x"; })}},
        {"--think", {base, with([](Options& o) { o.think = 1; })}},
        {"--dtype", {base, with([](Options& o) { o.dtype = "int8"; })}},
        {"--kv-dtype", {base, with([](Options& o) { o.ctx.kv_fp8 = true; })}},
        {"--activations", {base, with([](Options& o) { o.ctx.fp8_activations = true; })}},
        {"--activations", {base, with([](Options& o) { o.ctx.int8_activations = true; })}},
        {"--device", {base, with([](Options& o) { o.ctx.plain = true; })}},
        {"--rope-scaling", {base, rope}},
        {"--rope-scale", {rope, with([](Options& o) { o.rope_scaling = "yarn", o.rope_scale = 3; })}},
        {"--yarn-orig-ctx", {rope, with([](Options& o) { o.rope_scaling = "yarn", o.rope_original = 64; })}},
        {"--adapter", {base, with(same, &adapter)}},
        {"--tokenizer", {base, batch_depends(usual, file, nullptr, other, nullptr)}},
        {"--docs", {base, docs}},
        {"--passages", {docs, with(same, nullptr, &fewer)}},
        {"--quote", {docs, with([](Options& o) { o.documents.quote = 1; }, nullptr, &documents)}}};
    // Documents::hash covers options of documents; --packed changes quantised models only. The others change speed, room or the API.
    std::set<std::string> known = {"--docs-embed", "--docs-rerank", "--index", "--packed", "--host", "--port", "--task", "--max-seqs", "--max-queue", "--kv-memory",
        "--cache-dir", "--cache-size", "--chunk", "--gpus", "--one-kernel", "--lookup", "--jump-ahead", "--api-key-file", "--deadline", "--drain-seconds", "--cors",
        "--predict-status", "--predict-system", "--predict-max-tokens", "--files", "--allow-adapter-loading", "--adapter-memory", "--title", "--starter", "--output", "--threads",
        "--invariant", "--help"};
    CHECK(with(same) == base);
    for (auto& [name, both] : changes) {
        const std::string option = name;
        INFO(option);
        CHECK(both.first != both.second);
        known.insert(name);
    }
    for (auto& name : options_of(PROGRAM)) {
        INFO(name << ": does it change answers? If so, batch_depends needs it");
        CHECK(known.count(name) == 1);
    }
}
TEST_SUITE_END();
