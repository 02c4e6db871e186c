// Distillation from a file: outcomes as ops, taught rows and their dataset, and the way from rows over an endpoint (serve)
// to a trained adapter (TRAIN_LORA, DATAGEN and SERVE, else the programs here). PyTorch's numbers are a fixture, made by
// tests/reference/make_distil.py.
#include <doctest/doctest.h>
#include "base/file.h"
#include "book/datagen/taught.h"
#include "tests/common.h"
#include "tests/files.h"
#include "tests/process.h"
#include "tests/trainer.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";

// ------------------------------------------------------------------------------------------------ the ops

static std::vector<double> numbers_of(sj::Value list) {
    std::vector<double> all;
    for (sj::Value x : list.items()) all.push_back(x.number());
    return all;
}
// The loss, divergence and gradient of rows of logits beside outcomes of a teacher.
template <class T> struct TaughtRows {
    std::vector<acc<T>> loss, divergence, agrees, logits, z, tail;
    TaughtRows(const std::vector<double>& student, const std::vector<int>& ids, const std::vector<double>& log_p, const Distillation& how, double scale, int R, int J)
        : logits(student.begin(), student.end()), z(poisoned<acc<T>>(R * J)), tail(poisoned<acc<T>>(R)) {
        const int V = (int)student.size() / R;
        const std::vector<acc<T>> p(log_p.begin(), log_p.end());
        const std::vector<int> target(R, 0);
        for (auto* list : {&loss, &divergence, &agrees}) *list = poisoned<acc<T>>(R);
        const Distilled<acc<T>> out = {loss.data(), divergence.data(), agrees.data()};
        const DistillationRows<acc<T>> of = {p.data(), target.data(), how, (acc<T>)scale, R, J};
        CALL(gather_outcomes, z.data(), tail.data(), logits.data(), ids.data(), R, J, V);
        CALL(distillation, out, (T*)z.data(), z.data(), of);
        CALL(scatter_outcomes, (T*)logits.data(), logits.data(), (const T*)z.data(), J * sizeof(acc<T>) / sizeof(T), tail.data(), ids.data(), R, J, V);
    }
};

TEST_CASE("outcomes: PyTorch's losses and autograd's gradients, in double and within 1e-6 in float; bf16 rounds them") {
    EACH_WAY;
    const Json golden(read_file("tests/fixtures/distil/outcomes.json"));
    const std::vector<double> student = numbers_of(golden["student"]);
    const int R = (int)golden["ids"].size(), J = (int)golden["J"].number(), V = (int)golden["V"].number();
    std::vector<int> ids((size_t)R * J, -1);
    std::vector<double> log_p((size_t)R * J, NEVER<double>);
    for (int r = 0; r < R; r++) {
        const std::vector<double> id = numbers_of(golden["ids"][r]), p = numbers_of(golden["log_p"][r]);
        double sum = 0;
        for (size_t k = 0; k < id.size(); k++) ids[r * J + k] = (int)id[k], log_p[r * J + k] = p[k], sum += std::exp(p[k]);
        log_p[r * J + J - 1] = std::log(std::max(1 - sum, 1e-7));
    }
    const double scale = golden["scale"].number();
    for (const sj::Value one : golden["cases"].items()) {
        const Distillation how = {(float)one["beta"].number(), (float)one["temperature"].number(), (float)one["weight"].number()};
        INFO("beta " << how.beta << ", temperature " << how.temperature << ", weight " << how.weight);
        const TaughtRows<double> exact(student, ids, log_p, how, scale, R, J);
        CHECK(wrong(exact.loss, numbers_of(one["loss"]), [](size_t) { return 2e-6; }) == 0);
        CHECK(wrong(exact.divergence, numbers_of(one["divergence"]), [](size_t) { return 2e-6; }) == 0);
        CHECK(wrong(exact.logits, numbers_of(one["gradient"]), [](size_t) { return 1e-7; }) == 0);
        const TaughtRows<float> single(student, ids, log_p, how, scale, R, J);
        CHECK(wrong(single.loss, numbers_of(one["loss"]), [](size_t) { return 1e-5; }) == 0);
        CHECK(wrong(single.logits, numbers_of(one["gradient"]), [](size_t) { return 1e-6; }) == 0);
        const TaughtRows<bf16> narrow(student, ids, log_p, how, scale, R, J);
        CHECK(same_bits(single.loss, narrow.loss));
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                bf16 g;
                memcpy((void*)&g, (const uint8_t*)(narrow.logits.data() + r * V) + 2 * v, 2);
                const double want = numbers_of(one["gradient"])[(size_t)(r * V + v)];
                CHECK(std::fabs(to_acc(g) - want) <= 2.01 * rounding<bf16>(want) + 1e-6); // the tail's is rounded twice
            }
    }
}

