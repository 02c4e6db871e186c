// budget.h: memory of data that waits for clients, shared among them.
#pragma once
#include "base/error.h"
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>

namespace server {

// Memory shared by all clients, with the bytes of each. When it is used up, the client with the most bytes loses one
// of its shares: that with the largest bytes x age. So no client can block the others.
struct Budget {
    struct Share {
        uint64_t who = 0;             // a key at an address
        size_t bytes = 0;
        double since = seconds();
        std::function<void()> drop{}; // called when the share is lost, with `mutex` held
        std::atomic<bool> lost{false};
    };
    size_t limit;
    std::mutex mutex{};
    std::set<Share*> shares{};        // not lost
    size_t used = 0;
    std::atomic<size_t> lost{0};      // shares lost so far

    // Adds n bytes. False: the share is lost, perhaps by this call.
    bool add(Share& share, size_t n);
    bool add_locked(Share& share, size_t n);
    void remove(Share& share, size_t n);
    void remove(Share& share);

  private:
    void lose_one();
};

} // namespace server
