/* serve.cu: many conversations at once. An OpenAI-compatible HTTP server, and its Batch format without HTTP.

   Run:    ./serve model.bin                                         http://127.0.0.1:8000/v1
           ./serve model.bin --batch requests.jsonl -o responses.jsonl

   What happens to a request: a thread of the HTTP library reads and checks it, makes its ids, and hands a Job for each
   answer that is wanted to the Desk. The one thread of the Engine takes jobs from there and computes step after step:
   each step is one call of `forward` on a ragged batch, a token of every running answer and a chunk of the prompts that
   wait. What is drawn goes as a Piece of text to the request's Reply, where the HTTP thread is woken to send it.

   Contracts
   - A text depends on the request and its seed only, not on what runs beside it: draws go by (seed, position), and rows
     of a batch do not depend on each other (on a GPU: with --invariant). So an answer may be interrupted, its pages
     given to others, and computed anew later, and nobody sees it.
   - Keys and values lie in pages of 16 tokens. Whole pages stay where they are when their answer is done, and serve the
     next prompt that begins with the same tokens under the same API key, until their room is needed.
   - Everything that comes over the network is hostile: sizes, counts, ranges and times are limited, below and in
     request.h. What a client did wrong is thrown as Refusal, and answered in OpenAI's form.
   - Nobody can stall it: what waits in memory has a Budget, long texts are tokenized by Workers, the log has a thread
     of its own, and keys take turns by tokens.
   - A text of which only the last hidden state is wanted (`pooled`) is a prompt like any, in slots of its own.
   - Rows of one step may have different adapters (server/adapters.h). What a page holds depends on the adapter, too.

   Where it is (server/)
   engine/   desk.h            between the threads: Job, Piece, Reply, Budget, Desk; several engines (router.h)
             scheduler.h       which jobs run, and a step's rows; sequences, pages and prefix cache (pages.h; on disk
                               disk_pages.h), prompts beside answers (pace.h)
             engine.h          ... and what it computes with: cpu_step.cpp, gpu_step.cu; rows with different adapters
                               (adapters.h, mixed.h, segmented.h)
             speech.h          ids to text: characters, stop strings, thoughts, log-probabilities
   api/      request.h         from JSON to jobs; answer.h: from pieces to JSON; vectors and rankings (embed_api.h,
                               pooled.h); other dialects (asked.h: responses.h, messages.h, predict.h)
             batch.h           a file of requests; filing.h: over HTTP
   http/     server.h          libmicrohttpd, connections, deadlines; exchange.h: a request, its checks, the routes;
                               log.h, workers.h, traffic.h, page.h, openapi.h
   run.h     all of it together; engines.h: one on each GPU
   Here are the options, and main.
*/
#include "base/file.h"
#include "base/options.h"
#include "model/device.h"
#include "model/lookup.h"
#include "model/options.h"
#include "qwen3.h"
#include "search/document_options.h"
#include "search/embed.h"
#include "server/api/batch.h"
#include "server/engine/adapters.h"
#include "server/options.h"
#include "server/run.h"
#include <algorithm>
#include <cctype>
#include <climits>
#include <csignal>
#include <cstring>
#include <set>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

using namespace server;

static std::vector<ApiKey> read_keys(const std::string& path) {
    const MappedFile file(path);
    must_be_text(path, file.text()); // the log is JSON
    std::vector<ApiKey> keys;
    std::set<std::string> seen;
    for (size_t at = 0, number = 1; at < file.size; number++) {
        std::string line(file.text().substr(at, file.text().find('\n', at) - at));
        at += line.size() + 1;
        while (!line.empty() && isspace((unsigned char)line.back())) line.pop_back();
        while (!line.empty() && isspace((unsigned char)line.front())) line.erase(0, 1);
        if (line.empty() || line[0] == '#') continue;
        const size_t end = std::min(line.find_first_of(" \t"), line.size());
        const size_t name = std::min(line.find_first_not_of(" \t", end), line.size());
        keys.push_back({line.substr(0, end), line.substr(name)});
        if (!seen.insert(keys.back().key).second) // never print any part of a key
            DIE("%s: line %zu: this key is there already", path.c_str(), number);
        if (keys.back().name.empty()) keys.back().name = format("key %zu", keys.size());
    }
    if (keys.empty()) DIE("%s: no key in it", path.c_str());
    return keys;
}

