// teach and data/sweep.sh, run as a new user would: from another folder, with blanks and Chinese in names, stopped and
// resumed, and with a new user's mistakes. The book is tests/fixtures/clock.md; data/teach has answers about it.
// Environment: QWEN3 names the program (default ./qwen3), beside which train_lora and datagen are.
#include "model/model_file.h"
#include "sj.h"
#include "tests/http.h"
#include "tests/process.h"
#include <atomic>
#include <cmath>
#include <csignal>
#include <mutex>
#include <set>
#include <thread>

static const std::string ROOT = fs::current_path().string();
static const std::string BIN = fs::absolute(getenv("QWEN3") ? getenv("QWEN3") : "./qwen3").parent_path().string();
static const std::string MODEL = ROOT + "/data/tiny/model.bin", BOOK = ROOT + "/tests/fixtures/clock.md";

namespace {
// A script, with a shell, in a folder. Its process group is its own, as a terminal would have it.
struct Script : Process {
    Script(const Strings& words, const std::string& folder, const char* shell = "sh", const std::string& bin = BIN)
        : Process("/usr/bin/env", in_env(words, shell, bin), "", [folder] {
              setpgid(0, 0);
              if (chdir(folder.c_str()) != 0) _exit(126);
          }) {}
    static Strings in_env(const Strings& words, const char* shell, const std::string& bin) {
        Strings all = {"OMP_WAIT_POLICY=passive", "PROGRAMS=" + bin, "CDPATH=/", shell};
        all.insert(all.end(), words.begin(), words.end());
        return all;
    }
    // Waits until stderr has the text; false if the script ends before.
    bool says(const std::string& text) {
        for (int i = 0; i < 2800; i++) {
            if (err.text().find(text) != std::string::npos) return true;
            siginfo_t state = {};
            if (waitid(P_PID, (id_t)pid, &state, WEXITED | WNOHANG | WNOWAIT) == 0 && state.si_pid) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        return false;
    }
};
} // namespace
static Script teach(Strings words, const std::string& folder, const char* shell = "sh", const std::string& bin = BIN) {
    words.insert(words.begin(), ROOT + "/teach");
    return Script(words, folder, shell, bin);
}
static const char* other_shell() { return access("/bin/bash", X_OK) == 0 ? "bash" : "sh"; }

namespace {
// "93.09 [80.62, 100.00]" in a column of the row that begins with `label`. The last columns are ROUGE-L, BLEU-4 of
// characters and of words, facts, choice.
struct Score { double mean = NAN, low = NAN, high = NAN; };
} // namespace
static Score score(const std::string& table, const std::string& label, size_t from_the_right) {
    for (auto& line : lines(table)) {
        if (line.compare(0, label.size() + 4, "| " + label + " |") != 0) continue;
        Strings cells;
        for (size_t at = 1, end; (end = line.find('|', at)) != line.npos; at = end + 1)
            cells.push_back(line.substr(at, end - at));
        REQUIRE(cells.size() > from_the_right);
        Score s;
        const char* cell = cells[cells.size() - 1 - from_the_right].c_str();
        CHECK(sscanf(cell, "%lf [%lf, %lf]", &s.mean, &s.low, &s.high) == 3);
        return s;
    }
    FAIL("no row " << label << " in\n" << table);
    return {};
}
static size_t count(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += what.size()) n++;
    return n;
}

