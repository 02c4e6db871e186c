// train_lora --watch, --ask and report.html: the page's bytes and events by a client of our own, clients that hang, a run with
// and without them (TRAIN_LORA, DATAGEN) on the random model in fixtures/tiny. (tests/reference/check_training.py has a browser.)
#include <doctest/doctest.h>
#include "tests/http.h"
#include "tests/trainer.h"
#include "base/html.h"
#include "train/report.h"
#include "train/watch.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";
static const std::string HOSTILE = "</h3></main><script>window.hit = 1</script> & \"'<img src=x onerror=hit()>";

static Process start(const Strings& arguments) {
    return Process(program("TRAIN_LORA", "./train_lora"), arguments + Strings{"-z", VOCABULARY, "-j", "1", "-d", "cpu"}, "",
                   [] { setenv("OMP_WAIT_POLICY", "passive", 1); });
}
static Result trained(const Strings& arguments) {
    const Result r = start(arguments).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r;
}
// The port in the first line of a run; 0: it has ended.
static int port_of(const Process& p) {
    for (int ms = 0; ms < 60000; ms++) {
        int port = 0;
        if (sscanf(p.err.text().c_str(), "the run is shown at http://127.0.0.1:%d/\n", &port) == 1) return port;
        siginfo_t ended = {};
        REQUIRE(waitid(P_PID, (id_t)p.pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0);
        if (ended.si_pid) return 0;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
}
static void pack(const std::string& rows, const std::string& to) {
    const Result r = Process(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, rows, to, "--info", "none"}).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
}
static std::string state_of(const std::string& out, const char* result) { // what was trained, and the numbers to resume from
    std::string all = read_file(out + "/" + result);
    const MappedFile map(out + "/state.safetensors");
    Tensors tensors;
    Metadata metadata;
    read_safetensors(map, tensors, metadata);
    for (auto& [name, t] : tensors) all.append((const char*)t.data, t.bytes);
    return all;
}
static std::vector<double> losses_of(const std::string& out) {
    std::vector<double> all = logged(out, "loss"), more = logged(out, "eval_loss");
    all.insert(all.end(), more.begin(), more.end());
    return all;
}
static size_t count(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += what.size()) n++;
    return n;
}

namespace {
struct Rows { // 32 to train on and 8 to evaluate
    Scratch folder;
    std::string first = folder / "first.bin", last = folder / "last.bin";
    Strings questions;
    Rows() {
        const Strings all = lines(read_file("tests/fixtures/train/rows.jsonl"));
        std::string text[2];
        for (size_t i = 0; i < all.size(); i++) {
            text[i >= 32] += all[i] + "\n";
            if (i >= 32) questions.push_back(Json(all[i])["instruction"].str());
        }
        for (auto [name, rows] : {std::pair("first", text[0]), {"last", text[1]}}) {
            write_file(folder / (std::string(name) + ".jsonl"), rows);
            pack(folder / (std::string(name) + ".jsonl"), folder / (std::string(name) + ".bin"));
        }
    }
};
} // namespace
static const Rows& rows() {
    static const Rows once;
    return once;
}

// ---- The page and its events

