// server.cpp: starts and stops the library, and holds its callbacks.
#include "base/file.h"
#include "server/api/refusal.h"
#include "server/http/exchange.h"
#include "server/http/log.h"
#include "server/http/server.h"
#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <map>
#include <microhttpd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace server {

Server::Server(const ServerOptions& o, Desk& d)
    : options(o), desk(d), log(std::make_unique<Log>(o.log)) {
    std::vector<std::string> keys;
    for (auto& k : options.keys) keys.push_back(k.key);
    if (!options.files.empty()) filing = std::make_unique<Filing>(options.files, keys);
}

Server::~Server() {
    if (daemon) stop();
}
int Server::port() const { return MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port; }

static Peer& peer_of(MHD_Connection* c) {
    return *(Peer*)MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static uint64_t name_of(const sockaddr* address) {
    if (address->sa_family == AF_INET) return fnv1a(&((const sockaddr_in*)address)->sin_addr, 4);
    return fnv1a(&((const sockaddr_in6*)address)->sin6_addr, 8); // a /64 network counts as one client
}

// Callbacks of the library. It is C: no exception may leave them.
static void on_connection(void* self, MHD_Connection* c, void** context, MHD_ConnectionNotificationCode what) {
    Server& server = *(Server*)self;
    std::lock_guard lock(server.mutex);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        Peer* peer = new Peer{MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
                              name_of(MHD_get_connection_info(c, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr)};
        server.peers.insert(peer);
        *context = peer;
        if (server.peers.size() > server.most_peers - server.most_peers / 8) server.make_room(peer);
        // Limits the kernel's send buffer. By default it takes MBs of an answer for a slow reader and reports no
        // progress for minutes, so that the reader seems idle.
        const int room = 1 << 17;
        setsockopt(peer->fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    } else {
        server.peers.erase((Peer*)*context);
        delete (Peer*)*context;
    }
}
// The library has room for a few hundred arguments after a `?`; with more it neither answers nor closes. None are
// needed.
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
    most_peers = connections;
    const unsigned threads = std::min(8u, std::max(2u, std::thread::hardware_concurrency() / 2));

    sockaddr_in v4 = {};
    sockaddr_in6 v6 = {};
    const bool six = options.host.find(':') != std::string::npos;
    v4.sin_family = AF_INET, v4.sin_port = htons((uint16_t)options.port);
    v6.sin6_family = AF_INET6, v6.sin6_port = htons((uint16_t)options.port);
    if (inet_pton(six ? AF_INET6 : AF_INET, options.host.c_str(),
                  six ? (void*)&v6.sin6_addr : (void*)&v4.sin_addr) != 1)
        DIE("--host %s: not an address", options.host.c_str());

    // (Before 0.9.77 "strict" only requires a Host, which we check, and sends the head of that refusal twice.)
    const int strict = MHD_VERSION >= 0x00097700;
    const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | (six ? MHD_USE_IPv6 : 0);
    daemon = MHD_start_daemon(
        flags, (uint16_t)options.port, nullptr, nullptr, &on_request, this,
        MHD_OPTION_NOTIFY_CONNECTION, &on_connection, this,
        MHD_OPTION_URI_LOG_CALLBACK, &on_request_line, this, MHD_OPTION_NOTIFY_COMPLETED, &on_completion, this,
        MHD_OPTION_SOCK_ADDR, six ? (sockaddr*)&v6 : (sockaddr*)&v4, MHD_OPTION_CONNECTION_LIMIT, connections,
        MHD_OPTION_CONNECTION_TIMEOUT, options.idle(), MHD_OPTION_THREAD_POOL_SIZE, threads,
        MHD_OPTION_STRICT_FOR_CLIENT, strict, MHD_OPTION_END);
    if (!daemon) DIE("--port %d on %s: %s", options.port, options.host.c_str(), strerror(errno));
}

// Closes the connections that have been idle for longest, of the address or key with the most idle ones. So the idle
// connections of one client do not keep others out.
void Server::make_room(const Peer* latest) {
    using Idle = std::vector<std::pair<double, Peer*>>; // idle since
    std::map<std::pair<bool, uint64_t>, Idle> groups;   // (by its key, or by its address)
    for (Peer* peer : peers) {
        if (peer == latest || !peer->idle() || peer->dropped) continue;
        groups[{false, peer->address}].push_back({peer->since, peer});
        if (peer->key) groups[{true, peer->key}].push_back({peer->since, peer});
    }
    Idle* most = nullptr;
    for (auto& [group, idle] : groups)
        if (!most || idle.size() > most->size()) most = &idle;
    if (!most) return;
    std::sort(most->begin(), most->end());
    most->resize(most->size() / 8 + 1);
    for (auto& [since, peer] : *most) peer->dropped = true, shutdown(peer->fd, SHUT_RDWR);
}

// Closes connections first: while libmicrohttpd (0.9.75) stops, a request that it refuses itself makes it dereference
// a null pointer.
void Server::stop() {
    const MHD_socket listening = MHD_quiesce_daemon(daemon);
    int empty = 0; // rounds without a connection: a thread may just be accepting one
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

} // namespace server