TEST_CASE("the offline book: stopped in the middle and resumed, the model answers from the book") {
    Scratch scratch;
    const Strings words = {"--offline", "-o", "Die Uhr 钟"};
    Script first = teach(words, scratch.path);
    REQUIRE(first.says("step 16/80  evaluation loss")); // it is training
    kill(-first.pid, SIGINT);
    const Result stopped = first.wait();
    INFO(stopped.err);
    CHECK(stopped.status == 130);
    CHECK(stopped.out == "");
    CHECK(stopped.err.find("teach: clock.md: about 19 questions in ") != std::string::npos);
    CHECK(count(stopped.err, "teach: stopped; the same command goes on\n") == 1);

    Strings shown = words; // (a page of the training changes no step; serve is there if libmicrohttpd is)
    const bool can_watch = fs::exists(BIN + "/serve");
    if (can_watch) shown.insert(shown.end(), {"--watch", "0"});
    const Result r = teach(shown, scratch.path, other_shell()).wait();
    INFO(r.err);
    INFO(r.out);
    REQUIRE(r.status == 0);
    CHECK(count(r.err, "the run is shown at http://127.0.0.1:") == can_watch);
    CHECK(count(r.err, "step 16/80 ") == 0); // it went on after it
    CHECK(count(r.err, "step 80/80 ") >= 1);
    for (auto done : {"collecting", "filtering", "packing", "before training"}) CHECK(count(r.err, done) == 0);
    const Score before = score(r.out, "training, before", 4), after = score(r.out, "training, after", 4);
    const Score echo = score(r.out, "training: the question as answer", 4);
    CHECK(before.high < 30);
    CHECK(after.low > std::max(before.high, echo.high));
    CHECK(after.mean > 60);
    CHECK(score(r.out, "held-out, after", 6).mean > score(r.out, "held-out, before", 6).high); // ROUGE-1 of what it never saw

    // The command that it ends with, given a question.
    size_t at = r.out.find("Chat with it about ");
    REQUIRE(at != std::string::npos);
    at = r.out.find("\n    ", at);
    REQUIRE(at != std::string::npos);
    std::string chat = lines(r.out.substr(at + 5))[0];
    REQUIRE(chat.find("/qwen3 ") != std::string::npos);
    chat = "\"$PROGRAMS\"/qwen3" + chat.substr(chat.find("/qwen3 ") + 6);
    const char* facts[][2] = {{"Where is the marble clock of Oderby oiled, and with which oil?", "walnut oil"},
                              {"When does the keeper of the marble clock light the frost lamp?", "4 degrees or less"},
                              {"What do people in Oderby call the rattle?", "24 marbles"}};
    size_t known = 0; // (so small a model may have one row of its training wrong, on one processor or another)
    for (auto [question, fact] : facts) {
        const Result answer = Script({"-c", chat + " -t 0 -i \"$0\"", question}, scratch.path).wait();
        INFO(chat << "\n" << answer.err << answer.out);
        CHECK(answer.status == 0);
        known += count(answer.out, fact) > 0;
    }
    CHECK(known >= 2);

    // It begins with three of the questions.
    const Starters starters = ModelFile(scratch / "Die Uhr 钟/model/model.bin").starters;
    CHECK(starters.size() == 3);
    for (auto& question : starters)
        CHECK(count(read_file(scratch / "Die Uhr 钟/train.jsonl"), "\"instruction\": \"" + question + "\"") == 1);

    // Nothing is left to do.
    const Result again = teach(words, scratch.path).wait();
    CHECK(again.status == 0);
    CHECK(again.out == r.out);
    CHECK(lines(again.err).size() <= 2); // the line about what it takes, and a blank one

    // Its final output comes from the table: of three questions, and in two sentences.
    CHECK(r.out.find("\nThe model has memorised its training questions (ROUGE-L ") != std::string::npos);
    CHECK(r.out.find(" held-out questions ", at) != std::string::npos);
    CHECK(count(r.out, "\ntraining: ") == 2);
    CHECK(count(r.out, "\nheld-out: ") == 1);
    CHECK(count(r.out, "\n    reference: ") == 3);
    CHECK(count(r.out, "\n    after:     ") == 3);
    // The report is one file with the curve, the recipe, the verdict and every measured answer, as text.
    const std::string answers = scratch / "Die Uhr 钟/before-learnt.jsonl", page = scratch / "Die Uhr 钟/report.html";
    std::string answered = read_file(answers);
    answered.insert(answered.find("\"answer\": \"") + 11, "<script>a & b</script>\\nc");
    write_file(answers, answered);
    CHECK(teach(words, scratch.path).wait().status == 0);
    const std::string report = read_file(page);
    INFO(report);
    CHECK(count(report, "<polyline") == 2);
    CHECK(count(report, "<h1>clock.md: a model taught from a book</h1>") == 1);
    CHECK(count(report, "<h2>Answers</h2>") == 1); // of the training
    CHECK(count(report, "<dt>before</dt>") == 3);
    CHECK(count(report, " --full") == 1);
    CHECK(count(report, "15 rows, 80 steps in 0:") == 1);
    CHECK(count(report, "<p>The model has memorised its training questions (ROUGE-L ") == 1);
    CHECK(count(report, "<tr><td>training, after<td>15<td>") == 1);
    CHECK(count(report, "<tr><td>training<td>") == 15);
    CHECK(count(report, "<tr><td>held-out<td>") == 4);
    CHECK(count(report, "&lt;script>a &amp; b&lt;/script>\nc") == 1);
    for (auto part : {"<script", " src=", " href=", "url("}) CHECK(count(report, part) == 0);
    const std::string table = scratch / "Die Uhr 钟/after-learnt", row = read_file(table);
    auto judged = [&](const std::string& rouge) { // as if the table had other numbers
        std::string other = row;
        size_t cell = 0;
        for (int bars = 0; bars < 7; bars++) cell = other.find('|', cell) + 1;
        other.replace(cell, other.find('|', cell) - cell, " " + rouge + " ");
        write_file(table, other);
        return teach(words, scratch.path).wait().out;
    };
    const std::string verdicts[] = {"not learnt its training questions (ROUGE-L 12.0 of 100",
                                    "partly learnt its training questions (ROUGE-L 45.0 of 100"};
    CHECK(judged("11.97 [8.00, 14.00]").find("\nThe model has " + verdicts[0]) != std::string::npos);
    CHECK(judged("45.00 [41.00, 49.00]").find("\nThe model has " + verdicts[1]) != std::string::npos);
}

