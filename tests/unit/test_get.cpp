// get, against a server on this machine that redirects, breaks off, sends too little, ignores Range, answers pages. The
// models are those of tests/fixtures. Environment: QWEN3 names the program (default ./qwen3).
#include "sj.h"
#include "tests/http.h"
#include "tests/process.h"
#include <algorithm>
#include <csignal>
#include <mutex>
#include <pty.h>
#include <set>
#include <sstream>

using namespace std::literals;

static const std::string ROOT = fs::current_path().string();
static const std::string QWEN3 = fs::absolute(getenv("QWEN3") ? getenv("QWEN3") : "./qwen3").string();
static const std::string SHARDED = ROOT + "/tests/fixtures/untied_f32_sharded", EMBED = ROOT + "/tests/fixtures/embed";

namespace {
// A server of files. Each asked path is written down, with its Range and its token.
struct Source {
    std::mutex mutex;
    std::map<std::string, std::string> files; // by path, with the first slash
    std::map<std::string, std::string> redirects;
    std::map<std::string, std::vector<size_t>> cuts; // so many bytes are sent of the next answers with more than one
    std::map<std::string, size_t> told, probed;      // a length that is not the file's; or that of the first byte only
    std::set<std::string> untold;                    // answers without a length: the connection's end is theirs
    bool ranges = true, partial = true;              // !partial: a part is a 200 with Content-Range, as ModelScope's
    int status = 404, pause = 0;                     // pause: ms between pieces of 1,000 bytes
    size_t stall = std::string::npos;                // after so many bytes nothing comes any more
    Strings asked;
    Listener listener{[this](int peer) { serve(peer); }};

    std::string url() const { return format("http://127.0.0.1:%d", listener.port); }
    void hold(const std::string& repo, const std::string& folder) {
        for (auto& entry : fs::recursive_directory_iterator(folder))
            if (entry.is_regular_file())
                files["/" + repo + "/resolve/main/" + fs::relative(entry.path(), folder).string()] =
                    read_file(entry.path().string());
    }
    size_t times(const std::string& line) {
        std::lock_guard lock(mutex);
        return (size_t)std::count(asked.begin(), asked.end(), line);
    }
    static std::string header(const std::string& head, const std::string& name) {
        const size_t at = head.find("\r\n" + name + ": ");
        if (at == head.npos) return "";
        const size_t from = at + name.size() + 4;
        return head.substr(from, head.find("\r\n", from) - from);
    }

    void serve(int peer) {
        std::string in, head, body;
        while (listener.request(peer, in, head, body))
            if (!answer(peer, head)) return;
    }
    bool put(int peer, std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t n = send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n <= 0) return false;
            bytes.remove_prefix((size_t)n);
        }
        return true;
    }
    bool answer(int peer, const std::string& head) {
        std::unique_lock lock(mutex);
        const std::string path = head.substr(4, head.find(' ', 4) - 4);
        const std::string range = header(head, "Range"), token = header(head, "Authorization");
        asked.push_back(path + (range.empty() ? "" : " " + range) + (token.empty() ? "" : " " + token));
        if (redirects.count(path))
            return put(peer, "HTTP/1.1 302 No\r\nContent-Length: 5\r\nLocation: " + redirects[path] + "\r\n\r\nhere\n");
        if (!files.count(path))
            return put(peer, format("HTTP/1.1 %d No\r\nContent-Length: 4\r\n\r\nno\r\n", status));
        const std::string& file = files[path];
        if (untold.count(path)) return put(peer, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + file), false;
        const bool probe = range == "bytes=0-0" && probed.count(path);
        const size_t size = probe ? probed[path] : told.count(path) ? told[path] : file.size();
        size_t from = 0, to = size;
        const bool part = ranges && sscanf(range.c_str(), "bytes=%zu-%zu", &from, &to) >= 1;
        if (part && range.back() != '-') to++;
        if (from >= size) return put(peer, "HTTP/1.1 416 No\r\nContent-Length: 0\r\n\r\n");
        to = std::min(to, size);
        std::string all = part && partial ? "HTTP/1.1 206 Part\r\n" : "HTTP/1.1 200 OK\r\n";
        if (part) all += format("Content-Range: bytes %zu-%zu/%zu\r\n", from, to - 1, size);
        all += format("Content-Length: %zu\r\n\r\n", to - from);
        size_t end = std::min(to, file.size());
        if (auto& c = cuts[path]; to - from > 1 && !c.empty()) {
            end = std::min(end, from + c[0]);
            c.erase(c.begin());
        }
        const std::string bytes = from < end ? file.substr(from, end - from) : "";
        const int wait = pause;
        const size_t stop = to - from > 1 ? stall : std::string::npos;
        lock.unlock();
        if (!put(peer, all)) return false;
        for (size_t at = 0; at < bytes.size(); at += 1000) {
            if (at >= stop) return listener.receive(peer, all), false;
            if (!put(peer, std::string_view(bytes).substr(at, 1000))) return false;
            if (wait) std::this_thread::sleep_for(std::chrono::milliseconds(wait));
        }
        return end == to;
    }
};

