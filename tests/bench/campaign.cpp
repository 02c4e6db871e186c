// campaign: everything at once that may happen to a server, for as long as is wished; and whether it is afterwards what it
// was before.
//
//   campaign --seconds 1800                 ./serve on the random model in tests/fixtures/tiny
//   SERVE=build/clang++-asan/serve campaign --seconds 300      (memory is not compared: ASan keeps what is freed)
//
// Honest clients ask for answers that are known and check every byte of them: as chats, in the other dialects, in batches
// over HTTP, with adapters that are loaded and unloaded all the time, by a JSON schema, and with log-probabilities. Beside them: malformed JSON, malformed
// HTTP (after h1spec's list, and random bytes), schemas that want the stack, the memory or the time of the server, of two
// addresses at a time, connections by the hundred that say nothing, clients that vanish, send slowly, read slowly or not at all, close half;
// answers so many and so long that they give way to each other; a log that nobody reads; and the server is stopped and
// continued (SIGSTOP). In between it comes to rest: pages, descriptors and threads must be what they were before, and memory
// what it was at the first rest. At the end it drains, with status 0; and one that writes its log to a full disk answers, too.
#include "base/file.h"
#include "base/options.h"
#include "sj.h"
#include "tests/http.h"
#include <atomic>
#include <csignal>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <utility>

static const std::string PROGRAM = getenv("SERVE") ? getenv("SERVE") : "./serve";
static const std::string FIXTURE = "tests/fixtures/tiny/";

struct Random : std::mt19937_64 {
    using std::mt19937_64::mt19937_64;
    int below(int n) { return (int)((*this)() % (uint64_t)n); }
};

// Faults found; the first ones are printed.
static std::atomic<int> faults{0};
static std::mutex telling;
static void fault(const std::string& what) {
    std::lock_guard lock(telling);
    if (faults++ < 20) fprintf(stderr, "WRONG: %.400s\n", what.c_str());
}

// ------------------------------------------------------------------------------------------------- the server

struct Served {
    pid_t pid;
    int port = 0, log = -1; // where its stdout can be read

    Served(const std::vector<std::string>& more, const char* stdout_path = nullptr) {
        int out[2], err[2];
        if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) DIE("pipe: %s", strerror(errno));
        pid = fork();
        if (pid == 0) {
            std::vector<std::string> all = {PROGRAM, FIXTURE + "model.bin", "-z", FIXTURE + "tokenizer.bin", "-j", "1", "--port", "0"};
            all.insert(all.end(), more.begin(), more.end());
            std::vector<char*> argv;
            for (auto& a : all) argv.push_back(a.data());
            argv.push_back(nullptr);
            dup2(stdout_path ? open(stdout_path, O_WRONLY) : out[1], 1), dup2(err[1], 2);
            setenv("OMP_WAIT_POLICY", "passive", 1);
            execv(argv[0], argv.data());
            _exit(127);
        }
        close(out[1]), close(err[1]);
        log = out[0];
        FILE* said = fdopen(err[0], "r");
        for (char line[1000]; port == 0 && fgets(line, sizeof line, said);)
            if (const char* at = strstr(line, "listening on http://127.0.0.1:")) port = atoi(at + 30);
        if (!port) DIE("%s does not start", PROGRAM.c_str());
        std::thread([said] { // what it says from now on
            for (char line[1000]; fgets(line, sizeof line, said);)
                if (!strstr(line, "requests to finish")) fault(std::string("the server says: ") + line);
            fclose(said);
        }).detach();
    }
    int stop() { // its status
        kill(pid, SIGTERM);
        int status = -1;
        waitpid(pid, &status, 0);
        return status;
    }
    double metric(const std::string& name) const {
        const std::string all = Http(port).call("GET", "/metrics").body;
        const size_t at = all.find("\nvllm:" + name + "{");
        return at == std::string::npos ? NAN : atof(all.c_str() + all.find("} ", at) + 2);
    }
};