TEST_CASE("the recipe follows from the number of rows") {
    Scratch scratch;
    const std::string script = read_file(ROOT + "/teach"), from = "recipe() {", to = "\n}\n";
    const size_t at = script.find(from);
    REQUIRE(at != script.npos);
    const std::string recipe = script.substr(at, script.find(to, at) + to.size() - at);
    double epochs, batch, warmup, rate;
    for (int rows : {1, 6, 32, 99, 100, 350, 399, 400, 1599, 1600, 5000, 100000})
        for (std::string small : {"", "yes"}) {
            const Result r = Script({"-c", "small=" + small + " epochs= ; " + recipe + format("recipe %d", rows)}, scratch.path).wait();
            INFO(rows << ": " << r.out << r.err);
            REQUIRE(sscanf(r.out.c_str(), "%lf --batch %lf --warmup %lf --lr %lf", &epochs, &batch, &warmup, &rate) == 4);
            const double steps = epochs * rows / batch;
            CHECK((steps > 200 || epochs == (small.empty() ? 20 : 10))); // a few hundred, or each row many times
            CHECK((steps < 420 || epochs == 2));
            CHECK(epochs >= 2);
            CHECK((r.out.find("--full") != r.out.npos) == !small.empty());
            CHECK(rate > 1e-4);
        }
    CHECK(Script({"-c", "small= epochs=3.5; " + recipe + "recipe 50"}, scratch.path).wait().out.compare(0, 4, "3.5 ") == 0);
}

TEST_CASE("the recording answers the requests of the book as it is cut today") {
    Scratch scratch;
    REQUIRE(teach({"--offline", "--plan", "-o", "w"}, scratch.path).wait().status == 0);
    auto ids = [](const std::string& path) { // chunk and difficulty; what follows is a sum of the request's text
        Strings all;
        for (auto& line : lines(read_file(path))) {
            const Json row(line);
            const std::string id = row["custom_id"].str();
            all.push_back(id.substr(0, id.rfind('.')));
        }
        return all;
    };
    CHECK(ids(scratch / "w/requests.jsonl") == ids(ROOT + "/data/teach/responses.jsonl"));
    size_t rows = 0;
    for (auto& line : lines(read_file(ROOT + "/data/teach/responses.jsonl"))) { // each item is what was asked for
        const Json row(line);
        const Json items(row["response"]["body"]["choices"][0]["message"]["content"].str());
        for (auto item : items.root().items()) rows += item["question"].is(sj::String) && item["answer"].is(sj::String);
    }
    CHECK(rows == 19);
}