TEST_CASE("outcomes: a teacher that reports every likely id is the whole teacher; a certain token is cross entropy; finite differences") {
    EACH_WAY;
    Random random{5};
    const int V = 21, J = 24;
    const std::vector<double> student = random.fill<double>(V, 4), teacher = random.fill<double>(V, 4);
    std::vector<int> ids(J, -1);
    std::vector<double> log_p(J, NEVER<double>);
    for (int v = 0; v < V; v++) ids[v] = (v + 3) % V, log_p[v] = teacher[(v + 3) % V] - log_sum(teacher.data(), V, 1.);
    for (const Distillation& how : {Distillation{0, 1, 1}, {0.25f, 2, 0.5f}}) {
        std::vector<double> s = student, loss(1), d(1), agrees(1);
        const int target = 3;
        distillation<double>({loss.data(), d.data(), agrees.data()}, s.data(), s.data(), {teacher.data(), &target, how, 0.5, 1, V});
        const TaughtRows<double> got(student, ids, log_p, how, 0.5, 1, J);
        CHECK(got.divergence[0] == doctest::Approx(d[0]).epsilon(1e-9));
        CHECK(got.loss[0] == doctest::Approx(loss[0]).epsilon(1e-9));
        CHECK(wrong(got.logits, s, [](size_t) { return 1e-9; }) == 0);
    }
    std::fill(ids.begin() + 3, ids.end(), -1), std::fill(log_p.begin(), log_p.end(), NEVER<double>);
    for (const Distillation& how : {Distillation{0, 1, 1}, {1, 1, 1}, {0.25f, 2, 0.5f}}) {
        log_p = std::vector<double>(J, NEVER<double>), log_p[0] = std::log(0.5), log_p[1] = std::log(0.3), log_p[2] = std::log(0.1), log_p[J - 1] = std::log(0.1);
        const TaughtRows<double> got(student, ids, log_p, how, 0.5, 1, J);
        for (int v = 0; v < V; v++) {
            double of[2];
            for (int side : {0, 1}) {
                std::vector<double> moved = student;
                moved[v] += side ? 1e-5 : -1e-5;
                of[side] = TaughtRows<double>(moved, ids, log_p, how, 0.5, 1, J).loss[0];
            }
            CHECK(got.logits[v] == doctest::Approx(0.5 * (of[1] - of[0]) / 2e-5).epsilon(1e-6).scale(1));
        }
    }
    ids[1] = ids[2] = -1, log_p = std::vector<double>(J, NEVER<double>), log_p[0] = 0, log_p[J - 1] = std::log(1e-7);
    std::vector<double> s = student, loss(1);
    const int target = ids[0];
    cross_entropy<double>(loss.data(), s.data(), s.data(), &target, 0.5, 1, V);
    const TaughtRows<double> got(student, ids, log_p, {0, 1, 1}, 0.5, 1, J);
    CHECK(got.loss[0] == doctest::Approx(loss[0]).epsilon(1e-5));
    CHECK(wrong(got.logits, s, [](size_t) { return 1e-6; }) == 0);
}

// ------------------------------------------------------------------------------------------------ the dataset

