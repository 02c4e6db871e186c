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

// Threads for what takes long. Tasks wait in a line for each of those who asked, who take turns; none of them has all
// threads.
struct Workers {
    explicit Workers(size_t n) : most(std::max<size_t>(1, n - 1)) {
        for (size_t i = 0; i < n; i++) threads.emplace_back([this] { work(); });
    }
    ~Workers();
    void add(uint64_t who, std::function<void()> task);

  private:
    const size_t most; // threads that work for one
    std::mutex mutex;
    std::condition_variable news;
    std::map<uint64_t, std::deque<std::function<void()>>> lines;
    std::map<uint64_t, size_t> busy;
    uint64_t last = 0; // whose turn it was
    bool closing = false;
    std::vector<std::thread> threads;

    std::map<uint64_t, std::deque<std::function<void()>>>::iterator next();
    void work();
};

} // namespace server
