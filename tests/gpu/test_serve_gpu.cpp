// The engine of serve on a GPU: alone it says what a Session says; with `invariant` it says that in any company; and the
// same jobs at the same steps give the same answers. Built by nvcc, run where a GPU is.
#include "form/gbnf.h"
#include "form/matcher.h"
#include "form/regex.h"
#include "form/schema.h"
#include "model/device.h"
#include "model/draw_ahead.h"
#include "model/lookup.h"
#include "model/quantize.h"
#include "model/write.h"
#include "server/api/service.h"
#include "server/engine/disk_pages.h"
#include "server/engine/gpu_step.h"
#include "server/engine/mixed.h"
#include "tests/adapters.h"
#include "tests/engine.h"
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "tests/gpu/checkpoint.h" // (needs a Random)

static void on_gpu(bool invariant) {
    if (!where.gpu) where = open_gpu(0);
    where.invariant = invariant;
}

static std::string text_of(const Job& job) {
    std::string text;
    for (auto& p : job.reply->pieces) text += p.text;
    return text;
}
static std::vector<Job> again(const std::vector<Job>& jobs) { // the same questions, new replies
    std::vector<Job> copy = jobs;
    for (Job& job : copy) job.reply = std::make_shared<Reply>(), job.reply->left = 1;
    return copy;
}
// The text of each job, run by an engine of its own.
static std::vector<std::string> each_alone(Random& random, const std::vector<Job>& jobs) {
    std::vector<std::string> texts;
    for (auto& job : jobs) {
        Bench bench({256, 1, 256, 256, 4'000'000});
        const std::vector<Job> one = again({job});
        run_all(bench, random, one);
        texts.push_back(text_of(one[0]));
    }
    return texts;
}

TEST_CASE("one answer at a time is a Session's: penalties, stops, log-probabilities, any length") {
    on_gpu(false);
    Random random{11};
    for (int round = 0; round < 40; round++) {
        Bench bench({256, 24, 256, 256, 4'000'000});
        std::vector<Job> jobs = {random_job(random, 256)};
        if (jobs[0].prompt.size() == 1) jobs[0].prompt.push_back(5); // (a Session decodes it, the engine takes it for a prompt)
        INFO("round " << round);
        run_all(bench, random, jobs);
        check_answer(jobs[0], expected(jobs[0], 256));
    }
}

TEST_CASE("an answer that runs alone takes its steps by one kernel, and is what a Session says by it; up to 8 together too, nine do not") {
    on_gpu(false);
    const RandomCheckpoint m(where, 256, 512, 4, 2, 1024, 2, true);
    where.one_kernel = Context::TOGETHER;
    Random random{21};
    const EngineOptions options = {256, 9, 256, 256, 40'000'000};
    auto job_of = [&] {
        Job job = random_job(random, 256);
        if (job.prompt.size() == 1) job.prompt.push_back(5);
        job.alternatives = -1; // (those of log-probabilities are not by one kernel)
        return job;
    };
    auto taken = [](Bench& bench) {
        uint32_t steps = 0;
        copy_out(bench.engine.ctx, &steps, bench.engine.on_gpu->kernel_steps(), 1);
        return steps;
    };
    for (int round = 0; round < 12; round++) {
        Bench bench(options, m.file->config, *m.weights);
        REQUIRE(bench.engine.on_gpu->kernel_steps());
        std::vector<Job> jobs = {job_of()};
        INFO("round " << round);
        run_all(bench, random, jobs);
        const Generation want = expected(jobs[0], 256, *m.weights, m.file->config);
        check_answer(jobs[0], want);
        CHECK(taken(bench) + 1 >= want.ids.size());
        CHECK(taken(bench) <= want.ids.size() + 8); // (what was under way at its end, and what a stop string cut off)
    }
    for (size_t together : {2, 3, 5, 8, 9}) {
        INFO(together << " together");
        Bench bench(options, m.file->config, *m.weights);
        std::vector<Job> jobs;
        for (size_t i = 0; i < together; i++) {
            jobs.push_back(job_of());
            jobs[i].max_tokens = 100, jobs[i].ignore_eos = true, jobs[i].stops.clear();
            REQUIRE(bench.desk.submit({jobs[i]}));
        }
        run_all(bench, random, {});
        if (together == 9) CHECK(taken(bench) < 20);
        else CHECK(taken(bench) > 90);
        size_t alike = 0; // (prompts computed together can differ in a bit, and so answers in time)
        for (const Job& job : jobs) {
            const std::string text = text_of(job), want = expected(job, 256, *m.weights, m.file->config).text;
            for (size_t i = 0; i < std::min(text.size(), want.size()) && text[i] == want[i]; i++) alike++;
        }
        CHECK(alike >= 20 * together); // of about 300 bytes each
    }
    where.one_kernel = Context::OFF;
}

