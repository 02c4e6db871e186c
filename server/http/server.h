// server.h: connections, their limits, and the end.
//
// By libmicrohttpd: small, GNU, in every distribution, and made for this: a few threads with epoll, and connections
// that are suspended while there is nothing to send. It parses, times out what is idle and limits headers to 32 KB. A
// request's framing, of which it takes too much, is looked at in check_framing. watch() does the rest: whole requests
// and answers have a deadline, however evenly their bytes trickle, and a suspended connection is looked at, since its
// peer may be gone.
#pragma once
#include "base/error.h"
#include "server/api/filing.h"
#include "server/api/service.h"
#include "server/engine/budget.h"
#include "server/engine/desk.h"
#include "server/http/options.h"
#include "server/http/traffic.h"
#include "server/http/workers.h"
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

struct MHD_Daemon;

namespace server {

constexpr size_t ALL_BODIES = 256 << 20; // bytes of requests that are being read

struct Exchange;
struct Log;

// A connection, for watch(). `mutex` of the Server guards `exchange` and `probed`.
struct Peer {
    int fd;
    uint64_t address;                                    // a name for it; for IPv6, of its network
    enum Phase { WAITING, READING, WORKING, ANSWERING }; // WORKING: we are, on what it sent; it waits
    std::atomic<Phase> phase{WAITING};
    std::atomic<double> since{seconds()};
    Exchange* exchange = nullptr; // one that the engine works for,
    Exchange* looking = nullptr;  // ... or one that a worker has: its grammar, its question to documents
    double probed = 0;            // when it was last asked whether it is there, since it will send nothing more
    std::atomic<bool> over{false}; // the library has closed it, and says so when it next looks at it: maybe much later
    bool dropped = false;          // we have closed it, since others need its place

    // Nothing of a request has come, or not all of it.
    bool idle() const { return phase == WAITING || phase == READING; }
};

struct Server {
    const ServerOptions options;
    Desk& desk;
    Service service;                       // not to be touched before `ready`
    std::atomic<bool> ready{false}, draining{false};
    double drained_since = 0;              // main's, as watch() is
    std::atomic<size_t> answering{0};      // requests that came before the drain
    Budget bodies{ALL_BODIES};
    std::unique_ptr<Filing> filing;        // of --files
    std::unique_ptr<Log> log;
    Traffic traffic;
    Workers workers{std::min(4u, std::max(2u, std::thread::hardware_concurrency() / 2))};
    MHD_Daemon* daemon = nullptr;
    size_t most_peers = 0;                 // connections that the library has room for
    std::mutex mutex;
    std::set<Peer*> peers;

    Server(const ServerOptions& o, Desk& d);
    ~Server();
    void start();
    void stop();
    void watch();
    void drain();
    void abandon();
    int port() const; // that it listens on
    void make_room(const Peer* latest); // for connections, before there is none; `mutex` is held

    bool loopback() const { return options.host.compare(0, 4, "127.") == 0 || options.host == "::1"; }
};

} // namespace server
