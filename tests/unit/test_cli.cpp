// The built program, run as a user runs it: what it prints and where, its exit status, the files it leaves.
// Environment: QWEN3 names the program (default ./qwen3). Its output goes to memory, not to disk.
#include "qwen3.h"
#include "sj.h"
#include "tests/files.h"
#include <chrono>
#include <cmath>
#include <csignal>
#include <random>
#include <set>
#include <sstream>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>

using namespace std::literals; // ""s may hold \0
using Strings = std::vector<std::string>;

static const std::string PROGRAM = fs::absolute(getenv("QWEN3") ? getenv("QWEN3") : "./qwen3").string();
static const std::string FIXTURES = fs::absolute("tests/fixtures").string();
static const std::string TINY = FIXTURES + "/tiny/model.bin", VOCABULARY = FIXTURES + "/tiny/tokenizer.bin";
constexpr int V = 1024, CONTEXT = 4096; // of TINY

// ----------------------------------------------------------------------------------------- tools

struct Result {
    int status, signal; // exit status, -1 if a signal ended the program; that signal, or 0
    std::string out, err;
};

struct Setting { // what a run may have in place of the usual
    std::string program = PROGRAM, folder = ".", in, out; // in, out: paths, where not memory
    unsigned alarm_s = 60;
    bool passive = true;                                  // threads wait without spinning
    int closed = -1;                                      // a descriptor that is not open
    rlim_t file_limit = RLIM_INFINITY;                    // bytes of the largest file: a full disk
};

struct Process {
    MemoryFile in, out, err;
    pid_t pid;

    explicit Process(const Strings& arguments, std::string_view input = "", const Setting& setting = {})
        : in(input) {
        std::vector<char*> argv = {(char*)setting.program.c_str()};
        for (auto& a : arguments) argv.push_back((char*)a.c_str());
        argv.push_back(nullptr);
        out.append_only(), err.append_only();
        pid = fork();
        REQUIRE(pid >= 0);
        if (pid) return;
        int from = setting.in.empty() ? in.fd : open(setting.in.c_str(), O_RDONLY);
        int to = setting.out.empty() ? out.fd : open(setting.out.c_str(), O_WRONLY);
        const rlimit largest = {setting.file_limit, setting.file_limit};
        signal(SIGXFSZ, SIG_IGN); // a write beyond the limit then fails as one on a full disk does
        if (setting.passive) setenv("OMP_WAIT_POLICY", "passive", 1);
        else unsetenv("OMP_WAIT_POLICY");
        bool ready = dup2(from, 0) == 0 && dup2(to, 1) == 1 && dup2(err.fd, 2) == 2;
        if (setting.closed >= 0) close(setting.closed);
        if (ready && chdir(setting.folder.c_str()) == 0 && setrlimit(RLIMIT_FSIZE, &largest) == 0) {
            alarm(setting.alarm_s);
            execv(argv[0], argv.data());
        }
        fprintf(stderr, "%s: %s\n", argv[0], strerror(errno));
        _exit(127);
    }
    Result wait() {
        int status;
        REQUIRE(waitpid(pid, &status, 0) == pid);
        const int exit = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
                  signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        return {exit, signal, out.text(), err.text()};
    }
};

static Result run(const Strings& arguments, std::string_view input = "", const Setting& setting = {}) {
    return Process(arguments, input, setting).wait();
}

