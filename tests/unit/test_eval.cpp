// --ppl and --eval, from outside: the program (QWEN3, else ./qwen3) on the random model in fixtures/tiny. What it
// must print is computed here from --logits, one window or row at a time.
#include "model/tokenizer.h"
#include "sj.h"
#include "tests/process.h"
#include <chrono>
#include <cmath>
#include <csignal>
#include <map>
#include <pty.h>
#include <thread>

using Ids = std::vector<int>;
using namespace std::literals;

static const char* PROGRAM = getenv("QWEN3") ? getenv("QWEN3") : "./qwen3";
static const std::string MODEL = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";
constexpr int V = 1024;

// ----------------------------------------------------------------------------------------- tools

// file_limit: bytes of the largest file; the write that would pass it kills the program. told: its stderr, if not `err`.
struct Qwen3 : Process {
    explicit Qwen3(const Strings& arguments, std::string_view input = "", rlim_t file_limit = RLIM_INFINITY, int told = 2)
        : Process(PROGRAM, arguments, input, [=] {
              const rlimit largest = {file_limit, file_limit};
              setenv("OMP_WAIT_POLICY", "passive", 1); // threads that spin starve each other on a busy machine
              setrlimit(RLIMIT_FSIZE, &largest);
              dup2(told, 2);
          }) {}
};

static const Strings TINY = {MODEL, "-z", VOCABULARY, "-j", "1"};

static std::string out_of(const Strings& arguments, std::string_view input = "") {
    const Result r = Qwen3(arguments, input).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
}

static void check_refused(const Strings& arguments, const std::string& word, std::string_view input = "") {
    check_refusal(Qwen3(arguments, input).wait(), "qwen3", word);
}

// -ln p(ids[i] | ids[0 .. i-1]) for i = 1, 2, ..., from --logits.
static std::vector<double> losses(const Ids& ids) {
    Scratch scratch;
    std::string list;
    for (int id : ids) list += format("%d ", id);
    out_of(TINY + Strings{"-c", "4096", "--ids", "-", "--logits", scratch / "logits"}, list);
    const std::string bytes = read_file(scratch / "logits");
    REQUIRE(bytes.size() == ids.size() * V * sizeof(float));
    std::vector<double> nll(1);
    std::vector<float> row(V);
    for (size_t i = 1; i < ids.size(); i++) {
        memcpy(row.data(), &bytes[(i - 1) * V * sizeof(float)], V * sizeof(float));
        long double sum = 0;
        for (float l : row) sum += std::exp((long double)l - row[(size_t)ids[i]]);
        nll.push_back((double)std::log(sum));
    }
    return nll;
}

static doctest::Approx near(double x) { return doctest::Approx(x).epsilon(1e-9); } // doubles summed in another order

// Some text without the names of special tokens.
static std::string prose(size_t n) {
    std::string text = read_file("LICENSE") + "一个线程束有32个线程。 GPU warp, 线程块和网格。\n";
    while (text.size() < n) text += text;
    while (((uint8_t)text[n] & 0xC0) == 0x80) n++;
    return text.substr(0, n);
}

// ------------------------------------------------------------------------------------------ perplexity

// By the definition: a token is scored in the first window that it is in, unless nothing is before it there.
static void check_perplexity(const std::string& text, size_t window, size_t stride, const Strings& options) {
    const Tokenizer tokenizer(VOCABULARY);
    const Ids ids = tokenizer.encode(text, false);
    std::map<size_t, std::vector<double>> windows;
    double sum = 0;
    size_t count = 0;
    for (size_t t = 0; t < ids.size(); t++) {
        size_t begin = 0;
        while (t >= begin + window) begin += stride;
        if (t == begin) continue;
        if (!windows.count(begin)) {
            const size_t end = std::min(begin + window, ids.size());
            windows[begin] = losses({ids.begin() + (ptrdiff_t)begin, ids.begin() + (ptrdiff_t)end});
        }
        sum += windows[begin][t - begin];
        count++;
    }
    Scratch scratch;
    write_file(scratch / "text", text);
    const Strings ask = TINY + Strings{"--ppl", scratch / "text"} + options;
    const Json got(out_of(ask + Strings{"--json"}));
    INFO(ids.size() << " tokens, window " << window << ", stride " << stride << ": " << got.text);
    CHECK(got["nll"].number() == near(sum / (double)count));
    CHECK(got["ppl"].number() == near(std::exp(sum / (double)count)));
    CHECK(got["tokens"].number() == (double)count);
    CHECK(got["window"].number() == (double)window);
    CHECK(got["stride"].number() == (double)stride);
    const std::string plain = format("nll %.6f ppl %.4f tokens %zu\n", got["nll"].number(), got["ppl"].number(), count);
    CHECK(out_of(ask) == plain);
    CHECK(out_of(TINY + Strings{"--ppl", "-"} + options, text) == plain);
}

