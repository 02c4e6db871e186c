// serve.cu: log-probabilities of prompts: the engine by itself, then the program (SERVE, else ./serve) against the
// definitions in plain loops, which another program (QWEN3, else ./qwen3) runs.
#include "base/file.h"
#include "model/chat_template.h"
#include "server/engine/pages.h"
#include "sj.h"
#include "tests/engine.h"
#include "tests/http.h"
#include "tests/process.h"
#include <cmath>
#include <csignal>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using Ids = std::vector<int>;

// ------------------------------------------------------------------------------------------------------- engine

TEST_CASE("a page that will know log-probabilities takes the name of one that does not") {
    PagePool pool(5);
    const Ids a(PAGE, 1), b(PAGE, 2);
    const int plain = pool.take(), telling = pool.take(), again = pool.take(), more = pool.take();
    const uint64_t name = pool.name(plain, 1, a.data());
    CHECK(pool.name(telling, 1, a.data(), 0, 3) == name);
    CHECK(pool.find(1, a.data()) == telling);
    pool.pages[(size_t)telling].told.resize(PAGE), pool.pages[(size_t)telling].alternatives = 3;
    CHECK(pool.name(again, 1, a.data(), 0, 2) == name); // it knows these, too
    CHECK(pool.name(again, 1, a.data()) == name);
    CHECK(pool.find(1, a.data()) == telling);
    CHECK(pool.name(more, 1, a.data(), 0, 4) == name);
    CHECK(pool.find(1, a.data()) == more);
    for (int p : {plain, telling, again, more}) pool.release(p);
    for (int i = 0; i < 5; i++) { // whoever takes a page, it knows nothing
        const PagePool::Page& page = pool.pages[(size_t)pool.take()];
        CHECK(page.told.empty());
        CHECK(page.alternatives == -1);
    }
    CHECK(pool.available() == 0);
    CHECK(pool.find(1, a.data()) == -1);
}

// Log-probabilities of a prompt from a session of its own.
static std::vector<TokenInfo> told_alone(const Ids& prompt, int alternatives) {
    Session<bf16> session(tiny().file.config, tiny().weights, 256, where);
    std::vector<TokenInfo> all = {{prompt[0], NAN, "", {}}};
    session.feed(prompt, nullptr, [&](const float* logits) {
        if (all.size() < prompt.size()) all.push_back(told_of(logits, prompt[all.size()], alternatives));
    });
    return all;
}

static void check_prompt(const Job& job) {
    std::lock_guard lock(job.reply->mutex);
    REQUIRE(!job.reply->pieces.empty());
    for (size_t i = 1; i < job.reply->pieces.size(); i++) CHECK(job.reply->pieces[i].prompt.empty());
    const std::vector<TokenInfo>& got = job.reply->pieces[0].prompt;
    if (job.prompt_alternatives < 0) {
        CHECK(got.empty());
        return;
    }
    const std::vector<TokenInfo> want = told_alone(job.prompt, job.prompt_alternatives);
    REQUIRE(got.size() == want.size());
    std::string text;
    for (size_t i = 0; i < got.size(); i++) {
        text += got[i].text;
        CHECK(got[i].id == want[i].id);
        if (i == 0) CHECK(std::isnan(got[i].logprob));
        else CHECK(got[i].logprob == want[i].logprob); // to the bit: a row does not depend on other rows
        REQUIRE(got[i].top.size() == want[i].top.size());
        for (size_t k = 0; k < got[i].top.size(); k++) {
            CHECK(got[i].top[k].id == want[i].top[k].id);
            CHECK(got[i].top[k].logprob == want[i].top[k].logprob);
        }
    }
    CHECK(text == tiny().tokenizer.decode(job.prompt, false));
}