static const char* USAGE =
    "usage: serve MODEL [options]                          MODEL: a model.bin or a Hugging Face folder\n"
    "       serve MODEL --batch REQUESTS.jsonl -o RESPONSES.jsonl [options]\n"
    "       serve --version\n";

// NAME=DIR. A value that is an existing folder (runs/lr=1e-4) has no name.
static void add_adapter(Options& o, const char* option, const std::string& value) {
    struct stat st;
    const size_t equals = value.find('=');
    if (equals == value.npos || stat(value.c_str(), &st) == 0) return file_name(o.adapter)(option, value.c_str());
    const std::string name = value.substr(0, equals), folder = value.substr(equals + 1);
    if (folder.empty()) DIE("%s %s: which folder?", option, value.c_str());
    check_adapter_name(name);
    for (auto& other : o.adapters)
        if (other.first == name) DIE("%s %s: the name is taken", option, value.c_str());
    o.adapters.push_back({name, folder});
}

// The text of a file, without the line breaks at its end.
static Setter text_file(std::string& text) {
    return [&text](const char* option, const char* path) {
        text = text_of(path);
        while (!text.empty() && strchr("\r\n", text.back())) text.pop_back();
        if (text.empty()) DIE("%s %s: the file is empty", option, path);
    };
}

static std::vector<Option> option_table(Options& o) {
    auto gigabytes = [](size_t& bytes) -> Setter {
        return [&bytes](const char* option, const char* v) {
            std::string number = v; // "20", or with its unit
            double unit = 1e9;
            for (auto [name, size] : {std::pair("MB", 1e6), {"GB", 1e9}, {"TB", 1e12}})
                if (number.size() > 2 && number.substr(number.size() - 2) == name)
                    number.resize(number.size() - 2), unit = size;
            bytes = (size_t)(parse_number(option, number.c_str(), 1e-6, 1e6) * unit);
        };
    };
    std::vector<Option> table = {
        {"", "--host", "ADDRESS", "address to listen on (default 127.0.0.1: this machine only)",
         file_name(o.server.host)},
        {"-P", "--port", "N", "port (default 8000; 0: any free port)", whole(o.server.port, 0, 65535)},
        {"", "--task", "NAME", "generate, embed or rerank; may be repeated (default: embed if the\n"
         "model's folder says so, else generate)", list(o.tasks)},
        {"", "--name", "NAME", "model name in requests (default: its file's name)", text(o.name)},
        {"-c", "--ctx", "N", "longest prompt plus answer in tokens (default: the model's limit, as far\n"
         "as the KV cache allows)",
         whole(o.engine.context, 2, INT_MAX)},
        {"", "--max-seqs", "N", "answers generated at once (default: CPU 16, GPU 256)",
         whole(o.engine.max_seqs, 1, 4096)},
        {"", "--max-queue", "N", "answers that may wait (default 1024); further requests get status 429,\n"
         "except for API keys below their share of the queue", whole(o.max_queue, 0, 1 << 20)},
        {"", "--kv-memory", "GB", "size of the KV cache (default: CPU at most a quarter of memory, GPU\n"
         "nearly all free memory)",
         gigabytes(o.engine.kv_bytes)},
        {"", "--cache-dir", "DIR", "keep cached pages of prompts in this folder, too: a restart finds them",
         file_name(o.cache)},
        {"", "--cache-size", "GB", "... and at most so many of them, or 500MB, 2TB (default 20)",
         gigabytes(o.cache_bytes)},
        {"", "--chunk", "N", "most prompt tokens in a step that also decodes (default: such a step\n"
         "takes at most 1.7 times as long as without them)", whole(o.engine.chunk, 1, 65536)},
        {"", "--gpus", "N", "GPUs of this host, one engine each (with -d cpu N CPU engines)", whole(o.gpus, 1, 64)},
        o.one_kernel_option("on a GPU: compute a step of up to 8 answers with one kernel (default: on\n"
                            "Hopper, if its copy of the weights fits a tenth of the free memory)"),
        {"", "--lookup", "N", "speculation for an answer that runs alone: propose up to N (at most 7)\n"
         "tokens that followed the latest ones earlier and verify them in one\n"
         "step; answers do not change (default 7; on a GPU only with one kernel\n"
         "per token)",
         whole(o.lookup, 0, LookUp::MOST)},
        {"", "--jump-ahead", "N", "structured output: append N or more tokens without the model if only\n"
         "one continuation is valid (default: CPU 2, GPU 0; 0: never)", whole(o.jump, 0, 512)},
        {"-y", "--system", "TEXT", "system prompt of conversations without one", text(o.system)},
        {"-r", "--think", "0|1", "thinking unless a request sets it (default 0)",
         whole(o.think, 0, 1)},
        {"", "--docs", "PATH", "retrieval: adds passages of a file or folder to each chat, unless a\n"
         "request sets use_documents: false", existing(o.documents.docs)},
    };
    add_document_options(table, o.documents);
    const std::vector<Option> more = {
        {"", "--api-key-file", "FILE", "one API key per line, optionally followed by a name for the log;\n"
         "requests must carry one of them", existing_file(o.key_file)},
        {"", "--deadline", "SECONDS", "time limit of receiving a request, and of a converter of /convert\n"
         "(default 60); connections close after half of it without a byte,\n"
         "answers not fetched after five times of it", whole(o.server.deadline, 1, 86400)},
        {"", "--drain-seconds", "N", "time limit of finishing requests after a signal (default 300)",
         whole(o.server.drain, 0, 86400)},
        {"", "--cors", "ORIGIN", "web origin whose scripts may call; may be repeated", list(o.server.origins)},
        {"", "--predict-status", "NAME", "status in GET / for programs: batch (default: all questions in one\n"
         "request to /predict) or ok (one at a time)", one_of(o.server.predict_status, {"batch", "ok"})},
        {"", "--predict-system", "FILE", "system prompt of /predict (default: as --system)",
         text_file(o.predict_system)},
        {"", "--predict-max-tokens", "N", "longest answer of /predict in tokens (default 384)",
         whole(o.predict_tokens, 1, INT_MAX)},
        {"", "--files", "DIR", "folder of OpenAI's Files and Batches; without it they are off",
         file_name(o.server.files)},
        {"", "--allow-adapter-loading", "", "let clients load and unload adapters from this machine's folders",
         flag(o.server.swaps)},
        {"", "--adapter-memory", "GB", "most memory for adapters that clients load (default: a quarter of the\n"
         "memory free at start, on a GPU half of it)", gigabytes(o.engine.adapter_bytes)},
        {"", "--title", "TEXT", "title of the chat page (default Warp)", text(o.server.title)},
        {"", "--starter", "TEXT", "question suggested on the chat page; may be repeated (default: the\n"
         "model's)",
         list(o.server.starters)},
        {"-b", "--batch", "FILE", "answer a file in OpenAI's Batch format instead of serving HTTP; the same\n"
         "command resumes an interrupted run",
         existing_file(o.batch)},
        {"-o", "--output", "FILE", "output of --batch", output_file(o.output)},
    };
    table.insert(table.end(), more.begin(), more.end());
    o.add_to(table, true);
    for (Option& row : table)
        if (strcmp(row.name, "--adapter") == 0)
            row = {"", "--adapter", "NAME=DIR",
             "LoRA adapter in PEFT's format; requests name it as their model; may be\n"
         "repeated. DIR alone: for all requests",
                   [&o](const char* option, const char* v) { add_adapter(o, option, v); }};
    return table;
}

