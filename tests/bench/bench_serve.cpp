// bench_serve: load for an OpenAI-compatible server, and what its users see of it.
//
//   ./bench_serve --preset exam --clients 64              closed loop: each client asks again when it has its answer
//   ./bench_serve --prompt 512 --output 128 --rate 20     open loop: requests come at random, so many a second
//   ./bench_serve --preset nano --write requests.jsonl    the requests as a file, for serve --batch
//
//   ./bench_serve --models a,b,c                          the first request asks the model a, the next one b, ...
//   ./bench_serve --fields '"logprobs": 5'                these too are in every request
//   ./bench_serve --others '"logprobs": 5'                ... in every second one, whose times are not counted
//
// Prompts are random ids below --vocabulary (10,001), or chats; `nano` is nano-vllm's benchmark, number by number. Answers
// ignore the end token, so that all are as long as asked.
// Tokens are counted by the server's usage; the time between tokens is the time between events (the server sends one a
// token, with or without text).
#include "base/file.h"
#include "sj.h"
#include "tests/http.h"
#include "tests/workload.h"
#include <chrono>
#include <mutex>
#include <thread>

struct Options {
    std::string host = "127.0.0.1", key, preset, write, fields, others;
    std::vector<std::string> models; // taken in turn
    int port = 8000, requests = 256, clients = 64, prompt[2] = {512, 512}, output[2] = {128, 128}, intruders = 0, seed = 0, vocabulary = 10'001;
    double rate = 0, temperature = 0.6;
};

struct Request {
    std::string path, body;
    bool intruder = false;  // whose own times are not counted
};

struct Outcome {
    double first = 0, whole = 0; // seconds since it was asked
    std::vector<double> between;
    size_t prompt = 0, tokens = 0;
    std::string fault;
};

