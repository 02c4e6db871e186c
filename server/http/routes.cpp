// routes.cpp: the handlers of the paths.
#include "model/tokenizer.h"
#include "qwen3.h"
#include "server/api/asked.h"
#include "server/api/convert.h"
#include "server/api/fields.h"
#include "server/api/limits.h"
#include "server/api/paths.h"
#include "server/api/prompts.h"
#include "server/api/request.h"
#include "server/http/exchange.h"
#include "server/http/openapi.h"
#include "server/http/page.h"
#include "server/http/paths.h"
#include "sj.h"
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

namespace server {

Response Exchange::route() {
    const std::string asked = method == "HEAD" ? "GET" : method; // the library omits the body
    auto only = [&](const char* allowed) {
        if (asked != allowed) throw Refusal(405, format("%s takes %s only", path.c_str(), allowed), allowed);
    };
    const bool ready = server.ready && !server.draining;
    if (method == "OPTIONS") return {204, ""};
    if (path == "/") { // browsers get the page, which waits for the model; other clients get the course's health
        only("GET");
        if (std::string(header("Accept")).find("text/html") == std::string::npos) {
            const char* status = ready ? server.options.predict_status.c_str()
                                       : server.ready ? "draining" : "initializing";
            const std::string told = format("{\"status\": \"%s\"}", status);
            return {ready ? 200 : 503, told, "application/json", {{"Vary", "Accept"}}};
        }
        ChatPage page(server.options);
        return {200, std::move(page.html), "text/html; charset=utf-8", {{"Content-Security-Policy", page.policy},
                {"Cache-Control", "no-store"}, {"Vary", "Accept"}, {"Referrer-Policy", "no-referrer"}}};
    }
    if (path == "/temml.js") {
        only("GET");
        return {200, std::string(temml_script), "text/javascript; charset=utf-8", {{"Cache-Control", "max-age=86400"}}};
    }
    if (path == "/version") {
        only("GET");
        return {200, format("{\"version\": \"%d\"}", QWEN3_VERSION)};
    }
    if (path == "/openapi.json") {
        only("GET");
        return {200, openapi_document()};
    }
    if (path == "/health" || path == "/ping") {
        only("GET");
        const char* status = ready ? "ok" : server.ready ? "draining" : "loading";
        return {ready ? 200 : 503, format("{\"status\": \"%s\"}", status)};
    }
    if (path == "/metrics") {
        only("GET");
        return {200, metrics(), "text/plain; version=0.0.4"};
    }
    const bool tokenize = path == "/tokenize", detokenize = path == "/detokenize", count = path == COUNT_TOKENS;
    if (filed()) {
        if (!ready) throw Refusal(503, server.ready ? "the server is shutting down" : "the model is loading");
        auto argument = [&](const char* name) -> std::optional<std::string> {
            const char* value = MHD_lookup_connection_value(connection, MHD_GET_ARGUMENT_KIND, name);
            if (!value) return {};
            return value;
        };
        Filed told = server.filing->handle(caller, asked, path, header("Content-Type"), body, argument);
        const char* type = told.path.empty() ? "application/json" : "application/octet-stream";
        return {200, std::move(told.json), type, {}, std::move(told.path)};
    }
    const bool convert = path == CONVERT;
    if (!is_asked(path) && !models() && !tokenize && !detokenize && !tokenizer_info() && !convert && !count && !swaps())
        throw Refusal(404, "there is nothing here; / and /v1/chat/completions are");
    only(models() || tokenizer_info() ? "GET" : "POST");
    if (!ready) throw Refusal(503, server.ready ? "the server is shutting down" : "the model is loading");
    const Service& service = server.service;
    if (models()) return list_models();
    if (tokenizer_info()) return {200, service.tokenizer_info};
    if (swaps()) return {200, path == LOAD_ADAPTER ? load_adapter(service) : unload_adapter(service)};
    if (tokenize) return {200, tokens_of(service)};
    if (detokenize) return {200, text_of(service)};
    if (convert) {
        const char* name = MHD_lookup_connection_value(connection, MHD_GET_ARGUMENT_KIND, "name");
        return {200, converted_document(name ? name : "", body, &gone, server.options.deadline)};
    }
    if (count) return {200, count_message_tokens(service, body)};

    auto [ask, told] = read_asked(service, path, body, caller);
    if (!ask.pooled && ask.jobs.size() > server.desk.limit)
        throw Refusal(400, format("the queue has room for %zu answers", server.desk.limit),
                      path == PREDICT ? "prompt" : "n");
    answer = std::move(told);
    if (ask.jobs.empty()) return {200, answer->whole()};
    stream = ask.stream;
    const std::shared_ptr<Reply> r = ask.jobs[0].reply;
    r->share = unsent, charged = true;
    r->wake = [this, reply = r.get()] { // called by the engine's thread or watch(); reply->mutex is held
        if (!suspended || !(stream || reply->left == 0 || reply->cancelled)) return;
        suspended = false;
        MHD_resume_connection(connection);
    };
    leave_desk();
    if (!server.desk.submit(std::move(ask.jobs))) {
        r->left = 0;
        throw queue_is_full();
    }
    reply = r;
    std::lock_guard lock(server.mutex);
    known_to_watch = true, peer.exchange = this;
    return {0, ""};
}

Response Exchange::list_models() const {
    const Service& service = server.service;
    const std::string one = path.size() > 11 ? path.substr(11) : "";
    sj::Writer w;
    if (path.size() == 10) w.object().field("object", "list").key("data").array();
    size_t told = 0;
    auto write = [&](const std::string& name, const std::string& root, long created, bool adapter) {
        if (path.size() > 10 && name != one) return;
        write_model(w, service, name, root, created, adapter);
        told++;
    };
    write(service.name, service.path, 0, false);
    for (auto& [name, adapter] : service.adapters->now()) write(name, adapter->folder, adapter->created, true);
    if (!told) throw no_such_model(service);
    if (path.size() == 10) w.end().end();
    return {200, w.text};
}

void Exchange::write_model(sj::Writer& w, const Service& service, const std::string& name, const std::string& root,
                           long created, bool adapter) {
    w.object().field("id", name).field("object", "model").field("created", created).field("owned_by", "qwen3.cu");
    w.field("root", root);
    if (adapter) w.field("parent", service.name);
    else w.field("parent", nullptr);
    w.field("max_model_len", service.context).end();
}

std::string Exchange::load_adapter(const Service& service) {
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    refuse_others(f, {"lora_name", "lora_path", "load_inplace"});
    refuse_values(f, {{"load_inplace", {"false"}}});
    const std::string name = adapter_name(f), folder = f.text("lora_path");
    if (folder.empty()) throw Refusal(400, "lora_path is missing", "lora_path");
    if (folder.find('\0') != std::string::npos) throw Refusal(400, "lora_path is no path", "lora_path");
    if (name == service.name) throw Refusal(400, "lora_name is the model's own name", "lora_name");
    const AdapterPtr one = blame("lora_name", [&] { return service.adapters->load(name, folder); });
    swapped = name;
    sj::Writer w;
    write_model(w, service, name, folder, one->created, true);
    return w.text;
}

std::string Exchange::unload_adapter(const Service& service) {
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    refuse_others(f, {"lora_name"});
    const std::string name = adapter_name(f);
    if (!service.adapters->unload(name))
        throw Refusal(404, "there is no such adapter", "lora_name", "model_not_found");
    swapped = name;
    sj::Writer w;
    return w.object().field("id", name).field("object", "model").field("deleted", true).end().text;
}

std::string Exchange::adapter_name(const Fields& f) {
    const std::string name = f.text("lora_name");
    if (name.empty()) throw Refusal(400, "lora_name is missing", "lora_name");
    return name;
}

std::string Exchange::tokens_of(const Service& service) const {
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    std::vector<int> ids;
    PromptOptions any;
    any.truncate = SIZE_MAX; // whether it fits or not
    if (f["messages"]) any.chat = chat_options_from_json(service, f), ids = chat_prompt(service, f, any);
    else { // special tokens in a text are text, as in a prompt; but a client that names the field expects vLLM's ids
        f.boolean("add_special_tokens", true); // (nothing goes before a text: either value has the same ids)
        ids = service.tokenizer->encode(f.text("prompt"), (bool)f["add_special_tokens"]);
    }
    if (!f["messages"] && !f["prompt"]) throw Refusal(400, "neither prompt nor messages", "prompt");
    sj::Writer w;
    w.object().field("count", ids.size()).field("max_model_len", service.context).key("tokens").array();
    for (int id : ids) w.value(id);
    return w.end().end().text;
}

std::string Exchange::text_of(const Service& service) const {
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    if (!f["tokens"].is(sj::Array)) throw Refusal(400, "tokens must be a list of token ids", "tokens");
    const std::vector<int> ids = ids_from_json(service, f["tokens"], "tokens");
    size_t bytes = 0;
    for (int id : ids) bytes += service.tokenizer->bytes(id).size();
    if (bytes > MAX_BODY) throw Refusal(400, format("the text has more than %zu bytes", MAX_BODY), "tokens");
    sj::Writer w;
    return w.object().field("prompt", service.tokenizer->decode(ids, false)).end().text;
}

} // namespace server
