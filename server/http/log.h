// log.h: the server's log, on standard output. Part of serve.cu.
#pragma once

// Lines for stdout. Whoever has one never waits: a thread of its own writes them, and where stdout takes no more they
// are dropped and counted.
struct Log {
    static constexpr size_t MOST = 1 << 20; // bytes that wait
    static constexpr double PATIENCE = 1;   // seconds for what waits at the end, if nothing else sets a limit
    std::atomic<size_t> lost{0};            // lines
    std::atomic<double> end{INFINITY};      // until when it may hold the end up: then it writes what is taken at once

    explicit Log(int to) : to(to), thread([this] { write_all(); }) {}
    ~Log() {
        {
            std::lock_guard lock(mutex);
            closing = true;
            end = std::min(end.load(), seconds() + PATIENCE);
        }
        news.notify_one();
        thread.join();
    }
    void write(std::string line) { // of less than PIPE_BUF bytes
        std::lock_guard lock(mutex);
        if (bytes + line.size() > MOST) { lost++; return; }
        bytes += line.size();
        lines.push_back(std::move(line));
        news.notify_one();
    }

  private:
    const int to;
    std::mutex mutex;
    std::condition_variable news;
    std::deque<std::string> lines;
    size_t bytes = 0, told = 0; // told: of those that are lost
    std::atomic<bool> closing{false};
    std::thread thread;

    void write_all() {
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
    bool put(const std::string& some) { // a pipe that is ready takes PIPE_BUF bytes at once
        for (pollfd out = {to, POLLOUT, 0}; poll(&out, 1, closing ? 10 : 100) == 0;)
            if (closing && seconds() > end) return false;
        (void)!::write(to, some.data(), some.size());
        return true;
    }
};
