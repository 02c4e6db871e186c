// budget.h: the memory that waits for clients, shared among them.
#pragma once
#include "base/error.h"
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>

namespace server {

// Memory that all clients share, and who holds how much of it. When it is used up, whoever holds the most of it loses
// one of its shares: the one that has held most for longest. So nobody can keep it from the others.
struct Budget {
    struct Share {
        uint64_t who = 0;             // a key at an address
        size_t bytes = 0;
        double since = seconds();
        std::function<void()> drop{}; // called when it is lost, with `mutex` held
        std::atomic<bool> lost{false};
    };
    size_t limit;
    std::mutex mutex{};
    std::set<Share*> shares{};        // that are not lost
    size_t used = 0;
    std::atomic<size_t> lost{0};      // shares, so far

    // n more bytes. False: the share is lost, maybe just now.
    bool add(Share& share, size_t n);
    bool add_locked(Share& share, size_t n);
    void remove(Share& share, size_t n);
    void remove(Share& share);

  private:
    void lose_one();
};

} // namespace server