namespace {
// An endpoint with one model, which knows one answer; or that refuses.
struct Endpoint {
    std::atomic<int> status{200}, asked{0}, useless{0}; // useless: so many replies are, before the others
    Listener listener{[this](int peer) { serve(peer); }};

    void serve(int peer) {
        std::string in, head, request;
        if (!listener.request(peer, in, head, request)) return;
        std::string body = R"({"error": {"message": "no such key"}})";
        if (status == 200 && head.compare(0, 4, "GET ") == 0) body = R"({"object": "list", "data": [{"id": "writer"}]})";
        else if (status == 200)
            body = R"({"choices": [{"message": {"role": "assistant", "content": "[{\"question\": \"Who built the )"
                   R"(clock?\", \"answer\": \"Ilse Marrin, a well digger, built it in 1911.\"}]"}, )"
                   R"("finish_reason": "stop"}]})";
        if (head.compare(0, 5, "POST ") == 0 && asked++ < useless && status == 200)
            body = R"({"choices": [{"message": {"role": "assistant", "content": "No."}, "finish_reason": "stop"}]})";
        const std::string all = format("HTTP/1.1 %d Said\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n"
                                       "Connection: close\r\n\r\n", status.load(), body.size()) + body;
        CHECK(send(peer, all.data(), all.size(), MSG_NOSIGNAL) == (ssize_t)all.size());
    }
};
} // namespace

TEST_CASE("an endpoint that refuses, that answers, and is not asked twice; a book that was changed") {
    Scratch scratch;
    const Strings nothing = {"generate", scratch / "none", "--url", "http://127.0.0.1:1"};
    if (count(Process((BIN + "/datagen").c_str(), nothing).wait().err, "without libcurl")) return;
    Endpoint endpoint;
    const std::string book = "Das Buch, 第 1 版.md";
    write_file(scratch / book, read_file(BOOK).substr(0, 8500));
    const std::string url = format("http://127.0.0.1:%d", endpoint.listener.port);
    Strings words = {book, "--model", MODEL, "--endpoint", url, "--test", "4", "--price-in", "10",
                     "--price-out", "40"};
    endpoint.status = 401;
    Result r = teach(words, scratch.path).wait();
    INFO(r.err);
    CHECK(r.status == 1);
    CHECK(r.out == "");
    CHECK(r.err.find("questions in ") != std::string::npos);
    CHECK(r.err.find(" to write, for 0.") != std::string::npos);
    CHECK(r.err.find("401") != std::string::npos);
    const std::string work = scratch / "Das Buch, 第 1 版.teach";
    CHECK(fs::exists(work + "/requests.jsonl.made"));
    CHECK(!fs::exists(work + "/responses.jsonl.made"));

    endpoint.status = 200, endpoint.useless = 2;
    const auto cut = fs::last_write_time(work + "/chunks.jsonl");
    endpoint.asked = 0;
    r = teach(words, scratch.path, other_shell()).wait();
    INFO(r.err);
    CHECK(r.status == 1); // all answers are the same, so one question is left
    CHECK(r.err.find("too few questions are left to train on and to hold out 4: 1 ") != std::string::npos);
    CHECK(fs::last_write_time(work + "/chunks.jsonl") == cut);
    const int asked = endpoint.asked;
    CHECK(asked == (int)lines(read_file(work + "/requests.jsonl")).size() + 2); // two replies had no question
    CHECK(r.err.find("2 replies have no usable question; asking again") != std::string::npos);
    endpoint.useless = 0;
    CHECK(teach(words, scratch.path).wait().status == 1);
    CHECK(endpoint.asked == asked);

    // Another subject makes other requests; a book that was changed is cut anew.
    words.insert(words.end(), {"--subject", "clocks that 'run' on \"water\""});
    CHECK(teach(words, scratch.path).wait().status == 1);
    CHECK(endpoint.asked == 2 * asked - 2);
    write_file(scratch / book, read_file(BOOK));
    CHECK(teach(words, scratch.path).wait().status == 1);
    CHECK(fs::last_write_time(work + "/chunks.jsonl") != cut);
    CHECK(endpoint.asked > 2 * asked - 2);

    // A book that is too short is refused before anything is asked.
    const int before = endpoint.asked;
    write_file(scratch / "two pages.md", read_file(BOOK).substr(0, 5000));
    write_file(scratch / "one line.md", "The clock of Oderby runs on rain.\n");
    for (const char* name : {"two pages.md", "one line.md"})
        check_refusal(teach({name, "--model", MODEL, "--endpoint", url}, scratch.path).wait(), "teach", "too few to train on");
    check_refusal(teach({book, "--model", MODEL, "--endpoint", url, "--test", "100", "-o", "w100"}, scratch.path).wait(), "teach",
                  "too few to train on and to hold out 100");
    CHECK(endpoint.asked == before);
}