// `more` to the tiny model, on one thread.
static Strings tiny(Strings more) {
    Strings all = {TINY, "-z", VOCABULARY, "-j", "1"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
}

// The output of a run that must succeed.
static std::string out_of(const Strings& arguments, std::string_view input = "",
                          const Setting& setting = {}) {
    Result r = run(arguments, input, setting);
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
}

// The fault of an error message: it must be one line, "qwen3: ...", without control characters.
static std::string bad_message(const std::string& err) {
    if (err.compare(0, 7, "qwen3: ") != 0) return "it does not begin with 'qwen3: '";
    if (err.size() < 9 || err.back() != '\n') return "it is no whole line";
    for (char c : err.substr(0, err.size() - 1))
        if ((unsigned char)c < 0x20) return "it holds a control character";
    return "";
}

// Refused: nothing on stdout, one line on stderr that speaks of `word`, exit status 1.
static void check_refused(const Strings& arguments, const std::string& word, const Setting& setting = {}) {
    Result r = run(arguments, "", setting);
    std::string line;
    for (auto& a : arguments) line += a + " ";
    INFO(line << "\nwanted: " << word << "\ngot: " << r.err);
    CHECK(r.status == 1);
    CHECK(r.out == "");
    CHECK(bad_message(r.err) == "");
    CHECK(r.err.find(word) != std::string::npos);
}

struct Answer { // of --json
    std::string text, finish, seed;
    std::vector<int> ids;
    int64_t prompt_tokens = -1, answer_tokens = -1;
};
static Answer parse_answer(const std::string& json) {
    INFO(json);
    sj::Doc doc;
    REQUIRE(sj::parse(doc, json) == "");
    REQUIRE(std::count(json.begin(), json.end(), '\n') == 1);
    sj::Value root = doc.root(), timings = root["timings"];
    Answer a;
    CHECK(root["text"].is(sj::String));
    a.text = root["text"].str();
    a.finish = root["finish_reason"].str();
    a.seed = std::string(root["seed"].raw());
    for (sj::Value v : root["ids"].items()) {
        int64_t id = -1;
        CHECK(v.integer(&id));
        a.ids.push_back((int)id);
    }
    CHECK(root["prompt_tokens"].integer(&a.prompt_tokens));
    CHECK(root["answer_tokens"].integer(&a.answer_tokens));
    CHECK((size_t)a.answer_tokens == a.ids.size());
    for (const char* key : {"load_s", "prompt_s", "prompt_tokens_per_s", "decode_s", "decode_tokens_per_s", "lookup_proposed",
                            "lookup_right"}) {
        CHECK(timings[key].is(sj::Number));
        CHECK(timings[key].number() >= 0);
    }
    return a;
}
static Answer answer(Strings arguments) {
    arguments.push_back("--json");
    return parse_answer(out_of(arguments));
}

static std::string join(const std::vector<int>& ids, const char* between) {
    std::string s;
    for (int id : ids) s += (s.empty() ? "" : between) + std::to_string(id);
    return s;
}
// n ids of the tiny vocabulary, always the same.
static std::vector<int> some_ids(size_t n) {
    std::vector<int> ids;
    std::mt19937 random(5);
    while (ids.size() < n) ids.push_back((int)(random() % V));
    return ids;
}
// ----------------------------------------------------------------------------------------- text and ids

TEST_CASE("tokenize and detokenize: any bytes go there and back") {
    const struct { std::string text, back; } cases[] = {
        {"", ""},
        {"Hello, world!\n", "Hello, world!\n"},
        {"a\0b\0"s, "a\0b\0"s},
        {" \t\r\n  x  ", " \t\r\n  x  "},
        {"什么是线程束？", "什么是线程束？"},
        {"👩‍👩‍👧‍👦🇨🇳👍🏽", "👩‍👩‍👧‍👦🇨🇳👍🏽"},
        {"안녕 שלום สวัสดี", "안녕 שלום สวัสดี"},
        {"<|im_start|>user\n<think>x", "<|im_start|>user\n<think>x"},
        {"--help", "--help"},
        {"-", "-"},
        {"e\xcc\x81", "\xc3\xa9"},                     // NFC
        {"\xff\xfe", "\xef\xbf\xbd\xef\xbf\xbd"},     // what is not UTF-8 becomes U+FFFD, as Python has it
        {"a\xe4\xbb", "a\xef\xbf\xbd"},
    };
    for (const std::string& vocabulary : {VOCABULARY, fs::absolute("tokenizer.bin").string()})
        for (auto& c : cases) {
            INFO(vocabulary << ": " << c.text);
            std::string ids = out_of({"-z", vocabulary, "--tokenize", "-"}, c.text);
            CHECK(ids.back() == '\n');
            CHECK(ids.find_first_not_of("0123456789 \n") == std::string::npos);
            CHECK(std::count(ids.begin(), ids.end(), '\n') == 1);
            CHECK(out_of({"-z", vocabulary, "--detokenize", "-"}, ids) == c.back);
            if (c.text.find('\0') == std::string::npos && c.text != "-") {
                CHECK(out_of({"-z", vocabulary, "--tokenize", c.text}) == ids);
                CHECK(out_of({"-z", vocabulary, "--detokenize", ids}) == c.back);
            }
        }
    auto count = [](const char* text) { // of the ids
        std::string ids = out_of({"-z", VOCABULARY, "--tokenize", text});
        return 1 + std::count(ids.begin(), ids.end(), ' ');
    };
    CHECK(count("<|im_start|>") == 1); // a special token
    CHECK(count("<|im_star|>") > 1);
}

TEST_CASE("--lookup: the same answer with any number, from 0 to 7") {
    for (const char* temperature : {"0", "0.8"}) {
        const Strings ask = {TINY, "-z", VOCABULARY, "-i", "one two three one two three", "-t", temperature, "-s", "4", "-n", "80"};
        auto with = [&](const char* number) {
            Strings words = ask;
            words.insert(words.end(), {"--lookup", number});
            return answer(words);
        };
        const Answer usual = answer(ask), none = with("0");
        CHECK(usual.ids == none.ids);
        CHECK(usual.text == none.text);
        CHECK(usual.finish == none.finish);
        CHECK(with("1").ids == none.ids);
        CHECK(with("7").ids == none.ids);
    }
    check_refused({TINY, "-z", VOCABULARY, "-i", "x", "--lookup", "8"}, "--lookup");
    check_refused({TINY, "-z", VOCABULARY, "-i", "x", "--lookup", "-1"}, "--lookup");
    check_refused({TINY, "-z", VOCABULARY, "-i", "x", "--one-kernel", "on"}, "--one-kernel is for a GPU");
    check_refused({TINY, "-z", VOCABULARY, "-i", "x", "--one-kernel", "two"}, "--one-kernel two: on, off or phases");
}

TEST_CASE("tokenizer.bin is looked for beside the model, beside the program, in the working folder") {
    Scratch model, program, work;
    fs::copy_file(PROGRAM, program / "qwen3");
    fs::copy_file(TINY, model / "model.bin");
    Setting there;
    there.program = program / "qwen3", there.folder = work.path.string();
    const Strings ask = {model / "model.bin", "-i", "x", "-n", "0"};
    check_refused(ask, "no tokenizer.bin", there);
    CHECK(out_of({model / "model.bin", "--ids", "1", "-n", "1"}, "", there).size() > 1); // ids need none
    write_file(program / "tokenizer.bin", "junk");
    check_refused(ask, program / "tokenizer.bin", there);
    fs::copy_file(VOCABULARY, model / "tokenizer.bin"); // goes first
    CHECK(out_of(ask, "", there) == "\n");
    fs::remove(program / "tokenizer.bin");
    fs::rename(model / "tokenizer.bin", work / "tokenizer.bin");
    CHECK(out_of(ask, "", there) == "\n");
}

// ----------------------------------------------------------------------------------------- answers

TEST_CASE("an answer is text and a newline on stdout, and the rest on stderr") {
    Result r = run(tiny({"-i", "Hello", "-n", "12", "-s", "7"}));
    CHECK(r.status == 0);
    CHECK(r.err.find("seed 7") != std::string::npos);
    CHECK(r.err.find("tok/s") != std::string::npos);
    Answer a = answer(tiny({"-i", "Hello", "-n", "12", "-s", "7"}));
    CHECK(r.out == a.text + "\n");
    CHECK(a.text != "");
    CHECK(a.seed == "7");
    CHECK(out_of({"--help"}).compare(0, 6, "usage:") == 0);
}

TEST_CASE("a question needs no -i; a lone - is standard input, also there") {
    const Strings how = {"-t", "0", "-n", "12"};
    auto with = [&](Strings first) {
        first.insert(first.end(), how.begin(), how.end());
        return tiny(first);
    };
    const std::string asked = out_of(with({"-i", "Hello"}));
    CHECK(out_of(with({"Hello"})) == asked);
    CHECK(out_of(with({"-"}), "Hello\n") == asked);
    CHECK(out_of(with({"-i", "/help"})) != asked);
    CHECK(out_of({TINY, "-z", VOCABULARY, "-t", "0", "-n", "12", "--", "--help"}) == out_of(with({"-i", "--help"})));
}

TEST_CASE("a reader of standard output that leaves ends the program without a word, as it ends other filters") {
    Setting sh;
    sh.program = "/bin/sh";
    const Result r = run({"-c", "{ sleep 0.2; " + PROGRAM + " --help; echo $? >&2; } | true"}, "", sh);
    CHECK(r.status == 0);
    CHECK(r.err == "141\n"); // by SIGPIPE
}

TEST_CASE("one of a thing is not called many") {
    const Result one = run(tiny({"--ids", "1", "-n", "1"})), two = run(tiny({"--ids", "1,2", "-n", "2", "-t", "0"}));
    INFO(one.err << two.err);
    CHECK(one.err.find("cpu, 1 thread, ") != std::string::npos);
    CHECK(one.err.find("prompt 1 token, ") != std::string::npos);
    CHECK(one.err.find("answer 1 token, ") != std::string::npos);
    CHECK(two.err.find("prompt 2 tokens, ") != std::string::npos);
    CHECK(two.err.find("answer 2 tokens, ") != std::string::npos);
    CHECK(run({TINY, "-z", VOCABULARY, "--ids", "1", "-n", "1", "-j", "2"}).err.find("cpu, 2 threads, ") != std::string::npos);
}

TEST_CASE("--version: every program has the same, the library's") {
    const struct { const char *variable, *name; } programs[] = {
        {"QWEN3", "qwen3"}, {"TRAIN_LORA", "train_lora"}, {"DATAGEN", "datagen"}, {"SERVE", "serve"}};
    for (auto& p : programs) {
        const char* named = getenv(p.variable);
        Setting there;
        there.program = fs::absolute(named ? named : std::string("./") + p.name).string();
        if (!fs::exists(there.program)) continue; // `serve` needs a library
        INFO(p.name);
        CHECK(out_of({"--version"}, "", there) == format("%s %d\n", p.name, QWEN3_VERSION));
        const std::string help = out_of({"--help"}, "", there);
        CHECK(help.find(p.name + " --version"s) != std::string::npos);
        std::istringstream text(help);
        for (std::string line; std::getline(text, line);) CHECK((line.size() <= 100 || p.name == "datagen"s)); // (datagen has tables)
    }
}

TEST_CASE("greedy text is always the same; so is that of a seed, on any number of threads") {
    const Answer greedy = answer(tiny({"-i", "Hello", "-t", "0", "-n", "40"}));
    CHECK(greedy.ids.size() == 40);
    CHECK(answer(tiny({"-i", "Hello", "-t", "0", "-n", "40", "-s", "9"})).ids == greedy.ids);
    CHECK(answer(tiny({"-i", "Hello", "-k", "1", "-n", "40"})).ids == greedy.ids); // the likeliest one
    CHECK(answer(tiny({"-i", "Hello", "-p", "0", "-n", "40"})).ids == greedy.ids);
    CHECK(answer(tiny({"-i", "Hello", "--min-p", "1", "-n", "40"})).ids == greedy.ids);

    std::set<std::vector<int>> different;
    for (const char* seed : {"1", "2", "3", "18446744073709551615"}) {
        const Strings ask = {TINY, "-z", VOCABULARY, "-i", "Hello", "-n", "24", "-t", "1.5", "-s", seed};
        std::vector<Answer> answers;
        for (const char* threads : {"1", "2", "3"}) {
            Strings all = ask;
            all.insert(all.end(), {"-j", threads});
            answers.push_back(answer(all));
        }
        CHECK(answers[0].ids == answers[1].ids);
        CHECK(answers[0].ids == answers[2].ids);
        CHECK(answers[0].seed == seed);
        different.insert(answers[0].ids);
    }
    CHECK(different.size() == 4);

    // A random seed is printed, and reproduces the answer.
    Result random = run(tiny({"-i", "Hello", "-n", "24", "-t", "1.5", "--json"}));
    Answer first = parse_answer(random.out);
    CHECK(random.err.find("seed " + first.seed) != std::string::npos);
    CHECK(answer(tiny({"-i", "Hello", "-n", "24", "-t", "1.5", "-s", first.seed})).ids == first.ids);
    CHECK(answer(tiny({"-i", "Hello", "-n", "24", "-t", "1.5"})).seed != first.seed);
}

TEST_CASE("--json: the streamed text, its ids, why it ended") {
    int stopped = 0, decoded = 0;
    for (int seed = 0; seed < 10; seed++) {
        const Strings ask = tiny({"-i", "什么是warp？", "-n", "60", "-t", "1.5", "-s", std::to_string(seed)});
        Answer a = answer(ask);
        CHECK(out_of(ask) == a.text + "\n");
        CHECK(a.finish == (a.ids.size() < 60 ? "stop" : "length"));
        stopped += a.finish == "stop";
        std::string text = out_of({"-z", VOCABULARY, "--detokenize", join(a.ids, " ")});
        if (text.find("<|") != std::string::npos) continue; // text leaves special tokens out
        CHECK(text == a.text);
        decoded++;
    }
    CHECK(stopped > 0);
    CHECK(decoded > 0);
}

TEST_CASE("-n and -c bound the answer") {
    Result none = run(tiny({"-i", "Hello", "-n", "0"}));
    CHECK(none.status == 0);
    CHECK(none.out == "\n");
    const Answer zero = answer(tiny({"-i", "Hello", "-n", "0"}));
    const Answer one = answer(tiny({"-i", "Hello", "-n", "1", "-t", "0"}));
    CHECK(zero.ids.empty());
    CHECK(zero.text == "");
    CHECK(zero.finish == "length");
    CHECK(one.ids.size() == 1);
    CHECK(one.finish == "length");

    const int prompt = (int)one.prompt_tokens;
    auto with_context = [&](int c) { return tiny({"-i", "Hello", "-t", "0", "-c", std::to_string(c)}); };
    const Answer exact = answer(with_context(prompt)), three = answer(with_context(prompt + 3));
    CHECK(exact.ids == one.ids); // the last token needs no room: nothing is predicted from it
    CHECK(exact.finish == "length");
    CHECK(three.ids.size() == 4);
    CHECK(three.finish == "length");
    check_refused(with_context(prompt - 1), format("is %d tokens, the context %d", prompt, prompt - 1));
    check_refused(with_context(1), "the context 1");
    const std::string long_prompt = join(some_ids(CONTEXT + 1), ",");
    check_refused(tiny({"--ids", long_prompt, "-n", "1"}), format("the prompt is %d tokens", CONTEXT + 1));
}

TEST_CASE("the template: -y, -r and --raw, and the question from stdin") {
    auto hash = [](Strings more, std::string_view input = "") {
        more.push_back("--logits-hash");
        return out_of(tiny(more), input);
    };
    const std::string user = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
                      system = "<|im_start|>system\nBe brief.<|im_end|>\n",
                      closed = "<think>\n\n</think>\n\n";
    const std::string plain = hash({"-i", "Why?"}), thinking = hash({"-i", "Why?", "-r", "1"}),
                      briefly = hash({"-i", "Why?", "-y", "Be brief."});
    CHECK(plain == hash({"--raw", "-i", user + closed}));
    CHECK(thinking == hash({"--raw", "-i", user}));
    CHECK(briefly == hash({"--raw", "-i", system + user + closed}));
    CHECK(std::set<std::string>{plain, thinking, briefly, hash({"--raw", "-i", "Why?"})}.size() == 4);
    CHECK(plain == hash({"--input=Why?", "--think=0"}));
    CHECK(plain == hash({"-i", "-"}, "Why?"));
    CHECK(plain == hash({"-i", "-"}, "Why?\n")); // what echo adds
    CHECK(plain != hash({"-i", "-"}, "Why?\n\n"));
    CHECK(hash({"-i", "-"}, "a\0b"s) != hash({"-i", "-"}, "a"));
    // ids of the same prompt
    const std::string ids = out_of({"-z", VOCABULARY, "--tokenize", user + closed});
    CHECK(plain == hash({"--ids", ids}));
    CHECK(plain == hash({"--ids", "-"}, ids));
    // A question that looks like a special token stays text.
    const std::string looks = "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n" + closed;
    CHECK(hash({"-i", "<|im_end|>"}) != hash({"--raw", "-i", looks}));
}

// ----------------------------------------------------------------------------------------- logits

TEST_CASE("--logits: every position's, whatever the number of threads and however the prompt is cut") {
    Scratch s;
    const std::vector<int> ids = some_ids(700); // more than go through `forward` at once
    auto logits = [&](const std::vector<int>& prompt, const char* threads) {
        Result r = run({TINY, "-j", threads, "--ids", join(prompt, ","),
                        "--logits", s / "l", "--logits-hash"});
        CHECK(r.status == 0);
        std::string bytes = read_file(s / "l");
        CHECK(bytes.size() == prompt.size() * V * sizeof(float));
        CHECK(r.out == format("%016llx\n", (unsigned long long)fnv1a(bytes)));
        return bytes;
    };
    const std::string all = logits(ids, "1");
    CHECK(logits(ids, "2") == all);
    CHECK(logits(ids, "3") == all);
    for (size_t n : {1, 2, 33, 511, 512, 513, 699}) { // a position's logits know nothing of what follows
        INFO(n);
        CHECK(logits({ids.begin(), ids.begin() + (ptrdiff_t)n}, "1") == all.substr(0, n * V * sizeof(float)));
    }
    CHECK(s.count() == 1);

    // Decoding one token at a time sees what the prompt's logits say.
    // (Without a tokenizer every row may be drawn.)
    const std::vector<int> prompt(ids.begin(), ids.begin() + 500);
    Scratch bare;
    Setting there;
    fs::copy_file(PROGRAM, bare / "qwen3");
    fs::copy_file(TINY, bare / "m");
    there.program = bare / "qwen3", there.folder = bare.path.string();
    const Strings ask = {"m", "--ids", join(prompt, ","), "-t", "0", "-n", "30", "-j", "1", "--json"};
    const Answer a = parse_answer(out_of(ask, "", there));
    REQUIRE(a.ids.size() > 5);
    CHECK(a.text == join(a.ids, " "));
    std::vector<int> both = prompt;
    both.insert(both.end(), a.ids.begin(), a.ids.end());
    const std::string bytes = logits(both, "1");
    std::vector<float> rows(bytes.size() / sizeof(float));
    memcpy(rows.data(), bytes.data(), bytes.size());
    std::vector<int> likeliest;
    for (size_t n = prompt.size() - 1; n + 1 < both.size(); n++) {
        auto row = rows.begin() + (ptrdiff_t)(n * V);
        likeliest.push_back((int)(std::max_element(row, row + V) - row));
    }
    CHECK(likeliest == a.ids);
}

TEST_CASE("a Hugging Face folder gives the logits that transformers gives, and those of its model.bin") {
    for (const char* name : {"tied_f32", "untied_f32_sharded"}) {
        const std::string folder = FIXTURES + "/" + name, golden_text = read_file(folder + "/golden.json");
        sj::Doc golden;
        REQUIRE(sj::parse(golden, golden_text) == "");
        Scratch s;
        std::string got;
        for (sj::Value prompt : golden.root()["prompts"].items()) {
            std::string ids(prompt.raw());
            out_of({folder, "--ids", ids.substr(1, ids.size() - 2), "--logits", s / "l"});
            got += read_file(s / "l");
        }
        const std::string want = read_file(folder + "/logits.f32");
        REQUIRE(got.size() == want.size());
        double worst = 0;
        for (size_t i = 0; i < got.size(); i += 4) {
            float a, b;
            memcpy(&a, &got[i], 4), memcpy(&b, &want[i], 4);
            worst = std::max(worst, std::isnan(a) ? INFINITY : std::fabs((double)a - b));
        }
        CHECK(worst < 2e-4);
    }
    // model.bin is a safetensors file: with its config beside it, it is a folder's model.safetensors.
    Scratch s;
    const std::string bytes = read_file(TINY);
    uint64_t length;
    memcpy(&length, bytes.data(), 8);
    sj::Doc header;
    REQUIRE(sj::parse(header, std::string_view(bytes).substr(8, length)) == "");
    for (const char* name : {"config", "generation_config"})
        write_file(s / (name + ".json"s), header.root()["__metadata__"][name].str());
    write_file(s / "model.safetensors", bytes);
    const Strings rest = {"--ids", "1,2,3", "--logits-hash"};
    auto hash = [&](const std::string& model) { return out_of({model, "--ids", "1,2,3", "--logits-hash"}); };
    CHECK(hash(s.path.string()) == hash(TINY));
    fs::copy_file(VOCABULARY, s / "tokenizer.bin");
    auto text = [&](const std::string& model) { return out_of({model, "-i", "Hi", "-s", "3", "-n", "20"}); };
    CHECK(text(s.path.string()) == text(TINY));
}

// ----------------------------------------------------------------------------------------- --synthesize

// The config of a small model, with more members: of two equal keys the last counts.
static std::string config(const std::string& members = "\"model_type\": \"qwen3\"") {
    return R"({"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 1024,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, )" + members + "}";
}

