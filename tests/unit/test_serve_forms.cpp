// serve.cu: answers that keep a form, and calls of tools: the engine by itself, then the program (SERVE, else ./serve).
#include "form/gbnf.h"
#include "form/matcher.h"
#include "form/regex.h"
#include "form/schema.h"
#include "form/tools.h"
#include "search/documents.h"
#include "server/api/asked.h"
#include "server/api/batch.h"
#include "server/api/conversation.h"
#include "server/api/fields.h"
#include "server/api/form_data.h"
#include "server/api/limits.h"
#include "server/api/messages.h"
#include "server/api/paths.h"
#include "server/api/responses.h"
#include "server/api/service.h"
#include "sj.h"
#include "tests/engine.h"
#include "tests/http.h"
#include "tests/process.h"
#include "tests/sanitized.h"
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

static const Tokenizer& t() { return tiny().tokenizer; }
static Service service_of(int context = 4096) { return {&t(), "tiny", "", context, false}; }
static std::string question(const std::string& more) {
    return "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], " + more + "}";
}
static const std::string WEATHER = R"({"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties":
    {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 14}}, "required": ["city"]}}})";
static const std::string NOW = R"({"type": "function", "function": {"name": "now", "strict": true, "parameters": {"type": "object", "properties": {}}}})";
static const std::string TOOLS = "\"tools\": [" + WEATHER + ", " + NOW + "]";
static const std::string PERSON = R"({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer",
    "minimum": 0, "maximum": 150}, "kind": {"enum": ["a", "b"]}}, "required": ["name", "age", "kind"], "additionalProperties": false})";

static bool keeps(const std::shared_ptr<Automaton>& form, std::string_view text) {
    Matcher m(form);
    return m.advance(text) && m.may_end();
}
static std::string text_of(const Job& job) {
    std::string text;
    for (auto& p : job.reply->pieces) text += p.text;
    return text;
}

TEST_CASE("forms: kept in any company, and the company says what it says alone") {
    Forms forms;
    Random random{21};
    std::vector<Job> jobs;
    const std::vector<std::function<Grammar()>> grammars = {
        [] { return grammar_of_json_object(); }, [] { return grammar_of_regex("[a-z]{3,20}( [0-9]+){2}"); },
        [] { return grammar_of_choice({"yes", "no", "perhaps", "线程"}); },
        [] { sj::Doc d; sj::parse(d, PERSON); return grammar_of_schema(d.root()); }};
    for (int i = 0; i < 24; i++) {
        jobs.push_back(random_job(random, 256));
        Job& job = jobs.back();
        if (job.prompt.size() == 1) job.prompt.push_back(5);
        if (i % 2) continue;
        const size_t kind = random.below(4);
        job.form = forms.get(t(), std::to_string(kind), grammars[kind]);
        job.ignore_eos = random.below(4) == 0, job.stops.clear(), job.alternatives = -1;
        job.max_tokens = 256 - job.prompt.size();
    }
    CHECK(forms.get(t(), "1", grammars[1]) == forms.get(t(), "1", grammars[1])); // those with one text share one
    std::vector<std::string> alone;
    std::vector<Generation> free;
    for (auto& job : jobs) {
        Job copy = job;
        copy.reply = std::make_shared<Reply>(), copy.reply->left = 1;
        Bench bench({256, 1, 256, 256, 4'000'000});
        run_all(bench, random, {copy});
        alone.push_back(text_of(copy));
        if (!job.form) check_answer(copy, expected(job, 256));
        else if (std::string(copy.reply->pieces.back().finish) == "stop") CHECK_MESSAGE(keeps(job.form, alone.back()), alone.back());
    }
    size_t preempted = 0, complete = 0;
    for (auto [max_seqs, chunk, pages] : {std::tuple{24, 7, 400}, {24, 64, 30}, {7, 200, 24}}) {
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()});
        std::vector<Job> all = jobs;
        for (Job& job : all) job.reply = std::make_shared<Reply>(), job.reply->left = 1;
        run_all(bench, random, all);
        for (size_t i = 0; i < all.size(); i++) {
            CHECK(text_of(all[i]) == alone[i]);
            complete += all[i].form && std::string(all[i].reply->pieces.back().finish) == "stop";
        }
        preempted += bench.desk.figures->preempted;
    }
    CHECK(preempted > 2);
    CHECK(complete > 6);
}

TEST_CASE("forms: a draw is that of all logits, of which those that may not come are -infinity") {
    Forms forms;
    const auto form = forms.get(t(), "r", [] { return grammar_of_regex("[a-f][a-z0-9 ]{0,30}|[x-z][ -~]*"); });
    const size_t V = (size_t)tiny().file.config.V;
    std::vector<Job> jobs;
    for (int i = 0; i < 12; i++) {
        Job job;
        job.reply = std::make_shared<Reply>(), job.reply->left = 1;
        job.prompt = {3, i, 7}, job.max_tokens = 40, job.form = form, job.alternatives = 0;
        job.how.seed = (uint64_t)i, job.how.temperature = i % 4 ? 1.3f : 0;
        job.how.top_k = i % 3 ? 20 : 0, job.how.top_p = i % 2 ? 0.9f : 1, job.how.min_p = i % 5 ? 0 : 0.1f;
        if (i % 3 == 1) job.how.repeat = 1.3f, job.bias = {{t().encode("e", false)[0], 3.f}};
        jobs.push_back(job);
    }
    Bench bench({256, 5, 64, 64, 4'000'000, false, 0, true, 0});
    Random random{23};
    run_all(bench, random, jobs);
    size_t longest = 0;
    for (Job& job : jobs) {
        std::vector<int> drawn;
        for (auto& p : job.reply->pieces)
            for (auto& told : p.tokens) drawn.push_back(told.id);
        longest = std::max(longest, drawn.size());
        Session<bf16> session(tiny().file.config, tiny().weights, 256, where);
        session.feed(job.prompt);
        Matcher m(form);
        std::vector<uint32_t> bits((V + 31) / 32 + 1);
        std::vector<int> ids = job.prompt;
        for (int id : drawn) {
            std::vector<float> row(session.logits, session.logits + V);
            penalize(row.data(), job.how, ids, job.prompt.size(), V);
            for (auto [which, more] : job.bias) row[(size_t)which] += more;
            m.mask(bits.data());
            for (int end : tiny().file.config.end_tokens)
                if (m.may_end()) bits[(size_t)end / 32] |= 1u << end % 32;
            for (size_t v = 0; v < V; v++)
                if (!(bits[v / 32] >> v % 32 & 1)) row[v] = -INFINITY;
            REQUIRE(sample(row.data(), t().size(), job.how, ids.size()) == id);
            ids.push_back(id);
            session.feed({id});
            REQUIRE(m.advance(id));
        }
    }
    CHECK(longest > 20);
}

TEST_CASE("forms: requests that bring the same form at the same time share it") {
    Forms forms;
    std::atomic<int> begun{0};
    std::vector<std::shared_ptr<Automaton>> got(4);
    std::vector<std::thread> threads;
    for (auto& mine : got)
        threads.emplace_back([&] {
            mine = forms.get(t(), "one", [&] { // all are at it before the first one is done
                begun++;
                for (int i = 0; i < 5000 && begun < 4; i++) usleep(1000);
                return grammar_of_regex("[a-z]+");
            });
        });
    for (auto& thread : threads) thread.join();
    CHECK(begun == 4);
    for (auto& one : got) CHECK(one == got[0]);
}

TEST_CASE("forms: begin after a thought; end by themselves, whatever the end tokens; biases do not break them") {
    Forms forms;
    const auto form = forms.get(t(), "c", [] { return grammar_of_choice({"yes", "yes indeed", "no"}); });
    Random random{22};
    const int open = t().id("<think>"), close = t().id("</think>");
    for (int i = 0; i < 12; i++) {
        Job job;
        job.reply = std::make_shared<Reply>(), job.reply->left = 1;
        job.prompt = {1, 2, 3, i}, job.how.seed = (uint64_t)i, job.max_tokens = 60, job.form = form;
        job.ignore_eos = i % 2, job.thinking = i % 3 == 0;
        if (job.thinking) job.bias = {{i % 2 ? open : 77, 40.f}, {close, 15.f}}; // (random thoughts come to an end)
        else job.bias = {{t().encode("n", false)[0], BAN}, {t().encode("no", false)[0], BAN}, {77, ALLOW}};
        Bench bench({256, 1, 64, 64, 4'000'000});
        run_all(bench, random, {job});
        std::string thought, said;
        for (auto& p : job.reply->pieces) (p.thought ? thought : said) += p.text;
        if (std::string(job.reply->pieces.back().finish) == "stop") CHECK(keeps(form, said));
        else CHECK((job.thinking && said.empty()));
        if (!job.thinking) CHECK(said.compare(0, 3, "yes") == 0);
    }
}

// ----------------------------------------------------------------------------------------------------------- calls

struct Said {
    std::string text;
    std::vector<CallPart> calls; // joined
    size_t parts = 0;
};
static Said hear(const std::string& text, bool sure, bool whole) {
    Job job;
    job.tools = std::make_shared<const std::set<std::string>>(std::set<std::string>{"f", "g"});
    job.sure_calls = sure;
    Speech speech(t(), job);
    Said said;
    auto take = [&](Piece& piece) {
        said.text += piece.text;
        for (auto& part : piece.calls) {
            said.parts++;
            if (!part.name.empty()) said.calls.push_back(part);
            else said.calls.back().arguments += part.arguments;
        }
    };
    for (int id : t().encode(text, true)) {
        Piece piece;
        speech.feed(piece, {id, 0, "", {}});
        take(piece);
    }
    Piece last;
    if (whole) speech.finish(last), take(last);
    return said;
}

// Long fixed names, as in schemas of real use.
static const std::string RECORD = R"({"type": "object", "properties": {"customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 999},
    "preferred_delivery_address": {"type": "string", "maxLength": 6}, "is_a_returning_customer": {"type": "boolean"},
    "kind_of_membership": {"enum": ["standard_membership", "premium_membership"]}}, "required": ["customer_identification_number",
    "preferred_delivery_address", "is_a_returning_customer", "kind_of_membership"], "additionalProperties": false})";