static Options parse_options(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = option_table(o);
    const std::vector<std::string> words = parse(table, argc, argv);
    if (o.help) return print_help(USAGE, table), o;
    if (words.empty()) DIE("no model named (--help lists the options)");
    if (words.size() > 1) DIE("expected one model: %s and %s", words[0].c_str(), words[1].c_str());
    o.model = words[0];
    if (o.batch.empty() != o.output.empty())
        DIE(o.output.empty() ? "--batch needs -o FILE, where the answers go" : "-o is for --batch");
    for (auto& task : o.tasks)
        if (task != "generate" && task != "embed" && task != "rerank")
            DIE("--task %s: generate, embed or rerank", task.c_str());
    if (o.cache_bytes && o.cache.empty()) DIE("--cache-size is for --cache-dir");
    o.server.think = o.think, o.server.docs = !o.documents.docs.empty();
    check_document_options(o.documents);
    check_starters("--starter", o.server.starters);
    if (!o.key_file.empty()) o.server.keys = read_keys(o.key_file);
    if (o.name.empty()) {
        while (o.model.size() > 1 && o.model.back() == '/') o.model.pop_back();
        o.name = o.model.substr(o.model.rfind('/') + 1);
    }
    for (auto& one : o.adapters)
        if (one.first == o.name) DIE("--adapter %s=%s: the model has this name", o.name.c_str(), one.second.c_str());
    if (o.name.find_first_of("\"\\\n") != std::string::npos) DIE("--name %s: no quotes or backslashes", o.name.c_str());
    return o;
}