// The resources of an idle server.
struct Rest {
    double megabytes;
    size_t descriptors, threads;
};
// Waits for it: until there are as many descriptors as before the load (0: any number, but no longer falling).
static Rest rest_of(const Served& server, size_t descriptors) {
    const double start = seconds();
    auto count = [&](const char* what) {
        return (size_t)std::distance(std::filesystem::directory_iterator(format("/proc/%d/%s", (int)server.pid, what)), {});
    };
    for (size_t before = 0;; usleep(200'000)) { // long texts that were left are tokenized first, and idle connections time out
        const double busy = server.metric("num_requests_running") + server.metric("num_requests_waiting") + server.metric("kv_cache_usage_perc");
        usleep(100'000); // until the server has closed our own connections
        const size_t now = count("fd"), last = std::exchange(before, now);
        if (busy == 0 && now == (descriptors ? descriptors : last)) break;
        if (seconds() - start > 60) {
            fault(format("no rest after a minute: %g running, %g waiting, %g of the pages, %zu descriptors of %zu", server.metric("num_requests_running"),
                         server.metric("num_requests_waiting"), server.metric("kv_cache_usage_perc"), now, descriptors));
            break;
        }
    }
    FILE* f = fopen(format("/proc/%d/statm", (int)server.pid).c_str(), "r");
    unsigned long all = 0, resident = 0;
    if (!f || fscanf(f, "%lu %lu", &all, &resident) != 2) DIE("/proc/%d/statm", (int)server.pid);
    fclose(f);
    return {(double)resident * (double)sysconf(_SC_PAGESIZE) / 1e6, count("fd"), count("task")};
}

// ------------------------------------------------------------------------------------------------- the clients

static std::string chat(const std::string& text, const std::string& more) {
    std::string body = "{\"messages\": [{\"role\": \"user\", \"content\": ";
    sj::quote(body, text);
    return body + "}], " + more + "}";
}
static std::string known_question(int i, bool stream, const std::string& model = "tiny") {
    return chat("Question " + std::to_string(i % 5), format("\"seed\": %d, \"max_tokens\": %d, \"temperature\": 1.2, \"ignore_eos\": true%s, \"model\": \"%s\"", i,
                                                            3 + i * 5, stream ? ", \"stream\": true" : "", model.c_str()));
}
// A folder with the adapter of tests/fixtures/train, whose B, which is zero there, gets numbers.
static std::string make_adapter(const std::string& folder, float size) {
    const std::string from = "tests/fixtures/train/adapter/", config = "adapter_config.json", matrices = "adapter_model.safetensors";
    std::filesystem::create_directory(folder);
    std::filesystem::copy_file(from + config, folder + "/" + config);
    std::string file(MappedFile(from + matrices).text());
    uint64_t length;
    memcpy(&length, file.data(), 8);
    const std::string header = file.substr(8, length);
    sj::Doc doc;
    sj::parse(doc, header);
    for (auto [name, t] : doc.root().members()) {
        if (name.find("lora_B") == std::string::npos) continue;
        const size_t begin = (size_t)t["data_offsets"][(size_t)0].number(), end = (size_t)t["data_offsets"][1].number();
        for (size_t i = 0; begin + 4 * i < end; i++) {
            const float b = size * (float)((int)(i % 7) - 3);
            memcpy(&file[8 + length + begin + 4 * i], &b, 4);
        }
    }
    write_text(folder + "/" + matrices, file);
    return folder;
}
static std::string text_of(const HttpReply& r, bool stream) {
    if (r.status != 200) return format("status %d: ", r.status) + r.body;
    std::string text;
    sj::Doc doc;
    if (!stream) {
        if (!sj::parse(doc, r.body).empty()) return "not JSON: " + r.body;
        return std::string(doc.root()["choices"][(size_t)0]["message"]["content"].str());
    }
    bool done = false;
    for (auto& event : events_of(r.body)) {
        if (event == "[DONE]") done = true;
        else if (!sj::parse(doc, event).empty()) return "not JSON: " + event;
        else if (doc.root()["choices"].size()) text += doc.root()["choices"][(size_t)0]["delta"]["content"].str();
    }
    return done ? text : "no end: " + text;
}

constexpr int KNOWN = 12, ADAPTERS = 2, FORMED = 4;

// Answers by a schema of long names, of which most tokens are taken at once, but not where `more` asks for log-probabilities.
static std::string form_question(int i, const std::string& model, const std::string& more = "") {
    return chat("Question " + std::to_string(i), format("\"max_tokens\": 180, \"seed\": %d, \"temperature\": 1.2, \"model\": \"%s\"", i, model.c_str()) + more +
                R"(, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": {"type": "object", "properties":
                {"identification_number": {"type": "integer", "minimum": 0, "maximum": 99}, "is_a_customer": {"type": "boolean"}},
                "required": ["identification_number", "is_a_customer"], "additionalProperties": false}}})");
}

struct Campaign {
    const Served& server;
    std::vector<std::string> adapters{};   // folders
    std::vector<std::string> expected{};   // answers to known_question,
    std::vector<std::string> adapted[ADAPTERS]{}; // ... and with the adapters
    std::atomic<bool> over{false};
    std::vector<std::string> formed[ADAPTERS + 1]{}; // answers to form_question, the last without an adapter
    std::atomic<size_t> requests{0}, answers{0}, done[16]{}; // done: rounds of each kind of client
    std::atomic<double> slowest{0};        // of the questions for /health, while the server was not stopped
    std::atomic<int> stops{0};

