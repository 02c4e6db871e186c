// exchange.h: one HTTP request and its answer: what of it is checked before its body is read, the routes, and how
// answers are sent. Part of serve.cu.
#pragma once

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
    volatile sig_atomic_t gone = 0;        // the peer, while its question is looked up in documents
    bool entered = false, looked_for = false; // it has a place at the desk meanwhile; watch() looks at it
    std::string out;                       // what is being sent; of a stream, up to `sent`
    size_t sent = 0;
    std::atomic<double> spoke{start};      // when a stream last sent something
    double first_token = 0;

    Exchange(Server& s, MHD_Connection* c, Peer& p, const char* url, const char* m, const char* version)
        : server(s), connection(c), peer(p), method(m), path(url), newest(strcmp(version, "HTTP/1.1") == 0) {
        request_id = header("X-Request-Id");
        auto plain = [](char c) { return isalnum((unsigned char)c) || strchr("._-", c); };
        if (request_id.empty() || request_id.size() > 64 || !std::all_of(request_id.begin(), request_id.end(), plain))
            request_id = format("%016llx", (unsigned long long)random_bits());
        upload.who = unsent->who = peer.address;
        upload.drop = [this] { std::string().swap(body); };
    }
    Exchange(const Exchange&) = delete;

    ~Exchange() {
        if (known_to_watch) {
            std::lock_guard lock(server.mutex); // from now on it does not know it
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

    const char* header(const char* name) const {
        const char* value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
        return value ? value : "";
    }
    std::vector<std::string> headers(const char* name) const { // all that have this name
        struct Wanted { const char* name; std::vector<std::string> values; } wanted = {name, {}};
        auto take = [](void* self, MHD_ValueKind, const char* name, const char* value) {
            Wanted& w = *(Wanted*)self;
            if (strcasecmp(name, w.name) == 0) w.values.push_back(value ? value : "");
            return MHD_YES;
        };
        MHD_get_connection_values(connection, MHD_HEADER_KIND, take, &wanted);
        return wanted.values;
    }

    // The request's head. What is wrong with it is said once its body has been read, so that the connection can go on;
    // but not if that is too long, or if it is not clear where it ends.
    MHD_Result head() {
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

    // RFC 9112, 6: a proxy before us must find the same end of a request as the library does.
    void check_framing() const {
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
    bool filed() const { // Files and Batches
        auto under = [&](const std::string& root) { return (path + "/").compare(0, root.size(), root) == 0; };
        return server.filing && (under("/v1/files/") || under("/v1/batches/"));
    }
    bool looks_up() const { // in documents
        const bool chat = path == CHAT || path == RESPONSES || path == MESSAGES || path == COUNT_TOKENS;
        return chat && server.service.documents;
    }
    bool swaps() const { // loads or unloads an adapter
        return server.options.swaps && (path == LOAD_ADAPTER || path == UNLOAD_ADAPTER);
    }
    bool models() const { return (path + "/").compare(0, 11, "/v1/models/") == 0; }
    bool takes_no_post() const {
        const bool cancel = path.size() > 7 && path.compare(path.size() - 7, 7, "/cancel") == 0;
        return models() || (filed() && !cancel && path != "/v1/files" && path != "/v1/batches");
    }
    size_t most_body() const { return filed() && path == "/v1/files" ? MAX_UPLOAD + SMALL_BODY : MAX_BODY; }

    void check_head() {
        if (server.loopback()) { // a web page whose own name was made to point here must not get in
            std::string host = lower(header("Host"));
            const size_t colon = host.rfind(':');
            if (colon != std::string::npos && host.find(']', colon) == std::string::npos) host.resize(colon);
            if (host != "localhost" && host != "127.0.0.1" && host != "[::1]" && host != server.options.host &&
                !host.empty())
                throw Refusal(403, "this server answers to localhost only (--host makes it public)");
        }
        const std::string encoding = header("Content-Encoding");
        if (!encoding.empty() && encoding != "identity") throw Refusal(415, "Content-Encoding is not supported");
        const bool open = known(path, {"/", "/health", "/ping", "/version", "/openapi.json", "/metrics"}) == path;
        if (method == "POST" && !open && !takes_no_post()) { // (what does not is told so first)
            std::string type = header("Content-Type");
            type.resize(std::min(type.find(';'), type.size()));
            while (!type.empty() && type.back() == ' ') type.pop_back();
            const char* wanted = filed() && path == "/v1/files" ? "multipart/form-data" : "application/json";
            if (strcasecmp(type.c_str(), wanted)) throw Refusal(415, format("Content-Type must be %s", wanted));
            const std::string origin = header("Origin"); // a page of any site can send a form without asking first
            const auto& known = server.options.origins;
            if (*wanted == 'm' && !origin.empty() && std::find(known.begin(), known.end(), origin) == known.end())
                throw Refusal(403, "files are not taken from web pages of other sites (--cors names those that may)");
        }
        if (open || method == "OPTIONS") return;
        caller = key();
        upload.who = unsent->who = fnv1a(&caller, sizeof caller, peer.address);
    }

    // The number of the caller's key, from 1 on: one space of shared prompts each. Every key is compared to its end.
    uint64_t key() const {
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

    void read(const char* bytes, size_t n) {
        if (refusal) return;
        std::lock_guard lock(server.bodies.mutex);
        if (body.size() + n > most_body())
            refusal = std::make_unique<Refusal>(413, format("a request may have %zu bytes", most_body()));
        else if (server.bodies.add_locked(upload, n))
            return (void)body.append(bytes, n);
        std::string().swap(body);
    }

    size_t body_size() { // 0 if it has been dropped
        std::lock_guard lock(server.bodies.mutex);
        return body.size();
    }

    // The request is complete.
    MHD_Result answer_it() {
        if (!begun) {
            begun = counted = true;
            server.answering++;
            const bool open = server.ready && !server.draining;
            if (!open) counted = false, server.answering--; // it will be refused
            peer.phase = Peer::WORKING;
            auto takes_long = [&] {
                return body_size() > SMALL_BODY || filed() || swaps() || asks_for_form() || looks_up();
            };
            if (open && !refusal && method == "POST" && looks_up()) {
                entered = server.desk.enter(caller);
                if (!entered) refusal = std::make_unique<Refusal>(queue_is_full());
            }
            if (open && !refusal && takes_long()) {
                if (entered) looked_for = true, look_for(this);
                MHD_suspend_connection(connection);
                server.workers.add(server.options.keys.empty() ? peer.address : caller, [this] {
                    lookup_stop = &gone;
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

    Refusal queue_is_full() const {
        return {server.draining ? 503 : 429, "too many requests are waiting", "", "rate_limit_exceeded"};
    }
    void look_for(Exchange* one) { // (watch() does, from now on)
        std::lock_guard lock(server.mutex);
        peer.looking = one;
    }
    void leave_desk() {
        if (std::exchange(entered, false)) server.desk.leave(caller);
    }

    // Grammars take longer than their text to read. (Of a field's name, letters may be escaped.)
    bool asks_for_form() {
        std::lock_guard lock(server.bodies.mutex);
        for (const char* word : {"\"tools\"", "\"response_format\"", "\"structured_outputs\"", "\"guided_",
                                 "\"format\"", "\\u00"})
            if (body.find(word) != std::string::npos) return true;
        return false;
    }

    void prepare() {
        server.bodies.remove(upload); // from now on it is not dropped
        if (upload.lost && !refusal) refusal = std::make_unique<Refusal>(503, "too many requests are coming in");
        prepared = response();
        leave_desk();
        if (looked_for) look_for(nullptr);
        std::string().swap(body); // the answer may take long, and others need the room
    }

    std::string fault(const Refusal& r) const { // as the route's clients know it
        const bool message = path == MESSAGES || path == COUNT_TOKENS;
        return message ? message_error_json(r, request_id) : error_json(r);
    }
    Response response() {
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

    // Which of a few it is: a client may send anything.
    static std::string known(const std::string& what, std::initializer_list<const char*> all) {
        return std::find(all.begin(), all.end(), what) == all.end() ? "other" : what;
    }
    std::string route_name() const {
        if (path.compare(0, 11, "/v1/models/") == 0) return "/v1/models/{id}";
        if (filed()) return path[4] == 'f' ? "/v1/files" : "/v1/batches";
        if (swaps()) return path;
        return known(path, {"/", "/health", "/ping", "/version", "/openapi.json", "/metrics", "/tokenize",
                            "/detokenize", "/v1/models", COMPLETION, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS,
                            EMBEDDINGS, "/v1/rerank", "/v2/rerank", "/rerank"});
    }

    // Status 0: the answer is on its way.
    Response route() {
        const std::string asked = method == "HEAD" ? "GET" : method; // (the library leaves the body away)
        auto only = [&](const char* allowed) {
            if (asked != allowed) throw Refusal(405, format("%s takes %s only", path.c_str(), allowed), allowed);
        };
        const bool ready = server.ready && !server.draining;
        if (method == "OPTIONS") return {204, ""};
        if (path == "/") { // also before the model is there: the page waits for it
            only("GET");
            ChatPage page(server.options.title, server.options.think, server.options.docs);
            return {200, std::move(page.html), "text/html; charset=utf-8", {{"Content-Security-Policy", page.policy},
                    {"Cache-Control", "no-store"}, {"Referrer-Policy", "no-referrer"}}};
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
        if (!is_asked(path) && !models() && !tokenize && !detokenize && !count && !swaps())
            throw Refusal(404, "there is nothing here; / and /v1/chat/completions are");
        only(models() ? "GET" : "POST");
        if (!ready) throw Refusal(503, server.ready ? "the server is shutting down" : "the model is loading");
        const Service& service = server.service;
        if (models()) return list_models();
        if (swaps()) return {200, path == LOAD_ADAPTER ? load_adapter(service) : unload_adapter(service)};
        if (tokenize) return {200, tokens_of(service)};
        if (detokenize) return {200, text_of(service)};
        if (count) return {200, count_message_tokens(service, body)};

        auto [ask, told] = read_asked(service, path, body, caller);
        if (!ask.pooled && ask.jobs.size() > server.desk.limit)
            throw Refusal(400, format("the queue has room for %zu answers", server.desk.limit), "n");
        answer = std::move(told);
        stream = ask.stream;
        const std::shared_ptr<Reply> r = ask.jobs[0].reply;
        r->share = unsent, charged = true;
        r->wake = [this, reply = r.get()] { // the engine's thread, or watch()'s; reply->mutex is held
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

    // The model itself, then its adapters, of which it is the parent.
    Response list_models() const {
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
        if (!told) throw Refusal(404, "no such model", "model", "model_not_found");
        if (path.size() == 10) w.end().end();
        return {200, w.text};
    }
    static void write_model(sj::Writer& w, const Service& service, const std::string& name, const std::string& root,
                            long created, bool adapter) {
        w.object().field("id", name).field("object", "model").field("created", created).field("owned_by", "qwen3.cu");
        w.field("root", root);
        if (adapter) w.field("parent", service.name);
        else w.field("parent", nullptr);
        w.field("max_model_len", service.context).end();
    }

    // {"lora_name", "lora_path"} and {"lora_name"}, as vLLM has them. What answers with an adapter that is unloaded
    // comes to its end with it.
    std::string load_adapter(const Service& service) {
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
    std::string unload_adapter(const Service& service) {
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
    static std::string adapter_name(const Fields& f) {
        const std::string name = f.text("lora_name");
        if (name.empty()) throw Refusal(400, "lora_name is missing", "lora_name");
        return name;
    }

    // {"prompt": "..."} or {"messages": [...]}
    std::string tokens_of(const Service& service) const {
        sj::Doc doc;
        const Fields f(parse_body(doc, body));
        std::vector<int> ids;
        PromptOptions any;
        any.truncate = SIZE_MAX; // whether it fits or not
        if (f["messages"]) any.chat = chat_options_from_json(service, f), ids = chat_prompt(service, f, any);
        else ids = service.tokenizer->encode(f.text("prompt"), false);
        if (!f["messages"] && !f["prompt"]) throw Refusal(400, "neither prompt nor messages", "prompt");
        sj::Writer w;
        w.object().field("count", ids.size()).field("max_model_len", service.context).key("tokens").array();
        for (int id : ids) w.value(id);
        return w.end().end().text;
    }
    std::string text_of(const Service& service) const {
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

    // vLLM's names; of HTTP, those of the instrumentation that it uses.
    std::string metrics() {
        std::vector<Figures> each; // (until the server is ready there may come more engines)
        if (server.ready) each = server.desk.look_at_each();
        Figures f;
        for (const Figures& one : each) f.add(one);
        const std::string label = format("model_name=\"%s\"", server.ready ? server.service.name.c_str() : "");
        std::string out;
        auto one = [&](const char* name, const char* type, double value, const char* more = "") {
            if (out.find(format("# TYPE vllm:%s ", name)) == std::string::npos)
                out += format("# TYPE vllm:%s %s\n", name, type);
            out += format("vllm:%s{%s%s} %.17g\n", name, label.c_str(), more, value);
        };
        auto histogram = [&](const char* name, const Histogram& h) {
            out += format("# TYPE vllm:%s histogram\n", name);
            out += histogram_text(format("vllm:%s", name).c_str(), label, h);
        };
        one("num_requests_running", "gauge", (double)f.running);
        one("num_requests_waiting", "gauge", (double)f.waiting);
        one("kv_cache_usage_perc", "gauge", f.pages ? (double)f.pages_used / (double)f.pages : 0);
        one("num_preemptions_total", "counter", (double)f.preempted);
        one("prompt_tokens_total", "counter", (double)f.prompt_tokens);
        one("generation_tokens_total", "counter", (double)f.answer_tokens);
        one("forced_tokens_total", "counter", (double)f.forced);
        one("prefix_cache_queries_total", "counter", (double)f.looked_up);
        one("prefix_cache_hits_total", "counter", (double)f.found);
        one("request_success_total", "counter", (double)f.stopped, ",finished_reason=\"stop\"");
        one("request_success_total", "counter", (double)f.cut, ",finished_reason=\"length\"");
        one("request_success_total", "counter", (double)f.cancelled, ",finished_reason=\"abort\"");
        one("dropped_answers_total", "counter", (double)server.desk.unsent.lost);
        one("dropped_requests_total", "counter", (double)server.bodies.lost);
        one("dropped_log_lines_total", "counter", (double)server.log.lost);
        histogram("time_to_first_token_seconds", f.first_token);
        histogram("inter_token_latency_seconds", f.between_tokens);
        histogram("e2e_request_latency_seconds", f.whole);
        auto by_engine = [&](const char* name, const char* type, auto value) {
            for (size_t k = 0; k < each.size() && each.size() > 1; k++)
                one(name, type, (double)value(each[k]), format(",engine=\"%zu\"", k).c_str());
        };
        by_engine("engine_requests_running", "gauge", [](auto& e) { return e.running; });
        by_engine("engine_requests_waiting", "gauge", [](auto& e) { return e.waiting; });
        by_engine("engine_pages_used", "gauge", [](auto& e) { return e.pages_used; });
        by_engine("engine_prompt_tokens_total", "counter", [](auto& e) { return e.prompt_tokens; });
        by_engine("engine_generation_tokens_total", "counter", [](auto& e) { return e.answer_tokens; });
        by_engine("engine_prefix_cache_hits_total", "counter", [](auto& e) { return e.found; });
        if (server.ready) out += adapter_metrics(server.service.adapters->now());
        return out + server.traffic.text();
    }

    // vLLM's line, whose value is the time, and what each adapter has answered. (Their names need no escapes.)
    static std::string adapter_metrics(const std::map<std::string, AdapterPtr>& all) {
        if (all.empty()) return "";
        std::string running, waiting, tokens = "# TYPE vllm:lora_generation_tokens_total counter\n";
        for (auto& [name, one] : all) {
            if (one->running) running += (running.empty() ? "" : ",") + name;
            if (one->waiting) waiting += (waiting.empty() ? "" : ",") + name;
            tokens += format("vllm:lora_generation_tokens_total{lora_name=\"%s\"} %llu\n", name.c_str(),
                             (unsigned long long)one->tokens);
        }
        return format("# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{running_lora_adapters=\"%s\","
                      "waiting_lora_adapters=\"%s\",max_lora=\"%zu\"} %ld\n",
                      running.c_str(), waiting.c_str(), MAX_ADAPTERS, (long)time(nullptr)) + tokens;
    }

    // ---- The answer of an engine, whole or as a stream. Both may find nothing to do yet, and sleep until reply->wake.
    MHD_Result finish() {
        {
            std::lock_guard lock(reply->mutex);
            const char* dropped = unsent->lost ? "too much waits to be sent" : "the server is shutting down";
            if (unsent->lost || (reply->cancelled && server.draining)) return respond({503, fault({503, dropped})});
            if (reply->cancelled) return MHD_NO;
            if (reply->left) {
                suspended = true;
                MHD_suspend_connection(connection);
                return MHD_YES;
            }
            for (Piece& piece : reply->pieces) answer->add(std::move(piece));
            reply->pieces.clear();
        }
        if (answer->broken()) return respond({500, error_json(500, answer->broken())});
        out = answer->part();
        if (answer->told()) return respond({200, std::exchange(out, {})});
        MHD_Response* r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, next_part, this, nullptr);
        return send(r, {200, ""});
    }
    static ssize_t next_part(void* self, uint64_t, char* buffer, size_t room) {
        Exchange& e = *(Exchange*)self;
        if (e.sent == e.out.size()) {
            if (e.answer->told()) return MHD_CONTENT_READER_END_OF_STREAM;
            try {
                e.out = e.answer->part(), e.sent = 0;
            } catch (const std::exception&) {
                return MHD_CONTENT_READER_END_WITH_ERROR;
            }
        }
        return e.copy_out(buffer, room);
    }
    ssize_t copy_out(char* buffer, size_t room) {
        const size_t n = std::min(room, out.size() - sent);
        memcpy(buffer, out.data() + sent, n);
        spoke = seconds();
        sent += n;
        return (ssize_t)n;
    }

    MHD_Result begin_stream() {
        MHD_Response* r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, next_of_stream, this, nullptr);
        return send(r, {200, "", "text/event-stream; charset=utf-8", {{"Cache-Control", "no-cache"}}});
    }
    static ssize_t next_of_stream(void* self, uint64_t, char* buffer, size_t room) {
        Exchange& e = *(Exchange*)self;
        try {
            while (e.sent == e.out.size()) {
                e.out.clear(), e.sent = 0;
                std::vector<Piece> pieces;
                {
                    std::lock_guard lock(e.reply->mutex);
                    if (e.reply->cancelled) return MHD_CONTENT_READER_END_WITH_ERROR;
                    // A part of what is there: as JSON it is much larger.
                    const size_t n = std::min<size_t>(e.reply->pieces.size(), 64);
                    const auto end = e.reply->pieces.begin() + (ptrdiff_t)n;
                    std::move(e.reply->pieces.begin(), end, std::back_inserter(pieces));
                    e.reply->pieces.erase(e.reply->pieces.begin(), end);
                    if (pieces.empty() && e.answer->complete()) return MHD_CONTENT_READER_END_OF_STREAM;
                    if (pieces.empty() && std::exchange(e.probed, false)) e.out = ":\n\n"; // a comment
                    else if (pieces.empty()) {
                        e.suspended = true;
                        MHD_suspend_connection(e.connection);
                        return 0;
                    }
                }
                for (const Piece& piece : pieces) {
                    e.server.desk.unsent.remove(*e.unsent, bytes_of(piece));
                    e.out += e.answer->events(piece);
                }
            }
        } catch (const std::exception&) {
            return MHD_CONTENT_READER_END_WITH_ERROR;
        }
        return e.copy_out(buffer, room);
    }

    // The peer has said that it will send nothing more: it is gone, or it waits. What we send now will tell. Where the
    // answer has not begun that is an interim one, in a stream it is a comment.
    void probe_early() const {
        const std::string_view interim = "HTTP/1.1 100 Continue\r\n\r\n";
        (void)!::send(peer.fd, interim.data(), interim.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    void probe() { // reply->mutex is held
        if (!suspended) return; // something is being sent anyway
        if (!stream) return probe_early();
        probed = true, suspended = false;
        MHD_resume_connection(connection);
    }

    MHD_Result respond(Response&& r) { // its body may be many MB: the library is lent it, until on_completion
        if (!r.file.empty()) { // sent as it is read
            struct stat st;
            const int fd = open(r.file.c_str(), O_RDONLY | O_CLOEXEC);
            if (fd >= 0 && fstat(fd, &st) == 0) return send(MHD_create_response_from_fd64((uint64_t)st.st_size, fd), r);
            if (fd >= 0) close(fd);
            r = {404, fault({404, "the file is gone"})};
        }
        out = std::move(r.body);
        if (out.size() > Answer::PART) charged = true, server.desk.unsent.add(*unsent, out.size());
        return send(MHD_create_response_from_buffer(out.size(), out.data(), MHD_RESPMEM_PERSISTENT), r);
    }
    MHD_Result send(MHD_Response* out, const Response& r) {
        if (!out) return MHD_NO;
        status = r.status;
        peer.since = seconds(), peer.phase = Peer::ANSWERING; // from now on it can be fetched
        if (r.status != 204) MHD_add_response_header(out, "Content-Type", r.type);
        MHD_add_response_header(out, "X-Content-Type-Options", "nosniff");
        MHD_add_response_header(out, "X-Request-Id", request_id.c_str());
        for (auto& [name, value] : r.headers) MHD_add_response_header(out, name, value.c_str());
        if (server.draining) MHD_add_response_header(out, "Connection", "close");
        const std::string origin = header("Origin");
        if (!origin.empty()) MHD_add_response_header(out, "Vary", "Origin");
        for (auto& allowed : server.options.origins)
            if (origin == allowed) {
                MHD_add_response_header(out, "Access-Control-Allow-Origin", allowed.c_str());
                MHD_add_response_header(out, "Access-Control-Allow-Headers", allowed_headers().c_str());
                MHD_add_response_header(out, "Access-Control-Allow-Methods",
                                        server.filing ? "GET, POST, DELETE" : "GET, POST");
                MHD_add_response_header(out, "Access-Control-Max-Age", "600");
                MHD_add_response_header(out, "Access-Control-Expose-Headers", "X-Request-Id");
            }
        const MHD_Result result = MHD_queue_response(connection, (unsigned)r.status, out);
        MHD_destroy_response(out);
        return result;
    }

    // What a script may send. OpenAI's package adds x-stainless-* of many kinds: those that are asked for are named.
    std::string allowed_headers() const {
        std::string all = "Authorization, Content-Type";
        const std::string asked = lower(header("Access-Control-Request-Headers"));
        for (size_t at = 0, end; at < asked.size(); at = end + 1) {
            end = std::min(asked.find(',', at), asked.size());
            std::string name = asked.substr(at, end - at);
            name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
            auto plain = [](char c) { return isalnum((unsigned char)c) || c == '-'; };
            const bool known = name.compare(0, 12, "x-stainless-") == 0 || name.compare(0, 7, "openai-") == 0 ||
                               name.compare(0, 10, "anthropic-") == 0 || name == "x-api-key" || name == "x-request-id";
            if (known && std::all_of(name.begin(), name.end(), plain)) all += ", " + name;
        }
        return all;
    }

    // One line of JSON, without a word of what was said.
    void log() const {
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
            w.field("completion_tokens", answer->count()).field("complete", answer->complete());
            if (first_token > 0) w.field("first_token_seconds", first_token - start);
        }
        server.log.write(w.end().text + "\n");
    }
};
