// traffic.h: HTTP metrics.
#pragma once
#include "server/engine/figures.h"
#include <map>
#include <mutex>
#include <string>
#include <tuple>

namespace server {

// Answers by route and status, for /metrics.
struct Traffic {
    void add(const std::string& method, const std::string& route, int status, double seconds);
    std::string text();

  private:
    std::mutex mutex;
    std::map<std::tuple<std::string, std::string, int>, size_t> requests; // status 0: the client left before the answer
    std::map<std::string, Histogram> times;
};

} // namespace server
