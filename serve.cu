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
             scheduler.h       which jobs run, and a step's rows; sequences, pages and prefix cache (pages.h), prompts
                               beside answers (pace.h)
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
        text = MappedFile(path).text();
        while (!text.empty() && strchr("\r\n", text.back())) text.pop_back();
        if (text.empty()) DIE("%s %s: the file is empty", option, path);
    };
}

static std::vector<Option> option_table(Options& o) {
    auto gigabytes = [](size_t& bytes) -> Setter {
        return [&bytes](const char* option, const char* v) {
            bytes = (size_t)(parse_number(option, v, 1e-6, 1e6) * 1e9);
        };
    };
    std::vector<Option> table = {
        {"", "--host", "ADDRESS", "default 127.0.0.1: this machine only", file_name(o.server.host)},
        {"-P", "--port", "N", "default 8000; 0 takes a free one", whole(o.server.port, 0, 65535)},
        {"", "--task", "NAME", "generate, embed or rerank; may be repeated (default: embed where the\n"
         "model's folder says so, else generate)", list(o.tasks)},
        {"", "--name", "NAME", "the model's, for requests (default: its file's)", text(o.name)},
        {"-c", "--ctx", "N", "tokens of a prompt and its answer (default: the model's limit, as\nfar as the KV cache holds it)",
         whole(o.engine.context, 2, INT_MAX)},
        {"", "--max-seqs", "N", "answers at once (default: CPU 16, GPU 256)", whole(o.engine.max_seqs, 1, 4096)},
        {"", "--max-queue", "N", "answers that may wait (default 1024); beyond it requests get status\n"
         "429, unless their API key has less than its share of the queue", whole(o.max_queue, 0, 1 << 20)},
        {"", "--kv-memory", "GB", "of the KV cache (default: CPU a quarter of the memory at most, GPU\nnearly all)",
         gigabytes(o.engine.kv_bytes)},
        {"", "--chunk", "N", "tokens of prompts in a step that others wait for (default: as many as\n"
         "keep it within 1.7 times a step without them)", whole(o.engine.chunk, 1, 65536)},
        {"", "--gpus", "N", "of this host: an engine each (with -d cpu N engines on the CPU)", whole(o.gpus, 1, 64)},
        o.one_kernel_option("on a GPU: a step of up to 8 answers is one kernel (default: on\n"
                            "Hopper, if a tenth of the free memory holds its copy of the weights)"),
        {"", "--lookup", "N", "of an answer that runs alone: what followed its latest words before\n"
         "is computed with the next token, N tokens at most (up to 7), while it\n"
         "pays; the answer is the same (default: 7; on a GPU only if a token\nis one kernel)",
         whole(o.lookup, 0, LookUp::MOST)},
        {"", "--jump-ahead", "N", "where a form leaves no choice about N tokens or more, they are taken at\n"
         "once (default: CPU 2, GPU 0; 0: never, they cost a step each)", whole(o.jump, 0, 512)},
        {"-y", "--system", "TEXT", "system prompt of conversations that have none", text(o.system)},
        {"-r", "--think", "0|1", "whether the model thinks first where a request does not say\n(default 0)",
         whole(o.think, 0, 1)},
        {"", "--docs", "PATH", "chats are answered from a file or a folder of text: with a question go\n"
         "the passages that it is about, unless a request says use_documents: false", file_name(o.documents.docs)},
    };
    add_document_options(table, o.documents);
    const std::vector<Option> more = {
        {"", "--api-key-file", "FILE", "a key a line, behind it maybe a name for the log; requests must\nhave one of them", file_name(o.key_file)},
        {"", "--deadline", "SECONDS", "for a request to come in (default 60); half of it without a byte, five\n"
         "times of it to fetch an answer: then the connection is closed", whole(o.server.deadline, 1, 86400)},
        {"", "--drain-seconds", "N", "for what is under way when a signal comes (default 300)",
         whole(o.server.drain, 0, 86400)},
        {"", "--cors", "ORIGIN", "a web site whose scripts may call; may be repeated", list(o.server.origins)},
        {"", "--predict-status", "NAME", "of GET / for programs: batch (default: all questions in one request to\n"
         "/predict) or ok (one at a time)", one_of(o.server.predict_status, {"batch", "ok"})},
        {"", "--predict-system", "FILE", "system prompt of /predict (default: --system's)", text_file(o.predict_system)},
        {"", "--predict-max-tokens", "N", "of an answer to /predict (default 384)", whole(o.predict_tokens, 1, INT_MAX)},
        {"", "--files", "DIR", "offers OpenAI's Files and Batches, which are kept in this folder",
         file_name(o.server.files)},
        {"", "--allow-adapter-loading", "", "clients may load adapters from this machine's folders, and unload them",
         flag(o.server.swaps)},
        {"", "--adapter-memory", "GB", "of adapters' files, all together, when clients load more (default: of\n"
         "what is free at the start CPU a quarter, GPU half)", gigabytes(o.engine.adapter_bytes)},
        {"", "--title", "TEXT", "name of the page to chat on (default Warp)", text(o.server.title)},
        {"", "--starter", "TEXT", "a question that this page offers; may be repeated (default: the model's)",
         list(o.server.starters)},
        {"-b", "--batch", "FILE", "OpenAI's Batch format instead of HTTP; interrupted, the same command\ngoes on",
         file_name(o.batch)},
        {"-o", "--output", "FILE", "where the answers of --batch go", file_name(o.output)},
    };
    table.insert(table.end(), more.begin(), more.end());
    o.add_to(table, true);
    for (Option& row : table)
        if (strcmp(row.name, "--adapter") == 0)
            row = {"", "--adapter", "NAME=DIR", "a LoRA adapter in PEFT's format, which requests name as their\n"
                   "model; may be repeated. DIR alone: for all requests",
                   [&o](const char* option, const char* v) { add_adapter(o, option, v); }};
    return table;
}

static Options parse_options(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = option_table(o);
    const std::vector<std::string> words = parse(table, argc, argv);
    if (o.help) return print_help(USAGE, table), o;
    if (words.empty()) DIE("no model named (--help lists the options)");
    if (words.size() > 1) DIE("one model, please: %s and %s", words[0].c_str(), words[1].c_str());
    o.model = words[0];
    if (o.batch.empty() != o.output.empty())
        DIE(o.output.empty() ? "--batch needs -o FILE, where the answers go" : "-o is for --batch");
    for (auto& task : o.tasks)
        if (task != "generate" && task != "embed" && task != "rerank")
            DIE("--task %s: generate, embed or rerank", task.c_str());
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
    if (loading || stopping.exchange(true)) _exit(130);
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
    ModelFile file(o.model);
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