TEST_CASE("log-probabilities of a prompt do not depend on chunks, cached pages, preemptions or what runs beside") {
    Random random{11};
    uint64_t preempted = 0;
    size_t cached = 0, empty = 0;
    for (auto [max_seqs, chunk, pages] : {std::tuple{1, 16, 16}, {4, 7, 60}, {8, 64, 24}, {8, 5, 17}, {16, 200, 400}, {16, 33, 20}}) {
        const std::string kind = format("at most %d, chunks of %d, %d pages", max_seqs, chunk, pages);
        INFO(kind);
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        std::vector<Job> jobs;
        for (int i = 0; i < 16; i++) {
            jobs.push_back(random_job(random, 256));
            Job& job = jobs.back();
            if (i % 3 == 1) job.prompt = jobs[(size_t)random.below(i)].prompt, job.prompt.push_back(random.below(300));
            job.max_tokens = std::min(job.max_tokens, 255 - job.prompt.size());
            job.prompt_alternatives = random.below(5) - 1;
            if (random.below(3) == 0) job.max_tokens = 0;
        }
        run_all(bench, random, jobs);
        preempted += bench.desk.figures->preempted;
        for (const Job& job : jobs) {
            check_prompt(job);
            if (job.prompt_alternatives >= 0) cached += job.reply->pieces.back().cached;
            if (job.max_tokens > 0) {
                check_answer(job, expected(job, 256));
                continue;
            }
            REQUIRE(job.reply->pieces.size() == 1);
            CHECK(job.reply->pieces[0].text == "");
            CHECK(job.reply->pieces[0].count == 0);
            CHECK(std::string(job.reply->pieces[0].finish) == "length");
            empty++;
        }
    }
    CHECK(preempted > 4);
    CHECK(cached > 100);
    CHECK(empty > 10);
}

TEST_CASE("log-probabilities of a shared prefix are computed once, and again only for more alternatives") {
    Bench bench({512, 4, 64, 64, 0});
    int asked = 0;
    auto cached = [&](int alternatives, size_t length = 100) {
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        for (int i = 0; i < (int)length - 1; i++) job.prompt.push_back(i);
        job.prompt.push_back(200 + asked++);
        job.max_tokens = asked % 2, job.prompt_alternatives = alternatives;
        bench.desk.submit({job});
        while (job.reply->left) bench.engine.step();
        check_prompt(job);
        return job.reply->pieces.back().cached;
    };
    CHECK(cached(-1) == 0);
    CHECK(cached(1) == 0); // the pages are there, without log-probabilities
    CHECK(cached(1) == 96);
    CHECK(cached(0) == 96);
    CHECK(cached(-1) == 96);
    CHECK(cached(5) == 0);
    CHECK(cached(2) == 96);
    CHECK(cached(2, 96) == 80); // its last token is another one
    CHECK(cached(2, 97) == 96); // the only target is predicted from a page
    CHECK(cached(2, 1) == 0);
}

TEST_CASE("the answers to a question come together: their common beginning is computed once, other prompts do not wait") {
    Bench bench({512, 8, 64, 256, 0});
    std::vector<Job> jobs;
    for (int i = 0; i < 6; i++) {
        jobs.emplace_back();
        Job& job = jobs.back();
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        for (int k = 0; k < 100; k++) job.prompt.push_back(i < 4 ? k : 50 + (k + i) % 90);
        job.prompt.push_back(200 + i);
        job.max_tokens = (size_t)i % 2, job.prompt_alternatives = 1, job.bulk = true;
        REQUIRE(bench.desk.submit({job}));
    }
    bench.engine.step();
    size_t begun = 0;
    for (const Job& job : jobs) begun += job.reply->left == 0;
    CHECK(begun >= 2); // within 256 tokens: the first answer, and another prompt
    for (int step = 0; step < 10; step++) bench.engine.step();
    for (size_t i = 0; i < jobs.size(); i++) {
        REQUIRE(jobs[i].reply->left == 0);
        check_prompt(jobs[i]);
        CHECK(jobs[i].reply->pieces.back().cached == (i > 0 && i < 4 ? 96 : 0));
    }
}

// ------------------------------------------------------------------------------------------------------- HTTP

struct Server : Process {
    int port = 0;
    explicit Server(const Strings& arguments)
        : Process(getenv("SERVE") ? getenv("SERVE") : "./serve", arguments + Strings{"-j", "1", "--port", "0"}, "",
                  [] { setenv("OMP_WAIT_POLICY", "passive", 1); }) {
        for (const double start = seconds(); port == 0; usleep(2000)) {
            const std::string said = err.text(), before = "listening on http://127.0.0.1:";
            INFO(said);
            REQUIRE(seconds() - start < 60);
            const size_t at = said.find(before);
            if (at != std::string::npos && said.back() == '\n') port = atoi(said.c_str() + at + before.size());
        }
    }
    ~Server() { kill_running(); }
    std::string ask(const std::string& body, const char* path = "/v1/completions", int status = 200) const {
        const HttpReply r = Http(port).call("POST", path, body);
        INFO(body << "\n" << r.body);
        CHECK(r.status == status);
        return r.body;
    }
};
static const Strings TINY = {MODEL, "-z", VOCABULARY, "--name", "tiny"};