TEST_CASE("forms: what they leave no choice about is taken at once, and the text is that of one token a step") {
    Forms forms;
    Random random{41};
    const std::vector<std::function<Grammar()>> grammars = {
        [] { sj::Doc d; sj::parse(d, RECORD); return grammar_of_schema(d.root()); },
        [] { return grammar_of_choice({"what else could it have been?", "what else would it be?"}); },
        [] { return grammar_of_regex("The answer to the question is [0-9]{1,4}, 毫无疑问，\\u00e9 or so\\."); },
        [] { return grammar_of_choice({"There is one answer only, and this is it."}); }};
    std::vector<Job> jobs;
    for (int i = 0; i < 24; i++) {
        Job job = random_job(random, 400);
        const size_t kind = (size_t)i % 4;
        job.form = forms.get(t(), std::to_string(kind), grammars[kind]);
        job.thinking = i % 3 == 2, job.stops.clear();
        job.max_tokens = i % 5 ? 400 - job.prompt.size() : 9; // some are cut off, also among such tokens
        if (i == 7) job.stops = {"question"};
        if (i == 8) job.max_tokens = 300, job.min_tokens = 20;
        jobs.push_back(job);
    }
    std::vector<std::vector<std::string>> by_steps; // text, finish and count of each
    size_t complete = 0, preempted = 0;
    for (auto [jump, max_seqs, chunk, pages] : {std::tuple{0, 24, 64, 700}, {2, 24, 64, 700}, {1, 24, 64, 700}, {6, 5, 3, 700},
                                                {2, 24, 64, 28}, {2, 8, 16, 26}}) {
        Bench bench({400, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes(), false, 0, true, jump});
        std::vector<Job> all = jobs;
        for (Job& job : all) job.reply = std::make_shared<Reply>(), job.reply->left = 1;
        run_all(bench, random, all);
        std::vector<std::string> answers;
        for (const Job& job : all) {
            auto& last = job.reply->pieces.back();
            answers.push_back(text_of(job) + "|" + last.finish + "|" + std::to_string(last.count));
            const bool whole = std::string(last.finish) == "stop" && job.stops.empty();
            if (whole) CHECK_MESSAGE(keeps(job.form, text_of(job)), text_of(job));
            complete += whole;
        }
        by_steps.push_back(answers);
        preempted += bench.desk.figures->preempted;
        if (jump) CHECK(bench.desk.figures->forced > (jump < 6 ? 50 : 10));
        else CHECK(bench.desk.figures->forced == 0);
        const std::string kind = format("jump %d, at most %d, chunks of %d, %d pages", jump, max_seqs, chunk, pages);
        INFO(kind);
        for (size_t i = 0; i < answers.size(); i++) CHECK(answers[i] == by_steps[0][i]);
    }
    CHECK(complete > 60);
    CHECK(preempted > 0);
}
TEST_CASE("forms: tokens without a choice are the tokenizer's, take fewer steps, and are told with log-probabilities like any") {
    Forms forms;
    const auto form = forms.get(t(), "record", [] { sj::Doc d; sj::parse(d, RECORD); return grammar_of_schema(d.root()); });
    std::map<int, std::string> texts;
    std::map<int, size_t> steps, counts;
    for (int kind = 0; kind < 3; kind++) { // one a step; jumps; with log-probabilities
        Bench bench({400, 1, 256, 256, 0, false, 0, true, kind == 1 ? 2 : 0});
        Job job;
        job.reply = std::make_shared<Reply>();
        job.reply->left = 1;
        job.prompt = {1, 2, 3}, job.form = form, job.how.seed = 5, job.max_tokens = 390;
        job.alternatives = kind == 2 ? 1 : -1;
        REQUIRE(bench.desk.submit({job}));
        for (; job.reply->left; steps[kind]++) bench.engine.step();
        texts[kind] = text_of(job), counts[kind] = job.reply->pieces.back().count;
        if (kind < 2) continue;
        std::string told;
        for (auto& p : job.reply->pieces)
            for (auto& token : p.tokens) {
                told += token.text;
                CHECK(token.logprob < 0);
            }
        CHECK(told == texts[kind]);
    }
    REQUIRE(keeps(form, texts[0]));
    CHECK(texts[1] == texts[0]);
    CHECK(texts[2] == texts[0]);
    CHECK(counts[1] == counts[0]);
    MESSAGE(counts[0] << " tokens in " << steps[0] << " steps, and in " << steps[1]);
    CHECK(steps[1] < steps[0] / 2);
}

TEST_CASE("calls: from text to parts; what is none stays text") {
    const std::string f = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>", g = "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    for (bool sure : {false, true}) {
        const Said two = hear("Let me see.\n\n" + f + "\n" + g + "\n", sure, true);
        CHECK(two.text == "Let me see.");
        REQUIRE(two.calls.size() == 2);
        CHECK(two.calls[0].name == "f");
        CHECK(two.calls[0].arguments == "{\"a\": [1, \"}\"]}");
        CHECK(two.calls[1].name == "g");
        CHECK(two.calls[1].arguments == "{}");
        CHECK((two.parts > 4) == sure); // as they come, or once it is sure that they are calls
        CHECK(hear("a\n\n", sure, true).text == "a\n\n");
        CHECK(hear(f + "\n\nDone.\n", sure, true).text == "Done.\n");
    }
    for (const char* odd : {"{\"name\": \"f\", \"arguments\": {\"a\": 1}", "{\"name\": \"h\", \"arguments\": {}}", "{\"name\": \"f\"}", "{\"name\": \"f\", \"arguments\": 5}",
                            "", "\n\n", "<think>", "{\"arguments\": {}}"}) {
        const std::string text = "one\n<tool_call>\n" + std::string(odd) + "\n</tool_call>\ntwo";
        const Said said = hear(text, false, true);
        CHECK(said.text == text);
        CHECK(said.calls.empty());
    }
    CHECK(hear("a\n<tool_call>\n{\"name\": \"f\", \"arg", false, true).text == "a\n<tool_call>\n{\"name\": \"f\", \"arg"); // cut off
    const Said cut = hear("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 123456789", true, true);
    REQUIRE(cut.calls.size() == 1);
    CHECK(cut.calls[0].arguments == "{\"a\": 1234567");
    // Text that looks like the marker is text.
    Job job;
    job.tools = std::make_shared<const std::set<std::string>>(std::set<std::string>{"f"});
    Speech speech(t(), job);
    std::string text;
    for (int id : t().encode(f, false)) { Piece p; speech.feed(p, {id, 0, "", {}}); text += p.text; CHECK(p.calls.empty()); }
    CHECK(text == f);
}

static std::string refused_for(const std::string& more, bool chat = true) {
    try {
        read_ask(service_of(), chat ? question(more) : "{\"prompt\": \"a\", " + more + "}", chat, 1);
        return "-";
    } catch (const Refusal& r) {
        CHECK(r.status == 400);
        return r.param;
    }
}

