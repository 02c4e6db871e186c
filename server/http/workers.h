// workers.h: threads beside those of HTTP.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace server {

// Threads for long tasks. Each client has a line of waiting tasks. The lines take turns, and no client gets all
// threads.
struct Workers {
    explicit Workers(size_t n) : most(std::max<size_t>(1, n - 1)) {
        for (size_t i = 0; i < n; i++) threads.emplace_back([this] { work(); });
    }
    ~Workers();
    void add(uint64_t who, std::function<void()> task);

  private:
    const size_t most; // threads per client
    std::mutex mutex;
    std::condition_variable news;
    std::map<uint64_t, std::deque<std::function<void()>>> lines;
    std::map<uint64_t, size_t> busy;
    uint64_t last = 0; // the client served last
    bool closing = false;
    std::vector<std::thread> threads;

    std::map<uint64_t, std::deque<std::function<void()>>>::iterator next();
    void work();
};

} // namespace server
