// `make report` (tests/bench/report.sh, report.awk): ceilings and shares of recorded outputs (tests/fixtures/report),
// computed another way than report.awk does; the script with programs that fail, hang or lack memory.
#include "sj.h"
#include "tests/process.h"
#include <cmath>
#include <map>

using namespace std::literals;

static const std::string ROOT = fs::current_path().string(), RECORDED = ROOT + "/tests/fixtures/report/";

namespace {
struct Row {
    double rate, ceiling, share;
    std::string bound;
};
struct Report {
    std::map<std::string, Row> rows;
    Strings failed;
    std::string text;
    explicit Report(const std::string& json) : text(json) {
        const Json j(json);
        const sj::Value list = j["rows"], faults = j["failed"];
        for (size_t i = 0; list[i]; i++) {
            const sj::Value v = list[i];
            rows[v["work"].str()] = {v["tokens_per_s"].number(), v["ceiling_tokens_per_s"].number(),
                                     v["share"].number(), v["bound"].str()};
        }
        for (size_t i = 0; faults[i]; i++) failed.push_back(faults[i].str());
    }
    const Row& operator[](const std::string& name) const {
        INFO(name << " in " << text);
        REQUIRE(rows.count(name) == 1);
        return rows.at(name);
    }
};
} // namespace

static std::string summary(const char* form, const Strings& files) {
    const Strings words = {"awk", "-v", "form="s + form, "-f", ROOT + "/tests/bench/report.awk"};
    const Result r = Process("/usr/bin/env", words + files).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(r.err == "");
    return r.out;
}
static const Strings FILES = {RECORDED + "machine.tsv", RECORDED + "bench.json", RECORDED + "serve-exam.jsonl",
                              RECORDED + "lora-1x128.jsonl"};
static const double CLOSE = 3e-5;
static void near(double a, double b, double share) {
    INFO(a << " and " << b);
    CHECK(std::abs(a - b) <= share * std::abs(b));
}

// The 0.6B's shape, and what of it a token reads and multiplies: a layer's matrices one by one.
struct Matrix { double rows, columns; };
static const Matrix LAYER[] = {{2048, 1024}, {1024, 1024}, {1024, 1024}, {1024, 2048}, // q, k, v, o
                               {3072, 1024}, {3072, 1024}, {1024, 3072}};              // gate, up, down
static const double LAYERS = 28, HEAD = 151936. * 1024, PAIR = 4 * LAYERS * 2048, KEY = LAYERS * 2 * 1024 * 2;
static double layers() {
    double n = 0;
    for (const Matrix& m : LAYER) n += LAYERS * m.rows * m.columns;
    return n;
}

TEST_CASE("report: every row's share is its rate over a ceiling that was measured") {
    const Report report(summary("json", FILES));
    CHECK(report.rows.size() == 7); // a prompt, four positions, exam, LoRA
    CHECK(report.failed.empty());
    const Json bench(read_file(RECORDED + "bench.json"));
    const double multiply = bench["multiply_GFLOPs"].number() * 1e9;
    for (auto& entry : report.rows) {
        INFO(entry.first);
        auto& row = entry.second;
        CHECK(row.share > 0);
        CHECK(row.share < 1);
        near(row.rate / row.ceiling, row.share, CLOSE);
    }

    // --bench's own shares. Its bytes per token are the shape's that the other rows are judged by.
    size_t positions = 0;
    for (size_t i = 0; bench["rows"][i]; i++) {
        const sj::Value v = bench["rows"][i];
        const bool decode = v["work"].str() == "decode";
        const int position = (int)v["position"].number();
        const Row& row = report[format(decode ? "decode at %d" : "prompt of %d", position)];
        near(row.rate, v["tokens_per_s"].number(), CLOSE);
        near(row.share, v[decode ? "read_share" : "multiply_share"].number(), CLOSE);
        CHECK(row.bound == (decode ? "read" : "multiply"));
        if (!decode) continue;
        near(v["bytes_per_token"].number(), 2 * (layers() + HEAD) + KEY * (position + 1), 1e-6);
        positions++;
    }
    CHECK(positions == 4);

    // LoRA: its log's last line less its first one; products forward and by their input, adapters of rank 32.
    double adapters = 0, pairs = 0;
    for (const Matrix& m : LAYER) adapters += LAYERS * 32 * (m.rows + m.columns);
    for (int i = 1; i <= 128; i++) pairs += i;
    const Row& lora = report["LoRA 1 x 128"];
    near(lora.ceiling, multiply / (4 * (layers() + HEAD) + 6 * adapters + 3.5 * PAIR * pairs / 128), CLOSE);
    std::vector<double> tokens, at;
    for (auto& line : lines(read_file(RECORDED + "lora-1x128.jsonl"))) {
        const Json j(line);
        tokens.push_back(j["total_tokens"].number()), at.push_back(tokens.back() / j["throughput"].number());
    }
    REQUIRE(tokens.size() >= 2);
    near(lora.rate, (tokens.back() - tokens[0]) / (at.back() - at[0]), CLOSE);
}