TEST_CASE("requests: forms and tools are done, or refused by their field") {
    for (const char* one : {"\"response_format\": {\"type\": \"json_object\"}", "\"structured_outputs\": {\"choice\": [\"a\", \"b\"]}",
             "\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"n\", \"strict\": true, \"schema\": {\"type\": \"object\"}}}",
             "\"structured_outputs\": {\"regex\": \"a+\"}", "\"structured_outputs\": {\"grammar\": \"root ::= \\\"a\\\"\"}", "\"structured_outputs\": {\"json_object\": true}",
             "\"structured_outputs\": {\"json\": {\"type\": \"null\"}}", "\"structured_outputs\": {\"json\": \"{\\\"type\\\": \\\"null\\\"}\"}", "\"guided_json\": true",
             "\"guided_choice\": [\"x\"]", "\"guided_regex\": \"x\"", "\"guided_grammar\": \"root ::= [a]\"", "\"structured_outputs\": {\"disable_fallback\": false, \"regex\": \"a\"}"}) {
        CHECK_MESSAGE(refused_for(one) == "-", one);
        CHECK_MESSAGE(refused_for(one, false) == "-", one);
    }
    for (auto more : {"", ", \"tool_choice\": \"auto\"", ", \"tool_choice\": \"none\"", ", \"tool_choice\": \"required\"", ", \"parallel_tool_calls\": false",
                      ", \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"now\"}}", ", \"tool_choice\": \"none\", \"response_format\": {\"type\": \"json_object\"}"})
        CHECK_MESSAGE(refused_for(TOOLS + more) == "-", more);
    for (auto& row : std::vector<std::pair<std::string, std::string>>{
             {"\"response_format\": 5", "response_format"}, {"\"response_format\": {\"type\": \"json_schema\"}", "response_format"},
             {"\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": {\"not\": {}}}}", "response_format"},
             {"\"structured_outputs\": {\"regex\": \"(\"}", "structured_outputs"}, {"\"structured_outputs\": {\"regex\": 5}", "structured_outputs"},
             {"\"structured_outputs\": {\"grammar\": \"x\"}", "structured_outputs"}, {"\"structured_outputs\": {\"choice\": [\"\"]}", "structured_outputs"},
             {"\"structured_outputs\": {\"regex\": \"a\", \"choice\": [\"a\"]}", "structured_outputs"}, {"\"structured_outputs\": {\"structural_tag\": \"a\"}", "structured_outputs"},
             {"\"structured_outputs\": {\"regex\": \"a\"}, \"response_format\": {\"type\": \"json_object\"}", "structured_outputs"}, {"\"structured_outputs\": []", ""},
             {"\"guided_json\": \"{\"", "guided_json"}, {"\"guided_json\": 5", "guided_json"}, {TOOLS + ", \"tool_choice\": \"any\"", "tool_choice"},
             {TOOLS + ", \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"x\"}}", "tool_choice"}, {TOOLS + ", \"logprobs\": true", "logprobs"},
             {TOOLS + ", \"response_format\": {\"type\": \"json_object\"}", "tools"}, {"\"tools\": 5", "tools"}, {"\"tools\": [" + NOW + ", " + NOW + "]", "tools"},
             {"\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"a b\"}}]", "tools"}, {"\"tools\": [{\"type\": \"custom\"}]", "tools"},
             {R"("tools": [{"type": "function", "function": {"name": "a", "strict": true, "parameters": {"patternProperties": {}}}}])", "tools"}})
        CHECK_MESSAGE(refused_for(row.first) == row.second, row.first);
    // Requirements of strict or forced calls only are no fault of other calls.
    CHECK(refused_for(R"("tools": [{"type": "function", "function": {"name": "a", "parameters": {"patternProperties": {}}}}])") == "-");
    CHECK(refused_for(TOOLS, false) == "tools");
    const Ask ask = read_ask(service_of(), question(TOOLS), true, 1);
    CHECK(t().decode(ask.jobs[0].prompt, false).find("\"name\": \"weather\"") != std::string::npos);
}

// ------------------------------------------------------------------------------------------------------- from outside

struct Served : Process {
    int port = 0;
    static const char* program() { return getenv("SERVE") ? getenv("SERVE") : "./serve"; }
    static Strings with(const Strings& more) {
        Strings all = {MODEL, "-z", VOCABULARY, "-j", "1", "--port", "0", "--name", "tiny"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    explicit Served(const Strings& more = {}) : Process(program(), with(more)) {
        for (const double start = seconds(); port == 0; usleep(2000)) {
            const std::string said = err.text(), before = "listening on http://127.0.0.1:";
            REQUIRE(seconds() - start < 30);
            const size_t at = said.find(before);
            if (at != std::string::npos && said.back() == '\n') port = atoi(said.c_str() + at + before.size());
        }
    }
    ~Served() {
        if (pid) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
    }
    std::string ask(const std::string& body, const char* path = "/v1/chat/completions") const {
        const HttpReply r = Http(port).call("POST", path, body);
        INFO(body << "\n" << r.body);
        CHECK(r.status == 200);
        return r.body;
    }
};
// A stream's message as an answer at once would have it: content, finish_reason, and name(arguments) of each call.
static std::string told(const std::string& body, bool stream) {
    std::string content, calls, finish;
    size_t begun = 0;
    auto call = [&](sj::Value c) {
        if (c["id"]) {
            CHECK(c["id"].str().compare(0, 5, "call_") == 0);
            CHECK(c["type"].str() == "function");
            calls += "\n" + c["function"]["name"].str() + " ";
            begun++;
        }
        calls += c["function"]["arguments"].str();
    };
    if (stream) {
        for (auto& e : events_of(body)) {
            if (e == "[DONE]") continue;
            const Json j(e);
            const sj::Value c = j["choices"][(size_t)0];
            content += c["delta"]["content"].str();
            for (sj::Value one : c["delta"]["tool_calls"].items()) {
                call(one);
                CHECK((size_t)one["index"].number(-1) + 1 == begun);
            }
            finish += c["finish_reason"].str();
        }
    } else {
        const Json j(body);
        const sj::Value c = j["choices"][(size_t)0];
        content = c["message"]["content"].str(), finish = c["finish_reason"].str();
        CHECK(c["message"]["content"].is(sj::Null) == (content.empty() && c["message"]["tool_calls"]));
        for (sj::Value one : c["message"]["tool_calls"].items()) call(one);
    }
    return content + calls + "\n" + finish;
}

TEST_CASE("HTTP: every form is kept, whole and streamed") {
    const Served server;
    const std::string how = ", \"max_tokens\": 300, \"temperature\": 1.2, \"top_k\": 0, \"top_p\": 1, \"seed\": ";
    Forms forms;
    auto form = [&](const std::string& name, const std::function<Grammar()>& grammar) { return forms.get(t(), name, grammar); };
    const auto person = form("p", [] { sj::Doc d; sj::parse(d, PERSON); return grammar_of_schema(d.root()); });
    const std::vector<std::pair<std::string, std::shared_ptr<Automaton>>> asked = {
        {"\"response_format\": {\"type\": \"json_object\"}", form("o", [] { return grammar_of_json_object(); })},
        {"\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"p\", \"schema\": " + PERSON + "}}", person},
        {"\"structured_outputs\": {\"json\": " + PERSON + "}", person},
        {"\"structured_outputs\": {\"choice\": [\"yes\", \"no\"]}", form("c", [] { return grammar_of_choice({"yes", "no"}); })},
        {"\"structured_outputs\": {\"regex\": \"[0-9]{3}-[a-f]{1,9}\"}", form("r", [] { return grammar_of_regex("[0-9]{3}-[a-f]{1,9}"); })},
        {"\"guided_grammar\": \"root ::= \\\"(\\\" root? \\\")\\\" [a-c]\"", form("g", [] { return grammar_of_gbnf("root ::= \"(\" root? \")\" [a-c]"); })}};
    size_t complete = 0;
    for (auto& [field, automaton] : asked)
        for (int seed = 0; seed < 4; seed++) {
            const std::string body = question(field + how + std::to_string(seed));
            INFO(body);
            const std::string whole = told(server.ask(body), false);
            CHECK(told(server.ask(question(field + how + std::to_string(seed) + ", \"stream\": true")), true) == whole);
            const std::string text = whole.substr(0, whole.rfind('\n')), finish = whole.substr(whole.rfind('\n') + 1);
            INFO(text);
            Matcher m(automaton);
            CHECK(m.advance(text));
            CHECK((m.may_end() || finish == "length"));
            complete += finish == "stop";
            if (finish == "stop" && automaton == person) {
                const Json j(text);
                CHECK(j["age"].number(-1) >= 0);
                CHECK(j["age"].number(-1) <= 150);
                CHECK((j["kind"].str() == "a" || j["kind"].str() == "b"));
            }
        }
    CHECK(complete > 12);
    const Json completion(server.ask("{\"prompt\": \"a\", \"max_tokens\": 9, \"structured_outputs\": {\"choice\": [\"yes\"]}}", "/v1/completions"));
    CHECK(completion["choices"][(size_t)0]["text"].str() == "yes");
    CHECK(completion["choices"][(size_t)0]["finish_reason"].str() == "stop");
    const Json told_(server.ask(question("\"logprobs\": true, \"ignore_eos\": true, \"n\": 3, \"structured_outputs\": {\"choice\": [\"yes\"]}")));
    for (sj::Value c : told_["choices"].items()) CHECK(c["message"]["content"].str() == "yes");
}

TEST_CASE("HTTP: calls that are asked for, whole and streamed") {
    const Served server;
    const std::string how = ", \"max_tokens\": 300, \"temperature\": 1.2, \"top_k\": 0, \"top_p\": 1, \"seed\": ";
    const std::string open = std::to_string(t().id(CALL_OPEN));
    size_t called = 0;
    for (auto& [more, one] : std::vector<std::pair<std::string, bool>>{
             {", \"tool_choice\": \"required\", \"parallel_tool_calls\": false", true}, {", \"tool_choice\": \"required\"", false},
             {", \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"weather\"}}", true},
             {", \"parallel_tool_calls\": false, \"logit_bias\": {\"" + open + "\": 100}", true}}) // (`auto`; one is strict)
        for (int seed = 0; seed < 3; seed++) {
            const std::string body = TOOLS + more + how + std::to_string(seed);
            INFO(body);
            const std::string whole_body = server.ask(question(body)), whole = told(whole_body, false);
            CHECK(told(server.ask(question(body + ", \"stream\": true")), true) == whole);
            const Json j(whole_body);
            const sj::Value c = j["choices"][(size_t)0], calls = c["message"]["tool_calls"];
            CHECK(c["message"]["content"].str() == "");
            if (c["finish_reason"].str() == "length") continue;
            CHECK(c["finish_reason"].str() == "tool_calls");
            REQUIRE(calls.size() > 0);
            if (one) CHECK(calls.size() == 1);
            std::set<std::string> ids;
            for (sj::Value call : calls.items()) {
                ids.insert(call["id"].str());
                const Json arguments(call["function"]["arguments"].str());
                const std::string name = call["function"]["name"].str();
                CHECK((name == "weather" || name == "now"));
                if (more.find("\"weather\"") != more.npos) CHECK(name == "weather");
                if (more.find("logit_bias") != more.npos) continue; // of `weather` any object will do
                if (name == "now") CHECK(arguments.root().size() == 0);
                else CHECK(arguments["city"].is(sj::String));
                if (arguments["days"]) CHECK((arguments["days"].number() >= 1 && arguments["days"].number() <= 14));
            }
            CHECK(ids.size() == calls.size());
            called++;
        }
    CHECK(called > 5);
    const Json none(server.ask(question(TOOLS + ", \"tool_choice\": \"none\", \"max_tokens\": 50, \"seed\": 1")));
    CHECK(!none["choices"][(size_t)0]["message"]["tool_calls"]);
    // A call comes back as a message.
    const std::string body = server.ask(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
        "function": {"name": "now", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "call_1", "content": "noon"}], "max_tokens": 3, )" + TOOLS + "}");
    CHECK(told(body, false) != "");
}

TEST_CASE("HTTP: hostile forms are refused, and nobody waits for them") {
    const Served server;
    std::string values;
    for (int i = 0; i < 700000; i++) values += format("%s\"%d\"", i ? "," : "", i);
    const std::string large = question("\"structured_outputs\": {\"json\": {\"enum\": [" + values + "]}}");
    std::thread other([&] {
        try {
            Http c(server.port);
            for (int i = 0; i < 2; i++) c.call("POST", "/v1/chat/completions", large);
        } catch (const Error&) {}
    });
    double slowest = 0;
    for (int i = 0; i < 30; i++) {
        const double start = seconds();
        CHECK(Http(server.port).call("GET", "/health").status == 200);
        slowest = std::max(slowest, seconds() - start);
        usleep(10'000);
    }
    CHECK(slowest < 1);
    other.join();
    const HttpReply r = Http(server.port).call("POST", "/v1/chat/completions", large);
    CHECK(r.status == 400);
    CHECK(r.body.find("too large") != std::string::npos);
    CHECK(Json(r.body)["error"]["param"].str() == "structured_outputs");
    // One that refers to itself beside another keyword, in every field that takes a schema.
    const std::string self = R"({"properties":{"x":{"properties":{"y":{"$ref":"#","type":"object"}}}}})", little = "\"max_tokens\": 9, ";
    const std::string tool = R"("name": "f", "description": "d", )";
    for (auto& asked : std::vector<std::pair<const char*, std::string>>{
             {CHAT, question(little + R"("response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": )" + self + "}}")},
             {CHAT, question(little + "\"structured_outputs\": {\"json\": " + self + "}")},
             {CHAT, question(little + "\"guided_json\": " + self)},
             {CHAT, question(little + R"("tool_choice": "required", "tools": [{"type": "function", "function": {)" + tool + "\"parameters\": " + self + "}}]")},
             {COMPLETION, "{\"prompt\": \"a\", " + little + "\"guided_json\": " + self + "}"},
             {RESPONSES, R"({"input": "a", "max_output_tokens": 9, "text": {"format": {"type": "json_schema", "name": "n", "schema": )" + self + "}}}"},
             {RESPONSES, R"({"input": "a", "max_output_tokens": 9, "tool_choice": "required", "tools": [{"type": "function", )" + tool + "\"parameters\": " + self + "}]}"},
             {MESSAGES, R"({"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "output_config": {"format": {"type": "json_schema", "schema": )" + self + "}}}"},
             {MESSAGES, R"({"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "any"}, "tools": [{)" + tool + "\"input_schema\": " + self + "}]}"}}) {
        INFO(asked.second);
        CHECK(Http(server.port).call("POST", asked.first, asked.second).status == 200);
    }
    // One whose automaton is exponential, and a free answer beside it.
    const std::string odd = question("\"structured_outputs\": {\"regex\": \"[ab]*a[ab]{300}c\"}, \"max_tokens\": 40, \"temperature\": 1.5");
    for (int i = 0; i < 3; i++) server.ask(odd);
    CHECK(server.ask(question("\"max_tokens\": 5")) != "");
}

TEST_CASE("HTTP: forms of others are made while two addresses ask for hostile ones; memory goes back, and so does who leaves") {
    const Served server;
    std::string refs, defs, any, names;
    for (int i = 0; i < 60000; i++) defs += format("%s\"%d\": {}", i ? ", " : "", i);
    for (int i = 0; i < 9000; i++) refs += format("%s{\"$ref\": \"#/$defs/%d\"}", i ? ", " : "", 59999 - i);
    for (int i = 0; i < 4990; i++) any += i ? R"(, {"anyOf": [{}]})" : R"({"anyOf": [{}]})";
    for (int i = 0; i < 5000; i++) names += format(R"(%s{"properties": {"k": {"const": "%d"}}, "required": ["k"]})", i ? ", " : "", i);
    const Strings hostile = {R"({"anyOf": [)" + refs + R"(], "$defs": {)" + defs + "}}", R"({"allOf": [)" + any + "]}", R"({"oneOf": [)" + names + "]}",
                             R"({"properties": {")" + std::string(60000, 'a') + R"(": {}}, "additionalProperties": true})"};
    auto memory = [&] {
        size_t whole = 0, resident = 0;
        FILE* statm = fopen(format("/proc/%d/statm", (int)server.pid).c_str(), "r");
        REQUIRE(statm);
        REQUIRE(fscanf(statm, "%zu %zu", &whole, &resident) == 2);
        fclose(statm);
        return resident * (size_t)sysconf(_SC_PAGESIZE);
    };
    server.ask(question("\"guided_json\": {\"type\": \"null\"}, \"max_tokens\": 3"));
    const size_t before = memory();
    std::atomic<bool> over{false};
    std::atomic<size_t> asked{0}, most{0};
    std::vector<std::thread> clients;
    for (const char* from : {"127.0.0.2", "127.0.0.3"})
        for (size_t k = 0; k < 4; k++)
            clients.emplace_back([&, from, k] {
                for (size_t i = 0; !over; i++) {
                    Http h(server.port, "127.0.0.1", 0, from);
                    h.ask("POST", CHAT, question(format("\"max_tokens\": 1, \"seed\": %zu, \"guided_json\": ", i) + hostile[(i + k) % hostile.size()]));
                    if (i % 2) h.reply(); // (else it leaves)
                    asked++;
                }
            });
    std::vector<double> times;
    for (int i = 0; i < 60; i++) {
        const double start = seconds();
        server.ask(question(format("\"guided_json\": {\"enum\": [\"%d\"]}, \"max_tokens\": 1", i))); // a new form
        times.push_back(seconds() - start);
        most = std::max(most.load(), memory());
    }
    over = true;
    for (auto& c : clients) c.join();
    std::sort(times.begin(), times.end());
    MESSAGE("a form beside ", asked.load(), " hostile ones: median ", times[30], " s, slowest ", times.back(), " s; ", (most - before) >> 20, " MB more");
    CHECK(times[58] < 2); // (0.2 s on a machine of its own; this one has two cores for many)
    if (SANITIZED) return; // (its allocator keeps 256 MB that are free)
    CHECK(most - before < (400u << 20));
    for (const double start = seconds(); memory() > before + (64u << 20) && seconds() - start < 5;) usleep(20'000);
    CHECK(memory() < before + (64u << 20));
}

// ---------------------------------------------------------------------------------------------------- dialects

static std::vector<int> prompt_of(const char* path, const std::string& body) {
    INFO(body);
    try {
        return read_asked(service_of(), path, body, 1).ask.jobs.at(0).prompt;
    } catch (const Refusal& r) {
        FAIL(r.what());
        throw;
    }
}
static std::string in_json(const std::string& text) {
    std::string out;
    sj::quote(out, text);
    return out;
}
static const std::string CALLED = R"({"role": "user", "content": "a"}, {"role": "assistant", "content": "One moment.", "reasoning_content": "hm", "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{\"a\": 1}"}}, {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"}, {"role": "tool", "tool_call_id": "c2", "content": "night"})";

TEST_CASE("dialects: what the packages send is the conversation that a chat would have") {
    const std::string plain = "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, {\"role\": \"user\", \"content\": \"What is a warp?\"}]}";
    const std::vector<int> wanted = prompt_of(CHAT, plain);
    // as openai 3.54 sends them
    CHECK(prompt_of(RESPONSES, R"({"input":"What is a warp?","instructions":"Be brief.","max_output_tokens":40,"model":"tiny","temperature":1.0,"seed":7})") == wanted);
    CHECK(prompt_of(RESPONSES, R"({"input":[{"role":"developer","content":"Be brief."},{"role":"user","content":[{"type":"input_text","text":"What is "},
        {"type":"input_text","text":"a warp?"}],"type":"message"}],"model":"tiny","stream":true,"store":false,"include":[],"truncation":"disabled",
        "metadata":{"a":"b"},"service_tier":"auto","text":{"format":{"type":"text"},"verbosity":"medium"},"reasoning":null})") == wanted);
    // as anthropic 2.12 does
    CHECK(prompt_of(MESSAGES, R"({"max_tokens":40,"messages":[{"role":"user","content":"What is a warp?"}],"model":"tiny","system":"Be brief."})") == wanted);
    CHECK(prompt_of(MESSAGES, R"({"max_tokens":40,"messages":[{"role":"user","content":[{"type":"text","text":"What is a warp?","cache_control":{"type":"ephemeral"}}]}],
        "model":"tiny","system":[{"type":"text","text":"Be "},{"type":"text","text":"brief."}],"stream":true,"metadata":{"user_id":"u"},"thinking":{"type":"disabled"}})") == wanted);
    CHECK(count_message_tokens(service_of(), R"({"messages":[{"role":"user","content":"What is a warp?"}],"model":"tiny","system":"Be brief."})") ==
          format("{\"input_tokens\": %zu}", wanted.size()));
    CHECK(prompt_of(RESPONSES, R"({"input":"a","reasoning":{"effort":"high"}})") == prompt_of(CHAT, question("\"reasoning_effort\": \"high\"")));
    CHECK(prompt_of(MESSAGES, R"({"max_tokens":9,"messages":[{"role":"user","content":"a"}],"thinking":{"type":"adaptive"}})") ==
          prompt_of(CHAT, question("\"reasoning_effort\": \"high\"")));
    CHECK(prompt_of(MESSAGES, R"({"max_tokens":9,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"A warp is"}]})") ==
          prompt_of(CHAT, R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "A warp is"}], "continue_final_message": true})"));

    // Calls and their results, the results in another order than the calls.
    const std::vector<int> called = prompt_of(CHAT, "{\"messages\": [" + CALLED + "], " + TOOLS + "}");
    const Json tools("{" + TOOLS + "}");
    std::string flat, blocks;
    for (sj::Value tool : tools["tools"].items()) {
        const sj::Value f = tool["function"];
        flat += std::string(flat.empty() ? "" : ",") + "{\"type\": \"function\"", blocks += blocks.empty() ? "{\"type\": \"custom\"" : ",{\"type\": \"custom\"";
        for (auto [name, value] : f.members()) {
            flat += ", " + in_json(name) + ": " + std::string(value.raw());
            blocks += ", " + in_json(name == "parameters" ? "input_schema" : name) + ": " + std::string(value.raw());
        }
        flat += "}", blocks += "}";
    }
    CHECK(prompt_of(RESPONSES, R"({"input":[{"role":"user","content":"a"},{"id":"rs_1","summary":[],"type":"reasoning","content":[{"text":"hm","type":"reasoning_text"}]},
        {"id":"msg_1","content":[{"annotations":[],"text":"One moment.","type":"output_text","logprobs":[]}],"role":"assistant","status":"completed","type":"message"},
        {"arguments":"{\"a\": 1}","call_id":"c1","name":"now","type":"function_call","id":"fc_1","status":"completed"},{"arguments":"{}","call_id":"c2","name":"now","type":"function_call"},
        {"type":"function_call_output","call_id":"c2","output":"night"},{"type":"function_call_output","call_id":"c1","output":[{"type":"input_text","text":"noon"}]}],"tools":[)" +
        flat + "]}") == called);
    const std::string messages = R"({"max_tokens":9,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":""},
        {"type":"text","text":"One moment."},{"type":"tool_use","id":"c1","name":"now","input":{"a": 1}},{"type":"tool_use","id":"c2","name":"now","input":{}}]},
        {"role":"user","content":[{"type":"tool_result","tool_use_id":"c2","content":[{"type":"text","text":"night"}]},{"type":"tool_result","tool_use_id":"c1","content":"noon"})";
    CHECK(prompt_of(MESSAGES, messages + "]}],\"tools\":[" + blocks + "]}") == called);
    CHECK(prompt_of(MESSAGES, messages + R"(,{"type":"text","text":"And?"}]}],"tools":[)" + blocks + "]}") ==
          prompt_of(CHAT, "{\"messages\": [" + CALLED + ", {\"role\": \"user\", \"content\": \"And?\"}], " + TOOLS + "}"));
    // How it is to be said.
    const Ask one = read_asked(service_of(), RESPONSES, R"({"input":"a","tool_choice":{"type":"function","name":"now"},"tools":[)" + flat + "], \"max_output_tokens\": 7}", 1).ask;
    CHECK(one.jobs[0].one_call);
    CHECK(one.jobs[0].max_tokens == 7);
    CHECK(one.id.compare(0, 5, "resp_") == 0);
    const Ask other = read_asked(service_of(), MESSAGES, R"({"max_tokens":8,"messages":[{"role":"user","content":"a"}],"stop_sequences":["x"],"tool_choice":{"type":"any",
        "disable_parallel_tool_use":true},"tools":[)" + blocks + "]}", 1).ask;
    CHECK(other.jobs[0].one_call);
    CHECK(other.jobs[0].sure_calls);
    CHECK(other.jobs[0].stops == std::vector<std::string>{"x"});
    CHECK(read_asked(service_of(), RESPONSES, R"({"input":"a","text":{"format":{"type":"json_schema","name":"p","schema":{"type":"null"}}}})", 1).ask.jobs[0].form);
    CHECK(read_asked(service_of(), MESSAGES, R"({"max_tokens":8,"messages":[{"role":"user","content":"a"}],"output_config":{"format":{"type":"json_schema","schema":{"type":"null"}}}})", 1).ask.jobs[0].form);
}