static std::string list(const Ids& ids) {
    std::string all;
    for (int id : ids) all += (all.empty() ? "[" : ", ") + std::to_string(id);
    return all + "]";
}
static std::string dumped(sj::Value list, size_t n) { // the first n
    std::string all;
    for (size_t i = 0; i < n; i++) all += sj::dump(list[i]) + " ";
    return all;
}
static size_t characters(const std::string& s) {
    size_t n = 0;
    for (char byte : s) n += ((uint8_t)byte & 0xC0) != 0x80;
    return n;
}
static const char* LISTS[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};

TEST_CASE("/v1/completions: echo with logprobs, as OpenAI has it") {
    const Server server(TINY);
    const Tokenizer& t = tiny().tokenizer;
    const std::string text = "a warp 线程束 is é"; // tokens that are no whole characters
    const Ids ids = t.encode(text, false);
    const size_t P = ids.size();
    const std::vector<TokenInfo> want = told_alone(ids, 2);
    std::string quoted;
    sj::quote(quoted, text);
    const std::string how = ", \"echo\": true, \"logprobs\": 2, \"temperature\": 0, \"ignore_eos\": true, \"max_tokens\": ";
    const Json one(server.ask("{\"prompt\": " + quoted + how + "1}")), none(server.ask("{\"prompt\": " + quoted + how + "0}"));
    CHECK(one["usage"]["completion_tokens"].number() == 1);
    CHECK(none["usage"]["completion_tokens"].number() == 0);
    CHECK(none["usage"]["prompt_tokens"].number() == (double)P);
    for (const Json* j : {&one, &none}) {
        const size_t n = P + (j == &one);
        const sj::Value c = (*j)["choices"][(size_t)0], l = c["logprobs"];
        CHECK(c["finish_reason"].str() == "length");
        std::string tokens;
        for (const char* name : LISTS) REQUIRE(l[name].size() == n);
        CHECK(l["token_logprobs"][(size_t)0].is(sj::Null));
        CHECK(l["top_logprobs"][(size_t)0].is(sj::Null));
        for (size_t i = 0; i < n; i++) {
            CHECK(l["text_offset"][i].number() == (double)characters(tokens));
            tokens += l["tokens"][i].str();
            if (i == 0 || i >= P) continue;
            CHECK(l["token_logprobs"][i].number() == doctest::Approx(want[i].logprob));
            const size_t named = l["top_logprobs"][i].size();
            CHECK((named == 2 || named == 3)); // the token itself besides the likeliest
        }
        CHECK(tokens == c["text"].str());
        CHECK(tokens.compare(0, text.size(), text) == 0);
    }
    CHECK(none["choices"][(size_t)0]["text"].str() == text);
    const sj::Value wanted = none["choices"][(size_t)0]["logprobs"];
    auto check_same = [&](sj::Value choice) {
        for (const char* name : LISTS) CHECK(dumped(choice["logprobs"][name], P) == dumped(wanted[name], P));
    };
    check_same(one["choices"][(size_t)0]);
    // Texts and ids, one and several; sampling changes nothing; n.
    const std::string lists = "[" + quoted + ", \"other\", " + list(ids) + "]";
    const Json several(server.ask("{\"prompt\": " + lists + how + "0}"));
    REQUIRE(several["choices"].size() == 3);
    check_same(several["choices"][(size_t)0]), check_same(several["choices"][2]);
    CHECK(several["choices"][1]["text"].str() == "other");
    check_same(Json(server.ask("{\"prompt\": " + list(ids) + how + "0}"))["choices"][(size_t)0]);
    const Json biased(server.ask("{\"prompt\": " + quoted + ", \"echo\": true, \"logprobs\": 2, \"temperature\": 1.5, \"n\": 2, \"presence_penalty\": 1, "
                                 "\"logit_bias\": {\"5\": 50}, \"max_tokens\": 3}"));
    REQUIRE(biased["choices"].size() == 2);
    for (sj::Value c : biased["choices"].items()) check_same(c);
    // As a stream: the first event of a choice has its prompt.
    const std::vector<std::string> events = events_of(server.ask("{\"stream\": true, \"prompt\": " + lists + how + "1}"));
    std::vector<std::string> streamed(3), texts(3);
    for (size_t i = 0; i + 1 < events.size(); i++) {
        const Json e(events[i]);
        const sj::Value c = e["choices"][(size_t)0];
        const size_t index = (size_t)c["index"].number();
        texts[index] += c["text"].str();
        for (sj::Value token : c["logprobs"]["tokens"].items()) streamed[index] += token.str();
        if (streamed[index].size() == texts[index].size() && c["logprobs"]["tokens"].size() >= P && index != 1) check_same(c);
    }
    CHECK(texts[0] == one["choices"][(size_t)0]["text"].str());
    CHECK(texts[2] == texts[0]);
    CHECK(streamed == texts);
    // The end token is reported, too: there are as many entries as tokens.
    const std::string ends = format("\"logit_bias\": {\"%d\": 100}", tiny().file.config.end_tokens.at(0));
    const Json ended(server.ask("{\"prompt\": " + quoted + ", \"echo\": true, \"logprobs\": 1, \"max_tokens\": 1, " + ends + "}"));
    const sj::Value last = ended["choices"][(size_t)0];
    CHECK(last["finish_reason"].str() == "stop");
    CHECK(last["text"].str() == text);
    for (const char* name : LISTS) REQUIRE(last["logprobs"][name].size() == P + 1);
    CHECK(last["logprobs"]["tokens"][P].str() == "");
    CHECK(last["logprobs"]["token_logprobs"][P].number(1) < 0);
    // Without echo or without logprobs nothing of this is there; 0 tokens are an empty answer.
    const Json nothing(server.ask("{\"prompt\": " + quoted + ", \"max_tokens\": 0}"));
    CHECK(nothing["choices"][(size_t)0]["text"].str() == "");
    CHECK(nothing["choices"][(size_t)0]["logprobs"].is(sj::Null));
    CHECK(!nothing["choices"][(size_t)0]["prompt_logprobs"]);
    CHECK(Json(server.ask("{\"prompt\": " + quoted + ", \"max_tokens\": 0, \"echo\": true}"))["choices"][(size_t)0]["logprobs"].is(sj::Null));
}