// serve's row, token by token, of the recorded answers so many times over.
static void check_serve(const std::string& bench_file, int times, int slots, const char* bound) {
    Scratch folder;
    Strings recorded = lines(read_file(RECORDED + "serve-exam.jsonl"));
    const std::string last = recorded.back();
    recorded.pop_back();
    double out = 0, keys = 0, flop = 0, longest = 0, time = 0;
    REQUIRE(sscanf(last.c_str() + last.find("tokens in"), "tokens in %lf s", &time) == 1);
    std::string answers;
    for (int again = 0; again < times; again++)
        for (auto& line : recorded) {
            answers += line + "\n";
            const Json j(line);
            const sj::Value usage = j["response"]["body"]["usage"];
            const int p = (int)usage["prompt_tokens"].number(), a = (int)usage["completion_tokens"].number();
            REQUIRE(p > 0);
            for (int i = 0; i < p + a - 1; i++) {
                flop += 2 * layers() + PAIR * i;
                if (i >= p) keys += i;
            }
            out += a, longest = std::max(longest, (double)a), flop += 2 * HEAD * a;
        }
    write_text(folder / "serve-exam.jsonl", answers + last + "\n");
    const Json bench(read_file(bench_file));
    const double reading = (2 * (layers() + HEAD) * std::max(longest, out / slots) + KEY * keys) / 1e9;
    const double multiplying = flop / 1e9 / bench["multiply_GFLOPs"].number();
    const double floor = std::max(reading / bench["read_GBps"].number(), multiplying);
    const Report report(summary("json", {FILES[0], bench_file, folder / "serve-exam.jsonl"}));
    const Row& row = report[format("serve exam, %d requests", 4 * times)];
    near(row.rate, out / time, CLOSE);
    near(row.ceiling, out / floor, CLOSE);
    CHECK(row.bound == bound);
}

TEST_CASE("report: serve's floor is reading or multiplying, in so many slots") {
    Scratch folder; // the same machine, multiplying a million times as fast; and one that is a GPU
    std::string fast = read_file(RECORDED + "bench.json");
    const std::string name = "\"multiply_GFLOPs\": ";
    REQUIRE(fast.find(name) != fast.npos);
    fast.insert(fast.find(name) + name.size(), "1000000");
    std::string gpu = fast;
    REQUIRE(gpu.find("\"cpu\"") != gpu.npos);
    gpu.replace(gpu.find("\"cpu\""), 5, "\"A card\"");
    fs::create_directory(folder / "gpu");
    write_text(folder / "bench.json", fast), write_text(folder / "gpu/bench.json", gpu);
    check_serve(FILES[1], 1, 16, "multiply");
    check_serve(folder / "bench.json", 1, 16, "read");      // as many steps as the longest answer has tokens
    check_serve(folder / "bench.json", 10, 16, "read");     // as all tokens need
    check_serve(folder / "gpu/bench.json", 10, 256, "read");
}

TEST_CASE("report: a long log counts from its fifth step; a missing file is a row less; errors are told") {
    Scratch folder;
    std::string log; // ten seconds for each of the first five steps, then two
    for (int step = 1; step <= 12; step++) {
        const double seconds = step < 6 ? 10. * step : 50 + 2. * (step - 5), tokens = 8192e3 * step;
        log += format("{\"throughput\": %.2f, \"total_tokens\": %.0f}\n", tokens / seconds, tokens);
    }
    write_text(folder / "lora-16x512.jsonl", log);
    const std::string last = "x: 4 answers, 2 errors among those of this run; 9 tokens in 0 s, 0 tok/s\n";
    write_text(folder / "serve-nano.jsonl", read_file(RECORDED + "serve-exam.jsonl") + last);
    const Strings files = {FILES[0], FILES[1], folder / "lora-16x512.jsonl", folder / "serve-nano.jsonl"};
    const Report report(summary("json", files));
    near(report["LoRA 16 x 512"].rate, 8192e3 / 2, CLOSE);
    CHECK(report.rows.size() == 7);
    CHECK(report.rows.count("serve exam, 4 requests") == 0);
    REQUIRE(report.failed.size() == 1);
    CHECK(report.failed[0] == "serve-nano: 2 requests were answered by an error");
    const Report none(summary("json", {FILES[0]}));
    CHECK(none.rows.empty());
}