TEST_CASE("a dataset of taught rows: what is written is read; damaged ones are refused") {
    Scratch scratch;
    const std::string path = scratch / "rows.bin";
    const std::vector<uint32_t> row = {5, 6 | TRAIN, 7 | TRAIN}, second = {1, 2, 3 | TRAIN};
    {
        DatasetWriter writer(path, 0, 0);
        writer.add_taught(row, {{{6, -0.5f}, {9, -1.5f}, {4, -3}}, {{7, -0.1f}}});
        writer.add_taught(second, {{{3, -2}, {40, -0.2f}}});
        writer.commit();
    }
    const Dataset data(path);
    CHECK(data.taught());
    CHECK(data.group() == 1);
    CHECK(data.outcomes() == 3);
    CHECK(data.id_limit() == 41);
    CHECK(std::vector<uint32_t>(data.outcome_ids(0), data.outcome_ids(0) + 6) == std::vector<uint32_t>{6, 9, 4, 7, NO_ID, NO_ID});
    CHECK(std::vector<float>(data.outcome_log_p(1), data.outcome_log_p(1) + 3) == std::vector<float>{-2, -0.2f, 0});
    auto refused = [&](const std::vector<std::vector<Outcome>>& outcomes) {
        DatasetWriter writer(scratch / "bad.bin", 0, 0);
        CHECK_THROWS_AS(writer.add_taught(row, outcomes), Error);
    };
    refused({{{6, -0.5f}}});                                // one token without
    refused({{{9, -0.5f}}, {{7, 0}}});                      // not its own first
    refused({{{6, -0.5f}, {6, -2}}, {{7, 0}}});             // twice
    refused({{{6, 0.5f}}, {{7, 0}}});                       // above 1
    refused({{{6, -0.1f}, {8, -0.1f}}, {{7, 0}}});          // together above 1
    refused({{{6, NAN}}, {{7, 0}}});
    const std::string whole = read_file(path);
    const size_t numbers = 3 * 3 * 4; // bytes of the ids, and of the log-probabilities
    auto damaged = [&](size_t at, uint32_t with) {
        std::string bytes = whole;
        memcpy(&bytes[at], &with, 4);
        write_file(scratch / "bad.bin", bytes);
        CHECK_THROWS_AS(Dataset(scratch / "bad.bin"), Error);
    };
    damaged(whole.size() - 2 * numbers - 8, 0);   // no ids
    damaged(whole.size() - 2 * numbers - 8, 100);
    damaged(whole.size() - 2 * numbers - 8, 4);   // other sizes
    damaged(whole.size() - 2 * numbers, 8);       // another token
    damaged(whole.size() - numbers, 0x7FC00000);  // not a number
    damaged(whole.size() - 4, 0xC0000000);        // a number in an unused place
    write_file(scratch / "bad.bin", whole.substr(0, whole.size() - 8));
    CHECK_THROWS_AS(Dataset(scratch / "bad.bin"), Error);
}

// ------------------------------------------------------------------------------------------------ tokens of an endpoint

static std::string entry(const std::string& token, double log_p, const std::string& others = "") {
    sj::Writer w;
    w.object().field("token", token).field("logprob", log_p).key("bytes").array();
    for (char byte : token) w.value((int)(uint8_t)byte);
    return w.end().text + ", \"top_logprobs\": [" + others + "]}";
}