// The first signal starts a drain: work in progress finishes. A second one, or one during loading, exits at once.
// A signal may interrupt any thread: hence the atomics.
static void on_signal(int) {
    if (loading || stopping.exchange(true)) leave(130);
    interrupted = 1; // stops the lookups of batches; those of other requests finish
}

// One adapter for all requests, or several to choose from.
static void check_adapters(const Options& o) {
    if (!o.adapter.empty() && (!o.adapters.empty() || o.server.swaps))
        DIE("--adapter %s is for all requests: it does not go with %s", o.adapter.c_str(),
            o.adapters.empty() ? "--allow-adapter-loading" : "--adapter NAME=DIR");
    if (o.engine.adapter_bytes && !o.server.swaps) DIE("--adapter-memory is for --allow-adapter-loading");
    const bool public_one = o.server.host.compare(0, 4, "127.") && o.server.host != "::1";
    if (o.server.swaps && public_one && o.server.keys.empty())
        DIE("--allow-adapter-loading needs --api-key-file where other machines can call (--host %s)",
            o.server.host.c_str());
}

static int run(int argc, char** argv) {
    const double start = seconds();
    if (told_version("serve", argc, argv)) return 0;
    Options o = parse_options(argc, argv);
    if (o.help) return 0;
    o.use_threads();
    open_adapter(o);
    check_adapters(o);
    if (o.gpus > 1 && (!o.adapters.empty() || o.server.swaps))
        DIE("--gpus %d: adapters by name are for one GPU", o.gpus);
    if (o.gpus > 1 && o.device.empty() && !WITH_GPU)
        DIE("--gpus %d: this program was built without nvcc (-d cpu: engines on the CPU)", o.gpus);
    if (o.gpus > 1 && o.device.empty()) o.device = "cuda";
    ModelFile file = open_model(o);
    if (o.tasks.empty()) o.tasks = {says_it_embeds(file) ? "embed" : "generate"};
    file.logits = o.does("generate");
    o.ctx = choose_device(o, file);
    return wide(o, file) ? serve<float>(o, file, start) : serve<bf16>(o, file, start);
}

int main(int argc, char** argv) {
    take_signals({}, {SIGPIPE}); // SIGINT and SIGTERM have a handler of their own
    struct sigaction action = {};
    action.sa_handler = on_signal;
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    return run_program("serve", run, argc, argv);
}
