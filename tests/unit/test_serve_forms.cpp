// serve.cu: answers that keep a form, and calls of tools: the engine by itself, then the program (SERVE, else ./serve).
#include "../engine.h"
#include "../http.h"
#include "../process.h"

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
        preempted += bench.desk.figures.preempted;
    }
    CHECK(preempted > 2);
    CHECK(complete > 6);
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
    // What only a strict or forced call would need is no fault of others.
    CHECK(refused_for(R"("tools": [{"type": "function", "function": {"name": "a", "parameters": {"patternProperties": {}}}}])") == "-");
    CHECK(refused_for(TOOLS, false) == "tools");
    const Ask ask = read_ask(service_of(), question(TOOLS), true, 1);
    CHECK(t().decode(ask.jobs[0].prompt, false).find("\"name\": \"weather\"") != std::string::npos);
}

// ------------------------------------------------------------------------------------------------------- from outside

struct Served : Process {
    int port = 0;
    Served() : Process(getenv("SERVE") ? getenv("SERVE") : "./serve", {MODEL, "-z", VOCABULARY, "-j", "1", "--port", "0", "--name", "tiny"}) {
        for (const double start = seconds(); port == 0; usleep(2000)) {
            const std::string said = err.text(), before = "listening on http://127.0.0.1:";
            REQUIRE(seconds() - start < 30);
            const size_t at = said.find(before);
            if (at != std::string::npos && said.back() == '\n') port = atoi(said.c_str() + at + before.size());
        }
    }
    ~Served() { kill(pid, SIGKILL), waitpid(pid, nullptr, 0); }
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
    // What was called comes back as a message.
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
    // One whose automaton is exponential, and a free answer beside it.
    const std::string odd = question("\"structured_outputs\": {\"regex\": \"[ab]*a[ab]{300}c\"}, \"max_tokens\": 40, \"temperature\": 1.5");
    for (int i = 0; i < 3; i++) server.ask(odd);
    CHECK(server.ask(question("\"max_tokens\": 5")) != "");
}