TEST_CASE("taught rows: an endpoint's tokens by their bytes; others belong to the rest, and rows that do not fit are named") {
    const Tokenizer tokenizer(VOCABULARY);
    book::Conversation c;
    c.messages = {{"user", "Hi"}, {"assistant", "a warp"}};
    const book::Words own = book::render_rows(tokenizer, c).back();
    Strings pieces; // our tokens of the answer
    for (uint32_t word : own)
        if (word & TRAIN) pieces.push_back(std::string(tokenizer.bytes((int)(word & ~TRAIN))));
    REQUIRE(pieces.size() > 3);
    auto row_of = [&](const Strings& entries) {
        std::string text = "{\"content\": [";
        for (size_t i = 0; i < entries.size(); i++) text += (i ? ", " : "") + entries[i];
        return book::TaughtRow(tokenizer, c, Json(text + "]}").root());
    };
    auto all = [&](size_t n, const std::string& others = "") {
        Strings entries;
        for (size_t i = 0; i < n; i++) entries.push_back(entry(pieces[i], -0.5, others));
        return entries;
    };
    const size_t n = pieces.size();
    for (size_t reported : {n, n - 1, n - 2}) { // with the line's end, with <|im_end|>, without
        const book::TaughtRow row = row_of(all(reported, entry("b", -2) + ", " + entry("no such token", -3) + ", " + entry("c", -9999)));
        CHECK(row.fault == "");
        CHECK(row.row == own);
        CHECK(!row.recut);
        CHECK(row.foreign == reported);
        REQUIRE(row.outcomes.size() == n);
        CHECK(row.outcomes[0].size() == 2); // -9999 is never
        CHECK(row.outcomes[0][1].id == (uint32_t)tokenizer.id_of("b"));
        CHECK(row.outcomes[n - 1].size() == (reported == n ? 2 : 1));
        CHECK(row.outcomes[n - 1][0].log_p == (reported == n ? -0.5f : 0));
    }
    Strings letters = {entry("a", -1), entry(" ", -1), entry("w", -1), entry("a", -1), entry("r", -1), entry("p", -1)};
    const book::TaughtRow cut = row_of(letters);
    CHECK(cut.fault == "");
    CHECK(cut.recut == (n != 8));
    CHECK(cut.row.size() == own.size() - n + 8);
    Strings after_thought = all(n - 2);
    after_thought.insert(after_thought.begin(), entry("\n\n", -1));
    CHECK(row_of(after_thought).row == own);
    auto faulty = [&](const Strings& entries, const std::string& word) {
        const std::string fault = row_of(entries).fault;
        INFO(fault);
        CHECK(fault.find(word) != std::string::npos);
    };
    faulty({}, "not all of the answer");
    faulty(all(1), "not all of the answer");
    letters[5] = entry("q", -1);
    faulty(letters, "not those of the answer");
    Strings one = {entry("a warp", -1)};
    faulty(one, "\"a warp\" is not in this vocabulary");
    faulty(all(n, entry("b", -0.1)), "add up to more than 1");
    Strings without = all(n - 2);
    without[0] = "{\"token\": \"" + pieces[0] + "\", \"bytes\": null}";
    faulty(without, "without a logprob");
}

// ------------------------------------------------------------------------------------------------ from rows to an adapter

static const char* datagen() { return program("DATAGEN", "./datagen"); }

struct TeacherEndpoint : Process {
    int port = 0;
    explicit TeacherEndpoint(const std::string& model) : Process(program("SERVE", "./serve"), {model, "-z", VOCABULARY, "-j", "1", "--port", "0"}) {
        for (const double start = seconds(); port == 0; usleep(2000)) {
            const std::string said = err.text(), before = "listening on http://127.0.0.1:";
            INFO(said);
            REQUIRE(seconds() - start < 60);
            const size_t at = said.find(before);
            if (at != std::string::npos && said.back() == '\n') port = atoi(said.c_str() + at + before.size());
        }
    }
    ~TeacherEndpoint() { kill(pid, SIGKILL), waitpid(pid, nullptr, 0); }
};