TEST_CASE("--ppl of a text that one window holds") {
    check_perplexity(prose(700), 2048, 1024, {}); // the defaults
    check_perplexity(prose(700), 400, 7, {"-c", "400", "--stride", "7"});
    check_perplexity("ab", 2048, 1024, {});
    check_perplexity("<|im_end|><|endoftext|> is text here", 2048, 1024, {});
}

TEST_CASE("--ppl over windows with stride") {
    const std::string text = prose(100);
    for (auto [window, stride] : {std::pair{16, 8}, {16, 16}, {16, 5}, {17, 1}, {2, 1}, {2, 2}, {3, 2}, {40, 39}}) {
        const Strings options = {"-c", std::to_string(window), "--stride", std::to_string(stride)};
        check_perplexity(text, (size_t)window, (size_t)stride, options);
    }
    check_perplexity(text, 17, 8, {"-c", "17"});
    check_perplexity(prose(2600), 700, 300, {"-c", "700", "--stride", "300"}); // more than go through `forward` at once
}

TEST_CASE("--ppl does not depend on the number of threads") {
    const std::string text = prose(3000);
    auto with = [&](const char* threads) { return out_of({MODEL, "--ppl", "-", "-c", "300", "--json", "-j", threads}, text); };
    CHECK(with("1") == with("2"));
    CHECK(with("1") == with("3"));
}

TEST_CASE("--ppl: Ctrl-C ends it with status 130 and no result") {
    int terminal, its; // (a terminal is told each second how far it is, a file every 30)
    REQUIRE(openpty(&terminal, &its, nullptr, nullptr, nullptr) == 0);
    Qwen3 p(TINY + Strings{"--ppl", "-", "-c", "1000", "--stride", "1"}, prose(20000), RLIM_INFINITY, its); // minutes of work
    close(its);
    char said[200] = {};
    CHECK(read(terminal, said, sizeof said - 1) > 0);
    kill(p.pid, SIGINT);
    const Result r = p.wait();
    CHECK(r.status == 130);
    CHECK(r.out == "");
    CHECK(strstr(said, " tok/s, nll "));
    close(terminal);
}

TEST_CASE("--ppl: refused") {
    Scratch scratch;
    const std::string file = scratch / "text";
    write_file(file, "some text");
    auto ppl = [&](const Strings& more) { return TINY + Strings{"--ppl", file} + more; };
    check_refused(ppl({"--stride", "0"}), "--stride");
    check_refused(ppl({"-c", "8", "--stride", "9"}), "--stride 9");
    check_refused(ppl({"--stride", "2049"}), "--stride 2049");
    check_refused(ppl({"-c", "1"}), "--ctx 1");
    check_refused(ppl({"-c", "40961"}), "--ctx 40961");
    check_refused(ppl({"-i", "x"}), "one thing at a time");
    check_refused(ppl({"--eval", file, "-o", scratch / "out"}), "one thing at a time");
    check_refused(ppl({"-o", scratch / "out"}), "-o");
    check_refused(TINY + Strings{"-i", "x", "--stride", "3"}, "--stride");
    check_refused(TINY + Strings{"--ppl", "-"}, "standard input");
    check_refused(TINY + Strings{"--ppl", "-"}, "standard input", "a"); // one token
    check_refused(TINY + Strings{"--ppl", scratch / "none"}, scratch / "none");
    check_refused(TINY + Strings{"--ppl", scratch.path.string()}, scratch.path.string());
    write_file(file, "");
    check_refused(ppl({}), file);
}

// ------------------------------------------------------------------------------------------ evaluation

