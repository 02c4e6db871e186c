// http.h: connections, their limits, and the end. Part of serve.cu.
//
// By libmicrohttpd: small, GNU, in every distribution, and made for this: a few threads with epoll, and connections
// that are suspended while there is nothing to send. It parses, times out what is idle and limits headers to 32 KB. A
// request's framing, of which it takes too much, is looked at in check_framing. watch() does the rest: whole requests
// and answers have a deadline, however evenly their bytes trickle, and a suspended connection is looked at, since its
// peer may be gone.
#pragma once
#include <arpa/inet.h>
#include <microhttpd.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

constexpr size_t ALL_BODIES = 256 << 20; // bytes of requests that are being read
constexpr size_t SMALL_BODY = 16 << 10;  // is tokenized where it was read: within a millisecond
constexpr double PROBE = 2;              // seconds from one question to a silent client to the next
constexpr double DRAIN_FETCH = 10;       // seconds to fetch an answer that is complete, while the server shuts down

struct ApiKey {
    std::string key, name; // the name is for the log
};

struct ServerOptions {
    std::string host = "127.0.0.1";
    int port = 8000;
    std::vector<ApiKey> keys;               // none: open to all
    std::vector<std::string> origins;       // web sites whose scripts may call
    int deadline = 60;                      // seconds for a request line, and then for headers and body
    int drain = 300;                        // ... and for what is under way when a signal comes
    std::string title = "Warp";             // of the page to chat on
    std::string files;                      // folder of Files and Batches; none: they are not offered
    int think = 0;                          // whether its switch for thoughts is on at first
    bool docs = false;                      // whether it has one for documents
    bool swaps = false;                     // whether clients may load and unload adapters
    int log = STDOUT_FILENO;                // where its lines go
    unsigned idle() const { return (unsigned)(deadline + 1) / 2; } // without a byte
    double fetch() const { return 5. * deadline; }                 // to read an answer that is complete
    double quiet() const { return deadline / 6.; }                 // of a stream, until a comment shows that it lives
};

// What a request is told, and then the log.
struct Response {
    int status;
    std::string body;
    const char* type = "application/json";
    std::vector<std::pair<const char*, std::string>> headers{};
    std::string file{};                    // its body, instead
};

// A connection, for watch(). `mutex` of the Server guards `exchange` and `probed`.
struct Exchange;
struct Peer {
    int fd;
    uint64_t address;                                    // a name for it; for IPv6, of its network
    enum Phase { WAITING, READING, WORKING, ANSWERING }; // WORKING: we are, on what it sent; it waits
    std::atomic<Phase> phase{WAITING};
    std::atomic<double> since{seconds()};
    Exchange* exchange = nullptr; // one that the engine works for,
    Exchange* looking = nullptr;  // ... or one that is looked up in documents
    double probed = 0;            // when it was last asked whether it is there, since it will send nothing more
    std::atomic<bool> over{false}; // the library has closed it, and says so when it next looks at it: maybe much later
};

#include "server/api/openapi.h"
#include "server/http/log.h"
#include "server/http/page.h"
#include "server/http/traffic.h"
#include "server/http/workers.h"

static const char *const LOAD_ADAPTER = "/v1/load_lora_adapter", *const UNLOAD_ADAPTER = "/v1/unload_lora_adapter";

struct Server {
    const ServerOptions options;
    Desk& desk;
    Service service;                       // not to be touched before `ready`
    std::atomic<bool> ready{false}, draining{false};
    double drained_since = 0;              // main's, as watch() is
    std::atomic<size_t> answering{0};      // requests that came before the drain
    Budget bodies{ALL_BODIES};
    std::unique_ptr<Filing> filing;        // of --files
    Log log;
    Traffic traffic;
    Workers workers{std::min(4u, std::max(2u, std::thread::hardware_concurrency() / 2))};
    MHD_Daemon* daemon = nullptr;
    std::mutex mutex;
    std::set<Peer*> peers;

    Server(const ServerOptions& o, Desk& d) : options(o), desk(d), log(o.log) {
        std::vector<std::string> keys;
        for (auto& k : options.keys) keys.push_back(k.key);
        if (!options.files.empty()) filing = std::make_unique<Filing>(options.files, keys);
    }
    ~Server() { if (daemon) stop(); }
    void start();
    void stop();
    void watch();
    void drain();
    void abandon();
    int port() const { return MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port; }

    bool loopback() const { return options.host.compare(0, 4, "127.") == 0 || options.host == "::1"; }
};

inline std::string lower(std::string s) {
    for (char& c : s) c = (char)tolower((unsigned char)c);
    return s;
}