TEST_CASE("prompt_logprobs, as vLLM has it: of completions and chats, and in a batch") {
    const Server server(TINY);
    const Tokenizer& t = tiny().tokenizer;
    const Ids ids = t.encode("a warp is", false);
    auto check = [&](sj::Value told, const Ids& prompt, int alternatives) {
        const std::vector<TokenInfo> want = told_alone(prompt, alternatives);
        REQUIRE(told.size() == prompt.size());
        CHECK(told[(size_t)0].is(sj::Null));
        for (size_t i = 1; i < prompt.size(); i++) {
            const sj::Value own = told[i][std::to_string(prompt[i])];
            CHECK(own["logprob"].number() == doctest::Approx(want[i].logprob));
            CHECK(own["decoded_token"].is(sj::String));
            size_t known = 0; // 1 + alternatives, or as many where the token is one of these
            for (size_t k = 0; k < want[i].top.size(); k++) {
                const sj::Value other = told[i][std::to_string(want[i].top[k].id)];
                CHECK(other["rank"].number() == (double)k + 1);
                CHECK(other["logprob"].number() == doctest::Approx(want[i].top[k].logprob));
                known += want[i].top[k].id == prompt[i];
            }
            CHECK(told[i].size() == 1 + want[i].top.size() - known);
            CHECK(own["rank"].is(sj::Null) == !known);
        }
    };
    const std::string messages = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"max_tokens\": 2, \"n\": 2, \"prompt_logprobs\": ";
    const Ids chat = render_chat(t, {{"user", "hi"}});
    for (int k : {0, 1, 20}) {
        const Json j(server.ask("{\"prompt\": [" + list(ids) + ", [7]], \"max_tokens\": 1, \"prompt_logprobs\": " + std::to_string(k) + "}"));
        check(j["choices"][(size_t)0]["prompt_logprobs"], ids, k);
        check(j["choices"][1]["prompt_logprobs"], {7}, k);
        CHECK(j["choices"][(size_t)0]["logprobs"].is(sj::Null));
        const Json c(server.ask(messages + std::to_string(k) + "}", "/v1/chat/completions"));
        check(c["prompt_logprobs"], chat, k);
        CHECK(c["choices"].size() == 2);
    }
    // Beside echo each has its own number of alternatives.
    const Json both(server.ask("{\"prompt\": " + list(ids) + ", \"max_tokens\": 1, \"ignore_eos\": true, \"echo\": true, \"logprobs\": 0, \"prompt_logprobs\": 3}"));
    check(both["choices"][(size_t)0]["prompt_logprobs"], ids, 3);
    CHECK(both["choices"][(size_t)0]["logprobs"]["top_logprobs"][1].size() == 1);
    CHECK(both["choices"][(size_t)0]["logprobs"]["tokens"].size() == ids.size() + 1);
    CHECK(!Json(server.ask("{\"prompt\": \"a\", \"max_tokens\": 1, \"prompt_logprobs\": null}"))["choices"][(size_t)0]["prompt_logprobs"]);
    // Long ones are written in parts.
    const Ids longest(4000, 9);
    const Json parts(server.ask("{\"prompt\": " + list(longest) + ", \"max_tokens\": 0, \"echo\": true, \"logprobs\": 20, \"prompt_logprobs\": 20}"));
    CHECK(parts["choices"][(size_t)0]["prompt_logprobs"].size() == 4000);
    CHECK(parts["choices"][(size_t)0]["logprobs"]["text_offset"].size() == 4000);

    auto refused = [&](const std::string& body, const char* param, const char* path = "/v1/completions") {
        CHECK(Json(server.ask(body, path, 400))["error"]["param"].str() == param);
    };
    refused("{\"prompt\": \"a\", \"prompt_logprobs\": 21}", "prompt_logprobs");
    refused("{\"prompt\": \"a\", \"prompt_logprobs\": -1}", "prompt_logprobs");
    refused("{\"prompt\": \"a\", \"prompt_logprobs\": 1, \"stream\": true}", "prompt_logprobs");
    refused("{\"prompt\": \"a\", \"max_tokens\": -1}", "max_tokens");
    refused(messages + "1, \"echo\": true}", "echo", "/v1/chat/completions");
    refused("{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"max_tokens\": 0, \"prompt_logprobs\": 1}", "max_tokens", "/v1/chat/completions");
    refused("{\"prompt\": " + list(longest) + ", \"echo\": true, \"logprobs\": 20, \"stream\": true, \"max_tokens\": 1}", "echo");
    std::string many = "[" + list(longest);
    for (int i = 1; i < 30; i++) many += ", " + list(longest);
    refused("{\"prompt\": " + many + "], \"prompt_logprobs\": 20, \"max_tokens\": 0}", "prompt_logprobs");

    Scratch scratch;
    write_file(scratch / "in", "{\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"prompt\": " + list(ids) +
                                   ", \"max_tokens\": 0, \"prompt_logprobs\": 2}}\n");
    const Result r = Process(getenv("SERVE") ? getenv("SERVE") : "./serve", TINY + Strings{"-j", "1", "--batch", scratch / "in", "-o", scratch / "out"}).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    const Json row(read_file(scratch / "out"));
    check(row["response"]["body"]["choices"][(size_t)0]["prompt_logprobs"], ids, 2);
}