TEST_CASE("several answers by one kernel: greedy ones of all lengths, forms, biases, penalties, preempted ones") {
    on_gpu(false);
    const RandomCheckpoint m(where, 256, 512, 4, 2, 1024, 2, true);
    where.one_kernel = Context::TOGETHER;
    Forms forms;
    const auto form = forms.get(tiny().tokenizer, "words", [] { return grammar_of_regex("[a-z]{3,20}( [0-9]+){2}"); });
    const int letter = tiny().tokenizer.encode("e", false)[0];
    for (size_t pages : {400, 24}) {
        Random random{23};
        Bench bench({256, 8, 256, 256, pages * KVCache<bf16>::bytes(m.file->config, 1)}, m.file->config, *m.weights);
        REQUIRE(bench.engine.on_gpu->kernel_steps());
        std::vector<Job> jobs;
        for (int i = 0; i < 24; i++) {
            Job job;
            job.reply = std::make_shared<Reply>(), job.reply->left = 1;
            for (int n = 0; n < 5 + i % 7; n++) job.prompt.push_back((n * 37 + i * 11) % 300);
            job.how.temperature = 0, job.how.seed = (uint64_t)i, job.ignore_eos = true, job.max_tokens = (size_t)(10 + 9 * (i % 11));
            if (i % 4 == 1) job.how.repeat = 1.3f, job.how.presence = 0.5f;
            if (i % 6 == 2) job.bias = {{letter, 100.f}}; // nothing but this token
            if (i % 6 == 4) job.form = form, job.ignore_eos = false;
            if (i % 8 == 7) job.how.temperature = 0.7f;
            jobs.push_back(job);
        }
        run_all(bench, random, jobs);
        uint32_t steps = 0;
        copy_out(bench.engine.ctx, &steps, bench.engine.on_gpu->kernel_steps(), 1);
        CHECK(steps > 120); // for up to 1,239 tokens, eight a step at most
        size_t alike[3] = {}, compared[3] = {}; // greedy, with penalties, drawn
        for (size_t i = 0; i < jobs.size(); i++) {
            const Job& job = jobs[i];
            INFO("answer " << i << ", " << pages << " pages");
            const std::string text = text_of(job);
            if (job.form) {
                Matcher m(job.form);
                CHECK(text.size() > 8);
                CHECK(m.advance(text));
                if (std::string(job.reply->pieces.back().finish) == "stop") CHECK(m.may_end());
            } else if (!job.bias.empty()) {
                CHECK(text == std::string(job.max_tokens, 'e'));
            } else { // (prompts computed together can differ in a bit, and so answers in time)
                const std::string want = expected(job, 256, *m.weights, m.file->config).text;
                const size_t kind = job.how.temperature != 0 ? 2 : has_penalties(job.how), same = (size_t)(std::mismatch(want.begin(), want.begin() + (long)std::min(want.size(), text.size()), text.begin()).first - want.begin());
                CHECK(same >= std::min<size_t>(8, want.size()));
                alike[kind] += same, compared[kind] += want.size();
            }
        }
        for (int kind = 0; kind < 3; kind++) {
            MESSAGE(alike[kind] << " of " << compared[kind] << " bytes alike, preempted " << bench.desk.figures->preempted << ", steps " << steps);
            CHECK(alike[kind] >= compared[kind] / (kind == 2 ? 6 : 2)); // (drawn ones part for good)
        }
        CHECK((bench.desk.figures->preempted > 0) == (pages == 24));
    }
    where.one_kernel = Context::OFF;
}

TEST_CASE("lookup by the one kernel: an answer that runs alone is a Session's; many steps and tokens are saved; others come beside it") {
    on_gpu(false);
    const RandomCheckpoint m(where, 256, 512, 4, 2, 1024, 2, true);
    where.one_kernel = Context::TOGETHER;
    Random random{22};
    EngineOptions options = {256, 4, 256, 256, 40'000'000}; // (fewer answers at once than rows of a step)
    options.lookup = LookUp::MOST;
    auto job_of = [&](bool repeats) {
        Job job = random_job(random, 256);
        if (job.prompt.size() == 1) job.prompt.push_back(5);
        job.alternatives = -1;
        if (repeats) job.prompt = {7, 8, 9, 10, 7, 8, 9, 10, 7}, job.max_tokens = 200, job.stops.clear();
        if (repeats) job.how.temperature = 0, job.how.repeat = 1, job.how.presence = job.how.frequency = 0;
        return job;
    };
    size_t proposed = 0, right = 0;
    for (int round = 0; round < 24; round++) {
        Bench bench(options, m.file->config, *m.weights);
        REQUIRE(bench.engine.lookup.most == LookUp::MOST);
        bench.engine.lookup.always = round % 3 > 0;
        std::vector<Job> jobs = {job_of(round % 2)};
        INFO("round " << round);
        run_all(bench, random, jobs);
        check_answer(jobs[0], expected(jobs[0], 256, *m.weights, m.file->config));
        proposed += bench.engine.lookup.proposed, right += bench.engine.lookup.right;
    }
    CHECK(proposed > 200);
    CHECK(right > 100);
    CHECK(right < proposed);
    for (int round = 0; round < 8; round++) {
        Bench bench(options, m.file->config, *m.weights);
        bench.engine.lookup.always = true;
        std::vector<Job> jobs;
        for (int i = 0; i < 8; i++) jobs.push_back(job_of(i % 2));
        INFO("round " << round);
        run_all(bench, random, jobs);
        for (const Job& job : jobs) {
            REQUIRE(job.reply->pieces.size());
            CHECK(job.reply->pieces.back().finish);
            CHECK(job.reply->pieces.back().count <= job.max_tokens);
        }
    }
    where.one_kernel = Context::OFF;
    Bench without(options, m.file->config, *m.weights); // no such kernel: nothing is looked up
    CHECK(without.engine.lookup.most == 0);
}

