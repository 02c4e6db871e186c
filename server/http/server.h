// server.h: connections, their limits, and shutdown.
//
// By libmicrohttpd: small, GNU, in every distribution, and made for this: a few threads with epoll, and connections
// that are suspended while there is nothing to send. It parses, times out idle connections and limits headers to 32 KB.
// Its checks of a request's framing are too lax: check_framing repeats them. watch() does the rest: whole requests and
// answers have a deadline, however evenly their bytes trickle, and the peers of suspended connections are
// probed.
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

constexpr size_t ALL_BODIES = 256 << 20; // bytes of requests being read

struct Exchange;
struct Log;

// A connection, for watch(). The Server's `mutex` guards `exchange` and `probed`.
struct Peer {
    int fd;
    const uint64_t address;                              // its hash; for IPv6, of its network
    std::atomic<uint64_t> key{0};                        // the number of its latest request's key; 0: none
    enum Phase { WAITING, READING, WORKING, ANSWERING }; // WORKING: the server works on the request; the peer waits
    std::atomic<Phase> phase{WAITING};
    std::atomic<double> since{seconds()};
    Exchange* exchange = nullptr; // in an engine,
    Exchange* looking = nullptr;  // ... or with a worker: its grammar, its lookup in documents
    double probed = 0;            // time of the last probe, since it will send nothing more
    std::atomic<bool> over{false}; // closed by the library, which may report it much later
    bool dropped = false;          // closed by us, since others need its place

    // No complete request has arrived.
    bool idle() const { return phase == WAITING || phase == READING; }
};

struct Server {
    const ServerOptions options;
    Desk& desk;
    Service service;                       // not to be touched before `ready`
    std::atomic<bool> ready{false}, draining{false};
    double drained_since = 0;              // used by the main thread, as watch() is
    std::atomic<size_t> answering{0};      // requests from before the drain
    Budget bodies{ALL_BODIES};
    std::unique_ptr<Filing> filing;        // for --files
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
    int port() const; // the listening port
    void make_room(const Peer* latest); // frees connections before they run out; `mutex` is held

    bool loopback() const { return options.host.compare(0, 4, "127.") == 0 || options.host == "::1"; }
};

} // namespace server
