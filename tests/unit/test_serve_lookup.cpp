// Prompt lookup in the server's engine: an answer that runs alone is the same as without lookup, in every respect.
#include "model/lookup.h"
#include "tests/engine.h"
#include <algorithm>
#include <string>
#include <vector>

static EngineOptions small() {
    EngineOptions o;
    o.context = 256, o.max_seqs = 4, o.chunk = 24, o.burst = 64, o.kv_bytes = 64 * Bench::page_bytes();
    return o;
}

// A prompt of random ids in which some come again, so that there is something to look up.
static Job repeating_job(Random& random) {
    Job job = random_job(random, 256);
    std::vector<int> some(job.prompt.begin(), job.prompt.begin() + std::min<ptrdiff_t>(12, (ptrdiff_t)job.prompt.size()));
    for (int i = 0; i < 4; i++) job.prompt.insert(job.prompt.end(), some.begin(), some.end());
    if (random.below(2)) job.how.temperature = 0, job.how.repeat = 1, job.how.presence = job.how.frequency = 0;
    if (random.below(4) == 0) job.min_tokens = (size_t)random.below(20);
    if (random.below(4) == 0) job.bias = {{random.below(300), 3.f}, {random.below(300), -100.f}};
    if (random.below(5) == 0) job.max_tokens = 256 - job.prompt.size(); // to the end of the context
    job.max_tokens = std::min(job.max_tokens, 256 - job.prompt.size());
    return job;
}

// All data that a client receives, with the log-probabilities' bits.
static std::string all_told(const Job& job) {
    std::lock_guard lock(job.reply->mutex);
    std::string s;
    for (auto& p : job.reply->pieces) {
        s += p.text + "|" + p.stop + "|";
        for (auto& t : p.tokens) {
            s += format("%d %a '%s'", t.id, t.logprob, t.text.c_str());
            for (auto& a : t.top) s += format(" %d %a", a.id, a.logprob);
        }
        if (p.finish) s += format("%s %zu %zu", p.finish, p.count, p.thoughts);
    }
    return s;
}

// The pieces that these jobs are answered with; `together`: all at once.
static std::vector<std::string> answers(const std::vector<Job>& jobs, int lookup, bool together, LookUp* counts = nullptr) {
    EngineOptions o = small();
    o.lookup = lookup;
    Bench bench(o);
    bench.engine.lookup.always = true;
    std::vector<std::string> all;
    auto finish = [&] {
        for (int step = 0; step == 0 || (step < 20000 && bench.desk.inside); step++) {
            bench.engine.step();
            if (counts) counts->proposed = std::max(counts->proposed, bench.engine.lookup.proposed);
            if (counts) counts->right = std::max(counts->right, bench.engine.lookup.right);
        }
        REQUIRE(bench.desk.inside == 0);
        CHECK(bench.desk.figures->pages_used == 0);
    };
    std::vector<Job> own;
    for (const Job& job : jobs) {
        own.push_back(job);
        own.back().reply = std::make_shared<Reply>();
        own.back().reply->left = 1;
        REQUIRE(bench.desk.submit({own.back()}));
        if (!together) finish();
    }
    if (together) finish();
    for (const Job& job : own) all.push_back(all_told(job));
    return all;
}

TEST_CASE("an answer alone: the pieces, the log-probabilities and the end are those of a step a token") {
    Random random{21};
    std::vector<Job> jobs;
    for (int i = 0; i < 40; i++) jobs.push_back(repeating_job(random));
    const std::vector<std::string> without = answers(jobs, 0, false);
    LookUp most{};
    size_t told = 0;
    for (int n : {1, 3, LookUp::MOST}) {
        const std::vector<std::string> with = answers(jobs, n, false, &most);
        for (size_t i = 0; i < jobs.size(); i++) {
            INFO("lookup " << n << ", job " << i);
            CHECK(with[i] == without[i]);
            told += jobs[i].alternatives >= 0;
        }
    }
    MESSAGE("of one answer up to " << most.right << " of " << most.proposed << " proposed tokens were right");
    CHECK(told > 10);
    CHECK(most.right > 40);
    CHECK(most.proposed > most.right);
}

TEST_CASE("in company, until it is alone: the same") {
    Random random{22};
    std::vector<Job> jobs;
    for (int i = 0; i < 12; i++) jobs.push_back(repeating_job(random));
    LookUp most{};
    CHECK(answers(jobs, LookUp::MOST, true, &most) == answers(jobs, 0, false));
    CHECK(most.proposed > 0); // by the last one
}

TEST_CASE("answers that come and go: what a session says") {
    Random random{24};
    std::vector<Job> jobs;
    for (int i = 0; i < 30; i++) {
        jobs.push_back(random_job(random, 200));
        for (int k = 0; k < 40; k++) jobs.back().prompt.push_back(k % 7);
    }
    EngineOptions o = small();
    o.max_seqs = 2, o.lookup = LookUp::MOST;
    Bench bench(o);
    bench.engine.lookup.always = true;
    run_all(bench, random, jobs);
    for (const Job& job : jobs) check_answer(job, expected(job, 256));
}

TEST_CASE("one slot, steps of few tokens, a cache without a page to spare") {
    Random random{23};
    for (int i = 0; i < 12; i++) {
        const Job job = repeating_job(random);
        std::string texts[2];
        for (int lookup : {0, LookUp::MOST}) {
            EngineOptions o = small();
            o.max_seqs = 1, o.chunk = 1, o.burst = 3, o.lookup = lookup, o.kv_bytes = 16 * Bench::page_bytes();
            Bench bench(o);
            bench.engine.lookup.always = true;
            Job own = job;
            own.reply = std::make_shared<Reply>();
            own.reply->left = 1;
            REQUIRE(bench.desk.submit({own}));
            for (int step = 0; step == 0 || (step < 20000 && bench.desk.inside); step++) bench.engine.step();
            texts[lookup > 0] = all_told(own);
        }
        CHECK(texts[0] == texts[1]);
        CHECK(!texts[0].empty());
    }
}