TEST_CASE("FP8 keys and values: an answer alone is a Session's with them; with `invariant` it is the same in company") {
    struct Restore { ~Restore() { where.kv_fp8 = false; } } restore;
    Random random{19};
    for (bool invariant : {false, true}) {
        on_gpu(invariant);
        where.kv_fp8 = true;
        INFO("invariant " << invariant);
        const size_t page = KVCache<bf16>::bytes(tiny().file.config, 1, true) + widened_numbers(tiny().file.config, 1) * sizeof(bf16);
        for (int round = 0; round < 8; round++) {
            Bench bench({256, 24, 256, 256, 60 * page});
            CHECK(bench.desk.figures->pages == 60);
            std::vector<Job> jobs;
            for (int i = 0; i < (invariant ? 10 : 1); i++) jobs.push_back(random_job(random, 256));
            for (Job& job : jobs)
                if (job.prompt.size() == 1) job.prompt.push_back(5);
            run_all(bench, random, jobs);
            if (!invariant) check_answer(jobs[0], expected(jobs[0], 256));
            for (size_t i = 0; i < jobs.size() && invariant; i++) {
                Bench alone({256, 1, 256, 256, 60 * page});
                const std::vector<Job> one = again({jobs[i]});
                run_all(alone, random, one);
                CHECK(text_of(jobs[i]) == text_of(one[0]));
            }
        }
    }
}

// One answer after the other by an engine with a cache on disk. Returns what each reply says, and where its prompt was.
struct FromDisk {
    std::string text;
    std::vector<float> logprobs;
    size_t cached, read;
};
static std::vector<FromDisk> answers(DiskPages& disk, EngineOptions options, const std::vector<Job>& jobs, size_t pages) {
    options.disk = &disk;
    Bench bench(options);
    std::vector<FromDisk> all;
    for (Job job : again(jobs)) {
        REQUIRE(bench.desk.submit({job}));
        for (const double end = seconds() + 60; job.reply->left && seconds() < end;) bench.engine.step();
        REQUIRE(job.reply->left == 0);
        const Piece& last = job.reply->pieces.back();
        all.push_back({text_of(job), {}, last.cached, last.read});
        for (auto& piece : job.reply->pieces)
            for (auto& token : piece.tokens) {
                all.back().logprobs.push_back(token.logprob);
                for (auto& other : token.top) all.back().logprobs.push_back(other.logprob);
            }
    }
    for (const double end = seconds() + 60; disk.counts().pages < pages && seconds() < end;) bench.engine.step();
    CHECK(disk.counts().pages == pages);
    CHECK(bench.desk.figures->pages_used == 0);
    return all;
}

TEST_CASE("pages on disk: a restarted engine answers to the bit as one that has them in memory") {
    struct Restore { ~Restore() { where.kv_fp8 = false; } } restore;
    for (bool fp8 : {false, true}) {
        on_gpu(false);
        where.kv_fp8 = fp8;
        INFO("FP8 " << fp8);
        Scratch scratch;
        Random random{31};
        std::vector<Job> jobs;
        for (int i = 0; i < 8; i++) { // the second half asks the first half's questions again
            Job job = i < 4 ? random_job(random, 256) : jobs[(size_t)i - 4];
            for (int k = 0; i < 4 && k < 330; k++) job.prompt.push_back((k * (i + 3)) % 300);
            job.prompt.resize(330);
            if (i < 4) job.prompt[0] = 250 + i; // no page in common
            job.alternatives = 3, job.max_tokens = 60, job.how.repeat = 1, job.how.presence = job.how.frequency = 0;
            jobs.push_back(job);
        }
        const EngineOptions options = {512, 4, 256, 256, 16'000'000};
        std::vector<FromDisk> first, second;
        auto lines = [](auto& line) { FAIL(line); };
        {
            DiskPages disk(scratch.path.string(), 1 << 30, "m", {}, lines);
            first = answers(disk, options, jobs, 80);
        }
        DiskPages disk(scratch.path.string(), 1 << 30, "m", {}, lines);
        second = answers(disk, options, {jobs.begin(), jobs.begin() + 4}, 80);
        for (size_t i = 0; i < 4; i++) {
            INFO("prompt " << i);
            CHECK(first[i].cached == 0);
            CHECK(first[i + 4].cached == 320);
            CHECK(first[i + 4].read == 0);
            CHECK(second[i].cached == 320);
            CHECK(second[i].read == 320);
            CHECK(second[i].text == first[i + 4].text);
            CHECK(second[i].logprobs.size() >= 4);
            CHECK(second[i].logprobs == first[i + 4].logprobs);
        }
        CHECK(disk.counts().written == 0);
    }
}