TEST_CASE("rows, an endpoint's answers with log-probabilities, packed rows, an adapter: as with --teacher; resume to the bit; ranks") {
    Scratch out;
    const std::string text = read_file("tests/fixtures/train/rows.jsonl");
    size_t cut = 0;
    for (int i = 0; i < 16; i++) cut = text.find('\n', cut) + 1;
    const std::string rows = out / "rows.jsonl", requests = out / "requests.jsonl", replies = out / "replies.jsonl", taught = out / "taught.jsonl", packed = out / "taught.bin";
    write_file(rows, text.substr(0, cut));
    must(datagen(), {"pack", "-z", VOCABULARY, rows, out / "rows.bin", "--info", "none"});
    train({TINY, out / "rows.bin", "--full", "--steps", "24", "--batch", "8", "--lr", "2e-3", "-o", out / "teacher"});
    const std::string teacher = out / "teacher/model.bin";
    must(datagen(), {"ask", rows, "--max-tokens", "200", "-o", requests});
    std::string asked = read_file(requests); // drawn by a seed, so that every run has the same answers
    CHECK(asked.find("\"top_logprobs\": 20") != std::string::npos);
    const std::string limit = "\"max_tokens\": 200";
    for (size_t at = 0; (at = asked.find(limit, at)) != std::string::npos; at += limit.size()) asked.insert(at, "\"seed\": 5, ");
    write_file(requests, asked);
    {
        const TeacherEndpoint endpoint(teacher);
        must(datagen(), {"generate", requests, "--url", format("http://127.0.0.1:%d", endpoint.port), "-o", replies});
    }
    must(datagen(), {"collect", replies, "--rows", rows, "-o", taught});
    const Result said = must(datagen(), {"pack", "-z", VOCABULARY, taught, packed});
    INFO(said.err);
    CHECK(said.err.find("logprobs") != std::string::npos);
    CHECK(said.err.find("; 0 alternatives are not in its vocabulary") != std::string::npos);
    CHECK(!fs::exists(out / "dataset_info.json"));
    const Dataset data(packed);
    REQUIRE(data.taught());
    CHECK(data.rows() > 8);
    CHECK(data.outcomes() >= 20);
    must(datagen(), {"stats", "-z", VOCABULARY, packed});
    const std::string unpacked = must(datagen(), {"unpack", "-z", VOCABULARY, packed}).out;
    CHECK(std::count(unpacked.begin(), unpacked.end(), '\n') == (long)data.rows());
    write_file(out / "answers.jsonl", unpacked); // the same rows without log-probabilities
    must(datagen(), {"pack", "-z", VOCABULARY, out / "answers.jsonl", out / "answers.bin", "--info", "none"});

    const Strings how = {"--rank", "4", "--alpha", "8", "--lr", "5e-3", "--warmup", "0", "--dropout", "0", "--batch", "4", "--steps", "12", "--no-shuffle"};
    train(Strings{TINY, packed, "-o", out / "file", "--eval", packed, "--allow-leak", "--eval-every", "12"} + how);
    train(Strings{TINY, out / "answers.bin", "--teacher", teacher, "-o", out / "whole"} + how);
    const std::vector<double> file = logged(out / "file", "divergence"), whole = logged(out / "whole", "divergence");
    REQUIRE(file.size() == 12);
    CHECK(file[11] < 0.7 * file[0]);
    CHECK(logged(out / "file", "eval_divergence").size() == 1);
    CHECK(logged(out / "file", "teacher_share").empty());
    CHECK(file[0] < whole[0]); // outcomes that are joined differ less
    CHECK(file[0] == doctest::Approx(whole[0]).epsilon(0.3));
    const Strings brief = Strings{TINY, packed, "-o", out / "o", "--overwrite"} + how;
    train(brief);
    const std::string result = adapter(out / "o");
    std::set<std::string> all = {result};
    for (const Strings& other : std::vector<Strings>{{"--distil-beta", "1"}, {"--distil-beta", "0.5"}, {"--distil-temp", "2"}, {"--distil-weight", "0.5"}}) {
        train(brief + other);
        CHECK(all.insert(adapter(out / "o")).second);
    }
    for (const Strings& other : {Strings{"--batch", "2", "--accum", "2"}, {"--recompute"}, {"-j", "2"}}) {
        train(brief + other);
        CHECK(adapter(out / "o") == result);
    }
    train(brief + Strings{"--eval", out / "rows.bin", "--eval-every", "12", "--allow-leak"}); // by cross entropy
    CHECK(logged(out / "o", "eval_loss").size() == 1);
    CHECK(logged(out / "o", "eval_divergence").empty());
    train(Strings{TINY, out / "rows.bin", "--eval", packed, "--allow-leak", "--eval-every", "12", "-o", out / "o", "--overwrite"} + how);
    CHECK(logged(out / "o", "eval_divergence").size() == 1);

    const Strings longer = Strings{TINY, packed, "--rank", "4", "--lr", "5e-3", "--steps", "30", "--batch", "4", "--dropout", "0.1", "--distil-beta", "0.5"};
    train(longer + Strings{"-o", out / "w"});
    Process p = start_training(longer + Strings{"-o", out / "parts"});
    interrupt_at_step(4, p, out / "parts");
    CHECK(logged(out / "parts", "loss").size() < 30);
    check_refusal(start_training(longer + Strings{"--distil-temp", "2", "-o", out / "parts", "--resume"}).wait(), "train_lora", "begun with distil-temp 1.0, not 2.0");
    train(longer + Strings{"-o", out / "parts", "--resume"});
    CHECK(adapter(out / "parts") == adapter(out / "w"));
    const Strings ranked = Strings{TINY, packed, "-d", "cpu"} + how;
    train(ranked + Strings{"-o", out / "one"});
    train(ranked + Strings{"--batch", "2", "--gpus", "2", "-o", out / "two"});
    for (const char* field : {"loss", "divergence", "agreement"}) {
        const std::vector<double> one = logged(out / "one", field), two = logged(out / "two", field);
        REQUIRE(two.size() == 12);
        CHECK(two[0] == doctest::Approx(one[0]).epsilon(1e-4));
    }

    auto refused = [&](const Strings& arguments, const std::string& word) { check_refusal(start_training(Strings{TINY} + arguments + Strings{"-o", out / "no"}).wait(), "train_lora", word); };
    refused({packed, "--teacher", teacher}, "rows with a teacher's log-probabilities: not with --teacher");
    refused({packed, "--grpo", "--reward", "exact"}, "rows with a teacher's log-probabilities: not with --grpo");
    refused({packed, "--dpo"}, "--dpo trains on pairs");
    refused({packed, "--on-policy", "0.5"}, "--on-policy is for --teacher");
    refused({out / "answers.bin", "--distil-beta", "1"}, "--distil-beta is for --teacher, or rows with a teacher's log-probabilities");
}

