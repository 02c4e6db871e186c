// workers.h: threads beside those of HTTP. Part of serve.cu.
#pragma once

// Threads for what takes long. Tasks wait in a line for each of those who asked, who take turns; none of them has all
// threads.
struct Workers {
    explicit Workers(size_t n) : most(std::max<size_t>(1, n - 1)) {
        for (size_t i = 0; i < n; i++) threads.emplace_back([this] { work(); });
    }
    ~Workers() {
        {
            std::lock_guard lock(mutex);
            closing = true;
        }
        news.notify_all();
        for (auto& t : threads) t.join();
    }
    void add(uint64_t who, std::function<void()> task) {
        std::lock_guard lock(mutex);
        lines[who].push_back(std::move(task));
        news.notify_one();
    }

  private:
    const size_t most; // threads that work for one
    std::mutex mutex;
    std::condition_variable news;
    std::map<uint64_t, std::deque<std::function<void()>>> lines;
    std::map<uint64_t, size_t> busy;
    uint64_t last = 0; // whose turn it was
    bool closing = false;
    std::vector<std::thread> threads;

    auto next() {
        auto it = lines.upper_bound(last);
        for (size_t n = lines.size(); n > 0; n--, ++it) {
            if (it == lines.end()) it = lines.begin();
            if (busy[it->first] < most) return it;
        }
        return lines.end();
    }
    void work() {
        std::unique_lock lock(mutex);
        for (;;) {
            auto line = lines.end();
            news.wait(lock, [&] { return (line = next()) != lines.end() || (closing && lines.empty()); });
            if (line == lines.end()) return;
            const uint64_t who = last = line->first;
            const std::function<void()> task = std::move(line->second.front());
            line->second.pop_front();
            if (line->second.empty()) lines.erase(line);
            busy[who]++;
            lock.unlock();
            task();
            lock.lock();
            if (--busy[who] == 0) busy.erase(who);
            news.notify_all();
        }
    }
};