// The body up to its closing brace, so that `stream` can be added.
static std::vector<Request> make_requests(const Options& o) {
    PythonRandom random((uint32_t)o.seed);
    auto by_ids = [&](const Work& w, int seed) {
        std::string body = "{\"prompt\": [";
        for (size_t i = 0; i < w.prompt.size(); i++) body += format("%s%d", i ? ", " : "", w.prompt[i] % o.vocabulary);
        return Request{"/v1/completions", body + format("], \"max_tokens\": %d, \"ignore_eos\": true, \"temperature\": %g, \"seed\": %d", w.answer, o.temperature, seed)};
    };
    auto draw = [&](int length, int answer) {
        Work w{std::vector<int>((size_t)length), answer};
        for (int& id : w.prompt) id = random.randint(0, o.vocabulary - 1);
        return w;
    };
    std::vector<Request> all;
    if (o.preset == "nano") {
        for (const Work& w : nano_workload()) all.push_back(by_ids(w, (int)all.size()));
    } else if (o.preset == "exam") { // a course's 193 questions behind one system prompt of about 40 tokens
        const std::string system = "You are a teaching assistant for a course on GPU programming. Answer the question of the exam below in a few "
                                   "clear sentences, name the terms that the textbook uses, and show your steps where numbers are asked for.";
        for (int i = 0; i < 193; i++) {
            std::string body = "{\"messages\": [{\"role\": \"system\", \"content\": ";
            sj::quote(body, system);
            const int blocks = random.randint(1, 9999), threads = random.randint(1, 1024);
            body += format("}, {\"role\": \"user\", \"content\": \"Question %d: a kernel runs %d blocks of %d threads. How many warps are there, and why?\"}]", i, blocks, threads);
            all.push_back({"/v1/chat/completions", body + format(", \"max_tokens\": 384, \"ignore_eos\": true, \"temperature\": %g, \"seed\": %d", o.temperature, i)});
        }
    } else {
        for (int i = 0; i < o.requests; i++) {
            const int length = random.randint(o.prompt[0], o.prompt[1]), answer = random.randint(o.output[0], o.output[1]);
            all.push_back(by_ids(draw(length, answer), i));
        }
    }
    for (size_t i = 0; i < all.size() && !o.models.empty(); i++)
        all[i].body += ", \"model\": \"" + o.models[i % o.models.size()] + "\"";
    for (size_t i = 0; i < all.size(); i++) {
        if (!o.fields.empty()) all[i].body += ", " + o.fields;
        if (o.others.empty() || i % 2 == 0) continue;
        all[i].body += ", " + o.others;
        all[i].intruder = true;
    }
    const int requests = (int)all.size();
    for (int i = 0; i < o.intruders; i++) {
        Request r = by_ids(draw(8'000, 1), requests + i);
        r.intruder = true;
        all.insert(all.begin() + (i + 1) * (requests + i) / (o.intruders + 1), r);
    }
    return all;
}

static Outcome ask(const Options& o, const Request& request) {
    Outcome out;
    try {
        const double start = seconds();
        Http http(o.port, o.host.c_str());
        http.patience = 600'000;
        http.ask("POST", request.path, request.body + ", \"stream\": true, \"stream_options\": {\"include_usage\": true}}",
                 o.key.empty() ? "" : "Authorization: Bearer " + o.key + "\r\n");
        const HttpReply head = http.head();
        if (head.status != 200) DIE("status %d", head.status);
        std::string text;
        double last = start;
        for (bool more = true; more;) {
            more = http.chunk(text);
            const double now = seconds();
            size_t end;
            while ((end = text.find("\n\n")) != std::string::npos) {
                const std::string event = text.compare(0, 6, "data: ") ? "" : text.substr(6, end - 6); // or a comment
                text.erase(0, end + 2);
                sj::Doc doc;
                if (event.empty() || event == "[DONE]" || !sj::parse(doc, event).empty()) continue;
                const sj::Value usage = doc.root()["usage"], choice = doc.root()["choices"][(size_t)0];
                if (usage.is(sj::Object)) out.tokens = (size_t)usage["completion_tokens"].number(), out.prompt = (size_t)usage["prompt_tokens"].number();
                if (!choice["text"] && (!choice["delta"]["content"] || choice["delta"]["role"])) continue; // role, reason, usage
                if (out.first == 0) out.first = now - start;
                else out.between.push_back(now - last);
                last = now;
            }
        }
        out.whole = seconds() - start;
        if (out.tokens == 0) DIE("no usage at the end of the stream");
    } catch (const Error& e) {
        out.fault = e.what();
    }
    return out;
}

static void percentiles(const char* name, std::vector<double> x) {
    if (x.empty()) return;
    std::sort(x.begin(), x.end());
    auto at = [&](double p) { return x[std::min(x.size() - 1, (size_t)(p * (double)x.size()))] * 1e3; };
    double sum = 0;
    for (double v : x) sum += v;
    printf("%-16s mean %9.2f   p50 %9.2f   p90 %9.2f   p99 %9.2f   max %9.2f ms\n", name, sum / (double)x.size() * 1e3, at(.5), at(.9), at(.99), x.back() * 1e3);
}

static Options parse_options(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; i++) {
        const std::string name = argv[i];
        auto value = [&]() -> const char* {
            if (i + 1 == argc) DIE("%s needs a value", name.c_str());
            return argv[++i];
        };
        auto range = [&](int* r) { // N or N-M
            if (sscanf(value(), "%d-%d", &r[0], &r[1]) == 1) r[1] = r[0];
            if (r[0] < 1 || r[1] < r[0]) DIE("%s: N or N-M", name.c_str());
        };
        if (name == "--host") o.host = value();
        else if (name == "--port") o.port = atoi(value());
        else if (name == "--key") o.key = value();
        else if (name == "--requests") o.requests = atoi(value());
        else if (name == "--clients") o.clients = atoi(value());
        else if (name == "--rate") o.rate = atof(value());
        else if (name == "--prompt") range(o.prompt);
        else if (name == "--output") range(o.output);
        else if (name == "--temperature") o.temperature = atof(value());
        else if (name == "--intruders") o.intruders = atoi(value());
        else if (name == "--seed") o.seed = atoi(value());
        else if (name == "--vocabulary") o.vocabulary = atoi(value());
        else if (name == "--write") o.write = value();
        else if (name == "--fields") o.fields = value();
        else if (name == "--others") o.others = value();
        else if (name == "--models") {
            const std::string list = value();
            for (size_t at = 0, end; at < list.size(); at = end + 1) {
                end = std::min(list.find(',', at), list.size());
                o.models.push_back(list.substr(at, end - at));
            }
        }
        else if (name == "--preset") {
            o.preset = value();
            if (o.preset != "nano" && o.preset != "exam") DIE("--preset %s: nano or exam", o.preset.c_str());
        } else {
            DIE("usage: bench_serve [--port N] [--host A] [--key K] [--preset nano|exam | --requests N --prompt N[-M] --output N[-M]]\n"
                "                   [--clients N | --rate R] [--intruders N: prompts of 8,000 tokens among them] [--temperature X] [--seed N] [--vocabulary N] [--models A,B,..] [--write FILE]\n"
                "                   [--fields JSON: more fields of all requests] [--others JSON: of every second one, which is not counted in the times]");
        }
    }
    if (o.requests < 1 || o.clients < 1 || o.intruders < 0 || o.vocabulary < 1) DIE("--requests, --clients and --vocabulary: at least one");
    return o;
}

int main(int argc, char** argv) try {
    const Options o = parse_options(argc, argv);
    const std::vector<Request> requests = make_requests(o);
    if (!o.write.empty()) {
        OutputFile file(o.write);
        for (size_t i = 0; i < requests.size(); i++)
            file.write(format("{\"custom_id\": \"%zu\", \"method\": \"POST\", \"url\": \"%s\", \"body\": ", i, requests[i].path.c_str()) + requests[i].body + "}}\n");
        file.commit();
        return 0;
    }
    // Closed loop: a thread a client. Open loop: a thread a request, which sleeps until its time has come.
    std::vector<double> due(requests.size());
    std::mt19937 random((unsigned)o.seed + 1);
    double at = 0;
    if (o.rate > 0) for (double& t : due) t = at += std::exponential_distribution<double>(o.rate)(random);
    std::vector<Outcome> outcomes(requests.size());
    std::vector<std::thread> threads;
    std::mutex mutex;
    size_t next = 0;
    const double start = seconds();
    for (size_t t = 0; t < (o.rate > 0 ? requests.size() : (size_t)o.clients); t++)
        threads.emplace_back([&] {
            for (;;) {
                size_t i;
                {
                    std::lock_guard lock(mutex);
                    if (next == requests.size()) return;
                    i = next++;
                }
                std::this_thread::sleep_for(std::chrono::duration<double>(start + due[i] - seconds()));
                outcomes[i] = ask(o, requests[i]);
            }
        });
    for (auto& t : threads) t.join();
    const double spent = seconds() - start;

    std::vector<double> first, between, whole;
    size_t tokens = 0, prompts = 0, faults = 0;
    for (size_t i = 0; i < requests.size(); i++) {
        const Outcome& r = outcomes[i];
        tokens += r.tokens, prompts += r.prompt;
        if (!r.fault.empty() && faults++ < 3) fprintf(stderr, "request %zu: %s\n", i, r.fault.c_str());
        if (!r.fault.empty() || requests[i].intruder) continue;
        first.push_back(r.first), whole.push_back(r.whole);
        between.insert(between.end(), r.between.begin(), r.between.end());
    }
    printf("%zu requests, %zu faults, %.2f s; %zu tokens in, %zu out: %.1f out tok/s\n", requests.size(), faults, spent, prompts, tokens, (double)tokens / spent);
    percentiles("first token", first);
    percentiles("between tokens", between);
    percentiles("whole answer", whole);
    return faults != 0;
} catch (const std::exception& e) {
    print_error("bench_serve", e.what());
    return 1;
}
