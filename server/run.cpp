// run.cpp: creates the parts of the program, in order.
#include "base/error.h"
#include "base/file.h"
#include "base/unfinished.h"
#include "model/adapters.h"
#include "model/cpu.h"
#include "model/device.h"
#include "model/instances.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "search/documents.h"
#include "search/embed.h"
#include "search/hybrid.h"
#include "search/quote.h"
#include "search/rerank.h"
#include "server/api/batch.h"
#include "server/api/limits.h"
#include "server/api/refusal.h"
#include "server/api/service.h"
#include "server/api/shelf.h"
#include "server/api/tokenizer_info.h"
#include "server/engine/adapted_model.h"
#include "server/engine/desk.h"
#include "server/engine/disk_pages.h"
#include "server/engine/engine.h"
#include "server/engines.h"
#include "server/http/server.h"
#include "server/run.h"
#include "sj.h"
#include <memory>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace server {

std::string batch_depends(const Options& o, const ModelFile& file, const AdapterFile* adapter,
                          const Tokenizer& tokenizer, const Documents* documents) {
    sj::Writer w;
    w.object();
    if (!o.batch.empty()) {
        const MappedFile requests(o.batch);
        w.field("requests", fnv1a(requests.data, requests.size));
    }
    w.field("name", o.name).field("model", file.hash());
    w.field("adapter", adapter ? adapter_hash(*adapter, 1) : 0).field("tokenizer", tokenizer.hash());
    if (documents) w.field("documents", documents->hash()).field("quote", o.documents.quote);
    w.field("dtype", o.dtype);
    if (o.ctx.kv_fp8) w.field("kv", "fp8");
    if (o.ctx.fp8_activations) w.field("activations", "fp8");
    if (o.ctx.int8_activations) w.field("activations", "int8");
    if (file.is_quantized() && keeps_packed<bf16>(o, o.ctx)) w.field("packed", true);
    w.field("plain", o.ctx.plain).field("context", o.engine.context).field("think", o.think);
    return w.field("system", o.system).end().text;
}

// Everything that keys and values depend on, except tokens, adapters by name and API keys. The program is part of it:
// another compiler or another order of sums changes bits.
template <class T>
static std::string pages_depend(const Options& o, const ModelFile& file, const AdapterFile* adapter) {
    const Config& c = file.config;
    const RopeScaling& r = c.rope_scaling;
    const MappedFile program("/proc/self/exe");
    sj::Writer w;
    w.object().field("model", file.hash()).field("adapter", adapter ? adapter_hash(*adapter, 1) : 0);
    w.field("program", checksum(0, program.data, program.size / 8 * 8)).field("number", sizeof(T)).field("page", PAGE);
    w.field("layers", c.L).field("width", c.C).field("heads", c.H).field("kv_heads", c.K).field("head_size", c.D);
    w.field("theta", (double)c.rope_theta).field("rope", (int)r.type).field("factor", r.factor);
    w.field("original", r.original).field("attention", r.attention).field("fast", r.fast).field("slow", r.slow);
    w.field("truncate", r.truncate).field("dtype", o.dtype).field("kv_fp8", o.ctx.kv_fp8);
    w.field("fp8_activations", o.ctx.fp8_activations).field("int8_activations", o.ctx.int8_activations);
    w.field("packed", file.is_quantized() && keeps_packed<T>(o, o.ctx));
    w.field("plain", o.ctx.plain).field("invariant", o.ctx.invariant);
    std::string device = instruction_set_name(instruction_set);
    if constexpr (WITH_GPU) if (o.ctx.gpu) device = gpu_name(0);
    return w.field("device", device).end().text;
}

static std::unique_ptr<DiskPages> open_cache(const Options& o, const std::string& depends) {
    std::vector<std::string> keys;
    for (auto& one : o.server.keys) keys.push_back(one.key);
    return std::make_unique<DiskPages>(o.cache, o.cache_bytes ? o.cache_bytes : 20'000'000'000, depends, keys,
                                       [](auto& line) { print_error("serve", line); });
}