TEST_CASE("replies that cannot be taught are dropped by rule; rows with and without log-probabilities are not mixed") {
    Scratch out;
    const std::string rows = out / "rows.jsonl", requests = out / "requests.jsonl", replies = out / "replies.jsonl", taught = out / "taught.jsonl";
    write_file(rows, "{\"instruction\": \"Hi\", \"output\": \"a\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"Ho\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n");
    must(datagen(), {"ask", rows, "-o", requests, "--top-logprobs", "3", "--model", "big"});
    Strings ids;
    const std::string both = read_file(requests);
    for (const std::string& line : {both.substr(0, both.find('\n')), both.substr(both.find('\n') + 1)}) {
        const Json v(line);
        ids.push_back(v["custom_id"].str());
        CHECK(v["body"]["top_logprobs"].number() == 3);
        CHECK(v["body"]["logprobs"].boolean(false));
        CHECK(v["body"]["model"].str() == "big");
        CHECK(!v["body"]["max_tokens"]);
        CHECK(v["body"]["messages"].size() == 1);
    }
    auto reply = [&](const std::string& id, const std::string& choice, int status = 200) {
        return format("{\"custom_id\": \"%s\", \"response\": {\"status_code\": %d, \"body\": {\"choices\": [%s]}}}\n", id.c_str(), status, choice.c_str());
    };
    const std::string told = ", \"logprobs\": {\"content\": [" + entry("a", -0.1) + "]}}", message = "{\"message\": {\"content\": \"a\"}";
    write_file(replies, reply(ids[0], message + told) + reply(ids[0], message + told) + reply("row.9.0", message + told) + reply(ids[1], message + "}") + "{\n");
    const Result r = must(datagen(), {"collect", replies, "--rows", rows, "-o", taught});
    for (const char* rule : {"custom_id", "repeated", "logprobs", "line"}) {
        INFO(rule << "\n" << r.err);
        CHECK(r.err.find(format("  %-12s        1", rule)) != std::string::npos);
    }
    const std::string kept = read_file(taught);
    CHECK(std::count(kept.begin(), kept.end(), '\n') == 1);
    auto pack = [&](const std::string& text, const std::string& word) {
        write_file(out / "mixed.jsonl", text);
        check_refusal(Process(datagen(), {"pack", "-z", VOCABULARY, out / "mixed.jsonl", out / "mixed.bin", "--info", "none"}).wait(), "datagen", word);
    };
    const std::string plain = read_file(rows), good = read_file(taught);
    pack(good + plain, "logprobs: missing, which the rows before it have");
    pack(plain + good, "a teacher's logprobs, and no row before it has them");
    std::string odd = good;
    odd.replace(odd.find("[97]"), 4, "[97, 98, 99, 100]");
    pack(odd, "no row's logprobs can be used; the first: its tokens are not those of the answer");
}