static std::string turn(const std::string& role, const std::string& text) {
    return "<|im_start|>" + role + "\n" + text + "<|im_end|>\n";
}
static const std::string ASKED = "<|im_start|>assistant\n", NO_THOUGHT = "<think>\n\n</think>\n\n";

static const char* QUESTIONS = R"({"instruction": "What is a warp?", "output": "A group of 32 threads.", "id": "q-1"}

{"messages": [{"role": "user", "content": "什么是线程束？"}, {"role": "assistant", "content": "32个线程。\n\n一起执行。"}], "id": {"n": [1.50, null]}}
{"instruction": "And", "input": "this?", "output": "", "history": [["first", "one"], ["second", "two"]], "system": "Be brief."}
)" R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}, )"
   R"({"role": "assistant", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}, )"
   R"({"role": "assistant", "content": "<|im_end|> is text"}]}
{"instruction": "no newline at the end", "input": "", "output": "fine", "history": null, "system": null})";

struct Expected { std::string id, question, reference, prompt; };
static const Expected EXPECTED[] = {
    {"\"q-1\"", "What is a warp?", "A group of 32 threads.", turn("user", "What is a warp?")},
    {"{\"n\": [1.5, null]}", "什么是线程束？", "32个线程。\n\n一起执行。", turn("user", "什么是线程束？")},
    {"", "And\nthis?", "",
     turn("system", "Be brief.") + turn("user", "first") + turn("assistant", "one") + turn("user", "second") +
         turn("assistant", "two") + turn("user", "And\nthis?")},
    {"", "c", "<|im_end|> is text", turn("system", "S") + turn("user", "a") + turn("assistant", "b") + turn("user", "c")},
    {"", "no newline at the end", "fine", turn("user", "no newline at the end")}};