// Serves until a signal, then finishes the requests in progress; or until no engine is left.
static int serve_http(const Options& o, Server& server, const std::string& depends) {
    server.ready = true;
    if (server.filing) server.filing->start(server.service, server.desk, depends);
    const bool six = o.server.host.find(':') != std::string::npos;
    const char* host = o.server.host.c_str();
    fprintf(stderr, "listening on http://%s%s%s:%d/v1; a page to chat on is at /\n", six ? "[" : "", host, six ? "]" : "",
            server.port());
    for (; !stopping && !server.desk.failed; usleep(200'000)) server.watch();
    stopping = true;
    server.drain();
    if (server.filing) server.filing->stop();
    if (!server.desk.failed) return 0;
    server.stop();
    leave(1); // without destructors: a GPU that has failed frees nothing
}

template <class T> int serve(Options& o, const ModelFile& file, double start) {
    const Config& c = file.config;
    const bool gpu = o.ctx.gpu != nullptr, http = o.batch.empty();
    EngineOptions& e = o.engine;
    if (o.does("embed") || o.does("rerank")) e.texts = gpu ? 256 : 64;
    e.adapters = !o.adapters.empty() || o.server.swaps;
    if (!e.context) e.context = c.max_positions, e.at_most = true;
    if (!e.max_seqs) e.max_seqs = gpu ? 256 : 16;
    e.burst = gpu ? 8192 : 512;
    e.paced = !e.chunk;
    if (!e.chunk) e.chunk = gpu ? 64 : 8; // on a GPU so many hardly cost more than one
    if (o.jump < 0) o.jump = gpu ? 0 : 2; // a GPU step that is not all single tokens has no graph, and costs more
    e.jump = o.jump;
    e.lookup = o.lookup >= 0 ? o.lookup : LookUp::MOST;
    if (e.context > c.max_positions)
        DIE("--ctx %d: the model's limit is %d (--rope-scaling raises it)", e.context, c.max_positions);

    std::unique_ptr<AdapterFile> adapter;
    if (!o.adapter.empty()) adapter = std::make_unique<AdapterFile>(o.adapter, c);
    Starters& starters = o.server.starters;
    if (starters.empty() && adapter) starters = adapter->starters;
    if (starters.empty()) starters = file.starters;
    Desk desk;
    desk.keys = std::max<size_t>(1, o.server.keys.size());
    desk.limit = (size_t)(http ? o.max_queue + o.gpus * e.max_seqs : 4 * o.gpus * e.max_seqs + 2 * MAX_CHOICES);
    std::unique_ptr<DiskPages> disk; // outlives the server, whose metrics ask it
    Server server(o.server, desk);
    if (http) server.start(); // so that it can report that it is loading

    const Tokenizer tokenizer = tokenizer_of(tokenizer_path(o), file);
    if (const std::string note = template_note(file, tokenizer); !note.empty()) print_error("serve", note);
    std::vector<AdapterFile> named; // errors in them are reported before the model is read
    for (auto& one : o.adapters) named.emplace_back(one.second, c);
    std::shared_ptr<const Documents> documents;
    if (!o.documents.docs.empty())
        documents = std::make_shared<Documents>(o.documents, [](auto& line) { print_error("serve", line); },
                                                open_document_models(o, o.documents));
    std::unique_ptr<Batcher> batch;
    if (!http) {
        const std::string depends = batch_depends(o, file, adapter.get(), tokenizer, documents.get());
        AdapterHashes hashes;
        for (size_t i = 0; i < named.size(); i++) hashes[o.adapters[i].first] = adapter_hash(named[i], 1);
        batch = std::make_unique<Batcher>(o.batch, o.output, depends, hashes);
    }
    if (!o.cache.empty()) disk = open_cache(o, pages_depend<T>(o, file, adapter.get()));
    e.disk = disk.get();
    Weights<T> weights(file, made_format(o), keeps_packed<T>(o, o.ctx)); // all files of options are open
    to_device(o.ctx, file, weights);
    decode_for_long(o.ctx, file, weights);
    std::unique_ptr<AttachedAdapter<T>> attached;
    const int rows = e.max_seqs + std::max(e.chunk, e.burst);
    if (adapter) attached = std::make_unique<AttachedAdapter<T>>(o.ctx, weights, *adapter, rows);
    std::vector<AdapterPtr> present; // before the engine takes the remaining memory
    for (size_t i = 0; i < named.size(); i++)
        present.push_back(std::make_shared<AdaptedModel<T>>(o.ctx, weights, named[i], o.adapters[i].first, rows));
    named.clear();
    Engine<T> engine(c, weights, tokenizer, desk, e, o.ctx);
    if (o.lookup > 0 && !engine.lookup.most)
        DIE("--lookup %d: on a GPU it needs --one-kernel (bf16 weights and keys, room for a copy)", o.lookup);
    Engines<T> engines(o, file, adapter.get(), engine);

    const int context = engine.options.context;
    server.service = {&tokenizer, o.name, o.system, context, o.think == 1};
    server.service.path = o.model, server.service.disk = disk.get();
    server.service.tokenizer_info = tokenizer_info(file, tokenizer);
    server.service.predicts = {o.predict_system, o.predict_tokens};
    Adapters& adapters = *server.service.adapters;
    const size_t room = engine.room_for_adapters(); // for all adapters that clients load
    adapters.open = [&, room](const std::string& name, const std::string& folder) {
        const AdapterFile from = blame("lora_path", [&] { return AdapterFile(folder, c, true); });
        if (LoadedAdapter::alive_bytes() + from.map.size > room)
            throw Refusal(503, format("adapters may take %.3g GB together, those that still answer included",
                                      (double)room / 1e9));
        try {
            return engine.attach(from, name);
        } catch (const Error& e) { // out of memory
            throw Refusal(503, e.what());
        }
    };
    for (auto& one : present) adapters.add(one);
    present.clear();
    server.service.documents = documents;
    server.service.quotes = would_quote(o.documents, c);
    quotes(o.documents, c, [](auto& line) { print_error("serve", line); });
    server.service.shelf = std::make_shared<Shelf>();
    server.service.generates = o.does("generate");
    if (o.does("embed")) end_of_text(tokenizer), server.service.dimensions = c.C;
    if (o.does("rerank")) {
        server.service.rerank = std::make_shared<RerankPrompt>(tokenizer);
        server.service.relevance = std::make_shared<Relevance>(o.ctx, weights, *server.service.rerank);
    }
    const std::string why = context == c.max_positions ? " (the model's limit)"
                          : e.at_most ? format(" (what memory allows of the model's %d)", c.max_positions) : "";
    const std::string several = o.gpus > 1 ? format("%d x ", o.gpus) : "";
    fprintf(stderr, "%s: %.1f M parameters, %s, %s%s, context %d%s%s, %d at once, %zu %spages of %d tokens; "
            "ready in %.2f s\n", o.name.c_str(), (double)parameters(c) / 1e6, type_name(weights), several.c_str(),
            device_name(o.ctx).c_str(), context, why.c_str(), c.rope_scaling.note().c_str(), o.gpus * e.max_seqs,
            desk.look().pages, o.ctx.kv_fp8 ? "FP8 " : "", PAGE, seconds() - start);
    if (disk) fprintf(stderr, "%s\n", disk->told().c_str());
    engines.start(o);
    loading = false;
    const std::string depends =
        o.server.files.empty() ? "" : batch_depends(o, file, adapter.get(), tokenizer, documents.get());
    return http ? serve_http(o, server, depends) : batch->run(server.service, desk);
}

#define INSTANTIATE(T) template int serve<T>(Options&, const ModelFile&, double);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

} // namespace server
