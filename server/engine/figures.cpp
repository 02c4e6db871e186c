// figures.cpp: sums, and their Prometheus text.
#include "base/error.h"
#include "server/engine/figures.h"

namespace server {

void Histogram::add(double x) {
    for (int i = 0; i < N; i++) buckets[i] += x <= BOUNDS[i];
    count++, sum += x;
}

void Histogram::add(const Histogram& more) {
    for (int i = 0; i < N; i++) buckets[i] += more.buckets[i];
    count += more.count, sum += more.sum;
}

std::string histogram_text(const char* name, const std::string& label, const Histogram& h) {
    std::string out;
    for (int i = 0; i < Histogram::N; i++)
        out += format("%s_bucket{%s,le=\"%g\"} %zu\n", name, label.c_str(), Histogram::BOUNDS[i], h.buckets[i]);
    out += format("%s_bucket{%s,le=\"+Inf\"} %zu\n", name, label.c_str(), h.count);
    return out + format("%s_sum{%s} %.9g\n", name, label.c_str(), h.sum) +
           format("%s_count{%s} %zu\n", name, label.c_str(), h.count);
}

void Figures::add(const Figures& f) {
    for (auto number : {&Figures::running, &Figures::waiting, &Figures::pages, &Figures::pages_used})
        this->*number += f.*number;
    for (auto number : {&Figures::prompt_tokens, &Figures::answer_tokens, &Figures::looked_up, &Figures::found,
                        &Figures::preempted, &Figures::stopped, &Figures::cut, &Figures::cancelled,
                        &Figures::forced, &Figures::disk_looked_up, &Figures::disk_found})
        this->*number += f.*number;
    for (auto times : {&Figures::first_token, &Figures::between_tokens, &Figures::whole})
        (this->*times).add(f.*times);
}

} // namespace server
