// exchange.h: one HTTP request and its answer: what of it is checked before its body is read, the routes, and how answers
// are sent.
//
//   exchange.cpp   the head, the body, and what is logged     routes.cpp    what each path answers
//   metrics.cpp    figures for Prometheus                     send.cpp      whole answers, streams, headers
#pragma once
#include "server/api/answer.h"
#include "server/api/fields.h"
#include "server/api/limits.h"
#include "server/api/refusal.h"
#include "server/engine/budget.h"
#include "server/engine/reply.h"
#include "server/http/paths.h"
#include "server/http/server.h"
#include <algorithm>
#include <atomic>
#include <cctype>
#include <csignal>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <microhttpd.h>
#include <string>
#include <utility>
#include <vector>

namespace server {

inline std::string lower(std::string s) {
    for (char& c : s) c = (char)tolower((unsigned char)c);
    return s;
}

// What a request is told, and then the log.
struct Response {
    int status;
    std::string body;
    const char* type = "application/json";
    std::vector<std::pair<const char*, std::string>> headers{};
    std::string file{};                    // its body, instead
};

// One request and its answer.
struct Exchange {
    Server& server;
    MHD_Connection* connection;
    Peer& peer;
    const double start = seconds();
    std::string method, path, body;
    const bool newest;                     // HTTP/1.1: its client knows of 1xx
    uint64_t caller = 0;                   // the number of its key
    std::string request_id;                // the client's, or ours
    Budget::Share upload{};                // of server.bodies, whose mutex guards `body` while it is read
    std::shared_ptr<Budget::Share> unsent = std::make_shared<Budget::Share>();
    std::unique_ptr<Refusal> refusal;      // found before the body was there
    bool begun = false, counted = false, stream = false;
    bool known_to_watch = false;           // watch() may have looked at it,
    bool charged = false;                  // ... and the engine at `unsent`
    Response prepared{};
    int status = 0;
    std::string swapped;                   // the adapter that it has loaded or unloaded
    std::unique_ptr<Answer> answer;
    std::shared_ptr<Reply> reply;
    bool suspended = false, probed = false; // guarded by reply->mutex
    volatile sig_atomic_t gone = 0;        // the peer, while a worker has its request
    bool entered = false, looked_for = false; // it has a place at the desk meanwhile; watch() looks at it
    std::string out;                       // what is being sent; of a stream, up to `sent`
    size_t sent = 0;
    std::atomic<double> spoke{start};      // when a stream last sent something
    double first_token = 0;

    Exchange(Server& s, MHD_Connection* c, Peer& p, const char* url, const char* m, const char* version);
    Exchange(const Exchange&) = delete;

    ~Exchange();

    const char* header(const char* name) const;
    std::vector<std::string> headers(const char* name) const; // all that have this name

    // The request's head. What is wrong with it is said once its body has been read, so that the connection can go on;
    // but not if that is too long, or if it is not clear where it ends.
    MHD_Result head();

    // RFC 9112, 6: a proxy before us must find the same end of a request as the library does.
    void check_framing() const;
    bool filed() const; // Files and Batches
    bool looks_up() const; // in documents
    bool swaps() const { // loads or unloads an adapter
        return server.options.swaps && (path == LOAD_ADAPTER || path == UNLOAD_ADAPTER);
    }
    bool models() const { return (path + "/").compare(0, 11, "/v1/models/") == 0; }
    bool takes_no_post() const;
    size_t most_body() const { return filed() && path == "/v1/files" ? MAX_UPLOAD + SMALL_BODY : MAX_BODY; }

    void check_head();

    // The number of the caller's key, from 1 on: one space of shared prompts each. Every key is compared to its end.
    uint64_t key() const;

    void read(const char* bytes, size_t n);

    size_t body_size(); // 0 if it has been dropped

    // The request is complete.
    MHD_Result answer_it();

    Refusal queue_is_full() const {
        return {server.draining ? 503 : 429, "too many requests are waiting", "", "rate_limit_exceeded"};
    }
    void look_for(Exchange* one); // (watch() does, from now on)
    void leave_desk() {
        if (std::exchange(entered, false)) server.desk.leave(caller);
    }

    // Grammars take longer than their text to read. (Of a field's name, letters may be escaped.)
    bool asks_for_form();

    void prepare();

    std::string fault(const Refusal& r) const; // as the route's clients know it
    Response response();

    // Which of a few it is: a client may send anything.
    static std::string known(const std::string& what, std::initializer_list<const char*> all) {
        return std::find(all.begin(), all.end(), what) == all.end() ? "other" : what;
    }
    std::string route_name() const;

    // Status 0: the answer is on its way.
    Response route();

    // The model itself, then its adapters, of which it is the parent.
    Response list_models() const;
    static void write_model(sj::Writer& w, const Service& service, const std::string& name, const std::string& root,
                            long created, bool adapter);

    // {"lora_name", "lora_path"} and {"lora_name"}, as vLLM has them. What answers with an adapter that is unloaded
    // comes to its end with it.
    std::string load_adapter(const Service& service);
    std::string unload_adapter(const Service& service);
    static std::string adapter_name(const Fields& f);

    // {"prompt": "..."} or {"messages": [...]}
    std::string tokens_of(const Service& service) const;
    std::string text_of(const Service& service) const;

    // vLLM's names; of HTTP, those of the instrumentation that it uses.
    std::string metrics();

    // vLLM's line, whose value is the time, and what each adapter has answered. (Their names need no escapes.)
    static std::string adapter_metrics(const std::map<std::string, AdapterPtr>& all);

    // ---- The answer of an engine, whole or as a stream. Both may find nothing to do yet, and sleep until reply->wake.
    MHD_Result finish();
    static ssize_t next_part(void* self, uint64_t, char* buffer, size_t room);
    ssize_t copy_out(char* buffer, size_t room);

    MHD_Result begin_stream();
    static ssize_t next_of_stream(void* self, uint64_t, char* buffer, size_t room);

    // The peer has said that it will send nothing more: it is gone, or it waits. What we send now will tell. Where the
    // answer has not begun that is an interim one, in a stream it is a comment.
    void probe_early() const;
    void probe(); // reply->mutex is held

    MHD_Result respond(Response&& r); // its body may be many MB: the library is lent it, until on_completion
    MHD_Result send(MHD_Response* out, const Response& r);

    // What a script may send. OpenAI's package adds x-stainless-* of many kinds: those that are asked for are named.
    std::string allowed_headers() const;

    // One line of JSON, without a word of what was said.
    void log() const;
};

} // namespace server
