// serve.cu: several adapters beside one model: the engine by itself, then the program (SERVE, else ./serve). What an
// answer must be is said by a Session whose weights have that adapter only, and by qwen3 --adapter.
#include "model/adapters.h"
#include "server/api/batch.h"
#include "server/api/paths.h"
#include "server/engine/adapters.h"
#include "server/engine/mixed.h"
#include "sj.h"
#include "tests/adapters.h"
#include "tests/engine.h"
#include "tests/http.h"
#include "tests/process.h"
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

struct Folders { // of three adapters
    Scratch scratch;
    Folders() {
        for (int i = 0; i < 3; i++) make_adapter(of(i), KINDS[i], 50 + (uint64_t)i);
    }
    std::string of(int i) const { return scratch / ("adapter" + std::to_string(i)); }
};
static const Folders& folders() {
    static const Folders all;
    return all;
}
namespace {
struct Alone { // the model with one of them
    AdapterFile file;
    Weights<bf16> weights{tiny().file};
    AttachedAdapter<bf16> attached;
    explicit Alone(const std::string& folder)
        : file(folder, tiny().file.config), attached(where, weights, file, Session<bf16>::CHUNK) {}
};
struct Company { // an engine with the three; the fourth is the model without any
    Bench bench;
    std::vector<AdapterPtr> adapters;
    std::vector<std::unique_ptr<Alone>> alone;
    explicit Company(EngineOptions o) : bench(o) {
        for (int i = 0; i < 3; i++) {
            alone.push_back(std::make_unique<Alone>(folders().of(i)));
            adapters.push_back(bench.engine.attach(alone.back()->file, "adapter" + std::to_string(i)));
        }
        adapters.push_back(nullptr);
    }
    const Weights<bf16>& weights(const AdapterPtr& adapter) const {
        for (size_t i = 0; i < alone.size(); i++)
            if (adapters[i] == adapter) return alone[i]->weights;
        return tiny().weights;
    }
};
} // namespace

