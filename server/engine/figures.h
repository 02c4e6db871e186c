// figures.h: counts and times of an engine, for /metrics.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace server {

// Durations, counted in Prometheus's cumulative buckets.
struct Histogram {
    static constexpr double BOUNDS[] = {.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120};
    static constexpr int N = sizeof BOUNDS / sizeof *BOUNDS;
    size_t buckets[N] = {}, count = 0;
    double sum = 0;
    void add(double x);
    void add(const Histogram& more);
};

// In Prometheus's text format.
std::string histogram_text(const char* name, const std::string& label, const Histogram& h);

struct Figures {
    size_t running = 0, waiting = 0, pages = 0, pages_used = 0; // current values
    uint64_t prompt_tokens = 0, answer_tokens = 0, looked_up = 0, found = 0, preempted = 0;
    uint64_t disk_looked_up = 0, disk_found = 0; // prompt tokens not in memory: looked for, read from the disk
    uint64_t stopped = 0, cut = 0, cancelled = 0; // answers, by how they ended
    uint64_t forced = 0; // tokens taken without sampling, since a form forced them
    Histogram first_token, between_tokens, whole;

    void add(const Figures& f);
};

} // namespace server
