// exchange.cpp: reads, checks and logs a request.
#include "base/file.h"
#include "form/grammar.h"
#include "search/hybrid.h"
#include "server/api/convert.h"
#include "server/api/messages.h"
#include "server/api/paths.h"
#include "server/engine/random_bits.h"
#include "server/http/exchange.h"
#include "server/http/log.h"
#include "server/http/paths.h"
#include "sj.h"
#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <strings.h>

namespace server {

Exchange::Exchange(Server& s, MHD_Connection* c, Peer& p, const char* url, const char* m, const char* version)
    : server(s), connection(c), peer(p), method(m), path(url), newest(strcmp(version, "HTTP/1.1") == 0) {
    request_id = header("X-Request-Id");
    auto plain = [](char c) { return isalnum((unsigned char)c) || strchr("._-", c); };
    if (request_id.empty() || request_id.size() > 64 || !std::all_of(request_id.begin(), request_id.end(), plain))
        request_id = format("%016llx", (unsigned long long)random_bits());
    upload.who = unsent->who = peer.address;
    upload.drop = [this] { std::string().swap(body); };
}

Exchange::~Exchange() {
    if (known_to_watch) {
        std::lock_guard lock(server.mutex); // the server forgets this exchange
        peer.exchange = nullptr;
    }
    if (reply) {
        std::lock_guard lock(reply->mutex);
        reply->wake = nullptr;
        if (reply->left) reply->cancelled = true;
        first_token = reply->first;
    }
    server.bodies.remove(upload);
    if (charged) server.desk.unsent.remove(*unsent);
    log();
    server.traffic.add(known(method, {"GET", "HEAD", "POST", "DELETE", "OPTIONS"}), route_name(), status,
                       seconds() - start);
    peer.phase = Peer::WAITING, peer.since = seconds();
    if (counted) server.answering--;
}

std::vector<std::string> Exchange::headers(const char* name) const {
    struct Wanted { const char* name; std::vector<std::string> values; } wanted = {name, {}};
    auto take = [](void* self, MHD_ValueKind, const char* name, const char* value) {
        Wanted& w = *(Wanted*)self;
        if (strcasecmp(name, w.name) == 0) w.values.push_back(value ? value : "");
        return MHD_YES;
    };
    MHD_get_connection_values(connection, MHD_HEADER_KIND, take, &wanted);
    return wanted.values;
}

MHD_Result Exchange::head() {
    try {
        check_framing();
    } catch (const Refusal& r) {
        return respond({r.status, fault(r), "application/json", {{"Connection", "close"}}});
    }
    try {
        check_head();
    } catch (const Refusal& r) {
        refusal = std::make_unique<Refusal>(r);
    }
    return MHD_YES;
}

// Whether all header names are tokens and no value has a control character (RFC 9110, 5.5 and 5.6.2). The library
// accepts anything: it does not recognize "Content-Length :", and a lone carriage return ends no line for it.
static bool good_headers(MHD_Connection* connection) {
    bool good = true;
    auto look = [](void* good, MHD_ValueKind, const char* name, const char* value) {
        auto is_token = [](char c) { return isalnum((unsigned char)c) || (c && strchr("!#$%&'*+-.^_`|~", c)); };
        auto is_control = [](char c) { return iscntrl((unsigned char)c) && c != '\t'; };
        if (!*name || !std::all_of(name, name + strlen(name), is_token)) *(bool*)good = false;
        if (value && std::any_of(value, value + strlen(value), is_control)) *(bool*)good = false;
        return MHD_YES;
    };
    MHD_get_connection_values(connection, MHD_HEADER_KIND, look, &good);
    return good;
}

void Exchange::check_framing() const {
    if (!good_headers(connection)) throw Refusal(400, "a header's name is no token, or its value no text");
    if (newest && headers("Host").empty()) throw Refusal(400, "a request of HTTP/1.1 needs a Host");
    const auto lengths = headers("Content-Length"), encodings = headers("Transfer-Encoding");
    if (!encodings.empty() && (encodings.size() > 1 || lower(encodings[0]) != "chunked"))
        throw Refusal(501, "Transfer-Encoding: only chunked is supported");
    if (!encodings.empty() && (!lengths.empty() || !newest))
        throw Refusal(400, "Transfer-Encoding does not go with Content-Length, nor with HTTP/1.0");
    if (lengths.size() > 1 || headers("Host").size() > 1)
        throw Refusal(400, "more than one Content-Length or Host");
    if (!lengths.empty() && strtoull(lengths[0].c_str(), nullptr, 10) > most_body())
        throw Refusal(413, format("a request may have %zu bytes", most_body()));
}

bool Exchange::looks_up() const {
    const bool chat = path == CHAT || path == RESPONSES || path == MESSAGES || path == COUNT_TOKENS ||
                      path == PREDICT;
    return chat && server.service.documents;
}

size_t Exchange::most_body() const {
    if (path == CONVERT) return MAX_CONVERTED;
    return filed() && path == "/v1/files" ? MAX_UPLOAD + SMALL_BODY : MAX_BODY;
}

bool Exchange::takes_no_post() const {
    const bool cancel = path.size() > 7 && path.compare(path.size() - 7, 7, "/cancel") == 0;
    return models() || tokenizer_info() || (filed() && !cancel && path != "/v1/files" && path != "/v1/batches");
}

void Exchange::check_head() {
    if (server.loopback()) { // against DNS rebinding: a web page's own name that resolves to this address
        std::string host = lower(header("Host"));
        const size_t colon = host.rfind(':');
        if (colon != std::string::npos && host.find(']', colon) == std::string::npos) host.resize(colon);
        if (host != "localhost" && host != "127.0.0.1" && host != "[::1]" && host != server.options.host &&
            !host.empty())
            throw Refusal(403, "this server answers to localhost only (--host makes it public)");
    }
    const std::string encoding = header("Content-Encoding");
    if (!encoding.empty() && encoding != "identity") throw Refusal(415, "Content-Encoding is not supported");
    const bool open = known(path, {"/", "/temml.js", "/health", "/ping", "/version", "/openapi.json", "/metrics"}) ==
                      path;
    if (method == "POST" && !open && !takes_no_post()) { // a path that takes no POST is refused for that first
        std::string type = header("Content-Type");
        type.resize(std::min(type.find(';'), type.size()));
        while (!type.empty() && type.back() == ' ') type.pop_back();
        const char* wanted = path == CONVERT                          ? "application/octet-stream"
                             : filed() && path == "/v1/files" ? "multipart/form-data"
                                                              : "application/json";
        if (strcasecmp(type.c_str(), wanted)) throw Refusal(415, format("Content-Type must be %s", wanted));
        const std::string origin = header("Origin"); // any site's page can send a form without a preflight
        const auto& known = server.options.origins;
        if (*wanted == 'm' && !origin.empty() && std::find(known.begin(), known.end(), origin) == known.end())
            throw Refusal(403, "files are not taken from web pages of other sites (--cors names those that may)");
    }
    if (open || method == "OPTIONS") return;
    caller = key();
    if (!server.options.keys.empty()) peer.key = caller;
    upload.who = unsent->who = fnv1a(&caller, sizeof caller, peer.address);
}

uint64_t Exchange::key() const {
    if (server.options.keys.empty()) return 1;
    const std::string given_there = header("Authorization"), given_here = header("X-Api-Key"); // (Anthropic's)
    const std::string_view scheme = "bearer ";
    const std::string given = given_there.empty() && !given_here.empty() ? "bearer " + given_here : given_there;
    const std::string own = lower(std::string(given.substr(0, scheme.size())));
    uint64_t found = 0;
    for (size_t k = 0; k < server.options.keys.size(); k++) {
        const std::string& wanted = server.options.keys[k].key;
        const std::string_view token = std::string_view(given).substr(std::min(scheme.size(), given.size()));
        unsigned differ = token.size() != wanted.size() || own != scheme;
        for (size_t i = 0; i < wanted.size() && !token.empty(); i++)
            differ |= (unsigned)(wanted[i] ^ token[i % token.size()]);
        if (!differ) found = k + 1;
    }
    if (!found) throw Refusal(401, "the API key is missing or wrong", "", "invalid_api_key");
    return found;
}

void Exchange::read(const char* bytes, size_t n) {
    if (refusal) return;
    std::lock_guard lock(server.bodies.mutex);
    if (body.size() + n > most_body())
        refusal = std::make_unique<Refusal>(413, format("a request may have %zu bytes", most_body()));
    else if (server.bodies.add_locked(upload, n))
        return (void)body.append(bytes, n);
    std::string().swap(body);
}

size_t Exchange::body_size() {
    std::lock_guard lock(server.bodies.mutex);
    return body.size();
}

MHD_Result Exchange::answer_it() {
    if (!begun) {
        begun = counted = true;
        server.answering++;
        const bool open = server.ready && !server.draining;
        if (!open) counted = false, server.answering--; // it will be refused
        peer.phase = Peer::WORKING;
        auto takes_long = [&] {
            return body_size() > SMALL_BODY || filed() || swaps() || path == CONVERT || asks_for_form() ||
                   looks_up() || brings_documents();
        };
        if (open && !refusal && method == "POST" && (looks_up() || brings_documents())) {
            entered = server.desk.enter(caller);
            if (!entered) refusal = std::make_unique<Refusal>(queue_is_full());
        }
        if (open && !refusal && takes_long()) {
            looked_for = true, look_for(this);
            MHD_suspend_connection(connection);
            server.workers.add(server.options.keys.empty() ? peer.address : caller, [this] {
                lookup_stop = form_stop = &gone;
                if (gone && !filed() && !swaps()) refusal = std::make_unique<Refusal>(503, "the client has gone");
                prepare();
                MHD_resume_connection(connection);
            });
            return MHD_YES;
        }
        prepare();
    }
    if (prepared.status) return respond(std::move(prepared));
    return stream ? begin_stream() : finish();
}

void Exchange::look_for(Exchange* one) {
    std::lock_guard lock(server.mutex);
    peer.looking = one;
}

bool Exchange::asks_for_form() {
    std::lock_guard lock(server.bodies.mutex);
    for (const char* word : {"\"tools\"", "\"response_format\"", "\"structured_outputs\"", "\"guided_",
                             "\"format\"", "\\u00"})
        if (body.find(word) != std::string::npos) return true;
    return false;
}

bool Exchange::brings_documents() {
    std::lock_guard lock(server.bodies.mutex);
    return path == CHAT && body.find("\"documents\"") != std::string::npos;
}

void Exchange::prepare() {
    server.bodies.remove(upload); // it cannot be dropped from here on
    if (upload.lost && !refusal) refusal = std::make_unique<Refusal>(503, "too many requests are coming in");
    prepared = response();
    leave_desk();
    if (looked_for) look_for(nullptr);
    std::string().swap(body); // frees memory: the answer may take long
}

std::string Exchange::fault(const Refusal& r) const {
    const bool message = path == MESSAGES || path == COUNT_TOKENS;
    return message ? message_error_json(r, request_id) : error_json(r);
}

Response Exchange::response() {
    try {
        if (refusal) throw *refusal;
        return route();
    } catch (const Refusal& r) {
        Response told{r.status, fault(r)};
        if (r.status == 401) told.headers.push_back({"WWW-Authenticate", "Bearer"});
        if (r.status == 405) told.headers.push_back({"Allow", r.param});
        if (r.status == 429 || r.status == 503) told.headers.push_back({"Retry-After", "1"});
        return told;
    } catch (const std::bad_alloc&) {
        return {503, fault({503, "out of memory"})};
    }
}

std::string Exchange::route_name() const {
    if (path.compare(0, 11, "/v1/models/") == 0) return "/v1/models/{id}";
    if (filed()) return path[4] == 'f' ? "/v1/files" : "/v1/batches";
    if (swaps()) return path;
    return known(path, {"/", "/temml.js", "/health", "/ping", "/version", "/openapi.json", "/metrics", "/tokenize",
                        "/detokenize", "/tokenizer_info", CONVERT, "/v1/models", COMPLETION, CHAT, RESPONSES, MESSAGES,
                        COUNT_TOKENS, EMBEDDINGS, PREDICT, "/v1/rerank", "/v2/rerank", "/rerank"});
}

void Exchange::log() const {
    sj::Writer w;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    w.object().field("time", (double)std::chrono::duration_cast<std::chrono::milliseconds>(now).count() / 1e3);
    auto plain = [](const std::string& s) { // a client may send anything
        auto plain = [](char c) { return isalpha((unsigned char)c) || strchr("/_.12", c); };
        const bool good = s.size() < 32 && std::all_of(s.begin(), s.end(), plain);
        return good ? s : "other";
    };
    w.field("method", plain(method)).field("path", filed() ? route_name() : plain(path));
    w.field("status", status).field("seconds", seconds() - start).field("request_id", request_id);
    if (caller && !server.options.keys.empty()) w.field("key", server.options.keys[caller - 1].name);
    if (!swapped.empty()) w.field("adapter", swapped);
    if (answer) {
        w.field("id", answer->id).field("model", answer->model).field("prompt_tokens", answer->prompt_tokens);
        w.field("cached_tokens", answer->cached());
        if (server.service.disk) w.field("disk_tokens", answer->read());
        w.field("completion_tokens", answer->count()).field("complete", answer->complete());
        answer->log(w);
        if (first_token > 0) w.field("first_token_seconds", first_token - start);
    }
    server.log->write(w.end().text + "\n");
}

} // namespace server