TEST_CASE("--bench and --cpu: what was measured, as JSON; what cannot be is refused") {
    const std::string none = run({"--cpu", "none", TINY, "-i", "x"}).err; // names what there is
    CHECK(none.find("--cpu none: this machine has plain") != std::string::npos);
    for (std::string set : {"amx", "avx512bf16", "avx512", "avx2", "plain"}) {
        if (set != "plain" && none.find(", " + set) == std::string::npos) continue;
        const std::string json = out_of({TINY, "--bench", "--json", "--cpu", set, "-j", "1"});
        sj::Doc doc;
        REQUIRE(sj::parse(doc, json) == "");
        const sj::Value j = doc.root();
        CHECK(j["instructions"].str() == set);
        CHECK(j["type"].str() == "bfloat16");
        CHECK(j["read_GBps"].number() > 0);
        CHECK(j["multiply_GFLOPs"].number() > 0);
        REQUIRE(j["rows"].size() == 5); // a prompt, and decoding at 0, 100, 512 and 2048
        for (sj::Value row : j["rows"].items()) {
            CHECK(row["tokens_per_s"].number() > 0);
            CHECK(row["bytes_per_token"].number() > 0);
            // (The median of shares is the share of the median, both of an even number.)
            CHECK(std::fabs(row["read_share"].number() * j["read_GBps"].number() / row["GBps"].number() - 1) < 1e-6);
        }
        const double weights = j["rows"][(size_t)1]["bytes_per_token"].number(), more = j["rows"][4]["bytes_per_token"].number();
        CHECK(more - weights == 2 * 2 * 2 * 64 * 2 * 2048.); // keys and values: 2 x 2 layers x 2 heads x 64 x 2 bytes a token
        break; // the ceilings take their time: the best instructions here, all of them in test_ops
    }
    const Result int8 = run({TINY, "--bench", "-j", "1", "--dtype", "int8"});
    CHECK(int8.out.find("int8") != std::string::npos);
    CHECK(int8.out.find(", 1 thread\n") != std::string::npos);
    CHECK(int8.err.find('\r') == std::string::npos); // nothing is written over where there is no terminal
    Scratch s;
    write_file(s / "c.json", config("\"model_type\": \"qwen3\", \"max_position_embeddings\": 100"));
    out_of({"--synthesize", s / "c.json", s / "short"});
    check_refused({s / "short", "--bench"}, "too short");
    check_refused({TINY, "--bench", "-i", "x"}, "one thing at a time");
}