TEST_CASE("adapters: in one batch each answer is what it is with its adapter alone") {
    Random random{31};
    uint64_t preempted = 0, found = 0;
    for (auto [max_seqs, chunk, pages] : {std::tuple{1, 16, 16}, {4, 7, 60}, {8, 64, 24}, {16, 200, 400}, {16, 33, 20}}) {
        const std::string kind = format("at most %d, chunks of %d, %d pages", max_seqs, chunk, pages);
        INFO(kind);
        Company company({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        std::vector<Job> jobs;
        for (int i = 0; i < 18; i++) {
            jobs.push_back(random_job(random, 256));
            jobs.back().adapter = company.adapters[(size_t)random.below(4)];
        }
        run_all(company.bench, random, jobs);
        preempted += company.bench.desk.figures->preempted, found += company.bench.desk.figures->found;
        size_t others = 0;
        for (const Job& job : jobs) {
            const Generation want = expected(job, 256, company.weights(job.adapter));
            check_answer(job, want);
            if (job.adapter && others <= 8) others += expected(job, 256).text != want.text;
        }
        CHECK(others > 8); // an adapter says something else
        for (auto& one : company.adapters) CHECK((!one || one->running + one->waiting == 0));
    }
    CHECK(preempted > 5);
    CHECK(found > 100);
}

// The log-probabilities of an answer that is drawn greedily, and of some other tokens.
static std::vector<float> logprobs_of(const Job& job) {
    std::vector<float> all;
    for (auto& p : job.reply->pieces)
        for (auto& t : p.tokens) {
            all.push_back(t.logprob);
            for (auto& a : t.top) all.push_back(a.logprob);
        }
    return all;
}
TEST_CASE("adapters: the logits of a mixed batch are to the bit those of one adapter alone") {
    Company company({256, 8, 32, 32, 0});
    std::vector<Job> jobs;
    for (size_t i = 0; i < 8; i++) {
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        for (size_t n = 0; n < 5 + 9 * i; n++) job.prompt.push_back((int)(n * n + i) % 300);
        job.how.temperature = 0, job.max_tokens = 6, job.ignore_eos = true, job.alternatives = 20;
        job.adapter = company.adapters[i % 4];
        jobs.push_back(job);
    }
    REQUIRE(company.bench.desk.submit(std::vector<Job>(jobs)));
    while (company.bench.desk.inside + company.bench.desk.inbox.size()) company.bench.engine.step();
    for (const Job& job : jobs) {
        Session<bf16> session(tiny().file.config, company.weights(job.adapter), 256, where);
        session.feed(job.prompt);
        std::vector<float> want;
        for (size_t i = 0; i < job.max_tokens; i++) {
            const float* logits = session.logits;
            const int best = (int)(std::max_element(logits, logits + tiny().tokenizer.size()) - logits);
            const TokenInfo info = told_of(logits, best, 20);
            want.push_back(info.logprob);
            for (auto& a : info.top) want.push_back(a.logprob);
            session.feed({best});
        }
        CHECK(logprobs_of(job) == want);
    }
}

// Texts of which the hidden state is wanted, beside answers.
static void check_hidden(bool plain) {
    struct Plain { // also where a check throws
        ~Plain() { where.plain = false; }
    } as_before;
    where.plain = plain;
    Company company({256, 4, 24, 48, 0, false, 4});
    Random random{33};
    std::vector<Job> jobs;
    for (size_t i = 0; i < 16; i++) {
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        for (size_t n = 0; n < 5 + 7 * i; n++) job.prompt.push_back((int)(n * 3) % 300);
        job.pooled = i % 2, job.max_tokens = job.pooled ? 1 : 9, job.how.seed = i, job.adapter = company.adapters[(i / 2) % 4];
        jobs.push_back(job);
    }
    run_all(company.bench, random, jobs);
    for (const Job& job : jobs) {
        const Weights<bf16>& weights = company.weights(job.adapter);
        if (!job.pooled) {
            check_answer(job, expected(job, 256, weights));
            continue;
        }
        Session<bf16> session(tiny().file.config, weights, 256, where);
        session.feed(job.prompt);
        const bf16* last = session.activations.normed + (job.prompt.size() - 1) * (size_t)tiny().file.config.C;
        for (size_t i = 0; i < (size_t)tiny().file.config.C; i++) REQUIRE(job.reply->pieces[0].hidden[i] == to_acc(last[i]));
    }
}
TEST_CASE("adapters: hidden states of texts beside answers are to the bit those of one adapter alone, also by the definitions") {
    check_hidden(false);
    check_hidden(true);
}

TEST_CASE("adapters: a page that was computed with one is never another's") {
    Company company({512, 4, 64, 64, 0});
    auto ask = [&](const AdapterPtr& adapter, uint64_t salt = 1) {
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        for (int i = 0; i < 100; i++) job.prompt.push_back(i);
        job.max_tokens = 20, job.salt = salt, job.adapter = adapter, job.how.seed = 5, job.ignore_eos = true;
        company.bench.desk.submit({job});
        while (job.reply->left) company.bench.engine.step();
        check_answer(job, expected(job, 512, company.weights(adapter)));
        return job.reply->pieces.back().cached;
    };
    for (auto& adapter : company.adapters) CHECK(ask(adapter) == 0);
    for (auto& adapter : company.adapters) CHECK(ask(adapter) == 96);
    CHECK(ask(company.adapters[1], 2) == 0); // nor another key's
    CHECK(ask(company.adapters[1], 2) == 96);
    // Not even that of an earlier one of the same name.
    company.alone[0] = std::make_unique<Alone>(folders().of(1));
    company.adapters[0] = company.bench.engine.attach(company.alone[0]->file, "adapter0");
    CHECK(ask(company.adapters[0]) == 0);
}

TEST_CASE("adapters: one that is unloaded answers to the end, and then its memory is given back") {
    const size_t before = LoadedAdapter::alive();
    Bench bench({256, 4, 64, 64, 0});
    Adapters registry;
    registry.open = [&](const std::string& name, const std::string& folder) {
        return bench.engine.attach(AdapterFile(folder, tiny().file.config, true), name);
    };
    auto job_with = [](AdapterPtr adapter) {
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        job.prompt = {1, 2, 3}, job.max_tokens = 60, job.how.seed = 8, job.how.temperature = 1.5f, job.ignore_eos = true;
        job.adapter = std::move(adapter);
        return job;
    };
    registry.load("x", folders().of(0));
    CHECK_THROWS_AS(registry.load("x", folders().of(1)), Error);
    std::vector<Job> first = {job_with(registry.find("x"))}; // (no list: it would keep a copy)
    Job seen = first[0];
    seen.adapter = nullptr;
    bench.desk.submit(std::move(first));
    first.clear();
    for (int i = 0; i < 5; i++) bench.engine.step();
    CHECK(LoadedAdapter::alive() == before + 1);
    CHECK(registry.unload("x"));
    CHECK(!registry.unload("x"));
    CHECK(!registry.find("x"));
    CHECK(LoadedAdapter::alive() == before + 1); // it is at work
    registry.load("x", folders().of(2));
    std::vector<Job> second = {job_with(registry.find("x"))};
    Job seen_too = second[0];
    seen_too.adapter = nullptr;
    bench.desk.submit(std::move(second));
    second.clear();
    CHECK(LoadedAdapter::alive() == before + 2);
    while (seen.reply->left || seen_too.reply->left) bench.engine.step();
    check_answer(seen, expected(seen, 256, Alone(folders().of(0)).weights));
    check_answer(seen_too, expected(seen_too, 256, Alone(folders().of(2)).weights));
    CHECK(LoadedAdapter::alive() == before + 1);
    registry.unload("x");
    CHECK(LoadedAdapter::alive() == before);
    // A failed load leaves nothing behind.
    for (const char* name : {"", "a b", "a\"b", "a\nb", "a,b"}) CHECK_THROWS_AS(registry.load(name, folders().of(0)), Error);
    CHECK_THROWS_AS(registry.load("y", "/nonexistent"), Error);
    CHECK(registry.now().empty());
    registry.load("y", folders().of(0));
    CHECK(registry.now().size() == 1);
}

// ------------------------------------------------------------------------------------------------- the program

static std::string question(const std::string& text, const std::string& more) {
    std::string body = "{\"messages\": [{\"role\": \"user\", \"content\": ";
    sj::quote(body, text);
    return body + "}], " + more + "}";
}
struct Served : Process {
    int port = 0;
    std::string auth;
    static const char* program() { return getenv("SERVE") ? getenv("SERVE") : "./serve"; }
    static Strings with(const Strings& more) {
        Strings all = {MODEL, "-z", VOCABULARY, "-j", "1", "--port", "0", "--name", "tiny"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    explicit Served(const Strings& more, const std::string& key = "")
        : Process(program(), with(more)), auth(key.empty() ? "" : "Authorization: Bearer " + key + "\r\n") {
        for (const double start = seconds(); port == 0; usleep(2000)) {
            const std::string said = err.text(), before = "listening on http://127.0.0.1:";
            INFO(said);
            REQUIRE(seconds() - start < 30);
            const size_t at = said.find(before);
            if (at != std::string::npos && said.back() == '\n') port = atoi(said.c_str() + at + before.size());
        }
    }
    ~Served() {
        if (pid) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
    }
    Result stop() {
        kill(pid, SIGTERM);
        const Result r = wait();
        pid = 0;
        return r;
    }
    HttpReply call(const char* method, const std::string& path, const std::string& body = "") const {
        return Http(port).call(method, path, body, auth);
    }
    HttpReply load(const std::string& name, const std::string& folder) const {
        return call("POST", "/v1/load_lora_adapter", "{\"lora_name\": \"" + name + "\", \"lora_path\": \"" + folder + "\"}");
    }
    HttpReply unload(const std::string& name) const {
        return call("POST", "/v1/unload_lora_adapter", "{\"lora_name\": \"" + name + "\"}");
    }
    std::string said(const std::string& model, const std::string& text) const { // greedily
        const HttpReply r = call("POST", "/v1/chat/completions",
                                 question(text, "\"temperature\": 0, \"max_tokens\": 24, \"model\": \"" + model + "\""));
        if (r.status != 200) return format("status %d", r.status);
        const Json j(r.body);
        CHECK(j["model"].str() == model);
        return j["choices"][(size_t)0]["message"]["content"].str();
    }
    std::string models() const {
        std::string all;
        const Json j(call("GET", "/v1/models").body);
        for (sj::Value one : j["data"].items()) all += one["id"].str() + "(" + one["parent"].str("-") + ") ";
        return all;
    }
};
static std::string said_text(const HttpReply& r) {
    sj::Doc doc;
    if (!sj::parse(doc, r.body).empty()) return "not JSON: " + r.body;
    return doc.root()["choices"][(size_t)0]["message"]["content"].str();
}
static void check_refused(const HttpReply& r, int status, const std::string& param, const std::string& word = "") {
    INFO(r.body);
    CHECK(r.status == status);
    const Json j(r.body);
    CHECK(j["error"]["param"].str() == param);
    CHECK(j["error"]["message"].str().find(word) != std::string::npos);
    CHECK(j["error"]["message"].str().find('\n') == std::string::npos);
}
// The output of qwen3 with the adapter in this folder.
static std::string by_qwen3(const std::string& folder, const std::string& text) {
    Strings all = {MODEL, "-z", VOCABULARY, "-d", "cpu", "-j", "1", "-t", "0", "-n", "24", "-i", text};
    if (!folder.empty()) all.insert(all.end(), {"--adapter", folder});
    std::string out = Process(getenv("QWEN3") ? getenv("QWEN3") : "./qwen3", all).wait().out;
    REQUIRE(!out.empty());
    out.pop_back();
    return out;
}

TEST_CASE("HTTP: an adapter is a model: in every dialect, at once with others, and by the name in log and metrics") {
    const Served server({"--adapter", "a=" + folders().of(0), "--adapter", "org/b.1=" + folders().of(1), "--task", "generate", "--task", "embed"});
    CHECK(server.models() == "tiny(-) a(tiny) org/b.1(tiny) ");
    const Json one(server.call("GET", "/v1/models/org/b.1").body);
    CHECK(one["root"].str() == folders().of(1));
    CHECK(one["max_model_len"].number() == 4096);
    CHECK(server.call("GET", "/v1/models/tiny").status == 200);
    check_refused(server.call("GET", "/v1/models/b.1"), 404, "model");

    const Strings names = {"tiny", "a", "org/b.1"}, paths = {"", folders().of(0), folders().of(1)};
    std::vector<std::string> said(12), want(12);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 12; i++)
        threads.emplace_back([&, i] {
            const HttpReply r = Http(server.port).call("POST", "/v1/chat/completions", question("What is a warp? " + std::to_string(i / 3),
                "\"temperature\": 0, \"max_tokens\": 24, \"model\": \"" + names[i % 3] + "\""));
            said[i] = r.body;
        });
    for (auto& t : threads) t.join();
    std::set<std::string> different;
    for (size_t i = 0; i < 12; i++) {
        const Json j(said[i]);
        CHECK(j["model"].str() == names[i % 3]);
        const std::string text = j["choices"][(size_t)0]["message"]["content"].str();
        if (i < 6) CHECK(text == by_qwen3(paths[i % 3], "What is a warp? " + std::to_string(i / 3)));
        different.insert(text);
    }
    CHECK(different.size() >= 9);

    // The other routes. (Greedily, so that all say the same of the same conversation.)
    const std::string text = server.said("a", "hi"), how = ", \"temperature\": 0, \"model\": \"a\"";
    CHECK(text != server.said("tiny", "hi"));
    const Json response(server.call("POST", RESPONSES, "{\"input\": \"hi\", \"max_output_tokens\": 24" + how + "}").body);
    CHECK(response["model"].str() == "a");
    CHECK(response["output"][(size_t)0]["content"][(size_t)0]["text"].str() == text);
    const Json message(server.call("POST", MESSAGES, question("hi", "\"max_tokens\": 24" + how)).body);
    CHECK(message["model"].str() == "a");
    CHECK(message["content"][(size_t)0]["text"].str() == text);
    CHECK(server.call("POST", COUNT_TOKENS, question("hi", "\"model\": \"a\"")).status == 200);
    std::string joined;
    for (auto& e : events_of(server.call("POST", CHAT, question("hi", "\"stream\": true, \"max_tokens\": 24" + how)).body))
        if (e != "[DONE]") joined += Json(e)["choices"][(size_t)0]["delta"]["content"].str();
    CHECK(joined == text);
    auto completion = [&](const char* model) { return server.call("POST", COMPLETION, std::string("{\"prompt\": \"hi\", \"temperature\": 0, \"model\": \"") + model + "\"}"); };
    CHECK(Json(completion("a").body)["choices"][(size_t)0]["text"].str() != Json(completion("tiny").body)["choices"][(size_t)0]["text"].str());
    const Json form(server.call("POST", CHAT, question("hi", "\"structured_outputs\": {\"regex\": \"[0-9]{3}\"}" + how)).body);
    CHECK(form["choices"][(size_t)0]["message"]["content"].str().size() == 3);
    auto vector = [&](const char* model) { return server.call("POST", EMBEDDINGS, std::string("{\"input\": \"hi\", \"model\": \"") + model + "\"}").body; };
    CHECK(Json(vector("a"))["model"].str() == "a");
    CHECK(sj::dump(Json(vector("a"))["data"]) != sj::dump(Json(vector("tiny"))["data"]));
    for (auto& asked : std::vector<std::pair<std::string, std::string>>{
             {CHAT, "\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]"}, {COMPLETION, "\"prompt\": \"a\""}, {RESPONSES, "\"input\": \"a\""},
             {EMBEDDINGS, "\"input\": \"a\""}, {MESSAGES, "\"max_tokens\": 1, \"messages\": [{\"role\": \"user\", \"content\": \"a\"}]"},
             {COUNT_TOKENS, "\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]"}}) {
        const HttpReply r = server.call("POST", asked.first, "{\"model\": \"b\", " + asked.second + "}");
        INFO(asked.first << r.body);
        CHECK(r.status == 404);
        CHECK(r.body.find("no such model; the server has: tiny, a, org/b.1") != std::string::npos);
    }
    const HttpReply unknown = server.call("GET", "/v1/models/b", "");
    CHECK(unknown.status == 404);
    CHECK(unknown.body.find("no such model; the server has: tiny, a, org/b.1") != std::string::npos);
    // Without the option no adapter can be loaded.
    check_refused(server.load("c", folders().of(2)), 404, "");
    CHECK(server.models() == "tiny(-) a(tiny) org/b.1(tiny) ");

    const std::string metrics = server.call("GET", "/metrics").body;
    CHECK(metrics.find("vllm:lora_requests_info{running_lora_adapters=\"\",waiting_lora_adapters=\"\",max_lora=\"256\"} ") != std::string::npos);
    CHECK(metrics.find("vllm:lora_generation_tokens_total{lora_name=\"org/b.1\"} ") != std::string::npos);
    const std::string log = const_cast<Served&>(server).stop().out;
    for (auto& name : names) CHECK(log.find("\"model\": \"" + name + "\"") != std::string::npos);
}

TEST_CASE("HTTP: adapters that clients load share the room that --adapter-memory gives, also those that still answer") {
    auto bytes = [](int i) { return (double)fs::file_size(folders().of(i) + "/adapter_model.safetensors"); };
    const double room = bytes(1) + bytes(2) + 500; // of the second and the third, not of the first, too
    REQUIRE(bytes(0) > 500);
    const Served server({"--allow-adapter-loading", "--adapter-memory", format("%.9f", room / 1e9)});
    CHECK(server.load("b", folders().of(1)).status == 200);
    CHECK(server.load("c", folders().of(2)).status == 200);
    const HttpReply full = server.load("a", folders().of(0));
    check_refused(full, 503, "", "GB together");
    CHECK(full.headers.at("retry-after") == "1");
    CHECK(server.call("GET", "/v1/models/a").status == 404);
    // One that has lost its name still takes its room, until its last answer ends.
    auto long_one = std::make_unique<Http>(server.port);
    long_one->ask("POST", "/v1/chat/completions", R"({"model": "c", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3000,
        "ignore_eos": true, "stream": true})");
    REQUIRE(long_one->head().status == 200);
    CHECK(server.unload("c").status == 200);
    check_refused(server.load("c", folders().of(2)), 503, "");
    long_one.reset();
    int status = 503; // the server sees within a second that the client is gone
    for (const double start = seconds(); status == 503 && seconds() - start < 20; usleep(50'000)) status = server.load("c", folders().of(2)).status;
    CHECK(status == 200);
}

TEST_CASE("HTTP: adapters come and go while others answer") {
    Scratch scratch;
    write_file(scratch / "keys", "boss\n");
    const Served server({"--adapter", "a=" + folders().of(0), "--allow-adapter-loading", "--api-key-file", scratch / "keys"}, "boss");
    const std::string with[] = {by_qwen3(folders().of(0), "hi"), by_qwen3(folders().of(1), "hi"), by_qwen3(folders().of(2), "hi")};
    // The key is asked for, and the request must be right.
    for (const char* path : {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}) {
        CHECK(Http(server.port).call("POST", path, "{}").status == 401);
        CHECK(server.call("GET", path).status == 405);
        CHECK(server.call("POST", path, "{").status == 400);
        check_refused(server.call("POST", path, "{}"), 400, "lora_name");
        check_refused(server.call("POST", path, "{\"lora_name\": 7}"), 400, "lora_name");
        check_refused(server.call("POST", path, "{\"lora_name\": \"x\", \"nonsense\": 1}"), 400, "nonsense");
    }
    check_refused(server.call("POST", "/v1/load_lora_adapter", "{\"lora_name\": \"x\"}"), 400, "lora_path");
    check_refused(server.load("a", folders().of(1)), 400, "lora_name", "of this name");
    check_refused(server.load("tiny", folders().of(1)), 400, "lora_name");
    check_refused(server.load("a b", folders().of(1)), 400, "lora_name");
    check_refused(server.unload("x"), 404, "lora_name");
    check_refused(server.unload("tiny"), 404, "lora_name");
    // A broken adapter changes nothing: no folder, a FIFO, half a file, a model of another shape, numbers that are NaN.
    check_refused(server.load("x", "/nonexistent"), 400, "lora_path", "/nonexistent/adapter_config.json");
    const std::string broken = scratch / "broken", numbers = broken + "/adapter_model.safetensors";
    make_adapter(broken, KINDS[1], 3);
    const std::string whole = read_file(numbers);
    write_file(numbers, whole.substr(0, whole.size() / 2));
    check_refused(server.load("x", broken), 400, "lora_path", "truncated");
    write_file(numbers, whole.substr(0, whole.size() - 4) + std::string("\0\0\xc0\x7f", 4));
    check_refused(server.load("x", broken), 400, "lora_path", "an infinity or a NaN");
    write_file(numbers, whole + std::string(10 << 20, 'x'));
    check_refused(server.load("x", broken), 400, "lora_path", "too many");
    fs::remove(numbers);
    REQUIRE(mkfifo(numbers.c_str(), 0600) == 0);
    check_refused(server.load("x", broken), 400, "lora_path", "not a regular file");
    Config larger = tiny().file.config;
    larger.C += 8;
    make_adapter(scratch / "other", KINDS[1], 3, larger);
    check_refused(server.load("x", scratch / "other"), 400, "lora_path",
                  "other/adapter_model.safetensors: tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is (4,72), the config needs (4,64)");
    CHECK(server.models() == "tiny(-) a(tiny) ");
    CHECK(server.said("a", "hi") == with[0]);

    // A stream goes on with the adapter that it began with.
    auto story = [&](const char* more) {
        return question("hi", std::string("\"model\": \"x\", \"max_tokens\": 500, \"ignore_eos\": true, \"seed\": 4") + more);
    };
    CHECK(server.load("x", folders().of(1)).status == 200);
    CHECK(server.said("x", "hi") == with[1]);
    const Json alone(server.call("POST", CHAT, story("")).body);
    Http stream(server.port);
    stream.ask("POST", CHAT, story(", \"stream\": true"), server.auth);
    CHECK(stream.head().status == 200);
    std::string events;
    REQUIRE(stream.chunk(events));
    CHECK(Json(server.unload("x").body)["deleted"].is(sj::True));
    CHECK(server.said("x", "hi") == "status 404");
    CHECK(server.models() == "tiny(-) a(tiny) ");
    CHECK(server.load("x", folders().of(2)).status == 200);
    CHECK(server.said("x", "hi") == with[2]);
    CHECK(server.said("a", "hi") == with[0]);
    while (stream.chunk(events)) {}
    std::string text;
    for (auto& e : events_of(events))
        if (e != "[DONE]") text += Json(e)["choices"][(size_t)0]["delta"]["content"].str();
    CHECK(text == alone["choices"][(size_t)0]["message"]["content"].str());

    // Many at once.
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0}, loaded{0}, answered{0};
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&, t] {
            const std::string name = "t" + std::to_string(t % 2);
            for (int i = 0; i < 8; i++) {
                const HttpReply r = server.load(name, folders().of(1 + t % 2));
                loaded += r.status == 200;
                wrong += r.status != 200 && r.status != 400;
                const HttpReply said = server.call("POST", CHAT, question("hi", "\"temperature\": 0, \"max_tokens\": 24, \"model\": \"" + name + "\""));
                answered += said.status == 200;
                wrong += said.status == 200 ? said_text(said) != with[1 + t % 2] : said.status != 404;
                const int status = server.unload(name).status;
                wrong += status != 200 && status != 404;
            }
        });
    for (auto& t : threads) t.join();
    CHECK(wrong == 0);
    CHECK(loaded > 7);
    CHECK(answered > 7);
}

TEST_CASE("batches: rows name adapters; one that is unloaded answers its rows; another one does not go on with them") {
    Scratch scratch;
    std::string in;
    const Strings models = {"tiny", "a", "b"}, paths = {"", folders().of(0), folders().of(1)};
    auto row = [&](size_t i, const std::string& model, int tokens) {
        return format("{\"custom_id\": \"r%zu\", \"url\": \"%s\", \"body\": ", i, CHAT) +
               question("hi", format("\"model\": \"%s\", \"temperature\": 0, \"ignore_eos\": true, \"max_tokens\": %d", model.c_str(), tokens)) + "}\n";
    };
    for (size_t i = 0; i < 9; i++) in += row(i, models[i % 3], 24);
    write_file(scratch / "in", in + row(9, "nobody", 1));
    const Result r = Process(Served::program(), Served::with({"--adapter", "a=" + paths[1], "--adapter", "b=" + paths[2], "--batch", scratch / "in", "-o", scratch / "out"})).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    const Strings out = lines(read_file(scratch / "out"));
    REQUIRE(out.size() == 10);
    for (size_t i = 0; i < 10; i++) {
        const Json j(out[i]);
        CHECK(j["response"]["status_code"].number() == (i < 9 ? 200 : 404));
        if (i < 3) CHECK(j["response"]["body"]["choices"][(size_t)0]["message"]["content"].str() == by_qwen3(paths[i], "hi"));
    }

    // The partial file depends on the adapters that are named in it, and on no others.
    auto begin = [&](const AdapterHashes& hashes) { Batcher(scratch / "in", scratch / "later", "{\"x\":1}", hashes); };
    begin({{"a", 1}, {"b", 2}});
    begin({{"a", 1}, {"b", 2}, {"c", 3}});
    CHECK_THROWS_AS(begin({{"a", 1}, {"b", 3}}), Unfit);
    CHECK_THROWS_AS(begin({{"a", 1}}), Unfit);

    // Over HTTP a batch keeps those that were there when it began.
    const Served server({"--adapter", "a=" + paths[1], "--allow-adapter-loading", "--files", scratch / "files", "--max-seqs", "2"});
    std::string long_ones;
    for (size_t i = 0; i < 30; i++) long_ones += row(i, "a", 60);
    const std::string form = "--q\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--q\r\nContent-Disposition: form-data; name=\"file\"; filename=\"r\"\r\n\r\n" + long_ones + "\r\n--q--\r\n";
    Http h(server.port);
    h.send(format("POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=q\r\nContent-Length: %zu\r\n\r\n", form.size()) + form);
    const std::string file = Json(h.reply().body)["id"].str();
    const std::string id = Json(server.call("POST", "/v1/batches", "{\"input_file_id\": \"" + file + "\", \"endpoint\": \"" + CHAT + "\", \"completion_window\": \"24h\"}").body)["id"].str();
    auto look = [&] { return server.call("GET", "/v1/batches/" + id).body; };
    while (Json(look())["request_counts"]["completed"].number() == 0) usleep(1000);
    CHECK(server.unload("a").status == 200);
    CHECK(Json(look())["status"].str() == "in_progress"); // it is at work
    CHECK(server.load("a", paths[2]).status == 200);
    for (const double start = seconds(); Json(look())["status"].str() != "completed" && seconds() - start < 20;) usleep(10'000);
    const Json done(look());
    CHECK(done["request_counts"]["completed"].number() == 30);
    const Strings told = lines(server.call("GET", "/v1/files/" + done["output_file_id"].str() + "/content").body);
    REQUIRE(told.size() == 30);
    std::set<std::string> texts;
    for (auto& line : told) texts.insert(Json(line)["response"]["body"]["choices"][(size_t)0]["message"]["content"].str());
    CHECK(texts.size() == 1); // the first adapter's, all of them
}

TEST_CASE("adapters: options") {
    Scratch scratch;
    const std::string a = folders().of(0), b = folders().of(1);
    auto refused = [](const Strings& more, const std::string& word) { check_refusal(Process(Served::program(), Served::with(more)).wait(), "serve", word); };
    refused({"--adapter", "a=" + a, "--adapter", "a=" + b}, "the name is taken");
    refused({"--adapter", "tiny=" + a}, "the model has this name");
    refused({"--adapter", "a b=" + a}, "letters, digits");
    refused({"--adapter", "=" + a}, "letters, digits");
    refused({"--adapter", "a="}, "which folder");
    refused({"--adapter", "a=/nonexistent"}, "/nonexistent/adapter_config.json");
    refused({"--adapter", a, "--adapter", "b=" + b}, "is for all requests");
    refused({"--adapter", a, "--allow-adapter-loading"}, "is for all requests");
    refused({"--allow-adapter-loading", "--host", "0.0.0.0"}, "--api-key-file");
    Config larger = tiny().file.config;
    larger.F += 8;
    make_adapter(scratch / "other", KINDS[2], 3, larger);
    refused({"--adapter", "a=" + (scratch / "other")}, "gate_proj.lora_B.weight is (136,19), the config needs (128,19)");
    // A folder is a folder, whatever its name: one adapter for all, as ever.
    fs::copy(a, scratch / "lr=1e-4");
    write_file(scratch / "in", "{\"custom_id\": \"r\", \"url\": \"/v1/chat/completions\", \"body\": " + question("hi", "\"temperature\": 0, \"max_tokens\": 24") + "}\n");
    const Result r = Process(Served::program(), Served::with({"--adapter", scratch / "lr=1e-4", "--batch", scratch / "in", "-o", scratch / "out"})).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(Json(lines(read_file(scratch / "out"))[0])["response"]["body"]["choices"][(size_t)0]["message"]["content"].str() == by_qwen3(a, "hi"));
}