TEST_CASE("dialects: results of tools go by the ids of their calls, over several rounds; an id of no call is 400") {
    auto call = [](const std::string& id, const std::string& arguments) { // (of a chat)
        return "{\"id\": \"" + id + R"(", "type": "function", "function": {"name": "now", "arguments": ")" + arguments + "\"}}";
    };
    auto calls = [](const std::string& all) { return R"({"role": "assistant", "content": null, "tool_calls": [)" + all + "]}"; };
    auto result = [](const std::string& id, const std::string& text) {
        return R"({"role": "tool", "tool_call_id": ")" + id + "\", \"content\": \"" + text + "\"}";
    };
    auto chat = [](const std::vector<std::string>& messages) {
        std::string all = R"({"role": "user", "content": "a"})";
        for (auto& m : messages) all += ", " + m;
        return "{\"messages\": [" + all + "]}";
    };
    auto refused = [](const char* path, const std::string& body, const std::string& what) {
        try {
            read_asked(service_of(), path, body, 1);
            return false;
        } catch (const Refusal& r) {
            INFO(r.what());
            return r.status == 400 && std::string(r.what()).find(what) != std::string::npos;
        }
    };
    const std::string two = calls(call("x", "{}") + ", " + call("y", "{}"));
    const std::vector<int> wanted = prompt_of(CHAT, chat({two, result("x", "one"), result("y", "two")}));
    CHECK(prompt_of(CHAT, chat({two, result("y", "two"), result("x", "one")})) == wanted);
    CHECK(prompt_of(CHAT, chat({two, result("x", "two"), result("y", "one")})) != wanted);
    CHECK(prompt_of(CHAT, chat({two, R"({"role": "tool", "content": "one"})", R"({"role": "tool", "content": "two"})"})) == wanted); // by position
    // A later round uses the ids again, in the other order.
    const std::string again = calls(call("y", "{}") + ", " + call("x", "{}"));
    const std::vector<int> rounds = prompt_of(CHAT, chat({two, result("x", "one"), result("y", "two"), again, result("y", "three"), result("x", "four")}));
    CHECK(prompt_of(CHAT, chat({two, result("y", "two"), result("x", "one"), again, result("x", "four"), result("y", "three")})) == rounds);
    // Calls of one id in one message are answered in their order.
    CHECK(prompt_of(CHAT, chat({calls(call("x", "{}") + ", " + call("x", "{}")), result("x", "one"), result("x", "two")})) == wanted);
    for (const std::string id : {"z", "X", ""}) {
        CHECK(refused(CHAT, chat({two, result("x", "one"), result(id, "two")}), "no call before it has the id"));
        CHECK(refused(CHAT, chat({result(id, "two"), two}), "no call before it has the id"));
    }
    CHECK(refused(CHAT, chat({two, R"({"role": "tool", "tool_call_id": 5, "content": ""})"}), "no call before it"));

    // The same rounds in the other dialects.
    auto called = [](const std::string& id) { return R"({"type": "function_call", "name": "now", "arguments": "{}", "call_id": ")" + id + "\"}, "; };
    auto output = [](const std::string& id, const std::string& text) { return R"({"type": "function_call_output", "call_id": ")" + id + "\", \"output\": \"" + text + "\"}"; };
    const std::string ask = R"({"input": [{"role": "user", "content": "a"}, )";
    CHECK(prompt_of(RESPONSES, ask + called("x") + called("y") + output("y", "two") + ", " + output("x", "one") + ", " + called("y") + called("x") +
                    output("x", "four") + ", " + output("y", "three") + "]}") == rounds);
    CHECK(refused(RESPONSES, ask + called("x") + output("y", "two") + "]}", "input"));
    auto used = [](const std::string& id) { return R"({"type": "tool_use", "name": "now", "input": {}, "id": ")" + id + "\"}"; };
    auto block = [](const std::string& id, const std::string& text) { return R"({"type": "tool_result", "tool_use_id": ")" + id + "\", \"content\": \"" + text + "\"}"; };
    auto turn = [](const char* role, const std::string& a, const std::string& b) { return std::string("{\"role\": \"") + role + "\", \"content\": [" + a + ", " + b + "]}"; };
    const std::string begin = R"({"max_tokens": 9, "messages": [{"role": "user", "content": "a"}, )";
    CHECK(prompt_of(MESSAGES, begin + turn("assistant", used("x"), used("y")) + ", " + turn("user", block("y", "two"), block("x", "one")) + ", " +
                    turn("assistant", used("y"), used("x")) + ", " + turn("user", block("x", "four"), block("y", "three")) + "]}") == rounds);
    CHECK(refused(MESSAGES, begin + turn("assistant", used("x"), used("y")) + ", " + turn("user", block("y", "two"), block("z", "one")) + "]}", "messages"));
}