// One run, each of its rows checked; `options` are for --eval, `generation` those of them that shape the answer.
static void check_evaluation(const Strings& options, const Strings& generation, const std::string& system, bool think) {
    const Tokenizer tokenizer(VOCABULARY);
    Scratch scratch;
    write_file(scratch / "qa", QUESTIONS);
    const Json summary(out_of(TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out", "--json"} + options));
    CHECK(!fs::exists(scratch / "out.partial"));
    const Strings rows = lines(read_file(scratch / "out"));
    REQUIRE(rows.size() == std::size(EXPECTED));
    double nll = 0, tokens = 0, ended = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        const Expected& e = EXPECTED[i];
        const Json row(rows[i]);
        INFO(row.text);
        CHECK(row["index"].number() == (double)i);
        CHECK((row["id"] ? sj::dump(row["id"]) : "") == e.id);
        CHECK(row["question"].str() == e.question);
        CHECK(row["reference"].str() == e.reference);

        std::string prompt = e.prompt + ASKED;
        if (!system.empty() && prompt.find("<|im_start|>system") != 0) prompt = turn("system", system) + prompt;
        Ids ids = tokenizer.encode(prompt + NO_THOUGHT, true), answer = tokenizer.encode(e.reference, false);
        const size_t begin = ids.size();
        ids.insert(ids.end(), answer.begin(), answer.end());
        for (int id : tokenizer.encode("<|im_end|>\n", true)) ids.push_back(id);
        const std::vector<double> each = losses(ids);
        double sum = 0;
        for (size_t t = begin; t < ids.size(); t++) sum += each[t];
        const double count = (double)(ids.size() - begin);
        CHECK(row["tokens"].number() == count);
        CHECK(row["nll"].number() == near(sum));
        CHECK(row["loss"].number() == near(sum / count));
        nll += sum, tokens += count;

        // The same question asked alone.
        const Json alone(out_of(TINY + Strings{"--raw", "-i", prompt + (think ? "" : NO_THOUGHT), "--json"} + generation));
        CHECK(row["answer"].str() == alone["text"].str());
        CHECK(row["finish"].str() == alone["finish_reason"].str());
        ended += alone["finish_reason"].str() == "stop";
    }
    CHECK(summary["rows"].number() == (double)rows.size());
    CHECK(summary["skipped"].number() == 0);
    CHECK(summary["ended"].number() == ended);
    CHECK(summary["tokens"].number() == tokens);
    CHECK(summary["loss"].number() == near(nll / tokens));
    fs::remove(scratch / "out");
    CHECK(out_of(TINY + Strings{"--eval", scratch / "qa", "--output", scratch / "out"} + options) ==
          format("rows %zu skipped 0 ended %d loss %.6f tokens %d\n", rows.size(), (int)ended, summary["loss"].number(), (int)tokens));
}

TEST_CASE("--eval: greedy answers as to the same question alone, and the loss that --logits gives") {
    check_evaluation({}, {"-t", "0", "-n", "512"}, "", false);
    check_evaluation({"-n", "9", "--repeat-penalty", "1.5"}, {"-t", "0", "-n", "9", "--repeat-penalty", "1.5"}, "", false);
}
TEST_CASE("--eval -r 1: a thought may begin the answer, the loss is without; -y where a row has no system prompt") {
    check_evaluation({"-n", "20", "-r", "1", "-y", "Sys"}, {"-t", "0", "-n", "20"}, "Sys", true);
}

TEST_CASE("--eval: a row that the context cannot hold is reported and left out") {
    Scratch scratch;
    const std::string good = R"({"instruction": "short", "output": "yes"})" "\n", x(400, 'x');
    write_file(scratch / "qa", good + R"({"instruction": "long", "output": ")" + x + "\"}\n" +
                                   R"({"instruction": ")" + x + R"(", "output": "y", "id": 5})" + "\n" + good);
    const Json summary(out_of(TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out", "-c", "60", "-n", "4", "--json"}));
    CHECK(summary["rows"].number() == 4);
    CHECK(summary["skipped"].number() == 2);
    const Strings rows = lines(read_file(scratch / "out"));
    REQUIRE(rows.size() == 4);
    const Json first(rows[0]), second(rows[1]), third(rows[2]), last(rows[3]);
    for (const Json* row : {&second, &third}) {
        CHECK((*row)["error"].str().find("context of 60") != std::string::npos);
        CHECK(!(*row)["answer"]);
        CHECK(!(*row)["nll"]);
    }
    CHECK(third["id"].number() == 5);
    CHECK(summary["loss"].number() == near(first["loss"].number()));
    CHECK(rows[3].substr(rows[3].find("question")) == rows[0].substr(rows[0].find("question"))); // what came between left nothing
    CHECK(summary["tokens"].number() == 2 * first["tokens"].number());
}

TEST_CASE("--eval: where the context can hold no row there is nothing to measure, and nothing is written") {
    Scratch scratch;
    const std::string x(400, 'x');
    write_file(scratch / "qa", R"({"instruction": "long", "output": ")" + x + "\"}\n" + R"({"instruction": ")" + x + R"(", "output": "y"})" + "\n");
    const Strings ask = TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out", "-c", "60"};
    check_refusal(Qwen3(ask).wait(), "qwen3", "every row is longer than the context of 60 tokens");
    CHECK(!fs::exists(scratch / "out"));
    CHECK(!fs::exists(scratch / "out.partial"));
}

TEST_CASE("--eval: killed at any byte, it goes on and ends with the same bytes") {
    Scratch scratch;
    write_file(scratch / "qa", QUESTIONS);
    auto ask = [&](const std::string& out) { // drawn, so that the draws must not depend on where it began
        return TINY + Strings{"--eval", scratch / "qa", "-o", out, "-n", "12", "-t", "1.2"};
    };
    const std::string summary = out_of(ask(scratch / "whole")), whole = read_file(scratch / "whole");
    const std::string out = scratch / "out", partial = out + ".partial";
    size_t header = 0;
    int killed = 0;
#ifdef __clang__ // LLVM's OpenMP makes a file of 1024 bytes of its own when it starts
    const size_t lowest = 1030;
#else
    const size_t lowest = 30;
#endif
    for (size_t limit = lowest; limit < header + whole.size() || !header; limit += 29) {
        const Result r = Qwen3(ask(out), "", limit).wait();
        INFO("limit " << limit << ": " << r.err);
        CHECK(r.status == 1000 + SIGXFSZ);
        CHECK(!fs::exists(out));
        const std::string left = read_file(partial);
        CHECK(left.size() == limit);
        if (!header && left.find('\n') != std::string::npos) header = left.find('\n') + 1;
        const auto rows = header ? std::count(left.begin() + (ptrdiff_t)header, left.end(), '\n') : 0;
        if (header) CHECK(left.substr(header) == whole.substr(0, limit - header));

        const Result rest = Qwen3(ask(out)).wait();
        INFO(rest.err);
        REQUIRE(rest.status == 0);
        CHECK(rest.out == summary);
        CHECK(read_file(out) == whole);
        CHECK(!fs::exists(partial));
        CHECK((rest.err.find(format("%d of 5 rows are there", (int)rows)) != std::string::npos) == (rows > 0));
        fs::remove(out);
        killed++;
    }
    CHECK(killed > 8);
    REQUIRE(header > 0);

    // All rows are there, and only the name was missing.
    REQUIRE(Qwen3(ask(out), "", header + whole.size() - 1).wait().status == 1000 + SIGXFSZ);
    const std::string left = read_file(partial).substr(0, header + whole.find('\n', whole.size() / 2) + 1); // whole rows
    write_file(partial, left.substr(0, header) + whole);
    CHECK(out_of(ask(out)) == summary);
    CHECK(read_file(out) == whole);

    // Output begun with other settings, or damaged, is refused and stays as it is.
    fs::remove(out);
    auto check_stays = [&](const std::string& content, const Strings& arguments, const std::string& word) {
        write_file(partial, content);
        check_refused(arguments, word);
        CHECK(read_file(partial) == content);
        CHECK(!fs::exists(out));
    };
    const std::string begun = "begun with another";
    const std::vector<Strings> others = {
        {"-n", "13"}, {"-t", "1.3"}, {"-s", "1"}, {"-r", "1"}, {"-c", "500"}, {"-y", "x"}, {"--stop", "x"}, {"-k", "3"},
        {"-p", "0.5"}, {"--min-p", "0.5"}, {"--repeat-penalty", "2"}, {"--presence-penalty", "2"}, {"--frequency-penalty", "2"},
        {"--dtype", "int8"}, {"--dtype", "f32"}, {"--kv-dtype", "fp8"}};
    for (auto& more : others)
        check_stays(left, ask(out) + more, begun);
    check_stays("someone's notes, without a newline", ask(out), begun);
    const size_t half = left.find('\n', header) - 5;
    check_stays(left.substr(0, half) + "\n" + left.substr(half), ask(out), "line 2 is damaged");
    check_stays(left.substr(0, header) + whole + lines(whole)[0] + "\n", ask(out), "line 7 is damaged");
    std::string model = read_file(MODEL);
    model[model.size() - 100] ^= 1;
    write_file(scratch / "model", model);
    Strings other = ask(out);
    other[0] = scratch / "model";
    check_stays(left, other, begun);
    write_file(scratch / "qa", std::string(QUESTIONS) + "\n" + QUESTIONS);
    check_stays(left, ask(out), begun);
}

TEST_CASE("--eval: Ctrl-C keeps the rows that are there, exit status 130") {
    Scratch scratch;
    std::string many;
    for (int i = 0; i < 100; i++) many += R"({"instruction": "?", "output": "!"})" "\n";
    write_file(scratch / "qa", many);
    // A presence penalty of -100 repeats the first token without end.
    Qwen3 p(TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out", "-n", "1000000", "-c", "1000",
                           "--presence-penalty", "-100"});
    const std::string partial = scratch / "out.partial";
    auto rows = [&] {
        const std::string text = fs::exists(partial) && fs::file_size(partial) ? read_file(partial) : "";
        return std::count(text.begin(), text.end(), '\n') - 1;
    };
    for (int ms = 0; ms < 30000 && rows() < 1; ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    check_refused(TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out"}, "another run");
    kill(p.pid, SIGINT);
    const Result r = p.wait();
    INFO(r.err);
    CHECK(r.status == 130);
    CHECK(r.out == "");
    CHECK(!fs::exists(scratch / "out"));
    const Strings all = lines(read_file(partial));
    CHECK(all.size() > 1);
    CHECK(all.size() < 101);
    for (size_t i = 1; i < all.size(); i++) {
        const Json row(all[i]);
        CHECK(row["index"].number() == (double)i - 1);
        CHECK(row["finish"].str() == "length");
    }
    CHECK(r.err.find(format("%zu of 100 rows", all.size() - 1)) != std::string::npos);
}

TEST_CASE("--eval: one reader: an array, a byte order mark, ShareGPT, lists of parts and null, as in datagen pack") {
    Scratch scratch;
    const std::string plain = R"({"instruction": "Q", "output": "A"})";
    auto eval = [&](const std::string& text) {
        write_file(scratch / "qa", text);
        const std::string all = out_of(TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out", "-n", "4"});
        const std::string rows = read_file(scratch / "out");
        fs::remove(scratch / "out");
        return all + rows;
    };
    const std::string first = eval(plain + "\n");
    for (const std::string& text : {"\xEF\xBB\xBF" + plain, "[\n" + plain + "\n]\n", "\xEF\xBB\xBF[" + plain + "]", R"({"instruction": "", "input": "Q", "output": "A", "id": null, "messages": null})"s,
             R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "tools": null})"s, R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, {"role": "assistant", "content": "A"}], "instruction": null})"s}) {
        INFO(text);
        CHECK(eval(text) == first);
    }
    // One system prompt, from a column or a turn.
    const std::string with = eval(R"({"instruction": "Q", "output": "A", "system": "S"})");
    CHECK(with != first);
    CHECK(eval(R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "system": "S"})") == with);
    CHECK(eval(R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "system": "T"})") == with);
    write_file(scratch / "qa", "\xFF\xFE{\0"s);
    check_refused(TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out"}, "UTF-16; convert it first");
    write_file(scratch / "qa", "[" + plain + ",\n\n{\"instruction\": \"Q\"");
    check_refused(TINY + Strings{"--eval", scratch / "qa", "-o", scratch / "out"}, "line 3: the array has no end");
}

TEST_CASE("--eval: refused, in one line that names the file and the line") {
    Scratch scratch;
    const std::string qa = scratch / "qa", out = scratch / "out";
    const Strings ask = TINY + Strings{"--eval", qa, "-o", out, "-n", "1"};
    const std::string good = R"({"instruction": "?", "output": "!"})" "\n", where = qa + ": line 3";
    const struct { const char *row, *fault; } bad[] = {
        {"{\"instruction\": \"?\"", "byte 19"},
        {"\xff", "byte 0"},
        {"[]", "not an object"},
        {R"({"output": "!"})", "instruction: missing"},
        {R"({"instruction": "?"})", "output: missing"},
        {R"({"instruction": "?", "output": null})", "output"},
        {R"({"instruction": ["?"], "output": "!"})", "instruction: not a string"},
        {R"({"instruction": "?", "output": "!", "input": 3})", "input: not a string"},
        {R"({"instruction": "?", "output": "!", "system": {}})", "system: not a string"},
        {R"({"instruction": "?", "output": "!", "history": "x"})", "history"},
        {R"({"instruction": "?", "output": "!", "history": [["x"]]})", "history"},
        {R"({"instruction": "?", "output": "!", "history": [["x", 1]]})", "history"},
        {R"({"messages": {}})", "messages"},
        {R"({"messages": []})", "messages"},
        {R"({"messages": [{"role": "user", "content": "?"}]})", "messages"},
        {R"({"messages": [{"role": "assistant", "content": "!"}]})", "messages"},
        {R"({"messages": [{"role": "nobody", "content": "?"}, {"role": "assistant", "content": "!"}]})", "nobody"},
        {R"({"messages": [{"role": "user", "content": "?"}, )"
         R"({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}]})", "tool calls"},
        {R"({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], "tools": "x"})", "tools"}};
    for (auto& b : bad) {
        write_file(qa, good + "\n" + b.row + "\n" + good);
        INFO(b.row);
        check_refused(ask, where);
        check_refused(ask, b.fault);
    }
    CHECK(scratch.count() == 1); // nothing was begun
    write_file(qa, " \n\n");
    check_refused(ask, qa + ": no row");
    write_file(qa, "");
    check_refused(ask, qa);
    fs::remove(qa);
    check_refused(ask, qa);
    write_file(qa, good);
    check_refused(TINY + Strings{"--eval", qa}, "-o");
    check_refused(TINY + Strings{"--eval", qa, "-o", scratch / "no/such/folder"}, "no/such/folder");
    check_refused(TINY + Strings{"--eval", qa, "-o", out, "-i", "x"}, "one thing at a time");
    write_file(out, "precious");
    check_refused(ask, out + ": exists");
    CHECK(read_file(out) == "precious");
    CHECK(scratch.count() == 2);
}
