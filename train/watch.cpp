// train/watch.cpp: libmicrohttpd with one thread: the page, and streams of events.
#include "train/watch.h"
#include "base/error.h"
#include "base/html.h"
#include "sj.h"

#ifdef HAVE_MICROHTTPD
#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <microhttpd.h>
#include <mutex>
#include <set>
#include <string_view>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

const bool can_watch = true;

static const char LIVE_PAGE[] =
#include "build/train_live.inc"
    ;

struct Watch::Server {
    static constexpr unsigned CONNECTIONS = 64, IDLE = 30; // s without a byte of a request or of an answer to it
    static constexpr double LAST_WORDS = 1;                // s for the pages to read the last event
    const std::string nonce = page_nonce(), page = fill_page(LIVE_PAGE, {{"nonce", nonce}});
    MHD_Daemon* daemon = nullptr;
    bool told_end = false; // the last event is there

    std::mutex mutex; // for all below
    std::string events;
    bool over = false;
    std::vector<MHD_Connection*> waiting; // streams that have sent all events; they are suspended
    std::set<int> sockets;                // of all connections

    struct Stream {
        Server& server;
        MHD_Connection* connection;
        size_t sent = 0;
    };

    void start(int port);
    void stop();
    void wake();
    MHD_Result answer(MHD_Connection* c, std::string_view path, std::string_view method);
    MHD_Result send(MHD_Connection* c, unsigned status, std::string_view type, MHD_Response* r);
};

// ---- Callbacks of the library. It is C: no exception may leave them.

static ssize_t next_events(void* self, uint64_t, char* buffer, size_t room) {
    auto& s = *(Watch::Server::Stream*)self;
    std::lock_guard lock(s.server.mutex);
    const std::string& all = s.server.events;
    if (s.sent == all.size()) {
        if (s.server.over) return MHD_CONTENT_READER_END_OF_STREAM;
        s.server.waiting.push_back(s.connection);
        MHD_suspend_connection(s.connection);
        return 0;
    }
    const size_t n = std::min(room, all.size() - s.sent);
    memcpy(buffer, &all[s.sent], n);
    s.sent += n;
    return (ssize_t)n;
}
static void end_of_stream(void* self) { delete (Watch::Server::Stream*)self; }

static void on_connection(void* self, MHD_Connection* c, void**, MHD_ConnectionNotificationCode what) {
    auto& server = *(Watch::Server*)self;
    const int fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    std::lock_guard lock(server.mutex);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) server.sockets.insert(fd);
    else server.sockets.erase(fd);
}

static MHD_Result on_request(void* self, MHD_Connection* c, const char* path, const char* method, const char*,
                             const char*, size_t* n, void** seen) {
    if (!*seen) return *seen = self, MHD_YES; // the head; what follows is ignored
    if (*n) return *n = 0, MHD_YES;
    try {
        return ((Watch::Server*)self)->answer(c, path, method);
    } catch (const std::exception&) {
        return MHD_NO; // closes the connection
    }
}

// ---- Answers

// A web page's own name that resolves to this address (DNS rebinding) is none of these.
static bool is_local(const char* host) {
    std::string_view name = host ? host : "";
    const size_t colon = name.rfind(':');
    if (colon != name.npos) name = name.substr(0, colon);
    return name.empty() || name == "localhost" || name == "127.0.0.1";
}

MHD_Result Watch::Server::answer(MHD_Connection* c, std::string_view path, std::string_view method) {
    const auto text = [&](unsigned status, std::string_view s, std::string_view type) {
        return send(c, status, type, MHD_create_response_from_buffer(s.size(), (void*)s.data(), MHD_RESPMEM_MUST_COPY));
    };
    if (!is_local(MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Host")))
        return text(403, "this page answers to localhost only\n", "text/plain");
    if (path != "/" && path != "/events") return text(404, "the page is at /\n", "text/plain");
    if (method != "GET" && method != "HEAD") return text(405, "GET only\n", "text/plain");
    if (path == "/") return text(200, page, "text/html; charset=utf-8");
    return send(c, 200, "text/event-stream; charset=utf-8",
                MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, next_events, new Stream{*this, c},
                                                  end_of_stream));
}

MHD_Result Watch::Server::send(MHD_Connection* c, unsigned status, std::string_view type, MHD_Response* r) {
    const std::string policy = "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce +
                               "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";
    const std::pair<const char*, std::string> headers[] = {
        {"Content-Type", std::string(type)}, {"Cache-Control", "no-store"}, {"X-Content-Type-Options", "nosniff"},
        {"Referrer-Policy", "no-referrer"}, {"Content-Security-Policy", policy}, {"Connection", "close"},
        {"Allow", "GET, HEAD"}};
    for (auto& [name, value] : headers)
        if (status == 405 || strcmp(name, "Allow")) MHD_add_response_header(r, name, value.c_str());
    const MHD_Result result = MHD_queue_response(c, status, r);
    MHD_destroy_response(r);
    return result;
}

// ---- Start and end

void Watch::Server::start(int port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET, at.sin_port = htons((uint16_t)port), at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    daemon = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, (uint16_t)port, nullptr,
                              nullptr, &on_request, this, MHD_OPTION_NOTIFY_CONNECTION, &on_connection, this,
                              MHD_OPTION_SOCK_ADDR, (sockaddr*)&at, MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS,
                              MHD_OPTION_CONNECTION_TIMEOUT, IDLE, MHD_OPTION_END);
    if (!daemon) DIE("--watch %d: %s", port, strerror(errno));
}

void Watch::Server::wake() { // with the mutex
    for (MHD_Connection* c : waiting) MHD_resume_connection(c);
    waiting.clear();
}

// Connections close first: while libmicrohttpd (0.9.75) stops, a request that it refuses itself makes it dereference a
// null pointer.
void Watch::Server::stop() {
    const MHD_socket listening = MHD_quiesce_daemon(daemon);
    const auto all_gone = [&](double patience, bool push) {
        for (const double end = seconds() + patience; seconds() < end; usleep(10'000)) {
            std::lock_guard lock(mutex);
            for (int fd : sockets)
                if (push) shutdown(fd, SHUT_RDWR);
            if (sockets.empty()) return;
        }
    };
    {
        std::lock_guard lock(mutex);
        over = true, wake();
    }
    all_gone(LAST_WORDS, false);
    all_gone(LAST_WORDS, true);
    MHD_stop_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) close(listening);
}

Watch::Watch(int port) : server(std::make_unique<Server>()) { server->start(port); }
Watch::~Watch() {
    if (!server->told_end) end("An error ended the run; its terminal names the error.", true);
    server->stop();
}
int Watch::port() const { return MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_BIND_PORT)->port; }

void Watch::add(const std::string& json) {
    std::lock_guard lock(server->mutex);
    server->events += "data: " + json + "\n\n";
    server->wake();
}

void Watch::end(const std::string& text, bool failed) {
    server->told_end = true;
    sj::Writer w;
    add(w.object().field("end", text).field("failed", failed).end().text);
}

#else

const bool can_watch = false;

struct Watch::Server {};
Watch::Watch(int) { DIE("--watch: this program was built without libmicrohttpd (libmicrohttpd-dev)"); }
Watch::~Watch() = default;
int Watch::port() const { return 0; }
void Watch::add(const std::string&) {}
void Watch::end(const std::string&, bool) {}

#endif