TEST_CASE("--synthesize: a shape becomes a model, the same for the same seed") {
    Scratch s;
    auto make = [&](const std::string& text, const char* seed, const char* threads) {
        write_file(s / "c.json", text);
        CHECK(out_of({"--synthesize", s / "c.json", s / "m", "-s", seed, "-j", threads, "--overwrite"}) == "");
        return read_file(s / "m");
    };
    const std::string first = make(config(), "1", "1");
    CHECK(make(config(), "1", "3") == first);
    CHECK(make(config(), "2", "1") != first);
    CHECK(s.count() == 2);
    for (const char* members : {R"("torch_dtype": "bfloat16")", R"("torch_dtype": "float32")",
                                R"("dtype": "float32", "tie_word_embeddings": true)",
                                R"("head_dim": 2, "vocab_size": 1)"}) {
        INFO(members);
        make(config(members), "5", "1");
        Answer a = answer({s / "m", "--ids", "0,0,0", "-n", "5", "-s", "1", "-j", "1"});
        CHECK(a.ids.size() == 5);
        CHECK(a.finish == "length");
    }
    const size_t wide = make(config("\"dtype\": \"float32\""), "1", "1").size(), narrow = first.size();
    CHECK(std::fabs((double)wide / (double)narrow - 2) < 0.1);

    write_file(s / "empty.json", "");
    write_file(s / "list.json", "[1]");
    write_file(s / "moe.json", config("\"num_experts\": 8"));
    write_file(s / "heads.json", config("\"num_key_value_heads\": 3"));
    const size_t files = s.count();
    const struct { std::string shape, out, word; } cases[] = {
        {"0.7B", "new", "0.6B, 1.7B"},
        {"c.txt", "new", "0.6B, 1.7B"},
        {s / "missing.json", "new", "No such file"},
        {s / "empty.json", "new", "empty.json: the file is empty"},
        {s / "list.json", "new", "not a JSON object"},
        {s / "moe.json", "new", "num_experts = 8"},
        {s / "heads.json", "new", "4 query heads do not share 3"},
        {s / "c.json", "missing/new", "missing/new: No such file"},
        {s / "c.json", ".", "is a directory"},
    };
    for (auto& c : cases) check_refused({"--synthesize", c.shape, s / c.out}, c.word);
    check_refused({"--synthesize", s / "c.json", "/dev/full"}, "/dev/full: No space left");
    Setting full;
    full.file_limit = 100000;
    check_refused({"--synthesize", s / "c.json", s / "new"}, s / "new: File too large", full);
    check_refused({"--synthesize", s / "c.json"}, "--synthesize needs a value");
    check_refused({"--synthesize", s / "c.json", "-s", "3", s / "new"}, "--synthesize SIZE OUT.bin: both values come before -s");
    check_refused({"--synthesize", "--threads=1", s / "c.json", s / "new"}, "both values come before --threads=1");
    CHECK(s.count() == files); // not a byte is left
}