TEST_CASE("with `invariant`: few pages of memory, many prompts, pages that come and go by the disk: no answer depends on it") {
    on_gpu(true);
    Scratch scratch;
    Random random{32};
    std::vector<Job> jobs;
    for (int i = 0; i < 60; i++) {
        Job job = random_job(random, 256);
        const int start = random.below(4);
        std::vector<int> prompt;
        for (int k = 0; k < 100; k++) prompt.push_back((k * (start + 2) + start) % 300);
        job.prompt.resize(std::min<size_t>(job.prompt.size(), 50));
        prompt.insert(prompt.end(), job.prompt.begin(), job.prompt.end());
        job.prompt = prompt, job.max_tokens = std::min<size_t>(job.max_tokens, 100);
        jobs.push_back(job);
    }
    const std::vector<std::string> alone = each_alone(random, jobs);
    DiskPages disk(scratch.path.string(), 1 << 30, "m", {}, [](auto& line) { FAIL(line); });
    for (auto [max_seqs, chunk, pages] : {std::tuple{8, 64, 24}, {24, 7, 40}, {7, 200, 18}}) {
        const std::string kind = format("at most %d, chunks of %d, %d pages", max_seqs, chunk, pages);
        INFO(kind);
        EngineOptions options = {256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()};
        options.disk = &disk;
        Bench bench(options);
        const std::vector<Job> all = again(jobs);
        size_t next = 0;
        for (const double end = seconds() + 120; seconds() < end;) {
            if (next < all.size() && random.below(3) == 0) REQUIRE(bench.desk.submit({all[next++]}));
            bench.engine.step();
            if (next == all.size() && bench.desk.inside == 0) break;
        }
        CHECK(bench.desk.inside == 0);
        for (size_t i = 0; i < all.size(); i++) CHECK(text_of(all[i]) == alone[i]);
        MESSAGE(kind << ": " << bench.desk.figures->disk_found << " tokens from the disk, preempted " << bench.desk.figures->preempted);
        CHECK(bench.desk.figures->disk_found > 0);
    }
}

TEST_CASE("with `invariant` an answer does not depend on its company, on chunks, pages or preemptions") {
    on_gpu(true);
    Random random{12};
    std::vector<Job> jobs;
    for (int i = 0; i < 40; i++) jobs.push_back(random_job(random, 256));
    const std::vector<std::string> alone = each_alone(random, jobs);
    uint64_t preempted = 0;
    for (auto [max_seqs, chunk, pages] : {std::tuple{24, 7, 400}, {24, 64, 30}, {7, 200, 24}, {40, 33, 90}}) {
        const std::string kind = format("at most %d, chunks of %d, %d pages", max_seqs, chunk, pages);
        INFO(kind);
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        const std::vector<Job> all = again(jobs);
        run_all(bench, random, all);
        for (size_t i = 0; i < all.size(); i++) CHECK(text_of(all[i]) == alone[i]);
        preempted += bench.desk.figures->preempted;
    }
    CHECK(preempted > 10);
}

TEST_CASE("with `invariant` an answer with an adapter does not depend on the other adapters in its steps") {
    on_gpu(true);
    Scratch scratch;
    std::vector<std::unique_ptr<AdapterFile>> files;
    for (int i = 0; i < 3; i++) {
        make_adapter(scratch / std::to_string(i), KINDS[i], 50 + (uint64_t)i);
        files.push_back(std::make_unique<AdapterFile>(scratch / std::to_string(i), tiny().file.config));
    }
    Random random{16};
    std::vector<Job> jobs;
    for (int i = 0; i < 24; i++) jobs.push_back(random_job(random, 256));
    auto run = [&](Bench& bench, std::vector<Job> some, size_t first) { // jobs from `first` on: the adapters in turn, and none
        std::vector<AdapterPtr> adapters = {nullptr};
        for (size_t i = 0; i < files.size(); i++) adapters.push_back(bench.engine.attach(*files[i], std::to_string(i)));
        for (size_t i = 0; i < some.size(); i++) some[i].adapter = adapters[(first + i) % 4];
        run_all(bench, random, some);
    };
    std::vector<std::string> alone;
    for (size_t i = 0; i < jobs.size(); i++) {
        Bench bench({256, 1, 256, 256, 4'000'000});
        const std::vector<Job> one = again({jobs[i]});
        run(bench, one, i);
        alone.push_back(text_of(one[0]));
    }
    for (auto [max_seqs, chunk, pages] : {std::tuple{24, 7, 400}, {7, 200, 24}}) {
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        const std::vector<Job> all = again(jobs);
        run(bench, all, 0);
        for (size_t i = 0; i < all.size(); i++) CHECK(text_of(all[i]) == alone[i]);
    }
}

// The distance of a token's reported log-probabilities from those of a Session.
struct Differences {
    double worst = 0, sum = 0;
    size_t count = 0;
    void add(const TokenInfo& got, const TokenInfo& want) {
        REQUIRE(got.top.size() == want.top.size());
        for (size_t k = 0; k < got.top.size(); k++) add(got.top[k].logprob, want.top[k].logprob);
        add(got.logprob, want.logprob);
    }
    void add(double got, double want) {
        const double d = std::abs(got - want);
        worst = std::max(worst, d), sum += d, count++;
    }
    double mean() const { return sum / (double)count; }
    // (The CPU's two roads are 0.043 apart at worst, 0.002 on average.) `rounding`: that there may be besides.
    void check(const Differences& rounding) const {
        INFO(count << " log-probabilities, " << mean() << " apart on average; by rounding " << rounding.mean());
        CHECK(worst < 0.2 + 2 * rounding.worst);
        CHECK(mean() < 0.01 + rounding.mean());
    }
    void check() const { check(Differences{0, 0, 1}); }
};