TEST_CASE("the likelihood of an answer is that of qwen3 --eval, and that of the plain loops of Book I") {
    const std::string model = "data/tiny/model.bin";
    const Tokenizer t("data/tiny/tokenizer.bin");
    const std::vector<std::pair<std::string, std::string>> rows = {
        {"什么是 warp？", "一个 warp 是 32 个线程。"}, {"What is a warp?", "A warp is 32 threads."}, {"What is a warp?", "A cat sleeps."}};
    Scratch scratch;
    std::string qa;
    for (auto& row : rows) {
        sj::Writer w;
        w.object().field("instruction", row.first).field("output", row.second);
        qa += w.end().text + "\n";
    }
    write_file(scratch / "qa.jsonl", qa);
    auto evaluated = [&](const std::string& device) {
        const Result r = Process(getenv("QWEN3") ? getenv("QWEN3") : "./qwen3",
                                 {model, "-d", device, "--eval", scratch / "qa.jsonl", "-o", scratch / device, "-n", "0"}).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
        const Strings out = lines(read_file(scratch / device));
        REQUIRE(out.size() == rows.size());
        return out;
    };
    const Strings fast = evaluated("cpu"), plain = evaluated("plain");
    const Server server({model, "-d", "cpu"});
    for (size_t i = 0; i < rows.size(); i++) {
        Ids ids = render_chat(t, {{"user", rows[i].first}});
        const size_t prompt = ids.size();
        t.encode(ids, rows[i].second, false);
        ids.push_back(t.id("<|im_end|>"));
        t.encode(ids, "\n", false);
        const Json j(server.ask("{\"prompt\": " + list(ids) + ", \"echo\": true, \"logprobs\": 0, \"max_tokens\": 0}"));
        const sj::Value told = j["choices"][(size_t)0]["logprobs"]["token_logprobs"];
        REQUIRE(told.size() == ids.size());
        double sum = 0;
        for (size_t n = prompt; n < ids.size(); n++) sum += told[n].number();
        const double tokens = (double)(ids.size() - prompt);
        CHECK(Json(fast[i])["tokens"].number() == tokens);
        // The same kernels; and definitions that round to bf16 in other places, which is 0.003 to 0.01 a token here.
        CHECK(std::fabs(sum + Json(fast[i])["nll"].number()) < 1e-5 * tokens);
        CHECK(std::fabs(sum + Json(plain[i])["nll"].number()) < 0.02 * tokens);
    }
}
