// datagen grade: questions out of files, the table, and the command (DATAGEN, else ./datagen) against a server in a
// thread that keeps the judge's contract in both modes, or breaks it.
#include "book/datagen/grade_rows.h"
#include "book/datagen/grade_table.h"
#include "book/datagen/score.h"
#include "model/tokenizer.h"
#include "sj.h"
#include "tests/http.h"
#include "tests/process.h"
#include <atomic>
#include <mutex>
#include <poll.h>
#include <thread>

using namespace book;

static const char* PROGRAM = getenv("DATAGEN") ? getenv("DATAGEN") : "./datagen";

static Result grade(Strings arguments, std::string_view input = "") {
    arguments.insert(arguments.begin(), "grade");
    return Process(PROGRAM, arguments, input, [] { setenv("no_proxy", "*", 1); }).wait(); // the server is here
}
static void check_refused(const Strings& arguments, const std::string& word, std::string_view input = "") {
    check_refusal(grade(arguments, input), "datagen", word);
}
static bool holds(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

// ------------------------------------------------------------------------------------------------------- questions

static std::vector<GradeQuestion> read(const std::string& path) {
    Arguments a;
    a.files = {path};
    return read_questions(a);
}
static std::string fault_of(const std::string& path) {
    try {
        read(path);
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}
// As one text: "question > reference; ..."
static std::string shown(const std::vector<GradeQuestion>& all) {
    std::string text;
    for (auto& q : all) text += (text.empty() ? "" : "; ") + q.question + " > " + q.reference;
    return text;
}

TEST_CASE("grade: questions of rows: Alpaca, messages, question and answer; JSONL and an array") {
    Scratch scratch;
    const std::string rows[] = {
        R"({"instruction": "问一", "input": "题", "output": "答一"})",
        R"({"messages": [{"role": "user", "content": "问二"}, {"role": "assistant", "content": "答二"}]})",
        R"({"question": " 问三\n", "answer": "答三 "})"};
    const std::string wanted = "问一\n题 > 答一; 问二 > 答二; 问三 > 答三";
    const std::string path = scratch / "q";
    write_file(path, rows[0] + "\n\n" + rows[1] + "\n" + rows[2] + "\n");
    CHECK(shown(read(path)) == wanted);
    write_file(path, "\xEF\xBB\xBF\n [" + rows[0] + ",\n" + rows[1] + ", " + rows[2] + "]");
    CHECK(shown(read(path)) == wanted);

    const std::pair<const char*, const char*> faults[] = {
        {"[]", "no question in it"}, {"{\"question\": \"q\"}", "line 1: instruction: missing"},
        {"{\"question\": \"q\", \"answer\": \" \"}", "question 1: its answer is empty"},
        {"{\"question\": \"\", \"answer\": \"a\"}", "question 1: it is empty"}, {"{\"question\": }", "line 1: byte "},
        // answers of `qwen3 --eval`: no question's reference
        {R"({"question": "q", "reference": "r", "answer": "a"})", "instruction: missing"}};
    for (auto& c : faults) {
        write_file(path, c.first);
        CAPTURE(c.first);
        const std::string fault = fault_of(path);
        CAPTURE(fault);
        CHECK(fault.compare(0, path.size() + 2, path + ": ") == 0);
        CHECK(holds(fault, c.second));
    }
}

TEST_CASE("grade: questions of lines that begin with 问题： and 答案：") {
    Scratch scratch;
    const std::string path = scratch / "q.txt";
    write_file(path, "\xEF\xBB\xBF测试题\r\n\r\n问题：什么是线程束？\r\n答案：32 个线程。\r\n\r\n它们一起执行。\r\n\r\n"
                     "  问题: 两行的\n问题？\n答案:在\n 芯片上。 \n\n问题：三\n答案：答案：3 {\n");
    CHECK(shown(read(path)) == "什么是线程束？ > 32 个线程。\n\n它们一起执行。; 两行的\n问题？ > 在\n 芯片上。; 三 > 答案：3 {");
    const std::pair<const char*, const char*> faults[] = {
        {"问题：一\n问题：二\n答案：x\n", "line 2: a question, and the one before it has no answer"},
        {"答案：x\n", "line 1: an answer without a question"},
        {"问题：一\n答案：x\n答案：y\n", "line 3: an answer without a question"},
        {"问题：一\n", "the last question has no answer"}, {"问题：\n答案：x\n", "question 1: it is empty"},
        {"问题：一\n答案： \n", "question 1: its answer is empty"}, {"题目：一\n", "no question in it"},
        {"问题：\xFF\n答案：x\n", "no UTF-8 at byte 9"}};
    for (auto& c : faults) {
        write_file(path, c.first);
        CAPTURE(c.first);
        const std::string fault = fault_of(path);
        CAPTURE(fault);
        CHECK(holds(fault, c.second));
    }
}

TEST_CASE("grade: questions of a DOCX, by pandoc and without marks of Markdown") {
    Scratch scratch;
    const std::string docx = scratch / "q.docx", bin = scratch / "bin";
    fs::create_directory(bin);
    write_file(docx, "PK");
    write_file(bin + "/pandoc", "#!/bin/sh\ncase $1 in --help) exit;; esac\necho \"问题：$1 $2\"\necho\necho '答案：a_b *x*'\n");
    fs::permissions(bin + "/pandoc", fs::perms::owner_all);
    const std::string path = getenv("PATH");
    setenv("PATH", (bin + ":" + path).c_str(), 1);
    const std::string questions = shown(read(docx));
    setenv("PATH", scratch.path.c_str(), 1);
    const std::string fault = fault_of(docx);
    setenv("PATH", path.c_str(), 1);
    CHECK(questions == "-t plain > a_b *x*");
    CHECK(holds(fault, "pandoc -t plain " + docx + " -o " + scratch.path.string() + "/q.txt"));
}

// ------------------------------------------------------------------------------------------------------- the table

TEST_CASE("grade: the table counts tokens, ROUGE-L and rouge_score as they are defined; one without an answer has 0") {
    const Jieba jieba("data/datagen/jieba.bin");
    const Tokenizer tokenizer("tokenizer.bin");
    const std::vector<GradeQuestion> questions = {
        {"问一", "共享内存很快，有 228 KB"}, {"问二", "寄存器最快\n\n真的"}, {"问三", "第三个答案"}, {"问四", "没有回答"}};
    Grade g;
    g.health_limit = 420, g.predict_limit = 360, g.least = 0.35, g.health_seconds = 1.5, g.status = "ok";
    GradeRound round;
    round.seconds = 2, round.answers = {"共享内存很快，有 228 KB", "寄存器最快\n\n对", "完全不同 228"};
    g.rounds = {round};
    auto text = [&](const std::string& s) { return ScoredText(jieba, s); };
    double l = 0, score = 0;
    size_t answers = 0, all = 0;
    for (size_t i = 0; i < 3; i++) {
        const ScoredText a = text(round.answers[i]), r = text(questions[i].reference);
        l += rouge(a.words[1], r.words[1])[2] / 4, score += rouge_score(a.ascii, r.ascii) / 4;
        answers += tokenizer.encode(round.answers[i], false).size();
        all += tokenizer.encode(questions[i].question, false).size();
    }
    all += answers;
    const GradeReport report = grade_report(jieba, tokenizer, questions, g);
    CAPTURE(report.text);
    CHECK(l > 0.35);
    CHECK(score == 0.25);
    CHECK(holds(report.text, "\none at a time       2.00     360       3 " +
                                 format("%9zu %9.1f %9zu %9.1f %8.4f      0.2500\n", answers, (double)answers / 2, all,
                                        (double)all / 2, l)));
    CHECK(holds(report.text, "\nhealth              1.50     420\n"));
    CHECK(report.passed); // (the command says of a round that ended early why; here nothing did)
    CHECK(report.text.substr(report.text.rfind('\n')) == "\npassed");
    const Json json(report.json);
    CHECK(json["passed"].boolean());
    CHECK(json["rounds"][0]["rouge_l"].number(NAN) == doctest::Approx(l).epsilon(1e-12));
    CHECK(json["rounds"][0]["tokens_a_second"].number(NAN) == (double)answers / 2);
    CHECK(json["rounds"][0]["rows"].size() == 3);
    CHECK(json["rounds"][0]["rows"][1]["answer"].str() == "寄存器最快\n\n对");
    CHECK(!json["same"]);
    // the worst come first
    CHECK(report.text.find("question 3: 问三") < report.text.find("question 2: 问二"));
    CHECK(report.text.find("question 2: 问二") < report.text.find("question 1: 问一"));

    g.least = l + 1e-9;
    const GradeReport failed = grade_report(jieba, tokenizer, questions, g);
    CHECK(!failed.passed);
    CHECK(holds(failed.text, format("\nfailed: one at a time: ROUGE-L is %.4f; %.4f is needed", l, g.least)));
    // Two rounds: how many answers agree; the worst ten of twelve, once if all agree.
    g.least = 0;
    const std::vector<GradeQuestion> many(12, questions[0]);
    round.answers.assign(12, "对");
    g.rounds = {round, round};
    g.rounds[1].list = true;
    auto heads = [&] {
        const std::string shown = grade_report(jieba, tokenizer, many, g).text;
        CHECK(holds(shown, "The worst 10 by ROUGE-L, asked one at a time:\n"));
        CHECK(!holds(shown, "question 11"));
        return std::pair(holds(shown, "same in both modes: 12 of 12."), holds(shown, "asked in one list:\n"));
    };
    CHECK(heads() == std::pair(true, false));
    g.rounds[1].answers[11] = "错";
    CHECK(heads() == std::pair(false, true));
    g.rounds[1].fault = "response: missing";
    CHECK(!grade_report(jieba, tokenizer, many, g).passed);
}

// ----------------------------------------------------------------------------------------------------- the command

#ifdef HAVE_CURL
namespace {
// A hand-in. It answers the k-th question with the k-th of `answers`.
struct HandIn {
    std::string status = "ok";
    int initializing = 0;  // first GETs that are told so
    int starting = 0;      // and before these: status 503
    int delay_ms = 0;      // of a prediction
    Strings answers;
    std::string reply;     // instead of an answer to a question or a list: this JSON
    size_t reply_from = 0; // from the n-th request on
    int reply_status = 200;
    std::mutex mutex;
    Strings seen;          // requests: "GET /", or the prompt of POST /predict as JSON
    size_t predicted = 0, most_at_once = 0;
    std::atomic<size_t> at_once{0}, connections{0};
    Listener listener{[this](int peer) { serve(peer); }};

    std::string url() const { return format("http://127.0.0.1:%d", listener.port); }

    void serve(int peer) {
        connections++;
        std::string in, header, body;
        while (listener.request(peer, in, header, body)) {
            if (header.find("GET / HTTP/1.1\r\n") == 0) {
                std::lock_guard<std::mutex> lock(mutex);
                seen.push_back("GET /");
                if (starting-- > 0) send(peer, 503, "starting");
                else if (initializing-- > 0) send(peer, 200, R"({"status": "initializing"})");
                else send(peer, 200, R"({"status": ")" + status + "\"}");
            } else if (header.find("POST /predict HTTP/1.1\r\n") == 0) {
                predict(peer, body);
            } else {
                send(peer, 404, "{}");
            }
        }
    }
    void predict(int peer, const std::string& body) {
        size_t number;
        {
            std::lock_guard<std::mutex> lock(mutex);
            number = predicted++;
            most_at_once = std::max<size_t>(most_at_once, ++at_once);
        }
        const Json request(body);
        const sj::Value prompt = request["prompt"];
        pollfd p = {peer, POLLIN, 0}; // (it ends earlier when the client hangs up)
        for (int ms = 0; ms < delay_ms && poll(&p, 1, 10) == 0;) ms += 10;
        std::string out;
        sj::Writer w;
        w.object().key("response");
        {
            std::lock_guard<std::mutex> lock(mutex);
            seen.push_back(sj::dump(prompt));
            at_once--;
            if (!prompt.is(sj::Array)) w.value(answers[number % answers.size()]);
            else {
                w.array();
                for (size_t i = 0; i < prompt.size(); i++) w.value(answers[i]);
                w.end();
            }
        }
        if (reply.empty() || number < reply_from) send(peer, 200, w.end().text);
        else send(peer, reply_status, reply);
    }
    void send(int peer, int code, const std::string& body) {
        const std::string all = format("HTTP/1.1 %d X\r\nContent-Length: %zu\r\n\r\n", code, body.size()) + body;
        ::send(peer, all.data(), all.size(), MSG_NOSIGNAL);
    }
};

struct Exam {
    Scratch scratch;
    std::string path = scratch / "q.jsonl";
    Strings references = {"线程束由 32 个线程组成。", "共享内存在芯片上。", "寄存器最快。"};
    Exam() {
        std::string text;
        for (size_t i = 0; i < references.size(); i++)
            text += sj::Writer().object().field("question", format("问%zu", i)).field("answer", references[i]).end().text + "\n";
        write_file(path, text);
    }
    Strings words(const HandIn& h, const Strings& more = {}) const { return Strings{path, "--url", h.url()} + more; }
};
} // namespace

TEST_CASE("grade: waits for health, then asks one question after another, or all in one list, as the status says") {
    const Exam exam;
    {
        HandIn h;
        h.answers = exam.references, h.starting = 1, h.initializing = 1;
        const std::string json = exam.scratch / "grade.json", table = exam.scratch / "table";
        const Result r = grade(exam.words(h, {"--json", json, "-o", table}));
        INFO(r.err);
        CHECK(r.status == 0);
        CHECK(r.out == "");
        CHECK(h.seen == Strings{"GET /", "GET /", "GET /", "\"问0\"", "\"问1\"", "\"问2\""});
        CHECK(h.most_at_once == 1);
        CHECK(h.connections == 6); // each has its own
        const std::string text = read_file(table);
        CHECK(holds(text, "\none at a time "));
        CHECK(!holds(text, "\nin one list "));
        CHECK(text.substr(text.size() - 8) == "\npassed\n");
        const Json all(read_file(json));
        CHECK(all["health"]["status"].str() == "ok");
        CHECK(all["health"]["seconds"].number(NAN) >= 1);
        CHECK(all["rounds"].size() == 1);
        CHECK(all["rounds"][0]["rouge_l"].number(NAN) == doctest::Approx(1));
        CHECK(all["rounds"][0]["rouge_score"].number(NAN) == doctest::Approx(1 / 3.));
        CHECK(holds(r.err, h.url() + "/, for 420 s at most\n")); // from the first second on
        CHECK(holds(r.err, h.url() + "/predict: 3 questions one at a time, for 360 s at most\n"));
    }
    HandIn h;
    h.status = "batch", h.answers = exam.references, h.answers[1] = "不知道";
    Strings words = exam.words(h);
    words[2] += "/"; // the same address
    const Result r = grade(words);
    INFO(r.err << r.out);
    CHECK(r.status == 0);
    CHECK(h.seen == Strings{"GET /", R"(["问0", "问1", "问2"])"});
    CHECK(holds(r.out, "\nin one list "));
    CHECK(holds(r.out, "0.0000  question 2: 问1\n          reference  共享内存在芯片上。\n          answer     不知道\n"));
    // A file that passes with another least.
    CHECK(grade(exam.words(h, {"--least", "0.9"})).status == 1);
    CHECK(holds(grade(exam.words(h, {"--least", "0.9"})).out, "failed: in one list: ROUGE-L is 0.66"));
}

TEST_CASE("grade: --mode overrides the status; both says whether the answers agree") {
    const Exam exam;
    HandIn h;
    h.status = "batch", h.answers = exam.references;
    CHECK(grade(exam.words(h, {"--mode", "ok"})).status == 0);
    CHECK(h.seen == Strings{"GET /", "\"问0\"", "\"问1\"", "\"问2\""});
    h.seen.clear(), h.predicted = 0;
    const Result same = grade(exam.words(h, {"--mode=both"}));
    CHECK(same.status == 0);
    CHECK(h.seen == Strings{"GET /", "\"问0\"", "\"问1\"", "\"问2\"", R"(["问0", "问1", "问2"])"});
    CHECK(holds(same.out, "\nAnswers that are the same in both modes: 3 of 3.\n"));
    h.predicted = 1; // asked one at a time the answers are those of the next questions
    const Result other = grade(exam.words(h, {"--mode=both"}));
    CHECK(other.status == 1);
    CHECK(holds(other.out, "in both modes: 0 of 3."));
    CHECK(holds(other.out, "\nfailed: one at a time: ROUGE-L is 0."));
    CHECK(!holds(other.out, "failed: in one list"));
}

TEST_CASE("grade: what breaks the contract fails with a line, and the answers before it are graded") {
    const Exam exam;
    struct Case { const char *status, *reply; int code; const char* fault; };
    const Case cases[] = {
        {"ok", R"({"response": 7})", 200, "one at a time: question 2 of 3: response: not a string"},
        {"ok", R"({"response": null})", 200, "question 2 of 3: response: not a string"},
        {"ok", R"({"answer": "x"})", 200, "question 2 of 3: response: missing"},
        {"ok", R"(["x"])", 200, "question 2 of 3: response: missing"},
        {"ok", "<html>", 200, "question 2 of 3: a reply that is no JSON: "},
        {"ok", R"({"response": "x"} {})", 200, "question 2 of 3: a reply that is no JSON: "},
        {"ok", R"({"error": {"message": "out of memory"}})", 500, "question 2 of 3: HTTP status 500: out of memory"},
        {"batch", R"({"response": "x"})", 200, "in one list: response: not a list"},
        {"batch", R"({"response": ["x", "y"]})", 200, "in one list: response: 2 answers to 3 prompts"},
        {"batch", R"({"response": ["x", "y", "z", "a"]})", 200, "in one list: response: 4 answers to 3 prompts"},
        {"batch", R"({"response": ["x", {}, "z"]})", 200, "in one list: response[1]: not a string"},
        {"batch", R"({"Response": []})", 200, "in one list: response: missing"},
        {"batch", "busy", 503, "in one list: HTTP status 503: busy"}};
    for (auto& c : cases) {
        HandIn h;
        h.status = c.status, h.reply = c.reply, h.reply_status = c.code, h.answers = exam.references;
        h.reply_from = h.status == "ok";
        const Result r = grade(exam.words(h, {"--least", "0"}));
        INFO(c.reply << "\n" << r.err << r.out);
        CHECK(r.status == 1);
        const size_t failed = r.out.find("\nfailed: ");
        REQUIRE(failed != std::string::npos);
        CHECK(holds(r.out.substr(failed), c.fault));
        CHECK(r.out.find('\n', failed + 1) == r.out.size() - 1); // one line
        CHECK(holds(r.out, h.status == "ok" ? "     1 " : "in one list "));
        CHECK(h.predicted == (h.status == "ok" ? 2 : 1)); // nothing is asked again
    }
}

TEST_CASE("grade: limits end a stage; a server that is never ready, hangs, hangs up or is not there") {
    const Exam exam;
    const std::string json = exam.scratch / "j";
    {
        HandIn h; // never ready
        h.initializing = 1000;
        const Result r = grade(exam.words(h, {"--health-limit", "1", "--json", json}));
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(holds(r.out, "\nfailed: health: not ready within the limit; the last reply: status \"initializing\"\n"));
        CHECK(!holds(r.out, "one at a time"));
        CHECK(h.predicted == 0);
        const Json all(read_file(json));
        CHECK(!all["passed"].boolean(true));
        CHECK(all["rounds"].size() == 0);
        CHECK(all["health"]["seconds"].number(NAN) >= 1);
    }
    for (auto [status, word] : {std::pair("odd\\u001b[31m", "status \"odd [31m\""),
                                {"x\", \"status\": 1, \"y\": \"", "a reply without a status"}}) {
        HandIn h;
        h.status = status;
        CHECK(holds(grade(exam.words(h, {"--health-limit", "1"})).out, word));
    }
    for (const char* mode : {"ok", "batch"}) { // too slow: three times 0.8 s, or once, against two seconds for all
        HandIn h;
        h.status = mode, h.answers = exam.references, h.delay_ms = h.status == "ok" ? 800 : 60000;
        const double start = seconds();
        const Result r = grade(exam.words(h, {"--predict-limit", "2"}));
        CHECK(seconds() - start < 30);
        INFO(r.out);
        CHECK(r.status == 1);
        CHECK(holds(r.out, h.status == "ok" ? " of 3: no reply within the limit\n"
                                            : "in one list: no reply within the limit\n"));
    }
    int port;
    {
        Listener silent([&](int peer) { // hangs up
            std::string in, head, body;
            silent.request(peer, in, head, body);
        });
        port = silent.port;
        const Result r = grade({exam.path, "--url", format("http://127.0.0.1:%d", port), "--health-limit", "1"});
        CHECK(holds(r.out, "failed: health: not ready within the limit; the last reply: Server returned nothing"));
    }
    {
        Listener mute([&](int peer) {
            std::string in;
            while (mute.receive(peer, in)) {}
        });
        const Result r = grade({exam.path, "--url", format("http://127.0.0.1:%d", mute.port), "--health-limit", "1"});
        CHECK(holds(r.out, "failed: health: not ready within the limit; no reply\n"));
    }
    const Result none = grade({exam.path, "--url", format("http://127.0.0.1:%d", port), "--health-limit", "1"});
    CHECK(none.status == 1);
    CHECK(holds(none.out, "Couldn't connect to server"));
}

TEST_CASE("grade: Ctrl-C leaves with 130 and writes nothing") {
    const Exam exam;
    HandIn h;
    h.answers = exam.references, h.delay_ms = 60000;
    const std::string table = exam.scratch / "t";
    Process run(PROGRAM, Strings{"grade"} + exam.words(h, {"-o", table}), "", [] { setenv("no_proxy", "*", 1); });
    for (int ms = 0; ms < 20000 && h.at_once == 0; ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const double start = seconds();
    kill(run.pid, SIGINT);
    const Result r = run.wait();
    CHECK(r.status == 130);
    CHECK(seconds() - start < 30);
    CHECK(!fs::exists(table));
    CHECK(holds(r.err, "datagen: interrupted\n"));
}

TEST_CASE("grade: faults of the command line and of files are one line; standard input") {
    const Exam exam;
    HandIn h;
    h.answers = exam.references;
    check_refused({}, "usage: datagen grade QUESTIONS");
    check_refused({exam.path}, "--url is needed");
    check_refused({exam.path, "--url", "127.0.0.1"}, "expected http:// or https://");
    check_refused(exam.words(h, {"--mode", "list"}), "--mode list: expected ok, batch or both");
    check_refused(exam.words(h, {"--least", "35"}), "--least: 35 is not a number from 0 to 1");
    check_refused(exam.words(h, {"--health-limit", "0"}), "--health-limit 0: expected a whole number");
    check_refused(exam.words(h, {"--predict-limit", "1h"}), "--predict-limit 1h");
    check_refused(exam.words(h, {"--json", "-"}), "--json -: the table goes there");
    check_refused(exam.words(h, {"--json", "/no/such/folder/x"}), "/no/such/folder");
    check_refused(exam.words(h, {"-z", exam.path}), exam.path);
    check_refused({exam.scratch / "none", "--url", h.url()}, "none: No such file");
    CHECK(h.seen.empty()); // and nothing was asked
    const Result r = grade({"-", "--url", h.url()}, read_file(exam.path));
    CHECK(r.status == 0);
    CHECK(holds(r.out, "\npassed\n"));
}
#endif
