// watch.cpp: deadlines, lost peers, and shutdown.
#include "base/error.h"
#include "base/unfinished.h"
#include "server/engine/reply.h"
#include "server/http/exchange.h"
#include "server/http/log.h"
#include "server/http/server.h"
#include <algorithm>
#include <memory>
#include <mutex>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

namespace server {

constexpr double PROBE = 2;              // seconds between probes of a silent client
constexpr double DRAIN_FETCH = 10;       // seconds to fetch a complete answer during shutdown

// Called a few times a second: enforces deadlines and detects lost peers.
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
            // The engine or sender that holds the reply may have lost its core: it is checked in the next call, so that
            // no thread that needs our mutex (for a new connection, say) waits for it.
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

// Refuses new requests, closes idle connections, and finishes work in progress within options.drain.
void Server::drain() {
    drained_since = seconds();
    draining = true;
    fprintf(stderr, "%zu requests to finish\n", answering.load());
    log->end = drained_since + options.drain;
    for (; answering > 0 && seconds() < log->end; usleep(50'000)) watch();
    if (answering == 0) return;
    fprintf(stderr, "%zu requests are abandoned\n", answering.load());
    for (const double end = seconds() + 5; answering > 0 && seconds() < end; usleep(50'000)) abandon();
    if (answering > 0) leave(1); // the library must not be stopped while it holds any
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

} // namespace server