TEST_CASE("adapters in one graph: log-probabilities are, but for rounding, those of a Session with that adapter alone") {
    on_gpu(false);
    Scratch scratch;
    std::vector<std::unique_ptr<AdapterFile>> files;
    std::vector<std::unique_ptr<Weights<bf16>>> weights;
    std::vector<std::unique_ptr<AttachedAdapter<bf16>>> attached;
    for (int i = 0; i < 3; i++) {
        make_adapter(scratch / std::to_string(i), KINDS[i], 50 + (uint64_t)i);
        files.push_back(std::make_unique<AdapterFile>(scratch / std::to_string(i), tiny().file.config));
        weights.push_back(std::make_unique<Weights<bf16>>(tiny().file));
        weights.back()->upload(where, tiny().file);
        attached.push_back(std::make_unique<AttachedAdapter<bf16>>(where, *weights.back(), *files.back(), Session<bf16>::CHUNK));
    }
    for (size_t together : {1, 3, 13, 40}) { // the mix changes as answers begin and end, under the same graphs
        Bench bench(EngineOptions{256, 40, 64, 128, 4'000'000});
        std::vector<AdapterPtr> adapters = {nullptr};
        for (size_t i = 0; i < 3; i++) adapters.push_back(bench.engine.attach(*files[i], std::to_string(i)));
        Random random{17};
        std::vector<Job> jobs;
        for (size_t i = 0; i < together; i++) {
            Job job;
            job.reply = std::make_shared<Reply>();
            job.reply->left = 1;
            for (size_t n = 0; n < 2 + i % 9; n++) job.prompt.push_back((int)(n * n + i) % 300);
            job.how.seed = i, job.max_tokens = 5 + 3 * (i % 5), job.ignore_eos = true, job.alternatives = (int)(i % 4) * 5;
            job.adapter = adapters[(together + i) % 4];
            jobs.push_back(job);
        }
        run_all(bench, random, jobs);
        for (size_t i = 0; i < jobs.size(); i++) {
            Differences differences;
            const size_t adapter = (together + i) % 4;
            Session<bf16> session(tiny().file.config, adapter ? *weights[adapter - 1] : tiny().weights, 256, where);
            session.feed(jobs[i].prompt);
            for (auto& p : jobs[i].reply->pieces)
                for (auto& t : p.tokens) { // what the Session thinks of the same text
                    differences.add(t, told_of(session.logits, t.id, jobs[i].alternatives));
                    session.feed({t.id});
                }
            INFO(together << " together, answer " << i << " with adapter " << adapter);
            differences.check();
        }
    }
}

TEST_CASE("log-probabilities of prompts are, but for rounding, those of a Session, beside answers and from cached pages") {
    on_gpu(false);
    Random random{23};
    for (auto [max_seqs, chunk] : {std::pair{2, 100}, {16, 40}}) { // more targets in a step than rows of logits at once
        Bench bench(EngineOptions{256, max_seqs, chunk, 2 * chunk, 4'000'000});
        std::vector<Job> jobs;
        for (int i = 0; i < 24; i++) {
            jobs.push_back(random_job(random, 256));
            jobs.back().prompt_alternatives = i % 4 == 3 ? -1 : i % 4 * 2;
            if (i % 3 == 0) jobs.back().max_tokens = 0;
        }
        run_all(bench, random, jobs);
        size_t cached = 0;
        for (const Job& job : jobs) {
            REQUIRE(!job.reply->pieces.empty());
            const std::vector<TokenInfo>& told = job.reply->pieces[0].prompt;
            REQUIRE(told.size() == (job.prompt_alternatives < 0 ? 0 : job.prompt.size()));
            // (A prompt's tokens are improbable, and rounding moves their log-probabilities most: as much as between a
            // Session that reads the prompt at once and one that reads token by token.)
            Session<bf16> session(tiny().file.config, tiny().weights, 256, where), whole(tiny().file.config, tiny().weights, 256, where);
            std::vector<TokenInfo> at_once;
            if (!told.empty())
                whole.feed(job.prompt, nullptr, [&](const float* row) {
                    const size_t n = at_once.size() + 1;
                    at_once.push_back(told_of(row, n < job.prompt.size() ? job.prompt[n] : 0, job.prompt_alternatives));
                });
            Differences differences, rounding;
            for (size_t n = 0; n + 1 < told.size(); n++) {
                session.feed({job.prompt[n]});
                const TokenInfo want = told_of(session.logits, job.prompt[n + 1], job.prompt_alternatives);
                CHECK(told[n + 1].id == job.prompt[n + 1]);
                differences.add(told[n + 1], want), rounding.add(at_once[n], want);
            }
            if (differences.count) differences.check(rounding);
            if (!told.empty()) cached += job.reply->pieces.back().cached;
        }
        CHECK(cached > 0);
    }
}