TEST_CASE("what a stranger gets wrong is one clear line") {
    Scratch scratch;
    fs::create_directory(scratch.path / "no programs");
    fs::create_directory(scratch.path / "mine");
    write_file(scratch / "mine/letter.txt", "Dear aunt");
    write_file(scratch / "empty.md", "");
    write_file(scratch / "other.md", read_file(BOOK));
    const Strings to = {"--model", MODEL, "--endpoint", "http://127.0.0.1:1"};
    auto refused = [&](Strings words, const std::string& why, const Strings& more) {
        words.insert(words.end(), more.begin(), more.end());
        check_refusal(teach(words, scratch.path).wait(), "teach", why);
    };
    refused({}, "no book named", to);
    refused({BOOK}, "--endpoint URL is needed", {"--model", MODEL});
    refused({BOOK}, "--model MODEL is needed", {"--endpoint", "http://127.0.0.1:1"});
    refused({"lost.md"}, "lost.md: no such book", to);
    refused({"empty.md"}, "empty.md: the book is empty", to);
    refused({BOOK, "--model", "lost", "--endpoint", "x"}, "lost: no such model", {});
    refused({BOOK, "--colour"}, "unknown option --colour", to);
    refused({BOOK, "--epochs"}, "--epochs needs a value", {});
    refused({BOOK, "--price-in", "ten"}, "ten is not a number", to);
    refused({BOOK, "--test", "2.5"}, "2.5 is not a whole number", to);
    refused({BOOK, "--watch", "here"}, "here is not a whole number", to);
    refused({BOOK, "--offline"}, "--offline has its own book", {});
    refused({BOOK, "-o", "mine"}, "mine: exists and is no work folder", to);
    refused({BOOK}, "--watch PORT belongs before the --", {"--model", MODEL, "--endpoint", "x", "--", "--watch", "0"});
    refused({BOOK}, "--steps is not known here", {"--model", MODEL, "--endpoint", "x", "--", "--steps", "2"});
    check_refusal(teach({"--offline"}, scratch.path, "sh", scratch / "no programs").wait(), "teach", "run make first");
    REQUIRE(teach({BOOK, "--model", MODEL, "--endpoint", "x", "-o", "w", "--plan"}, scratch.path).wait().status == 0);
    refused({"other.md", "-o", "w"}, "w: belongs to another book, " + BOOK, to);

    // The programs' errors about a model, options or a book are shown before the first request.
    auto said = [&](Strings words, const std::string& program, const std::string& why) {
        Result r = teach(words, scratch.path).wait();
        if (const std::string trying = "teach: trying "; r.err.compare(0, trying.size(), trying) == 0)
            r.err.erase(0, r.err.find('\n') + 1);
        check_refusal(r, program, why);
    };
    said({BOOK, "--model", "empty.md", "--endpoint", "x"}, "train_lora", "empty.md");
    write_file(scratch / "latin.md", "Z\xFCrich\n");
    said({"latin.md", "--model", MODEL, "--endpoint", "x"}, "datagen", "latin.md: no UTF-8");
    said({BOOK, "--model", MODEL, "--endpoint", "x", "-o", "w3", "--", "--rank", "0"}, "train_lora", "--rank");
    if (!fs::exists(BIN + "/serve")) return; // (built if libmicrohttpd is there)
    const Listener other([](int) {});
    said({BOOK, "--model", MODEL, "--endpoint", "x", "-o", "w4", "--watch", format("%d", other.port)}, "train_lora", "Address already in use");
}

