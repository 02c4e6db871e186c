// exchange.h: one HTTP request and its answer: the checks before its body is read, the routes, and the sending of
// answers.
//
//   exchange.cpp   the head, the body, and the log line       routes.cpp    the handlers of the paths
//   metrics.cpp    Prometheus metrics                         send.cpp      whole answers, streams, headers
#pragma once
#include "base/stop_flag.h"
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

// The response to a request, which is also logged.
struct Response {
    int status;
    std::string body;
    const char* type = "application/json";
    std::vector<std::pair<const char*, std::string>> headers{};
    std::string file{};                    // the body, instead
};

// One request and its answer.
struct Exchange {
    Server& server;
    MHD_Connection* connection;
    Peer& peer;
    const double start = seconds();
    std::string method, path, body;
    const bool newest;                     // HTTP/1.1: its client knows 1xx
    uint64_t caller = 0;                   // the number of its key
    std::string request_id;                // the client's, or ours
    Budget::Share upload{};                // of server.bodies, whose mutex guards `body` while it is read
    std::shared_ptr<Budget::Share> unsent = std::make_shared<Budget::Share>();
    std::unique_ptr<Refusal> refusal;      // found before the body arrived
    bool begun = false, counted = false, stream = false;
    bool known_to_watch = false;           // watch() may have seen it,
    bool charged = false;                  // ... and the engine may have charged `unsent`
    Response prepared{};
    int status = 0;
    std::string swapped;                   // the adapter that it loaded or unloaded
    std::unique_ptr<Answer> answer;
    std::shared_ptr<Reply> reply;
    bool suspended = false, probed = false; // guarded by reply->mutex
    StopFlag gone = 0;                     // set when the peer leaves while a worker has its request
    bool entered = false, looked_for = false; // it holds a place at the desk; watch() checks its peer
    std::string out;                       // data being sent; of a stream, up to `sent`
    size_t sent = 0;
    std::atomic<double> spoke{start};      // when a stream last sent something
    double first_token = 0;

    Exchange(Server& s, MHD_Connection* c, Peer& p, const char* url, const char* m, const char* version);
    Exchange(const Exchange&) = delete;

    ~Exchange();

    const char* header(const char* name) const;
    std::vector<std::string> headers(const char* name) const; // all with this name

    // The request's head. An error in it is reported after the body has been read, so that the connection can go on;
    // at once if the body is too long, or if its end is unclear.
    MHD_Result head();

    // RFC 9112, 6: a proxy in front must find the same end of a request as the library does.
    void check_framing() const;
    bool filed() const; // a path of Files or Batches
    bool looks_up() const; // searches documents
    bool swaps() const { // loads or unloads an adapter
        return server.options.swaps && (path == LOAD_ADAPTER || path == UNLOAD_ADAPTER);
    }
    bool tokenizer_info() const { return path == "/tokenizer_info"; }
    bool models() const { return (path + "/").compare(0, 11, "/v1/models/") == 0; }
    bool takes_no_post() const;
    size_t most_body() const;
    bool brings_documents(); // a chat with texts to look up

    void check_head();

    // The number of the caller's key, from 1 on: each is one space of shared prompts. Keys are compared to their end.
    uint64_t key() const;

    void read(const char* bytes, size_t n);

    size_t body_size(); // 0 if it was dropped

    // The request is complete.
    MHD_Result answer_it();

    Refusal queue_is_full() const {
        const bool ends = server.draining || server.desk.failed;
        return {ends ? 503 : 429, "too many requests are waiting", "", "rate_limit_exceeded"};
    }
    void look_for(Exchange* one); // watch() checks its peer from now on
    void leave_desk() {
        if (std::exchange(entered, false)) server.desk.leave(caller);
    }

    // Grammars take longer to read than their text. (The letters of a field's name may be escaped.)
    bool asks_for_form();

    void prepare();

    std::string fault(const Refusal& r) const; // in the dialect of the route
    Response response();

    // The matching value of a few: a client may send anything.
    static std::string known(const std::string& what, std::initializer_list<const char*> all) {
        return std::find(all.begin(), all.end(), what) == all.end() ? "other" : what;
    }
    std::string route_name() const;

    // Status 0: the answer is on its way.
    Response route();

    // The model itself, then its adapters, whose parent it is.
    Response list_models() const;
    static void write_model(sj::Writer& w, const Service& service, const std::string& name, const std::string& root,
                            long created, bool adapter);

    // {"lora_name", "lora_path"} and {"lora_name"}, as in vLLM. Answers in progress keep an unloaded adapter until they
    // end.
    std::string load_adapter(const Service& service);
    std::string unload_adapter(const Service& service);
    static std::string adapter_name(const Fields& f);

    // {"prompt": "..."} or {"messages": [...]}
    std::string tokens_of(const Service& service) const;
    std::string text_of(const Service& service) const;

    // Metrics with vLLM's names; for HTTP, with those of the instrumentation that it uses.
    std::string metrics();

    // vLLM's line, whose value is the time, and the tokens sampled with each adapter. (Their names need no escapes.)
    static std::string adapter_metrics(const std::map<std::string, AdapterPtr>& all);

    // ---- The answer of an engine, whole or as a stream. With nothing to send yet, both sleep until reply->wake.
    MHD_Result finish();
    static ssize_t next_part(void* self, uint64_t, char* buffer, size_t room);
    ssize_t copy_out(char* buffer, size_t room);

    MHD_Result begin_stream();
    static ssize_t next_of_stream(void* self, uint64_t, char* buffer, size_t room);

    // The peer will send nothing more: it is gone, or it waits. Sending something shows which: an interim response
    // before the answer has begun, a comment in a stream.
    void probe_early() const;
    void probe(); // reply->mutex is held

    MHD_Result respond(Response&& r); // its body may be many MB: the library borrows it until on_completion
    MHD_Result send(MHD_Response* out, const Response& r);

    // Headers that a script may send. OpenAI's package adds x-stainless-* of many kinds: the requested ones are named.
    std::string allowed_headers() const;

    // One line of JSON, without any text of prompts or answers.
    void log() const;
};

} // namespace server