struct Get : Process {
    Get(const Strings& words, const std::string& folder, const Strings& shell = {"sh"}, const Strings& environment = {})
        : Process("/usr/bin/env",
                  Strings{"PAUSE=0", "HF_TOKEN=", "HF_ENDPOINT=", "http_proxy="} + environment + shell +
                      Strings{ROOT + "/get"} + words,
                  "", [folder] {
                      setpgid(0, 0);
                      signal(SIGPIPE, SIG_IGN); // as systemd and Python start programs
                      if (chdir(folder.c_str()) != 0) _exit(126);
                  }) {}
    bool says(const std::string& text) { // within ten seconds
        for (int i = 0; i < 200; i++) {
            if (err.text().find(text) != std::string::npos) return true;
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        return false;
    }
};
} // namespace
static const std::string AT = "/o/m/resolve/main/";
static bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }
static bool there_is(const Strings& command) {
    return Process("/usr/bin/env", command).wait().status == 0;
}
static bool no_curl() {
    if (there_is({"curl", "--version"})) return false;
    printf("skipped: get's downloads: there is no curl here\n");
    return true;
}
// Each shell that is here.
static std::vector<Strings> shells() {
    std::vector<Strings> all = {{"sh"}};
    for (const Strings& s : std::vector<Strings>{{"bash"}, {"dash"}, {"busybox", "sh"}})
        if (there_is(s + Strings{"-c", "exit 0"})) all.push_back(s);
    return all;
}
// The last line that it prints on stderr is the refusal; those before it say how far it came.
static void check_fault(const Result& r, const std::string& word) {
    INFO(r.err);
    const Strings said = lines(r.err);
    REQUIRE(!said.empty());
    for (auto& line : said) CHECK(line.compare(0, 5, "get: ") == 0);
    check_refusal({r.status, r.out, said.back() + "\n"}, "get", word);
}
static void check_same(const std::string& folder, const std::string& original, const Strings& files) {
    for (auto& file : files) {
        INFO(file);
        REQUIRE(fs::exists(folder + "/" + file));
        CHECK((read_file(folder + "/" + file) == read_file(original + "/" + file)));
    }
}
static const Strings SHARDS = {"config.json", "generation_config.json", "model.safetensors.index.json",
                               "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                               "model-00003-of-00003.safetensors"};

TEST_CASE("a model in shards: redirected, cut twice, and opened; a second run finds it; each shell") {
    if (no_curl()) return;
    for (auto& shell : shells()) {
        INFO(shell[0]);
        Scratch scratch;
        Source source;
        source.hold("o/m", SHARDED);
        const std::string shard = AT + SHARDS[3], moved = "/blobs/17";
        source.files[moved] = source.files[shard];
        source.redirects[shard] = moved;
        source.cuts[moved] = {3000, 1};
        const Strings words = {"o/m", "--from", source.url(), "-o", "Ein Modell 模型"};
        Result r = Get(words, scratch.path, shell).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
        CHECK(r.out == "Ein Modell 模型\n");
        const std::string folder = scratch / "Ein Modell 模型";
        CHECK(!fs::exists(folder + ".part"));
        check_same(folder, SHARDED, SHARDS);
        CHECK(source.times(moved + " bytes=3000-") == 1); // it went on
        CHECK(source.times(moved + " bytes=3001-") == 1);
        Strings there;
        for (auto& entry : fs::directory_iterator(folder)) there.push_back(entry.path().filename());
        CHECK(there.size() == SHARDS.size() + 1); // and .get

        const Strings ask = {"--ids", "1,2,3", "--logits-hash"};
        const Result ours = Process(QWEN3.c_str(), Strings{folder} + ask).wait();
        INFO(ours.err);
        CHECK(ours.status == 0);
        CHECK(ours.out == Process(QWEN3.c_str(), Strings{SHARDED} + ask).wait().out);

        const size_t asked = source.asked.size();
        r = Get(words, scratch.path, shell).wait();
        CHECK(r.status == 0);
        CHECK(r.out == "Ein Modell 模型\n");
        CHECK(has(r.err, "is here already"));
        CHECK(source.asked.size() == asked);
        fs::resize_file(folder + "/config.json", 10);
        check_fault(Get(words, scratch.path, shell).wait(), "config.json: 10 bytes, not ");
        check_fault(Get({"o/other", "-o", "Ein Modell 模型"}, scratch.path, shell).wait(), "does not hold o/other");
    }
}

TEST_CASE("an embedding model has its modules; one file of weights; a URL with {repo} and {file}") {
    if (no_curl()) return;
    Scratch scratch;
    Source source;
    source.hold("o/m", EMBED);
    std::map<std::string, std::string> moved;
    for (auto& [path, bytes] : source.files) moved["/files/m/" + path.substr(AT.size()) + "?of=o/m"] = bytes;
    source.files = moved;
    const Result r = Get({"o/m", "--from", source.url() + "/files/m/{file}?of={repo}"}, scratch.path).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(r.out == "m\n");
    check_same(scratch / "m", EMBED, {"config.json", "model.safetensors", "modules.json", "1_Pooling/config.json",
                                      "tokenizer.json", "tokenizer_config.json"});
}

TEST_CASE("stopped in the middle, the same command goes on; two at once and another source are refused") {
    if (no_curl()) return;
    Scratch scratch;
    Source source, other;
    source.hold("o/m", EMBED), other.hold("o/m", EMBED);
    const std::string weights = AT + "model.safetensors";
    const Strings words = {"o/m", "--from", source.url()};
    source.stall = 200'000;
    Get first(words, scratch.path);
    REQUIRE(first.says(" files, 0.00 GB, from " + source.url()));
    const std::string part = scratch / "m.part/model.safetensors.part";
    for (int i = 0; i < 200 && (!fs::exists(part) || fs::file_size(part) < 150'000); i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    check_fault(Get(words, scratch.path).wait(), "m.part: process ");
    kill(-first.pid, SIGINT);
    const Result stopped = first.wait();
    INFO(stopped.err);
    CHECK(stopped.status == 130);
    CHECK(stopped.out == "");
    CHECK(has(stopped.err, "get: stopped; the same command goes on\n"));
    CHECK(!fs::exists(scratch / "m"));
    REQUIRE(fs::exists(part));
    const size_t had = fs::file_size(part);
    CHECK(had >= 150'000);

    check_fault(Get({"o/m", "--from", other.url()}, scratch.path).wait(), "was begun from " + source.url());
    CHECK(fs::file_size(part) == had);
    source.stall = std::string::npos;
    const size_t configs = source.times(AT + "config.json");
    const Result r = Get({"o/m"}, scratch.path).wait(); // from where it was begun
    INFO(r.err);
    REQUIRE(r.status == 0);
    check_same(scratch / "m", EMBED, {"config.json", "model.safetensors"});
    CHECK(source.times(format("%s bytes=%zu-", weights.c_str(), had)) == 1);
    CHECK(source.times(weights) == 1);
    CHECK(source.times(AT + "config.json") == configs); // it was there
}

TEST_CASE("servers that know no Range, and that answer it with 200 as ModelScope does") {
    if (no_curl()) return;
    for (bool ranges : {false, true}) {
        Scratch scratch;
        Source source;
        source.hold("o/m", EMBED);
        source.ranges = ranges, source.partial = false;
        auto& cuts = source.cuts[AT + "model.safetensors"];
        if (ranges) cuts = {100'000};
        else cuts = {1000, 100'000, 150'000}; // (the first answer is to the question for the length)
        const Result r = Get({"o/m", "--from", source.url()}, scratch.path).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
        check_same(scratch / "m", EMBED, {"config.json", "model.safetensors"});
        CHECK(has(r.err, "from its beginning") == !ranges);
        CHECK(source.times(AT + "model.safetensors bytes=100000-") == 1);

        source.files[AT + "large.gguf"] = "GGUF" + std::string(5'000'000, 'x'); // its length is asked without reading it
        const Result large = Get({"o/m/large.gguf", "-o", "n", "--from", source.url()}, scratch.path).wait();
        INFO(large.err);
        CHECK(large.status == 0);
        CHECK((read_file(scratch / "n/large.gguf") == source.files[AT + "large.gguf"]));
    }
}

TEST_CASE("a server that does not tell lengths: enough for JSON, not for weights") {
    if (no_curl()) return;
    Scratch scratch;
    Source source;
    source.hold("o/m", EMBED);
    source.untold = {AT + "config.json", AT + "tokenizer.json"};
    const Strings words = {"o/m", "--from", source.url()};
    const Result r = Get(words, scratch.path).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    check_same(scratch / "m", EMBED, {"config.json", "tokenizer.json", "model.safetensors"});
    CHECK(has(Get(words, scratch.path).wait().err, "m: is here already"));
    source.untold = {AT + "model.safetensors"};
    check_fault(Get(words + Strings{"-o", "n"}, scratch.path).wait(), "the server does not tell the length");
}

TEST_CASE("a file of 5 GB") { // a hole that is here already, as if only its name were missing
    if (no_curl()) return;
    for (auto& shell : shells()) {
        INFO(shell[0]);
        Scratch scratch;
        Source source;
        source.hold("o/m", EMBED);
        const std::string weights = AT + "model.safetensors", part = scratch / "m.part/model.safetensors.part";
        std::string header = R"({"a": {"dtype": "U8", "shape": [5000000000], "data_offsets": [0, 5000000000]}})";
        header = std::string(1, (char)header.size()) + std::string(7, '\0') + header;
        fs::create_directory(scratch.path / "m.part");
        write_file(scratch / "m.part/.get", "o/m " + source.url() + "/{repo}/resolve/main/{file}\n");
        write_file(part, header);
        fs::resize_file(part, header.size() + 5'000'000'000);
        source.told[weights] = header.size() + 5'000'000'000;
        const Result r = Get({"o/m"}, scratch.path, shell).wait();
        INFO(r.err);
        CHECK(r.status == 0);
        CHECK(has(r.err, " files, 5.00 GB, from "));
        CHECK(fs::file_size(scratch / "m/model.safetensors") == header.size() + 5'000'000'000);
        CHECK(source.times(weights + " bytes=0-0") == 1);
        CHECK(source.times(weights) == 0);
    }
}

TEST_CASE("every name has its repository; a GGUF its file") {
    if (no_curl()) return;
    Scratch scratch;
    Source source;
    const Result list = Get({}, scratch.path).wait();
    CHECK(list.status == 0);
    Strings names;
    for (auto& line : lines(list.out.substr(list.out.rfind("\n\n") + 2))) {
        std::istringstream words(line);
        std::string word;
        for (words >> word; words >> word;) names.push_back(word);
    }
    CHECK(names.size() > 35);
    for (auto& name : names) check_fault(Get({name, "--from", source.url()}, scratch.path).wait(), ": HTTP 404");
    const std::set<std::string> asked(source.asked.begin(), source.asked.end());
    CHECK(asked.size() == names.size());
    for (auto path : {"0.6B/resolve/main/config.json", "32B/resolve/main/config.json",
                      "14B-Base/resolve/main/config.json",
                      "4B-Instruct-2507-FP8/resolve/main/config.json", "32B-AWQ/resolve/main/config.json",
                      "1.7B-GPTQ-Int8/resolve/main/config.json", "Embedding-8B/resolve/main/config.json",
                      "Reranker-0.6B/resolve/main/config.json", "0.6B-GGUF/resolve/main/Qwen3-0.6B-Q8_0.gguf",
                      "32B-GGUF/resolve/main/Qwen3-32B-Q4_K_M.gguf"}) {
        INFO(path);
        CHECK(asked.count("/Qwen/Qwen3-"s + path + " bytes=0-0") == 1);
    }
    for (auto name : {"qwen3-4b-awq", "4b-awq", "Qwen3-4B-AWQ"})
        check_fault(Get({name, "--from", source.url()}, scratch.path).wait(),
                    "/Qwen/Qwen3-4B-AWQ/resolve/main/config.json: HTTP 404");
    CHECK(scratch.count() == 0);
}

TEST_CASE("a GGUF is one file; ModelScope first, and Hugging Face with its token where that cannot be reached") {
    if (no_curl()) return;
    Scratch scratch;
    Source source, mirror;
    const std::string file = "Qwen/Qwen3-0.6B-GGUF/resolve/main/Qwen3-0.6B-Q8_0.gguf";
    source.files["/" + file] = "GGUF\x03";
    mirror.files = source.files;
    const Strings nowhere = {"https_proxy=http://127.0.0.1:1", "HF_TOKEN=hf_secret", "HF_ENDPOINT=" + source.url()};
    const Result r = Get({"0.6b-gguf"}, scratch.path, {"sh"}, nowhere).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(r.out == "Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf\n");
    CHECK(read_file(scratch / "Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf") == "GGUF\x03");
    CHECK(has(r.err, "ModelScope cannot be reached ("));
    CHECK(has(r.err, "from " + source.url() + "/{repo}"));
    CHECK(source.times("/" + file + " Bearer hf_secret") == 1);
    const Strings other = {"Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", "-o", "m", "--from", mirror.url()};
    CHECK(Get(other, scratch.path, {"sh"}, nowhere).wait().status == 0);
    CHECK(mirror.times("/" + file) == 1);
    for (auto& line : mirror.asked) CHECK(!has(line, "secret"));
    check_fault(Get({"0.6B", "--from", "modelscope"}, scratch.path, {"sh"}, nowhere).wait(),
                "https://modelscope.cn/models/Qwen/Qwen3-0.6B/resolve/master/config.json: ");
}

TEST_CASE("files that are not what they should be get no name") {
    if (no_curl()) return;
    struct Fault {
        std::string why;
        std::function<void(std::map<std::string, std::string>& files, Source& source)> spoil;
        std::string folder = EMBED;
    };
    const std::string page = "<!DOCTYPE html><html>Please log in</html>", weights = AT + "model.safetensors";
    const std::string described = "model.safetensors: its header describes 302192 bytes, the file has ";
    const std::string index = AT + SHARDS[2], up = R"({"weight_map": {"a": "../up.safetensors"}})";
    for (const Fault& fault : std::vector<Fault>{
             {"config.json: no JSON", [&](auto& files, auto&) { files[AT + "config.json"] = page; }},
             {"config.json: it names no model_type", [](auto& files, auto&) { files[AT + "config.json"] = "{}"; }},
             {"tokenizer.json: no JSON", [](auto& files, auto&) { files[AT + "tokenizer.json"] += ","; }},
             {"jinja: an HTML page", [&](auto& files, auto&) { files[AT + "chat_template.jinja"] = page; }},
             {"no safetensors header", [&](auto& files, auto&) { files[weights] = page; }},
             {"no safetensors header", [&](auto& files, auto&) { files[weights][2] = 1; }}, // of 64 KB more
             {described + "302191", [&](auto& files, auto&) { files[weights].pop_back(); }},
             {described + "302193", [&](auto& files, auto&) { files[weights] += "x"; }},
             {"too short: 302192 of 302292 bytes", [&](auto&, Source& s) { s.told[weights] = 302292; }},
             {"m: no space: 1000000.00 GB", [&](auto&, Source& s) { s.told[weights] = 1'000'000'000'000'000; }},
             {"config.json: HTTP 404", [](auto& files, auto&) { files.erase(AT + "config.json"); }},
             {"model.safetensors.index.json: HTTP 404", [&](auto& files, auto&) { files.erase(weights); }},
             {"HTTP 401: no such model there, or", [](auto& files, Source& s) { files.clear(), s.status = 401; }},
             {"config.json: HTTP 503", [](auto& files, Source& s) { files.clear(), s.status = 503; }},
             {SHARDS[4] + ": HTTP 404", [](auto& files, auto&) { files.erase(AT + SHARDS[4]); }, SHARDED},
             {"names no file", [&](auto& files, auto&) { files[index] = "{}"; }, SHARDED},
             {"../up.safetensors is not the name", [&](auto& files, auto&) { files[index] = up; }, SHARDED}}) {
        Scratch scratch;
        Source source;
        source.hold("o/m", fault.folder);
        const auto right = source.files;
        fault.spoil(source.files, source);
        const Strings words = {"o/m", "--from", source.url()};
        check_fault(Get(words, scratch.path).wait(), fault.why);
        CHECK(!fs::exists(scratch / "m"));
        // Once the source is right, the same command comes to its end.
        source.files = right, source.told.clear(), source.status = 404;
        const Result again = Get(words, scratch.path).wait();
        INFO(fault.why << "\n" << again.err);
        CHECK(again.status == 0);
        check_same(scratch / "m", fault.folder, {"config.json"});
        if (fault.folder == EMBED) check_same(scratch / "m", EMBED, {"model.safetensors", "tokenizer.json"});
    }
}

TEST_CASE("a wrong GGUF; answers that end before their file does") {
    if (no_curl()) return;
    Scratch scratch;
    Source source;
    source.files["/o/m/resolve/main/a.gguf"] = "<html>";
    check_fault(Get({"o/m/a.gguf", "--from", source.url()}, scratch.path).wait(), "a.gguf: no GGUF");
    CHECK(!fs::exists(scratch / "m"));
    source.files["/o/m/resolve/main/a.gguf"] = "GGUF" + std::string(5000, 'x');
    source.cuts["/o/m/resolve/main/a.gguf"] = {1000, 0, 0, 0, 0, 0, 0, 0};
    const Result r = Get({"o/m/a.gguf", "--from", source.url()}, scratch.path).wait();
    check_fault(r, "a.gguf: ");
    CHECK(source.times("/o/m/resolve/main/a.gguf bytes=1000-") == 6);
    CHECK(fs::file_size(scratch / "m.part/a.gguf.part") == 1000);
    check_fault(Get({"o/m"}, scratch.path).wait(), "m.part: exists and does not hold o/m");
    source.files["/o/m/resolve/main/b.gguf"] = "GGUF" + std::string(996, 'x'); // whole answers, of too little
    source.probed["/o/m/resolve/main/b.gguf"] = 5004;
    check_fault(Get({"o/m/b.gguf", "-o", "n", "--from", source.url()}, scratch.path).wait(),
                "b.gguf: too short: 1000 of 5004 bytes");
    CHECK(!fs::exists(scratch / "n"));
}

TEST_CASE("progress: a line on a pipe, a bar on a terminal") {
    if (no_curl()) return;
    Scratch scratch;
    Source source;
    source.hold("o/m", EMBED);
    source.pause = 15; // 4.5 s and more
    const Result r = Get({"o/m", "--from", source.url()}, scratch.path).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    const Strings said = lines(r.err);
    const auto rate = std::find_if(said.begin(), said.end(), [](auto& line) { return has(line, "% "); });
    REQUIRE(rate != said.end());
    int percent;
    double done, total, speed;
    char left[20];
    CHECK(sscanf(rate->c_str(), "get: %d%% %lf of %lf GB %lf MB/s %19s", &percent, &done, &total, &speed, left) == 5);
    CHECK(percent > 0);
    CHECK(percent < 100);
    CHECK(!has(r.err, "\r"));

    int terminal;
    const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
    REQUIRE(pid >= 0);
    if (pid == 0) {
        if (chdir(scratch.path.c_str()) == 0)
            execl("/bin/sh", "sh", (ROOT + "/get").c_str(), "o/m", "-o", "n", "--from", source.url().c_str(), nullptr);
        _exit(127);
    }
    std::string text;
    char some[4096];
    for (ssize_t n; (n = read(terminal, some, sizeof some)) > 0;) text.append(some, (size_t)n);
    int status = -1;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    close(terminal);
    INFO(text);
    CHECK(status == 0);
    CHECK(has(text, "\r[#"));
    CHECK(has(text, "-] "));
    CHECK(has(text, " s left"));
}

TEST_CASE("a wrong command line is one line") {
    Scratch scratch;
    auto refused = [&](const Strings& words, const std::string& why, const Strings& environment = {}) {
        check_refusal(Get(words, scratch.path, {"sh"}, environment).wait(), "get", why);
    };
    refused({"7B"}, "7B: no such model");
    refused({"0.6B", "4B"}, "one model at a time: 0.6B or 4B");
    refused({"0.6B", "--form", "x"}, "unknown option --form");
    refused({"0.6B", "-o"}, "-o needs a value");
    refused({"-o", "x"}, "no model named");
    refused({"0.6B", "--from", "ftp://host"}, "--from ftp://host: modelscope, huggingface, or a URL");
    refused({"0.6B", "--from", "http://host/a b"}, "--from http://host/a b: ");
    refused({"0.6B"}, "HF_ENDPOINT", {"HF_ENDPOINT=host"});
    refused({"0.6B"}, "HF_TOKEN: not a token", {"HF_TOKEN=a\"b"});
    for (auto name : {"a/../b", "../b", "a/b/", "a//b", "a/b/c", "a/b/c/d.gguf", "a b/c", "/a/b"})
        refused({name}, name + " is neither OWNER/NAME nor OWNER/NAME/FILE.gguf"s);
    fs::create_directory(scratch.path / "tools");
    for (auto tool : {"sh", "awk", "sed", "ls", "cat", "tr", "env"}) {
        const Result where = Process("/usr/bin/env", {"sh", "-c", "command -v "s + tool}).wait();
        fs::create_symlink(lines(where.out)[0], scratch.path / "tools" / tool);
    }
    refused({"0.6B"}, "curl is not installed", {"PATH=" + scratch / "tools"});
    fs::create_directory(scratch.path / "Qwen3-0.6B");
    write_file(scratch / "Qwen3-0.6B/mine", "text");
    refused({"0.6B"}, "Qwen3-0.6B: exists and does not hold Qwen/Qwen3-0.6B");
    CHECK(read_file(scratch / "Qwen3-0.6B/mine") == "text");
}