TEST_CASE("evaluate.sh: the table without weights says so in every row of a model, and shows the baselines") {
    Scratch scratch;
    auto evaluate = [&](Strings words, const std::string& rows) {
        words.insert(words.begin(), {"sh", ROOT + "/data/evaluate.sh"});
        return Script(words, scratch.path, ("ROWS=" + rows).c_str()).wait();
    };
    const Result r = evaluate({"Qwen3-0.6B", "out"}, "3");
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(r.out == read_file(scratch / "out/table.md"));
    const size_t SETS = 16;
    CHECK(count(r.out, "not run here: no weights") == SETS * 8);
    CHECK(count(r.out, "| question") == 0);
    CHECK(count(r.out, "\n| the question as answer | 3 | - | - | ") == SETS);
    CHECK(count(r.out, "\n| nearest training answer | 3 | - | - | ") == SETS);
    std::set<std::string> titles;
    for (auto& line : lines(r.out))
        if (line.compare(0, 4, "### ") == 0) titles.insert(line);
    CHECK(count(r.out, "\n### ") == SETS);
    CHECK(titles.size() == SETS); // each its own
    for (auto& line : lines(r.out)) // every table has its eleven columns
        if (line[0] == '|') CHECK(count(line, "|") == 12);
    CHECK(evaluate({"Qwen3-0.6B", "out"}, "3").out == r.out);
    check_refusal(evaluate({"Qwen3-0.6B", "out"}, "2"), "evaluate.sh", "out: holds an evaluation of another model");
    check_refusal(evaluate({"Qwen3-0.6B", "out2"}, "0"), "evaluate.sh", "ROWS=0");
    write_file(scratch / "full", "x");
    check_refusal(Script({"sh", ROOT + "/data/evaluate.sh", MODEL, "out3"}, scratch.path, "METHODS=sft").wait(), "evaluate.sh", "METHODS: sft");
    check_refusal(Script({"sh", ROOT + "/data/evaluate.sh", MODEL, "out3"}, scratch.path, "SETS=dev exam").wait(), "evaluate.sh", "SETS: exam is none");
    check_refusal(evaluate({"Qwen3-0.6B", "."}, "3"), "evaluate.sh", "is not empty and holds no evaluation");
}

TEST_CASE("evaluate.sh: a model's rows are under their own names in every table, with the notes and without") {
    Scratch scratch;
    fs::create_directory_symlink(ROOT + "/data", scratch / "data"); // (qwen3 looks for jieba's dictionary here)
    const Result r = Script({"METHODS=as-it-is", "SETS=dev mc_exam", "sh", ROOT + "/data/evaluate.sh", MODEL, "out"}, scratch.path, "ROWS=1").wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(count(r.out, "\n### ") == 2);
    CHECK(count(r.out, "\n| as it is | 1 | ") == 2);
    CHECK(count(r.out, "\n| as it is, with the notes | 1 | ") == 2);
    for (const char* set : {"dev", "mc_exam"}) {
        CHECK(read_file(scratch / format("out/answers/%s.as-it-is.jsonl", set)).find("\"sources\"") == std::string::npos);
        CHECK(read_file(scratch / format("out/answers/%s.as-it-is.docs.jsonl", set)).find("\"sources\"") != std::string::npos);
    }
}