    bool has_answered(const HttpReply& r) {
        answers++;
        return r.status >= 200 && r.status < 600;
    }

    void honest(Random& random) {
        const int i = random.below(KNOWN);
        const bool stream = random.below(2);
        Http http(server.port);
        http.patience = 60'000;
        const HttpReply r = http.call("POST", "/v1/chat/completions", known_question(i, stream));
        answers++;
        const std::string said = text_of(r, stream);
        if (said != expected[(size_t)i]) fault("a known answer is another: " + said + " / " + expected[(size_t)i]);
    }

    // Loads an adapter, under a name of its own, asks it, and unloads it, at times while it still answers.
    void swap_adapters(Random& random) {
        const int which = random.below(ADAPTERS), i = random.below(KNOWN);
        const std::string name = format("swapped-%llu", (unsigned long long)random());
        auto swap = [&](const char* what, const std::string& more) {
            Http http(server.port);
            http.patience = 60'000;
            return http.call("POST", format("/v1/%s_lora_adapter", what), "{\"lora_name\": \"" + name + "\"" + more + "}").status;
        };
        auto known = [&](const std::string& said) {
            if (said != adapted[which][(size_t)i]) fault("an adapter's answer is another: " + said + " / " + adapted[which][(size_t)i]);
        };
        if (swap("load", ", \"lora_path\": \"" + FIXTURE + "\"") != 400) fault("no adapter, and it was loaded");
        if (swap("load", ", \"lora_path\": \"" + adapters[(size_t)which] + "\"") != 200) fault("an adapter was not loaded");
        if (swap("load", ", \"lora_path\": \"" + adapters[0] + "\"") != 400) fault("an adapter was loaded twice");
        Http http(server.port);
        http.patience = 60'000;
        http.ask("POST", "/v1/chat/completions", known_question(i, true, name));
        HttpReply r = http.head(); // (its adapter is found by now)
        const bool early = random.below(2);
        if (early && swap("unload", "") != 200) fault("an adapter was not unloaded");
        if (r.status == 200) while (http.chunk(r.body)) {}
        known(text_of(r, true));
        if (!early && swap("unload", "") != 200) fault("an adapter was not unloaded");
        if (swap("unload", "") != 404) fault("an adapter was unloaded twice");
        answers += 6;
    }

    // The same question in other dialects.
    void dialects(Random& random) {
        const int i = random.below(KNOWN), which = random.below(ADAPTERS + 1) - 1;
        const std::string model = which < 0 ? "tiny" : format("fixed-%d", which), question = "Question " + std::to_string(i % 5);
        const std::string how = format(", \"seed\": %d, \"temperature\": 1.2, \"ignore_eos\": true, \"model\": \"%s\"", i, model.c_str());
        Http http(server.port);
        http.patience = 60'000;
        const bool message = random.below(2);
        const HttpReply r = message ? http.call("POST", "/v1/messages", chat(question, format("\"max_tokens\": %d", 3 + i * 5) + how))
                                    : http.call("POST", "/v1/responses", "{\"input\": \"" + question + format("\", \"max_output_tokens\": %d", 3 + i * 5) + how + "}");
        answers++;
        sj::Doc doc;
        if (r.status != 200 || !sj::parse(doc, r.body).empty()) return fault("a dialect: " + r.body);
        const sj::Value first = doc.root()[message ? "content" : "output"][(size_t)0];
        const std::string said = message ? first["text"].str() : first["content"][(size_t)0]["text"].str();
        const std::string& wanted = (which < 0 ? expected : adapted[which])[(size_t)i];
        if (said != wanted) fault("a dialect says something else: " + said + " / " + wanted);
    }

    // A form, with any adapter; at times with log-probabilities, whose tokens are the text.
    void forms(Random& random) {
        const int i = random.below(FORMED), which = random.below(ADAPTERS + 1), top = random.below(21);
        const bool told = random.below(2);
        Http http(server.port);
        http.patience = 60'000;
        const std::string more = told ? format(", \"logprobs\": true, \"top_logprobs\": %d", top) : "";
        const HttpReply r = http.call("POST", "/v1/chat/completions", form_question(i, which < ADAPTERS ? format("fixed-%d", which) : "tiny", more));
        answers++;
        sj::Doc doc;
        const std::string said = text_of(r, false), &wanted = formed[which][(size_t)i];
        if (said != wanted) fault("a form is another: " + said + " / " + wanted);
        if (!told || !sj::parse(doc, r.body).empty()) return;
        std::string tokens;
        const sj::Value content = doc.root()["choices"][(size_t)0]["logprobs"]["content"];
        for (size_t n = 0; n < content.size(); n++) {
            const sj::Value t = content[n];
            tokens += t["token"].str();
            if (t["logprob"].number(1) > 0 || t["top_logprobs"].size() != (size_t)top) fault("log-probabilities: " + r.body);
        }
        if (tokens != said) fault("log-probabilities of other tokens: " + tokens + " / " + said);
    }