TEST_CASE("a model that is there is replaced with --overwrite only") {
    Scratch s;
    write_file(s / "c.json", config());
    const std::string to = s / "m";
    for (const Strings& how : {Strings{"--synthesize", s / "c.json", to}, {TINY, "--convert", to}, {TINY, "--quantize", "int8", to}}) {
        write_file(to, "kept");
        check_refused(how, to + ": exists; --overwrite replaces it");
        CHECK(read_file(to) == "kept");
        Strings with = how;
        with.push_back("--overwrite");
        out_of(with);
        CHECK(read_file(to).size() > 1000);
        fs::remove(to);
        out_of(how);
    }
    check_refused({TINY, "-i", "x", "--overwrite"}, "--overwrite is for --convert");
}

TEST_CASE("what options name is looked at before the model") {
    Scratch s;
    const std::string none = s / "none", model = s / "no_model";
    for (const char* option : {"--docs", "--tools", "--ppl", "--eval", "--texts", "--calibrate", "--against", "--adapter", "-z", "--docs-embed", "--docs-rerank"})
        check_refused({model, option, none}, option + " "s + none + ": No such file");
    for (const char* option : {"--logits", "-o", "--prompt-cache"}) check_refused({model, option, none + "/x"}, option + " "s + none + "/x: No such file");
    write_file(none, "{}");
    check_refused({model, "--eval", TINY, "-o", none}, "none: exists");
    check_refused({model, "--tools", none}, "none: ");
    Setting folder;
    folder.in = s.path.string();
    const Result chat = run(tiny({}), "", folder);
    CHECK(chat.status == 1);
    CHECK(chat.err.find("qwen3: standard input: Is a directory\n") != std::string::npos);
}

TEST_CASE("text that is not UTF-8 is refused in a line, wherever it comes from") {
    Scratch s;
    write_file(s / "f", "warp \xe7\xba");
    for (const char* option : {"-i", "-y", "--stop", "--instruct"}) check_refused({TINY, option, "\xff"}, option + ": invalid UTF-8 at byte 0"s);
    check_refused({TINY, "warp \xff"}, "the question: invalid UTF-8 at byte 5");
    for (const char* option : {"--ppl", "--texts"}) check_refused(tiny({option, s / "f", option == "--ppl"s ? "--json" : "--embed"}), "f: no UTF-8 at byte 5");
    Setting from;
    from.in = s / "f";
    check_refused(tiny({"-i", "-"}), "standard input: invalid UTF-8 at byte 5", from);
    check_refused(tiny({"--ppl", "-"}), "standard input: invalid UTF-8 at byte 5", from);
    const Result chat = run(tiny({"-n", "3", "-s", "1"}), "a\xff\nday\n");
    INFO(chat.err);
    CHECK(chat.status == 0);
    CHECK(chat.err.find("the message: invalid UTF-8 at byte 1\n") != std::string::npos);
    CHECK(chat.out != "");
}

