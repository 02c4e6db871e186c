// log.cpp: the thread that writes the lines.
#include "base/error.h"
#include "server/http/log.h"
#include <algorithm>
#include <cerrno>
#include <climits>
#include <poll.h>
#include <unistd.h>
#include <utility>

namespace server {

Log::~Log() {
    {
        std::lock_guard lock(mutex);
        closing = true;
        end = std::min(end.load(), seconds() + PATIENCE);
    }
    news.notify_one();
    thread.join();
}

void Log::write(std::string line) {
    std::lock_guard lock(mutex);
    if (bytes + line.size() > MOST) { lost++; return; }
    bytes += line.size();
    lines.push_back(std::move(line));
    news.notify_one();
}

void Log::write_all() {
    std::unique_lock lock(mutex);
    for (;;) {
        news.wait(lock, [&] { return closing || !lines.empty(); });
        if (lines.empty()) return;
        std::string some;
        while (!lines.empty() && some.size() + lines.front().size() <= PIPE_BUF) {
            bytes -= lines.front().size();
            some += lines.front();
            lines.pop_front();
        }
        if (const size_t dropped = lost; dropped > told && lines.empty()) {
            lines.push_back(format("{\"lines_dropped\": %zu}\n", dropped - std::exchange(told, dropped)));
            bytes += lines[0].size();
        }
        lock.unlock();
        const bool written = put(some);
        lock.lock();
        if (!written) return;
    }
}

bool Log::put(std::string_view rest) {
    while (!rest.empty()) {
        for (pollfd out = {to, POLLOUT, 0}; poll(&out, 1, closing ? 10 : 100) == 0;)
            if (closing && seconds() > end) return false;
        const ssize_t taken = ::write(to, rest.data(), rest.size());
        if (taken >= 0) rest.remove_prefix((size_t)taken);
        else if (errno != EINTR && errno != EAGAIN) return true; // lost: a full disk, or no reader
    }
    return true;
}

} // namespace server
