// An engine on the random model in fixtures/tiny, jobs for it, and their expected results.
#pragma once
#include "base/error.h"
#include "model/cpu.h"
#include "model/model_file.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "qwen3.cu"
#include "server/engine/desk.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"
#include "server/engine/reply.h"
#include "server/engine/speech.h"
#include <algorithm>
#include <doctest/doctest.h>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

using namespace server;

namespace {

const std::string MODEL = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";

// Where engines and sessions compute here: on the CPU, unless a suite says otherwise before it uses one.
Context where;

// The tiny model, in this process.
struct Tiny {
    Tokenizer tokenizer{VOCABULARY};
    ModelFile file{MODEL};
    Weights<bf16> weights{file};
    Tiny() {
        if constexpr (WITH_GPU) if (where.gpu) weights.upload(where, file);
    }
};
const Tiny& tiny() {
    static const Tiny t;
    return t;
}

struct Random {
    uint64_t seed, counter = 0;
    uint32_t bits() { return philox(seed, counter++, 98).v[0]; }
    int below(int n) { return (int)(bits() % (uint32_t)n); }
    double uniform() { return bits() / 4294967296.; }
};

// A job of random kind, and its expected result.
Job random_job(Random& random, int context) {
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

// The log-probabilities reported for a row of the tiny model's logits: of a sampled id and `alternatives` others.
inline TokenInfo told_of(const float* logits, int id, int alternatives) {
    Likeliest row;
    likeliest_cpu(where, row, logits, tiny().tokenizer.size(), alternatives);
    return describe(row, id, logits[id]);
}

Generation expected(const Job& job, int context, const Weights<bf16>& weights = tiny().weights,
                           const Config& config = tiny().file.config) {
    Config c = config;
    if (job.ignore_eos) c.end_tokens.clear();
    Session<bf16> session(c, weights, context, where);
    session.feed(job.prompt);
    Generation g;
    g.sampling = job.how, g.max_tokens = job.max_tokens, g.stops = job.stops;
    generate(session, &tiny().tokenizer, g, [](std::string_view) {});
    return g;
}

struct Bench { // an engine whose steps we take
    Desk desk;
    Engine<bf16> engine;
    explicit Bench(EngineOptions o, const Config& c = tiny().file.config, const Weights<bf16>& w = tiny().weights)
        : engine(c, w, tiny().tokenizer, desk, o, where) {
        desk.limit = 1000;
    }
    static size_t page_bytes() { return KVCache<bf16>::bytes(tiny().file.config, 1); }
};

// Takes the jobs in, some at a time, and steps until all are done.
void run_all(Bench& bench, Random& random, const std::vector<Job>& jobs) {
    size_t next = 0;
    for (int step = 0; step < 20000; step++) {
        if (next < jobs.size() && random.below(3)) REQUIRE(bench.desk.submit({jobs[next++]}));
        bench.engine.step();
        if (next == jobs.size() && bench.desk.inside == 0) break;
    }
    CHECK(bench.desk.inside == 0);
    CHECK(bench.desk.figures->pages_used == 0);
}

void check_answer(const Job& job, const Generation& want) {
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
    bool cut = false; // by a stop string
    for (auto& stop : job.stops) cut = cut || tiny().tokenizer.decode(want.ids, true).find(stop) != std::string::npos;
    CHECK(count == want.ids.size() + (std::string(want.finish) == "stop" && !cut)); // the end token counts
    REQUIRE(finish);
    CHECK(std::string(finish) == want.finish);
    if (job.alternatives >= 0) CHECK(tokens == text);
}

} // namespace