TEST_CASE("one kernel a token with an adapter: the graph's logits but for one more rounding of each weight, on every run the same bits") {
    on_gpu(false);
    const RandomCheckpoint m(where, 1024, 3072, 16, 8, 4096, 2, true);
    Scratch scratch;
    for (const Kind& kind : KINDS) {
        INFO("rank " << kind.rank);
        make_adapter(scratch / "adapter", kind, 7, m.file->config);
        const AdapterFile file(scratch / "adapter", m.file->config);
        Weights<bf16> weights(*m.file);
        weights.upload(where, *m.file);
        const AttachedAdapter<bf16> attached(where, weights, file, Session<bf16>::GPU_CHUNK);
        std::vector<int> prompt;
        Random random{5};
        for (int i = 0; i < 50; i++) prompt.push_back(random.below(4096));
        auto logits_of = [&](Context::OneKernel road, const Weights<bf16>& weights) { // of the second token that is drawn
            Context ctx = where;
            ctx.one_kernel = road;
            Session<bf16> session(m.file->config, weights, 80, ctx);
            session.feed(prompt);
            Sampling greedy;
            greedy.temperature = 0;
            session.begin_draws(greedy, 4096, prompt.size(), 2);
            REQUIRE((dynamic_cast<GpuDraws&>(*session.draws).road != nullptr) == (road != Context::OFF));
            session.accept(session.draw());
            session.draw();
            std::vector<float> logits(4096);
            copy_out(session.ctx, logits.data(), session.row_logits, logits.size());
            return logits;
        };
        const std::vector<float> graph = logits_of(Context::OFF, weights), kernel = logits_of(Context::TOGETHER, weights);
        auto distance = [&](const std::vector<float>& a, const std::vector<float>& b) {
            double difference = 0, size = 0;
            for (int v = 0; v < 4096; v++) difference += std::pow(a[v] - b[v], 2), size += std::pow(b[v], 2);
            return std::sqrt(difference / size);
        };
        CHECK(distance(kernel, graph) <= 0.015);
        CHECK(distance(kernel, logits_of(Context::TOGETHER, *m.weights)) > 0.05); // without the adapter
        CHECK((kernel == logits_of(Context::TOGETHER, weights)));
        CHECK((kernel == logits_of(Context::BY_PHASE, weights)));
    }
}

// The tiny model in a format, on the GPU; embedding and head in INT8.
struct PackedTiny {
    std::unique_ptr<ModelFile> file;
    std::unique_ptr<Weights<bf16>> weights;
    explicit PackedTiny(const std::string& format) {
        if (format.empty()) return;
        Quantization how;
        how.format = format == "int4" ? Format::INT4 : format == "int8" ? Format::INT8 : Format::FP8, how.group = 64;
        char path[] = "/tmp/qwen3_packed.XXXXXX";
        close(mkstemp(path));
        write_safetensors(path, model_metadata(quantized_config(tiny().file, how), tiny().file.generation_text), quantize_model<bf16>(tiny().file, how, {}));
        file = std::make_unique<ModelFile>(path);
        weights = std::make_unique<Weights<bf16>>(*file, Format::PLAIN, true);
        weights->upload(where, *file);
        unlink(path);
        REQUIRE(weights->head.format == Format::INT8);
    }
};

TEST_CASE("log-probabilities of drawn tokens: with penalties, biases and forms they are the model's own, in graphs and without, of packed weights, too") {
    on_gpu(false);
    Forms forms;
    const auto form = forms.get(tiny().tokenizer, "words", [] { return grammar_of_regex("[a-z]{3,20}( [0-9]+){2}"); });
    Random random{18};
    std::vector<Job> jobs;
    for (size_t i = 0; i < 12; i++) {
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        for (size_t n = 0; n < 3 + i; n++) job.prompt.push_back((int)(7 * n + i) % 300);
        job.how.seed = i, job.how.temperature = 1.5f, job.max_tokens = 20, job.ignore_eos = true, job.alternatives = i % 4 == 3 ? -1 : (int)i;
        if (i % 2) job.how.repeat = 1.5f, job.how.frequency = 0.5f;
        if (i % 3 == 1) job.bias = {{(int)(5 * i), 4.f}, {77, 6.f}};
        if (i % 3 == 2) job.form = form;
        jobs.push_back(job);
    }
    struct Kind { std::string format; bool alone; };
    for (const Kind& kind : std::vector<Kind>{{"", true}, {"", false}, {"int4", true}, {"int8", true}, {"int8", false}, {"fp8", false}}) {
        const bool alone = kind.alone;
        const PackedTiny packed(kind.format);
        const Weights<bf16>& weights = packed.weights ? *packed.weights : tiny().weights;
        Bench bench({256, 16, 64, 128, 4'000'000}, tiny().file.config, weights);
        std::vector<Job> all = again(jobs);
        if (alone)
            for (Job& job : all) run_all(bench, random, {job});
        else run_all(bench, random, all);
        for (size_t i = 0; i < all.size(); i++) {
            Session<bf16> session(tiny().file.config, weights, 256, where);
            session.feed(all[i].prompt);
            std::unique_ptr<Session<bf16>> rounded; // every weight as bf16, as products of many tokens take it
            if (packed.weights) {
                Context invariant = where;
                invariant.invariant = true;
                rounded = std::make_unique<Session<bf16>>(tiny().file.config, weights, 256, invariant);
                rounded->feed(all[i].prompt);
            }
            Differences differences, rounding{0, 0, rounded ? 0u : 1u};
            for (auto& p : all[i].reply->pieces)
                for (auto& t : p.tokens) {
                    const TokenInfo want = told_of(session.logits, t.id, all[i].alternatives);
                    differences.add(t, want);
                    if (rounded) rounding.add(told_of(rounded->logits, t.id, 0).logprob, want.logprob), rounded->feed({t.id});
                    for (auto& other : t.top)
                        if (other.id == t.id) CHECK(other.logprob == t.logprob);
                    session.feed({t.id});
                }
            INFO(kind.format << (alone ? " alone" : " together") << ", answer " << i);
            CHECK((differences.count > 0) == (all[i].alternatives >= 0));
            if (differences.count) differences.check(rounding);
        }
    }
}