TEST_CASE("chats: what an assistant's turn holds is kept or refused by name") {
    auto chat = [](const std::string& more) { return R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [
        {"id": "x", "function": {"name": "now", "arguments": "{}"}}], )" + more + R"(}, {"role": "tool", "tool_call_id": "x", "content": "c"}]})"; };
    auto fault = [&](const std::string& more) -> std::string {
        try {
            read_asked(service_of(), CHAT, chat(more), 1);
            return "";
        } catch (const Refusal& r) {
            CHECK(r.status == 400);
            CHECK(r.param == "messages");
            return r.what();
        }
    };
    const std::vector<int> wanted = prompt_of(CHAT, chat(R"("reasoning_content": "hm")"));
    CHECK(prompt_of(CHAT, chat(R"("reasoning": "hm")")) == wanted); // vLLM's name
    CHECK(prompt_of(CHAT, chat(R"("reasoning": "hm", "reasoning_content": "hm")")) == wanted);
    CHECK(prompt_of(CHAT, chat(R"("reasoning": null, "reasoning_content": "hm", "function_call": null, "refusal": "", "audio": null)")) == wanted);
    CHECK(prompt_of(CHAT, chat(R"("reasoning": null)")) != wanted);
    CHECK(fault(R"("reasoning": "hm", "reasoning_content": "ah")").find("reasoning") != std::string::npos);
    CHECK(fault(R"("reasoning": ["hm"])").find("reasoning") != std::string::npos);
    for (const std::string name : {"function_call", "audio", "refusal"}) CHECK(fault("\"" + name + "\": {\"name\": \"now\"}").find(name) != std::string::npos);
}

