// desk.cpp: limits on jobs, and metrics of all engines.
#include "server/engine/desk.h"
#include "server/engine/job.h"
#include <algorithm>

namespace server {

void Desk::deliver(Reply& reply, Piece&& piece, double now) {
    if (reply.share && !unsent.add(*reply.share, bytes_of(piece))) reply.cancelled = true;
    std::lock_guard lock(reply.mutex);
    if (reply.first == 0) reply.first = now;
    reply.last = now;
    reply.left -= piece.finish != nullptr;
    reply.put(std::move(piece));
    if (reply.wake) reply.wake();
}

bool Desk::submit(std::vector<Job>&& jobs) {
    const auto given = std::stable_partition(jobs.begin(), jobs.end(), [](auto& job) { return !job.given; });
    for (auto job = given; job != jobs.end(); job++) deliver(*job->reply, Piece(*job->given), seconds());
    jobs.erase(given, jobs.end());
    if (jobs.empty()) return true;
    std::lock_guard lock(mutex);
    const bool pooled = jobs[0].pooled;
    Held& own = held[jobs[0].line()];
    const size_t all = pooled ? texts : answers(), most = pooled ? WAITING_TEXTS : limit;
    if (closed || (all + jobs.size() > most && own.jobs + jobs.size() > most / keys)) return false;
    size_t tokens = 0;
    for (const Job& job : jobs) tokens += pooled ? job.prompt.size() : 0;
    if (pooled && text_tokens + tokens > WAITING_TEXT_TOKENS && own.tokens + tokens > WAITING_TEXT_TOKENS / keys)
        return false;
    const Reply& reply = *jobs[0].reply;
    if (reply.share && reply.kept && !unsent.add(*reply.share, reply.kept)) return false;
    own.jobs += jobs.size(), own.tokens += tokens;
    texts += pooled ? jobs.size() : 0, text_tokens += tokens;
    for (Job& job : jobs) place(std::move(job));
    news.notify_all();
    return true;
}

void Desk::place(Job&& job) {
    Window& to = *windows[windows.size() > 1 ? (size_t)router.choose(job, windows) : 0];
    if (windows.size() > 1) to.count(job);
    to.inbox.push_back(std::move(job));
}

size_t Desk::answers() const {
    size_t there = 0;
    for (const Window* w : windows) there += w->inbox.size() + w->handed.size() + w->inside;
    return there - texts + lookups;
}

bool Desk::empty() const {
    return std::all_of(windows.begin(), windows.end(), [](const Window* w) {
        return w->inbox.empty() && w->handed.empty() && w->inside == 0;
    });
}

bool Desk::enter(uint64_t line) {
    std::lock_guard lock(mutex);
    if (closed || (answers() + 1 > limit && held[line].jobs + 1 > limit / keys)) return false;
    lookups++, held[line].jobs++;
    return true;
}

void Desk::leave(uint64_t line) {
    std::lock_guard lock(mutex);
    lookups--, held[line].jobs--;
}

void Desk::close() {
    std::lock_guard lock(mutex);
    closed = true;
    news.notify_all();
}

std::vector<Figures> Desk::look_at_each() const {
    std::vector<Figures> all;
    for (const Window* w : windows) all.push_back(*std::atomic_load(&w->figures));
    return all;
}

Figures Desk::look() const {
    Figures sum;
    for (const Figures& f : look_at_each()) sum.add(f);
    return sum;
}

} // namespace server