#include "server/http/exchange.h"

static Peer& peer_of(MHD_Connection* c) {
    return *(Peer*)MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static uint64_t name_of(const sockaddr* address) {
    if (address->sa_family == AF_INET) return fnv1a(&((const sockaddr_in*)address)->sin_addr, 4);
    return fnv1a(&((const sockaddr_in6*)address)->sin6_addr, 8); // a network of 64 bits is one client's
}

// What the library calls. It is C: no exception may leave them.
static void on_connection(void* self, MHD_Connection* c, void** context, MHD_ConnectionNotificationCode what) {
    Server& server = *(Server*)self;
    std::lock_guard lock(server.mutex);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        Peer* peer = new Peer{MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
                              name_of(MHD_get_connection_info(c, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr)};
        server.peers.insert(peer);
        *context = peer;
        // What the kernel holds of an answer for a slow reader: not the MBs that it likes to, of which it would say
        // nothing for minutes, so that the reader seemed idle.
        const int room = 1 << 17;
        setsockopt(peer->fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    } else {
        server.peers.erase((Peer*)*context);
        delete (Peer*)*context;
    }
}
// The library has room for a few hundred arguments after a `?`, and with more it neither answers nor closes. We need
// none.
static void* on_request_line(void*, const char* uri, MHD_Connection* c) {
    peer_of(c).since = seconds();
    peer_of(c).phase = Peer::READING;
    const char* end = uri + strlen(uri);
    if (std::count(uri, end, '&') > 64) {
        const std::string body = error_json(414, "too many query arguments");
        const std::string all = "HTTP/1.1 414 URI Too Long\r\nConnection: close\r\nContent-Type: application/json\r\n" +
                                format("Content-Length: %zu\r\n\r\n", body.size()) + body;
        (void)!::send(peer_of(c).fd, all.data(), all.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        shutdown(peer_of(c).fd, SHUT_RDWR);
    }
    return nullptr;
}
static MHD_Result on_request(void* self, MHD_Connection* c, const char* url, const char* method, const char* version,
                             const char* bytes, size_t* n, void** own) {
    Exchange*& e = (Exchange*&)*own;
    try {
        if (!e) {
            e = new Exchange(*(Server*)self, c, peer_of(c), url, method, version);
            return e->head();
        }
        if (*n == 0) return e->answer_it();
        e->read(bytes, std::exchange(*n, 0));
        return MHD_YES;
    } catch (const std::exception&) {
        return MHD_NO; // closes the connection
    }
}
static void on_completion(void*, MHD_Connection* c, void** own, MHD_RequestTerminationCode how) {
    if (how != MHD_REQUEST_TERMINATED_COMPLETED_OK) peer_of(c).over = true;
    delete (Exchange*)std::exchange(*own, nullptr);
}

void Server::start() {
    rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    const rlim_t spare = std::min<rlim_t>(files.rlim_cur / 2, 128);
    const unsigned connections = (unsigned)std::min<rlim_t>(8192, files.rlim_cur - spare);
    const unsigned threads = std::min(8u, std::max(2u, std::thread::hardware_concurrency() / 2));

    sockaddr_in v4 = {};
    sockaddr_in6 v6 = {};
    const bool six = options.host.find(':') != std::string::npos;
    v4.sin_family = AF_INET, v4.sin_port = htons((uint16_t)options.port);
    v6.sin6_family = AF_INET6, v6.sin6_port = htons((uint16_t)options.port);
    if (inet_pton(six ? AF_INET6 : AF_INET, options.host.c_str(),
                  six ? (void*)&v6.sin6_addr : (void*)&v4.sin_addr) != 1)
        DIE("--host %s: not an address", options.host.c_str());

    const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | (six ? MHD_USE_IPv6 : 0);
    daemon = MHD_start_daemon(
        flags, (uint16_t)options.port, nullptr, nullptr, &on_request, this,
        MHD_OPTION_NOTIFY_CONNECTION, &on_connection, this,
        MHD_OPTION_URI_LOG_CALLBACK, &on_request_line, this, MHD_OPTION_NOTIFY_COMPLETED, &on_completion, this,
        MHD_OPTION_SOCK_ADDR, six ? (sockaddr*)&v6 : (sockaddr*)&v4, MHD_OPTION_CONNECTION_LIMIT, connections,
        MHD_OPTION_CONNECTION_TIMEOUT, options.idle(), MHD_OPTION_THREAD_POOL_SIZE, threads,
        MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_END);
    if (!daemon) DIE("--port %d on %s: %s", options.port, options.host.c_str(), strerror(errno));
}

// The connections end first: while libmicrohttpd stops (0.9.75), a request that it refuses itself makes it read through
// a null pointer.
void Server::stop() {
    const MHD_socket listening = MHD_quiesce_daemon(daemon);
    int empty = 0; // times that nobody was there: a thread may just be accepting
    for (const double end = seconds() + 5; empty < 3 && seconds() < end; usleep(10'000)) {
        std::lock_guard lock(mutex);
        size_t open = 0;
        for (Peer* peer : peers)
            if (!peer->over) open++, shutdown(peer->fd, SHUT_RDWR);
        empty = open ? 0 : empty + 1;
    }
    MHD_stop_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) close(listening);
}

// To be called a few times a second: who is late, and who is gone?
void Server::watch() {
    std::vector<std::shared_ptr<Reply>> gone;
    {
        std::lock_guard lock(mutex);
        std::vector<pollfd> fds;
        std::vector<Peer*> at;
        const double now = seconds(), fetch = draining ? std::min(options.fetch(), DRAIN_FETCH) : options.fetch();
        auto late = [&](double since, double limit) { return now - std::max(since, drained_since) > limit; };
        for (Peer* peer : peers) {
            const Peer::Phase phase = peer->phase;
            if (peer->exchange || peer->looking) {
                fds.push_back({peer->fd, POLLRDHUP, 0});
                at.push_back(peer);
            } else if (phase == Peer::ANSWERING ? late(peer->since, fetch) : phase != Peer::WORKING) {
                const double limit = draining && phase == Peer::WAITING ? 1 : options.deadline;
                if (phase == Peer::ANSWERING || now - peer->since > limit) shutdown(peer->fd, SHUT_RDWR);
            }
        }
        poll(fds.data(), fds.size(), 0);
        for (size_t i = 0; i < fds.size(); i++) {
            Exchange& e = *(at[i]->exchange ? at[i]->exchange : at[i]->looking);
            const bool closed = fds[i].revents & ~POLLRDHUP, half = fds[i].revents & POLLRDHUP;
            if (!at[i]->exchange) {
                if (closed || (half && !e.newest)) e.gone = 1;
                else if (half && now - at[i]->probed > PROBE) at[i]->probed = now, e.probe_early();
                continue;
            }
            if (closed || (half && !e.newest) || e.unsent->lost) gone.push_back(e.reply);
            // Whoever has the reply now, the engine or a sender, may have lost its core: it is looked at next time, and
            // nobody who needs our mutex (for a new connection, say) waits for that.
            std::unique_lock reply_lock(e.reply->mutex, std::try_to_lock);
            if (!reply_lock) continue;
            if (half && now - at[i]->probed > PROBE) at[i]->probed = now, e.probe();
            else if (e.stream && now - e.spoke > options.quiet()) e.probe();
            const double there = std::max(e.reply->last, at[i]->since.load());
            if (at[i]->phase == Peer::ANSWERING && (e.unsent->lost || (e.reply->left == 0 && late(there, fetch))))
                shutdown(fds[i].fd, SHUT_RDWR);
        }
    }
    for (auto& reply : gone) {
        std::lock_guard lock(reply->mutex);
        if (reply->left == 0) continue;
        reply->cancelled = true;
        if (reply->wake) reply->wake();
    }
}

// New requests are refused, idle connections closed, and what is under way comes to its end within options.drain.
void Server::drain() {
    drained_since = seconds();
    draining = true;
    fprintf(stderr, "%zu requests to finish\n", answering.load());
    log.end = drained_since + options.drain;
    for (; answering > 0 && seconds() < log.end; usleep(50'000)) watch();
    if (answering == 0) return;
    fprintf(stderr, "%zu requests are abandoned\n", answering.load());
    for (const double end = seconds() + 5; answering > 0 && seconds() < end; usleep(50'000)) abandon();
    if (answering > 0) _exit(1); // (the library must not be stopped while it holds any)
}
void Server::abandon() {
    std::vector<std::shared_ptr<Reply>> replies;
    {
        std::lock_guard lock(mutex);
        for (Peer* peer : peers) {
            if (peer->exchange) replies.push_back(peer->exchange->reply);
            if (peer->looking) peer->looking->gone = 1;
            if (peer->phase == Peer::ANSWERING) shutdown(peer->fd, SHUT_RDWR);
        }
    }
    for (auto& reply : replies) {
        std::lock_guard lock(reply->mutex);
        reply->cancelled = true;
        if (reply->wake) reply->wake();
    }
}