TEST_CASE("forms: tokens without a choice taken at once: with `invariant` the text of one token a step, and fewer steps") {
    on_gpu(true);
    Forms forms;
    const std::vector<std::function<Grammar()>> grammars = {
        [] { return grammar_of_regex("\\{\"customer_identification_number\": [0-9]{1,4}, \"preferred_delivery_address\": \"[a-z]{1,6}\"\\}"); },
        [] { return grammar_of_choice({"what else could it have been?", "what else would it be?"}); }};
    Random random{19};
    std::vector<Job> jobs;
    for (int i = 0; i < 20; i++) {
        jobs.push_back(random_job(random, 256));
        Job& job = jobs.back();
        if (job.prompt.size() == 1) job.prompt.push_back(5);
        if (i % 4 == 3) continue;
        job.form = forms.get(tiny().tokenizer, std::to_string(i % 2), grammars[(size_t)i % 2]);
        job.stops.clear(), job.how.repeat = 1, job.how.presence = job.how.frequency = 0, job.alternatives = -1;
        job.max_tokens = i % 5 ? 256 - job.prompt.size() : 9;
    }
    std::vector<std::string> first;
    for (auto [jump, max_seqs, pages] : {std::tuple{0, 24, 400}, {2, 24, 400}, {4, 24, 400}, {2, 24, 30}, {1, 3, 60}}) {
        Bench bench({256, max_seqs, 64, 128, (size_t)pages * Bench::page_bytes(), false, 0, true, jump});
        const std::vector<Job> all = again(jobs);
        run_all(bench, random, all);
        const std::string kind = format("jump %d, at most %d, %d pages", jump, max_seqs, pages);
        for (size_t i = 0; i < all.size(); i++) {
            INFO(kind << ", answer " << i);
            if (first.size() <= i) first.push_back(text_of(all[i]));
            else CHECK(text_of(all[i]) == first[i]);
        }
        CHECK((bench.desk.figures->forced > 20) == (jump > 0));
    }
}

TEST_CASE("the same jobs at the same steps: the same answers, and all pages back") {
    on_gpu(false);
    Random random{13};
    std::vector<Job> jobs;
    for (int i = 0; i < 60; i++) jobs.push_back(random_job(random, 256));
    std::vector<std::string> first;
    for (int run = 0; run < 2; run++) {
        Bench bench({256, 24, 33, 64, 60 * Bench::page_bytes()});
        Random steps{1};
        const std::vector<Job> all = again(jobs);
        run_all(bench, steps, all);
        for (size_t i = 0; i < all.size(); i++) {
            CHECK(all[i].reply->left == 0);
            if (run == 0) first.push_back(text_of(all[i]));
            else CHECK(text_of(all[i]) == first[i]);
        }
        CHECK(bench.desk.figures->preempted > 0);
    }
}

TEST_CASE("logit_bias, and log-probabilities that are the model's own") {
    on_gpu(false);
    Bench bench({256, 4, 64, 64, 4'000'000});
    Random random{14};
    Job job;
    job.reply = std::make_shared<Reply>();
    job.reply->left = 1;
    job.prompt = {1, 2, 3};
    job.max_tokens = 5, job.how.temperature = 0, job.ignore_eos = true, job.alternatives = 2;
    job.bias = {{77, 100.f}};
    run_all(bench, random, {job});
    std::vector<TokenInfo> tokens;
    for (auto& p : job.reply->pieces) tokens.insert(tokens.end(), p.tokens.begin(), p.tokens.end());
    REQUIRE(tokens.size() == 5);
    Session<bf16> session(tiny().file.config, tiny().weights, 64, where);
    session.feed(job.prompt);
    for (auto& t : tokens) {
        CHECK(t.id == 77);
        CHECK(t.logprob == doctest::Approx(told_of(session.logits, 77, 0).logprob).epsilon(1e-5));
        session.feed({77});
    }
}

