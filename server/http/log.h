// log.h: the server's log, on standard output.
#pragma once
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

namespace server {

// Lines for stdout. Whoever has one never waits: a thread of its own writes them, and where stdout takes no more they
// are dropped and counted.
struct Log {
    static constexpr size_t MOST = 1 << 20; // bytes that wait
    static constexpr double PATIENCE = 1;   // seconds for what waits at the end, if nothing else sets a limit
    std::atomic<size_t> lost{0};            // lines
    std::atomic<double> end{INFINITY};      // until when it may hold the end up: then it writes what is taken at once

    explicit Log(int to) : to(to), thread([this] { write_all(); }) {}
    ~Log();
    void write(std::string line); // of less than PIPE_BUF bytes

  private:
    const int to;
    std::mutex mutex;
    std::condition_variable news;
    std::deque<std::string> lines;
    size_t bytes = 0, told = 0; // told: of those that are lost
    std::atomic<bool> closing{false};
    std::thread thread;

    void write_all();
    bool put(const std::string& some); // a pipe that is ready takes PIPE_BUF bytes at once
};

} // namespace server
