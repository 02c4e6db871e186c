// traffic.cpp: HTTP metrics in Prometheus's text format.
#include "base/error.h"
#include "server/http/traffic.h"

namespace server {

void Traffic::add(const std::string& method, const std::string& route, int status, double seconds) {
    std::lock_guard lock(mutex);
    requests[{method, route, status}]++;
    times[route].add(seconds);
}

std::string Traffic::text() {
    std::lock_guard lock(mutex);
    std::string out = "# TYPE http_requests_total counter\n";
    for (auto& [what, n] : requests) {
        auto& [method, route, status] = what;
        out += format("http_requests_total{method=\"%s\",handler=\"%s\",status=\"%d\"} %zu\n", method.c_str(),
                      route.c_str(), status, n);
    }
    out += "# TYPE http_request_duration_seconds histogram\n";
    for (auto& [route, h] : times)
        out += histogram_text("http_request_duration_seconds", format("handler=\"%s\"", route.c_str()), h);
    return out;
}

} // namespace server