TEST_CASE("watch: the page is one file under a policy; other paths, methods and names of this machine are refused") {
    if (!can_watch) return;
    Watch watch(0);
    HttpReply r = Http(watch.port()).call("GET", "/");
    CHECK(r.status == 200);
    CHECK(r.headers["content-type"] == "text/html; charset=utf-8");
    CHECK(r.headers["cache-control"] == "no-store");
    CHECK(r.headers["x-content-type-options"] == "nosniff");
    const std::string policy = r.headers["content-security-policy"], mark = "script-src 'nonce-";
    REQUIRE(policy.find(mark) != policy.npos);
    const std::string nonce = policy.substr(policy.find(mark) + mark.size(), 32);
    for (const char* part : {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"})
        CHECK(policy.find(part) != policy.npos);
    CHECK(policy.find("unsafe") == policy.npos);
    CHECK(count(r.body, "nonce=\"" + nonce + "\"") == 2);
    CHECK(r.body.find("{{") == r.body.npos);
    CHECK(count(r.body, "http://www.w3.org/") + count(r.body, "data:image") == 3); // names, and nothing from the network
    CHECK(count(r.body, "http") == 2);
    for (const char* way : {"innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("}) CHECK(r.body.find(way) == r.body.npos);
    CHECK(r.body.size() < 30000);
    CHECK(Watch(0).port() != watch.port());

    CHECK(Http(watch.port()).call("GET", "/trainer_log.jsonl").status == 404);
    CHECK(Http(watch.port()).call("GET", "/../etc/passwd").status == 404);
    r = Http(watch.port()).call("POST", "/", "{}");
    CHECK(r.status == 405);
    CHECK(r.headers["allow"] == "GET, HEAD");
    const auto asked_as = [&](const std::string& host) {
        Http http(watch.port());
        http.send("GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n");
        return http.reply().status;
    };
    CHECK(asked_as("127.0.0.1:1234") == 200);
    CHECK(asked_as("evil.example") == 403);
    CHECK(asked_as("localhost.evil.example:80") == 403);
}

TEST_CASE("watch: every client gets every event in order, whenever it comes; the destructor ends the streams") {
    if (!can_watch) return;
    auto watch = std::make_unique<Watch>(0);
    const int port = watch->port();
    watch->add("{\"about\": 1}");
    Http early(port);
    early.ask("GET", "/events");
    HttpReply head = early.head();
    CHECK(head.headers["content-type"] == "text/event-stream; charset=utf-8");
    std::string got;
    while (events_of(got).size() < 1) REQUIRE(early.chunk(got));
    Strings all = {"{\"about\": 1}"};
    for (int i = 0; i < 500; i++) all.push_back(format("{\"loss\": %d}", i)), watch->add(all.back());
    while (events_of(got).size() < 501) REQUIRE(early.chunk(got));
    CHECK(events_of(got) == all);
    Http late(port);
    late.ask("GET", "/events");
    late.head();
    watch->end("a \"text\"", false);
    watch.reset();
    all.push_back("{\"end\": \"a \\\"text\\\"\", \"failed\": false}");
    for (Http* http : {&early, &late}) {
        std::string& text = http == &early ? got : (got = "");
        while (http->chunk(text)) {}
        CHECK(events_of(text) == all);
    }
    CHECK_THROWS_AS(Http again(port), Error);
    watch = std::make_unique<Watch>(0); // of a run that ends by an exception
    Http http(watch->port());
    http.ask("GET", "/events");
    http.head();
    watch.reset();
    for (got = ""; http.chunk(got);) {}
    REQUIRE(events_of(got).size() == 1);
    CHECK(Json(events_of(got)[0])["failed"].boolean());
}

TEST_CASE("watch: clients that hang, that are many, that ask nonsense: adding never waits, others are served, the end is soon") {
    if (!can_watch) return;
    auto watch = std::make_unique<Watch>(0);
    const int port = watch->port();
    Http silent(port), half(port), deaf(port), gone(port);
    half.send("GET /events HT");
    for (Http* http : {&deaf, &gone}) http->ask("GET", "/events"); // and nothing is read
    gone.head();
    gone.close();
    const std::string line = "{\"text\": \"" + std::string(1 << 16, 'x') + "\"}";
    const double begun = seconds();
    for (int i = 0; i < 500; i++) watch->add(line); // 33 MB, more than sockets hold
    CHECK(seconds() - begun < 10);
    Http reads(port);
    reads.ask("GET", "/events");
    reads.head();
    std::string got;
    while (got.size() < 500 * (line.size() + 8)) REQUIRE(reads.chunk(got)); // "data: " and two line ends
    CHECK(events_of(got).size() == 500);
    std::vector<std::unique_ptr<Http>> many; // more than there may be
    for (int i = 0; i < 100; i++) {
        many.push_back(std::make_unique<Http>(port));
        try {
            many.back()->send(i % 2 ? "nonsense\r\n\r\n" : "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n");
        } catch (const Error&) {} // (closed at once)
    }
    const double added = seconds();
    for (int i = 0; i < 100; i++) watch->add(line);
    CHECK(seconds() - added < 10);
    many.resize(20);
    const double ended = seconds();
    watch.reset();
    CHECK(seconds() - ended < 10);
}

TEST_CASE("watch: a port in use, and other bad options: one line before training, and nothing is written") {
    Scratch out;
    const Strings good = {TINY, rows().first, "-o", out / "run", "--steps", "1"};
    const auto refused = [&](const Strings& more, const std::string& word) {
        check_refusal(start(good + more).wait(), "train_lora", word);
        CHECK(!fs::exists(out / "run"));
    };
    if (can_watch) {
        const Watch other(0);
        refused({"--watch", format("%d", other.port())}, format("--watch %d: Address already in use", other.port()));
    } else refused({"--watch", "0"}, "--watch: this program was built without libmicrohttpd");
    refused({"--watch", "65536"}, "--watch: 65536 is not a whole number");
    refused({"--watch", "-1"}, "--watch: -1 is not a whole number");
    refused({"--ask", "  "}, "--ask: a question without words");
    std::string text = "one";
    for (int i = 0; i < 600; i++) text += " more";
    refused({"--ask", text}, "more than 512 tokens (--max-len)");
    const Strings merge = {TINY, "--adapter-init", "tests/fixtures/train/adapter", "--merge", out / "m"};
    for (const Strings& more : {Strings{"--watch", "0"}, {"--ask", "x"}}) check_refusal(start(merge + more).wait(), "train_lora", more[0] + " is for training");
}

// ---- A run

TEST_CASE("questions: the first of the evaluation rows with their references; --ask has the same tokens as a row") {
    Scratch out;
    TrainOptions o;
    o.model = TINY, o.tokenizer = VOCABULARY;
    const ModelFile file(TINY);
    CHECK(Questions(o, file.config, nullptr).list.empty());
    const Dataset eval(rows().last);
    const Questions found(o, file.config, &eval);
    REQUIRE(found.list.size() == 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK(found.list[i].text == rows().questions[i]);
        CHECK(found.list[i].prompt == prompt_of(eval.row(i)));
        CHECK(!found.list[i].reference.empty());
    }
    o.questions = {rows().questions[1], rows().questions[1], HOSTILE};
    const Questions asked(o, file.config, &eval);
    REQUIRE(asked.list.size() == 2); // each once
    CHECK(asked.list[0].prompt == found.list[1].prompt);
    CHECK(asked.list[0].reference == "");
    CHECK(asked.list[1].text == HOSTILE);
    CHECK(asked.tokens + (int)std::max(asked.list[0].prompt.size(), asked.list[1].prompt.size()) == asked.positions);

    o.questions.clear();
    write_file(out / "mixed.jsonl", "{\"text\": \"no question\"}\n"); // plain text; then a conversation, of which the last question is asked
    write_file(out / "talk.jsonl", "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"first\"}, {\"role\": \"assistant\", \"content\": \"a\"}, "
                                   "{\"role\": \"user\", \"content\": \"second\\nuser\\n\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n");
    for (const char* name : {"mixed", "talk"}) pack(out / (std::string(name) + ".jsonl"), out / (std::string(name) + ".bin"));
    const Dataset text(out / "mixed.bin"), talk(out / "talk.bin");
    CHECK(Questions(o, file.config, &text).list.empty());
    const Questions turns(o, file.config, &talk);
    REQUIRE(turns.list.size() == 2);
    CHECK(turns.list[0].text == "first");
    CHECK(turns.list[0].reference == "a");
    CHECK(turns.list[1].text == "second\nuser\n");
    CHECK(turns.list[1].reference == "b");
}

TEST_CASE("watch: the events of a run are its log, its answers, its speed and its end, also for a page that comes late") {
    if (!can_watch) return;
    Scratch out;
    Process p = start({TINY, rows().first, "-o", out / "run", "--eval", rows().last, "--steps", "12", "--eval-every", "4", "--batch", "4", "--rank", "2", "--watch", "0"});
    const int port = port_of(p);
    REQUIRE(port);
    Http http(port), deaf(port);
    deaf.ask("GET", "/events");
    const HttpReply r = http.call("GET", "/events"); // to the run's end
    const Result ended = p.wait();
    INFO(ended.err);
    CHECK(ended.status == 0);
    CHECK_THROWS_AS(Http again(port), Error);
    Strings kinds, logs, answers;
    for (auto& event : events_of(r.body)) {
        const Json j(event);
        if (j["question"]) answers.push_back(event);
        else if (j["rate"]) {
            kinds.push_back("rate");
            CHECK(j["share"].number() == doctest::Approx(j["rate"].number() / j["ceiling"].number()));
            CHECK((j["share"].number() > 0 && j["share"].number() < 1));
        } else if (j["about"]) {
            kinds.push_back("about");
            CHECK(j["about"].str() == TINY + ", trained on " + rows().first);
            CHECK(j["what"].str() == "loss");
            CHECK(j["total_steps"].number() == 12);
            CHECK(j["command"].str().find("train_lora " + TINY) == 0);
            CHECK(ended.err.find("\n" + j["facts"][0].str() + "\n") != std::string::npos);
        } else if (j["end"]) {
            kinds.push_back("end");
            CHECK(j["end"].str().find("Done: 32 rows, 12 steps in 0:0") == 0);
            CHECK(j["end"].str().find("/report.html") != std::string::npos);
            CHECK(!j["failed"].boolean(true));
        } else logs.push_back(event);
    }
    CHECK(logs == lines(read_file(out / "run/trainer_log.jsonl")));
    CHECK(answers == lines(read_file(out / "run/trainer_answers.jsonl")));
    CHECK(answers.size() == 3 * 4); // before, and at each evaluation
    CHECK(kinds.front() == "about");
    CHECK(kinds.back() == "end");
    CHECK(std::count(kinds.begin(), kinds.end(), "rate") >= 2);
    for (size_t i = 0; i < answers.size(); i++) {
        const Json j(answers[i]);
        CHECK(j["current_steps"].number() == 4 * (i / 3));
        CHECK(j["question"].str() == rows().questions[i % 3]);
        CHECK(j["reference"].is(sj::String));
        CHECK((j["finish"].str() == "stop" || j["finish"].str() == "length"));
    }
}

TEST_CASE("questions and --watch change no bit of what is trained, whatever is trained") {
    Scratch out;
    pack("tests/fixtures/dpo/pairs.jsonl", out / "pairs.bin");
    std::string labelled;
    for (auto& line : lines(read_file(rows().folder / "first.jsonl")))
        labelled += line.substr(0, line.rfind('}')) + format(", \"kto_tag\": %s}\n", count(labelled, "\n") % 2 ? "true" : "false");
    write_file(out / "kto.jsonl", labelled);
    pack(out / "kto.jsonl", out / "kto.bin");
    struct Case { const char* name; std::string data; Strings how; const char* result; };
    const char *adapter = "adapter_model.safetensors", *model = "model.bin";
    const Case cases[] = {{"lora", rows().first, {"--rank", "4", "--batch", "4", "--neftune-alpha", "5"}, adapter},
                          {"recomputed", rows().first, {"--rank", "4", "--recompute", "--batch", "1", "--accum", "4"}, adapter},
                          {"full", rows().first, {"--full", "--batch", "4"}, model},
                          {"dpo", out / "pairs.bin", {"--rank", "4", "--batch", "4", "--dpo"}, adapter},
                          {"kto", out / "kto.bin", {"--rank", "4", "--batch", "4", "--kto"}, adapter},
                          {"grpo", rows().first, {"--rank", "4", "--batch", "4", "--grpo", "--reward", "length:4", "-n", "8", "--group", "2", "--iterations", "2"}, adapter},
                          {"teacher", rows().first, {"--rank", "4", "--recompute", "--batch", "1", "--teacher", TINY, "--distil-weight", "0.5"}, adapter}, // answers take more memory
                          {"ranks", rows().first, {"--rank", "4", "--batch", "4", "--gpus", "2"}, adapter}};
    for (const Case& c : cases) {
        INFO(c.name);
        const std::string plain = out / (std::string(c.name) + ".plain"), asked = out / (std::string(c.name) + ".asked");
        const Strings how = Strings{TINY, c.data, "--steps", "6", "--lr", "1e-2"} + c.how;
        trained(how + Strings{"-o", plain});
        Strings with = {"-o", asked, "--ask", "What is a warp?", "--ask", "And a block of threads?"};
        for (int i = 0; i < 10 && c.name == std::string("teacher"); i++) with = with + Strings{"--ask", format("And %d blocks?", i)};
        if (can_watch) with = with + Strings{"--watch", "0"};
        trained(how + with);
        CHECK(state_of(plain, c.result) == state_of(asked, c.result));
        CHECK(losses_of(plain) == losses_of(asked));
        CHECK(!fs::exists(plain + "/trainer_answers.jsonl"));
        CHECK(lines(read_file(asked + "/trainer_answers.jsonl")).size() >= 4);
    }
}

TEST_CASE("report.html: whole in one file, of any run; a resumed one goes on with the curve and the answers; text stays text") {
    Scratch out;
    const std::string run = out / "run";
    const Strings how = {TINY, rows().first, "-o", run, "--eval", rows().last, "--steps", "40", "--eval-every", "10", "--batch", "4", "--rank", "2", "--ask", "What is a warp?",
                         "--ask", HOSTILE};
    Process p = start(how);
    while (logged(run, "loss", true).size() < 14) {
        siginfo_t ended = {};
        REQUIRE(waitid(P_PID, (id_t)p.pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0);
        REQUIRE(ended.si_pid == 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill(p.pid, SIGINT);
    CHECK(p.wait().status == 130);
    const size_t done = logged(run, "loss").size();
    REQUIRE(done < 40);
    std::string report = read_file(run + "/report.html");
    CHECK(report.find(format("<p>32 rows, %zu of 40 steps in 0:0", done)) != report.npos);
    Strings events;
    if (can_watch) {
        Process resumed = start(how + Strings{"--resume", "--watch", "0"});
        const int port = port_of(resumed);
        REQUIRE(port);
        events = events_of(Http(port).call("GET", "/events").body);
        CHECK(resumed.wait().status == 0);
    } else trained(how + Strings{"--resume"});
    report = read_file(run + "/report.html");
    INFO(report);
    CHECK(logged(run, "loss").size() == 40);
    const Strings answers = lines(read_file(run + "/trainer_answers.jsonl"));
    CHECK(answers.size() == 2 * 5);
    size_t told = 0; // the curve goes on: old lines, too
    for (auto& event : events) told += Json(event)["lr"] ? 1 : 0;
    CHECK(told == (can_watch ? 40 : 0));

    CHECK(report.find("<!doctype html>") == 0);
    CHECK(report.find(read_file(run + "/loss.svg")) != report.npos);
    CHECK(count(report, "train_lora " + TINY + " ") == 1);
    CHECK(count(report, "--resume") + count(report, "--watch") == 0);
    CHECK(report.find("<p>32 rows, 40 steps in 0:0") != report.npos);
    CHECK(report.find("; training loss ") != report.npos);
    CHECK(report.find("; evaluation loss ") != report.npos);
    CHECK(report.find("LoRA rank 2, alpha 4, dropout 0.1: ") != report.npos);
    CHECK(count(report, "<h3>What is a warp?</h3>") == 1);
    CHECK(count(report, "<dt>before</dt>") == 2);
    for (int step : {10, 20, 30, 40}) CHECK(count(report, format("<dt>after %d</dt>", step)) == 2);
    CHECK(count(report, "<summary>3 more</summary>") == 2);
    CHECK(count(report, "<h3>&#60;/h3>") == 0);
    CHECK(count(report, "<h3>" + escape_html(HOSTILE) + "</h3>") == 1);
    for (const char* part : {"<script", "<img", "<link", "url(", "@import", "{{"}) CHECK(count(report, part) == 0);
    CHECK(count(report, "</main>") == 1);
    CHECK(report.find("content=\"default-src 'none'; style-src 'unsafe-inline'\"") != report.npos);

    // Without questions; a run that replaces another leaves nothing of it.
    trained({TINY, rows().first, "-o", run, "--steps", "2", "--batch", "4", "--rank", "2", "--overwrite"});
    report = read_file(run + "/report.html");
    CHECK(report.find("<h2>Answers</h2>") == report.npos);
    CHECK(report.find("<p>32 rows, 2 steps in 0:0") != report.npos);
    CHECK(!fs::exists(run + "/trainer_answers.jsonl"));
}