TEST_CASE("an answer that wants to end may not before min_tokens, also where it gives way") {
    on_gpu(false);
    const int end = tiny().file.config.end_tokens.at(0);
    for (int pages : {200, 10}) {
        Bench bench({128, 4, 64, 64, (size_t)pages * Bench::page_bytes()});
        Random random{15};
        std::vector<Job> jobs;
        for (int i = 0; i < 6; i++) {
            Job job = random_job(random, 128);
            job.prompt.resize(1 + (size_t)i), job.stops.clear(), job.how = {}, job.how.seed = (uint64_t)i;
            job.ignore_eos = false, job.alternatives = -1;
            job.bias = {{end, 100.f}, {77, i % 2 ? 50.f : 0.f}};
            job.max_tokens = 100, job.min_tokens = 40 + 4 * (size_t)i;
            jobs.push_back(job);
        }
        run_all(bench, random, jobs);
        for (auto& job : jobs) {
            CHECK(job.reply->pieces.back().count == job.min_tokens + 1);
            CHECK(std::string(job.reply->pieces.back().finish) == "stop");
        }
    }
}

TEST_CASE("forms: kept in any company, with `invariant` the same; and the company says what it says without them") {
    on_gpu(true);
    Random random{16};
    Forms forms;
    const std::vector<std::function<Grammar()>> grammars = {[] { return grammar_of_json_object(); }, [] { return grammar_of_regex("[a-z]{3,20}( [0-9]+){2}"); },
                                                            [] { return grammar_of_choice({"yes", "no", "perhaps"}); }};
    std::vector<Job> jobs;
    for (int i = 0; i < 30; i++) {
        jobs.push_back(random_job(random, 256));
        if (i % 2) continue;
        const size_t kind = random.below(3);
        jobs.back().form = forms.get(tiny().tokenizer, std::to_string(kind), grammars[kind]);
        jobs.back().stops.clear(), jobs.back().max_tokens = 256 - jobs.back().prompt.size();
    }
    std::vector<std::string> alone;
    size_t complete = 0;
    for (auto& job : jobs) {
        Bench bench({256, 1, 256, 256, 4'000'000});
        const std::vector<Job> one = again({job});
        run_all(bench, random, one);
        alone.push_back(text_of(one[0]));
        if (!job.form) continue;
        Matcher m(job.form);
        CHECK(m.advance(alone.back()));
        if (std::string(one[0].reply->pieces.back().finish) != "stop") continue;
        complete++;
        CHECK(m.may_end());
    }
    CHECK(complete > 4);
    for (auto [max_seqs, chunk, pages] : {std::tuple{24, 7, 400}, {24, 64, 30}, {7, 200, 24}}) {
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        const std::vector<Job> all = again(jobs);
        run_all(bench, random, all);
        for (size_t i = 0; i < all.size(); i++) CHECK(text_of(all[i]) == alone[i]);
    }
    on_gpu(false); // one answer at a time draws as the CPU does: the same logits, but for rounding
    for (auto& job : jobs) {
        if (job.form) continue;
        Bench bench({256, 4, 256, 256, 4'000'000});
        Job copy = again({job})[0], form = again({jobs[0]})[0];
        run_all(bench, random, {copy, form}); // in steps with and without masks
        CHECK(copy.reply->left == 0);
        CHECK(form.reply->left == 0);
    }
}

// Draws that may be of the same tokens share a row of masks, which is copied on a stream of its own beside `forward`.
TEST_CASE("forms: draws that share a mask, and draws of one form that may not: with `invariant` each is what it is alone") {
    on_gpu(true);
    Random random{31};
    Forms forms;
    const Tokenizer& t = tiny().tokenizer;
    const auto letters = forms.get(t, "l", [] { return grammar_of_regex("[a-z ]{1,60}"); });
    const auto digits = forms.get(t, "d", [] { return grammar_of_regex("[0-9,]{1,60}"); });
    std::vector<Job> jobs;
    for (int i = 0; i < 32; i++) {
        Job job;
        job.prompt = {1 + i % 5, 2, 3}, job.how.seed = (uint64_t)i, job.how.temperature = i % 7 ? 1.2f : 0, job.max_tokens = 40;
        if (i % 8 != 7) job.form = i % 3 ? letters : digits;                       // and some with none beside them
        job.ignore_eos = i % 2;                                                    // the end is one of the tokens, or not,
        if (i % 4 == 0) job.ends = {t.encode(i % 8 ? "e" : "7", false)[0]};        // ... or another one,
        job.thinking = i % 5 == 0;                                                 // ... or at first <think> is
        jobs.push_back(job);
    }
    std::vector<std::string> alone;
    Bench one({256, 1, 256, 256, 4'000'000});
    for (auto& job : again(jobs)) {
        run_all(one, random, {job});
        alone.push_back(text_of(job));
    }
    for (int together : {32, 11}) {
        Bench bench({256, together, 256, 256, 4'000'000});
        const std::vector<Job> all = again(jobs);
        for (auto& job : all) REQUIRE(bench.desk.submit({job})); // all of them in the same steps
        run_all(bench, random, {});
        for (size_t i = 0; i < all.size(); i++)
            CHECK_MESSAGE(text_of(all[i]) == alone[i], "job " << i << ", " << together << " together");
    }
}
