// lines.cpp: waiting jobs: whose turn is next, and which answer is preempted.
#include "server/engine/scheduler.h"
#include <algorithm>
#include <climits>
#include <mutex>

namespace server {

void Scheduler::take_jobs() {
    std::vector<Job> jobs;
    std::vector<Window::Handed> handed;
    {
        std::lock_guard lock(desk.mutex);
        jobs.swap(window.inbox);
        handed.swap(window.handed);
        window.inside += jobs.size() + handed.size();
    }
    for (Job& job : jobs) {
        if (!waiting.count(job.line())) catch_up(job.line());
        join_line(std::make_unique<Sequence>(std::move(job), tokenizer, ++arrivals));
    }
    for (Window::Handed& one : handed) {
        std::unique_ptr<Sequence> q((Sequence*)one.release());
        q->rank = 0, q->arrival = ++arrivals, q->slot = -1, q->pending = 0; // as if it had never run
        q->pages.clear(), q->looked = Sequence::NOT;
        if (q->telling()) q->told.clear();
        if (!waiting.count(q->job.line())) catch_up(q->job.line());
        join_line(std::move(q));
    }
}

void Scheduler::catch_up(uint64_t key) {
    const std::map<uint64_t, size_t> now = at_work();
    uint64_t least = UINT64_MAX;
    for (auto& [other, n] : now) least = std::min(least, service[other]);
    for (auto& [other, line] : waiting) least = std::min(least, service[other]);
    if (!now.count(key) && least != UINT64_MAX) service[key] = std::max(service[key], least);
}

void Scheduler::join_line(std::unique_ptr<Sequence> q) {
    const uint64_t key = q->job.line();
    const Place place = {q->job.priority, q->arrival};
    if (q->job.adapter) q->job.adapter->waiting++;
    waiting[key][place] = std::move(q);
    most_in_lines = std::max(most_in_lines, ++in_lines);
}

std::unique_ptr<Sequence> Scheduler::leave_line(uint64_t key, Line::iterator it) {
    auto q = std::move(it->second);
    if (q->job.adapter) q->job.adapter->waiting--;
    Line& line = waiting[key];
    line.erase(it), in_lines--;
    if (line.empty()) waiting.erase(key);
    return q;
}

std::map<uint64_t, size_t> Scheduler::at_work() const {
    std::map<uint64_t, size_t> n;
    for (auto& [rank, q] : running) n[q->job.line()]++;
    return n;
}

std::map<uint64_t, Line>::iterator Scheduler::next_line(bool texts) {
    std::map<uint64_t, size_t> n = at_work();
    auto rank = [&](uint64_t key) { return std::pair(n[key], service[key]); };
    auto before = [&](auto& a, auto& b) { return rank(a.first) < rank(b.first); };
    const auto first_text = waiting.lower_bound(Job::TEXTS);
    const auto begin = texts ? first_text : waiting.begin(), end = texts ? waiting.end() : first_text;
    return begin == end ? waiting.end() : std::min_element(begin, end, before);
}

bool Scheduler::yield(bool texts) {
    constexpr uint64_t QUANTUM = 512, LEAST = 64; // LEAST: tokens per turn, so that each turn makes progress
    for (bool gave = false; ; gave = true) {
        const auto line = next_line(texts);
        if (line == waiting.end() || running.empty()) return gave;
        const uint64_t key = line->first;
        const size_t pages_wanted = line->second.begin()->second->pages_needed() + running.size();
        if ((texts || !free_slots[0].empty()) && pool.available() >= pages_wanted) return gave;
        std::map<uint64_t, size_t> n = at_work();
        const size_t own = n[key];
        if (!texts && free_slots[0].empty()) n.erase(n.lower_bound(Job::TEXTS), n.end()); // texts hold no such slot
        auto fewer = [&](auto& a, auto& b) {
            return std::pair(a.second, service[a.first]) < std::pair(b.second, service[b.first]);
        };
        const auto [most, answers] = *std::max_element(n.begin(), n.end(), fewer);
        auto last = running.end();
        for (auto it = running.begin(); it != running.end(); ++it)
            if (it->second->job.line() == most && (!it->second->job.pooled || it->second->left() > 0)) last = it;
        if (last == running.end()) return gave;
        const bool share = !texts && answers > own + 1;
        const bool turn = own == 0 && most != key && service[most] > service[key] + QUANTUM &&
                          last->second->answered() >= last->second->resumed + LEAST;
        if (!share && !turn) return gave;
        preempt(last);
    }
}

void Scheduler::drop_cancelled() {
    for (auto it = running.begin(); it != running.end();) {
        const auto here = it++;
        if (!here->second->job.reply->cancelled) continue;
        figures.cancelled++;
        leave(here);
    }
    // Waiting jobs hold no resources: they are scanned in portions, so that a step does not take longer.
    const Place front = {INT_MIN, 0};
    auto line = waiting.lower_bound(looked_at.first);
    if (line == waiting.end() || line->first != looked_at.first) looked_at.second = front;
    for (size_t n = std::min<size_t>(in_lines + waiting.size() + 1, 256); n > 0 && in_lines > 0; n--) {
        if (line == waiting.end()) line = waiting.begin(), looked_at.second = front;
        const uint64_t key = looked_at.first = line->first;
        const auto it = line->second.upper_bound(looked_at.second);
        if (it == line->second.end()) { // go to the next line
            ++line, looked_at = {key + 1, front};
            continue;
        }
        looked_at.second = it->first;
        if (!it->second->job.reply->cancelled) continue;
        figures.cancelled++;
        ended.push_back({key, it->second->prompt});
        leave_line(key, it);
        line = waiting.lower_bound(key);
        if (line == waiting.end() || line->first != key) looked_at.second = front;
    }
}

void Scheduler::leave(Running::iterator it) {
    Sequence& q = *it->second;
    vacate(q);
    if (q.job.adapter) q.job.adapter->running--;
    ended.push_back({q.job.line(), q.prompt});
    running.erase(it);
}

} // namespace server