TEST_CASE("report: the page has the rows, the versions, and a line that fits the table of docs/cards.md") {
    const std::string page = summary("md", FILES);
    CHECK(page.find("| serve exam, 4 requests | ") != page.npos);
    CHECK(page.find("| commit | ") != page.npos);
    const std::string head = "| card | ", cards = read_file("docs/cards.md");
    auto columns = [](const std::string& text, size_t at) {
        const std::string line = text.substr(at, text.find('\n', at) - at);
        return std::count(line.begin(), line.end(), '|');
    };
    REQUIRE(cards.find(head) != cards.npos);
    CHECK(columns(cards, cards.find(head)) == 14);
    CHECK(columns(page, page.rfind("\n| ") + 1) == 14);
}

// Programs that print the records, as if by a GPU; `asked` has a line for each call of train_lora.
static Result run(const Scratch& folder, const std::string& most, const std::string& bench, const std::string& serve,
                  const std::string& train) {
    auto put = [&](const std::string& name, const std::string& body) {
        write_text(folder / name, "#!/bin/sh\n" + body + "\n");
        fs::permissions(folder / name, fs::perms::owner_all);
    };
    const std::string last = "for last in \"$@\"; do :; done\n";
    put("qwen3", "[ \"$1\" != --synthesize ] || { : >\"$3\"; exit; }\n" + bench);
    put("bench_serve", last + ": >\"$last\"");
    put("serve", last + serve);
    put("train_lora", "echo \"$*\" >>" + folder / "asked" +
                          "\nwhile [ \"$1\" != -o ]; do shift; done; mkdir \"$2\"\n" + train);
    put("rows", ": >\"$2\"");
    const Strings environment = {"PROGRAMS=" + folder.path.string(), "ROWS=" + folder / "rows", "SECONDS_MOST=" + most};
    const Strings script = {"sh", ROOT + "/tests/bench/report.sh", folder / "out", folder / "m.bin"};
    return Process("/usr/bin/env", environment + script).wait();
}
static const std::string BENCH = "sed 's/\"device\": \"cpu\"/\"device\": \"A card\"/' '" + RECORDED + "bench.json'",
                         SERVE = "grep '^{' '" + RECORDED + "serve-exam.jsonl' >\"$last\"\n"
                                 "tail -n 1 '" + RECORDED + "serve-exam.jsonl' >&2",
                         TRAIN = "cp '" + RECORDED + "lora-1x128.jsonl' \"$2/trainer_log.jsonl\"";

TEST_CASE("report.sh: all steps; training in the first way that fits") {
    Scratch folder;
    const std::string train = "case \"$*\" in\n*' 16 --recompute' | *accum*) " + TRAIN +
                              ";;\n*) echo 'm.bin: training needs 5 bytes' >&2; exit 1;;\nesac";
    const Result r = run(folder, "600", BENCH, SERVE, train);
    INFO(r.err);
    CHECK(r.status == 0);
    const Report report(read_file(folder / "out/report.json"));
    CHECK(report.failed.empty());
    CHECK(report.rows.size() == 9);
    CHECK(report["LoRA 16 x 512, --batch 16 --recompute"].share > 0);
    CHECK(report["LoRA 64 x 512, --batch 16 --accum 4 --recompute"].share > 0);
    CHECK(report["serve nano, 4 requests"].share > 0);
    CHECK(lines(read_file(folder / "asked")).size() == 5);
    CHECK(r.out == read_file(folder / "out/report.md"));
    for (auto& file : fs::directory_iterator(folder / "out")) CHECK(file.path().extension() != ".new");
    CHECK(r.err.compare(0, 23, "report:   0 s  machine\n") == 0);
}

TEST_CASE("report.sh: a step that fails or does not end is one line, and the others are kept") {
    Scratch folder;
    const std::string refuse = "echo 'warming up' >&2; echo 'serve: m.bin: no memory' >&2; exit 1";
    const Result r = run(folder, "600", BENCH, refuse, TRAIN);
    INFO(r.err);
    CHECK(r.status == 1);
    CHECK(r.err.find("s  serve-nano failed: serve: m.bin: no memory\n") != r.err.npos);
    const Report report(read_file(folder / "out/report.json"));
    CHECK(report.failed == Strings{"serve-nano: serve: m.bin: no memory", "serve-exam: serve: m.bin: no memory"});
    CHECK(report.rows.size() == 7);
    CHECK(report["LoRA 16 x 512"].share > 0);

    Scratch slow; // the whole has ten seconds, of which eight are kept for the end
    const Result late = run(slow, "10", "exec sleep 60", SERVE, TRAIN);
    INFO(late.err);
    CHECK(late.status == 1);
    const Report rest(read_file(slow / "out/report.json"));
    REQUIRE(!rest.failed.empty());
    CHECK(rest.failed[0].compare(0, 20, "bench: no end within") == 0);
    CHECK(read_file(slow / "out/report.md").find("Not measured:") != std::string::npos);
}