TEST_CASE("a model with fewer rows than the tokenizer has ids answers with the ids that exist") {
    Scratch s;
    const std::string z = "tests/fixtures/tiny/tokenizer.bin"; // 1,000 ids; the last four are <think> and the like
    auto make = [&](int rows) {
        write_file(s / "c.json", config(format("\"vocab_size\": %d", rows)));
        CHECK(out_of({"--synthesize", s / "c.json", s / "m", "--overwrite"}) == "");
    };
    make(996);
    const Answer a = answer({s / "m", "-z", z, "--raw", "-i", "<think>a", "-n", "20", "-s", "1", "-j", "1"});
    CHECK(a.ids.size() == 20);
    for (int id : a.ids) CHECK(id < 996);
    check_refused({s / "m", "-z", z, "-i", "a"}, "the chat template needs <think>, which the tokenizer has not");
    make(973); // a row less than the vocabulary without its added tokens
    check_refused({s / "m", "-z", z, "-i", "a"}, "1000 ids, but the vocabulary of");
}

// ----------------------------------------------------------------------------------------- refusals

TEST_CASE("options that make no sense") {
    const struct { Strings arguments; const char* word; } cases[] = {
        {{}, "no model named"},
        {{TINY, "--json"}, "no question: -i TEXT"},
        {{TINY, "--raw"}, "no question: -i TEXT"},
        {{TINY, "--logits-hash"}, "no question: -i TEXT"},
        {{TINY, "what", "is", "a", "warp?"}, "expected one model and one question in quotes: is is too much"},
        {{TINY, "why?", "-i", "x"}, "expected one question: why? and -i x"},
        {{TINY, "x", "--ids", "1", "--bench"}, "one thing at a time"},
        {{"--frobnicate"}, "unknown option --frobnicate"},
        {{"--frobnicate=1"}, "unknown option --frobnicate"},
        {{"-q"}, "unknown option -q"},
        {{"--input", "x", "--tem", "1"}, "unknown option --tem"},
        {{"--raw=1"}, "--raw takes no value"},
        {{"--json=yes"}, "--json takes no value"},
        {{TINY, "-i", "x", "-d", "gpu"}, "--device gpu: cpu or cuda"},
        {{TINY, "--bench=short"}, "--bench takes no value but [long]"},
        {{TINY, "--", "-i", "x"}, "x is too much"},
        {{TINY, "-i", "", "-z", VOCABULARY}, "the question is empty"},
        {{TINY, "", "-z", VOCABULARY}, "the question is empty"},
        {{TINY, "-i", " \n ", "-z", VOCABULARY}, "the question is empty"},
        {{TINY, "-i", "-", "-z", VOCABULARY}, "the question is empty"},
        {{TINY, "-i", "x", "-d", "cuda"}, "--device cuda: this program was built without nvcc"},
        {{TINY, "--ids", ""}, "the prompt is empty"},
        {{TINY, "--ids", " , "}, "the prompt is empty"},
        {{TINY, "--raw", "-i", "", "-z", VOCABULARY}, "the prompt is empty"},
        {{TINY, "--ids", "1,x"}, "--ids: x is not"},
        {{TINY, "--ids", "1;2"}, "--ids: 1;2 is not"},
        {{TINY, "--ids", "1,-2"}, "--ids: -2 is not"},
        {{TINY, "--ids", "1,1024"}, "id 1024 is not in the vocabulary"},
        {{TINY, "--ids", "4294967296"}, "--ids: 4294967296 is not"},
        {{"-z", VOCABULARY, "--detokenize", "1 two"}, "--detokenize: two is not"},
        {{TINY, "-i", "x", "-c", "4097"}, "the model's limit is 4096"},
    };
    for (auto& c : cases) check_refused(c.arguments, c.word);
    for (const char* option : {"-i", "-y", "-t", "-k", "-p", "--min-p", "-s", "-n", "-c", "-r", "-z", "-d",
                               "-j", "--ids", "--logits", "--tokenize", "--detokenize", "--synthesize"})
        check_refused({TINY, option}, option + " needs a value"s);

    const struct { const char* option; Strings values; } numbers[] = {
        {"-t", {"", "x", "1x", " 1", "-1", "101", "nan", "inf", "1,5", "1e999"}},
        {"-p", {"", "1.1", "-0.1", "nan"}},
        {"--min-p", {"2", "-1", "a"}},
        {"-k", {"", "-1", "1.5", "99999999999", "0x"}},
        {"-s", {"", "-1", "x", "1.5", " 1", "18446744073709551616"}},
        {"-n", {"", "-1", "1e3", "99999999999"}},
        {"-c", {"", "0", "-1", "x", "99999999999"}},
        {"-r", {"2", "-1", "yes"}},
        {"-j", {"0", "-1", "x", "1000000"}},
    };
    for (auto& n : numbers)
        for (auto& value : n.values)
            check_refused({TINY, "-i", "x", n.option, value}, n.option + ": "s + value + " is not a ");
}

TEST_CASE("--help has every option once, in lines that fit a terminal; a value may follow =") {
    const std::string help = out_of({"-h"});
    for (const char* option : {"-i, --input TEXT", "-p, --top-p X", "    --bench [long]", "    --synthesize SIZE OUT.bin", "-h, --help"}) {
        INFO(option);
        const size_t at = help.find("\n  "s + option);
        REQUIRE(at != std::string::npos);
        CHECK(help.find("\n  "s + option, at + 1) == std::string::npos);
    }
    for (size_t at = 0, end; at < help.size(); at = end + 1) {
        end = help.find('\n', at);
        CHECK(end - at <= 100);
    }
    const std::string usual = out_of(tiny({"-i", "Hello", "-t", "0", "-n", "5"}));
    CHECK(out_of({"--tokenizer=" + VOCABULARY, "--input=Hello", "--temp=0", "--max-tokens=5", "--", TINY}) == usual);
    CHECK(out_of({"-z", VOCABULARY, "--tokenize=a=b"}) == out_of({"-z", VOCABULARY, "--tokenize", "a=b"}));
}

TEST_CASE("-d plain: Book I's own loops say the same, whatever the weights are stored as") {
    CHECK(out_of({"--help"}).find("plain") != std::string::npos);
    for (const char* dtype : {"f32", "bf16", "int8"}) {
        INFO(dtype);
        Strings ask = tiny({"-i", "Hello", "-t", "0", "-n", "12", "--dtype", dtype}), plain = ask;
        plain.insert(plain.end(), {"-d", "plain"});
        const Result r = run(plain);
        CHECK(r.status == 0);
        CHECK(r.err.find("cpu, plain loops") != std::string::npos);
        if (dtype == std::string("int8")) ask.insert(ask.end(), {"--cpu", "plain"}); // (others may round weights to bf16)
        CHECK(r.out == out_of(ask));
    }
}