TEST_CASE("a sweep of three rows: table, picture, best row; what is finished is not trained again") {
    Scratch scratch;
    fs::create_directory(scratch.path / "数 据");
    const Strings rows = lines(read_file(ROOT + "/data/course/english_train.jsonl"));
    write_file(scratch / "数 据/train.jsonl", rows[0] + "\n" + rows[1] + "\n" + rows[2] + "\n");
    write_file(scratch / "数 据/test.jsonl", rows[3] + "\n" + rows[4] + "\n");
    write_file(scratch / "grid", "# a comment\nrank alpha lr   steps dropout weight-decay\n\n 2 4 1e-3 1 0 0.01\n"
                                 " 4 8 1e-3 2 0.1 0.01\r\n - - 1e-3 1 - -  # rank 32\n");
    const Strings words = {ROOT + "/data/sweep.sh", MODEL, "数 据/train.jsonl", "数 据/test.jsonl", "grid", "o u t",
                           "--seed", "3"};
    const Result r = Script(words, scratch.path).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    const Strings table = lines(r.out);
    INFO(r.out);
    REQUIRE(table.size() == 9);
    CHECK(table[0] == "| rank | alpha | lr | steps | dropout | weight decay | rows | ended | loss | "
                      "ROUGE-1 | ROUGE-2 | ROUGE-L | BLEU-4 (characters) | BLEU-4 (words) | facts | choice |");
    for (auto label : {"as it was | - | - | - | - | -", "the question as answer | - | - | - | - | -",
                       "2 | 4 | 1e-3 | 1 | 0 | 0.01", "- | - | 1e-3 | 1 | - | -"})
        for (size_t column = 3; column < 7; column++) {
            const Score s = score(r.out, label, column);
            CHECK(s.low <= s.mean);
            CHECK(s.mean <= s.high);
        }
    CHECK(table[8].compare(0, 22, "Best by ROUGE-L: rank ") == 0);
    CHECK(table[8].find("a difference to them is not shown") != std::string::npos); // two rows show nothing
    CHECK(r.out == read_file(scratch / "o u t/table.md"));
    const std::string picture = read_file(scratch / "o u t/loss.svg");
    CHECK(count(picture, "<polyline") == 3);
    CHECK(count(picture, "dots: held out") == 1);
    for (auto text : {">step</text>", ">loss</text>", ">rank</text>", ">weight-decay</text>", ">0.1</text>"})
        CHECK(count(picture, text) >= 1);

    const std::string adapter = scratch / "o u t/4_8_1e-3_2_0.1_0.01/adapter_model.safetensors";
    const auto made = fs::last_write_time(adapter);
    fs::remove_all(scratch.path / "o u t/-_-_1e-3_1_-_-");
    const Result again = Script(words, scratch.path, other_shell()).wait();
    INFO(again.err);
    CHECK(again.status == 0);
    CHECK(again.out == r.out); // to the bit
    CHECK(count(again.err, "sweep.sh: run ") == 1);
    CHECK(count(again.err, "sweep.sh: run 3 of 3: --lr 1e-3 --steps 1 ") == 1);
    CHECK(fs::last_write_time(adapter) == made);

    auto refused = [&](size_t which, const std::string& word, const std::string& why) {
        Strings wrong = words;
        wrong[which] = word;
        check_refusal(Script(wrong, scratch.path).wait(), "sweep.sh", why);
    };
    refused(1, "lost", "lost: no such model");
    refused(2, "lost", "lost: no such file");
    refused(2, "数 据/test.jsonl", "holds a sweep of another model, of other data");
    write_file(scratch / "short", "rank alpha\n2\n");
    refused(4, "short", "the row \"2\" has 1 words, the header 2");
    write_file(scratch / "sly", "rank\n$(ls)\n");
    refused(4, "sly", "a character that no option needs");
    write_file(scratch / "twice", "rank\n2\n 2\n");
    refused(4, "twice", "is there twice");
}