TEST_CASE("dialects: every other field is refused by its name") {
    auto refused = [](const char* path, const std::string& body) -> std::string {
        try {
            read_asked(service_of(), path, body, 1);
            return "-";
        } catch (const Refusal& r) {
            CHECK(r.status == 400);
            CHECK(Json(message_error_json(r, "id"))["error"]["message"].str().find(r.param) != std::string::npos);
            return r.param;
        }
    };
    using Rows = std::vector<std::pair<std::string, std::string>>;
    for (auto& row : Rows{
             {"\"store\": true", "store"}, {"\"previous_response_id\": \"resp_1\"", "previous_response_id"}, {"\"conversation\": \"c\"", "conversation"},
             {"\"background\": true", "background"}, {"\"include\": [\"reasoning.encrypted_content\"]", "include"}, {"\"truncation\": \"auto\"", "truncation"},
             {"\"prompt\": {\"id\": \"p\"}", "prompt"}, {"\"max_tool_calls\": 1", "max_tool_calls"}, {"\"top_logprobs\": 2", "top_logprobs"}, {"\"n\": 2", "n"},
             {"\"max_tokens\": 2", "max_tokens"}, {"\"messages\": []", "messages"}, {"\"response_format\": {}", "response_format"}, {"\"logprobs\": true", "logprobs"},
             {"\"max_output_tokens\": 0", "max_output_tokens"}, {"\"max_output_tokens\": 5000", "input"}, {"\"temperature\": 3", "temperature"},
             {"\"instructions\": 5", "instructions"}, {"\"text\": {\"format\": {\"type\": \"xml\"}}", "text"}, {"\"text\": {\"verbosity\": \"low\"}", "verbosity"},
             {"\"text\": {\"format\": {\"type\": \"json_schema\", \"schema\": {\"not\": {}}}}", "text"}, {"\"text\": {\"x\": 1}", "text"}, {"\"text\": 1", ""},
             {"\"reasoning\": {\"summary\": \"auto\"}", "reasoning"}, {"\"reasoning\": {\"effort\": \"much\"}", "reasoning"}, {"\"tools\": 5", "tools"}, {"\"tools\": [5]", "tools"},
             {"\"tools\": [{\"type\": \"web_search\"}]", "tools"}, {"\"tools\": [{\"type\": \"function\", \"name\": \"f\", \"defer_loading\": true}]", "tools"},
             {"\"tools\": [{\"type\": \"function\", \"name\": \"a b\"}]", "tools"}, {"\"tool_choice\": {\"type\": \"allowed_tools\"}", "tool_choice"},
             {"\"stream\": true, \"stream_options\": {\"include_usage\": true}", "stream_options"}, {"\"cyber\": 1", "cyber"}, {"\"" + std::string(99, 'x') + "\": 1", ""},
             {"\"input\": 5", "input"}, {"\"input\": [5]", "input"}, {"\"input\": []", "input"}, {"\"input\": [], \"instructions\": \"s\"", "input"}, {"\"input\": [{\"role\": \"king\", \"content\": \"a\"}]", "input"},
             {"\"input\": [{\"role\": \"user\", \"content\": [{\"type\": \"input_image\"}]}]", "input"}, {"\"input\": [{\"type\": \"item_reference\", \"id\": \"x\"}]", "input"},
             {"\"input\": [{\"type\": \"function_call_output\", \"call_id\": \"x\", \"output\": \"\"}]", "input"}, {"\"input\": [{\"type\": \"function_call\", \"name\": \"f\"}]", "input"},
             {"\"input\": [{\"type\": \"reasoning\", \"encrypted_content\": \"x\"}]", "input"}})
        CHECK_MESSAGE(refused(RESPONSES, "{\"input\": \"a\", " + row.first + "}") == row.second, row.first);
    CHECK(refused(RESPONSES, "{}") == "input");
    for (auto& row : Rows{
             {"\"thinking\": {\"type\": \"enabled\", \"budget_tokens\": 1024}", "thinking"}, {"\"thinking\": {\"type\": \"between_tools\"}", "thinking"},
             {"\"max_tokens\": 0", "max_tokens"}, {"\"max_tokens\": 5000", "messages"}, {"\"stop_sequences\": \"a\"", "stop_sequences"}, {"\"stop_sequences\": [5]", "stop_sequences"},
             {"\"stop\": \"a\"", "stop"}, {"\"container\": \"c\"", "container"}, {"\"mcp_servers\": []", "mcp_servers"}, {"\"service_tier\": \"priority\"", "service_tier"}, {"\"speed\": \"slow\"", "speed"},
             {"\"output_config\": {\"effort\": \"low\"}", "output_config"}, {"\"output_config\": {\"format\": {\"type\": \"json_object\"}}", "output_config"},
             {"\"output_config\": {\"format\": {\"type\": \"json_schema\", \"schema\": {\"not\": {}}}}", "output_config"}, {"\"metadata\": {\"x\": 1}", "metadata"},
             {"\"tools\": [{\"type\": \"bash_20250124\", \"name\": \"bash\"}]", "tools"}, {"\"tools\": [{\"name\": \"f\"}]", "tools"}, {"\"tools\": {}", "tools"},
             {"\"tool_choice\": {\"type\": \"required\"}", "tool_choice"}, {"\"tool_choice\": \"auto\"", ""}, {"\"tool_choice\": {\"type\": \"tool\", \"name\": \"x\"}", "tool_choice"},
             {"\"system\": 5", "system"}, {"\"system\": [{\"type\": \"image\"}]", "system"}, {"\"messages\": 5", "messages"}, {"\"messages\": [5]", "messages"},
             {"\"messages\": []", "messages"}, {"\"messages\": [], \"system\": \"s\"", "messages"}, {"\"messages\": [{\"role\": \"user\"}]", "messages"},
             {"\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\"}]}]", "messages"},
             {"\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"thinking\", \"thinking\": \"x\"}]}]", "messages"},
             {"\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"tool_result\", \"tool_use_id\": \"x\"}]}]", "messages"},
             {"\"messages\": [{\"role\": \"assistant\", \"content\": [{\"type\": \"tool_use\", \"id\": \"x\", \"name\": \"f\", \"input\": \"{}\"}]}]", "messages"},
             {"\"messages\": [{\"role\": \"assistant\", \"content\": [{\"type\": \"redacted_thinking\", \"data\": \"x\"}]}]", "messages"}})
        CHECK_MESSAGE(refused(MESSAGES, "{\"max_tokens\": 9, \"messages\": [{\"role\": \"user\", \"content\": \"a\"}], " + row.first + "}") == row.second, row.first);
    CHECK(refused(MESSAGES, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}") == "max_tokens");
    for (const char* more : {"\"stop_sequences\": [\"\"]", "\"temperature\": 5", "\"max_tokens\": 0", "\"max_tokens\": 9999999999", "\"output_config\": {\"format\": {\"type\": \"json_schema\", \"schema\": {\"not\": {}}}}"})
        CHECK_THROWS_AS(count_message_tokens(service_of(), std::string("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], ") + more + "}"), Refusal);
}

// Names of the events of a stream; each must be the type in its data.
static Strings names_of(const std::string& body, std::vector<std::string>& data) {
    Strings names;
    for (size_t at = 0, end; (end = body.find("\n\n", at)) != std::string::npos; at = end + 2) {
        const std::string event = body.substr(at, end - at);
        const size_t line = event.find("\ndata: ");
        REQUIRE(event.compare(0, 7, "event: ") == 0);
        REQUIRE(line != std::string::npos);
        names.push_back(event.substr(7, line - 7));
        data.push_back(event.substr(line + 7));
        CHECK(Json(data.back())["type"].str() == names.back());
    }
    return names;
}
// A thought, a text, two calls, a text: as the engine tells it.
static std::vector<Piece> said(const char* finish) {
    std::vector<Piece> all(7);
    all[0].thought = true, all[0].text = "hm";
    all[1].text = "One ";
    all[2].text = "moment.";
    all[3].calls = {{"now", ""}, {"", "{\"a\""}};
    all[4].calls = {{"", ": 1}"}, {"now", ""}, {"", "{}"}};
    all[6].text = "Done", all[6].finish = finish, all[6].count = 20, all[6].cached = 4, all[6].thoughts = 3;
    return all;
}

TEST_CASE("dialects: events by their names and in their order; joined they are the answer at once") {
    const std::string tools = R"("tools":[{"type":"function","name":"now"}])", input = "{\"input\":\"a\"," + tools;
    std::string streamed, whole;
    auto tell = [&](const char* path, const std::string& body, const char* finish) {
        const Asked a = read_asked(service_of(), path, body + "}", 1), b = read_asked(service_of(), path, body + ", \"stream\": true}", 1);
        Reply reply;
        reply.whole = true;
        streamed.clear();
        for (Piece& p : said(finish)) streamed += b.answer->events(p), reply.put(std::move(p));
        CHECK(reply.pieces.size() == 3); // what comes after a call stays after it
        for (Piece& p : reply.pieces) a.answer->add(std::move(p));
        whole = a.answer->whole();
        CHECK(a.answer->told());
    };
    for (const char* finish : {"tool_calls", "length"}) {
        const bool cut = !strcmp(finish, "length");
        std::vector<std::string> data;
        tell(RESPONSES, input, finish);
        const Strings text = {"response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_text.done",
                              "response.content_part.done", "response.output_item.done"},
                      call = {"response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.output_item.done"};
        Strings wanted = {"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
                          "response.reasoning_text.done", "response.content_part.done", "response.output_item.done"};
        auto add = [&](Strings more, const char* twice) {
            for (auto& name : more) {
                wanted.push_back(name);
                if (name == twice) wanted.push_back(name);
            }
        };
        add(text, "response.output_text.delta"), add(call, "response.function_call_arguments.delta"), add(call, ""), add(text, "");
        wanted.push_back(cut ? "response.incomplete" : "response.completed");
        CHECK(names_of(streamed, data) == wanted);
        const Json done(data.back()), at_once(whole), first(data[0]);
        CHECK(first["response"]["status"].str() == "in_progress");
        CHECK(first["response"]["tools"].size() == 1);
        CHECK(first["response"]["output"].size() == 0);
        for (size_t i = 0; i < data.size(); i++) CHECK(Json(data[i])["sequence_number"].number() == (double)i);
        for (const sj::Value r : {done["response"], at_once.root()}) {
            CHECK(r["status"].str() == (cut ? "incomplete" : "completed"));
            CHECK(r["incomplete_details"]["reason"].str() == (cut ? "max_output_tokens" : ""));
            CHECK(r["store"].is(sj::False));
            CHECK(r["usage"]["output_tokens_details"]["reasoning_tokens"].number() == 3);
            const sj::Value out = r["output"];
            REQUIRE(out.size() == 5);
            CHECK(out[(size_t)0]["content"][(size_t)0]["text"].str() == "hm");
            CHECK(out[(size_t)1]["content"][(size_t)0]["text"].str() == "One moment.");
            CHECK(out[(size_t)2]["arguments"].str() == "{\"a\": 1}");
            CHECK(out[(size_t)3]["arguments"].str() == "{}");
            CHECK(out[(size_t)2]["call_id"].str() != out[(size_t)3]["call_id"].str());
            CHECK(out[(size_t)4]["content"][(size_t)0]["text"].str() == "Done");
            CHECK(out[(size_t)3]["status"].str() == "completed");
            CHECK(out[(size_t)4]["status"].str() == (cut ? "incomplete" : "completed"));
        }
        data.clear();
        tell(MESSAGES, R"({"max_tokens":9,"messages":[{"role":"user","content":"a"}],"tools":[{"name":"now","input_schema":{"type":"object"}}])", finish);
        const Strings block = {"content_block_start", "content_block_delta", "content_block_stop"};
        wanted = {"message_start"};
        add(block, ""), add(block, "content_block_delta"), add(block, "content_block_delta"), add(block, ""), add(block, "");
        add({"message_delta", "message_stop"}, "");
        CHECK(names_of(streamed, data) == wanted);
        const Json message(whole), delta(data[data.size() - 2]);
        const sj::Value content = message["content"];
        REQUIRE(content.size() == 5);
        CHECK(content[(size_t)0]["thinking"].str() == "hm");
        CHECK(content[(size_t)2]["input"]["a"].number() == 1);
        CHECK(content[(size_t)4]["text"].str() == "Done");
        CHECK(message["usage"]["input_tokens"].number() + 4 == (double)prompt_of(MESSAGES, R"({"max_tokens":9,"messages":[{"role":"user","content":"a"}],
            "tools":[{"name":"now","input_schema":{"type":"object"}}]})").size());
        for (const sj::Value r : {message.root(), delta["delta"]}) {
            CHECK(r["stop_reason"].str() == (cut ? "max_tokens" : "tool_use"));
            CHECK(r["stop_sequence"].is(sj::Null));
        }
        std::string partial;
        for (auto& d : data)
            if (Json(d)["index"].number() == 2) partial += Json(d)["delta"]["partial_json"].str();
        CHECK(partial == "{\"a\": 1}");
    }
    // A call that was cut off is no JSON: it is not told as if it were whole.
    const Asked a = read_asked(service_of(), MESSAGES, R"({"max_tokens":9,"messages":[{"role":"user","content":"a"}]})", 1);
    Piece cut;
    cut.text = "a", cut.calls = {{"now", ""}, {"", "{\"a"}}, cut.finish = "length";
    a.answer->add(std::move(cut));
    CHECK(Json(a.answer->whole())["content"].size() == 1);
    // The data that a request can get about itself are bounded.
    const Asked large = read_asked(service_of(100'000), RESPONSES, "{\"input\":\"a\",\"instructions\":\"" + std::string(50'000, ' ') + "\"}", 1);
    Piece end;
    end.finish = "stop";
    CHECK(large.answer->events(end).size() < 10'000);
}

TEST_CASE("dialects: many results of tools in the reverse order are put right, and take no longer than in order") {
    const int n = 50'000;
    double took[2];
    for (const bool reverse : {false, true}) {
        std::string calls, results;
        for (int i = 0; i < n; i++) {
            const int which = reverse ? n - 1 - i : i;
            calls += format(R"({"type":"function_call","call_id":"c%d","name":"f","arguments":"{}"},)", i);
            results += format(R"({"type":"function_call_output","call_id":"c%d","output":"%d"},)", which, which);
        }
        const std::string body = "{\"input\": [" + calls + results + R"({"role":"user","content":"a"}]})";
        sj::Doc doc;
        const Fields f(parse_body(doc, body));
        const double start = seconds();
        const Json all(chat_of_response(f));
        const std::vector<Message> messages = conversation_from_json(all["messages"]);
        took[reverse] = seconds() - start;
        int next = 0;
        for (const Message& m : messages)
            if (m.role == "tool" && m.content == std::to_string(next)) next++;
        CHECK(next == n);
        CHECK(messages.size() == (size_t)n + 2);
    }
    CHECK(took[1] < 5 * took[0] + 0.2);
}

TEST_CASE("dialects: passages of the documents go with the question, are counted and told") {
    Scratch scratch;
    write_file(scratch / "warps.md", "# Warps\n\nA warp has 32 lanes.");
    Service with = service_of();
    with.documents = std::make_shared<Documents>(DocumentOptions{scratch / "warps.md", scratch / "index", 4}, [](auto&) {});
    const std::string question = R"([{"role":"user","content":"What is a warp?"}])";
    for (const char* path : {RESPONSES, MESSAGES}) {
        const bool message = !strcmp(path, MESSAGES);
        auto body = [&](const std::string& more) {
            return (message ? "{\"max_tokens\":9,\"messages\":" : "{\"max_output_tokens\":9,\"input\":") + question + more + "}";
        };
        auto answered = [&](const Service& service, const std::string& more) { return read_asked(service, path, body(more), 1); };
        auto prompt = [&](const Service& service, const std::string& more) { return answered(service, more).ask.jobs[0].prompt; };
        const std::vector<int> grounded = prompt(with, ""), plain = prompt(service_of(), "");
        CHECK(grounded == read_asked(with, CHAT, "{\"max_tokens\":9,\"messages\":" + question + "}", 1).ask.jobs[0].prompt);
        CHECK(grounded.size() > plain.size());
        CHECK(prompt(with, ",\"use_documents\":true") == grounded);
        CHECK(prompt(with, ",\"use_documents\":false") == plain);
        CHECK_THROWS_AS(answered(service_of(), ",\"use_documents\":true"), Refusal);
        if (message)
            for (auto& [more, tokens] : {std::pair{"", grounded.size()}, {",\"use_documents\":false", plain.size()}})
                CHECK(count_message_tokens(with, body(more)) == format("{\"input_tokens\": %zu}", tokens));
        for (const char* finish : {"stop", "length"})
            for (const char* more : {"", ",\"use_documents\":false"}) {
                const Asked whole = answered(with, more), streamed = answered(with, more + std::string(",\"stream\":true"));
                std::string events;
                for (int i = 0; i < 2; i++) {
                    Piece piece;
                    piece.text = "a";
                    if (i) piece.finish = finish;
                    events += streamed.answer->events(piece);
                    whole.answer->add(std::move(piece));
                }
                const Json all(whole.answer->whole());
                std::vector<std::string> data;
                names_of(events, data);
                size_t at = message ? 0 : data.size() - 1; // of the one event that has them
                for (size_t i = 0; i < data.size(); i++) CHECK((data[i].find("\"sources\"") != std::string::npos) == (!*more && i == at));
                const Json event(data[at]);
                for (const sj::Value v : {all.root(), event[message ? "message" : "response"]}) {
                    CHECK((bool)v["sources"] == !*more);
                    if (!*more) CHECK(v["sources"][(size_t)0]["text"].str() == "# Warps\n\nA warp has 32 lanes.");
                }
            }
    }
}

TEST_CASE("HTTP: dialects say what a chat says, in their own words") {
    const Served server;
    const std::string how = "\"temperature\": 1.2, \"top_k\": 0, \"seed\": 5";
    const std::string wanted = told(server.ask(question("\"max_tokens\": 40, " + how)), false), text = wanted.substr(0, wanted.rfind('\n'));
    const std::string response = "{\"input\": \"a\", \"max_output_tokens\": 40, " + how, message = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], " + how + ", \"max_tokens\": ";
    std::vector<std::string> data;
    CHECK(Json(server.ask(response + "}", RESPONSES))["output"][(size_t)0]["content"][(size_t)0]["text"].str() == text);
    names_of(server.ask(response + ", \"stream\": true}", RESPONSES), data);
    CHECK(Json(data.back())["response"]["output"][(size_t)0]["content"][(size_t)0]["text"].str() == text);
    const Json one(server.ask(message + "40}", MESSAGES));
    CHECK(one["content"][(size_t)0]["text"].str() == text);
    CHECK(one["id"].str().compare(0, 4, "msg_") == 0);
    data.clear();
    names_of(server.ask(message + "40, \"stream\": true}", MESSAGES), data);
    std::string joined;
    for (auto& d : data) joined += Json(d)["delta"]["text"].str();
    CHECK(joined == text);
    size_t at = text.size() / 2; // a stop string from the middle of the text
    while (((uint8_t)text[at] & 0xC0) == 0x80) at++;
    size_t end = at + 1;
    while (end < text.size() && ((uint8_t)text[end] & 0xC0) == 0x80) end++;
    const std::string stop = text.substr(at, end - at);
    const Json stopped(server.ask(message + "40, \"stop_sequences\": [\"never so\", " + in_json(stop) + "]}", MESSAGES));
    CHECK(stopped["stop_reason"].str() == "stop_sequence");
    CHECK(stopped["stop_sequence"].str() == stop);
    CHECK(Json(server.ask(message + "40}", COUNT_TOKENS))["input_tokens"].number() > 3);
    CHECK(Json(server.ask(response + ", \"reasoning\": {\"effort\": \"high\"}, \"logit_bias\": {\"" + std::to_string(t().id("<think>")) + "\": 100}}", RESPONSES))
              ["usage"]["output_tokens_details"]["reasoning_tokens"].number() > 0);

    auto call = [&](const char* method, const char* path, const std::string& body) { return Http(server.port).call(method, path, body); };
    for (auto& [body, status, type] : std::vector<std::tuple<std::string, int, const char*>>{
             {"{", 400, "invalid_request_error"}, {message + "0}", 400, "invalid_request_error"}, {message + "5, \"model\": \"x\"}", 404, "not_found_error"}}) {
        const HttpReply r = call("POST", MESSAGES, body);
        const Json j(r.body);
        CHECK(r.status == status);
        CHECK(j["type"].str() == "error");
        CHECK(j["error"]["type"].str() == type);
        CHECK(j["request_id"].str() == r.headers.at("x-request-id"));
    }
    CHECK(call("GET", MESSAGES, "").status == 405);
    CHECK(call("GET", "/v1/responses/resp_1", "").status == 404);
    CHECK(Json(call("POST", RESPONSES, "{\"input\": \"a\", \"store\": true}").body)["error"]["param"].str() == "store");
    const std::string hostile = "{\"input\": " + std::string(300, '[') + std::string(300, ']') + "}";
    CHECK(call("POST", RESPONSES, hostile).status == 400);
    const std::string metrics = call("GET", "/metrics", "").body;
    CHECK(metrics.find("http_requests_total{method=\"POST\",handler=\"/v1/messages/count_tokens\",status=\"200\"} 1") != std::string::npos);
}

// --------------------------------------------------------------------------------------------- files and batches

TEST_CASE("forms of the browser: parts by name, whatever their bytes; what is malformed is refused") {
    const std::string type = "multipart/form-data; boundary=XX";
    const std::string bytes = std::string("a\r\n--X\r\n\r\n--XY\0\xff", 16) + std::string(300, 'b');
    const std::string good = "--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--XX\r\nContent-Type: x/y\r\ncontent-disposition: form-data; "
                             "name=\"file\"; filename=\"a b.jsonl\"\r\n\r\n" + bytes + "\r\n--XX\r\nContent-Disposition: form-data; filename=f;name=none\r\n\r\n\r\n--XX--\r\n";
    const std::vector<FormPart> parts = read_form(type, good);
    REQUIRE(parts.size() == 3);
    CHECK(parts[0].name == "purpose");
    CHECK(parts[0].bytes == "batch");
    CHECK(parts[1].name == "file");
    CHECK(parts[1].filename == "a b.jsonl");
    CHECK(parts[1].bytes == bytes);
    CHECK(parts[2].name == "none");
    CHECK(parts[2].bytes == "");
    CHECK(read_form("multipart/form-data;boundary=\"XX\"", good).size() == 3);
    for (const char* bad : {"multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=YY", "multipart/form-data; xboundary=XX"})
        CHECK_THROWS_AS(read_form(bad, good), Refusal);
    CHECK_THROWS_AS(read_form("multipart/form-data; boundary=" + std::string(71, 'X'), good), Refusal);
    size_t whole = 0; // every prefix, and random damage: refused or parts within the text
    for (size_t n = 0; n < good.size() - 2; n++) CHECK_THROWS_AS(read_form(type, good.substr(0, n)), Refusal);
    Random random{31};
    for (int i = 0; i < 3000; i++) {
        std::string text = good;
        for (int n = 1 + random.below(4); n > 0; n--) {
            const size_t at = (size_t)random.below((int)text.size());
            if (random.below(2)) text.erase(at, 1 + (size_t)random.below(6));
            else text[at] = "\r\n-X\";= a"[random.below(9)];
        }
        try {
            for (auto& part : read_form(type, text)) CHECK((part.bytes.empty() || (part.bytes.data() >= text.data() && part.bytes.data() + part.bytes.size() <= text.data() + text.size())));
            whole++;
        } catch (const Refusal& r) { CHECK(r.status == 400); }
    }
    CHECK(whole > 500);
    std::string many;
    for (int i = 0; i < 17; i++) many += "--XX\r\n\r\n\r\n\r\n";
    CHECK_THROWS_AS(read_form(type, many + "\r\n--XX--"), Refusal);
}

// A client of /v1/files and /v1/batches, with a key or none.
struct Office {
    int port;
    std::string auth;
    HttpReply upload(const std::string& bytes, const std::string& purpose = "batch", const std::string& more = "") const {
        const std::string body = "--q\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n" + purpose + "\r\n--q\r\nContent-Disposition: form-data; name=\"file\"; filename=\"r.jsonl\"\r\n"
                                 "Content-Type: application/octet-stream\r\n\r\n" + bytes + "\r\n--q--\r\n";
        Http h(port);
        h.send("POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=q\r\n" + auth + more + format("Content-Length: %zu\r\n\r\n", body.size()) + body);
        return h.reply();
    }
    HttpReply call(const char* method, const std::string& path, const std::string& body = "") const { return Http(port).call(method, path, body, auth); }
    std::string id_of(const HttpReply& r) const {
        INFO(r.body);
        CHECK(r.status == 200);
        return Json(r.body)["id"].str();
    }
    std::string batch(const std::string& requests, const std::string& endpoint = CHAT) const { // its id
        const std::string file = id_of(upload(requests));
        return id_of(call("POST", "/v1/batches", "{\"input_file_id\": \"" + file + "\", \"endpoint\": \"" + endpoint + "\", \"completion_window\": \"24h\", \"metadata\": {\"a\": \"b\"}}"));
    }
    std::string wait(const std::string& id, const std::string& status) const { // the batch, once it is so far
        std::string body;
        for (const double start = seconds(); seconds() - start < 20; usleep(20'000)) {
            body = call("GET", "/v1/batches/" + id).body;
            if (Json(body)["status"].str() == status) return body;
        }
        FAIL(body);
        return "";
    }
    std::string content(const std::string& file) const {
        const HttpReply r = call("GET", "/v1/files/" + file + "/content");
        CHECK(r.status == 200);
        return r.body;
    }
};
static std::string batch_row(int i, const std::string& more, const char* url = CHAT) {
    return format("{\"custom_id\": \"r%d\", \"method\": \"POST\", \"url\": \"%s\", \"body\": ", i, url) + question(more) + "}\n";
}

// Goes on with a batch that no engine answers, until it has asked `notes` times whether to end.
static size_t refused_of(const std::string& requests, int notes, const Service& service) {
    Scratch scratch;
    write_file(scratch / "in", requests);
    Desk desk;
    desk.limit = 100;
    Batcher batcher(scratch / "in", scratch / "out", "{}");
    batcher.answer(service, desk, {1, 0, 50}, [&] { return notes-- <= 0; });
    CHECK(batcher.have == batcher.failed);
    return batcher.have;
}
TEST_CASE("forms: those that no answer keeps to give way to a new one") {
    Forms forms;
    auto get = [&](const char* regex) { return forms.get(t(), regex, [=] { return grammar_of_regex(regex); }); };
    const size_t others = Forms::ALL_BYTES - Automaton::grammar_bytes; // fill it up, but for what comes
    Automaton::grammar_bytes += others;
    auto first = get("a[0-9]");
    CHECK_THROWS_WITH_AS(get("b[0-9]"), "too many different forms are asked for", Refusal); // an answer keeps to it
    first.reset();
    CHECK(get("a[0-9]")); // (it had to be made anew)
    CHECK(get("b[0-9]"));
    Automaton::grammar_bytes -= others;
}

TEST_CASE("batches: what is refused, at once or later") {
    std::string wrong, texts;
    for (int i = 0; i < 300; i++) wrong += batch_row(i, "\"temperature\": 9"), texts += i ? ", \"a\"" : "\"a\"";
    CHECK(refused_of(wrong, 1000, service_of()) == 300);
    CHECK(refused_of(wrong, 5, service_of()) < 5); // it asks before each
    Service vectors = service_of();
    vectors.dimensions = 48;
    const std::string row = "{\"custom_id\": \"a\", \"url\": \"/v1/embeddings\", \"body\": {\"input\": [" + texts + "]}}\n";
    CHECK(refused_of(row, 3, vectors) == 0); // texts have no part in the queue of answers
    CHECK(refused_of(batch_row(0, "\"n\": 101"), 3, service_of()) == 1);
    const std::string form = batch_row(0, "\"guided_regex\": \"later[0-9]\"");
    Automaton::grammar_bytes += 1 << 30; // others have all forms that there may be
    CHECK(refused_of(form, 3, service_of()) == 0);
    Automaton::grammar_bytes -= 1 << 30;
}

TEST_CASE("HTTP: files and batches, from upload to answers") {
    Scratch scratch;
    write_file(scratch / "keys", "one first\n# a comment\ntwo\none second\n"); // (two owners of one folder)
    check_refusal(Process(Served::program(), {MODEL, "-z", VOCABULARY, "--port", "0", "--api-key-file", scratch / "keys"}).wait(), "serve", "line 4: this key is there already");
    write_file(scratch / "keys", "one\ntwo\n");
    const Served server({"--files", scratch / "files", "--api-key-file", scratch / "keys"});
    const Office one{server.port, "Authorization: Bearer one\r\n"}, two{server.port, "Authorization: Bearer two\r\n"}, none{server.port, ""};
    CHECK(none.upload("x").status == 401);
    CHECK(none.call("GET", "/v1/batches").status == 401);

    std::string requests;
    for (int i = 0; i < 12; i++) requests += batch_row(i, format("\"seed\": %d, \"max_tokens\": 9", i));
    requests += batch_row(12, "\"temperature\": 9") + batch_row(13, "\"stream\": true") + "{\"custom_id\": \"r14\", \"url\": \"/v1/completions\", \"body\": {\"prompt\": \"a\"}}\n";
    const std::string id = one.batch(requests), told = one.wait(id, "completed");
    const Json batch(told);
    CHECK(batch["request_counts"]["total"].number() == 15);
    CHECK(batch["request_counts"]["completed"].number() == 12);
    CHECK(batch["request_counts"]["failed"].number() == 3);
    CHECK(batch["metadata"]["a"].str() == "b");
    CHECK(batch["completed_at"].number() >= batch["created_at"].number());
    const Strings good = lines(one.content(batch["output_file_id"].str())), bad = lines(one.content(batch["error_file_id"].str()));
    REQUIRE(good.size() == 12);
    REQUIRE(bad.size() == 3);
    for (int i = 0; i < 12; i++) {
        const Json j(good[(size_t)i]);
        CHECK(j["custom_id"].str() == format("r%d", i));
        const HttpReply alone = one.call("POST", CHAT, question(format("\"seed\": %d, \"max_tokens\": 9", i)));
        CHECK(j["response"]["body"]["choices"][(size_t)0]["message"]["content"].str() == Json(alone.body)["choices"][(size_t)0]["message"]["content"].str());
    }
    CHECK(Json(bad[0])["response"]["body"]["error"]["param"].str() == "temperature");
    CHECK(Json(bad[2])["response"]["body"]["error"]["param"].str() == "url");
    // Another key's files are not visible.
    const std::string input = batch["input_file_id"].str();
    CHECK(one.content(input) == requests);
    for (const std::string& path : {"/v1/files/" + input, "/v1/files/" + input + "/content", "/v1/batches/" + id}) {
        CHECK(one.call("GET", path).status == 200);
        CHECK(two.call("GET", path).status == 404);
    }
    CHECK(two.call("DELETE", "/v1/files/" + input).status == 404);
    CHECK(two.call("POST", "/v1/batches", "{\"input_file_id\": \"" + input + "\", \"endpoint\": \"" + CHAT + "\", \"completion_window\": \"24h\"}").status == 400);
    CHECK(Json(two.call("GET", "/v1/files").body)["data"].size() == 0);
    CHECK(Json(one.call("GET", "/v1/files").body)["data"].size() == 3);
    const Json page(one.call("GET", "/v1/files?limit=2").body);
    CHECK(page["data"].size() == 2);
    CHECK(page["has_more"].is(sj::True));
    CHECK(Json(one.call("GET", "/v1/files?after=" + page["last_id"].str()).body)["data"].size() == 1);
    CHECK(Json(one.call("GET", "/v1/files?purpose=batch").body)["data"].size() == 1);
    for (const char* bad : {"limit=x", "limit=", "limit=0", "limit=5x", "limit=10001", "limit=-1", "after=x", "after=", "order=asc"})
        CHECK(one.call("GET", std::string("/v1/files?") + bad).status == 400);
    CHECK(Json(one.call("GET", "/v1/batches").body)["data"].size() == 1);
    // Other dialects.
    const std::string other = one.batch("{\"custom_id\": \"a\", \"url\": \"/v1/responses\", \"body\": {\"input\": \"a\", \"max_output_tokens\": 3}}\n", RESPONSES);
    const std::string out = one.content(Json(one.wait(other, "completed"))["output_file_id"].str());
    CHECK(Json(out.substr(0, out.size() - 1))["response"]["body"]["object"].str() == "response");
    // Input that is not a batch.
    for (auto& [text, why] : std::vector<std::pair<std::string, std::string>>{{"nonsense\n", "line 1"}, {"{}\n", "custom_id"}, {batch_row(1, "\"n\": 1") + batch_row(1, "\"n\": 1"), "taken"}, {"\n", "no request"}}) {
        const Json failed(one.wait(one.batch(text), "failed"));
        const std::string message = failed["errors"]["data"][(size_t)0]["message"].str();
        INFO(message);
        CHECK(message.find(why) != std::string::npos);
        CHECK(message.find(scratch.path.string()) == std::string::npos); // nothing of this machine
    }
    for (const char* body : {"{", "{}", "{\"input_file_id\": \"file-x\", \"endpoint\": \"/v1/chat/completions\", \"completion_window\": \"24h\"}"}) CHECK(one.call("POST", "/v1/batches", body).status == 400);
    auto refused = [&](const std::string& more) { return Json(one.call("POST", "/v1/batches", "{\"input_file_id\": \"" + input + "\", " + more + "}").body)["error"]["param"].str(); };
    CHECK(refused("\"endpoint\": \"/v1/moderations\", \"completion_window\": \"24h\"") == "endpoint");
    CHECK(refused("\"endpoint\": \"/v1/completions\", \"completion_window\": \"1h\"") == "completion_window");
    CHECK(refused("\"endpoint\": \"/v1/completions\", \"completion_window\": \"24h\", \"output_expires_after\": {}") == "output_expires_after");
    CHECK(refused("\"endpoint\": \"/v1/completions\", \"completion_window\": \"24h\", \"metadata\": {\"a\": 1}") == "metadata");
    CHECK(Json(one.upload("x", "fine-tune").body)["error"]["param"].str() == "purpose");
    CHECK(Json(one.upload("").body)["error"]["param"].str() == "file");
    CHECK(one.upload("x", "batch", "Origin: http://evil.example\r\n").status == 403);
    CHECK(one.call("POST", "/v1/files", "{}").status == 415);
    CHECK(one.call("DELETE", "/v1/batches/" + id).status == 405);
    CHECK(one.call("POST", "/v1/batches/" + id + "/cancel", "{}").status == 409);
    for (const char* path : {"/v1/files/..%2f..%2fkeys/content", "/v1/files/lock/content", "/v1/files//content", "/v1/filesystem", "/v1/batches/x/y"}) CHECK(one.call("GET", path).status == 404);
    CHECK(Json(one.call("DELETE", "/v1/files/" + input).body)["deleted"].is(sj::True));
    CHECK(one.call("GET", "/v1/files/" + input).status == 404);
}

TEST_CASE("HTTP: batches outlive the server, however it ends; one can be cancelled") {
    Scratch scratch;
    std::string requests, id, slow, file;
    for (int i = 0; i < 150; i++) requests += batch_row(i, format("\"seed\": %d, \"max_tokens\": 60, \"ignore_eos\": true", i));
    const Strings with = {"--files", scratch / "files", "--max-seqs", "4"};
    std::vector<size_t> have;
    for (int sig : {SIGTERM, SIGKILL, SIGTERM}) {
        Served server(with);
        const Office office{server.port, ""};
        if (id.empty()) {
            id = office.batch(requests), file = Json(office.call("GET", "/v1/batches/" + id).body)["input_file_id"].str();
            Process second(server.program(), {MODEL, "-z", VOCABULARY, "--port", "0", "--files", scratch / "files"});
            check_refusal(second.wait(), "serve", "another server");
        }
        for (const double start = seconds(); seconds() - start < 20; usleep(5000)) {
            const Json b(office.call("GET", "/v1/batches/" + id).body);
            if ((size_t)b["request_counts"]["completed"].number() > (have.empty() ? 0 : have.back() + 2)) break;
        }
        CHECK(office.call("DELETE", "/v1/files/" + file).status == 409);
        kill(server.pid, sig);
        int status;
        waitpid(server.pid, &status, 0);
        server.pid = 0;
        have.push_back(0);
        for (auto& entry : fs::directory_iterator(scratch / "files/open"))
            if (entry.path().extension() == ".partial")
                for (char c : read_file(entry.path().string())) have.back() += c == '\n';
        CHECK(have.back() > 1);
        have.back()--; // the first line
        if (have.size() > 1) CHECK(have.back() > have[have.size() - 2]); // it went on
    }
    CHECK(have.back() < 150);
    Served server(with);
    const Office office{server.port, ""};
    const Json batch(office.wait(id, "completed"));
    CHECK(batch["request_counts"]["completed"].number() == 150);
    const Strings all = lines(office.content(batch["output_file_id"].str()));
    REQUIRE(all.size() == 150);
    for (size_t i = 0; i < all.size(); i += 7) {
        const Json j(all[i]), alone(server.ask(question(format("\"seed\": %zu, \"max_tokens\": 60, \"ignore_eos\": true", i))));
        CHECK(j["custom_id"].str() == format("r%zu", i));
        CHECK(j["response"]["body"]["choices"][(size_t)0]["message"]["content"].str() == alone["choices"][(size_t)0]["message"]["content"].str());
    }
    const std::string cancelled = office.batch(requests);
    CHECK(Json(office.call("POST", "/v1/batches/" + cancelled + "/cancel", "{}").body)["status"].str() == "cancelling");
    const Json end(office.wait(cancelled, "cancelled"));
    CHECK(end["request_counts"]["completed"].number() < 150);
    CHECK(office.call("DELETE", "/v1/files/" + end["input_file_id"].str()).status == 200);
    for (auto& entry : fs::directory_iterator(scratch / "files/open")) CHECK(entry.path().extension() != ".partial");
    // Its own user's other requests come first.
    const std::string behind = office.batch(requests);
    const double start = seconds();
    server.ask(question("\"max_tokens\": 2"));
    CHECK(seconds() - start < 5);
    for (size_t done = 0; done < 3; usleep(5000)) {
        const Json now(office.call("GET", "/v1/batches/" + behind).body);
        REQUIRE(now["status"].str() != "completed"); // (it may still be validating)
        done = (size_t)now["request_counts"]["completed"].number();
    }
    auto end_server = [](Served& s) { kill(s.pid, SIGTERM), waitpid(s.pid, nullptr, 0), s.pid = 0; };
    end_server(server);
    const std::string open = scratch / "files/open/", partial = open + behind + ".partial";
    const std::string answers = read_file(partial);
    // Where the system fails nothing is lost. What a killed server left is removed.
    REQUIRE(unlink(partial.c_str()) == 0);
    REQUIRE(fs::create_directory(partial)); // (as for root nothing else is unreadable)
    for (const char* left : {"file-0", "file-0.json.tmp7", "batch_0.partial"}) write_file(open + left, "left");
    write_file(open + id + ".partial", "left");
    {
        Served failing(with);
        for (const double from = seconds(); failing.err.text().find("Is a directory") == std::string::npos; usleep(2000)) REQUIRE(seconds() - from < 20);
        CHECK(Json(Office{failing.port, ""}.call("GET", "/v1/batches/" + behind).body)["status"].str() == "in_progress");
        for (const char* left : {"file-0", "file-0.json.tmp7", "batch_0.partial"}) CHECK(!fs::exists(open + left));
        CHECK(!fs::exists(open + id + ".partial"));
        CHECK((fs::status(scratch / "files").permissions() & fs::perms::all) == fs::perms::owner_all);
        end_server(failing);
    }
    fs::remove(partial);
    write_file(partial, answers + "{\"half");
    // Another model does not go on with it: what is there is its output.
    Strings other = with;
    other.insert(other.end(), {"--name", "other"});
    const Served renamed(other);
    const Office again{renamed.port, ""};
    const Json failed(again.wait(behind, "failed"));
    CHECK(failed["errors"]["data"][(size_t)0]["message"].str().find("another model") != std::string::npos);
    CHECK(failed["request_counts"]["completed"].number() == (double)lines(answers).size() - 1);
    std::string kept; // without the checksum before each
    for (auto& line : lines(answers.substr(answers.find('\n') + 1))) kept += line.substr(17) + "\n";
    CHECK(again.content(failed["output_file_id"].str()) == kept);
}

TEST_CASE("HTTP: a batch whose files cannot be written is still under way, and ends once they can") {
    Scratch scratch;
    const Served server({"--files", scratch / "files", "--max-seqs", "2"});
    const Office office{server.port, ""};
    std::string requests;
    for (int i = 0; i < 20; i++) requests += batch_row(i, "\"max_tokens\": 60, \"ignore_eos\": true");
    const std::string spare = office.id_of(office.upload("x")), id = office.batch(requests);
    const std::string output = scratch / "files/open/file-" + id.substr(6) + "-output";
    REQUIRE(fs::create_directory(output)); // (as root a full disk is hard to have)
    const Json batch(office.wait(id, "finalizing"));
    for (const double start = seconds(); server.err.text().find("is a directory") == std::string::npos; usleep(2000)) REQUIRE(seconds() - start < 20);
    CHECK(office.call("POST", "/v1/batches/" + id + "/cancel", "{}").status == 409);
    CHECK(office.call("DELETE", "/v1/files/" + batch["input_file_id"].str()).status == 409);
    CHECK(Json(office.call("GET", "/v1/batches/" + id).body)["status"].str() == "finalizing");
    fs::remove(output);
    CHECK(office.call("DELETE", "/v1/files/" + spare).status == 200); // there is room: it goes on
    const Json done(office.wait(id, "completed"));
    CHECK(lines(office.content(done["output_file_id"].str())).size() == 20);
    CHECK(office.call("DELETE", "/v1/files/" + done["input_file_id"].str()).status == 200);
}

TEST_CASE("HTTP: a batch of texts has the vectors that its rows have alone") {
    Scratch scratch;
    struct Vectors : Process { // of a model that embeds
        int port = 0;
        explicit Vectors(const std::string& files) : Process(Served::program(), {"tests/fixtures/embed", "-j", "1", "--port", "0", "--max-seqs", "2", "--max-queue", "8", "--files", files}) {
            for (const double start = seconds(); port == 0; usleep(2000)) {
                const std::string said = err.text(), before = "listening on http://127.0.0.1:";
                REQUIRE(seconds() - start < 30);
                if (const size_t at = said.find(before); at != said.npos && said.back() == '\n') port = atoi(said.c_str() + at + before.size());
            }
        }
        ~Vectors() { kill_running(); }
    } server(scratch / "files");
    const Office office{server.port, ""};
    std::string texts = "\"a warp\"", requests;
    for (int i = 0; i < 399; i++) texts += format(", \"text %d\"", i);
    const Strings bodies = {"{\"input\": \"What is a warp?\"}", "{\"input\": [" + texts + "]}", "{\"input\": \"a\", \"dimensions\": 7}", "{}"};
    for (size_t i = 0; i < bodies.size(); i++) requests += format("{\"custom_id\": \"v%zu\", \"url\": \"%s\", \"body\": ", i, EMBEDDINGS) + bodies[i] + "}\n";
    const Json batch(office.wait(office.batch(requests, EMBEDDINGS), "completed"));
    CHECK(batch["request_counts"]["failed"].number() == 1);
    const Strings good = lines(office.content(batch["output_file_id"].str()));
    REQUIRE(good.size() == 3);
    for (size_t i = 0; i < good.size(); i++) {
        const Json row(good[i]), alone(office.call("POST", EMBEDDINGS, bodies[i]).body);
        const sj::Value data = row["response"]["body"]["data"];
        CHECK(data.size() == (i == 1 ? 400u : 1u));
        CHECK(data[(size_t)0]["embedding"].size() == (i == 2 ? 7u : 48u));
        CHECK(data.raw() == alone["data"].raw());
    }
}

TEST_CASE("HTTP: the OpenAPI document names routes that are there, with the methods that they take") {
    Scratch scratch;
    const Served server({"--files", scratch / "files", "--allow-adapter-loading"});
    const std::string told = Http(server.port).call("GET", "/openapi.json").body;
    const Json document(told);
    size_t routes = 0;
    for (auto [name, item] : document["paths"].members()) {
        std::string path = name;
        if (const size_t at = path.find("{id}"); at != path.npos) path.replace(at, 4, "x");
        for (const char* method : {"GET", "POST", "DELETE", "PUT"}) {
            INFO(method << " " << path);
            Http h(server.port);
            h.send(format("%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", method, path.c_str())); // no Content-Type
            const HttpReply r = h.reply();
            std::string lower = method;
            for (char& c : lower) c = (char)tolower(c);
            const bool there = (bool)item[lower];
            CHECK((r.status == 405) == !there);
            if (r.status == 405) CHECK(!r.headers.at("allow").empty());
            else if (there && lower == "post") CHECK(r.status == 415);
            else if (there) CHECK((r.status == 200 || (r.status == 404 && path != name)));
            routes += there;
        }
    }
    CHECK(routes == 34);
    for (const char* named : {"\"/v1/embeddings\"]", "\"X-Api-Key\"", "\"use_documents\""}) CHECK(told.find(named) != std::string::npos);
    size_t refs = 0; // each leads somewhere
    std::function<void(sj::Value)> check = [&](sj::Value v) {
        for (sj::Value item : v.items()) check(item);
        for (auto [name, value] : v.members()) {
            check(value);
            if (name != "$ref") continue;
            const std::string ref = value.str();
            sj::Value at = document.root();
            for (size_t begin = 2, end; begin < ref.size(); begin = end + 1) {
                end = std::min(ref.find('/', begin), ref.size());
                at = at[ref.substr(begin, end - begin)];
            }
            CHECK_MESSAGE(at.is(sj::Object), ref);
            refs++;
        }
    };
    check(document.root());
    CHECK(refs > 50);
}