    // A file of known questions, a batch of it, at times cancelled; what it leaves is deleted.
    void batches(Random& random) {
        std::string rows;
        const int first = random.below(KNOWN - 3), which = random.below(ADAPTERS);
        for (int i = first; i < first + 3; i++)
            rows += format("{\"custom_id\": \"%d\", \"url\": \"/v1/chat/completions\", \"body\": ", i) + known_question(i, false, format("fixed-%d", which)) + "}\n";
        const std::string form = "--q\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--q\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n" +
                                 rows + "\r\n--q--\r\n";
        auto ask = [&](const char* method, const std::string& path, const std::string& body = "") {
            Http http(server.port);
            http.patience = 60'000;
            answers++;
            return http.call(method, path, body).body;
        };
        auto field = [](const std::string& json, const char* name) {
            sj::Doc doc;
            sj::parse(doc, json);
            return doc.root()[name].str();
        };
        Http http(server.port);
        http.patience = 60'000;
        http.send(format("POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=q\r\nContent-Length: %zu\r\n\r\n", form.size()) + form);
        const std::string file = field(http.reply().body, "id");
        const std::string id = field(ask("POST", "/v1/batches", "{\"input_file_id\": \"" + file + "\", \"endpoint\": \"/v1/chat/completions\", \"completion_window\": \"24h\"}"), "id");
        if (file.empty() || id.empty()) return fault("a batch was not taken");
        if (random.below(3) == 0) ask("POST", "/v1/batches/" + id + "/cancel", "{}");
        std::string status, batch;
        do { // (also when the others have ended: nothing is left behind)
            usleep(100'000);
            batch = ask("GET", "/v1/batches/" + id), status = field(batch, "status");
        } while (status == "validating" || status == "in_progress" || status == "cancelling" || status == "finalizing");
        const std::string output = field(batch, "output_file_id");
        if (status == "completed" && output.empty()) fault("a batch without answers: " + batch);
        const std::string all = output.empty() ? "" : ask("GET", "/v1/files/" + output + "/content");
        for (size_t at = 0, end; (end = all.find('\n', at)) != std::string::npos; at = end + 1) {
            sj::Doc doc;
            const std::string line = all.substr(at, end - at);
            if (!sj::parse(doc, line).empty()) fault("a batch's answer: " + line);
            else if (doc.root()["response"]["body"]["choices"][(size_t)0]["message"]["content"].str() != adapted[which][(size_t)atoi(doc.root()["custom_id"].str().c_str())])
                fault("a batch says something else: " + line);
        }
        for (const std::string& gone : {file, output})
            if (!gone.empty() && ask("DELETE", "/v1/files/" + gone).find("true") == std::string::npos) fault("a file was not deleted");
    }

    // Requests that this server does not support.
    void not_done(Random& random) {
        static const char* paths[] = {"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank"};
        Http http(server.port);
        http.patience = 30'000;
        const char* bodies[] = {"{\"input\": \"a\"}", "{\"query\": \"a\", \"documents\": [\"b\"]}", "{}", "[", "{\"input\": 7, \"model\": \"fixed-0\"}"};
        const HttpReply r = http.call("POST", paths[random.below(4)], bodies[random.below(5)]);
        if (has_answered(r) && r.status != 400) fault(format("vectors of a model that makes none: status %d", r.status));
        usleep(20'000);
    }

    void malformed_json(Random& random) {
        static const char* paths[] = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/batches", "/v1/load_lora_adapter"};
        std::string bad = chat("a", "\"max_tokens\": 2, \"stop\": [\"x\"], \"logit_bias\": {\"5\": 1}, \"n\": 2, \"temperature\": 0.5");
        for (int n = 1 + random.below(4); n > 0 && !bad.empty(); n--) {
            const size_t at = (size_t)random.below((int)bad.size());
            if (random.below(3) == 0) bad.erase(at, 1 + (size_t)random.below(9));
            else if (random.below(2)) bad[at] = (char)random.below(256);
            else bad.insert(at, std::string(1 + (size_t)random.below(2000), "{}[]\",:0-e"[random.below(10)]));
        }
        Http http(server.port);
        http.patience = 60'000;
        const HttpReply r = http.call("POST", paths[random.below(7)], bad.empty() ? " " : bad);
        if (has_answered(r) && r.status != 200 && r.status != 400) fault(format("malformed JSON: status %d", r.status));
    }

    // Requests that servers have got wrong. `good`: whether success is an allowed answer.
    void malformed_http(Random& random) {
        struct Case { std::string bytes; bool good; };
        const std::string host = "Host: localhost\r\n", post = "POST /tokenize HTTP/1.1\r\n" + host + "Content-Type: application/json\r\n", body = "{\"prompt\": \"a\"}";
        const std::string chunked = post + "Transfer-Encoding: chunked\r\n\r\n";
        static const std::vector<Case> cases = {
            {"GET /v1/models HTTP/1.1\r\n" + host + host + "\r\n", false},
            {"GET /v1/models HTTP/1.1\r\n\r\n", true}, // (without Host: the library decides)
            {"GET /v1/models HTTP/9.9\r\n" + host + "\r\n", true}, {"GET /v1/models\r\n\r\n", true}, {"GET  /v1/models  HTTP/1.1\r\n" + host + "\r\n", true},
            {"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", false},
            {"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", false},
            {"GET /v1/models HTTP/1.1\nHost: localhost\n\n", true}, {"GET /v1/models HTTP/1.1\r\nHost : localhost\r\n\r\n", true},
            {"GET /v1/models HTTP/1.1\r\n" + host + "X: a\r\n b: c\r\n\r\n", true}, {"GET /v1/models HTTP/1.1\r\n" + host + std::string("X: \0\r\n\r\n", 8), true},
            {"GET /" + std::string(100'000, 'a') + " HTTP/1.1\r\n" + host + "\r\n", false}, {"GET /v1/models HTTP/1.1\r\n" + host + "X: " + std::string(100'000, 'a') + "\r\n\r\n", false},
            {"GET /v1/models?" + std::string(400, '&') + " HTTP/1.1\r\n" + host + "\r\n", false}, {"\r\n\r\n\r\n\r\n", false}, {std::string(5000, '\0'), false},
            {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", false}, {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + std::string(500, 'x'), false}, {"OPTIONS * HTTP/1.1\r\n" + host + "\r\n", true},
            {"CONNECT localhost:1 HTTP/1.1\r\n" + host + "\r\n", false}, {"GET /v1/models HTTP/1.1\r\n" + host + "Upgrade: websocket\r\nConnection: upgrade\r\n\r\n", true},
            {post + "Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + body, false}, {post + "Content-Length: 15, 15\r\n\r\n" + body, false},
            {post + "Content-Length: -1\r\n\r\n" + body, false}, {post + "Content-Length: 0x0f\r\n\r\n" + body, false}, {post + "Content-Length: 99999999999999999999\r\n\r\n" + body, false},
            {post + "Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n" + body + "\r\n0\r\n\r\n", false}, {post + "Transfer-Encoding: xchunked\r\n\r\n" + body, false},
            {chunked + "g\r\n" + body + "\r\n0\r\n\r\n", false}, {chunked + "-1\r\n" + body + "\r\n0\r\n\r\n", false}, {chunked + "ffffffffffffffffff\r\n" + body, false},
            {chunked + "5\r\n" + body + "\r\n0\r\n\r\n", false}, {chunked + "f;x=" + std::string(20'000, 'y') + "\r\n" + body + "\r\n0\r\n\r\n", true},
            {post + "Expect: 100-continue\r\nContent-Length: 15\r\n\r\n" + body, true}, {post + "Expect: a-miracle\r\nContent-Length: 15\r\n\r\n" + body, true},
        };
        const int i = random.below((int)cases.size() + 4);
        std::string bytes;
        bool good = false;
        if (i < (int)cases.size()) {
            bytes = cases[(size_t)i].bytes, good = cases[(size_t)i].good;
        } else if (i == (int)cases.size()) { // many at once
            for (int n = 0; n < 50; n++) bytes += "GET /health HTTP/1.1\r\n" + host + "\r\n";
            good = true;
        } else {
            for (int n = random.below(400); n > 0; n--) bytes += (char)(random.below(3) ? random.below(256) : "\r\n: /"[random.below(5)]);
        }
        Http http(server.port);
        for (size_t at = 0; at < bytes.size();) { // in pieces, as networks do
            const size_t n = 1 + (size_t)random.below(random.below(2) ? 40 : 100'000);
            http.send(std::string_view(bytes).substr(at, n));
            at += n;
        }
        shutdown(http.fd, SHUT_WR);
        http.patience = 30'000;
        while (http.buffer.size() < 1000 && http.fill()) {}
        answers++;
        if (!http.buffer.empty() && http.buffer.compare(0, 9, "HTTP/1.1 ") != 0 && http.buffer.compare(0, 9, "HTTP/1.0 ") != 0) fault("not HTTP: " + http.buffer);
        if (!good && http.buffer.compare(0, 12, "HTTP/1.1 200") == 0) fault(format("case %d was answered: ", i) + http.buffer);
    }

    void vanish(Random& random) {
        Http http(server.port);
        const bool stream = random.below(2);
        http.ask("POST", "/v1/chat/completions", chat("b", format("\"max_tokens\": %d, \"ignore_eos\": true, \"stream\": %s", 20 + random.below(200), stream ? "true" : "false")));
        if (stream && random.below(2)) http.head();
        usleep((useconds_t)random.below(50'000));
        if (random.below(3) == 0) shutdown(http.fd, SHUT_WR), usleep((useconds_t)random.below(300'000));
        const linger reset = {1, 0};
        if (random.below(2)) setsockopt(http.fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    }

    void send_slowly(Random& random) {
        Http http(server.port);
        const std::string body = chat(std::string(3'000'000, 'x'), "\"max_tokens\": 1");
        http.send(format("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", body.size()));
        for (size_t at = 0, n; at < body.size() && !over; at += n) { // 20 MB/s, or a byte now and then
            n = random.below(3) ? 1 + (size_t)random.below(1 << 20) : 1;
            http.send(std::string_view(body).substr(at, n));
            usleep(50'000);
        }
    }

    void read_slowly(Random& random) {
        Http http(server.port, "127.0.0.1", 500);
        http.ask("POST", "/v1/chat/completions", chat("c", "\"max_tokens\": 20, \"n\": 8, \"ignore_eos\": true, \"logprobs\": true, \"top_logprobs\": 20"));
        char bytes[64];
        for (int n = random.below(100); n > 0 && !over; n--) {
            if (recv(http.fd, bytes, sizeof bytes, MSG_DONTWAIT) == 0) break;
            usleep(20'000);
        }
    }

    void ask_for_much(Random& random) {
        Http http(server.port);
        http.patience = 60'000;
        const HttpReply r = http.call("POST", "/v1/chat/completions", chat("d", format("\"max_tokens\": %d, \"n\": %d, \"ignore_eos\": true, \"temperature\": 2", 50 + random.below(150), 1 + random.below(6))));
        if (has_answered(r) && r.status != 200) fault(format("many answers: status %d", r.status) + r.body);
    }

    // Schemas that refer to themselves, want memory, or want time; at times the client does not wait for its refusal.
    void hostile_forms(Random& random) {
        auto many = [](int n, const std::function<std::string(int)>& one) {
            std::string all;
            for (int i = 0; i < n; i++) all += (i ? ", " : "") + one(i);
            return all;
        };
        static const std::string same = many(400, [](int i) { return format("\"%d\"", i); });
        static const std::vector<std::string> schemas = {
            R"({"properties":{"x":{"properties":{"y":{"$ref":"#","type":"object"}}}}})", R"({"type": "object", "anyOf": [{"$ref": "#"}]})",
            R"({"properties": {")" + std::string(60000, 'a') + R"(": {}}, "additionalProperties": true})",
            R"({"allOf": [)" + many(4990, [](int) { return std::string(R"({"anyOf": [{}]})"); }) + "]}",
            R"({"anyOf": [)" + many(9000, [](int i) { return format("{\"$ref\": \"#/$defs/%d\"}", 59999 - i); }) + R"(], "$defs": {)" + many(60000, [](int i) { return format("\"%d\": {}", i); }) + "}}",
            R"({"oneOf": [)" + many(700, [&](int) { return "{\"enum\": [" + same + "]}"; }) + "]}"};
        const std::string address = format("127.0.0.%d", 2 + random.below(2)), more = format("\"max_tokens\": 2, \"seed\": %d, ", random.below(1 << 30));
        const std::string& schema = schemas[(size_t)random.below((int)schemas.size())];
        Http http(server.port, "127.0.0.1", 0, address.c_str());
        http.patience = 60'000;
        http.ask("POST", "/v1/chat/completions", chat("e", more + "\"structured_outputs\": {\"json\": " + schema + "}"));
        if (random.below(3) == 0) return;
        const HttpReply r = http.reply();
        if (has_answered(r) && r.status != 200 && r.status != 400 && r.status != 503) fault(format("a hostile form: status %d", r.status));
    }

    void say_nothing(Random& random) {
        const std::string address = format("127.0.0.%d", 2 + random.below(9));
        std::vector<std::unique_ptr<Http>> idle;
        for (int n = 50 + random.below(200); n > 0; n--) {
            idle.push_back(std::make_unique<Http>(server.port, "127.0.0.1", 0, address.c_str()));
            if (random.below(2)) idle.back()->send("POST /v1/chat/completions HTTP/1.1\r\nHost: local");
        }
        for (int n = random.below(30); n > 0 && !over; n--) usleep(100'000);
    }

    void look_around(Random& random) {
        static const char* paths[] = {"/", "/metrics", "/v1/models", "/version", "/ping", "/nothing", "/v1/models/other"};
        Http http(server.port);
        http.patience = 30'000;
        for (int n = random.below(5); n >= 0; n--) has_answered(http.call("GET", paths[random.below(7)]));
        usleep(10'000);
    }

    static constexpr int KINDS = 16, HONEST = 6, CLIENTS = 2 * KINDS;
    // One kind of client, until it is over. What the network does to them is no fault.
    void client(int number) {
        Random random((uint64_t)number);
        using Kind = void (Campaign::*)(Random&);
        static const Kind kinds[KINDS] = {
            &Campaign::honest, &Campaign::honest, &Campaign::dialects, &Campaign::swap_adapters, &Campaign::batches, &Campaign::forms, // (these have none of the excuses)
            &Campaign::malformed_json, &Campaign::malformed_http, &Campaign::vanish, &Campaign::send_slowly, &Campaign::read_slowly, &Campaign::ask_for_much,
            &Campaign::look_around, &Campaign::not_done, &Campaign::hostile_forms, &Campaign::say_nothing};
        const Kind kind = kinds[number % KINDS];
        const bool honest = number % KINDS < HONEST;
        while (!over) {
            requests++;
            try {
                (this->*kind)(random);
                done[number % KINDS]++;
            } catch (const std::exception& e) {
                if (honest) fault(std::string("an honest client: ") + e.what());
            }
        }
    }

    // How long /health takes; and from time to time the server is stopped for a moment.
    void watch() {
        Random random(0);
        for (double next = seconds() + 1; !over; usleep(50'000)) {
            const double start = seconds();
            try {
                if (Http(server.port).call("GET", "/health").status != 200) fault("/health is not 200");
            } catch (const std::exception& e) {
                fault(std::string("/health: ") + e.what());
            }
            slowest = std::max(slowest.load(), seconds() - start);
            if (seconds() < next) continue;
            kill(server.pid, SIGSTOP);
            usleep((useconds_t)(100'000 + random.below(600'000)));
            kill(server.pid, SIGCONT);
            next = seconds() + 2, stops++;
        }
    }

    void run(double length, int seed) {
        over = false;
        std::vector<std::thread> threads;
        for (int i = 0; i < CLIENTS; i++) threads.emplace_back([this, seed, i] { client(seed * CLIENTS + i); });
        threads.emplace_back([this] { watch(); });
        usleep((useconds_t)(length * 1e6));
        over = true;
        for (auto& t : threads) t.join();
    }
};

// Reads the log and checks its lines; at times it does not read for a while.
static void read_log(int fd, std::atomic<size_t>& lines_read) {
    std::string rest;
    Random random(99);
    char some[65536];
    for (ssize_t n; (n = read(fd, some, sizeof some)) > 0;) {
        rest.append(some, (size_t)n);
        for (size_t end; (end = rest.find('\n')) != std::string::npos; rest.erase(0, end + 1), lines_read++) {
            sj::Doc doc;
            if (!sj::parse(doc, std::string_view(rest).substr(0, end)).empty()) fault("the log: " + rest.substr(0, end));
        }
        if (random.below(200) == 0) sleep(1);
    }
}

static void a_full_disk() {
    Served server({"--name", "tiny", "--ctx", "64"}, "/dev/full");
    for (int i = 0; i < 20; i++)
        if (Http(server.port).call("POST", "/v1/chat/completions", known_question(i % 3, false)).status != 200) fault("with a full disk");
    if (server.stop() != 0) fault("with a full disk it does not end in peace");
}

int main(int argc, char** argv) try {
    double length = 10;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seconds")) DIE("usage: campaign --seconds N");
        length = atof(argv[i + 1]);
    }
    signal(SIGPIPE, SIG_IGN);
    const bool sanitized = PROGRAM.find("asan") != std::string::npos || PROGRAM.find("tsan") != std::string::npos;
    // So few pages that answers give way; deadlines so short that the slow ones meet them.
    struct Folder { // goes away at the end
        std::string path = (std::filesystem::temp_directory_path() / "campaign.XXXXXX").string();
        Folder() { if (!mkdtemp(path.data())) DIE("%s: %s", path.c_str(), strerror(errno)); }
        ~Folder() { std::filesystem::remove_all(path); }
    } folder;
    std::vector<std::string> adapters;
    for (int i = 0; i < ADAPTERS; i++) adapters.push_back(make_adapter(folder.path + "/adapter" + std::to_string(i), 0.05f * (float)(i + 1)));
    Served server({"--name", "tiny", "--adapter", "fixed-0=" + adapters[0], "--adapter", "fixed-1=" + adapters[1], "--allow-adapter-loading",
                   "--files", folder.path + "/files", "--max-seqs", "4", "--ctx", "256", "--kv-memory", "0.0004", "--deadline", "6", "--max-queue", "400", "--chunk", "16"});
    std::atomic<size_t> lines_read{0};
    std::thread reader([&] { read_log(server.log, lines_read); });
    Campaign campaign{server, adapters};
    auto answers_of = [&](const std::string& model) {
        std::vector<std::string> all;
        for (int i = 0; i < KNOWN; i++) all.push_back(text_of(Http(server.port).call("POST", "/v1/chat/completions", known_question(i, false, model)), false));
        return all;
    };
    campaign.expected = answers_of("tiny");
    for (int i = 0; i < ADAPTERS; i++)
        if ((campaign.adapted[i] = answers_of(format("fixed-%d", i))) == campaign.expected) fault("an adapter changes nothing");

    for (int i = 0; i <= ADAPTERS; i++)
        for (int k = 0; k < FORMED; k++)
            campaign.formed[i].push_back(text_of(Http(server.port).call("POST", "/v1/chat/completions", form_question(k, i < ADAPTERS ? format("fixed-%d", i) : "tiny")), false));

    // Hostile forms, two at a time, and the first round fill what is kept: threads' stacks, buffers, arenas. Later rounds
    // must add nothing.
    std::vector<std::thread> fillers;
    for (int i = 0; i < 2; i++)
        fillers.emplace_back([&, i] {
            Random random{(uint64_t)(77 + i)};
            for (int n = 0; n < 30; n++) campaign.hostile_forms(random);
        });
    for (std::thread& t : fillers) t.join();
    const int rounds = length < 60 ? 2 : (int)(length / 30);
    const Rest before = rest_of(server, 0);
    Rest first{}, now{};
    for (int round = 0; round < rounds; round++) {
        campaign.run(length / rounds, round);
        now = rest_of(server, before.descriptors);
        if (round == 0) first = now;
        printf("%3d: %zu requests, %zu answers, %d stops, slowest /health %.2f s; at rest %.1f MB, %zu descriptors, %zu threads\n", round + 1,
               campaign.requests.load(), campaign.answers.load(), campaign.stops.load(), campaign.slowest.load(), now.megabytes, now.descriptors, now.threads);
        fflush(stdout);
    }
    if (now.threads != before.threads) fault(format("%zu threads, and at first %zu", now.threads, before.threads));
    if (!sanitized && now.megabytes > first.megabytes + 24) // (what bodies of 3 MB leave in the heap)
        fault(format("%.1f MB, and at first %.1f", now.megabytes, first.megabytes));
    if (!sanitized && campaign.slowest > 2) fault(format("/health took %.1f s", campaign.slowest.load()));
    for (int kind = 0; kind < Campaign::KINDS; kind++)
        if (campaign.done[kind] == 0) fault(format("clients of kind %d did nothing", kind));
    const double preempted = server.metric("num_preemptions_total"), dropped = server.metric("dropped_log_lines_total");
    if (preempted == 0) fault("nothing gave way: the campaign is too easy");
    for (int i = 0; i < KNOWN; i++)
        if (text_of(Http(server.port).call("POST", "/v1/chat/completions", known_question(i, true)), true) != campaign.expected[(size_t)i]) fault("a known answer has changed");
    if (const int status = server.stop()) fault(format("it ended with status %d", status));
    reader.join();
    a_full_disk();
    printf("campaign: %.0f s, %zu requests, among them %zu swaps of adapters, %zu batches and %zu forms, %g answers gave way, %zu lines of log and %g dropped; %d faults\n",
           length, campaign.requests.load(), campaign.done[3].load(), campaign.done[4].load(), campaign.done[5].load(), preempted, lines_read.load(), dropped, faults.load());
    return faults > 0;
} catch (const std::exception& e) {
    fprintf(stderr, "campaign: %s\n", e.what());
    return 1;
}
