// log.h: the server's log, on standard output.
#pragma once
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace server {

// Lines for stdout. Callers never wait: a thread writes the lines. When stdout blocks, lines are dropped and
// counted.
struct Log {
    static constexpr size_t MOST = 1 << 20; // bytes waiting
    static constexpr double PATIENCE = 1;   // seconds to write the rest at the end, if there is no other limit
    std::atomic<size_t> lost{0};            // lines dropped
    std::atomic<double> end{INFINITY};      // of its time to delay the end: then it writes only what stdout takes

    explicit Log(int to) : to(to), thread([this] { write_all(); }) {}
    ~Log();
    void write(std::string line); // shorter than PIPE_BUF bytes

  private:
    const int to;
    std::mutex mutex;
    std::condition_variable news;
    std::deque<std::string> lines;
    size_t bytes = 0, told = 0; // told: dropped lines already reported
    std::atomic<bool> closing{false};
    std::thread thread;

    void write_all();
    bool put(std::string_view rest); // (a ready pipe takes PIPE_BUF bytes at once; a socket, a terminal maybe fewer)
};

} // namespace server