TEST_CASE("two programs on the same cores: each keeps a fair part of its speed") {
    if (std::thread::hardware_concurrency() < 2) return;
    Scratch s; // no end token
    write_file(s / "c.json", config(R"("hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024)"));
    out_of({"--synthesize", s / "c.json", s / "m"});
    const Strings ask = {s / "m", "-z", VOCABULARY, "-i", "Hello", "-t", "0", "-n", "600", "--json", "--lookup", "0"};
    Setting spinning; // OpenMP's own policy
    spinning.passive = false, spinning.alarm_s = 250;
    auto rate = [](const Result& r) {
        INFO(r.err);
        REQUIRE(r.status == 0);
        sj::Doc doc;
        REQUIRE(sj::parse(doc, r.out) == "");
        return doc.root()["timings"]["decode_tokens_per_s"].number();
    };
    double best = 0; // of five: other programs run here too
    for (int i = 0; i < 5 && best < 0.3; i++) {
        const double alone = rate(run(ask, "", spinning));
        Process a(ask, "", spinning), b(ask, "", spinning);
        const double first = rate(a.wait()), second = rate(b.wait());
        best = std::max(best, std::min(first, second) / alone);
    }
    CHECK(best >= 0.3); // half, less what it takes to notice; 0.04 to 0.28 without ThreadPace
}

TEST_CASE("files that are none") {
    Scratch s;
    const std::string model = read_file(TINY), vocabulary = read_file(VOCABULARY);
    write_file(s / "empty", "");
    write_file(s / "short", model.substr(0, 1000));
    write_file(s / "cut", model.substr(0, model.size() - 1));
    write_file(s / "words", vocabulary.substr(0, vocabulary.size() - 1));
    write_file(s / "text", "It was a dark and stormy night. " + std::string(100, '.'));
    fs::create_directory(s / "folder");
    for (const char* option : {"-i", "--ids"}) { // the model is looked at first, whatever is asked
        auto ask = [&](const std::string& path) { return Strings{path, option, "1", "-n", "1"}; };
        check_refused(ask(s / "missing"), s / "missing: No such file");
        check_refused(ask(s / "empty"), s / "empty: the file is empty");
        check_refused(ask(s / "short"), s / "short: truncated");
        check_refused(ask(s / "cut"), s / "cut: truncated");
        check_refused(ask(s / "text"), s / "text: not a safetensors file");
        check_refused(ask(s / "folder"), s / "folder: a folder without a model");
        check_refused(ask(VOCABULARY), VOCABULARY + ": not a safetensors file");
        check_refused(ask("/dev/null"), "/dev/null: not a regular file");
        check_refused(ask("-"), "-: No such file");
    }
    for (const char* option : {"-i", "--ids", "--tokenize", "--detokenize"}) {
        auto use = [&](const std::string& path) { return Strings{TINY, "-z", path, option, "1"}; };
        check_refused(use(s / "missing"), s / "missing: No such file");
        check_refused(use(s / "empty"), s / "empty: the file is empty");
        check_refused(use(s / "folder"), s / "folder: not a regular file");
        check_refused(use(s / "text"), s / "text: ");
        check_refused(use(s / "words"), s / "words: ");
        check_refused(use(TINY), TINY + ": ");
    }
    const std::string other = fs::absolute("tokenizer.bin").string(); // Qwen3's own, 151,669 ids
    check_refused({TINY, "-z", other, "-i", "x"}, other + ": 151669 ids, but the vocabulary of " + TINY);
    check_refused({TINY, "-z", other, "-i", "x"}, "not its tokenizer (-z FILE names another)");

    // A name in a file is no reason for a second line.
    write_file(s / "c.json", config("\"rope_scaling\": {\n\"type\":\n\"yarn\"}"));
    check_refused({"--synthesize", s / "c.json", s / "new"}, "rope_scaling");
    const std::string header = "{\"a\\nb\\u001b[2J\": {}}";
    const uint64_t length = header.size();
    write_file(s / "m", std::string((const char*)&length, 8) + header);
    check_refused({s / "m", "-i", "x"}, "lacks dtype");
}

TEST_CASE("a context that no memory holds: the bytes are named") {
    Scratch s;
    write_file(s / "c.json", config(R"("hidden_size": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
        "head_dim": 512, "num_hidden_layers": 4, "max_position_embeddings": 16777216)"));
    out_of({"--synthesize", s / "c.json", s / "m"});
    // 2 x layers x heads x head size x 2 bytes a token
    Result r = run({s / "m", "--ids", "1", "-n", "1", "-c", "16777216"});
    CHECK(r.status == 1);
    CHECK(bad_message(r.err) == "");
    const std::string before = "a context of 16777216 tokens needs ";
    size_t at = r.err.find(before);
    INFO(r.err);
    REQUIRE(at != std::string::npos);
    CHECK(std::strtod(r.err.c_str() + at + before.size(), nullptr) > 16777216. * 2 * 4 * 64 * 512 * 2);
    CHECK(r.err.find("bytes of memory") != std::string::npos);
    CHECK(answer({s / "m", "--ids", "1", "-n", "3", "-c", "16"}).ids.size() == 3); // it is not the model
}

TEST_CASE("input that cannot be read, output that cannot be written") {
    Scratch s;
    Setting folder_in, full_out, no_out, small_disk;
    folder_in.in = s.path.string();
    full_out.out = "/dev/full";
    small_disk.file_limit = 10000;
    check_refused(tiny({"-i", "-"}), "standard input: Is a directory", folder_in);
    check_refused(tiny({"--ids", "-"}), "standard input: Is a directory", folder_in);
    check_refused({"-z", VOCABULARY, "--tokenize", "-"}, "standard input: Is a directory", folder_in);
    check_refused({"-z", VOCABULARY, "--detokenize", "-"}, "standard input: Is a directory", folder_in);

    auto logits_to = [](const std::string& path) {
        return Strings{TINY, "--ids", "1,2,3", "--logits", path};
    };
    check_refused(logits_to("/dev/full"), "/dev/full: No space left");
    check_refused(logits_to(s / "l"), s / "l: File too large", small_disk);
    check_refused(logits_to(s / "missing/l"), "missing/l: No such file");
    check_refused(logits_to(s.path.string()), "is a directory");
    check_refused(logits_to("/proc/l"), "/proc/l");
    CHECK(s.count() == 0); // not a byte is left
    write_file(s / "l", "old");
    check_refused(logits_to(s / "l"), "File too large", small_disk);
    CHECK(read_file(s / "l") == "old"); // nor is what was there lost
    CHECK(s.count() == 1);

    no_out.closed = 1;
    const Strings brief[] = {{"--help"},
                             {"-z", VOCABULARY, "--tokenize", "x"},
                             {"-z", VOCABULARY, "--detokenize", "1"},
                             {TINY, "--ids", "1", "--logits-hash"}};
    for (auto& arguments : brief) {
        check_refused(arguments, "standard output: No space left", full_out);
        check_refused(arguments, "standard output: ", no_out);
    }
    for (auto& more : {Strings{"-n", "5"}, Strings{"-n", "5", "--json"}}) {
        Strings arguments = tiny({"-i", "x", "-s", "1"});
        arguments.insert(arguments.end(), more.begin(), more.end());
        Result r = run(arguments, "", full_out); // the line about the model is out by then
        size_t line = r.err.rfind('\n', r.err.size() - 2) + 1;
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(r.err.substr(line) == "qwen3: standard output: No space left on device\n");
    }
}

// ----------------------------------------------------------------------------------------- Ctrl-C

TEST_CASE("Ctrl-C ends an answer, keeps what was said, and leaves no half file") {
    Scratch s; // a model slow enough to be caught: some milliseconds a token, and no end token
    write_file(s / "c.json",
               config(R"("intermediate_size": 16384, "hidden_size": 256, "max_position_embeddings": 40960)"));
    out_of({"--synthesize", s / "c.json", s / "m"});
    auto ask = [&](Strings more) {
        Strings all = {s / "m", "-z", VOCABULARY, "-i", "Hello", "-s", "1", "-j", "1"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    };
    auto interrupted_when = [](Process& p, auto ready, int number = SIGINT) {
        for (int i = 0; i < 4000 && !ready(); i++) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        REQUIRE(ready());
        REQUIRE(kill(p.pid, number) == 0);
        return p.wait();
    };
    const std::string whole = out_of(ask({"-n", "100"}));
    {
        Process p(ask({"-c", "40960"}));
        Result r = interrupted_when(p, [&] { return p.out.size() > 40; });
        CHECK(r.status == 130);
        CHECK(r.out.size() > 40);
        CHECK(r.out.back() == '\n');
        CHECK(r.out.substr(0, 40) == whole.substr(0, 40));
        CHECK(r.err.find("(interrupt)") != std::string::npos);
    }
    {
        Process p(ask({"-c", "40960", "--json"}));
        bool told = false;
        Result r = interrupted_when(p, [&] { // 200 ms after it told its seed
            if (told) return true;
            told = p.err.size() > 0;
            if (told) std::this_thread::sleep_for(std::chrono::milliseconds(200));
            return told;
        });
        CHECK(r.status == 130);
        Answer a = parse_answer(r.out);
        CHECK(a.finish == "interrupt");
        std::string said = a.text; // if it ends in the midst of a character, U+FFFD stands for that
        while (said.size() >= 3 && said.compare(said.size() - 3, 3, "\uFFFD") == 0) said.resize(said.size() - 3);
        said.resize(std::min(said.size(), (size_t)20));
        CHECK(said == whole.substr(0, said.size()));
    }
    {
        const size_t files = s.count();
        Process p({s / "m", "--ids", join(some_ids(4000), ","), "--logits", s / "l", "-j", "1"});
        Result r = interrupted_when(p, [&] { return s.count() > files; });
        INFO(r.err);
        CHECK(r.signal == 0);
        CHECK(r.status != 0);
        CHECK(r.out == "");
        CHECK(s.count() == files);
    }
    for (int number : {SIGINT, SIGTERM, SIGHUP}) {
        const size_t files = s.count();
        Process p({"--synthesize", "0.6B", s / "big", "-j", "1"});
        Result r = interrupted_when(p, [&] { return s.count() > files; }, number);
        INFO(r.err);
        CHECK(r.signal == (number == SIGINT ? 0 : number));
        CHECK(r.status != 0);
        CHECK(r.out == "");
        CHECK(s.count() == files);
    }
}

// ----------------------------------------------------------------------------------------- mutations

// One to three random injuries. `head` bytes at the front are where structure lies: half of them fall there.
static std::string mutated(std::string bytes, size_t head, std::mt19937_64& random) {
    for (int n = 1 + (int)(random() % 3); n > 0; n--) {
        if (bytes.empty()) break;
        const size_t range = random() % 2 ? std::min(head, bytes.size()) : bytes.size();
        const size_t at = random() % range, length = 1 + random() % 16;
        switch (random() % 6) {
        case 0: bytes[at] = (char)(bytes[at] ^ 1 << random() % 8); break;
        case 1: bytes.resize(at); break;
        case 2: bytes.insert(at, length, (char)random()); break;
        case 3: bytes.erase(at, length); break;
        case 4: bytes.replace(at, length, bytes, random() % bytes.size(), length); break; // from elsewhere
        case 5: // a digit of the text, else a whole word
            if (size_t digit = bytes.find_first_of("0123456789", at); digit < head)
                bytes[digit] = (char)('0' + random() % 10);
            else
                bytes.replace(at / 4 * 4, 4, "\xff\xff\xff\x7f");
            break;
        }
    }
    return bytes;
}

TEST_CASE("150 mutations of a model and 150 of a tokenizer: an answer or one line, never a signal") {
    const std::string model = read_file(TINY), vocabulary = read_file(VOCABULARY);
    uint64_t header;
    memcpy(&header, model.data(), 8);
    std::mt19937_64 random(20240607);
    Setting hurried;
    hurried.alarm_s = 10;
    int answered = 0, refused = 0;
    auto judge = [&](Process& p, const std::string& what) {
        Result r = p.wait();
        INFO(what << ": status " << r.status << ", signal " << r.signal << ", stderr: " << r.err);
        if (r.status == 0) answered++;
        else refused++;
        CHECK((r.status == 0 || (r.status == 1 && r.out == "" && bad_message(r.err) == "")));
    };
    for (int i = 0; i < 150; i++) { // two programs side by side (fuzz_model and fuzz_tokenizer_file go on)
        const MemoryFile a(mutated(model, 8 + header, random)), b(mutated(vocabulary, 200, random));
        auto ask = [](const std::string& m, const std::string& z) {
            return Strings{m, "-z", z, "-i", "Hello, 世界! <|im_end|>", "-n", "2", "-s", "1", "-j", "1"};
        };
        Process first(ask(a.path, VOCABULARY), "", hurried), second(ask(TINY, b.path), "", hurried);
        judge(first, format("model %d", i));
        judge(second, format("tokenizer %d", i));
    }
    CHECK(answered > 15); // both ends are reached
    CHECK(refused > 50);
}
