// workers.cpp: clients take turns.
#include "server/http/workers.h"
#include <algorithm>
#include <utility>

namespace server {

Workers::~Workers() {
    {
        std::lock_guard lock(mutex);
        closing = true;
    }
    news.notify_all();
    for (auto& t : threads) t.join();
}

void Workers::add(uint64_t who, std::function<void()> task) {
    std::lock_guard lock(mutex);
    lines[who].push_back(std::move(task));
    news.notify_one();
}

std::map<uint64_t, std::deque<std::function<void()>>>::iterator Workers::next() {
    auto it = lines.upper_bound(last);
    for (size_t n = lines.size(); n > 0; n--, ++it) {
        if (it == lines.end()) it = lines.begin();
        if (busy[it->first] < most) return it;
    }
    return lines.end();
}

void Workers::work() {
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

} // namespace server
